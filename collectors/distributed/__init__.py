"""Collectors whose workers may be on other hosts: Ray actors, or nodes reached by torch's RPC or by gloo."""

from asyncsync.collectors.distributed.launched import serve_node
from asyncsync.collectors.distributed.node_collector import DistributedCollector, RayCollector, RPCCollector
from asyncsync.collectors.distributed.ray import ActorBuffer
from asyncsync.collectors.weights.legacy_updaters import DistributedWeightUpdater, RPCWeightUpdater

__all__ = [
    "ActorBuffer",
    "DistributedCollector",
    "DistributedWeightUpdater",
    "RPCCollector",
    "RPCWeightUpdater",
    "RayCollector",
    "serve_node",
]
