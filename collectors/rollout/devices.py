"""Devices: what is where, when it is copied, and what then waits for the copy.

The table of what waits follows TorchRL's "Collector Internals" page; docs/collector-internals.md has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.arguments import RolloutArguments, exact_device
from asyncsync.collectors.envs.environment import device_of, moved


def _nothing() -> None:
    """The copy needs no waiting for."""


def _synchronize_cuda() -> None:
    # A forked child of a process that used CUDA must not touch it: what has not been initialised copies nothing.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def synchronisation(device: torch.device | None) -> Callable[[], None]:
    """What waits for copies *to* a device; see the table in docs/collector-internals.md."""
    if device is None or device.type == "cuda":
        return _nothing
    if torch.cuda.is_available():
        return _synchronize_cuda
    if torch.backends.mps.is_available():
        return torch.mps.synchronize
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        synchronize: Callable[[], None] = npu.synchronize
        return synchronize
    return _nothing


class RolloutDevices:
    """The devices of a collector's rollouts, from its arguments.

    Attributes:
        device: where the next three are, unless they were given.
        storing, policy, env: where batches are, where the policy acts, and where the environment is moved to.
        no_cuda_sync: nothing waits for copies.
        sync_policy, sync_env, sync_storage: called after a copy to the policy's, the environment's, the batch's device.
        cast_to_policy_device, cast_to_env_device: whether the carrier is copied before one of these reads it.
        carrier_has_no_device: whether policy and environment cannot share one; known after :meth:`place`.
    """

    def __init__(self, arguments: RolloutArguments) -> None:
        self.device = device = exact_device(arguments.device)
        self.storing = exact_device(arguments.storing_device) or device
        self.policy = exact_device(arguments.policy_device) or device
        self.env = exact_device(arguments.env_device) or device
        self.no_cuda_sync: bool = arguments.no_cuda_sync
        self.sync_storage = synchronisation(self.storing)
        self.sync_policy = synchronisation(self.policy)
        self.sync_env = synchronisation(self.env)
        self.cast_to_policy_device = self.policy != self.env
        self.cast_to_env_device = self.cast_to_policy_device

    def place(self, environment: Any) -> Any:
        """The environment, moved to its device; or its own device becomes that of the environment."""
        if self.env is not None:
            environment = moved(environment, self.env)
        elif (own := exact_device(device_of(environment))) is not None:
            self.env = own
            self.sync_env = synchronisation(own)
        if exact_device(device_of(environment)) != self.storing:
            self.cast_to_env_device = True
        self.carrier_has_no_device = self.env is None or self.policy not in (None, self.env)
        return environment

    @property
    def are_alike_on_cpu(self) -> bool:
        """Whether nothing is on another device than the CPU, and nothing is cast."""
        return not self.cast_to_policy_device and all(
            device is None or device.type == "cpu" for device in (self.storing, self.policy, self.env)
        )

    @property
    def stores_without_waiting(self) -> bool:
        """Whether a copy into a batch may return before it is done."""
        return self.storing is not None and self.is_non_blocking(self.storing, self.sync_storage)

    def is_non_blocking(self, device: torch.device, synchronize: Callable[[], None]) -> bool:
        """A copy may return before it is done only if something waits for it, or the device's own order does."""
        return device.type == "cuda" or (synchronize is not _nothing and not self.no_cuda_sync)

    def cast(self, data: TensorDictBase, device: torch.device, synchronize: Callable[[], None]) -> TensorDictBase:
        """A TensorDict on another device; the same object where it is there already."""
        if data.device == device:
            return data
        there = data.to(device, non_blocking=self.is_non_blocking(device, synchronize))
        if not self.no_cuda_sync:
            synchronize()
        return there
