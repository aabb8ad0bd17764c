"""The options of the collectors, each declared once with its meaning, type, default and check; and the choice of a
class by options. The options of nodes are in :mod:`asyncsync.collectors.distributed.node_collector`.

A collector's constructor names one TypedDict with all its options. The base classes of this TypedDict follow the order
of TorchRL's pages.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Signature, signature
from typing import Annotated, Any, Required, TypedDict

import torch
from tensordict.nn import InteractionType

from asyncsync.arguments import Option, described
from asyncsync.collectors.arguments import (
    Devices,
    Interruptor,
    check_callable,
    check_choice,
    check_schemes,
    frames_or_none,
    whole_number,
)
from asyncsync.collectors.base import PostHook, PreHook
from asyncsync.collectors.trajectories import _TrajectoryPool

Policy = Callable[..., Any]


def _check_switch(name: str, value: Any) -> None:
    if value not in (None, True, False):
        raise TypeError(f"{name} must be True, False or None, not {value!r}")


def _check_reset(name: str, value: Any) -> None:
    if not value:
        raise ValueError(f"{name}=False is not supported, because a finished environment cannot step: leave {name} out")


def _check_cuda(name: str, value: Any) -> None:
    if value and not torch.cuda.is_available():
        raise ValueError(f"{name}: torch finds no CUDA device here. Leave {name} out, or pass compile_policy=True")


def _check_start_method(name: str, value: Any) -> None:
    if value not in ("spawn", "forkserver"):
        why = "because a forked worker would inherit a broken copy of the trainer's event loop and threads"
        raise ValueError(f"{name} must be 'spawn' or 'forkserver', not {value!r}, {why}")


# Two options of several TypedDicts that have no base in common.
MaxInterval = Annotated[
    int,
    Option(
        -1,
        whole_number,
        "a worker gets the current weights after at most this many of its batches. -1: no limit. No effect if weights "
        "are sent for each batch anyway.",
    ),
]
InitFn = Annotated[
    Callable[[], None] | None,
    Option(check=check_callable, doc="called in each worker before it makes environment and policy."),
]


@described
class RolloutOptions(TypedDict, total=False):
    """Of every collector.

    Args:
        policy_factory: a callable that returns the policy, called in the process that steps; with workers, one for all
            or a list with one per worker. Give this or ``policy``; with workers, both if schemes carry the weights.
        frames_per_batch: frames of a batch, over all environments; rounded up to whole steps.
        total_frames: collection ends after this many frames, rounded up to whole batches (``extend_buffer=False``: to
            whole steps, so the last rollout may be shorter). -1: no end.
        device: default for ``storing_device``, ``policy_device`` and ``env_device``. With workers, each of these four
            is one device, or a list with one per worker.
        storing_device: device of the batches. None: each tensor stays on the device where it was created.
        policy_device: device on which the policy acts. If its weights are elsewhere, a copy of the policy acts there.
        env_device: device to which the environment is moved. None: it stays where it is.
        max_frames_per_traj: truncate and reset each environment after this many steps, and add "step_count" to the
            frames. None or negative: no limit.
        init_random_frames: actions are random for this many frames at the start, rounded up to whole batches; with
            workers, counted over all of them.
        reset_at_each_iter: reset the environments before each batch.
        postproc: called with each batch; returns the batch that the caller gets. With workers, this process calls it
            with the whole batch or, if there is a replay buffer, each worker calls it.
        split_trajs: split each batch with :func:`split_trajectories` before ``postproc``, in the same process.
        exploration_type: exploration type under which the policy acts. None: RANDOM.
    """

    policy_factory: Policy | Sequence[Policy] | None
    frames_per_batch: Required[int | Sequence[int]]
    total_frames: Annotated[int | None, Option(-1)]
    device: Devices
    storing_device: Devices
    env_device: Devices
    policy_device: Devices
    max_frames_per_traj: Annotated[int | None, Option(-1, frames_or_none)]
    init_random_frames: Annotated[int | None, Option(-1)]
    reset_at_each_iter: Annotated[bool, Option(False)]
    postproc: Annotated[Callable[[Any], Any] | None, Option(check=check_callable)]
    split_trajs: Annotated[bool | None, Option(False)]
    exploration_type: Annotated[InteractionType | None, Option(InteractionType.RANDOM)]


@described
class LateOptions(TypedDict, total=False):
    """Of every collector, too. TorchRL's pages list them after the options of the collector's backend.

    Args:
        weight_updater: an updater, or a callable that returns one (deprecated).
        weight_sync_schemes: ``{model_id: scheme}``: the collector sends weights by these schemes. With workers, None
            means a scheme of the collector's backend for the policy, if that has parameters or buffers or comes from a
            factory; and ``"postproc"`` needs a scheme only with a replay buffer, because otherwise it runs, and is
            updated, in this process.
        weight_recv_schemes: ``{model_id: scheme}``: the collector receives weights by these schemes, and passes them on
            to its workers. The constructor connects them.
        create_env_kwargs: a dict of keyword arguments for ``create_env_fn``; with workers, or a list with one dict per
            worker.
        pre_collect_hook: called before each rollout, in the process that rolls out.
        post_collect_hook: called with each batch before the caller gets it, in the process that rolls out.
        worker_idx: index of this collector among the workers of a larger one.
    """

    weight_updater: Any
    weight_sync_schemes: Annotated[Mapping[str, Any] | None, Option(check=check_schemes)]
    weight_recv_schemes: Annotated[Mapping[str, Any] | None, Option(check=check_schemes)]
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    pre_collect_hook: Annotated[PreHook | None, Option(check=check_callable)]
    post_collect_hook: Annotated[PostHook | None, Option(check=check_callable)]
    worker_idx: int | None


@described
class BufferOptions(LateOptions, total=False):
    """Of collectors whose workers can write to a replay buffer.

    Args:
        extend_buffer: True: write whole rollouts with ``extend()``. False: write each frame with ``add()``.
    """

    replay_buffer: Any
    extend_buffer: Annotated[bool, Option(True)]


@described
class ActingOptions(BufferOptions, total=False):
    """Of ``Collector``, ``MultiCollector`` and ``RayCollector``.

    Args:
        trust_policy: True: the policy takes and returns TensorDicts, so do not inspect or wrap it. Otherwise the
            collector calls modules of ``tensordict.nn`` without tensordict's overhead, which takes longer than a
            small network.
        no_cuda_sync: skip the synchronisation after copies between devices.
        trajs_per_batch: number of whole trajectories in a batch, in the order in which they ended. The collector rolls
            out ``frames_per_batch`` frames at a time until it has enough; hooks and ``postproc`` get these rollouts.
            With workers, this process builds batches from the trajectories of all of them. With a replay buffer, the
            process that rolls out writes each trajectory, frame after frame, as soon as it has ended. Trajectories that
            ``reset_at_each_iter`` or ``total_frames`` cuts off are dropped.
    """

    trust_policy: bool | None
    no_cuda_sync: Annotated[bool, Option(False)]
    trajs_per_batch: int | None


@described
class LocalOptions(RolloutOptions, ActingOptions, total=False):
    """Of ``Collector`` and ``MultiCollector``.

    Args:
        replay_buffer: receives the frames, and the caller gets None for each batch. Needs a method ``extend()``, or
            ``add()`` with ``extend_buffer=False``.
        track_traj_ids: give every frame its trajectory id, ("collector", "traj_ids").
        set_truncated: mark the last frame of each batch (of each rollout) as truncated and done.
        compile_policy: True, or keyword arguments for ``torch.compile``.
        cudagraph_policy: True, or keyword arguments for ``tensordict.nn.CudaGraphModule``, which records the policy as
            a CUDA graph. Raises ValueError if there is no CUDA device.
        max_lag: before a step, the collector waits while the acting weights are more than this many versions behind the
            newest published version. None: never wait.
        traj_pool: source of the trajectory ids. None: the collector makes one, which its workers share.
        trajs_per_write: most trajectories per write, with ``trajs_per_batch`` and a replay buffer. None: no limit.
        traj_format: layout with ``trajs_per_batch``. "padded" or None: ``[trajs_per_batch, longest]``, zero-padded,
            with ("collector", "mask") False on padding. "cat": ``[frames]``, one trajectory after another.
        compact_obs: omit from ``"next"`` the entries that the next step repeats at its root: observations, step counts,
            the state of a TorchRL environment. This loses the last observation of each trajectory.
        use_buffers: no effect: a batch's memory is allocated once, and steps that differ in layout are stacked.
        reset_when_done: must be True, because a finished environment is always reset.
        track_policy_version: also write the version as "policy_version", at the root and under "next", as TorchRL
            does. ("collector", "policy_version") is always written. An object with a ``version`` means True, and a
            collector without workers keeps that ``version`` up to date.
        auto_register_policy_transforms: add to the environment what recurrent parts of the policy need and it lacks:
            "is_init" (bool, True in the first step of a trajectory) and the first recurrent state. A TorchRL
            environment gets the transforms InitTracker and TensorDictPrimer. None: False.
        local_init_rb: no effect, because the first process that writes to a replay buffer creates its storage.
    """

    track_traj_ids: Annotated[bool, Option(True)]
    set_truncated: Annotated[bool, Option(False)]
    compile_policy: bool | Mapping[str, Any] | None
    cudagraph_policy: Annotated[bool | Mapping[str, Any] | None, Option(check=_check_cuda)]
    max_lag: Annotated[int | None, Option(check=partial(whole_number, least=0))]
    traj_pool: _TrajectoryPool | None
    trajs_per_write: int | None
    traj_format: Annotated[str | None, Option(check=partial(check_choice, choices=("padded", "cat")))]
    compact_obs: Annotated[bool, Option(False)]
    use_buffers: Annotated[bool | None, Option(check=_check_switch)]
    reset_when_done: Annotated[bool, Option(True, _check_reset)]
    track_policy_version: Annotated[Any, Option(False)]
    auto_register_policy_transforms: bool | None
    local_init_rb: Annotated[bool | None, Option(check=_check_switch)]


@described
class CollectorOptions(LocalOptions, total=False):
    """Of ``Collector``.

    Args:
        return_same_td: as long as the layout stays the same, return the same TensorDict each time, with new values.
        interruptor: object with a method ``collection_stopped()``, called after each step. If it returns True, the
            rollout ends there and is shorter.
        backend: "direct": this class. "process": MultiAsyncCollector, or MultiSyncCollector with ``sync=True``, with
            one worker per factory. "ray", "rpc", "distributed": RayCollector, RPCCollector or DistributedCollector,
            with one node per factory. "submitit": DistributedCollector whose nodes are submitit jobs. None: "process"
            if num_collectors is given, else "direct".
        backend_options: further arguments of the chosen class, for every backend but "direct".
        num_collectors: number of workers or nodes, if create_env_fn is not a list.
        sync: see backend.
    """

    return_same_td: Annotated[bool, Option(False)]
    interruptor: Interruptor | None
    backend: str | None
    backend_options: Mapping[str, Any] | None
    num_collectors: int | None
    sync: bool | None


@described
class MultiOptions(LocalOptions, total=False):
    """Of ``MultiSyncCollector`` and ``MultiAsyncCollector``.

    Args:
        num_workers: number of workers, if ``create_env_fn`` is one callable.
        frames_per_batch: MultiSync: frames of a batch, which it splits over the workers, rounded up. MultiAsync: frames
            of each worker's rollout. A list gives each worker's frames.
        replay_buffer: receives the workers' frames; all processes must share it. The collector shares a TorchRL buffer
            with ``share()`` if it is not shared yet (a lazy storage needs ``shared_init=True``). A ``multiprocessing``
            manager's proxy works. Any other buffer must pickle as a handle and have an attribute ``shared = True``.
        collector_class: class that each worker runs: ``Collector``, a subclass, or (nested) MultiSyncCollector or
            MultiAsyncCollector, whose ``create_env_fn`` is then one item of the list here. May be a
            ``functools.partial``, whose arguments replace the defaults here. ``total_frames`` and ``replay_buffer``
            must be given here.
        update_at_each_batch: send the policy's weights: MultiSync to all workers before each batch, MultiAsync after
            each batch to the worker that produced it.
        preemptive_threshold: MultiSync: when this fraction of the workers has finished, cut the others' rollouts.
        num_threads: number of torch's threads in this process. None: unchanged.
        num_sub_threads: number of torch's threads in each worker.
        cat_results: MultiSync: "stack" or None: ``[workers, *batch, time]``. An int: concatenate along that dimension.
        start_method: how multiprocessing starts workers: "spawn" or "forkserver".
        connect_timeout: seconds until all workers must be ready.
    """

    num_workers: int | None
    collector_class: Callable[..., Any] | None
    update_at_each_batch: Annotated[bool, Option(False)]
    max_weight_update_interval: MaxInterval
    init_fn: InitFn
    preemptive_threshold: float | None
    num_threads: int | None
    num_sub_threads: Annotated[int, Option(1)]
    cat_results: str | int | None
    start_method: Annotated[str, Option("spawn", _check_start_method)]
    connect_timeout: Annotated[float, Option(60.0)]


# -- options that choose the class -------------------------------------------------------------------------------------

BACKENDS = {
    "process": "asyncsync.collectors.multi.collector:MultiCollector",
    "ray": "asyncsync.collectors.distributed:RayCollector",
    "rpc": "asyncsync.collectors.distributed:RPCCollector",
    "distributed": "asyncsync.collectors.distributed:DistributedCollector",
    "submitit": "asyncsync.collectors.distributed:DistributedCollector",  # its default launcher
}
"""The class that ``Collector(backend=…)`` makes. Resolved when used, because its module imports this one."""

CHOOSING_OPTIONS = ("backend", "backend_options", "num_collectors", "sync")
"""The options of ``Collector`` that choose another class."""


class ChoosingMeta(ABCMeta):
    """The metaclass of a class whose call may make an object of another class. ``_choose(args, kwargs)`` removes the
    choosing options from ``kwargs`` and returns that object; None: the class makes its own. ``_choosing_parameters``
    are choosing options that the constructor's signature lacks."""

    @property
    def __signature__(cls) -> Signature:
        # Without this, help() would show the parameters of the metaclass's __call__.
        own = signature(cls.__init__)  # type: ignore[misc]
        _self, *parameters = own.parameters.values()
        return own.replace(parameters=[*parameters, *cls.__dict__.get("_choosing_parameters", ())])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        chosen = cls._choose(args, kwargs)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs) if chosen is None else chosen
