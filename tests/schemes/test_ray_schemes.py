"""Ray's schemes, on real actors of a real cluster: helpers/ray_program.py runs the cases, in a program of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import asyncsync
import asyncsync.sync
from helpers.called_faults import OF_TORN_READS
from helpers.called_workers import PROGRAM, Outcomes
from helpers.ray_program import ONCE, ONCE_WITH_GLOO, WITH_GLOO, run_with_ray

pytest.importorskip("ray")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Outcomes]:
    """What the cases have come to, all of them with both APIs."""
    left = set(Path("/tmp").glob("r-*"))
    outcomes = Outcomes(run_with_ray)
    yield outcomes
    assert outcomes.ended_by_itself
    assert set(Path("/tmp").glob("r-*")) <= left
    deadline = time.monotonic() + 10
    while running := processes_of(outcomes.pid):
        assert time.monotonic() < deadline, running
        time.sleep(0.1)


def processes_of(program: int) -> list[str]:
    """What Ray has started for a program, actors and its own, and runs yet. Other tests may have clusters, too."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(PROGRAM) == str(program):
                found.append(f"{process.pid} {process.name()}")
    return found


def check_once(ray: Outcomes, name: str) -> None:
    """What was run with one API."""
    ray.check(name, (ONCE[name][1],))


@pytest.mark.requirement(14)
def test_init_on_sender_registers_the_actors(ray: Outcomes) -> None:
    ray.check("transports_and_objects_are_registered_by_init")


@pytest.mark.requirement(19, 32)
def test_connect_delivers_the_initial_weights(ray: Outcomes) -> None:
    ray.check("connect_does_what_is_documented")


@pytest.mark.requirement(22, 32)
def test_a_send_calls_each_actor(ray: Outcomes) -> None:
    ray.check("sends_call_each_worker")


@pytest.mark.requirement(21, 22)
def test_there_is_no_receiver_loop(ray: Outcomes) -> None:
    ray.check("without_a_call_nothing_is_applied")


@pytest.mark.requirement(71)
def test_only_the_chosen_actor_is_called(ray: Outcomes) -> None:
    ray.check("only_the_chosen_worker_is_called")


@pytest.mark.requirement(195)
def test_an_object_in_the_place_of_another_is_named(ray: Outcomes) -> None:
    ray.check("an_object_in_the_place_of_another_is_named")


@pytest.mark.requirement(195)
def test_what_an_actor_raises_is_its_failure(ray: Outcomes) -> None:
    ray.check("what_a_worker_raises_is_its_failure")


@pytest.mark.requirement(195)
def test_weights_that_do_not_fit_are_refused_by_name(ray: Outcomes) -> None:
    ray.check("weights_that_do_not_fit_are_refused_by_name")


@pytest.mark.requirement(195)
def test_a_killed_actor_is_named_and_the_others_go_on(ray: Outcomes) -> None:
    check_once(ray, "a_killed_worker_is_named_and_the_others_go_on")


@pytest.mark.requirement(194, 195)
def test_an_actor_killed_amid_a_transfer_is_named_at_once(ray: Outcomes) -> None:
    check_once(ray, "a_worker_killed_amid_a_transfer_is_named_at_once")


@pytest.mark.requirement(195)
def test_a_trainer_killed_amid_a_transfer_is_noticed(ray: Outcomes) -> None:
    check_once(ray, "a_trainer_killed_amid_a_transfer_is_noticed")


@pytest.mark.requirement(196)
def test_a_restarted_actor_finds_its_target(ray: Outcomes) -> None:
    check_once(ray, "a_restarted_actor_finds_its_target")


def test_a_shutdown_ends_a_connect_that_waits(ray: Outcomes) -> None:
    ray.check("a_shutdown_ends_a_connect_that_waits")


@pytest.mark.requirement(196, 212)
def test_elastic_actors_come_and_go(ray: Outcomes) -> None:
    ray.check("elastic_actors_come_and_go")


@pytest.mark.requirement(198)
def test_of_many_publications_the_newest_is_applied(ray: Outcomes) -> None:
    ray.check("of_many_publications_the_newest_is_applied")


@pytest.mark.requirement(46)
def test_the_transports_receive_takes_a_timeout(ray: Outcomes) -> None:
    ray.check("receive_takes_a_timeout")


@pytest.mark.requirement(39, 40)
def test_transports_get_weights_model_and_strategy_with_each_call(ray: Outcomes) -> None:
    ray.check("transports_get_weights_model_and_strategy_with_each_call")


@pytest.mark.requirement(41)
def test_the_transports_setup_methods_are_the_two_sides_of_connect(ray: Outcomes) -> None:
    ray.check("the_transports_setup_methods_are_the_two_sides_of_connect")


@pytest.mark.requirement(4)
def test_an_actor_may_pull_and_wait_for_a_version(ray: Outcomes) -> None:
    ray.check("a_worker_may_pull_and_wait_for_a_version")


@pytest.mark.requirement(218)
def test_received_weights_are_the_callers_own(ray: Outcomes) -> None:
    ray.check("received_weights_are_the_callers_own")


@pytest.mark.requirement(190, 192)
def test_coroutines_receive_in_an_actors_loop_and_may_be_cancelled(ray: Outcomes) -> None:
    ray.check("coroutines_receive_in_an_actors_loop")


@pytest.mark.requirement(192)
def test_a_connect_that_is_cancelled_may_be_called_again(ray: Outcomes) -> None:
    check_once(ray, "a_connect_that_is_cancelled_may_be_called_again")


@pytest.mark.requirement(192)
def test_a_cancelled_send_loses_nothing(ray: Outcomes) -> None:
    ray.check("a_cancelled_send_loses_nothing")


@pytest.mark.requirement(191)
def test_the_loop_is_not_blocked_by_a_large_update(ray: Outcomes) -> None:
    ray.check("the_loop_is_not_blocked_by_a_large_update")


@pytest.mark.requirement(156)
def test_the_page_of_rpc_collector_connects_a_receiver(ray: Outcomes) -> None:
    ray.check("the_page_of_rpc_collector_connects_a_receiver")


@pytest.mark.requirement(33)
def test_only_the_sender_of_a_transform_connects(ray: Outcomes) -> None:
    ray.check("only_the_sender_of_a_transform_connects")


@pytest.mark.requirement(33)
def test_torchrls_transform_is_updated(ray: Outcomes) -> None:
    check_once(ray, "torchrls_transform_is_updated")


@pytest.mark.requirement(33)
def test_a_collector_updates_torchrls_transform(ray: Outcomes) -> None:
    check_once(ray, "a_collector_updates_torchrls_transform")


def test_a_collector_may_be_an_actor(ray: Outcomes) -> None:
    check_once(ray, "a_collector_may_be_an_actor")


@pytest.mark.requirement(32, 33)
@pytest.mark.parametrize("name", [*WITH_GLOO, *ONCE_WITH_GLOO])
def test_the_same_through_gloo(ray: Outcomes, name: str) -> None:
    """Torn reads and kills in the middle of a transfer, too."""
    if name in ONCE_WITH_GLOO:
        ray.check(f"gloo {name}", (ONCE_WITH_GLOO[name][1],))
    else:
        ray.check(f"gloo {name}")


@pytest.mark.requirement(194)
@pytest.mark.parametrize("name", OF_TORN_READS)
def test_no_read_is_torn_in_an_actor(ray: Outcomes, name: str) -> None:
    ray.check(name)


@pytest.mark.requirement(71)
def test_weights_for_each_actor_are_its_own(ray: Outcomes) -> None:
    ray.check("weights_for_each_worker_are_its_own")


@pytest.mark.requirement(199)
def test_several_models_are_applied_in_one_call(ray: Outcomes) -> None:
    ray.check("several_models_are_applied_in_one_call")


@pytest.mark.requirement(195)
def test_an_actor_that_is_late_is_named_and_not_lost(ray: Outcomes) -> None:
    ray.check("a_worker_that_is_late_is_named_and_not_lost")


def test_nothing_stays_in_the_object_store(ray: Outcomes) -> None:
    check_once(ray, "nothing_stays_in_the_store")


@pytest.mark.requirement(32)
def test_tensors_of_all_kinds_go_through_the_store(ray: Outcomes) -> None:
    check_once(ray, "tensors_of_all_kinds_go_through_the_store")


def test_a_described_object_is_found_and_not_pinned(ray: Outcomes) -> None:
    """``serialize_object_ref`` and ``deserialize_and_register_object_ref``: see tests/unit/test_private_names.py."""
    ray.check("a_described_object_is_found_and_not_pinned")


@pytest.mark.requirement(231)
def test_from_backend_knows_ray() -> None:
    for module in (asyncsync, asyncsync.sync):
        scheme = module.WeightSyncScheme.from_backend("ray")
        assert type(scheme) is module.RayWeightSyncScheme
