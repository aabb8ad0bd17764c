"""Workers that may not open their trainer's memory: it is not dumpable, or has capabilities that they lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.programs import python

pytestmark = [pytest.mark.requirement(195), pytest.mark.timeout(120)]

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
SCHEME = (
    HIDE
    + """
def work(scheme, size):
    scheme.init_on_receiver("policy", model=(model := nn.Linear(size, 2)), worker_idx=0)
    with scheme:
        scheme.connect(timeout=30)
        try:
            scheme.wait_version(4, timeout=30)
        except asyncsync.WeightSyncError:
            return
        print("worker:", set(model.bias.tolist()), flush=True)
        while not scheme.closed:
            time.sleep(0.01)

if __name__ == "__main__":
    hide()
    scheme = getattr(asyncsync.sync, sys.argv[1])()
    model = nn.Linear(size := int(sys.argv[2]), 2)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(scheme, size), daemon=True)
    worker.start()
    try:
        with scheme:
            scheme.connect(timeout=30)
            for number in range(3):
                nn.init.constant_(model.bias, number)
                scheme.send(timeout=30)
    except asyncsync.WeightSyncError as error:
        print("trainer:", error)
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


def run(program: str, folder: Path, *arguments: str) -> str:
    path = folder / "program.py"  # whose workers import it
    path.write_text(program)
    return python(path, *arguments).stdout


@pytest.mark.thorough
@pytest.mark.parametrize("size", [4, 1 << 20], ids=["small", "large"])
def test_the_scheme_for_near_and_far_sends_them_bytes(size: int, tmp_path: Path) -> None:
    assert run(SCHEME, tmp_path, "AutoWeightSyncScheme", str(size)) == "worker: {2.0}\n"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["SharedMem", "MultiProcess"])
def test_shared_memory_alone_says_why_not(kind: str, tmp_path: Path) -> None:
    out = run(SCHEME, tmp_path, f"{kind}WeightSyncScheme", "4")
    assert "not dumpable" in out
    assert "AutoWeightSyncScheme" in out


@pytest.mark.thorough
def test_a_collector_says_why_its_workers_do_not_start(tmp_path: Path) -> None:
    out = run(COLLECTOR, tmp_path)
    assert "not dumpable" in out
    assert "__main__" not in out
