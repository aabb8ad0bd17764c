"""An environment whose entries have the names of others in a step is refused, before one is lost behind another."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import Collector, GymEnv
from helpers.collecting_gym import Spaces
from helpers.collecting_single import Actor, WalkEnv

pytestmark = pytest.mark.requirement(239)

BOX = spaces.Box(-1, 1, (2,), np.float32)


def of(**entries: Any) -> spaces.Dict:
    return spaces.Dict(entries)


WAYS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "single": lambda env: GymEnv(env()),
    "vector": lambda env: GymEnv(SyncVectorEnv([env, env], autoreset_mode=AutoresetMode.DISABLED)),
    "by id": lambda env: GymEnv(EnvSpec("Colliding-v0", entry_point=lambda **_: env())),
    "vector by id": lambda env: GymEnv(
        EnvSpec("Colliding-v0", entry_point=lambda **_: env()), num_envs=2, vectorization_mode="sync"
    ),
    "in a collector": lambda env: Collector(env, frames_per_batch=4),
}
STEP = ["reward", "done", "terminated", "truncated", "next", "collector", "_reset"]
COLLISIONS = {
    **{f"observation {name}": (BOX, of(plain=BOX, **{name: BOX}), name) for name in STEP},
    **{f"nested observation {name}": (BOX, of(plain=BOX, **{name: of(inner=BOX)}), name) for name in STEP},
    **{f"action {name}": (of(plain=BOX, **{name: BOX}), BOX, name) for name in STEP},
    "observation named action": (BOX, of(plain=BOX, action=BOX), "action"),
    "action named observation": (of(observation=BOX), BOX, "observation"),
    "renamed to observation": (of(observation=BOX), of(state=BOX), "observation"),
    "both": (of(camera=BOX, move=BOX), of(camera=BOX, plain=BOX), "camera"),
    "both nested": (of(hand=of(camera=BOX)), of(hand=of(camera=BOX)), r"\('hand', 'camera'\)"),
    "one inside the other": (of(camera=BOX), of(camera=of(left=BOX)), r"\('camera', 'left'\)"),
    "the other inside one": (of(camera=of(left=BOX)), of(camera=BOX), r"\('camera', 'left'\)"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("collision", COLLISIONS)
def test_entries_that_collide_are_refused_by_name(collision: str, way: str) -> None:
    action, observation, name = COLLISIONS[collision]
    made: list[Spaces] = []

    def make() -> Any:
        made.append(Spaces(action, observation))
        return made[-1]

    with pytest.raises(ValueError, match=rf"^(Spaces|SyncVectorEnv): .*{name}.*rename .* wrapper"):
        WAYS[way](make)


@pytest.mark.parametrize("way", ["single", "vector"])
def test_the_same_names_in_groups_are_each_entrys_own(way: str) -> None:
    agent = of(reward=BOX, done=BOX, next=BOX, step_count=BOX, look=BOX)
    env = WAYS[way](lambda: Spaces(of(agent=of(action=BOX, move=BOX)), of(agent=agent)))
    seen: list[TensorDictBase] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.append(td.clone())
        return env.rand_action(td)  # type: ignore[no-any-return]

    with Collector(env, policy, frames_per_batch=4 * env.batch_size.numel(), max_frames_per_traj=3) as collector:
        batch = collector.rollout()
    for name in agent.spaces:
        roots = torch.stack([td["agent", name] for td in seen], -2)
        assert torch.equal(batch["agent", name], roots)
        assert batch["next", "agent", name].shape == roots.shape


def test_a_counter_inside_a_group_is_an_observation_of_the_policy() -> None:
    def policy(step_count: torch.Tensor, look: torch.Tensor) -> torch.Tensor:
        return step_count + look

    made = Spaces(BOX, of(agent=of(step_count=BOX, look=BOX)))
    with Collector(made, policy, frames_per_batch=4, max_frames_per_traj=3) as collector:
        batch = collector.rollout()
    assert torch.equal(batch["action"], batch["agent", "step_count"] + batch["agent", "look"])


class More(WalkEnv):
    """Its resets return an entry more."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def reset(self, td: TensorDictBase | None = None) -> TensorDict:
        return super().reset(td).set(self.name, torch.zeros(1))


@pytest.mark.parametrize(
    ("name", "given"),
    [("next", {}), ("collector", {}), ("action", {}), ("policy_version", {"track_policy_version": True})],
    ids=str,
)
def test_an_environment_of_ones_own_is_refused_where_the_collector_writes(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^More: .*{name}.*rename"):
        Collector(More(name), Actor(), frames_per_batch=4, **given)


@pytest.mark.parametrize(
    ("name", "given"), [("policy_version", {"track_policy_version": True}), ("step_count", {"max_frames_per_traj": 3})]
)
@pytest.mark.parametrize("way", ["single", "vector"])
@pytest.mark.parametrize("what", ["observation", "action"])
def test_a_name_is_taken_only_by_what_is_asked_for(what: str, way: str, name: str, given: dict[str, Any]) -> None:
    both = {"observation": BOX, "action": BOX} | {what: of(plain=BOX, **{name: BOX})}
    env = WAYS[way](lambda: Spaces(both["action"], both["observation"]))
    frames = 4 * env.batch_size.numel()
    with pytest.raises(ValueError, match=name):
        Collector(env, frames_per_batch=frames, **given)
    env = WAYS[way](lambda: Spaces(both["action"], both["observation"]))
    with Collector(env, frames_per_batch=frames) as collector:
        batch = collector.rollout()
    assert batch[name].dtype is torch.float32
