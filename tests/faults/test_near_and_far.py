"""The scheme for both, with a worker that really is elsewhere: in another network, pid and uts namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asyncsync import AutoWeightSyncScheme
from helpers.far_host import far_host
from helpers.processes import Remote, Schemes, Worker
from helpers.ranks import free_port
from helpers.shared_workers import MIB

VERSIONS = 20


@pytest.mark.thorough
@pytest.mark.timeout(120)
async def test_one_update_reaches_a_worker_of_this_host_and_one_of_another(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    async with far_host() as far:
        sender = schemes.sender(
            MIB,
            kind=AutoWeightSyncScheme,
            endpoint=f"tcp://{far.this_address}:{free_port()}",
            allow_plaintext=True,
            num_workers=2,
            map_above=0,
            delta=True,
        )
        near = start(Worker)
        away = await far.worker(sender, 1, MIB)
        try:
            await asyncio.gather(sender.connect(), near.connect(sender, 0, MIB))
            assert int(await away.ask("pid")) < 10, "it has pids of its own"
            for value in range(2, 2 + VERSIONS):
                await sender.send_async(sender.model.fill(value))
                assert [await near.value(), await away.shown()] == [value, value]
            status = sender.status()
            assert status[0].bytes_sent == 0
            assert status[1].bytes_sent == (VERSIONS + 1) << 20
        finally:
            await away.end()
