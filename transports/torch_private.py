"""The private names of torch.distributed that this package uses.

The public constructor of ``ProcessGroupGloo`` uses the network device to which the host's name resolves. That is often
the loopback device, which other hosts cannot reach. Only the private options accept another device. The store by which
a group's processes have found each other has no public name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def default_store() -> Any:
    """The store of the process group that this process has joined. None: it has joined none."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def gloo_pair(store: Any, rank: int, address: str, timeout: float) -> Any:
    """A gloo process group of two, independent of the default group. Blocks until the other process has made its end,
    too. Raises RuntimeError after the timeout, or if this host has no such address.

    Args:
        store: where the two processes, and no others, find each other.
        rank: 0 or 1.
        address: the numeric address of this host for all connections.
        timeout: seconds.
    """
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1  # for collectives, which are not used here
    return ProcessGroupGloo(store, rank, 2, options)
