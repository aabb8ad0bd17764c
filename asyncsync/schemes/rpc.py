"""RPC: weights for objects in other processes of ``torch.distributed.rpc``. Each applies an update in a call of its
``_receive_weights_scheme()``, as TorchRL documents it; the bytes go through gloo.

The first call of a worker introduces it to its sender, and connects it: ``connect`` waits on neither side.
"""

from __future__ import annotations

import asyncio
import inspect
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar, Unpack

from tensordict import TensorDict

from asyncsync.arguments import declared
from asyncsync.bus.carrier import Source
from asyncsync.errors import NotConnected, PeerLost
from asyncsync.net.endpoint import INTRODUCED, own_address
from asyncsync.runtime.threads import elsewhere, settle
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.options import RPCOptions, Strategy
from asyncsync.schemes.registry import register
from asyncsync.schemes.remote_calls import METHOD, Call, RemoteCallCore, failure_of
from asyncsync.schemes.torch_distributed import check_backend
from asyncsync.transports.torch_distributed import BlockingRPCTransport, PairTransport, RPCTransport

# Longer than anything that the worker does there: its own limit has a better message.
RPC_SECONDS = 180.0

_current: ContextVar[Call | None] = ContextVar("asyncsync_call", default=None)


class RPCCore(RemoteCallCore):
    """What the scheme is, in both APIs."""

    _adopts = True
    _remotes_name = "collector_rrefs"
    _transport_class: ClassVar[type[PairTransport]]

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[RPCOptions]) -> None:
        check_backend(options["backend"])
        self._configure(strategy, options)
        self.backend = options["backend"]

    def _reset(self) -> None:
        super()._reset()
        self._is_called = False

    def create_transport(self, **kwargs: Any) -> PairTransport:
        """The transport of this scheme's API."""
        return self._transport_class(own_address(), self._options["map_above"], backend=self.backend)

    # -- connect does not wait ----------------------------------------------------------------------------------------

    async def initial_source(self, weights: Any) -> Source | None:
        return None if weights is None else await super().initial_source(weights)

    async def connect_sender(self, initial: Source | None, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        await self._open(timeout)
        link = self._bus.open_sender()
        publisher = link.caught_up()
        publisher.serve(self.topic, loop.time())
        publisher.assemble(self.topic)  # workers that were not called yet are not waited for
        link.settle()
        if initial is not None:
            deadline = loop.time() + timeout
            await link.publishing.publish({self.topic: initial}, {self.topic: self.carrier()}, None, deadline=deadline)
        self.is_registered = True

    def register_receiver(self, worker_idx: int | None = None) -> None:
        if self._is_called:
            super().register_receiver(worker_idx)

    async def connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        if worker_idx is not None:
            self._check_worker(worker_idx)
            self._worker_idx = worker_idx

    async def _connect_called(self, worker: int, timeout: float) -> None:
        self._is_called = True
        await super().connect_receiver(worker, timeout)

    async def _receive(self, timeout: float | None, call: Call | None = None) -> TensorDict | None:
        if call is None and self.role == "receiver" and not self.is_registered:
            self._check_open()
            raise NotConnected("this worker has not been called by its sender yet, which introduces it")
        return await super()._receive(timeout, call)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _call(self, call: Call) -> None:
        if self._bus.endpoint == INTRODUCED:
            call = replace(call, introduction=self._bus.sender_link().introductions(call.worker).encode())
        rref = self._remotes[call.worker]
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Exception | None] = loop.create_future()

        def ended(future: Any) -> None:  # in whatever thread
            try:
                settle(done, future.value())
            except Exception as error:
                settle(done, error=error)

        def begin() -> None:
            call_there = import_module("torch.distributed.rpc").rpc_async
            there, arguments = BlockingRPC._receive_there, (rref, call.encode())
            call_there(rref.owner(), there, arguments, timeout=RPC_SECONDS).add_done_callback(ended)

        try:
            await elsewhere("asyncsync-call", begin)  # it may connect, which blocks
            failure = await done
        except RuntimeError as error:
            raise PeerLost(f"worker {call.worker} is lost: it cannot be called by RPC: {error}") from error
        if failure is not None:
            raise failure

    def current_call(self) -> Call | None:
        return _current.get()

    # Not a function of this module: several calls may come at once, before anything of asyncsync was imported. Threads
    # that import different modules of a package wait for each other; threads that all import asyncsync.sync do not.
    @classmethod
    def _receive_there(cls, rref: Any, encoded: bytes) -> Exception | None:
        """In the worker: have the object receive. Returns what it raised."""
        token = _current.set(Call.decode(encoded))
        try:
            outcome = getattr(rref.local_value(), METHOD)()
            if inspect.isawaitable(outcome):
                if inspect.iscoroutine(outcome):
                    outcome.close()
                raise TypeError(f"{METHOD} must be an ordinary method: RPC calls it on a thread that has no event loop")
        except Exception as error:
            return failure_of(error)
        finally:
            _current.reset(token)
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

    _transport_class = RPCTransport


class BlockingRPC(RPCCore, blocking.WeightSyncScheme):
    """Weights for objects of RPC's, with the blocking API; see :class:`asyncsync.RPCWeightSyncScheme`."""

    _transport_class = BlockingRPCTransport


register("rpc", RPCWeightSyncScheme, BlockingRPC)
