"""A collector's weights: taking them from the trainer, passing them on, applying them to its own models.

Whatever form ``update_policy_weights_`` is called in becomes one update ``{model_id: weights}``, checked before
anything is done. It goes one way: by sender schemes, through the (deprecated) weight updater, or into this collector's
own models. A model that this collector *receives* is passed on downwards only: the scheme has applied it here.

Names, forms and exclusions follow TorchRL's "RPCCollector" page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncsync.arguments import as_workers, check_timeout
from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.collectors.weights.in_process import Holds, LocalUpdates
from asyncsync.collectors.weights.legacy_updaters import WeightUpdaterBase, make_updater, mark_counted, pushing
from asyncsync.collectors.weights.models import find_model, fitted
from asyncsync.collectors.weights.plan import as_update, check_spelling, chosen
from asyncsync.collectors.weights.receivers import Receivers
from asyncsync.collectors.weights.senders import Senders, shut_down_all
from asyncsync.runtime.threads import WorkThread, finish
from asyncsync.schemes.blocking import Bus
from asyncsync.schemes.sources import by_worker

__all__ = ["Planned", "WeightsAPI", "WorkerIds"]

WorkerIds = int | torch.device | Iterable[int | torch.device] | None


@dataclass(frozen=True, slots=True)
class Planned:
    """What one call of ``update_policy_weights_`` is to do, checked."""

    timeout: float
    sent: Mapping[str, Any] | None = None
    applied: Mapping[str, Any] | None = None
    push: Callable[[], None] | None = None
    workers: list[int] | None = None


class WeightsAPI:
    """The weights' side of :class:`asyncsync.collectors.base.BaseCollector`.

    Attributes:
        policy: the policy as it was registered: what a bare ``update_policy_weights_()`` sends.
        acts_elsewhere: whether it acts in other processes only.
    """

    policy: Any = None
    acts_elsewhere: bool = False
    worker_idx: Any

    def __init__(self) -> None:
        self._weight_updater: WeightUpdaterBase | None = None
        self._senders = Senders({})
        self._receivers = Receivers()
        self._local = LocalUpdates()
        self._version = 0
        self._newest: Callable[[], int] | None = None
        self._counted: Callable[[], int] | None = None

    # -- models -------------------------------------------------------------------------------------------------------

    def get_model(self, model_id: str) -> Any:
        """The model of this name: ``"policy"``; an attribute path from this collector, such as
        ``env.transform[0].module`` or ``postproc``; or one from the policy, such as ``actor`` for ``policy.actor``.

        Raises:
            LookupError: there is none.
        """
        return find_model(self, model_id, self.policy)

    def _acting(self, model_id: str) -> Any:
        """The model of this name that acts in this process. Raises ValueError: none does."""
        try:
            return self.get_model(model_id)
        except LookupError as error:
            raise ValueError(f"unknown model_id {model_id!r}: {error}") from error

    def _registered(self, model_id: str) -> Any:
        """The model of this name whose weights are meant where none are given. Raises ValueError: there is none."""
        return self._acting(model_id)

    def _apply_locally(self, weights: Mapping[str, Any]) -> None:
        """Copy weights into this collector's own models, all of them or none, and count the version up. Called between
        two steps.

        Raises:
            ValueError: a model that is not here.
            SchemaMismatch: they do not fit; nothing was changed.
        """
        for prepared in [fitted(self._acting(model_id), source) for model_id, source in weights.items()]:
            if prepared is not None:
                prepared.apply()
        self._version += 1

    def _workers_of(self, device: torch.device) -> list[int]:
        """The workers whose policy is on this device. Raises ValueError: there are none."""
        raise ValueError(f"no worker of this {type(self).__name__} has its policy on {device}")

    # -- setting up ---------------------------------------------------------------------------------------------------

    def _set_up_senders(
        self,
        schemes: Mapping[str, Any] | None,
        weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None,
        *,
        num_workers: int | None = None,
    ) -> None:
        """Prepare schemes (those with private addresses come onto one bus) and the updater. Without communication.

        Raises:
            TypeError, ValueError, RuntimeError: what they cannot be, and what to do about it.
        """
        updater = None if weight_updater is None else make_updater(weight_updater, self.policy)
        self._senders = Senders(schemes or {}, self._sources(), num_workers)
        self.weight_updater = updater

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """The (deprecated) updater that ``update_policy_weights_`` pushes by; None: there is none. Set to an updater, a
        class of them, or what makes one, it registers this collector there."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, given: Any) -> None:
        updater = None if given is None else make_updater(given, self.policy)
        if updater is not None:
            updater.register_collector(self)
            if updater._count_push not in updater.post_hooks:  # it may have served one that is gone
                updater.register_post_hook(updater._count_push)
        self._weight_updater = updater

    def _sources(self) -> Any:
        """What knows the models that sender schemes send where no weights are given: ``get_model(model_id)``."""
        return self

    @property
    def _sender_schemes(self) -> dict[str, Any]:
        return self._senders.schemes

    @property
    def _receiver_schemes(self) -> dict[str, Any]:
        return self._receivers.schemes

    @property
    def _bus(self) -> Bus | None:
        """The bus of the sender schemes."""
        return self._senders.bus

    def _connect_senders(self, timeout: float) -> None:
        """The rendezvous with the workers. Raises NotConnected, PartialSendError."""
        self._senders.connect(timeout)
        if version := self._senders.version:
            self._published(version)

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, Any],
        *,
        synchronize_weights: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Receive these models' weights from the trainer or collector above, between two steps, as they come.

        Args:
            weight_recv_schemes: ``{model_id: scheme}``; initialised here, unless they are already.
            synchronize_weights: connect now; when this returns, the initial weights have been applied.
            timeout: seconds for that.

        Raises:
            RuntimeError: this collector has not been told which worker it is (``worker_idx``).
            TypeError, ValueError: what cannot be a receiver's scheme, or is registered already.
            NotConnected, SchemaMismatch: as the schemes' ``connect``.
        """
        # Between two steps: those under way do not hold the new gates, those that follow do.
        self._local.apply(lambda: self._receivers.register(weight_recv_schemes, self), timeout)
        self._pass_versions_on()
        if synchronize_weights:
            self._receivers.connect(weight_recv_schemes, timeout)

    def _joined_by(self, scheme: Any) -> None:
        """A receiver's scheme has this collector as its context."""
        self._receivers.joined(scheme)
        self._pass_versions_on()

    def _pass_versions_on(self) -> None:
        """What is sent from now on stands for a version from above."""
        for bus in self._senders.buses:
            bus._stand_for(lambda: self._receivers.version)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call the weight updater's ``init`` with these arguments; without an updater, nothing happens."""
        if self.weight_updater is not None:
            self.weight_updater.init(*args, **kwargs)

    # -- from the trainer ---------------------------------------------------------------------------------------------

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
        """Bring the policy up to date wherever it acts; returns when every worker concerned acts with the new weights.

        Args:
            policy_or_weights: module, TensorDict or dict; None: the registered policy's current weights, or the
                updater's. ``{worker_idx: weights}`` gives each worker its own.
            weights: the same, as a TensorDict or dict.
            policy: the same, as a module.
            worker_ids: whom it is for: indices, or the devices that their policies are on; None: everybody.
            model_id: which model; ``"policy"`` if not given.
            weights_dict: ``{model_id: weights}``: each worker switches all of them between two steps, or none.
            wait: for the workers. False: returns when the weights are copied and announced as version
                :attr:`policy_version`; each worker acts with them, or with newer ones, after its step under way, and
                ``max_lag`` bounds how far behind one may be. What is in this process is waited for all the same.
            kwargs: ``timeout=`` in seconds (60); what else the updater's ``push_weights`` takes. Without an updater,
                others are ignored, unless they look like a misspelt argument.

        Raises:
            ValueError: arguments that exclude each other, an unknown model or worker. Nothing was changed.
            TypeError: ``worker_ids`` without schemes or updater; what looks like a misspelt argument.
            SchemaMismatch: weights that do not fit this collector's own model; nothing was changed.
            PartialSendError: which workers have not applied it, and why. Not final: they still converge.
            NotConnected, ClosedError: there are no workers to send to.
        """
        self._carry_out(
            self._plan(policy_or_weights, weights, policy, worker_ids, model_id, weights_dict, kwargs), wait
        )

    def _carry_out(self, update: Planned, wait: bool) -> None:
        if update.push is not None:
            update.push()
        if update.sent is not None:
            self._send(update.sent, update.workers, update.timeout if wait else None)
        if (applied := update.applied) is not None:
            self._local.apply(lambda: self._apply_locally(applied), update.timeout)

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
        """:meth:`update_policy_weights_` for a coroutine of any event loop. The source must not change until it
        returns."""
        update = self._plan(policy_or_weights, weights, policy, worker_ids, model_id, weights_dict, kwargs)
        await self._carry_out_async(update, wait)

    async def _carry_out_async(self, update: Planned, wait: bool) -> None:
        if update.push is not None:
            thread = WorkThread("asyncsync-updater")
            try:
                await finish(thread.submit(update.push))
            finally:
                thread.abandon()
        if update.sent is not None:
            before = self._senders.version
            try:
                await self._senders.send_async(update.sent, update.workers, update.timeout if wait else None)
            finally:
                self._tell(before, update.workers)
        if (applied := update.applied) is not None:
            await self._local.apply_async(lambda: self._apply_locally(applied), update.timeout)

    def _plan(
        self,
        policy_or_weights: Any,
        weights: Any,
        policy: Any,
        worker_ids: WorkerIds,
        model_id: str | None,
        weights_dict: Mapping[str, Any] | None,
        kwargs: dict[str, Any],
    ) -> Planned:
        """Check everything; nothing is done yet."""
        if "policy_weights" in kwargs:
            raise TypeError("policy_weights= is not supported: pass the weights positionally, or as weights=")
        given = as_update(policy_or_weights, weights, policy, model_id, weights_dict)
        timeout: float = kwargs.pop("timeout", DEFAULT_TIMEOUT)
        check_timeout(timeout)
        updater = self.weight_updater
        if updater is None:
            check_spelling(kwargs)
        if worker_ids is not None and updater is None and not self._senders.schemes:
            raise TypeError(
                f"worker_ids={worker_ids!r}, but this {type(self).__name__} has neither weight_sync_schemes nor a "
                "weight_updater: there are no workers to choose from"
            )
        if updater is not None and "policy" in given:
            if len(given) > 1:
                raise ValueError(
                    f"a weight updater pushes the policy alone, not {sorted(given)} together: use weight_sync_schemes"
                )
            return Planned(timeout, push=pushing(updater, given["policy"], worker_ids, kwargs | {"timeout": timeout}))
        sent = {m: w for m, w in given.items() if m in self._senders.schemes}
        own = {m: w for m, w in given.items() if m not in sent and m not in self._receivers.schemes}
        if sent and (apart := sorted(m for m in own if not self._goes_with_workers(m))):
            raise ValueError(
                f"{apart} of {sorted(given)} has no scheme, so they cannot be switched together: update each "
                "alone, or give every model one in weight_sync_schemes"
            )
        applied = None
        if own:
            if by_worker_alone := sorted(m for m, w in own.items() if by_worker(w)):
                raise ValueError(
                    f"{{worker_idx: weights}} was given for {by_worker_alone}, but no workers of this "
                    f"{type(self).__name__} receive that: pass the weights themselves, or give it a scheme in "
                    "weight_sync_schemes"
                )
            if worker_ids is not None:
                raise ValueError(f"unknown model_id {sorted(own)}: the workers receive {sorted(self._senders.schemes)}")
            applied = {m: self._registered(m) if w is None else w for m, w in own.items()}
            if not sent:
                return Planned(timeout, applied=applied)
            for model_id, source in applied.items():  # before anything is sent
                fitted(self._acting(model_id), source)
        if sent:
            self._senders.check(sent)
        elif not self.cascades:
            raise ValueError(
                f"{sorted(given)} comes to this {type(self).__name__} by its weight_recv_schemes, and nobody is below "
                "it: update it where it is sent"
            )
        return Planned(timeout, sent=sent or None, applied=applied, workers=self._indices(worker_ids))

    def _goes_with_workers(self, model_id: str) -> bool:
        """Whether a model that acts here may be updated together with what is sent to workers."""
        return False

    def _indices(self, worker_ids: WorkerIds) -> list[int] | None:
        if worker_ids is None:
            return None
        chosen = [worker_ids] if isinstance(worker_ids, int | torch.device) else list(worker_ids)
        indices: list[int] = []
        for worker in chosen:
            indices += self._workers_of(worker) if isinstance(worker, torch.device) else [worker]
        return as_workers(indices)

    def _send(self, update: Mapping[str, Any], workers: list[int] | None, timeout: float | None) -> None:
        before = self._senders.version
        try:
            self._senders.send(update, workers, timeout)
        finally:
            self._tell(before, workers)

    def _tell(self, before: int, workers: list[int] | None) -> None:
        # Also of a version that not every worker has applied: it is published, and they still converge.
        if (version := self._senders.version) > before:
            mark_counted()
            self._published(version, workers)

    def _published(self, version: int, workers: list[int] | None = None) -> None:
        """Called after a version was published; ``workers``: for whom (None: everybody). For subclasses."""

    def _push_policy(self, weights: Any, worker_id: int | torch.device | None) -> None:
        """What an updater sends by the schemes. Raises RuntimeError: there is none for the policy."""
        if "policy" not in self._senders.schemes:
            raise RuntimeError(
                f"this {type(self).__name__} has no scheme that brings a policy to workers: use VanillaWeightUpdater "
                "for a policy in this process, or pass weight_sync_schemes="
            )
        self._send({"policy": weights}, self._indices(worker_id), DEFAULT_TIMEOUT)

    def _between_steps(self, function: Callable[[], None], timeout: float = DEFAULT_TIMEOUT) -> None:
        """Run a function that writes this collector's own models when no step is under way. Raises AckTimeout."""
        self._local.apply(function, timeout)

    # -- from above ---------------------------------------------------------------------------------------------------

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Take in weights: what the receiver schemes have, or else those given, or those of the original policy.

        Never waits for weights to come: updates are applied by themselves, between two steps. A collector with workers
        passes on what it is given, as a version of its own.

        Args:
            policy_or_weights: module, TensorDict or dict for this collector's own policy.
            weights: the same, as a TensorDict or dict.
            policy: the same, as a module.

        Raises:
            ValueError: several of them, or any while receiver schemes are registered.
            SchemaMismatch: they do not fit; nothing was changed.
            PartialSendError: which workers have not applied what was passed on, and why.
            ClosedError, Fenced: nothing more will come.
        """
        given = chosen(policy_or_weights, weights, policy)
        if not self._receivers.schemes:
            self._take(given)
        elif given is not None:
            raise ValueError(
                f"this {type(self).__name__} receives {sorted(self._receivers.schemes)} by weight_recv_schemes: "
                "call receive_weights() without arguments, or send from above"
            )
        else:
            self._take_in()

    def _take(self, given: Any) -> None:
        """The policy's weights from whoever is above, without schemes; None: the registered policy's."""
        source = self._registered("policy") if given is None else given
        self._local.apply(lambda: self._apply_locally({"policy": source}), DEFAULT_TIMEOUT)
        if "policy" in self._senders.schemes:
            self.update_policy_weights_(source)

    def _receive_weights_scheme(self) -> None:
        """What a remote parent calls (RPC, Ray): every receiver scheme takes in what has come.

        Raises:
            RuntimeError: there is none.
        """
        if not self._receivers.schemes:
            raise RuntimeError(
                f"this {type(self).__name__} has no receiver schemes: pass weight_recv_schemes=, or call "
                "register_scheme_receiver()"
            )
        self._take_in()

    def _take_in(self) -> None:
        self._local.apply(self._receivers.take_in, DEFAULT_TIMEOUT)

    @property
    def cascades(self) -> bool:
        """Whether updates that are received go further down; see :mod:`asyncsync.bus.cascade`."""
        return bool(self._senders.schemes) or self.weight_updater is not None

    # -- around a step ------------------------------------------------------------------------------------------------

    def _holds(self) -> Holds:
        """For steps, policy and environment: no weights of this collector change within."""
        return Holds([self._local.gate, *self._receivers.gates])

    def _version_now(self) -> int:
        """What frames are labelled with: the version that acts; with a trainer above, that of its schemes and what its
        updaters have counted."""
        if self._counted is not None:
            return self._receivers.version + self._counted()
        return self._applied_version()

    def _applied_version(self) -> int:
        """The version that acts: of the policy's bus where there are receiver schemes (else of the first), else the
        count of updates applied here."""
        return self._receivers.version if self._receivers else self._version

    def _newest_version(self) -> int:
        """The newest version that the trainer has published, as far as is known here, by the count of
        :meth:`_applied_version`."""
        if self._newest is not None:
            return self._newest()
        return self._receivers.newest if self._receivers else self._version

    def _await_version(self, version: int, timeout: float) -> None:
        """Wait, outside any hold, until this version or a newer one acts.

        Raises:
            AckTimeout: not within the timeout (seconds).
            ClosedError, Fenced: it will not come.
        """
        check_timeout(timeout)
        self._receivers.wait(version, timeout)

    def _keep_up(self, max_lag: int, timeout: float) -> None:
        """Wait, outside any hold, until the acting weights are at most so many versions behind the newest, on each bus
        by its own count.

        Raises:
            AckTimeout: not within the timeout (seconds), for any of the waits.
            ClosedError, Fenced: it will not come.
        """
        self._receivers.keep_up(max_lag, timeout)
        while self._newest is not None and (newest := self._newest()) - self._applied_version() > max_lag:
            self._await_version(newest - max_lag, timeout)

    @property
    def policy_version(self) -> int:
        """The newest version: published, where there are workers below; else the one that acts here. In a tree of
        collectors, that of its root."""
        published = self._senders.schemes and not self._receivers
        return self._senders.version if published else self._version_now()

    def increment_version(self) -> None:
        """Count the version of this collector's own policy up by one."""
        self._version += 1

    def _versions(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that versions go on where they were."""
        return {"own": self._version, "sent": self._senders.versions()}

    def _carry_on(self, versions: Mapping[str, Any]) -> None:
        """Go on from what :meth:`_versions` returned. Versions never go back: a count that is beyond it goes on."""
        self._version = max(self._version, versions["own"])
        self._senders.carry_on(versions["sent"])

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_weights(self, timeout: float) -> None:
        """Shut every scheme down, within the timeout (seconds) for all of them. Idempotent."""
        shut_down_all([*self._senders.schemes.values(), *self._receivers.schemes.values()], timeout)
