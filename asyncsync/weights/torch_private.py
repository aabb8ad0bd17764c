"""The private names of torch that moving weights needs; tests/unit/test_private_names.py says what each is for."""

from __future__ import annotations

from torch import _foreach_copy_ as foreach_copy

__all__ = ["COMPILED", "foreach_copy"]

COMPILED = "_orig_mod"  # torch.compile(module) puts this before the names of the module's weights
