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
from typing import Annotated, Any, Self, TypedDict, Unpack

from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from asyncsync.arguments import Option, declared, described
from asyncsync.collectors.arguments import Device, check_policy_factory, frames_or_none, whole
from asyncsync.collectors.base import SHUTDOWN_SECONDS, Lifetime
from asyncsync.collectors.evaluating.episodes import EpisodeCollector, Key
from asyncsync.collectors.evaluating.requests import Evaluations, Request
from asyncsync.collectors.options import InitFn, family
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


def _check_busy(name: str, value: Any) -> None:
    if value not in BUSY:
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(map(repr, BUSY))}")


def _check_backend(_: str, value: Any) -> None:
    if value not in WORKERS:
        raise ValueError(
            f"unknown backend {value!r} of evaluators: choose 'process' or 'ray'. An evaluator always has a worker, so "
            "that training does not wait for evaluation"
        )


@described
class EvaluatorOptions(TypedDict, total=False):
    """Of an evaluator.

    Args:
        policy_factory: makes the policy in the worker; called with the environment, or without arguments.
        num_trajectories: episodes per evaluation. Several environments take equal shares.
        max_steps: an episode is truncated after this many steps. None: no limit.
        frames_per_batch: environment steps between two checks for finished episodes. None: 200, or max_steps if less.
        collector_kwargs: further arguments of the collector that runs the worker: for "process" those of
            ``MultiSyncCollector``, such as ``start_method`` and ``connect_timeout``; for "ray" those of
            ``RayCollector``, such as ``remote_configs={"num_gpus": 1}``, ``ray_init_config`` and ``restarts``.
        weight_sync_schemes: ``{model_id: scheme}``; None: shared memory ("process") or Ray's scheme, for the policy.
        log_prefix: prefix of the names in a result.
        reward_keys: key of the reward. If steps have ("next", "episode_reward"), the return is its last value.
        done_keys: key of the flag that ends an episode. None: the environment's.
        device: device on which the policy acts.
        exploration_type: exploration type under which the policy acts.
        metrics_fn: called in the worker with the episodes, ``[episodes, longest]``, zero-padded, with ("collector",
            "mask") True on steps. Returns a dict of entries to add to the result.
        dump_video: after an evaluation, call ``env.transform.dump(step=…)`` if it exists, as for TorchRL's
            ``VideoRecorder``.
        on_result: called with each result as a TensorDict, in its own thread. The next evaluation begins when it has
            returned. If it raises, the call that takes the result raises that error.
        busy_policy: what :meth:`trigger_eval` does during another evaluation. "skip": nothing. "newest": evaluate these
            weights next and drop waiting ones. "queue": evaluate them after waiting ones. "error": raise RuntimeError.
        backend: where the worker runs: "process", or "ray" (an actor anywhere in the cluster; extra: ray).
    """

    policy_factory: Annotated[Callable[..., Any] | None, Option(check=check_policy_factory)]
    num_trajectories: Annotated[int, Option(default=10, check=partial(whole, least=1))]
    max_steps: int | None
    frames_per_batch: int | None
    collector_kwargs: Mapping[str, Any] | None
    weight_sync_schemes: Mapping[str, Any] | None
    log_prefix: Annotated[str, Option(default="eval")]
    reward_keys: Annotated[Key, Option(default=("next", "reward"))]
    done_keys: Key | None
    device: Device | None
    exploration_type: Annotated[InteractionType | None, Option(default=InteractionType.DETERMINISTIC)]
    metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None
    dump_video: Annotated[bool, Option(default=True)]
    on_result: Callable[[TensorDictBase], object] | None
    busy_policy: Annotated[str, Option(default="skip", check=_check_busy)]
    backend: Annotated[str, Option(default="process", check=_check_backend)]
    init_fn: InitFn


class Evaluator(Lifetime):
    """Evaluates policies in a worker: a process of this host (needs Linux) or a Ray actor.

    A result is a dict of ``eval/reward`` (the mean return), ``eval/reward_std``, ``eval/num_episodes``,
    ``eval/episode_length`` (mean), ``eval/fps``, ``eval/policy_version`` (of the evaluated weights), ``eval/step``, and
    the entries that ``metrics_fn`` adds. The weights do not change during an evaluation.
    """

    closed = True  # until there is something to close

    @declared
    def __init__(self, env: Any, policy: Any = None, **options: Unpack[EvaluatorOptions]) -> None:
        """Start the worker.

        Args:
            env: a callable that returns an environment, or a Gymnasium id; called in the worker. The environment may
                be a batch. Freeze statistics that it keeps (VecNorm).
            policy: module or callable, pickled by cloudpickle; its own weights are evaluated if no others are given.
                With ``policy_factory`` it stays in this process.

        Raises:
            TypeError, ValueError: the collector raised it; an object was given where the worker must make it; or the
                backend is unknown.
            ImportError: Ray is not installed.
            NotImplementedError: backend is "process", and this is not Linux.
            Exception: the worker raised it before it was ready. It keeps its type.
        """
        is_made = hasattr(env, "step_and_maybe_reset") or hasattr(env, "action_space")
        if not isinstance(env, str) and (not callable(env) or (is_made and not isinstance(env, type))):
            raise TypeError(
                f"env must be a callable that returns an environment, or a Gymnasium id, not {type(env).__name__}: the "
                "evaluator's worker makes it"
            )
        policy_factory, schemes = options["policy_factory"], options["weight_sync_schemes"]
        if policy is None and policy_factory is None:
            raise TypeError("Evaluator has nothing to evaluate: pass policy= or policy_factory=")
        collector, own, scheme = WORKERS[options["backend"]]
        if schemes is None and policy_factory is not None:
            schemes = {"policy": scheme()}
        limit, frames = frames_or_none("max_steps", options["max_steps"]), options["frames_per_batch"]
        self._busy_policy = options["busy_policy"]
        self._steps = 0
        self._collector = family(collector)(
            [env],
            policy,
            policy_factory=policy_factory,
            frames_per_batch=min(STEPS, limit or STEPS) if frames is None else frames,
            max_frames_per_traj=limit,
            exploration_type=options["exploration_type"],
            policy_device=options["device"],
            weight_sync_schemes=schemes,
            init_fn=options["init_fn"],
            collector_class=partial(
                EpisodeCollector,
                episodes=options["num_trajectories"],
                reward_keys=options["reward_keys"],
                done_keys=options["done_keys"],
                metrics_fn=options["metrics_fn"],
                dump_video=options["dump_video"],
            ),
            **own,
            **(options["collector_kwargs"] or {}),
        )
        self._evaluations = Evaluations(self._collector, options["log_prefix"], options["on_result"])
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
        """Evaluate these weights after all earlier evaluations, and return the result.

        Args:
            weights: the policy's weights: a module, a TensorDict or a (state) dict. None: the current weights of the
                registered policy or, with only a ``policy_factory``, the worker's.
            step: step number for the result. None: the evaluator counts, from 0.
            weights_dict: ``{model_id: weights}``; evaluated together.
            timeout: seconds. None: no limit.

        Raises:
            ValueError, SchemaMismatch: the weights do not fit the worker's model.
            AckTimeout: there was no result within the timeout. The result is dropped.
            PeerLost: the worker died.
            ClosedError: the evaluator was shut down.
            Exception: the environment, the policy, ``metrics_fn`` or ``on_result`` raised it. The next evaluation
                starts afresh.
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
        """:meth:`evaluate` for a coroutine of any event loop. Cancelling withdraws the request, or drops its
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
        """Copy these weights, request their evaluation, and return at once. Coroutines may call it too.

        Args:
            weights, step, weights_dict: see :meth:`evaluate`.

        Returns:
            True: they will be evaluated. False: another evaluation is under way, and ``busy_policy="skip"``.

        Raises:
            RuntimeError: another evaluation is under way, and ``busy_policy="error"``.
            PeerLost: the worker died.
            ClosedError: the evaluator was shut down.
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
        """The next result of a :meth:`trigger_eval`. None: there was none within the timeout (seconds). Raises the same
        as :meth:`wait`."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next result of a :meth:`trigger_eval`, in the order of the calls. None: nothing is pending, or there was
        no result within the timeout (seconds).

        Raises:
            PeerLost: the worker died.
            ClosedError: the evaluator was shut down, and all results were taken.
            Exception: that evaluation raised it.
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
        """The next result; iteration ends with :meth:`shutdown`. Raises the same as :meth:`wait`. Iteration can go on
        after an evaluation that failed."""
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
        """Whether an evaluation is under way or waiting."""
        return self._evaluations.pending

    # -- weights ------------------------------------------------------------------------------------------------------

    @staticmethod
    def extract_weights(policy: Any) -> TensorDictBase:
        """Copy the weights of a module, TensorDict or (state) dict to the CPU. Later steps of an optimiser do not
        change the copy."""
        return as_tensordict(copy_flat(flat_weights(WeightStrategy(), policy))).cpu()

    def _copied(self, weights: Any, weights_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        given = dict(weights_dict or {})
        if weights is not None and "policy" in given:
            raise ValueError("weights and weights_dict['policy'] both give the policy's weights: pass one of them")
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
        """A dict of ``step_counter``. Raises RuntimeError: evaluations are pending, or results were not taken."""
        self._check_idle()
        return {"step_counter": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue counting from what :meth:`state_dict` returned. Raises the same as :meth:`state_dict`."""
        self._check_idle()
        self._steps = state_dict["step_counter"]

    def _check_idle(self) -> None:
        if self.pending or self._evaluations.left():
            raise RuntimeError(
                "cannot save or load an evaluator while evaluations are pending or results are not taken: wait() first"
            )

    def shutdown(self, timeout: float | None = None) -> None:
        """End the worker before its next step. Idempotent; leaves no process.

        Args:
            timeout: seconds. None: 5. If the worker has not ended after most of it, it is killed.

        Raises:
            Exception: an evaluation raised it, and no call has taken its result.
        """
        if self.closed:
            return
        self.closed = True
        failure = self._evaluations.failure
        self._collector.shutdown(timeout)
        self._evaluations.wait_for_end(SHUTDOWN_SECONDS if timeout is None else timeout)
        if failure is not None:
            raise failure
