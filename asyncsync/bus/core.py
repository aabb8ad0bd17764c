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
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from asyncsync.arguments import as_version, check_count, check_forward, check_quorum
from asyncsync.bus.introduction import Introduction
from asyncsync.bus.link import EXIT_SECONDS, Order
from asyncsync.bus.member import Calls, Member, shared_here
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink
from asyncsync.bus.status import WorkerStatus, receiver_status, sender_status
from asyncsync.errors import ClosedError, Fenced, NotConnected
from asyncsync.model.gate import Gate
from asyncsync.model.readers import Hold
from asyncsync.net.address import tcp_endpoint
from asyncsync.net.endpoint import INTRODUCED, check_endpoint, draw_endpoint, is_plaintext_beyond_loopback
from asyncsync.protocol.metadata import Shown, decode_metadata
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.staging import Acting

__all__ = ["DEFAULT_TIMEOUT", "BusCore"]

DEFAULT_TIMEOUT = 60.0
LOOP_ENDED = "this bus was shut down with the event loop that it was connected on: use it within the same asyncio.run()"
CONFIGURATION = (
    "endpoint", "connect_endpoint", "num_workers", "min_workers", "allow_plaintext", "checksum", "drawn", "_uid",
)  # fmt: skip

# Of the environment: "0" turns off what is shorter in a training loop, in this process.
FAST = "ASYNCSYNC_FAST"

T = TypeVar("T")


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
        self.drawn = endpoint in (None, INTRODUCED)
        endpoint = draw_endpoint() if endpoint is None else endpoint
        self.endpoint = check_endpoint(endpoint, allow_plaintext=allow_plaintext)
        self.connect_endpoint = check_endpoint(
            endpoint if connect is None else connect, allow_plaintext=allow_plaintext
        )
        if num_workers is not None:
            check_count("num_workers", num_workers)
        check_count("min_workers", min_workers, least=0)
        check_quorum(num_workers, min_workers)
        self.num_workers = num_workers
        self.min_workers = min_workers
        self.allow_plaintext = allow_plaintext
        self.checksum = checksum
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
        self._constructed = self.num_workers  # by the constructor; init_on_sender() may set it instead
        self._starting: tuple[Any, ...] = ()  # workers' processes, to be watched while connect() waits
        self._closed = False
        self._why_closed = "this scheme or bus was shut down"
        self._preparing = Order()  # held by a publication until it is ready to be packed
        self._carried = 0  # the version that a sender counts on from
        self._converted: BusCore | None = None
        # Called on the loop with each version, and whom it is for, before anybody waits for acknowledgements.
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
        beyond = is_plaintext_beyond_loopback(self.endpoint)
        checksum = beyond if self.checksum is None else self.checksum
        return Settings(checksum=checksum, fast=os.environ.get(FAST, "1") != "0")

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

    def _join(self, scheme: Member, role: str, topic: str, num_workers: int | None = None) -> None:
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
        check_count("num_workers", num_workers)
        given = self._constructed if private and self._link is None else self.num_workers
        if given not in (None, num_workers) or (self._link is not None and self.num_workers != num_workers):
            raise _disagreement("num_workers", self.num_workers, num_workers)
        check_quorum(num_workers, self.min_workers)
        self.num_workers = num_workers

    def _set_least(self, min_workers: int, *, private: bool) -> None:
        check_count("min_workers", min_workers, least=0)
        if self.min_workers != min_workers and (self.min_workers != 1 or self._link is not None or not private):
            raise _disagreement("min_workers", self.min_workers, min_workers)
        check_quorum(self.num_workers, min_workers)
        self.min_workers = min_workers

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
            link = SenderLink(endpoint, self.num_workers, self.min_workers, self._settings(), keyed=bool(host))
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
                "pass worker_idx to init_on_receiver(), so that schemes pickled apart find each other"
            )
        self._worker = worker
        if self._link is None:
            assert self._gate is not None
            self._link = ReceiverLink(self._introduction or self.connect_endpoint, worker, self._settings(), self._gate)
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
        """A block (``with`` or ``async with``) in which no update is applied to any model of this receiver. ``with
        bus.hold() as held``: ``held.version`` and ``held.metadata`` are the newest that any of its models shows."""
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
        """Sender: the newest version published; one that a worker has refused was not. Receiver: the newest version
        that any of its models shows. 0: none.

        On a receiver it switches with the models: inside a :meth:`hold` it does not change.
        """
        if isinstance(self._link, SenderLink):
            return self._link.version
        if isinstance(self._link, ReceiverLink):
            return self._link.version(self._schemes)
        return self._carried

    @property
    def metadata(self) -> dict[str, Any]:
        """What was published with :attr:`version`, a dict of the caller's own; empty where there was none. On a
        receiver both switch with the models."""
        return self._metadata(self._schemes)

    def _metadata(self, models: Collection[str]) -> dict[str, Any]:
        if isinstance(link := self._link, SenderLink):
            return decode_metadata(self._look(lambda: link.metadata))
        return self._acting(models).shown.metadata

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

    def _target(self) -> int:
        """Receiver: the newest version that it is to have; 0: none."""
        if not isinstance(self._link, ReceiverLink):
            return 0
        return max([self.version, *list(self._link.subscriber.targets.values())])

    def _check_fenced(self) -> None:
        """Receiver: raise Fenced if another incarnation of this worker has taken its place, or its sender's."""
        if isinstance(self._link, ReceiverLink) and isinstance(ended := self._link.subscriber.session.ended, Fenced):
            raise Fenced(*ended.args)

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


def _disagreement(name: str, there: int | None, given: int) -> ValueError:
    return ValueError(
        f"{name} is {there} already, not {given}: the constructor, init_on_sender() and all schemes of one bus have to "
        "agree"
    )
