"""RPCCollector, DistributedCollector and RayCollector with nodes of this host. One program per family runs all cases
(tests/helpers/collecting_nodes.py); each test looks at one of them."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from helpers import collecting_nodes, planted
from helpers.programs import in_program

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(650)]

needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
NAMES = {"by_rpc": "RPC", "by_gloo": "Distributed", "by_ray": "Ray"}


@pytest.fixture(scope="module", params=["by_rpc", "by_gloo", pytest.param("by_ray", marks=pytest.mark.ray)])
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@cache
def seen(program: str, *args: Any) -> Any:
    return in_program(getattr(collecting_nodes, program), *args, seconds=600, start_method="forkserver")


@pytest.mark.requirement(142, 145)
def test_each_batch_is_one_nodes_and_its_node_is_sent_the_newest_weights(family: str) -> None:
    found = seen(family)["asynchronous"]
    assert found["sizes"] == [[6]] * 8
    assert all(len(nodes) == 1 for nodes in found["nodes"]), "identifiers of trajectories tell the nodes apart"
    assert {node for [node] in found["nodes"]} == {0, 1}
    assert all(len(values) == 1 for values in found["values"])
    for node in (0, 1):
        own = [value for [value], [of] in zip(found["values"], found["nodes"], strict=True) if of == node]
        assert own == sorted(own)
        # The first rollout has the first weights, and each later one what was there when the batch before was taken.
        before = [index + 1.0 for index, [of] in enumerate(found["nodes"]) if of == node]
        assert own == [1.0, *before][: len(own)]


@pytest.mark.requirement(149, 153, 211)
def test_weights_go_by_the_scheme_of_the_name_which_brings_keys_by_its_own_means(family: str) -> None:
    found = seen(family)["asynchronous"]
    assert found["scheme"] == f"{NAMES[family]}WeightSyncScheme"
    assert found["address"] == (planted.introduced(), "gloo")


# A batch of all nodes is a stack, and weights come every other batch; a pause holds nodes.
SYNCHRONOUS: dict[str, Any] = {
    "shape": [2, 3], "values": [[1.0], [1.0], [3.0], [3.0], [5.0]], "updated": [9.0], "seeds": [7.0, 17.0],
    "lengths": [5, 5], "executed": [11, 12], "frames": (48, ["worker0", "worker1"]), "paused": 24, "waited": True,
    "went on": [2, 3], "closed": True,
}  # fmt: skip


@pytest.mark.requirement(126, 143, 146, 158, 165, 224, 225)
def test_batches_of_all_nodes_and_what_can_be_asked_of_workers_can_be_asked_of_nodes(family: str) -> None:
    found = seen(family)["synchronous"]
    assert {entry: found[entry] for entry in SYNCHRONOUS} == SYNCHRONOUS
    assert found["version"] == [found["policy_version"]]
    remedy = "use DistributedCollector or RayCollector" if family == "by_rpc" else "pass replay_buffer="
    assert remedy in found["start"]


@pytest.mark.requirement(208)
@pytest.mark.parametrize("case", ["synchronous", "updating"])
def test_a_node_that_is_killed_in_a_rollout_or_an_update_is_named_at_once(family: str, case: str) -> None:
    found = seen(family)[case]
    kind, message, seconds = found["lost"]
    assert kind == "PeerLost"
    assert "node 1" in message
    assert f"pid {found['pid']}" in message
    assert seconds < 5


@pytest.mark.requirement(208)
def test_nothing_is_left(family: str) -> None:
    cases = ("synchronous", "updating", "asynchronous", "failing", "nested")
    assert [case for case in cases if not seen(family)[case]["gone"]] == []


@pytest.mark.requirement(208)
@pytest.mark.parametrize(
    "kind", ["RPCCollector", "DistributedCollector", pytest.param("RayCollector", marks=pytest.mark.ray)]
)
def test_nodes_end_when_their_trainer_was_killed_and_the_next_program_can_be_where_it_was(kind: str) -> None:
    assert seen("killed_trainer", kind) == {"acts": [2.0], "gone": True, "all gone": True, "again": 0}


@pytest.mark.requirement(125)
def test_what_a_node_raises_is_raised_here_with_its_type(family: str) -> None:
    found = seen(family)["failing"]
    assert found["error"] == "the environment has failed"
    assert any("node 1" in note for note in found["notes"])
    assert found["values"]
    assert all(values == [3.0] for values in found["values"])


@pytest.mark.requirement(130, 139, 141, 153, 154, 164, 237)
def test_weights_reach_the_workers_of_nodes_also_what_is_received_and_policies_made_there(family: str) -> None:
    nested = {"first": [4.0], "shape": [2, 4], "values": [5.0], "ids": 2, "gone": True}
    assert seen(family)["nested"] == nested
    assert seen(family)["made_there"] == {"first": [1.0], "updated": [5.0]}


@pytest.mark.requirement(51, 152, 156)
def test_rpcs_references_reach_the_nodes_collectors_and_an_agent_serves_one_collector() -> None:
    found = seen("by_rpc")
    assert found["remote"] == 15
    assert "RPC agent" in found["second"]
    assert found["still"] == [2.0]
    assert found["pushed"] == [8.0], "by an updater"


@pytest.mark.parametrize("family", ["by_gloo", pytest.param("with_actors", marks=pytest.mark.ray)])
def test_a_node_that_is_lost_is_launched_again_where_that_is_asked_for(family: str) -> None:
    assert seen(family)["again"] == [[2.0], [2.0], [6.0]]


def test_a_node_that_is_lost_while_weights_are_sent_comes_again_with_them() -> None:
    found = seen("by_gloo")["updating again"]
    kind, message, seconds = found["lost"]
    assert (kind, seconds < 5) == ("PartialSendError", True)
    assert "node 1" in message or "worker 1" in message
    assert found["again"] == [6.0]
    of_each_batch = {sync: {"hooked": True, "ids": {0}, "values": [2.0]} for sync in (False, True)}
    assert seen("by_gloo")["going on"] == of_each_batch


@pytest.mark.requirement(87, 156, 158, 223)
@pytest.mark.ray
def test_rays_actors_and_replay_buffers_and_ray_ends_with_the_collector_that_began_it() -> None:
    found = seen("with_actors")
    assert found["kind"] == "RayCollector"
    assert found["remote"] == 15
    assert found["ray"] == (True, False), "the last one that uses it ends it"
    assert found["handed out"] == [None] * 5
    assert found["frames"] == 30
    assert (found["paused"], found["running"]) == (True, True)


@pytest.mark.requirement(228)
@pytest.mark.ray
def test_an_evaluator_may_be_an_actor_and_what_it_is_asked_for_waits_until_it_has_come_again() -> None:
    found = seen("with_actors")["evaluated"]
    assert found["steps"] == [0, 7]
    assert found["rewards"] == [10.0, 30.0]
    assert found["made there"] == 50.0
    assert found["elsewhere"]
    kind, message, seconds = found["lost"]
    assert (kind, seconds < 5) == ("PeerLost", True)
    assert f"pid {found['pid']}" in message
    assert seen("with_actors")["evaluated again"] == [70.0, 80.0]


@pytest.mark.requirement(144, 147)
@needs_submitit
def test_nodes_may_be_jobs() -> None:
    assert seen("by_jobs") == {"kind": "DistributedCollector", "values": [2.0]}


@pytest.mark.requirement(147)
def test_nodes_may_be_ranks_that_are_there_already() -> None:
    assert seen("by_ranks") == ["2.0", "3.0"]
