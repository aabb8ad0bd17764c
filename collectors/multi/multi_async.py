"""MultiAsyncCollector: the workers' batches, each as it comes."""

from __future__ import annotations

from tensordict import TensorDictBase

from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.iteration import Made

__all__ = ["MultiAsyncCollector"]


class MultiAsyncCollector(MultiCollector):
    """Worker processes that step environments, at their own pace: a batch is one worker's rollout, first come, first
    served, and its worker has begun the next one when it is handed out.

    See :class:`~asyncsync.collectors.MultiCollector` for the arguments; ``cat_results`` and ``preemptive_threshold``
    are not for this class.
    """

    def _begin(self) -> None:
        super()._begin()
        self._places = [self._group.places([worker], -1) for worker in range(self.num_workers)]

    def _split(self, frames: int) -> list[int]:
        return [frames] * self.num_workers

    def _frames_of_a_batch(self) -> int:
        return max(self._requested)

    async def _produce(self) -> Made:
        if self._made is None:
            for worker in range(self.num_workers):
                self._ask_if_wanted(worker)
            self._request_rollouts()
            result = await self._group.until(self._next_result)
            worker = result.worker
            places, place = self._places[worker], self._busy.pop(worker).request.place
            self._made = Made(places, place, [result])
            self._frames += result.frames
            self._iter += 1
            self._since[worker] += 1
            if self.replay_buffer is None:
                places.learn(place, [result])
        worker = self._made.results[0].worker
        if self._is_due(worker):
            await self._update([worker])
        self._ask_if_wanted(worker)
        self._request_rollouts()
        made, self._made = self._made, None
        return made

    def _ask_if_wanted(self, worker: int) -> None:
        if worker in self._busy or self._asked >= self.total_frames:
            return
        self._serial += 1
        self._busy[worker] = self._rollout(worker, self._places[worker].next())

    def _is_in_place(self, made: Made) -> bool:
        return True  # one part, wherever it lies, is the batch

    def _assembled(self, made: Made) -> TensorDictBase:
        if made.places.is_complete(made.place, made.results):
            return made.places.whole(made.place)
        [batch] = made.places.parts(made.place, made.results)
        return batch

    def _close_batches(self) -> None:
        super()._close_batches()
        for places in self._places:
            places.close()
