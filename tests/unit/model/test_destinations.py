"""Which models can take which weights, and in which words others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from asyncsync.errors import SchemaMismatch
from asyncsync.model.bound_model import BoundModel
from asyncsync.model.strategy import WeightStrategy, flat_weights
from asyncsync.model.update import prepare_flat
from helpers.odd_tensors import Quantised, scaled


def apply(model: Any, weights: Any, extract_as: str = "tensordict") -> None:
    WeightStrategy(extract_as).apply_weights(model, weights)


class Head(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


@pytest.mark.requirement(237)
@pytest.mark.parametrize("tied", [True, False])
def test_a_missing_tensor_may_be_a_tied_one(tied: bool) -> None:
    weights = dict(Head(tied=True).named_parameters())
    with pytest.raises(SchemaMismatch, match=r"'lm_head.weight' to 'embed.weight'.*state_dict\(\)"):
        apply(Head(tied=tied), weights)


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
    update = prepare_flat(BoundModel(model, "tensordict", inplace=inplace), flat)
    model["b"] = odd["b"]
    with pytest.raises(SchemaMismatch, match=f"'b'.*{type(odd['b']).__name__}"):
        update.apply_now()
    assert not model["a"].any()


@pytest.mark.requirement(237)
def test_weights_that_have_lost_their_memory_are_refused_when_they_are_applied_here() -> None:
    weights = {"a": torch.ones(3)}
    weights["a"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="'a' has no memory any more"):
        apply({"a": torch.zeros(3)}, weights)
