"""What all fault tests have in common."""

from collections.abc import Callable, Iterator

import pytest
import torch

from helpers.process_crew import ProcessCrew
from helpers.processes import Remote, Schemes


@pytest.fixture
def crew(schemes: Schemes, start: Callable[..., Remote]) -> Iterator[ProcessCrew]:
    """Not connected yet; its processes end with the test."""
    crew = ProcessCrew(schemes, start)
    yield crew
    vars(crew).clear()  # pytest keeps it for longer than the test's leaks are looked for


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """More processes than cores: torch's own threads would spin while the others' turn is awaited (0.1 s for 2 MiB)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
