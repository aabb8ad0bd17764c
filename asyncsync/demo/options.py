"""What the command line says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        workers: worker processes.
        seed: of the networks and environments; the order in which batches come is still the operating system's.
        target: mean return of the last 100 episodes at which the demo ends.
        max_seconds: after which it gives up.
        plot: the picture's path.
        uvloop: run the trainer on uvloop instead of asyncio's own loop.
        scheme: how the weights travel: "shared", "process", "zmq", "distributed", "rpc" or "ray".
        endpoint: where the trainer binds; None draws a private ipc path.
    """

    workers: int = 2
    seed: int = 0
    target: float = 475.0
    max_seconds: float = 600.0
    plot: str = "asyncsync-demo.png"
    uvloop: bool = False
    scheme: str = "shared"
    endpoint: str | None = None

    @property
    def new_loop(self) -> Callable[[], Any] | None:
        """A factory of event loops; None: asyncio's own."""
        if not self.uvloop:
            return None
        import uvloop

        new_loop: Callable[[], Any] = uvloop.new_event_loop
        return new_loop
