"""The options ``metrics_port=`` and ``tracing=`` of a bus or scheme."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Hook = Callable[[str, dict[str, Any]], object]
Tracing = bool | Hook | None


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
    def here(self) -> Monitoring:
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
