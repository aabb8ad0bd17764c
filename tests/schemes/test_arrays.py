"""NumPy arrays, and objects whose attributes are arrays, as sources and as receivers."""

from typing import Any

import numpy as np
import pytest
import torch

from asyncsync import PartialSendError, SchemaMismatch, WeightStrategy, sync
from helpers import planted
from helpers.apis import Api
from helpers.pairs import connected, held, receiver_of, until

pytestmark = pytest.mark.requirement(235)


class Statistics:
    """A running mean and variance, as Stable-Baselines3's VecNormalize has them: each update replaces the arrays."""

    def __init__(self, shape: tuple[int, ...] = (), value: float = 0.0) -> None:
        self.name = "observations"
        self.shape = shape
        self.seen: list[Any] = []
        self.mean = np.full(shape, value)
        self.var = np.full(shape, value)
        self.count = value

    def update(self, by: float) -> None:
        self.mean, self.var, self.count = self.mean + by, self.var + by, self.count + by

    @property
    def read(self) -> tuple[list[float], list[float], float]:
        return np.ravel(self.mean).tolist(), np.ravel(self.var).tolist(), float(self.count)


def pair(api: Api, source: Any, model: Any, **options: Any) -> Any:
    return api.crew(1, source=source, models=[model], sender={"weights": source}, **options)


@pytest.mark.schemes("all")
async def test_a_dict_of_arrays_is_received_where_the_arrays_are(api: Api) -> None:
    source = {"a": np.zeros((3, 4), np.float32), "b": {"c": np.arange(5), "t": torch.zeros(2)}}
    model = {"a": np.ones((3, 4), np.float32), "b": {"c": np.ones(5, np.int64), "t": torch.ones(2)}}
    array, inner = model["a"], model["b"]["c"]
    async with pair(api, source, model) as everybody:
        sender = everybody.sender
        for value in range(1, 8):
            source["a"][:] = value
            source["b"]["c"] += 1
            source["b"]["t"].fill_(value)
            await sender.send_async()
            assert (array == value).all()
            assert inner.tolist() == (np.arange(5) + value).tolist()
            assert model["b"]["t"].tolist() == [value] * 2
        source["a"][:] = 100  # what was sent is a snapshot
        assert (array == 7).all()
        assert torch.equal(sender.weights["a"], torch.full((3, 4), 100.0))
        assert model["a"] is array
        assert model["b"]["c"] is inner
        model["a"] = np.zeros((3, 4), np.float32)  # replaced by the user: the new one receives
        await sender.send_async()
        assert (model["a"] == 100).all()
        assert (array == 7).all()


@pytest.mark.schemes("every")
async def test_an_objects_arrays_and_numbers_are_received_and_nothing_else(api: Api) -> None:
    source, model = Statistics((3,), 1.0), Statistics((3,), -1.0)
    model.name, model.seen = "mine", [1]
    mean = model.mean
    async with pair(api, source, model) as everybody:
        assert model.read == ([1] * 3, [1] * 3, 1)
        for by in (1, 2, 3):
            source.update(by)
            await everybody.sender.send_async()
            assert model.read == source.read
        assert model.mean is mean, "an array is written where it is"
        assert (model.name, model.seen, type(model.count)) == ("mine", [1], float)
        model.update(10)  # the worker's own: other arrays
        source.update(1)
        await everybody.sender.send_async()
        assert model.read == source.read


@pytest.mark.schemes("some")
async def test_numbers_and_arrays_without_dimensions_are_one(api: Api) -> None:
    """NumPy makes a number of such an array, as soon as one calculates with it."""
    source, model = Statistics((), 1.0), Statistics((), -1.0)
    async with pair(api, source, model) as everybody:
        assert isinstance(source.mean, np.ndarray)
        for worker_updates in (False, True, False):
            source.update(1)
            assert isinstance(source.mean, np.float64)
            if worker_updates:
                model.update(1)
                assert isinstance(model.mean, np.float64)
            kind = type(model.mean)
            await everybody.sender.send_async()
            assert model.read == source.read
            assert type(model.mean) is kind


@pytest.mark.schemes("every")
async def test_several_objects_are_one_model(api: Api) -> None:
    source = {
        "observations": Statistics((2,), 1.0),
        "rewards": Statistics((), 2.0),
        "nested": {"one": Statistics((1,))},
    }
    model = {"observations": Statistics((2,)), "rewards": Statistics(), "nested": {"one": Statistics((1,), 9.0)}}
    async with pair(api, source, model) as everybody:
        await everybody.sender.send_async()
        assert model["observations"].read == ([1, 1], [1, 1], 1)
        assert model["rewards"].read == ([2], [2], 2)
        assert model["nested"]["one"].read == ([0], [0], 0)
        received = await everybody.receivers[0].fetch(timeout=10)
        assert received["rewards", "mean"].item() == 2


async def test_an_array_alone(api: Api) -> None:
    source, model = np.zeros(4), np.ones(4)
    async with pair(api, source, model) as everybody:
        assert model.tolist() == [0] * 4
        await everybody.sender.send_async(np.full(4, 5.0))
        assert model.tolist() == [5] * 4


async def test_arrays_that_cannot_be_written_are_replaced(api: Api) -> None:
    source = {name: np.arange(4.0) for name in ("frozen", "backwards", "swapped", "every_other")}
    model = {
        "frozen": np.zeros(4),
        "backwards": np.zeros(4)[::-1],
        "swapped": np.zeros(4, ">f8"),
        "every_other": np.zeros(8)[::2],
    }
    model["frozen"].flags.writeable = False
    before = dict(model)
    source["frozen"].flags.writeable = False  # as a source it is one like any other
    source["backwards"] = np.arange(4.0)[::-1][::-1]
    async with pair(api, source, model) as everybody:
        for _ in range(2):
            await everybody.sender.send_async()
            assert {name: array.tolist() for name, array in model.items()} == {name: [0, 1, 2, 3] for name in model}
        assert {name for name in model if model[name] is before[name]} == {"every_other"}
        assert before["frozen"].tolist() == [0] * 4


async def test_a_part_of_an_object_and_new_arrays(api: Api) -> None:
    source, model = Statistics((3,), 1.0), Statistics((3,), -1.0)
    mean = model.mean
    async with pair(api, source, model, scheme=api.scheme(exclude="count"), receiver={"inplace": False}) as everybody:
        await everybody.sender.send_async()
        assert model.read == ([1] * 3, [1] * 3, -1)
        assert isinstance(model.mean, np.ndarray)
        assert model.mean is not mean
        assert mean.tolist() == [-1] * 3


@pytest.mark.schemes("some")
async def test_an_object_is_whole_in_a_hold_and_what_does_not_fit_changes_nothing(api: Api) -> None:
    source, model = Statistics((3,), 1.0), Statistics((3,), -1.0)
    async with pair(api, source, model) as everybody:
        sender, (receiver,), _ = everybody
        with held(receiver):
            version = await sender.publish(Statistics((3,), 2.0))
            await until(lambda: planted.pending(receiver))
            assert model.read == ([1] * 3, [1] * 3, 1)
        await sender.wait_version(version)
        assert model.read == ([2] * 3, [2] * 3, 2)
        for wrong, text in ((Statistics((4,), 3.0), r"shape \[4\]"), ({"mean": np.zeros(3)}, "missing")):
            with pytest.raises(PartialSendError, match=text) as caught:
                await sender.send_async(wrong)
            assert isinstance(caught.value.failed[0], SchemaMismatch)
            assert model.read == ([2] * 3, [2] * 3, 2)
        await sender.send_async(Statistics((3,), 4.0))
        assert model.read == ([4] * 3, [4] * 3, 4)


async def test_each_worker_its_own_and_a_context_knows_them(api: Api) -> None:
    class Context:
        def __init__(self, value: float) -> None:
            self.env = Statistics((2,), value)

    context, contexts = Context(1.0), [Context(-1.0), Context(-1.0)]
    sender = api.scheme()
    sender.init_on_sender(model_id="env", context=context, num_workers=2)
    receivers = [receiver_of(sender, i, None, "env", context=each) for i, each in enumerate(contexts)]
    async with connected(sender, *receivers):
        await sender.send_async({0: Statistics((2,), 5.0), 1: Statistics((2,), 6.0)})
        assert [each.env.read[2] for each in contexts] == [5, 6]
        context.env.update(1)
        await sender.send_async("env")
        assert [each.env.read for each in contexts] == [context.env.read] * 2


def test_methods_that_apply_at_once() -> None:
    model = Statistics((2,), -1.0)
    WeightStrategy().apply_weights(model, Statistics((2,), 3.0))
    assert model.read == ([3, 3], [3, 3], 3)
    scheme = sync.ZMQWeightSyncScheme()
    scheme.init_on_receiver("policy", model=model, worker_idx=0)
    scheme.apply_weights({"mean": np.ones(2), "var": np.ones(2), "count": np.float64(1)})
    assert model.read == ([1, 1], [1, 1], 1)
    numbers = {"a": np.float32(0), "b": np.zeros(())}
    WeightStrategy().apply_weights(numbers, {"a": np.zeros((), np.float32) + 3, "b": np.float64(4)})
    assert (numbers["a"], numbers["b"]) == (3, 4)
    assert type(numbers["a"]) is np.float32


class Empty:
    """No arrays."""

    value = np.zeros(3)

    def __init__(self) -> None:
        self.text, self.number = np.array(["a"]), 3


def frozen() -> Any:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("wrong", "error", "word"),
    [
        *[(wrong, TypeError, "arrays") for wrong in (Empty(), Empty, object(), 3.0, "text", [np.zeros(3)])],
        *[(wrong, ValueError, "receive") for wrong in (frozen(), np.zeros(3)[::-1], np.array(["a"]))],
    ],
)
def test_what_has_no_arrays_or_none_that_can_be_written_is_refused(
    wrong: Any, error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        sync.ZMQWeightSyncScheme().init_on_receiver("policy", model=wrong, worker_idx=0)
    if error is TypeError:
        with pytest.raises(TypeError, match="arrays"):
            WeightStrategy().extract_weights(wrong)


async def test_gymnasiums_statistics(api: Api) -> None:
    utils = pytest.importorskip("gymnasium.wrappers.utils")
    source, model = utils.RunningMeanStd(shape=(4,)), utils.RunningMeanStd(shape=(4,))
    async with pair(api, source, model) as everybody:
        source.update(np.random.default_rng(0).normal(size=(10, 4)))
        await everybody.sender.send_async()
        assert np.array_equal(model.mean, source.mean)
        assert np.array_equal(model.var, source.var)
        assert model.count == source.count
