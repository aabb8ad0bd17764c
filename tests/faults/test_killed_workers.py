"""Workers that are killed or stopped at the worst moment disturb nobody else, and find their way back."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from asyncsync import (
    AckTimeout,
    DistributedWeightSyncScheme,
    PartialSendError,
    PeerLost,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
)
from helpers import planted
from helpers.pairs import Clock
from helpers.process_crew import ProcessCrew
from helpers.processes import Filled, Schemes, Start, Worker, eventually, impatient
from helpers.shared_workers import MIB, SharedWorker

pytestmark = pytest.mark.timeout(90)

PROMISED = 1.0  # seconds until a death on this host is reported
ZMQ_AND_DISTRIBUTED = [
    pytest.param(ZMQWeightSyncScheme, id="zmq"),
    pytest.param(DistributedWeightSyncScheme, id="distributed", marks=pytest.mark.thorough),
]
every_kind = pytest.mark.parametrize("kind", ZMQ_AND_DISTRIBUTED)
fanned_out = pytest.param("tcp", True, marks=pytest.mark.thorough, id="tcp, fan-out")


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def are_subscribed(crew: ProcessCrew) -> None:
    await eventually(lambda: len(planted.subscribed(crew.sender)) == len(crew.workers))


@pytest.mark.requirement(195, 196)
@pytest.mark.promise(11, 16)
@pytest.mark.parametrize(
    ("endpoint", "point"),
    [
        ("ipc", "transfer"),
        ("tcp", "apply"),
        pytest.param("ipc", "apply", marks=pytest.mark.thorough),
        pytest.param("tcp", "transfer", marks=pytest.mark.thorough),
    ],
    indirect=["endpoint"],
)
async def test_a_worker_killed_in_the_middle_is_named_at_once_and_catches_up_when_it_returns(
    endpoint: str, point: str, crew: ProcessCrew
) -> None:
    await crew(64 * MIB, endpoint=endpoint)
    sender, (steady, victim) = crew.sender, crew.workers
    await victim.halt_in(point, nth=5)
    sending = asyncio.create_task(crew.send(2))
    assert await victim.events.get() == point
    await eventually(lambda: sender.status()[0].version == 2)  # the other one has been served meanwhile
    assert await steady.value() == 2
    assert not sending.done()
    if point == "transfer":
        assert 64 << 20 < sender.status()[1].bytes_sent < 2 * (64 << 20)
    with Clock(PROMISED):
        victim.signal(signal.SIGKILL)
        with pytest.raises(PartialSendError) as caught:
            await sending
    assert caught.value.acked == {0: 2}
    assert list(caught.value.failed) == [1]
    assert isinstance(caught.value.failed[1], PeerLost)
    assert sender.status()[1].state == "lost"

    # While it is away: the others go on, and the sender names it without waiting.
    with pytest.raises(PartialSendError):
        await crew.send(3)
    assert await steady.value() == 3

    crew.workers[1], _ = await crew.another(1)
    assert await crew.values() == [3, 3]
    assert await crew.send(4) == 4
    assert await crew.values() == [4, 4]
    assert sender.status()[1].state == "live"
    await eventually(lambda: sender.bus.link.pool.slabs <= 2)


@pytest.mark.requirement(195, 198)
@pytest.mark.thorough
@pytest.mark.parametrize("endpoint", ["tcp"], indirect=True)
async def test_a_subscriber_killed_amid_a_transfer_is_named_others_have_it(endpoint: str, crew: ProcessCrew) -> None:
    await crew(64 * MIB, 4, endpoint=endpoint, fanout=True)
    await are_subscribed(crew)
    victim = crew.workers.pop(1)
    await victim.halt_in("transfer", nth=5)
    sending = asyncio.create_task(crew.send(2))
    assert await victim.events.get() == "transfer"
    await victim.kill()
    with pytest.raises(PartialSendError) as caught:
        await sending
    assert (set(caught.value.acked), set(caught.value.failed)) == ({0, 2, 3}, {1})
    assert await crew.values() == [2] * 3


@pytest.mark.requirement(195)
@pytest.mark.promise(16)
async def test_a_worker_killed_on_another_host_is_lost_when_its_connection_stays_away(crew: ProcessCrew) -> None:
    await crew(100, receiver={"elsewhere": True}, settings={})
    status = crew.sender.status
    crew.workers[1].signal(signal.SIGSTOP)
    sending = asyncio.create_task(crew.send(2))
    await eventually(lambda: status()[0].version == 2)
    await eventually(lambda: status()[1].state == "slow")  # a stopped process is not a dead one
    assert not sending.done()
    crew.workers[1].signal(signal.SIGKILL)
    with pytest.raises(PartialSendError) as caught:
        await sending
    assert isinstance(caught.value.failed[1], PeerLost)
    assert caught.value.acked == {0: 2}


@pytest.mark.requirement(196)
@pytest.mark.parametrize("kind", [*ZMQ_AND_DISTRIBUTED, pytest.param(SharedMemWeightSyncScheme, id="shared")])
async def test_workers_killed_and_restarted_while_updates_stream(kind: Any, crew: ProcessCrew) -> None:
    """While they read, too; with slots, they cost none."""
    options = {"of": SharedWorker, "map_above": 0} if kind is SharedMemWeightSyncScheme else {}
    await crew(2 * MIB, 1, kind=kind, num_workers=None, min_workers=1, **options)
    sender, [steady] = crew.sender, crew.workers
    async with crew.firing():
        for _ in range(6):
            victim, first = await crew.another(1)
            assert first > 0
            reading = victim.forwards(1 << 20)
            await victim.wait_version(first + 1)
            await victim.kill()
            with pytest.raises(EOFError):
                await reading
    last = sender.version
    assert await steady.wait_version(last) == last
    await eventually(lambda: sender.status().get(1) is None or sender.status()[1].state == "lost")
    assert await crew.send(-5) == last + 1  # elastic: who is gone is not asked
    assert await steady.value() == -5
    assert (await steady.forwards(100))[0] == 0
    if options:
        await crew.frees_all_but_the_target()
        assert crew.pool.peak <= 4
        # What was mapped there are the slots that there are, not all that there have been.
        assert len(await steady.slots_in_sight()) <= 4
    else:
        assert sender.bus.link.pool.peak <= 4  # two targets, one on its way to each of the two workers


@pytest.mark.requirement(198)
@pytest.mark.promise(13)
@pytest.mark.parametrize(("endpoint", "fanout"), [("ipc", False), ("tcp", False), fanned_out], indirect=["endpoint"])
async def test_a_stopped_worker_delays_nobody_and_skips_to_the_newest_version(
    endpoint: str, fanout: bool, crew: ProcessCrew
) -> None:
    await crew(8 * MIB, 4 if fanout else 2, endpoint=endpoint, fanout=fanout, settings={})
    if fanout:
        await are_subscribed(crew)
    sender, (*others, stopped) = crew.sender, crew.workers
    last, away, pool = await crew.send(2), len(others), sender.bus.link.pool
    stopped.signal(signal.SIGSTOP)
    before = resident()
    for _ in range(30):  # 240 MiB for each
        last = await crew.publish_to(list(range(away)), last + 1)
    assert resident() - before < 120 << 20
    # The target, what the stopped one was receiving, and the one being packed; with others, what is on its way to them.
    assert pool.peak <= 2 + away
    with pytest.raises(PartialSendError) as caught:
        await crew.send(last + 1, timeout=0.5)
    last += 1
    assert caught.value.acked == dict.fromkeys(range(away), last)
    assert isinstance(caught.value.failed[away], AckTimeout)
    await eventually(lambda: sender.status()[away].state == "slow")
    assert sender.status()[0].state == "live"
    assert sender.status()[away].lag == last - sender.status()[away].version > 0
    assert [await w.value() for w in others] == [last] * away

    stopped.signal(signal.SIGCONT)
    assert await stopped.wait_version(last) == last
    await eventually(lambda: sender.status()[away].state == "live")
    assert len(await stopped.applied_versions()) <= 5, await stopped.applied_versions()
    assert len(await others[0].applied_versions()) == last
    if fanout:
        await are_subscribed(crew)
    assert await crew.send(0) == last + 1
    assert await crew.values() == [0] * len(crew.workers)
    await eventually(lambda: pool.slabs <= 2)
    assert await stopped.slabs() <= 3


@pytest.mark.requirement(198)
async def test_small_updates_do_not_pile_up_for_a_stopped_worker(crew: ProcessCrew) -> None:
    await crew(1000, settings={"ping_interval": 0.05, "retry_interval": 0.1})
    stopped, status = crew.workers[1], crew.sender.status
    stopped.signal(signal.SIGSTOP)
    before = status()[1].bytes_sent
    for value in range(2, 2002):
        await crew.publish(value)
        if value % 100 == 0:
            await crew.sender.wait_version(value, worker_ids=0)
    assert status()[1].bytes_sent - before <= 2 * 4000  # one update, not two thousand
    stopped.signal(signal.SIGCONT)
    assert await stopped.wait_version(2001) == 2001
    assert len(await stopped.applied_versions()) <= 4


@pytest.mark.requirement(196)
@pytest.mark.promise(10, 11)
@every_kind
async def test_a_late_worker_gets_what_is_meant_for_it(kind: Any, crew: ProcessCrew) -> None:
    await crew(1000, 1, kind=kind, num_workers=None)
    await crew.send(2)
    await crew.send(3, worker_ids=0)
    late, version = await crew.another(1)
    assert (version, await late.value()) == (2, 2)
    assert await late.receive(0) is None
    await crew.workers[0].kill()
    again, version = await crew.another(0)  # a restarted one gets its own
    assert (version, await again.value()) == (3, 3)


@pytest.mark.requirement(196)
@every_kind
async def test_a_second_incarnation_takes_over_from_a_stopped_one(kind: Any, crew: ProcessCrew) -> None:
    await crew(1000, 1, kind=kind)
    [old] = crew.workers
    old.signal(signal.SIGSTOP)
    new, _ = await crew.another(0)
    assert await crew.send(2, timeout=10) == 2
    old.signal(signal.SIGCONT)
    with pytest.raises(Exception, match="newer process"):
        await old.receive()
    assert await old.closed()
    assert (await old.value(), await new.value()) == (1, 2)
    assert await crew.send(3, timeout=10) == 3


@pytest.mark.requirement(195)
@pytest.mark.parametrize("why", ["no pidfd", "no boot id"])
async def test_a_killed_worker_that_cannot_be_watched_is_lost_when_its_connection_is_gone(
    schemes: Schemes, start: Start, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Of 195: it is named as lost before the time is up."""
    worker = start(Worker)
    if why == "no pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    else:
        planted.no_boot_id(monkeypatch)
    sender = schemes.sender(1000, num_workers=1)
    impatient(sender)
    await asyncio.gather(sender.connect(), worker.connect(sender, 0, 1000))
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
