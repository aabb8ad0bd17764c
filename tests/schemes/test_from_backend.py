"""Schemes by the name of their backend, and contexts that know the models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tensordict import TensorDict

from asyncsync import WeightSyncScheme
from helpers.apis import Api, bare
from helpers.pairs import Model, fill, read, receiver_of


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("auto", "AutoWeightSyncScheme"),
        ("none", "NoWeightSyncScheme"),
        ("direct", "NoWeightSyncScheme"),
        ("shared", "SharedMemWeightSyncScheme"),
        ("thread", "SharedMemWeightSyncScheme"),
        ("process", "MultiProcessWeightSyncScheme"),
        ("multiprocessing", "MultiProcessWeightSyncScheme"),
        ("zmq", "ZMQWeightSyncScheme"),
        ("distributed", "DistributedWeightSyncScheme"),
        ("rpc", "RPCWeightSyncScheme"),
        ("ray", "RayWeightSyncScheme"),
        ("ray_module_transform", "RayModuleTransformScheme"),
    ],
)
def test_from_backend_makes_the_scheme_of_its_api(api: Api, backend: str, name: str) -> None:
    scheme = api.WeightSyncScheme.from_backend(backend)
    assert type(scheme) is getattr(api, name)
    assert isinstance(scheme, WeightSyncScheme) is not api.is_blocking


def test_from_backend_hands_its_arguments_on(api: Api) -> None:
    scheme = api.WeightSyncScheme.from_backend("zmq", strategy="state_dict", num_workers=3, min_workers=2)
    assert (scheme.strategy.extract_as, scheme.bus.num_workers, scheme.bus.min_workers) == ("state_dict", 3, 2)
    with pytest.raises(TypeError, match="colour"):
        api.WeightSyncScheme.from_backend("zmq", colour="red")
    for backend in ("shared", "process"):
        scheme = api.WeightSyncScheme.from_backend(backend, slots=3, map_above=5, num_workers=2)
        scheme.init_on_sender(model_id="policy", model=Model())
        assert (scheme.shared_transport.pool.slots_allowed, scheme.shared_transport.pool.map_above) == (3, 5)


@pytest.mark.requirement(231)
@pytest.mark.parametrize("backend", ["carrier pigeon", "ZMQ", "", None, 3])
def test_an_unknown_backend_is_refused_with_the_choices(api: Api, backend: Any) -> None:
    """As TorchRL says it, with the names that are there."""
    message = (
        rf"^Unsupported weight-sync backend {backend!r}\. Expected one of \['auto', 'direct', 'distributed', "
        r"'multiprocessing', 'none', 'process', 'ray', 'ray_module_transform', 'rpc', 'shared', 'thread', 'zmq'\]\.$"
    )
    with pytest.raises(ValueError, match=message):
        api.WeightSyncScheme.from_backend(backend)


# -- contexts


class Context:
    """Knows its models by name."""

    def __init__(self, **models: Any) -> None:
        self.models = models

    def get_model(self, model_id: str) -> Any:
        return self.models[model_id]


class Nested:
    """Knows them by where they are."""

    def __init__(self, model: Any, worker_idx: int | None = None) -> None:
        self.worker_idx = worker_idx
        transform = type("Transform", (), {"module": model, "named": {"critic": model}})()
        self.env = type("Env", (), {"transform": [transform]})()


@pytest.mark.requirement(54)
@pytest.mark.schemes("every")
@pytest.mark.parametrize("kind", ["get_model", "path"])
async def test_a_context_is_the_source_and_the_destination(api: Api, kind: str) -> None:
    source, model = Model(1), Model()
    model_id = "policy" if kind == "get_model" else "env.transform[0].module"
    sender = api.scheme()
    sender.init_on_sender(
        model_id=model_id, context=Context(policy=source) if kind == "get_model" else Nested(source), num_workers=1
    )
    there = Context(policy=model) if kind == "get_model" else Nested(model, worker_idx=0)
    receiver = receiver_of(sender, 0 if kind == "get_model" else None, None, model_id, context=there)
    assert (receiver.model, receiver.worker_idx, receiver.context) == (model, 0, there)
    async with sender, receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        assert read(model) == {1}, "the context's model is what connect sends"
        fill(source, 2)
        await sender.send_async()
        assert read(model) == {2}


@pytest.mark.requirement(80)
@pytest.mark.schemes("every")
@pytest.mark.parametrize("path", ["env.transform[0].module", "env.transform[0].named['critic']"])
async def test_weights_may_be_a_path_in_the_context(api: Api, path: str) -> None:
    other = Model(5)
    sender = api.scheme()
    sender.init_on_sender(model_id="env.transform[0].module", context=Nested(other), num_workers=1)
    async with sender, receiver_of(sender, 0, model := Model(), "env.transform[0].module") as receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        fill(other, 6)
        await sender.send_async(path)
        assert read(model) == {6}
        await sender.send_async({0: path})
        prepared = bare(sender).prepare_weights(path, "policy", sender.strategy, sender.context)
        assert isinstance(prepared, TensorDict)


@pytest.mark.requirement(54)
@pytest.mark.parametrize(
    ("context", "model_id", "message"),
    [
        (object(), "policy", "object has no model 'policy': .*; it has no get_model"),
        (Nested(None), "env.transform[3].module", r"Nested has no model 'env.transform\[3\].module': list index"),
        (Context(critic=1), "policy", "Context has no model 'policy': .*; get_model\\(\\) does not know it either"),
        (object(), None, "object cannot tell which model is meant: pass model_id"),
    ],
)
async def test_a_context_without_the_model_says_what_it_lacks(
    api: Api, context: Any, model_id: str | None, message: str
) -> None:
    sender = api.scheme()
    sender.init_on_sender(model_id=model_id, context=context, num_workers=1)
    with pytest.raises(ValueError, match=message):
        bare(sender).prepare_weights(None, model_id, sender.strategy, context)
    if model_id is not None:
        with pytest.raises(ValueError, match=message):
            bare(api.scheme()).init_on_receiver(model_id, context, worker_idx=0)


@pytest.mark.requirement(54)
async def test_a_path_without_a_context_says_so(api: Api) -> None:
    sender = api.scheme()
    sender.init_on_sender(model_id="policy", model=Model(1), num_workers=1)
    async with sender, receiver_of(sender, 0, Model()) as receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        with pytest.raises(ValueError, match=r"no model 'env.policy': a string is a path in the context"):
            await sender.send_async("env.policy")
        assert sender.version == 1
