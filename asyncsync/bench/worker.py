"""What the other processes run: they obey orders that come through a pipe.

    ("open", (scheme, payload), {})     →  answered when this worker is connected

Each order is a method's name with its arguments, and each is answered with ("done", result) or ("error", traceback);
``gloo_receive`` is answered twice, first when it is about to wait for the sender. Nothing is printed here: the trainer
says what went wrong.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncsync.bench.cases import Payload
from asyncsync.bench.meters import PeakMemory
from asyncsync.bench.peers import Gloo, digest, echo
from asyncsync.bench.pipe import Pipe
from asyncsync.schemes.zmq import ZMQWeightSyncScheme

__all__ = ["PATIENCE", "main"]

PATIENCE = 120.0  # seconds; nothing is expected to come near


def main(index: int, connection: Connection, new_loop: Callable[[], Any] | None) -> None:
    """A process's main function.

    Args:
        index: of the worker; gloo's sender is one beyond the last.
        connection: to the trainer; the process ends with it.
        new_loop: factory of event loops; None: asyncio's own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the trainer ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # there are more processes than cores
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(Worker(index, Pipe(connection)).serve())


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Worker:
    """Its orders are the public methods below ``serve``."""

    def __init__(self, index: int, pipe: Pipe) -> None:
        self._index = index
        self._pipe = pipe
        self._parameters: dict[Payload, dict[str, torch.Tensor]] = {}
        self._schemes: list[ZMQWeightSyncScheme] = []
        self._gloo: Gloo | None = None
        self._echo: asyncio.Task[None] | None = None
        self._memory: PeakMemory | None = None

    async def serve(self) -> None:
        """Obey until the pipe ends."""
        while True:
            try:
                order, arguments, options = await self._pipe.receive()
            except (EOFError, OSError):
                break
            try:
                answer = ("done", await getattr(self, order)(*arguments, **options))
            except Exception:
                answer = ("error", traceback.format_exc())
            try:
                self._pipe.post(answer)
            except OSError:
                break
        await self.close()
        if self._gloo is not None:
            self._gloo.close()

    # -- asyncsync ----------------------------------------------------------------------------------------------------

    async def load(self, payload: Payload, *, pattern: bool = False) -> None:
        """Have parameters of this shape."""
        self._parameters[payload] = payload.weights(blank=not pattern)

    async def open(self, scheme: ZMQWeightSyncScheme, payload: Payload) -> None:
        """Apply what the trainer sends to the parameters of this payload."""
        scheme.init_on_receiver("model", model=self._parameters[payload], worker_idx=self._index)
        self._schemes.append(scheme)
        await scheme.connect(timeout=PATIENCE)

    async def close(self) -> None:
        """Forget the schemes and the parameters, and stop answering."""
        for scheme in self._schemes:
            await scheme.shutdown()
        self._schemes.clear()
        self._parameters.clear()
        if self._echo is not None:
            self._echo.cancel()
            await asyncio.wait([self._echo])
            self._echo = None

    # -- checks and meters --------------------------------------------------------------------------------------------

    async def blank(self, payload: Payload) -> None:
        """Overwrite what has arrived."""
        for tensor in self._parameters[payload].values():
            tensor.fill_(-1.0)
        if self._gloo is not None:
            self._gloo.flat.fill_(-1.0)

    async def digest(self, payload: Payload, *, flat: bool) -> int:
        """A checksum of the parameters, or of gloo's buffer."""
        if flat:
            assert self._gloo is not None
            return digest([self._gloo.flat])
        return digest(self._parameters[payload].values())

    async def memory_from_now(self) -> None:
        self._memory = PeakMemory()

    async def memory_growth(self) -> int:
        """Bytes, since ``memory_from_now``."""
        assert self._memory is not None
        return self._memory.growth()

    # -- peers --------------------------------------------------------------------------------------------------------

    async def echo(self, endpoints: list[str]) -> None:
        """Answer on bare sockets, from now on."""
        listening = asyncio.Event()
        self._echo = asyncio.create_task(echo(endpoints, listening))
        await listening.wait()

    async def gloo_join(self, rank: int, store: str) -> None:
        if self._gloo is None:
            self._gloo = Gloo(rank, store)

    async def gloo_load(self, payload: Payload) -> None:
        assert self._gloo is not None
        self._gloo.load(payload, self._parameters[payload].values())

    async def gloo_unload(self) -> None:
        assert self._gloo is not None
        self._gloo.load(Payload("nothing", 0, 0), [])

    async def gloo_send(self, how: str, receivers: int) -> float:
        """Seconds."""
        assert self._gloo is not None
        return self._gloo.send(how, receivers)

    async def gloo_receive(self, how: str, receivers: int) -> None:
        """Blocks the loop: it is gloo's turn, and nobody else's."""
        assert self._gloo is not None
        self._pipe.post(("done", "about to wait"))
        self._gloo.receive(how, receivers)
