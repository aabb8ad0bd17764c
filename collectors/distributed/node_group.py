"""NodeGroup: a collector's workers on other hosts, or on this one, over futures.

    group = NodeGroup(RayFamily(…), "RayCollector")
    group.start(specifications, schemes, None)         # launch, build and connect all nodes, one command after another
    group.request(0, RolloutRequest(serial=1, random=False, place=places.next()))
    result = await group.until(lambda: group.results and group.results.popleft())
    batch = place.parts([result])                      # fetched in the caller's thread

Each command's future is looked at on the loop thread. What a node answers with is a failure of the user's code, which
is raised with its type, or a value. A future that fails means that the node is lost: that is PeerLost, unless the
family may launch it again. Then its collector is made anew, gets the weights that it should have from the trainer's
bus, and does the rollout that the lost one was to do; nothing is sent to that node before it can take it.

What is wanted between two steps (a pause, a cut rollout, the end, the newest version) is one record per node,
:class:`~asyncsync.collectors.distributed.node.Wishes`, of which one is on its way at a time: however often it changes
meanwhile, only the last one follows. Nodes do not run free by themselves: the group requests one rollout after another,
and counts the frames.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncsync.collectors.distributed.family import NodeFamily
from asyncsync.collectors.distributed.node import Answer, Command, PoolOfNode, Wishes
from asyncsync.collectors.distributed.node_calls import NodeCalls
from asyncsync.collectors.multi.starting import pickled
from asyncsync.collectors.trajectories import _TrajectoryPool
from asyncsync.collectors.whole_trajectories import WholeTrajectories
from asyncsync.collectors.workers.group import FreeLimits, RolloutRequest, RolloutResult, WorkerGroup, WorkerInfo
from asyncsync.collectors.workers.rollout_worker import FREE
from asyncsync.collectors.workers.shared_batches import SharedPlaces
from asyncsync.errors import AckTimeout, PeerLost
from asyncsync.runtime import loop_thread
from asyncsync.runtime.threads import elsewhere
from asyncsync.schemes.remote_calls import RemoteCallCore

logger = logging.getLogger("asyncsync")

APART = 1 << 40
"""So many trajectory identifiers a node has for itself before those of the one that is launched in its place."""

BY_ITSELF = 0.7
"""Part of a shutdown's time in which nodes end by themselves; then their programs are ended."""


class NodeGroup(WorkerGroup):
    """The nodes of a family. ``owner`` names their collector in errors; a node that is launched again has
    ``connect_timeout`` seconds to connect; ``trajectories`` are put together of all nodes' rollouts."""

    def __init__(
        self, nodes: NodeFamily, owner: str, connect_timeout: float, trajectories: WholeTrajectories | None = None
    ) -> None:
        super().__init__(owner)
        self.nodes = nodes
        self._connect_timeout, self._trajectories = connect_timeout, trajectories
        self.frames = self._counted = 0
        self._builds: list[Command] = []
        self._writes = False  # into a replay buffer
        self._incarnations: list[int] = []  # how often each node was launched again
        self._late: dict[int, asyncio.TimerHandle] = {}  # of each node that is being launched again
        self._lost: set[int] = set()
        self._built_now: set[int] = set()  # nodes that take wishes
        self._pool = PoolOfNode()
        self._follows = True  # this process's versions
        self._calling: list[RemoteCallCore] = []  # schemes that call an object in each node
        self._node_calls = NodeCalls(self._submit, self._reply)
        self._requested: dict[int, RolloutRequest] = {}  # of each node that rolls out
        self._free: set[int] = set()  # nodes that run free
        self._finished: set[int] = set()  # and those that have done so
        self._limits = FreeLimits(math.inf, 0)
        self._done: Counter[int] = Counter()  # rollouts of each node that runs free
        self._begun = 0  # frames of rollouts under way into the replay buffer
        self._wanted = Wishes(0)  # of all nodes
        self._newest: list[int] = []  # and of each
        self._told: dict[int, Wishes] = {}  # each node's last ones
        self._telling: dict[int, Wishes] = {}  # those of them that are on their way

    # -- beginning ----------------------------------------------------------------------------------------------------

    def start(self, specifications: Sequence[bytes], schemes: Mapping[str, Any], replay_buffer: Any) -> None:
        count, common = len(specifications), pickled((replay_buffer, schemes))
        self._writes = replay_buffer is not None
        self._calling = [scheme for scheme in schemes.values() if isinstance(scheme, RemoteCallCore)]
        self._builds = [("build", count, specification, common) for specification in specifications]
        self._incarnations, self._newest = [0] * count, [0] * count
        loop_thread.run(self._watch)
        self.nodes.open(count)
        for rank in range(count):
            self._launch(rank)

    def _launch(self, rank: int) -> None:
        self._when(rank, self.nodes.launch(rank), lambda _: self._build(rank))

    def _build(self, rank: int) -> None:
        first = self._pool.advance(0) + APART * self._incarnations[rank] if self._incarnations[rank] else 0
        self._submit(rank, (*self._builds[rank], first), partial(self._built, rank))

    def _built(self, rank: int, answer: Answer) -> None:
        self.infos[rank] = WorkerInfo(*answer.value)
        self._built_now.add(rank)
        # Answered when the node has ended, and lost when it is: so it is missed at once, whatever it does.
        self._submit(rank, ("watch",), lambda _: None)
        self._told.pop(rank, None)
        self._tell(rank)
        for scheme in self._calling:
            scheme.remotes[rank] = self.nodes.remote(rank)
        if not self._follows:
            self._let_follow(rank)
        self._submit(rank, ("connect",), partial(self._has_connected, rank))
        self._notify()

    def _has_connected(self, rank: int, _: Answer) -> None:
        self.states[rank] = self._unpaused(rank)
        self._not_late(rank)
        self._told.pop(rank, None)  # what has paused before was not connected
        self._tell(rank)
        self._node_calls.release(rank)
        if (request := self._requested.get(rank)) is not None:  # of the one that was lost
            self._roll_out(rank, request)
        elif rank in self._free:
            self._go_on(rank)
        self._notify()

    @property
    def connected(self) -> bool:
        return len(self.states) == len(self._builds) and "starting" not in self.states.values()

    def incarnation(self, worker: int) -> int | None:
        return None if self.states.get(worker) == "starting" else self._incarnations[worker]

    @property
    def alive(self) -> int:
        return 0 if self.is_over else len(self._builds) - len(self._lost)

    # -- commands and their futures -----------------------------------------------------------------------------------

    def _submit(self, rank: int, command: Command, then: Callable[[Answer], object], *, fatal: bool = True) -> None:
        """Send a command, and have its answer taken on the loop thread. A failure ends collection if it is ``fatal``;
        else it is for ``then``, too."""
        try:
            future = self.nodes.submit(rank, command)
        except Exception as error:
            self.call_soon(self._lose, rank, self._incarnations[rank], error)
        else:
            self._when(rank, future, partial(self._answered, rank, then, fatal))

    def _when(self, rank: int, future: Future[Any], then: Callable[[Any], object]) -> None:
        incarnation = self._incarnations[rank]
        future.add_done_callback(lambda done: self.call_soon(self._settled, rank, incarnation, done, then))

    def _settled(self, rank: int, incarnation: int, future: Future[Any], then: Callable[[Any], object]) -> None:
        if self.is_over or incarnation != self._incarnations[rank]:
            return
        if (error := future.exception()) is not None:
            self._lose(rank, incarnation, error)
        else:
            then(future.result())

    def _answered(self, rank: int, then: Callable[[Answer], object], fatal: bool, answer: Answer) -> None:
        if answer.failure is None or not fatal:
            then(answer)
        elif not self.ending:
            self._failed(self.nodes.name(rank), answer.failure)

    def _lose(self, rank: int, incarnation: int, error: BaseException) -> None:
        """A node is lost, unless that one was launched again meanwhile."""
        if self.is_over or incarnation != self._incarnations[rank] or rank in self._lost:
            return
        lost = PeerLost(f"{self.nodes.name(rank)} was lost: {str(error).partition(chr(10))[0]}")
        lost.__cause__ = error
        self._node_calls.lose(rank, lost)
        self._telling.pop(rank, None)
        self._built_now.discard(rank)
        if not self.ending and self.failure is None and incarnation < self.nodes.restarts:
            logger.warning("%s; launching it again", lost)
            self._incarnations[rank] += 1
            self._launch_again(rank)
            return
        self._lost.add(rank)
        if not self.ending:
            lost.add_note("Collection is over.")
            self._fail(lost)
        self._notify()

    def _launch_again(self, rank: int) -> None:
        assert self._loop is not None
        incarnation = self._incarnations[rank]
        self.states[rank] = "starting"
        self._node_calls.hold(rank)
        if self._trajectories is not None:
            self._trajectories.break_off_those(lambda number: number % len(self._builds) == rank)
        self._not_late(rank)
        late = AckTimeout(f"it was launched again, but did not connect within {self._connect_timeout:g} s")
        self._late[rank] = self._loop.call_later(self._connect_timeout, self._lose, rank, incarnation, late)
        try:
            self._launch(rank)
        except Exception as error:
            self._lose(rank, incarnation, error)

    def _not_late(self, rank: int) -> None:
        if (late := self._late.pop(rank, None)) is not None:
            late.cancel()

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def request(self, worker: int, request: RolloutRequest) -> None:
        self._requested[worker] = request
        if self._writes:
            self._begun += self.infos[worker].frames
        if self.states[worker] != "starting":  # else it is being launched again
            self._roll_out(worker, request)

    def _roll_out(self, rank: int, request: RolloutRequest) -> None:
        self._submit(
            rank, ("rollout", request.serial, request.random, self._wishes(rank)), partial(self._rolled_out, rank)
        )

    def _rolled_out(self, rank: int, answer: Answer) -> None:
        self._requested.pop(rank, None)
        self._node_calls.rolled_out(rank)
        serial, steps, frames = answer.value
        if self._writes:
            self.frames += frames
            self._begun -= self.infos[rank].frames
        if rank in self._free:
            self._go_on(rank)
        else:
            self.results.append(RolloutResult(rank, serial, False, steps, frames, answer.payload, None))
        self._notify()

    def places(self, workers: Sequence[int], dim: int | None) -> SharedPlaces:
        # No memory is shared with a node: each batch comes by value, when its caller wants it.
        return SharedPlaces(dim, lambda _: None, lambda result: self.nodes.payload(result.worker, result.payload))

    def cut(self, serial: int) -> None:
        self._want(cut=serial)

    def run_free(self, total: float, random: int, batch: int | None = None) -> None:
        for rank, state in self.states.items():
            if state not in ("starting", "paused"):
                self.states[rank] = "running"
        self.call_soon(self._set_free, total, random, batch)

    def _set_free(self, total: float, random: int, batch: int | None) -> None:
        self._limits = FreeLimits.of(total, random, batch, self.frames + self._begun)
        self._done.clear()
        self._finished.clear()
        self._free = set(self.states)
        for rank in self._free - self._requested.keys():
            self._go_on(rank)
        self._notify()

    def _unpaused(self, rank: int) -> str:
        """The state of a node that has connected, and is not paused."""
        return "running" if rank in self._free else "finished" if rank in self._finished else "connected"

    def _go_on(self, rank: int) -> None:
        """One more rollout of a node that runs free, if there are not enough frames yet."""
        limits, before, done = self._limits, self.frames + self._begun, self._done[rank]
        if done < limits.rollouts and before < limits.total:
            self._done[rank] += 1
            self.request(rank, RolloutRequest(FREE, limits.is_random(before, done), None))
        elif self.states[rank] != "starting":
            self._free.discard(rank)
            self._finished.add(rank)
            self.states[rank] = "finished"

    # -- wishes -------------------------------------------------------------------------------------------------------

    @property
    def counted(self) -> int:
        return self._counted

    @counted.setter
    def counted(self, counted: int) -> None:
        self._counted = counted
        self._want(counted=counted)

    def count_version(self) -> None:
        self.counted += 1

    def announce(self, version: int, workers: Iterable[int] | None) -> None:
        for rank in range(len(self._newest)) if workers is None else workers:
            self._newest[rank] = max(self._newest[rank], version)
        self._want()

    def pause(self) -> None:
        self._want(paused=True)

    def resume(self) -> None:
        self._want(paused=False)

    def stand_still(self, workers: Iterable[int]) -> bool:
        return all(worker not in self._requested or self.states[worker] == "paused" for worker in workers)

    def stop(self, close_env: bool = True) -> None:
        self._want(stopped=True, close_env=close_env)

    def _want(self, **changed: Any) -> None:
        """Wishes that have changed. From any thread; never waits."""
        self.call_soon(self._tell_all, changed)

    def _tell_all(self, changed: Mapping[str, Any]) -> None:
        self._wish(**changed)
        for rank in self._built_now:
            self._tell(rank)

    def _wish(self, **changed: Any) -> None:
        self._wanted = self._wanted._replace(number=self._wanted.number + 1, **changed)

    def _wishes(self, rank: int) -> Wishes:
        return self._wanted._replace(newest=self._newest[rank])

    def _tell(self, rank: int) -> None:
        """Send the wishes, unless this node has them, or will be sent them when it has answered earlier ones. Those
        that a node is to pause are answered when it has, or when there are others: these do not wait."""
        before = self._telling.get(rank)
        wishes = self._wishes(rank)
        if rank in self._lost or self._told.get(rank) == wishes or (before is not None and not before.paused):
            return
        self._told[rank] = self._telling[rank] = wishes
        if not wishes.paused and self.states.get(rank) == "paused":
            self.states[rank] = self._unpaused(rank)
        kind = "stand_still" if wishes.paused else "wishes"
        self._submit(rank, (kind, wishes), partial(self._has_been_told, rank, wishes))

    def _has_been_told(self, rank: int, wishes: Wishes, answer: Answer) -> None:
        if self._telling.get(rank) is wishes:  # else there are others, which it has not heard of
            del self._telling[rank]
            if answer.value and self.states.get(rank, "starting") != "starting":
                self.states[rank] = "paused"
        self._tell(rank)
        self._notify()

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, worker: int, name: str, arguments: bytes) -> int:
        self.check()
        number = next(self._calls)
        self.replies[number] = None
        self.call_soon(self._node_calls.ask, worker, number, ("call", name, arguments))
        return number

    def _reply(self, number: int, answer: Answer) -> None:
        if number in self.replies:
            self.replies[number] = (answer.failure, answer.value)
        self._notify()

    def follow(self, root: Any, index: int) -> None:
        # The root's page is on another host: what nodes receive tells them which version of the root's it stands for.
        self._follows = False
        self.call_soon(self._let_follow)

    def _let_follow(self, *ranks: int) -> None:
        for rank in ranks or self._built_now:
            self._submit(rank, ("follow", None, 0), lambda _: None)

    def trajectory_pool(self) -> _TrajectoryPool:
        return self._pool

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, timeout: float, close_env: bool) -> None:
        self._wish(stopped=True, close_env=close_env)
        seconds = BY_ITSELF * timeout
        ends = []
        for rank in self._built_now:
            try:
                end = asyncio.wrap_future(self.nodes.submit(rank, ("stop", self._wishes(rank), seconds)))
            except Exception as error:
                logger.debug("%s cannot be stopped: %s", self.nodes.name(rank), error)
            else:
                end.add_done_callback(lambda end: end.cancelled() or end.exception())  # one that is lost needs no end
                ends.append(end)
        if ends:
            await asyncio.wait(ends, timeout=seconds)

    async def _cut_off(self, deadline: float) -> None:
        for rank in [*self._late]:
            self._not_late(rank)
        await elsewhere("asyncsync-nodes-end", partial(self.nodes.end, len(self._builds), deadline))

    def close(self) -> None:
        """Nothing is shared with the nodes."""
