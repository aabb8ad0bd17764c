"""The private names of pyzmq that are used here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq
from zmq.backend import Socket as Backend

# pyzmq's own layer: a small message costs a third of what it does through zmq.Socket, with its enums and options.
get: Callable[[Any, int], Any] = Backend.get
recv, send = Backend.recv, Backend.send


class _Socket(zmq.Socket[bytes]):
    """See :class:`Context`."""

    def __del__(self) -> None:
        pass


class Context(zmq.Context[_Socket]):
    """A context that the garbage collector leaves alone: terminated there, before its sockets are closed, it would wait
    for them for ever. Whoever has made it closes it; see :meth:`asyncsync.bus.link.Link.shut_down_without_loop`."""

    _socket_class = _Socket

    def __del__(self) -> None:
        pass
