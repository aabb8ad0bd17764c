"""What is done before a collector's workers roll out: what each is given of the arguments, how they start and connect.
And what ends them where nobody does."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.managers import BaseProxy
from multiprocessing.util import Finalize
from typing import Any

from torch import nn

from asyncsync.collectors.arguments import (
    Device,
    Devices,
    check_count,
    check_devices,
    check_policy,
    check_policy_factory,
    each,
    flattened,
    frames_or_none,
    is_list,
    own_arguments,
    warn_rounding,
    whole,
)
from asyncsync.collectors.base import SHUTDOWN_SECONDS
from asyncsync.collectors.multi.driver import Driver
from asyncsync.collectors.weights.legacy_updaters import MultiProcessedWeightUpdater, WeightUpdaterBase, make_updater
from asyncsync.collectors.weights.updates import shut_down_all
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.collectors.workers.messages import pickled
from asyncsync.collectors.workers.worker import Specification
from asyncsync.errors import AckTimeout
from asyncsync.runtime import loop_thread
from asyncsync.runtime.threads import elsewhere
from asyncsync.schemes.none import NoSyncCore


def frames_of_workers(
    frames_per_batch: int | Sequence[int],
    total_frames: int | None,
    init_random_frames: int | None,
    count: int,
    schedule: type[Driver],
) -> tuple[list[int], float, int]:
    """Frames of each worker's rollouts, of all, and of those with random actions. Raises TypeError, ValueError."""
    total_frames = frames_or_none("total_frames", total_frames)
    random = frames_or_none("init_random_frames", init_random_frames) or 0
    if isinstance(frames_per_batch, Sequence) and not isinstance(frames_per_batch, str):
        check_count("frames_per_batch", frames_per_batch, count)
        frames = [whole(f"frames_per_batch[{i}]", n, 1) for i, n in enumerate(frames_per_batch)]
        asked = schedule.frames_of_batch(frames)
    else:
        asked = whole("frames_per_batch", frames_per_batch, 1)
        frames = schedule.split(asked, count)
    if total_frames is None:
        return frames, math.inf, random
    if rest := total_frames % asked:
        warn_rounding(
            f"total_frames ({total_frames}) is not exactly divisible by frames_per_batch ({asked})",
            total_frames + asked - rest,
        )
    return frames, total_frames, random


def policies_of_workers(policy: Any, policy_factory: Any, count: int) -> list[Any]:
    """What makes each worker's policy; None: it is the collector's. Raises TypeError, ValueError."""
    policies = each("policy_factory", policy_factory, count)
    for index, factory in enumerate(policies):
        check_policy_factory(f"policy_factory[{index}]" if is_list(policy_factory) else "policy_factory", factory)
    if policy_factory is None:  # else policy is the source of weights only
        check_policy(policy)
        if policy is not None and not callable(policy):
            raise TypeError(f"policy must be callable, not {type(policy).__name__}: pass a module or a function")
    return policies


def devices_of_workers(devices: Mapping[str, Devices], kind: Any, count: int) -> list[dict[str, Device | None]]:
    """The devices of each worker by the names of their arguments; ``kind`` is what it runs, perhaps with devices of its
    own. Raises TypeError, ValueError."""
    own_devices = {name: value for name, value in own_arguments(kind).items() if name in devices}
    check_devices(dict(flattened({**devices, **own_devices})))
    values = [each(name, value, count) for name, value in devices.items()]
    return [dict(zip(devices, own, strict=True)) for own in zip(*values, strict=True)]


def wait_until_built(group: WorkerGroup, count: int, owner: str, deadline: float) -> None:
    """Raises AckTimeout: workers were not ready in time; whatever a worker raises."""
    try:
        group.wait(lambda: len(group.infos) == count, max(0.0, deadline - time.monotonic()))
    except AckTimeout as error:
        if error is group.failure:  # a worker's own
            raise
        missing = sorted(set(range(count)) - set(group.infos))
        raise AckTimeout(
            f"workers {missing} of this {owner} were not ready in time: pass a longer connect_timeout, if importing "
            "libraries and making environments takes longer"
        ) from None


def connect(
    group: WorkerGroup, senders: Callable[[float], None], end_senders: Callable[[float], None], deadline: float
) -> None:
    """Connect both sides at the same time, by ``deadline`` of ``time.monotonic()``. ``senders`` connects this side
    within so many seconds; ``end_senders`` ends that when the workers fail."""
    name = "asyncsync-collector-connect"

    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    def ended(sending: asyncio.Future[None]) -> None:
        sending.exception()  # retrieved: whoever fails first is raised
        group.nudge()

    async def both() -> None:
        sending = asyncio.ensure_future(elsewhere(name, lambda: senders(left())))
        sending.add_done_callback(ended)
        try:
            await group.until(
                lambda: sending.done() and (group.connected or sending.exception() is not None), left() + 1.0
            )
        except BaseException:
            await elsewhere(name, lambda: end_senders(1.0))
            await asyncio.wait([sending], timeout=3.0)
            raise
        sending.result()

    loop_thread.run(both)


def check_shared(replay_buffer: Any) -> None:
    """Raises TypeError: each worker would fill a copy of its own, which nobody sees."""
    if replay_buffer is None or isinstance(replay_buffer, BaseProxy):
        return
    if not hasattr(replay_buffer, "share") and not getattr(replay_buffer, "shared", False):
        raise TypeError(
            f"replay_buffer is a {type(replay_buffer).__name__}, and each worker would fill its own copy: pass one "
            "that processes share, such as TorchRL's ReplayBuffer(…, shared=True) or a proxy of a multiprocessing "
            "manager. If yours pickles as a handle on shared storage, set replay_buffer.shared = True"
        )


def check_own_schemes(arguments: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError: several workers with workers of their own would send by the same scheme, from one address."""
    given = [found for one in arguments for found in (one.get("weight_sync_schemes") or {}).items()]
    moving = [(m, scheme) for m, scheme in given if not isinstance(scheme, NoSyncCore)]
    for model_id, scheme in moving:
        if sum(scheme is other for _, other in moving) > 1:
            raise ValueError(
                f"weight_sync_schemes[{model_id!r}] is one scheme for several workers, but each needs its own to send "
                "to the workers below it: leave it out, pass collector_kwargs=[{…}, {…}] with a dict for each node, or "
                "pass a function as collector_class that makes the scheme"
            )


def described(
    factories: Sequence[Any], arguments: Sequence[dict[str, Any]], pool: Callable[[], Any], **common: Any
) -> list[bytes]:
    """The specification of each worker, pickled. ``pool`` makes the source of trajectory identifiers where
    ``arguments`` have none; ``common`` goes into every specification."""
    found = []
    for factory, given in zip(factories, arguments, strict=True):
        given.pop("replay_buffer", None)  # travels by itself
        if given.get("traj_pool") is None:
            given["traj_pool"] = pool()
        found.append(pickled(Specification(create_env_fn=factory, arguments=given, **common)))
    return found


def ways_of_weights(
    policy: Any,
    has_factory: bool,
    weight_updater: Any,
    schemes: Mapping[str, Any] | None,
    are_needed: bool,
    default: Callable[[], Any],
) -> tuple[WeightUpdaterBase | None, Mapping[str, Any]]:
    """The updater and the schemes that bring weights to the workers, which make their own policies if ``has_factory``.
    ``policy`` is the registered one; ``are_needed``: the collector sends weights by itself; ``default`` makes a scheme.
    Raises TypeError, ValueError: nothing brings weights to workers that need them."""
    updater = None if weight_updater is None else make_updater(weight_updater, policy)
    if schemes is None:
        has_weights = isinstance(policy, nn.Module) and bool([*policy.parameters(), *policy.buffers()])
        are_made_there = has_factory and policy is None and updater is None
        needs_one = has_weights or are_made_there or isinstance(updater, MultiProcessedWeightUpdater)
        schemes = {"policy": default()} if needs_one else {}
    brings_weights = updater is not None or "policy" in schemes
    if policy is not None and has_factory and not brings_weights:
        raise TypeError(
            "policy and policy_factory exclude each other, unless a scheme sends weights from one to the other: "
            "pass one of them, or weight_sync_schemes={'policy': …}"
        )
    if are_needed and not brings_weights:
        raise ValueError(
            "update_at_each_batch and max_weight_update_interval send the policy's weights, but no scheme or updater "
            "carries them to the workers: pass a policy with parameters or buffers, weight_sync_schemes={'policy': …}, "
            "or a weight_updater"
        )
    return updater, schemes


def make_finalizers(
    collector: object, group: WorkerGroup, schemes: Mapping[str, Any]
) -> tuple[Callable[[], object], ...]:
    """The ends of a collector that is forgotten, and of a program without shutdown(). Returns what cancels them."""

    def end() -> None:
        if not group.is_ours:
            return
        group.end(SHUTDOWN_SECONDS)
        shut_down_all(schemes.values(), 1.0)
        at_exit.cancel()

    # multiprocessing joins workers that are no daemons when the program ends: this comes first, and before the bus's.
    at_exit = Finalize(None, end, exitpriority=20)

    def forgotten() -> None:
        # Garbage is collected in any thread, between any two lines: no place to wait.
        if group.is_ours:
            group.stop()  # before the places go, which a worker may be about to open
            threading.Thread(target=end, name="asyncsync-collector-end", daemon=True).start()

    forget = weakref.finalize(collector, forgotten)
    forget.atexit = False
    return forget.detach, at_exit.cancel
