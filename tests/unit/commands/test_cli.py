"""The `asyncsync` command."""

import importlib.util

import pytest

from asyncsync import __version__
from asyncsync.cli import main


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
        (["demo"], ["--workers", "--seed", "--target-return", "--max-seconds", "--scheme", "zmq", "--uvloop", "130"]),
        (["bench"], ["--workers", "--size", "--reach", "--json", "Exit codes"]),
    ],
)
def test_every_command_has_help(command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*command, "--help") == 0
    out = capsys.readouterr().out
    for word in words:
        assert word in out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"asyncsync {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["dance"], "dance"),
        ([], "COMMAND"),
        (["demo", "--workers", "0"], "--workers"),
        (["demo", "--workers", "two"], "--workers"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--target-return", "nan"], "--target-return"),
        (["demo", "--max-seconds", "0"], "--max-seconds"),
        (["demo", "--scheme", "smoke"], "'distributed'"),
        (["demo", "--endpoint", "tcp://0.0.0.0:5555"], "--endpoint"),
        (["top"], "ENDPOINT"),
        (["top", "trainer:5555"], "tcp://HOST:PORT"),
        (["top", "tcp://trainer:5555", "--interval", "0"], "--interval"),
        (["fetch", "tcp://trainer:5555"], "--out"),
        (["fetch", "tcp://trainer:5555", "--out", "w.pt"], ".safetensors"),
        (["fetch", "tcp://trainer:5555", "--out", "/no/such/w.safetensors"], "/no/such"),
        (["bench", "--workers", "0"], "--workers"),
        (["bench", "--json", "/no/such/directory/b.json"], "/no/such/directory"),
        (["bench", "--size", "64"], "'64'"),
        (["bench", "--reach", "moon"], "--reach"),
        (["keygen"], "required: DIR"),
        (["keygen", "d", "--workers", "0"], "must be between 1 and"),
        (["keygen", "d", "--name", "../escape"], "'../escape' is not a name"),
        (["keygen", "d", "--name", ".hidden"], "'.hidden' is not a name"),
        (["keygen", "d", "--name", "host="], "workers = '' is not a list"),
        (["keygen", "d", "--name", "host=3-1"], "backwards"),
    ],
)
def test_wrong_arguments_end_with_2_and_are_named(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*arguments) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (["ipc:///tmp/r", "tcp://trainer:5555"], "--upstream"),
        (["tcp://0.0.0.0:5556", "tcp://127.0.0.1:5555"], "--allow-plaintext"),
        (["tcp://127.0.0.1:5556", "tcp://127.0.0.1:5555", "--bind-key", "k"], "--bind-key"),
        (["tcp://127.0.0.1:5556", "tcp://127.0.0.1:5555", "--server-key", "k"], "--server-key"),
        (["ipc:///tmp/x", "tcp://192.0.2.1:5"], "reachable from other hosts"),
        (["tcp://127.0.0.1:5", "ipc:///tmp/up", "--shared"], "workers of this host"),
        (["ipc:///tmp/x", "ipc:///tmp/up", "--client-key", "k"], "--server-key"),
        (["ipc:///nowhere/at/all", "ipc:///tmp/up"], "cannot bind"),
    ],
)
def test_a_relay_that_cannot_work_names_options_as_they_are_given(
    given: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bind, upstream, *rest = given
    assert main(["relay", "--bind", bind, "--upstream", upstream, *rest]) == 1
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "missing", "extras"),
    [
        (["demo"], {"rich", "gymnasium"}, "cli,gym"),
        (["demo", "--uvloop"], {"uvloop"}, "uvloop"),
        (["fetch", "ipc:///tmp/up", "--out", "/tmp/w.safetensors"], {"safetensors"}, "cli"),
        (
            ["relay", "--bind=ipc:///tmp/x", "--upstream=ipc:///tmp/up", "--keep=/tmp/w.safetensors"],
            {"safetensors"},
            "cli",
        ),
    ],
)
def test_missing_libraries_are_named_with_the_extras_that_have_them(
    arguments: list[str],
    missing: set[str],
    extras: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def find_spec(name: str) -> object:
        if name not in missing:
            return object()
        if name == "rich":
            raise ModuleNotFoundError  # as finders may, of which there are others than Python's
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert main(arguments) == 1
    err = capsys.readouterr().err
    for word in (*missing, f'"asyncsync[{extras}]"'):
        assert word in err
