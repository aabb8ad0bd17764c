"""What the page on RPCCollector says of arguments and methods, with nodes of RPCCollector, DistributedCollector and
RayCollector. One program per family runs all cases (tests/helpers/collecting_node_arguments.py)."""

from __future__ import annotations

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


@pytest.mark.requirement(126, 127, 128, 134)
def test_random_frames_are_whole_batches_of_the_total(family: str) -> None:
    """Of 128: storing_device; 134: of 13 random frames, two batches of 12 are made."""
    found = seen(family)["limits"]
    assert found["actions"] == [[-1.0], [-1.0], [2.0], [2.0], [2.0]]
    assert found["device"] == "cpu"


@pytest.mark.requirement(133, 140)
def test_trajectories_end_at_the_limit_that_each_nodes_collector_has(family: str) -> None:
    steps = seen(family)["limits"]["steps"]
    assert steps == {node: [float(step % length) for step in range(30)] for node, length in ((0, 3), (1, 4))}


@pytest.mark.requirement(136)
def test_a_postproc_gets_each_batch_in_one_piece(family: str) -> None:
    assert seen(family)["limits"]["scaled"] == [[1.0]] * 5


@pytest.mark.requirement(129)
def test_devices_may_be_lists(family: str) -> None:
    assert seen(family)["divided"]["devices"] == [["cpu", "cpu"], ["cpu", "cpu"]]


@pytest.mark.requirement(135, 137)
def test_environments_begin_anew_with_each_batch_and_trajectories_are_rows(family: str) -> None:
    found = seen(family)["divided"]
    assert found["shapes"] == [[4, 3]] * 3
    assert found["masks"] == [[1, 1, 3, 3]] * 3
    assert found["steps"] == [[0.0] * 4 + [1.0, 1.0, 2.0, 2.0]] * 3


@pytest.mark.requirement(145)
def test_overrides_r146_where_batches_are_of_all_nodes(family: str) -> None:
    assert seen(family)["divided"]["actions"] == [[1.0], [2.0], [3.0]]


@pytest.mark.requirement(146)
def test_no_node_makes_more_batches_with_the_same_weights(family: str) -> None:
    versions = seen(family)["one_by_one"]["versions"]
    assert versions.keys() == {0, 1}
    for own in versions.values():
        assert own == sorted(own)
        assert max(own.count(version) for version in own) <= 2
    assert max(versions[0] + versions[1]) > 1


@pytest.mark.requirement(130, 131, 132)
def test_environments_and_policies_are_where_they_are_to_be(family: str) -> None:
    for told, env, batch in seen(family)["acting"].values():
        assert [where for _, where in told] == [2.0], "the policy was given its observation on its device"
        assert (env, batch) == ("cpu:1", "None")


@pytest.mark.requirement(138)
def test_the_exploration_type_is_set_where_the_policy_acts(family: str) -> None:
    found = seen(family)["acting"]
    assert set(found) == {"RANDOM", "DETERMINISTIC"}, "the default, and a given one"
    for name, (told, _, _) in found.items():
        assert [KINDS[int(kind)].name for kind, _ in told] == [name]


@pytest.mark.requirement(152, 166, 167, 175)
def test_updaters_of_the_family(family: str) -> None:
    """By their class, and as an instance; for all nodes, and for a chosen one."""
    two_nodes, one_node = seen(family)["by_updaters"]["pushed"]
    assert two_nodes == [[3.0], [4.0], [4.0], [5.0]]
    assert one_node == [[3.0], [4.0], [5.0]]


@pytest.mark.requirement(51)
def test_constructing_an_updater_names_the_scheme_to_use_instead(family: str) -> None:
    names = {"by_rpc": "RPC", "by_gloo": "Distributed", "by_ray": "Ray"}
    [warned] = seen(family)["by_updaters"]["warned"]
    assert f"{names[family]}WeightUpdater is deprecated" in warned
    assert f"asyncsync.sync.{names[family]}WeightSyncScheme()" in warned


@pytest.mark.requirement(157)
def test_init_updater_reaches_the_updater(family: str) -> None:
    assert seen(family)["by_updaters"]["initialised"] == ((1,), {"two": 3})
    assert seen(family)["at_random"]["updater"] is None, "nothing happens without one"


@pytest.mark.requirement(155)
def test_the_end_closes_environments_if_it_is_to(family: str) -> None:
    assert seen(family)["at_random"]["closed"] == [(True, True), (True, False)]


@pytest.mark.requirement(155, 158, 165, 240)
def test_running_free_into_a_replay_buffer(family: str) -> None:
    """RPCCollector has no replay buffer: tests/collectors/test_node_collectors.py."""
    found = seen(family)["in_the_background"]
    if family == "by_rpc":
        assert found is None
    else:
        assert found == {"paused": True, "running": True, "closed": True, "frames": (24, 24)}


@pytest.mark.requirement(121, 171)
def test_without_a_policy_actions_are_random_and_there_is_nobody_to_choose(family: str) -> None:
    found = seen(family)["at_random"]
    assert found["actions"] == [-1.0]
    assert found["worker_ids"].startswith("TypeError: worker_ids=0, but")


@pytest.mark.requirement(166, 168)
def test_weights_in_every_form(family: str) -> None:
    found = seen(family)["updated"]
    forms = (
        "registered",
        "other keywords",
        "module",
        "weights_td",
        "policy",
        "policy of a model",
        "weights of a model",
    )
    expected = dict(zip(forms, (2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), strict=True))
    assert {form: found[form] for form in forms} == {form: [[v], [v], [1.0]] for form, v in expected.items()}
    assert found["another model"] == [[7.0], [7.0], [8.0]]
    assert found["weights_dict"] == [[9.0], [9.0], [10.0]]


@pytest.mark.requirement(167)
def test_chosen_nodes_by_index_or_device(family: str) -> None:
    found = seen(family)["updated"]
    assert found["one"][:2] == [[11.0], [9.0]]
    assert found["list"][:2] == [[11.0], [12.0]]
    assert found["device"][:2] == [[13.0], [13.0]]
    assert found["devices"][:2] == [[14.0], [14.0]]
    assert found["each its own"][:2] == [[15.0], [16.0]]


@pytest.mark.requirement(161, 169, 170)
def test_what_excludes_each_other_is_refused_and_changes_nothing(family: str) -> None:
    found = seen(family)["updated"]
    assert [one.partition(":")[0] for one in found["refused"]] == ["ValueError"] * 11
    assert [one for one in found["refused"] if "exclude each other" not in one and "'nobody'" not in one] == []
    assert found["changed by none"] == [[15.0], [16.0], [10.0]]


@pytest.mark.requirement(159, 160)
def test_receive_weights_takes_every_form_and_mirrors_the_policy(family: str) -> None:
    found = seen(family)["updated"]
    forms = ("a module", "a TensorDict", "a dict", "weights", "a policy")
    received = [found[f"given {form}"][:2] for form in forms] + [found["mirrored"][:2]]
    assert received == [[[value], [value]] for value in (17.0, 18.0, 19.0, 20.0, 21.0, 22.0)]


@pytest.mark.requirement(159, 162, 163, 164)
def test_a_receiver_is_registered_and_synchronized_at_once(family: str) -> None:
    found = seen(family)["updated"]["from above"]
    assert found["registered"] == ["policy"]
    assert found["at once"][:2] == [[30.0], [30.0]]
    assert found["received"][:2] == [[31.0], [31.0]]
    assert [one.partition(":")[0] for one in found["refused"]] == ["ValueError"] * 3
    assert found["changed by none"] == found["received"]


@pytest.mark.requirement(172)
def test_worker_idx_is_the_given_one_or_an_error(family: str) -> None:
    assert seen(family)["updated"]["index"] == 0
    assert seen(family)["limits"]["index"].startswith("RuntimeError: worker_idx")


@pytest.mark.requirement(139, 141)
def test_nodes_run_what_is_chosen(family: str) -> None:
    assert seen(family)["classes"]["async"] == ([[4]], [3.0], {0, 1})
    assert seen(family)["one_by_one"]["kinds"] == ["Named", "Named"]


@pytest.mark.ray
def test_an_actor_may_be_in_a_placement_group() -> None:
    found, wanted = seen("by_ray")["placed"]
    assert found == wanted
