"""The devices of a rollout: where data is, when it is copied, and how the collector waits for the copy.

docs/collector-internals.md has a table of these waits, which follows TorchRL's "Collector Internals" page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.arguments import RolloutArguments, exact_device
from asyncsync.collectors.envs.environment import device_of, moved


def _no_wait() -> None:
    pass


def _synchronize_cuda() -> None:
    # A forked child of a process that used CUDA must not touch CUDA. Without initialisation, there are no copies.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def synchronisation(device: torch.device | None) -> Callable[[], None]:
    """The function that waits for copies *to* a device; see the table in docs/collector-internals.md."""
    if device is None or device.type == "cuda":
        return _no_wait
    if torch.cuda.is_available():
        return _synchronize_cuda
    if torch.backends.mps.is_available():
        return torch.mps.synchronize
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        synchronize: Callable[[], None] = npu.synchronize
        return synchronize
    return _no_wait


class RolloutDevices:
    """The devices of a collector's rollouts, from its arguments.

    Attributes:
        device: default of the next three devices.
        storing, policy, env: the devices of batches, of the policy, and of the environment.
        no_cuda_sync: do not wait for copies.
        sync_policy, sync_env, sync_storage: called after a copy to the policy's, the environment's, the batch's device.
        cast_to_policy_device, cast_to_env_device: whether the carrier is copied before one of the two reads it.
        carrier_has_no_device: whether the environment has no device, or the policy another one; set by :meth:`place`.
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
        """Move the environment to ``env`` and return it. If ``env`` is None, set it to the environment's own device."""
        if self.env is not None:
            environment = moved(environment, self.env)
        elif (own := exact_device(device_of(environment))) is not None:
            self.env = own
            self.sync_env = synchronisation(own)
        if exact_device(device_of(environment)) != self.storing:
            self.cast_to_env_device = True
        self.carrier_has_no_device = self.env is None or self.policy not in (None, self.env)
        return environment

    def is_non_blocking(self, device: torch.device, synchronize: Callable[[], None]) -> bool:
        """Whether a copy to this device may return before it has finished. This needs a later wait for the copy, or a
        device that orders later work after it."""
        return device.type == "cuda" or (synchronize is not _no_wait and not self.no_cuda_sync)

    def cast(self, data: TensorDictBase, device: torch.device, synchronize: Callable[[], None]) -> TensorDictBase:
        """The TensorDict on this device; the same object if it is already there."""
        if data.device == device:
            return data
        there = data.to(device, non_blocking=self.is_non_blocking(device, synchronize))
        if not self.no_cuda_sync:
            synchronize()
        return there
