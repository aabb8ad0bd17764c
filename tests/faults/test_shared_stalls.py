"""With slots as well: publishing takes a snapshot, and never holds up the loop; a call may be cancelled anywhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from test_cancelled_anywhere import GARBAGE, STRIKES, Struck, struck_everywhere
from test_snapshots_and_stalls import STALL, stalls

from asyncsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from helpers.processes import Remote, Schemes, eventually, value_of
from helpers.shared_workers import MIB, SharedWorker

pytestmark = pytest.mark.timeout(120)

LARGE, SMALL = 9 * MIB, 1000  # allocated and packed by the work thread; on the loop
every_kind = pytest.mark.parametrize(
    "kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme], ids=["shared", "process"]
)
every_strike = pytest.mark.parametrize("how", STRIKES)
both_sizes = pytest.mark.parametrize("numel", [SMALL, LARGE], ids=["small", "large"])


@pytest.mark.requirement(191)
@pytest.mark.both_loops
@every_kind
async def test_the_loop_is_never_blocked_while_256_mib_go_through_slots(
    kind: Any, schemes: Schemes, start: Callable[..., Remote], record_property: Callable[[str, object], None]
) -> None:
    numel = 256 * MIB
    torch.set_num_threads(2)  # as a trainer has them; the fixture puts back what was before
    before = set(threading.enumerate())
    sender = schemes.sender(numel, kind=kind, num_workers=2)
    workers = [start(SharedWorker), start(SharedWorker)]
    longest, blocked, fresh = [], [], []
    names: set[str] = set()
    pool = sender.shared_transport.pool
    async with stalls() as watched:  # the first version, whose slot is made now
        await asyncio.gather(sender.connect(), *(w.connect(sender, i, numel) for i, w in enumerate(workers)))
    longest.append(watched.longest)
    blocked.append(watched.blocked)
    for value in range(2, 6):
        sender.model.fill(value)
        fresh.append(pool._spare is None)
        async with stalls() as watched:
            sending = asyncio.create_task(sender.send_async())
            while not sending.done():
                names |= {
                    t.name for t in set(threading.enumerate()) - before if not type(t).__module__.startswith("zmq.")
                }
                await asyncio.wait([sending], timeout=0.005)
            assert await sending == value
        longest.append(watched.longest)
        blocked.append(watched.blocked)
    record_property("longest stalls of the trainer's loop, ms", [s * 1e3 for s in longest])
    record_property("… without waiting for a core, ms", [s * 1e3 for s in blocked])
    assert fresh[0], "the second version needs a second slot"
    assert not fresh[-1]
    assert await asyncio.gather(*(w.value() for w in workers)) == [5, 5]
    assert max(blocked) < 5 * STALL
    assert pool.peak <= 3
    assert "asyncsync-pack" in names


@pytest.mark.promise(1)
@every_kind
@pytest.mark.parametrize("map_above", [0, 1 << 30], ids=["mapped", "copied out"])
@both_sizes
async def test_what_comes_through_a_slot_is_what_the_parameters_held_when_publish_returned(
    kind: Any, map_above: int, numel: int, schemes: Schemes
) -> None:
    sender, receivers = await schemes.connected(numel, workers=3, kind=kind, map_above=map_above)
    for value in range(2, 10):
        version = await sender.publish(sender.model.fill(value))
        sender.model.fill(-value)  # an optimizer step, the moment publish returns
        await sender.wait_version(version, timeout=20)
        for receiver in receivers:
            assert receiver.model.value == value
            assert value_of(await receiver.receive(0)) == value
    assert sender.shared_transport.pool.peak <= 3


def is_idle(sender: Any, *receivers: Any) -> bool:
    """Whether nothing that a call has taken is still out."""
    link, pool = sender.bus._link, sender.shared_transport.pool
    targets = {t.slab for slot in link.caught_up().targets.slots() for t in slot.targets}
    lent = {slab for leases in link.caught_up().leases.of.values() for _, slab in leases.slabs.values()}
    return (
        pool.used == targets | lent
        and len(pool.used) <= 1
        and pool.slabs <= 2
        and not link.publishing.order.locked()
        and not link.waiters
        and all(r.bus._link.subscriber.pool.slabs <= 2 for r in receivers)
        and all(not r.bus._link.applying.wanted and not r.bus._link.waiters for r in receivers)
        and all(s.bus._link.failure is None for s in (sender, *receivers))
    )


async def still_works(sender: Any, *receivers: Any) -> None:
    async with asyncio.timeout(20):
        value = float(sender.version + 1000)
        version = await sender.send_async(sender.model.fill(value))
        for receiver in receivers:
            assert value_of(await receiver.receive(10)) == receiver.model.value == value
            assert receiver.version == version
            assert await receiver.receive(0) is None
    await eventually(lambda: is_idle(sender, *receivers))


@pytest.mark.requirement(192)
@every_strike
@every_kind
@both_sizes
@pytest.mark.parametrize("call", ["publish", "send_async"])
async def test_a_publication_through_slots_cancelled_at_any_await_is_whole_or_is_not(
    kind: Any, how: str, numel: int, call: str, schemes: Schemes
) -> None:
    sender, receivers = await schemes.connected(numel, workers=2, kind=kind, map_above=0)
    own, before, published = 2.0, sender.version, 0

    def make() -> Coroutine[Any, Any, int]:
        # Every time as the first time: a slot has to be made.
        sender.shared_transport.pool.close()
        sender.shared_transport.pool._closed = False
        coroutine: Coroutine[Any, Any, int] = getattr(sender, call)(sender.model.fill(own))
        return coroutine

    async for _ in struck_everywhere(make, how):
        sender.model.fill(GARBAGE)  # it has raised, so nobody reads the source any more
        assert sender.version in (before, before + 1)
        if sender.version > before:
            published += 1
            await sender.wait_version(sender.version)
            for receiver in receivers:
                assert value_of(await receiver.receive(10)) == receiver.model.value == own
        await eventually(lambda: is_idle(sender, *receivers))
        own += 1
        before = sender.version
    assert published >= 1
    await still_works(sender, *receivers)


@pytest.mark.requirement(192)
@pytest.mark.parametrize("how", ["at_once", "timeout"])
async def test_a_publication_that_waits_for_a_slot_may_be_cancelled(how: str, schemes: Schemes) -> None:
    sender, [receiver] = await schemes.connected(SMALL, workers=1, kind=SharedMemWeightSyncScheme, map_above=0, slots=2)
    async with receiver.hold():
        await sender.publish(sender.model.fill(2))
        for _ in range(3):
            call = Struck(sender.publish(sender.model.fill(GARBAGE)), 0, how)
            with pytest.raises((asyncio.CancelledError, TimeoutError)):
                await asyncio.create_task(call.run())
        assert sender.version == 2
    assert value_of(await receiver.receive(10)) == 2
    await eventually(lambda: is_idle(sender, receiver))
    await still_works(sender, receiver)


@pytest.mark.requirement(192)
@every_strike
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_connect_with_slots_cancelled_at_any_await_may_be_called_again(
    how: str, side: str, schemes: Schemes
) -> None:
    k, hit = 0, True
    while hit:
        sender = schemes.sender(LARGE, value=float(k + 1), kind=SharedMemWeightSyncScheme, num_workers=1, map_above=0)
        receiver = schemes.receiver(sender)
        victim, other = (sender, receiver) if side == "sender" else (receiver, sender)
        connecting = asyncio.create_task(other.connect(timeout=20))
        call = Struck(victim.connect(timeout=20), k, how)
        await asyncio.gather(call.run(), return_exceptions=True)
        hit = call.hit
        await victim.connect(timeout=20)
        await connecting
        assert receiver.model.value == k + 1
        await receiver.receive(0)
        await still_works(sender, receiver)
        await schemes.shutdown()
        k += 1
    assert k >= 2
