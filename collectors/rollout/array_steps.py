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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, Path
from asyncsync.collectors.envs.gym import GymEnv, StepArrays
from asyncsync.collectors.rollout.buffer import RolloutBuffer
from asyncsync.collectors.rollout.plain_modules import TensorsCall
from asyncsync.collectors.rollout.policies import checked
from asyncsync.collectors.trajectories import FLAGS, _TrajectoryPool

Array = np.ndarray[Any, Any]
Entries = dict[str, torch.Tensor]
WriteOutput = Callable[[TensorDictBase], object]
"""Writes what a policy has returned into a step's TensorDict."""


class _Row(NamedTuple):
    """Where one step is written: what it has at its root but flags, by name; what it has under "next"."""

    root: list[tuple[str, Array]]
    after: StepArrays


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
        self._ids: Any = labels.pop("traj_ids", None)
        self._versions = labels.pop("policy_version", None)
        is_known = not (labels or others) and {*env.observation_spec, *FLAGS} <= root.keys()
        if not is_known or after.keys() != env.after_keys:
            return
        self._flags, self._done = [root.pop(name) for name in FLAGS], after["done"][..., 0]
        self.each = [
            _Row(
                [(name, array[i, ...]) for name, array in root.items()],
                env.step_arrays({name: array[i, ...] for name, array in after.items()}),
            )
            for i in range(len(memory[0]))
        ]

    def fill(self, place: int, metadata: TensorDictBase) -> None:
        """Write what is the same in all rows from this one on: flags that are false, and the weights' version."""
        for array in self._flags:
            array[place:] = False
        if self._versions is not None:
            self._versions[place:] = metadata.get("policy_version").numpy()

    def fill_ids(self, begin: int, end: int, ids: Array, pool: _TrajectoryPool) -> Array:
        """Write the trajectory ids of the rows from ``begin`` on and before ``end``, the first of which has these;
        returns those of the step that follows. Once for many rows, as it takes longer than to write a row."""
        if begin == end:
            return ids
        ended, written = self._done[begin:end], self._ids[begin:end]
        after = np.broadcast_to(ids, ended.shape).copy()
        if count := int(np.count_nonzero(ended)):
            after[ended] = pool.draw(count)  # in the order of the steps
            np.maximum.accumulate(after, out=after)  # a pool never goes back
        written[0], written[1:] = ids, after[:-1]
        last: Array = after[-1, ...].copy()  # new memory: the old ids may be in a snapshot
        return last

    def array(self, name: str, value: Any) -> Array | None:
        """An entry as an array; None: it has no place at the root. Flags have none, there are rows of them."""
        if type(value) is not torch.Tensor or (form := self._forms.get(name)) is None:
            return None
        return value.numpy(force=True) if value.dtype is form[1] and value.shape == form[0] else None


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
        if rows is None or not rows.each:
            return left, False, None
        given: dict[Any, Any] = {name: rows.array(name, value) for name, value in root.items() if name not in FLAGS}
        call = self._tensors_call
        in_names: list[Any] = []
        names: list[Any] = []
        if call is not None:
            in_names, names = call.keys
        is_other = call is not None and {*root, *names} != rows.names
        if is_other or any(array is None for array in given.values()):
            return left, False, None
        pool = self._pool
        ids: Any = None if pool is None else metadata.get("traj_ids").numpy()
        is_filled = is_amid = False
        begin = place = buffer.place()
        end = len(rows.each)
        try:
            while True:
                if self._is_new_version():
                    is_filled = False
                if call is None:
                    if pool is not None:
                        ids, begin = rows.fill_ids(begin, place, ids, pool), place
                        _label(metadata, ids)
                    written, write = self._act_on_entries(rows, root, metadata)
                    names, values = list(written), tuple(written.values())
                elif call.is_plain():
                    out = call.compute([root[name] for name in in_names])
                    values, write = out if type(out) is tuple else (out,), None
                else:
                    return left, False, None
                following, fits = root.copy(), len(values) == len(names)
                for name, value in zip(names, values, strict=False):
                    if (array := rows.array(name, value)) is None:
                        fits = False
                        break
                    given[name], following[name] = array, value
                if not fits:
                    return left, False, partial(_write, call, out) if write is None else write
                if place == end:
                    if pool is not None:
                        ids, begin = rows.fill_ids(begin, place, ids, pool), place
                    begin = place = buffer.place()
                    is_filled = False
                if not is_filled:
                    rows.fill(place, metadata)
                    is_filled = True
                row = rows.each[place]
                for name, array in row.root:
                    array[...] = given[name]
                is_amid = True
                first, _ = env.play(given, row.after)
                for name, array in first.items():
                    given[name], following[name] = array, torch.from_numpy(array)
                buffer.count += 1  # no calls from here on: an interrupt finds a whole step
                place += 1
                left -= 1
                root, is_amid = following, False
                if not left or ends():
                    return left, True, None
        finally:
            if pool is not None:
                _label(metadata, rows.fill_ids(begin, place, ids, pool))
            self._leave(env.container(root), is_amid)

    def _act_on_entries(
        self, rows: _Rows, root: Entries, metadata: TensorDictBase
    ) -> tuple[dict[str, Any], WriteOutput]:
        """What the policy writes, by name, beside what a row has no place for; and what writes it into a carrier."""
        td = self._env.container({**root, "collector": metadata})
        output = self._call(td)
        if output is not td:
            td.update(checked(output))
        entries = dict(td.items())
        entries.pop("collector", None)
        written = {name: value for name, value in entries.items() if root.get(name) is not value}
        missing = dict.fromkeys(rows.names - entries.keys())
        return written | missing, lambda carrier: _take_over(td, carrier)


def _write(call: TensorsCall, out: Any, tensordict: TensorDictBase) -> None:
    call.write(tensordict, out)


def _label(metadata: TensorDictBase, ids: Array) -> None:
    """Have the metadata show these trajectory ids."""
    metadata._set_str("traj_ids", torch.from_numpy(ids), inplace=False, validated=True)


def _take_over(td: TensorDictBase, carrier: TensorDictBase) -> None:
    """Give the carrier the other's entries."""
    for name in carrier.keys() - td.keys():
        carrier.del_(name)
    for name, value in td.items():
        carrier.set(name, value)
