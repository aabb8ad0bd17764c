"""What is done before a collector's workers roll out: they are described, awaited, and connected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.managers import BaseProxy
from typing import Any

from asyncsync.collectors.workers.channel import dumps
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.collectors.workers.rollout_worker import Specification
from asyncsync.errors import AckTimeout
from asyncsync.runtime.threads import join

__all__ = ["check_shared", "connect", "described", "wait_until_built"]


def wait_until_built(group: WorkerGroup, count: int, owner: str, deadline: float) -> None:
    """Raises AckTimeout: workers were not ready in time; whatever a worker raises."""
    try:
        group.wait(lambda: len(group.infos) == count, max(0.0, deadline - time.monotonic()))
    except AckTimeout:
        missing = sorted(set(range(count)) - set(group.infos))
        raise AckTimeout(
            f"workers {missing} of this {owner} were not ready in time: importing libraries and making environments "
            "takes longer than connect_timeout allows"
        ) from None


def connect(
    group: WorkerGroup, senders: Callable[[float], None], end_senders: Callable[[float], None], deadline: float
) -> None:
    """Both sides connect at the same time; whoever fails ends the other's wait.

    Args:
        senders: connects this side, within so many seconds.
        end_senders: has that end.
        deadline: for both, by ``time.monotonic()``.
    """
    errors: list[BaseException] = []
    done = threading.Event()

    def connect_senders() -> None:
        try:
            senders(max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            errors.append(error)
        done.set()
        group.nudge()

    thread = threading.Thread(target=connect_senders, name="asyncsync-collector-connect", daemon=True)
    thread.start()
    try:
        group.wait(
            lambda: bool(errors) or (done.is_set() and group.connected), max(0.0, deadline - time.monotonic()) + 1.0
        )
    except BaseException:
        end_senders(1.0)
        raise
    finally:
        join(thread, 5.0)
    if errors:
        raise errors.pop()


def check_shared(replay_buffer: Any) -> None:
    """Raises TypeError: each worker would fill a copy of its own, which nobody sees."""
    if replay_buffer is None or isinstance(replay_buffer, BaseProxy):
        return
    if not hasattr(replay_buffer, "share") and not getattr(replay_buffer, "shared", False):
        raise TypeError(
            f"replay_buffer is a {type(replay_buffer).__name__}, of which each worker would fill a copy of its own: "
            "pass one that processes share, such as TorchRL's ReplayBuffer(…, shared=True) or a proxy of a "
            "multiprocessing manager. If it pickles as a handle on what they share, say so: replay_buffer.shared = True"
        )


def described(
    factories: Sequence[Any], arguments: Sequence[dict[str, Any]], pool: Callable[[], Any], **common: Any
) -> list[bytes]:
    """The specification of each worker, pickled.

    Args:
        factories: of the environments.
        arguments: of the workers' collectors.
        pool: makes what trajectory identifiers come from, where no other was given.
        common: of all specifications.
    """
    found = []
    for factory, given in zip(factories, arguments, strict=True):
        given.pop("replay_buffer", None)  # travels by itself
        if given.get("traj_pool") is None:
            given["traj_pool"] = pool()
        found.append(_pickled(Specification(create_env_fn=factory, arguments=given, **common)))
    return found


def _pickled(specification: Specification) -> bytes:
    try:
        return dumps(specification)
    except Exception as error:
        error.add_note(
            "Environment factories, policy, hooks and postproc travel to the workers by cloudpickle. What cannot be "
            "pickled must be made there: in create_env_fn, in policy_factory, or in init_fn."
        )
        raise
