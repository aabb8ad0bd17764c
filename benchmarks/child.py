"""The processes that measure. There is one for each system: it is the trainer, and forks its workers.

`run.py` starts this file once for each Python environment. Each line on stdin is a system, as JSON. For each, this file
forks a process and prints its pid. That process connects to the address in the JSON, and says that it is ready, or
which library is missing. Then it receives numbers of steps, and answers with the seconds that each step took, until the
connection ends.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import distributions
from inspect import iscoroutinefunction
from itertools import count
from multiprocessing.connection import Client
from typing import Any

import torch
from torch import nn

from cases import SIZES

PATIENCE = 120.0  # seconds; a timeout that should never be reached
PAUSE = 1e-3  # seconds between two steps: a trainer trains between updates
WARM = 3  # steps that are not counted, before the others
# By the first word of a kind: the module and function that set up the system, and yield its step.
OPENED = {
    "memcpy": ("peers", "memcpy"),
    "TorchRL": ("peers", "torchrl"),
    "zmq.asyncio": ("peers", "round_trip"),
    **dict.fromkeys(("gloo", "pyzmq"), ("peers", "exchange")),
    **dict.fromkeys(("by", "rpc", "ray"), ("peers", "called")),
}
LIBRARIES = ("asyncsync", "torch", "pyzmq", "torchrl", "tensordict", "ray", "gymnasium")
Step = Callable[[], Any]  # returns the seconds that it took; a coroutine function, or a blocking function
_serial = count(1)
_fork = multiprocessing.get_context("fork")


@dataclass
class Spec:
    """The system that this process measures, as in `cases.py`. `scale` is the fraction of a step's CPU time that
    belongs to the seconds it returns. `extra` has other figures by name. `blocking` is the thread for blocking
    calls."""

    section: str
    kind: str
    case: str
    workers: int
    directory: str
    scale: float = 1.0
    extra: dict[str, float] = field(default_factory=dict)
    blocking: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.blocking, call)


class Worker:
    """A forked worker process that receives orders and answers them. The target is a function that returns the handler
    of orders, or a coroutine function that is given the pipe and handles orders itself."""

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_work, args=(target, theirs, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def post(self, order: Any) -> None:
        self._pipe.send(order)

    def answer(self) -> Any:
        """Wait for the answer to the oldest order that has none yet."""
        done, value = self._pipe.recv()
        if not done:
            raise RuntimeError(f"a worker has failed:\n{value}")
        return value

    def ask(self, order: Any) -> Any:
        self.post(order)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _work(target: Callable[..., Any], pipe: Any, arguments: tuple[Any, ...]) -> None:
    try:
        if iscoroutinefunction(target):
            asyncio.run(target(pipe, *arguments))
            return
        obey = target(*arguments)
        while True:
            pipe.send((True, obey(pipe.recv())))
    except EOFError:
        pass  # the trainer ended
    except Exception:
        traceback.print_exc()  # the trainer may not be waiting for this answer
        pipe.send((False, traceback.format_exc()))


def weights(case: str, *, blank: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of this case, with a pattern, or `blank` with one value. All memory pages are touched."""
    tensors, each = SIZES[case]
    if blank:
        return {f"{i}": torch.full((each // 4,), -1.0) for i in range(tensors)}
    return {f"{i}": torch.arange(each // 4, dtype=torch.float32) + i for i in range(tensors)}


def module(case: str, *, blank: bool = False) -> nn.Module:
    made = nn.Module()
    for name, tensor in weights(case, blank=blank).items():
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return made


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A checksum, to compare what arrived with what was sent before anything is timed."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().view(torch.uint8).numpy().data, value)
    return value


def timed(action: Callable[[], Any], tensors: Iterable[torch.Tensor] = (), *, blocking: bool = False) -> Step:
    """A step that times the action. It changes the first tensor before, so that no two updates are the same."""
    first = list(tensors)[:1]

    def begin() -> float:
        for tensor in first:
            tensor[0] = next(_serial)
        return time.perf_counter()

    async def step() -> float:
        start = begin()
        await action()
        return time.perf_counter() - start

    def blocking_step() -> float:
        start = begin()
        action()
        return time.perf_counter() - start

    return blocking_step if blocking else step


async def _run(spec: Spec, step: Step, often: int) -> list[float]:
    def steps() -> list[float]:
        return [(step(), time.sleep(PAUSE))[0] for _ in range(often)]

    seconds: list[float] = []
    if not iscoroutinefunction(step):
        seconds = await spec.in_thread(steps)
    while len(seconds) < often:
        seconds.append(await step())
        await asyncio.sleep(PAUSE)
    return seconds


async def _serve(spec: Spec, connection: Any) -> None:
    place, name = OPENED.get(spec.kind.replace(",", "").split()[0], ("ours", "scheme"))
    if collecting := spec.section in ("collect", "nodes") and spec.kind != "memcpy":
        place, name = "collecting", "collecting"
    try:
        async with getattr(importlib.import_module(place), name)(spec) as step:
            await _run(spec, step, 1 if collecting else WARM)
            versions = {found.name: found.version for found in distributions() if found.name in LIBRARIES}
            connection.send({"ready": {"python": sys.version.split()[0]} | versions})
            with suppress(EOFError, ConnectionError):
                while True:
                    seconds = await _run(spec, step, await asyncio.to_thread(connection.recv))
                    connection.send({"seconds": seconds, "scale": spec.scale, "extra": spec.extra})
    except ImportError as missing:
        connection.send({"missing": missing.name or str(missing)})
    except Exception:
        connection.send({"failed": traceback.format_exc()})


def main() -> None:
    import asyncsync.sync  # noqa: F401  # imported once, before all forks

    torch.set_num_threads(1)  # there are more processes than cores
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        spec = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        os.setsid()  # run.py ends this process with its workers
        os.dup2(2, 1)  # libraries print to stdout, which run.py reads
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with Client(spec.pop("address")) as connection:
            asyncio.run(_serve(Spec(**spec), connection))
        os._exit(0)


if __name__ == "__main__":
    sys.modules["child"] = sys.modules["__main__"]  # the other modules import it by this name
    main()
