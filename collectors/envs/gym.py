"""GymEnv: Gymnasium's environments and vector environments, for collectors.

A :class:`Spec` describes the values of a space as tensors: it has the shape, dtype and device of one entry, draws
random values, writes the environment's results into tensors, and converts actions for the environment. Shapes and
dtypes are those of TorchRL's GymEnv. This module imports Gymnasium only in functions that need it, and never TorchRL.
Feature dimensions come last, so a spec works for one environment, for a batch, and for one row of a batch.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from asyncsync.collectors.batch_layout import check_keys
from asyncsync.collectors.envs.gym_vector import Observed, Vector, make_vector, vector_of
from asyncsync.collectors.trajectories import FLAGS, zeroed

Array = np.ndarray[Any, Any]

ENTRIES = (*FLAGS, "reward", "next", "collector", "_reset")
"""Entries of a step that are neither observations nor actions, and the mask of a reset."""


class Spec(ABC):
    """Describes one entry: ``shape`` with the batch's dimensions first, ``dtype``, ``device``. ``hint`` ends the error
    about an action of another shape."""

    hint: ClassVar[str] = ""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device("cpu")

    @abstractmethod
    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """A random value from torch's generator; ``shape`` comes before the spec's own."""

    @abstractmethod
    def write(self, out: Array, value: Any) -> None:
        """Write the environment's result into ``out``, the NumPy view of a tensor or of a row of it. Raises ValueError:
        the result has another shape, or is none of the choices; TypeError: it is no array of numbers, or its dtype does
        not fit."""

    @abstractmethod
    def read(self, action: Array) -> Array:
        """Convert an action, given as a NumPy view, for the environment. Raises ValueError with a message that
        continues a sentence whose subject is the action's key."""

    def zero(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """A value of zeros; ``shape`` comes before the spec's own."""
        return torch.zeros((*shape, *self.shape), dtype=self.dtype, device=self.device)

    def to(self, device: torch.device) -> Self:
        """This spec for another device."""
        moved = copy.copy(self)
        moved.device = device
        return moved

    def batched(self, batch_size: Sequence[int]) -> Self:
        """This spec for a batch, with the batch's dimensions first."""
        batched = copy.copy(self)
        batched.shape = torch.Size((*batch_size, *self.shape))
        return batched

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class BoxSpec(Spec):
    """Numbers from ``low`` to ``high``, both included. The bounds have the shape of one environment's entry."""

    def __init__(self, low: Array, high: Array, dtype: torch.dtype) -> None:
        super().__init__(low.shape or (1,), dtype)  # a scalar has one element, as in TorchRL
        self._scalar = not low.shape
        self.low = torch.as_tensor(low, dtype=dtype).reshape(self.shape)
        self.high = torch.as_tensor(high, dtype=dtype).reshape(self.shape)

    def to(self, device: torch.device) -> Self:
        moved = super().to(device)
        moved.low, moved.high = self.low.to(device), self.high.to(device)
        return moved

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Uniform between two finite bounds, normal without bounds, exponential from a single bound."""
        size, low, high = (*shape, *self.shape), self.low, self.high
        if not self.dtype.is_floating_point:
            span = high.double() - low.double() + 1
            offset = (torch.rand(size, dtype=torch.float64, device=self.device) * span).long()
            return torch.minimum(low.long() + offset, high.long()).to(self.dtype)
        limits = torch.finfo(self.dtype)  # besides infinities, environments use these for "no bound"
        below, above = low <= limits.min, high >= limits.max
        drawn = torch.rand(size, dtype=self.dtype, device=self.device) * (high - low) + low
        if bool((below | above).any()):
            tail = torch.empty_like(drawn).exponential_()
            drawn = torch.where(below, high - tail, torch.where(above, low + tail, drawn))
            drawn = torch.where(below & above, torch.randn_like(drawn), drawn)
        return torch.minimum(torch.maximum(drawn, low), high)

    def write(self, out: Array, value: Any) -> None:
        out = out[..., 0] if self._scalar else out
        if getattr(value, "shape", None) != out.shape:
            value = _array(value, out.shape)
        if type(value) is np.ndarray and value.dtype is out.dtype:  # takes half of copyto's time
            out[...] = value
        else:
            np.copyto(out, value, casting="same_kind")  # refuses objects such as None

    def read(self, action: Array) -> Array:
        return action[..., 0] if self._scalar else action


class CategoricalSpec(Spec):
    """Choices as whole numbers, from 0 to ``nvec - 1``, even if the space starts elsewhere. ``nvec`` has the shape of
    one environment's entry."""

    hint = " (a choice is its number: where the policy gives a score for each, let it return .argmax(-1), or a sample)"

    def __init__(self, nvec: Array, start: Array, dtype: torch.dtype) -> None:
        super().__init__(nvec.shape, dtype)
        self.nvec = nvec
        self._start = start if start.any() else None
        self._end = nvec.astype(np.uint64)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        drawn = torch.rand((*shape, *self.shape), dtype=torch.float64, device=self.device)
        return (drawn * torch.as_tensor(self.nvec, device=self.device)).to(self.dtype)

    def write(self, out: Array, value: Any) -> None:
        value = _array(value, out.shape)
        np.copyto(out, value if self._start is None else value - self._start, casting="same_kind")

    def read(self, action: Array) -> Array:
        if action.dtype.kind not in "biu":
            raise ValueError(
                f"has dtype {action.dtype}, but a choice is an index, of an integer dtype or bool: for scores, take "
                "the argmax or sample (or use one-hot actions: categorical_action_encoding=False)"
            )
        index = action.astype(np.int64, copy=False)
        wrong = index.view(np.uint64) >= self._end  # also negative numbers, which are large when seen as unsigned
        if np.count_nonzero(wrong):
            found, n = index[wrong].flat[0], np.broadcast_to(self.nvec, index.shape)[wrong].flat[0]
            raise ValueError(f"has the index {found}, but the {n} choices are 0 to {n - 1}")
        if self._start is not None:
            return index + self._start
        return index if action.dtype.kind == "b" else action  # Gymnasium's spaces do not contain bool


class OneHotSpec(Spec):
    """One-hot choices. ``nvec`` and ``start`` have the shape of the choices. If all choices have the same number of
    entries, these form a new last dimension, else the choices are concatenated. ``n`` is the last dimension's size."""

    hint = " (choices are one-hot unless categorical_action_encoding=True)"

    def __init__(self, nvec: Array, start: Array) -> None:
        self._counts: list[int] = nvec.ravel().tolist()
        self._are_alike = len(set(self._counts)) == 1
        self.n = self._counts[0] if self._are_alike else sum(self._counts)
        super().__init__((*nvec.shape, self.n) if self._are_alike else (self.n,), torch.int64)
        self._dims = len(self.shape)
        self._start = start if start.any() else None
        self._choices = start.shape
        self._choice_of_entry = np.repeat(np.arange(nvec.size), self._counts)
        firsts = start.ravel()
        self._values = np.concatenate([first + np.arange(n) for first, n in zip(firsts, self._counts, strict=True)])

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        size = (*shape, *self.shape)
        batch = size[: -self._dims]
        chosen = [torch.randint(n, batch, device=self.device) for n in self._counts]
        encoded = [torch.nn.functional.one_hot(each, n) for each, n in zip(chosen, self._counts, strict=True)]
        return torch.cat(encoded, -1).reshape(size)

    def write(self, out: Array, value: Any) -> None:
        batch = out.shape[: -self._dims]
        chosen = _array(value, (*batch, *self._choices)).reshape(*batch, -1)
        out[...] = (chosen[..., self._choice_of_entry] == self._values).reshape(out.shape)
        if np.count_nonzero(out) != chosen.size:
            raise ValueError(f"an observation is none of the choices {self._values.tolist()}: {value!r}")

    def read(self, action: Array) -> Array:
        chosen: Array
        if self._are_alike:
            chosen = action.argmax(-1)
        else:
            ends = np.cumsum(self._counts)[:-1]
            chosen = np.stack([each.argmax(-1) for each in np.split(action, ends, -1)], -1)
        return chosen if self._start is None else chosen + self._start


class NotTorchRLs:
    """Raises a helpful error if TorchRL looks for an attribute that only its own class of this kind has."""

    if not TYPE_CHECKING:  # else type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"asyncsync's {type(self).__name__} has no attribute {name!r}. For TorchRL's collectors, transforms "
                "and vector environments, use torchrl.envs.GymEnv, which has the same keys, shapes and values"
            )


class CompositeSpec(NotTorchRLs, dict[NestedKey, Spec]):
    """Specs by key; nested keys are tuples."""

    def __init__(self, specs: Mapping[NestedKey, Spec], batch_size: torch.Size, device: torch.device | None) -> None:
        super().__init__(specs)
        self.shape = batch_size
        self.device = device

    def rand(self) -> TensorDict:
        """A TensorDict with a random value for each spec."""
        return TensorDict({key: spec.rand() for key, spec in self.items()}, self.shape, device=self.device)

    def zero(self) -> TensorDict:
        """A TensorDict of zeros."""
        return TensorDict({key: spec.zero() for key, spec in self.items()}, self.shape, device=self.device)

    def __repr__(self) -> str:
        return f"CompositeSpec({super().__repr__()})"


class Leaf(NamedTuple):
    """One entry of a space, which may be a ``Dict``. ``key``: its key in a TensorDict; ``path``: its place in the
    environment's dictionaries; ``is_int``: whether a single environment takes a Python int for it."""

    key: NestedKey
    path: tuple[str, ...]
    spec: Spec
    is_int: bool


def leaves_of(space: Any, name: str, *, categorical: bool) -> list[Leaf]:
    """The entries of one environment's space: ``Box``, ``Discrete``, ``MultiDiscrete``, ``MultiBinary``, or a ``Dict``
    of these and of further ``Dict``. With ``categorical``, choices are numbers, else one-hot. Raises ValueError: the
    space is of another kind, a ``Dict`` of actions has no entries, or a ``Dict`` has keys that are not str."""
    from gymnasium import spaces

    def walk(space: Any, path: tuple[str, ...], key: tuple[str, ...]) -> Iterator[Leaf]:
        called = ".".join(path) or name
        if not isinstance(space, spaces.Dict):
            spec = spec_of(space, called, categorical)
            key = key or (name,)
            yield Leaf(key[0] if len(key) == 1 else key, path, spec, isinstance(space, spaces.Discrete))
            return
        if name == "action" and not space.spaces:
            raise ValueError(
                f"{called!r}: a Dict space without entries has no action that a policy could choose: remove it by a "
                "gymnasium.wrappers.TransformAction"
            )
        for part, inner in space.spaces.items():
            if not isinstance(part, str):
                raise ValueError(
                    f"{called!r}: the keys of a Dict space must be str, not {part!r}: rename the key by a "
                    "gymnasium.wrappers.TransformAction or TransformObservation"
                )
            # As in TorchRL: the vector that comes with pixels gets the name that it has without pixels.
            renamed = "observation" if part == "state" and "observation" not in space.spaces else part
            yield from walk(inner, (*path, part), (*key, renamed))

    return list(walk(space, (), ()))


def spec_of(space: Any, name: str, categorical: bool) -> Spec:
    """The spec of a space that is not a ``Dict``; see :func:`leaves_of`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return BoxSpec(space.low, space.high, _torch_dtype(space.dtype, name))
    if isinstance(space, spaces.MultiBinary):
        return BoxSpec(np.zeros(space.shape), np.ones(space.shape), _torch_dtype(space.dtype, name))
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        nvec = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        start = np.broadcast_to(np.asarray(space.start), nvec.shape)
        if nvec.ndim > 1 and nvec.min() != nvec.max():
            raise ValueError(
                f"{name!r}: a MultiDiscrete of {nvec.ndim} dimensions with different numbers of choices has no tensor "
                "form: flatten it by a gymnasium.wrappers.TransformAction or TransformObservation"
            )
        if categorical:
            return CategoricalSpec(nvec, start, _torch_dtype(space.dtype, name))
        return OneHotSpec(nvec, start)
    raise ValueError(
        f"{name!r}: a {type(space).__name__} space has no tensor form: use gymnasium.wrappers.FlattenObservation or "
        "TransformObservation, or torchrl.envs.GymEnv, which supports more kinds of spaces"
    )


def _array(value: Any, shape: tuple[int, ...]) -> Array:
    """The environment's result as an array of exactly this shape. It is not broadcast, which would invent values."""
    array = np.asarray(value)
    if array.shape == shape and not array.dtype.hasobject:
        return array
    if array.dtype.hasobject:
        raise TypeError("it is None" if value is None else f"it is a {type(value).__name__}, not an array of numbers")
    if _without_ones(array.shape) != _without_ones(shape):
        raise ValueError(f"it has shape {array.shape}, not {shape}")
    return array.reshape(shape)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return next((shape[index:] for index, size in enumerate(shape) if size != 1), ())


def _torch_dtype(dtype: Any, name: str) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise ValueError(f"{name!r}: torch has no dtype for NumPy's {dtype}: change the space's dtype") from error


# -- environments ------------------------------------------------------------------------------------------------------


class StepArrays(NamedTuple):
    """Memory for the results of one step: numbers of shape ``[*batch_size]``, and the observations under "next" by key,
    or None if those are not stored."""

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
        self._name = type(env.unwrapped).__name__  # for errors
        self.is_closed = False
        self.device = None if device is None else torch.device(device)
        self.batch_size = torch.Size(())
        self._vector: Vector | None = None  # None: a single environment
        observation_space, action_space = env.observation_space, env.action_space
        try:
            if isinstance(env.unwrapped, gymnasium.vector.VectorEnv):
                self._vector = vector_of(env, reads_info=bool(info_keys))
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
        self._info_keys = tuple(info_keys)
        self._describe()

    def _describe(self) -> None:
        """Set the specs, on the environment's device, and the attributes that depend on them."""

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
        self._nested = [key for key in observations if not isinstance(key, str)]
        self._groups = {key[0] for key in self._nested}
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
            first = self._first(self._reset(seed=seed, options=options))
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
        written = given.pop("next", None)
        last, column = self._observations_memory(), (*self.batch_size, 1)
        numbers: dict[Any, Array] = {"reward": np.empty(column, np.float32)}
        numbers |= {key: np.empty(column, np.bool_) for key in FLAGS}
        into = StepArrays(last=last, **{key: array[..., 0] for key, array in numbers.items()})
        first, finished = self.play(self._given_arrays(given), into)
        after, root = tensors(last | numbers), given | tensors(first) | self.no_flags()
        if written is not None:  # what a policy has written for the next step, such as its hidden state
            for key in written.keys() - after.keys():
                after[key] = value = written.get(key)
                root[key] = value if finished is None else zeroed(value, torch.from_numpy(finished))
        for key in self._groups & given.keys():  # a policy may have written into the environment's groups of entries
            root[key] = given[key].copy()
        tensordict.set("next", self.container(after))
        return tensordict, self.container(root)

    def no_flags(self) -> dict[str, torch.Tensor]:
        """Done flags that are False."""
        return {key: torch.from_numpy(np.zeros((*self.batch_size, 1), np.bool_)) for key in FLAGS}

    def play(self, given: Mapping[NestedKey, Array], into: StepArrays) -> tuple[dict[Any, Array], Array | None]:
        """:meth:`step_and_maybe_reset` with arrays.

        Args:
            given: arrays by key, among them all entries of the action.
            into: gets the results under "next".

        Returns:
            The observations for the next step, in new memory, by key; and which environments have finished: bool
            ``[*batch_size]``, a view of ``into.done``, or None if none has.
        """
        found = (self.env if self._vector is None else self._vector).step(self._action(given))
        observation, reward, terminated, truncated, info = self._checked(5, "step", found)
        rewards, terminations, truncations, done, last = into
        self._write_numbers(rewards, reward, "reward")
        self._write_numbers(terminations, terminated, "terminated")
        self._write_numbers(truncations, truncated, "truncated")
        finished: Array = np.logical_or(terminations, truncations, done)
        seen = self._observations_memory() if last is None else last
        self._write(seen, observation)  # before a reset, which may overwrite it
        if self._infos:
            self._write_infos(seen, info)
        first = dict(seen) if last is None else {key: array.copy() for key, array in last.items()}
        if not np.count_nonzero(finished):  # takes a tenth of finished.any()'s time
            return first, None
        if self._vector is None:
            self._write_observed(first, self._reset())
            return first, finished
        if last is not None:
            self._write_observed(last, self._vector.last_observations(finished, info), finished)
        self._write_observed(first, self._vector.first_observations(finished), finished)
        return first, finished

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write a random action, drawn from torch's generator, into the given TensorDict or a new one."""
        actions = self.full_action_spec.rand()
        return actions if tensordict is None else tensordict.update(actions)

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

    def _reset(self, **kwargs: Any) -> Observed:
        observation, info = self._checked(2, "reset", self.env.reset(**kwargs))
        if self._info_keys and not self._infos:
            self._infos = {name: self._info_spec(name, info) for name in self._info_keys}
            self._describe()
        return [(..., observation)], info

    def _info_spec(self, name: str, info: dict[str, Any]) -> Spec:
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
        value = value[0] if self.batch_size else value
        if value.dtype.kind == "f":
            low, high = -np.inf, np.inf
        else:
            low, high = (0, 1) if value.dtype.kind == "b" else (np.iinfo(value.dtype).min, np.iinfo(value.dtype).max)
        bounds = np.full_like(value, low), np.full_like(value, high)
        return BoxSpec(*bounds, _torch_dtype(value.dtype, name))

    def _first(self, seen: Observed, mask: Array | None = None) -> TensorDict:
        arrays = self._observations_memory()
        self._write_observed(arrays, seen, mask)
        return self.container(tensors(arrays) | self.no_flags())

    def _write_observed(self, arrays: Mapping[Any, Array], seen: Observed, mask: Array | None = None) -> None:
        """Write observations and infos. ``mask``: infos only of these environments."""
        rows, info = seen
        for index, observation in rows:
            self._write({key: array[index] for key, array in arrays.items()}, observation)
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
        """Write the entries of ``info_keys``, zeros for missing ones, for all environments or those of a mask."""
        for name, spec in self._infos.items():
            value, out = info.get(name), np.zeros_like(arrays[name])
            if value is not None:
                try:
                    spec.write(out, value)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{self._name}: info[{name!r}] is not like the first one: {error}") from error
                if (present := info.get(f"_{name}")) is not None:  # of a vector: which environments have the entry
                    out[~np.asarray(present, np.bool_)] = 0
            which: Any = ... if mask is None else mask
            arrays[name][which] = out[which]

    def _checked(self, count: int, method: str, found: Any) -> Sequence[Any]:
        """The return value of an environment's method. Raises TypeError: it does not have ``count`` items."""
        if isinstance(found, tuple | list) and len(found) == count:
            return found
        wanted = {2: "(observation, info)", 5: "(observation, reward, terminated, truncated, info)"}[count]
        raise TypeError(f"{self._name}: {method}() must return {wanted}, not {found!r}")

    def _write_numbers(self, out: Array, value: Any, name: str) -> None:
        """Write a result of one number, or of one number per environment. Refuses None, which would become False, and
        other shapes, which would be broadcast."""
        array = value if type(value) is np.ndarray else np.asarray(value)
        if type(value) is tuple and array.shape == (*out.shape, 1):  # from :class:`InTurn`, of arrays with one number
            array = array[..., 0]
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
        """New memory for observations, because policies may keep them, for example in stacks of frames."""
        # By NumPy, because torch.empty(…).numpy() takes five times as long, a tenth of a vector's step.
        return {key: np.empty(shape, dtype) for key, shape, dtype in self._forms}

    def container(self, items: dict[Any, Any]) -> TensorDict:
        """A TensorDict of entries that have the right shapes."""
        nested = {key: items.pop(key) for key in self._nested if key in items}
        # TensorDict's constructor would check each entry. It takes 12 µs instead of 1, twice in a step of 170.
        made: TensorDict = TensorDict._new_unsafe(source=items, batch_size=self.batch_size)
        for key, value in nested.items():
            made.set(key, value)
        return made if self.device is None else made.to(self.device)

    def _given_arrays(self, items: Mapping[str, Any]) -> dict[NestedKey, Array]:
        """The entries of an action as arrays. Raises KeyError: one is missing; TypeError: NumPy lacks its dtype."""
        found: dict[NestedKey, Array] = {}
        for leaf in self._actions:
            # From the dictionary if possible, because TensorDict.get is slow.
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
        """The action in the environment's own form. Raises ValueError: its shape or value does not fit."""
        nested: dict[str, Any] = {}
        for leaf in self._actions:
            action = given[leaf.key]
            if action.shape != (shape := self.full_action_spec[leaf.key].shape):
                raise ValueError(
                    f"{leaf.key!r} has shape {tuple(action.shape)}, but {self} takes {tuple(shape)}: {leaf.spec}"
                    f"{leaf.spec.hint}"
                )
            try:
                value: Any = leaf.spec.read(action)
            except ValueError as error:
                raise ValueError(f"{leaf.key!r} {error}: {leaf.spec} of {self._name}") from None
            if leaf.is_int and not self.batch_size:
                value = int(value)
            if not leaf.path:
                return value
            group = nested
            for name in leaf.path[:-1]:
                group = group.setdefault(name, {})
            group[leaf.path[-1]] = value
        return nested


def tensors(arrays: Mapping[Any, Array]) -> dict[Any, torch.Tensor]:
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def check_environment(env: Any) -> None:
    """Raises TypeError: this is not a Gymnasium environment."""
    wanted = "GymEnv takes a Gymnasium id, an environment, or a vector environment"
    if isinstance(env, type) or not hasattr(env, "unwrapped"):
        what = f"the class {env.__name__}: call it to make one" if isinstance(env, type) else repr(env)
        raise TypeError(f"{wanted}, not {what}")
    for name in ("observation_space", "action_space"):
        if not hasattr(env, name):
            raise TypeError(f"{type(env).__name__} has no {name}: set it in the environment, such as in its __init__")


def check_info_keys(name: str, keys: Any, observed: Collection[Any]) -> None:
    """Raises TypeError: the keys are not a sequence or mapping of str; ValueError: an observation has one of them."""
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"info_keys must be names of entries of info, such as ('action_mask',), not {keys!r}")
    if taken := [key for key in keys if key in observed]:
        raise ValueError(f"{name}: info_keys has {taken}, but an observation has this key, too: rename one of them")
