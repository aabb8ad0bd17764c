"""The sender's end of a user's blocking transports: one thread per worker, which hands over what that worker is
instructed to fetch. See :mod:`asyncsync.transports.channels`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncsync.bus.carrier import Carrier, Failed
from asyncsync.errors import NotConnected
from asyncsync.runtime.threads import WorkThread, as_exception
from asyncsync.transports.channels import (
    SENDER_SETUP,
    TAG,
    TAG_BYTES,
    close_channels,
    is_channel,
    setup_of,
    tagged,
)
from asyncsync.weights.slab import Slab


@dataclass(eq=False)
class _Dispatch:
    """One slab, with a reference, on its way to one worker."""

    slab: Slab | None
    descriptor: bytes
    incarnation: bytes
    failed: Failed

    def release(self) -> None:
        """On the loop; idempotent."""
        slab, self.slab = self.slab, None
        if slab is not None:
            slab.release()


class _WorkerChannel:
    """One worker's transport and thread. At most one dispatch is under way, and one, the newest, waits."""

    def __init__(self, worker: int, channels: dict[int, Any], create: Callable[[int], Any]) -> None:
        self.worker = worker
        # The thread's own: the incarnation for which the connection is set up; b"": for the first one that comes.
        self.connected_to: bytes | None = None
        self.connecting: asyncio.Future[None] | None = None
        self.thread = WorkThread(f"asyncsync-send-{worker}")
        self._channels = channels
        self._create = create
        self._current: _Dispatch | None = None
        self._waiting: _Dispatch | None = None
        self._closed = False

    # on the loop

    def connect(self) -> asyncio.Future[None]:
        """Set up the connection with the first receiver that comes; a setup that failed is begun anew."""
        failed = self.connecting is not None and self.connecting.done() and self.connecting.exception() is not None
        if self.connecting is None or failed:
            self.connecting = self.thread.submit(self._connect)
            self.connecting.add_done_callback(_retrieved)
        return self.connecting

    def put(self, dispatch: _Dispatch) -> None:
        if self._current is None:
            self._begin(dispatch)
            return
        # The instruction names one slab at a time: what still waits is not wanted any more.
        if self._waiting is not None:
            self._waiting.release()
        self._waiting = dispatch

    def _begin(self, dispatch: _Dispatch) -> None:
        self._current = dispatch
        send = partial(self._send, dispatch, asyncio.get_running_loop())
        self.thread.submit(send).add_done_callback(self._ended)

    def _ended(self, sent: asyncio.Future[None]) -> None:
        dispatch, self._current = self._current, None
        assert dispatch is not None
        dispatch.release()
        if sent.cancelled() or self._closed:
            return
        if (raised := sent.exception()) is not None:
            error = as_exception(raised)
            error.add_note(f"(raised while weights were handed to the transport of worker {self.worker})")
            dispatch.failed(error)
        following, self._waiting = self._waiting, None
        if following is not None:
            self._begin(following)

    def close(self) -> None:
        """Drop what waits; the thread ends when the user's code returns."""
        self._closed = True
        if self._waiting is not None:
            self._waiting.release()
            self._waiting = None
        self.thread.abandon()

    # in the thread

    def _transport(self) -> Any:
        if self.worker not in self._channels:  # only now: a create_transport may open a connection
            self._channels[self.worker] = self._create(self.worker)
        return self._channels[self.worker]

    def _connect(self) -> None:
        if self.connected_to is None and (setup := setup_of(self._transport(), SENDER_SETUP)) is not None:
            setup()
            self.connected_to = b""

    def _send(self, dispatch: _Dispatch, loop: asyncio.AbstractEventLoop) -> None:
        transport = self._transport()
        if self.connected_to == b"":
            self.connected_to = dispatch.incarnation
        elif self.connected_to != dispatch.incarnation and (setup := setup_of(transport, SENDER_SETUP)) is not None:
            setup()
            self.connected_to = dispatch.incarnation
        slab = dispatch.slab
        assert slab is not None
        weights = tagged(slab.copy(), dispatch.descriptor)
        try:
            loop.call_soon_threadsafe(dispatch.release)
        except RuntimeError:
            return  # the loop is closed: nobody waits for this any more
        transport.send_weights(weights)


class ChannelSender(Carrier):
    """A sender's blocking transports: ``first`` is worker 0's, ``create`` makes those of the others; without a number
    of workers, when each is first served."""

    def __init__(self, first: Any, create: Callable[[int], Any], workers: int | None) -> None:
        self.channels: dict[int, Any] = {0: first}
        self.channels.update({worker: create(worker) for worker in range(1, workers or 0)})
        self.supports_timeout = bool(getattr(first, "supports_timeout", True))
        self._create = create
        self._fixed = workers is not None
        self._by_worker: dict[int, _WorkerChannel] = {}
        self._offered: dict[bytes, Slab] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes:
        if any(path[0] == TAG for path in slab.layout.paths if path):
            raise ValueError(f"the key {TAG!r} is reserved; rename that entry of the weights")
        descriptor = secrets.token_bytes(TAG_BYTES)
        self._offered[descriptor] = slab
        return descriptor

    def retire(self, descriptor: bytes) -> None:
        self._offered.pop(descriptor, None)

    def serve(self, descriptor: bytes, worker: int, incarnation: bytes, failed: Failed) -> None:
        slab = self._offered.get(descriptor)
        if slab is not None and not self._ended:
            self._channel(worker).put(_Dispatch(slab.retain(), descriptor, incarnation, failed))

    def _channel(self, worker: int) -> _WorkerChannel:
        channel = self._by_worker.get(worker)
        if channel is None:
            self._loop = asyncio.get_running_loop()
            channel = self._by_worker[worker] = _WorkerChannel(worker, self.channels, self._create)
        return channel

    def _start(self, worker: int | None) -> None:
        if self._fixed and setup_of(self.channels[0], SENDER_SETUP) is not None:
            for each in self.channels:
                self._channel(each).connect()

    async def _ready(self, timeout: float) -> None:
        connections = {
            worker: channel.connecting for worker, channel in self._by_worker.items() if channel.connecting is not None
        }
        if not connections:
            return
        await asyncio.wait(connections.values(), timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        for worker, connecting in connections.items():
            if connecting.done() and (raised := connecting.exception()) is not None:
                error = as_exception(raised)
                error.add_note(f"(raised by {SENDER_SETUP} for worker {worker})")
                raise error
        missing = [worker for worker, connecting in connections.items() if not connecting.done()]
        if missing:
            raise NotConnected(
                f"{SENDER_SETUP} has not returned within {timeout:g} s for workers {missing}: are they connecting? "
                "connect() may be called again"
            )

    def close(self) -> None:
        self._ended = True
        for channel in self._by_worker.values():
            channel.close()

    async def _end(self, timeout: float) -> None:
        if self._ended:
            return
        self.close()
        await close_channels(list(self.channels.values()), self._loop, timeout)


def _retrieved(future: asyncio.Future[None]) -> None:
    """A done callback that keeps asyncio from reporting an exception as never retrieved; it still can be."""
    if not future.cancelled():
        future.exception()


def make_sender(create: Callable[[int], Any], workers: int | None) -> Carrier:
    """A sender's carrier: one transport for all workers, or one blocking transport per worker, made by its worker_idx.
    Raises TypeError: ``create`` returns something that is no transport."""
    first = create(0)
    if not is_channel(first):
        carrier: Carrier = first
        return carrier

    def create_channel(worker: int) -> Any:
        made = create(worker)
        if not is_channel(made):
            raise TypeError(
                f"create_transport returned a {type(made).__name__} for worker {worker}, but a "
                f"{type(first).__name__} for worker 0: return one kind for all"
            )
        return made

    return ChannelSender(first, create_channel, workers)
