"""LaunchedCollector: what RPCCollector and DistributedCollector have in common: the arguments of launching and meeting.

Names and defaults follow TorchRL's "RPCCollector" page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncsync.collectors.arguments import whole
from asyncsync.collectors.distributed.launched_family import LaunchedFamily
from asyncsync.collectors.distributed.node_collector import NodeCollector
from asyncsync.schemes.torch_distributed import check_backend


class LaunchedCollector(NodeCollector):
    """A collector whose nodes a launcher starts; ``family`` makes them of launcher, its options, and port."""

    backend: str

    def __init__(
        self,
        family: Callable[[str, Any, int | None], LaunchedFamily],
        *,
        launcher: str,
        slurm_kwargs: Any,
        tcp_port: int | str | None,
        backend: str,
        **arguments: Any,
    ) -> None:
        check_backend(backend)
        self.backend = backend
        super().__init__(family(launcher, slurm_kwargs, _port_of(tcp_port)), **arguments)


def _port_of(tcp_port: Any) -> int | None:
    """The port, which may be a string. Raises TypeError, ValueError."""
    if isinstance(tcp_port, str):
        if not tcp_port.isdecimal():
            raise ValueError(f"tcp_port must be a port's number, not {tcp_port!r}")
        tcp_port = int(tcp_port)
    port = None if tcp_port is None else whole("tcp_port", tcp_port, 1)
    if port is not None and port > 65535:
        raise ValueError(f"tcp_port must be at most 65535, not {port}")
    return port
