"""MultiSyncCollector: one batch of all workers' rollouts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, pad

from asyncsync.collectors.arguments import warn_rounding
from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.iteration import Producing
from asyncsync.collectors.multi.needs import MESSAGES, Update, Work
from asyncsync.collectors.workers.channel import loads
from asyncsync.collectors.workers.shared_batches import Arrangement, Slots

__all__ = ["MultiSyncCollector"]

SPARE_SLOTS = 2
IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


class MultiSyncCollector(MultiCollector):
    """Worker processes that step environments, in step with each other: a batch has a rollout of every worker, all with
    the same weights unless some are sent meanwhile. They begin when the batch is asked for.

    See :class:`~asyncsync.collectors.MultiCollector` for the arguments. ``cat_results``: ``"stack"`` (default) gives
    ``[workers, *env.batch_size, time]``, an int concatenates along that dimension of ``[*env.batch_size, time]``.

    With ``preemptive_threshold``, rollouts may be cut: stacked, missing frames are zero, with
    ``("collector", "traj_ids")`` -1 and ``("collector", "mask")`` False; concatenated, they are left out.
    """

    def _begin(self) -> None:
        super()._begin()
        self._slots: Slots | None = None
        self._unlike: Arrangement | None = None  # of the latest batch that did not fit
        self._layouts: dict[int, Any] = {}

    def _check_results(self, cat_results: str | int | None, preemptive_threshold: float | None) -> None:
        if cat_results is None:
            cat_results = "stack"
        if cat_results != "stack" and (not isinstance(cat_results, int) or isinstance(cat_results, bool)):
            raise ValueError(f"cat_results must be 'stack' or a dimension (an int), not {cat_results!r}")
        self.cat_results = cat_results
        self._dim = None if isinstance(cat_results, str) else cat_results
        threshold = 1.0 if preemptive_threshold is None else float(preemptive_threshold)
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"preemptive_threshold must be between 0 and 1, not {preemptive_threshold}")
        self.preemptive_threshold = threshold

    def _check_dims(self, dims: int | None) -> None:
        if self._dim is None or dims is None:
            return
        if not -dims - 1 <= self._dim <= dims:
            raise ValueError(
                f"cat_results={self._dim} is no dimension of a batch with {dims + 1} of them: choose one, or 'stack'"
            )
        if self.preemptive_threshold < 1 and self._dim % (dims + 1) != dims:
            raise ValueError(
                f"rollouts that were cut cannot be concatenated along dimension {self._dim}: with "
                "preemptive_threshold, use cat_results=-1 or 'stack'"
            )

    def _split(self, frames: int) -> list[int]:
        share = math.ceil(frames / self.num_workers)
        if frames % self.num_workers:
            warn_rounding(
                f"frames_per_batch ({frames}) is not exactly divisible by the number of workers ({self.num_workers})",
                share * self.num_workers,
            )
        return [share] * self.num_workers

    def _frames_of_a_batch(self) -> int:
        return sum(self._requested)

    def _produce(self) -> Producing:
        count = self.num_workers
        if self._made is None:
            if not self._busy:
                if self.update_at_each_batch or any(self._is_due(worker) for worker in range(count)):
                    yield Update(None)
                self._begin_round()
            self._post_rollouts()
            serial, slot = self._busy[0].serial, self._busy[0].slot
            enough = int(count * self.preemptive_threshold)
            while len(self._messages) < count:
                if self.preemptive_threshold < 1 and len(self._messages) >= enough:
                    self._page.cut(serial)
                while (first := self._first_message()) is None:
                    yield MESSAGES
                worker, message = first
                self._messages[worker] = message
            if self._is_in_place(slot):
                batch = self._assembled(slot)
            else:
                yield (work := Work(partial(self._assembled, slot)))
                batch = work.result
            frames = sum(message[4] for message in self._messages.values())
            since = [before + 1 for before in self._since]
            self._made = (0, batch)
            self._frames += frames
            self._iter += 1
            self._busy, self._messages, self._since = {}, {}, since
        self._first_message()  # those that were dealt with leave the inbox
        return (yield from self._hand_out())

    def _begin_round(self) -> None:
        slot, grant = (None, None) if self._slots is None else self._slots.grant()
        self._serial += 1
        self._busy = {worker: self._rollout(worker, slot, grant) for worker in range(self.num_workers)}

    def _is_in_place(self, slot: Any) -> bool:
        """Whether the batch is there as it is, so that nothing has to be copied."""
        if self.replay_buffer is not None:
            return True
        messages = self._messages
        if slot is None or self._slots is None or not all(message[2] for message in messages.values()):
            return False
        parts = self._slots.arrangement.parts
        return self._dim is None or all(messages[w][3] == part.steps for w, part in enumerate(parts))

    def _assembled(self, slot: Any) -> TensorDictBase | None:
        if self.replay_buffer is not None:
            return None
        ordered = [self._messages[worker] for worker in range(self.num_workers)]
        before, self._unlike = self._unlike, None
        if slot is not None and all(message[2] for message in ordered):
            return self._in_slot(slot, ordered)
        batch = self._by_value(slot, ordered)
        self._learn(ordered, before)
        return batch

    def _in_slot(self, slot: Any, messages: list[tuple[Any, ...]]) -> TensorDictBase:
        """Every part is where it belongs."""
        assert self._slots is not None
        batch = self._slots.batch(slot)
        parts = self._slots.arrangement.parts
        steps = [message[3] for message in messages]
        if self._dim is None:
            for index, (part, found) in enumerate(zip(parts, steps, strict=True)):
                self._blank(batch[index], found, part.steps)
            return self._masked(batch, steps)
        if all(found == part.steps for part, found in zip(parts, steps, strict=True)):
            return batch
        return self._joined([self._part(batch, index)[..., :found] for index, found in enumerate(steps)])

    def _part(self, batch: TensorDictBase, index: int) -> TensorDictBase:
        assert self._slots is not None
        arrangement = self._slots.arrangement
        tensors = [arrangement.part(batch.get(leaf.path), index) for leaf in arrangement.layout.leaves]
        return arrangement.parts[index].build(tensors)

    def _by_value(self, slot: Any, messages: list[tuple[Any, ...]]) -> TensorDictBase:
        """Some parts have come through the pipe."""
        whole = None
        if self._slots is not None and slot is not None:
            if any(message[2] for message in messages):
                whole = self._slots.batch(slot)
            else:
                self._slots.give_back(slot)
        parts: list[TensorDictBase] = []
        for index, message in enumerate(messages):
            if message[2]:
                assert whole is not None
                parts.append(self._part(whole, index)[..., : message[3]])
            else:
                parts.append(loads(message[5]))
        if self._dim is not None:
            return self._joined(parts)
        steps = [part.batch_size[-1] for part in parts]
        if self.preemptive_threshold < 1:
            longest = max(steps)
            parts = [_padded(part, longest) for part in parts]
        return self._masked(TensorDict.maybe_dense_stack(parts, 0), steps)

    def _joined(self, parts: list[TensorDictBase]) -> TensorDictBase:
        assert self._dim is not None
        batch: TensorDictBase = torch.cat(parts, self._dim)
        batch.refine_names(..., "time")
        return batch

    def _learn(self, messages: list[tuple[Any, ...]], unlike: Arrangement | None) -> None:
        """From the next batch on, the parts come to lie side by side; if there is a place already, where those of the
        batch before were unlike it, too."""
        current = self._slots.arrangement.parts if self._slots is not None else None
        for index, message in enumerate(messages):
            self._layouts[index] = current[index] if message[2] and current is not None else message[6]
        arrangement = Arrangement.of([self._layouts[index] for index in range(self.num_workers)], self._dim)
        if arrangement is None:
            self._slots = None
        elif self._slots is None or (self._slots.arrangement != arrangement and unlike == arrangement):
            self._slots = None
            self._slots = self._taught(arrangement, SPARE_SLOTS, range(self.num_workers))
        elif self._slots.arrangement != arrangement:  # one that comes once in a while is not worth a slot
            self._unlike = arrangement

    def _let_go(self) -> None:
        self._slots = None
        self._layouts.clear()
        self._busy, self._messages = {}, {}

    def _blank(self, part: TensorDictBase, found: int, steps: int) -> None:
        """Frames that a rollout was cut before: an earlier batch's lie there."""
        if found == steps:
            return
        missing = part[..., found:]
        missing.zero_()
        if self.track_traj_ids:
            missing.get(IDS).fill_(-1)

    def _masked(self, batch: TensorDictBase, steps: list[int]) -> TensorDictBase:
        if self.preemptive_threshold < 1:
            shape = batch.batch_size
            ends = torch.tensor(steps).reshape(-1, *[1] * (len(shape) - 1))
            batch.set(MASK, (torch.arange(shape[-1]) < ends).expand(shape).clone())
        return batch


def _padded(part: TensorDictBase, steps: int) -> TensorDictBase:
    missing = steps - part.batch_size[-1]
    if not missing:
        return part
    padded: TensorDictBase = pad(part, [0, 0] * (part.ndim - 1) + [0, missing], value=0.0)
    if IDS in padded.keys(True):
        padded.get(IDS)[..., -missing:] = -1
    return padded
