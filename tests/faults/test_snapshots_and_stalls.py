"""Publishing takes a snapshot, keeps two slabs however many workers there are, and never holds up the loop."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
)
from helpers import planted
from helpers.pairs import receiver_of
from helpers.process_crew import ProcessCrew
from helpers.processes import Schemes, Start, Worker, eventually, value_of
from helpers.shared_workers import MIB
from helpers.stalls import longest_stall

pytestmark = pytest.mark.timeout(120)

EAGER, INLINE, THREAD = 1000, 2 * MIB, 8 * MIB  # 4 kB; 2 MiB; 8 MiB, packed by the work thread
SLOT = 9 * MIB
STALL = 0.020  # seconds, promised


@pytest.mark.requirement(189)
@pytest.mark.promise(1)
@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("kind", "numel", "options"),
    [
        (ZMQWeightSyncScheme, EAGER, {}),
        (ZMQWeightSyncScheme, INLINE, {}),
        (ZMQWeightSyncScheme, THREAD, {}),
        (SharedMemWeightSyncScheme, EAGER, {"map_above": 0}),
        (SharedMemWeightSyncScheme, SLOT, {"map_above": 0}),
        (SharedMemWeightSyncScheme, SLOT, {"map_above": 1 << 30}),
        (MultiProcessWeightSyncScheme, EAGER, {"map_above": 1 << 30}),
        (MultiProcessWeightSyncScheme, SLOT, {"map_above": 0}),
    ],
)
async def test_what_arrives_is_what_the_parameters_held_when_publish_returned(
    kind: Any, numel: int, options: dict[str, Any], schemes: Schemes
) -> None:
    """However many workers there are: memory for two versions, and for slots the one that is being read."""
    before = set(threading.enumerate())
    sender, receivers = await schemes.connected(numel, workers=8, kind=kind, **options)
    for value in range(2, 12):
        version = await sender.publish(sender.model.fill(value))
        sender.model.fill(-value)  # an optimizer step, the moment publish returns
        await sender.wait_version(version, timeout=20)
        for receiver in receivers:
            assert receiver.model.value == value
            assert value_of(await receiver.receive(0)) == value
            assert receiver.version == version
    if options:
        assert sender.shared_transport.pool.peak <= 3
    else:
        pool = sender.bus.link.pool
        assert pool.peak <= 2
        await eventually(lambda: pool.slabs <= 2)
        assert all(r.bus.link.machine.pool.slabs <= 2 for r in receivers)
    if numel <= INLINE and not options:  # small updates need no thread at all
        started = set(threading.enumerate()) - before
        assert {t for t in started if not type(t).__module__.startswith("zmq.")} == set()


@pytest.mark.requirement(191, 189)
@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ZMQWeightSyncScheme, {}),
        (SharedMemWeightSyncScheme, {}),
        pytest.param(MultiProcessWeightSyncScheme, {}, marks=pytest.mark.thorough),
        pytest.param(DistributedWeightSyncScheme, {"store_info": ("127.0.0.1", 0)}, marks=pytest.mark.thorough),
    ],
    ids=["zmq", "shared", "process", "distributed"],
)
async def test_the_loop_is_never_blocked_while_256_mib_are_sent(
    kind: Any, options: dict[str, Any], schemes: Schemes, start: Start
) -> None:
    numel = 256 * MIB
    torch.set_num_threads(2)  # as a trainer has them; the fixture puts back what was before
    before = set(threading.enumerate())
    sender = schemes.sender(numel, kind=kind, num_workers=2, **options)
    workers = [start(Worker), start(Worker)]
    slots = sender.shared_transport.pool
    names: set[str] = set()

    async def connect() -> None:
        await asyncio.gather(sender.connect(), *(w.connect(sender, i, numel) for i, w in enumerate(workers)))

    async def send() -> None:
        sending = asyncio.create_task(sender.send_async())
        while not sending.done():
            names.update(f"{type(t).__module__}:{t.name}" for t in set(threading.enumerate()) - before)
            await asyncio.wait([sending], timeout=0.005)
        assert await sending == value

    stalls = [await longest_stall(connect)]  # a slot is made for the first version
    if slots is None:
        stalls.clear()
    for value in (2, 3, 4):
        sender.model.fill(value)
        stalls.append(await longest_stall(send))
    assert await asyncio.gather(*(w.value() for w in workers)) == [4, 4]
    assert max(s.running for s in stalls) < 5 * STALL
    if slots is not None:
        assert slots.peak <= 3
    if kind is ZMQWeightSyncScheme:
        # The thread for large copies, and pyzmq's; ZeroMQ's own I/O thread is none of Python's.
        ours = {n for n in names if not n.startswith("zmq.")}
        assert {"threading:asyncsync-pack"} <= ours <= {"threading:asyncsync-pack", "threading:asyncsync-copying"}
        assert sender.bus.link.pool.peak <= 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme], ids=["zmq", "shared"])
async def test_a_workers_loop_goes_on_while_256_mib_come_and_are_applied(kind: Any, crew: ProcessCrew) -> None:
    """The trainer's bar, 20 ms, five times: other processes of the tests take the cores."""
    await crew.shared(256 * MIB, 1, kind=kind, map_above=16 << 20)
    [worker] = crew.workers
    stalls = []
    for value in range(2, 6):
        watching = worker.stall_until(value)
        assert await worker.events.get() == "watching"
        await asyncio.sleep(0.02)
        await crew.send(value, timeout=60)
        stalls.append(await watching)
        assert await worker.value() == value
    assert max(stalls) <= 5 * STALL
    assert await worker.is_repointed() == [True] * 8


@pytest.mark.requirement(194)
@pytest.mark.both_loops
@pytest.mark.parametrize("cancelled", [False, True], ids=["", "cancelled meanwhile"])
async def test_a_snapshot_that_fails_half_way_changes_nobody(
    schemes: Schemes, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Large weights are sent while they are being packed."""
    sender, receivers = await schemes.connected(THREAD, workers=2)
    peers = sender.bus.link.end_fast_path().peers.values()
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
    await eventually(lambda: sender.bus.link.pool.slabs <= 2)


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
