"""Values as torch's own ways carry them, gloo and RPC: the pickle and the memory of what is large in it, as tensors of
bytes, without a copy.

    for part in as_tensors(answer): pair.send(part)
    answer = from_tensors(received)
"""

from __future__ import annotations

from typing import Any

import torch

from asyncsync.collectors.workers.channel import Parcel, loads
from asyncsync.weights.copying import normal_tensors


def as_tensors(value: Any) -> list[torch.Tensor]:
    """For :func:`from_tensors`, at the other end. Raises whatever pickling the value raises."""
    parcel = Parcel.of(value)
    return [as_tensor(parcel.pickled), *(as_tensor(buffer.raw()) for buffer in parcel.buffers)]


def from_tensors(parts: list[torch.Tensor]) -> Any:
    """The value; its memory is that of the tensors."""
    pickled, *memory = (part.numpy() for part in parts)
    return loads(Parcel(pickled, memory))


def as_tensor(data: Any) -> torch.Tensor:
    """Bytes, copied where they cannot be written."""
    memory = memoryview(data)
    with normal_tensors():
        return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


def empty(size: int) -> torch.Tensor:
    """Memory for so many bytes."""
    with normal_tensors():
        return torch.empty(size, dtype=torch.uint8, device="cpu")
