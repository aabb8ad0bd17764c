"""Metrics for Prometheus, which a thread of prometheus-client serves over HTTP.

For each scrape, the bus collects its metrics on its event loop; only the durations of updates are recorded before. So
an idle bus does nothing for metrics. If the loop does not answer in time, the metric ``asyncsync_up`` is 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncsync.errors import NotConnected
from asyncsync.net.processes import closed_in_child

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    Collect = Callable[[], Coroutine[Any, Any, list[Metric]]]

PATIENCE = 2.0  # seconds that the event loop may take to answer
READ_SECONDS = 10.0  # that a client may take to send its next bytes, because it occupies a thread and a descriptor
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class Metrics:
    """Serves the metrics of one bus at ``address``, a host and a port (0: a free one), until it is closed.

    Attributes:
        durations: how long updates took; the bus adds to it. None on a worker.

    Raises:
        ImportError: prometheus-client is not installed; the message names the extra.
        NotConnected: the port is in use, or the address is not this host's.
    """

    def __init__(self, address: tuple[str, int], *, has_durations: bool = False) -> None:
        try:
            from prometheus_client import CollectorRegistry, Histogram, start_http_server
        except ImportError as error:
            raise ImportError(
                'metrics_port needs prometheus-client; install it with: pip install "asyncsync[metrics]"'
            ) from error
        self.durations: Histogram | None = None
        if has_durations:
            text = "From the beginning of a publication until all its workers have applied it, or a newer version."
            self.durations = Histogram("asyncsync_update_duration_seconds", text, buckets=BUCKETS, registry=None)
        # The bus's loop, and the coroutine function that returns its metrics.
        self._bus: tuple[asyncio.AbstractEventLoop, Collect] | None = None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        host, port = address
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            hint = "give another metrics_port, or 0 for a free one"
            raise NotConnected(f"cannot serve metrics at {host}:{port}: {error.strerror}; {hint}") from error
        self._server.RequestHandlerClass = _bounded(self._server.RequestHandlerClass)
        self.address = host, int(self._server.server_port)
        closed_in_child.add(self)

    def attach(self, loop: asyncio.AbstractEventLoop, collect: Collect) -> None:
        """From now on there is a bus; ``collect``, which runs on its loop, returns its metrics."""
        self._bus = loop, collect

    def collect(self) -> Iterator[Metric]:
        """prometheus-client calls this for each scrape, in one of its threads."""
        from prometheus_client.core import GaugeMetricFamily

        if (bus := self._bus) is None:
            return
        loop, collect_bus = bus
        asked = time.monotonic()
        found: list[Metric] | None = None
        collecting = collect_bus()
        try:
            found = asyncio.run_coroutine_threadsafe(collecting, loop).result(PATIENCE)
        except TimeoutError:
            pass
        except RuntimeError:  # the loop is closed
            collecting.close()
        seconds = time.monotonic() - asked
        yield GaugeMetricFamily("asyncsync_up", "Whether the event loop has answered.", found is not None)
        text = "How long the event loop took to answer this scrape; it is busy or blocked if that is long."
        yield GaugeMetricFamily("asyncsync_loop_answer_seconds", text, seconds)
        yield from found or []
        for family in [] if self.durations is None else self.durations.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def close(self) -> None:
        """Free the port; this takes up to half a second. Idempotent."""
        closed_in_child.discard(self)
        self._bus = None
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def close_in_child(self) -> None:
        """In a forked child: close the inherited socket. The port remains the parent's."""
        self._server.socket.close()


def _bounded(handler: Any) -> type[Any]:
    """This request handler, but with a time limit: it hangs up on a client that sends nothing."""

    class Bounded(handler):  # type: ignore[misc]
        timeout = READ_SECONDS

        def handle(self) -> None:
            with suppress(TimeoutError):
                super().handle()

    return Bounded
