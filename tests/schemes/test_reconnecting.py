"""Receivers that outlive trainers: with ``reconnect=True`` they follow the next one on the same endpoint."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncsync import ClosedError
from helpers.apis import Api
from helpers.pairs import Model, fill, read, receiver_of, until


def trainer(api: Api, directory: Path, value: float, workers: int = 2) -> Any:
    """Each at the address of the one before."""
    return api.sender(Model(value), num_workers=workers, scheme={"endpoint": f"ipc://{directory}/bus"})


@pytest.mark.schemes("every")
async def test_a_server_follows_the_next_trainer_after_a_shutdown(api: Api, tmp_path: Path) -> None:
    first = trainer(api, tmp_path, 1)
    model, other = Model(), Model()
    server = receiver_of(first, 0, model, reconnect=True)
    worker = receiver_of(first, 1, other)
    await asyncio.gather(first.connect(), server.connect(), worker.connect())
    await first.send_async(fill(first.model, 2))
    await api.receive(server, 5)
    waiting = None if api.is_instant else asyncio.create_task(server.receive())
    await first.shutdown()
    await until(lambda: worker.closed)
    await until(lambda: server.status()[0].state == "lost")
    assert not server.closed
    assert model() == {2}
    assert await server.receive(0) is None

    second = trainer(api, tmp_path, 10)
    replacement = receiver_of(second, 1, other)
    await asyncio.gather(second.connect(), replacement.connect())
    assert (model(), server.version, server.closed) == ({10}, 1, False)
    if waiting is not None:
        assert read(await waiting) == {10}
    for value in range(11, 15):
        await second.send_async(fill(second.model, value))
        assert model() == {value}
    assert server.status()[0].state == "live"
    assert read(await server.fetch()) == {14}

    await server.shutdown()
    assert server.closed
    assert await second.send_async(fill(second.model, 20), worker_ids=1) == 6
    await replacement.shutdown()
    await worker.shutdown()
    await second.shutdown()


async def test_schemes_of_one_bus_must_agree_whether_they_reconnect(api: Api) -> None:
    async with api.bus() as bus:
        policy, value = api.scheme(bus=bus), api.scheme(bus=bus)
        policy.init_on_receiver("policy", model=Model(), worker_idx=0, reconnect=True)
        with pytest.raises(ValueError, match="reconnect"):
            value.init_on_receiver("value", model=Model(), worker_idx=0)
        policy.init_on_receiver("policy", model=Model(), worker_idx=0)
        value.init_on_receiver("value", model=Model(), worker_idx=0)
        with pytest.raises(TypeError, match="reconnect"):
            value.init_on_receiver("value", model=Model(), worker_idx=0, reconnect=1)


async def test_a_server_may_connect_before_there_is_a_second_trainer(api: Api, tmp_path: Path) -> None:
    first = trainer(api, tmp_path, 1)
    model = Model()
    server = receiver_of(first, 0, model, reconnect=True)
    connecting = [asyncio.create_task(scheme.connect()) for scheme in (first, server)]
    await until(lambda: server.status().get(0) is not None and server.status()[0].state == "live")
    await first.shutdown()
    with pytest.raises(ClosedError):
        await connecting[0]
    second = trainer(api, tmp_path, 2, workers=1)
    await asyncio.gather(second.connect(), connecting[1])
    assert model() == {2}
    await second.shutdown()
    await server.shutdown()
