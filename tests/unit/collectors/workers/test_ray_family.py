"""Messages to Ray's actors: the family and the actor's object are the real ones; between them, in Ray's place, are the
threads that Ray gives an actor, and what is large arrives late."""

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncsync.collectors.distributed.ray import CONCURRENCY_GROUPS, NodeActor, RayFamily
from asyncsync.collectors.workers.group import Reports
from asyncsync.collectors.workers.messages import dumps
from asyncsync.collectors.workers.worker import Message
from asyncsync.runtime.threads import join
from helpers.programs import RAY, in_program

LATE_SECONDS = 0.1


class Threads:
    """An actor's, and how its methods are called."""

    def __init__(self) -> None:
        self.actor = NodeActor(0)
        self.pools = {group: ThreadPoolExecutor(count) for group, count in CONCURRENCY_GROUPS.items()}

    def __getattr__(self, name: str) -> Any:
        def options(*, concurrency_group: str, num_returns: int = 1) -> Any:
            return SimpleNamespace(remote=lambda *args: self._begin(concurrency_group, name, args, num_returns))

        return SimpleNamespace(options=options)

    def _begin(self, group: str, name: str, args: tuple[Any, ...], num_returns: int) -> Any:
        found: list[Future[Any]] = [Future() for _ in range(num_returns)]

        def run() -> None:
            result = getattr(self.actor, name)(*args)
            for future, value in zip(found, result if num_returns > 1 else [result], strict=True):
                future.set_result(value)

        def arrive() -> None:
            self.pools[group].submit(run)

        Timer(LATE_SECONDS, arrive).start() if len(dumps(args)) > 1 << 20 else arrive()
        references = [SimpleNamespace(future=lambda future=future: future) for future in found]
        return references[0] if num_returns == 1 else references


@contextmanager
def family(heard: list[Message]) -> Iterator[RayFamily]:
    made, threads = RayFamily([{}], None, 0), Threads()
    made.call_soon = lambda function, *given: function(*given)
    made.actors[0] = threads
    made._listen(0, threads, Reports(heard.append, print, print))
    try:
        yield made
    finally:
        made.send(0, ("stop", True, 2.0))
        deadline = time.monotonic() + 20
        while ("ended",) not in heard and time.monotonic() < deadline:
            time.sleep(0.01)
        for pool in threads.pools.values():
            pool.shutdown()


@pytest.mark.timeout(20)
def test_many_messages_may_overtake_one_with_large_arguments() -> None:
    heard: list[Message] = []
    with family(heard) as nodes:
        for number in range(30):
            nodes.send(0, ("call", number, "state", b"x" * (2 << 20) if number == 3 else b""))
        while len(heard) < 31:
            time.sleep(0.01)
    assert [message[1] for message in heard if message[0] == "reply"] == [*range(30)]


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
