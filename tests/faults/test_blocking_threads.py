"""Many threads and many schemes on the one loop thread, a thousand lives of it. What a scheme leaves behind (a thread,
a descriptor, a directory) fails its test, as everywhere."""

import asyncio
import gc
import os
import threading
import weakref
from typing import Any

import pytest
import uvloop

from asyncsync.errors import ClosedError, NotConnected
from asyncsync.sync import Bus, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.blocking_crew import connect, crew, idle, in_threads, new_receiver, new_sender
from helpers.pairs import passed_on
from helpers.processes import Filled, value_of

THREADS = 8


@pytest.mark.requirement(201)
@pytest.mark.parametrize(
    ("kind", "numel", "rounds"),
    [
        (ZMQWeightSyncScheme, 1000, 60),
        (ZMQWeightSyncScheme, 5 << 18, 6),
        (SharedMemWeightSyncScheme, 1000, 60),
        (MultiProcessWeightSyncScheme, 5 << 18, 6),
    ],
)
def test_eight_threads_send_through_one_scheme(kind: type, numel: int, rounds: int) -> None:
    published: list[int] = []
    torn: list[Any] = []
    over = threading.Event()

    with crew(numel, workers=2, of=kind) as (sender, receivers):

        def send(number: int) -> None:
            weights = Filled(numel)
            last = 0
            for i in range(rounds):
                weights.fill(1000 * number + i)
                if i % 3 == 0:
                    version = sender.publish(weights)
                    published.append(version)
                    sender.wait_version(version)
                    assert version > last
                    last = version
                else:
                    version = sender.version + 1  # at least
                    sender.send(weights)
                assert all(r.version >= version for r in receivers)

        def look() -> None:
            while not over.is_set():
                torn.extend(ends for r in receivers if len(set(ends := r.model())) > 1)

        watch = threading.Thread(target=look)
        watch.start()
        try:
            in_threads(*(lambda n=n: send(n) for n in range(THREADS)))
        finally:
            over.set()
            watch.join()
        assert torn == []
        assert len(set(published)) == len(published)
        assert sender.version == 1 + THREADS * rounds
        assert {r.version for r in receivers} == {sender.version}
        assert value_of(receivers[0].fetch()) == receivers[1].model.value


@pytest.mark.requirement(201)
def test_eight_threads_with_a_scheme_each() -> None:
    def live(number: int) -> None:
        for i in range(3):
            sender = new_sender(1000, number)
            receiver = new_receiver(sender)
            connect(sender, receiver)
            for k in range(10):
                value = 100 * number + 10 * i + k
                sender.send(sender.model.fill(value))
                assert value_of(receiver.receive(10)) == receiver.model.value == value
            assert [t.name for t in threading.enumerate()].count("asyncsync-loop") <= 1
            receiver.shutdown()
            sender.shutdown()

    in_threads(*(lambda n=n: live(n + 1) for n in range(THREADS)))
    assert idle()


@pytest.mark.requirement(85)
@pytest.mark.thorough
def test_two_hundred_schemes_end_with_their_thread_and_directory() -> None:
    for i in range(200):
        with crew(10, value=i) as (sender, [receiver]):
            sender.send(sender.model.fill(i + 0.5))
            assert receiver.model.value == i + 0.5
            directory = os.path.dirname(sender.bus.endpoint.removeprefix("ipc://"))
            assert os.path.isdir(directory)
        assert idle()
        assert not os.path.exists(directory)


@pytest.mark.thorough
@pytest.mark.requirement(85)
def test_fifty_schemes_that_never_connect_end_with_their_thread_or_when_they_are_collected() -> None:
    collected = []
    for i in range(50):
        for scheme in (new_sender(10, num_workers=1), new_receiver(new_sender(10))):
            if i % 3 == 0:
                with pytest.raises(NotConnected):
                    scheme.connect(timeout=0.001)
                assert not idle()
            if i % 3 == 2:
                collected.append(weakref.ref(scheme))
            else:
                scheme.shutdown()
                scheme.shutdown()
                assert scheme.closed
                with pytest.raises(ClosedError):
                    scheme.connect()
        del scheme
        assert idle()
    gc.collect()
    assert [ref() for ref in collected] == [None] * len(collected)


@pytest.mark.requirement(85)
@pytest.mark.parametrize("call", ["receive", "connect"])
def test_shutdown_in_another_thread_ends_what_is_under_way(call: str) -> None:
    """By either side, at whatever moment."""

    def race(scheme: Any, ended: Any) -> None:
        barrier = threading.Barrier(3)

        def calls() -> None:
            barrier.wait(5)
            with pytest.raises(ClosedError):
                getattr(scheme, call)()

        def ends() -> None:
            barrier.wait(5)
            ended.shutdown()

        in_threads(calls, ends, ends, timeout=20)

    for i in range(30):
        if call == "receive":
            with crew() as (sender, [receiver]):
                assert receiver.receive(0) is None
                race(receiver, sender if i % 2 else receiver)
        else:
            scheme = new_sender(10, num_workers=1) if i % 2 else new_receiver(new_sender(10, num_workers=1))
            race(scheme, scheme)
        assert idle()


@pytest.mark.requirement(85)
def test_shutdown_twice_of_one_scheme_on_a_shared_bus_leaves_the_other_one_working() -> None:
    bus = Bus(num_workers=1)
    senders = [ZMQWeightSyncScheme(bus=bus) for _ in range(2)]
    models, targets = ([Filled(10), Filled(10)] for _ in range(2))
    for i, scheme in enumerate(senders):
        scheme.init_on_sender(model_id=f"m{i}", model=models[i])
    receivers = passed_on(senders)
    for i, scheme in enumerate(receivers):
        scheme.init_on_receiver(f"m{i}", model=targets[i], worker_idx=0)
    connect(bus, receivers[0].bus)
    bus.send({"m0": models[0].fill(2), "m1": models[1].fill(3)})
    assert [t.value for t in targets] == [2, 3]
    senders[0].shutdown()
    senders[0].shutdown()
    assert senders[0].closed
    assert not senders[1].closed
    senders[1].send(models[1].fill(4))
    assert targets[1].value == 4
    for scheme in (*receivers, senders[1]):
        scheme.shutdown()
        scheme.shutdown()
    assert idle()


# -- where an event loop runs in the same thread, as in a notebook -----------------------------------------------------


def everything(sender: Any, receiver: Any) -> None:
    """Every method, from connect to shutdown, in this thread; only the two connects need one more."""
    with pytest.raises(NotConnected):
        sender.connect(timeout=0)
    with pytest.raises(NotConnected):
        receiver.connect(timeout=0)
    other = threading.Thread(target=receiver.connect)
    other.start()
    sender.connect()
    other.join()
    sender.send(sender.model.fill(2))
    assert receiver.model.value == 2
    assert value_of(receiver.receive()) == 2
    assert receiver.receive(0) is None
    version = sender.publish(sender.model.fill(3))
    sender.wait_version(version)
    receiver.wait_version(version)
    assert value_of(receiver.fetch()) == 3
    with receiver.hold():
        assert receiver.model() == (3, 3)
    assert value_of(receiver.weights) == value_of(sender.weights) == 3
    assert sender.status()[0].version == receiver.status()[0].version == version
    assert sender.bus.send({"policy": sender.model.fill(4)}) is None
    assert receiver.model.value == 4
    assert [t.name for t in threading.enumerate()].count("asyncsync-loop") == 1
    sender.shutdown()
    sender.shutdown()
    assert value_of(receiver.receive()) == 4
    with pytest.raises(ClosedError):
        receiver.receive()
    receiver.shutdown()
    receiver.shutdown()
    with pytest.raises(ClosedError):
        receiver.receive()
    assert idle()


@pytest.mark.requirement(201)
@pytest.mark.both_loops
async def test_every_method_in_a_coroutine() -> None:
    sender = new_sender(1000, num_workers=1)
    everything(sender, new_receiver(sender))


@pytest.mark.requirement(201)
@pytest.mark.both_loops
async def test_every_method_in_a_callback() -> None:
    loop = asyncio.get_running_loop()
    sender = new_sender(1000, num_workers=1)
    done: asyncio.Future[None] = loop.create_future()

    def callback() -> None:
        try:
            done.set_result(everything(sender, new_receiver(sender)))
        except BaseException as error:
            done.set_exception(error)

    loop.call_soon(callback)
    await done


@pytest.mark.requirement(72)
@pytest.mark.both_loops
async def test_send_async_returns_the_version_when_it_is_applied() -> None:
    with crew(workers=2) as (sender, receivers):
        for i in range(20):
            version = await sender.send_async(sender.model.fill(i + 2))
            assert version == sender.version
            assert {r.version for r in receivers} == {version}
            assert {r.model.value for r in receivers} == {i + 2}


@pytest.mark.requirement(192)
@pytest.mark.both_loops
async def test_send_async_cancelled_at_any_moment_leaves_the_scheme_usable() -> None:
    with crew(5 << 18) as (sender, [receiver]):
        outcomes = set()
        for i in range(40):
            task = asyncio.create_task(sender.send_async(sender.model.fill(2 * i)))
            await asyncio.sleep(0.0005 * i)
            task.cancel()
            try:
                await task
                outcomes.add("sent")
            except asyncio.CancelledError:
                outcomes.add("cancelled")
            sender.model.fill(-7)  # nothing reads it any more
            try:
                async with asyncio.timeout(0):
                    await sender.send_async()
            except TimeoutError:
                outcomes.add("timeout")
            version = await sender.send_async(sender.model.fill(2 * i + 1))
            assert (receiver.version, receiver.model.value) == (version, 2 * i + 1)
        assert {"cancelled", "timeout"} <= outcomes


@pytest.mark.requirement(201)
@pytest.mark.both_loops
async def test_the_callers_loop_goes_on_while_it_awaits() -> None:
    with crew() as (sender, [receiver]), receiver.hold():
        task = asyncio.create_task(sender.send_async(sender.model.fill(2)))
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.requirement(201)
def test_send_async_of_two_loops_in_two_threads_at_once() -> None:
    with crew(workers=2) as (sender, receivers):
        taken: list[int] = []

        async def send(weights: Filled) -> None:
            for i in range(50):
                versions = await asyncio.gather(*(sender.send_async(weights.fill(i + 2)) for _ in range(2)))
                taken.extend(versions)
                assert min(r.version for r in receivers) >= max(versions)

        in_threads(lambda: asyncio.run(send(Filled(1000))), lambda: uvloop.run(send(Filled(1000))))
        assert sorted(taken) == list(range(min(taken), max(taken) + 1))
        assert {r.model.value for r in receivers} == {51}
