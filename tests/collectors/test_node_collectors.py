"""RPCCollector, DistributedCollector and RayCollector with nodes of this host. One program per family runs all cases
(tests/helpers/collecting_nodes.py); each test looks at one of them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from helpers import collecting_nodes, planted
from helpers.programs import in_program

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
FAMILIES = ["by_rpc", "by_gloo", pytest.param("by_ray", marks=needs_ray)]


@cache
def seen(program: str, *args: Any) -> Any:
    return in_program(getattr(collecting_nodes, program), *args, seconds=350, start_method="forkserver")


@pytest.mark.requirement(142, 145)
@pytest.mark.parametrize("family", FAMILIES)
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
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_by_the_scheme_of_the_name_which_brings_keys_by_its_own_means(family: str) -> None:
    found = seen(family)["asynchronous"]
    names = {"by_rpc": "RPC", "by_gloo": "Distributed", "by_ray": "Ray"}
    assert found["scheme"] == f"{names[family]}WeightSyncScheme"
    assert found["address"] == (planted.introduced(), "gloo")


@pytest.mark.requirement(126, 143, 146)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_all_nodes_is_a_stack_and_weights_come_every_other_batch(family: str) -> None:
    found = seen(family)["synchronous"]
    assert found["shape"] == [2, 3]
    assert found["values"] == [[1.0], [1.0], [3.0], [3.0], [5.0]]
    assert found["updated"] == [9.0]
    assert found["version"] == [found["policy_version"]]


@pytest.mark.requirement(224, 225)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_asked_of_workers_can_be_asked_of_nodes(family: str) -> None:
    found = seen(family)["synchronous"]
    assert found["seeds"] == [7.0, 17.0]
    assert found["lengths"] == [5, 5]
    assert found["executed"] == [11, 12]
    frames, workers = found["frames"]
    assert (frames, workers) == (48, ["worker0", "worker1"])
    assert found["paused"] == 24


@pytest.mark.requirement(158, 165)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pause_holds_nodes_and_start_needs_a_replay_buffer(family: str) -> None:
    found = seen(family)["synchronous"]
    assert found["waited"]
    assert found["went on"] == [2, 3]
    remedy = "use DistributedCollector or RayCollector" if family == "by_rpc" else "pass replay_buffer="
    assert remedy in found["start"]


@pytest.mark.requirement(208)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_that_is_killed_is_named_at_once_and_nothing_is_left(family: str) -> None:
    found = seen(family)["synchronous"]
    kind, message, seconds = found["lost"]
    assert kind == "PeerLost"
    assert "node 1" in message
    assert f"pid {found['pid']}" in message
    assert seconds < 5
    assert found["closed"]
    assert all(case["gone"] for case in (found, *(seen(family)[c] for c in ("asynchronous", "failing", "nested"))))


@pytest.mark.requirement(208)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_that_is_killed_in_the_midst_of_an_update_is_named_by_it(family: str) -> None:
    found = seen(family)["updating"]
    kind, message, seconds = found["lost"]
    assert kind == "PeerLost"
    assert "node 1" in message
    assert f"pid {found['pid']}" in message
    assert seconds < 5
    assert found["gone"]


@pytest.mark.requirement(208)
@pytest.mark.parametrize(
    "kind", ["RPCCollector", "DistributedCollector", pytest.param("RayCollector", marks=needs_ray)]
)
def test_nodes_end_when_their_trainer_was_killed_and_the_next_program_can_be_where_it_was(kind: str) -> None:
    assert seen("killed_trainer", kind) == {"acts": [2.0], "gone": True, "all gone": True, "again": 0}


@pytest.mark.requirement(125)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_node_raises_is_raised_here_with_its_type(family: str) -> None:
    found = seen(family)["failing"]
    assert found["error"] == "the environment has failed"
    assert any("node 1" in note for note in found["notes"])
    assert found["values"]
    assert all(values == [3.0] for values in found["values"])


@pytest.mark.requirement(139, 141, 154, 164)
@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_have_workers_and_pass_on_what_their_collector_receives(family: str) -> None:
    found = seen(family)["nested"]
    assert found["first"] == [4.0]
    assert found["shape"] == [2, 4]
    assert found["values"] == [5.0]
    assert found["ids"] == 2


@pytest.mark.requirement(130, 153, 237)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_reach_policies_that_the_workers_of_nodes_have_made(family: str) -> None:
    assert seen(family)["made_there"] == {"first": [1.0], "updated": [5.0]}


@pytest.mark.requirement(156)
def test_rpcs_references_reach_the_nodes_collectors_and_an_agent_serves_one_collector() -> None:
    found = seen("by_rpc")
    assert found["remote"] == 15
    assert "RPC agent" in found["second"]
    assert found["still"] == [2.0]


@pytest.mark.requirement(51, 152)
def test_an_updater_pushes_to_nodes() -> None:
    assert seen("by_rpc")["pushed"] == [8.0]


@pytest.mark.parametrize("family", ["by_gloo", pytest.param("with_actors", marks=needs_ray)])
def test_a_node_that_is_lost_is_launched_again_where_that_is_asked_for(family: str) -> None:
    assert seen(family)["again"] == [[2.0], [2.0], [6.0]]


def test_a_node_that_is_lost_in_an_update_comes_again_with_its_weights() -> None:
    found = seen("by_gloo")["updating again"]
    assert found["lost"][0] == "PartialSendError"
    assert "node 1" in found["lost"][1] or "worker 1" in found["lost"][1]
    assert found["lost"][2] < 5
    assert found["again"] == [6.0]


def test_a_node_that_is_lost_while_weights_are_sent_after_each_batch_comes_again() -> None:
    found = seen("by_gloo")["going on"]
    assert found == {sync: {"hooked": True, "ids": {0}, "values": [2.0]} for sync in (False, True)}


@pytest.mark.requirement(156, 223)
@needs_ray
def test_rays_actors_can_be_called_and_ray_ends_with_the_collector_that_began_it() -> None:
    found = seen("with_actors")
    assert found["kind"] == "RayCollector"
    assert found["remote"] == 15
    assert found["ray"] == (True, False), "the last one that uses it ends it"


@pytest.mark.requirement(87, 158)
@needs_ray
def test_replay_buffers_may_be_actors() -> None:
    found = seen("with_actors")
    assert found["handed out"] == [None] * 5
    assert found["frames"] == 30
    assert (found["paused"], found["running"]) == (True, True)


@pytest.mark.requirement(228)
@needs_ray
def test_an_evaluator_may_be_an_actor() -> None:
    found = seen("with_actors")["evaluated"]
    assert found["steps"] == [0, 7]
    assert found["rewards"] == [10.0, 30.0]
    assert found["made there"] == 50.0
    assert found["elsewhere"]
    kind, message, seconds = found["lost"]
    assert (kind, seconds < 5) == ("PeerLost", True)
    assert f"pid {found['pid']}" in message


@pytest.mark.requirement(228)
@needs_ray
def test_what_an_evaluator_is_asked_for_waits_until_its_actor_has_come_again() -> None:
    assert seen("with_actors")["evaluated again"] == [70.0, 80.0]


@pytest.mark.requirement(144, 147)
@needs_submitit
def test_nodes_may_be_jobs() -> None:
    assert seen("by_jobs") == {"kind": "DistributedCollector", "values": [2.0]}


@pytest.mark.requirement(147)
def test_nodes_may_be_ranks_that_are_there_already() -> None:
    assert seen("by_ranks") == ["2.0", "3.0"]
