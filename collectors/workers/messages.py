"""What a collector and its workers send each other: pickles, failures, and packets through sockets.

A failure is a worker's exception. The trainer raises it with the worker's type where that is possible, with a note that
names the worker, and with a :class:`~asyncsync.errors.RemoteError` as its cause, which has the worker's traceback. It
raises the RemoteError itself if the exception cannot be pickled, its class cannot be imported here, or its attributes
cannot be set.

Between processes of one host, each message is one packet, so neither side reads or writes half of a message. A packet
has at most 32 KiB. A larger message is written to a memory file, whose descriptor travels in the packet. The receiver
maps the file, and the message's tensors lie in that mapping, so receiving copies nothing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import socket
import struct
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from asyncsync.errors import AckTimeout, RemoteError
from asyncsync.transports.shared_memory import MemoryFile
from asyncsync.weights.tensors import is_plain_bytes, normal_tensors

MAX_PACKET = 32 << 10
SEND_SECONDS = 60.0
_PARTS, _FILE = struct.Struct("<Q"), struct.Struct("i")
_ALIGNED = 64


# -- pickles -----------------------------------------------------------------------------------------------------------


def dumps(value: Any) -> bytes:
    """Pickle any object of a program, also lambdas, closures, and what its main module defines."""
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Does not copy the memory of plain tensors, which torch's own pickling copies twice."""

    def reducer_override(self, obj: Any) -> Any:
        is_plain = (
            type(obj) is torch.Tensor
            and obj.layout is torch.strided
            and is_plain_bytes(obj)
            and not (obj.requires_grad or obj.is_quantized or obj.__dict__)
            and obj.numel() > 0
        )
        if is_plain:
            with normal_tensors():
                memory: Any = obj.reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(memory), obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    with normal_tensors():
        return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A spawned process imports the trainer's __main__ under the name __mp_main__.
        return super().find_class("__main__" if module == "__mp_main__" else module, name)


def pickled(value: Any) -> bytes:
    """Pickle what the user gives to workers. If pickling raises, a note on the error says what to do."""
    try:
        return dumps(value)
    except Exception as error:
        add_note_to(
            error,
            "cloudpickle sends environment factories, policy, hooks, postproc, schemes and a replay buffer to the "
            "workers. Make what cannot be pickled in the worker: in create_env_fn, policy_factory or init_fn. A replay "
            "buffer must pickle as a handle on its storage.",
        )
        raise


@dataclass(eq=False, repr=False)  # asyncio's log shows the arguments of callbacks: not all these bytes
class Parcel:
    """A pickled part of a message. The receiver unpickles it when and where it needs the value: ``loads(parcel)``."""

    pickled: Any
    buffers: Sequence[Any]

    @classmethod
    def of(cls, value: Any) -> Parcel:
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        return cls(file.getvalue(), buffers)

    def __reduce__(self) -> Any:
        return Parcel, (pickle.PickleBuffer(self.pickled), list(self.buffers))


def loads(pickled: bytes | Parcel) -> Any:
    """Unpickle. Tensors of a parcel are views of the memory that the parcel came in, which nothing else uses."""
    if isinstance(pickled, Parcel):
        return _Unpickler(io.BytesIO(pickled.pickled), buffers=pickled.buffers).load()
    return _Unpickler(io.BytesIO(pickled)).load()


class RolloutResult(NamedTuple):
    """A worker's finished rollout.

    Attributes:
        in_place: whether it lies in the slot that the request named.
        steps, frames: its time steps, and its environment frames.
        layout: of a whole rollout; None: no layout describes it, or the trainer does not need it.
        load: returns the batch, unless that lies in the slot or in a replay buffer. Call it in the caller's thread.
    """

    worker: int
    in_place: bool
    steps: int
    frames: int
    layout: Any
    load: Callable[[], Any]


class Stopped(Exception):
    """The other side is gone, or the trainer has asked this worker to end."""


# -- failures ----------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """An exception as a message: described, and also pickled if it can be."""

    described: RemoteError
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = type(error)
        text = "".join(traceback.format_exception(error))
        message, pickled = "(its message cannot be shown)", None
        with contextlib.suppress(Exception):
            message = str(error)
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                pickled = dumps(error.with_traceback(None))
        return cls(RemoteError(f"{kind.__module__}.{kind.__qualname__}", message, text), pickled)

    def error(self, where: str) -> Exception:
        """The exception to raise here. ``where`` names the worker that raised it."""
        where = f"It was raised in {where}."
        if self.pickled is not None:
            with contextlib.suppress(Exception):
                error: Exception = loads(self.pickled)
                error.__cause__ = self.described  # a frozen dataclass refuses this
                error.add_note(where)
                return error
        self.described.add_note(where)
        return self.described


def add_note_to(error: BaseException, text: str) -> None:
    """Add a note to an exception, unless the exception refuses notes, as a frozen dataclass does."""
    with contextlib.suppress(Exception):
        error.add_note(text)


# -- packets -----------------------------------------------------------------------------------------------------------


class Packet(NamedTuple):
    """An encoded message. With a ``file``, the file has the message's bytes, and ``data`` the number of its parts."""

    data: bytes
    file: MemoryFile | None


def encode(message: Any) -> Packet:
    """Encode a message of the library's own objects and parcels."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts: list[Any] = [pickled, *(buffer.raw() for buffer in buffers)]
    if sum(map(len, parts)) <= MAX_PACKET:
        data = pickle.dumps(message, protocol=5) if buffers else pickled
        if len(data) <= MAX_PACKET:
            return Packet(data, None)
    table = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    pieces: list[Any] = [piece for part in (table, *parts) for piece in (part, bytes(-len(part) % _ALIGNED))]
    file = MemoryFile.create(sum(map(len, pieces)))
    with os.fdopen(file.fd, "wb", closefd=False) as writer:
        writer.writelines(pieces)
    file.seal()
    return Packet(_PARTS.pack(len(parts)), file)


def _decode(data: bytes, file: int) -> Any:
    [count] = _PARTS.unpack(data)
    memory: Any = MemoryFile(file).tensor(private=True).numpy()  # private, because the user may write to its tensors
    rest = memoryview(memory)
    position, parts = 8 * count, []
    for length in struct.unpack_from(f"<{count}Q", rest):
        position += -position % _ALIGNED
        parts.append(rest[position : position + length])
        position += length
    return loads(Parcel(parts[0], parts[1:]))


# -- channels ----------------------------------------------------------------------------------------------------------


class Channel:
    """One end of a pair of sockets. The trainer's loop thread never waits: it calls :meth:`offer` and
    ``receive(wait=False)``. A worker's end is its :class:`TrainerLine`, with :meth:`send` and :meth:`receive`."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        self._socket = end

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self._socket.fileno()

    def offer(self, packet: Packet) -> bool:
        """Send the packet if the socket has room for it. Returns whether it had. Raises ConnectionError: the other side
        is gone; OSError: for example, too many files are in transit (ETOOMANYREFS)."""
        file = [] if packet.file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FILE.pack(packet.file.fd))]
        try:
            self._socket.sendmsg([packet.data], file, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def receive(self, wait: bool = True) -> Any:
        """The next message. None: there is none, and ``wait`` is False. Raises Stopped: the other side is gone, or
        :meth:`shutdown` was called; OSError: this process has too many open files."""
        room, flags = socket.CMSG_LEN(_FILE.size), 0 if wait else socket.MSG_DONTWAIT
        # Not socket.recv_fds, which ignores flags before Python 3.12.
        read = partial(self._socket.recvmsg, MAX_PACKET, room, flags | socket.MSG_CMSG_CLOEXEC)
        try:
            try:
                data, files, found, _ = read()
            except ConnectionResetError:  # the other side ended with unread messages; its own messages follow this
                data, files, found, _ = read()
        except BlockingIOError:
            return None
        except ConnectionError:
            raise Stopped from None
        if not data:
            raise Stopped
        if found & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "this process lost a message, because it has too many open files (ulimit -n)")
        return _decode(data, *_FILE.unpack(files[0][-1])) if files else loads(data)

    def send(self, *message: Any) -> None:
        """Send a message as soon as the socket has room for it. Raises Stopped: the other side is gone; AckTimeout: the
        socket had no room for a minute; OSError: the message cannot be sent."""
        packet = encode(message)
        try:
            if not self.offer(packet):
                self._socket.settimeout(SEND_SECONDS)
                self.offer(packet)
        except TimeoutError:
            raise AckTimeout(f"the trainer at the other end has read no messages for {SEND_SECONDS:g} s") from None
        except ConnectionError:
            raise Stopped from None
        finally:
            self._socket.settimeout(None)

    def shutdown(self) -> None:
        """End both directions. A :meth:`receive` that waits in another thread raises Stopped."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise

    def close(self) -> None:
        self._socket.close()
