"""DQN on CartPole from a replay buffer that workers fill by themselves. Run me: python replay_buffer.py

    collector.start()                                    # workers collect into the buffer until they are told to end
    minibatch = buffer.sample(128)                       # meanwhile the trainer learns at its own pace
    collector.update_policy_weights_(wait=False)         # workers act with this from their next step on
    collector.async_shutdown()

The buffer is TorchRL's, shared between processes: that is what `shared=True` and `shared_init=True` are for.
"""

import argparse
import copy
import time

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer

from asyncsync.collectors import GymEnv, MultiAsyncCollector

GAMMA, EPSILON, MINIBATCH, SOFT = 0.99, 0.1, 128, 0.02


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Explorer(nn.Module):
    """Takes the best action, or now and then any."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        best = self.values(observation).argmax(-1)
        return torch.where(torch.rand(best.shape) < EPSILON, torch.randint_like(best, 2), best)


def train(batch: TensorDict, values: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of double Q-learning."""
    after = batch["next"]
    with torch.no_grad():
        best = values(after["observation"]).argmax(-1, keepdim=True)
        future = target(after["observation"]).gather(-1, best) * ~after["terminated"]
    value = values(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    loss = nn.functional.smooth_l1_loss(value, after["reward"] + GAMMA * future)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), values.parameters(), strict=True):
            slow.lerp_(fast, SOFT)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=6000, help="gradient steps")
    updates = parser.parse_args().updates
    torch.set_num_threads(1)  # the networks are small, and the workers need the other cores
    torch.manual_seed(0)
    explorer = Explorer()
    values, target = explorer.values, copy.deepcopy(explorer.values)
    optimizer = torch.optim.Adam(values.parameters(), lr=1e-3)
    storage = LazyTensorStorage(20_000, shared_init=True)
    buffer = ReplayBuffer(storage=storage, shared=True)
    collector = MultiAsyncCollector(
        [make_env] * 2,
        TensorDictModule(explorer, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=64,
        init_random_frames=1000,
        max_frames_per_traj=500,  # counts steps, too: in "step_count"
        replay_buffer=buffer,
    )
    with collector:
        collector.start()
        while len(buffer) < 1000:
            time.sleep(0.01)
        for i in range(1, updates + 1):
            train(buffer.sample(MINIBATCH), values, target, optimizer)
            if not i % 20:
                collector.update_policy_weights_(wait=False)
            if not i % (updates // 10):
                step = buffer.sample(2000)["next", "step_count"].float().mean().item()  # the longer, the better
                print(f"update {i}: {len(buffer)} frames, mean step {step:.0f}, version {collector.policy_version}")
        collector.async_shutdown()


if __name__ == "__main__":
    main()
