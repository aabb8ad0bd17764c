"""What breaks in a rollout is the caller's to see, and leaves no false frame behind."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import Collector, GymEnv
from helpers.collecting_single import Actor, Buffer, WalkEnv, needs_torchrl, torchrl


class Broken(Exception):
    pass


def collector(env: Any, policy: Any = None, **kwargs: Any) -> Any:
    return Collector(env, policy or Actor(), **({"frames_per_batch": 4} | kwargs))


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_fails_is_not_recorded_and_the_next_rollout_begins_anew(where: str) -> None:
    class Failing(WalkEnv):
        def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
            if where == "after":
                td.set("next", TensorDict({"half": torch.zeros(1)}))
            if fail.pop():
                raise Broken
            return super().step_and_maybe_reset(td)

    fail = [False] * 20 + [True] + [False] * 6
    with collector(Failing()) as c, collector(WalkEnv()) as other:
        expected = other.rollout()
        first = c.rollout()
        fail[-2:] = [True, False]
        before = {key: value.clone() for key, value in c._rollouts.carrier.root.items()}
        with pytest.raises(Broken):
            c.rollout()
        assert c._rollouts.carrier.root.keys() == before.keys()
        fail[:] = [False] * 20
        again = c.rollout()
    assert (first == expected).all() if where == "before" else True
    assert again["observation"][0, 0] == 0, "nobody knows whether the step was made"
    assert torch.equal(again["next", "observation"][:2], again["observation"][1:3])
    assert again["collector", "traj_ids"][0] > before["collector"]["traj_ids"]


def test_a_policy_that_fails_changes_nothing() -> None:
    class Policy(Actor):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            if self.calls == 5:
                self.calls += 1
                raise Broken
            return super().forward(observation)

    env = WalkEnv()
    with collector(env, Policy()) as c:
        batches = iter(c)
        next(batches)
        with pytest.raises(Broken):
            next(batches)
        assert env.steps == 5
        assert set(c._rollouts.carrier.root.keys()) == {"observation", "done", "terminated", "truncated", "collector"}
        assert next(iter(c)).shape == (4,)


@pytest.mark.parametrize("what", ["postproc", "extend", "add"])
def test_what_postproc_and_buffers_raise_is_unchanged_and_collection_can_go_on(what: str) -> None:
    fail = [True]

    def breaking(*args: Any) -> Any:
        if fail:
            fail.clear()
            raise Broken
        return args[0] if args else None

    class Breaking(Buffer):
        def extend(self, batch: TensorDictBase) -> None:
            breaking()

        def add(self, frame: TensorDictBase) -> None:
            breaking()

    env = WalkEnv()
    buffered = what in ("extend", "add")
    kwargs = {"replay_buffer": Breaking(), "extend_buffer": what == "extend"} if buffered else {what: breaking}
    with collector(env, **kwargs) as c:
        with pytest.raises(Broken):
            next(iter(c))
        result = next(iter(c))
        assert result is None if buffered else result.shape == (4,)
    assert env.closed == 1


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("what", ["add", "append"])
def test_a_frame_that_could_not_be_stored_does_not_spoil_the_next(what: str, error: type[BaseException]) -> None:
    class Breaking(Buffer):
        def add(self, frame: TensorDictBase) -> None:
            if len(self.added) == 1 and fail:
                raise fail.pop()
            super().add(frame)

    fail = [error()]
    buffer = Breaking()
    kwargs = {"replay_buffer": buffer, "extend_buffer": False} if what == "add" else {}
    with collector(WalkEnv(), **kwargs) as c, collector(WalkEnv()) as other:
        expected = torch.cat([other.rollout(), other.rollout()])
        if what == "append":
            append = c._rollouts.buffer.append

            def breaking(*args: Any) -> None:
                if c._rollouts.buffer.count == 1 and fail:
                    raise fail.pop()
                append(*args)

            c._rollouts.buffer.append = breaking
        with pytest.raises(error):
            c.rollout()
        assert "next" not in c._rollouts.carrier.root.keys()  # noqa: SIM118
        batch = c.rollout()
    if what == "add":
        batch = torch.stack(buffer.added[1:])
    assert (batch == expected[2:6]).all()


def test_what_an_interrupted_step_left_under_next_is_not_the_policys() -> None:
    with collector(WalkEnv()) as c, collector(WalkEnv()) as other:
        c._rollouts.carrier.root.set("next", TensorDict({"stale": torch.ones(1)}))
        assert (c.rollout() == other.rollout()).all()


def test_a_reset_that_fails_leaves_the_carrier() -> None:
    class Failing(WalkEnv):
        broken = False

        def reset(self, td: TensorDictBase | None = None) -> TensorDict:
            if self.broken:
                raise Broken
            return super().reset(td)

    env = Failing()
    with collector(env, reset_at_each_iter=True) as c:
        c.rollout()
        carrier, env.broken = c._rollouts.carrier.root, True
        for broken in (c.rollout, c.reset):
            with pytest.raises(Broken):
                broken()
        assert c._rollouts.carrier.root is carrier
        env.broken = False
        assert c.rollout().shape == (4,)


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("returns", ["nothing", "one", "no next", "a dict of reset"])
def test_what_returns_something_else_is_told_so(returns: str, limit: int | None) -> None:
    class Wrong(WalkEnv):
        def step_and_maybe_reset(self, td: TensorDictBase) -> Any:
            step, root = super().step_and_maybe_reset(td)
            return {"nothing": None, "one": step, "no next": (step["next"], root)}[returns]

        def reset(self, td: TensorDictBase | None = None) -> Any:
            root = super().reset(td)
            return root.to_dict() if returns == "a dict of reset" else root

    word = r"step_and_maybe_reset\(\) must return two TensorDicts"
    if returns == "a dict of reset":
        word = r"reset\(\) returned a dict, not a TensorDict"
    with pytest.raises(TypeError, match=rf"Wrong\.{word}"), collector(Wrong(), max_frames_per_traj=limit) as c:
        c.rollout()


def test_a_reset_of_another_shape_is_refused_at_once() -> None:
    env = WalkEnv((2,))
    env.batch_size = torch.Size([3])
    with pytest.raises((ValueError, RuntimeError)):
        collector(env)


def test_set_truncated_needs_a_truncated_flag() -> None:
    class Bare(WalkEnv):
        def _root(self, observation: torch.Tensor) -> TensorDict:
            return super()._root(observation).exclude("truncated")

    with pytest.raises(RuntimeError, match="has no 'truncated' entry"):
        collector(Bare(), set_truncated=True)


# -- environments that raise once --------------------------------------------------------------------------------------


class Episodes(gymnasium.Env[Any, Any]):
    """Observation: the episode's number and the step within it. An episode has five steps. ``fail`` has what raises
    once, after it has had its effect: a method, and at which of its calls."""

    observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fail: dict[str, int]) -> None:
        self.fail = fail
        self.episode = self.count = 0

    def _called(self, method: str) -> Any:
        if method in self.fail:
            self.fail[method] -= 1
            if not self.fail[method]:
                del self.fail[method]
                raise Broken
        return np.array([self.episode, self.count], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self._called("reset"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._called("step"), 0.0, self.count == 5, False, {}


class General(GymEnv):
    """Goes the way of all environments, by TensorDicts."""

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> Any:
        return super().step_and_maybe_reset(tensordict)


class Own:
    """An environment of one's own, which returns TensorDicts."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.action_spec = GymEnv(env).action_spec

    def reset(self, td: Any = None) -> TensorDict:
        return self._root(self.env.reset()[0])

    def _root(self, observation: Any, done: bool = False) -> TensorDict:
        flag = torch.tensor([done])
        return TensorDict({"observation": torch.from_numpy(observation), "done": flag, "terminated": flag})

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDict]:
        observation, reward, done, _, _ = self.env.step(0)
        td.set("next", self._root(observation, done).set("reward", torch.tensor([reward])))
        return td, self.reset() if done else self._root(observation)


def of_torchrl(env: Any) -> Any:
    torchrl()
    from torchrl.envs.libs.gym import GymWrapper

    return GymWrapper(env)


def vectors(mode: str) -> Callable[..., Any]:
    return lambda fail: GymEnv(
        EnvSpec("Episodes-v0", entry_point=lambda **_: Episodes(fail)), num_envs=2, vectorization_mode=mode
    )


KINDS: dict[str, Callable[[dict[str, int]], Any]] = {
    "single": lambda fail: GymEnv(Episodes(fail)),
    "single, TensorDicts": lambda fail: General(Episodes(fail)),
    "vector": vectors("sync"),
    "own": lambda fail: Own(Episodes(fail)),
    "torchrl": lambda fail: of_torchrl(Episodes(fail)),
}
EACH = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_torchrl if kind == "torchrl" else ()) for kind in KINDS]
)


def assert_true(frames: Any) -> None:
    """Whether each frame, in time's order, is one that the environment has made, and begins where the one before
    ended."""
    seen, after = frames["observation"], frames["next", "observation"]
    assert torch.equal(after[..., 0], seen[..., 0]), "a frame that goes over two episodes"
    assert torch.equal(after[..., 1], seen[..., 1] + 1), "a frame over a step that was lost"
    assert torch.equal(after[..., 1] == 5, frames["next", "done"][..., 0])
    ids = frames["collector", "traj_ids"]
    for (episode, _), number in zip(seen.flatten(0, -2).tolist(), ids.flatten().tolist(), strict=True):
        assert bool((ids[seen[..., 0] == episode] == number).any()), "an episode's frames have its number"


@pytest.mark.requirement(240)
@pytest.mark.parametrize(("method", "when"), [("step", 3), ("step", 12), ("step", 15), ("reset", 1), ("reset", 2)])
@pytest.mark.parametrize("limit", [None, 4])
@EACH
def test_what_raises_once_leaves_no_false_frame(kind: str, limit: int | None, method: str, when: int) -> None:
    fail: dict[str, int] = {}
    env = KINDS[kind](fail)
    count = 2 if kind == "vector" else 1
    with Collector(env, frames_per_batch=8 * count, max_frames_per_traj=limit) as collector:
        batches = [collector.rollout()]
        fail[method] = when * count
        while method in fail:
            try:
                batches.append(collector.rollout())
            except Broken:
                pass
        batches += [collector.rollout() for _ in range(2)]
    assert not fail
    first = batches[-2]
    assert bool((first["observation"][..., 0, 1] == 0).all()), "it does not begin with a reset"
    for batch in batches:
        if limit is None:
            assert_true(batch)
        assert torch.equal(batch["next", "observation"][..., 1], batch["observation"][..., 1] + 1)


CALLS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda collector: collector.reset(),
    "reset of one": lambda collector: collector.reset(torch.tensor([True, False])),
    "set_seed": lambda collector: collector.set_seed(1),
}


@pytest.mark.requirement(240)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_collectors_reset_that_raises_is_made_good_by_the_next_rollout(call: Callable[[Any], Any]) -> None:
    fail: dict[str, int] = {}
    with Collector(KINDS["vector"](fail), frames_per_batch=6) as collector:
        collector.rollout()  # each is amid its episode
        fail["reset"] = 1
        with pytest.raises(Broken):
            call(collector)
        batch = collector.rollout()
    assert bool((batch["observation"][:, 0, 1] == 0).all())
    assert_true(batch)


@pytest.mark.requirement(240)
def test_frames_added_one_by_one_are_true_ones() -> None:
    class Frames(list[Any]):
        add = list.append

    fail: dict[str, int] = {}
    frames = Frames()
    kwargs = {"replay_buffer": frames, "extend_buffer": False}
    with Collector(KINDS["single"](fail), frames_per_batch=8, **kwargs) as collector:
        fail["reset"] = 1
        with pytest.raises(Broken):
            collector.rollout()
        collector.rollout()
    assert_true(torch.stack(frames))
