"""Worker: what a collector's worker process runs.

Its main thread waits for messages and rolls out, in turns; weights come on the loop thread of the blocking API, and
are let in between two steps, or at once while the main thread waits. A second thread waits for the end: of the
collector, which an idle or stepping leaf sees by itself, or of the trainer's process; and for its own, which takes no
longer than the trainer has allowed.

Messages come through a channel: first ``("build", spec)``. Others are answered between two rollouts: ``("rollout",
serial, random, grant)``, ``("learn", number, arrangement, index)``, ``("follow", place, index)``,
``("call", number, (name, *arguments))``, ``("run",)``, ``("stop",)``. Whatever the user's code raises is
sent back, and ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from asyncsync.collectors.trajectories import processed
from asyncsync.collectors.workers.batch_writer import Window
from asyncsync.collectors.workers.channel import Channel, Packet, Parcel, encode, encode_any, loads
from asyncsync.collectors.workers.control_page import MemoryPlace, page_at
from asyncsync.collectors.workers.failures import Failure
from asyncsync.errors import ClosedError, WeightSyncError
from asyncsync.net.endpoint import private_directory, sweep

__all__ = ["Spec", "run_worker"]

logger = logging.getLogger("asyncsync")

SWITCH_INTERVAL = 5e-4  # the loop thread gets its turn ten times as soon as by default
ORPHAN_SECONDS = 2.0
SWEEP_AGAIN = 0.01
SEND_SECONDS = 60.0


@dataclass
class Spec:
    """What a worker is; travels by cloudpickle.

    Attributes:
        kind: class of the collector that it runs, or what makes one.
        create_env_fn: its environment.
        arguments: further ones of the collector's constructor.
        post_collect_hook: called with each batch.
        init_fn: called first.
        threads: of torch.
        follows: whether the trainer tells it the newest version by the page.
        timeout: seconds for the first weights to come.
    """

    kind: Callable[..., Any]
    create_env_fn: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    post_collect_hook: Callable[[TensorDictBase], None] | None = None
    init_fn: Callable[[], None] | None = None
    threads: int = 1
    follows: bool = True
    timeout: float = 60.0


class _Stop(Exception):
    """The trainer wants this process to end."""


def run_worker(
    end: socket.socket,
    bell: Connection,
    index: int,
    place: MemoryPlace,
    replay_buffer: Any,
    schemes: Mapping[str, Any],
) -> None:
    """The process's target."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until now; an environment's processes are not
    sys.setswitchinterval(SWITCH_INTERVAL)
    _seed_apart()
    watched = [bell, *_trainer(place.pid)]  # before the page: that it opens shows that this is the trainer's pid
    try:
        worker = _Worker(Channel(end), index, place, schemes)
    except WeightSyncError:
        if bell.poll(1.0):
            return  # the trainer has ended meanwhile
        raise
    threading.Thread(target=worker.listen, args=(watched,), name="asyncsync-collector-bell", daemon=True).start()
    code = 0
    try:
        try:
            worker.build(replay_buffer)
            worker.serve()
        except _Stop:
            pass
        finally:
            worker.close()
    except BaseException as error:
        if not (worker.is_over and isinstance(error, (ClosedError, WeightSyncError))):
            code = 1
            worker.report(error)
    if not worker.page.stopped:
        worker.sweep(ORPHAN_SECONDS if worker.is_orphaned else 0.0)
    worker.ended.set()
    gc.freeze()  # else the interpreter's end searches all of torch for garbage: 0.6 s of a core
    if code:
        sys.exit(code)


def _seed_apart() -> None:
    """Random numbers of this process's own: torch begins all processes alike, and a forked one goes on like others."""
    torch.seed()
    np.random.seed()
    random.seed()


def _trainer(pid: int) -> list[int]:
    """What tells the trainer's end even if a child that it forked keeps our pipes open."""
    if not hasattr(os, "pidfd_open"):
        return []
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        return []  # the page tells
    except OSError as error:  # forbidden by a sandbox: the bell remains
        logger.debug("cannot watch process %d: %s", pid, error)
        return []


class _Worker:
    def __init__(self, pipe: Channel, index: int, place: MemoryPlace, schemes: Mapping[str, Any]) -> None:
        self.page = page_at(place)
        self.ended = threading.Event()
        self._pipe = pipe
        self._index = index
        self._schemes = schemes
        self._window = Window()
        self._collector: Any = None
        self._nested = self._writes = self._connecting = False
        self._hook: Callable[[TensorDictBase], None] | None = None
        self._serial = self._done = 0
        self.is_orphaned = False
        self._free = False

    @property
    def is_over(self) -> bool:
        return self.is_orphaned or self.page.stopped

    # -- beginning and end --------------------------------------------------------------------------------------------

    def build(self, replay_buffer: Any) -> None:
        kind, *rest = self._receive()  # the trainer sends it first, unless it ends before that
        if kind == "stop" or self.page.stopped:
            raise _Stop
        [pickled] = rest
        spec: Spec = loads(pickled)
        torch.set_num_threads(spec.threads)
        if spec.init_fn is not None:
            spec.init_fn()
        self._hook = spec.post_collect_hook
        given = spec.arguments if replay_buffer is None else spec.arguments | {"replay_buffer": replay_buffer}
        self._collector = collector = spec.kind(spec.create_env_fn, **given)
        self._writes = replay_buffer is not None
        self._nested = collector.acts_elsewhere
        collector._attach(self, self._window.allocate)
        if self._hook is None:
            self._hook = None if self._nested else collector.post_collect_hook  # of a partial
        elif self._writes:
            collector.post_collect_hook = self._hook
        collector.register_scheme_receiver(self._schemes, synchronize_weights=False)
        if spec.follows:
            self._follow(self.page.place, self._index)
        self._connecting = True
        if self.page.stopped:  # before there was anything to interrupt
            raise _Stop
        self._send("built", collector.requested_frames_per_batch, collector._batch_dims(), collector._policy_devices())
        if self._schemes:
            collector._connect_receivers(self._schemes, spec.timeout)
        self._connecting = False
        self._send("connected")

    def listen(self, watched: list[Any]) -> None:
        """In a thread: until the trainer is no more, or the time is over that it gives for our end."""
        [bell, *_] = watched
        limit = None
        while bell in wait(watched, limit):
            try:
                [limit] = struct.unpack("d", bell.recv_bytes())
            except (EOFError, OSError):
                break
            self._interrupt()
        self.is_orphaned = True
        self._pipe.shutdown()
        self.sweep()
        self._interrupt()
        self.ended.wait(ORPHAN_SECONDS)
        self.sweep(ORPHAN_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    def _interrupt(self) -> None:
        """A leaf sees for itself, between two steps, that it is over; a collector of collectors waits for its own, and
        one that is not connected yet for the trainer."""
        if self._nested or self._connecting:
            self._collector._interrupt(ORPHAN_SECONDS, self.page.closes_env)

    def sweep(self, patience: float = 0.0) -> None:
        """Remove what a trainer that was killed has left.

        Args:
            patience: how many seconds its locks may stay taken: until it has ended altogether, or a process that it had
                just forked has let go of them.
        """
        deadline = time.monotonic() + patience
        for scheme in self._schemes.values():
            while (private := private_directory(scheme._bus.endpoint)) is not None and private.exists():
                try:
                    sweep(private.parent)
                except OSError as error:
                    logger.debug("%s cannot be swept: %s", private.parent, error)
                if time.monotonic() >= deadline:
                    break
                time.sleep(SWEEP_AGAIN)

    def close(self) -> None:
        if self._collector is not None:
            self._collector.shutdown(close_env=self.page.closes_env)

    def report(self, error: BaseException) -> None:
        try:
            self._pipe.put(encode(("failed", Failure.of(error))), SEND_SECONDS)
        except OSError:
            logger.exception("a collector's worker has failed, and its trainer cannot be told of %r", error)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, *message: Any) -> None:
        self._put(encode(message))

    def _put(self, packet: Packet) -> None:
        try:
            self._pipe.put(packet, SEND_SECONDS)
        except ConnectionError:  # the trainer is gone
            raise _Stop from None

    def _receive(self, wait: bool = True) -> Any:
        """The next message; None: not waited for, there is none."""
        try:
            return self._pipe.get() if wait else self._pipe.receive()
        except EOFError:
            raise _Stop from None

    def serve(self) -> None:
        while True:
            self._handle(self._receive())

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == "rollout":
            self._roll(*message[1:])
        elif kind == "learn":
            self._window.learn(*message[1:])
        elif kind == "call":
            self._answer(message[1], message[2])
        elif kind == "follow":
            self._follow(*message[1:])
        elif kind == "run":
            self._run_free(message[1])
        elif kind == "stop":
            raise _Stop

    def _follow(self, place: MemoryPlace | None, index: int) -> None:
        """The newest version is on this page; None: what has been heard of here is."""
        reads = None if self._nested or place is None else partial(page_at(place).newest, index)
        self._collector._follow(place, index, reads)

    def _answer(self, number: int, call: bytes | tuple[Any, ...]) -> None:
        name, *arguments = loads(call) if isinstance(call, bytes) else call
        try:
            result = getattr(self, f"_do_{name}")(*arguments)
        except Exception as error:
            # Such as a seed that the environment refuses: that ends nothing.
            self._send("reply", number, Failure.of(error), None)
        else:
            self._put(encode_any(("reply", number, None, result)))

    def _do_seed(self, seed: int, static_seed: bool) -> int:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        following: int = self._collector.set_seed(seed, static_seed)  # resets, with what was seeded
        return following

    def _do_reset(self) -> None:
        self._collector.reset()

    def _do_state(self) -> Any:
        return self._collector.state_dict()

    def _do_load(self, state: Any) -> None:
        self._collector.load_state_dict(state)

    def _do_pre_hook(self, hook: Any) -> None:
        self._collector.pre_collect_hook = hook

    def _do_post_hook(self, hook: Any) -> None:
        self._hook = hook
        if self._writes:
            self._collector.post_collect_hook = hook

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _roll(self, serial: int, random: bool | None, grant: Any) -> None:
        if serial <= self._done:
            return  # its trainer was interrupted, and is not sure to have asked
        self._serial = self._done = serial
        if self.page.paused:
            self._stand_still()
        self._window.open(grant)
        if self._writes:
            frames = self._write(random)
            self._send("batch", serial, False, 0, frames, None, None)
            return
        batch, frames, is_plain = self._next(random)
        if self._hook is not None:
            self._hook(batch)
        steps = batch.batch_size[-1]
        written, layout = self._window.close(batch)
        if layout is not None and is_plain:  # of a whole rollout, if this one was cut
            layout = replace(layout, steps=self._collector.frames_per_batch)
        if written:
            del batch
            batch = self._window.kept(steps)
        if batch is None:
            self._send("batch", serial, True, steps, frames, None, None)
        else:
            self._send("batch", serial, False, steps, frames, Parcel.of(batch), layout)

    def _next(self, random: bool | None) -> tuple[TensorDictBase, int, bool]:
        """A batch, how many frames it has, and whether it is a rollout as it was collected."""
        collector = self._collector
        batch, frames = collector._rollout_for_parent(random, writes=False)
        if self.is_over:
            raise _Stop
        if self._nested:
            return batch, frames, False
        # The trainer does its own with the whole batch. This is what a partial has asked of each worker's collector.
        if collector.postproc is None and not collector.split_trajs:
            return batch, frames, True
        return processed(batch, collector.postproc, split_trajs=collector.split_trajs), frames, False

    def _write(self, random: bool | None) -> int:
        """One rollout into the replay buffer; returns how many frames it had."""
        frames: int
        _, frames = self._collector._rollout_for_parent(random, writes=True)
        if self.is_over:
            raise _Stop
        self.page.add_frames(frames)
        return frames

    def counted(self) -> int:
        """How many versions updaters above have counted."""
        return self.page.counted

    @property
    def calls(self) -> bool:
        return self._is_cut or self.page.paused

    def interrupts(self) -> bool:
        if self.page.paused:
            self._stand_still()
        return self._is_cut

    @property
    def _is_cut(self) -> bool:
        return self.is_over or self.page.is_cut(self._serial)

    # -- running free -------------------------------------------------------------------------------------------------

    def _run_free(self, plan: tuple[float, int]) -> None:
        """Roll out until the trainer's total is reached, or it wants the end."""
        total, random = plan
        self._free, self._serial = True, sys.maxsize  # never cut
        while self.page.frames < total:
            if self.page.paused:
                self._stand_still()
            while (message := self._receive(wait=False)) is not None:
                self._handle(message)
            self._write(self.page.frames < random)
        self._free = False
        self._send("finished")

    def _stand_still(self) -> None:
        """Between two steps, until the trainer goes on; with workers of its own, between two of their batches."""
        with self._collector.pause() if self._nested else contextlib.nullcontext():
            self._send("paused")
            self._until_resumed()

    def _until_resumed(self) -> None:
        """Calls that need the end of a rollout are refused."""
        while (message := self._receive())[0] != "resume":
            if message[0] == "call" and isinstance(message[2], tuple) and message[2][0] == "state":
                self._handle(message)
            elif message[0] == "call":
                name = loads(message[2])[0] if isinstance(message[2], bytes) else message[2][0]
                error = RuntimeError(f"a paused collector is in the middle of a rollout: {name} needs its end")
                self._send("reply", message[1], Failure.of(error), None)
            else:
                self._handle(message)
