"""An asynchronous trainer that forgets shutdown: its workers, whom its exit joins, are told all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

PROMISED = 5.0  # seconds
PROGRAM = """
import asyncio, multiprocessing, os, pickle, signal, sys, threading, time
import torch, uvloop
from torch import nn
import asyncsync

CASES = {
    "asyncio": 0, "uvloop": 0, "raise": 1, "exit": 3, "interrupt": 130, "closed": 0, "stopped": 0, "thread": 0,
    "failed": 1, "reference": 0,
}
torch.set_num_threads(1)

def work(scheme):
    async def follow():
        policy = nn.Linear(2, 2)
        scheme.init_on_receiver("policy", model=policy, worker_idx=0)
        await scheme.connect()
        while not scheme.closed:
            await asyncio.sleep(0.01)
    asyncio.run(follow())

def program(how):
    scheme = asyncsync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=nn.Linear(2, 2), num_workers=2 if how == "failed" else 1)
    worker = multiprocessing.get_context("fork").Process(target=work, args=(pickle.loads(pickle.dumps(scheme)),))
    worker.start()  # not a daemon: the exit joins it

    async def main():
        await scheme.connect(timeout=2 if how == "failed" else 60)
        for _ in range(5):
            await scheme.send_async()
        if how == "raise":
            raise LookupError("of the user's")
        if how == "exit":
            sys.exit(3)
        if how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        if how in ("closed", "reference"):
            asyncio.create_task(scheme.wait_version(5))
        if how == "stopped":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(60)
        if how == "thread":
            ready.set()
            await asyncio.sleep(60)

    if how == "uvloop":
        uvloop.run(main())
    elif how in ("closed", "reference"):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        return scheme if how == "reference" else None  # or it is collected
    elif how == "stopped":
        loop = asyncio.new_event_loop()
        task = loop.create_task(main())
        loop.run_forever()
        return loop, task
    elif how == "thread":
        ready = threading.Event()
        threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
        ready.wait()
    else:
        asyncio.run(main())

for how, due in CASES.items():
    if not (child := os.fork()):
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if how in ("raise", "interrupt", "failed"):
            sys.excepthook = lambda *exception: None
        kept = program(how)
        break  # and to the end of the interpreter
    begun = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < begun + float(sys.argv[1]):
        time.sleep(0.01)
    if not ended[0]:
        print(how, "does not end", flush=True)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    elif (status := os.waitstatus_to_exitcode(ended[1])) not in (due, -signal.SIGINT if how == "interrupt" else due):
        print(how, "status", status, flush=True)
else:
    print("over", flush=True)
"""


@pytest.mark.thorough
def test_workers_of_an_asynchronous_trainer_that_ends_without_shutdown_are_told(tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", PROGRAM, str(2 * PROMISED)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    assert done.stdout == "over\n", done.stdout + done.stderr
    assert done.returncode == 0
    assert [n for n in os.listdir(temporary) if "asyncsync" in n] == []
