"""Calling: what a collector has its workers do between two rollouts, and waits for."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from asyncsync.collectors.arguments import check_count
from asyncsync.collectors.base import BaseCollector, PostHook, PreHook, Signals
from asyncsync.collectors.multi.weights import WorkersWeights
from asyncsync.collectors.workers.channel import dumps, loads
from asyncsync.collectors.workers.failures import Failure
from asyncsync.errors import AckTimeout

__all__ = ["CALL_SECONDS", "Calling"]

CALL_SECONDS = 60.0
"""How long a call waits for its answer, which a worker gives between two rollouts."""


class Calling(WorkersWeights, BaseCollector):
    """Part of :class:`asyncsync.collectors.MultiCollector`."""

    _frames: int
    _iter: int
    _random: bool | None  # for a worker: whether its trainer wants the policy left out

    @abstractmethod
    def _count_free(self) -> None:
        """Have ``_frames`` right, whoever counts them at the moment."""

    def _call(
        self, name: str, *arguments: Any, workers: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Have workers do something between two rollouts; returns their answers."""
        message = dumps((name, *arguments)) if arguments else (name,)
        chosen = range(self.num_workers) if workers is None else workers
        deadline = time.monotonic() + (CALL_SECONDS if timeout is None else timeout)
        replies = [self._group.call(worker, message) for worker in chosen]
        results = []
        try:
            for worker, reply in zip(chosen, replies, strict=True):
                try:
                    failure, result = self._group.wait(reply, max(0.0, deadline - time.monotonic()))
                except AckTimeout:
                    raise AckTimeout(
                        f"worker {worker} has not answered ({name}): it does so between two rollouts. It does what it "
                        "was asked for all the same; timeout= gives it longer"
                    ) from None
                if failure is not None:
                    assert isinstance(failure, Failure)
                    raise failure.error(f"worker {worker}")
                results.append(loads(result))
        finally:
            for reply in replies:
                reply.forget()
        return results

    def set_seed(self, seed: int, static_seed: bool = False, *, timeout: float = CALL_SECONDS) -> int:
        """Seed the environments one after another, each with what the one before has returned, and torch's, NumPy's and
        Python's generators in the workers; each resets then. Returns the last one's seed for the next.

        Args:
            seed: of the first.
            static_seed: all have the same.
            timeout: seconds for each worker; it answers between two rollouts.

        Raises:
            AckTimeout: not within the timeout; workers do what they were asked for all the same.
        """
        for worker in range(self.num_workers):
            [seed] = self._call("seed", seed, static_seed, workers=[worker], timeout=timeout)
        return seed

    def reset(self, reset_idx: Sequence[bool] | None = None, *, timeout: float = CALL_SECONDS) -> None:
        """Reset the environments of all workers, or of those whose entry is true.

        Args:
            reset_idx: one entry per worker.
            timeout: seconds; workers answer between two rollouts.

        Raises:
            ValueError: another number of entries than there are workers.
            AckTimeout: not within the timeout; workers do it all the same.
        """
        if reset_idx is not None:
            check_count("reset_idx", reset_idx, self.num_workers)
        chosen = [w for w in range(self.num_workers) if reset_idx is None or reset_idx[w]]
        self._call("reset", workers=chosen, timeout=timeout)

    def state_dict(self, *, timeout: float = CALL_SECONDS) -> dict[str, Any]:
        """``worker0``, ``worker1``, …: each worker's collector's; ``frames``, ``iter`` and ``versions``.

        Args:
            timeout: seconds; workers answer between two rollouts.

        Raises:
            AckTimeout: not within the timeout.
        """
        states = self._call("state", timeout=timeout)
        self._count_free()
        own = {"frames": self._frames, "iter": self._iter, "versions": self._versions()}
        return {f"worker{w}": s for w, s in enumerate(states)} | own

    def load_state_dict(self, state_dict: Mapping[str, Any], *, timeout: float = CALL_SECONDS) -> None:
        """Go on from what :meth:`state_dict` returned, with new trajectories.

        Where all workers had the same policy, the registered one is loaded, too, and sent; where each had its own, each
        is sent that. Versions go on, too: no frame that is collected from now on has the label of one from before.

        Args:
            state_dict: of a collector with as many workers.
            timeout: seconds; workers answer between two rollouts.

        Raises:
            KeyError: a worker's state is missing. Nothing was changed.
            AckTimeout: not within the timeout; workers do it all the same.
        """
        names = [f"worker{w}" for w in range(self.num_workers)]
        if missing := [name for name in (*names, "frames", "iter") if name not in state_dict]:
            raise KeyError(f"the state dict of a {type(self).__name__} with {len(names)} workers has no {missing}")
        # First, as each worker begins new trajectories when it loads.
        self._group.trajectory_pool()._advance(0, max(_trajectories(state_dict), default=0))
        for worker, name in enumerate(names):
            self._call("load", state_dict[name], workers=[worker], timeout=timeout)
        self._frames, self._iter = state_dict["frames"], state_dict["iter"]
        self._group.frames = self._frames
        policies = [policy for name in names for policy in _policies(state_dict[name])]
        own = self.policy.state_dict() if isinstance(self.policy, nn.Module) else {}
        all_have = bool(policies) and own.keys() == policies[0].keys() and all(_equal(policies[0], p) for p in policies)
        is_sent = "policy" in self._sender_schemes and (all_have or len(policies) == len(names))
        if "versions" in state_dict:
            self._carry_on(state_dict["versions"], is_sent=is_sent)
        if not is_sent:
            self.increment_version()
        elif all_have:
            self.policy.load_state_dict(policies[0])
            self.update_policy_weights_(timeout=timeout)
        else:
            each = {worker: TensorDict(policy) for worker, policy in enumerate(policies)}
            self.update_policy_weights_(each, timeout=timeout)

    # -- as a worker --------------------------------------------------------------------------------------------------

    def _attach(self, signals: Signals, sink: Callable[[Any], TensorDictBase | None]) -> None:
        self._signals = signals  # the batches are its own workers', which are attached themselves

    def _rollout_for_parent(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]:
        self._random = random
        self._group.counted = self._signals.counted()  # for its own workers
        before = self._frames
        batch = self.next()
        if writes:
            return None, self._frames - before
        return batch, 0 if batch is None else batch.numel()

    def _interrupt(self, timeout: float, close_env: bool) -> None:
        self.shutdown(timeout, close_env)

    @property
    def pre_collect_hook(self) -> PreHook | None:
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._call("pre_hook", hook)
        self._pre_collect_hook = hook

    @property
    def post_collect_hook(self) -> PostHook | None:
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._call("post_hook", hook)
        self._post_collect_hook = hook


def _policies(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The policies in a worker's state: of its own, or of its workers'."""
    if "policy_state_dict" in state:
        return [state["policy_state_dict"]]
    return [policy for name, below in state.items() if name.startswith("worker") for policy in _policies(below)]


def _trajectories(state: Mapping[str, Any]) -> list[int]:
    """The next identifiers in a state, here and below."""
    own = [int(state["traj_pool"]["traj_id"])] if "traj_pool" in state else []
    return own + [n for name, below in state.items() if name.startswith("worker") for n in _trajectories(below)]


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        try:
            return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
        except Exception:  # extra state that cannot be compared
            return False

    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
