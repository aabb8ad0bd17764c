"""The schemes for RPC and Ray: the sender calls ``_receive_weights_scheme()`` of an object in each worker, as TorchRL
documents it. The bytes travel through gloo, or through Ray's object store.

The bus does what it does for every scheme: versions, transfers, acknowledgements, late joiners. But a worker applies an
update only when it is called. A publication calls the object of each worker that it is for. The object's method runs
``scheme.receive()``, which applies the version of the call, or a newer one. If a newer one is applied already, or if
the call came from another scheme of the same object, ``receive`` returns at once. The sender makes one call at a time
to each object; of the calls that wait meanwhile, it makes only the newest.

With RPC, ``connect`` waits on neither side: the sender's first call of a worker introduces and connects the worker.
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
from asyncsync.net.rendezvous import MEETING_THREAD, Introduction, MeetingPlace
from asyncsync.runtime.threads import run_in_thread, settle
from asyncsync.schemes import aio
from asyncsync.schemes.options import RayOptions, RPCOptions, Strategy
from asyncsync.schemes.scheme import Scheme
from asyncsync.schemes.torch_distributed import check_backend
from asyncsync.transports.ray_objects import BlockingRayTransport, ObjectTransport, RayTransport
from asyncsync.transports.ray_private import initialized_ray, kill
from asyncsync.transports.torch_distributed import BlockingRPCTransport, PairTransport, RPCTransport

METHOD = "_receive_weights_scheme"
CALL_SECONDS = 60.0
CHECK_SENDER_SECONDS = 0.25
# Longer than the limits within the worker, because their messages tell more.
RPC_SECONDS = 180.0

OBJECT_STORE = "object_store"
BACKENDS = ("gloo", "nccl", OBJECT_STORE)
TASK_NAME_PREFIX = f"{METHOD} asyncsync:"  # of a call's name, as Ray shows it; the encoded Call follows
CONNECT_MARGIN = 1.0  # added to connect()'s timeout, so that its own error, which tells more, comes first
TRANSFORM_MODEL_ID = "transform_module"  # the model_id of a transform's module, if the sender has none
ANSWER_POLL_SECONDS = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a worker's object."""

    uid: str  # of the sender's bus
    worker: int  # the worker that the sender takes the object for
    versions: dict[str, int]  # the versions to apply, by model_id
    introduction: bytes | None = None  # an encoded Introduction, if the worker learns the sender's address by calls

    def encode(self) -> bytes:
        encoded: bytes = msgpack.packb([self.uid, self.worker, self.versions, self.introduction])
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> Call:
        return cls(*msgpack.unpackb(data))

    def version(self, model_id: str) -> int | None:
        """The version of this model; None: the call is not about it."""
        return self.versions.get(model_id, self.versions.get(""))  # a sender with one model may have no model_id


def failure_of(error: BaseException) -> Exception:
    """A worker's exception as it travels to the sender: the library's own unchanged, others with their traceback."""
    if isinstance(error, WeightSyncError):
        return error
    kind = type(error)
    shown = "".join(traceback.format_exception(error))
    return RemoteError(f"{kind.__module__}.{kind.__qualname__}", str(error), shown)


@dataclass
class _WorkerCalls:
    """The calls of one worker's object."""

    wanted_version: int = 0  # the newest version to call it for
    ended_version: int = 0  # the newest version whose call has ended
    failure: Exception | None = None  # what that call raised
    task: asyncio.Task[None] | None = None  # makes the calls, one at a time


@dataclass(eq=False)
class _BusCalls:
    """The calls that one bus makes; see :class:`asyncsync.bus.carrier.Calls`."""

    _bus: BusCore
    _remotes: Mapping[int, Any]
    call: Callable[[Call], Awaitable[None]]
    _by_worker: dict[int, _WorkerCalls] = field(default_factory=dict)

    def begin(self, version: int, workers: Sequence[int] | None, models: Sequence[str]) -> None:
        link = self._bus.trainer_link()
        chosen = link.machine.progress.targeted(version, models) if workers is None else workers
        for worker in chosen:
            if worker in self._remotes:
                calls = self._by_worker.setdefault(worker, _WorkerCalls())
                calls.wanted_version = version
                if calls.task is None:
                    calls.task = link.loop.create_task(self._run(worker, calls))

    def is_pending(self, worker: int, version: int) -> bool:
        calls = self._by_worker.get(worker)
        return calls is not None and calls.ended_version < version <= calls.wanted_version

    def failure(self, worker: int, version: int) -> Exception | None:
        calls = self._by_worker.get(worker)
        return None if calls is None or calls.ended_version < version else calls.failure

    async def _run(self, worker: int, calls: _WorkerCalls) -> None:
        link = self._bus.trainer_link()
        targets = link.machine.targets
        called: dict[str, int] = {}

        def is_agreed() -> bool:
            return version not in targets.pending

        try:
            while calls.ended_version < (version := calls.wanted_version):
                failed: Exception | None = None
                try:
                    # Call none before all workers have accepted the layout: if one refuses it, none gets the version.
                    await link.wait(is_agreed, CALL_SECONDS)
                    due = {m: t.version for m in targets.models if (t := targets.target(worker, m)) is not None}
                    if due != called and worker in self._remotes:
                        called = due
                        await self.call(Call(self._bus.uid, worker, due))
                except Exception as error:
                    failed = error
                calls.ended_version, calls.failure = version, failed
                link.notify()
        finally:
            calls.task = None

    async def close(self) -> None:
        """Stop waiting for calls. A call that runs in a worker goes on there, and ends by itself."""
        tasks = [calls.task for calls in self._by_worker.values() if calls.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class RemoteCallCore(Scheme):
    """A scheme whose sender calls the workers' objects."""

    _repoints_parameters = _is_introduced = True

    def _reset(self) -> None:
        super()._reset()
        self._remotes: dict[int, Any] = {}

    # -- for subclasses -----------------------------------------------------------------------------------------------

    _remotes_attribute: ClassVar[str]  # where TorchRL's collectors have the workers' objects

    @abstractmethod
    async def _call(self, call: Call) -> None:
        """Sender: call a worker's object, and wait until the call ends. Raises what the object raised; PeerLost if the
        worker is lost."""

    # -- public methods -----------------------------------------------------------------------------------------------

    @property
    def remotes(self) -> dict[int, Any]:
        """Sender: the workers' objects to call, ``{worker_idx: object}``. Change this dict when workers come and go. A
        connected worker that is not in it gets weights, too, and applies them by itself if it has ``apply="auto"``."""
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
        """Make this scheme the sender. Sets up local state only.

        Args:
            remotes: the workers' objects, in the order of their indices. If workers come and go, or if you put objects
                into :attr:`remotes` later: ``{worker_idx: object}``. Each object has a method
                ``_receive_weights_scheme()``, which runs its scheme's ``receive()``.
            context: an object that has the workers' objects, as TorchRL's collectors do; otherwise as for every scheme.
            num_workers: fixed number of workers; None: the number of ``remotes`` if that is a sequence, unless
                ``min_workers`` tells that workers come and go.
            remote_collectors: TorchRL's name for ``remotes``.
            min_workers, options: as for every scheme.

        Raises:
            ValueError: no objects were given, a sequence has not one for each worker, or an index is no worker's.
        """
        given = remote_collectors if remotes is None else remotes
        if given is None and context is not None:
            given = getattr(context, self._remotes_attribute, None)
        if given is None:
            raise ValueError(
                f"{type(self).__name__} calls {METHOD}() of the workers' objects: pass remotes=[…], or a "
                "context that has them"
            )
        found = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
        is_sequence = not isinstance(given, Mapping)
        fixed = num_workers or self._bus.num_workers
        if fixed is None and is_sequence and min_workers is None and self._bus.min_workers == 1:
            fixed = len(found)
        if fixed is not None and (not found.keys() <= set(range(fixed)) or (is_sequence and len(found) < fixed)):
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
            return None  # the call is for another scheme of the same object
        if self._worker_idx not in (None, call.worker):
            raise ValueError(
                f"this object is worker {self._worker_idx}, but its sender calls it as worker {call.worker}: remotes= "
                "of the sender must have each object once, at the position of its worker_idx"
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (CALL_SECONDS if timeout is None else timeout)
        if not self.is_registered:
            if call.introduction is not None:
                self._bus.introduction = Introduction.decode(call.introduction)
            # Scheme's method, because that of RPCCore leaves connecting to this call.
            await self._run_unless_sender_lost(call, Scheme.connect_receiver(self, call.worker, CALL_SECONDS))
            self.last_returned = None  # the initial weights were not returned to the user yet
        try:
            reach = self._receive_version(version, max(0.0, deadline - loop.time()), call.versions)
            return await self._run_unless_sender_lost(call, reach)
        except AckTimeout:
            if timeout is None:
                raise
            return None

    async def _receive_version(self, version: int, timeout: float, others: Mapping[str, int]) -> TensorDict | None:
        """Apply this version or a newer one, with the ``others``, models that may switch together with this one; return
        its weights, or None if they were returned already."""
        link, before = self._bus.worker_link(), self.last_returned
        mark = await link.wait_reached(self.topic, version, timeout, others)
        return None if mark == before else await self._return_copy(link, mark, before)

    async def _run_unless_sender_lost(self, call: Call, doing: Coroutine[Any, Any, T]) -> T:
        """Run ``doing`` for a call. Raises PeerLost if the sender is lost meanwhile, because the object must be free
        for the call of the sender's successor."""
        task = asyncio.ensure_future(doing)
        try:
            while not (await asyncio.wait({task}, timeout=CHECK_SENDER_SECONDS))[0]:
                link = self._bus.link
                if isinstance(link, WorkerLink) and link.is_lost:
                    raise PeerLost(
                        f"worker {call.worker} was called for the versions {call.versions}, but they will not come, "
                        "because the sender is lost"
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

_current_call: ContextVar[Call | None] = ContextVar("asyncsync_call", default=None)


class RPCCore(RemoteCallCore):
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
        machine = link.end_fast_path()
        machine.serve(self.topic, loop.time())
        machine.mark_assembled(self.topic)  # from now on publish without waiting for workers that were not called yet
        link.act_on_changes()
        if initial is not None:
            deadline = loop.time() + timeout
            await link.publish({self.topic: initial}, {self.topic: self.carrier}, None, deadline=deadline)
        self.is_registered = True

    def register_receiver(self, worker_idx: int | None = None) -> None:
        if worker_idx is not None:  # None: the bus connects, but only a call connects this scheme
            super().register_receiver(worker_idx)

    async def connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        if worker_idx is not None:
            self._check_worker(worker_idx)
            self._worker_idx = worker_idx

    async def _receive(self, timeout: float | None, call: Call | None = None) -> TensorDict | None:
        if call is None and self.role == "receiver" and not self.is_registered:
            self._check_open()
            raise NotConnected("this worker is not connected: the first call of its sender connects it")
        return await super()._receive(timeout, call)

    async def _call(self, call: Call) -> None:
        if self._bus.endpoint == INTRODUCED:
            call = replace(call, introduction=self._bus.trainer_link().introductions(call.worker).encode())
        rref = self._remotes[call.worker]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> Any:
            rpc_async = import_module("torch.distributed.rpc").rpc_async
            receive = import_module("asyncsync.sync").RPCWeightSyncScheme.receive_in_worker
            calling = rpc_async(rref.owner(), receive, (rref, call.encode()), timeout=RPC_SECONDS)
            calling.add_done_callback(lambda _: settle(done))
            return calling

        try:
            calling = await run_in_thread("asyncsync-call", begin)  # on a thread, because it may block to connect
            await done
            failure: Exception | None = calling.value()
        except RuntimeError as error:
            raise PeerLost(f"worker {call.worker} is lost: it cannot be called by RPC: {error}") from error
        if failure is not None:
            raise failure

    def current_call(self) -> Call | None:
        return _current_call.get()

    # Called by its name in asyncsync.sync, so that unpickling imports that module. If a worker's first calls come at
    # once, they import it on several threads, which is safe; threads that import different modules of a package wait
    # for each other.
    @classmethod
    def receive_in_worker(cls, rref: Any, encoded: bytes) -> Exception | None:
        # In the worker: call the object's method. Returns the exception that it raised, or None.
        token = _current_call.set(Call.decode(encoded))
        try:
            outcome = getattr(rref.local_value(), METHOD)()
            if inspect.isawaitable(outcome):
                if inspect.iscoroutine(outcome):
                    outcome.close()
                raise TypeError(f"{METHOD} must be an ordinary method: RPC calls it on a thread without an event loop")
        except Exception as error:
            return failure_of(error)
        finally:
            _current_call.reset(token)
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
        doc='how the bytes travel. ``"gloo"``: to each actor, through its own connection of torch.distributed; '
        '``"object_store"``: through Ray\'s object store, once for all actors of a host.'
    ),
]


class ActorPlace(MeetingPlace):
    """The meeting place of Ray's schemes: a small actor, whose name both sides derive from the scheme. (The sender
    cannot bring introductions by calls, because a worker's actor takes no call while its ``connect`` waits.) If the
    actor's process ends, Ray restarts it and repeats the calls. The actor ends with the sender that started it."""

    outlives_sender = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.actor: Any = None
        self._name = name

    async def open(self) -> None:
        if self.actor is None:
            # The thread sets self.actor, even if this wait is cancelled.
            await run_in_thread(MEETING_THREAD, self._start)
        try:
            await _call_actor(self.actor.is_there)
        except NotConnected as error:
            self.actor = None
            raise NotConnected(f"the actor {self._name} has ended; connect() may be called again") from error

    def _start(self) -> None:
        # A local class, because Ray pickles that by value: the actor need not import this library, which takes seconds.
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
        self.actor = initialized_ray().remote(ConnectionInfo).options(**options).remote()

    def ask(self, worker: int, stop: threading.Event) -> bytes:
        ray = initialized_ray()
        try:
            answer: Future[bytes] = ray.get_actor(self._name).ask.remote(worker).future()
            while not stop.is_set():
                with suppress(TimeoutError):
                    return answer.result(ANSWER_POLL_SECONDS)
        except (ValueError, ray.exceptions.RayError) as error:
            raise NotConnected(str(error)) from error
        raise NotConnected("there is no answer yet")

    async def next_question(self) -> tuple[int, int]:
        worker: int = await _call_actor(self.actor.asked)
        return worker, worker

    async def answer(self, key: int, answer: bytes) -> None:
        await _call_actor(self.actor.answer, key, answer)

    async def end(self) -> None:
        actor, self.actor = self.actor, None
        if actor is not None:
            await run_in_thread(MEETING_THREAD, partial(kill, actor))

    def timeout_text(self, seconds: float, worker: int | None = None) -> str:
        if worker is None:
            late = f"Ray has not started the actor {self._name} within {seconds:g} s: can the cluster start processes?"
        else:
            late = (
                f"worker {worker} has found no sender within {seconds:.3g} s: is a sender connecting, with the scheme "
                f"that this one was pickled from, in this cluster and namespace?{f' ({self.why})' if self.why else ''}"
            )
        return f"{late} connect() may be called again"


async def _call_actor(method: Any, *args: Any) -> Any:
    """The result of a method of an actor. Raises NotConnected if the actor has ended; RuntimeError if this process is
    in no Ray cluster (Ray would start one)."""
    ray = initialized_ray()
    try:
        return await asyncio.wrap_future(method.remote(*args).future())
    except ray.exceptions.RayError as error:
        raise NotConnected(str(error)) from error


class RayCore(RemoteCallCore):
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
        self._given_info_name = ""  # as _set_dist_connection_info() was given it

    def create_transport(self, **kwargs: Any) -> ObjectTransport:
        """The transport of this scheme's API."""
        kind = BlockingRayTransport if self.is_blocking else RayTransport
        return kind(own_address(), self._options["map_above"], stores=self._backend == OBJECT_STORE)

    @property
    def connection_info_name(self) -> str:
        """The name of the actor that gives workers their introductions; the argument for
        :meth:`_set_dist_connection_info` of a receiver."""
        return self._given_info_name or f"asyncsync-{self._bus.uid}"

    connection_info = connection_info_name

    def _set_dist_connection_info(self, connection_info: str, worker_idx: int = 0) -> None:
        """Connect an initialised receiver as this worker, as TorchRL's page on ``cascade_execute`` shows: with the
        sender's :attr:`connection_info`, or a Ray reference to it."""
        if not self.is_blocking:
            raise TypeError("this is the asyncio scheme: connect it by `await scheme.connect(worker_idx=…)`")
        if not isinstance(connection_info, str):
            connection_info = initialized_ray().get(connection_info, timeout=DEFAULT_TIMEOUT)
        self._given_info_name = connection_info
        scheme: Any = self
        scheme.connect(worker_idx=worker_idx)

    def _meeting_place(self) -> ActorPlace:
        return ActorPlace(self.connection_info_name)

    async def _address_for_workers(self) -> str:
        host: str = await run_in_thread(MEETING_THREAD, lambda: initialized_ray().util.get_node_ip_address())
        return host

    async def _call(self, call: Call) -> None:
        method = getattr(self._remotes[call.worker], METHOD)
        # The task's name carries the Call, because nothing else reaches the method but its arguments. If the actor is
        # being restarted, Ray calls it as soon as it has started.
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
            return None  # the user gave the task this name


async def _wait_for_call(reference: Any, worker: int) -> None:
    """Wait until a call of this worker's actor ends. Raises what the call raised; PeerLost if the actor is lost."""
    exceptions = initialized_ray().exceptions
    try:
        await asyncio.wrap_future(reference.future())
    except exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, WeightSyncError) else failure_of(error)) from None
    except exceptions.RayError as error:
        raise PeerLost(f"worker {worker} is lost: its actor cannot be called: {error}") from error


class RayWeightSyncScheme(RayCore, aio.WeightSyncScheme):
    """Weights for Ray actors. Usage::

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
    def _reset(self) -> None:
        super()._reset()
        self._transform: Any = None

    def _set_transform(self, transform: Any) -> None:
        # TorchRL's RayModuleTransform(weight_sync_scheme=…) calls this.
        self._transform = transform

    @checked(RayCore.init_on_sender)
    def init_on_sender(self, *, ray_transform: Any = None, **options: Any) -> None:
        """Make this scheme the sender.

        Args:
            ray_transform: the RayModuleTransform; not needed if you passed it this scheme.
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
        # The user connects the sender only, so the sender calls the transform's actor to connect at the same time.
        if self.is_registered:
            await super().connect_sender(initial, timeout)
            return
        scheme: Any = self
        model_id = self.model_id or TRANSFORM_MODEL_ID
        initialised = self._remotes[0]._init_weight_sync_scheme.remote(scheme=scheme.blocking, model_id=model_id)
        there = _wait_for_call(initialised, 0)
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
    """Weights for the module of TorchRL's RayModuleTransform. You connect the sender, and it connects the actor."""
