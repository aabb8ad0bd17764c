"""Publishing takes a snapshot, keeps two slabs however many workers there are, and never holds up the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch
from tensordict import TensorDict

from asyncsync import ZMQWeightSyncScheme
from helpers import planted
from helpers.pairs import receiver_of
from helpers.processes import Remote, Schemes, Worker, eventually, value_of

pytestmark = pytest.mark.timeout(90)

EAGER, INLINE, THREAD = 1000, 2 << 18, 8 << 18  # float32 elements: 4 kB; 2 MiB; 8 MiB, packed by the work thread
STALL = 0.020  # seconds, promised
PERIOD = 0.001  # seconds; uvloop's clock has no finer ones


@pytest.mark.promise(1)
@pytest.mark.both_loops
@pytest.mark.parametrize("numel", [EAGER, INLINE, THREAD], ids=["eager", "inline", "thread"])
async def test_what_arrives_is_what_the_parameters_held_when_publish_returned(schemes: Schemes, numel: int) -> None:
    sender, receivers = await schemes.connected(numel, workers=8)
    for value in range(2, 12):
        version = await sender.publish(sender.model.fill(value))
        sender.model.fill(-value)  # an optimizer step, the moment publish returns
        await sender.wait_version(version, timeout=20)
        for receiver in receivers:
            assert receiver.model.value == value
            weights = await receiver.receive(0)
            assert value_of(weights) == value
            assert receiver.version == version
    assert sender.bus._link.pool.peak <= 2
    await eventually(lambda: sender.bus._link.pool.slabs <= 2)
    assert all(r.bus._link.subscriber.pool.slabs <= 2 for r in receivers)


async def test_the_same_with_eight_processes(schemes: Schemes, start: Callable[..., Remote]) -> None:
    sender = schemes.sender(INLINE, num_workers=8)
    workers = [start(Worker, uvloop=i % 2 == 1) for i in range(8)]
    await asyncio.gather(sender.connect(), *(w.connect(sender, i, INLINE) for i, w in enumerate(workers)))
    for value in range(2, 22):
        version = await sender.publish(sender.model.fill(value))
        sender.model.fill(-value)
        await sender.wait_version(version, timeout=20)
        assert await asyncio.gather(*(w.receive(0) for w in workers)) == [value] * 8
    assert await asyncio.gather(*(w.value() for w in workers)) == [21] * 8
    assert sender.bus._link.pool.peak <= 2


@pytest.mark.requirement(218)
async def test_what_a_receiver_has_returned_stays_as_it_is(schemes: Schemes) -> None:
    sender, [receiver] = await schemes.connected(THREAD)
    kept = []
    for value in range(2, 8):
        await sender.send_async(sender.model.fill(value))
        kept += [await receiver.receive(), await receiver.fetch(), receiver.weights]
    assert [value_of(weights) for weights in kept] == [value for value in range(2, 8) for _ in range(3)]
    for weights in kept:
        weights.zero_()
    assert receiver.model.value == 7
    assert value_of(await receiver.fetch()) == 7


@pytest.mark.requirement(198)
async def test_publishing_without_waiting_keeps_the_memory_bounded(schemes: Schemes) -> None:
    sender, receivers = await schemes.connected(INLINE, workers=3)
    for value in range(2, 202):
        await sender.publish(sender.model.fill(value))
        sender.model.fill(-1)
        if value % 7 == 0:
            await asyncio.sleep(0)
    await sender.wait_version(201, timeout=20)
    assert [r.model.value for r in receivers] == [201] * 3
    # The target, its successor, and what each of the three was receiving: behind by different versions.
    assert sender.bus._link.pool.peak <= 5
    await eventually(lambda: sender.bus._link.pool.slabs <= 2)


class Stalls:
    """How long the loop has been kept from running a coroutine that always wants to run.

    Attributes:
        longest: by the clock, in seconds.
        blocked: the same without the time that the loop's thread waited for a core, which others had.
    """

    longest = 0.0
    blocked = 0.0

    async def tick(self) -> None:
        queued, last = _queued(), time.perf_counter()
        while True:
            await asyncio.sleep(PERIOD)
            before, now, after = _queued(), time.perf_counter(), _queued()
            gap = now - last - PERIOD
            self.longest = max(self.longest, gap)
            self.blocked = max(self.blocked, gap - (after - queued))  # all that may lie between the two clock readings
            queued, last = before, now


def _queued() -> float:
    """Seconds that this thread has been ready to run without a core to run on."""
    with open("/proc/thread-self/schedstat") as schedstat:
        return int(schedstat.read().split()[1]) * 1e-9


@asynccontextmanager
async def stalls() -> AsyncIterator[Stalls]:
    watched = Stalls()
    task = asyncio.create_task(watched.tick())
    await asyncio.sleep(0.01)
    watched.longest = watched.blocked = 0.0
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.requirement(191, 189)
@pytest.mark.both_loops
async def test_the_loop_is_never_blocked_while_256_mib_are_sent(
    schemes: Schemes, start: Callable[..., Remote], record_property: Callable[[str, object], None]
) -> None:
    numel = 64 << 20
    torch.set_num_threads(2)  # as a trainer has them; the fixture puts back what was before
    before = set(threading.enumerate())
    sender = schemes.sender(numel, num_workers=2)
    workers = [start(Worker), start(Worker)]
    await asyncio.gather(sender.connect(), *(w.connect(sender, i, numel) for i, w in enumerate(workers)))
    longest, blocked = [], []
    names: set[str] = set()
    for value in (2, 3, 4):
        sender.model.fill(value)
        async with stalls() as watched:
            sending = asyncio.create_task(sender.send_async())
            while not sending.done():
                names |= {f"{type(t).__module__}:{t.name}" for t in set(threading.enumerate()) - before}
                await asyncio.wait([sending], timeout=0.005)
            assert await sending == value
        longest.append(watched.longest)
        blocked.append(watched.blocked)
    record_property("longest stalls of the trainer's loop, ms", [s * 1e3 for s in longest])
    record_property("… without waiting for a core, ms", [s * 1e3 for s in blocked])
    assert await asyncio.gather(*(w.value() for w in workers)) == [4, 4]
    assert max(blocked) < 5 * STALL
    # The thread for large copies, and pyzmq's; ZeroMQ's own I/O thread is none of Python's.
    ours = {n for n in names if not n.startswith("zmq.")}
    assert {"threading:asyncsync-pack"} <= ours <= {"threading:asyncsync-pack", "threading:asyncsync-copying"}
    assert sender.bus._link.pool.peak <= 2


@pytest.mark.requirement(189)
async def test_small_updates_need_no_thread_at_all(schemes: Schemes) -> None:
    before = set(threading.enumerate())
    sender, receivers = await schemes.connected(INLINE, workers=2)
    for value in range(2, 12):
        await sender.send_async(sender.model.fill(value))
        for receiver in receivers:
            await receiver.receive()
    assert {t for t in set(threading.enumerate()) - before if not type(t).__module__.startswith("zmq.")} == set()


@pytest.mark.requirement(194)
@pytest.mark.both_loops
@pytest.mark.parametrize("cancelled", [False, True], ids=["", "cancelled meanwhile"])
async def test_a_snapshot_that_fails_half_way_changes_nobody(
    schemes: Schemes, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Large weights are sent while they are being packed."""
    sender, receivers = await schemes.connected(THREAD, workers=2)
    peers = sender.bus._link.caught_up().peers.values()
    half_sent = threading.Event()

    sent = sum(p.bytes_sent for p in peers)
    with monkeypatch.context() as patch:
        planted.pack_half(patch, half_sent)
        publishing = asyncio.create_task(sender.publish(sender.model.fill(2)))
        await eventually(lambda: sum(p.bytes_sent for p in peers) >= sent + THREAD * 4)
        if cancelled:
            publishing.cancel()
        half_sent.set()
        with pytest.raises(asyncio.CancelledError if cancelled else MemoryError):
            await publishing
    assert all(r.model.value == 1 and r.version == 1 for r in receivers)
    assert value_of(await receivers[0].fetch(10)) == 1, "what was there before is the target again"
    await sender.send_async(sender.model.fill(3))
    assert all(r.model.value == 3 for r in receivers)
    assert [value_of(await r.receive(0)) for r in receivers] == [3, 3]
    await eventually(lambda: sender.bus._link.pool.slabs <= 2)


async def test_small_weights_beside_large_ones_are_sent_when_they_are_packed() -> None:
    """Each worker gets its own: one of them much, the other little, which rides in the instruction."""
    sizes = (THREAD, EAGER)
    sender = ZMQWeightSyncScheme(num_workers=2)
    sender.init_on_sender(model_id="policy")
    receivers = [receiver_of(sender, i, {"w": torch.zeros(n)}) for i, n in enumerate(sizes)]
    await asyncio.gather(sender.connect(timeout=10), *(r.connect(timeout=10) for r in receivers))
    for value in range(1, 15):
        await sender.send_async({i: TensorDict({"w": torch.full((n,), float(value))}) for i, n in enumerate(sizes)})
        assert [r.model["w"].unique().tolist() for r in receivers] == [[value], [value]]
    await asyncio.gather(sender.shutdown(), *(r.shutdown() for r in receivers))


@pytest.mark.requirement(4)
async def test_fetching_beside_a_trainer_that_publishes_all_the_time_is_never_confused(schemes: Schemes) -> None:
    """Of 4: pull, and each fetch has the version that is current then."""
    sender, [receiver] = await schemes.connected(EAGER)

    async def publish() -> None:
        for value in range(2, 1500):
            await sender.publish(sender.model.fill(value))
            await asyncio.sleep(0)

    publishing = asyncio.create_task(publish())
    seen = []
    while not publishing.done():
        seen.append(value_of(await receiver.fetch(10)))
    await publishing
    assert seen == sorted(seen)
    assert len(set(seen)) > 10


@pytest.mark.requirement(194)
async def test_of_several_slabs_none_is_delivered_if_one_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = ZMQWeightSyncScheme(num_workers=2)
    sender.init_on_sender(model_id="policy", weights={"w": torch.ones(THREAD)})
    receivers = [receiver_of(sender, i, {"w": torch.zeros(THREAD)}) for i in range(2)]
    await asyncio.gather(sender.connect(timeout=10), *(r.connect(timeout=10) for r in receivers))
    packed = []

    def fail_the_second() -> None:
        packed.append(1)
        if len(packed) == 2:
            raise MemoryError("no page for it")

    with monkeypatch.context() as patch:
        planted.pack_by(patch, fail_the_second)
        with pytest.raises(MemoryError):
            await sender.publish({i: {"w": torch.full((THREAD,), 7.0)} for i in range(2)})
    assert len(packed) == 2
    for receiver in receivers:
        assert value_of(await receiver.fetch(10)) == 1
    assert [(r.version, r.model["w"].unique().tolist()) for r in receivers] == [(1, [1]), (1, [1])]
    await asyncio.gather(sender.shutdown(), *(r.shutdown() for r in receivers))
