"""MultiAsyncCollector: the workers' batches, each as it comes."""

from __future__ import annotations

from tensordict import TensorDictBase

from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.iteration import Producing, Rollout
from asyncsync.collectors.multi.needs import MESSAGES, Update
from asyncsync.collectors.workers.group import RolloutResult

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

    def _produce(self) -> Producing:
        if self._made is None:
            for worker in range(self.num_workers):
                self._ask_if_wanted(worker)
            self._request_rollouts()
            while (result := self._first_result()) is None:
                yield MESSAGES
            worker = result.worker
            batch = None if self.replay_buffer is not None else self._batch(self._busy[worker], result)
            since, frames = self._since, result.frames
            self._made = (worker, batch)
            self._frames += frames
            self._iter += 1
            since[worker] += 1
            del self._busy[worker]
        self._first_result()  # the one that was dealt with leaves the group's results
        worker, _ = self._made
        if self._is_due(worker):
            yield Update([worker])
        self._ask_if_wanted(worker)
        self._request_rollouts()
        return (yield from self._hand_out())

    def _ask_if_wanted(self, worker: int) -> None:
        if worker in self._busy or self._asked >= self.total_frames:
            return
        self._serial += 1
        self._busy[worker] = self._rollout(worker, self._places[worker].next())

    def _batch(self, rollout: Rollout, result: RolloutResult) -> TensorDictBase:
        places, place = self._places[result.worker], rollout.request.place
        whole = places.is_complete(place, [result])
        batch = places.whole(place) if whole else places.parts(place, [result])[0]
        places.learn(place, [result])
        return batch

    def _close_places(self) -> None:
        for places in self._places:
            places.close()
        self._busy.clear()
