"""Applying: how staged updates go through a worker's gate, and what its callers wait for.

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
from asyncsync.bus.status import WorkerObserver
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, PeerLost, Superseded, WeightSyncError
from asyncsync.model.gate import Gate, Writer
from asyncsync.net.rendezvous import SenderConnection
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


class Applying(Link):
    """A worker's link, as far as updates are concerned: from staged to applied, and its callers, who wait for them.

    ``shown`` has, of each model, epoch and version of what it shows to its readers, in a tree the version at its root
    that this one stands for, else the same, and the metadata. It is switched where the model is: under the gate.
    ``manual`` has the models whose updates wait for ``receive`` (``apply="on_receive"``), ``wanted`` those of them that
    somebody is receiving right now; ``copying`` counts the copies that are being made of received slabs.
    """

    whereabouts: SenderConnection  # of the trainer

    def __init__(self, machine: Worker, gate: Gate, observer: WorkerObserver) -> None:
        super().__init__("asyncsync-copy")
        self.machine = machine
        self.gate = gate
        self.observer = observer
        self.transports: dict[str, Carrier] = {}  # by model
        self.shown: dict[str, tuple[Epoch, int, int, bytes]] = {}
        self.manual: set[str] = set()
        self.wanted: list[str] = []
        self.copying = 0
        self.cascade = Cascade()
        self._offered: list[Staging] = []  # what the gate has, unless it has done with it
        self._gate_timer: asyncio.TimerHandle | None = None
        self._cleaning: asyncio.TimerHandle | None = None

    # -- what models show ----------------------------------------------------------------------------------------------

    def show(self, epoch: Epoch, versions: Mapping[str, Acting]) -> None:
        """The models have these versions. Under the gate: inside a hold, the version is that of what is read."""
        # A new dict, because other threads may be looking at this one. A relay sees by it that something is new.
        self.shown = {**self.shown, **{model_id: (epoch, *acting) for model_id, acting in versions.items()}}

    def acting(self, models: Iterable[str]) -> Acting:
        """The newest that one of these models shows; its version is 0 where there is none. From any thread."""
        shown = self.shown
        none: tuple[Epoch | None, int, int, bytes] = (None, 0, 0, b"")
        return Acting(*max([shown[model_id] for model_id in models if model_id in shown], default=none)[1:])

    # -- through the gate ----------------------------------------------------------------------------------------------

    def goes_straight(self, model_id: str) -> bool:
        """Whether updates of this model wait for readers only, and are passed on to nobody."""
        return self.cascade.task is None and model_id not in self.manual and not self.cascade.concerns((model_id,))

    def stop_applying(self) -> None:
        """Nothing more is applied or passed on from here."""
        self.cascade.close()
        for timer in (self._gate_timer, self._cleaning):
            if timer is not None:
                timer.cancel()

    def _offer(self) -> None:
        if self.cascade.task is not None or self.closed or self.machine.leaving:
            return
        passing = self._ready() if self.manual else self.machine.staged.copy()
        if not passing or passing == self._offered:
            return
        self._offered = passing
        later = partial(self._conclude_later, passing)
        update = Writer(partial(self._pass, passing), lambda error: self.call_from_thread(later))
        if self.gate.try_apply(update):
            self._conclude(passing)
            return
        self.gate.offer(update.apply, update.done)
        if self.gate.pending and self._gate_timer is None:
            self._gate_timer = self.loop.call_later(GATE_POLL, self._poll_gate)

    def _ready(self) -> list[Staging]:
        """What is staged, without what is to wait for ``receive``. An update may go before an older one that waits;
        what both bring, the older one then brings no more."""
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
                        self.show(staging.epoch, staging.acting)
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
        with self.guard():
            if passed_on is not None:
                self._finished(passed_on, failure)
            self._conclude(passed)
            if not self.closed:
                self.settle()

    def _finished(self, staging: Staging, error: Exception | None) -> None:
        if self.observer.follows:
            self.observer.finished(staging, error)
        if error is not None:
            self.machine.failed(staging, error)
            return
        self.machine.applied(staging)
        self._clean_soon(staging)

    def _clean_soon(self, staging: Staging) -> None:
        if self._cleaning is None and any(part.slab.leased for part in staging.parts.values()):
            # Not at once: it takes a core for some time, which the trainer may need to read the acknowledgement.
            self._cleaning = self.loop.call_later(CLEAN_DELAY, self._clean)

    def _clean(self) -> None:
        self._cleaning = None
        if not self.closed:
            for transport in set(self.transports.values()):
                transport.clean_slots()

    def _poll_gate(self) -> None:
        # Readers that ended abnormally never leave: find them while an update waits.
        self._gate_timer = None
        if self.gate.pending and not self.closed:
            self.gate.poll()
            if self.gate.pending:
                self._gate_timer = self.loop.call_later(GATE_POLL, self._poll_gate)

    def _withdraw(self) -> None:
        """Nobody receives any more: a manual update that the gate has not begun with waits again."""
        if any(map(self._awaits_receive, self._offered)) and self.gate.withdraw():
            self._offered = []
            if not self.closed:
                self.settle()  # for the others

    # -- taken by the user's code --------------------------------------------------------------------------------------

    def waiting(self, models: Iterable[str]) -> dict[str, Any]:
        """What a status says of versions that are not applied yet."""
        machine = self.machine
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
        machine, session = self.machine, self.machine.session

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

        machine.check_again(model_id, self.loop.time())
        self.settle()
        if not await self.wait(is_here, timeout):
            what = "a new version" if version is None else f"version {version}"
            raise AckTimeout(
                f"worker {machine.worker} could not take {what} of {model_id!r} within {timeout:g} s: "
                f"{self._why_not_here(model_id, version, epoch)}"
            )
        taken = machine.take(model_id, version)
        if self.observer.follows:
            self.observer.taken(taken.staging)
        return taken

    def give_back(self, taken: Taken, error: BaseException | None, *, unused: bool = False) -> None:
        """The user's code is done with a version: it has applied it, or could not; ``unused``: it never had it. Raises
        ClosedError: this worker was shut down meanwhile; PeerLost: another trainer's epoch has begun; neither where
        there is an ``error``."""
        machine, staging = self.machine, taken.staging
        if error is None and not (unused or self.closed or taken.is_applied):
            self.show(staging.epoch, staging.acting)
        counts = machine.give_back(taken, error, unused=unused)
        if self.closed:
            if error is None and not unused:
                raise ClosedError("this scheme was shut down while a version was taken")
            return
        if self.observer.follows and not unused:
            self.observer.finished(staging, None if error is None else as_exception(error))
        self._clean_soon(staging)
        self.settle()
        if error is None and not (unused or counts):
            now = epoch_text(machine.session.epoch)
            raise PeerLost(
                f"version {max(staging.versions.values())} was of epoch {epoch_text(staging.epoch)}, whose sender is "
                f"gone: another one has begun epoch {now}. What was taken is applied; take what there is now"
            )

    def _why_not_here(self, model_id: str, version: int | None, epoch: str | None) -> str:
        machine = self.machine
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
        held = self.machine.holdings.held.get(model_id)
        return None if held is None else held[:2]

    async def _until(
        self,
        is_over: Callable[[], bool],
        timeout: float | None,
        *models: str,
        again: Callable[[], object] | None = None,
        late: Callable[[], str] | None = None,
    ) -> bool:
        """Wait until ``is_over()`` holds. At the timeout, raise AckTimeout with what ``late`` returns, or return False
        if there is none. Meanwhile, updates of these models that wait for ``receive`` go through the gate. ``again``
        repeats a request, which may get lost."""
        deadline = None if timeout is None else self.loop.time() + timeout
        self.wanted += models
        try:
            while True:
                self.settle()
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
                self.wanted.remove(model_id)
            self._withdraw()

    def _here(self, models: Iterable[str]) -> list[str]:
        """Those of these models that take part. Raises ClosedError: the schemes of all of them were shut down."""
        if here := [model_id for model_id in models if model_id in self.machine.models]:
            return here
        raise ClosedError("this scheme was shut down")

    def _check_ended(self) -> None:
        if (ended := self.machine.session.ended) is not None:
            raise _again(ended)

    def _check_refused(self, model_id: str) -> None:
        if (refusal := self.machine.session.refused.get(model_id)) is not None:
            raise _again(refusal)

    def _check_failed(self, model_id: str, version: int = 0) -> None:
        """Raise why this version of a model, or a newer one, could not be applied, if one could not."""
        failed, error, where = self.machine.holdings.error.get(model_id, (-1, None, None))
        if error is not None and failed >= version:
            raise error.with_traceback(where)  # without the frames of those that it has been raised to before

    def _has(self, model_id: str, version: int) -> bool:
        """Whether a model holds this version, or a newer one. Raises why it will not, if so."""
        if self.machine.holdings.version(model_id) >= version:
            return True
        self._check_ended()
        self._check_refused(model_id)
        self._check_failed(model_id, version)
        return False

    def _has_served(self, model_id: str, version: int) -> bool:
        """As :meth:`_has`, but a refusal counts only while the trainer still serves what was refused."""
        if (mismatch := self.machine.session.mismatch(model_id)) is not None:
            raise _again(mismatch)
        if self.machine.holdings.version(model_id) >= version:
            return True
        self._check_failed(model_id, version)
        return False

    def _why(self, model_id: str) -> str:
        machine = self.machine
        if not machine.session.online:
            return self.whereabouts.why_not_connected()
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
        """Wait for the trainer's welcome, and for the initial weights if it has any, until ``deadline``, by the loop's
        clock, which the caller gave as ``timeout``. A worker that takes its updates asks which version there is at the
        root of the tree instead. Raises NotConnected if no trainer has come in time, or it turned this worker away."""
        machine, session = self.machine, self.machine.session

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
        machine.check_again(model_id, self.loop.time())
        self._check_refused(model_id)  # the trainer's layout has not fitted, and does not by now
        in_time = await self._until(is_settled, deadline - self.loop.time(), model_id)
        if in_time and machine.takes:
            ask = partial(session.request, root=True)
            asked = ask()

            def answered() -> bool:
                return session.answered(asked, root=True) or session.ended is not None

            in_time = await self._until(answered, deadline - self.loop.time(), again=ask)
        if not in_time:
            raise NotConnected(
                f"worker {machine.worker} is not connected after {timeout:g} s: "
                f"{self._why(model_id)}. connect() may be called again"
            )
        is_settled()  # it may have come to its end meanwhile

    async def wait_newer(self, model_id: str, after: Mark | None, timeout: float | None) -> Mark | None:
        """The mark of an applied update newer than ``after``; None when the timeout expires, also if an update could
        not be applied."""

        def is_newer() -> bool:
            mark = self.mark(model_id)
            if mark is not None and (after is None or mark > after):
                return True
            self._here([model_id])
            self._check_ended()
            return False

        return self.mark(model_id) if await self._until(is_newer, timeout, model_id) else None

    async def wait_current(self, model_id: str, timeout: float) -> Mark:
        """Request what this worker should have, and wait until it has that."""
        machine, session = self.machine, self.machine.session
        machine.check_again(model_id, self.loop.time())
        first = session.request()

        def is_current() -> bool:
            self._here([model_id])
            self._check_ended()
            target = machine.targets.get(model_id, 0)
            return session.answered(first) and self._has_served(model_id, target) and target > 0

        def late() -> str:
            return f"worker {machine.worker} could not fetch {model_id!r} within {timeout:g} s: {self._why(model_id)}"

        await self._until(is_current, timeout, model_id, again=session.request, late=late)
        return machine.holdings.held[model_id][:2]

    async def wait_reached(self, model_id: str, version: int, timeout: float, others: Iterable[str] = ()) -> Mark:
        """Wait until this model has this version, or a newer one. What waits for ``receive`` is applied; of several
        models that switch together, the ``others`` must be named."""

        def is_reached() -> bool:
            self._here([model_id])
            return self._has(model_id, version)

        def late() -> str:
            return (
                f"worker {self.machine.worker} was called for version {version} of {model_id!r}, which did not arrive "
                f"within {timeout:g} s: {self._why(model_id)}"
            )

        await self._until(is_reached, timeout, model_id, *others, late=late)
        return self.machine.holdings.held[model_id][:2]

    async def wait_version(self, version: int, models: list[str], timeout: float) -> None:
        """Wait until this worker has applied this version, or a newer one, of all these models that are to have it."""
        machine = self.machine

        def are_applied() -> bool:
            due = [m for m in models if machine.targets.get(m, 0) >= version]
            here = self._here(models)
            lacking = [m for m in due if m in here and not self._has(m, version)]
            if due and not lacking:
                return True
            self._check_ended()
            return False

        if not await self.wait(are_applied, timeout):
            have = {m: machine.holdings.version(m) for m in models}
            raise AckTimeout(
                f"worker {machine.worker} had not applied version {version} after {timeout:g} s; it has {have}"
            )

    async def wait_lag(self, models: list[str], max_lag: int, timeout: float) -> int:
        """Request what this worker should have, and wait until each of these models is at most so many versions behind
        that; returns the oldest of their versions."""
        machine, session, holdings = self.machine, self.machine.session, self.machine.holdings
        deadline = self.loop.time() + timeout
        ask = partial(session.request, root=True)
        least: dict[str, int] = {}
        first, epoch = ask(), session.epoch

        def is_near() -> bool:
            self._check_ended()
            if session.epoch != epoch:
                return True  # another trainer, which counts anew: it is to be asked
            if not least and session.answered(first, root=True):
                least.update({m: machine.targets.get(m, 0) - max_lag for m in models})
            for model_id in least.keys() - self._here(models):
                del least[model_id]
            lacking = [m for m, v in least.items() if not self._has_served(m, v)]
            return bool(least) and not lacking

        while await self._until(is_near, deadline - self.loop.time(), *models, again=ask):
            if session.epoch == epoch:
                return min(holdings.version(m) for m in least)
            least.clear()
            first, epoch = ask(), session.epoch
        asked = f", and it should have {least}" if least else "; the sender has not answered"
        have = {m: holdings.version(m) for m in models}
        raise AckTimeout(
            f"worker {machine.worker} was more than {max_lag} versions behind for {timeout:g} s: it has {have}{asked}"
        )

    async def wait_origin(self, version: int, models: Iterable[str], timeout: float) -> None:
        """Wait until these models show at least this version of the tree's root, whatever could not be applied."""
        models = list(models)

        def has_acted() -> bool:
            if self.acting(models).origin >= version:
                return True
            self._check_ended()
            return False

        if not await self.wait(has_acted, timeout):
            raise AckTimeout(
                f"worker {self.machine.worker} did not act with version {version} within {timeout:g} s, but with "
                f"{self.acting(models).origin}"
            )

    async def copy_held(self, model_id: str, then: Callable[[Slab], Any]) -> Any:
        """Run ``then`` on a copy of the newest applied slab, which the caller owns."""
        slab = self.machine.holdings.held[model_id][2].retain()
        self.copying += 1
        try:
            return then(await self.run(slab.copy, slab.nbytes))
        finally:
            self.copying -= 1
            slab.release()
            if slab.leased and not self.closed:
                self.settle()  # the trainer may be waiting for it


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
        return bool(self._contexts) and not self._closed and bool(self._of(models))

    def _of(self, models: Iterable[str]) -> list[Any]:
        """The contexts of these models that have workers: read at each update, as a collector may get them later."""
        found = {id(context): context for m in models if (context := self._contexts.get(m)) is not None}
        return [context for context in found.values() if getattr(context, "cascades", True)]

    def begin(self, slabs: Mapping[str, Slab], then: Callable[[Exception | None], None]) -> None:
        """Pass one update on; ``then`` is called on the loop with what ``update_policy_weights_`` raised, or None. Each
        context is called once, with TensorDicts of its own. The slabs must stay as they are until ``then``."""
        self.task = asyncio.get_running_loop().create_task(self._run(slabs, then))

    async def _run(self, slabs: Mapping[str, Slab], then: Callable[[Exception | None], None]) -> None:
        failure: Exception | None = None
        try:
            for context in self._of(slabs):
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


def _copies(slabs: Mapping[str, Slab]) -> dict[str, TensorDict]:
    return {model_id: slab.copy().weights() for model_id, slab in slabs.items()}


def _call(function: Any, weights: dict[str, TensorDict]) -> Any:
    if len(weights) > 1:
        return function(weights_dict=weights)
    [(model_id, only)] = weights.items()
    return function(only, model_id=model_id)
