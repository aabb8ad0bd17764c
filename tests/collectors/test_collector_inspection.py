"""What can be asked of a collector and of its workers while they work."""

import functools
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from asyncsync.errors import PeerLost
from asyncsync.sync import NoWeightSyncScheme
from helpers.collecting_multi import Counting, SharedBuffer, WithModel, make, options, policy
from helpers.torchrl_source import parameters

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
OF_BOTH = ["get_distant_attr", "map_fn", "set_post_collect_hook", "stats", "enable_profile", "disable_profile",
           "cascade_execute"]  # fmt: skip
OF_EACH = ["getattr_policy", "getattr_env", "getattr_rb", "get_policy_version"]


class Spoken(Counting):
    """Has attributes and methods of its own, of all kinds."""

    lock = threading.Lock()

    def __init__(self, name: str = "first", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.names = {"own": [name]}

    def say(self, word: str, *, times: int = 1) -> str:
        return " ".join([self.names["own"][0]] + [word] * times)

    def refuse(self) -> None:
        raise LookupError("this environment refuses")


FACTORIES = [lambda: Spoken("first", length=5), lambda: Spoken("second", length=3)]


@pytest.fixture(scope="module")
def crew() -> Iterator[MultiSyncCollector]:
    with MultiSyncCollector(FACTORIES, policy(4.0), **options()) as collector:
        yield collector


@pytest.fixture
def alone() -> Iterator[Collector]:
    with Collector(Spoken(), policy(4.0), frames_per_batch=6, total_frames=12) as collector:
        yield collector


@pytest.mark.requirement(224, 225)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_every_collector_has_the_methods_of_torchrls(kind: Any) -> None:
    module, theirs = ("_single", "Collector") if kind is Collector else ("_multi_base", "MultiCollector")
    inherited, own = parameters("collectors/_base.py", "BaseCollector"), parameters(f"collectors/{module}.py", theirs)
    wanted = {name: inherited[name] | own.get(name, set()) for name in OF_BOTH} | {name: own[name] for name in OF_EACH}
    for name, arguments in wanted.items():
        assert arguments <= set(inspect.signature(getattr(kind, name)).parameters), name
    assert isinstance(kind.profile_config, property)
    assert hasattr(kind, "get_cached_weights") == ("get_cached_weights" in own)


@pytest.mark.requirement(224)
def test_an_attribute_of_every_worker(crew: MultiSyncCollector) -> None:
    assert crew.get_distant_attr("env.names['own'][0]") == ["first", "second"]
    assert crew.get_distant_attr("worker_idx") == [0, 1]
    with pytest.raises(AttributeError, match=r"has no 'env.nothing'") as caught:
        crew.get_distant_attr("env.nothing")
    assert any("worker 0" in note for note in caught.value.__notes__)
    weights = crew.get_distant_attr("policy.module.weight")
    assert [weight.tolist() for weight in weights] == [[4.0, 4.0]] * 2
    with torch.no_grad():
        weights[0].fill_(9.0)
    assert crew.getattr_policy("module").weight.tolist() == [4.0, 4.0], "it was a copy"
    with pytest.raises(TypeError, match="lock"):  # it cannot be pickled: that ends nothing
        crew.get_distant_attr("env.lock")
    assert crew.next() is not None


@pytest.mark.requirement(224)
def test_a_method_is_called_in_every_worker(crew: MultiSyncCollector) -> None:
    assert crew.map_fn("env.say", [("a",), ("b",)]) == ["first a", "second b"]
    assert crew.map_fn("env.say", [("a",), ("b",)], [{"times": 2}, {}]) == ["first a a", "second b"]
    assert crew.map_fn("env.say", list_of_kwargs=[{"word": "c"}, {"word": "d"}]) == ["first c", "second d"]
    assert crew.map_fn("get_policy_version") == [crew.policy_version] * 2
    with pytest.raises(LookupError, match="this environment refuses"):
        crew.map_fn("env.refuse")
    with pytest.raises(ValueError, match=r"need 2 entries each, .* have 1"):
        crew.map_fn("env.say", [("a",)])
    with pytest.raises(ValueError, match=r"has no 'env.shout'"):
        crew.map_fn("env.shout")
    with pytest.raises(TypeError, match=r"'env.names' is a dict"):
        crew.map_fn("env.names")
    assert crew.next() is not None


@pytest.mark.requirement(224)
def test_attributes_of_the_first_worker(crew: MultiSyncCollector) -> None:
    assert crew.getattr_env("length") == 5
    assert crew.getattr_policy("in_keys") == ["observation"]
    for ask in (crew.getattr_env, crew.getattr_policy):
        with pytest.raises(AttributeError, match="has no 'nothing'"):
            ask("nothing")
    with pytest.raises(AttributeError, match="this MultiSyncCollector has no replay buffer"):
        crew.getattr_rb("sizes")


@pytest.mark.requirement(224)
def test_the_collector_of_this_process_is_asked_directly(alone: Collector) -> None:
    assert alone.get_distant_attr("env.names['own']") == ["first"]
    assert alone.getattr_policy("module").weight is alone.policy.module.weight
    assert alone.getattr_env("length") == 5
    assert alone.map_fn("env.say", [("a",), ("b",)], [{}, {"times": 2}]) == ["first a", "first b b"]
    assert alone.map_fn("get_policy_version") == [0] == [alone.get_policy_version()]
    with pytest.raises(ValueError, match=r"need 2 entries each, .* have 2 and 1"):
        alone.map_fn("env.say", [("a",), ("b",)], [{}])
    with pytest.raises(AttributeError, match="no replay buffer"):
        alone.getattr_rb("extend")
    with pytest.raises(AttributeError, match="Spoken has no 'nothing'"):
        alone.getattr_env("nothing")


@pytest.mark.thorough
@pytest.mark.requirement(224)
def test_workers_of_workers_are_asked_in_their_turn() -> None:
    inner = functools.partial(MultiSyncCollector, start_method="forkserver")
    with MultiSyncCollector(
        [FACTORIES], policy(2.0), collector_class=inner, **options(frames_per_batch=4)
    ) as collector:
        assert collector.get_distant_attr("env.names['own'][0]") == [["first", "second"]]
        assert collector.map_fn("map_fn", [("env.say", [("a",), ("b",)])]) == [["first a", "second b"]]
        assert collector.getattr_env("length") == 5
        assert collector.getattr_policy("module").weight.tolist() == [2.0, 2.0]
        collector.next()
        found = collector.stats("per_worker")
        assert (found["worker_0/workers"], found["worker_0/frames"]) == (2, 4)


def mark(batch: TensorDictBase) -> None:
    batch.set("marked", torch.ones(batch.batch_size))


@pytest.mark.requirement(224)
def test_a_hook_is_set_by_a_method(alone: Collector) -> None:
    with MultiSyncCollector([make()] * 2, policy(), **options()) as collector:
        for one in (collector, alone):
            one.set_post_collect_hook(mark)
            assert one.post_collect_hook is mark
            assert "marked" in one.next().keys()  # type: ignore[union-attr] # noqa: SIM118
            one.set_post_collect_hook(None)
            assert "marked" not in one.next().keys()  # type: ignore[union-attr] # noqa: SIM118


@pytest.mark.requirement(224)
@BOTH
def test_cached_weights_are_those_that_were_sent_last(kind: Any) -> None:
    source = policy(5.0)
    with kind([make()], source, **options()) as collector:
        source.module.fill(6.0)  # not sent
        cached = collector.get_cached_weights("policy")
        assert cached["module", "weight"].tolist() == [5.0, 5.0]
        collector.update_policy_weights_()
        assert cached["module", "weight"].tolist() == [5.0, 5.0], "it is a copy"
        assert collector.get_cached_weights("policy")["module", "weight"].tolist() == [6.0, 6.0]
        assert collector.get_cached_weights("value") is None
        assert collector.get_policy_version() == collector.policy_version == 2


@pytest.mark.requirement(224)
def test_without_a_scheme_that_moves_weights_none_are_cached() -> None:
    model = "env.transform[0].module"
    schemes: Any = {"policy": NoWeightSyncScheme()}
    with MultiSyncCollector([WithModel], policy(), weight_sync_schemes=schemes, **options()) as collector:
        assert collector.get_cached_weights("policy") is None
        assert collector.get_distant_attr(f"{model}.in_features") == [1]
        assert collector.getattr_env("transform[0].module").weight.shape == (1, 1)


def test_a_collectors_length_is_how_many_batches_it_has_if_it_has_an_end(alone: Collector) -> None:
    assert len(alone) == 2 == len(list(alone))
    assert len(alone) == 2
    with MultiAsyncCollector(FACTORIES, policy(), **options(frames_per_batch=4, total_frames=12)) as turns:
        assert len(turns) == 3 == len(list(turns))
    with Collector(Spoken(), policy(), frames_per_batch=6) as endless:
        with pytest.raises(TypeError, match="this Collector has no length"):
            len(endless)
        assert endless
    with (
        Collector(Spoken(), policy(), frames_per_batch=6, total_frames=12, trajs_per_batch=2) as whole,
        pytest.raises(TypeError, match="batches of whole trajectories"),
    ):
        len(whole)


@pytest.mark.requirement(225)
def test_statistics_of_the_collector_of_this_process(alone: Collector) -> None:
    begun = {"frames": 0, "batches": 0, "total_frames": 12, "completed": False}
    assert alone.stats() == begun | {"requested_frames_per_batch": 6, "policy_version": 0}
    for count, _ in enumerate(alone, 1):
        alone.increment_version()
        counted = {"frames": 6 * count, "batches": count, "completed": count == 2, "policy_version": count}
        assert alone.stats() == begun | counted | {"requested_frames_per_batch": 6}
    with Collector(Spoken(), policy(), frames_per_batch=6) as endless:
        assert endless.stats().keys().isdisjoint({"total_frames", "completed"})


@pytest.mark.requirement(225)
def test_statistics_of_workers() -> None:
    with MultiSyncCollector(FACTORIES, policy(), total_frames=12, **options()) as collector:
        assert len(collector) == 2
        collector.next()
        own = {"frames": 6, "batches": 1, "total_frames": 12, "completed": False, "requested_frames_per_batch": 6}
        crew = {"workers": 2, "workers_alive": 2}
        each = {"frames": 3, "batches": 1, "requested_frames_per_batch": 3, "policy_version": 1}
        per_worker = {f"worker_{w}/{name}": value for w in range(2) for name, value in each.items()}
        assert collector.stats() == collector.stats("aggregate") == own | crew | {"policy_version": 1}
        assert collector.stats(workers="per_worker") == crew | per_worker
        assert collector.stats("both") == own | crew | {"policy_version": 1} | per_worker
        with collector.pause():
            assert collector.stats("both")["worker_1/frames"] == 3
        with pytest.raises(ValueError, match="'aggregate', 'per_worker' or 'both', not 'all'"):
            collector.stats("all")  # type: ignore[arg-type]
        assert list(collector)
        assert collector.stats()["completed"]
    assert (collector.stats()["frames"], collector.stats()["workers_alive"]) == (12, 0)


@pytest.mark.requirement(225)
@BOTH
def test_statistics_and_the_replay_buffer_while_workers_run_free(kind: Any, tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path)
    given = options(frames_per_batch=4, total_frames=40, replay_buffer=buffer)
    with kind([make(delay=0.001)] * 2, policy(), **given) as collector:
        assert collector.getattr_rb("_path") == tmp_path / "buffer"
        collector.start()
        counts = [0.0]
        while not collector.stats()["completed"]:
            counts.append(collector.stats()["frames"])
        assert counts == sorted(counts)
        assert sum(collector.stats("per_worker")[f"worker_{w}/frames"] for w in range(2)) >= 40


@pytest.mark.requirement(225)
def test_a_worker_that_has_died_is_not_alive() -> None:
    with MultiSyncCollector([make(), make(kill_at=5)], policy(), **options(frames_per_batch=4)) as collector:
        with pytest.raises(PeerLost):
            list(collector)
        assert collector.stats()["workers"] == 2
