"""The events of a version, from its publication to its end: each hook, ``trace(event, info)``, gets every event.

A trainer emits ``publish.*`` for each version, and ``deliver.*`` for each version and worker; a worker emits
``update.*``. Without a listener, the only cost is to find that out, a few times per update.

:class:`Monitoring` has the options ``metrics_port=`` and ``tracing=``. :class:`Spans` is the hook for OpenTelemetry,
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
CHILD_SPANS = {"fetched": ("fetch", "begin"), "staged": ("stage", "fetched"), "end": ("apply", "staged")}
"""By the last step of each span within an update's span: its name, and its first step."""


@dataclass(frozen=True)
class Monitoring:
    """The host and port of the metrics, and ``tracing``. A port and a hook belong to one process: a pickled scheme does
    not take them along, and a forked child does not use them."""

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
        """This, or in a forked child what remains of it there."""
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
    words = [f"{name} {info[name]}" for name in ("version", "models", "worker", "nbytes") if name in info]
    why = f": {info['error']}" if info.get("error") else ""
    logger.debug("%s: %s, %.2f ms%s", event, ", ".join(words), 1000 * info["seconds"], why)


class Spans:
    """The hook for OpenTelemetry. ``api`` is OpenTelemetry's module ``trace``, and ``tracer`` one of its tracers."""

    def __init__(self, api: Any, tracer: Any) -> None:
        self._api, self._tracer = api, tracer
        # The spans that have not ended, and the times of their steps.
        self._open: dict[tuple[str, int, int | None], tuple[Any, dict[str, int]]] = {}

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        kind, _, step = event.partition(".")
        key, now, failure = (kind, info["id"], info.get("worker")), info["time"], info.get("error", "")
        attributes = {f"asyncsync.{name}": info[name] for name in ATTRIBUTES.get(event, ())}
        if step == "begin":
            if kind == "publish":
                attributes = {"asyncsync.models": ", ".join(info["models"])}
            # The parent of a delivery is its publication; of the others it is the caller's span, if there is one.
            publication, _ = self._open.get(("publish", info["id"], None), (None, {}))
            parent = publication if kind == "deliver" else None
            self._open[key] = self._begin(kind, now, attributes, parent), {step: now}
        elif key in self._open:  # a version's span may end before it is packed
            span, times = self._open[key]
            span.set_attributes(attributes)
            if kind == "update" and step in CHILD_SPANS:
                name, since = CHILD_SPANS[step]
                if since in times:
                    attributes = {f"asyncsync.{label}": info[label] for label in ("worker", "version")}
                    self._end(self._begin(name, times[since], attributes, span), now, failure)
                times[step] = now
            elif step in ("packed", "fetched", "staged", "committed", "taken"):
                span.add_event(step, timestamp=now)
            if step == "end":
                del self._open[key]
                self._end(span, now, failure)

    def _begin(self, name: str, at: int, attributes: dict[str, Any], parent: Any) -> Any:
        context = None if parent is None else self._api.set_span_in_context(parent)
        return self._tracer.start_span(f"asyncsync.{name}", context, attributes=attributes, start_time=at)

    def _end(self, span: Any, at: int, failure: str) -> None:
        if failure:
            span.set_status(self._api.StatusCode.ERROR, failure)
        span.end(end_time=at)


def hooks_of(tracing: Tracing) -> list[Hook]:
    """The hooks for the option. Raises ImportError, which names the extra, if it is True without OpenTelemetry."""
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
    # OpenTelemetry returns one of these until the program has set up a provider.
    if tracing is None and isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return []
    return [Spans(trace, provider.get_tracer("asyncsync"))]
