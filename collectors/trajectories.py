"""Trajectories: their identifiers and ends, splitting batches by trajectory, and assembling whole trajectories from
rollouts. Also the processing of a batch before the user gets it.

Names and results follow TorchRL's "Collector Internals" page (Trajectory IDs), ``split_trajectories``, and its
collectors' ``trajs_per_batch``, ``trajs_per_write`` and ``traj_format``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, pad
from torch.nn.utils.rnn import pad_sequence

from asyncsync.collectors.arguments import whole_number

Key = str | tuple[str, ...]
FLAGS = ("done", "terminated", "truncated")
"""The names of flags with which environments mark the end of a trajectory."""
IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")

REMEMBERED_ROLLOUTS = 10_000
"""A trajectory with missing frames is forgotten this many rollouts after the last one that had steps of it. It may
never end, because a reset may have cut it off; but if its worker is slow, its end comes late."""


def path_of(key: Key) -> tuple[str, ...]:
    """The key as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


class _TrajectoryPool:
    """Hands out trajectory identifiers 0, 1, 2, …, each once. Thread-safe. A subclass overrides :meth:`advance` to
    share the counter between processes. It never goes back, because several collectors may share it, and each may
    load its own saved state."""

    _step = 1

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def get_traj_and_increment(self, n: int = 1, device: torch.device | str | None = None) -> torch.Tensor:
        """``n`` fresh identifiers: int64, shape ``[n]``."""
        ids = torch.from_numpy(self.draw(int(n)))
        return ids if device is None else ids.to(device)

    def draw(self, n: int) -> np.ndarray[Any, Any]:
        """The same as a NumPy array, in a fifth of the time."""
        first = self.advance(n)
        return np.arange(first, first + n * self._step, self._step)

    def advance(self, n: int, least: int = 0) -> int:
        """Raise the counter to ``least`` if it is lower, then add ``n``. Returns the counter before adding."""
        with self._lock:
            first = max(self._next, least)
            self._next = first + n
        return first

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``{"traj_id": the next identifier}``."""
        return {"traj_id": torch.tensor(self.advance(0))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a result of :meth:`state_dict`, unless the counter is already higher."""
        self.advance(0, least=int(state_dict["traj_id"]))


class StridedPool(_TrajectoryPool):
    """Hands out every ``step``-th identifier, from ``first`` on. So pools with the same step and different firsts never
    hand out the same identifier, even in different processes. ``pool`` is the counter."""

    def __init__(self, pool: _TrajectoryPool, first: int, step: int) -> None:
        self._pool, self._first, self._step = pool, first, step

    def advance(self, n: int, least: int = 0) -> int:
        counted = max(0, -(-(least - self._first) // self._step))
        return self._first + self._step * self._pool.advance(n, counted)


def _aggregate_end_of_traj(data: TensorDictBase, done_keys: Iterable[Key]) -> torch.Tensor:
    """A mask of ``data.batch_size``: True where any of these keys has a True. Raises KeyError: a key is missing."""
    n = data.batch_dims
    ended: torch.Tensor | None = None
    for key in done_keys:
        done = data.get(key, None)
        if done is None:
            raise KeyError(
                f"the environment's step has no {key!r} under 'next' to mark the end of a trajectory (it has "
                f"{sorted(map(str, data.keys()))}): let step_and_maybe_reset() set it (bool, [*batch_size, 1]), or "
                "name the environment's own flags in its done_keys"
            )
        if done.ndim > n:
            done = done.squeeze(-1) if done.ndim == n + 1 and done.shape[-1] == 1 else done.flatten(n).any(-1)
        ended = done if ended is None else ended | done
    if ended is None:
        return torch.zeros(data.batch_size, dtype=torch.bool, device=data.device)
    return ended


def mask_like(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The mask, of the batch's shape, with added dimensions so that it broadcasts with an entry of the batch."""
    return mask.to(value.device).reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))


def zeroed(value: Any, mask: torch.Tensor) -> Any:
    """The entry, a tensor or TensorDict, with zeros where the mask, of the batch's shape, is True."""
    if isinstance(value, TensorDictBase):
        return value.apply(lambda each: zeroed(each, mask))
    return torch.where(mask_like(mask, value), torch.zeros_like(value), value)


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: str | None = None,
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
) -> TensorDictBase:
    """Split a batch into one row per trajectory, zero-padded: ``[*batch, T]`` becomes ``[trajectories, longest]``.

    A batch with one trajectory per row keeps its shape (``[T]`` becomes ``[1, T]``). If the batch has a mask, because
    it was cut or split before, its padding steps belong to no trajectory.

    Args:
        rollout_tensordict: a batch, time last. It is not changed.
        prefix: key under which to read ``"traj_ids"`` and to write ``"mask"`` (bool, False on padding). None:
            ``"collector"`` if the batch has that key, else the root.
        trajectory_key: key of the trajectory ids, instead of ``prefix``. The mask is written beside them.
        done_key: if there are no ids, ``("next", done_key)`` marks the ends of trajectories, and ids are written. None:
            ``"done"``.

    Raises:
        KeyError: the batch has neither trajectory ids nor the done key.
    """
    batch = rollout_tensordict.copy()
    if prefix is None and "collector" in batch.keys():  # noqa: SIM118
        prefix = "collector"
    ids_key = path_of(trajectory_key or ("traj_ids" if prefix is None else (prefix, "traj_ids")))
    mask_key = (*ids_key[:-1], "mask")
    ids = batch.get(ids_key, None)
    if ids is None:
        # Count the ends before each step, along time and from row to row. The end of a row ends its trajectory.
        done = batch["next", *path_of(done_key or "done")]
        ends = done.flatten(batch.ndim).any(-1) if done.ndim > batch.ndim else done.clone()
        ends[..., -1] = True
        ids = (ends.flatten().cumsum(0) - ends.flatten().long()).reshape(ends.shape)
        batch.set(ids_key, ids)
    valid = batch.get(mask_key, None)
    is_padded = valid is not None and not bool(valid.all())
    found = ids[valid] if is_padded else ids.reshape(-1)
    lengths = found.unique_consecutive(return_counts=True)[1].tolist()
    if not is_padded and set(lengths) == {ids.shape[-1]}:
        batch.set(mask_key, torch.ones(batch.shape, device=batch.device, dtype=torch.bool))
        return batch.unsqueeze(0) if batch.ndim == 1 else batch
    return padded(batch[valid] if is_padded else batch.reshape(-1), lengths, mask_key)


def _is_plain(flat: TensorDictBase) -> bool:
    return type(flat) is TensorDict and all(
        isinstance(value, torch.Tensor) or _is_plain(value) for value in flat.values()
    )


def padded(flat: TensorDictBase, lengths: list[int], mask_key: Key = MASK) -> TensorDictBase:
    """Trajectories that lie one after another in ``flat``, as ``[trajectories, longest]``, zero-padded, with a mask:
    True on steps. This adds the mask to ``flat``, too."""
    flat.set(mask_key, torch.ones(flat.shape, device=flat.device, dtype=torch.bool))
    longest = max(lengths)
    if not _is_plain(flat):
        return torch.stack([pad(row, [0, longest - row.shape[0]]) for row in flat.split(lengths, 0)], 0)
    # Tensor by tensor, instead of one small TensorDict per trajectory. As a stack of them, this drops dimension names.
    stacked: TensorDictBase = flat.apply(
        lambda value: pad_sequence([*torch.split(value, lengths)], batch_first=True), batch_size=[len(lengths), longest]
    )
    return stacked


def processed(batch: TensorDictBase, postproc: Callable[[Any], Any] | None, *, split_trajs: bool) -> TensorDictBase:
    """Split the batch, call ``postproc``, and drop entries whose names begin with an underscore. Raises TypeError:
    postproc returned no TensorDict."""
    if split_trajs:
        batch = split_trajectories(batch, prefix="collector")
    if postproc is not None:
        batch = postproc(batch)
        if not isinstance(batch, TensorDictBase):
            raise TypeError(f"postproc returned a {type(batch).__name__}, but must return the batch, a TensorDict")
    private = [path for path in map(path_of, batch.keys(True)) if any(name.startswith("_") for name in path)]
    return batch.exclude(*private, inplace=True) if private else batch


def moved_postproc(postproc: Any, device: torch.device | None) -> Any:
    """The postproc, moved to the device of batches if it has a method ``to``."""
    if device is None or not hasattr(postproc, "to"):
        return postproc
    there = postproc.to(device)
    return postproc if there is None else there


# -- whole trajectories ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """The state of :class:`WholeTrajectories`, replaced as a whole, so Ctrl-C cannot leave half a rollout."""

    begun: dict[int, list[TensorDictBase]]  # the pieces of unfinished trajectories, by identifier
    ended: list[TensorDictBase]
    broken: dict[int, int]  # trajectories with missing frames: the last rollout that may have had their steps
    taken: int  # number of rollouts so far


class WholeTrajectories:
    """Assembles whole trajectories from the pieces in rollouts. A trajectory is whole when its last step has
    ``("next", "done")``, or ``"terminated"`` or ``"truncated"`` there. Thread-safe.

    Args:
        least: :meth:`pop` returns nothing until this many trajectories have ended.
        most: :meth:`pop` returns at most this many trajectories.
        is_padded: True: batches are ``[trajectories, longest]``, zero-padded, with ``("collector", "mask")``. False:
            ``[frames]``, one trajectory after another.
        ends_early: a trajectory that a rollout leaves unfinished never ends, because each rollout begins with a reset.
    """

    def __init__(self, least: int, most: int, *, is_padded: bool, ends_early: bool = False) -> None:
        self._min_ready, self._max_popped = least, most
        self._is_padded = is_padded
        self._ends_early = ends_early
        self._lock = threading.Lock()
        self._state = _State({}, [], {}, 0)

    def take(self, rollout: TensorDictBase) -> None:
        """Copy the frames of a rollout, time last. Frames with a negative identifier are padding. Raises KeyError:
        postproc removed the identifiers or the done flags."""
        found = sorted(_pieces(rollout), key=lambda piece: piece[0])
        with self._lock:
            state = self._state
            begun, ended, taken = dict(state.begun), list(state.ended), state.taken + 1
            broken = {n: last for n, last in state.broken.items() if last >= taken - REMEMBERED_ROLLOUTS}
            for number, piece, is_over in found:
                if broken.pop(number, None) is not None:
                    if not is_over:
                        broken[number] = taken
                    continue
                pieces = [*begun.pop(number, ()), piece]
                if is_over:
                    ended.append(_concatenated(pieces))
                else:
                    begun[number] = pieces
            self._state = _State({} if self._ends_early else begun, ended, broken, taken)

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`pop` would return trajectories."""
        return len(self._state.ended) >= self._min_ready

    def pop(self) -> TensorDictBase | None:
        """The trajectories that ended first. None: not enough have ended yet."""
        with self._lock:
            if not self.is_ready:
                return None
            ended = self._state.ended
            chosen = ended[: self._max_popped]
            batch = _concatenated(chosen)
            if self._is_padded:
                batch = padded(batch, [each.batch_size[0] for each in chosen])
            self._state = replace(self._state, ended=ended[self._max_popped :])
        return batch

    def break_off(self, numbers: Iterable[int]) -> None:
        """Drop the trajectories with these identifiers, because some of their frames will not come."""
        with self._lock:
            broken = self._state.broken | dict.fromkeys(numbers, self._state.taken)
            begun = {number: pieces for number, pieces in self._state.begun.items() if number not in broken}
            self._state = replace(self._state, begun=begun, broken=broken)

    def break_off_where(self, condition: Callable[[int], bool]) -> None:
        """Drop the unfinished trajectories whose identifiers satisfy this condition."""
        self.break_off([number for number in self._state.begun if condition(number)])

    def lose_rollout(self, ids: torch.Tensor | None = None) -> None:
        """A rollout was lost: drop all unfinished trajectories, and those with these identifiers."""
        self.break_off([*self._state.begun, *([] if ids is None else ids.flatten().tolist())])

    def clear(self) -> None:
        """Environments were reset: drop all trajectories."""
        self.lose_rollout()
        with self._lock:
            self._state = replace(self._state, ended=[])


def check_trajectories(**given: Any) -> WholeTrajectories | None:
    """The :class:`WholeTrajectories` for a collector with these options; None: ``trajs_per_batch`` is None. Raises
    TypeError, ValueError: options exclude each other."""
    count, most, layout = given["trajs_per_batch"], given["trajs_per_write"], given["traj_format"]
    for name in ("split_trajs", "trajs_per_batch"):
        if given[name] and not given["track_traj_ids"]:
            raise ValueError(f"{name} needs track_traj_ids=True, because it finds trajectories by their ids")
    if count is None:
        if layout == "cat" or most is not None:
            name = "traj_format" if most is None else "trajs_per_write"
            raise ValueError(f"{name} needs trajs_per_batch: pass trajs_per_batch= too, or leave {name} out")
        return None
    count = whole_number("trajs_per_batch", count, 1)
    if given["split_trajs"]:
        raise ValueError("trajs_per_batch and split_trajs exclude each other: leave split_trajs out")
    ends_early = given["reset_at_each_iter"]
    if given["replay_buffer"] is None:
        if most is not None:
            raise ValueError("trajs_per_write needs a replay buffer: pass replay_buffer=, or leave trajs_per_write out")
        return WholeTrajectories(count, count, is_padded=layout != "cat", ends_early=ends_early)
    if not given["extend_buffer"]:
        raise ValueError("trajs_per_batch writes whole trajectories, not single frames: leave extend_buffer out")
    most = sys.maxsize if most is None else whole_number("trajs_per_write", most, 1)
    return WholeTrajectories(1, most, is_padded=False, ends_early=ends_early)


def _pieces(rollout: TensorDictBase) -> Iterator[tuple[int, TensorDictBase, bool]]:
    """Of each trajectory: its identifier; its frames, copied so that the next rollout may reuse the memory; and whether
    the last of them ends it."""
    if rollout.ndim > 1:
        for row in rollout.unbind(0):
            yield from _pieces(row)
        return
    ids = rollout.get(IDS, None)
    if ids is None:
        raise KeyError(f"trajs_per_batch needs {IDS} in every rollout: postproc must not remove it")
    numbers, lengths = ids.unique_consecutive(return_counts=True)
    for number, frames in zip(numbers.tolist(), rollout.split(lengths.tolist(), 0), strict=True):
        if number < 0:
            continue
        after = frames.get("next", None)
        flags = [] if after is None else [key for key in after.keys(True, True) if path_of(key)[-1] in FLAGS]
        if not flags:
            raise KeyError("trajs_per_batch needs ('next', 'done') in every rollout: postproc must not remove it")
        own = [key for key in flags if isinstance(key, str)]  # if there are none: the flags of several agents
        yield number, frames.clone(), any(bool(after.get(key)[-1].any()) for key in own or flags)


def _concatenated(pieces: list[TensorDictBase]) -> TensorDictBase:
    [first, *others] = pieces
    batch: TensorDictBase = torch.cat(pieces, 0) if others else first
    return batch
