"""The private names of torch.distributed that are used here.

``ProcessGroupGloo`` has a public constructor, which takes the network device that the host's name leads to: often a
loopback address, which another host cannot reach. Only the private options take a device that was chosen. The store by
which a group's processes have found each other has no public name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def default_store() -> Any:
    """The store of the process group that this process has joined; None: it has not."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def gloo_pair(store: Any, rank: int, address: str, timeout: float) -> Any:
    """A gloo process group of two, apart from the default one and unknown to it, over connections to and from this
    address of this host. Blocks until the other one has made its end. Raises RuntimeError: not within ``timeout``
    seconds, or there is no such address.

    Args:
        store: in which the two find each other, and nobody else.
        rank: 0 or 1.
        address: numeric.
        timeout: seconds.
    """
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1  # for collectives, of which there are none here
    return ProcessGroupGloo(store, rank, 2, options)
