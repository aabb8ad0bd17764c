"""Batches through shared memory: arrangements, slots, and who may write them when."""

import gc
import os
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from asyncsync.collectors.batch_layout import empty_batch, layout_of
from asyncsync.collectors.rollout.steps import RolloutBuffer
from asyncsync.collectors.workers.shared_batches import MAX_HELD, Arrangement, Batch, BatchWriter, SlotPool
from helpers.memory import mappings


def rollout(
    value: float = 0.0, batch: tuple[int, ...] = (), steps: int = 3, writer: BatchWriter | None = None
) -> TensorDict:
    def step(t: int) -> TensorDict:
        return TensorDict({"a": torch.full((*batch, 2), value + t), "nested": {"b": torch.ones(batch).bool()}}, batch)

    return stored([step(t) for t in range(steps)], writer)


def stored(steps: list[TensorDict], writer: BatchWriter | None) -> TensorDict:
    """A batch as a collector stores it, through the writer if that takes it."""
    store = RolloutBuffer(len(steps), steps[0].batch_size)
    if writer is not None:
        store.allocate = lambda layout: _first(writer.allocate(layout), layout)
    store.begin()
    for step in steps:
        store.append(step)
    return store.finish()  # type: ignore[return-value]


def _first(shared: Any, layout: Any) -> Any:
    return empty_batch(layout) if shared is None else shared


def make(parts: list[TensorDict], dim: int | None, writers: list[BatchWriter] | None = None) -> SlotPool:
    def announce(arrangement: Arrangement) -> None:
        for index, writer in enumerate(writers or ()):
            writer.set_arrangement(arrangement, index)

    places = SlotPool(dim, announce)
    places.use(Arrangement.of([layout_of(part) for part in parts], dim))
    assert places.arrangement is not None
    return places


def opened(*part: TensorDict) -> tuple[SlotPool, Batch, BatchWriter]:
    """The slots for the batches of one worker, one of these batches, and the worker's writer, which has it open."""
    writer = BatchWriter()
    places = make([*part] or [rollout()], -1, [writer])
    place = places.take()
    writer.open(place.lease)
    return places, place, writer


def next_slot(places: SlotPool) -> Any:
    """The one that is used for the next batch, which nobody wants."""
    return places.take().slot


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_the_parts_of_several_workers_make_one_batch(batch: tuple[int, ...], dim: int | None) -> None:
    parts = [rollout(10.0 * i, batch) for i in range(3)]
    writers = [BatchWriter() for _ in parts]
    place = make(parts, dim, writers).take()
    for i, writer in enumerate(writers):
        writer.open(place.lease)
        batched = rollout(10.0 * i, batch, writer=writer)
        written, layout = writer.close(batched)
        assert written
        assert layout == layout_of(parts[i])
    whole = place.from_slot()
    expected = torch.stack(parts, 0) if dim is None else torch.cat(parts, dim)
    assert whole.batch_size == expected.batch_size
    assert (whole == expected).all()
    assert whole.names[-1] == "time"


def test_what_was_not_stored_in_the_slot_is_copied_there_if_it_fits() -> None:
    _, place, writer = opened()
    assert writer.close(rollout(7.0))[0]
    assert place.from_slot()["a"][0, 0] == 7.0
    _, place, writer = opened()
    other = rollout().set("c", torch.zeros(3))
    assert writer.allocate(layout_of(other)) is None  # type: ignore[arg-type]
    assert writer.close(other) == (False, layout_of(other)), "it comes by value"


def test_entries_that_are_other_views_of_the_slot_are_what_arrives() -> None:
    def wide(writer: BatchWriter) -> TensorDict:
        values = [torch.arange(4.0).view(2, 2) + 10 * t for t in range(2)]
        return stored([TensorDict({"a": each, "b": -each}, []) for each in values], writer)

    for change in (
        lambda batch: batch.update({"a": batch["b"], "b": batch["a"]}),
        lambda batch: batch.set("a", batch["a"].transpose(-1, -2)),
        lambda batch: batch.set("a", batch["a"].flip(0)).set("b", batch["a"][:1].expand(2, 2, 2)),
    ):
        _, place, writer = opened(wide(BatchWriter()))
        batch = wide(writer)
        change(batch)
        expected = batch.clone()
        assert writer.close(batch)[0]
        assert (place.from_slot() == expected).all()


def test_what_a_worker_keeps_is_its_own() -> None:
    slots, place, writer = opened()
    batch: Any = rollout(1.0, writer=writer)
    assert writer.close(batch)[0]
    kept = batch["a"][1:]
    del batch
    copy: Any = writer.copy_if_kept(2)
    assert copy["a"][:, 0].tolist() == [1.0, 2.0]
    slot = place.slot
    del place
    again = slots.take()
    assert again.slot is slot
    writer.open(again.lease)
    assert writer.allocate(layout_of(rollout())) is None  # type: ignore[arg-type]
    del kept
    writer.open(again.lease)
    assert writer.allocate(layout_of(rollout())) is not None  # type: ignore[arg-type]
    writer.close(rollout())
    assert writer.copy_if_kept(3) is None
    assert next_slot(slots) is not slot


def test_a_slot_that_was_handed_out_twice_is_read_until_both_have_gone() -> None:
    """The first time, an interrupt has come before the batch was taken."""
    slots, place, _ = opened()
    slot = place.slot
    first, second = place.from_slot(), place.from_slot()
    del first, place
    assert next_slot(slots) is not slot
    del second
    assert next_slot(slots) is slot


def test_a_rollout_that_was_cut_lies_at_the_beginning() -> None:
    _, place, writer = opened()
    written, layout = writer.close(rollout(4.0, writer=writer)[:2])
    assert written
    assert layout is not None
    assert layout.steps == 2
    assert place.from_slot()["a"][:2, 0].tolist() == [4.0, 5.0]


def test_a_slot_is_written_again_only_when_its_last_tensor_has_gone() -> None:
    slots, place, _ = opened()
    first = place.slot
    batch = place.from_slot()
    del place
    last = batch["nested", "b"]
    assert next_slot(slots) is not first
    del batch
    assert next_slot(slots) is not first
    view = last[1:]
    del last
    assert next_slot(slots) is not first
    del view
    gc.collect()
    assert next_slot(slots) is first


def test_who_keeps_many_batches_gets_copies() -> None:
    slots = make([rollout()], -1)
    before = len(os.listdir("/proc/self/fd"))
    kept = [slots.take().from_slot() for _ in range(3 * MAX_HELD)]
    assert len({batch["a"].data_ptr() for batch in kept}) == len(kept)
    assert len(os.listdir("/proc/self/fd")) <= before + MAX_HELD + 2
    assert len(slots.slots) <= MAX_HELD + 2
    del kept


def test_slots_that_are_not_needed_any_more_go_with_their_batches() -> None:
    """Not with the next request, and not those that were spare when this process forked."""
    slots = make([rollout()], -1)
    kept = [slots.take().from_slot() for _ in range(12)]
    assert len(slots.slots) == 12
    kept.clear()
    gc.collect()
    spare = list(slots.slots)
    assert len(spare) == 2
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert next_slot(slots) in spare


def test_batches_outlive_the_slots_and_can_be_written_and_no_descriptor_is_left() -> None:
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    slots, place, writer = opened()
    writer.close(rollout(writer=writer))
    batch = place.from_slot()
    unused = slots.take()
    slots.use(None)
    del slots, place, writer, unused
    assert len(os.listdir("/proc/self/fd")) == before
    batch["a"].fill_(3.0)
    assert batch["a"].eq(3.0).all()
    assert len(mappings()) == 1
    del batch
    assert not mappings()


def test_a_slot_that_a_forked_child_may_read_is_not_written_again() -> None:
    slots, place, _ = opened()
    slot = place.slot
    batch = place.from_slot()
    del place
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    del batch
    gc.collect()
    assert next_slot(slots) is not slot


def test_no_layout_describes_lazy_stacks_and_other_things() -> None:
    assert layout_of(LazyStackedTensorDict(rollout(), rollout(), stack_dim=0)) is None
    assert layout_of(rollout().set("text", NonTensorData("hello"))) is None
    assert Arrangement.of([layout_of(rollout()), layout_of(rollout(steps=4))], None) is None
    assert Arrangement.of([layout_of(rollout()), layout_of(rollout(steps=4))], -1) is None
    assert Arrangement.of([layout_of(rollout()), layout_of(rollout(batch=(2,)))], -1) is None
    assert Arrangement.of([layout_of(rollout(batch=(2,))), layout_of(rollout(batch=(3,)))], 0) is None
    assert Arrangement.of([layout_of(rollout()), None], -1) is None
    with pytest.raises(ValueError, match="not a dimension of a batch with 1"):
        Arrangement.of([layout_of(rollout())], 1)


def test_the_layout_of_a_batch_is_that_of_its_steps() -> None:
    seen: list[Any] = []
    store = RolloutBuffer(2, torch.Size([2]))
    private, zeros = store.allocate, torch.zeros(2)
    store.allocate = lambda layout: (seen.append(layout), private(layout))[1]
    store.begin()
    for _ in range(2):
        inner = {"z": torch.zeros(2, 3), "in": {"y": zeros}, "x": zeros}
        store.append(TensorDict({"next": inner, "b": zeros, "a": {"q": zeros}}, [2]))
    assert layout_of(store.finish()) == seen[0]
