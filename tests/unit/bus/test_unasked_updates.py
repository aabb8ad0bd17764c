"""What a sender sends with the instruction, before a worker has asked for it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from helpers.apis import Api, bare


@pytest.mark.parametrize(
    ("options", "asks"),
    [({}, False), ({"compress": "zstd"}, True), ({"delta": True}, True), ({"fanout": "pull"}, True)],
    ids=["as it is", "compressed", "as a difference", "to all at once"],
)
async def test_half_a_mib_comes_unasked_where_it_comes_as_it_is(
    api: Api, options: dict[str, Any], asks: bool, unused_tcp_port: int
) -> None:
    source, model = nn.Linear(1 << 17, 1, bias=False), nn.Linear(1 << 17, 1, bias=False)
    bus = api.bus(f"tcp://127.0.0.1:{unused_tcp_port}", num_workers=1, **options)
    async with api.crew(1, scheme=api.scheme(bus=bus), source=source, models=[model]) as everybody:
        publisher = bare(everybody.sender).bus._link.publisher
        fetched, handle = [], publisher.streaming.begin
        publisher.streaming.begin = lambda *given: (fetched.append(given), handle(*given))
        nn.init.ones_(source.weight)
        await everybody.sender.send_async(source)
        assert bool(fetched) is asks
        assert bool((model.weight == 1).all())
