"""Side channels that break, fill up, or bring garbage: updates go on, through ZeroMQ where they must."""

import asyncio
import os
import pickle
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncsync.net.side_channel import MAX_PACKET, SideChannel
from asyncsync.wire import messages
from helpers.processes import Schemes, Start, Trainer, Worker, eventually, impatient

pytestmark = pytest.mark.timeout(60)

SMALL, LARGE = 1000, 3 << 19


def side_channels(scheme: Any) -> Any:
    return scheme.bus.link.side_channels


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many messages each side channel has sent, by its id: a reference would keep it."""
    counts, send = Counter[int](), SideChannel.send

    def counted(channel: SideChannel, frames: Any) -> bool:
        done = send(channel, frames)
        counts[id(channel)] += done
        return done

    monkeypatch.setattr(SideChannel, "send", counted)
    return counts


async def with_side_channels(sender: Any, receivers: list[Any]) -> None:
    """Until every receiver's side channel may be used."""
    await eventually(lambda: len(side_channels(sender).of) == len(receivers))
    await eventually(lambda: all(r.bus.link.side_channel.open for r in receivers))


async def connected(schemes: Schemes, numel: int = SMALL, workers: int = 2) -> tuple[Any, list[Any]]:
    sender, receivers = await schemes.connected(numel, workers=workers)
    await with_side_channels(sender, receivers)
    return sender, receivers


async def all_well(sender: Any, receivers: list[Any], rounds: int = 5) -> None:
    for _ in range(rounds):
        value = sender.version + 1
        assert await sender.send_async(sender.model.fill(value), timeout=10) == value
        assert {r.model.value for r in receivers} == {value}


@pytest.mark.both_loops
@pytest.mark.parametrize("numel", [SMALL, LARGE], ids=["small", "chunked"])
async def test_small_instructions_go_by_side_channel(schemes: Schemes, numel: int, sent: Counter[int]) -> None:
    sender, receivers = await connected(schemes, numel)
    sent.clear()
    await all_well(sender, receivers, 10)
    assert sum(sent[id(channel)] for channel in side_channels(sender).of.values()) == 20
    assert all(sent[id(r.bus.link.side_channel)] >= 10 for r in receivers)
    assert not sender.bus.dropped
    assert all(s.state == "live" and s.last_seen < 5 and s.bytes_sent > 0 for s in sender.status().values())


async def test_updates_go_on_when_the_workers_side_channels_break(schemes: Schemes) -> None:
    """When the sender's break: tests/schemes/test_steady_updates.py."""
    sender, receivers = await connected(schemes)
    await all_well(sender, receivers)
    for receiver in receivers:
        receiver.bus.link.side_channel.close()
    await eventually(lambda: not side_channels(sender).of)
    await all_well(sender, receivers)
    assert all(s.state == "live" for s in sender.status().values())


@pytest.mark.promise(12)
async def test_what_is_lost_with_a_side_channel_is_repaired(schemes: Schemes) -> None:
    sender = schemes.sender(SMALL, num_workers=1)
    impatient(sender)
    receiver = schemes.receiver(sender)
    await asyncio.gather(sender.connect(), receiver.connect())
    await with_side_channels(sender, [receiver])
    loop = asyncio.get_running_loop()
    loop.remove_reader(receiver.bus.link.side_channel._socket)  # the UPDATE is never read
    sending = asyncio.create_task(sender.send_async(sender.model.fill(9), timeout=10))
    await asyncio.sleep(0)
    receiver.bus.link.side_channel.close()
    await sending
    assert receiver.model.value == 9


async def test_malformed_packets_are_counted_and_change_nothing(schemes: Schemes) -> None:
    sender, receivers = await connected(schemes)
    epoch = sender.bus.link.end_fast_path().membership.epoch
    packets = [
        b"\x00",
        b"\x02\xff\xff\xff\xff",
        b"\x00" + b"\xc1" * 50,
        bytes(MAX_PACKET + 1),
        b"\x00" + messages.encode(messages.Applied(epoch, {"policy": 1 << 40})),
        b"\x00" + messages.encode(messages.Applied((1, 1), {})),
        b"\x00" + messages.encode(messages.Bye(epoch, bytes(16), "closed", "")),
    ]
    for one, bus in [
        (receivers[0].bus.link.side_channel, sender.bus),
        (side_channels(sender).of[receivers[0].bus.link.machine.session.nonce], receivers[0].bus),
    ]:
        for packet in packets:
            one._socket.send(packet)
        await eventually(lambda bus=bus: sum(bus.dropped.values()) == len(packets), why=lambda bus=bus: bus.dropped)
        await all_well(sender, receivers)
        assert one.open


async def test_a_newer_incarnation_has_the_side_channel_and_the_superseded_one_has_none(
    schemes: Schemes, start: Start
) -> None:
    sender, old = schemes.sender(SMALL, num_workers=2), start(Worker)
    receiver = schemes.receiver(sender)
    given = pickle.loads(pickle.dumps(sender))
    await asyncio.gather(sender.connect(), receiver.connect(), old.connect(given, 1, SMALL))
    await eventually(lambda: len(side_channels(sender).of) == 2)
    before = set(side_channels(sender).of)
    old.signal(signal.SIGSTOP)
    late = schemes.receiver(sender, 1)
    await late.connect()
    old.signal(signal.SIGCONT)
    await with_side_channels(sender, [receiver, late])
    assert len(before & set(side_channels(sender).of)) == 1
    await all_well(sender, [receiver, late])
    async with asyncio.timeout(20):  # what it hears by ZeroMQ, and what it is asked here, come in no order
        while not await old.closed():  # noqa: ASYNC110 - the state of another process
            await asyncio.sleep(0.002)


async def test_a_stopped_worker_holds_up_no_other_and_is_brought_up_to_date(schemes: Schemes, start: Start) -> None:
    sender = schemes.sender(16_000, num_workers=2)  # 64 KB: a few of them fill a side channel
    receiver, worker = schemes.receiver(sender), start(Worker)
    impatient(sender)
    await asyncio.gather(
        sender.connect(), receiver.connect(), worker.connect(pickle.loads(pickle.dumps(sender)), 1, 16_000)
    )
    await eventually(lambda: len(side_channels(sender).of) == 2)
    worker.signal(signal.SIGSTOP)
    for value in range(2, 12):
        await sender.send_async(sender.model.fill(value), worker_ids=[0], timeout=10)
        await sender.publish(sender.model)
    nonce = sender.bus.link.end_fast_path().peers[1].nonce
    one = side_channels(sender).of[nonce]
    # Until it is full: the worker will drop these, and what is said now goes through ZeroMQ.
    while one.send([bytes(30_000)]):
        pass
    version = await sender.publish(sender.model.fill(50))
    await sender.wait_version(version, worker_ids=[0])
    worker.signal(signal.SIGCONT)
    await sender.wait_version(version, timeout=10)
    assert await worker.value() == 50
    assert await sender.send_async(sender.model.fill(51), timeout=10)
    assert await worker.value() == 51
    assert sender.status()[1].state == "live"


async def test_workers_have_a_side_channel_to_the_next_trainer(
    tmp_path: Path, schemes: Schemes, start: Start, sent: Counter[int]
) -> None:
    plan = schemes.sender(SMALL, endpoint=f"ipc://{tmp_path}/bus", num_workers=1)
    first, receiver = start(Trainer), schemes.receiver(plan)
    await asyncio.gather(first.connect(pickle.loads(pickle.dumps(plan)), SMALL, 1), receiver.connect())
    before = receiver.bus.link.side_channel
    await eventually(lambda: before.open)
    await first.kill()
    await eventually(lambda: before.closed)
    assert (tmp_path / "bus.side").is_socket()  # the next one finds it
    await asyncio.gather(plan.connect(timeout=10), receiver.connect())
    await with_side_channels(plan, [receiver])
    await all_well(plan, [receiver])
    assert sum(sent[id(channel)] for channel in side_channels(plan).of.values()) >= 5
    await plan.shutdown()
    assert os.listdir(tmp_path) == []
    await eventually(lambda: receiver.closed)


async def test_the_last_update_arrives_before_the_goodbye(schemes: Schemes) -> None:
    for numel in (SMALL, 16_000):
        sender, receivers = await connected(schemes, numel)
        await sender.publish(sender.model.fill(7))
        await sender.shutdown()
        await eventually(lambda receivers=receivers: all(r.closed for r in receivers))
        assert [r.model.value for r in receivers] == [7, 7]


async def test_what_a_worker_has_said_last_counts(schemes: Schemes) -> None:
    sender, (receiver,) = await connected(schemes, workers=1)
    version = await sender.publish(sender.model.fill(3))
    receiver.bus.link.side_channel.drain()  # it applies the update and answers …
    peer = sender.bus.link.end_fast_path().peers[0]
    sender.bus.link._worker_ended(0, peer.nonce, os.getpid())  # … and its end is noticed before the answer is read
    assert sender.status()[0].state == "lost"
    await sender.wait_version(version)


async def test_a_side_channel_that_cannot_be_made_is_done_without(tmp_path: Path, schemes: Schemes) -> None:
    (tmp_path / "bus.side").mkdir()
    sender, receivers = await schemes.connected(SMALL, workers=2, endpoint=f"ipc://{tmp_path}/bus")
    await all_well(sender, receivers)
    assert not side_channels(sender).of
    await sender.shutdown()
    assert os.listdir(tmp_path) == ["bus.side"]
