"""The two phases: init without communication, connect as the rendezvous; then updates, then the end."""

from __future__ import annotations

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
from helpers.pairs import Clock, Model, fill, passed_on, read, receiver_of, refusals, until

pytestmark = pytest.mark.schemes("every")

SCHEMES = ["ZMQWeightSyncScheme", "SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "NoWeightSyncScheme"]


def open_files() -> set[str]:
    return {
        f"{n} {os.readlink(f'/proc/self/fd/{n}')}"
        for n in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{n}")
    }


# -- phase 1


@pytest.mark.requirement(12)
def test_init_on_either_side_communicates_with_nobody(
    api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_context(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("init made a ZeroMQ context")

    def no_loop() -> None:
        raise AssertionError("init made an event loop")

    monkeypatch.setattr(zmq, "Context", no_context)
    monkeypatch.setattr(asyncio, "new_event_loop", no_loop)
    monkeypatch.setattr(asyncio.events, "new_event_loop", no_loop)
    files, threads = open_files(), threading.enumerate()
    scheme = api.sender(Model(), num_workers=1, scheme={"endpoint": f"ipc://{tmp_path}/bus"})
    worker = receiver_of(scheme, 0, Model())
    assert open_files() == files
    assert threading.enumerate() == threads
    assert list(tmp_path.iterdir()) == []
    assert worker.version == scheme.version == 0
    assert worker.status() == scheme.status() == {}


@pytest.mark.requirement(13)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_scheme_is_picklable_before_and_after_init_on_sender(api: Api, protocol: int) -> None:
    model = Model(width=1 << 20)
    scheme = api.scheme("state_dict", num_workers=2)
    fresh = pickle.loads(pickle.dumps(scheme, protocol))
    assert (fresh.model_id, fresh.bus.endpoint, fresh.bus.num_workers) == (None, scheme.bus.endpoint, 2)
    scheme.init_on_sender(model_id="policy", model=model)
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


@pytest.mark.requirement(14, 15, 84)
def test_init_registers_transport_source_and_workers(api: Api) -> None:
    """14 without what torch.distributed, RPC and Ray have; 15 without the Distributed scheme's store and rank."""
    scheme = api.sender(model := Model(3), num_workers=3)
    assert type(scheme.shared_transport) is api.transport_class
    assert isinstance(scheme.shared_transport, api.TransportBackend)
    assert scheme.sender_transports == dict.fromkeys(range(3), scheme.shared_transport)
    assert (scheme.receiver_transport, scheme.model, read(scheme.weights)) == (None, model, {3})
    receiver = passed_on(scheme)
    receiver.init_on_receiver("policy", worker_idx=1, model=(own := Model()))
    assert (receiver.model, receiver.worker_idx) == (own, 1)
    assert type(receiver.receiver_transport) is api.transport_class
    assert (receiver.sender_transports, receiver.shared_transport) == ({}, None)


@pytest.mark.requirement(16)
@pytest.mark.parametrize("sender_first", [True, False])
async def test_sender_may_be_initialised_before_or_after_the_workers(api: Api, sender_first: bool) -> None:
    scheme, source, model = api.scheme(), Model(5), Model()
    worker = passed_on(scheme)

    async def start_worker() -> None:
        worker.init_on_receiver("policy", model=model, worker_idx=0)
        await worker.connect(timeout=5)

    async with scheme, worker:
        if sender_first:
            scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
        running = asyncio.create_task(start_worker())
        await until(lambda: worker.worker_idx == 0)
        if not sender_first:
            scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
        await scheme.connect(timeout=5)
        await running
        assert read(model) == {5}


# -- phase 2


@pytest.mark.requirement(17, 18)
@pytest.mark.both_loops
@pytest.mark.parametrize("first", ["sender", "receiver"])
async def test_connect_waits_for_the_other_side_whichever_comes_first(api: Api, first: str) -> None:
    sender = api.sender(Model(4), num_workers=1)
    receiver = receiver_of(sender, None, model := Model())
    calls = {"sender": lambda: sender.connect(timeout=5), "receiver": lambda: receiver.connect(worker_idx=0, timeout=5)}
    async with sender, receiver:
        early = asyncio.create_task(calls.pop(first)())
        done, _ = await asyncio.wait({early}, timeout=0.1)
        assert not done, "connect returned without the other side"
        with Clock(1.0):
            await calls.popitem()[1]()
            await early
        assert read(model) == {4}


@pytest.mark.requirement(17, 18)
@pytest.mark.schemes("zmq")
def test_every_timeout_is_finite_by_default(api: Api) -> None:
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
        early = asyncio.create_task(first.connect(timeout=5))
        with Clock(0.2), pytest.raises(NotConnected, match="worker 1"):
            await sender.connect(timeout=0.2)
        fill(source, 2)
        await asyncio.gather(sender.connect(timeout=5), second.connect(timeout=5), early)
        assert read(first.model) == read(second.model) == {2}, "the second attempt brings the values of its own time"


@pytest.mark.requirement(17)
async def test_senders_connect_tells_who_is_missing_before_who_waits(api: Api) -> None:
    sender = api.sender(Model(1), num_workers=2)
    async with sender, receiver_of(sender, 0, Model()) as first:
        waiting = asyncio.create_task(first.connect(timeout=20))
        for _ in range(20):
            with pytest.raises(NotConnected) as caught:
                await sender.connect(timeout=0.2)
            if re.search("worker 1 .*worker 0", str(caught.value)):
                break
        else:
            pytest.fail(str(caught.value))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


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


@pytest.mark.requirement(19)
@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_connect_delivers_the_initial_weights(api: Api, scheme: str, unused_tcp_port: int) -> None:
    """19 for ZMQ, SharedMem and MultiProcess."""
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}" if scheme == "tcp" else None
    async with api.crew(2, scheme=api.scheme(endpoint=endpoint), source=Model(6)) as everybody:
        assert everybody.read == [{6}, {6}]
        assert everybody.sender.version == 1
        assert [await r.receive(0) for r in everybody.receivers] == [None, None], "they count as returned"


@pytest.mark.requirement(23, 190)
@pytest.mark.both_loops
async def test_send_async_makes_receivers_apply_without_any_call_of_theirs(api: Api) -> None:
    async with api.crew(2) as everybody:
        for value in (1, 2, 3):
            fill(everybody.source, value)
            await everybody.sender.send_async()
            assert everybody.read == [{value}, {value}]


@pytest.mark.requirement(53)
def test_a_scheme_is_for_one_model_and_the_init_that_ran_sets_its_role(api: Api) -> None:
    sender = api.scheme()
    receiver = passed_on(sender)
    sender.init_on_sender(model_id="policy", model=Model(), num_workers=1)
    receiver.init_on_receiver("policy", model=Model(), worker_idx=0)
    assert sender.shared_transport is not None
    assert receiver.shared_transport is None
    with pytest.raises(RuntimeError, match="sender"):
        sender.init_on_receiver("policy", model=Model(), worker_idx=0)
    with pytest.raises(RuntimeError, match="receiver"):
        receiver.init_on_sender(model_id="policy", model=Model())
    sender.init_on_sender(model_id="value", model=Model(), num_workers=1)
    assert sender.model_id == "value", "initialised again, it is for that model alone"


@pytest.mark.requirement(66)
async def test_connect_takes_worker_idx_on_a_receiver_by_keyword_only(api: Api) -> None:
    parameters = inspect.signature(api.WeightSyncScheme.connect).parameters
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "self")
    assert parameters["worker_idx"].default is None
    sender = api.sender(weights={"w": Model(0).first.data}, num_workers=2)
    async with sender:
        receivers = [receiver_of(sender, None, {"w": Model(9).first.data}) for _ in range(2)]
        await asyncio.gather(
            sender.connect(timeout=5), *(r.connect(worker_idx=i, timeout=5) for i, r in enumerate(receivers))
        )
        assert [r.worker_idx for r in receivers] == [0, 1]
        for receiver in receivers:
            await receiver.shutdown()


CALLS: list[tuple[str, dict[str, Any]]] = []


class Spy:
    async def _setup_connection_and_weights_on_sender_impl(self, **kwargs: Any) -> None:
        CALLS.append(("sender", kwargs))

    async def _setup_connection_and_weights_on_receiver_impl(self, **kwargs: Any) -> None:
        CALLS.append(("receiver", kwargs))


class BlockingSpy:
    def _setup_connection_and_weights_on_sender_impl(self, **kwargs: Any) -> None:
        CALLS.append(("sender", kwargs))

    def _setup_connection_and_weights_on_receiver_impl(self, **kwargs: Any) -> None:
        CALLS.append(("receiver", kwargs))


@pytest.mark.requirement(68)
async def test_connect_dispatches_by_the_init_that_ran(api: Api) -> None:
    CALLS.clear()
    sender, receiver = (api.extended(api.either(Spy, BlockingSpy)) for _ in range(2))
    sender.init_on_sender(model_id="policy", num_workers=1)
    await sender.connect(weights="some", timeout=1)
    receiver.init_on_receiver("policy", model=Model())
    await receiver.connect(worker_idx=0, timeout=1)
    assert CALLS == [("sender", {"weights": "some", "timeout": 1}), ("receiver", {"worker_idx": 0, "timeout": 1})]


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
    files = open_files()
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
    await until(lambda: open_files() <= files, 2)


@pytest.mark.requirement(85)
@pytest.mark.schemes("zmq")
@pytest.mark.parametrize("cls", SCHEMES)
async def test_shutdown_works_at_every_stage(api: Api, cls: str) -> None:
    kind = getattr(api, cls)
    await api.make(kind).shutdown()
    scheme = api.make(kind)
    scheme.init_on_sender(model_id="policy", model=Model(), num_workers=1)
    await scheme.shutdown()
    await scheme.shutdown()
    scheme = api.make(kind)
    scheme.init_on_receiver("policy", model=(model := Model()), worker_idx=0)
    await scheme.shutdown()
    assert not model._forward_hooks


class Ending:
    ended = 0

    async def shutdown(self, timeout: float = 5.0) -> None:
        await super().shutdown(timeout)  # type: ignore[misc]
        self.ended += 1


class BlockingEnding:
    ended = 0

    def shutdown(self, timeout: float = 5.0) -> None:
        super().shutdown(timeout)  # type: ignore[misc]
        self.ended += 1


@pytest.mark.requirement(85)
async def test_a_subclass_may_extend_shutdown(api: Api) -> None:
    async with api.crew(1, scheme=api.extended(api.either(Ending, BlockingEnding))) as (sender, receivers, _):
        pass
    assert [(s.ended, s.closed) for s in (sender, *receivers)] == [(1, True)] * 2


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


@pytest.mark.requirement(42)
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
        await sender.send_async(Model(3)) if apply == "auto" else await sender.publish(Model(3))
        await receiver.receive(timeout=10)
