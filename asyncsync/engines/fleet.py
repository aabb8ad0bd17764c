"""A fleet: replicas of one model, in inference engines, that a trainer updates together.

    fleet = Fleet(scheme, [HTTPReplica("http://10.0.0.2:8000", ranks=2), HTTPReplica("http://10.0.0.3:8000", ranks=2)])
    async with fleet:                            # scheme: a connected sender, with min_workers=0
        await fleet.connect()                    # all replicas serve the newest version, if there is one
        result = await fleet.update()            # as scheme.publish(), then all replicas switch
        result.raise_for_failures()

An update publishes a version, and then drives all replicas at once, each in a task of its own: a replica is paused
when its own bytes are there, so its tokens go on until then. One that fails, hangs or dies delays no other. Whatever
comes of it, also a cancellation, ends the pause.

A replica is *known* while each of its calls was answered. Then a version goes by start, update and finish. Otherwise
(it is new, was restarted, did not answer, or its trainer has died) it may be anywhere between start and finish, and a
vLLM of several ranks is lost for good if either comes at the wrong time. Such a replica is *taken in*: it connects
(again), which loads the newest version, and then gets that version's name. Between updates the fleet looks after
replicas that have come back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from asyncsync.arguments import check_count, check_timeout
from asyncsync.bus.core import DEFAULT_TIMEOUT, Metadata
from asyncsync.engines.replicas import Refused, Replica
from asyncsync.engines.vllm import weight_version
from asyncsync.errors import NotConnected, PartialSendError, PeerLost, RemoteError, WeightSyncError
from asyncsync.runtime.threads import finish
from asyncsync.schemes.aio import WeightSyncScheme
from asyncsync.schemes.shared_memory import AutoWeightSyncScheme, SharedMemWeightSyncScheme
from asyncsync.schemes.zmq import ZMQWeightSyncScheme

T = TypeVar("T")
Wait = Callable[[int, list[int], float], Awaitable[None]]
logger = logging.getLogger("asyncsync")

SCHEMES = {SharedMemWeightSyncScheme: "shared", AutoWeightSyncScheme: "auto", ZMQWeightSyncScheme: "zmq"}
LOST = ".EngineLost"  # the type of what a rank reports that could not go back
NEW = "default"  # what vLLM calls the weights that it has started with
PROBE_SECONDS = 2.0  # for the question what a replica serves, between updates
RESUME_SECONDS = 5.0  # for the end of a pause, also when the deadline has passed
CANCEL_SECONDS = 5.0  # that a replica gets to end what it is in, when an update is cancelled
REPORT_SECONDS = 1.0  # until the ranks' own reports of a failure are here
MOST_SECONDS = 60.0  # between two attempts to take in a replica


@dataclass(frozen=True)
class Failure:
    """Why a replica has not got a version, or serves it with a reservation.

    Attributes:
        replica: its name.
        rank: which of its ranks; None: the replica as a whole.
        phase: ``"stage"``, ``"look"``, ``"pause"``, ``"connect"``, ``"start"``, ``"update"``, ``"finish"``,
            ``"reset"``, ``"resume"`` or ``"acknowledge"``.
        reason: in words, with the worker's traceback if there is one.
        error: what was raised here; of a rank, its :class:`asyncsync.RemoteError`, if it has sent one.
    """

    replica: str
    rank: int | None
    phase: str
    reason: str
    error: Exception

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.replica}{rank} ({self.phase}): {self.reason}"


@dataclass(frozen=True)
class FleetResult:
    """What came of one update.

    Attributes:
        version, epoch: what was published.
        serving: of each replica that serves a version, which: this one or, where it has failed, perhaps the one before.
        failures: empty if all replicas serve this version, and the sender knows.
        seconds: of each replica, how long each phase took.
        published: seconds until the version was published.
    """

    version: int
    epoch: str
    serving: Mapping[str, int]
    failures: tuple[Failure, ...]
    seconds: Mapping[str, Mapping[str, float]]
    published: float

    def raise_for_failures(self) -> None:
        """Raises :class:`FleetError` if there are any."""
        if self.failures:
            raise FleetError(self)


class FleetError(WeightSyncError):
    """Replicas have not got a version; ``result`` says which, and why. Not final: the next update tries again."""

    def __init__(self, result: FleetResult) -> None:
        super().__init__(
            f"version {result.version}: {len({f.replica for f in result.failures})} of {len(result.seconds)} replicas "
            f"have failed: " + "; ".join(map(str, result.failures))
        )
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.result,)


@dataclass
class _Member:
    """A replica, and what the fleet knows of it."""

    replica: Replica
    workers: range
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    serves: str = ""  # the name of the version; empty: not known, or nothing of this sender's
    is_known: bool = False  # whether it is certainly not between start and finish
    has_missed: bool = False  # an update could not be brought to it
    switching: asyncio.Task[Any] | None = None  # what has it paused, or is about to
    seconds: dict[str, float] = field(default_factory=dict)  # of each phase of the update under way


class _Failed(Exception):
    """A phase has failed."""

    def __init__(self, member: _Member, rank: int | None, phase: str, error: Exception) -> None:
        self.failures = [_failure(member, rank, phase, error)]
        self.was_refused = isinstance(error, Refused)
        super().__init__(str(self.failures[0]))


class Fleet:
    """Replicas that follow one sender.

    Args:
        scheme: the sender, of asyncio, for shared memory, ZeroMQ or both. It is elastic (``min_workers=0``), because
            replicas come and go.
        replicas: :class:`HTTPReplica`, :class:`AsyncLLMReplica`, :class:`LLMReplica`, or your own. Rank r of a replica
            is worker ``first + r`` of the sender, where ``first`` is the number of ranks of the replicas before it.
        connect_timeout: seconds that a replica gets to reach the sender and to load its newest version.
        watch: seconds between two looks at replicas whose ranks the sender has lost, or that are not current for
            another reason than a refused load; 0: none, only updates take replicas in.

    Raises:
        TypeError, ValueError: such a scheme cannot be, or two replicas have one name.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        replicas: Iterable[Replica],
        *,
        connect_timeout: float = DEFAULT_TIMEOUT,
        watch: float = 1.0,
    ) -> None:
        backend = next((name for kind, name in SCHEMES.items() if isinstance(scheme, kind)), None)
        if backend is None:
            kinds = ", ".join(kind.__name__ for kind in SCHEMES)
            raise TypeError(f"a fleet's sender is one of asyncsync's {kinds}, not {type(scheme).__name__}")
        check_timeout(connect_timeout)
        check_timeout(watch)
        self.scheme, self._watch_seconds = scheme, watch
        self._members: list[_Member] = []
        first = 0
        for replica in replicas:
            check_count("ranks", replica.ranks)
            if replica.name in (member.replica.name for member in self._members):
                raise ValueError(f"two replicas are called {replica.name!r}: give each a name")
            self._members.append(_Member(replica, range(first, first + replica.ranks)))
            first += replica.ranks
        if not self._members:
            raise ValueError("a fleet has at least one replica")
        self._info = {"scheme": backend, "timeout": connect_timeout}
        self._connect_seconds = connect_timeout
        self._lock = asyncio.Lock()
        self._watches: list[asyncio.Task[NoReturn]] = []

    async def __aenter__(self) -> Fleet:
        if self.scheme.role != "sender":
            raise RuntimeError("a fleet's scheme is a sender: call its init_on_sender(), and connect it")
        if self._watch_seconds:
            self._watches = [asyncio.create_task(self._watch(member)) for member in self._members]
        return self

    async def __aexit__(self, *exc: object) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()
        await finish(asyncio.gather(*watches, return_exceptions=True))
        for member in self._members:
            await member.replica.close()
        for watch in watches:
            if not watch.cancelled():
                watch.result()  # raises

    @property
    def serving(self) -> dict[str, int]:
        """Of each replica that is known to serve a version of this sender, which; 0: the model's own files."""
        names = {member.replica.name: member.serves.rpartition(":") for member in self._members}
        return {name: int(version) for name, (epoch, _, version) in names.items() if epoch == self.scheme.epoch}

    async def connect(self, timeout: float = DEFAULT_TIMEOUT) -> FleetResult:
        """Take in all replicas: they connect to the sender, and load its newest version, if there is one."""
        check_timeout(timeout)
        async with self._lock:
            return await self._everywhere(self.scheme.version, 0.0, timeout)

    async def update(
        self, weights: Any = None, *, metadata: Metadata = None, timeout: float = DEFAULT_TIMEOUT
    ) -> FleetResult:
        """Publish the weights, and have all replicas serve them. Returns when each does, or has failed.

        Cancelled, it raises when no replica is paused any more: those that are switching have 5 s to end that.

        Args:
            weights, metadata: as for the scheme's ``publish``.
            timeout: seconds for each replica, from the publication on.

        Raises:
            ValueError, TypeError, AckTimeout, MemoryError, NotConnected, ClosedError, Fenced: as the scheme's
                ``publish``: nothing was published.
        """
        check_timeout(timeout)
        async with self._lock:
            began = time.monotonic()
            version = await self.scheme.publish(weights, metadata=metadata)
            return await self._everywhere(version, time.monotonic() - began, timeout)

    async def _everywhere(self, version: int, published: float, timeout: float) -> FleetResult:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        tasks = {asyncio.create_task(self._bring(member, version, deadline)): member for member in self._members}

        def cancel() -> None:
            for task, member in tasks.items():
                if member.switching is not task:
                    task.cancel()
            loop.call_later(CANCEL_SECONDS, lambda: [task.cancel() for task in tasks])

        await finish(asyncio.gather(*tasks, return_exceptions=True), cancel)
        return FleetResult(
            version,
            self.scheme.epoch,
            self.serving,
            tuple(failure for task in tasks for failure in task.result()),
            {member.replica.name: dict(member.seconds) for member in self._members},
            published,
        )

    async def _bring(self, member: _Member, version: int, deadline: float) -> list[Failure]:
        """Have one replica serve a version."""
        member.seconds = {}
        try:
            await self._phase(member, "wait", member.lock.acquire(), deadline)
            try:
                member.has_missed = True  # until it is tried
                await self._look(member, deadline)
                return await self._advance(member, version, deadline)
            finally:
                member.lock.release()
        except _Failed as failed:
            member.has_missed |= failed.failures[0].phase == "wait"
            return failed.failures
        except asyncio.CancelledError:
            member.has_missed = True
            raise

    async def _advance(self, member: _Member, version: int, deadline: float) -> list[Failure]:
        """From what it serves to a version. Raises _Failed: it was not tried, or the sender was not told."""
        if member.serves == weight_version(self.scheme.epoch, version):
            member.has_missed = False
            return []
        if version and member.serves:
            await self._stage(member, version, deadline)
        member.has_missed = False
        return await self._switch(member, version, deadline)

    async def _look(self, member: _Member, deadline: float) -> None:
        """See whether it is as it was left. Raises _Failed: it does not answer."""
        try:
            name = await self._phase(member, "look", member.replica.weight_version(), deadline)
        except _Failed:
            member.serves = ""
            raise
        if name == NEW:
            member.is_known = True  # nobody has started an update
        if name != member.serves:
            member.serves = ""

    async def _stage(self, member: _Member, version: int, deadline: float) -> None:
        """Wait until its workers have the bytes. Raises _Failed: one cannot have them."""
        try:
            await self._ranks(member, "stage", self.scheme.wait_staged, version, deadline)
        except _Failed as failed:
            if not any(isinstance(failure.error, PeerLost | NotConnected) for failure in failed.failures):
                raise
            member.serves = ""  # it is another process now, which knows no sender

    async def _switch(self, member: _Member, version: int, deadline: float) -> list[Failure]:
        """One pause, with all that is done in it. The member's lock is held."""
        failures: list[Failure] = []
        member.switching = asyncio.current_task()
        try:
            await self._phase(member, "pause", member.replica.pause(), deadline)
            if member.serves and member.is_known:
                failures = await self._load(member, version, deadline)
            else:
                await self._take_in(member, version, deadline)
            if not failures:
                await self._phase(member, "reset", member.replica.reset(), deadline)
        except _Failed as failed:
            member.serves = ""
            failures = failed.failures
        except asyncio.CancelledError:
            member.serves = ""  # what it was asked last may come after what it is asked now
            raise
        finally:
            # A mixture of versions makes wrong tokens, or ends its engine. It stays paused, until it is taken in.
            try:
                limit = asyncio.get_running_loop().time() + RESUME_SECONDS
                if not self._is_mixed(member, failures):
                    await self._phase(member, "resume", member.replica.resume(), limit)
            except _Failed as failed:
                member.serves = ""
                failures = failures or failed.failures
            member.switching = None
        if version and not failures:
            await self._ranks(member, "acknowledge", self.scheme.wait_version, version, deadline)
        return failures

    def _is_mixed(self, member: _Member, failures: list[Failure]) -> bool:
        """Whether its ranks have told that they are neither at the new version nor at the one before, or not all at the
        same one."""
        told = [failure.error.type_name for failure in failures if isinstance(failure.error, RemoteError)]
        is_mixed = any(name.endswith(LOST) for name in told) or (len(told) > 0 and len(self._versions(member)) > 1)
        if is_mixed:
            member.serves = ""
        return is_mixed

    def _versions(self, member: _Member) -> set[int]:
        """Those that its ranks have applied."""
        return {status.version for worker, status in self.scheme.status().items() if worker in member.workers} or {0}

    async def _load(self, member: _Member, version: int, deadline: float) -> list[Failure]:
        """A version into a replica that is known. Returns why it serves the one before. Raises _Failed: it is not known
        any more."""
        replica, before = member.replica, member.serves
        epoch, name = self.scheme.epoch, weight_version(self.scheme.epoch, version)
        member.is_known, member.serves = False, ""
        await self._phase(member, "start", replica.start(), deadline)
        # The engine's own deadline comes first: then its ranks have time to vote, and to go back.
        seconds = (deadline - asyncio.get_running_loop().time()) / 2
        info = {"version": version, "epoch": epoch, "timeout": max(0.1, seconds)}
        failures: list[Failure] = []
        try:
            await self._phase(member, "update", replica.update(info), deadline)
        except _Failed as failed:
            if not failed.was_refused:
                raise
            failures, name = failed.failures, before
        try:
            await self._phase(member, "finish", replica.finish(None if failures else name), deadline)
        except _Failed as failed:
            # After a failed update, vLLM's ranks that have not raised are in the middle of it, and the last one is not.
            if not failures or not failed.was_refused:
                raise
        member.is_known, member.serves = True, name
        return failures and [*failures, *await self._reports(member, version)]

    async def _take_in(self, member: _Member, version: int, deadline: float) -> None:
        """The newest version into a replica that may be in any state, without start and finish. Raises _Failed."""
        bus, replica = self.scheme.bus, member.replica
        if (count := await self._phase(member, "connect", replica.world_size(), deadline)) != replica.ranks:
            wrong = ValueError(f"it has {count} ranks: give its replica object ranks={count}")
            raise _Failed(member, None, "connect", wrong)
        who = {"endpoint": bus.connect_endpoint, "model_id": self.scheme.model_id, "first_worker": member.workers[0]}
        try:
            await self._phase(member, "connect", replica.connect({**self._info, **who, **replica.init}), deadline)
        except _Failed as failed:
            if version and failed.was_refused:
                failed.failures += await self._reports(member, version)
            raise
        if version:
            await self._ranks(member, "acknowledge", self.scheme.wait_version, version, deadline)
        if len(versions := self._versions(member)) > 1:
            raise _Failed(member, None, "connect", WeightSyncError(f"its ranks serve versions {sorted(versions)}"))
        name = weight_version(self.scheme.epoch, versions.pop())
        await self._phase(member, "finish", replica.set_weight_version(name), deadline)
        member.serves = name

    async def _reports(self, member: _Member, version: int) -> list[Failure]:
        """What its ranks have told the sender of a version that they have not loaded."""
        try:
            limit = asyncio.get_running_loop().time() + REPORT_SECONDS
            await self._ranks(member, "update", self.scheme.wait_version, version, limit)
        except _Failed as failed:
            return [failure for failure in failed.failures if isinstance(failure.error, RemoteError)]
        return []

    # -- between updates -----------------------------------------------------------------------------------------------

    async def _watch(self, member: _Member) -> NoReturn:
        """Take a replica in that has come back, or that an update has left in an unknown state."""
        seconds = self._watch_seconds
        while True:
            await asyncio.sleep(seconds)
            async with member.lock:
                failures = await self._look_after(member)
            seconds = min(2 * seconds, MOST_SECONDS) if failures else self._watch_seconds
            for failure in failures:
                logger.warning("asyncsync: a replica is not taken in: %s", failure)

    async def _look_after(self, member: _Member) -> list[Failure]:
        now, served, status = asyncio.get_running_loop().time(), member.serves, self.scheme.status()
        is_lost = any(worker not in status or status[worker].state == "lost" for worker in member.workers)
        if served and not member.has_missed and not is_lost:
            return []
        try:
            await self._look(member, now + PROBE_SECONDS)
            if member.serves and not member.has_missed:
                return []
            return await self._advance(member, self.scheme.version, now + self._connect_seconds)
        except _Failed as failed:
            if failed.failures[0].phase != "look":
                return failed.failures
            if isinstance(failed.failures[0].error, TimeoutError):
                member.serves = served  # it may be busy
            return []

    # -- phases --------------------------------------------------------------------------------------------------------

    async def _phase(self, member: _Member, phase: str, call: Awaitable[T], deadline: float) -> T:
        """Await a call until the deadline, and note how long it took. Raises _Failed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                return await call
        except Exception as error:
            raise _Failed(member, None, phase, error) from error
        finally:
            member.seconds[phase] = member.seconds.get(phase, 0.0) + loop.time() - began

    async def _ranks(self, member: _Member, phase: str, wait: Wait, version: int, deadline: float) -> None:
        """The same with one of the scheme's waits for these workers. Raises _Failed, which names ranks."""
        workers, seconds = list(member.workers), max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            await self._phase(member, phase, wait(version, workers, seconds), deadline + REPORT_SECONDS)
        except _Failed as failed:
            if isinstance(error := failed.failures[0].error, PartialSendError):
                named = sorted(error.failed.items())
                failed.failures = [_failure(member, worker - workers[0], phase, why) for worker, why in named]
            raise


def _failure(member: _Member, rank: int | None, phase: str, error: Exception) -> Failure:
    words = str(error) or "no answer in time"
    reason = words if isinstance(error, Refused) else f"{type(error).__name__}: {words}"
    return Failure(member.replica.name, rank, phase, reason, error)
