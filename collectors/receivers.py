"""The schemes by which a collector receives weights from the collector or trainer above it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from asyncsync.blocking import Bus, WeightSyncScheme
from asyncsync.collectors.senders import as_blocking, connect_all
from asyncsync.gate import Gate
from asyncsync.schemes.none import BlockingNoSync

__all__ = ["Receivers"]


class Receivers:
    """Schemes by model id. Updates are applied as they come, between two steps: whoever steps holds the gates.

    Attributes:
        buses: of the schemes, each once.
        gates: of the buses.
    """

    def __init__(self) -> None:
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.buses: list[Bus] = []
        self.gates: list[Gate] = []

    def register(self, schemes: Mapping[str, Any], context: Any) -> None:
        """Initialise schemes, where the user has not, and keep them. Without communication.

        Args:
            schemes: ``{model_id: scheme}``.
            context: knows the models, and its ``worker_idx``.

        Raises:
            TypeError, ValueError, RuntimeError: schemes that cannot serve as receivers, or a context that does not know
                which worker it is.
        """
        if known := sorted(schemes.keys() & self.schemes.keys()):
            raise ValueError(f"{known} are being received already: register each model once")
        blocking = as_blocking("weight_recv_schemes", schemes)
        for model_id, scheme in blocking.items():
            if scheme._role != "receiver" or scheme._pid != os.getpid():
                scheme.init_on_receiver(model_id, context, worker_idx=context.worker_idx, gate="hold")
            elif scheme.model_id != model_id:
                raise ValueError(
                    f"weight_recv_schemes[{model_id!r}] was initialised with model_id={scheme.model_id!r}: "
                    "use one name, or leave init_on_receiver() to the collector"
                )
        self.schemes |= blocking
        real = [s for s in self.schemes.values() if not isinstance(s, BlockingNoSync)]
        self.buses = list({id(s._bus): s._bus for s in real}.values())
        self.gates = [bus._gate for bus in self.buses if bus._gate is not None]

    def connect(self, schemes: Mapping[str, Any], timeout: float) -> None:
        """The rendezvous with the sender: when this returns, its initial weights have been applied."""
        connect_all([self.schemes[model_id] for model_id in schemes], timeout)

    def take_in(self) -> None:
        """Apply what has come but waits to be received (``apply="on_receive"``). Never waits for more.

        Raises:
            ClosedError, Fenced: nothing has come, and nothing will.
        """
        for scheme in self.schemes.values():
            if not isinstance(scheme, BlockingNoSync):
                scheme._bus._run(lambda s=scheme: s._take_in(None))  # type: ignore[misc]

    @property
    def version(self) -> int:
        """The version that acts: of several buses, the oldest."""
        return min((bus._acting() for bus in self.buses), default=0)

    @property
    def newest(self) -> int:
        """The newest version that this side has heard of, by the count of :attr:`version`."""
        return self.version + max((bus._target() - bus._acting() for bus in self.buses), default=0)

    def wait(self, version: int, timeout: float) -> None:
        """Until every bus has applied this version, or a newer one.

        Raises:
            AckTimeout: not within the timeout (seconds).
            ClosedError, Fenced: it will not come.
        """
        deadline = time.monotonic() + timeout
        for bus in self.buses:
            bus.wait_version(version, timeout=max(0.0, deadline - time.monotonic()))
