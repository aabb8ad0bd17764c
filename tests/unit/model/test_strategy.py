"""Strategies: what leaves a model, and what a model of another kind makes of it.

Other dtypes on the wire, quantised models and renamed ones: tests/schemes/test_strategies_end_to_end.py.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, TensorDictParams
from torch import nn

from asyncsync.errors import SchemaMismatch
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights, resolve_strategy
from asyncsync.weights.layout import Layout
from helpers.whole_models import finish, published


def deliver(strategy: WeightStrategy, source: Any, model: Any, **options: Any) -> None:
    binding = Binding(model, strategy, **options)
    slab = published(source, strategy)
    binding.check(slab.layout)
    finish(binding.prepare(slab))
    slab.buffer.fill_(0xFF)  # the slab is used for another version: nothing may have kept it


class Counted(nn.Module):
    """A parameter, both kinds of buffers, and nothing else."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value))
        self.register_buffer("mean", torch.full((2,), value))
        self.register_buffer("cache", torch.full((2,), value), persistent=False)
        self.register_buffer("unset", None)


class WithExtra(nn.Module):
    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


# -- which strategy ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement(52)
def test_a_strategy_is_one_of_two_names_or_an_object() -> None:
    assert WeightStrategy().extract_as == "tensordict"
    assert resolve_strategy("tensordict").extract_as == "tensordict"
    assert resolve_strategy("state_dict").extract_as == "state_dict"
    own = WeightStrategy("state_dict")
    assert resolve_strategy(own) is own
    with pytest.raises(ValueError, match=r"'numpy'.*'tensordict', 'state_dict'"):
        resolve_strategy("numpy")
    with pytest.raises(TypeError, match="WeightStrategy"):
        resolve_strategy(WeightStrategy)


# -- the sender's half -------------------------------------------------------------------------------------------------


@pytest.mark.requirement(38)
def test_tensordict_takes_all_buffers_and_state_dict_the_persistent_ones() -> None:
    model = nn.Sequential(Counted())
    as_tensordict = WeightStrategy("tensordict").extract_weights(model)
    as_state_dict = WeightStrategy("state_dict").extract_weights(model)
    assert isinstance(as_tensordict, TensorDictBase)
    assert set(as_tensordict["0"].keys()) == {"w", "mean", "cache"}
    assert isinstance(as_state_dict, dict)
    assert set(as_state_dict) == {"0.w", "0.mean"}


@pytest.mark.requirement(70)
def test_weights_may_be_a_module_a_tensordict_or_a_dict() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sources = [model, TensorDict.from_module(model), model.state_dict(), dict(model.state_dict())]
    sources += [TensorDict.from_module(model).to_dict(), TensorDictParams(TensorDict.from_module(model))]
    for extract_as in ("tensordict", "state_dict"):
        for source in sources:
            flat = flat_weights(WeightStrategy(extract_as), source)
            got = {".".join(path): tensor for path, tensor in flat.tensors.items()}
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("source", [3, [torch.zeros(1)], torch.zeros(1), "policy"])
def test_other_weights_are_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError, match=type(source).__name__):
        flat_weights(WeightStrategy(), source)


def test_a_tied_module_keeps_each_of_its_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Linear(2, 2)

    flat = flat_weights(WeightStrategy(), Twice())
    assert set(flat.tensors) == {("a", "weight"), ("a", "bias"), ("b", "weight"), ("b", "bias")}
    assert len(Layout.of(flat).entries) == 2


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
@pytest.mark.parametrize(
    "state", [{"step": 3, "names": ["a"]}, torch.arange(3), "text", None, NonTensorData({"a": 1})], ids=repr
)
def test_extra_state_travels_as_a_value_or_a_tensor(extract_as: str, state: Any) -> None:
    source, model = nn.Sequential(WithExtra(state)), nn.Sequential(WithExtra("before"))
    deliver(WeightStrategy(extract_as), source, model)
    assert repr(model[0].state) == repr(state.data if isinstance(state, NonTensorData) else state)


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_extra_state_of_any_other_kind_is_refused_by_name(extract_as: str) -> None:
    with pytest.raises(TypeError, match=r"0\._extra_state"):
        published(nn.Sequential(WithExtra(object())), WeightStrategy(extract_as))


@pytest.mark.requirement(232)
@pytest.mark.parametrize("state", [{"step": 3}, {"mean": torch.arange(3)}, torch.arange(3), "text"], ids=repr)
def test_extra_state_has_torchrls_key_in_a_tensordict_and_is_not_consumed(state: Any) -> None:
    strategy = WeightStrategy("tensordict")
    for source, model, at in (
        (WithExtra(state), WithExtra(), "__extra_state__"),
        (nn.Sequential(WithExtra(state)), nn.Sequential(WithExtra()), ("0", "__extra_state__")),
    ):
        weights = strategy.extract_weights(source)
        before = set(weights.keys(True))
        assert at in before
        own = model if isinstance(model, WithExtra) else model[0]
        for _ in range(2):
            own.state = None
            strategy.apply_weights(model, weights)
            assert repr(own.state) == repr(state)
            assert set(weights.keys(True)) == before
    assert set(WeightStrategy("state_dict").extract_weights(WithExtra(state)).keys()) == {"w", "_extra_state"}


@pytest.mark.requirement(232)
def test_extra_state_as_torchrls_strategy_extracts_it_is_applied() -> None:
    weights = TensorDict({"w": torch.ones(2), "__extra_state__": TensorDict({"mean": torch.arange(3)})})
    model = WithExtra()
    for _ in range(2):
        WeightStrategy().apply_weights(model, weights)
        assert model.state["mean"].tolist() == [0, 1, 2]
        assert set(weights.keys()) == {"w", "__extra_state__"}


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_extra_state_goes_into_a_tensordict_too(extract_as: str) -> None:
    model = WeightStrategy().extract_weights(WithExtra({"step": 1}))
    deliver(WeightStrategy(extract_as), WithExtra({"step": 2}), model)
    assert model["__extra_state__"] == {"step": 2}


class Renamed(nn.Module):
    """Its state dict has another name for the weight, and leaves the frozen part out."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.full((2,), value))
        nn.init.constant_(self.inner.weight, value)
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "w"] = state.pop(prefix + "inner.weight")
        del state[prefix + "frozen"]


def test_state_dict_hooks_are_honoured_on_both_sides() -> None:
    source, model = Renamed(1.0), Renamed(2.0)
    strategy = WeightStrategy("state_dict")
    assert set(flat_weights(strategy, source).tensors) == {("w",), ("inner", "bias")}
    deliver(strategy, source, model)
    assert (model.inner.weight == 1.0).all()
    assert (model.frozen == 2.0).all()
    with pytest.raises(SchemaMismatch):
        deliver(strategy, {"w": torch.zeros(2, 2), "inner.bias": torch.zeros(2), "more": torch.zeros(1)}, model)


class Halved(nn.Linear):
    """Its state dict has half of its weight."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(lambda m, state, *_: state.update(weight=m.weight / 2))
        self.register_load_state_dict_pre_hook(lambda m, state, *_: state.update(weight=state["weight"] * 2))


class Loading(WeightStrategy):
    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        destination.load_state_dict(weights.to_dict())


def test_a_state_dict_with_other_values_than_the_module_is_refused() -> None:
    """They would be copied as they are."""
    source, model = Halved(), Halved()
    with pytest.raises(SchemaMismatch, match="weight: the model's state dict has other values"):
        deliver(WeightStrategy("state_dict"), source, model)
    deliver(WeightStrategy(), source, model)
    assert torch.equal(model.weight, source.weight)
    model = Halved()
    deliver(Loading("state_dict"), source, model)
    assert torch.equal(model.weight, source.weight)


# -- both halves -------------------------------------------------------------------------------------------------------


class Actor(WeightStrategy):
    """The worker has the actor only, under another name."""

    def convert(self, weights: TensorDictBase, model: Any) -> Mapping[Any, torch.Tensor]:
        tensors = super().convert(weights, model)
        return {("policy", *path[1:]): tensor for path, tensor in tensors.items() if path[0] == "actor"}


@pytest.mark.requirement(207)
def test_a_worker_may_have_other_keys_and_fewer() -> None:
    source = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)})
    model = nn.ModuleDict({"policy": nn.Linear(2, 2)})
    deliver(Actor(), source, model)
    assert torch.equal(model["policy"].weight, source["actor"].weight)


@pytest.mark.requirement(207)
def test_what_a_conversion_makes_of_the_layout_is_checked_before_anything_is_sent() -> None:
    layout = published(nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}), Actor()).layout
    with pytest.raises(SchemaMismatch, match=r"policy\.weight"):
        Binding(nn.ModuleDict({"other": nn.Linear(2, 2)}), Actor()).check(layout)
    with pytest.raises(SchemaMismatch, match="shape"):
        Binding(nn.ModuleDict({"policy": nn.Linear(3, 2)}), Actor()).check(layout)


class Dividing(WeightStrategy):
    def convert(self, weights: TensorDictBase, model: Any) -> Mapping[Any, torch.Tensor]:
        raise ZeroDivisionError("mine")


class Listing(WeightStrategy):
    def convert(self, weights: TensorDictBase, model: Any) -> Any:
        return {"w": [1.0]}


@pytest.mark.requirement(207)
@pytest.mark.parametrize(
    ("strategy", "error", "words"),
    [(Dividing(), ZeroDivisionError, "mine"), (Listing(), TypeError, "returned a list for 'w'")],
)
def test_a_conversion_that_raises_or_returns_no_tensors_changes_nothing(
    strategy: WeightStrategy, error: type[Exception], words: str
) -> None:
    model = Counted(1.0)
    with pytest.raises(error, match=words):
        deliver(strategy, Counted(2.0), model)
    assert (model.w == 1.0).all()


@pytest.mark.requirement(207)
def test_cast_converts_dtypes_and_nothing_else() -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).half()
    with pytest.raises(SchemaMismatch, match=r"0\.weight: sent as torch\.float32.*torch\.float16.*cast=True"):
        deliver(WeightStrategy(), source, model)
    deliver(WeightStrategy(), source, model, cast=True)
    assert model[0].weight.dtype is torch.float16
    assert torch.equal(model[0].weight, source[0].weight.half())
    assert model[1].num_batches_tracked.dtype is torch.int64
    with pytest.raises(SchemaMismatch, match="shape"):
        deliver(WeightStrategy(), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(2)), model, cast=True)


@pytest.mark.parametrize(("sent", "own"), [(torch.complex64, torch.float32), (torch.float4_e2m1fn_x2, torch.float32)])
def test_a_cast_that_does_not_exist_is_refused_before_anything_is_sent(sent: torch.dtype, own: torch.dtype) -> None:
    layout = Layout([(("w",), sent, (2,))])
    with pytest.raises(SchemaMismatch, match="cannot be cast"):
        Binding({"w": torch.zeros(2, dtype=own)}, WeightStrategy(), cast=True).check(layout)


# -- apply_weights -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement(81)
@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_weights_can_be_applied_at_once(extract_as: str) -> None:
    strategy = WeightStrategy(extract_as)
    source, model = nn.Linear(2, 2), nn.Linear(2, 2)
    for weights in (source, source.state_dict(), TensorDict.from_module(source)):
        nn.init.zeros_(model.weight)
        strategy.apply_weights(model, weights)
        assert torch.equal(model.weight, source.weight)
        assert model.weight.data_ptr() != source.weight.data_ptr()


def test_weights_are_applied_whole_or_not_at_all() -> None:
    model = Counted(1.0)
    for wrong in ({"w": torch.zeros(4)}, {"mean": torch.zeros(2, dtype=torch.int32)}, {"more": torch.zeros(1)}):
        good = {"w": torch.zeros(3), "mean": torch.zeros(2), "cache": torch.zeros(2)}
        with pytest.raises(SchemaMismatch):
            WeightStrategy().apply_weights(model, good | wrong)
        assert (model.w == 1.0).all()
        assert (model.mean == 1.0).all()
    with pytest.raises(TypeError):
        WeightStrategy().apply_weights(None, {"w": torch.zeros(3)})
    with pytest.raises(TypeError):
        WeightStrategy().apply_weights([model], {"w": torch.zeros(3)})


def test_an_overridden_apply_weights_gets_weights_that_never_share_memory_with_the_slab() -> None:
    kept: list[Any] = []

    class Keeping(WeightStrategy):
        def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
            kept.append((destination, weights, inplace))

    model = Counted()
    deliver(Keeping(), {"anything": torch.ones(3), "note": "x"}, model, inplace=False)
    destination, weights, inplace = kept[0]
    assert destination is model
    assert inplace is False
    assert torch.equal(weights["anything"], torch.ones(3))
    assert weights["note"] == "x"
