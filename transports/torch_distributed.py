"""torch.distributed: gloo carries the bytes, over a *pair* for each worker, which is a process group of two.

The bus's UPDATE tells a worker where to get the bytes, and a thread of the worker fetches them. Small slabs travel in
the UPDATE. Large ones are received into memory that a module's Parameters can then have, as with ZeroMQ. Everything
about pairs blocks, and runs in threads of its own.

The sender has a TCPStore (:class:`PairServer`). A worker that needs a pair (:class:`PairClient`) draws a random name
and puts a ticket with it into the store. Both make a process group of that name. The worker then requests one transfer
after the other. A thread of the sender answers, and the worker's receipt ends the transfer. A request contains the
transfer's random name, which a worker learns only through the bus. So a stranger that finds the store and makes a pair
gets no weights.

A store's queue has any number of writers and one reader, and loses nothing when one of them is killed. So a store can
also be a meeting place (:class:`StorePlace`). A store's client is locked while it waits, so each thread has its own.

docs/decisions/20-process-groups.md says why a group has two members, and why torch's default group is not used.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed

from asyncsync.errors import NotConnected
from asyncsync.net.endpoint import address_towards
from asyncsync.net.rendezvous import MEETING_THREAD, MeetingPlace
from asyncsync.runtime.threads import WorkThread, run_in_stoppable_thread, run_in_thread
from asyncsync.transports.base import BlockingTransportBackend, TransportBackend, named_in_sync
from asyncsync.transports.shared_memory import MAP_ABOVE, ChunkTransport
from asyncsync.transports.torch_private import gloo_pair
from asyncsync.weights.slab import Slab
from asyncsync.weights.tensors import normal_tensors

PAIR_BYTES = 64 << 10
TRANSFER_BYTES = 16  # the length of a transfer's name
FOREVER = timedelta(days=365)
RENDEZVOUS_SECONDS = 20.0  # how long one end of a pair waits for the other
CLOSE_SECONDS = 2.0
SEND_SECONDS = 60.0  # a worker must receive an update's bytes in this time; a stopped worker keeps them in use so long
TICKETS, STOP = "tickets", b"enough"

ANSWER_SECONDS = 20.0
QUESTIONS = "questions"
ASK_AGAIN_SECONDS = 5.0
FIRST_PAUSE = 0.002
MAX_ANSWER_PAUSE, MAX_QUESTION_PAUSE = 0.05, 0.25

_MAGIC = b"PAIR\x01"
_HEAD = struct.Struct("<5s16sH")
_SENDER, _WORKER = 0, 1  # ranks
_DATA, _CLOSING = 0, 1  # tags
_UNKNOWN = -1
_c10d: Any = distributed  # its annotations lack the stores

Address = tuple[str, int]
"""Host and port of a store."""

# Stores and pairs. This set keeps them alive in a forked child: destroying one there would wait for threads that the
# child does not have.
_kept_in_children: set[Any] = set()


# -- stores ------------------------------------------------------------------------------------------------------------


class OwnStore:
    """A TCPStore of this process, on one address of this host. A store that torch opens listens on all addresses.

    Creating the object reserves the port (0: any free port). It listens there only after :meth:`open`. Raises
    NotConnected if this host has no such address, or the port is in use. ``server``: torch's store; None: it does not
    listen.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self.server: Any = None
        self._bind(host, port)

    def _bind(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise NotConnected(
                f"cannot open a store at {host}:{port}: {error}; is it an address of this host, with a free port?"
            ) from error
        self.address: Address = host, self._socket.getsockname()[1]
        self._finalizer: weakref.finalize[Any, OwnStore] = weakref.finalize(self, self._socket.close)
        self._finalizer.atexit = False

    def open(self) -> bool:
        """Listen. After :meth:`close`, this works again if the port is free. False: it is listening already."""
        if self.server is not None:
            return False
        if self._socket.fileno() < 0:
            self._bind(*self.address)
        self._socket.listen()
        host, port = self.address
        self.server = _c10d.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach()
        )
        _kept_in_children.add(self.server)
        self._finalizer = weakref.finalize(self, _release, self.server, os.getpid())
        self._finalizer.atexit = False
        return True

    def close(self) -> None:
        """Stop listening, and free the port. Idempotent."""
        self._finalizer.detach()
        self._socket.close()
        server, self.server = self.server, None
        _kept_in_children.discard(server)


def _release(store: Any, pid: int) -> None:
    if os.getpid() == pid:
        _kept_in_children.discard(store)


def connect(address: Address, timeout: float = ANSWER_SECONDS) -> Any:
    """A client of the store at this address. Raises NotConnected if there is none, or this torch has no queues."""
    try:
        # Check first that a server listens. If not, torch would try again until the timeout, and print errors.
        socket.create_connection(address, timeout).close()
        host, port = address
        store = _c10d.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(1.0, timeout))
        )
    except (OSError, RuntimeError) as error:
        raise NotConnected(f"there is no store at {address[0]}:{address[1]}: {error}") from error
    return with_queues(store)


def with_queues(store: Any) -> Any:
    """The store itself. Raises NotConnected if it, or this torch, has no queues."""
    if not hasattr(store, "queue_push") or isinstance(innermost_store(store), _c10d.FileStore):
        raise NotConnected(
            f"a {type(innermost_store(store)).__name__} of torch {torch.__version__} has no queues: use torch 2.8 or "
            "newer, and a TCPStore, as with init_process_group(init_method='env://' or 'tcp://…')"
        )
    return store


def innermost_store(store: Any) -> Any:
    """The store inside all PrefixStores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


class StorePlace(MeetingPlace):
    """A meeting place in a store. ``client`` makes clients of the store; ``name`` prefixes all keys.

    The store is a process group's, or the sender opens it: then it is ``own``, which the sender shares with schemes
    that it was converted to.
    """

    def __init__(self, name: str, client: Callable[[], Any], own: OwnStore | None = None) -> None:
        super().__init__()
        self.own = own
        self._name = name
        self._client = client
        self._store: Any = None  # the sender's client
        self._has_opened_own = False

    def _prefixed_client(self) -> Any:
        return _c10d.PrefixStore(f"asyncsync/{self._name}", self._client())

    async def open(self) -> None:
        await run_in_thread(MEETING_THREAD, self._open)

    def _open(self) -> None:
        if self.own is not None:
            self._has_opened_own = self.own.open() or self._has_opened_own
        elif _places_in_groups.get(self._name, self).is_hosted:
            raise NotConnected(
                f"another scheme of this process is the sender of {self._name!r} in its process group: give each a "
                "model_id of its own, or shut the other one down before"
            )
        else:
            _places_in_groups[self._name] = self
        self._store = self._prefixed_client()

    def ask(self, worker: int, stop: threading.Event) -> bytes:
        store, key = self._prefixed_client(), secrets.token_hex(8)
        try:
            store.queue_push(QUESTIONS, f"{worker} {key}")
            _wait_for_key(key, store, stop, MAX_ANSWER_PAUSE, ASK_AGAIN_SECONDS)
            answer: bytes = store.get(key)
            store.delete_key(key)
        except RuntimeError as error:
            raise NotConnected(str(error)) from error
        return answer

    async def next_question(self) -> tuple[int, str]:
        return await run_in_stoppable_thread(MEETING_THREAD, self._asked)

    def _asked(self, stop: threading.Event) -> tuple[int, str]:
        while True:
            _wait_for_key(QUESTIONS, self._store, stop, MAX_QUESTION_PAUSE)
            with suppress(_c10d.QueueEmptyError):  # another sender has taken the question
                worker, key = self._store.queue_pop(QUESTIONS, block=False).decode().split()
                return int(worker), key

    async def answer(self, key: str, answer: bytes) -> None:
        await run_in_thread(MEETING_THREAD, partial(self._store.set, key, answer))

    async def end(self) -> None:
        if self.own is not None and (self._has_opened_own or self.own.server is None):
            self._has_opened_own = False
            await run_in_thread(MEETING_THREAD, self.own.close)


_places_in_groups: weakref.WeakValueDictionary[str, StorePlace] = weakref.WeakValueDictionary()
"""By name, the places in stores of process groups at which this process is the sender."""


def _wait_for_key(key: str, store: Any, stop: threading.Event, max_pause: float, seconds: float = math.inf) -> None:
    """Wait until the store has this key. Raises NotConnected if ``stop`` is set, or the time is over, first."""
    # Poll, because a wait in the store cannot be interrupted, and prints to stderr when it times out.
    pause, deadline = FIRST_PAUSE, time.monotonic() + seconds
    while not store.check([key]):
        if stop.wait(pause) or time.monotonic() > deadline:
            raise NotConnected("there is no answer yet")
        pause = min(2 * pause, max_pause)


# -- pairs -------------------------------------------------------------------------------------------------------------


class TransferPlace(NamedTuple):
    """Where workers fetch a slab's bytes: the content of a descriptor."""

    store: Address
    transfer: bytes

    def encode(self) -> bytes:
        host, port = self.store
        return _HEAD.pack(_MAGIC, self.transfer, port) + host.encode()

    @classmethod
    def decode(cls, descriptor: bytes) -> TransferPlace:
        """Raises ValueError if another kind of transport made the descriptor."""
        if not descriptor.startswith(_MAGIC) or len(descriptor) <= _HEAD.size:
            raise ValueError("another transport sent this update: use the same scheme class on both sides")
        _, transfer, port = _HEAD.unpack_from(descriptor)
        return cls((descriptor[_HEAD.size :].decode(), port), transfer)


class Pair:
    """One end of a pair. Creating it blocks until the other end exists. This and all methods raise RuntimeError if the
    other end is gone, or after :meth:`close`."""

    def __init__(self, store: Any, name: str, rank: int, address: str) -> None:
        # The rendezvous's timeout is also the default of wait(), so all waits below name theirs.
        self._group = gloo_pair(_c10d.PrefixStore(name, store), rank, address, RENDEZVOUS_SECONDS)
        self._other = 1 - rank
        self._sends: list[Any] = []  # under way
        _kept_in_children.add(self)

    def exchange(self, into: torch.Tensor, *data: torch.Tensor, timeout: timedelta = FOREVER) -> None:
        """Send ``data``, and wait until ``into`` is received.

        The other end must receive everything before it sends ``into``. Then all sends have completed, and there is no
        need to wait for them. A wait for a send may never end: gloo forgets a send during which the other end dies. It
        does not forget a receive that began before.
        """
        receiving = self._group.recv([into], self._other, _DATA)
        self._sends = [*self._sends, *(self._group.send([part], self._other, _DATA) for part in data)]
        try:
            receiving.wait(timeout)
        finally:
            self._sends = []

    def post(self, data: torch.Tensor) -> None:
        """Send, without waiting. The next :meth:`exchange` shows that the data has arrived."""
        self._sends.append(self._group.send([data], self._other, _DATA))

    def send(self, data: torch.Tensor) -> None:
        """Send, and wait, perhaps for ever: see :meth:`exchange`."""
        self._group.send([data], self._other, _DATA).wait(FOREVER)

    def receive(self, into: torch.Tensor) -> None:
        self._group.recv([into], self._other, _DATA).wait(FOREVER)

    def close(self) -> None:
        """Close the pair, and end all waits of other threads. Idempotent."""
        _kept_in_children.discard(self)
        # A wait that times out ends all others. abort() and shutdown() of a gloo group do not.
        with suppress(RuntimeError), normal_tensors():
            self._group.recv([torch.empty(1, device="cpu")], self._other, _CLOSING).wait(timedelta(milliseconds=1))


class PairServer:
    """The sender's side: a store on this address of this host, and a thread for each pair.

    ``offered`` has the bytes of transfers by name. Raises NotConnected if this host has no such address.
    """

    def __init__(self, host: str, offered: Mapping[bytes, memoryview]) -> None:
        self._store = OwnStore(host)
        self._store.open()
        self.address = self._store.address
        self._offered = offered
        self._lock = threading.Lock()
        self._closed = False
        self._pairs: dict[int, Pair] = {}
        self._threads: list[threading.Thread] = []
        tickets = connect(self.address)
        tickets.set_timeout(FOREVER)
        self._start_thread("asyncsync-pairs", partial(self._accept_pairs, tickets))

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _accept_pairs(self, store: Any) -> None:
        while (ticket := store.queue_pop(TICKETS)) != STOP:
            worker, name = ticket.decode().split()
            self._start_thread(f"asyncsync-pair-{worker}", partial(self._serve_pair, int(worker), name))

    def _serve_pair(self, worker: int, name: str) -> None:
        try:
            pair = Pair(connect(self.address), name, _SENDER, self.address[0])
        except RuntimeError:
            return  # the worker is gone, or raises the reason
        with self._lock:
            before, self._pairs[worker] = self._pairs.get(worker), pair
            closed = self._closed
        if before is not None:
            before.close()  # the worker's process has ended, or has abandoned this pair
        try:
            while not closed:
                self._answer_request(pair)
        except RuntimeError:
            pass  # the pair was closed, or its other end is gone
        finally:
            pair.close()
            with self._lock:
                if self._pairs[worker] is pair:
                    del self._pairs[worker]

    def _answer_request(self, pair: Pair) -> None:
        with normal_tensors():
            request = torch.empty(TRANSFER_BYTES, dtype=torch.uint8, device="cpu")
            receipt = torch.empty(1, dtype=torch.uint8, device="cpu")
            head = torch.empty(1, dtype=torch.int64, device="cpu")
            pair.receive(request)
            # As long as this thread refers to the bytes, their memory is not reused.
            data = self._offered.get(request.numpy().tobytes())
            head.fill_(_UNKNOWN if data is None else len(data))
            body = () if data is None else (torch.frombuffer(data, dtype=torch.uint8),)
            pair.exchange(receipt, head, *body, timeout=timedelta(seconds=SEND_SECONDS))

    def close_soon(self) -> None:
        """:meth:`close`, without waiting."""
        with suppress(RuntimeError):  # the interpreter is shutting down, and starts no more threads
            threading.Thread(target=self.close, name="asyncsync-pairs", daemon=True).start()

    def close(self) -> None:
        """Close all pairs and the store, and wait up to two seconds for the threads to end. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
            pairs = list(self._pairs.values())
        if closed:
            return
        for pair in pairs:
            pair.close()
        with suppress(RuntimeError):
            self._store.server.queue_push(TICKETS, STOP)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._store.close()


class PairClient:
    """A worker's side. Call :meth:`receive` in its ``thread``."""

    def __init__(self, store: Address, worker: int) -> None:
        self.store = store
        self.thread = WorkThread(f"asyncsync-pair-{worker}")
        self._worker = worker
        self._pair: Pair | None = None
        self._closed = False

    def receive(self, transfer: bytes, slab: Slab, into: torch.Tensor) -> None:
        """Receive the bytes of the transfer of this name into the slab, whose memory is ``into``. Raises NotConnected
        if the sender cannot be reached, LookupError if it does not offer the transfer any more, ValueError if it offers
        another number of bytes, MemoryError if there is no memory for them."""
        slab.reserve()
        while True:
            is_old = self._pair is not None
            try:
                self._receive(transfer, into)
                return
            except RuntimeError as error:  # an old pair may have ended long ago; then try once more with a new one
                self._close_pair()
                if not is_old or self._closed:
                    host, port = self.store
                    raise NotConnected(
                        f"worker {self._worker} cannot connect to the sender at {host}:{port} for weights: {error}"
                    ) from error

    def _receive(self, transfer: bytes, into: torch.Tensor) -> None:
        pair = self._pair
        if pair is None:
            name = secrets.token_hex(TRANSFER_BYTES)
            store = connect(self.store)
            store.queue_push(TICKETS, f"{self._worker} {name}")
            pair = self._pair = Pair(store, name, _WORKER, address_towards(self.store[0]))
            if self._closed:
                raise RuntimeError("the worker was shut down meanwhile")
        with normal_tensors():
            request = torch.frombuffer(bytearray(transfer), dtype=torch.uint8)
            receipt = torch.zeros(1, dtype=torch.uint8, device="cpu")
            head = torch.empty(1, dtype=torch.int64, device="cpu")
        pair.exchange(head, request)
        size = int(head.item())
        if size == _UNKNOWN:
            pair.post(receipt)
            raise LookupError("the sender does not offer these weights any more")
        if size != into.numel():
            self._close_pair()  # else the next request would receive these bytes
            raise ValueError(f"the sender offers {size} bytes of weights, but announced {into.numel()}")
        pair.receive(into)
        pair.post(receipt)

    def _close_pair(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()

    def close(self) -> None:
        """Close the pair and end the thread. A :meth:`receive` under way raises."""
        self._closed = True
        self.thread.abandon()
        self._close_pair()


class PairTransport(ChunkTransport):
    """Moves slabs through gloo pairs: the base of both APIs' transports.

    Args:
        address: on a sender, the numeric address of this host at which workers reach it.
        map_above: a module's Parameters may lie in the memory of received weights of more bytes than this.
        pair_above: weights of more bytes than this go through pairs, smaller ones over the bus.
        backend: the requested torch.distributed backend. Gloo always carries the weights, because slabs lie in the
            host's memory.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        map_above: int = MAP_ABOVE,
        pair_above: int = PAIR_BYTES,
        *,
        backend: str = "gloo",
    ) -> None:
        super().__init__(map_above)
        self.backend = backend
        self.address = address
        self.pair_above = pair_above
        self._offered: dict[bytes, memoryview] = {}
        self._server: PairServer | None = None
        self._client: PairClient | None = None
        self._worker = 0

    def start_channel(self, worker: int | None) -> None:
        self._worker = worker or 0

    # -- the sender ----------------------------------------------------------------------------------------------------

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes | None:
        """Let workers fetch the slab's bytes until it is retired. Raises NotConnected if ``address`` is no address of
        this host."""
        if slab.nbytes <= self.pair_above:
            return None
        if self._server is None:
            await run_in_thread("asyncsync-pairs", self._start_server)
        assert self._server is not None
        place = TransferPlace(self._server.address, secrets.token_bytes(TRANSFER_BYTES))
        self._offered[place.transfer] = slab.export(0, slab.nbytes)
        return place.encode()

    def _start_server(self) -> None:
        self._server = server = PairServer(self.address, self._offered)
        weakref.finalize(self, server.close_soon).atexit = False

    def retire(self, descriptor: bytes) -> None:
        self._offered.pop(TransferPlace.decode(descriptor).transfer, None)

    # -- the receiver --------------------------------------------------------------------------------------------------

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        # Raises what TransferPlace.decode and PairClient.receive raise.
        place = TransferPlace.decode(descriptor)
        client = self._client
        if client is None or client.store != place.store:
            self._close_client()
            client = self._client = PairClient(place.store, self._worker)
        with normal_tensors():
            into = torch.frombuffer(slab.export(0, slab.nbytes), dtype=torch.uint8)
        fetching = client.thread.submit(partial(client.receive, place.transfer, slab, into))
        del into
        try:
            await fetching
        except asyncio.CancelledError:
            # The thread may wait for a stopped sender. So the next fetch makes a new client.
            if self._client is client:
                self._close_client()
            raise

    def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- both ----------------------------------------------------------------------------------------------------------

    async def close_within(self, timeout: float) -> None:
        server, self._server = self._server, None
        self.close()
        if server is not None:
            await run_in_thread("asyncsync-pairs", server.close)

    def close(self) -> None:
        """Close all connections. Models keep the weights that they have."""
        super().close()
        self._offered.clear()
        self._close_client()
        if self._server is not None:
            self._server.close_soon()


class DistributedTransport(PairTransport, TransportBackend):
    """The transport of :class:`asyncsync.DistributedWeightSyncScheme`: gloo, with a process group of two per worker."""


@named_in_sync
class BlockingDistributedTransport(PairTransport, BlockingTransportBackend):
    """:class:`asyncsync.DistributedTransport` with ordinary methods."""


class RPCTransport(PairTransport, TransportBackend):
    """The transport of :class:`asyncsync.RPCWeightSyncScheme`; as :class:`asyncsync.DistributedTransport`."""


@named_in_sync
class BlockingRPCTransport(PairTransport, BlockingTransportBackend):
    """:class:`asyncsync.RPCTransport` with ordinary methods."""
