"""What an update costs beside a bare load: ``python -m helpers.vllm_benchmark MODEL ENDPOINT SECONDS`` prints JSON.

The model has 230 MB. Trainer and engine are in one program; vLLM's rank is in a process of its own.
"""

import ctypes
import gc
import json
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from asyncsync.engines.vllm import weight_version
from helpers.vllm_replicas import LARGE, engine_options, make_model

PAIRS = 10
LOADS = 20


def remember(worker: Any, path: str) -> None:
    """In the rank's process: have the weights in its own memory; ``""``: forget them."""
    worker.asyncsync_benchmark = torch.load(path) if path else None


def bare_load(worker: Any) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.weight_transfer_engine.load(worker.asyncsync_benchmark.items())


def private_bytes(worker: Any) -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


class Benchmark:
    def __init__(self, model: Path, endpoint: str) -> None:
        from vllm import LLM

        from asyncsync.sync import SharedMemWeightSyncScheme

        self.trained = make_model(**LARGE)
        self.nbytes = sum(tensor.nbytes for tensor in self.trained.state_dict().values())
        self.llm = LLM(**engine_options(model))
        self.sender = SharedMemWeightSyncScheme(endpoint=endpoint, strategy="state_dict", min_workers=0)
        self.sender.init_on_sender(model_id="policy")
        self.sender.connect()
        self.weights = str(model / "weights.pt")
        torch.save(self.trained.state_dict(), self.weights)

    def ask(self, function: Any, *args: Any) -> Any:
        (answer,) = self.llm.collective_rpc(function, args=args)
        return answer

    def bare(self) -> float:
        started = time.perf_counter()
        self.ask(bare_load)
        return time.perf_counter() - started

    def update(self) -> float:
        version = self.sender.publish(self.trained)
        self.sender.wait_staged(version, timeout=60)
        started = time.perf_counter()
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": version, "epoch": self.sender.epoch}})
        self.llm.finish_weight_update(weight_version(self.sender.epoch, version))
        return time.perf_counter() - started

    def pair(self, *, bare_first: bool) -> tuple[float, float]:
        if bare_first:
            bare = self.bare()
            return self.update(), bare
        return self.update(), self.bare()

    def tokens(self, seconds: float, *, stages: bool) -> float:
        """Tokens per second, while versions are staged and dropped every 2 s, or not."""
        from vllm import SamplingParams

        over = threading.Event()

        def stage() -> None:
            while not over.wait(2.0):
                self.sender.drop(self.sender.stage(self.trained))

        beside = threading.Thread(target=stage)
        if stages:
            beside.start()
        sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [7, place + 1]} for place in range(8)]
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            count += sum(len(one.outputs[0].token_ids) for one in self.llm.generate(prompts, sampling, use_tqdm=False))
        rate = count / (time.perf_counter() - started)
        over.set()
        if stages:
            beside.join()
        return rate


def main() -> None:
    _, model, endpoint, seconds = sys.argv
    bench = Benchmark(Path(model), endpoint)
    bench.ask(remember, bench.weights)
    for _ in range(LOADS):
        bench.bare()
    bench.ask(remember, "")
    before = bench.ask(private_bytes)
    bench.llm.init_weight_transfer_engine({"init_info": {"endpoint": endpoint}})
    for _ in range(LOADS):
        bench.update()
    after = bench.ask(private_bytes)
    bench.ask(remember, bench.weights)
    pairs = [bench.pair(bare_first=number % 2 == 1) for number in range(2 + PAIRS)][2:]  # two to warm up
    rates = [(bench.tokens(float(seconds), stages=True), bench.tokens(float(seconds), stages=False)) for _ in range(3)]
    found = {
        "megabytes": bench.nbytes / 1e6,
        "pairs_ms": [(round(1000 * update, 1), round(1000 * bare, 1)) for update, bare in pairs],
        "update_ms": 1000 * median(update for update, _ in pairs),
        "bare_ms": 1000 * median(bare for _, bare in pairs),
        "ratio": median(update / bare for update, bare in pairs),
        "private_more": (after - before) / bench.nbytes,
        "tokens_per_second": rates,
        "tokens_ratio": median(staging / plain for staging, plain in rates),
    }
    print(json.dumps(found))
    bench.sender.shutdown()
    bench.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
