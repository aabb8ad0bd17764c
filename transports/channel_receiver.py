"""The receiver's end of a user's blocking transport: one thread that takes messages from the channel until the wanted
one has come. See :mod:`asyncsync.transports.channels`."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from asyncsync.bus.carrier import Carrier
from asyncsync.errors import NotConnected, SchemaMismatch
from asyncsync.runtime.threads import WorkThread, as_exception, settle
from asyncsync.transports.base import check_fit
from asyncsync.transports.channels import (
    RECEIVER_SETUP,
    TAG,
    TAG_BYTES,
    close_channels,
    is_channel,
    setup_of,
)
from asyncsync.weights.copying import copy_tensors, normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import dotted, flatten, nest

Message = dict[str, torch.Tensor]
"""What came through the channel: tensors by their dotted names, the tag among them."""

# Ends earlier than the bus's own deadline, whose message has less in it.
MARGIN = 0.5


@dataclass(eq=False)
class _Request:
    """A slab that a fetch waits for."""

    descriptor: bytes
    slab: Slab
    until: float
    done: asyncio.Future[None]


class ChannelReceiver(Carrier):
    """A receiver's blocking transport: ``channel`` is the user's."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.supports_timeout = bool(getattr(channel, "supports_timeout", True))
        self._worker: int | None = None
        self._lock = threading.Lock()
        # Under the lock:
        self._wanted: _Request | None = None
        self._ahead: Message | None = None
        self._closed = False
        # The thread's own:
        self._buffer: tuple[bytes, TensorDict] | None = None  # with its layout's digest
        self._setup_error: Exception | None = None

        self._thread = WorkThread("asyncsync-receive")
        self._setup: asyncio.Future[Exception | None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- on the loop --------------------------------------------------------------------------------------------------

    def _start(self, worker: int | None) -> None:
        if self._setup is None:
            self._worker, self._loop = worker, asyncio.get_running_loop()
            self._setup = self._thread.submit(self._set_up)

    async def _ready(self, timeout: float) -> None:
        assert self._setup is not None
        await asyncio.wait([self._setup], timeout=timeout)
        if not self._setup.done():
            raise NotConnected(
                f"{type(self.channel).__name__}.{RECEIVER_SETUP} has not returned within {timeout:g} s: is the "
                "sender connecting? connect() may be called again"
            )
        if (error := self._setup.result()) is not None:
            raise error

    async def _fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        """Receive until the weights with this tag have come, and copy them into the slab. Raises TimeoutError: not by
        the deadline; SchemaMismatch: not what the sender announced; Exception: whatever the user's code raises."""
        loop = asyncio.get_running_loop()
        patience = deadline - loop.time()
        patience -= min(MARGIN, patience / 10)
        request = _Request(descriptor, slab, time.monotonic() + patience, loop.create_future())
        with self._lock:
            replaced, self._wanted = self._wanted, request
            ahead = self._ahead
            if ahead is not None and _tag(ahead) == descriptor:
                self._wanted = self._ahead = None
            else:
                ahead = None
        if ahead is not None:
            # The message came before its instruction. The receiving thread may be waiting for another one.
            threading.Thread(target=self._deliver, args=(request, ahead), name="asyncsync-copy", daemon=True).start()
        elif not self._closed:
            self._thread.submit(partial(self._receive, request))
        if replaced is not None:
            settle(replaced.done, error=TimeoutError("a newer update has replaced this one"))
        cancelled: asyncio.CancelledError | None = None
        try:
            await asyncio.wait([request.done], timeout=patience)
        except asyncio.CancelledError as error:
            cancelled = error
        with self._lock:
            taken = self._wanted is not request
            if not taken:
                self._wanted = None
        while taken and not request.done.done():
            # The thread writes into the slab, which must not be released before that has ended.
            try:
                await asyncio.wait([request.done])
            except asyncio.CancelledError as error:
                cancelled = error
        failure = request.done.exception() if request.done.done() else TimeoutError(self._nothing(patience))
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure

    def _nothing(self, seconds: float) -> str:
        return (
            f"{type(self.channel).__name__}.receive_weights did not return the announced weights of worker "
            f"{self._worker} within {seconds:.3g} s: does everything given to send_weights reach this worker, complete "
            "and in order?"
        )

    def close(self) -> None:
        self._closed = True
        self._thread.abandon()

    async def _end(self, timeout: float) -> None:
        if self._closed:
            return
        self.close()
        await close_channels([self.channel], self._loop, timeout)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _set_up(self) -> Exception | None:
        try:
            method = setup_of(self.channel, RECEIVER_SETUP)
            if method is not None:
                method(worker_idx=self._worker, weights=None, model=None, strategy=None)
        except BaseException as error:
            self._setup_error = as_exception(error)
        return self._setup_error

    def _receive(self, request: _Request) -> None:
        """Until the request is answered, has expired, or another has taken its place."""
        try:
            if self._setup_error is not None:
                raise self._setup_error
            while self._wanted is request and not self._closed:
                if (remaining := request.until - time.monotonic()) <= 0:
                    return
                self._receive_one(request, remaining)
        except BaseException as error:
            # A failure of the channel is one of the fetch that waits.
            with self._lock:
                waiting, self._wanted = self._wanted, None
            if waiting is not None:
                settle(waiting.done, error=as_exception(error))

    def _receive_one(self, request: _Request, remaining: float) -> None:
        layout = request.slab.layout
        if self._buffer is None or self._buffer[0] != layout.digest:
            self._buffer = layout.digest, _empty(layout)
        received = self.channel.receive_weights(
            timeout=remaining if self.supports_timeout else None,
            weights=self._buffer[1],
            model=None,
            strategy=None,
        )
        if received is not None:
            self._take(self._checked(received))
            return
        if self._wanted is request:
            raise TimeoutError(f"receive_weights returned None; {self._nothing(remaining)}")

    def _checked(self, received: Any) -> Message:
        message = {dotted(path): tensor for path, tensor in flatten(received).tensors.items()}
        tag = message.get(TAG)
        if tag is None or tag.dtype != torch.uint8 or tag.numel() != TAG_BYTES:
            raise SchemaMismatch(
                f"{type(self.channel).__name__}.receive_weights returned no entry {TAG!r}: it must return every entry "
                "that send_weights was given, or fill it into weights="
            )
        return message

    def _take(self, message: Message) -> None:
        with self._lock:
            request = self._wanted
            if request is not None and request.descriptor == _tag(message):
                self._wanted = None
                self._ahead = None  # older, as the channel keeps the order
            else:
                # An older message, or a newer one, which must not be lost: its instruction is on the way.
                request = None
                self._ahead = message
        if request is None:
            self._buffer = None  # it may be the ahead's memory
        else:
            self._deliver(request, message)

    def _deliver(self, request: _Request, message: Message) -> None:
        """Copy into the slab of a request that nothing else answers any more."""
        failure = None
        try:
            tensors = {name: tensor for name, tensor in message.items() if name != TAG}
            sent = {dotted(path): tensor for path, tensor in request.slab.tensors().items()}
            check_fit(tensors, sent, f"what {type(self.channel).__name__}.receive_weights returned")
            copy_tensors(request.slab.views, [tensors[dotted(e.path)] for e in request.slab.layout.entries])
        except BaseException as error:
            failure = as_exception(error)
        settle(request.done, error=failure)


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
