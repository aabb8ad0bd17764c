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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from asyncsync.bus.link import EXIT_SECONDS, check_timeout
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink, Source
from asyncsync.bus.starting import check_processes
from asyncsync.bus.status import WorkerStatus, receiver_status, sender_status
from asyncsync.errors import AckTimeout, ClosedError, Fenced, NotConnected, PartialSendError
from asyncsync.model.gate import Gate
from asyncsync.model.readers import Hold
from asyncsync.net.endpoint import check_endpoint, draw_endpoint, is_plaintext_beyond_loopback
from asyncsync.protocol.publisher import Settings

if TYPE_CHECKING:
    from asyncsync.schemes.core import SchemeCore

__all__ = ["DEFAULT_TIMEOUT", "BusCore"]

DEFAULT_TIMEOUT = 60.0
LOOP_ENDED = (
    "this bus was shut down at the end of the event loop that it was connected on: use it within the same asyncio.run()"
)
MAX_VERSION = 1 << 62  # of a checkpoint: there is room left to count on
CONFIGURATION = (
    "endpoint", "connect_endpoint", "num_workers", "min_workers", "allow_plaintext", "checksum", "drawn", "_uid",
)  # fmt: skip

T = TypeVar("T")

Extract = Callable[[], Source]
"""Takes a source's values, ready to be packed."""
ExtractAll = Callable[[], Mapping[str, Source]]

# Copies of one shared bus that were pickled apart find each other again in the worker: one connection per worker_idx.
_receiving: weakref.WeakValueDictionary[tuple[str, int, int], BusCore] = weakref.WeakValueDictionary()


class BusCore:
    """One address for any number of models, without an API.

    Args:
        endpoint: where the sender binds: ``ipc:///path`` or ``tcp://HOST:PORT``; None draws a private ipc path.
        connect: where workers connect, if that differs (``tcp://0.0.0.0:5555`` is bound, but not connected to).
        num_workers: fixed number of workers (0 … num_workers−1); None: elastic, they come and go.
        min_workers: how many an elastic sender needs for ``connect`` and ``send_async``; 0: it can start alone.
        allow_plaintext: allow addresses that other hosts can reach, without encryption.
        checksum: CRC-32 over every payload; None: on plaintext tcp beyond loopback only.

    Attributes:
        drawn: whether the address was drawn, and not given.

    Raises:
        ValueError: an address that cannot work or is not safe; names the remedy.
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
    ) -> None:
        self.drawn = endpoint is None
        endpoint = draw_endpoint() if endpoint is None else endpoint
        self.endpoint = check_endpoint(endpoint, allow_plaintext=allow_plaintext)
        self.connect_endpoint = check_endpoint(
            endpoint if connect is None else connect, allow_plaintext=allow_plaintext
        )
        if num_workers is not None:
            _check_count("num_workers", num_workers)
        _check_count("min_workers", min_workers, least=0)
        _check_quorum(num_workers, min_workers)
        self.num_workers = num_workers
        self.min_workers = min_workers
        self.allow_plaintext = allow_plaintext
        self.checksum = checksum
        self._uid = secrets.token_hex(8)
        self._reset()

    def _reset(self) -> None:
        self._role: str | None = None
        self._pid = 0
        self._schemes: dict[str, SchemeCore] = {}
        self._link: SenderLink | ReceiverLink | None = None
        self._gate: Gate | None = None
        self._worker: int | None = None
        self._late = False
        self._constructed = self.num_workers  # as the constructor said; init_on_sender() may say it instead
        self._starting: tuple[Any, ...] = ()  # workers' processes, to be watched while connect() waits
        self._closed = False
        self._why_closed = "this scheme or bus was shut down"
        self._preparing = asyncio.Lock()  # held by a publication until it is ready to be packed
        self._in_line = 0  # publications that wait for it
        self._carried = 0  # the version that a sender counts on from
        self._converted: BusCore | None = None
        # Told on the loop of each version, and for whom it is, before anybody waits for acknowledgements.
        self._on_published: Callable[[int, list[int] | None], None] | None = None
        self._origin: Callable[[], int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CONFIGURATION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r}, role={self._role}, models={sorted(self._schemes)})"

    # -- schemes join -----------------------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        beyond = is_plaintext_beyond_loopback(self.endpoint)
        return Settings(checksum=beyond if self.checksum is None else self.checksum)

    def _check_role(self, role: str) -> None:
        if self._role is not None and self._pid != os.getpid():
            if self._link is not None:
                raise RuntimeError(
                    "this scheme or bus was connected before the fork; a forked child cannot use it: pass it on "
                    "before connecting"
                )
            self._reset()
        if self._role not in (None, role):
            raise RuntimeError(
                f"this scheme or bus is a {self._role} in this process; a {role} needs a scheme of its own "
                "(pickle it, or construct another)"
            )

    def _join(self, scheme: SchemeCore, role: str, topic: str, num_workers: int | None = None) -> None:
        self._check_role(role)
        other = self._schemes.get(topic)
        if other is not None and other is not scheme:
            raise ValueError(f"this bus has a scheme for {topic!r} already; give each its own model_id")
        if self._closed:
            raise ClosedError("this scheme or bus was shut down; construct another")
        if num_workers is not None:
            self._set_workers(num_workers, private=scheme._own_bus)
        self._role, self._pid = role, os.getpid()
        self._schemes = {t: s for t, s in self._schemes.items() if s is not scheme} | {topic: scheme}
        if role == "receiver" and self._gate is None:
            self._gate = Gate()

    def _set_workers(self, num_workers: int, *, private: bool) -> None:
        _check_count("num_workers", num_workers)
        said = self._constructed if private and self._link is None else self.num_workers
        if said not in (None, num_workers) or (self._link is not None and self.num_workers != num_workers):
            raise ValueError(
                f"num_workers is {self.num_workers} already, not {num_workers}: the constructor, init_on_sender() and "
                "all schemes of one bus have to agree"
            )
        _check_quorum(num_workers, self.min_workers)
        self.num_workers = num_workers

    def _set_least(self, min_workers: int, *, private: bool) -> None:
        _check_count("min_workers", min_workers, least=0)
        if self.min_workers != min_workers and (self.min_workers != 1 or self._link is not None or not private):
            raise ValueError(
                f"min_workers is {self.min_workers} already, not {min_workers}: the constructor, init_on_sender() and "
                "all schemes of one bus have to agree"
            )
        _check_quorum(self.num_workers, min_workers)
        self.min_workers = min_workers

    def _for_receiver(self, worker: int | None) -> BusCore:
        """The bus that schemes pickled apart share in this worker."""
        if worker is None or self._role == "sender":
            self._late = True
            return self
        return self._share(worker)

    def _share(self, worker: int) -> BusCore:
        key = (self._uid, worker, os.getpid())
        shared = _receiving.get(key)
        if shared is None or shared._closed:
            _receiving[key] = shared = self
        if type(shared) is not type(self):
            raise ValueError(
                f"worker {worker} has an asynchronous and a blocking scheme of one bus in this process; convert all of "
                "them (scheme.blocking, scheme.aio), or none"
            )
        return shared

    def _twin(self, kind: type[BusCore]) -> BusCore:
        """A copy with the other API; the schemes of one bus that are converted share it."""
        twin = self._converted
        if twin is None or twin._closed or type(twin) is not kind:
            twin = self._converted = kind.__new__(kind)
            twin.__setstate__(self.__getstate__())
        twin._carried = max(twin._carried, self._carried)
        return twin

    def _look(self, function: Callable[[], T]) -> T:
        """Look at the link's state, where it does not change meanwhile."""
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

    def _open_sender(self) -> SenderLink:
        self._check_open("sender")
        if self._link is None:
            link = SenderLink(self.endpoint, self.num_workers, self.min_workers, self._settings())
            link.origin = self._origin
            link.carry_on(self._carried)
            self._link = link
            self._end_with_the_loop(link)
        return self._sender()

    def _stand_for(self, origin: Callable[[], int]) -> None:
        """Sender: what is published from now on stands for the version of the root of a tree that this tells, when its
        values are taken."""
        self._origin = origin
        if isinstance(self._link, SenderLink):
            self._link.origin = origin

    def _open_receiver(self, worker: int) -> ReceiverLink:
        self._check_open("receiver")
        if self._worker not in (None, worker):
            raise ValueError(f"this scheme or bus is worker {self._worker} already; it cannot be worker {worker} too")
        if self._late and self._share(worker) is not self:
            raise ValueError(
                f"another copy of this bus is worker {worker} in this process already; "
                "pass worker_idx to init_on_receiver(), so that schemes pickled apart find each other"
            )
        self._worker = worker
        if self._link is None:
            assert self._gate is not None
            self._link = ReceiverLink(self.connect_endpoint, worker, self._settings(), self._gate)
            self._end_with_the_loop(self._link)
        return self._receiver()

    def _end_with_the_loop(self, link: SenderLink | ReceiverLink) -> None:
        reference = weakref.ref(self)

        async def end() -> None:
            if (bus := reference()) is None:
                await link.shutdown()
            else:
                bus._why_closed = LOOP_ENDED
                await bus._shutdown(EXIT_SECONDS)

        link.until_the_loop_ends(end)

    # -- coroutines on the link's loop --------------------------------------------------------------------------------

    async def _connect(self, initial: Mapping[str, Extract | None], timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        for scheme in list(self._schemes.values()):
            # A receiver says hello with all its models before it waits for the first of them.
            scheme._register()
        for topic, scheme in list(self._schemes.items()):
            remaining = max(0.0, deadline - asyncio.get_running_loop().time())
            if self._role == "sender":
                await scheme._connect_sender(initial[topic], remaining)
            else:
                await scheme._connect_receiver(None, remaining)

    async def _initial(self) -> dict[str, Extract | None]:
        """What each scheme of a sender sends when it connects."""
        if self._role != "sender":
            return {}
        return {topic: await scheme._initial(None) for topic, scheme in self._schemes.items()}

    def _check_connect(self, timeout: float, processes: Iterable[Any] = ()) -> None:
        self._starting = check_processes(processes)
        if not self._schemes:
            raise RuntimeError(
                "no scheme of this bus has been initialised; call init_on_sender() or init_on_receiver() on them first"
            )
        check_timeout(timeout)

    def _check_publish(
        self, weights: Mapping[str, Any], worker_ids: int | Iterable[int] | None
    ) -> tuple[SenderLink, list[int] | None]:
        """Refuse what cannot be published, before anything is done."""
        if not weights.keys() <= self._schemes.keys():
            unknown = sorted(weights.keys() - self._schemes.keys())
            raise ValueError(f"unknown model_id {unknown}: this bus has {sorted(self._schemes)}")
        if not weights:
            raise ValueError("nothing to publish: name at least one model_id")
        link = self._sender()
        return link, None if worker_ids is None else link.check_workers(as_workers(worker_ids))

    async def _publish(self, weights: Mapping[str, Any], worker_ids: int | Iterable[int] | None) -> int:
        workers = as_workers(worker_ids)
        extract = await self._extract_in_turn(weights, workers, DEFAULT_TIMEOUT)
        return await self._publish_sources(extract, weights, workers)

    async def _extract_in_turn(
        self, weights: Mapping[str, Any], workers: list[int] | None, timeout: float
    ) -> ExtractAll:
        """:meth:`_extract`, when those who called before have been prepared: whoever takes longer over that must not
        publish what is older as the newer version. The next step keeps this order, if nothing is awaited in between.

        Raises:
            AckTimeout: the turn has not come within the timeout.
        """
        if not self._in_line and not self._preparing.locked():
            await self._preparing.acquire()  # at once
        else:
            self._in_line += 1
            try:
                async with asyncio.timeout(timeout):
                    await self._preparing.acquire()
            except TimeoutError:
                raise AckTimeout(
                    "nothing was published: the prepare_weights of a publication before this one has not returned in "
                    f"{timeout:g} s"
                ) from None
            finally:
                self._in_line -= 1
        try:
            return await self._extract(weights, workers)
        finally:
            self._preparing.release()

    async def _extract(self, weights: Mapping[str, Any], worker_ids: int | Iterable[int] | None) -> ExtractAll:
        """Check and prepare; what is returned takes the sources' values when it is called."""
        _, workers = self._check_publish(weights, worker_ids)
        prepared = {topic: await self._schemes[topic]._prepare(given) for topic, given in weights.items()}
        return lambda: {topic: self._schemes[topic]._flatten(source, workers) for topic, source in prepared.items()}

    async def _publish_sources(
        self,
        extract: ExtractAll,
        topics: Iterable[str],
        workers: list[int] | None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        at_once: bool = True,
    ) -> int:
        transports = {topic: self._schemes[topic]._transport() for topic in topics}
        link = self._sender()
        deadline = link.loop.time() + timeout
        version = await link.publish(extract, transports, workers, deadline=deadline, at_once=at_once)
        if self._on_published is not None:
            self._on_published(version, workers)
        return version

    async def _wait_version(
        self,
        version: int,
        worker_ids: int | Iterable[int] | None,
        timeout: float,
        models: list[str] | None,
        *,
        spent: float = 0.0,
    ) -> None:
        """``spent``: seconds of the timeout that are over already."""
        check_timeout(timeout)
        if self._role == "receiver":
            await self._receiver().wait_version(version, models or list(self._schemes), timeout)
        else:
            link = self._sender()
            if not 0 < version <= link.issued:
                raise ValueError(f"version {version} has not been published; the newest is {link.issued}")
            workers = link.check_workers(as_workers(worker_ids))
            await link.wait_version(version, workers, models, timeout, spent=spent)

    async def _send(self, weights: Mapping[str, Any], worker_ids: int | Iterable[int] | None, timeout: float) -> int:
        link = self._link
        is_free = not (self._closed or self._in_line or self._preparing.locked())
        if worker_ids is None and len(weights) == 1 and type(link) is SenderLink and is_free:
            ((topic, given),) = weights.items()
            if link.has_routine(topic, timeout):
                begun = link.loop.time()
                if (version := self._repeat(link, topic, given)) is not None:
                    await link.repeated(version, [topic], timeout, begun)
                    return version
        self._check_send(timeout, weights)
        workers = as_workers(worker_ids)
        try:
            extract = await self._extract_in_turn(weights, workers, timeout)
        except AckTimeout as error:
            raise self._unsent(workers, error) from error
        return await self._send_sources(extract, weights, workers, timeout)

    def _unsent(self, workers: list[int] | None, error: AckTimeout) -> PartialSendError:
        waiting = workers or self._sender().publisher.expected()
        return PartialSendError({}, {worker: AckTimeout(*error.args) for worker in waiting})

    def _repeat(self, link: SenderLink, topic: str, given: Any) -> int | None:
        """:meth:`_publish` where that is routine. None: it is not, and nothing was done."""
        scheme = self._schemes.get(topic)
        flat = None if scheme is None else scheme._at_hand(given)
        version = None if flat is None else link.repeat_one(topic, flat)
        if version is not None and self._on_published is not None:
            self._on_published(version, None)
        return version

    def _check_send(self, timeout: float, topics: Iterable[str]) -> None:
        check_timeout(timeout)
        self._sender().check_quorum(topics)

    async def _send_sources(
        self, extract: ExtractAll, topics: Iterable[str], workers: list[int] | None, timeout: float
    ) -> int:
        link = self._sender()
        link.check_quorum(topics)
        start = link.loop.time()
        if workers is None and link.may_repeat(timeout):
            sources = extract()
            transports = {topic: self._schemes[topic]._transport() for topic in topics}
            if (version := link.repeat(sources, transports)) is not None:
                if self._on_published is not None:
                    self._on_published(version, workers)
                await link.repeated(version, list(topics), timeout, start)
                return version
            extract = lambda: sources  # noqa: E731 (they are published here and now)
        try:
            try:
                version = await self._publish_sources(extract, topics, workers, timeout, at_once=False)
            except AckTimeout as error:  # nothing was published
                raise self._unsent(workers, error) from error
            await link.wait_version(version, workers, list(topics), timeout, spent=link.loop.time() - start)
        finally:
            if link.publisher.outbox and not link.closed:  # there was nobody to wait for, or no time left
                link.settle()
        return version

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

    def hold(self) -> Hold:
        """A block (``with`` or ``async with``) in which no update is applied to any model of this receiver."""
        self._check_open("receiver")
        assert self._gate is not None
        return self._gate.hold()

    @property
    def version(self) -> int:
        """Sender: the newest version published; one that a worker has refused was not. Receiver: the newest version
        that any of its models shows. 0: none.

        On a receiver it switches with the models: inside a :meth:`hold` it does not change.
        """
        if isinstance(self._link, SenderLink):
            return self._link.version
        if isinstance(self._link, ReceiverLink):
            return self._link.version(self._schemes)
        return self._carried

    def state_dict(self) -> dict[str, int]:
        """Sender: what a checkpoint has to keep for versions to go on where they were: ``{"version": …}``.

        Raises:
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        self._check_counts()
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sender: go on from the version of a checkpoint; the next one published is its successor. Before ``connect``
        or after it; all schemes of a bus share the count.

        Raises:
            ValueError: this is no such state, or it would take the version back; nothing was changed.
            ClosedError: this bus was shut down.
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        self._check_counts()
        version = as_version(state)
        if self._closed:
            raise ClosedError("this bus was shut down; construct another, and load the state there")
        self._look(lambda: self._carry_on(version))

    def _check_counts(self) -> None:
        if self._role == "receiver":
            raise RuntimeError("a receiver gets its versions from the sender; save and load the sender's state")

    def _carry_on(self, version: int) -> None:
        check_forward(version, self._link.counted if isinstance(self._link, SenderLink) else self._carried)
        self._carried = version
        if isinstance(self._link, SenderLink):
            self._link.carry_on(version)

    def _shown_origin(self) -> int:
        """Receiver: in a tree, the version of its root that :attr:`version` stands for; else the same."""
        return self._link.origin(self._schemes) if isinstance(self._link, ReceiverLink) else 0

    def _target(self) -> int:
        """Receiver: the newest version that it has been told of; 0: none."""
        if not isinstance(self._link, ReceiverLink):
            return 0
        return max([self.version, *list(self._link.subscriber.targets.values())])

    def _check_fenced(self) -> None:
        """Receiver: raise Fenced if another incarnation of this worker has taken its place, or its sender's."""
        if isinstance(self._link, ReceiverLink) and isinstance(ended := self._link.subscriber.ended, Fenced):
            raise Fenced(*ended.args)

    @property
    def closed(self) -> bool:
        """True once this side was shut down, or the sender has said goodbye."""
        if isinstance(self._link, ReceiverLink) and self._link.subscriber.ended is not None:
            return True
        return self._closed

    @property
    def dropped(self) -> dict[str, int]:
        """How many messages were dropped, by reason: malformed, oversized, unknown layout or peer, another epoch."""
        return {} if self._link is None else dict(self._link.dropped)

    def status(self) -> dict[int, WorkerStatus]:
        """Sender: every worker's state. Receiver: its own, and how its sender is (``state``, ``last_seen``)."""
        return self._status(list(self._schemes))

    def _status(self, models: list[str]) -> dict[int, WorkerStatus]:
        link = self._link
        if isinstance(link, SenderLink):
            return self._look(lambda: sender_status(link, models))
        if isinstance(link, ReceiverLink):
            return self._look(lambda: receiver_status(link, models))
        return {}

    def _check_loop(self) -> None:
        if self._link is not None and not self._closed and not self._link.loop.is_closed():
            self._link.check_loop()


def as_workers(worker_ids: int | Iterable[int] | None) -> list[int] | None:
    """``worker_ids`` as documented: None, one index, or several.

    Raises:
        TypeError: anything else.
        ValueError: an empty list.
    """
    if worker_ids is None:
        return None
    chosen: list[Any] = list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]
    if not all(isinstance(w, int) and not isinstance(w, bool) for w in chosen):
        raise TypeError(f"worker_ids must be None, an int or a list of ints, not {worker_ids!r}")
    if not chosen:
        raise ValueError("worker_ids is empty; pass None for everybody")
    return sorted(set(chosen))


def as_version(state: Mapping[str, int]) -> int:
    """The version in the state of a sender.

    Raises:
        ValueError: this is no such state.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < MAX_VERSION:
        raise ValueError(f"a sender's state is {{'version': a whole number from 0}}, not {state!r}")
    return version


def check_forward(version: int, now: int) -> None:
    """Refuse to count backwards.

    Raises:
        ValueError: it would.
    """
    if version < now:
        raise ValueError(
            f"this sender is at version {now} already, and versions never go back: version {version} cannot be loaded; "
            "load a checkpoint before the first publication"
        )


def _check_count(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least else "an integer from 0"
        raise ValueError(f"{name} must be {kind}, not {value!r}")


def _check_quorum(num_workers: int | None, min_workers: int) -> None:
    if num_workers is not None and min_workers > num_workers:
        raise ValueError(
            f"min_workers={min_workers} of num_workers={num_workers}: a fixed number of workers is waited for whole; "
            "leave num_workers out where they come and go"
        )
