"""The demonstration: it learns, it shows, and it always ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict, TensorDictBase

from asyncsync import WorkerStatus
from asyncsync.demo.options import Options
from asyncsync.demo.record import EPISODES, Record, Sample
from asyncsync.demo.run import run
from asyncsync.demo.trainer import Learner, train
from asyncsync.demo.view import line, panel, show, sparkline, summary
from asyncsync.demo.workers import ENVIRONMENTS, TIME
from helpers.command import children_of, finish, private_directories, start

pytestmark = pytest.mark.timeout(120)  # several processes, each of which imports torch

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

    def batch(self, batch: TensorDictBase, version: int) -> None:
        super().batch(batch, version)
        self.newest.append(version)
        acted = batch["collector", "policy_version"]
        assert (acted == acted[0]).all(), "in one step, all environments of a worker have one policy"
        self.acted.setdefault(int(batch["worker"][0, 0]), []).extend(acted[0].tolist())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The demo runs torch with one thread; what is run in this process must not change it for the other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["shared", "zmq", "distributed"])
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
    if scheme != "shared":
        assert (record.slots, record.bytes_sent > 0) == (0, True)
    else:
        # Both slabs are small, and workers copy them out: one is the newest version, one is written.
        assert (record.slots in (2, 3), record.bytes_sent) == (True, 0), "the weights lie in shared memory"
    assert private_directories() == []


@pytest.mark.thorough
def test_without_a_terminal_it_prints_lines_a_summary_and_a_plot(tmp_path: Path) -> None:
    with demo(
        tmp_path, "--target-return", "40", "--max-seconds", "40", "--workers", "1", "--plot", "return.png"
    ) as process:
        code, out, err = finish(process)
        assert (code, err) == (0, ""), err
        heading, watch, *lines = out[: out.index("\nsolved:")].splitlines()
        assert heading == "asyncsync: PPO on CartPole-v1, weights through shared memory"
        assert re.fullmatch(r"watch it: asyncsync top ipc://\S+", watch)
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


@pytest.mark.thorough
def test_it_runs_through_rpc_too(tmp_path: Path) -> None:
    with demo(tmp_path, "--scheme", "rpc", "--target-return", "40", "--max-seconds", "40") as process:
        code, out, err = finish(process, 55)
    assert code == 0, err  # torch's agents report there that the others have ended
    assert "Traceback" not in err
    assert "weights through torch's RPC" in out
    assert re.search(r"worker 1 +live, version \d+, lag 0", out)


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_rays_processes_outlive_the_thread_that_has_started_them(tmp_path: Path) -> None:
    """The collector is made in a thread, which has ended by the first batch."""
    pytest.importorskip("ray")
    with demo(tmp_path, "--scheme", "ray", "--target-return", "40", "--max-seconds", "100") as process:
        code, out, err = finish(process, 200)
    assert (code, err) == (0, ""), err
    assert "weights through Ray" in out
    assert "watch it" not in out, "its address is told to its workers only"
    assert re.search(r"worker 1 +live, version \d+, lag 0", out)


# -- it always ends ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_deadline_ends_it_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    plot = tmp_path / "plot.png"
    assert run(Options(workers=1, max_seconds=0.5, plot=str(plot))) == 1  # while the workers are still importing
    out, err = capsys.readouterr()
    assert "not solved in time: mean return – over the last 0 episodes" in out
    assert err == "\nasyncsync demo: the target, 475, was not reached within 0.5 s\n"
    assert not plot.exists()
    assert private_directories() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("phase", "arguments"),
    [("learning", ["--scheme", "process"]), ("starting", ["--scheme", "zmq", "--uvloop", "--workers", "1"])],
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


@pytest.mark.thorough
def test_a_killed_worker_ends_it_and_is_named(tmp_path: Path) -> None:
    with demo(tmp_path, "--target-return", "1000") as process:
        until(process, "learning")
        workers = children_of(process)
        workers[1].kill()
        code, out, err = finish(process, timeout=15)
        assert code == 1
        assert "failed: mean return" in out
        # Of its end the collector tells more than the bus; either may be the first to see it.
        number = workers[1].pid
        told = rf"worker 1 \(pid {number}\) was killed by SIGKILL|worker 1 is lost: its process \({number}\) has ended"
        assert re.fullmatch(rf"\nasyncsync demo: [^\n]*({told})[^\n]*\n", err), err
        assert not workers[0].is_running()
        assert private_directories() == []


@pytest.mark.thorough
def test_a_killed_trainer_takes_its_workers_along(tmp_path: Path) -> None:
    with demo(tmp_path, "--target-return", "1000", "--workers", "1") as process:
        until(process, "learning")
        workers = children_of(process)
        assert len(workers) == 1
        process.kill()
        assert psutil.wait_procs(workers, timeout=10)[1] == []
        _, _, err = finish(process)
        assert err == ""
        assert private_directories() == []


# -- it shows ----------------------------------------------------------------------------------------------------------


def batch(worker: int, returns: float, version: int) -> TensorDict:
    """One batch in which every environment ends one episode."""
    size = (ENVIRONMENTS, TIME)
    after = {"reward": torch.full((*size, 1), returns / TIME)}
    for key in ("done", "terminated"):
        after[key] = torch.zeros(*size, 1, dtype=torch.bool)
        after[key][:, -1] = True
    torch.manual_seed(0)
    batch = TensorDict({"next": after, "action": torch.randint(2, size), "log_prob": torch.full(size, -0.7)}, size)
    batch["observation"], batch["next", "observation"] = torch.randn(*size, 4), torch.randn(*size, 4)
    batch["worker"], batch["collector", "policy_version"] = torch.full(size, worker), torch.full(size, version)
    return batch


@pytest.fixture
def record() -> Record:
    record = Record(workers=2, target=475, scheme="zmq")
    for version in range(1, 21):
        record.batch(batch(version % 2, 20.0 * version, max(1, version - 2)), version)
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
        record.end("solved")
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
    record.batch(batch(0, 0.0, 1), 1)
    assert not record.solved  # 16 episodes are not 100
    for _ in range(EPISODES // ENVIRONMENTS + 1):
        record.batch(batch(0, 128.0, 1), 2)
    assert record.mean_return == 128
    assert record.solved


def test_an_episode_goes_on_from_a_workers_batch_to_its_next() -> None:
    record = Record(workers=2, target=100)
    first, second, other = batch(0, 128.0, 1), batch(0, 128.0, 1), batch(1, 64.0, 1)
    first["next", "done"][3] = False
    first["next", "done"][5, 9] = True  # once more
    for each in (first, other, second):
        record.batch(each, 1)
    returns = [value for _, value in record.episodes]
    assert returns[:ENVIRONMENTS] == [10.0, *[128.0] * 4, 118.0, *[128.0] * 10]
    assert returns[ENVIRONMENTS : 2 * ENVIRONMENTS] == [64.0] * ENVIRONMENTS
    assert returns[2 * ENVIRONMENTS :] == [*[128.0] * 3, 256.0, *[128.0] * 12]


def test_nothing_after_an_episodes_end_reaches_back_over_it() -> None:
    learner = Learner(seed=0)
    steps = batch(0, 128.0, 1)
    steps["next", "done"][:, 4] = True
    cut, _ = learner.estimate(steps)  # off: it might have gone on
    steps["next", "terminated"][:, 4] = True
    failed, target = learner.estimate(steps)
    assert failed.shape == target.shape == (ENVIRONMENTS, TIME)
    value = learner.value(steps["observation"]).squeeze(-1).detach()
    following = learner.value(steps["next", "observation"]).squeeze(-1).detach()
    torch.testing.assert_close(failed[:, 4], 1.0 - value[:, 4])
    torch.testing.assert_close(cut[:, 4], 1.0 + 0.99 * following[:, 4] - value[:, 4])
    delta = 1.0 + 0.99 * following[:, 3] - value[:, 3]
    torch.testing.assert_close(failed[:, 3], delta + 0.99 * 0.95 * failed[:, 4])
    torch.testing.assert_close(target, failed + value)
    later = steps.clone()
    later["next", "reward"][:, 5:] = 7
    assert torch.equal(learner.estimate(later)[0][:, :5], failed[:, :5])
    assert not torch.equal(learner.estimate(later)[0][:, 5:], failed[:, 5:])


def test_learning_changes_the_policy_and_leaves_the_batch() -> None:
    learner = Learner(seed=0)
    steps = batch(0, 1.0, 1)
    kept = steps.clone()
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    learner.learn(steps)
    assert any(not torch.equal(old, new) for old, new in zip(before, learner.policy.parameters(), strict=True))
    assert (steps == kept).all()
    assert steps.keys() == kept.keys()
