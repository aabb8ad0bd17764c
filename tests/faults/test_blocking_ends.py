"""Every blocking call ends within its timeout, and soon after Ctrl-C, at whatever moment; the scheme goes on."""

import os
import pickle
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from asyncsync import sync
from asyncsync.errors import AckTimeout, PartialSendError
from helpers import blocking_scenarios as scenarios
from helpers import planted
from helpers.blocking_crew import crew, idle, in_process, in_threads, new_sender
from helpers.blocking_interrupts import Strike, strike_everywhere
from helpers.blocking_scenarios import works
from helpers.blocking_workers import compute, follow
from helpers.process_crew import blocking_worker
from helpers.processes import LARGE, Filled, value_of

LIMIT = 0.1


@contextmanager
def in_time() -> Iterator[None]:
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert LIMIT / 2 < took < 5 * LIMIT, f"took {took:.2f} s"


@pytest.mark.requirement(195)
@pytest.mark.promise(15)
@pytest.mark.parametrize("numel", [1000, 5 << 18], ids=["small", "large"])
def test_send_wait_version_fetch_and_receive_end_within_their_timeouts(numel: int) -> None:
    with crew(numel) as (sender, [receiver]):
        assert receiver.receive(0) is None
        with in_time():
            assert receiver.receive(LIMIT) is None
        with receiver.hold():
            with in_time(), pytest.raises(PartialSendError, match=r"timed out|not applied|within"):
                sender.send(sender.model.fill(2), timeout=LIMIT)
            with in_time(), pytest.raises(PartialSendError):
                sender.wait_version(sender.version, timeout=LIMIT)
            with in_time(), pytest.raises(AckTimeout):
                receiver.wait_version(sender.version, timeout=LIMIT)
            with in_time(), pytest.raises(AckTimeout):
                receiver.fetch(timeout=LIMIT)
            with in_time():
                assert receiver.receive(LIMIT) is None
        sender.wait_version(sender.version)
        assert receiver.receive(5) is not None
        works(sender, receiver)


@pytest.mark.requirement(195)
def test_several_threads_that_wait_end_within_their_timeouts() -> None:
    with crew() as (sender, [receiver]):
        assert receiver.receive(0) is None
        with receiver.hold(), in_time():
            version = sender.publish(sender.model.fill(2))

            def wait() -> None:
                with pytest.raises(PartialSendError):
                    sender.wait_version(version, timeout=LIMIT)

            in_threads(*[wait] * 6, *[lambda: receiver.receive(LIMIT)] * 6)
        assert receiver.receive(5) is not None
        works(sender, receiver)


@pytest.mark.requirement(195)
def test_send_to_a_stopped_process_ends_within_its_timeout() -> None:
    sender = new_sender(1000, num_workers=1)
    with blocking_worker(sender, follow, 1000) as (worker, _):
        sender.connect()
        sender.send(sender.model.fill(2))
        os.kill(worker.pid, signal.SIGSTOP)
        while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:  # it may be in the middle of something
            time.sleep(0.001)
        with in_time(), pytest.raises(PartialSendError):
            sender.send(sender.model.fill(3), timeout=LIMIT)
        os.kill(worker.pid, signal.SIGCONT)
        sender.send(sender.model.fill(4))
    assert idle()


# -- a worker that computes without a pause ----------------------------------------------------------------------------


SOON = 0.1  # seconds, for 64 KiB


@pytest.mark.requirement(25)
@pytest.mark.parametrize(("numel", "rounds", "bound"), [(1 << 14, 15, SOON), (1 << 20, 5, 4 * SOON)])
def test_a_busy_main_thread_delays_an_update_by_few_of_its_turns(numel: int, rounds: int, bound: float) -> None:
    sender = new_sender(numel, num_workers=1)
    with blocking_worker(sender, compute, numel) as (_, pipe):
        sender.connect()
        assert pipe.recv() == "connected"
        took = []
        for i in range(rounds):
            sender.model.fill(i)
            time.sleep(0.003 * (i % 7))  # not in step with the worker's interpreter
            begin = time.perf_counter()
            sender.send()
            took.append(time.perf_counter() - begin)
        assert statistics.median(took) < 5 * bound
        sender.shutdown()
        assert pipe.poll(20)
        assert pipe.recv() > 0


# -- Ctrl-C: a real SIGINT, at many moments of every blocking call of a real process -----------------------------------


HUGE = 32 << 20  # float32 elements, 128 MiB
BOUND = 2.0  # seconds, for a copy to end that cannot be taken back; asserted at five times that


@pytest.mark.requirement(192)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        (scenarios.connecting, ("sender", 60, 0.012)),
        (scenarios.connecting, ("receiver", 60, 0.012)),
        (scenarios.sending, (1000, 60, 0.003)),
        (scenarios.sending, (HUGE, 12, 0.3)),
        (scenarios.receiving, (1000, 150, 0.003)),
        (scenarios.receiving, (LARGE, 60, 0.02)),
        (scenarios.fetching, (1000, 100, 0.002)),
        (scenarios.fetching, (LARGE, 60, 0.01)),
        (scenarios.waiting, (30, 0.003)),
        (scenarios.shutting_down, (40, 0.01)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value[:-1])),
)
def test_a_call_ends_soon_after_ctrl_c_and_loses_nothing(scenario: Any, arguments: tuple[Any, ...]) -> None:
    assert max(in_process(scenario, *arguments)) < 5 * BOUND


@pytest.mark.requirement(192)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # struck just before
@pytest.mark.parametrize("name", ["receive", "fetch", "send", "publish", "wait_version", "weights", "status"])
def test_an_exception_at_any_moment_of_a_call_loses_nothing(name: str) -> None:
    """What a signal handler raises, wherever the interpreter may run it in our code."""

    def strike() -> None:
        raise Strike

    with crew() as (sender, [receiver]):
        calls: dict[str, Callable[[], Any]] = {
            "receive": receiver.receive,
            "fetch": receiver.fetch,
            "send": sender.send,
            "publish": sender.publish,
            "wait_version": lambda: sender.wait_version(sender.version),
            "weights": lambda: receiver.weights,
            "status": sender.status,
        }
        sender.send(sender.model.fill(2))
        last = 0
        for place, result, raised in strike_everywhere(planted.BLOCKING_CALLS, calls[name], strike):
            assert raised is None or isinstance(raised, Strike), repr(raised)
            if name not in ("receive", "fetch") or result is None:
                result = receiver.receive(5)  # it was on its way
            assert value_of(result) == receiver.model.value
            sender.send(sender.model.fill(sender.version + 1000))
            assert receiver.model.value == sender.model.value
            last = place
        assert last > 15
    assert idle()


@pytest.mark.requirement(195, 243)
@pytest.mark.promise(15)
def test_an_exception_at_any_moment_of_taking_gives_the_version_back() -> None:
    def strike() -> None:
        raise Strike

    def take() -> None:
        with suppress(ArithmeticError), receiver.take(timeout=5):
            raise ArithmeticError("not applied: it can be taken again")

    sender = sync.ZMQWeightSyncScheme(min_workers=0)
    sender.init_on_sender(model_id="policy", model=Filled(1000, 1.0))
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver("policy", anonymous=True, apply="on_take")
    with sender, receiver:
        sender.connect()
        receiver.connect()
        last = 0
        for place, _, raised in strike_everywhere(planted.TAKING, take, strike):
            assert raised is None or isinstance(raised, Strike), repr(raised)
            struck = [frame.name for frame in traceback.extract_tb(raised.__traceback__ if raised else None)][2:-2]
            if struck != ["__exit__"]:  # before its first line: there, the block lasts as long as the exception
                take()
            last = place
        assert last > 15
        with receiver.take(1) as taken:
            assert value_of(dict(taken.items())) == 1
        sender.wait_version(1, timeout=5)
    assert idle()
