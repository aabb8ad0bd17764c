"""Programs and event loops that end with schemes open: they end at once, their workers are told, and nothing is left.
What a scheme has open ends with its event loop, and at the latest when it is collected, which waits for nobody."""

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path

import pytest

from asyncsync import ClosedError, NotConnected
from helpers.processes import Schemes, Start, Trainer, Worker, value_of
from helpers.programs import python

pytestmark = pytest.mark.timeout(120)

PROMISED = 5.0  # seconds
QUIET = ("-W", "ignore::ResourceWarning", "-c")  # runs a program that forgets things


BUSY = """
import asyncio, time
from helpers.processes import LARGE, Schemes

async def main():
    schemes = Schemes()
    sender, [receiver, other] = await schemes.connected(LARGE, workers=2)
    await sender.send_async(sender.model.fill(2))
    await receiver.receive()
    for work in (receiver.receive(), sender.send_async(sender.model.fill(3)), other.fetch(), other.receive()):
        asyncio.create_task(work)
        await asyncio.sleep(0)

asyncio.run(main())
print(time.monotonic())
"""


@pytest.mark.thorough
async def test_a_program_that_ends_amid_all_calls_ends_at_once_and_what_it_left_is_swept(schemes: Schemes) -> None:
    done = await asyncio.to_thread(python, *QUIET, BUSY, folder=tempfile.gettempdir())
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - float(done.stdout) < 2 * PROMISED  # half is for Python and torch
    # Nobody said where they were: the next sender finds them.
    sender = schemes.sender(10)
    with pytest.raises(NotConnected):
        await sender.connect(timeout=0)
    mine = Path(sender.bus.endpoint.removeprefix("ipc://")).parent.name
    assert [n for n in os.listdir(tempfile.gettempdir()) if n.startswith("asyncsync-")] == [mine]


@pytest.mark.requirement(210)
async def test_a_program_that_just_ends_has_said_goodbye(endpoint: str, schemes: Schemes, start: Start) -> None:
    plan = schemes.sender(1000, 9, endpoint=endpoint, num_workers=2)
    worker, server = schemes.receiver(plan), schemes.receiver(plan, 1, reconnect=True)
    trainer = start(Trainer)
    await asyncio.gather(trainer.connect(plan, 1000, 1), worker.connect(), server.connect())
    waiting = asyncio.create_task(server.receive())
    with contextlib.suppress(ClosedError):
        await worker.receive(0)
    await trainer.leave()
    with pytest.raises(ClosedError):
        await worker.receive()
    assert worker.closed
    await trainer.ended
    assert not server.closed
    assert not waiting.done()
    successor = start(Trainer)
    replacement = schemes.receiver(plan, 0)
    await asyncio.gather(successor.connect(plan, 1000, 9), replacement.connect())
    assert value_of(await waiting) == server.model.value == 9


@pytest.mark.requirement(195)
async def test_a_worker_whose_program_just_ended_is_lost_at_once(schemes: Schemes, start: Start) -> None:
    sender = schemes.sender(1000)
    worker, steady = start(Worker), start(Worker)
    await asyncio.gather(sender.connect(), worker.connect(sender, 0, 1000), steady.connect(sender, 1, 1000))
    await worker.leave()
    await worker.ended
    assert await sender.send_async(sender.model.fill(2), timeout=10) == 2  # elastic
    assert await steady.value() == 2
    assert sender.status()[0].state == "lost"


FORGETFUL = """
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
def test_workers_of_a_trainer_that_ends_without_shutdown_and_joins_them_are_told(tmp_path: Path) -> None:
    done = python(*QUIET, FORGETFUL, str(2 * PROMISED), folder=tmp_path)
    assert (done.stdout, done.returncode) == ("over\n", 0), done.stdout + done.stderr
    assert "Fatal" not in done.stderr, done.stderr
    assert [n for n in os.listdir(tmp_path) if "asyncsync" in n] == []


COLLECTED = """
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


@pytest.mark.thorough
def test_a_scheme_that_is_forgotten_is_collected_without_waiting(tmp_path: Path) -> None:
    done = python(*QUIET, COLLECTED, tmp_path, folder=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("over\n", "", 0), done.stderr[-3000:]
