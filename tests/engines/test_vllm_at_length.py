"""Hundreds of updates, failures at random places, kills beside other replicas, and what an update costs:
`make engines-all` only."""

import asyncio
import json
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from asyncsync import PartialSendError
from helpers.vllm_following import Trainer, clients
from helpers.vllm_replicas import LARGE, Group, Reference, Refused, Replica, Server, make_model, serving

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(make_model())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


@pytest.mark.requirement(244)
@pytest.mark.parametrize(("ranks", "numbers"), [(1, range(1, 201)), (2, range(31, 61))])
async def test_many_updates_and_many_failures(
    ranks: int, numbers: range, endpoint: str, model: Path, reference: Reference, tmp_path: Path
) -> None:
    with serving(model, tmp_path / "replica", ranks=ranks) as server:
        async with server.client() as replica, Trainer(endpoint) as trainer:
            await replica.connect(endpoint)
            await _follow(trainer, replica, reference, range(ranks), numbers)
            for rank in range(ranks):
                await _fail(trainer, replica, reference, range(ranks), rank, 20)


async def _follow(
    trainer: Trainer, replica: Replica, reference: Reference, ranks: Sequence[int], numbers: Sequence[int]
) -> None:
    """In number 26, the two best first tokens after a prompt are nearly the same: in 30 updates, that is 1 %."""
    took = []
    async with clients(replica, 4, tokens=12) as seen:
        for number in numbers:
            started = time.monotonic()
            await trainer.update(replica, number, ranks)
            took.append(time.monotonic() - started)
            assert await replica.version() == trainer.name
    whole, uncertain = trainer.check_seen(seen, reference)
    print(
        f"\n{len(ranks)} ranks, {len(took)} updates, median {1000 * median(took):.0f} ms; "
        f"{len(seen)} completions, {whole} of one version, of which {uncertain} could not be compared to the end"
    )
    assert whole > len(took) / 2
    assert uncertain <= 0.01 * whole


async def _fail(
    trainer: Trainer, replica: Replica, reference: Reference, ranks: Sequence[int], rank: int, times: int
) -> None:
    places = random.Random(rank)
    for _ in range(times):
        before, tensor = trainer.name, places.randrange(len(trainer.model.state_dict()))
        replica.fault(rank, "raise", tensor)
        version = await trainer.publish(trainer.number + 1)
        with pytest.raises(Refused, match=f"rank {rank}: OSError.*All ranks serve {before}"):
            await replica.update(version, trainer.scheme.epoch)
        with pytest.raises(PartialSendError, match="in faulty"):
            await trainer.scheme.wait_version(version, ranks, timeout=5)
        await trainer.check(replica, reference, back=1)
        await trainer.update(replica, trainer.number + 1, ranks)
        await trainer.check(replica, reference)


@pytest.mark.requirement(244)
async def test_a_replica_or_a_rank_that_is_killed_in_mid_update_delays_no_other(
    endpoint: str, model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Two replicas, of one rank and of two."""
    with serving(model, tmp_path / "stays") as stays, serving(model, tmp_path / "dies", ranks=2) as dies:
        async with stays.client() as first, dies.client() as second, Trainer(endpoint) as trainer:
            await asyncio.gather(first.connect(endpoint), second.connect(endpoint, first_worker=1))
            for kind in ("rank", "replica"):
                await _all(trainer, [first, second], range(3))
                second.fault(1, "kill" if kind == "rank" else "hang", 9, seconds=30)
                struck = dies.folder / "struck-1"
                struck.unlink(missing_ok=True)
                version = await trainer.publish(trainer.number + 1)
                started = time.monotonic()
                hit = asyncio.create_task(second.update(version, trainer.scheme.epoch))
                await asyncio.to_thread(_until, struck.exists)
                if kind == "replica":
                    await asyncio.to_thread(dies.end, signal.SIGKILL)
                await first.update(version, trainer.scheme.epoch)
                await trainer.scheme.wait_version(version, [0], timeout=5)
                print(
                    f"\na {kind} was killed: the other replica was up to date after {time.monotonic() - started:.2f} s"
                )
                assert time.monotonic() - started < 5 + (15 if kind == "replica" else 0)  # in which its group ends
                await trainer.check(first, reference)
                with pytest.raises((Refused, OSError)):
                    await hit
                with pytest.raises(PartialSendError, match="PeerLost"):
                    await trainer.scheme.wait_version(version, range(3), timeout=10)
                await asyncio.to_thread(dies.end)
                if kind == "rank":
                    dies = await asyncio.to_thread(Server, model, tmp_path / "again", 2)
                    await asyncio.to_thread(dies.wait)
                    second.server = dies
                    await second.connect(endpoint, first_worker=1)
                    await trainer.check_tokens(second, reference)
            await asyncio.to_thread(dies.end)


async def _all(trainer: Trainer, replicas: Sequence[Replica], workers: Sequence[int]) -> None:
    version = await trainer.publish(trainer.number + 1)
    await trainer.scheme.wait_staged(version, workers, timeout=30)
    await asyncio.gather(*(replica.update(version, trainer.scheme.epoch) for replica in replicas))
    await trainer.scheme.wait_version(version, workers, timeout=5)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.requirement(244)
def test_what_an_update_costs(endpoint: str, tmp_path: Path) -> None:
    """The figures of issue 31: printed, and held against its bounds."""
    make_model(**LARGE).save_pretrained(tmp_path / "model")
    command = ["-m", "helpers.vllm_benchmark", str(tmp_path / "model"), endpoint, "60"]
    program = Group(command, tmp_path / "program", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    try:
        program.process.wait(1500)
        assert program.process.returncode == 0, program.log()
        [line] = [line for line in program.log().splitlines() if line.startswith('{"megabytes"')]
    finally:
        program.end()
    print(f"\n{line}")
    found = json.loads(line)
    assert found["ratio"] <= 1.1
    assert found["private_more"] <= 0.1
    assert found["tokens_ratio"] >= 0.85
