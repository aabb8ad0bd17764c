"""``Staleness``: work is admitted only where a receiver is not too far behind."""

import asyncio
from typing import Any

import pytest

from asyncsync import AckTimeout, ZMQWeightSyncScheme, sync
from asyncsync.engines import Staleness
from asyncsync.errors import Stale
from helpers.pairs import Clock, Model, crew, held, until
from helpers.processes import Schemes, Start, Trainer

pytestmark = pytest.mark.requirement(245)


async def test_it_waits_until_this_receiver_is_near_enough() -> None:
    async with crew(1) as (sender, [receiver], _):
        staleness = Staleness(receiver, max_lag=1, timeout=10)
        async with staleness as version:
            assert version == 1
        with held(receiver):
            await sender.publish(Model(2))
            async with staleness as version:
                assert version == 1, "one behind is near enough"
            await sender.publish(Model(3))
            entered = asyncio.Event()

            async def work() -> int:
                async with staleness as version:
                    entered.set()
                    return version

            working = [asyncio.create_task(work()) for _ in range(3)]
            await asyncio.sleep(0.1)
            assert not entered.is_set()
            with pytest.raises(AckTimeout, match="more than 1 versions behind"):
                async with Staleness(receiver, max_lag=1, timeout=0.2):
                    pytest.fail("it was admitted")
        assert await asyncio.gather(*working) == [3, 3, 3]
        working[0] = asyncio.create_task(work())
        await working[0]


async def test_it_asks_the_sender_each_time_or_as_often_as_it_is_told() -> None:
    """What this receiver has not heard of yet counts, too."""
    async with crew(1) as (sender, [receiver], _):
        strict, brief, lenient = (Staleness(receiver, max_lag=0, max_age=seconds) for seconds in (0.0, 0.05, 600.0))
        for value in range(20):
            await sender.publish(Model(value))
            async with strict as version:
                assert version == sender.version
        async with brief, lenient as version:
            assert version == sender.version
        with held(receiver):
            newest = await sender.publish(Model(9))
            async with asyncio.timeout(10), lenient as version:
                assert version == newest - 1, "what it was told before still counts"
            await asyncio.sleep(0.1)
            waiting = [asyncio.create_task(one.__aenter__()) for one in (strict, brief)]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in waiting), "they have asked"
        assert await asyncio.gather(*waiting) == [newest, newest]


async def test_it_raises_at_once_where_it_is_told_to() -> None:
    async with crew(1) as (sender, [receiver], _):
        staleness = Staleness(receiver, max_lag=1, on_late="raise", timeout=5)
        with held(receiver):
            for value in (2, 3):
                async with staleness as version:
                    assert version == 1
                await sender.publish(Model(value))
            with Clock(0.5), pytest.raises(Stale, match="2 versions behind") as caught:
                async with staleness:
                    pytest.fail("it was admitted")
            assert (caught.value.version, caught.value.lag) == (1, 2)
        await sender.wait_version(3, timeout=5)
        async with staleness as version:
            assert version == 3


async def test_without_a_sender_nothing_is_known(endpoint: str, schemes: Schemes, start: Start) -> None:
    plan = schemes.sender(1000, endpoint=endpoint, num_workers=1)
    here, trainer = schemes.receiver(plan), start(Trainer)
    await asyncio.gather(trainer.connect(plan, 1000, 1), here.connect())
    async with Staleness(here, on_late="raise") as version:
        assert version == 1
    await trainer.kill()
    await until(lambda: here.status()[0].state == "lost")
    with Clock(0.5), pytest.raises(Stale, match="may be too old") as caught:
        async with Staleness(here, on_late="raise", timeout=20):
            pytest.fail("it was admitted")
    assert (caught.value.version, caught.value.lag) == (1, None)
    with pytest.raises(AckTimeout):
        async with Staleness(here, timeout=0.2):
            pytest.fail("it was admitted")
    second = start(Trainer)
    await asyncio.gather(second.connect(plan, 1000, 2), here.wait_version(1, timeout=20))
    async with Staleness(here, max_lag=0, timeout=20):
        assert here.model.value == 2


async def test_wrong_arguments_are_refused() -> None:
    scheme = ZMQWeightSyncScheme()
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (sync.ZMQWeightSyncScheme(), {}, TypeError, "aio"),
        (scheme, {"max_lag": -1}, ValueError, "max_lag"),
        (scheme, {"on_late": "drop"}, ValueError, "on_late"),
        (scheme, {"timeout": None}, TypeError, "timeout"),
        (scheme, {"max_age": -1}, ValueError, "max_age"),
    ]
    for given, more, error, match in wrong:
        with pytest.raises(error, match=match):
            Staleness(given, **more)
