"""Real vLLM on CPU beside a trainer: a small random model, what it has to say, and servers that end as a whole.

Each version of the weights is drawn by its number, so every process knows the weights of every version.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from torch import nn

from asyncsync.engines.vllm import weight_version
from helpers.apis import free_port

START_SECONDS = 150.0
STOP_SECONDS = 15.0
CLOSE = 1e-4  # two logits that differ by less: either token may be the greedy one
LARGE = {"width": 1024, "layers": 4, "vocabulary": 9600}  # 230 MB
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


# -- the model --------------------------------------------------------------------------------------------------------


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


# -- a server ----------------------------------------------------------------------------------------------------------


class Group:
    """A program of vLLM's, with all processes that it starts: a process group, which ends as a whole."""

    def __init__(self, command: Sequence[str], folder: Path, **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._segments: set[str] = set()
        (folder / "plugins").mkdir(exist_ok=True)
        plant_faults(folder / "plugins")
        path = os.pathsep.join([str(folder / "plugins"), str(Path(__file__).parents[1])])
        self._temporary = tempfile.mkdtemp(prefix="v-")  # what killed processes leave behind; a short path for sockets
        ours = {"PYTHONPATH": path, "TMPDIR": self._temporary, FAULTS: str(folder)}
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | ENVIRONMENT | ours | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks."""
        named = {process: " ".join(process.cmdline()) for process in self.family()}
        found = {process: re.search(r"VLLM::Worker(?:_TP(\d+))?", name) for process, name in named.items()}
        return {int(match[1] or 0): process for process, match in found.items() if match}

    def log(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "Route: /" not in line)[-12_000:]

    def note_segments(self) -> None:
        """Remember which shared memory its processes have mapped: those that are killed leave it behind."""
        for process in self.family():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                self._segments |= set(re.findall(r"/dev/shm/([^\s(]+)", maps))

    def end(self, first: signal.Signals = signal.SIGTERM) -> None:
        """End all of its processes, and remove what they leave behind."""
        self.note_segments()
        for kind in (first, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)
            deadline = time.monotonic() + STOP_SECONDS
            while (self.process.poll() is None or self.family()) and time.monotonic() < deadline:
                time.sleep(0.05)
        for name in self._segments:
            Path("/dev/shm", name).unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)
        assert not self.family()


def engine_options(model: Path, ranks: int = 1) -> dict[str, Any]:
    """Of vLLM's engine: for a machine with two cores, and weights that come from a trainer only."""
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "gpu_memory_utilization": 0.1,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "tensor_parallel_size": ranks,
        "weight_transfer_config": {"backend": "asyncsync"},
    }


class Server(Group):
    """vLLM's server for one replica, with the routes for RL."""

    def __init__(self, model: Path, folder: Path, ranks: int = 1) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        for name, value in engine_options(model, ranks).items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
        bind = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {}
        super().__init__([*command, "--enable-scale-out"], folder, VLLM_SERVER_DEV_MODE="1", **bind)

    def answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
            return bool(response.status == 200)
        return False

    def wait(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)
        self.note_segments()
        return self

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Replica]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=120)
        ) as session:
            yield Replica(self, session)


@contextmanager
def serving(model: Path, folder: Path, ranks: int = 1) -> Iterator[Server]:
    server = Server(model, folder, ranks)
    try:
        yield server.wait()
    except BaseException:
        print(server.log())
        raise
    finally:
        server.end()


class Refused(Exception):
    """The server has answered with an error; the message is its text."""


@dataclass
class Completion:
    prompt: list[int]
    tokens: list[int]
    versions: list[str]


class Replica:
    """What a client and a trainer ask of a server."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def call(self, route: str, body: Any = None, **query: Any) -> Any:
        async with self.session.post(f"{self.server.url}/{route}", json=body, params=query) as response:
            text = await response.text()
            if response.status != 200:
                raise Refused(text)
            return json.loads(text)

    async def version(self) -> str:
        async with self.session.get(f"{self.server.url}/weight_info") as response:
            found: str = (await response.json())["weight_version"]
            return found

    async def complete(self, prompt: Sequence[int], count: int = 8) -> Completion:
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "detokenize": False}
        answer = await self.call("inference/v1/generate", {"token_ids": list(prompt), "sampling_params": sampling})
        (choice,) = answer["choices"]
        return Completion(list(prompt), choice["token_ids"], [span["version"] for span in choice["weight_versions"]])

    async def connect(self, endpoint: str, **more: Any) -> None:
        info = {"endpoint": endpoint, "first_worker": 0, "timeout": 30.0} | more
        await self.call("init_weight_transfer_engine", {"init_info": info})

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
            await self.call("finish_weight_update", {"weight_version": weight_version(epoch, version)})
            await self.call("reset_prefix_cache", reset_running_requests="true")
        finally:
            await self.call("resume")

    def fault(self, rank: int, kind: str, tensor: int = 5, seconds: float = 0.0) -> None:
        """What is to happen in this rank's next load."""
        order = self.server.folder / f"fault-{rank}"
        order.with_suffix(".new").write_text(json.dumps({"kind": kind, "tensor": tensor, "seconds": seconds}))
        order.with_suffix(".new").rename(order)


# -- faults, in the ranks' processes -----------------------------------------------------------------------------------

FAULTS = "ASYNCSYNC_TEST_FAULTS"  # the folder of the orders


def plant_faults(folder: Path) -> None:
    """Make a folder on Python's path from which vLLM loads a plugin, as from an installed package."""
    (folder / "vllm_faults-0.dist-info").mkdir()
    (folder / "vllm_faults-0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm_faults\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nvllm_faults = helpers.vllm_faults:register\n"
    (folder / "vllm_faults-0.dist-info/entry_points.txt").write_text(entry)
