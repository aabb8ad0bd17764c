"""examples/vllm_trainer.py, as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_trainer.py"


@pytest.mark.requirement(244)
@pytest.mark.timeout(240)
def test_vllm_trainer_learns_with_each_version(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "10"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    shown = re.findall(r"step (\d+): version (\d+), reward ([\d.]+), \[", done.stdout)
    assert [(int(step), int(version)) for step, version, _ in shown] == [(k, k) for k in range(1, 11)]
    assert float(shown[-1][2]) > float(shown[0][2]) + 0.05, "has not learnt"
