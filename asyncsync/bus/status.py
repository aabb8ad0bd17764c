"""Status: what each end of a bus reports to its user, to ``asyncsync top``, to Prometheus and to trace hooks.

Any client that may connect may send an INQUIRY. A :class:`Reporter` limits the size of a report, makes new ones only
now and then, and sends a limited number in a second. So inquiries take at most a few percent of the sender's loop. The
observers turn the messages of a bus into events in the trace of a version, and emit these to the hooks.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncsync.monitor.trace import Hook, debug_log
from asyncsync.protocol.holdings import Staging
from asyncsync.protocol.trainer import Trainer
from asyncsync.wire import messages
from asyncsync.wire.messages import Again, Buffer, Epoch, Instruction, Report, Update, WorkerReport, decode, epoch_text

if TYPE_CHECKING:
    from prometheus_client import Histogram
    from prometheus_client.core import Metric

logger = logging.getLogger("asyncsync")

ANSWERS_PER_SECOND = 20
FRESH_SECONDS = 0.05  # for this long a report is sent again, unchanged
COST_FACTOR = 20  # or for this many times as long as it took to make, if that is longer
MAX_REASONS = 64
MAX_TRACES = 64  # at once; there must be a limit, because a stopped worker never answers, so traces would not end
WORKER_VALUES = 16_000  # how many of the values that one message may have are for the workers
WORKER_FIELDS = 17
STATES = ("live", "slow", "lost")
ROLES = ("relay", "worker", "guest")  # in the order of a report
STEPS = {messages.Fetch: "fetched", messages.Staged: "staged"}
SUPERSEDED = "a newer version has come"
DROPPED = "it was dropped"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What this side knows about one worker.

    Attributes:
        version: the version that the worker has applied (of several models, the oldest); 0: none yet.
        target: the version that the worker should have; 0: none yet.
        lag: how many versions the worker is behind its target.
        last_seen: seconds since the worker's last message; None: it has sent none.
        state: ``"live"``, ``"slow"`` (silent for some seconds) or ``"lost"`` (its process has ended, it has left, or it
            has never connected).
        bytes_sent: payload bytes sent to the worker (on a receiver: received).
        reason: why the worker is lost; empty otherwise.
        role: ``"worker"``; ``"relay"`` or ``"guest"``: the sender never waits for it, and no worker has its index.
        staged: the newest version that the worker has staged and not applied, also if it waits for a commit; 0: none.
        taken: the version that the worker's own code had taken at its last message; 0: none.
        failure: why the worker could not take or apply a version; empty if it could, or has applied a newer one since.
        relay: the index of the relay that the worker connects to; None: it connects to this sender. ``last_seen`` then
            counts from the relay's last message, as long as the worker answers the relay.
    """

    version: int
    target: int
    lag: int
    last_seen: float | None
    state: str
    bytes_sent: int = 0
    reason: str = ""
    role: str = "worker"
    relay: int | None = None
    staged: int = 0
    taken: int = 0
    failure: str = ""


class BusStatus(dict[int, WorkerStatus]):
    """The status of each worker, by its index.

    Attributes:
        refused: with keys, how many connections and messages were refused, by reason. Sender: ``"no key"``,
            ``"a key that is not listed"``, ``"the key of another server"``, ``"the index of another worker"``, ``"a key
            that was taken off the list"``, ``"another protocol"``, ``"an incomplete handshake"``. Receiver: why its
            own attempts to connect failed.
    """

    def __init__(self, workers: Mapping[int, WorkerStatus], refused: Mapping[str, int]) -> None:
        super().__init__(workers)
        self.refused: dict[str, int] = dict(refused)


def worker_status(machine: Trainer, worker: int, models: Sequence[str], now: float) -> WorkerStatus:
    """What the trainer knows about a worker and these models; ``now`` is a time of the loop's clock."""
    peer = machine.membership.find(worker)
    targets = {m: t.version for m in models if (t := machine.targets.newest(worker, m)) is not None}
    if peer is None:
        target = max(targets.values(), default=0)
        return WorkerStatus(0, target, target, None, "lost", 0, "it has not connected yet")
    targets = {m: v for m, v in targets.items() if m in peer.hello.have}
    applied = {m: peer.applied.get(m, 0) for m in models if m in peer.hello.have}
    behind = [m for m, v in targets.items() if applied[m] < v]
    version = min((applied[m] for m in behind), default=max(applied.values(), default=0))
    target = max(targets.values(), default=0)
    lag = max((targets[m] - applied[m] for m in behind), default=0)
    seen, state = now - peer.last_seen, peer.state
    relay = None if peer.relay is None else machine.peers.get(peer.relay)
    if relay is not None and state == "live":  # what is known of it is as old as the relay's last message
        seen, state = now - relay.last_seen, relay.state
    problems = [str(e) for (m, *_), e in (*peer.refused.items(), *peer.failed.items()) if m in models]
    return WorkerStatus(
        version, target, lag, seen, state, peer.bytes_sent, peer.lost or "", peer.hello.role, peer.relay,
        staged=max([max(peer.staged.get(m, 0), peer.held.get(m, 0)) for m in models], default=0),
        taken=max([peer.taken.get(m, 0) for m in models], default=0),
        failure="".join(problems[-1:]),
    )  # fmt: skip


# -- over the network -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Reporter:
    """Makes the reports of one sender. ``clock`` is the loop's; ``refused`` and ``dropped`` count, by reason."""

    _machine: Trainer
    _clock: Callable[[], float]
    _refused: Callable[[], Mapping[str, int]]
    _dropped: Mapping[str, int]
    _tokens: float = ANSWERS_PER_SECOND
    _last: Report | None = None
    _fresh_until: float = 0.0

    def __post_init__(self) -> None:
        self._began = self._refilled = self._clock()

    def answer(self, token: int) -> Report | None:
        """The answer to an INQUIRY; None: there were too many in the last second."""
        now = self._clock()
        self._tokens = min(float(ANSWERS_PER_SECOND), self._tokens + (now - self._refilled) * ANSWERS_PER_SECOND)
        self._refilled = now
        if self._tokens < 1.0:
            return None
        self._tokens -= 1.0
        if self._last is None or now >= self._fresh_until:
            self._last = self.report()
            done = self._clock()
            self._fresh_until = done + max(FRESH_SECONDS, COST_FACTOR * (done - now))
        return replace(self._last, token=token)

    def report(self) -> Report:
        """A new report. Call this only after the fast path has ended."""
        machine, now = self._machine, self._clock()
        peers, targets = {**machine.relayed.workers, **machine.peers}, machine.targets
        names = sorted(targets.models)[: messages.MAX_REPORTED_MODELS]
        models = []
        for name in names:
            if (current := targets.models[name].get(None)) is None:
                models.append(messages.ModelReport(name, 0, None, 0))
            else:
                slab = current.slab
                models.append(messages.ModelReport(name, slab.nbytes, slab.layout.digest, current.version))
        # Relays come first, because there are few, and many workers depend on them. Guests that have left are omitted.
        roles: dict[int, str] = dict.fromkeys(machine.membership.expected(), "worker")
        roles |= {w: p.hello.role for w, p in peers.items() if not p.lost or p.hello.role != "guest"}
        by_role = Counter(roles.values())
        counts = Counter(live=0, slow=0, lost=0)
        counts.update(peer.state for peer in peers.values() if peer.is_worker)
        counts["lost"] += by_role["worker"] - counts.total()
        counts["relays"], counts["guests"] = by_role["relay"], by_role["guest"]
        room = min(messages.MAX_REPORTED, WORKER_VALUES // (WORKER_FIELDS + len(names)))
        workers = sorted(roles, key=lambda worker: (ROLES.index(roles[worker]), worker))[:room]
        return Report(
            token=0,
            epoch=machine.membership.epoch,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            uptime=int(1000 * (now - self._began)),
            version=machine.targets.published,
            num_workers=machine.num_workers,
            bytes_sent=sum(peer.bytes_sent for peer in peers.values()),
            num_models=len(targets.models),
            counts=dict(counts),
            refused=_limited(Counter(machine.membership.refused) + Counter(self._refused())),
            dropped=_limited(self._dropped),
            models=tuple(models),
            workers=tuple(self._worker(worker, names, now) for worker in workers),
        )

    def _worker(self, worker: int, names: list[str], now: float) -> WorkerReport:
        peer = self._machine.membership.find(worker)
        status = worker_status(self._machine, worker, names, now)
        seen = None if status.last_seen is None else max(0, int(1000 * status.last_seen))
        pid, local = 0, False
        versions: tuple[int | None, ...] = ()
        if peer is not None:
            pid, local = peer.hello.pid, bool(peer.local)
            versions = tuple(peer.applied.get(m, 0) if m in peer.hello.have else None for m in names)
        return WorkerReport(
            worker, status.state, status.version, status.target, status.lag, seen, status.bytes_sent,
            _first_line(status.reason or status.failure), pid, local, versions, status.role, status.relay,
            staged_version=status.staged, taken_version=status.taken,
        )  # fmt: skip


def _first_line(reason: str) -> str:
    """The first line, cut to the limit, without characters that control a terminal."""
    first = reason.strip().partition("\n")[0]
    return "".join(character for character in first if character.isprintable())[: messages.MAX_REASON]


def _limited(reasons: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        short = _first_line(reason)
        if short in found or len(found) < MAX_REASONS:
            found[short] = found.get(short, 0) + count
    return found


# -- for Prometheus ---------------------------------------------------------------------------------------------------


def trainer_metrics(report: Report, published: int) -> list[Metric]:
    """``published``: the number of versions, with those before a checkpoint."""
    workers = {(worker.role, str(worker.index)): worker for worker in report.workers}
    names = [model.model_id for model in report.models]

    def each(value: Callable[[WorkerReport], float]) -> dict[tuple[str, ...], float]:
        return {key: value(worker) for key, worker in workers.items()}

    applied = {
        (*key, name): float(version)
        for key, worker in workers.items()
        for name, version in zip(names, worker.versions, strict=False)
        if version is not None
    }
    seen = {key: worker.last_seen / 1000 for key, worker in workers.items() if worker.last_seen is not None}
    states = {(*key, state): float(w.state == state) for key, w in workers.items() for state in STATES}
    sizes = {(model.model_id,): float(model.nbytes) for model in report.models}
    labels = ("role", "worker")
    return [
        _gauge("version", "The newest version published.", {(): report.version}),
        counter("published_versions", "Versions, with those of a checkpoint.", {(): published}),
        _gauge("model_bytes", "Size of a model's newest weights.", sizes, ("model",)),
        _gauge("workers", "Workers, by state; relays and guests.", by_label(report.counts), ("state",)),
        _gauge("worker_applied_version", "The version the worker has applied.", applied, (*labels, "model")),
        _gauge("worker_lag_versions", "How many versions the worker is behind.", each(lambda w: w.lag), labels),
        _gauge("worker_staged_version", "Staged, and not applied.", each(lambda w: w.staged_version), labels),
        _gauge("worker_taken_version", "Taken by the worker's own code.", each(lambda w: w.taken_version), labels),
        _gauge("worker_state", "1 for the worker's current state.", states, (*labels, "state")),
        _gauge("worker_last_seen_seconds", "Time since the worker's last message.", seen, labels),
        counter("worker_sent_bytes", "Weights sent to the worker.", each(lambda w: w.bytes_sent), labels),
        counter("refusals", "Connections and messages that were refused.", by_label(report.refused), ("reason",)),
    ]


def worker_metrics(status: BusStatus, applied: Mapping[str, int]) -> list[Metric]:
    [(worker, one)] = status.items()
    labels, key = ("worker",), (str(worker),)
    versions = {(*key, name): float(version) for name, version in applied.items()}
    states = {(*key, state): float(one.state == state) for state in STATES}
    return [
        _gauge("receiver_version", "The version that a model shows.", versions, (*labels, "model")),
        _gauge("receiver_target_version", "The version that the worker should have.", {key: one.target}, labels),
        _gauge("receiver_lag_versions", "How many versions the worker is behind.", {key: one.lag}, labels),
        _gauge("receiver_staged_version", "Staged, and not applied.", {key: one.staged}, labels),
        _gauge("receiver_taken_version", "Taken by the worker's own code.", {key: one.taken}, labels),
        _gauge("receiver_sender_state", "1 for the sender's current state.", states, (*labels, "state")),
        counter("received_bytes", "Weights received.", {key: one.bytes_sent}, labels),
        counter("refusals", "Refused connection attempts.", by_label(status.refused), ("reason",)),
    ]


def by_label(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): float(count) for name, count in counts.items()}


def _metric(kind: str, name: str, text: str, values: Mapping[Any, float], labels: Sequence[str] = ()) -> Metric:
    from prometheus_client import core

    family = getattr(core, kind)(f"asyncsync_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    result: Metric = family
    return result


_gauge, counter = partial(_metric, "GaugeMetricFamily"), partial(_metric, "CounterMetricFamily")


# -- for trace hooks --------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """One publication of a trainer, or one update of a worker. ``info`` is part of each event. ``unanswered`` has the
    workers to which it was announced and which have not applied it, each with the announcement's serial;
    ``lagging_worker`` is a worker that lacked it at the last check."""

    info: dict[str, Any]
    began: int = field(default_factory=time.time_ns)
    was_announced: bool = False
    is_staged: bool = False
    unanswered: dict[int, int] = field(default_factory=dict)
    lagging_worker: int | None = None


class Observer(ABC):
    """Emits events to hooks and log. ``traces`` has the unfinished ones, by version (trainer) or serial (worker)."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.traces: dict[int, Trace] = {}
        self.hooks = list(hooks)

    def emit(self, event: str, trace: Trace | None, at: int | None = None, **more: Any) -> None:
        hooks = [*self.hooks, debug_log] if logger.isEnabledFor(logging.DEBUG) else self.hooks
        if trace is None or not hooks:
            return
        at = at or time.time_ns()
        info = {**trace.info, **more, "time": at, "seconds": (at - trace.began) / 1e9}
        for hook in hooks:
            try:
                hook(event, info)
            except Exception:  # a hook that fails must not make the update fail
                self.hooks = [other for other in self.hooks if other is not hook]
                logger.exception("the trace hook %r failed at %s; it is not called again", hook, event)

    def add(self, key: int, trace: Trace) -> None:
        self.traces[key] = trace
        while len(self.traces) > MAX_TRACES:
            self.end(next(iter(self.traces)), f"it is not over, and {MAX_TRACES} newer ones have come")

    @abstractmethod
    def end(self, key: int, failure: str = "") -> None:
        """End a trace, if there is one with this key; ``failure``: why the version was not applied."""

    def close(self) -> None:
        for key in list(self.traces):
            self.end(key, "the bus was shut down")


class TrainerObserver(Observer):
    """Traces the versions of one trainer. ``awaited`` returns a worker that has not applied a version of these models
    and still may; it looks at the given worker first. ``durations``: how long updates took; None without metrics."""

    durations: Histogram | None = None

    def __init__(self, awaited: Callable[[int, list[str], int | None], int | None], hooks: Iterable[Hook] = ()) -> None:
        super().__init__(hooks)
        self._awaited = awaited
        self._count = 0

    def begin(self, models: Iterable[str]) -> Trace:
        self._count += 1
        trace = Trace({"id": self._count, "models": sorted(models)})
        self.emit("publish.begin", trace)
        return trace

    def published(self, trace: Trace, version: int, epoch: Epoch) -> None:
        trace.info |= {"version": version, "epoch": epoch_text(epoch)}
        self.add(version, trace)
        self.emit("publish.published", trace)

    def abandoned(self, trace: Trace | None, error: BaseException) -> None:
        if trace is not None and "version" in trace.info:
            self.end(trace.info["version"], repr(error))
        else:
            self.emit("publish.end", trace, error=repr(error))

    def sent(self, worker: int, update: Update) -> None:
        if (trace := self.traces.get(update.parts[0].version)) is None:
            return
        is_commit = update.phase == messages.COMMIT
        if worker in trace.unanswered and not is_commit:
            self.emit("deliver.end", trace, worker=worker, error="the worker was lost, and gets it again")
        trace.was_announced = True
        trace.unanswered[worker] = update.serial
        self.emit("deliver.committed" if is_commit else "deliver.begin", trace, worker=worker)

    def received(self, worker: int, instruction: Instruction) -> None:
        if isinstance(instruction, messages.Applied | messages.Pong | messages.Failed):
            failure = (
                f"{instruction.type_name}: {instruction.message}" if isinstance(instruction, messages.Failed) else ""
            )
            versions = set(instruction.versions.values())
            if isinstance(instruction, messages.Applied) and instruction.serial:
                versions = {v for v, trace in self.traces.items() if trace.unanswered.get(worker) == instruction.serial}
            for version in versions:
                for earlier, trace in self.traces.items():
                    if earlier <= version and trace.unanswered.pop(worker, None) is not None:
                        error = failure if earlier == version else SUPERSEDED
                        self.emit("deliver.end", trace, worker=worker, error=error)
        elif isinstance(instruction, messages.Fetch | messages.Staged):
            for trace in self.traces.values():
                if trace.unanswered.get(worker) == instruction.serial:
                    self.emit(f"deliver.{STEPS[type(instruction)]}", trace, worker=worker)

    def check(self, *, recheck_all: bool = False) -> None:
        """The machine has changed: end the traces of versions for which no worker is awaited. ``recheck_all``: also
        look at versions that a worker has not answered, because it may be lost."""
        behind: set[tuple[int | str | None, ...]] = set()
        for version, trace in list(self.traces.items()):
            models = trace.info["models"]
            # A worker that lacks a version also lacks the later versions of these models.
            if not recheck_all and (trace.unanswered or (trace.lagging_worker, *models) in behind):
                continue
            trace.lagging_worker = self._awaited(version, models, trace.lagging_worker)
            if trace.lagging_worker is None:
                self.end(version)
            else:
                behind.add((trace.lagging_worker, *models))

    def end(self, key: int, failure: str = "") -> None:
        # It may have ended before it was packed, if no worker waited for it or the trainer was shut down.
        if (trace := self.traces.pop(key, None)) is None:
            return
        for worker in trace.unanswered:
            self.emit("deliver.end", trace, worker=worker, error=f"{SUPERSEDED}, or the worker is lost")
        self.emit("publish.end", trace, error=failure)
        if self.durations is not None and trace.was_announced and not (trace.unanswered or failure):
            self.durations.observe((time.time_ns() - trace.began) / 1e9)


class WorkerObserver(Observer):
    def __init__(self, worker: int, hooks: Iterable[Hook] = ()) -> None:
        super().__init__(hooks)
        self._worker = worker
        self._last_received = 0  # the time of the trainer's last message: for large weights, of their last bytes

    def received(self, instruction: Instruction, payload: Sequence[Buffer] = ()) -> None:
        """A message has come from the trainer. ``payload``: only of a broadcast; that of a CAST is the announcement."""
        self._last_received = time.time_ns()
        if isinstance(instruction, messages.Cast):
            instruction, _ = decode(payload)
        if isinstance(instruction, Update | Again):
            version = instruction.version if isinstance(instruction, Again) else instruction.parts[0].version
            if isinstance(instruction, Update) and instruction.phase == messages.COMMIT:
                for before, trace in list(self.traces.items()):
                    if trace.info["version"] == version:
                        del self.traces[before]
                        self.add(instruction.serial, trace)
                        self.emit("update.committed", trace, self._last_received)
                return
            info = {"id": instruction.serial, "version": version, "epoch": epoch_text(instruction.epoch)}
            trace = Trace(info | {"worker": self._worker}, self._last_received)
            self.add(instruction.serial, trace)
            self.emit("update.begin", trace, self._last_received)

    def note_staged(self, staged: Iterable[Staging]) -> None:
        """These updates are complete, and wait for the gate or for their commit."""
        for staging in staged:
            if (trace := self.traces.get(staging.serial)) is not None and not trace.is_staged:
                trace.is_staged = True
                self.emit("update.fetched", trace, self._last_received)
                self.emit("update.staged", trace)

    def finished(self, staging: Staging, error: BaseException | None) -> None:
        for serial in [serial for serial in self.traces if serial < staging.serial]:
            self.end(serial, SUPERSEDED)
        self.end(staging.serial, "" if error is None else repr(error))

    def end(self, key: int, failure: str = "") -> None:
        if (trace := self.traces.pop(key, None)) is not None:
            self.emit("update.end", trace, error=failure)
