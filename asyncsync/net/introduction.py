"""Introduction: how a worker finds a sender whose address it was not given.

The sender binds a port that was free, with keys of its own, and makes an :class:`Introduction` for each worker: where
it is, and the key by which it recognises that worker. The scheme brings it there by other means, which both sides have
anyway: a store of torch.distributed, a remote call, an actor (:mod:`asyncsync.schemes.introduced`). Keys are drawn for
one run, and never pickled with a scheme; who can read what the scheme uses can read them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass

import msgpack

from asyncsync.errors import ProtocolError
from asyncsync.net.keys import Admission, KeyPair
from asyncsync.protocol.membership import MAX_PEERS

logger = logging.getLogger("asyncsync")

KEY_LENGTH = 40
ASK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Introduction:
    """What a worker needs in order to find its sender.

    Attributes:
        endpoint: where that is.
        server: its public key.
        own: the worker's keys.
    """

    endpoint: str
    server: bytes
    own: KeyPair

    def encode(self) -> bytes:
        """For :meth:`decode`."""
        encoded: bytes = msgpack.packb([self.endpoint, self.server, self.own.public, self.own.secret])
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Raises ProtocolError: it is something else."""
        try:
            endpoint, server, public, secret = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"this is no introduction to a sender: {error!r}") from error
        keys = (server, public, secret)
        if not isinstance(endpoint, str) or not all(isinstance(k, bytes) and len(k) == KEY_LENGTH for k in keys):
            raise ProtocolError("this is no introduction to a sender")
        return cls(endpoint, server, KeyPair(public, secret))


class Introductions:
    """The sender's: ``introductions(worker)`` makes one, the same one again later. ``endpoint`` is where its
    socket was bound. Of more than ``most``, that of the absent worker that has not asked for longest is void; it gets
    another if it asks again. ``there`` are the workers that are not absent."""

    endpoint: str

    def __init__(self, admission: Admission, there: Container[int], most: int = MAX_PEERS) -> None:
        self._made: dict[int, Introduction] = {}
        self.admission = admission
        self._there, self._most = there, most

    def __call__(self, worker: int) -> Introduction:
        found = self._made.pop(worker, None)
        if found is None:
            absent = (one for one in self._made if one not in self._there)
            if len(self._made) >= self._most and (void := next(absent, None)) is not None:
                self.admission.dismiss(self._made.pop(void).own.public)
            own = KeyPair.draw()
            self.admission.admit(own.public, worker)
            found = Introduction(self.endpoint, self.admission.server.public, own)
        self._made[worker] = found  # asked for last
        return found


class Following:
    """Has a worker follow its sender's successors, which have other addresses and other keys: while it has no
    connection, it asks for its introduction again. One to the sender that it has changes nothing: ZeroMQ connects
    again by itself.

    Args:
        find: waits until there is a sender, and returns the introduction to it.
        known: the one to the sender that the worker has.
        follow: connects to another.
        is_online: whether there is a connection.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[Introduction]],
        known: Introduction,
        follow: Callable[[Introduction], None],
        is_online: Callable[[], bool],
    ) -> None:
        self._find = find
        self._known = known
        self._follow = follow
        self._is_online = is_online
        self.task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The connection has ended."""
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while not self._is_online():
            try:
                found = await self._find()
            except Exception as error:
                logger.error("the sender is gone, and this worker cannot find a new one: %s", error)
                return
            if found != self._known:
                self._known = found
                self._follow(found)
            await asyncio.sleep(ASK_AGAIN_SECONDS)  # it may be the one that is ending

    def close(self) -> None:
        """Ask no more."""
        if self.task is not None:
            self.task.cancel()
