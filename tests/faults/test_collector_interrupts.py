"""Ctrl-C strikes the thread that rolls out, or ends no system call: all goes on, and nobody waits for ever."""

import asyncio
import collections
import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers import blocking_interrupts, planted
from helpers.blocking_crew import connect, crew, new_receiver, new_sender
from helpers.blocking_interrupts import sigint_elsewhere, sigint_raises, strike_everywhere
from helpers.collecting_multi import make, options, policy
from helpers.collecting_weights import Level, LevelEnv, update
from helpers.processes import value_of


class Strike:
    """Raises SIGINT when it is first called in the main thread."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self) -> None:
        if not self.done and threading.current_thread() is threading.main_thread():
            self.done = True
            signal.raise_signal(signal.SIGINT)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*args: Any) -> Any:
            self()
            return function(*args)

        return struck


class Changes(collections.deque[Any]):
    """An update is taken off the list, and then it strikes."""

    def __init__(self, strike: Strike) -> None:
        super().__init__()
        self.strike = strike

    def popleft(self) -> Any:
        change = super().popleft()
        self.strike()
        return change


@pytest.fixture
def strike() -> Iterator[Strike]:
    with sigint_raises():
        yield Strike()


@pytest.mark.parametrize("style", ["blocking", "async"])
@pytest.mark.parametrize("when", ["while it is applied", "when it has been"])
def test_an_update_of_another_thread_ends(strike: Strike, when: str, style: str) -> None:
    begin = threading.Event()

    class Telling(LevelEnv):
        def step_and_maybe_reset(self, td: Any) -> Any:
            if self.steps == 5:
                begin.set()
                while not one.acting_weights.gate.pending:
                    pass
            return super().step_and_maybe_reset(td)

    with Collector(Telling(), Level(0), frames_per_batch=100) as one:
        if when == "while it is applied":
            one._apply_locally = strike.before(one._apply_locally)  # type: ignore[method-assign]
        else:
            one.acting_weights._changes = Changes(strike)
        ended = threading.Event()

        def other() -> None:
            assert begin.wait(20)
            update(one, style, Level(5), timeout=0.5)
            ended.set()

        thread = threading.Thread(target=other)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            one.next()
        assert ended.wait(10), "without another rollout"
        thread.join()
        assert strike.done
        assert one.policy_version == 1
        assert one.next()["action"].unique().tolist() == [5.0]


@pytest.mark.parametrize("moment", ["when it has begun", "before it has ended"])
def test_a_rollout_whose_turn_was_interrupted_can_begin_again(strike: Strike, moment: str) -> None:
    class Condition(threading.Condition):
        def __exit__(self, *exc: Any) -> None:
            super().__exit__(*exc)
            if moment == "when it has begun" and one._lock._may_step:
                strike()

        def notify_all(self) -> None:
            if moment == "before it has ended":
                strike()
            super().notify_all()

    with Collector(LevelEnv, Level(0), frames_per_batch=4) as one:
        one._lock._changed = Condition()
        with pytest.raises(KeyboardInterrupt):
            one.next()
        assert one.next() is not None


def test_a_hold_that_is_interrupted_while_it_is_left_keeps_nobody_waiting(
    strike: Strike, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Collector(LevelEnv, Level(0), frames_per_batch=4) as one:
        one.next()
        planted.on_leaving_the_gate(monkeypatch, strike.before)
        with pytest.raises(KeyboardInterrupt) as kept:
            one.next()
        other = threading.Thread(target=update, args=(one, "blocking", Level(5)), kwargs={"timeout": 10})
        other.start()
        other.join(5)
        assert not other.is_alive()
        update(one, "blocking", Level(6))
        assert one.next()["action"].unique().tolist() == [6.0]
        del kept
        gc.collect()


@pytest.mark.parametrize("processed", [False, True])
def test_wherever_the_wait_for_a_batch_is_interrupted_the_next_call_goes_on(processed: bool) -> None:
    """Nothing comes twice, and only one batch may be lost: that which was just handed out, or processed."""

    def interrupt() -> None:
        raise blocking_interrupts.Strike

    given = options(postproc=lambda batch: batch) if processed else options()
    with MultiAsyncCollector([make(length=10**6)], policy(), **given) as collector:
        batches: list[Any] = [iter(collector)]

        def following() -> Any:
            return next(batches[-1])

        for _ in range(8):
            batch = following()
        after, lost = batch["observation"][-1, 2] + 1, 0
        for _, result, raised in strike_everywhere(planted.DRIVER, following, interrupt):
            if raised is not None:
                batches.append(iter(collector))
            batch = result if raised is None else following()
            skipped = int(batch["observation"][0, 2] - after)
            assert skipped == 0 or (raised is not None and skipped == batch.numel())
            lost += skipped > 0
            after = batch["observation"][-1, 2] + 1
        assert lost <= (10 if processed else 4)


# -- signals that end no system call: just before one, or to another thread --------------------------------------------


@contextlib.contextmanager
def meanwhile(function: Callable[[], Any]) -> Iterator[None]:
    """Another thread calls it; it has ended when this block has."""
    thread = threading.Thread(target=function)
    thread.start()
    time.sleep(0.1)
    try:
        yield
    finally:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.requirement(192)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_connecting_ends(side: str) -> None:
    sender = new_sender(10, num_workers=1)
    receiver = new_receiver(sender)
    with sigint_elsewhere():
        (sender if side == "sender" else receiver).connect()
    connect(sender, receiver)
    sender.send(sender.model.fill(3))
    assert receiver.model.value == 3
    receiver.shutdown()
    sender.shutdown()


@pytest.mark.requirement(192)
def test_receiving_ends() -> None:
    with crew() as (sender, [receiver]):
        assert receiver.receive(0) is None
        for timeout in (None, 30):
            with sigint_elsewhere():
                receiver.receive(timeout)
        sender.send(sender.model.fill(3))
        assert value_of(receiver.receive(0)) == 3


class Slow(LevelEnv):
    """Makes no step before it may."""

    def __init__(self, leave: threading.Event) -> None:
        super().__init__()
        self.leave = leave

    def step_and_maybe_reset(self, td: Any) -> Any:
        self.leave.wait(20)
        return super().step_and_maybe_reset(td)


@pytest.mark.requirement(192)
def test_waiting_for_a_step_or_a_paused_collector_ends() -> None:
    leave, resume = threading.Event(), threading.Event()
    with Collector(Slow(leave), Level(0), frames_per_batch=4) as one:
        with meanwhile(one.next):
            with sigint_elsewhere():
                one.update_policy_weights_(Level(5))
            with sigint_elsewhere(), one.pause():
                pass
            leave.set()

        def pausing() -> None:
            with one.pause():
                resume.wait(20)

        with meanwhile(pausing):
            with sigint_elsewhere():
                one.next()
            resume.set()
        assert one.next() is not None


@pytest.mark.requirement(192)
def test_waiting_for_the_batch_of_a_cancelled_task_ends() -> None:
    leave = threading.Event()

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(one.__anext__(), 0.1)

    with Collector(Slow(leave), Level(0), frames_per_batch=4) as one:
        asyncio.run(cancelled())
        with sigint_elsewhere():
            one.next()
        leave.set()
        assert one.next() is not None


@pytest.mark.requirement(192)
@pytest.mark.thorough
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_waiting_for_workers_ends(kind: type) -> None:
    """Alone, in line, and beside a thread that waits for them."""
    with kind([make(delay=0.5)] * 2, policy(), **options()) as collector:
        with sigint_elsewhere():
            collector.next()
        assert collector.next().numel()
        if kind is MultiSyncCollector:
            for wait in (collector.next, lambda: collector.group.wait(lambda: None, 30.0)):
                with meanwhile(collector.next), sigint_elsewhere():
                    wait()
                assert collector.next().numel()


@pytest.mark.requirement(192)
@pytest.mark.parametrize("how", ["does not wait", "raises"])
def test_the_signal_of_these_tests_strikes_nobody_else(how: str) -> None:
    if how == "raises":
        with pytest.raises(LookupError), sigint_elsewhere():
            raise LookupError
    else:
        with pytest.raises(AssertionError, match="has not waited"), sigint_elsewhere(0.1):
            pass
    time.sleep(0.3)
