"""The private names of torch.distributed.rpc that are used here.

``rpc.init_rpc`` is public. It counts its calls in each process, and those with the same number find each other: a
trainer that makes its second collector would wait for nodes that call it for the first time. Besides, it takes no
store, whose address is known to all nodes here. So this does what it does, with a store that is given.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import autograd, rpc

_rpc: Any = rpc
_autograd: Any = autograd


def begin_rpc(store: Any, name: str, rank: int, options: Any) -> None:
    """Start this process's RPC agent, in a group that others join when they come. Blocks until those that are there
    know it. Raises RuntimeError: it has one already, or others do not answer."""
    _autograd._init(rank)
    _rpc._set_profiler_node_id(rank)
    _rpc._init_rpc_backend(_rpc.BackendType.TENSORPIPE, store, name, rank, None, options)


def leave() -> None:
    """Have this process's RPC agent expect that others end their connections: it logs no warning of that. Blocks until
    its own calls have been answered."""
    _rpc._get_current_rpc_agent().join(True)


def has_agent() -> bool:
    """Whether this process has an RPC agent."""
    return bool(_rpc._is_current_rpc_agent_set())
