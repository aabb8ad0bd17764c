"""The schemes by which a collector sends weights to those that collect for it: one bus where possible.

Models on one bus are switched together, so schemes without an address of the user's choice are moved onto one bus
before they are used.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from asyncsync.bus.core import join_buses
from asyncsync.schemes.aio import WeightSyncScheme as AsyncScheme
from asyncsync.schemes.blocking import Bus, WeightSyncScheme
from asyncsync.schemes.none import BlockingNoSync, NoSyncCore
from asyncsync.schemes.scheme import Scheme
from asyncsync.schemes.sources import resolve_model


def as_blocking(argument: str, schemes: Mapping[str, Any]) -> dict[str, WeightSyncScheme]:
    """The schemes with their blocking API, on which collectors run them. Raises TypeError: no scheme of asyncsync's;
    ValueError: one for two models; RuntimeError: an asynchronous one that is connected already."""
    for model_id, scheme in schemes.items():
        if not isinstance(scheme, WeightSyncScheme | AsyncScheme):
            kind = scheme if isinstance(scheme, type) else type(scheme)
            raise TypeError(
                f"{argument}[{model_id!r}] is {'the class' if scheme is kind else 'a'} {kind.__module__}."
                f"{kind.__qualname__}, but must be an asyncsync scheme: construct one of asyncsync.sync, such as "
                "SharedMemWeightSyncScheme()"
            )
    if len({id(scheme) for scheme in schemes.values()}) < len(schemes):
        raise ValueError(f"{argument} has one scheme for several models: give each model its own scheme")
    return {model_id: scheme.blocking for model_id, scheme in schemes.items()}


class Senders:
    """Schemes by model id: blocking ones, or asynchronous ones that are not connected yet. Nothing is connected here.

    ``context.get_model(model_id)`` gives the models. ``num_workers`` None: workers come and go. Raises TypeError,
    ValueError, RuntimeError: schemes that cannot send.
    """

    def __init__(self, schemes: Mapping[str, Any], context: Any = None, num_workers: int | None = None) -> None:
        self.schemes = as_blocking("weight_sync_schemes", schemes)
        for model_id, scheme in self.schemes.items():
            _check_free(model_id, scheme)
        fresh = {m: s for m, s in self.schemes.items() if s.role is None or s.pid != os.getpid()}
        join_buses([s for s in fresh.values() if not isinstance(s, BlockingNoSync)])
        for model_id, scheme in self.schemes.items():
            if model_id in fresh:
                source = context if _has_weights(context, model_id) else None
                called = isinstance(scheme, getattr(context, "called_schemes", ()))
                remotes: dict[str, Any] = {"remotes": {}} if called else {}  # which the collector fills in
                scheme.init_on_sender(model_id=model_id, context=source, num_workers=num_workers, **remotes)
            else:
                scheme.check_fresh("sender") if not scheme.is_registered else scheme.bus.check_role("sender")
                _check_initialised(model_id, scheme, num_workers)
        self.buses = buses_of(self.schemes.values())
        _owners.update({bus: weakref.ref(self) for bus in self.buses})

    def bus_of(self, update: Mapping[str, Any]) -> Bus | None:
        """The bus that all these models are on; None: one that moves nothing. Raises ValueError: they are on several,
        so that no worker could switch them together."""
        buses = buses_of(self.schemes[model_id] for model_id in update)
        if len(buses) > 1:
            raise ValueError(
                f"workers cannot switch {sorted(update)} together, because each of their schemes has its own bus. "
                "Construct a bus = asyncsync.sync.Bus(), and each scheme with bus=bus; or update one model at a time"
            )
        return buses[0] if buses else None

    def send(self, update: Mapping[str, Any], workers: list[int] | None, timeout: float | None) -> None:
        """Send one update; returns when workers have applied it, or, without a timeout, when it is announced. Raises as
        the schemes' ``send`` or ``publish``."""
        bus, moved, others = self._divided(update)
        if bus is not None and timeout is None:
            bus.publish(moved, workers)
        elif bus is not None and timeout is not None:
            bus.send(moved, workers, timeout)
        for scheme in others:
            scheme.send()

    async def send_async(self, update: Mapping[str, Any], workers: list[int] | None, timeout: float | None) -> None:
        """:meth:`send` for a coroutine of any event loop."""
        bus, moved, others = self._divided(update)
        if bus is not None and timeout is None:
            await bus.publish_async(moved, workers)
        elif bus is not None and timeout is not None:
            await bus.send_async(moved, workers, timeout)
        for scheme in others:
            await scheme.send_async()

    def _divided(self, update: Mapping[str, Any]) -> tuple[Bus | None, dict[str, Any], list[WeightSyncScheme]]:
        """An update's bus, what goes over it by the names there, and the schemes that only count versions."""
        moving = {m: s for m, s in self.schemes.items() if m in update and not isinstance(s, BlockingNoSync)}
        moved = {scheme.model_id or "": update[m] for m, scheme in moving.items()}
        return self.bus_of(update), moved, [self.schemes[m] for m in update.keys() - moving.keys()]

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return max((scheme.version for scheme in self.schemes.values()), default=0)

    def versions(self) -> dict[str, int]:
        """Each model's version, for a checkpoint. The schemes of one bus have one count."""
        return {model_id: scheme.version for model_id, scheme in self.schemes.items()}

    def carry_on(self, versions: Mapping[str, int]) -> None:
        """Go on from what :meth:`versions` returned, where that is not behind."""
        for model_id, version in versions.items():
            scheme = self.schemes.get(model_id)
            if scheme is not None and scheme.version < version:
                scheme.load_state_dict({"version": version})


def _has_weights(context: Any, model_id: str) -> bool:
    try:
        model = resolve_model(context, model_id)
    except ValueError:
        return False
    return isinstance(model, nn.Module | TensorDictBase | Mapping)


# A bus has one set of workers, and so one collector.
_owners: weakref.WeakKeyDictionary[Bus, weakref.ref[Senders]] = weakref.WeakKeyDictionary()


def _check_free(model_id: str, scheme: WeightSyncScheme) -> None:
    """Raises ValueError: the scheme was shut down, or serves another collector."""
    if isinstance(scheme, BlockingNoSync) or (bus := scheme.bus) is None:
        return
    if bus.closed:
        raise ValueError(
            f"weight_sync_schemes[{model_id!r}] was shut down, perhaps with its collector: construct a new scheme"
        )
    owner = _owners.get(bus)
    if owner is not None and owner() is not None:
        raise ValueError(
            f"weight_sync_schemes[{model_id!r}] already serves another collector: construct a scheme (or a Bus) for "
            "each collector"
        )


def _check_initialised(model_id: str, scheme: WeightSyncScheme, num_workers: int | None) -> None:
    if scheme.model_id is not None or num_workers is not None:  # a RayModuleTransform gives its scheme no name
        check_name("weight_sync_schemes", model_id, scheme)
    count = scheme.bus.num_workers
    if num_workers is not None and count not in (None, num_workers):
        raise ValueError(
            f"weight_sync_schemes[{model_id!r}] was initialised for {count} workers, but this collector has "
            f"{num_workers}: leave num_workers out, or do not call init_on_sender()"
        )


def check_name(argument: str, model_id: str, scheme: WeightSyncScheme) -> None:
    """Raises ValueError: the user has initialised the scheme for another model."""
    if scheme.model_id != model_id:
        raise ValueError(
            f"{argument}[{model_id!r}] was initialised with model_id={scheme.model_id!r}: use one name, or let the "
            "collector initialise the scheme"
        )


def buses_of(schemes: Iterable[Scheme]) -> list[Any]:
    """The buses of those that move something, each once."""
    return list(dict.fromkeys(scheme.bus for scheme in schemes if not isinstance(scheme, NoSyncCore)))


def connect_all(schemes: Collection[WeightSyncScheme], timeout: float) -> None:
    """Connect schemes, those of one bus together, within one timeout (seconds)."""
    deadline = time.monotonic() + timeout
    for scheme in schemes:
        if isinstance(scheme, BlockingNoSync):
            scheme.connect()
    for bus in buses_of(schemes):
        bus.connect(max(0.0, deadline - time.monotonic()))


def shut_down_all(schemes: Any, timeout: float) -> None:
    """Shut schemes down within one timeout (seconds), all of them, whatever one of them raises."""
    deadline = time.monotonic() + timeout
    errors: list[Exception] = []
    for scheme in schemes:
        try:
            scheme.shutdown(max(0.0, deadline - time.monotonic()))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("shutting down the schemes failed", errors)
