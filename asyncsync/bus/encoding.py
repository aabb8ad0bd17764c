"""Encoding on the sender: pieces that travel as fewer bytes are made in the link's thread, one after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from asyncsync.bus.link import Link
from asyncsync.protocol.publisher import Publisher
from asyncsync.weights.encoding import Encoding

logger = logging.getLogger("asyncsync")

# The thread need not wait for the loop after each piece. A publication waits for the thread no longer than for these:
# some 20 ms.
AT_ONCE = 8


class Encoder:
    """Encodes what the publisher has ``wanted``; ``encoded`` is called when there is more for it to send."""

    def __init__(self, link: Link, publisher: Publisher, encoded: Callable[[], None]) -> None:
        self._link = link
        self._wanted = publisher.wanted
        self._encoded = encoded
        self._is_busy = self._has_warned = False

    def start(self) -> None:
        """Go on with the next pieces, unless some are under way."""
        if self._is_busy or self._link.closed:
            return
        chosen: list[tuple[Encoding, int]] = []
        while self._wanted and len(chosen) < AT_ONCE:
            encoding, index = self._wanted.popleft()
            if encoding.users:  # else nobody is getting it any more
                encoding.join()
                chosen.append((encoding, index))
        if chosen:
            self._is_busy = True
            future = self._link.thread.submit(partial(self._encode, chosen))
            future.add_done_callback(partial(self._done, chosen))

    def _encode(self, chosen: list[tuple[Encoding, int]]) -> None:
        for encoding, index in chosen:
            try:
                encoding.encode(index)
            except Exception:
                if not self._has_warned:
                    logger.exception("cannot encode a piece of weights; sending such pieces as they are")
                self._has_warned = True
                encoding.leave_as_it_is(index)
            self._link.call_from_thread(self._encoded)

    def _done(self, chosen: list[tuple[Encoding, int]], future: asyncio.Future[None]) -> None:
        self._is_busy = False
        for encoding, _ in chosen:
            encoding.leave()
        with self._link.guard():
            future.result()
            self.start()
