"""Collectors with workers: the base of all of them, and ``MultiCollector``, whose workers are processes of this host,
one per factory.

No rollout is thrown away. The collector raises a worker's errors. Names and defaults follow TorchRL's "RPCCollector"
page and its ``MultiCollector``.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from inspect import Parameter
from multiprocessing.managers import BaseProxy
from multiprocessing.util import Finalize
from typing import Any, Literal, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from asyncsync.arguments import declared, defaults_of
from asyncsync.collectors.arguments import (
    DEVICES,
    check_devices,
    check_factories,
    check_length,
    check_policy,
    check_policy_factory,
    exact_device,
    frames_or_none,
    is_list,
    partial_arguments,
    per_worker,
    rounded_up,
    whole_number,
    with_partial,
)
from asyncsync.collectors.base import ANSWER_SECONDS, SHUTDOWN_SECONDS, BaseCollector, Signals, _delegated
from asyncsync.collectors.multi.driver import AsyncDriver, BatchArguments, Driver, SyncDriver
from asyncsync.collectors.multi.torchrl_private import share_lazy_storage
from asyncsync.collectors.options import ChoosingMeta, MultiOptions
from asyncsync.collectors.profiling import ProfileConfig
from asyncsync.collectors.single import Collector
from asyncsync.collectors.trajectories import check_trajectories, moved_postproc, processed
from asyncsync.collectors.weights.legacy_updaters import MultiProcessedWeightUpdater, WeightUpdaterBase, make_updater
from asyncsync.collectors.weights.updates import (
    UnknownModel,
    _RegisteredModels,
    belongs_to,
    prepared_copy,
    shut_down_all,
)
from asyncsync.collectors.workers.group import Family, WorkerGroup
from asyncsync.collectors.workers.local import LocalFamily, check_platform
from asyncsync.collectors.workers.messages import loads, pickled
from asyncsync.collectors.workers.worker import Specification, WorkerInfo
from asyncsync.errors import AckTimeout, PartialSendError, PeerLost
from asyncsync.runtime.threads import interrupted_by, run_in_thread, run_on_loop
from asyncsync.schemes.none import NoSyncCore
from asyncsync.schemes.sources import follow_path
from asyncsync.sync import SharedMemWeightSyncScheme

FAILURE_SECONDS = 1.0
"""How long an update waits for a worker's own failure after the bus has reported that the worker is lost."""

WORKER_OPTIONS = (
    "max_frames_per_traj", "reset_at_each_iter", "track_traj_ids", "exploration_type", "set_truncated", "extend_buffer",
    "trust_policy", "compile_policy", "cudagraph_policy", "no_cuda_sync", "pre_collect_hook", "max_lag", "compact_obs",
    "auto_register_policy_transforms", "traj_pool",
)  # fmt: skip
"""Options that each worker's collector gets unchanged."""
WRITER_OPTIONS = ("postproc", "split_trajs", "trajs_per_batch", "trajs_per_write")
"""Options that it also gets if it writes to a replay buffer. Without one, this process applies them to its batches."""


class GroupCollector(BaseCollector):
    """A collector with the workers of a group, and a driver that makes batches of their rollouts. Its methods call
    workers between two rollouts: they return copies, and raise a worker's errors. A subclass chooses the group, the
    schedule, and the default scheme for weights."""

    acts_elsewhere = True
    _arguments: BatchArguments
    group: WorkerGroup
    _driver: Driver
    _driver_class: type[Driver]
    _default_scheme: Callable[[], Any] = SharedMemWeightSyncScheme  # makes the policy's if the user gives none
    _own_arguments: Sequence[Mapping[str, Any]] | None = None  # those that the user gives for each worker alone
    _finalizers: tuple[Callable[[], object], ...]

    update_at_each_batch = _delegated("_arguments.update_at_each_batch")
    max_weight_update_interval = _delegated("_arguments.max_weight_update_interval")
    _newest_index = _delegated("_driver.count")
    _num_frames = _delegated("_driver.frames")
    background_error = _delegated("_driver.background_error")

    @declared
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Unpack[MultiOptions]) -> None:
        """Start the workers, and connect the schemes. Needs Linux.

        Args:
            create_env_fn: a list with a callable that returns an environment (or a Gymnasium id) for each worker, or
                one for all, with ``num_workers``. Pickled by cloudpickle, so lambdas work.
            policy: module or callable, as for :class:`asyncsync.collectors.Collector`; pickled by cloudpickle. With
                ``policy_factory`` it stays in this process, as the source of weights.

        Raises:
            TypeError, ValueError: arguments exclude each other, or do not fit the workers.
            Exception: a worker raised it before it was ready. It keeps its type.
            AckTimeout, NotConnected: not all workers were ready within ``connect_timeout``.
            NotImplementedError: this is not Linux.
        """
        super().__init__(options["pre_collect_hook"], options["post_collect_hook"], options["worker_idx"])
        self.closed = True  # as long as there is nothing to close
        check_platform(type(self).__name__)
        given: dict[str, Any] = {**options}
        factories = check_factories(create_env_fn, given["num_workers"])
        self.num_workers = count = len(factories)
        check_shared(given["replay_buffer"])
        self._arguments = self._batch_arguments(given)
        policies = policies_of_workers(policy, given["policy_factory"], count)
        updater, schemes = self._updater_and_schemes(policy, given)
        own = partial_arguments(given["collector_class"])  # a partial may have devices of its own
        check_devices({name: own.get(name, given[name]) for name in DEVICES}, of_workers=True)
        each_device = zip(*(per_worker(name, given[name], count) for name in DEVICES), strict=True)
        worker_devices = [dict(zip(DEVICES, devices, strict=True)) for devices in each_device]
        self.policy_device, self.storing_device = (
            [exact_device(d["device"] if d[name] is None else d[name]) for d in worker_devices]
            for name in ("policy_device", "storing_device")
        )
        self.policy = policy
        if policy is None and given["worker_idx"] is not None and policies[0] is not None:
            self.policy = policies[0]()  # in the middle of a tree: for weights that it receives and passes on
        self.extend_buffer = given["extend_buffer"]
        if self.replay_buffer is None:
            self._arguments.postproc = moved_postproc(given["postproc"], self.storing_device[0])
        if given["num_threads"] is not None:
            torch.set_num_threads(given["num_threads"])
        worker_arguments = self._worker_arguments(given, policy, policies, worker_devices)
        check_own_schemes([{**partial_arguments(given["collector_class"]), **own} for own in worker_arguments])
        sent = {m: scheme for m, scheme in schemes.items() if not self._acts_beside_workers(m)}
        self._set_up_senders(sent, updater, self, count)
        for scheme in self._sender_schemes.values():
            if scheme.context is self:  # an open bus keeps its schemes alive, and they must not keep this collector
                scheme.context = _RegisteredModels(self._registered_model)
        family, name = self._make_family(given["start_method"]), type(self).__name__
        self.group = WorkerGroup(family, name, given["connect_timeout"], self._arguments.trajectories)
        self._driver = self._driver_class(self, self.group, self._arguments)
        self.closed = False
        self._finalizers = make_finalizers(self, self.group, self._sender_schemes)
        try:
            self._start_workers(factories, worker_arguments, given)
        except BaseException:
            self.shutdown()
            raise

    def _batch_arguments(self, given: Mapping[str, Any]) -> BatchArguments:
        own, buffer = partial_arguments(given["collector_class"]), given["replay_buffer"]
        effective = {**given, **{name: own[name] for name in ("track_traj_ids", "reset_at_each_iter") if name in own}}
        self.track_traj_ids = effective["track_traj_ids"]
        trajectories = check_trajectories(**effective)
        self._has_fixed_batches = trajectories is None or buffer is not None
        dim, threshold = self._check_results(given["cat_results"], given["preemptive_threshold"])
        total = frames_or_none("total_frames", given["total_frames"])
        frames, count = given["frames_per_batch"], self.num_workers
        if is_list(frames):
            check_length("frames_per_batch", frames, count)
            frames = [whole_number(f"frames_per_batch[{i}]", n, 1) for i, n in enumerate(frames)]
            batch_frames = self._driver_class.frames_of_batch(frames)
        else:
            batch_frames = whole_number("frames_per_batch", frames, 1)
            each = batch_frames
            if self._driver_class.takes_all:
                each = rounded_up("frames_per_batch", batch_frames, "the number of workers", count) // count
            frames = [each] * count
        if total is not None:
            rounded_up("total_frames", total, "frames_per_batch", batch_frames)
        return BatchArguments(
            frames,
            math.inf if total is None else total,
            frames_or_none("init_random_frames", given["init_random_frames"]) or 0,
            split_trajs=bool(given["split_trajs"]) and buffer is None,
            replay_buffer=buffer,
            update_at_each_batch=given["update_at_each_batch"],
            max_weight_update_interval=given["max_weight_update_interval"],
            trajectories=None if buffer is not None else trajectories,
            writes_trajectories=buffer is not None and trajectories is not None,
            dim=dim,
            threshold=threshold,
        )

    def _updater_and_schemes(
        self, policy: Any, given: Mapping[str, Any]
    ) -> tuple[WeightUpdaterBase | None, Mapping[str, Any]]:
        """The updater and the schemes that carry weights to the workers. Raises TypeError, ValueError: workers need
        weights, but neither carries them."""
        updater, schemes = given["weight_updater"], given["weight_sync_schemes"]
        has_factory = given["policy_factory"] is not None
        if updater is not None and schemes is not None:
            raise TypeError("weight_updater and weight_sync_schemes exclude each other: pass the schemes alone")
        if updater is not None:
            updater = make_updater(updater, policy)
        if schemes is None:
            has_weights = isinstance(policy, nn.Module) and bool([*policy.parameters(), *policy.buffers()])
            are_made_in_workers = has_factory and policy is None and updater is None
            needs_scheme = has_weights or are_made_in_workers or isinstance(updater, MultiProcessedWeightUpdater)
            schemes = {"policy": self._default_scheme()} if needs_scheme else {}
        carries_weights = updater is not None or "policy" in schemes
        if policy is not None and has_factory and not carries_weights:
            raise TypeError(
                "policy and policy_factory exclude each other, unless a scheme sends weights from one to the other: "
                "pass one of them, or weight_sync_schemes={'policy': …}"
            )
        if (self.update_at_each_batch or self.max_weight_update_interval > 0) and not carries_weights:
            raise ValueError(
                "update_at_each_batch and max_weight_update_interval send the policy's weights, but no scheme or "
                "updater carries them to the workers: pass a policy with parameters or buffers, "
                "weight_sync_schemes={'policy': …}, or a weight_updater"
            )
        return updater, schemes

    def _worker_arguments(
        self,
        given: Mapping[str, Any],
        policy: Any,
        policies: Sequence[Any],
        worker_devices: Sequence[Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        names = WORKER_OPTIONS if self.replay_buffer is None else (*WORKER_OPTIONS, *WRITER_OPTIONS)
        common = {name: given[name] for name in names} | {"track_policy_version": bool(given["track_policy_version"])}
        kwargs = per_worker("create_env_kwargs", given["create_env_kwargs"], self.num_workers)
        defaults = defaults_of(MultiOptions)
        found = []
        for worker, own_policy in enumerate(policies):
            own = {
                **common,
                **worker_devices[worker],
                "frames_per_batch": self._arguments.frames[worker],
                "create_env_kwargs": kwargs[worker],
                "policy": policy if own_policy is None else None,
                "policy_factory": own_policy,
                "worker_idx": worker,
            }
            own = with_partial(given["collector_class"], own, defaults)
            found.append(own if self._own_arguments is None else {**own, **self._own_arguments[worker]})
        return found

    def _start_workers(
        self, factories: Sequence[Any], worker_arguments: Sequence[dict[str, Any]], given: Mapping[str, Any]
    ) -> None:
        group, buffer, timeout = self.group, self.replay_buffer, given["connect_timeout"]
        deadline = time.monotonic() + timeout
        share_lazy_storage(buffer)
        if hasattr(buffer, "share") and not getattr(buffer, "shared", True):
            buffer.share()
        common = {
            "kind": given["collector_class"] or Collector,
            "post_collect_hook": given["post_collect_hook"],
            "init_fn": given["init_fn"],
            "threads": given["num_sub_threads"],
            "follows": self._announce_versions(),
            "timeout": timeout,
        }
        pairs = zip(factories, worker_arguments, strict=True)
        specifications = [Specification(create_env_fn=factory, arguments=own, **common) for factory, own in pairs]
        group.start([pickled(one) for one in specifications], self._sender_schemes, buffer)
        self._wait_until_built(deadline)
        for index, info in group.infos.items():
            self._arguments.frames[index] = info.frames
            self._worker_devices[index] = info.devices
            self._check_dims(info.dims)
        self._connect(deadline)
        if given["weight_recv_schemes"] is not None:  # after the workers' connection: weights are passed on at once
            self.register_scheme_receiver(given["weight_recv_schemes"])

    def _wait_until_built(self, deadline: float) -> None:
        infos, all_workers = self.group.infos, range(self.num_workers)

        def late() -> str:
            return (
                f"workers {[worker for worker in all_workers if worker not in infos]} of this {type(self).__name__} "
                "were not ready in time: pass a longer connect_timeout, if importing libraries and making environments "
                "takes longer"
            )

        self.group.wait(lambda: len(infos) == self.num_workers, max(0.0, deadline - time.monotonic()), late)

    def _connect(self, deadline: float) -> None:
        """Connect this side while the workers connect theirs. If a worker fails, end this side's attempt."""
        group, name = self.group, "asyncsync-collector-connect"

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        def ended(sending: asyncio.Future[None]) -> None:
            sending.exception()  # retrieved, because a worker's failure may be raised instead
            group.recheck_waits()

        async def both() -> None:
            sending = asyncio.ensure_future(run_in_thread(name, lambda: self._connect_senders(left())))
            sending.add_done_callback(ended)
            try:
                await group.until(
                    lambda: sending.done() and (group.connected or sending.exception() is not None), left() + 1.0
                )
            except BaseException:
                await run_in_thread(name, lambda: self._end_weights(1.0))
                await asyncio.wait([sending], timeout=3.0)
                raise
            sending.result()

        run_on_loop(both)

    # -- what a subclass decides --------------------------------------------------------------------------------------

    def _make_family(self, start_method: str) -> Family:
        return LocalFamily(start_method, type(self).__name__)

    def _check_results(
        self, cat_results: str | int | None, preemptive_threshold: float | None
    ) -> tuple[int | None, float]:
        """The dimension and the threshold of batches. Only a synchronous collector supports these arguments."""
        given = {"cat_results": cat_results not in (None, "stack"), "preemptive_threshold": preemptive_threshold}
        for name, value in given.items():
            if value not in (None, False):
                raise ValueError(f"{name} needs batches of several workers: use MultiSyncCollector")
        return None, 1.0

    def _check_dims(self, dims: int | None) -> None:
        """Raises ValueError: cat_results does not fit the number of batch dimensions of a worker's environment (None:
        it has workers of its own)."""
        dim = self._arguments.dim
        if dim is None or dims is None:
            return
        if not -dims - 1 <= dim <= dims:
            raise ValueError(
                f"cat_results={dim} is not a dimension of a batch with {dims + 1} dimensions: choose one, or 'stack'"
            )
        if self._arguments.threshold < 1 and dim % (dims + 1) != dims:
            raise ValueError(
                f"cat_results={dim} cannot concatenate rollouts that preemptive_threshold cuts: use cat_results=-1 "
                "or 'stack'"
            )

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames of a batch."""
        return self._driver_class.frames_of_batch(self._arguments.frames)

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """How many frames a rollout of this worker has. None: of every worker, if they are equal.

        Raises:
            ValueError: ``worker_idx`` is None, but the workers differ.
        """
        frames = self._arguments.frames
        if worker_idx is None and len(set(frames)) > 1:
            raise ValueError(f"the workers' rollouts differ in frames, {frames}: choose a worker by worker_idx=")
        return frames[worker_idx or 0]

    # -- iteration ----------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        return self._driver.iterator()

    async def __anext__(self) -> TensorDictBase | None:
        return await self._driver.next_async()

    def _start_background(self) -> None:
        self._driver.run_free()

    def is_running(self) -> bool:
        return self._driver.free_run is not None

    def _paused(self, owner: object) -> AbstractContextManager[None]:
        return self._driver.paused(owner)

    # -- calls between two rollouts -----------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False, *, timeout: float = ANSWER_SECONDS) -> int:
        for worker in range(self.num_workers):
            [seed] = self.group.ask("set_seed", seed, static_seed, workers=[worker], timeout=timeout)
        self._driver.drop_broken_trajectories()
        return seed

    def reset(self, reset_idx: Sequence[bool] | None = None, *, timeout: float = ANSWER_SECONDS) -> None:
        """Reset the environments of all workers, or of some.

        Args:
            reset_idx: one bool per worker, True to reset its environment. None: all.
            timeout: seconds. Workers answer between two rollouts.

        Raises:
            ValueError: ``reset_idx`` does not have one entry per worker.
            AckTimeout: a worker did not answer within the timeout. It will still carry out the call.
        """
        if reset_idx is not None:
            check_length("reset_idx", reset_idx, self.num_workers)
        chosen = [w for w in range(self.num_workers) if reset_idx is None or reset_idx[w]]
        self.group.ask("reset", workers=chosen, timeout=timeout)
        self._driver.drop_broken_trajectories()

    def state_dict(self, *, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        states = self.group.ask("state_dict", timeout=timeout)
        versions = self._versions(self.group.page.counted)
        own = {"frames": self._driver.frames, "iter": self._driver.count, "versions": versions}
        return {f"worker{w}": s for w, s in enumerate(states)} | own

    def fake_tensordict(self, *, timeout: float = ANSWER_SECONDS) -> TensorDictBase:
        batch = self._driver.combine(self.group.ask("fake_tensordict", timeout=timeout))
        return processed(batch, self.postproc, split_trajs=self.split_trajs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, *, timeout: float = ANSWER_SECONDS
    ) -> None:
        self.group.check()
        state, names = state_dict, [f"worker{worker}" for worker in range(self.num_workers)]
        if strict and (missing := [name for name in (*names, "frames", "iter") if name not in state]):
            raise KeyError(f"the state dict of a {type(self).__name__} with {len(names)} workers lacks {missing}")
        # First, because each worker begins new trajectories when it loads.
        next_ids = [int(pool["traj_id"]) for pool in find_parts(state, "traj_pool")]
        self.group.page.advance_trajectories(0, max(next_ids, default=0))
        there = [name for name in names if name in state]
        for name in there:
            self.group.ask("load_state_dict", state[name], strict, workers=[names.index(name)], timeout=timeout)
        self._driver.drop_broken_trajectories()
        self._driver.frames = state.get("frames", self._driver.frames)
        self._driver.count = state.get("iter", self._driver.count)
        policies = [policy for name in there for policy in find_parts(state[name], "policy_state_dict")]
        own = self.policy.state_dict() if isinstance(self.policy, nn.Module) else {}
        all_have = (
            bool(policies) and own.keys() == policies[0].keys() and all(are_equal(policies[0], p) for p in policies)
        )
        is_sent = there == names and "policy" in self._sender_schemes and (all_have or len(policies) == len(names))
        if "versions" in state:
            self._restore_versions(state["versions"], is_sent)
        if not is_sent:
            self.increment_version()
        elif all_have:
            self.policy.load_state_dict(policies[0])
            self.update_policy_weights_(timeout=timeout)
        else:
            each = {worker: TensorDict(policy) for worker, policy in enumerate(policies)}
            self.update_policy_weights_(each, timeout=timeout)

    def _set_in_workers(self, name: str, hook: Callable[..., None] | None) -> None:
        self.group.ask(name, hook)

    # -- as a worker --------------------------------------------------------------------------------------------------

    def become_worker(self, signals: Signals, allocate: Callable[[Any], TensorDictBase | None]) -> None:
        self._signals = signals  # not the sink: batches lie in the slots of this collector's own workers

    def rollout_for_trainer(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]:
        self._driver.random = random
        self.group.page.counted = self._signals.updater_versions()  # for its own workers
        before = self._driver.frames
        batch = self.next()
        if writes:
            return None, self._driver.frames - before
        return batch, 0 if batch is None else batch.numel()

    def end_waits(self, timeout: float, close_env: bool) -> None:
        self.shutdown(timeout, close_env)

    # -- models -------------------------------------------------------------------------------------------------------

    def _acting_model(self, model_id: str) -> Any:
        if self._acts_beside_workers(model_id):
            return self.get_model(model_id)
        served = sorted(self._sender_schemes) or "none"
        raise UnknownModel(
            f"unknown model_id {model_id!r}: this {type(self).__name__} has schemes for {served}. To send this "
            "model to its workers, pass weight_sync_schemes={model_id: scheme}"
        )

    def _acts_beside_workers(self, model_id: str) -> bool:
        # This process postprocesses batches, unless workers write them to a replay buffer.
        return self.postproc is not None and belongs_to("postproc", model_id)

    # -- updates ------------------------------------------------------------------------------------------------------

    def _check_receives(self, model_id: str) -> None:
        """Raises ValueError: weights that this collector receives under this name would not reach its workers."""
        if model_id in self._sender_schemes or (model_id == "policy" and self.weight_updater is not None):
            return  # it is passed on to them
        if not belongs_to("policy", model_id):
            with suppress(AttributeError, LookupError, TypeError):
                follow_path(self, model_id)
                return  # it is a model of this collector's own
        raise ValueError(
            f"this {type(self).__name__} would receive {model_id!r}, but its workers act with it and would not get "
            f"it: also pass weight_sync_schemes={{{model_id!r}: scheme}}"
        )

    def _apply_given(self, given: Any) -> None:
        if "policy" not in self._sender_schemes and self.weight_updater is None:
            self._acting_model("policy")  # raises UnknownModel, because nothing would carry the weights to the workers
        if given is not None and isinstance(self.policy, nn.Module):
            self.acting_weights.apply(prepared_copy(self.policy, given).apply_now)
        self.update_policy_weights_(given)

    def worker_info(self) -> WorkerInfo:
        return WorkerInfo(self.requested_frames_per_batch, None, set().union(*self._worker_devices.values()))

    async def _raise_worker_failure(self, error: PartialSendError) -> None:
        """If an update failed because a worker is lost, raise the worker's own error, or how its process ended."""
        if not any(isinstance(one, PeerLost) for one in error.failed.values()):
            return
        try:
            await self.group.until(lambda: None, FAILURE_SECONDS)
        except AckTimeout as failure:
            if failure is self.group.failure:
                raise

    # -- versions -----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        is_root = self._sender_buses and self.acting_weights.main_bus is None
        return self.group.page.counted + (self._sent_version if is_root else self.acting_weights.origin()[0])

    def increment_version(self) -> None:
        """Add one to the policy's version, for weights that reach the workers without a scheme. Workers write the new
        version into their frames from now on."""
        self.group.page.count()

    def _restore_versions(self, versions: Mapping[str, Any], is_sent: bool) -> None:
        """Continue from the counters of :meth:`_versions`. ``is_sent``: the weights are about to be sent."""
        own = versions["own"]
        if is_sent:
            self._restore_sent_versions(versions["sent"])
        else:  # workers keep the version that came with their weights, and the collector counts the difference
            own += max(0, max(versions["sent"].values(), default=0) - self._sent_version)
        self.group.page.counted = max(self.group.page.counted, own)

    def _announce_versions(self) -> bool:
        """Make the buses report each version that they publish. The driver notes it as an update of the workers that it
        is for, and it is written to the control page. Returns False, and writes no version there, unless there is
        exactly one bus, because each bus counts its own versions."""
        # The function below must not refer to the collector, which an open bus would then keep alive.
        page, note_update, buses = self.group.page, weakref.WeakMethod(self._driver.note_update), self._sender_buses
        all_workers = range(self.num_workers)
        is_one = len(buses) == 1

        def announce(version: int, workers: list[int] | None) -> None:
            if (note := note_update()) is not None:
                note(workers)
            if is_one:
                page.publish(version, all_workers if workers is None else workers)

        for bus in buses:
            bus.on_published = announce
        return is_one

    def _on_published(self, version: int) -> None:
        if not self._sender_buses:  # no message tells the workers of the version
            self.group.page.count()
            self._driver.note_update(None)

    def _pass_versions_on(self) -> None:
        super()._pass_versions_on()
        self.follow_versions(None)

    def follow_versions(self, place: Any, index: int = 0) -> None:
        # This collector's workers read the page of the tree's root.
        if not self.acting_weights.schemes.keys() <= self._sender_schemes.keys():
            place = None  # some updates are not passed on to the workers
        self.group.follow(place, index)

    # -- the end ------------------------------------------------------------------------------------------------------

    @interrupted_by(None)
    def _end(self, timeout: float, close_env: bool) -> None:
        if self.closed:
            return
        self.closed = True
        if not self.group.is_ours:
            return
        deadline = time.monotonic() + timeout
        try:
            self.group.end(max(0.1, deadline - time.monotonic()), close_env)
        finally:
            if self.group.is_over:
                for finalizer in self._finalizers:
                    finalizer()
            self._end_weights(max(0.5, deadline - time.monotonic()))
            self._driver.close()
            self.group.page.close()
        self.raise_background_error()

    # -- attributes and calls -----------------------------------------------------------------------------------------

    def _call_each(
        self, path: str, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], timeout: float
    ) -> list[Any]:
        return self.group.ask_each("execute", {worker: (path, *call) for worker, call in enumerate(calls)}, timeout)

    def _look_up(self, owner: str, path: str, timeout: float) -> Any:
        if owner == "replay_buffer":
            return super()._look_up(owner, path, timeout)
        if owner:
            return self._read(f"getattr_{owner}", path, workers=[0], timeout=timeout)[0]
        return self._read("get_distant_attr", path, timeout=timeout)

    def _read(self, method: str, *arguments: Any, workers: Sequence[int] | None = None, timeout: float) -> list[Any]:
        return [loads(answer) for answer in self.group.ask("read", method, arguments, workers=workers, timeout=timeout)]

    def get_cached_weights(self, model_id: str) -> TensorDict | None:
        """A copy of this model's weights that were last sent to all workers. None: none were sent."""
        scheme = self._sender_schemes.get(model_id)
        if scheme is None or isinstance(scheme, NoSyncCore):
            return None
        held: TensorDict | None = scheme.bus.read_link(scheme.held_weights)
        return held

    # -- statistics and profiles --------------------------------------------------------------------------------------

    def stats(
        self,
        workers: Literal["aggregate", "per_worker", "both"] = "aggregate",
        *,
        timeout: float = ANSWER_SECONDS,
    ) -> dict[str, int | float | bool]:
        """Progress, and the number of ``workers``, of which ``workers_alive`` run.

        Args:
            workers: "aggregate": the figures of this collector, without waiting for workers. "per_worker": those of
                each worker, such as ``worker_0/frames``. "both".
            timeout: seconds. Workers answer between two rollouts, or while they are paused.

        Raises:
            ValueError: ``workers`` is none of these.
            AckTimeout: a worker did not answer within the timeout.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ValueError(f"workers must be 'aggregate', 'per_worker' or 'both', not {workers!r}")
        found = {} if workers == "per_worker" else super().stats()
        found |= {"workers": self.num_workers, "workers_alive": self.group.alive}
        if workers != "aggregate":
            for index, own in enumerate(self._read("stats", timeout=timeout)):
                found |= {f"worker_{index}/{name}": value for name, value in own.items()}
        return found

    def record(self, config: ProfileConfig | None, name: str) -> None:
        named = config or self._profile_config
        chosen = named.workers if named is not None and not name else list(range(self.num_workers))
        if unknown := [worker for worker in chosen if worker not in range(self.num_workers)]:
            raise ValueError(f"unknown workers {unknown}: this {type(self).__name__} has 0 to {self.num_workers - 1}")
        names = {worker: f"{name}_{worker}" if name else str(worker) for worker in chosen}
        self.group.ask_each("record", {worker: (config, own) for worker, own in names.items()}, ANSWER_SECONDS)


class MultiCollector(GroupCollector, metaclass=ChoosingMeta):
    """Steps environments in worker processes; ``sync=True`` makes a :class:`MultiSyncCollector`, and ``sync=False`` a
    :class:`MultiAsyncCollector`."""

    _choosing_parameters = (Parameter("sync", Parameter.KEYWORD_ONLY, annotation="bool"),)

    @classmethod
    def _choose(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sync = kwargs.pop("sync", None)
        if cls is not MultiCollector:
            if sync is not None:
                raise TypeError(f"sync= is an argument of MultiCollector, not of {cls.__name__}: leave it out")
            return None
        if sync is None:
            raise TypeError(
                "MultiCollector needs sync=True (batches of all workers together) or sync=False (each as it comes)"
            )
        kind = MultiSyncCollector if sync else MultiAsyncCollector
        return kind(*args, **kwargs)


class MultiSyncCollector(MultiCollector):
    """Steps environments in worker processes, in step with each other. A batch has one rollout of every worker. All
    act with the same weights, unless new ones are sent meanwhile. Workers begin when the caller asks for the batch.

    See :class:`~asyncsync.collectors.MultiCollector` for the arguments. ``cat_results``: ``"stack"`` (default) gives
    ``[workers, *env.batch_size, time]``, an int concatenates along that dimension of ``[*env.batch_size, time]``.

    ``preemptive_threshold`` may cut rollouts. In a stacked batch, missing frames are zero, with
    ``("collector", "traj_ids")`` -1 and ``("collector", "mask")`` False. A concatenated batch omits them.
    """

    _driver_class = SyncDriver

    def _check_results(
        self, cat_results: str | int | None, preemptive_threshold: float | None
    ) -> tuple[int | None, float]:
        if cat_results is None:
            cat_results = "stack"
        if cat_results != "stack" and (not isinstance(cat_results, int) or isinstance(cat_results, bool)):
            raise ValueError(f"cat_results must be 'stack' or a dimension (an int), not {cat_results!r}")
        self.cat_results = cat_results
        threshold = 1.0 if preemptive_threshold is None else float(preemptive_threshold)
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"preemptive_threshold must be between 0 and 1, not {preemptive_threshold}")
        self.preemptive_threshold = threshold
        return None if isinstance(cat_results, str) else cat_results, threshold


class MultiAsyncCollector(MultiCollector):
    """Steps environments in worker processes, each at its own pace. A batch is one worker's rollout, in order of
    arrival. By then, the worker has begun its next rollout.

    See :class:`~asyncsync.collectors.MultiCollector` for the arguments. This class does not take ``cat_results`` and
    ``preemptive_threshold``.
    """

    _driver_class = AsyncDriver


def find_parts(state: Mapping[str, Any], part: str) -> list[Any]:
    """All parts of this name in a collector's state and, recursively, in its workers' states."""
    own = [state[part]] if part in state else []
    return own + [one for name, below in state.items() if name.startswith("worker") for one in find_parts(below, part)]


def are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:

    def same(a: Any, b: Any) -> bool:
        try:
            return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
        except Exception:  # extra state that cannot be compared
            return False

    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())


def policies_of_workers(policy: Any, policy_factory: Any, count: int) -> list[Any]:
    """Each worker's policy factory; None: the worker gets the collector's policy. Raises TypeError, ValueError."""
    policies = per_worker("policy_factory", policy_factory, count)
    for index, factory in enumerate(policies):
        check_policy_factory(f"policy_factory[{index}]" if is_list(policy_factory) else "policy_factory", factory)
    if policy_factory is None:  # else the policy is only the source of weights
        check_policy(policy)
        if policy is not None and not callable(policy):
            raise TypeError(f"policy must be callable, not {type(policy).__name__}: pass a module or a function")
    return policies


def check_shared(replay_buffer: Any) -> None:
    """Raises TypeError: each worker would fill its own copy, which no other process sees."""
    if replay_buffer is None or isinstance(replay_buffer, BaseProxy):
        return
    if not hasattr(replay_buffer, "share") and not getattr(replay_buffer, "shared", False):
        raise TypeError(
            f"replay_buffer is a {type(replay_buffer).__name__}, and each worker would fill its own copy: pass one "
            "that processes share, such as TorchRL's ReplayBuffer(…, shared=True) or a proxy of a multiprocessing "
            "manager. If yours pickles as a handle on shared storage, set replay_buffer.shared = True"
        )


def check_own_schemes(arguments: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError: several workers would send to their own workers by one scheme, from one address."""
    given = [found for one in arguments for found in (one.get("weight_sync_schemes") or {}).items()]
    moving = [(m, scheme) for m, scheme in given if not isinstance(scheme, NoSyncCore)]
    for model_id, scheme in moving:
        if sum(scheme is other for _, other in moving) > 1:
            raise ValueError(
                f"weight_sync_schemes[{model_id!r}] is one scheme for several workers, but each needs its own to send "
                "to the workers below it: leave it out, pass collector_kwargs=[{…}, {…}] with a dict for each node, or "
                "pass a function as collector_class that makes the scheme"
            )


def make_finalizers(
    collector: object, group: WorkerGroup, schemes: Mapping[str, Any]
) -> tuple[Callable[[], object], ...]:
    """End the collector when it is garbage-collected or the program exits. Returns functions that cancel this."""

    def end() -> None:
        if not group.is_ours:
            return
        group.end(SHUTDOWN_SECONDS)
        shut_down_all(schemes.values(), 1.0)
        at_exit.cancel()

    # At exit, multiprocessing joins workers, which are no daemons. This runs before, and before the bus's finalizer.
    at_exit = Finalize(None, end, exitpriority=20)

    def forgotten() -> None:
        # Garbage is collected in any thread, between any two lines, so this must not wait.
        if group.is_ours:
            group.page.stop()  # before the slots go, which a worker may be about to open
            threading.Thread(target=end, name="asyncsync-collector-end", daemon=True).start()

    forget = weakref.finalize(collector, forgotten)
    forget.atexit = False
    return forget.detach, at_exit.cancel
