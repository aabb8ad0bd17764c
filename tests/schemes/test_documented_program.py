"""The page's standalone example, and its worker with a trainer of the other API; see helpers/documented.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
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
        pytest.param("spawn", SharedMemWeightSyncScheme, marks=pytest.mark.thorough),
        ("forkserver", partial(SharedMemWeightSyncScheme, map_above=0)),
        ("forkserver", MultiProcessWeightSyncScheme),
        ("forkserver", ZMQWeightSyncScheme),
    ],
    ids=["fork", "spawn", "forkserver-mapped", "forkserver-process", "forkserver-zmq"],
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


@contextmanager
def working(target: Any, scheme: Any) -> Iterator[Any]:
    """A pipe to a worker's process, which ends well, and soon after the block."""
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    worker = context.Process(target=target, args=(scheme, 0, there))
    worker.start()
    try:
        yield here
        with Clock(2.0):
            worker.join(20)
        assert worker.exitcode == 0
    finally:
        worker.kill()
        worker.join()
        worker.close()
        here.close()
        there.close()


@pytest.mark.requirement(213)
async def test_an_asyncio_trainer_with_the_documented_blocking_worker_in_another_process() -> None:
    policy = fill(nn.Linear(4, 2), 1)
    async with asyncsync.SharedMemWeightSyncScheme() as scheme:
        weights = TensorDict.from_module(policy)
        scheme.init_on_sender(model_id="policy", weights=weights, devices=[torch.device("cpu")], num_workers=1)
        with working(worker_fn, scheme.blocking) as pipe:
            await scheme.connect()
            assert await asyncio.to_thread(ask, pipe) == {1}
            fill(policy, 2)
            await scheme.send_async()
            assert await asyncio.to_thread(ask, pipe) == {2}
            await scheme.shutdown()
            assert await asyncio.to_thread(lambda: (pipe.poll(20), pipe.recv())) == (True, ("closed", {2}))


@pytest.mark.requirement(213)
def test_a_blocking_trainer_with_an_asyncio_worker_in_another_process() -> None:
    with ZMQWeightSyncScheme(num_workers=1) as scheme:
        scheme.init_on_sender(model_id="policy", model=(source := Model(1)))
        with working(follow, scheme.aio) as pipe:
            scheme.connect()
            assert (pipe.poll(20), pipe.recv()) == (True, {1})
            scheme.send(fill(source, 2))
            assert (pipe.poll(20), pipe.recv()) == (True, {2})
            scheme.shutdown()
            assert (pipe.poll(20), pipe.recv()) == (True, ("closed", True))
