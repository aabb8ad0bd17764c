"""ProcessGroup: a collector's workers as processes of this host. Messages, failures, and one end for all.

The process's loop thread watches the channels and the ends of all workers, from the start to the end. Nobody waits to
send: messages without room are sent when there is room. Only the process that has started the workers sends to them or
ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncsync.collectors.trajectories import _TrajectoryPool
from asyncsync.collectors.workers.channel import encode
from asyncsync.collectors.workers.control_page import ControlPage, SharedPool
from asyncsync.collectors.workers.failures import died, note
from asyncsync.collectors.workers.group import FreeLimits, RolloutRequest, RolloutResult, WorkerGroup, WorkerInfo
from asyncsync.collectors.workers.main import run_worker
from asyncsync.collectors.workers.process import WorkerProcess
from asyncsync.collectors.workers.shared_batches import Arrangement, SharedPlaces
from asyncsync.runtime import loop_thread

logger = logging.getLogger("asyncsync")

# Parts of a shutdown's time: to end by themselves, and after SIGTERM; then there is SIGKILL.
BY_ITSELF, TERMINATED = 0.7, 0.9
# To end after SIGKILL, which takes longer only in a process that the kernel cannot interrupt.
KILLED_SECONDS = 1.0
# A worker ends itself this long after its trainer should have ended it.
GRACE_SECONDS = 2.0


def _on_page(name: str) -> Any:
    """A number on the control page, as the group's own."""
    return property(lambda group: getattr(group._page, name), lambda group, n: setattr(group._page, name, n))


class ProcessGroup(WorkerGroup):
    """Worker processes, by multiprocessing's ``start_method`` "spawn" or "forkserver". ``owner`` names their collector
    in errors."""

    def __init__(self, start_method: str, owner: str) -> None:
        super().__init__(owner)
        self._context = multiprocessing.get_context(start_method)
        self._workers: list[WorkerProcess] = []
        self._page = ControlPage()
        self._writes = False  # into a replay buffer

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    @property
    def connected(self) -> bool:
        return len(self.states) == len(self._workers)

    @property
    def alive(self) -> int:
        return sum(worker.is_alive for worker in self._workers)

    def start(self, specifications: Sequence[bytes], schemes: Mapping[str, Any], replay_buffer: Any) -> None:
        self._writes = replay_buffer is not None
        loop_thread.run(self._watch)
        for pickled in specifications:
            index = len(self._workers)
            worker = WorkerProcess.start(
                self._context, self._owner, index, run_worker, (self._page.place, replay_buffer, schemes)
            )
            self._workers.append(worker)
            self.call_soon(self._watch_worker, worker)
            # Not an argument: multiprocessing writes those into a pipe of 64 KiB, which a worker reads when it has
            # imported torch.
            self.post(index, ("build", pickled))

    def _watch_worker(self, worker: WorkerProcess) -> None:
        if worker.is_alive:
            loop = asyncio.get_running_loop()
            loop.add_reader(worker.sentinel, self._on_end, worker)
            loop.add_reader(worker.channel.fileno(), self._on_readable, worker)

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def request(self, worker: int, request: RolloutRequest) -> None:
        serial, random, place = request
        self.states[worker] = "running"  # also after it has run free, and finished
        if self._writes:
            self._page.begin(self.infos[worker].frames)
        self.post(worker, ("rollout", serial, random, place.lease))

    def places(self, workers: Sequence[int], dim: int | None) -> SharedPlaces:
        def teach(arrangement: Arrangement) -> None:
            for index, worker in enumerate(workers):
                self.post(worker, ("learn", arrangement, index))

        return SharedPlaces(dim, teach)

    def cut(self, serial: int) -> None:
        self._page.cut(serial)

    def run_free(self, total: float, random: int, batch: int | None = None) -> None:
        limits = FreeLimits.of(total, random, batch, self._page.begun)
        for worker in self._workers:
            if self.states[worker.index] == "finished":  # one that is paused is so until the pause ends
                self.states[worker.index] = "running"
            self.post(worker.index, ("run", limits))

    def pause(self) -> None:
        self._page.paused = True

    def resume(self) -> None:
        self._page.paused = False
        self.call_soon(self._resume)

    def _resume(self) -> None:
        for index in [index for index, state in self.states.items() if state == "paused" and not self._page.paused]:
            self._resume_one(index)

    def _resume_one(self, index: int) -> None:
        self.states[index] = "running"
        try:
            self.post(index, ("resume",))
        except (RuntimeError, OSError) as error:
            self._fail(error)

    def stand_still(self, workers: Iterable[int]) -> bool:
        return all(self.states[worker] in ("paused", "finished") for worker in workers)

    # -- numbers on the control page ----------------------------------------------------------------------------------

    frames = _on_page("frames")
    counted = _on_page("counted")

    def count_version(self) -> None:
        self._page.count()

    def announce(self, version: int, workers: Iterable[int] | None) -> None:
        self._page.publish(version, range(len(self._workers)) if workers is None else workers)

    def follow(self, root: Any, index: int) -> None:
        for worker in self._workers:
            self.post(worker.index, ("follow", root, index))

    def trajectory_pool(self) -> _TrajectoryPool:
        return SharedPool(self._page)

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, index: int, message: tuple[Any, ...]) -> None:
        """Send a message to a worker, from any thread, without waiting. Raises ClosedError: in a forked process;
        RuntimeError: a thousand messages wait to be read; OSError: it cannot be sent, though the worker is there."""
        if not self.is_ours:
            self.check()
        worker = self._workers[index]
        if not worker.send(encode(message)):
            self.call_soon(self._send_later, worker)

    def _send_later(self, worker: WorkerProcess) -> None:
        if worker.is_alive and worker.is_open:
            asyncio.get_running_loop().add_writer(worker.channel.fileno(), self._on_writable, worker)

    def _on_writable(self, worker: WorkerProcess) -> None:
        try:
            is_done = worker.flush()
        except OSError as error:
            note(error, f"What {worker.name} is to do cannot be sent.")
            self._fail(error)
            is_done = True
        if is_done:
            asyncio.get_running_loop().remove_writer(worker.channel.fileno())

    def call(self, worker: int, name: str, arguments: bytes) -> int:
        self.check()
        number = next(self._calls)
        self.replies[number] = None
        try:
            self.post(worker, ("call", number, name, arguments))
        except BaseException:
            del self.replies[number]
            raise
        return number

    def _on_readable(self, worker: WorkerProcess) -> None:
        self._read(worker)
        if not worker.is_open:
            asyncio.get_running_loop().remove_reader(worker.channel.fileno())
        self._notify()

    def _read(self, worker: WorkerProcess) -> None:
        while worker.is_open:
            try:
                message = worker.channel.receive()
            except EOFError:
                worker.is_open = False  # it is ending, and its exit code will show how
                return
            except Exception as error:
                note(error, f"What {worker.name} has sent cannot be read here.")
                self._fail(error)
                return
            if message is None:
                return
            self._take(worker, message)

    def _take(self, worker: WorkerProcess, message: tuple[Any, ...]) -> None:
        kind = message[0]
        worker.has_begun = True
        if kind == "begun" or (self.ending and kind != "failed"):
            return
        if kind == "reply":
            if message[1] in self.replies:
                self.replies[message[1]] = message[2:]
        elif kind == "failed":
            self._failed(worker.name, message[1])
        elif kind == "built":
            self.infos[worker.index] = WorkerInfo(*message[1:])
        elif kind == "result":
            self.results.append(RolloutResult(worker.index, *message[1:]))
        elif kind == "paused" and not self._page.paused:  # it read the page just before the pause ended
            self._resume_one(worker.index)
        else:
            self.states[worker.index] = kind

    def _on_end(self, worker: WorkerProcess) -> None:
        self._read(worker)
        self._unwatch(worker)
        worker.is_alive = False
        worker.process.join(1.0)
        if self.failure is None and not self.ending:
            self.failure = died(worker.name, worker.process.exitcode, starting=worker.index not in self.infos)
        self._notify()

    def _unwatch(self, worker: WorkerProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.sentinel)
        loop.remove_reader(worker.channel.fileno())
        loop.remove_writer(worker.channel.fileno())

    # -- the end ------------------------------------------------------------------------------------------------------

    def stop(self, close_env: bool = True) -> None:
        self._page.stop(close_env)

    async def _end(self, timeout: float, close_env: bool) -> None:
        self.stop(close_env)
        for worker in self._workers:
            self._read(worker)
            if not worker.has_begun:  # it will see the page, and build nothing
                worker.kill()
            elif worker.is_alive:
                # Sending fails, or a thousand messages wait: the bell reaches the worker first.
                with contextlib.suppress(RuntimeError, OSError):
                    self.post(worker.index, ("stop",))
                worker.ring(timeout + GRACE_SECONDS)
        if await self._happens(self._have_ended, BY_ITSELF * timeout):
            return
        for worker in self._workers:
            if worker.is_alive:
                logger.warning("%s did not end within %.1f s: terminating it", worker.name, BY_ITSELF * timeout)
                worker.process.terminate()
        await self._happens(self._have_ended, (TERMINATED - BY_ITSELF) * timeout)

    async def _cut_off(self, deadline: float) -> None:
        for worker in self._workers:
            worker.kill()
        await self._happens(self._have_ended, KILLED_SECONDS)
        if not self.is_over:
            for worker in self._workers:
                self._unwatch(worker)
                worker.close()

    def _have_ended(self) -> bool:
        return not any(worker.is_alive for worker in self._workers)

    def close(self) -> None:
        self._page.close()
