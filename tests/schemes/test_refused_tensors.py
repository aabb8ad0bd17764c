"""Tensors that cannot be copied whole: refused by name before anything is written. And tensors in extra state, which
travel."""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asyncsync import NotConnected, PartialSendError, SchemaMismatch
from helpers.apis import Api
from helpers.odd_tensors import Quantised, Rounding, Wrapper, distributed, noted, refusing, scaled
from helpers.pairs import Model, fill, read, receiver_of, refusals

pytestmark = [pytest.mark.timeout(60), pytest.mark.schemes("all")]

LARGE = 40_000  # elements: copied as bytes, and before the small tensors


class Net(nn.Module):
    """A large plain tensor, and another."""

    def __init__(self, value: float, odd: Any = None) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((LARGE,), value))
        data = torch.full((16,), value)
        made = nn.Parameter(data) if odd is None else odd(data)
        if isinstance(made, nn.Parameter):
            self.odd = made
        else:
            self.register_buffer("odd", made)

    def forward(self) -> set[float]:
        return self.values()

    def values(self) -> set[float]:
        tensors = [self.first, getattr(self.odd, "held", self.odd)]
        return {float(value) for tensor in tensors for value in tensor.detach().as_subclass(torch.Tensor).unique()}


@pytest.mark.requirement(237)
@pytest.mark.parametrize(("left", "numel"), [(0.0, 16), (0.5, LARGE)])
async def test_a_source_that_has_lost_its_memory_is_named(api: Api, left: float, numel: int) -> None:
    """Also after several updates, which may have come by the fast path; with its memory back, it goes on."""
    source, model = Model(0, numel), Model(9, numel)
    async with api.crew(1, source=source, models=[model]) as (sender, _, _):
        for value in (1, 2, 3):
            version = await sender.send_async(fill(source, value), timeout=10)
        source.first.untyped_storage().resize_(int(left * 4 * numel))
        with pytest.raises(ValueError, match=r"'first'.*memory"):
            await sender.send_async(timeout=10)
        assert (sender.version, read(model)) == (version, {3})
        source.first.untyped_storage().resize_(4 * numel)
        await sender.send_async(fill(source, 4), timeout=10)
        assert read(model) == {4}


@pytest.mark.requirement(237)
@pytest.mark.parametrize(("odd", "words"), [(scaled, "scale"), (refusing, "refusing|copied"), (distributed, "full_t")])
async def test_a_source_whose_bytes_are_not_its_values_is_named(api: Api, odd: Any, words: str) -> None:
    async with api.crew(1, source=Net(1.0), models=[model := Net(0.0)]) as (sender, _, _):
        with pytest.raises(TypeError, match=f"(?i)'odd'.*({words})"):
            await sender.send_async(Net(2.0, odd), timeout=10)
        assert model.values() == {1.0}


DESTINATIONS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "quantised": (Quantised, "Quantised"),
    "rounding": (Rounding, "Rounding"),
    "refusing": (refusing, "Refusing"),
    "with a scale": (scaled, "Scaled.*scale"),
    "distributed": (distributed, "DTensor"),
}


@pytest.mark.requirement(237)
@pytest.mark.parametrize(("kind", "inplace"), [*zip(DESTINATIONS, cycle((True, False)))])
async def test_a_destination_that_takes_no_copy_is_refused_at_connect(api: Api, kind: str, inplace: bool) -> None:
    odd, words = DESTINATIONS[kind]
    sender, model = api.sender(Net(2.5), num_workers=1), Net(0.0, odd)
    here, there = await refusals(sender, receiver_of(sender, 0, model, inplace=inplace))
    with pytest.raises(SchemaMismatch, match=f"odd.*{words}.*WeightStrategy"):
        raise there
    assert isinstance(here, SchemaMismatch | NotConnected | PartialSendError)
    assert model.values() == {0.0}


@pytest.mark.requirement(237)
async def test_a_destination_that_changes_its_class_later_is_refused_with_nothing_written(api: Api) -> None:
    async with api.crew(1, source=(source := Net(1.0)), models=[model := Net(0.0)]) as (sender, _, _):
        del model.odd
        model.register_buffer("odd", Quantised(torch.full((16,), 1.0)))
        with pytest.raises(PartialSendError, match=r"odd.*Quantised"):
            await sender.send_async(fill(source, 2.0), timeout=10)
        assert model.values() == {1.0}


@pytest.mark.requirement(237)
@pytest.mark.parametrize("odd", [noted, Wrapper])
async def test_what_keeps_its_values_is_accepted(api: Api, odd: Any) -> None:
    """A subclass whose attributes are a library's notes, and one that passes copies on."""
    async with api.crew(1, source=Net(1.0, noted), models=[model := Net(0.0, odd)]) as (sender, _, _):
        for value in (2.5, 3.5):
            await sender.send_async(Net(value, noted), timeout=10)
            assert model.values() == {value}


# -- extra state -------------------------------------------------------------------------------------------------------


class Normaliser(nn.Module):
    """Has no statistics until it has seen something, as VecNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state: Any = {}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state

    def forward(self) -> Any:
        return self.state


@pytest.mark.requirement(232)
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
async def test_tensors_and_arrays_in_extra_state_travel(api: Api, strategy: str) -> None:
    source, model = Normaliser(), Normaliser()
    async with api.crew(1, scheme=api.scheme(strategy), source=source, models=[model]) as (sender, _, _):
        for value in (1.0, 2.0):
            tensors = {"half": torch.full((3,), value, dtype=torch.bfloat16), "count": torch.tensor(7)}
            source.state = {"mean": [tensors, np.full((2, 2), value)], "var": np.float32(value), "names": ["a"]}
            await sender.send_async(timeout=10)
            (got, array), var = model.state["mean"], model.state["var"]
            assert {k: (v.dtype, v.tolist()) for k, v in got.items()} == {
                k: (v.dtype, v.tolist()) for k, v in tensors.items()
            }
            assert type(array) is np.ndarray
            assert array.tolist() == [[value] * 2] * 2
            assert type(var) is np.float32
            assert var == value
            array += 1  # the module's own
            got["half"] += 1
            assert source.state["mean"][1].tolist() == [[value] * 2] * 2
        source.state = np.arange(3)
        await sender.send_async(timeout=10)
        assert model.state.tolist() == [0, 1, 2]


@pytest.mark.requirement(232)
async def test_extra_state_that_cannot_travel_is_named_with_the_way_to_leave_it_out(api: Api) -> None:
    sender = api.sender(source := Normaliser(), num_workers=1)
    source.state = {"lock": object()}
    async with sender:
        with pytest.raises(TypeError, match=r"'_extra_state'.*object.*exclude='_extra_state'"):
            await sender.connect(timeout=10)


@pytest.mark.requirement(232)
async def test_each_application_has_extra_state_of_its_own(api: Api) -> None:
    """A module that keeps and changes what it is given changes neither the weights nor what the next is given."""
    weights = {"weight": torch.ones(2), "_extra_state": {"mean": torch.zeros(2), "seen": [1]}}
    async with api.crew(1, source=Normaliser(), models=[model := Normaliser()]) as (sender, (receiver,), _):
        for _ in range(2):
            receiver.apply_weights(weights)
            assert (model.state["mean"].tolist(), model.state["seen"]) == ([0.0, 0.0], [1])
            model.state["mean"] += 1
            model.state["seen"].append(2)
        await sender.send_async(weights, timeout=10)
        assert (model.state["mean"].tolist(), model.state["seen"]) == ([0.0, 0.0], [1])
    assert weights["_extra_state"]["seen"] == [1]  # type: ignore[index]


# -- torch's own ways --------------------------------------------------------------------------------------------------


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.requirement(237)
@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("who", ["trainer", "worker"])
async def test_modules_whose_parameters_are_swapped_work_as_without_a_scheme(api: Api, who: str) -> None:
    async with api.crew(1, source=(source := Net(1.0)), models=[model := Net(0.0)]) as (sender, _, _):
        one = source if who == "trainer" else model
        for value in (2.0, 3.0, 4.0):
            await sender.send_async(fill(source, value), timeout=10)
            assert model.values() == {value}
            one.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()})
            one.double().float()
            assert one.values() == {value}
