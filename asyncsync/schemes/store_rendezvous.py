"""Meeting in a store of torch.distributed: how workers get their introductions there.

A worker puts a question into a queue, with a name for the answer that it has drawn; a thread of the sender's answers.
So a worker may come early, late or again, and never finds what an earlier sender has left there.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncsync.errors import NotConnected
from asyncsync.net.introduction import Introduction, Introductions
from asyncsync.transports.store import FOREVER, Address, OwnStore, part_of, wait_for

QUESTIONS = "questions"
# A sender that ends may take a question along.
ASK_AGAIN_SECONDS = 5.0
ENDING_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5

Client = Callable[[], Any]
"""Makes a client of its own of the store in which they meet. Raises NotConnected."""


def _place(client: Client, name: str) -> Any:
    return part_of(client(), f"asyncsync/{name}")


class Host:
    """The sender's side. ``own`` is a store of its own, if it has one; a scheme and those that it was converted to have
    the same one, which ends with the host that has opened it."""

    def __init__(self, own: OwnStore | None) -> None:
        self.own = own
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._end = f"end {secrets.token_hex(8)}"
        self._store: Any = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """Of its own store."""
        assert self.own is not None
        return self.own.address

    @property
    def is_answering(self) -> bool:
        """Whether it is open, and its store has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def open(self, client: Client, name: str, introductions: Introductions) -> None:
        """Answer what workers ask under this name, in a thread, from now on. Idempotent. Blocks. Raises NotConnected:
        the store cannot be reached, or cannot do that, or another host of this process answers there."""
        with self._lock:
            if self._thread is not None:
                return
            if self.own is not None:
                self.own.open()
            else:
                if (other := _in_groups.get(name)) is not None and other.is_answering:
                    raise NotConnected(
                        f"another scheme of this process is the sender of {name!r} in its process group: give each a "
                        "model_id of its own, or shut the other one down before"
                    )
                _in_groups[name] = self
            self._store = _place(client, name)
            questions = _place(client, name)
            questions.set_timeout(FOREVER)
            arguments = questions, weakref.ref(introductions), self._end
            self._thread = threading.Thread(target=_answer, args=arguments, name="asyncsync-meeting", daemon=True)
            self._thread.start()
            weakref.finalize(self, _end_soon, self._store, self._end).atexit = False

    def close(self) -> None:
        """End the thread, and the store; waits a moment for that. Idempotent. A forked process has none to end."""
        if self._pid != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
            store, self._store = self._store, None
        if thread is not None:
            with suppress(RuntimeError):  # the store has ended before
                store.queue_push(QUESTIONS, self._end)
            thread.join(ENDING_SECONDS)
        if self.own is not None and (thread is not None or not self.own.is_open):
            self.own.close()


_in_groups: weakref.WeakValueDictionary[str, Host] = weakref.WeakValueDictionary()
"""Those in the stores of process groups, by their names."""


def _end_soon(store: Any, end: str) -> None:
    def leave() -> None:
        with suppress(RuntimeError):
            store.queue_push(QUESTIONS, end)

    with suppress(RuntimeError):  # the interpreter is ending, and starts no threads any more
        threading.Thread(target=leave, name="asyncsync-meeting", daemon=True).start()


def _answer(store: Any, introductions: weakref.ref[Introductions], end: str) -> None:
    with suppress(RuntimeError):  # the store has ended
        while (question := store.queue_pop(QUESTIONS).decode()) != end:
            word, key = question.split()
            introduce = introductions()
            if introduce is None:
                return
            if word != "end":  # another sender's
                store.set(key, introduce(int(word)).encode())
            del introduce


def ask(client: Client, name: str, worker: int, is_over: Callable[[], bool]) -> Introduction | None:
    """A worker's introduction, when there is one; None if it is over before. Blocks. Raises RuntimeError: the store was
    a process group's, and is gone for good."""
    pause = FIRST_PAUSE
    while not is_over():
        try:
            store = _place(client, name)
        except NotConnected:  # the sender, or its successor, may be still to come
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_PAUSE)
            continue
        with suppress(RuntimeError):  # the store has ended with its sender
            while not is_over():
                key = secrets.token_hex(8)
                store.queue_push(QUESTIONS, f"{worker} {key}")
                answer = wait_for(store, key, ASK_AGAIN_SECONDS, is_over)
                if answer is not None:
                    store.delete_key(key)
                    return Introduction.decode(answer)
    return None
