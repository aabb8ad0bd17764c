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
            f"list_of_args and list_of_kwargs need {wanted} entries each, one for each call, but they have "
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
    _profile_config: ProfileConfig | None = None

    # -- attributes and calls -----------------------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what an attribute path leads to: ``_receiver_schemes['policy']._set_dist_connection_info``, say.

        Args:
            attr_path: attributes, ``['key']`` and ``[0]``, from this collector on.
            args, kwargs: of the call.

        Returns:
            What the call returns.

        Raises:
            ValueError: no such path.
            TypeError: what is there cannot be called.
        """
        try:
            function = follow(self, attr_path)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{type(self).__name__} has no {attr_path!r}: {error!r}") from error
        if not callable(function):
            raise TypeError(
                f"{attr_path!r} is a {type(function).__name__} and cannot be called: give the path to a method"
            )
        return function(*args, **kwargs)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of this collector once for each entry of these lists, and return what the calls return.

        Args:
            method_name: its name, or the path to it, as of :meth:`cascade_execute`.
            list_of_args: positional arguments of each call.
            list_of_kwargs: keyword arguments of each call.

        Raises:
            ValueError: lists of different lengths; no such method.
            TypeError: what is there cannot be called.
        """
        calls = as_calls(list_of_args, list_of_kwargs, None)
        return [self.cascade_execute(method_name, *args, **kwargs) for args, kwargs in calls]

    def get_distant_attr(self, attr: str) -> Any:
        """What an attribute path leads to from this collector on: ``env.transform[0].scale``, say.

        Raises:
            AttributeError: no such path.
        """
        return self._attribute(self, attr)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy that acts, or what a path leads to from it.

        Raises:
            AttributeError: it has none of this name.
        """
        return self._attribute(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment, or what a path leads to from it.

        Raises:
            AttributeError: it has none of this name.
        """
        return self._attribute(self.env, attr)  # type: ignore[attr-defined]

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer, or what a path leads to from it.

        Raises:
            AttributeError: it has none of this name, or there is no replay buffer.
        """
        if self.replay_buffer is None:
            raise AttributeError(f"this {type(self).__name__} has no replay buffer, and so no {attr!r} of it")
        return self._attribute(self.replay_buffer, attr)

    def _attribute(self, owner: Any, path: str) -> Any:
        try:
            return follow(owner, path)
        except (AttributeError, LookupError, TypeError) as error:
            raise AttributeError(f"{type(owner).__name__} has no {path!r}: {error!r}") from error

    def get_policy_version(self) -> int:
        """:attr:`policy_version`, for callers that can call methods only, such as those of a remote actor."""
        version: int = self.policy_version
        return version

    # -- statistics ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | bool]:
        """How far it has come: ``frames`` and ``batches`` so far, ``requested_frames_per_batch``, ``policy_version``,
        and, where there is an end, ``total_frames`` and ``completed``. Neither waits nor changes anything; any thread
        may call it, at any time."""
        own: Any = self
        found: dict[str, int | float | bool] = {"frames": own._collected, "batches": own._iter + 1}
        if own.total_frames < math.inf:
            found |= {"total_frames": own.total_frames, "completed": own._collected >= own.total_frames}
        return found | {
            "requested_frames_per_batch": own.requested_frames_per_batch,
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
        """Record the rollouts that follow by torch's profiler, where they are done; each worker writes a trace of its
        own, for ``chrome://tracing`` or Perfetto. At any time; the recording ends with the collector at the latest.

        Where ``async for`` or :meth:`start` makes this collector's own thread roll out, a recording that is ended early
        ends in that thread: with the rollout under way, or the next one.

        Args:
            workers: indices of the workers to record; None: the first. Of workers that have workers of their own, all
                of those are recorded, and ``{worker_idx}`` is ``0_1``, say. Without workers: ignored.
            num_rollouts: rollouts of each, those for warming up included.
            warmup_rollouts: the first so many are not recorded.
            save_path: of the trace, in which ``{worker_idx}`` stands for the worker; None:
                ``./collector_profile_{worker_idx}.json``. Directories are made.
            activities: "cpu", "cuda"; None: both, as far as they are there.
            record_shapes, profile_memory, with_stack, with_flops: as of ``torch.profiler.profile``.
            on_trace_ready: called with the profiler where the rollouts are, instead of writing a file; it travels by
                cloudpickle. What it raises ends collection there.

        Raises:
            ValueError: no rollout would be recorded; an unknown worker or activity.
            RuntimeError: an earlier recording goes on in another thread.
            OSError: the trace's directory cannot be made.
            ClosedError: after :meth:`shutdown`.
        """
        given = given_arguments(locals())
        config = ProfileConfig(**{name: value for name, value in given.items() if value is not None})
        self._profile(config, "")
        self._profile_config = config

    def disable_profile(self) -> None:
        """End the recording; what was recorded until now is written. Nothing happens where none was enabled."""
        if self._profile_config is not None and not self.closed:  # type: ignore[attr-defined]
            self._profile(None, "")
        self._profile_config = None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What :meth:`enable_profile` was told; None: nothing, or :meth:`disable_profile` came after it."""
        return self._profile_config

    @abstractmethod
    def _profile(self, config: ProfileConfig | None, name: str) -> None:
        """Record the rollouts that follow, of the worker of this name ("": this is none); None: no more of them."""
