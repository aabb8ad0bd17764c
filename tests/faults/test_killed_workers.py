"""Workers that are killed or stopped at the worst moment disturb nobody else, and find their way back."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from asyncsync import AckTimeout, DistributedWeightSyncScheme, PartialSendError, PeerLost, ZMQWeightSyncScheme
from helpers import planted
from helpers.processes import Filled, Remote, Schemes, Worker, eventually, impatient

pytestmark = pytest.mark.timeout(90)

MIB = 1 << 18  # float32 elements in a MiB
PROMISED = 1.0  # seconds until a death on this host is reported
every_kind = pytest.mark.parametrize(
    "kind",
    [ZMQWeightSyncScheme, pytest.param(DistributedWeightSyncScheme, marks=pytest.mark.thorough)],
    ids=["zmq", "distributed"],
)


async def connect(
    sender: ZMQWeightSyncScheme, workers: list[Remote], numel: int, settings: dict[str, Any] | None = None
) -> None:
    if settings is not None:
        impatient(sender, **settings)
    await asyncio.gather(
        sender.connect(), *(w.connect(sender, i, numel, settings=settings) for i, w in enumerate(workers))
    )


@pytest.mark.requirement(195, 196)
@pytest.mark.promise(11, 16)
@pytest.mark.parametrize("endpoint", ["ipc", "tcp"], indirect=True)
@pytest.mark.parametrize("point", ["transfer", "apply"])
async def test_a_worker_killed_in_the_middle_is_named_at_once_and_catches_up_when_it_returns(
    endpoint: str,
    point: str,
    schemes: Schemes,
    start: Callable[..., Remote],
    record_property: Callable[[str, object], None],
) -> None:
    numel = 64 * MIB
    sender = schemes.sender(numel, endpoint=endpoint, num_workers=2)
    workers = [start(Worker), start(Worker)]
    await connect(sender, workers, numel)

    await workers[1].halt_in(point, nth=5)
    sending = asyncio.create_task(sender.send_async(sender.model.fill(2)))
    assert await workers[1].events.get() == point
    await eventually(lambda: sender.status()[0].version == 2)  # the other one has been served meanwhile
    assert await workers[0].value() == 2
    assert not sending.done()
    if point == "transfer":
        assert 64 << 20 < sender.status()[1].bytes_sent < 2 * (64 << 20)
    begin = time.perf_counter()
    workers[1].signal(signal.SIGKILL)
    with pytest.raises(PartialSendError) as caught:
        await sending
    latency = time.perf_counter() - begin
    record_property("PartialSendError after SIGKILL, ms", latency * 1e3)
    assert latency < 5 * PROMISED
    assert caught.value.acked == {0: 2}
    assert list(caught.value.failed) == [1]
    assert isinstance(caught.value.failed[1], PeerLost)
    assert sender.status()[1].state == "lost"

    # While it is away: the others go on, and the sender names it without waiting.
    with pytest.raises(PartialSendError):
        await sender.send_async(sender.model.fill(3))
    assert await workers[0].value() == 3

    back = start(Worker)
    await back.connect(pickle.loads(pickle.dumps(sender)), 1, numel)
    assert await back.value() == 3
    assert await sender.send_async(sender.model.fill(4)) == 4
    assert [await w.value() for w in (workers[0], back)] == [4, 4]
    assert sender.status()[1].state == "live"
    await eventually(lambda: sender.bus._link.pool.slabs <= 2)


@pytest.mark.requirement(195)
@pytest.mark.promise(16)
async def test_a_worker_killed_on_another_host_is_lost_when_its_connection_stays_away(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender = schemes.sender(100, num_workers=2)
    impatient(sender)
    workers = [start(Worker), start(Worker)]
    await asyncio.gather(sender.connect(), *(w.connect(sender, i, 100, elsewhere=True) for i, w in enumerate(workers)))
    workers[1].signal(signal.SIGSTOP)
    sending = asyncio.create_task(sender.send_async(sender.model.fill(2)))
    await eventually(lambda: sender.status()[0].version == 2)
    await eventually(lambda: sender.status()[1].state == "slow")  # a stopped process is not a dead one
    assert not sending.done()
    workers[1].signal(signal.SIGKILL)
    with pytest.raises(PartialSendError) as caught:
        await sending
    assert isinstance(caught.value.failed[1], PeerLost)
    assert caught.value.acked == {0: 2}


@pytest.mark.requirement(196)
@every_kind
async def test_workers_killed_and_restarted_while_updates_stream(
    kind: Any, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    numel = 2 * MIB
    sender = schemes.sender(numel, kind=kind, min_workers=1)
    steady = start(Worker)
    await connect(sender, [steady], numel)
    stop = asyncio.Event()

    async def stream() -> int:
        version = 0
        while not stop.is_set():
            version = await sender.publish(sender.model.fill(sender.version + 1))
            await asyncio.sleep(0)
        return version

    streaming = asyncio.create_task(stream())
    for _ in range(6):
        victim = start(Worker)
        first = await victim.connect(pickle.loads(pickle.dumps(sender)), 1, numel)
        assert first > 0
        await victim.wait_version(first + 1)
        await victim.kill()
    stop.set()
    last = await streaming
    assert await steady.wait_version(last) == last
    assert sender.bus._link.pool.peak <= 4  # two targets, one on its way to each of the two workers
    await eventually(lambda: sender.status().get(1) is None or sender.status()[1].state == "lost")
    assert await sender.send_async(sender.model.fill(-5)) == last + 1  # elastic: who is gone is not asked
    assert await steady.value() == -5


@pytest.mark.requirement(198)
@pytest.mark.promise(13)
@pytest.mark.parametrize("endpoint", ["ipc", "tcp"], indirect=True)
async def test_a_stopped_worker_delays_nobody_and_skips_to_the_newest_version(
    endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    numel = 8 * MIB
    sender = schemes.sender(numel, endpoint=endpoint, num_workers=2)
    workers = [start(Worker), start(Worker)]
    await connect(sender, workers, numel, settings={})
    pool = sender.bus._link.pool

    workers[1].signal(signal.SIGSTOP)
    last = 1
    for _ in range(30):
        last = await sender.publish(sender.model.fill(last + 1))
        await sender.wait_version(last, worker_ids=0, timeout=10)
    assert pool.peak <= 3  # the target, what the stopped one was receiving, and the one being packed
    with pytest.raises(PartialSendError) as caught:
        await sender.send_async(sender.model.fill(last + 1), timeout=0.5)
    last += 1
    assert caught.value.acked == {0: last}
    assert isinstance(caught.value.failed[1], AckTimeout)
    await eventually(lambda: sender.status()[1].state == "slow")
    assert sender.status()[0].state == "live"
    assert sender.status()[1].lag == last - sender.status()[1].version > 0
    assert await workers[0].value() == last

    workers[1].signal(signal.SIGCONT)
    assert await workers[1].wait_version(last) == last
    await eventually(lambda: sender.status()[1].state == "live")
    assert len(await workers[1].applied_versions()) <= 4, await workers[1].applied_versions()
    assert len(await workers[0].applied_versions()) == last
    assert await sender.send_async(sender.model.fill(0)) == last + 1
    await eventually(lambda: pool.slabs <= 2)
    assert await workers[1].slabs() <= 3


@pytest.mark.requirement(198)
async def test_small_updates_do_not_pile_up_for_a_stopped_worker(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender = schemes.sender(1000, num_workers=2)
    workers = [start(Worker), start(Worker)]
    await connect(sender, workers, 1000, settings={"ping_interval": 0.05, "retry_interval": 0.1})
    workers[1].signal(signal.SIGSTOP)
    before = sender.status()[1].bytes_sent
    for value in range(2, 2002):
        await sender.publish(sender.model.fill(value))
        if value % 100 == 0:
            await sender.wait_version(value, worker_ids=0)
    assert sender.status()[1].bytes_sent - before <= 2 * 4000  # one update, not two thousand
    workers[1].signal(signal.SIGCONT)
    assert await workers[1].wait_version(2001) == 2001
    assert len(await workers[1].applied_versions()) <= 4


@pytest.mark.requirement(196)
@pytest.mark.promise(10, 11)
@every_kind
async def test_a_late_worker_gets_what_is_meant_for_it(
    kind: Any, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender = schemes.sender(1000, kind=kind)
    first = start(Worker)
    await connect(sender, [first], 1000)
    await sender.send_async(sender.model.fill(2))
    await sender.send_async(sender.model.fill(3), worker_ids=0)
    late = start(Worker, uvloop=True)
    assert await late.connect(pickle.loads(pickle.dumps(sender)), 1, 1000) == 2
    assert await late.value() == 2
    assert await late.receive(0) is None
    await first.kill()
    again = start(Worker)  # a restarted one gets its own
    assert await again.connect(pickle.loads(pickle.dumps(sender)), 0, 1000) == 3
    assert await again.value() == 3


@pytest.mark.requirement(196)
@every_kind
async def test_a_second_incarnation_takes_over_from_a_stopped_one(
    kind: Any, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender = schemes.sender(1000, kind=kind, num_workers=1)
    old, new = start(Worker), start(Worker)
    await connect(sender, [old], 1000)
    old.signal(signal.SIGSTOP)
    await new.connect(pickle.loads(pickle.dumps(sender)), 0, 1000)
    assert await sender.send_async(sender.model.fill(2), timeout=10) == 2
    old.signal(signal.SIGCONT)
    with pytest.raises(Exception, match="newer process"):
        await old.receive()
    assert await old.closed()
    assert await old.value() == 1
    assert await new.value() == 2
    assert await sender.send_async(sender.model.fill(3), timeout=10) == 3


@pytest.mark.requirement(195)
@pytest.mark.parametrize("why", ["no pidfd", "no boot id"])
async def test_a_killed_worker_that_cannot_be_watched_is_lost_when_its_connection_is_gone(
    schemes: Schemes, start: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Of 195: it is named as lost before the time is up."""
    worker = start(Worker)
    if why == "no pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    else:
        planted.no_boot_id(monkeypatch)
    sender = schemes.sender(1000, num_workers=1)
    impatient(sender)
    await connect(sender, [worker], 1000)
    await worker.kill()
    with pytest.raises(PartialSendError) as raised:
        await sender.send_async(sender.model.fill(2), timeout=30)
    assert isinstance(raised.value.failed[0], PeerLost)
    assert sender.status()[0].state == "lost"


def test_the_oracle_knows_a_torn_model() -> None:
    model = Filled(800, 3)
    assert model() == (3, 3)
    assert model.value == 3
    model.parts[5].data[17] = 4
    assert model() == (3, 4)
    with pytest.raises(AssertionError, match="torn"):
        _ = model.value
