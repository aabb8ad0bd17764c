"""compile_policy= and cudagraph_policy=: policies that torch compiles, or records as a CUDA graph."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers.collecting_multi import acted, make, options, policy
from helpers.collecting_single import Actor, WalkEnv, needs_torchrl, torchrl, torchrl_walk
from helpers.collecting_torchrl import Programs

pytestmark = [
    pytest.mark.requirement(221),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


class Backend:
    """A backend of torch.compile that compiles nothing, and counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: list[Any]) -> Any:
        self.graphs += 1
        return module.forward


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation)  # type: ignore[no-any-return]


def collected(made: Any, env: Any, **kwargs: Any) -> list[Any]:
    torch.manual_seed(0)
    collector = made(env, Network(), frames_per_batch=10, total_frames=40, **kwargs)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine["action"], other["action"], atol=1e-5)
        assert torch.allclose(mine["next", "observation"], other["next", "observation"], atol=1e-5)


def test_a_mapping_has_the_arguments_of_torch_compile() -> None:
    backend = Backend()
    found = collected(Collector, WalkEnv((2,)), compile_policy={"backend": backend})
    assert backend.graphs > 0
    assert_close(found, collected(Collector, WalkEnv((2,))))


def test_a_compiled_policy_acts_with_the_newest_weights() -> None:
    actor = Actor(0.1)
    given: dict[str, Any] = {"frames_per_batch": 4, "policy_device": "cpu", "cudagraph_policy": False}
    given["compile_policy"] = {"backend": Backend()}
    with Collector(WalkEnv(longest=20), actor, **given) as c:
        before = c.next().clone()
        new = Actor(0.7)
        c.update_policy_weights_(new)
        after = c.next().clone()
    for batch, gain in ((before, 0.1), (after, 0.7)):
        assert torch.allclose(batch["action"], gain * batch["observation"].sum(-1, keepdim=True))


def compiled_for_real() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    ours = collected(Collector, WalkEnv(), compile_policy=True)
    assert_close(ours, collected(Collector, WalkEnv()))
    assert_close(ours, collected(torchrl().collectors.Collector, torchrl_walk(), compile_policy=True))


@pytest.mark.thorough
@needs_torchrl
def test_compiled_for_real_as_by_torchrl(in_program: Programs) -> None:
    # In a program of its own: the compiler keeps a thread for as long as that lasts.
    in_program(compiled_for_real)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_compile_for_real_and_follow_updates(kind: Any) -> None:
    actor = policy(1.0)
    given = options(compile_policy={"dynamic": False}, connect_timeout=200.0)
    with kind([make()] * 2, actor, **given) as collector:
        assert acted(collector.next()) == [1.0]
        for value in (2.0, 3.0):
            actor.module.fill(value)
            collector.update_policy_weights_()
            while acted(batch := collector.next()) != [value]:  # asynchronous rollouts that were under way
                assert kind is MultiAsyncCollector
                assert set(acted(batch)) <= {1.0, 2.0, value}


@without_cuda
@pytest.mark.parametrize("given", [True, {"warmup": 3}])
def test_a_cuda_graph_without_cuda_is_refused_at_once(given: Any) -> None:
    message = "cudagraph_policy records the policy as a CUDA graph, but torch finds no CUDA device here: leave"
    env = WalkEnv()
    with pytest.raises(ValueError, match=message):
        Collector(env, Actor(), frames_per_batch=4, cudagraph_policy=given)
    assert not env.resets
    for kind in (MultiSyncCollector, MultiAsyncCollector):
        with pytest.raises(ValueError, match=message):
            kind([make()] * 2, policy(), **options(cudagraph_policy=given))


@needs_cuda
@pytest.mark.parametrize("given", [True, {"warmup": 3}])
def test_a_cuda_graph_acts_with_the_newest_weights(given: Any) -> None:
    actor = Actor(0.1)
    options = {"frames_per_batch": 8, "policy_device": "cuda:0", "storing_device": "cpu", "cudagraph_policy": given}
    with Collector(WalkEnv(longest=20), actor, **options) as c:
        before = c.next().clone()
        c.update_policy_weights_(Actor(0.7))
        after = c.next().clone()
    for batch, gain in ((before, 0.1), (after, 0.7)):
        assert torch.allclose(batch["action"], gain * batch["observation"].sum(-1, keepdim=True))
