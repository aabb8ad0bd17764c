"""Workers whose specification is large, and programs that start them without their guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncsync.collectors import MultiSyncCollector
from asyncsync.collectors.multi import collector as collector_module
from asyncsync.collectors.workers.process_group import ProcessGroup
from helpers.collecting_multi import make, policy

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


@pytest.mark.thorough
def test_large_specifications_do_not_start_the_workers_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start returns before its worker has imported anything."""
    began: list[float] = []
    wait = collector_module.wait_until_built

    def watched(group: Any, *arguments: Any) -> None:
        began.append(time.monotonic())
        assert not group.infos
        wait(group, *arguments)

    monkeypatch.setattr(collector_module, "wait_until_built", watched)
    with MultiSyncCollector([make()] * 2, policy(numel=100_000), frames_per_batch=4) as collector:
        ready = time.monotonic()
        assert collector.next().numel() == 4  # type: ignore[union-attr]
    assert ready - began[0] > 0.5, "all of them were started before the first was there"


def test_workers_that_are_importing_are_ended_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """They have no environment that they would have to close, and importing torch takes seconds on a busy machine."""
    group = ProcessGroup("spawn", "Test")
    group.start([b""], {}, None)
    os.kill(group.pids[0], signal.SIGSTOP)  # however fast this machine imports
    began = time.monotonic()
    group.end(10.0)
    assert time.monotonic() - began < 5
    assert (group.alive, group.is_over, caplog.messages) == (0, True, [])
    group.close()
