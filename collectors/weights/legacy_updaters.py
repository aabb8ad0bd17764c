"""Weight updaters: TorchRL's older way to send weights to a policy. They are deprecated, and they work.

The user passes an updater to a collector (``weight_updater=``), whose ``update_policy_weights_`` then calls
:meth:`WeightUpdaterBase.push_weights`. New code uses ``weight_sync_schemes={"policy": scheme}``.

Names and behaviour follow TorchRL's "WeightUpdaterBase" page.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.model.strategy import WeightStrategy

WorkerIds = int | torch.device | Iterable[int | torch.device] | None


class _Push:
    is_counted = False  # whether its version is counted, by a copy of the weights or by a scheme


_current_push: ContextVar[_Push] = ContextVar("asyncsync_push")


class WeightUpdaterBase:
    """Base class of updaters, which push a policy's weights to the workers of a collector. A subclass overrides
    :meth:`_sync_weights_with_worker`, which is called for each of :meth:`all_worker_ids`, or replaces
    :meth:`_push_weights`.

    Constructing an updater gives a DeprecationWarning, which names the scheme to use instead.
    """

    _scheme: ClassVar[str] = "SharedMemWeightSyncScheme"
    _collector: weakref.ref[Any] | None = None
    weight_getter: Callable[[], Any] | None = None
    post_hooks: list[Callable[[], None]]
    """The hooks called after each push."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        warnings.warn(
            f"{cls.__name__} is deprecated: pass the collector a scheme instead, "
            f'weight_sync_schemes={{"policy": asyncsync.sync.{cls._scheme}()}}',
            DeprecationWarning,
            stacklevel=2,
        )
        updater = super().__new__(cls)
        updater.post_hooks = []  # not in __init__, because subclasses need not call it
        return updater

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """An updater for this policy. If the user passes the class to a collector, the collector calls this first.
        None (the default): the collector calls the constructor instead."""
        return None

    # -- the collector ------------------------------------------------------------------------------------------------

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector, which calls this. Raises RuntimeError: this updater already belongs
        to another collector."""
        registered = self.collector
        if registered is not None and registered is not collector:
            raise RuntimeError(
                f"this {type(self).__name__} already belongs to a {type(registered).__name__}: give each collector its "
                "own updater"
            )
        self._collector = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The collector to which this updater belongs. None: it is not set, or was deleted."""
        return None if self._collector is None else self._collector()

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Called by the collector's ``init_updater`` with its arguments. Does nothing; a subclass may override it."""

    def increment_version(self) -> None:
        """Count the collector's policy version up by one."""
        if (collector := self.collector) is not None:
            collector.increment_version()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def register_post_hook(self, hook: Callable[[], None]) -> None:
        """Call this hook after each push, in this process. Hooks run in the order of registration."""
        self.post_hooks.append(hook)

    # -- pushing ------------------------------------------------------------------------------------------------------

    def push_weights(self, policy_or_weights: Any = None, worker_ids: WorkerIds = None) -> None:
        """Push weights to the workers, count the collector's policy version up by one, and call the hooks.

        Args:
            policy_or_weights: module, TensorDict or dict. None: the result of :meth:`_get_server_weights`.
            worker_ids: an index, a device, or several. None: all of :meth:`all_worker_ids`.

        Raises:
            ValueError: there are no weights to push.
            NotImplementedError: the subclass overrides no method that sends weights.
        """
        current = _Push()
        token = _current_push.set(current)
        try:
            self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
            if not current.is_counted:
                self.increment_version()
            for hook in self.post_hooks:
                hook()
        finally:
            _current_push.reset(token)

    def __call__(self, policy_or_weights: Any = None, worker_ids: WorkerIds = None) -> None:
        """:meth:`push_weights`."""
        self.push_weights(policy_or_weights, worker_ids)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: WorkerIds = None) -> None:
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if weights is None:
            raise ValueError(
                f"{type(self).__name__} got no weights, and its _get_server_weights() returned None: pass weights"
            )
        weights = self._maybe_map_weights(weights)
        workers = self.all_worker_ids() if worker_ids is None else worker_ids
        if workers is None:
            self._sync_weights_with_worker(worker_id=None, server_weights=weights)
            return
        for worker in [workers] if isinstance(workers, int | torch.device) else workers:
            if not self._skip_update(worker):
                self._sync_weights_with_worker(worker_id=worker, server_weights=weights)

    def _get_server_weights(self) -> Any:
        """The weights to push if the caller gives none. None: there are none."""
        return None if self.weight_getter is None else self.weight_getter()

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """Change the weights before they are sent. Returns them unchanged; a subclass may override it."""
        return server_weights

    def _skip_update(self, worker_id: int | torch.device) -> bool:
        """Whether to send no weights to this worker this time. Returns False; a subclass may override it."""
        return False

    def all_worker_ids(self) -> list[int] | list[torch.device] | None:
        """Indices or devices of all workers. None (the default): there is one destination, which needs no name."""
        return None

    def _sync_weights_with_worker(self, *, worker_id: int | torch.device | None = None, server_weights: Any) -> None:
        """Send the weights to one worker. Raises NotImplementedError: the subclass does not override this."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot send weights to a worker: override _sync_weights_with_worker() or "
            "_push_weights()"
        )


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into a policy of this process.

    Args:
        weight_getter: returns the weights to push if the caller gives none.
        policy_weights: the destination: a module, or a TensorDict of its tensors. They are overwritten in place.
    """

    _scheme = "NoWeightSyncScheme"

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: TensorDictBase | nn.Module
    ) -> None:
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    def register_collector(self, collector: Any) -> None:
        """See :meth:`WeightUpdaterBase.register_collector`. Raises TypeError: the policy acts only in workers."""
        if getattr(collector, "acts_elsewhere", False):
            raise TypeError(
                f"{type(self).__name__} writes into a policy of this process, but the policies of a "
                f"{type(collector).__name__} act in its workers and would not get the weights: leave weight_updater "
                'out, or pass weight_sync_schemes={"policy": asyncsync.sync.SharedMemWeightSyncScheme()}, which sends '
                "them to the workers"
            )
        super().register_collector(collector)

    @classmethod
    def from_policy(cls, policy: Any) -> VanillaWeightUpdater | None:
        """An updater that writes into the tensors that this policy has at the time of a push."""
        return cls(policy_weights=policy) if isinstance(policy, nn.Module) else None

    def _sync_weights_with_worker(self, *, worker_id: int | torch.device | None = None, server_weights: Any) -> None:
        current = _current_push.get(_Push())

        def copy_and_count() -> None:
            WeightStrategy().apply_weights(self.policy_weights, server_weights)
            # Count in the same hold, so that frames of these weights do not get the older version.
            if not current.is_counted:
                current.is_counted = True
                self.increment_version()

        if (collector := self.collector) is None:
            copy_and_count()
        else:
            collector.acting_weights.apply(copy_and_count)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Sends weights to the worker processes of a collector, over their bus.

    Args:
        get_server_weights: returns the weights to push if the caller gives none.
        policy_weights: ``{device: TensorDict}``: a copy in this process for the workers whose policies are on that
            device. A push overwrites the copy in place and sends it to them. None: a push sends the weights themselves.
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], Any] | None = None,
        policy_weights: Mapping[torch.device, TensorDictBase] | None = None,
    ) -> None:
        self.weight_getter = get_server_weights
        self._copies = None if policy_weights is None else dict(policy_weights)

    @classmethod
    def from_policy(cls, policy: Any) -> Self | None:
        """An updater that sends this policy's current weights if the caller gives none."""
        if not isinstance(policy, nn.Module):
            return None
        updater = cls()
        updater.weight_getter = lambda: policy
        return updater

    def all_worker_ids(self) -> list[torch.device] | None:
        """The devices in ``policy_weights``. None: a push sends to all workers at once."""
        return None if self._copies is None else list(self._copies)

    def _sync_weights_with_worker(self, *, worker_id: int | torch.device | None = None, server_weights: Any) -> None:
        collector = self.collector
        if collector is None:
            raise RuntimeError(
                f"this {type(self).__name__} cannot reach a worker, because its collector is not set or was deleted"
            )
        if isinstance(worker_id, torch.device) and self._copies is not None:
            if worker_id not in self._copies:
                raise ValueError(f"policy_weights has no {worker_id}, but only {list(self._copies)}")
            WeightStrategy().apply_weights(self._copies[worker_id], server_weights)
            server_weights = self._copies[worker_id]
        collector.push_policy(server_weights, worker_id)


class RayWeightUpdater(MultiProcessedWeightUpdater):
    """Sends weights to the actors of a ``RayCollector``, over their bus.

    Args:
        policy_weights: the weights to push if the caller gives none: a module or TensorDict.
        remote_collectors: ignored, because the collector knows its actors.
        max_interval: must be 0. For fewer updates, pass ``max_weight_update_interval`` to the collector.
    """

    _scheme = "RayWeightSyncScheme"

    def __init__(self, policy_weights: Any = None, remote_collectors: Any = None, max_interval: int = 0) -> None:
        if max_interval:
            raise ValueError(f"max_interval={max_interval}: pass max_weight_update_interval= to the collector")
        super().__init__(get_server_weights=lambda: policy_weights)


class RPCWeightUpdater(MultiProcessedWeightUpdater):
    """Sends weights to the nodes of an ``RPCCollector``, over their bus.

    Args:
        collector_infos, collector_class, collector_rrefs, num_workers: ignored, because the collector knows its nodes.
        policy_weights: the weights to push if the caller gives none: a module or TensorDict.
    """

    _scheme = "RPCWeightSyncScheme"

    def __init__(
        self,
        collector_infos: Any = None,
        collector_class: Any = None,
        collector_rrefs: Any = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(get_server_weights=lambda: policy_weights)


class DistributedWeightUpdater(MultiProcessedWeightUpdater):
    """Sends weights to the nodes of a ``DistributedCollector``, over their bus.

    Args:
        store, num_workers, sync: ignored, because the collector knows its nodes.
        policy_weights: the weights to push if the caller gives none: a module or TensorDict.
    """

    _scheme = "DistributedWeightSyncScheme"

    def __init__(
        self, store: Any = None, policy_weights: Any = None, num_workers: int | None = None, sync: bool | None = None
    ) -> None:
        super().__init__(get_server_weights=lambda: policy_weights)


def mark_counted() -> None:
    """Note that the version of the current push, if there is one, is counted, because a scheme published it."""
    _current_push.get(_Push()).is_counted = True


def make_updater(given: Any, policy: Any) -> WeightUpdaterBase:
    """The updater from ``weight_updater=``: an updater, its class, or a callable that returns one. Raises TypeError."""
    updater = given
    if isinstance(given, type) and issubclass(given, WeightUpdaterBase) and policy is not None:
        updater = given.from_policy(policy)
    if updater is None or (callable(updater) and not isinstance(updater, WeightUpdaterBase)):
        updater = given()
    if not isinstance(updater, WeightUpdaterBase):
        raise TypeError(
            "weight_updater must be an asyncsync.collectors.WeightUpdaterBase, its class, or a callable that returns "
            f"one, not {updater!r}"
        )
    return updater
