"""Member: what a bus needs of a scheme, of which each brings one model; and how schemes that were constructed or
pickled apart come onto one bus."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from asyncsync.arguments import check_count, check_quorum
from asyncsync.bus.carrier import Carrier
from asyncsync.monitor.options import UNMONITORED
from asyncsync.weights.tree import FlatWeights

# Copies of one shared bus that were pickled apart find each other again in the worker: one connection per worker_idx.
_receiving: weakref.WeakValueDictionary[tuple[str, int, int], Any] = weakref.WeakValueDictionary()

ARGUMENTS = {"keys": "server_key", "monitoring": "metrics_port", "connect_endpoint": "connect"}

Source = FlatWeights | Mapping[int, FlatWeights]
"""A model's weights for everybody, or for each worker its own, ready to be packed."""


class Calls(Protocol):
    """Calls of the workers' objects, which are told so to apply a version. On the bus's event loop."""

    def begin(self, version: int, workers: Sequence[int] | None, models: Sequence[str]) -> None:
        """These models have this version: call the workers that it is for; None: all whose target it is."""

    def is_pending(self, worker: int, version: int) -> bool:
        """Whether a call for this version is under way, or waits."""

    def failure(self, worker: int, version: int) -> Exception | None:
        """Why a call for it, or for a newer one, has failed; None: none has."""


class Member(Protocol):
    """A scheme, as its bus sees it. Everything is called on the bus's event loop, unless noted otherwise."""

    _bus: Any
    _own_bus: bool  # whether nobody else may join its bus
    _reconnect: bool  # a receiver's: whether it outlives its sender
    _role: str | None
    _registered: bool  # whether it is connected
    _closed: bool

    async def _meet(self, worker_idx: int | None, timeout: float) -> None:
        """Receiver: be introduced to a sender whose address it was not given."""

    def _register(self) -> None:
        """Receiver: take part in the bus's HELLO, before waiting for anything."""

    async def _connect_sender(self, initial: Source | None, timeout: float) -> None:
        """Sender: wait for the workers, which are to begin with these weights."""

    async def _connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        """Receiver: wait for the sender, and for its initial weights."""

    async def _initial(self, weights: Any) -> Source | None:
        """What a sender sends when it connects; None: nothing. In the caller's thread."""

    async def _extract(self, weights: Any, workers: list[int] | None) -> Source:
        """The values of what the caller gave, for these workers. In the caller's thread."""

    def _at_hand(self, weights: Any) -> FlatWeights | None:
        """What :meth:`_extract` would come to, where that takes nothing but looking; else None."""

    def _transport(self) -> Carrier:
        """What moves this model's bytes."""

    async def _end_transport(self, timeout: float) -> None:
        """Release it."""


class Shared(Protocol):
    """A bus of either API."""

    _uid: str
    _closed: bool


B = TypeVar("B", bound=Shared)


def shared_here(bus: B, worker: int) -> B:
    """The one bus that all copies of this one share where they are this worker, in this process. Raises ValueError if
    some of them are asynchronous, others blocking."""
    key = (bus._uid, worker, os.getpid())
    shared: B | None = _receiving.get(key)
    if shared is None or shared._closed:
        _receiving[key] = shared = bus
    if type(shared) is not type(bus):
        raise ValueError(
            f"worker {worker} has an asynchronous and a blocking scheme of one bus in this process; convert all of "
            "them (scheme.blocking, scheme.aio), or none"
        )
    return shared


def agree_on_workers(bus: Any, num_workers: int, *, private: bool) -> None:
    """Give a bus its ``num_workers``. ``private``: nobody else may join it. Raises ValueError: it has others
    already, or too few for its quorum."""
    check_count("num_workers", num_workers)
    given = bus._constructed if private and bus._link is None else bus.num_workers
    if given not in (None, num_workers) or (bus._link is not None and bus.num_workers != num_workers):
        raise _disagreement("num_workers", bus.num_workers, num_workers)
    check_quorum(num_workers, bus.min_workers)
    bus.num_workers = num_workers


def agree_on_least(bus: Any, min_workers: int, *, private: bool) -> None:
    """The same for ``min_workers``."""
    check_count("min_workers", min_workers, least=0)
    if bus.min_workers != min_workers and (bus.min_workers != 1 or bus._link is not None or not private):
        raise _disagreement("min_workers", bus.min_workers, min_workers)
    check_quorum(bus.num_workers, min_workers)
    bus.min_workers = min_workers


def _disagreement(name: str, there: int | None, given: int) -> ValueError:
    return ValueError(
        f"{name} is {there} already, not {given}: the constructor, init_on_sender() and all schemes of one bus must "
        "agree"
    )


SHARED = ("num_workers", "min_workers", "allow_plaintext", "checksum", "keys", "fanout", "compress", "delta")
DEFAULTS = {"min_workers": 1, "allow_plaintext": False, "fanout": False, "delta": False, "monitoring": UNMONITORED}


def join_buses(schemes: Iterable[Member]) -> Any:
    """Move schemes that have a bus of their own onto one bus, before they are initialised: so one update can carry all
    their models. All of them are blocking, or all asynchronous.

    The common bus is the one that some of them share already, else the one with an explicit endpoint, else any. Pickled
    copies made from now on find each other in a worker; copies made earlier still have the address of old.

    Returns the common bus; None: there is none, because they share several buses already, or there are no schemes.
    Raises, with nothing changed, ValueError for several explicit endpoints, or settings that one bus cannot have;
    RuntimeError if a scheme is initialised or connected already.
    """
    schemes = list(schemes)
    for scheme in schemes:
        if scheme._role is not None or scheme._registered or scheme._closed or scheme._bus._link is not None:
            raise RuntimeError("move schemes onto one bus before init_on_sender(), init_on_receiver() and connect()")
    own = [scheme for scheme in schemes if scheme._own_bus]
    shared = list({id(s._bus): s._bus for s in schemes if not s._own_bus}.values())
    if len(shared) > 1:
        return None
    buses = shared + [scheme._bus for scheme in own]
    if len(buses) < 2:
        return buses[0] if buses else None
    explicit = shared + [scheme._bus for scheme in own if not scheme._bus.drawn]
    endpoints = sorted({bus.endpoint for bus in explicit})
    if len(endpoints) > 1:
        raise ValueError(
            f"these schemes have several endpoints ({', '.join(endpoints)}), so no update could carry all their "
            "models: construct one bus = Bus(endpoint=…) and give it to each of them (bus=bus)"
        )
    common = (explicit or buses)[0]
    settings = {}
    for name in (*SHARED, "monitoring", "connect_endpoint"):
        default = DEFAULTS.get(name)
        given = [bus for bus in buses if name != "connect_endpoint" or bus.connect_endpoint != bus.endpoint]
        values = {getattr(bus, name) for bus in given} - {default}
        if len(values) > 1:
            argument = ARGUMENTS.get(name, name)
            raise ValueError(
                f"the schemes of one bus share its {argument}, but these have {sorted(values, key=str)}: construct one "
                f"bus = Bus({argument}=…) and give it to each of them (bus=bus)"
            )
        if values:
            settings[name] = values.pop()
    for name, value in settings.items():
        setattr(common, name, value)
    for scheme in own:
        scheme._bus, scheme._own_bus = common, False
    return common
