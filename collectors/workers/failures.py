"""Failures of worker processes: their exceptions, as something that travels through a pipe and is raised again.

What is raised in the trainer has the worker's type where that can be, a note that names the worker, and a
:class:`~asyncsync.errors.RemoteError` with the worker's traceback as its cause. What does not survive the way (an
exception that cannot be pickled, whose class is not importable here, or whose attributes cannot be set) is itself a
RemoteError.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from typing import NamedTuple

from asyncsync.collectors.workers.channel import dumps, loads
from asyncsync.errors import PeerLost, RemoteError


class Failure(NamedTuple):
    """An exception, ready to travel: described, and pickled where that can be."""

    described: RemoteError
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = type(error)
        text = "".join(traceback.format_exception(error))
        message, pickled = "(its message cannot be shown)", None
        with contextlib.suppress(Exception):
            message = str(error)
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                pickled = dumps(error.with_traceback(None))
        return cls(RemoteError(f"{kind.__module__}.{kind.__qualname__}", message, text), pickled)

    def error(self, where: str) -> Exception:
        """The exception to be raised here; ``where`` names the worker that it is from."""
        where = f"It was raised in {where}."
        if self.pickled is not None:
            with contextlib.suppress(Exception):
                error: Exception = loads(self.pickled)
                error.__cause__ = self.described  # which a frozen dataclass refuses
                error.add_note(where)
                return error
        self.described.add_note(where)
        return self.described


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, unless it refuses that, as a frozen dataclass does."""
    with contextlib.suppress(Exception):
        error.add_note(text)


def died(where: str, code: int | None, *, starting: bool) -> PeerLost:
    """The error for a worker process that has ended and sent no failure."""
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
    text = f"{where} {how}, so collection ended. Look at its output on stderr for the cause"
    if code == -signal.SIGKILL:
        text += ". The kernel kills processes like this when memory runs out"
    if starting:
        text += (
            ". It had not started yet: with the start method 'spawn', a program must create its collectors below "
            "`if __name__ == '__main__':`"
        )
    return PeerLost(text)
