"""An asynchronous PPO trainer on CartPole-v1: the library's first example, to be read from top to bottom.

No worker waits for weights, and the trainer waits for no worker in particular: it learns from whichever batch comes
first, publishes, and goes on, while each worker switches to the newest weights between two of its steps. So a batch may
come from a policy that is a few versions old. PPO allows for that, because every action comes with the probability with
which it was chosen, and the record shows it, because it comes with the version that chose it, too.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from torch import Tensor, nn

from asyncsync import WeightSyncScheme
from asyncsync.demo.crew import Options, start_workers
from asyncsync.demo.record import Record
from asyncsync.demo.worker import OBSERVATION, Steps, make_policy

DISCOUNT, TRACE = 0.99, 0.95
EPOCHS, MINIBATCH = 4, 512
LEARNING_RATE, CLIP, ENTROPY = 1e-3, 0.2, 0.01


async def train(options: Options, record: Record) -> None:
    """Train until the mean return of the last 100 episodes reaches the target.

    Raises:
        WorkerDied: a worker's process has ended.
    """
    learner = Learner(options.seed)
    # SharedMemWeightSyncScheme(num_workers=…), unless the command line says otherwise.
    scheme = WeightSyncScheme.from_backend(options.scheme, num_workers=options.workers)
    scheme.init_on_sender(model_id="policy", model=learner.policy)
    async with start_workers(scheme, options) as crew, scheme:
        await scheme.connect()  # every worker has applied version 1 now
        record.begin(scheme)
        while not record.solved:
            worker, steps = await crew.batch()
            record.batch(worker, steps, scheme.version)
            await asyncio.to_thread(learner.learn, steps)  # meanwhile the loop serves workers and the view
            await scheme.publish()  # a snapshot: from here on learn() may change the policy again
        await scheme.wait_version(scheme.version)  # the workers have the solution
        record.end()


class Learner:
    """Proximal policy optimisation: Schulman et al., 2017, https://arxiv.org/abs/1707.06347."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = make_policy()
        self.value = nn.Sequential(
            nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        self.optimizer = torch.optim.Adam([*self.policy.parameters(), *self.value.parameters()], lr=LEARNING_RATE)

    def learn(self, steps: Steps) -> None:
        """A few epochs over one batch, [time, environments]."""
        observation, action = tensor(steps["observation"]), tensor(steps["action"])
        acted = tensor(steps["log_prob"])  # by the worker, with the weights that it had
        advantage, target = self.estimate(steps)
        # In the step after an episode's end the environment only resets, whatever the action: nothing to learn from.
        real = torch.from_numpy(np.flatnonzero(~steps["reset"]))
        advantage = (advantage - advantage[real].mean()) / (advantage[real].std() + 1e-8)
        for _ in range(EPOCHS):
            for chosen in torch.split(real[torch.randperm(len(real))], MINIBATCH):
                log_probs = self.policy(observation[chosen]).log_softmax(-1)
                ratio = (log_probs.gather(-1, action[chosen, None]).squeeze(-1) - acted[chosen]).exp()
                gain = torch.min(ratio * advantage[chosen], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[chosen])
                entropy = -(log_probs.exp() * log_probs).sum(-1)
                error = self.value(observation[chosen]).squeeze(-1) - target[chosen]
                loss = -gain.mean() - ENTROPY * entropy.mean() + 0.5 * error.square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                self.optimizer.step()

    @torch.no_grad()
    def estimate(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """Generalised advantages and the value's targets, both flat, [time × environments]."""
        shape = steps.shape
        value = self.value(tensor(steps["observation"])).view(shape).numpy()
        following = self.value(tensor(steps["next_observation"])).view(shape).numpy()
        # An episode cut off at 500 steps is worth as much as if it went on; one that has failed is worth nothing more.
        delta = steps["reward"] + DISCOUNT * following * ~steps["terminated"] - value
        goes_on = ~(steps["terminated"] | steps["truncated"])
        advantage, trace = np.empty_like(value), np.zeros_like(value[0])
        for t in reversed(range(len(steps))):
            advantage[t] = trace = delta[t] + DISCOUNT * TRACE * goes_on[t] * trace
        return tensor(advantage), tensor(advantage + value)


def tensor(field: np.ndarray) -> Tensor:
    """[time, environments, …] → [time × environments, …]."""
    return torch.from_numpy(np.ascontiguousarray(field)).flatten(0, 1)
