"""Calls that workers answer between two rollouts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.collectors.workers.messages import dumps, loads
from asyncsync.errors import AckTimeout

CALL_SECONDS = 60.0
"""How long a call waits for its answer, which a worker gives between two rollouts."""


class Calls:
    """Calls to the workers of a group."""

    def __init__(self, group: WorkerGroup, count: int) -> None:
        self._group = group
        self._count = count

    def __call__(
        self, name: str, *arguments: Any, workers: Sequence[int] | None = None, timeout: float = CALL_SECONDS
    ) -> list[Any]:
        """Call :meth:`asyncsync.collectors.workers.worker.Worker` in workers (None: in all), and
        return their answers, or raise what one has raised.

        Raises AckTimeout after ``timeout`` seconds for all of them: workers still carry the call out.
        """
        pickled = dumps(arguments)
        return self._answers(name, dict.fromkeys(range(self._count) if workers is None else workers, pickled), timeout)

    def each(self, name: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float = CALL_SECONDS) -> list[Any]:
        """The same in these workers, with arguments of each one's own."""
        return self._answers(name, {worker: dumps(own) for worker, own in arguments.items()}, timeout)

    def _answers(self, name: str, pickled: Mapping[int, bytes], timeout: float) -> list[Any]:
        group = self._group
        deadline = time.monotonic() + timeout
        numbers: dict[int, int] = {}
        results = []
        try:
            for worker, arguments in pickled.items():
                numbers[worker] = group.call(worker, name, arguments)
            for worker, number in numbers.items():
                try:
                    answer = group.wait(partial(group.replies.get, number), max(0.0, deadline - time.monotonic()))
                except AckTimeout as error:
                    if error is group.failure:  # a worker's own
                        raise
                    raise AckTimeout(
                        f"worker {worker} did not answer ({name}) in time. It answers between two rollouts, and will "
                        "still carry out the call: pass a longer timeout="
                    ) from None
                results.append(_result(worker, *answer))
        finally:
            for number in numbers.values():
                group.replies.pop(number, None)
        return results

    async def answer(self, worker: int, name: str, *arguments: Any) -> Any:
        """Call one worker, on the loop thread, and wait for its answer as long as the group lasts. Raises what it has
        raised, and as :meth:`asyncsync.collectors.workers.group.WorkerGroup.until`."""
        number = self._group.call(worker, name, dumps(arguments))
        try:
            return _result(worker, *await self._group.until(partial(self._group.replies.get, number)))
        finally:
            self._group.replies.pop(number, None)


def _result(worker: int, failure: Any, result: Any) -> Any:
    if failure is not None:
        raise failure.error(f"worker {worker}")
    return loads(result)


def parts_of(state: Mapping[str, Any], part: str) -> list[Any]:
    """This part of a collector's state and of the states of its workers."""
    own = [state[part]] if part in state else []
    return own + [one for name, below in state.items() if name.startswith("worker") for one in parts_of(below, part)]


def are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two state dicts are equal."""

    def same(a: Any, b: Any) -> bool:
        try:
            return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
        except Exception:  # extra state that cannot be compared
            return False

    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
