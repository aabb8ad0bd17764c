"""Evaluator: evaluates the newest weights in a separate process, while training continues.

Names and meaning follow TorchRL's ``Evaluator``. Evaluation never shares the interpreter with training: a collector
with one worker, a process of this host or a Ray actor, steps the environment. For each request, a thread of the
evaluator sends the weights to that worker, waits for the evaluation, and calls ``on_result``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Annotated, Any, Self, TypedDict, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from asyncsync.arguments import Option, declared, described
from asyncsync.collectors.arguments import (
    Device,
    accepts,
    check_choice,
    check_policy_factory,
    frames_or_none,
    whole_number,
)
from asyncsync.collectors.base import SHUTDOWN_SECONDS, Lifetime
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.options import BACKENDS, InitFn
from asyncsync.collectors.single import Collector
from asyncsync.collectors.trajectories import Key, _aggregate_end_of_traj, padded, path_of
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.errors import AckTimeout, ClosedError, PartialSendError
from asyncsync.model.strategy import WeightStrategy, flat_weights
from asyncsync.runtime.threads import WorkThread, run_on_loop_async, until_done
from asyncsync.schemes.blocking import run_without_waiting
from asyncsync.sync import RayWeightSyncScheme, SharedMemWeightSyncScheme
from asyncsync.weights.slab import copy_flat
from asyncsync.weights.tree import nest

logger = logging.getLogger("asyncsync")

STEPS_PER_CHECK = 200

RETURN_KEY: Key = ("next", "episode_reward")
"""Key of the return up to a step, which TorchRL's RewardSum, for example, writes."""

Request = concurrent.futures.Future[dict[str, Any]]
"""One evaluation, and its result."""

MAX_RESULTS = 1024
"""Most results that wait for the user. Older ones are dropped, because the user may only use ``on_result``."""

WORKER_OPTIONS = ("num_trajectories", "reward_keys", "done_keys", "metrics_fn", "dump_video")

DEFAULT_SCHEMES = {"process": SharedMemWeightSyncScheme, "ray": RayWeightSyncScheme}

BUSY_POLICIES = ("skip", "newest", "queue", "error")


@described
class EvaluatorOptions(TypedDict, total=False):
    """Of an evaluator.

    Args:
        policy_factory: makes the policy in the worker; called without arguments or else with the environment.
        num_trajectories: episodes per evaluation. A batch of environments shares them equally.
        max_steps: truncate an episode after this many steps. None: no limit.
        frames_per_batch: environment steps between two checks for finished episodes. None: 200, or max_steps if less.
        collector_kwargs: further arguments of the collector that runs the worker: for "process" those of
            ``MultiSyncCollector``, such as ``start_method`` and ``connect_timeout``; for "ray" those of
            ``RayCollector``, such as ``remote_configs={"num_gpus": 1}``, ``ray_init_config`` and ``restarts``.
        weight_sync_schemes: ``{model_id: scheme}``. None: shared memory ("process") or Ray's scheme, for the policy.
        log_prefix: prefix of the names in a result.
        reward_keys: key of the reward. If steps have ("next", "episode_reward"), the return is its last value.
        done_keys: key of the flag that ends an episode. None: the environment's.
        device: device on which the policy acts.
        exploration_type: exploration type under which the policy acts.
        metrics_fn: called in the worker with the episodes, ``[episodes, longest]``, zero-padded, with ("collector",
            "mask") True on steps. Returns a dict of entries to add to the result.
        dump_video: after an evaluation, call ``env.transform.dump(step=…)`` if it exists (TorchRL's VideoRecorder).
        on_result: called with each result as a TensorDict, in the evaluator's thread. The next evaluation begins after
            it returns. If it raises, the call that takes the result raises that error.
        busy_policy: what :meth:`trigger_eval` does during another evaluation. "skip": nothing. "newest": evaluate these
            weights next and drop waiting requests of ``trigger_eval``. "queue": evaluate them after the waiting ones.
            "error": raise RuntimeError.
        backend: where the worker runs: "process", or "ray" (an actor anywhere in the cluster; extra: ray).
    """

    policy_factory: Annotated[Callable[..., Any] | None, Option(check=check_policy_factory)]
    num_trajectories: Annotated[int, Option(10, partial(whole_number, least=1))]
    max_steps: int | None
    frames_per_batch: int | None
    collector_kwargs: Mapping[str, Any] | None
    weight_sync_schemes: Mapping[str, Any] | None
    log_prefix: Annotated[str, Option("eval")]
    reward_keys: Annotated[Key, Option(("next", "reward"))]
    done_keys: Key | None
    device: Device | None
    exploration_type: Annotated[InteractionType | None, Option(InteractionType.DETERMINISTIC)]
    metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None
    dump_video: Annotated[bool, Option(True)]
    on_result: Callable[[TensorDictBase], object] | None
    busy_policy: Annotated[str, Option("skip", partial(check_choice, choices=BUSY_POLICIES))]
    backend: Annotated[str, Option("process", partial(check_choice, choices=tuple(DEFAULT_SCHEMES)))]
    init_fn: InitFn


class Evaluator(Lifetime):
    """Evaluates policies in a worker: a process of this host (needs Linux) or a Ray actor.

    A result is a dict of ``eval/reward`` (the mean return), ``eval/reward_std``, ``eval/num_episodes``,
    ``eval/episode_length`` (mean), ``eval/fps``, ``eval/policy_version`` (of the evaluated weights), ``eval/step``, and
    the entries that ``metrics_fn`` adds. The weights do not change during an evaluation.
    """

    @declared
    def __init__(self, env: Any, policy: Any = None, **options: Unpack[EvaluatorOptions]) -> None:
        """Start the worker.

        Args:
            env: a callable that returns an environment, or a Gymnasium id. The worker makes the environment, which may
                be a batch. Freeze statistics that it keeps (VecNorm).
            policy: module or callable, pickled by cloudpickle. A call without weights evaluates its own. With
                ``policy_factory``, it stays in this process.

        Raises:
            TypeError, ValueError: ``env`` is an environment, there is no policy, or another argument is wrong.
            ImportError: Ray is not installed.
            NotImplementedError: the backend is "process", and this is not Linux.
            Exception: the worker raised it before it was ready. It keeps its type.
        """
        if not isinstance(env, str) and (not callable(env) or environments.is_environment_object(env)):
            raise TypeError(
                f"env must be a callable that returns an environment, or a Gymnasium id, not {type(env).__name__}, "
                "because the evaluator's worker makes the environment"
            )
        policy_factory, schemes = options["policy_factory"], options["weight_sync_schemes"]
        if policy is None and policy_factory is None:
            raise TypeError("Evaluator has nothing to evaluate: pass policy= or policy_factory=")
        if schemes is None and policy_factory is not None:
            schemes = {"policy": DEFAULT_SCHEMES[options["backend"]]()}
        limit, frames = frames_or_none("max_steps", options["max_steps"]), options["frames_per_batch"]
        self._busy_policy = options["busy_policy"]
        self._steps = 0
        of_worker = {name: value for name, value in options.items() if name in WORKER_OPTIONS}
        self._collector = resolve_name(BACKENDS[options["backend"]])(
            [env],
            policy,
            policy_factory=policy_factory,
            frames_per_batch=min(STEPS_PER_CHECK, limit or STEPS_PER_CHECK) if frames is None else frames,
            max_frames_per_traj=limit,
            exploration_type=options["exploration_type"],
            policy_device=options["device"],
            weight_sync_schemes=schemes,
            init_fn=options["init_fn"],
            collector_class=partial(EpisodeCollector, evaluation=of_worker),
            sync=True,
            **(options["collector_kwargs"] or {}),
        )
        self._group = group = self._collector.group
        self._requests: dict[Request, bool] = {}  # not done yet. True: evaluate() waits for this one
        self._results: deque[Request] = deque(maxlen=MAX_RESULTS)  # done requests of trigger_eval()
        # The thread has no strong reference to the evaluator and its collector, so dropping the evaluator ends them.
        self._run_evaluation = partial(
            run_evaluation, group, weakref.proxy(self._collector), options["log_prefix"], options["on_result"]
        )
        self._keep_result = partial(keep_result, group, self._requests, self._results)
        self._thread = WorkThread("asyncsync-evaluator")
        weakref.finalize(self, self._thread.abandon)
        # Starts the thread once, before several threads can request evaluations.
        self._thread.submit_concurrent(lambda: None)
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
                registered policy or, with only a ``policy_factory``, those that the worker has.
            step: step number for the result. None: the evaluator counts from 0.
            weights_dict: ``{model_id: weights}``, which are evaluated together.
            timeout: seconds. None: no limit.

        Raises:
            ValueError, SchemaMismatch: the weights do not fit the worker's model.
            AckTimeout: there was no result within the timeout. A later result is dropped.
            PeerLost: the worker died.
            ClosedError: the evaluator was shut down.
            Exception: the environment, the policy, ``metrics_fn`` or ``on_result`` raised it. Later evaluations are not
                affected.
        """
        return run_without_waiting(self._evaluate(weights, weights_dict, step, timeout, blocking=True))

    async def evaluate_async(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """:meth:`evaluate` for coroutines of any event loop. Cancelling withdraws the request, or drops its result."""
        return await self._evaluate(weights, weights_dict, step, timeout, blocking=False)

    # With ``blocking=True``, no coroutine here awaits anything: ``run_without_waiting`` runs it in the caller's thread.

    async def _evaluate(
        self, weights: Any, by_id: Mapping[str, Any] | None, step: int | None, timeout: float | None, *, blocking: bool
    ) -> dict[str, Any]:
        self._check_usable(timeout)
        request = self._request(weights, by_id, step, is_awaited=True)
        try:
            await self._wait_until(request.done, timeout, blocking=blocking)
        finally:
            request.cancel()  # withdraws the request unless its evaluation has begun
        return request.result()

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Copy these weights, request their evaluation, and return at once. Coroutines may call this, too.

        Args:
            weights, step, weights_dict: see :meth:`evaluate`.

        Returns:
            True: they will be evaluated. False: another evaluation is pending, and ``busy_policy`` is "skip".

        Raises:
            RuntimeError: another evaluation is pending, and ``busy_policy`` is "error".
            PeerLost: the worker died.
            ClosedError: the evaluator was shut down.
        """
        self._check_usable(0.0)
        if self.pending and self._busy_policy == "skip":
            return False
        if self.pending and self._busy_policy == "error":
            raise RuntimeError(
                "another evaluation is under way: wait() for it, or construct the Evaluator with busy_policy='skip', "
                "'newest' or 'queue'"
            )
        self._request(weights, weights_dict, step, is_awaited=False)
        return True

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """The next result of a :meth:`trigger_eval`. None: there was none within the timeout (seconds). Errors: see
        :meth:`wait`."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next result of a :meth:`trigger_eval`, in the order of the calls. None: no evaluation is pending, or none
        finished within the timeout (seconds).

        Raises:
            PeerLost: the worker died.
            ClosedError: the evaluator was shut down, and all results were taken.
            Exception: the evaluation raised it.
        """
        return run_without_waiting(self._next_result(timeout, blocking=True))

    async def wait_async(self, timeout: float | None = None) -> dict[str, Any] | None:
        """:meth:`wait` for coroutines of any event loop. Cancelling loses no result."""
        return await self._next_result(timeout, blocking=False)

    async def _next_result(self, timeout: float | None, *, blocking: bool) -> dict[str, Any] | None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:  # because another thread may take the result
            left = deadline - time.monotonic()
            is_last = left <= 0 or not self.pending  # read before _pop_result(), because a result may come in between
            if (request := self._pop_result()) is not None:
                return request.result()
            self._check_usable(timeout)
            if is_last:
                return None
            with contextlib.suppress(AckTimeout):
                await self._wait_until(lambda: self._results or not self.pending, left, blocking=blocking)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        """The next result; :meth:`shutdown` ends the iteration, but an evaluation's error does not. Errors: see
        :meth:`wait`."""
        while (request := self._pop_result()) is None:
            try:
                await self._wait_until(lambda: self._results, None, blocking=False)
            except ClosedError:
                if self.closed:
                    raise StopAsyncIteration from None
                raise
        return request.result()

    def _pop_result(self) -> Request | None:
        """Take the first finished request. None: there is none."""
        try:
            return self._results.popleft()
        except IndexError:
            return None

    @property
    def pending(self) -> bool:
        """Whether an evaluation runs or waits."""
        return bool(self._requests)

    def _check_usable(self, timeout: float | None) -> None:
        """Raises ClosedError: the evaluator was shut down; BaseException: the error that ended the worker;
        RuntimeError: the caller would wait for ever."""
        self._group.check()
        if self._group.failure is not None:
            raise self._group.failure
        if timeout is None and self._thread.is_current:
            raise RuntimeError(
                "on_result cannot wait for an evaluation, because the next one begins after it: use trigger_eval()"
            )

    async def _wait_until(self, met: Callable[[], object], timeout: float | None, *, blocking: bool) -> None:
        if blocking:
            self._group.wait(met, timeout)
        else:
            await run_on_loop_async(partial(self._group.until, met, timeout))

    # -- weights ------------------------------------------------------------------------------------------------------

    @staticmethod
    def extract_weights(policy: Any) -> TensorDictBase:
        """A copy on the CPU of the weights of a module, TensorDict or (state) dict, which training does not change."""
        flat = copy_flat(flat_weights(WeightStrategy(), policy))
        return nest(flat.tensors, flat.values).cpu()

    def _request(
        self, weights: Any, weights_dict: Mapping[str, Any] | None, step: int | None, *, is_awaited: bool
    ) -> Request:
        given = dict(weights_dict or {})
        if weights is not None and "policy" in given:
            raise ValueError("weights and weights_dict['policy'] both give the policy's weights: pass one of them")
        if weights is not None:
            given["policy"] = weights
        policy, schemes = self._collector.policy, self._collector._sender_schemes
        if not given and isinstance(policy, nn.Module) and "policy" in schemes:
            given["policy"] = policy
        copies = {model_id: self.extract_weights(source) for model_id, source in given.items()}
        if step is None:
            step, self._steps = self._steps, self._steps + 1
        if self._busy_policy == "newest" and not is_awaited:
            for waiting, has_caller in self._requests.copy().items():
                if not has_caller:
                    waiting.cancel()
        request = self._thread.submit_concurrent(partial(self._run_evaluation, copies, step))
        self._requests[request] = is_awaited
        request.add_done_callback(self._keep_result)
        return request

    # -- checkpoints and the end --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A dict with ``step_counter``. Raises RuntimeError: evaluations are pending, or results were not taken."""
        self._check_idle()
        return {"step_counter": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue counting from a result of :meth:`state_dict`. Errors: see :meth:`state_dict`."""
        self._check_idle()
        self._steps = state_dict["step_counter"]

    def _check_idle(self) -> None:
        if self.pending or self._results:
            raise RuntimeError(
                "cannot save or load an evaluator while evaluations are pending or results are not taken: wait() first"
            )

    def shutdown(self, timeout: float | None = None) -> None:
        """End the worker before its next step. Idempotent; leaves no process.

        Args:
            timeout: seconds. None: 5. A worker that has not ended after most of this time is killed.

        Raises:
            Exception: an evaluation raised it, and no call has taken that result.
        """
        if self.closed:
            return
        self.closed = True
        errors = [request.exception() for request in self._results.copy()]
        waits = self._group.is_ours and not self._thread.is_current
        try:
            self._collector.shutdown(timeout)
        finally:
            last = self._thread.submit_concurrent(lambda: None)
            self._thread.abandon()
        if waits:  # for on_result to return
            until_done(last, SHUTDOWN_SECONDS if timeout is None else timeout)
        for error in errors:
            if error not in (None, self._group.failure):  # every call raises the error that ended the worker
                raise error


# -- in the evaluator's thread -----------------------------------------------------------------------------------------


def run_evaluation(
    group: WorkerGroup,
    collector: Any,
    prefix: str,
    on_result: Callable[[TensorDictBase], object] | None,
    weights: Mapping[str, Any],
    step: int,
) -> dict[str, Any]:
    """Evaluate these weights, ``{model_id: weights}``, which are copies; empty: the weights that the worker has."""
    group.wait(lambda: group.connected)  # the worker may just be restarting
    if weights:
        try:
            collector.update_policy_weights_(weights_dict=weights)
        except PartialSendError as error:
            raise error.failed[0] from error  # there is one worker
    [found] = group.ask("execute", "evaluate", (step,), {}, timeout=math.inf)
    result = {f"{prefix}/{name}": value for name, value in {**found, "step": step}.items()}
    if on_result is not None:
        on_result(TensorDict(result))
    return result


def keep_result(group: WorkerGroup, requests: dict[Request, bool], results: deque[Request], request: Request) -> None:
    """Called when a request is done or withdrawn: keep its result for the user, unless a caller waits for it."""
    error = None if request.cancelled() else request.exception()
    has_ended = isinstance(error, ClosedError) and group.ending  # each call raises it
    if not (request.cancelled() or requests[request] or has_ended):
        if isinstance(error, Exception):
            logger.error("an evaluation failed", exc_info=error)
        results.append(request)
    del requests[request]
    group.call_soon(group.recheck_waits)


# -- in the worker -----------------------------------------------------------------------------------------------------


class EpisodeCollector(Collector):
    """Steps whole episodes, with the policy in evaluation mode. ``evaluation``: the options that the worker uses;
    ``frames_per_batch``: environment steps between two checks for finished episodes."""

    def __init__(self, create_env_fn: Any, *, evaluation: Mapping[str, Any], **arguments: Any) -> None:
        self._options = evaluation
        env = environments.make_environment(create_env_fn, arguments.pop("create_env_kwargs"))
        if (factory := arguments["policy_factory"]) is not None and not accepts(factory):
            arguments["policy_factory"] = partial(factory, env)
        arguments["frames_per_batch"] *= environments.batch_size_of(env).numel()
        super().__init__(lambda: env, **arguments)
        self._rollouts.policy.train(False)

    def evaluate(self, step: int) -> dict[str, Any]:
        """Reset, and roll out the episodes, all with the same version of the weights. ``step`` is for videos. Raises
        KeyError: a step has no reward; ClosedError: the evaluator was shut down."""
        begun = time.perf_counter()
        with self.acting_weights.holds():
            self.reset()
            episodes = self._first_episodes()
            version = self.policy_version
        seconds, lengths = time.perf_counter() - begun, [len(episode) for episode in episodes]
        returns = torch.tensor([self._return_of(episode) for episode in episodes])
        found: dict[str, Any] = {
            "reward": returns.mean().item(),
            "reward_std": returns.std().item() if len(episodes) > 1 else 0.0,
            "num_episodes": len(episodes),
            "episode_length": sum(lengths) / len(episodes),
            "fps": sum(lengths) / seconds,
            "policy_version": version,
        }
        if (metrics := self._options["metrics_fn"]) is not None:
            flat: Any = torch.cat(episodes)
            found |= metrics(padded(flat, lengths))
        dump = getattr(getattr(self.env, "transform", None), "dump", None)
        if self._options["dump_video"] and callable(dump):
            dump(step=step)
        return found

    def _first_episodes(self) -> list[TensorDictBase]:
        """The first episodes of each environment. Taking those that end first would favour short episodes."""
        signals, options, count = self._rollouts.signals, self._options, self._rollouts.batch_size.numel()
        flags: list[Key] = [("next", *path_of(key)) for key in self._rollouts.keys.done]
        if options["done_keys"] is not None:
            flags = [options["done_keys"]]
        wanted = torch.tensor([(options["num_trajectories"] + index) // count for index in range(count)])
        ended = torch.zeros_like(wanted)
        batches: list[TensorDictBase] = []
        while (ended < wanted).any():
            batch = self.rollout()
            assert batch is not None
            if signals is not None and signals.wants_rollout_to_end():
                raise ClosedError("the evaluator has been shut down")
            batch.names = None
            if options["metrics_fn"] is None:
                batch = batch.select(options["reward_keys"], RETURN_KEY, *flags, strict=False)
            batches.append(batch.reshape(count, batch.shape[-1]))
            ended += _aggregate_end_of_traj(batches[-1], flags).sum(-1).cpu()
        steps = torch.cat(batches, -1)
        found = []
        for row, ends, most in zip(steps.unbind(0), _aggregate_end_of_traj(steps, flags), wanted.tolist(), strict=True):
            begin = 0
            for end in ends.nonzero().flatten().tolist()[:most]:
                found.append(row[begin : end + 1])
                begin = end + 1
        return found

    def _return_of(self, episode: TensorDictBase) -> float:
        summed = episode.get(RETURN_KEY, None)
        if summed is not None:
            return float(summed[-1].sum())
        reward = episode.get(key := self._options["reward_keys"], None)
        if reward is None:
            raise KeyError(f"{type(self.env).__name__} has no {key!r} in its steps: pass its key as reward_keys=")
        return float(reward.sum())
