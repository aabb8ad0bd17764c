"""No forward and no ``hold()`` block ever sees two versions: every parameter holds its number, and each read compares.

The workers read on their loop and in threads while the trainer publishes as fast as it can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from helpers.processes import Remote, Schemes, Worker

pytestmark = pytest.mark.timeout(90)

FORWARDS = 20_000
VERSIONS = 100


async def read_under_fire(
    schemes: Schemes, workers: list[Remote], endpoint: str, numel: int, forwards: int, *, broken_gate: bool = False
) -> list[tuple[int, int]]:
    """How many reads were torn, and how many versions were seen, by each worker."""
    sender = schemes.sender(numel, endpoint=endpoint, num_workers=len(workers))
    await asyncio.gather(
        sender.connect(),
        *(w.connect(sender, i, numel, broken_gate=broken_gate) for i, w in enumerate(workers)),
    )

    async def fire() -> None:
        while True:
            await sender.publish(sender.model.fill(sender.version + 1))
            await asyncio.sleep(0)

    firing = asyncio.create_task(fire())
    results = await asyncio.gather(*(w.forwards(forwards // len(workers)) for w in workers))
    firing.cancel()
    await asyncio.wait([firing])
    assert firing.cancelled()
    last = await sender.send_async(sender.model.fill(sender.version + 1))
    assert [await w.value() for w in workers] == [last] * len(workers)
    return results


@pytest.mark.parametrize(
    ("endpoint", "numel", "uvloop"),
    [("ipc", 1000, False), ("ipc", 1 << 18, True), ("tcp", 1000, True), ("tcp", 1 << 18, False)],
    indirect=["endpoint"],
    ids=["ipc-eager-asyncio", "ipc-chunked-uvloop", "tcp-eager-uvloop", "tcp-chunked-asyncio"],
)
async def test_r194_no_forward_is_torn_under_full_speed_sending(
    endpoint: str,
    numel: int,
    uvloop: bool,
    schemes: Schemes,
    start: Callable[..., Remote],
    record_property: Callable[[str, object], None],
) -> None:
    workers = [start(Worker, uvloop=uvloop) for _ in range(2)]
    results = await read_under_fire(schemes, workers, endpoint, numel, FORWARDS)
    record_property("versions seen by each worker", [seen for _, seen in results])
    assert [torn for torn, _ in results] == [0, 0]
    assert min(seen for _, seen in results) >= VERSIONS


async def test_r194_the_oracle_catches_a_broken_gate(
    endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    results = await read_under_fire(schemes, [start(Worker)], endpoint, 1000, 4000, broken_gate=True)
    assert results[0][0] > 0
