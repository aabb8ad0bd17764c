"""Profiles of rollouts with torch's profiler: the configuration, and the profiler of one collector.

Names and defaults follow TorchRL's ``ProfileConfig``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_log = logging.getLogger("asyncsync")

_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}


@dataclass
class ProfileConfig:
    """The arguments of :meth:`asyncsync.collectors.Collector.enable_profile`, which describes each of them.

    Raises:
        ValueError: no rollout would be recorded, or an activity is unknown.
    """

    workers: list[int] = field(default_factory=lambda: [0])
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    activities: list[str] = field(default_factory=lambda: ["cpu", "cuda"])
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        self.workers, self.activities = list(self.workers), list(self.activities)
        if self.warmup_rollouts < 0:
            raise ValueError(f"warmup_rollouts must be at least 0, not {self.warmup_rollouts}")
        if self.num_rollouts <= self.warmup_rollouts:
            raise ValueError(
                f"num_rollouts ({self.num_rollouts}) must be greater than warmup_rollouts ({self.warmup_rollouts}), "
                "because warm-up rollouts are not recorded"
            )
        if unknown := [name for name in self.activities if name.lower() not in _ACTIVITIES]:
            raise ValueError(f"unknown activities {unknown}: choose from {list(_ACTIVITIES)}")

    def get_save_path(self, worker_idx: int | str) -> Path:
        """The path of this worker's trace."""
        path = "./collector_profile_{worker_idx}.json" if self.save_path is None else str(self.save_path)
        return Path(path.format(worker_idx=worker_idx))

    def get_activities(self) -> list[ProfilerActivity]:
        """The torch activities that this machine can record."""
        there = [name.lower() for name in self.activities if name.lower() != "cuda" or torch.cuda.is_available()]
        return [_ACTIVITIES[name] for name in there]

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Whether this worker is recorded."""
        return worker_idx in self.workers


class RolloutProfiler:
    """Records the rollouts of one collector. ``name`` replaces ``{worker_idx}`` in the trace's path.

    torch records only the thread that began a profile, and only that thread can end it.

    Raises ValueError: this machine can record none of the activities; OSError: the trace's directory cannot be created.
    """

    def __init__(self, config: ProfileConfig, name: str) -> None:
        self._config = config
        self._rollouts = 0
        self._profile: Any = None
        self._thread: threading.Thread | None = None
        self._is_over = False
        if not config.get_activities():
            raise ValueError(f"activities={config.activities}, but this machine can record none of them: add 'cpu'")
        self._on_trace_ready = config.on_trace_ready
        if self._on_trace_ready is None:
            path = config.get_save_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._on_trace_ready = lambda recorded: recorded.export_chrome_trace(str(path))

    @property
    def is_running(self) -> bool:
        """Whether a profile has begun and not ended."""
        return self._profile is not None

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """A block for one rollout. Its end may write the trace; errors of that propagate."""
        if self._is_over:
            self.stop()
            yield
            return
        config = self._config
        if self._profile is None and self._rollouts >= config.warmup_rollouts:
            begun = profile(
                activities=config.get_activities(),
                on_trace_ready=self._on_trace_ready,
                record_shapes=config.record_shapes,
                profile_memory=config.profile_memory,
                with_stack=config.with_stack,
                with_flops=config.with_flops,
            )
            begun.start()
            self._profile, self._thread = begun, threading.current_thread()
        with record_function(f"Collector.rollout {self._rollouts}"):
            yield
        self._rollouts += 1
        if self._is_over or self._rollouts >= config.num_rollouts:
            self.stop()

    def stop(self) -> None:
        """End the profile and write the trace, if this thread began it. Otherwise, that thread does both when it next
        calls this or rolls out; if it has ended, the recording is lost. Idempotent."""
        self._is_over = True
        if self._thread is None or (self._thread is not threading.current_thread() and self._thread.is_alive()):
            return
        recorded, thread, self._profile, self._thread = self._profile, self._thread, None, None
        if thread is threading.current_thread():
            recorded.stop()
        else:
            _log.warning("a profile is lost, because the thread that began it has ended: %s", thread)
