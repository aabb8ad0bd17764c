"""Mismatch: the words of :class:`SchemaMismatch` for weights that do not fit a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["all_problems", "constant", "key_problem", "tensor_problem"]

SHOWN = 12


def all_problems(problems: list[str]) -> str:
    more = f" … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "the weights do not fit the model: " + "; ".join(problems[:SHOWN]) + more


def constant(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this dtype and shape, of any size, that has the memory of one element."""
    one = torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
    return one.expand(shape) if shape else one.reshape(())


def tensor_problem(dtype: torch.dtype, shape: tuple[int, ...], own: Any, *, cast: bool, inplace: bool) -> str:
    """Why a tensor that has come does not fit the model's own; empty: it does."""
    if not isinstance(own, torch.Tensor):
        return f"sent as a tensor, but the model's is {'gone' if own is None else f'a {type(own).__name__}'}"
    if what := _without_memory(own):
        return f"the model's is {what}"
    if own.shape != shape:
        return f"sent with shape {list(shape)}, the model's is {list(own.shape)}"
    if own.dtype != dtype and not cast:
        return f"sent as {dtype}, the model's is {own.dtype} (send that, or init_on_receiver(cast=True))"
    if own.dtype != dtype and not _castable(dtype, own.dtype):
        return f"sent as {dtype}, which cannot be cast to the model's {own.dtype}; write a WeightStrategy"
    if inplace and any(n > 1 and stride == 0 for n, stride in zip(own.shape, own.stride(), strict=True)):
        return "the model's is an expanded tensor, whose elements share memory; `.clone()` it"
    return ""


def _without_memory(tensor: torch.Tensor) -> str:
    """Why nothing can be written into this tensor's memory, and what to do; empty: it can."""
    if tensor.is_nested:
        return "a nested tensor, which cannot receive: keep its values in a tensor of their own"
    if tensor.layout is not torch.strided:
        return f"stored as {tensor.layout}, which cannot receive: keep a dense tensor, and convert where it is used"
    if tensor.is_conj() or tensor.is_neg():
        return "a view that is conjugated or negated when it is read: use `.resolve_conj()` or `.resolve_neg()` of it"
    return ""


def _castable(source: torch.dtype, destination: torch.dtype) -> bool:
    if source.is_complex and not destination.is_complex:
        return False
    try:
        constant(source, ()).to(destination)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def key_problem(sent: Iterable[str], own: Iterable[str], missing: set[str], unexpected: set[str]) -> str:
    """Both key lists, what differs, and their common prefixes."""
    sent, own = sorted(sent), sorted(own)
    text = (
        "the keys of the weights do not fit the model: "
        f"missing {_some(sorted(missing))}, unexpected {_some(sorted(unexpected))}. "
        f"Sent: {_some(sent)} (common prefix {_common_prefix(sent)!r}). "
        f"The model's: {_some(own)} (common prefix {_common_prefix(own)!r})."
    )
    for longer, shorter, where in ((own, sent, "the model's"), (sent, own, "the sent")):
        if longer and shorter:
            prefix = longer[0].removesuffix(shorter[0])
            if prefix and prefix != longer[0] and set(longer) == {prefix + n for n in shorter}:
                text += f" They differ by the prefix {prefix!r} of {where} keys"
                text += ": register the module below it, or rename in a WeightStrategy."
    return text


def _common_prefix(names: list[str]) -> str:
    if not names:
        return ""
    first, last = names[0], names[-1]  # the names are sorted: what these two share, all share
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _some(names: list[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > SHOWN else ""
    return "[" + ", ".join(names[:SHOWN]) + more + "]"
