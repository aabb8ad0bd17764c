"""Fan-out to worker processes, some of which are stopped or killed in the middle of what is sent to all of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncsync import PartialSendError
from helpers.processes import LARGE, Remote, Schemes, Worker, eventually

MIB = 1 << 20
WORKERS = 4


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.requirement(198)
@pytest.mark.thorough
@pytest.mark.parametrize("endpoint", ["tcp"], indirect=True)
@pytest.mark.parametrize("fanout", ["pull", "push"])
async def test_a_stopped_subscriber_delays_nobody_and_memory_stays_bounded(
    fanout: str, endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender = schemes.sender(LARGE, endpoint=endpoint, num_workers=WORKERS, fanout=fanout)
    workers = [start(Worker) for _ in range(WORKERS)]
    await asyncio.gather(sender.connect(), *(w.connect(sender, i, LARGE, settings={}) for i, w in enumerate(workers)))
    subscribed = sender.bus._link.publisher.fanout.subscribed
    await eventually(lambda: len(subscribed) == WORKERS)
    await sender.send_async(sender.model.fill(2))
    workers[3].signal(signal.SIGSTOP)
    before, last = resident(), 2
    for _ in range(40):  # 200 MiB for each
        last = await sender.publish(sender.model.fill(last + 1))
        await sender.wait_version(last, worker_ids=[0, 1, 2], timeout=10)
    assert resident() - before < 120 * MIB
    assert sender.bus._link.pool.peak <= 5
    assert await asyncio.gather(*(w.value() for w in workers[:3])) == [last] * 3
    workers[3].signal(signal.SIGCONT)
    assert await workers[3].wait_version(last) == last
    assert len(await workers[3].applied_versions()) <= 5
    await eventually(lambda: len(subscribed) == WORKERS)
    await sender.send_async(sender.model.fill(0))
    assert await asyncio.gather(*(w.value() for w in workers)) == [0] * WORKERS


@pytest.mark.requirement(195, 198)
@pytest.mark.thorough
@pytest.mark.parametrize("endpoint", ["tcp"], indirect=True)
@pytest.mark.parametrize("fanout", ["pull", "push"])
async def test_a_subscriber_killed_amid_a_transfer_is_named_and_the_others_have_it(
    fanout: str, endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    numel = 16 * MIB
    sender = schemes.sender(numel, endpoint=endpoint, num_workers=WORKERS, fanout=fanout)
    workers = [start(Worker) for _ in range(WORKERS)]
    await asyncio.gather(sender.connect(), *(w.connect(sender, i, numel) for i, w in enumerate(workers)))
    await eventually(lambda: len(sender.bus._link.publisher.fanout.subscribed) == WORKERS)
    await workers[1].halt_in("transfer", nth=5)
    sending = asyncio.create_task(sender.send_async(sender.model.fill(2)))
    assert await workers[1].events.get() == "transfer"
    await workers[1].kill()
    with pytest.raises(PartialSendError) as caught:
        await sending
    assert (set(caught.value.acked), set(caught.value.failed)) == ({0, 2, 3}, {1})
    assert await asyncio.gather(*(workers[i].value() for i in (0, 2, 3))) == [2] * 3
