"""The gate lets a weight update through to the model only when the model has no reader.

    gate = Gate()
    gate.attach(policy)              # each call policy(...) is a reader from now on, in any task or thread
    gate.offer(copy_weights, done)   # applied at once if there is no reader, else by the last reader to leave

    with gate.hold():                # this block is a reader, too; `async with gate.hold():` does not block the loop
        policy.act(observation)

The gate counts calls of an attached module, and calls of the methods that were given to `attach_methods`. It does not
see the module's other methods, calls of its submodules, the work of an `async def forward`, or calls from which a
compiler has removed the hooks: put `hold()` around those. :func:`check_calls` warns of cases that it can recognise. A
thread that was started inside a hold belongs to that hold only if it runs in a copy of its context
(`contextvars.copy_context().run`), as asyncio.to_thread does.

The gate sees a module's calls by forward hooks. It wraps a method in an attribute of the one object. So other objects
of the class, and copies of this object, keep the method unchanged.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import update_wrapper
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Generic, NoReturn, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.utils.hooks import RemovableHandle

from asyncsync.arguments import user_stacklevel
from asyncsync.errors import AckTimeout
from asyncsync.model.torch_private import CALL_IMPL, call_hooks, forward_hooks, is_compiled, may_be_inlined
from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import settle

_log = logging.getLogger("asyncsync")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
PATIENCE = 30.0  # seconds that a reader waits while an update is pending
_RECHECK_SECONDS = 0.05  # a waiting reader looks for abandoned readers this often
BLOCKED_SECONDS = 1.0  # warn if the loop runs no callback for so long, while the model is called
CHECK_SECONDS = BLOCKED_SECONDS / 4  # between two checks of the loop, because a call_soon costs a microsecond


class Reader:
    """One call of a module or method, or one hold. While it is open, :data:`innermost` refers to it in its context, so
    that readers inside it do not wait. ``frame`` is the call's; None for a hold, whose ``task`` is None outside of
    tasks."""

    __slots__ = ("frame", "gate", "is_abandoned", "key", "parent", "task", "thread")

    def __init__(self, gate: Gate, frame: FrameType | None = None, task: object = None) -> None:
        self.gate: Gate | None = gate  # None once closed: a task that inherited the token then keeps no gate alive
        self.frame = frame
        self.task = task
        self.key: object = self if frame is None else frame
        self.thread = threading.get_ident()
        self.is_abandoned = False
        self.parent: Reader | None = innermost.get()
        while self.parent is not None and self.parent.gate is None:
            self.parent = self.parent.parent


# The innermost reader of this context, of any gate. `parent` leads to the readers around it.
innermost: ContextVar[Reader | None] = ContextVar("asyncsync_reader", default=None)
# Each reader of this context calls this with its gate when it has entered; None: it calls nothing.
on_enter: ContextVar[Callable[[Gate], None] | None] = ContextVar("asyncsync_on_enter", default=None)


class Hold(Generic[T]):
    """A `with gate.hold():` block, which keeps updates out while it is open. If the object is garbage-collected while
    it is open, it no longer counts. ``enter_result`` makes the value of `with … as value`, when the block begins."""

    __slots__ = ("_enter_result", "_gate", "_reader")

    def __init__(self, gate: Gate, enter_result: Callable[[], T]) -> None:
        self._gate = gate
        self._enter_result = enter_result
        self._reader: Reader | None = None

    def _start(self) -> Reader:
        if self._reader is not None and self._reader.gate is not None:
            raise RuntimeError("this Hold is open already; call hold() again for a nested one")
        self._reader = Reader(self._gate, task=_current_task())
        return self._reader

    def __enter__(self) -> T:
        reader = self._start()
        try:
            self._gate.enter(reader)
            return self._enter_result()
        except BaseException:
            self._gate.leave(reader)
            raise

    def __exit__(self, *exc: object) -> None:
        if self._reader is not None:
            try:
                self._gate.leave(self._reader)
            except BaseException:  # Ctrl-C, perhaps before it had left: then the next sweep closes it
                self._reader.is_abandoned = True
                raise

    async def __aenter__(self) -> T:
        reader = self._start()
        try:
            await self._gate.enter_async(reader)
            return self._enter_result()
        except BaseException:
            self._gate.leave(reader)
            raise

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__(*exc)

    def __del__(self) -> None:
        if (reader := self._reader) is not None:
            reader.is_abandoned = True  # only a mark, because the garbage collector may have interrupted the gate


@dataclass(slots=True, eq=False)
class Writer:
    """An update that waits for the readers: ``apply`` writes the models, then the gate calls ``done``. The caller of
    :meth:`Gate.try_apply` has the result itself; the gate calls ``done`` for it only after an interrupt. While an
    update is applied, ``frame`` and ``thread`` are those of that call."""

    apply: Callable[[], None]
    done: Callable[[BaseException | None], object]
    applied: bool = False
    frame: FrameType | None = None
    thread: int = 0


class LoopWatch:
    """Warns, once, if calls of the model keep the loop, on which a gate's updates arrive, from running its callbacks.
    ``thread`` is the loop's, None until :meth:`bind`. The gate calls :meth:`check` on it when time.monotonic() has
    reached ``next_check``."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.next_check = math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callback_due_since: float | None = None  # when the callback was scheduled; None: it has run

    def bind(self) -> None:
        self.thread = threading.get_ident()
        self._loop, self._callback_due_since = running_loop(), None
        self.next_check = math.inf if self._loop is None else 0.0

    def end(self) -> None:
        self._loop, self.next_check = None, math.inf

    def check(self, now: float) -> None:
        if self._loop is None or self._loop.is_closed():
            self.end()
        elif self._callback_due_since is None:
            self._callback_due_since, self.next_check = now, now + CHECK_SECONDS
            self._loop.call_soon(self._note_callback)
        elif (seconds := now - self._callback_due_since) < BLOCKED_SECONDS:
            self.next_check = now + CHECK_SECONDS
        else:
            self.end()
            _log.warning(
                "the model is called again and again on an event loop that has run nothing else for %.1f s: no weight "
                "update can come in, nor the sender's goodbye. Await something between two calls (await "
                "asyncio.sleep(0) is enough), call the model in a thread (await asyncio.to_thread(model, ...)), or use "
                "the schemes of asyncsync.sync, which receive in a thread of their own",
                seconds,
            )

    def _note_callback(self) -> None:
        self._callback_due_since = None


class Gate:
    """Counts the readers of a receiver's models and applies a pending update when there are none. An outermost reader
    waits ``patience`` seconds at most for a pending update, and then raises AckTimeout."""

    def __init__(self, *, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._loop_watch = LoopWatch()
        self._handles: list[Handle] = []
        self._readers: dict[object, Reader] = {}  # calls by their frame, holds by themselves
        self._pending: Writer | None = None
        self._applying: Writer | None = None
        self._is_torn = False  # an interrupted apply left the model half written: an update must come before any reader
        self._waiting_tasks: set[asyncio.Future[None]] = set()  # a future for each task that waits to enter
        self._renew_locks()
        _gates.add(self)

    def _renew_locks(self) -> None:
        # Reentrant, because a garbage collection inside a locked region may close a generator that is inside a hold.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._num_waiting_threads = 0  # for _changed

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Gate belongs to one process and cannot be pickled or copied: make a new one")

    def bind(self) -> None:
        """Make the calling thread the loop thread. Calls and `with` holds there never wait for other readers."""
        self._loop_watch.bind()

    @property
    def pending(self) -> bool:
        """Whether an update is waiting for readers to leave."""
        return self._pending is not None

    @property
    def applying(self) -> bool:
        return self._applying is not None

    @property
    def readers(self) -> int:
        """The number of readers inside, nested ones included."""
        return len(self._readers)

    # Modules

    def attach(self, module: nn.Module) -> Sequence[Handle]:
        """Count every call of a module as a reader, from the next call on, until the returned handles are detached.
        Attaching an attached module changes nothing and returns no handles. Raises ValueError for a compiled or
        scripted module, because its calls run no hooks."""
        _check_hookable(module)
        with self._mutex:
            if any(isinstance(hook, LeaveHook) and hook.gate is self for hook in forward_hooks(module).values()):
                return []
            # Enter before the hooks that are already there and leave after them, because these may read the weights.
            handles: list[Handle] = [module.register_forward_hook(LeaveHook(self), always_call=True)]
            handles.append(module.register_forward_pre_hook(EnterHook(self), prepend=True))
            self._handles += handles
        return handles

    def attach_methods(self, model: object, names: Iterable[str]) -> Sequence[Handle]:
        """Count every call of these methods of an object as a reader. Returns handles as :meth:`attach` does. Raises as
        :func:`check_methods`, before anything is changed."""
        names = list(names)
        check_methods(model, names)
        methods: dict[str, GatedMethod] = {}
        with self._mutex:
            for name in names:
                wrapped = vars(model).get(name)
                if not (isinstance(wrapped, GatedMethod) and wrapped.counts_for(self)):
                    methods[name] = GatedMethod(self, model, name, wrapped or getattr(model, name))
            vars(model).update(methods)
            self._handles += methods.values()
        return list(methods.values())

    def detach(self, handles: Sequence[Handle] | None = None) -> None:
        """Remove these hooks and methods' wrappers; None: all of this gate. Calls under way count until they return."""
        with self._mutex:
            removed = self._handles if handles is None else handles
            self._handles = [handle for handle in self._handles if handle not in removed]
        for handle in removed:
            handle.remove()

    # Updates

    def offer(self, update: Callable[[], None], done: Callable[[BaseException | None], object]) -> None:
        """Apply an update as soon as there is no reader: now, or when the last reader leaves, in that reader's thread.

        The new update replaces one that is still pending, whose `done` is then never called. `update` writes the model.
        If it raises an Exception, the gate drops it. If it raises anything else (KeyboardInterrupt), that propagates,
        and no reader enters before this update, or a newer one, has been applied completely. The gate calls `done` with
        None or the Exception, in the thread that applied, before readers enter again. So these calls have the order of
        the updates. The gate logs an Exception that `done` raises.
        """
        with self._mutex:
            self._pending = Writer(update, done)
        self.poll()

    def withdraw(self) -> bool:
        """Drop the pending update and return True; False if there is none, or if a half-written model needs it."""
        with self._mutex:
            if self._pending is None or self._is_torn:
                return False
            self._pending = None
            self._wake_readers()
            return True

    def poll(self) -> None:
        """Remove abandoned readers, and apply the pending update if there are no others."""
        if self._pending is not None or self._applying is not None:
            if self._readers or self._applying is not None:
                self._sweep()
            while self._pending is not None and self.try_apply():
                pass  # another one may have been offered meanwhile, by `done` or in another thread

    def try_apply(self, given: Writer | None = None) -> bool:
        """Apply an update in this thread, if there is no reader; returns whether it was applied. With ``given``: that
        update, unless another one is pending. Without: the pending one, and then the gate calls its `done`.

        Raises what `apply` of a given update raises. After an Exception the gate drops that update. After an interrupt
        that update becomes the pending one; the gate calls its `done` when it has been applied later.
        """
        frame = sys._getframe()
        error: Exception | None = None
        try:
            with self._mutex:
                if self._readers or self._applying is not None or (given and self._pending):
                    return False
                if (update := given or self._pending) is None:
                    return False
                # In this order an interrupt between two lines loses nothing.
                update.applied, update.frame, update.thread = False, frame, threading.get_ident()
                self._applying = update
                self._pending = None
            try:
                update.apply()
            except Exception as exc:
                error = exc
            self._is_torn = False
            update.applied = True
            if given is None:
                try:
                    update.done(error)
                except Exception:
                    _log.exception("the `done` callback of a weight update raised; the gate goes on")
            elif error is not None:
                raise error
            return True
        finally:
            error = None
            self._end_apply(frame)
            del frame  # it refers to itself by this name, and to its callers with all they hold

    def _end_apply(self, frame: FrameType) -> None:
        with self._mutex:
            update = self._applying
            if update is None or update.frame is not frame:
                return
            if not update.applied:
                self._is_torn = True
                if self._pending is None:
                    self._pending = update
            self._applying = None
            update.frame = None
            if self._num_waiting_threads or self._waiting_tasks:
                self._wake_readers()

    def _wake_readers(self) -> None:
        if self._num_waiting_threads:
            self._changed.notify_all()
        for waiter in list(self._waiting_tasks):
            settle(waiter)
            if waiter.get_loop().is_closed():
                self._waiting_tasks.discard(waiter)

    def _sweep(self) -> None:
        """Remove what interrupts have left behind: calls that have ended, abandoned holds, an apply that has ended."""
        with self._mutex:
            readers = list(self._readers.values())
        # Without the mutex, because clearing a finished frame may run destructors.
        ended = [reader for reader in readers if reader.is_abandoned or _is_finished(reader.frame)]
        with self._mutex:
            for reader in ended:
                self._close(reader)
        applying = self._applying
        if applying is not None and (frame := applying.frame) is not None and _is_finished(frame):
            self._end_apply(frame)

    # Readers

    def hold(self) -> Hold[None]:
        """A reader for `with` and `async with`. Calls and holds inside it never wait for an update, also in a task or
        in asyncio.to_thread started inside. Entering it raises RuntimeError if it is already open, and AckTimeout if it
        has waited `patience` seconds for a pending update; `with` on the loop thread does not wait for one."""
        return Hold(self, lambda: None)

    def _admit(self, reader: Reader, deadline: float, *, may_join: bool) -> float | None:
        """Let a reader in and return None, or return after how many seconds to try again: 0 if the pending update can
        be applied now. ``may_join``: enter in spite of a pending update, on the loop thread and in a thread that is
        inside already. Under the mutex."""
        if self._applying is not None:
            if self._applying.thread != reader.thread:
                return self._wait_seconds(deadline)
        elif self._pending is not None:
            if not self._readers:
                return 0.0
            # If another task of this thread is inside, waiting here would keep that task from leaving.
            inside = {self._loop_watch.thread, *(other.thread for other in self._readers.values())}
            if not (may_join and reader.thread in inside) and not any(self._readers_around_caller()):
                return self._wait_seconds(deadline)
        if reader.key in self._readers:
            reader.key = reader
        self._readers[reader.key] = reader
        return None

    def _readers_around_caller(self) -> Iterator[Reader]:
        """This gate's readers in the caller's context, which a task or asyncio.to_thread inherits; innermost first."""
        reader = innermost.get()
        while reader is not None:
            if reader.gate is self:
                yield reader
            reader = reader.parent

    @property
    def held_by_caller(self) -> bool:
        """Whether this thread and task has a hold() of this gate open. Then no update is applied before it leaves."""
        for reader in self._readers_around_caller():
            if reader.frame is None and reader.thread == threading.get_ident() and not reader.is_abandoned:
                return reader.task is _current_task()
        return False

    def enter(self, reader: Reader) -> None:
        now = time.monotonic()
        if now >= self._loop_watch.next_check and reader.thread == self._loop_watch.thread:
            self._loop_watch.check(now)
        deadline = now + self.patience
        while True:
            if self._pending is not None or self._applying is not None:
                self.poll()
            with self._mutex:
                if (seconds := self._admit(reader, deadline, may_join=True)) is not None:
                    self._num_waiting_threads += 1
                    try:
                        self._changed.wait(seconds)
                    finally:
                        self._num_waiting_threads -= 1
            if seconds is None:
                innermost.set(reader)
                if (callback := on_enter.get()) is not None:
                    callback(self)
                return

    def enter_call(self, frame: FrameType) -> None:
        self.enter(Reader(self, frame))

    def leave_call(self, frame: FrameType) -> None:
        # There is no reader if this gate's pre-hook has raised, or one before it.
        if (reader := self._readers.get(frame)) is not None:
            self.leave(reader)

    async def enter_async(self, reader: Reader) -> None:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self.patience
        while True:
            if self._pending is not None or self._applying is not None:
                self.poll()
            with self._mutex:
                if (seconds := self._admit(reader, deadline, may_join=False)) is not None:
                    waiter: asyncio.Future[None] = loop.create_future()
                    self._waiting_tasks.add(waiter)
            if seconds is None:
                innermost.set(reader)
                if (callback := on_enter.get()) is not None:
                    callback(self)
                return
            try:
                await asyncio.wait({waiter}, timeout=seconds)
            finally:
                with self._mutex:
                    self._waiting_tasks.discard(waiter)

    def _wait_seconds(self, deadline: float) -> float:
        """How long to wait before the next try. Raises AckTimeout after the deadline."""
        left = deadline - time.monotonic()
        if left > 0:
            return min(left, _RECHECK_SECONDS)
        refused = f"Reading the model was refused: a weight update has been %s for {self.patience:g} s"
        if self._applying is not None:
            where = _thread_name(self._applying.thread)
            raise AckTimeout(f"{refused % 'writing it'}, in {where}. Look for an apply_weights() that blocks.")
        threads = [reader.thread for reader in self._readers.values()]
        names = ", ".join(sorted(set(map(_thread_name, threads))))
        raise AckTimeout(
            f"{refused % 'pending'} and must go first, but {len(threads)} reader(s) are still inside (in "
            f"{names or 'no thread'}). Look for a hold() that is never left or a forward that does not return, keep "
            "holds shorter, or pass a longer patience= to init_on_receiver()."
        )

    def _close(self, reader: Reader) -> None:
        """Under the mutex. The reader may not have entered, or may have left already."""
        if self._readers.get(reader.key) is reader:
            del self._readers[reader.key]
        reader.gate = reader.frame = reader.key = None

    def leave(self, reader: Reader) -> None:
        # The closed token stays in its context, because a generator may be closed in another one, where it is not set.
        with self._mutex:
            self._close(reader)
        if self._pending is not None:
            self.poll()

    def after_fork(self) -> None:
        """In a forked child, the other threads are gone: remove their readers, and replace the mutex, which one of them
        may have held. The bus is gone, too: drop the pending update, unless a half-written model needs it."""
        self._renew_locks()
        self._loop_watch.end()
        me = threading.get_ident()
        for reader in [reader for reader in self._readers.values() if reader.thread != me]:
            self._close(reader)
        needed = self._pending if self._is_torn else None
        if self._applying is not None and self._applying.thread != me:
            if not self._applying.applied:
                self._is_torn, needed = True, self._applying
            self._applying = None
        self._pending = None if needed is None else Writer(needed.apply, lambda error: None)
        self._waiting_tasks = set()


def _is_finished(frame: FrameType | None) -> bool:
    """Whether a call is over: the interpreter refuses to clear a frame that still runs, in any thread or greenlet.
    Searching its thread's stack for the frame would race with a generator that yields meanwhile and so loses its
    `f_back`."""
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def _current_task() -> object:
    return asyncio.current_task() if running_loop() is not None else None


def _thread_name(thread: int) -> str:
    return next((t.name for t in threading.enumerate() if t.ident == thread), f"thread {thread}")


def any_applying() -> bool:
    """Whether a gate of this process is applying an update, or has one pending. In a forked child an update is pending
    only if a half-written model needs it."""
    return any(gate.applying or gate.pending for gate in list(_gates))


def _after_fork() -> None:
    for gate in list(_gates):
        gate.after_fork()


_gates: weakref.WeakSet[Gate] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


# Which calls are counted

REMEDY = (
    'put `with scheme.hold():` around {what}, and pass gate="hold"; or pass apply="on_receive" and apply updates in '
    "receive()"
)

_DEFERRED_FUNCTIONS = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
_DEFERRED_RESULTS = frozenset((CoroutineType, GeneratorType, AsyncGeneratorType))


def _check_hookable(module: nn.Module) -> None:
    scripted = isinstance(module, torch.jit.ScriptModule)
    if scripted or is_compiled(module):
        raise ValueError(
            f"{type(module).__name__} is a {'scripted' if scripted else 'compiled'} module. Its calls do not run the "
            f"gate's hooks, so a weight update could tear a forward: {REMEDY.format(what='its calls')}."
        )


def _call_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the module call that runs this hook: one for all hooks of a call, another for a recursive call."""
    while frame is not None and frame.f_code is not CALL_IMPL:
        frame = frame.f_back
    return frame


class InertHook:
    """Stands for the gate's hooks in a copied or unpickled module, which is not gated. It removes itself, and the other
    ones of the module, at the next call."""

    def __call__(self, module: nn.Module, *args: object) -> None:
        if len(args) > 1:
            return  # called as a forward hook: torch may be iterating over its dictionary
        *both, always_called = call_hooks(module)
        for hooks in both:
            for key in [key for key, hook in hooks.items() if isinstance(hook, InertHook)]:
                del hooks[key]
                always_called.pop(key, None)


def _is_deferred(function: object) -> bool:
    """Whether a call returns before its work is done: a coroutine function, a generator function, or an object whose
    ``__call__`` is one."""
    both = function, inspect.getattr_static(type(function), "__call__", None)
    return any(is_kind(one) for one in both for is_kind in _DEFERRED_FUNCTIONS)


def _check_result(result: object, what: str) -> None:
    """Warn if a call has returned a coroutine or a generator, because its work comes later."""
    if type(result) in _DEFERRED_RESULTS:
        problem = (
            f"a call of {what} has returned a {type(result).__name__}, which reads the model after the gate is left"
        )
        remedy = REMEDY.format(what="all of that work")
        warnings.warn(f"{problem}: an update may be applied during that. To keep them apart, {remedy}.", stacklevel=1)


def _hidden_from_dynamo(function: F) -> F:
    """Keep dynamo from tracing what a hook does as part of the model: a hook may apply an update."""
    disabled: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


class _Hook:
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()  # copy.deepcopy uses this, too


class EnterHook(_Hook):
    @_hidden_from_dynamo
    def __call__(self, module: nn.Module, args: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is None:
            raise RuntimeError(
                f"the hooks of {type(module).__name__} do not run inside nn.Module.__call__ (is it compiled?), so the "
                'gate cannot tell when its forward ends. Pass gate="hold" and put `with scheme.hold():` around it.'
            )
        self.gate.enter_call(frame)


class LeaveHook(_Hook):
    @_hidden_from_dynamo
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is not None:
            self.gate.leave_call(frame)
        _check_result(output, type(module).__name__)


def check_calls(model: nn.Module, *, has_gated_methods: bool = False) -> None:
    """Raises ValueError if no call of a module would run the gate's hooks, or if each call returns before its work is
    done. Warns, at the user's line, if some calls may not run the hooks, or if the module cannot be called."""
    _check_hookable(model)
    stacklevel = user_stacklevel()
    kind = type(model).__name__
    forward = getattr(model, "forward", None)
    if _is_deferred(forward):
        problem = f"a call of {kind}.forward returns before its work is done, so an update may be applied during it"
        raise ValueError(f"{problem}: {REMEDY.format(what='all of that work')}")
    is_callable = getattr(forward, "__func__", None) is not nn.Module.forward or has_gated_methods
    if not is_callable and not isinstance(model, TensorDictBase):
        remedy = REMEDY.format(what="whatever reads it (its other methods, calls of its submodules)")
        problem = f"{kind} has no forward(), and the gate sees only calls of the module: an update may be applied while"
        warnings.warn(f"{problem} other code reads it. To keep them apart, {remedy}.", stacklevel=stacklevel)
    if may_be_inlined(model):
        remedy = REMEDY.format(what="its calls")
        problem = f"{kind}, or a module around it, was compiled before it was registered here. Calls of the compiled "
        warnings.warn(
            f"{problem}module may bypass the gate, so an update may be applied during them. Call init_on_receiver() "
            f"first and torch.compile() then; or {remedy}.",
            stacklevel=stacklevel,
        )


class GatedMethod:
    """Stands for a method while a gate counts its calls. If two gates count them, one's wraps the other's."""

    def __init__(self, gate: Gate, model: object, name: str, method: Callable[..., Any]) -> None:
        update_wrapper(self, method)
        self.gate: Gate | None = gate  # None once removed
        self._enter, self._leave = _hidden_from_dynamo(gate.enter_call), _hidden_from_dynamo(gate.leave_call)
        self._model = model
        self._name = name
        self.method = method

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.gate is None:
            return self.method(*args, **kwargs)
        frame = sys._getframe()
        self._enter(frame)
        try:
            result = self.method(*args, **kwargs)
        finally:
            self._leave(frame)
            del frame  # it refers to itself by this name, and to its callers with all they hold
        _check_result(result, f"{type(self._model).__name__}.{self._name}")
        return result

    def counts_for(self, gate: Gate) -> bool:
        return self.gate is gate or (isinstance(self.method, GatedMethod) and self.method.counts_for(gate))

    def remove(self) -> None:
        """Count no more calls. Idempotent."""
        self.gate = None
        attributes, name = vars(self._model), self._name
        # One that another wraps stays until that one is removed.
        while isinstance(outer := attributes.get(name), GatedMethod) and outer.gate is None:
            if isinstance(outer.method, GatedMethod):
                attributes[name] = outer.method
            else:
                del attributes[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, self._name)  # the class's method of the copy; copy.deepcopy uses this, too


def check_methods(model: object, names: Iterable[str]) -> None:
    """Raises ValueError for a name that is no method of the model, or if its calls return before their work is done."""
    kind = type(model).__name__
    attributes = getattr(model, "__dict__", None)
    for name in names:
        function = inspect.getattr_static(type(model), name, None) if isinstance(name, str) else None
        is_own = attributes is not None and not isinstance(attributes.get(name), GatedMethod | None)
        if name == "__call__" or not inspect.isfunction(function) or is_own:
            hint = "calls of a module are gated anyway" if name == "__call__" else "put `with scheme.hold():` around it"
            raise ValueError(f"gated: {kind} has no ordinary method {name!r}; {hint}")
        if attributes is None:
            raise ValueError(f"gated: objects of {kind} have no __dict__, so their {name!r} cannot be wrapped")
        if _is_deferred(function):
            raise ValueError(f"gated: {kind}.{name} returns before its work is done; put hold() around that work")


Handle = RemovableHandle | GatedMethod
