"""Where the steps of a rollout go: one batch of memory, or a list of clones where they do not fit."""

import pickle
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, lazy_stack, tensorclass

from asyncsync.collectors.batch_layout import BatchLayout, empty_batch
from asyncsync.collectors.rollout.steps import RolloutBuffer
from asyncsync.collectors.trajectories import processed

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SIZE = torch.Size([2])


def step(t: int, **extra: Any) -> TensorDict:
    return TensorDict(
        {
            "observation": torch.full((2, 3), float(t)),
            "next": TensorDict({"done": torch.full((2, 1), t % 2 == 0)}, [2]),
            "agents": TensorDict({"x": torch.full((2, 4), t)}, [2, 4]),
            **extra,
        },
        [2],
    )


def fill(store: RolloutBuffer, count: int, **extra: Any) -> TensorDictBase:
    store.begin()
    for t in range(count):
        one = step(t, **extra)
        store.append(one)
        one.zero_()  # what was appended is a snapshot
    return store.finish()


@pytest.fixture(params=["staged", "direct"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go through memory for three of them, or directly to the batch."""
    monkeypatch.setattr("asyncsync.collectors.rollout.steps.STAGED_STEPS", 3)
    if request.param == "direct":
        monkeypatch.setattr("asyncsync.collectors.rollout.steps.SMALL_STEP", 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [1, 3, 5, 6, 8])
def test_steps_become_a_batch_with_time_as_its_last_dimension(count: int) -> None:
    store = RolloutBuffer(8, SIZE)
    for _ in range(2):
        batch = fill(store, count)
        assert batch.shape == (2, count)
        assert batch.names == batch["next"].names == [None, "time"]
        assert batch["agents"].shape == (2, count, 4)
        expected = torch.stack([step(t) for t in range(count)], 1)
        assert all(torch.equal(batch[key], value) for key, value in expected.items(True, True))


@pytest.mark.usefixtures("small")
def test_memory_is_asked_for_once_per_rollout_and_handed_out_as_it_is() -> None:
    given: list[TensorDictBase] = []

    def allocate(layout: BatchLayout) -> TensorDictBase:
        whole = torch.full((4, 8, 3), -1.0)
        tensors = [empty_batch(layout).get(leaf.path) for leaf in layout.leaves]
        tensors[[leaf.path for leaf in layout.leaves].index(("observation",))] = whole[1:3]  # a view
        given.append(layout.build(tensors))
        return given[-1]

    store = RolloutBuffer(8, SIZE, allocate=allocate)
    batches = [fill(store, 8), fill(store, 8)]
    assert all(batch is one for batch, one in zip(batches, given, strict=True))
    assert torch.equal(batches[0]["observation"][0, :, 0], torch.arange(8.0))
    part = fill(store, 5)
    assert len(given) == 3
    assert part["observation"].data_ptr() == given[2]["observation"].data_ptr(), "a part of the same memory"


@torch.no_grad()
def test_values_of_a_subclass_of_tensor_are_stored_in_the_given_memory() -> None:
    given: list[TensorDictBase] = []

    def allocate(layout: BatchLayout) -> TensorDictBase:
        given.append(empty_batch(layout))
        return given[-1]

    store = RolloutBuffer(8, SIZE, allocate=allocate)
    for value in (2.0, 3.0):
        store.begin()
        for t in range(8):
            store.append(step(t, scale=torch.nn.Parameter(torch.full((2, 3), value))))
        batch = store.finish()
        assert batch is given[-1]
        assert batch["scale"].unique().tolist() == [value]
    assert len(given) == 2


def test_layouts_compare_by_value_and_travel() -> None:
    found: list[BatchLayout] = []

    def allocate(layout: BatchLayout) -> TensorDictBase:
        found.append(layout)
        return empty_batch(layout)

    for steps in (8, 8, 9):
        fill(RolloutBuffer(steps, SIZE, allocate=allocate), 8)
    one, other, longer = found
    assert one == other != longer
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.steps * sum(leaf.nbytes for leaf in one.leaves) == 8 * (2 * 3 * 4 + 2 + 2 * 4 * 8)
    with pytest.raises(ValueError):
        one.build([torch.zeros(2, 8, 3)])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "other",
    [
        {"more": torch.zeros(2)},
        {"observation": torch.zeros(2, 3, dtype=torch.float64)},
        {"observation": torch.zeros(2, 5)},
        {"observation": TensorDict({}, [2])},
        {"text": NonTensorData("a", batch_size=[2])},
    ],
    ids=["key", "dtype", "shape", "nested", "text"],
)
def test_a_step_that_does_not_fit_makes_the_rollout_a_stack_of_clones(other: dict[str, Any]) -> None:
    store = RolloutBuffer(8, SIZE)
    for _ in range(2):
        for t in range(8):
            store.append(step(t) if t < 4 else step(t, **{k: v.clone() for k, v in other.items()}))
        steps = [step(t) if t < 4 else step(t, **other) for t in range(8)]
        expected = TensorDict.maybe_dense_stack(steps, 1)
        batch = store.finish()
        assert type(batch) is type(expected)
        assert batch.shape == (2, 8)
        assert batch.names == [None, "time"]
        for t, one in enumerate(batch.unbind(1)):
            assert set(one.keys(True)) == set(steps[t].keys(True))
            assert torch.equal(one["agents", "x"], steps[t]["agents", "x"])
    assert torch.equal(fill(store, 8)["observation"][0, :, 0], torch.arange(8.0))  # the next one fits again


def test_what_is_no_plain_tensordict_is_stacked() -> None:
    store = RolloutBuffer(3, SIZE)
    batch = fill(store, 3, text=NonTensorData("a", batch_size=[2]))
    assert batch.shape == (2, 3)
    assert batch[0, 0]["text"] == "a"
    lazy = LazyStackedTensorDict(step(0)[0], step(0)[1].exclude("agents"), stack_dim=0)
    for _ in range(3):
        store.append(lazy)
    assert store.finish().shape == (2, 3)


def test_leaves_are_cast_to_the_device() -> None:
    store = RolloutBuffer(2, SIZE, torch.device("meta"))
    batch = fill(store, 2)
    assert batch.device == torch.device("meta")
    assert batch["observation"].is_meta


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "rollouts", [["cpu cpu", "meta meta", "cpu cpu"], pytest.param(["cpu cuda", "cuda cpu", "cuda cuda"], marks=CUDA)]
)
def test_leaves_of_a_rollout_are_where_its_first_step_had_them(rollouts: list[str]) -> None:
    """After random frames, a policy's actions come from its device."""
    store = RolloutBuffer(4, SIZE)
    for first, second in map(str.split, rollouts):
        for t in range(4):
            store.append(step(t, action=torch.full((2,), t, device=first if t < 2 else second)))
        batch = store.finish()
        assert batch["action"].device.type == first
        assert torch.equal(batch["observation"][0, :, 0], torch.arange(4.0))
        assert first == "meta" or torch.equal(batch["action"][0].cpu(), torch.arange(4))


def test_what_cannot_be_stored_is_said() -> None:
    store = RolloutBuffer(2, SIZE)
    with pytest.raises(ValueError, match="at least one step"):
        store.finish()
    with pytest.raises(ValueError, match=r"batch size \(\), but the environment's is \(2,\)"):
        store.append(TensorDict({}, []))


def test_an_allocation_that_fails_ends_the_rollout_only() -> None:
    def allocate(layout: BatchLayout) -> TensorDictBase:
        if fails.pop():
            raise MemoryError
        return empty_batch(layout)

    fails = [False, True]
    store = RolloutBuffer(2, SIZE, allocate=allocate)
    with pytest.raises(MemoryError):
        fill(store, 2)
    assert fill(store, 2).shape == (2, 2)


@pytest.mark.parametrize("stack", [torch.stack, lazy_stack], ids=["dense", "lazy"])
def test_entries_whose_names_begin_with_an_underscore_are_taken_out_wherever_they_are(stack: Any) -> None:
    @tensorclass
    class Labels:
        label: torch.Tensor
        _hidden: torch.Tensor

    def step(value: float) -> TensorDict:
        one = torch.full((), value)
        part = TensorDict({"a": one, "_b": one, "c": TensorDict({"_d": one, "e": one})})
        return TensorDict({"part": part, "_all": TensorDict({"f": one}), "labels": Labels(one, _hidden=one), "x": one})

    batch = processed(stack([step(1.0), step(2.0)]), None, split_trajs=False)
    names = {key if isinstance(key, str) else ".".join(key) for key in batch.keys(True)}
    assert names == {"part", "part.a", "part.c", "part.c.e", "labels", "labels.label", "x"}
    assert batch["part", "a"].tolist() == [1, 2]
