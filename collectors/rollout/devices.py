"""Devices: what is where, when it is copied, and what then waits for the copy.

The names and the table of synchronisation functions follow TorchRL's "Collector Internals" page (Sync points, Device
casting flags):

    destination                  synchronisation
    cuda, or none given          nothing
    other, CUDA available        torch.cuda.synchronize, if CUDA is initialised
    other, MPS available         torch.mps.synchronize
    other, NPU available         torch.npu.synchronize
    other                        nothing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.arguments import Device, exact_device
from asyncsync.collectors.envs.environment import device_of, moved

__all__ = ["DeviceSetup"]


def _nothing() -> None:
    """The copy needs no waiting for."""


def _synchronize_cuda() -> None:
    # A forked child of a process that used CUDA must not touch it: what has not been initialised copies nothing.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class DeviceSetup:
    """The devices of a collector; part of it.

    Attributes:
        storing_device, policy_device, env_device: as given, or filled from ``device``; ``env_device`` may come from
            the environment.
        no_cuda_sync: whether the ``_sync_*`` functions are skipped.
    """

    env: Any
    device: torch.device | None
    storing_device: torch.device | None
    policy_device: torch.device | None
    env_device: torch.device | None
    no_cuda_sync: bool
    _cast_to_policy_device: bool
    _cast_to_env_device: bool
    _carrier_has_no_device: bool
    _sync_policy: Callable[[], None]
    _sync_env: Callable[[], None]
    _sync_storage: Callable[[], None]

    def _setup_devices(
        self,
        device: Device | None,
        storing_device: Device | None,
        policy_device: Device | None,
        env_device: Device | None,
        no_cuda_sync: bool,
    ) -> None:
        """Fill unset devices from ``device``, and install the synchronisation functions."""
        self.device = exact_device(device)
        self.storing_device = exact_device(device if storing_device is None else storing_device)
        self.policy_device = exact_device(device if policy_device is None else policy_device)
        self.env_device = exact_device(device if env_device is None else env_device)
        self.no_cuda_sync = no_cuda_sync
        self._sync_storage = self._get_sync_fn(self.storing_device)
        self._sync_policy = self._get_sync_fn(self.policy_device)
        self._sync_env = self._get_sync_fn(self.env_device)
        self._cast_to_policy_device = self.policy_device != self.env_device

    def _get_sync_fn(self, device: torch.device | None) -> Callable[[], None]:
        """What waits for copies *to* a device; see the module's table."""
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

    def _apply_env_device(self) -> None:
        """Move the environment to its device, or learn the device from the environment."""
        if self.env_device is not None:
            self.env = moved(self.env, self.env_device)
        elif (own := exact_device(device_of(self.env))) is not None:
            self.env_device = own
            self._sync_env = self._get_sync_fn(own)
        self._cast_to_env_device = self._cast_to_policy_device or (
            exact_device(device_of(self.env)) != self.storing_device
        )

    def _non_blocking(self, device: torch.device, synchronize: Callable[[], None]) -> bool:
        """A copy may return before it is done only if something waits for it, or the device's own order does."""
        return device.type == "cuda" or (synchronize is not _nothing and not self.no_cuda_sync)

    def _cast(self, data: TensorDictBase, device: torch.device, synchronize: Callable[[], None]) -> TensorDictBase:
        """A TensorDict on another device; the same object where it is there already."""
        if data.device == device:
            return data
        there = data.to(device, non_blocking=self._non_blocking(device, synchronize))
        if not self.no_cuda_sync:
            synchronize()
        return there
