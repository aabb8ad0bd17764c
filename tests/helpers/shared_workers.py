"""Trainers and workers of the tests with slots: what :class:`~helpers.processes.Worker` can, and how to hurt it.

Each runs in a process of its own; see :mod:`helpers.processes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch import nn

from asyncsync.bus import publishing
from asyncsync.weights.slab import lies_in_slab
from helpers.blocking_crew import in_fork, outcomes
from helpers.blocking_workers import begin, reads
from helpers.memory import descriptors, files, mappings
from helpers.processes import Filled, Trainer, Worker, value_of
from helpers.stalls import longest_stall

MIB = 1 << 18  # float32 elements in a MiB


def is_repointed(model: nn.Module) -> list[bool]:
    """Of each Parameter, whether its memory is a slot's mapping."""
    return [lies_in_slab(p) for p in model.parameters()]


def slots_in_sight(*pids: int) -> set[int]:
    """The inodes of the slots that these processes (this one, if none is named) have open or mapped."""
    found = set()
    for pid in pids or (os.getpid(),):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {int(line.split()[4]) for line in mappings(pid)}
            found |= files(pid)
    return found


class BatchNormed(nn.Module):
    """Weights that show a torn read, and a layer that writes its running statistics in every forward."""

    def __init__(self, numel: int, value: float = 0.0) -> None:
        super().__init__()
        self.filled = Filled(numel, value)
        self.norm = nn.BatchNorm1d(4096)
        self.fill(value)

    def fill(self, value: float) -> BatchNormed:
        self.filled.fill(value)
        with torch.no_grad():
            for tensor in (*self.norm.parameters(), *self.norm.buffers()):
                tensor.fill_(value)
        return self

    @property
    def contents(self) -> dict[str, list[float]]:
        """The least and the greatest number in each tensor."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: [float(end) for end in t.detach().aminmax()] for name, t in tensors.items()}

    def forward(self) -> tuple[float, float]:
        self.norm(torch.randn(8, 4096))
        return self.filled()


class _Hurt:
    """What can be done to either side."""

    scheme: Any
    emit: Callable[[Any], None]
    _limits: tuple[int, int] | None = None

    async def slots_in_sight(self) -> set[int]:
        return slots_in_sight()

    async def descriptors(self) -> list[str]:
        """What they refer to; not those of the slots, which Python's mmap keeps."""
        return sorted(target for target in descriptors().values() if "/memfd:asyncsync" not in target)

    async def limit_memory(self, nbytes: int | None) -> None:
        """Have this process get no more than so many further bytes of address space (None: as many as it wants)."""
        if self._limits is None:
            self._limits = resource.getrlimit(resource.RLIMIT_AS)
        if nbytes is None:
            resource.setrlimit(resource.RLIMIT_AS, self._limits)
            return
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + nbytes, self._limits[1]))


class SharedTrainer(_Hurt, Trainer):
    """A sender of :class:`~helpers.processes.Filled` weights, through slots."""

    async def publish_all_the_time(self) -> None:
        """Until this process ends."""
        while True:
            await self.scheme.publish(self.model.fill(self.scheme.version + 1))
            await asyncio.sleep(0)

    async def die_in_the_middle_of_packing(self, value: float) -> None:
        """Publish, and get SIGKILL when half of it has been written into the slot."""

        def pack_half(slab: Any, flat: Any, *rest: Any) -> None:
            tensors = list(flat.tensors.values())
            half = len(tensors) // 2
            for view, tensor in list(zip(slab.views, tensors, strict=True))[:half]:
                view.copy_(tensor.detach())
            os.kill(os.getpid(), signal.SIGKILL)

        publishing.pack = pack_half
        await self.scheme.publish(self.model.fill(value))

    async def slots(self) -> tuple[int, int]:
        """How many are in use, and how many there are."""
        pool = self.scheme.shared_transport.pool
        return len(pool.used), pool.slabs

    async def fork(self) -> dict[str, Any]:
        """What a forked child of this trainer finds."""

        def child() -> dict[str, Any]:
            found: dict[str, Any] = {"slots": len(slots_in_sight())}
            try:
                asyncio.new_event_loop().run_until_complete(self.scheme.publish(self.model))
            except RuntimeError as error:
                found["error"] = str(error)
            return found

        return await asyncio.to_thread(in_fork, child)


class SharedWorker(_Hurt, Worker):
    """A receiver of them."""

    async def connect(
        self, scheme: Any, worker_idx: int, numel: int, *, inplace: bool | None = None, **options: Any
    ) -> int:
        self._children: dict[int, Connection] = {}
        if inplace is not None:
            scheme.init_on_receiver = functools.partial(scheme.init_on_receiver, inplace=inplace)
        return await super().connect(scheme, worker_idx, numel, **options)

    async def connect_normed(self, scheme: Any, worker_idx: int, numel: int, inplace: bool | None = None) -> None:
        self.model = BatchNormed(numel, -1.0)
        self.scheme = scheme
        scheme.init_on_receiver("policy", model=self.model, worker_idx=worker_idx, inplace=inplace)
        await scheme.connect()

    async def contents(self) -> dict[str, list[float]]:
        return self.model.contents

    async def is_repointed(self) -> list[bool]:
        return is_repointed(self.model)

    async def run(self, count: int) -> None:
        """Forwards in train mode."""
        self.model.train()
        for _ in range(count):
            self.model()
            await asyncio.sleep(0)

    async def train(self, steps: int, *, own: bool = False) -> float:
        """An optimizer's steps; returns what the model holds then. ``own``: with momentum, kept between calls."""
        return trains(self.model, steps, momentum=0.9 if own else 0.0)

    async def train_under_fire(self, steps: int) -> int:
        """Train all the time, each step in a hold; returns how often a step began with what nobody has sent."""
        wrong = 0
        for _ in range(steps):
            async with self.scheme.hold():
                before, ends = self.scheme.version, self.model()
                fresh = before != getattr(self, "_trained", 0)
                wrong += (ends[0] != ends[1]) or (fresh and ends[0] != before)
                trains(self.model, 1)
                self._trained = before
            await asyncio.sleep(0)
        return wrong

    async def shutdown_and_keep_the_model(self) -> list[bool]:
        await self.scheme.shutdown()
        return is_repointed(self.model)

    async def resident(self) -> int:
        """Bytes of this process's resident memory; a page that is mapped twice counts once."""
        return psutil.Process().memory_full_info().pss

    async def stall_until(self, version: int) -> float:
        """Seconds for which this worker's loop stands still, at most, until it has this version; without the time for
        which it waited for a CPU, where the kernel tells that."""
        self.emit("watching")
        stall = await longest_stall(lambda: self.scheme.wait_version(version, timeout=60))
        return stall.raw if stall.running is None else stall.running

    # -- forks ------------------------------------------------------------------------------------------------------

    async def fork(self) -> int:
        """A child that answers :meth:`ask`; returns its pid."""
        here, there = Pipe()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                for connection in (here, *self._children.values()):
                    connection.close()
                signal.alarm(60)  # no test lasts so long
                with contextlib.suppress(EOFError):
                    while there.recv():
                        try:
                            there.send(repr(self.model.value))
                        except AssertionError as error:
                            there.send(str(error))
                status = 0
            finally:
                os._exit(status)
        there.close()
        self._children[pid] = here
        return pid

    async def ask(self, pid: int) -> str:
        """What the child's model holds."""
        self._children[pid].send(True)
        return await asyncio.to_thread(self._children[pid].recv)

    async def end(self, pid: int, how: signal.Signals | None = None) -> int:
        """End a child; returns its exit code."""
        if how is not None:
            os.kill(pid, how)
        self._children.pop(pid).close()
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        return os.waitstatus_to_exitcode(status)

    async def fork_often(self, count: int) -> tuple[list[str], list[str]]:
        """Children that end at once; returns how many descriptors there were before, and are afterwards."""
        before = await self.descriptors()
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            await asyncio.to_thread(os.waitpid, pid, 0)
        return before, await self.descriptors()

    async def use_the_scheme_in_a_child(self) -> dict[str, str]:
        calls: dict[str, Callable[[], Any]] = {
            "receive": lambda: self.scheme.receive(0),
            "fetch": lambda: self.scheme.fetch(1),
            "connect": lambda: self.scheme.connect(),
        }

        return await asyncio.to_thread(in_fork, lambda: outcomes(calls, asyncio.new_event_loop().run_until_complete))


def trains(model: nn.Module, steps: int, momentum: float = 0.0) -> float:
    """Steps of an optimizer that write every element; returns what they all hold then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
    return value_of(dict(model.named_parameters()))


# -- blocking workers --------------------------------------------------------------------------------------------------


def forwards(
    scheme: Any,
    index: int,
    numel: int,
    enough: dict[str, int],
    inplace: bool | None,
    broken: bool,
    connection: Connection,
) -> None:
    """Forwards of the main thread and of another one; tells how many were torn, how often their versions went back, and
    whether the Parameters lie in a slot."""
    model = begin(scheme, index, Filled(numel, -1.0, parts=4), broken, connection, inplace=inplace)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(reads, scheme, **{**enough, "count": enough["count"] // 2})
        found = [reads(scheme, **enough), other.result()]
    torn, back = map(sum, zip(*found, strict=True))
    connection.send((torn, back, all(is_repointed(model))))
    scheme.shutdown()
