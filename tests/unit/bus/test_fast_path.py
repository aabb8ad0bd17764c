"""The fast paths (asyncsync/bus/fast_path.py): what ends a worker's, and what it drops; when a sender's is taken."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import asyncsync.bus.publishing as fast_path
import asyncsync.model.update
from asyncsync.bus.fast_path import TrainerFastPath
from asyncsync.weights.slab import SourceCache
from asyncsync.wire import messages
from helpers.apis import Api, bare
from helpers.machines import Desk, flat
from helpers.pairs import Clock, Crew, fill, held

pytestmark = [pytest.mark.timeout(60), pytest.mark.schemes("copied")]


class Interrupt(BaseException):
    """As Ctrl-C, which would end the tests."""


def link_of(everybody: Crew) -> Any:
    return bare(everybody.receivers[0]).bus.link


def fast_path_of(everybody: Crew) -> Any:
    return link_of(everybody).machine.fast_path


def interrupt_copying(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """The next update is interrupted when so many of its tensors have been copied."""
    copy = asyncsync.model.update.copy_bytes

    def copying(destinations: list[memoryview], sources: list[memoryview]) -> None:
        monkeypatch.undo()
        copy(destinations[:after], sources[:after])
        raise Interrupt

    monkeypatch.setattr(asyncsync.model.update, "copy_bytes", copying)


def interruptible(link: Any) -> list[Interrupt]:
    """What interrupts the side channel's packets is kept here, and ends nothing else."""
    caught: list[Interrupt] = []
    receive = link.side_channel.receive

    def receiving(packet: memoryview) -> None:
        try:
            receive(packet)
        except Interrupt as interrupt:
            caught.append(interrupt)

    link.side_channel.receive = receiving
    return caught


@asynccontextmanager
async def begun(api: Api) -> AsyncIterator[Crew]:
    """One worker, some updates later: it has a fast path."""
    async with api.crew(1) as everybody:
        for value in (1, 2, 3, 3, 3):  # (a PING may just have ended it)
            await everybody.sender.send_async(fill(everybody.source, value))
            if value == 3 and fast_path_of(everybody):
                break
        assert fast_path_of(everybody), "no fast path"
        yield everybody


async def send(everybody: Crew, *values: float) -> None:
    """Each arrives everywhere."""
    for value in values:
        await everybody.sender.send_async(fill(everybody.source, value))
        assert everybody.read == [{value}] * len(everybody.receivers)


async def test_what_receive_is_still_copying_from_is_not_written_by_the_fast_path(api: Api) -> None:
    async with begun(api) as everybody:
        kept: list[tuple[Any, bytes]] = []
        for value in range(10, 16):
            await send(everybody, value)
            slab = link_of(everybody).machine.holdings.updates.get("policy")[2].retain()
            kept.append((slab, bytes(slab.memory)))
            assert all(bytes(one.memory) == content for one, content in kept)
        for slab, _ in kept:
            slab.release()
        await send(everybody, 20, 20, 20)
        assert fast_path_of(everybody) is not None


async def test_a_shutdown_lets_go_of_what_the_fast_path_has(api: Api) -> None:
    async with begun(api) as everybody:
        fast = fast_path_of(everybody)
        newest, other = fast._newest, fast._next
        await everybody.receivers[0].shutdown()
        assert newest.references == other.references == 0


@pytest.mark.requirement(202)
async def test_a_packet_that_no_sender_sends_is_dropped_on_the_fast_path(api: Api) -> None:
    async with begun(api) as everybody:
        link, fast = link_of(everybody), fast_path_of(everybody)
        machine = link.machine
        packets: list[bytes] = []
        receive = link.side_channel.receive
        link.side_channel.receive = lambda packet: packets.append(bytes(packet)) or receive(packet)
        await send(everybody, 10)
        again, _ = messages.decode([packets[-1][1:]])
        assert isinstance(again, messages.Again)
        assert again.descriptor is not None

        def packet(**changes: Any) -> memoryview:
            fields = {name: getattr(again, name) for name in ("epoch", "serial", "since", "version", "descriptor")}
            return memoryview(b"\0" + messages.encode(messages.Again(**{**fields, **changes})))

        serial, since = again.serial + 1, again.serial
        wrong = [
            packet(),  # once more
            packet(serial=serial, since=since, version=again.version),  # no newer
            packet(serial=serial, since=since - 1, version=again.version + 1),
            packet(serial=since, since=since, version=again.version + 1),
            packet(serial=serial, since=since, version=again.version + 1, epoch=(1, 2)),
            packet(serial=serial, since=since, version=again.version + 1)[:-1],
            memoryview(bytes(packet(serial=serial, since=since, version=again.version + 1)) + b"x"),
            packet(serial=serial, since=since, version=again.version + 1)[:30],
        ]
        for one in wrong:
            assert fast.try_apply([one[1:]], 0.0) is None
        right = packet(serial=serial, since=since, version=again.version + 1)[1:]
        for payload in ([memoryview(b"")], [memoryview(b"x")] * 2):
            assert fast.try_apply([right, *payload], 0.0) is None
        unknown = packet(serial=serial, since=since, version=again.version + 1, descriptor=b"x" * 40)
        with pytest.raises(ValueError, match="another transport"):
            fast.try_apply([unknown[1:]], 0.0)
        assert (machine.serial, everybody.read) == (since, [{10}])
        await send(everybody, 11, 12)


async def test_what_goes_wrong_on_the_fast_path_goes_the_long_way(api: Api) -> None:
    async with begun(api) as everybody:
        link = link_of(everybody)
        (transport,) = link.transports.values()
        transport.slot_window = 32  # a user's own attribute, by bad luck
        fast_path_of(everybody)._windows.clear()
        await send(everybody, 10, 11, 12)
        assert link.failure is None


@pytest.mark.requirement(194)
@pytest.mark.parametrize("copied", [0, 2])
async def test_an_update_that_is_interrupted_on_the_fast_path_is_applied_whole(
    api: Api, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(api) as everybody:
        link = link_of(everybody)
        caught = interruptible(link)
        interrupt_copying(monkeypatch, after=copied)
        slabs = link.machine.pool.slabs
        await everybody.sender.send_async(fill(everybody.source, 10))
        assert len(caught) == 1
        assert everybody.read == [{10}]
        assert bare(everybody.receivers[0]).version == everybody.sender.version
        await send(everybody, 11, 12)
        assert link.machine.pool.slabs == slabs


@pytest.mark.requirement(194)
@pytest.mark.parametrize("changed", [False, True])
async def test_who_reads_after_an_interrupt_on_the_fast_path_reads_a_whole_model(
    api: Api, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quicker than the long way, in another thread, and with a Parameter that was moved just then."""
    async with begun(api) as everybody:
        link, model, read_by_thread = link_of(everybody), everybody.models[0], []
        take_in = link.machine.receive
        interruptible(link)

        def taking_in(*message: Any) -> None:
            if not read_by_thread:
                if changed:
                    model.last.data = model.last.data.clone()
                reader = threading.Thread(target=lambda: read_by_thread.append(model()))
                reader.start()
                reader.join()
            take_in(*message)

        link.machine.receive = taking_in
        interrupt_copying(monkeypatch, after=2)
        await everybody.sender.send_async(fill(everybody.source, 10))
        assert read_by_thread == [{10}]
        await send(everybody, 11, 12)


async def test_an_interrupt_before_the_answer_of_the_fast_path_does_not_lose_it(api: Api) -> None:
    async with begun(api) as everybody:
        link, interrupts = link_of(everybody), [Interrupt()]
        repeated = link._send_answer
        interruptible(link)

        def interrupted(applied: bytes) -> None:
            if interrupts:
                raise interrupts.pop()
            repeated(applied)

        link._send_answer = interrupted
        with Clock(0.1):  # nothing has to be found out by a PING
            await send(everybody, 10)
        assert not interrupts
        await send(everybody, 11, 12)


def test_a_slab_that_cannot_be_had_costs_none() -> None:
    """Neither at the beginning, nor where libzmq still reads the slab that is to be written."""
    desk = Desk(1)
    desk.join(0)
    desk.machine.mark_assembled("policy")
    version = desk.publish(1)
    desk.applied(0, policy=version)
    target, peers, left = desk.machine.targets.models["policy"][None].slab, [desk.machine.peers[0]], [1]

    def acquire() -> Any:
        if not left:
            raise MemoryError("no memory for a slab")
        return left.pop() and desk.pool.acquire(target.layout)

    given = desk.machine, "policy", SourceCache(target.layout), target, acquire, peers, lambda *message: True
    steady = TrainerFastPath(*given)
    piece = steady._next.export(0, 8)
    with pytest.raises(MemoryError):
        steady.publish(flat(2), 0.0)
    assert steady._next.references == 1
    steady.end()
    with pytest.raises(MemoryError):
        TrainerFastPath(*given)
    del piece
    assert (desk.pool.used, target.references) == ({target}, 1)


# -- the sender's ------------------------------------------------------------------------------------------------------


async def begin(everybody: Crew) -> Any:
    """Some updates; then the fast path is on. The sender's link."""
    link = bare(everybody.sender).bus.link
    for value in (1, 2, 3, 3, 3):  # (a timer may just end it)
        await everybody.sender.send_async(fill(everybody.source, value))
        if value == 3 and link.fast_path is not None:
            return link
    raise AssertionError("no fast path")


async def test_a_status_is_right_amid_it_and_it_leaves_no_lease(api: Api) -> None:
    async with api.crew(2) as everybody:
        link = await begin(everybody)
        with held(everybody.receivers[0]):
            assert everybody.sender.status()[0].version == everybody.sender.version
        assert not link.end_fast_path().leases.of


async def test_a_slot_that_a_lost_worker_may_be_reading_is_not_written(api: Api) -> None:
    async with api.crew(2) as everybody:
        link = await begin(everybody)
        bus = bare(everybody.sender).bus

        def lent() -> Any:
            return link.end_fast_path().targets.models["policy"][None].slab.retain()

        slab = bus.read_link(lent)
        content = bytes(slab.memory)
        for value in range(10, 16):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
            assert bytes(slab.memory) == content
        bus.read_link(slab.release)


@pytest.mark.schemes("some")
async def test_a_sender_that_has_been_busy_pauses_before_it_wakes_the_workers(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the first of them takes its core, and the others hear of the update when that one has finished with it."""
    pauses: list[float] = []
    async with api.crew(2) as everybody:
        monkeypatch.setattr(fast_path.time, "sleep", pauses.append)
        for busy, seconds in ((0, 10.0), (1, -1.0), (1, 10.0)):
            monkeypatch.setattr(fast_path, "BUSY_SECONDS", seconds)
            await everybody.sender.send_async(fill(everybody.source, 1))
            assert len(pauses) == busy
