"""The rollout: how a collector steps through its environment, and the state that it carries from step to step.

One step, after TorchRL's "Collector Internals" page (Per-timestep flow):

    carrier ──(cast, _sync_policy)──▶ policy ──▶ carrier.update ──(cast, _sync_env)──▶ environment.step_and_maybe_reset
    carrier.set("next") ──▶ copied into the batch (_sync_storage), or a clone added to the replay buffer
    carrier = the state after a possible reset, with fresh trajectory ids where one has ended

The environment never sees the carrier's ``"collector"`` entry: it is taken off before a step, and put on the next
carrier.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import set_interaction_type
from torch import nn

from asyncsync.bus.link import is_fast_path_on
from asyncsync.collectors.arguments import RolloutArguments
from asyncsync.collectors.base import Signals
from asyncsync.collectors.batch_layout import empty_batch, layout_of, with_time
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.keys import check_keys, path_of
from asyncsync.collectors.envs.step_limit import StepLimit, limited
from asyncsync.collectors.profiling import recorded
from asyncsync.collectors.rollout.array_steps import ArraySteps, WriteOutput
from asyncsync.collectors.rollout.buffer import RolloutBuffer
from asyncsync.collectors.rollout.devices import RolloutDevices
from asyncsync.collectors.rollout.lock import RolloutLock
from asyncsync.collectors.rollout.plain_modules import plainly_called
from asyncsync.collectors.rollout.policies import checked, quickened, wrapped
from asyncsync.collectors.trajectories import Key, _aggregate_end_of_traj, _TrajectoryPool, beside
from asyncsync.collectors.weights.updates import ActingWeights

Array = np.ndarray[Any, Any]

LAG_SECONDS = 60.0
"""How long a step waits for a version that max_lag demands."""


class Rollouts:
    """One rollout after another, of one environment and one policy. Whoever calls holds the lock.

    Args:
        env: the environment, not moved yet.
        weights: of the models that act.
        traj_pool: where trajectory ids come from; None: one of its own.

    Attributes:
        env: the environment; after :meth:`set_up`, on its device and with its limit of steps.
        policy: what acts, as a module that takes a TensorDict.
        carrier: what the next call of the policy reads.
        buffer: where the steps of each rollout go.
        frames: how many have been collected.
        is_lost: the environment may be further than the carrier, because one of its methods has raised, or Ctrl-C has
            struck in it: the next rollout begins with a reset.
        random: for a collector that is a worker: whether its trainer wants the policy left out.
        signals: what the trainer of a worker wants; None: this collector is no worker.
    """

    devices: RolloutDevices
    policy: Any
    carrier: TensorDictBase
    buffer: RolloutBuffer

    def __init__(
        self,
        env: Any,
        arguments: RolloutArguments,
        weights: ActingWeights,
        lock: RolloutLock,
        traj_pool: _TrajectoryPool | None,
    ) -> None:
        self.env = env
        self.arguments = arguments
        self.frames = 0
        self.random: bool | None = False
        self.signals: Signals | None = None
        self.traj_pool = _TrajectoryPool() if traj_pool is None else traj_pool
        self._weights = weights
        self._lock = lock
        self.is_lost = False

    def set_policy(
        self,
        policy: nn.Module,
        trust: bool,
        compiled: bool | Mapping[str, Any] | None,
        cudagraph: bool | Mapping[str, Any] | None,
    ) -> None:
        """Act with this policy, which is on its device; ``trust``, ``compiled`` and ``cudagraph`` as of the
        collector."""
        if environments.is_torchrl(self.env):
            from torchrl.modules import set_exploration_modules_spec_from_env

            set_exploration_modules_spec_from_env(policy, self.env)
        self.policy = policy
        if not trust:
            labels = ["collector", "policy_version"] if self.arguments.track_policy_version else ["collector"]
            root = self.carrier.exclude(*labels)
            observed = environments.observation_keys(self.env, root, self.arguments.max_frames_per_traj > 0)
            self.policy = wrapped(policy, observed, environments.action_keys(self.env))
        self.policy = quickened(self.policy, compiled, cudagraph, self.devices.policy)
        self._call_policy = self.policy if trust else plainly_called(self.policy)
        self._arrays = None
        if is_fast_path_on() and not self._is_profiled and environments.steps_are_arrays(self.env):
            pool = self.traj_pool if self.arguments.track_traj_ids else None
            self._arrays = ArraySteps(self.env, self._call_policy, self.buffer, pool, self._is_new_version, self._carry)

    # -- the carrier --------------------------------------------------------------------------------------------------

    def set_up(self, devices: RolloutDevices) -> None:
        """Move the environment to its device, limit its steps, and begin."""
        self.devices = devices
        self.env = devices.place(self.env)
        self.env = limited(self.env, self.arguments.max_frames_per_traj)
        self.make_carrier()
        self._is_profiled = "1" in (os.environ.get("TORCHRL_PROFILING"), os.environ.get("ASYNCSYNC_PROFILING"))
        if self._is_profiled:
            self._profile()

    def make_carrier(self) -> None:
        """Reset the environment; its result is the carrier, with trajectory ids and the policy's version."""
        root = self._reset()
        self.batch_size = environments.batch_size_of(self.env)
        self.n_env = self.batch_size.numel()
        if root.batch_size != self.batch_size:
            raise ValueError(
                f"{type(self.env).__name__}.reset() returned a TensorDict with batch size {tuple(root.batch_size)}, "
                f"but its own batch_size is {tuple(self.batch_size)}"
            )
        self._check_keys(root)
        self.done_keys = environments.done_keys(self.env, root)
        self._own_keys = environments.own_keys(self.env, root)
        self._repeated_keys = environments.repeated_keys(self.env, root) if self.arguments.compact_obs else []
        self._truncated_keys = environments.truncated_keys(self.env, root) if self.arguments.set_truncated else []
        if self.arguments.set_truncated and not self._truncated_keys:
            raise RuntimeError(
                f"set_truncated=True, but {type(self.env).__name__} has no 'truncated' entry: add one (for a TorchRL "
                "environment by env.add_truncated_keys()), or leave set_truncated out"
            )
        self.metadata = TensorDict({}, self.batch_size, device=self.devices.env)
        self._acting_version = -1
        self.begin_trajectories(root)

    def _check_keys(self, root: TensorDictBase) -> None:
        """Raises ValueError: the environment has entries where this collector writes others. TorchRL's environments may
        give an observation and an action one key, and count versions."""
        actions, taken = environments.action_keys(self.env), ["next", "collector"]
        if environments.is_torchrl(self.env):
            actions = []
        elif self.arguments.track_policy_version:
            taken.append("policy_version")
        env = self.env.environment if isinstance(self.env, StepLimit) else self.env
        check_keys(type(env).__name__, root.keys(True, True), actions, taken)

    def _profile(self) -> None:
        """Have torch's profiler show parts of a rollout as ranges."""
        self._act = recorded("Collector.policy", self._act)  # type: ignore[method-assign]
        self._step_env = recorded("Collector.env_step", self._step_env)  # type: ignore[method-assign]
        self._advance = recorded("Collector.carrier", self._advance)  # type: ignore[method-assign]
        self.roll = recorded("Collector.rollout", self.roll)  # type: ignore[method-assign]

    @torch.no_grad()
    def _reset(self, **kwargs: Any) -> TensorDictBase:
        """Reset all environments; a model in them does not change meanwhile."""
        self.is_lost = True
        with self._weights.holds():
            return environments.reset(self.env, **kwargs)

    @torch.no_grad()
    def reset(self, index: Any = None, kwargs: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
        """Reset all environments (None), or those of an index; they begin new trajectories. Returns the identifiers of
        trajectories that an index has ended."""
        if index is None:
            self.begin_trajectories(self._reset(**kwargs))
            return []
        mask = environments.mask_of(self.batch_size, index)
        self.is_lost = True  # some may be reset when another one raises
        with self._weights.holds():
            root = environments.reset_some(self.env, self.carrier.exclude("collector", "next"), mask, kwargs)
        zero_state(root, self._own_keys, mask)
        broken_off: list[int] = []
        if self.arguments.track_traj_ids:
            ids = self.metadata.get("traj_ids")
            broken_off = ids[mask.to(ids.device)].flatten().tolist()
            self._renew_ids(mask.cpu().numpy())
        self._carry(root)
        return broken_off

    @torch.no_grad()
    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environment, which may reset it; :meth:`reset` has to follow. Returns the seed that comes after."""
        self.is_lost = True
        with self._weights.holds():
            return environments.set_seed(self.env, seed, static_seed)

    def begin_trajectories(self, root: TensorDictBase) -> None:
        """The carrier after a reset of all environments."""
        if self.arguments.track_traj_ids:
            fresh = self.traj_pool.get_traj_and_increment(self.n_env, device=self.devices.env)
            self.metadata.set("traj_ids", fresh.view(self.batch_size))
        self._is_new_version()
        self._carry(root)

    def _carry(self, root: TensorDictBase, is_lost: bool = False) -> None:
        """Make this TensorDict the carrier."""
        if self.devices.carrier_has_no_device and root.device is not None:
            root = root.copy().clear_device_()  # a copy: the environment may keep its own
        metadata = self.metadata
        # TensorDict's checks of an entry are dear: they run where there is something to check.
        is_alike = root.batch_size == metadata.batch_size and root.device == metadata.device
        root._set_str("collector", metadata, inplace=False, validated=is_alike)
        if self.arguments.track_policy_version:
            root.set("policy_version", self.metadata.get("policy_version"))
        self.carrier = root
        self.is_lost = is_lost

    def _update_traj_ids(self, env_output: TensorDictBase) -> None:
        """Fresh ids for the environments whose trajectory has ended with this step."""
        after = env_output.get("next")
        for key in self.done_keys:  # most steps end here, so without a tensor that is not needed
            done = after.get(key, None)
            if done is None or (done if done.numel() == 1 else done.any()):
                break
        else:
            return
        self._renew_ids(_aggregate_end_of_traj(after, self.done_keys).cpu().numpy())

    def _renew_ids(self, ended: Array) -> None:
        """Fresh ids for the environments of a mask, bool of the batch's shape."""
        ids = self.metadata._get_str("traj_ids", None)
        renewed: Array = ids.numpy(force=True).copy()  # new memory: the old ids may be in a snapshot
        renewed[ended] = self.traj_pool.draw(int(np.count_nonzero(ended)))
        self.metadata._set_str("traj_ids", torch.from_numpy(renewed).to(ids.device), inplace=False, validated=True)

    def _is_new_version(self) -> bool:
        """Whether weights act of which the metadata did not know; now it does."""
        version = self._weights.version()
        if version == self._acting_version:
            return False
        size, tracker = self.batch_size, self.arguments.track_policy_version
        self.metadata.set("policy_version", torch.full(size, version, dtype=torch.int64, device=self.metadata.device))
        self._acting_version = version
        if not isinstance(tracker, bool):
            tracker.version = version
        return True

    # -- one step -----------------------------------------------------------------------------------------------------

    def _act(self, carrier: TensorDictBase, random: bool) -> None:
        """The policy reads the carrier and writes into it."""
        if random:
            environments.rand_action(self.env, carrier)
            return
        devices = self.devices
        if not devices.cast_to_policy_device or devices.policy is None:
            output = self._call_policy(carrier)
            if output is not carrier:
                carrier.update(checked(output))
            return
        given = devices.cast(carrier, devices.policy, devices.sync_policy)
        before = dict(given.items(True, True))
        output = checked(self._call_policy(given))
        if output is not carrier:
            # Only what the policy wrote: the rest of the carrier stays on its device.
            written = [key for key, value in output.items(True, True) if value is not before.get(key)]
            carrier.update(output.select(*written))

    def _step_env(self, carrier: TensorDictBase) -> TensorDictBase:
        """Step the environment; returns the root of the next step. The carrier has ``"next"`` then."""
        written = carrier.get("next", None)  # by a recurrent policy
        given = carrier
        devices = self.devices
        if devices.cast_to_env_device and devices.env is not None:
            given = devices.cast(carrier, devices.env, devices.sync_env)
        self.is_lost = True
        found = self.env.step_and_maybe_reset(given)
        if not isinstance(found, tuple) or len(found) != 2 or (after := found[0].get("next", None)) is None:
            raise environments.no_step(self.env, found)
        output, root = found
        if output is not carrier:
            if devices.carrier_has_no_device and after.device is not None:
                after = after.copy().clear_device_()
            carrier.set("next", after)
        if written is not None:
            keep_written(written, carrier.get("next"), root, self._own_keys, self.done_keys)
        return root

    def _advance(self, root: TensorDictBase) -> None:
        """From one step's carrier to the next's."""
        if self.arguments.track_traj_ids:
            self._update_traj_ids(self.carrier)
        self._carry(root)

    def _step(self, random: bool, written: WriteOutput | None) -> TensorDictBase:
        """One call of policy and environment. Returns the root of the next step; the carrier is what is stored.
        ``written``: the policy has been called; this writes what it has returned. If this raises, the carrier is as
        before; if the environment has raised, it is lost."""
        carrier = self.carrier
        if self._is_new_version():
            carrier.set("collector", self.metadata)
        known = dict(carrier.items())
        if "next" in known:  # of a step that Ctrl-C has ended: nothing that a policy wrote
            carrier.del_("next")
            del known["next"]
        try:
            if written is None:
                self._act(carrier, random)
            else:
                written(carrier)
            metadata = carrier.get("collector")
            carrier.del_("collector")
            try:
                root = self._step_env(carrier)
            finally:
                carrier.set("collector", metadata)
        except BaseException:
            for key in set(carrier.keys()) - known.keys():
                carrier.del_(key)
            carrier.update(known)
            raise
        if self.arguments.track_policy_version:
            carrier.get("next").set("policy_version", metadata.get("policy_version"))
        if self._repeated_keys:
            compact(carrier, self._repeated_keys)
        return root

    # -- one rollout --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def roll(self) -> TensorDictBase | None:
        """One rollout, by the thread that holds the lock: ``[*env.batch_size, time]``; None: its frames were added to
        the replay buffer."""
        arguments, lock, signals, buffer, weights = self.arguments, self._lock, self.signals, self.buffer, self._weights
        interruptor, is_cut = arguments.interruptor, False
        weights.check()
        if arguments.reset_at_each_iter or self.is_lost:
            self.reset()
        random = bool(self.random) or self.frames < arguments.init_random_frames  # whole rollouts ignore the policy
        adds, max_lag, left = arguments.adds, arguments.max_lag, arguments.steps
        device = self.devices.storing
        non_blocking = device is not None and self.devices.is_non_blocking(device, self.devices.sync_storage)
        buffer.begin()
        each_alone = adds or max_lag is not None
        is_changed = adds or self._repeated_keys or arguments.track_policy_version  # what the environment returns
        arrays = None if is_changed or random or not self.devices.are_alike_on_cpu else self._arrays
        with set_interaction_type(arguments.exploration_type):
            while left and not is_cut:
                if lock.wanted:
                    lock.give_way()
                if left < arguments.steps and signals is not None and signals.interrupts():
                    break
                if max_lag is not None:
                    weights.keep_up(max_lag, LAG_SECONDS)
                frame, written, has_ended = None, None, False
                # Steps share a hold until an update waits for its end: entering one takes as long as a small policy.
                with weights.holds() as holds:

                    def ends() -> bool:
                        nonlocal is_cut
                        is_cut = interruptor is not None and interruptor.collection_stopped()
                        is_wanted = lock.wanted or holds.awaited or (signals is not None and signals.calls)
                        return is_cut or each_alone or is_wanted

                    while not has_ended:
                        if arrays is not None and environments.steps_are_arrays(self.env):
                            self.is_lost = True
                            left, has_ended, written = arrays.run(self.carrier, left, ends)
                            self.is_lost = False
                        if not has_ended:
                            if buffer.count:  # what has no place there once will hardly have one soon
                                arrays = None
                            left -= 1
                            frame = self._frame(random, adds, non_blocking, written)
                            has_ended, written = not left or ends(), None
                if frame is not None:  # outside: a replay buffer may wait, or change weights
                    self._add(frame, last=is_cut or not left)
                    if self.frames >= arguments.total_frames:
                        break
        if adds:
            return None
        batch = buffer.finish()
        if self._truncated_keys:
            truncate(batch[..., -1], self._truncated_keys)
        return batch

    def _frame(
        self, random: bool, adds: bool, non_blocking: bool, written: WriteOutput | None
    ) -> TensorDictBase | None:
        """One step and its copy, inside a hold: what a model returns may be a view of its weights. Returns a clone for
        the replay buffer, if frames are added one by one."""
        root = self._step(random, written)
        try:
            if adds:
                clone: TensorDictBase = self.carrier.clone()
                return clone
            self.buffer.append(self.carrier, non_blocking)
            devices = self.devices
            if devices.storing is not None and not devices.no_cuda_sync:
                devices.sync_storage()
            return None
        finally:  # the environment has made its step, whatever became of the frame
            self._advance(root)

    def _add(self, frame: TensorDictBase, last: bool) -> None:
        """One step straight to the replay buffer, which may keep what it is given."""
        if last or self.frames + frame.numel() >= self.arguments.total_frames:
            truncate(frame, self._truncated_keys)
        self.arguments.replay_buffer.add(frame)
        self.frames += frame.numel()

    # -- a batch without steps ----------------------------------------------------------------------------------------

    def fake(self) -> TensorDictBase:
        """A rollout of zeros: as the latest one was, else as the environment's specs and one call of the policy tell.
        Raises TypeError: the environment has none of these."""
        layout = self.buffer.layout
        batch = self._from_specs() if layout is None else empty_batch(layout).zero_()
        truncate(batch[..., -1], self._truncated_keys)
        return batch

    @torch.no_grad()
    def _from_specs(self) -> TensorDictBase:
        steps = self.arguments.steps
        step = self.carrier.exclude("next").clone().zero_()
        after = environments.fake_next(self.env, step.exclude("collector"))
        # A policy that draws random numbers leaves those that come next as they are.
        with (
            torch.random.fork_rng(devices=[]),
            set_interaction_type(self.arguments.exploration_type),
            self._weights.holds(),
        ):
            self._act(step, random=False)
        written = step.get("next", None)  # by a recurrent policy
        step.set("next", after)
        if written is not None:
            keep_written(written, after, step.copy(), self._own_keys, self.done_keys)
        if self.arguments.track_policy_version:
            after.set("policy_version", step.get("policy_version"))
        compact(step, self._repeated_keys)
        layout = layout_of(step, steps, self.devices.storing)
        if layout is not None:
            return empty_batch(layout).zero_()
        stacked: TensorDictBase = with_time(torch.stack([step.clone().zero_() for _ in range(steps)], step.ndim))
        return stacked


# Entries of a step beside those that policy and environment have for each other.


def compact(carrier: TensorDictBase, keys: Iterable[Key]) -> None:
    """Take these entries out of a step's ``"next"``: the next step has them at its root. The environment may keep what
    it returned, so it is left as it is."""
    after = carrier.get("next").copy()
    for key in keys:
        if after.get(key, None) is not None:
            after.del_(key)
    carrier.set("next", after)


def zero_state(root: TensorDictBase, own: frozenset[tuple[str, ...]], mask: torch.Tensor) -> None:
    """Zero what does not come from the environment, for the environments of a mask, which were reset. ``own`` are the
    environment's entries."""
    for key in root.keys(True, True):
        state = root.get(key)
        if path_of(key) not in own and isinstance(state, torch.Tensor):
            root.set(key, torch.where(beside(mask, state), torch.zeros_like(state), state))


def keep_written(
    written: TensorDictBase,
    after: TensorDictBase,
    root: TensorDictBase,
    own: frozenset[tuple[str, ...]],
    done_keys: list[Key],
) -> None:
    """Recurrent state that a policy left under ``"next"`` goes into the next root, zeroed where a trajectory has ended.

    State that a reset of the environment has, from a TensorDictPrimer, say, is left alone: the environment hands it on.
    Any other environment would show the policy the old state again, or none.
    """
    keys = [key for key in written.keys(True, True) if path_of(key) not in own]
    if not keys:
        return
    ended = _aggregate_end_of_traj(after, done_keys)
    for key in keys:
        state = written.get(key)
        after.set(key, state)
        root.set(key, torch.where(beside(ended, state), torch.zeros_like(state), state))


def truncate(step: TensorDictBase, keys: Iterable[Key]) -> None:
    """Mark a step, which may be a part of a batch, as truncated: under these keys, and what is done beside them."""
    for key in keys:
        for name in ("truncated", "done"):
            flag = step.get(("next", *path_of(key)[:-1], name), None)
            if flag is not None:
                flag.fill_(True)
