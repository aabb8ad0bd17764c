"""The ranks of one engine agree whether all have loaded a version.

They do so through the store of their process group, not by a collective call: a collective cannot be abandoned, and
one that a rank has missed is taken for the next. In the store each vote has keys of its own, and whoever writes the
verdict first has decided for all. So no two ranks can come to different verdicts, however late one is.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("asyncsync")

MARGIN = 5.0  # seconds after a deadline, until which the store's answer is waited for
MAX_TEXT = 2000  # characters of what one rank says
KEPT = 8  # calls whose keys are still there


class Ranks:
    """vLLM has all ranks call the same method, and waits for all before the next call. Each of these calls is one
    :meth:`begin`, and in it all ranks tell and vote in the same order.

    Args:
        store: that of their process group; not used for anything else meanwhile: a clone.
    """

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._call = self._step = 0
        self._keys: deque[tuple[int, str]] = deque()  # with the number of the call

    def begin(self) -> None:
        """vLLM calls. A rank that was late in the call before, and so has voted less often, is in step again."""
        self._call, self._step = self._call + 1, 0

    def tell(self, text: str, deadline: float) -> dict[int, str]:
        """Tell the others, and return what each rank has told by the deadline (of :func:`time.monotonic`)."""
        if self.size == 1:
            return {self.rank: text}
        key = self._next()
        return self._within(lambda store: self._exchange(store, key, text, deadline), deadline) or {}

    def vote(self, problem: str, deadline: float) -> dict[int, str]:
        """Say what went wrong here, ``""`` for nothing. Returns the problems of all ranks; without any, all ranks go
        on. A rank that has not voted by the deadline has a problem, too."""
        if self.size == 1:
            return {self.rank: problem} if problem else {}
        key = self._next()
        problems = self._within(lambda store: self._decide(store, key, problem, deadline), deadline)
        if problems is None:
            unknown = "cannot reach the other ranks, and does not know what they have decided: restart this replica"
            return {self.rank: f"{problem}; it {unknown}" if problem else f"it {unknown}"}
        return problems

    def _next(self) -> str:
        self._step += 1
        self._keys.append((self._call, f"asyncsync/{self._call}/{self._step}/"))
        return self._keys[-1][1]

    def _within(self, call: Callable[[Store], dict[int, str]], deadline: float) -> dict[int, str] | None:
        """Call in a thread, which is left behind if the store does not answer: its process is stopped, or dead. None:
        there was no answer, or the store has failed."""
        answer: Future[dict[int, str] | None] = Future()

        def run() -> None:
            assert self._store is not None
            try:
                answer.set_result(call(self._store))
            except Exception as error:
                logger.error(
                    "asyncsync: rank %d: the store of vLLM's process group has failed: %s", self.rank, str(error)
                )
                answer.set_result(None)

        Thread(target=run, name="asyncsync-vote", daemon=True).start()
        try:
            return answer.result(max(0.0, deadline - time.monotonic()) + MARGIN)
        except TimeoutError:
            return None

    def _exchange(self, store: Store, key: str, text: str, deadline: float) -> dict[int, str]:
        store.set(f"{key}{self.rank}", text[:MAX_TEXT])
        self._forget(store)
        keys = {rank: f"{key}{rank}" for rank in range(self.size)}
        pause = 0.001
        while not store.check([*keys.values()]) and time.monotonic() < deadline:
            time.sleep(pause)  # not store.wait(): what it raises differs, and some stores are of no use afterwards
            pause = min(2 * pause, 0.02)
        return {rank: store.get(name).decode() for rank, name in keys.items() if store.check([name])}

    def _decide(self, store: Store, key: str, problem: str, deadline: float) -> dict[int, str]:
        told = self._exchange(store, key, problem, deadline)
        problems = {rank: text for rank, text in told.items() if text}
        problems |= {rank: "it did not vote in time" for rank in range(self.size) if rank not in told}
        if not problems and time.monotonic() > deadline:  # the others may have given up
            problems = {self.rank: "it was late"}
        verdict = store.compare_set(f"{key}verdict", "", json.dumps(problems))
        return {int(rank): text for rank, text in json.loads(verdict).items()}

    def _forget(self, store: Store) -> None:
        """Delete what this rank has said long ago."""
        while self._keys[0][0] < self._call - KEPT:
            _, key = self._keys.popleft()
            for name in (self.rank, "verdict") if self.rank == 0 else (self.rank,):
                store.delete_key(f"{key}{name}")
