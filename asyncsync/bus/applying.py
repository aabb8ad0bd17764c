"""Applying: how staged updates go through the gate, and what follows when the models have them.

A worker that serves workers of its own passes each update on before it counts as applied: a receiver's context with
``update_policy_weights_`` is called with every update that has gone through the gate, unless its attribute ``cascades``
is false by then: nobody is below it. So the sender's ``send`` returns when the whole tree below has the weights, and a
failure down there is this worker's.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from tensordict import TensorDict

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.link import Link
from asyncsync.bus.observing import ReceiverObserver
from asyncsync.errors import AckTimeout
from asyncsync.fastpath.worker import Show
from asyncsync.model.gate import Gate, Writer
from asyncsync.protocol.holdings import Staging
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.runtime.threads import WorkThread, as_exception
from asyncsync.weights.slab import Slab

GATE_POLL = 0.05
CLEAN_DELAY = 0.002


class Applying:
    """The updates of one receiver, from staged to applied.

    ``manual`` has the models whose updates wait for ``receive`` (``apply="on_receive"``), ``wanted`` those of them that
    somebody is receiving right now. ``show`` is called when models have a version; the transports are cleaned
    afterwards.
    """

    def __init__(
        self,
        link: Link,
        subscriber: Subscriber,
        gate: Gate,
        transports: Mapping[str, Carrier],
        show: Show,
        observer: ReceiverObserver,
    ) -> None:
        self.manual: set[str] = set()
        self.wanted: list[str] = []
        self.cascade = Cascade()
        self._link = link
        self._subscriber = subscriber
        self._gate = gate
        self._transports = transports
        self._show = show
        self._observer = observer
        self._offered: list[Staging] = []  # what the gate has, unless it has done with it
        self._gate_timer: asyncio.TimerHandle | None = None
        self._cleaning: asyncio.TimerHandle | None = None

    def goes_straight(self, models: Iterable[str]) -> bool:
        """Whether updates of these models wait for readers only, and are passed on to nobody."""
        if self.cascade.task is not None or not self.manual.isdisjoint(models):
            return False
        return not self.cascade.concerns(models)

    async def forget(self, model_id: str) -> None:
        """This model takes part no more. When this returns, the gate has done with what it had begun with."""
        self.manual.discard(model_id)
        self.cascade.remove(model_id)
        self._subscriber.unregister(model_id, self._link.loop.time())
        self._link.settle()
        await self._link.wait(lambda: not any(model_id in one.parts for one in self._subscriber.staged), None)

    def close(self) -> None:
        """Nothing more is applied or passed on from here."""
        self.cascade.close()
        for timer in (self._gate_timer, self._cleaning):
            if timer is not None:
                timer.cancel()

    async def leave(self, model_id: str, timeout: float) -> None:
        """Have nothing under way for this model, which then has nothing of the sender's memory. Raises AckTimeout."""
        staged, deadline = self._subscriber.staged, self._link.loop.time() + timeout
        leave = Writer(self._subscriber.models[model_id].leave_slabs, lambda error: None)
        staged.abandon()
        while staged or not self._gate.try_apply(leave):  # what the gate has begun with still goes to the model
            if self._link.loop.time() >= deadline:
                raise AckTimeout(f"cannot replace {model_id!r}: readers or updates used it for {timeout:g} s")
            await asyncio.sleep(GATE_POLL)
            self._link.check()
            staged.abandon()

    def offer(self) -> None:
        """Give the gate what is staged, to be applied in one pass."""
        if self.cascade.task is not None or self._link.closed or self._subscriber.leaving:
            return
        passing = self._ready() if self.manual else self._subscriber.staged.copy()
        if not passing or passing == self._offered:
            return
        self._offered = passing
        later = partial(self._conclude_later, passing)
        update = Writer(partial(self._pass, passing), lambda error: self._link.call_from_thread(later))
        if self._gate.try_apply(update):
            self._conclude(passing)
            return
        self._gate.offer(update.apply, update.done)
        if self._gate.pending and self._gate_timer is None:
            self._gate_timer = self._link.loop.call_later(GATE_POLL, self._poll_gate)

    def _ready(self) -> list[Staging]:
        """What is staged, without what is to wait for ``receive``. An update may go before an older one that waits;
        what both bring, the older one then brings no more."""
        ready: list[Staging] = []
        waiting: list[Staging] = []
        for staging in self._subscriber.staged:
            if self._awaits_receive(staging) and staging not in self._offered:
                waiting.append(staging)
                continue
            for older in waiting:
                older.leave_out(staging.parts)
            ready.append(staging)
        return ready

    def _awaits_receive(self, staging: Staging) -> bool:
        return any(m in self.manual and m not in self.wanted for m in staging.parts)

    def _pass(self, passing: list[Staging]) -> None:
        """Called by the gate, in whatever thread: apply one after the other. One that fails keeps none of the others
        back. After an interrupt the gate calls once more: then what is over already is left out."""
        for staging in passing:
            if not staging.over:
                try:
                    staging.run()
                except Exception as error:
                    staging.error = error
                else:
                    if not staging.abandoned:
                        self._show(staging.epoch, staging.acting)
                staging.over = True

    def _conclude(self, passed: list[Staging]) -> None:
        """The gate has done with these: see to each in turn, how it went."""
        if self._offered is passed:
            self._offered = []
        for staging in passed:
            if staging.heard or staging.abandoned:
                continue
            staging.heard = True
            if staging.error is None and self.cascade.concerns(staging.parts):
                # Nothing newer goes through the gate until those below have this one, and it counts as applied.
                slabs = {model_id: part.slab for model_id, part in staging.parts.items()}
                self.cascade.begin(slabs, partial(self._conclude_later, passed, staging))
                return
            self._finished(staging, staging.error)

    def _conclude_later(
        self, passed: list[Staging], passed_on: Staging | None = None, failure: Exception | None = None
    ) -> None:
        """The same as a callback of the loop, perhaps when one of them was passed on."""
        with self._link.guard():
            if passed_on is not None:
                self._finished(passed_on, failure)
            self._conclude(passed)
            if not self._link.closed:
                self._link.settle()

    def _finished(self, staging: Staging, error: Exception | None) -> None:
        if self._observer.follows:
            self._observer.finished(staging, error)
        if error is not None:
            self._subscriber.failed(staging, error)
            return
        self._subscriber.applied(staging)
        if self._cleaning is None and any(part.slab.leased for part in staging.parts.values()):
            # Not at once: it takes a core for some time, which the sender may need to read the acknowledgement.
            self._cleaning = self._link.loop.call_later(CLEAN_DELAY, self._clean)

    def _clean(self) -> None:
        self._cleaning = None
        if not self._link.closed:
            for transport in set(self._transports.values()):
                transport.clean_slots()

    def _poll_gate(self) -> None:
        # Readers that ended abnormally never leave: find them while an update waits.
        self._gate_timer = None
        if self._gate.pending and not self._link.closed:
            self._gate.poll()
            if self._gate.pending:
                self._gate_timer = self._link.loop.call_later(GATE_POLL, self._poll_gate)

    def withdraw(self) -> None:
        """Nobody receives any more: a manual update that the gate has not begun with waits again."""
        if any(map(self._awaits_receive, self._offered)) and self._gate.withdraw():
            self._offered = []
            if not self._link.closed:
                self._link.settle()  # for the others


class Cascade:
    """The contexts of a receiver's models. While ``task`` is not None, it passes one update on.

    An ordinary ``update_policy_weights_`` runs on a daemon thread, because it may block: it typically sends with
    another scheme, whose loop thread must stay free. A coroutine function runs as a task of the loop.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._contexts: dict[str, Any] = {}
        self._thread = WorkThread("asyncsync-cascade")
        self._closed = False

    def add(self, model_id: str, context: Any) -> None:
        """Pass a model's updates on to this context, if it takes them."""
        if callable(getattr(context, "update_policy_weights_", None)):
            self._contexts[model_id] = context

    def remove(self, model_id: str) -> None:
        """Pass on no more of its updates."""
        self._contexts.pop(model_id, None)

    def concerns(self, models: Iterable[str]) -> bool:
        """Whether one of these models is passed on."""
        return bool(self._contexts) and not self._closed and any(_has_workers(self._contexts.get(m)) for m in models)

    def begin(self, slabs: Mapping[str, Slab], then: Callable[[Exception | None], None]) -> None:
        """Pass one update on; ``then`` is called on the loop with what ``update_policy_weights_`` raised, or None. Each
        context is called once, with TensorDicts of its own. The slabs must stay as they are until ``then``."""
        self.task = asyncio.get_running_loop().create_task(self._run(slabs, then))

    async def _run(self, slabs: Mapping[str, Slab], then: Callable[[Exception | None], None]) -> None:
        failure: Exception | None = None
        try:
            contexts = {id(c): c for m in slabs if _has_workers(c := self._contexts.get(m))}
            for context in contexts.values():
                await self._pass_on(context, {m: s for m, s in slabs.items() if self._contexts.get(m) is context})
        except BaseException as error:
            if self._closed:
                raise
            failure = as_exception(error)  # a CancelledError is the user's own
        self.task = None
        then(failure)

    async def _pass_on(self, context: Any, slabs: Mapping[str, Slab]) -> None:
        function = context.update_policy_weights_
        if inspect.iscoroutinefunction(function):
            await _call(function, await self._thread.submit(lambda: _copies(slabs)))
            return

        def call() -> Any:
            try:
                return _call(function, _copies(slabs))
            except BaseException as error:
                raise as_exception(error)  # noqa: B904 - it has its cause

        result = await self._thread.submit(call)
        if inspect.isawaitable(result):  # an ordinary function that returns a coroutine
            await result

    def close(self) -> None:
        """Cancel what is under way. The thread ends as soon as the user's code lets it; nobody waits for that."""
        self._closed = True
        if self.task is not None:
            self.task.cancel()
        self._thread.abandon()


def _has_workers(context: Any) -> bool:
    # Read at each update: a collector may be given its workers later.
    return context is not None and bool(getattr(context, "cascades", True))


def _copies(slabs: Mapping[str, Slab]) -> dict[str, TensorDict]:
    return {model_id: slab.copy().weights() for model_id, slab in slabs.items()}


def _call(function: Any, weights: dict[str, TensorDict]) -> Any:
    if len(weights) > 1:
        return function(weights_dict=weights)
    [(model_id, only)] = weights.items()
    return function(only, model_id=model_id)
