"""The gate lets a weight update through to the model only when nobody is reading it.

    gate = Gate()
    gate.attach(policy)              # calls of policy(...) are readers from now on, in tasks and in threads
    gate.offer(copy_weights, done)   # applied at once if nobody reads, else by the last reader to leave

    with gate.hold():                # so is this block; `async with gate.hold():` waits without blocking the loop
        policy.act(observation)

Covered are calls of an attached module, and of the methods that `attach_methods` is given. Not covered are its other
methods, calls of its submodules, an `async def forward`, and hooks that a compiler has removed: put `hold()` around
those. A thread started inside a hold without its context is a stranger to it; asyncio.to_thread passes the context on
(`contextvars.copy_context().run`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Generic, NoReturn, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from asyncsync.errors import AckTimeout
from asyncsync.model.hooks import GatedMethod, attach, gate_methods
from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import settle

_log = logging.getLogger("asyncsync")
T = TypeVar("T")
Handle = RemovableHandle | GatedMethod
PATIENCE = 30.0
_TICK = 0.05  # seconds after which a waiting reader looks again for readers that were left behind
BLOCKED_SECONDS = 1.0  # without a turn of the loop, from one call to another
LOOK_SECONDS = BLOCKED_SECONDS / 4  # between two looks: to have the loop call back costs a microsecond


class Reader:
    """One reader inside, and the token by which readers nested in it are known: the call of a module with this
    ``frame``; None: a hold, of this ``task`` if it is a task's."""

    __slots__ = ("frame", "gate", "is_abandoned", "key", "parent", "task", "thread")

    def __init__(self, gate: Gate, frame: FrameType | None = None, task: object = None) -> None:
        self.gate: Gate | None = gate  # None once closed, so that a token inherited by a task keeps nothing alive
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


class Hold(Generic[T]):
    """An open `with gate.hold():` block keeps updates out. One that is thrown away open no longer counts. The block is
    given what ``look`` returns when it begins."""

    __slots__ = ("_gate", "_look", "_reader")

    def __init__(self, gate: Gate, look: Callable[[], T]) -> None:
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


@dataclass(slots=True, eq=False)
class Writer:
    """What writes the models, and what is called when it has."""

    apply: Callable[[], None]
    done: Callable[[BaseException | None], None]
    applied: bool = False
    frame: FrameType | None = None
    thread: int = 0


class _Verdict(enum.Enum):
    ENTERED = 0
    APPLY = 1  # the pending update goes first, and nothing is in its way
    WAIT = 2


class LoopWatch:
    """Whether the loop on which a gate's updates come in turns between calls of the model. Its ``thread`` is None until
    it is bound; ``next_look`` is when :meth:`look` is due, by time.monotonic()."""

    __slots__ = ("_asked", "_loop", "next_look", "thread")

    def __init__(self) -> None:
        self.thread: int | None = None
        self.next_look = math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: float | None = None  # since when the loop has been to call back

    def bind(self) -> None:
        self.thread = threading.get_ident()
        self._loop, self._asked = running_loop(), None
        self.next_look = math.inf if self._loop is None else 0.0

    def end(self) -> None:
        """Warn of nothing from now on."""
        self._loop, self.next_look = None, math.inf

    def look(self, now: float) -> None:
        """Warn if the loop has not turned for a second. On its thread."""
        if self._loop is None or self._loop.is_closed():
            self.end()
        elif self._asked is None:
            self._asked, self.next_look = now, now + LOOK_SECONDS
            self._loop.call_soon(self._turned)
        elif (seconds := now - self._asked) < BLOCKED_SECONDS:
            self.next_look = now + LOOK_SECONDS
        else:
            self.end()
            _log.warning(
                "the model is called again and again on an event loop that has not turned for %.1f s: no weight update "
                "can come in, nor the sender's goodbye. Await something between two calls (await asyncio.sleep(0) is "
                "enough), call the model in a thread (await asyncio.to_thread(model, ...)), or take the schemes of "
                "asyncsync.sync, which receive in a thread of their own",
                seconds,
            )

    def _turned(self) -> None:
        self._asked = None


class Gate:
    """Counts the readers of a receiver's models and applies a pending update when there are none. ``patience``: seconds
    that an outermost reader waits while an update is pending, before AckTimeout."""

    def __init__(self, *, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._loop = LoopWatch()
        self._handles: list[Handle] = []
        self._readers: dict[object, Reader] = {}  # forwards by the frame of their call, holds by themselves
        self._update: Writer | None = None
        self._applying: Writer | None = None
        self._torn = False  # an interrupted apply left the model half written: only an update may touch it next
        self._waiters: set[asyncio.Future[None]] = set()
        self._renew_locks()
        _gates.add(self)

    def _renew_locks(self) -> None:
        # Reentrant, because a garbage collection inside a locked region may close a generator that is inside a hold.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._asleep = 0  # readers that wait for it

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Gate belongs to one process and cannot be pickled or copied: make a new one")

    def bind(self) -> None:
        """Make the calling thread the loop thread, which never waits for readers."""
        self._loop.bind()

    @property
    def pending(self) -> bool:
        """Whether an update is waiting for readers to leave."""
        return self._update is not None

    @property
    def applying(self) -> bool:
        return self._applying is not None

    @property
    def readers(self) -> int:
        """Forwards and holds inside, nested ones included."""
        return len(self._readers)

    # Modules

    def attach(self, module: nn.Module) -> Sequence[Handle]:
        """Count every call of a module as a reader, from the next call on, until these handles are detached; a second
        attach of the same one changes nothing. Raises ValueError if it is compiled or scripted, so that hooks would not
        run."""
        with self._mutex:
            self._handles += (handles := attach(module, self.enter_call, self.leave_call))
        return handles

    def attach_methods(self, model: object, names: Iterable[str]) -> Sequence[Handle]:
        """Count every call of these methods of an object likewise. Raises ValueError, with nothing changed, for a name
        that is none of them."""
        with self._mutex:
            self._handles += (handles := gate_methods(model, names, self.enter_call, self.leave_call))
        return handles

    def detach(self, handles: Sequence[Handle] | None = None) -> None:
        """Remove these hooks and what wraps methods; None: all. Calls under way are counted until they return."""
        with self._mutex:
            gone = self._handles if handles is None else handles
            self._handles = [handle for handle in self._handles if handle not in gone]
        for handle in gone:
            handle.remove()

    # Updates

    def offer(self, update: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Apply an update as soon as nobody reads: now, or when the last reader leaves, in that reader's thread.

        An update that is still pending is replaced, and its `done` is never called. If `update`, which writes the
        model, raises an Exception, it is dropped; anything else (KeyboardInterrupt) propagates, and no reader enters
        before this update, or a newer one, has been applied whole. `done` is called with None or the Exception in the
        thread that applied, before readers enter again, so that calls come in the order of the updates. What `done`
        raises is logged.
        """
        with self._mutex:
            self._update = Writer(update, done)
        self.poll()

    def try_apply(self, update: Writer) -> bool:
        """Apply an update at once, in this thread, if nobody reads and no other is on its way; whether it is applied.

        What ``apply`` raises is raised: after an Exception the update is dropped, after an interrupt it is pending. Its
        ``done`` is called only in the latter case, when it has been applied.
        """
        frame = sys._getframe()
        try:
            with self._mutex:
                if self._readers or self._update is not None or self._applying is not None:
                    return False
                update.applied, update.frame, update.thread = False, frame, threading.get_ident()
                self._applying = update
            try:
                update.apply()
            except Exception:
                update.applied = True
                raise
            update.applied = True
            return True
        finally:
            self._release(frame)
            del frame

    def withdraw(self) -> bool:
        """Drop the pending update, unless an apply was interrupted and the model needs it; True if one was dropped."""
        with self._mutex:
            if self._update is None or self._torn:
                return False
            self._update = None
            self._wake()
            return True

    def poll(self) -> None:
        """Clear readers that were left behind and apply the pending update if nobody reads."""
        if self._update is not None or self._applying is not None:
            if self._readers or self._applying is not None:
                self._sweep()
            self._apply()

    def _apply(self) -> None:
        """Apply the pending update, and those that are offered meanwhile, if there is nobody inside."""
        frame = sys._getframe()
        try:
            while self._update is not None and self._apply_one(frame):
                pass
        finally:
            del frame  # it refers to itself by this name, and to its callers with all they hold

    def _apply_one(self, frame: FrameType) -> bool:
        """One round of :meth:`_apply`, whose frame this is; False if there was nothing to do."""
        error: Exception | None = None
        try:
            with self._mutex:
                update = self._update
                if update is None or self._applying is not None or self._readers:
                    return False
                # In this order an interrupt between two lines loses nothing.
                update.frame, update.thread = frame, threading.get_ident()
                self._applying = update
                self._update = None
            try:
                update.apply()
            except Exception as exc:
                error = exc
            self._torn = False
            update.applied = True
            try:
                update.done(error)
            except Exception:
                _log.exception("the `done` callback of a weight update raised; the gate goes on")
            return True
        finally:
            error = None
            self._release(frame)

    def _release(self, frame: FrameType) -> None:
        with self._mutex:
            update = self._applying
            if update is None or update.frame is not frame:
                return
            if not update.applied:
                self._torn = True
                if self._update is None:
                    self._update = update
            self._applying = None
            update.frame = None
            if self._asleep or self._waiters:
                self._wake()

    def _wake(self) -> None:
        if self._asleep:
            self._changed.notify_all()
        for waiter in list(self._waiters):
            settle(waiter)
            if waiter.get_loop().is_closed():
                self._waiters.discard(waiter)

    def _sweep(self) -> None:
        """Clear what an interrupt has left behind: ended forwards, holds without an owner, a broken apply."""
        with self._mutex:
            readers = list(self._readers.values())
        # Not under the mutex: to clear a finished frame may run destructors.
        gone = [reader for reader in readers if reader.is_abandoned or _is_finished(reader.frame)]
        with self._mutex:
            for reader in gone:
                self._close(reader)
        applying = self._applying
        if applying is not None and (frame := applying.frame) is not None and _is_finished(frame):
            self._release(frame)

    # Readers

    def hold(self) -> Hold[None]:
        """A reader for `with` and `async with`. A forward or hold inside it, also in a task or in asyncio.to_thread
        started inside, never waits. Entering it raises RuntimeError if it is open already; AckTimeout, but not on the
        loop thread, if an update has been pending for `patience` seconds."""
        return Hold(self, lambda: None)

    def _admit(self, reader: Reader, *, join: bool) -> _Verdict:
        """Let a reader in, or find out what goes first. Under the mutex, after a sweep if an update is pending."""
        if self._applying is not None:
            if self._applying.thread != reader.thread:
                return _Verdict.WAIT
        elif self._update is not None:
            if not self._readers:
                return _Verdict.APPLY
            if not (join and self._may_join(reader.thread)) and not self._is_around_caller():
                return _Verdict.WAIT
        if reader.key in self._readers:
            reader.key = reader
        self._readers[reader.key] = reader
        return _Verdict.ENTERED

    def _is_around_caller(self) -> bool:
        """Whether the caller is in a forward or hold of this gate, its own or one that it was started in."""
        token = innermost.get()
        while token is not None and token.gate is not self:
            token = token.parent
        return token is not None

    def _may_join(self, thread: int) -> bool:
        # A thread that is inside already, by another task of its loop, would block the task that it waits for.
        return thread == self._loop.thread or any(reader.thread == thread for reader in self._readers.values())

    @property
    def held_by_caller(self) -> bool:
        """Whether this thread and task has a hold() of this gate open: no update can come before it leaves that."""
        token = innermost.get()
        while token is not None:
            mine = token.gate is self and token.frame is None and token.thread == threading.get_ident()
            if mine and not token.is_abandoned:
                return token.task is _task()
            token = token.parent
        return False

    def enter(self, reader: Reader) -> None:
        now = time.monotonic()
        if now >= self._loop.next_look and reader.thread == self._loop.thread:
            self._loop.look(now)
        deadline = now + self.patience
        while True:
            if self._update is not None or self._applying is not None:
                self._sweep()
            with self._mutex:
                verdict = self._admit(reader, join=True)
                if verdict is _Verdict.WAIT:
                    nap = self._nap(deadline)
                    self._asleep += 1
                    try:
                        self._changed.wait(nap)
                    finally:
                        self._asleep -= 1
            if verdict is _Verdict.ENTERED:
                innermost.set(reader)
                return
            if verdict is _Verdict.APPLY:
                self._apply()

    def enter_call(self, frame: FrameType) -> None:
        self.enter(Reader(self, frame))

    def leave_call(self, frame: FrameType) -> None:
        # There is no reader where a pre-hook has raised, this gate's or one before it.
        if (reader := self._readers.get(frame)) is not None:
            self.leave(reader)

    async def enter_async(self, reader: Reader) -> None:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self.patience
        while True:
            if self._update is not None or self._applying is not None:
                self._sweep()
            with self._mutex:
                verdict = self._admit(reader, join=False)
                if verdict is _Verdict.WAIT:
                    nap = self._nap(deadline)
                    waiter: asyncio.Future[None] = loop.create_future()
                    self._waiters.add(waiter)
            if verdict is _Verdict.ENTERED:
                innermost.set(reader)
                return
            if verdict is _Verdict.APPLY:
                self._apply()
                continue
            try:
                await asyncio.wait({waiter}, timeout=nap)
            finally:
                with self._mutex:
                    self._waiters.discard(waiter)

    def _nap(self, deadline: float) -> float:
        """Seconds to wait before the next look. Under the mutex."""
        left = deadline - time.monotonic()
        if left > 0:
            return min(left, _TICK)
        refused = f"Reading the model was refused: a weight update has been %s for {self.patience:g} s"
        if self._applying is not None:
            where = _name(self._applying.thread)
            raise AckTimeout(f"{refused % 'writing it'}, in {where}. Look for an apply_weights() that blocks.")
        threads = [reader.thread for reader in self._readers.values()]
        names = ", ".join(sorted(set(map(_name, threads))))
        raise AckTimeout(
            f"{refused % 'pending'} and must go first, but {len(threads)} reader(s) are still inside (in "
            f"{names or 'no thread'}). Look for a hold() that is never left or a forward that does not return, keep "
            "holds shorter, or pass a longer patience= to init_on_receiver()."
        )

    def _close(self, reader: Reader) -> None:
        """Under the mutex. The reader may never have come in, or have left already."""
        if self._readers.get(reader.key) is reader:
            del self._readers[reader.key]
        reader.close()

    def leave(self, reader: Reader) -> None:
        # The closed token stays in its context: a generator or task may be closed in another one, with none to reset.
        with self._mutex:
            self._close(reader)
        if self._update is not None:
            self.poll()

    def _after_fork(self) -> None:
        """In a forked child: the other threads, their readers and the bus are gone, and may have held the mutex."""
        self._renew_locks()
        self._loop.end()
        me = threading.get_ident()
        for reader in [reader for reader in self._readers.values() if reader.thread != me]:
            self._close(reader)
        must = self._update if self._torn else None
        if self._applying is not None and self._applying.thread != me:
            if not self._applying.applied:
                self._torn, must = True, self._applying
            self._applying = None
        self._update = None if must is None else Writer(must.apply, lambda error: None)
        self._waiters = set()


def _is_finished(frame: FrameType | None) -> bool:
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


def _task() -> object:
    return asyncio.current_task() if running_loop() is not None else None


def _name(thread: int) -> str:
    return next((t.name for t in threading.enumerate() if t.ident == thread), f"thread {thread}")


def _after_fork() -> None:
    for gate in list(_gates):
        gate._after_fork()


def any_applying() -> bool:
    """Whether any gate of this process has an update that is being written, or was when this process was forked."""
    return any(gate.applying or gate.pending for gate in list(_gates))


_gates: weakref.WeakSet[Gate] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
