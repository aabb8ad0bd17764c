"""`asyncsync keygen`: what it makes, where, for whom to read; and that it never overwrites."""

import os
import stat
from pathlib import Path

import pytest
import zmq.auth

from asyncsync.cli import main
from asyncsync.net.keys import ClientList, read_certificate


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.requirement(205)
def test_keygen_makes_what_both_sides_need_and_says_what_goes_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    os.umask(before := os.umask(0))
    try:
        assert main(["keygen", str(keys), "--workers", "2", "--name", "gpu-host=2-5,7", "evaluator"]) == 0
    finally:
        os.umask(before)
    names = ["worker-0", "worker-1", "gpu-host", "evaluator"]
    secrets = [keys / "server.key_secret", *(keys / "client_secrets" / f"{name}.key_secret" for name in names)]
    public = [keys / "server.key", *(keys / "clients" / f"{name}.key" for name in names)]
    assert {path for path in keys.rglob("*") if path.is_file()} == {*secrets, *public}
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in public} == {0o644}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (keys, keys / "clients", keys / "client_secrets")} == {0o700}
    for open_, secret in zip(public, secrets, strict=True):
        there = read_certificate(str(secret), secret=True)
        assert zmq.auth.load_certificate(secret) == (there.public, there.secret)
        assert zmq.auth.load_certificate(open_) == (there.public, None)
    listed = ClientList(str(keys / "clients")).clients.values()
    assert {(one.name, str(one.workers)) for one in listed} == {
        ("worker-0", "0"), ("worker-1", "1"), ("gpu-host", "2-5, 7"), ("evaluator", "any"),
    }  # fmt: skip
    out = capsys.readouterr().out
    for word in ("server.key_secret", "gpu-host.key_secret: move it to the host of worker 2-5, 7"):
        assert word in out
    assert "evaluator.key_secret: for any worker: move it to the host that uses it" in out
    assert "client_key= or --client-key" in out
    for path in secrets:
        secret_key = read_certificate(str(path), secret=True).secret
        assert secret_key is not None
        assert secret_key.decode() not in out


def test_clients_are_added_beside_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path)]) == 0
    assert "--workers" in capsys.readouterr().out
    before = snapshot(tmp_path)
    assert main(["keygen", str(tmp_path), "--workers", "1"]) == 0
    assert "server.key (existed already)" in capsys.readouterr().out
    after = snapshot(tmp_path)
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 2


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        ([], "server.key_secret"),
        (["--workers", "2"], "client_secrets/worker-1.key_secret"),
        (["--name", "new", "worker-1"], "client_secrets/worker-1.key_secret"),
        (["--name", "twice", "twice=3"], "client_secrets/twice.key_secret"),
    ],
)
def test_nothing_is_overwritten_and_nothing_else_written(
    arguments: list[str], there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keygen", str(tmp_path), "--name", "worker-1=1"]) == 0
    before = snapshot(tmp_path)
    capsys.readouterr()
    assert main(["keygen", str(tmp_path), *arguments]) == 1
    assert snapshot(tmp_path) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{tmp_path}/{there}" in err


def test_where_others_may_write_no_keys_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o770)
    assert main(["keygen", str(tmp_path), "--workers", "1"]) == 1
    assert f"chmod go-w {tmp_path}" in capsys.readouterr().err
    assert snapshot(tmp_path) == {}
    (tmp_path / "file").touch()
    assert main(["keygen", str(tmp_path / "file" / "keys")]) == 1
    assert "Not a directory" in capsys.readouterr().err
