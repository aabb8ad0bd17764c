"""Introduction: how a worker finds a sender whose address it was not given.

The sender binds a port that was free, with keys of its own, and makes an :class:`Introduction` for each worker: where
it is, and the key by which it recognises that worker. The scheme brings it there by other means, which both sides have
anyway: a store of torch.distributed, a remote call, an actor (:mod:`asyncsync.schemes.introduced`). Keys are drawn for
one run, and never pickled with a scheme; who can read what the scheme uses can read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

from asyncsync.errors import ProtocolError
from asyncsync.net.keys import Admission, KeyPair
from asyncsync.protocol.messages import Hello, Instruction
from asyncsync.protocol.peer import Peer

__all__ = ["Introduction", "Introductions"]

KEY_LENGTH = 40


@dataclass(frozen=True)
class Introduction:
    """What a worker needs in order to find its sender.

    Attributes:
        endpoint: where that is.
        server: its public key.
        own: the worker's keys.
        store: host and port of a TCPStore of the sender's, where the transport needs one.
    """

    endpoint: str
    server: bytes
    own: KeyPair
    store: tuple[str, int] | None = None

    def encode(self) -> bytes:
        """For :meth:`decode`."""
        encoded: bytes = msgpack.packb([self.endpoint, self.server, self.own.public, self.own.secret, self.store])
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Raises ProtocolError: it is something else."""
        try:
            endpoint, server, public, secret, store = msgpack.unpackb(data)
            place = None if store is None else (str(store[0]), int(store[1]))
        except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
            raise ProtocolError(f"this is no introduction to a sender: {error!r}") from error
        keys = (server, public, secret)
        if not isinstance(endpoint, str) or not all(isinstance(k, bytes) and len(k) == KEY_LENGTH for k in keys):
            raise ProtocolError("this is no introduction to a sender")
        return cls(endpoint, server, KeyPair(public, secret), place)


class Introductions:
    """The sender's: ``introductions(worker)`` makes one, the same one again later. To be made before ``socket`` is
    bound; ``endpoint`` is where it was."""

    endpoint: str

    def __init__(
        self, context: zmq.Context[Any], socket: zmq.Socket[bytes], crash: Callable[[BaseException], None]
    ) -> None:
        self._server = KeyPair.draw()
        self._made: dict[int, Introduction] = {}
        self.admission = Admission(context, crash)
        self._server.serve(socket)

    def __call__(self, worker: int) -> Introduction:
        if worker not in self._made:
            own = KeyPair.draw()
            self.admission.admit(own.public, worker)
            self._made[worker] = Introduction(self.endpoint, self._server.public, own)
        return self._made[worker]

    def check(self, frame: zmq.Frame, instruction: Instruction, peer: Peer | None) -> None:
        """Raise ProtocolError if this message claims to be another worker's than its key was given to. ``peer``: who is
        known by the message's route."""
        claimed = instruction.worker if isinstance(instruction, Hello) else None if peer is None else peer.worker
        holder = self.admission.holder(frame)
        if claimed not in (None, holder):
            raise ProtocolError(f"it claims to be worker {claimed}, but has worker {holder}'s key")
