"""BoundModel: a model that updates are written to, what is known of it from one update to the next, and in which words
weights are refused that do not fit it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from asyncsync.errors import SchemaMismatch
from asyncsync.model.parameters import ModelTensors, Plan, Specs, place_of
from asyncsync.model.selection import Selection
from asyncsync.weights.copying import clone
from asyncsync.weights.slab import is_foreign

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
            raise SchemaMismatch(_key_problem(sent, own.known, missing, unexpected))
        problems = [
            f"{name}: sent as a plain value, but the model holds a tensor"
            for name in sorted(values)
            if name in own.owners and isinstance(own.get(name), torch.Tensor)
        ]
        for name in sorted(own.encoded & specs.keys()):
            remedy = "use strategy='tensordict', or an apply_weights() that calls load_state_dict()"
            problems.append(f"{name}: the model's state dict has other values than the model (a hook's?); {remedy}")
        for name, (dtype, shape) in specs.items():
            if name not in own.extra_state:
                problem = _tensor_problem(dtype, shape, own.get(name), cast=self.cast, inplace=self.inplace)
                problems += [f"{name}: {problem}"] if problem else []
        if problems:
            more = f" … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise SchemaMismatch("the weights do not fit the model: " + "; ".join(problems[:SHOWN]) + more)

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
        present = set(map(id, found))
        left = [tensor for one in self.repointed if (tensor := one()) is not None and id(tensor) not in present]
        left = [tensor for tensor in left if is_foreign(tensor)]
        copies = {place_of(tensor): clone(tensor) for tensor in left}
        return [(tensor, copies[place_of(tensor)]) for tensor in left]


def constant(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this dtype and shape, of any size, that has the memory of one element."""
    one = torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
    return one.expand(shape) if shape else one.reshape(())


def _tensor_problem(dtype: torch.dtype, shape: tuple[int, ...], own: Any, *, cast: bool, inplace: bool) -> str:
    """Why a tensor that has come does not fit the model's own; empty: it does."""
    if not isinstance(own, torch.Tensor):
        return f"sent as a tensor, but the model's is {'gone' if own is None else f'a {type(own).__name__}'}"
    if is_lazy(own):
        return "the model's is not initialised yet"
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


def _common_prefix(names: list[str]) -> str:
    if not names:
        return ""
    first, last = names[0], names[-1]  # the names are sorted: what these two share, all share
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _some(names: list[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > SHOWN else ""
    return "[" + ", ".join(names[:SHOWN]) + more + "]"
