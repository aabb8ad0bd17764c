"""Whereabouts: at which address a receiver's sender is, and where next: at the next of several addresses, or where its
successor is that another way of finding it leads to."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import zmq

from asyncsync.net.broadcast import Subscription
from asyncsync.net.dialing import Dialer
from asyncsync.net.endpoint import several
from asyncsync.net.introduction import Following, Introduction
from asyncsync.net.keys import Credentials
from asyncsync.protocol.session import Session

logger = logging.getLogger("asyncsync")

AWAY_SECONDS = 3.0
# Until a receiver with several addresses tries the next one: nobody is there, or there is no WELCOME.
UNREACHED_SECONDS, UNANSWERED_SECONDS = 1.0, 5.0


class Whereabouts:
    """Connects ``socket``, and what is subscribed to, to a sender; of an address with keys, ``credentials`` returns
    them. ``receive`` is called with what all subscribers are sent. Raises NotConnected as :class:`Dialer`.

    Attributes:
        dialer: of the socket.
        subscription: to what the sender sends to many at once.
        following: asks for the sender's successor; None: nobody knows another way.
        away_since: when the connection ended; None: there is one, or there has been none yet.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        sender: str | Introduction,
        session: Session,
        credentials: Callable[[], Credentials] | None,
        connected: Callable[[], None],
        disconnected: Callable[[], None],
        receive: Callable[[list[Any]], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        endpoints = several(sender) if isinstance(sender, str) else (sender.endpoint,)
        self._introduction = sender if isinstance(sender, Introduction) else None
        if self._introduction is not None:
            credentials = _credentials(self._introduction)
        self.following: Following | None = None
        self.away_since: float | None = None
        self._unwelcome_since: float | None = None
        self._session = session
        self._disconnected = disconnected
        self.dialer = Dialer(socket, endpoints, credentials, crash, connected, disconnected)
        self.subscription = Subscription(socket.context, self.dialer, session.nonce, receive, crash)

    @property
    def endpoint(self) -> str:
        return self.dialer.endpoint

    def why(self) -> str:
        """For people: why there is no connection."""
        return self.dialer.why or (
            f"no sender answers at {self.endpoint}; check that it is connecting, with the same endpoint"
        )

    def is_away(self, now: float) -> bool:
        """Whether the connection stays away."""
        return self.away_since is not None and now > self.away_since + AWAY_SECONDS

    def follow(self, find: Callable[[], Awaitable[Introduction]]) -> None:
        """Ask for an introduction to the sender's successor, whenever the connection has ended. Idempotent."""
        if self.following is None and self._introduction is not None:
            session = self._session
            self.following = Following(find, self._introduction, self._turn_to, lambda: session.online)

    def _turn_to(self, sender: Introduction) -> None:
        self.dialer.turn_to(sender.endpoint, _credentials(sender))
        self.subscription.close()

    def tick(self, now: float) -> None:
        """Go to the next address, when nobody is at this one, or does not answer there."""
        session = self._session
        if not self.dialer.has_others:
            return
        # A WELCOME may be read after the end of the connection by which it has come.
        if (session.welcomed and session.online) or session.ended is not None:
            self._unwelcome_since = None
        elif self._unwelcome_since is None:
            self._unwelcome_since = now
        elif now - self._unwelcome_since >= (UNANSWERED_SECONDS if session.online else UNREACHED_SECONDS):
            self._unwelcome_since = now
            self.dialer.go_on()
            self.subscription.close()
            logger.info("worker %d tries its next address, %s", session.worker, self.endpoint)
            self._disconnected()

    def close(self) -> None:
        """Before the socket is closed. Idempotent."""
        if self.following is not None:
            self.following.close()
        self.dialer.close()
        self.subscription.close()


def _credentials(sender: Introduction) -> Callable[[], Credentials]:
    return partial(Credentials, sender.own, (sender.server,))
