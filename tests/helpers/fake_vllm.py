"""A small engine that behaves as vLLM 0.32 does where it matters, for tests of what drives vLLM and of what it loads.

Its ranks run asyncsync/engines/vllm/engine.py as it is: :func:`standing_in` puts modules under vLLM's names into
sys.modules, with the names that our engine imports. What is copied from vLLM, faults included:

- Layers are loaded one by one: on the meta device until all of a layer is there. What uses a half-loaded model fails,
  or waits for a rank that has failed; that is the engine's end.
- The executor stops reading answers at the first rank that raises. Later answers stay in the queues, and are taken for
  those to the next call.
- The engine core is serial: it does what it is called for between two steps of generation, or hangs with it.
- Keys and values of prompts are kept, and used again for the same prompt, whatever weights they were made with.
- A version's name is only a label, which the caller sets. Each token is noted with the label of its time.

Unlike vLLM's, ranks are threads of one process. Tokens are greedy.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import nn
from torch.distributed import HashStore

WIDTH, HEAD, VOCABULARY, INNER = 16, 4, 64, 24
STEP_SECONDS = 0.001
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    **dict.fromkeys(("q", "k", "v", "o"), (WIDTH, WIDTH)),
    **dict.fromkeys(("gate", "up"), (INNER, WIDTH)),
    "down": (WIDTH, INNER),
    "head": (VOCABULARY, WIDTH),
}
LAYERS = {"embed": ("embed",), "qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
LAYERS["head"] = ("head",)
BY_ROWS = ("qkv", "gate_up")  # each rank has some rows of these
BY_COLUMNS = ("o", "down")  # and some columns of these: the ranks' results are added


def drawn(number: int) -> dict[str, torch.Tensor]:
    """The weights of this number, under the names that a trainer gives them."""
    generator = torch.Generator().manual_seed(number)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def greedy(weights: Mapping[str, torch.Tensor], prompt: Iterable[int], count: int) -> list[int]:
    """What the engine says with these weights."""
    model = Model(Group(1), 0)
    model.load_weights(weights.items())
    tokens = list(prompt)
    for place in range(len(tokens), len(tokens) + count):
        tokens.append(model(tokens, None)[0])
        assert len(tokens) == place + 1
    return tokens[-count:]


# -- the model ---------------------------------------------------------------------------------------------------------


class Group:
    """Ranks that add what each has. As with a collective, a rank waits for ever for one that does not come."""

    def __init__(self, size: int) -> None:
        self.size, self.store = size, HashStore()
        self._barrier, self._parts = threading.Barrier(size), [torch.empty(0)] * size

    def add(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = part
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        return total

    def close(self) -> None:
        self._barrier.abort()


class Layer(nn.Module):
    """A linear layer of this rank's part, which may be several of the trainer's."""

    def __init__(self, name: str, group: Group, rank: int) -> None:
        super().__init__()
        self.name, self.parts, self._group, self._rank = name, LAYERS[name], group, rank
        sizes = [len(self._own(torch.empty(SHAPES[part]))) for part in self.parts]
        self.rows = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        self.weight = nn.Parameter(torch.zeros(sum(sizes), self._own(torch.empty(SHAPES[self.parts[0]])).shape[1]))

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        dimension = 0 if self.name in BY_ROWS else 1
        split = self.name in BY_ROWS + BY_COLUMNS
        return whole.chunk(self._group.size, dimension)[self._rank] if split else whole

    def load(self, part: str, whole: torch.Tensor) -> None:
        """As vLLM's loader, wrapped for a reload: a layer is made when all of it is there."""
        own, info = self._own(whole), get_layerwise_info(self)
        if info.kernel is None:
            if not info.is_over:
                self.weight.data[self.rows[self.parts.index(part)]] = own
            return
        info.loaded_weights.append((part, own))
        info.load_numel += own.numel()
        if info.load_numel >= self.weight.numel():
            self.process(info)

    def process(self, info: LayerInfo) -> None:
        assert info.kernel is not None
        made = torch.full(self.weight.shape, torch.nan)  # vLLM: not initialised
        for part, own in info.loaded_weights:
            made[self.rows[self.parts.index(part)]] = own
        info.kernel.data.copy_(made)
        self.place(info)
        info.is_over = True

    def place(self, info: LayerInfo) -> None:
        assert info.kernel is not None
        self.weight, info.kernel = info.kernel, None
        info.loaded_weights, info.load_numel = [], 0

    def values(self) -> torch.Tensor:
        if self.weight.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        return self.weight.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = inputs @ self.values().T
        return self._group.add(self._rank, found) if self.name in BY_COLUMNS else found


@dataclass
class LayerInfo:
    """What vLLM knows of a layer in a reload. ``kernel``: its parameter before; None: the layer is not being loaded."""

    loaded_weights: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    load_numel: int = 0
    kernel: nn.Parameter | None = None
    is_over: bool = False  # it was loaded whole; what comes then is ignored


class Model(nn.Module):
    """One block of a transformer. ``before_tensor`` is called before each tensor that is loaded, with its number."""

    before_tensor: Callable[[int], None] | None = None

    def __init__(self, group: Group, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Layer(name, group, rank) for name in LAYERS})
        self.load_files()

    def load_files(self) -> None:
        self.load_weights(drawn(0).items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {part: layer for layer, parts in LAYERS.items() for part in parts}
        for number, (name, tensor) in enumerate(weights):
            if self.before_tensor is not None:
                self.before_tensor(number)
            part = name.removesuffix(".weight")
            self.layers[places[part]].load(part, tensor)

    @torch.no_grad()
    def forward(self, tokens: list[int], known: Any) -> tuple[int, Any]:
        """The next token, and keys and values of all; ``known`` are those of the first tokens."""
        layers = self.layers
        first = 0 if known is None else known[0].shape[1]
        rows = [(token + 7 * place) % VOCABULARY for place, token in enumerate(tokens)][first:]
        embedded = layers["embed"].values()[torch.tensor(rows)]
        q, k, v = layers["qkv"](embedded).unflatten(-1, (-1, HEAD)).transpose(0, 1).chunk(3)  # of each head
        if known is not None:
            k, v = torch.cat([known[0], k], 1), torch.cat([known[1], v], 1)
        mixed = ((q[:, -1:] @ k.transpose(1, 2)).softmax(-1) @ v).flatten()
        h = embedded[-1] + layers["o"](mixed)
        gate, up = layers["gate_up"](h).chunk(2, -1)
        h = h + layers["down"](gate.sigmoid() * up)
        return int(layers["head"](h).argmax()), (k, v)


def initialize_layerwise_reload(model: Model) -> None:
    for layer in model.layers.values():
        info = get_layerwise_info(layer)
        if info.kernel is None:  # one that has begun stays as it is
            info.kernel, info.is_over = layer.weight, False
            layer.weight = nn.Parameter(torch.empty(layer.weight.shape, device="meta"))


def finalize_layerwise_reload(model: Model, config: Any) -> None:
    for layer in model.layers.values():
        info = get_layerwise_info(layer)
        if info.kernel is not None and info.load_numel:
            layer.process(info)
        elif info.kernel is not None:
            layer.place(info)
        info.is_over = False


def get_layerwise_info(layer: nn.Module) -> LayerInfo:
    if not hasattr(layer, "info"):
        layer.info = LayerInfo()  # type: ignore[assignment]
    info: LayerInfo = layer.info  # type: ignore[assignment]
    return info


# -- what our engine imports of vLLM -----------------------------------------------------------------------------------

_thread = threading.local()  # has the rank that runs in this thread


class WeightTransferEngine:
    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config


@dataclass
class WeightTransferInitRequest:
    init_info: dict[str, Any]


@dataclass
class WeightTransferUpdateRequest:
    update_info: dict[str, Any]


def reload_weights(config: Any, model: Model, weights: Any, path: Any, is_checkpoint_format: bool) -> None:
    initialize_layerwise_reload(model)
    model.load_files()
    finalize_layerwise_reload(model, None)


NAMES: dict[str, dict[str, Any]] = {
    "config": {"set_current_vllm_config": lambda config: nullcontext()},
    "distributed.parallel_state": {"get_world_group": lambda: _thread.world},
    "distributed.weight_transfer.base": {
        kind.__name__: kind for kind in (WeightTransferEngine, WeightTransferInitRequest, WeightTransferUpdateRequest)
    },
    "model_executor.model_loader.mtp_validation": {"disable_mtp_completeness_check": nullcontext},
    "model_executor.model_loader.reload": {
        call.__name__: call for call in (initialize_layerwise_reload, finalize_layerwise_reload)
    },
    "model_executor.model_loader.reload.inplace": {"reload_weights": reload_weights},
    "model_executor.model_loader.reload.layerwise": {"get_layerwise_info": get_layerwise_info},
}


@contextmanager
def standing_in() -> Iterator[None]:
    """In the block, what imports vLLM gets this one."""
    before = set(sys.modules)
    assert not any(name.split(".")[0] == "vllm" for name in before), "the real vLLM is here"
    for path, names in NAMES.items():
        parts = ["vllm", *path.split(".")]
        for count in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        vars(sys.modules[f"vllm.{path}"]).update(names)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "vllm" or name == "asyncsync.engines.vllm.engine":
                del sys.modules[name]


# -- the engine --------------------------------------------------------------------------------------------------------


class Rank(threading.Thread):
    """One rank's worker: what is called is answered in ``answers``, in order."""

    def __init__(self, group: Group, rank: int) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.calls: SimpleQueue[Any] = SimpleQueue()
        self.answers: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self.model, self.kept = Model(group, rank), dict[int, Any]()
        self._group, self._rank, self._is_active = group, rank, False
        self.start()

    def run(self) -> None:
        from asyncsync.engines.vllm.engine import AsyncSyncWeightTransferEngine

        parallel = SimpleNamespace(rank=self._rank, world_size=self._group.size, data_parallel_index=0)
        _thread.world = SimpleNamespace(rank_in_group=self._rank, world_size=self._group.size, local_rank=self._rank)
        _thread.world.cpu_group = SimpleNamespace(get_group_store=lambda: self._group.store)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        self._engine = AsyncSyncWeightTransferEngine(None, config, torch.device("cpu"), self.model)
        while (call := self.calls.get()) is not None:
            method, arguments, is_answered = call
            try:
                answer = True, getattr(self, method)(**arguments)
            except Exception as error:
                answer = False, str(error)
            if is_answered:
                self.answers.put(answer)
        self._engine.shutdown()

    def execute_model(self, request: int, tokens: list[int], source: int | None, known: int) -> int:
        kept = None if source is None else tuple(each[:, :known] for each in self.kept[source])
        token, self.kept[request] = self.model(tokens, kept)
        return token

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(init_info))

    def shutdown_weight_transfer_engine(self) -> None:
        if self._is_active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self._engine.shutdown()

    def start_weight_update(self) -> None:
        if self._is_active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self._engine.start_weight_update()
        self._is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._is_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self._engine.update_weights(update_info)
        except BaseException:
            self._is_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._is_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self._engine.finish_weight_update()
        self._is_active = False


@dataclass
class Request:
    prompt: list[int]
    count: int
    done: Future[Request] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)  # [version, first token, end]
    number: int | None = None  # of what the ranks have kept for it


def tell(answer: Future[Any], result: Any) -> None:
    """Answer, if the caller still waits."""
    with suppress(InvalidStateError):
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


class EngineDeadError(Exception):
    """As vLLM's: nothing works any more."""


class Engine(threading.Thread):
    """vLLM's engine core and scheduler: everything happens in this one thread."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(name="engine", daemon=True)
        self._group = Group(ranks)
        self.ranks = [Rank(self._group, rank) for rank in range(ranks)]
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._requests: list[Request] = []  # those that run come first
        self._kept: dict[tuple[int, ...], int] = {}
        self._count = 0
        self._pause, self._paused = "", Future[None]()
        self._version, self._death = "default", ""
        self.start()

    def run(self) -> None:
        while True:
            with suppress(Empty):
                is_idle = self._pause == "keep" or not any(self._runs(r) for r in self._requests)
                call = self._calls.get(block=is_idle, timeout=None if is_idle else STEP_SECONDS)
                if call is None:
                    return
                call()
                continue
            for request in list(self._requests):
                if self._runs(request):
                    self._step(request)
            self._look_whether_drained()

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        """Have the engine do this."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                if self._death:
                    raise EngineDeadError(f"EngineCore encountered an issue: {self._death}")
                result = method(*arguments, **named)
            except Exception as error:
                tell(answer, error)
            else:
                if isinstance(result, Future):
                    result.add_done_callback(lambda done: tell(answer, None))
                else:
                    tell(answer, result)

        self._calls.put(run)
        return answer

    def close(self) -> None:
        """End all threads; one that hangs is left."""
        self._group.close()
        self._calls.put(None)
        self.join(5)
        for rank in self.ranks:
            rank.calls.put(None)
            rank.join(5)

    # What is called, in this thread:

    def collective_rpc(self, method: str, only: int | None = None, **arguments: Any) -> Any:
        for number, rank in enumerate(self.ranks):
            rank.calls.put((method, arguments, only in (None, number)))
        answers = []
        for rank in self.ranks if only is None else [self.ranks[only]]:
            is_well, answer = rank.answers.get()
            if not is_well:
                raise RuntimeError(
                    f"Worker failed with error '{answer}', please check the stack trace above for the root cause"
                )
            answers.append(answer)
        return answers[0] if only is not None else answers

    def generate(self, request: Request) -> None:
        self._requests.append(request)

    def pause(self, mode: str) -> Future[None] | None:
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"Invalid pause mode: {mode}")
        self._pause, self._paused = mode, Future()
        if mode == "abort":
            for request in [r for r in self._requests if r.number is not None]:
                self._end(request)
        self._look_whether_drained()
        return self._paused

    def resume(self) -> None:
        self._pause = ""
        if not self._paused.done():
            self._paused.set_result(None)

    def is_paused(self) -> bool:
        return bool(self._pause)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        running = [r for r in self._requests if r.number is not None]
        if running and not reset_running_requests:
            return False  # their blocks are in use
        for request in running:
            request.number = None
        self._kept.clear()
        for rank in self.ranks:
            rank.kept.clear()
        return True

    def set_weight_version(self, version: str) -> None:
        self._version = version

    def get_weight_version(self) -> str:
        return self._version

    def check_health(self) -> None:
        """:meth:`call` raises."""

    # Scheduling:

    def _runs(self, request: Request) -> bool:
        """Whether it gets its next token: while paused, new ones wait."""
        return not self._pause or (self._pause == "wait" and request.number is not None)

    def _step(self, request: Request) -> None:
        tokens, source = request.prompt + request.tokens, request.number
        known = len(tokens) - 1
        if source is None:
            self._count += 1
            request.number = self._count
            source, known = self._kept.get(tuple(request.prompt)), len(request.prompt) - 1
        work = {"request": request.number, "tokens": tokens, "source": source, "known": known}
        try:
            token = self.collective_rpc("execute_model", only=0, **work)
        except Exception as error:
            self._death = str(error)
            for each in list(self._requests):
                self._requests.remove(each)
                tell(each.done, EngineDeadError(self._death))
            return
        assert request.number is not None
        self._kept.setdefault(tuple(request.prompt), request.number)
        if not request.spans or request.spans[-1][0] != self._version:
            request.spans.append([self._version, len(request.tokens), 0])
        request.tokens.append(token)
        request.spans[-1][2] = len(request.tokens)
        if len(request.tokens) == request.count:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._requests.remove(request)
        tell(request.done, request)

    def _look_whether_drained(self) -> None:
        running = any(r.number is not None for r in self._requests)
        if self._pause and (self._pause == "keep" or not running) and not self._paused.done():
            self._paused.set_result(None)


# -- its faces ---------------------------------------------------------------------------------------------------------


class AsyncLLM:
    """The methods of vLLM's that a fleet calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=len(engine.ranks)))

    async def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return await asyncio.wrap_future(self._engine.call(method, *arguments, **named))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await self.call(self._engine.pause, mode)

    async def resume_generation(self) -> None:
        await self.call(self._engine.resume)

    async def is_paused(self) -> bool:
        return bool(await self.call(self._engine.is_paused))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return bool(await self.call(self._engine.reset_prefix_cache, reset_running_requests))

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        await self.call(self._engine.collective_rpc, "init_weight_transfer_engine", init_info=request.init_info)

    async def shutdown_weight_transfer_engine(self) -> None:
        await self.call(self._engine.collective_rpc, "shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        await self.call(self._engine.collective_rpc, "start_weight_update")

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        await self.call(self._engine.collective_rpc, "update_weights", update_info=request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self.call(self._engine.collective_rpc, "finish_weight_update")
        if weight_version is not None:
            await self.update_weight_version(weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        await self.call(self._engine.set_weight_version, new_version)

    async def get_weight_version(self) -> str:
        return str(await self.call(self._engine.get_weight_version))

    async def check_health(self) -> None:
        await self.call(self._engine.check_health)

    async def generate(self, prompt: list[int], count: int) -> Request:
        request = Request(prompt, count)
        await self.call(self._engine.generate, request)
        return await asyncio.wrap_future(request.done)


class LLM:
    """The same of the class that blocks."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.llm_engine = engine, AsyncLLM(engine)

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        self._wait(self._engine.collective_rpc, "init_weight_transfer_engine", init_info=request["init_info"])

    def start_weight_update(self) -> None:
        self._wait(self._engine.collective_rpc, "start_weight_update")

    def update_weights(self, request: Mapping[str, Any]) -> None:
        self._wait(self._engine.collective_rpc, "update_weights", update_info=request["update_info"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._engine.collective_rpc, "finish_weight_update")
        if weight_version is not None:
            self.update_weight_version(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._wait(self._engine.set_weight_version, new_version)

    def get_weight_version(self) -> str:
        return str(self._wait(self._engine.get_weight_version))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return bool(self._wait(self._engine.reset_prefix_cache, reset_running_requests))

    def generate(self, prompt: list[int], count: int) -> Request:
        request = Request(prompt, count)
        self._wait(self._engine.generate, request)
        return request.done.result()

    def _wait(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self._engine.call(method, *arguments, **named).result()


class Server:
    """vLLM's routes over HTTP, those of VLLM_SERVER_DEV_MODE too."""

    def __init__(self, engine: Engine) -> None:
        self._llm = AsyncLLM(engine)

    async def answer(self, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> Any:
        llm = self._llm
        match path:
            case "/health":
                await llm.check_health()
            case "/weight_info":
                return {"weight_version": await llm.get_weight_version()}
            case "/is_paused":
                return {"is_paused": await llm.is_paused()}
            case "/get_world_size":
                return {"world_size": llm.vllm_config.parallel_config.world_size_across_dp}
            case "/pause":
                await llm.pause_generation(mode=query.get("mode", "abort"))
            case "/resume":
                await llm.resume_generation()
            case "/init_weight_transfer_engine":
                await llm.init_weight_transfer_engine(WeightTransferInitRequest(body["init_info"]))
            case "/start_weight_update":
                await llm.start_weight_update()
            case "/update_weights":
                await llm.update_weights(WeightTransferUpdateRequest(body["update_info"]))
            case "/finish_weight_update":
                await llm.finish_weight_update(body.get("weight_version"))
            case "/update_weight_version":
                await llm.update_weight_version(body["new_version"])
            case "/reset_prefix_cache":
                return {"success": await llm.reset_prefix_cache(query.get("reset_running_requests") == "true")}
            case "/inference/v1/generate":
                done = await llm.generate(body["token_ids"], body["sampling_params"]["max_tokens"])
                spans = [{"version": version, "start": start, "end": end} for version, start, end in done.spans]
                return {"choices": [{"token_ids": done.tokens, "weight_versions": spans}]}
            case _:
                raise LookupError(path)
        return {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with one request. As with vLLM's, what is called goes on when the caller has left."""
        try:
            _, target, _ = (await reader.readline()).decode().split(" ")
            length = 0
            while (header := await reader.readline()).strip():
                name, _, value = header.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
            body = json.loads(await reader.readexactly(length) or "{}")
            path, _, query = target.partition("?")
            try:
                code, found = 200, await self.answer(path, dict(parse_qsl(query)), body)
            except Exception as error:
                code = {LookupError: 404, KeyError: 400, ValueError: 400}.get(type(error), 500)
                found = {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
            text = json.dumps(found).encode()
            writer.write(f"HTTP/1.1 {code} -\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass  # it has left, or it speaks no HTTP
        finally:
            writer.close()


class Replica:
    """A server in a process of its own (see helpers.processes): ``replica = start(Replica); await replica.serve()``."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self._emit = emit
        self._stand_in = standing_in()
        self._stand_in.__enter__()
        self._server: asyncio.Server | None = None

    async def serve(self, ranks: int = 1, port: int = 0) -> int:
        """Returns the port."""
        self._engine = Engine(ranks)
        self._server = await asyncio.start_server(Server(self._engine).serve, "127.0.0.1", port)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def before_tensor(self, rank: int, number: int, what: str) -> None:
        """At this tensor of its next load, a rank raises an error (``what`` is its text), or emits and ``"waits"``."""

        def hook(now: int) -> None:
            if now == number:
                self._engine.ranks[rank].model.before_tensor = None
                if what == "waits":
                    self._emit("loading")
                    time.sleep(3600)
                raise RuntimeError(what)

        self._engine.ranks[rank].model.before_tensor = hook

    async def stop(self, finish: Callable[[], Any]) -> None:
        if self._server is not None:
            self._server.close()
            await asyncio.to_thread(self._engine.close)
        finish()
