"""Workers that are called remotely: Ray's actors and RPC's objects, by one set of cases.

A family's program (:mod:`helpers.ray_program`, :mod:`helpers.rpc_program`) starts what it needs, which takes seconds,
and runs many cases there, each with both APIs on the sender's side. A test asks for the outcome of one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import asyncsync
import asyncsync.sync
from helpers.apis import Api, bare, in_thread
from helpers.processes import LARGE, Filled, eventually, value_of
from helpers.stalls import longest_stall

SMALL = 8
AMID = 16 << 20  # float32 elements, 64 MiB: more than sockets hold
VERSIONS = 30
PROMPT = 5.0  # seconds in which the loss of a worker is to be known
PROGRAM_SECONDS = 900.0
PROGRAM = "ASYNCSYNC_TEST_PROGRAM"  # in the environment of a program, and of all that it starts: its pid


class Worker:
    """The object of a worker, as users write it: with a blocking scheme."""

    def __init__(self, scheme: Any, index: int, numel: int, **options: Any) -> None:
        torch.set_num_threads(1)
        self.scheme = scheme
        self.model = Filled(numel, -1.0)
        self.calls = 0
        self.received: Any = None
        self.failing = ""
        scheme.init_on_receiver("policy", model=self.model, worker_idx=index, **options)

    def connect(self) -> None:
        self.scheme.connect()

    def _receive_weights_scheme(self) -> None:
        self.calls += 1
        if self.failing:
            raise ArithmeticError(self.failing)
        self.received = self.scheme.receive()

    def fail(self, why: str) -> None:
        self.failing = why

    def state(self) -> dict[str, Any]:
        """What the test looks at."""
        received = None if self.received is None else value_of(self.received)
        own = {"calls": self.calls, "value": self.model.value, "received": received}
        return {**own, "version": self.scheme.version, "pid": os.getpid()}

    def version(self) -> int:
        return self.scheme.version

    def wait(self, timeout: float | None) -> float | None:
        """What a ``receive_weights`` of the transport's returns."""
        weights = self.scheme.receiver_transport.receive_weights(timeout)
        return None if weights is None else value_of(weights)

    def take(self, timeout: float) -> list[float]:
        """What a ``receive_weights`` of the transport's fills, applies, and leaves alone."""
        before = dict(vars(self.scheme.receiver_transport))
        found = self._fill(self.scheme.receiver_transport.receive_weights, timeout=timeout)
        assert vars(self.scheme.receiver_transport) == before
        return found

    def set_up(self, index: int) -> list[float] | None:
        """The same of the transport's half of ``connect``."""
        return self._fill(self.scheme.receiver_transport.setup_connection_and_weights_on_receiver, worker_idx=index)

    def _fill(self, method: Callable[..., Any], **given: Any) -> list[float] | None:
        buffer, other = Filled(SMALL, -2.0).state_dict(), Filled(SMALL, -3.0)
        if (returned := method(weights=buffer, model=other, strategy="state_dict", **given)) is None:
            return None
        assert returned is buffer
        return [value_of(buffer), other.value, self.model.value]

    def fetch(self) -> float | None:
        """Pull, without a call of the sender's."""
        weights = self.scheme.fetch(timeout=20.0)
        return None if weights is None else value_of(weights)

    def spoil(self) -> None:
        """What was received is the caller's own."""
        for leaf in self.received.values(True, True):
            leaf.fill_(-5.0)

    def shutdown(self) -> None:
        self.scheme.shutdown()


class Lab:
    """How one family starts workers, each in a process of its own, calls and ends them: ``start(kind, place, *args)``,
    ``await call(worker, method, *args)``, ``end(worker)``.

    ``kind``: of its schemes; ``connects``: its ``connect`` brings the initial weights.
    """

    kind: str
    connects: bool
    options: dict[str, Any]

    def crew(
        self, api: Api, numel: int = SMALL, count: int = 2, *, kind: type[Worker] = Worker, **options: Any
    ) -> Crew:
        return Crew(self, api, numel, count, kind, options)


class Crew:
    """A connected sender, and its workers: ``async with lab.crew(api) as crew``."""

    def __init__(self, lab: Lab, api: Api, numel: int, count: int, kind: type[Worker], options: dict[str, Any]) -> None:
        self.lab, self.model = lab, Filled(numel, 1.0)
        self.sender = api.scheme(**lab.options)
        blocking = bare(self.sender).blocking
        self.workers = [lab.start(kind, i, blocking, i, numel, **options) for i in range(count)]
        self.sender.init_on_sender(model_id="policy", model=self.model, remotes=self.workers)

    async def __aenter__(self) -> Crew:
        both = asyncio.gather(*(self.call(i, "connect") for i in range(len(self.workers))))
        await asyncio.gather(self.sender.connect(timeout=50), both)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.sender.shutdown()
        for worker in self.workers:
            self.lab.end(worker)

    async def call(self, index: int, method: str, *args: Any) -> Any:
        return await self.lab.call(self.workers[index], method, *args)

    async def send(self, value: float, *args: Any, **kwargs: Any) -> int:
        self.model.fill(value)
        return await self.sender.send_async(*args, **kwargs)

    async def publish(self, value: float) -> int:
        return await self.sender.publish(self.model.fill(value))

    async def fails(self, worker: int, value: float, **options: Any) -> BaseException:
        """Send, which fails for one of two workers: why."""
        with pytest.raises(asyncsync.PartialSendError) as caught:
            await self.send(value, **options)
        assert caught.value.acked.keys() == {1 - worker}
        return caught.value.failed[worker]

    async def states(self, what: str) -> list[Any]:
        return [(await self.call(i, "state"))[what] for i in range(len(self.workers))]


Case = Callable[[Lab, Api], Awaitable[None]]
CASES: list[Case] = []


def case(function: Case) -> Case:
    """A case of every family."""
    CASES.append(function)
    return function


@case
async def sends_call_each_worker(lab: Lab, api: Api) -> None:
    for numel in (SMALL, LARGE):
        async with lab.crew(api, numel) as crew:
            assert await crew.states("value") == ([1.0, 1.0] if lab.connects else [-1.0, -1.0])
            assert await crew.states("calls") == [0, 0]
            assert await crew.send(2.0) == (2 if lab.connects else 1)
            await crew.call(0, "spoil")
            assert await crew.states("value") == [2.0, 2.0], "what was received is the caller's own"
            for value in (3.0, 4.0):
                version = await crew.send(value)
                assert await crew.states("received") == [value, value]
            assert await crew.states("calls") == [3, 3]
            assert await crew.states("value") == [4.0, 4.0]
            assert await crew.states("version") == [version, version]


@case
async def transports_and_objects_are_registered_by_init(lab: Lab, api: Api) -> None:
    given: dict[str, Any] = {"model_id": "policy", "model": nn.Linear(1, 1)}
    scheme = api.scheme(**lab.options)
    scheme.init_on_sender(remotes=["one", "two"], **given)
    assert scheme.sender_transports.keys() == {0, 1}
    assert {type(transport) for transport in scheme.sender_transports.values()} == {api.transport_class}
    twin = scheme.aio.blocking if not api.is_blocking else scheme.blocking
    assert scheme.remotes == twin.remotes == {0: "one", 1: "two"}
    scheme = api.scheme(**lab.options)
    with pytest.raises(ValueError, match="remotes"):
        scheme.init_on_sender(**given)
    with pytest.raises(ValueError, match="num_workers=3"):
        scheme.init_on_sender(remotes=["one", "two"], num_workers=3, **given)
    await scheme.shutdown()


@case
async def without_a_call_nothing_is_applied(lab: Lab, api: Api) -> None:
    async with lab.crew(api) as crew:
        await crew.send(2.0)
        await crew.send(3.0, worker_ids=1)
        assert await crew.states("value") == [2.0, 3.0]
        assert await crew.states("calls") == [1, 2]
        uncalled = crew.sender.remotes.pop(1)
        for value, before in ((4.0, 3.0), (5.0, 4.0)):
            await crew.sender.wait_version(await crew.publish(value), 0)
            assert await crew.states("value") == [value, before]
            if value == 4.0:
                assert await crew.call(1, "fetch") == value, "it may pull"
        crew.sender.remotes[1] = uncalled
        await crew.call(1, "_receive_weights_scheme")  # anybody may call it
        assert await crew.states("value") == [5.0, 5.0]
        assert await crew.states("calls") == [3, 3]


@case
async def what_is_staged_calls_nobody_before_the_commit(lab: Lab, api: Api) -> None:
    async with lab.crew(api) as crew:
        await crew.send(2.0)
        version = await crew.sender.stage(crew.model.fill(3.0), worker_ids=[0, 1])
        await crew.sender.wait_staged(version, timeout=20)
        await asyncio.sleep(0.2)  # what must not happen
        assert (await crew.states("calls"), await crew.states("value")) == ([1, 1], [2.0, 2.0])
        await crew.sender.commit(version, timeout=20)
        assert (await crew.states("calls"), await crew.states("value")) == ([2, 2], [3.0, 3.0])


@case
async def whoever_does_not_take_an_update_is_named(lab: Lab, api: Api) -> None:
    async with lab.crew(api) as crew:
        await crew.send(2.0)
        right = crew.sender.remotes[1]
        crew.sender.remotes[1] = crew.sender.remotes[0]
        error = await crew.fails(1, 3.0)
        assert "this object is worker 0, but its sender calls it as worker 1" in str(error)
        crew.sender.remotes[1] = right
        await crew.call(0, "fail", "the sensor is wet")
        error = await crew.fails(0, 4.0)
        assert isinstance(error, asyncsync.RemoteError)
        assert "the sensor is wet" in str(error)
        assert "_receive_weights_scheme" in error.remote_traceback
        await crew.call(0, "fail", "")
        await crew.send(5.0)
        with pytest.raises(asyncsync.PartialSendError) as caught:
            await crew.sender.send_async(Filled(16, 6.0))
        assert all(isinstance(error, asyncsync.SchemaMismatch) for error in caught.value.failed.values())
        assert await crew.states("value") == [5.0, 5.0]
        await crew.send(7.0)
        assert await crew.states("value") == [7.0, 7.0]


@case
async def of_many_publications_the_newest_is_applied(lab: Lab, api: Api) -> None:
    async with lab.crew(api, LARGE) as crew:
        for value in range(2, 12):
            version = await crew.publish(value)
        await crew.sender.wait_version(version)
        assert await crew.states("value") == [11.0, 11.0]
        assert max(await crew.states("calls")) <= 10


async def receive_takes_a_timeout(lab: Lab, api: Api) -> None:
    async with lab.crew(api) as crew:
        await crew.send(2.0)
        begun = time.monotonic()
        assert await crew.call(0, "wait", 0.2) is None
        assert await crew.call(0, "wait", 0) is None
        assert 0.15 < time.monotonic() - begun < 5.0
        waiting = asyncio.ensure_future(crew.call(1, "wait", None if lab.kind == "RPC" else 20.0))
        crew.sender.remotes.pop(1)  # it has its hands full
        await crew.publish(3.0)
        assert await waiting == 3.0


@case
async def transports_get_weights_model_and_strategy_with_each_call(lab: Lab, api: Api) -> None:
    async with lab.crew(api) as crew:
        await crew.send(2.0)
        crew.sender.remotes.clear()
        transport = crew.sender.sender_transports[0]
        before = dict(vars(transport))
        for value in (3.0, 4.0):
            await _run(api, transport.send_weights, Filled(SMALL, value))
            assert await crew.call(0, "take", 20.0) == [value, value, value]
        assert vars(transport) == before
        assert await crew.call(1, "wait", 20.0) == 4.0


@case
async def the_transports_setup_methods_are_the_two_sides_of_connect(lab: Lab, api: Api) -> None:
    crew = lab.crew(api)
    there = asyncio.gather(*(crew.call(i, "set_up", i) for i in (0, 1)))
    here = _run(api, crew.sender.sender_transports[0].setup_connection_and_weights_on_sender)
    nothing, (first, second) = await asyncio.gather(here, there)
    assert nothing is None
    # As the page says, connect() of RPC does nothing.
    assert first == second == ([1.0, 1.0, 1.0] if lab.connects else None)
    async with crew:
        await crew.send(2.0)
        assert await crew.states("value") == [2.0, 2.0]


async def _run(api: Api, method: Callable[..., Any], *args: Any) -> Any:
    return await (in_thread(method, *args) if api.is_blocking else method(*args))


@case
async def a_cancelled_send_loses_nothing(lab: Lab, api: Api) -> None:
    async with lab.crew(api, LARGE) as crew:
        for seconds in (0.0, 0.001, 0.01, 0.03):
            crew.model.fill(9.0)
            sending = asyncio.ensure_future(crew.sender.send_async())
            await asyncio.sleep(seconds)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await crew.send(10.0)
        assert await crew.states("value") == [10.0, 10.0]


async def the_loop_is_not_blocked_by_a_large_update(lab: Lab, api: Api) -> None:
    async with lab.crew(api, 256 << 18, 1) as crew:  # 256 MiB
        await crew.send(2.0)
        crew.model.fill(3.0)
        stall = await longest_stall(crew.sender.send_async)
        assert stall.raw < 0.1, stall


async def a_killed_worker_is_named_and_the_others_go_on(lab: Lab, api: Api) -> None:
    async with lab.crew(api) as crew:
        await crew.send(2.0)
        pid = (await crew.states("pid"))[1]
        os.kill(pid, 9)
        for value in (3.0, 4.0):  # while it is found out, and afterwards
            begun = time.monotonic()
            assert isinstance(await crew.fails(1, value), asyncsync.PeerLost)
            assert time.monotonic() - begun < PROMPT
        await crew.send(5.0, worker_ids=0)
        assert (await crew.call(0, "state"))["value"] == 5.0
        await eventually(lambda: crew.sender.status()[1].state == "lost")


class Reader(Worker):
    """Whose model is read by a thread all the time, while it is called."""

    def begin(self, held: bool) -> None:
        self.found: list[tuple[float, ...]] = []
        self.over = False
        self.thread = threading.Thread(target=self._read, args=(held,), daemon=True)
        self.thread.start()

    def _read(self, held: bool) -> None:
        while not self.over:
            if held:
                with self.scheme.hold():
                    self.found.append((*self.model(), *self.model()))
            else:
                self.found.append(self.model())

    def seen(self) -> int:
        """How many versions."""
        return len({number for numbers in list(self.found) for number in numbers})

    def end(self) -> tuple[int, bool]:
        """How many reads were torn, and whether versions went back."""
        self.over = True
        self.thread.join()
        first = [numbers[0] for numbers in self.found]
        return sum(len(set(numbers)) > 1 for numbers in self.found), first != sorted(first)


async def read_under_fire(lab: Lab, api: Api, numel: int, held: bool, **options: Any) -> None:
    async with lab.crew(api, numel, kind=Reader, **options) as crew:
        await crew.send(2.0)
        for i in range(2):
            await crew.call(i, "begin", held)
        deadline = time.monotonic() + 30.0
        while min([await crew.call(i, "seen") for i in range(2)]) < VERSIONS:
            assert time.monotonic() < deadline
            for _ in range(10):
                await crew.sender.publish(crew.model.fill(crew.sender.version + 10))
                await asyncio.sleep(0)
        assert [await crew.call(i, "end") for i in range(2)] == [(0, False), (0, False)]
        last = await crew.send(1.0)
        assert await crew.states("version") == [last, last]
        assert await crew.states("value") == [1.0, 1.0]


async def no_hold_is_torn_while_calls_apply_at_full_speed(lab: Lab, api: Api) -> None:
    await read_under_fire(lab, api, LARGE, held=True)


async def no_forward_is_torn_while_updates_apply_as_they_come(lab: Lab, api: Api) -> None:
    await read_under_fire(lab, api, LARGE, held=False, apply="auto")
    await read_under_fire(lab, api, 1000, held=False, apply="auto")


@case
async def weights_for_each_worker_are_its_own(lab: Lab, api: Api) -> None:
    for numel in (SMALL, LARGE):
        async with lab.crew(api, numel) as crew:
            await crew.sender.send_async({0: Filled(numel, 5.0), 1: Filled(numel, 6.0)})
            assert await crew.states("value") == [5.0, 6.0]
            assert await crew.states("received") == [5.0, 6.0]
            await crew.sender.send_async({1: Filled(numel, 7.0)}, worker_ids=1)
            assert await crew.states("value") == [5.0, 7.0]
            await crew.send(8.0)
            assert await crew.states("value") == [8.0, 8.0]


class OfTwoModels(Worker):
    """With two schemes of one bus."""

    def __init__(self, schemes: tuple[Any, Any], index: int, numel: int, **options: Any) -> None:
        super().__init__(schemes[0], index, numel, **options)
        self.other = schemes[1]
        self.value = Filled(numel, -1.0)
        self.other.init_on_receiver("value", model=self.value, worker_idx=index, **options)

    def connect(self) -> None:
        thread = threading.Thread(target=self.other.connect)
        thread.start()
        super().connect()
        thread.join()

    def _receive_weights_scheme(self) -> None:
        super()._receive_weights_scheme()
        self.other.receive()

    def both(self) -> tuple[float, float]:
        return self.model.value, self.value.value


@case
async def several_models_are_applied_in_one_call(lab: Lab, api: Api) -> None:
    bus, first, second = api.bus(num_workers=2), Filled(SMALL, 1.0), Filled(SMALL, 1.0)
    schemes = [api.scheme(bus=bus, **lab.options) for _ in range(2)]
    blocking = tuple(bare(scheme).blocking for scheme in schemes)
    workers = [lab.start(OfTwoModels, i, blocking, i, SMALL) for i in range(2)]
    schemes[0].init_on_sender(model_id="policy", model=first, remotes=workers)
    schemes[1].init_on_sender(model_id="value", model=second, remotes=workers)
    connecting = [lab.call(worker, "connect") for worker in workers]
    await asyncio.gather(bus.connect(timeout=50), *connecting)
    for number in (2.0, 3.0):
        await bus.send_async({"policy": first.fill(number), "value": second.fill(10 * number)})
        assert [await lab.call(worker, "both") for worker in workers] == [(number, 10 * number)] * 2
    await schemes[1].send_async(second.fill(7.0), worker_ids=0)
    assert [await lab.call(worker, "both") for worker in workers] == [(3.0, 7.0), (3.0, 30.0)]
    await bus.shutdown()
    for worker in workers:
        lab.end(worker)


class Slow(Worker):
    """Takes its time for a call."""

    seconds = 0.0

    def delay(self, seconds: float) -> None:
        self.seconds = seconds

    def _receive_weights_scheme(self) -> None:
        time.sleep(self.seconds)
        super()._receive_weights_scheme()


@case
async def a_worker_that_is_late_is_named_and_not_lost(lab: Lab, api: Api) -> None:
    async with lab.crew(api, kind=Slow) as crew:
        await crew.send(2.0)
        await crew.call(1, "delay", 1.0)
        begun = time.monotonic()
        assert isinstance(await crew.fails(1, 3.0, timeout=0.3), asyncsync.AckTimeout)
        assert 0.25 < time.monotonic() - begun < 1.0
        await crew.sender.wait_version(crew.sender.version, timeout=30)
        assert await crew.states("value") == [3.0, 3.0]
        waiting = asyncio.ensure_future(crew.sender.wait_version(crew.sender.version + 1, timeout=30))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await crew.call(1, "delay", 0.0)
        await crew.send(4.0)
        assert await crew.states("value") == [4.0, 4.0]


# -- kill -9 ---------------------------------------------------------------------------------------------------------


async def until_version(lab: Lab, worker: Any, version: int) -> None:
    """What the model holds must not be looked at meanwhile."""
    while await lab.call(worker, "version") < version:  # noqa: ASYNC110 - there is no event of another process's
        await asyncio.sleep(0.01)


async def a_worker_killed_amid_a_transfer_is_named_at_once(lab: Lab, api: Api) -> None:
    async with lab.crew(api, AMID) as crew:
        await crew.send(2.0)
        pid = (await crew.states("pid"))[1]
        os.kill(pid, signal.SIGSTOP)  # the transfer begins, and goes as far as the sockets take it
        before = crew.sender.version
        failing = asyncio.ensure_future(crew.fails(1, 3.0))
        await until_version(lab, crew.workers[0], before + 1)
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        error = await failing
        assert time.monotonic() - begun < PROMPT
        assert isinstance(error, asyncsync.PeerLost)
        assert (await crew.call(0, "state"))["value"] == 3.0
        await crew.fails(1, 4.0)
        assert (await crew.call(0, "state"))["value"] == 4.0
        pool = crew.sender.bus.link.pool
        await eventually(lambda: pool.slabs <= 2, why=lambda: f"{pool.slabs} slabs are in use")


class Trainer:
    """A sender in a process that the program can do without."""

    def __init__(self, scheme: Any, numel: int) -> None:
        self.scheme, self.model = scheme, Filled(numel, 1.0)

    def connect(self, remotes: list[Any]) -> int:
        self.scheme.init_on_sender(model_id="policy", model=self.model, remotes=remotes)
        self.scheme.connect(timeout=50)
        return os.getpid()

    def send(self, value: float) -> None:
        self.scheme.send(self.model.fill(value))

    def shutdown(self) -> None:
        self.scheme.shutdown()


async def a_trainer_killed_amid_a_transfer_is_noticed(lab: Lab, api: Api) -> None:
    """Its workers are to be had at once, and have one version or the other; their next trainer finds them so."""
    scheme = bare(api.scheme(**lab.options)).blocking
    workers = [lab.start(Worker, i, scheme, i, AMID) for i in range(2)]
    trainer = lab.start(Trainer, 2, scheme, AMID)
    pid, *_ = await asyncio.gather(lab.call(trainer, "connect", workers), *(lab.call(w, "connect") for w in workers))
    await lab.call(trainer, "send", 2.0)
    first, stopped = await lab.call(workers[0], "state"), (await lab.call(workers[1], "state"))["pid"]
    os.kill(stopped, signal.SIGSTOP)
    sending = asyncio.ensure_future(lab.call(trainer, "send", 3.0))
    await until_version(lab, workers[0], first["version"] + 1)
    os.kill(pid, signal.SIGKILL)
    os.kill(stopped, signal.SIGCONT)
    begun = time.monotonic()
    with pytest.raises(Exception):  # noqa: B017 - the family's own, of a process that is gone
        await sending
    assert [(await lab.call(w, "state"))["value"] for w in workers] in ([3.0, 2.0], [3.0, 3.0])
    assert time.monotonic() - begun < PROMPT
    for worker in workers:
        lab.end(worker)
    lab.end(trainer)
    async with lab.crew(api, LARGE) as crew:
        await crew.send(5.0)
        assert await crew.states("value") == [5.0, 5.0]
        assert crew.model.value == 5.0


# -- workers with coroutines -----------------------------------------------------------------------------------------


async def cancel_waits(scheme: Any) -> None:
    """Of a receiver's coroutines, each that waits, soon after it has begun and somewhat later."""
    for wait in (scheme.receive, scheme.fetch, lambda: scheme.wait_version(scheme.version + 1)):
        for steps in (0, 1, 5):
            task = asyncio.ensure_future(wait())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# -- programs --------------------------------------------------------------------------------------------------------


APIS: tuple[ModuleType, ...] = (asyncsync, asyncsync.sync)
ONCE: tuple[tuple[Case, ModuleType], ...] = (
    (receive_takes_a_timeout, asyncsync.sync),
    (the_loop_is_not_blocked_by_a_large_update, asyncsync),
    (no_hold_is_torn_while_calls_apply_at_full_speed, asyncsync.sync),
    (no_forward_is_torn_while_updates_apply_as_they_come, asyncsync),
)
"""Of every family, too. Their workers are the same with both APIs, and a blocking call has no loop to block."""
Tell = Callable[[str, str, str], None]
"""``tell(case, api, failure)``"""


def run_cases(lab: Lab, cases: Iterable[Case], once: Iterable[tuple[Case, ModuleType]], tell: Tell) -> None:
    """Each case with both APIs; and those once to which the API of the sender makes no difference."""
    for case, module in [*((case, module) for module in APIS for case in cases), *once]:
        failure = ""
        try:
            asyncio.run(asyncio.wait_for(case(lab, Api(module.__name__, module, lab.kind)), 60))
        except BaseException:
            failure = traceback.format_exc()
        tell(case.__name__, module.__name__, failure)


def names(cases: Iterable[Case], once: Iterable[tuple[Case, ModuleType]]) -> list[str]:
    return [case.__name__ for case in (*cases, *dict(once))]


class Outcomes:
    """What a program's cases have come to, by their names and APIs."""

    def __init__(self, program: Callable[[Tell], None]) -> None:
        faulthandler.cancel_dump_traceback_later()  # pytest's: it takes longer than a test
        self._found: dict[str, dict[str, str]] = {}
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_run_program, args=(program, there))
        process.start()
        self.pid = process.pid
        there.close()
        deadline = time.monotonic() + PROGRAM_SECONDS
        try:
            while here.poll(max(0.0, deadline - time.monotonic())):
                name, api, failure = here.recv()
                if not name:
                    break
                self._found.setdefault(name, {})[api] = failure
        except EOFError:
            pass
        finally:
            process.join(20)
            self.ended_by_itself = process.exitcode == 0
            process.kill()
            process.join()
            process.close()
            here.close()

    def check(self, name: str) -> None:
        """Raise if a case has failed, with any API, or has not been run."""
        assert name in self._found, f"not run; run: {self._found}"
        failures = [f"{api}:\n{failure}" for api, failure in self._found[name].items() if failure]
        assert not failures, "\n".join(failures)


def _run_program(program: Callable[[Tell], None], pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ[PROGRAM] = str(os.getpid())
    program(lambda *outcome: pipe.send(outcome))
    pipe.send(("", "", ""))
