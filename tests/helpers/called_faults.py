"""More of the cases of :mod:`helpers.called_workers`, those of faults: torn reads, processes that are killed in the
middle of a transfer, workers that are late; and what a sender can send to whom."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest

import asyncsync
from helpers.apis import Api, bare
from helpers.called_workers import PROMPT, SMALL, Lab, Worker, case
from helpers.processes import LARGE, Filled, eventually

AMID = 16 << 20  # float32 elements, 64 MiB: more than sockets hold
VERSIONS = 30


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


@case
async def no_hold_is_torn_while_calls_apply_at_full_speed(lab: Lab, api: Api) -> None:
    await read_under_fire(lab, api, LARGE, held=True)


@case
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
        pool = crew.sender.bus._link.pool
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
