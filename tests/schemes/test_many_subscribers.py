"""Fan-out over real sockets: many workers over tcp, some of them late, slow, behind a firewall, or strangers."""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import zmq

from asyncsync import Bus, ZMQWeightSyncScheme
from helpers import planted
from helpers.figures import look, of
from helpers.pairs import Crew, Model, crew, fill, read, receiver_of, until
from helpers.throttle import throttled

pytestmark = pytest.mark.requirement(198)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@asynccontextmanager
async def many(port: int, workers: int, *, fanout: bool = True, width: int = 64, **options: Any) -> AsyncIterator[Crew]:
    """A sender with workers that have all subscribed, unless there is no fan-out."""
    scheme = ZMQWeightSyncScheme(endpoint=f"tcp://127.0.0.1:{port}", fanout=fanout, min_workers=workers, **options)
    models = [Model(width=width) for _ in range(workers)]
    elastic = {"num_workers": None}
    async with crew(workers, scheme=scheme, source=Model(0, width), models=models, sender=elastic) as everybody:
        if fanout:
            await until(lambda: len(planted.subscribed(everybody.sender)) == workers)
            await everybody.sender.send_async()  # those who came at different times were told by themselves
        yield everybody


@pytest.mark.parametrize(("width", "delta"), [(64, False), (2 * MIB, False), (2 * MIB, True)])
async def test_what_many_workers_are_to_get_is_sent_once(width: int, delta: bool, unused_tcp_port: int) -> None:
    async with many(unused_tcp_port, 5, width=width, delta=delta, metrics_port=0) as everybody:
        sender = everybody.sender
        before = of(await look(sender), "update_duration_seconds_count")
        with planted.counted(sender) as sent:
            for value in range(1, 6):
                await sender.send_async(fill(everybody.source, value))
                assert everybody.read == [{value}] * 5
        assert sent.count("Cast") == 5
        assert ("Chunk" in sent) is (width > 64 and not delta)
        assert {status.bytes_sent for status in sender.status().values()} != {0}
        assert not sender.bus.dropped
        assert not any(receiver.bus.dropped for receiver in everybody.receivers)
        assert of(await look(sender), "update_duration_seconds_count") == before + 5, "of each that everybody has"


async def test_own_weights_and_workers_that_are_late_or_have_left_are_no_trouble(unused_tcp_port: int) -> None:
    async with many(unused_tcp_port, 4) as everybody:
        sender, source = everybody.sender, everybody.source
        await sender.publish(fill(source, 1), worker_ids=[0, 1, 2])
        await sender.wait_version(sender.version, worker_ids=[0, 1, 2], timeout=5)
        assert everybody.read == [{1}] * 3 + [{0}]
        await sender.publish(fill(source, 2))
        await sender.wait_version(sender.version, worker_ids=[0, 1, 2, 3], timeout=5)
        assert everybody.read == [{2}] * 4
        late = receiver_of(sender, 4, model := Model())
        await late.connect(timeout=5)
        assert read(model) == {2}
        await until(lambda: len(planted.subscribed(sender)) == 5)
        await everybody.receivers[0].shutdown()
        await until(lambda: len(planted.subscribed(sender)) == 4)
        await sender.publish(fill(source, 3))
        await sender.wait_version(sender.version, worker_ids=[1, 2, 3, 4], timeout=5)
        assert [*everybody.read, read(model)] == [{2}, {3}, {3}, {3}, {3}]
        await late.shutdown()
        await until(lambda: len(planted.subscribed(sender)) == 3)


async def test_what_is_lost_on_the_way_to_all_comes_by_itself(unused_tcp_port: int) -> None:
    async with many(unused_tcp_port, 3) as everybody:
        broadcast = planted.broadcast_of(everybody.sender)
        original, broadcast.send = broadcast.send, lambda frames: None
        version = await everybody.sender.publish(fill(everybody.source, 1))
        broadcast.send = original
        await everybody.sender.wait_version(version, timeout=10)
        assert everybody.read == [{1}] * 3
        await everybody.sender.send_async(fill(everybody.source, 2))
        assert everybody.read == [{2}] * 3


@pytest.mark.thorough
async def test_pushed_bytes_that_are_lost_are_fetched_and_no_others(unused_tcp_port: int) -> None:
    async with many(unused_tcp_port, 3, width=4 * MIB) as everybody:
        sender = everybody.sender
        broadcast, count = planted.broadcast_of(sender), 0
        original = broadcast.send

        def every_fourth_is_lost(frames: Any) -> None:
            nonlocal count
            count += 1
            if count % 4:
                original(frames)

        broadcast.send = every_fourth_is_lost
        before = [status.bytes_sent for status in sender.status().values()]
        await sender.send_async(fill(everybody.source, 1))
        assert everybody.read == [{1}] * 3
        after = [status.bytes_sent for status in sender.status().values()]
        for one, other in zip(before, after, strict=True):
            assert 16 * MIB < other - one < 22 * MIB  # four or five of the 17 chunks a second time


@pytest.mark.requirement(196)
async def test_a_trainer_that_starts_again_is_subscribed_to_at_its_new_port(unused_tcp_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    first = ZMQWeightSyncScheme(endpoint=endpoint, fanout=True)
    first.init_on_sender(model_id="policy", model=Model(1), num_workers=3)
    workers = [receiver_of(first, i, Model(), reconnect=True) for i in range(3)]
    async with first:
        await asyncio.gather(first.connect(), *(worker.connect() for worker in workers))
        await until(lambda: len(planted.subscribed(first)) == 3)
        port = planted.broadcast_of(first).port
    second = ZMQWeightSyncScheme(endpoint=endpoint, fanout=True)
    second.init_on_sender(model_id="policy", model=(source := Model(2)), num_workers=3)
    try:
        await second.connect(timeout=20)
        await until(lambda: len(planted.subscribed(second)) == 3)
        assert planted.broadcast_of(second).port != port
        await second.send_async()
        with planted.counted(second) as sent:
            await second.send_async(fill(source, 3))
        assert sent == ["Cast"]
    finally:
        for one in (*workers, second):
            await one.shutdown()


@pytest.mark.parametrize("lacks", ["the port", "a socket"])
async def test_whoever_cannot_subscribe_does_without(
    unused_tcp_port: int, lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(context: Any) -> Any:
        raise zmq.ZMQError(errno.EMFILE)

    async with many(unused_tcp_port, 3) as everybody, throttled((unused_tcp_port,), 1e9) as network:
        third = receiver_of(everybody.sender, 3, model := Model())
        if lacks == "the port":
            third.bus.connect_endpoint = f"tcp://{network.host}:{unused_tcp_port}"  # and no other one of the sender's
        else:
            monkeypatch.setattr("asyncsync.net.rendezvous.subscriber", exhausted)
        await third.connect(timeout=5)
        for value in (1, 2):
            with planted.counted(everybody.sender) as sent:
                await everybody.sender.send_async(fill(everybody.source, value))
            assert sent == ["Cast"]
            assert [*everybody.read, read(model)] == [{value}] * 4
        assert len(planted.subscribed(everybody.sender)) == 3
        assert len(everybody.sender.bus.link.machine.fanout.reached) == 3  # it was sent its own copy at once
        assert caplog.text.count("no fan-out, so this worker") == (lacks == "a socket")
        await third.shutdown()


async def test_fan_out_is_over_tcp_only_and_can_be_left_out(unused_tcp_port: int) -> None:
    async with crew(2, scheme=ZMQWeightSyncScheme(fanout=True)) as everybody:
        assert planted.broadcast_of(everybody.sender) is None
    async with many(unused_tcp_port, 2, fanout=False) as everybody:
        assert planted.broadcast_of(everybody.sender) is None
        await everybody.sender.send_async(fill(everybody.source, 1))
        assert everybody.read == [{1}] * 2


@pytest.mark.requirement(207)
def test_what_fanout_may_be() -> None:
    for wrong in ("pull", "push", None, 1):
        for made in (Bus, ZMQWeightSyncScheme):
            with pytest.raises(ValueError, match=f"not {wrong!r} .fanout=True does"):
                made(fanout=wrong)
    with pytest.raises(ValueError, match="Bus"):
        ZMQWeightSyncScheme(bus=Bus(), fanout=True)
    assert ZMQWeightSyncScheme().bus.fanout is False


@pytest.mark.thorough
async def test_a_reader_of_1_mb_per_second_delays_nobody_and_skips_versions(unused_tcp_port: int) -> None:
    width = MIB  # 4 MiB
    async with many(unused_tcp_port, 4, width=width) as everybody:
        sender, source = everybody.sender, everybody.source
        ports = (unused_tcp_port, planted.broadcast_of(sender).port)
        async with throttled(ports, 1e6) as network:
            slow = receiver_of(sender, 4, model := Model(width=width))
            slow.bus.connect_endpoint = f"tcp://{network.host}:{unused_tcp_port}"
            await slow.connect(timeout=30)
            await until(lambda: len(planted.subscribed(sender)) == 5)
            begun = time.perf_counter()
            for value in range(1, 21):
                version = await sender.publish(fill(source, value))
                await sender.wait_version(version, worker_ids=[0, 1, 2, 3], timeout=10)
                assert everybody.read == [{value}] * 4
            assert time.perf_counter() - begun < 20  # the slow one takes 4 s for each
            assert planted.pool(sender).peak <= 5
            await sender.wait_version(version, timeout=40)
            assert read(model) == {20}
            assert sender.status()[4].bytes_sent < 5 * 4 * width
            await slow.shutdown()
