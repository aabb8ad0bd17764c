"""REINFORCE on CartPole, with Ray's actors as collectors. Run me: python ray_collector.py

    async for batch in collector:                        # one actor's frames, whichever is ready first
        ...                                              # train
        await collector.update_policy_weights_async()    # returns when every actor acts with the new weights

Where a Ray cluster runs, call ``ray.init(address="auto")`` before: the actors are placed on its hosts, and nothing here
changes. An actor that dies is made anew, twice at most, with an environment of its own and the current weights.
"""

import argparse
import asyncio

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync.collectors import GymEnv
from asyncsync.collectors.distributed import RayCollector

ENVIRONMENTS, STEPS = 8, 64  # per actor and batch
DISCOUNT = 0.98


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", num_envs=ENVIRONMENTS, categorical_action_encoding=True)


class Actor(nn.Module):
    """Samples an action."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def distribution(self, observation: torch.Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.logits(observation))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.distribution(observation).sample()


def returns(rewards: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
    """Discounted sums of rewards until the end of each trajectory, or of the batch: float32 [environments × time]."""
    found, after = torch.empty_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        after = rewards[:, t] + DISCOUNT * after * ~done[:, t]
        found[:, t] = after
    return found


async def main(actors: int, batches: int) -> None:
    torch.manual_seed(0)
    actor = Actor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=5e-3)
    collector = RayCollector(
        [make_env] * actors,
        TensorDictModule(actor, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=ENVIRONMENTS * STEPS,
        total_frames=batches * ENVIRONMENTS * STEPS,
        ray_init_config={"num_cpus": actors, "include_dashboard": False, "log_to_driver": False},
        restarts=2,
    )
    ends = number = 0
    async with collector:
        async for batch in collector:
            done = batch["next", "done"].squeeze(-1)
            sums = returns(batch["next", "reward"].squeeze(-1), done)
            sums = (sums - sums.mean()) / (sums.std() + 1e-6)
            loss = -(actor.distribution(batch["observation"]).log_prob(batch["action"]) * sums).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            await collector.update_policy_weights_async()
            number, ends = number + 1, ends + int(done.sum())
            if number % (batches // 5) == 0:
                length = batches // 5 * batch.numel() / max(1, ends)
                version = batch["collector", "policy_version"].max().item()
                print(
                    f"{number * batch.numel()} frames: {length:.0f} steps a trajectory, version {version}", flush=True
                )
                ends = 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--batches", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(main(options.actors, options.batches))
