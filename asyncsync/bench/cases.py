"""What is measured: payloads, sections, and how often each is tried.

plan = Plan(quick=True)
for payload in plan.payloads:
    trials = plan.often(payload.nbytes)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn

__all__ = [
    "CALLED",
    "COLLECT",
    "EMPTY",
    "LARGE",
    "MANY",
    "MIDDLE",
    "ONE_HOST",
    "SECTIONS",
    "SMALL",
    "WORKERS",
    "Payload",
    "Plan",
    "touch",
]

KIB, MIB = 1 << 10, 1 << 20
WORKERS = 2  # processes; cases with one receiver use the first of them
# In this order: peak memory is measured while nothing else has been.
SECTIONS = {
    "memory": "slabs and peak resident memory during large sends",
    "throughput": "send → applied by all, beside hand-written gloo",
    "tensors": "1000 small tensors beside one of as many bytes",
    "latency": "empty and small updates, beside a bare zmq.asyncio round trip",
    "stall": "the longest stall of the trainer's event loop, and of the workers', during large sends",
    "shared": "SharedMem: send → applied by all, beside TorchRL's scheme of that name",
    "process": "MultiProcess: the same",
    "distributed": "Distributed: the same, beside hand-written gloo",
    "rpc": "RPC: the same, beside a call and a transfer written by hand",
    "ray": "Ray: the same, through its object store, beside ray.put",
    "collect": "collectors, beside TorchRL's and a bare loop over a vector environment",
    "nodes": "DistributedCollector and RayCollector, beside TorchRL's of these names",
}
ONE_HOST = ("shared", "process")  # sections with processes of their own
CALLED = ("rpc", "ray")  # and others again
COLLECT = ("collect", "nodes")  # and others


@dataclass(frozen=True)
class Payload:
    """Weights of a certain shape.

    Attributes:
        name: in the tables.
        tensors: how many.
        each: bytes of each of them.
    """

    name: str
    tensors: int
    each: int

    @property
    def nbytes(self) -> int:
        """All tensors together."""
        return self.tensors * self.each

    def weights(self, *, blank: bool = False) -> dict[str, torch.Tensor]:
        """Weights of this shape, in pages that are there: a pattern, or all the same value."""
        length = self.each // 4
        if blank:
            return {f"{i}": torch.full((length,), -1.0) for i in range(self.tensors)}
        return {f"{i}": torch.arange(length, dtype=torch.float32) + i for i in range(self.tensors)}

    def module(self, *, blank: bool = False) -> nn.Module:
        """The same as a module's parameters, without gradients."""
        module = nn.Module()
        for name, tensor in self.weights(blank=blank).items():
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        return module


EMPTY = Payload("empty", 0, 0)
SMALL = Payload("64 KiB", 1, 64 * KIB)
MIDDLE = Payload("4 MiB", 1, 4 * MIB)
MANY = Payload("1000 × 4 KiB", 1000, 4 * KIB)
LARGE = Payload("256 MiB", 64, 4 * MIB)

_serial = count(1)


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Change something in the first tensor, if there is one: no two updates are the same."""
    for tensor in tensors:
        tensor[0] = next(_serial)
        return


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        quick: without 256 MiB, and fewer trials.
        trials: of everything; None: by size.
        only: names of sections; empty: all.
    """

    quick: bool = False
    trials: int | None = None
    only: tuple[str, ...] = ()

    @property
    def sections(self) -> list[str]:
        """Names, in the order in which they run."""
        return [name for name in SECTIONS if not self.only or name in self.only]

    @property
    def payloads(self) -> list[Payload]:
        """Of the throughput section; the last is the largest."""
        return [SMALL, MIDDLE] if self.quick else [SMALL, MIDDLE, LARGE]

    @property
    def one_host(self) -> list[Payload]:
        """Of the sections of :data:`ONE_HOST`."""
        return [SMALL, MANY] if self.quick else [SMALL, LARGE, MANY]

    @property
    def counts(self) -> tuple[int, ...]:
        """Of workers in those sections; cases with fewer use the first of them."""
        return (1, 2) if self.quick else (1, 2, 4)

    @property
    def largest(self) -> Payload:
        """What memory and stalls are measured with."""
        return self.payloads[-1]

    def often(self, nbytes: int) -> int:
        """Trials of an update with so many bytes."""
        if self.trials is not None:
            return self.trials
        upto = ((SMALL.nbytes, 300), (MIDDLE.nbytes, 200), (LARGE.nbytes, 60))
        often = next((often for size, often in upto if nbytes < size), 21)
        return max(often // 8, 5) if self.quick else often
