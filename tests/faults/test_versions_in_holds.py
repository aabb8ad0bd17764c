"""``version`` inside a hold is the version of what the model shows, from its first line to its last.

The models are filled with the number of the version, and read while the sender publishes without a pause.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from helpers.apis import Api, bare, in_thread
from helpers.pairs import Model, fill, read, receiver_of

pytestmark = pytest.mark.timeout(60)

HOLDS = 100
VERSIONS = 10


def enough(seen: set[Any]) -> bool:
    return len(seen) >= VERSIONS


def enough_of_both(seen: set[Any]) -> bool:
    """Versions that two models have in common, and versions of one of them."""
    return enough(seen) and {policy == value for policy, value in seen} == {True, False}


def look(receivers: dict[str, Any], models: dict[str, Any], until: Callable[[set[Any]], bool] = enough) -> list[Any]:
    """Read in holds, ``until`` enough versions were seen; what was wrong.

    ``receivers`` and ``models`` by model_id: those of one worker.
    """
    wrong, seen, holds = [], set[Any](), 0
    any_receiver = next(iter(receivers.values()))
    while holds < HOLDS or not until(seen):
        holds += 1
        time.sleep(0.001)  # updates come between the holds, too
        with any_receiver.hold():
            before = {m: bare(r).version for m, r in receivers.items()}
            bus_before = any_receiver.bus.version
            shown = {m: read(model) for m, model in models.items()}
            status = {m: next(iter(bare(r).status().values())).version for m, r in receivers.items()}
            after = {m: bare(r).version for m, r in receivers.items()}
            bus_after = any_receiver.bus.version
        contents = {m: {float(v)} for m, v in before.items()}
        right = before == status == after and bus_before == bus_after == max(before.values())
        if not right or contents != shown:
            wrong.append((before, shown, status, after, bus_before, bus_after))
        seen.add(tuple(before.values()))
    return wrong


async def look_under_fire(
    receivers: list[dict[str, Any]],
    models: list[dict[str, Any]],
    publish: Callable[[], Coroutine[Any, Any, Any]],
    until: Callable[[set[Any]], bool] = enough,
) -> None:
    """A reader of each worker in a thread of its own."""
    done = threading.Event()

    async def fire() -> None:
        while not done.is_set():
            await publish()
            await asyncio.sleep(0)

    firing = asyncio.create_task(fire())
    try:
        found = await asyncio.gather(*(in_thread(look, *pair, until) for pair in zip(receivers, models, strict=True)))
    finally:
        done.set()
        await firing
    assert [wrong[:3] for wrong in found] == [[]] * len(found)


@pytest.mark.requirement(193)
@pytest.mark.promise(4)
@pytest.mark.schemes("all")
@pytest.mark.parametrize("waits", [False, True], ids=["publish", "send"])
async def test_the_version_in_a_hold_is_what_the_model_shows(api: Api, waits: bool) -> None:
    """Of a receiver: what ``version`` exposes."""
    async with api.crew(2, source=Model(1)) as everybody:
        sender, count = everybody.sender, 1

        async def publish() -> None:
            nonlocal count
            count += 1
            give = sender.send_async if waits else sender.publish
            await give(fill(everybody.source, float(count)))

        receivers = [{"policy": receiver} for receiver in everybody.receivers]
        await look_under_fire(receivers, [{"policy": model} for model in everybody.models], publish)


@pytest.mark.requirement(193)
@pytest.mark.schemes("all")
async def test_several_models_switch_their_versions_in_one_pass(api: Api) -> None:
    async with api.bus(num_workers=1) as bus:
        names = ("policy", "value")
        senders = {name: api.scheme(bus=bus) for name in names}
        models = {name: Model() for name in names}
        for name, scheme in senders.items():
            scheme.init_on_sender(model_id=name, model=Model(1))
        receivers = {n: receiver_of(senders[n], 0, models[n], n) for n in names}
        await asyncio.gather(bus.connect(timeout=10), *(r.connect(timeout=10) for r in receivers.values()))
        await bus.send_async({name: Model(3) for name in names})
        assert [receiver.version for receiver in receivers.values()] == [3, 3]
        count, choice = 3, random.Random(0)

        async def publish() -> None:
            nonlocal count
            count += 1
            chosen = choice.choice([names, names[:1], names[1:]])
            await bus.publish({name: Model(float(count)) for name in chosen})

        try:
            await look_under_fire([receivers], [models], publish, until=enough_of_both)
        finally:
            await asyncio.gather(*(receiver.shutdown() for receiver in receivers.values()))
