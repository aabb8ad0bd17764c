"""The weights that act in this process: the schemes by which they come from the collector or trainer above, blocks in
which they do not change, and which version they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from asyncsync.arguments import check_timeout
from asyncsync.bus.core import BusCore
from asyncsync.collectors.weights.senders import as_blocking, buses_of, connect_all, shut_down_all
from asyncsync.model.gate import Gate
from asyncsync.model.readers import Hold
from asyncsync.schemes.blocking import Bus, WeightSyncScheme
from asyncsync.schemes.core import SchemeCore
from asyncsync.schemes.none import NoSyncCore

__all__ = ["ActingWeights", "Holds"]


class ActingWeights:
    """The acting weights of one collector, held by each of its steps. What schemes receive is applied between two
    steps.

    Attributes:
        schemes: those that receive, by model id.
        own: how many updates were applied here without schemes.
        counted_above: how many versions updaters above have counted; None: nobody is above.
        newest_above: reads the newest version published for this collector; None: only its schemes know of one.
    """

    def __init__(self, gate: Gate) -> None:
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.own = 0
        self.counted_above: Callable[[], int] | None = None
        self.newest_above: Callable[[], int] | None = None
        self._gate = gate
        self._gates = [gate]  # and those of the buses
        self._buses: list[Bus] = []  # of the schemes, each once
        self._joined: dict[str, SchemeCore] = {}  # by the user, with the collector as their context
        self._main: BusCore | None = None  # whose versions frames are labelled with

    # -- from above ---------------------------------------------------------------------------------------------------

    @property
    def come_from_above(self) -> bool:
        """Whether any scheme brings weights."""
        return self._main is not None

    def joined(self, scheme: SchemeCore) -> None:
        """A scheme was initialised, here or by the user, with the collector as its context. From now on no step is
        under way when its updates are applied, and frames are labelled with its versions."""
        self._joined[scheme.model_id or ""] = scheme
        self._find_buses()

    def register(self, schemes: Mapping[str, Any], context: Any) -> None:
        """Initialise schemes, ``{model_id: scheme}``, unless the user has, without communication. ``context`` knows the
        models and its ``worker_idx``. Raises TypeError, ValueError, RuntimeError: a scheme that cannot receive, or no
        ``worker_idx``."""
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
            self._find_buses()
            raise
        self.schemes |= blocking
        self._find_buses()

    def _find_buses(self) -> None:
        self._buses = buses_of(self.schemes.values())
        known = self._joined | self.schemes
        self._gates = [self._gate, *(bus._gate for bus in buses_of(known.values()) if bus._gate is not None)]
        moving = buses_of([known[m] for m in ("policy", *known) if m in known])
        self._main = moving[0] if moving else None

    def connect(self, schemes: Mapping[str, Any], timeout: float) -> None:
        """Connect to the sender; on return, its initial weights have been applied."""
        connect_all([self.schemes[model_id] for model_id in schemes], timeout)

    def check(self) -> None:
        """Raises Fenced: another process has this worker's place, and nothing newer will ever come here."""
        for bus in self._buses:
            bus._check_fenced()

    def take_in(self) -> None:
        """Apply updates that wait for a receive (``apply="on_receive"``); never waits for more. Raises ClosedError,
        Fenced: there are none, and none will come."""
        for scheme in self.schemes.values():
            if not isinstance(scheme, NoSyncCore):
                scheme._bus._run(lambda s=scheme: s._take_in(None))  # type: ignore[misc]

    # -- steps --------------------------------------------------------------------------------------------------------

    def holds(self) -> Holds:
        """A block for steps, policy and environment, in which no weights of this collector change."""
        return Holds(self._gates)

    def version(self) -> int:
        """The version with which frames are labelled: the acting one; with a trainer above, that of its schemes plus
        what its updaters have counted."""
        if self.counted_above is None:
            return self.applied()
        return self.received() + self.counted_above()

    def received(self) -> int:
        """The version that has come by schemes: of several buses, that of the policy's, or of the first. Each counts
        its own; in a tree of collectors, its root does."""
        return self.origin()[0]

    def origin(self) -> tuple[int, bytes]:
        """The version :meth:`received`, and its metadata."""
        if self._main is None:
            return 0, b""
        acting = self._main._acting(self._main._schemes)
        return acting.origin, acting.metadata

    def applied(self) -> int:
        """The version that acts: :meth:`received`, or where nothing brings weights from above the count of updates
        applied here."""
        return self.own if self._main is None else self.received()

    def newest(self) -> int:
        """The newest version that the trainer is known to have published, by the count of :meth:`applied`."""
        if self.newest_above is not None:
            return self.newest_above()
        return self.own if self._main is None else self.applied() + self._main._target() - self._main.version

    def wait(self, version: int, timeout: float) -> None:
        """Wait up to ``timeout`` seconds, outside any hold, until this version or a newer one acts. Raises AckTimeout;
        ClosedError, Fenced: it will not come."""
        check_timeout(timeout)
        if isinstance(self._main, Bus):
            self._main._wait_origin(version, timeout)

    def keep_up(self, max_lag: int, timeout: float) -> None:
        """Wait, outside any hold, until the acting weights are at most ``max_lag`` versions behind the newest, on each
        bus by its own count. Raises AckTimeout: one of the waits took longer than ``timeout`` seconds; ClosedError,
        Fenced."""
        for bus in self._buses:
            while (target := bus._target()) - bus.version > max_lag:
                bus.wait_version(target - max_lag, timeout=timeout)
        while self.newest_above is not None and (newest := self.newest_above()) - self.applied() > max_lag:
            self.wait(newest - max_lag, timeout)


class Holds:
    """Several gates held at once, as one context manager for one use."""

    __slots__ = ("_gates", "_open")

    def __init__(self, gates: list[Gate]) -> None:
        self._gates = gates
        self._open: list[Hold[None]] = []

    @property
    def awaited(self) -> bool:
        """Whether an update waits for the end of this block."""
        return any(gate.pending for gate in self._gates)

    def __enter__(self) -> Holds:
        try:
            for gate in self._gates:
                self._open.append(hold := gate.hold())
                hold.__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._open:
            try:
                self._open[-1].__exit__(None, None, None)
            finally:  # the others, too, whatever this one raises
                self._open.pop()
                self.__exit__()
