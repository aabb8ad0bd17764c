"""TorchRL's collectors and inference servers as contexts: what they know of models, workers and versions.

A program that hands them a scheme has imported TorchRL. Nothing here imports it: its classes are looked up among the
modules that are loaded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from torch import nn

from asyncsync.errors import NotConnected

# TorchRL has no limit for the time in which workers make their environments; it sees at once when one of them ends.
START_SECONDS = 600.0

_registered: set[type] = set()


def register_with_torchrl(kind: type) -> None:
    """Where TorchRL is loaded, this class of schemes counts as its ``WeightSyncScheme``: its collectors ask."""
    if "torchrl" in sys.modules and kind not in _registered:
        import_module("torchrl.weight_update").WeightSyncScheme.register(kind)
        _registered.add(kind)


class RefusedAttribute:
    """A name that a scheme has not; TorchRL, which asks for it, shows why."""

    def __get__(self, scheme: Any, owner: type) -> NoReturn:
        raise AttributeError(
            f"this is the asyncio {owner.__name__}, and TorchRL calls ordinary methods: hand it `scheme.blocking`, or "
            f"a {owner.__name__} of asyncsync.sync"
        )


def adapt_context(context: Any) -> Any:
    """A collector or an inference server of TorchRL's as this library's schemes understand it; another context as it
    is."""
    collector = _loaded_class("torchrl.collectors", "BaseCollector")
    server = _loaded_class("torchrl.modules.inference_server", "InferenceServer")
    is_theirs = any(kind is not None and isinstance(context, kind) for kind in (collector, server))
    return TorchRLContext(context) if is_theirs else context


def _loaded_class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


class TorchRLContext:
    """One of TorchRL's collectors, or an inference server. It is held weakly: an open bus keeps its schemes, and they
    keep this, but TorchRL's collectors shut down when they are collected.

    ``connected``: whether the receiver of this context has its first weights. TorchRL counts those as version 0.
    """

    def __init__(self, target: Any) -> None:
        self._target = weakref.ref(target)
        self.connected = False

    @property
    def target(self) -> Any:
        """TorchRL's object; None: it is gone."""
        return self._target()

    # -- a sender's context -------------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int | None:
        """How many workers the collector has; None: it has none of its own."""
        return getattr(self.target, "num_workers", None)

    @property
    def first_worker_number(self) -> int:
        """What the collector calls its first worker: TorchRL's DistributedCollector tells workers their ranks."""
        ranked = _loaded_class("torchrl.collectors.distributed", "DistributedCollector")
        return int(ranked is not None and isinstance(self.target, ranked))

    def get_model(self, model_id: str) -> Any:
        """Raises LookupError: TorchRL knows none of this name."""
        target = self.target
        if target is None:
            raise LookupError(f"the collector that had the model {model_id!r} is gone")
        try:
            if not hasattr(target, "get_model"):  # those of nodes
                return getattr(target, model_id)
            return target.get_model(model_id)
        except (AttributeError, ValueError) as error:
            raise LookupError(f"{error} Pass weights, or give {type(target).__name__} the model") from error

    def initial_model(self, model_id: str) -> nn.Module | None:
        """What the factory makes from which all workers have their policies: with TorchRL's schemes, too, they begin
        with the same weights. None: each begins with what its own factory makes."""
        first, *others = getattr(self.target, "policy_factory", None) or [None]
        if model_id != "policy" or first is None or any(other is not first for other in others):
            return None
        model = first()
        return model if isinstance(model, nn.Module) else None

    @property
    def processes(self) -> tuple[Any, ...]:
        """Those of the workers."""
        return tuple(getattr(self.target, "procs", ()))

    @contextmanager
    def starting(self, give_up: Callable[[], None]) -> Iterator[None]:
        """While workers connect. If one does not, call ``give_up``, which ends the others; and raise here what a worker
        has raised, which TorchRL would read later."""
        try:
            yield
        except BaseException as error:
            give_up()
            if isinstance(error, NotConnected) and (why := self._failures()):
                raise NotConnected(f"{error}{why}") from error
            raise

    def _failures(self) -> str:
        found = ""
        for worker, (process, pipe) in enumerate(zip(self.processes, getattr(self.target, "pipes", ()), strict=False)):
            if process.exitcode is None:
                continue
            try:
                report = pipe.recv() if pipe.poll() else None
            except (EOFError, OSError):  # it was killed
                continue
            if isinstance(report, Mapping) and "traceback" in report:
                found += f"\nWorker {worker} has raised:\n{report['traceback']}"
        return found

    # -- a receiver's context -----------------------------------------------------------------------------------------

    @property
    def worker_idx(self) -> int | None:
        return getattr(self.target, "worker_idx", None)

    @property
    def cascades(self) -> bool:
        """Whether the target is to be told of an update that is in the model."""
        target = self.target
        if target is None or not self.connected or getattr(target, "closed", False):
            return False
        return not self._is_plain_collector or getattr(target, "policy_version_tracker", None) is not None

    def update_policy_weights_(
        self, weights: Any = None, *, model_id: str = "policy", weights_dict: Mapping[str, Any] | None = None
    ) -> None:
        """An update is in the model: count the version, and pass it on to the workers of a collector that has some."""
        for name, each in ({model_id: weights} if weights_dict is None else weights_dict).items():
            if not self._is_plain_collector:
                self.target.update_policy_weights_(policy_or_weights=each, model_id=name)
            elif name == "policy":
                self.target.increment_version()

    @property
    def _is_plain_collector(self) -> bool:
        # Its own method would copy the weights once more, past the gate, and knows no model but the policy.
        target, collector = self.target, _loaded_class("torchrl.collectors", "Collector")
        return (
            collector is not None
            and isinstance(target, collector)
            and type(target).update_policy_weights_ is collector.update_policy_weights_
            and not target._weight_sync_schemes
        )
