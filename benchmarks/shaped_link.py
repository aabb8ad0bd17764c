"""A link of a given speed: a TCP proxy in a process of its own, which counts what passes. Used by the benchmarks here.

with ShapedLink(("127.0.0.1", port), bits_per_second=1e9) as link:
    ...connect to link.endpoint...
    before = link.bytes_down
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Any

__all__ = ["ShapedLink"]

PIECE = 32 << 10
BUFFER = 256 << 10  # of each socket: what waits at the link waits at the sender
SLACK = 0.002  # seconds by which the link may be ahead: timers are no finer


class ShapedLink:
    """``endpoint`` is where the worker connects; what comes from there passes unshaped. ``bytes_down``: what has passed
    from the trainer to the worker."""

    def __init__(self, trainer: tuple[str, int], bits_per_second: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._count: Synchronized[int] = context.Value("Q", 0)
        listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        arguments = (listening, trainer, bits_per_second / 8, self._count)
        self._process = context.Process(target=_main, args=arguments, daemon=True)
        self._process.start()
        listening.close()

    @property
    def bytes_down(self) -> int:
        return int(self._count.value)

    def __enter__(self) -> ShapedLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.join()


def _main(listening: socket.socket, trainer: tuple[str, int], rate: float, count: Any) -> None:
    asyncio.run(_serve(listening, trainer, rate, count))


async def _serve(listening: socket.socket, trainer: tuple[str, int], rate: float, count: Any) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = socket.socket()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        try:
            there.connect(trainer)
        except ConnectionError:  # it is not there yet
            writer.close()
            return
        up_reader, up_writer = await asyncio.open_connection(sock=there, limit=PIECE)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pass(reader, up_writer, 0.0, None))
            group.create_task(_pass(up_reader, writer, rate, count))

    server = await asyncio.start_server(connected, sock=listening, limit=PIECE)
    await server.serve_forever()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: float, count: Any) -> None:
    """From one to the other, at so many bytes per second; 0: without a limit."""
    free = time.monotonic()  # when the link has sent what it was given
    try:
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
            if count is not None:
                count.value += len(data)
            if rate:
                now = time.monotonic()
                free = max(free, now - SLACK) + len(data) / rate
                if free > now + SLACK:
                    await asyncio.sleep(free - now)
    except ConnectionError:
        pass
    finally:
        writer.close()
