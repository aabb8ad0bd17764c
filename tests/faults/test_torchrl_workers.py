"""Workers of TorchRL's collectors that fail, with this library's schemes: the trainer gets an error, without a hang."""

from __future__ import annotations

import pytest

from helpers import torchrl_programs as programs
from helpers.collecting_single import needs_torchrl
from helpers.collecting_torchrl import Programs

pytest.importorskip("gymnasium")
pytestmark = [needs_torchrl, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120), pytest.mark.thorough]

NAMES = ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "ZMQWeightSyncScheme"]


@pytest.mark.requirement(204)
@pytest.mark.parametrize("kind", ["MultiSyncCollector", "MultiAsyncCollector"])
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_worker_ends_an_update_and_the_collection_with_an_error(
    in_program: Programs, name: str, kind: str
) -> None:
    found = in_program(programs.killed, name, kind)
    assert found["update"] == {0: "PeerLost"}
    assert found["acked"] == [1]
    assert found["seconds"] < 10
    # TorchRL's own: it ends the other worker, and fails with ValueError where that takes longer than a moment. Where
    # the killed one has put a batch into the queue, there is nobody to take the files of its tensors from.
    assert found["next"] in ("RuntimeError", "ValueError", "ConnectionRefusedError", "FileNotFoundError")


@pytest.mark.requirement(204)
@pytest.mark.parametrize("name", NAMES)
def test_a_worker_that_fails_to_start_is_shown_with_its_traceback(in_program: Programs, name: str) -> None:
    kind, text = in_program(programs.fails_to_start, name)
    assert kind == "NotConnected"
    assert "Worker 1 has raised:" in text
    assert "FloatingPointError: this environment cannot be made" in text
    assert "in _broken" in text


@pytest.mark.requirement(204)
def test_a_worker_that_is_killed_before_it_is_connected(in_program: Programs) -> None:
    kind, text = in_program(programs.killed_at_start, NAMES[0])
    assert kind == "NotConnected"
    assert "was ended by signal 9 before it was connected" in text


@pytest.mark.requirement(204)
def test_weights_that_do_not_fit_the_workers_policies(in_program: Programs) -> None:
    kind, text = in_program(programs.mismatched, NAMES[2])
    assert kind == "PartialSendError"
    assert "module.lean" in text
