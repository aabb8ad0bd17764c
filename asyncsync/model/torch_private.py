"""The private names of torch that models need; tests/unit/test_private_names.py says what each is for."""

from __future__ import annotations

import gc
import sys
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

# The dictionaries of a module's parameters, of its buffers and of its children. One call for all three, as every
# publication walks over the model.
tensors_and_children = attrgetter("_parameters", "_buffers", "_modules")
non_persistent = attrgetter("_non_persistent_buffers_set")
# All in which a module has its hooks: before a forward, after it, and which of the latter run after an error, too.
call_hooks = attrgetter("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
forward_hooks = attrgetter("_forward_hooks")
CALL_IMPL = nn.Module._call_impl.__code__  # of the frame that runs the hooks of a module and its forward


def forget_computed() -> None:
    """Have torch compute anew what it keeps of parameters, as if they would not change, while somebody is inside of
    ``torch.autocast`` (in another dtype) or ``parametrize.cached()``."""
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def is_optimized(module: nn.Module) -> bool:
    """Whether this is what torch.compile has made of a module."""
    return isinstance(module, _optimized_module())


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run compiled code instead of its hooks."""
    return is_optimized(module) or getattr(module, "_compiled_call_impl", None) is not None


def may_be_inlined(module: nn.Module) -> bool:
    """Whether compiled code may have taken in this module's call as it was, without hooks: dynamo does not look again
    for those that come later."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not utils.counters["stats"]:  # dynamo has compiled nothing so far
        return False
    optimized = _optimized_module()
    for one in gc.get_objects():
        if issubclass(type(one), optimized):
            if one._orig_mod is module:
                # It may call the original with all its hooks, and compile only what that calls.
                called = getattr(one.forward, "_torchdynamo_orig_callable", None)
                if getattr(called, "__self__", None) is not module:
                    return True
            elif any(part is module for part in one._orig_mod.modules()):
                return True
    return False


def _optimized_module() -> Any:
    # There is no compiled module unless this was imported, which takes seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return () if dynamo is None else dynamo.OptimizedModule
