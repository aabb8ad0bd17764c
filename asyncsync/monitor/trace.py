"""The life of a version, as events: each hook, ``trace(event, info)``, is called with every one.

A trainer tells ``publish.*`` of a version, and ``deliver.*`` of a version and a worker; a worker tells ``update.*``.
While nothing listens, the bus asks once per update whether anything does, and that is all.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncsync.monitor.options import Hook

logger = logging.getLogger("asyncsync")

KEPT = 64  # lives that are followed at once: a worker that is stopped never ends its own


@dataclass
class Life:
    """One publication of a trainer's, or one update of a worker's. ``info`` is in each of its events; ``unanswered``
    has the workers that were told of it and have not applied it, with the serial of what told them; ``awaited`` is a
    worker that was found to be without it."""

    info: dict[str, Any]
    began: int = field(default_factory=time.time_ns)
    was_announced: bool = False
    is_staged: bool = False
    unanswered: dict[int, int] = field(default_factory=dict)
    awaited: int | None = None


class Observer(ABC):
    """Tells the hooks, and the debug log while it is on. ``lives`` has what is not over: in the trainer by version, in
    a worker by serial."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.lives: dict[int, Life] = {}
        self._hooks = list(hooks)

    @property
    def follows(self) -> bool:
        """Whether anything wants each step: the fast path, which tells none, is off then."""
        return bool(self._hooks) or logger.isEnabledFor(logging.DEBUG)

    def tell(self, event: str, life: Life, at: int | None = None, **more: Any) -> None:
        if not (hooks := [*self._hooks, debug_log] if logger.isEnabledFor(logging.DEBUG) else self._hooks):
            return
        at = at or time.time_ns()
        info = {**life.info, **more, "time": at, "seconds": (at - life.began) / 1e9}
        for hook in hooks:
            try:
                hook(event, info)
            except Exception:  # what watches an update must not end it
                self._hooks = [other for other in self._hooks if other is not hook]
                logger.exception("the trace hook %r failed at %s; it is not called again", hook, event)

    def follow(self, key: int, life: Life) -> None:
        self.lives[key] = life
        while len(self.lives) > KEPT:
            self.end(next(iter(self.lives)), f"it is not over, and {KEPT} newer ones have come")

    @abstractmethod
    def end(self, key: int, failure: str = "") -> None:
        """Tell that a life is over; ``failure``: why it was not applied."""

    def close(self) -> None:
        for key in list(self.lives):
            self.end(key, "the bus was shut down")


def debug_log(event: str, info: dict[str, Any]) -> None:
    """The hook for the debug log."""
    words = [f"{name} {info[name]}" for name in ("version", "models", "worker", "nbytes") if name in info]
    why = f": {info['error']}" if info.get("error") else ""
    logger.debug("%s: %s, %.2f ms%s", event, ", ".join(words), 1000 * info["seconds"], why)
