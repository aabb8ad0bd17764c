"""Remote calls: the schemes whose sender calls ``_receive_weights_scheme()`` of an object in each worker, as TorchRL
documents it for RPC and Ray. The bytes go through gloo, or through Ray's object store.

The bus does what it does for every scheme: versions, transfers, acknowledgements, late joiners. But a worker here
applies what has come when it is told to: a publication calls the objects of the workers that it is for, each method
runs ``scheme.receive()``, and that applies the version of the call, or a newer one. A call that comes late, after a
newer one, finds nothing to do and returns; one that came from another scheme of the same object returns at once. There
is one call at a time to each object; of the calls that wait for it, only the newest follows.

By RPC, the first call of a worker introduces it to its sender, and connects it: ``connect`` waits on neither side.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import sys
import threading
import traceback
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Annotated, Any, ClassVar, TypeVar, Unpack

import msgpack
from tensordict import TensorDict

from asyncsync.arguments import Option, checked, declared
from asyncsync.bus.carrier import Source
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore
from asyncsync.bus.worker import WorkerLink
from asyncsync.errors import AckTimeout, NotConnected, PeerLost, RemoteError, WeightSyncError
from asyncsync.net.endpoint import INTRODUCED, own_address
from asyncsync.net.rendezvous import THREAD, Introduction, MeetingPlace
from asyncsync.runtime.threads import elsewhere, settle
from asyncsync.schemes import aio
from asyncsync.schemes.options import RayOptions, RPCOptions, Strategy
from asyncsync.schemes.scheme import Scheme
from asyncsync.schemes.torch_distributed import check_backend
from asyncsync.transports.ray_objects import BlockingRayTransport, ObjectTransport, RayTransport
from asyncsync.transports.ray_private import kill, the_ray
from asyncsync.transports.torch_distributed import BlockingRPCTransport, PairTransport, RPCTransport

RECEIVE_METHOD = "_receive_weights_scheme"
CALL_SECONDS = 60.0
CHECK_SENDER_SECONDS = 0.25
# Longer than anything that the worker does there: its own limit has a better message.
RPC_SECONDS = 180.0

OBJECT_STORE = "object_store"
BACKENDS = ("gloo", "nccl", OBJECT_STORE)
TASK_NAME_PREFIX = f"{RECEIVE_METHOD} asyncsync:"  # a call's name, as Ray shows it; what follows is the Call
CONNECT_MARGIN = 1.0  # a connect that is late says why
TRANSFORM_MODEL_ID = "transform_module"  # what a transform's module is called where the sender gives it no name
ANSWER_POLL_SECONDS = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a worker's object."""

    uid: str  # of the bus that calls
    worker: int  # which worker it takes the object for
    versions: dict[str, int]  # what is to be applied, by the models' names
    introduction: bytes | None = None  # how to find the sender, where the call says that

    def encode(self) -> bytes:
        encoded: bytes = msgpack.packb([self.uid, self.worker, self.versions, self.introduction])
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> Call:
        return cls(*msgpack.unpackb(data))

    def version(self, model_id: str) -> int | None:
        """Of this model; None: the call does not concern it."""
        return self.versions.get(model_id, self.versions.get(""))  # a sender with one model need not name it


def failure_of(error: BaseException) -> Exception:
    """A worker's exception, as it travels to the sender: the library's own as it is, others with their traceback."""
    if isinstance(error, WeightSyncError):
        return error
    kind = type(error)
    shown = "".join(traceback.format_exception(error))
    return RemoteError(f"{kind.__module__}.{kind.__qualname__}", str(error), shown)


@dataclass
class _WorkerCalls:
    """The calls of one worker's object."""

    wanted_version: int = 0
    ended_version: int = 0
    failure: Exception | None = None  # of the last call, which was for ``ended_version``
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class _BusCalls:
    """The calls of one bus; see :class:`asyncsync.bus.carrier.Calls`."""

    def __init__(self, bus: BusCore, remotes: Mapping[int, Any], call: Callable[[Call], Awaitable[None]]) -> None:
        self._bus = bus
        self._remotes = remotes
        self.call = call
        self._callers: dict[int, _WorkerCalls] = {}

    def begin(self, version: int, workers: Sequence[int] | None, models: Sequence[str]) -> None:
        link = self._bus.trainer_link()
        chosen = link.machine.progress.targeted(version, models) if workers is None else workers
        for worker in chosen:
            if worker in self._remotes:
                caller = self._callers.setdefault(worker, _WorkerCalls())
                caller.wanted_version = version
                if caller.task is None:
                    caller.task = link.loop.create_task(self._run(worker, caller))

    def is_pending(self, worker: int, version: int) -> bool:
        caller = self._callers.get(worker)
        return caller is not None and caller.ended_version < version <= caller.wanted_version

    def failure(self, worker: int, version: int) -> Exception | None:
        caller = self._callers.get(worker)
        return None if caller is None or caller.ended_version < version else caller.failure

    async def _run(self, worker: int, caller: _WorkerCalls) -> None:
        link = self._bus.trainer_link()
        targets = link.machine.targets
        called: dict[str, int] = {}

        def is_settled(version: int) -> bool:
            return version not in targets.pending

        try:
            while caller.ended_version < (version := caller.wanted_version):
                failed: Exception | None = None
                try:
                    # Until all workers have accepted its layout, one may refuse it, and then it goes to none.
                    await link.wait(partial(is_settled, version), CALL_SECONDS)
                    due = {m: t.version for m in targets.models if (t := targets.target(worker, m)) is not None}
                    if due != called and worker in self._remotes:
                        called = due
                        await self.call(Call(self._bus.uid, worker, due))
                except Exception as error:
                    failed = error
                caller.ended_version, caller.failure = version, failed
                link.notify()
        finally:
            caller.task = None

    async def close(self) -> None:
        """Wait for no call any more. What runs in a worker ends by itself."""
        tasks = [caller.task for caller in self._callers.values() if caller.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class RemoteCallCore(Scheme):
    """A scheme of either API whose sender calls the workers' objects."""

    _repoints_parameters = _is_introduced = True

    def _reset(self) -> None:
        super()._reset()
        self._remotes: dict[int, Any] = {}

    # -- of a subclass ------------------------------------------------------------------------------------------------

    _remotes_attribute: ClassVar[
        str
    ]  # the attribute of a context in which TorchRL's collectors have the workers' objects

    @abstractmethod
    async def _call(self, call: Call) -> None:
        """Sender: call a worker's object, and wait until the call ends. Raises PeerLost if the worker is gone, and
        what the object has raised."""

    # -- what users call ----------------------------------------------------------------------------------------------

    @property
    def remotes(self) -> dict[int, Any]:
        """The workers' objects, ``{worker_idx: object}``, that a sender calls. To be changed where workers come and go;
        one that is not in there is sent weights all the same, and applies them by itself if it has ``apply="auto"``."""
        return self._remotes

    @checked(Scheme.init_on_sender)
    def init_on_sender(
        self,
        *,
        remotes: Sequence[Any] | Mapping[int, Any] | None = None,
        context: Any = None,
        num_workers: int | None = None,
        min_workers: int | None = None,
        remote_collectors: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        """Make this the sender's side. Sets up local state only.

        Args:
            remotes: the workers' objects, in the order of their indices; ``{worker_idx: object}`` where they come and
                go, or are put into :attr:`remotes` later. Each has a method ``_receive_weights_scheme()``, which runs
                its scheme's ``receive()``.
            context: an object that has them, as TorchRL's collectors do; see :meth:`Scheme.init_on_sender`.
            num_workers: fixed number of workers; None: as many as there are ``remotes`` in a sequence, unless
                ``min_workers`` says that they come and go.
            remote_collectors: TorchRL's name for ``remotes``.
            min_workers, options: as for every scheme.

        Raises:
            ValueError: there are no objects, or not as many as workers.
        """
        given = remote_collectors if remotes is None else remotes
        if given is None and context is not None:
            given = getattr(context, self._remotes_attribute, None)
        if given is None:
            raise ValueError(
                f"{type(self).__name__} calls {RECEIVE_METHOD}() of the workers' objects: pass remotes=[…], or a "
                "context that has them"
            )
        found = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
        fixed = num_workers or self._bus.num_workers
        if fixed is None and not isinstance(given, Mapping) and min_workers is None and self._bus.min_workers == 1:
            fixed = len(found)
        wanted = set(range(fixed or 0))
        if fixed is not None and (found.keys() - wanted or (found.keys() < wanted and not isinstance(given, Mapping))):
            raise ValueError(f"num_workers={fixed}, but there are objects of the workers {sorted(found)}")
        super().init_on_sender(context=context, num_workers=fixed, min_workers=min_workers, **options)
        self._set_remotes(found)

    def _set_remotes(self, remotes: dict[int, Any]) -> None:
        self._remotes = remotes
        self._bus.calls = _BusCalls(self._bus, remotes, self._call)

    def init_like(self, original: Scheme) -> None:
        super().init_like(original)
        if self.role == "sender":
            self._set_remotes(self._remotes)

    @checked(Scheme.init_on_receiver)
    def init_on_receiver(
        self, model_id: str, context: Any = None, *, apply: str = "on_receive", **options: Any
    ) -> None:
        super().init_on_receiver(model_id, context=context, apply=apply, **options)

    # -- in a worker --------------------------------------------------------------------------------------------------

    async def _receive(self, timeout: float | None, call: Call | None = None) -> TensorDict | None:
        if call is None:
            return await super()._receive(timeout)
        self._check_can_receive(timeout)
        version = call.version(self.topic)
        if call.uid != self._bus.uid or version is None:
            return None  # it is for another scheme of the same object
        if self._worker_idx not in (None, call.worker):
            raise ValueError(
                f"this object is worker {self._worker_idx}, but its sender calls it as worker {call.worker}: the "
                "sender's remotes must have each object once, in the place of its worker_idx"
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (CALL_SECONDS if timeout is None else timeout)
        if not self.is_registered:
            if call.introduction is not None:
                self._bus.introduction = Introduction.decode(call.introduction)
            # Not as a subclass connects: by RPC, only a call does.
            await self._run_unless_sender_lost(call, Scheme.connect_receiver(self, call.worker, CALL_SECONDS))
            self.last_returned = None  # the user has not been told of any yet
        try:
            reach = self._receive_version(version, max(0.0, deadline - loop.time()), call.versions)
            return await self._run_unless_sender_lost(call, reach)
        except AckTimeout:
            if timeout is None:
                raise
            return None

    async def _receive_version(self, version: int, timeout: float, others: Mapping[str, int]) -> TensorDict | None:
        """This version, or a newer one, applied, with what these other models have got together with it; None if it was
        returned already."""
        link, before = self._bus.worker_link(), self.last_returned
        mark = await link.wait_reached(self.topic, version, timeout, others)
        return None if mark == before else await self._return_copy(link, mark, before)

    async def _run_unless_sender_lost(self, call: Call, doing: Coroutine[Any, Any, T]) -> T:
        """Do what a call asks for, unless the caller dies meanwhile: its successor calls again, and until then the
        object is to be had. Raises PeerLost."""
        task = asyncio.ensure_future(doing)
        try:
            while not (await asyncio.wait({task}, timeout=CHECK_SENDER_SECONDS))[0]:
                link = self._bus.link
                if isinstance(link, WorkerLink) and link.is_lost:
                    raise PeerLost(
                        f"worker {call.worker} was called for the versions {call.versions}, and the sender is lost: "
                        "they will not come"
                    )
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def end_transport(self, timeout: float) -> None:
        calls = self._bus.calls
        if isinstance(calls, _BusCalls) and calls.call == self._call:
            await calls.close()
        await super().end_transport(timeout)


# -- RPC ---------------------------------------------------------------------------------------------------------------

_current: ContextVar[Call | None] = ContextVar("asyncsync_call", default=None)


class RPCCore(RemoteCallCore):
    """What the scheme is, in both APIs."""

    _remotes_attribute = "collector_rrefs"

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[RPCOptions]) -> None:
        check_backend(options["backend"])
        self._configure(strategy, options)
        self.backend = options["backend"]

    def create_transport(self, **kwargs: Any) -> PairTransport:
        """The transport of this scheme's API."""
        kind = BlockingRPCTransport if self.is_blocking else RPCTransport
        return kind(own_address(), self._options["map_above"], backend=self.backend)

    async def initial_source(self, weights: Any) -> Source | None:
        return None if weights is None else await super().initial_source(weights)

    async def connect_sender(self, initial: Source | None, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        await self._host_meeting_place(timeout)
        link = self._bus.open_trainer()
        machine = link.caught_up()
        machine.serve(self.topic, loop.time())
        machine.assemble(self.topic)  # workers that were not called yet are not waited for
        link.settle()
        if initial is not None:
            deadline = loop.time() + timeout
            await link.publish({self.topic: initial}, {self.topic: self.carrier()}, None, deadline=deadline)
        self.is_registered = True

    def register_receiver(self, worker_idx: int | None = None) -> None:
        if worker_idx is not None:  # else it is the bus that connects, and no call
            super().register_receiver(worker_idx)

    async def connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        if worker_idx is not None:
            self._check_worker(worker_idx)
            self._worker_idx = worker_idx

    async def _receive(self, timeout: float | None, call: Call | None = None) -> TensorDict | None:
        if call is None and self.role == "receiver" and not self.is_registered:
            self._check_open()
            raise NotConnected("this worker has not been called by its sender yet, which introduces it")
        return await super()._receive(timeout, call)

    async def _call(self, call: Call) -> None:
        if self._bus.endpoint == INTRODUCED:
            call = replace(call, introduction=self._bus.trainer_link().introductions(call.worker).encode())
        rref = self._remotes[call.worker]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> Any:
            call_there = import_module("torch.distributed.rpc").rpc_async
            there, arguments = (
                import_module("asyncsync.sync").RPCWeightSyncScheme.receive_in_worker,
                (rref, call.encode()),
            )
            calling = call_there(rref.owner(), there, arguments, timeout=RPC_SECONDS)
            calling.add_done_callback(lambda _: settle(done))
            return calling

        try:
            calling = await elsewhere("asyncsync-call", begin)  # it may connect, which blocks
            await done
            failure: Exception | None = calling.value()
        except RuntimeError as error:
            raise PeerLost(f"worker {call.worker} is lost: it cannot be called by RPC: {error}") from error
        if failure is not None:
            raise failure

    def current_call(self) -> Call | None:
        return _current.get()

    # Not a function of this module: several calls may come at once, before anything of asyncsync was imported. Threads
    # that import different modules of a package wait for each other; threads that all import asyncsync.sync do not.
    @classmethod
    def receive_in_worker(cls, rref: Any, encoded: bytes) -> Exception | None:
        # In the worker: have the object receive. Returns what it raised.
        token = _current.set(Call.decode(encoded))
        try:
            outcome = getattr(rref.local_value(), RECEIVE_METHOD)()
            if inspect.isawaitable(outcome):
                if inspect.iscoroutine(outcome):
                    outcome.close()
                raise TypeError(
                    f"{RECEIVE_METHOD} must be an ordinary method: RPC calls it on a thread that has no event loop"
                )
        except Exception as error:
            return failure_of(error)
        finally:
            _current.reset(token)
        return None


class RPCWeightSyncScheme(RPCCore, aio.WeightSyncScheme):
    """Weights for objects in processes of ``torch.distributed.rpc``. Usage::

        rrefs = [rpc.remote(f"worker{index}", Worker, (scheme.blocking, index)) for index in range(2)]
        scheme.init_on_sender(model_id="policy", model=policy, remotes=rrefs)
        await scheme.connect()                     # does not wait
        version = await scheme.send_async()        # calls each object's _receive_weights_scheme()

    and in the object, with the blocking class of :mod:`asyncsync.sync`::

        self.scheme.init_on_receiver("policy", model=self.policy, worker_idx=index)

        def _receive_weights_scheme(self):
            self.scheme.receive()
    """


# -- Ray ---------------------------------------------------------------------------------------------------------------

Backend = Annotated[
    str,
    Option(
        doc='how the bytes travel. ``"gloo"``: through a connection of torch.distributed for each actor; '
        '``"object_store"``: through Ray\'s object store, once for all actors of a host.'
    ),
]


class ActorPlace(MeetingPlace):
    """The meeting place of Ray's schemes: a small actor, whose name follows from the pickled scheme. (A worker's actor
    takes no call while its ``connect`` waits, so the sender cannot bring an introduction there.) Ray restarts it if its
    process ends, calls it again then, and ends it with the sender that has made it."""

    outlives_sender = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.actor: Any = None
        self._name = name

    async def open(self) -> None:
        if self.actor is None:
            await elsewhere(THREAD, self._start)  # the actor is this sender's, also if it is cancelled meanwhile
        try:
            await _call_actor(self.actor.is_there)
        except NotConnected as error:
            self.actor = None
            raise NotConnected(f"the actor {self._name} has ended; connect() may be called again") from error

    def _start(self) -> None:
        # In here, so that Ray takes the class itself along: to import this library would take the actor seconds.
        class ConnectionInfo:
            def __init__(self) -> None:
                self._answers: dict[int, asyncio.Future[bytes]] = {}
                self._unanswered: asyncio.Queue[int] = asyncio.Queue()

            async def is_there(self) -> None:
                pass

            async def ask(self, worker: int) -> bytes:
                if worker not in self._answers:
                    self._answers[worker] = asyncio.get_running_loop().create_future()
                    self._unanswered.put_nowait(worker)
                return await asyncio.shield(self._answers[worker])

            async def asked(self) -> int:
                return await self._unanswered.get()

            async def answer(self, worker: int, answer: bytes) -> None:
                if worker in self._answers:
                    self._answers.pop(worker).set_result(answer)

        options = {"name": self._name, "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        self.actor = the_ray().remote(ConnectionInfo).options(**options).remote()

    def ask(self, worker: int, over: threading.Event) -> bytes:
        ray = the_ray()
        try:
            answer: Future[bytes] = ray.get_actor(self._name).ask.remote(worker).future()
            while not over.is_set():
                with suppress(TimeoutError):
                    return answer.result(ANSWER_POLL_SECONDS)
        except (ValueError, ray.exceptions.RayError) as error:
            raise NotConnected(str(error)) from error
        raise NotConnected("there is no answer yet")

    async def asked(self) -> tuple[int, int]:
        worker: int = await _call_actor(self.actor.asked)
        return worker, worker

    async def answer(self, key: int, answer: bytes) -> None:
        await _call_actor(self.actor.answer, key, answer)

    async def end(self) -> None:
        actor, self.actor = self.actor, None
        if actor is not None:
            await elsewhere(THREAD, partial(kill, actor))

    def late(self, seconds: float, worker: int | None = None) -> str:
        if worker is None:
            late = f"Ray has not started the actor {self._name} within {seconds:g} s: can the cluster start processes?"
        else:
            late = (
                f"worker {worker} has found no sender within {seconds:.3g} s: is it connecting, with the scheme that "
                f"this one was pickled from, in this cluster and namespace?{f' ({self.why})' if self.why else ''}"
            )
        return f"{late} connect() may be called again"


async def _call_actor(method: Any, *args: Any) -> Any:
    """What this method of an actor returns. Raises NotConnected: the actor has ended; RuntimeError: this process is in
    no cluster, and would begin one."""
    ray = the_ray()
    try:
        return await asyncio.wrap_future(method.remote(*args).future())
    except ray.exceptions.RayError as error:
        raise NotConnected(str(error)) from error


class RayCore(RemoteCallCore):
    """What Ray's schemes are, in both APIs."""

    _remotes_attribute = "remote_collectors"

    @declared
    def __init__(
        self, strategy: Strategy = "tensordict", backend: Backend = "gloo", **options: Unpack[RayOptions]
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
        if backend != OBJECT_STORE:
            check_backend(backend)
        self._configure(strategy, options)
        self._backend = backend

    def _reset(self) -> None:
        super()._reset()
        self._given_info_name = ""  # if it was told another

    def create_transport(self, **kwargs: Any) -> ObjectTransport:
        """The transport of this scheme's API."""
        kind = BlockingRayTransport if self.is_blocking else RayTransport
        return kind(own_address(), self._options["map_above"], stores=self._backend == OBJECT_STORE)

    @property
    def connection_info_name(self) -> str:
        """The name of the actor that has the workers' introductions."""
        return self._given_info_name or f"asyncsync-{self._bus.uid}"

    @property
    def connection_info(self) -> str:
        """What :meth:`_set_dist_connection_info` of a receiver takes."""
        return self.connection_info_name

    def _set_dist_connection_info(self, connection_info: str, worker_idx: int = 0) -> None:
        """Connect a receiver that is initialised, as this worker: as TorchRL's page on ``cascade_execute`` shows it,
        with a reference to the sender's :attr:`connection_info`."""
        if not self.is_blocking:
            raise TypeError("this is the asyncio scheme: connect it by `await scheme.connect(worker_idx=…)`")
        if not isinstance(connection_info, str):
            ray = the_ray()
            connection_info = ray.get(connection_info, timeout=DEFAULT_TIMEOUT)
        self._given_info_name = connection_info
        scheme: Any = self
        scheme.connect(worker_idx=worker_idx)

    def _meeting_place(self) -> ActorPlace:
        return ActorPlace(self.connection_info_name)

    async def _address_for_workers(self) -> str:
        host: str = await elsewhere(THREAD, lambda: the_ray().util.get_node_ip_address())
        return host

    async def _call(self, call: Call) -> None:
        method = getattr(self._remotes[call.worker], RECEIVE_METHOD)
        # The name is shown for the task, and is all that reaches the method beside its arguments. An actor that is
        # being restarted is called when it is there.
        name = TASK_NAME_PREFIX + base64.b64encode(call.encode()).decode()
        await _wait_for_call(method.options(name=name, max_task_retries=-1).remote(), call.worker)

    def current_call(self) -> Call | None:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return None
        name = ray.get_runtime_context().get_task_name() or ""
        if not name.startswith(TASK_NAME_PREFIX):
            return None
        try:
            return Call.decode(base64.b64decode(name.removeprefix(TASK_NAME_PREFIX)))
        except (ValueError, TypeError):
            return None  # a name of the user's


async def _wait_for_call(reference: Any, worker: int) -> None:
    """Wait for the end of a call of this worker's actor."""
    exceptions = the_ray().exceptions
    try:
        await asyncio.wrap_future(reference.future())
    except exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, WeightSyncError) else failure_of(error)) from None
    except exceptions.RayError as error:
        raise PeerLost(f"worker {worker} is lost: its actor cannot be called: {error}") from error


class RayWeightSyncScheme(RayCore, aio.WeightSyncScheme):
    """Weights for actors of Ray's. Usage::

        scheme = RayWeightSyncScheme(backend="object_store")
        actors = [Actor.remote(scheme, index) for index in range(2)]
        scheme.init_on_sender(model_id="policy", model=policy, remotes=actors)
        await scheme.connect()
        version = await scheme.send_async()        # calls each actor's _receive_weights_scheme()

    and in an actor, with the blocking class of :mod:`asyncsync.sync` (``scheme.blocking``)::

        def connect(self):
            self.scheme.init_on_receiver("policy", model=self.policy, worker_idx=self.index)
            self.scheme.connect()

        def _receive_weights_scheme(self):
            self.scheme.receive()
    """


class RayTransformCore(RayCore):
    """What the scheme of a RayModuleTransform is, in both APIs."""

    def _reset(self) -> None:
        super()._reset()
        self._transform: Any = None

    def _set_transform(self, transform: Any) -> None:
        """A RayModuleTransform has been given this scheme."""
        self._transform = transform

    @checked(RayCore.init_on_sender)
    def init_on_sender(self, *, ray_transform: Any = None, **options: Any) -> None:
        """Make this the sender's side.

        Args:
            ray_transform: the RayModuleTransform, unless that was given this scheme.
            options: as for every scheme.

        Raises:
            ValueError: there is no transform.
        """
        transform = self._transform if ray_transform is None else ray_transform
        if transform is None:
            raise ValueError(
                "which transform? Give this scheme to RayModuleTransform(weight_sync_scheme=…), or pass ray_transform="
            )
        super().init_on_sender(**{"remotes": [transform._actor], **options})
        self._transform = transform

    @checked(RayCore.init_on_receiver)
    def init_on_receiver(self, model_id: str, context: Any = None, **options: Any) -> None:
        options = {"worker_idx": 0, "model": getattr(context, "module", None), **options}
        super().init_on_receiver(model_id, context=None, **options)
        self._context = context

    async def connect_sender(self, initial: Source | None, timeout: float) -> None:
        # The sender alone connects: it has the transform's actor do its part.
        if self.is_registered:
            await super().connect_sender(initial, timeout)
            return
        scheme: Any = self
        initialise = self._remotes[0]._init_weight_sync_scheme
        there = _wait_for_call(
            initialise.remote(scheme=scheme.blocking, model_id=self.model_id or TRANSFORM_MODEL_ID), 0
        )
        here = super().connect_sender(initial, timeout)
        try:
            async with asyncio.timeout(timeout + CONNECT_MARGIN), asyncio.TaskGroup() as both:
                both.create_task(there)
                both.create_task(here)
        except* WeightSyncError as errors:
            raise errors.exceptions[0] from None
        except* TimeoutError:
            raise NotConnected(
                f"the transform's actor has not connected within {timeout:g} s: is it busy? connect() may be "
                "called again"
            ) from None


class RayModuleTransformScheme(RayTransformCore, aio.WeightSyncScheme):
    """Weights for the module of a RayModuleTransform of TorchRL's. Only the sender is connected by the user."""
