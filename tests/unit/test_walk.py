"""benchmarks/walk.py counts what an update and a frame pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.command import EXAMPLES, finish, private_directories, start

WALK = EXAMPLES.parent / "benchmarks" / "walk.py"


@pytest.mark.thorough
@pytest.mark.timeout(240)  # one after the other, seven processes that import torch
def test_every_walk_is_counted_and_listed(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    with start(WALK, "--list", cwd=tmp_path) as process:
        code, out, err = finish(process, timeout=220)
    assert (code, err) == (0, "")
    assert private_directories() == []
    walks = {}
    for name, count, files, listed in re.findall(
        r"^(\w.*): (\d+) functions in (\d+) files .*\n((?: .*\n)*)", out, re.M
    ):
        walks[name] = functions = {line.split()[0] for line in listed.splitlines()}
        assert (len(functions), len({one.partition(":")[0] for one in functions})) == (int(count), int(files))
    updates = ["update, first", "update, chosen workers", "update, steady", "update, two models"]
    assert list(walks) == [*updates, "frame", "frame, whole way"]
    assert "asyncsync/schemes/aio.py:WeightSyncScheme.send_async" in walks["update, steady"]
    assert len(walks["update, steady"]) < len(walks["update, chosen workers"])
    assert len(walks["frame"]) < len(walks["frame, whole way"])
