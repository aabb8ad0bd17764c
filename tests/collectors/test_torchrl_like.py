"""Blocking schemes with TorchRL's collectors of several processes: what TorchRL's documentation and its own tests of
weight synchronisation ask for, but for what demands that a worker sees weights that were not sent.

Each case is a program of its own; most of them fork their workers, which need not import TorchRL then.
"""

from typing import Any

import pytest

from helpers import torchrl_programs as programs
from helpers.collecting_single import needs_torchrl
from helpers.collecting_torchrl import Programs
from helpers.programs import in_program as programs_alone
from helpers.torchrl_distributed import by_their_nodes

pytest.importorskip("gymnasium")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.requirement(204),
    needs_torchrl,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(120),
]

SHARED, PROCESS, ZMQ = "SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "ZMQWeightSyncScheme"
SYNC, ASYNC = "MultiSyncCollector", "MultiAsyncCollector"


@pytest.mark.parametrize(
    ("kind", "name", "start_method"),
    [
        (ASYNC, ZMQ, "fork"),
        (ASYNC, PROCESS, "fork"),
        (ASYNC, SHARED, "fork"),
        (SYNC, ZMQ, "fork"),
        (SYNC, PROCESS, "fork"),
        (SYNC, SHARED, "fork"),
        (SYNC, ZMQ, "spawn"),
        (ASYNC, SHARED, "forkserver"),
    ],
)
def test_workers_have_the_trainers_weights_after_each_update(
    in_program: Programs, kind: str, name: str, start_method: str
) -> None:
    found = in_program(programs.trained, name, kind, start_method=start_method)
    assert {batch["lag"] for batch in found} == {0}
    if kind == SYNC:
        assert [batch["shown"] for batch in found] == [[4.0 * i] for i in range(6)]
        assert [batch["workers"] for batch in found] == [[4.0 * i] * 2 for i in range(1, 7)]
    else:
        for i, batch in enumerate(found):
            assert all(4.0 * batch["begun"] <= value <= 4.0 * i for value in batch["shown"]), found


@pytest.mark.requirement(34)
@pytest.mark.parametrize("is_sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("library", ["torchrl", "asyncsync"])
def test_the_pages_program_with_torchrls_environments(in_program: Programs, library: str, is_sync: bool) -> None:
    """To its end with one scheme, where batches come in step; with the others, its first updates."""
    found = in_program(programs.pages, library, is_sync, {SHARED: 10000 if is_sync else 2000, PROCESS: 2000, ZMQ: 2000})
    for name, expected in {SHARED: 10176 if is_sync else 2112, PROCESS: 2112, ZMQ: 2112}.items():
        frames, shapes, everywhere = found[name]
        assert frames == expected, name
        assert shapes == ([(3, 64)] if is_sync else [(192,)]), name
        assert everywhere, name


@pytest.mark.parametrize("name", [SHARED, PROCESS, ZMQ])
def test_a_policy_factory_for_each_worker(in_program: Programs, name: str) -> None:
    """The first weights are those that each factory makes; then {worker: weights}, worker_ids, and weights for all."""
    found = in_program(programs.distinct, name)
    assert found[0] == ([4.0, 8.0], [40.0, 80.0])
    assert found[1] == ([40.0, 80.0], [40.0, 120.0])
    assert found[2] == ([40.0, 120.0], [160.0, 120.0])
    assert found[3] == ([120.0, 160.0], [200.0, 200.0])
    assert found[4][0] == [200.0]
    assert "MultiSyncCollector has no model 'policy'" in found[4][1]


def test_workers_with_one_policy_factory_begin_alike(in_program: Programs) -> None:
    begin, first, after = in_program(programs.alike, SHARED)
    assert begin[0] == begin[1]
    assert first == [begin[0]]
    assert after == [12.0, 12.0]


def test_a_policy_beside_a_policy_factory_is_what_is_sent(in_program: Programs) -> None:
    begin, unsent, after = in_program(programs.beside, ZMQ)
    assert begin == unsent == [20.0, 20.0], "what was not sent is not seen"
    assert after == [24.0, 24.0]


@pytest.mark.parametrize(("each", "first"), [(False, [12.0, 12.0]), (True, [4.0, 8.0])], ids=["all", "each"])
@pytest.mark.parametrize("name", [SHARED, ZMQ])
def test_a_sender_that_was_initialised_before_the_collector(
    in_program: Programs, name: str, each: bool, first: list[float]
) -> None:
    assert in_program(programs.initialised, name, each) == [first, [16.0, 16.0]]


def test_a_scheme_that_moves_nothing(in_program: Programs) -> None:
    found, version = in_program(programs.unmoved)
    assert found == [[4.0]] * 6
    assert version == 6


@pytest.mark.parametrize(("kind", "name"), [(SYNC, SHARED), (SYNC, ZMQ), (ASYNC, PROCESS)])
def test_policy_versions_in_the_frames_and_in_a_state_dict(in_program: Programs, kind: str, name: str) -> None:
    found = in_program(programs.versions, name, kind)
    assert found["trainer"] == 6
    if kind == SYNC:
        assert found["seen"] == [[i] for i in range(6)]
        assert found["restored"] == 6
        assert found["workers"] == [6, 6]
    else:
        for i, (seen, begun) in enumerate(zip(found["seen"], found["begun"], strict=True)):
            assert all(begun <= version <= i for version in seen), found


def test_updates_beside_start(in_program: Programs) -> None:
    # Workers that TorchRL forks have a memory of the replay buffer's of their own.
    for name, found in in_program(programs.started, [SHARED, PROCESS, ZMQ], start_method="forkserver").items():
        assert found["first"] == 8.0, name
        assert found["last"] == 28.0, name
        wanted = {8.0, 12.0, 16.0, 20.0, 24.0, 28.0}
        room = {0.0}  # that a worker has taken in TorchRL's buffer, and is still to fill; frames of 1.0 would show 4
        assert set(found["all"]) <= wanted | room, f"{name}: no frame from before the first update"


ALL = [SHARED, PROCESS, ZMQ]
CASES: dict[str, tuple[list[str], Any]] = {
    "cast": (ALL, [([4.0 * (i + 1)], [4.0 * (i + 2)] * 2) for i in range(4)]),  # a policy copied to another device
    "two_models": ([SHARED, ZMQ], [([4.0, 4.0], [4.0 * (i + 2)] * 2) for i in range(3)]),  # the second by its path
    "evaluated": (ALL, [[4.0], [8.0], [12.0]]),  # by TorchRL's Evaluator
    "served": (ALL, [(4.0, 0), (8.0, 1), (12.0, 2)]),  # by its inference server, in a process of its own
}


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, (names, _) in CASES.items() for name in names])
def test_what_else_torchrl_does_with_weights(in_program: Programs, case: str, name: str) -> None:
    assert in_program(getattr(programs, case), name) == CASES[case][1]


# -- TorchRL's collectors of nodes -------------------------------------------------------------------------------------


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("DistributedCollector", True),
        ("RPCCollector", False),
        pytest.param("RayCollector", False, marks=pytest.mark.ray),
    ],
)
def test_nodes_of_torchrl_get_each_update_and_one_that_is_killed_is_an_error(
    in_program: Programs, kind: str, sync: bool
) -> None:
    if kind == "RayCollector":  # whose actors are no children of the program
        found = programs_alone(by_their_nodes, kind, sync, seconds=150)
    else:
        found = in_program(by_their_nodes, kind, sync)
    assert found["first"] == [4.0]
    assert found["shown"] == [[8.0], [12.0], [16.0], [20.0]]
    assert found["pids"] == 2
    error, message, seconds = found["lost"]
    assert error == "PartialSendError"
    assert "lost" in message
    assert seconds < 5


# -- workers that fail: the trainer gets an error, without a hang ------------------------------------------------------


@pytest.mark.parametrize("kind", [SYNC, ASYNC])
@pytest.mark.parametrize("name", ALL)
def test_a_killed_worker_ends_updates_and_collection_with_an_error(in_program: Programs, name: str, kind: str) -> None:
    found = in_program(programs.killed, name, kind)
    assert found["update"] == {0: "PeerLost"}
    assert found["acked"] == [1]
    assert found["seconds"] < 10
    # TorchRL's own: it ends the other worker, and fails with ValueError where that takes longer than a moment. Where
    # the killed one has put a batch into the queue, there is nobody to take the files of its tensors from.
    assert found["next"] in ("RuntimeError", "ValueError", "ConnectionRefusedError", "FileNotFoundError")


@pytest.mark.parametrize("name", ALL)
def test_a_worker_that_fails_to_start_is_shown_with_its_traceback(in_program: Programs, name: str) -> None:
    kind, text = in_program(programs.fails_to_start, name)
    assert kind == "NotConnected"
    assert "Worker 1 has raised:" in text
    assert "FloatingPointError: this environment cannot be made" in text
    assert "in _broken" in text


def test_a_worker_that_is_killed_before_it_is_connected(in_program: Programs) -> None:
    kind, text = in_program(programs.killed_at_start, SHARED)
    assert kind == "NotConnected"
    assert "was ended by signal 9 before it was connected" in text


def test_weights_that_do_not_fit_the_workers_policies(in_program: Programs) -> None:
    kind, text = in_program(programs.mismatched, ZMQ)
    assert kind == "PartialSendError"
    assert "module.lean" in text
