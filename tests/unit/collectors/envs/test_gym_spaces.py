"""Specs, also of spaces that TorchRL's GymEnv has no usable form for; tests/collectors/test_gym_env.py has more."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from asyncsync.collectors.envs.gym import BoxSpec, CompositeSpec, Spec, leaves_of


def spec_of(space: Any, categorical: bool = False) -> Spec:
    (leaf,) = leaves_of(space, "it", categorical=categorical)
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
    ("space", "value", "error", "message"),
    [
        (spaces.Box(-1, 1, (4,)), np.zeros(1, np.float32), ValueError, r"it has shape \(1,\), not \(4,\)"),
        (spaces.Box(-1, 1, (2, 3)), [0.0, 0.0, 0.0], ValueError, r"it has shape \(3,\), not \(2, 3\)"),
        (spaces.Box(-1, 1, (2, 3)), np.zeros((3, 2)), ValueError, r"it has shape \(3, 2\), not \(2, 3\)"),
        (spaces.Box(-1, 1, (4,)), 0.0, ValueError, r"it has shape \(\), not \(4,\)"),
        (spaces.MultiBinary(3), np.ones(1, np.int8), ValueError, r"it has shape \(1,\), not \(3,\)"),
        (spaces.MultiDiscrete([2, 2]), np.zeros(1, np.int64), ValueError, r"it has shape \(1,\), not \(2,\)"),
        (spaces.MultiDiscrete([2, 3]), 1, ValueError, r"it has shape \(\), not \(2,\)"),
        (spaces.Discrete(3), np.zeros(2, np.int64), ValueError, r"it has shape \(2,\), not \(\)"),
        (spaces.Box(-1, 1, (4,)), None, TypeError, "it is None"),
        (spaces.Discrete(3), None, TypeError, "it is None"),
        (spaces.MultiDiscrete([2, 3]), {}, TypeError, "it is a dict"),
        (spaces.Box(0, 9, (1,), np.uint8), np.zeros(1), TypeError, "Cannot cast"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_refused_not_broadcast(
    space: Any, value: Any, error: type[Exception], message: str, categorical: bool
) -> None:
    with pytest.raises(error, match=message):
        written(spec_of(space, categorical), value)


def test_dimensions_of_one_before_the_others_are_let_pass() -> None:
    value = np.arange(4, dtype=np.float32)
    assert written(spec_of(spaces.Box(-9, 9, (4,))), value[None]).tolist() == value.tolist()
    assert written(spec_of(spaces.Box(-9, 9, (1, 4))), list(value)).tolist() == [value.tolist()]
    assert written(spec_of(spaces.Box(-9, 9, ())), value[3:]).tolist() == [3.0]
    assert written(spec_of(spaces.Discrete(3)), np.array([2])).tolist() == [0, 0, 1]


NUMBERS = [spaces.Discrete(2, start=3), spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([[2, 2], [2, 2]])]


@pytest.mark.parametrize("batch", [(), (5,)])
@pytest.mark.parametrize("space", NUMBERS, ids=str)
def test_a_choice_is_an_index_in_range(space: Any, batch: tuple[int, ...]) -> None:
    spec = spec_of(space, categorical=True).batched(batch)
    low = spec.read(np.zeros(spec.shape, np.int64))
    for dtype in (np.int8, np.uint8, np.int32, np.uint64, np.bool_):
        np.testing.assert_array_equal(spec.read(np.zeros(spec.shape, dtype)), low)
        np.testing.assert_array_equal(spec.read(np.ones(spec.shape, dtype)), low + 1)
        assert spec.read(np.ones(spec.shape, dtype)).dtype.kind in "iu"  # all that Gymnasium's spaces contain
    for dtype in (np.float32, np.float64, np.complex64):
        with pytest.raises(ValueError, match=f"has dtype {np.dtype(dtype)}, but a choice is an index, of an integer"):
            spec.read(np.zeros(spec.shape, dtype))
    for wrong in (-1, 3, 7):
        action = np.zeros(spec.shape, np.int64)
        action[(-1,) * action.ndim] = wrong
        message = f"has the index {wrong}, but the [23] choices are 0 to [12]"
        for dtype in (np.int64, np.int16):
            with pytest.raises(ValueError, match=message):
                spec.read(action.astype(dtype))


def test_bits_may_be_of_any_dtype() -> None:
    spec = spec_of(spaces.MultiBinary(3), categorical=True)
    for dtype in (np.bool_, np.int8, np.float32):
        assert spec.read(np.array([0, 1, 1], dtype)).tolist() == [0, 1, 1]


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
        (spaces.Tuple([spaces.Discrete(2)]), "'it': a Tuple space .*use gymnasium.wrappers"),
        (spaces.Text(3), "'it': a Text space"),
        (spaces.Dict(a=spaces.Dict(b=spaces.Text(3))), "'a.b': a Text space"),
        (spaces.MultiDiscrete([[2, 3]]), "'it': a MultiDiscrete of 2 dimensions with different numbers"),
        (spaces.Box(0, 1, (2,), np.longdouble), "'it': torch has no dtype for NumPy's"),
    ],
    ids=str,
)
def test_a_space_without_a_tensor_form_is_refused_by_name(space: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leaves_of(space, "it", categorical=False)


def test_a_composite_draws_nested_values() -> None:
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Dict(c=spaces.Box(-1, 1, (3,))))
    leaves = leaves_of(space, "it", categorical=False)
    assert [leaf.key for leaf in leaves] == ["a", ("b", "c")]
    composite = CompositeSpec({leaf.key: leaf.spec.batched((4,)) for leaf in leaves}, torch.Size([4]), None)
    for td in (composite.rand(), composite.zero()):
        assert isinstance(td, TensorDict)
        assert td.batch_size == (4,)
        assert td["b", "c"].shape == (4, 3)
    assert len(composite) == 2
    assert "OneHotSpec" in repr(composite)
