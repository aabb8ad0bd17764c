"""A scheme that is shut down, on a bus that others share, takes its model along; the others go on."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from asyncsync import ClosedError, NotConnected, PartialSendError
from helpers import planted
from helpers.apis import Api, Family
from helpers.pairs import Clock, Model, connected, fill, held, passed_on, read, until

pytestmark = pytest.mark.requirement(216)


def parts_of(everybody: Family) -> tuple[Any, dict[str, Model], dict[str, Any], dict[str, Model]]:
    """The sender's bus and its sources, and the worker's schemes with their models."""
    return everybody.bus, everybody.sources, everybody.workers[0], everybody.models[0]


@pytest.mark.schemes("all")
async def test_a_model_stays_as_it_is_when_its_scheme_was_shut_down_and_another_scheme_may_come(api: Api) -> None:
    async with api.family() as everybody:
        bus, sources, copies, models = parts_of(everybody)
        await bus.send_async({name: fill(source, 1) for name, source in sources.items()}, timeout=5)
        with Clock(1.0):
            await copies["policy"].shutdown()
        await copies["policy"].shutdown()
        assert copies["policy"].closed
        assert not copies["value"].closed
        for value in (2, 3):
            version = await bus.publish({name: fill(source, value) for name, source in sources.items()})
            await bus.wait_version(version, timeout=5)
            assert {name: read(model) for name, model in models.items()} == {"policy": {1}, "value": {value}}
        with pytest.raises(NotConnected, match=r"\['value'\]"):
            await bus.send_async({"policy": None}, timeout=5)
        with pytest.raises(PartialSendError, match="worker 0"):
            await everybody.schemes["policy"].wait_version(bus.version, [0], timeout=5)
        with pytest.raises(ClosedError):
            copies["policy"].hold()
        another, fresh = api.scheme(bus=copies["value"].bus), Model()
        another.init_on_receiver("policy", model=fresh, worker_idx=0)
        await another.connect(timeout=5)
        await bus.send_async({name: fill(source, 4) for name, source in sources.items()}, timeout=5)
        assert [read(fresh), read(models["value"]), read(models["policy"])] == [{4}, {4}, {1}]


@pytest.mark.schemes("all")
async def test_a_scheme_that_was_shut_down_counts_no_more_among_those_of_its_bus(api: Api) -> None:
    async with api.family() as everybody:
        bus, sources, copies, _ = parts_of(everybody)
        below = copies["value"].bus
        await bus.send_async({"policy": fill(sources["policy"], 1)}, timeout=5)
        newest = await bus.send_async({"value": fill(sources["value"], 1)}, timeout=5)
        await copies["value"].shutdown()
        assert below.version == newest - 1
        newest = await bus.publish({"value": None})
        assert await below.wait_lag(0, timeout=5) == newest - 2
        assert below.status()[0].lag == 0


@pytest.mark.schemes("some")
async def test_models_that_come_and_go_leave_nothing_behind(api: Api) -> None:
    class Actor(Model):
        def act(self) -> set[float]:
            return read(self)

    async with api.family() as everybody:
        _, _, copies, _ = parts_of(everybody)
        below, gone = copies["value"].bus, []
        await copies["policy"].shutdown()
        for _ in range(3):
            scheme, model = api.scheme(bus=below), Actor()
            scheme.init_on_receiver("policy", model=model, worker_idx=0, gated=("act",))
            await scheme.connect(timeout=5)
            assert model.act() == {0}
            await scheme.shutdown()
            gone.append(weakref.ref(model))
            del scheme, model
        gc.collect()
        assert [reference() for reference in gone] == [None] * 3


@pytest.mark.schemes("waiting")
async def test_whoever_waits_for_a_model_that_leaves_is_told(api: Api) -> None:
    async with api.family(apply="on_receive") as everybody:
        bus, sources, copies, _ = parts_of(everybody)
        policy = copies["policy"]
        behind = await bus.publish({"policy": fill(sources["policy"], 1)})
        await until(lambda: policy.status()[0].target == behind)
        waiting = [
            asyncio.create_task(call)
            for call in (policy.wait_version(behind, timeout=30), policy.wait_version(behind + 1, timeout=30))
        ]
        with held(policy):
            waiting += [asyncio.create_task(policy.fetch(timeout=30)), asyncio.create_task(policy.wait_lag(0, 30))]
            await asyncio.sleep(0.05)
            with Clock(1.0):
                await policy.shutdown()
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ClosedError] * 4, outcomes


@pytest.mark.schemes("all")
async def test_an_update_that_waits_for_a_reader_comes_to_the_other_models_alone(api: Api) -> None:
    async with api.family() as everybody:
        bus, sources, copies, models = parts_of(everybody)
        with held(copies["policy"]):
            version = await bus.publish({name: fill(source, 1) for name, source in sources.items()})
            await until(lambda: planted.pending(copies["value"]))
            await copies["policy"].shutdown()
        await bus.wait_version(version, timeout=5)
        assert {name: read(model) for name, model in models.items()} == {"policy": {0}, "value": {1}}


@pytest.mark.schemes("every")
async def test_calls_of_a_model_that_has_left_keep_no_update_waiting(api: Api) -> None:
    async with api.family() as everybody:
        _, _, copies, models = parts_of(everybody)
        gate, policy = copies["value"].bus.gate, models["policy"]
        inside: list[int] = []
        policy.inner.register_forward_hook(lambda *_: inside.append(gate.readers))
        policy.forward = lambda: policy.inner(policy.inner.weight[:1])
        policy()
        await copies["policy"].shutdown()
        policy()
        assert inside == [1, 0]


@pytest.mark.schemes("every")
async def test_one_model_under_two_names_is_gated_until_both_have_left(api: Api) -> None:
    async with api.bus(num_workers=1) as bus:
        schemes = {name: api.scheme(bus=bus, include=part) for name, part in {"a": "first", "b": "inner.*"}.items()}
        copies, model, source = passed_on(schemes), Model(), Model(0)
        for name, scheme in schemes.items():
            scheme.init_on_sender(model_id=name, model=source)
            copies[name].init_on_receiver(name, model=model, worker_idx=0)
        async with connected(bus, below := copies["a"].bus):
            counted: list[int] = []
            model.inner.register_forward_hook(lambda *_: counted.append(below.gate.readers))
            model.forward = lambda: model.inner(model.inner.weight[:1])
            await copies["a"].shutdown()
            model()
            assert counted == [1]
        assert not model._forward_hooks


@pytest.mark.schemes("mapped")
async def test_what_a_model_that_has_left_lies_in_is_written_no_more_and_its_slot_is_free(api: Api) -> None:
    async with api.family(model=lambda value: Model(value, 1 << 15)) as everybody:
        bus, sources, copies, models = parts_of(everybody)
        await bus.send_async({name: fill(source, 1) for name, source in sources.items()}, timeout=5)
        await copies["policy"].shutdown()
        for value in range(2, 12):  # more than there are slots
            await bus.send_async({"value": fill(sources["value"], value)}, timeout=5)
            await bus.publish({"policy": fill(sources["policy"], value)})
        assert {name: read(model) for name, model in models.items()} == {"policy": {1}, "value": {11}}
