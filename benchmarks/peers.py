"""Peers of the schemes, each as a careful user would write it: gloo, TorchRL's schemes, one memcpy, bare sockets. Also
trainers that call their workers by RPC or as Ray actors, with asyncsync's schemes and by hand.

*staged*: the sender copies its parameters into one flat buffer, as any program must if it trains on meanwhile. Gloo or
blocking pyzmq sockets transfer the buffer. Each receiver copies out of it and then acknowledges.
*each*: one broadcast for each parameter. By hand with RPC or Ray, the update is staged, too: workers receive it by
``recv``, or map what one ``put`` has stored.
"""

from __future__ import annotations

import asyncio
import importlib
import mmap
import os
import resource
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import zmq
import zmq.asyncio

import asyncsync
from cases import SIZES
from child import PATIENCE, Spec, Worker, digest, module, timed
from ours import RAY, free_port

TORCHRL = {"shared": "SharedMemWeightSyncScheme", "process": "MultiProcessWeightSyncScheme"}
DESCRIPTORS = 1 << 16  # limit of open files: TorchRL's MultiProcess scheme sends one for each tensor and worker
IMAGE_BYTES = 64 << 20
CHUNK = 4 << 20  # bytes in a message


def _flat(model: torch.nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer for all parameters of a model, and its part for each of them."""
    sizes = [tensor.numel() for tensor in model.parameters()]
    flat = torch.full((sum(sizes),), -1.0)
    return flat, list(flat.split_with_sizes(sizes))


class _Peer:
    """One process of an exchange; rank 0 sends. `ports` has a free port for each worker."""

    def __init__(self, spec: Spec, rank: int, ports: list[int]) -> None:
        self.way = spec.kind.split()[1]
        self.each = spec.kind.endswith("each")
        model = module(spec.case, blank=rank > 0)
        self.parameters: list[torch.Tensor] = list(model.parameters())
        self.flat, self.views = _flat(model)
        self.bytes = memoryview(self.flat.numpy()).cast("B")
        self.join(rank, ports, f"{spec.directory}/peer-{os.getppid() if rank else os.getpid()}")

    def send(self) -> None:
        if not self.each:
            torch._foreach_copy_(self.views, self.parameters)
        self.transfer()

    def receive(self, _: str) -> int:
        """Receive updates. Returns the checksum of the first one of the run, which alone begins with 0."""
        while True:
            self.arrive()
            if not self.each:
                torch._foreach_copy_(self.parameters, self.views)
            self.acknowledge()
            if self.parameters[0][0] == 0.0:
                return digest(self.parameters)


class _Gloo(_Peer):
    def join(self, rank: int, ports: list[int], path: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not the interface of the host's name
        self.size, self.acknowledged = len(ports) + 1, [torch.zeros(1) for _ in ports]
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=self.size)

    def transfer(self) -> None:
        answers = [dist.irecv(buffer, rank) for rank, buffer in enumerate(self.acknowledged, 1)]
        if self.way == "broadcast":
            self.arrive()
        else:
            for work in [dist.isend(self.flat, rank) for rank in range(1, self.size)]:
                work.wait()
        for answer in answers:
            answer.wait()

    def arrive(self) -> None:
        for tensor in self.parameters if self.each else [self.flat]:
            dist.broadcast(tensor, 0) if self.way == "broadcast" else dist.recv(tensor, 0)

    def acknowledge(self) -> None:
        dist.send(self.acknowledged[0], 0)


class _Pyzmq(_Peer):
    def join(self, rank: int, ports: list[int], path: str) -> None:
        self.pairs = []
        for port in [ports[rank - 1]] if rank else ports:
            self.pairs.append(pair := zmq.Context.instance().socket(zmq.PAIR))
            address = f"tcp://127.0.0.1:{port}" if self.way == "tcp" else f"ipc://{path}-{port}"
            pair.connect(address) if rank else pair.bind(address)

    def transfer(self) -> None:
        for start, pair in product(range(0, len(self.bytes), CHUNK), self.pairs):
            pair.send(self.bytes[start : start + CHUNK], copy=False)
        for pair in self.pairs:
            pair.recv()

    def arrive(self) -> None:
        for start in range(0, len(self.bytes), CHUNK):
            self.bytes[start : start + CHUNK] = self.pairs[0].recv(copy=False).buffer

    def acknowledge(self) -> None:
        self.pairs[0].send(b"")


@asynccontextmanager
async def exchange(spec: Spec) -> AsyncIterator[Any]:
    """Kinds: "gloo broadcast", "gloo isend", "gloo broadcast each", "pyzmq tcp", "pyzmq ipc"."""
    peer, ports = _Gloo if spec.kind.startswith("gloo") else _Pyzmq, [free_port() for _ in range(spec.workers)]
    workers = [Worker(lambda rank: peer(spec, rank, ports).receive, rank) for rank in range(1, spec.workers + 1)]
    sender = await spec.in_thread(lambda: peer(spec, 0, ports))
    for worker in workers:
        worker.post("receive")
    await spec.in_thread(sender.send)  # unchanged, so it begins with 0
    for worker in workers:
        if worker.answer() != digest(sender.parameters):
            raise RuntimeError(f"{spec.kind}: what the workers have is not what was sent")
        worker.post("receive")
    yield timed(sender.send, sender.parameters, blocking=True)
    for worker in workers:
        worker.end()


@asynccontextmanager
async def memcpy(spec: Spec) -> AsyncIterator[Any]:
    """One thread copies the same number of bytes into shared memory. All pages are touched before."""
    tensors, each = SIZES.get(spec.case, (1, IMAGE_BYTES))
    source = np.ones(tensors * each, np.uint8)
    target = np.frombuffer(mmap.mmap(-1, source.nbytes), np.uint8)
    np.copyto(target, source)
    yield timed(lambda: np.copyto(target, source), blocking=True)


@asynccontextmanager
async def round_trip(spec: Spec) -> AsyncIterator[Any]:
    """Send one byte to a worker and receive one, over bare zmq.asyncio sockets."""
    endpoint = f"ipc://{spec.directory}/echo-{os.getpid()}"
    worker = Worker(_echo, endpoint)
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as pair:
        pair.linger = 0
        pair.bind(endpoint)

        async def once() -> None:
            await pair.send(b"x")
            await pair.recv()

        await once()
        yield timed(once)
    worker.end()


async def _echo(pipe: Any, endpoint: str) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as pair:
        pair.connect(endpoint)
        while True:
            await pair.send(await pair.recv())


@asynccontextmanager
async def torchrl(spec: Spec) -> AsyncIterator[Any]:
    """TorchRL's scheme. It sends other weights than the registered ones, because its workers share the memory of
    those."""
    weight_update = importlib.import_module("torchrl.weight_update")
    from tensordict import TensorDict

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(DESCRIPTORS, hard)), hard))
    scheme = getattr(weight_update, TORCHRL[spec.kind.split()[1]])()
    scheme.init_on_sender(
        model_id="model",
        weights=TensorDict.from_module(module(spec.case, blank=True)),
        devices=[torch.device("cpu")] * spec.workers,
        num_workers=spec.workers,
        ctx=importlib.import_module("torch.multiprocessing").get_context("fork"),
    )
    workers = [Worker(_torchrl_worker, spec, scheme, index) for index in range(spec.workers)]
    source = TensorDict.from_module(module(spec.case)).data

    def connect() -> None:
        for worker in workers:
            worker.post("connect")
        scheme.connect()
        for worker in workers:
            worker.answer()
        scheme.send(weights=source)
        if {worker.ask("digest") for worker in workers} != {digest(source.values())}:
            raise RuntimeError("TorchRL: what the workers have is not what was sent")

    await spec.in_thread(connect)
    yield timed(lambda: scheme.send(weights=source), source.values(), blocking=True)
    for worker in workers:
        worker.end()
    os._exit(0)  # TorchRL's threads and queues would wait for the workers


def _torchrl_worker(spec: Spec, scheme: Any, index: int) -> Callable[[str], Any]:
    """A worker. TorchRL applies updates in a thread of its own, while this one waits for orders."""
    model = module(spec.case, blank=True)

    def obey(order: str) -> Any:
        if order == "digest":
            return digest(model.parameters())
        scheme.init_on_receiver(model_id="model", model=model, worker_idx=index)
        scheme.connect(worker_idx=index)
        return None

    return obey


class Receiver:
    """The object that RPC or Ray calls: a model that receives updates, by a scheme or by hand (``scheme`` is None)."""

    def __init__(self, scheme: Any, index: int, case: str) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        self._scheme, self._model = scheme, module(case, blank=True)
        self._parameters: list[torch.Tensor] = list(self._model.parameters())
        self._flat = torch.ones(sum(tensor.numel() for tensor in self._parameters))
        if scheme is not None:
            scheme.init_on_receiver("model", model=self._model, worker_idx=index)

    def connect(self) -> None:
        self._scheme.connect(timeout=PATIENCE)

    def _receive_weights_scheme(self) -> None:
        self._scheme.receive()

    def receive(self) -> None:
        dist.recv(self._flat, 0)
        self._copy(self._flat)

    def take(self, flat: Any) -> None:
        self._copy(torch.from_numpy(flat))

    def _copy(self, flat: torch.Tensor) -> None:
        torch._foreach_copy_(self._parameters, flat.split_with_sizes([tensor.numel() for tensor in self._parameters]))

    def digest(self) -> int:
        return digest(self._parameters)


@asynccontextmanager
async def called(spec: Spec) -> AsyncIterator[Any]:
    """Kinds: "rpc", "ray", "by hand rpc", "by hand ray"."""
    ours, ray = not spec.kind.startswith("by hand"), spec.kind.endswith("ray")
    if ray:
        library = importlib.import_module("ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        store = {"object_store_memory": 2 << 30, "_temp_dir": f"{spec.directory}/{os.getpid()}"}
        await asyncio.to_thread(library.init, **RAY, **store)
        processes = []
    else:
        port = free_port()
        processes = [Worker(_join, rank, port, spec) for rank in range(1, spec.workers + 1)]
        library = await asyncio.to_thread(_join, 0, port, spec)
    scheme = asyncsync.RayWeightSyncScheme(backend="object_store") if ray else asyncsync.RPCWeightSyncScheme()
    blocking = scheme.blocking if ours else None
    source = module(spec.case)
    parameters: list[torch.Tensor] = list(source.parameters())
    flat, views = _flat(source)
    arguments = [(blocking, index, spec.case) for index in range(spec.workers)]
    if ray:
        actor = library.remote(num_cpus=0, max_concurrency=2)(Receiver)
        receivers = [actor.remote(*given) for given in arguments]
    else:
        receivers = [library.remote(f"rank{given[1] + 1}", Receiver, given) for given in arguments]

    def by_hand() -> None:
        torch._foreach_copy_(views, parameters)
        if ray:
            placed = library.put(flat.numpy())
            library.get([receiver.take.remote(placed) for receiver in receivers], timeout=PATIENCE)
            return
        calls = [receiver.rpc_async(timeout=PATIENCE).receive() for receiver in receivers]
        for work in [dist.isend(flat, rank) for rank in range(1, spec.workers + 1)]:
            work.wait()
        for call in calls:
            call.wait()

    def digests() -> set[int]:
        if ray:
            return set(library.get([receiver.digest.remote() for receiver in receivers], timeout=PATIENCE))
        return {receiver.rpc_sync(timeout=PATIENCE).digest() for receiver in receivers}

    step: Any
    if not ours:
        step = timed(by_hand, parameters, blocking=True)
        await spec.in_thread(step)
    else:
        scheme.init_on_sender(model_id="model", model=source, remotes=receivers)
        actors = [receiver.connect.remote() for receiver in receivers] if ray else []
        await asyncio.gather(scheme.connect(timeout=PATIENCE), *actors)
        step = timed(lambda: scheme.send_async(timeout=PATIENCE), parameters)
        await step()
    if await asyncio.to_thread(digests) != {digest(parameters)}:
        raise RuntimeError(f"{spec.kind}: what the workers have is not what was sent")
    yield step
    await scheme.shutdown()
    if ray:
        library.shutdown()
    for process in processes:
        process.end()
    if not ray:
        os._exit(0)  # torch would wait for the workers


def _join(rank: int, port: int, spec: Spec) -> Any:
    warnings.simplefilter("ignore")  # torch warns of its own use of process groups
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # not the interface of the host's name
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=PATIENCE, _transports=["uv"])
    size = spec.workers + 1
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    dist.init_process_group("gloo", init_method=f"file://{spec.directory}/rpc-{port}", rank=rank, world_size=size)
    return rpc
