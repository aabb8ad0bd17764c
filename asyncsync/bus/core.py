"""Bus: what a trainer and its workers share — one address, one version counter, one gate per worker, several models.

:class:`BusCore` holds configuration, the schemes that have joined, and private coroutines; :class:`asyncsync.Bus` and
:class:`asyncsync.sync.Bus` put an API over it. A scheme without ``bus=`` has a bus of its own. A Bus (like a scheme)
can be pickled: it carries its address and configuration, never sockets, tasks or weights; nothing is bound or connected
before ``connect``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from asyncsync.arguments import KnownKeywords, as_version, check_count, check_fanout, check_forward, check_quorum
from asyncsync.bus.link import EXIT_SECONDS, Order, is_fast_path_on
from asyncsync.bus.measures import serve_metrics
from asyncsync.bus.member import Calls, Member, agree_on_workers, shared_here
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink
from asyncsync.bus.status import BusStatus, bus_status
from asyncsync.errors import ClosedError, NotConnected
from asyncsync.model.gate import Gate
from asyncsync.model.readers import Hold
from asyncsync.monitor.options import Monitoring, Tracing
from asyncsync.net.address import tcp_endpoint
from asyncsync.net.endpoint import INTRODUCED, draw_endpoint, is_plaintext_beyond_loopback
from asyncsync.net.key_files import KeyFile, KeyFiles, check_addresses, check_own_address
from asyncsync.net.rendezvous import Find, Introduction
from asyncsync.protocol.settings import EAGER_BYTES, Settings
from asyncsync.protocol.staging import Acting
from asyncsync.weights.encoding import check_codec
from asyncsync.wire.metadata import Shown, decode_metadata
from asyncsync.wire.report import Report

DEFAULT_TIMEOUT = 60.0
LOOP_ENDED = "this bus was shut down when its event loop ended: connect and use it within one asyncio.run()"
CONFIGURATION = ["endpoint", "connect_endpoint", "num_workers", "min_workers", "allow_plaintext", "checksum", "keys"]
CONFIGURATION += ["fanout", "compress", "delta", "monitoring", "drawn", "_uid"]

T = TypeVar("T")


class BusCore(KnownKeywords):
    """One address for any number of models: the base of both APIs' ``Bus``.

    Args:
        endpoint: where the sender binds: ``ipc:///path`` or ``tcp://HOST:PORT``; None draws a private ipc path.
        connect: where workers connect, if that differs; of several, with commas between, they try one by one.
        num_workers: fixed number of workers (0 … num_workers−1); None: elastic, workers come and go.
        min_workers: how many workers an elastic sender needs for ``connect`` and ``send_async``; 0: it can start alone.
        allow_plaintext: allow unencrypted addresses that other hosts can reach.
        checksum: check every payload with CRC-32; None: only on unencrypted tcp beyond loopback.
        server_key: path of the server's certificate: at the sender the secret file, at a receiver the public file.
            While you replace the server's key, a receiver may have several, of which one is right.
        clients: at the sender: the directory of the public certificates of the clients that it lets in.
        client_key: at a receiver: the path of its secret certificate; ``{worker_idx}`` in it stands for its index.
        metrics_port: port on loopback where this process serves Prometheus metrics, or ``"0.0.0.0:9100"``; 0 takes any
            free port. A pickled bus does not take it along.
        tracing: True: record OpenTelemetry spans for each version; None: if the program has set up OpenTelemetry; or a
            function ``trace(event, info)``, which is called with each step of each version (docs/monitoring.md).
        fanout: over tcp: ``"pull"`` broadcasts instructions for three or more workers, with weights of up to 64 KiB;
            ``"push"`` broadcasts larger weights, too. None: the sender sends to each worker separately, which costs it
            no more (docs/multi-host.md), and needs one port, and one connection per worker, less.
        compress: ``"zstd"`` or ``"lz4"``: compress what travels over the bus, for workers that can decode it.
        delta: send a worker that has the previous version only what has changed. The sender keeps that version.

    Attributes:
        drawn: whether the bus has drawn its address itself.
        keys: the paths of the certificates; None: no keys, and no encryption.

    Raises:
        ValueError: an address that cannot work or is not safe (the message names the remedy), or an unknown codec.
        ImportError: the codec's library is not installed.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect: str | None = None,
        num_workers: int | None = None,
        min_workers: int = 1,
        allow_plaintext: bool = False,
        checksum: bool | None = None,
        server_key: KeyFile | Sequence[KeyFile] | None = None,
        clients: KeyFile | None = None,
        client_key: KeyFile | None = None,
        metrics_port: int | str | None = None,
        tracing: Tracing = None,
        fanout: str | None = None,
        compress: str | None = None,
        delta: bool = False,
    ) -> None:
        check_codec(compress, delta)
        self.drawn = endpoint in (None, INTRODUCED)
        endpoint = draw_endpoint() if endpoint is None else endpoint
        self.keys = KeyFiles.given(server_key, clients, client_key)
        self.endpoint, self.connect_endpoint = endpoint, endpoint if connect is None else connect
        check_addresses(self.endpoint, self.connect_endpoint, self.keys, allow_plaintext=allow_plaintext)
        if num_workers is not None:
            check_count("num_workers", num_workers)
        check_count("min_workers", min_workers, least=0)
        check_quorum(num_workers, min_workers)
        check_fanout(fanout)
        self.num_workers, self.min_workers = num_workers, min_workers
        self.allow_plaintext, self.checksum = allow_plaintext, checksum
        self.fanout, self.compress, self.delta = fanout, compress, delta
        self.monitoring = Monitoring.given(metrics_port, tracing)
        self._uid = secrets.token_hex(8)
        self._reset()

    def _reset(self) -> None:
        self._role: str | None = None
        self._pid = 0
        self._schemes: dict[str, Member] = {}
        self._link: SenderLink | ReceiverLink | None = None
        self._gate: Gate | None = None
        self._worker: int | None = None
        self._late = False
        self._introduction: Introduction | None = None  # a worker's
        self._find_sender: Find | None = None  # the successor of the one that it was introduced to
        self._constructed = self.num_workers  # by the constructor; init_on_sender() may set it instead
        self._starting: tuple[Any, ...] = ()  # workers' processes, to be watched while connect() waits
        self._closed = False
        self._why_closed = "this scheme or bus was shut down"
        self._preparing = Order()  # held by a publication until it is ready to be packed
        self._carried = 0  # the version that a sender counts on from
        self._converted: BusCore | None = None
        # Called on the loop with each version that workers are to have, and whom it is for (None: everybody).
        self._on_published: Callable[[int, list[int] | None], None] | None = None
        self._origin: Callable[[], tuple[int, bytes]] | None = None
        self._calls: Calls | None = None  # a sender's whose workers are called with each version

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CONFIGURATION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r}, role={self._role}, models={sorted(self._schemes)})"

    # -- schemes join -----------------------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        beyond = self.keys is None and is_plaintext_beyond_loopback(self.endpoint)
        checksum = beyond if self.checksum is None else self.checksum
        fast, compress = is_fast_path_on(), self.compress or ""
        # What nobody has asked for comes whole, is compressed on the loop, and goes to all who have subscribed.
        eager = 64 << 10 if compress or self.delta or self.fanout else EAGER_BYTES
        return Settings(eager, checksum=checksum, compress=compress, delta=self.delta, fast=fast, fanout=self.fanout)

    def _check_role(self, role: str) -> None:
        if self._role is not None and self._pid != os.getpid():
            if self._link is not None:
                raise RuntimeError(
                    "this scheme or bus was connected before the fork, so the forked child cannot use it: pass "
                    "it to the child before you connect it"
                )
            self._reset()
        if self._role not in (None, role):
            raise RuntimeError(
                f"this scheme or bus is the {self._role} in this process; for the {role}, use another scheme "
                "(pickle it, or construct another)"
            )

    def _join(self, scheme: Member, role: str, topic: str, num_workers: int | None = None) -> None:
        self._check_role(role)
        if role == "sender":
            check_own_address(self.endpoint, self.connect_endpoint, drawn=self.drawn)
        if self._schemes.get(topic, scheme) is not scheme:
            raise ValueError(f"this bus has a scheme for {topic!r} already; give each scheme its own model_id")
        if self._closed:
            raise ClosedError("this scheme or bus was shut down; construct another")
        if num_workers is not None:
            agree_on_workers(self, num_workers, private=scheme._own_bus)
        self._role, self._pid = role, os.getpid()
        self._schemes = {t: s for t, s in self._schemes.items() if s is not scheme} | {topic: scheme}
        if role == "receiver" and self._gate is None:
            self._gate = Gate()

    def _for_receiver(self, worker: int | None) -> BusCore:
        """The bus that schemes pickled apart share in this worker."""
        if worker is None or self._role == "sender":
            self._late = True
            return self
        return shared_here(self, worker)

    def _twin(self, kind: type[BusCore]) -> BusCore:
        """A copy with the other API; the schemes of one bus that are converted share it."""
        twin = self._converted
        if twin is None or twin._closed or type(twin) is not kind:
            twin = self._converted = kind.__new__(kind)
            twin.__setstate__(self.__getstate__())
        twin._carried = max(twin._carried, self._carried)
        return twin

    def _look(self, function: Callable[[], T]) -> T:
        """Read the link's state, where it does not change meanwhile."""
        return function()

    # -- links ------------------------------------------------------------------------------------------------------

    def _sender(self) -> SenderLink:
        link = self._link
        if type(link) is SenderLink and not self._closed and link.pid == os.getpid():
            return link
        self._check_open("sender")
        if not isinstance(self._link, SenderLink):
            raise NotConnected("this sender is not connected; call connect() first")
        return self._link

    def _receiver(self) -> ReceiverLink:
        self._check_open("receiver")
        if not isinstance(self._link, ReceiverLink):
            raise NotConnected("this receiver is not connected; call connect() first")
        return self._link

    def _check_open(self, role: str) -> None:
        if self._closed:
            raise ClosedError(self._why_closed)
        if self._role is None:
            raise RuntimeError("init_on_sender() or init_on_receiver() comes first")
        self._check_role(role)

    def _open_sender(self, host: str = "") -> SenderLink:
        """``host``: where to bind a free port, with keys, if the workers are introduced."""
        self._check_open("sender")
        if self._link is None:
            endpoint = tcp_endpoint(host, "*") if host else self.endpoint
            options: Any = {"keyed": bool(host), "keys": self.keys, "monitoring": self.monitoring.here}
            link = SenderLink(endpoint, self.num_workers, self.min_workers, self._settings(), **options)
            link.publishing.origin = self._origin
            link.carry_on(self._carried)
            self._link = link
            self._end_with_the_loop(link)
        return self._sender()

    def _stand_for(self, origin: Callable[[], tuple[int, bytes]]) -> None:
        """Sender: what is published from now on stands for the version of the root of a tree that ``origin`` returns
        when the values are taken, and has that one's metadata unless it is given some."""
        self._origin = origin
        if isinstance(self._link, SenderLink):
            self._link.publishing.origin = origin

    def _open_receiver(self, worker: int) -> ReceiverLink:
        self._check_open("receiver")
        if self._worker not in (None, worker):
            raise ValueError(f"this scheme or bus is worker {self._worker} already; it cannot be worker {worker} too")
        if self._late and shared_here(self, worker) is not self:
            raise ValueError(
                f"another copy of this bus is worker {worker} in this process already; "
                "pass worker_idx to init_on_receiver(), so that schemes that were pickled separately share one bus"
            )
        self._worker = worker
        if self._link is None:
            assert self._gate is not None
            sender = self._introduction or self.connect_endpoint
            credentials = None if self.keys is None else partial(self.keys.receiver, worker)
            options: Any = {"monitoring": self.monitoring.here, "find": self._find_sender}
            link = ReceiverLink(sender, worker, self._settings(), self._gate, credentials, **options)
            self._link = link
            self._end_with_the_loop(link)
        return self._receiver()

    def _end_with_the_loop(self, link: SenderLink | ReceiverLink) -> None:
        serve_metrics(link)
        reference = weakref.ref(self)

        async def end() -> None:
            if (bus := reference()) is None:
                await link.shutdown()
            else:
                bus._why_closed = LOOP_ENDED
                await bus._shutdown(EXIT_SECONDS)

        link.until_the_loop_ends(end)

    async def _shutdown(self, timeout: float) -> None:
        if self._pid not in (0, os.getpid()):
            return  # a forked child has nothing of its own to end
        self._check_loop()
        already, self._closed = self._closed, True
        if self._gate is not None:
            self._gate.detach()
        try:
            if self._link is not None and not already:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._link.shutdown()
        finally:
            for scheme in self._schemes.values():
                await scheme._end_transport(timeout)

    # -- what both APIs show ------------------------------------------------------------------------------------------

    def hold(self) -> Hold[Shown]:
        """A block (``with`` or ``async with``) in which this receiver applies no update to any model. In ``with
        bus.hold() as held``, ``held.version`` and ``held.metadata`` are the newest that any of its models shows."""
        return self._hold(self._schemes)

    def _hold(self, models: Collection[str]) -> Hold[Shown]:
        self._check_open("receiver")
        assert self._gate is not None
        return Hold(self._gate, lambda: self._acting(models).shown)

    def _acting(self, models: Collection[str]) -> Acting:
        """Receiver: the newest that these models show."""
        return self._link.acting(models) if isinstance(self._link, ReceiverLink) else Acting(0, 0)

    @property
    def version(self) -> int:
        """Sender: the newest version published (a version that a worker refused does not count). Receiver: the newest
        version that any of its models shows. 0: none.

        On a receiver it changes together with the models: not inside a :meth:`hold`.
        """
        if isinstance(self._link, SenderLink):
            return self._link.version
        if isinstance(self._link, ReceiverLink):
            return self._link.version(self._schemes)
        return self._carried

    @property
    def metadata(self) -> dict[str, Any]:
        """A copy of the metadata published with :attr:`version`; empty if there was none. On a receiver, both change
        together with the models."""
        return self._metadata(self._schemes)

    def _metadata(self, models: Collection[str]) -> dict[str, Any]:
        if isinstance(link := self._link, SenderLink):
            return decode_metadata(self._look(lambda: link.metadata))
        return self._acting(models).shown.metadata

    def state_dict(self) -> dict[str, int]:
        """Sender: what a checkpoint must keep so that versions continue: ``{"version": …}``.

        Raises:
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        self._check_counts()
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sender: continue from the version of a checkpoint: the next publication gets that version plus one. Call it
        before or after ``connect``; all schemes of a bus share the version.

        Raises:
            ValueError: not such a state, or its version is older than the current one; nothing was changed.
            ClosedError: this bus was shut down.
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        self._check_counts()
        version = as_version(state)
        if self._closed:
            raise ClosedError("this bus was shut down; construct another, and load the state into it")
        self._look(lambda: self._carry_on(version))

    def _check_counts(self) -> None:
        if self._role == "receiver":
            raise RuntimeError("a receiver gets its versions from the sender; save and load the sender's state")

    def _carry_on(self, version: int) -> None:
        check_forward(version, self._link.counted if isinstance(self._link, SenderLink) else self._carried)
        self._carried = version
        if isinstance(self._link, SenderLink):
            self._link.carry_on(version)

    @property
    def closed(self) -> bool:
        """True once this side was shut down, or the sender has said goodbye."""
        if isinstance(self._link, ReceiverLink) and self._link.subscriber.session.ended is not None:
            return True
        return self._closed

    @property
    def dropped(self) -> dict[str, int]:
        """How many messages were dropped, by reason: malformed, oversized, unknown layout or peer, another epoch."""
        return {} if self._link is None else dict(self._link.dropped)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """``(host, port)`` where this process serves metrics; None: it does not, or not yet."""
        return None if self._link is None or self._link.metrics is None else self._link.metrics.address

    def status(self) -> BusStatus:
        """Sender: every worker's state. Receiver: its own version, and its sender's ``state`` and ``last_seen``.
        ``refused`` counts what was refused because of keys."""
        return self._status(list(self._schemes))

    def report(self) -> Report:
        """What ``asyncsync top`` shows of this sender. Raises NotConnected: it is not connected."""
        return self._look(self._sender().report)

    def _status(self, models: list[str]) -> BusStatus:
        return self._look(lambda: bus_status(self._link, models))

    def _check_loop(self) -> None:
        if self._link is not None and not self._closed and not self._link.loop.is_closed():
            self._link.check_loop()
