"""The blocking API's loop thread: it lives while somebody needs it, and no exception that strikes a caller harms it."""

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncsync.runtime import threads
from asyncsync.runtime.threads import is_loop_thread, keep_loop_running, run_on_loop, run_on_loop_async
from helpers.blocking_interrupts import Strike, sigint_raises, strike_everywhere
from helpers.memory import descriptors

pytestmark = pytest.mark.requirement(201)

NAME = "asyncsync-loop"


class Bus:
    """What keeps the thread going."""

    async def _shutdown(self, timeout: float) -> None:
        keep_loop_running(self._shutdown, False)

    def open(self) -> None:
        run_on_loop(self._keep)

    def close(self) -> None:
        run_on_loop(lambda: self._shutdown(1.0))

    async def _keep(self) -> None:
        keep_loop_running(self._shutdown, True)


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


def soon(count: int, timeout: float = 5.0) -> bool:
    """Whether there are so many of these threads, once those that are about to end have ended."""
    deadline = time.monotonic() + timeout
    while len(alive()) > count and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(alive()) == count


async def answer(value: Any = 42) -> Any:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    raise LookupError("of the coroutine's")


class Patient:
    """A coroutine function that takes its time to clean up when it is cancelled.

    Attributes:
        begun, cancelled, cleaned: set when it comes there.
        clean: to be set for the clean-up to end.
    """

    def __init__(self) -> None:
        self.begun, self.cancelled, self.cleaned = threading.Event(), threading.Event(), threading.Event()
        self.clean = threading.Event()

    async def __call__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        try:
            self.begun.set()
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.set()
            while not self.clean.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.0005)
            self.cleaned.set()


def blocked(patient: Patient) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits for the patient, and what is raised there."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            run_on_loop(patient)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert patient.begun.wait(5)
    return thread, raised


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def run_with_ctrl_c(patient: Patient, *cleaning_up: Callable[[], object]) -> None:
    """Ctrl-C when it has begun; what is to be done while it cleans up."""

    def interrupt() -> None:
        assert patient.begun.wait(5)
        ctrl_c()
        assert patient.cancelled.wait(5)
        for deed in cleaning_up:
            deed()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with sigint_raises(), pytest.raises(KeyboardInterrupt):
        run_on_loop(patient)
    thread.join()


# -- its life ---------------------------------------------------------------------------------------------------------


def test_it_starts_with_the_first_call_and_ends_with_the_last_open_bus() -> None:
    before = descriptors()
    for _ in range(3):
        assert alive() == []
        first, second = Bus(), Bus()
        first.open()
        assert alive() == [NAME]
        second.open()
        first.close()
        assert run_on_loop(answer) == 42
        assert alive() == [NAME]
        second.close()
        assert alive() == []
        assert descriptors() == before


def test_without_an_open_bus_it_ends_with_the_call() -> None:
    before = descriptors()
    assert run_on_loop(answer) == 42
    assert alive() == []
    with pytest.raises(LookupError):
        run_on_loop(fail)
    assert (alive(), descriptors()) == ([], before)


def test_it_ends_with_the_last_of_several_calls() -> None:
    patient = Patient()
    patient.clean.set()

    async def cancel() -> None:
        patient.task.cancel()

    thread, raised = blocked(patient)
    assert run_on_loop(answer) == 42
    assert alive() == [NAME]
    run_on_loop(cancel)
    thread.join(5)
    assert isinstance(raised.pop(), asyncio.CancelledError)
    assert alive() == []


@pytest.mark.thorough
@pytest.mark.timeout(60)
def test_threads_racing_through_its_start_and_its_end() -> None:
    """Each call may find it running, ending, ended or starting."""

    def race(seed: int) -> None:
        chance = random.Random(seed)
        for i in range(3000):
            kind = chance.randrange(4)
            if kind == 0:
                bus = Bus()
                bus.open()
                bus.close()
            elif kind == 1:
                with pytest.raises(LookupError):
                    run_on_loop(fail)
            elif kind == 2:
                assert asyncio.run(run_on_loop_async(lambda: answer(i))) == i  # noqa: B023
            else:
                assert run_on_loop(lambda: answer(i)) == i  # noqa: B023

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(race, range(2)))
    assert soon(0)  # `run_async` does not wait for its end


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("threading.Thread.start", RuntimeError("can't start new thread")),
        ("asyncio.new_event_loop", OSError("too many")),
    ],
)
def test_if_it_cannot_start_the_call_says_so_and_the_next_one_works(
    what: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise error

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(what, refuse)
        with pytest.raises(type(error), match=str(error)):
            run_on_loop(answer)
    assert descriptors() == before
    assert run_on_loop(answer) == 42
    assert alive() == []


def test_what_the_coroutine_raises_is_raised_and_keeps_nothing_alive() -> None:
    import gc
    import weakref

    class Large:
        pass

    def caller() -> weakref.ref[Large]:
        large = Large()
        with pytest.raises(LookupError):
            run_on_loop(fail)
        return weakref.ref(large)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


# -- calls from its own thread ----------------------------------------------------------------------------------------


def test_a_blocking_call_on_its_own_thread_is_refused() -> None:
    async def inner() -> Any:
        assert is_loop_thread()
        with pytest.raises(RuntimeError, match="would wait for itself"):
            run_on_loop(answer)
        return await run_on_loop_async(answer)

    assert not is_loop_thread()
    assert run_on_loop(inner) == 42
    assert not is_loop_thread()


# -- interrupts -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["it must be started", "it runs"])
def busy(request: pytest.FixtureRequest) -> Iterator[bool]:
    keeper = Bus()
    if request.param:
        keeper.open()
    yield request.param
    if request.param:
        keeper.close()


@pytest.mark.requirement(192)
@pytest.mark.parametrize("kind", ["answer", "fail", "open and close"])
def test_a_caller_struck_at_any_moment_leaves_it_usable(busy: bool, kind: str) -> None:
    before = descriptors()
    bus = Bus()
    calls: dict[str, Callable[[], Any]] = {
        "answer": lambda: run_on_loop(answer),
        "fail": lambda: run_on_loop(fail),
        "open and close": lambda: (bus.open(), bus.close()),
    }

    def strike() -> None:
        raise Strike

    places = 0
    for places, _, raised in strike_everywhere([threads], calls[kind], strike):
        assert raised is None or isinstance(raised, Strike | LookupError), repr(raised)
        assert run_on_loop(answer) == 42
        bus.close()
        # A caller that was struck where it waits for the thread's end has not waited.
        assert soon(1 if busy else 0), places
    assert places > 15
    assert descriptors() == before


def test_a_signal_handler_that_calls_it_at_any_moment_gets_its_answer(busy: bool) -> None:
    answers = []
    for k, result, raised in strike_everywhere(
        [threads],
        lambda: run_on_loop(answer),
        lambda: answers.append(run_on_loop(lambda: answer("handler's"))),
    ):
        assert (result, raised) == (42, None), k
        assert alive() == ([NAME] if busy else [])
    assert set(answers) == {"handler's"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it ends with the thread
@pytest.mark.usefixtures("busy")
def test_a_call_that_ends_the_loop_keeps_no_later_one_waiting() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    patient = Patient()
    other, raised = blocked(patient)
    with pytest.raises(SystemExit):
        run_on_loop(leave)
    assert patient.cancelled.wait(5)  # the ended loop cleans up, which takes time
    assert run_on_loop(loop) is not patient.task.get_loop()
    patient.clean.set()
    other.join(5)
    assert [type(error) for error in raised] == [asyncio.CancelledError]
    assert run_on_loop(answer) == 42


@pytest.mark.requirement(192)
def test_ctrl_c_waits_for_the_clean_up() -> None:
    patient = Patient()
    run_with_ctrl_c(patient, patient.clean.set)
    assert patient.cleaned.is_set()
    assert alive() == []


@pytest.mark.requirement(192)
def test_a_second_ctrl_c_during_the_clean_up_ends_at_once_and_the_clean_up_goes_on() -> None:
    patient = Patient()
    begin = time.monotonic()
    run_with_ctrl_c(patient, ctrl_c)
    assert time.monotonic() - begin < 2  # and not CLEANUP_SECONDS
    assert not patient.cleaned.is_set()
    assert run_on_loop(answer) == 42
    assert alive() == [NAME]  # the call has not ended
    patient.clean.set()
    assert patient.cleaned.wait(5)


@pytest.mark.requirement(192)
def test_a_clean_up_that_takes_too_long_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "CLEANUP_SECONDS", 0.05)
    patient = Patient()
    run_with_ctrl_c(patient)
    assert "still running" in caplog.text
    patient.clean.set()
    assert patient.cleaned.wait(5)


# -- coroutines of other loops ----------------------------------------------------------------------------------------


@pytest.mark.requirement(192)
@pytest.mark.both_loops
async def test_a_cancelled_awaitable_raises_when_the_clean_up_is_over() -> None:
    patient = Patient()
    task = asyncio.create_task(run_on_loop_async(patient))
    assert await asyncio.to_thread(patient.begun.wait, 5)
    for _ in range(3):  # once would do; further ones change nothing
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    assert await asyncio.to_thread(patient.cancelled.wait, 5)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    patient.clean.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert patient.cleaned.is_set()
    with pytest.raises(LookupError):
        await run_on_loop_async(fail)
    assert await run_on_loop_async(answer) == 42


@pytest.mark.requirement(192)
@pytest.mark.both_loops
async def test_an_awaitable_is_cancelled_at_any_await_and_in_the_tick_of_its_result() -> None:
    async def steps() -> int:
        for _ in range(5):
            await asyncio.sleep(0)
        return 7

    outcomes = set()
    for k in range(60):
        task = asyncio.create_task(run_on_loop_async(steps))
        for _ in range(k % 12):
            await asyncio.sleep(0)
        if k >= 40:
            await asyncio.sleep(0.0001 * (k - 40))
        task.cancel()
        try:
            outcomes.add(await task)
        except asyncio.CancelledError:
            outcomes.add("cancelled")
        assert await run_on_loop_async(steps) == 7
    assert "cancelled" in outcomes
