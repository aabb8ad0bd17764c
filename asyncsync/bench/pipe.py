"""A multiprocessing pipe that a coroutine can wait for.

pipe = Pipe(connection)
pipe.post(("open", scheme))
answer = await pipe.receive()
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Pipe", "readable"]


async def readable(descriptor: int) -> None:
    """Wait until something can be read there, be it the end of file."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await future
    finally:
        loop.remove_reader(descriptor)


class Pipe:
    """One end of it. Messages are small: sending one never has to wait."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def post(self, message: Any) -> None:
        """Send.

        Raises:
            OSError: the other end is gone.
        """
        self._connection.send(message)

    async def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError, OSError: the other end is gone.
        """
        while not self._connection.poll():
            await readable(self._connection.fileno())
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
