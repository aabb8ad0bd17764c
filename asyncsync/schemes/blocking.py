"""The blocking API of every bus and scheme: the coroutines of :mod:`asyncsync.schemes.aio` as ordinary methods, which
run on the one event loop of the process (:mod:`asyncsync.runtime.threads`).

The weights are extracted from their source in the caller's thread, because that uses the caller's code and state: a
strategy, a ``prepare_weights``, a context, the thread's current CUDA stream. Names, overloads and return values are
those of TorchRL's "WeightSyncScheme" page. TorchRL's collectors use some more names, which the asyncio classes lack:
there, the name that a collector reads first raises an error that says what to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from tensordict import TensorDict

from asyncsync.arguments import as_workers, checked
from asyncsync.bus.carrier import Extracted
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore, Metadata, Workers
from asyncsync.bus.trainer import TrainerLink
from asyncsync.bus.worker import WorkerLink
from asyncsync.errors import NotConnected
from asyncsync.runtime.threads import check_exit, is_loop_thread, keep_loop_running, run_on_loop, run_on_loop_async
from asyncsync.schemes.aio import Bus as AsyncBus
from asyncsync.schemes.aio import WeightSyncScheme as AsyncScheme
from asyncsync.schemes.scheme import Scheme
from asyncsync.schemes.sources import Sources
from asyncsync.schemes.taking import BlockingTaking
from asyncsync.schemes.torchrl import START_SECONDS, TorchRLContext, adapt_context, register_with_torchrl
from asyncsync.transports.base import named_in_sync

P = ParamSpec("P")
T = TypeVar("T")
MakeCoroutine = Callable[[], Coroutine[Any, Any, T]]
CoroutineMethod = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]


def bind_extracted(
    method: Any, self: Any, weights: Any = None, worker_ids: Workers = None, *args: Any, **more: Any
) -> Any:
    """Bind the arguments of a coroutine function that sends, and extract the weights now, in the caller's thread."""
    workers = as_workers(worker_ids)
    return partial(method, self, self.extract_here(weights, workers), workers, *args, **more)


def as_blocking(
    method: CoroutineMethod[P, T], *, run: str = "run_on_loop", bind: Callable[..., MakeCoroutine[Any]] = partial
) -> Callable[Concatenate[Any, P], T]:
    """A coroutine function of the asyncio API as an ordinary method, with its signature and docstring. ``bind`` binds
    the arguments of a call; the method named ``run`` runs the coroutine."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = getattr(self, run)(bind(method, self, *args, **kwargs))
        return result

    return call


def for_any_loop(method: CoroutineMethod[P, T]) -> CoroutineMethod[P, T]:
    """Turn a coroutine function that sends into one that any event loop can await. The library's loop runs it."""
    bind: Callable[..., MakeCoroutine[T]] = bind_extracted

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._bus_and_models()[0].run_async(bind(method, self, *args, **kwargs))
        return result

    name = method.__name__.removesuffix("_async")
    call.__name__ = f"{name}_async"
    call.__doc__ = (
        f":meth:`{name}` for coroutines on any event loop; returns the version. The source must not change before it "
        "returns. The weights travel on the library's own loop, even while the caller's loop is busy."
    )
    return call


def run_without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never has to wait, without an event loop. Raises TypeError if it waits, because the user's
    ``prepare_weights`` is a coroutine function."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise TypeError(
        "prepare_weights of a blocking scheme must be an ordinary method; only an asyncio scheme's may be a coroutine"
    )


def _begin(self: T) -> T:
    return self


def _end(self: Bus | WeightSyncScheme, *exc: object) -> None:
    self.shutdown()


@named_in_sync
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

    :class:`asyncsync.Bus` describes the methods.
    """

    __enter__, __exit__ = _begin, _end

    def connect(self, timeout: float = DEFAULT_TIMEOUT, processes: Iterable[Any] = ()) -> None:
        self._check_connect(timeout, processes)
        initial = run_without_waiting(self._initial_sources())
        self.run_on_loop(lambda: self._connect(initial, timeout))

    connect.__doc__ = AsyncBus.connect.__doc__

    publish = as_blocking(AsyncBus.publish, bind=bind_extracted)
    publish_async = for_any_loop(AsyncBus.publish)
    stage = as_blocking(AsyncBus.stage, bind=bind_extracted)
    send_async = for_any_loop(AsyncBus.send_async)
    wait_staged = as_blocking(AsyncBus.wait_staged)
    commit, drop = as_blocking(AsyncBus.commit), as_blocking(AsyncBus.drop)
    wait_version, wait_lag = as_blocking(AsyncBus.wait_version), as_blocking(AsyncBus.wait_lag)
    shutdown = as_blocking(AsyncBus.shutdown, run="end_on_loop")

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
        self.run_on_loop(
            bind_extracted(AsyncBus.send_async, self, weights, worker_ids, timeout, metadata=metadata, quorum=quorum)
        )

    def wait_origin(self, version: int, timeout: float) -> None:
        # Receiver: run asyncsync.bus.applying.Applying.wait_origin on the loop.
        self.run_on_loop(lambda: self.worker_link().wait_origin(version, self.schemes, timeout))

    def check_open(self, role: str) -> None:
        check_exit()
        super().check_open(role)

    def extract_here(self, weights: Mapping[str, Any], workers: list[int] | None) -> dict[str, Extracted]:
        # The current values of the sources, extracted in the caller's thread.
        sources = run_without_waiting(self._extract(weights, workers))
        return {topic: Extracted(source) for topic, source in sources.items()}

    async def run_async(self, make: MakeCoroutine[T]) -> T:
        # Run it on the loop, for a coroutine on any event loop.
        return await run_on_loop_async(make)

    @property
    def _open_link(self) -> TrainerLink | WorkerLink | None:
        """The link, if it is open in this process; else None."""
        link = self.link
        return None if link is None or link.closed or link.is_inherited else link

    def run_on_loop(self, make: MakeCoroutine[T]) -> T:
        async def kept() -> T:
            keep_loop_running(self._shutdown, True)  # shut down at exit, even if that comes while this connects
            try:
                return await make()
            finally:
                if (link := self._open_link) is not None and self.is_shut_down:
                    await link.shutdown()  # this call opened it after another thread had shut the bus down
                # Also if there is a link: another call that found none before may have ended the keeping.
                keep_loop_running(self._shutdown, self._open_link is not None)

        return run_on_loop(kept)

    def end_on_loop(self, make: MakeCoroutine[None]) -> None:
        if self._open_link is None:
            run_without_waiting(make())
        else:
            self.run_on_loop(make)

    def read_link(self, function: Callable[[], T]) -> T:
        if self.link is None or self.link.closed or is_loop_thread():
            return function()
        if self.link.is_inherited:
            raise RuntimeError("this scheme or bus was connected before the fork; connect anew in the child process")

        async def look() -> T:
            return function()

        return run_on_loop(look)


@named_in_sync
class WeightSyncScheme(Scheme):
    """Keeps the weights of one model in step, with blocking calls.

    ``model``, ``context`` and ``worker_idx`` may be set before the scheme is initialised. ``init_on_sender`` and
    ``init_on_receiver`` use them for arguments that they are not given.
    """

    bus_class: ClassVar[type[BusCore]] = Bus
    own_bus_class: ClassVar[type[BusCore]] = Bus
    is_blocking: ClassVar[bool] = True
    __enter__, __exit__ = _begin, _end
    wait_staged, commit, drop = Bus.wait_staged, Bus.commit, Bus.drop
    wait_version, wait_lag, shutdown = Bus.wait_version, Bus.wait_lag, Bus.shutdown
    _bus: Bus

    @property
    def bus(self) -> Bus:
        """The bus that this scheme is on."""
        return self._bus

    @property
    def aio(self) -> AsyncScheme:
        """This scheme with the asyncio API of :mod:`asyncsync`. Convert it before connecting.

        Raises:
            RuntimeError: this scheme is connected.
            TypeError: a class of your own, which has no counterpart in :mod:`asyncsync`.
        """
        twin: AsyncScheme = self._convert()
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
        collector = None
        if isinstance(self._context, TorchRLContext) and self.role == "sender" and self.moves_weights:
            collector = self._context
            processes = processes or collector.processes
            if weights is None and not (self.is_registered or self.sources.has_default()):
                weights = collector.initial_model(self.topic)
        self._check_connect(weights, worker_idx, timeout, processes)
        timeout = max(timeout, self._least_connect_seconds)
        try:
            if self.role == "sender":
                self._setup_connection_and_weights_on_sender_impl(weights=weights, timeout=timeout)
            else:
                self._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx, timeout=timeout)
        except BaseException as error:
            if collector is not None:
                self.shutdown()  # this ends the collector's other workers
                if isinstance(error, NotConnected) and (why := collector.worker_tracebacks()):
                    raise NotConnected(f"{error}{why}") from error
            raise

    connect.__doc__ = AsyncScheme.connect.__doc__

    def _setup_connection_and_weights_on_sender_impl(
        self, *, weights: Any = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        initial = run_without_waiting(self.initial_source(weights))
        self.run_on_loop(lambda: self.connect_sender(initial, timeout))

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        async def connect() -> None:
            await self.connect_receiver(worker_idx, timeout)
            if isinstance(self._context, TorchRLContext):
                self._context.connected = True

        self.run_on_loop(connect)

    def send(
        self,
        weights: Any = None,
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Metadata = None,
        quorum: int | None = None,
    ) -> None:
        if self._options.get("sync", True):
            more = {"metadata": metadata, "quorum": quorum}
            self.run_on_loop(bind_extracted(AsyncScheme.send_async, self, weights, worker_ids, timeout, **more))
        else:
            self.publish(weights, worker_ids, metadata=metadata)

    send.__doc__ = AsyncScheme.send_async.__doc__

    send_async = for_any_loop(AsyncScheme.send_async)
    publish = as_blocking(AsyncScheme.publish, bind=bind_extracted)
    publish_async = for_any_loop(AsyncScheme.publish)
    stage = as_blocking(AsyncScheme.stage, bind=bind_extracted)
    verify = as_blocking(AsyncScheme.verify)
    fetch = as_blocking(AsyncScheme.fetch, run="_run_delivering")

    def take(
        self, version: int | None = None, *, epoch: str | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> BlockingTaking:
        return BlockingTaking(self, version, epoch, timeout)

    take.__doc__ = AsyncScheme.take.__doc__

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        return self.receive_update(timeout)

    receive.__doc__ = AsyncScheme.receive.__doc__

    def receive_update(self, timeout: float | None) -> TensorDict | None:
        # As receive, also where a subclass's receive returns no weights.
        self._check_not_holding(timeout)
        call = self.current_call()
        return self._run_delivering(lambda: self._receive(timeout, call))

    def run_on_loop(self, make: MakeCoroutine[T]) -> T:
        return self._bus.run_on_loop(make)

    def end_on_loop(self, make: MakeCoroutine[None]) -> None:
        self._bus.end_on_loop(make)

    def extract_here(self, weights: Any, workers: list[int] | None) -> Any:
        # The current values of the weights, extracted in the caller's thread.
        self._check_open()
        return self._bus.extract_here({self.topic: weights}, workers)[self.topic]

    def _run_delivering(self, make: MakeCoroutine[T]) -> T:
        """Return weights to the caller. If an exception strikes in the caller's thread before it has them, the next
        receive returns them."""
        undo: list[Callable[[], None]] = []
        interrupted = False

        async def deliver() -> T:
            before = self.last_returned
            weights = await make()
            mark_unreturned = partial(self.mark_unreturned, self.last_returned, before)
            undo.append(mark_unreturned)
            if interrupted:  # the handler below may have run before this entry was there
                mark_unreturned()
            return weights

        try:
            return self.run_on_loop(deliver)
        except BaseException:
            interrupted = True
            for mark_unreturned in undo:
                mark_unreturned()
            raise

    # -- what TorchRL's collectors read and set ------------------------------------------------------------------------

    # Set on a sender, and pickled with the scheme for its workers: the shortest timeout of connect(), in seconds, and
    # the number that TorchRL's collector gives its first worker.
    _least_connect_seconds: float = 0.0
    _first_worker_number: int = 0

    def _reset(self) -> None:
        super()._reset()
        register_with_torchrl(WeightSyncScheme)

    @checked(Scheme.init_on_sender)
    def init_on_sender(self, **options: Any) -> None:
        super().init_on_sender(**self._with_preset(options, "model", "context"))
        if isinstance(self._context, TorchRLContext) and self._context.num_workers is not None:
            self._least_connect_seconds = START_SECONDS
            self._first_worker_number = self._context.first_worker_number

    @checked(Scheme.init_on_receiver)
    def init_on_receiver(self, model_id: str, context: Any = None, **options: Any) -> None:
        options = self._with_preset({**options, "context": context}, "model", "context", "worker_idx")
        if self._first_worker_number and options.get("worker_idx") is not None:
            options["worker_idx"] -= self._first_worker_number
        super().init_on_receiver(model_id, **options)

    def _with_preset(self, options: Mapping[str, Any], *names: str) -> dict[str, Any]:
        missing = [name for name in names if self.role is None and options.get(name) is None]
        return {**options, **{name: getattr(self, f"_{name}") for name in missing}}

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this is the sender, in this process."""
        register_with_torchrl(WeightSyncScheme)  # TorchRL reads this first; it may have been imported since _reset()
        return self.role == "sender" and self.pid == os.getpid()

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this is a receiver, in this process."""
        register_with_torchrl(WeightSyncScheme)
        return self.role == "receiver" and self.pid == os.getpid()

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether this is the sender, and connected."""
        return self.initialized_on_sender and self.is_registered

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether this is a receiver, and connected."""
        return self.initialized_on_receiver and self.is_registered

    @property
    def strategy_str(self) -> str:
        """``"tensordict"`` or ``"state_dict"``."""
        return self.strategy.extract_as

    @property
    def model(self) -> Any:
        """The registered model; on a sender that has only a context, the context's model. None when unset.

        Set it on a sender to have ``send()`` without an argument send this model. Set it on a receiver to replace the
        model: when this returns, the new one has the current weights, and gets the updates from then on.
        """
        return super().model

    @model.setter
    def model(self, model: Any) -> None:
        if self.role is None:
            self._model = model
        elif self.role == "sender":
            old = self.sources
            self.sources = Sources(self.model_id, old.context, model=model, device_map_fn=old.device_map_fn)
        elif model is not self._model:
            replace = partial(self.replace_model, model, max(DEFAULT_TIMEOUT, self._least_connect_seconds))
            if isinstance(self._bus.link, WorkerLink):
                self.run_on_loop(replace)
            else:
                run_without_waiting(replace())

    @property
    def context(self) -> Any:
        """The context object; None when unset. A context that is set on a receiver learns of each later update."""
        return super().context

    @context.setter
    def context(self, context: Any) -> None:
        if self.role is None:
            self._context = context
            return
        self._context = self.sources.context = context = adapt_context(context)
        link = self._bus.link
        if self.is_registered and isinstance(link, WorkerLink):
            if isinstance(context, TorchRLContext):
                context.connected = True
            self._bus.read_link(lambda: link.set_context(self.topic, context))

    @property
    def worker_idx(self) -> int | None:
        """Which worker this is; None when unset."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if worker_idx == self._worker_idx:
            return
        if self.role is None:
            self._worker_idx = worker_idx
        elif self.role == "sender" or self._worker_idx is not None:
            side = "the sender" if self.role == "sender" else f"worker {self._worker_idx}"
            raise RuntimeError(f"this scheme is {side} already: worker_idx can be set once, on a receiver")
        else:
            self._check_worker(worker_idx)
            self._worker_idx = worker_idx
