"""Gymnasium's environments as a collector takes them: an id, an environment, or a vector environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from asyncsync.collectors.envs.gym_specs import BoxSpec, CategoricalSpec, CompositeSpec, Leaf, Spec, leaves_of
from asyncsync.collectors.envs.gym_vector import Resets, class_of, make_vector, reset, resets_of, step

__all__ = ["GymEnv"]

Array = np.ndarray[Any, Any]
DONE_KEYS = ("done", "terminated", "truncated")
NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.int64, np.bool_))
FLAGS = frozenset((bool, np.bool_))


class GymEnv:
    """A Gymnasium environment, or a vector of them, that takes and returns TensorDicts. Usage::

        env = GymEnv("CartPole-v1", num_envs=64)
        env.set_seed(0)
        td = env.reset()
        for _ in range(100):
            step, td = env.step_and_maybe_reset(env.rand_action(td))
            step["next", "reward"]                                     # float32 [64, 1]

    Keys, shapes, dtypes, and the values that come from a seed are those of TorchRL's GymEnv, which is not needed
    (extra: gym). Entries, behind the batch's dimensions, which are ``[num_envs]`` or none:

    - ``"observation"``, or the keys of a ``Dict`` space (its "state" is called "observation"). ``Box``: its shape and
      dtype, ``[1]`` for a scalar. ``MultiBinary``: as it is. ``Discrete(n)``: one-hot, int64 ``[n]``.
      ``MultiDiscrete``: one-hot, int64, ``[k, n]`` if all have ``n`` choices, else side by side, ``[sum(nvec)]``.
    - ``"action"``, or the keys of a ``Dict`` space: likewise. The greatest entry of a one-hot action is the choice, so
      it may be of any dtype.
    - ``"done"``, ``"terminated"``, ``"truncated"``: bool ``[1]``; in ``"next"``, with ``"reward"``: float32 ``[1]``.

    Every step's result is complete: of a finished environment, ``"next"`` holds the last observation, and the
    TensorDict for the next step the first one of the next trajectory. None is lost, none is doubled.

    Args:
        env: an id (or ``EnvSpec``), an environment, or a vector environment. A vector environment that resets finished
            ones with the *next* step cannot be used, but for Gymnasium's own CartPole: for it, they are reset at once.
        num_envs: makes a vector of so many environments; with an id only. None and 0: a single one, no batch dimension.
        vectorization_mode: with num_envs, that of ``gymnasium.make_vec``: "sync", "async", "vector_entry_point". None:
            the id's own vector environment where it can be used, else "sync". With "sync" and "async", environment
            ``i`` behaves like a single one with the seed ``seed + i``; an id's own vector environment draws otherwise.
        categorical_action_encoding: choices are numbers, of the space's dtype, ``[]`` and ``[k]``, not one-hot; also in
            observations, as in TorchRL.
        device: where results are. None: on the CPU, and TensorDicts have no device.
        **make_kwargs: for ``gymnasium.make`` or ``gymnasium.make_vec``; with an id only.

    Raises:
        ImportError: gymnasium is not installed.
        TypeError: env is none of these.
        ValueError: a space that has no tensor form; a vector environment that cannot be used; arguments that need an
            id.
    """

    def __init__(
        self,
        env: Any,
        *,
        num_envs: int | None = None,
        vectorization_mode: str | None = None,
        categorical_action_encoding: bool = False,
        device: torch.device | str | int | None = None,
        **make_kwargs: Any,
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise ImportError('GymEnv needs gymnasium; install it with: pip install "asyncsync[gym]"') from error
        made = isinstance(env, str | gymnasium.envs.registration.EnvSpec)
        if not made:
            _check_environment(env)
            named = {"num_envs": num_envs, "vectorization_mode": vectorization_mode}
            if given := [*(name for name, value in named.items() if value), *make_kwargs]:
                raise ValueError(f"{', '.join(given)}: only with an id, but an environment was given: {env}")
        elif num_envs:
            env = make_vector(env, num_envs, vectorization_mode, make_kwargs)
        elif vectorization_mode is not None:
            raise ValueError("vectorization_mode: only with num_envs")
        else:
            env = gymnasium.make(env, **{"disable_env_checker": True, **make_kwargs})
        self.env = env
        self.is_closed = False
        self.device = None if device is None else torch.device(device)
        self.batch_size = torch.Size(())
        self._shape: tuple[int, ...] = ()
        self._resets: Resets | None = None
        observation_space, action_space = env.observation_space, env.action_space
        try:
            if isinstance(env.unwrapped, gymnasium.vector.VectorEnv):
                self._resets = resets_of(env)
                self._shape = (env.num_envs,)
                self.batch_size = torch.Size(self._shape)
                observation_space, action_space = env.single_observation_space, env.single_action_space
            self._observations, self._actions = (
                leaves_of(space, name, categorical=categorical_action_encoding, device=None)
                for space, name in ((observation_space, "observation"), (action_space, "action"))
            )
        except ValueError:
            if made:
                env.close()
            raise
        self.action_keys: list[NestedKey] = [leaf.key for leaf in self._actions]
        self.done_keys: list[NestedKey] = list(DONE_KEYS)
        self.reset_keys: list[NestedKey] = ["_reset"]
        self.reward_keys: list[NestedKey] = ["reward"]
        self._action_shapes = [(*self.batch_size, *leaf.spec.shape) for leaf in self._actions]
        self._forms = [
            (leaf.key, (*self.batch_size, *leaf.spec.shape), torch.empty(0, dtype=leaf.spec.dtype).numpy().dtype)
            for leaf in self._observations
        ]

    # -- what the entries look like -----------------------------------------------------------------------------------

    def _composite(self, leaves: Sequence[tuple[NestedKey, Spec]]) -> CompositeSpec:
        device = self.device or torch.device("cpu")
        specs = {key: spec.to(device).batched(self.batch_size) for key, spec in leaves}
        return CompositeSpec(specs, self.batch_size, self.device)

    @property
    def observation_spec(self) -> CompositeSpec:
        """The observation's entries by key."""
        return self._composite([(leaf.key, leaf.spec) for leaf in self._observations])

    @property
    def full_action_spec(self) -> CompositeSpec:
        """The action's entries by key."""
        return self._composite([(leaf.key, leaf.spec) for leaf in self._actions])

    @property
    def action_spec(self) -> Spec | CompositeSpec:
        """The action; if it has several entries, or its space is a ``Dict``, all of them by key."""
        full = self.full_action_spec
        return full if self._actions[0].path else full[self._actions[0].key]

    @property
    def reward_spec(self) -> Spec:
        """float32 ``[*batch_size, 1]``."""
        bound = np.full(1, np.inf, np.float32)
        return self._composite([("reward", BoxSpec(-bound, bound, torch.float32))])["reward"]

    @property
    def done_spec(self) -> CompositeSpec:
        """bool ``[*batch_size, 1]`` each."""
        two = np.full(1, 2)
        return self._composite([(key, CategoricalSpec(two, two * 0, torch.bool)) for key in DONE_KEYS])

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
            tensordict: gets the result, beside what else is in it. A bool entry ``"_reset"``, ``[*batch_size, 1]`` or
                ``[*batch_size]``, tells which environments are reset; it is removed. Without one, all are.
            seed, options: for Gymnasium's ``reset``.

        Returns:
            The first observations, and "done", "terminated", "truncated", which are false.
        """
        mask = None if tensordict is None else tensordict.pop("_reset", None)
        if mask is not None and not bool(mask.all()):
            assert tensordict is not None
            return self._reset_some(tensordict, mask.reshape(self.batch_size)) if bool(mask.any()) else tensordict
        first = self._first(reset(self.env, seed=seed, options=options))
        return first if tensordict is None else tensordict.update(first)

    def _reset_some(self, tensordict: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        assert self._resets is not None  # a single environment is reset or not: both have been dealt with
        first = self._first(self._resets.reset(mask.cpu().numpy()))
        for key in first.keys(True, True):
            new, old = first.get(key), tensordict.get(key)
            tensordict.set(key, torch.where(_beside(mask, new), new, old))
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """One step, after which the environments that have finished begin anew.

        Args:
            tensordict: has the action.

        Returns:
            The same TensorDict with the results in "next"; and the TensorDict for the next step: the first or next
            observations, done flags that are false, and whatever else was in the given one and in its "next".

        Raises:
            KeyError: no action.
            TypeError, ValueError: an action of another shape, or that is no choice; or the environment has returned
                what Gymnasium's do not.
        """
        given = dict(tensordict.items())
        beside = given.pop("next", None)
        action = self._action(tensordict, given)
        try:
            observation, reward, terminated, truncated, info = step(self.env, action)
        except Exception as error:
            self._check_actions(tensordict, error)
            raise
        buffers = _Buffers(self.batch_size, self._forms)
        if not self._are_plain(reward, terminated, truncated):
            named = {"reward": reward, "terminated": terminated, "truncated": truncated}
            reward, terminated, truncated = (self._number(name, value) for name, value in named.items())
        buffers.reward[...] = reward
        buffers.terminated[...] = terminated
        buffers.truncated[...] = truncated
        finished = np.logical_or(buffers.terminated, buffers.truncated, out=buffers.finished)
        self._write(buffers.next_views, observation)  # before a reset, which may write over it
        if np.count_nonzero(finished):  # a tenth of finished.any()'s time
            self._write(buffers.first_views, self._begin(buffers, observation, finished, info))
        else:
            for view, written in zip(buffers.first_views, buffers.next_views, strict=True):
                np.copyto(view, written)
        after, root = buffers.next, given | buffers.first
        if beside is not None:  # what a policy has written for the next step: its hidden state, say
            for key in beside.keys() - after.keys():
                after[key] = value = beside.get(key)
                root[key] = self._zeroed(value, finished)
        for key in buffers.groups & given.keys():  # a policy may have written into the environment's groups of entries
            root[key] = given[key].copy().update(root[key])
        tensordict.set("next", self._container(after))
        return tensordict, self._container(root)

    def _zeroed(self, value: Any, finished: Array) -> Any:
        """A policy's entry for the next step: zeros for new trajectories."""
        if not np.count_nonzero(finished):
            return value
        ended = torch.from_numpy(finished.copy())
        return _each(lambda x: torch.where(_beside(ended, x), torch.zeros_like(x), x), value)

    def _begin(self, buffers: _Buffers, observation: Any, finished: Array, info: dict[str, Any]) -> Any:
        """Begin anew what has finished: the observations for the next step."""
        if self._resets is None:
            return reset(self.env)
        for index, last in self._resets.last(finished, info):
            # "...": a row of a number each is a view, too, not a copy of the number
            self._write([view[index, ...] for view in buffers.next_views], last)
        return self._resets.first(observation, finished)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Set a random action, drawn from torch's generator, in the given TensorDict or a new one."""
        if tensordict is None:
            tensordict = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for key, spec in self.full_action_spec.items():
            tensordict.set(key, spec.rand())
        return tensordict

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Reset with a seed.

        Args:
            seed: None: from the operating system.
            static_seed: the same seed is for the next environment, too.

        Returns:
            The seed for the next environment: drawn from the given one, as TorchRL does, unless static_seed.
        """
        reset(self.env, seed=seed)
        if seed is None or static_seed:
            return seed
        return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % (2**32 - 1)

    def to(self, device: torch.device | str | int) -> Self:
        """Have results on a device; returns itself."""
        self.device = torch.device(device)
        return self

    def close(self) -> None:
        """Close the environment; a second time does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.env.close()

    def __repr__(self) -> str:
        return f"GymEnv({self.env}, batch_size={tuple(self.batch_size)}, device={self.device})"

    # -- between NumPy and tensors ------------------------------------------------------------------------------------

    def _first(self, observation: Any) -> TensorDict:
        """The root of a reset's observations."""
        buffers = _Buffers(self.batch_size, self._forms)
        self._write(buffers.first_views, observation)
        return self._container(buffers.first)

    def _write(self, views: Sequence[Array], observation: Any) -> None:
        for leaf, view in zip(self._observations, views, strict=True):
            try:
                leaf.spec.write(view, _follow(observation, leaf.path))
            except (LookupError, TypeError, ValueError) as error:
                raise self._unfit(leaf, observation, error) from error

    def _unfit(self, leaf: Leaf, observation: Any, error: Exception) -> Exception:
        """The error for an observation, or an entry of it, that is not as its space says."""
        name, told = class_of(self.env), f"{leaf.key!r} does not fit its space: {error}"
        for index, part in enumerate(leaf.path):
            if not isinstance(observation, Mapping):
                where = ".".join(leaf.path[:index]) or "the observation"
                return TypeError(f"{name}: {where} is a {type(observation).__name__}, but its space is a Dict")
            if part not in observation:
                has = list(observation)
                return ValueError(f"{name}: the observation has no {'.'.join(leaf.path[: index + 1])!r}, only {has}")
            observation = observation[part]
        return (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: the observation's entry {told}")

    def _are_plain(self, reward: Any, terminated: Any, truncated: Any) -> bool:
        """Whether they are as most environments return them; others take :meth:`_number`'s time."""
        if not self._shape:
            return type(reward) in NUMBERS and type(terminated) in FLAGS and type(truncated) in FLAGS
        return (
            type(reward) is type(terminated) is type(truncated) is np.ndarray
            and reward.shape == terminated.shape == truncated.shape == self._shape
            and not (reward.dtype.hasobject or terminated.dtype.hasobject or truncated.dtype.hasobject)
        )

    def _number(self, name: str, value: Any) -> Any:
        """One of a step's results that may yet be a number, or as many as there are environments."""
        shape = self._shape
        array = np.asarray(value)
        of = f" of shape {array.shape}" if array.shape else ""
        if array.dtype.kind not in "biuf" and (array.dtype.kind != "O" or None in array.ravel().tolist()):
            what = "None" if value is None else f"a {type(value).__name__}{of} with entries of other types"
            raise TypeError(f"{class_of(self.env)}: step() must return {_wanted(name, shape)}, but it is {what}")
        if array.size != 1 if not shape else array.shape not in ((), shape):
            raise ValueError(f"{class_of(self.env)}: step() must return {_wanted(name, shape)}, but it is an array{of}")
        return array.reshape(()) if not shape else array

    def _container(self, items: dict[str, Any]) -> TensorDict:
        # TensorDict's constructor checks and converts each entry, which takes as long as a step of a small environment;
        # these have the right form by construction.
        made: TensorDict = TensorDict._new_unsafe(source=items, batch_size=self.batch_size)
        return made if self.device is None else made.to(self.device)

    def _action(self, tensordict: TensorDictBase, items: dict[str, Any]) -> Any:
        values = []
        for leaf, shape in zip(self._actions, self._action_shapes, strict=True):
            # From the dictionary where it can be: TensorDict.get takes its time.
            action = items.get(leaf.key) if isinstance(leaf.key, str) else tensordict.get(leaf.key, None)
            if action is None:
                raise KeyError(
                    f"no {leaf.key!r} in the TensorDict: the policy's out_keys have to name {self.action_keys}"
                )
            if action.shape != shape:
                raise ValueError(
                    f"{leaf.key!r} has shape {tuple(action.shape)}, but {self} takes {shape}: {leaf.spec}"
                    " (choices are one-hot unless categorical_action_encoding=True)"
                )
            try:
                value: Any = leaf.spec.read(action.detach().cpu().numpy())
            except ValueError as error:
                raise self._no_choice(leaf, error) from None
            values.append(int(value) if leaf.whole and not self.batch_size else value)
        if not self._actions[0].path:
            return values[0]
        nested: dict[str, Any] = {}
        for leaf, value in zip(self._actions, values, strict=True):
            group = nested
            for name in leaf.path[:-1]:
                group = group.setdefault(name, {})
            group[leaf.path[-1]] = value
        return nested

    def _check_actions(self, tensordict: TensorDictBase, error: Exception) -> None:
        """After a step that raised: raise what its actions may be to blame for."""
        for leaf in self._actions:
            try:
                leaf.spec.check(tensordict.get(leaf.key).detach().cpu().numpy())
            except ValueError as wrong:
                raise self._no_choice(leaf, wrong) from error

    def _no_choice(self, leaf: Leaf, error: ValueError) -> ValueError:
        return ValueError(f"{leaf.key!r} {error}: {leaf.spec} of {class_of(self.env)}")


class _Buffers:
    """The tensors of one step's results, with NumPy views of them: written in place, by that step only.

    What has been handed out is never written again: policies keep observations (stacks of frames, say).
    """

    def __init__(self, batch_size: torch.Size, forms: Sequence[tuple[NestedKey, tuple[int, ...], Any]]) -> None:
        # Made by NumPy: torch.empty(…).numpy() takes five times as long, and would be a tenth of a vector's step.
        column, shape = (*batch_size, 1), tuple(batch_size)

        def observations() -> tuple[dict[Any, Any], list[Array]]:
            views = [np.empty(size, dtype) for _, size, dtype in forms]
            tensors: dict[Any, Any] = {}
            nested: TensorDict | None = None
            for (key, _, _), view in zip(forms, views, strict=True):
                if isinstance(key, str):
                    tensors[key] = torch.from_numpy(view)
                    continue
                nested = TensorDict({}, batch_size=batch_size) if nested is None else nested
                nested.set(key, torch.from_numpy(view))
            return tensors if nested is None else tensors | dict(nested.items()), views

        self.next, self.next_views = observations()
        self.first, self.first_views = observations()
        self.groups = {key for key, value in self.first.items() if isinstance(value, TensorDictBase)}
        reward, *flags = np.empty(column, np.float32), *(np.empty(column, np.bool_) for _ in DONE_KEYS)
        self.next["reward"] = torch.from_numpy(reward)
        for key, flag in zip(DONE_KEYS, flags, strict=True):
            self.next[key] = torch.from_numpy(flag)
            self.first[key] = torch.from_numpy(np.zeros(column, np.bool_))
        self.reward: Array = reward.reshape(shape)
        self.finished, self.terminated, self.truncated = (flag.reshape(shape) for flag in flags)


def _check_environment(env: Any) -> None:
    """Raises TypeError: not an environment."""
    wanted = "GymEnv takes a Gymnasium id, an environment, or a vector environment"
    if isinstance(env, type) or not hasattr(env, "unwrapped"):
        what = f"the class {env.__name__}: call it to make one" if isinstance(env, type) else repr(env)
        raise TypeError(f"{wanted}, not {what}")
    for name in ("observation_space", "action_space"):
        if not hasattr(env, name):
            raise TypeError(f"{type(env).__name__} has no {name}: an environment has to set it, in __init__ say")


def _wanted(name: str, shape: tuple[int, ...]) -> str:
    what = "a number" if name == "reward" else "a bool"
    return f"{what} as {name}" if not shape else f"{what} for each of {shape[0]} environments as {name}"


def _beside(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A mask of the batch's shape, for ``torch.where`` with an entry."""
    return mask.to(value.device).reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))


def _each(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return value.apply(function) if isinstance(value, TensorDictBase) else function(value)


def _follow(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value[name]
    return value
