"""What a bus is asked to tell of itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Monitoring:
    """What was given to a constructor.

    A port is one process's: it stays behind when a scheme is pickled or its process forks.

    Attributes:
        address: host and port of the metrics; None: there are none.
        tracing: True: with spans; False: without; None: where the program has set up OpenTelemetry.
    """

    address: tuple[str, int] | None = None
    tracing: bool | None = None
    pid: int = field(default_factory=os.getpid, compare=False)

    @classmethod
    def given(cls, metrics_port: int | str | None, tracing: bool | None) -> Monitoring:
        """Of a constructor's arguments. Raises TypeError or ValueError: they are nothing of the kind."""
        if tracing is not None and not isinstance(tracing, bool):
            raise TypeError(f"tracing takes True, False or None, not {tracing!r}")
        return cls(None if metrics_port is None else _address(metrics_port), tracing)

    @property
    def here(self) -> Monitoring:
        """As far as it concerns this process."""
        return self if self.pid == os.getpid() else Monitoring(None, self.tracing)

    def __reduce__(self) -> Any:
        return Monitoring, (None, self.tracing)


UNMONITORED = Monitoring()


def _address(given: int | str) -> tuple[str, int]:
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", given)
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise ValueError(
            f"metrics_port={given!r}: give a port of this host's loopback (9100), or an address with one "
            '("0.0.0.0:9100"); 0 takes one that is free'
        )
    return host.strip("[]") or LOCAL, port
