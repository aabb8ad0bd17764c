"""Blocking schemes in children that are forked, spawned, or of a fork server, also while this process's loop runs."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from asyncsync.sync import MultiProcessWeightSyncScheme, ZMQWeightSyncScheme
from helpers import planted
from helpers.blocking_crew import KINDS, crew, idle, in_fork, new_sender, outcomes
from helpers.blocking_workers import follow
from helpers.process_crew import blocking_worker
from helpers.programs import python

pytestmark = pytest.mark.requirement(201)


@pytest.mark.requirement(35)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "running"), [("fork", False), ("fork", True), ("forkserver", True), ("spawn", True)]
)
@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_workers_of_every_start_method(kind: type, method: str, running: bool) -> None:
    """``running``: while the loop of this process's blocking schemes runs. Of schemes whose ``receive`` waits:
    SharedMem's start methods are test_documented_program.py's."""
    if running:
        with crew(of=kind) as (other, [receiver]):
            follows(kind, method)
            other.send(other.model.fill(2))
            assert receiver.model.value == 2
    else:
        follows(kind, method)
    assert idle()


def follows(kind: type, method: str) -> None:
    sender = new_sender(1000, of=kind, num_workers=2)
    with (
        blocking_worker(sender, follow, 1000, method=method) as (_, first),
        blocking_worker(sender, follow, 1000, index=1, method=method) as (_, second),
    ):
        sender.connect()
        assert (first.recv(), second.recv()) == (1, 1)
        for value in (2, 3):
            sender.send(sender.model.fill(value))
            assert (first.recv(), second.recv()) == (value, value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_connected_scheme_refuses_every_method_in_a_forked_child(kind: type) -> None:
    with crew(of=kind) as (sender, [receiver]):
        calls: dict[str, Callable[[], Any]] = {
            **{f"sender {name}": getattr(sender, name) for name in ("connect", "send", "publish", "status")},
            **{
                f"receiver {name}": getattr(receiver, name)
                for name in ("connect", "receive", "fetch", "hold", "status")
            },
            "init_on_sender": lambda: sender.init_on_sender(model_id="policy", model=sender.model),
            "receive(0)": lambda: receiver.receive(0),
            "weights": lambda: receiver.weights,
            "bus send": lambda: sender.bus.send({"policy": sender.model}),
            "bus publish": lambda: sender.bus.publish({"policy": sender.model}),
            "bus connect": sender.bus.connect,
            "bus hold": receiver.bus.hold,
            "bus status": sender.bus.status,
        }
        for name, each in (("sender", sender), ("receiver", receiver), ("bus", sender.bus)):
            calls[f"{name} wait_version"] = lambda each=each: each.wait_version(1)

        def child() -> dict[str, str]:
            found = outcomes(calls)
            for scheme in (sender, receiver):
                scheme.shutdown()
                scheme.shutdown()
                scheme.bus.shutdown()
                repr(scheme)
            assert idle()
            return found

        found = in_fork(child)
        wrong = {k: v for k, v in found.items() if not (v.startswith("RuntimeError") and "before the fork" in v)}
        assert wrong == {}
        sender.send(sender.model.fill(2))  # the parent's goes on
        assert receiver.model.value == 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_opens_schemes_of_its_own_while_the_parents_loop_runs(kind: type) -> None:
    def child() -> float:
        assert planted.no_loop_thread()
        for _ in range(3):
            with crew(workers=2, of=kind) as (sender, receivers):
                sender.send(sender.model.fill(7))
                values = {r.model.value for r in receivers}
            assert idle()
        return values.pop()

    with crew(of=kind) as (sender, [receiver]):
        for value in range(2, 5):
            assert in_fork(child) == 7
            sender.send(sender.model.fill(value))
            assert receiver.model.value == value
        assert in_fork(lambda: in_fork(child)) == 7


def test_a_forked_child_that_collects_the_parents_scheme_leaves_it_working() -> None:
    schemes: list[Any] = []

    def child() -> bool:
        schemes.clear()
        for link in [o for o in gc.get_objects() if type(o).__name__ in ("TrainerLink", "WorkerLink")]:
            link.__dict__.clear()  # the worst that could happen to it
        gc.collect()
        return True

    with crew() as (sender, [receiver]):
        schemes += [sender, receiver]
        assert in_fork(child)
        for value in range(2, 5):
            sender.send(sender.model.fill(value))
            assert receiver.model.value == value


def test_a_scheme_that_is_initialised_only_works_on_both_sides_of_a_fork() -> None:
    sender = new_sender(10)

    def child() -> bool:
        assert sender.version == 0
        sender.shutdown()
        other = ZMQWeightSyncScheme()
        other.shutdown()
        return idle()

    assert in_fork(child)
    assert not sender.closed
    sender.shutdown()


PROGRAM = """
import gc, os, sys
import uvloop
if sys.argv[1] == "uvloop":
    uvloop.install()
from helpers.blocking_crew import crew

with crew() as (sender, [receiver]):
    for value in (2, 3):
        pid = os.fork()
        if pid == 0:
            del sender, receiver
            gc.collect()
            if value == 2:
                with crew() as (mine, [other]):
                    mine.send(mine.model.fill(9))
            sys.exit(7)  # an end like any other: modules are taken down, what is open is closed
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        sender.send(sender.model.fill(value), timeout=5)
        assert receiver.model.value == value
print("over")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_forked_child_that_ends_as_any_program_leaves_the_parents_scheme_working(loop: str) -> None:
    done = python("-c", PROGRAM, loop)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "over"
