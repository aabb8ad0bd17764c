"""The documented methods of a transport, and blocking transports of a user's own."""

import asyncio
import gc
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import asyncsync
from asyncsync import NotConnected, SchemaMismatch, WeightStrategy, sync
from helpers.apis import Api, bare, in_thread
from helpers.pairs import Model, Stateful, fill, read, receiver_of

pytestmark = pytest.mark.schemes("every")


async def call(api: Api, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A documented method: a coroutine of asyncsync's transport, an ordinary one of asyncsync.sync's."""
    assert inspect.iscoroutinefunction(method) is not api.is_blocking
    if api.is_blocking:
        return await in_thread(method, *args, **kwargs)
    return await method(*args, **kwargs)


# -- the documented methods


@pytest.mark.requirement(49)
@pytest.mark.schemes("zmq")
@pytest.mark.parametrize("kind", ["Backend", "ZMQ", "SharedMem", "MP", "Distributed", "RPC", "Ray"])
def test_each_api_has_the_documented_methods_with_the_documented_arguments(api: Api, kind: str) -> None:
    name = "TransportBackend" if kind == "Backend" else f"{kind}Transport"
    assert name in api.module.__all__
    transport = getattr(api, name)
    assert issubclass(transport, api.TransportBackend)
    expected = {
        "send_weights": ["weights", "worker_ids"],
        "receive_weights": ["timeout", "weights", "model", "strategy"],
        "setup_connection_and_weights_on_sender": [],
        "setup_connection_and_weights_on_receiver": ["worker_idx", "weights", "model", "strategy"],
    }
    for method, names in expected.items():
        assert inspect.iscoroutinefunction(getattr(transport, method)) is not api.is_blocking
        parameters = inspect.signature(getattr(transport, method)).parameters
        assert list(parameters)[1:] == names
        by_position = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY][1:]
        assert by_position == {"send_weights": names, "receive_weights": ["timeout"]}.get(method, [])


@pytest.mark.requirement(40)
@pytest.mark.schemes("waiting")
@pytest.mark.both_loops
async def test_send_weights_publishes_and_receive_weights_waits_for_the_next_update(api: Api) -> None:
    async with api.crew(2) as (sender, receivers, models):
        transport = sender.shared_transport
        waiting = [asyncio.create_task(api.receive_weights(r)) for r in receivers]
        assert await call(api, transport.send_weights, Model(2)) is None
        assert [read(await each) for each in waiting] == [{2}, {2}]
        assert [read(m) for m in models] == [{2}, {2}]
        await call(api, transport.send_weights, Model(3), worker_ids=1)
        assert read(await api.receive_weights(receivers[1], 5.0)) == {3}
        await sender.wait_version(sender.version, worker_ids=[1], timeout=5)
        assert [read(m) for m in models] == [{2}, {3}]


@pytest.mark.requirement(40)
async def test_send_weights_waits_for_no_worker_and_takes_the_registered_source(api: Api) -> None:
    async with api.crew(1) as everybody:
        sender, (receiver,), (model,) = everybody
        fill(everybody.source, 2)
        async with receiver.hold():
            await call(api, sender.shared_transport.send_weights)
            assert read(model) == {0}
        await receiver.wait_version(2, timeout=5)
        assert read(await api.receive_weights(receiver, 5.0)) == {2}


def nested() -> dict[str, Any]:
    return TensorDict.from_module(Model(0)).detach().clone().to_dict()


BUFFERS: dict[str, Callable[[], Any]] = {
    "TensorDict": lambda: TensorDict.from_module(Model()).detach().clone(),
    "flat TensorDict": lambda: TensorDict.from_module(Model()).detach().clone().flatten_keys("."),
    "nested dict": nested,
    "state dict": lambda: {k: v.clone() for k, v in Model().state_dict().items()},
}


@pytest.mark.requirement(40)
@pytest.mark.parametrize("kind", BUFFERS)
async def test_receive_weights_fills_the_buffer_and_returns_it(api: Api, kind: str) -> None:
    async with api.crew(1, source=Model(1)) as (sender, (receiver,), _):
        buffer = BUFFERS[kind]()
        kept = buffer["first"]
        for value in (2, 3):
            await sender.send_async(Model(value))
            assert await api.receive_weights(receiver, 5.0, weights=buffer) is buffer
            assert buffer["first"] is kept, "in its own memory"
            flat = buffer if kind != "nested dict" else {**buffer, **buffer["inner"], "inner": kept}
            assert read(flat) == {value}


class Halves(WeightStrategy):
    def convert(self, weights: Any, model: Any) -> Any:
        return {key: value / 2 for key, value in super().convert(weights, model).items()}


class Refuses(WeightStrategy):
    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        raise OSError("asked to apply")


@pytest.mark.requirement(39, 40)
@pytest.mark.parametrize("strategy", [None, Halves()])
async def test_the_given_strategy_maps_and_applies_and_extra_state_comes_too(api: Api, strategy: Any) -> None:
    own, other = Stateful(), Stateful()
    async with api.crew(1, source=Stateful(1), models=[own]) as (sender, (receiver,), _):
        await sender.send_async(Stateful(4))
        await api.receive_weights(receiver, 5.0, model=other, strategy=strategy)
        assert (other.state, own.state, read(own)) == (7, 7, {4})
        assert read(other) == ({2} if strategy else {4})
        await sender.send_async(Stateful(6))
        await api.receive_weights(receiver, 5.0, model=own, strategy=Refuses())
        assert read(own) == {6}, "the scheme's own model is left to the bus and its gate"
        for value, error, given in ((8, "asked to apply", Refuses()), (10, "cannot be set", None)):
            other.broken = True
            await sender.send_async(Stateful(value))
            with pytest.raises(OSError, match=error):
                await api.receive_weights(receiver, 5.0, model=other, strategy=given)
            assert read(await api.receive_weights(receiver, 5.0)) == {value}, "it was not delivered, so it comes again"


@pytest.mark.requirement(39)
async def test_a_transport_remembers_no_weights_model_or_strategy(api: Api) -> None:
    async with api.crew(1, source=Model(1)) as (sender, (receiver,), _):
        transport = receiver.receiver_transport
        before = dict(vars(transport))
        await sender.send_async(Model(2))
        buffer, model = BUFFERS["TensorDict"](), Model()
        await call(api, transport.receive_weights, 5.0, weights=buffer, model=model, strategy="state_dict")
        assert vars(transport) == before
        await sender.send_async(Model(3))
        returned = await call(api, transport.receive_weights, 5.0)
        assert [read(w) for w in (returned, buffer, model)] == [{3}, {2}, {2}]


@pytest.mark.requirement(40)
async def test_what_is_wrong_or_does_not_fit_changes_nothing_and_loses_nothing(api: Api) -> None:
    async with api.crew(1, source=Model(1)) as (sender, (receiver,), _):
        await sender.send_async(Model(2))
        model = Model(7)
        for buffer, message in (
            ({"first": torch.zeros(64)}, r"inner\.bias"),
            ({**nested(), "more": torch.zeros(1)}, "'more'"),
            ({**nested(), "last": torch.zeros(8)}, "'last'"),
            ({**nested(), "last": torch.zeros(7, dtype=torch.int64)}, "int64"),
        ):
            with pytest.raises(SchemaMismatch, match=message):
                await api.receive_weights(receiver, 5.0, weights=buffer, model=model)
            assert read(model) == {7}
            assert read({"first": buffer["first"]}) == {0}
        buffer = BUFFERS["TensorDict"]()
        with pytest.raises(SchemaMismatch):
            await api.receive_weights(receiver, 5.0, weights=buffer, model=Model(width=3))
        for arguments, error, message in (
            ({"weights": torch.zeros(3)}, TypeError, "weights"),
            ({"strategy": "numpy"}, ValueError, "numpy"),
            ({"strategy": 3}, TypeError, "strategy"),
            ({"timeout": -1}, ValueError, "timeout"),
            ({"timeout": "1"}, TypeError, "timeout"),
        ):
            with pytest.raises(error, match=message):
                await api.receive_weights(receiver, **{"timeout": 5.0, **arguments})
        assert read(buffer) == {-1}
        assert read(await api.receive_weights(receiver, 5.0, weights=buffer, model=model)) == {2}
        assert [read(model), read(buffer)] == [{2}, {2}]


@pytest.mark.requirement(40)
@pytest.mark.parametrize("kind", ["lazy stack", "read-only array", "number", "meta"])
async def test_a_buffer_that_cannot_be_filled_is_refused(api: Api, kind: str) -> None:
    read_only = np.zeros((2, 2), np.float32)
    read_only.flags.writeable = False
    rows = [TensorDict({"w": torch.zeros(2)}) for _ in range(2)]
    buffer: Any = {
        "lazy stack": LazyStackedTensorDict(*rows),
        "read-only array": {"w": read_only},
        "number": {"w": np.float64(0.0)},
        "meta": TensorDict({"w": torch.zeros(2, 2, device="meta")}),
    }[kind]
    source = {"w": torch.ones((), dtype=torch.float64) if kind == "number" else torch.ones(2, 2)}
    async with api.crew(1, source=source, models=[None], sender={"weights": source}) as (sender, (receiver,), _):
        await sender.send_async()
        with pytest.raises(SchemaMismatch, match="'w'"):
            await api.receive_weights(receiver, 5.0, weights=buffer)
        assert (await api.receive_weights(receiver, 5.0))["w"].all()


@pytest.mark.requirement(40)
@pytest.mark.parametrize("kind", [TensorDict, dict])
async def test_extra_state_is_filled_in_too(api: Api, kind: Any) -> None:
    source, buffer = {"w": torch.ones(2), "note": {"step": 3}}, kind({"w": torch.zeros(2)})
    async with api.crew(1, source=source, models=[None], sender={"weights": source}) as (sender, (receiver,), _):
        await sender.send_async()
        await api.receive_weights(receiver, 5.0, weights=buffer)
        flat = dict(buffer.flatten_keys(".").items()) if kind is TensorDict else buffer
        assert read({"w": flat["w"]}) == {1}
        assert any("step" in key for key in flat), "the value is there as well"


@pytest.mark.requirement(41)
async def test_the_setup_methods_are_the_two_sides_of_connect(api: Api) -> None:
    sender = api.sender(Model(5), num_workers=2)
    receivers = [receiver_of(sender, i, Model()) for i in range(2)]
    buffer, other = BUFFERS["TensorDict"](), Model()
    async with sender, receivers[0], receivers[1]:
        results = await asyncio.gather(
            call(api, sender.shared_transport.setup_connection_and_weights_on_sender),
            call(api, receivers[0].receiver_transport.setup_connection_and_weights_on_receiver, worker_idx=0),
            call(
                api,
                receivers[1].receiver_transport.setup_connection_and_weights_on_receiver,
                worker_idx=1,
                weights=buffer,
                model=other,
                strategy="tensordict",
            ),
        )
        assert results[0] is None
        assert results[2] is buffer
        assert [read(w) for w in (results[1], buffer, other)] == [{5}, {5}, {5}]
        assert [read(r.model) for r in receivers] == [{5}, {5}]
        assert await api.receive_weights(receivers[0], 0) is None, "connect's are returned"


@pytest.mark.requirement(41)
async def test_without_initial_weights_the_receivers_setup_returns_none(api: Api) -> None:
    sender = api.sender(num_workers=1)
    async with sender, receiver_of(sender, 0, Model()) as receiver:
        _, current = await asyncio.gather(
            call(api, sender.shared_transport.setup_connection_and_weights_on_sender),
            call(api, receiver.receiver_transport.setup_connection_and_weights_on_receiver, worker_idx=0),
        )
        assert current is None


async def test_a_transport_of_no_scheme_says_how_to_get_one(api: Api) -> None:
    transport = api.transport_class()
    for name, arguments in (
        ("send_weights", {"weights": Model()}),
        ("receive_weights", {}),
        ("setup_connection_and_weights_on_sender", {}),
        ("setup_connection_and_weights_on_receiver", {"worker_idx": 0}),
    ):
        with pytest.raises(NotConnected, match="belongs to no scheme"):
            await call(api, getattr(transport, name), **arguments)


@pytest.mark.schemes("zmq")
async def test_a_transport_knows_its_role(api: Api) -> None:
    sender = api.sender(Model(), num_workers=1)
    with pytest.raises(RuntimeError, match="sender"):
        await call(api, sender.shared_transport.receive_weights)
    with pytest.raises(NotConnected, match="connect"):
        await call(api, sender.shared_transport.send_weights)


@pytest.mark.schemes("some")
async def test_a_transport_keeps_no_scheme_alive(api: Api) -> None:
    sender = bare(api.sender(Model(), num_workers=1))
    transport = sender.shared_transport
    del sender
    gc.collect()
    with pytest.raises(NotConnected, match="scheme"):
        await call(api, transport.send_weights)


def test_a_transport_of_the_other_api_says_so() -> None:
    class Mixed(asyncsync.ZMQWeightSyncScheme):
        def create_transport(self, **kwargs: Any) -> Any:
            return sync.ZMQTransport()

    scheme = Mixed()
    scheme.init_on_sender(model_id="policy", model=Model(), num_workers=1)
    with pytest.raises(TypeError, match="create_transport"):
        scheme.shared_transport.send_weights()


class NoTimeouts:
    def create_transport(self, **kwargs: Any) -> Any:
        transport = super().create_transport(**kwargs)  # type: ignore[misc]
        transport.supports_timeout = False
        return transport


@pytest.mark.requirement(76)
@pytest.mark.schemes("zmq")
async def test_a_transport_without_timeouts_refuses_one(api: Api) -> None:
    async with api.crew(1, scheme=api.extended(NoTimeouts)) as (sender, (receiver,), _):
        await sender.send_async(Model(2))
        for timeout in (0, 1.0):
            with pytest.raises(ValueError, match="supports_timeout"):
                await receiver.receive(timeout)
            with pytest.raises(ValueError, match="supports_timeout"):
                await api.receive_weights(receiver, timeout)
        assert read(await receiver.receive()) == {2}
    assert api.TransportBackend.supports_timeout is True
