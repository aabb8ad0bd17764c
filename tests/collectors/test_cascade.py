"""Cascade: an update counts as applied when the workers below a worker have it, too."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncsync import AckTimeout, PartialSendError, RemoteError
from helpers.apis import Api, bare, in_thread
from helpers.pairs import Clock, Model, read, receiver_of, until


class Recorder:
    """A context with the model and an ordinary ``update_policy_weights_``, which keeps what it is given."""

    def __init__(self, model: Any = None) -> None:
        self.model = Model() if model is None else model
        self.calls: list[tuple[set[float], str]] = []
        self.kept: list[Any] = []
        self.threads: set[str] = set()
        self.fail: BaseException | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.begun = threading.Event()

    def get_model(self, model_id: str) -> Any:
        return self.model

    def update_policy_weights_(self, weights: Any, *, model_id: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.may_go_on.wait(50)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self.kept.append(weights)
        self.calls.append((read(weights), model_id))


class AsyncRecorder(Recorder):
    async def update_policy_weights_(self, weights: Any, *, model_id: str) -> None:  # type: ignore[override]
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        await in_thread(self.may_go_on.wait, 50)
        super().update_policy_weights_(weights, model_id=model_id)


class Returning(Recorder):
    """An ordinary function that returns a coroutine."""

    def update_policy_weights_(self, weights: Any, *, model_id: str) -> Any:
        async def later() -> None:
            await asyncio.sleep(0)
            Recorder.update_policy_weights_(self, weights, model_id=model_id)

        return later()


@asynccontextmanager
async def pair(api: Api, context: Any, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A trainer, and one worker with this context."""
    sender = api.scheme()
    sender.init_on_sender(model_id="policy", model=Model(1), num_workers=1)
    receiver = receiver_of(sender, 0, None, context=context, **options)
    try:
        await asyncio.gather(sender.connect(timeout=10), receiver.connect(timeout=10))
        yield sender, receiver
    finally:
        await receiver.shutdown()
        await sender.shutdown()


@pytest.mark.requirement(74)
@pytest.mark.schemes("some")
@pytest.mark.both_loops
@pytest.mark.parametrize("kind", [Recorder, AsyncRecorder, Returning])
async def test_every_applied_update_is_passed_on_the_initial_one_included(api: Api, kind: Any) -> None:
    context = kind()
    async with pair(api, context) as (sender, receiver):
        assert context.calls == [({1}, "policy")]
        for value in (2, 3):
            await sender.send_async(Model(value))
            assert context.calls[-1] == ({value}, "policy"), "before send has returned"
            assert read(await api.receive(receiver, 0)) == {value}
        assert [read(w) for w in context.kept] == [{1}, {2}, {3}], "each a TensorDict of its own"
        assert read(context.model) == {3}
    loop = "asyncsync-loop" if api.is_blocking else "MainThread"
    assert context.threads == {"asyncsync-cascade" if kind is Recorder else loop}


@pytest.mark.requirement(74)
@pytest.mark.parametrize("kind", [Recorder, AsyncRecorder])
async def test_an_update_counts_only_when_it_has_been_passed_on(api: Api, kind: Any) -> None:
    context = kind()
    async with pair(api, context) as (sender, receiver):
        context.may_go_on.clear()
        context.begun.clear()
        await sender.publish(Model(2))
        await in_thread(context.begun.wait, 5)
        assert read(context.model) == {2}, "applied"
        assert (receiver.version, await receiver.receive(0)) == (2, None), "what the model shows does not count yet"
        with pytest.raises(PartialSendError) as caught:
            await sender.wait_version(2, timeout=0.1)
        assert isinstance(caught.value.failed[0], AckTimeout)
        for value in (3, 4):  # meanwhile nothing newer goes through the gate
            await sender.publish(Model(value))
        await until(lambda: bare(receiver).bus.link.machine.staged[-1].versions == {"policy": 4})
        assert read(context.model) == {2}
        context.may_go_on.set()
        await sender.wait_version(4, timeout=10)
        assert [v for v, _ in context.calls][:2] == [{1}, {2}]
        assert context.calls[-1] == ({4}, "policy")
        assert read(context.model) == {4}


@pytest.mark.requirement(74)
@pytest.mark.schemes("some")
async def test_it_is_passed_on_when_receive_applies_it(api: Api) -> None:
    context = Recorder()
    async with pair(api, context, apply="on_receive") as (sender, receiver):
        await sender.publish(Model(2))
        await until(lambda: bare(receiver).bus.link.machine.staged)
        assert context.calls == [({1}, "policy")]
        assert read(await api.receive(receiver, 5)) == {2}
        assert context.calls == [({1}, "policy"), ({2}, "policy")]


@pytest.mark.requirement(74)
@pytest.mark.parametrize("kind", [Recorder, AsyncRecorder])
async def test_an_exception_fails_the_update_with_its_traceback(api: Api, kind: Any) -> None:
    context = kind()
    async with pair(api, context) as (sender, receiver):
        for error in (OSError("the leaf fell off"), SystemExit(3), StopIteration()):
            if kind is AsyncRecorder and not isinstance(error, OSError):
                continue  # asyncio itself lets these end the loop
            context.fail = error
            with Clock(1.0), pytest.raises(PartialSendError) as caught:
                await sender.send_async(Model(2), timeout=20)
            failure = caught.value.failed[0]
            assert isinstance(failure, RemoteError)
            assert type(error).__name__ in str(failure)
            assert "raise error" in failure.remote_traceback
            assert receiver.version == sender.version, "what the model shows, though it does not count"
            assert await receiver.receive(0) is None
        await sender.send_async(Model(3), timeout=20)
        assert context.calls[-1] == ({3}, "policy")
        assert read(await receiver.receive(0)) == {3}


@pytest.mark.requirement(74)
async def test_a_context_that_takes_no_weights_is_left_alone(api: Api) -> None:
    class Plain:
        update_policy_weights_ = None

        def __init__(self) -> None:
            self.model = Model()

        def get_model(self, model_id: str) -> Any:
            return self.model

    async with pair(api, context := Plain()) as (sender, _):
        await sender.send_async(Model(2))
        assert read(context.model) == {2}


class Several:
    def __init__(self) -> None:
        self.models = {"actor": Model(), "critic": Model()}
        self.calls: list[dict[str, set[float]]] = []

    def get_model(self, model_id: str) -> Any:
        return self.models[model_id]

    def update_policy_weights_(self, weights: Any = None, *, model_id: Any = None, weights_dict: Any = None) -> None:
        given = {model_id: weights} if weights_dict is None else weights_dict
        self.calls.append({name: read(each) for name, each in given.items()})


@pytest.mark.requirement(74)
@pytest.mark.schemes("some")
async def test_several_models_of_one_update_are_passed_on_in_one_call(api: Api) -> None:
    bus = api.bus(num_workers=1)
    senders = {name: api.scheme(bus=bus) for name in ("actor", "critic")}
    context = Several()
    for k, (name, scheme) in enumerate(senders.items()):
        scheme.init_on_sender(model_id=name, model=Model(k + 1))
    receivers = [receiver_of(senders[name], 0, None, name, context=context) for name in senders]
    there = receivers[0].bus
    try:
        await asyncio.gather(bus.connect(timeout=10), there.connect(timeout=10))
        context.calls.clear()
        await bus.send_async({"actor": Model(3), "critic": Model(4)}, timeout=10)
        assert context.calls == [{"actor": {3}, "critic": {4}}]
        await bus.send_async({"critic": Model(5)}, timeout=10)
        assert context.calls[1:] == [{"critic": {5}}]
    finally:
        await there.shutdown()
        await bus.shutdown()


@pytest.mark.schemes("some")
async def test_a_model_that_leaves_while_another_is_passed_on_is_left_out(api: Api) -> None:
    bus = api.bus(num_workers=1)
    senders = {name: api.scheme(bus=bus) for name in ("actor", "critic")}
    contexts = {"actor": Recorder(), "critic": Recorder()}
    for name, scheme in senders.items():
        scheme.init_on_sender(model_id=name, model=Model(1))
    receivers = {name: receiver_of(senders[name], 0, None, name, context=contexts[name]) for name in senders}
    there = receivers["actor"].bus
    try:
        await asyncio.gather(bus.connect(timeout=10), there.connect(timeout=10))
        for context in contexts.values():
            context.calls.clear()
        contexts["actor"].begun.clear()
        contexts["actor"].may_go_on.clear()
        version = await bus.publish({"actor": Model(2), "critic": Model(3)})
        assert await in_thread(contexts["actor"].begun.wait, 10)
        await receivers["critic"].shutdown()
        contexts["actor"].may_go_on.set()
        await senders["actor"].wait_version(version, timeout=10)
        assert contexts["actor"].calls == [({2}, "actor")]
        assert contexts["critic"].calls == []
    finally:
        contexts["actor"].may_go_on.set()
        await there.shutdown()
        await bus.shutdown()


# -- a tree: trainer, middle worker, two leaves


class Middle(Recorder):
    """Sends what it gets to workers of its own, with another scheme."""

    def __init__(self, scheme: Any) -> None:
        super().__init__()
        self.scheme = bare(scheme)

    def update_policy_weights_(self, weights: Any, *, model_id: str) -> None:
        super().update_policy_weights_(weights, model_id=model_id)
        self.scheme.send(weights, timeout=20)


class AsyncMiddle(Middle):
    async def update_policy_weights_(self, weights: Any, *, model_id: str) -> None:  # type: ignore[override]
        Recorder.update_policy_weights_(self, weights, model_id=model_id)
        await self.scheme.send_async(weights, timeout=20)


@asynccontextmanager
async def tree(api: Api, kind: Callable[[Any], Any]) -> AsyncIterator[tuple[Any, list[Any], Callable[[], list[Any]]]]:
    """The trainer, the leaves, and what reads the models of the middle worker and of the leaves."""
    below = api.scheme(num_workers=2)
    below.init_on_sender(model_id="policy")
    leaves = [receiver_of(below, i, Model()) for i in range(2)]
    context = kind(below)
    try:
        await asyncio.gather(below.connect(timeout=10), *(leaf.connect(timeout=10) for leaf in leaves))
        async with pair(api, context) as (trainer, _):
            yield trainer, leaves, lambda: [read(context.model), *(read(leaf.model) for leaf in leaves)]
    finally:
        for each in (*leaves, below):
            await each.shutdown()


def middles(api: Api) -> list[Callable[[Any], Any]]:
    return [Middle, AsyncMiddle] if api.is_blocking else [AsyncMiddle]


@pytest.mark.requirement(26)
@pytest.mark.both_loops
async def test_send_returns_when_the_leaves_have_the_weights(api: Api) -> None:
    for kind in middles(api):
        async with tree(api, kind) as (trainer, _, held):
            assert held() == [{1}] * 3, "connect's as well"
            for value in range(2, 12):
                await trainer.send_async(Model(value), timeout=20)
                assert held() == [{value}] * 3


@pytest.mark.requirement(26)
async def test_a_failure_in_a_leaf_names_its_cause_at_the_trainer(api: Api) -> None:
    for kind in middles(api):
        async with tree(api, kind) as (trainer, leaves, held):
            binding = bare(leaves[1]).binding
            original, binding.prepare = binding.prepare, _no_room
            with Clock(1.0), pytest.raises(PartialSendError, match=r"worker 1: RemoteError.*no room in this leaf"):
                await trainer.send_async(Model(2), timeout=20)
            assert held() == [{2}, {2}, {1}]
            binding.prepare = original
            await trainer.send_async(Model(3), timeout=20)
            assert held() == [{3}] * 3


def _no_room(slab: Any) -> Any:
    raise MemoryError("no room in this leaf")


@pytest.mark.requirement(195)
@pytest.mark.parametrize("kind", [Recorder, AsyncRecorder])
async def test_a_cascade_that_blocks_is_an_ack_timeout_and_shutdown_is_bounded(api: Api, kind: Any) -> None:
    context = kind()
    async with pair(api, context) as (sender, receiver):
        context.may_go_on.clear()
        with Clock(0.5), pytest.raises(PartialSendError) as caught:
            await sender.send_async(Model(2), timeout=0.2)
        assert isinstance(caught.value.failed[0], AckTimeout)
        with Clock(0.5):
            await receiver.shutdown()
            await sender.shutdown()
        context.may_go_on.set()  # the thread ends by itself: the fixtures look


@pytest.mark.requirement(192)
async def test_a_cascade_does_not_outlive_its_receiver(api: Api) -> None:
    context = Recorder()
    async with pair(api, context) as (sender, receiver):
        context.may_go_on.clear()
        context.begun.clear()
        await sender.publish(Model(2))
        await in_thread(context.begun.wait, 5)
        holdings = bare(receiver).bus.link.machine.holdings
        assert holdings.version("policy") == 1
        await receiver.shutdown()
        assert not holdings.updates
        context.may_go_on.set()
        await until(lambda: len(context.calls) == 2)
        assert not holdings.updates
