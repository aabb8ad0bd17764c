"""The entry point that vLLM loads in each of its processes, wherever asyncsync is installed."""

import logging
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncsync.engines.vllm import register, weight_version

SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", Path(__file__).parents[3]))
LIGHT = """
import sys
from asyncsync.engines.vllm import register, weight_version
heavy = {"torch", "tensordict", "zmq", "asyncio", "vllm"} & sys.modules.keys()
sys.exit(f"it imports {heavy}" if heavy else 0)
"""


@pytest.mark.requirement(244)
def test_the_entry_point_is_there_and_imports_nothing_heavy() -> None:
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()
    module, _, function = value.partition(":")
    assert (name, getattr(import_module(module), function)) == ("asyncsync", register)
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=30)


@pytest.mark.requirement(244)
@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllms_registry_it_warns_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asyncsync"):
        register()
    [record] = caplog.records
    assert "not available as a backend for weight transfer" in record.getMessage()
    assert "No module named 'vllm'" in record.getMessage()


def test_the_name_of_a_version_has_its_epoch() -> None:
    assert weight_version("0123", 7) == "0123:7"
