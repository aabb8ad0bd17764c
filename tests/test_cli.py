"""The `asyncsync` command."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

from asyncsync import __version__
from asyncsync.cli import main
from helpers.command import children_of, finish, private_directories, run, start


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["demo", "bench", "Exit codes"]),
        (["demo"], ["--workers", "--seed", "--target-return", "--max-seconds", "--plot", "--uvloop", "130"]),
        (["bench"], ["--quick", "--trials", "--json", "--uvloop", "memcpy"]),
    ],
)
def test_r205_every_command_has_help(command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*command, "--help") == 0
    out = capsys.readouterr().out
    for word in words:
        assert word in out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"asyncsync {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "invalid choice: 'dance'"),
        ([], "required: COMMAND"),
        (["demo", "--workers", "0"], "must be at least 1"),
        (["demo", "--workers", "two"], "--workers"),
        (["demo", "--seed", "-1"], "must be between 0"),
        (["demo", "--target-return", "nan"], "must be a positive number"),
        (["demo", "--max-seconds", "0"], "must be a positive number"),
        (["demo", "--plot", "/no/such/directory/plot.png"], "cannot write there: /no/such/directory"),
        (["demo", "--plot", "plot.txt"], "one of .png, .pdf or .svg"),
        (["bench", "--trials", "0"], "must be at least 1"),
        (["bench", "--json", "/no/such/directory/b.json"], "cannot write there"),
    ],
)
def test_wrong_arguments_end_with_2_and_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*arguments) == 2
    assert message in capsys.readouterr().err


WITHOUT = """
import sys
import time

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Missing())
from asyncsync.cli import main
sys.exit(main({arguments!r}))
"""


def test_missing_libraries_are_named_with_the_extras_that_have_them(tmp_path: Path) -> None:
    code, out, err = run("-c", WITHOUT.format(missing=["rich", "gymnasium"], arguments=["demo"]), cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err == 'asyncsync demo: gymnasium and rich not found; install with: pip install "asyncsync[cli,gym]"\n'


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_uvloop_is_an_extra_of_its_own(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvloop" else object())
    assert main([command, "--uvloop"]) == 1
    wanted = f'asyncsync {command}: uvloop not found; install with: pip install "asyncsync[uvloop]"\n'
    assert capsys.readouterr().err == wanted


def test_bench_measures_every_case_and_writes_json(tmp_path: Path) -> None:
    code, out, err = run("-m", "asyncsync", "bench", "--quick", "--trials", "2", "--json", "b.json", cwd=tmp_path)
    assert (code, err) == (0, ""), err
    assert private_directories() == []
    figures = json.loads((tmp_path / "b.json").read_text())
    assert figures["machine"]["cpus"] >= 1
    cases = [(row["payload"], row["workers"]) for row in figures["rows"]]
    assert cases == [(name, workers) for name in ("64 KiB", "1000 × 4 KiB", "4 MiB") for workers in (1, 2)]
    for row in figures["rows"]:
        assert row["trials"] == 2
        assert 0 < row["send"] <= row["send_worst"]
        assert 0 < row["gap"] <= row["gap_worst"]
        assert row["memcpy"] > 0
        assert row["bare"] > 0
        assert f"| {row['payload']} | {row['workers']} | {row['send']:.2f} |" in out


def test_bench_ends_when_a_worker_dies(tmp_path: Path) -> None:
    with start("-m", "asyncsync", "bench", "--quick", cwd=tmp_path) as process:
        workers = []
        while len(workers) < 2:
            time.sleep(0.05)
            workers = children_of(process)
        workers[1].kill()
        code, out, err = finish(process)
        assert (code, out) == (1, "")
        assert err == "asyncsync bench: worker 1 was killed by SIGKILL\n"
        assert not any(worker.is_running() for worker in workers)
        assert private_directories() == []
