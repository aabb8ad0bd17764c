"""The two phases: init without communication, connect as the rendezvous; then updates, then the end."""

import asyncio
import gc
import inspect
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncsync import AckTimeout, ClosedError, NotConnected, PartialSendError, SchemaMismatch
from helpers.apis import Api, bare
from helpers.memory import descriptors
from helpers.pairs import Clock, Model, fill, passed_on, read, receiver_of, refusals, until

pytestmark = pytest.mark.schemes("every")

SCHEMES = ["ZMQWeightSyncScheme", "SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "NoWeightSyncScheme"]


# -- phase 1


@pytest.mark.requirement(12)
def test_init_on_either_side_communicates_with_nobody(
    api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def made(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("init made a ZeroMQ context or an event loop")

    for module, name in ((zmq, "Context"), (asyncio, "new_event_loop"), (asyncio.events, "new_event_loop")):
        monkeypatch.setattr(module, name, made)
    files, threads = descriptors(), threading.enumerate()
    scheme = api.sender(Model(), num_workers=1, scheme={"endpoint": f"ipc://{tmp_path}/bus"})
    worker = receiver_of(scheme, 0, Model())
    assert descriptors() == files
    assert threading.enumerate() == threads
    assert list(tmp_path.iterdir()) == []
    assert worker.version == scheme.version == 0
    assert worker.status() == scheme.status() == {}


@pytest.mark.requirement(13)
def test_scheme_is_picklable_before_and_after_init_on_sender(api: Api) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        scheme = api.scheme("state_dict", num_workers=2)
        fresh = pickle.loads(pickle.dumps(scheme, protocol))
        assert (fresh.model_id, fresh.bus.endpoint, fresh.bus.num_workers) == (None, scheme.bus.endpoint, 2)
        scheme.init_on_sender(model_id="policy", model=Model(width=1 << 20))
        blob = pickle.dumps(scheme, protocol)
        assert len(blob) < 4096, "a scheme travels without its weights"
        copy = pickle.loads(blob)
        assert (copy.model_id, copy.model, copy.weights) == ("policy", None, None)
        assert copy.bus.endpoint == scheme.bus.endpoint
        copy.init_on_receiver("policy", model=Model(), worker_idx=1)  # it has no role until it is given one
        assert pickle.loads(pickle.dumps(copy)).worker_idx is None


@pytest.mark.requirement(13)
async def test_a_connected_scheme_pickles_without_its_connection(api: Api) -> None:
    async with api.crew(1) as (sender, receivers, _):
        for scheme in (sender, receivers[0]):
            with pytest.raises(RuntimeError, match="init_on_"):
                await passed_on(scheme).connect()


@pytest.mark.requirement(14, 15, 53, 64, 65, 84)
def test_init_registers_transport_source_workers_and_role(api: Api) -> None:
    """14 without what torch.distributed, RPC and Ray have; 15 without the Distributed scheme's store and rank."""
    scheme = api.sender(model := Model(3), num_workers=3)
    receiver = passed_on(scheme)
    receiver.init_on_receiver(model_id="policy", context=None, worker_idx=1, model=(own := Model()))
    assert type(scheme.shared_transport) is type(receiver.receiver_transport) is api.transport_class
    assert scheme.sender_transports == dict.fromkeys(range(3), scheme.shared_transport)
    assert (scheme.receiver_transport, scheme.model, read(scheme.weights)) == (None, model, {3})
    assert (receiver.sender_transports, receiver.shared_transport) == ({}, None)
    assert (receiver.model, receiver.worker_idx, receiver.context) == (own, 1, None)
    with pytest.raises(RuntimeError, match="sender"):
        scheme.init_on_receiver("policy", model=Model(), worker_idx=0)
    with pytest.raises(RuntimeError, match="receiver"):
        receiver.init_on_sender(model_id="policy", model=Model())
    scheme.init_on_sender(model_id="value", model=Model(), num_workers=3)
    assert scheme.model_id == "value", "initialised again, it is for that model alone"


# -- phase 2


@pytest.mark.requirement(16, 17, 18, 66)
@pytest.mark.both_loops
@pytest.mark.parametrize("first", ["sender", "receiver"])
async def test_init_and_connect_of_either_side_may_come_first(api: Api, first: str) -> None:
    sender = api.scheme()
    receiver = receiver_of(sender, None, model := Model())

    def connect_sender() -> Any:
        sender.init_on_sender(model_id="policy", model=Model(4), num_workers=1)
        return sender.connect(timeout=5)

    calls = {"sender": connect_sender, "receiver": lambda: receiver.connect(worker_idx=0, timeout=5)}
    async with sender, receiver:
        early = asyncio.create_task(calls.pop(first)())
        done, _ = await asyncio.wait({early}, timeout=0.1)
        assert not done, "connect returned without the other side"
        with Clock(1.0):
            await calls.popitem()[1]()
            await early
        assert (read(model), receiver.worker_idx) == ({4}, 0)


@pytest.mark.requirement(17, 18, 66)
@pytest.mark.schemes("zmq")
def test_every_timeout_is_finite_by_default(api: Api) -> None:
    parameters = inspect.signature(api.WeightSyncScheme.connect).parameters
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "self")
    bounded = {"connect": 60.0, "wait_version": 60.0, "send_async": 60.0, "fetch": 30.0, "shutdown": 5.0}
    if api.is_blocking:
        bounded["send"] = 60.0
    for cls in ("WeightSyncScheme", *SCHEMES):
        for name, seconds in bounded.items():
            method = getattr(getattr(api, cls), name)
            assert inspect.signature(method).parameters["timeout"].default == seconds, (cls, name)
    for name in bounded.keys() - {"fetch"}:
        assert inspect.signature(getattr(api.Bus, name)).parameters["timeout"].default == bounded[name]


@pytest.mark.requirement(17)
async def test_senders_connect_expires_with_a_reason_and_may_be_called_again(api: Api) -> None:
    sender = api.sender(source := Model(1), num_workers=2)
    first, second = (receiver_of(sender, i, Model()) for i in range(2))
    async with sender, first, second:
        early = asyncio.create_task(first.connect(timeout=20))
        for _ in range(20):
            with Clock(0.2), pytest.raises(NotConnected, match="worker 1") as caught:
                await sender.connect(timeout=0.2)
            if is_there := re.search(
                "worker 1 .*worker 0", str(caught.value)
            ):  # the first times, worker 0 may be missing, too
                break
        assert is_there, "who is missing comes before who waits"
        fill(source, 2)
        await asyncio.gather(sender.connect(timeout=5), second.connect(timeout=5), early)
        assert read(first.model) == read(second.model) == {2}, "the second attempt brings the values of its own time"


@pytest.mark.requirement(18)
async def test_receivers_connect_expires_with_a_reason_and_may_be_called_again(api: Api) -> None:
    sender = api.sender(Model(1), num_workers=1)
    async with sender, receiver_of(sender, 0, model := Model()) as receiver:
        with Clock(0.2), pytest.raises(NotConnected) as caught:
            await receiver.connect(timeout=0.2)
        for part in ("worker 0", "0.2 s", *([] if api.kind == "Distributed" else [sender.bus.endpoint])):
            assert part in str(caught.value)
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        assert read(model) == {1}


@pytest.mark.requirement(19, 23, 190)
@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_connect_and_send_async_deliver_without_any_call_of_the_receivers(
    api: Api, scheme: str, unused_tcp_port: int
) -> None:
    """19 for ZMQ, SharedMem and MultiProcess."""
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}" if scheme == "tcp" else None
    async with api.crew(2, scheme=api.scheme(endpoint=endpoint), source=Model(6)) as everybody:
        assert everybody.read == [{6}, {6}]
        assert everybody.sender.version == 1
        assert [await r.receive(0) for r in everybody.receivers] == [None, None], "they count as returned"
        for value in (1, 2, 3):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]


class Spy:
    """Extends both sides of connect, and the end. What it returns is to be awaited, or done, as of its base class."""

    calls: tuple[Any, ...] = ()

    def _setup_connection_and_weights_on_sender_impl(self, **kwargs: Any) -> Any:
        self.calls += ("sender", kwargs)
        return super()._setup_connection_and_weights_on_sender_impl(**kwargs)  # type: ignore[misc]

    def _setup_connection_and_weights_on_receiver_impl(self, **kwargs: Any) -> Any:
        self.calls += ("receiver", kwargs)
        return super()._setup_connection_and_weights_on_receiver_impl(**kwargs)  # type: ignore[misc]

    def shutdown(self, timeout: float = 5.0) -> Any:
        self.calls += ("end",)
        return super().shutdown(timeout)  # type: ignore[misc]


@pytest.mark.requirement(68, 85, 214)
async def test_a_subclass_may_extend_connect_and_shutdown(api: Api) -> None:
    sender = api.extended(Spy)
    sender.init_on_sender(model_id="policy", num_workers=1)
    receiver, weights = receiver_of(sender, None, model := Model()), Model(9)
    async with sender, receiver:
        await asyncio.gather(sender.connect(weights=weights, timeout=5), receiver.connect(worker_idx=0, timeout=5))
        assert read(model) == {9}
    assert sender.calls == ("sender", {"weights": weights, "timeout": 5}, "end")
    assert receiver.calls == ("receiver", {"worker_idx": 0, "timeout": 5}, "end")
    assert sender.closed


async def test_a_mismatch_at_connect_changes_no_worker(api: Api) -> None:
    sender = api.sender(Model(1), num_workers=2)
    fits, does_not = receiver_of(sender, 0, Model()), receiver_of(sender, 1, Model(width=3))
    left, wrong, right = await refusals(sender, does_not, fits, timeout=1)
    assert isinstance(left, PartialSendError)
    assert (type(left.failed[1]), left.acked) == (SchemaMismatch, {})
    assert (type(wrong), right) == (SchemaMismatch, None), "the other one is ready for what will fit"
    assert read(fits.model) == read(does_not.model) == {-1}


# -- the end


@pytest.mark.requirement(85)
@pytest.mark.both_loops
async def test_shutdown_is_idempotent_and_releases_everything(api: Api, tmp_path: Path) -> None:
    files = descriptors()
    async with api.crew(2, scheme=api.scheme(endpoint=f"ipc://{tmp_path}/bus")) as (sender, receivers, models):
        assert sorted(os.listdir(tmp_path)) == ["bus", "bus.lock", "bus.side"]
        hooks = len(models[0]._forward_hooks)
        for scheme in (sender, *receivers):
            with Clock(0.5):
                await scheme.shutdown()
            await asyncio.gather(scheme.shutdown(), scheme.shutdown())
            assert scheme.closed
        assert hooks == 1
        assert not models[0]._forward_hooks
        assert not models[0]._forward_pre_hooks
        assert os.listdir(tmp_path) == []
    del scheme, sender, receivers, models  # a model may have its memory in a mapping, and lives on
    gc.collect()
    await until(lambda: descriptors().items() <= files.items(), 2)


@pytest.mark.requirement(85)
@pytest.mark.schemes("zmq")
@pytest.mark.parametrize("role", ["none", "sender", "receiver"])
@pytest.mark.parametrize("cls", SCHEMES)
async def test_shutdown_before_connect_works_in_another_thread_and_starts_none(api: Api, cls: str, role: str) -> None:
    scheme, model = api.make(getattr(api, cls)), Model()
    if role == "sender":
        scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    elif role == "receiver":
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
    for _ in range(2):
        await scheme.shutdown()
    assert scheme.closed
    assert not model._forward_hooks
    assert not any(thread.name == "asyncsync-loop" for thread in threading.enumerate())
    with pytest.raises(ClosedError):
        await scheme.connect()


@pytest.mark.requirement(210)
@pytest.mark.schemes("waiting")
@pytest.mark.both_loops
async def test_after_the_senders_goodbye_receivers_are_closed(api: Api) -> None:
    async with api.crew(2) as (sender, (blocked, late), models):
        waiting = asyncio.create_task(blocked.receive())
        await asyncio.sleep(0)
        await sender.send_async(fill(Model(), 3))
        assert read(await waiting) == {3}
        waiting = asyncio.create_task(blocked.receive())
        await asyncio.sleep(0)
        assert not blocked.closed
        await sender.shutdown()
        with Clock(0.5), pytest.raises(ClosedError, match="sender"):
            await waiting
        await until(lambda: late.closed)
        assert read(await late.receive()) == {3}, "what was not returned comes first"
        for timeout in (None, 0, 1.0):
            with pytest.raises(ClosedError):
                await late.receive(timeout)
        assert blocked.closed
        assert [read(m) for m in models] == [{3}, {3}], "the models keep what they have"


@pytest.mark.requirement(42, 73)
@pytest.mark.schemes("waiting")
@pytest.mark.parametrize("apply", ["auto", "on_receive"])
async def test_receive_without_a_timeout_is_refused_where_it_would_wait_for_itself(api: Api, apply: str) -> None:
    async with api.crew(1, receiver={"apply": apply}) as (sender, [receiver], [model]):
        with receiver.hold():
            await sender.publish(Model(2))
            # Not in a thread of its own, as a Face calls: that is not whose hold it is.
            receiving = (lambda: bare(receiver).receive()) if api.is_blocking else receiver.receive
            with pytest.raises(RuntimeError, match="itself"):
                await receiving()
            assert await receiver.receive(timeout=0.01) is None
            with pytest.raises(AckTimeout, match="reader"):
                await receiver.fetch(timeout=0.2)
        weights = await receiver.receive(timeout=10)
        assert read(weights) == read(model) == {2}
        waiting = asyncio.create_task(receiver.receive())
        await asyncio.sleep(0)
        await sender.send_async(Model(3), timeout=5)  # which is applied at once, also by a receive
        assert read(model) == read(await waiting) == {3}
