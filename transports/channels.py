"""Blocking transports of a user's own, behind the narrow interface of the bus.

A user's :class:`asyncsync.sync.TransportBackend` has ``send_weights(weights)`` and ``receive_weights(timeout, …)``: a
channel to one worker that is first in, first out, knows no versions, and may block until the other side takes part. So:

- The sender has one transport per worker (``create_transport(worker_idx=i)``), each with a daemon thread of its own,
  and hands weights to it only when the instruction to fetch them goes out to that worker: versions that a slow worker
  skips never enter the channel, and a late one gets its own target.
- What is handed over is a copy: a queue may pickle it later, or move it to shared memory, when the slab holds another
  version already.
- With it goes an entry :data:`TAG`, unique to that publication. The receiver takes messages from the channel until the
  one that the instruction names has come: never an older one, a duplicate, or a mixture.

Threads that a user's code blocks are abandoned at the end, never waited for.
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
from asyncsync.transports.base import BlockingTransportBackend, check_fit
from asyncsync.weights.copying import copy_tensors, normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import dotted, flatten, nest

logger = logging.getLogger("asyncsync")

TAG = "_asyncsync_id"
"""Key of the entry that identifies a publication: 16 bytes (uint8)."""

TAG_BYTES = 16
CLOSE_SECONDS = 1.0

SENDER_SETUP = "setup_connection_and_weights_on_sender"
RECEIVER_SETUP = "setup_connection_and_weights_on_receiver"
MARGIN = 0.5  # ends earlier than the bus's own deadline, whose message has less in it


def is_channel(transport: Any) -> bool:
    """True for a blocking transport of a user's own, False for one that the bus can use as it is. Raises TypeError:
    neither."""
    kind = type(transport)
    is_backend = isinstance(transport, BlockingTransportBackend) and kind.fetch is Carrier.fetch
    if isinstance(transport, Carrier) and not is_backend:
        return False
    own = [name for name in ("send_weights", "receive_weights") if own_method(transport, name) is not None]
    if not own and is_backend:
        return False
    if not own:
        raise TypeError(f"create_transport must return a BlockingTransportBackend, not {kind.__name__}")
    if len(own) < 2:
        missing = "receive_weights" if own == ["send_weights"] else "send_weights"
        raise TypeError(f"{kind.__name__} has {own[0]}, but no {missing} of its own; a blocking transport needs both")
    for name in (*own, SENDER_SETUP, RECEIVER_SETUP):
        if inspect.iscoroutinefunction(getattr(kind, name, None)):
            raise TypeError(
                f"{kind.__name__}.{name} is a coroutine function, but a blocking transport has ordinary methods; "
                "for an event loop, subclass asyncsync.TransportBackend and define offer and fetch"
            )
    return True


def own_method(transport: Any, name: str) -> Callable[..., Any] | None:
    """The user's own method of this name, if there is one."""
    method, inherited = getattr(transport, name, None), getattr(BlockingTransportBackend, name)
    if isinstance(transport, BlockingTransportBackend) and getattr(type(transport), name) is inherited:
        return None
    return method if callable(method) else None


def tagged(slab: Slab, descriptor: bytes) -> TensorDict:
    """Views into a slab, and the tag. Extra state, which is no tensor, travels in the instruction."""
    weights = nest(slab.tensors())
    weights.set(TAG, torch.frombuffer(bytearray(descriptor), dtype=torch.uint8))
    return weights


async def close_channels(transports: Iterable[Any], timeout: float) -> None:
    """Call every transport's ``close``, each in a thread of its own, and wait a moment for all of these."""

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


# -- the sender's end --------------------------------------------------------------------------------------------------


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

    def __init__(self, worker: int, create: Callable[[int], Any], transport: Any = None) -> None:
        self.worker = worker
        self.transport = transport  # None: the thread makes it
        # The thread's own: the incarnation for which the connection is set up; b"": for the first one that comes.
        self.connected_to: bytes | None = None
        self.connecting: asyncio.Future[None] | None = None
        self.thread = WorkThread(f"asyncsync-send-{worker}")
        self._create = create
        self._current: _Dispatch | None = None
        self._waiting: _Dispatch | None = None
        self._closed = False

    # on the loop

    def connect(self) -> None:
        """Set up the connection with the first receiver that comes; a setup that failed is begun anew."""
        before = self.connecting
        if before is None or (before.done() and before.exception() is not None):
            self.connecting = self.thread.submit(self._connect)
            # asyncio is not to report an exception that nobody retrieves.
            self.connecting.add_done_callback(lambda future: future.cancelled() or future.exception())

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

    def _connect(self) -> None:
        if self.connected_to is None and (setup := own_method(self.transport, SENDER_SETUP)) is not None:
            setup()
            self.connected_to = b""

    def _send(self, dispatch: _Dispatch, loop: asyncio.AbstractEventLoop) -> None:
        if self.transport is None:  # only now: a create_transport may open a connection
            self.transport = self._create(self.worker)
        transport = self.transport
        if self.connected_to == b"":
            self.connected_to = dispatch.incarnation
        elif self.connected_to != dispatch.incarnation and (setup := own_method(transport, SENDER_SETUP)) is not None:
            setup()
            self.connected_to = dispatch.incarnation
        slab = dispatch.slab
        assert slab is not None
        weights = tagged(slab.copy(), dispatch.descriptor)
        if call_soon(loop, dispatch.release):  # else the loop is closed: nobody waits for this any more
            transport.send_weights(weights)


class ChannelSender(Carrier):
    """A sender's blocking transports: ``first`` is worker 0's, ``create`` makes those of the others; without a number
    of workers, when each is first served."""

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
        """The transports that there are."""
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
                "connect() may be called again"
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


# -- the receiver's end ------------------------------------------------------------------------------------------------


Message = dict[str, torch.Tensor]
"""What came through the channel: tensors by their dotted names, the tag among them."""


class ChannelReceiver(Carrier):
    """A receiver's blocking transport: ``channel`` is the user's, and is called in a thread of this object's."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.supports_timeout = bool(getattr(channel, "supports_timeout", True))
        self._worker: int | None = None
        self._thread = WorkThread("asyncsync-receive")
        self._setup: asyncio.Future[Exception | None] | None = None
        # A call of the user's method, until its message is ahead:
        self._receiving: asyncio.Future[Message | None] | None = None
        self._ahead: Message | None = None  # the last message, until it is fetched
        self._replaced: asyncio.Future[None] | None = None  # done when the fetch that waits is not the newest any more
        self._closed = False
        # The thread's own; between two of its calls, the loop may drop the buffer:
        self._buffer: tuple[bytes, TensorDict] | None = None  # with its layout's digest
        self._setup_error: Exception | None = None

    # -- on the loop --------------------------------------------------------------------------------------------------

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
                "sender connecting? connect() may be called again"
            )
        if (error := self._setup.result()) is not None:
            raise error

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        # Receive until the weights with this tag have come, and copy them into the slab. Raises TimeoutError: not by
        # the deadline; SchemaMismatch: not what the sender announced; Exception: whatever the user's code raises.
        loop = asyncio.get_running_loop()
        patience = deadline - loop.time()
        patience -= min(MARGIN, patience / 10)
        until = loop.time() + patience
        if self._replaced is not None:
            self._replaced.set_result(None)
        self._replaced = replaced = loop.create_future()
        while (message := self._ahead) is None or _tag(message) != descriptor:
            if (remaining := until - loop.time()) <= 0 or self._closed:
                raise TimeoutError(self._nothing(patience))
            receiving, is_own = self._receiving, False
            if receiving is None:
                receiving, is_own = self._receive_next(slab.layout, remaining), True
            await asyncio.wait({receiving, replaced}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if replaced.done():
                raise TimeoutError("a newer update has replaced this one")
            if not receiving.done():
                continue
            # Not result(), which would take the traceback from an exception that has been raised already.
            if (error := receiving.exception()) is not None:
                raise as_exception(error)
            if receiving.result() is None and is_own:
                raise TimeoutError(f"receive_weights returned None; {self._nothing(remaining)}")
        if self._closed:
            raise TimeoutError(self._nothing(patience))
        self._ahead = None
        fill = partial(self._fill, slab, message)
        # Cancelled, this raises when the slab is not written any more.
        if slab.nbytes <= INLINE_BYTES:
            fill()
        elif self._receiving is None:
            await finish(self._thread.submit(fill))
        else:  # the message came before its instruction, and the thread is waiting for another one
            await run_in_thread("asyncsync-copy", fill)

    def _receive_next(self, layout: Layout, seconds: float) -> asyncio.Future[Message | None]:
        if self._ahead is not None:
            self._buffer = None  # it may be that message's memory
        self._receiving = receiving = self._thread.submit(partial(self._receive, layout, seconds))
        receiving.add_done_callback(self._received)
        return receiving

    def _received(self, receiving: asyncio.Future[Message | None]) -> None:
        self._receiving = None
        if not receiving.cancelled() and receiving.exception() is None and (message := receiving.result()) is not None:
            # If it is not what is fetched now, it is older; or it is newer, and its instruction is on the way.
            self._ahead = message

    def _nothing(self, seconds: float) -> str:
        return (
            f"{type(self.channel).__name__}.receive_weights did not return the announced weights of worker "
            f"{self._worker} within {seconds:.3g} s: does everything given to send_weights reach this worker, complete "
            "and in order?"
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

    def _set_up(self) -> Exception | None:
        try:
            method = own_method(self.channel, RECEIVER_SETUP)
            if method is not None:
                method(worker_idx=self._worker, weights=None, model=None, strategy=None)
        except BaseException as error:
            self._setup_error = as_exception(error)
        return self._setup_error

    def _receive(self, layout: Layout, seconds: float) -> Message | None:
        if self._setup_error is not None:
            raise self._setup_error
        if self._buffer is None or self._buffer[0] != layout.digest:
            self._buffer = layout.digest, _empty(layout)
        received = self.channel.receive_weights(
            timeout=seconds if self.supports_timeout else None, weights=self._buffer[1], model=None, strategy=None
        )
        return None if received is None else self._checked(received)

    def _checked(self, received: Any) -> Message:
        message = {dotted(path): tensor for path, tensor in flatten(received).tensors.items()}
        tag = message.get(TAG)
        if tag is None or tag.dtype != torch.uint8 or tag.numel() != TAG_BYTES:
            raise SchemaMismatch(
                f"{type(self.channel).__name__}.receive_weights returned no entry {TAG!r}: it must return every entry "
                "that send_weights was given, or fill it into weights="
            )
        return message

    def _fill(self, slab: Slab, message: Message) -> None:
        tensors = {name: tensor for name, tensor in message.items() if name != TAG}
        sent = {dotted(path): tensor for path, tensor in slab.tensors().items()}
        check_fit(tensors, sent, f"what {type(self.channel).__name__}.receive_weights returned")
        copy_tensors(slab.views, [tensors[dotted(e.path)] for e in slab.layout.entries])


def _tag(message: Message) -> bytes:
    return bytes(message[TAG].tolist())


def _empty(layout: Layout) -> TensorDict:
    """A TensorDict of a layout's entries and the tag, for the user's code to receive into."""
    with normal_tensors():
        entries = [torch.empty(e.shape, dtype=e.dtype, device="cpu") for e in layout.entries]
        tag = torch.zeros(TAG_BYTES, dtype=torch.uint8, device="cpu")
    tensors = {e.path: t for e, t in zip(layout.entries, entries, strict=True)}
    tensors.update({path: entries[i] for path, i in layout.aliases.items()})
    return nest({**tensors, (TAG,): tag})


def make_receiver(transport: Any) -> Carrier:
    """A receiver's carrier: the transport itself, or what makes one of a blocking transport of a user's own."""
    carrier: Carrier = ChannelReceiver(transport) if is_channel(transport) else transport
    return carrier
