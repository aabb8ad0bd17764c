"""Publications that are under way at once get their versions in the order of the calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncsync import AckTimeout, PartialSendError, ZMQWeightSyncScheme
from helpers.pairs import Model, crew


class Slow(ZMQWeightSyncScheme):
    """Takes what it is given when an event of that value is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.may: dict[float, asyncio.Event] = {}

    async def prepare_weights(self, weights: Any, model_id: Any, strategy: Any, context: Any = None) -> Any:
        if weights is not None and (event := self.may.get(weights.last[0].item())) is not None:
            await event.wait()
        return super().prepare_weights(weights, model_id, strategy, context)


@pytest.mark.promise(7)
async def test_a_publication_that_is_prepared_for_long_is_not_overtaken() -> None:
    async with crew(1, scheme=Slow(), source=Model(0)) as (sender, [worker], [model]):
        slow = sender.may[1] = asyncio.Event()
        first = asyncio.create_task(sender.publish(Model(1)))
        await asyncio.sleep(0)
        second = asyncio.create_task(sender.send_async(Model(2)))
        third = asyncio.create_task(sender.publish(Model(3)))
        await asyncio.sleep(0.05)
        assert [task.done() for task in (first, second, third)] == [False] * 3
        slow.set()
        assert (await first, await second, await third) == (2, 3, 4)
        await sender.wait_version(4)
        assert (worker.version, model()) == (4, {3})


async def test_one_that_fails_or_is_cancelled_makes_way_and_one_that_waits_has_a_deadline() -> None:
    async with crew(1, scheme=Slow(), source=Model(0)) as (sender, _, [model]):
        sender.may[1] = asyncio.Event()
        first = asyncio.create_task(sender.publish(Model(1)))
        await asyncio.sleep(0)
        with pytest.raises(PartialSendError) as raised:
            await sender.send_async(Model(2), timeout=0.05)
        assert isinstance(raised.value.failed[0], AckTimeout)
        assert "prepare_weights" in str(raised.value.failed[0])
        assert sender.version == 1
        following = asyncio.create_task(sender.send_async(Model(3)))
        await asyncio.sleep(0)
        first.cancel()
        assert await following == 2
        assert model() == {3}
