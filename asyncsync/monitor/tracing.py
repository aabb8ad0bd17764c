"""OpenTelemetry, where it is there: spans of a version's life. Not imported unless the program has, or asks for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

Attributes = Mapping[str, str | int | float]


class Span:
    """One span of OpenTelemetry's; all times are in nanoseconds since 1970."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def event(self, name: str, at: int) -> None:
        self._span.add_event(name, timestamp=at)

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, at: int, failure: str = "") -> None:
        """``failure``: why it did not come to its end; empty: it did."""
        if failure:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end(end_time=at)


class Tracer:
    """Begins spans; ``tracer`` is OpenTelemetry's."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def begin(self, name: str, at: int, attributes: Attributes, parent: Span | None = None) -> Span:
        """Below ``parent``; None: below the caller's span, if there is one."""
        from opentelemetry.trace import set_span_in_context

        context = None if parent is None else set_span_in_context(parent._span)
        return Span(self._tracer.start_span(name, context, attributes=dict(attributes), start_time=at))


def find_tracer(tracing: bool | None) -> Tracer | None:
    """By a bus's ``tracing``. Raises ImportError: opentelemetry-api is asked for, and is not installed; names the
    extra."""
    if tracing is False:
        return None
    if tracing:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ImportError(
                'tracing=True needs opentelemetry-api; install it with: pip install "asyncsync[metrics]"'
            ) from error
        return Tracer(trace.get_tracer("asyncsync"))
    found = sys.modules.get("opentelemetry.trace")
    if found is None:
        return None
    provider = found.get_tracer_provider()
    # What there is until the program has set up one of its own.
    if isinstance(provider, found.ProxyTracerProvider | found.NoOpTracerProvider):
        return None
    return Tracer(provider.get_tracer("asyncsync"))
