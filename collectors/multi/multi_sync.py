"""MultiSyncCollector: one batch of all workers' rollouts."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, pad

from asyncsync.collectors.arguments import warn_rounding
from asyncsync.collectors.multi.batches import Made
from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.driver import Driver

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


class SyncDriver(Driver):
    """A batch is a rollout of every worker."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._dim, self._threshold = self._arguments.dim, self._arguments.threshold
        self._workers = range(len(self._arguments.frames))
        self._places = [self._group.places(self._workers, self._dim)]

    @staticmethod
    def frames_of_batch(frames: list[int]) -> int:
        return sum(frames)

    @staticmethod
    def split(frames: int, count: int) -> list[int]:
        share = math.ceil(frames / count)
        if frames % count:
            warn_rounding(
                f"frames_per_batch ({frames}) is not exactly divisible by the number of workers ({count})",
                share * count,
            )
        return [share] * count

    async def produce(self) -> Made:
        if not self.busy:
            if any(self._is_due(worker) for worker in self._workers):
                await self._update(None)
            place = self._places[0].next()
            self._serial += 1
            for worker in self._workers:
                self._request(worker, place, self.frames)
        place = self.busy[0].place
        await self._group.until(self._are_done)
        results = [self._results[worker] for worker in self._workers]
        self.busy, self._results = {}, {}
        return self._done(self._places[0], place, results)

    def _free_batch(self) -> int | None:
        # Whole trajectories are written when they have ended: rollouts do not have the same number of frames.
        arguments = self._arguments
        return None if arguments.writes_trajectories else self.frames_of_batch(arguments.frames)

    def _are_done(self) -> bool:
        """Whether all rollouts are. When enough of them are, the others are cut."""
        while self._group.results:
            result = self._group.results.popleft()
            self._results[result.worker] = result
        done, count = len(self._results), len(self._workers)
        if self._threshold < 1 and done >= int(count * self._threshold):
            self._group.cut(self._serial)
        return done == count

    def assembled(self, made: Made) -> TensorDictBase:
        place, results = made.place, made.results
        if self._dim is not None or not place.is_complete(results):
            return super().assembled(made)
        batch = place.whole()
        for part, missing in zip(batch, place.missing(results), strict=True):
            if missing:  # the rollout was cut before: frames of an earlier batch lie there
                lacking = part[..., -missing:]
                lacking.zero_()
                if self._arguments.track_traj_ids:
                    lacking.get(IDS).fill_(-1)
        return self._masked(batch, [result.steps for result in results])

    def together(self, parts: list[TensorDictBase]) -> TensorDictBase:
        if self._dim is not None:
            batch: TensorDictBase = torch.cat(parts, self._dim)
            batch.refine_names(..., "time")
            return batch
        steps = [part.batch_size[-1] for part in parts]
        if self._threshold < 1:
            parts = [_padded(part, max(steps)) for part in parts]
        return self._masked(TensorDict.maybe_dense_stack(parts, 0), steps)

    def _masked(self, batch: TensorDictBase, steps: list[int]) -> TensorDictBase:
        if self._threshold < 1:
            shape = batch.batch_size
            ends = torch.tensor(steps).reshape(-1, *[1] * (len(shape) - 1))
            batch.set(MASK, (torch.arange(shape[-1]) < ends).expand(shape).clone())
        return batch


class MultiSyncCollector(MultiCollector):
    """Steps environments in worker processes, in step with each other. A batch has one rollout of every worker. All
    act with the same weights, unless new ones are sent meanwhile. Workers begin when the caller asks for the batch.

    See :class:`~asyncsync.collectors.MultiCollector` for the arguments. ``cat_results``: ``"stack"`` (default) gives
    ``[workers, *env.batch_size, time]``, an int concatenates along that dimension of ``[*env.batch_size, time]``.

    ``preemptive_threshold`` may cut rollouts. In a stacked batch, missing frames are zero, with
    ``("collector", "traj_ids")`` -1 and ``("collector", "mask")`` False. A concatenated batch omits them.
    """

    _driver_class = SyncDriver

    def _check_results(
        self, cat_results: str | int | None, preemptive_threshold: float | None
    ) -> tuple[int | None, float]:
        if cat_results is None:
            cat_results = "stack"
        if cat_results != "stack" and (not isinstance(cat_results, int) or isinstance(cat_results, bool)):
            raise ValueError(f"cat_results must be 'stack' or a dimension (an int), not {cat_results!r}")
        self.cat_results = cat_results
        threshold = 1.0 if preemptive_threshold is None else float(preemptive_threshold)
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"preemptive_threshold must be between 0 and 1, not {preemptive_threshold}")
        self.preemptive_threshold = threshold
        return None if isinstance(cat_results, str) else cat_results, threshold

    def _check_dims(self, dims: int | None) -> None:
        dim = self._arguments.dim
        if dim is None or dims is None:
            return
        if not -dims - 1 <= dim <= dims:
            raise ValueError(
                f"cat_results={dim} is not a dimension of a batch with {dims + 1} dimensions: choose one, or 'stack'"
            )
        if self.preemptive_threshold < 1 and dim % (dims + 1) != dims:
            raise ValueError(
                f"cat_results={dim} cannot concatenate rollouts that preemptive_threshold cuts: use cat_results=-1 "
                "or 'stack'"
            )


def _padded(part: TensorDictBase, steps: int) -> TensorDictBase:
    missing = steps - part.batch_size[-1]
    if not missing:
        return part
    padded: TensorDictBase = pad(part, [0, 0] * (part.ndim - 1) + [0, missing], value=0.0)
    if IDS in padded.keys(True):
        padded.get(IDS)[..., -missing:] = -1
    return padded
