"""The documented interface of a scheme: constructor, overloads of init, hooks of a subclass, properties."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from asyncsync import SchemaMismatch, WeightStrategy
from helpers.apis import BLOCKING, Api, bare
from helpers.pairs import Context, Model, connected, fill, read, receiver_of

pytestmark = pytest.mark.schemes("every")

SCHEMES = [
    "WeightSyncScheme",
    "ZMQWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
]


@pytest.mark.requirement(38, 83)
@pytest.mark.schemes("all")
@pytest.mark.both_loops
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
async def test_both_strategies_carry_a_module_into_another(api: Api, strategy: str) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    source(torch.randn(8, 3))
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    async with api.crew(2, scheme=api.scheme(strategy), source=source, models=models) as (sender, receivers, _):
        assert all(isinstance(scheme.weights, TensorDictBase) for scheme in (sender, *receivers))
        assert (sender.model_id, sender.worker_idx, sender.context) == ("policy", None, None)
        for index, (receiver, model) in enumerate(zip(receivers, models, strict=True)):
            assert (receiver.model, receiver.model_id, receiver.worker_idx) == (model, "policy", index)
            for name, tensor in source.state_dict().items():
                assert torch.equal(model.state_dict()[name], tensor), name


def one_for_each(worker: int, weights: TensorDictBase) -> TensorDictBase:
    assert isinstance(weights, TensorDictBase)
    return weights + worker


def mapped(**source: Any) -> dict[str, Any]:
    return {**source, "device_map_fn": one_for_each, "num_workers": 2}


OVERLOADS: dict[str, tuple[Callable[[Model, Model], dict[str, Any]], list[set[float]], list[set[float]]]] = {
    # The arguments made of two models of 2 and 3; what two workers have; what a bare send brings when the first is 4.
    "params_map": (lambda a, b: {"params_map": {1: of(b), 0: of(a)}}, [{2}, {3}], [{4}, {3}]),
    "weights, devices": (lambda a, _: {"weights": of(a), "devices": ["cpu"] * 2}, [{2}, {2}], [{4}, {4}]),
    "model, devices": (lambda a, _: {"model": a, "devices": [torch.device("cpu")] * 2}, [{2}, {2}], [{4}, {4}]),
    "weights, device_map_fn": (lambda a, _: mapped(weights=of(a)), [{2}, {3}], [{4}, {5}]),
    "model, device_map_fn": (lambda a, _: mapped(model=a), [{2}, {3}], [{4}, {5}]),
}


def of(model: nn.Module) -> TensorDict:
    return TensorDict.from_module(model)


@pytest.mark.requirement(55, 56, 57, 58, 59, 60, 61, 62)
@pytest.mark.parametrize("model_id", [None, pytest.param("policy", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", OVERLOADS)
async def test_each_overload_of_init_on_sender(api: Api, name: str, model_id: str | None) -> None:
    make, initial, later = OVERLOADS[name]
    arguments = make(first := Model(2), Model(3)) | ({} if model_id is None else {"model_id": model_id})
    scheme = api.scheme()
    scheme.init_on_sender(**arguments)
    assert (scheme.model_id, scheme.bus.num_workers) == (model_id, 2)
    models = [Model(), Model()]  # receivers may give the only model any name
    async with connected(scheme, *(receiver_of(scheme, i, model) for i, model in enumerate(models))):
        assert [read(model) for model in models] == initial
        fill(first, 4)
        await scheme.send_async(worker_ids=1)
        assert [read(model) for model in models] == [initial[0], later[1]]
        await scheme.send_async()
        assert [read(model) for model in models] == later, "a bare send takes the current values"
        await scheme.send_async(Model(7), worker_ids=[1])
        assert [read(model) for model in models] == [later[0], {8 if "device_map_fn" in arguments else 7}]


@pytest.mark.requirement(63, 67)
@pytest.mark.parametrize("given", ["with connect", "with the first send"])
async def test_without_arguments_the_weights_come_later(api: Api, given: str) -> None:
    scheme = api.scheme()
    scheme.init_on_sender()
    receiver = receiver_of(scheme, 0, model := Model())
    async with scheme, receiver:
        weights = {"weights": Model(4)} if given == "with connect" else {}
        await asyncio.gather(scheme.connect(timeout=5, **weights), receiver.connect(timeout=5))
        assert (scheme.model_id, scheme.model) == (None, None)
        if given == "with the first send":
            with pytest.raises(ValueError, match="no weights"):
                await scheme.publish()
            assert (scheme.version, scheme.weights, read(model)) == (0, None, {-1})
            await scheme.send_async(Model(4))
        else:
            assert read(scheme.weights) == {4}
        assert read(model) == {4}


@pytest.mark.requirement(57)
async def test_each_worker_gets_what_it_receives_on_its_device(api: Api) -> None:
    devices = [torch.device("cpu"), torch.device("meta")]
    async with api.crew(2, sender={"model": Model(1), "devices": devices}) as (sender, receivers, models):
        await sender.send_async(Model(2))
        assert [(await api.receive(r, 5))["first"].device for r in receivers] == devices
        assert [read(m) for m in models] == [{2}, {2}], "the models stay where they are"


# -- hooks of a subclass


@pytest.mark.requirement(80)
def test_prepare_weights_takes_every_documented_form(api: Api) -> None:
    model, other = Model(1), Model(2)
    scheme = api.sender(model)
    context = Context(policy=Model(3), value=Model(4))

    def prepare(weights: Any, model_id: str = "policy", context: Any = None) -> set[float]:
        return read(scheme.prepare_weights(weights, model_id, scheme.strategy, context))

    assert prepare(None) == {1}, "the registered source"
    assert prepare(other) == {2}
    assert prepare(TensorDict.from_module(other)) == {2}
    assert prepare(other.state_dict()) == {2}
    assert prepare("value", context=context) == {4}
    scheme.init_on_sender(model_id="policy")
    assert prepare(None, context=context) == {3}, "the context's, where no source is registered"
    assert prepare(None, "value", context) == {4}
    receiver = receiver_of(scheme, 0, Model(1))
    for one in (scheme, receiver):
        with pytest.raises(ValueError, match="no weights"):
            one.prepare_weights(None, "policy", one.strategy)
    assert read(receiver.prepare_weights(other, "policy", receiver.strategy)) == {2}


class Doubling:
    def prepare_weights(self, weights: Any, model_id: Any, strategy: Any, context: Any = None) -> Any:
        return super().prepare_weights(weights, model_id, strategy, context).apply(lambda t: 2 * t)  # type: ignore[misc]


class DoublingLater:
    async def prepare_weights(self, weights: Any, model_id: Any, strategy: Any, context: Any = None) -> Any:
        await asyncio.sleep(0)
        return super().prepare_weights(weights, model_id, strategy, context).apply(lambda t: 2 * t)  # type: ignore[misc]


@pytest.mark.requirement(80)
async def test_a_subclass_may_prepare_weights_and_with_asyncio_in_a_coroutine(api: Api) -> None:
    for kind in (Doubling,) if api.is_blocking else (Doubling, DoublingLater):
        async with api.crew(2, scheme=api.extended(kind), source=Model(2)) as everybody:
            assert everybody.read == [{4}, {4}]
            await everybody.sender.send_async(fill(everybody.source, 3))
            await everybody.sender.send_async({1: Model(5)})
            assert everybody.read == [{6}, {10}]


@pytest.mark.requirement(80)
def test_a_blocking_scheme_cannot_wait_for_its_prepare_weights() -> None:
    with bare(BLOCKING.extended(DoublingLater, num_workers=1)) as scheme:
        scheme.init_on_sender(model_id="policy", model=Model())
        with pytest.raises(TypeError, match="prepare_weights"):
            scheme.connect(timeout=1)
        assert scheme.version == 0


@pytest.mark.requirement(81)
@pytest.mark.parametrize("inplace", [True, False])
def test_apply_weights_writes_the_model_whole_or_not_at_all(api: Api, inplace: bool) -> None:
    scheme, model = api.scheme(), Model(1)
    scheme.init_on_receiver("policy", model=model, worker_idx=0)
    parameter, address = model.first, model.first.data_ptr()
    source = Model(2)
    scheme.apply_weights(TensorDict.from_module(source), inplace=inplace)
    assert read(model) == {2}
    assert model.first is parameter
    assert (model.first.data_ptr() == address) is inplace
    fill(source, 3)
    assert read(model) == {2}
    with pytest.raises(SchemaMismatch):
        scheme.apply_weights(TensorDict.from_module(Model(4, width=3)), inplace=inplace)
    assert read(model) == {2}


class Keeping:
    kept: tuple[Any, ...] = ()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        self.kept = (*self.kept, weights)
        super().apply_weights(weights, inplace)  # type: ignore[misc]


@pytest.mark.requirement(81)
@pytest.mark.schemes("all")
async def test_an_overridden_apply_weights_gets_every_update_as_its_own(api: Api) -> None:
    async with api.crew(1, scheme=api.extended(Keeping)) as everybody:
        for value in (1, 2):
            await everybody.sender.send_async(fill(everybody.source, value))
        assert [read(kept) for kept in everybody.receivers[0].kept] == [{0}, {1}, {2}]
        assert everybody.read == [{2}]


@pytest.mark.requirement(82)
def test_create_transport_is_abstract(api: Api) -> None:
    assert inspect.isabstract(api.WeightSyncScheme)
    assert api.WeightSyncScheme.__abstractmethods__ == {"create_transport"}
    with pytest.raises(TypeError, match="create_transport"):
        api.WeightSyncScheme()  # type: ignore[abstract]
    assert type(api.scheme().create_transport(anything=1)) is api.transport_class


# -- defaults

DOCUMENTED: dict[str, dict[str, Any]] = {
    "__init__": {"strategy": "tensordict"},
    "init_on_sender": dict.fromkeys(["model_id", "context", "params_map", "weights", "model", "devices"])
    | dict.fromkeys(["device_map_fn", "num_workers"]),
    "init_on_receiver": dict.fromkeys(["context", "worker_idx", "model"]),
    "connect": dict.fromkeys(["worker_idx", "weights"]),
    "send": dict.fromkeys(["weights", "worker_ids"]),
    "send_async": dict.fromkeys(["weights", "worker_ids"]),
    "receive": {"timeout": None},
    "prepare_weights": {"context": None},
    "apply_weights": {"inplace": True},
}


@pytest.mark.requirement(52, 54, 64, 81, 83)
@pytest.mark.parametrize("cls", SCHEMES)
@pytest.mark.schemes("zmq")
def test_every_documented_default_is_the_default_and_init_takes_keywords(api: Api, cls: str) -> None:
    kind = getattr(api, cls)
    for name, documented in DOCUMENTED.items():
        parameters = inspect.signature(getattr(kind, name)).parameters
        assert {p: parameters[p].default for p in documented} == documented, name
        if name.startswith("init_on"):
            positional = {p for p in parameters if parameters[p].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
            assert positional == {"self"} | ({"model_id", "context"} if name == "init_on_receiver" else set())


@pytest.mark.requirement(52, 83)
def test_what_a_scheme_has_before_init(api: Api) -> None:
    scheme = api.scheme()
    assert (scheme.receiver_transport, scheme.shared_transport, scheme.sender_transports) == (None, None, {})
    assert [scheme.context, scheme.model, scheme.model_id, scheme.weights, scheme.worker_idx] == [None] * 5
    assert [s.strategy.extract_as for s in (scheme, api.scheme("state_dict"))] == ["tensordict", "state_dict"]
    assert api.scheme(strategy=(mine := WeightStrategy())).strategy is mine
