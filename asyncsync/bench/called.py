"""Trainers whose workers are called: through torch.distributed.rpc, or as Ray's actors. In a process of its own.

    called = Called.start("rpc", directory)            # None: it is not installed
    names = await called.open(payload, workers=2)      # asyncsync, and the same written by hand, both checked
    seconds = await called.once(names[0])
    await called.close()
    called.end()

By hand, as a careful user would: the trainer copies its parameters into one flat buffer and calls each worker, which
takes the buffer (by RPC: ``recv`` from ``send``; by Ray: one ``put`` that all actors map) and copies out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import socket
import threading
import time
import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

import asyncsync.sync
from asyncsync import RayWeightSyncScheme, RPCWeightSyncScheme, WeightSyncScheme
from asyncsync.bench.cases import WORKERS, Payload, touch
from asyncsync.bench.peers import digest
from asyncsync.bench.pipe import end_with_parent

__all__ = ["BY_HAND", "OURS", "Called"]

OURS, BY_HAND = "asyncsync", "by hand"
PATIENCE = 120.0  # seconds
STORE_BYTES = 2 << 30  # of Ray's objects


class Receiver:
    """What is called: the parameters twice, for asyncsync's scheme and for what is written by hand."""

    def __init__(self, scheme: asyncsync.sync.WeightSyncScheme, index: int, payload: Payload) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        self._models = {name: payload.module(blank=True) for name in (OURS, BY_HAND)}
        self._scheme = scheme
        self._scheme.init_on_receiver("model", model=self._models[OURS], worker_idx=index)
        self._parameters: list[torch.Tensor] = list(self._models[BY_HAND].parameters())
        self._flat = torch.ones(payload.nbytes // 4)

    def connect(self) -> None:
        self._scheme.connect(timeout=PATIENCE)

    def _receive_weights_scheme(self) -> None:
        self._scheme.receive()

    def receive(self) -> None:
        """What follows by ``send``."""
        dist.recv(self._flat, 0)
        self._copy(self._flat)

    def take(self, flat: Any) -> None:
        """What lies in Ray's store."""
        self._copy(torch.from_numpy(flat))

    def _copy(self, flat: torch.Tensor) -> None:
        torch._foreach_copy_(self._parameters, flat.split_with_sizes([tensor.numel() for tensor in self._parameters]))

    def digest(self, name: str) -> int:
        return digest(self._models[name].parameters())


class Called(ABC):
    """A trainer with up to :data:`WORKERS` workers."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._receivers: list[Any] = []

    @staticmethod
    def start(kind: str, directory: str) -> Called | None:
        """With ``"rpc"`` or ``"ray"``; None: it is not installed."""
        try:
            importlib.import_module({"rpc": "torch.distributed.rpc", "ray": "ray"}[kind])
        except ImportError:
            return None
        return {"rpc": _RPC, "ray": _Ray}[kind](directory)

    async def open(self, payload: Payload, workers: int) -> list[str]:
        """Have so many workers with these parameters. Returns the names of what can be timed.

        Raises:
            RuntimeError: what the workers have is not what was sent.
        """
        self._source = payload.module()
        self._parameters: list[torch.Tensor] = list(self._source.parameters())
        self._flat = torch.ones(payload.nbytes // 4)
        self._views = list(self._flat.split_with_sizes([tensor.numel() for tensor in self._parameters]))
        self._scheme = self._make_scheme()
        self._receivers = [self._receiver(self._scheme.blocking, index, payload) for index in range(workers)]
        remotes: dict[str, Any] = {"remotes": self._receivers}
        self._scheme.init_on_sender(model_id="model", model=self._source, **remotes)
        await self._connect()
        for name in (OURS, BY_HAND):
            await self.once(name)
            sent = digest(self._parameters)
            if set(await asyncio.to_thread(self._digests, name)) != {sent}:
                raise RuntimeError(f"{name}: what the workers have is not what was sent")
        return [OURS, BY_HAND]

    async def once(self, name: str) -> float:
        """Seconds from the parameters here to those in all workers."""
        touch(self._parameters)
        start = time.perf_counter()
        if name == OURS:
            await self._scheme.send_async(timeout=PATIENCE)
        else:
            torch._foreach_copy_(self._views, self._parameters)
            self._by_hand()
        return time.perf_counter() - start

    async def close(self) -> None:
        """Disconnect."""
        await self._scheme.shutdown()
        self._receivers.clear()

    async def _connect(self) -> None:
        await self._scheme.connect(timeout=PATIENCE)

    @abstractmethod
    def _make_scheme(self) -> WeightSyncScheme: ...

    @abstractmethod
    def _receiver(self, scheme: asyncsync.sync.WeightSyncScheme, index: int, payload: Payload) -> Any:
        """A :class:`Receiver` in another process."""

    @abstractmethod
    def _by_hand(self) -> None:
        """From the flat buffer to all workers' parameters."""

    @abstractmethod
    def _digests(self, name: str) -> list[int]: ...

    @abstractmethod
    def end(self) -> None:
        """End the workers."""


class _RPC(Called):
    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        warnings.simplefilter("ignore")  # torch's, of how it makes groups itself
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._processes = [
            context.Process(target=_serve, args=(rank, port, directory), daemon=True) for rank in range(1, WORKERS + 1)
        ]
        for process in self._processes:
            process.start()
        _join(0, port, directory)

    def _make_scheme(self) -> WeightSyncScheme:
        return RPCWeightSyncScheme()

    def _receiver(self, scheme: asyncsync.sync.WeightSyncScheme, index: int, payload: Payload) -> Any:
        from torch.distributed import rpc

        return rpc.remote(f"rank{index + 1}", Receiver, (scheme, index, payload))

    def _by_hand(self) -> None:
        calls = [receiver.rpc_async(timeout=PATIENCE).receive() for receiver in self._receivers]
        for work in [dist.isend(self._flat, rank + 1) for rank in range(len(calls))]:
            assert work is not None
            work.wait()
        for call in calls:
            call.wait()

    def _digests(self, name: str) -> list[int]:
        return [receiver.rpc_sync(timeout=PATIENCE).digest(name) for receiver in self._receivers]

    def end(self) -> None:
        from torch.distributed import rpc

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch would report the end of every connection
        for process in self._processes:
            process.kill()
            process.join()
        rpc.shutdown(graceful=False)


def _join(rank: int, port: int, directory: str) -> None:
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not what the host's name resolves to
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=PATIENCE, _transports=["uv"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rpc", rank=rank, world_size=WORKERS + 1)


def _serve(rank: int, port: int, directory: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _join(rank, port, directory)
    threading.Event().wait()


class _Ray(Called):
    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._ray: Any = importlib.import_module("ray")
        # A failure to send statistics is not a failure.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray.init(
            num_cpus=WORKERS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=STORE_BYTES,
            _temp_dir=f"{directory}/ray",
        )

    def _make_scheme(self) -> WeightSyncScheme:
        return RayWeightSyncScheme(backend="object_store")

    def _receiver(self, scheme: asyncsync.sync.WeightSyncScheme, index: int, payload: Payload) -> Any:
        actor = self._ray.remote(num_cpus=0, max_concurrency=2)(Receiver)
        return actor.remote(scheme, index, payload)

    async def _connect(self) -> None:
        await asyncio.gather(super()._connect(), *(actor.connect.remote() for actor in self._receivers))

    def _by_hand(self) -> None:
        placed = self._ray.put(self._flat.numpy())
        self._ray.get([actor.take.remote(placed) for actor in self._receivers], timeout=PATIENCE)

    def _digests(self, name: str) -> list[int]:
        found: list[int] = self._ray.get([actor.digest.remote(name) for actor in self._receivers], timeout=PATIENCE)
        return found

    async def close(self) -> None:
        actors = list(self._receivers)
        await super().close()
        for actor in actors:
            with contextlib.suppress(Exception):  # it has ended by itself
                self._ray.kill(actor)

    def end(self) -> None:
        self._ray.shutdown()
