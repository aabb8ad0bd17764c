"""The fake dies of what vLLM dies of: otherwise, tests with it would show nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from helpers.fake_vllm import AsyncLLM, Engine, EngineDeadError, Request, drawn, greedy, standing_in
from helpers.pairs import eventually

pytestmark = pytest.mark.requirement(244)
RANKS = [pytest.param(1, id="one rank"), pytest.param(2, id="two ranks")]


@pytest.fixture
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    with standing_in():
        engine = Engine(request.param)
        yield engine
        await asyncio.to_thread(engine.close)


def load(engine: Engine, number: int, count: int = 99) -> None:
    """As vLLM's other backends do: some tensors of a version, on all ranks, without anything else."""
    reload: Any = __import__("vllm.model_executor.model_loader.reload", fromlist=["*"])
    for rank in engine.ranks:
        reload.initialize_layerwise_reload(rank.model)
        rank.model.load_weights(list(drawn(number).items())[:count])
        if count == 99:
            reload.finalize_layerwise_reload(rank.model, None)


@pytest.mark.parametrize("engine", RANKS, indirect=True)
async def test_tokens_are_those_of_the_weights_however_many_ranks(engine: Engine) -> None:
    llm = AsyncLLM(engine)
    for number in range(3):
        load(engine, number)
        await llm.reset_prefix_cache()
        for prompt in ([1, 2, 3], [9]):
            assert (await llm.generate(prompt, 20)).tokens == greedy(drawn(number), prompt, 20)


@pytest.mark.parametrize("engine", RANKS[:1], indirect=True)
async def test_half_a_load_kills_the_engine_at_the_next_token(engine: Engine) -> None:
    llm = AsyncLLM(engine)
    load(engine, 1, 3)
    with pytest.raises(EngineDeadError):
        await llm.generate([1, 2, 3], 5)
    with pytest.raises(EngineDeadError):
        await llm.check_health()


@pytest.mark.parametrize("engine", RANKS[1:], indirect=True)
async def test_half_a_load_on_a_rank_hangs_generation_for_ever(engine: Engine) -> None:
    reload: Any = __import__("vllm.model_executor.model_loader.reload", fromlist=["*"])
    reload.initialize_layerwise_reload(engine.ranks[1].model)
    llm = AsyncLLM(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await llm.generate([1, 2, 3], 5)
    asking = asyncio.create_task(llm.check_health())
    await asyncio.sleep(0.05)
    assert not asking.done()
    asking.cancel()


@pytest.mark.parametrize("engine", RANKS[1:], indirect=True)
async def test_an_error_of_a_rank_that_is_not_the_last_leaves_a_stale_answer(engine: Engine) -> None:
    llm = AsyncLLM(engine)
    with pytest.raises(RuntimeError, match="without a matching start"):
        await llm.finish_weight_update()
    with pytest.raises(RuntimeError, match="without a matching start"):
        await llm.start_weight_update()  # which has begun on both ranks


@pytest.mark.parametrize("engine", RANKS, indirect=True)
async def test_a_layer_that_has_begun_stays_as_it_is_at_the_next_load(engine: Engine) -> None:
    load(engine, 1, 2)
    load(engine, 2)
    llm = AsyncLLM(engine)
    assert (await llm.generate([1, 2, 3], 20)).tokens != greedy(drawn(2), [1, 2, 3], 20)


@pytest.mark.parametrize("engine", RANKS, indirect=True)
async def test_what_is_cached_of_a_prompt_outlives_its_weights_and_is_in_use_while_requests_run(engine: Engine) -> None:
    llm, prompt = AsyncLLM(engine), [1, 2, 3]
    await llm.generate(prompt, 5)
    load(engine, 1)
    assert (await llm.generate(prompt, 20)).tokens != greedy(drawn(1), prompt, 20)
    running = asyncio.create_task(llm.generate([4], 1000))
    await asyncio.sleep(0.05)
    await llm.pause_generation(mode="keep")
    assert not await llm.reset_prefix_cache()
    assert await llm.reset_prefix_cache(reset_running_requests=True)
    await llm.resume_generation()
    assert (await llm.generate(prompt, 20)).tokens == greedy(drawn(1), prompt, 20)
    await llm.pause_generation(mode="abort")
    assert len((await running).tokens) < 1000


@pytest.mark.parametrize("engine", RANKS[:1], indirect=True)
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_pause_is_of_the_kind_that_was_asked_for(engine: Engine, mode: str) -> None:
    llm = AsyncLLM(engine)
    running = asyncio.create_task(llm.generate([1], 50))
    await eventually(lambda: engine.ranks[0].kept)
    await llm.pause_generation(mode=mode)
    await asyncio.sleep(0.02)
    ended: Request | None = running.result() if running.done() else None
    assert {"keep": ended is None, "wait": ended is not None, "abort": ended is not None}[mode]
    if ended is not None:
        assert (len(ended.tokens) == 50) == (mode == "wait")
    waiting = asyncio.create_task(llm.generate([2], 5))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await llm.resume_generation()
    assert len((await waiting).tokens) == 5
    assert (await running).spans[0][0] == "default"
    with pytest.raises(ValueError, match="pause mode"):
        await llm.pause_generation(mode="never")
