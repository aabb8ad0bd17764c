"""What every collector is, wherever its environments run: an iterator in both styles with one end, hooks, and weights.

Usage, of any subclass::

    with collector:                                  # or: async with collector:
        for batch in collector:                      # or: async for batch in collector:
            loss(batch).backward()
            collector.update_policy_weights_()       # or: await collector.update_policy_weights_async()

The weights' side is :class:`asyncsync.collectors.weights.api.WeightsAPI`; what can be asked of a collector while it
works, :class:`asyncsync.collectors.inspection.InspectionAPI`. Names and defaults follow TorchRL's "RPCCollector" page
where it speaks of any collector.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from types import GenericAlias
from typing import Any, Protocol, Self

import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from asyncsync.collectors.arguments import check_callable
from asyncsync.collectors.inspection import InspectionAPI
from asyncsync.collectors.weights.api import WeightsAPI
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import Interruption, elsewhere

_log = logging.getLogger("asyncsync")

SHUTDOWN_SECONDS = 5.0

PreHook = Callable[[], None]
PostHook = Callable[[TensorDictBase], None]


def _part(path: str, doc: str = "The argument of this name, as it is used.") -> Any:
    """An attribute of one of a collector's parts, as the collector's own."""
    owner, _, name = path.rpartition(".")
    owned_by = attrgetter(owner)
    return property(attrgetter(path), lambda collector, value: setattr(owned_by(collector), name, value), doc=doc)


class Pause(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """A block, ``with`` or ``async with``, in which a collector does not step. Use each object once.

    ``block`` makes it, for the calling thread (None) or a task. Entering waits for the step under way; ``async with``
    does not block the event loop meanwhile. Leaving never waits.
    """

    def __init__(self, block: Callable[[object], AbstractContextManager[None]]) -> None:
        self._block = block
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._block(None))

    def __exit__(self, *exc: object) -> None:
        self._entered.close()

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        try:
            await elsewhere("asyncsync-collector-pause", lambda: self._entered.enter_context(self._block(task)))
        except asyncio.CancelledError:
            self._entered.close()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self._entered.close()


def is_caller(owners: Iterable[object]) -> bool:
    """Whether the calling thread or task is among these owners of blocks."""
    found = list(owners)
    if threading.get_ident() in found:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return False
    return task is not None and task in found


class Signals(Protocol):
    """What a collector that is a worker reads between two steps: what its trainer wants."""

    @property
    def calls(self) -> bool:
        """Whether :meth:`interrupts` is to be called. Read after each step, inside its hold, so it never waits."""

    def interrupts(self) -> bool:
        """Whether the rollout ends early. Called before a step, outside any hold; it may wait."""

    def counted(self) -> int:
        """How many versions updaters above have counted."""


@contextmanager
def logged_unless(raise_on_error: bool) -> Iterator[None]:
    """A block at a collector's end, whose errors are logged where nobody wants them raised."""
    try:
        yield
    except Exception:
        if raise_on_error:
            raise
        _log.exception("shutdown(raise_on_error=False) of a collector: an error is logged and not raised")


class Lifetime(ABC):
    """Made by its constructor or by :meth:`create`, and ended by :meth:`shutdown`, ``with`` or ``async with``."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> Self:
        """Construct without blocking the event loop: starting workers and environments takes seconds.
        ``async with await MultiAsyncCollector.create(…) as collector:``

        If it is cancelled, it shuts the new object down before it raises, without waiting for starting workers.
        """
        made: list[Self] = []
        interruption = Interruption()

        def make() -> None:
            with interruption.of_this_thread():
                made.append(cls(*args, **kwargs))

        try:
            await elsewhere("asyncsync-collector-start", make, interruption.interrupt)
        except asyncio.CancelledError:
            for one in made:
                await one._shutdown_elsewhere()
            raise
        return made[0]

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End all that the constructor has begun. Idempotent."""

    async def _shutdown_elsewhere(self) -> None:
        """:meth:`shutdown` without blocking the running loop."""
        await elsewhere("asyncsync-collector-end", self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._shutdown_elsewhere()


class BaseCollector(WeightsAPI, InspectionAPI, Lifetime, IterableDataset[TensorDictBase | None]):
    """Steps environments with a policy and yields batches of the steps. ``closed`` is True once :meth:`shutdown` has
    begun. A collector is an iterable data set: ``torch.utils.data.DataLoader(collector, batch_size=None,
    collate_fn=lambda batch: batch)`` yields the same batches."""

    _arguments: Any  # those that any collector has, and others
    total_frames = _part("_arguments.total_frames")
    init_random_frames = _part("_arguments.init_random_frames")
    split_trajs = _part("_arguments.split_trajs")
    postproc = _part("_arguments.postproc")
    replay_buffer = _part("_arguments.replay_buffer")
    _counts_frames = True  # False: a batch is of trajectories, however many frames they have

    def __init__(
        self,
        *,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        worker_idx: int | None = None,
    ) -> None:
        super().__init__()
        check_callable(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self.closed = False
        self._pre_collect_hook = pre_collect_hook
        self._post_collect_hook = post_collect_hook
        self._worker_idx = worker_idx
        self._free_error: BaseException | None = None

    def __class_getitem__(cls, item: Any) -> GenericAlias:
        # ray.remote() asks for the signature of every method, and the data set's own __class_getitem__ has none.
        return GenericAlias(cls, item)

    # -- iteration ----------------------------------------------------------------------------------------------------

    # What a hook raises ends a collector. In one with workers, so does what a worker or postproc raises, but a caller's
    # mistake does not; a single collector can go on after any of these. An iterator has no state: next() makes its own.

    @abstractmethod
    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_frames`` is reached; with a replay buffer, yield None for each batch."""

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        return self.iterator()

    def __len__(self) -> int:
        """Number of batches in all, if none is cut short. Raises TypeError: collection has no end, or batches are of
        whole trajectories. (TorchRL raises RuntimeError, which breaks ``list()`` and progress bars.)"""
        if self.total_frames == math.inf or not self._counts_frames:
            why = "no end" if self.total_frames == math.inf else "batches of whole trajectories"
            raise TypeError(f"this {type(self).__name__} has no length, because it has {why}")
        count: int = math.ceil(self.total_frames / self.requested_frames_per_batch)
        return count

    def __bool__(self) -> bool:
        return True  # whatever its length

    def next(self) -> TensorDictBase | None:
        """The next batch. None: there are no more, or batches go to a replay buffer."""
        return next(self.iterator(), None)

    def __aiter__(self) -> AsyncIterator[TensorDictBase | None]:
        return self

    @abstractmethod
    async def __anext__(self) -> TensorDictBase | None:
        """The next batch. Cancelling loses no batch. Raises StopAsyncIteration at the end."""

    # -- the end ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End collection, schemes and workers. Idempotent.

        Args:
            timeout: seconds until whatever still runs is cut off. None: 5.
            close_env: True: close the environments.
            raise_on_error: True: raise errors. False: log them.
        """

    def _check_open(self) -> None:
        """Raises ClosedError: after :meth:`shutdown`."""
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} has been shut down")

    # -- running free -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer, in the background, until ``total_frames``, :meth:`async_shutdown` or
        :meth:`shutdown`. Does nothing if the collector is running already.

        An error in the background is logged, and raised by the next :meth:`pause`, :meth:`async_shutdown` or
        :meth:`shutdown`.

        Raises:
            NotImplementedError: the collector has no replay buffer.
            ClosedError: the collector was shut down.
        """
        if self.replay_buffer is None:
            raise NotImplementedError(
                f"{type(self).__name__}.start() needs a replay buffer: pass replay_buffer=, or iterate instead"
            )
        self._check_open()
        self._set_free()

    @abstractmethod
    def _set_free(self) -> None:
        """Collect in the background, unless that runs."""

    @abstractmethod
    def is_running(self) -> bool:
        """Whether the collector collects in the background."""

    def _raise_free_error(self) -> None:
        """Raise what ended collection in the background, once."""
        error, self._free_error = self._free_error, None
        if error is not None:
            raise error

    @abstractmethod
    def pause(self) -> Pause:
        """A block, ``with`` or ``async with``, in which the collector does not step."""

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End a collector that :meth:`start` has started; the same as :meth:`shutdown`."""
        self.shutdown(timeout, close_env)

    # -- hooks --------------------------------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """Called before each rollout, in the process that rolls out. If it raises, collection ends."""
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._set_in_workers("pre_hook", hook)
        self._pre_collect_hook = hook

    @property
    def post_collect_hook(self) -> PostHook | None:
        """Called with each batch before it is handed out, in the process that rolls out. If it raises, collection
        ends."""
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._set_in_workers("post_hook", hook)
        self._post_collect_hook = hook

    def _set_in_workers(self, name: str, hook: Callable[..., None] | None) -> None:
        """Have the workers, if there are any, call this hook."""

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set :attr:`post_collect_hook`. For callers that can only call methods, such as those of a remote actor."""
        self.post_collect_hook = hook

    # -- being a part of something larger -----------------------------------------------------------------------------

    @property
    def worker_idx(self) -> int:
        """Index of this collector among the workers of a larger one, from 0.

        Raises:
            RuntimeError: it was never set.
        """
        if self._worker_idx is None:
            raise RuntimeError(
                "worker_idx was never set, so this collector is not the worker of another one. "
                "If it is, pass worker_idx= to the constructor, or set collector.worker_idx"
            )
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        self._worker_idx = worker_idx

    # Whoever runs a collector as a worker calls these.

    @abstractmethod
    def _attach(self, signals: Signals, sink: Callable[[Any], TensorDictBase | None]) -> None:
        """Become a worker that heeds these signals. ``sink`` returns memory for a batch of a
        :class:`~asyncsync.collectors.batch_layout.BatchLayout`; None: the collector uses its own."""

    def _follow(self, place: Any, index: int, newest: Callable[[], int] | None) -> None:
        """Have ``max_lag`` compare with the newest version published for this collector, which its own workers read as
        number ``index`` at ``place``, and this process by ``newest``. None: there is none to read."""
        self._weights.newest_above = newest

    @abstractmethod
    def _rollout_for_parent(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]:
        """One rollout before ``split_trajs`` and ``postproc``, and its number of frames. ``random``: without the
        policy; ``writes``: the frames go to the replay buffer, and there is no batch."""

    @abstractmethod
    def _interrupt(self, timeout: float, close_env: bool) -> None:
        """End, from another thread, what this collector waits for beside its own steps."""

    @abstractmethod
    def _policy_devices(self) -> set[torch.device]:
        """The devices on which its policies act."""

    def _batch_dims(self) -> int | None:
        """How many batch dimensions its environment has; None: it has none of its own."""
        return None
