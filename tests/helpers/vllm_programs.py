"""Programs with vLLM inside: a trainer, its fleet, and the engine in one process, with vLLM's own two interfaces.

``python -m helpers.vllm_programs LLM|AsyncLLM MODEL ENDPOINT`` prints, for each version, its number, the name that vLLM
gives it, and what the engine says to the prompts.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from asyncsync import SharedMemWeightSyncScheme
from asyncsync.engines.fleet import Fleet
from asyncsync.engines.replicas import AsyncLLMReplica, LLMReplica
from helpers.vllm_replicas import PROMPTS, draw, engine_options, make_model

UPDATES = 3
TOKENS = 8


def show(number: int, name: str, outputs: list[Any]) -> None:
    print(json.dumps({"number": number, "name": name, "tokens": [list(one.outputs[0].token_ids) for one in outputs]}))


SAMPLING = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}


async def follow(endpoint: str, replica: Any, generate: Callable[[int], Awaitable[list[Any]]]) -> None:
    """A fleet of this one replica."""
    trained = make_model()
    async with SharedMemWeightSyncScheme(endpoint=endpoint, strategy="state_dict", min_workers=0) as sender:
        sender.init_on_sender(model_id="policy")
        await sender.connect()
        async with Fleet(sender, [replica]) as fleet:
            for number in range(1, UPDATES + 1):
                (await fleet.update(draw(trained, number), timeout=30)).raise_for_failures()
                show(number, await replica.weight_version(), await generate(number))


async def with_llm(model: Path, endpoint: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_options(model))
    replica = LLMReplica(llm)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    await follow(
        endpoint, replica, lambda _: replica.run(llm.generate, prompts, SamplingParams(**SAMPLING), use_tqdm=False)
    )
    llm.llm_engine.engine_core.shutdown()


async def with_async_llm(model: Path, endpoint: str) -> None:
    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**engine_options(model)))

    async def generate(prompt: list[int], name: str) -> Any:
        async for output in engine.generate({"prompt_token_ids": prompt}, SamplingParams(**SAMPLING), name):
            last = output
        return last

    async def all_prompts(number: int) -> list[Any]:
        return await asyncio.gather(*(generate(prompt, f"{number}-{i}") for i, prompt in enumerate(PROMPTS)))

    await follow(endpoint, AsyncLLMReplica(engine), all_prompts)
    engine.shutdown()


if __name__ == "__main__":
    _, kind, folder, address = sys.argv
    asyncio.run({"LLM": with_llm, "AsyncLLM": with_async_llm}[kind](Path(folder), address))
