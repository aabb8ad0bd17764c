"""The gate lets a weight update through to the model only when nobody is reading it.

    gate = Gate()
    gate.attach(policy)              # calls of policy(...) are readers from now on, in tasks and in threads
    gate.offer(copy_weights, done)   # applied at once if nobody reads, else by the last reader to leave

    with gate.hold():                # so is this block; `async with gate.hold():` waits without blocking the loop
        policy.act(observation)

Covered are calls of an attached module, and of the methods that `attach_methods` is given. Not covered are its other
methods, calls of its submodules, an `async def forward`, and hooks that a compiler has removed: put `hold()` around
those; :func:`check_calls` warns of them. A thread started inside a hold without its context is a stranger to it;
asyncio.to_thread passes the context on (`contextvars.copy_context().run`).

Calls of a module are seen by its forward hooks. A method is wrapped on the object itself, where an attribute goes
before the class's method: other objects of the class, and copies of this one, have the method as it is.
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
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, MethodType
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
# What is called, with the gate, by each reader of this context that has come in; None: nothing.
entered: ContextVar[Callable[[Gate], None] | None] = ContextVar("asyncsync_entered", default=None)


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

    def __exit__(self, *exc: object) -> None:
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

    async def __aexit__(self, *exc: object) -> None:
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


class LoopWatch:
    """Whether the loop on which a gate's updates come in turns between calls of the model. Its ``thread`` is None until
    it is bound; ``next_look`` is when :meth:`look` is due, by time.monotonic()."""

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
        _check_hookable(module)
        with self._mutex:
            if any(isinstance(hook, Leave) and hook.gate is self for hook in forward_hooks(module).values()):
                return []
            # First in, last out, so that the hooks that are there already read the weights inside the gate.
            handles: list[Handle] = [module.register_forward_hook(Leave(self), always_call=True)]
            handles.append(module.register_forward_pre_hook(Enter(self), prepend=True))
            self._handles += handles
        return handles

    def attach_methods(self, model: object, names: Iterable[str]) -> Sequence[Handle]:
        """Count every call of these methods of an object likewise. Raises as :func:`check_methods`, with nothing
        changed."""
        names = list(names)
        check_methods(model, names)
        methods: dict[str, GatedMethod] = {}
        with self._mutex:
            for name in names:
                known = vars(model).get(name)
                if not (isinstance(known, GatedMethod) and known.counts_for(self)):
                    methods[name] = GatedMethod(self, model, name, known or getattr(model, name))
            vars(model).update(methods)
            self._handles += methods.values()
        return list(methods.values())

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
            while self._update is not None and self.try_apply():
                pass  # others may have been offered meanwhile

    def try_apply(self, given: Writer | None = None) -> bool:
        """Apply this update at once, in this thread, if nobody reads and no other is on its way; None: the pending one.
        Whether it was applied.

        What `apply` of a given update raises is raised: after an Exception it is dropped, after an interrupt it is
        pending. Its `done` is called only in the latter case, when it has been applied.
        """
        frame = sys._getframe()
        error: Exception | None = None
        try:
            with self._mutex:
                if self._readers or self._applying is not None or (given and self._update):
                    return False
                if (update := given or self._update) is None:
                    return False
                # In this order an interrupt between two lines loses nothing.
                update.applied, update.frame, update.thread = False, frame, threading.get_ident()
                self._applying = update
                self._update = None
            try:
                update.apply()
            except Exception as exc:
                error = exc
            self._torn = False
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
            self._release(frame)
            del frame  # it refers to itself by this name, and to its callers with all they hold

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

    def _admit(self, reader: Reader, deadline: float, *, join: bool) -> float | None:
        """Let a reader in. Else: after how many seconds to look again, 0 if the pending update goes first and nothing
        is in its way. Under the mutex."""
        if self._applying is not None:
            if self._applying.thread != reader.thread:
                return self._nap(deadline)
        elif self._update is not None:
            if not self._readers:
                return 0.0
            # A thread that is inside already, by another task of its loop, would block the task that it waits for.
            inside = {self._loop.thread, *(other.thread for other in self._readers.values())}
            if not (join and reader.thread in inside) and not any(self._around_caller()):
                return self._nap(deadline)
        if reader.key in self._readers:
            reader.key = reader
        self._readers[reader.key] = reader
        return None

    def _around_caller(self) -> Iterator[Reader]:
        """The forwards and holds of this gate that the caller is in, its own or those that it was started in; the
        innermost first."""
        reader = innermost.get()
        while reader is not None:
            if reader.gate is self:
                yield reader
            reader = reader.parent

    @property
    def held_by_caller(self) -> bool:
        """Whether this thread and task has a hold() of this gate open: no update can come before it leaves that."""
        for reader in self._around_caller():
            if reader.frame is None and reader.thread == threading.get_ident() and not reader.is_abandoned:
                return reader.task is _task()
        return False

    def enter(self, reader: Reader) -> None:
        now = time.monotonic()
        if now >= self._loop.next_look and reader.thread == self._loop.thread:
            self._loop.look(now)
        deadline = now + self.patience
        while True:
            if self._update is not None or self._applying is not None:
                self.poll()
            with self._mutex:
                if (nap := self._admit(reader, deadline, join=True)) is not None:
                    self._asleep += 1
                    try:
                        self._changed.wait(nap)
                    finally:
                        self._asleep -= 1
            if nap is None:
                innermost.set(reader)
                if (tell := entered.get()) is not None:
                    tell(self)
                return

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
                self.poll()
            with self._mutex:
                if (nap := self._admit(reader, deadline, join=False)) is not None:
                    waiter: asyncio.Future[None] = loop.create_future()
                    self._waiters.add(waiter)
            if nap is None:
                innermost.set(reader)
                if (tell := entered.get()) is not None:
                    tell(self)
                return
            try:
                await asyncio.wait({waiter}, timeout=nap)
            finally:
                with self._mutex:
                    self._waiters.discard(waiter)

    def _nap(self, deadline: float) -> float:
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

    def after_fork(self) -> None:
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


def any_applying() -> bool:
    """Whether any gate of this process has an update that is being written, or was when this process was forked."""
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

_EARLY = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
_LATER = frozenset((CoroutineType, GeneratorType, AsyncGeneratorType))


def _check_hookable(module: nn.Module) -> None:
    scripted = isinstance(module, torch.jit.ScriptModule)
    if scripted or is_compiled(module):
        raise ValueError(
            f"{type(module).__name__} is a {'scripted' if scripted else 'compiled'} module, in which the gate's "
            f"hooks do not run, so a weight update could tear a forward: {REMEDY.format(what='its calls')}."
        )


def _call_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the module call around a hook: one for its pre-hooks and hooks, another in a recursion."""
    while frame is not None and frame.f_code is not CALL_IMPL:
        frame = frame.f_back
    return frame


class Inert:
    """What becomes of the gate's hooks in a copied or unpickled module: that module is not gated."""

    def __call__(self, module: nn.Module, *args: object) -> None:
        if len(args) > 1:
            return  # called as a forward hook: torch may be iterating over its dictionary
        *both, always_called = call_hooks(module)
        for hooks in both:
            for key in [key for key, hook in hooks.items() if isinstance(hook, Inert)]:
                del hooks[key]
                always_called.pop(key, None)


def ends_early(function: object) -> bool:
    """Whether a call returns before its work is done: a coroutine function, a generator function, an object whose
    ``__call__`` is one."""
    both = function, inspect.getattr_static(type(function), "__call__", None)
    return any(is_early(one) for one in both for is_early in _EARLY)


def check_result(result: object, what: str) -> None:
    """Warn of a call that has returned what does its work later."""
    if type(result) in _LATER:
        problem = (
            f"a call of {what} has returned a {type(result).__name__}, which reads the model after the gate is left"
        )
        remedy = REMEDY.format(what="all of that work")
        warnings.warn(f"{problem}: an update may come in its middle. To keep them apart, {remedy}.", stacklevel=1)


def unseen(function: F) -> F:
    """Keep dynamo out of what a hook does, which may be a whole update: it would trace it as part of the model."""
    disabled: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


class _Hook:
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()  # copy.deepcopy goes this way too


class Enter(_Hook):
    @unseen
    def __call__(self, module: nn.Module, args: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is None:
            raise RuntimeError(
                f"the hooks of {type(module).__name__} do not run inside nn.Module.__call__ (is it compiled?), so the "
                'gate cannot tell when its forward ends. Pass gate="hold" and put `with scheme.hold():` around it.'
            )
        self.gate.enter_call(frame)


class Leave(_Hook):
    @unseen
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is not None:
            self.gate.leave_call(frame)
        check_result(output, type(module).__name__)


def check_calls(model: nn.Module, *, has_gated_methods: bool = False) -> None:
    """Warn of a module whose calls will not all run the gate's hooks, or that has nothing to be called by: the user's
    code, which registers it. Raises ValueError if none of its calls will, or each ends before its work does."""
    _check_hookable(model)
    stacklevel = user_stacklevel()
    kind = type(model).__name__
    forward = getattr(model, "forward", None)
    if ends_early(forward):
        problem = f"a call of {kind}.forward ends before its work does, so that an update may come in its middle"
        raise ValueError(f"{problem}: {REMEDY.format(what='all of that work')}")
    is_callable = getattr(forward, "__func__", None) is not nn.Module.forward or has_gated_methods
    if not is_callable and not isinstance(model, TensorDictBase):
        remedy = REMEDY.format(what="whatever reads it (its other methods, calls of its submodules)")
        problem = f"{kind} has no forward(), and the gate sees nothing but calls of the module: an update may come in "
        warnings.warn(f"{problem}the middle of anything else. To keep them apart, {remedy}.", stacklevel=stacklevel)
    if may_be_inlined(model):
        remedy = REMEDY.format(what="its calls")
        problem = f"{kind} was compiled, or a module around it, before it is registered here. Calls of that "
        warnings.warn(
            f"{problem}may bypass the gate, so that an update comes in their middle. Call init_on_receiver() first and "
            f"torch.compile() then; or {remedy}.",
            stacklevel=stacklevel,
        )


class GatedMethod:
    """What stands for a method while a gate counts its calls. The methods of two gates may lie one in the other."""

    def __init__(self, gate: Gate, model: object, name: str, method: Callable[..., Any]) -> None:
        update_wrapper(self, method)
        self.gate: Gate | None = gate  # None once removed
        self._enter, self._leave = unseen(gate.enter_call), unseen(gate.leave_call)
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
        check_result(result, f"{type(self._model).__name__}.{self._name}")
        return result

    def counts_for(self, gate: Gate) -> bool:
        return self.gate is gate or (isinstance(self.method, GatedMethod) and self.method.counts_for(gate))

    def remove(self) -> None:
        """Count no more calls. Idempotent."""
        self.gate = None
        attributes, name = vars(self._model), self._name
        # One that lies within another goes with that.
        while isinstance(outer := attributes.get(name), GatedMethod) and outer.gate is None:
            if isinstance(outer.method, GatedMethod):
                attributes[name] = outer.method
            else:
                del attributes[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_of, (self._model, self._name)  # copy.deepcopy goes this way too


def _method_of(model: object, name: str) -> Any:
    """The method of a copied or unpickled object: that is not gated."""
    return MethodType(getattr(type(model), name), model)


def check_methods(model: object, names: Iterable[str]) -> None:
    """Raises ValueError for a name that is no method of the model, or one whose calls end before their work does."""
    kind = type(model).__name__
    attributes = getattr(model, "__dict__", None)
    for name in names:
        function = inspect.getattr_static(type(model), name, None) if isinstance(name, str) else None
        is_own = attributes is not None and not isinstance(attributes.get(name), GatedMethod | None)
        if name == "__call__" or not inspect.isfunction(function) or is_own:
            hint = "calls of a module are gated anyway" if name == "__call__" else "put `with scheme.hold():` around it"
            raise ValueError(f"gated: {kind} has no ordinary method {name!r}; {hint}")
        if attributes is None:
            why = "have no attributes of their own, and so"
            raise ValueError(f"gated: objects of {kind} {why} {name!r} cannot be wrapped")
        if ends_early(function):
            raise ValueError(f"gated: a call of {kind}.{name} ends before its work does; put hold() around that work")


Handle = RemovableHandle | GatedMethod
