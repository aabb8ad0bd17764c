"""A policy, and a model in the environment, updated together: every worker switches both between two steps, or neither.

Run me: python multi_model.py

The environment rewards what is new to it: how badly a trained network predicts a random one ("random network
distillation"). The trainer trains the policy and that network, and `weights_dict` sends both as one update. Each model
also holds the number of the update, so that every frame shows which versions have made it.
"""

import argparse

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync.collectors import GymEnv, MultiCollector
from asyncsync.sync import SharedMemWeightSyncScheme


class Numbered(nn.Module):
    """A linear layer with the number of the update that it belongs to."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, outputs)
        self.register_buffer("number", torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(observation), self.number.expand(*observation.shape[:-1], 1)


class Curious(GymEnv):
    """CartPole whose reward is the error of `predictor`."""

    def __init__(self) -> None:
        super().__init__("CartPole-v1", num_envs=4)
        torch.manual_seed(0)
        self.target, self.predictor = nn.Linear(4, 8), Numbered(8)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        step, root = super().step_and_maybe_reset(tensordict)
        after = step["next"]
        predicted, after["predictor_number"] = self.predictor(after["observation"])
        after["reward"] = (predicted - self.target(after["observation"])).pow(2).mean(-1, keepdim=True)
        return step, root


def main(updates: int) -> None:
    trainers = Curious()
    policy, predictor, target = Numbered(2), trainers.predictor, trainers.target
    optimizer = torch.optim.Adam(predictor.linear.parameters(), lr=0.02)
    actor = TensorDictModule(policy, in_keys=["observation"], out_keys=["action", "policy_number"])
    collector = MultiCollector(
        [Curious] * 2,
        actor,
        frames_per_batch=256,
        total_frames=256 * updates,
        sync=False,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(), "env.predictor": SharedMemWeightSyncScheme()},
    )
    mixed, rewards = 0, []
    with collector:
        for update, batch in enumerate(collector, start=1):
            after = batch["next"]
            mixed += int((batch["policy_number"] != after["predictor_number"]).sum())
            rewards.append(after["reward"].mean().item())
            # Train: the predictor for real, the policy at random.
            observation = after["observation"].flatten(0, -2)
            for _ in range(10):
                optimizer.zero_grad()
                (predictor(observation)[0] - target(observation).detach()).pow(2).mean().backward()
                optimizer.step()
            with torch.no_grad():
                policy.linear.weight += 0.1 * torch.randn_like(policy.linear.weight)
                policy.number.fill_(update)
                predictor.number.fill_(update)
            # One update, one version. A name leads from the worker's collector to the model: collector.env.predictor.
            collector.update_policy_weights_(weights_dict={"policy": actor, "env.predictor": predictor})
            print(f"update {update}: reward was {rewards[-1]:.4f}, frames of two versions so far: {mixed}", flush=True)
    trainers.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=40)
    torch.set_num_threads(1)
    main(parser.parse_args().updates)
