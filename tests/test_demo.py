"""The demonstration: it learns, it shows, and it always ends."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console

from asyncsync import WorkerStatus
from asyncsync.demo.crew import Options
from asyncsync.demo.record import EPISODES, Record, Sample
from asyncsync.demo.run import run
from asyncsync.demo.trainer import Learner, train
from asyncsync.demo.view import line, panel, show, sparkline, summary
from asyncsync.demo.worker import ENVIRONMENTS, STEP, TIME, Steps
from helpers.command import children_of, finish, private_directories, start

PNG = b"\x89PNG\r\n\x1a\n"


def demo(cwd: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return start("-m", "asyncsync", "demo", *arguments, cwd=cwd)


def until(process: subprocess.Popen[str], word: str) -> str:
    """The demo's first line with this word."""
    assert process.stdout is not None
    for text in process.stdout:
        if word in text:
            return text
    raise AssertionError(f"the demo has ended without {word!r}: {finish(process)}")


# -- it learns -------------------------------------------------------------------------------------------------------


class Versions(Record):
    """A record that remembers the newest version at each batch, and the versions that acted in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.newest: list[int] = []
        self.acted: dict[int, list[int]] = {}

    def batch(self, worker: int, steps: Steps, version: int) -> None:
        super().batch(worker, steps, version)
        self.newest.append(version)
        self.acted.setdefault(worker, []).extend(steps["version"][:, 0].tolist())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The demo runs torch with one thread; what is run in this process must not change it for the other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("scheme", ["shared", "process", "zmq"])
async def test_every_update_is_a_version_and_every_step_knows_its_own(one_thread: None, scheme: str) -> None:
    record = Versions(workers=2, target=40, scheme=scheme)
    await train(Options(target=40, scheme=scheme), record)
    assert record.solved
    assert record.mean_return >= 40
    assert record.newest == list(range(1, len(record.newest) + 1))
    assert record.versions == len(record.newest) + 1
    for versions in record.acted.values():
        assert versions == sorted(versions), "a worker has gone back to an older version"
        assert versions[0] == 1
    assert {worker: status.version for worker, status in record.status.items()} == dict.fromkeys(
        (0, 1), record.versions
    )
    if scheme == "zmq":
        assert (record.slots, record.bytes_sent > 0) == (0, True)
    else:
        # Both slabs are small, and workers copy them out: one is the newest version, one is written.
        assert (record.slots in (2, 3), record.bytes_sent) == (True, 0), "the weights lie in shared memory"
    assert private_directories() == []


def test_without_a_terminal_it_prints_lines_a_summary_and_a_plot(tmp_path: Path) -> None:
    with demo(
        tmp_path, "--target-return", "40", "--max-seconds", "40", "--workers", "1", "--plot", "return.png"
    ) as process:
        code, out, err = finish(process)
        assert (code, err) == (0, ""), err
        heading, *lines = out[: out.index("\nsolved:")].splitlines()
        assert heading == "asyncsync: PPO on CartPole-v1, weights through shared memory"
        assert "starting the workers" in lines[0]
        assert "\x1b" not in out
        versions = [int(re.search(r"version (\d+)", text)[1]) for text in lines]  # type: ignore[index]
        assert versions == sorted(versions)
        assert "lag" in lines[-1]
        reached = re.search(r"solved: mean return ([\d.]+) over the last 100 episodes", out)
        assert reached is not None
        assert float(reached[1]) >= 40
        assert re.search(
            r"weights +\d+ versions published through shared memory: each written once, into one of \d slots\n", out
        )
        assert re.search(r"worker 0 +live, version \d+, lag 0", out)
        assert (tmp_path / "return.png").read_bytes().startswith(PNG)


# -- it always ends ----------------------------------------------------------------------------------------------------


def test_a_deadline_ends_it_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    plot = tmp_path / "plot.png"
    assert run(Options(max_seconds=0.5, plot=str(plot))) == 1  # while the workers are still importing
    out, err = capsys.readouterr()
    assert "not solved in time: mean return – over the last 0 episodes" in out
    assert err == "\nasyncsync demo: the target, 475, was not reached within 0.5 s\n"
    assert not plot.exists()
    assert private_directories() == []


@pytest.mark.parametrize(
    ("phase", "arguments"),
    [("learning", ["--scheme", "process"]), ("starting", ["--scheme", "zmq", "--uvloop"])],
    ids=["process_on_asyncio", "zmq_on_uvloop_while_starting"],
)
def test_ctrl_c_ends_it_within_seconds_and_cleanly(phase: str, arguments: list[str], tmp_path: Path) -> None:
    with demo(tmp_path, "--target-return", "1000", *arguments) as process:
        until(process, phase)
        workers = children_of(process)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        code, out, err = finish(process, timeout=10)
        assert time.monotonic() - began < 10
        assert (code, err) == (130, "")
        assert "interrupted: mean return" in out
        assert len(workers) == 2 or phase == "starting"
        assert not any(worker.is_running() for worker in workers)
        assert private_directories() == []


def test_a_killed_worker_ends_it_and_is_named(tmp_path: Path) -> None:
    with demo(tmp_path, "--target-return", "1000") as process:
        until(process, "learning")
        workers = children_of(process)
        workers[1].kill()
        code, out, err = finish(process, timeout=15)
        assert code == 1
        assert "failed: mean return" in out
        assert err == f"\nasyncsync demo: worker 1 (pid {workers[1].pid}) was killed by SIGKILL\n"
        assert not workers[0].is_running()
        assert private_directories() == []


def test_a_killed_trainer_takes_its_workers_along(tmp_path: Path) -> None:
    with demo(tmp_path, "--target-return", "1000", "--workers", "1") as process:
        until(process, "learning")
        workers = children_of(process)
        assert len(workers) == 1
        process.kill()
        assert psutil.wait_procs(workers, timeout=10)[1] == []
        _, _, err = finish(process)
        assert err == ""
        (left,) = private_directories()  # nobody was left to remove it; the next sender does
        shutil.rmtree(Path(tempfile.gettempdir()) / left)


# -- it shows ----------------------------------------------------------------------------------------------------------


def batch(returns: float, version: int) -> Steps:
    """One batch in which every environment ends one episode."""
    steps = np.zeros((TIME, ENVIRONMENTS), STEP)
    steps["episode_return"] = np.nan
    steps["episode_return"][-1] = returns
    steps["version"] = version
    return steps


@pytest.fixture
def record() -> Record:
    record = Record(workers=2, target=475, scheme="zmq")
    for version in range(1, 21):
        record.batch(version % 2, batch(20.0 * version, max(1, version - 2)), version)
    status = {
        0: WorkerStatus(20, 20, 0, 0.1, "live", 400_000),
        1: WorkerStatus(17, 20, 3, 4.2, "slow", 300_000),
    }
    record.phase = "learning"
    record._learning = 0.0
    record._samples.append(Sample(2.0, (record.frames[0], record.frames[1]), status, slots=3))
    return record


def rendered(record: Record, width: int) -> list[str]:
    console = Console(record=True, width=width, force_terminal=True, file=StringIO())
    console.print(panel(record))
    return console.export_text().splitlines()


def test_the_view_shows_return_version_lag_and_rates(record: Record) -> None:
    text = "\n".join(rendered(record, 100))
    assert "PPO on CartPole-v1 · ZeroMQ" in text
    assert re.search(r"episode return +347\.2 .* 475 +mean of 100", text)
    assert re.search(r"version +20 +frames +40,960 +frames/s +20,480 +sent +341\.8 KiB/s", text)
    assert re.search(r"0 +live +20 +0 +1\.9 +10,240 +195\.3 KiB", text)
    assert re.search(r"1 +slow +17 +3 +1\.8 +10,240 +146\.5 KiB", text)
    assert "learning · " in text


def test_in_shared_memory_the_view_shows_the_slots(record: Record) -> None:
    for scheme, name in [("shared", "shared memory"), ("process", "multiprocessing")]:
        record.scheme = scheme
        text = "\n".join(rendered(record, 100))
        assert f"PPO on CartPole-v1 · {name}" in text
        assert re.search(r"version +20 +frames +40,960 +frames/s +20,480 +slots +3", text)
        assert re.search(r"1 +slow +17 +3 +1\.8 +10,240 +│", text)
        assert "bytes/s" not in text
        assert "frames/s 20,480  slots 3  worker 0: version 20 lag 0" in line(record)
        assert f"20 versions published through {name}: each written once, into one of 3 slots\n" in summary(record)


@pytest.mark.parametrize("scheme", ["shared", "zmq"])
def test_the_view_fits_into_80_columns(record: Record, scheme: str) -> None:
    record.scheme = scheme
    wide, narrow = rendered(record, 200), rendered(record, 80)
    assert max(map(len, wide)) <= 80
    assert len(narrow) == len(wide), "something was wrapped"


def test_the_view_is_there_before_anything_has_happened() -> None:
    empty = Record(workers=3, target=475)
    assert any("starting the workers" in text for text in rendered(empty, 80))
    assert "return –" in line(empty)
    assert "mean return – over the last 0 episodes" in summary(empty)


async def test_in_a_terminal_the_view_redraws_itself(record: Record) -> None:
    file = StringIO()
    async with show(record, Console(file=file, force_terminal=True, width=100)):
        while file.getvalue().count("PPO on CartPole-v1") < 2:  # noqa: ASYNC110 - a file has no events
            await asyncio.sleep(0.01)
        record.end()
    drawn = file.getvalue()
    assert "\x1b[1A" in drawn or "\x1b[2K" in drawn  # back to its first line
    assert "solved · " in drawn
    assert drawn.endswith("\x1b[?25h")  # the cursor is back


def test_a_line_says_the_same(record: Record) -> None:
    assert re.search(
        r"learning  return 347\.2  version 20  frames/s 20,480  sent 341\.8 KiB/s  "
        r"worker 0: version 20 lag 0  worker 1: version 17 lag 3$",
        line(record),
    )


def test_the_sparkline_rises_with_the_return(record: Record) -> None:
    record._end = 10.0
    record.episodes = [(i / 10, 4.75 * i) for i in range(100)]
    assert sparkline(record, 8) == "▁▂▃▄▄▅▆▇"


# -- the parts -------------------------------------------------------------------------------------------------------


def test_the_mean_return_is_over_the_last_hundred_episodes() -> None:
    record = Record(workers=1, target=100)
    record.batch(0, batch(0.0, 1), 1)
    assert not record.solved  # 16 episodes are not 100
    for _ in range(EPISODES // ENVIRONMENTS + 1):
        record.batch(0, batch(100.0, 1), 2)
    assert record.mean_return == 100
    assert record.solved


def test_steps_in_which_an_environment_was_reset_teach_nothing() -> None:
    learner = Learner(seed=0)
    steps = batch(1.0, 1)
    steps["log_prob"] = -0.7
    steps["reset"][5] = True
    other = steps.copy()
    other["reward"][4], other["terminated"][4], other["terminated"][3] = 0, True, True
    advantage, target = learner.estimate(other)
    assert advantage.shape == target.shape == (TIME * ENVIRONMENTS,)
    # Nothing after an episode's end reaches back over it.
    again = other.copy()
    again["reward"][6:] = 7
    assert torch.equal(learner.estimate(again)[0].view(TIME, -1)[:4], advantage.view(TIME, -1)[:4])
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    learner.learn(other)
    assert any(not torch.equal(old, new) for old, new in zip(before, learner.policy.parameters(), strict=True))
