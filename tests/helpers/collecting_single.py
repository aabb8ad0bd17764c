"""Deterministic environments for collectors: one without any library, and TorchRL's counterpart of it."""

import multiprocessing
import threading
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

needs_torchrl = pytest.mark.skipif(find_spec("torchrl") is None, reason="TorchRL is not installed")


def torchrl() -> ModuleType:
    """TorchRL, imported without what it warns of, and with the start method as it was."""
    method = multiprocessing.get_start_method(allow_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrl
        import torchrl.collectors
        import torchrl.data
        import torchrl.envs
        import torchrl.modules

        # It keeps the frames that have imported it first, and so what those know: in a thread, it is no test's.
        importing = threading.Thread(target=import_module, args=("torchrl.envs.libs.utils",))
        importing.start()
        importing.join()
    multiprocessing.set_start_method(method, force=True)
    return torchrl


class Walk:
    """What both environments compute: a decaying sum of actions, for 3 to 6 steps, after which an episode ends.

    Args:
        batch_size: of the environment.
        longest: added to the length of every episode.
    """

    def __init__(self, batch_size: tuple[int, ...] = (), longest: int = 0) -> None:
        self.batch_size = torch.Size(batch_size)
        self.offset = torch.arange(self.batch_size.numel()).reshape(self.batch_size)
        self.longest = longest
        self.seed = 0
        self.episode = torch.full(self.batch_size, -1)
        self.count = torch.zeros(self.batch_size, dtype=torch.int64)
        self.total = torch.zeros(self.batch_size)

    def begin(self, mask: torch.Tensor) -> torch.Tensor:
        self.episode = torch.where(mask, self.episode + 1, self.episode)
        self.count = torch.where(mask, torch.zeros_like(self.count), self.count)
        self.total = torch.where(mask, (self.episode + self.offset + self.seed) * 0.25, self.total)
        return self.observation()

    def observation(self) -> torch.Tensor:
        return torch.stack([self.count.float(), self.total, self.episode.float()], -1)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Observation, reward and terminated, the latter two with a last dimension of 1."""
        self.count = self.count + 1
        self.total = self.total * 0.9 + action.squeeze(-1)
        length = 3 + self.longest + (self.episode * 2 + self.offset) % 4
        return self.observation(), self.total.unsqueeze(-1), (self.count >= length).unsqueeze(-1)


class Spec:
    """The least that can be asked of a spec of actions."""

    def __init__(self, batch_size: torch.Size) -> None:
        self.shape = (*batch_size, 1)

    def rand(self) -> torch.Tensor:
        return torch.rand(self.shape) + 10.0  # no policy's action is that large


class WalkEnv:
    """An environment of nobody's library."""

    def __init__(self, batch_size: tuple[int, ...] = (), longest: int = 0) -> None:
        self.walk = Walk(batch_size, longest)
        self.batch_size = self.walk.batch_size
        self.action_spec = Spec(self.batch_size)
        self.closed = 0
        self.resets = 0
        self.steps = 0
        self.seen: set[str] = set()
        self.fail_at: int | None = None

    def reset(self, td: TensorDictBase | None = None) -> TensorDict:
        self.resets += 1
        mask = None if td is None else td.get("_reset", None)
        where = torch.ones(self.batch_size, dtype=torch.bool) if mask is None else mask.reshape(self.batch_size)
        return self._root(self.walk.begin(where))

    def _root(self, observation: torch.Tensor) -> TensorDict:
        flag = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        return TensorDict({"observation": observation, **flags}, self.batch_size)

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the environment broke")
        self.seen |= set(td.keys())
        after = self.after(td)
        ended = after["terminated"].squeeze(-1)
        root = self._root(self.walk.begin(ended) if ended.any() else self.walk.observation())
        return TensorDict({"next": after}, self.batch_size), root

    def after(self, td: TensorDictBase) -> TensorDict:
        observation, reward, terminated = self.walk.step(td.get("action"))
        return self._root(observation).update({"reward": reward, "done": terminated, "terminated": terminated.clone()})

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self.walk.seed = seed
        self.walk.episode.fill_(-1)
        return seed if static_seed else seed + 1

    def close(self) -> None:
        self.closed += 1


class Agents(WalkEnv):
    """Two agents, one of which dies with every second step; the episode goes on."""

    done_keys = ("done", ("agents", "done"))

    def _dead(self) -> torch.Tensor:
        return torch.tensor([[self.steps % 2 == 1], [False]])

    def _root(self, observation: torch.Tensor) -> TensorDict:
        agents = TensorDict({"done": self._dead(), "observation": torch.zeros(2, 1)}, [2])
        return super()._root(observation).set("agents", agents)


def torchrl_walk(batch_size: tuple[int, ...] = (), longest: int = 0) -> Any:
    """TorchRL's counterpart of :class:`WalkEnv`."""
    torchrl()
    from torchrl.data import Binary, Bounded, Composite, Unbounded
    from torchrl.envs import EnvBase

    size = torch.Size(batch_size)
    flags = {name: Binary(1, (*size, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")}

    class TorchRLWalk(EnvBase):
        def __init__(self) -> None:
            super().__init__(batch_size=size)
            self.own = WalkEnv(batch_size, longest)
            self.walk = self.own.walk
            self.observation_spec = Composite(observation=Unbounded((*size, 3)), shape=size)
            self.action_spec = Bounded(10.0, 11.0, (*size, 1))
            self.reward_spec = Unbounded((*size, 1))
            self.done_spec = Composite(**flags, shape=size)

        def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
            return self.own.reset(tensordict)

        def _step(self, tensordict: TensorDictBase) -> TensorDict:
            return self.own.after(tensordict)

        def _set_seed(self, seed: int | None) -> None:
            self.own.set_seed(seed or 0)

    return TorchRLWalk()


class Actor(nn.Module):
    """A policy of tensors, deterministic, with a weight."""

    def __init__(self, gain: float = 0.1) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))
        self.calls = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.gain * observation.sum(-1, keepdim=True)


def equal(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    """All of theirs is in ours, which adds the policy's version and nothing else."""
    own = set(ours.keys(True, True)) - {("collector", "policy_version")}
    assert own == set(theirs.keys(True, True))
    assert ours.batch_size == theirs.batch_size
    assert list(ours.names) == list(theirs.names)
    for key in theirs.keys(True, True):
        mine, other = ours.get(key), theirs.get(key)
        assert mine.shape == other.shape, key
        assert mine.dtype == other.dtype, key
        assert torch.equal(mine, other), key
    for key in theirs.keys(True):
        if isinstance(theirs.get(key), TensorDictBase):
            assert ours.get(key).batch_size == theirs.get(key).batch_size, key
            assert list(ours.get(key).names) == list(theirs.get(key).names), key


class Buffer:
    """A replay buffer."""

    def __init__(self) -> None:
        self.extended: list[TensorDictBase] = []
        self.added: list[TensorDictBase] = []

    def extend(self, batch: TensorDictBase) -> None:
        self.extended.append(batch)

    def add(self, frame: TensorDictBase) -> None:
        self.added.append(frame)


def environment(kind: str, batch_size: tuple[int, ...] = (), longest: int = 0) -> Any:
    """``"own"``, or ``"torchrl"``."""
    if kind == "torchrl":
        return torchrl_walk(batch_size, longest)
    return WalkEnv(batch_size, longest)


KINDS = ["own", pytest.param("torchrl", marks=needs_torchrl)]
