"""RayFamily: nodes as Ray's actors, and replay buffers as such.

An actor has two groups of threads: in one it takes commands, in the other signals, which so overtake a rollout. A batch
is an object of Ray's own: it stays in the store of the host where it was made until whoever wants the batch fetches it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.distributed.family import NodeFamily
from asyncsync.collectors.distributed.node import SIGNALS, Answer, Command, Node, where
from asyncsync.collectors.distributed.ray_connection import connection, library
from asyncsync.collectors.workers.channel import Parcel, loads
from asyncsync.errors import PeerLost
from asyncsync.runtime.threads import until_done
from asyncsync.transports.ray_private import kill

COMMANDS, SIGNAL_THREADS = 8, 6
"""Threads of an actor."""

FETCH_SECONDS = 60.0


class NodeActor:
    """What runs in the actor: a node, and what TorchRL's and this library's schemes call on the actors of a
    collector."""

    def __init__(self, rank: int) -> None:
        self._node = Node(rank)

    def ready(self) -> str:
        return where()

    def carry_out(self, number: int, command: Command) -> Answer:
        return self._node.carry_out(number, command).result()

    def roll_out(self, number: int, command: Command) -> tuple[Answer, Any]:
        """The same, with the batch apart."""
        answer = self.carry_out(number, command)
        return answer._replace(payload=None), answer.payload

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        return self._node.cascade_execute(attr_path, *args, **kwargs)

    def _receive_weights_scheme(self) -> None:
        self._node._receive_weights_scheme()


class _Commands:
    """Those of one actor. Each waits in a thread there for its turn, so there are no more on their way than threads:
    else one with large arguments that many have overtaken would never have one, and they would wait for it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Command, Future[Answer]]] = deque()
        self._under_way = 0

    def add(self, number: int, command: Command) -> Future[Answer]:
        found: Future[Answer] = Future()
        with self._lock:
            self._waiting.append((number, command, found))
        self._go_on()
        return found

    def _go_on(self) -> None:
        with self._lock:
            if not self._waiting or self._under_way == COMMANDS:
                return
            self._under_way += 1
            number, command, found = self._waiting.popleft()
        try:
            if command[0] == "rollout":
                method = self._actor.roll_out.options(concurrency_group="commands", num_returns=2)
                answer, batch = method.remote(number, command)
            else:
                method = self._actor.carry_out.options(concurrency_group="commands")
                answer, batch = method.remote(number, command), None
            answer.future().add_done_callback(partial(self._answered, found, batch))
        except Exception as error:  # Ray is not there any more
            found.set_exception(error)

    def _answered(self, found: Future[Answer], batch: Any, answer: Future[Answer]) -> None:
        with self._lock:
            self._under_way -= 1
        self._go_on()
        if (error := answer.exception()) is not None:
            found.set_exception(error)
        else:  # together with the reference to its batch
            found.set_result(answer.result()._replace(payload=batch))


class RayFamily(NodeFamily):
    """Nodes as actors.

    Args:
        configs: what ``ray.remote`` is given for each actor.
        init_config: for ``ray.init``, if nobody has called that; None: no arguments.
        restarts: how often an actor that has died is made anew.
    """

    def __init__(
        self, configs: Sequence[Mapping[str, Any]], init_config: Mapping[str, Any] | None, restarts: int
    ) -> None:
        super().__init__(restarts)
        self.actors: list[Any] = [None] * len(configs)
        self._commands: dict[int, _Commands] = {}
        self._configs = [dict(config) for config in configs]
        self._init_config = init_config
        self._ray: Any = None
        self._where: dict[int, str] = {}

    def open(self, count: int) -> None:
        self._ray = library()
        connection.hold(self, self._ray, self._init_config or {})

    def start(self, rank: int) -> Future[Any]:
        self.stop(rank, 0.0)  # what is left of one that was lost
        self._where.pop(rank, None)
        groups = {"commands": COMMANDS, "signals": SIGNAL_THREADS}
        config = {"max_restarts": 0} | self._configs[rank] | {"concurrency_groups": groups}
        actor = self._ray.remote(**config)(NodeActor).remote(rank)
        self.actors[rank], self._commands[rank] = actor, _Commands(actor)
        ready: Future[Any] = actor.ready.options(concurrency_group="signals").remote().future()
        ready.add_done_callback(lambda done: self._note(rank, done))
        return ready

    def _note(self, rank: int, ready: Future[Any]) -> None:
        if ready.exception() is None:
            self._where[rank] = ready.result()

    def send(self, rank: int, number: int, command: Command) -> Future[Answer]:
        if command[0] not in SIGNALS:
            return self._commands[rank].add(number, command)
        sent = self.actors[rank].carry_out.options(concurrency_group="signals").remote(number, command)
        future: Future[Answer] = sent.future()
        return future

    def remote(self, rank: int) -> Any:
        return self.actors[rank]

    def payload(self, rank: int, result: Any) -> TensorDictBase:
        try:
            parcel = self._ray.get(result, timeout=FETCH_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise PeerLost(f"a batch of {self.name(rank)} was lost: {error}") from error
        # What Ray returns lies in its store, and is read-only.
        batch: TensorDictBase = loads(Parcel(parcel.pickled, [bytearray(buffer) for buffer in parcel.buffers]))
        return batch

    def stop(self, rank: int, timeout: float) -> None:
        actor, self.actors[rank] = self.actors[rank], None
        if actor is not None:
            kill(actor)

    def name(self, rank: int) -> str:
        where = self._where.get(rank)
        return f"node {rank} (a Ray actor{'' if where is None else f', {where}'})"

    def close(self) -> None:
        if self._ray is not None:
            connection.release(self, self._ray)


class ActorBuffer:
    """A replay buffer in a Ray actor, to which workers write. It pickles as the actor's handle.

    ``extend`` and ``add`` return when the actor has stored the frames.
    """

    shared = True  # what check_shared() looks at

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "actor":
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, *args, **kwargs)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.actor, name).remote(*args, **kwargs).future()
        if not until_done(found, FETCH_SECONDS):
            raise TimeoutError(f"the Ray actor of a replay buffer did not answer {name}() within {FETCH_SECONDS:g} s")
        return found.result()
