"""One scheme for workers of this host and of others. The common suites run it, too, with one of two elsewhere."""

import asyncio

import pytest

from asyncsync import AutoWeightSyncScheme, PartialSendError, PeerLost
from helpers import planted
from helpers.apis import ASYNCIO, BLOCKING, Api
from helpers.elsewhere import FarWorker, claim_another_host
from helpers.pairs import Model, fill, read, receiver_of
from helpers.processes import Filled, Worker, eventually, impatient, processes
from helpers.shared_workers import MIB, slots_in_sight

AUTO = [Api("asyncio", ASYNCIO.module, "Auto", is_far=True), Api("blocking", BLOCKING.module, "Auto", is_far=True)]
both = pytest.mark.parametrize("auto", AUTO, ids=repr)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of odd indices are on another host."""
    claim_another_host(monkeypatch, lambda worker: worker % 2 == 1)


@pytest.mark.requirement(203)
def test_its_arguments_are_those_of_both_ways() -> None:
    for options, word in (
        ({"slots": 1}, "slots"),
        ({"map_above": -1}, "map_above"),
        ({"compress": "gzip"}, "compress"),
        ({"endpoint": "tcp://0.0.0.0:5555"}, "allow_plaintext"),
    ):
        with pytest.raises(ValueError, match=word):
            AutoWeightSyncScheme(**options)
    keyed = AutoWeightSyncScheme(endpoint="tcp://0.0.0.0:5555", server_key="s", clients="c")
    assert keyed.bus.endpoint == "tcp://0.0.0.0:5555"
    monitoring = AutoWeightSyncScheme(metrics_port=9100, tracing=False).bus.monitoring
    assert (monitoring.address, monitoring.tracing) == (("127.0.0.1", 9100), False)


@both
async def test_one_update_reaches_both_by_their_own_ways(auto: Api, far: None) -> None:
    source, models = Filled(2 * MIB, 1.0), [Filled(2 * MIB) for _ in range(4)]
    async with auto.crew(4, scheme=auto.scheme(map_above=0), source=source, models=models) as (sender, _, _):
        for value in range(2, 5):
            await sender.send_async(source.fill(value))
            assert [model.value for model in models] == [value] * 4
            for model in models:
                model.fill(-1.0)  # what a worker writes stays its own
        sent = [sender.status()[i].bytes_sent for i in range(4)]
        assert sent == [0, 4 * (2 << 20), 0, 4 * (2 << 20)]
        assert [all(map(planted.lies_in_a_slab, model.parameters())) for model in models] == [True] * 4
        inside = [{p.data_ptr() for p in model.parameters()} for model in models]
        assert len(set.union(*inside)) == 4 * 8, "each has a mapping of its own"
        pool = sender.shared_transport.pool
        assert pool.peak <= pool.slots_allowed
        assert planted.pool(sender).slabs == 0, "packed once, into a slot"


@both
async def test_small_weights_ride_in_the_instruction_or_are_copied_from_the_slot(auto: Api, far: None) -> None:
    async with auto.crew(2, scheme=auto.scheme(), source=(source := Model(1))) as (sender, _, models):
        for value in (2, 3, 4):
            await sender.send_async(fill(source, value))
            assert [model() for model in models] == [{value}, {value}]
        assert sender.status()[0].bytes_sent == 0
        assert 0 < sender.status()[1].bytes_sent < 64 << 10
        await sender.send_async({0: Model(5), 1: Model(6)})
        assert [model() for model in models] == [{5}, {6}]


@both
async def test_no_update_names_a_slot_to_workers_that_cannot_open_it(
    auto: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_another_host(monkeypatch, lambda worker: True)
    planted.open_no_slot(monkeypatch)
    async with auto.crew(2, scheme=auto.scheme(), source=(source := Model(1))) as (sender, _, models):
        for value in range(2, 9):
            await sender.send_async(fill(source, value))
            assert [model() for model in models] == [{value}, {value}]


@both
async def test_a_far_worker_that_comes_again_gets_what_is_in_the_slot_now(auto: Api, far: None) -> None:
    """The fast path of those on this host has meanwhile written where a version was that the far one had been sent."""
    sender = auto.sender(source := Model(0.0), scheme={"min_workers": 1})
    models = [Model() for _ in range(3)]
    far_one, near, again = (receiver_of(sender, index, model) for index, model in zip((1, 0, 1), models, strict=True))
    async with sender, near, again:
        async with far_one:
            await asyncio.gather(sender.connect(timeout=10), far_one.connect(timeout=10))
            await near.connect(timeout=10)
            await sender.send_async(fill(source, 1.0), timeout=10)
            assert read(models[0]) == {1.0}
        for value in range(2, 6):
            await sender.send_async(fill(source, float(value)), timeout=10)
        await again.connect(timeout=10)
        assert read(models[2]) == {5.0}


@both
async def test_a_far_worker_gets_what_has_changed_out_of_a_slot(auto: Api, far: None) -> None:
    source, models = Filled(2 * MIB, 1.0), [Filled(2 * MIB) for _ in range(2)]
    scheme = auto.scheme(map_above=0, slots=2, delta=True, compress="zstd")
    async with auto.crew(2, scheme=scheme, source=source, models=models) as (sender, _, _):
        for value in range(2, 7):
            await sender.send_async(source.fill(value))
            assert [model.value for model in models] == [value] * 2
        await sender.send_async()
        before = sender.status()[1].bytes_sent
        await sender.send_async()
        assert sender.status()[1].bytes_sent == before, "nothing has changed"
        assert sender.shared_transport.pool.peak <= 4, "two slots, the base, and one that is being freed"


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_the_end_of_a_near_worker_is_known_at_once_and_that_of_a_far_one_by_its_silence() -> None:
    sender = AutoWeightSyncScheme(num_workers=2, map_above=0)
    impatient(sender)
    sender.init_on_sender(model_id="policy", model=Filled(MIB, 1.0))
    async with processes() as start:
        near, away = start(Worker), start(FarWorker)
        async with sender:
            await asyncio.gather(sender.connect(), near.connect(sender, 0, MIB), away.connect(sender, 1, MIB))
            await sender.send_async(sender.model.fill(2.0))
            assert [await near.value(), await away.value()] == [2.0, 2.0]
            await near.kill()
            await eventually(lambda: sender.status()[0].state == "lost", 2.0)
            assert sender.status()[1].state == "live"
            await away.kill()
            await eventually(lambda: sender.status()[1].state == "lost", 20.0, sender.status)
            with pytest.raises(PartialSendError) as caught:
                await sender.send_async(sender.model.fill(3.0), timeout=5)
            assert {type(error) for error in caught.value.failed.values()} == {PeerLost}
            for value in (4.0, 5.0, 6.0, 7.0, 8.0):
                await sender.publish(sender.model.fill(value))  # slots come back from both
        assert len(slots_in_sight()) == 0
