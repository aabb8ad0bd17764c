"""The demonstration: it learns, it shows, and it always ends."""

import io
import os
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from asyncsync.commands.samples import Samples
from asyncsync.demo.record import EPISODES, KEPT, Record
from asyncsync.demo.run import plain, summary, view
from asyncsync.demo.trainer import Actor, Learner
from asyncsync.demo.workers import ENVIRONMENTS, TIME
from helpers.command import children_of, finish, private_directories, start
from helpers.reports import report_of

pytestmark = pytest.mark.timeout(120)  # several processes, each of which imports torch


def demo(cwd: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return start("-m", "asyncsync", "demo", *arguments, cwd=cwd)


def workers_when(process: subprocess.Popen[str], word: str) -> list[psutil.Process]:
    """The demo's workers, when it has printed this word."""
    assert process.stdout is not None
    if not any(word in text for text in process.stdout):
        raise AssertionError(f"the demo has ended without {word!r}: {finish(process)}")
    return children_of(process)


# -- it learns -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("scheme", ["shared", pytest.param("ray", marks=pytest.mark.ray)])
def test_it_learns_and_its_summary_says_that_the_weights_followed(tmp_path: Path, scheme: str) -> None:
    with demo(tmp_path, "--scheme", scheme, "--target-return", "40", "--max-seconds", "100") as process:
        code, out, err = finish(process, 200)
    assert code == 0, err
    assert "Traceback" not in err
    assert "\x1b" not in out, "no terminal: plain lines"
    assert ("asyncsync top " in out) == (scheme in ("shared", "zmq")), "where it can be watched"
    *lines, result = out.partition("\nsolved:")[::2]
    assert "learning" in lines[0]
    assert "0 torn, 0 stale" in result
    for worker in (0, 1):
        assert any(f"worker {worker}" in line and "live" in line and "lag 0" in line for line in result.splitlines())
    assert private_directories() == []


# -- it always ends ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_deadline_ends_it_with_1(tmp_path: Path) -> None:
    with demo(tmp_path, "--workers", "1", "--max-seconds", "0.5") as process:  # while the workers are still importing
        code, out, err = finish(process)
    assert code == 1
    assert "not solved in time" in out
    assert "475" in err
    assert private_directories() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("phase", "arguments"),
    [("learning", ["--scheme", "process"]), ("starting", ["--scheme", "zmq", "--uvloop", "--workers", "1"])],
    ids=["process_on_asyncio", "zmq_on_uvloop_while_starting"],
)
def test_ctrl_c_ends_it_within_seconds_and_cleanly(phase: str, arguments: list[str], tmp_path: Path) -> None:
    with demo(tmp_path, "--target-return", "1000", *arguments) as process:
        workers = workers_when(process, phase)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        code, out, err = finish(process, timeout=10)
        assert (code, err) == (130, "")
        assert "interrupted" in out
        assert len(workers) == 2 or phase == "starting"
        assert not any(worker.is_running() for worker in workers)
        assert private_directories() == []


@pytest.mark.thorough
def test_a_killed_worker_ends_it_and_is_named(tmp_path: Path) -> None:
    with demo(tmp_path, "--target-return", "1000") as process:
        workers = workers_when(process, "learning")
        workers[1].kill()
        code, out, err = finish(process, timeout=15)
        assert code == 1
        assert "failed" in out
        for word in ("asyncsync demo: ", "worker 1", str(workers[1].pid)):
            assert word in err
        assert not workers[0].is_running()
        assert private_directories() == []


@pytest.mark.thorough
def test_a_killed_trainer_takes_its_workers_along(tmp_path: Path) -> None:
    with demo(tmp_path, "--target-return", "1000", "--workers", "1") as process:
        workers = workers_when(process, "learning")
        assert len(workers) == 1
        process.kill()
        assert psutil.wait_procs(workers, timeout=10)[1] == []
        assert finish(process)[2] == ""
        assert private_directories() == []


# -- it shows ----------------------------------------------------------------------------------------------------------


POLICY = Actor()


def batch(worker: int, returns: float, version: int) -> TensorDict:
    """One batch of POLICY's in which every environment ends one episode."""
    size = (ENVIRONMENTS, TIME)
    ended = torch.zeros(*size, 1, dtype=torch.bool)
    ended[:, -1] = True
    torch.manual_seed(0)
    observation, action = torch.randn(*size, 4), torch.randint(2, size)
    after = {"done": ended, "terminated": ended.clone(), "reward": torch.full((*size, 1), returns / TIME)}
    with torch.no_grad():
        log_prob = POLICY.log_probs(observation).gather(-1, action[..., None]).squeeze(-1)
    acted = {"observation": observation, "action": action, "log_prob": log_prob, "worker": torch.full(size, worker)}
    labels = {"policy_version": torch.full(size, version)}
    return TensorDict({**acted, "collector": labels, "next": {**after, "observation": torch.randn(*size, 4)}}, size)


def record_of(target: float = 475) -> Record:
    return Record(Samples("ipc:///tmp/demo/bus"), target)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 30), (200, 50)])
def test_the_screen_has_the_curve_and_the_workers_at_every_size(width: int, height: int) -> None:
    record = record_of()
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(view(record, console))
    assert "starting the workers" in console.export_text()
    record.phase = "learning"
    for version in range(1, 21):
        record.batch(batch(version % 2, 20.0 * version, version), version, POLICY)
    record.samples.add(report_of(20), time.monotonic())
    console.print(view(record, console))
    lines = console.export_text().splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for word in ("learning", "475", "█", "asyncsync top", "worker", "live"):
        assert word in text
    for told in (plain(record), summary(record, "zmq")):
        assert "mean return" in told
        assert "20" in told


def test_the_curve_rises_with_the_return() -> None:
    record = record_of(100)
    record._learning, record._end = 0.0, 10.0
    record.episodes = [(i / 10, float(i)) for i in range(100)]
    heights = [sum(row[7:][column] != " " for row in record.curve(27, 5)) for column in range(20)]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (1, 5)


# -- the parts -------------------------------------------------------------------------------------------------------


def test_the_mean_return_is_over_the_last_hundred_episodes() -> None:
    record = record_of(100)
    record.batch(batch(0, 0.0, 1), 1, POLICY)
    assert not record.solved  # 16 episodes are not 100
    for _ in range(EPISODES // ENVIRONMENTS + 1):
        record.batch(batch(0, 128.0, 1), 2, POLICY)
    assert record.mean_return == 128
    assert record.solved


def test_actions_of_other_weights_and_older_versions_are_counted() -> None:
    record = record_of()
    record.batch(batch(0, 1.0, 1), 1, POLICY)
    record.batch(batch(0, 1.0, 2), 2, POLICY)
    assert (record.torn, record.stale) == (0, 0)
    torn = batch(0, 1.0, 2)
    torn["log_prob"][3:5, 7] += 0.01
    record.batch(torn, 3, POLICY)
    assert (record.torn, record.stale) == (2, 0)
    back = batch(0, 1.0, 2)
    back["collector", "policy_version"][:, 9] = 1
    record.batch(back, 4, POLICY)
    assert (record.torn, record.stale) == (2, ENVIRONMENTS)
    record.batch(batch(1, 1.0, 1), 1 + KEPT, POLICY)  # of a version that nobody should act with any more
    assert record.torn == 2 + ENVIRONMENTS * TIME


def test_an_episode_goes_on_from_a_workers_batch_to_its_next() -> None:
    record = record_of(100)
    first, second, other = batch(0, 128.0, 1), batch(0, 128.0, 1), batch(1, 64.0, 1)
    first["next", "done"][3] = False
    first["next", "done"][5, 9] = True  # once more
    for each in (first, other, second):
        record.batch(each, 1, POLICY)
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
