"""The blocking API of every scheme: ordinary methods over :class:`asyncsync.schemes.scheme.Scheme`, run on the one
event loop of the process (:mod:`asyncsync.runtime.loop_thread`): those of :mod:`asyncsync.schemes.aio`, made ordinary,
but where a caller's thread has more to do.

What belongs to the caller runs in the caller's thread: taking the weights from their source (a strategy, a
``prepare_weights``, a context, the thread's current CUDA stream), and forwards of a gated module. Names, overloads and
return values are those of TorchRL's "WeightSyncScheme" page.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from asyncsync.arguments import as_workers, check_timeout
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore
from asyncsync.bus.member import Source
from asyncsync.runtime import loop_thread
from asyncsync.schemes.aio import Bus as AsyncBus
from asyncsync.schemes.aio import WeightSyncScheme as AsyncScheme
from asyncsync.schemes.scheme import Scheme
from asyncsync.schemes.torchrl_contexts import TorchRLContext
from asyncsync.schemes.torchrl_names import TorchRLNames
from asyncsync.transports.blocking import in_sync_as
from asyncsync.wire.metadata import encode_metadata

P = ParamSpec("P")
T = TypeVar("T")
Workers = int | Iterable[int] | None
Metadata = Mapping[str, Any] | None
Make = Callable[[], Coroutine[Any, Any, T]]


def ordinary(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
    run: str = "_run",
    first: Callable[Concatenate[Any, P], None] | None = None,
) -> Callable[Concatenate[Any, P], T]:
    """A coroutine function of the asyncio API as an ordinary method, with its signature and docstring. The method
    called ``run`` runs the coroutine on the loop; ``first`` is called before, in the caller's thread."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if first is not None:
            first(self, *args, **kwargs)
        result: T = getattr(self, run)(partial(method, self, *args, **kwargs))
        return result

    return call


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that has nothing to wait for. Raises TypeError: it waits, because a hook of the user's is a
    coroutine function."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise TypeError(
        "prepare_weights of a blocking scheme must be an ordinary method; coroutines belong to asyncsync's own classes"
    )


@in_sync_as("Bus")
class Bus(BusCore):
    """One address for any number of models, with blocking methods. Usage::

        with Bus() as bus:                                   # the trainer
            policy_scheme = ZMQWeightSyncScheme(bus=bus, num_workers=2)
            value_scheme = ZMQWeightSyncScheme(bus=bus)
            policy_scheme.init_on_sender(model_id="policy", model=policy)
            value_scheme.init_on_sender(model_id="value", model=value)
            ...                                              # start the workers, pass them the schemes
            bus.connect()
            bus.send({"policy": policy, "value": value})     # each worker switches both, or none

    The arguments are described at :class:`BusCore`, the methods at :class:`asyncsync.Bus`.
    """

    def connect(self, timeout: float = DEFAULT_TIMEOUT, processes: Iterable[Any] = ()) -> None:
        self._check_connect(timeout, processes)
        initial = now(self._initial())
        self._run(lambda: self._connect(initial, timeout))

    connect.__doc__ = AsyncBus.connect.__doc__

    def publish(self, weights: Mapping[str, Any], worker_ids: Workers = None, *, metadata: Metadata = None) -> int:
        encoded = encode_metadata(metadata)
        workers, sources = self._extract(weights, worker_ids)
        return self._run(lambda: self._publish_sources(sources, workers, encoded))

    publish.__doc__ = AsyncBus.publish.__doc__

    async def publish_async(
        self, weights: Mapping[str, Any], worker_ids: Workers = None, *, metadata: Metadata = None
    ) -> int:
        """:meth:`publish` for a coroutine of any event loop. The source must not change until it returns."""
        encoded = encode_metadata(metadata)
        workers, sources = self._extract(weights, worker_ids)
        return await loop_thread.awaitable(lambda: self._publish_sources(sources, workers, encoded))

    wait_version = ordinary(AsyncBus.wait_version)
    wait_lag = ordinary(AsyncBus.wait_lag)

    def _wait_origin(self, version: int, timeout: float) -> None:
        """Receiver: see :meth:`asyncsync.bus.receiving.Receiving.wait_origin`."""
        self._run(lambda: self._receiver().receiving.wait_origin(version, self._schemes, timeout))

    def send(
        self,
        weights: Mapping[str, Any],
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Metadata = None,
        quorum: int | None = None,
    ) -> None:
        """:meth:`publish`, then :meth:`wait_version`. Raises as :meth:`asyncsync.Bus.send_async`."""
        check_timeout(timeout)
        encoded = encode_metadata(metadata)
        workers, sources = self._extract(weights, worker_ids)
        self._run(lambda: self._send_sources(sources, workers, timeout, encoded, quorum))

    async def send_async(
        self,
        weights: Mapping[str, Any],
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Metadata = None,
        quorum: int | None = None,
    ) -> int:
        """:meth:`send` for a coroutine of any event loop; returns the version."""
        check_timeout(timeout)
        encoded = encode_metadata(metadata)
        workers, sources = self._extract(weights, worker_ids)
        return await loop_thread.awaitable(lambda: self._send_sources(sources, workers, timeout, encoded, quorum))

    shutdown = ordinary(AsyncBus.shutdown, "_end")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _check_open(self, role: str) -> None:
        loop_thread.check_exit()
        super()._check_open(role)

    def _check_fork(self) -> None:
        if self._link is not None and self._link.is_inherited:
            raise RuntimeError("this scheme or bus was connected before the fork; connect anew in the child process")

    def _extract(self, weights: Mapping[str, Any], worker_ids: Workers) -> tuple[list[int] | None, dict[str, Source]]:
        """The workers it is for, and the values of the sources, taken here and now."""
        workers = as_workers(worker_ids)
        return workers, now(self._take(weights, workers))

    def _run(self, make: Make[T]) -> T:
        async def tended() -> T:
            loop_thread.keep(self, True)  # also while it is connecting: the process may end meanwhile
            try:
                return await make()
            finally:
                link = self._link
                if link is None or link.closed or link.is_inherited:
                    loop_thread.keep(self, False)
                elif self._closed:  # by another thread, just before the link was opened
                    await link.shutdown()
                    loop_thread.keep(self, False)
                else:
                    loop_thread.keep(self, True)  # another call, which has found no link, may have let it go

        return loop_thread.run(tended)

    def _end(self, make: Make[None]) -> None:
        link = self._link
        if link is None or link.closed or link.is_inherited:  # nothing runs on the loop
            now(make())
        else:
            self._run(make)

    def _look(self, function: Callable[[], T]) -> T:
        if self._link is None or self._link.closed or loop_thread.is_here():
            return function()
        self._check_fork()

        async def look() -> T:
            return function()

        return loop_thread.run(look)


@in_sync_as("WeightSyncScheme")
class WeightSyncScheme(TorchRLNames):
    """One model's weights, kept in step by blocking calls."""

    _bus_class: ClassVar[type[BusCore]] = Bus
    _is_blocking: ClassVar[bool] = True
    _bus: Bus
    _sync = True  # TorchRL's option of some schemes; False: ``send`` waits for no worker

    @property
    def aio(self) -> AsyncScheme:
        """This scheme with the asyncio API of :mod:`asyncsync`; to be taken before connecting.

        Raises:
            RuntimeError: this scheme is connected.
            TypeError: a class of your own, which has no twin in :mod:`asyncsync`.
        """
        twin: AsyncScheme = self._convert("asyncsync")
        return twin

    @property
    def blocking(self) -> Self:
        """This scheme."""
        return self

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        processes: Iterable[Any] = (),
        ctx: Any = None,
    ) -> None:
        collector = self._context if isinstance(self._context, TorchRLContext) and self._role == "sender" else None
        if collector is not None:
            processes = processes or collector.processes
            if weights is None and not (self._registered or self._sources.exist()):
                weights = collector.first_weights(self._topic)
        self._check_connect(weights, worker_idx, timeout, processes)
        timeout = max(timeout, self._patience)
        with nullcontext() if collector is None else collector.starting(self.shutdown):
            if self._role == "sender":
                self._setup_connection_and_weights_on_sender_impl(weights=weights, timeout=timeout)
            else:
                self._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx, timeout=timeout)

    connect.__doc__ = AsyncScheme.connect.__doc__

    def _setup_connection_and_weights_on_sender_impl(
        self, *, weights: Any = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        initial = now(self._initial(weights))
        self._bus._run(lambda: self._connect_sender(initial, timeout))

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        async def connect() -> None:
            await self._connect_receiver(worker_idx, timeout)
            if isinstance(self._context, TorchRLContext):
                self._context.connected = True

        self._bus._run(connect)

    def send(
        self,
        weights: Any = None,
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Metadata = None,
        quorum: int | None = None,
    ) -> None:
        """Send weights, and return when the targeted workers have applied them.

        Args:
            weights: None (the registered source's current values), module, TensorDict, dict, or ``{worker_idx:
                weights}``.
            worker_ids: the workers that get it; None: all, later ones too.
            timeout: seconds.
            metadata: a small mapping that belongs to the version, and arrives with it: see :attr:`metadata` and
                :meth:`hold`. Of strings as keys and what msgpack can carry; encoded, at most 64 KiB.
            quorum: how many of the targeted workers are enough; None: all.

        Raises:
            ValueError, TypeError: invalid weights, workers or metadata; nothing was published.
            MemoryError: there is too little memory for the snapshot; nothing was published.
            NotConnected: no worker has this model (elastic: fewer than ``min_workers``), or this sender is not
                connected; nothing was published.
            ClosedError, Fenced: this sender was shut down, or a newer process has replaced it.
            PartialSendError: names the workers that have not applied it, and why. Not final: they still get it.
        """
        self._check_open()
        if self._sync:
            self._bus.send({self._topic: weights}, worker_ids, timeout, metadata=metadata, quorum=quorum)
        else:
            self.publish(weights, worker_ids, metadata=metadata)

    async def send_async(
        self,
        weights: Any = None,
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Metadata = None,
        quorum: int | None = None,
    ) -> int:
        """:meth:`send` for a coroutine of any event loop; returns the version. The source must not change until it
        returns."""
        self._check_open()
        return await self._bus.send_async({self._topic: weights}, worker_ids, timeout, metadata=metadata, quorum=quorum)

    def publish(self, weights: Any = None, worker_ids: Workers = None, *, metadata: Metadata = None) -> int:
        """Snapshot the weights and announce them; returns the version without waiting for any worker.

        The source may change from then on. Latest wins: a worker that is behind skips versions.

        Args:
            weights, worker_ids, metadata: as for :meth:`send`.

        Raises:
            ValueError, TypeError, MemoryError, NotConnected, ClosedError, Fenced: as :meth:`send`.
            AckTimeout: for 60 s there was no room for them (workers that are behind still read all ``slots`` of shared
                memory); nothing was published.
        """
        self._check_open()
        return self._bus.publish({self._topic: weights}, worker_ids, metadata=metadata)

    async def publish_async(self, weights: Any = None, worker_ids: Workers = None, *, metadata: Metadata = None) -> int:
        """:meth:`publish` for a coroutine of any event loop: what follows may keep that loop busy, the weights travel
        by another. The source must not change until it returns."""
        self._check_open()
        return await self._bus.publish_async({self._topic: weights}, worker_ids, metadata=metadata)

    wait_version = ordinary(AsyncScheme.wait_version)
    wait_lag = ordinary(AsyncScheme.wait_lag)
    receive = ordinary(AsyncScheme.receive, "_deliver", first=Scheme._check_not_held)
    fetch = ordinary(AsyncScheme.fetch, "_deliver")
    shutdown = ordinary(AsyncScheme.shutdown, "_end")

    def _run(self, make: Make[T]) -> T:
        return self._bus._run(make)

    def _end(self, make: Make[None]) -> None:
        self._bus._end(make)

    def _deliver(self, make: Make[T]) -> T:
        """Weights for the caller. If an exception strikes in its thread before it has them, the next receive returns
        them."""
        undo: list[Callable[[], None]] = []
        gone = False

        async def deliver() -> T:
            receiving = self._receiving
            before = None if receiving is None else receiving.returned
            weights = await make()
            assert receiving is not None
            take_back = partial(receiving.take_back, receiving.returned, before)
            undo.append(take_back)
            if gone:  # for a second time, perhaps
                take_back()
            return weights

        try:
            return self._bus._run(deliver)
        except BaseException:
            gone = True
            for take_back in undo:
                take_back()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
