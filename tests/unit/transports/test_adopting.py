"""Adopting: a module's Parameters get their memory in a slot, and everything else of the model its right values.

What users do to such a model between two updates: tests/schemes/test_received.py and test_shared_memory.py.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync.errors import SchemaMismatch
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights
from asyncsync.transports import SharedMemTransport
from asyncsync.transports.shared_memory import ReceivedPool
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool, lies_in_slab, pack
from asyncsync.weights.tree import FlatWeights, flatten
from helpers.whole_models import Tied, filled, finish, published, values_of


class Pair:
    """A sender's slots and a worker's model, in one process."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.strategy = WeightStrategy("state_dict")
        self.binding = Binding(model, self.strategy, repoints=True, **options)
        self.transport = SharedMemTransport(4, 0)
        self.pool = self.transport.pool
        self.slots: list[Slab] = []
        self.held: Slab | None = None

    def lend(self, source: Any) -> Slab:
        """The slab as the worker sees it."""
        flat = flat_weights(self.strategy, source)
        slot = self.pool.acquire(Layout.of(flat))
        pack(slot, flat)
        self.slots.append(slot)
        slab = self.transport.attach(self.pool.describe(slot), slot.layout, SlabPool())
        slab.values = slot.values
        return slab

    def apply(self, slab: Slab) -> None:
        """As a worker does it: the new one is held, and the old one let go of, when it has been applied."""
        self.binding.check(slab.layout)
        finish(self.binding.prepare(slab))
        if self.held is not None:
            self.held.release()
        self.held = slab

    def update(self, source: Any) -> None:
        self.apply(self.lend(source))
        self.write_again(self.slots[:-1])
        del self.slots[:-1]

    def update_otherwise(self, source: Any) -> None:
        """As ZeroMQ would bring it."""
        self.apply(published(source, self.strategy))
        self.forget()

    def forget(self) -> None:
        self.write_again(self.slots)
        self.slots.clear()

    def write_again(self, slots: list[Slab]) -> None:
        """As the sender does, when the worker has given them back."""
        for slot in slots:
            slot.memory[:] = b"\x7f" * slot.nbytes
            slot.release()

    def close(self) -> None:
        if self.held is not None:
            self.held.release()
        self.forget()
        self.transport.close()


Pairs = Callable[..., Pair]


@pytest.fixture
def pair() -> Iterator[Pairs]:
    made: list[Pair] = []

    def make(model: Any, **options: Any) -> Pair:
        made.append(Pair(model, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    made.clear()  # what a model lies in lives as long as the model


def adopted(model: nn.Module) -> set[str]:
    """The tensors that lie in a slot."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name for name, t in named.items() if lies_in_slab(t)}


def linear(value: float) -> nn.Module:
    return filled(value, lambda: nn.Linear(3, 4))


# -- what is adopted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [None, Tied])
def test_parameters_are_adopted_and_buffers_copied(pair: Pairs, make: Callable[[], nn.Module] | None) -> None:
    model = filled(0, make)
    worker = pair(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for version in (1, 2, 3, 4):
        worker.update(filled(version, make))
        assert values_of(model) == {version}
        assert adopted(model) == {name for name, _ in model.named_parameters()}  # tied ones once
        assert dict(model.named_parameters(remove_duplicate=False)) == parameters  # those that an optimiser has
        assert worker.transport.is_adopted
    assert all(p.requires_grad and p.is_leaf for p in parameters.values())


def untied() -> Tied:
    return Tied(tied=False)


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write through one shows in the other."""
    with torch.no_grad():
        before = b.clone()
        a += 1
        changed = not torch.equal(before, b)
        a -= 1
    return changed


def test_parameters_that_only_the_sender_ties_stay_separate(pair: Pairs) -> None:
    """Also those that lay in a slot of their own before the sender tied them, and that the model itself tied before."""
    model: Any = filled(0, untied)
    worker = pair(model)
    for version, make in enumerate([Tied, Tied, untied, Tied, Tied, Tied], 1):
        worker.update(filled(version, make))
        assert values_of(model) == {version}
        assert not share_memory(model.embed.weight, model.head.weight)
        assert adopted(model) >= {"embed.weight"}
    model.head.weight = model.embed.weight
    worker.update(filled(7, Tied))
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    worker.update(filled(8, Tied))
    assert values_of(model) == {8}
    assert not share_memory(model.embed.weight, model.head.weight)


class Overlaid(nn.Module):
    """Two Parameters over the same memory, and others that have it in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 4))
        self.b = nn.Parameter(self.a.detach())
        self.whole = nn.Parameter(torch.zeros(4, 4))
        self.part = nn.Parameter(self.whole.detach()[:2])
        self.square = nn.Parameter(torch.zeros(4, 4))
        self.transposed = nn.Parameter(self.square.detach().t())
        self.gain = nn.Parameter(torch.zeros(4))
        self.register_buffer("initial", self.gain.detach())

    def check(self) -> None:
        pairs = [("a", "b"), ("whole", "part"), ("square", "transposed"), ("gain", "initial")]
        assert all(share_memory(getattr(self, one), getattr(self, other)) for one, other in pairs)


def test_a_model_that_is_shared_between_updates_does_not_lose_them(pair: Pairs) -> None:
    """Passing a model to a spawned process does that: torch moves the storage, under all tensors that use it."""
    model = linear(0)
    worker = pair(model)
    for version in range(1, 7):
        if version == 3:
            model.share_memory()
        worker.update(linear(version))
        assert values_of(model) == {version}


def test_parameters_that_share_memory_go_on_sharing_it(pair: Pairs) -> None:
    model: Any = filled(0, Overlaid)
    worker = pair(model)
    for version in (1, 2, 3):
        worker.update(filled(version, Overlaid))
        assert values_of(model) == {version}
        assert adopted(model) == {"a", "b"}
        model.check()
    worker.update_otherwise(filled(4, Overlaid))
    model.check()
    worker.update(filled(5, Overlaid))
    worker.binding.leave_slabs()
    assert (adopted(model), values_of(model)) == (set(), {5})
    model.check()


def with_weight(weight: nn.Parameter) -> nn.Module:
    model = nn.Linear(3, 4)
    model.weight = weight
    return model


class Special(nn.Parameter):
    pass


def part_of_something_larger() -> nn.Module:
    flat = torch.zeros(16)
    model = with_weight(nn.Parameter(flat[:12].view(4, 3)))
    model.bias = nn.Parameter(flat[12:])
    return model


def of_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 4)


def compiled_itself() -> nn.Module:
    model = linear(0)
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "movable", "cast"),
    [
        (lambda: with_weight(nn.Parameter(torch.zeros(3, 4).t())), {"bias"}, False),
        (lambda: with_weight(Special(torch.zeros(4, 3))), {"bias"}, False),
        (lambda: linear(0).share_memory(), set(), False),
        (lambda: nn.Sequential(torch.compile(linear(0), backend="eager")), set(), False),
        (lambda: linear(0).double(), set(), True),
        (part_of_something_larger, set(), False),
        (of_inference, set(), False),
        (compiled_itself, set(), False),
    ],
    ids=["transposed", "of a subclass", "shared", "compiled inside", "cast", "a part", "of inference", "compiled"],
)
def test_what_cannot_be_moved_is_copied_into_its_own_memory(
    pair: Pairs, make: Callable[[], nn.Module], movable: set[str], cast: bool
) -> None:
    model = make()
    worker = pair(model, cast=cast)
    where = {n: p.data_ptr() for n, p in model.named_parameters() if n not in movable}
    for version in (1.0, 2.0, 3.0):
        worker.update({name: torch.full(t.shape, version) for name, t in model.state_dict().items()})
        assert values_of(model) == {version}
        assert adopted(model) == movable
        assert {n: p.data_ptr() for n, p in model.named_parameters() if n not in movable} == where


def test_a_meta_model_gets_memory_of_its_own_first(pair: Pairs) -> None:
    with torch.device("meta"):
        model: nn.Module = nn.Linear(3, 4)
    worker = pair(model)
    for version in (1, 2, 3):
        worker.update(linear(version))
        assert values_of(model) == {version}


@pytest.mark.parametrize("model", [{"w": torch.zeros(3)}, {"w": nn.Parameter(torch.zeros(3))}])
def test_only_modules_adopt(pair: Pairs, model: dict[str, torch.Tensor]) -> None:
    worker = pair(model)
    worker.update({"w": torch.ones(3)})
    assert (model["w"] == 1).all()
    assert not worker.transport.is_adopted


# -- moving on ---------------------------------------------------------------------------------------------------------


def test_an_update_that_comes_another_way_moves_everything_out(pair: Pairs) -> None:
    model = filled(0)
    worker = pair(model)
    worker.update(filled(1))
    worker.update_otherwise(filled(2))
    assert values_of(model) == {2}
    assert adopted(model) == set()
    worker.update(filled(3))
    assert values_of(model) == {3}
    assert len(adopted(model)) == 6


def test_a_parameter_that_cannot_be_moved_any_more_gets_memory_of_its_own(pair: Pairs) -> None:
    model: Any = linear(0)
    worker = pair(model)
    worker.update(linear(1))
    model.weight.data = model.weight.data.view(3, 4).t()  # in the same slot, but no longer contiguous
    before = worker.slots[0].memory.tobytes()
    slab = worker.lend(linear(2))
    worker.apply(slab)
    assert worker.slots[0].memory.tobytes() == before
    worker.forget()
    slab.buffer.fill_(0)
    assert set(model.weight.flatten().tolist()) == {2}
    assert adopted(model) == {"bias"}


def test_a_parameter_that_the_user_puts_over_adopted_memory_moves_along(pair: Pairs) -> None:
    model: Any = linear(0)
    worker = pair(model)
    worker.update(linear(1))
    model.weight = nn.Parameter(model.weight.data, requires_grad=False)
    worker.update(linear(2))
    assert values_of(model) == {2}
    assert adopted(model) == {"weight", "bias"}


def test_an_update_that_is_refused_at_the_last_moment_moves_nothing(pair: Pairs) -> None:
    model: Any = linear(0)
    worker = pair(model)
    worker.update(linear(1))
    slab = worker.lend(linear(2))
    worker.binding.check(slab.layout)
    prepared = worker.binding.prepare(slab)
    own, model.bias = model.bias, nn.Parameter(torch.zeros(5))
    with pytest.raises(SchemaMismatch):
        prepared.resolve()
    model.bias = own
    slab.release()
    assert values_of(model) == {1}


# -- copies ------------------------------------------------------------------------------------------------------------


def wide(value: float) -> nn.Module:
    return filled(value, lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))))


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def test_copies_of_an_adopted_model_are_independent_and_have_their_own_bytes_and_no_others(pair: Pairs) -> None:
    model = wide(0)
    things: list[Callable[[], Any]] = [model.state_dict, lambda: model, lambda: next(model.parameters())]
    before = [(len(saved(thing())), len(pickle.dumps(thing()))) for thing in things]
    worker = pair(model)
    worker.update(wide(1))
    assert adopted(model)
    assert [(len(saved(thing())), len(pickle.dumps(thing()))) for thing in things] == before
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    twins += [torch.load(io.BytesIO(saved(model)), weights_only=False)]
    state = torch.load(io.BytesIO(saved(model.state_dict())))
    for version in (2, 3, 4):
        worker.update(wide(version))
    for twin in twins:
        assert (values_of(twin), adopted(twin)) == ({1}, set())
    assert {x for t in state.values() for x in t.flatten().tolist()} == {1}


def test_a_parameter_that_leaves_the_model_keeps_what_it_shows(pair: Pairs) -> None:
    model = filled(0)
    worker = pair(model)
    worker.update(filled(1))
    old = model[2]
    model[2] = nn.Linear(4, 2)
    for version in (2, 3, 4):
        worker.update(filled(version))
        assert values_of(model) == {version}
        assert values_of(old) == {1}
    assert adopted(old) == set()


# -- what comes over a socket ------------------------------------------------------------------------------------------


class Receiving:
    """A worker's model, and the slabs in which its weights arrive."""

    def __init__(self, model: nn.Module, *names: str, **options: Any) -> None:
        self.binding = Binding(model, WeightStrategy("state_dict"), repoints=True, **options)
        self.pool = ReceivedPool()
        self.layouts = {each: Layout.of(self.weights(each, 0)) for each in names}
        for layout in self.layouts.values():
            self.binding.check(layout)
        self.held: Slab | None = None

    def weights(self, names: str, value: int) -> FlatWeights:
        return flatten({name: torch.full((4096,), float(value)) for name in names})

    def arrive(self, names: str, value: int) -> Slab:
        flat, layout = self.weights(names, value), self.layouts[names]
        slab = self.pool.acquire(layout)
        slab.write(0, memoryview(torch.cat([flat.tensors[e.path] for e in layout.entries]).numpy()).cast("B"))
        return slab

    def update(self, names: str, value: int) -> None:
        slab, before = self.arrive(names, value), self.held
        finish(self.binding.prepare(slab))
        self.held = slab
        if before is not None:
            before.release()


class Parts(nn.Module):
    """Saves its head only; the other Parameters may be sent as well."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.a, self.b = (nn.Parameter(torch.zeros(4096)) for _ in range(3))
        self.a.data.share_memory_()  # so it is copied, while the others are moved
        self._register_state_dict_hook(
            lambda module, state, prefix, meta: [state.pop(prefix + n) for n in "ab"] and None
        )


def test_parts_that_come_in_turn_do_not_lie_where_the_next_version_arrives() -> None:
    model = Parts()
    receiving = Receiving(model, "ha", "hb")
    for value, part in enumerate("abba", 1):
        receiving.update(f"h{part}", value)
    arriving = receiving.arrive("ha", 5)
    assert [tensor.unique().tolist() for tensor in (model.h, model.a, model.b)] == [[4], [4], [3]]
    arriving.release()


def test_a_model_that_is_cast_and_changed_between_updates_does_not_lie_where_the_next_version_arrives() -> None:
    model = nn.ParameterDict({name: torch.zeros(4096) for name in "pqr"})
    model["q"].data = torch.zeros(8192)[:4096]  # so it is copied
    receiving = Receiving(model, "pqr", cast=True)
    receiving.update("pqr", 1)
    model["q"].data = model["q"].data.clone()
    model["r"].data = model["r"].data.half()
    for value in (2, 3):
        receiving.update("pqr", value)
    arriving = receiving.arrive("pqr", 4)
    assert [tensor.unique().tolist() for tensor in model.parameters()] == [[3]] * 3
    arriving.release()
