"""What a user gets for a wrong call: a clear, typed error at once, and a scheme that works as before."""

import asyncio
import errno
import os
import re
import tempfile
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
    WeightStrategy,
    WeightSyncScheme,
    ZMQTransport,
)
from helpers.apis import ASYNCIO, Api
from helpers.pairs import Clock, Model, connected, crew, fill, read, receiver_of, refusals


def sender_of(api: Api, **options: Any) -> Any:
    return api.sender(**{"model": Model(1), "num_workers": 1, **options})


def compiled() -> nn.Module:
    """A module whose hooks would not run, as far as the gate can tell; nothing is compiled before its first call."""
    module = nn.Linear(2, 2)
    module._compiled_call_impl = module._call_impl
    return module


CALLS: dict[str, Callable[[Any], Any]] = {
    "publish": lambda s: s.publish(),
    "send_async": lambda s: s.send_async(),
    "wait_version": lambda s: s.wait_version(1),
    "receive": lambda s: s.receive(),
    "fetch": lambda s: s.fetch(),
    "connect": lambda s: s.connect(),
    "shutdown": lambda s: s.shutdown(),
    "hold": lambda s: _hold(s),
}


async def _hold(scheme: Any) -> None:
    scheme.hold()


async def refuses(scheme: Any, calls: str, error: type[Exception], word: str) -> None:
    """Each of the calls raises at once, and the message has the word in it."""
    for name in calls.split():
        with Clock(0.5), pytest.raises(error, match=word):
            await CALLS[name](scheme)


# -- too early, on the wrong side, too late


@pytest.mark.parametrize(
    ("role", "calls", "error", "word"),
    [
        ("none", "publish send_async wait_version receive fetch connect hold", RuntimeError, "init_on_sender"),
        ("sender", "publish send_async wait_version", NotConnected, "connect"),
        ("sender", "hold", RuntimeError, "sender"),
        ("receiver", "receive fetch wait_version", NotConnected, "connect"),
        ("connected sender", "receive fetch", RuntimeError, "sender"),
        ("connected receiver", "publish send_async", RuntimeError, "receiver"),
        ("closed sender", "publish send_async wait_version connect", ClosedError, "shut down"),
        ("closed receiver", "receive fetch hold connect", ClosedError, "shut down"),
    ],
)
async def test_a_call_at_the_wrong_time_or_on_the_wrong_side_says_so(
    api: Api, role: str, calls: str, error: type[Exception], word: str
) -> None:
    if role in ("none", "sender", "receiver"):
        scheme = api.scheme() if role == "none" else sender_of(api)
        if role == "receiver":
            scheme = receiver_of(scheme, 0, Model())
        await refuses(scheme, calls, error, word)
        assert (scheme.version, scheme.status(), scheme.closed, scheme.bus.dropped) == (0, {}, False, {})
        assert "endpoint=" in repr(scheme)
        await scheme.shutdown()
        return
    state, side = role.split()
    async with api.crew(1) as (sender, (receiver,), _):
        scheme = sender if side == "sender" else receiver
        if state == "closed":
            await scheme.shutdown()
        await refuses(scheme, calls, error, word)


async def test_send_on_the_asyncio_class_names_the_alternatives() -> None:
    async with crew(1) as (sender, _, _):
        with pytest.raises(TypeError, match="send_async"):
            sender.send(Model(2))
        assert sender.version == 1


async def test_each_sides_connect_refuses_the_others_argument(api: Api) -> None:
    sender = sender_of(api)
    receiver = receiver_of(sender, 0, Model())
    with pytest.raises(TypeError, match="worker_idx"):
        await sender.connect(worker_idx=0)
    with pytest.raises(TypeError, match="weights"):
        await receiver.connect(weights=Model())
    async with connected(sender, receiver):
        pass


# -- constructors and init


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"strategy": "pickle"}, ValueError, "'state_dict'"),
        ({"strategy": 3}, TypeError, "WeightStrategy"),
        ({"strategy": WeightStrategy}, TypeError, "WeightStrategy"),
        *[({"num_workers": wrong}, ValueError, "num_workers") for wrong in (0, True, 2.0)],
        *[({"min_workers": wrong}, ValueError, "min_workers") for wrong in (-1, None)],
        ({"num_workers": 2, "min_workers": 3}, ValueError, "min_workers"),
        *[({"map_above": wrong}, ValueError, "map_above") for wrong in (-1, "16M", True, 1.5)],
        ({"unknown": 1}, TypeError, "unknown"),
        ({"endpoint": "ipc://relative/path"}, ValueError, "absolute"),
        ({"endpoint": "ipc://"}, ValueError, "absolute"),
        ({"connect": "ipc://relative"}, ValueError, "absolute"),
        ({"endpoint": "ipc://@abstract"}, ValueError, "permissions"),
        ({"endpoint": "ipc:///" + "x" * 107}, ValueError, "108"),
        ({"endpoint": "ipc:///" + "é" * 60}, ValueError, "121"),
        *[({"endpoint": f"tcp://127.0.0.1:{port}"}, ValueError, "65535") for port in ("0", "65536", "*")],
        *[({"endpoint": e}, ValueError, "tcp://HOST") for e in ("tcp://127.0.0.1", "inproc://x", "localhost:5555")],
        ({"endpoint": Path("/tmp/bus")}, TypeError, "endpoint"),
    ],
)
def test_constructor_refuses(api: Api, arguments: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        api.scheme(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"endpoint": "ipc:///tmp/x"}, {"connect": "ipc:///tmp/x"}, {"min_workers": 2}, {"allow_plaintext": True}],
)
def test_a_shared_bus_is_configured_in_one_place(api: Api, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Bus"):
        api.scheme(bus=api.bus(), **arguments)


def test_the_schemes_of_a_shared_bus_agree_on_its_workers(api: Api) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        api.scheme(bus=api.bus(num_workers=2), num_workers=3)
    bus = api.bus()
    first, second = api.scheme(bus=bus), api.scheme(bus=bus)
    first.init_on_sender(model_id="policy", model=Model(), num_workers=2)
    with pytest.raises(ValueError, match="num_workers"):
        second.init_on_sender(model_id="value", model=Model(), num_workers=3)
    assert bus.num_workers == 2
    second.init_on_sender(model_id="value", model=Model(), num_workers=2)


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"model": Model(), "weights": {}}, ValueError, "weights"),
        ({"params_map": {0: {}}, "model": Model()}, ValueError, "params_map"),
        ({"devices": ["cpu"] * 3, "num_workers": 2}, ValueError, "devices"),
        ({"devices": []}, ValueError, "num_workers"),
        ({"devices": ["nonsense"]}, (ValueError, RuntimeError), "nonsense"),
        ({"params_map": {0: {}, 1: {}}, "num_workers": 3}, ValueError, "params_map"),
        ({"params_map": {1: {}, 2: {}}}, ValueError, r"\[1, 2\]"),
        ({"device_map_fn": lambda i, w: w}, ValueError, "num_workers"),
        ({"device_map_fn": lambda i, w: w, "devices": ["cpu"]}, ValueError, "device_map_fn"),
        *[({"num_workers": wrong}, ValueError, "num_workers") for wrong in (0, True)],
        ({"model_id": "x" * 513}, ValueError, "512"),
        ({"model_id": 7}, (TypeError, ValueError), "model_id"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
)
async def test_init_on_sender_refuses_and_changes_nothing(
    api: Api, arguments: dict[str, Any], error: Any, word: str
) -> None:
    scheme = api.scheme()
    with pytest.raises(error, match=word):
        scheme.init_on_sender(**arguments)
    assert (scheme.model_id, scheme.model, scheme.weights, scheme.shared_transport) == (None, None, None, None)
    assert scheme.bus.num_workers is None
    await refuses(scheme, "connect", RuntimeError, "init_on_sender")
    scheme.init_on_receiver("policy", model=Model(), worker_idx=0)  # it has no role yet
    await scheme.shutdown()


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        *[({"model_id": wrong}, ValueError, "model_id") for wrong in ("", None)],
        ({"model_id": "x" * 513}, ValueError, "512"),
        *[({"worker_idx": wrong}, ValueError, "worker_idx") for wrong in (-1, True, "0", 2)],
        ({"apply": "never"}, ValueError, "'never'"),
        ({"gate": "lock"}, ValueError, "'lock'"),
        ({"model": "policy.pt"}, TypeError, "str"),
        ({"model": compiled()}, ValueError, "compiled"),
        ({"model": nn.LazyLinear(2)}, SchemaMismatch, "forward"),
        ({"model": None, "context": object()}, ValueError, "'policy'"),
    ],
)
async def test_init_on_receiver_refuses_and_changes_nothing(
    api: Api, arguments: dict[str, Any], error: Any, word: str
) -> None:
    scheme = api.scheme(num_workers=2)
    with pytest.raises(error, match=word):
        scheme.init_on_receiver(**{"model_id": "policy", "model": Model(), "worker_idx": 0, **arguments})
    assert (scheme.model_id, scheme.model, scheme.worker_idx, scheme.receiver_transport) == (None, None, None, None)
    await refuses(scheme, "connect", RuntimeError, "init_on_sender")
    scheme.init_on_sender(model_id="policy", model=Model())  # it has no role yet
    await scheme.shutdown()


class Breaking:
    works = False

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        if not self.works:
            raise OSError("no such device")
        return super().create_transport(**kwargs)  # type: ignore[misc,no-any-return]


def test_a_create_transport_that_raises_leaves_the_scheme_as_it_was(api: Api) -> None:
    scheme, model = api.extended(Breaking), Model()
    with pytest.raises(OSError, match="no such device"):
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
    assert not model._forward_hooks
    with pytest.raises(OSError, match="no such device"):
        scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    assert scheme.model is None
    scheme.works = True
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)


async def test_init_may_be_repeated_until_connect_and_not_after(api: Api) -> None:
    def again(error: type[Exception], word: str) -> None:
        with pytest.raises(error, match=word):
            sender.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with pytest.raises(error, match=word):
            receiver.init_on_receiver("policy", model=Model(), worker_idx=0)

    sender = sender_of(api)
    sender.init_on_sender(model_id="policy", model=Model(2), num_workers=1)
    receiver = receiver_of(sender, 0, old := Model())
    receiver.init_on_receiver("policy", model=(model := Model()), worker_idx=0)
    assert not old._forward_hooks, "the gate has let go of the model that was replaced"
    async with connected(sender, receiver):
        assert (read(model), read(old)) == ({2}, {-1})
        again(RuntimeError, "connect")
        await sender.send_async()
    again(ClosedError, "construct another")
    unused = api.scheme()
    await unused.shutdown()
    with pytest.raises(ClosedError, match="construct another"):
        unused.init_on_sender(model_id="policy", model=Model())


# -- connect


async def test_connect_needs_to_know_which_worker_this_is(api: Api) -> None:
    sender = sender_of(api, num_workers=2)
    receiver = receiver_of(sender, None, Model())
    for worker_idx in (None, 2, True):
        with pytest.raises(ValueError, match="worker"):
            await receiver.connect(worker_idx=worker_idx)
    await receiver.shutdown()
    async with sender, receiver_of(sender, 0, Model()) as receiver:
        for _ in range(2):
            with pytest.raises(ValueError, match="worker_idx=0"):
                await receiver.connect(worker_idx=1)
            with pytest.raises(NotConnected):
                await receiver.connect(worker_idx=0, timeout=0)


async def test_a_worker_that_the_sender_does_not_have_is_turned_away_and_both_are_told(api: Api) -> None:
    endpoint = api.scheme().bus.endpoint
    sender, stranger = sender_of(api, scheme={"endpoint": endpoint}), api.scheme(endpoint=endpoint)
    stranger.init_on_receiver("policy", model=(model := Model()), worker_idx=5)
    receiver = receiver_of(sender, 0, Model())
    async with stranger, sender, receiver:
        waiting = asyncio.create_task(sender.connect(timeout=1.0))
        with pytest.raises(NotConnected, match="refused worker 5"):
            await stranger.connect(timeout=20)
        with pytest.raises(NotConnected):
            await waiting
        with pytest.raises(NotConnected, match="min_workers="):
            await sender.connect(timeout=0.1)
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        for call in (lambda: stranger.connect(timeout=5), stranger.receive):
            with Clock(0.5), pytest.raises(NotConnected, match="refused worker 5"):
                await call()
        assert (read(model), list(sender.status())) == ({-1}, [0])
        await sender.send_async()


@pytest.mark.schemes("waiting")
async def test_of_two_receivers_with_one_index_the_second_is_refused_and_the_first_goes_on(api: Api) -> None:
    async with api.crew(1) as everybody:
        async with receiver_of(everybody.sender, 0, model := Model()) as newer:
            with Clock(0.5), pytest.raises(NotConnected, match="worker 0"):
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
    receiver = receiver_of(sender, 0, model := Model(), "value")
    for error in await refusals(sender, receiver, timeout=0.3):
        assert isinstance(error, NotConnected)
        assert re.search(r"\['(value|policy)'\].*, not '(policy|value)'", str(error))
    assert read(model) == {-1}


@pytest.mark.schemes("every")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Model(width=3), r"first: .*\[64\].*\[3\]"),
        (lambda: Model().double(), "float32.*float64.*cast=True"),
        (lambda: nn.Sequential(Model()), r"prefix '0.'"),
        (lambda: nn.Linear(2, 2), "missing.*unexpected"),
    ],
)
async def test_a_model_that_does_not_fit_is_described_on_both_sides(api: Api, other: Any, message: str) -> None:
    sender = sender_of(api)
    receiver = receiver_of(sender, 0, model := other())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    left, right = await refusals(sender, receiver)
    assert isinstance(left, PartialSendError)
    assert isinstance(right, SchemaMismatch)
    assert re.search(message, str(right))
    assert re.search("worker 0, model 'policy'.*" + message, str(left.failed[0]))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.promise(9)
@pytest.mark.schemes("every")
async def test_a_later_mismatch_fails_that_update_only_and_a_model_may_fit_later(api: Api) -> None:
    async with api.crew(2, models=[Model(), Model()]) as everybody:
        for _ in range(2):
            with Clock(1.0), pytest.raises(PartialSendError) as caught:
                await everybody.sender.send_async(Model(9, width=3), timeout=5)
            assert {w: type(e) for w, e in caught.value.failed.items()} == dict.fromkeys(range(2), SchemaMismatch)
            assert (everybody.read, everybody.sender.version) == ([{0}, {0}], 1), "it was never published"
        version = await everybody.sender.send_async(fill(everybody.source, 4))
        assert everybody.read == [{4}, {4}]
        assert everybody.sender.version == version == 4
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
    sender = sender_of(api, num_workers=None)
    late = receiver_of(sender, 1, model := Model(width=3))
    async with connected(sender, receiver_of(sender, 0, Model())), late:
        for call in (late.connect, late.fetch):
            with Clock(0.5), pytest.raises(SchemaMismatch):
                await call(timeout=5)
        model.first = nn.Parameter(torch.empty(64))
        await late.connect(timeout=5)
        assert read(model) == {1}


# -- the endpoint


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"], indirect=True)
async def test_an_endpoint_in_use_is_left_to_its_owner(api: Api, endpoint: str) -> None:
    async with api.crew(1, scheme=api.scheme(endpoint=endpoint)) as everybody:
        async with sender_of(api, scheme={"endpoint": endpoint}) as other:
            with Clock(0.5), pytest.raises(NotConnected, match="in use"):
                await other.connect()
        await everybody.sender.send_async(fill(everybody.source, 3))
        assert everybody.read == [{3}]


def test_a_sender_that_was_given_only_where_workers_connect_is_told_what_is_missing(api: Api) -> None:
    scheme = api.scheme(connect="tcp://127.0.0.1:5555")
    with pytest.raises(ValueError, match="endpoint="):
        scheme.init_on_sender(model_id="policy", model=Model())
    scheme.init_on_receiver(model_id="policy", model=Model(), worker_idx=0)


@pytest.mark.parametrize("where", ["notes", "missing/bus", "notes/bus"])
async def test_an_ipc_endpoint_that_cannot_be_is_an_error_of_ours_and_files_are_left_alone(
    api: Api, where: str, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("mine")
    async with sender_of(api, scheme={"endpoint": f"ipc://{tmp_path}/{where}"}) as scheme:
        with Clock(0.5), pytest.raises(NotConnected, match=where):
            await scheme.connect(timeout=5)
    assert ((tmp_path / "notes").read_text(), os.listdir(tmp_path)) == ("mine", ["notes"])


async def test_a_host_name_that_cannot_be_bound_is_not_said_to_be_in_use(api: Api, unused_tcp_port: int) -> None:
    options = {"endpoint": f"tcp://example.invalid:{unused_tcp_port}", "allow_plaintext": True}
    async with sender_of(api, scheme=options) as scheme:
        with Clock(0.5), pytest.raises(NotConnected, match=r"^(?!.*another sender).*example\.invalid"):
            await scheme.connect(timeout=5)


async def test_localhost_can_be_bound_and_connected(api: Api, unused_tcp_port: int) -> None:
    async with api.crew(1, scheme=api.scheme(endpoint=f"tcp://localhost:{unused_tcp_port}")) as everybody:
        assert everybody.read == [{0}]


@pytest.mark.requirement(188)
@pytest.mark.parametrize("name", ["é" * 40, os.fsdecode(b"caf\xe9")], ids=["long in bytes", "not UTF-8"])
async def test_any_temporary_directory_will_do(api: Api, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
        os.mkdir(there := os.path.join(short, name))
        monkeypatch.setattr(tempfile, "tempdir", there)
        async with api.crew(1) as everybody:
            await everybody.sender.send_async(timeout=10)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "localhost"])
async def test_a_name_that_this_host_does_not_know_is_told_from_an_address_that_does_not_answer(
    unused_tcp_port: int, host: str
) -> None:
    receiver = ASYNCIO.scheme(connect=f"tcp://{host}:{unused_tcp_port}", allow_plaintext=True)
    receiver.init_on_receiver("policy", model=Model(), worker_idx=0)
    with pytest.raises(NotConnected, match=host) as caught:
        await receiver.connect(timeout=1.0)
    assert ("does not know" in str(caught.value)) is (host != "localhost")
    await receiver.shutdown()


async def test_a_publication_that_waits_for_another_is_told_what_that_waits_for() -> None:
    large, model = {"w": torch.zeros(1 << 26)}, {"w": torch.zeros(1 << 26)}
    sender = Api("asyncio", ASYNCIO.module, "SharedMem").scheme()
    sender.init_on_sender(model_id="policy", model=large, num_workers=1)
    async with connected(sender, receiver_of(sender, 0, model), timeout=20):
        first = asyncio.create_task(sender.publish(large))
        await asyncio.sleep(0)
        with pytest.raises(PartialSendError, match="another publication"):
            await sender.send_async(large, timeout=0.0)
        await sender.wait_version(await first, timeout=20)


@pytest.mark.parametrize("missing", [0, 1], ids=["the first socket", "the second socket"])
async def test_a_connect_that_finds_no_descriptors_leaves_nothing_and_may_be_called_again(
    api: Api, missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = zmq.Context.socket, missing

    def socket(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise zmq.ZMQError(errno.EMFILE)
        return original(self, *args, **options)

    scheme = sender_of(api, scheme={"endpoint": f"ipc://{tmp_path}/bus"})
    receiver = receiver_of(scheme, 0, model := Model())
    for one in [scheme, receiver] if not missing else [receiver]:
        left = missing
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Context, "socket", socket)
            with Clock(0.5), pytest.raises(NotConnected, match="Too many open files"):
                await one.connect(timeout=5)
        assert os.listdir(tmp_path) == []
    async with connected(scheme, receiver):
        assert read(model) == {1}


# -- what is sent, and to whom


UNSENDABLE: list[tuple[Any, Any, str]] = [
    ("policy.pt", ValueError, "'policy.pt'"),
    (3.5, TypeError, "float"),
    ([torch.zeros(2)], TypeError, "list"),
    (torch.zeros(2), TypeError, "Tensor"),
    ({"w": object()}, TypeError, "w"),
    ({"w": torch.zeros(2).to_sparse()}, (TypeError, ValueError), "w"),
    ({5: Model()}, ValueError, r"\[5\]"),
]
NOBODY: list[tuple[Any, Any, str]] = [
    (2, ValueError, "num_workers=2"),
    (-1, ValueError, "-1"),
    ([0, 7], ValueError, "7"),
    ([], ValueError, "worker_ids"),
    *[(wrong, TypeError, "int") for wrong in (True, [True], "0", 1.0, [None])],
]


async def test_what_cannot_be_sent_and_whom_there_is_not_are_refused_and_nothing_is_published(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender = everybody.sender
        for weights, error, word in UNSENDABLE:
            with Clock(0.5), pytest.raises(error, match=word):
                await sender.send_async(weights)
        for worker_ids, error, word in NOBODY:
            for call in (sender.publish, sender.send_async):
                with Clock(0.5), pytest.raises(error, match=word):
                    await call(Model(5), worker_ids=worker_ids)
            with pytest.raises(error, match=word):
                await sender.wait_version(1, worker_ids)
        assert (sender.version, everybody.read) == (1, [{0}, {0}])
        await sender.send_async(fill(everybody.source, 1))
        assert everybody.read == [{1}, {1}]


async def test_what_there_is_not_can_neither_be_waited_for_nor_be_published(api: Api) -> None:
    async with api.crew(1) as (sender, _, models):
        for version in (0, -1, 2):
            with Clock(0.5), pytest.raises(ValueError, match=f"version {version}.* 1$"):
                await sender.wait_version(version)
        with pytest.raises(ValueError, match=r"\['value'\].*\['policy'\]"):
            await sender.bus.publish({"policy": Model(2), "value": Model(2)})
        with pytest.raises(ValueError, match="model_id"):
            await sender.bus.publish({})
        assert (sender.version, read(models[0])) == (1, {0})


def test_apply_weights_without_a_model_says_so(api: Api) -> None:
    scheme = api.scheme()
    scheme.init_on_receiver("policy", worker_idx=0)
    with pytest.raises(RuntimeError, match="init_on_receiver"):
        scheme.apply_weights({"w": torch.zeros(1)})


# -- the end


async def test_a_sender_of_a_shared_bus_can_be_shut_down_alone(api: Api) -> None:
    async with api.family() as everybody:
        senders = everybody.schemes
        await senders["value"].shutdown()
        with pytest.raises(ClosedError):
            await senders["value"].publish()
        assert not senders["policy"].closed
        await senders["policy"].send_async(fill(everybody.sources["policy"], 2))
        assert everybody.read[0]["policy"] == {2}
        await senders["policy"].shutdown()
        assert everybody.bus.closed


@pytest.mark.schemes("waiting")
@pytest.mark.both_loops
async def test_shutdown_ends_whoever_connects(api: Api) -> None:
    sender = sender_of(api, num_workers=2)
    receiver = receiver_of(sender, 0, Model())
    connecting = [asyncio.create_task(sender.connect()), asyncio.create_task(receiver.connect())]
    await asyncio.wait(connecting, timeout=0.1)
    with Clock(1.0):
        await asyncio.gather(sender.shutdown(), receiver.shutdown())
        for task in connecting:
            with pytest.raises(ClosedError):
                await task


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
    async def main() -> None:
        async with crew(1) as (sender, (receiver,), _):
            for name in CALLS.keys() - {"hold"}:
                scheme = receiver if name in ("receive", "fetch") else sender
                await asyncio.to_thread(asyncio.run, refuses(scheme, name, RuntimeError, "event loop"))
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
async def test_every_wait_but_receive_has_a_deadline(api: Api) -> None:
    wrong = {None: (TypeError, "receive"), "1": (TypeError, "'1'"), True: (TypeError, "True")}
    wrong |= dict.fromkeys((-1, float("nan")), (ValueError, "timeout"))
    async with api.crew(1) as (sender, (receiver,), (model,)):
        for timeout, (error, word) in wrong.items():
            for name, call in LIMITED.items():
                with Clock(0.5), pytest.raises(error, match=word):
                    await call(receiver if name == "fetch" else sender, timeout)
            if timeout is not None:
                with pytest.raises(error, match="timeout"):
                    await receiver.receive(timeout=timeout)
        assert sender.version == 1, "nothing was published"
        await sender.send_async(fill(Model(), 2.0))
        assert read(model) == {2.0}
        assert read(await receiver.receive(timeout=None)) == {2.0}


async def test_a_private_directory_that_somebody_else_has_made_anew_is_not_talked_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sender = sender_of(ASYNCIO)
    receiver = receiver_of(sender, 0, Model())
    own = os.getuid()
    async with sender, receiver:
        connecting = asyncio.create_task(sender.connect(timeout=5))
        await asyncio.sleep(0)
        monkeypatch.setattr("asyncsync.net.endpoint.os.getuid", lambda: own + 1)
        with pytest.raises(NotConnected, match="ipc"):
            await receiver.connect(timeout=0.3)
        monkeypatch.undo()
        assert os.path.dirname(sender.bus.endpoint.removeprefix("ipc://")) in caplog.text
        connecting.cancel()
        await asyncio.wait([connecting])
