"""What the system denies: a process with hardly any file descriptors left is told so, and so are workers that may not
open their trainer's memory, because it is not dumpable, or has capabilities that they lack."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncsync import NotConnected, SharedMemWeightSyncScheme, WeightSyncError
from helpers import planted
from helpers.processes import Schemes
from helpers.programs import python

pytestmark = pytest.mark.timeout(60)


@contextmanager
def only(free: int) -> Iterator[None]:
    """So many descriptors may still be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - planted.descriptors_left() + free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("workers", "free"), [(None, 40), (20, 90)])
async def test_a_sender_without_descriptors_for_its_workers_does_not_connect(
    schemes: Schemes, workers: int | None, free: int
) -> None:
    sender = schemes.sender(1000, num_workers=workers)
    with only(free), pytest.raises(NotConnected, match=r"file descriptors .*ulimit -n"):
        await sender.connect(timeout=5)


async def test_a_further_worker_is_refused_and_the_others_go_on(schemes: Schemes) -> None:
    sender = schemes.sender(1000)
    first, second = (schemes.receiver(sender, i) for i in range(2))
    await asyncio.gather(sender.connect(timeout=10), first.connect(timeout=10))
    joining = asyncio.create_task(second.connect(timeout=10))
    await asyncio.sleep(0)  # its own link is there
    with only(20), pytest.raises(NotConnected, match=r"refused worker 1: .*file descriptors"):
        await joining
    assert await sender.send_async(sender.model.fill(2), timeout=10) == 2
    assert first.model.value == 2


async def test_no_slot_takes_the_last_descriptors(schemes: Schemes) -> None:
    sender = schemes.sender(1000, kind=SharedMemWeightSyncScheme)
    receiver = schemes.receiver(sender)
    await asyncio.gather(sender.connect(timeout=10), receiver.connect(timeout=10))

    async def take_slots() -> None:
        for worker in range(1, 6):
            await sender.publish(sender.model.fill(2), worker_ids=[worker])

    with only(20), pytest.raises(WeightSyncError, match="file descriptors"):
        await take_slots()
    assert await sender.send_async(sender.model.fill(3), timeout=10) == sender.version


MANY = """
import asyncio, resource
from torch import nn
from asyncsync import NotConnected, ZMQWeightSyncScheme

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
    schemes, refused = [], 0
    for i in range(20):
        schemes.append(scheme := ZMQWeightSyncScheme(min_workers=0))
        scheme.init_on_sender(model_id="policy", model=nn.Linear(2, 2))
        try:
            await scheme.connect(timeout=1)
        except NotConnected as error:
            assert "ulimit" in str(error), error
            refused += 1
    for scheme in schemes:
        await scheme.shutdown()
    print(f"refused {refused > 10}")

asyncio.run(main())
"""


@pytest.mark.thorough
def test_many_senders_end_with_an_error_and_not_with_an_abort() -> None:
    ran = python("-c", MANY)
    assert (ran.returncode, ran.stdout.strip()) == (0, "refused True"), ran.stderr


# -- workers that may not open their trainer's memory ------------------------------------------------------------------


# Of a process that is not dumpable, others without CAP_SYS_PTRACE may open nothing: those of root lose it when they
# are started.
HIDE = """
import ctypes, multiprocessing, sys, time
import torch
from torch import nn
import asyncsync, asyncsync.sync

def hide():
    libc = ctypes.CDLL(None)
    libc.prctl(24, 19, 0, 0, 0)
    libc.prctl(4, 0, 0, 0, 0)
"""
SCHEMES = (
    HIDE
    + """
CASES = [("Auto", 4), ("Auto", 1 << 20), ("SharedMem", 4), ("MultiProcess", 4)]

def work(schemes):
    for scheme, (_, size) in zip(schemes, CASES):
        scheme.init_on_receiver("policy", model=(model := nn.Linear(size, 2)), worker_idx=0)
        with scheme:
            try:
                scheme.connect(timeout=30)
                scheme.wait_version(4, timeout=30)
            except asyncsync.WeightSyncError:
                continue
            print("worker:", set(model.bias.tolist()), flush=True)
            while not scheme.closed:
                time.sleep(0.01)

def send(scheme, model):
    try:
        with scheme:
            scheme.connect(timeout=30)
            for number in range(3):
                nn.init.constant_(model.bias, number)
                scheme.send(timeout=30)
    except asyncsync.WeightSyncError as error:
        print("trainer:", repr(str(error)), flush=True)

if __name__ == "__main__":
    hide()
    schemes = [getattr(asyncsync.sync, kind + "WeightSyncScheme")() for kind, _ in CASES]
    models = [nn.Linear(size, 2) for _, size in CASES]
    for scheme, model in zip(schemes, models):
        scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(schemes,), daemon=True)
    worker.start()
    for scheme, model in zip(schemes, models):
        send(scheme, model)
    worker.join(30)
"""
)
COLLECTOR = (
    HIDE
    + """
from asyncsync.collectors import GymEnv, MultiSyncCollector

if __name__ == "__main__":
    hide()
    try:
        MultiSyncCollector([lambda: GymEnv("CartPole-v1")], None, frames_per_batch=4, total_frames=8).next()
    except Exception as error:
        print("trainer:", error, *getattr(error, "__notes__", ()))
"""
)


def run(program: str, folder: Path) -> str:
    path = folder / "program.py"  # whose workers import it
    path.write_text(program)
    return python(path).stdout


@pytest.mark.requirement(195)
@pytest.mark.timeout(120)
@pytest.mark.thorough
def test_the_scheme_for_near_and_far_sends_them_bytes_and_shared_memory_alone_says_why_not(tmp_path: Path) -> None:
    """Small models and large ones; with both schemes that need shared memory."""
    *arrived, shared, process = run(SCHEMES, tmp_path).splitlines()
    assert arrived == ["worker: {2.0}"] * 2
    for told in (shared, process):
        assert told.startswith("trainer:")
        assert "not dumpable" in told
        assert "AutoWeightSyncScheme" in told


@pytest.mark.requirement(195)
@pytest.mark.timeout(120)
@pytest.mark.thorough
def test_a_collector_says_why_its_workers_do_not_start(tmp_path: Path) -> None:
    out = run(COLLECTOR, tmp_path)
    assert "not dumpable" in out
    assert "__main__" not in out
