"""Whole trajectories out of rollouts, in which trajectories begin and end anywhere.

    whole = WholeTrajectories(8, 8, is_padded=True)
    whole.take(rollout)                         # [*batch, time]; once for each rollout, in order
    while (batch := whole.pop()) is not None:   # [8, longest]
        train(batch)

Names and results follow TorchRL's collectors (``trajs_per_batch``, ``trajs_per_write``, ``traj_format``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.arguments import whole
from asyncsync.collectors.trajectories import FLAGS, padded, path_of

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")

REMEMBERED = 10_000
"""Rollouts that a trajectory of which frames are missing is remembered for after the last one that had steps of it: a
reset may have ended it, or its worker is so much slower than the others."""


class _State(NamedTuple):
    """Trajectories: the pieces of those that have begun, by identifier; those that have ended; and the identifiers of
    those of which frames are missing, each with the last rollout that may have had steps of it. ``taken`` counts
    rollouts."""

    begun: dict[int, list[TensorDictBase]]
    ended: list[TensorDictBase]
    broken: dict[int, int]
    taken: int


class WholeTrajectories:
    """Puts the pieces of each trajectory together. A trajectory is whole when the last of its steps says so by
    ``("next", "done")``, or by ``"terminated"`` or ``"truncated"`` there. Safe in threads.

    Args:
        least: trajectories of which there must be so many before they are handed out.
        most: trajectories that are handed out at once.
        is_padded: they are handed out as ``[trajectories, longest]``, padded with zeros, with ``("collector",
            "mask")``; else as ``[frames]``, one after another.
        ends_early: those that a rollout leaves unfinished will never end: the next one begins with a reset.
    """

    def __init__(self, least: int, most: int, *, is_padded: bool, ends_early: bool = False) -> None:
        self._least, self._most = least, most
        self._is_padded = is_padded
        self._ends_early = ends_early
        self._lock = threading.Lock()
        self._state = _State({}, [], {}, 0)

    def take(self, rollout: TensorDictBase) -> None:
        """Copy the frames of a rollout, time last. Those whose identifier is negative are padding.

        Raises:
            KeyError: postproc has removed what tells trajectories apart, or what ends them.
        """
        found = sorted(_pieces(rollout), key=lambda piece: piece[0])
        with self._lock:
            begun, ended, taken = dict(self._state.begun), list(self._state.ended), self._state.taken + 1
            broken = {n: last for n, last in self._state.broken.items() if last >= taken - REMEMBERED}
            for number, piece in found:
                is_over = _ends(piece)
                if broken.pop(number, None) is not None:
                    if not is_over:
                        broken[number] = taken
                    continue
                pieces = [*begun.pop(number, ()), piece]
                if is_over:
                    ended.append(_joined(pieces))
                else:
                    begun[number] = pieces
            # At once: an interruption leaves all of the rollout, or nothing.
            self._state = _State({} if self._ends_early else begun, ended, broken, taken)

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`pop` has something to hand out."""
        return len(self._state.ended) >= self._least

    def pop(self) -> TensorDictBase | None:
        """The trajectories that have ended first; None: there are not enough yet."""
        with self._lock:
            if not self.is_ready:
                return None
            begun, ended, broken, taken = self._state
            chosen, rest = ended[: self._most], ended[self._most :]
            batch = _joined(chosen)
            if self._is_padded:
                batch.set(MASK, torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device))
                batch = padded(batch, [each.batch_size[0] for each in chosen])
            self._state = _State(begun, rest, broken, taken)
        return batch

    def break_off(self, numbers: Iterable[int]) -> None:
        """Leave out the trajectories with these identifiers: some of their frames will not come."""
        with self._lock:
            begun, ended, broken, taken = self._state
            broken = broken | dict.fromkeys(numbers, taken)
            begun = {number: pieces for number, pieces in begun.items() if number not in broken}
            self._state = _State(begun, ended, broken, taken)

    def break_off_those(self, are: Callable[[int], bool]) -> None:
        """Leave out the trajectories that have begun and whose identifiers are such."""
        self.break_off([number for number in self._state.begun if are(number)])

    def lose_rollout(self, ids: torch.Tensor | None = None) -> None:
        """A rollout was lost: leave out all that has not ended, and the trajectories with these identifiers."""
        self.break_off([*self._state.begun, *([] if ids is None else ids.flatten().tolist())])

    def clear(self) -> None:
        """Environments were reset: leave out all that has come so far."""
        self.lose_rollout()
        with self._lock:
            self._state = _State(self._state.begun, [], self._state.broken, self._state.taken)


def check_trajectories(
    *,
    trajs_per_batch: Any,
    trajs_per_write: Any,
    traj_format: Any,
    replay_buffer: Any,
    extend_buffer: bool,
    split_trajs: bool | None,
    track_traj_ids: bool,
    reset_at_each_iter: bool,
    **others: Any,
) -> WholeTrajectories | None:
    """What puts trajectories together for a collector with these arguments, all of its constructor's; None: nothing
    does. Raises TypeError, ValueError: arguments that exclude each other."""
    if traj_format not in (None, "padded", "cat"):
        raise ValueError(f"traj_format must be 'padded' or 'cat', not {traj_format!r}")
    if split_trajs and not track_traj_ids:
        raise ValueError("split_trajs=True needs track_traj_ids=True, because it splits batches by trajectory ids")
    if trajs_per_batch is None:
        if traj_format == "cat" or trajs_per_write is not None:
            name = "trajs_per_write" if trajs_per_write is not None else "traj_format"
            raise ValueError(f"{name} needs trajs_per_batch: pass trajs_per_batch= too, or leave {name} out")
        return None
    count = whole("trajs_per_batch", trajs_per_batch, 1)
    if split_trajs:
        raise ValueError("trajs_per_batch and split_trajs exclude each other: leave split_trajs out")
    if not track_traj_ids:
        raise ValueError("trajs_per_batch needs track_traj_ids=True, because it tells trajectories apart by ids")
    if replay_buffer is None:
        if trajs_per_write is not None:
            raise ValueError("trajs_per_write needs a replay buffer: pass replay_buffer=, or leave trajs_per_write out")
        return WholeTrajectories(count, count, is_padded=traj_format != "cat", ends_early=reset_at_each_iter)
    if not extend_buffer:
        raise ValueError("trajs_per_batch writes whole trajectories, not frame by frame: leave extend_buffer out")
    most = sys.maxsize if trajs_per_write is None else whole("trajs_per_write", trajs_per_write, 1)
    return WholeTrajectories(1, most, is_padded=False, ends_early=reset_at_each_iter)


def _pieces(rollout: TensorDictBase) -> Iterator[tuple[int, TensorDictBase]]:
    """Each trajectory's identifier and frames, copied: shared memory and the memory of the next rollout stay free."""
    if rollout.ndim > 1:
        for row in rollout.unbind(0):
            yield from _pieces(row)
        return
    ids = rollout.get(IDS, None)
    if ids is None:
        raise KeyError(f"trajs_per_batch needs {IDS} in every rollout: postproc must not remove it")
    start = 0
    for number, frames in groupby(ids.tolist()):
        end = start + sum(1 for _ in frames)
        if number >= 0:
            yield number, rollout[start:end].clone()
        start = end


def _ends(piece: TensorDictBase) -> bool:
    """Whether the trajectory ends with the last frame of this piece."""
    after = piece.get("next", None)
    flags = [] if after is None else [key for key in after.keys(True, True) if path_of(key)[-1] in FLAGS]
    if not flags:
        raise KeyError("trajs_per_batch needs ('next', 'done') in every rollout: postproc must not remove it")
    own = [key for key in flags if isinstance(key, str)]  # else those of several agents
    return any(bool(after.get(key)[-1].any()) for key in own or flags)


def _joined(pieces: list[TensorDictBase]) -> TensorDictBase:
    [first, *others] = pieces
    batch: TensorDictBase = torch.cat(pieces, 0) if others else first
    return batch
