"""vLLM with two tensor-parallel ranks follows a trainer: both load a version, or both go back."""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from asyncsync import PartialSendError, RemoteError, ZMQWeightSyncScheme
from helpers.vllm_following import Trainer, clients
from helpers.vllm_replicas import Reference, Refused, Replica, Server, make_model, serving

pytestmark = pytest.mark.timeout(240)
RANKS = (0, 1)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(make_model())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model: Path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(model)
    with serving(model, tmp_path_factory.mktemp("replica"), ranks=2) as server:
        yield server


@pytest.fixture
async def replica(server: Server) -> AsyncIterator[Replica]:
    async with server.client() as replica:
        yield replica


@pytest.mark.requirement(244)
async def test_both_ranks_follow_a_trainer_while_clients_generate(
    endpoint: str, replica: Replica, reference: Reference
) -> None:
    async with Trainer(endpoint) as trainer:
        await replica.connect(endpoint)
        async with clients(replica, 2) as seen:
            for number in range(1, 11):
                await trainer.update(replica, number, RANKS)
                await trainer.check(replica, reference)
        trainer.check_seen(seen, reference)
        assert len({version for completion in seen for version in completion.versions}) > 5


@pytest.mark.requirement(244)
@pytest.mark.parametrize("rank", RANKS)
async def test_a_failure_on_one_rank_takes_both_back_and_the_sender_hears_of_each(
    endpoint: str, replica: Replica, reference: Reference, rank: int
) -> None:
    async with Trainer(endpoint) as trainer:
        await replica.connect(endpoint)
        await trainer.update(replica, 1, RANKS)
        for tensor in (0, 11, 34):
            before = trainer.name
            replica.fault(rank, "raise", tensor)
            version = await trainer.publish(trainer.number + 1)
            with pytest.raises(
                Refused, match=rf"rank {rank}: OSError: rank {rank} has no room.*All ranks serve {before}"
            ):
                await replica.update(version, trainer.scheme.epoch)
            with pytest.raises(PartialSendError) as caught:
                await trainer.scheme.wait_version(version, timeout=5)
            errors = caught.value.failed
            assert errors.keys() == {*RANKS}
            told = {
                worker: error.remote_traceback for worker, error in errors.items() if isinstance(error, RemoteError)
            }
            assert "in faulty" in told[rank]
            assert re.search(rf"rank {rank}: OSError(.|\n)*This rank went back to {before}", told[1 - rank])
            await trainer.check(replica, reference, back=1)
            await trainer.update(replica, trainer.number + 1, RANKS)
            await trainer.check(replica, reference)


@pytest.mark.requirement(244)
@pytest.mark.parametrize("rank", RANKS)
async def test_the_other_rank_does_not_wait_for_one_that_hangs_and_both_serve_the_version_before(
    endpoint: str, replica: Replica, reference: Reference, rank: int
) -> None:
    async with Trainer(endpoint) as trainer:
        await replica.connect(endpoint)
        await trainer.update(replica, 1, RANKS)
        before = trainer.name
        replica.fault(rank, "hang", 7, seconds=9)
        version = await trainer.publish(2)
        started = time.monotonic()
        updating = asyncio.create_task(replica.update(version, trainer.scheme.epoch, timeout=1))
        while not trainer.scheme.status()[1 - rank].failure:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert time.monotonic() - started < 8.5
        assert "did not vote in time" in trainer.scheme.status()[1 - rank].failure
        with pytest.raises(Refused, match=f"rank {rank}: it did not vote in time.*All ranks serve {before}"):
            await updating
        assert time.monotonic() - started >= 9
        await trainer.check(replica, reference, back=1)
        await trainer.update(replica, 3, RANKS)
        await trainer.check(replica, reference)


@pytest.mark.requirement(244)
@pytest.mark.parametrize("endpoint", ["tcp"], indirect=True)
async def test_over_zeromq_the_first_rank_of_a_host_receives_for_both(
    endpoint: str, replica: Replica, reference: Reference
) -> None:
    for _ in range(2):  # the second trainer comes to the same address
        async with Trainer(endpoint, ZMQWeightSyncScheme) as trainer:
            await replica.connect(endpoint, scheme="zmq")
            statuses = trainer.scheme.status()
            assert [one.role for one in statuses.values()].count("relay") == 1
            [relay] = [worker for worker, one in statuses.items() if one.role == "relay"]
            assert [statuses[rank].relay for rank in RANKS] == [relay, relay]
            nbytes = sum(tensor.nbytes for tensor in trainer.model.state_dict().values())
            for number in range(1, 4):
                before = sum(one.bytes_sent for one in trainer.scheme.status().values())
                await trainer.update(replica, number, RANKS)
                await trainer.check(replica, reference)
                after = sum(one.bytes_sent for one in trainer.scheme.status().values())
                assert nbytes <= after - before <= 1.05 * nbytes
            name = trainer.name
            replica.fault(1, "raise", 20)
            version = await trainer.publish(4)
            await trainer.scheme.wait_staged(version, RANKS, timeout=20)
            with pytest.raises(Refused, match=f"rank 1: OSError.*All ranks serve {name}"):
                await replica.update(version, trainer.scheme.epoch)
            with pytest.raises(PartialSendError, match="in faulty"):
                await trainer.scheme.wait_version(version, RANKS, timeout=5)
            await trainer.check(replica, reference, back=1)


@pytest.mark.requirement(244)
async def test_a_rank_that_is_killed_in_mid_update_ends_its_replica_at_once(endpoint: str, replica: Replica) -> None:
    """The last test: the replica is gone. What is asserted is that nothing hangs, here and at the sender."""
    async with Trainer(endpoint) as trainer:
        await replica.connect(endpoint)
        await trainer.update(replica, 1, RANKS)
        replica.fault(1, "kill", 7)
        version = await trainer.publish(2)
        started = time.monotonic()
        # vLLM's server may never answer a request that is under way when its engine dies, and waits for the client to
        # hang up before it ends: a client needs a deadline of its own, as a fleet has one.
        with pytest.raises((Refused, OSError)):
            async with asyncio.timeout(15):
                await replica.update(version, trainer.scheme.epoch, timeout=60)
        with pytest.raises(PartialSendError, match="worker 1: PeerLost"):
            await trainer.scheme.wait_version(version, RANKS, timeout=30)
        while replica.server.answers():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert time.monotonic() - started < 30
        assert replica.server.ranks().keys() <= {0}
        replica.server.process.send_signal(signal.SIGTERM)
