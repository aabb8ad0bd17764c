"""Workers whose specification is large, and programs that start them without their guard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNGUARDED = """
from asyncsync.collectors import MultiSyncCollector
from helpers.collecting_multi import make, policy
MultiSyncCollector([make()], policy(numel=100_000), frames_per_batch=4)
"""


@pytest.mark.thorough
def test_a_missing_guard_is_named_whatever_the_size_of_the_policy(tmp_path: Path) -> None:
    program = tmp_path / "unguarded.py"
    program.write_text(UNGUARDED)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode
    assert "if __name__ == '__main__':" in ended.stderr.splitlines()[-1]
    assert "BrokenPipe" not in ended.stderr
