"""What goes wrong in a collector's workers comes up in the trainer, with its type and the worker's traceback."""

import asyncio
import dataclasses
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tensordict.nn import TensorDictModule

from asyncsync.collectors import MultiAsyncCollector, MultiSyncCollector
from asyncsync.errors import AckTimeout, ClosedError, PartialSendError, PeerLost, RemoteError
from helpers.collecting_multi import (
    BadPolicy,
    CannotTravel,
    Unpicklable,
    ask,
    fail_and_end,
    gone_within,
    make,
    options,
    policy,
)
from helpers.collecting_single import Buffer

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
STEP = "in step_and_maybe_reset"


def raises(kind: type[Exception], text: Any) -> Callable[..., Any]:
    def broken(*_: Any) -> Any:
        raise kind(text)

    return broken


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """No attribute of it can be set, neither its cause nor its notes."""

    code: int

    def __reduce__(self) -> Any:
        return Frozen, (self.code,)


class Shared(Buffer):
    """Stands for a shared replay buffer."""

    shared = True


def check(error: BaseException, text: str) -> None:
    """It has the worker's traceback, and tells which worker it was."""
    assert isinstance(error.__cause__, RemoteError)
    assert text in error.__cause__.remote_traceback
    assert any("worker 1 (pid " in note for note in error.__notes__)


@BOTH
def test_an_exception_of_the_environment(kind: Any) -> None:
    with kind([make(), make(fail_at=8)], policy(), **options()) as collector:
        pids = collector.group.family.pids
        with pytest.raises(ValueError, match="the environment has failed") as caught:
            list(collector)
        check(caught.value, STEP)
        assert collector.closed
        assert gone_within(pids, 1.0)


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"fail_at": 8}, ValueError, "the environment has failed"),
        ({"kill_at": 9}, PeerLost, "worker 1 .* was killed by SIGKILL"),
    ],
)
async def test_the_end_of_a_worker_in_a_coroutine(given: dict[str, int], error: type[Exception], word: str) -> None:
    async with MultiAsyncCollector([make(), make(**given)], policy(), **options()) as collector:
        with pytest.raises(error, match=word) as caught:
            async for _ in collector:
                pass
        if error is ValueError:
            check(caught.value, STEP)
        assert collector.closed


HOOK = raises(ArithmeticError, "the hook has failed")
POSTPROC = {"replay_buffer": Shared(), "postproc": raises(ArithmeticError, "the postproc has failed")}
BAD = TensorDictModule(BadPolicy(), in_keys=["observation"], out_keys=["action"])
# What is wrong: an environment, a policy, or options; what is raised, with which words; and a line of the traceback.
RAISED: dict[str, tuple[Any, Any, Any, Any, str, str]] = {
    "pre_collect_hook": (make(), policy(), {"pre_collect_hook": HOOK}, ArithmeticError, "the hook", "in broken"),
    "post_collect_hook": (make(), policy(), {"post_collect_hook": HOOK}, ArithmeticError, "the hook", "in broken"),
    "postproc": (make(), policy(), POSTPROC, ArithmeticError, "the postproc has failed", "in broken"),
    "policy": (make(), BAD, {}, KeyError, "the policy has failed", "in forward"),
    "cannot be pickled": (
        make(fail_at=2, error=functools.partial(Unpicklable, "what a pity")),
        *(policy(), {}, RemoteError, "Unpicklable: what a pity", STEP),
    ),
    "no attribute of it can be set": (
        make(fail_at=2, error=functools.partial(Frozen, 7)),
        *(policy(), {}, (RemoteError, dataclasses.FrozenInstanceError), ".", STEP),
    ),
    "an exit": (make(fail_at=2, error=SystemExit), policy(), {}, RemoteError, "SystemExit", STEP),
}


@pytest.mark.requirement(117)
@pytest.mark.parametrize("what", RAISED)
def test_what_a_worker_raises_comes_up_and_ends_the_collector(what: str) -> None:
    env, acting, given, error, word, line = RAISED[what]
    with MultiSyncCollector([env], acting, **options(**given)) as collector:
        with pytest.raises(error, match=word) as caught:
            collector.next()
        remote: Any = caught.value if isinstance(caught.value, RemoteError) else caught.value.__cause__
        assert line in remote.remote_traceback
        assert collector.closed
        with pytest.raises(ClosedError):
            collector.next()


NOWHERE = raises(LookupError, "there is no such environment")


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"policy_factory": NOWHERE}, LookupError, "no such environment"),
        ({"init_fn": NOWHERE}, LookupError, "no such environment"),
        ({"init_fn": raises(Frozen, 7)}, RemoteError, "Frozen: 7"),
        ({"init_fn": functools.partial(os._exit, 7)}, PeerLost, "ended with exit code 7.*had not started yet"),
    ],
)
def test_what_ends_a_worker_before_it_is_ready(given: dict[str, Any], error: type[Exception], word: str) -> None:
    acting = None if "policy_factory" in given else policy()
    with pytest.raises(error, match=word) as caught:
        MultiSyncCollector([make()], acting, **options(**given))
    if error is RemoteError:
        assert "in broken" in caught.value.remote_traceback  # type: ignore[attr-defined]


def impatient() -> Any:
    raise AckTimeout("the worker itself has waited in vain")


@pytest.mark.parametrize("where", ["while it is built", "in a call", "behind an update"])
def test_a_workers_own_timeout_is_raised_as_it_is(where: str) -> None:
    def fail() -> None:
        init_fn = impatient if where == "while it is built" else None
        with MultiSyncCollector([make(fail_at=2, error=impatient)], policy(), **options(init_fn=init_fn)) as collector:
            ask(collector)
            if where == "in a call":
                collector.state_dict()
            assert gone_within(collector.group.family.pids, 10)
            collector.update_policy_weights_(timeout=20)

    with pytest.raises(AckTimeout, match="the worker itself") as caught:
        fail()
    assert isinstance(caught.value.__cause__, RemoteError)


def test_what_cannot_travel_is_told_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="stays here") as caught:
        MultiSyncCollector([make()], policy(), **options(init_fn=functools.partial(print, CannotTravel())))
    assert any("cloudpickle" in note for note in caught.value.__notes__)


@BOTH
def test_a_killed_worker_is_noticed_at_once(kind: Any) -> None:
    with kind([make(delay=0.05)] * 2, policy(), **options(frames_per_batch=2000)) as collector:
        victim = collector.group.family.pids[1]
        killed = []

        def kill() -> None:
            os.kill(victim, signal.SIGKILL)
            killed.append(time.monotonic())

        timer = threading.Timer(0.5, kill)
        timer.start()
        with pytest.raises(PeerLost, match=rf"worker 1 \(pid {victim}\) was killed by SIGKILL \(exit code -9\)"):
            collector.next()
        noticed = time.monotonic()
        timer.join()
        assert noticed - killed[0] < 5.0  # shutting down the other one included
        assert collector.closed


@pytest.mark.requirement(165)
@pytest.mark.parametrize("way", ["pause", "async_shutdown", "shutdown"])
def test_what_ends_a_free_running_collector_surfaces(way: str, caplog: pytest.LogCaptureFixture) -> None:
    collector: Any = MultiSyncCollector([make(fail_at=20)], policy(), **options(replay_buffer=Shared()))
    try:
        collector.start()
        while collector.is_running():
            time.sleep(0.01)
        with pytest.raises(ValueError, match="the environment has failed"):
            collector.pause().__enter__() if way == "pause" else getattr(collector, way)()
        assert "background" in caplog.text
    finally:
        collector.shutdown()


def test_what_has_ended_a_free_running_collector_is_raised_once() -> None:
    collector: Any = MultiAsyncCollector([make(fail_at=20), make()], policy(), **options(replay_buffer=Shared()))

    def run() -> None:
        collector.start()
        while collector.is_running():
            time.sleep(0.01)

    try:
        run()
        with pytest.raises(ValueError, match="the environment has failed"):
            collector.pause().__enter__()
        run()  # there is nobody to set free
    finally:
        collector.shutdown()  # which has nothing to raise any more


def test_a_failure_just_before_the_end_of_a_free_running_collector_surfaces() -> None:
    given = options(replay_buffer=Shared(), frames_per_batch=24)
    collector: Any = MultiAsyncCollector([make(delay=0.01)], policy(), **given)
    collector.start()
    fail_and_end(collector, ValueError("a worker's"))
    with pytest.raises(ValueError, match="a worker's"):
        collector.shutdown()


@pytest.mark.parametrize("style", ["blocking", "async"])
def test_an_update_that_does_not_reach_a_killed_worker_says_how_it_ended(style: str) -> None:
    with MultiAsyncCollector([make()], policy(), **options()) as collector:
        collector.next()
        os.kill(collector.group.family.pids[0], signal.SIGKILL)

        def update() -> None:
            if style == "blocking":
                collector.update_policy_weights_(timeout=20)
            else:
                asyncio.run(collector.update_policy_weights_async(timeout=20))

        with pytest.raises(PeerLost, match="SIGKILL") as caught:
            update()
        assert isinstance(caught.value.__context__, PartialSendError)


def slow_to_make(log: str) -> Any:
    time.sleep(1.5)
    return make(log=log)()


@BOTH
def test_a_worker_that_is_still_being_built_when_another_fails_ends_by_itself(
    kind: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    with pytest.raises(LookupError, match="no such environment") as caught:
        kind([functools.partial(slow_to_make, str(log)), NOWHERE], policy(), **options())
    check(caught.value, "in broken")
    assert log.read_text().split()[1:] == ["closed"]
    assert "did not end" not in caplog.text


def test_the_same_mistake_of_several_workers_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LookupError, match="no such environment"):
        MultiSyncCollector([NOWHERE] * 3, policy(), **options())
    assert "Traceback" not in caplog.text
