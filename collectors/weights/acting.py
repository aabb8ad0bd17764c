"""The weights that act in this process: blocks in which they do not change, and which version they are."""

from __future__ import annotations

from collections.abc import Callable

from asyncsync.arguments import check_timeout
from asyncsync.collectors.weights.receivers import Receivers
from asyncsync.model.gate import Gate
from asyncsync.model.readers import Hold

__all__ = ["ActingWeights", "Holds"]


class ActingWeights:
    """Of one collector: held by each of its steps, and the number that its frames are labelled with.

    Args:
        gate: of updates that are applied here without schemes.
        receivers: schemes by which weights come from above.

    Attributes:
        own: how many updates were applied here without schemes.
        counted_above: how many versions updaters above have counted; None: nobody is above.
        newest_above: the newest version that was published for this collector, from a place that is quicker than its
            schemes; None: there is no such place.
    """

    def __init__(self, gate: Gate, receivers: Receivers) -> None:
        self.own = 0
        self.counted_above: Callable[[], int] | None = None
        self.newest_above: Callable[[], int] | None = None
        self._gate = gate
        self._receivers = receivers

    def holds(self) -> Holds:
        """For steps, policy and environment: no weights of this collector change within."""
        return Holds([self._gate, *self._receivers.gates])

    def version(self) -> int:
        """What frames are labelled with: the version that acts; with a trainer above, that of its schemes and what its
        updaters have counted."""
        if self.counted_above is not None:
            return self._receivers.version + self.counted_above()
        return self.applied()

    def applied(self) -> int:
        """The version that acts: of the policy's bus where there are receiver schemes (else of the first), else the
        count of updates applied here."""
        return self._receivers.version if self._receivers else self.own

    def newest(self) -> int:
        """The newest version that the trainer has published, as far as is known here, by the count of
        :meth:`applied`."""
        if self.newest_above is not None:
            return self.newest_above()
        return self._receivers.newest if self._receivers else self.own

    def wait(self, version: int, timeout: float) -> None:
        """Wait, outside any hold, until this version or a newer one acts.

        Raises:
            AckTimeout: not within the timeout (seconds).
            ClosedError, Fenced: it will not come.
        """
        check_timeout(timeout)
        self._receivers.wait(version, timeout)

    def keep_up(self, max_lag: int, timeout: float) -> None:
        """Wait, outside any hold, until the acting weights are at most so many versions behind the newest, on each bus
        by its own count.

        Raises:
            AckTimeout: not within the timeout (seconds), for any of the waits.
            ClosedError, Fenced: it will not come.
        """
        self._receivers.keep_up(max_lag, timeout)
        while self.newest_above is not None and (newest := self.newest_above()) - self.applied() > max_lag:
            self.wait(newest - max_lag, timeout)

    def check(self) -> None:
        """Raises Fenced: another has this worker's place, and nothing newer will ever come here."""
        self._receivers.check()


class Holds:
    """Several gates held at once, as one context manager for one use."""

    __slots__ = ("_gates", "_open")

    def __init__(self, gates: list[Gate]) -> None:
        self._gates = gates
        self._open: list[Hold] = []

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
