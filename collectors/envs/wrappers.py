"""Wrappers of environments: one for max_frames_per_traj, and one for recurrent policies. TorchRL's environments are not
wrapped, because TorchRL has transforms for both."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.trajectories import FLAGS, Key, mask_like, path_of


def with_step_limit(environment: Any, max_steps: int) -> Any:
    """The environment, which truncates trajectories after ``max_steps`` steps; unchanged for 0. TorchRL's environments
    get TorchRL's StepCounter. Raises ValueError: the environment counts steps already."""
    if not max_steps:
        return environment
    if any("step_count" in path_of(key) for key in environments.action_keys(environment)):
        raise ValueError(_COUNTED)
    if not environments.is_torchrl(environment):
        return StepLimit(environment, max_steps)
    from torchrl.envs import StepCounter, TransformedEnv

    if any("step_count" in path_of(key) for key in environment.output_spec.keys(True, True)):
        raise ValueError(_COUNTED)
    return TransformedEnv(environment, StepCounter(max_steps=max_steps))


_COUNTED = (
    "max_frames_per_traj counts steps under the key 'step_count', which the environment already has: leave "
    "max_frames_per_traj out and set the limit of the environment's own counter, or remove that counter"
)


class Wrapper:
    """An environment around another one, from which it takes all attributes that it does not have itself."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self._batch_size = environments.batch_size_of(environment)

    def __getattr__(self, name: str) -> Any:
        if name == "environment":  # while this is being unpickled
            raise AttributeError(name)
        return getattr(self.environment, name)

    def to(self, device: torch.device) -> Self:
        self.environment = environments.moved(self.environment, device)
        return self

    def _ended(self, td: TensorDictBase, option: str) -> torch.Tensor:
        """Whether trajectories end with a step, from the step's ``"next"``. Raises KeyError, naming the collector's
        option that needs this: there is no done flag."""
        flags = {name: td.get(name) for name in FLAGS if name in td.keys()}  # noqa: SIM118
        if not flags:
            raise KeyError(self._no_flag(td.keys(), option))
        ended: torch.Tensor | None = flags.get("done")
        return functools.reduce(torch.logical_or, flags.values()) if ended is None else ended

    def _not_ended(self, root: TensorDictBase) -> torch.Tensor:
        """False for all environments, in the shape of their done flags."""
        flag = next((root.get(name) for name in FLAGS if name in root.keys()), None)  # noqa: SIM118
        if flag is None:
            return torch.zeros((*root.batch_size, 1), dtype=torch.bool, device=root.device)
        return torch.zeros_like(flag)

    def _no_flag(self, found: Iterable[Any], option: str) -> str:
        return (
            f"{option} needs to know when a trajectory ends, but {type(self.environment).__name__} has none of "
            f"{list(FLAGS)} (it has {sorted(map(str, found))}): let step_and_maybe_reset() set one under 'next' (bool, "
            f"[*batch_size, 1]), or leave {option} out"
        )


class StepLimit(Wrapper):
    """Counts the steps of each environment, and truncates and resets it after ``max_steps``.

    Adds ``"step_count"`` (int64, in the shape and on the device of the done flags) to the root and to ``"next"``. Adds
    ``"truncated"`` if it is missing, also to ``done_keys`` after the first ``reset``. At the limit, ``"truncated"`` and
    any ``"done"`` are True under ``"next"``.

    The environment must not be TorchRL's, must return ``"done"``, ``"terminated"`` or ``"truncated"`` under ``"next"``,
    and if it is a batch of several, its ``reset`` must take a ``"_reset"`` mask.
    """

    def __init__(self, environment: Any, max_steps: int) -> None:
        super().__init__(environment)
        self.max_steps = max_steps

    def reset(self, td: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin new trajectories, all or those of td's ``"_reset"`` mask, and set their counters to 0. ``kwargs`` go to
        the environment's ``reset``. Raises ValueError: the environment counts steps already; KeyError: it has no done
        flag."""
        # Read first, because the environment may remove the mask.
        mask, before = (None, None) if td is None else (td.get("_reset", None), td.get("step_count", None))
        root = environments.reset(self.environment, td, **kwargs)
        if td is None and "step_count" in root.keys():  # noqa: SIM118
            raise ValueError(_COUNTED)
        keys = environments.done_flags(self.environment, root)
        if not set(FLAGS) & set(keys):
            raise KeyError(self._no_flag(keys, "max_frames_per_traj"))
        self.done_keys = [*keys, *({"truncated"} - set(keys))]
        flag = self._not_ended(root)
        count = flag.long()
        if mask is not None and before is not None:
            count = torch.where(mask.reshape(count.shape).to(count.device), count, before.to(count.device))
        if "truncated" not in root.keys():  # noqa: SIM118
            root.set("truncated", flag)
        return root.set("step_count", count)

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step all environments. Raises KeyError: the result has no done flag."""
        output, root = environments.stepped(self.environment, td)
        after = output.get("next")
        ended = self._ended(after, "max_frames_per_traj")
        count = td.get("step_count").to(ended.device) + 1
        expired = (count >= self.max_steps).reshape(ended.shape)
        over = ended | expired
        truncated = after.get("truncated", None)
        after.set("truncated", expired if truncated is None else truncated | expired)
        if "done" in after.keys():  # noqa: SIM118
            after.set("done", over)
        after.set("step_count", count)
        if "truncated" not in root.keys():  # noqa: SIM118
            root.set("truncated", torch.zeros_like(ended))
        not_reset = expired & ~ended  # the environment has reset those that ended by themselves
        if not_reset.any():
            if self._batch_size.numel() > 1:
                root = environments.reset_some(self.environment, root, not_reset.reshape(self._batch_size))
            else:
                root = root.copy().update(environments.reset(self.environment))
        root.set("step_count", torch.where(over.reshape(count.shape), torch.zeros_like(count), count))
        return output, root


class Primed(Wrapper):
    """Marks the first step of each trajectory, and gives a recurrent policy its first state, as TorchRL's InitTracker
    and TensorDictPrimer do.

    Adds ``"is_init"`` (bool, in the done flags' shape), which is True only at the root of a trajectory's first step.
    Also adds the primers' entries: a trajectory's first state is the primer's, and each later one is what the policy
    has written under ``"next"``. Entries that the environment has already are left to it.

    Args:
        primers: each writes first states into a TensorDict of the environment's batch size, as TorchRL's primers do.
    """

    def __init__(self, environment: Any, primers: Sequence[Any]) -> None:
        super().__init__(environment)
        self._primers = primers
        self.primed_keys: list[Key] = []
        """Keys of the added entries, known after the first :meth:`reset`."""

    def _first(self, root: TensorDictBase) -> TensorDictBase:
        """The entries to add to a root at which all trajectories begin."""
        first = TensorDict({}, root.batch_size, device=root.device)
        for primer in self._primers:
            primer(first)
        return first.set("is_init", ~self._not_ended(root))

    def reset(self, td: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin new trajectories, all or those of td's ``"_reset"`` mask. Writes first states for all environments, of
        which :func:`environment.reset_some` takes those of the mask."""
        root = environments.reset(self.environment, td, **kwargs)
        first = self._first(root)
        if td is None:
            there = set(root.keys(True, True))
            self.primed_keys = [key for key in first.keys(True, True) if key not in there]
        return root.update(first.select(*self.primed_keys))

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step all environments. Raises KeyError: the result has no done flag."""
        written = td.get("next", None)
        states = {
            key: td.get(key) if written is None or (value := written.get(key, None)) is None else value
            for key in self.primed_keys
            if key != "is_init"
        }
        output, root = environments.stepped(self.environment, td)
        after = output.get("next")
        ended = self._ended(after, "auto_register_policy_transforms")
        first = self._first(root) if ended.any() else root
        mask = ended.reshape(*self._batch_size, -1).any(-1)
        for key, state in states.items():
            after.set(key, state)
            root.set(key, torch.where(mask_like(mask, state), first.get(key), state) if first is not root else state)
        if "is_init" in self.primed_keys:
            after.set("is_init", torch.zeros_like(ended))
            root.set("is_init", ended.clone())
        return output, root
