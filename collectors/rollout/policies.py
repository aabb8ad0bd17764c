"""Policies: any callable becomes a module that reads and writes a TensorDict.

The rules for wrapping follow TorchRL's "RPCCollector" page (``policy``).
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.wrappers import Primed
from asyncsync.collectors.trajectories import Key


class RandomPolicy(TensorDictModuleBase):  # type: ignore[misc]
    """Chooses random actions.

    Args:
        action_spec: spec whose ``rand()`` returns a tensor, or a TensorDict of tensors. None: the spec of the
            collector's environment.
        action_key: key of the action, if ``rand()`` returns a tensor.
    """

    def __init__(self, action_spec: Any = None, action_key: Key = "action") -> None:
        super().__init__()
        self.action_spec = action_spec
        self.action_key = action_key
        self.in_keys: list[Key] = []
        self.out_keys: list[Key] = [action_key]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write a random action into ``td``.

        Raises:
            RuntimeError: the policy has no ``action_spec`` yet.
        """
        if self.action_spec is None:
            raise RuntimeError(
                "RandomPolicy has no action_spec yet: pass one, or pass the policy and an environment to a collector"
            )
        return environments.draw_action(self.action_spec, self.action_key, td)


class CallablePolicy(nn.Module):
    """A module, without weights, for a callable that is no module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class TensorPolicy(TensorDictModule):  # type: ignore[misc]
    """A ``TensorDictModule`` for a policy of tensors, without the general one's overhead, which takes longer than a
    small policy: at every call, for example, it searches the disk for an optional library.

    Like :class:`PlainModule`, it also works without a TensorDict.
    """

    def __init__(self, policy: nn.Module, in_keys: Sequence[Key], out_keys: Sequence[Key]) -> None:
        super().__init__(policy, in_keys=list(in_keys), out_keys=list(out_keys))
        self._keys: tuple[list[Any], list[Any]] = list(in_keys), list(out_keys)  # the base's are properties, and slower

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.write(tensordict, self.compute(tensordict)[1])

    __call__ = forward  # only the collector has this module, so it has no hooks

    def compute(self, entries: TensorDictBase | Mapping[Any, Any]) -> tuple[list[Any], Any]:
        """The output keys, and what the policy returns for the entries."""
        in_keys, out_keys = self._keys
        policy = self._modules["module"]  # faster than the attribute, which nn.Module searches for
        assert policy is not None
        return out_keys, policy(*[entries.get(key, None) for key in in_keys])

    def write(self, tensordict: TensorDictBase, out: Any) -> TensorDictBase:
        in_keys, out_keys = self._keys
        values = out if isinstance(out, tuple) else (out,)
        if len(values) != len(out_keys):
            raise RuntimeError(
                f"{_name(self.module)} returned {len(values)} values, but the environment takes {len(out_keys)}, "
                f"{out_keys}: wrap it in a TensorDictModule with its own out_keys"
            )
        size = tensordict.batch_size
        for key, value in zip(out_keys, values, strict=True):
            if value is None:
                raise TypeError(
                    f"{_name(self.module)} returned None for {key!r}: a policy that takes {in_keys} must return the "
                    f"action, a tensor for each of {out_keys} (is a return statement missing?)"
                )
            if isinstance(value, torch.Tensor) and value.shape[: len(size)] != size:
                raise ValueError(
                    f"the policy returned {key!r} of shape {tuple(value.shape)}, but its first dimensions must be the "
                    f"environment's batch size, {tuple(size)}"
                )
            tensordict.set(key, value)
        return tensordict


def as_module(policy: Any, env: Any) -> nn.Module:
    """The policy as a module; for None, a RandomPolicy. A RandomPolicy without a spec gets this environment's. Raises
    TypeError: the policy is not callable."""
    if policy is None:
        return RandomPolicy(environments.action_spec(env), environments.action_keys(env)[0])
    if isinstance(policy, RandomPolicy) and policy.action_spec is None:
        policy.action_spec = environments.action_spec(env)
    if isinstance(policy, nn.Module):
        return policy
    if not callable(policy):
        raise TypeError(f"policy must be callable, not {policy!r}")
    return CallablePolicy(policy)


def checked_output(output: Any) -> TensorDictBase:
    """The output of a policy that was called with a TensorDict. Raises TypeError: it is no TensorDict."""
    if not isinstance(output, TensorDictBase):
        raise TypeError(
            f"the policy returned a {type(output).__name__}, not a TensorDict: a policy whose only parameter is a "
            "TensorDict must return it. To return tensors, take the observations as parameters"
        )
    return output


def moved_policy(policy: nn.Module, device: torch.device | None, trust: bool = False) -> nn.Module:
    """The policy on this device: itself if all its tensors are there, else a copy, so that the original does not move.
    Meta tensors get memory there, filled with NaN until weights come (with zeros, if the dtype has no NaN)."""
    if device is None:
        return policy
    tensors = [*policy.parameters(), *policy.buffers()]
    if not tensors and not trust:
        if not isinstance(policy, RandomPolicy):
            warnings.warn(
                f"policy_device={str(device)!r} was given, but {_name(policy)} has no parameters or buffers to move: "
                "make sure that it computes there. trust_policy=True silences this warning",
                stacklevel=4,
            )
        return policy
    if all(tensor.device == device for tensor in tensors):
        return policy
    policy = copy.deepcopy(policy)
    if any(tensor.is_meta for tensor in tensors):
        _materialise(policy, device)
    return policy.to(device)


def _materialise(policy: nn.Module, device: torch.device) -> None:
    """Give memory to meta tensors, which ``to`` refuses. ``to_empty`` would also empty the other tensors."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the old tensors, so that their ids stay unique

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:  # tied weights get the same memory, so they stay tied
            value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
            made[id(tensor)] = tensor, torch.full_like(tensor, value, device=device)  # visible, unlike random memory
        return made[id(tensor)][1]

    policy._apply(filled)  # type: ignore[no-untyped-call]


def as_tensordict_module(policy: nn.Module, observation_keys: Sequence[Key], action_keys: Sequence[Key]) -> Any:
    """The policy as a module that takes and returns a TensorDict. Raises TypeError: the parameters of the policy's
    ``forward`` match the observations neither by name nor by number."""
    if isinstance(policy, TensorDictModuleBase):
        return policy
    function = policy.function if isinstance(policy, CallablePolicy) else policy.forward
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError):  # annotations that cannot be resolved
        signature = inspect.signature(function)
    except ValueError:  # a builtin does not show its parameters, so pass all observations
        return TensorPolicy(policy, observation_keys, action_keys)
    parameters = list(signature.parameters.values())
    if len(parameters) == 1 and (
        parameters[0].name in ("tensordict", "td") or _is_tensordict(parameters[0].annotation)
    ):
        return policy
    in_keys = _matching_keys(parameters, list(observation_keys))
    if in_keys is None:
        raise TypeError(
            f"{_name(policy)} takes {signature}, which does not fit the observations {list(observation_keys)}: name "
            "its parameters like the observations, take as many parameters or one named 'tensordict', wrap it in a "
            "TensorDictModule, or pass trust_policy=True"
        )
    return TensorPolicy(policy, in_keys, action_keys)


IS_INIT_HINT = (
    "a recurrent policy needs 'is_init', which marks a trajectory's first step, but the environment has none: pass "
    "auto_register_policy_transforms=True"
)


def primed(env: Any, policy: Any) -> Any:
    """The environment with entries that recurrent parts of the policy need and it lacks: "is_init", which marks a
    trajectory's first step, and the first state. A TorchRL environment gets transforms; others are wrapped."""
    if not isinstance(policy, nn.Module):
        return env if environments.is_torchrl(env) else Primed(env, [])
    if not environments.is_torchrl(env):
        size = environments.batch_size_of(env)
        parts: list[Any] = [part for part in policy.modules() if hasattr(part, "make_tensordict_primer")]
        primers = [part.make_tensordict_primer() for part in parts]
        for primer in primers:
            primer.primers = primer.primers.expand(*size, *primer.primers.shape)
        return Primed(env, primers)
    from torchrl.envs import Compose, InitTracker, TensorDictPrimer
    from torchrl.modules.utils import get_env_transforms_from_module

    needed = get_env_transforms_from_module(policy)
    if needed is None:
        return env
    there = set(env.observation_spec.keys(True, True)) | set(env.state_spec.keys(True, True))
    for transform in list(needed) if isinstance(needed, Compose) else [needed]:
        if isinstance(transform, InitTracker):
            keys = {transform.init_key}
        elif isinstance(transform, TensorDictPrimer):
            keys = set(transform.primers.keys(True, True))
        else:
            keys = set()
        if not keys or not keys <= there:
            env = env.append_transform(transform.clone())
    return env


def _is_tensordict(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.rsplit(".", 1)[-1] in ("TensorDict", "TensorDictBase")
    return isinstance(annotation, type) and issubclass(annotation, TensorDictBase)


def _matching_keys(parameters: list[inspect.Parameter], keys: list[Key]) -> list[Key] | None:
    """The keys in the order of the parameters; None: they do not fit."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [each for each in parameters if each.kind not in variadic]
    required = [each.name for each in named if each.default is inspect.Parameter.empty]
    lasts = [key[-1] for key in keys if not isinstance(key, str)]
    names: dict[str, Key] = {key[-1]: key for key in keys if lasts.count(key[-1]) == 1 and not isinstance(key, str)}
    names |= {key: key for key in keys if isinstance(key, str)}
    if required and set(required) <= set(names):
        chosen: list[Key] = []
        for each in named:
            if each.name not in names:
                break
            chosen.append(names[each.name])
        return chosen
    if len(required) <= len(keys) <= len(named) or any(each.kind is variadic[0] for each in parameters):
        return keys
    return None


def _name(policy: nn.Module) -> str:
    if isinstance(policy, CallablePolicy):
        return getattr(policy.function, "__qualname__", type(policy.function).__name__)
    return type(policy).__name__


# -- tensordict's own modules ------------------------------------------------------------------------------------------

# At each call, these modules spend time on features that a collector's policy seldom uses: they look for keyword
# arguments and, for each result, on the disk for an optional library. With the classes below, a step of a CartPole
# takes 85 µs instead of 271 with a TensorDictModule, 145 instead of 326 with a TensorDictSequential of two, 351 instead
# of 469 with a ProbabilisticActor; with TorchRL's environment, 268, 274 and 515 instead of 358, 445 and 616.
#
# Each call checks whether the module uses such a feature (hooks, selected keys, another method, a class of its own,
# ``set_skip_existing``). If it does, the call is the module's own. ``trust_policy=True`` switches these classes off.


def plainly_called(module: Any) -> Any:
    """A faster callable for this module; the module itself, if its class or one of its methods is not tensordict's."""
    for kind, call, methods in (
        (TensorDictModule, PlainModule, ("_call_module", "_write_to_tensordict")),
        (ProbabilisticTensorDictSequential, PlainProbabilistic, ("get_dist_params", "det_part", "_last_module")),
        (TensorDictSequential, PlainSequence, ("_run_module", "_module_iter")),
    ):
        used = ("__call__", "_call_impl", "forward", *methods)
        if isinstance(module, kind) and all(getattr(type(module), name) is getattr(kind, name) for name in used):
            return call(module)
    return module


class PlainModule:
    """Calls a ``TensorDictModule`` with a TensorDict or, like a :class:`TensorPolicy`, without one."""

    def __init__(self, given: TensorDictModule) -> None:
        self.given = given
        self._returns_tensors = True  # False once it has returned something else

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        found = self.compute(tensordict)
        return self.given(tensordict) if found is None else self.write(tensordict, found[1])

    def compute(self, entries: TensorDictBase | Mapping[Any, Any]) -> tuple[list[Any], Any] | None:
        """The output keys, and what the module returns for the entries. None: a call would do more than that."""
        given, out_keys = self.given, self.given.out_keys
        if (
            not (self._returns_tensors and _is_plain(given))
            or given._kwargs is not None
            or given.method is not None
            or given.inplace is not True
            or given.method_kwargs
            or given._get_kwargs
            or "_" in out_keys
        ):
            return None
        values = []
        for key in given.in_keys:
            value = entries.get(key, None)
            if type(value) is not torch.Tensor:
                return None
            values.append(value)
        return out_keys, given.module(*values)

    def write(self, tensordict: TensorDictBase, out: Any) -> TensorDictBase:
        given = self.given
        found, out_keys = out if type(out) is tuple else (out,), given.out_keys
        if len(found) == len(out_keys) and all(type(value) is torch.Tensor for value in found):
            for key, value in zip(out_keys, found, strict=True):
                tensordict.set(key, value)
            return tensordict
        self._returns_tensors = False
        return TensorDictModule(lambda *_: out, given.in_keys, out_keys)(tensordict)


class PlainSequence:
    """Calls a ``TensorDictSequential``."""

    def __init__(self, given: TensorDictSequential) -> None:
        self._given = given
        self._parts: list[nn.Module] = []
        self._calls: list[Callable[[TensorDictBase], TensorDictBase]] = []

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        given = self._given
        if not (_is_plain(given) and _returns_all(given)):
            return given(tensordict)
        if (parts := list(given._module_iter())) != self._parts:
            self._parts, self._calls = parts, [plainly_called(part) for part in parts]
        for call in self._calls:
            tensordict = call(tensordict)
        return tensordict


class PlainProbabilistic:
    """Calls a ``ProbabilisticTensorDictSequential``."""

    def __init__(self, given: ProbabilisticTensorDictSequential) -> None:
        self._given = given
        self._parameters = plainly_called(given.det_part)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        given = self._given
        is_usual = _returns_all(given) and not given.return_composite and interaction_type() is not None
        if not (is_usual and _is_plain(given)):
            return given(tensordict)
        return given._last_module(self._parameters(tensordict), _requires_sample=given._requires_sample)


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module only runs the ``forward`` of its class."""
    is_own = module._compiled_call_impl is None and "forward" not in vars(module) and not skip_existing()
    return is_own and not (module._forward_hooks or module._forward_pre_hooks)


def _returns_all(module: TensorDictSequential) -> bool:
    """Whether the module returns the TensorDict that its parts wrote to."""
    return module.inplace is None and not (module._select_before_return or module.partial_tolerant)
