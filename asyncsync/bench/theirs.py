"""TorchRL's side: its sender's part, and the workers that this starts.

    torchrl = TorchRL.start("shared", [payload], counts=(1, 2))     # None: it is not installed
    torchrl.open(payload)                                           # with one worker, and beside that with two
    torchrl.check(payload, workers=2)                               # an update arrives
    seconds = torchrl.send(payload, workers=2)
    torchrl.close(payload)
    torchrl.end()

Everything here blocks, in a process of its own: TorchRL's import sets the multiprocessing start method, and ``send``
waits for ever for a worker that has died. What is sent are weights of their own: TorchRL's workers share the memory of
those that were registered, and would see them change without any send.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from itertools import chain, product
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import nn

from asyncsync.bench.cases import EMPTY, Payload, touch
from asyncsync.bench.peers import digest
from asyncsync.bench.pipe import end_with_parent

__all__ = ["TorchRL"]

Case = tuple[Payload, int]  # and how many workers
NAMES = {"shared": "SharedMemWeightSyncScheme", "process": "MultiProcessWeightSyncScheme"}
DESCRIPTORS = 1 << 16  # that may be open: MultiProcess sends one for each tensor and worker
PATIENCE = 5.0  # seconds that workers have to end by themselves


class TorchRL:
    """The sender, with a scheme for each payload and number of workers: SharedMem copies once for each that it knows.

    Args:
        scheme_class: TorchRL's.
        payloads: what will be sent.
        counts: of workers; the last is the largest.
    """

    def __init__(self, scheme_class: Any, payloads: Sequence[Payload], counts: Sequence[int]) -> None:
        import torch.multiprocessing

        self._class = scheme_class
        self._counts = counts
        self._context: Any = torch.multiprocessing.get_context("spawn")
        self._queues: dict[Case, list[Any]] = {}
        self._schemes: dict[Case, Any] = {}
        self._sources: dict[Payload, Any] = {}
        # Queues travel when a process starts, and only then. So the workers get schemes that have them already, but as
        # yet no weights: thousands of tensors would travel with them.
        self._theirs = {case: self._scheme(*case, EMPTY) for case in product(payloads, counts)}
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._ending = False
        self._died: str | None = None
        for index in range(counts[-1]):
            ours, theirs = self._context.Pipe()
            schemes = {case: scheme for case, scheme in self._theirs.items() if index < case[1]}
            with theirs:
                arguments = (index, schemes, theirs)
                process = self._context.Process(
                    target=_worker, args=arguments, name=f"TorchRL's worker {index}", daemon=True
                )
                process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        signal.signal(signal.SIGTERM, self._terminated)
        threading.Thread(target=self._watch, daemon=True).start()

    @classmethod
    def start(cls, kind: str, payloads: Sequence[Payload], counts: Sequence[int]) -> TorchRL | None:
        """With ``"shared"`` or ``"process"``; None: TorchRL is not installed."""
        try:
            from torchrl import weight_update
        except ImportError:
            return None
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < DESCRIPTORS:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))
        return cls(getattr(weight_update, NAMES[kind]), payloads, counts)

    def _scheme(self, of: Payload, workers: int, registered: Payload) -> Any:
        from tensordict import TensorDict

        scheme = self._class()
        scheme.init_on_sender(
            model_id="model",
            weights=TensorDict.from_module(registered.module(blank=True)),
            devices=[torch.device("cpu")] * workers,
            num_workers=workers,
            ctx=_Queues(self._context, self._queues.setdefault((of, workers), [])),
        )
        return scheme

    def open(self, payload: Payload) -> None:
        """Connect: the first worker alone, and so on."""
        from tensordict import TensorDict

        self._sources[payload] = TensorDict.from_module(payload.module()).data
        for workers in self._counts:
            scheme = self._schemes[payload, workers] = self._scheme(payload, workers, payload)
            self._post("open", payload, workers)
            scheme.connect()
            self._answers(workers)

    def send(self, payload: Payload, workers: int) -> float:
        """Seconds until so many workers have applied it."""
        source = self._sources[payload]
        touch(source.values())
        start = time.perf_counter()
        self._schemes[payload, workers].send(weights=source)
        return time.perf_counter() - start

    def check(self, payload: Payload, workers: int) -> None:
        """What is timed must be what it says.

        Raises:
            RuntimeError: not everything has arrived in every worker.
        """
        self._post("blank", payload, workers)
        self._answers(workers)
        self.send(payload, workers)
        sent = digest(self._sources[payload].values())
        self._post("digest", payload, workers)
        if set(self._answers(workers)) != {sent}:
            raise RuntimeError("TorchRL: what the workers have is not what was sent")

    def close(self, payload: Payload) -> None:
        """Disconnect."""
        for workers in self._counts:
            self._schemes.pop((payload, workers)).shutdown()
            self._post("close", payload, workers)
            self._answers(workers)
            del self._theirs[payload, workers], self._queues[payload, workers]
        del self._sources[payload]
        gc.collect()  # the queues' semaphores and the shared memory, now

    def end(self) -> None:
        """End the workers."""
        self._ending = True
        for pipe in self._pipes:
            pipe.send(None)
        deadline = time.monotonic() + PATIENCE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _post(self, order: str, payload: Payload, workers: int) -> None:
        for pipe in self._pipes[:workers]:
            pipe.send((order, (payload, workers)))

    def _answers(self, workers: int) -> list[Any]:
        answers = [pipe.recv() for pipe in self._pipes[:workers]]
        for kind, value in answers:
            if kind == "error":
                raise RuntimeError(f"TorchRL's worker has failed:\n{value}")
        return [value for _, value in answers]

    def _watch(self) -> None:
        dead = wait([process.sentinel for process in self._processes])
        if not self._ending:
            (name, *_) = [process.name for process in self._processes if process.sentinel in dead]
            self._died = f"asyncsync bench: {name} has died"
            os.kill(os.getpid(), signal.SIGTERM)

    def _terminated(self, *_: object) -> None:
        """Leave at once, wherever TorchRL waits, but do not leave semaphores behind."""
        self._ending = True
        for queue in chain.from_iterable(self._queues.values()):
            queue.cancel_join_thread()  # it may wait for a reader that is gone
        gc.freeze()  # collected at the end, TorchRL's schemes wait for threads that are there no more
        sys.exit(self._died or 1)


class _Queues:
    """A multiprocessing context for TorchRL: makes queues, or hands out the same ones again, in the same order."""

    def __init__(self, context: Any, queues: list[Any]) -> None:
        self._context = context
        self._queues = queues
        self._again = iter(queues[:])

    def Queue(self) -> Any:
        queue = next(self._again, None)
        if queue is None:
            queue = self._context.Queue()
            self._queues.append(queue)
        return queue


def _worker(index: int, schemes: dict[Case, Any], pipe: Connection) -> None:
    """A worker: TorchRL applies in a thread of its own, while this one waits for orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the other processes
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    models: dict[Case, nn.Module] = {}
    while True:
        try:
            order = pipe.recv()
        except (EOFError, OSError):
            break  # the sender is gone
        if order is None:
            break
        try:
            pipe.send(("done", _obey(index, schemes, models, *order)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


def _obey(index: int, schemes: dict[Case, Any], models: dict[Case, nn.Module], order: str, of: Case) -> Any:
    if order == "open":
        models[of] = of[0].module(blank=True)
        schemes[of].init_on_receiver(model_id="model", model=models[of], worker_idx=index)
        schemes[of].connect(worker_idx=index)
    elif order == "blank":
        for parameter in models[of].parameters():
            parameter.fill_(-1.0)
    elif order == "digest":
        return digest(models[of].parameters())
    else:
        schemes.pop(of).shutdown()
        del models[of]
        gc.collect()
    return None
