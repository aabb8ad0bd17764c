"""Tensors of any content, and their content as bytes."""

import torch


def raw(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Every bit pattern, NaNs with payloads among them; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    content = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return content.view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)  # not every dtype can be copied
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
