"""Adapts users' own blocking transports to the interface that the bus needs.

A user's :class:`asyncsync.sync.TransportBackend` has ``send_weights(weights)`` and ``receive_weights(timeout, …)``. It
is a first-in, first-out channel to one worker. It knows no versions, and may block until the other side takes part. So:

- The sender has one transport per worker (``create_transport(worker_idx=i)``), each with a daemon thread of its own. It
  hands weights to a transport only after the bus has sent that worker an UPDATE that names them. So versions that a
  slow worker skips never enter the channel, and a worker that joins late gets its own target.
- The transport gets a copy, because a queue may pickle the weights, or move them to shared memory, later, when the slab
  already holds another version.
- The copy has an additional entry :data:`TAG`, unique to its publication. The receiver takes messages from the channel
  until the one arrives that the UPDATE names. So it never applies an older message, a duplicate, or a mixture.

If user code blocks one of these threads, the thread is abandoned at the end; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from asyncsync.bus.carrier import Carrier, Failed
from asyncsync.bus.link import INLINE_BYTES
from asyncsync.errors import NotConnected, SchemaMismatch
from asyncsync.runtime.threads import WorkThread, as_exception, call_soon, finish, run_in_thread
from asyncsync.transports.base import DEADLINE_MARGIN, BlockingTransportBackend, check_fit
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.weights.tensors import copy_tensors, normal_tensors
from asyncsync.weights.tree import dotted, flatten, nest

logger = logging.getLogger("asyncsync")

TAG = "_asyncsync_id"
"""Key of the entry that identifies a publication by 16 bytes (uint8)."""

TAG_BYTES = 16
CLOSE_SECONDS = 1.0

SENDER_SETUP = "setup_connection_and_weights_on_sender"
RECEIVER_SETUP = "setup_connection_and_weights_on_receiver"


def is_channel(transport: Any) -> bool:
    """Whether this is a user's own blocking transport. False: the bus can use the transport directly. Raises TypeError
    if it is neither."""
    kind = type(transport)
    is_backend = isinstance(transport, BlockingTransportBackend) and kind.fetch is Carrier.fetch
    if isinstance(transport, Carrier) and not is_backend:
        return False
    own = [name for name in ("send_weights", "receive_weights") if own_method(transport, name) is not None]
    if not own and is_backend:
        return False
    if not own:
        raise TypeError(f"create_transport must return a TransportBackend, not {kind.__name__}")
    if len(own) < 2:
        missing = "receive_weights" if own == ["send_weights"] else "send_weights"
        raise TypeError(f"{kind.__name__} defines {own[0]} but not {missing}; a blocking transport needs both")
    for name in (*own, SENDER_SETUP, RECEIVER_SETUP):
        if inspect.iscoroutinefunction(getattr(kind, name, None)):
            raise TypeError(
                f"{kind.__name__}.{name} is a coroutine function, but a blocking transport has ordinary methods; "
                "for an event loop, subclass asyncsync.TransportBackend and define offer and fetch"
            )
    return True


def own_method(transport: Any, name: str) -> Callable[..., Any] | None:
    """The transport's method of this name, unless it inherits the library's."""
    method, inherited = getattr(transport, name, None), getattr(BlockingTransportBackend, name)
    if isinstance(transport, BlockingTransportBackend) and getattr(type(transport), name) is inherited:
        return None
    return method if callable(method) else None


async def close_channels(transports: Iterable[Any], timeout: float) -> None:
    """Call ``close`` of every transport that has it, each in a thread of its own. Wait for at most ``timeout`` seconds,
    and at most one second."""

    def close_one(close: Callable[[], None]) -> None:
        try:
            close()
        except Exception:
            logger.exception("could not close a transport")

    def close_all() -> None:
        deadline = time.monotonic() + min(timeout, CLOSE_SECONDS)
        threads = [threading.Thread(target=close_one, args=(c,), name="asyncsync-close", daemon=True) for c in closes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    if closes := [close for t in transports if callable(close := getattr(t, "close", None))]:
        await run_in_thread("asyncsync-close", close_all)


# -- the sender --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Dispatch:
    """A slab on its way to one worker, with a reference to it until it was copied."""

    slab: Slab | None
    descriptor: bytes
    incarnation: bytes
    failed: Failed

    def release(self) -> None:
        """Call it on the event loop. Idempotent."""
        slab, self.slab = self.slab, None
        if slab is not None:
            slab.release()


class _WorkerChannel:
    """One worker's transport and thread. At most one dispatch is being sent, and only the newest other one waits."""

    def __init__(self, worker: int, create: Callable[[int], Any], transport: Any = None) -> None:
        self.worker = worker
        self.transport = transport  # None: the thread will create it
        # The incarnation for which the connection is set up; b"": for the first one. Only the thread uses this.
        self.connected_to: bytes | None = None
        self.connecting: asyncio.Future[None] | None = None
        self.thread = WorkThread(f"asyncsync-send-{worker}")
        self._create = create
        self._current: _Dispatch | None = None
        self._waiting: _Dispatch | None = None
        self._closed = False

    # on the event loop

    def connect(self) -> None:
        """Set up the connection with the first receiver that comes, unless that is under way or done."""
        before = self.connecting
        if before is None or (before.done() and before.exception() is not None):
            self.connecting = self.thread.submit(self._connect)
            # Retrieve the exception, so that asyncio does not report it if channel_ready is never called.
            self.connecting.add_done_callback(lambda future: future.cancelled() or future.exception())

    def put(self, dispatch: _Dispatch) -> None:
        """Send this dispatch next, in place of one that waits: an UPDATE has superseded that one's UPDATE."""
        if self._current is None:
            self._begin(dispatch)
            return
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
        """Drop the waiting dispatch. The thread ends when the user's code returns."""
        self._closed = True
        if self._waiting is not None:
            self._waiting.release()
            self._waiting = None
        self.thread.abandon()

    # in the thread

    def _connect(self) -> None:
        if self.connected_to is None and (setup := own_method(self.transport, SENDER_SETUP)) is not None:
            setup()
            self.connected_to = b""

    def _send(self, dispatch: _Dispatch, loop: asyncio.AbstractEventLoop) -> None:
        if self.transport is None:  # created here, because create_transport may block on a connection
            self.transport = self._create(self.worker)
        transport = self.transport
        if self.connected_to == b"":
            self.connected_to = dispatch.incarnation
        elif self.connected_to != dispatch.incarnation and (setup := own_method(transport, SENDER_SETUP)) is not None:
            setup()
            self.connected_to = dispatch.incarnation
        slab = dispatch.slab
        assert slab is not None
        tag = torch.frombuffer(bytearray(dispatch.descriptor), dtype=torch.uint8)
        weights = nest({**slab.copy().tensors(), (TAG,): tag})  # extra state that is no tensor travels in the UPDATE
        if call_soon(loop, dispatch.release):  # False: the loop is closed, so nothing needs to be sent any more
            transport.send_weights(weights)


class ChannelSender(Carrier):
    """A sender's blocking transports. ``first`` is worker 0's; ``create`` makes those of the other workers. If
    ``workers`` is None, a worker's transport is made when that worker is first served."""

    def __init__(self, first: Any, create: Callable[[int], Any], workers: int | None) -> None:
        made = [first, *(create(worker) for worker in range(1, workers or 0))]
        self.supports_timeout = bool(getattr(first, "supports_timeout", True))
        self._create = create
        self._fixed = workers is not None
        self._by_worker = {worker: _WorkerChannel(worker, create, each) for worker, each in enumerate(made)}
        self._offered: dict[bytes, Slab] = {}
        self._ended = False

    @property
    def channels(self) -> dict[int, Any]:
        """The transports made so far, by worker."""
        return {w: c.transport for w, c in list(self._by_worker.items()) if c.transport is not None}

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
            if worker not in self._by_worker:
                self._by_worker[worker] = _WorkerChannel(worker, self._create)
            self._by_worker[worker].put(_Dispatch(slab.retain(), descriptor, incarnation, failed))

    def start_channel(self, worker: int | None) -> None:
        if self._fixed and own_method(self._by_worker[0].transport, SENDER_SETUP) is not None:
            for channel in self._by_worker.values():
                channel.connect()

    async def channel_ready(self, timeout: float) -> None:
        connections = {w: c.connecting for w, c in self._by_worker.items() if c.connecting is not None}
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
                "You may call connect() again"
            )

    def close(self) -> None:
        self._ended = True
        for channel in self._by_worker.values():
            channel.close()

    async def close_within(self, timeout: float) -> None:
        if self._ended:
            return
        self.close()
        await close_channels(self.channels.values(), timeout)


def make_sender(create: Callable[[int], Any], workers: int | None) -> Carrier:
    """A sender's carrier: the one transport for all workers, or, for blocking transports, an adapter with a transport
    for each worker. Raises TypeError if ``create(worker_idx)`` returns no transport."""
    first = create(0)
    if not is_channel(first):
        carrier: Carrier = first
        return carrier

    def create_channel(worker: int) -> Any:
        made = create(worker)
        if not is_channel(made):
            raise TypeError(
                f"create_transport returned a {type(made).__name__} for worker {worker}, but a "
                f"{type(first).__name__} for worker 0: return the same kind for all workers"
            )
        return made

    return ChannelSender(first, create_channel, workers)


# -- the receiver ------------------------------------------------------------------------------------------------------


Message = dict[str, torch.Tensor]
"""What came through the channel: tensors by dotted name, including the tag."""


class ChannelReceiver(Carrier):
    """A receiver's blocking transport. It calls the user's transport, ``channel``, in a thread of its own."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.supports_timeout = bool(getattr(channel, "supports_timeout", True))
        self._worker: int | None = None
        self._thread = WorkThread("asyncsync-receive")
        self._setup: asyncio.Future[None] | None = None
        self._receiving: asyncio.Future[Message | None] | None = None  # the call of receive_weights under way
        self._unfetched: Message | None = None  # the last message, until it is fetched
        self._replaced: asyncio.Future[None] | None = None  # done when a newer fetch has replaced the one that waits
        self._closed = False
        # The thread uses these. Between two of its calls, the event loop may drop the buffer.
        self._buffer: tuple[bytes, TensorDict] | None = None  # with the digest of its layout
        self._setup_error: Exception | None = None

    # -- on the event loop --------------------------------------------------------------------------------------------

    def start_channel(self, worker: int | None) -> None:
        if self._setup is None:
            self._worker = worker
            self._setup = self._thread.submit(self._set_up)

    async def channel_ready(self, timeout: float) -> None:
        assert self._setup is not None
        await asyncio.wait([self._setup], timeout=timeout)
        if not self._setup.done():
            raise NotConnected(
                f"{type(self.channel).__name__}.{RECEIVER_SETUP} has not returned within {timeout:g} s: is the "
                "sender connecting? You may call connect() again"
            )
        if self._setup_error is not None:
            raise self._setup_error

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        # Receive until the weights with this tag have arrived, and copy them into the slab. Raises TimeoutError if they
        # do not arrive by the deadline, SchemaMismatch if they are not what the sender announced, and what the user's
        # code raises.
        loop = asyncio.get_running_loop()
        patience = deadline - loop.time()
        patience -= min(DEADLINE_MARGIN, patience / 10)
        until = loop.time() + patience
        if self._replaced is not None:
            self._replaced.set_result(None)
        self._replaced = replaced = loop.create_future()
        while (message := self._unfetched) is None or bytes(message[TAG].tolist()) != descriptor:
            if (remaining := until - loop.time()) <= 0 or self._closed:
                raise TimeoutError(self._nothing_received(patience))
            receiving, is_own = self._receiving, False
            if receiving is None:
                if self._unfetched is not None:
                    self._buffer = None  # the message may lie in this buffer
                receiving, is_own = self._thread.submit(partial(self._receive, slab.layout, remaining)), True
                self._receiving = receiving
                receiving.add_done_callback(self._received)
            await asyncio.wait({receiving, replaced}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if replaced.done():
                raise TimeoutError("a newer update has replaced this one")
            if not receiving.done():
                continue
            # Do not call result(): it would replace the traceback of an exception that was raised already.
            if (error := receiving.exception()) is not None:
                raise as_exception(error)
            if receiving.result() is None and is_own:
                raise TimeoutError(f"receive_weights returned None; {self._nothing_received(remaining)}")
        if self._closed:
            raise TimeoutError(self._nothing_received(patience))
        self._unfetched = None
        fill = partial(self._fill, slab, message)
        # If this is cancelled, it raises only after the slab was written.
        if slab.nbytes <= INLINE_BYTES:
            fill()
        elif self._receiving is None:
            await finish(self._thread.submit(fill))
        else:  # the message came before its UPDATE, and the thread waits for another message
            await run_in_thread("asyncsync-copy", fill)

    def _received(self, receiving: asyncio.Future[Message | None]) -> None:
        self._receiving = None
        if not receiving.cancelled() and receiving.exception() is None and (message := receiving.result()) is not None:
            # A message that is not fetched now is older, or it is newer and its UPDATE is still on the way.
            self._unfetched = message

    def _nothing_received(self, seconds: float) -> str:
        return (
            f"{type(self.channel).__name__}.receive_weights did not return the announced weights of worker "
            f"{self._worker} within {seconds:.3g} s: does this worker receive everything that send_weights is given, "
            "complete and in order?"
        )

    def close(self) -> None:
        self._closed = True
        self._thread.abandon()

    async def close_within(self, timeout: float) -> None:
        if self._closed:
            return
        self.close()
        await close_channels([self.channel], timeout)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        try:
            if (method := own_method(self.channel, RECEIVER_SETUP)) is not None:
                method(worker_idx=self._worker, weights=None, model=None, strategy=None)
        except BaseException as error:
            self._setup_error = as_exception(error)

    def _receive(self, layout: Layout, seconds: float) -> Message | None:
        if self._setup_error is not None:
            raise self._setup_error
        if self._buffer is None or self._buffer[0] != layout.digest:
            with normal_tensors():
                entries = [torch.empty(e.shape, dtype=e.dtype, device="cpu") for e in layout.entries]
                tag = torch.zeros(TAG_BYTES, dtype=torch.uint8, device="cpu")
            tensors = {path: entries[i] for path, i in layout.index.items()}
            self._buffer = layout.digest, nest({**tensors, (TAG,): tag})
        received = self.channel.receive_weights(
            timeout=seconds if self.supports_timeout else None, weights=self._buffer[1], model=None, strategy=None
        )
        if received is None:
            return None
        message = {dotted(path): tensor for path, tensor in flatten(received).tensors.items()}
        found = message.get(TAG)
        if found is None or found.dtype != torch.uint8 or found.numel() != TAG_BYTES:
            raise SchemaMismatch(
                f"{type(self.channel).__name__}.receive_weights returned no entry {TAG!r}: it must return every entry "
                "that send_weights was given, or copy it into weights="
            )
        return message

    def _fill(self, slab: Slab, message: Message) -> None:
        tensors = {name: tensor for name, tensor in message.items() if name != TAG}
        sent = {dotted(path): tensor for path, tensor in slab.tensors().items()}
        check_fit(tensors, sent, f"what {type(self.channel).__name__}.receive_weights returned")
        copy_tensors(slab.views, [tensors[dotted(e.path)] for e in slab.layout.entries])


def make_receiver(transport: Any) -> Carrier:
    """A receiver's carrier: the transport itself, or an adapter for a user's own blocking transport."""
    carrier: Carrier = ChannelReceiver(transport) if is_channel(transport) else transport
    return carrier
