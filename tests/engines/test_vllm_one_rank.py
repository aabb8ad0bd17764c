"""vLLM's server with one rank follows a trainer, over HTTP and shared memory."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncsync import PartialSendError, RemoteError
from helpers.vllm_following import RemoteTrainer, Trainer, clients
from helpers.vllm_replicas import PROMPTS, Reference, Refused, Replica, Server, make_model, serving

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(make_model())


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("replica")) as server:
        yield server


@pytest.fixture
async def replica(server: Server) -> AsyncIterator[Replica]:
    async with server.client() as replica:
        yield replica


@pytest.mark.requirement(244)
async def test_it_follows_a_trainer_while_clients_generate(
    endpoint: str, replica: Replica, reference: Reference
) -> None:
    async with Trainer(endpoint) as trainer:
        await replica.connect(endpoint)
        async with clients(replica, 2) as seen:
            for number in range(1, 11):
                await trainer.update(replica, number)
                assert await replica.version() == trainer.name
                await trainer.check(replica, reference)
        trainer.check_seen(seen, reference)
        assert len({version for completion in seen for version in completion.versions}) > 5


@pytest.mark.requirement(244)
@pytest.mark.parametrize("kind", ["raise", "shape"])
async def test_a_load_that_raises_goes_back_and_the_sender_has_the_traceback(
    endpoint: str, replica: Replica, reference: Reference, kind: str
) -> None:
    async with Trainer(endpoint) as trainer:
        await replica.connect(endpoint)
        await trainer.update(replica, 1)
        for tensor in (0, 7, 30):
            before = trainer.name
            replica.fault(0, kind, tensor)
            version = await trainer.publish(trainer.number + 1)
            with pytest.raises(Refused, match=f"All ranks serve {before}"):
                await replica.update(version, trainer.scheme.epoch)
            assert await replica.version() == before
            with pytest.raises(PartialSendError) as caught:
                await trainer.scheme.wait_version(version, timeout=5)
            error = caught.value.failed[0]
            assert isinstance(error, RemoteError)
            assert "in load_weights" in error.remote_traceback
            await trainer.check(replica, reference, back=1)
            await replica.update(version, trainer.scheme.epoch)  # the same version, once more
            await trainer.scheme.wait_version(version, timeout=5)
            await trainer.check(replica, reference)
            await trainer.update(replica, trainer.number + 1)
            await trainer.check(replica, reference)


@pytest.mark.requirement(244)
async def test_what_is_wrong_is_refused_with_a_reason_and_changes_nothing(
    endpoint: str, replica: Replica, reference: Reference
) -> None:
    async with Trainer(endpoint) as trainer:
        for info, said in (
            ({"endpoint": endpoint, "allow_plaintext": True}, "no field 'allow_plaintext'"),
            ({"endpoint": "tcp://10.1.2.3:5555", "scheme": "zmq"}, "allow_plaintext"),
            ({"endpoint": f"{endpoint}-nowhere", "timeout": 1}, "not connected"),
        ):
            with pytest.raises(Refused, match=said):
                await replica.call("init_weight_transfer_engine", {"init_info": info})
        await replica.connect(endpoint)
        await trainer.update(replica, 1)
        for update, said in (
            ({"version": 2}, "lacks 'epoch'"),
            ({"version": 99, "epoch": trainer.scheme.epoch, "timeout": 0.5}, "could not take version 99"),
            ({"version": 1, "epoch": "0" * 37, "timeout": 0.5}, "Superseded"),
        ):
            await replica.call("start_weight_update")
            with pytest.raises(Refused, match=f"{said}(.|\n)*All ranks serve {trainer.name}"):
                await replica.call("update_weights", {"update_info": update})
        await trainer.check(replica, reference)
        await trainer.update(replica, 2)
        await trainer.check(replica, reference)


@pytest.mark.requirement(244)
async def test_a_trainer_that_is_killed_in_mid_update_leaves_a_whole_version_and_the_next_one_goes_on(
    endpoint: str, replica: Replica, reference: Reference, start: Any
) -> None:
    """A trainer of another process publishes; what it has published when it is killed is being loaded."""
    process = start(RemoteTrainer)
    epoch = await process.begin(endpoint)
    await replica.connect(endpoint)
    assert await process.publish(3) == 2
    struck = replica.server.folder / "struck-0"
    struck.unlink(missing_ok=True)
    replica.fault(0, "hang", 10, seconds=1.0)
    updating = asyncio.create_task(replica.update(2, epoch))
    while not struck.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    process.signal(signal.SIGKILL)
    await process.ended
    await updating
    for prompt in PROMPTS:
        assert reference.check(3, prompt, (await replica.complete(prompt)).tokens)
    async with Trainer(endpoint) as trainer:
        assert trainer.scheme.epoch > epoch
        await trainer.update(replica, 5)
        await trainer.check(replica, reference)
        assert trainer.scheme.status()[0].state == "live"


@pytest.mark.requirement(244)
async def test_a_restarted_replica_is_current_by_itself(
    endpoint: str, model: Path, server: Server, reference: Reference, tmp_path: Path
) -> None:
    """The last test: it kills the server of the others."""
    async with Trainer(endpoint) as trainer:
        async with server.client() as replica:
            await replica.connect(endpoint)
            await trainer.update(replica, 2)
        await asyncio.to_thread(server.end, signal.SIGKILL)
        await trainer.publish(3)
        with pytest.raises(PartialSendError, match="worker 0: PeerLost"):
            await trainer.scheme.wait_version(trainer.scheme.version, 0, timeout=10)
        restarted = await asyncio.to_thread(Server, model, tmp_path / "restarted")
        try:
            await asyncio.to_thread(restarted.wait)
            async with restarted.client() as replica:
                await replica.connect(endpoint)
                await trainer.check_tokens(replica, reference)
                await trainer.scheme.wait_version(trainer.scheme.version, 0, timeout=5)
                await replica.call("start_weight_update")  # vLLM is told the name of what it has
                await replica.call("finish_weight_update", {"weight_version": trainer.name})
                await trainer.check(replica, reference)
                await trainer.update(replica, 4)
                await trainer.check(replica, reference)
        finally:
            print(restarted.log())
            await asyncio.to_thread(restarted.end)
