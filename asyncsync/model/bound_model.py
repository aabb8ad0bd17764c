"""BoundModel: a model that updates are written to, what is known of it from one update to the next, and in which words
weights are refused that do not fit it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from asyncsync.errors import SchemaMismatch
from asyncsync.model.parameters import ModelTensors, Plan, Specs, place_of
from asyncsync.model.selection import Selection
from asyncsync.weights.copying import clone
from asyncsync.weights.slab import is_foreign
from asyncsync.weights.tensors import are_plain, destination_problem, have_memory

SHOWN = 12  # of the names or problems in a message


class LayoutPlan(NamedTuple):
    """How an update of one layout gets into the model, so that it takes no names."""

    plan: Plan
    order: list[int]  # of each tensor of the plan: which view of the slab
    states: list[tuple[str, int]]  # names of extra state, with the view for each


class Repointing(NamedTuple):
    """How an update came into a model of which some tensors lie in a slab. The next one may come the same way if the
    tensors lie where they were left: then nobody has given them other memory, or moved what they have, and whatever was
    found out of them is true still.

    ``moved`` and ``copied`` are positions in the plan: of those that got their memory in the slab, where new memory is
    all that they need next time, and of those that were copied to where they were.
    """

    plan: Plan
    moved: list[int]
    copied: list[int]


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
        self.repointed: list[torch.Tensor] = []
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
            tied = {} if unexpected else {n: first for n in missing if (first := self._tied_to(n, specs))}
            hints = _tie_hint(tied) + _persistence_hint(missing & own.non_persistent)
            raise SchemaMismatch(_key_problem(sent, own.known, missing, unexpected) + hints)
        wrong: set[str] = set()
        problems = [
            f"{name}: sent as a plain value, but the model holds a tensor"
            for name in sorted(values)
            if name in own.owners and isinstance(own.get(name), torch.Tensor)
        ]
        for name in sorted(own.encoded & specs.keys()):
            remedy = "use strategy='tensordict', or an apply_weights() that calls load_state_dict()"
            problems.append(f"{name}: the model's state dict has other values than the model (a hook's?); {remedy}")
        for name, (dtype, shape) in specs.items():
            if name not in own.extra_state and (problem := self._tensor_problem(name, dtype, shape)):
                problems.append(f"{name}: {problem}")
                wrong.add(name)
        if problems:
            more = f" … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            text = "the weights do not fit the model: " + "; ".join(problems[:SHOWN]) + more
            hint = _persistence_hint(wrong & own.non_persistent)
            raise SchemaMismatch(f"{text}.{hint}" if hint else text)

    def _tensor_problem(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
        """Why a tensor that has come does not fit the model's own; empty: it does."""
        own = self.tensors.get(name)
        if not isinstance(own, torch.Tensor):
            return f"sent as a tensor, but the model's is {'gone' if own is None else f'a {type(own).__name__}'}"
        if what := self.destination_problem(name, own):
            return f"the model's is {what}"
        if own.shape != shape:
            return f"sent with shape {list(shape)}, the model's is {list(own.shape)}"
        if own.dtype != dtype and not self.cast:
            return f"sent as {dtype}, the model's is {own.dtype} (send that, or init_on_receiver(cast=True))"
        if own.dtype != dtype and not _castable(dtype, own.dtype):
            return f"sent as {dtype}, which cannot be cast to the model's {own.dtype}; write a WeightStrategy"
        return ""

    def destination_problem(self, name: str, own: torch.Tensor) -> str:
        """Why this tensor of the model cannot be written; empty: it can."""
        admitted = self.tensors.admitted
        if admitted.get(name) is own and have_memory([own], [0]):
            return ""
        problem = destination_problem(own, inplace=self.inplace)
        if not problem and not are_plain([own]):
            admitted[name] = own
        return problem

    def _tied_to(self, name: str, specs: Specs) -> str:
        """Which of the tensors that were sent a missing one may be tied to; empty: to none."""
        for group in self.tensors.ties:
            if name in group and (sent := [other for other in group if other in specs]):
                return sent[0]
        own = self.tensors.get(name) if name in self.tensors.owners else None
        if not isinstance(own, torch.Tensor) or own.ndim < 2:
            return ""
        alike = [other for other, spec in specs.items() if spec == (own.dtype, tuple(own.shape))]
        return alike[0] if len(alike) == 1 else ""

    def plan(self, specs: Specs, values: Collection[str]) -> Plan:
        """The plan for these tensors and values. Raises as :meth:`check_fit`."""
        try:
            self.check_fit(specs, values)
        except SchemaMismatch:  # of what is known of the model, which may have changed
            self.refresh()
            self.check_fit(specs, values)
        return Plan.of(self.tensors, specs)

    def left_in_slabs(self, found: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that are not among the model's tensors any more, and still lie in a slab, each with a copy for
        which it is to leave that: one for those that are one memory."""
        # Let go of those that only this list has. The weak references end here: torch.utils.swap_tensors(), which
        # `.to()` and load_state_dict() may use, refuses tensors that have some.
        known = list(map(weakref.ref, self.repointed))
        self.repointed = []
        self.repointed = [tensor for one in known if (tensor := one()) is not None]
        present = set(map(id, found))
        left = [tensor for tensor in self.repointed if id(tensor) not in present]
        left = [tensor for tensor in left if is_foreign(tensor)]
        copies = {place_of(tensor): clone(tensor) for tensor in left}
        return [(tensor, copies[place_of(tensor)]) for tensor in left]


def constant(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this dtype and shape, of any size, that has the memory of one element."""
    one = torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
    return one.expand(shape) if shape else one.reshape(())


def _castable(source: torch.dtype, destination: torch.dtype) -> bool:
    if source.is_complex and not destination.is_complex:
        return False
    try:
        constant(source, ()).to(destination)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _key_problem(sent: Iterable[str], own: Iterable[str], missing: set[str], unexpected: set[str]) -> str:
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


def _tie_hint(tied: Mapping[str, str]) -> str:
    if not tied:
        return ""
    pairs = ", ".join(f"{name!r} to {first!r}" for name, first in sorted(tied.items())[:SHOWN])
    return (
        f" The sender's may be tied ({pairs}): named_parameters() has tied weights under one name only; send the "
        "module or its state_dict()."
    )


def _persistence_hint(names: Collection[str]) -> str:
    if not names:
        return ""
    are = "is a non-persistent buffer" if len(names) == 1 else "are non-persistent buffers"
    return f" {_some(sorted(names))} {are}: strategy='state_dict' or exclude= leaves such out."


def _common_prefix(names: list[str]) -> str:
    if not names:
        return ""
    first, last = names[0], names[-1]  # the names are sorted: what these two share, all share
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _some(names: list[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > SHOWN else ""
    return "[" + ", ".join(names[:SHOWN]) + more + "]"
