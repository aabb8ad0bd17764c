"""Figures for Prometheus, served over HTTP by a thread of prometheus-client's.

Nothing is counted twice: when somebody looks, the bus is asked on its event loop how it is. So a bus that nobody looks
at does nothing. A loop that does not answer in time is itself a figure.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from asyncsync.errors import NotConnected
from asyncsync.net.processes import owned

PREFIX = "asyncsync_"
PATIENCE = 2.0  # seconds that the event loop may take to answer
READ_SECONDS = 10.0  # that whoever has connected may take for its next bytes: it keeps a thread and a descriptor
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


@dataclass
class Durations:
    """A histogram of seconds: how many were in each bucket (the last one has no bound), and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass(frozen=True)
class Measure:
    """One figure under several ``labels``: by their values, a number. ``kind``: ``"gauge"`` or ``"counter"``."""

    name: str
    kind: str
    help: str
    values: Mapping[Any, float]  # by a tuple of texts, one for each label
    labels: Sequence[str] = ()


class Metrics:
    """Serves the figures of one bus, until it is closed.

    Args:
        address: host and port; 0: one that is free.

    Attributes:
        address: where it is served.

    Raises:
        ImportError: prometheus-client is not installed; names the extra.
        NotConnected: the port is in use, or the address is not this host's.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ImportError(
                'metrics_port needs prometheus-client; install it with: pip install "asyncsync[metrics]"'
            ) from error
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look: Callable[[], list[Measure]] = list
        self._durations: Durations | None = None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        host, port = address
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            hint = "give another metrics_port, or 0 for one that is free"
            raise NotConnected(f"cannot serve metrics at {host}:{port}: {error.strerror}; {hint}") from error
        self._server.RequestHandlerClass = _bounded(self._server.RequestHandlerClass)
        self.address = host, int(self._server.server_port)
        owned.add(self)

    def attach(
        self, loop: asyncio.AbstractEventLoop, look: Callable[[], list[Measure]], durations: Durations | None
    ) -> None:
        """From now on there is a bus: ``look`` returns its figures, on its loop."""
        self._look, self._durations, self._loop = look, durations, loop

    def describe(self) -> list[Any]:
        """What prometheus-client asks a collector when it is registered: nothing, so that it does not collect."""
        return []

    def collect(self) -> Iterator[Any]:
        """What it asks for each answer; in a thread of its own."""
        loop = self._loop
        if loop is None:
            return
        asked = time.monotonic()
        measures: list[Measure] | None = None
        looking = self._ask()
        try:
            measures = asyncio.run_coroutine_threadsafe(looking, loop).result(PATIENCE)
        except TimeoutError:
            pass
        except RuntimeError:  # the loop is closed
            looking.close()
        late = time.monotonic() - asked
        told = "How long the event loop took to answer this scrape; it is busy, or blocked, where that is much."
        own = [
            Measure("up", "gauge", "Whether the event loop has answered.", {(): float(measures is not None)}),
            Measure("loop_answer_seconds", "gauge", told, {(): late}),
        ]
        yield from map(_family, [*own, *(measures or [])])
        if self._durations is not None:
            yield _histogram(self._durations)

    async def _ask(self) -> list[Measure]:
        return self._look()

    def close(self) -> None:
        """Free the port; takes up to half a second. Idempotent."""
        owned.discard(self)
        self._loop = None
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def disown(self) -> None:
        """In a forked child: the port is its parent's."""
        self._server.socket.close()


def _bounded(handler: Any) -> type[Any]:
    """The same handler of requests, but it hangs up where nothing comes."""

    class Bounded(handler):  # type: ignore[misc]
        timeout = READ_SECONDS

        def handle(self) -> None:
            with suppress(TimeoutError):
                super().handle()

    return Bounded


def _family(measure: Measure) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
    family = kind(PREFIX + measure.name, measure.help, labels=measure.labels)
    for labels, value in measure.values.items():
        family.add_metric(labels, value)
    return family


def _histogram(durations: Durations) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    told = "From the beginning of a publication until all its workers have applied it, or something newer."
    family = HistogramMetricFamily(f"{PREFIX}update_duration_seconds", told)
    bounds: Iterable[str] = (*map(str, BUCKETS), "+Inf")
    family.add_metric([], list(zip(bounds, accumulate(durations.counts), strict=True)), durations.total)
    return family
