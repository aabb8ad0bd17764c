"""One step of a collector: the policy acts, the environment steps, and the step is stored.

A collector's constructor chooses one of two ways, for good:

- :class:`TensorDictSteps`: any policy, environment, device and option.
- :class:`ArraySteps`: a :class:`GymEnv` on the CPU. The environment writes into the batch's memory itself.

Both go from one state of a :class:`Carrier` to the next. After TorchRL's "Collector Internals" page (Per-timestep
flow), a step is::

    carrier ──(cast, _sync_policy)──▶ policy ──▶ carrier.update ──(cast, _sync_env)──▶ environment.step_and_maybe_reset
    carrier.set("next") ──▶ copied into the batch (_sync_storage), or a clone added to the replay buffer
    carrier = the state after a possible reset, with fresh trajectory ids where one has ended

The environment never sees the carrier's ``"collector"`` entry: it is taken off before a step, and put on the next
carrier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.bus.link import is_fast_path_on
from asyncsync.collectors.arguments import RolloutArguments
from asyncsync.collectors.batch_layout import BatchLayout, Path
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.environment import EntryKeys
from asyncsync.collectors.envs.gym import GymEnv, StepArrays
from asyncsync.collectors.rollout.buffer import RolloutBuffer
from asyncsync.collectors.rollout.devices import RolloutDevices
from asyncsync.collectors.rollout.policies import TensorsCall, checked
from asyncsync.collectors.trajectories import Key, _aggregate_end_of_traj, _TrajectoryPool, path_of, zeroed
from asyncsync.collectors.weights.updates import ActingWeights

Array = np.ndarray[Any, Any]

NONE = (None, np.empty(0))
NUMBERS = ("reward", "terminated", "truncated", "done")
"""Of a step of Gymnasium's environments, beside the observation."""


class Carrier:
    """What goes from step to step: what the policy reads next, and the labels of its frames, which are trajectory ids
    and the version of the weights.

    Attributes:
        arrays: the labels, by name. An array never changes, as snapshots may have it: it is replaced.
        is_lost: the environment may be further than this, because one of its methods has raised, or Ctrl-C has struck
            in it: the next rollout begins with a reset.
    """

    def __init__(
        self, arguments: RolloutArguments, weights: ActingWeights, pool: _TrajectoryPool, devices: RolloutDevices
    ) -> None:
        self.arrays: dict[str, Array] = {}
        self.is_lost = False
        self._arguments = arguments
        self._weights = weights
        self._pool = pool
        self._devices = devices
        self._is_labelled = False  # whether the labels are these arrays
        self._root: TensorDictBase | None = None
        self._entries: dict[str, Any] = {}

    @property
    def root(self) -> TensorDictBase:
        """What the policy reads next, with the labels as ``"collector"``."""
        labels = self.labels
        if self._root is None:
            self._root = TensorDict(self._entries | {"collector": labels}, labels.shape, device=labels.device)
        return self._root

    @property
    def entries(self) -> dict[str, Any]:
        """The same without the labels. To set it is quicker than :meth:`go_on`."""
        if self._root is not None:
            self._entries = {name: value for name, value in self._root.items() if name not in ("collector", "next")}
        return self._entries

    @entries.setter
    def entries(self, entries: dict[str, Any]) -> None:
        self._entries, self._root = entries, None

    @property
    def labels(self) -> TensorDict:
        """The labels, on the environment's device."""
        if not self._is_labelled:
            for name, array in self.arrays.items():
                self._labels.set(name, torch.from_numpy(array))
            self._is_labelled = True
        return self._labels

    def begin(self, root: TensorDictBase) -> None:
        """Go on from a reset of all environments."""
        size = root.batch_size
        self._labels = TensorDict({}, size, device=self._devices.env)
        self._version = -1
        if self._arguments.track_traj_ids:
            self._label("traj_ids", self._pool.draw(size.numel()).reshape(size))
        self.label_version()
        self.go_on(root)

    def go_on(self, root: TensorDictBase) -> None:
        """Go on from this TensorDict."""
        if self._devices.carrier_has_no_device and root.device is not None:
            root = root.copy().clear_device_()  # a copy: the environment may keep its own
        root.set("collector", self.labels)
        if self._arguments.track_policy_version:
            root.set("policy_version", self.labels.get("policy_version"))
        self._root = root
        self.is_lost = False

    def _label(self, name: str, array: Array) -> None:
        self.arrays[name] = array
        self._is_labelled = False

    def renew_ids(self, ended: Array) -> None:
        """Fresh trajectory ids for the environments of a mask, bool of the batch's shape."""
        if self._arguments.track_traj_ids:
            renewed = self.arrays["traj_ids"].copy()
            renewed[ended] = self._pool.draw(int(np.count_nonzero(ended)))
            self._label("traj_ids", renewed)

    def label_version(self) -> None:
        """Label frames with the version of the acting weights, which changes between two holds."""
        version = self._weights.version()
        if version == self._version:
            return
        self._label("policy_version", np.full(self._labels.shape, version))
        self._version = version
        if self._root is not None:
            self._root.set("collector", self.labels)
        tracker = self._arguments.track_policy_version
        if not isinstance(tracker, bool):
            tracker.version = version


@dataclass(eq=False)
class TensorDictSteps:
    """Steps of any environment, in TensorDicts. ``call`` calls the policy with one; ``keys`` are those of entries that
    the environment has."""

    env: Any
    call: Any
    carrier: Carrier
    buffer: RolloutBuffer
    keys: EntryKeys
    arguments: RolloutArguments
    devices: RolloutDevices

    def step(self, random: bool) -> TensorDictBase | None:
        """One step, inside a hold: what a model returns may be a view of its weights. Returns a clone for the replay
        buffer, if frames are added one by one.

        If this raises, the carrier is as before; if the environment has raised, it is lost. Where only the storing has
        failed, the carrier goes on, as the environment has made its step.
        """
        td = self.carrier.root
        known = dict(td.items())
        if "next" in known:  # of a step that Ctrl-C has ended: nothing that a policy wrote
            td.del_("next")
            del known["next"]
        try:
            self.act(td, random)
            root = self._step_env(td)
        except BaseException:
            for key in set(td.keys()) - known.keys():
                td.del_(key)
            td.update(known)
            raise
        return self._store(td, root)

    def act(self, td: TensorDictBase, random: bool) -> None:
        """The policy reads the TensorDict and writes into it."""
        if random:
            environments.rand_action(self.env, td)
            return
        devices = self.devices
        if not devices.cast_to_policy_device or devices.policy is None:
            output = self.call(td)
            if output is not td:
                td.update(checked(output))
            return
        given = devices.cast(td, devices.policy, devices.sync_policy)
        before = dict(given.items(True, True))
        output = checked(self.call(given))
        if output is not td:
            # Only what the policy wrote: the rest of the carrier stays on its device.
            written = [key for key, value in output.items(True, True) if value is not before.get(key)]
            td.update(output.select(*written))

    def _step_env(self, td: TensorDictBase) -> TensorDictBase:
        """Step the environment; returns the root of the next step. ``td`` has all of this step then."""
        labels = td.get("collector")
        td.del_("collector")
        try:
            root = self.play(td)
        finally:
            td.set("collector", labels)
        if self.arguments.track_policy_version:
            td.get("next").set("policy_version", labels.get("policy_version"))
        if self.keys.repeated:
            compact(td, self.keys.repeated)
        return root

    def play(self, td: TensorDictBase) -> TensorDictBase:
        """What the environment makes of the policy's actions."""
        written = td.get("next", None)  # by a recurrent policy
        given = td
        devices = self.devices
        if devices.cast_to_env_device and devices.env is not None:
            given = devices.cast(td, devices.env, devices.sync_env)
        self.carrier.is_lost = True
        output, root = environments.stepped(self.env, given)
        if output is not td:
            after = output.get("next")
            if devices.carrier_has_no_device and after.device is not None:
                after = after.copy().clear_device_()
            td.set("next", after)
        if written is not None:
            keep_written(written, td.get("next"), root, self.keys)
        return root

    def _store(self, td: TensorDictBase, root: TensorDictBase) -> TensorDictBase | None:
        try:
            if self.arguments.adds:
                clone: TensorDictBase = td.clone()
                return clone
            devices = self.devices
            self.buffer.append(td, devices.stores_without_waiting)
            if devices.storing is not None and not devices.no_cuda_sync:
                devices.sync_storage()
            return None
        finally:  # the environment has made its step, whatever became of the frame
            self.advance(td, root)

    def advance(self, td: TensorDictBase, root: TensorDictBase) -> None:
        """From one step's TensorDict to the next's, with fresh ids where a trajectory has ended."""
        if self.arguments.track_traj_ids:
            after = td.get("next")
            for key in self.keys.done:  # most steps end no trajectory, so without a tensor that is not needed
                done = after.get(key, None)
                if done is None or (done if done.numel() == 1 else done.any()):
                    self.carrier.renew_ids(_aggregate_end_of_traj(after, self.keys.done).cpu().numpy())
                    break
        self.carrier.go_on(root)


class _Rows:
    """Where steps of one layout are written.

    Attributes:
        fits: whether :meth:`GymEnv.play` writes all that such steps have under ``"next"``.
        forms: of what a step has at its root but labels: shape and dtype by name.
        each: what a step has under ``"next"``, for each row.
        root, labels: arrays of these, by name, with a row for each step.
    """

    def __init__(self, env: GymEnv, layout: BatchLayout, memory: list[Array]) -> None:
        parts: dict[Path, dict[str, Array]] = {(): {}, ("collector",): {}, ("next",): {}}
        for leaf, array in zip(layout.leaves, memory, strict=True):
            parts.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = array
        self.root, self.labels, after, *others = parts.values()
        self.forms = {leaf.path[0]: (leaf.shape, leaf.dtype) for leaf in layout.leaves if len(leaf.path) == 1}
        self._numbers = [after.pop(name)[..., 0] for name in NUMBERS if name in after]
        self._last = after
        is_known = len(self._numbers) == len(NUMBERS) and after.keys() in (set(), env.observation_spec.keys())
        self.fits = is_known and not others and env.root_forms.items() <= self.forms.items()
        self.each = [self._after(index) for index in range(len(memory[0]))] if self.fits else []

    def _after(self, index: int) -> StepArrays:
        reward, terminated, truncated, done = self._numbers
        last = {name: array[index, ...] for name, array in self._last.items()}
        return StepArrays(
            reward[index, ...], terminated[index, ...], truncated[index, ...], done[index, ...], last or None
        )


class ArraySteps(TensorDictSteps):
    """Steps of a :class:`GymEnv` as arrays: no TensorDict is made of what it returns, and none is taken apart; it
    writes into the buffer's memory. Beside a small environment and its policy, :class:`TensorDictSteps` takes as long
    as both: for a CartPole, a step takes 169 µs there, and 85 here.

    What has no place in a batch's layout is stored as :class:`TensorDictSteps` does: the first step of all, which shows
    the layout; and a step in which the policy writes other entries.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        call = self.call
        is_flat = isinstance(call, TensorsCall) and all(isinstance(key, str) for keys in call.keys for key in keys)
        self._tensors_call = call if is_flat else None
        self._no_flags = self.env.no_flags()
        self._made = {name: (flag, flag.numpy()) for name, flag in self._no_flags.items()}
        """What the environment has at the root of the next step: tensors and their arrays."""

    @staticmethod
    def fit(env: Any, arguments: RolloutArguments, devices: RolloutDevices) -> bool:
        """Whether all is on the CPU, and nothing but ``compact_obs`` changes what the environment returns."""
        changed = arguments.adds or arguments.track_policy_version
        return is_fast_path_on() and environments.plays(env) and devices.are_alike_on_cpu and not changed

    def step(self, random: bool) -> TensorDictBase | None:
        buffer, env, carrier = self.buffer, self.env, self.carrier
        rows = buffer.rows(self._make_rows)
        if rows is None or not rows.fits:
            return super().step(random)
        entries = carrier.entries
        call, td, given = self._tensors_call, None, None
        if call is not None and not random and call.is_plain():
            in_names, out_names = call.keys
            out = call.compute([entries[name] for name in in_names])
            values = out if type(out) is tuple else (out,)
            if len(values) == len(out_names):
                following = entries | dict(zip(out_names, values, strict=True))
                given = self._arrays(following, rows)
            if given is None:
                td = self._tensordict(entries)
                call.write(td, out)
        else:
            td = self._tensordict(entries)
            self.act(td, random)
            following = dict(td.items())
            following.pop("collector", None)
            given = self._arrays(following, rows)
        if given is None:
            return self._store(td, self._step_env(td))
        index = buffer.place()
        for name, array in rows.root.items():
            array[index] = given[name]
        for name, array in rows.labels.items():
            array[index] = carrier.arrays[name]
        carrier.is_lost = True
        first, finished = env.play(given, rows.each[index])
        if finished is not None:
            carrier.renew_ids(finished)
        following |= self._no_flags
        for name, array in first.items():
            following[name] = tensor = torch.from_numpy(array)
            self._made[name] = tensor, array
        carrier.entries = following
        buffer.count += 1  # no calls from here on: an interrupt finds a whole step
        carrier.is_lost = False
        return None

    def _make_rows(self, layout: BatchLayout, memory: list[Array]) -> _Rows:
        return _Rows(self.env, layout, memory)

    def _tensordict(self, entries: dict[str, Any]) -> TensorDict:
        """What a policy reads and writes. It may change the flags in place, so these are not ours."""
        return self.env.container(entries | self.env.no_flags() | {"collector": self.carrier.labels})

    def _arrays(self, entries: dict[str, Any], rows: _Rows) -> dict[Any, Array] | None:
        if entries.keys() != rows.forms.keys():
            return None
        found: dict[Any, Array] = {}
        for name, value in entries.items():
            made, array = self._made.get(name, NONE)
            if value is not made:
                if type(value) is not torch.Tensor or (value.shape, value.dtype) != rows.forms[name]:
                    return None
                array = value.numpy(force=True)
            found[name] = array
        return found


# Entries of a step beside those that policy and environment have for each other.


def compact(td: TensorDictBase, keys: Iterable[Key]) -> None:
    """Take these entries out of a step's ``"next"``: the next step has them at its root. The environment may keep what
    it returned, so it is left as it is."""
    after = td.get("next").copy()
    for key in keys:
        if after.get(key, None) is not None:
            after.del_(key)
    td.set("next", after)


def keep_written(written: TensorDictBase, after: TensorDictBase, root: TensorDictBase, keys: EntryKeys) -> None:
    """Recurrent state that a policy left under ``"next"`` goes into the next root, zeroed where a trajectory has ended.

    State that a reset of the environment has, from a TensorDictPrimer, say, is left alone: the environment hands it on.
    Any other environment would show the policy the old state again, or none.
    """
    found = [key for key in written.keys(True, True) if path_of(key) not in keys.own]
    if not found:
        return
    ended = _aggregate_end_of_traj(after, keys.done)
    for key in found:
        state = written.get(key)
        after.set(key, state)
        root.set(key, zeroed(state, ended))
