"""PPO on CartPole-v1 with worker processes, and nothing but asyncsync, torch and gymnasium: no collectors, no TorchRL.

Run me: python ppo_plain.py

The trainer has the model that is trained. Each worker has a copy of the model, plays CartPole with its copy, and sends
what has happened through a pipe. One update is:

    1. each worker plays a number of steps in several environments, and sends these steps to the trainer
    2. the trainer learns from the steps of all workers
    3. await scheme.send_async(model): when this returns, the copies of all workers have the new weights

The program ends when the mean return of the last 100 episodes reaches 475, which takes ten to thirty seconds on two
idle cores, and at any time by Ctrl-C.
"""

import asyncio
import multiprocessing
import signal
import time
from collections import deque

import gymnasium
import numpy as np
import torch
from torch import nn

from asyncsync import ClosedError, SharedMemWeightSyncScheme

WORKERS, UPDATES = 2, 500
ENVIRONMENTS, STEPS = 8, 128  # of each worker; of each environment between two updates
DISCOUNT, TRACE, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
EPOCHS, MINIBATCH, LEARNING_RATE = 4, 512, 1e-3
EPISODES, TARGET = 100, 475.0


class ActorCritic(nn.Module):
    """CartPole's observation → the logarithms of the probabilities of both actions, and the value of the state."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation):
        return self.actor(observation).log_softmax(-1), self.critic(observation).squeeze(-1)


# -- a worker's process ------------------------------------------------------------------------------------------------


def work(scheme, index, pipe):
    torch.set_num_threads(1)
    torch.manual_seed(1 + index)
    asyncio.run(worker(scheme, index, pipe))


async def worker(scheme, index, pipe):
    model = ActorCritic()
    player = Player(model)
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    async with scheme:
        await scheme.connect()  # the model has the trainer's weights
        try:
            while True:
                steps = await asyncio.to_thread(player.play)  # the event loop goes on meanwhile
                await asyncio.to_thread(pipe.send, steps)
                await scheme.receive(timeout=60)  # the model has new weights
        except (ClosedError, BrokenPipeError):
            pass  # the trainer has said goodbye, or its process has ended


class Player:
    """Several environments, and a model that acts in all of them at once."""

    def __init__(self, model):
        self.model = model
        self.environments = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(ENVIRONMENTS)]
        self.observation = np.stack([environment.reset()[0] for environment in self.environments])
        self.returns = [0.0] * ENVIRONMENTS

    @torch.no_grad()
    def play(self):
        """The next steps, as arrays of shape [STEPS, ENVIRONMENTS, …], and the returns of the episodes that ended."""
        shape = (STEPS, ENVIRONMENTS)
        steps = {key: np.empty((*shape, 4), np.float32) for key in ("observation", "following")}
        steps |= {key: np.empty(shape, np.float32) for key in ("log_prob", "reward")}
        steps |= {key: np.empty(shape, bool) for key in ("terminated", "done")}
        steps["action"] = np.empty(shape, np.int64)
        ended = []
        for t in range(STEPS):
            log_probs, _ = self.model(torch.from_numpy(self.observation))
            actions = log_probs.exp().multinomial(1)
            steps["observation"][t] = self.observation
            steps["action"][t] = actions.squeeze(-1)
            steps["log_prob"][t] = log_probs.gather(-1, actions).squeeze(-1)
            for i, environment in enumerate(self.environments):
                following, reward, terminated, truncated, _ = environment.step(int(actions[i]))
                steps["following"][t, i], steps["reward"][t, i] = following, reward
                steps["terminated"][t, i], steps["done"][t, i] = terminated, terminated or truncated
                self.returns[i] += reward
                if terminated or truncated:
                    ended.append(self.returns[i])
                    following, self.returns[i] = environment.reset()[0], 0.0
                self.observation[i] = following
        return steps, ended


# -- the trainer -------------------------------------------------------------------------------------------------------


async def train(scheme, model, pipes, workers):
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    returns, begun = deque(maxlen=EPISODES), time.monotonic()
    async with scheme:  # says goodbye to the workers in the end
        await scheme.connect(processes=workers)  # all workers are there, with the model's first weights
        for update in range(1, UPDATES + 1):
            parts = await asyncio.gather(*map(receive, pipes))
            returns.extend(each for _, ended in parts for each in ended)
            joined = {key: np.concatenate([part[key] for part, _ in parts], axis=1) for key in parts[0][0]}
            steps = {key: torch.from_numpy(array) for key, array in joined.items()}
            await asyncio.to_thread(learn, model, optimizer, steps)  # the event loop goes on meanwhile
            version = await scheme.send_async(model)  # all workers have applied it
            mean = sum(returns) / max(len(returns), 1)
            solved = len(returns) == EPISODES and mean >= TARGET
            if update % 10 == 0 or solved:
                seconds = time.monotonic() - begun
                print(f"{seconds:5.1f} s  version {version:4}  mean return {mean:5.1f}", flush=True)
            if solved:
                return


async def receive(pipe, timeout=60.0):
    """The next object from a pipe. Other coroutines run until it is there; EOFError means that the worker has ended."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        async with asyncio.timeout(timeout):
            await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()


def learn(model, optimizer, steps):
    """A few epochs of proximal policy optimisation: Schulman et al., 2017, https://arxiv.org/abs/1707.06347."""
    advantage, target = estimate(model, steps)
    steps |= {"advantage": (advantage - advantage.mean()) / (advantage.std() + 1e-8), "target": target}
    frames = {key: tensor.flatten(0, 1) for key, tensor in steps.items()}
    for _ in range(EPOCHS):
        for chosen in torch.randperm(target.numel()).split(MINIBATCH):
            part = {key: tensor[chosen] for key, tensor in frames.items()}
            log_probs, value = model(part["observation"])
            log_prob = log_probs.gather(-1, part["action"][:, None]).squeeze(-1)
            ratio = (log_prob - part["log_prob"]).exp()
            gain = torch.min(ratio * part["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantage"]).mean()
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
            loss = 0.5 * (value - part["target"]).square().mean() - gain - ENTROPY * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


@torch.no_grad()
def estimate(model, steps):
    """Generalised advantages, and the values that the critic is to learn."""
    value, following = model(steps["observation"])[1], model(steps["following"])[1]
    # An episode that was cut off at 500 steps is worth as much as if it went on. One that has failed is not.
    error = steps["reward"] + DISCOUNT * following * ~steps["terminated"] - value
    advantage, trace = torch.empty_like(value), torch.zeros_like(value[0])
    for t in reversed(range(STEPS)):
        advantage[t] = trace = error[t] + DISCOUNT * TRACE * ~steps["done"][t] * trace
    return advantage, advantage + value


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, scheme = ActorCritic(), SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=model, num_workers=WORKERS)
    spawn, pipes, workers = multiprocessing.get_context("spawn"), [], []
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit this: Ctrl-C is for the trainer
    for index in range(WORKERS):
        reader, writer = spawn.Pipe(duplex=False)
        workers.append(spawn.Process(target=work, args=(scheme, index, writer), daemon=True))
        workers[-1].start()
        writer.close()  # now only the worker can write: when the worker has ended, reading raises EOFError
        pipes.append(reader)
    try:
        signal.signal(signal.SIGINT, handler)
        asyncio.run(train(scheme, model, pipes, workers))
    except KeyboardInterrupt:
        print("stopped", flush=True)
    # A worker that has not ended by itself is terminated when this program exits, as it is a daemon.


if __name__ == "__main__":
    main()
