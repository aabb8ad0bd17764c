"""Remote calls: the schemes whose sender calls ``_receive_weights_scheme()`` of an object in each worker, as TorchRL
documents it for RPC and Ray.

The bus does what it does for every scheme: versions, transfers, acknowledgements, late joiners. But a worker here
applies what has come when it is told to: a publication calls the objects of the workers that it is for, each method
runs ``scheme.receive()``, and that applies the version of the call, or a newer one. A call that comes late, after a
newer one, finds nothing to do and returns; one that came from another scheme of the same object returns at once. There
is one call at a time to each object; of the calls that wait for it, only the newest follows.

A subclass says how an object is called, and in a worker how such a call is recognised.
"""

from __future__ import annotations

import asyncio
import traceback
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgpack
from tensordict import TensorDict

from asyncsync.arguments import checked
from asyncsync.bus.core import BusCore
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.errors import AckTimeout, PeerLost, RemoteError, WeightSyncError
from asyncsync.net.rendezvous import Introduction
from asyncsync.protocol.targets import Targets
from asyncsync.schemes.scheme import Scheme

METHOD = "_receive_weights_scheme"
CALL_SECONDS = 60.0
LOOK_SECONDS = 0.25

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a worker's object.

    Attributes:
        uid: the bus that calls.
        worker: which worker it takes the object for.
        versions: what is to be applied, by the models' names.
        introduction: how to find the sender, where the call says that.
    """

    uid: str
    worker: int
    versions: dict[str, int]
    introduction: bytes | None = None

    def encode(self) -> bytes:
        """For :meth:`decode`."""
        encoded: bytes = msgpack.packb([self.uid, self.worker, self.versions, self.introduction])
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """Raises what msgpack raises, or TypeError: it is something else."""
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
class _Caller:
    """The calls of one worker's object. ``wanted`` and ``ended`` are versions; the last one that failed, and why."""

    wanted: int = 0
    ended: int = 0
    failed: tuple[int, Exception] | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class _Calls:
    """The calls of one bus; see :class:`asyncsync.bus.carrier.Calls`."""

    def __init__(self, bus: BusCore, remotes: Mapping[int, Any], call: Callable[[Call], Awaitable[None]]) -> None:
        self._bus = bus
        self._remotes = remotes
        self.call = call
        self._callers: dict[int, _Caller] = {}

    def begin(self, version: int, workers: Sequence[int] | None, models: Sequence[str]) -> None:
        link = self._bus.sender_link()
        chosen = link.publisher.progress.targeted(version, models) if workers is None else workers
        for worker in chosen:
            if worker in self._remotes:
                caller = self._callers.setdefault(worker, _Caller())
                caller.wanted = version
                if caller.task is None:
                    caller.task = link.loop.create_task(self._run(worker, caller))

    def is_pending(self, worker: int, version: int) -> bool:
        caller = self._callers.get(worker)
        return caller is not None and caller.ended < version <= caller.wanted

    def failure(self, worker: int, version: int) -> Exception | None:
        caller = self._callers.get(worker)
        if caller is None or caller.failed is None or caller.failed[0] < version:
            return None
        return caller.failed[1]

    async def _run(self, worker: int, caller: _Caller) -> None:
        link = self._bus.sender_link()
        targets = link.publisher.targets
        called: dict[str, int] = {}
        try:
            while caller.ended < (version := caller.wanted):
                failed = None
                try:
                    # Until all workers have accepted its layout, one may refuse it, and then it goes to none.
                    await link.wait(partial(_is_settled, targets, version), CALL_SECONDS)
                    due = {m: t.version for m in targets.models if (t := targets.target(worker, m)) is not None}
                    if due != called and worker in self._remotes:
                        called = due
                        await self.call(Call(self._bus.uid, worker, due))
                except Exception as error:
                    failed = version, error
                caller.ended, caller.failed = version, failed
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


def _is_settled(targets: Targets, version: int) -> bool:
    return version not in targets.pending


class RemoteCallCore(Scheme):
    """A scheme of either API whose sender calls the workers' objects."""

    _is_introduced = True

    def _reset(self) -> None:
        super()._reset()
        self._remotes: dict[int, Any] = {}

    # -- of a subclass ------------------------------------------------------------------------------------------------

    _remotes_name: ClassVar[str]  # the attribute of a context in which TorchRL's collectors have the workers' objects

    @abstractmethod
    async def _call(self, call: Call) -> None:
        """Sender: call a worker's object, and wait until the call ends. Raises PeerLost if the worker is gone, and
        what the object has raised."""

    async def _connect_called(self, worker: int, timeout: float) -> None:
        """Worker: connect, in the first call."""
        await self.connect_receiver(worker, timeout)

    @abstractmethod
    def current_call(self) -> Call | None:
        pass

    # -- what users call ----------------------------------------------------------------------------------------------

    @property
    def remotes(self) -> dict[int, Any]:
        """The workers' objects, ``{worker_idx: object}``, that a sender calls. To be changed where workers come and go;
        one that is not in there is sent weights all the same, and applies them by itself if it has ``apply="auto"``."""
        return self._remotes

    @checked
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
            given = getattr(context, self._remotes_name, None)
        if given is None:
            raise ValueError(
                f"{type(self).__name__} calls {METHOD}() of the workers' objects: pass remotes=[…], or a context that "
                "has them"
            )
        found = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
        fixed = num_workers or self._bus.num_workers
        if fixed is None and not isinstance(given, Mapping) and min_workers is None and self._bus.min_workers == 1:
            fixed = len(found)
        wanted = set(range(fixed or 0))
        if fixed is not None and (found.keys() - wanted or (found.keys() < wanted and not isinstance(given, Mapping))):
            raise ValueError(f"num_workers={fixed}, but there are objects of the workers {sorted(found)}")
        if fixed is not None:
            options["num_workers"] = fixed
        super().init_on_sender(context=context, min_workers=min_workers, **options)
        self._call_them(found)

    def _call_them(self, remotes: dict[int, Any]) -> None:
        self._remotes = remotes
        self._bus.calls = _Calls(self._bus, remotes, self._call)

    def take_over(self, original: Scheme) -> None:
        super().take_over(original)
        if self.role == "sender":
            self._call_them(self._remotes)

    @checked
    def init_on_receiver(
        self, model_id: str, context: Any = None, *, apply: str = "on_receive", **options: Any
    ) -> None:
        super().init_on_receiver(model_id, context=context, apply=apply, **options)

    init_on_receiver.__doc__ = Scheme.init_on_receiver.__doc__

    # -- in a worker --------------------------------------------------------------------------------------------------

    async def _receive(self, timeout: float | None, call: Call | None = None) -> TensorDict | None:
        if call is None:
            return await super()._receive(timeout)
        self._check_receive(timeout)
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
            await self._unless_lost(call, self._connect_called(call.worker, CALL_SECONDS))
            assert self.receiving is not None
            self.receiving.returned = None  # the user has not been told of any yet
        link, receiving = self._receiver()
        try:
            reach = receiving.reach(link, version, max(0.0, deadline - loop.time()), call.versions)
            return await self._unless_lost(call, reach)
        except AckTimeout:
            if timeout is None:
                raise
            return None

    async def _unless_lost(self, call: Call, doing: Coroutine[Any, Any, T]) -> T:
        """Do what a call asks for, unless the caller dies meanwhile: its successor calls again, and until then the
        object is to be had. Raises PeerLost."""
        task = asyncio.ensure_future(doing)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                link = self._bus.link
                if isinstance(link, ReceiverLink) and link.is_lost:
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
        if isinstance(calls, _Calls) and calls.call == self._call:
            await calls.close()
        await super().end_transport(timeout)
