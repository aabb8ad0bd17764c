"""A Collector that is iterated in both styles, runs free, pauses, saves its state, and ends."""

import asyncio
import gc
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import Collector
from asyncsync.errors import AckTimeout, ClosedError
from helpers.collecting_single import KINDS, Actor, Buffer, WalkEnv, environment

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore::DeprecationWarning:torchrl")


def collector(env: Any = None, policy: Any = None, **kwargs: Any) -> Any:
    return Collector(env or WalkEnv(), policy or Actor(), **({"frames_per_batch": 8} | kwargs))


class Stopping(WalkEnv):
    """Waits in a step until it is let go."""

    def __init__(self, at: int = 3) -> None:
        super().__init__()
        self.at = at
        self.inside, self.go = threading.Event(), threading.Event()

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
        if self.steps == self.at:
            self.inside.set()
            assert self.go.wait(20)
        return super().step_and_maybe_reset(td)


def stopped() -> tuple[Stopping, Any]:
    """A collector that runs free and is inside a step, and its environment."""
    env = Stopping()
    c = collector(env, replay_buffer=Buffer())
    c.start()
    assert env.inside.wait(20)
    return env, c


@pytest.mark.parametrize("kind", KINDS)
async def test_both_styles_give_the_same_batches(kind: str) -> None:
    with collector(env := environment(kind), total_frames=24) as c:
        expected = list(c)
        assert env.closed == 1 if kind == "own" else env.is_closed, "the budget is reached"
        assert c.next() is None
    async with collector(environment(kind), total_frames=24) as c:
        got = [batch async for batch in c]
        with pytest.raises(StopAsyncIteration):
            await anext(c)
    assert len(got) == len(expected) == 3
    assert all((a == b).all() for a, b in zip(got, expected, strict=True))


async def test_a_rollout_never_runs_on_the_event_loop() -> None:
    seen = set()

    def policy(observation: torch.Tensor) -> torch.Tensor:
        seen.add(threading.get_ident())
        return observation[..., :1]

    async with collector(policy=policy) as c:
        for _ in range(3):
            await anext(c)
    assert len(seen) == 1
    assert threading.get_ident() not in seen


async def test_a_batch_whose_caller_was_cancelled_is_the_next_callers() -> None:
    env = Stopping()
    with collector(total_frames=24) as c:
        expected = list(c)
    async with collector(env, total_frames=24) as c:
        waiting = asyncio.ensure_future(anext(c))
        await asyncio.to_thread(env.inside.wait, 20)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        env.go.set()
        first, second = await asyncio.gather(anext(c), anext(c))
        third = c.next()
        assert c.next() is None
    assert all((a == b).all() for a, b in zip((first, second, third), expected, strict=True))


def test_a_batch_left_by_one_loop_is_the_next_ones() -> None:
    env = Stopping()
    with collector(total_frames=16) as c:
        expected = list(c)

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(c), 0.01)

    async def rest() -> list[Any]:
        return [batch async for batch in c]

    with collector(env, total_frames=16) as c:
        asyncio.run(leave())
        env.go.set()
        assert all((a == b).all() for a, b in zip(asyncio.run(rest()), expected, strict=True))


async def test_an_error_in_a_rollout_that_nobody_awaits_is_the_next_callers() -> None:
    env = Stopping()
    env.fail_at = 5
    async with collector(env) as c:
        waiting = asyncio.ensure_future(anext(c))
        await asyncio.to_thread(env.inside.wait, 20)
        waiting.cancel()
        env.go.set()
        with pytest.raises(RuntimeError, match="the environment broke"):
            await anext(c)
        assert (await anext(c)).shape == (8,)


def more_comes(buffer: Buffer) -> None:
    before, deadline = len(buffer.extended) + len(buffer.added), time.monotonic() + 20
    while len(buffer.extended) + len(buffer.added) == before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.requirement(155, 165)
@pytest.mark.parametrize("kind", KINDS)
def test_a_started_collector_fills_the_buffer_until_its_shutdown(kind: str) -> None:
    buffer = Buffer()
    c = collector(environment(kind), replay_buffer=buffer)
    c.start()
    for _ in range(3):
        more_comes(buffer)
    assert c.is_running()
    c.async_shutdown(timeout=10)
    assert not c.is_running()
    assert c.closed
    count = len(buffer.extended)
    assert all(batch.shape == (8,) for batch in buffer.extended)
    with pytest.raises(ClosedError):
        c.start()
    assert len(buffer.extended) == count


@pytest.mark.requirement(165)
def test_a_started_collector_ends_at_its_total() -> None:
    buffer = Buffer()
    c = collector(replay_buffer=buffer, total_frames=24)
    c.start()
    c._background_thread.join(20)
    assert len(buffer.extended) == 3
    assert c.env.closed == 1
    c.async_shutdown()
    assert c.env.closed == 1


@pytest.mark.requirement(158)
@pytest.mark.parametrize("extend", [True, False])
def test_nothing_steps_or_is_written_while_a_free_collector_pauses(extend: bool) -> None:
    env, buffer = WalkEnv(), Buffer()

    def counts() -> tuple[int, int, int]:
        return env.steps, len(buffer.extended), len(buffer.added)

    with collector(env, replay_buffer=buffer, extend_buffer=extend) as c:
        c.start()
        for _ in range(20):
            more_comes(buffer)  # it goes on, also after an exception
            with pytest.raises(LookupError), c.pause():  # noqa: PT012
                before = counts()
                c.update_policy_weights_(Actor(0.5))
                assert counts() == before
                raise LookupError


@pytest.mark.requirement(158)
def test_a_pause_waits_for_the_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    env, c = stopped()
    with c:
        monkeypatch.setattr("asyncsync.collectors.single.ANSWER_SECONDS", 0.05)
        with pytest.raises(AckTimeout, match=r"did not end within 0\.05 s"):
            c.pause().__enter__()
        threading.Timer(0.05, env.go.set).start()
        monkeypatch.setattr("asyncsync.collectors.single.ANSWER_SECONDS", 20)
        with c.pause():
            steps = env.steps
            assert steps == 4
            with pytest.raises(RuntimeError, match="pause"):
                c.rollout()
        while env.steps == steps:
            assert c.is_running()
    with collector() as idle, idle.pause():
        pass


def test_what_ended_a_free_collector_is_raised_by_whoever_asks(caplog: pytest.LogCaptureFixture) -> None:
    for ask in ("pause", "async_shutdown", "shutdown"):
        env = WalkEnv()
        env.fail_at = 3
        c = collector(env, replay_buffer=Buffer())
        c.start()
        c._background_thread.join(20)
        with pytest.raises(RuntimeError, match="the environment broke"):  # noqa: PT012
            if ask == "pause":
                with c.pause():
                    pass
            else:
                getattr(c, ask)()
        c.shutdown()
        assert env.closed == 1
    assert "the environment broke" in caplog.text


def test_two_that_wait_for_the_end_of_a_pause_do_not_both_roll_out() -> None:
    env = Stopping(at=0)
    with collector(env) as c, ThreadPoolExecutor(2) as threads:
        with c.pause():
            asking = [threads.submit(c.next) for _ in range(2)]
            while len(c._lock._changed._waiters) < 2:
                time.sleep(0.001)
        assert env.inside.wait(20)
        [refused], [rolling] = wait(asking, 20, FIRST_COMPLETED)
        env.go.set()
        with pytest.raises(RuntimeError, match="already collecting"):
            refused.result()
        assert rolling.result(20).shape == (8,)


def test_an_interrupt_while_a_pause_waits_pauses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    env, c = stopped()
    with c:

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(c._lock._changed, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                c.pause().__enter__()
        with pytest.raises(RuntimeError, match="already collecting, in the thread 'asyncsync-collector-free'"):
            c.rollout()
        env.go.set()
        steps = env.steps
        while env.steps < steps + 10:
            assert c.is_running()


async def test_awaiting_a_batch_inside_pause_is_refused() -> None:
    env = Stopping()
    with collector(env) as c:
        with c.pause(), pytest.raises(RuntimeError, match="pause"):
            await asyncio.wait_for(anext(c), 10)
        waiting = asyncio.ensure_future(anext(c))
        assert await asyncio.to_thread(env.inside.wait, 20)
        threading.Timer(0.05, env.go.set).start()
        with c.pause():
            with pytest.raises(RuntimeError, match="pause"):
                await asyncio.wait_for(anext(c), 10)
            with pytest.raises(RuntimeError, match="pause"):
                c.next()
        assert (await waiting).shape == (8,)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
async def test_what_would_end_the_iteration_silently_is_an_error(kind: type[Exception]) -> None:
    def hook() -> None:
        raise kind("the user's own")

    silent = f"{kind.__name__}.*the user's own"
    for go in (lambda c: c.next(), lambda c: c.rollout(), list):
        with collector(pre_collect_hook=hook) as c, pytest.raises(RuntimeError, match=silent):
            go(c)
    with collector(pre_collect_hook=hook) as c, pytest.raises(RuntimeError, match=silent):
        await anext(c)


@pytest.mark.requirement(208)
@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_is_idempotent_and_a_closed_collector_only_tells_its_state(kind: str) -> None:
    env = environment(kind)
    with collector(env, replay_buffer=Buffer()) as c:
        c.next()
        before = c.state_dict()
    for _ in range(3):
        c.shutdown(timeout=1.0)
    assert c.closed
    assert env.closed == 1 if kind == "own" else env.is_closed
    set_seed, load = (lambda: c.set_seed(3)), (lambda: c.load_state_dict(before))
    for use in (c.next, c.rollout, c.reset, set_seed, load, c.pause().__enter__):
        with pytest.raises(ClosedError, match="this Collector has been shut down"):
            use()
    assert c.state_dict()["frames"] == before["frames"] == 8


@pytest.mark.requirement(208)
def test_who_waits_for_a_step_finds_the_collector_closed() -> None:
    env, c = stopped()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(wanted) for wanted in (c.reset, c.pause().__enter__)]
        while len(c._lock._owners) < 2:
            time.sleep(0.001)
        c.shutdown(timeout=0.05)
        env.go.set()
        for each in waiting:
            with pytest.raises(ClosedError, match=r"^this Collector has been shut down$"):
                each.result(20)
    c._background_thread.join(20)
    assert env.closed == 1


@pytest.mark.requirement(208)
async def test_shutdown_from_async_with_and_after_errors() -> None:
    env = WalkEnv()
    with pytest.raises(LookupError):  # noqa: PT012
        async with collector(env) as c:
            await anext(c)
            raise LookupError
    assert env.closed == 1
    with pytest.raises(ClosedError):
        await anext(c)
    kept = WalkEnv()
    c = collector(kept)
    c.shutdown(close_env=False)
    assert kept.closed == 0


@pytest.mark.requirement(208)
async def test_a_rollout_under_way_ends_with_shutdown() -> None:
    env = Stopping()
    async with collector(env, frames_per_batch=1000) as c:
        waiting = asyncio.ensure_future(anext(c))
        await asyncio.to_thread(env.inside.wait, 20)
        asyncio.get_running_loop().call_later(0.05, env.go.set)
        await asyncio.to_thread(c.shutdown, 10.0)
        assert env.steps == 4
        assert env.closed == 1
        with pytest.raises(ClosedError):
            await waiting


@pytest.mark.requirement(208)
@pytest.mark.parametrize("ends", ["later", "together with it"])
def test_a_step_that_outlasts_the_timeout_is_not_waited_for(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    env, c = stopped()
    close = c._lock.close

    def late(*args: Any) -> bool:
        over = close(*args)
        env.go.set()
        c._background_thread.join(20)
        return over

    if ends == "together with it":
        c._lock.close = late
    c.shutdown(timeout=0.05)
    if ends == "later":
        assert "did not end in time" in caplog.text
        assert env.closed == 0
        env.go.set()
        c._background_thread.join(20)
    assert env.closed == 1, "no environment is left open"


@pytest.mark.parametrize("kind", KINDS)
def test_seed_reset_and_state(kind: str) -> None:
    policy = Actor(0.3)
    with collector(environment(kind), policy) as c:
        assert isinstance(c.set_seed(4), int)
        assert c._rollouts.carrier.root["observation"].tolist() == [0.0, 1.0, 0.0], "it resets"
        assert c._rollouts.carrier.root["collector", "traj_ids"] == 1
        list(zip(range(2), c, strict=False))
        state = c.state_dict()
    assert set(state) == {"policy_state_dict", "env_state_dict", "frames", "iter", "versions", "traj_pool"}
    assert (state["frames"], state["iter"]) == (16, 1)
    with collector(environment(kind), Actor(), total_frames=24) as c:
        c.load_state_dict(state)
        assert c.policy.gain == policy.gain
        assert c._rollouts.carrier.root["collector", "traj_ids"] == state["traj_pool"]["traj_id"]
        [batch] = list(c)
        assert batch["collector", "policy_version"].unique().tolist() == [1], "not that of the weights before"
        with pytest.raises(KeyError, match="'frames', 'iter'"):
            c.load_state_dict({"policy_state_dict": {}, "env_state_dict": {}})


class After:
    """What ends rollouts once an environment has made so many steps."""

    def __init__(self, env: WalkEnv, steps: int, c: Any) -> None:
        self.env, self.steps, self.collector = env, steps, c

    @property
    def wants_hold_to_end(self) -> bool:
        return self.env.steps >= self.steps

    def wants_rollout_to_end(self) -> bool:
        assert not self.collector.acting_weights.gate.held_by_caller, "it may wait, and an update must not wait for it"
        return self.wants_hold_to_end


def test_an_interrupted_rollout_gives_the_frames_so_far() -> None:
    env = WalkEnv((2,))
    with collector(env, frames_per_batch=20) as c, collector(WalkEnv((2,)), frames_per_batch=20) as other:
        c._rollouts.signals = After(env, 3, c)
        batch = c.rollout()
        assert batch.names == [None, "time"]
        assert (batch == other.rollout()[:, :3]).all()
        assert c.rollout().shape == (2, 1), "one step at least"
        c._rollouts.signals = After(env, 1000, c)
        assert c.rollout().shape == (2, 10)


def test_max_lag_waits_for_nothing_where_no_scheme_brings_weights() -> None:
    with collector(max_lag=1) as c:
        c.acting_weights.newest_above = lambda: 9  # by a count that nothing here follows
        assert c.rollout()["collector", "policy_version"].tolist() == [0] * 8


async def test_a_collector_that_is_forgotten_ends_its_thread() -> None:
    c = collector()
    await anext(c)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "asyncsync-collector"]
    del c

    def until_it_ends() -> None:
        deadline = time.monotonic() + 10
        while thread.is_alive():
            assert time.monotonic() < deadline
            gc.collect()
            thread.join(0.01)

    await asyncio.to_thread(until_it_ends)
