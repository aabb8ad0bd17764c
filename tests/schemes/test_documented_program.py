"""The page's standalone example, and its worker with a trainer of the other API; see helpers/documented.py."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn

import asyncsync
from asyncsync.sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.documented import ask, main, worker_fn
from helpers.pairs import Clock, Model, fill
from helpers.workers import follow


@pytest.mark.requirement(13, 35, 36)
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fork", SharedMemWeightSyncScheme),
        ("forkserver", SharedMemWeightSyncScheme),
        pytest.param("spawn", SharedMemWeightSyncScheme, marks=pytest.mark.thorough),
        ("forkserver", partial(SharedMemWeightSyncScheme, map_above=0)),
        pytest.param("fork", partial(SharedMemWeightSyncScheme, map_above=0), marks=pytest.mark.thorough),
        ("forkserver", MultiProcessWeightSyncScheme),
        ("forkserver", ZMQWeightSyncScheme),
    ],
    ids=["fork", "forkserver", "spawn", "forkserver-mapped", "fork-mapped", "forkserver-process", "forkserver-zmq"],
)
def test_the_standalone_example_runs_as_documented(method: str, kind: Any) -> None:
    points: list[str] = []

    def train(policy: nn.Module, epoch: int) -> None:
        fill(policy, epoch)

    def check(point: str, epoch: int, held: list[Any]) -> None:
        points.append(point)
        if point == "trained":
            assert held == [{epoch - 1}] * 2, "nothing moves without a send"
        elif point == "closed":
            assert held == [("closed", {epoch})] * 2, "shutdown ends their loops, and they keep what they have"
        else:
            assert held == [{epoch}] * 2, f"{point}: the policy's weights as they are at this moment"

    assert main(mp.get_context(method), train, check, kind) == [0, 0], "the workers end well and are joined"
    assert points == ["connected"] + ["trained", "sent"] * 10 + ["closed"]


@pytest.mark.requirement(213)
@pytest.mark.parametrize("name", ["ZMQWeightSyncScheme", "SharedMemWeightSyncScheme"])
async def test_an_asyncio_trainer_with_the_documented_blocking_worker_in_another_process(name: str) -> None:
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    policy = nn.Linear(4, 2)
    async with getattr(asyncsync, name)() as scheme:
        weights = TensorDict.from_module(fill(policy, 1))
        scheme.init_on_sender(model_id="policy", weights=weights, devices=[torch.device("cpu")], num_workers=1)
        worker = context.Process(target=worker_fn, args=(scheme.blocking, 0, there))
        worker.start()
        try:
            await scheme.connect()
            assert await asyncio.to_thread(ask, here) == {1}
            fill(policy, 2)
            await scheme.send_async()
            assert await asyncio.to_thread(ask, here) == {2}
            await scheme.shutdown()
            with Clock(2.0):
                await asyncio.to_thread(worker.join, 20)
            assert (here.recv(), worker.exitcode) == (("closed", {2}), 0)
        finally:
            end(worker, here, there)


@pytest.mark.requirement(213)
@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme])
def test_a_blocking_trainer_with_an_asyncio_worker_in_another_process(kind: Any) -> None:
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    with kind(num_workers=1) as scheme:
        scheme.init_on_sender(model_id="policy", model=(source := Model(1)))
        worker = context.Process(target=follow, args=(scheme.aio, 0, there))
        worker.start()
        try:
            scheme.connect()
            assert (here.poll(20), here.recv()) == (True, {1})
            scheme.send(fill(source, 2))
            assert (here.poll(20), here.recv()) == (True, {2})
            scheme.shutdown()
            with Clock(2.0):
                worker.join(20)
            assert (here.recv(), worker.exitcode) == (("closed", True), 0)
        finally:
            end(worker, here, there)


def end(worker: Any, *pipes: Any) -> None:
    worker.kill()
    worker.join()
    worker.close()
    for pipe in pipes:
        pipe.close()
