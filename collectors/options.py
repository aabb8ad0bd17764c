"""The options of the collectors, each declared once: what it means, its type, its default and a check of its own; and
which class they choose. Those of nodes are in :mod:`asyncsync.collectors.distributed.node_collector`.

A collector's constructor names the TypedDict of all options that it takes. The groups that it is made of follow the
order of TorchRL's pages.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
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
    check_factories,
    check_schemes,
    frames_or_none,
    whole,
)
from asyncsync.collectors.base import PostHook, PreHook
from asyncsync.collectors.trajectories import _TrajectoryPool

Policy = Callable[..., Any]


def _check_switch(name: str, value: Any) -> None:
    if value not in (None, True, False):
        raise TypeError(f"{name} must be True, False or None, not {value!r}")


def _check_reset(name: str, value: Any) -> None:
    if not value:
        raise ValueError(f"{name}=False is not supported, because only a reset environment can step: leave {name} out")


def _check_cuda(name: str, value: Any) -> None:
    if value and not torch.cuda.is_available():
        raise ValueError(f"{name}: torch finds no CUDA device here. Leave {name} out, or pass compile_policy=True")


def _check_start_method(name: str, value: Any) -> None:
    if value not in ("spawn", "forkserver"):
        why = "a forked worker would inherit the trainer's event loop and threads, broken"
        raise ValueError(f"{name} must be 'spawn' or 'forkserver', not {value!r}: {why}")


# Of collectors, or evaluators, that have no other base in common.
MaxInterval = Annotated[
    int,
    Option(
        -1,
        whole,
        "a worker gets the current weights after at most this many of its batches. -1: no limit. If batches are of all "
        "workers: not with an update before each batch.",
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
        policy_factory: a callable that returns the policy, in the process that steps; of several workers, one for all
            or a list with one per worker. Give this or ``policy``; with workers both, if schemes carry the weights.
        frames_per_batch: frames of a batch, over all environments; rounded up to whole steps.
        total_frames: collection ends after this many frames, rounded up to whole batches (``extend_buffer=False``: to
            whole steps, so the last rollout may be shorter). -1: no end.
        device: default for ``storing_device``, ``policy_device`` and ``env_device``. With workers, each of the four is
            one device, or a list with one per worker.
        storing_device: device of the batches. None: each tensor stays on the device where it was created.
        policy_device: device on which the policy acts. If its weights are elsewhere, a copy of the policy acts there.
        env_device: device to which the environment is moved. None: it stays where it is.
        max_frames_per_traj: each environment is truncated and reset after this many steps. None or negative: no limit.
            Adds "step_count".
        init_random_frames: actions are random for this many frames at the start, rounded up to whole batches; with
            workers, counted over all of them.
        reset_at_each_iter: reset the environments before each batch.
        postproc: called with each batch; returns the batch to hand out. With workers, this process calls it with the
            whole batch; with a replay buffer, each worker calls it.
        split_trajs: split each batch by :func:`split_trajectories`, where ``postproc`` would be called.
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
    """Of every collector, too. TorchRL's pages have them after those of a family.

    Args:
        weight_updater: an updater, or a callable that returns one (deprecated).
        weight_sync_schemes: ``{model_id: scheme}``: the collector sends weights by these. With workers, None is a
            scheme of the collector's family, for a policy with parameters or buffers; ``"postproc"`` needs none without
            a replay buffer, because it runs, and is updated, in this process.
        weight_recv_schemes: ``{model_id: scheme}``: the collector receives weights by these, and passes them on to its
            workers. The constructor connects.
        create_env_kwargs: keyword arguments for ``create_env_fn``: a dict; with workers, or a list with one per worker.
        pre_collect_hook: called before each rollout, in the process that rolls out.
        post_collect_hook: called with each batch before it is handed out, in the process that rolls out.
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
        extend_buffer: True: write whole rollouts by ``extend()``. False: write each frame by ``add()``.
    """

    replay_buffer: Any
    extend_buffer: Annotated[bool, Option(True)]


@described
class ActingOptions(BufferOptions, total=False):
    """Of ``Collector``, ``MultiCollector`` and ``RayCollector``.

    Args:
        trust_policy: the policy takes and returns TensorDicts, so do not inspect or wrap it. Otherwise the collector
            calls modules of ``tensordict.nn`` without tensordict's overhead, which exceeds the time of a small network.
        no_cuda_sync: skip the synchronisation after copies between devices.
        trajs_per_batch: number of whole trajectories in a batch, in the order in which they ended. The collector rolls
            out ``frames_per_batch`` frames at a time until it has enough; hooks and ``postproc`` get these rollouts.
            With workers, this process assembles batches from the trajectories of all of them. With a replay buffer, the
            process that rolls out writes each trajectory, frame after frame, as soon as it has ended. Trajectories that
            ``reset_at_each_iter`` or ``total_frames`` cut off are dropped.
    """

    trust_policy: bool | None
    no_cuda_sync: Annotated[bool, Option(False)]
    trajs_per_batch: int | None


@described
class LocalOptions(RolloutOptions, ActingOptions, total=False):
    """Of ``Collector`` and ``MultiCollector``.

    Args:
        replay_buffer: receives the frames; the caller gets None for each batch. Needs ``extend()`` or ``add()``.
        track_traj_ids: give every frame its trajectory id, ("collector", "traj_ids").
        set_truncated: mark the last frame of each batch (of each rollout) as truncated and done.
        compile_policy: True, or keyword arguments for ``torch.compile``.
        cudagraph_policy: True, or keyword arguments for ``tensordict.nn.CudaGraphModule``, which records the policy as
            a CUDA graph. Raises ValueError if there is no CUDA device.
        max_lag: the collector waits before a step while the acting weights are more than this many versions behind
            the newest published version. None: never wait.
        traj_pool: source of the trajectory ids. None: one of its own, which workers share.
        trajs_per_write: most trajectories per write, with ``trajs_per_batch`` and a replay buffer. None: all that have
            ended.
        traj_format: layout with ``trajs_per_batch``. "padded" or None: ``[trajs_per_batch, longest]``, zero-padded,
            with ("collector", "mask") False on padding. "cat": ``[frames]``, one trajectory after another.
        compact_obs: omit from ``"next"`` what the next step repeats at its root: observations, step counts, the state
            of a TorchRL environment. The last observation of each trajectory is then lost.
        use_buffers: no effect: a batch's memory is allocated once; steps of another layout are stacked.
        reset_when_done: must be True: a finished environment is always reset.
        track_policy_version: also write the version as "policy_version", at the root and under "next", as TorchRL
            does; ("collector", "policy_version") is always there. An object with a ``version`` means True, and a
            collector without workers keeps its ``version`` up to date.
        auto_register_policy_transforms: add to the environment what recurrent parts of the policy need and it lacks:
            "is_init" (bool, True in the first step of a trajectory) and the first recurrent state. A TorchRL
            environment gets the transforms InitTracker and TensorDictPrimer. None: False.
        local_init_rb: no effect: the first process that writes to a replay buffer creates its storage.
    """

    track_traj_ids: Annotated[bool, Option(True)]
    set_truncated: Annotated[bool, Option(False)]
    compile_policy: bool | Mapping[str, Any] | None
    cudagraph_policy: Annotated[bool | Mapping[str, Any] | None, Option(check=_check_cuda)]
    max_lag: Annotated[int | None, Option(check=partial(whole, least=0))]
    traj_pool: _TrajectoryPool | None
    trajs_per_write: int | None
    traj_format: str | None
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
        return_same_td: return the same TensorDict each time, with new values, while the layout stays the same.
        interruptor: object with a method ``collection_stopped()``, called after each step; if it returns True, the
            rollout ends there and is shorter.
        backend: "direct": this class. "process": MultiAsyncCollector, or MultiSyncCollector with ``sync=True``, with
            one worker per factory. "ray", "rpc", "distributed": RayCollector, RPCCollector or DistributedCollector,
            with one node per factory. "submitit": DistributedCollector whose nodes are submitit jobs. None: "process"
            if num_collectors is given, else "direct".
        backend_options: further arguments of the chosen class, for all backends but "direct".
        num_collectors: number of workers or nodes if create_env_fn is not a list.
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
        num_workers: number of workers if ``create_env_fn`` is one callable.
        frames_per_batch: frames of a batch, or a list with the frames of each worker. MultiSync splits it over the
            workers, rounded up. MultiAsync: frames of each worker's rollout.
        replay_buffer: receives the workers' frames; all processes must share it. TorchRL's buffers are shared by
            ``share()`` (a lazy storage: ``shared_init=True``) if they are not yet. A ``multiprocessing`` manager's
            proxy works. Another buffer must pickle as a handle and have an attribute ``shared = True``.
        collector_class: class that each worker runs: ``Collector``, a subclass, or (nested) MultiSyncCollector or
            MultiAsyncCollector, whose ``create_env_fn`` is then one item of the list here. May be a
            ``functools.partial``, whose arguments replace the defaults here; ``total_frames`` and ``replay_buffer``
            must be given here.
        update_at_each_batch: send the policy's weights: MultiSync to all workers before each batch, MultiAsync after
            each batch to the worker that produced it.
        preemptive_threshold: MultiSync: when this fraction of the workers has finished, cut the rollouts of the others.
        num_threads: torch's threads in this process. None: unchanged.
        num_sub_threads: torch's threads in each worker.
        cat_results: MultiSync: "stack" or None: ``[workers, *batch, time]``. An int: concatenate along that dimension.
        start_method: how multiprocessing starts workers: "spawn" or "forkserver".
        connect_timeout: seconds within which all workers must be ready.
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

FAMILIES = {
    "process": "multi.collector:MultiCollector",
    "ray": "distributed:RayCollector",
    "rpc": "distributed:RPCCollector",
    "distributed": "distributed:DistributedCollector",
    "submitit": "distributed:DistributedCollector",  # whose launcher that is by default
}
"""Whose workers step the environments of ``Collector(backend=…)``."""

SELECTORS = ("backend", "backend_options", "num_collectors", "sync")
"""The options of ``Collector`` that choose another class."""


class Chooses(ABCMeta):
    """The metaclass of a class with ``_choose(args, kwargs)``, which takes the choosing options out of ``kwargs`` and
    makes the object; None: the class itself makes it. ``_selectors`` lists those of these options that the constructor
    does not have."""

    @property
    def __signature__(cls) -> Signature:
        # The metaclass's __call__ would hide the constructor's parameters.
        own = signature(cls.__init__)  # type: ignore[misc]
        _self, *parameters = own.parameters.values()
        return own.replace(parameters=[*parameters, *cls.__dict__.get("_selectors", ())])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        chosen = cls._choose(args, kwargs)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs) if chosen is None else chosen


def family(name: str) -> Callable[..., Any]:
    """The class of this name. It is found here when it is used, because classes that choose are below it."""
    module, _, kind = FAMILIES[name].partition(":")
    found: Callable[..., Any] = getattr(import_module(f"asyncsync.collectors.{module}"), kind)
    return found


def by_backend(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The collector that a call of ``Collector`` chooses; None: the one of this process is meant. Raises TypeError,
    ValueError: options that exclude each other."""
    backend, given, count, sync = (kwargs.pop(name, None) for name in SELECTORS)
    if backend is None:
        backend = "direct" if count is None else "process"
    check_choice("backend", backend, ("direct", *FAMILIES))
    if not isinstance(given, Mapping | None):
        raise TypeError(f"backend_options must be a dict of arguments for the chosen collector, not {given!r}")
    options = dict(given or {})
    own = {*SELECTORS, "num_workers", *kwargs, *("create_env_fn", "policy")[: len(args)]}
    if twice := sorted(options.keys() & own):
        where = "arguments of Collector itself (num_workers as num_collectors=)"
        raise ValueError(f"backend_options has {twice}, {where}: give each once, there")
    if backend == "direct":
        if count not in (None, 1):
            raise ValueError(f"backend='direct' runs one collector here, not {count}: use backend='process'")
        if sync is not None:
            raise TypeError("sync= needs several workers: pass num_collectors=n too, or leave sync out")
        if options:
            raise ValueError(f"backend_options={sorted(options)} need a collector with workers: use backend='process'")
        return None
    if not isinstance(sync, bool | None):
        raise TypeError(f"sync must be True or False, not {sync!r}")
    factories, *others = args or (kwargs.pop("create_env_fn", None),)
    factories = check_factories(factories, count, "num_collectors", 1)
    return family(backend)(factories, *others, sync=bool(sync), **options, **kwargs)
