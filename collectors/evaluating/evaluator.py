"""Evaluator: how good the newest weights are, found out in a process of its own while training goes on.

    async with await Evaluator.create(make_env, policy, num_trajectories=10) as evaluator:
        async def show():
            async for result in evaluator:             # as they come, until the evaluator's end
                print(result["eval/step"], result["eval/reward"])
        ...
        evaluator.trigger_eval(step=frames)            # copies the policy's weights, and returns at once

    with Evaluator(make_env, policy) as evaluator:     # the same without an event loop
        evaluator.trigger_eval(step=frames)
        result = evaluator.poll()                      # None: not done yet
        result = evaluator.evaluate()                  # or waits

Names and meaning follow TorchRL's ``Evaluator``. Here evaluation never shares the interpreter with training: the
environment and the policy are in a worker, a process of this host or one of Ray's actors, which receives weights by a
scheme.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from asyncsync.arguments import KnownKeywords
from asyncsync.collectors.arguments import Device, check_policy_factory, frames_or_none, whole
from asyncsync.collectors.base import SHUTDOWN_SECONDS
from asyncsync.collectors.construct import FAMILIES
from asyncsync.collectors.evaluating.episodes import EpisodeCollector, Key
from asyncsync.collectors.evaluating.requests import Evaluations, Request
from asyncsync.collectors.lifetime import Lifetime
from asyncsync.errors import ClosedError
from asyncsync.model.strategy import WeightStrategy, flat_weights
from asyncsync.runtime import loop_thread
from asyncsync.schemes.sources import as_tensordict
from asyncsync.sync import RayWeightSyncScheme, SharedMemWeightSyncScheme
from asyncsync.weights.packing import copy_flat

STEPS = 200
"""Of the environment, between two of which ends of episodes are looked for."""

BUSY = ("skip", "newest", "queue", "error")


WORKERS: dict[str, tuple[str, dict[str, Any], Callable[[], Any]]] = {
    "process": ("sync", {}, SharedMemWeightSyncScheme),
    "ray": ("ray", {"sync": True}, RayWeightSyncScheme),
}
"""By the backend: which collector has the worker, with which arguments, and how weights come to it."""


class Evaluator(KnownKeywords, Lifetime):
    """Evaluates policies in a worker: a process of this host, which needs Linux, or one of Ray's actors.

    A result is a dict of ``eval/reward`` (the mean return), ``eval/reward_std``, ``eval/num_episodes``,
    ``eval/episode_length`` (mean), ``eval/fps``, ``eval/policy_version`` (of the weights that were evaluated),
    ``eval/step``, and what ``metrics_fn`` adds. All episodes of one see the same weights.

    Args:
        env: a callable that returns an environment, or a Gymnasium id; it is made in the worker. It may be a batch of
            several. Statistics that it keeps (VecNorm) are to be frozen there.
        policy: module or callable, which travels by cloudpickle; where no weights are given, its own are evaluated.
            With ``policy_factory`` it stays here.
        policy_factory: makes the policy, in the worker; called with the environment, or without arguments.
        num_trajectories: episodes of one evaluation. Several environments take equal shares.
        max_steps: after which an episode is truncated; None: no limit.
        frames_per_batch: steps of the environment, between two of which ends are looked for; None: 200, or max_steps.
        collector_kwargs: further arguments of the collector with the worker. A ``MultiSyncCollector`` has
            ``start_method`` and ``connect_timeout``; a ``RayCollector``, ``remote_configs={"num_gpus": 1}``,
            ``ray_init_config`` and ``restarts``.
        weight_sync_schemes: ``{model_id: scheme}``; None: for the policy, shared memory, or Ray's scheme.
        log_prefix: of the names in a result.
        reward_keys: of the reward in a step. Where steps have ("next", "episode_reward"), its last value is the return.
        done_keys: of the flag that ends an episode; None: as the environment does.
        device: where the policy acts.
        exploration_type: for the policy.
        metrics_fn: called in the worker with the episodes, ``[episodes, longest]``, zero-padded, of which
            ("collector", "mask") shows the steps; returns what is added to the result.
        dump_video: call ``env.transform.dump(step=…)`` after an evaluation, if there is that, as TorchRL's
            ``VideoRecorder`` has it.
        on_result: called with each result as a TensorDict, in a thread of its own; the next evaluation begins when it
            has returned. What it raises is raised where the result is taken.
        busy_policy: what :meth:`trigger_eval` does while another evaluation is under way. "skip": nothing; "newest":
            these weights are next, instead of those that wait already; "queue": they are evaluated after those;
            "error": it raises RuntimeError.
        backend: where the worker is: "process", or "ray" (an actor, anywhere in the cluster; extra: ray).
        init_fn: called in the worker first.

    Raises:
        TypeError, ValueError: as of that collector; what must be made in the worker, but is here already; an unknown
            backend.
        ImportError: Ray is not installed.
        NotImplementedError: the worker is to be a process, and this is not Linux.
        Exception: what the worker raises before it is ready, with its type.
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        collector_kwargs: Mapping[str, Any] | None = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        log_prefix: str = "eval",
        reward_keys: Key = ("next", "reward"),
        done_keys: Key | None = None,
        device: Device | None = None,
        exploration_type: InteractionType | None = InteractionType.DETERMINISTIC,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDictBase], object] | None = None,
        busy_policy: str = "skip",
        backend: str = "process",
        init_fn: Callable[[], None] | None = None,
    ) -> None:
        self.closed = True  # until there is something to close
        if backend not in WORKERS:
            raise ValueError(
                f"unknown backend {backend!r} of evaluators: 'process' or 'ray'. There is none in this process, so "
                "that training and evaluation do not wait for each other"
            )
        collector, own, scheme = WORKERS[backend]
        if busy_policy not in BUSY:
            raise ValueError(f"unknown busy_policy {busy_policy!r}: choose one of {', '.join(map(repr, BUSY))}")
        is_made = hasattr(env, "step_and_maybe_reset") or hasattr(env, "action_space")
        if not isinstance(env, str) and (not callable(env) or (is_made and not isinstance(env, type))):
            raise TypeError(
                f"env must be a callable that makes an environment, or a Gymnasium id, not {type(env).__name__}: it is "
                "made in the evaluator's process"
            )
        if policy is None and policy_factory is None:
            raise TypeError("Evaluator has nothing to evaluate: pass policy= or policy_factory=")
        check_policy_factory("policy_factory", policy_factory)
        if weight_sync_schemes is None and policy_factory is not None:
            weight_sync_schemes = {"policy": scheme()}
        limit = frames_or_none("max_steps", max_steps)
        if frames_per_batch is None:
            frames_per_batch = min(STEPS, limit or STEPS)
        self._busy_policy = busy_policy
        self._steps = 0
        self._collector = FAMILIES[collector](
            [env],
            policy,
            policy_factory=policy_factory,
            frames_per_batch=frames_per_batch,
            max_frames_per_traj=limit,
            exploration_type=exploration_type,
            policy_device=device,
            weight_sync_schemes=weight_sync_schemes,
            init_fn=init_fn,
            collector_class=partial(
                EpisodeCollector,
                episodes=whole("num_trajectories", num_trajectories, 1),
                reward_keys=reward_keys,
                done_keys=done_keys,
                metrics_fn=metrics_fn,
                dump_video=dump_video,
            ),
            **own,
            **(collector_kwargs or {}),
        )
        self._evaluations = Evaluations(self._collector, log_prefix, on_result)
        try:
            self._evaluations.begin()
        except BaseException:
            self._collector.shutdown()
            raise
        self.closed = False

    # -- one evaluation, and its result -------------------------------------------------------------------------------

    def evaluate(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Evaluate these weights after what is under way or waits, and return the result.

        Args:
            weights: of the policy: a module, a TensorDict or a (state) dict; None: those of the registered policy as
                they are now, or, with only a ``policy_factory``, the worker's.
            step: that the result shows; None: counted, from 0.
            weights_dict: ``{model_id: weights}``, all of which are evaluated together.
            timeout: seconds; None: no limit but the evaluator's end.

        Raises:
            ValueError, SchemaMismatch: weights that the worker cannot take.
            AckTimeout: not within the timeout; the result is dropped.
            PeerLost: the worker has died.
            ClosedError: after :meth:`shutdown`.
            Exception: what the environment, the policy, ``metrics_fn`` or ``on_result`` raises. The next evaluation
                begins anew.
        """
        request = self._begun(weights, weights_dict, step, timeout)
        try:
            loop_thread.run(partial(self._evaluations.until_done, request, timeout))
        finally:
            self._evaluations.withdraw(request)
        return request.outcome()

    async def evaluate_async(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """:meth:`evaluate` for a coroutine of any event loop. Cancelled, it takes the request back, or drops its
        result."""
        request = self._begun(weights, weights_dict, step, timeout)
        try:
            await loop_thread.awaitable(partial(self._evaluations.until_done, request, timeout))
        finally:
            self._evaluations.withdraw(request)
        return request.outcome()

    def _begun(
        self, weights: Any, weights_dict: Mapping[str, Any] | None, step: int | None, timeout: float | None
    ) -> Request:
        self._evaluations.check()
        self._evaluations.check_wait(is_endless=timeout is None)
        request = Request(self._copied(weights, weights_dict), self._step(step), has_caller=True)
        self._evaluations.add(request, newest=False)
        return request

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Have these weights evaluated, and return at once; they may change then. For coroutines, too.

        Args:
            weights, step, weights_dict: as of :meth:`evaluate`.

        Returns:
            Whether they will be; False: another evaluation is under way, and ``busy_policy="skip"``.

        Raises:
            RuntimeError: another evaluation is under way, and ``busy_policy="error"``.
            PeerLost: the worker has died.
            ClosedError: after :meth:`shutdown`.
        """
        self._evaluations.check()
        if self._evaluations.pending and self._busy_policy in ("skip", "error"):
            if self._busy_policy == "skip":
                return False
            raise RuntimeError(
                "another evaluation is under way: wait() for it, or construct the Evaluator with busy_policy='skip', "
                "'newest' or 'queue'"
            )
        request = Request(self._copied(weights, weights_dict), self._step(step))
        self._evaluations.add(request, newest=self._busy_policy == "newest")
        return True

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """The next result of a :meth:`trigger_eval`; None: there is none within so many seconds. Raises as
        :meth:`wait`."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next result of a :meth:`trigger_eval`, in the order in which they were asked for; None: nothing is
        pending, or not within the timeout (seconds).

        Raises:
            PeerLost: the worker has died.
            ClosedError: after :meth:`shutdown`, when all results have been taken.
            Exception: what that evaluation has raised.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not (found := self._found(deadline)):
            loop_thread.run(partial(self._evaluations.until_ready, deadline, idle=True))
        return found[0]

    async def wait_async(self, timeout: float | None = None) -> dict[str, Any] | None:
        """:meth:`wait` for a coroutine of any event loop. Cancelling loses no result."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not (found := self._found(deadline)):
            await loop_thread.awaitable(partial(self._evaluations.until_ready, deadline, idle=True))
        return found[0]

    def _found(self, deadline: float) -> list[dict[str, Any] | None]:
        """What :meth:`wait` returns; empty: it is to be waited for, again where others have waited for the same."""
        is_last = time.monotonic() >= deadline or not self.pending  # before a look for a result, which may come now
        if (result := self._taken()) is not None:
            return [result]
        if is_last:
            self._evaluations.check()
            return [None]
        self._evaluations.check_wait(is_endless=deadline == math.inf)
        return []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        """The next result, whenever it is asked for; ends with :meth:`shutdown`. Raises as :meth:`wait`, and goes on
        after an evaluation that has failed."""
        while (result := self._taken()) is None:
            try:
                await loop_thread.awaitable(partial(self._evaluations.until_ready, math.inf, idle=False))
            except ClosedError:
                if self.closed:
                    raise StopAsyncIteration from None
                raise
        return result

    def _taken(self) -> dict[str, Any] | None:
        request = self._evaluations.pop()
        return None if request is None else request.outcome()

    @property
    def pending(self) -> bool:
        """Whether an evaluation is under way, or waits for its turn."""
        return self._evaluations.pending

    # -- weights ------------------------------------------------------------------------------------------------------

    @staticmethod
    def extract_weights(policy: Any) -> TensorDictBase:
        """A copy on the CPU of the weights of a module, TensorDict or (state) dict, which an optimiser's later steps
        leave alone."""
        return as_tensordict(copy_flat(flat_weights(WeightStrategy(), policy))).cpu()

    def _copied(self, weights: Any, weights_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        given = dict(weights_dict or {})
        if weights is not None and "policy" in given:
            raise ValueError("weights and weights_dict['policy'] are both given: both are the policy's")
        if weights is not None:
            given["policy"] = weights
        if not given and isinstance(policy := self._collector.policy, nn.Module) and self._has_scheme:
            given["policy"] = policy
        return {model_id: self.extract_weights(source) for model_id, source in given.items()}

    @property
    def _has_scheme(self) -> bool:
        return "policy" in self._collector._sender_schemes

    def _step(self, step: int | None) -> int:
        if step is not None:
            return step
        self._steps += 1
        return self._steps - 1

    # -- checkpoints and the end --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``step_counter``. Raises RuntimeError: evaluations are pending, or results were not taken."""
        self._check_idle()
        return {"step_counter": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from what :meth:`state_dict` returned. Raises as that."""
        self._check_idle()
        self._steps = state_dict["step_counter"]

    def _check_idle(self) -> None:
        if self.pending or self._evaluations.left():
            raise RuntimeError(
                "an evaluator's state is known when nothing is pending and all results have been taken: wait() first"
            )

    def shutdown(self, timeout: float | None = None) -> None:
        """End the worker, before the next step of an evaluation under way. Idempotent; leaves no process.

        Args:
            timeout: seconds; None: 5. A worker that has not ended by itself after most of it is killed.

        Raises:
            Exception: what an evaluation has raised whose result nobody has taken.
        """
        if self.closed:
            return
        self.closed = True
        failure = self._evaluations.failure
        self._collector.shutdown(timeout)
        self._evaluations.wait_for_end(SHUTDOWN_SECONDS if timeout is None else timeout)
        if failure is not None:
            raise failure
