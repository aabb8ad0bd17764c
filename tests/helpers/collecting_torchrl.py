"""TorchRL's environments, and what its own collectors make of them."""

import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from helpers.programs import in_program


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


class Programs:
    """Runs functions in programs of their own, one after another: torchrl changes settings of multiprocessing and of
    torch, and leaves things behind. They are forked off one process, which imports TorchRL and does nothing else: what
    that takes, ten seconds, is waited for once."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,))
        self._process.start()
        there.close()

    def __call__(self, function: Callable[..., Any], *args: Any, start_method: str = "fork") -> Any:
        """What a function returns in a program in which ``start_method`` is multiprocessing's, as far as TorchRL does
        not choose another one."""
        self._pipe.send(pickle.dumps((start_method, function, args)))
        result, failure = self._pipe.recv()
        assert failure is None, failure
        return result

    def close(self) -> None:
        self._process.kill()  # it has nothing of its own
        self._process.join()
        self._process.close()
        self._pipe.close()


PRELOADED = [
    "asyncsync.collectors", "asyncsync.sync", "gymnasium", "torchrl.collectors", "torchrl.data", "torchrl.envs",
    "torchrl.modules.inference_server"
]  # fmt: skip


def _serve(pipe: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in PRELOADED:
        import_module(name)
    while True:
        call = pipe.recv()
        try:
            answer = in_program(_call, call, start_method="fork"), None
        except Exception:
            answer = None, traceback.format_exc()
        pipe.send(answer)


def _call(call: bytes) -> Any:
    start_method, function, args = pickle.loads(call)
    multiprocessing.set_start_method(start_method, force=True)
    multiprocessing.set_forkserver_preload(PRELOADED)
    return function(*args)


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


def in_their_buffer(
    arguments: dict[str, Any], kind: str, storage: str, options: dict[str, Any], shared: bool
) -> tuple[int, list[int]]:
    """How many frames our workers have written to TorchRL's replay buffer, and the shape of a sample."""
    from torchrl import data

    from asyncsync import collectors

    buffer = data.ReplayBuffer(storage=getattr(data, storage)(200, **options), batch_size=8, shared=shared)
    with getattr(collectors, kind)([make_env] * 2, make_policy(), replay_buffer=buffer, **arguments) as collector:
        assert set(collector) == {None}
        return int(buffer.write_count), list(buffer.sample()["observation"].shape)


def evaluated(ours: bool) -> dict[str, float]:
    """What an Evaluator finds out of seven steps, asked as TorchRL's documentation does."""
    if ours:
        from asyncsync.collectors import Evaluator
    else:
        from torchrl.collectors import Evaluator

    policy, came = make_policy(), []
    evaluator = Evaluator(make_env, policy_factory=lambda env: make_policy(), max_steps=7, on_result=came.append)
    evaluator.trigger_eval(policy, step=40)
    while (found := evaluator.poll()) is None:
        pass
    evaluator.shutdown()
    assert came[0]["eval/reward"].item() == found["eval/reward"]
    return {name: value for name, value in found.items() if name != "eval/fps"}
