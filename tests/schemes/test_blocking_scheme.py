"""What only the blocking API promises: ordinary calls, in whatever thread, and one loop thread behind them."""

import asyncio
import threading
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

import asyncsync
from asyncsync import PartialSendError, RemoteError, WeightStrategy
from asyncsync.sync import Bus, NoWeightSyncScheme, SharedMemWeightSyncScheme, TransportBackend, ZMQWeightSyncScheme
from helpers import planted
from helpers.apis import BLOCKING, Api, Face, bare, in_thread
from helpers.blocking_crew import connect
from helpers.pairs import Clock, Model, connected, fill, held, passed_on, read, receiver_of, until

LOOP = "asyncsync-loop"


def loop_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == LOOP]


async def test_the_face_by_which_other_tests_see_a_blocking_scheme_has_all_that_waits() -> None:
    scheme = BLOCKING.scheme(num_workers=1)
    assert isinstance(passed_on(scheme), Face), "also after it was pickled"
    for ours, other in ((scheme, asyncsync.ZMQWeightSyncScheme()), (scheme.bus, asyncsync.Bus())):
        waiting = {n for n in dir(other) if not n.startswith("_") and iscoroutinefunction(getattr(other, n, None))}
        assert waiting >= {"connect", "publish", "send_async", "wait_version", "shutdown"}
        assert {name for name in waiting if not iscoroutinefunction(getattr(ours, name))} == set()


# -- what runs where


@pytest.mark.requirement(21)
@pytest.mark.schemes("every")
async def test_connect_starts_what_receives_and_the_worker_need_not_call_anything(api: Api) -> None:
    """The loop thread of the blocking API; for a coroutine, its own event loop."""
    before = set(threading.enumerate())
    assert loop_threads() == []
    sender = api.sender(Model(1), num_workers=1)
    receiver = receiver_of(sender, 0, model := Model())
    assert set(threading.enumerate()) == before, "init starts nothing"
    async with connected(sender, receiver):
        assert loop_threads() == ([LOOP] if api.is_blocking else [])
        for value in (2, 3):
            await sender.send_async(Model(value))
            assert read(model) == {value}
    assert loop_threads() == []


async def test_what_the_devices_have_still_to_do_is_noted_in_the_thread_that_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The current stream is the thread's own: the loop's has nothing of the caller's."""
    noted: list[tuple[str, set[float]]] = []
    planted.note_device_events(monkeypatch, lambda flat: noted.append((threading.current_thread().name, read(flat))))
    here = threading.current_thread().name
    async with BLOCKING.crew(1, source=Model(1)) as everybody:
        sender, source = everybody.sender.bare, everybody.source
        assert noted.pop()[1] == {1}
        sender.send(fill(source, 2))
        sender.publish(fill(source, 3))
        await sender.send_async({0: fill(source, 4)})
        sender.bus.send({"policy": fill(source, 5)})
        assert noted == [(here, {value}) for value in (2, 3, 4, 5)]
        assert everybody.read == [{5}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme])
def test_what_a_stream_of_the_callers_has_still_to_write_is_sent(kind: type[Any]) -> None:
    sender = kind(num_workers=1)
    sender.init_on_sender(model_id="policy", model=(source := Model(1, 1 << 18).cuda()))
    receiver = receiver_of(sender, 0, model := Model(width=1 << 18))
    stream = torch.cuda.Stream()
    with sender, receiver:
        connect(sender, receiver)
        for value in (2, 3, 4):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)  # a tenth of a second
                fill(source, value)
                sender.send()
            assert read(model) == {value}


@pytest.mark.requirement(21)
def test_a_scheme_that_receives_nothing_starts_nothing() -> None:
    scheme = NoWeightSyncScheme()
    scheme.init_on_receiver("policy", model=Model(), worker_idx=0)
    before = threading.enumerate()
    scheme.connect()
    assert scheme.receive() is None
    assert threading.enumerate() == before
    scheme.shutdown()


@pytest.mark.requirement(25)
@pytest.mark.schemes("all")
async def test_updates_never_block_the_workers_main_path(api: Api) -> None:
    async with api.crew(1) as (sender, (receiver,), (model,)):
        with receiver.hold():  # a step of this thread, the worker's main one
            for value in (1, 2, 3):
                await sender.publish(Model(value))
                with Clock(0.1):
                    assert model() == {0}, "its own forward goes on with what the step began with"
                    assert await receiver.receive(timeout=0) is None
                    assert receiver.status()[0].version == 1
            machine = bare(receiver).bus.link.machine
            await until(lambda: [staging.versions for staging in machine.staged] == [{"policy": 4}])
        with Clock(0.1):
            assert model() == {3}, "the newest was applied when the step was over"
        assert read(await api.receive(receiver, 5)) == {3}


@pytest.mark.requirement(189)
async def test_all_blocking_schemes_of_a_process_share_one_thread() -> None:
    before = set(threading.enumerate())
    async with BLOCKING.crew(2) as first, BLOCKING.crew(1) as second:
        for everybody in (first, second):
            everybody.sender.bare.send(fill(everybody.source, 2))
            assert read(everybody.receivers[0].bare.receive(timeout=5)) == {2}
        await until(lambda: {t.name for t in set(threading.enumerate()) - before} == {LOOP})
        assert loop_threads() == [LOOP]
        await first.sender.shutdown()
        second.sender.bare.send(fill(second.source, 3))
        assert second.read == [{3}], "it ends with the last of them, not with the first"
    await until(lambda: set(threading.enumerate()) <= before)


# -- sending


@pytest.mark.requirement(23, 69, 72)
@pytest.mark.both_loops
async def test_send_returns_nothing_and_not_before_its_workers_have_applied() -> None:
    async with BLOCKING.crew(2) as everybody:
        sender = everybody.sender.bare
        with held(everybody.receivers[1]):
            sending = asyncio.create_task(in_thread(sender.send, Model(1)))
            await until(lambda: everybody.receivers[0].version == 2)
            done, _ = await asyncio.wait({sending}, timeout=0.1)
            assert not done, "worker 1 has not applied it"
            with Clock(1.0):
                assert sender.send(Model(2), worker_ids=0) is None, "it is not for worker 1"
            assert everybody.read == [{2}, {0}]
        assert await sending is None
        assert everybody.read == [{2}, {1}]
        with held(everybody.receivers[0]):
            sending = asyncio.create_task(sender.bus.send_async({"policy": Model(3)}))
            for _ in range(50):
                await asyncio.sleep(0.001)  # it does not block the loop
            assert not sending.done()
        assert await sending == 4, "it returns the version"
        assert everybody.read == [{3}, {3}]


class Halving(ZMQWeightSyncScheme):
    """A user's: sends halves and applies them doubled."""

    prepared_in = ""

    def prepare_weights(self, weights: Any, model_id: Any, strategy: Any, context: Any = None) -> TensorDictBase:
        self.prepared_in = threading.current_thread().name
        return super().prepare_weights(weights, model_id, strategy, context) / 2

    def apply_weights(self, weights: TensorDictBase, inplace: bool = True) -> None:
        if 13 in read(weights):
            raise ArithmeticError("not this one")
        super().apply_weights(weights * 2, inplace)


@pytest.mark.requirement(214)
async def test_hooks_of_a_users_scheme_are_ordinary_methods_and_what_they_raise_comes_with_its_traceback() -> None:
    async with BLOCKING.crew(2, scheme=BLOCKING.make(Halving), source=Model(4)) as everybody:
        assert everybody.read == [{4}, {4}]
        sender = everybody.sender.bare
        sender.send(fill(everybody.source, 6))
        assert sender.prepared_in == threading.current_thread().name, "in the caller's thread"
        assert everybody.read == [{6}, {6}]
        assert read(everybody.receivers[0].bare.receive(timeout=5)) == {3}, "receive returns what was sent"
        with pytest.raises(PartialSendError) as caught:
            sender.send({1: Model(26)}, timeout=5)
        error = caught.value.failed[1]
        assert isinstance(error, RemoteError)
        assert 'raise ArithmeticError("not this one")' in error.remote_traceback
        sender.send(Model(14), timeout=5)
        assert everybody.read == [{14}, {14}]


# -- never a deadlock


ENTRANCES: list[Callable[[Any], Any]] = [
    lambda s: s.receive(timeout=1),
    lambda s: s.fetch(timeout=1),
    lambda s: s.wait_version(1000, timeout=1),
    lambda s: s.connect(timeout=1),
    lambda s: s.shutdown(timeout=1),
]


class Reentrant(WeightStrategy):
    """Calls the blocking API where the library calls it: on the loop's own thread."""

    call: Any = None

    def convert(self, weights: TensorDictBase, model: Any) -> Any:
        if self.call is not None:
            self.call()
        return super().convert(weights, model)


@pytest.mark.requirement(201)
async def test_a_hook_that_calls_the_blocking_api_on_its_own_thread_gets_an_error() -> None:
    async with BLOCKING.crew(1, scheme=BLOCKING.scheme(Reentrant(), num_workers=1)) as (sender, (receiver,), (model,)):
        hook = receiver.strategy
        for number, call in enumerate(ENTRANCES, 1):
            hook.call = lambda call=call: call(bare(receiver))
            with Clock(1.0), pytest.raises(PartialSendError) as caught:
                sender.bare.send(Model(number), timeout=10)
            error = caught.value.failed[0]
            assert isinstance(error, RemoteError)
            assert "would wait for itself" in error.remote_traceback
            hook.call = None
            sender.bare.send(Model(-number), timeout=10)
            assert read(model) == {-number}


# -- the end


@pytest.mark.parametrize("how", ["bus", "scheme"])
def test_a_shutdown_before_connect_ends_the_transports(how: str) -> None:
    closed: list[int] = []

    class Channel(TransportBackend):
        def send_weights(self, weights: Any = None, worker_ids: Any = None) -> None: ...
        def receive_weights(self, timeout: float | None = None, **kwargs: Any) -> None: ...
        def close(self) -> None:
            closed.append(id(self))

    class Scheme(asyncsync.sync.WeightSyncScheme):
        def create_transport(self, **kwargs: Any) -> Channel:
            return Channel()

    bus = Bus(num_workers=2)
    scheme = Scheme(bus=bus)
    scheme.init_on_sender(model_id="policy", model=Model(0))
    (bus if how == "bus" else scheme).shutdown()
    assert len(set(closed)) == 2
    assert scheme.closed
    bus.shutdown()
    assert len(closed) == 2
