"""Readers of a gate: who is inside, and which of them is around the running code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Generic, Protocol, TypeVar

from asyncsync.errors import AckTimeout
from asyncsync.runtime.asyncio_private import running_loop

T = TypeVar("T")


class ReaderGate(Protocol):
    """What a hold needs of a gate."""

    def enter(self, reader: Reader) -> None:
        """Wait until the reader may be inside."""

    async def enter_async(self, reader: Reader) -> None:
        """The same without blocking the loop."""

    def leave(self, reader: Reader) -> None:
        """The reader reads no more, if it ever did."""


class Reader:
    """One reader inside, and the token by which readers nested in it are known: the call of a module with this
    ``frame``; None: a hold, of this ``task`` if it is a task's."""

    __slots__ = ("frame", "gate", "is_abandoned", "key", "parent", "task", "thread")

    def __init__(self, gate: ReaderGate, frame: FrameType | None = None, task: object = None) -> None:
        self.gate: ReaderGate | None = gate  # None once closed, so that a token inherited by a task keeps nothing alive
        self.frame = frame
        self.task = task
        self.key: object = self if frame is None else frame
        self.thread = threading.get_ident()
        self.is_abandoned = False
        self.parent: Reader | None = innermost.get()
        while self.parent is not None and self.parent.gate is None:
            self.parent = self.parent.parent

    def close(self) -> None:
        self.gate = self.frame = self.key = None


# The innermost reader of this context: forwards and holds of every gate, linked through `parent`.
innermost: ContextVar[Reader | None] = ContextVar("asyncsync_reader", default=None)


def is_inside(gate: ReaderGate) -> bool:
    """Whether the caller is in a forward or hold of this gate, its own or one that it was started in."""
    token = innermost.get()
    while token is not None and token.gate is not gate:
        token = token.parent
    return token is not None


def is_held_by_caller(gate: ReaderGate) -> bool:
    """Whether this thread and task has a hold of this gate open: no update can come before it leaves that."""
    token = innermost.get()
    while token is not None:
        mine = token.gate is gate and token.frame is None and token.thread == threading.get_ident()
        if mine and not token.is_abandoned:
            return token.task is _task()
        token = token.parent
    return False


def is_finished(frame: FrameType | None) -> bool:
    """Whether a call is over. The interpreter refuses to clear a frame that still runs, in whatever thread or greenlet.
    Looking for the frame on its thread's stack instead would race with a generator that yields meanwhile: its `f_back`
    is gone then."""
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def refusal(patience: float, writer: int | None, readers: Iterable[Reader]) -> AckTimeout:
    """Why a reader was not let in: the thread ``writer`` writes the model, or an update waits for these readers."""
    if writer is not None:
        return AckTimeout(
            f"Reading the model was refused: a weight update has been writing it for {patience:g} s, in "
            f"{_name(writer)}. Look for an apply_weights() that blocks."
        )
    threads = [reader.thread for reader in readers]
    names = ", ".join(sorted(set(map(_name, threads))))
    return AckTimeout(
        f"Reading the model was refused: a weight update has been pending for {patience:g} s and must go "
        f"first, but {len(threads)} reader(s) are still inside (in {names or 'no thread'}). Look for a "
        "hold() that is never left or a forward that does not return, keep holds shorter, or pass a longer "
        "patience= to init_on_receiver()."
    )


class Hold(Generic[T]):
    """An open `with gate.hold():` block keeps updates out. One that is thrown away open no longer counts. The block is
    given what ``look`` returns when it begins."""

    __slots__ = ("_gate", "_look", "_reader")

    def __init__(self, gate: ReaderGate, look: Callable[[], T]) -> None:
        self._gate = gate
        self._look = look
        self._reader: Reader | None = None

    def _start(self) -> Reader:
        if self._reader is not None and self._reader.gate is not None:
            raise RuntimeError("this Hold is open already; call hold() again for a nested one")
        self._reader = Reader(self._gate, task=_task())
        return self._reader

    def __enter__(self) -> T:
        reader = self._start()
        try:
            self._gate.enter(reader)
            return self._look()
        except BaseException:
            self._gate.leave(reader)
            raise

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._reader is not None:
            try:
                self._gate.leave(self._reader)
            except BaseException:  # Ctrl-C, before it had left perhaps: the next sweep closes it
                self._reader.is_abandoned = True
                raise

    async def __aenter__(self) -> T:
        reader = self._start()
        try:
            await self._gate.enter_async(reader)
            return self._look()
        except BaseException:
            self._gate.leave(reader)
            raise

    async def __aexit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.__exit__(*exc)

    def __del__(self) -> None:
        if (reader := self._reader) is not None:
            reader.is_abandoned = True  # no more than a mark, as the garbage collector may be inside the gate


def _task() -> object:
    return asyncio.current_task() if running_loop() is not None else None


def _name(thread: int) -> str:
    return next((t.name for t in threading.enumerate() if t.ident == thread), f"thread {thread}")
