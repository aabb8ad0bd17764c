"""A trainer and its workers as ranks of one program: torchrun starts them, and tells them where they meet.

    torchrun --nproc-per-node 3 examples/distributed_trainer.py

Rank 0 trains, in a coroutine; every other rank is a worker that follows. No scheme is passed to anybody: each rank
makes its own, and they find each other by the process group's store. On several hosts, start it on each of them with
torchrun's own arguments; nothing here changes.
"""

from __future__ import annotations

import argparse
import asyncio

import torch
import torch.distributed as dist
from torch import nn

import asyncsync

OBSERVATION = 4


def make_policy() -> nn.Module:
    return nn.Linear(OBSERVATION, 1)


async def train(updates: int) -> None:
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    scheme = asyncsync.DistributedWeightSyncScheme(backend="gloo")
    scheme.init_on_sender(model_id="policy", model=policy)  # workers: all ranks but this one
    async with scheme:
        await scheme.connect()
        for update in range(1, updates + 1):
            seen = torch.randn(64, OBSERVATION)
            loss = (policy(seen) - seen.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            version = await scheme.send_async()
            if update % 10 == 0:
                print(f"trainer: version {version} is everywhere, loss {loss.item():.4f}", flush=True)


async def follow(rank: int) -> None:
    policy = make_policy()
    scheme = asyncsync.DistributedWeightSyncScheme(backend="gloo")
    scheme.init_on_receiver("policy", model=policy)  # worker_idx: its rank, less one
    async with scheme:
        await scheme.connect()
        wrong = float("inf")
        while not scheme.closed:
            with scheme.hold(), torch.no_grad():  # one version, however many calls
                seen = torch.randn(64, OBSERVATION)
                wrong = float((policy(seen) - seen.mean(1, keepdim=True)).abs().mean())
            await asyncio.sleep(0.01)
        print(f"worker {rank - 1}: version {scheme.version} is wrong by {wrong:.3f}; the trainer has ended", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A trainer and its workers, as ranks of torchrun's.")
    parser.add_argument("--updates", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        asyncio.run(train(options.updates) if rank == 0 else follow(rank))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
