"""Guest: gets what a sender has for everybody, whatever its models are; nobody waits for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.errors import NotConnected
from asyncsync.model.gate import Gate
from asyncsync.net.keys import Credentials
from asyncsync.protocol.settings import Settings
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import FIRST_GUEST


class Snapshot(NamedTuple):
    """One model's weights: the version, the metadata it was published with, and a copy of the slab."""

    version: int
    metadata: dict[str, Any]
    slab: Slab


def guest_link(
    sender: str,
    transport: Carrier,
    settings: Settings,
    role: str,
    credentials: Callable[[], Credentials] | None = None,
) -> ReceiverLink:
    """A link that takes every model of a sender; its place is one that no worker has. On the running loop. Raises
    NotConnected if it cannot connect."""
    place = FIRST_GUEST + secrets.randbelow(FIRST_GUEST)
    link = ReceiverLink(sender, place, settings, Gate(), credentials, role, transport=transport)
    link.settle()  # from now on it looks for the sender, at each of its addresses
    return link


class Guest:
    """A guest of one sender, on the running loop. ``transport`` is as the sender's, for which a shared-memory one does,
    too: it takes chunks as well. Usage::

        guest = Guest("tcp://127.0.0.1:5555", ZMQTransport())
        try:
            weights = await guest.weights(timeout=10)
        finally:
            await guest.shutdown()
    """

    def __init__(
        self,
        sender: str,
        transport: Carrier,
        settings: Settings | None = None,
        *,
        role: str = "guest",
        credentials: Callable[[], Credentials] | None = None,
    ) -> None:
        self.link = guest_link(sender, transport, settings or Settings(), role, credentials)

    async def weights(self, timeout: float) -> dict[str, Snapshot]:
        """The newest weights of every model of which the sender has any, by name ("": a sender's only model that has
        none). Raises NotConnected if there is no sender, or it has none, within the timeout, and at once if it does not
        let this guest in for its key; ClosedError or Fenced if it has turned this guest away."""
        subscriber, dialer = self.link.subscriber, self.link.whereabouts
        session = subscriber.session

        def have_come() -> bool:
            return any(session.served.values()) and all(map(subscriber.settled, session.served))

        def is_over() -> bool:
            return session.ended is not None or (dialer.is_refused and not dialer.has_others)

        in_time = await self.link.wait(lambda: have_come() or is_over(), timeout)
        if session.ended is not None:
            raise type(session.ended)(*session.ended.args)
        if not have_come():
            late = "" if in_time else f" after {timeout:g} s"
            raise NotConnected(f"no weights from {self.link.whereabouts.endpoint}{late}: {self.why()}")
        found = {}
        for model_id in [m for m, digest in session.served.items() if digest]:
            shown = self.link.acting([model_id]).shown
            found[model_id] = await self.link.receiving.copy(model_id, partial(Snapshot, shown.version, shown.metadata))
        return found

    def why(self) -> str:
        """For people: why there are no weights yet."""
        subscriber = self.link.subscriber
        if self.link.whereabouts.why:
            return self.link.whereabouts.why
        if not subscriber.session.online:
            return "there is no connection: is the sender running, and is this its address?"
        if not subscriber.session.welcomed:
            return "it has no version yet, like a relay that has not reached its trainer; or it has stopped"
        if subscriber.holdings.error:
            return "; ".join(str(error) for _, error in subscriber.holdings.error.values())
        if not any(subscriber.session.served.values()):
            return "the sender has not published any yet"
        return "the weights have not arrived completely yet"

    async def shutdown(self) -> None:
        """Leave, and release everything. Idempotent."""
        await self.link.shutdown()
