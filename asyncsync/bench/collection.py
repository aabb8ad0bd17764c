"""Collectors to be timed: asyncsync's, TorchRL's, and a bare loop over a vector environment. In processes of their own.

    collection = Collection.start("asyncsync")         # None: what it needs is not installed
    collection.open("CartPole", workers=1)
    seconds = collection.once("CartPole", workers=1)   # for FRAMES frames
    collection.close()

Everything here blocks. Both sides step TorchRL's GymEnv with the same small policy, ours our GymEnv, too. Vector
environments are stepped by our collector, and by a loop that stores nothing; steps by which Gymnasium resets one of
them, as the loop has and the collector has not, are no frames.
"""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

__all__ = ["CASES", "FRAMES", "IMAGE_BYTES", "NODES", "Collection", "ImageEnv"]

FRAMES = 1000  # of a trial: a figure is the time for so many
OUR_ENV = "CartPole, our GymEnv"


class Vector(NamedTuple):
    """A vector environment: how many, Gymnasium's vectorization_mode, steps in a batch, and whether they show
    images."""

    envs: int
    mode: str
    steps: int
    images: bool = False


VECTORS = {
    "8 CartPoles": Vector(8, "sync", 128),
    "64 CartPoles": Vector(64, "sync", 64),
    "8 CartPoles, vectorised": Vector(8, "vector_entry_point", 256),
    "64 CartPoles, vectorised": Vector(64, "vector_entry_point", 64),
    "8 cameras": Vector(8, "sync", 32, images=True),
}
CASES = {  # name: workers, and who has it
    "CartPole": (1, ("asyncsync", "TorchRL")),
    OUR_ENV: (1, ("asyncsync", "TorchRL")),
    "CartPole, sync": (2, ("asyncsync", "TorchRL")),
    "CartPole, async": (2, ("asyncsync", "TorchRL")),
    **dict.fromkeys(VECTORS, (1, ("asyncsync", "bare loop"))),
    "64 MiB of images": (1, ("asyncsync",)),
}
NODES = {  # the same, of collectors whose workers are reached by gloo or by Ray
    f"CartPole, {kind}, {family}": (2, ("asyncsync", "TorchRL"))
    for family in ("Distributed", "Ray")
    for kind in ("sync", "async")
}
IMAGE = (64, 1024)  # bytes of one
STEPS = 512
IMAGE_BYTES = 2 * STEPS * IMAGE[0] * IMAGE[1]  # of a batch: each image, and the next one
BATCHES = 4  # of an asynchronous collector, in so many frames
ROUNDS = 4  # of them in one trial: one batch more or less under way at its ends hardly counts


class _Act(nn.Module):
    """Observation [..., 4] → the better of two actions, one-hot [..., 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(self.layers(observation).argmax(-1), 2)


class _Look(_Act):
    """Image uint8 [..., 84, 84, 3] → the same, from four of its numbers: what is measured is not the policy."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation[..., 40, 40:44, 0].float())


def _policy() -> TensorDictModule:
    return TensorDictModule(_Act(), in_keys=["observation"], out_keys=["action"])


def free_port() -> int:
    """Of which the next one is likely to be free, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cart_pole() -> Any:
    """TorchRL's."""
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


class ImageEnv:
    """Shows another image at each step, and when it was there.

    ``image``: uint8 [64, 1024]; ``stamp``: float64 [1], seconds of ``time.monotonic``, which all processes of a host
    share.
    """

    batch_size = torch.Size([])

    def __init__(self) -> None:
        self._image = torch.zeros(IMAGE, dtype=torch.uint8)
        self._false = torch.zeros(1, dtype=torch.bool)

    def _look(self) -> TensorDict:
        self._image.add_(1)
        stamp = torch.tensor([time.monotonic()], dtype=torch.float64)
        state = {"image": self._image.clone(), "stamp": stamp, "done": self._false, "terminated": self._false}
        return TensorDict(state, batch_size=[])

    def reset(self, tensordict: TensorDict | None = None) -> TensorDict:
        return self._look()

    def step_and_maybe_reset(self, tensordict: TensorDict) -> tuple[TensorDict, TensorDict]:
        after = self._look()
        return tensordict.set("next", after.copy().set("reward", torch.zeros(1))), after


def _camera() -> Any:
    """The spec of a Gymnasium environment that shows another image at each step, and ends after 200."""
    import gymnasium
    import numpy as np

    class Camera(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 3), np.uint8)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self.steps = 0
            return np.zeros((84, 84, 3), np.uint8), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.steps += 1
            return np.full((84, 84, 3), self.steps, np.uint8), 1.0, self.steps == 200, False, {}

    return gymnasium.envs.registration.EnvSpec("Camera-v0", entry_point=lambda **_: Camera())


class _Still(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1)


class Collection:
    """The collectors of one side."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._open: dict[str, tuple[Any, Callable[[], float]]] = {}

    @classmethod
    def start(cls, side: str) -> Collection | None:
        """For ``"asyncsync"`` or ``"TorchRL"``; None: TorchRL or Gymnasium, which both need, is not installed."""
        try:
            import gymnasium  # noqa: F401
            import torchrl  # noqa: F401
        except ImportError:
            return None
        warnings.filterwarnings("ignore", category=FutureWarning, module="torchrl")  # of defaults that will change
        warnings.filterwarnings("ignore", category=UserWarning, module="torchrl")  # that no weights were sent yet
        return cls(side)

    def open(self, case: str) -> None:
        """Have a collector, or a loop, that is warm."""
        if case in VECTORS:
            collector, once = self._vector(VECTORS[case])
        elif case in NODES:
            collector, once = self._nodes(case)
        elif case.endswith("images"):
            collector, once = self._images()
        else:
            collector, once = self._cart_pole(case)
        self._open[case] = collector, once

    def once(self, case: str) -> float:
        """Seconds for :data:`FRAMES` frames; for images: from the last step until the batch can be read here."""
        return self._open[case][1]()

    def close(self, case: str | None = None) -> None:
        """Of this case; None: of all."""
        for name in [*self._open] if case is None else [case]:
            collector, _ = self._open.pop(name)
            if collector is not None:
                collector.shutdown()

    def _cart_pole(self, case: str) -> tuple[Any, Callable[[], float]]:
        if self._side == "asyncsync":
            from asyncsync import collectors as theirs
        else:
            import torchrl.collectors as theirs  # type: ignore[no-redef]
        module: Any = theirs
        _, _, kind = case.partition(", ")
        if CASES[case][0] == 1:
            make: Any = cart_pole
            if case == OUR_ENV and self._side == "asyncsync":
                make = "CartPole-v1"  # of an id, our collectors make our GymEnv
            return self._batches(module.Collector(make, _policy(), frames_per_batch=FRAMES, total_frames=-1))
        create = [cart_pole] * CASES[case][0]
        if kind == "sync":
            collector = module.MultiSyncCollector(create, _policy(), frames_per_batch=FRAMES, total_frames=-1)
            return self._batches(collector)
        frames = FRAMES // BATCHES
        collector = module.MultiAsyncCollector(create, _policy(), frames_per_batch=frames, total_frames=-1)
        return self._stream(collector)

    def _nodes(self, case: str) -> tuple[Any, Callable[[], float]]:
        if self._side == "asyncsync":
            from asyncsync.collectors import distributed as theirs
        else:
            import torchrl.collectors.distributed as theirs  # type: ignore[no-redef]
        _, kind, family = case.split(", ")
        count = BATCHES if kind == "async" else 1
        options: dict[str, Any] = {"launcher": "mp", "tcp_port": free_port()}
        if family == "Ray":
            # Each side has a cluster of its own.
            cluster = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            options = {"ray_init_config": cluster, "remote_configs": {"num_cpus": 1}}
        module: Any = theirs
        collector = getattr(module, f"{family}Collector")(
            [cart_pole] * NODES[case][0],
            _policy(),
            frames_per_batch=FRAMES // count,
            total_frames=FRAMES << 30,  # TorchRL's yield nothing with -1
            sync=kind == "sync",
            **options,
        )
        return self._batches(collector) if kind == "sync" else self._stream(collector)

    def _batches(self, collector: Any) -> tuple[Any, Callable[[], float]]:
        batches = iter(collector)

        def once() -> float:
            start = time.perf_counter()
            next(batches)
            return time.perf_counter() - start

        once()
        return collector, once

    def _stream(self, collector: Any) -> tuple[Any, Callable[[], float]]:
        """Of workers that collect without being asked."""
        batches = iter(collector)

        def once() -> float:
            for _ in range(BATCHES):  # collected while it was another's turn, and until all workers are at work again
                next(batches)
            start = time.perf_counter()
            for _ in range(ROUNDS * BATCHES):
                next(batches)
            seconds = (time.perf_counter() - start) / ROUNDS
            time.sleep(seconds)  # until they stand still, and disturb nobody
            return seconds

        once()
        return collector, once

    def _vector(self, vector: Vector) -> tuple[Any, Callable[[], float]]:
        import gymnasium
        import numpy as np

        frames = vector.steps * vector.envs
        torch.manual_seed(0)  # one policy for both sides: it decides how often environments finish
        name, policy = (_camera(), _Look()) if vector.images else ("CartPole-v1", _Act())
        if self._side == "asyncsync":
            from asyncsync.collectors import Collector, GymEnv

            environment = GymEnv(name, num_envs=vector.envs, vectorization_mode=vector.mode)
            # The very module of the loop.
            collector = Collector(environment, policy, frames_per_batch=frames, total_frames=-1)
            collector, once = self._batches(collector)
            return collector, lambda: once() * FRAMES / frames
        environments = gymnasium.make_vec(name, num_envs=vector.envs, vectorization_mode=vector.mode)
        observation = environments.reset()[0]
        ended = [np.zeros(vector.envs, bool)]

        def loop() -> float:
            nonlocal observation
            del ended[:-1]
            start = time.perf_counter()
            with torch.no_grad():
                for _ in range(vector.steps):
                    action = policy(torch.from_numpy(observation)).argmax(-1)
                    observation, _, terminated, truncated, _ = environments.step(action.numpy())
                    ended.append(terminated | truncated)
            seconds = time.perf_counter() - start
            # Gymnasium resets an environment that has finished with the step after: that is no frame.
            return seconds * FRAMES / (frames - sum(np.count_nonzero(each) for each in ended[:-1]))

        loop()
        return None, loop

    def _images(self) -> tuple[Any, Callable[[], float]]:
        from asyncsync.collectors import MultiSyncCollector

        policy = TensorDictModule(_Still(), in_keys=["image"], out_keys=["action"])
        collector = MultiSyncCollector([ImageEnv], policy, frames_per_batch=STEPS, total_frames=-1, cat_results=0)
        batches = iter(collector)

        def once() -> float:
            batch: Any = next(batches)
            found: float = time.monotonic() - batch["next", "stamp"][-1].item()
            return found

        once()
        return collector, once
