"""The scheme for both, with a worker that really is elsewhere: in another network and pid namespace."""

from __future__ import annotations

import pytest

from asyncsync import AutoWeightSyncScheme
from helpers import planted
from helpers.hosts import LARGE, hosts, until
from helpers.pairs import Model, connected, fill, receiver_of
from helpers.ranks import free_port

VERSIONS = 20


@pytest.mark.thorough
@pytest.mark.timeout(200)
async def test_one_update_reaches_a_worker_of_this_host_and_one_of_another() -> None:
    async with hosts(1) as far:
        source, near = Model(1.0, LARGE), Model(-1.0, LARGE)
        endpoint = f"tcp://{far.address}:{free_port()}"
        sender = AutoWeightSyncScheme(endpoint=endpoint, num_workers=2, allow_plaintext=True, map_above=0, delta=True)
        sender.init_on_sender(model_id="policy", model=source)
        away = far[0].worker(1, endpoint, kind="auto")
        async with connected(receiver_of(sender, 0, near), sender, timeout=60):
            for value in range(2, 2 + VERSIONS):
                await sender.send_async(fill(source, value))
                assert near() == {value}
                await until(lambda value=value: away.value == value, 10, lambda: away.value)
            status = sender.status()
            assert status[0].bytes_sent == 0
            assert status[1].bytes_sent == (VERSIONS + 1) * planted.nbytes(source.state_dict())
