"""The sender's connection: what is left of one that could not be made."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from asyncsync import ZMQWeightSyncScheme
from helpers.pairs import Model


async def test_a_connect_that_fails_after_its_socket_was_watched_leaves_no_reader_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []

    def watch(self: Any, descriptor: int, *args: Any) -> None:
        watched.append(descriptor)
        add_reader(self, descriptor, *args)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOBUFS, "no side channel")

    loop = asyncio.get_running_loop()
    add_reader = type(loop).add_reader
    monkeypatch.setattr(type(loop), "add_reader", watch)
    monkeypatch.setattr("asyncsync.bus.sender.SideChannels", fail)
    async with ZMQWeightSyncScheme(endpoint=f"ipc://{tmp_path}/bus") as scheme:
        scheme.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with pytest.raises(OSError, match="no side channel"):
            await scheme.connect(timeout=5)
        assert watched
        assert not any(map(loop.remove_reader, watched))
        assert os.listdir(tmp_path) == []
