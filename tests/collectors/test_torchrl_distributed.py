"""Blocking schemes in the hands of TorchRL's collectors of nodes: through RPC, torch.distributed and Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.collecting_single import needs_torchrl
from helpers.collecting_torchrl import Programs
from helpers.programs import in_program
from helpers.torchrl_distributed import by_their_nodes

pytestmark = [needs_torchrl, pytest.mark.thorough, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def program() -> Iterator[Programs]:
    programs = Programs()
    yield programs
    programs.close()


@pytest.mark.requirement(204)
@pytest.mark.parametrize(
    "kind", ["DistributedCollector", "RPCCollector", pytest.param("RayCollector", marks=pytest.mark.ray)]
)
@pytest.mark.parametrize("sync", [True, False])
def test_nodes_of_torchrl_get_each_update_and_one_that_is_killed_is_an_error(
    program: Programs, kind: str, sync: bool
) -> None:
    if kind == "RayCollector":  # whose actors are no children of the program
        found = in_program(by_their_nodes, kind, sync, seconds=150)
    else:
        found = program(by_their_nodes, kind, sync)
    assert found["first"] == [4.0]
    assert found["shown"] == [[8.0], [12.0], [16.0], [20.0]]
    assert found["pids"] == 2
    error, message, seconds = found["lost"]
    assert error == "PartialSendError"
    assert "lost" in message
    assert seconds < 5
