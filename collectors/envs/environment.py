"""Environments: any object with ``reset`` and ``step_and_maybe_reset``. The functions here use the other, optional
attributes, with defaults for those that an environment lacks.

    environment.reset(td=None) -> TensorDict                        # its batch size is the environment's
    environment.step_and_maybe_reset(td) -> (td with "next", root of the next step)

Optional: ``batch_size`` (default: none), ``device``, ``to(device)``, ``rand_action(td)``, ``action_spec`` or
``full_action_spec`` (with ``rand()``), ``observation_spec``, ``action_keys``, ``done_keys``, ``close()``,
``set_seed(seed, static_seed=False)``, ``state_dict()`` and ``load_state_dict()``. TorchRL's environments have all of
these; Gymnasium's are wrapped in :class:`asyncsync.collectors.GymEnv`. An environment may keep the tensors that it
returns, but must not change them before the end of the next step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.arguments import RolloutArguments
from asyncsync.collectors.envs.gym import GymEnv
from asyncsync.collectors.trajectories import FLAGS, Key, mask_like, path_of


def is_environment_object(create_env_fn: Any) -> bool:
    """Whether ``create_env_fn`` is an environment, or a list with one, and not a function that makes one."""
    one = create_env_fn[0] if isinstance(create_env_fn, list | tuple) and create_env_fn else create_env_fn
    return not isinstance(one, type) and (_is_environment(one) or _is_gymnasium(one))


def make_environment(create_env_fn: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """The environment from ``create_env_fn``: an environment, a callable that returns one, a Gymnasium id, or a list
    with one of these. Raises ValueError: a list of another length, or an environment that takes no
    ``create_env_kwargs``; TypeError: no environment."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if len(create_env_fn) != 1:
            raise ValueError(
                f"a Collector steps one environment, but create_env_fn is a list of {len(create_env_fn)}: use "
                "MultiSyncCollector or MultiAsyncCollector (or Collector(..., num_collectors=n)), or one vector "
                "environment"
            )
        create_env_fn = create_env_fn[0]
    given = dict(kwargs or {})
    if isinstance(create_env_fn, str):
        return GymEnv(create_env_fn, **given)
    environment = create_env_fn
    if not is_environment_object(environment):
        if not callable(environment):
            raise TypeError(
                f"create_env_fn must be an environment, a callable that returns one, or a Gymnasium id, not "
                f"{environment!r}"
            )
        environment = environment(**given)
    elif given:
        if not hasattr(environment, "update_kwargs"):
            raise ValueError(
                f"create_env_kwargs need a callable, but create_env_fn is a {type(environment).__name__} already: "
                "pass its class or a function"
            )
        environment.update_kwargs(given)
    if _is_environment(environment):
        return environment
    if _is_gymnasium(environment):
        return GymEnv(environment)
    raise TypeError(
        f"{type(environment).__name__} is not an environment: it must have reset() and step_and_maybe_reset() like "
        "TorchRL's environments, or be a Gymnasium environment"
    )


def _is_environment(thing: Any) -> bool:
    return hasattr(thing, "step_and_maybe_reset") and hasattr(thing, "reset")


def _is_gymnasium(thing: Any) -> bool:
    return hasattr(thing, "step") and hasattr(thing, "reset") and hasattr(thing, "action_space")


def is_torchrl(environment: Any) -> bool:
    """Whether this is a TorchRL environment. None is, unless TorchRL was imported."""
    common = sys.modules.get("torchrl.envs.common")
    return common is not None and isinstance(environment, common.EnvBase)


def reset(environment: Any, td: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
    """Reset all environments (None), or those of td's ``"_reset"``. Raises TypeError: ``reset`` gave no TensorDict."""
    root = environment.reset(**kwargs) if td is None else environment.reset(td, **kwargs)
    if not isinstance(root, TensorDictBase):
        raise TypeError(f"{type(environment).__name__}.reset() returned a {type(root).__name__}, not a TensorDict")
    return root


def stepped(environment: Any, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
    """Call ``step_and_maybe_reset``. Raises TypeError: it did not return two TensorDicts."""
    found = environment.step_and_maybe_reset(td)
    if not isinstance(found, tuple) or len(found) != 2 or found[0].get("next", None) is None:
        raise TypeError(
            f"{type(environment).__name__}.step_and_maybe_reset() must return two TensorDicts: its argument, with the "
            f"step's results in 'next', and the one for the next step. It returned {found!r}"
        )
    return found


def batch_size_of(environment: Any) -> torch.Size:
    return torch.Size(getattr(environment, "batch_size", ()))


def device_of(environment: Any) -> torch.device | None:
    """The environment's device. None: it has no device, or no attribute that names it."""
    device = getattr(environment, "device", None)
    return None if device is None else torch.device(device)


def moved(environment: Any, device: torch.device) -> Any:
    """The environment, moved to this device. Raises TypeError: it is on another device and has no ``to``."""
    if hasattr(environment, "to"):
        there = environment.to(device)
        return environment if there is None else there
    if (device_of(environment) or torch.device("cpu")) == device:
        return environment
    raise TypeError(
        f"{type(environment).__name__} cannot be moved to env_device={str(device)!r}, because it has no to(device): "
        "leave env_device (or device) out, or pass only policy_device and storing_device"
    )


def observation_keys(environment: Any, root: TensorDictBase, counted: bool = False) -> list[Key]:
    """The keys of an environment's observations, nested ones too: those of ``observation_spec`` or, without it, those
    of ``root``, a reset's result, except done flags, private entries, and entries that :class:`Primed` adds.
    ``counted``: the environment is in a :class:`StepLimit`, so ``"step_count"`` is not an observation."""
    spec = getattr(environment, "observation_spec", None)
    keys: list[Key]
    if spec is None or not hasattr(spec, "keys"):
        primed = getattr(environment, "primed_keys", [])
        found = [(key, path_of(key)) for key in root.keys(True, True) if key not in primed]
        keys = [key for key, path in found if path[-1] not in FLAGS and not path[0].startswith("_")]
    else:
        try:
            keys = list(spec.keys(True, True))  # leaves, also nested ones; TensorDict and TorchRL's specs take these
        except TypeError:
            keys = list(spec.keys())
    if not counted:
        return keys
    paths = [(key, path_of(key)) for key in keys]
    in_groups = is_torchrl(environment)  # its StepCounter may add a counter to each group of agents
    return [key for key, path in paths if path[-1] != "step_count" or (len(path) > 1 and not in_groups)]


def action_keys(environment: Any) -> list[Key]:
    keys = getattr(environment, "action_keys", None)
    return [getattr(environment, "action_key", "action")] if keys is None else list(keys)


def done_flags(environment: Any, root: TensorDictBase) -> list[Key]:
    """The keys under ``"next"`` of all done flags: ``done_keys``, or without that, the flags in ``root``, which
    ``reset`` returned, or without any there, ``"done"``."""
    keys = getattr(environment, "done_keys", None)
    return [key for key in FLAGS if key in root.keys()] or ["done"] if keys is None else list(keys)  # noqa: SIM118


def done_keys(flags: Iterable[Key]) -> list[Key]:
    """The done flags that mark a trajectory's end. If flags are at the root, only those count, because the episode goes
    on when one of several agents is done; else the flags of each group of agents count. Of the flags in one place,
    ``"done"`` counts or, without it, all others."""
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key in flags:
        groups.setdefault(path_of(key)[:-1], []).append(key if isinstance(key, str) else path_of(key))
    chosen: list[Key] = []
    for group in [groups[()]] if () in groups else groups.values():
        whole = [key for key in group if path_of(key)[-1] == "done"]
        chosen += whole or group
    return chosen


class EntryKeys(NamedTuple):
    """Keys of an environment's entries under ``"next"`` in each step.

    Attributes:
        done: flags that mark a trajectory's end.
        own: paths that the environment writes, so that a policy cannot: entries of a reset, rewards, done flags.
        repeated: entries that ``compact_obs`` leaves out, because the next step has them at its root, unless a
            trajectory ends: observations, step counters, and the states of TorchRL's environments and of recurrent
            policies.
        truncated: flags that ``set_truncated`` sets.
    """

    done: list[Key]
    own: frozenset[tuple[str, ...]]
    repeated: list[Key]
    truncated: list[Key]


def entry_keys(environment: Any, root: TensorDictBase, arguments: RolloutArguments) -> EntryKeys:
    """The keys of an environment whose reset has returned ``root``. Raises RuntimeError: no flag for set_truncated."""
    rewards = getattr(environment, "reward_keys", None) or [getattr(environment, "reward_key", "reward")]
    flags = done_flags(environment, root)
    ends = {(*path_of(key)[:-1], name) for key in flags for name in FLAGS}
    own = frozenset({*map(path_of, root.keys(True, True)), *map(path_of, rewards), *map(path_of, flags), *ends})
    repeated: list[Key] = []
    if arguments.compact_obs:
        if is_torchrl(environment):
            states = environment.state_spec.keys(True, True)
        else:
            states = getattr(environment, "primed_keys", [])
        repeated = [*observation_keys(environment, root), *states]
        counters = [key for key in root.keys(True, True) if path_of(key)[-1] == "step_count"]
        repeated += [key for key in counters if key not in repeated]
    truncated = [key for key in flags if path_of(key)[-1] == "truncated"] if arguments.set_truncated else []
    if arguments.set_truncated and not truncated:
        raise RuntimeError(
            f"set_truncated=True, but {type(environment).__name__} has no 'truncated' entry: add one (for a TorchRL "
            "environment by env.add_truncated_keys()), or leave set_truncated out"
        )
    return EntryKeys(done_keys(flags), own, repeated, truncated)


def action_spec(environment: Any) -> Any:
    """The spec whose ``rand()`` draws random actions. Raises TypeError: the environment has no action spec."""
    for name in ("full_action_spec", "action_spec"):
        spec = getattr(environment, name, None)
        if spec is not None:
            return spec
    raise TypeError(
        f"{type(environment).__name__} has no action_spec from which to draw random actions: pass a policy, or give "
        "the environment an action_spec with a rand() method"
    )


def rand_action(environment: Any, root: TensorDictBase) -> None:
    """Write random actions into ``root``."""
    if hasattr(environment, "rand_action"):
        out = environment.rand_action(root)
        if out is not None and out is not root:
            root.update(out)
        return
    draw_action(action_spec(environment), action_keys(environment)[0], root)


def draw_action(spec: Any, key: Key, root: TensorDictBase) -> TensorDictBase:
    """Write a spec's random action into ``root``: a tensor under this key, or all entries of a TensorDict."""
    actions = spec.rand()
    return root.update(actions) if isinstance(actions, TensorDictBase) else root.set(key, actions)


def fake_next(environment: Any, root: TensorDictBase) -> TensorDictBase:
    """A step's entries under ``"next"``, with any values. ``root`` is like the result of a reset. Raises TypeError: the
    environment has no specs that tell the entries."""
    if hasattr(environment, "fake_tensordict"):
        after: TensorDictBase = environment.fake_tensordict().get("next")
        return after if is_torchrl(environment) else root.copy().update(after)
    reward: Any = getattr(environment, "reward_spec", None)
    if not hasattr(reward, "zero"):
        raise TypeError(
            f"{type(environment).__name__} has neither fake_tensordict() nor a reward_spec with zero(), so the layout "
            "of its steps is not known before the first rollout: call fake_tensordict() after it"
        )
    [key] = getattr(environment, "reward_keys", ["reward"])
    return root.copy().set(key, reward.zero())


def reset_some(
    environment: Any, root: TensorDictBase, mask: torch.Tensor, kwargs: Mapping[str, Any] | None = None
) -> TensorDictBase:
    """Reset the environments of a mask (bool, in the batch's shape) by ``"_reset"``. Returns the root of the next step,
    in which the entries of all other environments are those of ``root``."""
    given, chosen = root.copy(), root.copy()
    for key in getattr(environment, "reset_keys", ["_reset"]):
        flag = root.get((*path_of(key)[:-1], "done"), None)
        given.set(key, mask.unsqueeze(-1) if flag is None else mask_like(mask, flag).expand_as(flag).clone())
    fresh = reset(environment, given, **(kwargs or {}))
    for key in fresh.keys(True, True):
        new, old = fresh.get(key), root.get(key, None)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and new.shape == old.shape:
            chosen.set(key, torch.where(mask_like(mask, old), new, old))
    return chosen


def set_seed(environment: Any, seed: int, static_seed: bool) -> int:
    """Seed the environment. Returns the seed for the next one. Raises TypeError: it has no ``set_seed``."""
    if not hasattr(environment, "set_seed"):
        raise TypeError(f"{type(environment).__name__} cannot be seeded: it has no set_seed(seed, static_seed=False)")
    if "static_seed" in inspect.signature(environment.set_seed).parameters:
        after = environment.set_seed(seed, static_seed=static_seed)
    else:
        after = environment.set_seed(seed)
    return seed if after is None else int(after)


def close(environment: Any) -> None:
    """Close the environment, unless it has no ``close`` or is closed already."""
    if hasattr(environment, "close") and not getattr(environment, "is_closed", False):
        environment.close()
