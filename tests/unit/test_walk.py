"""benchmarks/walk.py counts what an update and a frame pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.command import EXAMPLES, finish, private_directories, start

WALK = EXAMPLES.parent / "benchmarks" / "walk.py"

PAGE = """# A page
<!-- walk: update, steady -->
what was here
<!-- end -->
Between.
<!-- walk: frame -->
<!-- end -->
The end.
"""


@pytest.mark.thorough
@pytest.mark.timeout(240)  # one after the other, seven processes that import torch
def test_every_walk_is_counted_listed_and_put_into_a_page(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with start(WALK, "--list", "--page", page, cwd=tmp_path) as process:
        code, out, err = finish(process, timeout=220)
    assert (code, err) == (0, "")
    assert private_directories() == []
    walks = {}
    for head, listed in re.findall(r"^(\S.*)\n((?: .*\n)*)", out, re.MULTILINE):
        found = re.fullmatch(
            r"(\w+.*): (\d+) functions in (\d+) files \(trainer: \d+ in \d+, worker: \d+ in \d+\)", head
        )
        assert found is not None, head
        functions = [line.split()[0] for line in listed.splitlines()]
        assert len(set(functions)) == len(functions) == int(found[2])
        assert len({name.partition(":")[0] for name in functions}) == int(found[3])
        walks[found[1]] = functions
    assert list(walks) == [
        "update, first", "update, chosen workers", "update, steady", "update, two models", "frame", "frame, whole way",
    ]  # fmt: skip
    assert "asyncsync/schemes/aio.py:WeightSyncScheme.send_async" in walks["update, steady"]
    assert len(walks["update, steady"]) < len(walks["update, chosen workers"])
    assert len(walks["frame"]) < len(walks["frame, whole way"])
    block = re.compile(r"^```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
    steady, frame = block.findall(page.read_text())
    assert block.sub("", page.read_text()) == PAGE.replace("what was here\n", "")
    for text, walk in ((steady, "update, steady"), (frame, "frame")):
        assert f"{len(walks[walk])} functions in " in text
        assert {line.split()[0] for line in text.splitlines() if line.startswith("    ")} == {
            name.partition(":")[0].removeprefix("asyncsync/") for name in walks[walk]
        }
    assert re.search(r"^    schemes/aio.py +WeightSyncScheme: send_async$", steady, re.MULTILINE)
