"""Applying: how staged updates go through a worker's gate, and what its callers wait for.

A worker that serves workers of its own passes each update on before it counts as applied: a receiver's context with
``update_policy_weights_`` is called with every update that has gone through the gate, unless its attribute ``cascades``
is false by then: nobody is below it. So the sender's ``send`` returns when the whole tree below has the weights, and a
failure down there is this worker's.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensordict import TensorDict

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.link import Link
from asyncsync.bus.status import WorkerObserver
from asyncsync.bus.steady import Show
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, PeerLost, Superseded, WeightSyncError
from asyncsync.model.gate import Gate, Writer
from asyncsync.protocol.holdings import Acting, Staging, Taken
from asyncsync.protocol.worker import Worker
from asyncsync.runtime.threads import WorkThread, as_exception
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Epoch, epoch_text

GATE_POLL = 0.05
CLEAN_DELAY = 0.002
REQUEST_AGAIN = 1.0

Mark = tuple[Epoch, int]
"""(epoch, version): where a worker is in the sequence of updates."""


@dataclass(eq=False)
class Applying:
    """The updates of one worker, from staged to applied, and its callers, who wait for them.

    ``manual`` has the models whose updates wait for ``receive`` (``apply="on_receive"``), ``wanted`` those of them that
    somebody is receiving right now; ``copying`` counts the copies that are being made of received slabs. ``show`` is
    called when models have a version; the transports are cleaned afterwards. ``unanswered`` returns why there is no
    connection, ``acting`` what models show.
    """

    _link: Link
    _machine: Worker
    _gate: Gate
    _transports: Mapping[str, Carrier]
    _observer: WorkerObserver
    _show: Show
    _acting: Callable[[Iterable[str]], Acting]
    _unanswered: Callable[[], str]
    manual: set[str] = field(default_factory=set)
    wanted: list[str] = field(default_factory=list)
    copying: int = 0
    cascade: Cascade = field(default_factory=lambda: Cascade())
    _offered: list[Staging] = field(default_factory=list)  # what the gate has, unless it has done with it
    _gate_timer: asyncio.TimerHandle | None = None
    _cleaning: asyncio.TimerHandle | None = None

    # -- through the gate ----------------------------------------------------------------------------------------------

    def goes_straight(self, models: Iterable[str]) -> bool:
        """Whether updates of these models wait for readers only, and are passed on to nobody."""
        if self.cascade.task is not None or not self.manual.isdisjoint(models):
            return False
        return not self.cascade.concerns(models)

    async def forget(self, model_id: str) -> None:
        """This model takes part no more. When this returns, the gate has done with what it had begun with."""
        self.manual.discard(model_id)
        self.cascade.remove(model_id)
        self._machine.unregister(model_id, self._link.loop.time())
        self._link.settle()
        await self._link.wait(lambda: not any(model_id in one.parts for one in self._machine.staged), None)

    def close(self) -> None:
        """Nothing more is applied or passed on from here."""
        self.cascade.close()
        for timer in (self._gate_timer, self._cleaning):
            if timer is not None:
                timer.cancel()

    async def leave(self, model_id: str, timeout: float) -> None:
        """Have nothing under way for this model, which then has nothing of the trainer's memory. Raises AckTimeout."""
        staged, deadline = self._machine.staged, self._link.loop.time() + timeout
        leave = Writer(self._machine.models[model_id].leave_slabs, lambda error: None)
        staged.abandon()
        while staged or not self._gate.try_apply(leave):  # what the gate has begun with still goes to the model
            if self._link.loop.time() >= deadline:
                raise AckTimeout(f"cannot replace {model_id!r}: readers or updates used it for {timeout:g} s")
            await asyncio.sleep(GATE_POLL)
            self._link.check()
            staged.abandon()

    def offer(self) -> None:
        if self.cascade.task is not None or self._link.closed or self._machine.leaving:
            return
        passing = self._ready() if self.manual else self._machine.staged.copy()
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
        for staging in self._machine.staged:
            if self._awaits_receive(staging) and staging not in self._offered:
                waiting.append(staging)
                continue
            for older in waiting:
                older.leave_out(staging.parts)
            ready.append(staging)
        return ready

    def _awaits_receive(self, staging: Staging) -> bool:
        takes = self._machine.takes
        return any(m in self.manual and (takes or m not in self.wanted) for m in staging.parts)

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
            self._machine.failed(staging, error)
            return
        self._machine.applied(staging)
        self._clean_soon(staging)

    def _clean_soon(self, staging: Staging) -> None:
        if self._cleaning is None and any(part.slab.leased for part in staging.parts.values()):
            # Not at once: it takes a core for some time, which the trainer may need to read the acknowledgement.
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

    # -- taken by the user's code --------------------------------------------------------------------------------------

    def waiting(self, models: Iterable[str]) -> dict[str, Any]:
        """What a status says of versions that are not applied yet."""
        machine = self._machine
        ready = [*machine.staged, *([] if machine.held is None else [machine.held])]
        taken = [] if machine.taken is None else [machine.taken.staging]
        errors = [str(machine.holdings.error[m][1]) for m in models if m in machine.holdings.error]

        def newest(of: list[Staging]) -> int:
            return max([v for one in of for m, v in one.versions.items() if m in models], default=0)

        return {"staged": newest(ready), "taken": newest(taken), "failure": "".join(errors[-1:])}

    async def take(self, model_id: str, version: int | None, epoch: str | None, timeout: float) -> Taken:
        """Wait for a version of this model, and lend it to the user's code until :meth:`give_back`. Raises AckTimeout;
        Superseded: it was replaced; RuntimeError: one is taken already; SchemaMismatch or the like: it cannot be got
        ready here; ClosedError, Fenced: it will not come."""
        machine, session = self._machine, self._machine.session

        def is_here() -> bool:
            now = epoch_text(session.epoch)
            if machine.taken is not None or (epoch in (None, now) and machine.has(model_id, version)):
                return True
            self._here([model_id])
            if epoch is not None and epoch < now:
                newest = machine.targets.get(model_id, 0)
                raise Superseded(f"epoch {epoch} is over: the sender's is {now}, at version {newest}", newest)
            is_to_come = epoch is not None and epoch > now
            if not is_to_come and (never := machine.cannot_take(model_id, version)) is not None:
                raise never
            self._check_ended()
            if not is_to_come:
                self._check_refused(model_id)
            return False

        machine.check_again(model_id, self._link.loop.time())
        self._link.settle()
        if not await self._link.wait(is_here, timeout):
            what = "a new version" if version is None else f"version {version}"
            raise AckTimeout(
                f"worker {machine.worker} could not take {what} of {model_id!r} within {timeout:g} s: "
                f"{self._why_not_here(model_id, version, epoch)}"
            )
        taken = machine.take(model_id, version)
        if self._observer.follows:
            self._observer.taken(taken.staging)
        return taken

    def give_back(self, taken: Taken, error: BaseException | None, *, unused: bool = False) -> None:
        """The user's code is done with a version: it has applied it, or could not; ``unused``: it never had it. Raises
        ClosedError: this worker was shut down meanwhile; PeerLost: another trainer's epoch has begun; neither where
        there is an ``error``."""
        machine, staging = self._machine, taken.staging
        if error is None and not (unused or self._link.closed or taken.is_applied):
            self._show(staging.epoch, staging.acting)
        counts = machine.give_back(taken, error, unused=unused)
        if self._link.closed:
            if error is None and not unused:
                raise ClosedError("this scheme was shut down while a version was taken")
            return
        if self._observer.follows and not unused:
            self._observer.finished(staging, None if error is None else as_exception(error))
        self._clean_soon(staging)
        self._link.settle()
        if error is None and not (unused or counts):
            now = epoch_text(machine.session.epoch)
            raise PeerLost(
                f"version {max(staging.versions.values())} was of epoch {epoch_text(staging.epoch)}, whose sender is "
                f"gone: another one has begun epoch {now}. What was taken is applied; take what there is now"
            )

    def _why_not_here(self, model_id: str, version: int | None, epoch: str | None) -> str:
        machine = self._machine
        if epoch is not None and epoch != (now := epoch_text(machine.session.epoch)):
            return f"the sender's epoch is {now or 'not known yet'}, not {epoch}"
        if machine.held is not None and version == machine.held.versions.get(model_id):
            return "it is staged, and waits for the sender's commit"
        if machine.session.welcomed and model_id in machine.session.served:
            target = machine.targets.get(model_id, 0)
            return f"the sender has said that there is version {target}" if target else "the sender has published none"
        return self._why(model_id)

    # -- what callers wait for -----------------------------------------------------------------------------------------
    #
    # Unless they say otherwise, these raise AckTimeout at their timeout; SchemaMismatch, RemoteError or the like if
    # what they wait for could not be applied here; ClosedError or Fenced if it will not come.

    def mark(self, model_id: str) -> Mark | None:
        """Epoch and version of the newest applied update of a model."""
        held = self._machine.holdings.held.get(model_id)
        return None if held is None else (held[0], held[1])

    @contextmanager
    def _wanted(self, *models: str) -> Iterator[None]:
        """Somebody receives these models' updates: those that wait for that go through the gate."""
        self.wanted += models
        try:
            yield
        finally:
            for model_id in models:
                self.wanted.remove(model_id)
            self.withdraw()

    def _here(self, models: Iterable[str]) -> list[str]:
        """Those of these models that take part. Raises ClosedError: the schemes of all of them were shut down."""
        if here := [model_id for model_id in models if model_id in self._machine.models]:
            return here
        raise ClosedError("this scheme was shut down")

    async def connected(self, model_id: str, timeout: float, deadline: float) -> None:
        """Wait for the trainer's welcome, and for the initial weights if it has any, until ``deadline``, by the loop's
        clock, which the caller gave as ``timeout``. A worker that takes its updates asks which version there is at the
        root of the tree instead. Raises NotConnected if no trainer has come in time, or it turned this worker away."""
        machine, session = self._machine, self._machine.session

        def is_settled() -> bool:
            self._here([model_id])
            # The trainer may have taken its weights back since then, and left, because they do not fit.
            if not machine.holdings.version(model_id):
                self._check_refused(model_id)
            if machine.settled(model_id):
                return True
            self._check_ended()
            self._check_refused(model_id)
            if not machine.takes:  # it can be taken again
                self._check_failed(model_id)
            return False

        if model_id not in session.refused or machine.holdings.version(model_id):
            self._check_ended()
        machine.check_again(model_id, self._link.loop.time())
        self._check_refused(model_id)  # the trainer's layout has not fitted, and does not by now
        with self._wanted(model_id):
            self._link.settle()
            in_time = await self._link.wait(is_settled, max(0.0, deadline - self._link.loop.time()))
            if in_time and machine.takes:
                asked = session.request(root=True)

                def answered() -> bool:
                    return session.answered(asked, root=True) or session.ended is not None

                in_time = await self._requesting(answered, deadline, root=True)
        if not in_time:
            raise NotConnected(
                f"worker {machine.worker} is not connected after {timeout:g} s: "
                f"{self._why(model_id)}. connect() may be called again"
            )
        is_settled()  # it may have come to its end meanwhile

    def _check_ended(self) -> None:
        if (ended := self._machine.session.ended) is not None:
            raise _again(ended)

    def _check_refused(self, model_id: str) -> None:
        if (refusal := self._machine.session.refused.get(model_id)) is not None:
            raise _again(refusal)

    def _check_failed(self, model_id: str, version: int = 0) -> None:
        """Raise why this version of a model, or a newer one, could not be applied, if one could not."""
        failed, error, where = self._machine.holdings.error.get(model_id, (-1, None, None))
        if error is not None and failed >= version:
            raise error.with_traceback(where)  # without the frames of those that it has been raised to before

    def _has(self, model_id: str, version: int) -> bool:
        """Whether a model holds this version, or a newer one. Raises why it will not, if so."""
        if self._machine.holdings.version(model_id) >= version:
            return True
        self._check_ended()
        self._check_refused(model_id)
        self._check_failed(model_id, version)
        return False

    def _why(self, model_id: str) -> str:
        machine = self._machine
        if not machine.session.online:
            return self._unanswered()
        if not machine.session.welcomed:
            return "the sender has not answered yet"
        if model_id not in machine.session.served:
            served = sorted(machine.session.served)
            return f"the sender serves {served}, not {model_id!r}; use one model_id on both sides"
        if self._gate.pending:
            return f"an update waits for {self._gate.readers} reader(s) to finish (a hold() or a forward)"
        if self._machine.takes:
            return "the sender, or the root of its tree of relays, has not said which version there is"
        return "its initial weights have not arrived; the sender waits until every worker has connected"

    async def receive(self, model_id: str, after: Mark | None, timeout: float | None) -> Mark | None:
        """The mark of an applied update newer than ``after``; None when the timeout expires, also if an update could
        not be applied."""

        def is_newer() -> bool:
            mark = self.mark(model_id)
            if mark is not None and (after is None or mark > after):
                return True
            self._here([model_id])
            self._check_ended()
            return False

        with self._wanted(model_id):
            self._link.settle()
            found = await self._link.wait(is_newer, timeout)
        return self.mark(model_id) if found else None

    async def current(self, model_id: str, timeout: float) -> Mark:
        """Request what this worker should have, and wait until it has that."""
        machine, session = self._machine, self._machine.session
        deadline = self._link.loop.time() + timeout
        machine.check_again(model_id, self._link.loop.time())
        with self._wanted(model_id):
            first = session.request()

            def is_current() -> bool:
                self._here([model_id])
                self._check_ended()
                if not session.answered(first):  # what does not fit may have been taken back by now
                    return False
                if (mismatch := session.mismatch(model_id)) is not None:
                    raise _again(mismatch)
                target = machine.targets.get(model_id, 0)
                if target and machine.holdings.version(model_id) < target:
                    self._check_failed(model_id, target)
                    return False
                return target > 0

            if not await self._requesting(is_current, deadline):
                raise AckTimeout(
                    f"worker {machine.worker} could not fetch {model_id!r} within {timeout:g} s: {self._why(model_id)}"
                )
        mark = self.mark(model_id)
        assert mark is not None
        return mark

    async def _requesting(self, done: Callable[[], bool], deadline: float, *, root: bool = False) -> bool:
        """Wait, and repeat what was requested, as it may get lost; False: ``done`` does not hold by the deadline."""
        while True:
            self._link.settle()
            remaining = deadline - self._link.loop.time()
            if await self._link.wait(done, max(0.0, min(REQUEST_AGAIN, remaining))):
                return True
            if remaining <= 0:
                return False
            self._machine.session.request(root=root)

    async def reach(self, model_id: str, version: int, timeout: float, others: Iterable[str] = ()) -> Mark:
        """Wait until this model has this version, or a newer one. What waits for ``receive`` is applied; of several
        models that switch together, the ``others`` must be named."""

        def is_reached() -> bool:
            self._here([model_id])
            return self._has(model_id, version)

        with self._wanted(model_id, *others):
            self._link.settle()
            if await self._link.wait(is_reached, timeout):
                mark = self.mark(model_id)
                assert mark is not None
                return mark
        raise AckTimeout(
            f"worker {self._machine.worker} was called for version {version} of {model_id!r}, which did not arrive "
            f"within {timeout:g} s: {self._why(model_id)}"
        )

    async def wait_version(self, version: int, models: list[str], timeout: float) -> None:
        """Wait until this worker has applied this version, or a newer one, of all these models that are to have it."""
        machine = self._machine

        def are_applied() -> bool:
            wanted = [m for m in self._here(models) if machine.targets.get(m, 0) >= version]
            lacking = [m for m in wanted if not self._has(m, version)]
            if not lacking and any(machine.targets.get(m, 0) >= version for m in models):
                return True
            self._check_ended()
            return False

        if not await self._link.wait(are_applied, timeout):
            have = {m: machine.holdings.version(m) for m in models}
            raise AckTimeout(
                f"worker {machine.worker} had not applied version {version} after {timeout:g} s; it has {have}"
            )

    async def wait_lag(self, models: list[str], max_lag: int, timeout: float) -> int:
        """Request what this worker should have, and wait until each of these models is at most so many versions behind
        that; returns the oldest of their versions."""
        machine, session, holdings = self._machine, self._machine.session, self._machine.holdings
        deadline = self._link.loop.time() + timeout
        least: dict[str, int] = {}
        first, epoch = session.request(root=True), session.epoch

        def is_near() -> bool:
            self._check_ended()
            if session.epoch != epoch:
                return True  # another trainer, which counts anew: it is to be asked
            if not least and session.answered(first, root=True):
                least.update({m: machine.targets.get(m, 0) - max_lag for m in models})
            for model_id in least.keys() - self._here(models):
                del least[model_id]
            for model_id, version in least.items():
                if (mismatch := session.mismatch(model_id)) is not None:
                    raise _again(mismatch)
                if holdings.version(model_id) < version:
                    self._check_failed(model_id, version)
            return bool(least) and all(holdings.version(m) >= v for m, v in least.items())

        with self._wanted(*models):
            while await self._requesting(is_near, deadline, root=True):
                if session.epoch == epoch:
                    return min(holdings.version(m) for m in least)
                least.clear()
                first, epoch = session.request(root=True), session.epoch
        asked = f", and it should have {least}" if least else "; the sender has not answered"
        have = {m: holdings.version(m) for m in models}
        raise AckTimeout(
            f"worker {machine.worker} was more than {max_lag} versions behind for {timeout:g} s: it has {have}{asked}"
        )

    async def wait_origin(self, version: int, models: Iterable[str], timeout: float) -> None:
        """Wait until these models show at least this version of the tree's root, whatever could not be applied."""
        models = list(models)

        def has_acted() -> bool:
            if self._acting(models).origin >= version:
                return True
            self._check_ended()
            return False

        if not await self._link.wait(has_acted, timeout):
            raise AckTimeout(
                f"worker {self._machine.worker} did not act with version {version} within {timeout:g} s, but with "
                f"{self._acting(models).origin}"
            )

    async def copy(self, model_id: str, then: Callable[[Slab], Any]) -> Any:
        """Run ``then`` on a copy of the newest applied slab, which the caller owns."""
        held = self._machine.holdings.held.get(model_id)
        assert held is not None
        slab = held[2].retain()
        self.copying += 1
        try:
            return then(await self._link.run(slab.copy, slab.nbytes))
        finally:
            self.copying -= 1
            slab.release()
            if slab.leased and not self._link.closed:
                self._link.settle()  # the trainer may be waiting for it


def _again(error: WeightSyncError) -> WeightSyncError:
    """A fresh exception with the same message: raising one object from several places would pile up tracebacks."""
    return type(error)(*error.args)


class Cascade:
    """The contexts of a worker's models. While ``task`` is not None, it passes one update on.

    An ordinary ``update_policy_weights_`` runs on a daemon thread, because it may block: it typically sends with
    another scheme, whose loop thread must stay free. A coroutine function runs as a task of the loop.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._contexts: dict[str, Any] = {}
        self._thread = WorkThread("asyncsync-cascade")
        self._closed = False

    def add(self, model_id: str, context: Any) -> None:
        if callable(getattr(context, "update_policy_weights_", None)):
            self._contexts[model_id] = context

    def remove(self, model_id: str) -> None:
        self._contexts.pop(model_id, None)

    def concerns(self, models: Iterable[str]) -> bool:
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
