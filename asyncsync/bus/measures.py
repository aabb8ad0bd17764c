"""Measures: what a bus's figures for Prometheus are; see :mod:`asyncsync.monitor.metrics`, which serves them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink
from asyncsync.bus.status import receiver_status
from asyncsync.monitor.metrics import Measure

STATES = ("live", "slow", "lost")


def serve_metrics(link: SenderLink | ReceiverLink) -> None:
    """Have the figures of this link served, if there is a place for that."""
    if link.metrics is None:
        return
    reference = weakref.ref(link)  # a bus that is forgotten is not to be kept by its figures

    def look() -> list[Measure]:
        found = reference()
        if isinstance(found, SenderLink):
            return _of_sender(found)
        return [] if found is None else _of_receiver(found, list(found.subscriber.models))

    link.metrics.attach(link.loop, look, link.observer.durations if isinstance(link, SenderLink) else None)


def _of_sender(link: SenderLink) -> list[Measure]:
    link.caught_up()
    report = link.reporter.report()
    workers = {(worker.role, str(worker.index)): worker for worker in report.workers}
    names = [model.model_id for model in report.models]

    def each(figure: Callable[[Any], float]) -> dict[tuple[str, ...], float]:
        return {key: figure(worker) for key, worker in workers.items()}

    applied = {
        (*key, name): float(version)
        for key, worker in workers.items()
        for name, version in zip(names, worker.versions, strict=False)
        if version is not None
    }
    seen = {key: worker.last_seen / 1000 for key, worker in workers.items() if worker.last_seen is not None}
    states = {(*key, state): float(w.state == state) for key, w in workers.items() for state in STATES}
    sizes = {(model.model_id,): float(model.nbytes) for model in report.models}
    who = ("role", "worker")
    return [
        Measure("version", "gauge", "The newest version published.", {(): report.version}),
        Measure("published_versions", "counter", "Versions, with those of a checkpoint.", {(): link.counted}),
        Measure("model_bytes", "gauge", "Size of a model's newest weights.", sizes, ("model",)),
        Measure("workers", "gauge", "Workers, by state; relays and guests.", _by(report.counts), ("state",)),
        Measure("worker_applied_version", "gauge", "The version the worker has applied.", applied, (*who, "model")),
        Measure("worker_lag_versions", "gauge", "How many versions the worker is behind.", each(lambda w: w.lag), who),
        Measure("worker_state", "gauge", "1 for the worker's current state.", states, (*who, "state")),
        Measure("worker_last_seen_seconds", "gauge", "Time since the worker's last message.", seen, who),
        Measure("worker_sent_bytes", "counter", "Weights sent to the worker.", each(lambda w: w.bytes_sent), who),
        Measure("refusals", "counter", "Connections and messages that were refused.", _by(report.refused), ("reason",)),
        *_of_both(link),
    ]


def _of_receiver(link: ReceiverLink, models: list[str]) -> list[Measure]:
    [(worker, status)] = receiver_status(link, models).items()
    who, key = ("worker",), (str(worker),)
    applied = {(str(worker), name): float(link.version([name])) for name in models}
    states = {(str(worker), state): float(status.state == state) for state in STATES}
    refused = link.whereabouts.dialer.refused
    return [
        Measure("receiver_version", "gauge", "The version that a model shows.", applied, (*who, "model")),
        Measure("receiver_target_version", "gauge", "The version that it should have.", {key: status.target}, who),
        Measure("receiver_lag_versions", "gauge", "How many versions the worker is behind.", {key: status.lag}, who),
        Measure("receiver_sender_state", "gauge", "1 for the sender's current state.", states, (*who, "state")),
        Measure("received_bytes", "counter", "Weights received.", {key: status.bytes_sent}, who),
        Measure(
            "refusals",
            "counter",
            "Refused connection attempts.",
            _by(refused),
            ("reason",),
        ),
        *_of_both(link),
    ]


def _of_both(link: SenderLink | ReceiverLink) -> list[Measure]:
    return [
        Measure("dropped_messages", "counter", "Messages that were dropped.", _by(link.dropped), ("reason",)),
        Measure("loop_stalled_seconds", "counter", "Total time the event loop was blocked.", {(): link.stalled}),
    ]


def _by(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): float(count) for name, count in counts.items()}
