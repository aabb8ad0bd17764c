"""Inference engines that follow a trainer: a switch of versions that is all or nothing, and goes back when it fails.

Each engine has a package of its own, which says how the engine is told to use it. ``Fleet`` updates replicas together;
for servers of one's own there are ``follow`` and ``Staleness``. All are for asyncio schemes. Importing this package
loads none of them: vLLM does so in each of its processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncsync.engines.asgi import follow
    from asyncsync.engines.fleet import Failure, Fleet, FleetError, FleetResult
    from asyncsync.engines.replicas import AsyncLLMReplica, HTTPReplica, LLMReplica, Refused, Replica
    from asyncsync.engines.staleness import Staleness

__all__ = [
    "AsyncLLMReplica",
    "Failure",
    "Fleet",
    "FleetError",
    "FleetResult",
    "HTTPReplica",
    "LLMReplica",
    "Refused",
    "Replica",
    "Staleness",
    "follow",
]

_MODULES = {"Staleness": "staleness", "follow": "asgi"}
_MODULES |= dict.fromkeys(("AsyncLLMReplica", "HTTPReplica", "LLMReplica", "Refused", "Replica"), "replicas")
_MODULES |= dict.fromkeys(("Failure", "Fleet", "FleetError", "FleetResult"), "fleet")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
