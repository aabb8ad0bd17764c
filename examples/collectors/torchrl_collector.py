"""TorchRL's own collector with a scheme of asyncsync: only an import changes. Needs the extra torchrl.

    python examples/collectors/torchrl_collector.py

REINFORCE on CartPole-v1. Two worker processes of TorchRL's MultiSyncCollector step its environment; each update
reaches both of them, whole, before the next batch is collected.
"""

from __future__ import annotations

import warnings

warnings.filterwarnings("ignore", category=FutureWarning, module="torchrl")

import torch  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torch import nn  # noqa: E402
from torchrl.collectors import MultiSyncCollector  # noqa: E402
from torchrl.envs import GymEnv, StepCounter, TransformedEnv  # noqa: E402
from torchrl.modules import OneHotCategorical, ProbabilisticActor  # noqa: E402

from asyncsync.sync import SharedMemWeightSyncScheme  # noqa: E402 - was: from torchrl.weight_update import …

BATCHES, FRAMES = 10, 1000
DISCOUNT = 0.98


def make_env() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter())


def make_policy() -> ProbabilisticActor:
    layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    logits = TensorDictModule(layers, in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(logits, in_keys=["logits"], distribution_class=OneHotCategorical)


def returns(rewards: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
    """Discounted sums of rewards until the end of each trajectory, or of the batch: float32 [workers × time]."""
    found, after = torch.empty_like(rewards), torch.zeros(())
    for i in range(len(rewards) - 1, -1, -1):
        after = rewards[i] + DISCOUNT * after * ~done[i]
        found[i] = after
    return found


def main() -> None:
    torch.manual_seed(0)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    scheme = SharedMemWeightSyncScheme()
    collector = MultiSyncCollector(
        [make_env] * 2,
        policy,
        frames_per_batch=FRAMES,
        total_frames=BATCHES * FRAMES,
        cat_results=0,
        weight_sync_schemes={"policy": scheme},
    )
    try:
        for number, batch in enumerate(collector):
            ended = batch["next", "done"].reshape(-1)
            # A worker's part of the batch ends in the middle of a trajectory: what comes after it is unknown.
            ended[FRAMES // 2 - 1 :: FRAMES // 2] = True
            sums = returns(batch["next", "reward"].reshape(-1), ended)
            sums = (sums - sums.mean()) / (sums.std() + 1e-6)
            loss = -(policy.get_dist(batch).log_prob(batch["action"]).reshape(-1) * sums).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            collector.update_policy_weights_()  # returns when both workers have applied it
            length = batch["next", "step_count"][batch["next", "done"]].float().mean()
            if number % 2 == 1:
                print(f"{FRAMES * (number + 1):6} frames, version {scheme.version}: {length:5.1f} steps per trajectory")
    finally:
        collector.shutdown()
        scheme.shutdown()


if __name__ == "__main__":
    main()
