"""Models that are dicts or TensorDicts with parts: every acknowledged update is in the model that is there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictParams
from torch import nn

from asyncsync import PartialSendError, SchemaMismatch
from helpers.apis import Api
from helpers.pairs import receiver_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.schemes("some")]


class Statistics:
    def __init__(self, value: float) -> None:
        self.mean = np.full(2, value)


def tree(value: float) -> dict[str, Any]:
    return {"a": torch.full((2,), value), "in": {"b": torch.full((3,), value), "deep": {"c": torch.full((1,), value)}}}


def read(model: Any) -> set[float]:
    values = [model[key] for key in model.keys()]  # noqa: SIM118 - a TensorDict's
    return {x for value in values for x in (value.tolist() if isinstance(value, torch.Tensor) else read(value))}


def pair(api: Api, source: Any, model: Any) -> Any:
    return api.crew(1, source=source, models=[model], sender={"weights": source})


@pytest.mark.parametrize("kind", [dict, TensorDict, lambda content: TensorDictParams(TensorDict(content))])
async def test_a_part_that_was_replaced_gets_the_next_update(api: Api, kind: Callable[[Any], Any]) -> None:
    source, model = tree(1.0), kind(tree(0.0))
    async with pair(api, source, model) as everybody:
        old = model["in"]
        for key, value in (("in", 2.0), ("deep", 3.0), (None, 4.0)):
            if key == "in":
                model["in"] = TensorDict(tree(0.0)["in"])
            elif key == "deep":
                model["in"]["deep"] = tree(0.0)["in"]["deep"]
            await everybody.sender.send_async(tree(value))
            assert read(model) == {value}
        assert read(old) == {1.0}
        model["in"] = TensorDict({"b": torch.zeros(3)})
        with pytest.raises(PartialSendError, match=r"in\.deep\.c"):
            await everybody.sender.send_async(tree(5.0))
        assert read(model) == {4.0, 0.0}


async def test_an_object_with_arrays_that_was_replaced_gets_the_next_update(api: Api) -> None:
    source, model = {"statistics": Statistics(1)}, {"statistics": Statistics(0)}
    async with pair(api, source, model) as everybody:
        model["statistics"] = Statistics(0)
        await everybody.sender.send_async({"statistics": Statistics(2)})
        assert model["statistics"].mean.tolist() == [2, 2]


async def test_a_replaced_part_of_a_tensordict_inside_a_module_gets_the_next_update(api: Api) -> None:
    def make(value: float) -> Any:
        module = nn.Linear(1, 1)
        module.more = TensorDictParams(TensorDict(tree(value)))
        return module

    model = make(0.0)
    async with pair(api, make(1.0), model) as everybody:
        model.more["in"] = TensorDict(tree(0.0)["in"])
        await everybody.sender.send_async(make(2.0))
        assert read(model.more) == {2.0}


def lazy_stack(value: float) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(TensorDict(tree(value)), TensorDict(tree(value)))


async def test_a_lazy_stack_is_sent_and_cannot_receive(api: Api) -> None:
    """Its tensors are made when they are read."""
    for model in (lazy_stack(0.0), {"part": lazy_stack(0.0)}):
        with pytest.raises(SchemaMismatch, match="LazyStackedTensorDict"):
            receiver_of(api.scheme(), 0, model)
    source, model = {"part": lazy_stack(1.0)}, {"part": lazy_stack(0.0).contiguous()}
    async with pair(api, source, model) as everybody:
        assert model["part"]["a"].tolist() == [[1, 1], [1, 1]]
        model["part"] = lazy_stack(0.0)
        with pytest.raises(PartialSendError, match=r"part\.a"):
            await everybody.sender.send_async(source)


async def test_a_list_of_texts_in_a_tensordict_arrives_as_one(api: Api) -> None:
    def make(*names: str) -> TensorDict:
        made = TensorDict({"w": torch.full((2,), float(len(names)))})
        made["names"] = list(names)
        return made

    model = make("x", "y", "z")
    async with pair(api, make("a", "b"), model) as everybody:
        assert model["names"] == ["a", "b"]
        assert isinstance(model.get("names"), NonTensorStack)
        await everybody.sender.send_async(make("c"))
        assert (model["names"], model["w"].tolist()) == (["c"], [1, 1])
        with pytest.raises(PartialSendError, match="names"):
            await everybody.sender.send_async({"w": torch.zeros(2)})
        plain = {"w": torch.zeros(2), "names": ["d", ["e"]]}
        await everybody.sender.send_async(plain)
        assert model["names"] == ["d", ["e"]]
