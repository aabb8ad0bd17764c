"""Companions: who works with a subscriber, and is told by it what comes. One of each at most."""

from __future__ import annotations

from typing import Protocol

from asyncsync.protocol.incoming import IncomingUpdate
from asyncsync.protocol.staging import Staging
from asyncsync.wire.messages import Verify


class FastPath(Protocol):
    """Applies each AGAIN in few steps, as long as nothing else happens."""

    def take_if_it_can(self, packet: memoryview, now: float) -> bytes | None:
        """Apply what an AGAIN announces, and return the answer. None: it has to go the general way."""

    def end(self) -> None:
        """Release everything; what was applied is the subscriber's."""


class Relaying(Protocol):
    """Passes on to other workers what comes here, while it comes. An update's slabs are its own: to keep them takes
    references."""

    def adopted(self) -> None:
        """A new trainer's epoch has begun, from which nothing has come yet."""

    def welcomed(self, now: float) -> None:
        """The trainer has said which models it serves."""

    def dismissed(self, message: str) -> None:
        """The trainer has said goodbye; there may be another one."""

    def answered(self, request: int) -> None:
        """The root of the tree has answered a request for its targets."""

    def asked(self, question: Verify) -> None:
        """The root of the tree asks a worker what its model holds."""

    def recount(self) -> None:
        """The trainer requests a report of all of them."""

    def begun(self, update: IncomingUpdate) -> None:
        """An update has been announced; small ones are complete already."""

    def written(self, update: IncomingUpdate) -> None:
        """More of it is here."""

    def committed(self, held: Staging, now: float) -> None:
        """What was staged is to be applied."""

    def dropped(self, version: int) -> None:
        """What was staged as this version will not be applied."""

    def ended(self, update: IncomingUpdate) -> None:
        """It is complete, or it will never be."""
