"""What receives from a user's blocking transport: see tests/schemes/test_users_transports.py."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.bus.link import INLINE_BYTES
from asyncsync.transports import channels
from asyncsync.transports.channels import TAG, ChannelReceiver
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool, pack
from asyncsync.weights.tree import flatten
from helpers.apis import ASYNCIO, in_thread
from helpers.channels import Board, BoardScheme, BoardTransport, Line, board
from helpers.pairs import Clock, Model, read, until


@pytest.fixture
def named() -> Iterator[tuple[str, Board]]:
    with board() as found:
        yield found


def slab_of(value: float, width: int = 64) -> Slab:
    flat = flatten(TensorDict.from_module(Model(value, width)))
    layout = Layout.of(flat)
    slab = SlabPool().acquire(layout)
    pack(slab, flat)
    return slab


def message(slab: Slab, descriptor: bytes) -> dict[str, Any]:
    weights = slab.weights()
    weights.set(TAG, torch.tensor(list(descriptor), dtype=torch.uint8))
    return dict(weights.flatten_keys(".").items())


@contextlib.asynccontextmanager
async def receiving(line: Line) -> AsyncIterator[ChannelReceiver]:
    receiver = ChannelReceiver(BoardTransport(line))
    receiver.start_channel(0)
    await receiver.channel_ready(5)
    try:
        yield receiver
    finally:
        await receiver.close_within(1)


ONE = bytes(16)


TWO = bytes(range(16))


LARGE = INLINE_BYTES // 4  # elements of four bytes: the weights are more than what is copied on the loop


@pytest.mark.requirement(214)
async def test_weights_that_overtake_their_instruction_are_kept(named: tuple[str, Board]) -> None:
    _, lines = named
    loop = asyncio.get_running_loop()
    async with receiving(lines[0]) as receiver:
        first, second = slab_of(-1), slab_of(-1)
        waiting = asyncio.create_task(receiver.fetch_slab(ONE, first, loop.time() + 20))
        lines[0].messages.put(message(slab_of(2), TWO))
        await until(lambda: lines[0].received == [2])
        with Clock(1.0):
            await receiver.fetch_slab(TWO, second, loop.time() + 20)
        assert [read(first.weights()), read(second.weights())] == [{-1}, {2}]
        with pytest.raises(TimeoutError, match="a newer update"):
            await waiting


@pytest.mark.requirement(214)
async def test_a_fetch_that_begins_as_a_message_comes_gets_it(
    named: tuple[str, Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lines = named
    loop, calls = asyncio.get_running_loop(), list[asyncio.Future[Any]]()
    async with receiving(lines[0]) as receiver:

        def submit(function: object) -> asyncio.Future[Any]:
            calls.append(loop.create_future())
            return calls[-1]

        first, second = slab_of(-1), slab_of(-1)
        with monkeypatch.context() as patched:
            patched.setattr(receiver._thread, "submit", submit)
            waiting = asyncio.create_task(receiver.fetch_slab(ONE, first, loop.time() + 20))
            await until(lambda: calls)
            calls[0].set_result(message(slab_of(2), TWO))
            # This begins before the loop has called anybody back who waits for that result.
            await receiver.fetch_slab(TWO, second, loop.time() + 5)
        assert len(calls) == 1
        assert read(second.weights()) == {2}
        with pytest.raises(TimeoutError, match="a newer update"):
            await waiting


@pytest.mark.requirement(192)
async def test_a_fetch_that_is_cancelled_while_its_slab_is_written_waits_for_that(
    named: tuple[str, Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lines = named
    writing, go_on = threading.Event(), threading.Event()
    original = channels.copy_tensors

    def slowly(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        writing.set()
        assert go_on.wait(20)
        original(destinations, sources)

    monkeypatch.setattr(channels, "copy_tensors", slowly)
    async with receiving(lines[0]) as receiver:
        slab = slab_of(-1, LARGE)
        lines[0].messages.put(message(slab_of(1, LARGE), ONE))
        fetching = asyncio.create_task(receiver.fetch_slab(ONE, slab, asyncio.get_running_loop().time() + 20))
        await in_thread(writing.wait, 5)
        for _ in range(3):
            fetching.cancel()
            await asyncio.sleep(0.01)
            assert not fetching.done(), "the slab must not be given back yet"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert read(slab.weights()) == {1}


@pytest.mark.requirement(214)
async def test_an_interrupted_fetch_loses_no_message(named: tuple[str, Board]) -> None:
    """A reconnection, as the loop sees it: what the abandoned call still brings is what is asked for next."""
    name, lines = named
    async with ASYNCIO.crew(1, scheme=BoardScheme(name), source=Model(0)) as everybody:
        [receiver] = everybody.receivers
        link = receiver.bus.link
        lines[0].can_receive.clear()
        await everybody.sender.publish(Model(1))
        await in_thread(lines[0].receiving.wait, 5)
        link.machine.connected(link.loop.time())  # HELLO again: everything under way is dropped
        link.act_on_changes()
        await until(lambda: len(lines[0].sent) == 3)
        lines[0].can_receive.set()
        await everybody.sender.wait_version(2, timeout=5)
        assert everybody.read == [{1}]
