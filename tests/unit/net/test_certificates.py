"""Certificates, and the directory of those that are let in: what is read, what is refused, and what takes effect."""

import asyncio
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.auth
from hypothesis import given
from hypothesis import strategies as st

from asyncsync import NotConnected, ZMQWeightSyncScheme
from asyncsync.net import keys
from asyncsync.net.keys import (
    Certificate,
    ClientList,
    KeyFiles,
    Workers,
    parse_workers,
    read_certificate,
    write_new,
)

RANGES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)).map(sorted), min_size=1, max_size=8)


def certificate(workers: str = "") -> Certificate:
    return Certificate.draw(parse_workers(workers) if workers else Workers())


def put(path: Path, text: str, mode: int = 0o600) -> str:
    """Write a file as an editor does, in place; returns its path."""
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@given(RANGES)
def test_which_workers_a_key_is_for_is_read_as_it_is_written(ranges: list[list[int]]) -> None:
    text = ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)
    workers = parse_workers(text)
    assert {n for n in range(502) if n in workers} == {n for a, b in ranges for n in range(a, b + 1)}
    assert str(workers) == text
    made = certificate(text)
    assert Certificate.decode(made.encode(secret=True)) == made
    assert Certificate.decode(made.encode(secret=False)).secret == b""


@given(st.text(max_size=60))
def test_what_is_no_list_of_workers_is_never_taken_for_any(text: str) -> None:
    with suppress(ValueError):
        workers = parse_workers(text)
        assert workers.ranges
        assert parse_workers(str(workers)) == workers


@pytest.mark.parametrize(
    "text", ["", " ", "1-", "-1", "3-1", "1,,2", "a", "1;2", "0x3", "1" * 30, "٣", "0," * 300 + "0"]
)
def test_such_as(text: str) -> None:
    with pytest.raises(ValueError, match="workers = "):
        parse_workers(text)


@given(st.binary(max_size=300) | st.text(max_size=400).map(str.encode))
def test_any_other_file_is_refused_with_its_name(data: bytes) -> None:
    path = Path(os.environ["TMPDIR"]) / "garbage.key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(NotConnected, match=r"garbage\.key is not a certificate"):
        read_certificate(str(path), secret=False)


def test_the_files_are_those_of_zmq_auth_in_both_directions(tmp_path: Path) -> None:
    made = certificate("0-3")
    path = put(tmp_path / "ours.key_secret", made.encode(secret=True))
    assert zmq.auth.load_certificate(path) == (made.public, made.secret)
    public, secret = zmq.auth.create_certificates(tmp_path, "theirs", {"workers": "2"})
    os.chmod(secret, 0o600)
    there = read_certificate(secret, secret=True)
    assert (there.public, there.secret) == zmq.auth.load_certificate(secret)
    assert there.workers == Workers((range(2, 3),))
    os.chmod(public, 0o644)
    assert read_certificate(public, secret=False) == Certificate(there.public)


@pytest.mark.promise(48)
def test_a_secret_is_not_shown() -> None:
    made = certificate()
    assert made.secret.decode() not in repr(made)


GOOD = certificate("1").encode(secret=False)
BAD: dict[str, tuple[str, str]] = {
    "nothing": ("", "public-key"),
    "a short key": ('curve\n    public-key = "abc"\n', "40 characters"),
    "a key that is none": (f'curve\n    public-key = "{"#" * 40}"\n', "40 characters"),
    "two keys": (GOOD * 2, "twice"),
    "other workers": (GOOD.replace("= 1", "= x"), "workers = 'x' is not a list"),
    "a misspelt line": (GOOD.replace("workers", "Worker"), "'Worker = 1' is not under"),
    "a line without a sign": (GOOD.replace("= 1", "1"), "'workers 1' is not understood"),
    "a line at the margin": (GOOD.replace("    workers", "workers"), "'workers = 1' is not understood"),
    "too much": (GOOD + "#" * 20_000, "it has more than 16 KiB"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_wrong_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    text, why = BAD[name]
    path = put(tmp_path / "bad.key", text)
    with pytest.raises(NotConnected, match=f"{path} .*{why}"):
        read_certificate(path, secret=False)


@pytest.mark.promise(48)
def test_files_that_others_can_use_or_change_are_refused_with_the_remedy(tmp_path: Path) -> None:
    made = certificate()
    secret = put(tmp_path / "one.key_secret", made.encode(secret=True), 0o640)
    with pytest.raises(NotConnected, match=f"may read the secret key in {secret}: chmod 600 {secret}"):
        read_certificate(secret, secret=True)
    public = put(tmp_path / "one.key", made.encode(secret=False), 0o666)
    with pytest.raises(NotConnected, match=f"may change {public}.*chmod go-w {public}"):
        read_certificate(public, secret=False)
    with pytest.raises(NotConnected, match=r"one\.key has no secret key in it: give the file .*\.key_secret"):
        read_certificate(put(tmp_path / "one.key", made.encode(secret=False)), secret=True)
    with pytest.raises(NotConnected, match=r"cannot read the key in .*missing\.key: No such file"):
        read_certificate(str(tmp_path / "missing.key"), secret=False)
    with pytest.raises(NotConnected, match="Is a directory"):
        read_certificate(str(tmp_path), secret=False)
    os.mkfifo(pipe := tmp_path / "pipe.key")
    with pytest.raises(NotConnected, match=r"pipe\.key is not a file"):  # and nobody waits for its writer
        read_certificate(str(pipe), secret=False)


def test_new_files_replace_none(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("as it was")
    with pytest.raises(FileExistsError):
        write_new([(tmp_path / "new", "new"), (there, "other")], mode=0o640)
    assert there.read_text() == "as it was"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"there", "new"}, "nothing else is left"


# -- the list


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the list take place."""
    monkeypatch.setattr(keys, "MAX_REFRESH_SHARE", 1e9)


@pytest.mark.usefixtures("at_once")
def test_what_changes_in_the_directory_takes_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="asyncsync")
    listed = ClientList(str(tmp_path))
    assert listed.clients == {}
    assert "no worker can connect" in caplog.text
    one, two = certificate("0"), certificate()
    path = tmp_path / "one.key"
    put(path, one.encode(secret=False))
    put(tmp_path / "two.key", two.encode(secret=False))
    (tmp_path / "notes.txt").write_text("not a key")
    (tmp_path / ".hidden.key").write_text("being written")
    assert listed.refresh(0)
    assert {(c.name, str(c.workers)) for c in listed.clients.values()} == {("one", "0"), ("two", "any")}
    assert not listed.refresh(0), "nothing is new"
    (tmp_path / "two.key").unlink()
    assert listed.refresh(0)
    assert set(listed.clients) == {one.public}
    caplog.clear()
    for text in ("half of i", "half of it"):
        put(path, text)
        assert not listed.refresh(0), "a file that cannot be read keeps what it said"
    assert len(caplog.records) == 2, "once for each state of it"
    put(path, two.encode(secret=False))
    assert listed.refresh(0)
    assert set(listed.clients) == {two.public}
    assert not listed.refresh(100.0), "not so soon again"


@pytest.mark.usefixtures("at_once")
def test_two_files_may_change_places_and_a_directory_that_has_gone_keeps_the_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "clients"
    folder.mkdir(mode=0o700)
    files = {name: certificate(workers).encode(secret=False) for name, workers in (("one", "0"), ("two", "1"))}
    for name, text in files.items():
        put(folder / f"{name}.key", text)
    listed = ClientList(str(folder))
    before = {client.name: key for key, client in listed.clients.items()}
    put(folder / "one.key", files["two"])
    put(folder / "two.key", files["one"])
    assert listed.refresh(0)
    after = {"one": before["two"], "two": before["one"]}
    assert {client.name: key for key, client in listed.clients.items()} == after
    folder.rename(tmp_path / "elsewhere")
    for _ in range(3):
        assert not listed.refresh(0)
    assert {client.name: key for key, client in listed.clients.items()} == after
    assert caplog.text.count("cannot read the list of clients") == 1


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.wall = self.cpu = 1000.0

    def monotonic(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu


@pytest.mark.promise(46)
@pytest.mark.parametrize(("wall", "cpu", "pause"), [(30.0, 0.001, 1.0), (0.025, 0.025, 1.25), (2.0, 2.0, 1.5)])
def test_a_slow_look_puts_off_the_next_one_by_no_more_than_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall: float, cpu: float, pause: float
) -> None:
    """A stalled file system takes none of the event loop's thread; and within two seconds a key is good for nothing."""
    put(tmp_path / "one.key", certificate("0").encode(secret=False))
    monkeypatch.setattr(keys, "time", clock := Clock())
    listed = ClientList(str(tmp_path))
    scan = os.scandir

    def slow(directory: str) -> Any:
        clock.wall += wall
        clock.cpu += cpu
        return scan(directory)

    monkeypatch.setattr(os, "scandir", slow)
    assert not listed.refresh()
    (tmp_path / "one.key").unlink()
    clock.wall += pause - 0.01
    assert not listed.refresh()
    assert listed.clients
    clock.wall += 0.02
    assert listed.refresh()
    assert not listed.clients


def test_a_list_that_is_wrong_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotConnected, match=r"cannot read the list of clients in .*missing: No such file"):
        ClientList(str(tmp_path / "missing"))
    text = certificate().encode(secret=False)
    put(tmp_path / "one.key", text)
    put(tmp_path / "two.key", text)
    with pytest.raises(NotConnected, match=r"one\.key and two\.key have the same key; remove one"):
        ClientList(str(tmp_path))
    put(tmp_path / "two.key", "nothing")
    with pytest.raises(NotConnected, match=r"two\.key is not a certificate"):
        ClientList(str(tmp_path))
    tmp_path.chmod(0o770)
    with pytest.raises(NotConnected, match=f"may change {tmp_path}.*chmod go-w"):
        ClientList(str(tmp_path))


def test_the_folder_above_that_of_the_clients_is_refused(tmp_path: Path) -> None:
    """Where `asyncsync keygen` puts the server's key, which has the name of a client's."""
    server, worker = certificate(), certificate("0")
    put(tmp_path / "server.key", server.encode(secret=False))
    secret = put(tmp_path / "server.key_secret", server.encode(secret=True))
    (tmp_path / "clients").mkdir(mode=0o700)
    put(tmp_path / "clients" / "worker-0.key", worker.encode(secret=False))
    above, right = (KeyFiles((secret,), str(folder)) for folder in (tmp_path, tmp_path / "clients"))
    with pytest.raises(NotConnected, match=f"{tmp_path} has the server's own key: did you mean {tmp_path}/clients"):
        above.read_for_sender()
    assert right.read_for_sender()[1].clients.keys() == {worker.public}


# -- arguments


def test_paths_are_absolute_wherever_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    given = KeyFiles.given(["server.key", Path("old/server.key")], "clients", "~/keys/worker-{worker_idx}.key_secret")
    assert given == KeyFiles(
        (f"{tmp_path}/server.key", f"{tmp_path}/old/server.key"),
        f"{tmp_path}/clients",
        "/home/somebody/keys/worker-{worker_idx}.key_secret",
    )


async def test_a_receiver_without_a_key_leaves_nothing_in_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    watched: Any = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]
    before = set(watched)
    scheme = ZMQWeightSyncScheme(endpoint="tcp://127.0.0.1:9", server_key="server.key", clients="clients")
    scheme.init_on_receiver(model_id="policy", model={"weight": torch.zeros(1)}, worker_idx=0)
    with pytest.raises(ValueError, match="client_key"):
        await scheme.connect(timeout=1)
    await asyncio.sleep(0)
    assert set(watched) == before
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    await scheme.shutdown()
