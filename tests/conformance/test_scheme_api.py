"""The documented interface of a scheme: constructor, overloads of init, hooks of a subclass, properties."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

import asyncsync
from asyncsync import SchemaMismatch, WeightStrategy, WeightSyncScheme, ZMQTransport, ZMQWeightSyncScheme
from helpers.pairs import Model, crew, fill, read, receiver_of


def test_r052_strategy_is_tensordict_by_default_and_any_other_name_an_error() -> None:
    assert inspect.signature(WeightSyncScheme.__init__).parameters["strategy"].default == "tensordict"
    assert ZMQWeightSyncScheme().strategy.extract_as == "tensordict"
    assert ZMQWeightSyncScheme("state_dict").strategy.extract_as == "state_dict"
    assert ZMQWeightSyncScheme(strategy=(mine := WeightStrategy())).strategy is mine
    with pytest.raises(ValueError, match="unknown weight format 'numpy'"):
        ZMQWeightSyncScheme("numpy")


@pytest.mark.both_loops
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
async def test_r038_both_strategies_carry_a_module_into_another(strategy: str) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    source(torch.randn(8, 3))
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    async with crew(2, scheme=ZMQWeightSyncScheme(strategy), source=source, models=models) as everybody:
        weights = everybody.receivers[0].weights
        assert isinstance(weights, TensorDictBase)
        for model in models:
            for name, tensor in source.state_dict().items():
                assert torch.equal(model.state_dict()[name], tensor), name


DEVICES = [torch.device("cpu"), torch.device("cpu")]


@asynccontextmanager
async def started(workers: int, connect: dict[str, Any] | None = None, **arguments: Any) -> AsyncIterator[Any]:
    """A sender initialised with exactly these arguments, connected with so many workers; yields it and their models."""
    scheme = ZMQWeightSyncScheme()
    scheme.init_on_sender(**arguments)
    models = [Model() for _ in range(workers)]
    receivers = [receiver_of(scheme, i, m) for i, m in enumerate(models)]
    try:
        await asyncio.gather(scheme.connect(timeout=5, **(connect or {})), *(r.connect(timeout=5) for r in receivers))
        yield scheme, models
    finally:
        for each in (*receivers, scheme):
            await each.shutdown()


def test_r054_every_argument_of_init_on_sender_is_by_keyword_only() -> None:
    parameters = inspect.signature(WeightSyncScheme.init_on_sender).parameters
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for name, p in parameters.items() if name != "self")


async def test_r058_weights_devices_and_model_id() -> None:
    source = TensorDict.from_module(model := Model(2))
    async with started(2, weights=source, devices=DEVICES, model_id="policy") as (scheme, models):
        assert (scheme.model_id, scheme.bus.num_workers) == ("policy", 2)
        assert [read(m) for m in models] == [{2}, {2}]
        fill(model, 3)
        await scheme.send_async()
        assert [read(m) for m in models] == [{3}, {3}], "a bare send takes the current values"


async def test_r059_model_and_devices() -> None:
    async with started(2, model=(source := Model(2)), devices=DEVICES) as (scheme, models):
        assert (scheme.model_id, scheme.bus.num_workers) == (None, 2)
        await scheme.send_async(fill(source, 3))
        assert [read(m) for m in models] == [{3}, {3}], "receivers may give the only model any name"


async def test_r060_model_devices_and_model_id() -> None:
    async with started(2, model=Model(2), devices=DEVICES, model_id="policy") as (scheme, models):
        assert scheme.model_id == "policy"
        assert [read(m) for m in models] == [{2}, {2}]


async def test_r063_without_arguments_the_weights_come_with_connect() -> None:
    async with started(1, connect={"weights": Model(4)}) as (scheme, models):
        assert (scheme.model_id, scheme.model, read(scheme.weights)) == (None, None, {4})
        assert read(models[0]) == {4}


async def test_r063_without_arguments_the_weights_come_with_the_first_send() -> None:
    async with started(1) as (scheme, models):
        assert (scheme.version, scheme.weights, read(models[0])) == (0, None, {-1})
        await scheme.send_async(Model(4))
        assert read(models[0]) == {4}


class Context:
    def __init__(self, **models: Any) -> None:
        self.models = models

    def get_model(self, model_id: str) -> Any:
        return self.models[model_id]


def test_r064_init_on_receiver_takes_model_id_and_context_and_keywords() -> None:
    scheme = ZMQWeightSyncScheme()
    scheme.init_on_receiver("policy", Context(policy=(model := Model())), worker_idx=1, apply="on_receive")
    assert (scheme.model, scheme.worker_idx, scheme.model_id) == (model, 1, "policy")


class Nested:
    """A context without get_model: the model id is a path."""

    def __init__(self, model: nn.Module) -> None:
        self.env = type("Env", (), {"transform": [type("Transform", (), {"module": model})()]})()


def test_r064_a_model_id_may_be_a_path_in_the_context() -> None:
    scheme = ZMQWeightSyncScheme()
    scheme.init_on_receiver("env.transform[0].module", Nested(model := Model()), worker_idx=0)
    assert scheme.model is model


def test_r065_init_on_receiver_takes_worker_idx_and_model_without_a_context() -> None:
    parameters = inspect.signature(WeightSyncScheme.init_on_receiver).parameters
    assert parameters["context"].default is None
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("worker_idx", "model"))
    scheme = ZMQWeightSyncScheme()
    scheme.init_on_receiver(model_id="policy", context=None, worker_idx=0, model=(model := Model()))
    assert (scheme.model, scheme.worker_idx, scheme.context) == (model, 0, None)


def test_r079_receive_is_a_coroutine_function() -> None:
    for name in ("connect", "publish", "send_async", "wait_version", "receive", "fetch", "shutdown"):
        assert inspect.iscoroutinefunction(getattr(WeightSyncScheme, name)), name


# -- hooks of a subclass


def test_r080_prepare_weights_takes_every_documented_form() -> None:
    model, other = Model(1), Model(2)
    scheme = ZMQWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=model)
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
    with pytest.raises(ValueError, match="no weights to send"):
        prepare(None)


class Doubled(ZMQWeightSyncScheme):
    def prepare_weights(self, weights: Any, model_id: Any, strategy: Any, context: Any = None) -> Any:
        return super().prepare_weights(weights, model_id, strategy, context).apply(lambda t: 2 * t)


class DoubledLater(ZMQWeightSyncScheme):
    async def prepare_weights(self, weights: Any, model_id: Any, strategy: Any, context: Any = None) -> Any:
        await asyncio.sleep(0)
        return super().prepare_weights(weights, model_id, strategy, context).apply(lambda t: 2 * t)


@pytest.mark.parametrize("cls", [Doubled, DoubledLater])
async def test_r080_a_subclass_may_prepare_weights_also_in_a_coroutine(cls: type[WeightSyncScheme]) -> None:
    async with crew(2, scheme=cls(), source=Model(2)) as everybody:
        assert everybody.read == [{4}, {4}]
        await everybody.sender.send_async(fill(everybody.source, 3))
        await everybody.sender.send_async({1: Model(5)})
        assert everybody.read == [{6}, {10}]


@pytest.mark.parametrize("inplace", [True, False])
def test_r081_apply_weights_writes_the_model_whole_or_not_at_all(inplace: bool) -> None:
    scheme, model = ZMQWeightSyncScheme(), Model(1)
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
    assert inspect.signature(WeightSyncScheme.apply_weights).parameters["inplace"].default is True


class Applying(ZMQWeightSyncScheme):
    """Keeps what it is given."""

    kept: tuple[Any, ...] = ()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        self.kept = (*self.kept, weights)
        super().apply_weights(weights, inplace)


async def test_r081_an_overridden_apply_weights_gets_every_update_as_its_own() -> None:
    async with crew(1, scheme=Applying()) as everybody:
        for value in (1, 2):
            await everybody.sender.send_async(fill(everybody.source, value))
        assert [read(kept) for kept in everybody.receivers[0].kept] == [{0}, {1}, {2}]
        assert everybody.read == [{2}]


def test_r082_create_transport_is_abstract() -> None:
    assert inspect.isabstract(WeightSyncScheme)
    assert WeightSyncScheme.__abstractmethods__ == {"create_transport"}
    with pytest.raises(TypeError, match="create_transport"):
        WeightSyncScheme()  # type: ignore[abstract]
    assert isinstance(ZMQWeightSyncScheme().create_transport(anything=1), ZMQTransport)


# -- properties


def test_r083_properties_are_none_while_unset() -> None:
    scheme = ZMQWeightSyncScheme()
    assert [scheme.context, scheme.model, scheme.model_id, scheme.weights, scheme.worker_idx] == [None] * 5


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
async def test_r083_weights_is_a_tensordict_on_both_sides_under_both_strategies(strategy: str) -> None:
    async with crew(1, scheme=ZMQWeightSyncScheme(strategy), source=Model(3)) as (sender, (receiver,), models):
        for scheme in (sender, receiver):
            assert isinstance(scheme.weights, TensorDictBase)
            assert read(scheme.weights) == {3}
        assert (receiver.model, receiver.model_id, receiver.worker_idx) == (models[0], "policy", 0)
        assert (sender.model_id, sender.worker_idx, sender.context) == ("policy", None, None)


async def test_r084_one_transport_serves_all_workers_of_a_sender() -> None:
    async with crew(2) as (sender, receivers, _):
        assert list(sender.sender_transports) == [0, 1]
        assert set(sender.sender_transports.values()) == {sender.shared_transport}
        assert isinstance(sender.shared_transport, asyncsync.TransportBackend)
        assert sender.receiver_transport is None
        for receiver in receivers:
            assert isinstance(receiver.receiver_transport, asyncsync.TransportBackend)
            assert (receiver.sender_transports, receiver.shared_transport) == ({}, None)


async def test_r084_elastic_senders_list_the_workers_that_are_there() -> None:
    sender = ZMQWeightSyncScheme()
    sender.init_on_sender(model_id="policy", model=Model())
    assert sender.sender_transports == {}
    async with sender, receiver_of(sender, 7, Model()) as receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        assert list(sender.sender_transports) == [7]
