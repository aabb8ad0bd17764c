"""`asyncsync top` and `asyncsync fetch`: what a person sees, what a program reads, and what is saved."""

import io
import json
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import asyncsync.sync
from asyncsync.cli import main
from asyncsync.commands.samples import Samples, as_json
from asyncsync.commands.screen import line, screen
from asyncsync.weights.files import read
from asyncsync.wire.messages import Report, WorkerReport
from helpers.pairs import Model, fill, receiver_of
from helpers.reports import report_of

SIZES = [(80, 24), (200, 50)]


# -- what a person sees ------------------------------------------------------------------------------------------------


def samples_of(*reports: Report) -> Samples:
    """A second lies between any two of them; the last one has just come."""
    samples, now = Samples("tcp://trainer:5555"), time.monotonic()
    for age, report in reversed(list(enumerate(reversed(reports)))):
        samples.add(report, now - age)
    return samples


def drawn(samples: Samples, width: int, height: int | None) -> list[str]:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(screen(samples, width, height))
    return [text.rstrip() for text in console.export_text().rstrip("\n").split("\n")]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_screen_has_the_trainer_its_models_and_its_workers(width: int, height: int) -> None:
    samples = samples_of(report_of(1000), report_of(1010, sent=5 << 20))
    lines = drawn(samples, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    for word in ("tcp://trainer:5555", "4711", "1,010", "10.0 MiB/s", "1 d 02:03:04", "policy"):
        assert word in "\n".join(lines)
    assert [text.split()[:3] for text in lines[-2:]] == [["0", "live", "1,010"], ["1", "live", "1,010"]]
    for word in ("1010", "10.0", "2 live"):
        assert word in line(samples)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_everything_fits_and_what_is_in_trouble_is_shown_first(width: int, height: int) -> None:
    report = report_of(9, 250)
    workers = list(report.workers)
    workers[77] = replace(workers[77], state="lost", reason="its process (4077) has ended" + " …" * 100)
    workers[99] = replace(workers[99], state="slow", lag=3, version=6)
    workers[240] = replace(workers[240], reason="worker 240, model 'policy': these keys are missing: a, b, c and d")
    relay = replace(workers[0], index=1 << 30, role="relay")
    counts = {"live": 398, "slow": 1, "lost": 1, "relays": 1, "guests": 0}
    report = replace(
        report, workers=(relay, *workers), counts=counts, refused={"no key": 3}, dropped={"ProtocolError: …" * 20: 12}
    )
    lines = drawn(samples_of(report), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "398 live  1 slow  1 lost  of 250 · 1 relay" in text
    for words in (r"^ +relay +live", r"^ +77 +lost", r"^ +99 +slow +6", r"^ +240 +live", r"refused +3 × no key"):
        assert re.search(words, text, re.MULTILINE), text
    assert "its process (4077) has ended" in text
    shown = len(re.findall(r"^ +(\d+|relay)  (live|slow|lost)", text, re.MULTILINE))
    assert f"and {401 - shown} more" in text
    assert len(drawn(samples_of(report), width, None)) > 250, "without a height, all of them"


def test_several_relays_are_numbered_and_a_wide_screen_tells_who_is_behind_which() -> None:
    worker = report_of(9, 1).workers[0]
    relays = [replace(worker, index=(1 << 30) + i, role="relay", pid=5000 + i) for i in range(2)]
    behind = [replace(worker, index=i, pid=0, relay=relays[i].index) for i in range(2)]
    everybody = (*relays, *behind, replace(worker, index=2))
    wide, narrow = ([text.split() for text in drawn_of(everybody, *size)] for size in reversed(SIZES))
    assert [" ".join(text[:2]) for text in narrow] == ["relay 1", "relay 2", "0 live", "1 live", "2 live"]
    assert [text[-1] for text in wide] == ["5000", "5001", "1", "2", "4000"]
    assert [text[-3:] for text in wide[2:4]] == [["via", "relay", "1"], ["via", "relay", "2"]]
    alone = drawn_of((relays[0], behind[0], replace(worker, index=2)), *SIZES[1])
    assert [text.split()[0] for text in alone] == ["relay", "0", "2"]


def drawn_of(workers: tuple[WorkerReport, ...], width: int, height: int) -> list[str]:
    return drawn(samples_of(replace(report_of(9, 3), workers=workers)), width, height)[-len(workers) :]


def test_without_a_height_what_was_refused_and_what_keeps_workers_is_shown_whole() -> None:
    refused = {"a key that was taken off the list": 3, "the index of another worker": 2, "an incomplete handshake": 1}
    why = "these keys are missing: " + ", ".join(f"layer_{n}.weight" for n in range(12))
    report = report_of(9, 5, refused=refused)
    report = replace(report, workers=tuple(replace(worker, reason=why) for worker in report.workers))
    text = " ".join(" ".join(drawn(samples_of(report), 80, None)).split())
    assert "refused 3 × a key that was taken off the list · 2 × the index of another worker · 1 × an" in text
    assert text.count("layer_11.weight") == 5
    assert "…" not in text
    assert all(len(one) <= 80 for one in drawn(samples_of(report), 80, 24))


def test_a_trainer_that_is_away_is_said_to_be() -> None:
    samples = Samples("tcp://trainer:5555")
    assert "asking …" in drawn(samples, 80, 24)
    samples.failure = "no sender has answered"
    text = "\n".join(drawn(samples, 80, 24))
    assert "no sender has answered" in text
    assert "tcp://trainer:5555" in text
    samples = samples_of(report_of(7, 250))
    samples.failure = "no sender has answered at tcp://trainer:5555 within 3 s: it has refused this key, which is k.key"
    lines = drawn(samples, 80, 24)
    assert "no answer" in lines[-3]
    assert " ".join(lines[-2:]) == samples.failure
    assert len(lines) <= 24
    assert "worker  state" in "\n".join(lines), "what was known last stays"
    assert as_json(samples)["answered"] is False


@pytest.mark.parametrize(("interval", "age", "is_late"), [(1, 2.5, False), (1, 3.5, True), (5, 6, False), (5, 8, True)])
def test_an_answer_is_late_when_the_next_one_is_overdue(interval: float, age: float, is_late: bool) -> None:
    samples = Samples("tcp://trainer:5555", interval)
    samples.add(report_of(7), time.monotonic() - age)
    assert ("no answer for" in drawn(samples, 80, 24)[-1]) is is_late


def test_rates_begin_anew_with_another_trainer_and_another_worker() -> None:
    first, second = report_of(100, sent=1000), report_of(104, sent=3000)
    assert samples_of(first, second).rates().workers == {0: 2000, 1: 2000}
    restarted = replace(second, workers=(replace(second.workers[0], pid=5000, bytes_sent=10), second.workers[1]))
    assert samples_of(first, restarted).rates().workers == {0: 0, 1: 2000}
    other = replace(report_of(1, sent=10), epoch=(2, 2))
    assert samples_of(first, second, other).rates().versions is None
    far = samples_of(*(report_of(version) for version in range(20)))
    assert far.rates().versions == pytest.approx(1.0)


# -- against a trainer -------------------------------------------------------------------------------------------------


@contextmanager
def trainer(endpoint: str, **models: nn.Module) -> Iterator[Any]:
    """On the library's own loop, in a thread: it goes on while a command runs in this one."""
    bus = asyncsync.sync.Bus(endpoint, min_workers=0)
    schemes = {}
    for model_id, model in (models or {"policy": Model(1.0)}).items():
        scheme = schemes[model_id] = asyncsync.sync.ZMQWeightSyncScheme(bus=bus)
        scheme.init_on_sender(model_id=model_id, model=model)
    with bus:
        bus.connect()
        yield next(iter(schemes.values()))


def test_top_once_as_json_and_as_a_screen(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with trainer(endpoint) as scheme, receiver_of(scheme, 3, model := Model()) as receiver:
        receiver.connect()
        version = scheme.send(scheme.model) or scheme.version
        assert main(["top", endpoint, "--once", "--json"]) == 0
        [text] = capsys.readouterr().out.splitlines()
        told = json.loads(text)
        assert (told["answered"], told["endpoint"], told["version"]) == (True, endpoint, version)
        assert (told["pid"], told["num_workers"]) == (os.getpid(), None)
        assert told["states"] == {"live": 1, "slow": 0, "lost": 0, "relays": 0, "guests": 0}
        [worker] = told["workers"]
        assert (worker["index"], worker["state"], worker["versions"]) == (3, "live", {"policy": version})
        assert worker["bytes_sent"] == scheme.status()[3].bytes_sent
        assert [m["model_id"] for m in told["models"]] == ["policy"]
        assert len(told["models"][0]["digest"]) == 32
        assert main(["top", endpoint, "--once"]) == 0
        assert re.search(rf"^ +3  live +{version}", capsys.readouterr().out, re.MULTILINE)
        assert model() == {1.0}


def test_top_and_fetch_come_in_with_keys_and_say_what_is_missing_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr("asyncsync.commands.top.PATIENCE", 2.0)
    keys = tmp_path / "keys"
    assert main(["keygen", str(keys), "--name", "watcher", "worker-0=0"]) == 0
    address, accepted = f"tcp://127.0.0.1:{unused_tcp_port}", {"clients": keys / "clients"}
    bus = asyncsync.sync.Bus(address, min_workers=0, server_key=keys / "server.key_secret", **accepted)
    scheme = asyncsync.sync.ZMQWeightSyncScheme(bus=bus)
    scheme.init_on_sender(model_id="policy", model=Model(2.0))
    server = ["--server-key", str(keys / "server.key")]
    given, workers = (
        [*server, "--client-key", str(keys / f"client_secrets/{name}.key_secret")] for name in ("watcher", "worker-0")
    )
    with bus:
        bus.connect()
        capsys.readouterr()
        assert main(["top", address, "--once", "--json", *given]) == 0
        assert json.loads(capsys.readouterr().out)["answered"] is True
        assert main(["fetch", address, "--out", str(tmp_path / "w.safetensors"), *given]) == 0
        assert main(["top", address, "--once", "--json", *workers]) == 0, "any client may ask"
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["answered"] is True
        assert main(["fetch", address, "--out", str(tmp_path / "none.safetensors"), *workers]) == 1
        said = capsys.readouterr().err
        assert "worker-0's key is for worker 0 only" in said
        assert "asyncsync keygen DIR --name watcher" in said
        for missing in (["--json"], server):
            assert main(["top", address, "--once", *missing]) == 1
            assert "--client-key" in capsys.readouterr().err
    assert read(tmp_path / "w.safetensors")[0]["scale"].tolist() == [2.0] * 5


# -- in a terminal -----------------------------------------------------------------------------------------------------


class Terminal:
    """A command in a terminal of this size; what it shows is the last screen that it has drawn."""

    def __init__(self, width: int, height: int, *command: str) -> None:
        self.pid, self._descriptor = pty.fork()
        if not self.pid:
            termios.tcsetwinsize(0, (height, width))
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # this test run may be a background job, which ignores it
            environment = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES")}
            os.execve(sys.executable, [sys.executable, *command], environment | {"TERM": "xterm-256color"})
        self._text = ""

    def until(self, words: str, seconds: float = 40) -> list[str]:
        """The screen's lines, as soon as it has these words."""
        end = time.monotonic() + seconds
        while not re.search(words, "\n".join(lines := self.lines())):
            assert time.monotonic() < end, lines
            self._read()
        return lines

    def _read(self) -> None:
        """What comes within a fifth of a second, if it has not ended."""
        if select.select([self._descriptor], [], [], 0.2)[0]:
            with suppress(OSError):
                self._text += os.read(self._descriptor, 1 << 16).decode(errors="replace")

    def lines(self) -> list[str]:
        whole = self._text.split("\x1b[H")[1:]  # each is a screen, from its upper left corner
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", whole[-1] if whole else self._text)
        return [text.rstrip() for text in plain.replace("\r", "").split("\n")]

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        os.write(self._descriptor, b"\x03")
        end = time.monotonic() + 20
        while (found := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < end
            self._read()
        self.pid = 0
        return os.waitstatus_to_exitcode(found[1])

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)


@pytest.mark.requirement(205)
@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_top_in_a_terminal_follows_the_trainer_and_its_successor(endpoint: str) -> None:
    width, height = SIZES[1]
    terminal = Terminal(width, height, "-m", "asyncsync", "top", endpoint, "--interval", "0.2")
    try:
        with trainer(endpoint) as scheme, receiver_of(scheme, 0, Model(), reconnect=True) as receiver:
            receiver.connect()
            scheme.send(fill(scheme.model, 2))
            lines = terminal.until(rf"(?m)^ +0 +live +{scheme.version}")
            assert len(lines) <= height
            assert max(map(len, lines)) <= width
            assert "workers    1 live" in lines
            assert "problem" in "\n".join(lines), "it is as wide as the terminal"
            receiver.shutdown()
            terminal.until("it has left")
        terminal.until("no answer for")
        with trainer(endpoint):
            terminal.until("workers    0 live")
        assert terminal.interrupt() == 130
    finally:
        terminal.close()


# -- fetch -------------------------------------------------------------------------------------------------------------


def test_fetch_saves_what_the_trainer_has_published_last(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.safetensors"
    path.write_text("what was there before")
    model = Model(1.0)
    model.tied = model.last
    with trainer(endpoint, policy=model) as scheme:
        version = scheme.publish(fill(model, 7), metadata={"step": 3, "name": "run"})
        assert main(["fetch", endpoint, "--out", str(path), "--timeout", "20"]) == 0
    out = capsys.readouterr().out
    for word in (str(path), f"version {version}", "policy", "6 tensors"):
        assert word in out
    tensors, metadata = read(path)
    assert tensors.keys() == {"first", "inner.weight", "inner.bias", "scale", "last", "tied"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor)
    assert (metadata["version"], metadata["model_id"], metadata["format"]) == (str(version), "policy", "pt")
    assert json.loads(metadata["metadata"]) == {"step": 3, "name": "run"}
    assert len(json.loads(metadata["epoch"])) == 2
    assert sorted(os.listdir(tmp_path)) == ["w.safetensors"]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory")
@pytest.mark.parametrize("kind", ["SharedMem", "MultiProcess", "Auto"])
@pytest.mark.parametrize("map_above", [0, 1 << 20])
def test_fetch_reads_a_trainers_shared_memory(endpoint: str, tmp_path: Path, kind: str, map_above: int) -> None:
    path, model = tmp_path / "w.safetensors", Model(2.0)
    scheme = getattr(asyncsync.sync, f"{kind}WeightSyncScheme")(endpoint=endpoint, min_workers=0, map_above=map_above)
    scheme.init_on_sender(model_id="policy", model=model)
    with scheme:
        scheme.connect()
        assert main(["fetch", endpoint, "--out", str(path), "--timeout", "20"]) == 0
    tensors, _ = read(path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


def test_fetch_wants_to_know_which_of_several_models(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.safetensors"
    fetch = ["fetch", endpoint, "--out", str(path)]
    with trainer(endpoint, policy=Model(1.0), value=nn.Linear(1, 1)):
        assert main(fetch) == 1
        assert "--model" in capsys.readouterr().err
        assert main([*fetch, "--model", "critic"]) == 1
        assert "'critic'" in capsys.readouterr().err
        assert not path.exists()
        assert main([*fetch, "--model", "value"]) == 0
    assert read(path)[0].keys() == {"weight", "bias"}


def test_without_a_trainer_both_end_with_1_and_fetch_says_what_it_waits_for_and_leaves_the_file_alone(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncsync.commands.top.PATIENCE", 0.2)
    assert main(["top", endpoint, "--once"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert endpoint in err
    monkeypatch.setattr("asyncsync.commands.fetch.PATIENCE", 0.05)
    path = tmp_path / "w.safetensors"
    path.write_text("what was there before")
    assert main(["fetch", endpoint, "--out", str(path), "--timeout", "0.5"]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert "waiting" in first
    assert endpoint in last
    assert path.read_text() == "what was there before"
