"""What every collector has: iteration in both styles, one end, hooks, and its place in something larger."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import asyncsync.collectors
from asyncsync import sync
from asyncsync.collectors import Collector
from asyncsync.errors import AckTimeout
from helpers.collecting_single import WalkEnv
from helpers.collecting_weights import Acting, Env, reading, step, update
from helpers.pairs import Model, fill


@contextmanager
def step_under_way(leaf: Collector) -> Iterator[None]:
    """A block during which another thread is inside a step."""
    inside, leave = threading.Event(), threading.Event()

    def step() -> None:
        with leaf.acting_weights.holds():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        assert inside.wait(10)
        yield
    finally:
        leave.set()
        thread.join()


@pytest.mark.requirement(208)
def test_context_managers_shut_down_off_the_loop_and_raise_what_that_raises() -> None:
    class Noting(Collector):
        def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
            self.thread = threading.current_thread()
            super().shutdown(timeout, close_env)

            if raises:
                raise OSError("not ended")

    async def asynchronously() -> None:
        async with leaf as entered:
            assert entered is leaf

    raises = False
    with Noting(WalkEnv, frames_per_batch=1) as leaf:
        assert not leaf.closed
    assert leaf.closed
    assert leaf.thread is threading.main_thread()
    leaf, raises = Noting(WalkEnv, frames_per_batch=1), True
    with pytest.raises(OSError, match="not ended"):
        asyncio.run(asynchronously())
    assert leaf.closed
    assert leaf.thread is not threading.main_thread()
    assert leaf.thread.daemon


def test_hooks_can_be_read_and_replaced() -> None:
    leaf = reading(pre_collect_hook=print)
    assert (leaf.pre_collect_hook, leaf.post_collect_hook) == (print, None)
    leaf.pre_collect_hook, leaf.post_collect_hook = None, print
    assert (leaf.pre_collect_hook, leaf.post_collect_hook) == (None, print)


@pytest.mark.requirement(172)
def test_worker_idx_from_0_or_an_error() -> None:
    leaf = reading(worker_idx=0)
    assert leaf.worker_idx == 0
    leaf.worker_idx = 3
    assert leaf.worker_idx == 3
    with pytest.raises(RuntimeError, match="worker_idx"):
        reading().worker_idx  # noqa: B018


def test_get_model_knows_the_policy_and_attribute_paths() -> None:
    leaf = reading()
    assert leaf.get_model("policy") is leaf.policy
    assert leaf.get_model("env.transform[0].module") is leaf.env.transform[0].module
    for wrong in ("critic", "env.transform[3].module", "env.transform['a']", "env..transform", ".env"):
        with pytest.raises(LookupError, match="has no model"):
            leaf.get_model(wrong)
    assert leaf.get_model("policy.inner") is leaf.get_model("inner") is leaf.policy.inner
    with pytest.raises(LookupError, match="a model id is 'policy', an attribute path from the policy"):
        leaf.get_model("policy.critic")


class Scheme:
    def _set_dist_connection_info(self, info: Any, *, worker_idx: int) -> Any:
        return (info, worker_idx)


@pytest.mark.requirement(156)
def test_cascade_execute_follows_a_path_and_calls() -> None:
    leaf: Any = Collector(Env, Acting(-1), frames_per_batch=1, worker_idx=2)
    leaf.table = {"policy": Scheme(), "env.transform[0].module": Scheme(), 3: Scheme(), 'a"b': Scheme()}
    for key in ("'policy'", '"policy"', "'env.transform[0].module'", "3", "'a\"b'"):
        assert leaf.cascade_execute(f"table[{key}]._set_dist_connection_info", "info", worker_idx=0) == ("info", 0)
    assert leaf.cascade_execute("env.transform[0].module.state_dict").keys() == Model().state_dict().keys()
    assert leaf.cascade_execute("env.transform[-1].module.forward") == {-1.0}
    leaf.register_scheme_receiver({"policy": sync.NoWeightSyncScheme()})
    assert leaf.cascade_execute("_receiver_schemes['policy'].status") == {}
    leaf.shutdown()


@pytest.mark.requirement(156)
def test_a_path_that_leads_nowhere_or_to_no_method() -> None:
    leaf = reading()
    for path in ("nothing.here", "env.transform[9]", "_receiver_schemes['policy'].connect", "env.transform[0", "a b"):
        with pytest.raises(ValueError, match="has no "):
            leaf.cascade_execute(path)
    with pytest.raises(TypeError, match=r"'env.transform' is a list"):
        leaf.cascade_execute("env.transform", 1)
    with pytest.raises(ValueError, match="has no "):
        leaf.cascade_execute("env.transform[setattr(sys,'evaluated',1)]")
    assert not hasattr(sys, "evaluated")


@pytest.mark.requirement(209)
def test_the_package_has_its_names() -> None:
    names = set(asyncsync.collectors.__all__)
    assert names >= {"Collector", "MultiCollector", "MultiSyncCollector", "MultiAsyncCollector", "RandomPolicy"}
    assert names >= {"GymEnv", "ExplorationType", "split_trajectories", "WeightUpdaterBase", "VanillaWeightUpdater"}
    assert names >= {"MultiProcessedWeightUpdater", "RayWeightUpdater"}
    assert names <= set(dir(asyncsync.collectors))
    assert all(getattr(asyncsync.collectors, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        asyncsync.collectors.Nonsense  # noqa: B018


# -- updates of a collector's own models ------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["blocking", "async"])
def test_an_update_that_finds_no_end_of_a_step_changes_nothing(style: str) -> None:
    leaf = reading(0)
    with step_under_way(leaf), pytest.raises(AckTimeout, match=r"did not end within 0\.05 s; no weights were changed"):
        update(leaf, style, Model(1), timeout=0.05)
    assert step(leaf) == ({0}, 0)
    leaf.update_policy_weights_(Model(1))
    assert leaf.policy_version == 1


async def test_concurrent_updates_are_applied_one_after_another_and_block_no_loop_meanwhile() -> None:
    leaf = reading(0)
    others = [threading.Thread(target=leaf.update_policy_weights_, args=(Model(4),)) for _ in range(3)]
    with step_under_way(leaf):
        updates = [asyncio.create_task(leaf.update_policy_weights_async(Model(value))) for value in (1, 2, 3)]
        for other in others:
            other.start()
        await asyncio.sleep(0.02)
        assert not any(update.done() for update in updates), "a step is under way"
        updates[1].cancel()
        await asyncio.sleep(0)
    done = await asyncio.gather(*updates, return_exceptions=True)
    for other in others:
        other.join(10)
    assert [type(result) for result in done] == [type(None), asyncio.CancelledError, type(None)]
    assert leaf.policy_version == 5


def test_an_interrupted_update_is_done_again_before_anybody_reads() -> None:
    leaf, calls = reading(0), []

    def interrupted() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        fill(leaf.policy, 5)

    with pytest.raises(KeyboardInterrupt):
        leaf.acting_weights.apply(interrupted)
    assert step(leaf)[0] >= {5.0}
    assert len(calls) == 2
