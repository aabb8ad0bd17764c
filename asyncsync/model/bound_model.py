"""BoundModel: a model that updates are written to, and what is known of it from one update to the next."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from operator import call, is_
from typing import Any, NamedTuple

import torch

from asyncsync.errors import SchemaMismatch
from asyncsync.model.mismatch import all_problems, key_problem, tensor_problem
from asyncsync.model.parameters import ModelTensors, Plan, Specs
from asyncsync.model.selection import Selection
from asyncsync.weights.slab import is_foreign
from asyncsync.weights.source_cache import AddressCache

__all__ = ["BoundModel", "LayoutPlan", "Repointing"]


class LayoutPlan(NamedTuple):
    """How an update of one layout gets into the model, so that it takes no names."""

    plan: Plan
    order: list[int]  # of each tensor of the plan: which view of the slab
    states: list[tuple[str, int]]  # names of extra state, with the view for each
    memory: AddressCache  # where the tensors of the plan had their bytes the last time


class BoundModel:
    """A model that updates are written to.

    Args:
        extract_as: whose names to use, those of ``"tensordict"`` or of ``"state_dict"``.
        cast: convert dtypes where they differ, instead of refusing.
        inplace: copy into the model's own memory, or give its tensors new memory.
        converted: what comes was made by a strategy's ``convert``.
        selection: which of the model's tensors are written; None: all.

    Attributes:
        plans: those of the latest layouts, by digest; a new table whenever the model is looked through anew.
        is_repointed, repointed: whether some of the model's memory may be a slab's, and the tensors that got such
            memory.
        repointing: how the last update came in, if it gave some tensors such memory.
    """

    def __init__(
        self,
        model: Any,
        extract_as: str,
        *,
        cast: bool = False,
        inplace: bool = True,
        converted: bool = False,
        selection: Selection | None = None,
    ) -> None:
        self.selection = selection or Selection()
        self.cast = cast
        self.inplace = inplace
        self.is_repointed = False
        self.repointed: list[weakref.ref[torch.Tensor]] = []
        self.repointing: Repointing | None = None
        self.plans: dict[bytes, LayoutPlan] = {}
        self._model = model
        self._extract_as = extract_as
        self._converted = converted
        self.refresh()

    def refresh(self) -> None:
        """Find out anew where the model has its tensors. Raises SchemaMismatch if the selection does not fit them."""
        self.tensors = ModelTensors(self._model, self._extract_as)
        self.plans = {}
        self.selection.check(self.tensors.known, "the model's")

    def check_fit(self, specs: Specs, values: Collection[str]) -> None:
        """Compare tensors, by name, and the names of values with what the selection has of the model. Raises
        SchemaMismatch, with both key lists and their common prefix, or every differing shape and dtype."""
        own, chooses = self.tensors, self.selection.chooses
        required = {name for name in own.required if chooses(name)} if self.selection else own.required
        if self._converted:
            # A strategy maps tensors only: values go where their names happen to fit.
            values = {n for n in values if n in own.known}
            required = {n for n in required if n in own.owners and isinstance(own.get(n), torch.Tensor)}
        sent = specs.keys() | set(values)
        missing, unexpected = required - sent, sent - own.known
        if missing or unexpected:
            raise SchemaMismatch(key_problem(sent, own.known, missing, unexpected))
        problems = [
            f"{name}: sent as a plain value, but the model holds a tensor"
            for name in sorted(values)
            if name in own.owners and isinstance(own.get(name), torch.Tensor)
        ]
        for name, (dtype, shape) in specs.items():
            if name not in own.extra_state:
                problem = tensor_problem(dtype, shape, own.get(name), cast=self.cast, inplace=self.inplace)
                problems += [f"{name}: {problem}"] if problem else []
        if problems:
            raise SchemaMismatch(all_problems(problems))

    def plan(self, specs: Specs, values: Collection[str]) -> Plan:
        """The plan for these tensors and values. Raises as :meth:`check_fit`."""
        self.check_fit(specs, values)
        return Plan.of(self.tensors, specs)

    def left_in_slabs(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters that are not among the model's tensors any more, and still lie in a slab."""
        present = set(map(id, found))
        left = [tensor for one in self.repointed if (tensor := one()) is not None and id(tensor) not in present]
        return [tensor for tensor in left if is_foreign(tensor)]


class Repointing:
    """How an update came into a model of which some tensors lie in a slab: the next one may come the same way.

    ``moved`` and ``copied`` are positions in the plan: of those that got their memory in the slab, where new memory is
    all that they need next time, and of those that were copied to where they were.
    """

    def __init__(
        self, plan: Plan, tensors: list[weakref.ref[torch.Tensor]], moved: list[int], copied: list[int]
    ) -> None:
        self.moved, self.copied = moved, copied
        self._plan = plan
        self._tensors = tensors
        self._pointers: list[int] = []

    def note_addresses(self) -> None:
        """The update is in: this is where everything lies."""
        self._pointers = [tensor.data_ptr() for one in self._tensors if (tensor := one()) is not None]

    def fits(self, plan: Plan, found: list[torch.Tensor]) -> bool:
        """Whether these are the same tensors, and lie where they were left: then nobody has given them other memory,
        or moved what they have, and whatever was found out of them is true still."""
        if plan is not self._plan or not all(map(is_, found, map(call, self._tensors))):
            return False
        return list(map(torch.Tensor.data_ptr, found)) == self._pointers and all(map(torch.Tensor.is_contiguous, found))
