"""``update_policy_weights_``: every calling form, what excludes what, and one update for several models."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tensordict import TensorDict
from torch import nn

import asyncsync
from asyncsync import sync
from asyncsync.collectors import MultiSyncCollector
from asyncsync.errors import PartialSendError, SchemaMismatch
from helpers.collecting_multi import WithModel, make, options, policy
from helpers.collecting_weights import VALUE, Stepping, below, reading, step, tree, update
from helpers.pairs import Model, fill, read

KINDS = ["SharedMemWeightSyncScheme", "ZMQWeightSyncScheme", "MultiProcessWeightSyncScheme"]


class Tree:
    """A trainer's collector, and two workers of it."""

    def __init__(self, top: Any, leaves: list[Any]) -> None:
        self.top = top
        self.leaves = leaves

    @property
    def policies(self) -> list[set[float]]:
        return [read(leaf.policy) for leaf in self.leaves]

    @property
    def values(self) -> list[set[float]]:
        return [read(leaf.env.transform[0].module) for leaf in self.leaves]


@contextmanager
def trees(kind: str) -> Iterator[Tree]:
    with tree("policy", VALUE, workers=2, kind=kind) as (top, leaves):
        yield Tree(top, leaves)


@pytest.fixture(scope="module")
def pair() -> Iterator[Tree]:
    """For what happens in the trainer, whatever the transport."""
    with trees("ZMQWeightSyncScheme") as tree:
        yield tree


@pytest.fixture(params=KINDS)
def each(request: pytest.FixtureRequest) -> Iterator[Tree]:
    """With every transport."""
    with trees(request.param) as tree:
        yield tree


@pytest.mark.requirement(3, 5, 9, 11, 167, 199)
def test_what_connecting_and_updates_bring_by_every_transport(each: Tree) -> None:
    assert (each.policies, each.values) == ([{1}, {1}], [{1}, {1}])
    assert all(s.model_id == m and s.context is each.top for m, s in each.top._sender_schemes.items())
    before = each.top.policy_version
    assert before >= 1
    each.top.update_policy_weights_(policy=Model(77), model_id=VALUE)
    assert (each.policies, each.values) == ([{1}, {1}], [{77}, {77}])
    each.top.update_policy_weights_(weights_dict={"policy": Model(5), VALUE: Model(6)})
    assert (each.policies, each.values) == ([{5}, {5}], [{6}, {6}])
    assert each.top.policy_version == before + 2
    assert [leaf.acting_weights.version() for leaf in each.leaves] == [before + 2] * 2
    each.top.update_policy_weights_({0: Model(20), 1: Model(21)})
    assert each.policies == [{20}, {21}]


FORMS: dict[str, Any] = {
    "r007_a_module_positionally": lambda m: ((m,), {}),
    "r008_a_tensordict_positionally": lambda m: ((TensorDict.from_module(m).data,), {}),
    "r008_a_dict_positionally": lambda m: ((m.state_dict(),), {}),
    "r009_policy": lambda m: ((), {"policy": m}),
    "r009_policy_and_model_id": lambda m: ((), {"policy": m, "model_id": "policy"}),
    "r010_weights_and_model_id": lambda m: ((), {"weights": TensorDict.from_module(m).data, "model_id": "policy"}),
    "r011_weights_dict": lambda m: ((), {"weights_dict": {"policy": m}}),
}


@pytest.mark.requirement(7, 8, 9, 10, 168)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_each_calling_form(pair: Tree, form: Any, style: str) -> None:
    value = 10 + pair.top.policy_version
    arguments, keywords = form(Model(value))
    update(pair.top, style, *arguments, **keywords)
    assert pair.policies == [{value}, {value}]
    assert read(pair.top.policy) != {value}, "the trainer's own stays as it is"


EXCLUSIONS: dict[str, Any] = {
    "positional and weights": lambda m: ((m,), {"weights": m}),
    "positional and policy": lambda m: ((m,), {"policy": m}),
    "weights and policy": lambda m: ((), {"weights": m, "policy": m}),
    "weights_dict and model_id": lambda m: ((), {"weights_dict": {"policy": m}, "model_id": "policy"}),
    "weights_dict and positional": lambda m: ((m,), {"weights_dict": {"policy": m}}),
    "weights_dict and weights": lambda m: ((), {"weights_dict": {"policy": m}, "weights": m}),
    "weights_dict and policy": lambda m: ((), {"weights_dict": {"policy": m}, "policy": m}),
    "an empty weights_dict": lambda m: ((), {"weights_dict": {}}),
    "an unregistered key": lambda m: ((), {"weights_dict": {"policy": m, "critic": m}}),
    "an unregistered model_id": lambda m: ((m,), {"model_id": "critic"}),
    "a bad timeout": lambda m: ((m,), {"timeout": -1}),
}


@pytest.mark.requirement(169, 170)
@pytest.mark.parametrize("case", EXCLUSIONS)
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_what_excludes_each_other_raises_before_any_change(pair: Tree, case: str, style: str) -> None:
    before = (pair.policies, pair.values, pair.top.policy_version)
    arguments, keywords = EXCLUSIONS[case](Model(66))
    with pytest.raises(ValueError, match=r"exclude each other|is empty|critic|timeout"):
        update(pair.top, style, *arguments, **keywords)
    assert (pair.policies, pair.values, pair.top.policy_version) == before


@pytest.mark.requirement(169)
def test_a_bad_shape_in_one_of_several_models_changes_none(each: Tree) -> None:
    before = (each.policies, each.values)
    with pytest.raises(PartialSendError) as caught:
        each.top.update_policy_weights_(weights_dict={"policy": Model(67), VALUE: nn.Linear(2, 2)})
    assert {type(error) for error in caught.value.failed.values()} == {SchemaMismatch}
    assert (each.policies, each.values) == before
    each.top.update_policy_weights_(weights_dict={"policy": Model(68), VALUE: Model(68)})
    assert each.policies == [{68}, {68}]


@pytest.mark.requirement(166)
def test_other_keywords_are_ignored_but_not_an_old_name_nor_misspelt_ones(pair: Tree) -> None:
    pair.top.update_policy_weights_(Model(30), timeout=20, anything=1)
    assert pair.policies == [{30}, {30}]
    with pytest.raises(TypeError, match="policy_weights= is not supported"):
        pair.top.update_policy_weights_(policy_weights=Model(31))
    misspelt = {
        "worker_id": "worker_ids",
        "weight_dict": "weights_dict",
        "modelid": "model_id",
        "wait_timeout": "timeout",
    }
    for name, meant in misspelt.items():
        with pytest.raises(TypeError, match=f"no argument '{name}'; did you mean '{meant}'"):
            pair.top.update_policy_weights_(**{name: 0})


@pytest.mark.requirement(3, 6, 9, 11, 168, 171)
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_a_collector_without_schemes_updates_its_own_models(style: str) -> None:
    leaf = reading(0)
    update(leaf, style, Model(1))
    update(leaf, style, Model(2), model_id=VALUE)
    assert step(leaf) == ({1, 2}, 2)
    update(leaf, style, weights_dict={"policy": Model(3), VALUE: Model(3)})
    update(leaf, style)
    assert step(leaf) == ({3}, 4)
    assert leaf.policy_version == 4
    with pytest.raises(ValueError, match="has no model"):
        update(leaf, style, weights_dict={"policy": Model(4), "critic": Model(4)})
    with pytest.raises(ValueError, match="has no model 'critic'"):
        update(leaf, style, model_id="critic")
    with pytest.raises(ValueError, match="worker_idx: weights"):
        update(leaf, style, {0: Model(4)})
    for wrong in (Model(4, width=65), nn.Linear(1, 1)):
        with pytest.raises(SchemaMismatch):
            update(leaf, style, weights_dict={"policy": Model(4), VALUE: wrong})
    with pytest.raises(TypeError, match="neither weight_sync_schemes nor a weight_updater"):
        update(leaf, style, Model(4), worker_ids=0)  # r171
    assert step(leaf) == ({3}, 4)
    leaf.shutdown()


def test_an_update_of_ones_own_models_waits_for_the_step_under_way() -> None:
    leaf = reading(0)
    with Stepping(leaf) as stepping:
        for i in range(1, 200):
            leaf.update_policy_weights_(weights_dict={"policy": Model(i), VALUE: Model(i)})
    assert {len(values) for values, _ in stepping.found} == {1}
    assert stepping.found <= {(frozenset({float(i)}), i) for i in range(200)}


def test_an_update_from_within_a_step_is_refused() -> None:
    leaf = reading(0)
    with leaf.acting_weights.holds(), pytest.raises(RuntimeError, match="between two steps"):
        leaf.update_policy_weights_(Model(1))
    leaf.update_policy_weights_(Model(1))
    assert read(leaf.policy) == {1}


@pytest.mark.requirement(11)
def test_schemes_with_addresses_of_their_own_come_onto_one_bus() -> None:
    given = {"policy": sync.SharedMemWeightSyncScheme(), VALUE: sync.ZMQWeightSyncScheme()}
    with MultiSyncCollector([WithModel] * 2, policy(), weight_sync_schemes=given, **options()) as top:
        (bus,) = top._sender_buses
        assert {id(s.bus) for s in top._sender_schemes.values()} == {id(bus)}
        assert bus.num_workers == 2


@pytest.mark.requirement(5)
def test_asynchronous_schemes_are_run_by_their_blocking_core() -> None:
    with tree("policy", VALUE, module=asyncsync, kind="SharedMemWeightSyncScheme") as (top, [leaf]):
        top.update_policy_weights_(weights_dict={"policy": Model(4), VALUE: Model(4)})
        assert step(leaf) == ({4}, top.policy_version)


def test_a_scheme_that_the_user_has_initialised_stays_as_it_is() -> None:
    scheme, source, leaf = sync.ZMQWeightSyncScheme(), Model(8), reading(worker_idx=0)
    scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
    with below({"policy": scheme}, [leaf]):
        top = reading(1, weight_sync_schemes={"policy": scheme})
    assert top._sender_schemes["policy"] is scheme
    assert read(leaf.policy) == {8}
    fill(source, 9)
    top.update_policy_weights_()
    assert read(leaf.policy) == {9}, "its own source, not the collector's policy"
    leaf.shutdown()
    top.shutdown()


@pytest.mark.requirement(11)
def test_models_on_several_buses_are_not_switched_together() -> None:
    given = {model_id: sync.ZMQWeightSyncScheme() for model_id in ("policy", VALUE)}
    leaf = reading(worker_idx=0)
    for model_id, scheme in given.items():
        scheme.init_on_sender(model_id=model_id, model=Model(1), num_workers=1)
    with below(given, [leaf]):
        top = reading(1, weight_sync_schemes=given)
    with pytest.raises(ValueError, match=r"bus = asyncsync\.sync\.Bus\(\)"):
        top.update_policy_weights_(weights_dict={"policy": Model(), VALUE: Model()})
    leaf.shutdown()
    top.shutdown()


def test_a_scheme_that_moves_nothing_counts() -> None:
    with reading(1, weight_sync_schemes={"policy": sync.NoWeightSyncScheme()}) as top:
        top.update_policy_weights_(Model(2))
        asyncio.run(top.update_policy_weights_async(Model(2)))
        assert top.policy_version == 2


def initialised(model_id: str, num_workers: int) -> sync.ZMQWeightSyncScheme:
    scheme = sync.ZMQWeightSyncScheme()
    scheme.init_on_sender(model_id=model_id, model=Model(), num_workers=num_workers)
    return scheme


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "not a scheme": (lambda: {"policy": object()}, TypeError, r"is a builtins\.object.*asyncsync\.sync"),
    "a class": (lambda: {"policy": sync.ZMQWeightSyncScheme}, TypeError, r"is the class .*construct one"),
    "one for two models": (
        lambda: dict.fromkeys(("policy", VALUE), sync.ZMQWeightSyncScheme()),
        ValueError,
        "one scheme for several models",
    ),
    "another number of workers": (lambda: {"policy": initialised("policy", 3)}, ValueError, "for 3 workers.* has 2"),
    "another name": (lambda: {"policy": initialised("actor", 2)}, ValueError, "model_id='actor'"),
    "several endpoints": (
        lambda: {m: sync.ZMQWeightSyncScheme(endpoint=f"tcp://127.0.0.1:{p}") for m, p in (("a", 5001), ("b", 5002))},
        ValueError,
        r"several endpoints .*Bus\(endpoint=…\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_schemes_that_cannot_serve_are_refused_with_a_remedy(case: str) -> None:
    made, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        MultiSyncCollector([make()] * 2, policy(), weight_sync_schemes=made(), **options())
