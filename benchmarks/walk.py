"""Counts the functions and files of this package that one update and one frame pass. Run me: python benchmarks/walk.py

The trainer and its worker processes record which functions are called between two moments (sys.setprofile). A function
counts once, however often it is called. The walks:

    update, first            the first update after the workers have connected
    update, chosen workers   an update for one of two workers
    update, two models       an update of two models on one bus
    update, steady           an update after others of its kind, as in a training loop
    frame                    the worker of a MultiAsyncCollector, in the middle of a rollout
    frame, whole way         from the trainer's request to its batch of one frame

`--list` prints the functions in the order of their first calls, as file:function. `--only update` leaves frames out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import asyncsync
from asyncsync import Bus, SharedMemWeightSyncScheme, collectors, transports
from child import Worker

ROOT = str(Path(asyncsync.__file__).resolve().parent.parent) + os.sep
ROOMS = tuple(str(Path(module.__file__).resolve().parent) + os.sep for module in (asyncsync, transports, collectors))
INSIDE = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")  # some Pythons make them functions
TRIES = 3  # of each walk; the shortest counts, because a heartbeat may fall into one
REST = 0.03  # seconds; what follows an update is part of the walk
WALKS = ("update, first", "update, chosen workers", "update, two models", "update, steady", "frame", "frame, whole way")

Calls = dict[str, int]  # "file:function" → time of the first call in ns, by a clock that all processes share


class Recorder:
    """Records the calls in this process while the first byte of a file is not zero. All processes map that file.

    Attributes:
        walks: the calls of each walk, by its number. That byte is the number of the walk that is recorded.
    """

    def __init__(self, switch: str) -> None:
        with open(switch, "r+b") as file:
            self.switch = mmap.mmap(file.fileno(), 1)
        self.walks: dict[int, Calls] = {}
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        number = self.switch[0]
        if number and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(ROOMS) and not code.co_qualname.endswith(INSIDE):
                calls = self.walks.setdefault(number, {})
                calls.setdefault(f"{code.co_filename.removeprefix(ROOT)}:{code.co_qualname}", time.monotonic_ns())

    @contextmanager
    def walk(self, number: int) -> Iterator[None]:
        """Have all processes record."""
        self.switch[0] = number
        try:
            yield
        finally:
            self.switch[0] = 0


# -- one update --------------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))  # 33 KiB


def walk_updates(recorder: Recorder, switch: str, walks: list[str]) -> list[dict[int, Calls]]:
    """The calls in the trainer and in worker 0, with one model, or with two where the walk says so."""
    bus = Bus(num_workers=2)
    schemes = [SharedMemWeightSyncScheme(bus=bus) for _ in range(2 if "update, two models" in walks else 1)]
    workers = [Worker(worker, index, switch) for index in range(2)]
    for each in workers:
        each.post(schemes)
    asyncio.run(trainer(recorder, bus, schemes, walks))
    walked: list[dict[int, Calls]] = [each.ask("that was all") for each in workers]
    for each in workers:
        each.end()
    return [recorder.walks, walked[0]]


async def trainer(recorder: Recorder, bus: Bus, schemes: list[SharedMemWeightSyncScheme], walks: list[str]) -> None:
    for number, scheme in enumerate(schemes):
        scheme.init_on_sender(model_id=f"model{number}", model=make_model())
    async with bus:
        await bus.connect()
        for walk in walks:
            update = partial(schemes[0].send_async, worker_ids=[0] if walk == "update, chosen workers" else None)
            if walk == "update, two models":
                update = partial(bus.send_async, {"model0": None, "model1": None})
            for attempt in range(1 if walk == "update, first" else TRIES):
                for _ in range(20 if walk == "update, steady" else 0):
                    await update()
                with recorder.walk(WALKS.index(walk) * TRIES + attempt + 1):
                    await update()
                    await asyncio.sleep(REST)
                await asyncio.sleep(REST)


async def worker(pipe: Any, index: int, switch: str) -> None:
    recorder = Recorder(switch)
    schemes = pipe.recv()
    for number, scheme in enumerate(schemes):
        scheme.init_on_receiver(f"model{number}", model=make_model(), worker_idx=index)
    for scheme in schemes:
        await scheme.connect()
    await asyncio.to_thread(pipe.recv)  # updates are applied meanwhile, without a call from here
    for scheme in schemes:
        await scheme.shutdown()
    pipe.send((True, recorder.walks))


# -- one frame ---------------------------------------------------------------------------------------------------------


def walk_frames(recorder: Recorder, switch: str, walk: str, directory: Path) -> list[dict[int, Calls]]:
    """The calls in the trainer and in the worker of a MultiAsyncCollector."""
    from tensordict.nn import TensorDictModule

    from asyncsync.collectors import GymEnv, MultiAsyncCollector

    result = directory / "worker.json"

    class Environment(GymEnv):
        def __init__(self) -> None:
            super().__init__("CartPole-v1", categorical_action_encoding=True)
            self._recorder = Recorder(switch)

        def close(self) -> None:
            sys.setprofile(None)
            result.write_text(json.dumps(self._recorder.walks))
            super().close()

    policy = TensorDictModule(Choice(4, 2), ["observation"], ["action"])
    frames, before = (1, 20) if walk == "frame, whole way" else (2000, 2)
    with MultiAsyncCollector([Environment], policy, frames_per_batch=frames, total_frames=-1) as collector:
        batches = iter(collector)
        for attempt in range(TRIES):
            for _ in range(before):
                next(batches)
            time.sleep(REST)  # the worker has begun the next batch
            with recorder.walk(WALKS.index(walk) * TRIES + attempt + 1):
                if walk == "frame, whole way":
                    next(batches)
                time.sleep(REST)
    theirs = {int(number): calls for number, calls in json.loads(result.read_text()).items()}
    return [recorder.walks, theirs]


class Choice(nn.Linear):
    """A policy: observation → the number of an action."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation).argmax(-1)


# -- the report --------------------------------------------------------------------------------------------------------


def shortest(walk: str, sides: list[dict[int, Calls]]) -> list[Calls]:
    """The calls of the trainer and of the worker, in the try with the fewest functions."""
    first = WALKS.index(walk) * TRIES + 1
    tries = [[side.get(number, {}) for side in sides] for number in range(first, first + TRIES)]
    return min((each for each in tries if any(each)), key=lambda each: len({*each[0], *each[1]}))


def counts(trainer: Calls, worker: Calls) -> str:
    both = {**worker, **trainer}
    files = [len({name.partition(":")[0] for name in calls}) for calls in (both, trainer, worker)]
    return (
        f"{len(both)} functions in {files[0]} files (trainer: {len(trainer)} in {files[1]}, "
        f"worker: {len(worker)} in {files[2]})"
    )


def report(walk: str, sides: list[dict[int, Calls]], options: argparse.Namespace) -> None:
    trainer, worker = shortest(walk, sides)
    both = {**worker, **trainer}
    print(f"{walk}: {counts(trainer, worker)}")
    if options.list:
        both |= {name: min(trainer[name], worker[name]) for name in trainer.keys() & worker.keys()}
        for name in sorted(both, key=both.__getitem__):
            who = " ".join(side for side, calls in (("trainer", trainer), ("worker", worker)) if name in calls)
            print(f"    {name}  ({who})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the functions that one update and one frame pass")
    parser.add_argument("--list", action="store_true", help="print the functions, in the order of their first calls")
    parser.add_argument("--only", choices=["update", "frame"], help="only updates, or only frames")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        switch = str(Path(directory) / "switch")
        Path(switch).write_bytes(b"\0")
        recorder = Recorder(switch)
        for walks in ([WALKS[0], WALKS[1], WALKS[3]], [WALKS[2]]):
            if options.only != "frame":
                sides = walk_updates(recorder, switch, walks)
                for walk in walks:
                    report(walk, sides, options)
        for walk in ("frame", "frame, whole way"):
            if options.only != "update":
                report(walk, walk_frames(recorder, switch, walk, Path(directory)), options)


if __name__ == "__main__":
    main()
