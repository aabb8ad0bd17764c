"""A real uvicorn on loopback in the test's loop, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from helpers.pairs import until


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """Serve an application; yields the port."""
    options: dict[str, Any] = {"log_config": None, "http": "h11", "ws": "none", "timeout_graceful_shutdown": 5}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, **options))
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or task.done())
        port: int = server.servers[0].sockets[0].getsockname()[1]
        yield port
    finally:
        server.should_exit = True
        await task


@dataclass
class Answer:
    """A response whose head is here; :meth:`piece` reads its body."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def piece(self) -> str:
        """The next chunk; empty: it was the last one."""
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2].decode()

    async def body(self) -> str:
        if "content-length" in self.headers:
            return (await self.reader.readexactly(int(self.headers["content-length"]))).decode()
        whole = ""
        while piece := await self.piece():
            whole += piece
        return whole

    @property
    def version(self) -> int | None:
        named = self.headers.get("x-weight-version")
        return None if named is None else int(named)


@asynccontextmanager
async def request(port: int, path: str) -> AsyncIterator[Answer]:
    """GET a path, with a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        yield Answer(int(status.split()[1]), headers, reader)
    finally:
        writer.close()
        await writer.wait_closed()


async def get(port: int, path: str) -> tuple[int | None, str]:
    """The version that the response names, and its body. Raises AssertionError unless it is 200."""
    async with request(port, path) as answer:
        body = await answer.body()
        assert answer.status == 200, (answer, body)
        return answer.version, body
