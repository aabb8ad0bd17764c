"""WorkerGroup: the workers of a collector, wherever they run, as its driver sees them.

A group lives on the process's loop thread: there it sends messages and receives the workers' messages, and there the
driver awaits results. A :class:`Family` starts the workers' programs and carries the messages. The driver decides what
is rolled out when, and what becomes of the batches.

The group writes what workers must see between two steps to a :class:`ControlPage`. Workers of this host read that page
itself. To any other worker the group sends the page's values, one message at a time: it sends the next message, with
the values of that moment, when the worker has answered the previous one.

If a worker is lost, collection ends, unless the family may launch that worker again. The new worker makes its collector
anew, gets its weights from the trainer's bus, and does the rollouts that the lost one had still to do. Calls to it wait
until it has connected.
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
from asyncsync.collectors.workers.control_page import ControlPage, PageValues
from asyncsync.collectors.workers.messages import Failure, RolloutResult, add_note_to, dumps, loads
from asyncsync.collectors.workers.shared_batches import Arrangement, Lease, SlotPool
from asyncsync.collectors.workers.worker import Message, WorkerInfo
from asyncsync.errors import AckTimeout, ClosedError, PeerLost
from asyncsync.runtime.threads import keep_loop_running, run_on_loop
from asyncsync.schemes.remote_calls import RemoteCallCore

logger = logging.getLogger("asyncsync")

T = TypeVar("T")

GRACEFUL_PART = 0.7
"""Fraction of a shutdown's time in which workers may end by themselves, before the family ends their programs."""

IDS_PER_LAUNCH = 1 << 40
"""Trajectory identifiers between the first one of a worker and the first one of its next launch."""

REPEATED_CALLS = ("pre_hook", "post_hook", "record")
"""Calls that the group repeats in a worker that was launched again, because their effect lasts."""


class Reports(NamedTuple):
    """Functions that a family calls on the loop thread, for one launch of a worker.

    Attributes:
        received: called with each message of the worker.
        lost: called with the error because of which no more messages will come.
        failed: called with the error if a message cannot be sent or read although the worker is there.
    """

    received: Callable[[Message], object]
    lost: Callable[[BaseException], object]
    failed: Callable[[BaseException], object]


class Family(ABC):
    """Starts workers, and carries messages between them and their group.

    Attributes:
        shares_memory: whether workers read the group's control page, and write batches to its slots.
        restarts: how often a lost worker may be launched again.
    """

    shares_memory = False
    restarts = 0

    @abstractmethod
    def open(self, group: WorkerGroup, replay_buffer: Any, schemes: Any) -> bytes | None:
        """Prepare what the workers of this group need. The thread that constructs the collector calls this; it may
        wait. Returns the pickled replay buffer and schemes, or None if the workers' programs get them otherwise."""

    @abstractmethod
    def start(self, rank: int, reports: Reports) -> None:
        """Start a worker's program, for the first time or again, and return at once."""

    @abstractmethod
    def send(self, rank: int, message: Message) -> None:
        """Send a message, on the loop thread, without waiting. Once a worker's program has begun, it gets its messages
        in this order. A message to a lost worker is dropped."""

    def batch(self, rank: int, payload: Any) -> TensorDictBase:
        """The batch of a result with this payload. Runs in the thread that wants the batch, and may wait."""
        batch: TensorDictBase = loads(payload)
        return batch

    def remote(self, rank: int) -> Any:
        """The object of a worker that schemes call remotely; None: there is none."""
        return None

    @abstractmethod
    async def end(self, deadline: float) -> None:
        """End all programs by ``deadline`` (of ``time.monotonic()``), whatever they do, and release everything. The
        workers have had time to end by themselves, unless the group's shutdown was cancelled. Two calls may run at the
        same time."""

    @abstractmethod
    def name(self, rank: int) -> str:
        """The worker's name in errors, such as "worker 1 (pid 4711)"."""


@dataclass(eq=False)
class _Call:
    """A call to a worker. Its answer is a failure, or None and the pickled result."""

    worker: int
    name: str
    arguments: bytes
    number: int
    answer: tuple[Failure | None, Any] | None = None

    @property
    def message(self) -> Message:
        return "call", self.number, self.name, self.arguments


class _Member:
    """What the group knows of one worker."""

    def __init__(self, rank: int, specification: bytes) -> None:
        self.rank = rank
        self.specification = specification
        self.launches = 0  # not counting the first one
        self.has_begun = self.is_connected = self.is_paused = self.has_ended = False
        self.requests: deque[Message] = deque()  # for rollouts that are not done yet
        self.calls: dict[int, _Call] = {}  # not answered yet, by their numbers; sent once the worker has connected
        self.repeated: dict[str, _Call] = {}  # calls to repeat after another launch, by their names
        self.rollouts_to_profile = 0
        self.sent_values: PageValues | None = None
        self.awaits_told = False  # whether the worker has not answered these values yet
        self._timer: asyncio.TimerHandle | None = None

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Replace the timer that checks whether a worker connects after another launch."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


class WorkerGroup:
    """The workers of a family.

    Args:
        owner: the collector's name in errors.
        connect_timeout: seconds within which a worker that was launched again must connect.
        trajectories: assembles whole trajectories from all workers' rollouts.

    Attributes:
        results: finished rollouts, in the order of arrival.
        infos: what each worker has reported about its collector.
        page: what workers read between two steps.
        failure: the error that has ended collection.
        ending: whether the shutdown has begun.
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
        self._call_numbers = itertools.count()
        self.page = ControlPage()
        if not family.shares_memory:
            self.page.on_change = self._send_page_to_all
        self._members: list[_Member] = []
        self._common: bytes | None = None  # the pickled replay buffer and schemes
        self._follow_message: Message | None = None
        self._remote_call_schemes: list[RemoteCallCore] = []  # they call an object in each worker

    # -- beginning ----------------------------------------------------------------------------------------------------

    def start(self, specifications: Sequence[bytes], schemes: Mapping[str, Any], replay_buffer: Any) -> None:
        """Start one worker for each specification. Returns before any is ready."""
        self._remote_call_schemes = [scheme for scheme in schemes.values() if isinstance(scheme, RemoteCallCore)]
        self._members = [_Member(rank, specification) for rank, specification in enumerate(specifications)]
        self._common = self.family.open(self, replay_buffer, schemes)
        run_on_loop(self._begin)
        for member in self._members:
            self._launch(member)

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        keep_loop_running(self._shutdown, True)  # the loop thread runs until the end

    def _launch(self, member: _Member) -> None:
        rank, launch = member.rank, member.launches
        received, lost = partial(self._receive, member, launch), partial(self._on_lost, member, launch)
        self.family.start(rank, Reports(received, lost, self._set_failure))
        first = self.page.advance_trajectories(0) + IDS_PER_LAUNCH * launch if launch else 0
        build = ("build", member.specification, self._common, first, len(self._members))
        self.call_soon(self._send, member, build)
        if self._follow_message is not None:
            self.call_soon(self._send, member, self._follow_message)

    def _send(self, member: _Member, message: Message) -> None:
        """Send a message whose sending no caller awaits. An error ends collection."""
        try:
            self.family.send(member.rank, message)
        except Exception as error:
            add_note_to(error, f"A message to {self.family.name(member.rank)} cannot be sent.")
            self._set_failure(error)

    @property
    def connected(self) -> bool:
        """Whether all workers have connected their schemes."""
        return all(member.is_connected for member in self._members)

    @property
    def alive(self) -> int:
        """How many workers run."""
        return sum(not member.has_ended for member in self._members) if not self.is_over else 0

    def relaunches(self, worker: int) -> int | None:
        """How often a worker was launched again. None: it has yet to connect, and then gets the newest weights."""
        member = self._members[worker]
        return member.launches if member.is_connected else None

    @property
    def is_ours(self) -> bool:
        """Whether this process has started the workers. False in a forked child, which has a copy of this object."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raises ClosedError: the group was shut down, or this is its copy in a forked process."""
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
        """Wait on the loop thread until ``met()`` is true, and return its value. ``met`` is called after each event.

        Raises AckTimeout, with the message ``late()``, after ``timeout`` seconds; ClosedError: the group was shut down
        meanwhile; BaseException: a worker raised it, or was lost (PeerLost).
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
        return run_on_loop(lambda: self.until(met, timeout, late))

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop thread, from any thread. Does nothing after the loop's end."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and before it the workers
            if self._loop is not None and self.is_ours:
                self._loop.call_soon_threadsafe(function, *arguments)

    def recheck_waits(self) -> None:
        """On the loop thread: have all waits call their ``met()`` again."""
        changed, self._changed = self._changed, Event()
        changed.set()

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def slot_pool(self, workers: Sequence[int], dim: int | None) -> SlotPool:
        """Slots for batches with one rollout of each of these workers, along ``dim`` as in :class:`Arrangement`. A
        worker that shares no memory sends its rollouts by value."""

        def announce(arrangement: Arrangement) -> None:
            for index, worker in enumerate(workers):
                self._send(self._members[worker], ("learn", arrangement, index))

        return SlotPool(dim, announce)

    def request(self, worker: int, serial: int, random: bool, lease: Lease | None = None) -> None:
        """Request a rollout of a worker, into the leased slot, and return at once. ``random``: with random actions
        instead of the policy's. On the loop thread."""
        member, request = self._members[worker], ("rollout", serial, random, lease)
        member.requests.append(request)
        if member.is_connected:  # else it gets the request when it has connected
            if not self.family.shares_memory:
                self._send_page(member, at_once=True)  # it must learn of a pause before it begins this rollout
            self._send(member, request)

    # -- the control page ---------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Have all workers pause after their step under way."""
        self.page.paused = True

    def resume(self) -> None:
        self.page.paused = False
        self.call_soon(self._resume)

    def _resume(self) -> None:
        for member in self._members:
            if member.is_paused and not self.page.paused:
                member.is_paused = False
                self._send(member, ("resume",))

    def have_paused(self, workers: Iterable[int]) -> bool:
        """Whether these workers have paused or have no rollout to do."""
        members = [self._members[worker] for worker in workers]
        return all(member.is_paused or not member.requests for member in members)

    def _send_page_to_all(self) -> None:
        """Send the page's values to all workers, which cannot read the page. From any thread."""
        for member in self._members if not self.ending else ():
            self.call_soon(self._send_page, member)

    def _send_page(self, member: _Member, *, at_once: bool = False) -> None:
        """Send a worker changed values of the page. Unless ``at_once``, only when it has answered the last ones."""
        values = self.page.values_for(member.rank)
        may = member.has_begun and not member.has_ended and (at_once or not member.awaits_told)
        if may and member.sent_values != values:
            member.sent_values, member.awaits_told = values, True
            self._send(member, ("page", values))

    def follow(self, root: Any, index: int) -> None:
        """Have the workers read the newest version from the control page at ``root``, where the root of a tree of
        collectors publishes it for its worker ``index``. None: they know only the versions of their own schemes."""
        # Only workers of this host can map the root's page. Others know the root's version from what they receive.
        self._follow_message = ("follow", root if self.family.shares_memory else None, index)
        for member in self._members:
            self.call_soon(self._send, member, self._follow_message)

    # -- calls --------------------------------------------------------------------------------------------------------

    def ask(
        self, name: str, *arguments: Any, workers: Sequence[int] | None = None, timeout: float = ANSWER_SECONDS
    ) -> list[Any]:
        """Have workers (None: all) carry out a call (:meth:`Worker._call`) between two rollouts. Returns their answers,
        or raises what one of them has raised.

        Raises AckTimeout after ``timeout`` seconds in all. The workers still carry out the call.
        """
        chosen = range(len(self._members)) if workers is None else workers
        return self.ask_each(name, dict.fromkeys(chosen, arguments), timeout)

    def ask_each(
        self, name: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float = ANSWER_SECONDS
    ) -> list[Any]:
        """:meth:`ask`, with different arguments for each worker."""
        self.check()
        calls = [_Call(worker, name, dumps(given), next(self._call_numbers)) for worker, given in arguments.items()]

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

        run_on_loop(answered)
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
        if member.is_connected:  # else it is sent when the worker has connected
            try:
                self.family.send(call.worker, call.message)
            except Exception as error:
                self._answer(member, call.number, Failure.of(error), None)

    def _answer(self, member: _Member, number: int, failure: Failure | None, result: Any) -> None:
        call = member.calls.pop(number, None)
        if call is not None:
            if failure is None:
                self._remember_effect(member, call)
            call.answer = failure, result
            self.recheck_waits()
        elif failure is not None:  # of a repeated call, which no caller awaits
            self._report_failure(member, failure)

    def _remember_effect(self, member: _Member, call: _Call) -> None:
        if call.name in REPEATED_CALLS:
            member.repeated[call.name] = call
        if call.name == "record":
            config, _ = loads(call.arguments)
            member.rollouts_to_profile = 0 if config is None else config.num_rollouts

    # -- messages from workers ----------------------------------------------------------------------------------------

    def _receive(self, member: _Member, launch: int, message: Message) -> None:
        if self.is_over or launch != member.launches:
            return
        member.has_begun = True
        match message:
            case "failed", failure:
                self._report_failure(member, failure)
            case ("ended",):
                member.has_ended = True
            case _ if self.ending:
                pass
            case "result", in_place, steps, frames, layout, payload:
                member.requests.popleft()
                member.rollouts_to_profile -= 1
                load = partial(self.family.batch, member.rank, payload)
                self.results.append(RolloutResult(member.rank, in_place, steps, frames, layout, load))
            case "begun", _:
                self._send_page(member)
            case ("told",):
                member.awaits_told = False
                self._send_page(member)
            case "built", *info:
                self.infos[member.rank] = WorkerInfo(*info)
                for scheme in self._remote_call_schemes:
                    scheme.remotes[member.rank] = self.family.remote(member.rank)
            case ("connected",):
                self._connect(member)
            case "reply", *answer:
                self._answer(member, *answer)
            case ("paused",):
                member.is_paused = True
                self._resume()  # the worker may have read the page just before the pause ended
        self.recheck_waits()

    def _connect(self, member: _Member) -> None:
        """Send a worker that has connected what has waited for that."""
        member.is_connected = True
        member.set_timer(None)
        if member.rollouts_to_profile <= 0:  # the trace is written
            member.repeated.pop("record", None)
        for call in member.repeated.values():
            self._send(member, call.message)
            self._remember_effect(member, call)
        for call in [*member.calls.values()]:
            self._ask(call)
        for request in member.requests:  # which the lost one has not done
            self._send(member, request)

    # -- failures and losses ------------------------------------------------------------------------------------------

    def _set_failure(self, error: BaseException) -> None:
        if self.failure is None and not self.ending:
            self.failure = error
        self.recheck_waits()

    def _report_failure(self, member: _Member, failure: Failure) -> None:
        """End collection, because code has raised in a worker."""
        name, one = self.family.name(member.rank), failure.described
        if self.failure is None:
            self._set_failure(failure.error(name))
            if self.ending:
                logger.error("%s failed while it was ending: %s", name, one.remote_traceback)
        else:  # most often the same mistake, which the first worker's error shows in full
            logger.warning("%s also failed: %s: %.200s", name, one.type_name, one.remote_message)
            logger.info("traceback of %s: %s", name, one.remote_traceback)

    def _on_lost(self, member: _Member, launch: int, error: BaseException) -> None:
        """Launch a lost worker again if its family may, else end collection. Ignores earlier launches."""
        if self.is_over or launch != member.launches or member.has_ended:
            return
        lost = error
        if not isinstance(error, PeerLost):
            first_line = str(error).partition("\n")[0]
            lost = PeerLost(f"{self.family.name(member.rank)} was lost: {first_line}")
            lost.__cause__ = error
        for number in [*member.calls] if member.is_connected else ():  # the worker may have carried them out
            self._answer(member, number, Failure.of(lost), None)
        if not self.ending and self.failure is None and launch < self.family.restarts:
            logger.warning("%s; launching it again", lost)
            self._relaunch(member)
            return
        member.has_ended = True
        if not self.ending:
            if lost is not error:
                lost.add_note("Collection is over.")
            self._set_failure(lost)
        self.recheck_waits()

    def _relaunch(self, member: _Member) -> None:
        assert self._loop is not None
        member.launches += 1
        member.has_begun = member.is_connected = member.is_paused = member.awaits_told = False
        member.sent_values = None
        if self._trajectories is not None:
            self._trajectories.break_off_where(lambda number: number % len(self._members) == member.rank)
        late = self._loop.call_later(self._connect_timeout, self._check_connected, member, member.launches)
        member.set_timer(late)
        try:
            self._launch(member)
        except Exception as error:
            self._on_lost(member, member.launches, error)

    def _check_connected(self, member: _Member, launch: int) -> None:
        if not member.is_connected:
            late = AckTimeout(f"it was launched again, but did not connect within {self._connect_timeout:g} s")
            self._on_lost(member, launch, late)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, timeout: float, close_env: bool = True) -> None:
        """End all workers within the timeout (seconds). Leaves none. Idempotent."""
        if self.is_ours and not self.is_over:
            run_on_loop(lambda: self._shutdown(timeout, close_env))

    async def _shutdown(self, timeout: float, close_env: bool = True) -> None:
        """End all workers within the timeout (seconds). Ends them at once if cancelled, because no other call would."""
        is_first, self.ending = not self.ending, True
        self.recheck_waits()
        deadline = time.monotonic() + timeout
        try:
            if is_first:
                self.page.stop(close_env)
                for member in self._members:
                    try:
                        self.family.send(member.rank, ("stop", close_env, GRACEFUL_PART * timeout))
                    except Exception as error:
                        logger.debug("worker %d cannot be stopped: %s", member.rank, error)
            with move_on_after(GRACEFUL_PART * timeout if is_first else timeout):
                while not self.is_over:
                    if is_first and all(member.has_ended or not member.has_begun for member in self._members):
                        break
                    await self._changed.wait()
        except BaseException:
            deadline = 0.0
            raise
        finally:
            for member in self._members:
                member.set_timer(None)
            if not self.is_over:
                await self.family.end(deadline)
                self.is_over = True
                self.recheck_waits()
                keep_loop_running(self._shutdown, False)
