"""Schemes by the name of their backend, and contexts that know the models."""

from typing import Any

import pytest

from asyncsync import WeightSyncScheme
from helpers.apis import Api, bare
from helpers.pairs import Context, Model, connected, fill, read, receiver_of

BACKENDS = {
    "auto": "AutoWeightSyncScheme",
    "none": "NoWeightSyncScheme",
    "direct": "NoWeightSyncScheme",
    "shared": "SharedMemWeightSyncScheme",
    "thread": "SharedMemWeightSyncScheme",
    "process": "MultiProcessWeightSyncScheme",
    "multiprocessing": "MultiProcessWeightSyncScheme",
    "zmq": "ZMQWeightSyncScheme",
    "distributed": "DistributedWeightSyncScheme",
    "rpc": "RPCWeightSyncScheme",
    "ray": "RayWeightSyncScheme",
    "ray_module_transform": "RayModuleTransformScheme",
}


@pytest.mark.requirement(231)
@pytest.mark.parametrize("backend", BACKENDS)
def test_from_backend_makes_the_scheme_of_its_api(api: Api, backend: str) -> None:
    scheme = api.WeightSyncScheme.from_backend(backend)
    assert type(scheme) is getattr(api, BACKENDS[backend])
    assert isinstance(scheme, WeightSyncScheme) is not api.is_blocking


def test_from_backend_hands_its_arguments_on(api: Api) -> None:
    scheme = api.WeightSyncScheme.from_backend("zmq", strategy="state_dict", num_workers=3, min_workers=2)
    assert (scheme.strategy.extract_as, scheme.bus.num_workers, scheme.bus.min_workers) == ("state_dict", 3, 2)
    with pytest.raises(TypeError, match="colour"):
        api.WeightSyncScheme.from_backend("zmq", colour="red")
    for backend in ("shared", "process", "auto"):
        scheme = api.WeightSyncScheme.from_backend(backend, slots=3, map_above=5, num_workers=2)
        scheme.init_on_sender(model_id="policy", model=Model())
        assert (scheme.shared_transport.pool.slots_allowed, scheme.shared_transport.pool.map_above) == (3, 5)


@pytest.mark.requirement(231)
@pytest.mark.parametrize("backend", ["carrier pigeon", "ZMQ", "", None, 3])
def test_an_unknown_backend_is_refused_with_the_choices(api: Api, backend: Any) -> None:
    with pytest.raises(ValueError, match=rf"^Unsupported weight-sync backend {backend!r}\. Expected one of") as caught:
        api.WeightSyncScheme.from_backend(backend)
    assert all(f"'{name}'" in str(caught.value) for name in BACKENDS)


# -- contexts


class Nested:
    """Knows them by where they are."""

    def __init__(self, model: Any, worker_idx: int | None = None) -> None:
        self.worker_idx = worker_idx
        transform = type("Transform", (), {"module": model, "named": {"critic": model}})()
        self.env = type("Env", (), {"transform": [transform]})()


@pytest.mark.requirement(15, 54, 64, 83)
@pytest.mark.schemes("every")
@pytest.mark.parametrize("kind", ["get_model", "path"])
async def test_a_context_is_the_source_and_the_destination(api: Api, kind: str) -> None:
    source, model = Model(1), Model()
    model_id = "policy" if kind == "get_model" else "env.transform[0].module"
    sender = api.scheme()
    here = Context(policy=source) if kind == "get_model" else Nested(source)
    sender.init_on_sender(model_id=model_id, context=here, num_workers=1)
    assert (sender.context, sender.model_id, sender.model, read(sender.weights)) == (here, model_id, source, {1})
    there = Context(policy=model) if kind == "get_model" else Nested(model, worker_idx=0)
    receiver = receiver_of(sender, 0 if kind == "get_model" else None, None, model_id, context=there)
    assert (receiver.model, receiver.worker_idx, receiver.context) == (model, 0, there)
    async with connected(sender, receiver):
        assert read(model) == {1}, "the context's model is what connect sends"
        fill(source, 2)
        await sender.send_async()
        assert read(model) == {2}


@pytest.mark.requirement(54)
@pytest.mark.parametrize(
    ("context", "model_id", "message"),
    [
        (object(), "policy", "object.*'policy'"),
        (Nested(None), "env.transform[3].module", r"Nested.*\[3\]"),
        (Context(critic=1), "policy", "Context.*'policy'"),
        (object(), None, "object.*model_id"),
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
