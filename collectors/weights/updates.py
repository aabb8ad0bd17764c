"""How weights reach a collector's models, and which version they are.

    update_policy_weights_(…)                  a scheme of the trainer or collector above, or receive_weights(…)
        |  becomes {model_id: weights},                                     |
        |  checked before anything is done                                  |
        |-- a weight updater (deprecated) pushes the policy                 |
        |-- Senders: models with a sender scheme go to the workers          |
        '-- ActingWeights: the others are models of this process   <--------'

A model that this collector *receives* is only passed on to workers: the scheme above has applied it here. Each step of
a collector holds the gates of :class:`ActingWeights`, so whatever changes weights does so between two steps.

**Versions.** A bus counts what is published on it. What no scheme brings is counted where it is applied
(``ActingWeights.own``) or, for the workers of a collector, by that collector (``ActingWeights.counted_above``). In a
tree of collectors, each one's bus counts its own versions, and carries the root's along: frames have that.
"""

from __future__ import annotations

import concurrent.futures
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
from asyncsync.collectors.arguments import exact_device
from asyncsync.collectors.weights.legacy_updaters import WeightUpdaterBase, WorkerIds, make_updater, mark_counted, push
from asyncsync.errors import AckTimeout, PartialSendError
from asyncsync.model.gate import Gate
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights
from asyncsync.model.update import Prepared
from asyncsync.runtime import loop_thread
from asyncsync.runtime.threads import run_in_thread, until_done, until_done_async
from asyncsync.schemes import sources
from asyncsync.schemes.aio import WeightSyncScheme as AsyncScheme
from asyncsync.schemes.blocking import Bus, WeightSyncScheme, run_without_waiting
from asyncsync.schemes.scheme import Scheme

Change = concurrent.futures.Future[None]

POLL_SECONDS = 0.05

ARGUMENTS = ("policy_or_weights", "weights", "policy", "worker_ids", "model_id", "weights_dict", "wait", "timeout")
"""Of ``update_policy_weights_``."""


class WeightsAPI:
    """The weights' side of :class:`asyncsync.collectors.base.BaseCollector`, by the names, forms and exclusions of
    TorchRL's "RPCCollector" page. ``policy`` is the policy as it was registered, which a bare
    ``update_policy_weights_()`` sends; ``acts_elsewhere``: in other processes only."""

    policy: Any = None
    acts_elsewhere: bool = False
    worker_idx: Any

    def __init__(self) -> None:
        self._weight_updater: WeightUpdaterBase | None = None
        self._senders = Senders({})
        self._acting_devices: dict[int, set[torch.device]] = {}  # of each worker's policy
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
                updater. ``{worker_idx: weights}`` gives each worker its own.
            weights: the same, as a TensorDict or dict.
            policy: the same, as a module.
            worker_ids: workers to update: indices, or the devices of their policies. None: all.
            model_id: id of the model. None: ``"policy"``.
            weights_dict: ``{model_id: weights}``: each worker applies all of them between two steps, or none.
            wait: True: wait for the workers. False: return when the weights are copied and announced as version
                :attr:`policy_version`. Each worker applies them, or newer ones, after its step under way; ``max_lag``
                bounds how many versions it may be behind. Models in this process are updated before it returns.
            kwargs: ``timeout=`` in seconds (60), and further arguments of the updater's ``push_weights``. Without an
                updater, others are ignored, unless one looks like a misspelt argument.

        Raises:
            ValueError: arguments exclude each other, or a model or worker is unknown. Nothing was changed.
            TypeError: ``worker_ids`` without schemes or updater, or an argument looks misspelt.
            SchemaMismatch: the weights do not fit a model of this process. Nothing was changed.
            PartialSendError: names the workers that have not applied the weights, and why. They still converge.
            NotConnected, ClosedError: there are no workers to send to.
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
        """:meth:`update_policy_weights_` for a coroutine of any event loop. Do not change the given weights until it
        returns."""
        given = as_update(policy_or_weights, weights, policy, model_id, weights_dict)
        await self._update(given, worker_ids, wait, kwargs, blocking=False)

    # A coroutine with ``blocking=True`` awaits nothing: ``run_without_waiting`` runs it in the caller's thread.

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
            if worker_ids is not None and not self._senders.schemes:
                raise TypeError(
                    f"worker_ids={worker_ids!r}, but this {type(self).__name__} has no workers to choose from, because "
                    "it has neither weight_sync_schemes nor a weight_updater: leave worker_ids out"
                )
        elif "policy" in given:
            if len(given) > 1:
                raise ValueError(
                    f"a weight updater pushes only the policy, not {sorted(given)}: use weight_sync_schemes"
                )
            pushed = partial(push, updater, given["policy"], worker_ids, kwargs | {"timeout": timeout})
            if blocking:
                pushed()
            else:
                await run_in_thread("asyncsync-updater", pushed)
            return
        sent, changes = self._divided(given, worker_ids)
        workers, before = self._workers(worker_ids), self._senders.version
        try:
            if sent:
                await self._send(sent, workers, timeout if wait else None, blocking=blocking)
        finally:  # workers that have not applied a published version converge to it, so this process applies it, too
            if changes and (not sent or self._senders.version > before):
                await self.acting_weights.applied(partial(self._apply_locally, changes), timeout, blocking=blocking)

    def _divided(self, given: Mapping[str, Any], worker_ids: WorkerIds) -> tuple[dict[str, Any], list[Prepared]]:
        """What of an update the sender schemes send, and what it changes in models of this process, checked."""
        name, senders = type(self).__name__, self._senders
        sent = {m: w for m, w in given.items() if m in senders.schemes}
        own = {m: w for m, w in given.items() if m not in sent and m not in self.acting_weights.schemes}
        if sent and (apart := sorted(m for m in own if not self._goes_with_workers(m))):
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
            raise ValueError(f"unknown model_id {sorted(own)}: the workers receive {sorted(senders.schemes)}")
        changes = [fitted(self._acting(m), self._registered(m) if w is None else w) for m, w in own.items()]
        for model_id, weights in sent.items():
            if weights is None and not senders.schemes[model_id].sources.has_default():
                self._registered(model_id)  # raises: there is nothing to send
        if sent:
            for change in changes:
                change.resolve()  # what does not fit is told before anything is sent
        elif not own and not self.cascades:
            raise ValueError(
                f"this {name} receives {sorted(given)} by its weight_recv_schemes and sends to no workers: update the "
                "weights at their sender"
            )
        return sent, changes

    async def _send(
        self, update: Mapping[str, Any], workers: list[int] | None, timeout: float | None, *, blocking: bool
    ) -> None:
        """Send an update by the schemes. What not every worker has applied is published, too: they still converge."""
        before = self._senders.version
        try:
            await self._senders.send(update, workers, timeout, blocking=blocking)
        except PartialSendError as error:
            look = partial(self._look_behind, error)
            if blocking:
                loop_thread.run(look)
            else:
                await loop_thread.run_async(look)
            raise
        finally:
            if (version := self._senders.version) > before:
                mark_counted()
                self._published(version)

    def _apply_locally(self, changes: Collection[Prepared]) -> None:
        """Change this collector's own models, between two steps, all of them or none, and count the version up. Raises
        SchemaMismatch: nothing was changed."""
        for prepared in changes:
            prepared.resolve()
        for prepared in changes:
            prepared.apply()
        for prepared in changes:
            prepared.complete()
        self.acting_weights.own += 1

    def _workers(self, worker_ids: Any) -> list[int] | None:
        """Indices of workers, from indices and devices; None: all of them."""
        if worker_ids is None:
            return None
        is_several = isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str)
        indices: list[int] = []
        for worker in worker_ids if is_several else [worker_ids]:
            if isinstance(worker, torch.device):
                exact = torch.device("cpu") if worker.type == "cpu" else exact_device(worker)  # as tensors name it
                found = [index for index, devices in self._acting_devices.items() if exact in devices]
                if not found:
                    raise ValueError(f"this {type(self).__name__} has no worker whose policy is on {worker}")
                indices += found
            else:
                indices.append(worker)
        return as_workers(indices)

    def push_policy(self, weights: Any, worker_ids: WorkerIds) -> None:
        # For updaters: send these weights by the policy's scheme.
        if "policy" not in self._senders.schemes:
            raise RuntimeError(
                f"this {type(self).__name__} has no scheme that sends a policy to workers: use VanillaWeightUpdater "
                "for a policy in this process, or pass weight_sync_schemes="
            )
        run_without_waiting(self._send({"policy": weights}, self._workers(worker_ids), DEFAULT_TIMEOUT, blocking=True))

    # -- for subclasses with workers ----------------------------------------------------------------------------------

    def _goes_with_workers(self, model_id: str) -> bool:
        """Whether a model of this process may be updated together with what is sent to workers."""
        return False

    def _published(self, version: int) -> None:
        """Called after a version was published."""

    async def _look_behind(self, error: PartialSendError) -> None:
        """On the loop thread: raise what has ended a worker that the update has not reached, if that is known."""

    # -- models -------------------------------------------------------------------------------------------------------

    def get_model(self, model_id: str) -> Any:
        """The model with this id: ``"policy"``; an attribute path from this collector, such as
        ``env.transform[0].module`` or ``postproc``; or one from the policy, such as ``actor`` for ``policy.actor``.

        Raises:
            LookupError: there is no such model.
        """
        return find_model(self, model_id, self.policy)

    def _acting(self, model_id: str) -> Any:
        """The model of this name that acts in this process. Raises UnknownModel: none does."""
        return self.get_model(model_id)

    def _registered(self, model_id: str) -> Any:
        """The model of this name whose weights are meant where none are given. Raises UnknownModel."""
        return self.get_model(model_id)

    # -- schemes and the updater --------------------------------------------------------------------------------------

    def _set_up_senders(
        self, schemes: Mapping[str, Any] | None, weight_updater: Any, context: Any, num_workers: int | None = None
    ) -> None:
        """Prepare schemes and the updater, without communication. ``context`` knows the models whose weights are sent
        if none are given."""
        updater = None if weight_updater is None else make_updater(weight_updater, self.policy)
        self._senders = Senders(schemes or {}, context, num_workers)
        self.weight_updater = updater  # which may look at the schemes

    def _connect_senders(self, timeout: float) -> None:
        connect_all(self._senders.schemes.values(), timeout)
        if version := self._senders.version:
            self._published(version)

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """The (deprecated) updater by which ``update_policy_weights_`` pushes, or None. Set it to an updater, an
        updater class, or a callable that returns one; this registers the collector with the updater."""
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
    def _sender_schemes(self) -> dict[str, Any]:
        return self._senders.schemes

    @property
    def _receiver_schemes(self) -> dict[str, Any]:
        return self.acting_weights.schemes

    def _end_weights(self, timeout: float) -> None:
        shut_down_all([*self._senders.schemes.values(), *self.acting_weights.schemes.values()], timeout)

    # -- from above ---------------------------------------------------------------------------------------------------

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, Any],
        *,
        synchronize_weights: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Receive these models' weights from the trainer or collector above. They are applied between two steps.

        Args:
            weight_recv_schemes: ``{model_id: scheme}``; this method initialises them unless that was done already.
            synchronize_weights: True: connect, and return when the initial weights are applied.
            timeout: seconds to connect.

        Raises:
            RuntimeError: the collector's ``worker_idx`` was never set.
            TypeError, ValueError: a scheme cannot receive, or its model is registered already.
            NotConnected, SchemaMismatch: a scheme's ``connect`` raised it.
        """
        # Between two steps: those under way do not hold the new gates, those that follow do.
        self.acting_weights.apply(lambda: self.acting_weights.register(weight_recv_schemes, self), timeout)
        self._pass_versions_on()
        if synchronize_weights:
            self.acting_weights.connect(weight_recv_schemes, timeout)

    def _joined_by(self, scheme: Any) -> None:
        # A scheme calls this when it was initialised to receive, with this collector as its context.
        self.acting_weights.joined(scheme)
        self._pass_versions_on()

    def _pass_versions_on(self) -> None:
        """Have updates that are sent from now on carry a version from above."""
        for bus in self._senders.buses:
            bus.set_origin(self.acting_weights.origin)

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Apply the newest weights from the receiver schemes or, without schemes, the given or the original policy's.

        Does not wait for weights: schemes apply updates by themselves, between two steps. A collector with workers
        sends the given weights on, as a version of its own.

        Args:
            policy_or_weights: module, TensorDict or dict for this collector's own policy.
            weights: the same, as a TensorDict or dict.
            policy: the same, as a module.

        Raises:
            ValueError: several arguments were given, or any while receiver schemes are registered.
            SchemaMismatch: the weights do not fit. Nothing was changed.
            PartialSendError: names the workers that have not applied the weights, and why.
            ClosedError, Fenced: the schemes will receive nothing more.
        """
        given = as_update(policy_or_weights, weights, policy, None, None)["policy"]
        if not self.acting_weights.schemes:
            self._take(given)
        elif given is not None:
            raise ValueError(
                f"this {type(self).__name__} receives {sorted(self.acting_weights.schemes)} by weight_recv_schemes: "
                "call receive_weights() without arguments, or send the weights from above"
            )
        else:
            self._receive_weights_scheme()

    def _take(self, given: Any) -> None:
        """The policy's weights from the trainer or collector above, without schemes; None: the registered policy's."""
        source = self._registered("policy") if given is None else given
        change = fitted(self._acting("policy"), source)
        self.acting_weights.apply(lambda: self._apply_locally([change]))
        if "policy" in self._senders.schemes:
            self.update_policy_weights_(source)

    def _receive_weights_scheme(self) -> None:
        """Have receiver schemes apply updates that wait for a receive (``apply="on_receive"``). A remote parent (RPC,
        Ray) calls this: its schemes apply the version of the call, the others what has come. Raises RuntimeError: there
        are none; ClosedError, Fenced: nothing has come, and nothing will."""
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
        """Whether the collector sends received updates on to workers; see :mod:`asyncsync.bus.applying`."""
        return bool(self._senders.schemes) or self.weight_updater is not None

    # -- versions -----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The newest published version or, without workers, the version that acts here. In a tree of collectors, the
        root's version."""
        published = self._senders.schemes and not self.acting_weights.come_from_above
        return self._senders.version if published else self.acting_weights.version()

    def increment_version(self) -> None:
        """Count the version of this collector's own policy up by one."""
        self.acting_weights.own += 1
        self.acting_weights.end_hold()

    def _versions(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that versions go on where they were."""
        return {"own": self.acting_weights.own, "sent": {m: s.version for m, s in self._senders.schemes.items()}}

    def _carry_on(self, versions: Mapping[str, Any]) -> None:
        """Go on from what :meth:`_versions` returned. A count that is beyond it does not go back."""
        self.acting_weights.own = max(self.acting_weights.own, versions["own"])
        self._senders.carry_on(versions["sent"])


class ActingWeights:
    """The weights of one collector that act in this process. Each step holds them, whichever thread steps; what schemes
    receive, and updates of the collector's own models, are applied between two steps.

    Attributes:
        gate: of the collector's own models.
        schemes: those that receive, by model id.
        own: how many updates were applied here without schemes.
        counted_above: how many versions updaters above have counted; None: nobody is above.
        newest_above: reads the newest version published for this collector, by the count of :meth:`origin`; None:
            only its schemes know of one.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.own = 0
        self.counted_above: Callable[[], int] | None = None
        self.newest_above: Callable[[], int] | None = None
        self._changes: deque[tuple[Change, Callable[[], None]]] = deque()
        self._gates = [self.gate]  # and those of the buses
        self._buses: list[Bus] = []  # of the schemes, each once
        self._joined: dict[str, Scheme] = {}  # by the user, with the collector as their context
        self._main: BusCore | None = None  # whose versions frames are labelled with: the policy's, or the first

    # -- steps, and updates between them ------------------------------------------------------------------------------

    def holds(self) -> Holds:
        """A block for steps, policy and environment, in which no weights of this collector change."""
        return Holds(self._gates)

    def apply(self, update: Callable[[], None], timeout: float = DEFAULT_TIMEOUT) -> None:
        """Run ``update`` now, or as soon as the step under way has ended; returns when it has run.

        Raises AckTimeout: the step took longer than ``timeout`` seconds, and nothing was changed; RuntimeError: called
        from within a step, which would wait for itself.
        """
        run_without_waiting(self.applied(update, timeout, blocking=True))

    async def applied(self, update: Callable[[], None], timeout: float, *, blocking: bool) -> None:
        """:meth:`apply`; without ``blocking``, the running loop goes on while a step is under way elsewhere."""
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
                self.gate.poll()  # if Ctrl-C has ended it half way, perhaps no other thread passes the gate
                if time.monotonic() - begun >= timeout and change.cancel():
                    raise AckTimeout(f"the step under way did not end within {timeout:g} s; no weights were changed")
        finally:
            change.cancel()  # a caller that was interrupted or cancelled changes nothing afterwards
        change.result()

    def end_hold(self) -> None:
        """Have the step under way end its hold, between which and the next one changes run, and frames get a label."""
        # In place of a pending one, which would do the same. Each change has its own end.
        self.gate.offer(self._run_changes, lambda error: None)

    def _run_changes(self) -> None:
        """Run all updates that wait. By the gate, one thread at a time is here, and no step is under way."""
        while self._changes:
            change, update = self._changes[0]
            # An update that a KeyboardInterrupt struck half way is running still, and is applied again before any step
            # reads the weights; one that was complete is not: its source may be another one by now.
            if change.running() or (not change.done() and change.set_running_or_notify_cancel()):
                try:
                    update()
                except Exception as error:
                    change.set_exception(error)
                else:
                    change.set_result(None)
            self._changes.popleft()

    # -- schemes from above -------------------------------------------------------------------------------------------

    @property
    def come_from_above(self) -> bool:
        return self._main is not None

    def joined(self, scheme: Scheme) -> None:
        """A scheme was initialised, here or by the user, with the collector as its context. From now on no step is
        under way when its updates are applied, and frames are labelled with its versions."""
        self._joined[scheme.model_id or ""] = scheme
        self._find_buses()

    def register(self, schemes: Mapping[str, Any], context: Any) -> None:
        """Initialise schemes, ``{model_id: scheme}``, unless the user has, without communication. ``context`` knows the
        models and its ``worker_idx``. Raises TypeError, ValueError, RuntimeError: a scheme that cannot receive, or no
        ``worker_idx``."""
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
            shut_down_all(begun, 0.0)  # all are registered, or none
            self._joined = {m: s for m, s in self._joined.items() if s not in begun}
            self._find_buses()
            raise
        self.schemes |= blocking
        self._find_buses()

    def _find_buses(self) -> None:
        known = self._joined | self.schemes
        moving = buses_of([known[m] for m in ("policy", *known) if m in known])
        self._main = moving[0] if moving else None
        self._gates = [self.gate, *(bus.gate for bus in moving if bus.gate is not None)]
        self._buses = buses_of(self.schemes.values())
        self.end_hold()  # which does not hold the new gates

    def connect(self, schemes: Mapping[str, Any], timeout: float) -> None:
        """Connect to the sender; on return, its initial weights have been applied."""
        connect_all([self.schemes[model_id] for model_id in schemes], timeout)

    def check(self) -> None:
        """Raises Fenced: another process has this worker's place, and nothing newer will ever come here."""
        for bus in self._buses:
            bus.check_fenced()

    # -- versions -----------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """The version with which frames are labelled. With a trainer above, that of its schemes plus what its updaters
        have counted; else that of schemes, or where nothing brings weights, the count of updates applied here."""
        if self.counted_above is not None:
            return self.origin()[0] + self.counted_above()
        return self.own if self._main is None else self.origin()[0]

    def origin(self) -> tuple[int, bytes]:
        """The version that has come by schemes, and its metadata: of several buses, that of the policy's, or of the
        first. Each counts its own; in a tree of collectors, its root does."""
        if self._main is None:
            return 0, b""
        acting = self._main.newest_shown(self._main.schemes)
        return acting.origin, acting.metadata

    def keep_up(self, max_lag: int, timeout: float) -> None:
        """Wait, outside any hold, until the acting weights are at most ``max_lag`` versions behind the newest, on each
        bus by its own count. Raises AckTimeout: one of the waits took longer than ``timeout`` seconds; ClosedError,
        Fenced."""
        for bus in self._buses:
            while (target := bus.newest_target()) - bus.version > max_lag:
                bus.wait_version(target - max_lag, timeout=timeout)
        newest_above, main = self.newest_above, self._main
        if newest_above is not None and isinstance(main, Bus):  # else nothing here follows that count
            while (newest := newest_above()) - self.origin()[0] > max_lag:
                main.wait_origin(newest - max_lag, timeout)


class Holds:
    """Several gates held at once, as one context manager for one use. ``awaited``: whether an update waits for its
    end."""

    def __init__(self, gates: list[Gate]) -> None:
        self._gates = gates
        self._open = [gate.hold() for gate in gates]

    @property
    def awaited(self) -> bool:
        for gate in self._gates:  # noqa: SIM110 - asked for with each step, where any() takes thrice as long
            if gate.pending:
                return True
        return False

    def __enter__(self) -> Self:
        try:
            for hold in self._open:
                hold.__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._open.pop().__exit__()
        finally:  # whatever interrupts that, the others are left, too
            if self._open:
                self.__exit__()


class Senders:
    """The schemes, by model id, by which a collector sends weights to its workers. Models on one bus are switched
    together, so schemes without an address of the user's choice are moved onto one bus before they are used.

    ``context.get_model(model_id)`` gives the models. ``num_workers`` None: workers come and go. Raises TypeError,
    ValueError, RuntimeError: schemes that cannot send.
    """

    def __init__(self, schemes: Mapping[str, Any], context: Any = None, num_workers: int | None = None) -> None:
        self.schemes = as_blocking("weight_sync_schemes", schemes)
        for model_id, scheme in self.schemes.items():
            if scheme.moves_weights:
                _check_free(model_id, scheme.bus)
        fresh = {m: s for m, s in self.schemes.items() if s.role is None or s.pid != os.getpid()}
        join_buses([s for s in fresh.values() if s.moves_weights])
        for model_id, scheme in self.schemes.items():
            if model_id in fresh:
                has_weights = isinstance(sources.find_model(context, model_id), nn.Module | TensorDictBase | Mapping)
                called = isinstance(scheme, getattr(context, "called_schemes", ()))
                remotes: dict[str, Any] = {"remotes": {}} if called else {}  # which the collector fills in
                source = context if has_weights else None
                scheme.init_on_sender(model_id=model_id, context=source, num_workers=num_workers, **remotes)
            else:
                check = scheme.bus.check_role if scheme.is_registered else scheme.check_can_init
                check("sender")
                _check_initialised(model_id, scheme, num_workers)
        self.buses = buses_of(self.schemes.values())
        _owners.update({bus: weakref.ref(self) for bus in self.buses})

    def bus_of(self, update: Mapping[str, Any]) -> Bus | None:
        """The bus that all these models are on; None: one that moves nothing. Raises ValueError: they are on several,
        so that no worker could switch them together."""
        buses = buses_of(self.schemes[model_id] for model_id in update)
        if len(buses) > 1:
            raise ValueError(
                f"workers cannot switch {sorted(update)} together, because each of their schemes has its own bus. "
                "Construct a bus = asyncsync.sync.Bus(), and each scheme with bus=bus; or update one model at a time"
            )
        return buses[0] if buses else None

    async def send(
        self, update: Mapping[str, Any], workers: list[int] | None, timeout: float | None, *, blocking: bool
    ) -> None:
        """Send one update; returns when workers have applied it, or, without a timeout, when it is announced. Raises as
        the schemes' ``send`` or ``publish``."""
        bus = self.bus_of(update)
        schemes = {model_id: self.schemes[model_id] for model_id in update}
        moved = {scheme.model_id or "": update[m] for m, scheme in schemes.items() if scheme.moves_weights}
        if bus is not None and timeout is None:
            if blocking:
                bus.publish(moved, workers)
            else:
                await bus.publish_async(moved, workers)
        elif bus is not None and timeout is not None:
            if blocking:
                bus.send(moved, workers, timeout)
            else:
                await bus.send_async(moved, workers, timeout)
        for scheme in schemes.values():
            if not scheme.moves_weights:
                scheme.send()  # which only counts

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return max((scheme.version for scheme in self.schemes.values()), default=0)

    def carry_on(self, versions: Mapping[str, int]) -> None:
        """Go on from each model's version, where that is not behind. The schemes of one bus have one count."""
        for model_id, scheme in self.schemes.items():
            if scheme.version < (version := versions.get(model_id, 0)):
                scheme.load_state_dict({"version": version})


# A bus has one set of workers, and so one collector.
_owners: weakref.WeakKeyDictionary[Bus, weakref.ref[Senders]] = weakref.WeakKeyDictionary()


def _check_free(model_id: str, bus: Bus) -> None:
    if bus.closed:
        raise ValueError(
            f"weight_sync_schemes[{model_id!r}] was shut down, perhaps with its collector: construct a new scheme"
        )
    owner = _owners.get(bus)
    if owner is not None and owner() is not None:
        raise ValueError(
            f"weight_sync_schemes[{model_id!r}] already serves another collector: construct a scheme (or a Bus) for "
            "each collector"
        )


def _check_initialised(model_id: str, scheme: WeightSyncScheme, num_workers: int | None) -> None:
    if scheme.model_id is not None or num_workers is not None:  # a RayModuleTransform gives its scheme no name
        _check_name("weight_sync_schemes", model_id, scheme)
    count = scheme.bus.num_workers
    if num_workers is not None and count not in (None, num_workers):
        raise ValueError(
            f"weight_sync_schemes[{model_id!r}] was initialised for {count} workers, but this collector has "
            f"{num_workers}: leave num_workers out, or do not call init_on_sender()"
        )


def _check_name(argument: str, model_id: str, scheme: WeightSyncScheme) -> None:
    if scheme.model_id != model_id:
        raise ValueError(
            f"{argument}[{model_id!r}] was initialised with model_id={scheme.model_id!r}: use one name, or let the "
            "collector initialise the scheme"
        )


def as_blocking(argument: str, schemes: Mapping[str, Any]) -> dict[str, WeightSyncScheme]:
    """The schemes with their blocking API, on which collectors run them. Raises TypeError: no scheme of asyncsync's;
    ValueError: one for two models; RuntimeError: an asynchronous one that is connected already."""
    for model_id, scheme in schemes.items():
        if not isinstance(scheme, WeightSyncScheme | AsyncScheme):
            kind = scheme if isinstance(scheme, type) else type(scheme)
            raise TypeError(
                f"{argument}[{model_id!r}] is {'the class' if scheme is kind else 'a'} {kind.__module__}."
                f"{kind.__qualname__}, but must be an asyncsync scheme: construct one of asyncsync.sync, such as "
                "SharedMemWeightSyncScheme()"
            )
    if len({id(scheme) for scheme in schemes.values()}) < len(schemes):
        raise ValueError(f"{argument} has one scheme for several models: give each model its own scheme")
    return {model_id: scheme.blocking for model_id, scheme in schemes.items()}


def buses_of(schemes: Iterable[Scheme]) -> list[Any]:
    """Each once, of those that move something."""
    return list(dict.fromkeys(scheme.bus for scheme in schemes if scheme.moves_weights))


def connect_all(schemes: Collection[WeightSyncScheme], timeout: float) -> None:
    """Connect schemes, those of one bus together, within one timeout (seconds)."""
    deadline = time.monotonic() + timeout
    for scheme in schemes:
        if not scheme.moves_weights:
            scheme.connect()
    for bus in buses_of(schemes):
        bus.connect(max(0.0, deadline - time.monotonic()))


def shut_down_all(schemes: Iterable[WeightSyncScheme], timeout: float) -> None:
    """Shut schemes down within one timeout (seconds), all of them, whatever one of them raises."""
    deadline = time.monotonic() + timeout

    def shut_down(scheme: WeightSyncScheme) -> None:
        scheme.shutdown(max(0.0, deadline - time.monotonic()))

    with ExitStack() as stack:
        for scheme in reversed([*schemes]):  # it begins with the last
            stack.callback(shut_down, scheme)


# What an update is made of


def as_update(
    policy_or_weights: Any, weights: Any, policy: Any, model_id: str | None, weights_dict: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One update; None as a model's weights: those that are registered. Raises ValueError: arguments that exclude each
    other, or an empty ``weights_dict``; TypeError: its keys are no model ids."""
    given = {"the positional argument": policy_or_weights, "weights=": weights, "policy=": policy}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give the weights once")
    single = next(iter(given.values()), None)
    if weights_dict is None:
        return {"policy" if model_id is None else model_id: single}
    if model_id is not None or single is not None:
        other = f"model_id={model_id!r}" if model_id is not None else "weights given otherwise"
        raise ValueError(f"weights_dict and {other} exclude each other: name every model in weights_dict")
    if not weights_dict:
        raise ValueError("weights_dict is empty: name at least one model")
    if wrong := [key for key in weights_dict if not isinstance(key, str)]:
        raise TypeError(
            f"weights_dict must be {{model_id: weights}}, but has the key {wrong[0]!r}: to give each worker its own "
            "weights of one model, pass {worker_idx: weights} as weights="
        )
    return dict(weights_dict)


def fitted(model: Any, source: Any) -> Prepared:
    """What copies these weights into the model; nothing, if the model is their source itself. Raises SchemaMismatch."""
    if source is model:
        return Prepared()
    is_state_dict = isinstance(source, Mapping) and not isinstance(source, TensorDictBase)
    strategy = WeightStrategy("state_dict" if is_state_dict else "tensordict")
    return Binding(model, strategy).prepare_flat(flat_weights(strategy, source))


# Models by their ids


class UnknownModel(LookupError, ValueError):
    """There is no model with this id. A LookupError for ``get_model()``, and a ValueError for an update."""


def belongs_to(owner: str, model_id: str) -> bool:
    """Whether this is the model called ``owner``, or a path into it."""
    return model_id == owner or model_id.startswith((f"{owner}.", f"{owner}["))


def find_model(collector: Any, model_id: str, policy: Any) -> Any:
    """The model of this name, as :meth:`WeightsAPI.get_model` describes it. ``policy`` is the one that is meant: the
    one that acts, or the one that was registered. Raises UnknownModel."""
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
    """A collector's models as they were registered, which need not be those that act: the context of sender schemes.
    The private name keeps it out of error messages, which show "the context"."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = weakref.WeakMethod(find)  # an open bus keeps its schemes, and they this

    def get_model(self, model_id: str) -> Any:
        find = self._find()
        if find is None:
            raise LookupError(f"the collector of model {model_id!r} was deleted")
        return find(model_id)
