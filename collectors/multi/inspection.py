"""What can be asked of a collector's workers, between two of their rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tensordict import TensorDict

from asyncsync.collectors.inspection import InspectionAPI, as_calls
from asyncsync.collectors.multi.calls import CALL_SECONDS, Calls
from asyncsync.collectors.multi.driver import Driver
from asyncsync.collectors.profiling import ProfileConfig
from asyncsync.collectors.workers.channel import loads
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.schemes.none import NoSyncCore


class GroupInspection(InspectionAPI):
    """A part of :class:`asyncsync.collectors.multi.group_collector.GroupCollector`. What comes from a worker is a copy;
    what it raises there is raised here."""

    num_workers: int
    _group: WorkerGroup
    _driver: Driver
    _calls: Calls
    _sender_schemes: dict[str, Any]

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
