"""Weight updaters: deprecated, and working as the "WeightUpdaterBase" page says."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync import sync
from asyncsync.collectors import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from asyncsync.collectors.distributed import DistributedWeightUpdater, RPCWeightUpdater
from asyncsync.errors import SchemaMismatch
from helpers.collecting_weights import Stepping, reading
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


class Sparing(Recorder):
    """Sends one worker nothing, as TorchRL documents it."""

    def _skip_update(self, worker_id: Any) -> bool:
        return worker_id == 1


@pytest.mark.requirement(51)
def test_a_subclass_may_skip_a_worker() -> None:
    updater = Sparing([0, 1, 2], "weights")
    updater.push_weights()
    updater.push_weights("others", worker_ids=1)
    assert updater.calls == [(0, "weights"), (2, "weights")]


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
    """51 without Ray's, RPC's and Distributed's updaters."""
    with pytest.warns(
        DeprecationWarning, match=rf'weight_sync_schemes={{"policy": asyncsync\.sync\.{scheme}\(\)}}'
    ) as w:
        make()
    assert w[0].filename == __file__
    assert hasattr(sync, scheme)


# -- pushing ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(173, 179, 180)
def test_push_reaches_the_one_nameless_place_then_the_hooks() -> None:
    updater, weights, order = Recorder(), {"a": torch.ones(1)}, []
    updater.register_post_hook(lambda: order.append(len(updater.calls)))
    assert updater.push_weights(weights) is None
    assert updater.calls == [(None, weights)]
    assert order == [1]
    assert WeightUpdaterBase().all_worker_ids() is None
    assert WeightUpdaterBase()._maybe_map_weights(weights) is weights


@pytest.mark.requirement(174)
def test_a_call_is_a_push() -> None:
    updater, weights = Recorder([0, 1]), {"a": torch.ones(1)}
    updater(weights, worker_ids=1)
    updater(policy_or_weights=weights)
    assert [worker for worker, _ in updater.calls] == [1, 0, 1]


@pytest.mark.requirement(173)
@pytest.mark.parametrize("chosen", [1, [1], torch.device("cpu"), [torch.device("cpu")]])
def test_worker_ids_an_index_a_device_or_several(chosen: Any) -> None:
    updater = Recorder([0, 1, 2])
    updater.push_weights({"a": torch.ones(1)}, chosen)
    assert [worker for worker, _ in updater.calls] == (chosen if isinstance(chosen, list) else [chosen])


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


@pytest.mark.requirement(177)
def test_server_weights_are_asked_for_only_when_none_are_given() -> None:
    updater = Recorder(server={"a": torch.ones(1)})
    updater.push_weights({"a": torch.zeros(1)})
    assert updater.asked == 0
    updater.push_weights()
    assert updater.asked == 1
    assert updater.calls[-1] == (None, updater.server)
    with pytest.raises(ValueError, match="_get_server_weights"):
        Recorder().push_weights()


@pytest.mark.requirement(178)
def test_a_missing_sync_raises_when_it_is_reached() -> None:
    updater = WeightUpdaterBase()  # no abstract class
    with pytest.raises(NotImplementedError, match=r"override _sync_weights_with_worker\(\) or _push_weights\(\)"):
        updater.push_weights({"a": torch.ones(1)})


@pytest.mark.requirement(179)
def test_mapped_weights_are_what_is_distributed() -> None:
    class Doubled(Recorder):
        def _maybe_map_weights(self, server_weights: Any) -> Any:
            return {name: 2 * value for name, value in server_weights.items()}

    updater = Doubled([0, 1])
    updater.push_weights({"a": torch.ones(1)})
    assert [weights["a"].item() for _, weights in updater.calls] == [2, 2]


@pytest.mark.requirement(184)
def test_hooks_are_called_in_the_order_of_registration_also_when_removed_from_the_list() -> None:
    updater, order = Recorder(), []
    for name in "abc":
        updater.register_post_hook(lambda name=name: order.append(name))  # type: ignore[misc]
    assert len(updater.post_hooks) == 3
    updater.push_weights({})
    assert order == ["a", "b", "c"]
    del updater.post_hooks[1]
    updater.push_weights({})
    assert order == ["a", "b", "c", "a", "c"]
    assert Recorder().post_hooks == [], "each has its own"


@pytest.mark.requirement(187)
@pytest.mark.parametrize(
    "weights", [TensorDictModule(Model(), ["x"], ["y"]), TensorDict({"a": torch.ones(1)}), {"a": torch.ones(1)}]
)
def test_modules_tensordicts_and_dicts_are_handed_on(weights: Any) -> None:
    updater = Recorder()
    updater.push_weights(weights)
    assert updater.calls[0][1] is weights


# -- and its collector ------------------------------------------------------------------------------------------------


@pytest.mark.requirement(152, 166, 175)
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_update_policy_weights_calls_the_updater(style: str) -> None:
    updater = Recorder([0, 1], server={"a": torch.ones(1)})
    leaf = reading(weight_updater=updater)
    assert leaf.weight_updater is updater
    if style == "async":
        asyncio.run(leaf.update_policy_weights_async(worker_ids=1))
    else:
        leaf.update_policy_weights_(worker_ids=1)  # r171: workers may be chosen where there is an updater
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


@pytest.mark.requirement(186)
def test_each_push_counts_the_collectors_version_up() -> None:
    updater = Recorder()
    updater.increment_version()  # nobody's yet
    leaf = reading(weight_updater=updater)
    leaf.update_policy_weights_({})
    updater.push_weights({})
    assert leaf.policy_version == 2
    updater.increment_version()
    assert leaf.policy_version == 3


@pytest.mark.requirement(152, 182)
def test_an_updater_that_is_set_is_registered_and_counted() -> None:
    updater = Recorder()
    leaf = reading()
    leaf.weight_updater = updater
    assert updater.collector is leaf
    leaf.update_policy_weights_({})
    assert (updater.calls, leaf.policy_version) == ([(None, {})], 1)
    with pytest.raises(RuntimeError, match="already belongs to a Collector"):
        reading().weight_updater = updater
    with pytest.raises(TypeError, match="weight_updater must be"):
        leaf.weight_updater = "Vanilla"
    assert leaf.weight_updater is updater
    leaf.weight_updater = VanillaWeightUpdater
    leaf.update_policy_weights_(Model(5))
    assert (read(leaf.policy), leaf.policy_version) == ({5}, 2)
    leaf.weight_updater = None
    leaf.update_policy_weights_(Model(6))
    assert (read(leaf.policy), leaf.policy_version) == ({6}, 3)


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
        policy: Any = None

        @classmethod
        def from_policy(cls, policy: Any) -> Any:
            made = cls()
            made.policy = policy
            return made

    class NotFromPolicy(Recorder):
        asked_for: Any = None

        @classmethod
        def from_policy(cls, policy: Any) -> Any:
            cls.asked_for = policy
            return None

    leaf = reading(weight_updater=FromPolicy)
    assert leaf.weight_updater.policy is leaf.policy  # type: ignore[union-attr]
    leaf = reading(weight_updater=NotFromPolicy)
    assert type(leaf.weight_updater) is NotFromPolicy
    assert NotFromPolicy.asked_for is leaf.policy
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
