"""Ray: weights for actors. Each applies an update in a call of its ``_receive_weights_scheme()``, as TorchRL documents
it; the bytes go through gloo, or through Ray's object store."""

from __future__ import annotations

import asyncio
import base64
import binascii
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Unpack

from asyncsync.arguments import Option, checked, declared
from asyncsync.bus.carrier import Source
from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.errors import NotConnected, PeerLost, WeightSyncError
from asyncsync.net.endpoint import own_address
from asyncsync.net.rendezvous import THREAD, MeetingPlace
from asyncsync.runtime.threads import elsewhere
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.options import RayOptions, Strategy
from asyncsync.schemes.registry import register
from asyncsync.schemes.remote_calls import METHOD, Call, RemoteCallCore, failure_of
from asyncsync.schemes.torch_distributed import check_backend
from asyncsync.transports.ray_objects import BlockingRayTransport, ObjectTransport, RayTransport
from asyncsync.transports.ray_private import kill, the_ray

OBJECT_STORE = "object_store"
BACKENDS = ("gloo", "nccl", OBJECT_STORE)
MARK = f"{METHOD} asyncsync:"  # a call's name, as Ray shows it; what follows is the Call
MARGIN = 1.0  # a connect that is late says why
MODULE = "transform_module"  # what a transform's module is called where the sender gives it no name
LOOK_SECONDS = 0.1
Backend = Annotated[
    str,
    Option(
        'how the bytes travel. ``"gloo"``: through a connection of torch.distributed for each actor; '
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
            await _called(self.actor.is_there)
        except NotConnected as error:
            self.actor = None
            raise NotConnected(f"the actor {self._name} has ended; connect() may be called again") from error

    def _start(self) -> None:
        # In here, so that Ray takes the class itself along: to import this library would take the actor seconds.
        class ConnectionInfo:
            def __init__(self) -> None:
                self._answers: dict[int, asyncio.Future[bytes]] = {}
                self._asked: asyncio.Queue[int] = asyncio.Queue()

            async def is_there(self) -> None:
                pass

            async def ask(self, worker: int) -> bytes:
                if worker not in self._answers:
                    self._answers[worker] = asyncio.get_running_loop().create_future()
                    self._asked.put_nowait(worker)
                return await asyncio.shield(self._answers[worker])

            async def asked(self) -> int:
                return await self._asked.get()

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
                    return answer.result(LOOK_SECONDS)
        except (ValueError, ray.exceptions.RayError) as error:
            raise NotConnected(str(error)) from error
        raise NotConnected("there is no answer yet")

    async def asked(self) -> tuple[int, int]:
        worker: int = await _called(self.actor.asked)
        return worker, worker

    async def answer(self, key: int, answer: bytes) -> None:
        await _called(self.actor.answer, key, answer)

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


async def _called(method: Any, *args: Any) -> Any:
    """What this method of an actor returns. Raises NotConnected: the actor has ended; RuntimeError: this process is in
    no cluster, and would begin one."""
    ray = the_ray()
    try:
        return await asyncio.wrap_future(method.remote(*args).future())
    except ray.exceptions.RayError as error:
        raise NotConnected(str(error)) from error


class RayCore(RemoteCallCore):
    """What Ray's schemes are, in both APIs."""

    _adopts = True
    _remotes_name = "remote_collectors"
    _transport_class: ClassVar[type[ObjectTransport]]

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
        self._info_name = ""  # if it was told another

    def create_transport(self, **kwargs: Any) -> ObjectTransport:
        """The transport of this scheme's API."""
        return self._transport_class(own_address(), self._options["map_above"], stores=self._backend == OBJECT_STORE)

    # -- the rendezvous -----------------------------------------------------------------------------------------------

    @property
    def connection_info_name(self) -> str:
        """The name of the actor that has the workers' introductions."""
        return self._info_name or f"asyncsync-{self._bus.uid}"

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
        self._info_name = connection_info
        scheme: Any = self
        scheme.connect(worker_idx=worker_idx)

    def _meeting_place(self) -> ActorPlace:
        return ActorPlace(self.connection_info_name)

    async def _host(self) -> str:
        host: str = await elsewhere(THREAD, lambda: the_ray().util.get_node_ip_address())
        return host

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _call(self, call: Call) -> None:
        method = getattr(self._remotes[call.worker], METHOD)
        # The name is shown for the task, and is all that reaches the method beside its arguments. An actor that is
        # being restarted is called when it is there.
        name = MARK + base64.b64encode(call.encode()).decode()
        await _returned(method.options(name=name, max_task_retries=-1).remote(), call.worker)

    def current_call(self) -> Call | None:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return None
        name = ray.get_runtime_context().get_task_name() or ""
        try:
            return Call.decode(base64.b64decode(name.removeprefix(MARK))) if name.startswith(MARK) else None
        except (binascii.Error, ValueError, TypeError):
            return None


async def _returned(reference: Any, worker: int) -> None:
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

    _transport_class = RayTransport


class BlockingRay(RayCore, blocking.WeightSyncScheme):
    """Weights for actors of Ray's, with the blocking API; see :class:`asyncsync.RayWeightSyncScheme`."""

    _transport_class = BlockingRayTransport


class TransformCore(RayCore):
    """What the scheme of a RayModuleTransform is, in both APIs."""

    def _reset(self) -> None:
        super()._reset()
        self._transform: Any = None

    def _set_transform(self, transform: Any) -> None:
        """A RayModuleTransform has been given this scheme."""
        self._transform = transform

    @checked
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

    @checked
    def init_on_receiver(self, model_id: str, context: Any = None, **options: Any) -> None:
        options = {"worker_idx": 0, "model": getattr(context, "module", None), **options}
        super().init_on_receiver(model_id, context=None, **options)
        self._context = context

    init_on_receiver.__doc__ = RemoteCallCore.init_on_receiver.__doc__

    async def connect_sender(self, initial: Source | None, timeout: float) -> None:
        # The sender alone connects: it has the transform's actor do its part.
        if self.is_registered:
            await super().connect_sender(initial, timeout)
            return
        scheme: Any = self
        initialise = self._remotes[0]._init_weight_sync_scheme
        there = _returned(initialise.remote(scheme=scheme.blocking, model_id=self.model_id or MODULE), 0)
        here = super().connect_sender(initial, timeout)
        try:
            async with asyncio.timeout(timeout + MARGIN), asyncio.TaskGroup() as both:
                both.create_task(there)
                both.create_task(here)
        except* WeightSyncError as errors:
            raise errors.exceptions[0] from None
        except* TimeoutError:
            raise NotConnected(
                f"the transform's actor has not connected within {timeout:g} s: is it busy? connect() may be "
                "called again"
            ) from None


class RayModuleTransformScheme(TransformCore, aio.WeightSyncScheme):
    """Weights for the module of a RayModuleTransform of TorchRL's. Only the sender is connected by the user."""

    _transport_class = RayTransport


class BlockingRayModuleTransform(TransformCore, blocking.WeightSyncScheme):
    """The same with the blocking API; see :class:`asyncsync.RayModuleTransformScheme`."""

    _transport_class = BlockingRayTransport


register("ray", RayWeightSyncScheme, BlockingRay)
register("ray_module_transform", RayModuleTransformScheme, BlockingRayModuleTransform)
