"""MultiAsyncCollector: the workers' batches, each as it comes."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.batches import Arrangement, Slots
from asyncsync.collectors.commanding import Producing
from asyncsync.collectors.failures import loads
from asyncsync.collectors.multi import MultiCollector
from asyncsync.collectors.needs import MESSAGES, Update

__all__ = ["MultiAsyncCollector"]

SPARE_SLOTS = 2  # per worker: the one that is written, and the one that is read


class MultiAsyncCollector(MultiCollector):
    """Worker processes that step environments, at their own pace: a batch is one worker's rollout, first come, first
    served, and its worker has begun the next one when it is handed out.

    See :class:`~asyncsync.collectors.MultiCollector` for the arguments; ``cat_results`` and ``preemptive_threshold``
    are not for this class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._slots: dict[int, Slots] = {}
        self._granted: dict[int, Any] = {}
        super().__init__(*args, **kwargs)

    def _split(self, frames: int) -> list[int]:
        return [frames] * self.num_workers

    def _frames_of_a_batch(self) -> int:
        return max(self._requested)

    def _produce(self) -> Producing:
        for worker in range(self.num_workers):
            if worker not in self._busy:
                self._ask_if_wanted(worker)
        while not self._crew.inbox:
            yield MESSAGES
        worker, message = self._received()
        self._frames += message[4]
        batch = None if self.replay_buffer is not None else self._batch(worker, message)
        if self._is_due(worker):
            yield Update([worker])
        self._ask_if_wanted(worker)
        return None if batch is None else self._processed(batch)

    def _ask_if_wanted(self, worker: int) -> None:
        if worker in self._busy or self._asked >= self.total_frames:
            return
        grant = None
        if worker in self._slots:
            self._granted[worker], grant = self._slots[worker].grant()
        self._serial += 1
        self._ask(worker, grant)
        self._asked += self._requested[worker]

    def _let_go(self) -> None:
        self._slots.clear()
        self._granted.clear()

    def _batch(self, worker: int, message: tuple[Any, ...]) -> TensorDictBase:
        _, _, written, steps, _, pickled, layout = message
        slots, slot = self._slots.get(worker), self._granted.pop(worker, None)
        if written:
            assert slots is not None
            batch = slots.batch(slot)
            return batch if batch.batch_size[-1] == steps else batch[..., :steps]
        if slots is not None and slot is not None:
            slots.give_back(slot)
        arrangement = Arrangement.of([layout], -1)
        if arrangement is None:
            self._slots.pop(worker, None)
        elif slots is None or slots.arrangement != arrangement:
            self._arrangements += 1
            self._slots[worker] = Slots(self._arrangements, arrangement, SPARE_SLOTS)
            self._teach(self._slots[worker], [worker])
        return loads(pickled)
