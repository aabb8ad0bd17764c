"""Binding: an update goes into the model that is there, whole, or the model stays as it was."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn
from torch.nn.parameter import UninitializedParameter

from asyncsync.errors import ProtocolError, SchemaMismatch
from asyncsync.model.bound_model import BoundModel, ModelTensors
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights
from asyncsync.model.update import Prepared, prepare_flat
from asyncsync.weights.tensors import copy_tensors
from helpers.odd_tensors import Quantised, scaled
from helpers.whole_models import Tied, filled, finish, published, values_of


def prepared(binding: Binding, source: Any) -> Prepared | None:
    slab = published(source, binding.strategy)
    binding.check(slab.layout)
    return binding.prepare(slab)


def update(binding: Binding, source: Any) -> None:
    finish(prepared(binding, source))


def bound(model: Any, extract_as: str = "tensordict", **options: Any) -> Binding:
    return Binding(model, WeightStrategy(extract_as), **options)


# -- kinds of models ---------------------------------------------------------------------------------------------------


def with_a_tensordict(value: float) -> nn.Module:
    model = nn.Module()
    model.inner = TensorDictParams(TensorDict({"a": {"b": torch.full((2,), value)}}))
    return model


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        filled,
        with_a_tensordict,
        lambda v: {"a": torch.full((2,), v), "b": {"c": torch.full((), v)}},
        lambda v: {"a": torch.full((2,), v), "b.c": torch.full((), v)},
        lambda v: TensorDict({"a": torch.full((2,), v), "b": {"c": torch.full((), v)}}),
        lambda v: TensorDict({"a": torch.full((2,), v), "b": {"c": torch.full((), v)}}).lock_(),
        lambda v: TensorDictParams(TensorDict({"a": torch.full((2,), v), "b": {"c": torch.full((), v)}})),
    ],
    ids=["module", "a TensorDict in a module", "dict", "state dict", "TensorDict", "locked", "TensorDictParams"],
)
def test_models_of_each_kind_get_all_of_an_update(make: Callable[[float], Any], inplace: bool, extract_as: str) -> None:
    model = make(0.0)
    binding = bound(model, extract_as, inplace=inplace)
    for version in (1.0, 2.0, 3.0):
        update(binding, make(version))
        tensors = flat_weights(WeightStrategy(), model).tensors.values()
        assert {x for tensor in tensors for x in tensor.flatten().tolist()} == {version}


def test_without_a_model_there_is_nothing_to_apply() -> None:
    assert prepared(bound(None), {"anything": torch.ones(1)}) is None


def test_any_other_model_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="list"):
        bound([nn.Linear(1, 1)])


def test_a_dict_keeps_its_values_beside_its_tensors() -> None:
    model = {"w": torch.zeros(2), "step": 0}
    update(bound(model), {"w": torch.ones(2), "step": 7})
    assert model["step"] == 7
    tree = TensorDict({"w": torch.zeros(2), "step": 0})
    tree.set_non_tensor("note", "a")
    update(bound(tree), TensorDict({"w": torch.ones(2), "step": 1, "note": "b"}))
    assert tree["note"] == "b"
    with pytest.raises(SchemaMismatch, match="locked"):
        update(bound(tree.lock_()), TensorDict({"w": torch.full((2,), 2.0), "step": 1, "note": "c"}))
    assert (tree["w"] == 1).all()


def test_a_dict_with_two_entries_of_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a\.b'"):
        bound({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}})


def test_a_lazy_module_is_refused_until_it_has_run() -> None:
    for lazy in (nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)):
        with pytest.raises(SchemaMismatch, match="run one forward"):
            bound(nn.Sequential(lazy))
    model = nn.LazyLinear(2)
    model(torch.zeros(1, 3))
    binding = bound(model)
    update(binding, nn.Linear(3, 2))
    slab, before = published(nn.Linear(3, 2)), model.bias.detach().clone()
    model.weight = UninitializedParameter()
    with pytest.raises(SchemaMismatch, match="not initialised yet; run one forward"):
        binding.prepare(slab).resolve()
    assert torch.equal(model.bias, before)


def test_a_frozen_normalisation_goes_on_counting_after_an_update() -> None:
    source, model = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    source(torch.randn(8, 4))
    update(bound(model), source)
    assert model.num_batches_tracked == 1
    assert torch.equal(model.running_mean, source.running_mean)
    model(torch.randn(8, 4))
    assert model.num_batches_tracked == 2
    assert source.num_batches_tracked == 1


def test_a_model_on_the_meta_device_gets_memory_with_its_first_update() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Tied(), nn.BatchNorm1d(3))
    model[0].embed.weight.requires_grad_(False)
    source = nn.Sequential(Tied(), nn.BatchNorm1d(3))
    binding = bound(model)
    update(binding, source)
    assert isinstance(model[0].embed.weight, nn.Parameter)
    assert not model[0].embed.weight.requires_grad
    assert model[1].weight.requires_grad
    assert model[0].embed.weight is model[0].head.weight  # still tied
    assert not isinstance(model[1].running_mean, nn.Parameter)
    first = model[1].weight
    update(binding, filled(4, lambda: source))
    assert model[1].weight is first
    assert values_of(model) == {4}


@pytest.mark.parametrize("inplace", [True, False])
def test_a_model_made_in_inference_mode_can_be_updated(inplace: bool) -> None:
    with torch.inference_mode():
        model = filled(0)
    binding = bound(model, inplace=inplace)
    update(binding, filled(1))
    assert values_of(model) == {1}
    with torch.inference_mode():
        update(binding, filled(2))
    assert values_of(model) == {2}


def test_what_an_update_makes_is_no_inference_tensor_whatever_mode_the_caller_is_in() -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    ordinary, tree = nn.Linear(2, 2), {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    with torch.inference_mode():
        update(bound(meta), nn.Linear(2, 2))
        update(bound(ordinary, inplace=False), nn.Linear(2, 2))
        update(bound(tree, inplace=False), nn.Linear(2, 2))
    assert not any(t.is_inference() for t in (meta.weight, ordinary.weight, tree["weight"]))
    meta(torch.ones(1, 2)).sum().backward()
    ordinary(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("inplace", [True, False])
def test_dtypes_without_arithmetic_are_applied_as_bytes(dtype: torch.dtype, inplace: bool) -> None:
    content = torch.arange(6, dtype=torch.uint8)
    model = {"w": torch.zeros(6, dtype=torch.uint8).view(dtype), "f": torch.zeros(1)}
    update(bound(model, inplace=inplace), {"w": content.view(dtype), "f": torch.ones(1)})
    assert torch.equal(model["w"].view(torch.uint8), content)


# -- what is refused, and that nothing changes then --------------------------------------------------------------------


ZERO = torch.zeros(1)
POLICY, WRAPPED = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ModuleDict({"module": nn.Linear(2, 2)})
MISFITS: dict[str, tuple[Any, Any, list[str]]] = {
    "keys": (
        nn.ModuleDict({"policy": POLICY}),
        {"policy.0.weight": ZERO, "policy.0.scale": ZERO},
        ["missing [policy.0.bias, policy.1.", "unexpected [policy.0.scale]", "prefix 'policy.0.'", "prefix 'policy.'"],
    ),
    "a prefix too many": (nn.Linear(2, 2), WRAPPED, ["prefix 'module.' of the sent keys"]),
    "a prefix too few": (WRAPPED, nn.Linear(2, 2), ["prefix 'module.' of the model's keys"]),
    "many keys": ({"other": ZERO}, {f"k{i:03}": ZERO for i in range(500)}, ["k011, … (500 in all)"]),
    "every shape": (
        nn.Linear(2, 3),
        nn.Linear(2, 4).double(),
        ["weight: ", "[4, 2]", "[3, 2]", "bias: ", "[4]", "[3]"],
    ),
    "a value too many": ({"w": ZERO}, {"w": ZERO, "n": 1}, ["unexpected [n]"]),
    "a value for a tensor": ({"w": ZERO}, {"w": 1}, ["w: sent as a plain value"]),
    "a tensor for a value": ({"w": 1}, {"w": ZERO}, ["w: sent as a tensor", "the model's is a int"]),
}


@pytest.mark.parametrize(("model", "sent", "words"), MISFITS.values(), ids=MISFITS)
def test_a_mismatch_is_described(model: Any, sent: Any, words: list[str]) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        bound(model).check(published(sent).layout)
    assert [text for text in words if text not in str(caught.value)] == []
    assert "k012" not in str(caught.value), "long lists are cut"


def test_an_expanded_buffer_cannot_be_written_to() -> None:
    model = nn.Module()
    model.register_buffer("b", torch.zeros(1).expand(3))
    with pytest.raises(SchemaMismatch, match="expanded"):
        bound(model).check(published({"b": torch.zeros(3)}).layout)
    update(bound(model, inplace=False), {"b": torch.ones(3)})
    assert (model.b == 1).all()


class Extra(nn.Linear):
    state: Any = None

    def get_extra_state(self) -> Any:
        return torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_extra_state_is_required_of_a_state_dict_only() -> None:
    plain = nn.Linear(2, 2)
    bound(Extra(2, 2)).check(published(plain).layout)
    with pytest.raises(SchemaMismatch, match="missing \\[_extra_state\\]"):
        bound(Extra(2, 2), "state_dict").check(published(plain).layout)
    with pytest.raises(SchemaMismatch, match="unexpected \\[_extra_state\\]"):
        bound(plain).check(published(Extra(2, 2)).layout)


def test_values_that_are_not_those_of_the_layout_are_refused_when_they_come() -> None:
    model = {"w": torch.zeros(1), "n": 0}
    slab = published({"w": torch.ones(1), "n": 1})
    slab.values = b"\x92\x01\x02"
    with pytest.raises(ProtocolError):
        bound(model).prepare(slab)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parameter added": lambda m: m[2].register_parameter("scale", nn.Parameter(torch.ones(1))),
    "parameter removed": lambda m: delattr(m[2], "bias"),
    "parameter set to None": lambda m: setattr(m[2], "bias", None),
    "buffer removed": lambda m: delattr(m[1], "running_var"),
    "module removed": lambda m: m.__delitem__(2),
    "module added": lambda m: m.append(nn.Linear(1, 1)),
    "module replaced by another kind": lambda m: m.__setitem__(2, nn.Linear(4, 3)),
    "shape": lambda m: setattr(m[2], "weight", nn.Parameter(torch.zeros(5, 5))),
    "dtype": lambda m: m.double(),
    "module wrapped": lambda m: m.__setitem__(2, nn.ModuleDict({"inner": m[2]})),
    "shape by re-pointing": lambda m: setattr(m[2].bias, "data", torch.zeros(7)),
    "expanded": lambda m: setattr(m[2].bias, "data", torch.zeros(1).expand(2)),
}


# A dtype that has changed before the update is prepared is what cast=True is for.
CASES = [
    (change, when, cast)
    for change in CHANGES
    for when in ("before it is prepared", "before it is applied")
    for cast in (False, True)
    if not (change == "dtype" and cast and when == "before it is prepared")
]


@pytest.mark.parametrize(("change", "when", "cast"), CASES)
def test_a_changed_model_is_refused_before_anything_is_written(change: str, when: str, cast: bool) -> None:
    model = filled(0)
    binding = bound(model, cast=cast)
    update(binding, filled(0))  # what the binding has learnt then is out of date
    slab = published(filled(1))
    one = binding.prepare(slab) if when == "before it is applied" else None
    CHANGES[change](model)
    with pytest.raises(SchemaMismatch):
        (one or binding.prepare(slab)).resolve()
    assert values_of(model[0]) == {0}


def test_a_tensor_that_has_become_extra_state_is_refused() -> None:
    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("_extra_state", nn.Parameter(torch.zeros(2)))

    class After(nn.Module):
        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    model = nn.Sequential(Before(), nn.Linear(1, 1))
    one = prepared(bound(model), nn.Sequential(Before(), nn.Linear(1, 1)))
    model[0] = After()
    with pytest.raises(SchemaMismatch, match="became extra state"):
        one.resolve()


# -- the model that is there -------------------------------------------------------------------------------------------


def test_parameters_and_modules_that_were_replaced_are_the_ones_updated() -> None:
    model = filled(0)
    binding = bound(model)
    update(binding, filled(1))
    weight, last = model[0].weight, model[2]
    model.load_state_dict({k: v.clone() for k, v in filled(5).state_dict().items()}, assign=True)
    assert model[0].weight is not weight
    model[2] = nn.Linear(4, 2)
    update(binding, filled(2))
    assert values_of(model) == {2}
    assert (weight == 1).all()
    assert values_of(last) == {5}
    one = prepared(binding, filled(3))
    model[0].weight = nn.Parameter(torch.zeros(4, 3))
    model[2] = nn.Linear(4, 2)
    finish(one)
    assert values_of(model) == {3}


def test_a_buffer_may_be_set_to_none_and_back_on_both_sides() -> None:
    source, model = nn.Linear(2, 2), nn.Linear(2, 2)
    binding = bound(model)
    for value in (None, 1.0, None, 2.0, None, 3.0):
        for module in (source, model):
            module.register_buffer("more", None if value is None else torch.zeros(2))
        if value is not None:
            source.more.fill_(value)
        slab = published(source)
        if value == 1.0:  # layouts are compared when they are new
            binding.check(slab.layout)
        finish(binding.prepare(slab))
        assert value is None or (model.more == value).all()
    model.more = None
    with pytest.raises(SchemaMismatch, match=r"unexpected \[more\]|more: .* gone"):
        binding.prepare(published(source)).resolve()


def test_an_optimizer_goes_on_with_the_same_parameters_gradients_and_state() -> None:
    for inplace in (True, False):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        moments, gradient = optimizer.state[model.weight]["exp_avg"].clone(), model.weight.grad.clone()
        update(bound(model, inplace=inplace), nn.Linear(2, 2))
        assert torch.equal(optimizer.state[model.weight]["exp_avg"], moments)
        assert torch.equal(model.weight.grad, gradient)
        before = model.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("inplace", [True, False])
def test_an_update_is_seen_by_autograd_and_leaves_leaves(inplace: bool) -> None:
    model = nn.Linear(2, 2)
    loss = (model.weight * model.weight).sum()
    update(bound(model, inplace=inplace), nn.Linear(2, 2))
    assert model.weight.is_leaf
    assert model.weight.requires_grad
    assert model.weight.grad is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_in_place_keeps_the_memory_and_out_of_place_leaves_it_untouched() -> None:
    model = filled(0)
    pointers = [t.data_ptr() for t in model.state_dict().values()]
    update(bound(model), filled(1))
    assert [t.data_ptr() for t in model.state_dict().values()] == pointers
    parameters = list(model.parameters())
    old = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    update(bound(model, inplace=False), filled(2))
    assert values_of(model) == {2}
    assert all((tensor == 1).all() for tensor in old.values())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_out_of_place_gives_a_dict_new_tensors() -> None:
    for model in ({"w": torch.zeros(2)}, TensorDict({"w": torch.zeros(2)})):
        old = model["w"]
        update(bound(model, inplace=False), {"w": torch.ones(2)})
        assert (model["w"] == 1).all()
        assert (old == 0).all()


@pytest.mark.requirement(218)
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("meta", [True, False])
def test_a_model_never_shares_memory_with_the_slab(inplace: bool, meta: bool) -> None:
    with torch.device("meta" if meta else "cpu"):
        model = Extra(2, 2)
    binding = bound(model, inplace=inplace)
    slab = published(filled(1, lambda: Extra(2, 2)))
    finish(binding.prepare(slab))
    slab.buffer.zero_()
    assert (model.weight == 1).all()
    assert (model.state == 1).all()


def test_updates_of_one_layout_do_not_grow_what_is_remembered() -> None:
    model = {"w": torch.zeros(2), "x": torch.zeros(2), "y": torch.zeros(2), "a": torch.zeros(2)}
    binding = bound(model)
    for i in range(20):
        order = list(model)
        order = order[i % 4 :] + order[: i % 4] if i < 8 else order
        update(binding, {key: torch.full((2,), float(i)) for key in order})
        assert all((t == i).all() for t in model.values())
    assert len(binding.bound.plans) <= 4


def test_different_layouts_of_one_model_are_told_apart() -> None:
    model = {"a": torch.zeros(2), "b": torch.zeros(2)}
    binding = bound(model)
    a, b = torch.full((2,), 1.0), torch.full((2,), 2.0)
    slabs = [published({"a": a, "b": b}), published({"b": b, "a": a}), published({"a": a, "b": a})]
    for slab in [*slabs, *slabs]:
        finish(binding.prepare(slab))
        assert torch.equal(model["a"], a)
        assert torch.equal(model["b"], a if slab is slabs[2] else b)


# -- ties --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [True, False])
def test_tied_weights_of_the_sender_go_into_a_model_without_ties(inplace: bool) -> None:
    model = Tied(tied=False)
    source = Tied()
    update(bound(model, inplace=inplace), source)
    assert torch.equal(model.embed.weight, source.embed.weight)
    assert torch.equal(model.head.weight, source.embed.weight)
    model.embed.weight.data.zero_()
    assert model.head.weight.any()
    update(bound(tied := Tied(), inplace=inplace), source)
    assert tied.head.weight is tied.embed.weight
    assert torch.equal(tied.head.weight, source.head.weight)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("cast", [True, False])
def test_a_tied_model_takes_equal_values_and_refuses_different_ones(inplace: bool, cast: bool) -> None:
    model = Tied()
    binding = bound(model, inplace=inplace, cast=cast)
    equal = Tied(tied=False)
    equal.embed.weight.data[0, 0] = float("nan")  # as bytes, NaN equals NaN
    equal.head.weight.data.copy_(equal.embed.weight.data)
    update(binding, equal)
    assert torch.equal(model.head.weight[1:], equal.head.weight[1:])
    assert model.head.weight is model.embed.weight
    before = model.embed.weight.detach().clone()
    with pytest.raises(SchemaMismatch, match=r"'embed\.weight' and 'head\.weight' are tied"):
        update(binding, Tied(tied=False))
    assert torch.equal(model.embed.weight[1:], before[1:])


def test_the_values_for_tied_tensors_are_compared_each_time_that_a_slab_comes() -> None:
    model = Tied()
    binding = bound(model)
    source = Tied(tied=False)
    slab = published(source, binding.strategy)
    binding.check(slab.layout)
    for tensor in slab.views:
        tensor.fill_(1)
    for _ in range(2):
        binding.prepare(slab).resolve()
    slab.views[0].fill_(2)
    with pytest.raises(SchemaMismatch, match="are tied in this model"):
        binding.prepare(slab).resolve()


def test_what_is_prepared_for_a_slab_is_used_again_for_the_same_model_only() -> None:
    model = nn.Linear(3, 2)
    binding, other = bound(model), bound(nn.Linear(3, 2))
    slab = published(nn.Linear(3, 2), binding.strategy)
    first = binding.prepare(slab)
    first.resolve()
    assert binding.prepare(slab) is first
    assert other.prepare(slab) is not first
    binding.bound.refresh()
    assert binding.prepare(slab) is not first


@pytest.mark.parametrize("inplace", [True, False])
def test_parameters_over_the_same_memory_are_tied(inplace: bool) -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    source = Tied()
    update(bound(model, inplace=inplace), source)
    assert torch.equal(model.head.weight, source.head.weight)
    model.head.weight.data.zero_()
    assert not model.embed.weight.any()


def test_a_tie_made_after_the_model_was_registered_is_noticed() -> None:
    model = Tied(tied=False)
    one = prepared(bound(model), Tied(tied=False))
    model.head.weight = model.embed.weight
    before = model.embed.weight.detach().clone()
    with pytest.raises(SchemaMismatch, match="tied"):
        one.resolve()
    assert torch.equal(model.embed.weight, before)
    model.head.weight = nn.Parameter(model.embed.weight.detach())  # another one over the same memory
    with pytest.raises(SchemaMismatch, match="tied"):
        one.resolve()
    assert torch.equal(model.embed.weight, before)


def test_a_tie_broken_after_the_model_was_registered_gets_both_halves_updated() -> None:
    model = Tied()
    binding = bound(model)
    update(binding, Tied())
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert model.head.weight is not model.embed.weight
    source = Tied()
    update(binding, source)
    assert torch.equal(model.head.weight, source.head.weight)
    assert torch.equal(model.embed.weight, source.head.weight)


class View(nn.Module):
    """A Parameter, two that are halves of it, column by column, and one that is its first row."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.zeros(3, 4))
        self.left = nn.Parameter(self.whole.detach()[:, :2])
        self.right = nn.Parameter(self.whole.detach()[:, 2:])
        self.row = nn.Parameter(self.whole.detach()[0])


@pytest.mark.parametrize("cast", [True, False])
def test_values_that_do_not_fit_a_view_and_its_base_are_refused(cast: bool) -> None:
    model, source = View(), View()
    binding = bound(model, cast=cast)
    for value in (1.0, 2.0):
        update(binding, filled(value, lambda: source))
        assert values_of(model) == {value}
    source = copy.deepcopy(source)  # in which they are no views any more
    update(binding, filled(3, lambda: source))
    source.row.data[1] = 7
    with pytest.raises(SchemaMismatch, match=r"'row' .*shares memory with .*'whole'.* but the sender's values"):
        update(binding, source)
    assert values_of(model) == {3}
    model.row = nn.Parameter(torch.zeros(4))
    update(binding, source)
    assert model.row.tolist() == [3, 7, 3, 3]
    assert values_of(model) == {3, 7}


def test_arrays_may_be_views_too() -> None:
    base = np.zeros((2, 2), np.float32)
    model = {"columns": base.T, "rows": base}
    rows = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    update(bound(model), {"columns": rows.t(), "rows": rows})
    assert base.tolist() == rows.tolist()
    with pytest.raises(SchemaMismatch, match="shares memory with"):
        update(bound(model), {"columns": rows, "rows": rows})
    assert base.tolist() == rows.tolist()


# -- code of the user's ------------------------------------------------------------------------------------------------


@pytest.mark.requirement(218)
@pytest.mark.parametrize("model", [None, {"other": torch.zeros(1)}], ids=["no model", "another model"])
def test_a_custom_apply_gets_weights_of_its_own(model: Any) -> None:
    kept = []
    binding = bound(model, apply=kept.append)
    slab = published({"w": torch.ones(4), "n": 3})
    binding.check(slab.layout)  # what fits is its own affair
    one = binding.prepare(slab)
    one.resolve()
    assert not kept
    finish(one)
    slab.buffer.zero_()
    assert (kept[0]["w"] == 1).all()
    assert kept[0]["n"] == 3


def test_a_binding_lets_go_of_a_model_when_it_is_dropped() -> None:
    model = filled(0)
    gone = weakref.ref(model)
    update(bound(model), filled(1))
    del model
    gc.collect()
    assert gone() is None


def test_copying_into_nothing_is_allowed() -> None:
    copy_tensors([torch.zeros(0)], [torch.zeros(0)])
    update(bound(nn.Identity()), nn.Identity())


@pytest.mark.parametrize("numel", [4, 100_000])
def test_a_tensor_whose_storage_was_freed_is_refused(numel: int) -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(numel)), nn.Parameter(torch.zeros(0))
    source = nn.Module()
    source.a, source.b = nn.Parameter(torch.ones(numel)), nn.Parameter(torch.zeros(0))
    binding = bound(model)
    update(binding, source)
    model.a.untyped_storage().resize_(0)
    with pytest.raises(SchemaMismatch, match=r"a: .*has no memory any more"):
        update(binding, source)
    model.a.untyped_storage().resize_(4 * numel)
    update(binding, source)
    assert torch.equal(model.a, source.a)


def without_memory() -> dict[str, tuple[Any, str]]:
    complex_view = torch.zeros(3, 3, dtype=torch.complex64).conj()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them prototypes
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
        rows = torch.eye(3).to_sparse_csr()
    return {
        "sparse": (torch.eye(3).to_sparse(), "stored as torch.sparse_coo, which cannot receive: keep a dense tensor"),
        "rows": (rows, "stored as torch.sparse_csr, which cannot receive"),
        "nested": (nested, "a nested tensor, which cannot receive"),
        "jagged": (jagged, "a nested tensor, which cannot receive"),
        "conjugated": (complex_view, r"read: use `\.resolve_conj\(\)`"),
        "negated": (complex_view.imag, r"read: use .*`\.resolve_neg\(\)`"),
    }


@pytest.mark.parametrize("kind", without_memory())
def test_a_tensor_that_cannot_be_written_to_is_refused_with_a_remedy(kind: str) -> None:
    own, text = without_memory()[kind]
    dtype = torch.complex64 if kind == "conjugated" else torch.float32
    with pytest.raises(SchemaMismatch, match=f"w: .*{text}"):
        update(bound({"w": own}), {"w": torch.ones(3, 3, dtype=dtype)})


def test_a_part_that_is_a_tensordict_may_be_replaced() -> None:
    model = nn.Module()
    model.part = TensorDictParams(TensorDict({"a": torch.zeros(2)}))
    tensors = ModelTensors(model, "tensordict")
    assert not tensors.is_stale()
    model.part = TensorDictParams(TensorDict({"a": torch.zeros(2)}))
    assert tensors.is_stale()


# -- which weights a model can take ------------------------------------------------------------------------------------


def apply(model: Any, weights: Any, extract_as: str = "tensordict") -> None:
    WeightStrategy(extract_as).apply_weights(model, weights)


@pytest.mark.requirement(237)
@pytest.mark.parametrize("tied", [True, False])
def test_a_missing_tensor_may_be_a_tied_one(tied: bool) -> None:
    weights = dict(Tied().named_parameters())
    with pytest.raises(SchemaMismatch, match=r"'head.weight' to 'embed.weight'.*state_dict\(\)"):
        apply(Tied(tied), weights)


class Cached(nn.Module):
    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        if length is not None:
            self.register_buffer("table", torch.zeros(length), persistent=False)


@pytest.mark.requirement(237)
@pytest.mark.parametrize("sent", [3, None])
def test_a_non_persistent_buffer_that_does_not_fit_is_called_that(sent: int | None) -> None:
    remedy = r"\. \[table\] is a non-persistent buffer: strategy='state_dict' or exclude="
    with pytest.raises(SchemaMismatch, match=remedy):
        apply(Cached(4), Cached(sent))
    apply(Cached(4), Cached(sent), "state_dict")


class Compiled(nn.Module):
    """A child of the name that torch.compile gives to the module."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Sequential(nn.Linear(2, 2))
        self.add_module("0", nn.Linear(2, 2))


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_a_child_whose_names_are_those_of_its_parent_is_refused(extract_as: str) -> None:
    with pytest.raises(ValueError, match=r"called '(_orig_mod\.)?0\.(weight|bias)'"):
        flat_weights(WeightStrategy(extract_as), Compiled())
    with pytest.raises(ValueError, match=r"called '0\.weight'"):
        BoundModel(Compiled(), extract_as)


@pytest.mark.requirement(237)
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("make", [lambda: Quantised(torch.zeros(3)), lambda: scaled(torch.zeros(3))])
def test_nothing_is_written_where_one_destination_takes_no_copy(make: Any, inplace: bool) -> None:
    """Also of a dict, and where it comes between two updates."""
    odd = {"a": torch.zeros(40_000), "b": make()}
    with pytest.raises(SchemaMismatch, match=f"b: .*{type(odd['b']).__name__}"):
        WeightStrategy().apply_weights(odd, {"a": torch.ones(40_000), "b": torch.ones(3)}, inplace=inplace)
    assert not odd["a"].any()
    model = {"a": torch.zeros(40_000), "b": torch.zeros(3)}
    flat = flat_weights(WeightStrategy(), {"a": torch.ones(40_000), "b": torch.ones(3)})
    one = prepare_flat(BoundModel(model, "tensordict", inplace=inplace), flat)
    model["b"] = odd["b"]
    with pytest.raises(SchemaMismatch, match=f"'b'.*{type(odd['b']).__name__}"):
        one.apply_now()
    assert not model["a"].any()


@pytest.mark.requirement(237)
def test_weights_that_have_lost_their_memory_are_refused_when_they_are_applied_here() -> None:
    weights = {"a": torch.ones(3)}
    weights["a"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="'a' has no memory any more"):
        apply({"a": torch.zeros(3)}, weights)
