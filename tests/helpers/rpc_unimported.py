"""A process of RPC's that has imported nothing of asyncsync when several calls come at once, each of which needs it."""

import multiprocessing
import os
import socket
import sys
from typing import Any

import torch

COUNT = 6


def _join(rank: int, port: int) -> None:
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=60, _transports=["uv"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def _serve(port: int) -> None:
    sys.setswitchinterval(1e-4)  # threads get in each other's way while they import
    assert not any(name.partition(".")[0] == "asyncsync" for name in sys.modules)
    _join(1, port)
    parent = multiprocessing.parent_process()
    parent.join()
    os._exit(0)  # RPC's own end would wait for the other


class Holder:
    """The object of a worker."""

    def __init__(self, scheme: Any, index: int) -> None:
        self.scheme, self.model = scheme, torch.nn.Linear(2, 1)
        scheme.init_on_receiver("policy", model=self.model, worker_idx=index)

    def _receive_weights_scheme(self) -> None:
        self.scheme.receive()

    def total(self) -> float:
        return float(sum(tensor.detach().sum() for tensor in self.model.parameters()))


def six_first_calls_at_once() -> list[float]:
    """What the models of six objects in that process hold after the first update."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(port,))
    process.start()
    try:
        from torch.distributed import rpc

        from asyncsync.sync import RPCWeightSyncScheme

        _join(0, port)
        source = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(source.weight)
        torch.nn.init.ones_(source.bias)
        scheme: Any = RPCWeightSyncScheme()
        objects = [rpc.remote("rank1", Holder, (scheme, index)) for index in range(COUNT)]
        with scheme:
            scheme.init_on_sender(model_id="policy", model=source, remotes=objects)
            scheme.connect()
            scheme.send()
            return [one.rpc_sync().total() for one in objects]
    finally:
        process.kill()
        process.join()
