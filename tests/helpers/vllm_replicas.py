"""Real vLLM on CPU beside a trainer: a small random model, what it has to say, and servers that end as a whole.

Each version of the weights is drawn by its number, so every process knows the weights of every version.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from torch import nn

START_SECONDS = 150.0
STOP_SECONDS = 15.0
CLOSE = 1e-4  # two logits that differ by less: either token may be the greedy one
PROMPTS = [[5, 17, 300, 42], [7], list(range(100, 120)), [200, 3, 200, 3, 200]]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


# -- the model -----------------------------------------------------------------------------------------------------------


def make_model(width: int = 128, layers: int = 3, vocabulary: int = 512) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(4, width // 64)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return draw(Qwen3ForCausalLM(config).float().eval(), 0)


def draw(model: nn.Module, number: int) -> nn.Module:
    """Give the model the weights of this number."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.normal_(0, 2 / parameter.shape[-1] ** 0.5, generator=generator)
    return model


class Reference:
    """What transformers says with the weights of each number."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.greedy = cache(self._greedy)

    def _greedy(self, number: int, prompt: tuple[int, ...], count: int) -> list[tuple[int, float]]:
        draw(self.model, number)
        tokens, found = list(prompt), []
        with torch.inference_mode():
            for _ in range(count):
                best = self.model(torch.tensor([tokens])).logits[0, -1].topk(2)
                tokens.append(int(best.indices[0]))
                found.append((tokens[-1], float(best.values[0] - best.values[1])))
        return found

    def check(self, number: int, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """Assert that these are the greedy tokens, as far as that is certain. Returns how many are."""
        for place, (token, margin) in enumerate(self.greedy(number, tuple(prompt), len(tokens))):
            if margin < CLOSE:
                return place
            assert tokens[place] == token, f"number {number}, prompt {list(prompt)}, token {place}"
        return len(tokens)


# -- a server ------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The server has answered with an error; the message is its text."""


@dataclass
class Completion:
    prompt: list[int]
    tokens: list[int]
    versions: list[str]


@dataclass
class Server:
    """One replica, in a process group of its own."""

    folder: Path
    process: subprocess.Popen[bytes]
    url: str
    session: aiohttp.ClientSession
    segments: set[str] = field(default_factory=set)

    async def call(self, route: str, body: Any = None, **query: Any) -> Any:
        async with self.session.post(f"{self.url}/{route}", json=body, params=query) as response:
            text = await response.text()
            if response.status != 200:
                raise Refused(text)
            return await response.json()

    async def look(self, route: str) -> Any:
        async with self.session.get(f"{self.url}/{route}") as response:
            return await response.json()

    async def complete(self, prompt: Sequence[int], count: int) -> Completion:
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "detokenize": False}
        answer = await self.call("inference/v1/generate", {"token_ids": list(prompt), "sampling_params": sampling})
        (choice,) = answer["choices"]
        versions = [span["version"] for span in choice["weight_versions"] or []]
        return Completion(list(prompt), choice["token_ids"], versions)

    async def connect(self, endpoint: str, **more: Any) -> None:
        await self.call("init_weight_transfer_engine", {"init_info": {"endpoint": endpoint, "timeout": 30, **more}})

    async def update(self, version: int, epoch: str, timeout: float = 30.0) -> None:
        """One update in a pause, as a fleet does it."""
        await self.call("pause", mode="keep")
        try:
            await self.call("start_weight_update")
            try:
                info = {"version": version, "epoch": epoch, "timeout": timeout}
                await self.call("update_weights", {"update_info": info})
            except Refused:
                with suppress(Refused):  # vLLM's other ranks are in the middle of an update
                    await self.call("finish_weight_update")
                raise
            await self.call("finish_weight_update", {"weight_version": f"{epoch}:{version}"})
            await self.call("reset_prefix_cache", reset_running_requests="true")
        finally:
            await self.call("resume")

    def family(self) -> list[psutil.Process]:
        """The processes of the group."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks."""
        named = {process: " ".join(process.cmdline()) for process in self.family()}
        ranks = {
            int(found[1] or 0): p
            for p, name in named.items()
            if (found := re.search(r"VLLM::Worker(?:_TP(\d+))?", name))
        }
        return ranks

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    async def end(self, kind: signal.Signals = signal.SIGTERM) -> None:
        """End all of its processes, and remove the segments that those of a killed vLLM leave behind."""
        for process in self.family():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                self.segments |= set(re.findall(r"/dev/shm/(\S+)", maps))
        for kind in (kind, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)
            deadline = time.monotonic() + STOP_SECONDS
            while (self.process.poll() is None or self.family()) and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        for name in self.segments:
            Path("/dev/shm", name).unlink(missing_ok=True)
        assert not self.family()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def serving(
    model: Path, folder: Path, *, ranks: int = 1, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Server]:
    """A server of this model, which answers."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    more = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cpu % (os.cpu_count() or 1)) for cpu in range(ranks))}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
    command += ["--gpu-memory-utilization", "0.1", "--max-model-len", "256", "--max-num-seqs", "8"]
    command += ["--enable-scale-out", "--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", str(ranks)]
    command += ["--weight-transfer-config", '{"backend": "asyncsync"}']
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT | (more if ranks > 1 else {}) | dict(environment or {}),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        server = Server(folder, process, f"http://127.0.0.1:{port}", session)
        try:
            await _started(server)
            yield server
        finally:
            await server.end()


async def _started(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(aiohttp.ClientError):
            async with server.session.get(f"{server.url}/health") as response:
                if response.status == 200:
                    return
        assert server.process.poll() is None, server.log()[-6000:]
        assert time.monotonic() < deadline, server.log()[-6000:]
        await asyncio.sleep(0.25)
