"""follow: an ASGI application whose model follows a trainer.

What is gated is each call of the model, and nothing else: the hooks of a receiver's gate see it, in whatever thread it
runs. A request as such reads nothing. So a response that is slow to write, or a client that is slow to read, keeps no
update waiting, and an update keeps only model calls waiting, as long as it takes to apply.

The version is that of the model's last call, ``hold()`` or gated method in the request's context. asyncio.to_thread and
the thread pools of Starlette and FastAPI pass the context on; with an executor of one's own, pass
``contextvars.copy_context().run``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from asyncsync.model.gate import Gate, on_enter
from asyncsync.schemes.aio import WeightSyncScheme

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

HEADER = "x-weight-version"


@asynccontextmanager
async def follow(
    app: Application, scheme: WeightSyncScheme, *, timeout: float = 60.0, header: str = HEADER
) -> AsyncIterator[Application]:
    """Serve an ASGI application whose model follows a trainer. Usage::

        scheme.init_on_receiver("policy", model=model, worker_idx=0, reconnect=True)
        async with follow(app, scheme) as served:
            await uvicorn.Server(uvicorn.Config(served, port=8000)).serve()

    The application calls the model in a thread (``await asyncio.to_thread(model, inputs)``), or where it likes. Each
    call sees one version, and several calls see one inside ``scheme.hold()``.

    In each HTTP response, a header names the version of the last model call that was made for this request before the
    first byte of the body: so the head of a response waits for that byte. Version 0 is what the model had before the
    first update. A response for which no model was called has no such header. Lifespan and websockets pass through.

    Args:
        app: Starlette, FastAPI, or any ASGI 3 application.
        scheme: a receiver with the asyncio API and a model. It is connected here unless it is connected already, and
            shut down at the end if it was connected here.
        timeout: seconds to connect.
        header: its name.

    Yields:
        The application to be served instead of ``app``.

    Raises:
        TypeError, ValueError: invalid arguments.
        NotConnected, SchemaMismatch, ClosedError, Fenced: as ``scheme.connect``.
    """
    if not callable(app):
        raise TypeError(f"app must be an ASGI application, not {app!r}")
    if not isinstance(scheme, WeightSyncScheme):
        raise TypeError(f"follow needs an asyncio scheme (scheme.aio), not {scheme!r}")
    if scheme.role != "receiver" or scheme.model is None:
        raise ValueError("follow needs a receiver with a model: call scheme.init_on_receiver(model_id, model=…) first")
    if not header.isascii() or not header.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"header must be the name of an HTTP header, not {header!r}")
    followed = _Followed(app, scheme, header.lower().encode())
    if scheme.is_registered:
        yield followed
        return
    try:
        await scheme.connect(timeout=timeout)
        yield followed
    finally:
        await scheme.shutdown()


class _Followed:
    """The application, and what tells the version in its responses."""

    def __init__(self, app: Application, scheme: WeightSyncScheme, header: bytes) -> None:
        self._app = app
        self._scheme = scheme
        self._header = header

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        version: int | None = None
        start: Message | None = None
        outer = on_enter.get()  # of another follow around this one, for another model

        def note(gate: Gate) -> None:  # in whichever thread reads the model
            nonlocal version
            if gate is self._scheme.bus.gate:
                version = self._scheme.version
            if outer is not None:
                outer(gate)

        async def send_start() -> None:
            nonlocal start
            if start is not None:
                message, start = start, None
                if version is not None:
                    message = {**message, "headers": [*message.get("headers", ()), (self._header, b"%d" % version)]}
                await send(message)

        async def tell(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            else:
                await send_start()
                await send(message)

        token = on_enter.set(note)
        try:
            await self._app(scope, receive, tell)
        finally:
            on_enter.reset(token)
        await send_start()
