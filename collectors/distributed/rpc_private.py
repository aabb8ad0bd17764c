"""Private names of torch.distributed.rpc that this package uses.

The public ``rpc.init_rpc`` counts its calls in each process, and connects processes that have called it equally often.
So a trainer that makes its second collector would wait in vain for new nodes, which call it for the first time. It also
takes no store, although all nodes know the trainer's. So this module does what ``init_rpc`` does, with a store that the
caller gives.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import autograd, rpc

_rpc: Any = rpc
_autograd: Any = autograd


def begin_rpc(store: Any, name: str, rank: int, options: Any) -> None:
    """Start this process's RPC agent, in a group that other agents may join later. Blocks until the present agents know
    this one. Raises RuntimeError: this process has an agent already, or others do not answer."""
    _autograd._init(rank)
    _rpc._set_profiler_node_id(rank)
    _rpc._init_rpc_backend(_rpc.BackendType.TENSORPIPE, store, name, rank, None, options)


def leave() -> None:
    """Make this process's RPC agent expect that others end their connections, so that it logs no warnings. Blocks until
    its own calls are answered."""
    _rpc._get_current_rpc_agent().join(True)


def has_agent() -> bool:
    return bool(_rpc._is_current_rpc_agent_set())
