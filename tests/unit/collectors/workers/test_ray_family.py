"""Commands to Ray's actors: the family and the actor's object are the real ones; between them, in Ray's place, are the
threads that Ray gives an actor, and what is large arrives late."""

import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncsync.collectors.distributed.node import Wishes
from asyncsync.collectors.distributed.ray import COMMANDS, NodeActor, RayFamily, _Commands
from asyncsync.collectors.workers.messages import dumps
from asyncsync.runtime.threads import join
from helpers.programs import RAY, in_program

LATE_SECONDS = 0.1


class Threads:
    """An actor's, and how its methods are called."""

    def __init__(self) -> None:
        self.actor = NodeActor(0)
        self.pools = {group: ThreadPoolExecutor(COMMANDS) for group in ("commands", "signals")}

    def __getattr__(self, name: str) -> Any:
        def options(*, concurrency_group: str) -> Any:
            return SimpleNamespace(remote=lambda *args: self._begin(concurrency_group, name, args))

        return SimpleNamespace(options=options)

    def _begin(self, group: str, name: str, args: tuple[Any, ...]) -> Any:
        found: Future[Any] = Future()

        def arrive() -> None:
            self.pools[group].submit(lambda: found.set_result(getattr(self.actor, name)(*args)))

        Timer(LATE_SECONDS, arrive).start() if len(dumps(args)) > 1 << 20 else arrive()
        return SimpleNamespace(future=lambda: found)


@contextmanager
def family() -> Iterator[RayFamily]:
    made, threads = RayFamily([{}], None, 0), Threads()
    made.actors[0], made._numbers[0] = threads, 0
    made._commands[0] = _Commands(threads)
    try:
        yield made
    finally:
        made.submit(0, ("stop", Wishes(1, stopped=True), 2.0)).result(20)
        for pool in threads.pools.values():
            pool.shutdown()


@pytest.mark.timeout(20)
def test_many_commands_may_overtake_one_with_large_arguments() -> None:
    order: list[int] = []
    with family() as nodes:
        for number in range(4 * COMMANDS):
            command = ("call", "state", b"x" * (2 << 20) if number == 3 else b"")
            nodes.submit(0, command).add_done_callback(lambda _, number=number: order.append(number))
        nodes.submit(0, ("call", "state", b"")).result(10)
    assert sorted(order) == [*range(4 * COMMANDS)]


# -- this process's connection to Ray ----------------------------------------------------------------------------------


def _sessions() -> dict[str, Any]:
    import ray

    from asyncsync.collectors.distributed.ray import connection
    from asyncsync.sync import RayWeightSyncScheme

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        given = {**RAY, "_temp_dir": folder}

        thread = threading.Thread(target=connection.hold, args=("first", ray, given))
        thread.start()
        thread.join()
        scheme = RayWeightSyncScheme(min_workers=0)
        scheme.init_on_sender(model_id="policy", weights={"a": torch.ones(2)}, remotes={})
        scheme.connect()
        ray.shutdown()
        ray.init(**given)
        connection.hold("second", ray, given)
        scheme.shutdown()
        connection.release("first", ray)
        connection.release("second", ray)
        found["the program's own goes on"] = ray.is_initialized()
        threads = [thread for thread in threading.enumerate() if thread.name == "asyncsync-ray"]
        found["threads that outlive their sessions"] = [thread for thread in threads if not join(thread, 10.0)]
        ray.shutdown()

        connection.hold("third", ray, given)
        ray.shutdown()
        connection.hold("fourth", ray, given)
        connection.release("third", ray)
        found["in use"] = ray.is_initialized()
        connection.release("fourth", ray)
        found["ended"] = not ray.is_initialized()
    return found


@pytest.mark.thorough
@pytest.mark.timeout(200)
@pytest.mark.ray
def test_a_session_that_the_program_has_begun_meanwhile_is_its_own() -> None:
    found = in_program(_sessions, seconds=150)
    assert found.pop("threads that outlive their sessions") == []
    assert found == {"the program's own goes on": True, "in use": True, "ended": True}
