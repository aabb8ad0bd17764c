"""Evaluator: the newest weights, evaluated in a process of its own while training goes on."""

import asyncio
import gc
import inspect
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from asyncsync.collectors import Evaluator
from asyncsync.errors import AckTimeout, ClosedError, PeerLost, SchemaMismatch
from asyncsync.sync import ZMQWeightSyncScheme
from helpers.collecting_multi import Counting, Marked, WithModel, gone_within, make, policy
from helpers.torchrl_source import parameters

pytestmark = pytest.mark.requirement(228)

GIVEN: dict[str, Any] = {"num_trajectories": 3, "collector_kwargs": {"start_method": "forkserver"}}
LENGTH = 5


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Evaluator, TensorDictModule]]:
    """One worker for many tests, and the policy that is trained. An evaluation's reward is 10 times the weights."""
    source = policy(1.0)
    with Evaluator(make(length=LENGTH), source, **GIVEN) as evaluator:
        for _ in range(3):  # from now on it opens no files
            evaluator.evaluate()
        yield evaluator, source


def rewards(*results: Any) -> list[float]:
    return [result["eval/reward"] for result in results]


class Gate(Counting):
    """Its steps wait for a file of this name."""

    def __init__(self, path: Path, **arguments: Any) -> None:
        self.path = path
        super().__init__(**arguments)

    def step_and_maybe_reset(self, td: TensorDictBase) -> Any:
        while not self.path.exists():
            time.sleep(0.001)
        return super().step_and_maybe_reset(td)


def gated(path: Path, **arguments: Any) -> Evaluator:
    return Evaluator(lambda: Gate(path, length=LENGTH), policy(1.0), **(GIVEN | arguments))


# -- one evaluation ----------------------------------------------------------------------------------------------------


def test_an_evaluation_is_of_complete_episodes_with_the_weights_as_they_are(shared: Any) -> None:
    evaluator, source = shared
    source.module.fill(3.0)
    result = evaluator.evaluate(step=70)
    fps, version = result.pop("eval/fps"), result.pop("eval/policy_version")
    assert result == {
        "eval/reward": 30.0, "eval/reward_std": 0.0, "eval/num_episodes": 3, "eval/episode_length": 5.0, "eval/step": 70
    }  # fmt: skip
    assert fps > 0
    source.module.fill(4.0)
    again = evaluator.evaluate()
    assert (again["eval/reward"], again["eval/policy_version"]) == (40.0, version + 1)


@pytest.mark.requirement(170)
def test_weights_are_given_in_any_form_but_once_and_those_that_do_not_fit_are_refused(shared: Any) -> None:
    evaluator, source = shared
    other = policy(7.0)
    for weights in (other, TensorDict.from_module(other), other.state_dict()):
        assert rewards(evaluator.evaluate(weights=weights)) == [70.0]
    assert rewards(evaluator.evaluate(weights_dict={"policy": policy(6.0)})) == [60.0]
    with pytest.raises(SchemaMismatch):
        evaluator.evaluate(policy(1.0, numel=4))
    with pytest.raises(ValueError, match="value"):
        evaluator.evaluate(weights_dict={"value": policy()})
    with pytest.raises(ValueError, match="weights_dict"):
        evaluator.evaluate(source, weights_dict={"policy": source})
    source.module.fill(2.0)
    assert rewards(evaluator.evaluate()) == [20.0]


async def test_a_coroutine_awaits_its_evaluation_and_may_give_it_up(shared: Any) -> None:
    evaluator, _ = shared
    found = await asyncio.gather(*(evaluator.evaluate_async(policy(value), int(value)) for value in (1.0, 2.0, 3.0)))
    assert rewards(*found) == [10.0, 20.0, 30.0], "each has its own result"
    task = asyncio.create_task(evaluator.evaluate_async(policy(9.0)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rewards(await evaluator.evaluate_async(policy(4.0))) == [40.0]
    assert evaluator.poll() is None, "nobody else gets what was given up"


# -- while training goes on --------------------------------------------------------------------------------------------


def test_a_trigger_returns_at_once_and_evaluates_the_weights_of_that_moment(tmp_path: Path) -> None:
    with gated(tmp_path / "go") as evaluator:
        source = policy(5.0)
        assert evaluator.trigger_eval(source, step=1)
        source.module.fill(6.0)
        assert evaluator.pending
        assert evaluator.poll() is None
        assert not evaluator.trigger_eval(source), "one is under way: this one is skipped"
        (tmp_path / "go").touch()
        result = evaluator.wait()
        assert (result["eval/reward"], result["eval/step"]) == (50.0, 1)
        assert not evaluator.pending
        assert evaluator.wait() is None, "nothing is pending"


async def test_results_come_to_an_asynchronous_loop_while_training_goes_on() -> None:
    source = policy(0.0)
    async with await Evaluator.create(make(length=LENGTH, delay=0.002), source, **GIVEN) as evaluator:
        found: list[Any] = []

        async def show() -> None:
            async for result in evaluator:
                found.append(result)

        showing = asyncio.create_task(show())
        steps = accepted = 0
        async with asyncio.timeout(30):
            while len(found) < 4:
                source.module.fill(float(steps))  # a step of training
                accepted += evaluator.trigger_eval(step=steps)
                steps += 1
                await asyncio.sleep(0.001)
    await asyncio.wait_for(showing, 5)  # it ends with the evaluator
    assert all(result["eval/reward"] == 10.0 * result["eval/step"] for result in found), "one version in each"
    assert [result["eval/step"] for result in found] == sorted({result["eval/step"] for result in found})
    assert accepted - len(found) in (0, 1)
    assert steps > accepted, "training did not wait"


def test_the_newest_weights_are_evaluated_next(tmp_path: Path) -> None:
    with gated(tmp_path / "go", busy_policy="newest") as evaluator:
        assert all(evaluator.trigger_eval(policy(float(value)), step=value) for value in range(5))
        (tmp_path / "go").touch()
        found = [result["eval/reward"] for result in iter(evaluator.wait, None)]
        assert found[-1] == 40.0
        assert len(found) <= 2, "one may have begun before the others came"


def test_all_weights_are_evaluated_in_their_order(tmp_path: Path) -> None:
    with gated(tmp_path / "go", busy_policy="queue") as evaluator:
        assert all(evaluator.trigger_eval(policy(float(value))) for value in range(4))
        (tmp_path / "go").touch()
        assert rewards(*(evaluator.wait() for _ in range(4))) == [0.0, 10.0, 20.0, 30.0]
        with ThreadPoolExecutor(3) as threads:  # each of those who wait gets a result
            assert all(evaluator.trigger_eval(policy(float(value))) for value in range(3))
            assert sorted(rewards(*threads.map(lambda _: evaluator.wait(20), range(3)))) == [0.0, 10.0, 20.0]
        assert evaluator.wait() is None
        assert evaluator.trigger_eval(policy(9.0))
        assert rewards(evaluator.evaluate(policy(8.0))) == [80.0], "a caller waits for its own"
        assert rewards(evaluator.wait()) == [90.0]


def test_a_second_trigger_can_be_an_error(tmp_path: Path) -> None:
    with gated(tmp_path / "go", busy_policy="error") as evaluator:
        evaluator.trigger_eval()
        with pytest.raises(RuntimeError, match="another evaluation is under way"):
            evaluator.trigger_eval()
        assert evaluator.wait(0.01) is None
        with pytest.raises(AckTimeout):
            evaluator.evaluate(timeout=0.01)
        (tmp_path / "go").touch()
        assert evaluator.wait() is not None
        assert evaluator.trigger_eval()
        assert evaluator.poll(30) is not None


# -- what is evaluated -------------------------------------------------------------------------------------------------


def test_environments_contribute_equal_shares_however_long_their_episodes_are() -> None:
    def env() -> Counting:
        return Counting(length=torch.tensor([2, 6]), batch=(2,))  # type: ignore[arg-type]

    with Evaluator(env, policy(1.0), **(GIVEN | {"num_trajectories": 4})) as evaluator:
        result = evaluator.evaluate()
        assert (result["eval/num_episodes"], result["eval/episode_length"]) == (4, 4.0)
        assert (result["eval/reward"], result["eval/reward_std"]) == (8.0, torch.tensor([4.0, 4, 12, 12]).std().item())


class Summed(Counting):
    """Has the return so far, flags of its own, and frames that a recorder dumps."""

    def __init__(self, log: Path) -> None:
        super().__init__(length=LENGTH)
        self.transform = SimpleNamespace(dump=lambda step: log.write_text(str(step)))

    def step_and_maybe_reset(self, td: TensorDictBase) -> Any:
        td, root = super().step_and_maybe_reset(td)
        td["next"].set("episode_reward", self.steps * torch.ones(1))
        return td, root


def test_what_the_environment_and_the_user_add_is_used(tmp_path: Path) -> None:
    came: list[TensorDictBase] = []

    def metrics(episodes: TensorDictBase) -> dict[str, Any]:
        mask = episodes["collector", "mask"]
        return {"shape": list(episodes.shape), "frames": int(mask.sum()), "pid": os.getpid()}

    given = GIVEN | {"num_trajectories": 2, "metrics_fn": metrics, "log_prefix": "test", "on_result": came.append}
    with Evaluator(lambda: Summed(tmp_path / "dumped"), policy(), **given) as evaluator:
        result = evaluator.evaluate(step=12)
        assert result["test/reward"] == 7.5, "returns of 5 and 10"
        assert (result["test/shape"], result["test/frames"]) == ([2, 5], 10)
        assert result["test/pid"] in evaluator._collector.group.family.pids
        assert (tmp_path / "dumped").read_text() == "12"
        assert came[0]["test/reward"].item() == 7.5
        assert came[0]["test/step"].item() == 12


def test_a_limit_truncates_episodes_without_an_end() -> None:
    with Evaluator(make(length=10**9), policy(), **(GIVEN | {"max_steps": 7})) as evaluator:
        assert evaluator.evaluate()["eval/episode_length"] == 7.0


class Dropping(Marked):
    """Acts differently while it learns."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation) * (-1.0 if self.training else 1.0)


def test_a_factory_makes_the_policy_with_the_environment_and_it_does_not_learn() -> None:
    def factory(env: Counting) -> TensorDictModule:
        return TensorDictModule(Dropping(float(env.length)), in_keys=["observation"], out_keys=["action"])

    with Evaluator(make(length=LENGTH), policy_factory=factory, **GIVEN) as evaluator:
        assert rewards(evaluator.evaluate()) == [50.0], "its own weights, until it is given others"
        assert rewards(evaluator.evaluate(policy(2.0))) == [20.0]
        assert rewards(evaluator.evaluate()) == [20.0]
    schemes = {"policy": ZMQWeightSyncScheme()}
    source = policy(3.0)
    with Evaluator(make(length=LENGTH), source, policy_factory=policy, weight_sync_schemes=schemes, **GIVEN) as other:
        assert rewards(other.evaluate()) == [30.0]


def test_models_of_the_environment_are_evaluated_with_the_policy() -> None:
    name = "env.transform[0].module"

    def shown(episodes: TensorDictBase) -> dict[str, Any]:
        return {"model": episodes["model"].unique().tolist()}

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 6.0)
    schemes = {"policy": ZMQWeightSyncScheme(), name: ZMQWeightSyncScheme()}
    given = GIVEN | {"weight_sync_schemes": schemes, "metrics_fn": shown}
    with Evaluator(lambda: WithModel(length=LENGTH), policy(1.0), **given) as evaluator:
        result = evaluator.evaluate(weights_dict={"policy": policy(2.0), name: model})
        assert (result["eval/reward"], result["eval/model"]) == (20.0, [6.0])


# -- failures, and the end ---------------------------------------------------------------------------------------------


def test_what_an_evaluation_raises_is_raised_where_its_result_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with Evaluator(make(length=LENGTH, fail_at=8), policy(), **GIVEN) as evaluator:
        with pytest.raises(ValueError, match="the environment has failed") as caught:
            evaluator.evaluate()
        assert "step_and_maybe_reset" in str(caught.value.__cause__)
        assert evaluator.evaluate()["eval/num_episodes"] == 3, "the next one begins anew"

    def refuse(result: TensorDictBase) -> None:
        raise LookupError("nobody wants it")

    evaluator = Evaluator(make(length=LENGTH), policy(), on_result=refuse, **GIVEN)
    evaluator.trigger_eval()
    with pytest.raises(LookupError, match="nobody wants it"):
        evaluator.wait()
    evaluator.trigger_eval()
    while evaluator.pending:
        time.sleep(0.001)
    with pytest.raises(LookupError, match="nobody wants it"):
        evaluator.shutdown()
    assert "an evaluation failed" in caplog.text


def test_a_callback_may_ask_for_more_but_not_wait_for_it() -> None:
    found: list[Any] = []

    def more(result: TensorDictBase) -> None:
        for wait in (evaluator.evaluate, evaluator.wait) if not found else ():  # later a result may be there
            with pytest.raises(RuntimeError, match="on_result cannot wait for an evaluation"):
                wait()
        found.append(result["eval/step"].item())
        if len(found) < 3:
            assert evaluator.trigger_eval()

    given = GIVEN | {"on_result": more, "busy_policy": "queue"}
    with Evaluator(make(length=LENGTH), policy(), **given) as evaluator:
        evaluator.trigger_eval()
        assert [result["eval/step"] for result in iter(evaluator.wait, None)] == found == [0, 1, 2]


def test_a_killed_worker_is_told_to_everybody() -> None:
    with Evaluator(make(length=10**9), policy(), **GIVEN) as evaluator:
        evaluator.trigger_eval()
        os.kill(evaluator._collector.group.family.pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match="SIGKILL"):
            evaluator.wait()
        with pytest.raises(PeerLost, match="SIGKILL"):
            evaluator.trigger_eval()
        with pytest.raises(PeerLost, match="SIGKILL"):
            evaluator.evaluate()


async def test_the_end_stops_an_evaluation_under_way_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    evaluator = await Evaluator.create(make(length=10**9, delay=0.001), policy(), **GIVEN)
    pids = evaluator._collector.group.family.pids
    evaluator.trigger_eval()
    waiting = asyncio.create_task(anext(evaluator, None))
    evaluating = asyncio.create_task(asyncio.to_thread(evaluator.evaluate))
    await asyncio.sleep(0.05)
    begun = time.monotonic()
    await evaluator.shutdown_elsewhere()
    assert time.monotonic() - begun < 4
    assert await waiting is None, "async for ends"
    with pytest.raises(ClosedError):
        await evaluating
    assert gone_within(pids, 1.0)
    assert caplog.messages == []
    evaluator.shutdown()  # once more
    for call in (evaluator.trigger_eval, evaluator.evaluate, evaluator.wait):
        with pytest.raises(ClosedError):
            call()


def test_an_evaluator_that_is_forgotten_ends() -> None:
    evaluator = Evaluator(make(length=LENGTH), policy(), **GIVEN)
    pids = evaluator._collector.group.family.pids
    evaluator.evaluate()
    del evaluator
    gc.collect()
    assert gone_within(pids, 10.0)


def test_its_state_is_the_count_of_steps(shared: Any) -> None:
    evaluator, _ = shared
    evaluator.load_state_dict({"step_counter": 30})
    assert [evaluator.evaluate()["eval/step"] for _ in range(2)] == [30, 31]
    assert evaluator.state_dict() == {"step_counter": 32}
    evaluator.trigger_eval()
    with pytest.raises(RuntimeError, match=r"wait\(\) first"):
        evaluator.state_dict()
    evaluator.wait()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"env": Counting()}, TypeError, "env must be a callable.*not Counting"),
        ({"env": 3}, TypeError, "not int"),
        ({"policy": None}, TypeError, "nothing to evaluate"),
        ({"policy": Marked}, TypeError, "policy is the class Marked"),
        ({"policy_factory": policy()}, TypeError, "policy_factory"),
        ({"num_trajectories": 0}, ValueError, "num_trajectories must be at least 1"),
        ({"frames_per_batch": "9"}, TypeError, "frames_per_batch must be an int"),
        ({"frame_per_batch": 9}, TypeError, r"^Evaluator\(\): .* 'frame_per_batch'; did you mean 'frames_per_batch'"),
        ({"collector_kwargs": {"max_lags": 1}}, TypeError, "'max_lags'; did you mean 'max_lag'"),
        ({"backend": "ray", "collector_kwargs": {"restart": 1}}, TypeError, "'restart'; did you mean 'restarts'"),
        ({"busy_policy": "wait"}, ValueError, "unknown busy_policy 'wait': choose one of 'skip', 'newest', "),
        ({"backend": "thread"}, ValueError, "'thread'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Evaluator(**({"env": make(), "policy": policy()} | GIVEN | given))


def test_what_the_worker_raises_before_it_is_ready_is_raised_by_the_constructor() -> None:
    def env() -> Counting:
        raise LookupError("no such game")

    with pytest.raises(LookupError, match="no such game"):
        Evaluator(env, policy(), **GIVEN)


def test_it_has_the_names_of_torchrls() -> None:
    theirs = parameters("collectors/_evaluator.py", "Evaluator")
    left = theirs.pop("__init__") - set(inspect.signature(Evaluator.__init__).parameters)
    assert left == {"collector_cls", "num_gpus", "ray_kwargs"}, "those of its Ray actor, and a collector's choice"
    for name, wanted in theirs.items():
        own = inspect.getattr_static(Evaluator, name)
        own = own.fget if isinstance(own, property) else getattr(own, "__func__", own)
        assert wanted <= set(inspect.signature(own).parameters), name


class Lives(Counting):
    """Loses a life at each second step."""

    def step_and_maybe_reset(self, td: TensorDictBase) -> Any:
        found, root = super().step_and_maybe_reset(td)
        self.lost = not getattr(self, "lost", True)
        found.set(("next", "life"), torch.tensor([self.lost]))
        return found, root


def test_metrics_get_the_episodes_that_done_keys_tell() -> None:
    def rows(episodes: Any) -> dict[str, Any]:
        return {"rows": episodes["collector", "mask"].sum(-1).tolist()}

    arguments = GIVEN | {"done_keys": ("next", "life"), "metrics_fn": rows}
    with Evaluator(lambda: Lives(length=6), policy(1.0), **arguments) as evaluator:
        found = evaluator.evaluate()
    assert (found["eval/num_episodes"], found["eval/rows"]) == (3, [2, 2, 2])
