"""The cases of :mod:`helpers.called_workers` with objects of torch.distributed.rpc, in processes of their own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

import asyncsync.sync  # noqa: F401 - workers get its classes
from asyncsync.runtime.threads import settle
from helpers.apis import Api
from helpers.called_faults import OF_KILLED_WORKERS, a_trainer_killed_amid_a_transfer_is_noticed
from helpers.called_workers import APIS, CASES, Lab, Worker, cancel_waits, run_cases
from helpers.processes import value_of

WORKERS = 5  # of which three are killed


def _options() -> Any:
    from torch.distributed import rpc

    return rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=30, _transports=["uv"])


def join(rank: int, port: int, size: int = WORKERS + 1) -> None:
    """Begin RPC in this process, one of so many."""
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=_options())


def serve(rank: int, port: int, size: int = WORKERS + 1) -> None:
    """In a process: be called until the process that has started this one ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join(rank, port, size)
    parent = multiprocessing.parent_process()
    parent.join()
    os._exit(0)  # RPC's own end would wait for the others


class RPCLab(Lab):
    """With RRefs."""

    kind = "RPC"
    connects = False
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self._first = 1
        self._processes: dict[int, int] = {}

    def start(self, kind: type, place: int, *args: Any, **options: Any) -> Any:
        from torch.distributed import rpc

        return rpc.remote(f"rank{self._rank(place)}", kind, args, options)

    def _rank(self, index: int) -> int:
        """A process that runs."""
        alive = [rank for rank, pid in self._processes.items() if _is_running(pid)]
        return alive[index]

    def know(self, processes: dict[int, int]) -> None:
        self._processes = processes

    async def call(self, worker: Any, method: str, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def ended(future: Any) -> None:
            try:
                settle(done, future.value())
            except Exception as error:
                settle(done, error=error)

        getattr(worker.rpc_async(timeout=50), method)(*args).add_done_callback(ended)
        return await done

    def end(self, worker: Any) -> None:
        """Its process goes on; the scheme has ended with its sender."""


class InLoop(Worker):
    """The object of a worker whose scheme is the asyncio one: in a loop of the worker's own, as RPC has none."""

    def __init__(self, scheme: Any, index: int, numel: int, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        super().__init__(scheme.aio, index, numel, **options)

    def run(self, doing: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(doing, self.loop).result(50)

    def connect(self) -> float:
        self.run(self.scheme.connect())
        return 0.0

    def _receive_weights_scheme(self) -> None:
        self.calls += 1
        self.received = self.run(self.scheme.receive())

    def cancel(self) -> float:
        self.run(cancel_waits(self.scheme))
        return value_of(self.run(self.scheme.fetch(timeout=20)))


async def coroutines_receive_in_a_loop_of_the_workers(lab: Lab, api: Api) -> None:
    async with lab.crew(api, kind=InLoop) as crew:
        await crew.send(2.0)
        assert await crew.states("received") == [2.0, 2.0]
        assert await crew.call(0, "cancel") == 2.0
        await crew.send(3.0)
        assert await crew.states("received") == [3.0, 3.0]
        assert await crew.states("calls") == [2, 2]


OWN = coroutines_receive_in_a_loop_of_the_workers


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_with_rpc(tell: Callable[[str, str | None], None]) -> None:
    """All cases; nothing is left behind."""
    warnings.simplefilter("ignore")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=serve, args=(rank, port)) for rank in range(1, WORKERS + 1)]
    for process in processes:
        process.start()
    try:
        join(0, port)
        lab = RPCLab()
        lab.know({rank: process.pid or 0 for rank, process in enumerate(processes, 1)})
        both = {name: function for name, function in CASES.items() if name not in OF_KILLED_WORKERS}
        run_cases(lab, {**both, OWN.__name__: OWN}, tell)
        killed = {name: CASES[name] for name in OF_KILLED_WORKERS}
        for name, module in zip(killed, APIS, strict=True):
            run_cases(lab, {name: killed[name]}, tell, modules=(module,))
        trainers = {a_trainer_killed_amid_a_transfer_is_noticed.__name__: a_trainer_killed_amid_a_transfer_is_noticed}
        run_cases(lab, trainers, tell, modules=APIS[1:])
    finally:
        for process in processes:
            process.kill()
            process.join()
    tell("", None)
    os._exit(0)  # as in the workers
