"""Blocking calls where an event loop runs in the same thread, as in a notebook: they work, and never deadlock."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import uvloop

from asyncsync.sync import ClosedError, NotConnected
from helpers.blocking_crew import crew, idle, in_threads, new_receiver, new_sender
from helpers.processes import Filled, value_of


def everything(sender: Any, receiver: Any) -> None:
    """Every method, from connect to shutdown, in this thread; only the two connects need one more."""
    with pytest.raises(NotConnected):
        sender.connect(timeout=0)
    with pytest.raises(NotConnected):
        receiver.connect(timeout=0)
    other = threading.Thread(target=receiver.connect)
    other.start()
    sender.connect()
    other.join()
    sender.send(sender.model.fill(2))
    assert receiver.model.value == 2
    assert value_of(receiver.receive()) == 2
    assert receiver.receive(0) is None
    version = sender.publish(sender.model.fill(3))
    sender.wait_version(version)
    receiver.wait_version(version)
    assert value_of(receiver.fetch()) == 3
    with receiver.hold():
        assert receiver.model() == (3, 3)
    assert value_of(receiver.weights) == value_of(sender.weights) == 3
    assert sender.status()[0].version == receiver.status()[0].version == version
    assert sender.bus.send({"policy": sender.model.fill(4)}) is None
    assert receiver.model.value == 4
    assert [t.name for t in threading.enumerate()].count("asyncsync-loop") == 1
    sender.shutdown()
    sender.shutdown()
    assert value_of(receiver.receive()) == 4
    with pytest.raises(ClosedError):
        receiver.receive()
    receiver.shutdown()
    receiver.shutdown()
    with pytest.raises(ClosedError):
        receiver.receive()
    assert idle()


@pytest.mark.requirement(201)
@pytest.mark.both_loops
async def test_every_method_in_a_coroutine() -> None:
    sender = new_sender(1000, num_workers=1)
    everything(sender, new_receiver(sender))


@pytest.mark.requirement(201)
@pytest.mark.both_loops
async def test_every_method_in_a_callback() -> None:
    loop = asyncio.get_running_loop()
    sender = new_sender(1000, num_workers=1)
    done: asyncio.Future[None] = loop.create_future()

    def callback() -> None:
        try:
            done.set_result(everything(sender, new_receiver(sender)))
        except BaseException as error:
            done.set_exception(error)

    loop.call_soon(callback)
    await done


@pytest.mark.requirement(72)
@pytest.mark.both_loops
async def test_send_async_returns_the_version_when_it_is_applied() -> None:
    with crew(workers=2) as (sender, receivers):
        for i in range(20):
            version = await sender.send_async(sender.model.fill(i + 2))
            assert version == sender.version
            assert {r.version for r in receivers} == {version}
            assert {r.model.value for r in receivers} == {i + 2}


@pytest.mark.requirement(192)
@pytest.mark.both_loops
async def test_send_async_cancelled_at_any_moment_leaves_the_scheme_usable() -> None:
    with crew(5 << 18) as (sender, [receiver]):
        outcomes = set()
        for i in range(40):
            task = asyncio.create_task(sender.send_async(sender.model.fill(2 * i)))
            await asyncio.sleep(0.0005 * i)
            task.cancel()
            try:
                await task
                outcomes.add("sent")
            except asyncio.CancelledError:
                outcomes.add("cancelled")
            sender.model.fill(-7)  # nothing reads it any more
            try:
                async with asyncio.timeout(0):
                    await sender.send_async()
            except TimeoutError:
                outcomes.add("timeout")
            version = await sender.send_async(sender.model.fill(2 * i + 1))
            assert (receiver.version, receiver.model.value) == (version, 2 * i + 1)
        assert {"cancelled", "timeout"} <= outcomes


@pytest.mark.requirement(201)
@pytest.mark.both_loops
async def test_the_callers_loop_goes_on_while_it_awaits() -> None:
    with crew() as (sender, [receiver]), receiver.hold():
        task = asyncio.create_task(sender.send_async(sender.model.fill(2)))
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.requirement(201)
def test_send_async_of_two_loops_in_two_threads_at_once() -> None:
    with crew(workers=2) as (sender, receivers):
        taken: list[int] = []

        async def send(weights: Filled) -> None:
            for i in range(50):
                versions = await asyncio.gather(*(sender.send_async(weights.fill(i + 2)) for _ in range(2)))
                taken.extend(versions)
                assert min(r.version for r in receivers) >= max(versions)

        in_threads(lambda: asyncio.run(send(Filled(1000))), lambda: uvloop.run(send(Filled(1000))))
        assert sorted(taken) == list(range(min(taken), max(taken) + 1))
        assert {r.model.value for r in receivers} == {51}
