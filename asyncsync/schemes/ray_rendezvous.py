"""The rendezvous of Ray's schemes: a small actor with a name, where workers ask for their introductions.

An actor whose own ``connect`` waits takes no other call, so the sender cannot bring an introduction there by calling
it; the worker asks this one, whose name follows from the pickled scheme, and the sender, which waits there for
questions, answers. Ray restarts it if its process ends, and ends it with the sender that has made it; who waits there
then asks again.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from contextlib import suppress
from typing import Any

from asyncsync.errors import NotConnected
from asyncsync.net.introduction import Introduction, Introductions
from asyncsync.runtime.threads import until_cancelled
from asyncsync.transports.ray_private import the_ray

LOOK_SECONDS = 0.05
# A sender that waits for questions looks so often whether it is still wanted.
WANTED_SECONDS = 5.0


def hold_questions(name: str) -> Any:
    """The actor, which is being started. Blocks."""
    ray = the_ray()

    # In here, so that Ray takes the class itself along: its process need not import this library, which takes seconds.
    class ConnectionInfo:
        def __init__(self) -> None:
            self._answers: dict[int, asyncio.Future[bytes | None]] = {}
            self._asked: asyncio.Queue[int] = asyncio.Queue()

        async def is_there(self) -> bool:
            return True

        async def introduction(self, worker: int) -> bytes | None:
            if worker not in self._answers:
                self._answers[worker] = asyncio.get_running_loop().create_future()
                self._asked.put_nowait(worker)
            return await asyncio.shield(self._answers[worker])

        async def asked(self, seconds: float) -> int | None:
            try:
                return await asyncio.wait_for(self._asked.get(), seconds)
            except TimeoutError:
                return None

        async def introduce(self, worker: int, introduction: bytes | None) -> None:
            if worker in self._answers:
                self._answers.pop(worker).set_result(introduction)

    options = {"name": name, "num_cpus": 0, "max_restarts": -1}
    return ray.remote(ConnectionInfo).options(**options).remote()


async def when_there(holder: Any, name: str, seconds: float) -> None:
    """Workers can ask the actor. Raises NotConnected: Ray has not started it within so many seconds; RayError: it has
    ended."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.wrap_future(holder.is_there.remote().future())
    except TimeoutError as error:
        raise NotConnected(
            f"Ray has not started the actor {name} within {seconds:g} s: can the cluster start processes? connect() "
            "may be called again"
        ) from error


def kill(actor: Any) -> None:
    """End an actor for good, unless it has ended with its cluster."""
    ray = sys.modules["ray"]
    if ray.is_initialized():
        with suppress(ValueError):  # the program has joined another cluster since
            ray.kill(actor)


async def answer(holder: Any, introductions: weakref.ref[Introductions], num_workers: int | None) -> None:
    """Answer what workers ask the actor, until the sender or the cluster is gone."""
    ray = the_ray()
    while ray.is_initialized():  # else this would begin another cluster
        try:
            worker = await asyncio.wrap_future(holder.asked.remote(WANTED_SECONDS).future())
        except ray.exceptions.ActorUnavailableError:  # it is being restarted
            worker = None
            await asyncio.sleep(LOOK_SECONDS)
        except ray.exceptions.RayError:
            return
        if (introduce := introductions()) is None:
            return
        if worker is not None:
            expected = num_workers is None or worker < num_workers
            holder.introduce.remote(worker, introduce(worker).encode() if expected else None)
        del introduce


async def find_introduction(name: str, worker: int, seconds: float) -> Introduction:
    """Wait for the actor, and ask it.

    Raises:
        NotConnected: it is not there within so many seconds, or does not expect this worker.
    """
    ray = the_ray()
    why: Exception | None = None
    try:
        async with asyncio.timeout(max(0.0, seconds - LOOK_SECONDS)):
            while True:
                try:
                    holder = await until_cancelled("asyncsync-ray", lambda _: the_ray().get_actor(name))
                    found: bytes | None = await asyncio.wrap_future(holder.introduction.remote(worker).future())
                    break
                except (ValueError, ray.exceptions.RayActorError) as error:
                    why = error
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError as error:
        raise NotConnected(
            f"worker {worker} has found no sender within {seconds:.3g} s: is it connecting, with the scheme that this "
            f"one was pickled from, in this cluster and namespace?{'' if why is None else f' ({why})'} connect() may "
            "be called again"
        ) from error
    if found is None:
        raise NotConnected(f"the sender does not expect a worker {worker}: give it one object per worker in remotes=")
    return Introduction.decode(found)
