"""A worker's fast path (asyncsync/fastpath/worker.py) and all that interrupts it: nobody notices a difference."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import nn

import asyncsync.model.update
from asyncsync import PartialSendError
from asyncsync.wire import codec, messages
from helpers.apis import Api, bare, is_instant
from helpers.pairs import Clock, Crew, Model, fill, held, read, until

pytestmark = [pytest.mark.timeout(60), pytest.mark.schemes("copied")]


class Interrupt(BaseException):
    """As Ctrl-C, which would end the tests."""


def link_of(everybody: Crew, worker: int = 0) -> Any:
    return bare(everybody.receivers[worker]).bus._link


def fast_path_of(everybody: Crew, worker: int = 0) -> Any:
    return link_of(everybody, worker).subscriber.fast_path


async def begin(everybody: Crew) -> Any:
    """Some updates; then all workers have a fast path. That of the first."""
    for value in (1, 2, 3, 3, 3):  # (a PING may just have ended it)
        await everybody.sender.send_async(fill(everybody.source, value))
        if value == 3 and all(fast_path_of(everybody, worker) for worker in range(len(everybody.receivers))):
            return fast_path_of(everybody)
    raise AssertionError("no fast path")


async def send(everybody: Crew, *values: float) -> None:
    """Each arrives everywhere."""
    for value in values:
        await everybody.sender.send_async(fill(everybody.source, value))
        assert everybody.read == [{value}] * len(everybody.receivers)


@pytest.mark.requirement(193)
async def test_a_worker_takes_updates_on_the_fast_path_and_they_count_as_any_others(api: Api) -> None:
    """Of 193: the receiver's version."""
    async with api.crew(2) as everybody:
        await begin(everybody)
        subscriber, seen = link_of(everybody).subscriber, []
        received, version = subscriber.incoming.bytes_received, everybody.sender.version
        for value in range(10, 40):
            await send(everybody, value)
            seen.append(fast_path_of(everybody))
        assert sum(one is not seen[0] for one in seen) < 10  # only a PING, or a timer of the sender's, ends it
        receiver = bare(everybody.receivers[0])
        assert receiver.version == receiver.bus.version == everybody.sender.version == version + 30
        assert subscriber.incoming.bytes_received - received == 30 * subscriber.holdings.held.get("policy")[2].nbytes
        assert subscriber.pool.slabs <= 2
        if not is_instant(everybody.receivers[0]):
            assert read(await everybody.receivers[0].receive(timeout=5)) == {39}
        assert await everybody.receivers[0].receive(timeout=0) is None
        assert fast_path_of(everybody) is not None


async def test_receive_wakes_for_each_update_on_the_fast_path(api: Api) -> None:
    async with api.crew(1) as everybody:
        await begin(everybody)
        await api.receive(everybody.receivers[0], 5)
        for value in range(10, 20):
            if is_instant(everybody.receivers[0]):  # it waits for nothing
                await send(everybody, value)
                assert read(await api.receive(everybody.receivers[0], 5)) == {value}
                continue
            waiting = asyncio.create_task(everybody.receivers[0].receive(timeout=5))
            await asyncio.sleep(0.005)
            await send(everybody, value)
            assert read(await waiting) == {value}


async def test_a_reader_is_told_the_version_that_it_reads_on_the_fast_path(api: Api) -> None:
    async with api.crew(1) as everybody:
        await begin(everybody)
        for value in (10, 11, 12):
            await send(everybody, value)
            with held(everybody.receivers[0]):
                assert bare(everybody.receivers[0]).bus.version == everybody.sender.version
                assert everybody.read == [{value}]


@pytest.mark.requirement(194)
async def test_an_update_waits_for_the_reader_that_it_finds_on_the_fast_path(api: Api) -> None:
    """Of 194: hold()."""
    async with api.crew(1) as everybody:
        await begin(everybody)
        for value in (10, 11, 12):
            with held(everybody.receivers[0]):
                sending = asyncio.create_task(everybody.sender.send_async(fill(everybody.source, value)))
                await until(lambda: link_of(everybody).gate.pending)
                assert everybody.read == [{value - 1 if value > 10 else 3}]
            await sending
            assert everybody.read == [{value}]
            await begin_again(everybody, value)


async def begin_again(everybody: Crew, value: float) -> None:
    await send(everybody, value, value, value)
    assert fast_path_of(everybody) is not None


def new_object(module: nn.Module) -> None:
    module.first = nn.Parameter(module.first.detach().clone())


def new_memory(module: nn.Module) -> None:
    module.first.data = module.first.data.clone()


def transposed(module: nn.Module) -> None:
    module.inner.weight.data = torch.zeros(module.inner.weight.shape[::-1]).t()


def new_child(module: nn.Module) -> None:
    module.inner = nn.Linear(4, 3)


@pytest.mark.parametrize("change", [new_object, new_memory, transposed, new_child])
async def test_a_model_that_changes_on_the_fast_path_gets_its_weights_where_they_are_now(api: Api, change: Any) -> None:
    async with api.crew(2) as everybody:
        await begin(everybody)
        model = everybody.models[0]
        old = {name: (tensor, tensor.detach().clone()) for name, tensor in model.named_parameters()}
        change(model)
        await send(everybody, 10, 11, 12)
        present = set(map(id, model.parameters()))
        for tensor, before in old.values():
            assert id(tensor) in present or torch.equal(tensor, before)


class Twins(Model):
    """With two Parameters of one shape."""

    def __init__(self, value: float = -1.0) -> None:
        super().__init__(value)
        self.twin = nn.Parameter(torch.full((64,), float(value)))


async def test_parameters_that_are_tied_on_the_fast_path_do_not_get_two_values(api: Api) -> None:
    async with api.crew(1, source=Twins(), models=[Twins()]) as everybody:
        await begin(everybody)
        model = everybody.models[0]
        model.twin = model.first
        await send(everybody, 10, 11, 12)
        with torch.no_grad():
            fill(everybody.source, 20).twin.fill_(21)
        with pytest.raises(PartialSendError, match="are tied in this model"):
            await everybody.sender.send_async(everybody.source)
        assert everybody.read == [{12}]
        model.twin = nn.Parameter(model.first.detach().clone())
        await send(everybody, 30, 31, 32)


@pytest.mark.requirement(194, 195)
@pytest.mark.parametrize("how", ["dtype", "shape", "gone", "freed"])
async def test_a_model_that_fits_no_more_on_the_fast_path_is_left_alone_and_the_sender_told(api: Api, how: str) -> None:
    """Of 194: or not at all. Of 195: a worker that refuses."""
    async with api.crew(2) as everybody:
        await begin(everybody)
        module = everybody.models[1]
        own, data = module.first, module.first.data
        if how == "dtype":
            module.scale.data = module.scale.data.view(torch.int32)  # the same memory
        elif how == "shape":
            own.data = own.data.view(8, 8)
        elif how == "gone":
            del module.first
        else:
            size = data.untyped_storage().nbytes()
            data.untyped_storage().resize_(0)
        with pytest.raises(PartialSendError) as caught:
            await everybody.sender.send_async(fill(everybody.source, 9))
        assert set(caught.value.failed) == {1}
        assert read(module.inner) == {3}
        if how == "dtype":
            module.scale.data = module.scale.data.view(torch.float32)
        elif how == "freed":
            data.untyped_storage().resize_(size)
        elif how == "gone":
            module.first = own
        else:
            own.data = data
        await send(everybody, 10, 11, 12)


async def test_a_backward_over_weights_that_the_fast_path_has_replaced_fails(api: Api) -> None:
    async with api.crew(1) as everybody:
        await begin(everybody)
        weight = everybody.models[0].inner.weight
        product = (weight * weight).sum()
        await send(everybody, 10)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()  # type: ignore[no-untyped-call]


async def test_what_receive_is_still_copying_from_is_not_written_by_the_fast_path(api: Api) -> None:
    async with api.crew(1) as everybody:
        await begin(everybody)
        kept: list[tuple[Any, bytes]] = []
        for value in range(10, 16):
            await send(everybody, value)
            slab = link_of(everybody).subscriber.holdings.held.get("policy")[2].retain()
            kept.append((slab, bytes(slab.memory)))
            assert all(bytes(one.memory) == content for one, content in kept)
        for slab, _ in kept:
            slab.release()
        await begin_again(everybody, 20)


async def test_whatever_else_a_worker_hears_or_does_ends_its_fast_path(api: Api) -> None:
    async with api.crew(1) as everybody:
        await begin(everybody)
        assert read(await everybody.receivers[0].fetch()) == {3}
        assert fast_path_of(everybody) is None
        await begin_again(everybody, 10)
        link, fast = link_of(everybody), fast_path_of(everybody)
        newest, other = fast._newest, fast._next
        await everybody.receivers[0].shutdown()
        assert link.subscriber.fast_path is None
        assert newest.references == other.references == 0


@pytest.mark.requirement(202)
async def test_a_packet_that_no_sender_sends_is_dropped_on_the_fast_path(api: Api) -> None:
    """Of 202: malformed, and changes nothing else."""
    async with api.crew(1) as everybody:
        await begin(everybody)
        link, fast = link_of(everybody), fast_path_of(everybody)
        subscriber = link.subscriber
        packets: list[bytes] = []
        receive = link.side_channel.receive
        link.side_channel.receive = lambda packet: packets.append(bytes(packet)) or receive(packet)
        await send(everybody, 10)
        again, _ = codec.decode([packets[-1][1:]])
        assert isinstance(again, messages.Again)
        assert again.descriptor is not None

        def packet(**changes: Any) -> memoryview:
            fields = {name: getattr(again, name) for name in ("epoch", "serial", "since", "version", "descriptor")}
            return memoryview(b"\0" + codec.encode(messages.Again(**{**fields, **changes})))

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
            assert fast.take(one, 0.0) is None
        unknown = packet(serial=serial, since=since, version=again.version + 1, descriptor=b"x" * 40)
        with pytest.raises(ValueError, match="another transport"):
            fast.take(unknown, 0.0)
        assert (subscriber.reports.serial, everybody.read) == (since, [{10}])
        await send(everybody, 11, 12)


async def test_what_goes_wrong_on_the_fast_path_goes_the_long_way(api: Api) -> None:
    async with api.crew(1) as everybody:
        await begin(everybody)
        link = link_of(everybody)
        (transport,) = link._fetches.transports.values()
        transport._slot_window = 32  # a user's own attribute, by bad luck
        fast_path_of(everybody)._windows.clear()
        await send(everybody, 10, 11, 12)
        assert link.failure is None


@pytest.mark.requirement(194)
@pytest.mark.parametrize("before", [True, False], ids=["nothing copied", "half copied"])
async def test_an_update_that_is_interrupted_on_the_fast_path_is_applied_whole(
    api: Api, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 194: whole, whatever interrupts it."""
    async with api.crew(1) as everybody:
        await begin(everybody)
        link, caught = link_of(everybody), []
        receive, copy = link.side_channel.receive, asyncsync.model.update.copy_bytes

        def receiving(packet: memoryview) -> None:
            try:
                receive(packet)
            except Interrupt as interrupt:
                caught.append(interrupt)

        def copying(destinations: list[memoryview], sources: list[memoryview]) -> None:
            monkeypatch.undo()
            if not before:
                copy(destinations[:2], sources[:2])
            raise Interrupt

        link.side_channel.receive = receiving
        monkeypatch.setattr(asyncsync.model.update, "copy_bytes", copying)
        slabs = link.subscriber.pool.slabs
        await everybody.sender.send_async(fill(everybody.source, 10))
        assert len(caught) == 1
        assert everybody.read == [{10}]
        assert bare(everybody.receivers[0]).version == everybody.sender.version
        await send(everybody, 11, 12)
        assert link.subscriber.pool.slabs == slabs


@pytest.mark.requirement(194)
@pytest.mark.parametrize("changed", [False, True])
async def test_who_reads_after_an_interrupt_on_the_fast_path_reads_a_whole_model(
    api: Api, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quicker than the long way, in another thread, and with a Parameter that was moved just then."""
    async with api.crew(1) as everybody:
        await begin(everybody)
        link, model, read_by_thread = link_of(everybody), everybody.models[0], []
        receive, take_in, copy = link.side_channel.receive, link._take_in, asyncsync.model.update.copy_bytes

        def receiving(packet: memoryview) -> None:
            with contextlib.suppress(Interrupt):
                receive(packet)

        def copying(destinations: list[memoryview], sources: list[memoryview]) -> None:
            monkeypatch.undo()
            copy(destinations[:2], sources[:2])
            raise Interrupt

        def taking_in(packet: memoryview) -> None:
            if not read_by_thread:
                if changed:
                    model.last.data = model.last.data.clone()
                reader = threading.Thread(target=lambda: read_by_thread.append(model()))
                reader.start()
                reader.join()
            take_in(packet)

        link.side_channel.receive, link._take_in = receiving, taking_in
        monkeypatch.setattr(asyncsync.model.update, "copy_bytes", copying)
        await everybody.sender.send_async(fill(everybody.source, 10))
        assert read_by_thread == [{10}]
        await send(everybody, 11, 12)


async def test_an_interrupt_before_the_answer_of_the_fast_path_does_not_lose_it(api: Api) -> None:
    async with api.crew(1) as everybody:
        await begin(everybody)
        link, interrupts = link_of(everybody), [Interrupt()]
        receive, repeated = link.side_channel.receive, link._acknowledge

        def receiving(packet: memoryview) -> None:
            with contextlib.suppress(Interrupt):
                receive(packet)

        def interrupted(done: bytes, now: float) -> None:
            if interrupts:
                raise interrupts.pop()
            repeated(done, now)

        link.side_channel.receive, link._acknowledge = receiving, interrupted
        with Clock(0.1):  # nothing has to be found out by a PING
            await send(everybody, 10)
        assert not interrupts
        await send(everybody, 11, 12)
