"""Blocking transports of a user's own: within one process, over a board of queues; between processes, over pipes."""

import pickle
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncsync import WeightSyncScheme, sync
from helpers.pairs import Model, read


class Line:
    """One worker's channel; a test tells here how it is to behave."""

    def __init__(self) -> None:
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.sent: list[float] = []  # the numbers that went in, and
        self.received: list[float] = []  # came out
        self.timeouts: list[float | None] = []
        self.fail_send: BaseException | None = None  # raised once, then forgotten
        self.fail_receive: BaseException | None = None
        self.nothing = 0  # how often receive_weights returns None at once
        self.can_send, self.can_receive = threading.Event(), threading.Event()  # they wait for it
        self.can_send.set()
        self.can_receive.set()
        self.sending, self.receiving = threading.Event(), threading.Event()  # set while they do
        self.calls: list[str] = []  # what else was called: "close" and the two setups
        self.threads: set[str] = set()


class Board:
    """The lines of one scheme, by worker_idx, and the class of its transports."""

    def __init__(self) -> None:
        self.lines: dict[int, Line] = {}
        self.kind: Any = BoardTransport
        self.created: list[int] = []

    def __getitem__(self, worker: int) -> Line:
        return self.lines.setdefault(worker, Line())


BOARDS: dict[str, Board] = {}


@contextmanager
def board() -> Iterator[tuple[str, Board]]:
    """A board under a name that travels with a pickled scheme; everything that waits in it ends with the block."""
    made = Board()
    name = f"board-{id(made)}"
    BOARDS[name] = made
    try:
        yield name, made
    finally:
        for line in made.lines.values():
            line.can_send.set()
            line.can_receive.set()
        del BOARDS[name]


def number(weights: Any) -> float:
    """The one number of tensors by name, the tag aside."""
    [found] = read({name: t for name, t in weights.items() if name != "_asyncsync_id"})
    return found


class BoardTransport(sync.TransportBackend):
    """Ordinary methods; the weights go through a queue."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.closed = False

    def send_weights(self, weights: Any) -> None:
        line = self.line
        line.threads.add(threading.current_thread().name)
        if line.fail_send is not None:
            error, line.fail_send = line.fail_send, None
            raise error
        line.sending.set()
        assert line.can_send.wait(50)
        line.sending.clear()
        message = {".".join(k) if isinstance(k, tuple) else k: v for k, v in weights.items(True, True)}
        line.sent.append(number(message))
        line.messages.put(message)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        line = self.line
        assert model is None
        assert strategy is None
        line.threads.add(threading.current_thread().name)
        line.timeouts.append(timeout)
        if line.fail_receive is not None:
            error, line.fail_receive = line.fail_receive, None
            raise error
        if line.nothing:
            line.nothing -= 1
            return None
        line.receiving.set()
        assert line.can_receive.wait(50)
        message = self._get(timeout)
        line.receiving.clear()
        if message is None:
            return None
        line.received.append(number(message))
        return self._hand_over(message, weights)

    def _get(self, timeout: float | None) -> dict[str, Any] | None:
        until = time.monotonic() + (50 if timeout is None else timeout)
        while not self.closed and (remaining := until - time.monotonic()) > 0:
            try:
                return self.line.messages.get(timeout=min(remaining, 0.05))
            except queue.Empty:
                pass  # look whether this was closed: that ends the call
        return None

    def _hand_over(self, message: dict[str, Any], weights: Any) -> Any:
        """Into the buffer."""
        for key, leaf in weights.items(True, True):
            leaf.copy_(message[".".join(key) if isinstance(key, tuple) else key])
        return weights

    def close(self) -> None:
        self.closed = True
        self.line.calls.append("close")


class BoardMixin:
    """A scheme with such transports; its name is what travels."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(**options)
        self.name = name

    def create_transport(self, *, worker_idx: int, **kwargs: Any) -> Any:
        assert not kwargs
        board = BOARDS[self.name]
        board.created.append(worker_idx)
        return board.kind(board[worker_idx])


class BoardScheme(BoardMixin, WeightSyncScheme):
    pass


class BlockingBoardScheme(BoardMixin, sync.WeightSyncScheme):
    pass


# -- between processes -------------------------------------------------------------------------------------------------


class PipeTransport(sync.TransportBackend):
    """Pickled arrays through a pipe, which holds 64 KiB: more waits until somebody reads."""

    def __init__(self, ends: tuple[Connection, Connection]) -> None:
        self.reader, self.writer = ends
        self.count = 0

    def send_weights(self, weights: Any) -> None:
        self.writer.send_bytes(pickle.dumps({k: v.numpy() for k, v in weights.flatten_keys(".").items()}))
        self.count += 1

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        if not self.reader.poll(timeout):
            return None
        self.count += 1
        return pickle.loads(self.reader.recv_bytes())


class PipeScheme(sync.WeightSyncScheme):
    """Its pipes are handed to the worker processes with it, as multiprocessing does when it starts them."""

    def __init__(self, pipes: list[tuple[Connection, Connection]], **options: Any) -> None:
        super().__init__(num_workers=len(pipes), **options)
        self.pipes = pipes

    def create_transport(self, *, worker_idx: int, **kwargs: Any) -> PipeTransport:
        return PipeTransport(self.pipes[worker_idx])


def pipe_worker(scheme: PipeScheme, index: int, width: int, control: Connection) -> None:
    """Connect, then do what the test says: "read" (what the model holds), "count" (messages taken from the pipe)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    model = Model(width=width)
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    with scheme:
        scheme.connect(timeout=40)
        control.send(read(model))
        while (command := control.recv()) != "stop":
            if command == "read":
                control.send(read(model))
            elif command == "count":
                control.send(scheme.receiver_transport.count)
        control.send("stopped")
