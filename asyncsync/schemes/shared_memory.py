"""Shared memory and multiprocessing: the schemes for workers on the trainer's host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from asyncsync.arguments import check_bytes, check_slots, check_sync
from asyncsync.bus.core import BusCore
from asyncsync.model.strategy import WeightStrategy
from asyncsync.monitor.options import Tracing
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.core import SchemeCore
from asyncsync.schemes.registry import register
from asyncsync.transports.shared_memory import (
    SLOTS,
    BlockingMPTransport,
    BlockingSharedMemTransport,
    MPTransport,
    SharedMemTransport,
    SlotTransport,
)
from asyncsync.transports.slots import COPY_BYTES


class SlotCore(SchemeCore):
    """What both schemes have in common, in both APIs."""

    _transport_class: ClassVar[type[SlotTransport]]

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        *,
        endpoint: str | None = None,
        connect: str | None = None,
        bus: BusCore | None = None,
        num_workers: int | None = None,
        min_workers: int = 1,
        allow_plaintext: bool = False,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        strict: bool = False,
        metrics_port: int | str | None = None,
        tracing: Tracing = None,
        slots: int = SLOTS,
        map_above: int = COPY_BYTES,
        sync: bool = True,
        per_worker_weights: bool = False,
    ) -> None:
        check_sync(sync, is_blocking=self._is_blocking)
        check_slots(slots)
        check_bytes("map_above", map_above)
        super().__init__(
            strategy,
            endpoint=endpoint,
            connect=connect,
            bus=bus,
            num_workers=num_workers,
            min_workers=min_workers,
            allow_plaintext=allow_plaintext,
            include=include,
            exclude=exclude,
            strict=strict,
            metrics_port=metrics_port,
            tracing=tracing,
        )
        self._slots = slots
        self._map_above = map_above
        self._sync = sync

    def create_transport(self, **kwargs: Any) -> SlotTransport:
        """The transport of this scheme's API."""
        return self._transport_class(self._slots, self._map_above)


class SharedMemWeightSyncScheme(SlotCore, aio.WeightSyncScheme):
    """Weights through shared memory: one copy per update, however many workers on this host. Usage::

        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
        ...                                        # start workers, pass them the scheme
        await scheme.connect()
        version = await scheme.send_async()        # the policy's current weights, applied by both workers

    and in a worker, of the same user, host and pid namespace::

        scheme.init_on_receiver("policy", model=policy, worker_idx=index)
        await scheme.connect()                     # policy(...) is never torn from here on

    The Parameters of a module get their memory in the shared one where there are more than 4 MiB of weights; what a
    worker writes into them stays its own, until the next update. ``init_on_receiver(…, inplace=True)`` copies into the
    memory that they have: for a worker that trains its own copy, and where something else refers to that memory (CUDA
    graphs, a flat view of all parameters).

    Args:
        slots: how many versions may be in use at once: the newest, one that is being written, and those that workers
            which are behind still read. With all of them in use, publishing waits.
        map_above: workers read weights of more bytes where they are, and copy smaller ones out at once.
        options: all others are those of :class:`asyncsync.WeightSyncScheme`.
    """

    _adopts = True
    _transport_class = SharedMemTransport


class BlockingSharedMem(SlotCore, blocking.WeightSyncScheme):
    """Weights through shared memory, with the blocking API; see :class:`asyncsync.SharedMemWeightSyncScheme`.

    Args:
        sync: False: ``send`` is ``publish``, and waits for no worker.
        per_worker_weights: as TorchRL takes it; with or without it, workers may be sent weights of their own.
        options: all others are those of :class:`asyncsync.SharedMemWeightSyncScheme`.
    """

    _adopts = True
    _transport_class = BlockingSharedMemTransport

    def receive(self, timeout: float | None = None) -> None:
        """Apply what has come, with ``apply="on_receive"``, and return None at once, as TorchRL documents it: updates
        reach the model by themselves. :meth:`fetch` and :attr:`weights` return weights.

        Args:
            timeout: any; there is no waiting.

        Raises:
            ClosedError: the sender has said goodbye, or this side was shut down.
            Fenced: a newer incarnation of this worker has taken over.
        """
        self._bus._run(lambda: self._take_in(timeout))


class MultiProcessWeightSyncScheme(SlotCore, aio.WeightSyncScheme):
    """Weights for workers on this host, each with a copy of its own. Usage and arguments as
    :class:`SharedMemWeightSyncScheme`."""

    _transport_class = MPTransport


class BlockingMultiProcess(SlotCore, blocking.WeightSyncScheme):
    """Weights for workers on this host, each with a copy of its own, with the blocking API; see
    :class:`asyncsync.MultiProcessWeightSyncScheme`.

    Args:
        sync: False: ``send`` is ``publish``, and waits for no worker.
        per_worker_weights: as TorchRL takes it; with or without it, workers may be sent weights of their own.
        options: all others are those of :class:`asyncsync.MultiProcessWeightSyncScheme`.
    """

    _transport_class = BlockingMPTransport


register("shared", SharedMemWeightSyncScheme, BlockingSharedMem, "thread")
register("process", MultiProcessWeightSyncScheme, BlockingMultiProcess, "multiprocessing")
