"""Programs whose senders call their workers, killed without warning, and run again where they were."""

from __future__ import annotations

import pytest

from helpers.killed_programs import killed_program
from helpers.programs import in_program

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]


@pytest.mark.requirement(197)
@pytest.mark.parametrize("kind", ["RPC", pytest.param("Ray", marks=pytest.mark.ray)])
def test_the_next_program_can_be_on_the_ports_of_one_that_was_killed(kind: str) -> None:
    assert in_program(killed_program, kind, seconds=150) == {"value": 2.0, "gone": True, "again": 0}
