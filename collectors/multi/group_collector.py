"""GroupCollector: a collector whose environments are stepped by the workers of a group, wherever they run.

It has the group, a driver that makes batches of the workers' rollouts, and calls between two rollouts. Here is which
models act in which process, whom an update reaches, how versions are counted, the end, and what can be asked of the
workers between two of their rollouts: what comes from one is a copy, and what it raises there is raised here.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.collectors.arguments import check_count, exact_device
from asyncsync.collectors.base import (
    SHUTDOWN_SECONDS,
    BaseCollector,
    Pause,
    Signals,
    _part,
    as_calls,
    logged_unless,
)
from asyncsync.collectors.multi.batches import BatchArguments
from asyncsync.collectors.multi.calls import CALL_SECONDS, Calls, are_equal, parts_of
from asyncsync.collectors.multi.driver import Driver
from asyncsync.collectors.profiling import ProfileConfig
from asyncsync.collectors.trajectories import processed
from asyncsync.collectors.weights.updates import UnknownModel, belongs_to, fitted
from asyncsync.collectors.workers.channel import loads
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.errors import AckTimeout, PartialSendError, PeerLost
from asyncsync.runtime.threads import uninterrupted
from asyncsync.schemes.none import NoSyncCore
from asyncsync.schemes.sources import follow

FAILURE_SECONDS = 1.0
"""How long a worker's own failure is waited for when the bus reports that the worker is lost."""


class GroupCollector(BaseCollector):
    """A collector with workers; a subclass makes its parts."""

    acts_elsewhere = True
    num_workers: int
    _arguments: BatchArguments
    _group: WorkerGroup
    _driver: Driver
    _calls: Calls
    _acting_devices: dict[int, set[torch.device]]  # of each worker's policy
    _finalizers: tuple[Callable[[], object], ...]

    update_at_each_batch = _part("_arguments.update_at_each_batch")
    max_weight_update_interval = _part("_arguments.max_weight_update_interval")
    _iter = _part("_driver.count")

    @property
    def _collected(self) -> int:
        return self._driver.frames if self._driver.free is None else self._group.frames

    # -- iteration ----------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        return self._driver.iterator()

    async def __anext__(self) -> TensorDictBase | None:
        return await self._driver.next_async()

    def _set_free(self) -> None:
        self._driver.run_free()

    def is_running(self) -> bool:
        return self._driver.free is not None and not self._driver.free.done()

    def pause(self) -> Pause:
        """A block, ``with`` or ``async with``, in which no worker steps or writes to the replay buffer. Blocks may be
        nested. Another thread or task that iterates meanwhile waits for the end of the block.

        Entering waits for each worker's step under way (for a worker that has workers: its batch under way).
        ``async with`` does not block the event loop meanwhile. If it is cancelled, it raises once the workers pause.

        Raises:
            AckTimeout: a step under way did not end within 60 s.
            BaseException: the error that ended collection in the background.
        """
        return Pause(self._driver.paused)

    # -- calls between two rollouts -----------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False, *, timeout: float = CALL_SECONDS) -> int:
        """Seed the environments in turn, each with the seed that the one before returned, then reset them. Also seeds
        torch, NumPy and Python in the workers. Returns the seed for a further environment.

        Args:
            seed: seed of the first environment.
            static_seed: True: all environments get the same seed.
            timeout: seconds for each worker's answer. Workers answer between two rollouts.

        Raises:
            AckTimeout: a worker did not answer within the timeout. It will still carry out the call.
        """
        for worker in range(self.num_workers):
            [seed] = self._calls("seed", seed, static_seed, workers=[worker], timeout=timeout)
        self._driver.break_trajectories_off()
        return seed

    def reset(self, reset_idx: Sequence[bool] | None = None, *, timeout: float = CALL_SECONDS) -> None:
        """Reset the environments of all workers, or of some.

        Args:
            reset_idx: one bool per worker, True to reset its environment. None: all.
            timeout: seconds. Workers answer between two rollouts.

        Raises:
            ValueError: ``reset_idx`` does not have one entry per worker.
            AckTimeout: a worker did not answer within the timeout. It will still carry out the call.
        """
        if reset_idx is not None:
            check_count("reset_idx", reset_idx, self.num_workers)
        chosen = [w for w in range(self.num_workers) if reset_idx is None or reset_idx[w]]
        self._calls("reset", workers=chosen, timeout=timeout)
        self._driver.break_trajectories_off()

    def state_dict(self, *, timeout: float = CALL_SECONDS) -> dict[str, Any]:
        """A dict of each worker's state dict, ``worker0``, ``worker1``, …, and ``frames``, ``iter``, ``versions``.

        Args:
            timeout: seconds. Workers answer between two rollouts.

        Raises:
            AckTimeout: a worker did not answer within the timeout.
        """
        states = self._calls("state", timeout=timeout)
        self._driver.count_free()
        own = {"frames": self._driver.frames, "iter": self._driver.count, "versions": self._versions()}
        return {f"worker{w}": s for w, s in enumerate(states)} | own

    def fake_tensordict(self, *, timeout: float = CALL_SECONDS) -> TensorDictBase:
        """A batch of zeros with the layout of a real one; see ``Collector.fake_tensordict``.

        Args:
            timeout: seconds. Workers answer between two rollouts.

        Raises:
            TypeError: there was no rollout yet, and an environment has no specs for its steps.
            AckTimeout: a worker did not answer within the timeout.
        """
        batch = self._driver.together(self._calls("fake", timeout=timeout))
        return processed(batch, self.postproc, split_trajs=self.split_trajs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, *, timeout: float = CALL_SECONDS
    ) -> None:
        """Continue from what :meth:`state_dict` returned, with new trajectories.

        If all workers had the same policy, it is also loaded into the registered policy and sent. If each worker had
        its own, each gets its own. Versions continue too, so no new frame gets the version of an earlier one.

        Args:
            state_dict: state dict of a collector with as many workers.
            strict: True: every part must be there. False: load the parts that are there.
            timeout: seconds. Workers answer between two rollouts.

        Raises:
            KeyError: a part is missing, and ``strict`` is True. Nothing was changed.
            AckTimeout: a worker did not answer within the timeout. It will still carry out the call.
        """
        names = [f"worker{w}" for w in range(self.num_workers)]
        if strict and (missing := [name for name in (*names, "frames", "iter") if name not in state_dict]):
            raise KeyError(f"the state dict of a {type(self).__name__} with {len(names)} workers lacks {missing}")
        # First, as each worker begins new trajectories when it loads.
        next_ids = [int(pool["traj_id"]) for pool in parts_of(state_dict, "traj_pool")]
        self._group.trajectory_pool().advance(0, max(next_ids, default=0))
        there = [name for name in names if name in state_dict]
        for name in there:
            self._calls("load", state_dict[name], strict, workers=[names.index(name)], timeout=timeout)
        self._driver.break_trajectories_off()
        self._driver.frames = self._group.frames = state_dict.get("frames", self._driver.frames)
        self._driver.count = state_dict.get("iter", self._driver.count)
        policies = [policy for name in there for policy in parts_of(state_dict[name], "policy_state_dict")]
        own = self.policy.state_dict() if isinstance(self.policy, nn.Module) else {}
        all_have = (
            bool(policies) and own.keys() == policies[0].keys() and all(are_equal(policies[0], p) for p in policies)
        )
        is_sent = there == names and "policy" in self._sender_schemes and (all_have or len(policies) == len(names))
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

    def _set_in_workers(self, name: str, hook: Callable[..., None] | None) -> None:
        self._calls(name, hook)

    # -- as a worker --------------------------------------------------------------------------------------------------

    def _attach(self, signals: Signals, sink: Callable[[Any], TensorDictBase | None]) -> None:
        self._signals = signals  # the batches are its own workers', which are attached themselves

    def _rollout_for_parent(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]:
        self._driver.random = random
        self._group.counted = self._signals.counted()  # for its own workers
        before = self._driver.frames
        batch = self.next()
        if writes:
            return None, self._driver.frames - before
        return batch, 0 if batch is None else batch.numel()

    def _interrupt(self, timeout: float, close_env: bool) -> None:
        self.shutdown(timeout, close_env)

    # -- models -------------------------------------------------------------------------------------------------------

    def _acting(self, model_id: str) -> Any:
        if self._goes_with_workers(model_id):
            return self.get_model(model_id)
        served = sorted(self._sender_schemes) or "none"
        raise UnknownModel(
            f"unknown model_id {model_id!r}: this {type(self).__name__} has schemes for {served}. To send this "
            "model to its workers, pass weight_sync_schemes={model_id: scheme}"
        )

    def _goes_with_workers(self, model_id: str) -> bool:
        # Batches are postprocessed here, unless workers write them to a replay buffer.
        return self.postproc is not None and belongs_to("postproc", model_id)

    # -- updates ------------------------------------------------------------------------------------------------------

    def _check_receives(self, model_id: str) -> None:
        """Raises ValueError: a model of this name that is received here would reach none of the workers."""
        is_passed_on = model_id in self._sender_schemes or (model_id == "policy" and self.weight_updater is not None)
        if not is_passed_on and not self._is_own(model_id):
            raise ValueError(
                f"this {type(self).__name__} would receive {model_id!r}, but its workers act with it and would not get "
                f"it: also pass weight_sync_schemes={{{model_id!r}: scheme}}"
            )

    def _is_own(self, model_id: str) -> bool:
        """Whether a model that is here is no copy of the workers'."""
        if belongs_to("policy", model_id):
            return False
        try:
            follow(self, model_id)
        except (AttributeError, LookupError, TypeError):
            return False
        return True

    def _take(self, given: Any) -> None:
        if "policy" not in self._sender_schemes and self.weight_updater is None:
            self._acting("policy")  # raises: nothing would bring them to the workers
        is_other = given is not None and isinstance(self.policy, nn.Module)
        if is_other and (prepared := fitted(self.policy, given)) is not None:
            self._weights.apply(prepared.apply_now, DEFAULT_TIMEOUT)
        self.update_policy_weights_(given)

    def _workers_of(self, device: torch.device) -> list[int]:
        exact = torch.device("cpu") if device.type == "cpu" else exact_device(device)  # as tensors name it
        found = [index for index, own in self._acting_devices.items() if exact in own]
        return found or super()._workers_of(device)

    def _policy_devices(self) -> set[torch.device]:
        return set().union(*self._acting_devices.values())

    async def _look_behind(self, error: PartialSendError) -> None:
        if not any(isinstance(one, PeerLost) for one in error.failed.values()):
            return
        try:
            await self._group.until(lambda: None, FAILURE_SECONDS)
        except AckTimeout as failure:
            if failure is self._group.failure:
                raise

    # -- versions -----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        is_root = self._senders.buses and not self._weights.come_from_above
        return self._group.counted + (self._senders.version if is_root else self._weights.received())

    def increment_version(self) -> None:
        """Count the policy's version up by one, for weights that reach the workers without a scheme. Workers write the
        new version into their frames from now on."""
        self._group.count_version()

    def _versions(self) -> dict[str, Any]:
        return super()._versions() | {"own": self._group.counted}

    def _carry_on(self, versions: Mapping[str, Any], *, is_sent: bool = True) -> None:
        own = versions["own"]
        if is_sent:
            self._senders.carry_on(versions["sent"])
        else:  # workers keep the number that came with their weights: the rest is counted here
            own += max(0, max(versions["sent"].values(), default=0) - self._senders.version)
        self._group.counted = max(self._group.counted, own)

    def _announces(self) -> bool:
        """Have each version announced to the workers that it is for, and counted as their update, as soon as they are
        to have it. False, and not announced: several buses count versions."""
        # Not the collector, nor what may refer to it: the open bus would keep it alive.
        group, updated, buses = self._group, weakref.WeakMethod(self._driver.updated), self._senders.buses
        is_one = len(buses) == 1

        def announce(version: int, workers: list[int] | None) -> None:
            if (note := updated()) is not None:
                note(workers)
            if is_one:
                group.announce(version, workers)

        for bus in buses:
            bus.on_published = announce
        return is_one

    def _published(self, version: int) -> None:
        if not self._senders.buses:  # nothing is sent that would tell the workers of it
            self._group.count_version()
            self._driver.updated(None)

    def _pass_versions_on(self) -> None:
        super()._pass_versions_on()
        self._follow(None)

    def _follow(self, root: Any, index: int = 0, newest: Callable[[], int] | None = None) -> None:
        """Have the workers read the newest version where the root of the tree announces it, or nowhere."""
        if not self._weights.schemes.keys() <= self._senders.schemes.keys():
            root = None  # some updates end here
        self._group.follow(root, index)

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers before their next step. Idempotent; leaves no process.

        Args:
            timeout: seconds. None: 5. A worker that has not ended after most of it is killed.
            close_env: True: the workers close their environments.
            raise_on_error: True: raise errors. False: log them.

        Raises:
            BaseException: the error that ended collection in the background.

        In a forked process, this closes only that process's copy of the collector; the workers go on.
        """
        with logged_unless(raise_on_error), uninterrupted():
            self._end(timeout, close_env)

    def _end(self, timeout: float | None, close_env: bool) -> None:
        if self.closed:
            return
        self.closed = True
        if not self._group.is_ours:
            return
        deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
        try:
            self._group.end(max(0.1, deadline - time.monotonic()), close_env)
            self._driver.wait_for_watcher()
        finally:
            if self._group.is_over:
                for finalizer in self._finalizers:
                    finalizer()
            self._end_weights(max(0.5, deadline - time.monotonic()))
            self._driver.close()
            self._group.close()
        self._raise_free_error()

    # -- attributes and calls -----------------------------------------------------------------------------------------

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        *,
        timeout: float = CALL_SECONDS,
    ) -> list[Any]:
        """Call a method of each worker's collector, and return the results in the workers' order.

        Args:
            method_name: name of the method, or a path as for :meth:`cascade_execute`.
            list_of_args: positional arguments for each worker.
            list_of_kwargs: keyword arguments for each worker.
            timeout: seconds. Workers answer between two rollouts.

        Raises:
            ValueError: a list does not have one entry per worker, or there is no such method.
            TypeError: the object of this name cannot be called.
            AckTimeout: a worker did not answer within the timeout. It will still carry out the call.
            Exception: a call raised it.
        """
        calls = as_calls(list_of_args, list_of_kwargs, self.num_workers)
        given = {worker: (method_name, *call) for worker, call in enumerate(calls)}
        return self._calls.each("execute", given, timeout)

    def get_distant_attr(self, attr: str, *, timeout: float = CALL_SECONDS) -> list[Any]:
        """The object at an attribute path from each worker's collector, such as ``env.transform[0].scale``, in the
        workers' order. A worker that has workers gives a list of theirs.

        Raises:
            AttributeError: there is no such path.
            AckTimeout: a worker did not answer within the timeout (seconds). Workers answer between two rollouts.
        """
        return self._read("get_distant_attr", attr, timeout=timeout)

    def getattr_policy(self, attr: str, *, timeout: float = CALL_SECONDS) -> Any:
        """The object at an attribute path from the first worker's policy. Raises the same as
        :meth:`get_distant_attr`."""
        return self._read("getattr_policy", attr, workers=[0], timeout=timeout)[0]

    def getattr_env(self, attr: str, *, timeout: float = CALL_SECONDS) -> Any:
        """The object at an attribute path from the first worker's environment. Raises the same as
        :meth:`get_distant_attr`."""
        return self._read("getattr_env", attr, workers=[0], timeout=timeout)[0]

    def _read(self, method: str, *arguments: Any, workers: Sequence[int] | None = None, timeout: float) -> list[Any]:
        return [loads(answer) for answer in self._calls("read", method, arguments, workers=workers, timeout=timeout)]

    def get_cached_weights(self, model_id: str) -> TensorDict | None:
        """A copy of this model's weights that were last sent to all workers. None: none were sent."""
        scheme = self._sender_schemes.get(model_id)
        if scheme is None or isinstance(scheme, NoSyncCore):
            return None
        held: TensorDict | None = scheme.bus.look(scheme.held_weights)
        return held

    # -- statistics and profiles --------------------------------------------------------------------------------------

    def stats(
        self,
        workers: Literal["aggregate", "per_worker", "both"] = "aggregate",
        *,
        timeout: float = CALL_SECONDS,
    ) -> dict[str, int | float | bool]:
        """Progress, and the number of ``workers``, of which ``workers_alive`` run.

        Args:
            workers: "aggregate": the figures of this collector, without waiting for workers. "per_worker": those of
                each worker, such as ``worker_0/frames``. "both".
            timeout: seconds. Workers answer between two rollouts, or while they are paused.

        Raises:
            ValueError: ``workers`` is none of these.
            AckTimeout: a worker did not answer within the timeout.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ValueError(f"workers must be 'aggregate', 'per_worker' or 'both', not {workers!r}")
        found = {} if workers == "per_worker" else super().stats()
        found |= {"workers": self.num_workers, "workers_alive": self._group.alive}
        if workers != "aggregate":
            for index, own in enumerate(self._read("stats", timeout=timeout)):
                found |= {f"worker_{index}/{name}": value for name, value in own.items()}
        return found

    def _profile(self, config: ProfileConfig | None, name: str) -> None:
        named = config or self._profile_config
        chosen = named.workers if named is not None and not name else list(range(self.num_workers))
        if unknown := [worker for worker in chosen if worker not in range(self.num_workers)]:
            raise ValueError(f"unknown workers {unknown}: this {type(self).__name__} has 0 to {self.num_workers - 1}")
        names = {worker: f"{name}_{worker}" if name else str(worker) for worker in chosen}
        self._calls.each("profile", {worker: (config, own) for worker, own in names.items()})
