"""What the other processes run: they obey orders that come through a pipe.

    ("open", (scheme, payload), {})     →  answered when this worker is connected

Each order is a method's name with its arguments, and each is answered with ("done", result) or ("error", traceback);
``gloo_receive`` is answered twice, first when it is about to wait for the sender. Nothing is printed here: the trainer
says what went wrong.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from asyncsync import WeightSyncScheme
from asyncsync.bench.called import Called
from asyncsync.bench.cases import Payload
from asyncsync.bench.collection import Collection
from asyncsync.bench.meters import TICK, PeakMemory, Stall, longest_stall
from asyncsync.bench.peers import Gloo, digest, echo
from asyncsync.bench.pipe import Pipe, end_with_parent
from asyncsync.bench.theirs import TorchRL

__all__ = ["PATIENCE", "main"]

PATIENCE = 120.0  # seconds; nothing is expected to come near


def main(index: int, connection: Connection, new_loop: Callable[[], Any] | None) -> None:
    """A process's main function.

    Args:
        index: of the worker; a peer's sender is one beyond the last.
        connection: to the trainer; the process ends with it.
        new_loop: factory of event loops; None: asyncio's own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the trainer ends the others
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # there are more processes than cores
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(Worker(index, Pipe(connection)).serve())


class Worker:
    """Its orders are the public methods below ``serve``."""

    def __init__(self, index: int, pipe: Pipe) -> None:
        self._index = index
        self._pipe = pipe
        self._models: dict[Hashable, dict[str, torch.Tensor] | nn.Module] = {}
        self._schemes: list[WeightSyncScheme] = []
        self._gloo: Gloo | None = None
        self._torchrl: TorchRL | None = None
        self._collection: Collection | None = None
        self._called: Called | None = None
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
        await self.torchrl_end()
        await self.collect_end()
        await self.called_end()
        if self._gloo is not None:
            self._gloo.close()

    # -- asyncsync ----------------------------------------------------------------------------------------------------

    async def load(self, payload: Payload, *, pattern: bool = False, module: Hashable = None) -> None:
        """Have parameters of this shape: a dictionary that is called as the payload, or a module of this name."""
        if module is None:
            self._models[payload] = payload.weights(blank=not pattern)
        else:
            self._models[module] = payload.module(blank=not pattern)

    async def open(self, scheme: WeightSyncScheme, model: Hashable) -> None:
        """Apply what the trainer sends to this model."""
        scheme.init_on_receiver("model", model=self._models[model], worker_idx=self._index, gate="hold")
        self._schemes.append(scheme)
        await scheme.connect(timeout=PATIENCE)

    async def close(self) -> None:
        """Forget the schemes and the parameters, and stop answering."""
        for scheme in self._schemes:
            await scheme.shutdown()
        self._schemes.clear()
        self._models.clear()
        if self._echo is not None:
            self._echo.cancel()
            await asyncio.wait([self._echo])
            self._echo = None

    # -- checks and meters --------------------------------------------------------------------------------------------

    def _parameters(self, model: Hashable) -> list[torch.Tensor]:
        found = self._models[model]
        return list(found.parameters() if isinstance(found, nn.Module) else found.values())

    async def blank(self, model: Hashable) -> None:
        """Overwrite what has arrived."""
        for tensor in self._parameters(model):
            tensor.fill_(-1.0)
        if self._gloo is not None:
            self._gloo.flat.fill_(-1.0)

    async def digest(self, model: Hashable, *, flat: bool = False) -> int:
        """A checksum of the parameters, or of gloo's buffer."""
        if flat:
            assert self._gloo is not None
            return digest([self._gloo.flat])
        return digest(self._parameters(model))

    async def stalls_from_now(self) -> None:
        """Watch this process's loop until ``longest_stall``."""
        self._watched = asyncio.Event()
        self._watching = asyncio.create_task(longest_stall(self._watched.wait))
        await asyncio.sleep(10 * TICK)  # it watches by now

    async def longest_stall(self) -> Stall:
        self._watched.set()
        return await self._watching

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
        self._gloo.load(payload, self._parameters(payload))

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

    async def collect_start(self, side: str) -> bool:
        """Whether what it needs is installed."""
        self._collection = Collection.start(side)
        return self._collection is not None

    async def collect(self, order: str, case: str) -> Any:
        """A method of :class:`Collection`. Blocks the loop."""
        return getattr(self._collection, order)(case)

    async def collect_end(self) -> None:
        if self._collection is not None:
            self._collection.close()
            self._collection = None

    async def called_start(self, kind: str, directory: str) -> bool:
        """Whether what it needs is installed."""
        self._called = Called.start(kind, directory)
        return self._called is not None

    async def called(self, order: str, *arguments: Any) -> Any:
        """A method of :class:`Called`."""
        return await getattr(self._called, order)(*arguments)

    async def called_end(self) -> None:
        if self._called is not None:
            self._called.end()
            self._called = None

    async def torchrl_start(self, kind: str, payloads: list[Payload], counts: Sequence[int]) -> bool:
        """Whether TorchRL is installed; if it is, its workers start. Orders to them go through this process."""
        assert self._torchrl is None
        self._torchrl = TorchRL.start(kind, payloads, counts)
        return self._torchrl is not None

    async def torchrl(self, order: str, *arguments: Any) -> Any:
        """A method of :class:`TorchRL`. Blocks the loop: it is TorchRL's turn, and nobody else's."""
        return getattr(self._torchrl, order)(*arguments)

    async def torchrl_end(self) -> None:
        if self._torchrl is not None:
            self._torchrl.end()
            self._torchrl = None
