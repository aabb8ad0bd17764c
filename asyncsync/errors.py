"""Everything asyncsync raises on its own account: one small, flat family.

Each class is named after the state that it reports, and each message says what happened, to which model and worker,
and what to do about it. Where TorchRL documents a built-in type (RuntimeError, ValueError), the class is also of that
type. All of them survive pickling, so a worker's failure can travel to the trainer.
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
        # Without __init__, which takes other arguments than those that a base class keeps.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class NotConnected(WeightSyncError, RuntimeError):
    """The scheme or bus has no connection yet, or too few workers are there."""


class ClosedError(WeightSyncError, RuntimeError):
    """This side was shut down, or the sender said goodbye."""


class Fenced(WeightSyncError, RuntimeError):
    """A newer process has become this trainer or worker; this one must stop."""


class AckTimeout(WeightSyncError, TimeoutError):
    """A deadline passed before a worker (or the sender) had answered."""


class PeerLost(WeightSyncError):
    """The peer's process has died, has left, or cannot be reached any more."""


class SchemaMismatch(WeightSyncError, ValueError):
    """Weights and model do not fit together: keys, shapes or dtypes differ. Nothing was changed."""


class Stale(WeightSyncError):
    """This receiver is further behind its sender than it may be.

    Attributes:
        version: what it has.
        lag: how many versions that is behind; None: the sender is lost, and cannot be asked.
    """

    def __init__(self, message: str, version: int, lag: int | None) -> None:
        super().__init__(message)
        self.version = version
        self.lag = lag


class Superseded(WeightSyncError):
    """A version cannot be taken any more: a newer one has replaced it.

    Attributes:
        version: the newest that this receiver knows of instead.
    """

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class ProtocolError(WeightSyncError):
    """A message that is malformed, of an unknown kind, or out of place."""


class LimitExceeded(ProtocolError):
    """A message or layout larger, deeper or with more entries than this side accepts."""


class RemoteError(WeightSyncError):
    """An exception in a worker.

    Attributes:
        type_name: qualified name of the worker's exception class.
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
    """An update did not reach every worker it was meant for.

    Not final: a worker that was late, or comes back, still gets its weights.

    Attributes:
        acked: ``{worker_idx: version}`` of the workers that have applied the update (or a newer one).
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
