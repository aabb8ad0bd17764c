"""The gate: no reader ever sees a model change, whichever threads and tasks read, and no update waits for ever.

The oracle: every tensor of `Model` holds the number of the version, so a forward that finds two numbers, or another one
at its end than at its beginning, was torn.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import gc
import io
import logging
import os
import pickle
import queue
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from asyncsync.errors import AckTimeout
from asyncsync.model import gate as gate_module
from asyncsync.model.gate import Gate, Hold, Writer

pytestmark = pytest.mark.timeout(60)
LONG = 10.0  # seconds that nothing here comes near, unless it hangs


class TornRead(AssertionError):
    pass


class Model(nn.Module):
    def __init__(self, tensors: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(3), requires_grad=False) for _ in range(tensors))

    def version(self) -> int:
        seen = {int(value) for weight in self.weights for value in weight}
        if len(seen) != 1:
            raise TornRead(f"versions {sorted(seen)} side by side")
        return seen.pop()

    def forward(self, inside: Callable[[], object] = lambda: None) -> int:
        before = self.version()
        inside()
        after = self.version()
        if before != after:
            raise TornRead(f"version {before} became {after} under a reader")
        return before

    def write(self, version: int, between: Callable[[], object] = lambda: None) -> None:
        for weight in self.weights:
            weight.fill_(version)
            between()


class ApplyAtOnce(Gate):
    """A broken gate, to see the oracle bark."""

    def offer(self, update: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        update()
        done(None)


class Done(list[BaseException | None]):
    """A `done` callback that keeps what it was called with."""

    def __call__(self, error: BaseException | None) -> None:
        self.append(error)


class Reader:
    """A hold, or a forward, in a thread of its own, from `with` until leave()."""

    def __init__(self, gate: Gate, model: Model | None = None) -> None:
        self.entered, self._go = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1, "reader")
        self._run = self._pool.submit(self._hold, gate) if model is None else self._pool.submit(model, self._stay)

    def _hold(self, gate: Gate) -> None:
        with gate.hold():
            self._stay()

    def _stay(self) -> None:
        self.entered.set()
        assert self._go.wait(LONG)

    @property
    def name(self) -> str:
        return next(thread.name for thread in self._pool._threads)

    def leave(self) -> None:
        self._go.set()
        self._run.result(LONG)

    def __enter__(self) -> Reader:
        assert self.entered.wait(LONG)
        return self

    def __exit__(self, *exc: object) -> None:
        self._go.set()
        self._pool.shutdown()
        self._run.result(LONG)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def gate(model: Model) -> Iterator[Gate]:
    gate = Gate(patience=LONG)
    gate.attach(model)
    yield gate
    gate.detach()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that, unlike asyncio.to_thread, inherit no context."""
    with ThreadPoolExecutor(4, "stranger") as pool:
        yield pool


@pytest.fixture
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting reader looks again only when it is woken."""
    monkeypatch.setattr(gate_module, "_RECHECK_SECONDS", 2 * LONG)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.0005)


def offer(gate: Gate, model: Model, version: int = 1) -> Done:
    """Offer an update; what its `done` has been called with."""
    done = Done()
    gate.offer(lambda: model.write(version), done)
    return done


async def read(gate: Gate, model: Model) -> int:
    async with gate.hold():
        return model()


def failing() -> None:
    raise OSError("no weights")


def waiting(gate: Gate) -> int:
    return len(gate._changed._waiters) + len(gate._waiting_tasks)


async def until_waiting(gate: Gate, count: int) -> None:
    while waiting(gate) < count:  # noqa: ASYNC110 - the gate has no event for it
        await asyncio.sleep(0)


def in_new_context(call: Callable[[], object]) -> Any:
    return contextvars.Context().run(call)


# An update and its readers. Who waits for whom, and what a withdrawn or replaced update does: see Schedules.


def test_an_update_is_applied_at_once_when_nobody_reads(gate: Gate, model: Model) -> None:
    done, threads = Done(), []
    gate.offer(lambda: (threads.append(threading.get_ident()), model.write(1))[1], done)
    assert (model(), done, gate.pending, threads) == (1, [None], False, [threading.get_ident()])


@pytest.mark.parametrize("kind", ["hold", "forward"])
def test_the_last_reader_to_leave_applies_in_its_own_thread(kind: str, gate: Gate, model: Model) -> None:
    applied_in: list[str] = []
    done = Done()

    def update() -> None:
        applied_in.append(threading.current_thread().name)
        model.write(1)

    argument = None if kind == "hold" else model
    with Reader(gate, argument) as first, Reader(gate, argument) as last:
        gate.offer(update, done)
        assert gate.pending
        assert gate.readers == 2
        first.leave()
        assert not applied_in
        assert model.version() == 0
        last.leave()
        assert (applied_in, done, gate.readers, gate.pending) == ([last.name], [None], 0, False)
    assert model() == 1


@pytest.mark.parametrize("tried", [False, True], ids=["offered", "tried"])
def test_readers_wait_while_an_update_is_being_applied(
    tried: bool, gate: Gate, model: Model, pool: ThreadPoolExecutor, no_ticks: None
) -> None:
    half, go = threading.Event(), threading.Event()

    def slowly() -> None:
        model.write(1, between=lambda: (half.set(), go.wait(LONG)))

    call = (gate.try_apply, Writer(slowly, Done())) if tried else (gate.offer, slowly, Done())
    offered = pool.submit(*call)
    assert half.wait(LONG)
    assert not gate.try_apply(Writer(failing, Done()))
    gate.bind()  # the loop thread waits for the short copy, too
    threading.Thread(target=lambda: (until(lambda: waiting(gate) == 2), go.set())).start()
    stranger = pool.submit(model)
    assert model() == 1
    assert stranger.result(LONG) == 1
    assert offered.result(LONG) is (True if tried else None)


def test_an_update_that_calls_the_model_does_not_deadlock(gate: Gate, model: Model) -> None:
    seen: list[int] = []

    def update() -> None:
        seen.append(model())
        model.write(1)
        with gate.hold():
            seen.append(model())

    done = Done()
    gate.offer(update, done)
    assert (seen, done, gate.readers) == ([0, 1], [None], 0)


def test_updates_offered_during_an_apply_and_by_its_done_are_applied_afterwards(gate: Gate, model: Model) -> None:
    order: list[str] = []

    def first() -> None:
        gate.offer(lambda: (order.append("second"), model.write(2))[1], second_done)
        model.write(1)
        order.append("first")

    def second_done(error: BaseException | None) -> None:
        order.append("second done")
        gate.offer(lambda: (order.append("third"), model.write(3))[1], Done())

    gate.offer(first, lambda error: order.append("first done"))
    assert order == ["first", "first done", "second", "second done", "third"]
    assert model() == 3


# Who waits


def test_an_inherited_token_is_void_once_its_hold_is_closed(
    gate: Gate, model: Model, pool: ThreadPoolExecutor, no_ticks: None
) -> None:
    with gate.hold():
        inherited = contextvars.copy_context()
    with Reader(gate) as reader:
        offer(gate, model)
        late = pool.submit(inherited.run, model)
        until(lambda: waiting(gate))
        assert not late.done()
        reader.leave()
        assert late.result(LONG) == 1


@pytest.mark.parametrize("kind", ["hold", "forward", "async hold"])
def test_patience_ends_with_an_error_that_says_why(kind: str, pool: ThreadPoolExecutor, model: Model) -> None:
    gate = Gate(patience=0.1)
    gate.attach(model)

    def hold() -> None:
        with gate.hold():
            pass

    enter = {"hold": hold, "forward": model, "async hold": lambda: asyncio.run(read(gate, model))}[kind]
    with Reader(gate):
        offer(gate, model)
        start = time.monotonic()
        with pytest.raises(AckTimeout, match=r"pending for 0\.1 s .* 1 reader.* reader_0.*hold\(\)"):
            pool.submit(enter).result(LONG)
        assert time.monotonic() - start >= 0.1
        assert (gate.readers, gate.pending, waiting(gate)) == (1, True, 0)
    assert model() == 1
    gate.detach()


def test_patience_also_ends_a_wait_for_an_apply_that_blocks(pool: ThreadPoolExecutor) -> None:
    gate, started, go = Gate(patience=0.1), threading.Event(), threading.Event()
    offered = pool.submit(gate.offer, lambda: (started.set(), go.wait(LONG))[0], Done())
    assert started.wait(LONG)
    with pytest.raises(AckTimeout, match="writing it for"), gate.hold():
        pass
    go.set()
    offered.result(LONG)


def test_holds_of_two_gates_may_be_interleaved(model: Model) -> None:
    gate, other = Gate(patience=LONG), Gate(patience=LONG)
    with Reader(gate), Reader(other), gate.hold(), other.hold():
        offer(gate, model)
        other.offer(lambda: None, Done())
        with gate.hold(), other.hold():
            assert (gate.readers, other.readers) == (3, 3)
    assert model.version() == 1


async def test_whatever_a_holder_calls_in_its_own_thread_or_in_to_thread_is_nested(gate: Gate, model: Model) -> None:
    with gate.hold():
        offer(gate, model)
        assert in_new_context(model) == 0, "as another task of the loop in this thread would call it"
        assert await asyncio.to_thread(model) == 0
    assert model() == 1


async def test_a_child_task_is_nested_and_protects_after_its_parent_has_left(gate: Gate, model: Model) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def child() -> int:
        async with gate.hold():
            entered.set()
            before = model.version()
            await leave.wait()
            assert model.version() == before
            return before

    async with gate.hold():
        offer(gate, model)
        task = asyncio.create_task(child())
        await entered.wait()
    assert gate.pending, "the inner hold outlives the outer one"
    leave.set()
    assert await task == 0
    assert model() == 1


@pytest.mark.parametrize("bound", [True, False])
def test_a_reader_that_finds_only_left_behind_entries_applies_the_update_itself(
    bound: bool, gate: Gate, model: Model
) -> None:
    if bound:
        gate.bind()

    def interrupted() -> None:
        offer(gate, model)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model(interrupted)
    assert gate.pending
    assert model() == 1


# async with


async def test_a_cancelled_waiter_leaves_nothing_behind_and_the_others_still_wake(
    gate: Gate, model: Model, no_ticks: None
) -> None:
    with Reader(gate) as reader:
        offer(gate, model)
        cancelled, other = (asyncio.create_task(read(gate, model)) for _ in range(2))
        await until_waiting(gate, 2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (waiting(gate), gate.readers) == (1, 1)
        reader.leave()
        assert await asyncio.wait_for(other, LONG) == 1
    assert (waiting(gate), gate.readers) == (0, 0)


async def test_a_waiter_that_is_cancelled_as_it_wakes_loses_no_update(gate: Gate, model: Model) -> None:
    with Reader(gate) as reader:
        done = offer(gate, model)
        task = asyncio.create_task(read(gate, model))
        await until_waiting(gate, 1)
        reader.leave()
        task.cancel()  # the wake-up is already scheduled
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (done, gate.readers, model()) == ([None], 0, 1)


def test_a_leaver_is_not_disturbed_by_a_waiter_whose_loop_is_closed(gate: Gate, model: Model) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # "Task was destroyed but it is pending"
    with Reader(gate) as reader:
        done = offer(gate, model)
        task = loop.create_task(read(gate, model))
        while not waiting(gate):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        reader.leave()
    assert (done, model()) == ([None], 1)
    assert waiting(gate) == 0
    task.get_coro().close()


async def test_an_async_generator_may_leave_its_hold_in_another_context(gate: Gate, model: Model) -> None:
    async def rollouts() -> AsyncIterator[int]:
        async with gate.hold():
            while True:
                yield model()

    generator = rollouts()
    await asyncio.create_task(anext(generator))
    offer(gate, model)
    assert gate.pending
    await asyncio.create_task(generator.aclose())
    assert (gate.readers, model()) == (0, 1)


# Holds


def test_an_open_hold_cannot_be_entered_again(gate: Gate) -> None:
    hold = gate.hold()
    with hold, pytest.raises(RuntimeError, match="open already"), hold:
        pass
    assert gate.readers == 0


def test_a_hold_that_is_thrown_away_open_no_longer_counts(gate: Gate, model: Model) -> None:
    hold = gate.hold()
    hold.__enter__()
    offer(gate, model)
    gate.poll()
    assert gate.pending
    del hold
    gc.collect()
    gate.poll()
    assert not gate.pending
    assert model() == 1


def test_a_generator_collected_while_the_gate_is_locked_leaves_its_hold(gate: Gate, model: Model) -> None:
    def rollouts() -> Iterator[int]:
        with gate.hold():
            while True:
                yield model()

    generator = rollouts()
    next(generator)
    offer(gate, model)
    with gate._mutex:  # where a garbage collection may come
        generator.close()
    assert (gate.readers, model()) == (0, 1)


class Interrupted(Gate):
    """KeyboardInterrupt comes just after a reader has been let in."""

    def enter(self, reader: Any) -> None:
        super().enter(reader)
        raise KeyboardInterrupt

    async def enter_async(self, reader: Any) -> None:
        await super().enter_async(reader)
        raise asyncio.CancelledError


async def test_an_interrupt_while_entering_leaves_no_reader_behind() -> None:
    gate = Interrupted()
    hold, waiter = gate.hold(), gate.hold()
    with pytest.raises(KeyboardInterrupt):
        hold.__enter__()
    with pytest.raises(asyncio.CancelledError):
        await waiter.__aenter__()
    assert gate.readers == 0


def test_reading_again_and_again_keeps_nothing_alive(gate: Gate, model: Model) -> None:
    def entries() -> int:
        return sum(type(thing) is gate_module.Reader for thing in gc.get_objects())

    gc.collect()
    before = entries()
    for _ in range(50):
        with gate.hold(), gate.hold():
            model()
        in_new_context(model)
    assert entries() <= before + 3


def test_a_users_exception_is_not_masked(gate: Gate, model: Model) -> None:
    def inside() -> None:
        gate.offer(failing, Done())
        raise LookupError("the user's")

    with pytest.raises(LookupError, match="the user's"), gate.hold():
        inside()
    with pytest.raises(LookupError, match="the user's"):
        model(inside)
    assert (gate.readers, gate.pending) == (0, False)


# Forwards that end abnormally


@pytest.mark.parametrize("how", ["offer", "poll", "waiting reader", "leaving reader"])
def test_a_forward_ended_by_keyboard_interrupt_is_cleared(
    how: str, gate: Gate, model: Model, pool: ThreadPoolExecutor
) -> None:
    def interrupted() -> None:
        if how != "offer":
            offer(gate, model)
        raise KeyboardInterrupt

    with Reader(gate) as reader:
        with ThreadPoolExecutor(1) as gone, pytest.raises(KeyboardInterrupt):  # torch runs no hook then
            gone.submit(model, interrupted).result(LONG)
        assert gate.readers == 2
        if how == "waiting reader":
            stranger = pool.submit(model)
            until(lambda: gate.readers == 1)
        if how == "leaving reader":
            reader.leave()
            assert gate.readers == 0
    if how == "offer":
        offer(gate, model)
    if how == "poll":
        gate.poll()
    if how == "waiting reader":
        assert stranger.result(LONG) == 1
    assert not gate.pending
    assert model() == 1


def test_a_forward_that_is_running_is_never_taken_for_an_ended_one(gate: Gate, model: Model) -> None:
    def busy() -> Iterator[int]:  # a generator's frame leaves and enters the stack all the time
        while not go.is_set():
            yield 1

    def consume() -> None:
        started.set()
        for _ in busy():
            pass

    go, started, interval = threading.Event(), threading.Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            forward = pool.submit(model, consume)
            assert started.wait(LONG)
            offer(gate, model)
            for _ in range(20_000):
                gate.poll()
            still = gate.readers
            go.set()
            assert forward.result(LONG) == 0
            assert still == 1
    finally:
        sys.setswitchinterval(interval)
    assert model() == 1


@pytest.mark.parametrize("prepend", [True, False])
def test_a_foreign_pre_hook_that_raises_closes_nobody_elses_entry(prepend: bool, gate: Gate, model: Model) -> None:
    def foreign(module: nn.Module, args: Any) -> None:
        raise ConnectionError

    def call() -> None:
        handle = model.register_forward_pre_hook(foreign, prepend=prepend)
        with pytest.raises(ConnectionError):
            model()
        handle.remove()
        assert gate.readers == 1, "that of the outer call"

    model(call)
    assert gate.readers == 0


def test_a_module_that_calls_itself_and_another_is_counted_once_per_call(gate: Gate, model: Model) -> None:
    gate.attach(model)  # a second time, which changes nothing
    gate.attach(other := Model())
    seen: list[int] = []

    def record() -> None:
        seen.append(gate.readers)

    model(lambda: (record(), model(lambda: (record(), other(record), record())), record()))
    assert seen == [1, 2, 3, 2, 1]
    assert gate.readers == 0


# Updates that raise


def test_an_update_that_raises_is_dropped_and_readers_go_on(gate: Gate, model: Model) -> None:
    done = Done()
    with gate.hold():
        gate.offer(failing, done)
        assert not gate.try_apply(Writer(failing, done))
    assert [str(error) for error in done] == ["no weights"]
    with pytest.raises(OSError, match="no weights"):
        gate.try_apply(Writer(failing, done))
    assert (model(), gate.pending, gate.applying, len(done)) == (0, False, False, 1)
    assert (offer(gate, model), model()) == ([None], 1)


def interrupted_write(model: Model, version: int) -> Callable[[], None]:
    """An update that KeyboardInterrupt hits halfway, the first time."""
    interrupts = [KeyboardInterrupt()]

    def between() -> None:
        if interrupts:
            raise interrupts.pop()

    return lambda: model.write(version, between)


def interrupt(gate: Gate, model: Model, tried: bool) -> Done:
    """Interrupt an update halfway, the first time that it is applied; what its `done` has been called with."""
    update, done = interrupted_write(model, 1), Done()
    if tried:
        with pytest.raises(KeyboardInterrupt):
            gate.try_apply(Writer(update, done))
    else:
        with pytest.raises(KeyboardInterrupt), gate.hold():
            gate.offer(update, done)
    with pytest.raises(TornRead):
        model.version()
    assert (gate.readers, gate.pending, done) == (0, True, [])
    return done


tried_too = pytest.mark.parametrize("tried", [False, True], ids=["offered", "tried"])


@tried_too
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("waits", [True, False], ids=["async hold", "forward"])
def test_nobody_reads_a_model_that_an_interrupt_left_half_written(
    waits: bool, bound: bool, tried: bool, gate: Gate, model: Model, pool: ThreadPoolExecutor
) -> None:
    if bound:
        pool.submit(gate.bind).result(LONG)
    done = interrupt(gate, model, tried)
    assert not gate.withdraw(), "the model needs it"
    assert not gate.try_apply(Writer(failing, Done())), "the interrupted one goes first"
    reading = pool.submit(asyncio.run, read(gate, model)) if waits else pool.submit(model)
    assert reading.result(LONG) == 1
    assert (gate.pending, done) == (False, [None])


@tried_too
def test_a_newer_update_makes_an_interrupted_one_whole(tried: bool, gate: Gate, model: Model) -> None:
    old = interrupt(gate, model, tried)
    new = offer(gate, model, 2)
    assert (model(), old, new) == (2, [], [None])
    with gate.hold():
        offer(gate, model, 3)
        assert gate.withdraw(), "the model is whole again"


def test_what_is_tried_is_applied_at_once_or_not_at_all(gate: Gate, model: Model) -> None:
    done = Done()
    update = Writer(lambda: model.write(7), done)
    with gate.hold():
        assert not gate.try_apply(update)
    assert (model(), gate.pending) == (0, False)
    with gate.hold():
        gate.offer(lambda: model.write(1), done)
        assert not gate.try_apply(update), "another one is on its way"
    assert (model(), done) == (1, [None])
    for _ in range(2):
        assert gate.try_apply(update)
    assert (model(), gate.pending, gate.applying, done) == (7, False, False, [None])


def test_a_done_callback_that_raises_is_logged_an_interrupt_propagates_and_the_update_stands(
    gate: Gate, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[BaseException] = [OSError("broken callback"), KeyboardInterrupt()]

    def done(error: BaseException | None) -> None:
        raise errors.pop(0)

    with caplog.at_level(logging.ERROR, "asyncsync"), gate.hold():
        gate.offer(lambda: model.write(1), done)
    assert "broken callback" in caplog.text
    assert model() == 1
    with pytest.raises(KeyboardInterrupt):
        gate.offer(lambda: model.write(2), done)
    assert (model(), gate.pending, gate.readers) == (2, False, 0)


# Modules


def hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._forward_hooks_always_called]


def save_and_load(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), save_and_load])
@pytest.mark.parametrize("first", ["succeeds", "raises", "never reaches our hook"])
def test_a_copy_of_an_attached_model_is_not_gated(
    copied: Callable[[Model], Model], first: str, gate: Gate, model: Model
) -> None:
    twins: list[Model] = []
    model(lambda: twins.append(copied(model)))  # with a frame on record
    twin = copied(twins[0])
    if first == "raises":
        with pytest.raises(ZeroDivisionError):
            twin(lambda: 1 / 0)
    if first == "never reaches our hook":
        fails = twin.register_forward_pre_hook(lambda module, args: 1 / 0, prepend=True)
        with fails, twin.register_forward_hook(lambda *args: None, always_call=True), pytest.raises(ZeroDivisionError):
            twin()
    assert twin(lambda: offer(gate, model)) == 0
    assert not gate.pending
    assert hooks_of(twin) == []
    assert model() == 1
    model(lambda: offer(gate, model, 2))
    assert model() == 2, "the original is gated still"


def test_a_gate_itself_is_not_copied(gate: Gate) -> None:
    for copied in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="make a new one"):
            copied(gate)


def test_hooks_that_were_there_before_read_the_weights_inside_the_gate() -> None:
    gate, model, seen = Gate(), Model(), list[int]()
    model.register_forward_pre_hook(lambda module, args: seen.append(gate.readers))
    model.register_forward_hook(lambda module, args, output: seen.append(gate.readers))
    gate.attach(model)
    model()
    assert seen == [1, 1]


def test_detach_leaves_no_hooks_and_a_call_under_way_is_counted_to_its_end(gate: Gate, model: Model) -> None:
    gate.attach(other := Model())
    with Reader(gate, model) as reader:
        gate.detach()
        gate.detach()
        assert hooks_of(model) == hooks_of(other) == []
        offer(gate, model)
        assert gate.pending
        reader.leave()
        gate.poll()  # its hook is gone
    assert model.version() == 1
    gate.attach(model)
    model(lambda: offer(gate, model, 2))
    assert model() == 2


def test_a_module_that_was_compiled_in_place_is_refused_with_the_remedies() -> None:
    """So are other compiled ones, scripted and traced: tests/schemes/test_compiled_modules.py."""
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    with pytest.raises(ValueError, match=r'gate="hold".*apply="on_receive"'):
        Gate().attach(module)


def test_hooks_that_run_outside_a_module_call_say_so(gate: Gate, model: Model) -> None:
    before = next(iter(model._forward_pre_hooks.values()))
    with pytest.raises(RuntimeError, match='gate="hold"'), ThreadPoolExecutor(1) as pool:
        pool.submit(before, model, ()).result(LONG)
    assert gate.readers == 0


def test_a_gate_is_freed_though_a_task_inherited_its_token(model: Model) -> None:
    gate = Gate()
    with gate.hold():
        inherited = contextvars.copy_context()
    freed = threading.Event()
    weakref.finalize(gate, freed.set)
    del gate
    gc.collect()
    assert freed.is_set()
    del inherited


@pytest.mark.parametrize("applying", [True, False])
def test_a_forked_child_is_not_stopped_by_threads_it_does_not_have(applying: bool, gate: Gate, model: Model) -> None:
    gate.patience = 1.0
    half, go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool, Reader(gate) if not applying else contextlib.nullcontext():

        def slowly() -> None:
            model.write(1, between=lambda: (half.set(), go.wait(LONG)))

        offered = pool.submit(gate.offer, slowly if applying else lambda: model.write(1), Done())
        if applying:
            assert half.wait(LONG)
        else:
            offered.result(LONG)
        # One tensor operation of the child's would do if a torch thread of the parent's held a lock: none is used here.
        if (child := os.fork()) == 0:
            go.set()
            status = 1
            try:
                with gate.hold():
                    status = 0 if model.version() == int(applying) and gate.readers == 1 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go.set()
    assert model() == 1


# Schedules: threads and tasks driven step by step, against a reference

THREADS, TASKS = 3, 2


class World:
    """What one schedule plays with, and how many of its readers are inside."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.model = gate, Model()
        gate.attach(self.model)
        self.version = 0  # of the reference: what must be in the model
        self.pending: int | None = None
        self.offered = 0
        self.depth = [0] * (THREADS + TASKS)
        self.blocked: dict[int, Future[int]] = {}
        self.applied: list[int] = []
        self.expected: list[int] = []

    def offer(self) -> None:
        self.offered += 1
        version = self.offered
        self.gate.offer(lambda: self.model.write(version), lambda error: self.applied.append(version))


Order = tuple[str, World, "Future[int]"]


class ThreadActor:
    """A thread that enters and leaves on order; each level of nesting is a level of its stack."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.level, name="actor")
        self.thread.start()

    def order(self, order: Order | None) -> None:
        self.orders.put(order)

    def level(self) -> Future[int] | None:
        """Carry out orders until "leave", whose future is returned to be completed outside; None: stop."""
        while (order := self.orders.get()) is not None:
            what, world, future = order
            if what == "leave":
                return future
            left: Future[int] | None = future

            def inside(world: World = world, future: Future[int] = future) -> None:
                nonlocal left
                future.set_result(world.model.version())
                left = self.level()

            try:
                if what == "forward":
                    world.model(inside)
                else:
                    with world.gate.hold():
                        Model.forward(world.model, inside)
            except Exception as error:
                left.set_exception(error)
            else:
                if left is None:
                    return None
                left.set_result(0)
        return None

    def stop(self) -> None:
        self.order(None)
        self.thread.join(LONG)


class TaskActor:
    """The same as a task of the bound loop. A forward there cannot stay open, so it ends at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.orders: asyncio.Queue[Order | None] = asyncio.Queue()
        self.inside: list[tuple[Hold, bool, int]] = []
        self.task = asyncio.run_coroutine_threadsafe(self.run(), loop)

    def order(self, order: Order | None) -> None:
        self.loop.call_soon_threadsafe(self.orders.put_nowait, order)

    async def run(self) -> None:
        while (order := await self.orders.get()) is not None:
            what, world, future = order
            try:
                future.set_result(await self.carry_out(what, world))
            except Exception as error:
                future.set_exception(error)

    async def carry_out(self, what: str, world: World) -> int:
        if what == "forward":
            return world.model()
        if what == "leave":
            hold, waits, before = self.inside.pop()
            after = world.model.version()
            await hold.__aexit__() if waits else hold.__exit__()
            if after != before:
                raise TornRead(f"version {before} became {after} under a reader")
            return 0
        hold, waits = world.gate.hold(), what == "hold"
        await hold.__aenter__() if waits else hold.__enter__()
        self.inside.append((hold, waits, world.model.version()))
        return self.inside[-1][2]

    def stop(self) -> None:
        self.order(None)
        self.task.result(LONG)


class Stage:
    """The actors and the loop thread, which live as long as the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.Thread(target=self.loop.run_forever, name="loop")
        self.thread.start()
        self.actors = [*(ThreadActor() for _ in range(THREADS)), *(TaskActor(self.loop) for _ in range(TASKS))]

    def on_loop(self, call: Callable[[], object]) -> Any:
        async def run() -> object:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LONG)

    def close(self) -> None:
        for actor in self.actors:
            actor.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LONG)
        self.loop.close()

    def play(self, gate: Gate, schedule: list[tuple[int, str]], *, reference: bool = True) -> None:
        """Carry out a schedule; with `reference`, check after each step who waits, who reads, and what was applied."""
        world = World(gate)
        self.on_loop(gate.bind)
        try:
            for who, what in schedule:
                self.step(world, who, what)
                if reference:
                    self.check(world)
        finally:
            gate.withdraw()
            torn = self.empty(world)
            gate.detach()
        if torn is not None:
            raise torn
        assert gate.readers == 0

    def empty(self, world: World) -> Exception | None:
        """Let everybody leave; the first error of those who do."""
        errors: list[Exception] = []
        for who, future in world.blocked.items():
            future.result(LONG)
            world.depth[who] += 1
        for who, depth in enumerate(world.depth):
            for _ in range(depth):
                future = Future()
                self.actors[who].order(("leave", world, future))
                error = future.exception(LONG)
                if isinstance(error, Exception):
                    errors.append(error)
        return errors[0] if errors else None

    def step(self, world: World, who: int, what: str) -> None:
        gate = world.gate
        if what == "offer":
            self.on_loop(world.offer)
            world.pending = world.offered
            self.settle(world)
        elif what == "poll":
            self.on_loop(gate.poll)
        elif what == "withdraw":
            assert self.on_loop(gate.withdraw) == (world.pending is not None) or isinstance(gate, ApplyAtOnce)
            world.pending = None
            self.settle(world)
        elif who not in world.blocked and (what != "leave" or world.depth[who]):
            future: Future[int] = Future()
            task = who >= THREADS
            if what == "leave":
                world.depth[who] -= 1
            self.actors[who].order((what, world, future))
            if what == "leave":
                future.result(LONG)
                self.settle(world)
            elif task and what in ("forward", "plain hold"):  # on the loop thread: joins
                self.read(world, future)
                world.depth[who] += what != "forward"
            elif world.pending is not None and not world.depth[who] and not isinstance(gate, ApplyAtOnce):
                world.blocked[who] = future
            else:
                self.read(world, future)
                world.depth[who] += 1

    def read(self, world: World, future: Future[int]) -> None:
        seen = future.result(LONG)
        assert seen == world.version or isinstance(world.gate, ApplyAtOnce)

    def settle(self, world: World) -> None:
        """The reference: a pending update goes when nobody reads, and then those who waited come in."""
        if world.pending is not None and not any(world.depth):
            world.version, world.pending = world.pending, None
            world.expected.append(world.version)
        if world.pending is None:
            for who, future in world.blocked.items():
                self.read(world, future)
                world.depth[who] += 1
            world.blocked.clear()

    def check(self, world: World) -> None:
        assert world.gate.readers == sum(world.depth)
        assert world.gate.pending == (world.pending is not None)
        assert world.applied == world.expected
        assert not any(future.done() for future in world.blocked.values())


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(getattr(request, "param", asyncio.new_event_loop)())
    yield stage
    stage.close()


schedules = st.lists(
    st.tuples(
        st.integers(0, THREADS + TASKS - 1),
        st.sampled_from([*["hold", "plain hold", "forward"] * 2, *["leave"] * 6, *["offer"] * 3, "withdraw", "poll"]),
    ),
    min_size=25,
    max_size=60,
)
many = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize(
    ("stage", "count"),
    [
        (asyncio.new_event_loop, 40),
        pytest.param(asyncio.new_event_loop, 400, marks=pytest.mark.thorough),
        pytest.param(uvloop.new_event_loop, 40, marks=pytest.mark.thorough),
    ],
    indirect=["stage"],
)
def test_in_every_schedule_readers_and_updates_do_as_the_reference(stage: Stage, no_ticks: None, count: int) -> None:
    @settings(many, max_examples=count)
    @given(schedule=schedules)
    def play(schedule: list[tuple[int, str]]) -> None:
        stage.play(Gate(patience=LONG), schedule)

    play()


def test_the_oracle_finds_a_gate_that_applies_at_once(stage: Stage) -> None:
    @settings(many, max_examples=400, phases=[Phase.generate])
    @given(schedule=schedules)
    def broken(schedule: list[tuple[int, str]]) -> None:
        stage.play(ApplyAtOnce(), schedule, reference=False)

    with pytest.raises(TornRead):
        broken()


# Free running


async def stress(gate: Gate, updates: int) -> int:
    """Threads and tasks that read as fast as they can while updates are written slowly; the last version."""
    model, stop, yielding = Model(), threading.Event(), lambda: time.sleep(0)
    gate.attach(model)
    gate.bind()

    def forwards() -> int:
        last = 0
        while not stop.is_set():
            seen = model(yielding)
            assert seen >= last, "versions go forward"
            last = seen
        return last

    def held_method() -> None:
        while not stop.is_set():
            with gate.hold():
                Model.forward(model, lambda: model(yielding))

    async def task() -> None:
        while not stop.is_set():
            async with gate.hold():
                before = model.version()
                await asyncio.sleep(0)
                await asyncio.to_thread(model)
                if model.version() != before:
                    raise TornRead
            model()
            await asyncio.sleep(0)

    applied = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(3) as pool:
        readers = [loop.run_in_executor(pool, read) for read in (forwards, forwards, held_method)]
        tasks = [asyncio.create_task(task()) for _ in range(2)]
        try:
            for version in range(1, updates + 1):
                gate.offer(
                    lambda v=version: model.write(v, yielding),
                    lambda error, v=version: loop.call_soon_threadsafe(applied.put_nowait, v),
                )
                assert await asyncio.wait_for(applied.get(), LONG) == version
        finally:
            stop.set()
            results = await asyncio.gather(*readers, *tasks, return_exceptions=True)
            gate.detach()
            await loop.shutdown_default_executor()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert gate.readers == 0
    return model()


async def test_no_forward_is_torn_under_load() -> None:
    assert await stress(Gate(patience=LONG), 300) == 300


async def test_under_load_the_oracle_finds_a_gate_that_applies_at_once() -> None:
    with pytest.raises(TornRead):
        await stress(ApplyAtOnce(patience=LONG), 300)
