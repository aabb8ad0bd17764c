"""Schemes that call the worker's object: Ray's on actors of a real cluster, RPC's on objects of a real agent.

helpers/ray_program.py and helpers/rpc_program.py run the cases, each in a program of its own, with both APIs.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers import ray_program, rpc_program
from helpers.called_workers import PROGRAM, Outcomes
from helpers.programs import in_program
from helpers.rpc_unimported import six_first_calls_at_once

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(950)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Outcomes]:
    """What the cases have come to."""
    left = set(Path("/tmp").glob("r-*"))
    outcomes = Outcomes(ray_program.run_with_ray)
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
    outcomes = Outcomes(rpc_program.run_with_rpc)
    yield outcomes
    assert outcomes.ended_by_itself


@pytest.mark.ray
@pytest.mark.requirement(4, 14, 19, 20, 21, 22, 31, 32, 33, 39, 40, 41, 45, 46, 71, 156, 190, 191, 192, 194, 195, 196)
@pytest.mark.requirement(198, 199, 212, 218)
@pytest.mark.parametrize("name", ray_program.NAMES)
def test_ray(ray: Outcomes, name: str) -> None:
    ray.check(name)


@pytest.mark.ray
def test_a_schemes_class_can_be_an_actors() -> None:
    assert in_program(ray_program.actor_classes) >= 18


@pytest.mark.xdist_group("rpc")
@pytest.mark.requirement(4, 14, 19, 20, 21, 22, 31, 32, 39, 40, 41, 45, 46, 71, 190, 191, 192, 194, 195, 198, 199, 218)
@pytest.mark.parametrize("name", rpc_program.NAMES)
def test_rpc(rpc: Outcomes, name: str) -> None:
    rpc.check(name)


def test_first_calls_that_come_at_once_may_find_nothing_imported() -> None:
    assert in_program(six_first_calls_at_once) == [3.0] * 6
