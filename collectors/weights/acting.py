"""The weights that act in this process: the schemes by which they come from the collector or trainer above, updates of
the collector's own models, blocks in which they do not change, and which version they are."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from tensordict import TensorDictBase

from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore
from asyncsync.collectors.weights.senders import as_blocking, buses_of, check_name, connect_all, shut_down_all
from asyncsync.errors import AckTimeout
from asyncsync.model.gate import Gate
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights
from asyncsync.model.update import Prepared
from asyncsync.runtime.threads import settle, until_done
from asyncsync.schemes.blocking import Bus, WeightSyncScheme
from asyncsync.schemes.none import NoSyncCore
from asyncsync.schemes.scheme import Scheme

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


@contextmanager
def besides(error: BaseException) -> Iterator[None]:
    """A block that changes weights here while this error is on its way, which goes on whatever is raised in here."""
    try:
        yield
    except Exception as other:
        error.add_note(f"Nor was what acts in this process updated: {other}")


class ActingWeights:
    """The acting weights of one collector, held by each of its steps, whichever thread steps. What schemes receive, and
    updates of the collector's own models, are applied between two steps.

    Attributes:
        gate: of the collector's own models.
        schemes: those that receive, by model id.
        own: how many updates were applied here without schemes.
        counted_above: how many versions updaters above have counted; None: nobody is above.
        newest_above: reads the newest version published for this collector, by the count of :meth:`received`; None:
            only its schemes know of one.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.own = 0
        self.counted_above: Callable[[], int] | None = None
        self.newest_above: Callable[[], int] | None = None
        self._changes: deque[tuple[Change, Callable[[], None]]] = deque()
        self._gates = [self.gate]  # and those of the buses
        self._buses: list[Bus] = []  # of the schemes, each once
        self._joined: dict[str, Scheme] = {}  # by the user, with the collector as their context
        self._main: BusCore | None = None  # whose versions frames are labelled with

    # -- from above ---------------------------------------------------------------------------------------------------

    @property
    def come_from_above(self) -> bool:
        """Whether any scheme brings weights."""
        return self._main is not None

    def joined(self, scheme: Scheme) -> None:
        """A scheme was initialised, here or by the user, with the collector as its context. From now on no step is
        under way when its updates are applied, and frames are labelled with its versions."""
        self._joined[scheme.model_id or ""] = scheme
        self._find_buses()

    def register(self, schemes: Mapping[str, Any], context: Any) -> None:
        """Initialise schemes, ``{model_id: scheme}``, unless the user has, without communication. ``context`` knows the
        models and its ``worker_idx``. Raises TypeError, ValueError, RuntimeError: a scheme that cannot receive, or no
        ``worker_idx``."""
        if known := sorted(schemes.keys() & self.schemes.keys()):
            raise ValueError(f"this collector already receives {known}: register each model once")
        blocking = as_blocking("weight_recv_schemes", schemes)
        fresh = {m: s for m, s in blocking.items() if s.role != "receiver" or s.pid != os.getpid()}
        for model_id, scheme in blocking.items():
            if model_id in fresh:
                try:
                    context.get_model(model_id)
                except LookupError as error:
                    raise ValueError(f"weight_recv_schemes[{model_id!r}]: {error}") from error
                scheme.check_fresh("receiver")
            else:
                check_name("weight_recv_schemes", model_id, scheme)
                if context.acts_elsewhere and scheme.takes_part and scheme.context is not context:
                    raise ValueError(
                        f"weight_recv_schemes[{model_id!r}] was initialised without this collector as its context, so "
                        "its weights would not reach the workers: let the collector call init_on_receiver()"
                    )
        begun = []
        try:
            for model_id, scheme in fresh.items():
                scheme.init_on_receiver(model_id, context, worker_idx=context.worker_idx, gate="hold")
                begun.append(scheme)
        except BaseException:
            shut_down_all(begun, 0.0)  # all are registered, or none
            self._joined = {m: s for m, s in self._joined.items() if s not in begun}
            self._find_buses()
            raise
        self.schemes |= blocking
        self._find_buses()

    def _find_buses(self) -> None:
        self._buses = buses_of(self.schemes.values())
        known = self._joined | self.schemes
        self._gates = [self.gate, *(bus.gate for bus in buses_of(known.values()) if bus.gate is not None)]
        moving = buses_of([known[m] for m in ("policy", *known) if m in known])
        self._main = moving[0] if moving else None

    def connect(self, schemes: Mapping[str, Any], timeout: float) -> None:
        """Connect to the sender; on return, its initial weights have been applied."""
        connect_all([self.schemes[model_id] for model_id in schemes], timeout)

    def check(self) -> None:
        """Raises Fenced: another process has this worker's place, and nothing newer will ever come here."""
        for bus in self._buses:
            bus.check_fenced()

    def receive(self) -> None:
        """Apply updates that wait for a receive (``apply="on_receive"``): by schemes in a call of whose sender the
        caller's thread is, the version of that call, else what has come. Raises what the schemes raise; ClosedError,
        Fenced: nothing has come, and nothing will."""
        others = []
        for scheme in self.schemes.values():
            if scheme.current_call() is not None:
                scheme.receive()
            elif not isinstance(scheme, NoSyncCore):
                others.append(scheme)
        if others:
            self.apply(lambda: _take_in(others))

    # -- updates without schemes --------------------------------------------------------------------------------------

    def apply(self, update: Callable[[], None], timeout: float = DEFAULT_TIMEOUT) -> None:
        """Run ``update`` now, or as soon as the step under way has ended; returns when it has run.

        Raises AckTimeout: the step took longer than ``timeout`` seconds, and nothing was changed; RuntimeError: called
        from within a step, which would wait for itself.
        """
        change, begun = self._offer(update), time.monotonic()
        try:
            while not until_done(change, POLL_SECONDS):
                self._poll(change, begun, timeout)
        finally:
            change.cancel()  # an interrupted caller changes nothing afterwards
        change.result()

    async def apply_async(self, update: Callable[[], None], timeout: float) -> None:
        """:meth:`apply` without blocking the running loop while a step is under way elsewhere."""
        change, begun = self._offer(update), time.monotonic()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        change.add_done_callback(lambda _: settle(ended))
        try:
            while not change.done():
                await asyncio.wait([ended], timeout=POLL_SECONDS)
                self._poll(change, begun, timeout)
        finally:
            change.cancel()
        change.result()

    def _poll(self, change: Change, begun: float, timeout: float) -> None:
        """Look after an update that somebody awaits. Raises AckTimeout: it has not begun within the timeout."""
        self.gate.poll()  # if Ctrl-C has ended it half way, perhaps no other thread passes the gate
        if time.monotonic() - begun >= timeout and change.cancel():
            raise AckTimeout(f"the step under way did not end within {timeout:g} s; no weights were changed")

    def _offer(self, update: Callable[[], None]) -> Change:
        if self.gate.held_by_caller:
            raise RuntimeError(
                "the policy or the environment tried to change weights during a step, but weights change between two "
                "steps: call this from a hook, or from the code that iterates over the collector"
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

    # -- steps --------------------------------------------------------------------------------------------------------

    def holds(self) -> Holds:
        """A block for steps, policy and environment, in which no weights of this collector change."""
        return Holds(self._gates)

    def version(self) -> int:
        """The version with which frames are labelled. With a trainer above, that of its schemes plus what its updaters
        have counted; else that of schemes, or where nothing brings weights, the count of updates applied here."""
        if self.counted_above is not None:
            return self.received() + self.counted_above()
        return self.own if self._main is None else self.received()

    def received(self) -> int:
        """The version that has come by schemes: of several buses, that of the policy's, or of the first. Each counts
        its own; in a tree of collectors, its root does."""
        return self.origin()[0]

    def origin(self) -> tuple[int, bytes]:
        """The version :meth:`received`, and its metadata."""
        if self._main is None:
            return 0, b""
        acting = self._main.acting(self._main.schemes)
        return acting.origin, acting.metadata

    def keep_up(self, max_lag: int, timeout: float) -> None:
        """Wait, outside any hold, until the acting weights are at most ``max_lag`` versions behind the newest, on each
        bus by its own count. Raises AckTimeout: one of the waits took longer than ``timeout`` seconds; ClosedError,
        Fenced."""
        for bus in self._buses:
            while (target := bus.newest_target()) - bus.version > max_lag:
                bus.wait_version(target - max_lag, timeout=timeout)
        newest_above, main = self.newest_above, self._main
        if newest_above is None or not isinstance(main, Bus):  # nothing here follows that count
            return
        while (newest := newest_above()) - self.received() > max_lag:
            main.wait_origin(newest - max_lag, timeout)


def _take_in(schemes: Iterable[WeightSyncScheme]) -> None:
    for scheme in schemes:
        scheme.bus.run_on_loop(lambda s=scheme: s.take_in(None))  # type: ignore[misc]


class Holds(ExitStack):
    """Several gates held at once, as one context manager for one use."""

    def __init__(self, gates: list[Gate]) -> None:
        super().__init__()
        self._gates = gates

    @property
    def awaited(self) -> bool:
        """Whether an update waits for the end of this block."""
        for gate in self._gates:  # noqa: SIM110 - asked for with each step, where any() takes thrice as long
            if gate.pending:
                return True
        return False

    def __enter__(self) -> Self:
        try:
            for gate in self._gates:
                self.push(hold := gate.hold())  # before it is entered, so that an interruption leaves none open
                hold.__enter__()
        except BaseException:
            self.close()
            raise
        return self
