"""Shares: several trainer processes have the bytes of one version. No I/O, no clock.

One of them coordinates. Its :class:`~asyncsync.protocol.publisher.Publisher` numbers the version, asks the workers for
their agreement, announces it and counts who has applied it. In the place of bytes that another process has it publishes
a :class:`ShareSlab`, which says in which one they are. It publishes a version when every process has offered its share,
so no worker waits for a share that nobody has.

The other processes only serve bytes. Each has a :class:`Sharer`. A worker that was sent the UPDATE requests a share by
PULL, which gives credit as FETCH does, and gets CHUNKs. The coordinator keeps all accounts, also the leases on shared
memory. When nothing refers to a ShareSlab any more, its ``on_release`` tells the process to :meth:`Sharer.retire` the
share. PULL is complete in itself, so there is no session to repair: the worker requests again what is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from asyncsync.errors import ProtocolError
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.transfer import Announcement, Transfer
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Buffer, Drop, Epoch, Instruction, Pull


class ShareSlab(Slab):
    """In the coordinator, a slab whose bytes another process has; ``source`` is its number, from 1 on."""

    def __init__(self, layout: Layout, source: int, descriptor: bytes | None = None) -> None:
        super().__init__(layout, torch.empty(0, dtype=torch.uint8))
        self.source = source
        self.descriptor = descriptor

    @property
    def streamed(self) -> int:
        return 0

    def follow(self, version: int, slab: Slab) -> None:
        """Nothing can be computed here of what has changed."""


class Sharer:
    """Serves one process's shares of the versions of an epoch. Its shell owns the socket::

        sharer.offer(version, slabs)            # before the coordinator publishes the version
        sharer.receive(route, instruction)
        sharer.retire(version, model_id)        # the coordinator says that nobody will request it any more
        while sharer.outbox: send(*sharer.outbox.popleft())

    ``epoch`` is the coordinator's, which may go past it before it has sent anything.
    """

    def __init__(self, epoch: Epoch, settings: Settings | None = None) -> None:
        self.epoch = epoch
        self.settings = settings or Settings()
        self.outbox: deque[tuple[bytes, Instruction, Sequence[Buffer]]] = deque()
        self.slabs: dict[tuple[int, str], Slab] = {}
        self.transfers: dict[bytes, Transfer] = {}

    def offer(self, version: int, slabs: Mapping[str, Slab]) -> None:
        """Serve these slabs as this process's shares of a version. Takes references of its own."""
        self.slabs.update({(version, model_id): slab.retain() for model_id, slab in slabs.items()})

    def retire(self, version: int, model_id: str) -> None:
        """Nobody will request this any more."""
        for route, transfer in list(self.transfers.items()):
            if transfer.serial == version and model_id in transfer.parts:
                self.disconnected(route)
        if (slab := self.slabs.pop((version, model_id), None)) is not None:
            slab.release()

    def disconnected(self, route: bytes) -> None:
        """A connection is gone, or its worker wants something else."""
        if (transfer := self.transfers.pop(route, None)) is not None:
            transfer.release()

    def receive(self, route: bytes, pull: Instruction) -> None:
        """Take in one message. Raises ProtocolError, with nothing changed, if it is of another epoch, or no PULL."""
        if not isinstance(pull, Pull):
            raise ProtocolError(f"{type(pull).__name__} to a process that only serves shares")
        if pull.epoch != self.epoch:
            raise ProtocolError("PULL of another epoch")
        found = {m: (pull.version, self.slabs[pull.version, m]) for m in pull.names if (pull.version, m) in self.slabs}
        if len(found) < len(pull.names):
            self.outbox.append((route, Drop(self.epoch, pull.version), ()))
            return
        transfer = self.transfers.get(route)
        if transfer is None or transfer.serial != pull.version or transfer.parts.keys() != found.keys():
            self.disconnected(route)
            announcement = Announcement(pull.version, found, self.epoch, eager_bytes=-1, checksum=False)
            transfer = self.transfers[route] = Transfer(announcement, found, 0)
            transfer.restart = -1  # it begins where the worker is
        transfer.rewound(pull)
        transfer.granted = max(transfer.granted, min(pull.upto, transfer.total))
        settings = self.settings
        chunks = transfer.chunks(self.epoch, chunk_bytes=settings.chunk_bytes, checksum=settings.checksum)
        self.outbox.extend((route, chunk, [piece]) for chunk, piece in chunks)

    def close(self) -> None:
        for key in list(self.slabs):
            self.retire(*key)
