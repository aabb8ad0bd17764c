"""What a user gets for a wrong call: a clear, typed error at once, and a scheme that works as before."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
import zmq
from torch import nn

from asyncsync import (
    ClosedError,
    NotConnected,
    PartialSendError,
    SchemaMismatch,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
    ZMQTransport,
    ZMQWeightSyncScheme,
    sync,
)
from helpers.apis import ASYNCIO, Api
from helpers.pairs import Clock, Model, crew, fill, passed_on, read, receiver_of, until


def sender_of(api: Api, **options: Any) -> Any:
    scheme = api.scheme()
    scheme.init_on_sender(**{"model_id": "policy", "model": Model(1), "num_workers": 1, **options})
    return scheme


def compiled() -> nn.Module:
    """A module whose hooks would not run, as far as the gate can tell; nothing is compiled before its first call."""
    module = nn.Linear(2, 2)
    module._compiled_call_impl = module._call_impl
    return module


# -- too early


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "publish": lambda s: s.publish(),
    "send_async": lambda s: s.send_async(),
    "wait_version": lambda s: s.wait_version(1),
    "receive": lambda s: s.receive(),
    "fetch": lambda s: s.fetch(),
}


@pytest.mark.parametrize("name", [*ACTIONS, "connect"])
async def test_before_init_everything_says_that_init_comes_first(api: Api, name: str) -> None:
    action = ACTIONS.get(name, lambda s: s.connect())
    with Clock(0.5), pytest.raises(RuntimeError, match=r"init_on_sender\(\) or init_on_receiver\(\) comes first"):
        await action(api.scheme())


@pytest.mark.parametrize("name", ["publish", "send_async", "wait_version"])
async def test_a_sender_that_is_not_connected_says_so(api: Api, name: str) -> None:
    with Clock(0.5), pytest.raises(NotConnected, match=r"sender is not connected; call connect\(\) first"):
        await ACTIONS[name](sender_of(api))


@pytest.mark.parametrize("name", ["receive", "fetch", "wait_version"])
async def test_a_receiver_that_is_not_connected_says_so(api: Api, name: str) -> None:
    scheme = receiver_of(sender_of(api), 0, Model())
    with Clock(0.5), pytest.raises(NotConnected, match=r"receiver is not connected; call connect\(\) first"):
        await ACTIONS[name](scheme)
    await scheme.shutdown()


async def test_hold_needs_an_initialised_receiver(api: Api) -> None:
    with pytest.raises(RuntimeError, match="comes first"):
        api.scheme().hold()
    with pytest.raises(RuntimeError, match="this scheme or bus is a sender"):
        sender_of(api).hold()


def test_version_status_and_properties_work_at_any_time(api: Api) -> None:
    for scheme in (api.scheme(), sender_of(api), receiver_of(sender_of(api), 0, Model())):
        assert scheme.version == 0
        assert scheme.status() == {}
        assert scheme.closed is False
        assert scheme.bus.dropped == {}
        assert re.search(r"ZMQWeightSyncScheme\(.*endpoint=", repr(scheme))


# -- the wrong side


@pytest.mark.parametrize("name", ["receive", "fetch"])
async def test_a_sender_does_not_receive(api: Api, name: str) -> None:
    async with api.crew(1) as (sender, _, _):
        with Clock(0.5), pytest.raises(RuntimeError, match="this scheme or bus is a sender"):
            await ACTIONS[name](sender)


@pytest.mark.parametrize("name", ["publish", "send_async"])
async def test_a_receiver_does_not_send(api: Api, name: str) -> None:
    async with api.crew(1) as (_, (receiver,), _):
        with Clock(0.5), pytest.raises(RuntimeError, match="this scheme or bus is a receiver"):
            await ACTIONS[name](receiver)


async def test_send_on_the_asyncio_class_names_the_alternatives() -> None:
    async with crew(1) as (sender, _, _):
        with pytest.raises(TypeError, match=r"send_async.*asyncsync\.sync"):
            sender.send(Model(2))
        assert sender.version == 1


async def test_each_sides_connect_refuses_the_others_argument(api: Api) -> None:
    sender = sender_of(api)
    receiver = receiver_of(sender, 0, Model())
    with pytest.raises(TypeError, match="worker_idx belongs to a receiver"):
        await sender.connect(worker_idx=0)
    with pytest.raises(TypeError, match="weights belong to the sender"):
        await receiver.connect(weights=Model())
    async with sender, receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))


# -- constructors and init


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strategy": "pickle"}, ValueError, "'pickle'.*'tensordict', 'state_dict'"),
        ({"strategy": 3}, TypeError, "WeightStrategy instance"),
        ({"strategy": WeightStrategy}, TypeError, "WeightStrategy instance"),
        ({"num_workers": 0}, ValueError, "num_workers must be a positive integer, not 0"),
        ({"num_workers": True}, ValueError, "num_workers must be a positive integer, not True"),
        ({"num_workers": 2.0}, ValueError, "num_workers must be a positive integer, not 2.0"),
        ({"min_workers": -1}, ValueError, "min_workers must be an integer from 0, not -1"),
        ({"min_workers": None}, ValueError, "min_workers must be an integer from 0, not None"),
        ({"num_workers": 2, "min_workers": 3}, ValueError, "min_workers=3 of num_workers=2"),
        ({"unknown": 1}, TypeError, "unknown"),
        ({"endpoint": "ipc://relative/path"}, ValueError, "must be absolute"),
        ({"endpoint": "ipc://"}, ValueError, "must be absolute"),
        ({"endpoint": "ipc://@abstract"}, ValueError, "no file permissions.*private directory"),
        ({"endpoint": "ipc:///" + "x" * 107}, ValueError, "107 bytes at most, this one has 108"),
        ({"endpoint": "ipc:///" + "é" * 60}, ValueError, "107 bytes at most, this one has 121"),
        ({"endpoint": "tcp://127.0.0.1:0"}, ValueError, "name a port between 1 and 65535"),
        ({"endpoint": "tcp://127.0.0.1:65536"}, ValueError, "name a port between 1 and 65535"),
        ({"endpoint": "tcp://127.0.0.1:*"}, ValueError, "name a port between 1 and 65535"),
        ({"endpoint": "tcp://127.0.0.1"}, ValueError, "use ipc:///absolute/path or tcp://HOST:PORT"),
        ({"endpoint": "inproc://x"}, ValueError, "use ipc:///absolute/path or tcp://HOST:PORT"),
        ({"endpoint": "localhost:5555"}, ValueError, "use ipc:///absolute/path or tcp://HOST:PORT"),
        ({"endpoint": Path("/tmp/bus")}, TypeError, "endpoint"),
        ({"connect": "ipc://relative"}, ValueError, "must be absolute"),
    ],
)
def test_constructor_refuses(api: Api, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        api.scheme(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"endpoint": "ipc:///tmp/x"}, {"connect": "ipc:///tmp/x"}, {"min_workers": 2}, {"allow_plaintext": True}],
)
def test_a_shared_bus_is_configured_in_one_place(api: Api, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="belong to the Bus"):
        api.scheme(bus=api.bus(), **arguments)


def test_the_schemes_of_a_shared_bus_agree_on_its_workers(api: Api) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        api.scheme(bus=api.bus(num_workers=2), num_workers=3)
    bus = api.bus()
    first, second = api.scheme(bus=bus), api.scheme(bus=bus)
    first.init_on_sender(model_id="policy", model=Model(), num_workers=2)
    with pytest.raises(ValueError, match="num_workers is 2 already, not 3"):
        second.init_on_sender(model_id="value", model=Model(), num_workers=3)
    assert bus.num_workers == 2
    second.init_on_sender(model_id="value", model=Model(), num_workers=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": Model(), "weights": {}}, ValueError, "weights and model exclude each other"),
        ({"params_map": {0: {}}, "model": Model()}, ValueError, "params_map and model exclude each other"),
        ({"devices": ["cpu"] * 3, "num_workers": 2}, ValueError, "devices has 3 entries, but num_workers=2"),
        ({"devices": []}, ValueError, "num_workers must be a positive integer, not 0"),
        ({"devices": ["nonsense"]}, (ValueError, RuntimeError), "nonsense"),
        ({"params_map": {0: {}, 1: {}}, "num_workers": 3}, ValueError, "params_map has 2 entries, but num_workers=3"),
        ({"params_map": {1: {}, 2: {}}}, ValueError, r"params_map must have the keys 0 to 1, not \[1, 2\]"),
        ({"device_map_fn": lambda i, w: w}, ValueError, "device_map_fn needs num_workers"),
        ({"device_map_fn": lambda i, w: w, "devices": ["cpu"]}, ValueError, "exclude each other"),
        ({"num_workers": 0}, ValueError, "num_workers must be a positive integer, not 0"),
        ({"num_workers": True}, ValueError, "num_workers must be a positive integer, not True"),
        ({"model_id": "x" * 513}, ValueError, "model_id has 513 characters; 512 are allowed"),
        ({"model_id": 7}, (TypeError, ValueError), "model_id"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
)
async def test_init_on_sender_refuses_and_changes_nothing(
    api: Api, arguments: dict[str, Any], error: Any, message: str
) -> None:
    scheme = api.scheme()
    with pytest.raises(error, match=message):
        scheme.init_on_sender(**arguments)
    assert (scheme.model_id, scheme.model, scheme.weights, scheme.shared_transport) == (None, None, None, None)
    assert scheme.bus.num_workers is None
    with pytest.raises(RuntimeError, match="comes first"):
        await scheme.connect()
    scheme.init_on_receiver("policy", model=Model(), worker_idx=0)  # it has no role yet
    await scheme.shutdown()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model_id": ""}, ValueError, "model_id must be a non-empty string"),
        ({"model_id": None}, ValueError, "model_id must be a non-empty string"),
        ({"model_id": "x" * 513}, ValueError, "512 are allowed"),
        ({"worker_idx": -1}, ValueError, "worker_idx must be an int from 0, not -1"),
        ({"worker_idx": True}, ValueError, "worker_idx must be an int from 0, not True"),
        ({"worker_idx": "0"}, ValueError, "worker_idx must be an int from 0, not '0'"),
        ({"worker_idx": 2}, ValueError, "worker_idx 2 does not exist: num_workers=2, so choose from 0 to 1"),
        ({"apply": "never"}, ValueError, "'auto' or 'on_receive', not 'never'"),
        ({"gate": "lock"}, ValueError, "'hooks' or 'hold', not 'lock'"),
        (
            {"model": "policy.pt"},
            TypeError,
            "must be a module, a TensorDict, .* an object whose attributes are arrays, not str",
        ),
        ({"model": compiled()}, ValueError, 'compiled module.*gate="hold".*apply="on_receive"'),
        ({"model": nn.LazyLinear(2)}, SchemaMismatch, "run one forward"),
        ({"model": None, "context": object()}, ValueError, "object has no model 'policy'"),
    ],
)
async def test_init_on_receiver_refuses_and_changes_nothing(
    api: Api, arguments: dict[str, Any], error: Any, message: str
) -> None:
    scheme = api.scheme(num_workers=2)
    with pytest.raises(error, match=message):
        scheme.init_on_receiver(**{"model_id": "policy", "model": Model(), "worker_idx": 0, **arguments})
    assert (scheme.model_id, scheme.model, scheme.worker_idx, scheme.receiver_transport) == (None, None, None, None)
    with pytest.raises(RuntimeError, match="comes first"):
        await scheme.connect()
    scheme.init_on_sender(model_id="policy", model=Model())  # it has no role yet
    await scheme.shutdown()


def test_a_create_transport_that_raises_leaves_the_scheme_as_it_was(api: Api) -> None:
    class Breaking:
        works = False

        def create_transport(self, **kwargs: Any) -> ZMQTransport:
            if not self.works:
                raise OSError("no such device")
            return ZMQTransport()

    class Broken(Breaking, ZMQWeightSyncScheme):
        pass

    class BlockingBroken(Breaking, sync.ZMQWeightSyncScheme):
        pass

    scheme, model = api.make(api.either(Broken, BlockingBroken)), Model()
    with pytest.raises(OSError, match="no such device"):
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
    assert not model._forward_hooks
    with pytest.raises(OSError, match="no such device"):
        scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    assert scheme.model is None
    scheme.works = True
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)


async def test_init_may_be_repeated_until_connect_and_not_after(api: Api) -> None:
    sender = sender_of(api, model=Model(1))
    sender.init_on_sender(model_id="policy", model=Model(2), num_workers=1)
    receiver = receiver_of(sender, 0, old := Model())
    receiver.init_on_receiver("policy", model=(model := Model()), worker_idx=0)
    assert not old._forward_hooks, "the gate has let go of the model that was replaced"
    async with sender, receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        assert (read(model), read(old)) == ({2}, {-1})
        with pytest.raises(RuntimeError, match="connected; init comes before connect"):
            sender.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with pytest.raises(RuntimeError, match="connected; init comes before connect"):
            receiver.init_on_receiver("policy", model=Model(), worker_idx=0)
        await sender.send_async()
    with pytest.raises(ClosedError, match="construct another"):
        sender.init_on_sender(model_id="policy", model=Model(), num_workers=1)
    with pytest.raises(ClosedError, match="construct another"):
        receiver.init_on_receiver("policy", model=Model(), worker_idx=0)


# -- connect


async def test_connect_needs_to_know_which_worker_this_is(api: Api) -> None:
    receiver = receiver_of(sender_of(api), None, Model())
    with pytest.raises(ValueError, match="which worker is this"):
        await receiver.connect()
    with pytest.raises(ValueError, match="does not exist: num_workers=1"):
        await receiver.connect(worker_idx=1)
    with pytest.raises(ValueError, match="int from 0, not True"):
        await receiver.connect(worker_idx=True)
    await receiver.shutdown()


async def test_connect_and_init_must_agree_on_the_worker(api: Api) -> None:
    async with sender_of(api, num_workers=2) as sender, receiver_of(sender, 0, Model()) as receiver:
        with pytest.raises(ValueError, match=r"this is worker_idx=0 already, connect\(\) says 1"):
            await receiver.connect(worker_idx=1)
        with pytest.raises(NotConnected):
            await receiver.connect(worker_idx=0, timeout=0)
        with pytest.raises(ValueError, match="worker_idx=0"):
            await receiver.connect(worker_idx=1)


async def test_the_sender_tells_of_a_worker_that_it_has_turned_away(api: Api) -> None:
    sender = api.scheme(endpoint=(endpoint := api.scheme().bus.endpoint))
    sender.init_on_sender(model_id="policy", model=Model(1), num_workers=1)
    stranger = api.scheme(endpoint=endpoint)
    stranger.init_on_receiver("policy", model=Model(), worker_idx=5)
    async with sender, stranger:
        waiting = asyncio.create_task(sender.connect(timeout=1.0))
        with pytest.raises(NotConnected, match="refused worker 5"):
            await stranger.connect(timeout=20)
        with pytest.raises(NotConnected):
            await waiting
        with pytest.raises(NotConnected, match=r"worker_idx 5 is not below num_workers=1 .*min_workers="):
            await sender.connect(timeout=0.1)


async def test_a_worker_that_the_sender_does_not_have_is_turned_away(api: Api) -> None:
    endpoint = api.scheme().bus.endpoint
    stranger = api.scheme(endpoint=endpoint)
    stranger.init_on_receiver("policy", model=(model := Model()), worker_idx=5)
    async with api.crew(1, scheme=api.scheme(endpoint=endpoint)) as (sender, _, _), stranger:
        with Clock(0.5), pytest.raises(NotConnected, match="refused worker 5: worker_idx 5 is not below num_workers=1"):
            await stranger.connect(timeout=5)
        with pytest.raises(NotConnected, match="refused worker 5"):
            await stranger.receive()
        assert read(model) == {-1}
        assert list(sender.status()) == [0]
        await sender.send_async()


@pytest.mark.schemes("waiting")
async def test_of_two_receivers_with_one_index_the_second_is_refused_and_the_first_goes_on(api: Api) -> None:
    async with api.crew(1) as everybody:
        async with receiver_of(everybody.sender, 0, model := Model()) as newer:
            with Clock(0.5), pytest.raises(NotConnected, match="two workers have this index"):
                await newer.connect(timeout=5)
            assert newer.closed
        await everybody.sender.send_async(fill(everybody.source, 2))
        assert (read(model), everybody.read) == ({-1}, [{2}])
        await everybody.receivers[0].shutdown()
        async with receiver_of(everybody.sender, 0, model) as successor:
            with Clock(0.5):
                await successor.connect(timeout=5)  # one that has left gives way at once
            await everybody.sender.send_async(fill(everybody.source, 3))
            assert (read(model), everybody.read) == ({3}, [{2}])


async def test_another_model_id_is_named_on_both_sides(api: Api) -> None:
    sender = sender_of(api)
    receiver = passed_on(sender)
    receiver.init_on_receiver("value", model=(model := Model()), worker_idx=0)
    async with sender, receiver:
        left, right = await asyncio.gather(
            sender.connect(timeout=0.3), receiver.connect(timeout=0.3), return_exceptions=True
        )
    assert isinstance(left, NotConnected)
    assert isinstance(right, NotConnected)
    assert "worker 0 has ['value'], not 'policy': use one model_id on both sides" in str(left)
    assert "the sender serves ['policy'], not 'value'; use one model_id on both sides" in str(right)
    assert read(model) == {-1}


@pytest.mark.schemes("every")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Model(width=3), r"first: sent with shape \[64\], the model's is \[3\]"),
        (
            lambda: Model().double(),
            r"float32, the model's is torch.float64 \(send that, or init_on_receiver\(cast=True\)",
        ),
        (lambda: nn.Sequential(Model()), r"prefix '0.'"),
        (lambda: nn.Linear(2, 2), "missing.*unexpected.*common prefix"),
    ],
)
async def test_a_model_that_does_not_fit_is_described_on_both_sides(api: Api, other: Any, message: str) -> None:
    sender = sender_of(api)
    receiver = receiver_of(sender, 0, model := other())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    async with sender, receiver:
        with Clock(1.0):
            left, right = await asyncio.gather(
                sender.connect(timeout=5), receiver.connect(timeout=5), return_exceptions=True
            )
    assert isinstance(left, PartialSendError)
    assert isinstance(right, SchemaMismatch)
    assert re.search(message, str(right))
    assert re.search("worker 0, model 'policy'.*" + message, str(left.failed[0]))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.promise(9)
@pytest.mark.schemes("every")
async def test_a_later_mismatch_fails_that_update_only(api: Api) -> None:
    async with api.crew(2, models=[Model(), Model()]) as everybody:
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            await everybody.sender.send_async(Model(9, width=3), timeout=5)
        assert isinstance(caught.value.failed[0], SchemaMismatch)
        assert set(caught.value.failed) == {0, 1}
        assert everybody.read == [{0}, {0}]
        assert everybody.sender.version == 1, "the refused one was never published"
        version = await everybody.sender.send_async(fill(everybody.source, 4))
        assert everybody.read == [{4}, {4}]
        assert everybody.sender.version == version == 3


@pytest.mark.schemes("every")
async def test_a_model_that_fits_by_now_takes_what_it_has_refused(api: Api) -> None:
    """As with an adapter that the trainer has added a moment before the worker."""
    async with api.crew(2, models=[Model(), Model()]) as everybody:
        for _ in range(2):
            with Clock(1.0), pytest.raises(PartialSendError):
                await everybody.sender.send_async(Model(9, width=3), timeout=5)
        everybody.models[0].first = nn.Parameter(torch.empty(3))
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            await everybody.sender.send_async(Model(9, width=3), timeout=5)
        assert "worker 1" in str(caught.value.failed[0])
        everybody.models[1].first = nn.Parameter(torch.empty(3))
        for value in (5, 6):
            await everybody.sender.send_async(Model(value, width=3), timeout=5)
            assert everybody.read == [{value}, {value}]


@pytest.mark.schemes("every")
async def test_both_sides_may_connect_again_when_the_model_fits(api: Api) -> None:
    sender = sender_of(api)
    receiver = receiver_of(sender, 0, model := Model(width=3))
    async with sender, receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5), return_exceptions=True)
        with Clock(0.5), pytest.raises(SchemaMismatch):
            await receiver.connect(timeout=5)
        model.first = nn.Parameter(torch.empty(64))
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        assert (len(read(model)), receiver.version) == (1, sender.version)
        version = await sender.send_async(Model(4), timeout=5)
        assert (read(model), receiver.version) == ({4}, version)


async def test_a_late_worker_whose_model_fits_by_now_connects_without_a_publication(api: Api) -> None:
    async with api.scheme() as sender:
        sender.init_on_sender(model_id="policy", model=Model(7))
        first = receiver_of(sender, 0, Model())
        late = receiver_of(sender, 1, model := Model(width=3))
        async with first, late:
            await asyncio.gather(sender.connect(timeout=5), first.connect(timeout=5))
            for call in (late.connect, late.fetch):
                with Clock(0.5), pytest.raises(SchemaMismatch):
                    await call(timeout=5)
            model.first = nn.Parameter(torch.empty(64))
            await late.connect(timeout=5)
            assert read(model) == {7}


# -- the endpoint


async def test_an_ipc_endpoint_in_use_is_left_to_its_owner(api: Api, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    async with api.crew(1, scheme=api.scheme(endpoint=endpoint)) as everybody:
        other = api.scheme(endpoint=endpoint)
        other.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with Clock(0.5), pytest.raises(NotConnected, match=r"in use by another live.*choose another endpoint"):
            await other.connect()
        await other.shutdown()
        await everybody.sender.send_async(fill(everybody.source, 3))
        assert everybody.read == [{3}]


def test_a_sender_that_was_given_only_where_workers_connect_is_told_what_is_missing(api: Api) -> None:
    scheme = api.scheme(connect="tcp://127.0.0.1:5555")
    with pytest.raises(ValueError, match="endpoint="):
        scheme.init_on_sender(model_id="policy", model=Model())
    scheme.init_on_receiver(model_id="policy", model=Model(), worker_idx=0)


async def test_a_tcp_endpoint_in_use_is_an_error_at_connect(api: Api, unused_tcp_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    async with api.crew(1, scheme=api.scheme(endpoint=endpoint)) as everybody:
        async with api.scheme(endpoint=endpoint) as other:
            other.init_on_sender(model_id="policy", model=Model(), num_workers=1)
            with Clock(0.5), pytest.raises(NotConnected, match=f"cannot bind {endpoint}.*in use"):
                await other.connect()
        await everybody.sender.send_async(fill(everybody.source, 3))


HOLD_ENDPOINT = """
import asyncio, sys
from asyncsync import Bus, ZMQWeightSyncScheme
async def main():
    scheme = ZMQWeightSyncScheme(endpoint=sys.argv[1])
    scheme.init_on_sender(model_id="policy", num_workers=1)
    connecting = asyncio.create_task(scheme.connect())
    await asyncio.sleep(0)
    print("bound", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    connecting.cancel()
    await scheme.shutdown()
asyncio.run(main())
"""


def started(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_an_endpoint_of_another_live_process_is_refused_until_that_has_died(api: Api, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    other = started(HOLD_ENDPOINT, endpoint)
    assert other.stdin is not None
    assert other.stdout is not None
    with other:
        try:
            assert await asyncio.to_thread(other.stdout.readline) == b"bound\n"
            scheme = api.scheme(endpoint=endpoint)
            scheme.init_on_sender(model_id="policy", model=Model(1), num_workers=1)
            with Clock(0.5), pytest.raises(NotConnected, match="in use by another live process"):
                await scheme.connect(timeout=5)
        finally:
            other.kill()
    async with scheme, receiver_of(scheme, 0, model := Model()) as receiver:
        await asyncio.gather(scheme.connect(timeout=5), receiver.connect(timeout=5))
        assert read(model) == {1}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (path := tmp_path / "notes").write_text("mine")
    return path


async def test_a_file_at_an_ipc_endpoint_is_left_alone(api: Api, notes: Path) -> None:
    async with api.scheme(endpoint=f"ipc://{notes}") as scheme:
        scheme.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with Clock(0.5), pytest.raises(NotConnected, match="notes exists already"):
            await scheme.connect()
    assert await asyncio.to_thread(lambda: (notes.read_text(), os.listdir(notes.parent))) == ("mine", ["notes"])


async def test_a_publication_that_waits_for_another_is_told_what_that_waits_for() -> None:
    """Whose weights are being copied: that is no lack of slots."""
    async with SharedMemWeightSyncScheme(num_workers=1) as sender:
        sender.init_on_sender(model_id="policy", model=(large := {"w": torch.zeros(1 << 26)}))
        receiver = pickle.loads(pickle.dumps(sender))
        receiver.init_on_receiver(model_id="policy", worker_idx=0, model={"w": torch.zeros(1 << 26)})
        async with receiver:
            await asyncio.gather(sender.connect(timeout=20), receiver.connect(timeout=20))
            first = asyncio.create_task(sender.publish(large))
            await asyncio.sleep(0)
            with pytest.raises(PartialSendError, match="another publication has not ended: its weights are still"):
                await sender.send_async(large, timeout=0.0)
            await sender.wait_version(await first, timeout=20)


@pytest.mark.parametrize("missing", [0, 1], ids=["the first socket", "the second socket"])
async def test_a_connect_that_finds_no_descriptors_leaves_nothing_and_may_be_called_again(
    api: Api, missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit itself libzmq aborts the process; just below, a socket is refused."""
    original, left = zmq.Context.socket, missing

    def socket(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise zmq.ZMQError(errno.EMFILE)
        return original(self, *args, **options)

    scheme = api.scheme(endpoint=f"ipc://{tmp_path}/bus")
    scheme.init_on_sender(model_id="policy", model=Model(1), num_workers=1)
    async with scheme, receiver_of(scheme, 0, model := Model()) as receiver:
        for one in [scheme, receiver] if not missing else [receiver]:
            left = missing
            with monkeypatch.context() as patch:
                patch.setattr(zmq.Context, "socket", socket)
                with Clock(0.5), pytest.raises(NotConnected, match="Too many open files"):
                    await one.connect(timeout=5)
            assert os.listdir(tmp_path) == []
        await asyncio.gather(scheme.connect(timeout=5), receiver.connect(timeout=5))
        assert read(model) == {1}


async def test_a_connect_that_fails_after_its_socket_was_watched_leaves_no_reader_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []

    def watch(self: Any, descriptor: int, *args: Any) -> None:
        watched.append(descriptor)
        add_reader(self, descriptor, *args)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOBUFS, "no side channel")

    loop = asyncio.get_running_loop()
    add_reader = type(loop).add_reader
    monkeypatch.setattr(type(loop), "add_reader", watch)
    monkeypatch.setattr("asyncsync.bus.sender.SideChannels", fail)
    async with ZMQWeightSyncScheme(endpoint=f"ipc://{tmp_path}/bus") as scheme:
        scheme.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with pytest.raises(OSError, match="no side channel"):
            await scheme.connect(timeout=5)
        assert watched
        assert not any(map(loop.remove_reader, watched))
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["missing/bus", "file/bus"])
async def test_a_directory_that_is_not_there_is_an_error_of_ours(api: Api, where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with api.scheme(endpoint=f"ipc://{tmp_path}/{where}") as scheme:
        scheme.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with Clock(0.5), pytest.raises(NotConnected, match=f"cannot bind ipc://{tmp_path}/{where}.*directory"):
            await scheme.connect(timeout=5)


async def test_a_host_name_that_cannot_be_bound_is_not_said_to_be_in_use(api: Api, unused_tcp_port: int) -> None:
    scheme = api.scheme(endpoint=f"tcp://example.invalid:{unused_tcp_port}", allow_plaintext=True)
    async with scheme:
        scheme.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with (
            Clock(0.5),
            pytest.raises(NotConnected, match=r"cannot bind tcp://example.invalid.*numeric address") as caught,
        ):
            await scheme.connect(timeout=5)
        assert "another sender" not in str(caught.value)


async def test_localhost_can_be_bound_and_connected(api: Api, unused_tcp_port: int) -> None:
    async with api.crew(1, scheme=api.scheme(endpoint=f"tcp://localhost:{unused_tcp_port}")) as everybody:
        assert everybody.read == [{0}]


# -- what is sent, and to whom


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ("policy.pt", ValueError, "no model 'policy.pt'"),
        (3.5, TypeError, "must be a module, a TensorDict, .* an object whose attributes are arrays, not float"),
        ([torch.zeros(2)], TypeError, "not list"),
        (torch.zeros(2), TypeError, "not Tensor"),
        ({"w": object()}, TypeError, "w"),
        ({"w": torch.zeros(2).to_sparse()}, (TypeError, ValueError), "w"),
        ({5: Model()}, ValueError, "weights for workers \\[5\\]"),
    ],
)
async def test_weights_that_cannot_be_sent_are_refused_and_nothing_is_published(
    api: Api, weights: Any, error: Any, message: str
) -> None:
    async with api.crew(1) as everybody:
        with Clock(0.5), pytest.raises(error, match=message):
            await everybody.sender.send_async(weights)
        assert everybody.sender.version == 1
        assert everybody.read == [{0}]
        await everybody.sender.send_async(fill(everybody.source, 1))
        assert everybody.read == [{1}]


async def test_without_a_source_a_bare_publish_says_what_to_pass(api: Api) -> None:
    async with api.crew(1, sender={"weights": None, "model": None}) as (sender, _, _):
        with pytest.raises(ValueError, match="no weights to send: pass some, or register"):
            await sender.publish()


@pytest.mark.parametrize(
    ("worker_ids", "error", "message"),
    [
        (2, ValueError, "worker_idx 2 does not exist: num_workers=2, so choose from 0 to 1"),
        (-1, ValueError, "worker_idx -1 does not exist"),
        ([0, 7], ValueError, "worker_idx 7 does not exist"),
        ([], ValueError, "worker_ids is empty; pass None for everybody"),
        (True, TypeError, "an int or a list of ints, not True"),
        ([True], TypeError, "an int or a list of ints"),
        ("0", TypeError, "an int or a list of ints, not '0'"),
        (1.0, TypeError, "an int or a list of ints, not 1.0"),
        ([None], TypeError, "an int or a list of ints"),
    ],
)
async def test_worker_ids_that_cannot_be_are_refused(api: Api, worker_ids: Any, error: Any, message: str) -> None:
    async with api.crew(2) as (sender, _, models):
        for call in (sender.publish, sender.send_async):
            with Clock(0.5), pytest.raises(error, match=message):
                await call(Model(5), worker_ids=worker_ids)
        with pytest.raises(error, match=message):
            await sender.wait_version(1, worker_ids)
        assert sender.version == 1
        assert [read(m) for m in models] == [{0}, {0}]


@pytest.mark.parametrize("version", [0, -1, 2])
async def test_a_version_that_was_never_published_cannot_be_waited_for(api: Api, version: int) -> None:
    async with api.crew(1) as (sender, _, _):
        with Clock(0.5), pytest.raises(ValueError, match=f"version {version} has not been published; the newest is 1"):
            await sender.wait_version(version)


async def test_an_unknown_model_id_on_the_bus_publishes_nothing(api: Api) -> None:
    async with api.crew(1) as (sender, _, models):
        with pytest.raises(ValueError, match=r"unknown model_id \['value'\]: this bus has \['policy'\]"):
            await sender.bus.publish({"policy": Model(2), "value": Model(2)})
        with pytest.raises(ValueError, match="name at least one model_id"):
            await sender.bus.publish({})
        assert (sender.version, read(models[0])) == (1, {0})


async def test_apply_weights_without_a_model_says_so(api: Api) -> None:
    scheme = api.scheme()
    scheme.init_on_receiver("policy", worker_idx=0)
    with pytest.raises(RuntimeError, match=r"register one with init_on_receiver\(model="):
        scheme.apply_weights({"w": torch.zeros(1)})
    await scheme.shutdown()


# -- too late


@pytest.mark.parametrize("name", [*ACTIONS, "connect", "hold"])
async def test_after_shutdown_everything_says_closed(api: Api, name: str) -> None:
    action = {**ACTIONS, "connect": lambda s: s.connect(), "hold": lambda s: s.hold()}[name]
    async with api.crew(1) as (sender, receivers, _):
        scheme = receivers[0] if name in ("receive", "fetch", "hold") else sender
        await scheme.shutdown()
        with Clock(0.5), pytest.raises(ClosedError, match="shut down"):
            await action(scheme)


async def test_a_scheme_shut_down_before_init_is_closed_too(api: Api) -> None:
    scheme = api.scheme()
    await scheme.shutdown()
    with pytest.raises(ClosedError, match="construct another"):
        scheme.init_on_sender(model_id="policy", model=Model())


@pytest.mark.schemes("waiting")
async def test_one_scheme_of_a_shared_bus_can_be_shut_down_alone(api: Api) -> None:
    bus = api.bus(num_workers=1)
    senders = {name: api.scheme(bus=bus) for name in ("policy", "value")}
    sources = {name: Model(1) for name in senders}
    for name, scheme in senders.items():
        scheme.init_on_sender(model_id=name, model=sources[name])
    receivers = passed_on(senders)
    for name, scheme in receivers.items():
        scheme.init_on_receiver(name, model=Model(), worker_idx=0)
    await asyncio.gather(bus.connect(timeout=5), receivers["policy"].bus.connect(timeout=5))
    waiting = asyncio.create_task(receivers["value"].receive())
    await asyncio.sleep(0)
    await receivers["value"].shutdown()
    with Clock(0.5), pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await receivers["value"].receive(0)
    await senders["value"].shutdown()
    with pytest.raises(ClosedError):
        await senders["value"].publish()
    assert not senders["policy"].closed
    await senders["policy"].send_async(fill(sources["policy"], 2))
    assert read(receivers["policy"].model) == {2}
    await asyncio.gather(senders["policy"].shutdown(), receivers["policy"].shutdown())
    assert bus.closed


@pytest.mark.schemes("waiting")
@pytest.mark.both_loops
async def test_shutdown_ends_whoever_waits(api: Api) -> None:
    sender = sender_of(api, num_workers=2)
    receiver = receiver_of(sender, 0, Model())
    connecting = [asyncio.create_task(sender.connect()), asyncio.create_task(receiver.connect())]
    await asyncio.wait(connecting, timeout=0.1)
    with Clock(1.0):
        await asyncio.gather(sender.shutdown(), receiver.shutdown())
        for task in connecting:
            with pytest.raises(ClosedError):
                await task
    async with api.crew(1) as (sender, (receiver,), _):
        receiving = asyncio.create_task(receiver.receive())
        await asyncio.sleep(0)
        await receiver.shutdown()
        with Clock(0.5), pytest.raises(ClosedError):
            await receiving


async def test_a_shutdown_with_no_time_left_still_releases_everything(api: Api) -> None:
    async with api.crew(1) as (sender, (receiver,), _):
        await receiver.shutdown(timeout=0)
        await sender.shutdown(timeout=0)
        assert sender.closed
        assert receiver.closed


async def test_a_cancelled_shutdown_still_releases_everything() -> None:
    async with crew(1, source=Model(width=4 << 20), models=[Model(width=4 << 20)]) as (sender, _, _):
        task = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert sender.closed


# -- another loop, another process


def test_use_from_another_event_loop_is_an_error() -> None:
    async def elsewhere(action: Callable[[Any], Any], scheme: Any) -> None:
        with Clock(0.5), pytest.raises(RuntimeError, match="connected on another event loop; await it there"):
            await action(scheme)

    async def main() -> None:
        async with crew(1) as (sender, (receiver,), _):
            for name, action in {
                **ACTIONS,
                "connect": lambda s: s.connect(),
                "shutdown": lambda s: s.shutdown(),
            }.items():
                scheme = receiver if name in ("receive", "fetch") else sender
                await asyncio.to_thread(asyncio.run, elsewhere(action, scheme))
            assert not sender.closed
            await sender.send_async()

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_scheme_whose_loop_has_ended_can_still_be_shut_down(run: Callable[[Any], Any]) -> None:
    async def main() -> tuple[WeightSyncScheme, WeightSyncScheme]:
        sender = sender_of(ASYNCIO)
        receiver = receiver_of(sender, 0, Model())
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        return sender, receiver

    async def end(*schemes: WeightSyncScheme) -> None:
        with Clock(1.0):
            await asyncio.gather(*(s.shutdown() for s in schemes))

    schemes = run(main())
    for scheme in schemes:
        with pytest.raises(RuntimeError, match="event loop"):
            run(scheme.connect(timeout=1))
    run(end(*schemes))


FORGETFUL = """
import asyncio
from helpers.pairs import Model, receiver_of
from asyncsync import ZMQWeightSyncScheme
async def main():
    global sender, receiver
    sender = ZMQWeightSyncScheme()
    sender.init_on_sender(model_id="policy", model=Model(width=4 << 20), num_workers=1)
    receiver = receiver_of(sender, 0, Model(width=4 << 20))
    await asyncio.gather(sender.connect(), receiver.connect())
    await sender.publish()
asyncio.run(main())
print("done", flush=True)
"""


FORGETFUL_TOO = """
import threading
from asyncsync.sync import ZMQWeightSyncScheme
from helpers.pairs import Model, receiver_of
sender = ZMQWeightSyncScheme()
sender.init_on_sender(model_id="policy", model=Model(width=4 << 20), num_workers=1)
receiver = receiver_of(sender, 0, Model(width=4 << 20))
connecting = threading.Thread(target=receiver.connect)
connecting.start()
sender.connect()
connecting.join()
sender.publish()
threading.Thread(target=receiver.wait_version, args=(9,), daemon=True).start()
print("done", flush=True)
"""


def run_script(code: str) -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=40, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("code", [FORGETFUL, FORGETFUL_TOO], ids=["asyncio", "blocking"])
def test_a_program_that_forgets_shutdown_still_ends(code: str) -> None:
    done = run_script(code)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


AFTER_FORK = """
import asyncio, os, sys
import torch
from asyncsync import ZMQWeightSyncScheme
from helpers.pairs import crew

async def child(sender, receiver):
    calls = [sender.publish, sender.send_async, sender.connect, receiver.receive, receiver.fetch, receiver.connect]
    calls += [lambda: sender.wait_version(1)]
    for call in calls:
        try:
            await asyncio.wait_for(call(), 3)
        except RuntimeError as error:
            assert "before the fork" in str(error), error
        else:
            raise AssertionError(call)
    await sender.shutdown()
    await receiver.shutdown()
    try:
        sender.init_on_sender(model_id="policy", model=receiver.model, num_workers=1)
    except RuntimeError as error:
        assert "before the fork" in str(error), error
    else:
        raise AssertionError("init")
    fresh = ZMQWeightSyncScheme()
    fresh.init_on_sender(model_id="policy", model=receiver.model, num_workers=1)
    await fresh.shutdown()

async def main():
    async with crew(1) as everybody:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                asyncio.set_event_loop(None)
                asyncio.events._set_running_loop(None)
                asyncio.run(child(everybody.sender, everybody.receivers[0]))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await everybody.sender.send_async(timeout=5)  # the parent's connection is untouched
        assert os.path.exists(everybody.sender.bus.endpoint.removeprefix("ipc://"))

asyncio.run(main())
"""


@pytest.mark.thorough
def test_a_connected_scheme_cannot_be_used_after_a_fork() -> None:
    done = run_script(AFTER_FORK)
    assert done.returncode == 0, done.stderr


# -- the model is used while it is updated


@pytest.mark.schemes("every")
async def test_a_hold_that_is_never_left_times_the_update_out_with_the_reason(api: Api) -> None:
    async with api.crew(1) as (sender, (receiver,), models):
        leave = threading.Event()

        def reader() -> None:
            with receiver.hold():
                leave.wait(10)

        thread = asyncio.create_task(asyncio.to_thread(reader))
        await until(lambda: receiver.bus._gate is not None and receiver.bus._gate.readers == 1)
        with Clock(0.3), pytest.raises(PartialSendError, match=r"worker 0 had not applied version 2 after 0.3 s"):
            await sender.send_async(Model(7), timeout=0.3)
        assert read(models[0]) == {0}
        leave.set()
        await thread
        await receiver.wait_version(2, timeout=5)
        assert read(models[0]) == {7}, "late, not lost"


# -- time limits


LIMITED: dict[str, Callable[[Any, Any], Any]] = {
    "connect": lambda s, t: s.connect(timeout=t),
    "send_async": lambda s, t: s.send_async(timeout=t),
    "wait_version": lambda s, t: s.wait_version(1, timeout=t),
    "fetch": lambda s, t: s.fetch(timeout=t),
    "bus.connect": lambda s, t: s.bus.connect(timeout=t),
    "bus.send_async": lambda s, t: s.bus.send_async({"policy": None}, timeout=t),
}


@pytest.mark.promise(15)
@pytest.mark.parametrize(
    ("timeout", "error", "message"),
    [
        (None, TypeError, "only receive\\(\\) waits without a limit"),
        ("1", TypeError, "number of seconds, not '1'"),
        (True, TypeError, "number of seconds"),
        (-1, ValueError, "must not be negative"),
        (float("nan"), ValueError, "must not be negative"),
    ],
)
@pytest.mark.parametrize("name", LIMITED)
async def test_every_wait_but_receive_has_a_deadline(
    api: Api, name: str, timeout: Any, error: type, message: str
) -> None:
    async with api.crew(1) as (sender, receivers, _):
        scheme = receivers[0] if name == "fetch" else sender
        before = sender.version
        with Clock(0.5), pytest.raises(error, match=message):
            await LIMITED[name](scheme, timeout)
        assert sender.version == before  # nothing was published
        await sender.send_async(fill(Model(), 2.0))
        assert read(receivers[0].model) == {2.0}


async def test_receive_refuses_what_is_no_time_limit_and_accepts_none(api: Api) -> None:
    async with api.crew(1) as (sender, receivers, _):
        with pytest.raises(ValueError, match="must not be negative"):
            await receivers[0].receive(timeout=-0.5)
        await sender.publish(fill(Model(), 3.0))
        assert read(await receivers[0].receive(timeout=None)) == {3.0}


async def test_the_status_of_a_receiver_that_was_shut_down_says_so(api: Api) -> None:
    async with api.crew(1) as (_, receivers, _):
        (before,) = receivers[0].status().values()
        assert before.state == "live"
        assert before.bytes_sent > 0  # payload that rode in the instruction counts as well
        await receivers[0].shutdown()
        (after,) = receivers[0].status().values()
        assert (after.state, after.reason) == ("lost", "this receiver was shut down")


@pytest.mark.parametrize(
    ("host", "words"),
    [("no-such-host.invalid", "does not know 'no-such-host.invalid'"), ("localhost", "nobody answers at tcp://localh")],
)
async def test_a_name_that_this_host_does_not_know_is_told_from_an_address_where_nobody_is(
    unused_tcp_port: int, host: str, words: str
) -> None:
    receiver = ASYNCIO.scheme(connect=f"tcp://{host}:{unused_tcp_port}", allow_plaintext=True)
    receiver.init_on_receiver("policy", model=Model(), worker_idx=0)
    with pytest.raises(NotConnected, match=words):
        await receiver.connect(timeout=1.0)
    await receiver.shutdown()


async def test_a_private_directory_that_somebody_else_has_made_anew_is_not_talked_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a trainer's crash and a sweep, its directory's name is free for any user of the host."""
    sender = sender_of(ASYNCIO)
    receiver = receiver_of(sender, 0, Model())
    own = os.getuid()
    connecting = asyncio.create_task(sender.connect(timeout=5))
    await asyncio.sleep(0)
    monkeypatch.setattr("asyncsync.net.endpoint.os.getuid", lambda: own + 1)
    with pytest.raises(NotConnected, match="no sender answers"):
        await receiver.connect(timeout=0.3)
    assert "no longer belongs to this user" in caplog.text
    monkeypatch.undo()
    connecting.cancel()
    await asyncio.wait([connecting])
    await receiver.shutdown()
    await sender.shutdown()
