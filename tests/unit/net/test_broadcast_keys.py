"""Keys on sockets: without what checks them, and on what is sent to all workers at once."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from asyncsync import Bus, ZMQWeightSyncScheme
from asyncsync.bus.sender import SenderLink
from asyncsync.net.broadcast import Broadcast, Subscription
from asyncsync.net.dialing import Dialer
from asyncsync.net.introduction import Introduction
from asyncsync.net.keys import Admission, Credentials, KeyPair
from asyncsync.net.zmq_private import Context
from asyncsync.net.zmq_socket import dealer, subscriber
from helpers import planted
from helpers.pairs import Model, fill, receiver_of, until


@pytest.mark.requirement(203)
async def test_a_server_socket_whose_handler_is_gone_lets_nobody_in() -> None:
    """libzmq's default would be to let in everybody who knows the server's key."""
    server, client = KeyPair.draw(), KeyPair.draw()
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as one,
        zmq.Context() as far,
        far.socket(zmq.DEALER) as two,
    ):
        one.linger = two.linger = 0
        server.serve(one)
        port = one.bind_to_random_port("tcp://127.0.0.1")
        client.join(two, server.public)
        two.connect(f"tcp://127.0.0.1:{port}")
        two.send(b"hello")
        assert not await asyncio.to_thread(one.poll, 300)


@pytest.mark.requirement(203)
async def test_a_subscriber_that_was_refused_tries_again_and_says_so(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq gives up for good: the sender may have the list later than the worker has the port."""

    errors: list[BaseException] = []
    received: list[bytes] = []
    context, own, there = Context(), KeyPair.draw(), set[bytes]()
    admission = Admission(context, KeyPair.draw(), errors.append)
    broadcast = Broadcast(context, "tcp://127.0.0.1:0", there, admission.guard, errors.append)
    main = dealer(context)
    credentials = Credentials(own, (admission.server.public,))
    dialer = Dialer(main, (f"tcp://127.0.0.1:{unused_tcp_port}",), lambda: credentials, errors.append)
    subscription = Subscription(
        context, dialer, b"n" * 16, lambda frames: received.append(frames[0].bytes), errors.append
    )
    try:
        subscription.follow(broadcast.port)
        await until(lambda: admission.refused["a key that is not listed"] >= 1)
        admission.admit(own.public, 0)
        await until(lambda: there == {b"n" * 16})
        broadcast.send([b"to all"])
        await until(lambda: received == [b"to all"])
        assert "refused this key" in caplog.text
        assert not errors
    finally:
        subscription.close()
        dialer.close()
        main.close()
        broadcast.close()
        admission.close()
        context.destroy(0)


@pytest.mark.requirement(203)
async def test_what_is_sent_to_all_is_for_those_who_have_a_key() -> None:

    bus = Bus(fanout="pull", num_workers=3)
    scheme = ZMQWeightSyncScheme(bus=bus)
    scheme.init_on_sender(model_id="policy", model=(source := Model(1)))
    link = bus._open_sender("127.0.0.1")
    assert isinstance(link, SenderLink)
    assert link.introductions is not None
    receivers = []
    for index in range(3):
        receiver = receiver_of(scheme, index, Model())
        receiver.bus._introduction = Introduction.decode(link.introductions(index).encode())
        receivers.append(receiver)
    with zmq.Context() as context:
        stranger = subscriber(context)
        stranger.subscribe(b"")
        stranger.connect(f"tcp://127.0.0.1:{link.outgoing.broadcast.port}")  # type: ignore[union-attr]
        try:
            await asyncio.gather(scheme.connect(timeout=10), *(r.connect(timeout=10) for r in receivers))
            await until(lambda: len(planted.subscribed(scheme)) == 3)
            await scheme.send_async()
            with planted.counted(scheme) as sent:
                await scheme.send_async(fill(source, 2))
            assert sent == ["Cast"]
            assert not stranger.poll(100)
        finally:
            stranger.close()
            for one in (*receivers, scheme):
                await one.shutdown()
