"""TorchRL's collectors and inference servers as contexts of schemes, which ask them for models, workers and versions.

Nothing here imports TorchRL. A program that passes a scheme to TorchRL has imported it, so its classes are looked up
among the loaded modules.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

from torch import nn

# The least timeout of connect(): TorchRL's workers construct their environments first, for which it sets no limit. (If
# a worker's process ends, connect() notices at once.)
START_SECONDS = 600.0

_registered: set[type] = set()


def register_with_torchrl(kind: type) -> None:
    """If TorchRL is loaded, make this class pass ``isinstance(…, WeightSyncScheme)``, which its collectors check."""
    if "torchrl" in sys.modules and kind not in _registered:
        import_module("torchrl.weight_update").WeightSyncScheme.register(kind)
        _registered.add(kind)


class RefusedAttribute:
    """An attribute that an asyncio scheme lacks; TorchRL reads it, and shows the user this error."""

    def __get__(self, scheme: Any, owner: type) -> NoReturn:
        raise AttributeError(
            f"this is the asyncio {owner.__name__}, but TorchRL calls blocking methods: pass it `scheme.blocking`, or "
            f"a {owner.__name__} of asyncsync.sync"
        )


def adapt_context(context: Any) -> Any:
    """Wrap a collector or inference server of TorchRL's in a :class:`TorchRLContext`; return others unchanged."""
    collector = _loaded_class("torchrl.collectors", "BaseCollector")
    server = _loaded_class("torchrl.modules.inference_server", "InferenceServer")
    is_theirs = any(kind is not None and isinstance(context, kind) for kind in (collector, server))
    return TorchRLContext(context) if is_theirs else context


def _loaded_class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


class TorchRLContext:
    """One of TorchRL's collectors or inference servers. The reference to it is weak, because TorchRL's collectors shut
    down when they are garbage-collected, while an open bus keeps its schemes, and each scheme its context.

    ``connected``: whether the receiver of this context has its first weights. TorchRL counts these as version 0.
    """

    def __init__(self, target: Any) -> None:
        self._target = weakref.ref(target)
        self.connected = False

    @property
    def target(self) -> Any:
        """TorchRL's object; None: it was garbage-collected."""
        return self._target()

    # -- a sender's context -------------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int | None:
        """How many workers the collector has; None: it has no workers of its own."""
        return getattr(self.target, "num_workers", None)

    @property
    def first_worker_number(self) -> int:
        """The collector's number for its first worker: 1 in TorchRL's DistributedCollector, which numbers by rank."""
        ranked = _loaded_class("torchrl.collectors.distributed", "DistributedCollector")
        return int(ranked is not None and isinstance(self.target, ranked))

    def get_model(self, model_id: str) -> Any:
        """Raises LookupError if TorchRL has no model of this name."""
        target = self.target
        if target is None:
            raise LookupError(f"the collector that had the model {model_id!r} was garbage-collected")
        try:
            if not hasattr(target, "get_model"):  # an InferenceServer, or a collector of nodes, such as RayCollector
                return getattr(target, model_id)
            return target.get_model(model_id)
        except (AttributeError, ValueError) as error:
            raise LookupError(f"{error} Pass weights, or give {type(target).__name__} the model") from error

    def initial_model(self, model_id: str) -> nn.Module | None:
        """A policy from the collector's factory, whose weights all workers begin with, as with TorchRL's own schemes.
        None: there is no factory, or the workers have different ones and each begins with the weights of its own."""
        factory, *others = getattr(self.target, "policy_factory", None) or [None]
        if model_id != "policy" or factory is None or any(other is not factory for other in others):
            return None
        model = factory()
        return model if isinstance(model, nn.Module) else None

    @property
    def processes(self) -> tuple[Any, ...]:
        """The processes of the collector's workers; empty if it has none."""
        return tuple(getattr(self.target, "procs", ()))

    def worker_tracebacks(self) -> str:
        """What workers that have ended report, which TorchRL would only read later."""
        found = ""
        for worker, (process, pipe) in enumerate(zip(self.processes, getattr(self.target, "pipes", ()), strict=False)):
            if process.exitcode is None:
                continue
            try:
                report = pipe.recv() if pipe.poll() else None
            except (EOFError, OSError):  # the worker was killed
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
        """Whether to call :meth:`update_policy_weights_` for an update that is in the model."""
        target = self.target
        if target is None or not self.connected or getattr(target, "closed", False):
            return False
        return not self._is_plain_collector or getattr(target, "policy_version_tracker", None) is not None

    def update_policy_weights_(
        self, weights: Any = None, *, model_id: str = "policy", weights_dict: Mapping[str, Any] | None = None
    ) -> None:
        """An update is in the model: have TorchRL count the version, and pass it on to the collector's own workers."""
        for name, each in ({model_id: weights} if weights_dict is None else weights_dict).items():
            if not self._is_plain_collector:
                self.target.update_policy_weights_(policy_or_weights=each, model_id=name)
            elif name == "policy":
                self.target.increment_version()

    @property
    def _is_plain_collector(self) -> bool:
        # Whether the target is a Collector whose own update_policy_weights_ must not be called, because it would copy
        # the weights once more, past the gate, and because it knows no model but the policy.
        target, collector = self.target, _loaded_class("torchrl.collectors", "Collector")
        return (
            collector is not None
            and isinstance(target, collector)
            and type(target).update_policy_weights_ is collector.update_policy_weights_
            and not target._weight_sync_schemes
        )
