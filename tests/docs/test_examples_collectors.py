"""The collectors' examples run, print what they promise, and leave nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.command import EXAMPLES, finish, private_directories, start

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.timeout(120)  # up to four processes, each of which imports torch


def output(name: str, cwd: Path, *arguments: str, warns: str = "") -> str:
    """What an example prints that ends well; on stderr it prints nothing, or one warning."""
    with start(EXAMPLES / "collectors" / f"{name}.py", *arguments, cwd=cwd) as process:
        code, out, err = finish(process, timeout=100)
    assert code == 0, err
    assert re.fullmatch(rf".*UserWarning: {warns}[^\n]*\n[^\n]*\n" if warns else "", err), err
    assert private_directories() == []
    return out


@pytest.mark.requirement(34, 37)
@pytest.mark.thorough
def test_the_pages_collector_example_runs(tmp_path: Path) -> None:
    """Of 34: with this library's collector and TorchRL's 192/10000."""
    out = output("weight_sync_collectors", tmp_path, warns=r"total_frames \(10000\) is not exactly divisible")
    shown = re.findall(r"batch (\d+): shape \(3, 64\), then version (\d+) is everywhere", out)
    # Version 1 is what the workers connect with; each tenth batch has two updates.
    assert [(int(batch), int(version)) for batch, version in shown] == [(10 * k, 3 + 2 * k) for k in range(6)]
    assert "10176 frames in 53 batches" in out


@pytest.mark.requirement(204)
@pytest.mark.thorough
def test_torchrl_collector_learns_with_a_scheme_of_ours(tmp_path: Path) -> None:
    out = output("torchrl_collector", tmp_path)
    shown = re.findall(r"(\d+) frames, version (\d+): +([\d.]+) steps per trajectory", out)
    # Version 1 is what the workers connect with.
    assert [(int(frames), int(version)) for frames, version, _ in shown] == [(5000 * k, 5 * k + 1) for k in range(1, 7)]
    assert float(shown[-1][2]) > 1.5 * float(shown[0][2]), "has not learnt"


@pytest.mark.thorough
def test_async_collector_learns_and_acts_with_what_it_has_learnt(tmp_path: Path) -> None:
    out = output("async_collector", tmp_path, "--total-frames", "15360")
    shown = re.findall(r"(\d+) frames, .* s: (\d+) steps a trajectory, version (\d+)", out)
    frames, lengths, versions = (list(map(int, column)) for column in zip(*shown, strict=True))
    assert frames == [1536 * k for k in range(1, 11)]
    assert max(lengths) > 2 * lengths[0], "has not learnt"
    # 60 updates beside the first weights. A batch is at most a few of them old, but they come from two workers.
    assert versions[-1] >= 50


@pytest.mark.requirement(11, 199)
@pytest.mark.thorough
def test_multi_model_never_acts_with_two_versions(tmp_path: Path) -> None:
    updates = 10
    out = output("multi_model", tmp_path, "--updates", str(updates))
    shown = re.findall(r"update (\d+): reward was ([\d.]+), frames of two versions so far: (\d+)", out)
    assert [int(update) for update, _, _ in shown] == list(range(1, updates + 1))
    assert {mixed for _, _, mixed in shown} == {"0"}
    assert float(shown[-1][1]) < float(shown[0][1]) / 5, "the environments do not use the trained predictor"


@pytest.mark.ray
@pytest.mark.thorough
def test_ray_collector_learns_from_whichever_actor_is_ready(tmp_path: Path) -> None:
    with start(EXAMPLES / "collectors" / "ray_collector.py", cwd=tmp_path) as process:
        code, out, err = finish(process, timeout=100)
    assert code == 0, err
    shown = re.findall(r"(\d+) frames: (\d+) steps a trajectory, version (\d+)", out)
    frames, lengths, versions = (list(map(int, column)) for column in zip(*shown, strict=True))
    assert frames == [6144 * k for k in range(1, 6)]
    assert max(lengths) > 2 * lengths[0], "has not learnt"
    assert versions[-1] >= 50  # 60 updates; a batch may be a few of them old


@pytest.mark.thorough
def test_rpc_collector_tries_each_policy_with_all_nodes(tmp_path: Path) -> None:
    with start(EXAMPLES / "collectors" / "rpc_collector.py", cwd=tmp_path) as process:
        code, out, err = finish(process, timeout=100)
    assert code == 0, err  # torch's agents report there that the others have ended
    shown = re.findall(r"try (\d+): versions \[(\d+)\], the best makes (\d+) steps", out)
    assert [(int(number), int(version)) for number, version, _ in shown] == [(4 * k, 4 * k) for k in range(1, 6)]
    assert int(shown[-1][2]) > int(shown[0][2]), "has found nothing better"


@pytest.mark.thorough
def test_replay_buffer_learns_from_what_workers_add(tmp_path: Path) -> None:
    updates = 2400
    with start(EXAMPLES / "collectors" / "replay_buffer.py", "--updates", str(updates), cwd=tmp_path) as process:
        code, out, err = finish(process, timeout=100)
    assert code == 0, err
    assert "Warning" not in err  # TorchRL's log is there
    shown = re.findall(r"update (\d+): (\d+) frames, mean step (\d+), version (\d+)", out)
    count, frames, steps, versions = (list(map(int, column)) for column in zip(*shown, strict=True))
    assert count == [240 * k for k in range(1, 11)]
    assert frames == sorted(frames)
    assert versions == [1 + 12 * k for k in range(1, 11)]
    assert steps[-1] > 1.5 * min(steps), "has not learnt"
    assert private_directories() == []
