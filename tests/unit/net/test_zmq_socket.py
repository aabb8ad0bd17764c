"""ZeroMQ sockets on an event loop: nothing that has come waits for ever, whatever strikes while it is taken in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncsync.net.zmq_socket import LoopSocket, dealer, router
from helpers.pairs import until


class Strike(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("error", [None, Strike], ids=["undisturbed", "interrupted"])
async def test_what_has_come_behind_a_message_is_taken_in_whatever_becomes_of_that(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    raised: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    context = zmq.Context()
    trainer, worker = router(context), dealer(context)
    trainer.bind(f"ipc://{tmp_path}/bus")
    worker.connect(f"ipc://{tmp_path}/bus")
    texts = [b"first", b"second", b"third"]
    for text in texts:
        worker.send(text)
    assert trainer.poll(5000)
    got: list[bytes] = []
    crashed: list[BaseException] = []

    def receive(frames: list[Any]) -> None:
        got.append(frames[-1].bytes)
        if error is not None and len(got) == 1:
            raise error

    socket = LoopSocket(trainer, receive, crashed.append)
    await until(lambda: got == texts)
    assert [type(one) for one in raised] == ([] if error is None else [error])
    assert not crashed
    socket.close()
    worker.close()
    context.term()
