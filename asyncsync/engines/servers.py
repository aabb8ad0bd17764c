"""For servers of your own. ``follow``: an ASGI application whose model follows a trainer. ``Staleness``: admit work
only where this receiver is not too far behind its sender.

The receiver's gate sees each call of the model by its hooks, in any thread. The rest of a request does not read the
model. So a slow response or a slow client delays no update, and an update delays only calls of the model, for as long
as it takes to apply.

A response names the version of the model's last call, ``hold()`` or gated method in the request's context.
asyncio.to_thread and the thread pools of Starlette and FastAPI pass the context on. To an executor of your own, submit
``contextvars.copy_context().run``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from asyncsync.arguments import check_count, check_timeout
from asyncsync.errors import Stale
from asyncsync.model.gate import Gate, on_enter
from asyncsync.schemes.aio import WeightSyncScheme

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

HEADER = "x-weight-version"
ANY_LAG = 1 << 62


@asynccontextmanager
async def follow(
    app: Application, scheme: WeightSyncScheme, *, timeout: float = 60.0, header: str = HEADER
) -> AsyncIterator[Application]:
    """Serve an ASGI application whose model follows a trainer. Usage::

        scheme.init_on_receiver("policy", model=model, worker_idx=0, reconnect=True)
        async with follow(app, scheme) as served:
            await uvicorn.Server(uvicorn.Config(served, port=8000)).serve()

    The application may call the model in a thread (``await asyncio.to_thread(model, inputs)``) or anywhere else. Each
    call sees one version. Several calls see the same version inside ``scheme.hold()``.

    In each HTTP response, a header names the version of the last model call that was made for this request before the
    first byte of the body. So the head of a response waits for that byte. Version 0 is the model before its first
    update. If the model was not called, there is no such header. Lifespan and websockets pass through.

    Args:
        app: Starlette, FastAPI, or any ASGI 3 application.
        scheme: a receiver with the asyncio API and a model. If it is not connected yet, ``follow`` connects it, and
            shuts it down at the end.
        timeout: seconds to connect.
        header: the header's name.

    Yields:
        The application to serve instead of ``app``.

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


@dataclass(eq=False)
class _Followed:
    """The application, with the version in its responses."""

    app: Application
    scheme: WeightSyncScheme
    header: bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        version: int | None = None
        start: Message | None = None
        outer = on_enter.get()  # that of another `follow` around this one, for another model

        def note_version(gate: Gate) -> None:  # in the thread that reads the model
            nonlocal version
            if gate is self.scheme.bus.gate:
                version = self.scheme.version
            if outer is not None:
                outer(gate)

        async def send_start() -> None:
            nonlocal start
            if start is not None:
                message, start = start, None
                if version is not None:
                    message = {**message, "headers": [*message.get("headers", ()), (self.header, b"%d" % version)]}
                await send(message)

        async def send_after_start(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            else:
                await send_start()
                await send(message)

        token = on_enter.set(note_version)
        try:
            await self.app(scope, receive, send_after_start)
        finally:
            on_enter.reset(token)
        await send_start()


class Staleness:
    """An async context that is entered only if this receiver is at most ``max_lag`` versions behind its sender. Usage::

        fresh = Staleness(scheme, max_lag=2)             # one for the whole server
        async with fresh as version:                     # in each request, or before each episode
            outputs = await asyncio.to_thread(model, inputs)

    It asks the sender whenever a block is entered, which costs a round trip. This guarantees that the version that this
    receiver has applied when the block begins is at most ``max_lag`` behind the version that the sender had when the
    block was entered. Inside the block, updates are applied as always; to keep one version, use ``scheme.hold()``, too.

    Args:
        scheme: a connected receiver with the asyncio API.
        max_lag: in versions; 0: only the newest will do.
        on_late: if it is further behind: ``"wait"`` for the update, or ``"raise"`` :class:`Stale` at once.
        timeout: seconds to wait for the sender's answer, and for the update.
        max_age: in seconds. One question serves for all blocks that are entered within this time after it. So a busy
            server asks less often, and the guarantee holds for the version that the sender had up to ``max_age`` ago.

    Raises:
        AckTimeout: within the timeout, the sender did not answer, or the update was not applied.
        Stale: with ``on_late="raise"``, it is further behind, or the sender is lost.
        SchemaMismatch, RemoteError, NotConnected, ClosedError, Fenced: as ``scheme.wait_lag``.
        TypeError, ValueError: invalid arguments (of the constructor).
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        max_lag: int = 2,
        on_late: Literal["wait", "raise"] = "wait",
        timeout: float = 60.0,
        max_age: float = 0.0,
    ) -> None:
        if not isinstance(scheme, WeightSyncScheme):
            raise TypeError(f"Staleness needs an asyncio scheme (scheme.aio), not {scheme!r}")
        check_count("max_lag", max_lag, least=0)
        check_timeout(timeout)
        if on_late not in ("wait", "raise"):
            raise ValueError(f"on_late must be 'wait' or 'raise', not {on_late!r}")
        if not max_age >= 0:
            raise ValueError(f"max_age must be seconds from 0, not {max_age!r}")
        self._scheme = scheme
        self._max_lag = max_lag
        self._waits = on_late == "wait"
        self._timeout = timeout
        self._max_age = max_age
        self._last_asked = -math.inf  # when the last question was sent that led to a block

    async def __aenter__(self) -> int:
        now = asyncio.get_running_loop().time()
        if now - self._last_asked < self._max_age:
            return self._scheme.version
        if self._waits:
            version = await self._scheme.wait_lag(self._max_lag, self._timeout)
        else:
            for status in self._scheme.status().values():
                if status.state == "lost" and not self._scheme.closed:  # only the sender's successor would answer
                    raise Stale(f"version {status.version} may be too old: {status.reason}", status.version, None)
            version = await self._scheme.wait_lag(ANY_LAG, self._timeout)
            for status in self._scheme.status().values():
                if status.lag > self._max_lag:
                    about = f"{status.lag} versions behind the sender's, and max_lag is {self._max_lag}"
                    raise Stale(f"version {status.version} is {about}", status.version, status.lag)
        self._last_asked = max(now, self._last_asked)
        return version

    async def __aexit__(self, *exc: object) -> None:
        pass
