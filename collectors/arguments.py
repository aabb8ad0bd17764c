"""Checks of the collectors' arguments, their values per worker, and the arguments that a partial fixes."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from tensordict.nn import InteractionType, TensorDictModuleBase
from torch import nn

from asyncsync.arguments import user_stacklevel

Device = int | str | torch.device
Devices = Device | Sequence[Device | None] | None
DEVICES = ("device", "storing_device", "env_device", "policy_device")

MAX_WORKERS = 480
"""Most workers of one collector, because the control page has room for this many versions."""


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """The value as an int of at least ``least``. Raises TypeError, ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        bound = "" if least is None else f" of at least {least}"
        raise TypeError(f"{name} must be an int{bound}, not {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number


def frames_or_none(name: str, value: Any) -> int | None:
    """A number of frames, which may be a float such as 1e6. None: it is negative or None. Raises TypeError."""
    if isinstance(value, float):
        if not value.is_integer():
            raise TypeError(f"{name} must be a whole number, or -1 for none, not {value!r}")
        value = int(value)
    number = -1 if value is None else whole_number(name, value)
    return None if number < 0 else number


def rounded_up(name: str, frames: int, unit: str, size: int) -> int:
    """The number of frames, rounded up to a multiple of ``size``. If that changes the number, warns at the user's line,
    unless RL_WARNINGS is off."""
    rounded = math.ceil(frames / size) * size
    if rounded == frames or os.environ.get("RL_WARNINGS", "1").lower() in ("0", "false"):
        return rounded
    warnings.warn(
        f"{name} ({frames}) is not exactly divisible by {unit} ({size}): rounded up to {rounded}. RL_WARNINGS=False "
        "silences this warning",
        stacklevel=user_stacklevel(),
    )
    return rounded


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(map(repr, choices))}")


def check_callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")


def check_schemes(name: str, schemes: Any) -> None:
    if schemes is not None and not isinstance(schemes, Mapping):
        kind = schemes.__name__ if isinstance(schemes, type) else type(schemes).__name__
        raise TypeError(f'{name} must be a dict {{model_id: scheme}}, not {kind}: pass {{"policy": scheme}}')


def check_policy(policy: Any) -> None:
    if isinstance(policy, list | tuple):
        raise TypeError(
            f"policy is a {type(policy).__name__} of {len(policy)}: pass one policy. To give each worker its own, pass "
            "policy_factory=[…], a list of callables that return policies"
        )
    name = getattr(policy, "__qualname__", type(policy).__name__)
    if isinstance(policy, type):
        raise TypeError(f"policy is the class {name}: pass an instance of it. Did you mean policy_factory={name}?")
    if not isinstance(policy, nn.Module) and accepts(policy) and not accepts(policy, None):
        raise TypeError(f"policy is {name}(), which takes no observations. Did you mean policy_factory={name}?")


def check_policy_factory(name: str, factory: Any) -> None:
    kind = type(factory).__name__
    if factory is not None and not callable(factory):
        raise TypeError(f"{name} must be a callable that returns a policy, not {kind}")
    if isinstance(factory, TensorDictModuleBase) or (isinstance(factory, nn.Module) and not accepts(factory.forward)):
        raise TypeError(f"{name} is a policy, a {kind}: pass it as policy=, or pass a callable that returns it")


def accepts(function: Any, *arguments: Any) -> bool:
    """Whether a callable accepts these arguments. True if it has no signature, because then nothing is known."""
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


class Interruptor(Protocol):
    """Ends rollouts from outside, as TorchRL's ``_Interruptor`` does. The collector asks it after each step."""

    def collection_stopped(self) -> bool:
        """Whether the current rollout ends with this step."""


class RolloutArguments(SimpleNamespace):
    """The checked options of a collector, as attributes. ``total_frames`` is math.inf if collection has no end; other
    numbers of frames are 0 if there is no limit. :meth:`fit` sets ``steps``, the environment steps of a rollout, and
    ``requested_frames_per_batch``, which is steps times environments. Raises TypeError, ValueError."""

    def __init__(self, **options: Any) -> None:
        total = frames_or_none("total_frames", options["total_frames"])
        checked = {
            "frames_per_batch": whole_number("frames_per_batch", options["frames_per_batch"], 1),
            "total_frames": math.inf if total is None else total,
            "init_random_frames": frames_or_none("init_random_frames", options["init_random_frames"]) or 0,
            "max_frames_per_traj": frames_or_none("max_frames_per_traj", options["max_frames_per_traj"]) or 0,
            "split_trajs": bool(options["split_trajs"]),
            "exploration_type": options["exploration_type"] or InteractionType.RANDOM,
        }
        super().__init__(**options | checked)
        if self.adds_frames and (self.postproc is not None or self.split_trajs):
            raise TypeError("postproc and split_trajs need whole batches: leave extend_buffer=False out")
        _check_method("replay_buffer", self.replay_buffer, "add" if self.adds_frames else "extend")
        _check_method("interruptor", self.interruptor, "collection_stopped")
        tracker = self.track_policy_version
        if not isinstance(tracker, bool) and not isinstance(getattr(tracker, "version", None), int):
            raise TypeError(f"track_policy_version must be a bool, or an object with an int version, not {tracker!r}")

    @property
    def adds_frames(self) -> bool:
        """Whether frames go into the replay buffer one by one."""
        return self.replay_buffer is not None and not self.extend_buffer

    def fit(self, environments: int) -> None:
        """Round frames up to whole steps of this many environments. Warns if that changes a number."""
        batch = rounded_up("frames_per_batch", self.frames_per_batch, "the number of environments", environments)
        self.requested_frames_per_batch, self.steps = batch, batch // environments
        rounded_up("init_random_frames", self.init_random_frames, "frames_per_batch", batch)
        if self.total_frames < math.inf and not self.adds_frames:  # else the last rollout may be shorter
            rounded_up("total_frames", self.total_frames, "frames_per_batch", batch)


def _check_method(name: str, value: Any, method: str) -> None:
    if value is not None and not hasattr(value, method):
        raise TypeError(f"{name} must have a method {method}(), but {type(value).__name__} has none")


def check_factories(
    create_env_fn: Any, count: int | None, name: str = "num_workers", default: int | None = None
) -> list[Any]:
    """One environment factory per worker, from a list of them or one factory for ``count`` workers. ``count`` is the
    user's argument ``name``, with this ``default``. Raises TypeError, ValueError."""
    if count is None and not is_list(create_env_fn):
        count = default
    if count is not None:
        count = whole_number(name, count, 1)
    factories = list(create_env_fn) if is_list(create_env_fn) else [create_env_fn] * (count or 1)
    for factory in factories:
        if isinstance(factory, Mapping):
            raise TypeError("create_env_fn is a dict: pass list(create_env_fn.values())")
        if not callable(factory) and not isinstance(factory, str) and not is_list(factory):
            raise TypeError(f"create_env_fn must be callables that make environments, not {type(factory).__name__}")
    if count is None and not is_list(create_env_fn):
        raise ValueError(f"create_env_fn is one callable: pass the number of workers, {name}=, or a list")
    if not factories:
        raise ValueError("create_env_fn is empty: pass one callable per worker")
    if count not in (None, len(factories)):
        raise ValueError(f"{name}={count}, but create_env_fn is a list of {len(factories)}")
    if len(factories) > MAX_WORKERS:
        raise ValueError(f"a collector can have at most {MAX_WORKERS} workers, not {len(factories)}")
    return factories


def is_list(value: Any) -> bool:
    """Whether an argument has one value per worker."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def check_length(name: str, values: Any, count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries, but there are {count} workers: pass one per worker")


def per_worker(name: str, value: Any, count: int) -> list[Any]:
    """One value per worker: the given list, or the value repeated. Raises ValueError: the list has another length."""
    values = list(value) if is_list(value) else [value] * count
    check_length(name, values, count)
    return values


def check_devices(devices: Mapping[str, Any], *, of_workers: bool = False) -> None:
    """Check devices, given by the names of their arguments, without initialising one. ``of_workers``: allow lists.
    Raises TypeError: a value is no device; ValueError: this machine does not have the device."""
    for name, given in devices.items():
        if of_workers and is_list(given):
            check_devices({f"{name}[{index}]": one for index, one in enumerate(given)}, of_workers=True)
            continue
        if given is None:
            continue
        try:
            device = torch.device(given)
        except (RuntimeError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name}={given!r} is not a device of this machine: {error}") from error
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        elif device.type == "mps":
            count = int(torch.backends.mps.is_available())
        else:
            continue
        if (device.index or 0) >= count:
            there = ["'cpu'", *(f"'{device.type}:{index}'" for index in range(count))]
            raise ValueError(
                f"{name}={str(given)!r}, but torch finds {count} {device.type} device{'s' * (count != 1)} here: leave "
                f"{name} out, or pass {' or '.join(there)}"
            )


def exact_device(device: Device | None) -> torch.device | None:
    """The device with its index, as in a tensor's ``device``: ``"cuda"`` becomes the current CUDA device."""
    if device is None:
        return None
    device = torch.device(device)
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    current = getattr(getattr(torch, device.type, None), "current_device", lambda: 0)
    return torch.device(device.type, current())


def partial_arguments(kind: Any) -> Mapping[str, Any]:
    """The keyword arguments that a ``collector_class`` fixes, if it is a ``functools.partial``."""
    return kind.keywords if isinstance(kind, functools.partial) else {}


def with_partial(kind: Any, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments for a worker's ``kind``: ``arguments`` without those that a partial fixes. Raises
    TypeError: the user gave one of these too; ValueError: the partial fixes an argument of all workers together."""
    own = partial_arguments(kind)
    for name in own:
        value, default = arguments.get(name), defaults.get(name)
        is_default = value is default or (type(value) is type(default) and bool(value == default))
        if name in arguments and not is_default:
            raise TypeError(f"{name} is given twice, here and by the partial collector_class: leave one of them out")
        if name in ("total_frames", "replay_buffer"):
            raise ValueError(f"collector_class is a partial with {name}: pass that to the collector itself")
    return {name: value for name, value in arguments.items() if name not in own}
