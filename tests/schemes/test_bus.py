"""Several models on one bus, the gate, and what runs where."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncsync import AckTimeout, ClosedError, NotConnected, PartialSendError, SchemaMismatch, WeightStrategy
from helpers.apis import Api
from helpers.pairs import Clock, Model, crew, fill, passed_on, read, receiver_of, until

pytestmark = pytest.mark.schemes("every")

NAMES = ("policy", "value")


class Worker:
    """What one worker process has: its schemes, their models, and the bus they share."""

    def __init__(self, schemes: dict[str, Any], index: int, **models: Any) -> None:
        self.schemes = schemes
        self.models = {name: models.get(name) or Model() for name in schemes}
        for name, scheme in schemes.items():
            scheme.init_on_receiver(name, model=self.models[name], worker_idx=index)
        self.bus = next(iter(schemes.values())).bus

    @property
    def read(self) -> dict[str, set[float]]:
        return {name: read(model) for name, model in self.models.items()}


@asynccontextmanager
async def family(
    api: Api, workers: int = 2, *, apart: bool = False
) -> AsyncIterator[tuple[Any, dict[str, Model], list[Worker]]]:
    """A bus with two models and its workers, connected."""
    async with api.bus(num_workers=workers) as bus:
        sources = {name: Model(0) for name in NAMES}
        schemes = {name: api.scheme(bus=bus) for name in NAMES}
        for name, scheme in schemes.items():
            scheme.init_on_sender(model_id=name, model=sources[name])
        crews = []
        for index in range(workers):
            given = {n: passed_on(s) for n, s in schemes.items()} if apart else passed_on(schemes)
            crews.append(Worker(given, index))
        try:
            await asyncio.gather(bus.connect(timeout=5), *(w.bus.connect(timeout=5) for w in crews))
            yield bus, sources, crews
        finally:
            for worker in crews:
                await worker.bus.shutdown()


@pytest.mark.requirement(199, 216)
@pytest.mark.schemes("all")
@pytest.mark.both_loops
async def test_several_models_in_one_update(api: Api) -> None:
    async with family(api) as (bus, sources, workers):
        version = await bus.send_async({"policy": fill(sources["policy"], 5), "value": fill(sources["value"], 5)})
        assert version == bus.version
        assert [w.read for w in workers] == [{"policy": {5}, "value": {5}}] * 2
        assert [s.version for w in workers for s in w.schemes.values()] == [version] * 4
        published = await bus.publish({"policy": Model(6), "value": Model(7)}, worker_ids=1)
        await bus.wait_version(published, timeout=5)
        assert [w.read for w in workers] == [{"policy": {5}, "value": {5}}, {"policy": {6}, "value": {7}}]
        await workers[1].bus.wait_version(published, timeout=5)
        await bus.send_async({"value": None})
        assert [w.read for w in workers] == [{"policy": {5}, "value": {5}}, {"policy": {6}, "value": {5}}]
        assert {w: s.lag for w, s in bus.status().items()} == {0: 0, 1: 0}


@pytest.mark.requirement(199)
@pytest.mark.promise(2)
async def test_a_worker_that_cannot_take_one_of_the_models_takes_none(api: Api) -> None:
    async with family(api) as (bus, sources, workers):
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            await bus.send_async({"policy": fill(sources["policy"], 9), "value": Model(9, width=3)}, timeout=5)
        assert {type(e) for e in caught.value.failed.values()} == {SchemaMismatch}
        assert [w.read for w in workers] == [{"policy": {0}, "value": {0}}] * 2
        await bus.send_async({"policy": None, "value": fill(sources["value"], 9)}, timeout=5)
        assert [w.read for w in workers] == [{"policy": {9}, "value": {9}}] * 2


@pytest.mark.requirement(216)
@pytest.mark.schemes("all")
@pytest.mark.both_loops
async def test_weights_for_one_worker_take_no_model_of_everybody_along(api: Api) -> None:
    async with family(api) as (bus, sources, workers):
        one, before = {0: fill(Model(), 5.0)}, bus.version
        with pytest.raises(ValueError, match=r"'policy' has weights for single workers, and \['value'\] for everybody"):
            await bus.send_async({"policy": one, "value": fill(sources["value"], 7.0)})
        assert bus.version == before
        assert [worker.read["value"] for worker in workers] == [{0.0}, {0.0}]
        await bus.send_async({"policy": one | {1: fill(Model(), 6.0)}, "value": sources["value"]}, timeout=5)
        assert [worker.read for worker in workers] == [{"policy": {x}, "value": {7.0}} for x in (5.0, 6.0)]


@pytest.mark.requirement(216)
async def test_workers_without_weights_of_their_own_are_not_among_worker_ids(api: Api) -> None:
    async with family(api) as (bus, *_):
        before = bus.version
        with pytest.raises(ValueError, match=r"worker_ids names workers \[1\], for which there are no weights"):
            await bus.send_async({"policy": {0: Model(2.0)}}, [0, 1])
        assert bus.version == before


async def test_connect_again_returns_no_update(api: Api) -> None:
    found = []
    for again in (False, True):
        scheme = api.scheme(num_workers=1)
        scheme.init_on_sender(model_id="policy")
        async with scheme, receiver_of(scheme, 0, Model(0)) as receiver:
            await asyncio.gather(scheme.connect(timeout=5), receiver.connect(timeout=5))
            await scheme.send_async(Model(3.0), timeout=5)
            if again:
                await receiver.connect(timeout=5)
            weights = await receiver.receive(timeout=0.2)
            found.append(None if weights is None else read(weights))
    assert found[0] == found[1]


async def test_wait_version_ends_with_what_could_not_be_applied(api: Api) -> None:
    scheme = api.scheme(num_workers=1)
    scheme.init_on_sender(model_id="policy", model=Model(0))

    class Failing(Model):
        fails = False

        def get_extra_state(self) -> Any:
            return 0

        def set_extra_state(self, state: Any) -> None:
            if self.fails:
                raise LookupError("my own trouble")

    model = Failing(0)
    other = Failing(1.0)
    async with scheme, receiver_of(scheme, 0, model) as receiver:
        await asyncio.gather(scheme.connect(weights=other, timeout=5), receiver.connect(timeout=5))
        model.fails = True
        with pytest.raises(PartialSendError):
            await scheme.send_async(fill(other, 2.0), timeout=5)
        async with asyncio.timeout(5):
            with pytest.raises(LookupError, match="my own trouble"):
                await receiver.wait_version(scheme.version, timeout=30)


@pytest.mark.requirement(199)
async def test_no_hold_ever_sees_models_of_two_updates(api: Api) -> None:
    async with family(api, 1) as (bus, sources, (worker,)):
        stop = threading.Event()
        seen: list[set[float]] = []

        def look() -> None:
            while not stop.is_set():
                with worker.bus.hold():
                    seen.append(read(worker.models["policy"]) | read(worker.models["value"]))

        readers = [asyncio.create_task(asyncio.to_thread(look)) for _ in range(2)]
        try:
            for value in count(1):
                for source in sources.values():
                    fill(source, value)
                await bus.send_async(dict(sources), timeout=10)
                if value >= 60 and seen and len(set.union(*seen)) > 10:
                    break
        finally:
            stop.set()
            await asyncio.gather(*readers)
        assert all(len(values) == 1 for values in seen), [v for v in seen if len(v) > 1][:3]


@pytest.mark.requirement(216)
async def test_separately_pickled_schemes_of_one_bus_find_each_other(api: Api) -> None:
    async with family(api, apart=True) as (bus, sources, workers):
        for worker in workers:
            assert len({id(s.bus) for s in worker.schemes.values()}) == 1, "one connection, one gate"
        assert workers[0].bus is not workers[1].bus
        await bus.send_async({name: fill(source, 3) for name, source in sources.items()})
        assert [w.read for w in workers] == [{"policy": {3}, "value": {3}}] * 2


@pytest.mark.requirement(216)
@pytest.mark.schemes("zmq")
async def test_copies_that_learn_their_worker_only_at_connect_say_what_to_do(api: Api) -> None:
    bus = api.bus(num_workers=1)
    schemes = {name: api.scheme(bus=bus) for name in NAMES}
    copies = {name: passed_on(scheme) for name, scheme in schemes.items()}
    for name, scheme in copies.items():
        scheme.init_on_receiver(name, model=Model())
    first = asyncio.create_task(copies["policy"].connect(worker_idx=0, timeout=0.5))
    await until(lambda: copies["policy"].worker_idx == 0)
    with Clock(0.5), pytest.raises(ValueError, match=r"pass worker_idx to init_on_receiver"):
        await copies["value"].connect(worker_idx=0, timeout=5)
    with pytest.raises(NotConnected):
        await first
    for scheme in copies.values():
        await scheme.shutdown()


@pytest.mark.requirement(216)
@pytest.mark.schemes("waiting")
async def test_a_bus_is_a_context_manager_that_ends_its_schemes(api: Api) -> None:
    async with family(api, 1) as (bus, _, (worker,)):
        waiting = asyncio.create_task(worker.schemes["value"].receive())
        await asyncio.sleep(0)
        scheme = bus._schemes["policy"]
    assert bus.closed
    assert scheme.closed
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await bus.publish({"policy": Model()})
    with pytest.raises(RuntimeError, match="no scheme of this bus has been initialised"):
        await api.bus().connect()


@pytest.mark.requirement(85, 216)
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


@pytest.mark.requirement(216)
@pytest.mark.schemes("zmq")
async def test_a_bus_pickles_as_its_configuration(api: Api) -> None:
    bus = api.bus(num_workers=2, min_workers=1, checksum=True)
    copy = pickle.loads(pickle.dumps(bus))
    names = ("endpoint", "connect_endpoint", "num_workers", "min_workers", "allow_plaintext", "checksum")
    assert [getattr(copy, n) for n in names] == [getattr(bus, n) for n in names]


# -- whole updates only


@pytest.mark.requirement(194)
@pytest.mark.promise(3)
@pytest.mark.schemes("all")
@pytest.mark.both_loops
@pytest.mark.parametrize("endpoint", ["ipc", "tcp"])
async def test_no_forward_ever_sees_two_versions(api: Api, endpoint: str, unused_tcp_port: int) -> None:
    width = 1 << 15
    scheme = api.scheme(endpoint=f"tcp://127.0.0.1:{unused_tcp_port}" if endpoint == "tcp" else None)
    async with api.crew(1, scheme=scheme, source=Model(0, width), models=[Model(width=width)]) as everybody:
        model = everybody.models[0]
        stop = threading.Event()
        seen: list[set[float]] = []

        def roll_out() -> None:
            while not stop.is_set():
                seen.append(model())

        rollers = [asyncio.create_task(asyncio.to_thread(roll_out)) for _ in range(2)]
        try:
            for value in count(1):
                version = await everybody.sender.publish(fill(everybody.source, value))
                seen.append(model())
                await asyncio.sleep(0)
                seen.append(model())
                if value % 10 == 0:
                    await everybody.sender.wait_version(version, timeout=10)
                    if value >= 80 and len(set.union(*seen)) > 10:
                        break
        finally:
            stop.set()
            await asyncio.gather(*rollers)
        torn = [values for values in seen if len(values) != 1]
        assert not torn, torn[:3]
        assert read(model) == {value}


@pytest.mark.requirement(25)
async def test_a_pending_update_never_blocks_the_workers_loop() -> None:
    async with crew(1) as everybody:
        receiver, model = everybody.receivers[0], everybody.models[0]
        leave, inside = threading.Event(), threading.Event()

        def slow_step() -> None:
            with receiver.hold():
                inside.set()
                leave.wait(10)

        step = asyncio.create_task(asyncio.to_thread(slow_step))
        await until(inside.is_set)
        version = await everybody.sender.publish(fill(everybody.source, 1))
        await until(lambda: receiver.bus._gate is not None and receiver.bus._gate.pending)
        with Clock(0.1):
            assert model() == {0}, "a forward on the loop goes on with the old version"
            assert await receiver.receive(timeout=0) is None
        leave.set()
        await step
        await everybody.sender.wait_version(version, timeout=5)
        assert model() == {1}


# -- threads


def native_threads() -> Counter[str]:
    """ZeroMQ's threads, by name."""
    names = Counter(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return Counter({name: count for name, count in names.items() if name.startswith("ZMQ")})


@pytest.mark.requirement(189)
@pytest.mark.both_loops
async def test_small_updates_start_no_thread_of_ours() -> None:
    before = set(threading.enumerate())
    async with crew(2) as everybody:
        for value in range(3):
            await everybody.sender.send_async(fill(everybody.source, value))
            await everybody.receivers[0].receive(timeout=5)
        assert set(threading.enumerate()) == before


@pytest.mark.requirement(189)
async def test_large_updates_start_the_documented_threads_only() -> None:
    width = 3 << 20
    before, native = set(threading.enumerate()), native_threads()
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
    async with api.bus(num_workers=1) as bus:
        sources = {name: Model(0) for name in NAMES}
        schemes = {name: api.scheme(bus=bus) for name in NAMES}
        copies = passed_on(schemes)
        if strategy is not None:
            copies["value"].strategy = strategy
        schemes["policy"].init_on_sender(model_id="policy", model=sources["policy"])
        schemes["value"].init_on_sender(model_id="value")
        models = {name: Model() for name in NAMES}
        copies["policy"].init_on_receiver("policy", model=models["policy"], worker_idx=0)
        copies["value"].init_on_receiver("value", model=models["value"], worker_idx=0, **value)
        below = copies["policy"].bus
        try:
            await asyncio.gather(bus.connect(timeout=5), below.connect(timeout=5))
            yield bus, sources, copies, models
        finally:
            await below.shutdown()


@pytest.mark.promise(8)
@pytest.mark.schemes("all")
async def test_a_model_that_cannot_be_converted_does_not_keep_others_from_their_updates(api: Api) -> None:
    async with separately(api, strategy=Refusing()) as (bus, sources, _, models):
        for value in range(1, 4):
            with Clock(1.0), pytest.raises(PartialSendError) as caught:
                await bus.send_async({"value": fill(sources["value"], value)}, timeout=5)
            assert "it cannot be converted" in str(caught.value.failed[0])
            await bus.send_async({"policy": fill(sources["policy"], value)}, timeout=5)
            assert (read(models["policy"]), read(models["value"])) == ({value}, {-1})


@pytest.mark.promise(8)
@pytest.mark.schemes("all")
async def test_what_cannot_be_converted_keeps_its_siblings_of_one_publication_back_and_nothing_later(api: Api) -> None:
    async with separately(api, strategy=Refusing()) as (bus, sources, _, models):
        with Clock(1.0), pytest.raises(PartialSendError):
            await bus.send_async({name: fill(source, 1) for name, source in sources.items()}, timeout=5)
        assert read(models["policy"]) == {0}
        await bus.send_async({"policy": fill(sources["policy"], 2)}, timeout=5)
        assert read(models["policy"]) == {2}


@pytest.mark.schemes("waiting")
async def test_a_model_that_waits_for_receive_does_not_keep_others_waiting(api: Api) -> None:
    async with separately(api, apply="on_receive") as (bus, sources, copies, models):
        waiting = await bus.publish({"value": fill(sources["value"], 1)})
        for value in range(1, 4):
            await bus.send_async({"policy": fill(sources["policy"], value)}, timeout=5)
            assert (read(models["policy"]), read(models["value"])) == ({value}, {-1})
        assert read(await copies["value"].receive(timeout=5)) == {1}
        assert read(models["value"]) == {1}
        await bus.wait_version(waiting, timeout=5)


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


class Stateful(Model):
    """With extra state, which cannot always be set."""

    state = 0
    broken = False

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        if self.broken:
            raise OSError("the state cannot be set")
        self.state = state


@pytest.mark.schemes("all")
async def test_extra_state_that_cannot_be_set_leaves_no_tensor_behind(api: Api) -> None:
    """Not of its own model, and not of those that switch together with it."""
    async with api.bus(num_workers=1) as bus:
        sources = {"policy": Stateful(0), "value": Model(0)}
        schemes = {name: api.scheme("state_dict", bus=bus) for name in NAMES}
        for name, scheme in schemes.items():
            scheme.init_on_sender(model_id=name, model=sources[name])
        worker = Worker(passed_on(schemes), 0, policy=(policy := Stateful()))
        try:
            await asyncio.gather(bus.connect(timeout=5), worker.bus.connect(timeout=5))
            policy.broken = True
            with Clock(1.0), pytest.raises(PartialSendError) as caught:
                await bus.send_async({name: fill(source, 5) for name, source in sources.items()}, timeout=5)
            assert "the state cannot be set" in str(caught.value.failed[0])
            assert worker.read == {"policy": {5}, "value": {5}}
            policy.broken, policy.state = False, 0
            await bus.send_async({name: fill(source, 6) for name, source in sources.items()}, timeout=5)
            assert (worker.read, policy.state) == ({"policy": {6}, "value": {6}}, 7)
        finally:
            await worker.bus.shutdown()


@pytest.mark.schemes("waiting")
async def test_a_worker_waits_for_a_version_of_every_model_that_it_is_told_of(api: Api) -> None:
    async with separately(api, apply="on_receive") as (bus, sources, copies, _):
        waiting = await bus.publish({"value": fill(sources["value"], 1)})
        await until(lambda: copies["value"].status()[0].target == waiting)
        newer = await bus.send_async({"policy": fill(sources["policy"], 2)}, timeout=5)
        below = copies["policy"].bus
        await below.wait_version(newer, timeout=5)
        assert below.status()[0].lag > 0, "of the model that is behind, whatever another one shows"
        await copies["policy"].wait_version(waiting, timeout=5)
        for behind in (below, copies["value"]):
            with pytest.raises(AckTimeout, match=f"had not applied version {waiting}"):
                await behind.wait_version(waiting, timeout=0.05)
        assert read(await copies["value"].receive(timeout=5)) == {1}
        await below.wait_version(waiting, timeout=5)


async def test_a_scheme_that_moves_nothing_takes_no_part_in_a_bus(api: Api) -> None:
    async with api.bus(num_workers=1) as bus:
        moved, still = api.scheme(bus=bus), api.make(api.NoWeightSyncScheme, bus=bus, num_workers=3)
        assert bus.num_workers == 1
        copies, source, model = passed_on({"policy": moved, "value": still}), Model(0), Model()
        still.init_on_sender(model_id="value", model=Model(0), num_workers=3)
        moved.init_on_sender(model_id="policy", model=source)
        copies["value"].init_on_receiver("value", model=(other := Model()), worker_idx=2)
        copies["policy"].init_on_receiver("policy", model=model, worker_idx=0)
        below = copies["policy"].bus
        try:
            await asyncio.gather(bus.connect(timeout=5), below.connect(timeout=5))
            await still.connect()
            assert await still.publish() == 1
            await bus.send_async({"policy": fill(source, 2)}, timeout=5)
            with pytest.raises(ValueError, match="unknown model_id"):
                await bus.publish({"value": None})
            await copies["value"].shutdown()
            await still.shutdown()
            await bus.send_async({"policy": fill(source, 3)}, timeout=5)
            assert (read(model), read(other), still.version) == ({3}, {-1}, 1)
        finally:
            await below.shutdown()
        with pytest.raises(TypeError, match=r"needs a .*Bus"):
            api.make(api.NoWeightSyncScheme, bus=api.other.bus())
