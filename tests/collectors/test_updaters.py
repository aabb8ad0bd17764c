"""Weight updaters: deprecated, and working as the "WeightUpdaterBase" page says, without workers and with."""

import gc
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync import sync
from asyncsync.collectors import (
    MultiAsyncCollector,
    MultiProcessedWeightUpdater,
    MultiSyncCollector,
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from asyncsync.collectors.distributed import DistributedWeightUpdater, RPCWeightUpdater
from asyncsync.errors import SchemaMismatch
from helpers.collecting_multi import acted, make, options, policy, versions
from helpers.collecting_weights import Stepping, reading, update
from helpers.pairs import Model, read

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")


class Recorder(WeightUpdaterBase):
    """Keeps what it is told to sync."""

    def __init__(self, workers: Any = None, server: Any = None) -> None:  # without super().__init__(), as many are
        self.workers = workers
        self.server = server
        self.calls: list[tuple[Any, Any]] = []
        self.asked = 0
        self.given: Any = None

    def all_worker_ids(self) -> Any:
        return self.workers

    def _get_server_weights(self) -> Any:
        self.asked += 1
        return self.server

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.calls.append((worker_id, server_weights))

    def init(self, *args: Any, **kwargs: Any) -> None:
        self.given = (args, kwargs)


@pytest.mark.requirement(51)
@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (WeightUpdaterBase, "SharedMemWeightSyncScheme"),
        (lambda: VanillaWeightUpdater(policy_weights=Model()), "NoWeightSyncScheme"),
        (MultiProcessedWeightUpdater, "SharedMemWeightSyncScheme"),
        (RayWeightUpdater, "RayWeightSyncScheme"),
        (RPCWeightUpdater, "RPCWeightSyncScheme"),
        (DistributedWeightUpdater, "DistributedWeightSyncScheme"),
        (Recorder, "SharedMemWeightSyncScheme"),
    ],
)
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_constructing_one_names_the_scheme_to_use_instead(make: Any, scheme: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=rf'weight_sync_schemes={{"policy": asyncsync\.sync\.{scheme}\(\)}}'
    ) as w:
        make()
    assert w[0].filename == __file__
    assert hasattr(sync, scheme)


# -- pushing ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(173, 179, 180, 187)
def test_push_reaches_the_one_nameless_place_then_the_hooks_with_weights_of_every_kind() -> None:
    updater, order = Recorder(), []
    updater.register_post_hook(lambda: order.append(len(updater.calls)))
    given = [TensorDictModule(Model(), ["x"], ["y"]), TensorDict({"a": torch.ones(1)}), {"a": torch.ones(1)}]
    for weights in given:
        assert updater.push_weights(weights) is None
        assert WeightUpdaterBase()._maybe_map_weights(weights) is weights
    assert [id(weights) for _, weights in updater.calls] == [id(weights) for weights in given]
    assert {worker for worker, _ in updater.calls} == {None}
    assert order == [1, 2, 3]
    assert WeightUpdaterBase().all_worker_ids() is None


CPU = torch.device("cpu")


@pytest.mark.requirement(173, 174)
@pytest.mark.parametrize(("chosen", "reached"), [(None, [0, 1, 2]), (1, [1]), ([1], [1]), (CPU, [CPU]), ([CPU], [CPU])])
def test_worker_ids_an_index_a_device_or_several_and_a_call_is_a_push(chosen: Any, reached: list[Any]) -> None:
    updater = Recorder([0, 1, 2])
    updater.push_weights("weights", chosen)
    updater(policy_or_weights="weights", worker_ids=chosen)
    assert [worker for worker, _ in updater.calls] == 2 * reached


@pytest.mark.requirement(51, 179)
def test_a_subclass_may_skip_a_worker_as_torchrl_documents_it_and_map_weights() -> None:
    class Sparing(Recorder):
        def _skip_update(self, worker_id: Any) -> bool:
            return worker_id == 1

        def _maybe_map_weights(self, server_weights: Any) -> Any:
            return f"mapped {server_weights}"

    updater = Sparing([0, 1, 2], "weights")
    updater.push_weights()
    updater.push_weights("others", worker_ids=1)
    assert updater.calls == [(0, "mapped weights"), (2, "mapped weights")]


@pytest.mark.requirement(176)
def test_a_subclass_that_overrides_only_push_gets_its_hooks() -> None:
    class Pusher(WeightUpdaterBase):
        def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
            order.append((policy_or_weights, worker_ids))

    order: list[Any] = []
    updater = Pusher()
    updater.register_post_hook(lambda: order.append("hook"))
    leaf = reading(weight_updater=updater)
    leaf.update_policy_weights_({"a": torch.ones(1)}, worker_ids=[0])
    assert order == [({"a": torch.ones(1)}, [0]), "hook"]


@pytest.mark.requirement(177, 178)
def test_server_weights_are_asked_for_only_when_none_are_given_and_what_is_missing_raises() -> None:
    updater = Recorder(server="weights")
    updater.push_weights("others")
    assert updater.asked == 0
    updater.push_weights()
    assert (updater.asked, updater.calls[-1]) == (1, (None, "weights"))
    with pytest.raises(ValueError, match="_get_server_weights"):
        Recorder().push_weights()
    with pytest.raises(NotImplementedError, match=r"_sync_weights_with_worker\(\) or _push_weights\(\)"):
        WeightUpdaterBase().push_weights("weights")  # no abstract class


@pytest.mark.requirement(184)
def test_hooks_are_called_in_the_order_of_registration_also_when_removed_from_the_list() -> None:
    updater, order = Recorder(), []
    for name in "abc":
        updater.register_post_hook(lambda name=name: order.append(name))  # type: ignore[misc]
    updater.push_weights({})
    assert order == ["a", "b", "c"]
    del updater.post_hooks[1]
    updater.push_weights({})
    assert order == ["a", "b", "c", "a", "c"]
    assert Recorder().post_hooks == [], "each has its own"


# -- and its collector ------------------------------------------------------------------------------------------------


@pytest.mark.requirement(152, 166, 175)
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_update_policy_weights_calls_the_updater(style: str) -> None:
    updater = Recorder([0, 1], server={"a": torch.ones(1)})
    leaf = reading(weight_updater=updater)
    assert leaf.weight_updater is updater
    update(leaf, style, worker_ids=1)  # r171: workers may be chosen where there is an updater
    assert updater.calls == [(1, updater.server)]
    with pytest.raises(ValueError, match="weight updater"):
        leaf.update_policy_weights_(weights_dict={"policy": {}, "value": {}})


@pytest.mark.requirement(166)
def test_other_keywords_reach_an_updater_that_takes_them() -> None:
    class Taking(Recorder):
        def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None, *, urgent: bool = False) -> None:
            self.given = urgent

    leaf = reading(weight_updater=Taking())
    leaf.update_policy_weights_({}, urgent=True, unknown=1, timeout=3)
    assert leaf.weight_updater.given is True  # type: ignore[union-attr]


@pytest.mark.requirement(152, 182, 186)
def test_an_updater_that_is_set_is_registered_and_each_push_counts_the_collectors_version_up() -> None:
    updater = Recorder()
    updater.increment_version()  # nobody's yet
    leaf = reading()
    leaf.weight_updater = updater
    assert updater.collector is leaf
    leaf.update_policy_weights_({})
    assert (updater.calls, leaf.policy_version) == ([(None, {})], 1)
    updater.push_weights({})
    updater.increment_version()
    assert leaf.policy_version == 3
    with pytest.raises(RuntimeError, match="already belongs to a Collector"):
        reading().weight_updater = updater
    with pytest.raises(TypeError, match="weight_updater must be"):
        leaf.weight_updater = "Vanilla"
    assert leaf.weight_updater is updater
    leaf.weight_updater = VanillaWeightUpdater
    leaf.update_policy_weights_(Model(5))
    assert (read(leaf.policy), leaf.policy_version) == ({5}, 4)
    leaf.weight_updater = None
    leaf.update_policy_weights_(Model(6))
    assert (read(leaf.policy), leaf.policy_version) == ({6}, 5)


@pytest.mark.requirement(157, 185)
def test_init_updater_hands_its_arguments_on() -> None:
    updater = Recorder()
    leaf = reading(weight_updater=updater)
    leaf.init_updater(1, two=2)
    assert updater.given == ((1,), {"two": 2})
    reading().init_updater(1, two=2)  # none: nothing happens
    assert WeightUpdaterBase().init(1, two=2) is None


@pytest.mark.requirement(152, 181)
def test_an_instance_a_class_or_a_constructor() -> None:
    class FromPolicy(Recorder):
        makes_one = True
        asked_for: Any = None

        @classmethod
        def from_policy(cls, policy: Any) -> Any:
            cls.asked_for = policy
            return cls(["made"]) if cls.makes_one else None

    class NotFromPolicy(FromPolicy):
        makes_one = False

    for kind, workers in ((FromPolicy, ["made"]), (NotFromPolicy, None)):
        leaf = reading(weight_updater=kind)
        assert type(leaf.weight_updater) is kind
        assert leaf.weight_updater.workers == workers
        assert kind.asked_for is leaf.policy
    assert reading(weight_updater=lambda: Recorder([3])).weight_updater.workers == [3]  # type: ignore[union-attr]
    assert WeightUpdaterBase.from_policy(leaf.policy) is None
    for wrong in ("Vanilla", dict, object()):
        with pytest.raises(TypeError, match="weight_updater must be"):
            reading(weight_updater=wrong)


@pytest.mark.requirement(182, 183)
def test_one_collector_known_weakly() -> None:
    updater = Recorder()
    assert updater.collector is None
    leaf = reading(weight_updater=updater)
    assert updater.collector is leaf
    updater.register_collector(leaf)  # again is harmless
    with pytest.raises(RuntimeError, match="already belongs to a Collector"):
        reading(weight_updater=updater)
    assert updater.collector is leaf
    leaf.shutdown()
    del leaf
    gc.collect()
    assert updater.collector is None
    second = reading(weight_updater=updater)
    assert updater.collector is second
    second.update_policy_weights_({})
    assert second.policy_version == 1, "counted once"


# -- the two kinds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["module", "tensordict", "locked"])
def test_vanilla_copies_in_place(target: str) -> None:
    policy, source = Model(1), Model(2)
    weights: Any = policy if target == "module" else TensorDict.from_module(policy)
    if target == "locked":
        weights.lock_()
    memory = policy.first.data_ptr()
    updater = VanillaWeightUpdater(weight_getter=lambda: source, policy_weights=weights)
    updater()
    assert read(policy) == {2}
    updater(TensorDict.from_module(Model(3)).data)
    updater(Model(4).state_dict())
    assert read(policy) == {4}
    assert policy.first.data_ptr() == memory
    with pytest.raises(SchemaMismatch):
        updater(nn.Linear(1, 1))
    assert read(policy) == {4}
    with pytest.raises(ValueError, match="pass weights"):
        VanillaWeightUpdater(policy_weights=policy)()


@pytest.mark.requirement(181)
def test_vanilla_from_policy_writes_between_two_steps() -> None:
    leaf = reading(0, weight_updater=VanillaWeightUpdater)
    with Stepping(leaf) as stepping:
        for value in range(1, 50):
            leaf.update_policy_weights_(Model(value))
    assert {len(values - {0.0}) for values, _ in stepping.found} <= {0, 1}
    assert (read(leaf.policy), leaf.policy_version) == ({49}, 49)
    assert VanillaWeightUpdater.from_policy(lambda td: td) is None


def test_multi_processed_needs_workers() -> None:
    with pytest.raises(RuntimeError, match="collector"):
        MultiProcessedWeightUpdater()(Model())
    with pytest.raises(RuntimeError, match="use VanillaWeightUpdater"):
        reading(weight_updater=MultiProcessedWeightUpdater()).update_policy_weights_(Model())


# -- with workers ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(186)
@pytest.mark.parametrize("has_scheme", [True, False])
def test_pushes_and_increments_count_for_the_trainer_and_for_frames(has_scheme: bool) -> None:
    policies: dict[str, Any] = {"policy": policy()} if has_scheme else {"policy_factory": policy}
    with MultiSyncCollector(
        [make()] * 2, **policies, weight_updater=lambda: Recorder(server={}), **options()
    ) as collector:
        first = collector.policy_version
        assert first == has_scheme, "the scheme has brought the initial weights"
        assert versions(collector.next()) == [first]
        collector.update_policy_weights_({})
        assert collector.policy_version == first + 1
        collector.weight_updater.push_weights({})  # type: ignore[union-attr]
        collector.weight_updater.increment_version()  # type: ignore[union-attr]
        collector.increment_version()
        assert collector.policy_version == first + 4
        assert versions(collector.next()) == [first + 4]
    collector.increment_version()
    assert collector.policy_version == first + 5, "after the end, too"


@pytest.mark.requirement(186)
@pytest.mark.thorough
def test_counts_reach_workers_that_are_stepping() -> None:
    with MultiAsyncCollector([make(delay=0.05)], policy(), **options(frames_per_batch=40, max_lag=0)) as collector:
        collector.next()
        collector.increment_version()  # in the midst of a rollout
        assert versions(collector.next())[-1] == 2


@pytest.mark.requirement(173, 186)
@pytest.mark.parametrize("given", ["class", "getter", "devices"])
def test_multi_processed_reaches_the_workers_as_one_version_a_push(given: str) -> None:
    source = policy(5.0)
    copies = {CPU: TensorDict.from_module(policy(0.0)).data.clone()}
    updater: Any = {
        "class": lambda: MultiProcessedWeightUpdater,
        "getter": lambda: MultiProcessedWeightUpdater(get_server_weights=lambda: source),
        "devices": lambda: MultiProcessedWeightUpdater(get_server_weights=lambda: source, policy_weights=copies),
    }[given]()
    policies: dict[str, Any] = {"policy": source} if given == "class" else {"policy_factory": policy}
    with MultiSyncCollector([make()] * 2, **policies, weight_updater=updater, **options()) as collector:
        first = collector.policy_version
        collector.update_policy_weights_()
        batch = collector.next()
        assert (acted(batch), versions(batch)) == ([5.0], [first + 1])
        collector.update_policy_weights_(policy(6.0), worker_ids=CPU)
        assert acted(collector.next()) == [6.0]
        assert collector.policy_version == first + 2
        if given == "devices":
            assert copies[CPU]["module", "weight"].unique().tolist() == [6.0]
            with pytest.raises(ValueError, match="policy_weights"):
                collector.update_policy_weights_(worker_ids=torch.device("meta"))


@pytest.mark.requirement(145, 152)
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_each_batch_is_pushed_by_an_updater(kind: Any) -> None:
    source = policy(2.0)
    given: Any = {
        "policy_factory": policy,
        "weight_updater": lambda: MultiProcessedWeightUpdater(get_server_weights=lambda: source),
    }
    with kind([make()], **given, update_at_each_batch=True, **options()) as collector:
        for _ in range(3):
            batch = collector.next()
        assert acted(batch) == [2.0]
    updater = Recorder(server={})
    with kind([make()], policy_factory=policy, weight_updater=updater, **options(max_weight_update_interval=2)) as c:
        for _ in range(5):
            c.next()
    assert len(updater.calls) == 2, "every second batch"


@pytest.mark.requirement(152, 182)
def test_an_updater_of_a_collector_with_workers_reaches_them() -> None:
    updater = Recorder()
    with pytest.raises(TypeError, match=r"VanillaWeightUpdater writes.*weight_sync_schemes"):
        MultiSyncCollector([make()], policy(), weight_updater=VanillaWeightUpdater, **options())
    with MultiSyncCollector([make()], policy(), **options()) as collector:
        with pytest.raises(TypeError, match="VanillaWeightUpdater"):
            collector.weight_updater = VanillaWeightUpdater(policy_weights=policy())
        assert collector.weight_updater is None
        collector.weight_updater = updater
        assert (updater.collector, collector.weight_updater) == (collector, updater)
        collector.update_policy_weights_({}, worker_ids=[0])
        assert (updater.calls, collector.policy_version) == ([(0, {})], 2)
        collector.weight_updater = None
        collector.update_policy_weights_(policy(3.0))
        assert acted(collector.next()) == [3.0], "by its scheme again"
