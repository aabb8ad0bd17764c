"""Inference engines that follow a trainer. They switch versions completely or not at all, and go back if a load fails.

Each engine has a package of its own, whose docstring says how to configure the engine. ``Fleet`` updates several
replicas together. ``follow`` and ``Staleness`` are for servers of your own. All use asyncio schemes. This package loads
these modules only when they are used, because vLLM imports it in each of its processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncsync.engines.fleet import Failure, Fleet, FleetError, FleetResult
    from asyncsync.engines.replicas import AsyncLLMReplica, HTTPReplica, LLMReplica, Refused, Replica
    from asyncsync.engines.servers import Staleness, follow

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

_MODULES = dict.fromkeys(("Staleness", "follow"), "servers")
_MODULES |= dict.fromkeys(("AsyncLLMReplica", "HTTPReplica", "LLMReplica", "Refused", "Replica"), "replicas")
_MODULES |= dict.fromkeys(("Failure", "Fleet", "FleetError", "FleetResult"), "fleet")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
