"""The `asyncsync` command."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from asyncsync import __version__
from asyncsync.cli import main
from helpers.command import run

pytestmark = pytest.mark.timeout(120)  # several processes, each of which imports torch


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.requirement(205)
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["demo", "bench", "keygen", "top", "fetch", "relay", "Exit codes"]),
        (["keygen"], ["DIR", "--workers", "--name", "server.key_secret", "client_secrets", "Exit codes"]),
        (["top"], ["ENDPOINT", "--json", "--once", "--interval", "--server-key", "--client-key", "130"]),
        (["fetch"], ["ENDPOINT", "--out", "--model", "--timeout", "--server-key", "--client-key"]),
        (["relay"], ["--upstream", "--bind", "--shared", "--keep", "--server-key", "--clients", "--allow-plaintext"]),
        (
            ["demo"],
            [
                "--workers",
                "--seed",
                "--target-return",
                "--max-seconds",
                "--plot",
                "--scheme",
                "zmq",
                "--endpoint",
                "--uvloop",
                "130",
            ],
        ),
        (["bench"], ["--workers", "--size", "--reach", "--json", "Exit codes"]),
    ],
)
def test_every_command_has_help(command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of 205: demo, bench, keygen and top; fetch, too."""
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
        (["demo", "--scheme", "smoke"], "choose from 'shared', 'process', 'zmq', 'distributed', 'rpc', 'ray'"),
        (["demo", "--endpoint", "tcp://0.0.0.0:5555"], "reachable from other hosts"),
        (["top"], "required: ENDPOINT"),
        (["top", "trainer:5555"], "use ipc:///absolute/path or tcp://HOST:PORT"),
        (["top", "tcp://trainer:5555", "--interval", "0"], "must be a positive number"),
        (["fetch", "tcp://trainer:5555"], "required: --out"),
        (["fetch", "tcp://trainer:5555", "--out", "w.pt"], "must end with .safetensors"),
        (["fetch", "tcp://trainer:5555", "--out", "/no/such/w.safetensors"], "cannot write there: /no/such"),
        (["bench", "--workers", "0"], "must be at least 1"),
        (["bench", "--json", "/no/such/directory/b.json"], "cannot write there"),
        (["bench", "--size", "64"], "'64' is no size; write it as 64KiB or 16MiB"),
        (["bench", "--reach", "moon"], "choose from 'host', 'network'"),
    ],
)
def test_wrong_arguments_end_with_2_and_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["ipc:///tmp/r", "tcp://trainer:5555"], "--upstream: 'tcp://trainer:5555' is reachable from other hosts"),
        (["tcp://0.0.0.0:5556", "tcp://127.0.0.1:5555"], "or pass --allow-plaintext on a network"),
        (["tcp://127.0.0.1:5556", "tcp://127.0.0.1:5555", "--bind-key", "k"], "--bind-key alone lets nobody in"),
        (["tcp://127.0.0.1:5556", "tcp://127.0.0.1:5555", "--server-key", "k"], "--server-key alone lets nobody in"),
    ],
)
def test_a_relay_names_options_as_they_are_given(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bind, upstream, *rest = given
    assert main(["relay", "--bind", bind, "--upstream", upstream, *rest]) == 1
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


@pytest.mark.thorough
def test_missing_libraries_are_named_with_the_extras_that_have_them(tmp_path: Path) -> None:
    code, out, err = run("-c", WITHOUT.format(missing=["rich", "gymnasium"], arguments=["demo"]), cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err == 'asyncsync demo: gymnasium and rich not found; install with: pip install "asyncsync[cli,gym]"\n'


def test_uvloop_is_an_extra_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvloop" else object())
    assert main(["demo", "--uvloop"]) == 1
    wanted = 'asyncsync demo: uvloop not found; install with: pip install "asyncsync[uvloop]"\n'
    assert capsys.readouterr().err == wanted
