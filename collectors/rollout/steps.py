"""One step of a collector: the policy acts, the environment steps, and the step is stored.

A collector's constructor chooses one of two classes:

- :class:`TensorDictSteps`: for any policy, environment, device and option.
- :class:`ArraySteps`: for a :class:`GymEnv` on the CPU, which writes into the batch's memory itself.

Each step moves a :class:`Carrier` from one state to the next. It follows TorchRL's "Collector Internals" page
(Per-timestep flow)::

    carrier ──(cast, _sync_policy)──▶ policy ──▶ carrier.update ──(cast, _sync_env)──▶ environment.step_and_maybe_reset
    carrier.set("next") ──▶ copied into the batch (_sync_storage), or a clone added to the replay buffer
    carrier = the state after a possible reset, with fresh trajectory ids where one has ended

The environment never sees the carrier's ``"collector"`` entry, which is removed before a step and added after it.

A :class:`RolloutBuffer` makes a batch from the steps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.bus.link import is_fast_path_on
from asyncsync.collectors.arguments import RolloutArguments, exact_device
from asyncsync.collectors.batch_layout import BatchLayout, Path, empty_batch, layout_of
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.environment import EntryKeys
from asyncsync.collectors.envs.gym import GymEnv, StepArrays, tensors
from asyncsync.collectors.rollout.policies import PlainModule, TensorPolicy, checked_output
from asyncsync.collectors.trajectories import Key, _aggregate_end_of_traj, _TrajectoryPool, path_of, zeroed
from asyncsync.collectors.weights.updates import ActingWeights

Array = np.ndarray[Any, Any]
_type_shape_dtype = attrgetter("__class__", "shape", "dtype")

UNKNOWN = (None, np.empty(0))
SCALARS = ("reward", "terminated", "truncated", "done")
"""What a step of a Gymnasium environment has beside the observation."""

SMALL_STEP = 32 << 10
"""For steps of up to this many bytes, copying twice is faster than making views."""
STAGED_STEPS = 64
LARGE_LEAF = 1 << 20
"""A leaf of a batch with at least this many bytes keeps its memory for a later batch."""


# -- devices: where data is, when it is copied, and what waits for the copy --------------------------------------------


def _no_wait() -> None:
    pass


def _synchronize_cuda() -> None:
    # A forked child of a process that used CUDA must not touch CUDA. Without initialisation, there are no copies.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def synchronisation(device: torch.device | None) -> Callable[[], None]:
    """The function that waits for copies *to* a device. docs/collector-internals.md has a table of these waits, which
    follows TorchRL's "Collector Internals" page."""
    if device is None or device.type == "cuda":
        return _no_wait
    if torch.cuda.is_available():
        return _synchronize_cuda
    if torch.backends.mps.is_available():
        return torch.mps.synchronize
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        synchronize: Callable[[], None] = npu.synchronize
        return synchronize
    return _no_wait


class RolloutDevices:
    """The devices of a collector's rollouts, from its arguments.

    Attributes:
        device: default of the next three devices.
        storing, policy, env: the devices of batches, of the policy, and of the environment.
        no_cuda_sync: do not wait for copies.
        sync_policy, sync_env, sync_storage: called after a copy to the policy's, the environment's, the batch's device.
        cast_to_policy_device, cast_to_env_device: whether the carrier is copied before one of the two reads it.
        carrier_has_no_device: whether the environment has no device, or the policy another one; set by :meth:`place`.
    """

    def __init__(self, arguments: RolloutArguments) -> None:
        self.device = device = exact_device(arguments.device)
        self.storing = exact_device(arguments.storing_device) or device
        self.policy = exact_device(arguments.policy_device) or device
        self.env = exact_device(arguments.env_device) or device
        self.no_cuda_sync: bool = arguments.no_cuda_sync
        self.sync_storage = synchronisation(self.storing)
        self.sync_policy = synchronisation(self.policy)
        self.sync_env = synchronisation(self.env)
        self.cast_to_policy_device = self.policy != self.env
        self.cast_to_env_device = self.cast_to_policy_device

    def place(self, environment: Any) -> Any:
        """Move the environment to ``env`` and return it. If ``env`` is None, set it to the environment's own device."""
        if self.env is not None:
            environment = environments.moved(environment, self.env)
        elif (own := exact_device(environments.device_of(environment))) is not None:
            self.env = own
            self.sync_env = synchronisation(own)
        if exact_device(environments.device_of(environment)) != self.storing:
            self.cast_to_env_device = True
        self.carrier_has_no_device = self.env is None or self.policy not in (None, self.env)
        return environment

    def is_non_blocking(self, device: torch.device, synchronize: Callable[[], None]) -> bool:
        """Whether a copy to this device may return before it has finished. This needs a later wait for the copy, or a
        device that orders later work after it."""
        return device.type == "cuda" or (synchronize is not _no_wait and not self.no_cuda_sync)

    def cast(self, data: TensorDictBase, device: torch.device, synchronize: Callable[[], None]) -> TensorDictBase:
        """The TensorDict on this device; the same object if it is already there."""
        if data.device == device:
            return data
        there = data.to(device, non_blocking=self.is_non_blocking(device, synchronize))
        if not self.no_cuda_sync:
            synchronize()
        return there


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Carrier:
    """The state between two steps: the entries that the policy reads next, and the labels of their frame, which are
    trajectory ids and the version of the weights.

    Attributes:
        label_arrays: the labels, by name. A label is replaced by a new array and never written to, because snapshots
            may share the array.
        is_lost: the environment may be ahead of this state, because one of its methods raised or Ctrl-C interrupted it.
            The next rollout begins with a reset.
    """

    arguments: RolloutArguments
    weights: ActingWeights
    pool: _TrajectoryPool
    devices: RolloutDevices
    label_arrays: dict[str, Array] = field(default_factory=dict)
    is_lost: bool = False
    _labels: TensorDict | None = None  # None: label_arrays have changed since
    _root: TensorDictBase | None = None
    _entries: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> TensorDictBase:
        """The entries that the policy reads next, with the labels as ``"collector"``."""
        labels = self.labels
        if self._root is None:
            self._root = TensorDict(self._entries | {"collector": labels}, labels.shape, device=labels.device)
        return self._root

    @property
    def entries(self) -> dict[str, Any]:
        """:attr:`root` without the labels. Setting this is faster than :meth:`continue_from`."""
        if self._root is not None:
            self._entries = {name: value for name, value in self._root.items() if name not in ("collector", "next")}
        return self._entries

    @entries.setter
    def entries(self, entries: dict[str, Any]) -> None:
        self._entries, self._root = entries, None

    @property
    def labels(self) -> TensorDict:
        """The labels, on the environment's device."""
        if self._labels is None:
            self._labels = TensorDict(tensors(self.label_arrays), self._size, device=self.devices.env)
        return self._labels

    def begin(self, root: TensorDictBase) -> None:
        """Start from the TensorDict that a reset of all environments returned."""
        self._size = size = root.batch_size
        self._version = -1
        if self.arguments.track_traj_ids:
            self.label_arrays["traj_ids"] = self.pool.draw(size.numel()).reshape(size)
        self.label_version()
        self.continue_from(root)

    def continue_from(self, root: TensorDictBase) -> None:
        """Continue from the TensorDict that the environment returned."""
        if self.devices.carrier_has_no_device and root.device is not None:
            root = root.copy().clear_device_()  # a copy, because the environment may keep the original
        root.set("collector", self.labels)
        if self.arguments.track_policy_version:
            root.set("policy_version", self.labels.get("policy_version"))
        self._root = root
        self.is_lost = False

    def renew_ids(self, ended: Array) -> None:
        """Give new trajectory ids to the environments where the mask, of the batch's shape, is True."""
        if self.arguments.track_traj_ids:
            renewed = self.label_arrays["traj_ids"].copy()
            renewed[ended] = self.pool.draw(int(np.count_nonzero(ended)))
            self.label_arrays["traj_ids"] = renewed
            self._labels = None

    def label_version(self) -> None:
        """Label frames with the version of the acting weights, which can change only between two holds."""
        version = self.weights.version()
        if version == self._version:
            return
        self.label_arrays["policy_version"] = np.full(self._size, version)
        self._labels = None
        if self._root is not None:
            self._root.set("collector", self.labels)
        tracker = self.arguments.track_policy_version
        if not isinstance(tracker, bool):
            tracker.version = version
        self._version = version  # last: after an interrupt before this, the next call labels the root again


@dataclass(eq=False)
class TensorDictSteps:
    """Steps any environment, with TensorDicts. ``policy`` takes a TensorDict; ``keys`` are those of the
    environment's entries."""

    env: Any
    policy: Any
    carrier: Carrier
    buffer: RolloutBuffer
    keys: EntryKeys
    arguments: RolloutArguments
    devices: RolloutDevices

    def step(self, random: bool) -> TensorDictBase | None:
        """Make one step. The caller is inside a hold, because a model may return a view of its weights. Returns a clone
        for the replay buffer, if frames are added one by one.

        If this raises, the carrier stays as it was, and if the environment raised, it is lost. But if only storing the
        step failed, the carrier moves on, because the environment has made its step.
        """
        td = self.carrier.root
        known = dict(td.items())
        if "next" in known:  # left by a step that Ctrl-C ended; the policy must not seem to have written it
            td.del_("next")
            del known["next"]
        try:
            self.act(td, random)
            root = self.play(td)
        except BaseException:
            for key in set(td.keys()) - known.keys():
                td.del_(key)
            td.update(known)
            raise
        return self._store(td, root)

    def act(self, td: TensorDictBase, random: bool) -> None:
        """Let the policy read the TensorDict and write into it."""
        if random:
            environments.rand_action(self.env, td)
            return
        devices = self.devices
        if not devices.cast_to_policy_device or devices.policy is None:
            output = self.policy(td)
            if output is not td:
                td.update(checked_output(output))
            return
        given = devices.cast(td, devices.policy, devices.sync_policy)
        before = dict(given.items(True, True))
        output = checked_output(self.policy(given))
        if output is not td:
            # Copy only what the policy wrote, so that the rest of the carrier stays on its device.
            written = [key for key, value in output.items(True, True) if value is not before.get(key)]
            td.update(output.select(*written))

    def play(self, td: TensorDictBase) -> TensorDictBase:
        """Step the environment with the policy's actions and complete ``td`` with its results. Returns the root of the
        next step."""
        written = td.get("next", None)  # a recurrent policy writes its new state there
        labels, devices = td.get("collector"), self.devices
        td.del_("collector")
        try:
            given = td
            if devices.cast_to_env_device and devices.env is not None:
                given = devices.cast(td, devices.env, devices.sync_env)
            self.carrier.is_lost = True
            output, root = environments.stepped(self.env, given)
            if output is not td:
                after = output.get("next")
                if devices.carrier_has_no_device and after.device is not None:
                    after = after.copy().clear_device_()
                td.set("next", after)
        finally:
            td.set("collector", labels)
        if written is not None:
            keep_written(written, td.get("next"), root, self.keys)
        if self.arguments.track_policy_version:
            td.get("next").set("policy_version", labels.get("policy_version"))
        if self.keys.repeated:
            compact(td, self.keys.repeated)
        return root

    def _store(self, td: TensorDictBase, root: TensorDictBase) -> TensorDictBase | None:
        try:
            if self.arguments.adds_frames:
                clone: TensorDictBase = td.clone()
                return clone
            devices, storing = self.devices, self.devices.storing
            self.buffer.append(td, storing is not None and devices.is_non_blocking(storing, devices.sync_storage))
            if storing is not None and not devices.no_cuda_sync:
                devices.sync_storage()
            return None
        finally:  # even if storing failed, because the environment has made its step
            self.advance(td, root)

    def advance(self, td: TensorDictBase, root: TensorDictBase) -> None:
        """Move the carrier to the next root, with new ids where a trajectory has ended."""
        if self.arguments.track_traj_ids:
            after = td.get("next")
            for key in self.keys.done:  # most steps end no trajectory, so check before computing the mask
                done = after.get(key, None)
                if done is None or (done if done.numel() == 1 else done.any()):
                    self.carrier.renew_ids(_aggregate_end_of_traj(after, self.keys.done).cpu().numpy())
                    break
        self.carrier.continue_from(root)


class _Rows:
    """The memory of a batch of one layout, as arrays with one row per step.

    Attributes:
        fits: whether :meth:`GymEnv.play` writes every entry that such steps have under ``"next"``.
        forms: shape and dtype of a step's root entries without the labels, by name.
        next_arrays: for each row, the arrays of a step's entries under ``"next"``.
        root, labels: the arrays of the root entries and of the labels, by name.
    """

    def __init__(self, env: GymEnv, layout: BatchLayout, memory: list[Array]) -> None:
        parts: dict[Path, dict[str, Array]] = {(): {}, ("collector",): {}, ("next",): {}}
        for leaf, array in zip(layout.leaves, memory, strict=True):
            parts.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = array
        self.root, self.labels, after, *others = parts.values()
        self.forms = {leaf.path[0]: (leaf.shape, leaf.dtype) for leaf in layout.leaves if len(leaf.path) == 1}
        scalars = [after.pop(name)[..., 0] for name in SCALARS if name in after]
        is_known = len(scalars) == len(SCALARS) and after.keys() in (set(), env.observation_spec.keys())
        self.fits = is_known and not others and env.root_forms.items() <= self.forms.items()
        self.next_arrays: list[StepArrays] = []
        if self.fits:
            for index in range(len(memory[0])):
                reward, terminated, truncated, done = (array[index, ...] for array in scalars)
                last = {name: array[index, ...] for name, array in after.items()}
                self.next_arrays.append(StepArrays(reward, terminated, truncated, done, last or None))


class ArraySteps(TensorDictSteps):
    """Steps a :class:`GymEnv` with arrays. The environment writes into the buffer's memory, and no TensorDict is made
    or taken apart. With a small environment and policy, :class:`TensorDictSteps` takes as long as both of them: a
    CartPole step takes 169 µs there, and 85 here.

    Two kinds of steps do not fit an expected layout, and are stored as in :class:`TensorDictSteps`: the very first
    step, which shows the layout, and a step in which the policy writes other entries.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        policy = self.policy
        self._tensor_policy: PlainModule | TensorPolicy | None = None
        if isinstance(policy, PlainModule | TensorPolicy):
            module = policy.given if isinstance(policy, PlainModule) else policy
            if all(type(key) is str for key in [*module.in_keys, *module.out_keys]):
                self._tensor_policy = policy
        self._no_flags = self.env.no_flags()
        self._known_arrays = {name: (flag, flag.numpy()) for name, flag in self._no_flags.items()}
        """Tensors that the environment put at the root of the next step, each with its array, by name."""

    @staticmethod
    def supports(env: Any, arguments: RolloutArguments, devices: RolloutDevices) -> bool:
        """Whether everything is on the CPU, no option but ``compact_obs`` changes the environment's results, and
        :meth:`GymEnv.play` does the same as ``step_and_maybe_reset``, because neither a subclass nor the user has
        replaced one of these methods."""
        if not isinstance(env, GymEnv) or not env.is_flat or arguments.adds_frames or arguments.track_policy_version:
            return False
        names = ("step_and_maybe_reset", "play", "container")
        is_own = all(name not in vars(env) and getattr(type(env), name) is getattr(GymEnv, name) for name in names)
        used = (devices.storing, devices.policy, devices.env)
        is_on_cpu = all(device is None or device.type == "cpu" for device in used)
        return is_own and is_on_cpu and not devices.cast_to_policy_device and is_fast_path_on()

    def step(self, random: bool) -> TensorDictBase | None:
        buffer, env, carrier = self.buffer, self.env, self.carrier
        rows = buffer.array_rows(env)
        if rows is None or not rows.fits:
            return super().step(random)
        entries = carrier.entries
        policy, td, given = self._tensor_policy, None, None
        if policy is not None and not random and (found := policy.compute(entries)) is not None:
            out_names, out = found
            values = out if type(out) is tuple else (out,)
            if len(values) == len(out_names):
                following = entries | dict(zip(out_names, values, strict=True))
                given = self._arrays_to_store(following, rows)
            if given is None:
                td = self._policy_input(entries)
                policy.write(td, out)
        else:
            td = self._policy_input(entries)
            self.act(td, random)
            following = dict(td.items())
            following.pop("collector", None)
            given = self._arrays_to_store(following, rows)
        if given is None:
            return self._store(td, self.play(td))
        index = buffer.next_row()
        for name, array in rows.root.items():
            array[index] = given[name]
        for name, array in rows.labels.items():
            array[index] = carrier.label_arrays[name]
        carrier.is_lost = True
        first, finished = env.play(given, rows.next_arrays[index])
        if finished is not None:
            carrier.renew_ids(finished)
        following |= self._no_flags
        for name, array in first.items():
            following[name] = tensor = torch.from_numpy(array)
            self._known_arrays[name] = tensor, array
        carrier.entries = following
        buffer.count += 1  # no calls follow, so Ctrl-C cannot leave half a step
        carrier.is_lost = False
        return None

    def _policy_input(self, entries: dict[str, Any]) -> TensorDict:
        """A TensorDict for the policy. It gets flags of its own, because a policy may change them in place."""
        return self.env.container(entries | self.env.no_flags() | {"collector": self.carrier.labels})

    def _arrays_to_store(self, entries: dict[str, Any], rows: _Rows) -> dict[Any, Array] | None:
        """The arrays to store for a step's root entries; None: these rows do not fit them."""
        if entries.keys() != rows.forms.keys():
            return None
        found: dict[Any, Array] = {}
        for name, value in entries.items():
            made, array = self._known_arrays.get(name, UNKNOWN)
            if value is not made:
                if type(value) is not torch.Tensor or (value.shape, value.dtype) != rows.forms[name]:
                    return None
                array = value.numpy(force=True)
            found[name] = array
        return found


# Entries of a step that need special treatment


def compact(td: TensorDictBase, keys: Iterable[Key]) -> None:
    """Remove these entries from a step's ``"next"``, because the next step has them at its root. Works on a copy of
    ``"next"``, because the environment may keep the original."""
    after = td.get("next").copy()
    for key in keys:
        if after.get(key, None) is not None:
            after.del_(key)
    td.set("next", after)


def keep_written(written: TensorDictBase, after: TensorDictBase, root: TensorDictBase, keys: EntryKeys) -> None:
    """Copy the recurrent state that a policy wrote under ``"next"`` into the next root, with zeros where a trajectory
    has ended. Otherwise the policy would read its old state again, or none.

    If the environment itself has that state, for example from a TensorDictPrimer, it carries the state on, so this
    leaves it alone.
    """
    found = [key for key in written.keys(True, True) if path_of(key) not in keys.own]
    if not found:
        return
    ended = _aggregate_end_of_traj(after, keys.done)
    for key in found:
        state = written.get(key)
        after.set(key, state)
        root.set(key, zeroed(state, ended))


# -- where steps become a batch ----------------------------------------------------------------------------------------


class RolloutBuffer:
    """Stores the steps of one rollout until they are a batch.

    The first step of a rollout determines the :class:`BatchLayout`. ``allocate(layout)`` returns memory for the whole
    batch, and one ``torch._foreach_copy_`` copies each step into it. So no step needs a TensorDict of its own, and
    nothing is stacked at the end. After a step with other keys, shapes or dtypes, or one that is no plain nested
    TensorDict of strided tensors (NonTensorData, lazy stacks, nested tensors), the rest of the rollout becomes a list
    of clones, which :meth:`finish` stacks, lazily if shapes differ.

    The contract of ``allocate``, with which workers, for example, put batches into shared memory:

    - It is called once per rollout, right before the first step is written, and never for a rollout without a layout.
      If the first step does not have the expected layout, it is called once more, with the new layout.
    - ``layout`` compares and hashes by value, and pickles. The same environment and policy always give equal layouts.
    - It returns None (the buffer allocates memory), or a TensorDict like that of :meth:`BatchLayout.build`: with the
      layout's leaves, in their dtypes and in the shapes of ``layout.shapes``. They may be strided views, and
      uninitialised.
    - :meth:`finish` returns that very TensorDict if the rollout was complete and every step fitted, and
      ``batch[..., :t]`` of it if the rollout ended early. Otherwise its contents are meaningless.
    - If it raises, the rollout ends with that error; the next rollout calls it again.

    Small steps are first copied to staging memory, whose views are made once, and then to the batch, many steps at a
    time. That saves 2 to 8 % of a CartPole step; without it, 64 vectorised CartPoles miss their bar.

    Args:
        steps: capacity of a rollout.
        device: device of the stored leaves (``storing_device``). None: each leaf stays on its device.
        allocate: see above. :class:`NewBatches` returns a new batch each time, :class:`SameBatch` (for
            ``return_same_td``) always the same one. Default: new memory.

    Attributes:
        count: steps of this rollout so far.
        layout: the layout of a full rollout like the latest one. None: there was no rollout, or no layout describes it.
    """

    _num_flushed: int
    _views: list[tuple[torch.Tensor, ...]]
    _rows: _Rows | None
    _staged: list[torch.Tensor]

    def __init__(
        self,
        steps: int,
        batch_size: torch.Size,
        device: torch.device | None = None,
        allocate: Callable[[BatchLayout], TensorDictBase | None] = lambda layout: None,
    ) -> None:
        self.device = device
        self.allocate = allocate
        self._steps = steps
        self._batch_size = torch.Size(batch_size)
        self._expect(None)
        self.begin()

    def begin(self) -> None:
        """Start a rollout, and drop the steps of an earlier, unfinished one."""
        self.count = 0
        self._clones: list[TensorDictBase] | None = None
        self._use_batch(None)

    def append(self, step: TensorDictBase, non_blocking: bool = False) -> None:
        """Store a copy of one step of shape ``[*batch_size]``. If this raises, the step is not part of the rollout. The
        caller may change the step's tensors afterwards; on other devices than the CPU, with ``non_blocking``, only by
        work that the device orders after the copy."""
        values = None if self._clones is not None else self._values(step)
        if not self.count:
            # Only the first step decides on devices: a later step from another device is copied to them.
            expected = [] if self.layout is None else [leaf.device for leaf in self.layout.leaves]
            if values is None or (self.device is None and [value.device for value in values] != expected):
                self._expect(None)
                if step.batch_size != self._batch_size:
                    raise ValueError(
                        f"a step has batch size {tuple(step.batch_size)}, but the environment's is "
                        f"{tuple(self._batch_size)}: the policy and the environment must return TensorDicts of the "
                        "environment's batch size"
                    )
                self._expect(step)
                values = self._values(step)
            if self._batch is None and self.layout is not None:
                self._use_batch(self.layout)
        if values is None:
            self._append_clone(step, non_blocking)
        else:
            if not self._views:
                self._views = list(zip(*(leaf.unbind(0) for leaf in self._staged or self._targets), strict=True))
            torch._foreach_copy_(self._views[self.next_row()], values, non_blocking)
        self.count += 1

    def array_rows(self, env: GymEnv) -> _Rows | None:
        """The memory for this environment's steps as arrays. Expects the layout of the latest rollout until a step
        shows another one. None: there is no layout, NumPy cannot represent it, or this rollout is a list of clones."""
        layout = self.layout
        if layout is None or self._clones is not None:
            return None
        if self._batch is None:
            self._use_batch(layout)
        if self._rows is None and all(leaf.device.type == "cpu" for leaf in layout.leaves):
            try:
                memory = [leaf.numpy() for leaf in self._staged or self._targets]
            except TypeError:  # NumPy lacks the dtype
                return None
            self._rows = _Rows(env, layout, memory)
        return self._rows

    def next_row(self) -> int:
        """The row for the next step. The caller writes the step there and then raises :attr:`count` by one."""
        if self._staged and self.count - self._num_flushed == STAGED_STEPS:
            self._flush()
        return self.count - self._num_flushed

    def finish(self) -> TensorDictBase:
        """The batch, ``[*batch_size, count]``, whose last dimension is named ``"time"``. The buffer keeps no reference
        to it. Raises ValueError: no step was appended."""
        if not self.count:
            raise ValueError("a batch needs at least one step")
        if self._clones is not None:
            batch = TensorDict.maybe_dense_stack(self._clones, dim=len(self._batch_size)).refine_names(..., "time")
        else:
            assert self._batch is not None
            self._flush()
            batch = self._batch if self.count == self._steps else self._batch[..., : self.count]
        self.begin()
        return batch

    def _flush(self) -> None:
        """Copy the staged steps to the batch."""
        if self._staged and (n := self.count - self._num_flushed):
            targets = [leaf[self._num_flushed : self.count] for leaf in self._targets]
            torch._foreach_copy_(targets, [leaf[:n] for leaf in self._staged])
            self._num_flushed = self.count

    def _use_batch(self, layout: BatchLayout | None) -> None:
        """Write to a new batch of this layout from now on. None: drop the last batch."""
        batch, targets = None, []
        if layout is not None:
            batch = self.allocate(layout)
            if batch is None:
                batch = empty_batch(layout)
            targets = layout.tensors(batch)
        self._targets = [leaf.movedim(len(self._batch_size), 0) for leaf in targets]
        self._num_flushed = 0
        if not self._staged:
            self._views, self._rows = [], None
        self._batch = batch

    def _append_clone(self, step: TensorDictBase, non_blocking: bool) -> None:
        # Clone first, because to() returns the same tensors if they are already on the device.
        clone = step.clone() if self.device is None else step.clone().to(self.device, non_blocking=non_blocking)
        if self._clones is None:
            before: list[TensorDictBase] = []
            if self._batch is not None and self.count:
                self._flush()
                before = list(self._batch[..., : self.count].unbind(len(self._batch_size)))
                for each in before:
                    each.names = None
            self._clones = before
            self._batch = None
        self._clones.append(clone)

    # -- steps of one layout ------------------------------------------------------------------------------------------

    def _expect(self, step: TensorDictBase | None) -> None:
        """Expect steps like this one, if a layout describes it. None: forget the layout and its memory."""
        self.layout = layout = None if step is None else layout_of(step, self._steps, self.device)
        leaves = () if layout is None else layout.leaves
        # With the class of the step's values, which may be Parameters or of another subclass of Tensor.
        found = {} if step is None or layout is None else _leaves(step) or {}
        self._forms = {path: _type_shape_dtype(value) for path, value in found.items()}
        self._staged = []
        self._use_batch(None)
        if sum(leaf.nbytes for leaf in leaves) <= SMALL_STEP:
            self._staged = [
                torch.empty([STAGED_STEPS, *leaf.shape], dtype=leaf.dtype, device=leaf.device) for leaf in leaves
            ]

    def _values(self, step: TensorDictBase) -> list[torch.Tensor] | None:
        """The step's leaves in the layout's order; None: the step has another layout."""
        found = None if self.layout is None else _leaves(step)
        if found is None or found.keys() != self._forms.keys():
            return None
        values = [found[path] for path in self._forms]
        try:
            return values if list(map(_type_shape_dtype, values)) == list(self._forms.values()) else None
        except RuntimeError:  # the shape of a nested tensor raises
            return None


def _leaves(step: TensorDictBase) -> dict[Path, torch.Tensor] | None:
    """A step's tensors by path; None: it is no plain nested TensorDict of tensors."""
    found: dict[Path, torch.Tensor] = {}
    parts: list[tuple[Path, Any]] = [((), step)]
    for path, part in parts:  # the loop itself adds nested TensorDicts to the list
        if type(part) is not TensorDict:
            return None
        for name, value in part.items():  # not part.get(), which takes as long as copying a small tensor
            if isinstance(value, torch.Tensor):
                found[*path, name] = value
            else:
                parts.append(((*path, name), value))
    return found


class NewBatches:
    """An ``allocate`` that returns a new batch each time. Its large leaves reuse the memory of an earlier batch that no
    tensor or array uses any more. New memory would cost a page fault for each 4 KiB, which takes longer than copying
    images there. At most one batch's worth of unused memory is kept.
    """

    def __init__(self) -> None:
        self._layout: BatchLayout | None = None
        self._free: list[deque[Array] | None] = []

    def __call__(self, layout: BatchLayout) -> TensorDictBase:
        if layout != self._layout:
            self._layout = layout
            large = [leaf.device.type == "cpu" and leaf.nbytes * layout.steps >= LARGE_LEAF for leaf in layout.leaves]
            self._free = [deque(maxlen=1) if is_large else None for is_large in large]
        tensors = []
        for leaf, shape, free in zip(layout.leaves, layout.shapes, self._free, strict=True):
            if free is None:
                tensors.append(torch.empty(shape, dtype=leaf.dtype, device=leaf.device))
                continue
            try:
                memory = free.pop()
            except IndexError:
                memory = np.empty(leaf.nbytes * layout.steps, np.uint8)
            used = memory.view()  # its memory is free again when nothing uses the leaf's storage any more
            weakref.finalize(used, free.append, memory).atexit = False  # may run in any thread; append is atomic
            storage = torch.from_numpy(used).untyped_storage()
            tensors.append(torch.empty(0, dtype=leaf.dtype, device="cpu").set_(storage).view(shape))
        return layout.build(tensors)


class SameBatch:
    """An ``allocate`` that returns the very same batch each time, as long as its layout fits."""

    def __init__(self) -> None:
        self._layout: BatchLayout | None = None
        self._batch = TensorDict()
        self._tensors: list[torch.Tensor] = []

    def __call__(self, layout: BatchLayout) -> TensorDictBase:
        if layout != self._layout:
            self._layout, self._batch = layout, empty_batch(layout)
            self._tensors = layout.tensors(self._batch)
        for leaf, tensor in zip(layout.leaves, self._tensors, strict=True):
            self._batch.set(leaf.path, tensor)  # processed() removes private entries, and the user may replace others
        return self._batch
