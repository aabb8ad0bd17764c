"""Workers that are introduced to their sender: what travels is encrypted, and nobody takes a place without its key."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from asyncsync import (
    ClosedError,
    DistributedWeightSyncScheme,
    NotConnected,
    ProtocolError,
    WeightSyncScheme,
    ZMQTransport,
    sync,
)
from asyncsync.net.address import address_towards, own_address, tcp_endpoint
from asyncsync.net.introduction import Introduction, Introductions
from asyncsync.net.keys import KeyPair
from asyncsync.runtime import loop_thread
from asyncsync.schemes.introduced import IntroducedCore
from asyncsync.wire import codec, messages
from helpers.pairs import Clock, Model, crew, fill, passed_on, receiver_of, until

BOARD: dict[str, dict[int, Introduction]] = {}


class BoardScheme(IntroducedCore, WeightSyncScheme):
    """Introductions hang on a board in this process, by the bus's name."""

    board: ClassVar[dict[str, dict[int, Introduction]]] = BOARD

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        return ZMQTransport()

    async def _host(self, timeout: float) -> str:
        return "127.0.0.1"

    async def _introduce(self, introductions: Introductions, timeout: float) -> None:
        assert self._bus.num_workers is not None
        made = {worker: introductions(worker) for worker in range(self._bus.num_workers)}
        self.board[self._bus._uid] = made

    async def _find_sender(self, worker: int, timeout: float) -> Introduction:
        while True:
            if (found := self.board.get(self._bus._uid, {}).get(worker)) is not None:
                return found
            await asyncio.sleep(0.005)


def board(workers: int = 1) -> Any:
    """A sender and workers that have been introduced to it, connected."""
    return crew(workers, scheme=BoardScheme(), source=Model(1.0))


@pytest.mark.requirement(211)
async def test_workers_that_were_given_no_address_are_introduced_and_follow() -> None:
    async with board(2) as everybody:
        sender = everybody.sender
        await sender.send_async(fill(everybody.source, 2.0), timeout=10)
        assert everybody.read == [{2.0}, {2.0}]
        await everybody.receivers[1].shutdown()
        async with receiver_of(sender, 1, model := Model()) as again:  # it finds the same introduction
            await again.connect(timeout=10)
            assert model() == {2.0}


class Waiting(BoardScheme):
    """Whose introductions never come to hang there."""

    async def _introduce(self, introductions: Introductions, timeout: float) -> None:
        await asyncio.Event().wait()


async def test_a_shutdown_ends_a_sender_that_is_still_introducing_its_workers_at_once() -> None:
    sender = Waiting(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    with pytest.raises(NotConnected, match=r"could not be introduced within 0\.05 s"):
        await sender.connect(timeout=0.05)
    connecting = asyncio.create_task(sender.connect(timeout=30))
    await until(lambda: bool(sender._meetings))
    with Clock(0.2), pytest.raises(ClosedError, match="was shut down"):
        await asyncio.gather(sender.shutdown(), connecting)


async def test_workers_come_and_go_without_end_and_those_that_are_there_keep_their_introductions() -> None:
    sender = BoardScheme(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    async with sender:
        await sender._open(10)
        admission, there = sender._introductions().admission, {0}
        introductions = Introductions(admission, there, 3)
        introductions.endpoint = sender._introductions().endpoint
        before = len(admission.given)
        made = {worker: introductions(worker) for worker in range(50)}

        def good() -> list[int]:
            return [worker for worker, one in made.items() if admission.client(one.own.public) is not None]

        assert good() == [0, 48, 49]
        assert introductions(0) == made[0]
        assert introductions(1) != made[1], "another one, for a worker that was away for long"
        assert len(admission.given) == before + 3
        there |= {1, 49}
        made[2] = introductions(2)
        assert good() == [0, 2, 49]
        assert len(admission.given) == before + 4, "of those that are there, all"


async def test_keys_are_not_pickled_and_are_drawn_for_each_connection() -> None:
    drawn = set()
    for _ in range(2):
        async with board() as (sender, _, _):
            introduction = BOARD[sender._bus._uid][0]
            drawn |= {introduction.server, introduction.own.public}
            assert passed_on(sender)._bus._introduction is None
            assert introduction.own.secret.decode() not in repr(introduction)
    assert len(drawn) == 4


@asynccontextmanager
async def stranger(introduction: Introduction, **changes: Any) -> AsyncIterator[zmq.Socket[bytes]]:
    """A socket that connects with these keys; ``own=None``: with none."""
    changed = dataclasses.replace(introduction, **changes)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if changed.own is not None:
            changed.own.join(socket, changed.server)
        socket.connect(changed.endpoint)
        yield socket


HELLO = messages.Hello(0, b"n" * 16, 1, 0, "", 0, None, {"policy": 0})


@pytest.mark.requirement(203)
@pytest.mark.parametrize("what", ["no key", "a key that is not listed", "the key of another server"])
async def test_who_has_no_key_that_was_given_out_gets_no_answer_and_changes_nothing(what: str) -> None:
    changes = {
        "no key": {"own": None},
        "a key that is not listed": {"own": KeyPair.draw()},
        "the key of another server": {"server": KeyPair.draw().public},
    }[what]
    async with board() as everybody:
        sender = everybody.sender
        async with stranger(BOARD[sender._bus._uid][0], **changes) as socket:
            socket.send(codec.encode(HELLO), zmq.NOBLOCK)
            if "not listed" in what:
                refused = sender._introductions().admission.refused
                await until(lambda: refused[what] > 0)
            await sender.send_async(fill(everybody.source, 2.0), timeout=10)
            assert not socket.poll(100)
        assert everybody.read == [{2.0}]
        assert set(sender._bus._sender().publisher.peers) == {0}


@pytest.mark.requirement(203)
async def test_a_key_is_good_for_its_own_worker_only() -> None:
    async with board(2) as everybody:
        sender = everybody.sender
        link = sender._bus._sender()
        async with stranger(BOARD[sender._bus._uid][1]) as socket:
            socket.send(codec.encode(HELLO))
            await until(lambda: any("worker 0, but has worker 1's key" in why for why in link.dropped))
            await until(lambda: socket.poll(0) > 0)
            answer, _ = codec.decode(socket.recv_multipart())
            assert isinstance(answer, messages.Bye), "and it is told why"
            assert answer.reason == "refused"
            assert not socket.poll(100)
        await sender.send_async(fill(everybody.source, 2.0), timeout=10)
        assert everybody.read == [{2.0}, {2.0}]


def test_addresses_are_those_by_which_others_reach_this_host() -> None:
    assert address_towards("127.0.0.1") == address_towards("localhost") == "127.0.0.1"
    mine = own_address()
    assert address_towards(mine) == mine
    assert tcp_endpoint("::1", 5) == "tcp://[::1]:5"
    assert tcp_endpoint(mine, "*") == f"tcp://{mine}:*"
    with pytest.raises(NotConnected, match=r"'no-such-host\.invalid' is not found"):
        address_towards("no-such-host.invalid")


def test_an_introduction_survives_its_journey() -> None:
    made = Introduction("tcp://10.0.0.1:5555", KeyPair.draw().public, KeyPair.draw())
    assert Introduction.decode(made.encode()) == made


@given(st.binary(max_size=200))
def test_anything_else_is_no_introduction(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Introduction.decode(data)


async def test_a_refused_init_leaves_the_place_where_workers_find_the_sender() -> None:
    sender = DistributedWeightSyncScheme(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    with pytest.raises(ValueError):
        sender.init_on_sender(model_id="policy", model=Model(1.0), num_workers=-1)
    async with sender:
        for _ in range(2):  # the second time, a worker that was started again
            async with receiver_of(sender, 0, model := Model()) as scheme:
                await asyncio.gather(sender.connect(timeout=10), sender.connect(timeout=10), scheme.connect(timeout=10))
                assert model() == {1.0}
            with pytest.raises(RuntimeError, match="connected"):
                sender.init_on_sender(model_id="policy", model=Model(1.0))


async def test_a_call_that_is_refused_while_another_connects_ends_nothing() -> None:
    sender = sync.DistributedWeightSyncScheme(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    with sender, receiver_of(sender, 0, Model()) as scheme:
        connecting = asyncio.create_task(asyncio.to_thread(scheme.connect, timeout=10))
        await until(lambda: loop_thread._current is not None and bool(loop_thread._current.open))
        with pytest.raises(NotConnected):
            scheme.receive(timeout=0)
        await asyncio.to_thread(sender.connect, timeout=10)
        await connecting
        assert scheme.bus in loop_thread._current.open.values(), "else the loop ends where there is no other bus"
        await asyncio.to_thread(sender.send, Model(2.0), timeout=10)
        assert (scheme.closed, scheme.version) == (False, sender.version)
