"""The private names of pyzmq that asyncsync uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq
from zmq.backend import Socket as Backend

# pyzmq's lower layer. A small message costs a third of what it costs through zmq.Socket, with its enums and options.
get: Callable[[Any, int], Any] = Backend.get
recv, send = Backend.recv, Backend.send


class _Socket(zmq.Socket[bytes]):
    """See :class:`Context`."""

    def __del__(self) -> None:
        pass


class Context(zmq.Context[_Socket]):
    """A context that the garbage collector does not terminate, because termination would wait for ever for sockets that
    are still open. Its creator must close it; see :meth:`asyncsync.bus.link.Link.shut_down_without_loop`."""

    _socket_class = _Socket

    def __del__(self) -> None:
        pass
