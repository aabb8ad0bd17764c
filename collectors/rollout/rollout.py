"""The rollout: what one environment and one policy make, step by step, until there is a batch."""

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
from asyncsync.collectors.rollout.policies import plainly_called, wrapped
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
"""How long a step waits for a version that max_lag demands."""


class Rollouts:
    """One rollout after another, of one environment and one policy. Whoever calls holds the lock.

    Args:
        env: the environment, not moved yet.
        weights: of the models that act.

    Attributes:
        env: the environment; after :meth:`set_up`, on its device and with its limit of steps.
        traj_pool: where trajectory ids come from.
        policy: what acts, as a module that takes a TensorDict.
        carrier: what goes from step to step.
        keys: of entries that the environment has.
        buffer: where the steps of each rollout go.
        steps: makes a step.
        frames: how many have been collected.
        random: for a collector that is a worker: whether its trainer wants the policy left out.
        signals: what the trainer of a worker wants; None: this collector is no worker.
    """

    devices: RolloutDevices
    policy: Any
    carrier: Carrier
    buffer: RolloutBuffer
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
        """Move the environment to its device, limit its steps, and reset it; fit the arguments to it."""
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
        """Raises ValueError: the environment has entries where this collector writes others. TorchRL's environments may
        give an observation and an action one key, and count versions."""
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
        """Act with this policy, which is on its device."""
        trust, compiled = self.arguments.trust_policy, self.arguments.compile_policy
        if environments.is_torchrl(self.env):
            from torchrl.modules import set_exploration_modules_spec_from_env

            set_exploration_modules_spec_from_env(policy, self.env)
        self.policy = policy
        if not trust:
            labels = ["collector", "policy_version"] if self.arguments.track_policy_version else ["collector"]
            root = self.carrier.root.exclude(*labels)
            observed = environments.observation_keys(self.env, root, self.arguments.max_frames_per_traj > 0)
            self.policy = wrapped(policy, observed, environments.action_keys(self.env))
        if compiled:
            self.policy = torch.compile(self.policy, **(compiled if isinstance(compiled, Mapping) else {}))
        if cudagraph := self.arguments.cudagraph_policy:
            options = cudagraph if isinstance(cudagraph, Mapping) else {}
            self.policy = CudaGraphModule(self.policy, in_keys=[], out_keys=[], device=self.devices.policy, **options)
        is_profiled = "1" in (os.environ.get("TORCHRL_PROFILING"), os.environ.get("ASYNCSYNC_PROFILING"))
        is_array = not is_profiled and ArraySteps.fit(self.env, self.arguments, self.devices)
        self.steps = steps = (ArraySteps if is_array else TensorDictSteps)(
            self.env,
            self.policy if trust else plainly_called(self.policy),
            self.carrier,
            self.buffer,
            self.keys,
            self.arguments,
            self.devices,
        )
        if is_profiled:  # torch's profiler shows these as ranges
            steps.act = record_function("Collector.policy")(steps.act)  # type: ignore[method-assign]
            steps.play = record_function("Collector.env_step")(steps.play)  # type: ignore[method-assign]
            steps.advance = record_function("Collector.carrier")(steps.advance)  # type: ignore[method-assign]
            self.roll = record_function("Collector.rollout")(self.roll)  # type: ignore[method-assign]

    # -- resets -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reset(self, **kwargs: Any) -> TensorDictBase:
        """Reset all environments; a model in them does not change meanwhile."""
        self.carrier.is_lost = True
        with self._weights.holds():
            return environments.reset(self.env, **kwargs)

    @torch.no_grad()
    def reset(self, index: Any = None, kwargs: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
        """Reset all environments (None), or those of an index; they begin new trajectories. Returns the identifiers of
        trajectories that an index has ended."""
        if index is None:
            self.carrier.begin(self._reset(**kwargs))
            return []
        if not self.batch_size:
            raise ValueError("reset(index=) needs a batch of environments, but there is only one: leave index out")
        mask = torch.zeros(self.batch_size, dtype=torch.bool)
        mask[index] = True
        self.carrier.is_lost = True  # some may be reset when another one raises
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
        self.carrier.go_on(root)
        return broken_off

    @torch.no_grad()
    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environment, which may reset it; :meth:`reset` has to follow. Returns the seed that comes after."""
        self.carrier.is_lost = True
        with self._weights.holds():
            return environments.set_seed(self.env, seed, static_seed)

    # -- one rollout --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def roll(self) -> TensorDictBase | None:
        """One rollout, by the thread that holds the lock: ``[*env.batch_size, time]``; None: its frames were added to
        the replay buffer."""
        arguments, lock, signals, buffer, weights = self.arguments, self._lock, self.signals, self.buffer, self._weights
        interruptor, is_cut, frame = arguments.interruptor, False, None
        weights.check()
        if arguments.reset_at_each_iter or self.carrier.is_lost:
            self.reset()
        random = bool(self.random) or self.frames < arguments.init_random_frames  # whole rollouts ignore the policy
        max_lag, left = arguments.max_lag, arguments.steps
        buffer.begin()
        with set_interaction_type(arguments.exploration_type):
            while left and not is_cut:
                if lock.wanted:
                    lock.give_way()
                if left < arguments.steps and signals is not None and signals.interrupts():
                    break
                if max_lag is not None:
                    weights.keep_up(max_lag, LAG_SECONDS)
                # Steps share a hold until an update waits for its end: entering one takes as long as a small policy.
                with weights.holds() as holds:
                    self.carrier.label_version()
                    while True:
                        frame = self.steps.step(random)
                        left -= 1
                        is_cut = interruptor is not None and interruptor.collection_stopped()
                        if not left or is_cut or frame is not None or max_lag is not None:
                            break
                        if lock.wanted or holds.awaited or (signals is not None and signals.calls):
                            break
                if frame is not None:  # outside: a replay buffer may wait, or change weights
                    self._add(frame, last=is_cut or not left)
                    if self.frames >= arguments.total_frames:
                        break
        if frame is not None:
            return None
        batch = buffer.finish()
        if self.keys.truncated:
            truncate(batch[..., -1], self.keys.truncated)
        return batch

    def _add(self, frame: TensorDictBase, last: bool) -> None:
        """One step straight to the replay buffer, which may keep what it is given."""
        if last or self.frames + frame.numel() >= self.arguments.total_frames:
            truncate(frame, self.keys.truncated)
        self.arguments.replay_buffer.add(frame)
        self.frames += frame.numel()

    # -- a batch without steps ----------------------------------------------------------------------------------------

    def fake(self) -> TensorDictBase:
        """A rollout of zeros: as the latest one was, else as the environment's specs and one call of the policy tell.
        Raises TypeError: the environment has none of these."""
        layout = self.buffer.layout
        batch = self._from_specs() if layout is None else empty_batch(layout).zero_()
        truncate(batch[..., -1], self.keys.truncated)
        return batch

    @torch.no_grad()
    def _from_specs(self) -> TensorDictBase:
        steps = self.arguments.steps
        step = self.carrier.root.exclude("next").clone().zero_()
        after = environments.fake_next(self.env, step.exclude("collector"))
        # A policy that draws random numbers leaves those that come next as they are.
        with (
            torch.random.fork_rng(devices=[]),
            set_interaction_type(self.arguments.exploration_type),
            self._weights.holds(),
        ):
            self.steps.act(step, random=False)
        written = step.get("next", None)  # by a recurrent policy
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
    """Mark a step, which may be a part of a batch, as truncated: under these keys, and what is done beside them."""
    for key in keys:
        for name in ("truncated", "done"):
            flag = step.get(("next", *path_of(key)[:-1], name), None)
            if flag is not None:
                flag.fill_(True)
