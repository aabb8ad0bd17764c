"""A trainer and two of Ray's actors: each actor plays with the newest policy, and the trainer learns meanwhile.

    pip install 'asyncsync[ray]'
    python examples/ray_trainer.py

The task: the action has to be the mean of the observation. An actor's rollout is an ordinary call; an update reaches it
between two of them, as a call of `_receive_weights_scheme`. Every rollout says which version it was played with.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import ray
import torch
from torch import nn

import asyncsync
import asyncsync.sync  # the actors have its scheme

OBSERVATION = 4


def make_policy() -> nn.Module:
    return nn.Linear(OBSERVATION, 1)


@ray.remote(num_cpus=0)
class Player:
    """Plays with a policy of its own."""

    def __init__(self, scheme: asyncsync.sync.RayWeightSyncScheme, index: int) -> None:
        torch.set_num_threads(1)
        self.policy = make_policy()
        self.scheme = scheme
        self.scheme.init_on_receiver("policy", model=self.policy, worker_idx=index)

    def connect(self) -> None:
        self.scheme.connect()

    def _receive_weights_scheme(self) -> None:
        self.scheme.receive()

    def rollout(self, steps: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """What was seen, how far from right each action was, and the version of the policy."""
        seen = torch.randn(steps, OBSERVATION)
        with torch.no_grad():
            actions = self.policy(seen)
        return seen, (actions - seen.mean(1, keepdim=True)).abs(), self.scheme.version


async def learn(rounds: int, backend: str) -> float:
    """Returns by how much the newest actions are wrong."""
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    async with asyncsync.RayWeightSyncScheme(backend=backend) as scheme:
        players: list[Any] = [Player.remote(scheme.blocking, index) for index in range(2)]
        scheme.init_on_sender(model_id="policy", model=policy, remotes=players)
        await asyncio.gather(scheme.connect(), *(player.connect.remote() for player in players))
        under_way = {asyncio.ensure_future(_played(player)): player for player in players}
        wrong = float("inf")
        for number in range(rounds):
            # Whoever is ready first; the others go on playing.
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for rollout in done:
                seen, errors, version = rollout.result()
                wrong = float(errors.mean())
                if number % 20 == 0:
                    print(f"round {number}: version {version} of {scheme.version} is wrong by {wrong:.3f}")
                optimizer.zero_grad()
                (policy(seen) - seen.mean(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                player = under_way.pop(rollout)
                under_way[asyncio.ensure_future(_played(player))] = player
            await scheme.publish()  # no player is waited for
        await asyncio.gather(*under_way)
        await scheme.wait_version(scheme.version)
    return wrong


async def _played(player: Any) -> Any:
    return await player.rollout.remote(64)


def main() -> None:
    parser = argparse.ArgumentParser(description="A trainer and two of Ray's actors.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--backend", choices=["gloo", "object_store"], default="object_store")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        wrong = asyncio.run(learn(options.rounds, options.backend))
        print(f"after {options.rounds} rounds the actions are wrong by {wrong:.3f}")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
