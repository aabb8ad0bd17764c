"""Faults that are planted in the library on purpose, and what is looked up inside, for tests of public names only.

Everything here names private parts, so that a rebuild of what is behind the public names changes this file and no test.
"""

import asyncio
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import zmq.asyncio

import asyncsync.collectors.multi.driver
import asyncsync.runtime.threads
import asyncsync.schemes.blocking
import asyncsync.schemes.scheme
import asyncsync.schemes.taking
import asyncsync.weights.encoding
from asyncsync.bus.fast_path import TrainerFastPath
from asyncsync.bus.trainer import TrainerLink
from asyncsync.collectors.base import SHUTDOWN_SECONDS as SHUTDOWN_SECONDS
from asyncsync.collectors.base import BaseCollector as BaseCollector
from asyncsync.collectors.batch_layout import layout_of
from asyncsync.collectors.trajectories import _TrajectoryPool as TrajectoryPool  # noqa: F401
from asyncsync.collectors.workers.shared_batches import Batch as Batch
from asyncsync.model.gate import Gate
from asyncsync.net.endpoint import INTRODUCED
from asyncsync.net.keys import UNKNOWN_KEY_SECONDS
from asyncsync.protocol.settings import Identity
from asyncsync.protocol.targets import Leases
from asyncsync.runtime.threads import Interruption as Interruption
from asyncsync.runtime.threads import interrupted_by as interrupted_by
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.shared_memory import Lease, SlotTransport
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import lies_in_slab, pack
from asyncsync.weights.tree import flatten
from asyncsync.wire import messages
from helpers.apis import bare
from helpers.pairs import until

BLOCKING_CALLS: list[ModuleType] = [asyncsync.schemes.blocking, asyncsync.runtime.threads]
"""The modules through which each blocking call goes, for an interrupt at each of their lines."""
TAKING: list[ModuleType] = [asyncsync.schemes.taking, *BLOCKING_CALLS]
"""The same for a block of take()."""
DRIVER: list[ModuleType] = [asyncsync.collectors.multi.driver]
"""The same for a collector's call that waits for its workers."""


def release_slots_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender takes a slot back while a worker still reads it."""

    report = Leases.report

    def report_all(self: Any, nonce: bytes, last: int, in_use: Any) -> None:
        report(self, nonce, messages.MAX_SERIAL, ())

    monkeypatch.setattr(Leases, "report", report_all)


def forget_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that takes it, although it is switched off, raises AttributeError."""
    monkeypatch.delattr(TrainerFastPath, "publish")


def open_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers cannot open the sender's shared memory."""

    def attach(*arguments: Any) -> Any:
        raise PermissionError("this slot cannot be opened")

    monkeypatch.setattr(SlotTransport, "attach", attach)


def no_boot_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender cannot tell that its workers share its host."""
    monkeypatch.setattr("asyncsync.bus.trainer.this_process", lambda: Identity(os.getpid(), "", 0))


def on_leaving_the_gate(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], Any]) -> None:
    """``before`` wraps what a reader calls when it leaves the gate."""
    monkeypatch.setattr(Gate, "leave", before(Gate.leave))


def pack_by(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Each slab is packed after ``before()``, which may raise."""

    def packing(*arguments: Any) -> None:
        before()
        pack(*arguments)

    monkeypatch.setattr("asyncsync.bus.publishing.pack", packing)


def pack_half(monkeypatch: pytest.MonkeyPatch, wait: threading.Event) -> None:
    """Each slab is packed to its half; then, once ``wait`` is set, MemoryError is raised."""

    def packing(slab: Any, flat: Any, progress: Callable[[], None] | None, tensors: Any) -> None:
        slab.packed = slab.nbytes // 2
        progress()
        assert wait.wait(10)
        raise MemoryError("no page for it")

    monkeypatch.setattr("asyncsync.bus.publishing.pack", packing)


def descriptors_left() -> int:
    """How many file descriptors this process may still open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


def no_loop_thread() -> bool:
    """Whether this process has not started the blocking API's loop thread."""
    return asyncsync.runtime.threads._current is None


def introduced() -> str:
    """The endpoint of a bus that is told its address by another channel."""
    return INTRODUCED


# -- what is looked up inside


def lies_in_a_slab(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is that of a slot, or of what was received, and not the model's own."""
    return lies_in_slab(tensor)


def nbytes(weights: Any) -> int:
    """How many bytes a publication of these weights has."""
    return Layout.of(flatten(weights)).nbytes


def pending(receiver: Any) -> bool:
    """Whether an update waits for readers of the receiver's models, or of the bus's."""
    receiver = bare(receiver)
    gate = getattr(receiver, "bus", receiver).gate
    return gate is not None and bool(gate.pending)


def pool(scheme: Any) -> Any:
    """The memory that a sender has for what it packs, or a receiver for what comes, where that is not in slots."""
    link = bare(scheme).bus.link
    return link.pool if isinstance(link, TrainerLink) else link.machine.pool


def unsent(sender: Any) -> bool:
    """Whether the sender has instructions that have not gone out."""
    return bool(bare(sender).bus.link.end_fast_path().outbox)


def broadcast_of(sender: Any) -> Any:
    """The socket that sends to all workers at once; None: there is none."""
    return bare(sender).bus.link.broadcast


def subscribed(sender: Any) -> set[bytes]:
    """The workers that hear what is sent to all."""
    return bare(sender).bus.link.machine.fanout.subscribed


@contextmanager
def counted(sender: Any) -> Iterator[list[str]]:
    """The kinds of the messages that are sent to all workers at once."""
    sent: list[str] = []
    broadcast = broadcast_of(sender)
    original = broadcast.send

    def send(frames: Any) -> None:
        sent.append(type(messages.decode([bytes(frame) for frame in frames])[0]).__name__)
        original(frames)

    broadcast.send = send
    yield sent
    broadcast.send = original


def message(kind: str, *fields: Any) -> Any:
    """A message of the protocol, as it travels."""
    return messages.encode(getattr(messages, kind)(*fields))


@asynccontextmanager
async def mute_worker(sender: Any, worker: int) -> AsyncIterator[Callable[[], Any]]:
    """A peer that speaks the protocol, accepts every layout, and never fetches a byte.

    Yields what counts the updates that it has been told of and has not read yet.
    """
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(sender.bus.endpoint)
        await socket.send(message("Hello", worker, bytes([worker]) * 16, 1, 0, "", 0, None, {"policy": 0, "": 0}))
        welcome, _ = messages.decode(await asyncio.wait_for(socket.recv_multipart(), 5))
        assert isinstance(welcome, messages.Welcome)
        await socket.send(message("Ready", welcome.epoch, {m: d for m, d in welcome.models.items() if d}))

        async def updates() -> int:
            found = 0
            while await socket.poll(0):
                instruction, _ = messages.decode(await socket.recv_multipart())
                found += isinstance(instruction, messages.Update)
            return found

        yield updates


def note_device_events(monkeypatch: pytest.MonkeyPatch, note: Callable[[Any], None]) -> None:
    """``note`` is called with the tensors whose devices' work a publication waits for, in the thread that asks."""
    original = Scheme._chosen

    def noting(scheme: Scheme, flat: Any) -> Any:
        note(dict(flat.tensors))
        return original(scheme, flat)

    monkeypatch.setattr(Scheme, "_chosen", noting)


# -- other limits


def fetch_deadline(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long a worker's transport may take to fetch."""
    monkeypatch.setattr("asyncsync.bus.worker.FETCH_DEADLINE", seconds)


def blocked_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long a sender's event loop has to be blocked, for a warning."""
    monkeypatch.setattr("asyncsync.bus.trainer.BLOCKED_SECONDS", seconds)


async def between_looks(sender: Any) -> None:
    """Wait until the sender has just looked at its list of clients: the next look is a second away."""
    listed = bare(sender).bus.link.admission.listed
    before = listed.refreshed_at
    await until(lambda: listed.refreshed_at != before)
    await asyncio.sleep(2 * UNKNOWN_KEY_SECONDS)


# -- what a host may lack, or lose


def break_side_channel(sender: Any, which: int) -> None:
    """The sender's socket to one of the workers of its host is closed."""
    link = bare(sender).bus.link
    link.loop.call_soon_threadsafe(list(link.side_channels.of.values())[which].close)


def no_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have no library that decompresses."""
    monkeypatch.setattr("asyncsync.protocol.holdings.available_codecs", lambda: 0)


def encode_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room to compress the next piece."""
    encode = asyncsync.weights.encoding.encode_piece

    def fail(*arguments: Any) -> bytes | None:
        monkeypatch.setattr(asyncsync.weights.encoding, "encode_piece", encode)
        raise MemoryError("no room to compress")

    monkeypatch.setattr(asyncsync.weights.encoding, "encode_piece", fail)


def no_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has none."""

    def refuse(*arguments: Any, **options: Any) -> int:
        raise asyncsync.WeightSyncError("this system has none")

    monkeypatch.setattr("asyncsync.transports.shared_memory.MemoryFile.create", refuse)


def no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may not open the sender's memory: as another user's process, or with /proc hidden."""
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).startswith("/proc/") and "/fd/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr("asyncsync.transports.shared_memory.os.open", refuse)


def another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is some other process of the sender's number, or none."""
    _describe_with(monkeypatch, pid=1)


def another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the sender's file is that of another of its files."""
    _describe_with(monkeypatch, fd=0)


def _describe_with(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    real = Lease.encode
    monkeypatch.setattr(Lease, "encode", lambda lease: real(lease._replace(place=lease.place._replace(**changes))))


def newest_target_of(collector: Any) -> int:
    """The version that the collector's sender wants it to have, as far as it has been told."""
    return collector.acting_weights.main_bus.newest_target()


def batch_bytes(batch: Any) -> int:
    """How much memory workers and trainer share for such a batch."""
    layout = layout_of(batch)
    return layout.steps * sum(leaf.nbytes for leaf in layout.leaves)
