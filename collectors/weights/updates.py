"""How weights reach a collector's models, and how their versions are counted.

    update_policy_weights_(…)                  a scheme of the trainer or collector above, or receive_weights(…)
        |  becomes {model_id: weights},                                     |
        |  checked before anything is done                                  |
        |-- a weight updater (deprecated) pushes the policy                 |
        |-- models with a sender scheme go to the workers                   |
        '-- ActingWeights: the others are models of this process   <--------'

A model that this collector *receives* is applied here by the scheme above, so this collector only sends it on to its
workers. Each step holds the gates of :class:`ActingWeights`, so weights change only between two steps.

**Versions.** A bus counts the versions that are published on it. Updates without a scheme are counted where they are
applied (``ActingWeights.local_version``) or, for workers, by the collector above (``ActingWeights.updater_versions``).
In a tree of collectors, each bus counts its own versions and also carries the root's version, which labels the frames.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.arguments import as_workers, check_timeout, refuse_misspelt
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore, join_buses
from asyncsync.bus.worker import WorkerLink
from asyncsync.collectors.arguments import exact_device
from asyncsync.collectors.weights.legacy_updaters import WeightUpdaterBase, WorkerIds, make_updater, mark_counted
from asyncsync.errors import AckTimeout, PartialSendError
from asyncsync.model.gate import Gate
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights
from asyncsync.model.update import Prepared
from asyncsync.runtime.threads import run_in_thread, run_on_loop, run_on_loop_async, until_done, until_done_async
from asyncsync.schemes import sources
from asyncsync.schemes.aio import WeightSyncScheme as AsyncScheme
from asyncsync.schemes.blocking import Bus, WeightSyncScheme, run_without_waiting
from asyncsync.schemes.scheme import Scheme

Change = concurrent.futures.Future[None]

POLL_SECONDS = 0.05

ARGUMENTS = ("policy_or_weights", "weights", "policy", "worker_ids", "model_id", "weights_dict", "wait", "timeout")
"""The arguments of ``update_policy_weights_``."""


class WeightsAPI:
    """The part of :class:`asyncsync.collectors.base.BaseCollector` for weights. Names, forms and exclusions follow
    TorchRL's "RPCCollector" page."""

    policy: Any = None  # the registered policy, whose weights a bare update_policy_weights_() sends
    acts_elsewhere: bool = False  # whether the policy acts only in other processes
    worker_idx: Any

    def __init__(self) -> None:
        self._weight_updater: WeightUpdaterBase | None = None
        self._sender_schemes: dict[str, Any] = {}  # send weights to the workers
        self._sender_buses: list[Any] = []
        self._worker_devices: dict[int, set[torch.device]] = {}  # devices of each worker's policy
        self.acting_weights = ActingWeights()

    # -- updates ------------------------------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: WorkerIds = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        wait: bool = True,
        **kwargs: Any,
    ) -> None:
        """Send new weights, and return when every addressed worker acts with them.

        Args:
            policy_or_weights: module, TensorDict or dict. None: the current weights of the registered policy, or of the
                updater. ``{worker_idx: weights}`` gives each worker its own weights.
            weights: the same, as a TensorDict or dict.
            policy: the same, as a module.
            worker_ids: workers to update: indices, or the devices of their policies. None: all.
            model_id: id of the model. None: ``"policy"``.
            weights_dict: ``{model_id: weights}``. Each worker applies all of them together, between two steps, or none.
            wait: True: wait for the workers. False: return when the weights are copied and announced as version
                :attr:`policy_version`. Each worker applies this version, or a newer one, after its current step;
                ``max_lag`` bounds how many versions it may be behind. Models in this process are updated before this
                returns.
            kwargs: ``timeout=`` in seconds (60), and further arguments of the updater's ``push_weights``. Without an
                updater, others are ignored, but an argument that looks misspelt raises TypeError.

        Raises:
            ValueError: arguments exclude each other, or a model or worker is unknown. Nothing was changed.
            TypeError: ``worker_ids`` without schemes or updater, or an argument looks misspelt.
            SchemaMismatch: the weights do not fit a model of this process. Nothing was changed.
            PartialSendError: names the workers that have not applied the weights, and why. They still converge.
            NotConnected: no workers are connected.
            ClosedError: the schemes were shut down.
        """
        given = as_update(policy_or_weights, weights, policy, model_id, weights_dict)
        run_without_waiting(self._update(given, worker_ids, wait, kwargs, blocking=True))

    async def update_policy_weights_async(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: WorkerIds = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        wait: bool = True,
        **kwargs: Any,
    ) -> None:
        """:meth:`update_policy_weights_` for coroutines of any event loop. Do not change the given weights until this
        returns."""
        given = as_update(policy_or_weights, weights, policy, model_id, weights_dict)
        await self._update(given, worker_ids, wait, kwargs, blocking=False)

    # With ``blocking=True``, no coroutine here awaits anything: ``run_without_waiting`` runs it in the caller's thread.

    async def _update(
        self, given: Mapping[str, Any], worker_ids: WorkerIds, wait: bool, kwargs: dict[str, Any], *, blocking: bool
    ) -> None:
        updater = self.weight_updater
        timeout: float = kwargs.pop("timeout", DEFAULT_TIMEOUT)
        check_timeout(timeout)
        if "policy_weights" in kwargs:
            raise TypeError("policy_weights= is not supported: pass the weights positionally, or as weights=")
        if updater is None:
            refuse_misspelt("update_policy_weights_", kwargs, ARGUMENTS, 0.6)
            if worker_ids is not None and not self._sender_schemes:
                raise TypeError(
                    f"worker_ids={worker_ids!r}, but this {type(self).__name__} has no workers to choose from, because "
                    "it has neither weight_sync_schemes nor a weight_updater: leave worker_ids out"
                )
        elif "policy" in given:
            if len(given) > 1:
                raise ValueError(
                    f"a weight updater pushes only the policy, not {sorted(given)}: use weight_sync_schemes"
                )
            # With those options that this updater's push_weights() accepts.
            parameters = inspect.signature(updater.push_weights).parameters
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            options = {n: v for n, v in (kwargs | {"timeout": timeout}).items() if takes_all or n in parameters}
            pushed = partial(updater.push_weights, given["policy"], worker_ids, **options)
            if blocking:
                pushed()
            else:
                await run_in_thread("asyncsync-updater", pushed)
            return
        sent, changes = self._split_update(given, worker_ids)
        workers, before = self._worker_indices(worker_ids), self._sent_version
        try:
            if sent:
                await self._send(sent, workers, timeout if wait else None, blocking=blocking)
        finally:  # even after an error: workers converge to a published version, so this process must apply it, too
            if changes and (not sent or self._sent_version > before):
                await self.acting_weights.run_change(partial(self._apply_locally, changes), timeout, blocking=blocking)

    def _split_update(self, given: Mapping[str, Any], worker_ids: WorkerIds) -> tuple[dict[str, Any], list[Prepared]]:
        """Split an update into weights for the sender schemes and checked changes to models of this process."""
        name, schemes = type(self).__name__, self._sender_schemes
        sent = {m: w for m, w in given.items() if m in schemes}
        own = {m: w for m, w in given.items() if m not in sent and m not in self.acting_weights.schemes}
        if sent and (apart := sorted(m for m in own if not self._acts_beside_workers(m))):
            raise ValueError(
                f"{apart} of {sorted(given)} has no scheme, so workers cannot switch them together: update each "
                "alone, or give each model a scheme in weight_sync_schemes"
            )
        if by_worker_alone := sorted(m for m, w in own.items() if sources.is_per_worker(w)):
            raise ValueError(
                f"{{worker_idx: weights}} was given for {by_worker_alone}, but no worker of this {name} receives that "
                "model: pass the weights themselves, or give it a scheme in weight_sync_schemes"
            )
        if own and worker_ids is not None:
            raise ValueError(f"unknown model_id {sorted(own)}: the workers receive {sorted(schemes)}")
        changes = [
            prepared_copy(self._acting_model(m), self._registered_model(m) if w is None else w) for m, w in own.items()
        ]
        for model_id, weights in sent.items():
            if weights is None and not schemes[model_id].sources.has_default():
                self._registered_model(model_id)  # raises UnknownModel if there are no weights to send
        if sent:
            for change in changes:
                change.resolve()  # raises SchemaMismatch before anything is sent
        elif not own and not self.cascades:
            raise ValueError(
                f"this {name} receives {sorted(given)} by its weight_recv_schemes and sends to no workers: update the "
                "weights at their sender"
            )
        return sent, changes

    async def _send(
        self, update: Mapping[str, Any], workers: list[int] | None, timeout: float | None, *, blocking: bool
    ) -> None:
        """Send an update by the schemes. Returns when the workers have applied it or, without a timeout, when it is
        announced. Even if only some workers applied it, it is published: the others converge. Raises ValueError: the
        models are on several buses; and the errors of the schemes' ``send`` or ``publish``."""
        schemes = {model_id: self._sender_schemes[model_id] for model_id in update}
        buses = buses_of(schemes.values())
        if len(buses) > 1:
            raise ValueError(
                f"workers cannot switch {sorted(update)} together, because each of their schemes has its own bus. "
                "Construct a bus = asyncsync.sync.Bus(), and each scheme with bus=bus; or update one model at a time"
            )
        moved = {scheme.model_id or "": update[m] for m, scheme in schemes.items() if scheme.moves_weights}
        before = self._sent_version
        try:
            for bus in buses:  # none, if no scheme moves weights
                if timeout is None and blocking:
                    bus.publish(moved, workers)
                elif timeout is None:
                    await bus.publish_async(moved, workers)
                elif blocking:
                    bus.send(moved, workers, timeout)
                else:
                    await bus.send_async(moved, workers, timeout)
            for scheme in schemes.values():
                if not scheme.moves_weights:
                    scheme.send()  # only counts the version
        except PartialSendError as error:
            look = partial(self._raise_worker_failure, error)
            if blocking:
                run_on_loop(look)
            else:
                await run_on_loop_async(look)
            raise
        finally:
            if (version := self._sent_version) > before:
                mark_counted()
                self._on_published(version)

    def _apply_locally(self, changes: Collection[Prepared]) -> None:
        """Change models of this process, all of them or none, and count the local version up. Called between two steps.
        Raises SchemaMismatch: nothing was changed."""
        for prepared in changes:
            prepared.resolve()
        for prepared in changes:
            prepared.apply()
        for prepared in changes:
            prepared.complete()
        self.acting_weights.local_version += 1

    def _worker_indices(self, worker_ids: Any) -> list[int] | None:
        """The indices of the workers that these indices and devices name. None: all workers."""
        if worker_ids is None:
            return None
        is_several = isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str)
        indices: list[int] = []
        for worker in worker_ids if is_several else [worker_ids]:
            if isinstance(worker, torch.device):
                exact = torch.device("cpu") if worker.type == "cpu" else exact_device(worker)  # as tensors name it
                found = [index for index, devices in self._worker_devices.items() if exact in devices]
                if not found:
                    raise ValueError(f"this {type(self).__name__} has no worker whose policy is on {worker}")
                indices += found
            else:
                indices.append(worker)
        return as_workers(indices)

    def push_policy(self, weights: Any, worker_ids: WorkerIds) -> None:
        # Updaters call this to send weights by the policy's scheme.
        if "policy" not in self._sender_schemes:
            raise RuntimeError(
                f"this {type(self).__name__} has no scheme that sends a policy to workers: use VanillaWeightUpdater "
                "for a policy in this process, or pass weight_sync_schemes="
            )
        run_without_waiting(
            self._send({"policy": weights}, self._worker_indices(worker_ids), DEFAULT_TIMEOUT, blocking=True)
        )

    # -- what a subclass with workers overrides -----------------------------------------------------------------------

    def _acts_beside_workers(self, model_id: str) -> bool:
        """Whether this model acts in this process although the policy acts in workers. Such a model may be updated
        together with the workers' models."""
        return False

    def _on_published(self, version: int) -> None:
        """Called after a version was published."""

    async def _raise_worker_failure(self, error: PartialSendError) -> None:
        """On the loop thread: if a worker that did not get the update has ended, raise the error that ended it."""

    # -- models -------------------------------------------------------------------------------------------------------

    def get_model(self, model_id: str) -> Any:
        """The model with this id: ``"policy"``, an attribute path from this collector, such as
        ``env.transform[0].module`` or ``postproc``, or a path from the policy, such as ``actor`` for ``policy.actor``.

        Raises:
            LookupError: there is no such model.
        """
        return find_model(self, model_id, self.policy)

    def _acting_model(self, model_id: str) -> Any:
        """The model with this id that acts in this process. Raises UnknownModel."""
        return self.get_model(model_id)

    def _registered_model(self, model_id: str) -> Any:
        """The model with this id whose weights an update sends if none are given. Raises UnknownModel."""
        return self.get_model(model_id)

    # -- schemes and the updater --------------------------------------------------------------------------------------

    def _set_up_senders(
        self, schemes: Mapping[str, Any] | None, weight_updater: Any, context: Any, num_workers: int | None = None
    ) -> None:
        """Prepare schemes and the updater, without communication. Workers switch the models of one bus together, so
        schemes without an address from the user are moved onto one bus first. ``context.get_model(model_id)`` returns
        the registered models. ``num_workers`` None: workers come and go. Raises TypeError, ValueError, RuntimeError: a
        scheme cannot send."""
        updater = None if weight_updater is None else make_updater(weight_updater, self.policy)
        blocking = as_blocking("weight_sync_schemes", schemes or {})
        for model_id, scheme in blocking.items():
            if not scheme.moves_weights:
                continue
            if scheme.bus.closed:
                raise ValueError(
                    f"weight_sync_schemes[{model_id!r}] was shut down, perhaps with its collector: construct a new "
                    "scheme"
                )
            owner = _collectors_of_buses.get(scheme.bus)
            if owner is not None and owner() is not None:
                raise ValueError(
                    f"weight_sync_schemes[{model_id!r}] already serves another collector: construct a scheme (or a "
                    "Bus) for each collector"
                )
        fresh = {m: scheme for m, scheme in blocking.items() if scheme.role is None or scheme.pid != os.getpid()}
        join_buses([scheme for scheme in fresh.values() if scheme.moves_weights])
        for model_id, scheme in blocking.items():
            if model_id in fresh:
                has_weights = isinstance(sources.find_model(context, model_id), nn.Module | TensorDictBase | Mapping)
                called = isinstance(scheme, getattr(context, "called_schemes", ()))
                remotes: dict[str, Any] = {"remotes": {}} if called else {}  # the collector adds the remotes later
                source = context if has_weights else None
                scheme.init_on_sender(model_id=model_id, context=source, num_workers=num_workers, **remotes)
                continue
            check = scheme.bus.check_role if scheme.is_registered else scheme.check_can_init
            check("sender")
            if scheme.model_id is not None or num_workers is not None:  # a RayModuleTransform's scheme has no model_id
                _check_name("weight_sync_schemes", model_id, scheme)
            if num_workers is not None and (count := scheme.bus.num_workers) not in (None, num_workers):
                raise ValueError(
                    f"weight_sync_schemes[{model_id!r}] was initialised for {count} workers, but this collector has "
                    f"{num_workers}: leave num_workers out of init_on_sender(), or do not call it"
                )
        self._sender_schemes, self._sender_buses = blocking, buses_of(blocking.values())
        _collectors_of_buses.update({bus: weakref.ref(self) for bus in self._sender_buses})
        self.weight_updater = updater  # after the schemes, because the updater may look at them

    def _connect_senders(self, timeout: float) -> None:
        connect_all(self._sender_schemes.values(), timeout)
        if version := self._sent_version:
            self._on_published(version)

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """The (deprecated) updater that ``update_policy_weights_`` uses, or None. Set it to an updater, an updater
        class, or a callable that returns an updater. Setting it registers the collector with the updater."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, given: Any) -> None:
        updater = None if given is None else make_updater(given, self.policy)
        if updater is not None:
            updater.register_collector(self)
        self._weight_updater = updater

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call the weight updater's ``init`` with these arguments. Does nothing without an updater."""
        if self.weight_updater is not None:
            self.weight_updater.init(*args, **kwargs)

    @property
    def _receiver_schemes(self) -> dict[str, Any]:
        return self.acting_weights.schemes

    def _end_weights(self, timeout: float) -> None:
        shut_down_all([*self._sender_schemes.values(), *self.acting_weights.schemes.values()], timeout)

    # -- from above ---------------------------------------------------------------------------------------------------

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, Any],
        *,
        synchronize_weights: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Receive these models' weights from the trainer or collector above. Schemes apply them between two steps.

        Args:
            weight_recv_schemes: ``{model_id: scheme}``. This method initialises those that are not initialised yet.
            synchronize_weights: True: connect, and return when the initial weights are applied.
            timeout: seconds to connect.

        Raises:
            RuntimeError: the collector's ``worker_idx`` was never set.
            TypeError, ValueError: a scheme cannot receive, or its model is registered already.
            NotConnected, SchemaMismatch: a scheme's ``connect`` raised it.
        """
        # Between two steps, because a step that has already begun would not hold the new gates.
        self.acting_weights.apply(lambda: self.acting_weights.register(weight_recv_schemes, self), timeout)
        self._pass_versions_on()
        if synchronize_weights:
            self.acting_weights.connect(weight_recv_schemes, timeout)

    def _add_receiver(self, scheme: Any) -> None:
        # A scheme calls this when it is initialised to receive with this collector as its context.
        self.acting_weights.add_receiver(scheme)
        self._pass_versions_on()

    def _pass_versions_on(self) -> None:
        """Make later updates of this collector's buses carry the version that came from above."""
        for bus in self._sender_buses:
            bus.set_origin(self.acting_weights.origin)

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Apply the newest weights from the receiver schemes. Without such schemes: apply the given weights, or those
        of the registered policy.

        Does not wait for new weights, because schemes apply updates by themselves, between two steps. A collector with
        workers sends the given weights on, as a version of its own.

        Args:
            policy_or_weights: module, TensorDict or dict for this collector's policy.
            weights: the same, as a TensorDict or dict.
            policy: the same, as a module.

        Raises:
            ValueError: several arguments were given, or any while receiver schemes are registered.
            SchemaMismatch: the weights do not fit. Nothing was changed.
            PartialSendError: names the workers that have not applied the weights, and why.
            ClosedError: the schemes were shut down.
            Fenced: another process has this collector's place, so its schemes receive nothing more.
        """
        given = as_update(policy_or_weights, weights, policy, None, None)["policy"]
        if not self.acting_weights.schemes:
            self._apply_given(given)
        elif given is not None:
            raise ValueError(
                f"this {type(self).__name__} receives {sorted(self.acting_weights.schemes)} by weight_recv_schemes: "
                "call receive_weights() without arguments, or send the weights from above"
            )
        else:
            self._receive_weights_scheme()

    def _apply_given(self, given: Any) -> None:
        """Apply these weights to the policy and send them on; None: the registered policy's weights."""
        source = self._registered_model("policy") if given is None else given
        change = prepared_copy(self._acting_model("policy"), source)
        self.acting_weights.apply(lambda: self._apply_locally([change]))
        if "policy" in self._sender_schemes:
            self.update_policy_weights_(source)

    def _receive_weights_scheme(self) -> None:
        """Make receiver schemes apply updates that wait for a receive (``apply="on_receive"``). A remote parent (RPC,
        Ray) calls this: its schemes apply the version of the call, and other schemes the version that has arrived.
        Raises RuntimeError: there are no receiver schemes; ClosedError, Fenced: nothing has arrived, and nothing
        will."""
        if not self.acting_weights.schemes:
            raise RuntimeError(
                f"this {type(self).__name__} has no receiver schemes: pass weight_recv_schemes=, or call "
                "register_scheme_receiver()"
            )
        others = []
        for scheme in self.acting_weights.schemes.values():
            if scheme.current_call() is not None:
                scheme.receive()
            elif scheme.moves_weights:
                others.append(scheme)

        def apply_pending() -> None:
            for scheme in others:
                scheme.run_on_loop(partial(scheme.apply_pending, None))

        if others:
            self.acting_weights.apply(apply_pending)

    @property
    def cascades(self) -> bool:
        """Whether the collector sends received updates on to workers. :mod:`asyncsync.bus.applying` reads this."""
        return bool(self._sender_schemes) or self.weight_updater is not None

    # -- versions -----------------------------------------------------------------------------------------------------

    @property
    def _sent_version(self) -> int:
        return max((scheme.version for scheme in self._sender_schemes.values()), default=0)

    @property
    def policy_version(self) -> int:
        """The newest published version; without workers, the version that acts here; in a tree, the root's version."""
        published = self._sender_schemes and self.acting_weights.main_bus is None
        return self._sent_version if published else self.acting_weights.version()

    def increment_version(self) -> None:
        """Count the version of this collector's policy up by one, after a change without a scheme."""
        self.acting_weights.local_version += 1
        self.acting_weights.end_hold()

    def _versions(self, own: int) -> dict[str, Any]:
        """The counters that a checkpoint keeps, so that versions continue from it. ``own``: the collector's own one."""
        return {"own": own, "sent": {m: scheme.version for m, scheme in self._sender_schemes.items()}}

    def _restore_sent_versions(self, versions: Mapping[str, int]) -> None:
        """Raise each scheme to its model's version, if that is higher. Schemes of one bus share one count."""
        for model_id, scheme in self._sender_schemes.items():
            if scheme.version < (version := versions.get(model_id, 0)):
                scheme.load_state_dict({"version": version})


class ActingWeights:
    """The weights of one collector that act in this process. Each step holds them, whichever thread steps. Received
    updates, and updates of models without a scheme, are applied between two steps.

    Attributes:
        gate: the gate of models without a scheme.
        schemes: the receiver schemes, by model id.
        local_version: how many updates were applied here without schemes.
        main_bus: the receiver schemes' bus whose versions label frames: the policy's, or else the first. None: without
            receiver schemes.
        updater_versions: returns how many versions the updaters above have counted. None: this collector is no worker.
        newest_above: returns the newest version that was published for this collector, in the count of :meth:`origin`.
            None: only its schemes know of newer versions.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.local_version = 0
        self.updater_versions: Callable[[], int] | None = None
        self.newest_above: Callable[[], int] | None = None
        self._changes: deque[tuple[Change, Callable[[], None]]] = deque()
        self._gates = [self.gate]  # and the gates of the buses
        self._buses: list[Bus] = []  # the buses of ``schemes``
        self._added: dict[str, Scheme] = {}  # schemes that were initialised with the collector as their context
        self.main_bus: BusCore | None = None

    # -- steps, and updates between them ------------------------------------------------------------------------------

    def holds(self) -> Holds:
        """A block for steps of policy and environment, in which no weights of this collector change."""
        return Holds(self._gates)

    def apply(self, update: Callable[[], None], timeout: float = DEFAULT_TIMEOUT) -> None:
        """Run ``update`` between two steps; returns when it has run. Raises AckTimeout: the current step took longer
        than ``timeout`` seconds, and nothing was changed; RuntimeError: a step called it, and would wait for itself."""
        run_without_waiting(self.run_change(update, timeout, blocking=True))

    async def run_change(self, update: Callable[[], None], timeout: float, *, blocking: bool) -> None:
        """:meth:`apply`. Without ``blocking``, the event loop runs on while another thread steps."""
        if self.gate.held_by_caller:
            raise RuntimeError(
                "the policy or the environment tried to change weights during a step, but weights change between two "
                "steps: call this from a hook, or from the code that iterates over the collector"
            )
        change, begun = Change(), time.monotonic()
        self._changes.append((change, update))
        self.end_hold()
        try:
            while not change.done():
                if blocking:
                    until_done(change, POLL_SECONDS)
                else:
                    await until_done_async(change, POLL_SECONDS)
                self.gate.poll()  # if Ctrl-C interrupted the update, perhaps no other thread enters the gate
                if time.monotonic() - begun >= timeout and change.cancel():
                    raise AckTimeout(f"the current step did not end within {timeout:g} s; no weights were changed")
        finally:
            change.cancel()  # an update must not run after its caller was interrupted or cancelled
        change.result()

    def end_hold(self) -> None:
        """Make the current step end its hold. Before the next hold, waiting updates run, and frames get a new label."""
        # This replaces a pending offer, which would do the same. Each change has its own future.
        self.gate.offer(self._run_changes, lambda error: None)

    def _run_changes(self) -> None:
        """Run all waiting updates. The gate lets one thread at a time run this, and only between two steps."""
        while self._changes:
            change, update = self._changes[0]
            # If Ctrl-C interrupted an update, its future is still running, and the update is repeated before any step
            # reads the weights. A finished update is not repeated, because its source may have changed since.
            if change.running() or (not change.done() and change.set_running_or_notify_cancel()):
                try:
                    update()
                except Exception as error:
                    change.set_exception(error)
                else:
                    change.set_result(None)
            self._changes.popleft()

    # -- schemes from above -------------------------------------------------------------------------------------------

    def add_receiver(self, scheme: Scheme) -> None:
        """Note a scheme that was initialised with the collector as its context. From now on, its updates are applied
        only between two steps, and its versions label frames."""
        self._added[scheme.model_id or ""] = scheme
        self._refresh_buses()

    def register(self, schemes: Mapping[str, Any], context: Any) -> None:
        """Register schemes, ``{model_id: scheme}``, and initialise those that the user has not. Does not communicate.
        ``context`` has the models and the ``worker_idx``. Raises TypeError, ValueError, RuntimeError: a scheme cannot
        receive, or there is no ``worker_idx``."""
        if known := sorted(schemes.keys() & self.schemes.keys()):
            raise ValueError(f"this collector already receives {known}: register each model once")
        blocking = as_blocking("weight_recv_schemes", schemes)
        fresh = {}
        for model_id, scheme in blocking.items():
            if scheme.role != "receiver" or scheme.pid != os.getpid():
                fresh[model_id] = scheme
                try:
                    context.get_model(model_id)
                except LookupError as error:
                    raise ValueError(f"weight_recv_schemes[{model_id!r}]: {error}") from error
                scheme.check_can_init("receiver")
            else:
                _check_name("weight_recv_schemes", model_id, scheme)
                if context.acts_elsewhere and scheme.moves_weights and scheme.context is not context:
                    raise ValueError(
                        f"weight_recv_schemes[{model_id!r}] was initialised without this collector as its context, so "
                        "its weights would not reach the workers: let the collector call init_on_receiver()"
                    )
        begun = []
        try:
            for model_id, scheme in fresh.items():
                scheme.init_on_receiver(model_id, context, worker_idx=context.worker_idx, gate="hold")
                begun.append(scheme)
        except BaseException:
            shut_down_all(begun, 0.0)  # register all schemes or none
            self._added = {m: s for m, s in self._added.items() if s not in begun}
            self._refresh_buses()
            raise
        self.schemes |= blocking
        self._refresh_buses()

    def _refresh_buses(self) -> None:
        known = self._added | self.schemes
        moving = buses_of([known[m] for m in ("policy", *known) if m in known])
        self.main_bus = moving[0] if moving else None
        self._gates = [self.gate, *(bus.gate for bus in moving if bus.gate is not None)]
        self._buses = buses_of(self.schemes.values())
        self.end_hold()  # the current hold does not hold the new gates

    def connect(self, schemes: Mapping[str, Any], timeout: float) -> None:
        """Connect to the sender. On return, the initial weights are applied."""
        connect_all([self.schemes[model_id] for model_id in schemes], timeout)

    def check(self) -> None:
        """Raises Fenced: another process has this worker's place, so no newer weights will come."""
        for bus in self._buses:
            bus.check_fenced()

    # -- versions -----------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """The version that labels frames. For a worker: the version of its schemes plus the versions that updaters
        above have counted. Otherwise: the version of the schemes or, without schemes, the local version."""
        if self.updater_versions is not None:
            return self.origin()[0] + self.updater_versions()
        return self.local_version if self.main_bus is None else self.origin()[0]

    def origin(self) -> tuple[int, bytes]:
        """The version that schemes have applied, and its metadata: on several buses, those of the main bus. In a tree
        of collectors, this is the root's version."""
        bus = self.main_bus
        if bus is None or not isinstance(link := bus.link, WorkerLink):
            return 0, b""
        acting = link.newest_shown(bus.schemes)
        return acting.origin, acting.metadata

    def keep_up(self, max_lag: int, timeout: float) -> None:
        """Wait, outside any hold, until the acting weights are at most ``max_lag`` versions behind the newest, on each
        bus in its own count. Raises AckTimeout: one wait took longer than ``timeout`` seconds; ClosedError, Fenced."""
        for bus in self._buses:
            while (target := bus.newest_target()) - bus.version > max_lag:
                bus.wait_version(target - max_lag, timeout=timeout)
        newest_above, main = self.newest_above, self.main_bus
        if newest_above is not None and isinstance(main, Bus):  # otherwise, no bus here counts these versions
            while (newest := newest_above()) - self.origin()[0] > max_lag:
                main.wait_origin(newest - max_lag, timeout)


class Holds:
    """One context manager that holds several gates, for one use."""

    def __init__(self, gates: list[Gate]) -> None:
        self._gates = gates
        self._holds = [gate.hold() for gate in gates]

    @property
    def is_update_waiting(self) -> bool:
        for gate in self._gates:  # noqa: SIM110 - read after each step, and any() takes three times as long
            if gate.pending:
                return True
        return False

    def __enter__(self) -> Self:
        try:
            for hold in self._holds:
                hold.__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._holds.pop().__exit__()
        finally:  # also leave the other gates, even if Ctrl-C strikes
            if self._holds:
                self.__exit__()


# A bus has one set of workers, so it can serve only one collector.
_collectors_of_buses: weakref.WeakKeyDictionary[Bus, weakref.ref[WeightsAPI]] = weakref.WeakKeyDictionary()


def _check_name(argument: str, model_id: str, scheme: WeightSyncScheme) -> None:
    if scheme.model_id != model_id:
        raise ValueError(
            f"{argument}[{model_id!r}] was initialised with model_id={scheme.model_id!r}: use one name, or let the "
            "collector initialise the scheme"
        )


def as_blocking(argument: str, schemes: Mapping[str, Any]) -> dict[str, WeightSyncScheme]:
    """The schemes with their blocking API, which collectors use. Raises TypeError: a value is no scheme of asyncsync;
    ValueError: two models share one scheme; RuntimeError: an asynchronous scheme is already connected."""
    for model_id, scheme in schemes.items():
        if not isinstance(scheme, WeightSyncScheme | AsyncScheme):
            kind = scheme if isinstance(scheme, type) else type(scheme)
            raise TypeError(
                f"{argument}[{model_id!r}] is {'the class' if scheme is kind else 'a'} {kind.__module__}."
                f"{kind.__qualname__}, but must be an asyncsync scheme: construct one from asyncsync.sync, such as "
                "SharedMemWeightSyncScheme()"
            )
    if len({id(scheme) for scheme in schemes.values()}) < len(schemes):
        raise ValueError(f"{argument} has one scheme for several models: give each model its own scheme")
    return {model_id: scheme.blocking for model_id, scheme in schemes.items()}


def buses_of(schemes: Iterable[Scheme]) -> list[Any]:
    """The buses of schemes that move weights, each once."""
    return list(dict.fromkeys(scheme.bus for scheme in schemes if scheme.moves_weights))


def connect_all(schemes: Collection[WeightSyncScheme], timeout: float) -> None:
    """Connect schemes within one timeout (seconds), the schemes of one bus together."""
    deadline = time.monotonic() + timeout
    for scheme in schemes:
        if not scheme.moves_weights:
            scheme.connect()
    for bus in buses_of(schemes):
        bus.connect(max(0.0, deadline - time.monotonic()))


def shut_down_all(schemes: Iterable[WeightSyncScheme], timeout: float) -> None:
    """Shut all schemes down within one timeout (seconds), even if one of them raises."""
    deadline = time.monotonic() + timeout

    def shut_down(scheme: WeightSyncScheme) -> None:
        scheme.shutdown(max(0.0, deadline - time.monotonic()))

    with ExitStack() as stack:
        for scheme in reversed([*schemes]):  # the stack runs the last callback first
            stack.callback(shut_down, scheme)


# The parts of an update


def as_update(
    policy_or_weights: Any, weights: Any, policy: Any, model_id: str | None, weights_dict: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One update, ``{model_id: weights}``. None as weights: those of the registered model. Raises ValueError: arguments
    exclude each other, or ``weights_dict`` is empty; TypeError: its keys are no model ids."""
    given = {"the positional argument": policy_or_weights, "weights=": weights, "policy=": policy}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give the weights once")
    single = next(iter(given.values()), None)
    if weights_dict is None:
        return {"policy" if model_id is None else model_id: single}
    if model_id is not None or single is not None:
        other = f"model_id={model_id!r}" if model_id is not None else next(iter(given))
        raise ValueError(f"weights_dict and {other} exclude each other: name every model in weights_dict")
    if not weights_dict:
        raise ValueError("weights_dict is empty: name at least one model")
    if wrong := [key for key in weights_dict if not isinstance(key, str)]:
        raise TypeError(
            f"weights_dict must be {{model_id: weights}}, but has the key {wrong[0]!r}: to give each worker its own "
            "weights of one model, pass {worker_idx: weights} as weights="
        )
    return dict(weights_dict)


def prepared_copy(model: Any, source: Any) -> Prepared:
    """A prepared copy of these weights into the model; empty, if the model is its own source. Raises SchemaMismatch."""
    if source is model:
        return Prepared()
    is_state_dict = isinstance(source, Mapping) and not isinstance(source, TensorDictBase)
    strategy = WeightStrategy("state_dict" if is_state_dict else "tensordict")
    return Binding(model, strategy).prepare_flat(flat_weights(strategy, source))


# Models by their ids


class UnknownModel(LookupError, ValueError):
    """There is no model with this id. A LookupError for ``get_model()``, and a ValueError for an update."""


def belongs_to(owner: str, model_id: str) -> bool:
    """Whether this id names the model ``owner`` or a part of it."""
    return model_id == owner or model_id.startswith((f"{owner}.", f"{owner}["))


def find_model(collector: Any, model_id: str, policy: Any) -> Any:
    """The model with this id, as :meth:`WeightsAPI.get_model` describes it. ``policy`` is the acting or the registered
    policy. Raises UnknownModel."""
    kind = type(collector).__name__
    ways = [(collector, model_id), (policy, model_id)]
    if belongs_to("policy", model_id):
        if policy is None:
            raise UnknownModel(
                f"this {kind} has no policy in this process: pass the weights to send, or a policy to the constructor"
            )
        ways = [(policy, model_id.removeprefix("policy").removeprefix("."))]
    for start, path in ways:
        try:
            return sources.follow_path(start, path)
        except (AttributeError, LookupError, TypeError):
            continue
    raise UnknownModel(
        f"{kind} has no model {model_id!r}: a model id is 'policy', an attribute path from the policy ('actor' for "
        "policy.actor), or one from the collector ('env.transform[0].module', 'postproc')"
    )


class _RegisteredModels:
    """A collector's registered models, which need not be the acting ones, as the context of sender schemes. Because the
    class name is private, error messages say "the context" instead."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = weakref.WeakMethod(find)  # weak, because an open bus keeps its schemes alive, and a scheme this

    def get_model(self, model_id: str) -> Any:
        find = self._find()
        if find is None:
            raise LookupError(f"the collector of model {model_id!r} was deleted")
        return find(model_id)
