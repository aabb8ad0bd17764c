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

Threads that a user's code blocks are abandoned at the end, never waited for. This module has what both ends use.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import elsewhere
from asyncsync.transports.base import TransportCore
from asyncsync.transports.blocking import TransportBackend
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import nest

logger = logging.getLogger("asyncsync")

TAG = "_asyncsync_id"
"""Key of the entry that identifies a publication: 16 bytes (uint8)."""

TAG_BYTES = 16
CLOSE_SECONDS = 1.0

SENDER_SETUP = "setup_connection_and_weights_on_sender"
RECEIVER_SETUP = "setup_connection_and_weights_on_receiver"


def is_channel(transport: Any) -> bool:
    """True for a blocking transport of a user's own, False for one that the bus can use as it is. Raises TypeError:
    neither."""
    kind = type(transport)
    if isinstance(transport, TransportCore):
        own = [n for n in ("send_weights", "receive_weights") if _is_own(kind, n)]
        if not own or kind.fetch is not TransportCore.fetch or not isinstance(transport, TransportBackend):
            return False
    else:
        own = [n for n in ("send_weights", "receive_weights") if callable(getattr(transport, n, None))]
        if not own:
            raise TypeError(f"create_transport must return a TransportBackend, not {kind.__name__}")
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


def _is_own(kind: type, name: str) -> bool:
    return getattr(kind, name) is not getattr(TransportBackend, name, None)


def setup_of(transport: Any, name: str) -> Callable[..., Any] | None:
    """The user's own method of this name, if there is one."""
    method = getattr(transport, name, None)
    if isinstance(transport, TransportBackend) and not _is_own(type(transport), name):
        return None
    return method if callable(method) else None


def tagged(slab: Slab, descriptor: bytes) -> TensorDict:
    """Views into a slab, and the tag. Extra state, which is no tensor, travels in the instruction."""
    weights = nest(slab.tensors())
    weights.set(TAG, torch.frombuffer(bytearray(descriptor), dtype=torch.uint8))
    return weights


async def close_channels(transports: Iterable[Any], loop: asyncio.AbstractEventLoop | None, timeout: float) -> None:
    """Call every transport's ``close``; if they were used on a loop, each in a thread of its own, and wait a moment for
    all of these."""
    closes = [close for t in transports if callable(close := getattr(t, "close", None))]
    if loop is None or not closes:
        for close in closes:
            _call(close)
    elif running_loop() is loop:
        await elsewhere("asyncsync-close", partial(_close_all, closes, min(timeout, CLOSE_SECONDS)))
    else:  # that loop is closed, and no other has to go on meanwhile
        _close_all(closes, min(timeout, CLOSE_SECONDS))


def _close_all(closes: list[Callable[[], None]], patience: float) -> None:
    deadline = time.monotonic() + patience
    threads = [threading.Thread(target=_call, args=(close,), name="asyncsync-close", daemon=True) for close in closes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _call(close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:
        logger.exception("could not close a transport")
