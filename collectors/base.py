"""What all collectors share, wherever their environments run: iteration in both styles, shutdown, hooks, and calls.

:class:`asyncsync.collectors.weights.updates.WeightsAPI` adds the weights. Names and defaults follow the parts of
TorchRL's "RPCCollector" page that apply to any collector.
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
"""How long a call waits for the current step to end, or for a worker's answer. Workers answer between two rollouts."""

PreHook = Callable[[], None]
PostHook = Callable[[TensorDictBase], None]


def _delegated(path: str, doc: str = "The argument of this name, as it is used.") -> Any:
    """A property that reads and sets the attribute at this path from the collector, such as
    ``_arguments.total_frames``."""
    owner, _, name = path.rpartition(".")
    owned_by = attrgetter(owner)
    return property(attrgetter(path), lambda collector, value: setattr(owned_by(collector), name, value), doc=doc)


def _hook(name: str, doc: str) -> Any:
    """The property of a hook. Setting it sets the hook in the workers, too."""

    def set_hook(self: BaseCollector, hook: PreHook | PostHook | None) -> None:
        self._set_in_workers(name, hook)
        setattr(self, f"_{name}", hook)

    return property(attrgetter(f"_{name}"), set_hook, doc=doc)


class Pause(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """A block, ``with`` or ``async with``, in which a collector does not step. Use each object once.

    Entering waits for the current step to end; ``async with`` does not block the event loop meanwhile. Leaving never
    waits. ``block`` makes the block for an owner, which is a thread's identifier or a task.
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
    """Raises RuntimeError: the calling thread or task wants to wait for a rollout, but owns one of these pauses."""
    task = asyncio.current_task() if running_loop() is not None else None
    if any(owner in (threading.get_ident(), task) for owner in list(owners)):
        raise RuntimeError(f"this thread has paused this {name}: leave the pause() block before collecting")


class Signals(Protocol):
    """The trainer's wishes, which a worker's collector reads between two steps."""

    @property
    def wants_hold_to_end(self) -> bool:
        """Whether the hold must end, because a method below has news. Read inside the hold, so it never waits."""

    def wants_rollout_to_end(self) -> bool:
        """Whether the rollout must end early. Called before a step, outside any hold; may wait."""

    def updater_versions(self) -> int:
        """How many versions the weight updaters of the trainer, and of collectors above it, have counted."""


class Lifetime(ABC):
    """An object that :meth:`shutdown`, or the end of a ``with`` or ``async with`` block, ends."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> Self:
        """Construct without blocking the event loop, because starting workers and environments takes seconds. Use
        ``async with await MultiAsyncCollector.create(…) as collector:``

        If cancelled, it interrupts the constructor instead of waiting for starting workers, shuts down what was made,
        and raises.
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
                await one.shutdown_elsewhere()
            raise
        return made[0]

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End everything that the constructor started. Idempotent."""

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
    begun. A collector is also an iterable data set: ``torch.utils.data.DataLoader(collector, batch_size=None,
    collate_fn=lambda batch: batch)`` yields the same batches."""

    _arguments: Any  # the arguments below, and those of the subclass
    total_frames = _delegated("_arguments.total_frames")
    init_random_frames = _delegated("_arguments.init_random_frames")
    split_trajs = _delegated("_arguments.split_trajs")
    postproc = _delegated("_arguments.postproc")
    replay_buffer = _delegated("_arguments.replay_buffer")
    requested_frames_per_batch: Any
    _num_frames: Any  # collected so far
    _newest_index: Any  # of the newest batch; -1: there was none
    _profile_config: ProfileConfig | None = None
    background_error: BaseException | None = None  # the error that ended background collection, until it is raised
    num_workers: int  # only of a collector with workers
    _has_fixed_batches = True  # False: a batch has a number of trajectories, of any length

    def __init__(
        self, pre_collect_hook: PreHook | None, post_collect_hook: PostHook | None, worker_idx: int | None
    ) -> None:
        super().__init__()
        self.closed = False
        self._pre_hook, self._post_hook = pre_collect_hook, post_collect_hook
        self._worker_idx = worker_idx

    def __class_getitem__(cls, item: Any) -> GenericAlias:
        # ray.remote() inspects the signature of every method, and IterableDataset's __class_getitem__ has none.
        return GenericAlias(cls, item)

    # -- iteration ----------------------------------------------------------------------------------------------------

    # An error of a hook ends any collector. An error of a worker or of postproc ends a collector with workers; a
    # collector without workers can continue after an error of its environment, policy or postproc. A caller's mistake
    # ends neither. Iterators keep no state of their own, so next() makes a new one each time.

    @abstractmethod
    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_frames`` is reached; with a replay buffer, yield None for each batch."""

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        return self.iterator()

    def __len__(self) -> int:
        """Total number of batches, if none is cut short. Raises TypeError: collection has no end, or a batch is a
        number of whole trajectories. (TorchRL raises RuntimeError, which breaks ``list()`` and progress bars.)"""
        if self.total_frames == math.inf or not self._has_fixed_batches:
            why = "no end" if self.total_frames == math.inf else "batches of whole trajectories"
            raise TypeError(f"this {type(self).__name__} has no length, because it has {why}")
        return math.ceil(int(self.total_frames) / int(self.requested_frames_per_batch))

    def __bool__(self) -> bool:
        return True  # Python would otherwise call __len__

    def next(self) -> TensorDictBase | None:
        """The next batch. None: there are no more batches, or batches go to a replay buffer."""
        return next(self.iterator(), None)

    def __aiter__(self) -> AsyncIterator[TensorDictBase | None]:
        return self

    @abstractmethod
    async def __anext__(self) -> TensorDictBase | None:
        """The next batch. Cancelling loses no batch. Raises StopAsyncIteration at the end."""

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop before the next step, and end workers, environments and schemes. Idempotent; leaves no process.

        In a forked process, this closes only that process's copy of a collector with workers. The workers continue.

        Args:
            timeout: seconds. None: 5. A worker that has not ended after most of this time is killed. Without workers,
                if the current step takes longer, its thread closes the environment after the step.
            close_env: True: close the environments.
            raise_on_error: True: raise errors. False: log them.

        Raises:
            BaseException: the error that ended background collection; without workers, also one of the environment's
                ``close``.
        """
        try:
            self._end(SHUTDOWN_SECONDS if timeout is None else timeout, close_env)
        except Exception:
            if raise_on_error:
                raise
            _log.exception("a collector's shutdown(raise_on_error=False) does not raise this error")

    @abstractmethod
    def _end(self, timeout: float, close_env: bool) -> None:
        """Shut down within ``timeout`` seconds. Idempotent."""

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} has been shut down")

    # -- collection in the background ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in the background, until ``total_frames``, :meth:`async_shutdown` or
        :meth:`shutdown`. Does nothing if the collector already runs.

        An error in the background is logged, and the next :meth:`pause`, :meth:`async_shutdown` or :meth:`shutdown`
        raises it.

        Raises:
            NotImplementedError: the collector has no replay buffer.
            ClosedError: the collector was shut down.
        """
        if self.replay_buffer is None:
            raise NotImplementedError(f"{type(self).__name__}.start() needs a buffer: pass replay_buffer=, or iterate")
        self._check_open()
        self._start_background()

    @abstractmethod
    def _start_background(self) -> None:
        """Collect in the background, unless this already happens."""

    @abstractmethod
    def is_running(self) -> bool:
        """Whether the collector runs in the background."""

    def raise_background_error(self) -> None:
        error, self.background_error = self.background_error, None
        if error is not None:
            raise error

    def pause(self) -> Pause:
        """A block, ``with`` or ``async with``, in which neither the collector nor a worker steps or writes to the
        replay buffer. Blocks may be nested. Other threads and tasks that want a batch wait for the end of the block.

        Entering waits for the current step to end (for a worker with workers of its own: for its current batch).
        ``async with`` does not block the event loop meanwhile. If cancelled, it raises after that step.

        Raises:
            ClosedError: the collector was shut down.
            AckTimeout: a current step did not end within 60 s.
            BaseException: the error that ended background collection.
        """
        return Pause(self._paused)

    @abstractmethod
    def _paused(self, owner: object) -> AbstractContextManager[None]:
        """A block in which nothing steps. ``owner``: the thread that enters it (its identifier), or the task."""

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """The same as :meth:`shutdown`; TorchRL's name for ending a collector that :meth:`start` started."""
        self.shutdown(timeout, close_env)

    # -- hooks --------------------------------------------------------------------------------------------------------

    pre_collect_hook = _hook(
        "pre_hook", "Called before each rollout, in the process that rolls out. If it raises, collection ends."
    )
    post_collect_hook = _hook(
        "post_hook",
        "Called with each batch before the caller gets it, in the process that rolls out. If it raises, collection "
        "ends.",
    )

    def _set_in_workers(self, name: str, hook: Callable[..., None] | None) -> None:
        """Set this hook in the workers, if there are any."""

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set :attr:`post_collect_hook`; for callers that can only call methods, such as a remote actor's."""
        self.post_collect_hook = hook

    # -- seeds and checkpoints ----------------------------------------------------------------------------------------

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False, *, timeout: float = ANSWER_SECONDS) -> int:
        """Seed and reset the environments, which begin new trajectories. Returns the seed for one more environment.
        With workers: seed them one after another, each with the seed that the one before returned. In a worker, this
        also seeds torch, NumPy and Python.

        Args:
            seed: seed of the first environment.
            static_seed: True: all environments get the same seed.
            timeout: seconds for the current step or, with workers, for each worker's answer between two rollouts.

        Raises:
            ClosedError: the collector was shut down.
            AckTimeout: the timeout ended first. A worker will still carry out the call.
        """

    @abstractmethod
    def fake_tensordict(self, *, timeout: float = ANSWER_SECONDS) -> TensorDictBase:
        """A batch of zeros with the layout of a real batch, after ``split_trajs`` and ``postproc``. Does not step the
        environment. Before the first rollout, calls the policy once, on zeros. ``timeout`` and further errors: see
        :meth:`set_seed`.

        Raises:
            TypeError: there was no rollout yet, and an environment has neither ``fake_tensordict()`` nor a
                ``reward_spec``.
        """

    @abstractmethod
    def state_dict(self, *, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        """A dict of ``policy_state_dict``, ``env_state_dict``, ``frames``, ``iter``, ``versions`` and, if trajectories
        are tracked, ``traj_pool``. With workers: the state dicts of the workers, ``worker0``, ``worker1``, …, and
        ``frames``, ``iter``, ``versions``.

        Everything is a copy, which later updates do not change. Unfinished trajectories are not saved. Without workers,
        this also works after ``shutdown()``. ``timeout`` and errors: see :meth:`set_seed`.
        """

    @abstractmethod
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, *, timeout: float = ANSWER_SECONDS
    ) -> None:
        """Continue from a result of :meth:`state_dict`, with new trajectories. Versions continue too, so no new frame
        gets the version of an earlier one.

        With workers: if all workers had the same policy, it is also loaded into the registered policy and sent. If each
        worker had its own, each gets its own back.

        Args:
            state_dict: state dict of a collector with as many workers.
            strict: True: every part must be present. False: load the parts that are present.
            timeout: see :meth:`set_seed`, also for further errors.

        Raises:
            KeyError: a part is missing, and ``strict`` is True. Nothing was changed.
        """

    # -- attributes and calls -----------------------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method at an attribute path, such as ``env.close`` or ``_receiver_schemes['policy'].connect``, and
        return its result.

        Args:
            attr_path: path from this collector: attributes, ``['key']`` and ``[0]``.
            args, kwargs: arguments of the call.

        Raises:
            ValueError: there is no such path.
            TypeError: the object at the path is not callable.
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
        """Call a method of this collector once per list entry and return the results in order. With workers: call the
        method of each worker's collector, with the worker's list entries.

        Args:
            method_name: name of the method, or a path as for :meth:`cascade_execute`.
            list_of_args: positional arguments of each call.
            list_of_kwargs: keyword arguments of each call.
            timeout: seconds. Workers answer between two rollouts.

        Raises:
            ValueError: the lists differ in length, or do not have one entry per worker, or there is no such method.
            TypeError: the object of this name is not callable.
            AckTimeout: a worker did not answer within the timeout. It will still carry out the call.
            Exception: a call raised it.
        """
        lengths = [len(given) for given in (list_of_args, list_of_kwargs) if given is not None]
        count = self.num_workers if self.acts_elsewhere else max(lengths, default=1)
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
        list with a copy from each worker's collector; a worker that has workers itself returns a list of theirs.

        Raises:
            AttributeError: there is no such path.
            AckTimeout: a worker did not answer within the timeout (seconds). Workers answer between two rollouts.
        """
        return self._look_up("", attr, timeout)

    def getattr_policy(self, attr: str, *, timeout: float = ANSWER_SECONDS) -> Any:
        """The object at an attribute path from the acting policy; with workers, a copy from the first worker's policy.
        Errors: see :meth:`get_distant_attr`."""
        return self._look_up("policy", attr, timeout)

    def getattr_env(self, attr: str, *, timeout: float = ANSWER_SECONDS) -> Any:
        """The object at an attribute path from the environment; with workers, a copy from the first worker's
        environment. Errors: see :meth:`get_distant_attr`."""
        return self._look_up("env", attr, timeout)

    def getattr_rb(self, attr: str) -> Any:
        """The object at an attribute path from the replay buffer.

        Raises:
            AttributeError: there is no such path, or the collector has no replay buffer.
        """
        if self.replay_buffer is None:
            raise AttributeError(f"this {type(self).__name__} has no replay buffer from which to read {attr!r}")
        return self._look_up("replay_buffer", attr, ANSWER_SECONDS)

    def _look_up(self, owner: str, path: str, timeout: float) -> Any:
        """The object at ``path`` from the attribute ``owner`` of the collector; "": from the collector itself."""
        start = getattr(self, owner) if owner else self
        try:
            return follow_path(start, path)
        except (AttributeError, LookupError, TypeError) as error:
            raise AttributeError(f"{type(start).__name__} has no {path!r}: {error!r}") from error

    def get_policy_version(self) -> int:
        """:attr:`policy_version`, for callers that can only call methods, such as a remote actor's."""
        return int(self.policy_version)

    # -- statistics ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | bool]:
        """Progress: ``frames`` and ``batches`` so far, ``requested_frames_per_batch``, ``policy_version`` and, if
        collection has an end, ``total_frames`` and ``completed``. Never waits; any thread may call it."""
        found: dict[str, int | float | bool] = {"frames": self._num_frames, "batches": self._newest_index + 1}
        if self.total_frames < math.inf:
            found |= {"total_frames": self.total_frames, "completed": self._num_frames >= self.total_frames}
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
        """Record the next rollouts with torch's profiler, in the process that rolls out. Each recorded worker writes a
        trace for ``chrome://tracing`` or Perfetto. May be called at any time. The end of the collector ends recording.

        If a thread of the collector rolls out (``async for``, :meth:`start`), an early end of the recording takes
        effect in that thread, with the current rollout or the next one.

        Args:
            workers: indices of the workers to record. None: the first. A worker with workers of its own records all of
                them, and ``{worker_idx}`` is then like ``0_1``. A collector without workers ignores this.
            num_rollouts: rollouts of each worker, including warm-up.
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
        """End the recording and write the trace, if :meth:`enable_profile` was called."""
        if self._profile_config is not None and not self.closed:
            self.record(None, "")
        self._profile_config = None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """The configuration of the last :meth:`enable_profile`. None: it was never called, or
        :meth:`disable_profile` was called after it."""
        return self._profile_config

    # Record the following rollouts; None: stop recording. name: the worker's name ("": this collector is no worker).
    @abstractmethod
    def record(self, config: ProfileConfig | None, name: str) -> None: ...

    # -- as a worker of a larger collector ----------------------------------------------------------------------------

    @property
    def worker_idx(self) -> int:
        """Index of this collector among the workers of a larger one, from 0.

        Raises:
            RuntimeError: it was never set.
        """
        if self._worker_idx is None:
            raise RuntimeError("this collector has no worker_idx: if it is a worker, pass worker_idx= to it, or set it")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        self._worker_idx = worker_idx

    # The program that runs a collector as a worker calls these.

    # Obey these signals. allocate(layout) returns memory for a batch, or None: the collector uses its own.
    @abstractmethod
    def become_worker(self, signals: Signals, allocate: Callable[[Any], TensorDictBase | None]) -> None: ...

    # max_lag compares with the newest version that the control page at ``place`` shows for worker ``index``. None: it
    # compares only with the versions that schemes receive.
    @abstractmethod
    def follow_versions(self, place: Any, index: int) -> None: ...

    # One rollout, before split_trajs and postproc, and its number of frames. random: ignore the policy. writes: the
    # rollout goes into the replay buffer, so the batch is None.
    @abstractmethod
    def rollout_for_trainer(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]: ...

    # From another thread: end every wait of this collector except the wait for its own steps.
    @abstractmethod
    def end_waits(self, timeout: float, close_env: bool) -> None: ...

    # What the program reports to the trainer, as a WorkerInfo.
    @abstractmethod
    def worker_info(self) -> Any: ...
