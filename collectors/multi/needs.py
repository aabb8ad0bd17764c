"""What a batch in production waits for, in either style: a thread that blocks, or a coroutine of any event loop.

Each can be waited for again after an interruption, so that who is interrupted leaves the batch to the next caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncsync.runtime.threads import WorkThread, finish

if TYPE_CHECKING:
    from asyncsync.collectors.multi.iteration import Commanding

__all__ = ["MESSAGES", "Need", "Update", "Work"]

T = TypeVar("T")


class Need(ABC):
    """Something to wait for."""

    @abstractmethod
    def wait(self, collector: Commanding) -> None: ...

    @abstractmethod
    async def wait_async(self, collector: Commanding) -> None: ...


class _Messages(Need):
    """A worker's batch."""

    def wait(self, collector: Commanding) -> None:
        group = collector._group
        group.until(lambda: bool(group.results), None)

    async def wait_async(self, collector: Commanding) -> None:
        group = collector._group
        await group.until_async(lambda: bool(group.results))


MESSAGES = _Messages()


class Update(Need):
    """The workers (None: all) act with the policy's current weights."""

    def __init__(self, workers: list[int] | None) -> None:
        self._workers = workers

    def wait(self, collector: Commanding) -> None:
        try:
            collector.update_policy_weights_(worker_ids=self._workers)
        except (StopIteration, StopAsyncIteration) as error:  # it would end somebody's iteration without a word
            raise RuntimeError(f"an updater raised {error!r}") from error
        collector._updated(self._workers)

    async def wait_async(self, collector: Commanding) -> None:
        try:
            await collector.update_policy_weights_async(worker_ids=self._workers)
        except (StopIteration, StopAsyncIteration) as error:
            raise RuntimeError(f"an updater raised {error!r}") from error
        collector._updated(self._workers)


class Work(Need, Generic[T]):
    """A result that takes long to compute: by a coroutine in a thread, beside its event loop.

    What is raised, Ctrl-C too, ends the batch in production: the next caller begins where the workers' messages are
    all that there is.

    Args:
        function: computes it.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._results: list[T] = []

    @property
    def result(self) -> T:
        return self._results[0]

    def wait(self, collector: Commanding) -> None:
        if self._results:
            return
        try:
            self._results.append(self._function())
        except (StopIteration, StopAsyncIteration) as error:  # it would end somebody's iteration without a word
            collector._producing = collector._need = None
            raise RuntimeError(f"postproc raised {error!r}") from error
        except BaseException:
            collector._producing = collector._need = None
            raise

    async def wait_async(self, collector: Commanding) -> None:
        if self._results:
            return
        thread = WorkThread("asyncsync-collector-batch")
        try:
            # Cancelled, it is finished all the same, and the next caller's.
            await finish(thread.submit(lambda: self.wait(collector)))
        finally:
            thread.abandon()
