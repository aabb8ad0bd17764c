"""This process's connection to Ray, which collectors and evaluators share: whoever needs it first begins it, unless the
program has, and the last one ends it.

    ray = library()
    connection.hold(self, ray, {"num_cpus": 4})        # ray.init(num_cpus=4), unless that was called
    connection.release(self, ray)                      # ray.shutdown(), if nobody else holds it, and it was begun here
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any


def library() -> Any:
    """The module ``ray``. Raises ImportError: it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("this needs Ray, which is not installed: pip install 'asyncsync[ray]'") from error


class RayConnection:
    """This process's connection to Ray, which ends with the last of those that :meth:`hold` it, if one of them has
    begun it, and the program has not begun another one since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._begun: tuple[Any, threading.Event] | None = None  # here: of what session, and what is set at its end

    def hold(self, holder: object, ray: Any, config: Mapping[str, Any]) -> None:
        with self._lock:
            if not ray.is_initialized():
                self._end(ray)  # the program has called ray.shutdown()
                over = threading.Event()
                init = partial(ray.init, **config)
                if threading.current_thread() is threading.main_thread():
                    init()
                else:
                    _init_in_a_thread_that_stays(init, over)
                self._begun = _session(ray), over
            self._holders.add(holder)

    def release(self, holder: object, ray: Any) -> None:
        """Idempotent."""
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._end(ray)

    def _end(self, ray: Any) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            session, over = begun
            if ray.is_initialized() and _session(ray) == session:
                ray.shutdown()
            over.set()


def _session(ray: Any) -> Any:
    """What tells this process's connection from any other one."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


connection = RayConnection()
"""The one of this process."""


def _init_in_a_thread_that_stays(init: Callable[[], Any], over: threading.Event) -> None:
    """Linux kills the processes that Ray starts when the thread that has started them ends."""
    begun: Future[Any] = Future()

    def run() -> None:
        try:
            begun.set_result(init())
        except BaseException as error:
            begun.set_exception(error)
        else:
            over.wait()

    threading.Thread(target=run, name="asyncsync-ray", daemon=True).start()
    begun.result()
