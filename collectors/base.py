"""What every collector is, wherever its environments run: an iterator in both styles with one end, hooks, and weights.

The weights' side is :class:`asyncsync.collectors.weights.updates.WeightsAPI`. Names and defaults follow TorchRL's
"RPCCollector" page where it speaks of any collector.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from operator import attrgetter
from pathlib import Path
from types import GenericAlias
from typing import Any, Protocol, Self

import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from asyncsync.collectors.profiling import ProfileConfig
from asyncsync.collectors.weights.updates import WeightsAPI
from asyncsync.errors import ClosedError
from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import Interruption, interrupted_by, run_in_thread
from asyncsync.schemes.sources import follow_path

_log = logging.getLogger("asyncsync")

SHUTDOWN_SECONDS = 5.0
ANSWER_SECONDS = 60.0
"""How long a call waits for the step under way, or for an answer of a worker, which comes between two rollouts."""

PreHook = Callable[[], None]
PostHook = Callable[[TensorDictBase], None]


def _part(path: str, doc: str = "The argument of this name, as it is used.") -> Any:
    """An attribute of one of a collector's parts, as the collector's own."""
    owner, _, name = path.rpartition(".")
    owned_by = attrgetter(owner)
    return property(attrgetter(path), lambda collector, value: setattr(owned_by(collector), name, value), doc=doc)


class Pause(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """A block, ``with`` or ``async with``, in which a collector does not step. Use each object once.

    ``block`` makes it, for the calling thread (by its identifier) or a task. Entering waits for the step under way;
    ``async with`` does not block the event loop meanwhile. Leaving never waits.
    """

    def __init__(self, block: Callable[[object], AbstractContextManager[None]]) -> None:
        self._block = block
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._block(threading.get_ident()))

    def __exit__(self, *exc: object) -> None:
        self._entered.close()

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        try:
            await run_in_thread("asyncsync-collector-pause", lambda: self._entered.enter_context(self._block(task)))
        except asyncio.CancelledError:
            self._entered.close()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self._entered.close()


def check_not_paused_here(name: str, owners: Iterable[object]) -> None:
    """Raises RuntimeError: the calling thread or task, about to wait for a rollout, is among these owners of pauses."""
    task = asyncio.current_task() if running_loop() is not None else None
    if any(owner in (threading.get_ident(), task) for owner in list(owners)):
        raise RuntimeError(f"this thread has paused this {name}: leave the pause() block before collecting")


class Signals(Protocol):
    """What a collector that is a worker reads between two steps: what its trainer wants."""

    @property
    def calls(self) -> bool:
        """Whether the hold is to end, as :meth:`interrupts` or :meth:`counted` has something new. Read after each step,
        inside its hold, so it never waits."""

    def interrupts(self) -> bool:
        """Whether the rollout ends early. Called before a step, outside any hold; it may wait."""

    def counted(self) -> int:
        """How many versions updaters above have counted."""


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
            with interrupted_by(interruption):
                made.append(cls(*args, **kwargs))

        try:
            await run_in_thread("asyncsync-collector-start", make, interruption.interrupt)
        except asyncio.CancelledError:
            for one in made:
                await run_in_thread("asyncsync-collector-end", one.shutdown)
            raise
        return made[0]

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End all that the constructor has begun. Idempotent."""

    async def shutdown_elsewhere(self) -> None:
        await run_in_thread("asyncsync-collector-end", self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown_elsewhere()


class BaseCollector(WeightsAPI, Lifetime, IterableDataset[TensorDictBase | None]):
    """Steps environments with a policy and yields batches of the steps. ``closed`` is True once :meth:`shutdown` has
    begun. A collector is an iterable data set: ``torch.utils.data.DataLoader(collector, batch_size=None,
    collate_fn=lambda batch: batch)`` yields the same batches."""

    _arguments: Any  # those that any collector has, and others
    total_frames = _part("_arguments.total_frames")
    init_random_frames = _part("_arguments.init_random_frames")
    split_trajs = _part("_arguments.split_trajs")
    postproc = _part("_arguments.postproc")
    replay_buffer = _part("_arguments.replay_buffer")
    requested_frames_per_batch: Any
    _collected: Any  # frames
    _iter: Any  # batches before the newest one
    _profile_config: ProfileConfig | None = None
    free_error: BaseException | None = None  # what ended collection in the background, until it was raised
    _count_of_calls: Any = None  # how many calls map_fn makes; None: as many as are given
    _counts_frames = True  # False: a batch is of trajectories, however many frames they have

    def __init__(
        self, pre_collect_hook: PreHook | None, post_collect_hook: PostHook | None, worker_idx: int | None
    ) -> None:
        super().__init__()
        self.closed = False
        self._pre_collect_hook = pre_collect_hook
        self._post_collect_hook = post_collect_hook
        self._worker_idx = worker_idx

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
        return math.ceil(int(self.total_frames) / int(self.requested_frames_per_batch))

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

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End collection before the next step, then workers, environments and schemes. Idempotent; leaves no process.

        In a forked process, this closes only that process's copy of a collector with workers; the workers go on.

        Args:
            timeout: seconds. None: 5. A worker that has not ended after most of it is killed. Without workers, if the
                step under way takes longer, its thread closes the environment when the step has ended.
            close_env: True: close the environments.
            raise_on_error: True: raise errors. False: log them.

        Raises:
            BaseException: the error that ended collection in the background, or, without workers, an error of the
                environment's ``close``.
        """
        try:
            self._end(SHUTDOWN_SECONDS if timeout is None else timeout, close_env)
        except Exception:
            if raise_on_error:
                raise
            _log.exception("shutdown(raise_on_error=False) of a collector: an error is logged and not raised")

    @abstractmethod
    def _end(self, timeout: float, close_env: bool) -> None:
        """End within so many seconds. Idempotent."""

    def _check_open(self) -> None:
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
            raise NotImplementedError(f"{type(self).__name__}.start() needs a buffer: pass replay_buffer=, or iterate")
        self._check_open()
        self._set_free()

    @abstractmethod
    def _set_free(self) -> None:
        """Collect in the background, unless that runs."""

    @abstractmethod
    def is_running(self) -> bool:
        """Whether the collector collects in the background."""

    def raise_free_error(self) -> None:
        error, self.free_error = self.free_error, None
        if error is not None:
            raise error

    def pause(self) -> Pause:
        """A block, ``with`` or ``async with``, in which neither the collector nor a worker steps or writes to the
        replay buffer. Blocks may be nested. Another thread or task that iterates meanwhile waits for the end of the
        block.

        Entering waits for the step under way (for a worker that has workers: its batch under way). ``async with`` does
        not block the event loop meanwhile. If it is cancelled, it raises once the step has ended.

        Raises:
            ClosedError: the collector was shut down.
            AckTimeout: a step under way did not end within 60 s.
            BaseException: the error that ended collection in the background.
        """
        return Pause(self._paused)

    @abstractmethod
    def _paused(self, owner: object) -> AbstractContextManager[None]:
        """A block of a thread, by its identifier, or of a task, in which nothing steps."""

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

    # -- seeds and checkpoints ----------------------------------------------------------------------------------------

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False, *, timeout: float = ANSWER_SECONDS) -> int:
        """Seed and reset the environments, which begin new trajectories. Returns a seed for a further environment. With
        workers: seed them in turn, each with the seed that the one before returned; there, torch, NumPy and Python too.

        Args:
            seed: seed of the first environment.
            static_seed: True: all environments get the same seed.
            timeout: seconds for the step under way or, with workers, for each one's answer, between two rollouts.

        Raises:
            ClosedError: the collector was shut down.
            AckTimeout: it took longer. A worker will still carry out the call.
        """

    @abstractmethod
    def fake_tensordict(self, *, timeout: float = ANSWER_SECONDS) -> TensorDictBase:
        """A batch of zeros with the layout of a real one, after ``split_trajs`` and ``postproc``. Does not step the
        environment. Calls the policy once, on zeros, unless there was a rollout before. ``timeout``: see
        :meth:`set_seed`, which raises the same errors.

        Raises:
            TypeError: there was no rollout yet, and an environment has neither ``fake_tensordict()`` nor a
                ``reward_spec``.
        """

    @abstractmethod
    def state_dict(self, *, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        """A dict of ``policy_state_dict``, ``env_state_dict``, ``frames``, ``iter``, ``versions``, and ``traj_pool`` if
        trajectories are tracked. With workers: of each worker's state dict, ``worker0``, ``worker1``, …, and
        ``frames``, ``iter``, ``versions``.

        All of it is a copy, which later updates do not change. It does not contain unfinished trajectories. Without
        workers, may also be called after ``shutdown()``. ``timeout``: see :meth:`set_seed`, which raises the same
        errors.
        """

    @abstractmethod
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, *, timeout: float = ANSWER_SECONDS
    ) -> None:
        """Continue from what :meth:`state_dict` returned, with new trajectories. Versions continue too, so no new frame
        gets the version of an earlier one.

        With workers: if all of them had the same policy, it is also loaded into the registered policy and sent. If each
        worker had its own, each gets its own.

        Args:
            state_dict: state dict of a collector with as many workers.
            strict: True: every part must be there. False: load the parts that are there.
            timeout: see :meth:`set_seed`, which raises the same errors.

        Raises:
            KeyError: a part is missing, and ``strict`` is True. Nothing was changed.
        """

    # -- attributes and calls -----------------------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method at an attribute path, such as ``env.close`` or ``_receiver_schemes['policy'].connect``.

        Args:
            attr_path: path from this collector: attributes, ``['key']`` and ``[0]``.
            args, kwargs: arguments of the call.

        Returns:
            The result of the call.

        Raises:
            ValueError: there is no such path.
            TypeError: the object at the path cannot be called.
        """
        try:
            function = follow_path(self, attr_path)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{type(self).__name__} has no {attr_path!r}: {error!r}") from error
        if not callable(function):
            raise TypeError(f"{attr_path!r} is a {type(function).__name__}, not a method: give the path of one")
        return function(*args, **kwargs)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        *,
        timeout: float = ANSWER_SECONDS,
    ) -> list[Any]:
        """Call a method of this collector once per entry of these lists or, with workers, the method of each worker's
        collector with that worker's entries. Return the results in this order.

        Args:
            method_name: name of the method, or a path as for :meth:`cascade_execute`.
            list_of_args: positional arguments of each call.
            list_of_kwargs: keyword arguments of each call.
            timeout: seconds. Workers answer between two rollouts.

        Raises:
            ValueError: the lists differ in length, or a list does not have one entry per worker, or there is no such
                method.
            TypeError: the object of this name cannot be called.
            AckTimeout: a worker did not answer within the timeout. It will still carry out the call.
            Exception: a call raised it.
        """
        lengths = [len(given) for given in (list_of_args, list_of_kwargs) if given is not None]
        count = self._count_of_calls or max(lengths, default=1)
        if any(length != count for length in lengths):
            found = " and ".join(map(str, lengths))
            raise ValueError(f"list_of_args and list_of_kwargs need {count} entries each, but they have {found}")
        args = [()] * count if list_of_args is None else list_of_args
        kwargs = [{}] * count if list_of_kwargs is None else list_of_kwargs
        calls = [(tuple(one), dict(other)) for one, other in zip(args, kwargs, strict=True)]
        return self._call_each(method_name, calls, timeout)

    def _call_each(
        self, path: str, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], timeout: float
    ) -> list[Any]:
        return [self.cascade_execute(path, *args, **kwargs) for args, kwargs in calls]

    def get_distant_attr(self, attr: str, *, timeout: float = ANSWER_SECONDS) -> Any:
        """The object at an attribute path from this collector, such as ``env.transform[0].scale``. With workers: a
        list of copies, one from each worker's collector. A worker that has workers gives a list of theirs.

        Raises:
            AttributeError: there is no such path.
            AckTimeout: a worker did not answer within the timeout (seconds). Workers answer between two rollouts.
        """
        return self._look_up("", attr, timeout)

    def getattr_policy(self, attr: str, *, timeout: float = ANSWER_SECONDS) -> Any:
        """The object at an attribute path from the acting policy or, with workers, a copy from the first one's. Raises
        the same as :meth:`get_distant_attr`."""
        return self._look_up("policy", attr, timeout)

    def getattr_env(self, attr: str, *, timeout: float = ANSWER_SECONDS) -> Any:
        """The object at an attribute path from the environment or, with workers, a copy from the first one's. Raises
        the same as :meth:`get_distant_attr`."""
        return self._look_up("env", attr, timeout)

    def getattr_rb(self, attr: str) -> Any:
        """The object at an attribute path from the replay buffer.

        Raises:
            AttributeError: there is no such path, or no replay buffer.
        """
        if self.replay_buffer is None:
            raise AttributeError(f"this {type(self).__name__} has no replay buffer from which to read {attr!r}")
        return self._look_up("replay_buffer", attr, ANSWER_SECONDS)

    def _look_up(self, owner: str, path: str, timeout: float) -> Any:
        """The object at a path from this attribute of the collector, or ("") from the collector itself."""
        start = getattr(self, owner) if owner else self
        try:
            return follow_path(start, path)
        except (AttributeError, LookupError, TypeError) as error:
            raise AttributeError(f"{type(start).__name__} has no {path!r}: {error!r}") from error

    def get_policy_version(self) -> int:
        """:attr:`policy_version`, for callers that can only call methods, such as those of a remote actor."""
        return int(self.policy_version)

    # -- statistics ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | bool]:
        """Progress: ``frames`` and ``batches`` so far, ``requested_frames_per_batch``, ``policy_version`` and, if
        collection has an end, ``total_frames`` and ``completed``. Neither waits nor changes anything. Any thread may
        call it at any time."""
        found: dict[str, int | float | bool] = {"frames": self._collected, "batches": self._iter + 1}
        if self.total_frames < math.inf:
            found |= {"total_frames": self.total_frames, "completed": self._collected >= self.total_frames}
        return found | {
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self.get_policy_version(),
        }

    # -- profiles -----------------------------------------------------------------------------------------------------

    def enable_profile(
        self,
        *,
        workers: list[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        activities: list[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = True,
        with_flops: bool = False,
        on_trace_ready: Callable[[Any], None] | None = None,
    ) -> None:
        """Record the next rollouts by torch's profiler, in the process that does them. Each worker writes a trace for
        ``chrome://tracing`` or Perfetto. May be called at any time. Recording ends with the collector at the latest.

        If a thread of the collector rolls out (``async for``, :meth:`start`), ending a recording early takes effect in
        that thread, with the rollout under way or the next one.

        Args:
            workers: indices of the workers to record. None: the first. A worker that has workers records all of them,
                and ``{worker_idx}`` is then like ``0_1``. Ignored by a collector without workers.
            num_rollouts: rollouts of each worker, including those for warming up.
            warmup_rollouts: this many rollouts at the start are not recorded.
            save_path: path of the trace, in which ``{worker_idx}`` stands for the worker. None:
                ``./collector_profile_{worker_idx}.json``. Missing directories are created.
            activities: "cpu", "cuda". None: both, if available.
            record_shapes, profile_memory, with_stack, with_flops: see ``torch.profiler.profile``.
            on_trace_ready: called with the profiler, in the process that rolls out, instead of writing a file. Pickled
                by cloudpickle. If it raises, collection ends.

        Raises:
            ValueError: no rollout would be recorded, or a worker or an activity is unknown.
            RuntimeError: another thread still runs an earlier recording.
            OSError: the trace's directory cannot be created.
            ClosedError: the collector was shut down.
        """
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        config = ProfileConfig(**given)
        self.record(config, "")
        self._profile_config = config

    def disable_profile(self) -> None:
        """End the recording and write the trace. Does nothing if no recording was enabled."""
        if self._profile_config is not None and not self.closed:
            self.record(None, "")
        self._profile_config = None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What the last :meth:`enable_profile` asked for. None: never called, or :meth:`disable_profile` came later."""
        return self._profile_config

    # Record the rollouts that follow, of the worker of this name ("": this is none); None: no more of them.
    @abstractmethod
    def record(self, config: ProfileConfig | None, name: str) -> None: ...

    # -- being a part of something larger -----------------------------------------------------------------------------

    @property
    def worker_idx(self) -> int:
        """Index of this collector among the workers of a larger one, from 0.

        Raises:
            RuntimeError: it was never set.
        """
        if self._worker_idx is None:
            raise RuntimeError("worker_idx was never set: if this is a worker, pass worker_idx= to it, or set it")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        self._worker_idx = worker_idx

    # Whoever runs a collector as a worker calls these.

    # Heed these signals. sink(layout) returns memory for a batch, or None: the collector uses its own.
    @abstractmethod
    def become_worker(self, signals: Signals, sink: Callable[[Any], TensorDictBase | None]) -> None: ...

    # Have max_lag compare with the newest version that is published for worker ``index`` on the control page at this
    # place; None: only with what schemes bring.
    @abstractmethod
    def follow_versions(self, place: Any, index: int) -> None: ...

    # One rollout before split_trajs and postproc, and its frames. writes: into the replay buffer, so there is no batch.
    @abstractmethod
    def rollout_for_trainer(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]: ...

    # End, from another thread, what this collector waits for beside its own steps.
    @abstractmethod
    def end_waits(self, timeout: float, close_env: bool) -> None: ...

    @abstractmethod
    def policy_devices(self) -> set[torch.device]: ...

    def batch_dims(self) -> int | None:
        return None  # it has no environment of its own
