"""The private names of torch that moving weights needs; tests/unit/test_private_names.py says what each is for."""

from __future__ import annotations

from torch import _foreach_copy_ as foreach_copy
from torch._C import _InferenceMode as InferenceMode  # what torch.inference_mode() enters, in a third of its time

__all__ = ["COMPILED", "InferenceMode", "foreach_copy"]

COMPILED = "_orig_mod"  # what torch.compile(module) calls the module: the same weights have the same names without it
