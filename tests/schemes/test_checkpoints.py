"""A trainer that goes on from a checkpoint counts its versions on from there."""

from pathlib import Path

import pytest
import torch

from asyncsync import ClosedError
from helpers.apis import Api
from helpers.pairs import Model, connected, fill, passed_on, receiver_of

pytestmark = pytest.mark.schemes("every")


@pytest.mark.parametrize("when", ["before init", "before connect", "after connect"])
async def test_versions_go_on_from_a_checkpoint(api: Api, when: str, tmp_path: Path) -> None:
    async with api.crew(1, source=Model(1)) as (first, _, _):
        await first.send_async(fill(first.model, 2))
        torch.save(first.state_dict(), tmp_path / "checkpoint")
        assert first.state_dict() == {"version": first.version} == {"version": 2}
    assert first.state_dict() == {"version": 2}, "also after shutdown"

    state = torch.load(tmp_path / "checkpoint")
    model, second = Model(), api.scheme(num_workers=1)
    if when == "before init":
        second.load_state_dict(state)
    second.init_on_sender(model_id="policy", model=None if when == "after connect" else Model(3))
    if when == "before connect":
        second.load_state_dict(state)
    worker = receiver_of(second, 0, model)
    assert passed_on(second).state_dict() == {"version": 0}, "a copy is not the trainer that has published them"
    async with connected(second, worker):
        if when == "after connect":
            second.load_state_dict(state)
            assert second.version == 2
            await second.send_async(Model(3))
        assert second.state_dict() == {"version": 3}
        assert (worker.version, model()) == (3, {3})
        assert await second.send_async(Model(4)) == worker.version == 4
        assert await second.send_async(Model(5)) == worker.version == 5
        with pytest.raises(RuntimeError, match="sender"):
            worker.state_dict()
        with pytest.raises(RuntimeError, match="sender"):
            worker.load_state_dict(state)


async def test_a_checkpoint_never_takes_a_version_back(api: Api) -> None:
    async with api.crew(1) as (sender, [worker], [model]):
        for value in range(2, 7):  # the last of them on the fast path, where there is one
            await sender.send_async(fill(sender.model, value))
        with pytest.raises(ValueError, match="version 5"):
            sender.load_state_dict({"version": 5})
        sender.load_state_dict({"version": 6})
        assert await sender.send_async(fill(sender.model, 7)) == 7
        sender.load_state_dict({"version": 100})
        sender.load_state_dict({"version": 100})
        assert (sender.version, worker.version, model()) == (100, 7, {7})
        await sender.wait_version(1)
        for version in (9, 100, 101):  # which another trainer has published, and nobody
            with pytest.raises(ValueError, match=f"version {version}"):
                await sender.wait_version(version, timeout=0.1)
        assert await sender.send_async(fill(sender.model, 8)) == 101
        assert (worker.version, model()) == (101, {8})
    with pytest.raises(ClosedError):
        sender.load_state_dict({"version": 200})
    assert sender.state_dict() == {"version": 101}


@pytest.mark.parametrize("cls", ["ZMQWeightSyncScheme", "NoWeightSyncScheme"])
@pytest.mark.schemes("zmq")
async def test_what_is_no_state_is_refused_and_a_conversion_keeps_it(api: Api, cls: str) -> None:
    scheme = api.make(getattr(api, cls))
    for state in ({}, {"version": -1}, {"version": True}, {"version": 1.0}, {"version": 1 << 63}, 3):
        with pytest.raises(ValueError, match="version"):
            scheme.load_state_dict(state)
        assert scheme.state_dict() == {"version": 0}
    scheme.load_state_dict({"version": 4})
    twin = scheme.aio if api.is_blocking else scheme.blocking
    assert (type(twin), twin.state_dict()) == (getattr(api.other, cls), {"version": 4})
    if cls == "NoWeightSyncScheme":  # it counts on, too
        scheme.init_on_sender(model_id="policy", model=Model(1))
        await scheme.connect()
        assert await scheme.publish() == scheme.state_dict()["version"] == 5
        with pytest.raises(ValueError, match="version"):
            scheme.load_state_dict({"version": 4})


@pytest.mark.schemes("zmq")
async def test_the_schemes_of_a_bus_share_their_count(api: Api) -> None:
    async with api.bus(num_workers=1) as bus:
        bus.load_state_dict({"version": 4})
        policy, value = api.scheme(bus=bus), api.scheme(bus=bus)
        policy.init_on_sender(model_id="policy", model=Model(1))
        value.init_on_sender(model_id="value", model=Model(2))
        assert policy.state_dict() == value.state_dict() == bus.state_dict() == {"version": 4}
        workers = [receiver_of(policy, 0, Model()), receiver_of(value, 0, Model(), "value")]
        async with connected(bus, *workers):
            assert [w.version for w in workers] == [5, 6]
            assert await bus.send_async({"policy": None, "value": None}) == 7
            value.load_state_dict({"version": 8})
            assert await policy.send_async() == bus.state_dict()["version"] == 9
