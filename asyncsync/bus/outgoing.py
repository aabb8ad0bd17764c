"""Outgoing: what leaves a sender, over its socket, over a worker's side channel, or to all subscribers at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from asyncsync.net.keys import Admission
from asyncsync.net.side_channel import BY_SIDE_CHANNEL, SideChannels
from asyncsync.net.zmq_socket import Broadcast, LoopSocket
from asyncsync.protocol.membership import EVERYBODY
from asyncsync.protocol.publisher import Publisher
from asyncsync.wire.codec import encode
from asyncsync.wire.messages import Again, Buffer, Instruction, Update

logger = logging.getLogger("asyncsync")

Departed = Callable[[bytes, Update | Again], None]


class Outgoing:
    """Empties a publisher's outbox. ``broadcast``: what workers can subscribe to; None: nothing."""

    broadcast: Broadcast | None = None

    def __init__(self, publisher: Publisher, socket: LoopSocket, side_channels: SideChannels) -> None:
        self._publisher = publisher
        self._socket = socket
        self._side_channels = side_channels
        self._open_again: Callable[[], Broadcast] | None = None
        self._removed = 0

    def flush(self, now: float, departed: Departed | None) -> bool:
        """Send everything; ``departed`` is called with each update that is on its way. True if somebody could not be
        reached."""
        outbox, routes, channels = self._publisher.outbox, self._publisher.membership.routes, self._side_channels.of
        last, header = None, b""
        by_zmq = failed = False
        try:
            while outbox:
                route, instruction, payload = outbox.popleft()
                if instruction is not last:  # mostly, all workers are sent the same
                    last, header = instruction, encode(instruction)
                    if self.broadcast is not None and self._send_to_all(route, instruction, header, payload, departed):
                        continue
                peer = routes.get(route) if channels and type(instruction) in BY_SIDE_CHANNEL else None
                # Not to one that has yet to answer its last WELCOME: see net/side_channel.py on the order.
                channel = None if peer is None or peer.unsettled else channels.get(peer.nonce)
                if channel is not None and channel.send((header, *payload)):
                    outcome = 0
                else:
                    by_zmq = True
                    outcome = self._socket.send((route, header, *payload))
                if outcome == zmq.EAGAIN:
                    failed = True
                    self._publisher.clogged(route)
                elif outcome == zmq.EHOSTUNREACH:
                    failed = True
                    self._publisher.unreachable(route, now)
                elif departed is not None and isinstance(instruction, Update | Again):
                    departed(route, instruction)
        finally:
            if by_zmq:
                self._socket.flushed()
        return failed

    # -- to all subscribers -------------------------------------------------------------------------------------------

    def _send_to_all(
        self,
        route: bytes,
        instruction: Instruction,
        header: bytes,
        payload: Sequence[Buffer],
        departed: Departed | None,
    ) -> bool:
        """Send what was just taken from the outbox to all subscribers, if it goes to them."""
        assert self.broadcast is not None
        fanout = self._publisher.fanout
        cast = fanout.gather(route, instruction, payload, self._publisher.announcement)
        if cast is None and route != EVERYBODY:
            return False
        self.broadcast.send((header, *payload) if cast is None else (encode(cast), header, *payload))
        if cast is not None and departed is not None and isinstance(instruction, Update | Again):
            for one in fanout.reached:
                departed(one, instruction)
        return True

    def open_broadcast(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        admission: Admission | None,
        crash: Callable[[BaseException], None],
    ) -> None:
        """Let workers subscribe, beside this address. They can do without."""
        protect = (lambda socket: None) if admission is None else admission.guard

        def open_() -> Broadcast:
            return Broadcast(context, endpoint, self._publisher.fanout.subscribed, protect, crash)

        self._open_again = open_
        self._try_to_open(open_)

    def _try_to_open(self, open_: Callable[[], Broadcast]) -> None:
        try:
            self.broadcast = open_()
        except zmq.ZMQError as error:
            logger.warning("no fan-out, so each worker gets its own copy: %s", error)
        self._publisher.fanout.moved(0 if self.broadcast is None else self.broadcast.port)

    def shut_out(self, admission: Admission) -> None:
        """If keys were taken off the list, leave their holders behind: a subscriber cannot be cut off alone, so all
        others are told of another port."""
        if self._open_again is None or admission.removed == self._removed:
            return
        self._removed = admission.removed
        self.close()
        self.broadcast = None
        self._try_to_open(self._open_again)
        self._publisher.welcome_all()

    def close(self) -> None:
        """Idempotent."""
        if self.broadcast is not None:
            self.broadcast.close()
