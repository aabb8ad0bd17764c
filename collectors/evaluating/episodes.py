"""EpisodeCollector: what an evaluator's worker runs. Complete episodes, and what they tell about a policy.

collector = EpisodeCollector(make_env, policy, frames_per_batch=200, episodes=10, reward_keys=("next", "reward"))
collector.evaluate(step=3)                         # {"reward": 21.4, "episode_length": 21.4, …}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.arguments import fits
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.single import Collector
from asyncsync.collectors.trajectories import _aggregate_end_of_traj, padded, path_of
from asyncsync.errors import ClosedError

Key = str | tuple[str, ...]

RETURN: Key = ("next", "episode_reward")
"""Where TorchRL's RewardSum, for one, has the return up to a step."""


class EpisodeCollector(Collector):
    """Steps whole episodes, with a policy that does not learn.

    Args:
        create_env_fn, policy, create_env_kwargs, arguments: as of :class:`asyncsync.collectors.Collector`.
        policy_factory: makes the policy; called with the environment, if it takes an argument.
        frames_per_batch: steps of the environment, between two of which ends are looked for.
        episodes: how many an evaluation takes.
        reward_keys, done_keys, metrics_fn, dump_video: as of :class:`asyncsync.collectors.Evaluator`.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        frames_per_batch: int,
        create_env_kwargs: Mapping[str, Any] | None = None,
        episodes: int,
        reward_keys: Key,
        done_keys: Key | None = None,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        dump_video: bool = True,
        **arguments: Any,
    ) -> None:
        env = environments.make_environment(create_env_fn, create_env_kwargs)
        self._episodes = episodes
        self._reward_keys, self._done_keys = reward_keys, done_keys
        self._metrics_fn = metrics_fn
        self._dump_video = dump_video
        super().__init__(
            lambda: env,
            policy,
            policy_factory=None
            if policy_factory is None
            else lambda: policy_factory() if fits(policy_factory) else policy_factory(env),
            frames_per_batch=frames_per_batch * environments.batch_size_of(env).numel(),
            **arguments,
        )
        self._rollouts.policy.train(False)

    def evaluate(self, step: int) -> dict[str, Any]:
        """Reset, and roll out the episodes; all of them see the same version of the weights. Returns ``reward`` (the
        mean return), ``reward_std``, ``num_episodes``, ``episode_length`` (mean), ``fps``, ``policy_version``, and what
        ``metrics_fn`` returns.

        Of several environments, each contributes its first episodes: taking those that end first would favour short
        ones. ``step``: for videos.

        Raises KeyError: a step has no reward; ClosedError: the end has come; Exception: what the user's code raises.
        """
        begun = time.perf_counter()
        with self.acting_weights.holds():
            self.reset()
            episodes = self._first_episodes()
            version = self.policy_version
        seconds = time.perf_counter() - begun
        returns = torch.tensor([self._return(episode) for episode in episodes])
        found: dict[str, Any] = {
            "reward": returns.mean().item(),
            "reward_std": returns.std().item() if len(episodes) > 1 else 0.0,
            "num_episodes": len(episodes),
            "episode_length": sum(len(episode) for episode in episodes) / len(episodes),
            "fps": sum(len(episode) for episode in episodes) / seconds,
            "policy_version": version,
        }
        if self._metrics_fn is not None:
            flat: Any = torch.cat(episodes)
            flat.set(("collector", "mask"), torch.ones(flat.shape, dtype=torch.bool, device=flat.device))
            found |= self._metrics_fn(padded(flat, [len(episode) for episode in episodes]))
        dump = getattr(getattr(self.env, "transform", None), "dump", None)
        if self._dump_video and callable(dump):
            dump(step=step)
        return found

    def _first_episodes(self) -> list[TensorDictBase]:
        count = self._rollouts.n_env
        missing = [(self._episodes + index) // count for index in range(count)]
        found: list[list[TensorDictBase]] = [[] for _ in missing]
        begun: list[list[TensorDictBase]] = [[] for _ in missing]  # parts of an episode that has not ended
        signals = self._rollouts.signals
        flags: list[Key] = [("next", *path_of(key)) for key in self._rollouts.keys.done]
        if self._done_keys is not None:
            flags = [self._done_keys]
        while any(missing):
            batch = self.rollout()
            assert batch is not None
            if signals is not None and signals.interrupts():
                raise ClosedError("the evaluator has been shut down")
            batch.names = None
            if self._metrics_fn is None:
                batch = batch.select(self._reward_keys, RETURN, *flags, strict=False)
            batch = batch.reshape(count, batch.shape[-1])
            for index, ends in enumerate(_aggregate_end_of_traj(batch, flags)):
                begin = 0
                for end in ends.nonzero().flatten().tolist()[: missing[index]]:
                    found[index].append(torch.cat([*begun[index], batch[index, begin : end + 1]]))
                    begun[index], begin = [], end + 1
                    missing[index] -= 1
                if missing[index]:
                    begun[index].append(batch[index, begin:])
        return [episode for own in found for episode in own]

    def _return(self, episode: TensorDictBase) -> float:
        summed = episode.get(RETURN, None)
        if summed is not None:
            return float(summed[-1].sum())
        reward = episode.get(self._reward_keys, None)
        if reward is None:
            raise KeyError(
                f"{type(self.env).__name__} has no {self._reward_keys!r} in its steps: pass its key as reward_keys="
            )
        return float(reward.sum())
