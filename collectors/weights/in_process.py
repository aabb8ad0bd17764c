"""Updates of a collector's own models: applied between two of its steps, whichever thread steps."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Mapping
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

Change = concurrent.futures.Future[None]

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


class LocalUpdates:
    """Updates, one after another, each when no step is under way. Each step enters ``gate``."""

    def __init__(self) -> None:
        self.gate = Gate()
        self._changes: deque[tuple[Change, Callable[[], None]]] = deque()

    def apply(self, update: Callable[[], None], timeout: float = DEFAULT_TIMEOUT) -> None:
        """Run ``update`` now, or as soon as the step under way has ended; returns when it has run.

        Raises AckTimeout: the step took longer than ``timeout`` seconds, and nothing was changed; RuntimeError: called
        from within a step, which would wait for itself.
        """
        change = self._offer(update)

        def ended(seconds: float) -> bool:
            return change.done() or bool(concurrent.futures.wait([change], seconds).done)

        try:
            if not interruptibly(ended, timeout) and change.cancel():
                raise _late(timeout)
            while not ended(POLL_SECONDS):  # it is being applied right now
                self.gate.poll()  # if Ctrl-C has ended that half way, perhaps no other thread passes the gate
        finally:
            change.cancel()  # an interrupted caller changes nothing afterwards
        change.result()

    async def apply_async(self, update: Callable[[], None], timeout: float) -> None:
        """:meth:`apply` without blocking the running loop while a step is under way elsewhere."""
        change = self._offer(update)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        change.add_done_callback(lambda _: settle(ended))
        try:
            await asyncio.wait([ended], timeout=timeout)
            if not change.done() and change.cancel():
                raise _late(timeout)
            while not change.done():
                self.gate.poll()
                await asyncio.wait([ended], timeout=POLL_SECONDS)
        finally:
            change.cancel()
        change.result()

    def _offer(self, update: Callable[[], None]) -> Change:
        if self.gate.held_by_caller:
            raise RuntimeError(
                "weights change between two steps, and this is called from within one (by the policy or the "
                "environment): call it from a hook, or from the code that iterates over the collector"
            )
        change: Change = concurrent.futures.Future()
        self._changes.append((change, update))
        # In place of a pending one, which would do the same. Each change has its own end.
        self.gate.offer(self._run, lambda error: None)
        return change

    def _run(self) -> None:
        """Run all updates that wait. By the gate, one thread at a time is here, and no step is under way."""
        while self._changes:
            change, update = self._changes[0]
            # An update that a KeyboardInterrupt struck half way is running still, and is applied again before any step
            # reads the weights; one that was complete is not: its source may be another one by now.
            if change.running() or (not change.done() and change.set_running_or_notify_cancel()):
                try:
                    update()
                except Exception as error:
                    change.set_exception(error)
                else:
                    change.set_result(None)
            self._changes.popleft()


def _late(timeout: float) -> AckTimeout:
    return AckTimeout(f"the step under way did not end within {timeout:g} s; no weights were changed")
