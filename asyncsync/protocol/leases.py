"""Leases: slabs that a worker reads where they are, and when they may be written again. No I/O, no clock.

A slab in shared memory is leased with the UPDATE that names it, or, if it is to be read in place, when the worker
fetches it: so a worker that is stopped costs no more than what it has. A lease ends with the worker's own report only,
or with the end of its process: a worker that is silent, stopped or cut off may be reading the slab, or may be about to.
A report means: "of all UPDATEs up to this serial, these slabs are still in use". A worker ignores an UPDATE that is not
newer than the last one it has seen, so what such a report does not name, it will never touch again, whatever still
comes to it, in whatever order; and an old report that arrives late means nothing for what was leased after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from asyncsync.protocol.peer import Peer
from asyncsync.weights.slab import Slab

__all__ = ["Key", "Leases", "WorkerLeases"]

Key = tuple[str, int]
"""Model and version."""


class WorkerLeases:
    """What one worker incarnation may be reading; holds one reference to each of these slabs. Its process, ``pid``,
    ends all its leases when it ends; 0: it is not on this host."""

    def __init__(self, worker: int, pid: int) -> None:
        self.worker = worker
        self.pid = pid
        self._slabs: dict[Key, tuple[int, Slab]] = {}

    def __len__(self) -> int:
        return len(self._slabs)

    def __iter__(self) -> Iterator[tuple[Key, Slab]]:
        return ((key, slab) for key, (_, slab) in self._slabs.items())

    def lease(self, serial: int, parts: Mapping[str, tuple[int, Slab]]) -> None:
        """These parts of the UPDATE of this serial are the worker's from now on."""
        for model_id, (version, slab) in parts.items():
            if slab.leased:
                key = (model_id, version)
                known = self._slabs.get(key)
                if known is None:
                    slab.retain()
                self._slabs[key] = (serial, slab)

    def report(self, last: int, in_use: Collection[Key]) -> None:
        """The worker has seen all UPDATEs up to this serial that it will ever take, and still uses these slabs."""
        ended = [key for key, (serial, _) in self._slabs.items() if serial <= last and key not in in_use]
        for key in ended:
            self._slabs.pop(key)[1].release()

    def release(self) -> None:
        """The worker's process has ended, or nothing will be written here any more."""
        while self._slabs:
            self._slabs.popitem()[1][1].release()


class Leases:
    """What all worker incarnations may be reading, also those that have left. ``of`` has the leases by the nonce of the
    incarnation."""

    def __init__(self) -> None:
        self.of: dict[bytes, WorkerLeases] = {}

    def lease(self, peer: Peer, serial: int, parts: Mapping[str, tuple[int, Slab]]) -> None:
        leases = self.of.get(peer.nonce)
        if leases is None:
            leases = self.of[peer.nonce] = WorkerLeases(peer.worker, peer.hello.pid if peer.local else 0)
        leases.lease(serial, parts)

    def report(self, nonce: bytes, last: int, in_use: Collection[Key]) -> None:
        if (leases := self.of.get(nonce)) is not None:
            leases.report(last, in_use)
            if not leases:
                del self.of[nonce]

    def release(self, nonce: bytes) -> None:
        """An incarnation has ended, or reads nothing any more."""
        if (leases := self.of.pop(nonce, None)) is not None:
            leases.release()

    def close(self) -> None:
        """Nothing is written any more."""
        while self.of:
            self.of.popitem()[1].release()
