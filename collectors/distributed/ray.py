"""RayFamily: nodes as Ray actors. Also replay buffers in Ray actors, and this process's connection to Ray.

The trainer calls an actor with messages, and asks it for answers, one call at a time. A batch is a Ray object. It stays
in the object store of the host that made it until the caller who wants the batch fetches it.

Collectors and evaluators share the connection. If the program has not made one, the first of them makes it, and the
last one ends it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.distributed.nodes import Node, NodeFamily
from asyncsync.collectors.workers.group import Reports
from asyncsync.collectors.workers.messages import Parcel, loads
from asyncsync.collectors.workers.worker import Message
from asyncsync.errors import PeerLost
from asyncsync.runtime.threads import WorkThread, until_done
from asyncsync.transports.ray_private import import_ray, kill

CONCURRENCY_GROUPS = {"messages": 2, "answers": 1}
"""Threads of an actor, besides the one in which schemes call it. Those of "messages" never wait."""

FETCH_SECONDS = 60.0


class NodeActor(Node):
    """The actor's object: a node. TorchRL's and this library's schemes also call its methods."""

    def parcels(self) -> tuple[list[Message], Any]:
        """Answers, and the last one's batch by itself, which makes it a Ray object of its own."""
        messages, batch = self.answers(), None
        if messages[-1][0] == "result":
            *head, batch = messages[-1]
            messages[-1] = (*head, batch is not None)
        return messages, batch


class RayFamily(NodeFamily):
    """Nodes as actors.

    Args:
        configs: arguments of ``ray.remote`` for each actor.
        init_config: arguments of ``ray.init``, if the program has not called that. None: no arguments.
        restarts: how often a dead actor is made anew.
    """

    def __init__(
        self, configs: Sequence[Mapping[str, Any]], init_config: Mapping[str, Any] | None, restarts: int
    ) -> None:
        super().__init__(restarts)
        self.actors: list[Any] = [None] * len(configs)
        self._sent: Counter[int] = Counter()  # number of messages sent to each actor
        self._configs = configs
        self._init_config = init_config
        self._ray: Any = None

    def prepare(self) -> None:
        self._ray = import_ray()
        connection.hold(self, self._ray, self._init_config or {})

    def start(self, rank: int, reports: Reports) -> None:
        self._kill(rank)  # what is left of a lost actor
        self.node_names.pop(rank, None)
        config = {"max_restarts": 0, **self._configs[rank], "concurrency_groups": CONCURRENCY_GROUPS}
        self.actors[rank], self._sent[rank] = self._ray.remote(**config)(NodeActor).remote(rank), 0
        self._listen(rank, self.actors[rank], reports)

    def send(self, rank: int, message: Message) -> None:
        number, self._sent[rank] = self._sent[rank], self._sent[rank] + 1
        self.actors[rank].put.options(concurrency_group="messages").remote(number, message)

    def _listen(self, rank: int, actor: Any, reports: Reports) -> None:
        try:
            answers, batch = actor.parcels.options(concurrency_group="answers", num_returns=2).remote()
            answers.future().add_done_callback(partial(self._answered, rank, actor, reports, batch))
        except Exception as error:  # Ray has been shut down
            self.call_soon(reports.lost, error)

    def _answered(self, rank: int, actor: Any, reports: Reports, batch: Any, answers: Future[Any]) -> None:
        if (error := answers.exception()) is not None:
            self.call_soon(reports.lost, error)
            return
        messages = answers.result()
        if messages[-1][0] == "result":  # the batch is given by its reference
            messages[-1] = (*messages[-1][:-1], batch if messages[-1][-1] else None)
        self.report(rank, reports, messages)
        if messages[-1] != ("ended",):
            self._listen(rank, actor, reports)

    def remote(self, rank: int) -> Any:
        return self.actors[rank]

    def batch(self, rank: int, payload: Any) -> TensorDictBase:
        try:
            parcel = self._ray.get(payload, timeout=FETCH_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise PeerLost(f"a batch of {self.name(rank)} was lost: {error}") from error
        # Copied, because Ray's buffers lie in its object store and are read-only.
        batch: TensorDictBase = loads(Parcel(parcel.pickled, [bytearray(buffer) for buffer in parcel.buffers]))
        return batch

    def name(self, rank: int) -> str:
        name = self.node_names.get(rank)
        return f"node {rank} (a Ray actor{'' if name is None else f', {name}'})"

    def close(self, deadline: float) -> None:
        for rank in range(len(self.actors)):
            self._kill(rank)
        if self._ray is not None:
            connection.release(self, self._ray)

    def _kill(self, rank: int) -> None:
        actor, self.actors[rank] = self.actors[rank], None
        if actor is not None:
            kill(actor)


class ActorBuffer:
    """A replay buffer in a Ray actor, to which workers write. It pickles as the actor's handle.

    ``extend`` and ``add`` return when the actor has stored the frames.
    """

    shared = True  # read by check_shared()

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


# -- the connection ----------------------------------------------------------------------------------------------------


class RayConnection:
    """This process's connection to Ray. When the last holder releases it, it ends, if :meth:`hold` has made it and the
    program has not made another one since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._begun: tuple[Any, WorkThread] | None = None  # the session made here, and a thread that lives as long

    def hold(self, holder: object, ray: Any, config: Mapping[str, Any]) -> None:
        with self._lock:
            if not ray.is_initialized():
                self._end(ray)  # if hold() made a connection, the program has ended it by ray.shutdown()
                init, thread = partial(ray.init, **config), WorkThread("asyncsync-ray")
                if threading.current_thread() is threading.main_thread():
                    init()
                else:  # in a lasting thread, because Linux kills the processes that Ray starts when their starter ends
                    try:
                        thread.submit_concurrent(init).result()
                    except BaseException:
                        thread.abandon()
                        raise
                self._begun = _session(ray), thread
            self._holders.add(holder)

    def release(self, holder: object, ray: Any) -> None:
        """Idempotent."""
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._end(ray)

    def _end(self, ray: Any) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            session, thread = begun
            if ray.is_initialized() and _session(ray) == session:
                ray.shutdown()
            thread.abandon()


def _session(ray: Any) -> Any:
    """An identifier of this process's present connection."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


connection = RayConnection()
