"""What collectors are constructed with: what each argument may be, what excludes what, and rounding."""

import inspect
import multiprocessing
import pydoc
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType

from asyncsync.collectors import Collector, ExplorationType, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from asyncsync.sync import SharedMemWeightSyncScheme
from helpers import planted
from helpers.collecting_multi import acted, make, options, policy
from helpers.collecting_single import Actor, Buffer, WalkEnv


def never() -> Any:
    raise AssertionError("an environment is made")


@pytest.mark.requirement(34, 127)
def test_frames_that_do_not_divide_are_rounded_up_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(**kwargs: Any) -> int:
        with Collector(WalkEnv((3,)), Actor(), **({"frames_per_batch": 192} | kwargs)) as c:
            return sum(batch.numel() for batch in c)

    assert frames(total_frames=576) == 576
    with pytest.warns(UserWarning, match=r"total_frames \(1000\) is not exactly divisible .* rounded up to 1152"):
        assert frames(total_frames=1000) == 1152
    with pytest.warns(
        UserWarning, match=r"frames_per_batch \(10\) is not exactly divisible .* rounded up to 12"
    ) as caught:
        assert frames(frames_per_batch=10, total_frames=24) == 24
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"frames_per_batch"), pytest.warns(UserWarning, match=r"30.* 36"):
        assert frames(frames_per_batch=10, total_frames=30) == 36
    with pytest.warns(UserWarning, match=r"init_random_frames \(200\) is not exactly divisible .* rounded up to 384"):
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
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
REFUSED: list[Any] = [
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
    *[
        pytest.param({"cudagraph_policy": graph}, ValueError, "no CUDA device here", marks=without_cuda)
        for graph in (True, {"warmup": 3})
    ],
]


@pytest.mark.requirement(112, 126, 219, 221, 222)
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
        ({"num_workers": 3}, ValueError, "num_workers=3, but create_env_fn is a list of 2"),
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
def test_a_missing_device_is_named_before_anything_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- backend=, backend_options=, num_collectors=, sync=: one constructor for every family ------------------------------

FORKSERVER = {"start_method": "forkserver"}


class Own(Collector):
    pass


@pytest.mark.requirement(223)
@pytest.mark.parametrize(
    ("given", "kind", "workers"),
    [
        ({"backend": "process", "num_collectors": 2, "backend_options": FORKSERVER}, MultiAsyncCollector, 2),
        ({"backend": "process", "sync": True, "backend_options": FORKSERVER}, MultiSyncCollector, 1),
        ({"num_collectors": 1, **FORKSERVER}, MultiAsyncCollector, 1),
        ({"backend": "process", "create_env_fn": [make()] * 2, "backend_options": FORKSERVER}, MultiAsyncCollector, 2),
    ],
    ids=["process", "process, synchronous", "num_collectors alone", "a list"],
)
def test_the_process_backend_makes_a_collector_with_workers(given: Any, kind: Any, workers: int) -> None:
    with Collector(**{"create_env_fn": make(), "policy": policy(3.0), "frames_per_batch": 6, **given}) as collector:
        assert type(collector) is kind
        assert collector.num_workers == workers
        assert acted(collector.next()) == [3.0]


@pytest.mark.requirement(223)
@pytest.mark.parametrize("environment", [make(), [make()]])
@pytest.mark.parametrize("given", [{}, {"backend": "direct"}, {"backend": "direct", "num_collectors": 1}])
def test_the_direct_backend_is_the_collector_of_this_process(environment: Any, given: Any) -> None:
    with Collector(environment, policy(2.0), frames_per_batch=6, **given) as collector:
        assert type(collector) is Collector
        assert acted(collector.next()) == [2.0]


@pytest.mark.requirement(223)
def test_a_subclass_is_what_it_is() -> None:
    with Own(make(), policy(), frames_per_batch=6) as collector:
        assert type(collector) is Own
    for given in ({"backend": "direct"}, {"backend_options": {}}, {"num_collectors": 2}, {"sync": False}):
        with pytest.raises(TypeError, match=rf"{next(iter(given))}=.*subclass Own"):
            Own(make(), policy(), frames_per_batch=6, **given)  # type: ignore[arg-type]


@pytest.mark.requirement(223)
@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"backend": "thread"}, ValueError, "'thread'.*'direct', 'process'"),
        ({"backend": "direct", "num_collectors": 2}, ValueError, "backend=.process."),
        ({"backend": "direct", "sync": True}, TypeError, "num_collectors=n"),
        ({"sync": True}, TypeError, "num_collectors=n"),
        ({"backend": "direct", "backend_options": FORKSERVER}, ValueError, "start_method"),
        ({"backend": "process", "sync": "yes"}, TypeError, "sync.*'yes'"),
        ({"backend": "process", "num_collectors": True}, TypeError, "num_collectors"),
        ({"num_collectors": 0}, ValueError, "num_collectors"),
        ({"num_collectors": 2, "create_env_fn": [make()]}, ValueError, "a list of 1"),
        ({"num_collectors": 2, "create_env_fn": {"a": make()}}, TypeError, "create_env_fn is a dict"),
        ({"backend": "process", "backend_options": [1]}, TypeError, r"dict .* not \[1\]"),
        ({"backend": "process", "backend_options": {"num_workers": 2}}, ValueError, "num_workers"),
        ({"backend": "process", "backend_options": {"policy": 1}}, ValueError, "policy"),
        ({"backend": "process", "backend_options": {"start_methode": "spawn"}}, TypeError, "start_methode"),
    ],
)
def test_choices_that_do_not_fit_are_refused(given: Any, error: Any, word: str) -> None:
    with pytest.raises(error, match=word):
        Collector(**{"create_env_fn": make(), "policy": policy(), "frames_per_batch": 6, **given})


@pytest.mark.requirement(223)
def test_what_is_given_by_position_counts_where_there_is_a_choice() -> None:
    with pytest.raises(TypeError, match="create_env_fn"):
        Collector(num_collectors=2, frames_per_batch=6)
    with pytest.raises(ValueError, match="give each once"):
        Collector(make(), policy(), frames_per_batch=6, backend="process", backend_options={"policy": 1})


# -- what help() and inspect.signature show ----------------------------------------------------------------------------

KINDS = [Collector, MultiCollector, MultiSyncCollector, MultiAsyncCollector]
DEFAULTS: dict[str, Any] = {
    "policy": None, "policy_factory": None, "total_frames": -1, "device": None, "storing_device": None,
    "policy_device": None, "env_device": None, "max_frames_per_traj": -1, "init_random_frames": -1,
    "reset_at_each_iter": False, "postproc": None, "split_trajs": False, "track_traj_ids": True,
    "exploration_type": InteractionType.RANDOM, "no_cuda_sync": False, "weight_updater": None,
    "weight_sync_schemes": None, "weight_recv_schemes": None, "extend_buffer": True, "compact_obs": False,
    "compile_policy": None, "cudagraph_policy": None, "trajs_per_batch": None, "trajs_per_write": None,
    "traj_format": None, "use_buffers": None, "local_init_rb": None, "reset_when_done": True,
    "track_policy_version": False, "auto_register_policy_transforms": None,
}  # fmt: skip
OF_ONE: dict[str, Any] = {
    "backend": None, "backend_options": None, "num_collectors": None, "sync": None, "return_same_td": False,
    "interruptor": None,
}  # fmt: skip
OF_WORKERS: dict[str, Any] = {
    "update_at_each_batch": False, "max_weight_update_interval": -1, "num_sub_threads": 1, "cat_results": None,
    "start_method": "spawn",
}  # fmt: skip


def variadic(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


# Of 120, 127 and 154, which are lines of RPCCollector's page, what every collector has.
@pytest.mark.requirement(120, 127, 154, 219, 220, 221, 222, 223, 227)
@pytest.mark.parametrize("kind", KINDS)
def test_a_constructor_shows_its_parameters_and_documents_them(kind: Any) -> None:
    signature = inspect.signature(kind)
    expected = DEFAULTS | (OF_ONE if kind is Collector else OF_WORKERS)
    assert {name: signature.parameters[name].default for name in expected} == expected
    positional = [each.name for each in signature.parameters.values() if each.kind is not each.KEYWORD_ONLY]
    assert positional == ["create_env_fn", "policy"]
    assert not variadic(kind)
    signature.bind(print, None, frames_per_batch=8, **({"sync": True} if kind is MultiCollector else {}))
    assert ("sync" in signature.parameters) == (kind in (Collector, MultiCollector))
    page = (inspect.getdoc(kind.__init__) or "").partition("Raises:")[0]
    assert re.findall(r"^    (\w+): ", page, re.MULTILINE) == list(inspect.signature(kind.__init__).parameters)[1:]
    assert "frames_per_batch" in pydoc.plain(pydoc.render_doc(kind)).split("\n\n", 2)[1]
    assert ExplorationType is InteractionType


@pytest.mark.requirement(227)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["update_policy_weights_", "update_policy_weights_async", "receive_weights"])
def test_a_method_shows_its_parameters(kind: Any, method: str) -> None:
    assert inspect.signature(getattr(kind, method)) == inspect.signature(getattr(planted.BaseCollector, method))
    assert variadic(getattr(kind, method)) <= {"kwargs"}
    assert "weights" in inspect.signature(getattr(kind, method)).parameters
    assert inspect.getdoc(getattr(kind, method))


@pytest.mark.requirement(227)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_subclass_shows_its_own_and_mistakes_are_refused_in_the_name_of_the_class_that_was_called(kind: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        pass

    class Small(kind):  # type: ignore[misc]
        def __init__(self, env: Any, *, size: int = 3) -> None: ...

    assert list(inspect.signature(Small).parameters) == ["env", "size"]
    for called in (kind, Own):
        with pytest.raises(TypeError, match=rf"^{called.__name__}\(\): got an unexpected keyword argument 'frames'"):
            called(print, frames=8, frames_per_batch=8)
        with pytest.raises(TypeError, match=rf"^{called.__name__}\(\): missing a required argument: 'create_env_fn'"):
            called(frames_per_batch=8)
        for name, meant in {"frame_per_batch": "frames_per_batch", "max_lags": "max_lag"}.items():
            message = rf"^{called.__name__}\(\): .*'{name}'; did you mean '{meant}'\?"
            with pytest.raises(TypeError, match=message):
                called(print, **{name: 1})
