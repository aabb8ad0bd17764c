"""The ranks of one engine agree whether all have loaded a version.

They do so through the store of their process group, not by a collective call: a collective cannot be abandoned, and
one that a rank has missed is taken for the next. In the store each vote has keys of its own, and whoever writes the
verdict first has decided for all. So no two ranks can come to different verdicts, however late one is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

MARGIN = 5.0  # seconds after a deadline, until which the store's answer is waited for
MAX_TEXT = 2000  # characters of what one rank says
LEAST_WAIT = 0.5  # seconds; a TCPStore whose answer to "wait no more" is late, too, cannot be used any more
KEPT = 8  # rounds whose keys are still there


class Ranks:
    """All ranks call the same methods in the same order. ``store`` is not used for anything else meanwhile: a clone."""

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._round = 0

    def tell(self, text: str, deadline: float) -> dict[int, str]:
        """Tell the others, and return what each rank has told by the deadline (of :func:`time.monotonic`)."""
        key = self._next()
        told: dict[int, str] | None = {self.rank: text}
        if self.size > 1:
            told = self._within(lambda store: self._exchange(store, key, text, deadline), deadline)
        return told or {}

    def vote(self, problem: str, deadline: float) -> dict[int, str]:
        """Say what went wrong here, ``""`` for nothing. Returns the problems of all ranks; without any, all ranks go
        on. A rank that has not voted by the deadline has a problem, too."""
        key = self._next()
        if self.size == 1:
            return {self.rank: problem} if problem else {}
        problems = self._within(lambda store: self._decide(store, key, problem, deadline), deadline)
        if problems is None:
            unknown = "cannot reach the other ranks, and does not know what they have decided: restart this replica"
            return {self.rank: f"{problem}; it {unknown}" if problem else f"it {unknown}"}
        return problems

    def _next(self) -> str:
        self._round += 1
        return f"asyncsync/{self._round}/"

    def _within(self, call: Callable[[Store], dict[int, str]], deadline: float) -> dict[int, str] | None:
        """Call in a thread, which is left behind if the store does not answer: its process is stopped, or dead. None:
        there was no answer, or the store has failed."""
        answer: Future[dict[int, str]] = Future()

        def run() -> None:
            assert self._store is not None
            try:
                answer.set_result(call(self._store))
            except Exception as error:
                answer.set_exception(error)

        Thread(target=run, name="asyncsync-vote", daemon=True).start()
        with suppress(Exception):
            return answer.result(max(0.0, deadline - time.monotonic()) + MARGIN)
        return None

    def _exchange(self, store: Store, key: str, text: str, deadline: float) -> dict[int, str]:
        store.set(f"{key}{self.rank}", text[:MAX_TEXT])
        self._forget(store)
        keys = {rank: f"{key}{rank}" for rank in range(self.size)}
        with suppress(DistStoreError):  # not all are there in time
            store.wait([*keys.values()], timedelta(seconds=max(LEAST_WAIT, deadline - time.monotonic())))
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
        """Delete what this rank has said long ago. vLLM waits for all ranks before it calls the next method."""
        if self._round > KEPT:
            key = f"asyncsync/{self._round - KEPT}/"
            for name in (self.rank, "verdict") if self.rank == 0 else (self.rank,):
                store.delete_key(f"{key}{name}")
