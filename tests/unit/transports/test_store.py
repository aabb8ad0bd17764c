"""A store as a meeting place: what lies there, who takes it, and who ends it."""

import asyncio
import threading
from functools import partial

import pytest

from asyncsync import NotConnected
from asyncsync.net.keys import KeyPair
from asyncsync.net.rendezvous import Introduction, Introductions
from asyncsync.transports.store import OwnStore, StorePlace, connect
from helpers.pairs import Clock, until


class Told(Introductions):
    """The same introduction for all, and nobody is let in."""

    def __init__(self, endpoint: str) -> None:
        keys = KeyPair.draw()
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
    assert not own.is_open


async def test_two_senders_at_one_place_do_not_disturb_each_other() -> None:
    """As a trainer that ends, and its successor."""
    own = OwnStore("127.0.0.1")
    first, second = place_in(own, is_senders=True), place_in(own, is_senders=True)
    await first.host(FIRST)
    await second.host(SECOND)
    found = await asyncio.gather(*(place_in(own).find(worker) for worker in range(8)))
    assert {one.endpoint for one in found} <= {"tcp://127.0.0.1:1", "tcp://127.0.0.1:2"}
    await second.close()
    assert own.is_open, "only the one that has opened it ends it"
    assert await place_in(own).find(8) == FIRST.introduction
    await first.close()
    assert not own.is_open


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
