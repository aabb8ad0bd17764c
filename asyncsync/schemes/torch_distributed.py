"""The torch.distributed scheme: workers find their sender through a store, and get their weights through gloo."""

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
from asyncsync.net.rendezvous import MEETING_THREAD
from asyncsync.runtime.threads import run_in_thread
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
    connect,
    innermost_store,
    with_queues,
)
from asyncsync.transports.torch_private import default_store

BACKENDS = ("gloo", "mpi", "nccl", "ucc")
# Added to the context's ``tcp_port``, because TorchRL's collector has stores on that port and the next one.
STORE_PORT_OFFSET = 2


class DistributedCore(Scheme):
    _repoints_parameters = True
    _is_introduced = True
    _place: StorePlace | None

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[DistributedOptions]) -> None:
        check_backend(options["backend"])
        self._store_info = _parse_address(options["store_info"])  # of its own store; None: it has none, or none yet
        self._configure(strategy, options)
        self.backend = options["backend"]

    def get_store_info(self) -> dict[str, Any] | None:
        """The address of the scheme's own store: ``{"host": …, "port": …}``; pass it as ``store_info=`` to schemes that
        you construct elsewhere. None before ``init_on_sender``, and in a process group, because the scheme uses the
        group's store then."""
        return None if self._store_info is None else dict(zip(("host", "port"), self._store_info, strict=True))

    def create_transport(self, **kwargs: Any) -> PairTransport:
        """The transport of this scheme's API."""
        kind = BlockingDistributedTransport if self.is_blocking else DistributedTransport
        sizes = self._options["map_above"], self._options["pair_above"]
        return kind(self._serving_host(), *sizes, backend=self.backend)

    def _serving_host(self) -> str:
        """The address at which a sender on this host serves its workers."""
        endpoint = self._bus.endpoint
        if endpoint != INTRODUCED:
            host = urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else "127.0.0.1"
            return own_address() if host in ("0.0.0.0", "::", None) else host
        if self._store_info is not None:
            return self._store_info[0]
        host = getattr(innermost_store(default_store()), "host", None)
        return own_address() if host is None else address_towards(host)

    # -- the store as a meeting place ----------------------------------------------------------------------------------

    def _uses_group_store(self, address: str) -> bool:
        """Whether workers find the sender in the store of the process group, if there is one, because they were given
        neither its ``address`` nor a store of the scheme's own."""
        return address == INTRODUCED and self._store_info is None

    def _meeting_place(self, own: OwnStore | None = None) -> StorePlace:
        name = self.topic if self._store_info is None else ""  # no other scheme uses the scheme's own store
        return StorePlace(name, partial(_store_client, self._store_info, self._options["timeout"]), own)

    @checked(Scheme.init_on_sender)
    def init_on_sender(self, *, context: Any = None, num_workers: int | None = None, **options: Any) -> None:
        place = None  # in a process group, connect() makes it
        if self._uses_group_store(self._bus.endpoint) and default_store() is not None:
            if not options.get("model_id"):
                raise ValueError("in a process group, workers find this sender by its model_id=: pass one")
            elastic = options.get("min_workers") is not None or self._bus.min_workers != 1
            counted = options.keys() & {"devices", "params_map"} or getattr(context, "num_workers", None)
            if num_workers is None and self._bus.num_workers is None and not counted and not elastic:
                num_workers = distributed.get_world_size() - 1
                if not num_workers:
                    raise ValueError(
                        "this process group has one process, and no workers: pass min_workers=0 if workers come later"
                    )
        elif self._bus.endpoint == INTRODUCED and (place := self._place) is None:
            own = self._make_own_store(context)
            self._store_info = own.address
            place = self._meeting_place(own)
        try:
            super().init_on_sender(context=context, num_workers=num_workers, **options)
        except BaseException:
            if place is not None and place.own is not None and self._place is None:
                place.own.close()
            raise
        self._place = place

    def _make_own_store(self, context: Any) -> OwnStore:
        if self._store_info is not None:
            return OwnStore(*self._store_info)
        port = getattr(context, "tcp_port", None)
        if port is not None:
            with suppress(NotConnected):  # another program has this port: take a free one
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
        has_index = worker_idx is not None or getattr(context, "worker_idx", None) is not None
        is_in_group = self._uses_group_store(self._bus.connect_endpoint) and default_store() is not None
        if not has_index and is_in_group and distributed.get_rank():
            worker_idx = distributed.get_rank() - 1
        super().init_on_receiver(model_id, context, worker_idx=worker_idx, **options)

    def check_can_init(self, role: str) -> None:
        super().check_can_init(role)
        if role == "receiver" and self._uses_group_store(self._bus.connect_endpoint) and default_store() is None:
            raise RuntimeError(
                "this receiver cannot find its sender: pass the scheme to the worker after init_on_sender(), or "
                "construct it with store_info= (from the sender's get_store_info()), or first call "
                "torch.distributed.init_process_group() on both sides"
            )

    async def _address_for_workers(self) -> str:
        return await run_in_thread(MEETING_THREAD, self._serving_host)


def _store_client(store_info: Address | None, timeout: float) -> Any:
    if store_info is not None:
        return connect(store_info, timeout)
    if (store := default_store()) is None:
        raise NotConnected(
            "this process has left the process group, in whose store workers find their sender: call "
            "destroy_process_group() after shutdown()"
        )
    return with_queues(store).clone()


def check_backend(backend: str) -> None:
    """Raise ValueError for a backend that torch.distributed does not know, or that this torch was built without."""
    has = [name for name in BACKENDS if distributed.is_available() and getattr(distributed, f"is_{name}_available")()]
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend not in has or "gloo" not in has:
        raise ValueError(f"this torch has no {'gloo' if backend in has else backend}, it was built with {has}")


def _parse_address(store_info: Mapping[str, Any] | tuple[str, int] | None) -> Address | None:
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
    """Weights through torch.distributed (gloo), between processes of one or several hosts. Usage, in a process group::

        torch.distributed.init_process_group("gloo")           # as torchrun has it
        scheme = DistributedWeightSyncScheme()                  # in each process
        if torch.distributed.get_rank() == 0:
            scheme.init_on_sender(model_id="policy", model=policy)   # the others are its workers
            await scheme.connect()
            version = await scheme.send_async()
        else:
            scheme.init_on_receiver("policy", model=policy)     # worker_idx is the rank minus 1
            await scheme.connect()

    All other processes of the group are workers, unless you pass ``num_workers=`` (how many there are) or
    ``min_workers=`` (they come and go). Each ``model_id`` has one sender. Without a process group, the scheme opens its
    own store in ``init_on_sender``: pass it to the workers after that, or let them construct theirs with
    ``store_info=``. The scheme runs no operation of the default process group. Each worker has its own connection, so a
    slow, killed or restarted worker does not affect the others.

    Messages on the bus are encrypted, with keys that the workers get from the store. What gloo carries is not
    encrypted, and anyone who can use the store can take a worker's place. So, as with torch.distributed itself, use
    this on a network that you trust.
    """
