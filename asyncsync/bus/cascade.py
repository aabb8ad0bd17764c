"""Cascade: a worker that serves workers of its own passes each update on before it counts as applied.

A receiver's context with ``update_policy_weights_`` is called with every update that has gone through the gate, unless
its attribute ``cascades`` is false by then: nobody is below it. So the sender's ``send`` returns when the whole tree
below has the weights, and a failure down there is this worker's.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensordict import TensorDict

from asyncsync.runtime.threads import WorkThread, as_exception
from asyncsync.weights.slab import Slab


class Cascade:
    """The contexts of a receiver's models. While ``task`` is not None, it passes one update on.

    An ordinary ``update_policy_weights_`` runs on a daemon thread, because it may block: it typically sends with
    another scheme, whose loop thread must stay free. A coroutine function runs as a task of the loop.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._contexts: dict[str, Any] = {}
        self._thread = WorkThread("asyncsync-cascade")
        self._closed = False

    def add(self, model_id: str, context: Any) -> None:
        """Pass a model's updates on to this context, if it takes them."""
        if callable(getattr(context, "update_policy_weights_", None)):
            self._contexts[model_id] = context

    def remove(self, model_id: str) -> None:
        """Pass on no more of its updates."""
        self._contexts.pop(model_id, None)

    def concerns(self, models: Iterable[str]) -> bool:
        """Whether one of these models is passed on."""
        return bool(self._contexts) and not self._closed and any(_has_workers(self._contexts.get(m)) for m in models)

    def begin(self, slabs: Mapping[str, Slab], then: Callable[[Exception | None], None]) -> None:
        """Pass one update on; ``then`` is called on the loop with what ``update_policy_weights_`` raised, or None. Each
        context is called once, with TensorDicts of its own. The slabs must stay as they are until ``then``."""
        self.task = asyncio.get_running_loop().create_task(self._run(slabs, then))

    async def _run(self, slabs: Mapping[str, Slab], then: Callable[[Exception | None], None]) -> None:
        failure: Exception | None = None
        try:
            contexts = {id(c): c for m in slabs if _has_workers(c := self._contexts.get(m))}
            for context in contexts.values():
                await self._pass_on(context, {m: s for m, s in slabs.items() if self._contexts.get(m) is context})
        except BaseException as error:
            if self._closed:
                raise
            failure = as_exception(error)  # a CancelledError is the user's own
        self.task = None
        then(failure)

    async def _pass_on(self, context: Any, slabs: Mapping[str, Slab]) -> None:
        function = context.update_policy_weights_
        if inspect.iscoroutinefunction(function):
            await _call(function, await self._thread.submit(lambda: _copies(slabs)))
            return

        def call() -> Any:
            try:
                return _call(function, _copies(slabs))
            except BaseException as error:
                raise as_exception(error)  # noqa: B904 - it has its cause

        result = await self._thread.submit(call)
        if inspect.isawaitable(result):  # an ordinary function that returns a coroutine
            await result

    def close(self) -> None:
        """Cancel what is under way. The thread ends as soon as the user's code lets it; nobody waits for that."""
        self._closed = True
        if self.task is not None:
            self.task.cancel()
        self._thread.abandon()


def _has_workers(context: Any) -> bool:
    # Read at each update: a collector may be given its workers later.
    return context is not None and bool(getattr(context, "cascades", True))


def _copies(slabs: Mapping[str, Slab]) -> dict[str, TensorDict]:
    return {model_id: slab.copy().weights() for model_id, slab in slabs.items()}


def _call(function: Any, weights: dict[str, TensorDict]) -> Any:
    if len(weights) > 1:
        return function(weights_dict=weights)
    [(model_id, only)] = weights.items()
    return function(only, model_id=model_id)
