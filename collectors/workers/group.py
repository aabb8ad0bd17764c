"""WorkerGroup: the workers of a collector, wherever they run, as its driver sees them.

A group lives on the process's loop thread: it sends messages there, takes the workers' messages there, and its driver
awaits results there. A :class:`Family` starts the workers' programs, and carries messages. The driver decides what is
rolled out when, and what becomes of the batches.

What workers are to see between two steps is written to a :class:`ControlPage`. Workers of this host read that very
page. To any other worker the group sends what the page says, one message at a time: the next one follows when the
worker has answered, and says what the page says by then.

A worker that is lost ends collection, unless its family may launch it again. Then its collector is made anew, gets the
weights that it should have from the trainer's bus, and does the rollouts that the lost one was to do. Calls wait until
it has connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from anyio import Event, move_on_after
from tensordict import TensorDictBase

from asyncsync.collectors.base import ANSWER_SECONDS
from asyncsync.collectors.trajectories import WholeTrajectories
from asyncsync.collectors.workers.control_page import ControlPage, Wishes
from asyncsync.collectors.workers.messages import Failure, RolloutResult, dumps, loads, note
from asyncsync.collectors.workers.shared_batches import Arrangement, Lease, Places
from asyncsync.collectors.workers.worker import Message, WorkerInfo
from asyncsync.errors import AckTimeout, ClosedError, PeerLost
from asyncsync.runtime import loop_thread
from asyncsync.schemes.remote_calls import RemoteCallCore

logger = logging.getLogger("asyncsync")

T = TypeVar("T")

BY_ITSELF = 0.7
"""Part of a shutdown's time in which workers end by themselves; then their programs are ended."""

APART = 1 << 40
"""So many trajectory identifiers a worker has for itself before those of the one that is launched in its place."""

LASTING = ("pre_hook", "post_hook", "record")
"""Calls whose effect a worker that is launched again is to have, too."""


class Reports(NamedTuple):
    """What a family calls on the loop thread, for one launch of a worker.

    Attributes:
        received: with each message of the worker.
        lost: no more messages will come, because of this error.
        failed: a message cannot be sent or read, though the worker is there.
    """

    received: Callable[[Message], object]
    lost: Callable[[BaseException], object]
    failed: Callable[[BaseException], object]


class Family(ABC):
    """How workers are started, and how messages reach them.

    Attributes:
        shares_memory: whether workers read the group's control page, and write batches to its places.
        restarts: how often a worker that is lost may be launched again.
    """

    shares_memory = False
    restarts = 0

    @abstractmethod
    def open(self, group: WorkerGroup, replay_buffer: Any, schemes: Any) -> bytes | None:
        """Prepare what the workers of this group need, in the thread that constructs the collector; it may wait.
        Returns the pickled replay buffer and schemes, if a worker is not given them otherwise."""

    @abstractmethod
    def start(self, rank: int, reports: Reports) -> None:
        """Start a worker's program, perhaps once more, and return at once."""

    @abstractmethod
    def send(self, rank: int, message: Message) -> None:
        """Send a message, on the loop thread, without waiting. A worker gets its messages in this order, from when it
        has begun. What cannot be sent because the worker is lost is dropped."""

    def batch(self, rank: int, payload: Any) -> TensorDictBase:
        """The batch of a result with this payload. Called in the thread of who wants the batch: it may wait."""
        batch: TensorDictBase = loads(payload)
        return batch

    def remote(self, rank: int) -> Any:
        """What a scheme calls in a worker; None: nothing."""
        return None

    @abstractmethod
    async def end(self, deadline: float) -> None:
        """End all programs by ``deadline`` of ``time.monotonic()``, whatever they do, and release everything. The
        workers have ended before, if they could. Two may do this at a time."""

    @abstractmethod
    def name(self, rank: int) -> str:
        """What the worker is called in errors: "worker 1 (pid 4711)"."""


@dataclass(eq=False)
class _Call:
    """A call to a worker, and its answer: what was raised, or the pickled result."""

    worker: int
    name: str
    arguments: bytes
    number: int
    answer: tuple[Failure | None, Any] | None = None

    @property
    def message(self) -> Message:
        return "call", self.number, self.name, self.arguments


class _Member:
    """A worker, as its group sees it."""

    def __init__(self, rank: int, specification: bytes) -> None:
        self.rank = rank
        self.specification = specification
        self.launches = 0  # beyond the first one
        self.has_begun = self.is_connected = self.is_paused = self.has_ended = False
        self.requests: deque[Message] = deque()  # for rollouts that are not done yet
        self.calls: dict[int, _Call] = {}  # without an answer yet, by their numbers; sent once it has connected
        self.lasting: dict[str, _Call] = {}
        self.unrecorded = 0  # rollouts that its profile lacks
        self.told: Wishes | None = None  # the last ones that were sent
        self.is_being_told = False
        self._timer: asyncio.TimerHandle | None = None

    def give_time(self, timer: asyncio.TimerHandle | None) -> None:
        """This timer, and no earlier one, looks whether a worker that was launched again has connected; None: none."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


class WorkerGroup:
    """The workers of a family.

    Args:
        owner: names their collector in errors.
        connect_timeout: seconds within which a worker that is launched again must connect.
        trajectories: puts together those of all workers' rollouts.

    Attributes:
        results: rollouts that have been done, in the order in which they came.
        infos: what each worker has reported.
        page: what workers are to see between two steps.
        failure: what has ended collection.
        ending: whether the end has begun.
        is_over: whether all workers have ended, and everything is closed.
    """

    def __init__(
        self, family: Family, owner: str, connect_timeout: float = 60.0, trajectories: WholeTrajectories | None = None
    ) -> None:
        self.family = family
        self.results: deque[RolloutResult] = deque()
        self.infos: dict[int, WorkerInfo] = {}
        self.failure: BaseException | None = None
        self.ending = self.is_over = False
        self._owner, self._connect_timeout, self._trajectories = owner, connect_timeout, trajectories
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = Event()  # replaced whenever it is set
        self._numbers = itertools.count()  # of calls
        self.page = ControlPage()
        if not family.shares_memory:
            self.page.on_change = self._tell_all
        self._members: list[_Member] = []
        self._common: bytes | None = None
        self._followed: Message | None = None
        self._calling: list[RemoteCallCore] = []  # schemes that call an object in each worker

    # -- beginning ----------------------------------------------------------------------------------------------------

    def start(self, specifications: Sequence[bytes], schemes: Mapping[str, Any], replay_buffer: Any) -> None:
        """Start one worker for each specification. Returns before any is ready."""
        self._calling = [scheme for scheme in schemes.values() if isinstance(scheme, RemoteCallCore)]
        self._members = [_Member(rank, specification) for rank, specification in enumerate(specifications)]
        self._common = self.family.open(self, replay_buffer, schemes)
        loop_thread.run(self._begin)
        for member in self._members:
            self._launch(member)

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        loop_thread.set_open(self._shutdown, True)  # the loop thread runs until the end

    def _launch(self, member: _Member) -> None:
        rank, launch = member.rank, member.launches
        self.family.start(
            rank, Reports(partial(self._receive, member, launch), partial(self._lose, member, launch), self._fail)
        )
        first = self.page.advance_trajectories(0) + APART * launch if launch else 0
        build = ("build", member.specification, self._common, first, len(self._members))
        self.call_soon(self._send, member, build)
        if self._followed is not None:
            self.call_soon(self._send, member, self._followed)

    def _send(self, member: _Member, message: Message) -> None:
        """Send a message for which nobody waits here: what is raised ends collection."""
        try:
            self.family.send(member.rank, message)
        except Exception as error:
            note(error, f"What {self.family.name(member.rank)} is to do cannot be sent.")
            self._fail(error)

    @property
    def connected(self) -> bool:
        """Whether all workers have connected their schemes."""
        return all(member.is_connected for member in self._members)

    @property
    def _have_ended(self) -> bool:
        return all(member.has_ended or not member.has_begun for member in self._members)

    @property
    def alive(self) -> int:
        """How many workers run."""
        return sum(not member.has_ended for member in self._members) if not self.is_over else 0

    def incarnation(self, worker: int) -> int | None:
        """How often a worker was launched again; None: it is being launched. It then gets the newest weights."""
        member = self._members[worker]
        return member.launches if member.is_connected else None

    @property
    def is_ours(self) -> bool:
        """Whether this process has started the workers: a forked child has a copy of everything here."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raises ClosedError: the group was ended, or this is its copy in a forked process."""
        if not self.is_ours:
            raise ClosedError(
                f"this {self._owner} belongs to process {self._pid}, from which this process was forked: use it there, "
                "or make a new one here"
            )
        if self.ending:
            raise ClosedError(f"this {self._owner} has been shut down")

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def until(
        self, met: Callable[[], T | None], timeout: float | None = None, late: Callable[[], str] | None = None
    ) -> T:
        """Wait on the loop thread until ``met()`` is true, and return its value; it is called whenever something has
        come.

        Raises AckTimeout: not within the timeout (seconds), with the message ``late()``; ClosedError: the group was
        ended meanwhile; BaseException: what a worker raised, or PeerLost if it has died.
        """
        with move_on_after(timeout):
            while True:
                self.check()
                if self.failure is not None:
                    raise self.failure
                if result := met():
                    return result
                await self._changed.wait()
        message = f"the workers of this {self._owner} did not answer within {timeout:g} s" if late is None else late()
        raise AckTimeout(message)

    def wait(
        self, met: Callable[[], T | None], timeout: float | None = None, late: Callable[[], str] | None = None
    ) -> T:
        """:meth:`until` for any other thread. Ctrl-C ends it."""
        self.check()
        return loop_thread.run(lambda: self.until(met, timeout, late))

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop thread, from any thread; not after the end."""
        with contextlib.suppress(RuntimeError):  # it has ended, and the workers before
            if self._loop is not None and self.is_ours:
                self._loop.call_soon_threadsafe(function, *arguments)

    def nudge(self) -> None:
        """Have each waiting ``met`` called again. From any thread."""
        self.call_soon(self._notify)

    def _notify(self) -> None:
        changed, self._changed = self._changed, Event()
        changed.set()

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def places(self, workers: Sequence[int], dim: int | None) -> Places:
        """Where rollouts of these workers lie one after another along a dimension of ``[*batch_size, steps]`` (None:
        stacked, first). A batch of a worker that shares no memory comes by value."""

        def teach(arrangement: Arrangement) -> None:
            for index, worker in enumerate(workers):
                self._send(self._members[worker], ("learn", arrangement, index))

        return Places(dim, teach)

    def request(self, worker: int, serial: int, random: bool, lease: Lease | None = None) -> None:
        """Request a rollout of a worker, into a place with this lease; returns at once. ``random``: with random actions
        instead of the policy's. On the loop thread."""
        member, request = self._members[worker], ("rollout", serial, random, lease)
        member.requests.append(request)
        if member.is_connected:  # else it is being launched again
            if not self.family.shares_memory:
                self._tell(member, at_once=True)  # of a pause that has begun, above all
            self._send(member, request)

    async def next_result(self) -> RolloutResult:
        """Wait on the loop thread for the rollout that is done next, as :meth:`until`."""
        return await self.until(lambda: self.results.popleft() if self.results else None)

    # -- the control page ---------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Have all workers stand still after their step under way."""
        self.page.paused = True

    def resume(self) -> None:
        """End a pause."""
        self.page.paused = False
        self.call_soon(self._resume)

    def _resume(self) -> None:
        for member in self._members:
            if member.is_paused and not self.page.paused:
                member.is_paused = False
                self._send(member, ("resume",))

    def stand_still(self, workers: Iterable[int]) -> bool:
        """Whether these workers have paused, or have nothing to do."""
        members = [self._members[worker] for worker in workers]
        return all(member.is_paused or not member.requests for member in members)

    def _tell_all(self) -> None:
        """Send what the page says to workers that cannot read it. From any thread."""
        for member in self._members if not self.ending else ():
            self.call_soon(self._tell, member)

    def _tell(self, member: _Member, *, at_once: bool = False) -> None:
        """Send a worker what the page says now. Unless ``at_once``, wait until it has answered the last one."""
        wishes = self.page.wishes(member.rank)
        may = member.has_begun and not member.has_ended and (at_once or not member.is_being_told)
        if may and member.told != wishes:
            member.told, member.is_being_told = wishes, True
            self._send(member, ("page", wishes))

    def follow(self, root: Any, index: int) -> None:
        """Have the workers read the newest version where the root of a tree of collectors announces it to its worker
        ``index``; None: in their own schemes."""
        # A root's page is on this host. Other workers learn from what they receive which version of the root's it is.
        self._followed = ("follow", root if self.family.shares_memory else None, index)
        for member in self._members:
            self.call_soon(self._send, member, self._followed)

    # -- calls --------------------------------------------------------------------------------------------------------

    def ask(
        self, name: str, *arguments: Any, workers: Sequence[int] | None = None, timeout: float = ANSWER_SECONDS
    ) -> list[Any]:
        """Have workers (None: all) do something between two rollouts (:meth:`Worker._call`), and return their answers,
        or raise what one of them has raised.

        Raises AckTimeout after ``timeout`` seconds for all of them: workers still carry the call out.
        """
        chosen = range(len(self._members)) if workers is None else workers
        return self.ask_each(name, dict.fromkeys(chosen, arguments), timeout)

    def ask_each(
        self, name: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float = ANSWER_SECONDS
    ) -> list[Any]:
        """:meth:`ask`, with arguments of each worker's own."""
        self.check()
        calls = [_Call(worker, name, dumps(given), next(self._numbers)) for worker, given in arguments.items()]

        def late() -> str:
            worker = next(call.worker for call in calls if call.answer is None)
            return (
                f"worker {worker} did not answer ({name}) in time. It answers between two rollouts, and will still "
                "carry out the call: pass a longer timeout="
            )

        async def answered() -> None:
            for call in calls:
                self._ask(call)
            await self.until(lambda: all(call.answer for call in calls), timeout, late)

        loop_thread.run(answered)
        answers = []
        for call in calls:
            assert call.answer is not None
            failure, result = call.answer
            if failure is not None:
                raise failure.error(f"worker {call.worker}")
            answers.append(loads(result))
        return answers

    def _ask(self, call: _Call) -> None:
        member = self._members[call.worker]
        member.calls[call.number] = call
        if member.is_connected:  # else it is sent then
            try:
                self.family.send(call.worker, call.message)
            except Exception as error:
                self._answer(member, call.number, Failure.of(error), None)

    def _answer(self, member: _Member, number: int, failure: Failure | None, result: Any) -> None:
        call = member.calls.pop(number, None)
        if call is not None:
            if failure is None:
                self._note(member, call)
            call.answer = failure, result
            self._notify()
        elif failure is not None:  # of a call that was repeated because its effect lasts
            self._failed(member, failure)

    def _note(self, member: _Member, call: _Call) -> None:
        if call.name in LASTING:
            member.lasting[call.name] = call
        if call.name == "record":
            config, _ = loads(call.arguments)
            member.unrecorded = 0 if config is None else config.num_rollouts

    # -- messages from workers ----------------------------------------------------------------------------------------

    def _receive(self, member: _Member, launch: int, message: Message) -> None:
        if self.is_over or launch != member.launches:
            return
        member.has_begun = True
        match message:
            case "failed", failure:
                self._failed(member, failure)
            case ("ended",):
                member.has_ended = True
            case _ if self.ending:
                pass
            case "result", in_place, steps, frames, layout, payload:
                member.requests.popleft()
                member.unrecorded -= 1
                load = partial(self.family.batch, member.rank, payload)
                self.results.append(RolloutResult(member.rank, in_place, steps, frames, layout, load))
            case "begun", _:
                self._tell(member)
            case ("told",):
                member.is_being_told = False
                self._tell(member)
            case "built", *info:
                self.infos[member.rank] = WorkerInfo(*info)
                for scheme in self._calling:
                    scheme.remotes[member.rank] = self.family.remote(member.rank)
            case ("connected",):
                self._connect(member)
            case "reply", *answer:
                self._answer(member, *answer)
            case ("paused",):
                member.is_paused = True
                self._resume()  # it may have read the page just before the pause ended
        self._notify()

    def _connect(self, member: _Member) -> None:
        """A worker has connected: send what waits for that."""
        member.is_connected = True
        member.give_time(None)
        if member.unrecorded <= 0:  # the trace is written
            member.lasting.pop("record", None)
        for call in member.lasting.values():
            self._send(member, call.message)
            self._note(member, call)
        for call in [*member.calls.values()]:
            self._ask(call)
        for request in member.requests:  # of the one that was lost
            self._send(member, request)

    # -- failures and losses ------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if self.failure is None and not self.ending:
            self.failure = error
        self._notify()

    def _failed(self, member: _Member, failure: Failure) -> None:
        """The user's code has failed in a worker, which ends collection."""
        name, one = self.family.name(member.rank), failure.described
        if self.failure is None:
            self._fail(failure.error(name))
            if self.ending:
                logger.error("%s failed while it was ending: %s", name, one.remote_traceback)
        else:  # most often the same mistake, which the first one's error shows in full
            logger.warning("%s also failed: %s: %.200s", name, one.type_name, one.remote_message)
            logger.info("traceback of %s: %s", name, one.remote_traceback)

    def _lose(self, member: _Member, launch: int, error: BaseException) -> None:
        """A worker is lost, unless it was launched again meanwhile."""
        if self.is_over or launch != member.launches or member.has_ended:
            return
        lost = error
        if not isinstance(error, PeerLost):
            first_line = str(error).partition("\n")[0]
            lost = PeerLost(f"{self.family.name(member.rank)} was lost: {first_line}")
            lost.__cause__ = error
        for number in [*member.calls] if member.is_connected else ():  # it may have carried out what it was sent
            self._answer(member, number, Failure.of(lost), None)
        if not self.ending and self.failure is None and launch < self.family.restarts:
            logger.warning("%s; launching it again", lost)
            self._launch_again(member)
            return
        member.has_ended = True
        if not self.ending:
            if lost is not error:
                lost.add_note("Collection is over.")
            self._fail(lost)
        self._notify()

    def _launch_again(self, member: _Member) -> None:
        assert self._loop is not None
        member.launches += 1
        member.has_begun = member.is_connected = member.is_paused = member.is_being_told = False
        member.told = None
        if self._trajectories is not None:
            self._trajectories.break_off_where(lambda number: number % len(self._members) == member.rank)
        late = self._loop.call_later(self._connect_timeout, self._look_after, member, member.launches)
        member.give_time(late)
        try:
            self._launch(member)
        except Exception as error:
            self._lose(member, member.launches, error)

    def _look_after(self, member: _Member, launch: int) -> None:
        if not member.is_connected:
            late = AckTimeout(f"it was launched again, but did not connect within {self._connect_timeout:g} s")
            self._lose(member, launch, late)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, timeout: float, close_env: bool = True) -> None:
        """Have all workers end; returns within the timeout (seconds), and leaves none. Idempotent."""
        if self.is_ours and not self.is_over:
            loop_thread.run(lambda: self._shutdown(timeout, close_env))

    async def _shutdown(self, timeout: float, close_env: bool = True) -> None:
        """End all workers within the timeout (seconds). Cancelled, it ends them at once: nobody else would."""
        is_first, self.ending = not self.ending, True
        self._notify()
        deadline = time.monotonic() + timeout
        try:
            if is_first:
                self.page.stop(close_env)
                for member in self._members:
                    try:
                        self.family.send(member.rank, ("stop", close_env, BY_ITSELF * timeout))
                    except Exception as error:
                        logger.debug("worker %d cannot be stopped: %s", member.rank, error)
            with move_on_after(BY_ITSELF * timeout if is_first else timeout):
                while not (self.is_over or (is_first and self._have_ended)):
                    await self._changed.wait()
        except BaseException:
            deadline = 0.0
            raise
        finally:
            for member in self._members:
                member.give_time(None)
            if not self.is_over:
                await self.family.end(deadline)
                self.is_over = True
                self._notify()
                loop_thread.set_open(self._shutdown, False)

    def close(self) -> None:
        """After the end: release what workers and this process shared. Numbers can still be read. Idempotent."""
        self.page.close()
