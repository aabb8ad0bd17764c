"""Running free: what collectors that collect in the background have in common."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any

from asyncsync.collectors.base import BaseCollector
from asyncsync.errors import ClosedError

__all__ = ["RunsFree"]


class RunsFree(BaseCollector):
    """Part of a collector that can be set free: a thread of its own collects, or watches who does."""

    replay_buffer: Any

    def _begin_captive(self) -> None:
        self._free: threading.Thread | None = None
        self._free_error: BaseException | None = None

    def start(self) -> None:
        """Collect into the replay buffer, in the background, until ``total_frames``, :meth:`async_shutdown` or
        :meth:`shutdown`. Does nothing if it does already.

        What is raised there is logged, and raised by the next :meth:`pause`, :meth:`async_shutdown` or
        :meth:`shutdown`.

        Raises:
            NotImplementedError: there is no replay buffer.
            ClosedError: after :meth:`shutdown`.
        """
        if self.replay_buffer is None:
            raise NotImplementedError(
                f"{type(self).__name__}.start() collects into a replay buffer: pass replay_buffer=, or iterate instead"
            )
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} has been shut down")
        self._set_free()

    @abstractmethod
    def _set_free(self) -> None:
        """Make :attr:`_free`, and start it, unless it runs."""

    def is_running(self) -> bool:
        """Whether it collects in the background."""
        return self._free is not None and self._free.is_alive()

    def _raise_free_error(self) -> None:
        """What ended collection in the background, once."""
        error, self._free_error = self._free_error, None
        if error is not None:
            raise error
