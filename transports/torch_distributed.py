"""torch.distributed: the bytes go through gloo, over a *pair* for each worker, a process group of two.

The bus's instruction says where the bytes are to be had, and each worker gets them in a thread of its own. Where they
are few, they ride in the instruction; where they are many, they come to lie where a module's Parameters then get their
memory, as with ZeroMQ. The pairs know no asyncio: everything there blocks, and runs in threads of its own.

The sender has a TCPStore (:class:`PairServer`). A worker that needs a pair (:class:`PairClient`) leaves a ticket there,
with a name that it has drawn, and both make a process group by that name. The worker then requests one transfer after
the other, and a thread of the sender's answers; the worker's receipt ends each. What is requested is the random name of
a transfer, which a worker knows from the bus only: whoever else finds the store and makes a pair gets nothing.

A queue in a store has any number of senders and one receiver, and nothing is lost when one of them is killed. So a
store is a meeting place, too (:class:`StorePlace`). A client of a store is locked while it waits, so each thread has
one of its own.

docs/decisions/20-process-groups.md says why the groups are of two, and apart from torch's default one.
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
from asyncsync.transports.base import BlockingTransportBackend, TransportBackend, in_sync_as
from asyncsync.transports.shared_memory import COPY_BYTES, ChunkTransport
from asyncsync.transports.torch_private import gloo_pair
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.slab import Slab

PAIR_BYTES = 64 << 10
TRANSFER_BYTES = 16  # of a transfer's name
FOREVER = timedelta(days=365)
RENDEZVOUS_SECONDS = 20.0  # until both ends of a pair are there
ENDING_SECONDS = 2.0
SEND_SECONDS = 60.0  # in which a worker has to take in an update's bytes; one that is stopped pins them for as long
TICKETS, ENOUGH = "tickets", b"enough"

ANSWER_SECONDS = 20.0
QUESTIONS = "questions"
ASK_AGAIN_SECONDS = 5.0
FIRST_LOOK = 0.002
ANSWERS_LOOK, QUESTIONS_LOOK = 0.05, 0.25  # the longest pauses between two looks

_MAGIC = b"PAIR\x01"
_HEAD = struct.Struct("<5s16sH")
_SENDER, _WORKER = 0, 1  # ranks
_DATA, _CLOSING = 0, 1  # tags
_UNKNOWN = -1
_c10d: Any = distributed  # its annotations do not show the stores

Address = tuple[str, int]
"""Host and port of a store."""

# A child process that was forked must not destroy what it has inherited: it would wait for threads that it has not.
_open: set[Any] = set()


# -- stores ------------------------------------------------------------------------------------------------------------


class OwnStore:
    """A TCPStore of this process's, on one address of this host: torch itself would listen on all of them.

    The port is taken when this is made; 0: one that is free. Nobody listens there before
    :meth:`open`. Raises NotConnected: there is no such address, or the port is in use.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._store: Any = None
        self._take(host, port)

    def _take(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._bound.bind((host, port))
        except OSError as error:
            self._bound.close()
            raise NotConnected(
                f"cannot open a store at {host}:{port}: {error}; is it an address of this host, with a free port?"
            ) from error
        self.address: Address = host, self._bound.getsockname()[1]
        self._forgotten: weakref.finalize[Any, OwnStore] = weakref.finalize(self, self._bound.close)
        self._forgotten.atexit = False

    @property
    def is_open(self) -> bool:
        """Whether it listens."""
        return self._store is not None

    def open(self) -> bool:
        """Listen; after :meth:`close`, once more, if the port is free. False: it does so already."""
        if self._store is not None:
            return False
        if self._bound.fileno() < 0:
            self._take(*self.address)
        self._bound.listen()
        host, port = self.address
        self._store = _c10d.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._bound.detach()
        )
        _open.add(self._store)
        self._forgotten = weakref.finalize(self, _forget, self._store, os.getpid())
        self._forgotten.atexit = False
        return True

    def put(self, queue: str, content: bytes) -> None:
        """Into a queue of this store, which is open."""
        self._store.queue_push(queue, content)

    def close(self) -> None:
        """Idempotent."""
        self._forgotten.detach()
        self._bound.close()
        store, self._store = self._store, None
        _open.discard(store)


def _forget(store: Any, pid: int) -> None:
    if os.getpid() == pid:
        _open.discard(store)


def connect(address: Address, timeout: float = ANSWER_SECONDS) -> Any:
    """A client of the store at this address. Raises NotConnected: there is none, or this torch has no queues."""
    try:
        # Where nobody listens, torch goes on trying until the time is over, and prints why.
        socket.create_connection(address, timeout).close()
        host, port = address
        store = _c10d.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(1.0, timeout))
        )
    except (OSError, RuntimeError) as error:
        raise NotConnected(f"there is no store at {address[0]}:{address[1]}: {error}") from error
    return _with_queues(store)


def client_of(store: Any) -> Any:
    """Another client of the same store. Raises NotConnected: this one, or this torch, has no queues."""
    return _with_queues(store).clone()


def _with_queues(store: Any) -> Any:
    if not hasattr(store, "queue_push") or isinstance(innermost(store), _c10d.FileStore):
        raise NotConnected(
            f"a {type(innermost(store)).__name__} of torch {torch.__version__} has no queues: use torch 2.8 or newer, "
            "and a TCPStore, as with init_process_group(init_method='env://' or 'tcp://…')"
        )
    return store


def innermost(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


class StorePlace(MeetingPlace):
    """A meeting place under a name in a store, of which ``client`` makes clients. The store is the process group's, or
    the sender has opened it: its ``own``, which it shares with schemes that it was converted to."""

    def __init__(self, name: str, client: Callable[[], Any], own: OwnStore | None = None) -> None:
        super().__init__()
        self.own = own
        self._name = name
        self._client = client
        self._store: Any = None  # the sender's client
        self._has_opened = False

    def _visit(self) -> Any:
        return _c10d.PrefixStore(f"asyncsync/{self._name}", self._client())

    async def open(self) -> None:
        await run_in_thread(MEETING_THREAD, self._open)

    def _open(self) -> None:
        if self.own is not None:
            self._has_opened = self.own.open() or self._has_opened
        elif _in_groups.get(self._name, self).is_hosted:
            raise NotConnected(
                f"another scheme of this process is the sender of {self._name!r} in its process group: give each a "
                "model_id of its own, or shut the other one down before"
            )
        else:
            _in_groups[self._name] = self
        self._store = self._visit()

    def ask(self, worker: int, stop: threading.Event) -> bytes:
        store, key = self._visit(), secrets.token_hex(8)
        try:
            store.queue_push(QUESTIONS, f"{worker} {key}")
            _look_for(key, store, stop, ANSWERS_LOOK, ASK_AGAIN_SECONDS)
            answer: bytes = store.get(key)
            store.delete_key(key)
        except RuntimeError as error:
            raise NotConnected(str(error)) from error
        return answer

    async def next_question(self) -> tuple[int, str]:
        return await run_in_stoppable_thread(MEETING_THREAD, self._asked)

    def _asked(self, stop: threading.Event) -> tuple[int, str]:
        while True:
            _look_for(QUESTIONS, self._store, stop, QUESTIONS_LOOK)
            with suppress(_c10d.QueueEmptyError):  # another sender has taken it
                worker, key = self._store.queue_pop(QUESTIONS, block=False).decode().split()
                return int(worker), key

    async def answer(self, key: str, answer: bytes) -> None:
        await run_in_thread(MEETING_THREAD, partial(self._store.set, key, answer))

    async def end(self) -> None:
        if self.own is not None and (self._has_opened or not self.own.is_open):
            self._has_opened = False
            await run_in_thread(MEETING_THREAD, self.own.close)


_in_groups: weakref.WeakValueDictionary[str, StorePlace] = weakref.WeakValueDictionary()
"""The places in the stores of process groups where this process is the sender, by their names."""


def _look_for(key: str, store: Any, stop: threading.Event, longest: float, seconds: float = math.inf) -> None:
    """Wait until there is something under this key. Raises NotConnected if ``stop`` is set or the time over first."""
    # A wait in the store cannot be ended from outside, and prints lines to stderr when its time is over.
    pause, deadline = FIRST_LOOK, time.monotonic() + seconds
    while not store.check([key]):
        if stop.wait(pause) or time.monotonic() > deadline:
            raise NotConnected("there is no answer yet")
        pause = min(2 * pause, longest)


# -- pairs -------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a slab's bytes are to be had; the content of a descriptor."""

    store: Address
    transfer: bytes

    def encode(self) -> bytes:
        host, port = self.store
        return _HEAD.pack(_MAGIC, self.transfer, port) + host.encode()

    @classmethod
    def decode(cls, descriptor: bytes) -> Place:
        """Raises ValueError: this is no descriptor of a pair's."""
        if not descriptor.startswith(_MAGIC) or len(descriptor) <= _HEAD.size:
            raise ValueError("another transport sent this update: use the same scheme class on both sides")
        _, transfer, port = _HEAD.unpack_from(descriptor)
        return cls((descriptor[_HEAD.size :].decode(), port), transfer)


class Pair:
    """One end of a pair; blocks until the other one is there. Raises RuntimeError, as each of its methods does where
    the other end is gone, or :meth:`close` was called.
    """

    def __init__(self, store: Any, name: str, rank: int, address: str) -> None:
        # A wait without a timeout has the one of the rendezvous.
        self._group = gloo_pair(_c10d.PrefixStore(name, store), rank, address, RENDEZVOUS_SECONDS)
        self._other = 1 - rank
        self._sent: list[Any] = []
        _open.add(self)

    def exchange(self, into: torch.Tensor, *data: torch.Tensor, timeout: timedelta = FOREVER) -> None:
        """Send, and wait for what is received. All that was sent before has arrived then, if the other end receives all
        of it before it sends; so nothing else needs to be waited for, and no send is.

        gloo forgets a send in the middle of which the other end dies: its wait has no end. A receive it remembers, if
        that has begun before.
        """
        receiving = self._group.recv([into], self._other, _DATA)
        self._sent = [*self._sent, *(self._group.send([part], self._other, _DATA) for part in data)]
        try:
            receiving.wait(timeout)
        finally:
            self._sent = []

    def post(self, data: torch.Tensor) -> None:
        """Send without a wait: the next :meth:`exchange` is one for it."""
        self._sent.append(self._group.send([data], self._other, _DATA))

    def send(self, data: torch.Tensor) -> None:
        """And wait for it, in a thread that may do so for ever: see :meth:`exchange`."""
        self._group.send([data], self._other, _DATA).wait(FOREVER)

    def receive(self, into: torch.Tensor) -> None:
        self._group.recv([into], self._other, _DATA).wait(FOREVER)

    def close(self) -> None:
        """End it, and whatever waits for it in other threads. Idempotent."""
        _open.discard(self)
        # Neither abort() nor shutdown() does that to a gloo group; a wait whose time is over does.
        with suppress(RuntimeError), normal_tensors():
            self._group.recv([torch.empty(1, device="cpu")], self._other, _CLOSING).wait(timedelta(milliseconds=1))


class PairServer:
    """The sender's half: a store on this address of this host, and a thread for each pair that there is.

    ``offered`` has the bytes of transfers by their names. Raises NotConnected: there is no such address.
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
        self._start("asyncsync-pairs", partial(self._accept, tickets))

    def _start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _accept(self, store: Any) -> None:
        while (ticket := store.queue_pop(TICKETS)) != ENOUGH:
            worker, name = ticket.decode().split()
            self._start(f"asyncsync-pair-{worker}", partial(self._serve, int(worker), name))

    def _serve(self, worker: int, name: str) -> None:
        """Make a pair, and answer its requests for as long as it lasts."""
        try:
            pair = Pair(connect(self.address), name, _SENDER, self.address[0])
        except RuntimeError:
            return  # the worker is gone, or says why
        with self._lock:
            before, self._pairs[worker] = self._pairs.get(worker), pair
            closed = self._closed
        if before is not None:
            before.close()  # its process is gone, or has given it up
        try:
            while not closed:
                self._answer(pair)
        except RuntimeError:
            pass  # it has come to its end
        finally:
            pair.close()
            with self._lock:
                if self._pairs[worker] is pair:
                    del self._pairs[worker]

    def _answer(self, pair: Pair) -> None:
        with normal_tensors():
            request = torch.empty(TRANSFER_BYTES, dtype=torch.uint8, device="cpu")
            receipt = torch.empty(1, dtype=torch.uint8, device="cpu")
            head = torch.empty(1, dtype=torch.int64, device="cpu")
            pair.receive(request)
            # As long as this thread has the bytes, their memory is not used again.
            data = self._offered.get(request.numpy().tobytes())
            head.fill_(_UNKNOWN if data is None else len(data))
            body = () if data is None else (torch.frombuffer(data, dtype=torch.uint8),)
            pair.exchange(receipt, head, *body, timeout=timedelta(seconds=SEND_SECONDS))

    def end_soon(self) -> None:
        """:meth:`close`, without waiting."""
        with suppress(RuntimeError):  # the interpreter is ending, and starts no threads any more
            threading.Thread(target=self.close, name="asyncsync-pairs", daemon=True).start()

    def close(self) -> None:
        """End all pairs, and wait a moment until that has happened. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
            pairs = list(self._pairs.values())
        if closed:
            return
        for pair in pairs:
            pair.close()
        with suppress(RuntimeError):
            self._store.put(TICKETS, ENOUGH)
        deadline = time.monotonic() + ENDING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._store.close()


class PairClient:
    """A worker's half, with a thread, in which :meth:`receive` is to be called."""

    def __init__(self, store: Address, worker: int) -> None:
        self.store = store
        self.thread = WorkThread(f"asyncsync-pair-{worker}")
        self._worker = worker
        self._pair: Pair | None = None
        self._closed = False

    def receive(self, transfer: bytes, slab: Slab, into: torch.Tensor) -> None:
        """Bring in the bytes of a transfer.

        Args:
            transfer: its name.
            slab: whose they are.
            into: the slab's memory.

        Raises:
            NotConnected: the sender cannot be reached, or is gone.
            LookupError: it does not offer this any more.
            ValueError: it offers another number of bytes.
            MemoryError: there is no memory for them.
        """
        slab.reserve()
        while True:
            known = self._pair is not None
            try:
                self._receive(transfer, into)
                return
            except RuntimeError as error:  # an old connection may have ended long ago
                self._drop()
                if not known or self._closed:
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
            self._drop()  # they would be the next answer
            raise ValueError(f"the sender offers {size} bytes of weights, but announced {into.numel()}")
        pair.receive(into)
        pair.post(receipt)

    def _drop(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()

    def close(self) -> None:
        """End the pair, and the thread, whatever it waits for: a :meth:`receive` that is under way raises."""
        self._closed = True
        self.thread.abandon()
        self._drop()


class PairTransport(ChunkTransport):
    """Moves slabs through gloo pairs: the base of both APIs' transports.

    Args:
        address: at a sender, this host's numeric address by which its workers reach it.
        map_above: above so many bytes, a module's Parameters may lie in the received weights' memory.
        pair_above: weights of more bytes go through pairs, smaller ones over the bus.
        backend: the requested torch.distributed backend. Gloo carries the weights whatever it is, because slabs lie in
            the host's memory.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        map_above: int = COPY_BYTES,
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
        """Where workers fetch the slab's bytes, until it is retired. Raises NotConnected if ``address`` is not one of
        this host's."""
        if slab.nbytes <= self.pair_above:
            return None
        if self._server is None:
            await run_in_thread("asyncsync-pairs", self._serve)
        assert self._server is not None
        place = Place(self._server.address, secrets.token_bytes(TRANSFER_BYTES))
        self._offered[place.transfer] = slab.export(0, slab.nbytes)
        return place.encode()

    def _serve(self) -> None:
        self._server = server = PairServer(self.address, self._offered)
        weakref.finalize(self, server.end_soon).atexit = False

    def retire(self, descriptor: bytes) -> None:
        self._offered.pop(Place.decode(descriptor).transfer, None)

    # -- the receiver --------------------------------------------------------------------------------------------------

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        # Raises NotConnected: the sender is gone, or cannot be reached; ValueError: this is no descriptor of a pair's;
        # and as PairClient.receive.
        place = Place.decode(descriptor)
        client = self._client
        if client is None or client.store != place.store:
            self._hang_up()
            client = self._client = PairClient(place.store, self._worker)
        with normal_tensors():
            into = torch.frombuffer(slab.export(0, slab.nbytes), dtype=torch.uint8)
        fetching = client.thread.submit(partial(client.receive, place.transfer, slab, into))
        del into
        try:
            await fetching
        except asyncio.CancelledError:
            # It may be waiting for a sender that is stopped. The next fetch begins with a connection of its own.
            if self._client is client:
                self._hang_up()
            raise

    def _hang_up(self) -> None:
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
        """Close all connections; models keep the weights that they show."""
        super().close()
        self._offered.clear()
        self._hang_up()
        if self._server is not None:
            self._server.end_soon()


class DistributedTransport(PairTransport, TransportBackend):
    """The transport of :class:`asyncsync.DistributedWeightSyncScheme`: gloo, with a process group of two per worker."""


@in_sync_as("DistributedTransport")
class BlockingDistributedTransport(PairTransport, BlockingTransportBackend):
    """:class:`asyncsync.DistributedTransport` with ordinary methods."""


class RPCTransport(PairTransport, TransportBackend):
    """The transport of :class:`asyncsync.RPCWeightSyncScheme`; as :class:`asyncsync.DistributedTransport`."""


@in_sync_as("RPCTransport")
class BlockingRPCTransport(PairTransport, BlockingTransportBackend):
    """:class:`asyncsync.RPCTransport` with ordinary methods."""
