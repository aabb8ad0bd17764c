"""What can be asked of a collector while it works: attributes, calls by path, statistics, profiles.

    collector.stats()["frames"]
    collector.getattr_env("action_spec")
    collector.enable_profile(num_rollouts=5, save_path="traces/{worker_idx}.json")

A collector with workers asks them: :class:`asyncsync.collectors.multi.inspection.GroupInspection`. Names and meaning
follow TorchRL's collectors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncsync.collectors.arguments import given_arguments
from asyncsync.collectors.profiling import ProfileConfig
from asyncsync.schemes.sources import follow


def as_calls(
    list_of_args: Sequence[Sequence[Any]] | None, list_of_kwargs: Sequence[Mapping[str, Any]] | None, count: int | None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of several calls. ``count``: how many there are; None: as many as are given, at least one. Raises
    ValueError: another number of either."""
    lengths = [len(given) for given in (list_of_args, list_of_kwargs) if given is not None]
    wanted = count if count is not None else max(lengths, default=1)
    if any(length != wanted for length in lengths):
        raise ValueError(
            f"list_of_args and list_of_kwargs need {wanted} entries each, one per call, but have "
            f"{' and '.join(map(str, lengths))}"
        )
    args = [()] * wanted if list_of_args is None else list_of_args
    kwargs = [{}] * wanted if list_of_kwargs is None else list_of_kwargs
    return [(tuple(one), dict(other)) for one, other in zip(args, kwargs, strict=True)]


class InspectionAPI(ABC):
    """A part of :class:`asyncsync.collectors.base.BaseCollector`."""

    policy: Any
    replay_buffer: Any
    policy_version: Any
    total_frames: Any
    requested_frames_per_batch: Any
    _collected: Any
    _iter: Any
    _profile_config: ProfileConfig | None = None

    # -- attributes and calls -----------------------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method at an attribute path, such as ``env.close`` or ``_receiver_schemes['policy'].connect``.

        Args:
            attr_path: path from this collector: attributes, ``['key']`` and ``[0]``.
            args, kwargs: arguments of the call.

        Returns:
            The result of the call.

        Raises:
            ValueError: there is no such path.
            TypeError: the object at the path cannot be called.
        """
        try:
            function = follow(self, attr_path)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{type(self).__name__} has no {attr_path!r}: {error!r}") from error
        if not callable(function):
            raise TypeError(
                f"{attr_path!r} is a {type(function).__name__}, which cannot be called: give the path of a method"
            )
        return function(*args, **kwargs)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of this collector once per entry of these lists, and return the results.

        Args:
            method_name: name of the method, or a path as for :meth:`cascade_execute`.
            list_of_args: positional arguments of each call.
            list_of_kwargs: keyword arguments of each call.

        Raises:
            ValueError: the lists differ in length, or there is no such method.
            TypeError: the object of this name cannot be called.
        """
        calls = as_calls(list_of_args, list_of_kwargs, None)
        return [self.cascade_execute(method_name, *args, **kwargs) for args, kwargs in calls]

    def get_distant_attr(self, attr: str) -> Any:
        """The object at an attribute path from this collector, such as ``env.transform[0].scale``.

        Raises:
            AttributeError: there is no such path.
        """
        return self._attribute(self, attr)

    def getattr_policy(self, attr: str) -> Any:
        """The object at an attribute path from the acting policy.

        Raises:
            AttributeError: there is no such path.
        """
        return self._attribute(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """The object at an attribute path from the environment.

        Raises:
            AttributeError: there is no such path.
        """
        return self._attribute(self.env, attr)  # type: ignore[attr-defined]

    def getattr_rb(self, attr: str) -> Any:
        """The object at an attribute path from the replay buffer.

        Raises:
            AttributeError: there is no such path, or no replay buffer.
        """
        if self.replay_buffer is None:
            raise AttributeError(f"this {type(self).__name__} has no replay buffer from which to read {attr!r}")
        return self._attribute(self.replay_buffer, attr)

    def _attribute(self, owner: Any, path: str) -> Any:
        try:
            return follow(owner, path)
        except (AttributeError, LookupError, TypeError) as error:
            raise AttributeError(f"{type(owner).__name__} has no {path!r}: {error!r}") from error

    def get_policy_version(self) -> int:
        """:attr:`policy_version`, for callers that can only call methods, such as those of a remote actor."""
        version: int = self.policy_version
        return version

    # -- statistics ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | bool]:
        """Progress: ``frames`` and ``batches`` so far, ``requested_frames_per_batch``, ``policy_version`` and, if
        collection has an end, ``total_frames`` and ``completed``. Neither waits nor changes anything. Any thread may
        call it at any time."""
        found: dict[str, int | float | bool] = {"frames": self._collected, "batches": self._iter + 1}
        if self.total_frames < math.inf:
            found |= {"total_frames": self.total_frames, "completed": self._collected >= self.total_frames}
        return found | {
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self.get_policy_version(),
        }

    # -- profiles -----------------------------------------------------------------------------------------------------

    def enable_profile(
        self,
        *,
        workers: list[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        activities: list[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = True,
        with_flops: bool = False,
        on_trace_ready: Callable[[Any], None] | None = None,
    ) -> None:
        """Record the next rollouts by torch's profiler, in the process that does them. Each worker writes a trace for
        ``chrome://tracing`` or Perfetto. May be called at any time. Recording ends with the collector at the latest.

        If a thread of the collector rolls out (``async for``, :meth:`start`), ending a recording early takes effect in
        that thread, with the rollout under way or the next one.

        Args:
            workers: indices of the workers to record. None: the first. A worker that has workers records all of them,
                and ``{worker_idx}`` is then like ``0_1``. Ignored by a collector without workers.
            num_rollouts: rollouts of each worker, including those for warming up.
            warmup_rollouts: this many rollouts at the start are not recorded.
            save_path: path of the trace, in which ``{worker_idx}`` stands for the worker. None:
                ``./collector_profile_{worker_idx}.json``. Missing directories are created.
            activities: "cpu", "cuda". None: both, if available.
            record_shapes, profile_memory, with_stack, with_flops: see ``torch.profiler.profile``.
            on_trace_ready: called with the profiler, in the process that rolls out, instead of writing a file. Pickled
                by cloudpickle. If it raises, collection ends.

        Raises:
            ValueError: no rollout would be recorded, or a worker or an activity is unknown.
            RuntimeError: another thread still runs an earlier recording.
            OSError: the trace's directory cannot be created.
            ClosedError: the collector was shut down.
        """
        given = given_arguments(locals())
        config = ProfileConfig(**{name: value for name, value in given.items() if value is not None})
        self._profile(config, "")
        self._profile_config = config

    def disable_profile(self) -> None:
        """End the recording and write the trace. Does nothing if no recording was enabled."""
        if self._profile_config is not None and not self.closed:  # type: ignore[attr-defined]
            self._profile(None, "")
        self._profile_config = None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What the last :meth:`enable_profile` asked for. None: never called, or :meth:`disable_profile` came later."""
        return self._profile_config

    @abstractmethod
    def _profile(self, config: ProfileConfig | None, name: str) -> None:
        """Record the rollouts that follow, of the worker of this name ("": this is none); None: no more of them."""
