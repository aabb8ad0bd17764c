"""Steps of a :class:`GymEnv` as arrays: no TensorDict is made of what it returns, and none is taken apart.

Beside a small environment and its policy, the TensorDicts of the general way take longer than both. A collector's first
step goes that way, and shows the layout. Those after it go this one, right into the buffer's memory, while

- the environment is a GymEnv whose entries are not nested, everything is on the CPU, and nothing is asked for that
  changes what the environment returns;
- every call of the policy writes the entries that the first one has written, with the same shapes and dtypes.

Where a call does not, its step goes on in the general way, with what it has returned. ``ASYNCSYNC_FAST=0`` turns this
off, as other fast paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, Path
from asyncsync.collectors.envs.gym import GymEnv, Slots
from asyncsync.collectors.rollout.buffer import RolloutBuffer
from asyncsync.collectors.rollout.plain_modules import TensorsCall
from asyncsync.collectors.rollout.policies import checked
from asyncsync.collectors.trajectories import FLAGS, _TrajectoryPool

Array = np.ndarray[Any, Any]
Entries = dict[str, torch.Tensor]
WriteOutput = Callable[[TensorDictBase], object]
"""Writes what a policy has returned into a step's TensorDict."""


class _Row(NamedTuple):
    """Where one step is written: what it has at its root but flags, by name; its trajectory ids, if there are any; what
    it has under "next"."""

    root: list[tuple[str, Array]]
    ids: Array | None
    slots: Slots


class _Rows:
    """Where steps of one layout are written.

    Attributes:
        each: a row for each; empty: such steps cannot be written here.
        names: of what a step has at its root.
    """

    def __init__(self, env: GymEnv, layout: BatchLayout, memory: list[Array]) -> None:
        self.each: list[_Row] = []
        forms = {leaf.path[0]: (leaf.shape, leaf.dtype) for leaf in layout.leaves if len(leaf.path) == 1}
        self.names = forms.keys()
        self._forms = {name: form for name, form in forms.items() if name not in FLAGS}
        parts: dict[Path, dict[str, Array]] = {(): {}, ("collector",): {}, ("next",): {}}
        for leaf, array in zip(layout.leaves, memory, strict=True):
            parts.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = array
        root, labels, after, *others = parts.values()
        ids, self._versions = labels.pop("traj_ids", None), labels.pop("policy_version", None)
        is_known = not (labels or others) and {*env.observation_spec, *FLAGS} <= root.keys()
        if not is_known or after.keys() != env.after_keys:
            return
        self._flags = [root.pop(name) for name in FLAGS]
        self.each = [
            _Row(
                [(name, array[i, ...]) for name, array in root.items()],
                None if ids is None else ids[i, ...],
                env.slots({name: array[i, ...] for name, array in after.items()}),
            )
            for i in range(len(memory[0]))
        ]

    def fill(self, place: int, metadata: TensorDictBase) -> None:
        """Write what is the same in all rows from this one on: flags that are false, and the weights' version."""
        for array in self._flags:
            array[place:] = False
        if self._versions is not None:
            self._versions[place:] = metadata.get("policy_version").numpy()

    def arrays(self, entries: Mapping[str, Any]) -> dict[Any, Array] | None:
        """These entries as arrays; None: they have no place at the root. Flags have none, there are rows of them."""
        found: dict[Any, Array] = {}
        for name, value in entries.items():
            if type(value) is not torch.Tensor or (form := self._forms.get(name)) is None:
                return None
            if value.dtype is not form[1] or value.shape != form[0]:
                return None
            found[name] = value.numpy(force=True)
        return found


class ArraySteps:
    """Makes steps of one environment, with one policy, into one buffer.

    Args:
        call: calls the policy with a TensorDict.
        pool: where trajectory ids come from; None: there are none.
        is_new_version: whether weights act of which the metadata did not know; now it does.
        leave: gets the next step's TensorDict when :meth:`run` ends, however it does, and whether the environment may
            have made one step more: that was interrupted, or failed.
    """

    def __init__(
        self,
        env: GymEnv,
        call: Callable[[TensorDictBase], Any],
        buffer: RolloutBuffer,
        pool: _TrajectoryPool | None,
        is_new_version: Callable[[], bool],
        leave: Callable[[TensorDictBase, bool], None],
    ) -> None:
        self._env = env
        self._make = partial(_Rows, env)
        self._call = call
        self._buffer = buffer
        self._pool = pool
        self._is_new_version = is_new_version
        self._leave = leave
        self._tensors_call = call if isinstance(call, TensorsCall) and call.has_names else None

    def run(self, carrier: TensorDictBase, left: int, ends: Callable[[], bool]) -> tuple[int, bool, WriteOutput | None]:
        """Make at most ``left`` steps, from this TensorDict on; the buffer has a layout.

        Args:
            ends: called after each step, inside its hold: whether this was the last one for now.

        Returns:
            How many are left; whether none are, or ``ends`` has said so. If not, the next step goes the general way:
            what writes into its TensorDict what the policy has returned for it, or None: it was not called.
        """
        buffer, env = self._buffer, self._env
        root: Entries = dict(carrier.items())
        metadata: Any = root.pop("collector")
        rows = buffer.rows(self._make)
        shown = {name: value for name, value in root.items() if name not in FLAGS}
        if rows is None or not rows.each or (given := rows.arrays(shown)) is None:
            return left, False, None
        call = self._tensors_call
        names: tuple[list[Any], list[Any]] = ([], []) if call is None else call.keys
        in_names, out_names = names
        if call is not None and {*root, *out_names} != rows.names:
            return left, False, None
        ids: Any = None if self._pool is None else metadata.get("traj_ids").numpy()
        is_filled = is_amid = False
        place, end = buffer.place(), len(rows.each)
        try:
            while True:
                if self._is_new_version():
                    is_filled = False
                if call is None:
                    _label(metadata, ids)
                    written, write = self._act_on_entries(rows, root, metadata)
                elif call.is_plain():
                    out = call.compute([root[name] for name in in_names])
                    written, write = _named(out, out_names), None
                else:
                    return left, False, None
                if written is None or (arrays := rows.arrays(written)) is None:
                    return left, False, partial(_write, call, out) if write is None else write
                given.update(arrays)
                if place == end:
                    place, is_filled = buffer.place(), False
                if not is_filled:
                    rows.fill(place, metadata)
                    is_filled = True
                row = rows.each[place]
                for name, array in row.root:
                    array[...] = given[name]
                if row.ids is not None:
                    row.ids[...] = ids
                is_amid = True
                first, finished = env.play(given, row.slots)
                following = {**root, **written}
                for name, array in first.items():
                    following[name] = torch.from_numpy(array)
                if finished is not None and self._pool is not None:
                    ids = ids.copy()  # new memory: the old ids may be in a snapshot
                    ids[finished] = self._pool.draw(int(np.count_nonzero(finished)))
                given.update(first)
                buffer.count += 1  # no calls from here on: an interrupt finds a whole step
                place += 1
                left -= 1
                root, is_amid = following, False
                if not left or ends():
                    return left, True, None
        except Exception:
            is_amid = is_amid and bool(env.batch_size)  # of several, some may have made the step
            raise
        finally:
            _label(metadata, ids)
            self._leave(env.container(root), is_amid)

    def _act_on_entries(
        self, rows: _Rows, root: Entries, metadata: TensorDictBase
    ) -> tuple[Entries | None, WriteOutput]:
        """What the policy writes, by name, or None: a row has other names; and what writes it into a carrier."""
        td = self._env.container({**root, "collector": metadata})
        output = self._call(td)
        if output is not td:
            td.update(checked(output))
        entries = dict(td.items())
        entries.pop("collector", None)
        written = {name: value for name, value in entries.items() if root.get(name) is not value}
        return written if entries.keys() == rows.names else None, lambda carrier: _take_over(td, carrier)


def _named(out: Any, names: list[Any]) -> Entries | None:
    """What the policy has returned, by the names that it is written under; None: they do not fit."""
    if type(out) is torch.Tensor and len(names) == 1:
        return {names[0]: out}
    return dict(zip(names, out, strict=True)) if type(out) is tuple and len(out) == len(names) else None


def _write(call: TensorsCall, out: Any, tensordict: TensorDictBase) -> None:
    call.write(tensordict, out)


def _label(metadata: TensorDictBase, ids: Array | None) -> None:
    """Have the metadata show these trajectory ids."""
    if ids is not None:
        metadata._set_str("traj_ids", torch.from_numpy(ids), inplace=False, validated=True)


def _take_over(td: TensorDictBase, carrier: TensorDictBase) -> None:
    """Give the carrier the other's entries."""
    for name in carrier.keys() - td.keys():
        carrier.del_(name)
    for name, value in td.items():
        carrier.set(name, value)
