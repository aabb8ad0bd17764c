"""A fleet: replicas of one model, in inference engines, that a trainer updates together.

    fleet = Fleet(scheme, [HTTPReplica("http://10.0.0.2:8000", ranks=2), HTTPReplica("http://10.0.0.3:8000", ranks=2)])
    async with fleet:                            # scheme: a connected sender, with min_workers=0
        await fleet.connect()                    # all replicas serve the newest version, if there is one
        result = await fleet.update()            # as scheme.publish(), then all replicas switch
        result.raise_for_failures()

An update publishes a version, and then updates all replicas at once, each in a task of its own. The fleet pauses a
replica only when its workers have the bytes, so it generates tokens until then. A replica that fails, hangs or dies
delays no other one. The fleet ends the pause whether the update succeeds, fails or is cancelled. But a replica whose
ranks serve different weights stays paused until it is taken in.

If a replica has answered each call, its *state is known*. Then the fleet updates it by start, update and finish.
Otherwise (it is new, was restarted, did not answer, or its trainer has died), it may be anywhere between start and
finish, and a start or finish at the wrong time breaks a vLLM of several ranks for good. The fleet *takes in* such a
replica: it has it connect (again), which loads the newest version, and then sets that version's name. Between updates
the fleet takes in replicas that have come back.
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
from asyncsync.schemes.zmq_and_memory import AutoWeightSyncScheme, SharedMemWeightSyncScheme, ZMQWeightSyncScheme

T = TypeVar("T")
Wait = Callable[[int, list[int], float], Awaitable[None]]
logger = logging.getLogger("asyncsync")

SCHEMES = {SharedMemWeightSyncScheme: "shared", AutoWeightSyncScheme: "auto", ZMQWeightSyncScheme: "zmq"}
ENGINE_LOST = ".EngineLost"  # the end of the error's type name, if a rank could not go back to the version before
INITIAL_NAME = "default"  # vLLM's name for the weights with which it has started
PROBE_SECONDS = 2.0  # to answer which version it serves, between updates
RESUME_SECONDS = 5.0  # to end a pause, also after the update's deadline
CANCEL_SECONDS = 5.0  # to finish switching, after an update was cancelled
REPORT_SECONDS = 1.0  # to wait for the ranks' own reports of a failure
MAX_WATCH_SECONDS = 60.0  # between two attempts to take in a replica


@dataclass(frozen=True)
class Failure:
    """Why a replica does not serve a version, or which step failed after it had loaded the version.

    Attributes:
        replica: its name.
        rank: which of its ranks; None: the replica as a whole.
        phase: ``"wait"`` (for an earlier update or look at it to end), ``"look"``, ``"stage"``, ``"pause"``,
            ``"connect"``, ``"start"``, ``"update"``, ``"finish"``, ``"reset"``, ``"resume"`` or ``"acknowledge"``.
        reason: in words, with the worker's traceback if there is one.
        error: the exception; for a rank, its :class:`asyncsync.RemoteError`, if it has sent one.
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
    """The result of one update.

    Attributes:
        version, epoch: of the published weights.
        serving: by replica, the version that it is known to serve: this one, or an older one after a failure.
        failures: empty if all replicas serve this version, and the sender knows.
        seconds: by replica and phase, how long the phase took.
        published: seconds until the version was published.
    """

    version: int
    epoch: str
    serving: Mapping[str, int]
    failures: tuple[Failure, ...]
    seconds: Mapping[str, Mapping[str, float]]
    published: float

    def raise_for_failures(self) -> None:
        """Raises :class:`FleetError` if there are failures."""
        if self.failures:
            raise FleetError(self)


class FleetError(WeightSyncError):
    """Replicas have failed to serve a version; ``result`` says which, and why. The next update tries again."""

    def __init__(self, result: FleetResult) -> None:
        super().__init__(
            f"version {result.version}: {len({f.replica for f in result.failures})} of {len(result.seconds)} replicas "
            f"have failed: " + "; ".join(map(str, result.failures))
        )
        self.result = result


@dataclass
class _Member:
    replica: Replica
    workers: range
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    serves: str = ""  # the version's name; empty: it is unknown, or not this sender's
    is_state_known: bool = False  # it is certainly not between start and finish
    missed_update: bool = False  # the last update was cancelled, or could not even be tried
    switching_task: asyncio.Task[Any] | None = None  # the task that pauses it, switches it and ends the pause
    seconds: dict[str, float] = field(default_factory=dict)  # how long each phase of the current update took


class _PhaseFailed(Exception):
    def __init__(self, member: _Member, phase: str, error: Exception) -> None:
        self.failures = [_failure(member, None, phase, error)]
        self.was_refused = isinstance(error, Refused)
        super().__init__(str(self.failures[0]))


class Fleet:
    """Replicas that follow one sender.

    Args:
        scheme: the sender, with the asyncio API, for shared memory, ZeroMQ or both. Make it elastic
            (``min_workers=0``), because replicas come and go.
        replicas: :class:`HTTPReplica`, :class:`AsyncLLMReplica`, :class:`LLMReplica`, or your own. Rank r of a replica
            is worker ``first + r`` of the sender, where ``first`` is the number of ranks of the replicas before it.
        connect_timeout: seconds that a replica gets to reach the sender and to load its newest version.
        watch: seconds between two looks at replicas whose ranks the sender has lost, or that are not current for
            another reason than a refused load; 0: do not look, so only updates take replicas in.

    Raises:
        TypeError, ValueError: the scheme is of another kind, there is no replica, two replicas have one name, or
            another argument is invalid.
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
        """By replica, the version of this sender that it is known to serve; 0: the model's own files."""
        names = {member.replica.name: member.serves.rpartition(":") for member in self._members}
        return {name: int(version) for name, (epoch, _, version) in names.items() if epoch == self.scheme.epoch}

    async def connect(self, timeout: float = DEFAULT_TIMEOUT) -> FleetResult:
        """Have all replicas connect to the sender and load its newest version, if there is one."""
        check_timeout(timeout)
        async with self._lock:
            return await self._update_all(self.scheme.version, 0.0, timeout)

    async def update(
        self, weights: Any = None, *, metadata: Metadata = None, timeout: float = DEFAULT_TIMEOUT
    ) -> FleetResult:
        """Publish the weights, and have all replicas serve them. Returns when each replica does, or has failed.

        If it is cancelled, replicas that are switching get 5 s to finish. It raises when their pauses have ended.

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
            return await self._update_all(version, time.monotonic() - began, timeout)

    async def _update_all(self, version: int, published: float, timeout: float) -> FleetResult:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        tasks = {asyncio.create_task(self._update_one(member, version, deadline)): member for member in self._members}

        def cancel() -> None:
            for task, member in tasks.items():
                if member.switching_task is not task:
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

    async def _update_one(self, member: _Member, version: int, deadline: float) -> list[Failure]:
        member.seconds = {}
        try:
            await self._run_phase(member, "wait", member.lock.acquire(), deadline)
            try:
                member.missed_update = True  # until _advance has tried it
                await self._look(member, deadline)
                return await self._advance(member, version, deadline)
            finally:
                member.lock.release()
        except _PhaseFailed as failed:
            member.missed_update |= failed.failures[0].phase == "wait"
            return failed.failures
        except asyncio.CancelledError:
            member.missed_update = True
            raise

    async def _advance(self, member: _Member, version: int, deadline: float) -> list[Failure]:
        """Have a replica serve a version, if it does not yet. Raises _PhaseFailed if its workers did not get the bytes,
        or if the sender did not learn that they have loaded it."""
        if member.serves == weight_version(self.scheme.epoch, version):
            member.missed_update = False
            return []
        if version and member.serves:
            try:
                await self._run_on_ranks(member, "stage", self.scheme.wait_staged, version, deadline)
            except _PhaseFailed as failed:
                if not any(isinstance(failure.error, PeerLost | NotConnected) for failure in failed.failures):
                    raise
                member.serves = ""  # its process is gone, and a new one must connect first
        member.missed_update = False
        return await self._switch(member, version, deadline)

    async def _look(self, member: _Member, deadline: float) -> None:
        """Check whether it still serves what it served last. Raises _PhaseFailed if it does not answer."""
        try:
            name = await self._run_phase(member, "look", member.replica.weight_version(), deadline)
        except _PhaseFailed:
            member.serves = ""
            raise
        if name == INITIAL_NAME:
            member.is_state_known = True  # no update has been started since it started
        if name != member.serves:
            member.serves = ""

    async def _switch(self, member: _Member, version: int, deadline: float) -> list[Failure]:
        """Pause the replica, load the version, and end the pause. The caller holds the member's lock."""
        failures: list[Failure] = []
        member.switching_task = asyncio.current_task()
        try:
            await self._run_phase(member, "pause", member.replica.pause(), deadline)
            if member.serves and member.is_state_known:
                failures = await self._load(member, version, deadline)
            else:
                await self._take_in(member, version, deadline)
            if not failures:
                await self._run_phase(member, "reset", member.replica.reset(), deadline)
        except _PhaseFailed as failed:
            member.serves = ""
            failures = failed.failures
        except asyncio.CancelledError:
            member.serves = ""  # the engine may still carry out the cancelled request, after later ones
            raise
        finally:
            # A replica of mixed versions makes wrong tokens, or its engine ends. It stays paused until it is taken in.
            try:
                limit = asyncio.get_running_loop().time() + RESUME_SECONDS
                if not self._is_mixed(member, failures):
                    await self._run_phase(member, "resume", member.replica.resume(), limit)
            except _PhaseFailed as failed:
                member.serves = ""
                failures = failures or failed.failures
            member.switching_task = None
        if version and not failures:
            await self._run_on_ranks(member, "acknowledge", self.scheme.wait_version, version, deadline)
        return failures

    def _is_mixed(self, member: _Member, failures: list[Failure]) -> bool:
        """Whether a rank has reported that it is neither at the new version nor at the one before, or a rank has
        reported a failure, and not all ranks are at one version. Then it is unknown what the replica serves."""
        types = [failure.error.type_name for failure in failures if isinstance(failure.error, RemoteError)]
        is_lost = any(name.endswith(ENGINE_LOST) for name in types)
        is_mixed = is_lost or (len(types) > 0 and len(self._applied_versions(member)) > 1)
        if is_mixed:
            member.serves = ""
        return is_mixed

    def _applied_versions(self, member: _Member) -> set[int]:
        return {status.version for worker, status in self.scheme.status().items() if worker in member.workers} or {0}

    async def _load(self, member: _Member, version: int, deadline: float) -> list[Failure]:
        """Load a version into a replica whose state is known. Returns failures if it went back to the version before.
        Raises _PhaseFailed if its state is unknown now."""
        replica, before = member.replica, member.serves
        epoch, name = self.scheme.epoch, weight_version(self.scheme.epoch, version)
        member.is_state_known, member.serves = False, ""
        await self._run_phase(member, "start", replica.start(), deadline)
        # The engine gets half the time, so that its ranks can vote and go back before our deadline.
        seconds = (deadline - asyncio.get_running_loop().time()) / 2
        info = {"version": version, "epoch": epoch, "timeout": max(0.1, seconds)}
        failures: list[Failure] = []
        try:
            await self._run_phase(member, "update", replica.update(info), deadline)
        except _PhaseFailed as failed:
            if not failed.was_refused:
                raise
            failures, name = failed.failures, before
        try:
            await self._run_phase(member, "finish", replica.finish(None if failures else name), deadline)
        except _PhaseFailed as failed:
            # After a failed update, the rank that raised refuses `finish`, but vLLM's other ranks need it.
            if not failures or not failed.was_refused:
                raise
        member.is_state_known, member.serves = True, name
        return failures and [*failures, *await self._rank_failures(member, version)]

    async def _take_in(self, member: _Member, version: int, deadline: float) -> None:
        """Load the newest version into a replica in any state, without start and finish. Raises _PhaseFailed."""
        bus, replica = self.scheme.bus, member.replica
        if (count := await self._run_phase(member, "connect", replica.world_size(), deadline)) != replica.ranks:
            wrong = ValueError(f"it has {count} ranks: give its replica object ranks={count}")
            raise _PhaseFailed(member, "connect", wrong)
        own = {"endpoint": bus.connect_endpoint, "model_id": self.scheme.model_id, "first_worker": member.workers[0]}
        try:
            await self._run_phase(member, "connect", replica.connect({**self._info, **own, **replica.init}), deadline)
        except _PhaseFailed as failed:
            if version and failed.was_refused:
                failed.failures += await self._rank_failures(member, version)
            raise
        if version:
            await self._run_on_ranks(member, "acknowledge", self.scheme.wait_version, version, deadline)
        if len(versions := self._applied_versions(member)) > 1:
            raise _PhaseFailed(member, "connect", WeightSyncError(f"its ranks serve versions {sorted(versions)}"))
        name = weight_version(self.scheme.epoch, versions.pop())
        await self._run_phase(member, "finish", replica.set_weight_version(name), deadline)
        member.serves = name

    async def _rank_failures(self, member: _Member, version: int) -> list[Failure]:
        """The failures to load a version that its ranks have reported to the sender."""
        try:
            limit = asyncio.get_running_loop().time() + REPORT_SECONDS
            await self._run_on_ranks(member, "update", self.scheme.wait_version, version, limit)
        except _PhaseFailed as failed:
            return [failure for failure in failed.failures if isinstance(failure.error, RemoteError)]
        return []

    # -- between updates -----------------------------------------------------------------------------------------------

    async def _watch(self, member: _Member) -> NoReturn:
        """Keep taking the replica in when it has come back, or when an update has left it in an unknown state."""
        seconds = self._watch_seconds
        while True:
            await asyncio.sleep(seconds)
            async with member.lock:
                failures = await self._recover(member)
            seconds = min(2 * seconds, MAX_WATCH_SECONDS) if failures else self._watch_seconds
            for failure in failures:
                logger.warning("asyncsync: a replica is not taken in: %s", failure)

    async def _recover(self, member: _Member) -> list[Failure]:
        now, served, status = asyncio.get_running_loop().time(), member.serves, self.scheme.status()
        is_lost = any(worker not in status or status[worker].state == "lost" for worker in member.workers)
        if served and not member.missed_update and not is_lost:
            return []
        try:
            await self._look(member, now + PROBE_SECONDS)
            if member.serves and not member.missed_update:
                return []
            return await self._advance(member, self.scheme.version, now + self._connect_seconds)
        except _PhaseFailed as failed:
            if failed.failures[0].phase != "look":
                return failed.failures
            if isinstance(failed.failures[0].error, TimeoutError):
                member.serves = served  # it may be busy
            return []

    # -- phases --------------------------------------------------------------------------------------------------------

    async def _run_phase(self, member: _Member, phase: str, call: Awaitable[T], deadline: float) -> T:
        """Await a call until the deadline, and note how long it took. Raises _PhaseFailed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                return await call
        except Exception as error:
            raise _PhaseFailed(member, phase, error) from error
        finally:
            member.seconds[phase] = member.seconds.get(phase, 0.0) + loop.time() - began

    async def _run_on_ranks(self, member: _Member, phase: str, wait: Wait, version: int, deadline: float) -> None:
        """The same with one of the scheme's waits, for the member's workers. Raises _PhaseFailed, which names ranks."""
        workers, seconds = list(member.workers), max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            await self._run_phase(member, phase, wait(version, workers, seconds), deadline + REPORT_SECONDS)
        except _PhaseFailed as failed:
            if isinstance(error := failed.failures[0].error, PartialSendError):
                named = sorted(error.failed.items())
                failed.failures = [_failure(member, worker - workers[0], phase, why) for worker, why in named]
            raise


def _failure(member: _Member, rank: int | None, phase: str, error: Exception) -> Failure:
    words = str(error) or "no answer in time"
    reason = words if isinstance(error, Refused) else f"{type(error).__name__}: {words}"
    return Failure(member.replica.name, rank, phase, reason, error)
