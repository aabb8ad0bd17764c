"""TorchRL's environments, and what its own collectors make of them."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

__all__ = [
    "evaluated",
    "in_program",
    "in_their_buffer",
    "in_their_collector",
    "make_env",
    "make_policy",
    "with_their_interruptor",
]


def make_env() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Leaning(nn.Module):
    """Goes where the pole leans to, and shows its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.0, 0.1, 1.0, 0.5]))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return ((observation * self.weight).sum(-1) > 0).long()


def make_policy() -> TensorDictModule:
    return TensorDictModule(Leaning(), in_keys=["observation"], out_keys=["action"])


def in_program(function: Callable[..., Any], *args: Any, seconds: float = 55) -> Any:
    """What a function returns in a program of its own, which may have processes: torchrl changes settings of
    multiprocessing and of torch, and leaves things behind."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_report, args=(there, function, args))
    process.start()
    there.close()
    try:
        assert here.poll(seconds), "it hangs"
        result, failure = here.recv()
        assert failure is None, failure
        process.join(10)
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()
    return result


def _report(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        pipe.send((function(*args), None))
    except Exception:
        pipe.send((None, traceback.format_exc()))


def in_their_collector(arguments: dict[str, Any]) -> list[Any]:
    """The batches of TorchRL's MultiSyncCollector: ``(size, {key: array})``."""
    from torchrl.collectors import MultiSyncCollector

    collector = MultiSyncCollector([make_env] * 2, make_policy(), cat_results="stack", **arguments)
    collector.set_seed(3)
    batches = []
    for batch in collector:
        data = {key: value.clone().numpy() for key, value in batch.items(True, True)}
        batches.append((list(batch.batch_size), data))
    collector.shutdown()
    return batches


def with_their_interruptor() -> list[int]:
    """How many frames our rollouts have, of which TorchRL's interruptor ends the second and the third."""
    from torchrl.collectors._constants import _Interruptor

    from asyncsync.collectors import Collector

    interruptor = _Interruptor()
    with Collector(make_env, make_policy(), frames_per_batch=10, interruptor=interruptor) as collector:
        sizes = [collector.next().numel()]
        interruptor.stop_collection()
        sizes += [collector.next().numel() for _ in range(2)]
        interruptor.start_collection()
        return [*sizes, collector.next().numel()]


def in_their_buffer(arguments: dict[str, Any]) -> tuple[int, list[int]]:
    """How many frames our workers have written to TorchRL's replay buffer, and the shape of a sample."""
    from torchrl.data import LazyMemmapStorage, ReplayBuffer

    from asyncsync.collectors import MultiAsyncCollector

    buffer = ReplayBuffer(storage=LazyMemmapStorage(200, shared_init=True), batch_size=8, shared=True)
    with MultiAsyncCollector([make_env] * 2, make_policy(), replay_buffer=buffer, **arguments) as collector:
        assert set(collector) == {None}
        return int(buffer.write_count), list(buffer.sample()["observation"].shape)


def evaluated(ours: bool) -> dict[str, float]:
    """What an Evaluator finds out of seven steps, asked as TorchRL's documentation does."""
    if ours:
        from asyncsync.collectors import Evaluator
    else:
        from torchrl.collectors import Evaluator  # type: ignore[assignment]

    policy, came = make_policy(), []
    evaluator = Evaluator(make_env, policy_factory=lambda env: make_policy(), max_steps=7, on_result=came.append)
    evaluator.trigger_eval(policy, step=40)
    while (found := evaluator.poll()) is None:
        pass
    evaluator.shutdown()
    assert came[0]["eval/reward"].item() == found["eval/reward"]
    return {name: value for name, value in found.items() if name != "eval/fps"}
