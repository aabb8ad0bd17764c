"""Commands to Ray's actors: the family and the actor's object are the real ones; between them, in Ray's place, are the
threads that Ray gives an actor, and what is large arrives late."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from asyncsync.collectors.distributed.node import Wishes
from asyncsync.collectors.distributed.ray_family import COMMANDS, NodeActor, RayFamily, _Commands
from asyncsync.collectors.workers.channel import dumps

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
