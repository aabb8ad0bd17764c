"""Stores of torch.distributed: how processes find each other there.

A queue in a store has any number of senders and one receiver, and nothing is lost when one of them is killed. A client
of a store is locked while it waits, so each thread has one of its own.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from asyncsync.errors import NotConnected
from asyncsync.net.rendezvous import THREAD, MeetingPlace
from asyncsync.runtime.threads import elsewhere, until_cancelled

Address = tuple[str, int]
"""Host and port of a store."""

ANSWER_SECONDS = 20.0
FOREVER = timedelta(days=365)
QUESTIONS = "questions"
ASK_AGAIN_SECONDS = 5.0
FIRST_LOOK = 0.002
ANSWERS_LOOK, QUESTIONS_LOOK = 0.05, 0.25  # the longest pauses between two looks

_c10d: Any = distributed  # its annotations do not show the stores

# A child process that was forked must not destroy what it has inherited: it would wait for threads that it has not.
_open: set[Any] = set()


class OwnStore:
    """A TCPStore of this process's, on one address of this host: torch itself would listen on all of them.

    The port is taken when this is made; 0: one that is free. Nobody listens there before
    :meth:`open`. Raises NotConnected: there is no such address, or the port is in use.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._store: Any = None
        self._take(host, port)

    def _take(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._bound.bind((host, port))
        except OSError as error:
            self._bound.close()
            raise NotConnected(
                f"cannot open a store at {host}:{port}: {error}; is it an address of this host, with a free port?"
            ) from error
        self.address: Address = host, self._bound.getsockname()[1]
        self._forgotten: weakref.finalize[Any, OwnStore] = weakref.finalize(self, self._bound.close)
        self._forgotten.atexit = False

    @property
    def is_open(self) -> bool:
        """Whether it listens."""
        return self._store is not None

    def open(self) -> bool:
        """Listen; after :meth:`close`, once more, if the port is free. False: it does so already."""
        if self._store is not None:
            return False
        if self._bound.fileno() < 0:
            self._take(*self.address)
        self._bound.listen()
        host, port = self.address
        self._store = _c10d.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._bound.detach()
        )
        _open.add(self._store)
        self._forgotten = weakref.finalize(self, _forget, self._store, os.getpid())
        self._forgotten.atexit = False
        return True

    def put(self, queue: str, content: bytes) -> None:
        """Into a queue of this store, which is open."""
        self._store.queue_push(queue, content)

    def close(self) -> None:
        """Idempotent."""
        self._forgotten.detach()
        self._bound.close()
        store, self._store = self._store, None
        _open.discard(store)


def _forget(store: Any, pid: int) -> None:
    if os.getpid() == pid:
        _open.discard(store)


def connect(address: Address, timeout: float = ANSWER_SECONDS) -> Any:
    """A client of the store at this address. Raises NotConnected: there is none, or this torch has no queues."""
    try:
        # Where nobody listens, torch goes on trying until the time is over, and prints why.
        socket.create_connection(address, timeout).close()
        host, port = address
        store = _c10d.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(1.0, timeout))
        )
    except (OSError, RuntimeError) as error:
        raise NotConnected(f"there is no store at {address[0]}:{address[1]}: {error}") from error
    return _with_queues(store)


def client_of(store: Any) -> Any:
    """Another client of the same store. Raises NotConnected: this one, or this torch, has no queues."""
    return _with_queues(store).clone()


def _with_queues(store: Any) -> Any:
    if not hasattr(store, "queue_push") or isinstance(innermost(store), _c10d.FileStore):
        raise NotConnected(
            f"a {type(innermost(store)).__name__} of torch {torch.__version__} has no queues: use torch 2.8 or newer, "
            "and a TCPStore, as with init_process_group(init_method='env://' or 'tcp://…')"
        )
    return store


def part_of(store: Any, name: str) -> Any:
    """The same store, in which all keys begin with this name."""
    return _c10d.PrefixStore(name, store)


def innermost(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


class StorePlace(MeetingPlace):
    """A meeting place under a name in a store, of which ``client`` makes clients. The store is the process group's, or
    the sender has opened it: its ``own``, which it shares with schemes that it was converted to."""

    def __init__(self, name: str, client: Callable[[], Any], own: OwnStore | None = None) -> None:
        super().__init__()
        self.own = own
        self._name = name
        self._client = client
        self._store: Any = None  # the sender's client
        self._has_opened = False

    def _visit(self) -> Any:
        return part_of(self._client(), f"asyncsync/{self._name}")

    async def open(self) -> None:
        await elsewhere(THREAD, self._open)

    def _open(self) -> None:
        if self.own is not None:
            self._has_opened = self.own.open() or self._has_opened
        elif _in_groups.get(self._name, self).is_hosted:
            raise NotConnected(
                f"another scheme of this process is the sender of {self._name!r} in its process group: give each a "
                "model_id of its own, or shut the other one down before"
            )
        else:
            _in_groups[self._name] = self
        self._store = self._visit()

    def ask(self, worker: int, over: threading.Event) -> bytes:
        store, key = self._visit(), secrets.token_hex(8)
        try:
            store.queue_push(QUESTIONS, f"{worker} {key}")
            _look_for(key, store, over, ANSWERS_LOOK, ASK_AGAIN_SECONDS)
            answer: bytes = store.get(key)
            store.delete_key(key)
        except RuntimeError as error:
            raise NotConnected(str(error)) from error
        return answer

    async def asked(self) -> tuple[int, str]:
        return await until_cancelled(THREAD, self._asked)

    def _asked(self, over: threading.Event) -> tuple[int, str]:
        while True:
            _look_for(QUESTIONS, self._store, over, QUESTIONS_LOOK)
            with suppress(_c10d.QueueEmptyError):  # another sender has taken it
                worker, key = self._store.queue_pop(QUESTIONS, block=False).decode().split()
                return int(worker), key

    async def answer(self, key: str, answer: bytes) -> None:
        await elsewhere(THREAD, partial(self._store.set, key, answer))

    async def end(self) -> None:
        if self.own is not None and (self._has_opened or not self.own.is_open):
            self._has_opened = False
            await elsewhere(THREAD, self.own.close)


_in_groups: weakref.WeakValueDictionary[str, StorePlace] = weakref.WeakValueDictionary()
"""The places in the stores of process groups where this process is the sender, by their names."""


def _look_for(key: str, store: Any, over: threading.Event, longest: float, seconds: float = math.inf) -> None:
    """Wait until there is something under this key. Raises NotConnected: it is over before, or the time is."""
    # A wait in the store cannot be ended from outside, and prints lines to stderr when its time is over.
    pause, deadline = FIRST_LOOK, time.monotonic() + seconds
    while not store.check([key]):
        if over.wait(pause) or time.monotonic() > deadline:
            raise NotConnected("there is no answer yet")
        pause = min(2 * pause, longest)
