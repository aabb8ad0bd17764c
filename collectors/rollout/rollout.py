"""The rollout: how a collector steps through its environment, and the state that it carries from step to step.

One step, after TorchRL's "Collector Internals" page (Per-timestep flow):

    carrier ──(cast, _sync_policy)──▶ policy ──▶ carrier.update ──(cast, _sync_env)──▶ environment.step_and_maybe_reset
    carrier.set("next") ──▶ copied into the batch (_sync_storage), or a clone added to the replay buffer
    carrier = the state after a possible reset, with fresh trajectory ids where one has ended

The environment never sees the carrier's ``"collector"`` entry: it is taken off before a step, and put on the next
carrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type

from asyncsync.collectors.base import BaseCollector
from asyncsync.collectors.batch_layout import BatchLayout, empty_batch
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.environment import Key
from asyncsync.collectors.rollout.buffer import RolloutBuffer
from asyncsync.collectors.rollout.devices import DeviceSetup
from asyncsync.collectors.rollout.lock import Turns
from asyncsync.collectors.trajectories import _aggregate_end_of_traj, _TrajectoryPool

__all__ = ["LAG_SECONDS", "Rollouts"]

LAG_SECONDS = 60.0
"""How long a step waits for a version that max_lag demands."""


class Above(Protocol):
    """Who may want something of a rollout between two of its steps."""

    @property
    def calls(self) -> bool:
        """Whether :meth:`interrupts` is to be asked. Looked at after each step, inside its hold: it never waits."""

    def interrupts(self) -> bool:
        """Whether the rollout ends early. Asked before a step, outside any hold; it may wait."""


class Rollouts(DeviceSetup, BaseCollector):
    """The rolling half of a collector; the other half says when and what for.

    Attributes:
        frames_per_batch: environment steps per rollout.
        requested_frames_per_batch: frames per rollout: steps times environments.
    """

    frames_per_batch: int
    requested_frames_per_batch: int
    total_frames: float
    reset_at_each_iter: bool
    exploration_type: InteractionType
    set_truncated: bool
    track_traj_ids: bool
    replay_buffer: Any
    extend_buffer: bool
    max_lag: int | None
    init_random_frames: int
    _carrier: TensorDictBase
    _wrapped_policy: Any
    _turns: Turns
    _traj_pool_value: _TrajectoryPool | None
    _frames: int
    _random: bool
    _above: Above | None

    def _setup_rollouts(self, traj_pool: _TrajectoryPool | None, profiling: bool) -> None:
        """The first reset, and what follows from its result."""
        self._traj_pool_value = traj_pool
        self._random = False
        self._above = None
        self._make_carrier()
        if profiling:
            self._act = _recorded("Collector.policy", self._act)  # type: ignore[method-assign]
            self._step_env = _recorded("Collector.env_step", self._step_env)  # type: ignore[method-assign]
            self._advance = _recorded("Collector.carrier", self._advance)  # type: ignore[method-assign]
            self._roll = _recorded("Collector.rollout", self._roll)  # type: ignore[method-assign]

    # -- the carrier --------------------------------------------------------------------------------------------------

    def _make_carrier(self) -> None:
        """Reset the environment; its result is the carrier, with trajectory ids and the policy's version."""
        root = self._reset()
        self._batch_size = environments.batch_size_of(self.env)
        self._n_env = self._batch_size.numel()
        if root.batch_size != self._batch_size:
            raise ValueError(
                f"{type(self.env).__name__}.reset() returned a TensorDict with batch size {tuple(root.batch_size)}, "
                "but its own batch_size "
                f"is {tuple(self._batch_size)}"
            )
        self._carrier_has_no_device = self.env_device is None or self.policy_device not in (None, self.env_device)
        self._done_keys = environments.done_keys(self.env, root)
        self._state_keys = _keys_that_end_state(self._done_keys)
        self._own_keys = _own_keys(self.env, root, self._done_keys)
        self._truncated_keys = environments.truncated_keys(self.env, root) if self.set_truncated else []
        if self.set_truncated and not self._truncated_keys:
            raise RuntimeError(
                f"set_truncated=True, but {type(self.env).__name__} has no 'truncated' entry: give it one "
                "(env.add_truncated_keys() of a "
                "TorchRL environment), or leave set_truncated out"
            )
        self._metadata = TensorDict({}, self._batch_size, device=self.env_device)
        self._acting_version = -1
        self._begin_trajectories(root)

    @torch.no_grad()
    def _reset(self) -> TensorDictBase:
        """Reset all environments; a model in them does not change meanwhile."""
        with self._weights.holds():
            root: TensorDictBase = self.env.reset()
        return root

    def _reset_all(self) -> None:
        self._begin_trajectories(self._reset())

    def _begin_trajectories(self, root: TensorDictBase) -> None:
        """The carrier after a reset of all environments."""
        if self.track_traj_ids:
            fresh = self._traj_pool().get_traj_and_increment(self._n_env, device=self.env_device)
            self._metadata.set("traj_ids", fresh.view(self._batch_size))
        self._carry(root)

    def _carry(self, root: TensorDictBase) -> None:
        """Make this the carrier."""
        if self._carrier_has_no_device and root.device is not None:
            root = root.copy().clear_device_()  # a copy: the environment may keep its own
        root.set("collector", self._metadata)
        self._carrier = root

    def _traj_pool(self) -> _TrajectoryPool:
        """Where fresh trajectory ids come from: this collector's own pool, or the one that it was given."""
        if self._traj_pool_value is None:
            self._traj_pool_value = _TrajectoryPool()
        return self._traj_pool_value

    def _update_traj_ids(self, env_output: TensorDictBase) -> None:
        """Fresh ids for the environments whose trajectory has ended with this step."""
        after = env_output.get("next")
        for key in self._done_keys:  # most steps end here, so without a tensor that is not needed
            done = after.get(key, None)
            if done is None or (done if done.numel() == 1 else done.any()):
                break
        else:
            return
        ended = _aggregate_end_of_traj(after, self._done_keys)
        ids = self._metadata.get("traj_ids")
        fresh = self._traj_pool().get_traj_and_increment(int(ended.count_nonzero()), device=ids.device)
        # a new tensor: the old one may belong to somebody's snapshot
        self._metadata.set("traj_ids", ids.masked_scatter(ended.to(ids.device), fresh).view(ids.shape))

    # -- one step -----------------------------------------------------------------------------------------------------

    def _act(self, carrier: TensorDictBase, random: bool) -> None:
        """The policy reads the carrier and writes into it."""
        if random:
            environments.rand_action(self.env, carrier)
            return
        if not self._cast_to_policy_device or self.policy_device is None:
            output = self._wrapped_policy(carrier)
            if output is not carrier:
                carrier.update(self._checked(output))
            return
        given = self._cast(carrier, self.policy_device, self._sync_policy)
        before = dict(given.items(True, True))
        output = self._checked(self._wrapped_policy(given))
        if output is not carrier:
            # Only what the policy wrote: the rest of the carrier stays on its device.
            written = [key for key, value in output.items(True, True) if value is not before.get(key)]
            carrier.update(output.select(*written))

    def _checked(self, output: Any) -> TensorDictBase:
        if not isinstance(output, TensorDictBase):
            raise TypeError(
                f"the policy returned a {type(output).__name__}, not a TensorDict: a policy whose only parameter is a "
                "TensorDict must return "
                "it; any other is wrapped if its parameters fit the observations"
            )
        return output

    def _step_env(self, carrier: TensorDictBase) -> TensorDictBase:
        """Step the environment; returns the root of the next step. The carrier has ``"next"`` then."""
        written = carrier.get("next", None)  # by a recurrent policy
        given = carrier
        if self._cast_to_env_device and self.env_device is not None:
            given = self._cast(carrier, self.env_device, self._sync_env)
        output, root = self.env.step_and_maybe_reset(given)
        if output is not carrier:
            after = output.get("next")
            if self._carrier_has_no_device and after.device is not None:
                after = after.copy().clear_device_()
            carrier.set("next", after)
        if written is not None:
            _keep_written(written, carrier.get("next"), root, self._own_keys, self._state_keys)
        return root

    def _advance(self, carrier: TensorDictBase, root: TensorDictBase) -> None:
        """From one step's carrier to the next's."""
        if self.track_traj_ids:
            self._update_traj_ids(carrier)
        self._carry(root)

    def _step(self, random: bool) -> tuple[TensorDictBase, TensorDictBase]:
        """Policy and environment, once; returns what is to be stored, and the root of the next step.

        If it raises, the carrier is as good as before.
        """
        carrier = self._carrier
        version = self._weights.version()
        if version != self._acting_version:
            self._metadata.set(
                "policy_version", torch.full(self._batch_size, version, dtype=torch.int64, device=self._metadata.device)
            )
            self._acting_version = version
            carrier.set("collector", self._metadata)
        if "next" in carrier.keys():  # noqa: SIM118 - of a step that Ctrl-C has ended: nothing that a policy wrote
            carrier.del_("next")
        known = dict(carrier.items())
        try:
            self._act(carrier, random)
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
        return carrier, root

    # -- one rollout --------------------------------------------------------------------------------------------------

    def _allocate(self, layout: BatchLayout) -> TensorDictBase:
        """Memory for a batch: see :mod:`asyncsync.collectors.rollout.buffer`."""
        return empty_batch(layout)

    def _make_store(self) -> None:
        self._store = RolloutBuffer(
            self.frames_per_batch, self._batch_size, self.storing_device, lambda layout: self._allocate(layout)
        )

    def _acts_randomly(self) -> bool:
        """Whether this rollout ignores the policy: whole rollouts do."""
        return self._random or self._frames < self.init_random_frames

    @torch.no_grad()
    def _roll(self) -> TensorDictBase | None:
        """One rollout, by the thread whose turn it is."""
        self._weights.check()
        if self.reset_at_each_iter:
            self._reset_all()
        turns, above, store = self._turns, self._above, self._store
        random, adds, left = self._acts_randomly(), self._adds, self.frames_per_batch
        device = self.storing_device
        non_blocking = device is not None and self._non_blocking(device, self._sync_storage)
        store.begin()
        with set_interaction_type(self.exploration_type):
            while left:
                if turns.wanted:
                    turns.give_way()
                if left < self.frames_per_batch and above is not None and above.interrupts():
                    break
                if self.max_lag is not None:
                    self._weights.keep_up(self.max_lag, LAG_SECONDS)
                # Steps share a hold until somebody waits for its end: to enter one takes as long as a small policy.
                with self._weights.holds() as holds:
                    while True:
                        left -= 1
                        frame = self._frame(random, adds, non_blocking)
                        if adds or not left or holds.awaited or turns.wanted or self.max_lag is not None:
                            break
                        if above is not None and above.calls:
                            break
                if frame is not None:  # outside: a buffer may wait, or change weights
                    self._add(frame, last=not left)
                    if self._frames >= self.total_frames:
                        break
        if adds:
            return None
        batch = store.finish()
        self._truncate(batch, -1)
        return batch

    def _frame(self, random: bool, adds: bool, non_blocking: bool) -> TensorDictBase | None:
        """One step, and its copy, inside a hold: what a model returns may be a view of its weights.

        Returns:
            A clone for the replay buffer, if frames are added one by one.
        """
        stepped = None
        try:
            stepped = self._step(random)
            if adds:
                clone: TensorDictBase = stepped[0].clone()
                return clone
            self._store.append(stepped[0], non_blocking)
            if self.storing_device is not None and not self.no_cuda_sync:
                self._sync_storage()
            return None
        finally:
            if stepped is not None:  # the environment has moved on, whatever became of the frame
                self._advance(*stepped)

    @property
    def _adds(self) -> bool:
        """Whether frames go to the replay buffer one by one."""
        return self.replay_buffer is not None and not self.extend_buffer

    def _add(self, frame: TensorDictBase, last: bool) -> None:
        """One step straight to the replay buffer, which may keep what it is given."""
        if last or self._frames + frame.numel() >= self.total_frames:
            self._truncate(frame, None)
        self.replay_buffer.add(frame)
        self._frames += frame.numel()

    def _truncate(self, batch: TensorDictBase, last: int | None) -> None:
        """Mark the last step of a batch (or this one step) as truncated."""
        for key in self._truncated_keys:
            path = (key,) if isinstance(key, str) else tuple(key)
            n = len(self._batch_size)
            for name in ("truncated", "done"):
                flag = batch.get(("next", *path[:-1], name), None)
                if flag is not None:
                    (flag if last is None else flag.select(n, last)).fill_(True)


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in a named range of torch's profiler."""

    def recorded(*args: Any) -> Any:
        with torch.profiler.record_function(name):
            return function(*args)

    return recorded


def _keep_written(
    written: TensorDictBase,
    after: TensorDictBase,
    root: TensorDictBase,
    own: frozenset[tuple[str, ...]],
    state_keys: list[Key],
) -> None:
    """Recurrent state that a policy left under ``"next"`` goes into the next root, zeroed where a trajectory has ended.

    Not what is the environment's own: one that has it from a reset (by a TensorDictPrimer, say) hands it on by itself.
    Any other would show the policy the old state again, or none.
    """
    keys = [key for key in written.keys(True, True) if _path(key) not in own]
    if not keys:
        return
    ended = _aggregate_end_of_traj(after, state_keys)
    for key in keys:
        state = written.get(key)
        after.set(key, state)
        mask = ended.to(state.device).reshape(*ended.shape, *[1] * (state.ndim - ended.ndim))
        root.set(key, torch.where(mask, torch.zeros_like(state), state))


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _own_keys(environment: Any, root: TensorDictBase, done_keys: list[Key]) -> frozenset[tuple[str, ...]]:
    """What a policy cannot write under ``"next"``, because it is the environment's result: what a reset returns, the
    rewards, and what says that a trajectory has ended."""
    rewards = getattr(environment, "reward_keys", None) or [getattr(environment, "reward_key", "reward")]
    ends = {(*_path(key)[:-1], name) for key in done_keys for name in ("done", "terminated", "truncated")}
    return frozenset({*map(_path, root.keys(True, True)), *map(_path, rewards), *map(_path, done_keys), *ends})


def _keys_that_end_state(done_keys: list[Key]) -> list[Key]:
    """By which recurrent state is zeroed: those at the root, where there are any. One dead agent of several has a
    trajectory of its own that ends, but not an episode: the others remember."""
    return [key for key in done_keys if len(_path(key)) == 1] or done_keys
