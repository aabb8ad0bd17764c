"""The sender's connection: what is left of one that could not be made, and what goes over it unasked."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from asyncsync import ZMQWeightSyncScheme
from helpers.apis import Api, bare
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


@pytest.mark.parametrize(
    ("options", "asks"),
    [({}, False), ({"compress": "zstd"}, True), ({"delta": True}, True), ({"fanout": True}, True)],
    ids=["as it is", "compressed", "as a difference", "to all at once"],
)
async def test_half_a_mib_comes_unasked_where_it_comes_as_it_is(
    api: Api, options: dict[str, Any], asks: bool, unused_tcp_port: int
) -> None:
    source, model = nn.Linear(1 << 17, 1, bias=False), nn.Linear(1 << 17, 1, bias=False)
    bus = api.bus(f"tcp://127.0.0.1:{unused_tcp_port}", num_workers=1, **options)
    async with api.crew(1, scheme=api.scheme(bus=bus), source=source, models=[model]) as everybody:
        publisher = bare(everybody.sender).bus._link.publisher
        fetched, handle = [], publisher._begin_stream
        publisher._begin_stream = lambda *given: (fetched.append(given), handle(*given))
        nn.init.ones_(source.weight)
        await everybody.sender.send_async(source)
        assert bool(fetched) is asks
        assert bool((model.weight == 1).all())
