"""benchmarks/delta.py runs, with a model as small as can be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "delta.py"


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_it_measures_what_a_step_changes_and_what_travels(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    small = ["--steps", "2", "--words", "2000", "--width", "64", "--layers", "1"]
    command = [sys.executable, str(SCRIPT), *small, "--lr", "1e-5", "--only", "delta, zstd", "--write", str(out)]
    subprocess.run(command, check=True, timeout=170, stdout=subprocess.DEVNULL)
    (figures,) = json.loads(out.read_text())
    assert 0 < figures["changed"]["bytes"] < figures["changed"]["numbers"] < 1
    assert 0 < figures["sent"]["delta, zstd"]["bytes"] < figures["parameters"], "less than half of the bytes"
