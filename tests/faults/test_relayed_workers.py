"""`asyncsync relay` as a process of its own, between a trainer and workers of which some are stopped or killed."""

import asyncio
import json
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from asyncsync import PartialSendError, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.command import start as command
from helpers.processes import LARGE, Remote, Schemes, Start, Worker, eventually, impatient

MIB = 1 << 20
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(120)]


@pytest.fixture(params=[False, True], ids=["frames", "shared memory"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def relay(endpoint: str, down: str, cwd: Path, *options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return command("-m", "asyncsync", "relay", "--upstream", endpoint, "--bind", down, *options, cwd=cwd)


def follower(down: str, shared: bool) -> Any:
    return (SharedMemWeightSyncScheme if shared else ZMQWeightSyncScheme)(connect=down)


@pytest.mark.requirement(198, 206)
async def test_a_stopped_worker_of_a_relays_host_delays_nobody_and_memory_stays_bounded(
    endpoint: str, tmp_path: Path, shared: bool, schemes: Schemes, start: Start
) -> None:
    down = f"ipc://{tmp_path}/down"
    sender = schemes.sender(LARGE, endpoint=endpoint, num_workers=3)
    workers = [start(Worker) for _ in range(3)]
    with relay(endpoint, down, tmp_path, *(["--shared"] if shared else [])) as process:
        behind = (w.connect(follower(down, shared), i, LARGE) for i, w in enumerate(workers[:2]))
        direct = workers[2].connect(ZMQWeightSyncScheme(connect=endpoint), 2, LARGE)
        await asyncio.gather(sender.connect(), *behind, direct)
        last = await sender.send_async(sender.model.fill(2))
        workers[1].signal(signal.SIGSTOP)
        memory = psutil.Process(process.pid).memory_info
        before = memory().rss
        for value in range(3, 43):  # 200 MiB for each
            last = await sender.publish(sender.model.fill(value))
            await sender.wait_version(last, worker_ids=[0, 2], timeout=10)
        assert memory().rss - before < 60 * MIB
        assert [await w.value() for w in (workers[0], workers[2])] == [42, 42]
        workers[1].signal(signal.SIGCONT)
        assert await workers[1].wait_version(last) == 42
        assert len(await workers[1].applied_versions()) <= 6, "it has skipped the versions in between"
        await sender.send_async(sender.model.fill(0))
        assert [await w.value() for w in workers] == [0] * 3


@pytest.mark.requirement(200)
async def test_status_tells_who_behind_a_relay_is_slow_or_lost(
    endpoint: str, tmp_path: Path, shared: bool, schemes: Schemes, start: Start
) -> None:
    """Stopped, killed, and all of them with their relay, while who is connected to the trainer itself is there."""
    down = f"ipc://{tmp_path}/down"
    sender = schemes.sender(1000, endpoint=endpoint, num_workers=4)
    impatient(sender)
    workers = [start(Worker) for _ in range(4)]
    with relay(endpoint, down, tmp_path, *(["--shared"] if shared else [])) as process:
        behind = (w.connect(follower(down, shared), i, 1000, reconnect=True) for i, w in enumerate(workers[:3]))
        direct = workers[3].connect(ZMQWeightSyncScheme(connect=endpoint), 3, 1000)
        await asyncio.gather(sender.connect(), *behind, direct)
        version = await sender.send_async(sender.model.fill(2))
        workers[0].signal(signal.SIGSTOP)
        await workers[1].kill()
        with pytest.raises(PartialSendError) as late:
            await sender.send_async(sender.model.fill(3), timeout=2)
        assert (sorted(late.value.acked), sorted(late.value.failed)) == ([2, 3], [0, 1])
        status = sender.status()
        assert [(status[i].version, status[i].lag) for i in range(4)] == [
            (version, 1), (version, 1), (version + 1, 0), (version + 1, 0),
        ]  # fmt: skip
        states = ["slow", "lost", "live", "live"]
        await eventually(lambda: [sender.status()[i].state for i in range(4)] == states, 20, sender.status)
        stopped, healthy = sender.status()[0].last_seen, sender.status()[2].last_seen
        assert stopped is not None
        assert healthy is not None
        assert healthy < stopped
        workers[0].signal(signal.SIGCONT)
        await eventually(lambda: (sender.status()[0].state, sender.status()[0].lag) == ("live", 0), 20, sender.status)
        process.kill()
        states = ["lost", "lost", "lost", "live"]
        await eventually(lambda: [sender.status()[i].state for i in range(4)] == states, 20, sender.status)
        assert "its relay is lost" in sender.status()[2].reason
    assert [await w.value() for w in (workers[0], workers[2], workers[3])] == [3] * 3


@pytest.mark.requirement(4)
async def test_a_store_serves_the_last_version_without_its_trainer_and_after_its_own_kill(
    endpoint: str, tmp_path: Path, shared: bool, schemes: Schemes, start: Start
) -> None:
    """Of 4: the store, a process of its own. Who was there before has the next trainer's weights from it, too."""
    down, keep = f"ipc://{tmp_path}/down", tmp_path / "kept.safetensors"
    options = ["--keep", str(keep), *(["--shared"] if shared else [])]
    first, late, later = (start(Worker) for _ in range(3))

    async def joins(worker: Remote, index: int) -> tuple[int, float]:
        version = await worker.connect(follower(down, shared), index, LARGE, reconnect=True)
        return version, await worker.value()

    def is_kept(version: int) -> bool:
        if not keep.exists():
            return False
        with safe_open(keep, "pt") as file:
            texts: dict[str, str] = file.metadata()
        return bool(json.loads(texts["asyncsync"])["models"]["policy"]["version"] == version)

    with relay(endpoint, down, tmp_path, *options) as process:
        trainer = schemes.sender(LARGE, endpoint=endpoint, num_workers=1)
        await asyncio.gather(trainer.connect(), joins(first, 0))
        version = await trainer.send_async(trainer.model.fill(5), metadata={"step": 7})
        await trainer.shutdown()
        assert await joins(late, 1) == (version, 5)
        await eventually(lambda: is_kept(version))
        process.kill()
    with relay(endpoint, down, tmp_path, *options):
        assert await joins(later, 2) == (version, 5)
        guest = follower(down, shared)
        guest.init_on_receiver("policy", worker_idx=3)
        await guest.connect(timeout=30)
        assert guest.metadata == {"step": 7}
        await guest.shutdown()
        newer = schemes.sender(LARGE, value=6.0, endpoint=endpoint, num_workers=3)
        await newer.connect(timeout=30)
        version = await newer.send_async(newer.model.fill(7))
        assert [await w.wait_version(version) for w in (first, late, later)] == [7, 7, 7]
