"""LocalCollector: a collector whose environment is stepped in this process, whatever it was made of.

Here are its rollouts for a caller, for a thread of its own and for a trainer whose worker it is; seeds, resets and
checkpoints; and its end. :class:`asyncsync.collectors.Collector` makes its parts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.collectors.arguments import RolloutArguments
from asyncsync.collectors.base import SHUTDOWN_SECONDS, BaseCollector, Pause, Signals, _part, logged_unless
from asyncsync.collectors.profiling import ProfileConfig
from asyncsync.collectors.rollout.iteration import PARTS, Iteration
from asyncsync.collectors.rollout.lock import RolloutLock
from asyncsync.collectors.rollout.rollout import Rollouts
from asyncsync.collectors.weights.plan import find_model
from asyncsync.runtime.threads import join

_log = logging.getLogger("asyncsync")

PAUSE_SECONDS = 60.0
"""How long whoever wants a collector to stand still waits for the step under way."""


class LocalCollector(BaseCollector):
    """A collector that steps its environment itself; a subclass makes its parts."""

    policy: nn.Module
    _arguments: RolloutArguments
    _free: threading.Thread | None  # collects in the background
    _lock: RolloutLock
    _rollouts: Rollouts
    _iteration: Iteration
    _original_policy: nn.Module

    env = _part("_rollouts.env", "The environment, where it was moved to, with its limit of steps.")
    device = _part("_rollouts.devices.device")
    storing_device = _part("_rollouts.devices.storing")
    policy_device = _part("_rollouts.devices.policy")
    env_device = _part("_rollouts.devices.env")
    no_cuda_sync = _part("_rollouts.devices.no_cuda_sync")
    frames_per_batch = _part("_arguments.steps", "Steps of the environment in a rollout.")
    requested_frames_per_batch = _part("_arguments.requested_frames_per_batch", "Frames of a rollout.")
    max_frames_per_traj = _part("_arguments.max_frames_per_traj")
    reset_at_each_iter = _part("_arguments.reset_at_each_iter")
    track_traj_ids = _part("_arguments.track_traj_ids")
    exploration_type = _part("_arguments.exploration_type")
    set_truncated = _part("_arguments.set_truncated")
    extend_buffer = _part("_arguments.extend_buffer")
    max_lag = _part("_arguments.max_lag")
    _collected = _part("_rollouts.frames")
    _iter = _part("_iteration.count")
    compact_obs = _part("_arguments.compact_obs")
    interruptor = _part("_arguments.interruptor")

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase | None:
        """One rollout, ``[*env.batch_size, time]``, whose last dimension is named "time". None: its frames were added
        to the replay buffer.

        Calls ``pre_collect_hook`` first. Applies neither ``split_trajs`` nor ``postproc``. Counts only frames that it
        adds to the replay buffer.

        Raises:
            ClosedError: the collector was shut down.
            RuntimeError: another thread is collecting.
            Exception: the environment or the policy raised it; the next rollout goes on from the step before. Or a
                hook raised it, which ends collection.
        """
        return self._iteration.rollout()

    def iterator(self) -> Iterator[TensorDictBase | None]:
        return self._iteration.iterator()

    async def __anext__(self) -> TensorDictBase | None:
        return await self._iteration.next_async()

    def _set_free(self) -> None:
        if not self.is_running():
            self._free = threading.Thread(target=self._iteration.run_free, name="asyncsync-collector-free", daemon=True)
            self._free.start()

    def is_running(self) -> bool:
        return self._free is not None and self._free.is_alive()

    def pause(self) -> Pause:
        """A block, ``with`` or ``async with``, in which the collector neither steps nor writes to the replay buffer.

        Entering waits for the step under way; ``async with`` does not block the event loop meanwhile. If it is
        cancelled, it raises once that step has ended.

        Raises:
            ClosedError: the collector was shut down.
            AckTimeout: the step under way did not end within 60 s.
            BaseException: the error that ended collection in the background.
        """
        return Pause(self._paused)

    @contextmanager
    def _paused(self, owner: object) -> Iterator[None]:
        self._raise_free_error()
        with self._standing(owner):
            yield

    @contextmanager
    def _standing(self, owner: object = None) -> Iterator[None]:
        self._check_open()
        with self._lock.standing(PAUSE_SECONDS, owner):
            self._check_open()  # meanwhile
            yield

    # -- as a worker --------------------------------------------------------------------------------------------------

    def _attach(self, signals: Signals, sink: Callable[[Any], TensorDictBase | None]) -> None:
        self._rollouts.signals = signals
        self._rollouts.buffer.allocate = sink
        self._weights.counted_above = signals.counted

    def _rollout_for_parent(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]:
        rollouts = self._rollouts
        rollouts.random = random
        before = rollouts.frames
        if writes:
            self._iteration.next_batch()
            return None, rollouts.frames - before
        batch = self.rollout()
        assert batch is not None
        self._iter += 1
        rollouts.frames += batch.numel()
        return batch, batch.numel()

    def _interrupt(self, timeout: float, close_env: bool) -> None:
        self._end_weights(timeout)  # all that it may wait for: between two steps, its signals say that it is over

    def _profile(self, config: ProfileConfig | None, name: str) -> None:
        with self._standing():
            self._iteration.profile(config, name or "0")

    def _policy_devices(self) -> set[torch.device]:
        own = next((tensor.device for tensor in [*self.policy.parameters(), *self.policy.buffers()]), None)
        return {own or self.policy_device or self.env_device or torch.device("cpu")}

    def _batch_dims(self) -> int | None:
        return len(self._rollouts.batch_size)

    # -- seeds, resets, checkpoints -----------------------------------------------------------------------------------

    # Each waits for the step under way, at most 60 s (AckTimeout); all but state_dict() raise ClosedError when closed.

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed and reset the environments, which begin new trajectories. Returns a seed for a further environment."""
        with self._standing():
            following = self._rollouts.set_seed(seed, static_seed)
            self._iteration.reset(None, {})
            return following

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments, which begin new trajectories. With ``trajs_per_batch``, trajectories that the reset
        breaks off are dropped. A reset of all environments also drops whole trajectories that were not handed out yet.

        Args:
            index: environments of the batch to reset; anything that indexes a tensor of the batch's shape. None: all.
            kwargs: arguments for the environment's ``reset``.

        Raises:
            ValueError: an index was given, but there is only one environment.
        """
        with self._standing():
            self._iteration.reset(index, kwargs)

    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros with the layout of a real one, after ``split_trajs`` and ``postproc``. Does not step the
        environment. Calls the policy once, on zeros, unless there was a rollout before.

        Raises:
            TypeError: there was no rollout yet, and the environment has neither ``fake_tensordict()`` nor a
                ``reward_spec``.
        """
        with self._standing():
            return self._iteration.fake_batch()

    def state_dict(self) -> dict[str, Any]:
        """A dict of ``policy_state_dict``, ``env_state_dict``, ``frames``, ``iter``, ``versions``, and ``traj_pool`` if
        trajectories are tracked.

        All of it is a copy, which later updates do not change. It does not contain unfinished trajectories. May also
        be called after ``shutdown()``.
        """
        with self._lock.standing(PAUSE_SECONDS), self._weights.holds():
            return self._iteration.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from what :meth:`state_dict` returned, with new trajectories. Versions continue too, so no new frame
        gets the version of an earlier one.

        Raises:
            KeyError: a part is missing, and ``strict`` is True.
        """
        if strict and (missing := [part for part in PARTS if part not in state_dict]):
            raise KeyError(
                f"the state dict of a {type(self).__name__} lacks {missing}: pass strict=False to load the rest"
            )
        with self._standing():
            self._iteration.load_state_dict(state_dict, strict)

    # -- weights ------------------------------------------------------------------------------------------------------

    def _registered(self, model_id: str) -> Any:
        # The acting model may be a copy on another device. Where that receives weights, the original is out of date.
        acts = model_id in self._weights.schemes
        return find_model(self, model_id, self.policy if acts else self._original_policy)

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End collection before the next step. Then close the environment and the schemes.

        Idempotent. If the step under way takes longer than the timeout, its thread closes the environment when the
        step has ended.

        Args:
            timeout: seconds. None: 5.
            close_env: True: close the environment.
            raise_on_error: True: raise errors. False: log them.

        Raises:
            BaseException: the error that ended collection in the background, or an error of the environment's
                ``close``.
        """
        with logged_unless(raise_on_error):
            self._end(timeout, close_env)

    def _end(self, timeout: float | None, close_env: bool) -> None:
        deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
        self.closed = True
        try:
            afterwards: Callable[[], None] = self._iteration.close_environment if close_env else lambda: None
            if self._lock.close(max(0.0, deadline - time.monotonic()), afterwards):
                if self._free is not None and self._free is not threading.current_thread():
                    join(self._free, deadline - time.monotonic())
                afterwards()
            else:
                _log.warning(
                    "%s.shutdown(): the step under way did not end in time; its thread will close the environment",
                    type(self).__name__,
                )
        finally:
            self._iteration.abandon()
            self._end_weights(max(0.0, deadline - time.monotonic()))
        self._raise_free_error()
