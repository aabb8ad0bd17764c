"""The schemes by which a collector receives weights from the collector or trainer above it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from asyncsync.bus.core import BusCore
from asyncsync.collectors.weights.senders import as_blocking, connect_all, shut_down_all
from asyncsync.model.gate import Gate
from asyncsync.schemes.blocking import Bus, WeightSyncScheme
from asyncsync.schemes.core import SchemeCore
from asyncsync.schemes.none import NoSyncCore

__all__ = ["Receivers"]


class Receivers:
    """Schemes by model id. Updates are applied as they come, between two steps: whoever steps holds the gates.

    Attributes:
        buses: of the schemes, each once.
        gates: of the buses, and of those that the user has joined.
    """

    def __init__(self) -> None:
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.buses: list[Bus] = []
        self.gates: list[Gate] = []
        self._joined: dict[str, SchemeCore] = {}  # by the user, with the collector as their context
        self._main: BusCore | None = None  # whose versions frames are labelled with

    def __bool__(self) -> bool:
        """Whether weights come from above."""
        return self._main is not None

    def joined(self, scheme: SchemeCore) -> None:
        """A scheme has been initialised with the collector as its context: here, or by the user. Its updates come as it
        was told; frames are labelled with its versions, and no step is under way when they are applied."""
        self._joined[scheme.model_id or ""] = scheme
        self._settle()

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
        fresh = {m: s for m, s in blocking.items() if s._role != "receiver" or s._pid != os.getpid()}
        for model_id, scheme in blocking.items():
            if model_id in fresh:
                try:
                    context.get_model(model_id)
                except LookupError as error:
                    raise ValueError(f"weight_recv_schemes[{model_id!r}]: {error}") from error
                scheme._check_fresh("receiver")
            elif scheme.model_id != model_id:
                raise ValueError(
                    f"weight_recv_schemes[{model_id!r}] was initialised with model_id={scheme.model_id!r}: "
                    "use one name, or leave init_on_receiver() to the collector"
                )
        begun = []
        try:
            for model_id, scheme in fresh.items():
                scheme.init_on_receiver(model_id, context, worker_idx=context.worker_idx, gate="hold")
                begun.append(scheme)
        except BaseException:
            shut_down_all(begun, 0.0)  # all are registered, or none
            self._joined = {m: s for m, s in self._joined.items() if s not in begun}
            self._settle()
            raise
        self.schemes |= blocking
        self._settle()

    def _settle(self) -> None:
        self.buses = list({id(s._bus): s._bus for s in self.schemes.values() if _moves(s)}.values())
        known = {m: s._bus for m, s in (self._joined | self.schemes).items() if _moves(s)}
        buses = {id(bus): bus for bus in known.values()}
        self.gates = [bus._gate for bus in buses.values() if bus._gate is not None]
        self._main = known.get("policy", next(iter(known.values()), None))

    def connect(self, schemes: Mapping[str, Any], timeout: float) -> None:
        """The rendezvous with the sender: when this returns, its initial weights have been applied."""
        connect_all([self.schemes[model_id] for model_id in schemes], timeout)

    def check(self) -> None:
        """Raises Fenced: another has this worker's place, and nothing newer will ever come here."""
        for bus in self.buses:
            bus._check_fenced()

    def take_in(self) -> None:
        """Apply what has come but waits to be received (``apply="on_receive"``). Never waits for more.

        Raises:
            ClosedError, Fenced: nothing has come, and nothing will.
        """
        for scheme in self.schemes.values():
            if _moves(scheme):
                scheme._bus._run(lambda s=scheme: s._take_in(None))  # type: ignore[misc]

    @property
    def version(self) -> int:
        """The version that acts: of several buses, that of the policy's (or of the first). Each counts its own; in a
        tree of collectors, its root does."""
        return 0 if self._main is None else self._main._shown_origin()

    @property
    def newest(self) -> int:
        """The newest version that this side has heard of, by the count of :attr:`version`."""
        return 0 if self._main is None else self.version + self._main._target() - self._main.version

    def wait(self, version: int, timeout: float) -> None:
        """Until this version, or a newer one, acts, by the count of :attr:`version`.

        Raises:
            AckTimeout: not within the timeout (seconds).
            ClosedError, Fenced: it will not come.
        """
        if isinstance(self._main, Bus):
            self._main._wait_origin(version, timeout)

    def keep_up(self, max_lag: int, timeout: float) -> None:
        """Until what acts is at most so many versions behind what has been heard of, on each bus.

        Raises:
            AckTimeout: a bus did not get there within the timeout (seconds).
            ClosedError, Fenced: it will not.
        """
        for bus in self.buses:
            while (target := bus._target()) - bus.version > max_lag:
                bus.wait_version(target - max_lag, timeout=timeout)


def _moves(scheme: SchemeCore) -> bool:
    return not isinstance(scheme, NoSyncCore)
