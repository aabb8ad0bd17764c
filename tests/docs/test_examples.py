"""Each example runs as it stands and prints what it promises."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from asyncsync.cli import main
from helpers.command import EXAMPLES, children_of, finish, private_directories, run, start

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(240)]  # up to three processes, each of which imports torch


NEEDS = {"gymnasium": "Gym", "ray": "Ray", "stable_baselines3": "stable_baselines3", "uvicorn": "uvicorn"}
"""Packages that an installation may lack, each with what examples have in them that need it."""


def skip_without_its_packages(path: str) -> None:
    text = (EXAMPLES / path).read_text()
    for package, word in NEEDS.items():
        if word in text and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def example(path: str, cwd: Path, *arguments: str, err: str | None = "", seconds: float = 200) -> str:
    """What an example prints that ends well and leaves nothing behind. ``err``: a pattern of what it prints on stderr;
    None: whatever Ray or RPC have to say there, whose processes may end a moment later."""
    skip_without_its_packages(path)
    with start(EXAMPLES / path, *arguments, cwd=cwd) as process:
        code, out, told = finish(process, timeout=seconds)
    assert code == 0, told
    if err is not None:
        assert re.fullmatch(err, told), told
        assert private_directories() == []
    return out


def columns(pattern: str, out: str) -> list[list[int]]:
    """The numbers that a pattern finds in each line, by their place in it."""
    return [list(map(int, column)) for column in zip(*re.findall(pattern, out), strict=True)]


def test_quickstart_delivers_every_version_and_says_goodbye(tmp_path: Path) -> None:
    out = example("quickstart.py", tmp_path)
    assert re.findall(r"sender: version (\d+) is everywhere", out) == ["2", "3", "4"]
    for worker in range(2):
        seen = re.findall(rf"worker {worker}: version (\d+), bias \[([\d.]+), [\d.]+\]", out)
        assert seen[-1] == ("4", "3.0")
        assert all(float(bias) == int(version) - 1 for version, bias in seen)
        assert f"worker {worker}: the sender has said goodbye" in out


def test_async_trainer_may_change_the_model_once_publish_has_returned(tmp_path: Path) -> None:
    out = example("async_trainer.py", tmp_path)
    for step in range(1, 6):
        assert f"step {step}: version {step + 1} applied by {{0: {step + 1}, 1: {step + 1}}}" in out
    assert "step 6: version 7 was sent from a copy" in out
    seen = re.findall(r"worker (\d): version (\d+), all parameters are \{([\d., -]+)\}", out)
    assert {("0", "7", "6.0"), ("1", "7", "6.0")} <= set(seen)
    assert all(float(value) == int(version) - 1 for _, version, value in seen), "a version holds other values than sent"
    turns = re.search(r"the other coroutine had (\d+) turns", out)
    assert turns is not None
    assert int(turns[1]) > 0


def test_many_models_switches_both_models_or_neither(tmp_path: Path) -> None:
    out = example("many_models.py", tmp_path)
    versions = [int(version) for version in re.findall(r"trainer: version (\d+), both models", out)]
    assert len(versions) == 5
    assert versions == list(range(versions[0], versions[0] + 5))
    pairs = re.findall(r"worker \d: saw (\d+) pairs, (\d+) of them mixed", out)
    assert len(pairs) == 2
    assert all(int(seen) >= 1 and mixed == "0" for seen, mixed in pairs)


def test_mixed_trainer_has_both_blocking_workers_act_on_every_version(tmp_path: Path) -> None:
    out = example("mixed_trainer.py", tmp_path)
    assert re.findall(r"step (\d+): version (\d+) is everywhere", out) == [(str(n), str(n + 1)) for n in range(1, 11)]
    acted = re.findall(r"version (\d+): acted on by \[([\d, ]*)\], \[([\d., ]*)\]", out)
    assert acted[-1] == ("11", "0, 1", "10.0")
    assert all(float(value) == int(version) - 1 for version, _, value in acted), "a version holds one value"


def test_distributed_trainer_and_its_workers_are_ranks_of_torchruns(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    program += [str(EXAMPLES / "distributed_trainer.py"), "--updates", "40"]
    ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    shown = re.findall(r"trainer: version (\d+) is everywhere, loss ([\d.]+)", ended.stdout)
    assert [int(version) for version, _ in shown] == [11, 21, 31, 41]  # the first are what they connect with
    followed = re.findall(r"worker (\d): version (\d+) is wrong by ([\d.]+); the trainer has ended", ended.stdout)
    assert sorted((worker, version) for worker, version, _ in followed) == [("0", "41"), ("1", "41")]
    assert all(float(wrong) < 0.5 for *_, wrong in followed)


@pytest.mark.ray
def test_ray_trainer_learns_while_its_actors_play(tmp_path: Path) -> None:
    out = example("ray_trainer.py", tmp_path, "--rounds", "60", err=None)
    shown = re.findall(r"round (\d+): version (\d+) of (\d+) is wrong by ([\d.]+)", out)
    assert {number for number, *_ in shown} == {"0", "20", "40"}
    assert all(int(version) <= int(newest) for _, version, newest, _ in shown)
    [wrong] = re.findall(r"after 60 rounds the actions are wrong by ([\d.]+)", out)
    assert float(wrong) < float(shown[0][3])


def answered(url: str) -> int:
    """The version that has answered."""
    request = urllib.request.Request(f"{url}/predict", json.dumps({"inputs": [[1, 2], [0, 0]]}).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, list[object]] = json.loads(answer.read())
        assert found.keys() == {"outputs"}
        assert len(found["outputs"]) == 2
        return int(answer.headers["x-weight-version"])


def test_inference_server_never_fails_a_request_while_the_trainer_is_killed_and_restarted(tmp_path: Path) -> None:
    program, endpoint = EXAMPLES / "inference_server.py", f"ipc://{tmp_path}/bus"
    training = [program, "train", endpoint, "--checkpoint", tmp_path / "checkpoint.pt"]
    with start(program, "serve", endpoint, cwd=tmp_path) as server, ExitStack() as trainers:
        trainer = trainers.enter_context(start(*training, cwd=tmp_path))
        assert server.stdout is not None
        for line in server.stdout:
            if (found := re.search(r"(http://\S+) has version (\d+)", line)) is not None:
                break
        url, versions, epochs = found[1], [int(found[2])], 0
        end = time.monotonic() + 60
        while epochs < 2:
            assert time.monotonic() < end
            versions.append(answered(url))
            if versions[-1] > versions[0] + 5:
                os.killpg(trainer.pid, signal.SIGKILL)
                trainer.communicate()
                trainer = trainers.enter_context(start(*training, cwd=tmp_path))
                versions, epochs = [answered(url)], epochs + 1
            assert versions == sorted(versions), "a version has gone back"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"{url}/predict", b'{"inputs": "?"}', timeout=20)
        with urllib.request.urlopen(f"{url}/status", timeout=20) as answer:
            assert json.loads(answer.read()).keys() == {"version", "loss", "trainer", "why"}


def test_inference_server_shows_that_by_itself(tmp_path: Path) -> None:
    out = example("inference_server.py", tmp_path)
    [killed_at] = re.findall(r"version (\d+): the trainer is killed", out)
    [(first, last)] = re.findall(r"\d+ requests, all answered, by versions (\d+) to (\d+):", out)
    assert int(first) < int(killed_at) < int(last)


@pytest.mark.requirement(245)
def test_fleet_goes_on_without_a_replica_that_is_killed_and_takes_it_in_again(tmp_path: Path) -> None:
    out = example("fleet.py", tmp_path)
    shown = re.findall(r"version (\d+): answers by \[([\d, ]+)\](.*)", out)
    assert [(int(version), answers) for version, answers, _ in shown] == [
        (version, f"{version}" if 5 <= version <= 7 else f"{version}, {version}") for version in range(2, 11)
    ]
    assert [bool(failed) for *_, failed in shown] == [5 <= version <= 7 for version in range(2, 11)]
    assert "replica 1 is back, and serves version 7" in out


def test_lora_sends_the_adapters_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    out = example("lora.py", tmp_path)
    [(sent, whole)] = re.findall(r"an update has (\d+) of the model's (\d+) bytes", out)
    assert int(sent) < int(whole) / 10
    shown = re.findall(r"trainer: version (\d+) is everywhere, loss ([\d.]+)", out)
    assert [int(version) for version, _ in shown] == [2, 3, 4, 5, 6]
    losses = dict(shown)
    assert float(losses["6"]) < float(losses["2"])
    for worker in range(2):
        assert f"worker {worker}: version 6 is the last; frozen weights untouched: True" in out
    answered = re.findall(r"worker \d: version (\d+) \(loss ([\d.]+|None)\) answers", out)
    assert answered
    assert all(loss == losses.get(version, "None") for version, loss in answered), "each version has its own metadata"


@pytest.mark.requirement(203)
@pytest.mark.timeout(200)
def test_multi_host_pubsub_is_followed_by_those_with_keys_only(tmp_path: Path, unused_tcp_port: int) -> None:
    """Processes of their own, and files that were carried elsewhere, as between hosts. Then the trainer is killed, and
    the next one has another key, which is put in the place of the old one."""
    keys, there = tmp_path / "keys", tmp_path / "there"
    assert main(["keygen", str(keys), "--workers", "1"]) == 0
    assert main(["keygen", str(tmp_path / "others"), "--workers", "1"]) == 0
    there.mkdir()
    for name in ("server.key", "client_secrets/worker-0.key_secret"):
        shutil.copy(keys / name, there)
    shutil.copy(tmp_path / "others/client_secrets/worker-0.key_secret", there / "other.key_secret")
    program = EXAMPLES / "multi_host_pubsub.py"
    trainer = [program, "--role", "trainer", "--endpoint", f"tcp://127.0.0.1:{unused_tcp_port}", "--pause", "0.05"]
    follower = [program, "--role", "subscriber", "--connect", f"tcp://localhost:{unused_tcp_port}"]
    follower += ["--server-key", "server.key", "--client-key"]

    def following(process: subprocess.Popen[str]) -> int:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"subscriber 0: version (\d+) \{'loss': [\d.e-]+\} is wrong by [\d.]+\n", line)
        assert match is not None, line
        return int(match[1])

    with start(*follower, "worker-0.key_secret", cwd=there) as good:
        with start(*trainer, cwd=tmp_path) as training, start(*follower, "other.key_secret", cwd=there) as stranger:
            versions = [following(good) for _ in range(10)]
            assert versions == sorted(set(versions))
            code, out, err = finish(stranger, 100)
            assert (code, out) == (1, "")
            assert "refused this key" in err
            training.kill()
            _, out, _ = finish(training)
            assert re.search(r"subscribers have \{0: \d+\}", out)
            assert re.search(r"refused \{'a key that is not listed': \d+\}", out)
        for name in ("server.key", "server.key_secret"):
            (keys / name).unlink()
        assert main(["keygen", str(keys)]) == 0
        shutil.copy(keys / "server.key", there)
        with start(*trainer, cwd=tmp_path):
            newest = following(good)
            while (version := following(good)) > newest:  # of the trainer that was killed, until it begins anew
                newest = version
    assert private_directories() == []


def test_the_trainer_for_many_hosts_goes_on_until_it_is_stopped(tmp_path: Path, unused_tcp_port: int) -> None:
    assert main(["keygen", str(tmp_path / "keys"), "--workers", "1"]) == 0
    address = f"tcp://127.0.0.1:{unused_tcp_port}"
    trainer = [EXAMPLES / "multi_host_pubsub.py", "--role", "trainer", "--endpoint", address, "--pause", "0"]
    with start(*trainer, cwd=tmp_path) as training:
        assert training.stdout is not None
        assert any("version 700," in line for line in training.stdout), "for a reader it is there as long as needed"
        training.send_signal(signal.SIGINT)
        code, _, err = finish(training)
    assert (code, err) == (0, "")


def test_sb3_workers_says_what_it_needs(tmp_path: Path) -> None:
    code, out, err = run(EXAMPLES / "sb3_workers.py", cwd=tmp_path, without="stable_baselines3")
    assert (code, out) == (1, "")
    assert err == "this example needs Stable-Baselines3: pip install stable-baselines3\n"


@pytest.mark.timeout(200)
def test_sb3_workers_play_with_what_ppo_has_learnt(tmp_path: Path) -> None:
    out = example("sb3_workers.py", tmp_path, seconds=180)
    shown = re.findall(r"trainer: (\d+) timesteps, version (\d+)", out)
    # Versions 1 and 2 are those that the two models are connected with.
    assert [(int(steps), int(version)) for steps, version in shown] == [(512 * k, k + 3) for k in range(8)]
    played = re.findall(r"worker (\d): version (\d+), of (\d+) timesteps: return (\d+)", out)
    assert {worker for worker, *_ in played} == {"0", "1"}
    assert all(int(steps) == 512 * max(0, int(version) - 3) for _, version, steps, _ in played)
    returns = [int(reward) for *_, reward in played]
    assert max(returns) > 2 * returns[0], "has not learnt"
    assert len(re.findall(r"worker \d: the last version is 11", out)) == 2


@pytest.mark.timeout(260)  # it takes 10 s on two cores that nobody else uses
def test_ppo_plain_learns_and_ends(tmp_path: Path) -> None:
    out = example("ppo_plain.py", tmp_path, seconds=240)
    shown = re.findall(r"version +(\d+)  mean return +([\d.]+)", out)
    # The workers connect with version 1, and each update brings the next one.
    assert [int(version) for version, _ in shown[:-1]] == [10 * k + 1 for k in range(1, len(shown))]
    first, last = float(shown[0][1]), float(shown[-1][1])
    assert last >= 475, "has not learnt"
    assert first < last / 2, "there was nothing to learn"


@pytest.mark.parametrize(
    ("name", "moment"),
    [("ppo_plain", "running"), ("mixed_trainer", "running"), ("quickstart", "starting")],
)
def test_ctrl_c_ends_an_example_and_its_workers_without_a_traceback(tmp_path: Path, name: str, moment: str) -> None:
    skip_without_its_packages(f"{name}.py")
    with start(EXAMPLES / f"{name}.py", cwd=tmp_path) as process:
        assert process.stdout is not None
        if moment == "running":
            assert process.stdout.readline()
        deadline = time.monotonic() + 60
        while len(workers := children_of(process)) < 2 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        code, out, err = finish(process, timeout=60)
    assert (code, err) == (0, "")
    assert out.endswith("stopped\n") or name != "ppo_plain"
    assert psutil.wait_procs(workers, timeout=0)[1] == []
    assert private_directories() == []


@pytest.mark.requirement(35, 37)
@pytest.mark.parametrize(
    "arguments",
    [[], ["--scheme", "process", "--start-method", "spawn"], ["--scheme", "zmq", "--start-method", "forkserver"]],
    ids=" ".join,
)
def test_weight_sync_standalone_runs_with_every_scheme(tmp_path: Path, arguments: list[str]) -> None:
    out = example("collectors/weight_sync_standalone.py", tmp_path, *arguments)
    assert re.findall(r"epoch (\d): version (\d+) is everywhere", out) == [(str(n), str(n + 2)) for n in range(10)]
    ends = re.findall(r"worker (\d): (\d+) calls, the last with version 11: \[10.0, 10.0\]", out)
    assert {worker for worker, _ in ends} == {"0", "1"}


def test_file_transport_brings_a_version_and_the_bus_moves_no_bytes(tmp_path: Path) -> None:
    told = ["trainer: version 2 is applied; 0 bytes by the bus", "worker: version 2, bias [1.0, 1.0]"]
    assert sorted(example("file_transport.py", tmp_path).splitlines()) == told, "two processes print"


# -- collectors --------------------------------------------------------------------------------------------------------

WARNING = r".*UserWarning: total_frames \(10000\) is not exactly divisible[^\n]*\n[^\n]*\n"


@pytest.mark.requirement(34, 37)
def test_the_pages_collector_example_runs(tmp_path: Path) -> None:
    """Of 34: with this library's collector and TorchRL's 192/10000."""
    out = example("collectors/weight_sync_collectors.py", tmp_path, err=WARNING)
    shown = re.findall(r"batch (\d+): shape \(3, 64\), then version (\d+) is everywhere", out)
    # Version 1 is what the workers connect with; each tenth batch has two updates.
    assert [(int(batch), int(version)) for batch, version in shown] == [(10 * k, 3 + 2 * k) for k in range(6)]
    assert "10176 frames in 53 batches" in out


@pytest.mark.requirement(204)
def test_torchrl_collector_learns_with_a_scheme_of_ours(tmp_path: Path) -> None:
    out = example("collectors/torchrl_collector.py", tmp_path)
    shown = re.findall(r"(\d+) frames, version (\d+): +([\d.]+) steps per trajectory", out)
    # Version 1 is what the workers connect with.
    assert [(int(frames), int(version)) for frames, version, _ in shown] == [(2000 * k, 2 * k + 1) for k in range(1, 6)]
    assert float(shown[-1][2]) > 1.5 * float(shown[0][2]), "has not learnt"


def test_async_collector_learns_and_acts_with_what_it_has_learnt(tmp_path: Path) -> None:
    out = example("collectors/async_collector.py", tmp_path, "--total-frames", "15360")
    frames, lengths, versions = columns(r"(\d+) frames, .* s: (\d+) steps a trajectory, version (\d+)", out)
    assert frames == [1536 * k for k in range(1, 11)]
    assert max(lengths) > 2 * lengths[0], "has not learnt"
    # 60 updates beside the first weights. A batch is at most a few of them old, but they come from two workers.
    assert versions[-1] >= 50


@pytest.mark.requirement(11, 199)
def test_multi_model_never_acts_with_two_versions(tmp_path: Path) -> None:
    updates = 10
    out = example("collectors/multi_model.py", tmp_path, "--updates", str(updates))
    shown = re.findall(r"update (\d+): reward was ([\d.]+), frames of two versions so far: (\d+)", out)
    assert [int(update) for update, _, _ in shown] == list(range(1, updates + 1))
    assert {mixed for _, _, mixed in shown} == {"0"}
    assert float(shown[-1][1]) < float(shown[0][1]) / 5, "the environments do not use the trained predictor"


@pytest.mark.ray
def test_ray_collector_learns_from_whichever_actor_is_ready(tmp_path: Path) -> None:
    out = example("collectors/ray_collector.py", tmp_path, err=None)
    frames, lengths, versions = columns(r"(\d+) frames: (\d+) steps a trajectory, version (\d+)", out)
    assert frames == [6144 * k for k in range(1, 6)]
    assert max(lengths) > 2 * lengths[0], "has not learnt"
    assert versions[-1] >= 50  # 60 updates; a batch may be a few of them old


def test_rpc_collector_tries_each_policy_with_all_nodes(tmp_path: Path) -> None:
    out = example("collectors/rpc_collector.py", tmp_path)
    shown = re.findall(r"try (\d+): versions \[(\d+)\], the best makes (\d+) steps", out)
    assert [(int(number), int(version)) for number, version, _ in shown] == [(4 * k, 4 * k) for k in range(1, 6)]
    assert int(shown[-1][2]) > int(shown[0][2]), "has found nothing better"


def test_replay_buffer_learns_from_what_workers_add(tmp_path: Path) -> None:
    # TorchRL's log is there.
    out = example("collectors/replay_buffer.py", tmp_path, "--updates", "2400", err=r"(?s)(?!.*Warning).*")
    count, frames, steps, versions = columns(r"update (\d+): (\d+) frames, mean step (\d+), version (\d+)", out)
    assert count == [240 * k for k in range(1, 11)]
    assert frames == sorted(frames)
    assert versions == [1 + 12 * k for k in range(1, 11)]
    assert steps[-1] > 1.5 * min(steps), "has not learnt"
