"""An asynchronous PPO trainer on CartPole-v1: the library's first example, to be read from top to bottom.

The trainer learns from the batch that arrives first, sends its weights to all workers, and goes on. Each worker
switches to the newest weights between two of its steps. So a batch may come from a policy that is a few versions old.
PPO allows for that, because every action comes with the probability with which it was chosen. It also comes with the
version that chose it, so that the record can check this version's weights against that probability.
"""

from __future__ import annotations

import asyncio

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from asyncsync.demo.record import Record
from asyncsync.demo.workers import start_workers
from asyncsync.sync import WeightSyncScheme

DISCOUNT, TRACE = 0.99, 0.95
EPOCHS, MINIBATCH = 4, 512
LEARNING_RATE, CLIP, ENTROPY = 1e-3, 0.2, 0.01


async def train(scheme: WeightSyncScheme, record: Record, workers: int, seed: int, name: str) -> None:
    """Train until the mean return of the last 100 episodes reaches the target; ``name`` is the scheme's.

    Raises:
        PeerLost, PartialSendError: a worker's process has ended.
    """
    learner = Learner(seed)
    async with start_workers(workers, seed, learner.policy, scheme, name) as collector:  # the workers have version 1
        with record.learning(scheme):
            async for batch in collector:  # [environments, time]; its worker has already begun the next batch
                record.batch(batch, collector.policy_version, learner.policy)
                if record.solved:
                    break
                await asyncio.to_thread(learner.learn, batch)  # in a thread, so that the loop can draw the screen
                await collector.update_policy_weights_async()  # now every worker acts with the new weights


class Actor(nn.Module):
    """Maps CartPole's observation to an action, and to the logarithm of the probability with which it was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = network(outputs=2)

    def log_probs(self, observation: Tensor) -> Tensor:
        """The log-probabilities of both actions."""
        result: Tensor = self.logits(observation).log_softmax(-1)
        return result

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Choose actions. A worker calls this once per step, for all its environments."""
        log_probs = self.log_probs(tensordict["observation"])
        action = log_probs.exp().multinomial(1)
        return tensordict.update({"action": action.squeeze(-1), "log_prob": log_probs.gather(-1, action).squeeze(-1)})


class Learner:
    """Proximal policy optimisation: Schulman et al., 2017, https://arxiv.org/abs/1707.06347."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy, self.value = Actor(), network(outputs=1)
        self.optimizer = torch.optim.Adam([*self.policy.parameters(), *self.value.parameters()], lr=LEARNING_RATE)

    def learn(self, batch: TensorDictBase) -> None:
        """Learn from one batch, in a few epochs."""
        advantage, target = self.estimate(batch)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        frames = batch.select("observation", "action", "log_prob").update({"advantage": advantage, "target": target})
        frames = frames.flatten()
        for _ in range(EPOCHS):
            for part in frames[torch.randperm(len(frames))].split(MINIBATCH):
                log_probs, advantage = self.policy.log_probs(part["observation"]), part["advantage"]
                ratio = (log_probs.gather(-1, part["action"][:, None]).squeeze(-1) - part["log_prob"]).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                entropy = -(log_probs.exp() * log_probs).sum(-1)
                error = self.value(part["observation"]).squeeze(-1) - part["target"]
                loss = -gain.mean() - ENTROPY * entropy.mean() + 0.5 * error.square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                self.optimizer.step()

    @torch.no_grad()
    def estimate(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Generalised advantages and the targets of the value network, both [environments, time]."""
        after = batch["next"]
        value, following = (self.value(steps["observation"]).squeeze(-1) for steps in (batch, after))
        reward, done, terminated = (after[key].squeeze(-1) for key in ("reward", "done", "terminated"))
        # After a cut at 500 steps, the value counts as if the episode went on; after a failure, nothing more counts.
        delta = reward + DISCOUNT * following * ~terminated - value
        advantage, trace = torch.empty_like(value), torch.zeros_like(value[:, 0])
        for t in reversed(range(value.shape[1])):
            advantage[:, t] = trace = delta[:, t] + DISCOUNT * TRACE * ~done[:, t] * trace
        return advantage, advantage + value


def network(outputs: int) -> nn.Module:
    """A network whose input is CartPole's observation, four numbers."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
