"""``follow``: an ASGI application, on a real uvicorn, whose model follows a trainer."""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from asyncsync import NotConnected, SharedMemWeightSyncScheme, ZMQWeightSyncScheme, sync
from asyncsync.engines import follow
from helpers.pairs import Clock, Model, connected, eventually, fill, passed_on, read, receiver_of, until
from helpers.processes import Schemes, Start, Trainer
from helpers.serving import get, request, serving

pytestmark = pytest.mark.requirement(245)

KINDS = pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme])


class Told(Model):
    """With a method that is gated, too."""

    def predict(self) -> set[float]:
        return read(self)


class App:
    """A plain ASGI application. Each path calls the model in another way; the body is what it has read."""

    def __init__(self, model: Any, scheme: Any) -> None:
        self.model = model
        self.scheme = scheme
        self.said: list[str] = []
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                self.said.append((await receive())["type"])
                await send({"type": f"{self.said[-1]}.complete"})
                if self.said[-1] == "lifespan.shutdown":
                    return
        start = {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"kept")]}
        if scope["path"] == "/stream":
            await send(start)
            for _ in range(3):
                text = str(min(await asyncio.to_thread(self.model)))
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                await self.go_on.wait()
            await send({"type": "http.response.body"})
            return
        if scope["path"] == "/broken":
            await send(start)
            raise RuntimeError("before the first byte")
        found = await self.read(scope["path"])
        body = str(found.pop() if len(found) == 1 else found).encode()
        await send({**start, "headers": [*start["headers"], (b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def read(self, path: str) -> set[Any]:
        match path:
            case "/thread":
                return await asyncio.to_thread(self.model)
            case "/loop":
                found: set[float] = self.model()
                return found
            case "/method":
                return await asyncio.to_thread(self.model.predict)
            case "/hold":
                async with self.scheme.hold():
                    return {*read(self.model), *await asyncio.to_thread(self.model)}
            case "/twice":
                await asyncio.to_thread(self.model)
                await self.go_on.wait()
                return await asyncio.to_thread(self.model)
        return {"nothing"}


@pytest.mark.timeout(90)
@KINDS
async def test_each_response_names_the_version_that_its_model_call_has_seen(kind: Any) -> None:
    sender = kind(num_workers=1)
    sender.init_on_sender(model_id="policy", model=(source := Model(1.0)))
    scheme = receiver_of(sender, 0, model := Told(-1.0), gated=("predict",))
    app, over = App(model, scheme), False

    async def train() -> None:
        while not over:
            await sender.send_async(fill(source, sender.version + 1))  # version v holds v
            await asyncio.sleep(0.003)

    async def ask(path: str) -> list[tuple[int | None, str]]:
        return [await get(port, path) for _ in range(40)]

    async with sender, asyncio.TaskGroup() as group:
        group.create_task(sender.connect(timeout=10))
        async with follow(app, scheme, timeout=10) as served, serving(served) as port:
            training = asyncio.create_task(train())
            asking = [asyncio.create_task(ask(path)) for path in ("/thread", "/loop", "/method", "/hold", "/else")]
            found = await asyncio.gather(*asking)
            over = True
            await training
    assert found.pop() == [(None, "nothing")] * 40, "no model was called for these"
    for answers in found:
        assert [float(version or -1) for version, _ in answers] == [float(body) for _, body in answers]
        versions = [version or -1 for version, _ in answers]
        assert versions == sorted(versions)
        assert versions[0] < versions[-1], "it has followed"
    assert app.said == ["lifespan.startup", "lifespan.shutdown"]
    assert scheme.closed, "it was connected by follow"


@KINDS
async def test_a_slow_response_keeps_neither_updates_nor_requests_waiting(kind: Any) -> None:
    sender = kind(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    scheme = receiver_of(sender, 0, model := Model(-1.0))
    async with connected(sender, scheme), follow(app := App(model, scheme), scheme) as served, serving(served) as port:
        async with request(port, "/stream") as stream, asyncio.timeout(20):
            assert (stream.version, stream.headers["x-own"]) == (1, "kept"), "of the call before the first byte"
            assert await stream.piece() == "1.0"
            twice = asyncio.create_task(get(port, "/twice"))
            with Clock(1.0):
                for value in (2, 3):
                    assert await sender.send_async(Model(value)) == value
                    assert await get(port, "/thread") == (value, f"{value}.0")
            app.go_on.set()
            assert [await stream.piece(), await stream.piece(), await stream.piece()] == ["3.0", "3.0", ""]
            assert await twice == (3, "3.0"), "the version of the last call"
    assert not scheme.is_registered or scheme.closed


async def test_a_client_that_has_left_in_the_middle_keeps_nothing_waiting() -> None:
    sender = ZMQWeightSyncScheme(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    scheme = receiver_of(sender, 0, model := Model(-1.0))
    async with connected(sender, scheme), follow(app := App(model, scheme), scheme) as served, serving(served) as port:
        async with request(port, "/stream") as stream:
            assert await stream.piece() == "1.0"
        await sender.send_async(Model(2), timeout=5)
        async with request(port, "/broken") as answer:
            assert (answer.status, answer.version) == (500, None), "the head had not been sent"
        assert await get(port, "/thread") == (2, "2.0")
        app.go_on.set()


async def test_it_leaves_a_connection_alone_that_was_there_and_ends_its_own() -> None:
    sender = ZMQWeightSyncScheme(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    scheme = receiver_of(sender, 0, model := Model(-1.0))
    async with connected(sender, scheme):
        async with follow(App(model, scheme), scheme):
            await sender.send_async(Model(2))
        await sender.send_async(Model(3), timeout=5)
        assert read(model) == {3}
    absent = ZMQWeightSyncScheme()
    absent.init_on_receiver("policy", model=Model(), worker_idx=0)
    with pytest.raises(NotConnected):
        async with follow(App(model, absent), absent, timeout=0.1):
            pytest.fail("there is no sender")
    assert absent.closed
    for task in (None, RuntimeError("the server has failed")):
        sender = ZMQWeightSyncScheme(num_workers=1)
        sender.init_on_sender(model_id="policy", model=Model(1.0))
        own = receiver_of(sender, 0, Model())
        async with sender:
            connecting = asyncio.create_task(sender.connect(timeout=10))
            with suppress(RuntimeError):
                async with follow(App(model, own), own, timeout=10):
                    await connecting
                    if task is not None:
                        raise task
            await until(lambda sender=sender: "has left" in sender.status()[0].reason)


async def test_of_several_models_each_has_a_header_of_its_own() -> None:
    async with AsyncExitStack() as stack:
        senders, schemes, models = [], [], []
        for name in ("policy", "value"):
            sender = ZMQWeightSyncScheme(num_workers=1)
            sender.init_on_sender(model_id=name, model=Model(1.0))
            senders.append(sender)
            schemes.append(receiver_of(sender, 0, Model(-1.0), name))
            models.append(schemes[-1].model)
        await stack.enter_async_context(connected(*senders, *schemes))
        app: Any = App(lambda: models[0]() | models[1](), schemes[0])
        for name, scheme in zip(("policy", "value"), schemes, strict=True):
            app = await stack.enter_async_context(follow(app, scheme, header=f"{name}-version"))
        port = await stack.enter_async_context(serving(app))
        for _ in range(3):
            await senders[1].send_async(Model(2.0))
        async with request(port, "/thread") as answer:
            assert (answer.headers["policy-version"], answer.headers["value-version"]) == ("1", "4")


async def test_what_is_not_http_passes_through_as_it_is() -> None:
    sender = ZMQWeightSyncScheme(num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(1.0))
    scheme = receiver_of(sender, 0, model := Model(-1.0))
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.extend(given)
        model()

    async def receive() -> Any: ...

    async def send(message: Any) -> None: ...

    async with connected(sender, scheme), follow(app, scheme) as served:
        for kind in ("websocket", "lifespan", "whatever"):
            await served(scope := {"type": kind}, receive, send)
            assert [one is other for one, other in zip(seen, (scope, receive, send), strict=True)] == [True] * 3
            seen.clear()


async def test_wrong_arguments_are_refused_before_anything_is_connected() -> None:
    async def app(*given: Any) -> None: ...

    receiver, bare, sender = ZMQWeightSyncScheme(), ZMQWeightSyncScheme(), ZMQWeightSyncScheme()
    receiver.init_on_receiver("policy", model=Model(), worker_idx=0)
    bare.init_on_receiver("policy", worker_idx=0)
    sender.init_on_sender(model_id="policy", model=Model())
    wrong: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (None, receiver, {}, TypeError, "ASGI"),
        (app, sync.ZMQWeightSyncScheme(), {}, TypeError, "aio"),
        (app, bare, {}, ValueError, "model="),
        (app, sender, {}, ValueError, "receiver"),
        (app, ZMQWeightSyncScheme(), {}, ValueError, "init_on_receiver"),
        (app, receiver, {"header": "two words"}, ValueError, "header"),
        (app, receiver, {"header": "line\r\nbreak"}, ValueError, "header"),
        (app, receiver, {"timeout": -1}, ValueError, "timeout"),
    ]
    for application, scheme, more, error, match in wrong:
        with pytest.raises(error, match=match):
            async with follow(application, scheme, **more):
                pytest.fail("it was accepted")
        assert not scheme.is_registered


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme])
async def test_requests_are_answered_while_the_trainer_is_killed_and_restarted(
    endpoint: str, kind: Any, schemes: Schemes, start: Start
) -> None:
    numel = 2 << 18
    plan = schemes.sender(numel, endpoint=endpoint, kind=kind, min_workers=0)
    here = passed_on(plan)
    here.init_on_receiver("policy", model=(model := schemes.sender(numel, -1.0).model), worker_idx=0, reconnect=True)
    app, over = App(model, here), False
    app.model = lambda: set(model())  # torn, if it is more than one number
    found: list[tuple[int | None, str]] = []

    async def ask() -> None:
        while not over:
            found.append(await get(port, "/thread"))

    async def hear_of(value: int) -> None:
        await eventually(lambda: found and found[-1][1] == f"{value}.0")

    first = start(Trainer)
    connecting = first.connect(plan, numel, 1)
    async with follow(app, here, timeout=30) as served, serving(served) as port:
        await connecting
        asking = [asyncio.create_task(ask()) for _ in range(2)]
        for value in (2, 3, 4):
            await first.send(value)
        await hear_of(4)
        publishing = first.publish(5)
        await first.kill()
        second = start(Trainer)
        await asyncio.gather(second.connect(plan, numel, 7), publishing, return_exceptions=True)
        for value in (8, 9):
            await second.send(value)
        await hear_of(9)
        over = True
        await asyncio.gather(*asking)
    values = [float(body) for _, body in found]  # each is one number: none was torn
    assert values == sorted(values)
    assert {4.0, 9.0} <= set(values)
    assert None not in {version for version, _ in found}
