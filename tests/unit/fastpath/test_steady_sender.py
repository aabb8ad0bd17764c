"""A sender's fast path (asyncsync/fastpath/sender.py): when it is taken, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

import asyncsync.fastpath.sender as fast_path
from helpers.apis import Api, bare
from helpers.pairs import Crew, fill, held

pytestmark = [pytest.mark.timeout(60), pytest.mark.schemes("copied")]


async def begin(everybody: Crew) -> Any:
    """Some updates; then the fast path is on. The sender's link."""
    link = bare(everybody.sender).bus._link
    for value in (1, 2, 3, 3, 3):  # (a timer may just end it)
        await everybody.sender.send_async(fill(everybody.source, value))
        if value == 3 and link.fast.steady is not None:
            return link
    raise AssertionError("no fast path")


async def test_a_status_is_right_amid_it_and_it_leaves_no_lease(api: Api) -> None:
    async with api.crew(2) as everybody:
        link = await begin(everybody)
        with held(everybody.receivers[0]):
            assert everybody.sender.status()[0].version == everybody.sender.version
        assert not link.caught_up().leases.of


async def test_a_slot_that_a_lost_worker_may_be_reading_is_not_written(api: Api) -> None:
    async with api.crew(2) as everybody:
        link = await begin(everybody)
        bus = bare(everybody.sender).bus

        def lent() -> Any:
            return link.caught_up().targets.models["policy"].common.current.slab.retain()

        slab = bus._look(lent)
        content = bytes(slab.memory)
        for value in range(10, 16):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
            assert bytes(slab.memory) == content
        bus._look(slab.release)


@pytest.mark.schemes("some")
async def test_a_sender_that_has_been_busy_pauses_before_it_wakes_the_workers(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the first of them takes its core, and the others hear of the update when that one has finished with it."""
    pauses: list[float] = []
    async with api.crew(2) as everybody:
        monkeypatch.setattr(fast_path.time, "sleep", pauses.append)
        for busy, seconds in ((0, 10.0), (1, -1.0), (1, 10.0)):
            monkeypatch.setattr(fast_path, "BUSY_SECONDS", seconds)
            await everybody.sender.send_async(fill(everybody.source, 1))
            assert len(pauses) == busy
