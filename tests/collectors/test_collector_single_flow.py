"""Section C of the requirements: one step of a Collector, its carrier, its hooks and where batches go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from asyncsync.collectors import Collector
from asyncsync.errors import ClosedError
from helpers.collecting_single import KINDS, Actor, Agents, Buffer, WalkEnv, environment, needs_torchrl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore::DeprecationWarning:torchrl")


def collector(env: Any, policy: Any = None, **kwargs: Any) -> Any:
    return Collector(env, policy or Actor(), **({"frames_per_batch": 8, "total_frames": -1} | kwargs))


@pytest.mark.requirement(86, 94, 126)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_is_as_many_steps_as_give_the_frames_and_is_stacked_along_time(kind: str) -> None:
    with pytest.warns(UserWarning, match="not exactly divisible"):
        made = collector(environment(kind, (3,)), frames_per_batch=10)
    with made as c:
        batch = c.rollout()
        assert batch.shape == (3, 4)
        assert batch.names == [None, "time"]
        assert (c.frames_per_batch, c.requested_frames_per_batch) == (4, 12)
        assert batch["observation"][:, :2, 0].tolist() == [[0.0, 1.0]] * 3, "it begins with a reset"
        assert batch["collector", "traj_ids"][:, 0].unique().numel() == 3


@pytest.mark.requirement(87, 218)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_yielded_or_extends_the_buffer_or_is_added_to_it_step_by_step(kind: str) -> None:
    def frames(**kwargs: Any) -> list[Any]:
        with collector(environment(kind), total_frames=16, **kwargs) as c:
            return list(c.iterator())

    given = frames()
    whole, single = Buffer(), Buffer()
    assert frames(replay_buffer=whole) == [None, None]
    assert frames(replay_buffer=single, extend_buffer=False) == [None, None]
    assert all((a == b).all() for a, b in zip(whole.extended, given, strict=True))
    assert len(single.added) == 16
    assert not whole.added
    assert not single.extended
    assert (torch.stack(single.added[:8]) == given[0]).all(), "the second rollout has not changed it"


class Recorder(WalkEnv):
    """Says what happens when."""

    def __init__(self, events: list[str], device: str | None = None) -> None:
        super().__init__()
        self.events = events
        self.device = None if device is None else torch.device(device)

    def to(self, device: torch.device) -> Recorder:
        self.device = device
        return self

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
        self.events.append("env")
        return super().step_and_maybe_reset(td)


class Policy(TensorDictModule):
    def __init__(self, events: list[str]) -> None:
        super().__init__(Actor(), ["observation"], ["action"])
        self.events = events

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self.events.append("policy")
        return super().forward(td)


def recorded(monkeypatch: pytest.MonkeyPatch, events: list[str], **kwargs: Any) -> Any:
    """A collector between devices that are one, but compare different, and say when they are synchronised."""
    c = collector(
        Recorder(events),
        Policy(events),
        **({"policy_device": "cpu", "env_device": "cpu:0", "storing_device": "cpu:1"} | kwargs),
    )
    for name in ("sync_policy", "sync_env", "sync_storage"):
        monkeypatch.setattr(c._rollouts.devices, name, lambda name=name: events.append(name))
    append, advance = c._rollouts.buffer.append, c._rollouts.steps.advance

    def store(step: TensorDictBase, *args: Any) -> None:
        assert "next" in step.keys()  # noqa: SIM118
        events.append("store")
        append(step, *args)

    def go_on(*args: Any) -> None:
        events.append("carrier")
        advance(*args)

    monkeypatch.setattr(c._rollouts.buffer, "append", store)
    monkeypatch.setattr(c._rollouts.steps, "advance", go_on)
    return c


STEP = ["sync_policy", "policy", "sync_env", "env", "store", "sync_storage", "carrier"]


@pytest.mark.requirement(89, 91, 92, 105)
@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, []),
        ({"replay_buffer": Buffer(), "extend_buffer": False}, ["store", "sync_storage"]),  # neither cast nor waited for
        ({"no_cuda_sync": True}, ["sync_policy", "sync_env", "sync_storage"]),
    ],
    ids=["batches", "direct additions", "no_cuda_sync"],
)
def test_policy_environment_and_storage_follow_the_documented_order(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], left_out: list[str]
) -> None:
    events: list[str] = []
    with recorded(monkeypatch, events, frames_per_batch=3, **options) as c:
        c.rollout()
    assert events == [event for event in STEP if event not in left_out] * 3
    if "replay_buffer" in options:
        assert [frame.device for frame in options["replay_buffer"].added] == [None] * 3


@pytest.mark.requirement(89)
def test_what_was_stored_is_a_snapshot() -> None:
    class Reusing(WalkEnv):
        """Writes its results over those of the step before the last one."""

        def __init__(self) -> None:
            super().__init__()
            self.memory: list[list[TensorDict]] = []

        def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
            results = super().step_and_maybe_reset(td)
            if len(self.memory) < 2:
                self.memory.insert(0, [each.clone() for each in results])
            else:
                self.memory.reverse()
                for old, new in zip(self.memory[0], results, strict=True):
                    old.update_(new)
            return self.memory[0][0].copy(), self.memory[0][1].copy()

    buffer = Buffer()
    for kwargs in ({}, {"replay_buffer": buffer, "extend_buffer": False}):
        with collector(WalkEnv()) as plain, collector(Reusing(), **kwargs) as reusing:
            expected, got = plain.rollout(), reusing.rollout()
            assert (expected == (torch.stack(buffer.added) if kwargs else got)).all()


@pytest.mark.requirement(93, 220)
@pytest.mark.parametrize(
    ("kind", "given"), [("own", {}), ("own", {"compact_obs": True}), pytest.param("torchrl", {}, marks=needs_torchrl)]
)
def test_recurrent_state_goes_on_across_batches_and_ends_with_its_trajectory(kind: str, given: dict[str, Any]) -> None:
    class Recurrent(TensorDictModule):
        def __init__(self) -> None:
            super().__init__(lambda x: x, ["observation"], ["action", ("next", "hidden")])

        def forward(self, td: TensorDictBase) -> TensorDictBase:
            hidden = td.get("hidden", torch.zeros(1))
            td.set("hidden", hidden)
            td.set("action", hidden)
            return td.set(("next", "hidden"), hidden + 1)

    with collector(environment(kind), Recurrent(), frames_per_batch=5, **given) as c:  # TorchRL's has no primer for it
        batch = torch.cat([c.rollout() for _ in range(4)])
    assert torch.equal(batch["hidden"].squeeze(-1), batch["observation"][:, 0])
    assert torch.equal(batch["next", "hidden"], batch["hidden"] + 1)
    assert (("next", "observation") in batch.keys(True)) is not bool(given), "of the two, compact_obs leaves this out"


@pytest.mark.requirement(93)
def test_recurrent_state_beside_the_environments_own_is_handed_on_until_the_episode_ends() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        hidden = td.get(("agents", "hidden"), torch.zeros(2, 1))
        td.set(("agents", "hidden"), hidden).set("action", torch.zeros(1))
        return td.set(("next", "agents", "hidden"), hidden + 1)

    with collector(Agents(longest=20), policy) as c:
        batch = c.rollout()
    assert batch["agents", "hidden"][:, 0, 0].tolist() == list(range(8)), "no death of one ends it"
    assert batch["collector", "traj_ids"].tolist() == [0] * 8


@pytest.mark.requirement(93)
def test_a_policy_does_not_override_what_the_environment_returns_nor_any_of_its_rewards() -> None:
    class Rewarding(WalkEnv):
        reward_keys = ("reward", "bonus")

        def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
            output, root = super().step_and_maybe_reset(td)
            output.get("next").set("bonus", torch.ones(1))
            return output, root

    def policy(td: TensorDictBase) -> TensorDictBase:
        wrong = {key: torch.full((1,), -1.0) for key in ("reward", "bonus", "observation")}
        wrong |= {key: torch.ones(1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        return td.set("action", torch.zeros(1)).set("next", TensorDict(wrong))

    with collector(Rewarding(), policy) as c, collector(Rewarding(), lambda observation: torch.zeros(1)) as other:
        assert (c.rollout() == other.rollout()).all()


@pytest.mark.requirement(95, 96)
@pytest.mark.parametrize(
    ("devices", "cleared"),
    [
        ({}, True),  # the environment has none
        ({"env_device": "cpu"}, False),
        ({"env_device": "cpu", "policy_device": "cpu"}, False),
        ({"env_device": "cpu:0", "policy_device": "cpu"}, True),
        ({"policy_device": "cpu"}, True),
    ],
)
def test_a_carrier_that_no_device_owns_has_none_and_neither_has_next(devices: dict[str, Any], cleared: bool) -> None:
    class Owned(Recorder):
        def _root(self, observation: torch.Tensor) -> TensorDict:
            return super()._root(observation).to(self.device or "cpu")

    class Looking(Buffer):
        def add(self, frame: TensorDictBase) -> None:
            assert (frame.device is None) is cleared
            assert (frame["next"].device is None) is cleared
            super().add(frame)

    buffer = Looking()
    options: dict[str, Any] = {"replay_buffer": buffer, "extend_buffer": False, "trust_policy": True}
    with collector(Owned([]), Policy([]), **devices, **options) as c:
        assert c._rollouts.devices.carrier_has_no_device is cleared
        assert (c._rollouts.carrier.root.device is None) is cleared
        c.rollout()
        assert (c._rollouts.carrier.root.device is None) is cleared
    assert len(buffer.added) == 8


@pytest.mark.requirement(97)
def test_metadata_goes_round_the_environment() -> None:
    env = WalkEnv()
    with collector(env) as c:
        batch = c.rollout()
        assert "collector" in c._rollouts.carrier.root.keys()  # noqa: SIM118
    assert env.seen == {"observation", "action", "done", "terminated", "truncated"}
    assert {("collector", "traj_ids"), ("collector", "policy_version")} < set(batch.keys(True, True))
    assert not [key for key in batch["next"].keys() if key == "collector"]  # noqa: SIM118


@pytest.mark.requirement(113)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pre_hook_is_called_once_per_rollout_before_the_reset(kind: str) -> None:
    seen: list[tuple[Any, int]] = []
    env = environment(kind)
    with collector(env, frames_per_batch=2, total_frames=6, reset_at_each_iter=True) as c:
        c.pre_collect_hook = lambda: seen.append((env.walk.count.item(), env.walk.episode.item()))
        list(c)
    assert seen == [(0, 0), (2, 1), (2, 2)]


@pytest.mark.requirement(113)
def test_a_subclass_may_choose_the_pre_hook_of_each_rollout() -> None:
    class Alternating(Collector):
        asked, called = 0, 0

        @property
        def pre_collect_hook(self) -> Any:
            self.asked += 1
            return self.called_now if self.asked % 2 else None

        def called_now(self) -> None:
            self.called += 1

    with Alternating(WalkEnv(), Actor(), frames_per_batch=2, total_frames=8) as c:
        list(c)
        assert (c.asked, c.called) == (4, 2)


@pytest.mark.requirement(114, 115)
@pytest.mark.parametrize("kind", KINDS)
def test_the_post_hook_sees_what_is_yielded_and_its_result_is_ignored(kind: str) -> None:
    seen: list[Any] = []

    def hook(batch: TensorDictBase) -> str:
        seen.append(batch)
        return "nothing that anybody wants"

    with collector(environment(kind), total_frames=16, post_collect_hook=hook, split_trajs=True) as c:
        for batch in c:
            assert batch is seen[-1]
    assert len(seen) == 2


async def iterated(c: Any) -> None:
    await anext(c)


async def in_the_background(c: Any) -> None:
    c.start()
    await asyncio.to_thread(c._background_thread.join)
    c.async_shutdown()


async def called(function: Any) -> None:
    function()


HOW: dict[str, Any] = {
    "for": lambda c: called(lambda: next(iter(c))),
    "next": lambda c: called(c.next),
    "rollout": lambda c: called(c.rollout),
    "async for": iterated,
    "start": in_the_background,
}


@pytest.mark.requirement(117)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("hook", ["pre_collect_hook", "post_collect_hook"])
async def test_what_a_hook_raises_stops_collection(hook: str, how: str) -> None:
    env, calls = WalkEnv(), []

    def broken(*batch: Any) -> None:
        calls.append(batch)
        raise LookupError("the hook broke")

    options: dict[str, Any] = {"replay_buffer": Buffer()} if how == "start" else {}
    c = collector(env, **{hook: broken}, **options)
    if (hook, how) == ("post_collect_hook", "rollout"):  # which calls no such hook
        c.rollout()
        how = "next"
    with pytest.raises(LookupError, match="the hook broke"):
        await HOW[how](c)
    assert (c.closed, env.closed, len(calls)) == (True, 1, 1)
    for again in (c.next, c.rollout):
        with pytest.raises(ClosedError):
            again()
    with pytest.raises(ClosedError):
        await anext(c)
    assert len(calls) == 1


@pytest.mark.requirement(118, 136)
@pytest.mark.parametrize("kind", KINDS)
def test_postproc_transforms_the_batch_before_hook_and_buffer(kind: str) -> None:
    def postproc(batch: TensorDictBase) -> TensorDictBase:
        assert batch.shape == (8,)
        return batch.select("action").set("_private", torch.zeros(8))

    buffer, seen = Buffer(), []
    with collector(
        environment(kind), postproc=postproc, replay_buffer=buffer, post_collect_hook=seen.append, total_frames=8
    ) as c:
        assert list(c) == [None]
    assert set(buffer.extended[0].keys()) == {"action"}
    assert seen == buffer.extended


@pytest.mark.requirement(119)
@pytest.mark.parametrize("variable", ["TORCHRL_PROFILING", "ASYNCSYNC_PROFILING", None])
def test_profiling_names_the_parts_of_a_step(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    for name in ("TORCHRL_PROFILING", "ASYNCSYNC_PROFILING"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    with collector(WalkEnv(), frames_per_batch=3) as c:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            c.rollout()
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("Collector.")}
    steps = {"Collector.policy": 3, "Collector.env_step": 3, "Collector.carrier": 3, "Collector.rollout": 1}
    assert counts == (steps if variable else {})


@pytest.mark.requirement(87)
def test_direct_additions_end_with_the_total_and_its_last_frame_is_truncated() -> None:
    buffer = Buffer()
    with collector(WalkEnv(), total_frames=10, replay_buffer=buffer, extend_buffer=False, set_truncated=True) as c:
        list(c)
    assert [bool(frame["next", "truncated"]) for frame in buffer.added] == [False] * 7 + [True, False, True]


@pytest.mark.parametrize("size", [(), (2,)])
def test_the_last_frame_is_truncated_where_shapes_differ_too(size: tuple[int, ...]) -> None:
    class Growing(WalkEnv):
        def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
            output, root = super().step_and_maybe_reset(td)
            output["next"].set("so far", torch.zeros(*size, self.steps))
            return output, root

    with collector(Growing(size), frames_per_batch=2 * len(size) + 2, set_truncated=True) as c:
        batch = c.rollout()
    for name in ("truncated", "done"):
        assert batch["next", name].reshape(-1, 2).tolist() == [[False, True]] * (len(size) + 1)
