"""`scheme.blocking` and `scheme.aio`: an asyncio trainer with blocking workers, and the reverse, from one scheme."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tensordict import TensorDict

from asyncsync import ClosedError, NotConnected
from helpers.apis import Api, Face, bare, face, is_instant
from helpers.pairs import Model, connected, fill, passed_on, read, until

pytestmark = [pytest.mark.requirement(213), pytest.mark.schemes("some")]


def converted(scheme: Any) -> Any:
    """The scheme with the other API, behind the common face."""
    return bare(scheme).aio if isinstance(scheme, Face) else face(scheme.blocking)


def init(scheme: Any, index: int, model: Model, model_id: str = "policy") -> Any:
    scheme.init_on_receiver(model_id, model=model, worker_idx=index)
    return scheme


WORKERS: dict[str, Callable[[Any, int, Model], Any]] = {
    "converted, pickled, initialised": lambda s, i, m: init(passed_on(converted(s)), i, m),
    "pickled, converted, initialised": lambda s, i, m: init(converted(passed_on(s)), i, m),
    "pickled, initialised, converted": lambda s, i, m: converted(init(passed_on(s), i, m)),
}


@pytest.mark.parametrize("order", WORKERS)
@pytest.mark.parametrize("sender_first", [True, False])
async def test_the_workers_may_have_the_other_api(api: Api, order: str, sender_first: bool) -> None:
    scheme, source, models = api.scheme(num_workers=2), Model(1), [Model(), Model()]
    if sender_first:
        scheme.init_on_sender(model_id="policy", model=source)
    workers = [WORKERS[order](scheme, i, m) for i, m in enumerate(models)]
    if not sender_first:
        scheme.init_on_sender(model_id="policy", model=source)
    assert {isinstance(w, Face) for w in workers} == {not api.is_blocking}
    await follow(api, scheme, source, workers, models)


@pytest.mark.parametrize("init_first", [True, False])
async def test_the_trainer_may_have_the_other_api(api: Api, init_first: bool) -> None:
    original, source, models = api.scheme(num_workers=2), Model(1), [Model(), Model()]
    if init_first:
        original.init_on_sender(model_id="policy", model=source)
        scheme = converted(original)
        assert (scheme.model_id, scheme.model, list(scheme.sender_transports)) == ("policy", source, [0, 1])
    else:
        scheme = converted(original)
        scheme.init_on_sender(model_id="policy", model=source)
    assert isinstance(scheme, Face) is not api.is_blocking
    workers = [init(passed_on(original), i, m) for i, m in enumerate(models)]
    await follow(api, scheme, source, workers, models)


async def follow(api: Api, scheme: Any, source: Model, workers: list[Any], models: list[Model]) -> None:
    """Everything a pair of APIs needs of one another: initial weights, updates for all and for one, the goodbye."""
    async with connected(scheme, *workers):
        assert [read(m) for m in models] == [{1}, {1}]
        await scheme.send_async(fill(source, 2))
        assert [read(m) for m in models] == [{2}, {2}]
        await scheme.send_async(Model(3), worker_ids=1)
        assert [read(m) for m in models] == [{2}, {3}]
        assert [read(await api.receive(w, 5)) for w in workers] == [{2}, {3}]
        waiting = [asyncio.create_task(until_the_end(w)) for w in workers]
        await scheme.shutdown()
        ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        assert [type(e) for e in ended] == [ClosedError] * 2


async def until_the_end(receiver: Any) -> None:
    """A receive that the sender's goodbye ends."""
    if is_instant(receiver):
        await until(lambda: receiver.closed)
    await receiver.receive()


def test_a_conversion_keeps_the_class_the_configuration_and_what_was_initialised(api: Api) -> None:
    scheme = api.scheme("state_dict", num_workers=2)
    context = object()
    weights = TensorDict.from_module(Model(4))
    scheme.init_on_sender(model_id="policy", weights=weights, devices=["cpu", "cpu"], context=context)
    twin, other = converted(scheme), api.other
    assert type(bare(twin)) is other.scheme_class
    assert type(bare(twin.bus)) is other.Bus
    assert (twin.bus.endpoint, twin.bus.num_workers) == (scheme.bus.endpoint, 2)
    assert (twin.model_id, twin.context, twin.strategy.extract_as) == ("policy", context, "state_dict")
    assert read(twin.weights) == {4}
    assert type(twin.shared_transport) is other.transport_class
    assert type(bare(converted(twin))) is api.scheme_class


@pytest.mark.parametrize("init_first", [True, False])
async def test_the_schemes_of_one_bus_share_it_after_the_conversion(api: Api, init_first: bool) -> None:
    bus, models = api.bus(num_workers=1), {name: Model() for name in ("policy", "value")}
    schemes = {name: api.scheme(bus=bus) for name in models}
    for name, scheme in schemes.items():
        scheme.init_on_sender(model_id=name, model=Model(1))
    copies = passed_on(schemes)
    if init_first:
        copies = {name: converted(init(scheme, 0, models[name], name)) for name, scheme in copies.items()}
    else:
        copies = {name: converted(scheme) for name, scheme in copies.items()}
        for name, scheme in copies.items():
            init(scheme, 0, models[name], name)
    assert copies["policy"].bus is copies["value"].bus, "one connection, one gate"
    async with connected(bus, worker := copies["policy"].bus):
        await bus.send_async({name: Model(2) for name in models})
        assert {name: read(model) for name, model in models.items()} == {"policy": {2}, "value": {2}}
        assert worker.version == bus.version


def test_a_bus_takes_schemes_of_its_own_api_only_and_so_does_each_worker(api: Api) -> None:
    other, bus = api.other, api.bus(num_workers=1)
    with pytest.raises(TypeError, match="API"):
        other.scheme(bus=bus)
    first, second = (passed_on(api.scheme(bus=bus)) for _ in range(2))
    init(first, 0, Model())
    with pytest.raises(ValueError, match="bus"):
        init(converted(second), 0, Model(), "value")


@pytest.mark.schemes("zmq")
@pytest.mark.parametrize("name", ["Mine", "ZMQWeightSyncScheme"])
def test_a_class_of_ones_own_has_no_counterpart_and_the_error_says_what_to_do(api: Api, name: str) -> None:
    mine = api.make(type(name, (api.ZMQWeightSyncScheme,), {}))
    other = "asyncsync" if api.is_blocking else "asyncsync.sync"
    with pytest.raises(TypeError, match=f"{name}.*{other}.*{mine.bus.endpoint}"):
        converted(mine)
    assert (mine.blocking if api.is_blocking else mine.aio) is bare(mine), "it has this API already"


async def test_from_connect_on_it_is_too_late(api: Api) -> None:
    alone = api.sender(Model(), num_workers=1)
    with pytest.raises(NotConnected):
        await alone.connect(timeout=0.05)
    async with api.crew(1) as (sender, (receiver,), _):
        for scheme in (alone, sender, receiver):
            with pytest.raises(RuntimeError, match="connect"):
                converted(scheme)
        await sender.send_async()
    await alone.shutdown()
    for scheme in (alone, sender, receiver):
        with pytest.raises(RuntimeError, match="connect"):
            converted(scheme)
