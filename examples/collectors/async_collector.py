"""PPO on CartPole, in one coroutine beside others. Run me: python async_collector.py

    async for batch in collector:                        # the event loop runs on while the workers roll out
        ...                                              # train
        await collector.update_policy_weights_async()    # returns when every worker acts with the new weights

Two processes collect, each from a vector of environments, and never wait for each other: a batch comes from whichever
worker has one. Every frame tells which version of the policy acted; PPO's ratio takes care of what is one version old.
"""

import argparse
import asyncio
import time

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync.collectors import Collector, GymEnv

ENVIRONMENTS, STEPS = 8, 32  # per worker and batch
EPOCHS, MINIBATCH, CLIP, GAMMA, LAMBDA = 4, 128, 0.2, 0.99, 0.95


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", num_envs=ENVIRONMENTS, categorical_action_encoding=True)


class Actor(nn.Module):
    """Samples an action, and remembers how likely it was."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distribution = torch.distributions.Categorical(logits=self.logits(observation))
        action = distribution.sample()
        return action, distribution.log_prob(action)


def advantages(batch: TensorDict, critic: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over time, the last dimension; and the returns for the critic to predict."""
    after = batch["next"]
    with torch.no_grad():
        value, value_after = critic(batch["observation"]).squeeze(-1), critic(after["observation"]).squeeze(-1)
    reward, done, terminated = (after[key].squeeze(-1) for key in ("reward", "done", "terminated"))
    # A truncated trajectory would have gone on: its last observation has a value. A terminated one has no future.
    delta = reward + GAMMA * value_after * ~terminated - value
    advantage, following = torch.empty_like(delta), torch.zeros_like(delta[..., 0])
    for t in reversed(range(delta.shape[-1])):
        following = delta[..., t] + GAMMA * LAMBDA * following * ~done[..., t]
        advantage[..., t] = following
    return advantage, advantage + value


def train(batch: TensorDict, actor: Actor, critic: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One PPO update."""
    advantage, returns = advantages(batch, critic)
    frames = batch.select("observation", "action", "log_prob").update({"advantage": advantage, "returns": returns})
    frames = frames.flatten()
    for _ in range(EPOCHS):
        for part in frames[torch.randperm(len(frames))].split(MINIBATCH):
            distribution = torch.distributions.Categorical(logits=actor.logits(part["observation"]))
            ratio = (distribution.log_prob(part["action"]) - part["log_prob"]).exp()
            gain = (part["advantage"] - part["advantage"].mean()) / (part["advantage"].std() + 1e-6)
            policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            value_loss = nn.functional.smooth_l1_loss(critic(part["observation"]).squeeze(-1), part["returns"])
            loss = policy_loss + 0.5 * value_loss - 0.01 * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


async def main(workers: int, total_frames: int) -> None:
    torch.manual_seed(0)
    actor, critic = Actor(), nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2e-3)
    collector = Collector(
        make_env,
        TensorDictModule(actor, in_keys=["observation"], out_keys=["action", "log_prob"]),
        frames_per_batch=ENVIRONMENTS * STEPS,
        total_frames=total_frames,
        num_collectors=workers,  # asynchronous ones, in processes of their own
    )
    frames, ends, reported, begun = 0, 0, 0, time.perf_counter()
    async with collector:
        async for batch in collector:
            train(batch, actor, critic, optimizer)
            await collector.update_policy_weights_async()
            reported += batch.numel()
            frames, ends = frames + batch.numel(), ends + int(batch["next", "done"].sum())
            if reported >= total_frames / 10:
                version = batch["collector", "policy_version"].max().item()
                seconds, length = time.perf_counter() - begun, reported / max(1, ends)
                shown = f"{frames} frames, {seconds:.1f} s: {length:.0f} steps a trajectory, version {version}"
                print(shown, flush=True)
                reported = ends = 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--total-frames", type=int, default=51_200)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the networks are small, and the workers need the other cores
    asyncio.run(main(options.workers, options.total_frames))
