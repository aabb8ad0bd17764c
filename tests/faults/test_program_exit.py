"""A program that ends with everything open ends at once; what it left on disk is swept by the next connect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncsync import ClosedError, NotConnected
from helpers.processes import Remote, Schemes, Trainer, Worker, value_of

pytestmark = pytest.mark.timeout(150)  # it imports torch four times

PROMISED = 5.0  # seconds
PROGRAM = """
import asyncio, sys
from helpers.processes import LARGE, Schemes

async def main(how):
    if how == "nothing":
        print("open", flush=True)
        return
    schemes = Schemes()
    sender, [receiver, other] = await schemes.connected(LARGE, workers=2)
    await sender.send_async(sender.model.fill(2))
    await receiver.receive()
    if how == "busy":
        for work in (receiver.receive(), sender.send_async(sender.model.fill(3)), other.fetch(), other.receive()):
            asyncio.create_task(work)
            await asyncio.sleep(0)
    print("open", flush=True)
    if how == "raise":
        raise LookupError("a bug of the user's")
    if how == "stranded":
        asyncio.get_running_loop().stop()
        await asyncio.sleep(100)

if sys.argv[1] == "stranded":  # the loop is neither run to its end nor closed
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    task = loop.create_task(main(sys.argv[1]))
    loop.run_forever()
else:
    asyncio.run(main(sys.argv[1]))
print("over", flush=True)
"""


async def run(how: str) -> tuple[float, int | None, str, str]:
    """Seconds from "open" to the end, exit status, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore::ResourceWarning", "-c", PROGRAM, how),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert process.stdout is not None
    try:
        first = await process.stdout.readline()
        begin = time.perf_counter()
        async with asyncio.timeout(4 * PROMISED):
            out, err = await process.communicate()
        return time.perf_counter() - begin, process.returncode, (first + out).decode(), err.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.thorough
async def test_a_program_that_ends_without_shutdown_ends_at_once(
    schemes: Schemes, record_property: Callable[[str, object], None]
) -> None:
    expected = {"nothing": 0, "busy": 0, "stranded": 0, "raise": 1}
    results = dict(zip(expected, await asyncio.gather(*map(run, expected)), strict=True))
    idle = results["nothing"][0]  # what Python and torch take for themselves, on a machine as busy as this
    for how, (seconds, status, out, err) in results.items():
        record_property(f"seconds to exit, {how}", seconds)
        assert status == expected[how], (how, err)
        assert out.startswith("open"), (how, err)
        assert ("over" in out) == (status == 0)
        assert seconds < idle + PROMISED, how
        assert "Fatal" not in err, err
        if how == "raise":
            assert "LookupError: a bug of the user's" in err
        elif how != "stranded":
            assert err == "", how
    # Nobody said where they were: the next sender finds them.
    sender = schemes.sender(10)
    with pytest.raises(NotConnected):
        await sender.connect(timeout=0)
    mine = Path(sender.bus.endpoint.removeprefix("ipc://")).parent.name
    assert [n for n in os.listdir(tempfile.gettempdir()) if n.startswith("asyncsync-")] == [mine]


@pytest.mark.requirement(210)
async def test_a_program_that_just_ends_has_said_goodbye(
    endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    plan = schemes.sender(1000, 9, endpoint=endpoint, num_workers=2)
    worker, server = schemes.receiver(plan), schemes.receiver(plan, 1, reconnect=True)
    trainer = start(Trainer)
    await asyncio.gather(trainer.connect(plan, 1000, 1), worker.connect(), server.connect())
    waiting = asyncio.create_task(server.receive())
    with contextlib.suppress(ClosedError):
        await worker.receive(0)
    await trainer.leave()
    with pytest.raises(ClosedError):
        await worker.receive()
    assert worker.closed
    await trainer.ended
    assert not server.closed
    assert not waiting.done()
    successor = start(Trainer)
    replacement = schemes.receiver(plan, 0)
    await asyncio.gather(successor.connect(plan, 1000, 9), replacement.connect())
    assert value_of(await waiting) == server.model.value == 9


@pytest.mark.requirement(195)
async def test_a_worker_whose_program_just_ended_is_lost_at_once(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender = schemes.sender(1000)
    worker, steady = start(Worker), start(Worker)
    await asyncio.gather(sender.connect(), worker.connect(sender, 0, 1000), steady.connect(sender, 1, 1000))
    await worker.leave()
    await worker.ended
    assert await sender.send_async(sender.model.fill(2), timeout=10) == 2  # elastic
    assert await steady.value() == 2
    assert sender.status()[0].state == "lost"
