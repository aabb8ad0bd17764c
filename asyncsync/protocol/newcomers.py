"""Newcomers: whoever says HELLO for a worker that is there already. No I/O, no clock.

A worker that answers a PING keeps its place, and the newcomer is refused: its index was given twice, or a stranger has
said HELLO. One that has ended, or is silent for so long, gives way, but only to a newcomer that has proved itself: that
has answered for the layouts it was shown. Until then a newcomer changes nothing. There is one per worker at most: they
cannot fill memory; one that gets no answer says HELLO again.
"""

from __future__ import annotations

from asyncsync.protocol.peer import Peer

__all__ = ["Newcomer"]

PATIENCE = 2.0
# Of the time between two looks, no more than this counts: the answer may have come while this process was busy.
LOOK_SECONDS = 0.25


class Newcomer:
    """Somebody who asks for the place of a worker.

    Args:
        holder: the worker whose place it is.
        asked: the number of the PING that the holder has to answer.
        now: when that was sent.

    Attributes:
        peer: the newcomer itself, as its last HELLO says.
        shown: when it was shown the layouts, because the holder is silent; None: it waits.
    """

    peer: Peer

    def __init__(self, holder: Peer, asked: int, now: float) -> None:
        self.holder = holder
        self.asked = asked
        self.shown: float | None = None
        self._patience = PATIENCE
        self._looked = now

    @property
    def next_look(self) -> float:
        return self._looked + LOOK_SECONDS

    def outwaits(self, now: float) -> bool:
        """Whether the holder has been silent for too long by now."""
        self._patience -= min(now - self._looked, LOOK_SECONDS)
        self._looked = now
        return self._patience <= 0.0
