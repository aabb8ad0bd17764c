"""Collectors: asyncsync's, TorchRL's, and a bare loop over a vector environment. A step is the time for 1000 frames.

Both sides step TorchRL's GymEnv with the same small policy; our collectors also step our GymEnv. For vector
environments, our collector is compared with a loop that stores nothing. A step in which Gymnasium resets an environment
is no frame.
"""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from child import Spec
from ours import RAY, free_port

FRAMES = 1000  # a figure is the time for this many
SHAPE, IMAGES = (84, 84, 3), 1585  # an image's shape; frames in a batch of 64 MiB, next observations included
BATCHES = 4  # an asynchronous collector divides FRAMES into this many
ROUNDS = 4  # times FRAMES in one step, so that a batch under way at its begin or end hardly counts
# Vector environments: their number, Gymnasium's vectorization_mode, and the steps in a batch.
VECTORS = {
    "8 CartPoles": (8, "sync", 128),
    "64 CartPoles": (64, "sync", 64),
    "8 CartPoles, vectorised": (8, "vector_entry_point", 256),
    "64 CartPoles, vectorised": (64, "vector_entry_point", 64),
    "8 cameras": (8, "sync", 32),
    "8 cameras, compact_obs": (8, "sync", 32),
}


class Act(nn.Module):
    """Observation [..., 4], or four numbers of an image [..., 84, 84, 3] → the better of two actions, one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if observation.dtype == torch.uint8:
            observation = observation[..., 40, 40:44, 0].float()
        return nn.functional.one_hot(self.layers(observation).argmax(-1), 2)


def cart_pole() -> Any:
    return importlib.import_module("torchrl.envs").GymEnv("CartPole-v1")


class Camera(gymnasium.Env[Any, Any]):
    """An environment of 200 steps. The first 8 bytes of each image are the time of its step: float64, by a clock that
    all processes of a host share."""

    observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(SHAPE, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        image = np.full(SHAPE, self.steps, np.uint8)
        image.reshape(-1)[:8] = np.array([time.monotonic()]).view(np.uint8)
        return image, 1.0, self.steps == 200, False, {}


CAMERA = gymnasium.envs.registration.EnvSpec("Camera-v0", entry_point=lambda **_: Camera())


@asynccontextmanager
async def collecting(spec: Spec) -> AsyncIterator[Any]:
    """Kinds: "collector", "TorchRL", "bare loop", and those of `LOOPS`."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrl")  # about defaults that will change
    warnings.filterwarnings("ignore", category=UserWarning, module="torchrl")  # about weights that were not sent yet
    importlib.import_module("torchrl")
    if spec.case in VECTORS:
        collector, step = _vector(spec)
    elif spec.case.endswith("images"):
        collector, step = _images()
    else:
        collector, step = _cart_pole(spec)
    yield step
    if collector is not None:
        await spec.in_thread(collector.shutdown)


def _cart_pole(spec: Spec) -> tuple[Any, Callable[[], float]]:
    place = "asyncsync" if spec.kind == "collector" else "torchrl"
    family, asynchronous = spec.case.rpartition(" ")[2], ", async" in spec.case
    name, place = "MultiAsyncCollector" if asynchronous else "MultiSyncCollector", f"{place}.collectors"
    ours = spec.kind == "collector" and spec.case.endswith("our GymEnv")
    make: Any = "CartPole-v1" if ours else cart_pole  # from an id, our collectors make our GymEnv
    options: dict[str, Any] = {"total_frames": -1}
    if spec.workers == 1:
        name = "Collector"
    elif spec.section == "nodes":
        name, place = f"{family}Collector", f"{place}.distributed"
        options = {"total_frames": FRAMES << 30, "sync": not asynchronous}  # TorchRL's yield nothing with -1
        if family == "Ray":
            cluster = RAY | {"_temp_dir": f"{spec.directory}/{os.getpid()}"}
            options |= {"ray_init_config": cluster, "remote_configs": {"num_cpus": 1}}
        else:
            options |= {"launcher": "mp", "tcp_port": free_port()}
    if spec.workers > 1:
        make = [make] * spec.workers
    frames = FRAMES // BATCHES if asynchronous else FRAMES
    policy = TensorDictModule(Act(), in_keys=["observation"], out_keys=["action"])
    made = getattr(importlib.import_module(place), name)(make, policy, frames_per_batch=frames, **options)
    if not asynchronous:
        return made, _batches(made)
    spec.scale = 1 / (1 + ROUNDS)
    return made, _stream(made)


def _batches(collector: Any) -> Callable[[], float]:
    batches = iter(collector)

    def once() -> float:
        start = time.perf_counter()
        next(batches)
        return time.perf_counter() - start

    return once


def _stream(collector: Any) -> Callable[[], float]:
    """Steps of a collector whose workers run ahead of the requests."""
    batches = iter(collector)

    def once() -> float:
        for _ in range(BATCHES):  # batches from before this turn; then all workers are at work again
            next(batches)
        start = time.perf_counter()
        for _ in range(ROUNDS * BATCHES):
            next(batches)
        seconds = (time.perf_counter() - start) / ROUNDS
        time.sleep(seconds)  # until the workers have nothing to do, and disturb no other system
        return seconds

    return once


def _vector(spec: Spec) -> tuple[Any, Callable[[], float]]:
    envs, mode, steps = VECTORS[spec.case]
    frames = steps * envs
    spec.scale = FRAMES / frames
    torch.manual_seed(0)  # one policy for both sides: it decides how often environments finish
    policy, name = Act(), "CartPole-v1"
    if "cameras" in spec.case:
        name = CAMERA
    if spec.kind != "collector":
        return None, bare_loop(_environments(spec.kind, name, envs, mode), policy, steps)
    from asyncsync.collectors import Collector, GymEnv

    environment = GymEnv(name, num_envs=envs, vectorization_mode=mode)
    is_compact = spec.case.endswith("compact_obs")
    collector = Collector(environment, policy, frames_per_batch=frames, total_frames=-1, compact_obs=is_compact)
    once = _batches(collector)
    return collector, lambda: once() * FRAMES / frames


def _environments(kind: str, name: Any, count: int, mode: str) -> Any:
    if kind == "EnvPool":
        return importlib.import_module("envpool").make_gymnasium(name, num_envs=count)
    if kind == "SubprocVecEnv":
        make = [lambda: gymnasium.make(name)] * count
        return Stable(importlib.import_module("stable_baselines3.common.vec_env").SubprocVecEnv(make, "fork"))
    mode = "async" if kind == "AsyncVectorEnv" else mode
    return gymnasium.make_vec(name, num_envs=count, vectorization_mode=mode)


class Stable:
    """A vector environment of Stable-Baselines3 with Gymnasium's methods. It resets an environment within its last
    step."""

    def __init__(self, environments: Any) -> None:
        self.environments = environments

    def reset(self) -> tuple[Any, None]:
        return self.environments.reset(), None

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, _, info = self.environments.step(action)
        never = np.zeros(len(observation), bool)  # so every step is a frame
        return observation, reward, never, never, info


def bare_loop(environments: Any, policy: nn.Module, steps: int) -> Callable[[], float]:
    """Steps that return the seconds for 1000 frames of a loop that stores nothing."""
    observation = environments.reset()[0]
    ended = [np.zeros(len(observation), bool)]

    def loop() -> float:
        nonlocal observation
        del ended[:-1]
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(steps):
                action = policy(torch.from_numpy(observation)).argmax(-1)
                observation, _, terminated, truncated, _ = environments.step(action.numpy())
                ended.append(terminated | truncated)
        seconds = time.perf_counter() - start
        # After an environment has ended, its next step only resets it: that is no frame.
        resets = sum(int(np.count_nonzero(each)) for each in ended[:-1])
        return seconds * FRAMES / (steps * len(observation) - resets)

    return loop


def _images() -> tuple[Any, Callable[[], float]]:
    from asyncsync.collectors import GymEnv, MultiSyncCollector

    create = [lambda: GymEnv(CAMERA)]
    collector = MultiSyncCollector(create, Act(), frames_per_batch=IMAGES, total_frames=-1, cat_results=0)
    batches = iter(collector)

    def once() -> float:
        """Seconds from the last step until the trainer can read the batch."""
        batch: Any = next(batches)
        stamp = batch["next", "observation"][-1].flatten()[:8].contiguous().view(torch.float64)
        found: float = time.monotonic() - stamp.item()
        return found

    return collector, once
