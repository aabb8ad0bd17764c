"""Leases: slabs that a worker reads where they are, and when they may be written again. No I/O, no clock.

A slab in shared memory is leased with the UPDATE that names it. A lease ends with the worker's own report only,
or with the end of its process: a worker that is silent, stopped or cut off may be reading the slab, or may be about to.
A report means: "of all UPDATEs up to this serial, these slabs are still in use". A worker ignores an UPDATE that is not
newer than the last one it has seen, so what such a report does not name, it will never touch again, whatever still
comes to it, in whatever order; and an old report that arrives late means nothing for what was leased after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from asyncsync.protocol.peer import Peer
from asyncsync.weights.slab import Slab

Key = tuple[str, int]
"""Model and version."""


@dataclass(slots=True, eq=False)
class WorkerLeases:
    """The slabs that one worker incarnation may be reading, each with the serial of the last UPDATE that named it. Its
    process, ``pid``, ends all its leases when it ends; 0: it is not on this host. ``takes``: see HELLO."""

    worker: int
    pid: int
    takes: bool = False
    slabs: dict[Key, tuple[int, Slab]] = field(default_factory=dict)


class Leases:
    """What all worker incarnations may be reading, also those that have left. ``of`` has the leases by the nonce of the
    incarnation, with one reference to each of their slabs."""

    def __init__(self) -> None:
        self.of: dict[bytes, WorkerLeases] = {}

    def lease(self, peer: Peer, serial: int, parts: Mapping[str, tuple[int, Slab]]) -> None:
        """These parts of the UPDATE of this serial are the worker's from now on."""
        if (leases := self.of.get(peer.nonce)) is None:
            leases = self.of[peer.nonce] = WorkerLeases(
                peer.worker, peer.hello.pid if peer.local else 0, peer.hello.takes
            )
        for model_id, (version, slab) in parts.items():
            if slab.leased:
                key = (model_id, version)
                if key not in leases.slabs:
                    slab.retain()
                leases.slabs[key] = (serial, slab)

    def of_takers(self) -> set[Slab]:
        """What those may be reading who keep it as long as they like: it counts against nobody's slots."""
        return {slab for leases in self.of.values() if leases.takes for _, slab in leases.slabs.values()}

    def report(self, nonce: bytes, last: int, in_use: Collection[Key]) -> None:
        """The worker has seen all UPDATEs up to this serial that it will ever take, and still uses these slabs."""
        if (leases := self.of.get(nonce)) is None:
            return
        slabs = leases.slabs
        ended = [key for key, (serial, _) in slabs.items() if serial <= last and key not in in_use]
        for key in ended:
            slabs.pop(key)[1].release()
        if not slabs:
            del self.of[nonce]

    def release(self, nonce: bytes) -> None:
        """An incarnation has ended, or reads nothing any more."""
        if (leases := self.of.pop(nonce, None)) is not None:
            for _, slab in leases.slabs.values():
                slab.release()

    def close(self) -> None:
        """Nothing is written any more."""
        for nonce in list(self.of):
            self.release(nonce)
