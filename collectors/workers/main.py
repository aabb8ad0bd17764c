"""What a collector's worker process runs: the loop around a RolloutWorker.

Its main thread waits for messages and rolls out, in turns. Weights come on the loop thread of the blocking API, and are
applied between two steps, or at once while the main thread waits. A second thread waits for the end of the collector or
of the trainer's process, and ends this process when the trainer's time for that is over.

When its imports are over it says ``("begun",)``. Messages come through a channel: first ``("build", specification)``.
Others are answered between two rollouts: ``("rollout", serial, random, lease)``, ``("learn", arrangement, index)``,
``("follow", root, index)``, ``("call", number, name, arguments)``, ``("run", limits)``, ``("stop",)``.
Whatever the user's code raises is sent back, and ends the process.
"""

from __future__ import annotations

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
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from asyncsync.collectors.workers.channel import Channel, Parcel, encode, loads
from asyncsync.collectors.workers.control_page import page_at
from asyncsync.collectors.workers.failures import Failure
from asyncsync.collectors.workers.group import RolloutRequest
from asyncsync.collectors.workers.rollout_worker import RolloutWorker, Stopped
from asyncsync.collectors.workers.shared_batches import BatchWriter
from asyncsync.errors import ClosedError, WeightSyncError
from asyncsync.net.endpoint import private_directory, sweep
from asyncsync.transports.shared_memory import MemoryPlace

logger = logging.getLogger("asyncsync")

SWITCH_INTERVAL = 5e-4  # the loop thread gets its turn ten times as soon as by default
ORPHAN_SECONDS = 2.0
SWEEP_AGAIN = 0.01
SEND_SECONDS = 60.0


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
    seed_apart()
    # Before the control page: that it can be opened shows that this is the trainer's pid.
    watched = [bell, *_trainer(place.pid)]
    channel = Channel(end)
    try:
        loop = WorkerLoop(channel, index, place, schemes)
    except WeightSyncError as error:
        if bell.poll(1.0):
            return  # the trainer has ended meanwhile
        report(channel, error)
        sys.exit(1)
    threading.Thread(target=loop.listen, args=(watched,), name="asyncsync-collector-bell", daemon=True).start()
    code = 0
    try:
        try:
            loop.build(replay_buffer)
            loop.run()
        except Stopped:
            pass
        finally:
            loop.close()
    except BaseException as error:
        if not (loop.page.stopped and isinstance(error, (ClosedError, WeightSyncError))):
            code = 1
            report(channel, error)
    if loop.is_orphaned or not loop.page.stopped:
        loop.sweep(ORPHAN_SECONDS if loop.is_orphaned else 0.0)
    loop.ended.set()
    gc.freeze()  # else the interpreter's end searches all of torch for garbage: 0.6 s of a core
    if code:
        sys.exit(code)


def seed_apart() -> None:
    """Seed this process's random numbers: torch begins all processes alike, and a forked one continues its parent's."""
    torch.seed()
    np.random.seed()
    random.seed()


def _trainer(pid: int) -> list[int]:
    """Descriptors that are readable when the trainer has ended, even if a child that it forked keeps our pipes open."""
    if not hasattr(os, "pidfd_open"):
        return []
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        return []  # then the control page cannot be opened
    except OSError as error:  # forbidden by a sandbox: the bell remains
        logger.debug("cannot watch process %d: %s", pid, error)
        return []


def report(channel: Channel, error: BaseException) -> None:
    """Tell the trainer why this process ends."""
    try:
        channel.put(encode(("failed", Failure.of(error))), SEND_SECONDS)
    except OSError:
        logger.exception("a collector's worker failed and cannot report %r to its trainer", error)


class WorkerLoop:
    """Carries out what comes through the channel."""

    def __init__(self, channel: Channel, index: int, place: MemoryPlace, schemes: Mapping[str, Any]) -> None:
        self.page = page_at(place)
        self.ended = threading.Event()
        self.is_orphaned = False
        self._channel = channel
        self._schemes = schemes
        self._writer = BatchWriter()
        self._kept: deque[tuple[Any, ...]] = deque()  # what is for the end of the rollout under way
        self._worker = RolloutWorker(index, self.page, self._writer, self.stand_still, self.serve)

    def stand_still(self) -> None:
        """Report a pause, and return when it is over. Rollouts wait for that."""
        self._send("paused")
        while (message := self._receive())[0] != "resume":
            if message[0] in ("rollout", "run"):
                self._kept.append(message)
            else:
                self._handle(message)

    def serve(self) -> None:
        """Carry out what has come."""
        while (message := self._receive(wait=False)) is not None:
            self._handle(message)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def build(self, replay_buffer: Any) -> None:
        self._send("begun")  # before the page is read: a trainer that ends either sees this, or is seen to end
        message = self._receive()  # the trainer sends the specification first, unless it ends before that
        if message[0] == "stop" or self.page.stopped:
            raise Stopped
        self._send("built", *self._worker.build(loads(message[1]), replay_buffer, self._schemes))
        self._worker.connect()
        self._send("connected")

    def listen(self, watched: list[Any]) -> None:
        """In a thread: wait until the trainer has ended, or the time that it allows for this process's end is over."""
        [bell, *_] = watched
        limit = None
        while bell in wait(watched, limit):
            try:
                [limit] = struct.unpack("d", bell.recv_bytes())
            except (EOFError, OSError):
                break
            self._worker.interrupt(ORPHAN_SECONDS)
        self.is_orphaned = True
        if not self.page.stopped:  # nobody else has: the main thread sees it before its next step
            self.page.stop()
        self._channel.shutdown()
        self.sweep()
        self._worker.interrupt(ORPHAN_SECONDS)
        self.ended.wait(ORPHAN_SECONDS)
        self.sweep(ORPHAN_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    def sweep(self, patience: float = 0.0) -> None:
        """Remove what a trainer that was killed has left. Its locks may stay taken for ``patience`` seconds: until it
        has ended altogether, or a process that it had just forked has released them."""
        deadline = time.monotonic() + patience
        for scheme in self._schemes.values():
            while (private := private_directory(scheme.bus.endpoint)) is not None and private.exists():
                try:
                    sweep(private.parent)
                except OSError as error:
                    logger.debug("%s cannot be swept: %s", private.parent, error)
                if time.monotonic() >= deadline:
                    break
                time.sleep(SWEEP_AGAIN)

    def close(self) -> None:
        self._worker.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, *message: Any) -> None:
        packet = encode(message)
        try:
            self._channel.put(packet, SEND_SECONDS)
        except ConnectionError:  # the trainer is gone
            raise Stopped from None

    def _receive(self, wait: bool = True) -> Any:
        """The next message; None: there is none, and waiting was not wanted."""
        try:
            return self._channel.get() if wait else self._channel.receive()
        except EOFError:
            raise Stopped from None

    def run(self) -> None:
        while True:
            self._handle(self._kept.popleft() if self._kept else self._receive())

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        worker = self._worker
        if kind == "rollout":
            _index, serial, in_place, steps, frames, batch, layout = worker.rollout(RolloutRequest(*rest))
            payload = None if batch is None else Parcel.of(batch)
            self._send("result", serial, in_place, steps, frames, payload, layout)
        elif kind == "learn":
            self._writer.learn(*rest)
        elif kind == "call":
            self._answer(*rest)
        elif kind == "follow":
            worker.follow(*rest)
        elif kind == "run":
            worker.run_free(*rest)
            self._send("finished")
        elif kind == "stop":
            raise Stopped

    def _answer(self, number: int, name: str, arguments: bytes) -> None:
        try:
            result = Parcel.of(self._worker.call(name, *loads(arguments)))
        except Exception as error:
            # Such as a seed that the environment refuses, or what cannot be pickled: that ends nothing.
            self._send("reply", number, Failure.of(error), None)
        else:
            self._send("reply", number, None, result)
