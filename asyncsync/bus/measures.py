"""Measures: what a bus's figures for Prometheus are; see :mod:`asyncsync.monitor.metrics`, which serves them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink
from asyncsync.bus.status import receiver_status

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "asyncsync_"
STATES = ("live", "slow", "lost")


def serve_metrics(link: SenderLink | ReceiverLink) -> None:
    """Have the figures of this link served, if there is a place for that."""
    if link.metrics is None:
        return
    reference = weakref.ref(link)  # a bus that is forgotten is not to be kept by its figures

    def look() -> list[Metric]:
        found = reference()
        if isinstance(found, SenderLink):
            return _of_sender(found)
        return [] if found is None else _of_receiver(found, list(found.subscriber.models))

    link.metrics.attach(link.loop, look, has_durations=isinstance(link, SenderLink))


def _of_sender(link: SenderLink) -> list[Metric]:
    report = link.report()
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
        _gauge("version", "The newest version published.", {(): report.version}),
        _counter("published_versions", "Versions, with those of a checkpoint.", {(): link.counted}),
        _gauge("model_bytes", "Size of a model's newest weights.", sizes, ("model",)),
        _gauge("workers", "Workers, by state; relays and guests.", _by(report.counts), ("state",)),
        _gauge("worker_applied_version", "The version the worker has applied.", applied, (*who, "model")),
        _gauge("worker_lag_versions", "How many versions the worker is behind.", each(lambda w: w.lag), who),
        _gauge("worker_state", "1 for the worker's current state.", states, (*who, "state")),
        _gauge("worker_last_seen_seconds", "Time since the worker's last message.", seen, who),
        _counter("worker_sent_bytes", "Weights sent to the worker.", each(lambda w: w.bytes_sent), who),
        _counter("refusals", "Connections and messages that were refused.", _by(report.refused), ("reason",)),
        *_of_both(link),
    ]


def _of_receiver(link: ReceiverLink, models: list[str]) -> list[Metric]:
    [(worker, status)] = receiver_status(link, models).items()
    who, key = ("worker",), (str(worker),)
    applied = {(str(worker), name): float(link.version([name])) for name in models}
    states = {(str(worker), state): float(status.state == state) for state in STATES}
    refused = link.whereabouts.refused
    return [
        _gauge("receiver_version", "The version that a model shows.", applied, (*who, "model")),
        _gauge("receiver_target_version", "The version that it should have.", {key: status.target}, who),
        _gauge("receiver_lag_versions", "How many versions the worker is behind.", {key: status.lag}, who),
        _gauge("receiver_sender_state", "1 for the sender's current state.", states, (*who, "state")),
        _counter("received_bytes", "Weights received.", {key: status.bytes_sent}, who),
        _counter("refusals", "Refused connection attempts.", _by(refused), ("reason",)),
        *_of_both(link),
    ]


def _of_both(link: SenderLink | ReceiverLink) -> list[Metric]:
    return [
        _counter("dropped_messages", "Messages that were dropped.", _by(link.dropped), ("reason",)),
        _counter("loop_stalled_seconds", "Total time the event loop was blocked.", {(): link.stalled}),
    ]


def _by(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): float(count) for name, count in counts.items()}


def _gauge(name: str, told: str, values: Mapping[Any, float], labels: Sequence[str] = ()) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(PREFIX + name, told, labels=labels), values)


def _counter(name: str, told: str, values: Mapping[Any, float], labels: Sequence[str] = ()) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(PREFIX + name, told, labels=labels), values)


def _filled(family: Any, values: Mapping[Any, float]) -> Metric:
    """``values``: by a tuple of texts, one for each label."""
    for labels, value in values.items():
        family.add_metric(labels, value)
    result: Metric = family
    return result
