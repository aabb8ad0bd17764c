"""Asking: a sender's status over the network, without being one of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq

from asyncsync.errors import AckTimeout, ProtocolError, WeightSyncError
from asyncsync.net.endpoint import several
from asyncsync.net.keys import Credentials
from asyncsync.net.rendezvous import Dialer
from asyncsync.net.zmq_private import Context
from asyncsync.net.zmq_socket import LoopSocket, dealer
from asyncsync.wire.codec import decode, encode
from asyncsync.wire.messages import Inquiry, Report

AGAIN_SECONDS = 0.5  # an inquiry may get lost, and is dropped where too many ask
UNANSWERED_SECONDS = 1.0  # until the next one of several addresses is asked


class Asker:
    """Asks one sender for its status, on the running loop. To be closed, or used in a ``with`` block.

    Args:
        endpoint: where the sender is, as its workers are given it; of several addresses one after the other is asked.
        credentials: returns what to connect with, where the sender has keys.

    Raises:
        NotConnected: this is no address, or the credentials cannot be had.
    """

    def __init__(self, endpoint: str, credentials: Callable[[], Credentials] | None = None) -> None:
        self.endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Report] | None = None
        self._token = 0
        self._failure: BaseException | None = None
        self._silent_since: float | None = None
        with ExitStack() as undo:
            self._context = Context()
            undo.callback(self._context.destroy, 0)
            socket = dealer(self._context)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up while the sender is away
            self._dialer = Dialer(socket, several(endpoint), credentials, self._crash)
            undo.callback(self._dialer.close)
            self._socket = LoopSocket(socket, self._receive, self._crash)
            undo.pop_all()

    async def ask(self, timeout: float) -> Report:
        """The sender's status now. Raises AckTimeout if it does not answer within ``timeout`` seconds."""
        self._token += 1
        self._answer = self._loop.create_future()
        deadline = self._loop.time() + timeout
        inquiry = encode(Inquiry(self._token))
        if self._silent_since is None:
            self._silent_since = self._loop.time()
        try:
            while True:
                if self._failure is not None:
                    raise WeightSyncError(f"cannot ask the sender for its status: {self._failure!r}") from self._failure
                if self._dialer.has_others and self._loop.time() >= self._silent_since + UNANSWERED_SECONDS:
                    self._silent_since = self._loop.time()
                    self._dialer.go_on()
                sent = self._socket.send((inquiry,)) == 0
                self._socket.flushed()
                pause = AGAIN_SECONDS if sent else 0.05
                remaining = deadline - self._loop.time()
                if remaining <= 0:
                    why = self._dialer.why or "is a sender running there?"
                    raise AckTimeout(f"no sender answered at {self.endpoint} within {timeout:g} s: {why}")
                done, _ = await asyncio.wait({self._answer}, timeout=min(pause, remaining))
                if done:
                    self._silent_since = None
                    return self._answer.result()
        finally:
            self._answer = None

    def _receive(self, frames: list[Any]) -> None:
        try:
            instruction, _ = decode([frame.buffer for frame in frames])
        except ProtocolError as error:
            failure = error
            self._settle(lambda answer: answer.set_exception(failure))
            return
        if isinstance(instruction, Report) and instruction.token == self._token:
            self._settle(lambda answer: answer.set_result(instruction))

    def _crash(self, error: BaseException) -> None:
        self._failure = error

    def _settle(self, settle: Callable[[asyncio.Future[Report]], None]) -> None:
        if self._answer is not None and not self._answer.done():
            settle(self._answer)

    def close(self) -> None:
        """Idempotent."""
        self._dialer.close()
        self._socket.close()
        self._context.destroy(0)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
