"""Loans: slabs that a worker reads where they are, and when they may be written again. No I/O, no clock.

A slab in shared memory is lent with the UPDATE that names it, or, if it is to be read in place, when the worker asks
for it: so one that is stopped costs no more than what it has. It comes back by the worker's own word only, or with the
end of its process: a worker that is silent, stopped or cut off may be reading it, or may be about to. The word is a
*report*: "of all UPDATEs up to this serial, these slabs are still in use". A worker ignores an UPDATE that is not newer
than the last one it has seen, so what such a report does not name, it will never touch again, whatever still comes to
it, in whatever order; and an old report that arrives late says nothing of what was lent after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from asyncsync.weights.slab import Slab

__all__ = ["Key", "Loans"]

Key = tuple[str, int]
"""Model and version."""


class Loans:
    """What one worker incarnation may be reading; holds one reference to each of these slabs.

    Args:
        worker: its worker_idx.
        pid: its process, which takes everything with it when it ends; 0: not on this host.
    """

    def __init__(self, worker: int, pid: int) -> None:
        self.worker = worker
        self.pid = pid
        self._lent: dict[Key, tuple[int, Slab]] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def __iter__(self) -> Iterator[tuple[Key, Slab]]:
        return ((key, slab) for key, (_, slab) in self._lent.items())

    def lend(self, serial: int, parts: Mapping[str, tuple[int, Slab]]) -> None:
        """These parts of the UPDATE of this serial are the worker's from now on."""
        for model_id, (version, slab) in parts.items():
            if slab.leased:
                key = (model_id, version)
                known = self._lent.get(key)
                if known is None:
                    slab.retain()
                self._lent[key] = (serial, slab)

    def report(self, last: int, kept: Collection[Key]) -> None:
        """The worker has seen all UPDATEs up to this serial that it will ever look at, and still uses these slabs."""
        back = [key for key, (serial, _) in self._lent.items() if serial <= last and key not in kept]
        for key in back:
            self._lent.pop(key)[1].release()

    def close(self) -> None:
        """The worker's process has ended, or nothing will be written here any more."""
        while self._lent:
            self._lent.popitem()[1][1].release()
