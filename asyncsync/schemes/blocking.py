"""The blocking API of every scheme: ordinary methods over :class:`asyncsync.schemes.core.SchemeCore`, run on the one
event loop of the process (:mod:`asyncsync.runtime.loop_thread`).

What belongs to the caller runs in the caller's thread: taking the weights from their source (a strategy, a
``prepare_weights``, a context, the thread's current CUDA stream), and forwards of a gated module. Names, overloads and
return values are those of TorchRL's "WeightSyncScheme" page.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from tensordict import TensorDict

from asyncsync.arguments import as_workers, check_timeout
from asyncsync.bus import sending, starting
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore
from asyncsync.bus.member import Extract
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.runtime import loop_thread
from asyncsync.schemes.core import SchemeCore
from asyncsync.schemes.registry import convert, scheme_class
from asyncsync.transports.blocking import in_sync_as

__all__ = ["Bus", "WeightSyncScheme"]

T = TypeVar("T")
Workers = int | Iterable[int] | None


def _now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that has nothing to wait for.

    Raises:
        TypeError: it has: a hook of the user's is a coroutine function.
    """
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
        """Connect all schemes of this bus. Raises as :meth:`asyncsync.Bus.connect`."""
        starting.check_connect(self, timeout, processes)
        initial = {t: None if e is None else _taken(e) for t, e in _now(starting.initial(self)).items()}
        self._run(lambda: starting.connect(self, initial, timeout))

    def publish(self, weights: Mapping[str, Any], worker_ids: Workers = None) -> int:
        """Snapshot several models and announce them as one update; returns the version. Raises as
        :meth:`asyncsync.Bus.publish`."""
        return self._run(self._publication(weights, worker_ids))

    async def publish_async(self, weights: Mapping[str, Any], worker_ids: Workers = None) -> int:
        """:meth:`publish` for a coroutine of any event loop. The source must not change until it returns."""
        return await loop_thread.awaitable(self._publication(weights, worker_ids))

    def wait_version(self, version: int, worker_ids: Workers = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait until the targeted workers (on a receiver: this one) have applied a version, or a newer one. Raises as
        :meth:`asyncsync.Bus.wait_version`."""
        self._run(lambda: sending.wait_version(self, version, worker_ids, timeout, None))

    def _wait_origin(self, version: int, timeout: float) -> None:
        """Receiver: see :meth:`asyncsync.bus.receiving.Receiving.wait_origin`."""
        self._run(lambda: self._receiver().receiving.wait_origin(version, self._schemes, timeout))

    def send(self, weights: Mapping[str, Any], worker_ids: Workers = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """:meth:`publish`, then :meth:`wait_version`. Raises as :meth:`asyncsync.Bus.send_async`."""
        self._run(self._sending(weights, worker_ids, timeout))

    async def send_async(
        self, weights: Mapping[str, Any], worker_ids: Workers = None, timeout: float = DEFAULT_TIMEOUT
    ) -> int:
        """:meth:`send` for a coroutine of any event loop; returns the version."""
        return await loop_thread.awaitable(self._sending(weights, worker_ids, timeout))

    def shutdown(self, timeout: float = 5.0) -> None:
        """End all schemes of this bus; the other side learns of it. Idempotent."""
        self._end(lambda: self._shutdown(timeout))

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

    def _publication(self, weights: Mapping[str, Any], worker_ids: Workers) -> Callable[[], Coroutine[Any, Any, int]]:
        """Take the sources' values, here and now; returns what publishes them on the loop."""
        workers = as_workers(worker_ids)
        sources = _now(sending.extract(self, weights, workers))()
        return lambda: sending.publish_sources(self, lambda: sources, weights, workers)

    def _sending(
        self, weights: Mapping[str, Any], worker_ids: Workers, timeout: float
    ) -> Callable[[], Coroutine[Any, Any, int]]:
        """The same for :meth:`send`."""
        check_timeout(timeout)
        workers = as_workers(worker_ids)
        sources = _now(sending.extract(self, weights, workers))()
        return lambda: sending.send_sources(self, lambda: sources, weights, workers, timeout)

    def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
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

        return loop_thread.run(tended)

    def _end(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        link = self._link
        if link is None or link.closed or link.is_inherited:  # nothing runs on the loop
            _now(make())
        else:
            self._run(make)

    def _look(self, function: Callable[[], T]) -> T:
        if self._link is None or self._link.closed or loop_thread.is_here():
            return function()
        self._check_fork()

        async def look() -> T:
            return function()

        return loop_thread.run(look)


def _taken(extract: Extract) -> Extract:
    source = extract()
    return lambda: source


@in_sync_as("WeightSyncScheme")
class WeightSyncScheme(SchemeCore):
    """One model's weights, kept in step by blocking calls.

    Args:
        strategy: ``"tensordict"`` (default), ``"state_dict"``, or a :class:`WeightStrategy` instance.
        endpoint: where the sender binds; None draws a private ipc path.
        connect: where workers connect, if that differs.
        bus: an :class:`asyncsync.sync.Bus` shared with other schemes, instead of one of its own.
        num_workers: fixed number of workers; None: elastic.
        min_workers: how many an elastic sender needs; 0: it can start alone.
        allow_plaintext: allow addresses beyond this host, unencrypted.

    Raises:
        ValueError: unknown strategy, or an address that is not safe or cannot work.
    """

    _bus_class: ClassVar[type[BusCore]] = Bus
    _is_blocking: ClassVar[bool] = True
    _bus: Bus

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> WeightSyncScheme:
        """A scheme by the name of its backend: "shared" (or "thread"), "process" (or
        "multiprocessing"), "zmq", "none" (or "direct").

        Args:
            backend: the name.
            kwargs: of that scheme's constructor.

        Raises:
            ValueError: no such backend; names those that there are.
        """
        scheme: WeightSyncScheme = scheme_class(backend, is_blocking=True)(**kwargs)
        return scheme

    @property
    def aio(self) -> Any:
        """This scheme with the asyncio API of :mod:`asyncsync`; to be taken before connecting.

        Raises:
            RuntimeError: this scheme is connected.
            TypeError: a class of your own, which has no twin in :mod:`asyncsync`.
        """
        return convert(self, "asyncsync")

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
    ) -> None:
        """The rendezvous; either side may call first. Dispatches by which init ran.

        A sender returns when its ``num_workers`` (or ``min_workers``) workers have applied the initial weights, or are
        ready if there are none yet; a receiver when it has applied them. Calling it again is harmless.

        Args:
            worker_idx: receiver: which worker this is, if init did not say.
            weights: sender: the initial weights; None: the registered source, if any.
            timeout: seconds.
            processes: sender: the workers' processes (of multiprocessing, subprocess or asyncio); if one ends before
                all are connected, this raises at once.

        Raises:
            NotConnected: the others were not there in time; may be called again.
            SchemaMismatch: receiver: the sender's weights do not fit the model; nothing was changed.
            PartialSendError: sender: a worker cannot take the weights; no worker was changed.
        """
        self._check_connect(weights, worker_idx, timeout, processes)
        if self._role == "sender":
            self._setup_connection_and_weights_on_sender_impl(weights=weights, timeout=timeout)
        else:
            self._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx, timeout=timeout)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, weights: Any = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        extract = _now(self._initial(weights))
        initial = None if extract is None else _taken(extract)
        self._bus._run(lambda: self._connect_sender(initial, timeout))

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self._bus._run(lambda: self._connect_receiver(worker_idx, timeout))

    def send(self, weights: Any = None, worker_ids: Workers = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Send weights, and return when the targeted workers have applied them.

        Args:
            weights: None (the registered source's current values), module, TensorDict, dict, or ``{worker_idx:
                weights}``.
            worker_ids: whom it is for; None: everybody, later ones too.
            timeout: seconds.

        Raises:
            ValueError, TypeError: weights or workers that cannot be; nothing was published.
            NotConnected, ClosedError, Fenced: this sender cannot publish.
            PartialSendError: who has not applied it, and why. Not final: they still converge.
        """
        self._check_open()
        self._bus.send({self._topic: weights}, worker_ids, timeout)

    async def send_async(
        self, weights: Any = None, worker_ids: Workers = None, timeout: float = DEFAULT_TIMEOUT
    ) -> int:
        """:meth:`send` for a coroutine of any event loop; returns the version. The source must not change until it
        returns."""
        self._check_open()
        return await self._bus.send_async({self._topic: weights}, worker_ids, timeout)

    def publish(self, weights: Any = None, worker_ids: Workers = None) -> int:
        """Snapshot the weights and announce them; returns the version without waiting for any worker.

        The source may change from then on. Latest wins: a worker that is behind skips versions.

        Raises:
            ValueError, TypeError, NotConnected, ClosedError, Fenced: as :meth:`send`.
        """
        self._check_open()
        return self._bus.publish({self._topic: weights}, worker_ids)

    async def publish_async(self, weights: Any = None, worker_ids: Workers = None) -> int:
        """:meth:`publish` for a coroutine of any event loop: what follows may keep that loop busy, the weights travel
        by another. The source must not change until it returns."""
        self._check_open()
        return await self._bus.publish_async({self._topic: weights}, worker_ids)

    def wait_version(self, version: int, worker_ids: Workers = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Sender: until every targeted worker has applied this version or a newer one. Receiver: until this worker has.

        Raises:
            PartialSendError: sender: who has not, and why. Not final: they still converge.
            AckTimeout: receiver: not within the timeout (seconds).
        """
        self._check_open()
        self._bus._run(lambda: sending.wait_version(self._bus, version, worker_ids, timeout, [self._topic]))

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        """The newest applied update that was not returned yet, as a TensorDict that the caller owns.

        Updates are applied to the registered model as they come; this tells of them.

        Args:
            timeout: seconds; 0 polls; None waits without a deadline.

        Returns:
            The weights, or None when the timeout expires.

        Raises:
            ClosedError: the sender has said goodbye, or this side was shut down. An unreturned update comes first.
            Fenced: a newer incarnation of this worker has taken over.
        """
        self._check_not_held(timeout)
        return self._deliver(lambda: self._receive(timeout))

    def fetch(self, timeout: float = 30.0) -> TensorDict:
        """Pull: ask the sender for the current version, apply and return it, also if it is here already.

        Raises:
            AckTimeout: not within the timeout (seconds).
        """
        weights = self._deliver(lambda: self._fetch(timeout))
        assert weights is not None
        return weights

    def _deliver(self, make: Callable[[], Coroutine[Any, Any, TensorDict | None]]) -> TensorDict | None:
        """Weights for the caller. An exception in its thread may strike until they are there: then the next receive
        returns them."""
        undo: list[Callable[[], None]] = []
        gone = False

        async def deliver() -> TensorDict | None:
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

    @property
    def weights(self) -> TensorDict | None:
        """A copy of the current weights; None when there are none."""
        link = self._bus._link
        if not isinstance(link, ReceiverLink) or link.closed or loop_thread.is_here():
            return super().weights
        self._bus._check_fork()

        async def copy() -> TensorDict | None:
            if link.subscriber.holdings.held.get(self._topic) is None:
                return None
            weights: TensorDict = await link.receiving.copy(self._topic, lambda slab: slab.weights())
            return weights

        return loop_thread.run(copy)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Release everything; the other side learns of it. Idempotent. A shared bus ends with the last of its
        schemes."""
        self._bus._end(lambda: self._shutdown(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
