"""Many threads and many schemes on the one loop thread, a thousand lives of it, and nothing left behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest

from asyncsync.sync import ClosedError, NotConnected
from helpers.blocking_crew import KINDS, connect, crew, idle, in_threads, new_receiver, new_sender
from helpers.processes import Filled, value_of

THREADS = 8


@pytest.mark.requirement(201)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("numel", "rounds"), [(1000, 60), (5 << 18, 6)], ids=["small", "large"])
def test_eight_threads_send_through_one_scheme(numel: int, rounds: int, kind: type) -> None:
    published: list[int] = []
    seen: list[float] = []

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
                    before = sender.version  # ours will be a later one
                    sender.send(weights)
                    version = before + 1
                assert all(r.version >= version for r in receivers)

        def look() -> None:
            while not over.is_set():
                for receiver in receivers:
                    low, high = receiver.model()
                    assert low == high, "torn"
                    seen.append(low)

        over = threading.Event()
        watch = threading.Thread(target=lambda: torn.extend(_caught(look)))
        torn: list[BaseException] = []
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


def _caught(function: Any) -> list[BaseException]:
    try:
        function()
    except BaseException as error:
        return [error]
    return []


@pytest.mark.requirement(201)
def test_eight_threads_with_a_scheme_each() -> None:
    def live(number: int) -> None:
        for i in range(3):
            sender = new_sender(1000, number)
            receiver = new_receiver(sender)
            done = threading.Thread(target=receiver.connect)
            done.start()
            sender.connect()
            done.join()
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
def test_two_hundred_schemes_leave_nothing_behind() -> None:
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.enumerate()
    for i in range(200):
        with crew(10, value=i) as (sender, [receiver]):
            sender.send(sender.model.fill(i + 0.5))
            assert receiver.model.value == i + 0.5
            directory = os.path.dirname(sender.bus.endpoint.removeprefix("ipc://"))
            assert os.path.isdir(directory)
        assert idle()
        assert not os.path.exists(directory)
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert threading.enumerate() == threads


@pytest.mark.requirement(85)
def test_fifty_schemes_that_never_connect_leave_nothing_behind() -> None:
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.enumerate()
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
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert threading.enumerate() == threads


@pytest.mark.requirement(85)
def test_shutdown_from_another_thread_ends_whatever_is_under_way() -> None:
    for i in range(30):
        with crew() as (sender, [receiver]):
            assert receiver.receive(0) is None
            begun = threading.Event()

            def wait(receiver: Any = receiver, begun: threading.Event = begun) -> None:
                begun.set()
                with pytest.raises(ClosedError):
                    receiver.receive()

            def end(scheme: Any = sender if i % 2 else receiver, begun: threading.Event = begun) -> None:
                assert begun.wait(5)
                scheme.shutdown()

            in_threads(wait, end, end)
    assert idle()


@pytest.mark.requirement(85)
def test_shutdown_while_another_thread_connects_leaves_nothing_open() -> None:
    for i in range(60):
        sender = new_sender(10, num_workers=1)
        chosen = sender if i % 2 else new_receiver(sender)
        barrier = threading.Barrier(2)

        def connecting(scheme: Any = chosen, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            with pytest.raises(ClosedError):
                scheme.connect(timeout=20)

        def ending(scheme: Any = chosen, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            scheme.shutdown()

        in_threads(connecting, ending)
        assert idle()


@pytest.mark.requirement(85)
def test_shutdown_twice_of_one_scheme_on_a_shared_bus_leaves_the_other_one_working() -> None:
    from asyncsync.sync import Bus, ZMQWeightSyncScheme

    bus = Bus(num_workers=1)
    senders = [ZMQWeightSyncScheme(bus=bus) for _ in range(2)]
    models = [Filled(10), Filled(10)]
    for i, scheme in enumerate(senders):
        scheme.init_on_sender(model_id=f"m{i}", model=models[i])
    import pickle

    apart = pickle.loads(pickle.dumps(senders))
    targets = [Filled(10), Filled(10)]
    for i, scheme in enumerate(apart):
        scheme.init_on_receiver(f"m{i}", model=targets[i], worker_idx=0)
    connect(bus, apart[0].bus)
    bus.send({"m0": models[0].fill(2), "m1": models[1].fill(3)})
    assert [t.value for t in targets] == [2, 3]
    senders[0].shutdown()
    senders[0].shutdown()
    assert senders[0].closed
    assert not senders[1].closed
    senders[1].send(models[1].fill(4))
    assert targets[1].value == 4
    for scheme in (*apart, senders[1]):
        scheme.shutdown()
        scheme.shutdown()
    assert idle()
