"""TensorDictModules as a collector calls them: what comes of it is what comes of calling them as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
    set_skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from asyncsync.collectors.rollout.policies import plainly_called


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a * self.factor

    def other(self, a: torch.Tensor) -> torch.Tensor:
        return a + 1


class Own(TensorDictModule):  # type: ignore[misc]
    def _call_module(self, tensors: Any, **kwargs: Any) -> Any:
        return super()._call_module(tensors, **kwargs) + 100


def with_hook(module: Any) -> Any:
    module.register_forward_hook(lambda module, given, out: out.set("seen", torch.ones(2)))
    return module


def with_own_forward() -> TensorDictModule:
    module = one()
    module.forward = lambda td: td.set("forwarded", torch.ones(2))
    return module


def one(given: Any = "a", out: str = "out", **options: Any) -> TensorDictModule:
    return TensorDictModule(Scaled(), [given], [out], **options)


def network(out: str = "logits") -> TensorDictModule:
    return TensorDictModule(lambda a, b: torch.stack([a, b], -1), ["a", ("in", "b")], [out])


def then() -> TensorDictModule:
    return one("logits")


def actor(*parts: TensorDictModule, **options: Any) -> ProbabilisticTensorDictSequential:
    last = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=torch.distributions.OneHotCategorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(*(parts or (network(),)), last, **options)


def sequence(*parts: TensorDictModule, **options: Any) -> TensorDictSequential:
    return TensorDictSequential(*(parts or (network(), then())), **options)


class OwnSequence(TensorDictSequential):  # type: ignore[misc]
    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        return super()._run_module(*args, **kwargs).set("ran", torch.ones(2))


MODULES: dict[str, Callable[[], TensorDictModule]] = {
    "one tensor": one,
    "no module": lambda: TensorDictModule(lambda a: a + 1, ["a"], ["out"]),
    "two of each": lambda: TensorDictModule(lambda a, b: (b, a), ["a", ("in", "b")], ["x", ("new", "y")]),
    "a list": lambda: TensorDictModule(lambda a: [a, a], ["a"], ["x"]),
    "ignored": lambda: TensorDictModule(lambda a: (a, a + 1), ["a"], ["_", "y"]),
    "a dict": lambda: TensorDictModule(lambda a: {"x": a, "more": a}, ["a"], ["x"]),
    "a TensorDict": lambda: TensorDictModule(lambda a: TensorDict({"x": a}, [2]), ["a"], ["x"]),
    "a parameter": lambda: TensorDictModule(lambda a: nn.Parameter(a), ["a"], ["x"]),
    "a number": lambda: TensorDictModule(lambda a: 3, ["a"], ["x"]),
    "nothing": lambda: TensorDictModule(lambda a: None, ["a"], ["x"]),
    "too many": lambda: TensorDictModule(lambda a: (a, a), ["a"], ["x"]),
    "another batch": lambda: TensorDictModule(lambda a: a.sum(), ["a"], ["x"]),
    "by name": lambda: TensorDictModule(lambda *, given: given + 1, {"given": "a"}, ["x"]),
    "a method": lambda: one(method="other"),
    "options": lambda: TensorDictModule(torch.add, ["a", "a"], ["x"], method_kwargs={"alpha": 3}),
    "options of inputs": lambda: TensorDictModule(
        lambda x: x.sum(-1), [("lazy", "x")], ["x"], get_kwargs={"as_padded_tensor": True}
    ),
    "not in place": lambda: one(inplace=False),
    "empty": lambda: one(inplace="empty"),
    "missing": lambda: TensorDictModule(lambda a, c: a if c is None else c, ["a", "c"], ["x"]),
    "strictly missing": lambda: TensorDictModule(lambda c: c, ["c"], ["x"], strict=True),
    "missed": lambda: TensorDictModule(lambda c: c + 1, ["c"], ["x"]),
    "no tensor": lambda: TensorDictModule(lambda text: torch.full((2,), len(text)), ["text"], ["x"]),
    "a nested one": lambda: TensorDictModule(lambda td: td["b"] + 1, ["in"], ["x"]),
    "hooked": lambda: with_hook(one()),
    "with a forward of its own": with_own_forward,
    "a class of its own": lambda: Own(Scaled(), ["a"], ["x"]),
    "selected": lambda: TensorDictModule(lambda a: (a, a + 1), ["a"], ["x", "y"]).select_out_keys("y"),
    "a sequence": sequence,
    "a sequence of one": lambda: sequence(network()),
    "a sequence of sequences": lambda: sequence(sequence(), actor()),
    "twice the same": lambda: sequence(*[one("a", "a")] * 2),
    "a part with a hook": lambda: sequence(with_hook(one()), network(), then()),
    "a sequence with a hook": lambda: with_hook(sequence()),
    "an actor with a hook": lambda: with_hook(actor()),
    "a tolerant sequence": lambda: sequence(network(), one("c"), partial_tolerant=True),
    "a sequence in which a part fails": lambda: sequence(network(), one("c")),
    "a selection of a sequence": lambda: sequence().select_out_keys("out"),
    "a selection at once": lambda: sequence(selected_out_keys=["out"]),
    "a sequence into another": lambda: sequence(inplace=False),
    "a sequence of a class of its own": lambda: OwnSequence(network(), then()),
    "a dictionary of parts": lambda: TensorDictSequential({"first": network(), "second": then()}),
    "an actor": actor,
    "an actor of two networks": lambda: actor(network("in2"), network()),
    "a network that looks at the exploration": lambda: actor(
        TensorDictModule(lambda a: torch.full((2, 2), float(interaction_type() is None)), ["a"], ["logits"])
    ),
    "an actor that selects": lambda: actor(selected_out_keys=["action"]),
    "an actor and what follows": lambda: ProbabilisticTensorDictSequential(actor(), then(), return_composite=True),
    "an actor that has its action": lambda: actor(network(), network("action")),
    "an actor without parameters": lambda: actor(network("other")),
}


def given() -> TensorDict:
    uneven = lazy_stack([TensorDict({"x": torch.ones(1)}), TensorDict({"x": torch.ones(2)})])
    nested = TensorDict({"b": torch.ones(2)}, [2])
    return TensorDict({"a": torch.arange(2.0), "in": nested, "text": "three", "lazy": uneven}, [2])


def outcome(call: Callable[[TensorDictBase], TensorDictBase], td: TensorDict) -> tuple[Any, ...]:
    try:
        out = call(td)
    except Exception as error:
        return type(error), str(error)
    values = {
        str(key): value if isinstance(value, NonTensorData | str) else (value.tolist(), value.dtype, type(value))
        for key, value in sorted(out.exclude("lazy").items(True, True), key=str)
    }
    return out is td, values


@pytest.mark.parametrize("mode", [None, InteractionType.RANDOM, InteractionType.DETERMINISTIC])
@pytest.mark.parametrize("name", MODULES)
def test_what_comes_of_it_is_the_same(name: str, mode: InteractionType | None) -> None:
    quick, same = plainly_called(MODULES[name]()), MODULES[name]()
    with set_interaction_type(mode):
        for seed in range(3):
            torch.manual_seed(seed)
            found = outcome(quick, given())
            torch.manual_seed(seed)
            assert found == outcome(same, given())


def test_what_is_changed_later_counts() -> None:
    module = one()
    quick = plainly_called(module)
    assert quick(given())["out"].tolist() == [0, 2]
    with set_skip_existing(True):
        assert quick(given().set("out", torch.zeros(2)))["out"].tolist() == [0, 0]
    module.module = Scaled(3.0)
    assert quick(given())["out"].tolist() == [0, 3]
    module.in_keys, module.out_keys = [("in", "b")], ["elsewhere"]
    assert quick(given())["elsewhere"].tolist() == [3, 3]
    seen: list[Any] = []
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        hook = register(lambda *_: seen.append(1))
        quick(given())
        assert seen == [1]
        hook.remove()
        seen.clear()
    module.compile(backend=lambda graph, inputs: seen.append(graph) or graph.forward)
    assert quick(given())["elsewhere"].tolist() == [3, 3]
    assert seen


def test_a_module_is_called_once_whatever_it_returns() -> None:
    calls: list[int] = []

    def returns(a: torch.Tensor) -> Any:
        calls.append(1)
        return {"x": a}

    quick = plainly_called(TensorDictModule(returns, ["a"], ["x"]))
    for count in (1, 2, 3):
        assert quick(given())["x"].tolist() == [0, 1]
        assert len(calls) == count


def test_a_sequence_whose_parts_are_changed_later() -> None:
    made = sequence()
    quick = plainly_called(made)
    assert quick(given())["out"].tolist() == [[0, 2], [2, 2]]
    made.module[1] = TensorDictModule(Scaled(3.0), ["logits"], ["out"])
    assert quick(given())["out"].tolist() == [[0, 3], [3, 3]]
