"""Programs that end with everything open: at once, silently, with the exit status that is due, and without a file left.

Each program runs in a process of its own, with a temporary directory of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

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


def run(program: str, tmp_path: Path, *arguments: str) -> tuple[float, int, str, str]:
    """Seconds from the line "open" to the end, exit status, stdout, stderr."""
    temporary = tmp_path / "t"
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", START + program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "TMPDIR": str(temporary),
        },
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
        took = time.perf_counter() - begin
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert first == "open\n", first + out + err
    assert [n for n in os.listdir(temporary) if "asyncsync" in n] == []
    return took, process.returncode, out, err


BLOCKED = """
sender, receiver = opened()
what, end = sys.argv[1:]
if what == "receive":
    begun(receiver.receive)
elif what == "send":
    hold = receiver.hold()
    hold.__enter__()
    begun(sender.send)
elif what == "connect":
    begun(new_sender(10, num_workers=1).connect)
    begun(new_receiver(new_sender(10)).connect)
elif what == "busy":
    def busy():
        while True:
            sender.send(sender.model, timeout=1)
            receiver.receive(timeout=0.001)
    begun(busy)
    begun(lambda: [receiver.receive(timeout=0.001) for _ in iter(int, 1)])
print("open", flush=True)
if end == "raise":
    raise LookupError("of the user's")
elif end == "exit":
    sys.exit(3)
"""


@pytest.mark.requirement(201)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "end"),
    [("receive", "end"), ("receive", "raise"), ("send", "exit"), ("connect", "end"), ("busy", "end")],
)
def test_a_program_ends_while_daemon_threads_are_blocked(
    what: str, end: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    took, status, _, err = run(BLOCKED, tmp_path, what, end)
    record_property("seconds to exit", took)
    assert status == {"end": 0, "raise": 1, "exit": 3}[end], err
    if end == "raise":
        assert err.count("Traceback") == 1
        assert err.endswith("LookupError: of the user's\n")
    else:
        assert err == ""
    assert took < PROMISED


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


FOREIGN = """
import _thread
sender, receiver = opened()

def wait():
    while True:
        receiver.receive(timeout=30)

_thread.start_new_thread(wait, ())
time.sleep(0.1)
print("open", flush=True)
"""


@pytest.mark.requirement(201)
@pytest.mark.thorough
def test_a_call_in_a_thread_that_threading_does_not_know_ends_with_the_program(tmp_path: Path) -> None:
    took, status, _, err = run(FOREIGN, tmp_path)
    assert (status, err) == (0, "")
    assert took < PROMISED


@pytest.mark.requirement(201)
@pytest.mark.thorough
@pytest.mark.parametrize("process", ["whole", "fork"])
def test_the_exit_waits_for_what_its_daemon_threads_free(process: str, tmp_path: Path) -> None:
    # A thread that the interpreter stops inside torch, be it while a tensor is freed, aborts the process.
    took, status, _, err = run(LADEN, tmp_path, process)
    assert (status, err) == (0, "")
    assert took < PROMISED


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
@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_multiprocessing_child_ends_with_everything_open(method: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"  # spawn imports it by its path
    path.write_text(START + CHILD)
    program = f"import runpy; sys.argv[0] = {str(path)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    if method == "spawn":
        program = f"os.execv(sys.executable, [sys.executable, {str(path)!r}, 'spawn'])"
    took, status, out, err = run(program, tmp_path, method)
    assert (status, err) == (0, "")
    assert "ended" in out
    assert took < PROMISED


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
if sys.argv[1] == "raise":
    raise LookupError("of the user's")
"""


@pytest.mark.requirement(210)
@pytest.mark.thorough
@pytest.mark.parametrize("end", ["end", "raise"])
def test_workers_that_are_no_daemons_end_with_their_trainer(end: str, tmp_path: Path) -> None:
    took, status, _, err = run(WORKERS, tmp_path, end)
    assert status == (1 if end == "raise" else 0)
    assert err.count("Traceback") == status, err
    assert took < PROMISED


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
@pytest.mark.thorough
def test_workers_of_a_killed_trainer_notice_and_hang_nowhere(tmp_path: Path) -> None:
    took, status, _, err = run(KILLED, tmp_path)
    assert (status, err) == (0, "")
    assert took < PROMISED
