"""What worker processes run: targets for ``multiprocessing``'s ``Process``."""

import asyncio
from multiprocessing.connection import Connection
from typing import Any

from asyncsync import ClosedError
from helpers.pairs import Model, read


def follow(scheme: Any, index: int, connection: Connection) -> None:
    """Connect, tell what the model holds after connect and after each update, until the sender says goodbye."""
    asyncio.run(_follow(scheme, index, connection))


async def _follow(scheme: Any, index: int, connection: Connection) -> None:
    model = Model()
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    async with scheme:
        await scheme.connect(timeout=30)
        connection.send(read(model))
        try:
            while True:
                await scheme.receive()
                connection.send(read(model))
        except ClosedError:
            connection.send(("closed", scheme.closed))
