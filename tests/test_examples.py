"""Each example runs as it stands and prints what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.command import EXAMPLES, private_directories, run

NAMES = ("quickstart", "async_trainer", "many_models")


@pytest.fixture
def out(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What the example printed that the test names with its parameter."""
    code, out, err = run(EXAMPLES / f"{request.param}.py", cwd=tmp_path)
    assert (code, err) == (0, ""), err
    assert private_directories() == []
    return out


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NAMES)


@pytest.mark.parametrize("out", ["quickstart"], indirect=True)
def test_quickstart_delivers_every_version_and_says_goodbye(out: str) -> None:
    assert re.findall(r"sender: version (\d+) is everywhere", out) == ["2", "3", "4"]
    for worker in range(2):
        seen = re.findall(rf"worker {worker}: version (\d+), bias \[([\d.]+), [\d.]+\]", out)
        assert seen[-1] == ("4", "3.0")
        assert all(float(bias) == int(version) - 1 for version, bias in seen)
        assert f"worker {worker}: the sender has said goodbye" in out


@pytest.mark.parametrize("out", ["async_trainer"], indirect=True)
def test_async_trainer_may_change_the_model_once_publish_has_returned(out: str) -> None:
    for step in range(1, 6):
        assert f"step {step}: version {step + 1} applied by {{0: {step + 1}, 1: {step + 1}}}" in out
    assert "step 6: version 7 was sent from a copy" in out
    seen = re.findall(r"worker (\d): version (\d+), all parameters are \{([\d., -]+)\}", out)
    assert {("0", "7", "6.0"), ("1", "7", "6.0")} <= set(seen)
    assert all(float(value) == int(version) - 1 for _, version, value in seen), "a version holds other values than sent"
    turns = re.search(r"the other coroutine had (\d+) turns", out)
    assert turns is not None
    assert int(turns[1]) > 0


@pytest.mark.parametrize("out", ["many_models"], indirect=True)
def test_many_models_switches_both_models_or_neither(out: str) -> None:
    versions = [int(version) for version in re.findall(r"trainer: version (\d+), both models", out)]
    assert len(versions) == 5
    assert versions == list(range(versions[0], versions[0] + 5))
    pairs = re.findall(r"worker \d: saw (\d+) pairs, (\d+) of them mixed", out)
    assert len(pairs) == 2
    assert all(int(seen) >= 2 and mixed == "0" for seen, mixed in pairs)
