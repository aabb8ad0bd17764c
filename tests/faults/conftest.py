"""Fixtures of the fault tests: processes to kill, and schemes that are shut down whatever happens."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

from helpers.processes import Remote, Schemes, processes


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """More processes than cores: torch's own threads would spin while the others' turn is awaited (0.1 s for 2 MiB)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Remote]]:
    async with processes() as start:
        yield start


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An explicit address: ipc, or tcp where the test is parametrised with it."""
    if getattr(request, "param", "ipc") == "ipc":
        return f"ipc://{tmp_path}/bus"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
async def schemes() -> AsyncIterator[Schemes]:
    schemes = Schemes()
    yield schemes
    await schemes.shutdown()
