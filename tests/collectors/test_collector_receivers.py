"""A collector that receives: registering schemes, taking weights in, and passing them on downwards."""

import functools
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from tensordict import TensorDict

from asyncsync import sync
from asyncsync.collectors import MultiSyncCollector, WeightUpdaterBase
from asyncsync.errors import AckTimeout, ClosedError, PartialSendError, RemoteError
from helpers import planted
from helpers.collecting_multi import make, options, policy
from helpers.collecting_weights import VALUE, Stepping, reading, rooted, step, tree, update
from helpers.pairs import Clock, Model, fill, read

# -- receive_weights --------------------------------------------------------------------------------------------------


@pytest.mark.requirement(159, 160, 161)
def test_without_schemes_it_applies_what_is_given_or_mirrors_the_registered_policy() -> None:
    leaf = reading(1)
    fill(leaf.policy, 4)
    leaf.receive_weights()
    assert step(leaf) == ({1, 4}, 1)
    leaf.receive_weights(Model(5))
    assert read(leaf.policy) == {5}
    leaf.receive_weights(Model(6).state_dict())
    assert read(leaf.policy) == {6}
    leaf.receive_weights(weights=TensorDict.from_module(Model(7)).data)
    assert read(leaf.policy) == {7}
    leaf.receive_weights(policy=Model(8))
    for arguments in ({"weights": Model(2), "policy": Model(2)}, {"weights": Model(2)}, {"policy": Model(2)}):
        positional = [Model(3)] if len(arguments) == 1 else []
        with pytest.raises(ValueError, match="exclude each other"):
            leaf.receive_weights(*positional, **arguments)
    assert read(leaf.policy) == {8}


@pytest.mark.requirement(159, 162)
def test_with_schemes_it_takes_in_what_they_have() -> None:
    with tree() as (top, [leaf]):
        with Clock(2.0):
            leaf.receive_weights()  # never waits for more
        top.update_policy_weights_(Model(2))
        leaf.receive_weights()
        assert read(leaf.policy) == {2}
        for given in ({"weights": Model(3)}, {"policy": Model(3)}):
            with pytest.raises(ValueError, match="weight_recv_schemes"):
                leaf.receive_weights(**given)
        with pytest.raises(ValueError, match="without arguments"):
            leaf.receive_weights(Model(3))
        with pytest.raises(ValueError, match="weight_recv_schemes"):
            leaf.update_policy_weights_(Model(3))
        assert read(leaf.policy) == {2}


def test_receive_weights_says_when_nothing_more_will_come() -> None:
    with tree() as (top, [leaf]):
        top.shutdown()
        with Clock(5.0):
            while not leaf._receiver_schemes["policy"].closed:
                pass
        with pytest.raises(ClosedError):
            leaf.receive_weights()
        assert step(leaf)[0] == {1, -1}, "it goes on with what it has"


# -- register_scheme_receiver -----------------------------------------------------------------------------------------


@pytest.mark.requirement(163)
def test_registering_initialises_and_synchronizes_at_once() -> None:
    with tree("policy", VALUE) as (_, [leaf]):
        assert set(leaf._receiver_schemes) == {"policy", VALUE}
        for model_id, scheme in leaf._receiver_schemes.items():
            assert (scheme.model_id, scheme.worker_idx, scheme.context) == (model_id, 0, leaf)
        assert step(leaf) == ({1}, leaf.policy_version)
        with pytest.raises(ValueError, match="register"):
            leaf.register_scheme_receiver({"policy": sync.ZMQWeightSyncScheme()})


@pytest.mark.requirement(163)
def test_synchronize_weights_false_leaves_connecting_to_the_caller() -> None:
    (scheme, given), leaf = rooted(Model(3)), reading(worker_idx=0)
    assert leaf._receiver_schemes == {}
    leaf.register_scheme_receiver({"policy": given}, synchronize_weights=False)
    assert read(leaf.policy) == {-1}
    thread = threading.Thread(target=given.connect)
    thread.start()
    scheme.connect(timeout=10)
    thread.join(10)
    assert read(leaf.policy) == {3}
    leaf.shutdown()
    scheme.shutdown()


@pytest.mark.requirement(163)
def test_who_does_not_know_which_worker_it_is_cannot_receive() -> None:
    leaf = reading()
    with pytest.raises(RuntimeError, match="worker_idx="):
        leaf.register_scheme_receiver({"policy": sync.ZMQWeightSyncScheme()})
    with pytest.raises(TypeError, match="weight_recv_schemes"):
        leaf.register_scheme_receiver({"policy": "shared"})
    with pytest.raises(RuntimeError, match="has no receiver schemes"):
        leaf._receive_weights_scheme()
    assert leaf._receiver_schemes == {}


@pytest.mark.requirement(163)
def test_all_schemes_are_registered_or_none() -> None:
    leaf = reading(worker_idx=0)
    given = {"policy": sync.ZMQWeightSyncScheme(), "env.nope": sync.ZMQWeightSyncScheme()}
    with pytest.raises(ValueError, match=r"env\.nope"):
        leaf.register_scheme_receiver(given, synchronize_weights=False)
    assert leaf._receiver_schemes == {}
    assert [scheme.role for scheme in given.values()] == [None, None]
    leaf.register_scheme_receiver({VALUE: given["policy"]}, synchronize_weights=False)
    leaf.shutdown()


def test_a_scheme_that_moves_nothing_is_received_at_once() -> None:
    leaf = reading(1, worker_idx=0)
    leaf.register_scheme_receiver({"policy": sync.NoWeightSyncScheme()})
    leaf.receive_weights()
    assert step(leaf) == ({1, -1} if read(leaf.env.transform[0].module) == {-1} else {1}, 0)
    leaf.shutdown()


# -- further down -----------------------------------------------------------------------------------------------------


@contextmanager
def chain(*passed: str) -> Iterator[tuple[Any, Any, list[Any]]]:
    """A trainer, a collector in the middle, which receives two models and passes these on, and two leaves below."""
    with (
        tree(*passed, workers=2, value=-1, worker_idx=0) as (middle, leaves),
        tree("policy", VALUE, leaves=[middle]) as (top, _),
    ):
        yield top, middle, leaves


@pytest.mark.requirement(26, 74, 164)
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_an_update_has_reached_the_leaves_when_it_returns(style: str) -> None:
    with chain("policy", VALUE) as (top, middle, leaves):
        assert [read(leaf.policy) for leaf in leaves] == [{1}, {1}], "the initial weights, too"
        for value in (2, 3):
            update(top, style, Model(value))
            assert [read(each.policy) for each in (middle, *leaves)] == [{value}] * 3
        assert middle.cascades
        assert not leaves[0].cascades


@pytest.mark.requirement(26, 164, 199)
def test_several_models_stay_one_update_all_the_way_down() -> None:
    with chain("policy", VALUE) as (top, middle, leaves):
        top.update_policy_weights_(weights_dict={"policy": Model(10), VALUE: Model(10)})
        with Stepping(leaves[0]) as one, Stepping(middle) as two:
            for value in range(11, 19):
                top.update_policy_weights_(weights_dict={"policy": Model(value), VALUE: Model(value)})
        assert {len(values) for values, _ in one.found | two.found} == {1}
        assert step(leaves[1])[0] == {18}


@pytest.mark.requirement(164)
def test_a_model_that_only_the_middle_has_ends_there() -> None:
    with chain("policy") as (top, middle, leaves):
        top.update_policy_weights_(weights_dict={"policy": Model(5), VALUE: Model(6)})
        top.update_policy_weights_(Model(7), model_id=VALUE)
        assert step(middle)[0] == {5, 7}
        assert [step(leaf)[0] for leaf in leaves] == [{5, -1}, {5, -1}]


@pytest.mark.requirement(74, 164)
def test_a_leaf_that_is_lost_below_fails_the_update_above() -> None:
    with chain("policy") as (top, _, leaves):
        leaves[1].shutdown()
        with pytest.raises(PartialSendError) as caught:
            top.update_policy_weights_(Model(5), timeout=20)
        failure = caught.value.failed[0]
        assert isinstance(failure, RemoteError)
        assert "worker 1: PeerLost" in str(failure)
        assert read(leaves[0].policy) == {5}


class Below(WeightUpdaterBase):
    """Keeps what it is to bring to the workers below."""

    def __init__(self) -> None:
        self.brought: list[set[float]] = []

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.brought.append(read(server_weights))


@pytest.mark.requirement(160, 164)
def test_what_a_collector_with_others_below_is_given_is_passed_on() -> None:
    with tree(workers=2) as (top, leaves):
        top.receive_weights(Model(6))
        assert [read(each.policy) for each in (top, *leaves)] == [{6}] * 3


@pytest.mark.requirement(74)
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_whether_it_is_passed_on_is_asked_for_each_update() -> None:
    with tree() as (top, [middle]):
        top.update_policy_weights_(Model(2))
        assert not middle.cascades
        middle.weight_updater = updater = Below()
        top.update_policy_weights_(Model(3))
        assert (read(middle.policy), updater.brought) == ({3}, [{3}])


# -- around a step ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement(158)
def test_weights_change_between_two_steps_and_waiting_for_a_version_ends_with_it() -> None:
    with tree() as (top, [leaf]):
        with leaf.acting_weights.holds():
            before = leaf.acting_weights.version()
            top.update_policy_weights_(Model(2), wait=False)
            with Clock(5.0):
                while planted.newest_target_of(leaf) == before:
                    pass
            assert (read(leaf.policy), leaf.acting_weights.version()) == ({1}, before)
        leaf.acting_weights.main_bus.wait_origin(before + 1, 10)
        assert (read(leaf.policy), leaf.acting_weights.version()) == ({2}, before + 1)
        with pytest.raises(AckTimeout):
            leaf.acting_weights.main_bus.wait_origin(before + 2, 0.05)


# -- versions that frames are labelled with, in trees and where the user has initialised the schemes -------------------

SHARED = "SharedMemWeightSyncScheme"


def test_a_leaf_acts_with_the_roots_versions_whatever_the_middle_publishes_by_itself() -> None:
    leaf = reading(9, worker_idx=0)
    with ThreadPoolExecutor(1) as thread, tree(leaves=[leaf], kind=SHARED, value=8, worker_idx=0) as (middle, _):
        for value in (7, 6):
            middle.update_policy_weights_(Model(value))
        assert step(leaf) == ({6, 9}, 3)
        with tree(leaves=[middle], kind=SHARED) as (top, _):
            assert step(leaf) == ({1, 9}, 1), "the same weights as the root's first version"
            with Stepping(leaf) as stepping:
                for value in range(2, 8):
                    top.update_policy_weights_(Model(value))
                    assert (read(leaf.policy), leaf.policy_version) == ({value}, value)
                    middle.update_policy_weights_(Model(value))
                    assert (read(leaf.policy), leaf.policy_version) == ({value}, value)
            assert all(frozenset({version, 9}) == values for values, version in stepping.found)
            assert (top.policy_version, middle.policy_version, leaf.policy_version) == (7, 7, 7)
            waiting = thread.submit(leaf.acting_weights.main_bus.wait_origin, 8, 10)
            middle.update_policy_weights_(Model(7))
            with pytest.raises(TimeoutError):  # it is the middle's version that is newer
                waiting.result(0.1)
            top.update_policy_weights_(Model(8))
            waiting.result(10)


@pytest.mark.parametrize("kind", [SHARED, "ZMQWeightSyncScheme"])
def test_a_worker_that_joins_later_has_the_roots_version_too(kind: str) -> None:
    first, second = reading(9, worker_idx=0), reading(9, worker_idx=1)
    with (
        tree(leaves=[first], kind=kind, is_elastic=True, value=8, worker_idx=0) as (middle, _),
        tree(leaves=[middle], kind=kind) as (top, _),
    ):
        top.update_policy_weights_(Model(2))
        try:
            second.register_scheme_receiver(pickle.loads(pickle.dumps(middle._sender_schemes)))
            assert step(second) == step(first) == ({2, 9}, 2)
        finally:
            second.shutdown()


def test_a_collector_that_is_the_context_of_a_users_scheme_labels_its_frames() -> None:
    (sender, scheme), leaf = rooted(Model(1), sync.SharedMemWeightSyncScheme), reading(worker_idx=0)
    scheme.init_on_receiver(model_id="policy", context=leaf)
    thread = threading.Thread(target=scheme.connect)
    thread.start()
    try:
        sender.connect(timeout=10)
        thread.join(10)
        assert step(leaf) == ({1, -1}, 1)
        with Stepping(leaf) as stepping:
            for value in range(2, 30):
                sender.send(Model(value))
        assert {(frozenset({version, -1}), version) for _, version in stepping.found} == stepping.found
        assert leaf.policy_version == 29
        leaf.register_scheme_receiver({"policy": scheme})
        assert step(leaf) == ({29, -1}, 29)
    finally:
        leaf.shutdown()
        scheme.shutdown()
        sender.shutdown()


@pytest.mark.thorough
def test_versions_and_max_lag_in_a_tree_are_the_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    source = policy()
    nested = functools.partial(MultiSyncCollector, start_method="forkserver", max_lag=0)
    trees = [[make(length=5), make(length=3)], [make(length=4)]]
    with MultiSyncCollector(trees, source, collector_class=nested, **options(frames_per_batch=8)) as collector:
        for value in range(2, 6):
            source.module.fill(float(value))
            collector.update_policy_weights_()
            collector.update_policy_weights_(worker_ids=[0])
            batch: Any = collector.next()
            newest = collector.policy_version
            found = [set(part["collector", "policy_version"].flatten().tolist()) for part in batch]
            assert found == [{newest}, {newest - 1}]
            assert all((part["action"] == value).all() for part in batch)
        told: list[tuple[int, list[int]]] = []
        monkeypatch.setattr(
            collector.group.page, "publish", lambda version, workers: told.append((version, list(workers)))
        )
        collector.update_policy_weights_()
        assert told == [(newest + 1, [0, 1])], "once, and for these workers"


@pytest.mark.thorough
def test_frames_have_the_versions_of_updates_that_nothing_sends() -> None:
    scheme = sync.NoWeightSyncScheme()
    given = options(frames_per_batch=4, weight_sync_schemes={"policy": scheme})
    with MultiSyncCollector([make()], policy(), **given) as collector:
        collector.next()
        for version in (1, 2):
            collector.update_policy_weights_()
            assert collector.policy_version == version
        assert set(collector.next()["collector", "policy_version"].flatten().tolist()) == {2}
