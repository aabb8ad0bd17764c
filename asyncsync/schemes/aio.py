"""The asyncio API of every scheme: coroutines over :class:`asyncsync.schemes.scheme.Scheme`, on the caller's event
loop."""

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
        """Connect all schemes of this bus; see :meth:`ZMQWeightSyncScheme.connect`.

        Args:
            timeout: seconds for all of them together.
            processes: the workers' processes, to be watched meanwhile.

        Raises:
            RuntimeError: no scheme has been initialised on this bus.
            NotConnected, SchemaMismatch, PartialSendError: as the schemes' ``connect``.
        """
        self._check_connect(timeout, processes)
        await self._connect(await self._initial(), timeout)

    async def publish(
        self, weights: Mapping[str, Any], worker_ids: Workers = None, *, metadata: Metadata = None
    ) -> int:
        """Snapshot several models and announce them as one update: each worker switches all of them, or none.

        When this returns, the snapshot is complete and the sources may change; workers have not applied it yet.

        Args:
            weights: ``{model_id: weights}``; each as for a scheme's ``publish``, None for the registered source.
            worker_ids: the workers that get it; None: all.
            metadata: as for a scheme's ``publish``.

        Returns:
            The version.

        Raises:
            ValueError, TypeError: an unknown model_id or worker, or invalid weights; nothing was published.
            AckTimeout, MemoryError, NotConnected, ClosedError, Fenced: as a scheme's ``publish``.
        """
        return await self.announce(weights, worker_ids, metadata)

    async def stage(self, weights: Mapping[str, Any], worker_ids: Workers = None, *, metadata: Metadata = None) -> int:
        """As :meth:`publish`, but nothing is applied before :meth:`commit`; see :meth:`WeightSyncScheme.stage`."""
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
        """Wait until the workers have this version ready: all its bytes are there and fit. Also of a version that was
        published, which a receiver with ``apply="on_take"`` or ``"on_receive"`` has ready before it applies it.

        Args:
            version: as returned by :meth:`stage` or :meth:`publish`.
            worker_ids, timeout, quorum: as for :meth:`wait_version`.

        Raises:
            PartialSendError: names the workers that have not got it ready, and why; its ``acked`` are versions that are
                ready.
            ValueError: the version was dropped, or replaced before its commit (the message names the newer one), or
                never published; or an unknown worker.
            NotConnected: nobody is to get it.
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
        """The second phase: have the staged version applied, and wait for that as :meth:`wait_version` does, with its
        arguments and exceptions. A worker that has not got it ready yet applies it as soon as it has.

        Raises:
            ValueError: the version is not staged (any more); the message says what there is instead.
        """
        bus, models = self._open_bus_and_models()
        await bus.commit_and_wait(version, worker_ids, timeout, models, quorum)

    async def drop(self: ModelsOnBus, version: int) -> None:
        """What is staged goes to nobody: the workers release it.

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
        """Sender: wait until the targeted workers have applied this version or a newer one. Receiver: until this
        worker has applied it; on a bus, with every model for which it has heard of a version.

        Args:
            version: as returned by ``publish``.
            worker_ids: sender only; None: every worker whose target is at least this version.
            timeout: seconds.
            quorum: sender only: how many of these workers are enough; None: all. The others still get it.

        Raises:
            PartialSendError: sender: names the workers that have not, and why; with a ``quorum``, if it was not
                reached. Not final: they still get it.
            NotConnected: sender: no worker that is there could.
            AckTimeout: receiver: not within the timeout.
            ValueError, TypeError: an unknown worker, or a version that was not published.
            ClosedError, Fenced: this side has ended.
        """
        bus, models = self._open_bus_and_models()
        await bus.await_version(version, worker_ids, timeout, models, quorum)

    async def wait_lag(self: ModelsOnBus, max_lag: int, timeout: float = DEFAULT_TIMEOUT) -> int:
        """Receiver: wait until this worker is not too far behind with its model; on a bus, with any of its models.

        The sender is asked what this worker should have by now, so nothing older can pass for new. When this returns,
        what it has applied is at most ``max_lag`` versions behind what the sender has answered.

        Args:
            max_lag: versions; 0: the newest. As ``lag`` in :meth:`status`, and as a collector's ``max_lag``.
            timeout: seconds.

        Returns:
            The version that it has; of several models, the oldest.

        Raises:
            AckTimeout: not within the timeout: the sender has not answered, or the update has not been applied.
            ValueError: ``max_lag`` is not a whole number from 0.
            SchemaMismatch, RemoteError: the update could not be applied here.
            RuntimeError: this is a sender.
            NotConnected, ClosedError, Fenced: there is no sender to ask, or this side has ended.
        """
        bus, models = self._open_bus_and_models()
        return await bus.await_lag(models or list(bus.schemes), max_lag, timeout)

    async def shutdown(self: ModelsOnBus, timeout: float = 5.0) -> None:
        """Release everything; the other side learns of it. Idempotent.

        A receiver's model stays as it is from then on, and its calls no longer count as reading. A bus ends all its
        schemes. A scheme ends its bus if it is the last one there; else the bus goes on with the others, and another
        scheme may take this one's place.

        Args:
            timeout: seconds; what has not ended by then is cut off.
        """
        await self._shutdown(timeout)


class WeightSyncScheme(Scheme):
    """One model's weights, kept in step by coroutines on the caller's event loop."""

    bus_class: ClassVar[type[BusCore]] = Bus
    own_bus_class: ClassVar[type[BusCore]] = Bus
    is_blocking: ClassVar[bool] = False

    __enter__, __exit__, __aenter__, __aexit__ = _refuse, _refuse, _begin, _end
    wait_staged, commit, drop = Bus.wait_staged, Bus.commit, Bus.drop
    wait_version, wait_lag, shutdown = Bus.wait_version, Bus.wait_lag, Bus.shutdown
    _bus: Bus
    initialized_on_sender = initialized_on_receiver = RefusedAttribute()  # what TorchRL asks first

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
        """This scheme with the blocking API of :mod:`asyncsync.sync`; to be taken before connecting. The schemes of one
        bus share the bus afterwards, too.

        Raises:
            RuntimeError: this scheme is connected.
            TypeError: a class of your own, which has no twin in :mod:`asyncsync.sync`.
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
        """The rendezvous; either side may call first.

        A sender returns when its ``num_workers`` (or ``min_workers``) workers have applied the initial weights, or are
        ready if there are none yet; a receiver when it has applied them. Calling it again is harmless.

        Args:
            worker_idx: receiver: which worker this is, if init did not say.
            weights: sender: the initial weights; None: the registered source, if any.
            timeout: seconds.
            processes: sender: the workers' processes (of multiprocessing, subprocess or asyncio); if one ends before
                all are connected, this raises at once.

        Raises:
            NotConnected: the other side did not connect in time; you may call it again.
            SchemaMismatch: receiver: the sender's weights do not fit the model; nothing was changed.
            PartialSendError: sender: a worker cannot take the weights; no worker was changed.
            ClosedError, Fenced: this side was shut down, or a newer process has replaced it.
            ValueError, TypeError: invalid arguments, or arguments of the other side's ``connect``.
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
        """Snapshot the weights and announce them; returns the version without waiting for any worker.

        The source must not change until this returns, and may change from then on. Latest wins: a worker that is
        behind skips versions.

        With asyncio, large weights (over 4 MiB) are fetched afterwards, while this
        event loop runs: a loop that trains without an await delivers them late. Train in a thread then
        (``asyncio.to_thread``), or await ``publish_async`` of :mod:`asyncsync.sync`'s schemes. Cancelled, this raises
        once nothing reads the source any more; the version is published or discarded whole.

        Args:
            weights: None (the registered source's current values), module, TensorDict, dict, or ``{worker_idx:
                weights}``.
            worker_ids: the workers that get it; None: all, later ones too.
            metadata: a small mapping that belongs to the version, and arrives with it: see :attr:`metadata` and
                :meth:`hold`. Of strings as keys and what msgpack can carry; encoded, at most 64 KiB.

        Raises:
            ValueError, TypeError: invalid weights, workers or metadata; nothing was published.
            AckTimeout: for 60 s there was no room for them (workers that are behind still read all ``slots`` of shared
                memory), or the ``prepare_weights`` of a publication before has not returned; nothing was published.
            MemoryError: there is too little memory for the snapshot; nothing was published.
            NotConnected, ClosedError, Fenced: this sender cannot publish.
        """
        self._check_open()
        return await self._bus.announce({self.topic: weights}, worker_ids, metadata)

    async def stage(self, weights: Any = None, worker_ids: Workers = None, *, metadata: Metadata = None) -> int:
        """The first of two phases: snapshot the weights and bring them to the workers, which check them and keep them
        ready. Until :meth:`commit`, everybody acts with the version before, and so does who joins.

        There is one staged version at most: a later :meth:`stage` or :meth:`publish` drops it, and its number is not
        used again. Arguments and exceptions as of :meth:`publish`.

        Returns:
            The version.
        """
        self._check_open()
        return await self._bus.announce({self.topic: weights}, worker_ids, metadata, stages=True)

    async def verify(
        self, worker_ids: Workers = None, timeout: float = DEFAULT_TIMEOUT
    ) -> dict[int, list[str] | NotComparable]:
        """Sender: compare what the workers' models hold with what was sent, tensor by tensor, by digests.

        Each worker hashes its model in a thread, between two calls of it; updates wait for as long. Training and
        sending may go on: a worker that gets a newer version meanwhile is asked again. Extra state is not compared.

        Args:
            worker_ids: whom to ask; None: every worker that has this model, or should have it.
            timeout: seconds.

        Returns:
            For each worker, the dotted names of the tensors that differ from the newest version, none if all are equal;
            or :class:`NotComparable`, with the reason: its model casts or converts what comes, it has no model, it is
            lost, or it has not got the newest version or answered in time.

        Raises:
            AckTimeout: another call has not ended within the timeout.
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
        """:meth:`publish`, then :meth:`wait_version`: returns when all targeted workers have applied the weights; with
        ``quorum=n``, when n of them have. The others still get it, but no error reports them.

        Args:
            weights, worker_ids, metadata: as for :meth:`publish`.
            timeout: seconds.
            quorum: how many of the targeted workers are enough; None: all.

        Returns:
            The version; the blocking ``send`` returns None.

        Raises:
            NotConnected: no worker has this model (elastic: fewer than ``min_workers``, or the ``quorum``); nothing was
                published.
            PartialSendError: names the workers that have not applied it, and why; with a ``quorum``, too few have. Not
                final: these workers still get it.
            ValueError, TypeError, MemoryError, ClosedError, Fenced: as :meth:`publish`.
        """
        self._check_open()
        return await self._bus.announce_and_wait({self.topic: weights}, worker_ids, timeout, metadata, quorum)

    def send(self, weights: Any = None, worker_ids: Workers = None) -> None:
        """Not here: this is the asyncio API.

        Raises:
            TypeError: always; names the two alternatives.
        """
        raise TypeError(
            "this is the asyncio scheme: use `await scheme.send_async(...)`, or the blocking classes in asyncsync.sync"
        )

    async def receive(self, timeout: float | None = None) -> TensorDict | None:
        """The newest applied update that was not returned yet, as a TensorDict that the caller owns.

        Updates are applied to the registered model as they come; this tells of them.

        Args:
            timeout: seconds; 0 polls; None waits without a deadline.

        Returns:
            The weights, or None when the timeout expires.

        Raises:
            ClosedError: the sender has said goodbye, or this side was shut down. An unreturned update comes first.
            Fenced: a newer process has become this worker.
        """
        self._check_not_holding(timeout)
        return await self._receive(timeout, self.current_call())

    def take(self, version: int | None = None, *, epoch: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> Taking:
        """Take a version under a lease, in a receiver with ``apply="on_take"``, to apply it in your own way, time and
        thread (to an inference engine, say). Usage::

            async with scheme.take(version) as taken:       # blocking schemes: with scheme.take(version) as taken
                engine.load_weights(taken.items())          # (dotted name, tensor), in the order of the layout

        Nothing is copied where the weights lie in shared memory; what you write there stays in this process. When the
        block ends, the sender learns that the version is applied; an exception tells it that it is not, with its
        traceback, and the version can be taken again. Nothing newer replaces it meanwhile. ``taken.previous`` is the
        version before, to go back to. If the sender is lost inside the block, nothing is raised: the lease holds.

        Args:
            version: exactly this one; it may be applied already. None: the newest that is here and not applied.
            epoch: of which sender (:attr:`epoch`); None: whichever there is.
            timeout: seconds to wait for it.

        Raises:
            AckTimeout: it is not here in time.
            Superseded: a newer version, or sender, has replaced it; the error's ``version`` is what there is.
            PeerLost: when the block ends: another sender's epoch has begun meanwhile.
            RuntimeError: another version is taken; or this receiver was not initialised with ``apply="on_take"``.
            SchemaMismatch, MemoryError: it cannot be got ready here.
            ClosedError, Fenced: this side has ended.
        """
        return Taking(self, version, epoch, timeout)

    async def fetch(self, timeout: float = 30.0) -> TensorDict:
        """Pull: ask the sender for the current version, apply and return it, even if this worker has it already.

        Raises:
            AckTimeout: not within the timeout (seconds).
            SchemaMismatch: the sender's weights do not fit the model, which is unchanged.
            NotConnected, ClosedError, Fenced: there is no sender to ask, or this side has ended.
            Exception: what a strategy or an ``apply_weights`` of your own raised with this version.
        """
        check_timeout(timeout)
        self._check_open()
        self._check_returns_weights()
        link = self._bus.worker_link()
        mark = await link.wait_current(self.topic, timeout)
        return await self._return_copy(link, mark, self.last_returned)
