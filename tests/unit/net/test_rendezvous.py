"""How workers and their sender find each other; what travels is encrypted, and nobody takes a place without its key."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
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
from asyncsync.net.endpoint import address_towards, own_address, tcp_endpoint
from asyncsync.net.keys import Admission, Certificate
from asyncsync.net.rendezvous import Introduction, Introductions, MeetingPlace
from asyncsync.runtime import threads
from asyncsync.wire import messages
from helpers.pairs import Clock, Model, crew, fill, passed_on, receiver_of, until


class BoardPlace(MeetingPlace):
    """Questions and answers hang on a board in this process, by the bus's name; ``None`` there ends it."""

    boards: ClassVar[dict[str, BoardPlace]] = {}

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.questions: asyncio.Queue[int | None] = asyncio.Queue()
        self.answers: dict[int, bytes] = {}

    async def open(self) -> None:
        self.boards[self.name] = self

    def ask(self, worker: int, stop: threading.Event) -> bytes:
        if (board := self.boards.get(self.name)) is None or board._answering is None:
            raise NotConnected("there is no board yet")
        board._answering.get_loop().call_soon_threadsafe(board.questions.put_nowait, worker)
        while not stop.wait(0.005):
            if worker in board.answers:
                return board.answers.pop(worker)
        raise NotConnected("there is no answer yet")

    async def next_question(self) -> tuple[int, int]:
        if (worker := await self.questions.get()) is None:
            raise RuntimeError("the board has ended")
        return worker, worker

    async def answer(self, key: int, answer: bytes) -> None:
        self.answers[key] = answer

    async def end(self) -> None:
        self.boards.pop(self.name, None)


class BoardScheme(WeightSyncScheme):
    """Both sides meet at a board."""

    _is_introduced = True

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        return ZMQTransport()

    async def _address_for_workers(self) -> str:
        return "127.0.0.1"

    def _meeting_place(self) -> BoardPlace:
        return BoardPlace(self.bus.uid)


def introductions_of(sender: Any) -> Introductions:
    found: Introductions = sender.bus.trainer_link().introductions
    return found


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


@pytest.mark.requirement(197)
async def test_a_worker_turns_to_the_sender_that_answers_next_at_the_same_place() -> None:
    """It has another address, and other keys."""
    async with board() as everybody:
        following = receiver_of(everybody.sender, 0, model := Model(), reconnect=True)
        successor = passed_on(everybody.sender)
        await everybody.receivers[0].shutdown()
        await following.connect(timeout=10)
        before = introductions_of(everybody.sender)
        await everybody.sender.shutdown()
    successor.init_on_sender(model_id="policy", model=Model(5.0), num_workers=1)
    async with successor, following:
        await successor.connect(timeout=20)
        assert model() == {5.0}
        assert introductions_of(successor).endpoint != before.endpoint


async def test_a_meeting_place_that_has_ended_is_made_anew_when_the_sender_connects_again() -> None:
    async with board() as everybody:
        place = everybody.sender._place
        place.questions.put_nowait(None)
        await until(lambda: not place.is_hosted)
        await everybody.sender.connect(timeout=10)
        assert place.is_hosted
        await everybody.receivers[0].shutdown()
        async with receiver_of(everybody.sender, 0, model := Model()) as again:
            await again.connect(timeout=10)
            assert model() == {1.0}


async def test_who_forgets_a_senders_introductions_ends_its_answers() -> None:
    place, asked = BoardPlace("forgotten"), Introductions("tcp://127.0.0.1:1", FakeAdmission(), ())
    await place.host(asked)
    found = await place.find(3)
    assert found.endpoint == asked.endpoint
    assert await place.find(3) == found
    del asked
    gc.collect()
    await until(lambda: not place.is_hosted)
    await place.close()
    assert not BoardPlace.boards


class FakeAdmission(Admission):
    """Lets everybody in, without a socket."""

    def __init__(self) -> None:
        self.server = Certificate.draw()
        self.issued = {}


class Unopened(BoardPlace):
    """A board that is never put up."""

    async def open(self) -> None:
        await asyncio.Event().wait()


class Waiting(BoardScheme):
    def _meeting_place(self) -> BoardPlace:
        return Unopened(self.bus.uid)


async def test_a_shutdown_ends_a_sender_that_is_still_introducing_its_workers_at_once() -> None:
    sender = Waiting(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    with pytest.raises(NotConnected, match=r"could not be introduced within 0\.05 s"):
        await sender.connect(timeout=0.05)
    connecting = asyncio.create_task(sender.connect(timeout=30))
    await until(lambda: bool(sender._meeting_waits))
    with Clock(0.2), pytest.raises(ClosedError, match="was shut down"):
        await asyncio.gather(sender.shutdown(), connecting)


async def test_workers_come_and_go_without_end_and_those_that_are_there_keep_their_introductions() -> None:
    sender = BoardScheme(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    async with sender:
        await sender._host_meeting_place(10)
        made_there, there = introductions_of(sender), {0}
        admission = made_there.admission
        introductions = Introductions(made_there.endpoint, admission, there, 3)
        before = len(admission.issued)
        made = {worker: introductions(worker) for worker in range(50)}

        def good() -> list[int]:
            return [worker for worker, one in made.items() if admission.client(one.own.public) is not None]

        assert good() == [0, 48, 49]
        assert introductions(0) == made[0]
        assert introductions(1) != made[1], "another one, for a worker that was away for long"
        assert len(admission.issued) == before + 3
        there |= {1, 49}
        made[2] = introductions(2)
        assert good() == [0, 2, 49]
        assert len(admission.issued) == before + 4, "of those that are there, all"


async def test_keys_are_not_pickled_and_are_drawn_for_each_connection() -> None:
    drawn = set()
    for _ in range(2):
        async with board() as (sender, _, _):
            introduction = introductions_of(sender)(0)
            drawn |= {introduction.server, introduction.own.public}
            assert passed_on(sender).bus.introduction is None
            assert introduction.own.secret.decode() not in repr(introduction)
    assert len(drawn) == 4


@asynccontextmanager
async def stranger(introduction: Introduction, **changes: Any) -> AsyncIterator[zmq.Socket[bytes]]:
    """A socket that connects with these keys; ``own=None``: with none."""
    changed = dataclasses.replace(introduction, **changes)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if changed.own is not None:
            changed.own.configure_client(socket, changed.server)
        socket.connect(changed.endpoint)
        yield socket


HELLO = messages.Hello(0, b"n" * 16, 1, 0, "", 0, None, {"policy": 0})


@pytest.mark.requirement(203)
@pytest.mark.parametrize("what", ["no key", "a key that is not listed", "the key of another server"])
async def test_who_has_no_key_that_was_given_out_gets_no_answer_and_changes_nothing(what: str) -> None:
    changes = {
        "no key": {"own": None},
        "a key that is not listed": {"own": Certificate.draw()},
        "the key of another server": {"server": Certificate.draw().public},
    }[what]
    async with board() as everybody:
        sender = everybody.sender
        async with stranger(introductions_of(sender)(0), **changes) as socket:
            socket.send(messages.encode(HELLO), zmq.NOBLOCK)
            if "not listed" in what:
                refused = introductions_of(sender).admission.refused
                await until(lambda: refused[what] > 0)
            await sender.send_async(fill(everybody.source, 2.0), timeout=10)
            assert not socket.poll(100)
        assert everybody.read == [{2.0}]
        assert set(sender.bus.trainer_link().machine.peers) == {0}


@pytest.mark.requirement(203)
async def test_a_key_is_good_for_its_own_worker_only() -> None:
    async with board(2) as everybody:
        sender = everybody.sender
        link = sender.bus.trainer_link()
        async with stranger(introductions_of(sender)(1)) as socket:
            socket.send(messages.encode(HELLO))
            await until(lambda: any("worker 0, but has worker 1's key" in why for why in link.dropped))
            await until(lambda: socket.poll(0) > 0)
            answer, _ = messages.decode(socket.recv_multipart())
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
    made = Introduction("tcp://10.0.0.1:5555", Certificate.draw().public, Certificate.draw())
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
        await until(lambda: threads._current is not None and bool(threads._current.open))
        with pytest.raises(NotConnected):
            scheme.receive(timeout=0)
        await asyncio.to_thread(sender.connect, timeout=10)
        await connecting
        assert scheme.bus._shutdown in threads._current.open, "else the loop ends where there is no other bus"
        await asyncio.to_thread(sender.send, Model(2.0), timeout=10)
        assert (scheme.closed, scheme.version) == (False, sender.version)
