"""However a collector or its trainer ends, nothing is left: no process, socket, segment, directory."""

import functools
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncsync.collectors import MultiAsyncCollector, MultiSyncCollector
from asyncsync.errors import ClosedError
from helpers.blocking_interrupts import sigint_raises
from helpers.collecting_multi import (
    Slow,
    alive,
    ask,
    gone_within,
    make,
    note_random_state,
    options,
    policy,
    trainer,
)
from helpers.command import private_directories
from helpers.programs import python

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


@contextmanager
def program(kind: str, end: str, delay: float = 0.0, **arguments: Any) -> Iterator[Any]:
    """A trainer in a process of its own."""
    context: Any = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=trainer, args=(there, kind, end, delay, arguments))
    process.start()
    there.close()
    try:
        assert here.poll(40)
        yield process, here, here.recv()
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()


@pytest.mark.requirement(208)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "moment", "delay"),
    [
        ("sync", "never", 0.01),
        ("async", "never", 30.0),
        ("async", "during shutdown", 60.0),
        ("async", "with a fork", 60.0),
        ("async", "while it forks", 60.0),  # the child has the lock of what is to be removed for another second
    ],
)
def test_workers_end_when_their_trainer_is_killed_and_remove_what_is_left(kind: str, moment: str, delay: float) -> None:
    with program(kind, moment, delay) as (process, _pipe, pids):
        child = pids.pop() if moment == "with a fork" else None  # it lives on
        if not moment.startswith("w"):
            time.sleep(0.5)
        process.kill()
        process.join()
        try:
            assert gone_within(pids, 5.0), "workers outlive their trainer"
            assert not private_directories()
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


@pytest.mark.thorough
def test_ctrl_c_leaves_nothing_behind() -> None:
    with program("async", "never", 0.01) as (process, pipe, pids):
        assert pipe.poll(20)
        for pid in (process.pid, *pids):  # a terminal sends it to all of them
            os.kill(pid, signal.SIGINT)
        process.join(30)
        assert process.exitcode == 0
        heard = []
        while pipe.poll():
            try:
                heard.append(pipe.recv())
            except EOFError:
                break
        assert heard[-1] == "interrupted"
        assert gone_within(pids, 5.0)
        assert not private_directories()


@pytest.mark.thorough
def test_a_program_that_forgets_shutdown_ends_promptly() -> None:
    with program("async", "nothing") as (process, _pipe, pids):
        began = time.monotonic()
        process.join(15)
        assert process.exitcode == 0
        assert time.monotonic() - began < 5.0
        assert not alive(pids)
        assert not private_directories()


@pytest.mark.requirement(208)
@BOTH
def test_shutdown_during_a_rollout_returns_within_its_timeout(kind: Any) -> None:
    collector = kind([make(delay=60.0)], policy(), **options())
    pids = collector.group.family.pids
    ask(collector)  # asked for a rollout, whose first step takes a minute
    time.sleep(0.2)
    began = time.monotonic()
    collector.shutdown(timeout=1.0)
    assert time.monotonic() - began < 2.0
    assert not alive(pids)


@BOTH
@pytest.mark.parametrize("close_env", [True, False])
def test_shutdown_stops_between_two_steps_and_closes_the_environment_if_it_is_to(
    kind: Any, close_env: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    collector = kind([make(delay=0.05, log=str(log))], policy(), **options(frames_per_batch=2000))
    ask(collector)
    time.sleep(0.2)
    began = time.monotonic()
    collector.shutdown(close_env=close_env)
    assert time.monotonic() - began < 3.0
    assert log.read_text().split() == [str(collector.group.family.pids[0])] + ["closed"] * close_env


@pytest.mark.requirement(208)
async def test_shutdown_is_idempotent_and_comes_with_the_block() -> None:
    async with MultiSyncCollector([make()], policy(), **options()) as collector:
        await anext(collector)
        pids = collector.group.family.pids
    assert collector.closed
    assert not alive(pids)
    collector.shutdown()
    collector.shutdown(timeout=0.1)
    with pytest.raises(ClosedError, match="has been shut down"):
        collector.next()


def test_ctrl_c_during_shutdown_kills_the_workers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    collector: Any = MultiAsyncCollector([lambda: Slow(delay=60.0, log=str(log))], policy(), **options())
    pids = collector.group.family.pids
    ask(collector)
    deadline = time.monotonic() + 20.0
    while "step" not in log.read_text():  # before it, the worker would obey shutdown at once
        assert time.monotonic() < deadline
        time.sleep(0.01)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with sigint_raises(), pytest.raises(KeyboardInterrupt):
        collector.shutdown(timeout=30.0)
    timer.join()
    assert collector.group.is_over
    assert not alive(pids)
    collector.shutdown()


def test_a_forked_copy_ends_nothing() -> None:
    with MultiAsyncCollector([make()], policy(), **options()) as collector:
        collector.next()
        child = os.fork()
        if not child:
            code = 1
            try:
                for use in (collector.next, collector.state_dict, collector.pause().__enter__):
                    with pytest.raises(ClosedError, match="forked"):
                        use()
                collector.shutdown()
                assert collector.closed
                del use, collector
                gc.collect()
                time.sleep(0.3)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for _ in range(3):
            assert collector.next() is not None


def test_messages_to_a_worker_that_does_not_read_keep_nobody() -> None:
    with MultiAsyncCollector([make()], policy(), **options()) as collector:
        group: Any = collector.group
        [pid] = group.family.pids
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        for size in [1 << 20] * 3 + [30_000] * 50:
            group.call_soon(group.family.send, 0, ("nothing", bytes(size)))
        assert time.monotonic() - began < 2.0
        os.kill(pid, signal.SIGCONT)
        assert collector.next() is not None
        group.call_soon(group.family.send, 0, ("nothing", bytes(1 << 20)))
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(50):
            group.call_soon(group.family.send, 0, ("nothing", bytes(30_000)))
        collector.shutdown(timeout=1.0)
        assert time.monotonic() - began < 2.5
        assert not alive([pid])


def test_workers_draw_different_numbers_and_end_quickly(tmp_path: Path) -> None:
    given = options(init_fn=functools.partial(note_random_state, tmp_path))
    MultiSyncCollector([make()] * 2, policy(), **given).shutdown()
    drawn = [path.read_text().split() for path in tmp_path.iterdir() if not path.suffix]
    assert all(a != b for a, b in zip(*drawn, strict=True))
    frozen = [int(path.read_text()) for path in tmp_path.glob("*.frozen")]
    assert len(frozen) == 2
    assert min(frozen) > 10_000  # what the interpreter's end would search for garbage, half a second long


@BOTH
def test_a_collector_that_is_forgotten_ends_its_workers(kind: Any) -> None:
    collector = kind([make()], policy(), **options())
    pids = collector.group.family.pids
    collector.next()
    del collector
    gc.collect()
    assert gone_within(pids, 5.0)


def test_shutdown_in_another_thread_ends_a_waiting_one() -> None:
    collector: Any = MultiSyncCollector([make(delay=0.02)], policy(), **options(frames_per_batch=5000))
    timer = threading.Timer(0.3, collector.shutdown)
    timer.start()
    with pytest.raises(ClosedError):
        collector.next()
    timer.join()


@pytest.mark.thorough
def test_nobody_is_taken_for_lost_while_it_is_stopped_or_resets_for_ten_seconds() -> None:
    with MultiSyncCollector([make()], policy(), **options()) as collector:
        [pid] = collector.group.family.pids
        collector.next()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        collector.update_policy_weights_()
        assert collector.next() is not None
    with MultiAsyncCollector([make(slow_reset=10.0)], policy(), **options(reset_at_each_iter=True)) as collector:
        began = time.monotonic()
        assert collector.next() is not None
        collector.update_policy_weights_()  # let in while the environment is reset, which is no step
        assert time.monotonic() - began > 9


UNGUARDED = """
from asyncsync.collectors import MultiSyncCollector
from helpers.collecting_multi import make, policy
MultiSyncCollector([make()], policy(numel=100_000), frames_per_batch=4)
"""


@pytest.mark.thorough
def test_a_missing_guard_is_named_whatever_the_size_of_the_policy(tmp_path: Path) -> None:
    program = tmp_path / "unguarded.py"
    program.write_text(UNGUARDED)
    ended = python(program)
    assert ended.returncode
    assert "if __name__ == '__main__':" in ended.stderr.splitlines()[-1]
    assert "BrokenPipe" not in ended.stderr


LATE = """
import multiprocessing, os, socket, subprocess, sys
from asyncsync.collectors.workers.local import run_worker
from asyncsync.transports.shared_memory import MemoryPlace
trainer = subprocess.Popen([sys.executable, "-c", ""])
trainer.wait()
bell, other = multiprocessing.Pipe(duplex=False)
other.close()  # as the kernel does with its end
end, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
run_worker(end, bell, 0, MemoryPlace(trainer.pid, 12, 1, 1, 4096), None, {})
print("ended")
"""


@pytest.mark.thorough
def test_a_worker_whose_trainer_ends_before_it_has_started_says_nothing() -> None:
    done = python("-c", LATE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
