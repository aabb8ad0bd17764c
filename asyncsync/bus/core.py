"""Bus: one address, one version counter and one gate per worker, which a trainer and its workers share for all models.

:class:`BusCore` has the configuration, the schemes that have joined, and coroutines that both APIs use;
:class:`asyncsync.Bus` and :class:`asyncsync.sync.Bus` add the public methods. A scheme without ``bus=`` has a bus of
its own. Buses and schemes can be pickled: they carry the address and the configuration, never sockets, tasks or
weights. Nothing is bound or connected before ``connect``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Protocol, TypedDict, TypeVar, Unpack

from asyncsync.arguments import (
    Option,
    as_workers,
    check_count,
    check_fanout,
    check_processes,
    check_quorum,
    check_timeout,
    declared,
    described,
)
from asyncsync.bus.carrier import Calls, Extracted, Member, Source
from asyncsync.bus.link import EXIT_SECONDS, FairLock, is_fast_path_on
from asyncsync.bus.status import DROPPED, BusStatus
from asyncsync.bus.trainer import TrainerLink
from asyncsync.bus.verifying import Differences, verify
from asyncsync.bus.worker import WorkerLink
from asyncsync.errors import AckTimeout, ClosedError, Fenced, NotConnected, PartialSendError
from asyncsync.model.gate import Gate, Hold
from asyncsync.monitor.trace import UNMONITORED, Monitoring, Tracing
from asyncsync.net.endpoint import INTRODUCED, draw_endpoint, is_plaintext_beyond_loopback, tcp_endpoint
from asyncsync.net.keys import KeyFile, KeyFiles, check_addresses
from asyncsync.net.rendezvous import Find, Introduction
from asyncsync.protocol.holdings import Acting
from asyncsync.protocol.membership import Outcome
from asyncsync.protocol.settings import EAGER_BYTES, Settings
from asyncsync.weights.encoding import check_codec
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire.messages import Report, Shown, decode_metadata, encode_metadata, epoch_text

DEFAULT_TIMEOUT = 60.0
LOOP_ENDED = "this bus was shut down when its event loop ended: connect and use it within one asyncio.run()"
MAX_VERSION = 1 << 62  # the limit for the version of a checkpoint, so that there is room for later versions
SHARED = {
    "num_workers": None, "min_workers": 1, "allow_plaintext": False, "checksum": None, "keys": None, "fanout": False,
    "compress": None, "delta": False, "monitoring": UNMONITORED, "connect_endpoint": None,
}  # fmt: skip
"""The settings on which all schemes of a bus must agree, and their defaults."""
CONFIGURATION = (*SHARED, "endpoint", "drawn", "uid")
"""The attributes that a pickled bus carries."""
# The constructor's argument for each setting whose name differs from it.
ARGUMENTS = {"keys": "server_key", "monitoring": "metrics_port", "connect_endpoint": "connect"}

# The bus that this process uses, by (uid, worker_idx, pid). Each scheme that was pickled separately brings a copy of
# its bus; here all of them find the one copy whose connection they share.
_receiving: weakref.WeakValueDictionary[tuple[str, int, int], Any] = weakref.WeakValueDictionary()

Workers = int | Iterable[int] | None
Metadata = Mapping[str, Any] | None

T = TypeVar("T")

# -- options; a scheme with a bus of its own has those that its transport can use (asyncsync.schemes.options) ----------

Endpoint = Annotated[
    str | None,
    Option(doc="where the sender binds: ``ipc:///path`` or ``tcp://HOST:PORT``; None draws a private ipc path."),
]
Fanout = Annotated[
    bool,
    Option(
        False,
        check_fanout,
        "over tcp, send weights to all workers at once if three or more of them need these weights; with ``compress`` "
        "or ``delta``, only weights of up to 64 KiB. It takes one more port, and one more connection per worker, and "
        "saves CPU time only with many workers and large weights (docs/multi-host.md).",
    ),
]


@described
class LocalBusOptions(TypedDict, total=False):
    """Options of every bus, even if the scheme's bytes do not travel over it.

    Args:
        connect: where workers connect, if not at the endpoint. A worker tries several addresses, with commas between
            them, one after the other.
        num_workers: fixed number of workers (0 … num_workers−1); None: elastic, workers come and go.
        min_workers: how many workers an elastic sender needs for ``connect`` and ``send_async``; 0: it can start alone.
        allow_plaintext: allow unencrypted addresses that other hosts can reach.
        metrics_port: port on loopback where this process serves Prometheus metrics, or ``"0.0.0.0:9100"``; 0 takes any
            free port. A pickled bus or scheme does not take it along.
        tracing: True: record OpenTelemetry spans for each version; None: if the program has set up OpenTelemetry; or a
            function ``trace(event, info)``, which is called with each step of each version (docs/monitoring.md).
    """

    connect: str | None
    num_workers: Annotated[int | None, Option(check=check_count)]
    min_workers: Annotated[int, Option(1, partial(check_count, least=0))]
    allow_plaintext: Annotated[bool, Option(False)]
    metrics_port: int | str | None
    tracing: Tracing


@described
class WireOptions(LocalBusOptions, total=False):
    """Options of a bus over which the bytes travel.

    Args:
        server_key: path of the server's certificate: at the sender the secret file, at a receiver the public file.
            While you replace the server's key, give a receiver a list: one of its files must be the right one.
        clients: at the sender: the directory with the public certificates of the clients that may connect.
        client_key: at a receiver: the path of its secret certificate; ``{worker_idx}`` in it stands for its index.
        compress: ``"zstd"`` or ``"lz4"``: compress the weights for workers that can decode them.
        delta: send a worker that has the previous version only the changes. The sender keeps that version.
    """

    server_key: KeyFile | Sequence[KeyFile] | None
    clients: KeyFile | None
    client_key: KeyFile | None
    compress: str | None
    delta: Annotated[bool, Option(False)]


@described
class BusOptions(WireOptions, total=False):
    """Options of a ``Bus``.

    Args:
        checksum: check every payload with CRC-32; None: only on unencrypted tcp beyond loopback.
    """

    checksum: bool | None
    fanout: Fanout


# -- the bus -----------------------------------------------------------------------------------------------------------


class ModelsOnBus(Protocol):
    """What a bus (with all its models) and a scheme (with its one model) have in common. Methods that both offer use
    only this of ``self``. They are written once, in ``BusCore`` and ``Bus``; the class of a scheme assigns them."""

    is_shut_down: bool

    def _bus_and_models(self) -> tuple[BusCore, Collection[str]]:
        """The bus, and the models of this bus or scheme."""

    def _open_bus_and_models(self) -> tuple[BusCore, list[str] | None]:
        """The same; None instead of the models means all. A scheme raises an exception if it cannot be used now."""

    async def _shutdown(self, timeout: float) -> None: ...


class BusCore:
    """One address for any number of models: the base of both APIs' ``Bus``.

    Attributes:
        drawn: whether the user gave no address, so that the bus has drawn one or workers are introduced.
        keys: the paths of the certificates; None: no keys, and no encryption.
    """

    @declared
    def __init__(self, endpoint: Endpoint = None, **options: Unpack[BusOptions]) -> None:
        """Configuration only: nothing is bound or connected before ``connect``.

        Raises:
            ValueError: the address cannot work or is not safe (the message names the remedy), or the codec is unknown.
            ImportError: the codec's library is not installed.
        """
        compress, delta = options["compress"], options["delta"]
        check_codec(compress, delta)
        self.drawn = endpoint in (None, INTRODUCED)
        self.endpoint = draw_endpoint() if endpoint is None else endpoint
        self.connect_endpoint = self.endpoint if options["connect"] is None else options["connect"]
        self.keys = KeyFiles.given(options["server_key"], options["clients"], options["client_key"])
        self.allow_plaintext, self.checksum = options["allow_plaintext"], options["checksum"]
        check_addresses(self.keys, self.endpoint, self.connect_endpoint, allow_plaintext=self.allow_plaintext)
        self.num_workers, self.min_workers = options["num_workers"], options["min_workers"]
        check_quorum(self.num_workers, self.min_workers)
        self.fanout, self.compress, self.delta = options["fanout"], compress, delta
        self.monitoring = Monitoring.given(options["metrics_port"], options["tracing"])
        self.uid = secrets.token_hex(8)
        self._reset()

    def _reset(self) -> None:
        self.role: str | None = None
        self.pid = 0
        self.schemes: dict[str, Member] = {}
        self.link: TrainerLink | WorkerLink | None = None  # None until connect()
        self.gate: Gate | None = None
        self._worker: int | None = None
        self._index_comes_late = False
        self.introduction: Introduction | None = None  # of a worker: its sender's address and keys
        self.find_sender: Find | None = None  # of an introduced worker: finds its sender's successor
        self._constructor_num_workers = self.num_workers  # init_on_sender() may give num_workers instead
        self.starting_processes: tuple[Any, ...] = ()  # workers' processes: connect() fails if one of them ends
        self.is_shut_down = False
        self._why_closed = "this scheme or bus was shut down"
        self._extraction_lock = FairLock()  # a publication holds it until its weights are ready to be packed
        self.unlinked_version = 0  # a sender's version as long as it has no link; its link continues from it
        self._other_api_copy: BusCore | None = None
        # Called on the loop with each version, and the workers that are to have it; None: all.
        self.on_published: Callable[[int, list[int] | None], None] | None = None
        self._origin: Callable[[], tuple[int, bytes]] | None = None
        self.calls: Calls | None = None  # by which a sender has its workers apply each version

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CONFIGURATION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r}, role={self.role}, models={sorted(self.schemes)})"

    # -- schemes join -----------------------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        beyond = self.keys is None and is_plaintext_beyond_loopback(self.endpoint)
        checksum = beyond if self.checksum is None else self.checksum
        fast, compress = is_fast_path_on(), self.compress or ""
        # A worker gets an eager update without a FETCH: as a whole, not as a difference. It is compressed on the loop,
        # and fan-out sends it to all subscribers.
        eager = 64 << 10 if compress or self.delta or self.fanout else EAGER_BYTES
        return Settings(eager, checksum=checksum, compress=compress, delta=self.delta, fast=fast, fanout=self.fanout)

    def check_role(self, role: str) -> None:
        if self.role is not None and self.pid != os.getpid():
            if self.link is not None:
                raise RuntimeError(
                    "this scheme or bus was connected before the fork, so the forked child cannot use it: pass "
                    "it to the child before you connect it"
                )
            self._reset()
        if self.role not in (None, role):
            raise RuntimeError(
                f"this scheme or bus is the {self.role} in this process; for the {role}, use another scheme "
                "(pickle it, or construct another)"
            )

    def join(self, scheme: Member, role: str, topic: str, num_workers: int | None = None) -> None:
        self.check_role(role)
        if role == "sender" and self.drawn and self.connect_endpoint != self.endpoint:
            raise ValueError(
                f"this sender has no address to bind, only connect={self.connect_endpoint!r}, where workers look for "
                'it: also give endpoint=, such as "tcp://0.0.0.0:5555"'
            )
        if self.schemes.get(topic, scheme) is not scheme:
            raise ValueError(f"this bus has a scheme for {topic!r} already; give each scheme its own model_id")
        if self.is_shut_down:
            raise ClosedError("this scheme or bus was shut down; construct another")
        if num_workers is not None:
            self.set_num_workers(num_workers, private=scheme.has_own_bus)
        self.role, self.pid = role, os.getpid()
        self.schemes = {t: s for t, s in self.schemes.items() if s is not scheme} | {topic: scheme}
        if role == "receiver" and self.gate is None:
            self.gate = Gate()

    def for_receiver(self, worker: int | None) -> BusCore:
        # The bus that schemes of this bus share in this worker, even if they were pickled separately.
        if worker is None or self.role == "sender":
            self._index_comes_late = True
            return self
        return self._shared_in_process(worker)

    def _shared_in_process(self, worker: int) -> BusCore:
        """The copy that all copies of this bus use in this process as this worker. Raises ValueError if APIs differ."""
        key = (self.uid, worker, os.getpid())
        shared: BusCore | None = _receiving.get(key)
        if shared is None or shared.is_shut_down:
            _receiving[key] = shared = self
        if type(shared) is not type(self):
            raise ValueError(
                f"worker {worker} has an asynchronous and a blocking scheme of one bus in this process; convert all of "
                "them (scheme.blocking, scheme.aio), or none"
            )
        return shared

    def set_num_workers(self, num_workers: int, *, private: bool) -> None:
        # private: no other scheme may join this bus, so init_on_sender() may replace what an earlier call gave. Raises
        # ValueError if this bus has another number already, or if the given one is below its min_workers.
        check_count("num_workers", num_workers)
        given = self._constructor_num_workers if private and self.link is None else self.num_workers
        if given not in (None, num_workers) or (self.link is not None and self.num_workers != num_workers):
            raise _disagreement("num_workers", self.num_workers, num_workers)
        check_quorum(num_workers, self.min_workers)
        self.num_workers = num_workers

    def set_min_workers(self, min_workers: int, *, private: bool) -> None:
        # The same for min_workers; but even with private, only the default, 1, can be replaced.
        check_count("min_workers", min_workers, least=0)
        if self.min_workers != min_workers and (self.min_workers != 1 or self.link is not None or not private):
            raise _disagreement("min_workers", self.min_workers, min_workers)
        check_quorum(self.num_workers, min_workers)
        self.min_workers = min_workers

    def with_other_api(self, kind: type[BusCore]) -> BusCore:
        # A copy of this bus with the other API. All converted schemes of this bus share it.
        copy = self._other_api_copy
        if copy is None or copy.is_shut_down or type(copy) is not kind:
            copy = self._other_api_copy = kind.__new__(kind)
            copy.__setstate__(self.__getstate__())
        copy.unlinked_version = max(copy.unlinked_version, self.unlinked_version)
        return copy

    def read_link(self, function: Callable[[], T]) -> T:
        # Call a function that reads the link's state; the blocking API's bus calls it on the link's loop.
        return function()

    # -- links ------------------------------------------------------------------------------------------------------

    def trainer_link(self) -> TrainerLink:
        self.check_open("sender")
        if not isinstance(self.link, TrainerLink):
            raise NotConnected("this sender is not connected; call connect() first")
        return self.link

    def worker_link(self) -> WorkerLink:
        self.check_open("receiver")
        if not isinstance(self.link, WorkerLink):
            raise NotConnected("this receiver is not connected; call connect() first")
        return self.link

    def check_open(self, role: str) -> None:
        if self.is_shut_down:
            raise ClosedError(self._why_closed)
        if self.role is None:
            raise RuntimeError("init_on_sender() or init_on_receiver() comes first")
        if self.role != role or self.pid != os.getpid():
            self.check_role(role)

    def open_trainer(self, host: str = "") -> TrainerLink:
        # host: if the workers are introduced, bind a free port of this address, with keys.
        self.check_open("sender")
        if self.link is None:
            link = TrainerLink(
                tcp_endpoint(host, "*") if host else self.endpoint,
                self.num_workers,
                self.min_workers,
                self._settings(),
                keyed=bool(host),
                keys=self.keys,
                monitoring=self.monitoring.in_this_process,
            )
            link.origin = self._origin
            link.continue_from(self.unlinked_version)
            self.link = link
            link.shut_down_with_loop(weakref.WeakMethod(self._shut_down_at_loop_end))
        return self.trainer_link()

    def set_origin(self, origin: Callable[[], tuple[int, bytes]]) -> None:
        # Sender below a tree's root: each publication calls origin, which returns a version of the root and its
        # metadata. The new version stands for that one, and has its metadata unless the caller gives other metadata.
        self._origin = origin
        if isinstance(self.link, TrainerLink):
            self.link.origin = origin

    def open_worker(self, worker: int) -> WorkerLink:
        self.check_open("receiver")
        if self._worker not in (None, worker):
            raise ValueError(f"this scheme or bus is worker {self._worker} already; it cannot be worker {worker} too")
        if self._index_comes_late and self._shared_in_process(worker) is not self:
            raise ValueError(
                f"another copy of this bus is worker {worker} in this process already; "
                "pass worker_idx to init_on_receiver(), so that schemes that were pickled separately share one bus"
            )
        self._worker = worker
        if self.link is None:
            assert self.gate is not None
            self.link = WorkerLink(
                self.introduction or self.connect_endpoint,
                worker,
                self._settings(),
                self.gate,
                None if self.keys is None else partial(self.keys.read_for_receiver, worker),
                monitoring=self.monitoring.in_this_process,
                find=self.find_sender,
            )
            self.link.shut_down_with_loop(weakref.WeakMethod(self._shut_down_at_loop_end))
        return self.worker_link()

    async def _shut_down_at_loop_end(self) -> None:
        self._why_closed = LOOP_ENDED
        await self._shutdown(EXIT_SECONDS)

    async def _shutdown(self, timeout: float) -> None:
        if self.pid not in (0, os.getpid()):
            return  # a forked child has nothing of its own to end
        self.check_loop()
        already, self.is_shut_down = self.is_shut_down, True
        if self.gate is not None:
            self.gate.detach()
        try:
            if self.link is not None and not already:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self.link.shutdown()
        finally:
            for scheme in self.schemes.values():
                await scheme.end_transport(timeout)

    # -- connecting and sending ----------------------------------------------------------------------------------------

    def _check_connect(self, timeout: float, processes: Iterable[Any] = ()) -> None:
        self.starting_processes = check_processes(processes)
        if not self.schemes:
            raise RuntimeError(
                "no scheme of this bus has been initialised; call init_on_sender() or init_on_receiver() on each first"
            )
        check_timeout(timeout)

    async def _initial_sources(self) -> dict[str, Source | None]:
        if self.role != "sender":
            return {}
        return {topic: await scheme.initial_source(None) for topic, scheme in self.schemes.items()}

    async def _connect(self, initial: Mapping[str, Source | None], timeout: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        for scheme in list(self.schemes.values()):
            await scheme.meet_sender(None, max(0.0, deadline - loop.time()))
        for scheme in list(self.schemes.values()):
            # A receiver's HELLO has all its models, before it waits for the first of them.
            scheme.register_receiver()
        for topic, scheme in list(self.schemes.items()):
            remaining = max(0.0, deadline - loop.time())
            if self.role == "sender":
                await scheme.connect_sender(initial[topic], remaining)
            else:
                await scheme.connect_receiver(None, remaining)

    async def _extract(self, weights: Mapping[str, Any], workers: list[int] | None) -> dict[str, Source]:
        """Extract the sources from what the user gave. The blocking API calls this in its caller's thread. Raises
        ValueError, before anything is extracted, for unknown models or workers, or if there are no models; afterwards,
        if some weights are for single workers and others for all."""
        if not isinstance(weights, Mapping):
            raise TypeError(f"a bus takes {{model_id: weights}}, not {type(weights).__name__}")
        if not weights.keys() <= self.schemes.keys():
            unknown = sorted(weights.keys() - self.schemes.keys())
            raise ValueError(f"unknown model_id {unknown}: this bus has {sorted(self.schemes)}")
        if not weights:
            raise ValueError("nothing to publish: name at least one model_id")
        self.trainer_link().check_workers(workers)
        sources: dict[str, Source] = {}
        for topic, given in weights.items():
            scheme = self.schemes[topic]
            source = given.source if isinstance(given, Extracted) else scheme.extract_at_once(given)
            sources[topic] = await scheme.extract_source(given, workers) if source is None else source
        plain = sorted(topic for topic, source in sources.items() if not isinstance(source, Mapping))
        for topic, source in sources.items() if plain and workers is None else ():
            if isinstance(source, Mapping) and (self.num_workers is None or len(source) < self.num_workers):
                raise ValueError(
                    f"{topic!r} has weights for single workers, and {plain} for all workers: publish them in separate "
                    "calls, or name the workers of all these models with worker_ids="
                )
        return sources

    def _extract_at_once(self, weights: Mapping[str, Any]) -> dict[str, Source]:
        """:meth:`_extract` for all workers, without waiting, if the weights need no preparation, and no other caller is
        preparing weights; otherwise an empty dict."""
        if self._extraction_lock.waiting or self._extraction_lock.locked() or type(weights) is not dict:
            return {}
        found: dict[str, Source] = {}
        for topic, given in weights.items():
            scheme = self.schemes.get(topic)
            if scheme is None or (flat := scheme.extract_at_once(given)) is None:
                return {}
            found[topic] = flat
        return found

    async def _extract_in_order(
        self, weights: Mapping[str, Any], workers: list[int] | None, timeout: float
    ) -> dict[str, Source]:
        """:meth:`_extract`, after the callers before: otherwise a caller whose ``prepare_weights`` takes long could
        publish older weights as the newer version. :meth:`Publishing.publish` keeps the order, if nothing is awaited in
        between. Raises AckTimeout if the others take longer."""
        late = (
            f"nothing was published: the prepare_weights of an earlier publication did not return within {timeout:g} s"
        )
        await self._extraction_lock.acquire_until(asyncio.get_running_loop().time() + timeout, lambda: late)
        try:
            return await self._extract(weights, workers)
        finally:
            self._extraction_lock.release()

    async def announce(
        self, weights: Mapping[str, Any], worker_ids: Workers, metadata: Metadata, *, stages: bool = False
    ) -> int:
        # Publish the weights, or stage them; returns the version.
        encoded, workers, link = encode_metadata(metadata), as_workers(worker_ids), self.trainer_link()
        if workers is not None or not (sources := self._extract_at_once(weights)):
            sources = await self._extract_in_order(weights, workers, DEFAULT_TIMEOUT)
        return await self._publish(link, sources, workers, encoded, DEFAULT_TIMEOUT, stages=stages)

    async def await_staged(
        self, version: int, worker_ids: Workers, timeout: float, models: list[str] | None, quorum: int | None
    ) -> None:
        # Sender: wait until workers have staged this version, or a newer one. Raises PartialSendError, with a reason
        # for each that has not; NotConnected if it is for too few workers; ValueError if it was dropped.
        link, workers = self._check_awaited(version, worker_ids, timeout, quorum)
        machine = link.end_fast_path()
        machine.check_not_dropped(version)
        progress = machine.progress
        chosen = progress.to_stage(version, models or list(machine.targets.models)) if workers is None else workers
        if not chosen or len(chosen) < (quorum or 0):
            raise NotConnected(f"version {version} is for {len(chosen)} connected workers, quorum={quorum}")

        def outcome() -> Outcome:
            link.end_fast_path().check_open()
            machine.check_not_dropped(version)
            return progress.of(version, chosen, models, staged=True)

        await link.wait(lambda: outcome().is_over(quorum), timeout)
        link.check_outcome(outcome(), quorum, version, timeout, "staged")

    async def commit_and_wait(
        self, version: int, worker_ids: Workers, timeout: float, models: list[str] | None, quorum: int | None
    ) -> None:
        # Sender: commit the staged version, and wait until workers have applied it. ValueError: it is not staged.
        link, workers = self._check_awaited(version, worker_ids, timeout, quorum)
        machine = link.end_fast_path()
        staged = machine.targets.staged
        machine.commit(version)
        assert staged is not None
        link.observer.emit("publish.committed", link.observer.traces.get(version))
        link.act_on_changes()
        if self.calls is not None:
            self.calls.begin(version, None if staged.workers is None else sorted(staged.workers), sorted(staged.models))
        await link.wait_applied(version, workers, models, timeout, link.loop.time(), self.calls, quorum)

    def drop_staged(self, version: int) -> None:
        # Sender: no worker applies the staged version. Raises ValueError: this version is not staged.
        link = self.trainer_link()
        machine = link.end_fast_path()
        machine.check_staged(version)
        link.observer.end(version, DROPPED)
        machine.drop()
        link.act_on_changes()

    def _check_awaited(
        self, version: int, worker_ids: Workers, timeout: float, quorum: int | None
    ) -> tuple[TrainerLink, list[int] | None]:
        """The sender's link, and the workers to wait for. Raises ValueError if there is no such version or worker, or
        the quorum is larger than the number of workers."""
        check_timeout(timeout)
        link = self.trainer_link()
        if not 0 < version <= link.issued:
            raise ValueError(f"version {version} has not been published; the newest is {link.issued}")
        workers = as_workers(worker_ids)
        link.check_workers(workers, quorum)
        return link, workers

    async def _publish(
        self,
        link: TrainerLink,
        sources: Mapping[str, Source],
        workers: list[int] | None,
        metadata: bytes,
        timeout: float,
        *,
        stages: bool = False,
    ) -> int:
        """Publish or stage the extracted weights. Raises ValueError if some are for single workers behind a relay."""
        transports = {topic: self.schemes[topic].carrier for topic in sources}
        chosen = {*(workers or ()), *(w for s in sources.values() if not isinstance(s, FlatWeights) for w in s)}
        behind = link.machine.relayed.workers
        for worker in chosen:
            if worker in behind and worker not in link.machine.peers:
                raise ValueError(
                    f"worker {worker} is behind relay {behind[worker].relay}, which passes on only weights for all "
                    "workers: publish without worker_ids, or connect this worker to the sender directly"
                )
        deadline = link.loop.time() + timeout
        version = await link.publish(sources, transports, workers, deadline=deadline, metadata=metadata, stages=stages)
        if self.on_published is not None:
            link.machine.targets.when_target(version, partial(self.on_published, version, sorted(chosen) or None))
        if self.calls is not None and not stages:
            self.calls.begin(version, workers, list(sources))
        return version

    async def announce_and_wait(
        self,
        weights: Mapping[str, Any],
        worker_ids: Workers,
        timeout: float,
        metadata: Metadata,
        quorum: int | None = None,
    ) -> int:
        # Publish, and wait until all workers that should have the version have applied it, or as many as the quorum
        # says. Raises NotConnected, with nothing published, if too few workers are there; PartialSendError, with a
        # reason for each worker that has not applied the version.
        check_timeout(timeout)
        encoded, workers, link = encode_metadata(metadata), as_workers(worker_ids), self.trainer_link()
        try:
            if workers is not None or not (sources := self._extract_at_once(weights)):
                link.require_workers(weights, workers, quorum)
                sources = await self._extract_in_order(weights, workers, timeout)
            begun = link.loop.time()
            is_plain = workers is None and quorum is None and not (encoded or self.calls)
            version = link.publish_on_fast_path(sources, self.schemes, timeout) if is_plain else None
            if version is not None:
                if self.on_published is not None:
                    self.on_published(version, None)
                if not await link.complete_on_fast_path(version):
                    await link.wait_applied(version, None, list(sources), timeout, begun)
                if link.observer.durations is not None:
                    link.observer.durations.observe(link.loop.time() - begun)
                return version
            present = link.require_workers(sources, workers, quorum)
            version = await self._publish(link, sources, workers, encoded, timeout)
        except AckTimeout as error:  # nothing was published
            waiting = workers or link.machine.membership.expected()
            raise PartialSendError({}, {worker: AckTimeout(*error.args) for worker in waiting}) from error
        await link.wait_applied(version, workers, list(sources), timeout, begun, self.calls, quorum, present)
        return version

    async def await_version(
        self, version: int, worker_ids: Workers, timeout: float, models: list[str] | None, quorum: int | None = None
    ) -> None:
        # Sender: wait until workers have applied a version. Receiver: wait until this worker has.
        check_timeout(timeout)
        if self.role == "receiver":
            if quorum is not None:
                raise ValueError("quorum is for the sender: a receiver waits for itself")
            await self.worker_link().wait_version(version, models or list(self.schemes), timeout)
            return
        link, workers = self._check_awaited(version, worker_ids, timeout, quorum)
        await link.wait_applied(version, workers, models, timeout, link.loop.time(), self.calls, quorum)

    async def verify_model(self, model_id: str, worker_ids: Workers, timeout: float) -> Differences:
        # Sender: compare the tensors of the workers' models with those of the versions that they should have.
        check_timeout(timeout)
        link, workers = self.trainer_link(), as_workers(worker_ids)
        link.check_workers(workers)
        workers = link.machine.membership.eligible([model_id]) if workers is None else workers
        return await verify(link, model_id, workers, timeout)

    async def await_lag(self, models: list[str], max_lag: int, timeout: float) -> int:
        # Receiver: wait until each of these models is at most max_lag versions behind the sender.
        check_count("max_lag", max_lag, least=0)
        check_timeout(timeout)
        return await self.worker_link().wait_lag(models, max_lag, timeout)

    # -- the same in both APIs ----------------------------------------------------------------------------------------

    def _bus_and_models(self) -> tuple[BusCore, Collection[str]]:
        return self, self.schemes

    def _open_bus_and_models(self) -> tuple[BusCore, list[str] | None]:
        return self, None

    def hold(self: ModelsOnBus) -> Hold[Shown]:
        """A block (``with`` or ``async with``) in which this receiver applies no update to any model of its bus. In
        ``with scheme.hold() as held``, ``held.version`` and ``held.metadata`` belong to the weights that the block
        reads; with ``bus.hold()``, to the newest version that any model of the bus shows."""
        bus, models = self._open_bus_and_models()
        return bus.hold_of(bus.schemes if models is None else models)

    @property
    def version(self: ModelsOnBus) -> int:
        """Sender: the newest version published on this bus; a version that a worker has refused does not count.
        Receiver: the version that the model shows; of a bus, the newest that any of its models shows. 0: none.

        On a receiver it changes together with the model: inside a ``hold()`` it is the version that the block reads.
        """
        bus, models = self._bus_and_models()
        if isinstance(link := bus.link, TrainerLink):
            return link.machine.targets.published
        return link.newest_shown(models).version if isinstance(link, WorkerLink) else bus.unlinked_version

    @property
    def epoch(self: ModelsOnBus) -> str:
        """Identifies the sender whose versions count: this sender, or the one that a receiver follows. 37 characters,
        which sort by the senders' age; empty while there is none."""
        bus, _ = self._bus_and_models()
        if isinstance(link := bus.link, TrainerLink):
            return epoch_text(link.machine.membership.epoch)
        return epoch_text(link.machine.session.epoch) if isinstance(link, WorkerLink) else ""

    @property
    def metadata(self: ModelsOnBus) -> dict[str, Any]:
        """A copy of the ``metadata=`` that was published with :attr:`version`; empty if there was none. On a receiver
        it changes together with the model, as the version does."""
        bus, models = self._bus_and_models()
        return bus.metadata_of(models)

    def state_dict(self: ModelsOnBus) -> dict[str, int]:
        """Sender: the state that a checkpoint must keep so that versions continue: ``{"version": …}``.

        Raises:
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        bus, _ = self._bus_and_models()
        bus.check_not_receiver()
        return {"version": bus.version}

    def load_state_dict(self: ModelsOnBus, state: Mapping[str, int]) -> None:
        """Sender: continue from the version of a checkpoint: the next publication gets that version plus one. Call this
        before or after ``connect``; all schemes of a bus share the version.

        Raises:
            ValueError: this is not such a state, or its version is older than the current one; nothing was changed.
            ClosedError: this bus was shut down.
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        bus, _ = self._bus_and_models()
        bus.check_not_receiver()
        version = state.get("version") if isinstance(state, Mapping) else None
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < MAX_VERSION:
            raise ValueError(f"a sender's state is {{'version': a whole number from 0}}, not {state!r}")
        if bus.is_shut_down:
            raise ClosedError("this bus was shut down; construct another, and load the state into it")
        bus.read_link(lambda: bus.continue_from(version))

    @property
    def closed(self: ModelsOnBus) -> bool:
        """True once this side was shut down, or the sender has said goodbye."""
        bus, _ = self._bus_and_models()
        if isinstance(link := bus.link, WorkerLink) and link.machine.session.ended is not None:
            return True
        return self.is_shut_down or bus.is_shut_down

    def status(self: ModelsOnBus) -> BusStatus:
        """Sender: for each worker its applied version, target, lag, last seen, and state. Receiver: its own version,
        and its sender's ``state`` and ``last_seen``. ``refused`` counts what was refused because of keys."""
        bus, models = self._bus_and_models()
        return bus.read_link(lambda: BusStatus({}, {}) if bus.link is None else bus.link.status(list(models)))

    def hold_of(self, models: Collection[str]) -> Hold[Shown]:
        self.check_open("receiver")
        assert self.gate is not None
        return Hold(self.gate, lambda: self.newest_shown(models).shown)

    def newest_shown(self, models: Collection[str]) -> Acting:
        # Receiver: the newest version that any of these models shows.
        return self.link.newest_shown(models) if isinstance(self.link, WorkerLink) else Acting(0, 0)

    def metadata_of(self, models: Collection[str]) -> dict[str, Any]:
        if isinstance(link := self.link, TrainerLink):
            return decode_metadata(self.read_link(lambda: link.machine.targets.metadata))
        return self.newest_shown(models).shown.metadata

    def check_not_receiver(self) -> None:
        if self.role == "receiver":
            raise RuntimeError("a receiver gets its versions from the sender; save and load the sender's state")

    def continue_from(self, version: int) -> None:
        link = self.link if isinstance(self.link, TrainerLink) else None
        now = self.unlinked_version if link is None else link.machine.targets.version
        if version < now:
            raise ValueError(
                f"this sender is at version {now} already, and versions never go back: version {version} cannot be "
                "loaded; load a checkpoint before the first publication"
            )
        self.unlinked_version = version
        if link is not None:
            link.continue_from(version)

    @property
    def dropped(self) -> dict[str, int]:
        """How many messages were dropped, by reason: malformed, oversized, unknown layout or peer, another epoch."""
        return {} if self.link is None else dict(self.link.dropped)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """``(host, port)`` at which this process serves metrics; None: it does not, or not yet."""
        return None if self.link is None or self.link.metrics is None else self.link.metrics.address

    def report(self) -> Report:
        """The report that ``asyncsync top`` shows of this sender. Raises NotConnected if it is not connected."""
        return self.read_link(self.trainer_link().report)

    def newest_target(self) -> int:
        # Receiver: the newest version that any of its models shows or should have; 0: none.
        if not isinstance(link := self.link, WorkerLink):
            return 0
        return max([link.newest_shown(self.schemes).version, *list(link.machine.targets.values())])

    def check_fenced(self) -> None:
        # Receiver: raise Fenced if another process has taken this worker's place.
        if isinstance(link := self.link, WorkerLink) and isinstance(ended := link.machine.session.ended, Fenced):
            raise Fenced(*ended.args)

    def check_loop(self) -> None:
        if self.link is not None and not self.is_shut_down and not self.link.loop.is_closed():
            self.link.check_loop()


def _disagreement(name: str, there: int | None, given: int) -> ValueError:
    return ValueError(
        f"{name} is {there} already, not {given}: the constructor, init_on_sender() and all schemes of one bus must "
        "agree"
    )


def join_buses(schemes: Iterable[Member]) -> Any:
    """Move schemes that each have a bus of their own onto one bus, before they are initialised, so that one update can
    carry all their models. Either all schemes are blocking, or all are asynchronous.

    The common bus is the one that some of them share already, else the one with an explicit endpoint, else any. Pickled
    copies that are made from now on find each other in a worker; copies made earlier keep their old address.

    Returns the common bus; None if there are no schemes, or if they share several buses already. Raises, with nothing
    changed, ValueError if there are several explicit endpoints, or settings that one bus cannot have; RuntimeError if a
    scheme is initialised or connected already.
    """
    schemes = list(schemes)
    for scheme in schemes:
        if scheme.role is not None or scheme.is_registered or scheme.is_shut_down or scheme.bus.link is not None:
            raise RuntimeError("move schemes onto one bus before init_on_sender(), init_on_receiver() and connect()")
    own = [scheme for scheme in schemes if scheme.has_own_bus]
    shared = list(dict.fromkeys(scheme.bus for scheme in schemes if not scheme.has_own_bus))
    if len(shared) > 1:
        return None
    buses = shared + [scheme.bus for scheme in own]
    if len(buses) < 2:
        return buses[0] if buses else None
    explicit = [bus for bus in buses if bus in shared or not bus.drawn]
    endpoints = sorted({bus.endpoint for bus in explicit})
    if len(endpoints) > 1:
        raise ValueError(
            f"these schemes have several endpoints ({', '.join(endpoints)}), so no update could carry all their "
            "models: construct one bus = Bus(endpoint=…) and give it to each of them (bus=bus)"
        )
    common = (explicit or buses)[0]
    settings = {}
    for name, default in SHARED.items():  # a connect_endpoint like the bus's endpoint is no setting
        values = {getattr(bus, name) for bus in buses if getattr(bus, name) not in (default, bus.endpoint)}
        if len(values) > 1:
            argument = ARGUMENTS.get(name, name)
            raise ValueError(
                f"the schemes of one bus share its {argument}, but these have {sorted(values, key=str)}: construct one "
                f"bus = Bus({argument}=…) and give it to each of them (bus=bus)"
            )
        if values:
            settings[name] = values.pop()
    vars(common).update(settings)
    for scheme in own:
        scheme.move_to(common)
    return common
