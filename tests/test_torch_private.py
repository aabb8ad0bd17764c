"""The private names of torch that asyncsync touches: each stands in a ``torch_private`` module, and in here with what
breaks where a torch does not have it any more."""

from __future__ import annotations

import torch
from torch import nn

from asyncsync.weights import torch_private as weights_private


def test_many_tensors_are_copied_by_one_call() -> None:
    """``torch._foreach_copy_``. Without it every update copies tensor by tensor, which takes twice as long."""
    destinations, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    weights_private.foreach_copy(destinations, sources)
    assert all(bool((tensor == 1).all()) for tensor in destinations)


def test_inference_mode_can_be_entered_without_its_decorators() -> None:
    """``torch._C._InferenceMode``. Without it, models that were made in inference mode cannot be written;
    ``torch.inference_mode()`` does the same in three times the time."""
    with torch.inference_mode():
        model = torch.zeros(1)
    with weights_private.InferenceMode(True):
        model.fill_(1)
    assert model.item() == 1


def test_a_compiled_module_has_the_original_under_the_name_that_is_left_out_of_paths() -> None:
    """``OptimizedModule._orig_mod``. Without it a compiled trainer's names do not fit an eager worker's model."""
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert getattr(compiled, weights_private.COMPILED) is module
    assert f"{weights_private.COMPILED}.weight" in compiled.state_dict()
