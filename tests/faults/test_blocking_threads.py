"""Many threads and many schemes on the one loop thread, a thousand lives of it. What a scheme leaves behind (a thread,
a descriptor, a directory) fails its test, as everywhere."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest

from asyncsync.sync import (
    Bus,
    ClosedError,
    MultiProcessWeightSyncScheme,
    NotConnected,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
)
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
