"""Ctrl-C strikes the thread that rolls out, at the worst of moments: all goes on, and nobody waits for ever."""

from __future__ import annotations

import collections
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncsync.collectors import Collector, MultiAsyncCollector
from helpers import blocking_interrupts, planted
from helpers.blocking_interrupts import sigint_raises, strike_everywhere
from helpers.collecting_multi import make, options, policy
from helpers.collecting_weights import Level, LevelEnv, update


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
                while not one._weights.gate.pending:
                    pass
            return super().step_and_maybe_reset(td)

    with Collector(Telling(), Level(0), frames_per_batch=100) as one:
        if when == "while it is applied":
            one._apply_locally = strike.before(one._apply_locally)  # type: ignore[method-assign]
        else:
            one._weights._changes = Changes(strike)
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
            if moment == "when it has begun" and one._lock._inside:
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
