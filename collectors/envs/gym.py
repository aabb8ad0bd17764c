"""Gymnasium's environments as a collector takes them: an id, an environment, or a vector environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from asyncsync.collectors.batch_layout import check_keys
from asyncsync.collectors.envs.gym_specs import (
    BoxSpec,
    CompositeSpec,
    Leaf,
    NotTorchRLs,
    Spec,
    free_spec,
    leaves_of,
    spec_of,
)
from asyncsync.collectors.envs.gym_vector import (
    First,
    Vector,
    check_environment,
    check_info_keys,
    make_vector,
    vector_of,
)
from asyncsync.collectors.trajectories import FLAGS, zeroed

Array = np.ndarray[Any, Any]

ENTRIES = (*FLAGS, "reward", "next", "collector", "_reset")
"""What a step has beside observations and actions, and what a reset is asked for with."""


class StepArrays(NamedTuple):
    """Where the results of one step go: numbers of shape ``[*batch_size]``, and the last observations, by key; None:
    nobody keeps these."""

    reward: Array
    terminated: Array
    truncated: Array
    done: Array
    last: Mapping[Any, Array] | None


class GymEnv(NotTorchRLs):
    """A Gymnasium environment, or a vector of them, that takes and returns TensorDicts. Usage::

        env = GymEnv("CartPole-v1", num_envs=64)
        env.set_seed(0)
        td = env.reset()
        for _ in range(100):
            step, td = env.step_and_maybe_reset(env.rand_action(td))
            step["next", "reward"]                                     # float32 [64, 1]

    Keys, shapes, dtypes and results for a seed are those of TorchRL's GymEnv, which need not be installed (extra: gym).
    Random actions differ. Raises an error for values outside an environment's own spaces;
    ``gymnasium.utils.env_checker`` explains them. Entries, after the batch dimensions (``[num_envs]`` or none):

    - ``"observation"``, or the keys of a ``Dict`` space (its "state" is called "observation"). ``Box``: its shape and
      dtype, ``[1]`` for a scalar. ``MultiBinary``: unchanged. ``Discrete(n)``: one-hot, int64 ``[n]``.
      ``MultiDiscrete``: one-hot, int64, ``[k, n]`` if all have ``n`` choices, else concatenated, ``[sum(nvec)]``.
    - ``"action"``, or the keys of a ``Dict`` space: likewise. A one-hot action chooses its greatest entry, and may have
      any dtype of NumPy's.
    - ``"done"``, ``"terminated"``, ``"truncated"``: bool ``[1]``; in ``"next"``, with ``"reward"``: float32 ``[1]``.

    Every observation is kept once: when an environment has finished, ``"next"`` holds its last observation, and the
    TensorDict for the next step holds the first one of its next trajectory.

    ``observation_spec``, ``full_action_spec``, ``reward_spec`` and ``done_spec`` describe the entries. ``action_spec``
    describes the action: its only entry or, if it has several or its space is a ``Dict``, all of them by key.

    Args:
        env: an id (or ``EnvSpec``), an environment, or a vector environment. A vector environment that resets finished
            environments in the *next* step is refused, except Gymnasium's CartPole, which GymEnv resets at once.
        num_envs: number of environments in a vector; only with an id. None or 0: one environment, no batch dimension.
        vectorization_mode: with num_envs, that of ``gymnasium.make_vec``: "sync", "async", "vector_entry_point". None:
            the id's own vector environment if GymEnv can use it, else "sync". With "sync" and "async", environment
            ``i`` behaves like a single one with the seed ``seed + i``; an id's own vector environment does not.
        categorical_action_encoding: True: choices are numbers, of the space's dtype, ``[]`` and ``[k]``, not one-hot;
            also in observations, as in TorchRL.
        info_keys: names of entries of Gymnasium's ``info`` that become observations, such as an action mask: numbers or
            arrays. The first reset's info shows their shapes and dtypes (a number becomes ``[1]``); or pass
            ``{name: space}``. Where a later info lacks one, it is zero. When an environment has finished, ``"next"``
            holds the last step's, and the TensorDict for the next step holds the reset's.
        device: device of the results. None: the CPU, and TensorDicts have no device.
        **make_kwargs: arguments for ``gymnasium.make`` or ``gymnasium.make_vec``; only with an id.

    Raises:
        ImportError: gymnasium is not installed.
        TypeError: env is none of these.
        ValueError: a space has no tensor form; an observation's or action's key is one that a step uses otherwise (such
            as "reward" or "next"), or both have it; GymEnv cannot use the vector environment; or an argument needs an
            id.
    """

    def __init__(
        self,
        env: Any,
        *,
        num_envs: int | None = None,
        vectorization_mode: str | None = None,
        categorical_action_encoding: bool = False,
        info_keys: Sequence[str] | Mapping[str, Any] = (),
        device: torch.device | str | int | None = None,
        **make_kwargs: Any,
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise ImportError('GymEnv needs gymnasium; install it with: pip install "asyncsync[gym]"') from error
        made = isinstance(env, str | gymnasium.envs.registration.EnvSpec)
        if not made:
            check_environment(env)
            named = {"num_envs": num_envs, "vectorization_mode": vectorization_mode}
            if given := [*(name for name, value in named.items() if value), *make_kwargs]:
                raise ValueError(f"{', '.join(given)} can only be given with an id, but env is an environment: {env}")
        elif num_envs:
            env = make_vector(env, num_envs, vectorization_mode, make_kwargs)
        elif vectorization_mode is not None:
            raise ValueError("vectorization_mode needs num_envs: pass it too, or leave vectorization_mode out")
        else:
            env = gymnasium.make(env, **{"disable_env_checker": True, **make_kwargs})
        self.env = env
        self.is_closed = False
        self.device = None if device is None else torch.device(device)
        self.batch_size = torch.Size(())
        self._vector: Vector | None = None  # None: a single environment, which is reset or not
        self._stepper = env
        observation_space, action_space = env.observation_space, env.action_space
        try:
            if isinstance(env.unwrapped, gymnasium.vector.VectorEnv):
                self._vector = vector_of(env, reads_info=bool(info_keys))
                self._stepper = self._vector.stepper
                self.batch_size = torch.Size((env.num_envs,))
                observation_space, action_space = env.single_observation_space, env.single_action_space
            self._observations, self._actions = (
                leaves_of(space, name, categorical=categorical_action_encoding)
                for space, name in ((observation_space, "observation"), (action_space, "action"))
            )
            observed = [leaf.key for leaf in self._observations]
            check_info_keys(self._name, info_keys, observed)
            check_keys(self._name, [*observed, *info_keys], [leaf.key for leaf in self._actions], ENTRIES)
            spaces = info_keys if isinstance(info_keys, Mapping) else {}
            self._infos = {name: spec_of(space, name, categorical=True) for name, space in spaces.items()}
        except (TypeError, ValueError):
            if made:
                env.close()
            raise
        self.action_keys: list[NestedKey] = [leaf.key for leaf in self._actions]
        self.done_keys: list[NestedKey] = list(FLAGS)
        self.reset_keys: list[NestedKey] = ["_reset"]
        self.reward_keys: list[NestedKey] = ["reward"]
        self._unknown_infos = () if self._infos else tuple(info_keys)
        self._action_shapes = {leaf.key: torch.Size((*self.batch_size, *leaf.spec.shape)) for leaf in self._actions}
        self._describe()

    def _describe(self) -> None:
        """Set the specs, which are on the environment's device, and what follows from them."""

        def composite(specs: dict[Any, Spec]) -> CompositeSpec:
            device = self.device or torch.device("cpu")
            batched = {key: spec.to(device).batched(self.batch_size) for key, spec in specs.items()}
            return CompositeSpec(batched, self.batch_size, self.device)

        self.observation_spec = composite({leaf.key: leaf.spec for leaf in self._observations} | self._infos)
        self.full_action_spec = full = composite({leaf.key: leaf.spec for leaf in self._actions})
        self.action_spec: Spec | CompositeSpec = full if self._actions[0].path else full[self._actions[0].key]
        bound = np.full(1, np.inf, np.float32)
        self.reward_spec = composite({"reward": BoxSpec(-bound, bound, torch.float32)})["reward"]
        self.done_spec = composite({key: BoxSpec(np.zeros(1), np.ones(1), torch.bool) for key in FLAGS})
        observations: dict[Any, Spec] = self.observation_spec
        self._groups = {key[0] for key in observations if not isinstance(key, str)}
        self._forms = [
            (key, spec.shape, torch.empty(0, dtype=spec.dtype).numpy().dtype) for key, spec in observations.items()
        ]
        self.is_flat = not self._groups and all(isinstance(key, str) for key in self.action_keys)
        self.root_forms = {key: (spec.shape, spec.dtype) for key, spec in (observations | self.done_spec).items()}

    # -- running ------------------------------------------------------------------------------------------------------

    def reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> TensorDictBase:
        """Begin new trajectories.

        Args:
            tensordict: gets the result, beside its other entries. A bool entry ``"_reset"`` (``[*batch_size, 1]`` or
                ``[*batch_size]``) chooses the environments to reset, and is removed. Without it, all are reset.
            seed, options: arguments for Gymnasium's ``reset``.

        Returns:
            The first observations, and "done", "terminated", "truncated", all False.
        """
        mask = None if tensordict is None else tensordict.pop("_reset", None)
        if tensordict is None or mask is None or bool(mask.all()):
            first = self._reset(seed=seed, options=options)
            return first if tensordict is None else tensordict.update(first)
        if bool(mask.any()):
            assert self._vector is not None
            if seed is not None or options is not None:
                raise ValueError("seed and options need a reset of all environments of a vector, not of some")
            mask = mask.reshape(self.batch_size)
            which = mask.cpu().numpy()
            first = self._first(self._vector.reset(which), which)
            tensordict.update(first.where(mask, tensordict.select(*first.keys(True, True))))
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Do one step, then reset the environments that have finished.

        Args:
            tensordict: contains the action.

        Returns:
            The same TensorDict with the results in "next", and the TensorDict for the next step: the first or next
            observations, done flags that are False, and all other entries of ``tensordict`` and of its "next".

        Raises:
            KeyError: the action is missing.
            TypeError, ValueError: the action has another shape, a dtype that NumPy does not have, or is no choice; or
                the environment returned something that Gymnasium does not allow.
        """
        given = dict(tensordict.items())
        beside = given.pop("next", None)
        last, column = self._observations_memory(), (*self.batch_size, 1)
        numbers: dict[Any, Array] = {"reward": np.empty(column, np.float32)}
        numbers |= {key: np.empty(column, np.bool_) for key in FLAGS}
        into = StepArrays(last=last, **{key: array[..., 0] for key, array in numbers.items()})
        first, finished = self.play(self._given_arrays(given), into)
        after, root = self._tensors(last | numbers), given | self._tensors(first) | self.no_flags()
        if beside is not None:  # what a policy has written for the next step: its hidden state, say
            for key in beside.keys() - after.keys():
                after[key] = value = beside.get(key)
                root[key] = value if finished is None else zeroed(value, torch.from_numpy(finished))
        for key in self._groups & given.keys():  # a policy may have written into the environment's groups of entries
            root[key] = given[key].copy().update(root[key])
        tensordict.set("next", self.container(after))
        return tensordict, self.container(root)

    def no_flags(self) -> dict[str, torch.Tensor]:
        """Done flags, which are false."""
        return {key: torch.from_numpy(np.zeros((*self.batch_size, 1), np.bool_)) for key in FLAGS}

    def play(self, given: Mapping[NestedKey, Array], into: StepArrays) -> tuple[dict[Any, Array], Array | None]:
        """:meth:`step_and_maybe_reset`, as arrays.

        Args:
            given: entries, all those of the action among them.
            into: gets what is under "next".

        Returns:
            The observations for the next step, in new memory, by key; and which environments have finished: bool
            ``[*batch_size]``, a view of ``into.done``, or None: none of them.
        """
        found = self._stepper.step(self._action(given))
        observation, reward, terminated, truncated, info = self._found(5, "step", found)
        rewards, terminations, truncations, done, last = into
        self._write_numbers(rewards, reward, "reward")
        self._write_numbers(terminations, terminated, "terminated")
        self._write_numbers(truncations, truncated, "truncated")
        finished: Array = np.logical_or(terminations, truncations, done)
        seen = self._observations_memory() if last is None else last
        self._write(seen, observation)  # before a reset, which may write over it
        if self._infos:
            self._write_infos(seen, info)
        first = dict(seen) if last is None else {key: array.copy() for key, array in last.items()}
        if not np.count_nonzero(finished):  # a tenth of finished.any()'s time
            return first, None
        if self._vector is None:
            self._begin(first, [(None, *self._found(2, "reset", self.env.reset()))])
            return first, finished
        if last is not None:
            self._begin(last, self._vector.last(finished, info))
            if "final_info" in info:
                self._write_infos(last, info["final_info"], finished)
        self._begin(first, self._vector.first(finished), finished)
        return first, finished

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write a random action, drawn from torch's generator, into the given TensorDict or a new one."""
        if tensordict is None:
            tensordict = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for key, spec in self.full_action_spec.items():
            tensordict.set(key, spec.rand())
        return tensordict

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Reset with a seed.

        Args:
            seed: seed of the environment. None: from the operating system.
            static_seed: True: return the same seed.

        Returns:
            The seed for a further environment: drawn from the given one, as TorchRL does, unless static_seed.
        """
        self._reset(seed=seed)
        if seed is None or static_seed:
            return seed
        return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % (2**32 - 1)

    def to(self, device: torch.device | str | int) -> Self:
        """Put results on this device from now on. Returns itself."""
        self.device = torch.device(device)
        self._describe()
        return self

    def close(self) -> None:
        """Close the environment. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self.env.close()

    def __repr__(self) -> str:
        return f"GymEnv({self.env}, batch_size={tuple(self.batch_size)}, device={self.device})"

    # -- between NumPy and tensors ------------------------------------------------------------------------------------

    def _reset(self, **kwargs: Any) -> TensorDict:
        observation, info = self._found(2, "reset", self.env.reset(**kwargs))
        if self._unknown_infos:
            self._infos = {name: self._info_spec(name, info) for name in self._unknown_infos}
            self._unknown_infos = ()
            self._describe()
        return self._first([(None, observation, info)])

    def _info_spec(self, name: str, info: dict[str, Any]) -> Spec:
        """What the first reset's info shows of an entry."""
        if name not in info:
            raise KeyError(
                f"{self._name}: the info of the first reset has no {name!r} (it has {sorted(map(str, info))}): pass "
                f"its space, info_keys={{{name!r}: gymnasium.spaces.Box(…)}}"
            )
        value = np.asarray(info[name])
        if value.dtype.kind not in "biuf" or value.shape[: len(self.batch_size)] != self.batch_size:
            raise ValueError(
                f"{self._name}: info_keys need numbers or arrays of one shape, but {name!r} is {info[name]!r}"
            )
        return free_spec(value[0] if self.batch_size else value, name)

    def _first(self, begun: First, mask: Array | None = None) -> TensorDict:
        arrays = self._observations_memory()
        self._begin(arrays, begun, mask)
        return self.container(self._tensors(arrays) | self.no_flags())

    def _begin(self, arrays: Mapping[Any, Array], begun: First, mask: Array | None = None) -> None:
        """Write observations and infos of some environments, which are those of the mask; without it, of all."""
        for where, observation, info in begun:
            if where is None:
                self._write(arrays, observation)
            else:  # "...": a number, too, is a view, or a copy where there are several
                rows = {key: array[where, ...] for key, array in arrays.items()}
                self._write(rows, observation)
                for key, array in arrays.items():
                    array[where] = rows[key]
            if info is not None:
                self._write_infos(arrays, info, mask)

    def _write(self, arrays: Mapping[Any, Array], observation: Any) -> None:
        for leaf in self._observations:
            value = observation
            try:
                for name in leaf.path:
                    value = value[name]
                leaf.spec.write(arrays[leaf.key], value)
            except (LookupError, TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(
                    f"{self._name}: the observation's entry {leaf.key!r} does not fit its space: {error}"
                ) from error

    def _write_infos(self, arrays: Mapping[Any, Array], info: Mapping[str, Any], mask: Array | None = None) -> None:
        """Write what ``info_keys`` names, zeros where it is missing. ``mask``: only for these environments of a
        vector."""
        for name, spec in self._infos.items():
            value, out = info.get(name), np.zeros_like(arrays[name])
            if value is not None:
                try:
                    spec.write(out, value)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{self._name}: info[{name!r}] has not the form of the first: {error}") from error
                if (there := info.get(f"_{name}")) is not None:  # of a vector: which environments have it
                    out[~np.asarray(there, np.bool_)] = 0
            if mask is None or not mask.shape:
                arrays[name][...] = out
            else:
                arrays[name][mask] = out[mask]

    def _found(self, count: int, method: str, found: Any) -> Sequence[Any]:
        """What the environment's method has returned. Raises TypeError: not so many things."""
        if isinstance(found, tuple | list) and len(found) == count:
            return found
        wanted = {2: "(observation, info)", 5: "(observation, reward, terminated, truncated, info)"}[count]
        raise TypeError(f"{self._name}: {method}() must return {wanted}, not {found!r}")

    @property
    def _name(self) -> str:
        """What to call the environment in an error."""
        return type(self.env.unwrapped).__name__

    def _write_numbers(self, out: Array, value: Any, name: str) -> None:
        """Write a result that is one number, or one for each environment. Not None, which would pass for False, nor
        another shape, which would be broadcast."""
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.dtype.kind not in "biuf" or array.shape != out.shape:
            count = f"{out.size} numbers" if out.shape else "one number"
            wanted = f"{self._name}: step() must return {count} as {name}"
            if array.dtype.kind not in "biufO" or None in array.ravel().tolist():
                raise TypeError(f"{wanted}, not {value!r}")
            if array.size != 1 if not out.shape else array.shape not in ((), out.shape):
                raise ValueError(f"{wanted}, not an array of shape {array.shape}")
            array = array if out.shape else array.reshape(())
        out[...] = array

    def _observations_memory(self) -> dict[Any, Array]:
        """New memory for observations: policies keep them, in stacks of frames, say."""
        # NumPy's: torch.empty(…).numpy() takes five times as long, and would be a tenth of a vector's step.
        return {key: np.empty(shape, dtype) for key, shape, dtype in self._forms}

    def _tensors(self, arrays: Mapping[Any, Array]) -> dict[Any, Any]:
        tensors: dict[Any, Any] = {}
        for key, array in arrays.items():
            if isinstance(key, str):
                tensors[key] = torch.from_numpy(array)
            else:
                group = tensors.setdefault(key[0], TensorDict({}, batch_size=self.batch_size))
                group.set(key[1:], torch.from_numpy(array))
        return tensors

    def container(self, items: dict[str, Any]) -> TensorDict:
        """A TensorDict of entries of the right form."""
        # TensorDict's constructor checks each entry. That takes 12 µs instead of one, twice in a step of 170.
        made: TensorDict = TensorDict._new_unsafe(source=items, batch_size=self.batch_size)
        return made if self.device is None else made.to(self.device)

    def _given_arrays(self, items: Mapping[str, Any]) -> dict[NestedKey, Array]:
        """The entries of an action. Raises KeyError: one is missing."""
        found: dict[NestedKey, Array] = {}
        for leaf in self._actions:
            # From the dictionary where it can be: TensorDict.get takes its time.
            name, *inner = (leaf.key,) if isinstance(leaf.key, str) else leaf.key
            action = items.get(name)
            if inner and action is not None:
                action = action.get(tuple(inner), None)
            if action is None:
                raise KeyError(
                    f"the TensorDict has no {leaf.key!r}: the policy's out_keys must name {self.action_keys}"
                )
            try:
                found[leaf.key] = action.numpy(force=True)
            except TypeError as error:
                raise TypeError(
                    f"the action {leaf.key!r} is {action.dtype}, which NumPy and so {self._name} do not have: let the "
                    "policy return another dtype, such as by .float()"
                ) from error
        return found

    def _action(self, given: Mapping[NestedKey, Array]) -> Any:
        first = self._actions[0]
        if not first.path:
            return self._choice(first, given[first.key])
        values = [self._choice(leaf, given[leaf.key]) for leaf in self._actions]
        nested: dict[str, Any] = {}
        for leaf, value in zip(self._actions, values, strict=True):
            group = nested
            for name in leaf.path[:-1]:
                group = group.setdefault(name, {})
            group[leaf.path[-1]] = value
        return nested

    def _choice(self, leaf: Leaf, action: Array) -> Any:
        """One entry of an action, as the environment takes it."""
        if action.shape != (shape := self._action_shapes[leaf.key]):
            raise ValueError(
                f"{leaf.key!r} has shape {tuple(action.shape)}, but {self} takes {tuple(shape)}: {leaf.spec}"
                f"{leaf.spec.hint}"
            )
        try:
            value = leaf.spec.read(action)
        except ValueError as error:
            raise ValueError(f"{leaf.key!r} {error}: {leaf.spec} of {self._name}") from None
        return int(value) if leaf.whole and not self.batch_size else value
