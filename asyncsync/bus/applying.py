"""Applying: how staged updates go through a worker's gate, and what the worker's callers wait for.

A worker may serve workers of its own. If a receiver's context has ``update_policy_weights_``, this is called with each
update that has gone through the gate, and the update counts as applied only afterwards. So the sender's ``send``
returns when the whole tree below has the weights, and a failure in the tree is this worker's failure. A context whose
attribute ``cascades`` is false at that time has no workers below it, and is not called.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.link import Link
from asyncsync.bus.status import WorkerObserver
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, PeerLost, Superseded, WeightSyncError
from asyncsync.model.gate import Gate, Writer
from asyncsync.net.rendezvous import SenderConnection
from asyncsync.protocol.holdings import Acting, StagedPart, Staging, Taken
from asyncsync.protocol.worker import Worker
from asyncsync.runtime.threads import WorkThread, as_exception, call_soon
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Epoch, epoch_text

# In seconds.
GATE_POLL = 0.05
CLEAN_DELAY = 0.002
REQUEST_AGAIN = 1.0

Mark = tuple[Epoch, int]
"""(epoch, version); a later update has a higher one."""


class Applying(Link):
    """The half of a worker's link that applies staged updates, and on which its callers wait for them.

    ``shown`` has what each model's readers see: epoch, version, the version at the tree's root that this one stands for
    (without a tree, the same), and metadata. It changes together with the model, under the gate. ``manual`` has the
    models whose updates wait for ``receive`` (``apply="on_receive"``) or ``take``; ``receiving`` those of them for
    which a caller waits right now; ``copying`` counts the copies of applied slabs that are being made. ``contexts``
    has those with ``update_policy_weights_``, by model; ``passing_on`` is the task that passes an update on to them.
    """

    connection: SenderConnection  # of the trainer

    def __init__(self, machine: Worker, gate: Gate, observer: WorkerObserver) -> None:
        super().__init__("asyncsync-copy")
        self.machine = machine
        self.gate = gate
        self.observer: WorkerObserver = observer
        self.transports: dict[str, Carrier] = {}  # by model
        self.shown: dict[str, tuple[Epoch, int, int, bytes]] = {}
        self.manual: set[str] = set()
        self.receiving: list[str] = []
        self.copying = 0
        self.contexts: dict[str, Any] = {}
        self.passing_on: asyncio.Task[None] | None = None
        self._cascade_thread = WorkThread("asyncsync-cascade")
        self.answering: asyncio.Task[None] | None = None  # to the trainer's question what the models hold
        self._offered: list[Staging] = []  # the updates that the gate was given and has not finished
        self._gate_timer: asyncio.TimerHandle | None = None
        self._cleaning: asyncio.TimerHandle | None = None

    # -- what models show ----------------------------------------------------------------------------------------------

    def show(self, epoch: Epoch, parts: Mapping[str, StagedPart]) -> None:
        """The models have these versions now. Called under the gate, so a reader sees the version that it reads."""
        # A new dict, because other threads may be reading the old one, and a relay compares the two by identity.
        self.shown = self.shown | {
            m: (epoch, p.version, p.version if p.origin is None else p.origin, p.metadata) for m, p in parts.items()
        }

    def newest_shown(self, models: Iterable[str]) -> Acting:
        """The newest that any of these models shows; its version is 0 if there is none. May be called in any thread."""
        shown = self.shown
        none: tuple[Epoch | None, int, int, bytes] = (None, 0, 0, b"")
        return Acting(*max([shown[model_id] for model_id in models if model_id in shown], default=none)[1:])

    # -- through the gate ----------------------------------------------------------------------------------------------

    def needs_only_gate(self, model_id: str) -> bool:
        """Whether updates of this model wait for nothing but the gate, and are passed on to no other workers."""
        is_passed_on = self.contexts and self._active_contexts((model_id,))
        return self.passing_on is None and model_id not in self.manual and not is_passed_on

    def _offer_to_gate(self) -> None:
        if self.passing_on is not None or self.closed or self.machine.leaving:
            return
        offered = self._ready_for_gate() if self.manual else self.machine.staged.copy()
        if not offered or offered == self._offered:
            return
        self._offered = offered
        later = partial(self._report_results_on_loop, offered)
        update = Writer(partial(self._apply_all, offered), lambda error: call_soon(self.loop, later))
        if self.gate.try_apply(update):
            self._report_results(offered)
            return
        self.gate.offer(update.apply, update.done)
        if self.gate.pending and self._gate_timer is None:
            self._gate_timer = self.loop.call_later(GATE_POLL, self._poll_gate)

    def _ready_for_gate(self) -> list[Staging]:
        """The staged updates that need not wait for ``receive``. If such an update is newer than one that waits, it
        goes first, and models that are in both are taken out of the older one."""
        ready: list[Staging] = []
        waiting: list[Staging] = []
        for staging in self.machine.staged:
            if self._awaits_receive(staging) and staging not in self._offered:
                waiting.append(staging)
                continue
            for older in waiting:
                older.leave_out(staging.parts)
            ready.append(staging)
        return ready

    def _awaits_receive(self, staging: Staging) -> bool:
        takes = self.machine.takes
        return any(m in self.manual and (takes or m not in self.receiving) for m in staging.parts)

    def _apply_all(self, offered: list[Staging]) -> None:
        """Apply these updates, one after the other; if one fails, go on with the next. The gate calls this in any
        thread, and again after an interrupt: then the updates that are over already are skipped."""
        for staging in offered:
            if not staging.over:
                try:
                    staging.run()
                except Exception as error:
                    staging.error = error
                else:
                    if not staging.abandoned:
                        self.show(staging.epoch, staging.parts)
                staging.over = True

    def _report_results(self, offered: list[Staging], passed_on: Staging | None = None) -> None:
        """The gate has finished these updates: report each, after it was passed on to the workers below, if any.
        ``passed_on`` was passed on just now, or that has failed."""
        if self._offered is offered:
            self._offered = []
        for staging in offered:
            if staging is not passed_on:
                if staging.seen_by_loop or staging.abandoned:
                    continue
                staging.seen_by_loop = True
                if staging.error is None and self.contexts and self._active_contexts(staging.parts):
                    # Nothing newer goes through the gate until the workers below have this update.
                    self.passing_on = self.loop.create_task(self._pass_on(offered, staging))
                    return
            if self.has_listeners:
                self.observer.finished(staging, staging.error)
            if staging.error is not None:
                self.machine.failed(staging, staging.error)
            else:
                self.machine.applied(staging)
                self._clean_soon(staging)

    def _report_results_on_loop(self, offered: list[Staging], passed_on: Staging | None = None) -> None:
        with self.guard():
            self._report_results(offered, passed_on)
            if not self.closed:
                self.act_on_changes()

    def _active_contexts(self, models: Iterable[str]) -> list[Any]:
        """The contexts of these models that have workers, read at each update: a collector may get them later."""
        if self.closed:
            return []
        found = {id(context): context for m in models if (context := self.contexts.get(m)) is not None}
        return [context for context in found.values() if getattr(context, "cascades", True)]

    async def _pass_on(self, offered: list[Staging], staging: Staging) -> None:
        """Call each context once, with TensorDicts of its own, then report the update as applied or failed.

        An ordinary ``update_policy_weights_`` runs on a daemon thread, because it may block: it typically sends with
        another scheme, whose loop thread must stay free. The coroutine of a coroutine function runs on the loop.
        """
        try:
            for context in self._active_contexts(staging.parts):
                own = {m: part.slab for m, part in staging.parts.items() if self.contexts.get(m) is context}
                if not own:  # its scheme has been shut down while another context was called
                    continue
                function = context.update_policy_weights_
                if inspect.iscoroutinefunction(function):
                    call = await self._cascade_thread.submit(partial(_with_copies, function, own))
                    await call()
                else:
                    result = await self._cascade_thread.submit(partial(_call, function, own))
                    if inspect.isawaitable(result):  # an ordinary function that returns a coroutine
                        await result
        except BaseException as error:
            if self.closed:
                raise
            staging.error = as_exception(error)  # a CancelledError is the user's code's: shutdown() was not called
        self.passing_on = None
        self._report_results_on_loop(offered, staging)

    def _clean_soon(self, staging: Staging) -> None:
        if self._cleaning is None and any(part.slab.leased for part in staging.parts.values()):
            # Not at once, because it takes a core for some time, which the trainer may need to read the APPLIED.
            self._cleaning = self.loop.call_later(CLEAN_DELAY, self._clean)

    def _clean(self) -> None:
        self._cleaning = None
        if not self.closed:
            for transport in set(self.transports.values()):
                transport.clean_slots()

    def _poll_gate(self) -> None:
        # A reader that ended abnormally never leaves the gate: look for such readers while an update waits.
        self._gate_timer = None
        if self.gate.pending and not self.closed:
            self.gate.poll()
            if self.gate.pending:
                self._gate_timer = self.loop.call_later(GATE_POLL, self._poll_gate)

    # -- versions that the user's code takes ---------------------------------------------------------------------------

    async def take(self, model_id: str, version: int | None, epoch: str | None, timeout: float) -> Taken:
        """Wait for a version of this model, and lend it to the user's code until :meth:`give_back`. Raises AckTimeout;
        Superseded: a newer version has replaced it; RuntimeError: a version is taken already; SchemaMismatch or the
        like: it could not be staged here; ClosedError, Fenced: it will not come."""
        machine, session = self.machine, self.machine.session

        def is_here() -> bool:
            now = epoch_text(session.epoch)
            if machine.taken is not None or (epoch in (None, now) and machine.has(model_id, version)):
                return True
            self._registered([model_id])
            if epoch is not None and epoch < now:
                newest = machine.targets.get(model_id, 0)
                raise Superseded(f"epoch {epoch} is over: the sender's is {now}, at version {newest}", newest)
            is_later_epoch = epoch is not None and epoch > now
            if not is_later_epoch and (never := machine.why_not_taken(model_id, version)) is not None:
                raise never
            _raise_again(session.ended)
            if not is_later_epoch:
                _raise_again(session.refused.get(model_id))
            return False

        machine.check_again(model_id, self.loop.time())
        self.act_on_changes()
        if not await self.wait(is_here, timeout):
            what = "a new version" if version is None else f"version {version}"
            raise AckTimeout(
                f"worker {machine.worker} could not take {what} of {model_id!r} within {timeout:g} s: "
                f"{self._why_not_taken(model_id, version, epoch)}"
            )
        taken = machine.take(model_id, version)
        if self.has_listeners:
            self.observer.emit("update.taken", self.observer.traces.get(taken.staging.serial))
        return taken

    def give_back(self, taken: Taken, error: BaseException | None, *, unused: bool = False) -> None:
        """The user's code has applied a version, or has failed with this ``error``; ``unused``: it never got the
        version. If it has applied it, raises ClosedError if this worker was shut down meanwhile, PeerLost if another
        trainer's epoch has begun."""
        machine, staging = self.machine, taken.staging
        if error is None and not (unused or self.closed or taken.is_applied):
            self.show(staging.epoch, staging.parts)
        counts = machine.give_back(taken, error, unused=unused)
        if self.closed:
            if error is None and not unused:
                raise ClosedError("this scheme was shut down while a version was taken")
            return
        if self.has_listeners and not unused:
            self.observer.finished(staging, None if error is None else as_exception(error))
        self._clean_soon(staging)
        self.act_on_changes()
        if error is None and not (unused or counts):
            now = epoch_text(machine.session.epoch)
            raise PeerLost(
                f"version {max(staging.versions.values())} was of epoch {epoch_text(staging.epoch)}, whose sender is "
                f"gone: another one has begun epoch {now}. What was taken is applied; take what there is now"
            )

    def _why_not_taken(self, model_id: str, version: int | None, epoch: str | None) -> str:
        machine = self.machine
        if epoch is not None and epoch != (now := epoch_text(machine.session.epoch)):
            return f"the sender's epoch is {now or 'not known yet'}, not {epoch}"
        if machine.held is not None and version == machine.held.versions.get(model_id):
            return "it is staged, and waits for the sender's commit"
        if machine.session.welcomed and model_id in machine.session.served:
            target = machine.targets.get(model_id, 0)
            return f"the sender has said that there is version {target}" if target else "the sender has published none"
        return self._why_not_yet(model_id)

    # -- what callers wait for -----------------------------------------------------------------------------------------
    #
    # Unless their docstrings say otherwise, these raise AckTimeout at the timeout; SchemaMismatch, RemoteError or the
    # like if the version could not be applied here; ClosedError or Fenced if it will not come.

    def mark(self, model_id: str) -> Mark | None:
        """Epoch and version of the newest applied update of a model."""
        held = self.machine.holdings.updates.get(model_id)
        return None if held is None else held[:2]

    async def _wait_receiving(
        self,
        is_over: Callable[[], bool],
        timeout: float | None,
        *models: str,
        again: Callable[[], object] | None = None,
        late: Callable[[], str] | None = None,
    ) -> bool:
        """Wait until ``is_over()`` holds. Meanwhile updates of these models that wait for ``receive`` go through the
        gate. At the timeout, raises AckTimeout with the text that ``late`` returns; without ``late``, returns False.
        ``again`` repeats a request, because a message may get lost."""
        deadline = None if timeout is None else self.loop.time() + timeout
        self.receiving += models
        try:
            while True:
                self.act_on_changes()
                remaining = None if deadline is None else max(0.0, deadline - self.loop.time())
                step = remaining if again is None or remaining is None else min(REQUEST_AGAIN, remaining)
                if await self.wait(is_over, step):
                    return True
                if again is not None and remaining != 0.0:
                    again()
                elif late is not None:
                    raise AckTimeout(late())  # here, while the gate still shows which reader the update waits for
                else:
                    return False
        finally:
            for model_id in models:
                self.receiving.remove(model_id)
            # An update that no other caller receives waits again, if the gate has not begun with it.
            if any(map(self._awaits_receive, self._offered)) and self.gate.withdraw():
                self._offered = []
                if not self.closed:
                    self.act_on_changes()  # offers the other updates again

    def _registered(self, models: Iterable[str]) -> list[str]:
        """Those of these models that are registered. Raises ClosedError if the schemes of all were shut down."""
        if here := [model_id for model_id in models if model_id in self.machine.models]:
            return here
        raise ClosedError("this scheme was shut down")

    def _check_failed(self, model_id: str, version: int = 0) -> None:
        failed, error, where = self.machine.holdings.error.get(model_id, (-1, None, None))
        if error is not None and failed >= version:
            raise error.with_traceback(where)  # drops the frames of callers to which it was raised before

    def _has_applied(self, model_id: str, version: int, *, served: bool = False) -> bool:
        """Whether a model holds this version, or a newer one. Raises the reason if it never will. ``served``: a refusal
        counts even if the model holds the version, but only while the trainer still serves the refused layout."""
        session = self.machine.session
        if served:
            _raise_again(session.mismatch(model_id))
        if self.machine.holdings.version(model_id) >= version:
            return True
        _raise_again(session.ended)
        if not served:
            _raise_again(session.refused.get(model_id))
        self._check_failed(model_id, version)
        return False

    def _why_not_yet(self, model_id: str) -> str:
        machine = self.machine
        if not machine.session.online:
            return self.connection.why_not_connected()
        if not machine.session.welcomed:
            return "the sender has not answered yet"
        if model_id not in machine.session.served:
            served = sorted(machine.session.served)
            return f"the sender serves {served}, not {model_id!r}; use one model_id on both sides"
        if self.gate.pending:
            return f"an update waits for {self.gate.readers} reader(s) to finish (a hold() or a forward)"
        if machine.takes:
            return "the sender, or the root of its tree of relays, has not said which version there is"
        return "its initial weights have not arrived; the sender waits until every worker has connected"

    async def wait_connected(self, model_id: str, timeout: float, deadline: float) -> None:
        """Wait for the trainer's WELCOME, and for its initial weights, if it has any. A worker whose user's code takes
        its updates does not wait for weights, but asks the root of the tree for its version. Raises NotConnected at
        ``deadline``, a time of the loop's clock, or if the trainer turns this worker away. ``timeout``, in seconds, is
        what the user gave, for the error's text."""
        machine, session = self.machine, self.machine.session

        def is_connected() -> bool:
            self._registered([model_id])
            # If this worker has refused the weights, the trainer may have withdrawn them by now, or have left.
            if not machine.holdings.version(model_id):
                _raise_again(session.refused.get(model_id))
            if machine.is_connected(model_id):
                return True
            _raise_again(session.ended)
            _raise_again(session.refused.get(model_id))
            if not machine.takes:  # the user's code can take a version again after it has failed
                self._check_failed(model_id)
            return False

        if model_id not in session.refused or machine.holdings.version(model_id):
            _raise_again(session.ended)
        machine.check_again(model_id, self.loop.time())
        _raise_again(session.refused.get(model_id))  # the layout that did not fit before does not fit now, either
        in_time = await self._wait_receiving(is_connected, deadline - self.loop.time(), model_id)
        if in_time and machine.takes:
            ask = partial(session.request, root=True)
            asked = ask()

            def answered() -> bool:
                return session.answered(asked, root=True) or session.ended is not None

            in_time = await self._wait_receiving(answered, deadline - self.loop.time(), again=ask)
        if not in_time:
            raise NotConnected(
                f"worker {machine.worker} is not connected after {timeout:g} s: "
                f"{self._why_not_yet(model_id)}. connect() may be called again"
            )
        is_connected()  # raises if the session has ended meanwhile

    async def wait_newer(self, model_id: str, after: Mark | None, timeout: float | None) -> Mark | None:
        """The mark of an applied update newer than ``after``; None at the timeout, even if an update has failed."""

        def is_newer() -> bool:
            mark = self.mark(model_id)
            if mark is not None and (after is None or mark > after):
                return True
            self._registered([model_id])
            _raise_again(self.machine.session.ended)
            return False

        return self.mark(model_id) if await self._wait_receiving(is_newer, timeout, model_id) else None

    async def wait_current(self, model_id: str, timeout: float) -> Mark:
        """Request the version that this worker should have, and wait until it has applied it."""
        machine, session = self.machine, self.machine.session
        machine.check_again(model_id, self.loop.time())
        first = session.request()

        def is_current() -> bool:
            self._registered([model_id])
            _raise_again(session.ended)
            target = machine.targets.get(model_id, 0)
            return session.answered(first) and self._has_applied(model_id, target, served=True) and target > 0

        def late() -> str:
            why = self._why_not_yet(model_id)
            return f"worker {machine.worker} could not fetch {model_id!r} within {timeout:g} s: {why}"

        await self._wait_receiving(is_current, timeout, model_id, again=session.request, late=late)
        return machine.holdings.updates[model_id][:2]

    async def wait_reached(self, model_id: str, version: int, timeout: float, others: Iterable[str] = ()) -> Mark:
        """Wait until this model has this version, or a newer one. An update that waits for ``receive`` is applied; if
        it has other models, too, name them as ``others``."""

        def is_reached() -> bool:
            self._registered([model_id])
            return self._has_applied(model_id, version)

        def late() -> str:
            return (
                f"worker {self.machine.worker} was called for version {version} of {model_id!r}, which did not arrive "
                f"within {timeout:g} s: {self._why_not_yet(model_id)}"
            )

        await self._wait_receiving(is_reached, timeout, model_id, *others, late=late)
        return self.machine.holdings.updates[model_id][:2]

    async def wait_version(self, version: int, models: list[str], timeout: float) -> None:
        """Wait until this worker has applied this version or a newer one of each model that should have it."""
        machine = self.machine

        def are_applied() -> bool:
            due = [m for m in models if machine.targets.get(m, 0) >= version]
            here = self._registered(models)
            lacking = [m for m in due if m in here and not self._has_applied(m, version)]
            if due and not lacking:
                return True
            _raise_again(self.machine.session.ended)
            return False

        if not await self.wait(are_applied, timeout):
            have = {m: machine.holdings.version(m) for m in models}
            raise AckTimeout(
                f"worker {machine.worker} had not applied version {version} after {timeout:g} s; it has {have}"
            )

    async def wait_lag(self, models: list[str], max_lag: int, timeout: float) -> int:
        """Request the versions that this worker should have, and wait until each of these models is at most ``max_lag``
        behind; returns the oldest of the models' versions."""
        machine, session, holdings = self.machine, self.machine.session, self.machine.holdings
        deadline = self.loop.time() + timeout
        ask = partial(session.request, root=True)
        needed: dict[str, int] = {}
        first, epoch = ask(), session.epoch

        def is_near() -> bool:
            _raise_again(session.ended)
            if session.epoch != epoch:
                return True  # another trainer, which has its own versions: ask that one
            if not needed and session.answered(first, root=True):
                needed.update({m: machine.targets.get(m, 0) - max_lag for m in models})
            for model_id in needed.keys() - self._registered(models):
                del needed[model_id]
            lacking = [m for m, v in needed.items() if not self._has_applied(m, v, served=True)]
            return bool(needed) and not lacking

        while await self._wait_receiving(is_near, deadline - self.loop.time(), *models, again=ask):
            if session.epoch == epoch:
                return min(holdings.version(m) for m in needed)
            needed.clear()
            first, epoch = ask(), session.epoch
        asked = f", and it should have {needed}" if needed else "; the sender has not answered"
        have = {m: holdings.version(m) for m in models}
        raise AckTimeout(
            f"worker {machine.worker} was more than {max_lag} versions behind for {timeout:g} s: it has {have}{asked}"
        )

    async def wait_origin(self, version: int, models: Iterable[str], timeout: float) -> None:
        """Wait until these models show at least this version of the tree's root, even if an update fails meanwhile."""
        models = list(models)

        def has_acted() -> bool:
            if self.newest_shown(models).origin >= version:
                return True
            _raise_again(self.machine.session.ended)
            return False

        if not await self.wait(has_acted, timeout):
            raise AckTimeout(
                f"worker {self.machine.worker} did not act with version {version} within {timeout:g} s, but with "
                f"{self.newest_shown(models).origin}"
            )

    async def copy_held(self, model_id: str) -> Slab:
        """A copy of the newest applied slab."""
        slab = self.machine.holdings.updates[model_id][2].retain()
        self.copying += 1
        try:
            return await self.run_inline_or_in_thread(slab.copy, slab.nbytes)
        finally:
            self.copying -= 1
            slab.release()
            if slab.leased and not self.closed:
                self.act_on_changes()  # the trainer may be waiting for it


def _raise_again(error: WeightSyncError | None) -> None:
    """Raise a fresh exception with this one's message, because raising one object in several places piles up
    tracebacks. None: do nothing."""
    if error is not None:
        raise type(error)(*error.args)


def _with_copies(function: Any, slabs: Mapping[str, Slab]) -> Callable[[], Any]:
    """The function, with copies of these weights as its arguments."""
    weights = {model_id: slab.copy().weights() for model_id, slab in slabs.items()}
    if len(weights) > 1:
        return partial(function, weights_dict=weights)
    [(model_id, only)] = weights.items()
    return partial(function, only, model_id=model_id)


def _call(function: Any, slabs: Mapping[str, Slab]) -> Any:
    try:
        return _with_copies(function, slabs)()
    except BaseException as error:
        raise as_exception(error)  # noqa: B904 - it has its cause
