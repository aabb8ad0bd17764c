"""torch.distributed: workers find their sender by a store, and get their weights through gloo."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Unpack
from urllib.parse import urlsplit

from torch import distributed

from asyncsync.arguments import checked, declared
from asyncsync.errors import NotConnected
from asyncsync.net.endpoint import INTRODUCED, address_towards, own_address
from asyncsync.net.rendezvous import THREAD
from asyncsync.runtime.threads import elsewhere
from asyncsync.schemes import aio
from asyncsync.schemes.options import DistributedOptions, Strategy
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.torch_distributed import (
    Address,
    BlockingDistributedTransport,
    DistributedTransport,
    OwnStore,
    PairTransport,
    StorePlace,
    client_of,
    connect,
    innermost,
)
from asyncsync.transports.torch_private import default_store

LOOPBACK = "127.0.0.1"
BACKENDS = ("gloo", "mpi", "nccl", "ucc")
# TorchRL's collector has its own stores on its port and the next one.
STORE_PORT_OFFSET = 2


class DistributedCore(Scheme):
    """What ``DistributedWeightSyncScheme`` has in both APIs. ``_store_info``: where its own store is; None: it has
    none, or not yet."""

    _repoints_parameters = True
    _is_introduced = True
    _place: StorePlace | None

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[DistributedOptions]) -> None:
        check_backend(options["backend"])
        self._store_info = _as_address(options["store_info"])
        self._configure(strategy, options)
        self.backend = options["backend"]

    def get_store_info(self) -> dict[str, Any] | None:
        """Where the scheme's own store is: ``{"host": …, "port": …}``; for ``store_info=`` of schemes that are
        constructed elsewhere. None: before ``init_on_sender``, and in a process group, whose store is used."""
        return None if self._store_info is None else dict(zip(("host", "port"), self._store_info, strict=True))

    def create_transport(self, **kwargs: Any) -> PairTransport:
        """The transport of this scheme's API."""
        kind = BlockingDistributedTransport if self.is_blocking else DistributedTransport
        sizes = self._options["map_above"], self._options["pair_above"]
        return kind(self._serving_host(), *sizes, backend=self.backend)

    def _serving_host(self) -> str:
        """The address of this host at which a sender serves its workers."""
        endpoint = self._bus.endpoint
        if endpoint != INTRODUCED:
            host = urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else LOOPBACK
            return own_address() if host in ("0.0.0.0", "::", None) else host
        if self._store_info is not None:
            return self._store_info[0]
        host = getattr(innermost(default_store()), "host", None)
        return own_address() if host is None else address_towards(host)

    # -- where they meet -----------------------------------------------------------------------------------------------

    def _uses_group_store(self, address: str) -> bool:
        """Whether they meet in the store of the process group, if there is one: they have no address, and no store."""
        return address == INTRODUCED and self._store_info is None

    def _meeting_place(self, own: OwnStore | None = None) -> StorePlace:
        name = self.topic if self._store_info is None else ""  # in a store of its own there is no other scheme
        return StorePlace(name, partial(_store_client, self._store_info, self._options["timeout"]), own)

    @checked(Scheme.init_on_sender)
    def init_on_sender(self, *, context: Any = None, num_workers: int | None = None, **options: Any) -> None:
        place = None  # in a process group, one is made when it connects
        if self._uses_group_store(self._bus.endpoint) and default_store() is not None:
            if not options.get("model_id"):
                raise ValueError("in a process group, workers find this sender by its model_id=: pass one")
            elastic = options.get("min_workers") is not None or self._bus.min_workers != 1
            counted = options.keys() & {"devices", "params_map"} or getattr(context, "num_workers", None)
            if num_workers is None and self._bus.num_workers is None and not counted and not elastic:
                num_workers = distributed.get_world_size() - 1
                if not num_workers:
                    raise ValueError(
                        "this process group has one process, and no workers: pass min_workers=0 if others come later"
                    )
        elif self._bus.endpoint == INTRODUCED and (place := self._place) is None:
            own = self._own_store(context)
            self._store_info = own.address
            place = self._meeting_place(own)
        try:
            super().init_on_sender(context=context, num_workers=num_workers, **options)
        except BaseException:
            if place is not None and place.own is not None and self._place is None:
                place.own.close()
            raise
        self._place = place

    def _own_store(self, context: Any) -> OwnStore:
        if self._store_info is not None:
            return OwnStore(*self._store_info)
        port = getattr(context, "tcp_port", None)
        if port is not None:
            with suppress(NotConnected):  # another program's
                return OwnStore(own_address(), int(port) + STORE_PORT_OFFSET)
        return OwnStore(own_address())

    def init_like(self, original: Scheme) -> None:
        super().init_like(original)
        if self._place is not None:
            self._place = self._meeting_place(self._place.own)

    @checked(Scheme.init_on_receiver)
    def init_on_receiver(
        self, model_id: str, context: Any = None, *, worker_idx: int | None = None, **options: Any
    ) -> None:
        is_told = worker_idx is not None or getattr(context, "worker_idx", None) is not None
        is_in_group = self._uses_group_store(self._bus.connect_endpoint) and default_store() is not None
        if not is_told and is_in_group and distributed.get_rank():
            worker_idx = distributed.get_rank() - 1
        super().init_on_receiver(model_id, context, worker_idx=worker_idx, **options)

    def check_can_init(self, role: str) -> None:
        super().check_can_init(role)
        if role == "receiver" and self._uses_group_store(self._bus.connect_endpoint) and default_store() is None:
            raise RuntimeError(
                "where is the sender? Pass this scheme on after init_on_sender(), or construct it with store_info= "
                "(that of the sender's get_store_info()), or call torch.distributed.init_process_group() on both sides "
                "before"
            )

    async def _address_for_workers(self) -> str:
        return await elsewhere(THREAD, self._serving_host)


def _store_client(store_info: Address | None, timeout: float) -> Any:
    if store_info is not None:
        return connect(store_info, timeout)
    if (store := default_store()) is None:
        raise NotConnected(
            "this process has left the process group in whose store workers find their sender: call "
            "destroy_process_group() after shutdown()"
        )
    return client_of(store)


def check_backend(backend: str) -> None:
    """Raise ValueError for a backend that torch.distributed has not, or not here."""
    has = [name for name in BACKENDS if distributed.is_available() and getattr(distributed, f"is_{name}_available")()]
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend not in has or "gloo" not in has:
        raise ValueError(f"this torch has no {'gloo' if backend in has else backend}, it was built with {has}")


def _as_address(store_info: Mapping[str, Any] | tuple[str, int] | None) -> Address | None:
    if store_info is None:
        return None
    try:
        host: Any = store_info["host"] if isinstance(store_info, Mapping) else store_info[0]
        port: Any = store_info["port"] if isinstance(store_info, Mapping) else store_info[1]
        if isinstance(host, str) and host and 0 <= int(port) < 65536:
            return host, int(port)
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    raise ValueError(f"store_info must be {{'host': …, 'port': …}}, as get_store_info() returns it, not {store_info!r}")


class DistributedWeightSyncScheme(DistributedCore, aio.WeightSyncScheme):
    """Weights through torch.distributed: gloo, between processes of any hosts. Usage, in a process group::

        torch.distributed.init_process_group("gloo")           # as torchrun has it
        scheme = DistributedWeightSyncScheme()                  # in each process
        if torch.distributed.get_rank() == 0:
            scheme.init_on_sender(model_id="policy", model=policy)   # the others are its workers
            await scheme.connect()
            version = await scheme.send_async()
        else:
            scheme.init_on_receiver("policy", model=policy)     # worker_idx is the rank, less one
            await scheme.connect()

    The other processes of the group are the workers, unless ``num_workers=`` says how many, or ``min_workers=`` that
    they come and go; each ``model_id`` has one sender. Without a process group the scheme has a store of its own from
    ``init_on_sender`` on; it is passed on to the workers after that, or they construct theirs with ``store_info=``.
    Neither the default process group nor its order of operations is touched: each worker has a connection of its own,
    so one that is slow, killed or restarted concerns no other. What travels over the bus is encrypted, with keys that
    workers get in the store; what gloo carries is not, and whoever can use the store can take a worker's place: as with
    torch.distributed itself, use it on a network that you trust.
    """
