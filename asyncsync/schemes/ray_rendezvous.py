"""The rendezvous of Ray's schemes: a small actor with a name, which has the workers' introductions.

An actor whose own ``connect`` waits takes no other call, so the sender cannot bring an introduction there by calling
it; the worker asks this one, whose name follows from the pickled scheme. Ray restarts it with what it was made with if
its process ends, and ends it with the sender that has made it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from asyncsync.errors import NotConnected
from asyncsync.transports.ray_private import the_ray

LOOK_SECONDS = 0.05


def hold_introductions(name: str, introductions: Mapping[int, bytes], seconds: float) -> Any:
    """The actor, when workers can ask it. Raises NotConnected: Ray has not started it within so many seconds."""
    ray = the_ray()

    # In here, so that Ray takes the class itself along: its process need not import this library, which takes seconds.
    class ConnectionInfo:
        def __init__(self, introductions: dict[int, bytes]) -> None:
            self._introductions = introductions

        def introduction(self, worker: int) -> bytes | None:
            return self._introductions.get(worker)

    options = {"name": name, "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    holder = ray.remote(ConnectionInfo).options(**options).remote(dict(introductions))
    try:
        ray.get(holder.introduction.remote(0), timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        ray.kill(holder)
        raise NotConnected(
            f"Ray has not started the actor {name} within {seconds:g} s: can the cluster start processes? connect() "
            "may be called again"
        ) from error
    return holder


def find_introduction(name: str, worker: int, seconds: float) -> bytes:
    """Wait for the actor, and ask it. Any thread that may block.

    Raises:
        NotConnected: it is not there within so many seconds, or does not expect this worker.
    """
    ray = the_ray()
    deadline = time.monotonic() + seconds
    while True:
        try:
            holder = ray.get_actor(name)
            left = max(0.0, deadline - time.monotonic())
            introduction: bytes | None = ray.get(holder.introduction.remote(worker), timeout=left)
            break
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            if time.monotonic() + LOOK_SECONDS >= deadline:
                raise NotConnected(
                    f"worker {worker} has found no sender within {seconds:.3g} s: is it connecting, with the scheme "
                    f"that this one was pickled from, in this cluster and namespace? ({error}) connect() may be called "
                    "again"
                ) from error
        time.sleep(LOOK_SECONDS)
    if introduction is None:
        raise NotConnected(f"the sender does not expect a worker {worker}: give it one object per worker in remotes=")
    return introduction
