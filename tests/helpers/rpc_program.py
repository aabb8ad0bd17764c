"""The cases of :mod:`helpers.called_workers` with objects of torch.distributed.rpc, in processes of their own."""

import asyncio
import multiprocessing
import os
import threading
import warnings
from typing import Any

import torch

import asyncsync
import asyncsync.sync
from asyncsync.runtime.threads import settle
from helpers import called_workers as called
from helpers.apis import Api, free_port
from helpers.called_workers import Lab, Tell, Worker, cancel_waits, names, run_cases
from helpers.processes import value_of
from helpers.programs import alive

WORKERS = 5  # of which three are killed


def join(rank: int, port: int) -> None:
    """Begin RPC in this process."""
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=30, _transports=["uv"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)


def serve(rank: int, port: int) -> None:
    """In a process: be called until the process that has started this one ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join(rank, port)
    parent = multiprocessing.parent_process()
    parent.join()
    os._exit(0)  # RPC's own end would wait for the others


class RPCLab(Lab):
    """With RRefs."""

    kind = "RPC"
    connects = False
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, processes: dict[int, int]) -> None:
        """``processes``: the pid of each rank."""
        self._processes = processes

    def start(self, kind: type, place: int, *args: Any, **options: Any) -> Any:
        from torch.distributed import rpc

        return rpc.remote(f"rank{self._rank(place)}", kind, args, options)

    def _rank(self, index: int) -> int:
        """A process that runs."""
        return [rank for rank, pid in self._processes.items() if alive([pid])][index]

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

    def connect(self) -> None:
        self.run(self.scheme.connect())

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


BOTH_APIS = (*called.CASES, coroutines_receive_in_a_loop_of_the_workers)
ONCE = (
    *called.ONCE,
    (called.a_killed_worker_is_named_and_the_others_go_on, asyncsync),
    (called.a_worker_killed_amid_a_transfer_is_named_at_once, asyncsync.sync),
    (called.a_trainer_killed_amid_a_transfer_is_noticed, asyncsync.sync),
)
NAMES = names(BOTH_APIS, ONCE)


def run_with_rpc(tell: Tell) -> None:
    """All cases; nothing is left behind."""
    warnings.simplefilter("ignore")
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=serve, args=(rank, port)) for rank in range(1, WORKERS + 1)]
    for process in processes:
        process.start()
    try:
        join(0, port)
        lab = RPCLab({rank: process.pid or 0 for rank, process in enumerate(processes, 1)})
        run_cases(lab, BOTH_APIS, ONCE, tell)
    finally:
        for process in processes:
            process.kill()
            process.join()
    tell("", "", "")
    os._exit(0)  # as in the workers
