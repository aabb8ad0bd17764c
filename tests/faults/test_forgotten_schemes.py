"""Schemes that nobody shuts down: what they have open ends with their event loop, and at the latest when they are
collected, which waits for nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import asyncio, faulthandler, gc, itertools, logging, os, pickle, sys, threading, time, warnings
import uvloop
from torch import nn
import asyncsync
from asyncsync import NotConnected

faulthandler.dump_traceback_later(60, exit=True)  # a collection that hangs cannot be interrupted
path = sys.argv[1]
gc.freeze()

def left():
    descriptors = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    return {*(os.readlink(d) for d in descriptors if os.path.lexists(d)), *threading.enumerate(), *os.listdir(path)}

async def attempt(kind, role, how):
    scheme = getattr(asyncsync, kind)(endpoint=f"ipc://{path}/bus", num_workers=1)
    other = pickle.loads(pickle.dumps(scheme))
    if role == "sender" or how == "connected":
        scheme.init_on_sender(model_id="policy", model=nn.Linear(2, 2))
    if role == "receiver" or how == "connected":
        other.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
    mine = scheme if role == "sender" else other
    if how == "connected":
        await asyncio.gather(scheme.connect(), other.connect())
        for _ in range(5):
            await scheme.send_async()
        waiting = asyncio.create_task(other.receive() if role == "receiver" else scheme.send_async())
        await asyncio.sleep(0)
    elif how == "failed":
        try:
            await mine.connect(timeout=0.02)
        except NotConnected:
            return mine
    else:
        connecting = asyncio.create_task(mine.connect())
        await asyncio.sleep(0.02)
        connecting.cancel()
    return mine

def by_hand(loop, coroutine):  # without loop.shutdown_asyncgens()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()

RUN = {
    "asyncio.run": asyncio.run,
    "uvloop.run": uvloop.run,
    "asyncio": lambda c: by_hand(asyncio.new_event_loop(), c),
    "uvloop": lambda c: by_hand(uvloop.new_event_loop(), c),
}
KINDS = "ZMQWeightSyncScheme", "SharedMemWeightSyncScheme"
logging.getLogger("asyncio").disabled = True  # "Task was destroyed but it is pending!"
# What the libraries open once and keep.
for run in RUN.values():
    run(attempt("SharedMemWeightSyncScheme", "sender", "connected"))
    gc.collect()
before = left()
for how, role, kind, run in itertools.product(("failed", "cancelled", "connected"), ("sender", "receiver"), KINDS, RUN):
    case = kind, role, how, run
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheme = RUN[run](attempt(kind, role, how))
        if run.endswith(".run"):
            assert left() <= before, (case, left() - before)
            assert scheme.closed, case
        del scheme
        gc.collect()
    deadline = time.monotonic() + 5
    while not left() <= before:  # memory is unmapped by a thread
        assert time.monotonic() < deadline, (case, left() - before)
        gc.collect()
    told = [str(w.message) for w in caught if "shutdown()" in str(w.message)]
    assert len(told) == (0 if run.endswith(".run") else 2 if how == "connected" else 1), (case, told)
    assert not [w for w in caught if "zmq" in str(w.message)], case
print("over", flush=True)
"""


def test_a_scheme_that_is_forgotten_is_collected_without_waiting(tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, os.fspath(temporary)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(temporary)},
    )
    assert (done.stdout, done.stderr, done.returncode) == ("over\n", "", 0), done.stderr[-3000:]
