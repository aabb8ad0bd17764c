"""The life of a version, as events: each hook, ``trace(event, info)``, is called with every one.

A trainer tells ``publish.*`` of a version, and ``deliver.*`` of a version and a worker; a worker tells ``update.*``.
While nothing listens, the bus asks once per update whether anything does, and that is all.

The options ``metrics_port=`` and ``tracing=`` are :class:`Monitoring`. :class:`Spans` is the hook for OpenTelemetry,
which is imported only if the program has imported it, or asks for it.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("asyncsync")

Hook = Callable[[str, dict[str, Any]], object]
Tracing = bool | Hook | None
ATTRIBUTES = {
    "publish.packed": ("nbytes",),
    "publish.published": ("version", "epoch"),
    "deliver.begin": ("worker", "version"),
    "update.begin": ("worker", "version", "epoch"),
}
PARTS = {"fetched": ("fetch", "begin"), "staged": ("stage", "fetched"), "end": ("apply", "staged")}
"""Of an update: the span that ends with a step, and the step that it began with."""


@dataclass(frozen=True)
class Monitoring:
    """The host and port of the metrics, and ``tracing``. A port and a hook belong to one process: they stay behind when
    a scheme is pickled or its process forks."""

    address: tuple[str, int] | None = None
    tracing: Tracing = None
    pid: int = field(default_factory=os.getpid, compare=False)

    @classmethod
    def given(cls, metrics_port: int | str | None, tracing: Tracing) -> Monitoring:
        """Raises TypeError or ValueError if a constructor's argument is invalid."""
        if inspect.iscoroutinefunction(tracing) or not (tracing in (True, False, None) or callable(tracing)):
            raise TypeError(
                f"tracing takes True, False, None or an ordinary function of (event, info), not {tracing!r}"
            )
        return cls(None if metrics_port is None else _address(metrics_port), tracing)

    @property
    def in_this_process(self) -> Monitoring:
        """What applies in this process."""
        return self if self.pid == os.getpid() else Monitoring(*self.__reduce__()[1])

    def __reduce__(self) -> tuple[type[Monitoring], tuple[None, Tracing]]:
        return Monitoring, (None, None if callable(self.tracing) else self.tracing)


UNMONITORED = Monitoring()


def _address(given: int | str) -> tuple[str, int]:
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", given)
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise ValueError(
            f"metrics_port={given!r}: give a port of this host's loopback (9100), or an address with one "
            '("0.0.0.0:9100"); 0 takes a free one'
        )
    return host.strip("[]") or "127.0.0.1", port


def debug_log(event: str, info: dict[str, Any]) -> None:
    """The hook for the debug log."""
    words = [f"{name} {info[name]}" for name in ("version", "models", "worker", "nbytes") if name in info]
    why = f": {info['error']}" if info.get("error") else ""
    logger.debug("%s: %s, %.2f ms%s", event, ", ".join(words), 1000 * info["seconds"], why)


class Spans:
    """``api`` is OpenTelemetry's module ``trace``, and ``tracer`` one of its tracers."""

    def __init__(self, api: Any, tracer: Any) -> None:
        self._api, self._tracer = api, tracer
        self._open: dict[tuple[str, int, int | None], tuple[Any, dict[str, int]]] = {}  # and when its steps were

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        kind, _, step = event.partition(".")
        key, now, failure = (kind, info["id"], info.get("worker")), info["time"], info.get("error", "")
        attributes = {f"asyncsync.{name}": info[name] for name in ATTRIBUTES.get(event, ())}
        if step == "begin":
            if kind == "publish":
                attributes = {"asyncsync.models": ", ".join(info["models"])}
            # A delivery is below its publication; the others are below the caller's span, if there is one.
            above, _ = self._open.get(("publish", info["id"], None), (None, {}))
            self._open[key] = self._begin(kind, now, attributes, above if kind == "deliver" else None), {step: now}
        elif key in self._open:  # a version may be over before it is packed
            span, times = self._open[key]
            span.set_attributes(attributes)
            if kind == "update" and step in PARTS:
                part, since = PARTS[step]
                if since in times:
                    told = {f"asyncsync.{name}": info[name] for name in ("worker", "version")}
                    self._end(self._begin(part, times[since], told, span), now, failure)
                times[step] = now
            elif step in ("packed", "fetched", "staged", "committed", "taken"):
                span.add_event(step, timestamp=now)
            if step == "end":
                del self._open[key]
                self._end(span, now, failure)

    def _begin(self, name: str, at: int, attributes: dict[str, Any], above: Any) -> Any:
        context = None if above is None else self._api.set_span_in_context(above)
        return self._tracer.start_span(f"asyncsync.{name}", context, attributes=attributes, start_time=at)

    def _end(self, span: Any, at: int, failure: str) -> None:
        if failure:
            span.set_status(self._api.StatusCode.ERROR, failure)
        span.end(end_time=at)


def hooks_of(tracing: Tracing) -> list[Hook]:
    """What the option asks for. Raises ImportError, naming the extra, if it is True and OpenTelemetry is missing."""
    if callable(tracing):
        return [tracing]
    if tracing is False or (tracing is None and "opentelemetry.trace" not in sys.modules):
        return []
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise ImportError(
            'tracing=True needs opentelemetry-api; install it with: pip install "asyncsync[metrics]"'
        ) from error
    provider = trace.get_tracer_provider()
    # Until the program has set up a provider, OpenTelemetry returns one of these.
    if tracing is None and isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return []
    return [Spans(trace, provider.get_tracer("asyncsync"))]
