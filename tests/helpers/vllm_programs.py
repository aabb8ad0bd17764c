"""Programs with vLLM inside: a trainer and the engine in one process, with vLLM's own two interfaces.

``python -m helpers.vllm_programs LLM|AsyncLLM MODEL ENDPOINT`` prints, for each version, its number, the name that vLLM
gives it, and what the engine says to the prompts.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from asyncsync.engines.vllm import weight_version
from helpers.vllm_replicas import PROMPTS, draw, engine_options, make_model

UPDATES = 3
TOKENS = 8


def show(number: int, name: str, outputs: list[Any]) -> None:
    print(json.dumps({"number": number, "name": name, "tokens": [list(one.outputs[0].token_ids) for one in outputs]}))


def with_llm(model: Path, endpoint: str) -> None:
    from vllm import LLM, SamplingParams

    from asyncsync.sync import SharedMemWeightSyncScheme

    sender = SharedMemWeightSyncScheme(endpoint=endpoint, strategy="state_dict", min_workers=0)
    sender.init_on_sender(model_id="policy")
    sender.connect()
    llm = LLM(**engine_options(model))
    llm.init_weight_transfer_engine({"init_info": {"endpoint": endpoint}})
    trained = make_model()
    for number in range(1, UPDATES + 1):
        version = sender.publish(draw(trained, number))
        sender.wait_staged(version, timeout=20)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version, "epoch": sender.epoch}})
        llm.finish_weight_update(weight_version(sender.epoch, version))
        sender.wait_version(version, timeout=5)
        llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        show(number, llm.get_weight_version(), llm.generate(prompts, sampling, use_tqdm=False))
    sender.shutdown()
    llm.llm_engine.engine_core.shutdown()


async def with_async_llm(model: Path, endpoint: str) -> None:
    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    from asyncsync import SharedMemWeightSyncScheme

    async with SharedMemWeightSyncScheme(endpoint=endpoint, strategy="state_dict", min_workers=0) as sender:
        sender.init_on_sender(model_id="policy")
        await sender.connect()
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**engine_options(model)))
        await engine.init_weight_transfer_engine(WeightTransferInitRequest({"endpoint": endpoint}))
        trained = make_model()

        async def generate(prompt: list[int], name: str) -> Any:
            sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
            async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
                last = output
            return last

        for number in range(1, UPDATES + 1):
            version = await sender.publish(draw(trained, number))
            await sender.wait_staged(version, timeout=20)
            await engine.pause_generation(mode="keep")
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest({"version": version, "epoch": sender.epoch}))
            await engine.finish_weight_update(weight_version(sender.epoch, version))
            await engine.reset_prefix_cache(reset_running_requests=True)
            await engine.resume_generation()
            await sender.wait_version(version, timeout=5)
            outputs = await asyncio.gather(*(generate(p, f"{number}-{i}") for i, p in enumerate(PROMPTS)))
            show(number, await engine.get_weight_version(), outputs)
        engine.shutdown()


if __name__ == "__main__":
    _, kind, folder, address = sys.argv
    if kind == "LLM":
        with_llm(Path(folder), address)
    else:
        asyncio.run(with_async_llm(Path(folder), address))
