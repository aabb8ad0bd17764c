"""What the page on RPCCollector says of arguments and methods, with nodes of RPCCollector, DistributedCollector and
RayCollector. One program per family runs all cases (tests/helpers/collecting_node_arguments.py)."""

from functools import cache
from typing import Any

import pytest

from helpers.collecting_node_arguments import KINDS, documented
from helpers.programs import in_program

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(650)]


# "module": one family's tests come after another's, so that few processes of pytest run the same program.
@pytest.fixture(scope="module", params=["by_rpc", "by_gloo", pytest.param("by_ray", marks=pytest.mark.ray)])
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@cache
def seen(family: str) -> Any:
    return in_program(documented, family, seconds=600, start_method="forkserver")


EXPECTED: dict[tuple[str, str], Any] = {
    ("limits", "actions"): [[-1.0]] * 2 + [[2.0]] * 3,  # of 13 random frames, two batches of 12 are made
    ("limits", "device"): "cpu",
    ("limits", "steps"): {node: [float(step % length) for step in range(30)] for node, length in ((0, 3), (1, 4))},
    ("limits", "scaled"): [[1.0]] * 5,
    ("divided", "devices"): [["cpu", "cpu"]] * 2,
    ("divided", "shapes"): [[4, 3]] * 3,  # environments begin anew with each batch, and trajectories are rows
    ("divided", "masks"): [[1, 1, 3, 3]] * 3,
    ("divided", "steps"): [[0.0] * 4 + [1.0, 1.0, 2.0, 2.0]] * 3,
    ("divided", "actions"): [[1.0], [2.0], [3.0]],  # overrides r146 where batches are of all nodes
    ("by_updaters", "pushed"): [[[3.0], [4.0], [4.0], [5.0]], [[3.0], [4.0], [5.0]]],  # to all, and to a chosen one
    ("by_updaters", "initialised"): ((1,), {"two": 3}),
    ("at_random", "updater"): None,
    ("at_random", "closed"): [(True, True), (True, False)],  # the end closes environments if it is to
    ("at_random", "actions"): [-1.0],
    ("updated", "index"): 0,
    ("classes", "async"): ([[4]], [3.0], {0, 1}),
    ("one_by_one", "kinds"): ["Named", "Named"],
}


BY_RPC_AND_GLOO = pytest.mark.parametrize("family", ["by_rpc", "by_gloo"], indirect=True, scope="module")


# Of 128: storing_device.
@pytest.mark.requirement(121, 126, 127, 128, 129, 133, 134, 135, 136, 137, 139, 140, 141, 145, 152, 155, 157, 172, 175)
@BY_RPC_AND_GLOO
@pytest.mark.parametrize(("case", "entry"), EXPECTED)
def test_what_the_page_says_of_an_argument(family: str, case: str, entry: str) -> None:
    assert seen(family)[case][entry] == EXPECTED[case, entry]


@pytest.mark.ray
def test_rays_updater_does_as_the_others() -> None:
    found = seen("by_ray")["by_updaters"]
    assert all(found[entry] == EXPECTED["by_updaters", entry] for entry in ("pushed", "initialised"))


@pytest.mark.requirement(146)
def test_no_node_makes_more_batches_with_the_same_weights(family: str) -> None:
    versions = seen(family)["one_by_one"]["versions"]
    assert versions.keys() == {0, 1}
    for own in versions.values():
        assert own == sorted(own)
        assert max(own.count(version) for version in own) <= 2
    assert max(versions[0] + versions[1]) > 1


@BY_RPC_AND_GLOO
@pytest.mark.requirement(130, 131, 132, 138)
def test_environments_and_policies_are_where_they_are_to_be_with_the_exploration_type(family: str) -> None:
    found = seen(family)["acting"]
    assert set(found) == {"RANDOM", "DETERMINISTIC"}, "the default, and a given one"
    for name, (told, env, batch) in found.items():
        assert [(KINDS[int(kind)].name, where) for kind, where in told] == [(name, 2.0)], "on the policy's device"
        assert (env, batch) == ("cpu:1", "None")


@pytest.mark.requirement(51)
def test_constructing_an_updater_names_the_scheme_to_use_instead(family: str) -> None:
    name = {"by_rpc": "RPC", "by_gloo": "Distributed", "by_ray": "Ray"}[family]
    [warned] = seen(family)["by_updaters"]["warned"]
    assert f"{name}WeightUpdater is deprecated" in warned
    assert f"asyncsync.sync.{name}WeightSyncScheme()" in warned


@pytest.mark.requirement(155, 158, 165, 240)
def test_running_free_into_a_replay_buffer(family: str) -> None:
    """RPCCollector has no replay buffer: tests/collectors/test_node_collectors.py."""
    expected = {"paused": True, "running": True, "closed": True, "frames": (24, 24)}
    assert seen(family)["in_the_background"] == (None if family == "by_rpc" else expected)


@BY_RPC_AND_GLOO
@pytest.mark.requirement(171, 172)
def test_whom_there_is_nobody_to_choose_from_and_which_worker_it_is_are_errors(family: str) -> None:
    assert seen(family)["at_random"]["worker_ids"].startswith("TypeError: worker_ids=0, but")
    index = seen(family)["limits"]["index"]
    assert index.startswith("RuntimeError: ")
    assert "worker_idx" in index


FORMS: dict[str, list[list[float]]] = {  # what both nodes, and postproc, have afterwards
    "registered": [[2.0], [2.0], [1.0]],
    "other keywords": [[2.0], [2.0], [1.0]],
    "module": [[3.0], [3.0], [1.0]],
    "weights_td": [[4.0], [4.0], [1.0]],
    "policy": [[5.0], [5.0], [1.0]],
    "policy of a model": [[6.0], [6.0], [1.0]],
    "weights of a model": [[7.0], [7.0], [1.0]],
    "another model": [[7.0], [7.0], [8.0]],
    "weights_dict": [[9.0], [9.0], [10.0]],
    "one": [[11.0], [9.0], [10.0]],
    "list": [[11.0], [12.0], [10.0]],
    "device": [[13.0], [13.0], [10.0]],
    "devices": [[14.0], [14.0], [10.0]],
    "each its own": [[15.0], [16.0], [10.0]],
    "changed by none": [[15.0], [16.0], [10.0]],
    "given a module": [[17.0], [17.0], [10.0]],
    "given a TensorDict": [[18.0], [18.0], [10.0]],
    "given a dict": [[19.0], [19.0], [10.0]],
    "given weights": [[20.0], [20.0], [10.0]],
    "given a policy": [[21.0], [21.0], [10.0]],
    "mirrored": [[22.0], [22.0], [10.0]],
}


@pytest.mark.requirement(159, 160, 161, 166, 167, 168, 169, 170)
def test_weights_in_every_form_to_all_or_chosen_nodes_and_what_is_refused(family: str) -> None:
    found = seen(family)["updated"]
    assert {form: found[form] for form in FORMS} == FORMS
    assert [one.partition(":")[0] for one in found["refused"]] == ["ValueError"] * 11
    assert [one for one in found["refused"] if "exclude each other" not in one and "'nobody'" not in one] == []


@pytest.mark.requirement(159, 162, 163, 164)
def test_a_receiver_is_registered_and_synchronized_at_once(family: str) -> None:
    found = seen(family)["updated"]["from above"]
    assert found["registered"] == ["policy"]
    assert found["at once"][:2] == [[30.0], [30.0]]
    assert found["received"][:2] == [[31.0], [31.0]]
    assert [one.partition(":")[0] for one in found["refused"]] == ["ValueError"] * 3
    assert found["changed by none"] == found["received"]


@pytest.mark.ray
def test_an_actor_may_be_in_a_placement_group() -> None:
    found, wanted = seen("by_ray")["placed"]
    assert found == wanted
