"""Warns once of calls of a model that keep the event loop from turning.

    watch.bind()                                        # on the loop that brings the updates
    if now >= watch.next_look and thread == watch.thread:
        watch.look(now)                                 # at each call of the model

On the loop's own thread, a worker that calls its model again and again and awaits nothing gets no update, and does not
receive its trainer's BYE. The test above is all that most calls pay.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading

from asyncsync.runtime.asyncio_private import running_loop

_log = logging.getLogger("asyncsync")
SECONDS = 1.0  # without a turn of the loop, from one call to another
PAUSE = SECONDS / 4  # between two looks: to have the loop call back costs a microsecond


class LoopWatch:
    """Whether the loop on which a gate's updates come in turns between calls of the model. Its ``thread`` is None until
    it is bound; ``next_look`` is when :meth:`look` is due, by time.monotonic()."""

    __slots__ = ("_asked", "_loop", "next_look", "thread")

    def __init__(self) -> None:
        self.thread: int | None = None
        self.next_look = math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: float | None = None  # since when the loop has been to call back

    def bind(self) -> None:
        """Watch the loop of the calling thread."""
        self.thread = threading.get_ident()
        self._loop, self._asked = running_loop(), None
        self.next_look = math.inf if self._loop is None else 0.0

    def end(self) -> None:
        """Warn of nothing from now on."""
        self._loop, self.next_look = None, math.inf

    def look(self, now: float) -> None:
        """Warn if the loop has not turned for a second. On its thread."""
        if self._loop is None or self._loop.is_closed():
            self.end()
        elif self._asked is None:
            self._asked, self.next_look = now, now + PAUSE
            self._loop.call_soon(self._turned)
        elif (seconds := now - self._asked) < SECONDS:
            self.next_look = now + PAUSE
        else:
            self.end()
            _log.warning(
                "the model is called again and again on an event loop that has not turned for %.1f s: no weight update "
                "can come in, nor the sender's goodbye. Await something between two calls (await asyncio.sleep(0) is "
                "enough), call the model in a thread (await asyncio.to_thread(model, ...)), or take the schemes of "
                "asyncsync.sync, which receive in a thread of their own",
                seconds,
            )

    def _turned(self) -> None:
        self._asked = None
