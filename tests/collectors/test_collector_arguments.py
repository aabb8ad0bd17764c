"""What collectors are constructed with: what each argument may be, what excludes what, and rounding."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from asyncsync.sync import SharedMemWeightSyncScheme
from helpers.collecting_multi import make, options, policy
from helpers.collecting_single import Actor, Buffer, WalkEnv


def never() -> Any:
    raise AssertionError("an environment is made")


@pytest.mark.requirement(34, 127)
def test_frames_that_do_not_divide_are_rounded_up_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(**kwargs: Any) -> int:
        with Collector(WalkEnv((3,)), Actor(), **({"frames_per_batch": 192} | kwargs)) as c:
            return sum(batch.numel() for batch in c)

    assert frames(total_frames=576) == 576
    with pytest.warns(UserWarning, match=r"total_frames \(1000\) is not divisible .* rounded up to 1152"):
        assert frames(total_frames=1000) == 1152
    with pytest.warns(UserWarning, match=r"frames_per_batch \(10\) is not divisible .* rounded up to 12"):
        assert frames(frames_per_batch=10, total_frames=24) == 24
    with pytest.warns(UserWarning, match=r"frames_per_batch"), pytest.warns(UserWarning, match=r"30.* 36"):
        assert frames(frames_per_batch=10, total_frames=30) == 36
    with pytest.warns(UserWarning, match=r"init_random_frames \(200\) is not divisible .* rounded up to 384"):
        assert frames(total_frames=576, init_random_frames=200) == 576
    monkeypatch.setenv("RL_WARNINGS", "False")
    assert frames(total_frames=1000) == 1152


@pytest.mark.requirement(127)
@pytest.mark.parametrize("total", [-1, None])
def test_without_a_total_collection_does_not_end(total: int | None) -> None:
    with Collector(WalkEnv(), Actor(), frames_per_batch=4, total_frames=total) as c:
        batches = iter(c)
        assert all(next(batches).numel() == 4 for _ in range(20))


def test_environments_come_as_such_or_from_callables_or_as_a_list_of_one() -> None:
    env = WalkEnv()
    for given in (env, lambda: env, [env], [lambda: env]):
        c = Collector(given, Actor(), frames_per_batch=4)
        assert c.env is env
        c.shutdown(close_env=False)
    with Collector(WalkEnv, Actor(), frames_per_batch=4, create_env_kwargs={"batch_size": (2,)}) as c:
        assert c.rollout().shape == (2, 2)
    with pytest.raises(ValueError, match="create_env_kwargs"):
        Collector(env, Actor(), frames_per_batch=4, create_env_kwargs={"batch_size": (2,)})
    with pytest.raises(ValueError, match="a list of 2: use MultiSyncCollector"):
        Collector([env, env], Actor(), frames_per_batch=4)
    with pytest.raises(TypeError, match="step_and_maybe_reset"):
        Collector(lambda: 3, Actor(), frames_per_batch=4)
    with pytest.raises(TypeError, match="create_env_fn must be"):
        Collector(3, Actor(), frames_per_batch=4)


def test_gymnasium_ids_and_environments_are_wrapped() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    for given in ("CartPole-v1", gymnasium.make("CartPole-v1"), lambda: gymnasium.make("CartPole-v1")):
        with Collector(given, frames_per_batch=4) as c:
            assert c.rollout()["observation"].shape == (4, 4)


def test_what_cannot_serve_is_said_at_once_and_leaves_nothing_open() -> None:
    made: list[WalkEnv] = []

    def make() -> WalkEnv:
        made.append(WalkEnv())
        return made[-1]

    own = WalkEnv()
    for limit in (-1, 5):
        for given in (make, own, [own]):
            with pytest.raises(TypeError, match="must be callable"):
                Collector(given, 3, frames_per_batch=4, max_frames_per_traj=limit)
    assert [env.closed for env in made] == [1, 1]
    assert own.closed == 0  # it is the caller's


# For one collector, and for one with workers.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *[({"frames_per_batch": value}, TypeError, f"frames_per_batch.*{value}") for value in (None, "64", 64.0, True)],
    ({"frames_per_batch": torch.tensor(6.5)}, TypeError, "frames_per_batch.*6.5"),
    ({"frames_per_batch": 0}, ValueError, "frames_per_batch"),
    ({"total_frames": "60"}, TypeError, "total_frames.*'60'"),
    ({"total_frames": 60.5}, TypeError, "total_frames.*60.5"),
    ({"total_frames": float("inf")}, TypeError, "total_frames.*inf"),
    ({"init_random_frames": "60"}, TypeError, "init_random_frames"),
    ({"max_frames_per_traj": "60"}, TypeError, "max_frames_per_traj"),
    ({"max_lag": "1"}, TypeError, "max_lag"),
    ({"max_lag": -1}, ValueError, "max_lag"),
    ({"weight_sync_schemes": SharedMemWeightSyncScheme()}, TypeError, 'pass {"policy": scheme}'),
    ({"weight_recv_schemes": [SharedMemWeightSyncScheme()]}, TypeError, "weight_recv_schemes .*list"),
    ({"weight_recv_schemes": SharedMemWeightSyncScheme}, TypeError, "not SharedMemWeightSyncScheme"),
    ({"policy": [Actor()]}, TypeError, "a list of 1.*policy_factory="),
    ({"policy": Actor}, TypeError, "policy_factory=Actor"),
    ({"policy": lambda: Actor()}, TypeError, "policy_factory="),
    ({"policy": len, "policy_factory": Actor}, TypeError, "exclude each other"),
    ({"policy": None, "policy_factory": Actor()}, TypeError, "policy_factory is a policy, a Actor"),
    ({"policy": None, "policy_factory": "policy"}, TypeError, "policy_factory must be a callable"),
    ({"storing_device": 1.5}, TypeError, "storing_device=1.5"),
    ({"storing_device": "cudaa"}, ValueError, "storing_device='cudaa'"),
    ({"postproc": 3}, TypeError, "postproc"),
    ({"pre_collect_hook": 3}, TypeError, "pre_collect_hook"),
    ({"post_collect_hook": [print]}, TypeError, "post_collect_hook"),
    ({"use_buffers": "yes"}, TypeError, "use_buffers"),
    ({"local_init_rb": "yes"}, TypeError, "local_init_rb"),
    ({"reset_when_done": False}, ValueError, "reset"),
    ({"split_trajs": True, "track_traj_ids": False}, ValueError, "track_traj_ids"),
    ({"trajs_per_batch": 2, "split_trajs": True}, ValueError, "exclude each other"),
    ({"trajs_per_batch": 2, "trajs_per_write": 2}, ValueError, "trajs_per_write.* replay_buffer="),
]


@pytest.mark.requirement(112, 126, 219, 222)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize(("given", "error", "word"), REFUSED)
def test_what_no_collector_takes_is_named_before_anything_is_made(
    kind: Any, given: dict[str, Any], error: type[Exception], word: str
) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(error, match=word):
        kind(**{"create_env_fn": [never], "policy": Actor(), "frames_per_batch": 4, **given})
    assert set(multiprocessing.active_children()) == before


@pytest.mark.requirement(219, 222)
@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"policy_factory": [Actor], "policy": None}, TypeError, "policy_factory .*list"),
        ({"replay_buffer": 3}, TypeError, r"extend\(\)"),
        ({"replay_buffer": [], "extend_buffer": False}, TypeError, r"add\(\)"),
        ({"replay_buffer": Buffer(), "extend_buffer": False, "postproc": print}, TypeError, "whole batches"),
        ({"replay_buffer": Buffer(), "extend_buffer": False, "split_trajs": True}, TypeError, "whole batches"),
        ({"replay_buffer": Buffer(), "extend_buffer": False, "trajs_per_batch": 2}, ValueError, "extend_buffer"),
        ({"replay_buffer": Buffer(), "return_same_td": True}, TypeError, "return_same_td"),
        ({"trajs_per_batch": 0}, ValueError, "trajs_per_batch"),
        ({"trajs_per_batch": 2, "traj_format": "stacked"}, ValueError, "traj_format.*'stacked'"),
        ({"trajs_per_batch": 2, "track_traj_ids": False}, ValueError, "track_traj_ids"),
        ({"traj_format": "cat"}, ValueError, "traj_format .*trajs_per_batch="),
        ({"trajs_per_write": 2}, ValueError, "trajs_per_write .*trajs_per_batch="),
        ({"track_policy_version": "uuid"}, TypeError, "track_policy_version"),
        ({"interruptor": object()}, TypeError, "interruptor"),
    ],
)
def test_what_a_collector_of_this_process_does_not_take(given: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        Collector(**{"create_env_fn": never, "policy": Actor(), "frames_per_batch": 4, **given})


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"create_env_fn": never}, ValueError, "num_workers="),
        ({"create_env_fn": []}, ValueError, "empty"),
        ({"create_env_fn": [3]}, TypeError, "create_env_fn"),
        ({"create_env_fn": {"a": never}}, TypeError, r"list\(create_env_fn.values\(\)\)"),
        ({"create_env_fn": [{"a": never}]}, TypeError, "create_env_fn is a dict"),
        ({"num_workers": 3}, ValueError, "2 entries, but num_workers=3"),
        ({"num_workers": "2"}, TypeError, "num_workers"),
        ({"frames_per_batch": [3]}, ValueError, "frames_per_batch has 1 entries"),
        ({"frames_per_batch": [6, "6"]}, TypeError, r"frames_per_batch\[1\]"),
        ({"device": ["cpu"]}, ValueError, "device has 1 entries"),
        ({"create_env_kwargs": [{}]}, ValueError, "create_env_kwargs has 1 entries"),
        ({"policy": None, "policy_factory": [Actor]}, ValueError, "policy_factory has 1 entries"),
        ({"policy": None, "policy_factory": [Actor, Actor()]}, TypeError, r"policy_factory\[1\] is a policy"),
        ({"policy": "policy"}, TypeError, "policy must be callable"),
        ({"policy": None, "update_at_each_batch": True}, ValueError, "update_at_each_batch"),
        ({"weight_updater": print, "weight_sync_schemes": {}}, TypeError, "exclude each other"),
        ({"start_method": "fork"}, ValueError, "'spawn' or 'forkserver'"),
        ({"preemptive_threshold": 1.5}, ValueError, "between 0 and 1"),
        ({"cat_results": "cat"}, ValueError, "'stack' or a dimension"),
        ({"device": "cuda:99"}, ValueError, "device='cuda:99', but torch finds"),
        ({"env_device": ["cpu", "cuda:99"]}, ValueError, r"env_device\[1\]='cuda:99'"),
        ({"collector_class": partial(Collector, policy_device="cuda:99")}, ValueError, "policy_device='cuda:99'"),
        ({"collector_class": partial(Collector, total_frames=16)}, ValueError, "total_frames"),
        ({"collector_class": partial(MultiAsyncCollector, replay_buffer=Buffer())}, ValueError, "replay_buffer"),
        ({"replay_buffer": []}, TypeError, r"a list, .*ReplayBuffer\(…, shared=True\)"),
        ({"replay_buffer": Buffer()}, TypeError, "replay_buffer.shared = True"),
    ],
)
def test_what_a_collector_with_workers_does_not_take(given: Any, error: type[Exception], word: str) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(error, match=word):
        MultiSyncCollector(**{"create_env_fn": [never] * 2, "policy": Actor(), **options(), **given})
    assert set(multiprocessing.active_children()) == before


def test_what_is_for_batches_of_several_workers_is_not_for_the_asynchronous_one() -> None:
    for given in ({"cat_results": -1}, {"preemptive_threshold": 0.5}):
        with pytest.raises(ValueError, match="use MultiSyncCollector"):
            MultiAsyncCollector([never], Actor(), **options(**given))


@pytest.mark.parametrize("name", ["device", "storing_device", "policy_device", "env_device"])
def test_a_device_that_is_not_there_is_named_before_anything_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(device: Any) -> str:
        with pytest.raises(ValueError) as caught:
            Collector(never, Actor(), frames_per_batch=4, **{name: device})
        return str(caught.value)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for device in ("cuda", torch.device("cuda"), "mps"):
        kind = torch.device(device).type
        assert message(device).startswith(f"{name}='{kind}', but torch finds 0 {kind} devices here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert message("cuda:2").startswith(f"{name}='cuda:2', but torch finds 2 cuda devices here")
    assert "'cpu' or 'cuda:0' or 'cuda:1'" in message("cuda:2")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in ("cuda", "cuda:1", "meta"):
        with pytest.raises(AssertionError, match="an environment is made"):
            Collector(never, Actor(), frames_per_batch=4, **{name: device})


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_numbers_of_frames_may_be_of_numpys_types_and_whole_floats(kind: Any) -> None:
    given = {"frames_per_batch": np.int64(4), "total_frames": 1.2e1, "max_frames_per_traj": 2.0, "max_lag": np.int32(0)}
    workers = {"start_method": "forkserver"} if kind is MultiSyncCollector else {}
    with kind([make()], policy(), **given, **workers) as collector:
        assert sum(batch.numel() for batch in collector) == 12
