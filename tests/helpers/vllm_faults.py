"""A plugin of vLLM's: the next load of a rank's model raises, hangs, or kills the rank, as a file orders."""

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def register() -> None:
    folder = os.environ.get("ASYNCSYNC_TEST_FAULTS")
    if folder is None:
        return
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    original = Qwen3ForCausalLM.load_weights
    if getattr(original, "has_faults", False):
        return

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        return original(self, faulty(Path(folder), weights))

    load_weights.has_faults = True  # type: ignore[attr-defined]
    Qwen3ForCausalLM.load_weights = load_weights


def faulty(folder: Path, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = get_tensor_model_parallel_rank()
    place = folder / f"fault-{rank}"
    order = json.loads(place.read_text()) if place.exists() else {"kind": "none", "tensor": -1}
    place.unlink(missing_ok=True)
    for index, (name, tensor) in enumerate(weights):
        if index == order["tensor"]:
            (folder / f"struck-{rank}").write_text(str(os.getpid()))
            if order["kind"] == "raise":
                raise OSError(f"rank {rank} has no room for {name}")
            if order["kind"] == "hang":
                time.sleep(order["seconds"])
            if order["kind"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if order["kind"] == "shape":
                tensor = tensor[..., :-1]
        yield name, tensor
