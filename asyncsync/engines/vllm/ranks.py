"""The ranks of one engine agree whether all have loaded a version.

They use the store of their process group, not a collective call. A collective cannot be abandoned, and a rank that has
missed one would take the next one for it. In the store, each vote has keys of its own, and the rank that writes the
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

MARGIN = 5.0  # seconds to wait for the store's answer after a deadline
MAX_TEXT = 2000  # characters of one rank's text
KEPT_CALLS = 8  # the keys of this many latest calls stay in the store


class Ranks:
    """Votes and exchanges texts with the other ranks. vLLM has all ranks call the same method, and waits for all before
    the next call. In each call, every rank first calls :meth:`begin`; then all exchange and vote in the same order.

    Args:
        store: a clone of the process group's store, which nothing else uses; None if there is one rank.
    """

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._call = self._step = 0
        self._keys: deque[tuple[int, str]] = deque()  # each with the number of its call

    def begin(self) -> None:
        """Begin a call of vLLM. A rank that was late in the call before, and missed votes, is in step again."""
        self._call, self._step = self._call + 1, 0

    def exchange(self, text: str, deadline: float) -> dict[int, str]:
        """Send a text to all ranks. Returns the texts that came from ranks by the deadline (:func:`time.monotonic`)."""
        if self.size == 1:
            return {self.rank: text}
        key = self._next_key()
        return self._ask_store(lambda store: self._exchange(store, key, text, deadline), deadline) or {}

    def vote(self, problem: str, deadline: float) -> dict[int, str]:
        """Vote with this rank's problem; ``""``: it has none. Returns the problems of all ranks; if there are none, all
        ranks go on. A rank that has not voted by the deadline has a problem, too; so has one that cannot reach the
        store, and it returns only its own."""
        if self.size == 1:
            return {self.rank: problem} if problem else {}
        key = self._next_key()
        problems = self._ask_store(lambda store: self._decide(store, key, problem, deadline), deadline)
        if problems is None:
            unknown = "cannot reach the other ranks, and does not know what they have decided: restart this replica"
            return {self.rank: f"{problem}; it {unknown}" if problem else f"it {unknown}"}
        return problems

    def _next_key(self) -> str:
        self._step += 1
        self._keys.append((self._call, f"asyncsync/{self._call}/{self._step}/"))
        return self._keys[-1][1]

    def _ask_store(self, call: Callable[[Store], dict[int, str]], deadline: float) -> dict[int, str] | None:
        """Call in a thread, and abandon the thread if the store does not answer, because its process is stopped or
        dead. Returns None if there was no answer, or the store has failed."""
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
        while self._keys[0][0] < self._call - KEPT_CALLS:
            _, old = self._keys.popleft()
            for name in (self.rank, "verdict") if self.rank == 0 else (self.rank,):
                store.delete_key(f"{old}{name}")
        keys = {rank: f"{key}{rank}" for rank in range(self.size)}
        pause = 0.001
        while not store.check([*keys.values()]) and time.monotonic() < deadline:
            time.sleep(pause)  # not store.wait(): stores raise different errors, and some cannot be used after one
            pause = min(2 * pause, 0.02)
        return {rank: store.get(name).decode() for rank, name in keys.items() if store.check([name])}

    def _decide(self, store: Store, key: str, problem: str, deadline: float) -> dict[int, str]:
        votes = self._exchange(store, key, problem, deadline)
        problems = {rank: text for rank, text in votes.items() if text}
        problems |= {rank: "it did not vote in time" for rank in range(self.size) if rank not in votes}
        if not problems and time.monotonic() > deadline:  # other ranks may have given up
            problems = {self.rank: "it was late"}
        verdict = store.compare_set(f"{key}verdict", "", json.dumps(problems))
        return {int(rank): text for rank, text in json.loads(verdict).items()}
