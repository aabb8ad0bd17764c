"""A call that is cancelled at any of its awaits loses no update, leaks nothing, and leaves the scheme usable.

:class:`Struck` drives a coroutine step by step and cancels its task at the k-th suspension; the tests repeat each call
for k = 0, 1, 2, … until one runs to its end unhurt. The cancellation strikes in three ways: at once; in the very tick
in which what is awaited arrives (where a careless implementation loses it); and as an expiring ``asyncio.timeout``.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from typing import Any

import pytest

from asyncsync import (
    AckTimeout,
    ClosedError,
    MultiProcessWeightSyncScheme,
    NotComparable,
    PartialSendError,
    SharedMemWeightSyncScheme,
    Superseded,
    TransportBackend,
    ZMQWeightSyncScheme,
)
from helpers import planted
from helpers.pairs import Model, connected, receiver_of
from helpers.processes import LARGE, Schemes, eventually, value_of
from helpers.shared_workers import MIB

pytestmark = [pytest.mark.both_loops, pytest.mark.timeout(120), pytest.mark.requirement(192)]

SMALL = 1000  # travels in the UPDATE, packed on the loop
SLOT = 9 * MIB  # a slot that is allocated and packed by the work thread
GARBAGE = -99.0

both_sizes = pytest.mark.parametrize("numel", [SMALL, LARGE], ids=["small", "large"])
WAYS = {
    "small": {"numel": SMALL},
    "large": {"numel": LARGE},
    "shared": {"numel": SMALL, "kind": SharedMemWeightSyncScheme},
    "process": {"numel": SMALL, "kind": MultiProcessWeightSyncScheme},
}
MAPPED = {
    "shared-mapped": {"numel": SMALL, "kind": SharedMemWeightSyncScheme, "map_above": 0},
    "shared-mapped-large": {"numel": SLOT, "kind": SharedMemWeightSyncScheme, "map_above": 0},
    "process-mapped": {"numel": SMALL, "kind": MultiProcessWeightSyncScheme, "map_above": 0},
    "process-mapped-large": {"numel": SLOT, "kind": MultiProcessWeightSyncScheme, "map_above": 0},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_strike = pytest.mark.parametrize("how", ["at_once", "in_the_same_tick", "timeout"])


class Struck:
    """Awaits a coroutine; at its suspension number `at`, the task that does so is cancelled.

    Attributes:
        hit: whether it came to that.
        begun: set at the first suspension.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, how: str) -> None:
        self.coroutine = coroutine
        self.at = at
        self.how = how
        self.hit = False
        self.begun = asyncio.Event()
        self.suspensions = 0

    async def run(self) -> Any:
        """Raises CancelledError (or TimeoutError) if it was struck."""
        if self.how != "timeout":
            return await asyncio.create_task(self._task())
        async with asyncio.timeout(None) as scope:
            self.strike = lambda: scope.reschedule(asyncio.get_running_loop().time() - 1)
            return await self

    async def _task(self) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self.strike = task.cancel
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: self.coroutine.send(None)  # noqa: E731
        while True:
            try:
                awaited = step()
            except StopIteration as stop:
                return stop.value
            if self.suspensions == self.at:
                self.hit = True
                if self.how == "in_the_same_tick" and awaited is not None:
                    # Before the task's own callback: the task finds the result and the cancellation together.
                    awaited.add_done_callback(lambda _: self.strike())
                else:
                    self.strike()
            self.suspensions += 1
            self.begun.set()
            try:
                yield awaited
            except BaseException as error:
                step = lambda error=error: self.coroutine.throw(error)  # noqa: E731
            else:
                step = lambda: self.coroutine.send(None)  # noqa: E731


async def struck_everywhere(
    make: Callable[[], Coroutine[Any, Any, Any]],
    how: str,
    *,
    meanwhile: Callable[[int], asyncio.Task[Any]] | None = None,
) -> AsyncIterator[tuple[int, bool, Any]]:
    """Run ``make()`` struck at its suspension 0, 1, 2, … and, last, unhurt; yields k, whether struck, the result."""
    k = 0
    while True:
        call = Struck(make(), k, how)
        task = asyncio.create_task(call.run())
        if meanwhile is not None:
            await call.begun.wait()
            companion = meanwhile(k)
        result, raised = None, None
        try:
            result = await task
        except (asyncio.CancelledError, TimeoutError) as error:
            raised = type(error)
        if meanwhile is not None:
            await companion
        if call.hit:
            # A call that has come to its end in that very tick may return; what must not happen is that it goes on.
            assert raised is (TimeoutError if how == "timeout" else asyncio.CancelledError), (k, result)
        yield k, call.hit, result
        if not call.hit:
            return
        assert k < 200, "it never ends"
        k += 1


def check_idle(sender: Any, *receivers: Any) -> bool:
    """Whether nothing that a call has taken is still out."""
    link, slots = sender.bus.link, sender.shared_transport.pool
    if slots is None:
        is_free = link.pool.slabs <= 2
    else:
        caught_up = link.end_fast_path()
        targets = set(caught_up.targets.slabs())
        lent = {slab for leases in caught_up.leases.of.values() for _, slab in leases.slabs.values()}
        is_free = slots.used == targets | lent and len(slots.used) <= 1 and slots.slabs <= 2
    links = [link, *(r.bus.link for r in receivers)]
    return (
        is_free
        and not link.publish_lock.locked()
        and all(r.bus.link.machine.pool.slabs <= 2 for r in receivers)
        and all(not r.bus.link.receiving for r in receivers)
        and all(not each.waiters and each.failure is None for each in links)
    )


async def still_works(sender: Any, *receivers: Any) -> None:
    """Everything that can be done with a scheme can be done, and gives whole weights; nothing is left over."""
    async with asyncio.timeout(20):
        value = float(sender.version + 1000)
        version = await sender.send_async(sender.model.fill(value))
        for receiver in receivers:
            weights = await receiver.receive(10)
            assert value_of(weights) == receiver.model.value == value
            assert receiver.version == version
            assert await receiver.receive(0) is None
            assert value_of(await receiver.fetch()) == value
    await eventually(lambda: check_idle(sender, *receivers))


@pytest.mark.promise(19)
@every_strike
@pytest.mark.parametrize(
    ("way", "apply"),
    [*((way, "auto") for way in WAYS.values()), (WAYS["large"], "on_receive")],
    ids=[*WAYS, "large-on_receive"],
)
async def test_receive_cancelled_at_any_await_loses_no_update(
    schemes: Schemes, way: dict[str, Any], apply: str, how: str
) -> None:
    sender = schemes.sender(num_workers=1, **way)
    receiver = schemes.receiver(sender, apply=apply)
    await asyncio.gather(sender.connect(), receiver.connect())
    give = sender.send_async if apply == "auto" else sender.publish

    async def update(k: int) -> None:
        await give(sender.model.fill(k + 2))

    async for k, hit, result in struck_everywhere(
        lambda: receiver.receive(10), how, meanwhile=lambda k: asyncio.create_task(update(k))
    ):
        if hit:
            result = await receiver.receive(10)
        assert value_of(result) == receiver.model.value == receiver.version == k + 2
        assert await receiver.receive(0) is None
        await sender.wait_version(k + 2, timeout=10)
        await eventually(lambda: check_idle(sender, receiver))
    assert k >= 1
    if apply == "auto":
        await still_works(sender, receiver)


@every_strike
@both_sizes
async def test_fetch_cancelled_at_any_await_leaves_the_scheme_usable(schemes: Schemes, numel: int, how: str) -> None:
    sender, [receiver] = await schemes.connected(numel)
    async for k, _, result in struck_everywhere(receiver.fetch, how):
        if result is not None:
            assert value_of(result) == sender.model.value
        value = await sender.send_async(sender.model.fill(k + 2))
        assert value_of(await receiver.fetch()) == value
        assert await receiver.receive(0) is None
        await eventually(lambda: check_idle(sender, receiver))
    await still_works(sender, receiver)


@pytest.mark.promise(19)
@every_strike
@pytest.mark.parametrize("way", [*WAYS.values(), *MAPPED.values()], ids=[*WAYS, *MAPPED])
async def test_publish_and_send_async_cancelled_at_any_await_publish_whole_or_not_at_all(
    schemes: Schemes, way: dict[str, Any], how: str
) -> None:
    sender, receivers = await schemes.connected(workers=2, **way)
    slots = sender.shared_transport.pool if "map_above" in way else None

    async def publish() -> int:
        return await sender.publish(sender.model.fill(own))

    async def behind_another() -> int:
        # The lock that keeps publications in order is one more await.
        async with sender.bus.link.publish_lock:
            other = asyncio.create_task(publish())
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                other.cancel()  # or it would go on, and read the garbage below
                raise
        return await other

    async def send() -> int:
        return await sender.send_async(sender.model.fill(own))

    async def as_the_first(call: Callable[[], Coroutine[Any, Any, int]]) -> int:
        if slots is not None:  # every time as the first time: a slot has to be made
            slots.close()
            slots._closed = False
        return await call()

    own = 10.0
    for call in (publish, behind_another, send):
        before, hits = sender.version, 0
        async for _, hit, _ in struck_everywhere(lambda call=call: as_the_first(call), how):
            hits += hit
            sender.model.fill(GARBAGE)  # it has raised, so nobody reads the source any more
            assert sender.version in (before, before + 1)
            assert hit or sender.version == before + 1
            if sender.version > before:
                await sender.wait_version(sender.version, timeout=10)
                for receiver in receivers:
                    assert value_of(await receiver.receive(10)) == receiver.model.value == own
            await eventually(lambda: check_idle(sender, *receivers))
            own += 1
            before = sender.version
        assert hits or call is publish
    await still_works(sender, *receivers)


@every_strike
@every_way
async def test_wait_version_cancelled_at_any_await_leaves_the_scheme_usable(
    schemes: Schemes, way: dict[str, Any], how: str
) -> None:
    """Of a sender; also that of the receiver, which has nothing to do for it."""
    sender, [receiver] = await schemes.connected(**way)

    async def leave() -> None:
        hold.__exit__()

    async def both() -> None:
        await receiver.wait_version(sender.version, timeout=10)
        await sender.wait_version(sender.version, timeout=10)

    for make in (lambda: sender.wait_version(sender.version, timeout=10), both):
        (hold := receiver.hold()).__enter__()  # nothing is applied before somebody waits
        await sender.publish(sender.model.fill(sender.version + 1))
        async for _ in struck_everywhere(make, how, meanwhile=lambda _: asyncio.create_task(leave())):
            await both()
            assert receiver.model.value == receiver.version == sender.version
            await eventually(lambda: check_idle(sender, receiver))
            (hold := receiver.hold()).__enter__()
            await sender.publish(sender.model.fill(sender.version + 1))
        await leave()
        await both()
        assert value_of(await receiver.receive(10)) == sender.version
    await still_works(sender, receiver)


@every_strike
@pytest.mark.parametrize("way", [WAYS["small"], WAYS["large"], MAPPED["shared-mapped-large"]])
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_connect_cancelled_at_any_await_may_be_called_again(
    schemes: Schemes, way: dict[str, Any], how: str, side: str
) -> None:
    k, hit = 0, True
    while hit:
        sender = schemes.sender(value=float(k + 1), num_workers=2, **way)
        receivers = [schemes.receiver(sender, i) for i in range(2)]
        victim = sender if side == "sender" else receivers[1]
        others = [asyncio.create_task(s.connect(timeout=20)) for s in (sender, *receivers) if s is not victim]
        call = Struck(victim.connect(timeout=20), k, how)
        with_error = await asyncio.gather(call.run(), return_exceptions=True)
        hit = call.hit
        assert isinstance(with_error[0], asyncio.CancelledError | TimeoutError) == hit, with_error
        await victim.connect(timeout=20)
        await asyncio.gather(*others)
        for receiver in receivers:
            assert receiver.model.value == k + 1
            # A connect that is called again sends the source's values again: the same, as a version of its own.
            again = await receiver.receive(0)
            assert again is None or (side == "sender" and value_of(again) == k + 1)
        await still_works(sender, *receivers)
        await schemes.shutdown()
        k += 1
    assert k >= 2


async def test_a_receiver_that_connects_while_the_sender_packs_waits_for_the_initial_weights(
    schemes: Schemes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = schemes.sender(LARGE, num_workers=1)
    receiver = schemes.receiver(sender)
    there = threading.Event()

    def wait_until_there() -> None:
        assert there.wait(20)

    planted.pack_by(monkeypatch, wait_until_there)
    connecting = asyncio.create_task(sender.connect())
    receiving = asyncio.create_task(receiver.connect())
    await eventually(lambda: sender.bus.link and sender.bus.link.end_fast_path().peers)
    session = receiver.bus.link.machine.session
    offered = []
    welcome = session.receive_welcome
    monkeypatch.setattr(session, "receive_welcome", lambda it, *rest: (offered.append(it.models), welcome(it, *rest)))
    there.set()
    await asyncio.gather(connecting, receiving)
    # Told of a model without weights first, it would have taken itself for connected.
    assert all(models.get("policy", b"digest") for models in offered), offered
    assert receiver.model.value == 1
    assert await receiver.receive(0) is None


class NeverArrives(TransportBackend):
    """Announces its slabs, but brings none."""

    async def offer(self, slab: Any, workers: Iterable[int] | None) -> bytes:
        return b"somewhere"

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        await asyncio.get_running_loop().create_future()


class NeverArrivesScheme(ZMQWeightSyncScheme):
    def create_transport(self, **kwargs: Any) -> NeverArrives:  # type: ignore[override]
        return NeverArrives()


@every_strike
@pytest.mark.parametrize("side", ["sender", "receiver", "receiver that fetches"])
async def test_shutdown_cancelled_at_any_await_still_releases_everything(schemes: Schemes, how: str, side: str) -> None:
    k, hit, connecting = 0, True, []
    while hit:
        if side == "receiver that fetches":
            sender = schemes.sender(LARGE, kind=NeverArrivesScheme, num_workers=1)
            receiver = schemes.receiver(sender)
            connecting = [asyncio.create_task(s.connect()) for s in (receiver, sender)]
            await eventually(lambda receiver=receiver: receiver.bus.link and receiver.bus.link._fetching)
        else:
            sender, [receiver] = await schemes.connected(LARGE)
            await sender.send_async(sender.model.fill(2))
            await receiver.receive()
        call = Struck((sender if side == "sender" else receiver).shutdown(), k, how)
        [result] = await asyncio.gather(call.run(), return_exceptions=True)
        hit = call.hit
        assert isinstance(result, asyncio.CancelledError | TimeoutError) == hit, result
        await schemes.shutdown()  # the other side, and once more this one
        for connect in connecting:
            with pytest.raises(ClosedError):
                await connect
        k += 1
    assert k >= 3 or not connecting


@both_sizes
async def test_concurrent_receivers_lose_nothing_when_some_are_cancelled(schemes: Schemes, numel: int) -> None:
    sender, [receiver] = await schemes.connected(numel)
    for value in range(2, 12):
        victims = [asyncio.create_task(receiver.receive()) for _ in range(3)]
        await asyncio.sleep(0)
        sending = asyncio.create_task(sender.send_async(sender.model.fill(value)))
        for _ in range(value % 5):
            await asyncio.sleep(0)
        for victim in victims:
            victim.cancel()
        results = await asyncio.gather(*victims, return_exceptions=True)
        await sending
        got = [r for r in results if not isinstance(r, BaseException)]
        if not got:
            got = [await receiver.receive(10)]
        assert {value_of(w) for w in got} == {value}
        assert await receiver.receive(0) is None


async def test_wait_for_and_timeout_around_every_call(schemes: Schemes) -> None:
    sender = schemes.sender(LARGE, num_workers=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sender.connect(), 0.01)
    receiver = schemes.receiver(sender)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await receiver.connect()
    # Entered in one task, used and shut down in others.
    await asyncio.gather(asyncio.wait_for(sender.connect(), 20), asyncio.wait_for(receiver.connect(), 20))
    assert receiver.model.value == 1
    await receiver.fetch()  # what the second connect has sent
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receiver.receive(), 0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await receiver.receive(30)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sender.send_async(sender.model.fill(3)), 0)
    async with receiver.hold():  # keeps the update from being applied
        version = await sender.publish(sender.model.fill(4))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sender.wait_version(version), 0.05)
        assert await asyncio.wait_for(receiver.receive(0), 1) is None
    assert value_of(await asyncio.wait_for(receiver.receive(), 10)) == 4
    await still_works(sender, receiver)


async def test_a_failing_task_group_takes_its_calls_along_and_the_scheme_goes_on(schemes: Schemes) -> None:
    sender, receivers = await schemes.connected(LARGE, workers=2)

    async def fail() -> None:
        await eventually(lambda: sender.status()[0].bytes_sent > 5 << 20)
        raise LookupError("an env step")

    async def together() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sender.send_async(sender.model.fill(2)))
            group.create_task(receivers[1].receive())
            group.create_task(receivers[1].fetch())
            group.create_task(fail())

    with receivers[1].hold(), pytest.raises(ExceptionGroup) as caught:
        await together()
    assert caught.group_contains(LookupError)
    assert len(caught.value.exceptions) == 1
    for receiver in receivers:
        assert value_of(await receiver.receive(10)) == 2
    await still_works(sender, *receivers)


@pytest.mark.requirement(242, 243)
@pytest.mark.parametrize(
    "strikes",
    [
        100,
        pytest.param(1_000, marks=pytest.mark.thorough),
        pytest.param(25_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme])
async def test_staging_taking_and_verifying_cancelled_at_random_leave_nothing_behind(kind: Any, strikes: int) -> None:
    chance = random.Random(strikes)
    source = Model(1)
    sender = kind(min_workers=0, **({"map_above": 0} if kind is SharedMemWeightSyncScheme else {}))
    sender.init_on_sender(model_id="policy", model=source)
    taker, model = receiver_of(sender, 0, None, apply="on_take"), Model()
    receiver = receiver_of(sender, 1, model)

    async def take() -> None:
        async with taker.take(timeout=0.003) as taken:
            [number] = {float(end) for _, tensor in taken.items() for end in tensor.aminmax()}
            await asyncio.sleep(0)
            assert number == taken.metadata.get("number", 1)
            if chance.random() < 0.2:
                raise ArithmeticError("could not be loaded")

    async def give(method: Any) -> None:
        number = float(chance.randrange(1000))
        staged[:] = [await method(Model(number), metadata={"number": number})]

    def some_call() -> Coroutine[Any, Any, Any]:
        version = staged[0] if staged else 1
        return chance.choice(
            [
                lambda: give(sender.stage),
                lambda: give(sender.publish),
                lambda: sender.wait_staged(version, 1, timeout=0.01),
                lambda: sender.commit(version, 1, timeout=0.01),
                lambda: sender.drop(version),
                lambda: sender.verify(1, timeout=0.01),
                take,
                take,
            ]
        )()

    staged: list[int] = []
    hits = 0
    async with connected(sender, taker, receiver):
        await give(sender.publish)
        while hits < strikes:
            how = chance.choice(["at_once", "in_the_same_tick", "timeout"])
            call = Struck(some_call(), chance.randrange(4), how)
            refused = ValueError, ArithmeticError, AckTimeout, Superseded, PartialSendError
            with contextlib.suppress(asyncio.CancelledError, TimeoutError, *refused):
                await call.run()
            hits += call.hit
        last = await sender.publish(Model(7), metadata={"number": 7.0})
        async with taker.take(last, timeout=10) as taken:
            assert {float(tensor.min()) for _, tensor in taken.items()} == {7}
        await sender.wait_version(last, timeout=10)
        assert model() == {7}
        assert await sender.verify(timeout=10) == {
            0: NotComparable("it has no model, but takes versions itself"),
            1: [],
        }
        assert sender.bus.link.machine.targets.staged is None
        assert taker.bus.link.machine.taken is None
        await eventually(lambda: all(not each.bus.link.waiters for each in (sender, taker, receiver)))
        if kind is SharedMemWeightSyncScheme:
            await eventually(lambda: len(sender.shared_transport.pool.used) <= 1)
