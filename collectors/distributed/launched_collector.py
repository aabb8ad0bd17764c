"""LaunchedCollector: what RPCCollector and DistributedCollector have in common: the arguments of launching and meeting.

Names and defaults follow TorchRL's "RPCCollector" page.
"""

from __future__ import annotations

from typing import Any

import torch.distributed

from asyncsync.collectors.arguments import whole
from asyncsync.collectors.distributed.collector import NodeCollector
from asyncsync.collectors.distributed.launched_nodes import LaunchedNodes

__all__ = ["LaunchedCollector", "check_backend", "port_of"]

BACKENDS = {
    "gloo": "is_gloo_available", "mpi": "is_mpi_available", "nccl": "is_nccl_available", "ucc": "is_ucc_available",
}  # fmt: skip


class LaunchedCollector(NodeCollector):
    """A collector whose nodes a launcher starts."""

    backend: str

    def __init__(
        self, nodes: LaunchedNodes, create_env_fn: Any, policy: Any, *, backend: str, **arguments: Any
    ) -> None:
        check_backend(backend)
        self.backend = backend
        super().__init__(nodes, create_env_fn, policy, **arguments)


def check_backend(name: Any) -> None:
    """Raises ValueError: torch.distributed has no such backend, or not here."""
    if name not in BACKENDS:
        raise ValueError(
            f"unknown backend {name!r} of torch.distributed: choose one of {', '.join(map(repr, BACKENDS))}"
        )
    here = [own for own, check in BACKENDS.items() if getattr(torch.distributed, check, lambda: False)()]
    if name not in here:
        raise ValueError(
            f"backend={name!r}, but this torch was built with {', '.join(map(repr, here))}: choose of these"
        )


def port_of(tcp_port: Any) -> int | None:
    """The port, which may be a string. Raises TypeError, ValueError."""
    if isinstance(tcp_port, str):
        if not tcp_port.isdecimal():
            raise ValueError(f"tcp_port must be a port's number, not {tcp_port!r}")
        tcp_port = int(tcp_port)
    port = None if tcp_port is None else whole("tcp_port", tcp_port, 1)
    if port is not None and port > 65535:
        raise ValueError(f"tcp_port must be at most 65535, not {port}")
    return port
