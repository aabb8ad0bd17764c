"""What a node's program does before torch's RPC has begun."""

from __future__ import annotations

import time

import pytest

from asyncsync.collectors.distributed import rpc_family, rpc_private
from asyncsync.collectors.distributed.launched_family import Meeting
from asyncsync.collectors.distributed.rpc_family import RPCFamily
from asyncsync.transports.store import OwnStore


def test_a_node_waits_for_those_before_it_as_long_as_the_collector_does() -> None:
    store = OwnStore("127.0.0.1")
    store.open()
    family = RPCFamily("mp", None, None, options={}, devices=None, connect_timeout=0.2)
    program, arguments = family.program()
    assert not rpc_private.has_agent()
    begun = time.monotonic()
    with pytest.raises(RuntimeError):  # node 0 does not come
        program(Meeting(*store.address, "a collector", b"key"), 1, *arguments)
    assert 0.2 <= time.monotonic() - begun < 20
    rpc_family._nodes.pop("a collector").stop(1.0)
    store.close()
