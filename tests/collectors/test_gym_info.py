"""Entries of Gymnasium's info as observations: GymEnv(..., info_keys=...)."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

from asyncsync.collectors import Collector, GymEnv, MultiSyncCollector

pytestmark = pytest.mark.requirement(241)


class Masked(gymnasium.Env[Any, Any]):
    """Its info says how many steps there were, and which actions are allowed next; every third step, no "rare"."""

    observation_space = Box(0, 100, (2,), np.float32)
    action_space = Discrete(3)

    def __init__(self, length: int = 4, missing: tuple[str, ...] = ()) -> None:
        self.length, self.missing = length, missing

    def info(self) -> dict[str, Any]:
        mask = np.arange(3) != self.steps % 3
        info: dict[str, Any] = {"count": self.steps, "mask": mask, "text": "some"}
        if self.steps % 3 == 1:
            info["rare"] = np.full(2, self.steps, np.float64)
        return {name: value for name, value in info.items() if name not in self.missing}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return np.full(2, self.steps, np.float32), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(2, self.steps, np.float32), 1.0, self.steps == self.length, False, self.info()


RARE = {"rare": Box(0, 100, (2,), np.float64)}


def vector(mode: AutoresetMode, **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Masked, length, **options) for length in (4, 6)], autoreset_mode=mode)


MADE: dict[str, Any] = {
    "single": Masked,
    "disabled": partial(vector, AutoresetMode.DISABLED),
    "same step": partial(vector, AutoresetMode.SAME_STEP),
}


class Unsubtle(GymEnv):
    """Its steps are made as TensorDicts."""

    def step_and_maybe_reset(self, tensordict: Any) -> Any:
        return super().step_and_maybe_reset(tensordict)


@pytest.mark.parametrize("kind", [GymEnv, Unsubtle])
@pytest.mark.parametrize("made", MADE)
def test_entries_are_those_of_each_step_and_of_each_reset(made: str, kind: type[GymEnv]) -> None:
    env = kind(MADE[made](), info_keys=("count", "mask"))
    with Collector(env, None, frames_per_batch=20 * env.batch_size.numel()) as collector:
        collector.rollout()
        batch = collector.rollout()
    assert batch is not None
    assert env.observation_spec["mask"].dtype == torch.bool
    for td in (batch, batch["next"]):
        steps = td["observation"][..., :1].long()
        assert torch.equal(td["count"], steps)
        assert torch.equal(td["mask"], torch.arange(3) != steps % 3)
    assert bool((batch["next", "count"] == 4).any()), "of the last step, not of the reset that follows"
    assert bool((batch["count"] == 0).any())


@pytest.mark.parametrize("made", MADE)
def test_an_entry_of_a_given_space_may_be_missing(made: str) -> None:
    env = GymEnv(MADE[made](), info_keys=RARE)
    with Collector(env, None, frames_per_batch=20 * env.batch_size.numel()) as collector:
        batch = collector.rollout()
    assert batch is not None
    assert batch["rare"].dtype == torch.float64
    for td in (batch, batch["next"]):
        steps = td["observation"].double()
        assert torch.equal(td["rare"], torch.where(steps % 3 == 1, steps, 0.0))


def test_a_reset_of_some_reads_their_infos() -> None:
    env = GymEnv(MADE["disabled"](), info_keys=("count",))
    td = env.reset()
    for _ in range(2):
        _, td = env.step_and_maybe_reset(env.rand_action(td))
    td["_reset"] = torch.tensor([[False], [True]])
    assert env.reset(td)["count"].tolist() == [[2], [0]]


def test_a_policy_reads_a_mask_by_its_name_also_in_workers() -> None:
    def policy(mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(mask.int().argmax(-1), 3)

    make = partial(GymEnv, MADE["disabled"](), info_keys=("mask",))
    module = TensorDictModule(policy, ["mask"], ["action"])
    with (
        Collector(make, policy, frames_per_batch=24) as alone,
        MultiSyncCollector([make], module, frames_per_batch=24, total_frames=-1, cat_results=0) as workers,
    ):
        batch, other = alone.next(), workers.next()
    assert bool((batch["action"].bool() & batch["mask"]).any(-1).all())
    assert torch.equal(batch["mask"], other["mask"])


@pytest.mark.parametrize(
    ("keys", "error", "word"),
    [
        (("absent",), KeyError, "absent.*info_keys="),
        (("text",), ValueError, "text"),
        (("observation",), ValueError, "observation"),
        (("reward",), ValueError, "reward"),
        (("action",), ValueError, "action"),
        ("count", TypeError, "info_keys"),
        ((3,), TypeError, "info_keys"),
    ],
    ids=str,
)
def test_what_cannot_be_read(keys: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        GymEnv(Masked(), info_keys=keys).reset()


def test_an_entry_that_changes_its_form() -> None:
    env = GymEnv(Masked(), info_keys=("mask",))
    td = env.rand_action(env.reset())
    env.env.info = lambda: {"mask": np.ones(5, bool)}
    with pytest.raises(ValueError, match="mask"):
        env.step_and_maybe_reset(td)
