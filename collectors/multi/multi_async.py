"""MultiAsyncCollector: the workers' batches, each as it comes."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.multi.batches import Made
from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.driver import Driver


class AsyncDriver(Driver):
    """A batch is one worker's rollout."""

    @staticmethod
    def frames_of_batch(frames: list[int]) -> int:
        return max(frames)

    @staticmethod
    def split(frames: int, count: int) -> list[int]:
        return [frames] * count

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = [self._group.places([worker], -1) for worker in range(len(self._arguments.frames))]

    async def produce(self) -> Made:
        results = self._group.results
        if self._made is None:
            for worker in range(len(self._places)):
                self._ask_if_wanted(worker)
            result = await self._group.until(lambda: results.popleft() if results else None)
            worker = result.worker
            self._made = self._done(self._places[worker], self.busy.pop(worker).place, [result])
        worker = self._made.results[0].worker
        if self._is_due(worker):
            await self._update([worker])
        self._ask_if_wanted(worker)
        made, self._made = self._made, None
        return made

    def _ask_if_wanted(self, worker: int) -> None:
        # Frames of all rollouts so far, and of those under way if they are not cut.
        frames = self.frames + sum([self._arguments.frames[other] for other in self.busy])
        if worker not in self.busy and frames < self._arguments.total_frames:
            place = self._places[worker].next()
            self._serial += 1
            self._request(worker, place, frames)

    def together(self, parts: list[TensorDictBase]) -> TensorDictBase:
        return parts[0]


class MultiAsyncCollector(MultiCollector):
    """Steps environments in worker processes, each at its own pace. A batch is one worker's rollout, in order of
    arrival. By then, the worker has begun its next rollout.

    See :class:`~asyncsync.collectors.MultiCollector` for the arguments. This class does not take ``cat_results`` and
    ``preemptive_threshold``.
    """

    _driver_class = AsyncDriver
