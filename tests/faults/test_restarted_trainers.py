"""A trainer that is killed, stopped, restarted, or cut off: workers wait for it, follow its successor, and fence it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncsync import (
    ClosedError,
    Fenced,
    MultiProcessWeightSyncScheme,
    NotConnected,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
)
from helpers.apis import face, free_port
from helpers.pairs import passed_on
from helpers.processes import Schemes, Start, Trainer, Worker, eventually, impatient, value_of
from helpers.throttle import FAST, Network, throttled

pytestmark = pytest.mark.requirement(197)


@pytest.mark.parametrize(
    ("endpoint", "numel", "kind", "blocking"),
    [
        pytest.param("ipc", 1000, ZMQWeightSyncScheme, False, id="ipc, eager"),
        pytest.param("tcp", 2 << 18, ZMQWeightSyncScheme, True, id="tcp, chunked"),
        pytest.param("ipc", 2 << 18, SharedMemWeightSyncScheme, False, id="shared"),
        pytest.param("ipc", 1000, MultiProcessWeightSyncScheme, True, id="process"),
    ],
    indirect=["endpoint"],
)
async def test_workers_wait_for_a_killed_trainer_and_follow_the_restarted_one(
    endpoint: str, numel: int, kind: Any, blocking: bool, schemes: Schemes, start: Start
) -> None:
    """Of the two workers, one has the blocking API where that is asked for."""
    plan = schemes.sender(numel, endpoint=endpoint, num_workers=2, kind=kind)
    here = schemes.receiver(plan)
    first, worker = start(Trainer), start(Worker)
    theirs = face(passed_on(plan).blocking) if blocking else plan
    await asyncio.gather(first.connect(plan, numel, 1), here.connect(), worker.connect(theirs, 1, numel))
    for value in (2, 3, 4):
        await first.send(value)
    assert value_of(await here.receive(0)) == 4
    assert await worker.receive(0) == 4
    epoch = here.bus.link.machine.session.epoch

    blocked = asyncio.create_task(here.receive())
    elsewhere = worker.receive()
    await first.kill()
    await eventually(lambda: here.status()[0].state == "lost")
    assert not blocked.done()
    assert not here.closed
    assert here.model.value == 4  # the worker goes on with what it has
    assert await here.receive(0) is None
    with pytest.raises(TimeoutError):
        await here.fetch(timeout=0.1)

    second = start(Trainer)
    assert await second.connect(plan, numel, 10) == 1
    assert value_of(await blocked) == 10
    assert await elsewhere == 10
    assert here.version == 1
    assert here.bus.link.machine.session.epoch > epoch
    assert await second.send(11) == 2
    assert (here.model.value, await worker.value()) == (11, 11)
    assert here.status()[0].state == "live"
    assert value_of(await here.fetch()) == 11
    await second.shutdown()
    while not here.closed:
        with contextlib.suppress(ClosedError):
            await here.receive()
    with pytest.raises(ClosedError):
        await here.receive()


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"], indirect=True)
async def test_a_child_forked_from_the_trainer_keeps_neither_its_address_nor_its_workers(
    endpoint: str, schemes: Schemes, start: Start
) -> None:
    """A DataLoader's worker outlives its trainer; the trainer's successor binds the same address all the same, and the
    workers hear of the end of their connection."""
    plan = schemes.sender(1000, endpoint=endpoint, num_workers=1)
    first, worker = start(Trainer), start(Worker)
    await asyncio.gather(first.connect(plan, 1000, 1), worker.connect(plan, 0, 1000))
    child = await first.fork()
    try:
        assert await first.send(2) == 2  # the parent's goes on
        await first.kill()
        second = start(Trainer)
        assert await second.connect(plan, 1000, 10, timeout=20) == 1
        assert await worker.value() == 10
    finally:
        os.kill(child, signal.SIGKILL)


async def test_a_trainer_killed_in_the_middle_of_a_transfer_leaves_no_half_update(
    endpoint: str, schemes: Schemes, start: Start
) -> None:
    """Another worker dies and is replaced before the next trainer comes."""
    numel = 64 << 18
    plan = schemes.sender(numel, endpoint=endpoint, num_workers=2)
    first, worker, victim = start(Trainer), start(Worker), start(Worker)
    joining = (w.connect(plan, i, numel) for i, w in enumerate((worker, victim)))
    await asyncio.gather(first.connect(plan, numel, 1), *joining)
    await worker.halt_in("transfer", nth=7)
    sending = first.send(2)
    assert await worker.events.get() == "transfer"
    await first.kill()
    await victim.kill()
    with pytest.raises(EOFError):
        await asyncio.wait_for(sending, 5)
    worker.signal(signal.SIGCONT)
    assert await worker.value() == 1
    replacement = start(Worker)
    connecting = replacement.connect(plan, 1, numel)
    second = start(Trainer)
    assert await second.connect(plan, numel, 3) == 1
    await connecting
    assert await worker.receive(10) == 3
    assert await second.send(4) == 2
    assert [await w.value() for w in (worker, replacement)] == [4, 4]
    assert await worker.slabs() <= 2


async def test_a_second_trainer_cannot_take_the_endpoint_of_one_that_lives_or_is_only_stopped(
    endpoint: str, schemes: Schemes, start: Start
) -> None:
    plan = schemes.sender(1000, 20, endpoint=endpoint, num_workers=1)
    first = start(Trainer)
    receiver = schemes.receiver(plan)
    await asyncio.gather(first.connect(plan, 1000, 1), receiver.connect())
    for _ in range(2):
        with pytest.raises(NotConnected, match="in use by another live process"):
            await plan.connect(timeout=5)
        first.signal(signal.SIGSTOP)
    first.signal(signal.SIGCONT)
    assert await first.send(2) == 2
    assert receiver.model.value == 2
    await first.kill()
    await plan.connect()  # the kernel has freed the lock
    assert receiver.model.value == 20


async def test_a_tcp_port_that_is_taken_is_refused(schemes: Schemes) -> None:
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        sender = schemes.sender(10, endpoint=f"tcp://127.0.0.1:{port}", num_workers=1)
        with pytest.raises(NotConnected, match="cannot bind"):
            await sender.connect(timeout=5)


@pytest.fixture
async def forwarder() -> AsyncIterator[tuple[Network, int]]:
    """A network, and the port to whose connections it says where they go."""
    port = free_port()
    async with throttled((port,), FAST) as network:
        yield network, port


@pytest.mark.promise(14)
async def test_a_trainer_that_was_cut_off_is_fenced_when_its_workers_come_back_from_its_successor(
    schemes: Schemes, forwarder: tuple[Network, int]
) -> None:
    (network, door), ports = forwarder, (free_port(), free_port())
    old, new = [
        schemes.sender(
            100, value, endpoint=f"tcp://127.0.0.1:{port}", connect=f"tcp://{network.host}:{door}", num_workers=1
        )
        for value, port in zip((1, 10), ports, strict=True)
    ]
    receiver = schemes.receiver(old)
    network.switch(ports[0])
    await asyncio.gather(old.connect(), receiver.connect())
    assert receiver.model.value == 1

    network.switch(ports[1])
    await new.connect()
    assert receiver.model.value == 10
    assert value_of(await receiver.receive(5)) == 10
    version = await old.publish(old.model.fill(2))  # it does not know yet
    waiting = asyncio.create_task(old.wait_version(version))

    network.switch(ports[0])
    with pytest.raises(Fenced, match="this trainer must stop"):
        await waiting
    for call in (old.publish, old.send_async, lambda: old.wait_version(1)):
        with pytest.raises(Fenced):
            await call()
    assert receiver.model.value == 10
    assert not receiver.closed

    network.switch(ports[1])
    assert await new.send_async(new.model.fill(11), timeout=20) == 2
    assert receiver.model.value == 11
    await old.shutdown()  # a fenced one says goodbye to nobody
    assert await new.send_async(new.model.fill(12), timeout=20) == 3
    assert receiver.model.value == 12


async def test_a_successor_whose_clock_is_behind_passes_its_predecessor(
    endpoint: str, schemes: Schemes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = schemes.sender(100, 1, endpoint=endpoint, num_workers=1)
    receiver = schemes.receiver(first)
    await asyncio.gather(first.connect(), receiver.connect())
    epoch = receiver.bus.link.machine.session.epoch
    # Killed, in effect: no BYE.
    monkeypatch.setattr(first.bus.link.end_fast_path(), "close", first.bus.link.end_fast_path().targets.close)
    await first.shutdown()
    monkeypatch.setattr("asyncsync.bus.trainer.time.time_ns", lambda: 12345)
    second = schemes.sender(100, 5, endpoint=endpoint, num_workers=1)
    impatient(second)
    await second.connect()
    assert receiver.model.value == 5
    assert receiver.bus.link.machine.session.epoch == second.bus.link.end_fast_path().membership.epoch > epoch
    assert await second.send_async(second.model.fill(6)) == 2
    assert receiver.model.value == 6


async def test_the_connections_are_cut_again_and_again_and_nothing_is_lost(
    schemes: Schemes, forwarder: tuple[Network, int]
) -> None:
    (network, door), port = forwarder, free_port()
    sender = schemes.sender(
        5 << 18, endpoint=f"tcp://127.0.0.1:{port}", connect=f"tcp://{network.host}:{door}", num_workers=2
    )
    impatient(sender)
    receivers = [schemes.receiver(sender, i) for i in range(2)]
    for receiver in receivers:
        impatient(receiver)
    network.switch(port)
    await asyncio.gather(sender.connect(), *(r.connect() for r in receivers))
    for value in range(2, 12):
        sending = asyncio.create_task(sender.send_async(sender.model.fill(value), timeout=30))
        target = sender.status()[0].bytes_sent + (value % 4 << 20)
        await eventually(
            lambda sending=sending, target=target: sending.done() or sender.status()[0].bytes_sent >= target
        )
        network.switch(port)
        await sending
        for receiver in receivers:
            assert receiver.model.value == value
            assert value_of(await receiver.receive(0)) == value
    await eventually(lambda: sender.bus.link.pool.slabs <= 2)


@pytest.mark.promise(31)
async def test_the_private_directory_of_a_killed_trainer_is_swept_by_the_next(schemes: Schemes, start: Start) -> None:
    plan = schemes.sender(100, num_workers=1)
    directory = Path(plan.bus.endpoint.removeprefix("ipc://")).parent
    trainer, worker = start(Trainer), start(Worker)
    await asyncio.gather(trainer.connect(plan, 100, 1), worker.connect(plan, 0, 100))
    assert directory.stat().st_mode & 0o777 == 0o700
    await trainer.kill()
    assert directory.exists()
    other = schemes.sender(100)
    live = Path(other.bus.endpoint.removeprefix("ipc://")).parent
    with pytest.raises(NotConnected):
        await other.connect(timeout=0)
    assert not directory.exists()
    assert sorted(os.listdir(live)) == ["bus", "bus.lock", "bus.side"]
    another = schemes.sender(100)
    with pytest.raises(NotConnected):
        await another.connect(timeout=0)
    assert live.exists()  # its owner lives
    await other.shutdown()
    assert not live.exists()
