"""Programs in which workers of TorchRL's collectors fail; run by ``collecting_torchrl.Programs``."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync import PartialSendError, sync
from helpers.collecting_torchrl import make_env
from helpers.torchrl_programs import collector_of, policy_of


def _failure(name: str, **options: Any) -> tuple[str, str]:
    """What is raised where a collector cannot begin."""
    schemes = {"policy": getattr(sync, name)()}
    try:
        collector_of("MultiSyncCollector", policy=policy_of(), weight_sync_schemes=schemes, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _broken() -> Any:
    raise FloatingPointError("this environment cannot be made")


def _killed() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def fails_to_start(name: str) -> tuple[str, str]:
    """A worker raises while it makes its environment."""
    return _failure(name, create_env_fn=[make_env, _broken])


def killed_at_start(name: str) -> tuple[str, str]:
    """A worker is killed before it is connected."""
    return _failure(name, create_env_fn=[make_env, _killed])


def mismatched(name: str) -> tuple[str, str]:
    """The workers' policies cannot take the trainer's weights."""
    return _failure(
        name, policy_factory=lambda: TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    )


def killed(name: str, kind: str) -> dict[str, Any]:
    """A worker is killed between two batches: what an update raises, and how long that takes, and what collecting
    raises then."""
    scheme = getattr(sync, name)()
    collector = collector_of(kind, policy=policy_of(), total_frames=-1, weight_sync_schemes={"policy": scheme})
    batches = iter(collector)
    next(batches)
    process = collector.procs[0]
    process.kill()
    process.join()
    found: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        collector.update_policy_weights_()
    except PartialSendError as error:
        found["update"] = {worker: type(reason).__name__ for worker, reason in error.failed.items()}
        found["acked"] = list(error.acked)
    found["seconds"] = time.monotonic() - begin
    try:
        for _ in range(20):
            next(batches)
    except Exception as error:
        found["next"] = type(error).__name__
    with suppress(Exception):
        collector.shutdown(timeout=5)
    return found
