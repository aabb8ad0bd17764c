"""MultiAsyncCollector: the workers' batches, each as it comes."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.iteration import Producing, Rollout
from asyncsync.collectors.multi.needs import MESSAGES, Update
from asyncsync.collectors.workers.channel import loads
from asyncsync.collectors.workers.shared_batches import Arrangement, Slots

__all__ = ["MultiAsyncCollector"]

SPARE_SLOTS = 2  # per worker: the one that is written, and the one that is read


class MultiAsyncCollector(MultiCollector):
    """Worker processes that step environments, at their own pace: a batch is one worker's rollout, first come, first
    served, and its worker has begun the next one when it is handed out.

    See :class:`~asyncsync.collectors.MultiCollector` for the arguments; ``cat_results`` and ``preemptive_threshold``
    are not for this class.
    """

    def _begin(self) -> None:
        super()._begin()
        self._slots: dict[int, Slots] = {}
        self._unlike: dict[int, Arrangement] = {}  # of the latest batch that did not fit

    def _split(self, frames: int) -> list[int]:
        return [frames] * self.num_workers

    def _frames_of_a_batch(self) -> int:
        return max(self._requested)

    def _produce(self) -> Producing:
        if self._made is None:
            for worker in range(self.num_workers):
                self._ask_if_wanted(worker)
            self._post_rollouts()
            while (first := self._first_message()) is None:
                yield MESSAGES
            worker, message = first
            batch = None if self.replay_buffer is not None else self._batch(self._busy[worker], worker, message)
            since, frames = self._since, message[4]
            self._made = (worker, batch)
            self._frames += frames
            self._iter += 1
            since[worker] += 1
            del self._busy[worker]
        self._first_message()  # the one that was dealt with leaves the inbox
        worker, _ = self._made
        if self._is_due(worker):
            yield Update([worker])
        self._ask_if_wanted(worker)
        self._post_rollouts()
        return (yield from self._hand_out())

    def _ask_if_wanted(self, worker: int) -> None:
        if worker in self._busy or self._asked >= self.total_frames:
            return
        slot, grant = self._slots[worker].grant() if worker in self._slots else (None, None)
        self._serial += 1
        self._busy[worker] = self._rollout(worker, slot, grant)

    def _let_go(self) -> None:
        self._slots.clear()
        self._busy.clear()

    def _batch(self, rollout: Rollout, worker: int, message: tuple[Any, ...]) -> TensorDictBase:
        _, _, written, steps, _, pickled, layout = message
        slots = self._slots.get(worker)
        before = self._unlike.pop(worker, None)
        if written:
            assert slots is not None
            batch = slots.batch(rollout.slot)
            return batch if batch.batch_size[-1] == steps else batch[..., :steps]
        if slots is not None and rollout.slot is not None:
            slots.give_back(rollout.slot)
        arrangement = Arrangement.of([layout], -1)
        if arrangement is None:
            self._slots.pop(worker, None)
        elif slots is None or (slots.arrangement != arrangement and before == arrangement):
            self._slots.pop(worker, None)
            self._slots[worker] = self._taught(arrangement, SPARE_SLOTS, [worker])
        elif slots.arrangement != arrangement:  # one that comes once in a while is not worth a slot
            self._unlike[worker] = arrangement
        return loads(pickled)
