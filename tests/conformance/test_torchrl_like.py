"""Blocking schemes with TorchRL's collectors of several processes: what TorchRL's documentation and its own tests of
weight synchronisation ask for, but for what demands that a worker sees weights that were not sent.

Each case is a program of its own, with processes that import TorchRL.
"""

from __future__ import annotations

import pytest

from helpers import torchrl_programs as programs
from helpers.collecting_single import needs_torchrl
from helpers.collecting_torchrl import in_program

pytest.importorskip("gymnasium")
pytestmark = [needs_torchrl, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

SHARED, PROCESS, ZMQ = "SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "ZMQWeightSyncScheme"
SYNC, ASYNC = "MultiSyncCollector", "MultiAsyncCollector"
thorough = pytest.mark.thorough


@thorough
@pytest.mark.parametrize("name", [SHARED, PROCESS, ZMQ])
def test_r204_workers_of_a_multi_sync_collector_have_the_trainers_weights_after_each_update(name: str) -> None:
    found = in_program(programs.trained, name, SYNC)
    assert [batch["shown"] for batch in found] == [[4.0 * i] for i in range(6)]
    assert [batch["workers"] for batch in found] == [[4.0 * i] * 2 for i in range(1, 7)]
    assert {batch["lag"] for batch in found} == {0}


@pytest.mark.parametrize("name", [ZMQ, pytest.param(PROCESS, marks=thorough), pytest.param(SHARED, marks=thorough)])
def test_r204_workers_of_a_multi_async_collector_have_the_trainers_weights_after_each_update(name: str) -> None:
    found = in_program(programs.trained, name, ASYNC)
    assert {batch["lag"] for batch in found} == {0}
    for i, batch in enumerate(found):
        # A batch may have been begun while the one before it was not yet answered by an update, and never later.
        assert all(4.0 * (i - 3) <= value <= 4.0 * i for value in batch["shown"]), found


@thorough
@pytest.mark.parametrize("is_sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("name", [SHARED, PROCESS, ZMQ])
@pytest.mark.parametrize("library", ["torchrl", "asyncsync"])
def test_r034_r204_the_pages_program_with_torchrls_environments(library: str, name: str, is_sync: bool) -> None:
    frames, shapes, everywhere = in_program(programs.page, library, name, is_sync, 10000)
    assert frames == 10176
    assert shapes == ([(3, 64)] if is_sync else [(192,)])
    assert everywhere


@thorough
@pytest.mark.parametrize("name", [SHARED, PROCESS, ZMQ])
def test_r204_a_policy_factory_for_each_worker(name: str) -> None:
    """The first weights are those that each factory makes; then {worker: weights}, worker_ids, and weights for all."""
    found = in_program(programs.distinct, name)
    assert found[0] == ([4.0, 8.0], [40.0, 80.0])
    assert found[1] == ([40.0, 80.0], [40.0, 120.0])
    assert found[2] == ([40.0, 120.0], [160.0, 120.0])
    assert found[3] == ([120.0, 160.0], [200.0, 200.0])
    assert found[4][0] == [200.0]
    assert "MultiSyncCollector has no model 'policy'" in found[4][1]


@thorough
def test_r204_workers_with_one_policy_factory_begin_alike() -> None:
    begin, first, after = in_program(programs.alike, SHARED)
    assert begin[0] == begin[1]
    assert first == [begin[0]]
    assert after == [12.0, 12.0]


@thorough
def test_r204_a_policy_beside_a_policy_factory_is_what_is_sent() -> None:
    begin, unsent, after = in_program(programs.beside, ZMQ)
    assert begin == unsent == [20.0, 20.0], "what was not sent is not seen"
    assert after == [24.0, 24.0]


@thorough
@pytest.mark.parametrize(("each", "first"), [(False, [12.0, 12.0]), (True, [4.0, 8.0])], ids=["all", "each"])
@pytest.mark.parametrize("name", [SHARED, ZMQ])
def test_r204_a_sender_that_was_initialised_before_the_collector(name: str, each: bool, first: list[float]) -> None:
    assert in_program(programs.initialised, name, each) == [first, [16.0, 16.0]]


@thorough
def test_r204_a_scheme_that_moves_nothing() -> None:
    found, version = in_program(programs.unmoved)
    assert found == [[4.0]] * 6
    assert version == 6


@thorough
@pytest.mark.parametrize("name", [SHARED, PROCESS, ZMQ])
def test_r204_a_policy_that_torchrl_has_copied_to_another_device(name: str) -> None:
    found = in_program(programs.cast, name)
    assert found == [([4.0 * (i + 1)], [4.0 * (i + 2)] * 2) for i in range(4)]


@thorough
@pytest.mark.parametrize("name", [SHARED, ZMQ])
def test_r204_policy_versions_in_the_frames_and_in_a_state_dict(name: str) -> None:
    found = in_program(programs.versions, name, SYNC)
    assert found["seen"] == [[i] for i in range(6)]
    assert found["trainer"] == 6
    assert found["restored"] == 6
    assert found["workers"] == [6, 6]


@thorough
def test_r204_policy_versions_of_a_multi_async_collector() -> None:
    found = in_program(programs.versions, PROCESS, ASYNC)
    assert found["trainer"] == 6
    for i, seen in enumerate(found["seen"]):
        assert all(i - 3 <= version <= i for version in seen)


@thorough
@pytest.mark.parametrize("name", [SHARED, PROCESS, ZMQ])
def test_r204_updates_beside_start(name: str) -> None:
    found = in_program(programs.started, name)
    assert found["first"] == 8.0
    assert found["last"] == 28.0
    assert set(found["all"]) <= {8.0, 12.0, 16.0, 20.0, 24.0, 28.0}, "no frame from before the first update"


@thorough
@pytest.mark.parametrize("name", [SHARED, ZMQ])
def test_r204_a_second_model_by_its_path(name: str) -> None:
    found = in_program(programs.two_models, name)
    assert found == [([4.0, 4.0], [4.0 * (i + 2)] * 2) for i in range(3)]


@thorough
@pytest.mark.parametrize("name", [SHARED, PROCESS, ZMQ])
def test_r204_the_evaluator_evaluates_the_weights_that_it_is_given(name: str) -> None:
    assert in_program(programs.evaluated, name) == [[4.0], [8.0], [12.0]]


@thorough
@pytest.mark.parametrize("name", [SHARED, PROCESS, ZMQ])
def test_r204_an_inference_server_in_a_process_of_its_own(name: str) -> None:
    assert in_program(programs.served, name) == [(4.0, 0), (8.0, 1), (12.0, 2)]
