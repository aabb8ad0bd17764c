"""Programs with a sender and a worker that it calls, by RPC or Ray, without a collector: one is killed in the midst of
an update, and the same program is run again, on the same ports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from asyncsync import sync
from helpers.apis import free_port
from helpers.called_workers import Worker
from helpers.processes import LARGE, Filled
from helpers.programs import cluster, gone_within
from helpers.rpc_program import join, serve

Call = Callable[[str], Callable[[], Any]]
"""``call(method)`` calls the worker, and returns what waits for its answer."""


def killed_program(kind: str) -> dict[str, Any]:
    """Of a program with these schemes: what its worker had, whether that ends when its trainer is killed, and the exit
    code of the same program, run again."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    if kind == "RPC":
        return _killed(_with_rpc, endpoint, free_port())
    with cluster() as ray:
        return _killed(_with_ray, endpoint, ray.get_runtime_context().gcs_address)


def _killed(program: Callable[..., None], *args: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    first = context.Process(target=program, args=(*args, there))
    first.start()
    value, worker = here.recv() if here.poll(60) else (None, 0)
    first.kill()
    first.join()
    os.kill(worker, signal.SIGCONT)
    gone = gone_within([worker], 15)
    again = context.Process(target=program, args=(*args, None))
    again.start()
    again.join(60)
    return {"value": value, "gone": gone, "again": again.exitcode}


def _train(scheme: Any, worker: Any, call: Call, pipe: Any) -> None:
    """Send, and be killed in the midst of the next update; without a pipe, end."""
    model = Filled(LARGE, 1.0)
    scheme.init_on_sender(model_id="policy", model=model, remotes=[worker])
    connected = call("connect")
    scheme.connect(timeout=50)
    connected()
    scheme.send(model.fill(2.0))
    state = call("state")()
    if pipe is None:
        scheme.shutdown()
        return
    os.kill(state["pid"], signal.SIGSTOP)  # so it does not come to the end of the update
    scheme.publish(model.fill(3.0))
    pipe.send((state["value"], state["pid"]))
    time.sleep(60)


def _with_rpc(endpoint: str, port: int, pipe: Any) -> None:
    from torch.distributed import rpc

    multiprocessing.get_context("spawn").Process(target=serve, args=(1, port, 2)).start()
    join(0, port, 2)
    scheme = sync.RPCWeightSyncScheme(endpoint=endpoint)
    worker = rpc.remote("rank1", Worker, (scheme, 0, LARGE))
    _train(scheme, worker, lambda method: getattr(worker.rpc_async(timeout=50), method)().wait, pipe)
    os._exit(0)  # RPC's own end would wait for the worker


def _with_ray(endpoint: str, address: str, pipe: Any) -> None:
    import ray

    ray.init(address=address, log_to_driver=False)
    scheme = sync.RayWeightSyncScheme(endpoint=endpoint)
    worker = ray.remote(Worker).options(num_cpus=0).remote(scheme, 0, LARGE)

    def call(method: str) -> Callable[[], Any]:
        answer = getattr(worker, method).remote()
        return lambda: ray.get(answer, timeout=50)

    _train(scheme, worker, call, pipe)
    ray.shutdown()
