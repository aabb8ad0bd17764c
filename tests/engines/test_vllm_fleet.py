"""A fleet of two real servers, of one rank each (two cores are too few for more): `make engines-all` only."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncsync import RemoteError
from asyncsync.engines.fleet import Fleet
from asyncsync.engines.replicas import HTTPReplica
from asyncsync.engines.vllm import weight_version
from helpers.pairs import Clock, eventually
from helpers.vllm_following import Trainer, clients
from helpers.vllm_replicas import Reference, Server, draw, make_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]


@pytest.mark.requirement(244, 245)
async def test_a_fleet_is_updated_together_and_its_failures_stay_where_they_are(endpoint: str, tmp_path: Path) -> None:
    reference = Reference(make_model())
    make_model().save_pretrained(tmp_path / "model")
    with ExitStack() as stack:
        servers = [Server(tmp_path / "model", tmp_path / f"replica {i}") for i in range(2)]
        for server in servers:
            stack.callback(server.end)
        for server in servers:
            await asyncio.to_thread(server.wait)
        async with servers[0].client() as first, servers[1].client() as second, Trainer(endpoint) as trainer:
            replicas = [HTTPReplica(servers[0].url, name="first"), HTTPReplica(servers[1].url, name="second")]
            async with Fleet(trainer.scheme, replicas) as fleet:

                async def update(number: int, timeout: float = 60.0) -> dict[str, int]:
                    following = trainer.scheme.version + 1
                    trainer.numbers[weight_version(trainer.scheme.epoch, following)] = number
                    found = await fleet.update(draw(trainer.model, number), timeout=timeout)
                    assert found.version == following
                    results.append(found)
                    return dict(found.serving)

                results = []
                (await fleet.connect()).raise_for_failures()
                async with clients(first, 1) as of_first, clients(second, 1) as of_second:
                    for number in range(2, 12):
                        await update(number)
                        results[-1].raise_for_failures()
                for seen in (of_first, of_second):
                    trainer.check_seen(seen, reference)
                for attempt in range(2):
                    first.fault(0, "raise", 9)
                    before = fleet.serving["first"]
                    newest = trainer.scheme.version + 1
                    assert await update(20 + attempt) == {"first": before, "second": newest}
                    engine, *ranks = results[-1].failures
                    assert (engine.rank, "All ranks serve" in engine.reason) == (None, True)
                    assert [failure.rank for failure in ranks] == [0]
                    assert isinstance(ranks[0].error, RemoteError)
                    assert "rank 0 has no room" in ranks[0].reason
                    await trainer.check(first, reference, back=1)
                    await trainer.check(second, reference)
                    await update(30 + attempt)
                    results[-1].raise_for_failures()
                    await trainer.check(first, reference)
                first.fault(0, "kill", 9)
                newest = trainer.scheme.version + 1
                updating = asyncio.create_task(update(40, timeout=20))
                with Clock(1.0):
                    await eventually(lambda: fleet.serving.get("second") == newest)
                await trainer.check(second, reference)
                assert await updating == {"second": newest}
                assert {failure.replica for failure in results[-1].failures} == {"first"}
                await update(41, timeout=10)
                await trainer.check(second, reference)
