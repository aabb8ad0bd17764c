"""The private names of torch that models need; tests/unit/test_private_names.py says what each is for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
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
    optimized = _optimized_module()
    return optimized is not None and isinstance(module, optimized)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run compiled code instead of its hooks."""
    return is_optimized(module) or getattr(module, "_compiled_call_impl", None) is not None


def has_compiled_anything() -> bool:
    """Whether dynamo has compiled anything in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"])


def optimized_modules() -> Iterator[tuple[nn.Module, nn.Module]]:
    """Everything that torch.compile has made of a module in this process, with that module."""
    if (optimized := _optimized_module()) is not None:
        for one in gc.get_objects():
            if issubclass(type(one), optimized):
                yield one, one._orig_mod


def wraps_as_it_is(optimized: nn.Module, module: nn.Module) -> bool:
    """Whether a compiled module calls the original with all its hooks, and compiles only what that calls."""
    called = getattr(optimized.forward, "_torchdynamo_orig_callable", None)
    return getattr(called, "__self__", None) is module


def _optimized_module() -> Any:
    # There is no compiled module unless this was imported, which takes seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return None if dynamo is None else dynamo.OptimizedModule
