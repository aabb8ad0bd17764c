"""The weights of a collector whose policy acts in worker processes: which models are here and which are there, whom an
update reaches, and how versions are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.collectors.arguments import exact_device
from asyncsync.collectors.weights.api import WeightsAPI
from asyncsync.collectors.weights.in_process import fitted
from asyncsync.collectors.weights.plan import Planned, belongs_to
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.errors import AckTimeout, PartialSendError, PeerLost
from asyncsync.runtime.threads import WorkThread, finish

__all__ = ["WorkersWeights"]

FAILURE_SECONDS = 1.0
"""How long a worker's own failure is waited for when the bus reports that the worker is lost."""


class WorkersWeights(WeightsAPI):
    """Part of :class:`asyncsync.collectors.MultiCollector`."""

    acts_elsewhere = True
    num_workers: int
    postproc: Callable[[Any], Any] | None
    _group: WorkerGroup
    _acting_devices: dict[int, set[torch.device]]
    _since: list[int]

    # -- models -------------------------------------------------------------------------------------------------------

    def _acting(self, model_id: str) -> Any:
        if self._goes_with_workers(model_id):
            return super()._acting(model_id)
        served = sorted(self._sender_schemes) or "none"
        raise ValueError(
            f"unknown model_id {model_id!r}: this {type(self).__name__} has schemes for {served}; pass "
            "weight_sync_schemes={model_id: scheme} for what its workers are to receive"
        )

    def _registered(self, model_id: str) -> Any:
        return super()._acting(model_id)

    def _goes_with_workers(self, model_id: str) -> bool:
        # Batches are postprocessed here, unless workers write them to a replay buffer.
        return self.postproc is not None and belongs_to("postproc", model_id)

    # -- updates ------------------------------------------------------------------------------------------------------

    def _take(self, given: Any) -> None:
        if "policy" not in self._sender_schemes and self.weight_updater is None:
            self._acting("policy")  # raises: nothing would bring them to the workers
        is_other = given is not None and isinstance(self.policy, nn.Module)
        if is_other and (prepared := fitted(self.policy, given)) is not None:
            self._local.apply(prepared.apply, DEFAULT_TIMEOUT)
        self.update_policy_weights_(given)

    def _workers_of(self, device: torch.device) -> list[int]:
        exact = torch.device("cpu") if device.type == "cpu" else exact_device(device)  # as tensors name it
        found = [index for index, own in self._acting_devices.items() if exact in own]
        return found or super()._workers_of(device)

    def _policy_devices(self) -> set[torch.device]:
        return set().union(*self._acting_devices.values())

    def _carry_out(self, update: Planned, wait: bool) -> None:
        try:
            super()._carry_out(update, wait)
        except PartialSendError as error:
            if (failure := self._failure_behind(error)) is not None:
                raise failure  # noqa: B904 - it has its cause
            raise

    async def _carry_out_async(self, update: Planned, wait: bool) -> None:
        try:
            await super()._carry_out_async(update, wait)
        except PartialSendError as error:
            thread = WorkThread("asyncsync-collector-failure")
            try:
                failure = await finish(thread.submit(partial(self._failure_behind, error)))
            finally:
                thread.abandon()
            if failure is not None:
                raise failure  # noqa: B904 - it has its cause
            raise

    def _failure_behind(self, error: PartialSendError) -> BaseException | None:
        """What has ended a worker that the update has not reached: its own exception, or how its process ended."""
        if not any(isinstance(one, PeerLost) for one in error.failed.values()):
            return None
        try:
            self._group.wait(lambda: None, FAILURE_SECONDS)
        except AckTimeout:
            return None
        except BaseException as failure:
            if failure is not self._group.failure:  # Ctrl-C, or the collector's end
                raise
            return failure
        return None

    # -- versions -----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        is_root = self._sender_schemes and not self._weights.come_from_above
        return self._group.counted + (self._senders.version if is_root else self._weights.received())

    def increment_version(self) -> None:
        """Count the policy's version up by one: for weights that reach the workers by other ways than schemes. Frames
        that they collect from now on are labelled with it."""
        self._group.count_version()

    def _versions(self) -> dict[str, Any]:
        return super()._versions() | {"own": self._group.counted}

    def _carry_on(self, versions: Mapping[str, Any], *, is_sent: bool = True) -> None:
        own = versions["own"]
        if is_sent:
            self._senders.carry_on(versions["sent"])
        else:  # workers keep the number that came with their weights: the rest is counted here
            own += max(0, max(versions["sent"].values(), default=0) - self._senders.version)
        self._group.counted = max(self._group.counted, own)

    def _published(self, version: int, workers: list[int] | None = None) -> None:
        self._updated(workers)

    def _updated(self, workers: list[int] | None) -> None:
        """These workers (None: all) have the newest weights."""
        for worker in range(self.num_workers) if workers is None else workers:
            self._since[worker] = 0
