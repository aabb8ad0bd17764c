"""The exceptions that asyncsync defines.

Each class is named after the state that it reports. Each message says what happened, to which model and worker, and
what to do about it. Where TorchRL documents a built-in type (RuntimeError, ValueError), the class is a subclass of that
type, too. All of them can be pickled, so that a worker's failure can travel to the trainer.
"""

from __future__ import annotations

import copyreg
from typing import Any

__all__ = [
    "AckTimeout",
    "ClosedError",
    "Fenced",
    "LimitExceeded",
    "NotConnected",
    "PartialSendError",
    "PeerLost",
    "ProtocolError",
    "RemoteError",
    "SchemaMismatch",
    "Stale",
    "Superseded",
    "WeightSyncError",
]


class WeightSyncError(Exception):
    """Base of every error of this library."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickle without __init__, because some subclasses' parameters differ from ``args``.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class NotConnected(WeightSyncError, RuntimeError):
    """The scheme or bus is not connected yet, or too few workers are connected."""


class ClosedError(WeightSyncError, RuntimeError):
    """This side was shut down, or the sender has shut down."""


class Fenced(WeightSyncError, RuntimeError):
    """A newer process has taken the place of this trainer or worker; this process must stop."""


class AckTimeout(WeightSyncError, TimeoutError):
    """A worker (or the sender) did not answer before the deadline."""


class PeerLost(WeightSyncError):
    """The peer's process has died, has left, or cannot be reached any more."""


class SchemaMismatch(WeightSyncError, ValueError):
    """Weights and model do not fit together: keys, shapes or dtypes differ. Nothing was changed."""


class Stale(WeightSyncError):
    """This receiver is further behind its sender than its limit allows.

    Attributes:
        version: the version that the receiver has.
        lag: how many versions the receiver is behind; None: unknown, because the sender is lost.
    """

    def __init__(self, message: str, version: int, lag: int | None) -> None:
        super().__init__(message)
        self.version = version
        self.lag = lag


class Superseded(WeightSyncError):
    """A version cannot be taken any more, because a newer one has replaced it.

    Attributes:
        version: the newest version that this receiver knows.
    """

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class ProtocolError(WeightSyncError):
    """A message is malformed, of an unknown kind, or not expected now."""


class LimitExceeded(ProtocolError):
    """A message or layout is larger, nested deeper, or has more entries than this side accepts."""


class RemoteError(WeightSyncError):
    """A worker raised an exception.

    Attributes:
        type_name: qualified name of the worker's exception class.
        remote_message: the text of the worker's exception.
        remote_traceback: the worker's formatted traceback, also shown in the message.
    """

    def __init__(self, type_name: str, message: str, remote_traceback: str = "") -> None:
        text = f"{type_name}: {message}"
        if remote_traceback:
            text = f"{text}\n\nThe worker's traceback:\n{remote_traceback}"
        super().__init__(text)
        self.type_name = type_name
        self.remote_message = message
        self.remote_traceback = remote_traceback


class PartialSendError(WeightSyncError):
    """Some of the workers that an update was for have not applied it.

    Not final: a worker that was late, or comes back, still gets its weights.

    Attributes:
        acked: ``{worker_idx: version}`` of the workers that have applied the update, or a newer one.
        failed: ``{worker_idx: exception}`` of the others: :class:`PeerLost`, :class:`AckTimeout`,
            :class:`SchemaMismatch` or :class:`RemoteError`.
    """

    def __init__(self, acked: dict[int, int], failed: dict[int, Exception]) -> None:
        reasons = "; ".join(f"worker {w}: {type(e).__name__}: {e}" for w, e in sorted(failed.items()))
        super().__init__(
            f"{len(failed)} of {len(failed) + len(acked)} workers did not apply the update ({reasons}). "
            f"Applied by: {sorted(acked) or 'none'}."
        )
        self.acked = acked
        self.failed = failed
