"""Specs, also of spaces that TorchRL's GymEnv has no usable form for; tests/conformance/test_gym_env.py has more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from asyncsync.collectors.gym_spaces import BoxSpec, Spec, leaves_of


def spec_of(space: Any, categorical: bool = False) -> Spec:
    (leaf,) = leaves_of(space, "it", categorical=categorical, device=None)
    return leaf.spec


def written(spec: Spec, value: Any) -> torch.Tensor:
    out = torch.empty(spec.shape, dtype=spec.dtype)
    spec.write(out.numpy(), value)
    return out


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([2, 3], start=[5, -1]),
        spaces.MultiDiscrete([3, 3], start=[1, 2]),
        spaces.MultiDiscrete([[2, 2], [2, 2]]),
        spaces.MultiBinary((2, 3)),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(-3, 7, (2,), np.int32),
    ],
    ids=str,
)
def test_a_value_survives_being_written_and_read(space: Any, categorical: bool) -> None:
    spec = spec_of(space, categorical)
    space.seed(0)
    for _ in range(20):
        value = space.sample()
        as_action = spec.read(written(spec, value).numpy())
        np.testing.assert_array_equal(as_action, value)
    batch = [space.sample() for _ in range(5)]
    rows = spec.batched((5,))
    assert rows.shape == (5, *spec.shape)
    np.testing.assert_array_equal(rows.read(written(rows, np.stack(batch)).numpy()), np.stack(batch))


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([2, 3], start=[5, -1]),
        spaces.Box(0, 255, (3,), np.uint8),
        spaces.Box(-3, 7, (2,), np.int64),
        spaces.Box(0, np.inf, (3,), np.float32),
        spaces.Box(np.array([-np.inf, 0, -1], np.float32), np.array([5, np.inf, 1], np.float32)),
        spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (3,), np.float32),
    ],
    ids=str,
)
def test_random_values_are_of_the_space_and_finite(space: Any, categorical: bool) -> None:
    spec = spec_of(space, categorical).batched((100,))
    drawn = spec.rand()
    assert (drawn.shape, drawn.dtype) == (spec.shape, spec.dtype)
    assert drawn.isfinite().all()
    for value in spec.read(drawn.numpy()):
        assert space.contains(value), value
    assert len(drawn.unique(dim=0)) > 1
    assert spec.rand((2,)).shape == (2, *spec.shape)
    assert not spec.zero().any()


def test_a_spec_moves_with_its_bounds() -> None:
    spec = BoxSpec(np.zeros(2, np.float32), np.ones(2, np.float32), torch.float32).to(torch.device("meta"))
    assert spec.device == spec.low.device == spec.high.device == torch.device("meta")
    assert spec.zero().device == torch.device("meta")
    assert "shape=(2,)" in repr(spec)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Tuple([spaces.Discrete(2)]), "'it': a Tuple space has no tensor form here; use gymnasium.wrappers"),
        (spaces.Text(3), "'it': a Text space"),
        (spaces.Dict(a=spaces.Dict(b=spaces.Text(3))), "'a.b': a Text space"),
        (spaces.MultiDiscrete([[2, 3]]), "'it': a MultiDiscrete of 2 dimensions with different numbers"),
        (spaces.Box(0, 1, (2,), np.longdouble), "'it': torch has no dtype for NumPy's"),
    ],
    ids=str,
)
def test_a_space_without_a_tensor_form_is_refused_by_name(space: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leaves_of(space, "it", categorical=False, device=None)


def test_a_composite_draws_nested_values() -> None:
    from asyncsync.collectors.gym_spaces import CompositeSpec

    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Dict(c=spaces.Box(-1, 1, (3,))))
    leaves = leaves_of(space, "it", categorical=False, device=None)
    assert [leaf.key for leaf in leaves] == ["a", ("b", "c")]
    composite = CompositeSpec({leaf.key: leaf.spec.batched((4,)) for leaf in leaves}, torch.Size([4]), None)
    for td in (composite.rand(), composite.zero()):
        assert isinstance(td, TensorDict)
        assert td.batch_size == (4,)
        assert td["b", "c"].shape == (4, 3)
    assert len(composite) == 2
    assert "OneHotSpec" in repr(composite)
