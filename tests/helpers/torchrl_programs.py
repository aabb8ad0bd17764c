"""Programs that hand this library's blocking schemes to TorchRL's collectors; run by ``collecting_torchrl.in_program``.

Their policy writes the sum of its weights into every frame, so a batch shows with which weights it was collected.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync import sync
from helpers.collecting_torchrl import make_env

__all__ = ["Showing", "collected", "policy_of", "shown"]


class Showing(nn.Module):
    """Goes where the pole leans to, and shows its weights."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.lean = nn.Parameter(torch.tensor([0.0, 0.1, 1.0, 0.5]))
        self.weight = nn.Parameter(torch.full((4,), value))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = ((observation * self.lean).sum(-1) > 0).long()
        return action, self.total().expand(observation.shape[:-1])

    def total(self) -> torch.Tensor:
        return self.weight.detach().sum()

    def read(self) -> float:
        return float(self.total())

    @torch.no_grad()
    def fill(self, value: float) -> None:
        self.weight.fill_(value)


def policy_of(value: float = 0.0) -> TensorDictModule:
    return TensorDictModule(Showing(value), in_keys=["observation"], out_keys=["action", "shown"])


def shown(batch: Any) -> list[float]:
    """The sums of weights with which a batch was collected."""
    return sorted(set(batch["shown"].flatten().tolist()))


def collector_of(kind: str, **options: Any) -> Any:
    """One of TorchRL's collectors of two workers in CartPole, with 40 frames a batch."""
    import torchrl.collectors

    options = {"frames_per_batch": 40, "total_frames": 240, **options}
    return getattr(torchrl.collectors, kind)([make_env] * 2, **options)


def collected(scheme: str, kind: str) -> list[tuple[list[float], list[float]]]:
    """Train for 240 frames: what the frames of each batch show, and the workers' weights after the update that follows
    it, the n-th of which sets all four weights to n."""
    policy = policy_of()
    collector = collector_of(kind, policy=policy, weight_sync_schemes={"policy": getattr(sync, scheme)()})
    found = []
    try:
        for i, batch in enumerate(collector):
            policy.module.fill(i + 1.0)
            collector.update_policy_weights_()
            found.append((shown(batch), collector.map_fn("policy.module.read")))
    finally:
        collector.shutdown()
    return found
