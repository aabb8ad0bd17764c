"""Schemes that call the worker's object: Ray's on actors of a real cluster, RPC's on objects of a real agent.

helpers/ray_program.py and helpers/rpc_program.py run the cases, each in a program of its own, with both APIs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.called_workers import PROGRAM, Outcomes
from helpers.programs import in_program
from helpers.ray_program import ONCE_WITH_GLOO, WITH_GLOO, run_with_ray
from helpers.rpc_program import run_with_rpc
from helpers.rpc_unimported import six_first_calls_at_once

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(500)]

# Each case, and the requirements that it shows.
OF_BOTH: dict[str, pytest.MarkDecorator] = {
    "transports_and_objects_are_registered_by_init": pytest.mark.requirement(14),
    "sends_call_each_worker": pytest.mark.requirement(19, 20, 22, 31, 32, 218),
    "without_a_call_nothing_is_applied": pytest.mark.requirement(4, 21, 22, 71),
    "whoever_does_not_take_an_update_is_named": pytest.mark.requirement(195),
    "a_killed_worker_is_named_and_the_others_go_on": pytest.mark.requirement(195),
    "a_worker_killed_amid_a_transfer_is_named_at_once": pytest.mark.requirement(194, 195),
    "a_trainer_killed_amid_a_transfer_is_noticed": pytest.mark.requirement(195),
    "of_many_publications_the_newest_is_applied": pytest.mark.requirement(198),
    "receive_takes_a_timeout": pytest.mark.requirement(45, 46),
    "transports_get_weights_model_and_strategy_with_each_call": pytest.mark.requirement(39, 40),
    "the_transports_setup_methods_are_the_two_sides_of_connect": pytest.mark.requirement(41),
    "a_cancelled_send_loses_nothing": pytest.mark.requirement(192),
    "the_loop_is_not_blocked_by_a_large_update": pytest.mark.requirement(191),
    "weights_for_each_worker_are_its_own": pytest.mark.requirement(71),
    "several_models_are_applied_in_one_call": pytest.mark.requirement(199),
    "a_worker_that_is_late_is_named_and_not_lost": pytest.mark.requirement(195),
    "no_hold_is_torn_while_calls_apply_at_full_speed": pytest.mark.requirement(194),
    "no_forward_is_torn_while_updates_apply_as_they_come": pytest.mark.requirement(194),
}
OF_RPC: dict[str, pytest.MarkDecorator] = {
    **OF_BOTH,
    "coroutines_receive_in_a_loop_of_the_workers": pytest.mark.requirement(190, 192),
}
OF_RAY: dict[str, pytest.MarkDecorator] = {
    **OF_BOTH,
    "a_restarted_actor_finds_its_target": pytest.mark.requirement(196),
    "a_shutdown_ends_a_connect_that_waits": pytest.mark.thorough,
    "elastic_actors_come_and_go": pytest.mark.requirement(196, 212),
    "coroutines_receive_in_an_actors_loop": pytest.mark.requirement(190, 192),
    "a_connect_that_is_cancelled_may_be_called_again": pytest.mark.requirement(192),
    "the_page_of_rpc_collector_connects_a_receiver": pytest.mark.requirement(156),
    "only_the_sender_of_a_transform_connects": pytest.mark.requirement(33),
    "a_collector_updates_torchrls_transform": pytest.mark.requirement(33),
    "a_collector_may_be_an_actor": pytest.mark.thorough,
    "nothing_stays_in_the_store": pytest.mark.thorough,
    "tensors_of_all_kinds_go_through_the_store": pytest.mark.requirement(32),
    **{f"gloo {case.__name__}": pytest.mark.requirement(32, 33) for case in (*WITH_GLOO, *dict(ONCE_WITH_GLOO))},
}


@pytest.fixture(scope="module")
def ray() -> Iterator[Outcomes]:
    """What the cases have come to."""
    pytest.importorskip("ray")
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


@pytest.fixture(scope="module")
def rpc() -> Iterator[Outcomes]:
    """What the cases have come to."""
    outcomes = Outcomes(run_with_rpc)
    yield outcomes
    assert outcomes.ended_by_itself


def cases(table: dict[str, pytest.MarkDecorator]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in table.items()])


@cases(OF_RAY)
def test_ray(ray: Outcomes, name: str) -> None:
    ray.check(name)


@cases(OF_RPC)
def test_rpc(rpc: Outcomes, name: str) -> None:
    rpc.check(name)


def test_first_calls_that_come_at_once_may_find_nothing_imported() -> None:
    assert in_program(six_first_calls_at_once) == [3.0] * 6
