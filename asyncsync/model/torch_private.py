"""The private names of torch that this folder uses; tests/unit/test_private_names.py says what each is for."""

from __future__ import annotations

import gc
import sys
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

# A module's dictionaries of parameters, buffers and children. One call for all three, because every publication walks
# over the model.
tensors_and_children = attrgetter("_parameters", "_buffers", "_modules")
non_persistent = attrgetter("_non_persistent_buffers_set")
# A module's hooks before a forward, its hooks after it, and which hooks after it also run after an error.
call_hooks = attrgetter("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
forward_hooks = attrgetter("_forward_hooks")
CALL_IMPL = nn.Module._call_impl.__code__  # a frame with this code runs a module's hooks and its forward


def forget_computed() -> None:
    """Clear torch's caches of tensors computed from parameters. It fills them inside ``torch.autocast`` (parameters in
    another dtype) and ``parametrize.cached()``, and assumes that parameters do not change there."""
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def is_optimized(module: nn.Module) -> bool:
    """Whether torch.compile(module) returned this."""
    return isinstance(module, _optimized_module())


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run compiled code instead of its hooks."""
    return is_optimized(module) or getattr(module, "_compiled_call_impl", None) is not None


def may_be_inlined(module: nn.Module) -> bool:
    """Whether compiled code may contain calls of this module as it was, without hooks: dynamo does not check for hooks
    that were added later."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not utils.counters["stats"]:  # dynamo has compiled nothing so far
        return False
    optimized = _optimized_module()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), optimized):
            if candidate._orig_mod is module:
                # It may call the original with all its hooks, and have compiled only the code that this calls.
                called = getattr(candidate.forward, "_torchdynamo_orig_callable", None)
                if getattr(called, "__self__", None) is not module:
                    return True
            elif any(part is module for part in candidate._orig_mod.modules()):
                return True
    return False


def _optimized_module() -> Any:
    # Without this import, which takes seconds, no module can have been compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return () if dynamo is None else dynamo.OptimizedModule
