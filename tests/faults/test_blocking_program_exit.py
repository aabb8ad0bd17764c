"""Programs that end with everything open: at once, silently, with the exit status that is due, and without a file left.

Each program runs in a process of its own, with a temporary directory of its own.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(120), pytest.mark.thorough]

PROMISED = 10.0  # seconds: five times what the end of a program takes at most where nothing else runs
START = """
import multiprocessing, os, signal, sys, threading, time
from helpers.blocking_crew import connect, new_receiver, new_sender
from helpers.blocking_workers import follow, until_closed

def opened(numel=1000):
    sender = new_sender(numel, num_workers=1)
    receiver = new_receiver(sender)
    connect(sender, receiver)
    receiver.receive(0)
    return sender, receiver

def begun(target, *args, daemon=True):
    entered = threading.Event()
    def run():
        entered.set()
        target(*args)
    thread = threading.Thread(target=run, daemon=daemon)
    thread.start()
    entered.wait()
    time.sleep(0.05)  # in the midst of it, most likely
    return thread
"""


def run(program: str, tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout after the line "open", stderr; it has ended in time after that line, and left no file."""
    temporary = tmp_path / "t"
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", START + program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        # Not by readline(), which may take more than a line from the pipe; communicate() never sees that.
        first = ""
        while not first.endswith("\n") and (character := os.read(process.stdout.fileno(), 1)):
            first += character.decode()
        begin = time.perf_counter()
        out, err = process.communicate(timeout=3 * PROMISED)
        assert time.perf_counter() - begin < PROMISED
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert first == "open\n", first + out + err
    assert [n for n in os.listdir(temporary) if "asyncsync" in n] == []
    return process.returncode, out, err


BLOCKED = """
import _thread

receiving, sending, busy, foreign = (opened() for _ in range(4))
begun(receiving[1].receive)
hold = sending[1].hold()
hold.__enter__()
begun(sending[0].send)
begun(new_sender(10, num_workers=1).connect)
begun(new_receiver(new_sender(10)).connect)

def send():
    while True:
        busy[0].send(busy[0].model, timeout=1)
        busy[1].receive(timeout=0.001)

def receive(timeout, receiver):
    while True:
        receiver.receive(timeout=timeout)

begun(send)
begun(receive, 0.001, busy[1])
_thread.start_new_thread(receive, (30, foreign[1]))  # which threading does not know
time.sleep(0.1)
print("open", flush=True)
if sys.argv[1] == "raise":
    raise LookupError("of the user's")
elif sys.argv[1] == "exit":
    sys.exit(3)
"""


@pytest.mark.requirement(201)
@pytest.mark.parametrize(("end", "due"), [("end", 0), ("raise", 1), ("exit", 3)])
def test_a_program_ends_while_other_threads_are_blocked(end: str, due: int, tmp_path: Path) -> None:
    status, _, err = run(BLOCKED, tmp_path, end)
    assert status == due, err
    if end == "raise":
        assert err.count("Traceback") == 1
        assert err.endswith("LookupError: of the user's\n")
    else:
        assert err == ""


LADEN = """
import torch
if sys.argv[1] == "fork" and (child := os.fork()):
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))  # the exit that is meant is the child's
SIZE = 1 << 24
memory = os.memfd_create("laden")
os.ftruncate(memory, SIZE)

def connect():
    # Unmapped when the call is ended, one after another, and all of it in torch, without the GIL.
    laden = [torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=SIZE, dtype=torch.uint8) for _ in range(100)]
    for tensor in laden:
        tensor[::4096].sum()
    entered.set()
    new_receiver(new_sender(10)).connect()

entered = threading.Event()
threading.Thread(target=connect, daemon=True).start()
entered.wait()
time.sleep(0.1)
print("open", flush=True)
"""


@pytest.mark.requirement(201)
@pytest.mark.parametrize("process", ["whole", "fork"])
def test_the_exit_waits_for_what_its_daemon_threads_free(process: str, tmp_path: Path) -> None:
    # A thread that the interpreter stops inside torch, be it while a tensor is freed, aborts the process.
    assert run(LADEN, tmp_path, process) == (0, "", "")


CHILD = """
def child():
    sender, receiver = opened()
    begun(receiver.receive)
    # Not a daemon: it must be ended.
    begun(patient, receiver, daemon=False)
    print("open", flush=True)

def patient(receiver):
    from asyncsync.sync import ClosedError
    try:
        while True:
            receiver.receive()
    except ClosedError:
        print("ended", flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.requirement(201)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_multiprocessing_child_ends_with_everything_open(method: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"  # spawn imports it by its path
    path.write_text(START + CHILD)
    program = f"import runpy; sys.argv[0] = {str(path)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    if method == "spawn":
        program = f"os.execv(sys.executable, [sys.executable, {str(path)!r}, 'spawn'])"
    assert run(program, tmp_path, method) == (0, "ended\n", "")


WORKERS = """
sender = new_sender(1000, num_workers=3)
context = multiprocessing.get_context("fork")
workers = [context.Process(target=until_closed, args=(sender, i, 1000)) for i in range(2)]
workers.append(context.Process(target=follow, args=(sender, 2, 1000)))
for worker in workers:
    worker.start()
sender.connect()
sender.send(sender.model.fill(2))
begun(lambda: [sender.publish() for _ in iter(int, 1)])
print("open", flush=True)
raise LookupError("of the user's")
"""


@pytest.mark.requirement(210)
def test_workers_that_are_no_daemons_end_with_their_trainer(tmp_path: Path) -> None:
    status, _, err = run(WORKERS, tmp_path)
    assert status == err.count("Traceback") == 1, err


KILLED = """
def trainer(sender):
    sender.init_on_sender(model_id="policy", model=Filled(1000, 1.0))
    sender.connect()
    os.kill(os.getpid(), signal.SIGKILL)

from helpers.processes import Filled
sender = new_sender(1000, num_workers=1)
receiver = new_receiver(sender)
process = multiprocessing.get_context("fork").Process(target=trainer, args=(sender,))
process.start()
receiver.connect()
process.join()
deadline = time.monotonic() + 5
while receiver.status()[0].state != "lost":
    assert time.monotonic() < deadline
    time.sleep(0.001)
assert not receiver.closed
assert receiver.receive(0.01) is None
from asyncsync.sync import AckTimeout
try:
    receiver.fetch(timeout=0.1)
except AckTimeout:
    pass
begun(receiver.receive)
print("open", flush=True)
os.remove(sender.bus.endpoint.removeprefix("ipc://"))  # what a killed process leaves, the next connect sweeps
import shutil
shutil.rmtree(os.path.dirname(sender.bus.endpoint.removeprefix("ipc://")))
"""


@pytest.mark.requirement(210)
def test_workers_of_a_killed_trainer_notice_and_hang_nowhere(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path) == (0, "", "")
