"""Links: what waits for a condition of one that has nobody at its other end, and what is left of one that failed."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from asyncsync import ZMQWeightSyncScheme
from asyncsync.bus.link import Link
from asyncsync.errors import ClosedError, WeightSyncError
from helpers.apis import Api, bare
from helpers.pairs import Model


class Still(Link):
    def _tick(self, now: float) -> None: ...

    def act_on_changes(self) -> None: ...

    async def shutdown(self) -> None:
        if not self.closed:
            self.closed = True
            await self._terminate()

    def _closing_steps(self, linger_ms: int) -> list[Callable[[], object]]:
        return []


@pytest.fixture
async def link() -> AsyncIterator[Still]:
    link = Still("asyncsync-test")
    yield link
    await link.shutdown()


async def test_a_waiter_goes_on_waiting_if_what_woke_it_is_over_before_its_turn(link: Still) -> None:
    held = False
    waiting = asyncio.create_task(link.wait(lambda: held, 10))
    await asyncio.sleep(0)
    held = True
    link.notify()
    held = False  # by the next message of the same burst
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    held = True
    link.notify()
    assert await waiting is True


async def test_what_a_condition_raises_is_its_waiters_affair_alone(link: Still) -> None:
    broken = held = False

    def ask() -> bool:
        if broken:
            raise LookupError("fenced")
        return False

    failing = asyncio.create_task(link.wait(ask, 10))
    other = asyncio.create_task(link.wait(lambda: held, 10))
    await asyncio.sleep(0)
    broken = held = True
    link.notify()
    with pytest.raises(LookupError):
        await failing
    assert await other is True


async def test_what_holds_already_is_not_waited_for_and_what_does_not_hold_in_time_leaves_nothing(link: Still) -> None:
    assert await link.wait(lambda: True, 10) is True
    assert await link.wait(lambda: True, 0) is True
    assert await link.wait(lambda: False, 0) is False
    assert await link.wait(lambda: False, 0.01) is False
    assert not link.waiters


async def test_a_wait_that_is_cancelled_leaves_nothing(link: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args: timers.append(call_at(*args)) or timers[-1])
    waiting = asyncio.create_task(link.wait(lambda: False, 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(timers) == 1
    assert timers[0].cancelled()
    assert not link.waiters


async def test_nobody_waits_for_a_link_that_ends_or_fails_unless_the_condition_holds_by_then(link: Still) -> None:
    done = False
    others = [asyncio.create_task(link.wait(lambda: False, 60)), asyncio.create_task(link.wait(lambda: done, 60))]
    await asyncio.sleep(0)
    done = True
    link.crash(LookupError("a bug"))
    with pytest.raises(WeightSyncError, match="a bug"):
        await others[0]
    assert await others[1] is True
    await link.shutdown()
    with pytest.raises(ClosedError):
        await link.wait(lambda: True, 60)


# -- the sender's ------------------------------------------------------------------------------------------------------


async def test_a_connect_that_fails_after_its_socket_was_watched_leaves_no_reader_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []

    def watch(self: Any, descriptor: int, *args: Any) -> None:
        watched.append(descriptor)
        add_reader(self, descriptor, *args)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOBUFS, "no side channel")

    loop = asyncio.get_running_loop()
    add_reader = type(loop).add_reader
    monkeypatch.setattr(type(loop), "add_reader", watch)
    monkeypatch.setattr("asyncsync.bus.trainer.SideChannels", fail)
    async with ZMQWeightSyncScheme(endpoint=f"ipc://{tmp_path}/bus") as scheme:
        scheme.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        with pytest.raises(OSError, match="no side channel"):
            await scheme.connect(timeout=5)
        assert watched
        assert not any(map(loop.remove_reader, watched))
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "asks"),
    [({}, False), ({"compress": "zstd"}, True), ({"delta": True}, True), ({"fanout": True}, True)],
    ids=["as it is", "compressed", "as a difference", "to all at once"],
)
async def test_half_a_mib_comes_unasked_where_it_comes_as_it_is(
    api: Api, options: dict[str, Any], asks: bool, unused_tcp_port: int
) -> None:
    source, model = nn.Linear(1 << 17, 1, bias=False), nn.Linear(1 << 17, 1, bias=False)
    bus = api.bus(f"tcp://127.0.0.1:{unused_tcp_port}", num_workers=1, **options)
    async with api.crew(1, scheme=api.scheme(bus=bus), source=source, models=[model]) as everybody:
        machine = bare(everybody.sender).bus.link.machine
        fetched, handle = [], machine._on_fetch
        machine._on_fetch = lambda *given: (fetched.append(given), handle(*given))
        nn.init.ones_(source.weight)
        await everybody.sender.send_async(source)
        assert bool(fetched) is asks
        assert bool((model.weight == 1).all())
