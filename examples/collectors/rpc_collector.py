"""Random policies, evaluated by nodes that torch's RPC reaches. Run me: python rpc_collector.py

    python rpc_collector.py --launcher submitit          # each node is a job of Slurm's: pip install 'asyncsync[slurm]'

Each node is a program of its own, here on this host. Synchronous: a batch has the rollouts of all nodes, made with one
version of the policy, and an update returns when all of them act with the new weights. The search keeps the best of
a series of linear policies; each is tried by all nodes together.
"""

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync.collectors import GymEnv
from asyncsync.collectors.distributed import RPCCollector

STEPS = 400  # per node and batch


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Linear(nn.Module):
    """Goes where a weighted sum of the observation says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return ((observation * self.weight).sum(-1) > 0).long()


def main(nodes: int, tries: int, launcher: str) -> None:
    torch.manual_seed(1)
    policy = Linear()
    best, weight = 0.0, policy.weight.detach().clone()
    collector = RPCCollector(
        [make_env] * nodes,
        TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=nodes * STEPS,
        total_frames=tries * nodes * STEPS,
        reset_at_each_iter=True,
        sync=True,
        launcher=launcher,
    )
    with collector:
        for number, batch in enumerate(collector, 1):
            versions = set(batch["collector", "policy_version"].flatten().tolist())
            length = batch.numel() / max(1, int(batch["next", "done"].sum()))
            if length > best:
                best, weight = length, policy.weight.detach().clone()
            if number % (tries // 5) == 0:
                print(f"try {number}: versions {sorted(versions)}, the best makes {best:.0f} steps", flush=True)
            with torch.no_grad():
                policy.weight.copy_(weight + torch.randn(4))
            collector.update_policy_weights_()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--launcher", choices=["mp", "submitit"], default="mp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.nodes, options.tries, options.launcher)
