"""The transport of torch.distributed alone: its ends are this test and other processes, and there is no bus. And a
store as a meeting place: what lies there, who takes it, and who ends it."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from asyncsync import DistributedTransport, NotConnected, SharedMemTransport
from asyncsync.net.keys import Certificate
from asyncsync.net.rendezvous import Introduction, Introductions
from asyncsync.transports.torch_distributed import OwnStore, StorePlace, TransferPlace, connect
from asyncsync.weights.slab import SlabPool
from helpers.fetchers import Fetcher, Offerer, filled, layout_of
from helpers.pairs import Clock, until
from helpers.processes import Remote, Start

MIB = 1 << 20
LARGE = 256 * MIB


@pytest.fixture
async def transport() -> AsyncIterator[DistributedTransport]:
    transport = DistributedTransport(pair_above=0)
    transport.start_channel(None)
    yield transport
    await transport.close_within(2.0)


async def fetchers(start: Start, count: int) -> list[Remote]:
    workers = [start(Fetcher) for _ in range(count)]
    await asyncio.gather(*(worker.begin(i) for i, worker in enumerate(workers)))
    return workers


async def test_each_worker_gets_the_bytes_that_it_asks_for(transport: DistributedTransport, start: Start) -> None:
    pool, workers = SlabPool(), await fetchers(start, 2)
    slabs = [filled(pool, 300_000 + i, i) for i in range(3)]
    offered = [await transport.offer(slab, None) for slab in slabs]
    for i in (0, 1, 2, 0):
        assert await asyncio.gather(*(w.fetch(offered[i], 300_000 + i) for w in workers)) == [{i}, {i}]
    both = [workers[0].fetch(offered[1], 300_001), workers[0].fetch(offered[2], 300_002)]
    assert await asyncio.gather(*both) == [{1}, {2}], "one after the other, over one connection"


async def test_few_bytes_go_over_the_bus() -> None:
    assert await DistributedTransport().offer(filled(SlabPool(), 64 << 10, 1), None) is None


async def test_what_is_retired_is_gone_and_its_memory_is_free(transport: DistributedTransport, start: Start) -> None:
    pool, (worker,) = SlabPool(), await fetchers(start, 1)
    first, second = filled(pool, 1024, 1), filled(pool, 2048, 2)
    gone, there = await transport.offer(first, None), await transport.offer(second, None)
    first.on_release = lambda: transport.retire(gone)
    first.release()
    assert pool.slabs == 2, "one is spare, none is kept by the transport"
    with pytest.raises(LookupError, match="does not offer these weights any more"):
        await worker.fetch(gone, 1024)
    with pytest.raises(ValueError, match=r"2048 .* 1024"):
        await worker.fetch(there, 1024)
    assert await worker.fetch(there, 2048) == {2}


async def test_whoever_finds_the_store_gets_nothing(transport: DistributedTransport, start: Start) -> None:
    (worker,) = await fetchers(start, 1)
    descriptor = await transport.offer(filled(SlabPool(), 1000, 1), None)
    assert "does not offer" in await worker.stranger(descriptor)


async def test_other_transports_descriptors_are_refused_both_ways() -> None:
    layout = layout_of(1000)
    with pytest.raises(ValueError, match="another transport"):
        await DistributedTransport().fetch_slab(b"SHM\x01" + bytes(60), filled(SlabPool(), 1000, 1), 0.0)
    shared = SharedMemTransport()
    with pytest.raises(ValueError, match="another transport"):
        shared.attach(TransferPlace(("127.0.0.1", 9), bytes(16)).encode(), layout, SlabPool())
    shared.close()


async def test_a_worker_that_dies_in_the_middle_disturbs_nobody_and_its_successor_is_served(
    transport: DistributedTransport, start: Start
) -> None:
    """gloo forgets such a send: whoever waits for it waits for ever, and its memory is not free."""
    pool, workers = SlabPool(), await fetchers(start, 2)
    slab = filled(pool, LARGE, 7)
    descriptor = await transport.offer(slab, None)
    ends = await asyncio.gather(
        workers[0].fetch(descriptor, LARGE), workers[1].perish(descriptor), return_exceptions=True
    )
    assert (ends[0], type(ends[1])) == ({7}, EOFError)
    successor = start(Fetcher)
    await successor.begin(1)
    assert await successor.fetch(descriptor, LARGE) == {7}
    slab.release()
    transport.retire(descriptor)
    await until(lambda: not pool.is_draining(LARGE))


async def test_the_workers_of_a_sender_that_is_killed_in_the_middle_are_told_at_once(start: Start) -> None:
    sender, (worker,) = start(Offerer), await fetchers(start, 1)
    descriptor = await sender.offer(LARGE, 7)
    assert await worker.fetch(descriptor, LARGE) == {7}
    call = worker.fetch(descriptor, LARGE)
    sender.signal(signal.SIGSTOP)
    sender.signal(signal.SIGKILL)
    with Clock(1.0), pytest.raises(NotConnected, match=r"worker 0 cannot connect to the sender at 127\."):
        await call
    with Clock(1.0), pytest.raises(NotConnected, match="worker 0 cannot connect"):
        await worker.fetch(descriptor, LARGE)
    again = start(Offerer)
    assert await worker.fetch(await again.offer(LARGE, 8), LARGE) == {8}


async def test_a_fetch_that_is_cancelled_ends_at_once_though_the_sender_is_stopped(start: Start) -> None:
    sender, (worker,) = start(Offerer), await fetchers(start, 1)
    descriptor = await sender.offer(MIB, 7)
    assert await worker.fetch(descriptor, MIB) == {7}
    sender.signal(signal.SIGSTOP)
    with Clock(1.0), pytest.raises(TimeoutError):
        await worker.fetch(descriptor, MIB, timeout=0.2)
    sender.signal(signal.SIGCONT)
    assert await worker.fetch(descriptor, MIB) == {7}


async def test_an_address_that_is_not_this_hosts_is_refused() -> None:
    with pytest.raises(NotConnected, match=r"store at 192\.0\.2\.1:0: .* address"):
        await DistributedTransport("192.0.2.1", pair_above=0).offer(filled(SlabPool(), 1000, 1), None)


# -- stores ------------------------------------------------------------------------------------------------------------


class Told(Introductions):
    """The same introduction for all, and nobody is let in."""

    def __init__(self, endpoint: str) -> None:
        keys = Certificate.draw()
        self.introduction = Introduction(endpoint, keys.public, keys)

    def __call__(self, worker: int) -> Introduction:
        return self.introduction


FIRST, SECOND = Told("tcp://127.0.0.1:1"), Told("tcp://127.0.0.1:2")


def place_in(own: OwnStore, *, is_senders: bool = False) -> StorePlace:
    return StorePlace("policy", partial(connect, own.address, 5.0), own if is_senders else None)


async def test_workers_may_ask_before_there_is_a_store_and_nothing_stays_there() -> None:
    own = OwnStore("127.0.0.1")
    place = place_in(own, is_senders=True)
    finding = [asyncio.create_task(place_in(own).find(worker)) for worker in (0, 1, 0)]
    await place.host(FIRST)
    assert await asyncio.gather(*finding) == [FIRST.introduction] * 3
    left = connect(own.address).num_keys()
    await place.close()
    assert left == 0
    assert own.server is None


async def test_two_senders_at_one_place_do_not_disturb_each_other() -> None:
    """As a trainer that ends, and its successor."""
    own = OwnStore("127.0.0.1")
    first, second = place_in(own, is_senders=True), place_in(own, is_senders=True)
    await first.host(FIRST)
    await second.host(SECOND)
    found = await asyncio.gather(*(place_in(own).find(worker) for worker in range(8)))
    assert {one.endpoint for one in found} <= {"tcp://127.0.0.1:1", "tcp://127.0.0.1:2"}
    await second.close()
    assert own.server is not None, "only the one that has opened it ends it"
    assert await place_in(own).find(8) == FIRST.introduction
    await first.close()
    assert own.server is None


async def test_a_wait_for_an_answer_ends_when_nobody_waits_any_more_or_the_store_ends() -> None:
    own = OwnStore("127.0.0.1")
    own.open()
    there, over = connect(own.address), threading.Event()
    for end in (over.set, own.close):
        over.clear()
        asking = asyncio.create_task(asyncio.to_thread(place_in(own).ask, 0, over))
        await until(partial(there.check, ["asyncsync/policy/questions"]))
        there.queue_pop("asyncsync/policy/questions")
        end()
        with Clock(0.5), pytest.raises(NotConnected):
            await asking
