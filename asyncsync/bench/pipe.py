"""A multiprocessing pipe that a coroutine can wait for, and the end of a process with its parent.

pipe = Pipe(connection)
pipe.post(("open", scheme))
answer = await pipe.receive()
"""

from __future__ import annotations

import asyncio
import os
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Pipe", "end_with_parent", "readable"]


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


def end_with_parent() -> None:
    """In a thread of a child process: end it when its parent has ended."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
