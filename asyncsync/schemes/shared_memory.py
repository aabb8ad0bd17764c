"""Shared memory and multiprocessing: the schemes for workers on the trainer's host."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from asyncsync.arguments import declared
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.options import SharedMemOptions, Strategy
from asyncsync.schemes.registry import register
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.shared_memory import (
    BlockingMPTransport,
    BlockingSharedMemTransport,
    MPTransport,
    SharedMemTransport,
    SlotTransport,
)


class SlotCore(Scheme):
    """What both schemes have in common, in both APIs."""

    _transport_class: ClassVar[type[SlotTransport]]

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[SharedMemOptions]) -> None:
        self._configure(strategy, options)

    def create_transport(self, **kwargs: Any) -> SlotTransport:
        """The transport of this scheme's API."""
        return self._transport_class(self._options["slots"], self._options["map_above"])


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
    """

    _adopts = True
    _transport_class = SharedMemTransport


class BlockingSharedMem(SlotCore, blocking.WeightSyncScheme):
    """Weights through shared memory, with the blocking API; see :class:`asyncsync.SharedMemWeightSyncScheme`."""

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
        self.run_on_loop(lambda: self.take_in(timeout))


class MultiProcessWeightSyncScheme(SlotCore, aio.WeightSyncScheme):
    """Weights for workers on this host, each with a copy of its own. Usage and arguments as
    :class:`SharedMemWeightSyncScheme`."""

    _transport_class = MPTransport


class BlockingMultiProcess(SlotCore, blocking.WeightSyncScheme):
    """Weights for workers on this host, each with a copy of its own, with the blocking API; see
    :class:`asyncsync.MultiProcessWeightSyncScheme`."""

    _transport_class = BlockingMPTransport


register("shared", SharedMemWeightSyncScheme, BlockingSharedMem, "thread")
register("process", MultiProcessWeightSyncScheme, BlockingMultiProcess, "multiprocessing")
