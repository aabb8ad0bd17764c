"""Several models on one bus, the gate, and what runs where."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncsync import AckTimeout, ClosedError, NotConnected, PartialSendError, SchemaMismatch, WeightStrategy
from helpers import planted
from helpers.apis import Api, is_instant
from helpers.pairs import Clock, Model, Stateful, connected, crew, fill, looking, passed_on, read, receiver_of, until

pytestmark = [pytest.mark.requirement(216), pytest.mark.schemes("every")]

NAMES = ("policy", "value")


@pytest.mark.requirement(199)
@pytest.mark.schemes("all")
@pytest.mark.both_loops
async def test_several_models_in_one_update(api: Api) -> None:
    async with api.family(2, apart=True) as everybody:
        bus, sources = everybody.bus, everybody.sources
        for worker in everybody.workers:
            assert len({id(s.bus) for s in worker.values()}) == 1, "pickled apart: one connection, one gate"
        assert everybody.buses[0] is not everybody.buses[1]
        version = await bus.send_async({"policy": fill(sources["policy"], 5), "value": fill(sources["value"], 5)})
        assert version == bus.version
        assert everybody.read == [{"policy": {5}, "value": {5}}] * 2
        assert [s.version for worker in everybody.workers for s in worker.values()] == [version] * 4
        published = await bus.publish({"policy": Model(6), "value": Model(7)}, worker_ids=1)
        await bus.wait_version(published, timeout=5)
        assert everybody.read == [{"policy": {5}, "value": {5}}, {"policy": {6}, "value": {7}}]
        await everybody.buses[1].wait_version(published, timeout=5)
        await bus.send_async({"value": None})
        assert everybody.read == [{"policy": {5}, "value": {5}}, {"policy": {6}, "value": {5}}]
        assert {w: s.lag for w, s in bus.status().items()} == {0: 0, 1: 0}


@pytest.mark.requirement(199)
@pytest.mark.promise(2)
async def test_a_worker_that_cannot_take_one_of_the_models_takes_none(api: Api) -> None:
    async with api.family(2) as everybody:
        bus, sources = everybody.bus, everybody.sources
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            await bus.send_async({"policy": fill(sources["policy"], 9), "value": Model(9, width=3)}, timeout=5)
        assert {type(e) for e in caught.value.failed.values()} == {SchemaMismatch}
        assert everybody.read == [{"policy": {0}, "value": {0}}] * 2
        await bus.send_async({"policy": None, "value": fill(sources["value"], 9)}, timeout=5)
        assert everybody.read == [{"policy": {9}, "value": {9}}] * 2


@pytest.mark.schemes("all")
@pytest.mark.both_loops
async def test_weights_for_one_worker_take_no_model_of_everybody_along(api: Api) -> None:
    async with api.family(2) as everybody:
        bus, value = everybody.bus, fill(everybody.sources["value"], 7.0)
        one, before = {0: fill(Model(), 5.0)}, bus.version
        with pytest.raises(ValueError, match=r"'policy'.*\['value'\]"):
            await bus.send_async({"policy": one, "value": value})
        with pytest.raises(ValueError, match=r"worker_ids.*\[1\]"):
            await bus.send_async({"policy": one}, [0, 1])
        assert bus.version == before
        assert [worker["value"] for worker in everybody.read] == [{0.0}, {0.0}]
        await bus.send_async({"policy": one | {1: fill(Model(), 6.0)}, "value": value}, timeout=5)
        assert everybody.read == [{"policy": {x}, "value": {7.0}} for x in (5.0, 6.0)]


async def test_connect_again_changes_nothing_of_what_receive_returns(api: Api) -> None:
    async with api.crew(1) as (sender, [receiver], _):
        await sender.send_async(Model(3.0), timeout=5)
        await receiver.connect(timeout=5)
        weights = await receiver.receive(timeout=0.2)
        assert weights is None if is_instant(receiver) else read(weights) == {3.0}


@pytest.mark.schemes("zmq")
async def test_copies_that_learn_their_worker_only_at_connect_say_what_to_do(api: Api) -> None:
    bus = api.bus(num_workers=1)
    schemes = {name: api.scheme(bus=bus) for name in NAMES}
    copies = {name: passed_on(scheme) for name, scheme in schemes.items()}
    for name, scheme in copies.items():
        scheme.init_on_receiver(name, model=Model())
    first = asyncio.create_task(copies["policy"].connect(worker_idx=0, timeout=0.5))
    await until(lambda: copies["policy"].worker_idx == 0)
    with Clock(0.5), pytest.raises(ValueError, match="init_on_receiver"):
        await copies["value"].connect(worker_idx=0, timeout=5)
    with pytest.raises(NotConnected):
        await first
    for scheme in copies.values():
        await scheme.shutdown()


@pytest.mark.schemes("waiting")
async def test_a_bus_is_a_context_manager_that_ends_its_schemes(api: Api) -> None:
    async with api.family() as everybody:
        waiting = asyncio.create_task(everybody.workers[0]["value"].receive())
        await asyncio.sleep(0)
        async with everybody.bus as bus:
            assert not bus.closed
        assert bus.closed
        assert everybody.schemes["policy"].closed
        with pytest.raises(ClosedError):
            await waiting
    with pytest.raises(RuntimeError, match="scheme"):
        await api.bus().connect()


@pytest.mark.requirement(85)
async def test_a_bus_may_be_shut_down_before_it_connects_and_again(api: Api) -> None:
    bus = api.bus(num_workers=1)
    scheme = api.scheme(bus=bus)
    scheme.init_on_sender(model_id="policy", model=Model())
    for _ in range(2):
        await bus.shutdown()
        assert bus.closed
        assert scheme.closed
    for call in (bus.connect, scheme.connect, lambda: bus.publish({"policy": None})):
        with pytest.raises(ClosedError):
            await call()
    with pytest.raises(ClosedError, match="construct another"):
        api.scheme(bus=bus).init_on_sender(model_id="value", model=Model())


# -- whole updates only


@asynccontextmanager
async def in_two_threads(look: Callable[[], set[float]]) -> AsyncIterator[list[set[float]]]:
    """What is seen meanwhile, again and again: afterwards, of one version each time."""
    async with looking(look, threads=2) as seen:
        yield seen
    assert all(len(values) == 1 for values in seen), [values for values in seen if len(values) != 1][:3]


@pytest.mark.requirement(199)
async def test_no_hold_ever_sees_models_of_two_updates(api: Api) -> None:
    async with api.family() as everybody:

        def look() -> set[float]:
            with everybody.buses[0].hold():
                return set.union(*everybody.read[0].values())

        async with in_two_threads(look) as seen:
            for value in count(1):
                await everybody.bus.send_async({n: fill(s, value) for n, s in everybody.sources.items()}, timeout=10)
                if value >= 60 and seen and len(set.union(*seen)) > 10:
                    break


@pytest.mark.requirement(194)
@pytest.mark.promise(3)
@pytest.mark.schemes("all")
@pytest.mark.both_loops
async def test_no_forward_ever_sees_two_versions(api: Api) -> None:
    width = 1 << 15
    async with api.crew(1, source=Model(0, width), models=[Model(width=width)]) as everybody:
        model = everybody.models[0]
        async with in_two_threads(model) as seen:
            for value in count(1):
                version = await everybody.sender.publish(fill(everybody.source, value))
                seen.append(model())
                await asyncio.sleep(0)
                seen.append(model())
                if value % 10 == 0:
                    await everybody.sender.wait_version(version, timeout=10)
                    if value >= 80 and len(set.union(*seen)) > 10:
                        break
        assert read(model) == {value}


# -- threads


def native_threads() -> Counter[str]:
    """ZeroMQ's threads, by name."""
    names = Counter(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return Counter({name: count for name, count in names.items() if name.startswith("ZMQ")})


@pytest.mark.requirement(189)
@pytest.mark.both_loops
async def test_updates_start_the_documented_threads_only() -> None:
    width = 3 << 20
    before, native = set(threading.enumerate()), native_threads()
    async with crew(2) as everybody:
        for value in range(3):
            await everybody.sender.send_async(fill(everybody.source, value))
        assert set(threading.enumerate()) == before, "small ones start none"
    async with crew(1, source=Model(0, width), models=[Model(width=width)]) as everybody:
        await everybody.sender.send_async(fill(everybody.source, 1))
        assert read(await everybody.receivers[0].receive(timeout=5)) == {1}
        started = set(threading.enumerate()) - before
        assert {t.name for t in started} <= {"asyncsync-pack", "asyncsync-copy"}
        assert all(t.daemon for t in started)
        # Each side has a ZeroMQ context of two native threads. (What is called otherwise is torch's.)
        assert sorted((native_threads() - native).elements()) == ["ZMQbg/IO/0"] * 2 + ["ZMQbg/Reaper"] * 2


# -- a model that does not take part, and its neighbours


class Refusing(WeightStrategy):
    """Whose conversion raises for whatever is not zero: a worker accepts the layout, and fails with the update."""

    def convert(self, weights: Any, model: Any) -> Any:
        if read(weights) != {0}:
            raise OSError("it cannot be converted")
        return super().convert(weights, model)


@asynccontextmanager
async def separately(
    api: Api, *, strategy: WeightStrategy | None = None, **value: Any
) -> AsyncIterator[tuple[Any, dict[str, Model], dict[str, Any], dict[str, Model]]]:
    """Two models on one bus, of which only the policy has been sent: the worker's value has another strategy, or
    further arguments of ``init_on_receiver``."""
    bus, sources, models = api.bus(num_workers=1), {n: Model(0) for n in NAMES}, {n: Model() for n in NAMES}
    schemes = {name: api.scheme(bus=bus) for name in NAMES}
    copies = passed_on(schemes)
    if strategy is not None:
        copies["value"].strategy = strategy
    for name in NAMES:
        schemes[name].init_on_sender(model_id=name, model=sources[name] if name == "policy" else None)
        copies[name].init_on_receiver(name, model=models[name], worker_idx=0, **(value if name == "value" else {}))
    async with connected(bus, copies["policy"].bus):
        yield bus, sources, copies, models


@pytest.mark.promise(8)
@pytest.mark.schemes("all")
async def test_a_model_that_cannot_be_converted_does_not_keep_others_from_their_updates(api: Api) -> None:
    """It keeps back those of its own publication, and nothing later."""
    async with separately(api, strategy=Refusing()) as (bus, sources, _, models):
        for value in range(1, 4):
            with Clock(1.0), pytest.raises(PartialSendError) as caught:
                await bus.send_async({"value": fill(sources["value"], value)}, timeout=5)
            assert "it cannot be converted" in str(caught.value.failed[0])
            await bus.send_async({"policy": fill(sources["policy"], value)}, timeout=5)
            assert (read(models["policy"]), read(models["value"])) == ({value}, {-1})
        with Clock(1.0), pytest.raises(PartialSendError):
            await bus.send_async({name: fill(source, 4) for name, source in sources.items()}, timeout=5)
        assert read(models["policy"]) == {3}
        await bus.send_async({"policy": fill(sources["policy"], 5)}, timeout=5)
        assert read(models["policy"]) == {5}


@pytest.mark.schemes("waiting")
async def test_a_model_that_waits_for_receive_keeps_others_from_nothing_and_is_waited_for(api: Api) -> None:
    async with separately(api, apply="on_receive") as (bus, sources, copies, models):
        waiting = await bus.publish({"value": fill(sources["value"], 1)})
        await until(lambda: copies["value"].status()[0].target == waiting)
        for value in range(1, 4):
            newer = await bus.send_async({"policy": fill(sources["policy"], value)}, timeout=5)
            assert (read(models["policy"]), read(models["value"])) == ({value}, {-1})
        below = copies["policy"].bus
        await below.wait_version(newer, timeout=5)
        assert below.status()[0].lag > 0, "of the model that is behind, whatever another one shows"
        await copies["policy"].wait_version(waiting, timeout=5)
        for behind in (below, copies["value"]):
            with pytest.raises(AckTimeout, match=f"version {waiting}"):
                await behind.wait_version(waiting, timeout=0.05)
        assert read(await copies["value"].receive(timeout=5)) == read(models["value"]) == {1}
        await bus.wait_version(waiting, timeout=5)
        await below.wait_version(waiting, timeout=5)


@pytest.mark.schemes("waiting")
async def test_models_of_one_publication_wait_for_receive_together_until_a_newer_one_overtakes(api: Api) -> None:
    async with separately(api, apply="on_receive") as (bus, sources, copies, models):
        both = {name: fill(source, 1) for name, source in sources.items()}
        with pytest.raises(PartialSendError):
            await bus.send_async(both, timeout=0.3)
        assert (read(models["policy"]), read(models["value"])) == ({0}, {-1})
        await bus.send_async({"policy": fill(sources["policy"], 2)}, timeout=5)
        assert (read(models["policy"]), read(models["value"])) == ({2}, {-1})
        assert read(await copies["value"].receive(timeout=5)) == {1}
        assert (read(models["policy"]), read(models["value"])) == ({2}, {1})
        later = await bus.publish({name: fill(source, 3) for name, source in sources.items()})
        assert read(await copies["value"].receive(timeout=5)) == {3}
        assert (read(models["policy"]), read(models["value"])) == ({3}, {3})
        await bus.wait_version(later, timeout=5)


@pytest.mark.schemes("all")
async def test_extra_state_that_cannot_be_set_leaves_no_tensor_behind(api: Api) -> None:
    """Not of its own model, and not of those that switch together with it."""
    async with api.family(model=Stateful, make=lambda _, bus: api.scheme("state_dict", bus=bus)) as everybody:
        policy = everybody.models[0]["policy"]
        policy.broken = True
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            await everybody.bus.send_async({n: fill(s, 5) for n, s in everybody.sources.items()}, timeout=5)
        assert "the state cannot be set" in str(caught.value.failed[0])
        assert everybody.read == [{"policy": {5}, "value": {5}}]
        with pytest.raises(OSError, match="the state cannot be set"):  # of the one that waits there, too
            await everybody.buses[0].wait_version(everybody.bus.version, timeout=5)
        policy.broken, policy.state = False, 0
        await everybody.bus.send_async({n: fill(s, 6) for n, s in everybody.sources.items()}, timeout=5)
        assert (everybody.read, policy.state) == ([{"policy": {6}, "value": {6}}], 7)


@pytest.mark.schemes("zmq")
async def test_a_model_that_is_not_connected_yet_cannot_be_published_and_leaves_nothing(api: Api) -> None:
    async with api.bus(num_workers=1) as bus:
        there, missing = (api.scheme(bus=bus) for _ in range(2))
        there.init_on_sender(model_id="there", model=Model(1))
        missing.init_on_sender(model_id="missing", model=Model(1))
        async with connected(there, receiver_of(there, 0, model := Model(), "there")):
            for _ in range(3):
                with pytest.raises(NotConnected, match=r"schemes for \['missing'\] are not connected"):
                    await bus.publish({"there": Model(2), "missing": Model(2)})
            assert (bus.version, planted.pool(there).slabs <= 2) == (1, True)
            await there.send_async(Model(3))
            assert read(model) == {3}


@pytest.mark.schemes("some")
async def test_a_scheme_that_moves_nothing_takes_no_part_in_a_bus(api: Api) -> None:
    async with api.bus(num_workers=1) as bus:
        moved, still = api.scheme(bus=bus), api.make(api.NoWeightSyncScheme, bus=bus, num_workers=3)
        assert bus.num_workers == 1
        copies, source, model = passed_on({"policy": moved, "value": still}), Model(0), Model()
        still.init_on_sender(model_id="value", model=Model(0), num_workers=3)
        moved.init_on_sender(model_id="policy", model=source)
        copies["value"].init_on_receiver("value", model=(other := Model()), worker_idx=2)
        copies["policy"].init_on_receiver("policy", model=model, worker_idx=0)
        async with connected(bus, copies["policy"].bus):
            await still.connect()
            assert await still.publish() == 1
            await bus.send_async({"policy": fill(source, 2)}, timeout=5)
            with pytest.raises(ValueError, match="value"):
                await bus.publish({"value": None})
            await copies["value"].shutdown()
            await still.shutdown()
            await bus.send_async({"policy": fill(source, 3)}, timeout=5)
            assert (read(model), read(other), still.version) == ({3}, {-1}, 1)
        with pytest.raises(TypeError, match="Bus"):
            api.make(api.NoWeightSyncScheme, bus=api.other.bus())
        with pytest.raises(ValueError, match="nothing travels"):
            api.scheme(bus=still.bus).init_on_sender(model_id="policy", model=Model(0))
