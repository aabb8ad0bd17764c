"""Updates of a collector's own models: applied between two of its steps, whichever thread steps."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.errors import AckTimeout
from asyncsync.model.binding import Binding
from asyncsync.model.gate import Gate
from asyncsync.model.strategy import WeightStrategy, flat_weights
from asyncsync.model.update import Prepared
from asyncsync.runtime.threads import interruptibly, settle

__all__ = ["LocalUpdates", "fitted"]


POLL_SECONDS = 0.05


def fitted(model: Any, source: Any) -> Prepared | None:
    """What copies these weights into the model, checked; None: the model is their source itself. Raises
    SchemaMismatch."""
    if source is model:
        return None
    is_state_dict = isinstance(source, Mapping) and not isinstance(source, TensorDictBase)
    strategy = WeightStrategy("state_dict" if is_state_dict else "tensordict")
    prepared = Binding(model, strategy).prepare_flat(flat_weights(strategy, source))
    prepared.resolve()
    return prepared


class _Change:
    __slots__ = ("apply", "begun", "ended", "error", "over")

    def __init__(self, apply: Callable[[], None], ended: Callable[[], object]) -> None:
        self.apply = apply
        self.ended = ended
        self.begun = False
        self.over = False
        self.error: Exception | None = None


class LocalUpdates:
    """Updates, one after another, each when no step is under way. Each step enters ``gate``."""

    def __init__(self) -> None:
        self.gate = Gate()
        self._changes: deque[_Change] = deque()
        self._lock = threading.Lock()

    def apply(self, update: Callable[[], None], timeout: float = DEFAULT_TIMEOUT) -> None:
        """Run ``update`` now, or as soon as the step under way has ended; returns when it has run.

        Raises AckTimeout: the step took longer than ``timeout`` seconds, and nothing was changed; RuntimeError: called
        from within a step, which would wait for itself.
        """
        ended = threading.Event()
        change = self._offer(update, ended.set)
        try:
            if not interruptibly(ended.wait, timeout) and self._withdraw(change):
                raise _late(timeout)
            while not ended.wait(POLL_SECONDS):  # it is being applied right now
                self.gate.poll()  # if Ctrl-C has ended that half way, perhaps no other thread passes the gate
        except BaseException:
            self._withdraw(change)  # an interrupted caller changes nothing afterwards
            raise
        if change.error is not None:
            raise change.error

    async def apply_async(self, update: Callable[[], None], timeout: float) -> None:
        """:meth:`apply` without blocking the running loop while a step is under way elsewhere."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        change = self._offer(update, partial(settle, ended))
        try:
            await asyncio.wait([ended], timeout=timeout)
            if not ended.done() and self._withdraw(change):
                raise _late(timeout)
            while not (await asyncio.wait([ended], timeout=POLL_SECONDS))[0]:
                self.gate.poll()
        except asyncio.CancelledError:
            self._withdraw(change)
            raise
        if change.error is not None:
            raise change.error

    def _offer(self, update: Callable[[], None], ended: Callable[[], object]) -> _Change:
        if self.gate.held_by_caller:
            raise RuntimeError(
                "weights change between two steps, and this is called from within one (by the policy or the "
                "environment): call it from a hook, or from the code that iterates over the collector"
            )
        change = _Change(update, ended)
        with self._lock:
            self._changes.append(change)
        # In place of a pending one, which would do the same. Each change has its own end.
        self.gate.offer(self._run, lambda error: None)
        return change

    def _run(self) -> None:
        """Run all updates that wait. By the gate, one thread at a time is here, and no step is under way."""
        while True:
            with self._lock:
                if not self._changes:
                    return
                change = self._changes[0]
                change.begun = True
            # An update that a KeyboardInterrupt struck half way is applied again before any step reads the weights; one
            # that was complete is only reported again: its source may be another one by now.
            if not change.over:
                try:
                    change.apply()
                except Exception as raised:
                    change.error = raised
                change.over = True
            change.ended()
            self._changes.popleft()

    def _withdraw(self, change: _Change) -> bool:
        """Withdraw an update, unless it has begun; whether that was in time."""
        with self._lock:
            if change.begun:
                return False
            if change in self._changes:
                self._changes.remove(change)
            return True


def _late(timeout: float) -> AckTimeout:
    return AckTimeout(f"the step under way did not end within {timeout:g} s; no weights were changed")
