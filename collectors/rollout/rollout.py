"""The rollout: one environment and one policy make steps until a batch is full."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, set_interaction_type
from torch import nn
from torch.profiler import record_function

from asyncsync.collectors.arguments import RolloutArguments
from asyncsync.collectors.base import Signals
from asyncsync.collectors.batch_layout import check_keys, empty_batch, layout_of
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.wrappers import Wrapper, with_step_limit
from asyncsync.collectors.rollout.devices import RolloutDevices
from asyncsync.collectors.rollout.lock import RolloutLock
from asyncsync.collectors.rollout.policies import as_tensordict_module, plainly_called
from asyncsync.collectors.rollout.steps import (
    ArraySteps,
    Carrier,
    NewBatches,
    RolloutBuffer,
    SameBatch,
    TensorDictSteps,
    compact,
    keep_written,
)
from asyncsync.collectors.trajectories import Key, _TrajectoryPool, path_of, zeroed
from asyncsync.collectors.weights.updates import ActingWeights

LAG_SECONDS = 60.0
"""How long a step waits for the version that max_lag requires."""


class Rollouts:
    """Makes the rollouts of one environment and one policy. The caller holds the lock.

    Args:
        env: the environment, before it is moved to its device.
        weights: the weights of the acting models.

    Attributes:
        env: the environment; after :meth:`set_up`, on its device and with its limit of steps.
        traj_pool: the source of trajectory ids.
        policy: the acting policy, as a module that takes a TensorDict.
        carrier: the state between two steps.
        keys: the keys of the environment's entries.
        buffer: stores the steps of a rollout.
        steps: makes a step.
        frames: number of collected frames.
        random: for a worker's collector: whether the trainer wants random actions.
        signals: the wishes of a worker's trainer. None: this collector is no worker.
    """

    policy: Any
    steps: TensorDictSteps

    def __init__(self, env: Any, arguments: RolloutArguments, weights: ActingWeights, lock: RolloutLock) -> None:
        self.env = env
        self.arguments = arguments
        self.frames = 0
        self.random: bool | None = False
        self.signals: Signals | None = None
        self.traj_pool: _TrajectoryPool = _TrajectoryPool() if arguments.traj_pool is None else arguments.traj_pool
        self._weights = weights
        self._lock = lock

    def set_up(self) -> None:
        """Move the environment to its device, limit its steps, reset it, and fit the arguments to its batch size."""
        self.devices = devices = RolloutDevices(self.arguments)
        self.env = with_step_limit(devices.place(self.env), self.arguments.max_frames_per_traj)
        self.carrier = Carrier(self.arguments, self._weights, self.traj_pool, devices)
        root = self._reset()
        self.batch_size = environments.batch_size_of(self.env)
        if root.batch_size != self.batch_size:
            raise ValueError(
                f"{type(self.env).__name__}.reset() returned a TensorDict with batch size {tuple(root.batch_size)}, "
                f"but its own batch_size is {tuple(self.batch_size)}"
            )
        self._check_keys(root)
        self.keys = environments.entry_keys(self.env, root, self.arguments)
        self.carrier.begin(root)
        self.arguments.fit(self.batch_size.numel())
        memory = SameBatch() if self.arguments.return_same_td else NewBatches()
        self.buffer = RolloutBuffer(self.arguments.steps, self.batch_size, devices.storing, memory)

    def _check_keys(self, root: TensorDictBase) -> None:
        """Raises ValueError: the environment uses keys that this collector writes. But a TorchRL environment may use
        one key for an observation and an action, and write "policy_version"."""
        actions, taken = environments.action_keys(self.env), ["next", "collector"]
        if environments.is_torchrl(self.env):
            actions = []
        elif self.arguments.track_policy_version:
            taken.append("policy_version")
        env = self.env
        while isinstance(env, Wrapper):
            env = env.environment
        check_keys(type(env).__name__, root.keys(True, True), actions, taken)

    def set_policy(self, policy: nn.Module) -> None:
        """Use this policy, which is already on its device."""
        trust, compiled = self.arguments.trust_policy, self.arguments.compile_policy
        if environments.is_torchrl(self.env):
            from torchrl.modules import set_exploration_modules_spec_from_env

            set_exploration_modules_spec_from_env(policy, self.env)
        self.policy = policy
        if not trust:
            labels = ["collector", "policy_version"] if self.arguments.track_policy_version else ["collector"]
            root = self.carrier.root.exclude(*labels)
            observed = environments.observation_keys(self.env, root, self.arguments.max_frames_per_traj > 0)
            self.policy = as_tensordict_module(policy, observed, environments.action_keys(self.env))
        if compiled:
            self.policy = torch.compile(self.policy, **(compiled if isinstance(compiled, Mapping) else {}))
        if cudagraph := self.arguments.cudagraph_policy:
            options = cudagraph if isinstance(cudagraph, Mapping) else {}
            self.policy = CudaGraphModule(self.policy, in_keys=[], out_keys=[], device=self.devices.policy, **options)
        is_profiled = "1" in (os.environ.get("TORCHRL_PROFILING"), os.environ.get("ASYNCSYNC_PROFILING"))
        is_array = not is_profiled and ArraySteps.supports(self.env, self.arguments, self.devices)
        self.steps = steps = (ArraySteps if is_array else TensorDictSteps)(
            self.env,
            self.policy if trust else plainly_called(self.policy),
            self.carrier,
            self.buffer,
            self.keys,
            self.arguments,
            self.devices,
        )
        if is_profiled:  # torch's profiler then shows these as ranges
            steps.act = record_function("Collector.policy")(steps.act)  # type: ignore[method-assign]
            steps.play = record_function("Collector.env_step")(steps.play)  # type: ignore[method-assign]
            steps.advance = record_function("Collector.carrier")(steps.advance)  # type: ignore[method-assign]
            self.roll = record_function("Collector.rollout")(self.roll)  # type: ignore[method-assign]

    # -- resets -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reset(self, **kwargs: Any) -> TensorDictBase:
        """Reset all environments in a hold, because they may have models."""
        self.carrier.is_lost = True
        with self._weights.holds():
            return environments.reset(self.env, **kwargs)

    @torch.no_grad()
    def reset(self, index: Any = None, kwargs: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
        """Reset the environments of this index; None: all. They begin new trajectories. With an index, returns the
        identifiers of the trajectories that it breaks off."""
        if index is None:
            self.carrier.begin(self._reset(**kwargs))
            return []
        if not self.batch_size:
            raise ValueError("reset(index=) needs a batch of environments, but there is only one: leave index out")
        mask = torch.zeros(self.batch_size, dtype=torch.bool)
        mask[index] = True
        self.carrier.is_lost = True  # if one environment raises, others may be reset already
        with self._weights.holds():
            root = environments.reset_some(self.env, self.carrier.root.exclude("collector", "next"), mask, kwargs)
        for key in root.keys(True, True):
            state = root.get(key)
            if path_of(key) not in self.keys.own and isinstance(state, torch.Tensor):
                root.set(key, zeroed(state, mask))
        broken_off: list[int] = []
        if self.arguments.track_traj_ids:
            ids = self.carrier.labels.get("traj_ids")
            broken_off = ids[mask.to(ids.device)].flatten().tolist()
            self.carrier.renew_ids(mask.cpu().numpy())
        self.carrier.continue_from(root)
        return broken_off

    @torch.no_grad()
    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environment, which may reset it, so call :meth:`reset` afterwards. Returns the next seed."""
        self.carrier.is_lost = True
        with self._weights.holds():
            return environments.set_seed(self.env, seed, static_seed)

    # -- one rollout --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def roll(self) -> TensorDictBase | None:
        """One rollout, ``[*env.batch_size, time]``. None: its frames were added to the replay buffer."""
        arguments, lock, signals, buffer, weights = self.arguments, self._lock, self.signals, self.buffer, self._weights
        interruptor, is_cut, frame = arguments.interruptor, False, None
        weights.check()
        if arguments.reset_at_each_iter or self.carrier.is_lost:
            self.reset()
        random = bool(self.random) or self.frames < arguments.init_random_frames  # for the whole rollout
        max_lag, left = arguments.max_lag, arguments.steps
        buffer.begin()
        with set_interaction_type(arguments.exploration_type):
            while left and not is_cut:
                if lock.stop_wanted:
                    lock.wait_while_stopped()
                if left < arguments.steps and signals is not None and signals.wants_rollout_to_end():
                    break
                if max_lag is not None:
                    weights.keep_up(max_lag, LAG_SECONDS)
                # Steps share a hold until an update waits, because entering a hold takes as long as a small policy.
                with weights.holds() as holds:
                    self.carrier.label_version()
                    while True:
                        frame = self.steps.step(random)
                        left -= 1
                        is_cut = interruptor is not None and interruptor.collection_stopped()
                        if not left or is_cut or frame is not None or max_lag is not None:
                            break
                        if (
                            lock.stop_wanted
                            or holds.is_update_waiting
                            or (signals is not None and signals.wants_hold_to_end)
                        ):
                            break
                if frame is not None:  # outside the hold, because a replay buffer may wait, or change weights
                    self._add_to_buffer(frame, last=is_cut or not left)
                    if self.frames >= arguments.total_frames:
                        break
        if frame is not None:
            return None
        batch = buffer.finish()
        if self.keys.truncated:
            truncate(batch[..., -1], self.keys.truncated)
        return batch

    def _add_to_buffer(self, frame: TensorDictBase, last: bool) -> None:
        """Add one step to the replay buffer, which may keep the TensorDict."""
        if last or self.frames + frame.numel() >= self.arguments.total_frames:
            truncate(frame, self.keys.truncated)
        self.arguments.replay_buffer.add(frame)
        self.frames += frame.numel()

    # -- a batch without steps ----------------------------------------------------------------------------------------

    def fake(self) -> TensorDictBase:
        """A rollout of zeros with the layout of the latest rollout. If there is none, the environment's specs and one
        call of the policy determine the layout. Raises TypeError: the environment has neither ``fake_tensordict()``
        nor a ``reward_spec``."""
        layout = self.buffer.layout
        batch = self._fake_from_specs() if layout is None else empty_batch(layout).zero_()
        truncate(batch[..., -1], self.keys.truncated)
        return batch

    @torch.no_grad()
    def _fake_from_specs(self) -> TensorDictBase:
        steps = self.arguments.steps
        step = self.carrier.root.exclude("next").clone().zero_()
        after = environments.fake_next(self.env, step.exclude("collector"))
        # fork_rng: a policy that draws random numbers must not change those of the next rollout.
        with (
            torch.random.fork_rng(devices=[]),
            set_interaction_type(self.arguments.exploration_type),
            self._weights.holds(),
        ):
            self.steps.act(step, random=False)
        written = step.get("next", None)  # a recurrent policy writes its new state there
        step.set("next", after)
        if written is not None:
            keep_written(written, after, step.copy(), self.keys)
        if self.arguments.track_policy_version:
            after.set("policy_version", step.get("policy_version"))
        compact(step, self.keys.repeated)
        layout = layout_of(step, steps, self.devices.storing)
        if layout is not None:
            return empty_batch(layout).zero_()
        stacked: TensorDictBase = torch.stack([step.clone().zero_() for _ in range(steps)], step.ndim)
        return stacked.refine_names(..., "time")


def truncate(step: TensorDictBase, keys: Iterable[Key]) -> None:
    """Set the flag "truncated" at these keys of a step, or of a part of a batch, and the flag "done" beside it."""
    for key in keys:
        for name in ("truncated", "done"):
            flag = step.get(("next", *path_of(key)[:-1], name), None)
            if flag is not None:
                flag.fill_(True)
