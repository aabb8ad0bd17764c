"""The gate lets a weight update through to the model only when nobody is reading it.

    gate = Gate()
    gate.attach(policy)              # calls of policy(...) are readers from now on, in tasks and in threads
    gate.offer(copy_weights, done)   # applied at once if nobody reads, else by the last reader to leave

    with gate.hold():                # so is this block; `async with gate.hold():` waits without blocking the loop
        policy.act(observation)

Covered are calls of an attached module. Not covered are its other methods, calls of its submodules, an
`async def forward`, and hooks that a compiler has removed: put `hold()` around those. A thread started inside a hold
without its context (`contextvars.copy_context().run`, as asyncio.to_thread does) is a stranger to it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from asyncsync.errors import AckTimeout
from asyncsync.model.hooks import Enter, Leave

_log = logging.getLogger("asyncsync")
_TICK = 0.05  # seconds between two looks of a waiting reader for entries that were left behind

# The innermost reader of this context: forwards and holds of every gate, linked through `parent`.
_current: ContextVar[_Entry | None] = ContextVar("asyncsync_reader", default=None)


class _Entry:
    """One reader inside, and the token by which readers nested in it are known."""

    __slots__ = ("abandoned", "frame", "gate", "key", "parent", "task", "thread")

    def __init__(self, gate: Gate, frame: FrameType | None = None) -> None:
        self.gate: Gate | None = gate  # None once closed, so that a token inherited by a task keeps nothing alive
        self.frame = frame
        self.key: object = self if frame is None else frame
        self.thread = threading.get_ident()
        self.task: object = None  # of a hold: whose it is, if a task's
        self.abandoned = False
        self.parent: _Entry | None = _current.get()
        while self.parent is not None and self.parent.gate is None:
            self.parent = self.parent.parent


class Update:
    """What writes the models, and who is told when it has."""

    __slots__ = ("applied", "apply", "done", "frame", "thread")

    def __init__(self, apply: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self.apply = apply
        self.done = done
        self.applied = False
        self.frame: FrameType | None = None
        self.thread = 0


class _Verdict(enum.Enum):
    ENTERED = 0
    APPLY = 1  # the pending update goes first, and nothing is in its way
    WAIT = 2


def _finished(frame: FrameType | None) -> bool:
    """Whether a call is over.

    The interpreter refuses to clear a frame that still runs, in whatever thread or greenlet. Looking for the frame on
    its thread's stack instead would race with a generator that yields meanwhile: its `f_back` is gone then.
    """
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def _task() -> object:
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Gate:
    """Counts the readers of a receiver's models and applies a pending update when there are none.

    Args:
        patience: seconds that an outermost reader waits while an update is pending, before AckTimeout.
    """

    def __init__(self, *, patience: float = 30.0) -> None:
        self.patience = patience
        self._loop_thread: int | None = None
        self._handles: list[RemovableHandle] = []
        self._entries: dict[object, _Entry] = {}  # forwards by the frame of their call, holds by themselves
        self._update: Update | None = None
        self._applying: Update | None = None
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
        self._loop_thread = threading.get_ident()

    @property
    def pending(self) -> bool:
        """Whether an update is waiting for readers to leave."""
        return self._update is not None

    @property
    def applying(self) -> bool:
        """Whether an update is being written to the models right now."""
        return self._applying is not None

    @property
    def readers(self) -> int:
        """Forwards and holds inside, nested ones included."""
        return len(self._entries)

    # Modules

    def attach(self, module: nn.Module) -> None:
        """Count every call of a module as a reader, from the next call on.

        Args:
            module: an eager module; a second attach of the same one changes nothing.

        Raises:
            ValueError: the module is compiled or scripted, so that hooks would not run.
        """
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # there is no compiled module unless it was imported
        compiled = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted or compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{type(module).__name__} is a {'scripted' if scripted else 'compiled'} module, in which the gate's "
                'hooks do not run, so a weight update could tear a forward. Pass gate="hold" and put '
                '`with scheme.hold():` around its calls, or pass apply="on_receive" and apply updates in receive().'
            )
        with self._mutex:
            if any(isinstance(hook, Leave) and hook.gate is self for hook in module._forward_hooks.values()):
                return
            # First in, last out, so that the hooks that are there already read the weights inside the gate.
            self._handles += [
                module.register_forward_hook(Leave(self), always_call=True),
                module.register_forward_pre_hook(Enter(self), prepend=True),
            ]

    def detach(self) -> None:
        """Remove the hooks from every module. Calls under way are counted until they return."""
        with self._mutex:
            handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    # Updates

    def offer(self, update: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Apply an update as soon as nobody reads: now, or when the last reader leaves, in that reader's thread.

        An update that is still pending is replaced, and its `done` is never called.

        Args:
            update: writes the model. If it raises an Exception it is dropped; anything else (KeyboardInterrupt)
                propagates, and no reader enters before this update, or a newer one, has been applied whole.
            done: called with None or the Exception in the thread that applied, before readers enter again, so that
                calls come in the order of the updates. What it raises is logged.
        """
        with self._mutex:
            self._update = Update(update, done)
        self.poll()

    def pass_through(self, update: Update) -> bool:
        """Apply an update at once, in this thread, if nobody reads and no other is on its way; else False.

        What ``apply`` raises is raised; ``done`` is called only if something else than an Exception comes between, and
        another one applies this update.
        """
        frame = sys._getframe()
        try:
            with self._mutex:
                if self._entries or self._update is not None or self._applying is not None:
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
        """Clear entries that were left behind and apply the pending update if nobody reads."""
        if self._update is not None or self._applying is not None:
            if self._entries or self._applying is not None:
                self._sweep()
            self._apply()

    def _apply(self) -> None:
        """Apply the pending update, and those that are offered meanwhile, if there is nobody inside."""
        frame = sys._getframe()
        try:
            while self._update is not None and self._apply_one(frame):
                pass
        finally:
            # It refers to itself by this name, and to our callers with all they hold.
            del frame

    def _apply_one(self, frame: FrameType) -> bool:
        """One round of :meth:`_apply`, whose frame this is; False if there was nothing to do."""
        error: Exception | None = None
        try:
            with self._mutex:
                update = self._update
                if update is None or self._applying is not None or self._entries:
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
            self._wake()

    def _wake(self) -> None:
        if self._asleep:
            self._changed.notify_all()
        for waiter in list(self._waiters):
            loop = waiter.get_loop()
            try:
                loop.call_soon_threadsafe(_settle, waiter)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                self._waiters.discard(waiter)

    def _sweep(self) -> None:
        """Clear what was left behind by an interrupt: ended forwards, holds without an owner, a broken apply."""
        with self._mutex:
            entries = list(self._entries.values())
        # Not under the mutex: to clear a finished frame may run destructors.
        gone = [entry for entry in entries if entry.abandoned or _finished(entry.frame)]
        with self._mutex:
            for entry in gone:
                self._close(entry)
        applying = self._applying
        if applying is not None and (frame := applying.frame) is not None and _finished(frame):
            self._release(frame)

    # Readers

    def hold(self) -> Hold:
        """A reader for `with` and `async with`.

        A forward or hold inside it, also in a task or in asyncio.to_thread started inside, never waits.

        Raises:
            AckTimeout: on entering, if an update has been pending for `patience` seconds. Not on the loop thread.
            RuntimeError: on entering a Hold that is open.
        """
        return Hold(self)

    def _admit(self, entry: _Entry, *, join: bool) -> _Verdict:
        """Let a reader in or say what must happen first. Under the mutex, after a sweep if an update is pending."""
        if self._applying is not None:
            if self._applying.thread != entry.thread:
                return _Verdict.WAIT
        elif self._update is not None:
            if not self._entries:
                return _Verdict.APPLY
            if not (join and self._may_join(entry.thread)) and not self._nested():
                return _Verdict.WAIT
        if entry.key in self._entries:
            entry.key = entry
        self._entries[entry.key] = entry
        return _Verdict.ENTERED

    def _may_join(self, thread: int) -> bool:
        # A thread that is inside already, by another task of its loop, would block the task that it waits for.
        return thread == self._loop_thread or any(entry.thread == thread for entry in self._entries.values())

    @property
    def held_by_caller(self) -> bool:
        """Whether this thread and task has a hold() of this gate open: no update can come before it leaves that."""
        token = _current.get()
        while token is not None:
            mine = token.gate is self and token.frame is None and token.thread == threading.get_ident()
            if mine and not token.abandoned:
                return token.task is _task()
            token = token.parent
        return False

    def _nested(self) -> bool:
        token = _current.get()
        while token is not None and token.gate is not self:
            token = token.parent
        return token is not None

    def _enter(self, entry: _Entry) -> None:
        deadline = time.monotonic() + self.patience
        while True:
            if self._update is not None or self._applying is not None:
                self._sweep()
            with self._mutex:
                verdict = self._admit(entry, join=True)
                if verdict is _Verdict.WAIT:
                    nap = self._nap(deadline)
                    self._asleep += 1
                    try:
                        self._changed.wait(nap)
                    finally:
                        self._asleep -= 1
            if verdict is _Verdict.ENTERED:
                _current.set(entry)
                return
            if verdict is _Verdict.APPLY:
                self._apply()

    def _enter_call(self, frame: FrameType) -> None:
        self._enter(_Entry(self, frame))

    def _leave_call(self, frame: FrameType) -> None:
        # No entry where a pre-hook before ours has raised, or ours.
        if (entry := self._entries.get(frame)) is not None:
            self._leave(entry)

    async def _enter_async(self, entry: _Entry) -> None:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self.patience
        while True:
            if self._update is not None or self._applying is not None:
                self._sweep()
            with self._mutex:
                verdict = self._admit(entry, join=False)
                if verdict is _Verdict.WAIT:
                    nap = self._nap(deadline)
                    waiter: asyncio.Future[None] = loop.create_future()
                    self._waiters.add(waiter)
            if verdict is _Verdict.ENTERED:
                _current.set(entry)
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
        if self._applying is not None:
            raise AckTimeout(
                f"Reading the model was refused: a weight update has been writing it for {self.patience:g} s, in "
                f"{_name(self._applying.thread)}. Look for an apply_weights() that blocks."
            )
        names = ", ".join(sorted({_name(entry.thread) for entry in self._entries.values()}))
        raise AckTimeout(
            f"Reading the model was refused: a weight update has been pending for {self.patience:g} s and must go "
            f"first, but {len(self._entries)} reader(s) are still inside (in {names or 'no thread'}). Look for a "
            "hold() that is never left or a forward that does not return, keep holds shorter, or give the gate more "
            "patience."
        )

    def _close(self, entry: _Entry) -> None:
        """Under the mutex; of an entry that never came in, or has left, too."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        entry.gate = entry.frame = entry.key = None

    def _leave(self, entry: _Entry) -> None:
        # The void token stays in its context: a generator or task may be closed in another one, with nothing to reset.
        with self._mutex:
            self._close(entry)
        if self._update is not None:
            self.poll()

    def _after_fork(self) -> None:
        """In a forked child: the other threads, their readers and the bus are gone, and may have held the mutex."""
        self._renew_locks()
        me = threading.get_ident()
        for entry in [entry for entry in self._entries.values() if entry.thread != me]:
            self._close(entry)
        must = self._update if self._torn else None
        if self._applying is not None and self._applying.thread != me:
            if not self._applying.applied:
                self._torn, must = True, self._applying
            self._applying = None
        self._update = None if must is None else Update(must.apply, lambda error: None)
        self._waiters = set()


class Hold:
    """An open `with gate.hold():` block keeps updates out. One that is thrown away open no longer counts."""

    __slots__ = ("_entry", "_gate")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._entry: _Entry | None = None

    def _start(self) -> _Entry:
        if self._entry is not None and self._entry.gate is not None:
            raise RuntimeError("this Hold is open already; call hold() again for a nested one")
        self._entry = _Entry(self._gate)
        self._entry.task = _task()
        return self._entry

    def __enter__(self) -> None:
        entry = self._start()
        try:
            self._gate._enter(entry)
        except BaseException:
            self._gate._leave(entry)
            raise

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._entry is not None:
            try:
                self._gate._leave(self._entry)
            except BaseException:  # Ctrl-C, before it had left perhaps: the next sweep does it
                self._entry.abandoned = True
                raise

    async def __aenter__(self) -> None:
        entry = self._start()
        try:
            await self._gate._enter_async(entry)
        except BaseException:
            self._gate._leave(entry)
            raise

    async def __aexit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.__exit__(*exc)

    def __del__(self) -> None:
        if (entry := self._entry) is not None:
            entry.abandoned = True  # no more than a mark, as the garbage collector may be inside the gate


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
