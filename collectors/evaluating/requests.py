"""Evaluations that are asked for, and their results: one after another, by an evaluator's one worker.

    evaluations = Evaluations(collector, "eval", None)
    evaluations.begin()
    evaluations.add(Request({"policy": weights}, step=3), newest=False)
    evaluations.pop()                                  # a result; None: there is none yet

A coroutine on the process's loop thread sends each request's weights to the worker, has it evaluate them, and keeps the
result for whoever takes it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.errors import AckTimeout, ClosedError, PartialSendError
from asyncsync.runtime import loop_thread
from asyncsync.runtime.threads import elsewhere, interruptibly

logger = logging.getLogger("asyncsync")

KEPT = 1024
"""So many results are kept for who takes them; those before are dropped: a callback may be all that reads them."""


@dataclass(eq=False)
class Request:
    """One evaluation.

    Attributes:
        weights: ``{model_id: weights}``, copies; empty: the worker's as they are.
        step: that its result shows.
        has_caller: whether somebody waits for this very one; else its result is kept for whoever takes it.
    """

    weights: Mapping[str, Any]
    step: int
    has_caller: bool = False
    is_done: bool = False
    error: BaseException | None = None
    result: dict[str, Any] = field(default_factory=dict)

    def outcome(self) -> dict[str, Any]:
        """The result, or raises the error."""
        if self.error is not None:
            raise self.error
        return self.result


class Evaluations:
    """Those of one evaluator. Any thread may call any method."""

    def __init__(
        self, collector: MultiCollector, prefix: str, on_result: Callable[[TensorDictBase], object] | None
    ) -> None:
        self._collector: MultiCollector = weakref.proxy(collector)  # whoever forgets the evaluator ends it
        self._group = collector._group
        self._prefix = prefix
        self._on_result = on_result
        self._lock = threading.Lock()
        self._requests: deque[Request] = deque()
        self._running: Request | None = None
        self._done: deque[Request] = deque(maxlen=KEPT)
        self._ended = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._reporter: int | None = None  # the thread in which on_result runs

    def begin(self) -> None:
        """Carry out what is asked for, until the group's end."""
        loop_thread.run(self._begin)

    async def _begin(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._ended.set())

    def wait_for_end(self, timeout: float) -> None:
        """After the group's end: wait until the user's code has returned, unless that calls this; at most so many
        seconds."""
        if self._task is not None and not self._is_reporter:
            interruptibly(self._ended.wait, timeout)

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether an evaluation is under way or waits."""
        with self._lock:
            return self._running is not None or bool(self._requests)

    def check(self) -> None:
        """Raises ClosedError: there are no more evaluations; BaseException: what has ended the worker."""
        self._group.check()
        if self._group.failure is not None:
            raise self._group.failure

    @property
    def _is_reporter(self) -> bool:
        return self._reporter == threading.get_ident()

    def check_wait(self, *, is_endless: bool) -> None:
        """Raises RuntimeError: ``on_result`` would wait for its own end."""
        if is_endless and self._is_reporter:
            raise RuntimeError(
                "on_result cannot wait for an evaluation, because the next one begins after it. Use trigger_eval()"
            )

    def add(self, request: Request, *, newest: bool) -> None:
        """Have this done after those that wait; ``newest``: instead of those that wait without a caller."""
        with self._lock:
            if newest:
                self._requests = deque(one for one in self._requests if one.has_caller)
            self._requests.append(request)
        self._group.nudge()

    def withdraw(self, request: Request) -> None:
        """Its caller has gone: it is not begun, or its result is dropped."""
        with self._lock:
            if request in self._requests:
                self._requests.remove(request)

    def pop(self) -> Request | None:
        """One that is done, first come, first served; None: there is none."""
        try:
            return self._done.popleft()
        except IndexError:
            return None

    def left(self) -> list[Request]:
        """Those that are done and that nobody has taken."""
        return list(self._done)

    @property
    def failure(self) -> BaseException | None:
        """What the first of these has raised; of a worker that has ended, every call tells."""
        errors = [request.error for request in self.left() if request.error is not None]
        return next((error for error in errors if error is not self._group.failure), None)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def until_done(self, request: Request, timeout: float | None) -> None:
        """On the loop thread. Raises AckTimeout, and as :meth:`check`."""
        await self._group.until(lambda: request.is_done, timeout)

    async def until_ready(self, deadline: float, *, idle: bool) -> None:
        """On the loop thread: until there are results, or (``idle``) nothing is pending, or the time has come. Raises
        as :meth:`check`."""
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            await self._group.until(lambda: bool(self._done) or (idle and not self.pending), timeout)
        except AckTimeout as error:
            if error is self._group.failure:
                raise

    # -- carrying out, on the loop thread -----------------------------------------------------------------------------

    def _next(self) -> Request | None:
        with self._lock:
            self._running = self._requests.popleft() if self._requests else None
            return self._running

    async def _run(self) -> None:
        while True:
            try:
                request = await self._group.until(self._next)
            except ClosedError:
                return
            except Exception:  # the worker has ended: whoever calls next is told
                return
            try:
                request.result = await self._evaluated(request)
            except Exception as error:
                request.error = error
            self._conclude(request)

    async def _evaluated(self, request: Request) -> dict[str, Any]:
        await self._group.until(lambda: self._group.connected)  # the worker may be launched again just now
        if request.weights:
            try:
                await self._collector.update_policy_weights_async(weights_dict=request.weights)
            except PartialSendError as error:
                raise error.failed[0] from error  # there is one worker
        ask = partial(self._group.ask, "execute", "evaluate", (request.step,), {}, timeout=math.inf)
        [found] = await elsewhere("asyncsync-evaluator", ask)
        result = {f"{self._prefix}/{name}": value for name, value in {**found, "step": request.step}.items()}
        if self._on_result is not None:
            await elsewhere("asyncsync-evaluator-result", partial(self._report, self._on_result, TensorDict(result)))
        return result

    def _report(self, on_result: Callable[[TensorDictBase], object], result: TensorDictBase) -> None:
        self._reporter = threading.get_ident()
        try:
            on_result(result)
        finally:
            self._reporter = None

    def _conclude(self, request: Request) -> None:
        with self._lock:
            self._running = None
            request.is_done = True
            request.weights = {}
            if not request.has_caller:
                self._done.append(request)
        is_cut = isinstance(request.error, ClosedError) and self._group.ending
        if request.error is not None and not request.has_caller and not is_cut:
            logger.error("an evaluation failed", exc_info=request.error)
        self._group.nudge()
