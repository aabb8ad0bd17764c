"""The private names of torch that moving weights needs; tests/unit/test_private_names.py says what each is for."""

from __future__ import annotations

from torch import _foreach_copy_ as foreach_copy

__all__ = ["COMPILED", "foreach_copy"]

COMPILED = "_orig_mod"  # what torch.compile(module) calls the module: the same weights have the same names without it
