"""vLLM inside of a program, by its own two interfaces; and vLLM's trainer side, as frameworks call it."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

from asyncsync import PartialSendError
from asyncsync.engines.vllm import register
from asyncsync.engines.vllm.trainer import AsyncSyncTrainerInitInfo
from helpers.vllm_programs import UPDATES
from helpers.vllm_replicas import PROMPTS, Group, Reference, draw, make_model, serving

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(make_model())


@pytest.mark.requirement(244)
@pytest.mark.parametrize("kind", ["LLM", "AsyncLLM"])
def test_an_engine_follows_a_trainer_of_its_own_program(
    kind: str, endpoint: str, model: Path, reference: Reference, tmp_path: Path
) -> None:
    program = Group(["-m", "helpers.vllm_programs", kind, str(model), endpoint], tmp_path / "program")
    try:
        deadline = time.monotonic() + 150
        while program.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert program.process.returncode == 0, program.log()
        told = [json.loads(line) for line in program.log().splitlines() if line.startswith('{"number"')]
    finally:
        program.end()
    assert [one["number"] for one in told] == [*range(1, UPDATES + 1)]
    assert [one["name"].rpartition(":")[2] for one in told] == [str(number) for number in range(1, UPDATES + 1)]
    for one in told:
        for prompt, tokens in zip(PROMPTS, one["tokens"], strict=True):
            assert len(tokens) == 8
            reference.check(one["number"], prompt, tokens)


@pytest.mark.requirement(244)
async def test_vllms_trainer_side_sends_and_says_what_has_failed(
    endpoint: str, model: Path, reference: Reference, tmp_path: Path
) -> None:
    register()
    register()  # as in each of vLLM's processes
    with serving(model, tmp_path / "replica") as server:
        async with server.client() as replica:
            trained = make_model()
            info = AsyncSyncTrainerInitInfo(rank=0, endpoint=endpoint)
            client = HTTPVLLMWeightSyncClient(server.url)
            trainer = await asyncio.to_thread(
                WeightTransferTrainerFactory.trainer_init, info, client=client, source=ModuleSource(trained)
            )
            try:
                for number in (1, 2):
                    draw(trained, number)
                    await asyncio.to_thread(trainer.send_weights)
                    for prompt in PROMPTS:
                        completion = await replica.complete(prompt)
                        assert completion.versions == [f"{trainer.scheme.epoch}:{number}"]
                        reference.check(number, prompt, completion.tokens)
                replica.fault(0, "raise")
                with pytest.raises(PartialSendError, match=r"OSError: .*rank 0 has no room(.|\n)*in faulty"):
                    await asyncio.to_thread(trainer.send_weights)
                reference.check(2, PROMPTS[0], (await replica.complete(PROMPTS[0])).tokens)
                await asyncio.to_thread(trainer.send_weights)
                assert await replica.version() == f"{trainer.scheme.epoch}:4"
                for rank in (0, 1):
                    with pytest.raises(ValueError, match="ModuleSource"):
                        await asyncio.to_thread(
                            WeightTransferTrainerFactory.trainer_init,
                            AsyncSyncTrainerInitInfo(rank=rank),
                            client=client,
                        )
                beside = WeightTransferTrainerFactory.trainer_init(
                    AsyncSyncTrainerInitInfo(rank=1), client=client, source=ModuleSource(trained)
                )
                beside.send_weights()  # runs the collectives of the source, and sends nothing
                assert trainer.scheme.version == 4
            finally:
                await asyncio.to_thread(trainer.shutdown)
