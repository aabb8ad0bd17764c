"""A process that has hardly any file descriptors left is told so, and not aborted by libzmq."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncsync import NotConnected, SharedMemWeightSyncScheme, WeightSyncError
from helpers import planted
from helpers.processes import Schemes
from helpers.programs import python

pytestmark = pytest.mark.timeout(60)


@contextmanager
def only(free: int) -> Iterator[None]:
    """So many descriptors may still be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - planted.descriptors_left() + free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("workers", "free"), [(None, 40), (20, 90)])
async def test_a_sender_without_descriptors_for_its_workers_does_not_connect(
    schemes: Schemes, workers: int | None, free: int
) -> None:
    sender = schemes.sender(1000, num_workers=workers)
    with only(free), pytest.raises(NotConnected, match=r"file descriptors .*ulimit -n"):
        await sender.connect(timeout=5)


async def test_a_further_worker_is_refused_and_the_others_go_on(schemes: Schemes) -> None:
    sender = schemes.sender(1000)
    first, second = (schemes.receiver(sender, i) for i in range(2))
    await asyncio.gather(sender.connect(timeout=10), first.connect(timeout=10))
    joining = asyncio.create_task(second.connect(timeout=10))
    await asyncio.sleep(0)  # its own link is there
    with only(20), pytest.raises(NotConnected, match=r"refused worker 1: .*file descriptors"):
        await joining
    assert await sender.send_async(sender.model.fill(2), timeout=10) == 2
    assert first.model.value == 2


async def test_no_slot_takes_the_last_descriptors(schemes: Schemes) -> None:
    sender = schemes.sender(1000, kind=SharedMemWeightSyncScheme)
    receiver = schemes.receiver(sender)
    await asyncio.gather(sender.connect(timeout=10), receiver.connect(timeout=10))

    async def take_slots() -> None:
        for worker in range(1, 6):
            await sender.publish(sender.model.fill(2), worker_ids=[worker])

    with only(20), pytest.raises(WeightSyncError, match="file descriptors"):
        await take_slots()
    assert await sender.send_async(sender.model.fill(3), timeout=10) == sender.version


MANY = """
import asyncio, resource
from torch import nn
from asyncsync import NotConnected, ZMQWeightSyncScheme

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
    schemes, refused = [], 0
    for i in range(20):
        schemes.append(scheme := ZMQWeightSyncScheme(min_workers=0))
        scheme.init_on_sender(model_id="policy", model=nn.Linear(2, 2))
        try:
            await scheme.connect(timeout=1)
        except NotConnected as error:
            assert "ulimit" in str(error), error
            refused += 1
    for scheme in schemes:
        await scheme.shutdown()
    print(f"refused {refused > 10}")

asyncio.run(main())
"""


@pytest.mark.thorough
def test_many_senders_end_with_an_error_and_not_with_an_abort() -> None:
    ran = python("-c", MANY)
    assert (ran.returncode, ran.stdout.strip()) == (0, "refused True"), ran.stderr
