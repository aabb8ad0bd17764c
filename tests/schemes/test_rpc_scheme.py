"""RPC's scheme, on objects of a real RPC agent: helpers/rpc_program.py runs the cases, in a program of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import asyncsync
import asyncsync.sync
from helpers.called_faults import OF_TORN_READS
from helpers.called_workers import APIS, Outcomes
from helpers.programs import in_program
from helpers.rpc_program import run_with_rpc
from helpers.rpc_unimported import six_first_calls_at_once

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def rpc() -> Iterator[Outcomes]:
    """What the cases have come to, all of them with both APIs."""
    outcomes = Outcomes(run_with_rpc)
    yield outcomes
    assert outcomes.ended_by_itself


@pytest.mark.requirement(14)
def test_init_on_sender_registers_the_rrefs(rpc: Outcomes) -> None:
    rpc.check("transports_and_objects_are_registered_by_init")


@pytest.mark.requirement(20)
def test_connect_is_a_no_op_and_the_first_send_syncs(rpc: Outcomes) -> None:
    rpc.check("connect_does_what_is_documented")


@pytest.mark.requirement(22, 31)
def test_a_send_calls_each_object(rpc: Outcomes) -> None:
    rpc.check("sends_call_each_worker")


@pytest.mark.requirement(21, 22)
def test_there_is_no_receiver_loop(rpc: Outcomes) -> None:
    rpc.check("without_a_call_nothing_is_applied")


@pytest.mark.requirement(71)
def test_only_the_chosen_worker_is_called(rpc: Outcomes) -> None:
    rpc.check("only_the_chosen_worker_is_called")


@pytest.mark.requirement(195)
def test_an_object_in_the_place_of_another_is_named(rpc: Outcomes) -> None:
    rpc.check("an_object_in_the_place_of_another_is_named")


@pytest.mark.requirement(195)
def test_what_a_worker_raises_is_its_failure(rpc: Outcomes) -> None:
    rpc.check("what_a_worker_raises_is_its_failure")


@pytest.mark.requirement(195)
def test_weights_that_do_not_fit_are_refused_by_name(rpc: Outcomes) -> None:
    rpc.check("weights_that_do_not_fit_are_refused_by_name")


@pytest.mark.requirement(195)
def test_a_killed_worker_is_named_and_the_others_go_on(rpc: Outcomes) -> None:
    rpc.check("a_killed_worker_is_named_and_the_others_go_on", APIS[:1])


@pytest.mark.requirement(194, 195)
def test_a_worker_killed_amid_a_transfer_is_named_at_once(rpc: Outcomes) -> None:
    rpc.check("a_worker_killed_amid_a_transfer_is_named_at_once", APIS[1:])


@pytest.mark.requirement(195)
def test_a_trainer_killed_amid_a_transfer_is_noticed(rpc: Outcomes) -> None:
    rpc.check("a_trainer_killed_amid_a_transfer_is_noticed", APIS[1:])


@pytest.mark.requirement(194)
@pytest.mark.parametrize("name", OF_TORN_READS)
def test_no_read_is_torn_in_a_worker(rpc: Outcomes, name: str) -> None:
    rpc.check(name)


@pytest.mark.requirement(71)
def test_weights_for_each_worker_are_its_own(rpc: Outcomes) -> None:
    rpc.check("weights_for_each_worker_are_its_own")


@pytest.mark.requirement(199)
def test_several_models_are_applied_in_one_call(rpc: Outcomes) -> None:
    rpc.check("several_models_are_applied_in_one_call")


@pytest.mark.requirement(195)
def test_a_worker_that_is_late_is_named_and_not_lost(rpc: Outcomes) -> None:
    rpc.check("a_worker_that_is_late_is_named_and_not_lost")


@pytest.mark.requirement(198)
def test_of_many_publications_the_newest_is_applied(rpc: Outcomes) -> None:
    rpc.check("of_many_publications_the_newest_is_applied")


@pytest.mark.requirement(45)
def test_the_transports_receive_takes_a_timeout(rpc: Outcomes) -> None:
    rpc.check("receive_takes_a_timeout")


@pytest.mark.requirement(39, 40)
def test_transports_get_weights_model_and_strategy_with_each_call(rpc: Outcomes) -> None:
    rpc.check("transports_get_weights_model_and_strategy_with_each_call")


@pytest.mark.requirement(41)
def test_the_transports_setup_methods_are_the_two_sides_of_connect(rpc: Outcomes) -> None:
    rpc.check("the_transports_setup_methods_are_the_two_sides_of_connect")


@pytest.mark.requirement(4)
def test_a_worker_may_pull_and_wait_for_a_version(rpc: Outcomes) -> None:
    rpc.check("a_worker_may_pull_and_wait_for_a_version")


@pytest.mark.requirement(190, 192)
def test_coroutines_receive_in_a_loop_of_the_workers_and_may_be_cancelled(rpc: Outcomes) -> None:
    rpc.check("coroutines_receive_in_a_loop_of_the_workers")


@pytest.mark.requirement(218)
def test_received_weights_are_the_callers_own(rpc: Outcomes) -> None:
    rpc.check("received_weights_are_the_callers_own")


@pytest.mark.requirement(192)
def test_a_cancelled_send_loses_nothing(rpc: Outcomes) -> None:
    rpc.check("a_cancelled_send_loses_nothing")


@pytest.mark.requirement(191)
def test_the_loop_is_not_blocked_by_a_large_update(rpc: Outcomes) -> None:
    rpc.check("the_loop_is_not_blocked_by_a_large_update")


def test_first_calls_that_come_at_once_may_find_nothing_imported() -> None:
    assert in_program(six_first_calls_at_once) == [3.0] * 6


@pytest.mark.requirement(231)
def test_from_backend_knows_rpc() -> None:
    for module in (asyncsync, asyncsync.sync):
        assert type(module.WeightSyncScheme.from_backend("rpc")) is module.RPCWeightSyncScheme
