"""A collector's weights: taking them from the trainer, passing them on, applying them to its own models.

Each form of ``update_policy_weights_`` becomes one update ``{model_id: weights}``, checked before anything is done. It
goes one way: by sender schemes, through the deprecated weight updater, or into this collector's own models. A model
that this collector *receives* is only passed on downwards: the scheme has applied it here.

Names, forms and exclusions follow TorchRL's "RPCCollector" page.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from asyncsync.arguments import as_workers, check_timeout
from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.collectors.weights.acting import ActingWeights, besides, fitted
from asyncsync.collectors.weights.legacy_updaters import (
    WeightUpdaterBase,
    WorkerIds,
    make_updater,
    mark_counted,
    pushing,
)
from asyncsync.collectors.weights.senders import Senders, connect_all, shut_down_all
from asyncsync.runtime.threads import elsewhere
from asyncsync.schemes.sources import by_worker, follow


class UnknownModel(LookupError, ValueError):
    """There is no model with this id. A LookupError for ``get_model()``, and a ValueError for an update."""


_ARGUMENTS = ("policy_or_weights", "weights", "policy", "worker_ids", "model_id", "weights_dict", "wait", "timeout")


def chosen(policy_or_weights: Any, weights: Any, policy: Any) -> Any:
    """The one that is given; None: none is. Raises ValueError: several are."""
    given = {"the positional argument": policy_or_weights, "weights=": weights, "policy=": policy}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give the weights once")
    return next(iter(given.values()), None)


def as_update(
    policy_or_weights: Any, weights: Any, policy: Any, model_id: str | None, weights_dict: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One update; None as a model's weights: those that are registered. Raises ValueError: arguments that exclude each
    other, or an empty ``weights_dict``; TypeError: its keys are no model ids."""
    single = chosen(policy_or_weights, weights, policy)
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


def check_keywords(kwargs: Mapping[str, Any], *, takes_any: bool) -> None:
    """Raises TypeError: ``policy_weights``, or what seems a misspelt argument, which must not be ignored."""
    if "policy_weights" in kwargs:
        raise TypeError("policy_weights= is not supported: pass the weights positionally, or as weights=")
    for name in () if takes_any else kwargs:
        if near := difflib.get_close_matches(name, _ARGUMENTS, 1):
            raise TypeError(f"update_policy_weights_() has no argument {name!r}: did you mean {near[0]!r}?")


def worker_indices(worker_ids: WorkerIds, workers_of: Callable[[torch.device], list[int]]) -> list[int] | None:
    """Indices of workers, from indices and devices; None: all of them. ``workers_of`` gives those of a device."""
    if worker_ids is None:
        return None
    indices: list[int] = []
    for worker in worker_ids if isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str) else [worker_ids]:
        indices += workers_of(worker) if isinstance(worker, torch.device) else [worker]
    return as_workers(indices)


def belongs_to(owner: str, model_id: str) -> bool:
    """Whether this is the model called ``owner``, or a path into it."""
    return model_id == owner or model_id.startswith((f"{owner}.", f"{owner}["))


def find_model(collector: Any, model_id: str, policy: Any) -> Any:
    """The model of this name: ``"policy"``; an attribute path from the collector, such as ``postproc`` or
    ``env.transform[0].module``; or one from the policy, such as ``actor`` for ``policy.actor``.

    ``policy`` is the one that is meant: the one that acts, or the one that was registered. Raises UnknownModel.
    """
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
            return follow(start, path)
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
        """Raises LookupError: there is none of this name."""
        find = self._find()
        if find is None:
            raise LookupError(f"the collector of model {model_id!r} was deleted")
        return find(model_id)


@dataclass(frozen=True, slots=True)
class Planned:
    """What one call of ``update_policy_weights_`` is to do, checked."""

    timeout: float
    sent: Mapping[str, Any] = field(default_factory=dict)
    applied: Mapping[str, Any] = field(default_factory=dict)
    push: Callable[[], None] | None = None
    workers: list[int] | None = None


class WeightsAPI:
    """The weights' side of :class:`asyncsync.collectors.base.BaseCollector`. ``policy`` is the policy as it was
    registered, which a bare ``update_policy_weights_()`` sends; ``acts_elsewhere``: in other processes only."""

    policy: Any = None
    acts_elsewhere: bool = False
    worker_idx: Any

    def __init__(self) -> None:
        self._weight_updater: WeightUpdaterBase | None = None
        self._senders = Senders({})
        self._weights = ActingWeights()

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

    def _apply_locally(self, weights: Mapping[str, Any]) -> None:
        """Copy weights, between two steps, into this collector's own models, all of them or none, and count the version
        up. Raises ValueError, SchemaMismatch: nothing was changed."""
        changes = [p for model_id, source in weights.items() if (p := fitted(self._acting(model_id), source))]
        for prepared in changes:
            prepared.apply()
        for prepared in changes:
            prepared.complete()
        self._weights.own += 1

    def _workers_of(self, device: torch.device) -> list[int]:
        """The workers whose policy is on this device. Raises ValueError: there are none."""
        raise ValueError(f"this {type(self).__name__} has no worker whose policy is on {device}")

    # -- setting up ---------------------------------------------------------------------------------------------------

    def _set_up_senders(
        self, schemes: Mapping[str, Any] | None, weight_updater: Any, context: Any, num_workers: int | None = None
    ) -> None:
        """Prepare schemes and the updater, without communication. ``context.get_model(model_id)`` gives the models that
        are sent where no weights are given. Raises TypeError, ValueError, RuntimeError."""
        updater = None if weight_updater is None else make_updater(weight_updater, self.policy)
        self._senders = Senders(schemes or {}, context, num_workers)
        self.weight_updater = updater

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """The (deprecated) updater by which ``update_policy_weights_`` pushes, or None. Set it to an updater, an
        updater class, or a callable that returns one; this registers the collector with the updater."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, given: Any) -> None:
        updater = None if given is None else make_updater(given, self.policy)
        if updater is not None:
            updater._serve(self)
        self._weight_updater = updater

    @property
    def _sender_schemes(self) -> dict[str, Any]:
        return self._senders.schemes

    @property
    def _receiver_schemes(self) -> dict[str, Any]:
        return self._weights.schemes

    def _connect_senders(self, timeout: float) -> None:
        """Connect to the workers. Raises NotConnected, PartialSendError."""
        connect_all(self._senders.schemes.values(), timeout)
        if version := self._senders.version:
            self._published(version)

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
        self._weights.apply(lambda: self._weights.register(weight_recv_schemes, self), timeout)
        self._pass_versions_on()
        if synchronize_weights:
            self._weights.connect(weight_recv_schemes, timeout)

    def _joined_by(self, scheme: Any) -> None:
        """A receiver's scheme has this collector as its context."""
        self._weights.joined(scheme)
        self._pass_versions_on()

    def _pass_versions_on(self) -> None:
        """Have updates that are sent from now on carry a version from above."""
        for bus in self._senders.buses:
            bus.stand_for(self._weights.origin)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call the weight updater's ``init`` with these arguments. Does nothing without an updater."""
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
        self._carry_out(self._planned(given, worker_ids, kwargs), wait)

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
        await self._carry_out_async(self._planned(given, worker_ids, kwargs), wait)

    def _planned(self, given: Mapping[str, Any], worker_ids: WorkerIds, kwargs: dict[str, Any]) -> Planned:
        """Check an update ``{model_id: weights}`` and where each model goes, before anything is done. None as weights:
        those that are registered."""
        name, senders, updater = type(self).__name__, self._senders, self.weight_updater
        timeout: float = kwargs.pop("timeout", DEFAULT_TIMEOUT)
        check_timeout(timeout)
        check_keywords(kwargs, takes_any=updater is not None)
        if worker_ids is not None and updater is None and not senders.schemes:
            raise TypeError(
                f"worker_ids={worker_ids!r}, but this {name} has no workers to choose from, because it has neither "
                "weight_sync_schemes nor a weight_updater: leave worker_ids out"
            )
        if updater is not None and "policy" in given:
            if len(given) > 1:
                raise ValueError(
                    f"a weight updater pushes only the policy, not {sorted(given)}: use weight_sync_schemes"
                )
            return Planned(timeout, push=pushing(updater, given["policy"], worker_ids, kwargs | {"timeout": timeout}))
        sent = {m: w for m, w in given.items() if m in senders.schemes}
        own = {m: w for m, w in given.items() if m not in sent and m not in self._weights.schemes}
        if sent and (apart := sorted(m for m in own if not self._goes_with_workers(m))):
            raise ValueError(
                f"{apart} of {sorted(given)} has no scheme, so workers cannot switch them together: update each "
                "alone, or give each model a scheme in weight_sync_schemes"
            )
        if by_worker_alone := sorted(m for m, w in own.items() if by_worker(w)):
            raise ValueError(
                f"{{worker_idx: weights}} was given for {by_worker_alone}, but no worker of this {name} receives that "
                "model: pass the weights themselves, or give it a scheme in weight_sync_schemes"
            )
        if own and worker_ids is not None:
            raise ValueError(f"unknown model_id {sorted(own)}: the workers receive {sorted(senders.schemes)}")
        applied = {m: self._registered(m) if w is None else w for m, w in own.items()}
        for model_id in [m for m, w in sent.items() if w is None and not senders.schemes[m].sources.exist()]:
            self._registered(model_id)  # raises: there is nothing to send
        if sent:
            for model_id, source in applied.items():  # before anything is sent
                fitted(self._acting(model_id), source)
            senders.bus_of(sent)
        elif not own and not self.cascades:
            raise ValueError(
                f"this {name} receives {sorted(given)} by its weight_recv_schemes and sends to no workers: update the "
                "weights at their sender"
            )
        return Planned(timeout, sent=sent, applied=applied, workers=worker_indices(worker_ids, self._workers_of))

    def _carry_out(self, update: Planned, wait: bool) -> None:
        if update.push is not None:
            update.push()
        before, change = self._senders.version, partial(self._apply_locally, update.applied)
        try:
            if update.sent:
                with self._publishing():
                    self._senders.send(update.sent, update.workers, update.timeout if wait else None)
        except BaseException as error:
            if update.applied and self._senders.version > before:  # the workers converge to theirs
                with besides(error):
                    self._weights.apply(change, update.timeout)
            raise
        if update.applied:
            self._weights.apply(change, update.timeout)

    async def _carry_out_async(self, update: Planned, wait: bool) -> None:
        if update.push is not None:
            await elsewhere("asyncsync-updater", update.push)
        before, change = self._senders.version, partial(self._apply_locally, update.applied)
        try:
            if update.sent:
                with self._publishing():
                    await self._senders.send_async(update.sent, update.workers, update.timeout if wait else None)
        except BaseException as error:  # a cancellation, too
            if update.applied and self._senders.version > before:
                with besides(error):
                    await self._weights.apply_async(change, update.timeout)
            raise
        if update.applied:
            await self._weights.apply_async(change, update.timeout)

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        """A block that sends. Also a version that not every worker has applied is published: they still converge."""
        before = self._senders.version
        try:
            yield
        finally:
            if (version := self._senders.version) > before:
                mark_counted()
                self._published(version)

    def _goes_with_workers(self, model_id: str) -> bool:
        """Whether a model that acts here may be updated together with what is sent to workers."""
        return False

    def _published(self, version: int) -> None:
        """Called after a version was published. For subclasses."""

    def _push_policy(self, weights: Any, worker_id: int | torch.device | None) -> None:
        """What an updater sends by the schemes. Raises RuntimeError: there is none for the policy."""
        if "policy" not in self._senders.schemes:
            raise RuntimeError(
                f"this {type(self).__name__} has no scheme that sends a policy to workers: use VanillaWeightUpdater "
                "for a policy in this process, or pass weight_sync_schemes="
            )
        workers = worker_indices(worker_id, self._workers_of)
        with self._publishing():
            self._senders.send({"policy": weights}, workers, DEFAULT_TIMEOUT)

    # -- from above ---------------------------------------------------------------------------------------------------

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
        given = chosen(policy_or_weights, weights, policy)
        if not self._weights.schemes:
            self._take(given)
        elif given is not None:
            raise ValueError(
                f"this {type(self).__name__} receives {sorted(self._weights.schemes)} by weight_recv_schemes: "
                "call receive_weights() without arguments, or send the weights from above"
            )
        else:
            self._receive_weights_scheme()

    def _take(self, given: Any) -> None:
        """The policy's weights from the trainer or collector above, without schemes; None: the registered policy's."""
        source = self._registered("policy") if given is None else given
        self._weights.apply(lambda: self._apply_locally({"policy": source}))
        if "policy" in self._senders.schemes:
            self.update_policy_weights_(source)

    def _receive_weights_scheme(self) -> None:
        """For a remote parent (RPC, Ray), which calls this: every receiver scheme applies what it is called for, or has
        come. Raises RuntimeError: there is none."""
        if not self._weights.schemes:
            raise RuntimeError(
                f"this {type(self).__name__} has no receiver schemes: pass weight_recv_schemes=, or call "
                "register_scheme_receiver()"
            )
        self._weights.receive()

    @property
    def cascades(self) -> bool:
        """Whether the collector sends received updates on to workers; see :mod:`asyncsync.bus.applying`."""
        return bool(self._senders.schemes) or self.weight_updater is not None

    # -- versions -----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The newest published version or, without workers, the version that acts here. In a tree of collectors, the
        root's version."""
        published = self._senders.schemes and not self._weights.come_from_above
        return self._senders.version if published else self._weights.version()

    def increment_version(self) -> None:
        """Count the version of this collector's own policy up by one."""
        self._weights.own += 1

    def _versions(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that versions go on where they were."""
        return {"own": self._weights.own, "sent": self._senders.versions()}

    def _carry_on(self, versions: Mapping[str, Any]) -> None:
        """Go on from what :meth:`_versions` returned. Versions never go back: a count that is beyond it goes on."""
        self._weights.own = max(self._weights.own, versions["own"])
        self._senders.carry_on(versions["sent"])

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_weights(self, timeout: float) -> None:
        """Shut every scheme down, within the timeout (seconds) for all of them. Idempotent."""
        shut_down_all([*self._senders.schemes.values(), *self._weights.schemes.values()], timeout)
