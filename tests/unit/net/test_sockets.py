"""Sockets with keys, and of broadcasts; and that nothing which has come to an event loop's waits for ever."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from asyncsync.net.keys import Admission, Certificate, Credentials
from asyncsync.net.rendezvous import SenderConnection
from asyncsync.net.zmq_private import Context
from asyncsync.net.zmq_socket import Broadcast, LoopSocket, dealer, router, subscriber
from helpers.pairs import until


@pytest.mark.requirement(203)
async def test_a_server_socket_whose_handler_is_gone_lets_nobody_in() -> None:
    """libzmq's default would be to let in everybody who knows the server's key."""
    server, client, errors = Certificate.draw(), Certificate.draw(), list[BaseException]()
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as one,
        zmq.Context() as far,
        far.socket(zmq.DEALER) as two,
    ):
        one.linger = two.linger = 0
        admission = Admission(context, server, errors.append)
        admission.protect(one)
        admission.close()
        port = one.bind_to_random_port("tcp://127.0.0.1")
        client.configure_client(two, server.public)
        two.connect(f"tcp://127.0.0.1:{port}")
        two.send(b"hello")
        assert not await asyncio.to_thread(one.poll, 300)


@pytest.mark.requirement(203)
async def test_a_subscriber_that_was_refused_tries_again_and_says_so_and_who_has_no_key_hears_nothing(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq gives up for good: the sender may have the list later than the worker has the port."""
    errors: list[BaseException] = []
    received: list[bytes] = []
    context, own, there = Context(), Certificate.draw(), set[bytes]()
    admission = Admission(context, Certificate.draw(), errors.append)
    broadcast = Broadcast(context, "tcp://127.0.0.1:0", there, admission.protect, errors.append)
    main, stranger = dealer(context), subscriber(context)
    stranger.subscribe(b"")
    stranger.connect(f"tcp://127.0.0.1:{broadcast.port}")
    credentials = Credentials(own, (admission.server.public,))
    session: Any = SimpleNamespace(nonce=b"n" * 16)
    connection = SenderConnection(
        main, print, lambda frames: received.append(frames[0].bytes), f"tcp://127.0.0.1:{unused_tcp_port}", session,
        lambda: credentials, None, (print, print), errors.append,
    )  # fmt: skip
    try:
        connection.subscribe(broadcast.port)
        await until(lambda: admission.refused["a key that is not listed"] >= 1)
        admission.issued[own.public] = own
        await until(lambda: there == {b"n" * 16})
        broadcast.send([b"to all"])
        await until(lambda: received == [b"to all"])
        assert not stranger.poll(100)
        assert "refused this key" in caplog.text
        assert f"127.0.0.1, whose public key is {own.public.decode()}: a key that is not listed" in caplog.text
        assert not errors
    finally:
        connection.close()
        stranger.close()
        broadcast.close()
        admission.close()
        context.destroy(0)


async def test_an_error_while_a_key_is_checked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no client would get in any more, and nobody would know why."""

    def client(key: bytes) -> None:
        raise RuntimeError(f"cannot look {key.decode()} up")

    errors: list[BaseException] = []
    context, own = Context(), Certificate.draw()
    admission = Admission(context, Certificate.draw(), errors.append)
    monkeypatch.setattr(admission, "client", client)
    server, worker = router(context), dealer(context)
    try:
        admission.protect(server)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        own.configure_client(worker, admission.server.public)
        worker.connect(f"tcp://127.0.0.1:{port}")
        await until(lambda: [str(error) for error in errors] == [f"cannot look {own.public.decode()} up"])
    finally:
        admission.close()
        server.close()
        worker.close()
        context.destroy(0)


# -- on an event loop --------------------------------------------------------------------------------------------------


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
