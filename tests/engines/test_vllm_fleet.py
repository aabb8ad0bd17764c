"""A fleet of a real server with two ranks: `make engines-all` only. (Two servers starve each other on two cores.)"""

import asyncio
from pathlib import Path

import pytest

from asyncsync import RemoteError
from asyncsync.engines.fleet import Fleet
from asyncsync.engines.replicas import HTTPReplica
from asyncsync.engines.vllm import weight_version
from helpers.vllm_following import Trainer, clients
from helpers.vllm_replicas import Reference, draw, make_model, serving

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]


@pytest.mark.requirement(244, 245)
async def test_a_fleet_updates_both_ranks_and_names_the_one_that_has_failed(endpoint: str, tmp_path: Path) -> None:
    reference = Reference(make_model())
    make_model().save_pretrained(tmp_path / "model")
    with serving(tmp_path / "model", tmp_path / "replica", ranks=2) as server:
        async with server.client() as pair, Trainer(endpoint) as trainer:
            async with Fleet(trainer.scheme, [HTTPReplica(server.url, name="pair", ranks=2)]) as fleet:
                (await fleet.connect()).raise_for_failures()
                async with asyncio.timeout(150), clients(pair, 1) as seen:
                    for number in range(2, 12):
                        trainer.numbers[weight_version(trainer.scheme.epoch, number)] = number
                        (await fleet.update(draw(trainer.model, number))).raise_for_failures()
                trainer.check_seen(seen, reference)
                for rank in (0, 1):
                    pair.fault(rank, "raise", 9)
                    result = await fleet.update(draw(trainer.model, 20))
                    assert result.serving == {"pair": result.version - 1}
                    engine, *ranks = result.failures
                    assert (engine.rank, "All ranks serve" in engine.reason) == (None, True)
                    assert [failure.rank for failure in ranks] == [0, 1]
                    assert isinstance(ranks[rank].error, RemoteError)
                    assert f"rank {rank} has no room" in ranks[rank].reason
                    await trainer.check(pair, reference, back=1)
                    trainer.numbers[weight_version(trainer.scheme.epoch, result.version + 1)] = 30 + rank
                    (await fleet.update(draw(trainer.model, 30 + rank))).raise_for_failures()
                    await trainer.check(pair, reference)
