"""A rollout worker: one process, one event loop, one policy, whose weights change only between two steps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from asyncsync import WeightSyncScheme

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

ENVIRONMENT, OBSERVATION, ACTIONS = "CartPole-v1", 4, 2
ENVIRONMENTS, TIME = 16, 128  # of one worker; steps of one batch

Steps = np.ndarray
STEP = np.dtype(
    [
        ("observation", "f4", (OBSERVATION,)),
        ("next_observation", "f4", (OBSERVATION,)),
        ("action", "i8"),
        ("log_prob", "f4"),
        ("reward", "f4"),
        ("terminated", "?"),
        ("truncated", "?"),
        ("reset", "?"),  # the environment was reset in this step, and took no action
        ("episode_return", "f4"),  # of the episode that this step ended; NaN: it ended none
        ("version", "u8"),  # of the weights that chose the action
    ]
)
"""One step of one environment. A batch, [TIME, ENVIRONMENTS], travels as these bytes, always as many."""


def make_policy() -> nn.Module:
    """CartPole's observation → the logits of its two actions."""
    return nn.Sequential(nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ACTIONS))


async def work(scheme: WeightSyncScheme, index: int, pipe: socket.socket, seed: int) -> None:
    """Collect a batch for every credit that the trainer sends, until it closes the pipe."""
    import gymnasium

    torch.manual_seed(seed)
    environments = gymnasium.make_vec(ENVIRONMENT, num_envs=ENVIRONMENTS, vectorization_mode="vector_entry_point")
    policy = make_policy()
    scheme.init_on_receiver("policy", model=policy, worker_idx=index)
    reader, writer = await asyncio.open_connection(sock=pipe)
    credits = asyncio.Semaphore(0)
    with contextlib.closing(writer):
        async with scheme, until_closed(reader, credits):
            await scheme.connect()  # the policy has the trainer's weights now
            batches = rollouts(policy, scheme, environments, seed)
            while True:
                await credits.acquire()
                writer.write((await anext(batches)).tobytes())
                await writer.drain()


async def rollouts(
    policy: nn.Module, scheme: WeightSyncScheme, environments: VectorEnv, seed: int
) -> AsyncIterator[Steps]:
    """Batches without end. Episodes run on from one batch to the next."""
    observation, _ = environments.reset(seed=seed)
    returns = np.zeros(ENVIRONMENTS, "f4")
    ended = np.zeros(ENVIRONMENTS, "?")
    while True:
        steps = np.zeros((TIME, ENVIRONMENTS), STEP)
        for step in steps:
            step["version"], step["observation"], step["reset"] = scheme.version, observation, ended
            with torch.no_grad():
                log_probs = policy(torch.from_numpy(observation)).log_softmax(-1)
            action = log_probs.exp().multinomial(1)
            step["action"], step["log_prob"] = action.squeeze(-1), log_probs.gather(-1, action).squeeze(-1)
            observation, step["reward"], step["terminated"], step["truncated"], _ = environments.step(step["action"])
            step["next_observation"] = observation
            ended = step["terminated"] | step["truncated"]
            returns += step["reward"]
            step["episode_return"] = np.where(ended, returns, np.nan)
            returns[ended] = 0
            await asyncio.sleep(0)  # here the bus applies an update, if one has come
        yield steps


class TrainerGone(Exception):
    """The pipe to the trainer was closed: it has ended, or was killed."""


@contextlib.asynccontextmanager
async def until_closed(reader: asyncio.StreamReader, credits: asyncio.Semaphore) -> AsyncIterator[None]:
    """Count the trainer's credits, one byte each; leave the block, wherever it is, when the pipe is closed."""

    async def count() -> None:
        while await reader.read(1):
            credits.release()
        raise TrainerGone

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(count())
            yield
    except* (TrainerGone, ConnectionError):
        pass


def main(
    scheme: WeightSyncScheme, index: int, pipe: socket.socket, seed: int, new_loop: Callable[[], Any] | None
) -> None:
    """What the process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group of processes; the trainer ends us
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work(scheme, index, pipe, seed))
