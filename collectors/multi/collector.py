"""MultiCollector: steps environments in worker processes, one per factory. Base class of the synchronous and the
asynchronous one.

    collector = MultiCollector([make_env] * 4, policy, frames_per_batch=200, total_frames=10_000, sync=True)
    for batch in collector:                     # or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with MultiCollector(...) as collector

No rollout is thrown away, and an error in a worker is raised here. Names and defaults follow TorchRL's "RPCCollector"
page and its ``MultiCollector``.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict.nn import InteractionType

from asyncsync.collectors.arguments import (
    Devices,
    check_accepted,
    check_callable,
    check_factories,
    check_schemes,
    each,
    exact_device,
    frames_or_none,
    given_arguments,
    own_arguments,
    whole,
    with_partial,
)
from asyncsync.collectors.base import BaseCollector, PostHook, PreHook
from asyncsync.collectors.construct import FAMILIES, Chooses
from asyncsync.collectors.multi.batches import BatchArguments
from asyncsync.collectors.multi.calls import Calls
from asyncsync.collectors.multi.driver import Driver
from asyncsync.collectors.multi.group_collector import GroupCollector
from asyncsync.collectors.multi.starting import (
    check_own_schemes,
    check_shared,
    connect,
    described,
    devices_of_workers,
    frames_of_workers,
    make_finalizers,
    policies_of_workers,
    wait_until_built,
    ways_of_weights,
)
from asyncsync.collectors.multi.torchrl_private import let_workers_begin
from asyncsync.collectors.single import Collector
from asyncsync.collectors.trajectories import _TrajectoryPool, on_device
from asyncsync.collectors.weights.updates import _RegisteredModels
from asyncsync.collectors.whole_trajectories import check_trajectories
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.collectors.workers.process import check_platform, check_start_method
from asyncsync.collectors.workers.process_group import ProcessGroup
from asyncsync.sync import SharedMemWeightSyncScheme


class MultiCollector(GroupCollector, metaclass=Chooses):
    """Steps environments in worker processes. Needs Linux.

    Args:
        create_env_fn: a list with a callable that returns an environment (or a Gymnasium id) for each worker, or one
            for all, with ``num_workers``. Pickled by cloudpickle, so lambdas work.
        policy: module or callable, as for :class:`asyncsync.collectors.Collector`; pickled by cloudpickle. With
            ``policy_factory`` it stays in this process, as the source of weights.
        num_workers: number of workers if ``create_env_fn`` is one callable.
        policy_factory: a callable that returns the policy, called in each worker; or a list, one per worker. Give this
            or ``policy``; both only if schemes carry the weights.
        frames_per_batch: frames of a batch, or a list with the frames of each worker. MultiSync splits it over the
            workers, rounded up. MultiAsync: frames of each worker's rollout.
        total_frames: collection ends after this many frames, rounded up to whole batches. -1: no end.
        device, storing_device, env_device, policy_device: see ``Collector``; one, or a list with one per worker.
        create_env_kwargs: keyword arguments for the callables; one dict, or a list with one per worker.
        collector_class: class that each worker runs: ``Collector``, a subclass, or (nested) MultiSyncCollector or
            MultiAsyncCollector, whose ``create_env_fn`` is then one item of the list here. May be a
            ``functools.partial``, whose arguments replace the defaults here; ``total_frames`` and ``replay_buffer``
            must be given here.
        max_frames_per_traj, reset_at_each_iter, exploration_type, set_truncated, track_traj_ids: see ``Collector``.
        trust_policy, compile_policy, cudagraph_policy, no_cuda_sync, max_lag, compact_obs: see ``Collector``.
        use_buffers, reset_when_done, auto_register_policy_transforms, local_init_rb: see ``Collector``.
        track_policy_version: see ``Collector``. An object only means True, because each worker counts for itself.
        trajs_per_batch, trajs_per_write, traj_format: see ``Collector``. This process assembles batches from the
            trajectories of all workers. Each worker writes to a replay buffer itself.
        init_random_frames: see ``Collector``; counted over all workers, rounded up to whole rollouts.
        postproc, split_trajs: see ``Collector``. This process applies them to the whole batch; with a replay buffer,
            each worker applies them.
        update_at_each_batch: send the policy's weights: MultiSync to all workers before each batch, MultiAsync after
            each batch to the worker that produced it.
        preemptive_threshold: MultiSync: when this fraction of the workers has finished, cut the rollouts of the others.
        num_threads: torch's threads in this process. None: unchanged.
        num_sub_threads: torch's threads in each worker.
        cat_results: MultiSync: "stack" or None: ``[workers, *batch, time]``. An int: concatenate along that dimension.
        replay_buffer: receives the workers' frames; all processes must share it. TorchRL's buffers are shared by
            ``share()`` (a lazy storage: ``shared_init=True``) if they are not yet. A ``multiprocessing`` manager's
            proxy works. Another buffer must pickle as a handle and have an attribute ``shared = True``.
        extend_buffer: True: write whole rollouts. False: write frame by frame.
        weight_updater: an updater, or a callable that returns one (deprecated).
        weight_sync_schemes: ``{model_id: scheme}``; None: shared memory for a policy with parameters or buffers.
            Without a replay buffer, ``"postproc"`` needs no scheme: it runs, and is updated, in this process.
        weight_recv_schemes: this collector receives weights by these schemes and passes them on to its workers.
        worker_idx: index of this collector among the workers of a larger one.
        pre_collect_hook, post_collect_hook: see ``Collector``; called in each worker.
        init_fn: called in each worker before anything else.
        max_weight_update_interval: a worker gets the current weights after at most this many of its batches. -1: no
            limit. MultiSync: not with ``update_at_each_batch``.
        traj_pool: source of the trajectory ids. None: the workers share one.
        start_method: how multiprocessing starts workers: "spawn" or "forkserver".
        connect_timeout: seconds within which all workers must be ready.

    Raises:
        TypeError, ValueError: arguments exclude each other, or do not fit the workers.
        Exception: a worker raised it before it was ready. It keeps its type.
        AckTimeout, NotConnected: not all workers were ready within ``connect_timeout``.
        NotImplementedError: this is not Linux.
    """

    _selectors = (inspect.Parameter("sync", inspect.Parameter.KEYWORD_ONLY, annotation="bool"),)

    @classmethod
    def _choose(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """``MultiCollector(..., sync=…)`` makes one or the other."""
        sync = kwargs.pop("sync", None)
        if cls is not MultiCollector:
            if sync is not None:
                raise TypeError(f"sync= is an argument of MultiCollector, not of {cls.__name__}: leave it out")
            return None
        if sync is None:
            raise TypeError(
                "MultiCollector needs sync=True (batches of all workers together) or sync=False (each as it comes)"
            )
        return partial(FAMILIES["sync" if sync else "async"], *args, **kwargs)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        num_workers: int | None = None,
        policy_factory: Any = None,
        frames_per_batch: int | Sequence[int],
        total_frames: int | None = -1,
        device: Devices = None,
        storing_device: Devices = None,
        env_device: Devices = None,
        policy_device: Devices = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        collector_class: Callable[..., BaseCollector] | None = None,
        max_frames_per_traj: int | None = -1,
        init_random_frames: int | None = -1,
        reset_at_each_iter: bool = False,
        postproc: Callable[[Any], Any] | None = None,
        split_trajs: bool | None = False,
        track_traj_ids: bool = True,
        exploration_type: InteractionType | None = InteractionType.RANDOM,
        update_at_each_batch: bool = False,
        preemptive_threshold: float | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        cat_results: str | int | None = None,
        set_truncated: bool = False,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trust_policy: bool | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        cudagraph_policy: bool | Mapping[str, Any] | None = None,
        no_cuda_sync: bool = False,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Any] | None = None,
        worker_idx: int | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        init_fn: Callable[[], None] | None = None,
        max_weight_update_interval: int = -1,
        max_lag: int | None = None,
        traj_pool: _TrajectoryPool | None = None,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: str | None = None,
        compact_obs: bool = False,
        use_buffers: bool | None = None,
        reset_when_done: bool = True,
        track_policy_version: Any = False,
        auto_register_policy_transforms: bool | None = None,
        local_init_rb: bool | None = None,
        start_method: str = "spawn",
        connect_timeout: float = 60.0,
    ) -> None:
        given = given_arguments(locals())
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook, worker_idx=worker_idx)
        self.closed = True  # until there is something to close
        check_platform(type(self).__name__)
        factories = check_factories(create_env_fn, num_workers)
        self.num_workers = count = len(factories)
        own = own_arguments(collector_class)
        given |= {name: own[name] for name in ("track_traj_ids", "reset_at_each_iter") if name in own}
        self.track_traj_ids = given["track_traj_ids"]
        if weight_updater is not None and weight_sync_schemes is not None:
            raise TypeError("weight_updater and weight_sync_schemes exclude each other: pass the schemes alone")
        frames_or_none("max_frames_per_traj", max_frames_per_traj)  # refused here, not in a worker
        max_weight_update_interval = whole("max_weight_update_interval", max_weight_update_interval)
        if max_lag is not None:
            max_lag = whole("max_lag", max_lag, 0)
        check_callable(postproc=postproc, init_fn=init_fn)
        check_schemes(weight_sync_schemes=weight_sync_schemes, weight_recv_schemes=weight_recv_schemes)
        trajectories = check_trajectories(**given)
        self._counts_frames = trajectories is None or replay_buffer is not None
        check_accepted(**given)
        check_shared(replay_buffer)
        check_start_method(start_method)
        dim, threshold = self._check_results(cat_results, preemptive_threshold)
        self._arguments = BatchArguments(
            *frames_of_workers(frames_per_batch, total_frames, init_random_frames, count, self._driver_class),
            split_trajs=bool(split_trajs) and replay_buffer is None,
            track_traj_ids=self.track_traj_ids,
            replay_buffer=replay_buffer,
            update_at_each_batch=update_at_each_batch,
            max_weight_update_interval=max_weight_update_interval,
            trajectories=None if replay_buffer is not None else trajectories,
            writes_trajectories=replay_buffer is not None and trajectories is not None,
            dim=dim,
            threshold=threshold,
        )
        policies = policies_of_workers(policy, policy_factory, count)
        needs_weights = update_at_each_batch or max_weight_update_interval > 0
        updater, weight_sync_schemes = ways_of_weights(
            policy, policy_factory is not None, weight_updater, weight_sync_schemes, needs_weights, self._default_scheme
        )
        devices = {name: given[name] for name in ("device", "storing_device", "env_device", "policy_device")}
        placed = devices_of_workers(devices, collector_class, count)
        kwargs = each("create_env_kwargs", create_env_kwargs, count)
        self._acting_devices: dict[int, set[torch.device]] = {}
        self.policy_device, self.storing_device = (
            [exact_device(d["device"] if d[name] is None else d[name]) for d in placed]
            for name in ("policy_device", "storing_device")
        )

        self.policy = policy
        if policy is None and worker_idx is not None and policies[0] is not None:
            self.policy = policies[0]()  # in the middle of a tree: what is received here is passed on from it
        self.extend_buffer = extend_buffer
        if replay_buffer is None:
            self._arguments.postproc = on_device(postproc, self.storing_device[0])
        if num_threads is not None:
            torch.set_num_threads(num_threads)

        shared = replay_buffer is not None
        arguments = {
            "max_frames_per_traj": max_frames_per_traj,
            "reset_at_each_iter": reset_at_each_iter,
            "track_traj_ids": track_traj_ids,
            "exploration_type": exploration_type,
            "set_truncated": set_truncated,
            "extend_buffer": extend_buffer,
            "trust_policy": trust_policy,
            "compile_policy": compile_policy,
            "no_cuda_sync": no_cuda_sync,
            "pre_collect_hook": pre_collect_hook,
            "max_lag": max_lag,
            "compact_obs": compact_obs,
            "cudagraph_policy": cudagraph_policy,
            "track_policy_version": bool(track_policy_version),
            "auto_register_policy_transforms": auto_register_policy_transforms,
            "postproc": postproc if shared else None,
            "split_trajs": split_trajs if shared else False,
            "trajs_per_batch": trajs_per_batch if shared else None,
            "trajs_per_write": trajs_per_write if shared else None,
        }
        each_own = [
            {
                **arguments,
                **placed[index],
                "frames_per_batch": self._arguments.frames[index],
                "create_env_kwargs": kwargs[index],
                "policy": policy if own_policy is None else None,
                "policy_factory": own_policy,
                "replay_buffer": replay_buffer,
                "traj_pool": traj_pool,
                "worker_idx": index,
            }
            for index, own_policy in enumerate(policies)
        ]
        defaults = {p.name: p.default for p in inspect.signature(MultiCollector.__init__).parameters.values()}
        kind = Collector if collector_class is None else collector_class
        each_own = [self._with_options(i, with_partial(kind, own, defaults)) for i, own in enumerate(each_own)]
        check_own_schemes([{**own, **given} for given in each_own])
        sent = {m: scheme for m, scheme in weight_sync_schemes.items() if not self._goes_with_workers(m)}
        self._set_up_senders(sent, updater, self, count)
        for scheme in self._sender_schemes.values():
            if scheme.context is self:  # an open bus keeps its schemes, which would keep this collector alive
                scheme.context = _RegisteredModels(self._registered)
        self._group = group = self._make_group(start_method)
        self._calls = Calls(group, count)
        self._driver = self._driver_class(self, group, self._arguments)
        self.closed = False
        self._finalizers = make_finalizers(self, group, self._sender_schemes)
        deadline = time.monotonic() + connect_timeout
        try:
            let_workers_begin(replay_buffer)
            if hasattr(replay_buffer, "share") and not getattr(replay_buffer, "shared", True):
                replay_buffer.share()
            specifications = described(
                factories,
                each_own,
                group.trajectory_pool,
                kind=kind,
                post_collect_hook=post_collect_hook,
                init_fn=init_fn,
                threads=num_sub_threads,
                follows=self._announces(),
                timeout=connect_timeout,
            )
            group.start(specifications, self._sender_schemes, replay_buffer)
            wait_until_built(group, count, type(self).__name__, deadline)
            for index, info in group.infos.items():
                self._arguments.frames[index] = info.frames
                self._acting_devices[index] = info.devices
                self._check_dims(info.dims)
            connect(group, self._connect_senders, self._end_weights, deadline)
            if weight_recv_schemes is not None:  # what comes is passed on at once
                self.register_scheme_receiver(weight_recv_schemes)
        except BaseException:
            self.shutdown()
            raise

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

    # -- what is different where the workers are not processes of this host -----------------------------------------

    def _make_group(self, start_method: str) -> WorkerGroup:
        return ProcessGroup(start_method, type(self).__name__)

    def _default_scheme(self) -> Any:
        """What brings the policy's weights to the workers if no scheme is given."""
        return SharedMemWeightSyncScheme()

    def _with_options(self, worker: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a worker's collector, with those that were given for that one alone."""
        return arguments

    # -- what is different in the two schedules ----------------------------------------------------------------------

    _driver_class: type[Driver]

    def _check_results(
        self, cat_results: str | int | None, preemptive_threshold: float | None
    ) -> tuple[int | None, float]:
        """The dimension and the threshold of the batches, by arguments that only a synchronous collector supports."""
        given = {"cat_results": cat_results not in (None, "stack"), "preemptive_threshold": preemptive_threshold}
        for name, value in given.items():
            if value not in (None, False):
                raise ValueError(f"{name} needs batches of several workers: use MultiSyncCollector")
        return None, 1.0

    def _check_dims(self, dims: int | None) -> None:
        """Batch dimensions of a worker's environment."""
