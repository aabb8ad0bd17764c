"""The asyncio API of every bus and scheme: coroutines on the caller's event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from tensordict import TensorDict

from asyncsync.arguments import check_timeout
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore, Metadata, ModelsOnBus, Workers
from asyncsync.bus.verifying import NotComparable
from asyncsync.schemes.scheme import Scheme
from asyncsync.schemes.taking import Taking
from asyncsync.schemes.torchrl import RefusedAttribute

T = TypeVar("T")


def _refuse(self: object, *exc: object) -> NoReturn:
    raise TypeError(
        f"use `async with`: this is an asyncio {type(self).__name__}; the blocking one is in asyncsync.sync"
    )


async def _begin(self: T) -> T:
    return self


async def _end(self: Bus | WeightSyncScheme, *exc: object) -> None:
    await self.shutdown()


class Bus(BusCore):
    """One address for any number of models. Usage::

    async with Bus() as bus:                                       # the trainer
        policy_scheme = ZMQWeightSyncScheme(bus=bus, num_workers=2)
        value_scheme = ZMQWeightSyncScheme(bus=bus)
        policy_scheme.init_on_sender(model_id="policy", model=policy)
        value_scheme.init_on_sender(model_id="value", model=value)
        ...                                                        # start the workers, pass them the schemes
        await bus.connect()
        await bus.send_async({"policy": policy, "value": value})   # each worker switches both, or none

    """

    __enter__, __exit__, __aenter__, __aexit__ = _refuse, _refuse, _begin, _end

    async def connect(self, timeout: float = DEFAULT_TIMEOUT, processes: Iterable[Any] = ()) -> None:
        """Connect all schemes of this bus; see :meth:`WeightSyncScheme.connect`.

        Args:
            timeout: seconds for all schemes together.
            processes: sender: the workers' processes; if one ends before all are connected, this raises at once.

        Raises:
            RuntimeError: no scheme of this bus has been initialised.
            NotConnected, SchemaMismatch, PartialSendError: as a scheme's ``connect``.
        """
        self._check_connect(timeout, processes)
        await self._connect(await self._initial_sources(), timeout)

    async def publish(
        self, weights: Mapping[str, Any], worker_ids: Workers = None, *, metadata: Metadata = None
    ) -> int:
        """Snapshot several models and announce them as one update: each worker switches all of them, or none.

        When this returns, the snapshot is complete and the sources may change. It does not wait until workers have
        applied the update.

        Args:
            weights: ``{model_id: weights}``, the weights as for a scheme's ``publish``; None: the registered source.
            worker_ids: the workers that get the update; None: all.
            metadata: as for a scheme's ``publish``.

        Returns:
            The version.

        Raises:
            ValueError, TypeError: an unknown model_id or worker, or invalid weights; nothing was published.
            AckTimeout, MemoryError, NotConnected, ClosedError, Fenced: as a scheme's ``publish``.
        """
        return await self.announce(weights, worker_ids, metadata)

    async def stage(self, weights: Mapping[str, Any], worker_ids: Workers = None, *, metadata: Metadata = None) -> int:
        """:meth:`publish`, but workers apply nothing before :meth:`commit`; see :meth:`WeightSyncScheme.stage`."""
        return await self.announce(weights, worker_ids, metadata, stages=True)

    async def send_async(
        self,
        weights: Mapping[str, Any],
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Metadata = None,
        quorum: int | None = None,
    ) -> int:
        """:meth:`publish`, then :meth:`wait_version`; returns the version. Raises as
        :meth:`WeightSyncScheme.send_async`."""
        return await self.announce_and_wait(weights, worker_ids, timeout, metadata, quorum)

    async def wait_staged(
        self: ModelsOnBus,
        version: int,
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        quorum: int | None = None,
    ) -> None:
        """Sender: wait until the workers have staged this version: they have all its bytes, and these fit the model. It
        may be a published version, because receivers with ``apply="on_take"`` or ``"on_receive"`` stage these, too.

        Args:
            version: as returned by :meth:`stage` or :meth:`publish`.
            worker_ids, timeout, quorum: as for :meth:`wait_version`.

        Raises:
            PartialSendError: names the workers that have not staged it, and why; its ``acked`` has staged versions.
            ValueError: the version was never published, was dropped, or was replaced before its commit (the message
                names the newer one); or an unknown worker.
            NotConnected: no connected worker is to get the version, or fewer than the ``quorum``.
            ClosedError, Fenced: this side has ended.
        """
        bus, models = self._open_bus_and_models()
        await bus.await_staged(version, worker_ids, timeout, models, quorum)

    async def commit(
        self: ModelsOnBus,
        version: int,
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        quorum: int | None = None,
    ) -> None:
        """Sender: let the workers apply the staged version, and wait until they have. Arguments and exceptions are
        those of :meth:`wait_version`. A worker that is still staging the version applies it when it is ready.

        Raises:
            ValueError: the version is not staged (any more); the message says what there is instead.
        """
        bus, models = self._open_bus_and_models()
        await bus.commit_and_wait(version, worker_ids, timeout, models, quorum)

    async def drop(self: ModelsOnBus, version: int) -> None:
        """Sender: discard the staged version. The workers release it, and none applies it.

        Raises:
            ValueError: the version is not staged (any more); the message says what there is instead.
        """
        self._open_bus_and_models()[0].drop_staged(version)

    async def wait_version(
        self: ModelsOnBus,
        version: int,
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        quorum: int | None = None,
    ) -> None:
        """Sender: wait until the targeted workers have applied this version or a newer one. Receiver: wait until this
        worker has; on a bus, with each model of which the sender has announced this version or a newer one.

        Args:
            version: as returned by ``publish``.
            worker_ids: sender only: wait for these workers; None: all whose target is at least this version.
            timeout: seconds.
            quorum: sender only: how many of these workers are enough; None: all. The others still get the update.

        Raises:
            PartialSendError: sender: names the workers that have not applied it, and why; with a ``quorum``, raised
                only if too few have. Not final: these workers still get it.
            NotConnected: sender: no connected worker is to get the version, or fewer than the ``quorum``.
            AckTimeout: receiver: the timeout has expired.
            ValueError, TypeError: an unknown worker, or a version that was not published.
            ClosedError, Fenced: this side has ended.
        """
        bus, models = self._open_bus_and_models()
        await bus.await_version(version, worker_ids, timeout, models, quorum)

    async def wait_lag(self: ModelsOnBus, max_lag: int, timeout: float = DEFAULT_TIMEOUT) -> int:
        """Receiver: wait until its model is at most ``max_lag`` versions behind; on a bus, each of its models.

        The worker asks the sender which version it should have now, and waits until it has applied that version, or one
        that is at most ``max_lag`` versions older.

        Args:
            max_lag: versions; 0: the newest. Counted as ``lag`` in :meth:`status`, and as a collector's ``max_lag``.
            timeout: seconds.

        Returns:
            The version that this worker has applied; of several models, the oldest.

        Raises:
            AckTimeout: the sender has not answered, or the update was not applied, within the timeout.
            ValueError: ``max_lag`` is not a whole number from 0.
            SchemaMismatch, RemoteError: this worker could not apply the update.
            RuntimeError: this is a sender.
            NotConnected, ClosedError, Fenced: there is no sender to ask, or this side has ended.
        """
        bus, models = self._open_bus_and_models()
        return await bus.await_lag(models or list(bus.schemes), max_lag, timeout)

    async def shutdown(self: ModelsOnBus, timeout: float = 5.0) -> None:
        """Release everything, and tell the other side. May be called again.

        A receiver's model keeps its last weights, and its calls no longer count as reading. A bus shuts down all its
        schemes. A scheme shuts down its bus if no other scheme uses it; else the bus goes on with the others, and
        another scheme may take the place of this one.

        Args:
            timeout: seconds; what has not ended by then is cut off.
        """
        await self._shutdown(timeout)


class WeightSyncScheme(Scheme):
    """Keeps the weights of one model in step. Its coroutines run on the caller's event loop."""

    bus_class: ClassVar[type[BusCore]] = Bus
    own_bus_class: ClassVar[type[BusCore]] = Bus
    is_blocking: ClassVar[bool] = False

    __enter__, __exit__, __aenter__, __aexit__ = _refuse, _refuse, _begin, _end
    wait_staged, commit, drop = Bus.wait_staged, Bus.commit, Bus.drop
    wait_version, wait_lag, shutdown = Bus.wait_version, Bus.wait_lag, Bus.shutdown
    _bus: Bus
    initialized_on_sender = initialized_on_receiver = RefusedAttribute()  # TorchRL reads these before anything else

    @property
    def bus(self) -> Bus:
        """The bus that this scheme is on."""
        return self._bus

    @property
    def aio(self) -> Self:
        """This scheme."""
        return self

    @property
    def blocking(self) -> Any:
        """This scheme with the blocking API of :mod:`asyncsync.sync`. Convert it before connecting. Schemes that share
        a bus share one after the conversion, too.

        Raises:
            RuntimeError: this scheme is connected.
            TypeError: a class of your own, which has no counterpart in :mod:`asyncsync.sync`.
        """
        return self._convert()

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        processes: Iterable[Any] = (),
    ) -> None:
        """Connect to the other side; either side may call this first.

        On a sender, this returns when its ``num_workers`` (or ``min_workers``) workers have applied the initial
        weights; on a receiver, when it has applied them. If there are no initial weights yet, it returns when these
        workers, or this receiver, are ready for some. It may be called again.

        Args:
            worker_idx: receiver: which worker this is, unless ``init_on_receiver`` was given it.
            weights: sender: the initial weights; None: those of the registered source, if there is one.
            timeout: seconds.
            processes: sender: the workers' processes (of multiprocessing, subprocess or asyncio); if one ends before
                all are connected, this raises at once.

        Raises:
            NotConnected: the other side did not connect in time; you may call this again.
            SchemaMismatch: receiver: the sender's weights do not fit the model; nothing was changed.
            PartialSendError: sender: a worker cannot apply the weights; no worker was changed.
            ClosedError, Fenced: this side was shut down, or a newer process has replaced it.
            ValueError, TypeError: invalid arguments, or arguments that belong to the other side's ``connect``.
        """
        self._check_connect(weights, worker_idx, timeout, processes)
        if self.role == "sender":
            await self._setup_connection_and_weights_on_sender_impl(weights=weights, timeout=timeout)
        else:
            await self._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx, timeout=timeout)

    async def _setup_connection_and_weights_on_sender_impl(
        self, *, weights: Any = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        await self.connect_sender(await self.initial_source(weights), timeout)

    async def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        await self.connect_receiver(worker_idx, timeout)

    async def publish(self, weights: Any = None, worker_ids: Workers = None, *, metadata: Metadata = None) -> int:
        """Snapshot the weights and announce them. Returns the version, without waiting for any worker.

        The source must not change before this returns, and may change afterwards. Latest wins: a worker that is
        behind skips versions.

        With the asyncio API, workers fetch large weights (over 4 MiB) afterwards, while this event loop runs; if the
        loop trains without an await, they get them late. Then train in a thread (``asyncio.to_thread``), or await
        ``publish_async`` of :mod:`asyncsync.sync`'s schemes. If this is cancelled, it raises when nothing reads the
        source any more, and the version is either published as a whole or discarded.

        Args:
            weights: None (the registered source's current values), module, TensorDict, dict, or ``{worker_idx:
                weights}``.
            worker_ids: the workers that get it; None: all, also those that connect later.
            metadata: a small mapping that arrives with the version: see :attr:`metadata` and :meth:`hold`. Keys are
                strings, values what msgpack can encode; at most 64 KiB when encoded.

        Raises:
            ValueError, TypeError: invalid weights, workers or metadata; nothing was published.
            AckTimeout: for 60 s, workers that are behind have still been reading all ``slots`` of shared memory, or the
                ``prepare_weights`` of an earlier publication has not returned; nothing was published.
            MemoryError: there is too little memory for the snapshot; nothing was published.
            NotConnected, ClosedError, Fenced: this sender cannot publish.
        """
        self._check_open()
        return await self._bus.announce({self.topic: weights}, worker_ids, metadata)

    async def stage(self, weights: Any = None, worker_ids: Workers = None, *, metadata: Metadata = None) -> int:
        """Snapshot the weights and announce them, but only for staging: workers fetch and check them, and keep them
        until :meth:`commit`. Until then all workers, also new ones, act with the version before.

        At most one version is staged: a later :meth:`stage` or :meth:`publish` drops it, and its number is not used
        again. Arguments and exceptions are those of :meth:`publish`.

        Returns:
            The version.
        """
        self._check_open()
        return await self._bus.announce({self.topic: weights}, worker_ids, metadata, stages=True)

    async def verify(
        self, worker_ids: Workers = None, timeout: float = DEFAULT_TIMEOUT
    ) -> dict[int, list[str] | NotComparable]:
        """Sender: compare the tensors of the workers' models with those of the newest version, by digests.

        Each worker hashes its model in a thread, between two calls of the model; updates wait meanwhile. Training and
        sending may go on: if a worker gets a newer version meanwhile, it is asked again. Extra state is not compared.

        Args:
            worker_ids: the workers to ask; None: every worker that has this model, or should have it.
            timeout: seconds.

        Returns:
            For each worker, the dotted names of the tensors that differ from the newest version, empty if all are
            equal; or :class:`NotComparable`, with the reason: the worker casts or converts weights, has no model, is
            lost, or has not got the newest version or not answered in time.

        Raises:
            AckTimeout: an earlier :meth:`verify` has not ended within the timeout.
            ValueError, TypeError: an unknown worker.
            RuntimeError: this is a receiver.
            NotConnected, ClosedError, Fenced: this sender cannot ask.
        """
        self._check_open()
        return await self._bus.verify_model(self.topic, worker_ids, timeout)

    async def send_async(
        self,
        weights: Any = None,
        worker_ids: Workers = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Metadata = None,
        quorum: int | None = None,
    ) -> int:
        """:meth:`publish`, then :meth:`wait_version`: returns when all targeted workers have applied the weights. With
        ``quorum=n``, it returns when n workers have. The others still get them, but no error reports them.

        Args:
            weights, worker_ids, metadata: as for :meth:`publish`.
            timeout: seconds.
            quorum: how many of the targeted workers are enough; None: all.

        Returns:
            The version; the blocking ``send`` returns None.

        Raises:
            NotConnected: no worker has this model (elastic sender: fewer than ``min_workers``, or than the ``quorum``);
                nothing was published.
            PartialSendError: names the workers that have not applied it, and why; with a ``quorum``, raised only if too
                few have. Not final: these workers still get it.
            ValueError, TypeError, MemoryError, ClosedError, Fenced: as :meth:`publish`.
        """
        self._check_open()
        return await self._bus.announce_and_wait({self.topic: weights}, worker_ids, timeout, metadata, quorum)

    def send(self, weights: Any = None, worker_ids: Workers = None) -> None:
        """Not available in the asyncio API.

        Raises:
            TypeError: always; names the two alternatives.
        """
        raise TypeError(
            "this is the asyncio scheme: use `await scheme.send_async(...)`, or the blocking classes in asyncsync.sync"
        )

    async def receive(self, timeout: float | None = None) -> TensorDict | None:
        """Return the newest applied update that was not returned yet, as a TensorDict that the caller owns.

        The scheme applies updates to the registered model as they come; this only reports them. With
        ``apply="on_receive"``, this applies the update, too.

        Args:
            timeout: seconds; 0 polls; None waits without a deadline.

        Returns:
            The weights, or None when the timeout expires.

        Raises:
            ClosedError: the sender has shut down, or this side was shut down. An update that was not returned yet is
                returned first.
            Fenced: a newer process has become this worker.
        """
        self._check_not_holding(timeout)
        return await self._receive(timeout, self.current_call())

    def take(self, version: int | None = None, *, epoch: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> Taking:
        """Borrow a version for a block, to apply it in your own way, time and thread, to an inference engine for
        example. For a receiver with ``apply="on_take"``. Usage::

            async with scheme.take(version) as taken:       # blocking schemes: with scheme.take(version) as taken
                engine.load_weights(taken.items())          # (dotted name, tensor), in the order of the layout

        If the weights lie in shared memory, they are not copied; what you write there stays in this process. When the
        block ends, the sender learns that this worker has applied the version. If the block raises, the sender gets the
        traceback instead, and the version can be taken again. During the block no newer version replaces it; if the
        sender is lost, nothing is raised and the lease holds. ``taken.previous`` is the version before, to go back to.

        Args:
            version: take exactly this version, even if it is applied already; None: the newest that has arrived and is
                not applied.
            epoch: take a version of this sender only (:attr:`epoch`); None: of any.
            timeout: seconds to wait for the version.

        Raises:
            AckTimeout: the version has not arrived in time.
            Superseded: a newer version, or a new sender, has replaced it; the error's ``version`` is the newest one.
            PeerLost: at the end of the block: another sender's epoch has begun meanwhile.
            RuntimeError: another version is taken; or this receiver was not initialised with ``apply="on_take"``.
            SchemaMismatch, MemoryError: this worker could not stage the version.
            ClosedError, Fenced: this side has ended.
        """
        return Taking(self, version, epoch, timeout)

    async def fetch(self, timeout: float = 30.0) -> TensorDict:
        """Ask the sender for the current version, apply it and return it, even if this worker has applied it already.

        Raises:
            AckTimeout: the timeout (seconds) has expired.
            SchemaMismatch: the sender's weights do not fit the model, which is unchanged.
            NotConnected, ClosedError, Fenced: there is no sender to ask, or this side has ended.
            Exception: what your own strategy or ``apply_weights`` has raised with this version.
        """
        check_timeout(timeout)
        self._check_open()
        self._check_returns_weights()
        link = self._bus.worker_link()
        mark = await link.wait_current(self.topic, timeout)
        return await self._return_copy(link, mark, self.last_returned)
