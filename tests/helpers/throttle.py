"""A slow network: a proxy that passes on so many bytes per second, at another address of this host.

    async with throttled((5555, 5556), 1e6) as network:     # 1 MB/s to a worker that connects to network.host
        …

127.0.0.0/8 is this host, all of it: the proxy has the ports of what is behind it.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PIECE = 16 << 10
FAST = 1e9  # no limit
_hosts = itertools.count(2)


@dataclass
class Network:
    """``host`` is where something is reached, with ``rate`` bytes per second at most; that can be changed."""

    host: str
    rate: float
    upstream: int | None = None  # a port that is reached instead
    flows: set[asyncio.Task[None]] = field(default_factory=set)

    def switch(self, upstream: int) -> None:
        """Break all connections off; later ones go to this port."""
        self.upstream = upstream
        for flow in self.flows:
            flow.cancel()


@asynccontextmanager
async def throttled(ports: Iterable[int], rate: float) -> AsyncIterator[Network]:
    """These ports of 127.0.0.1, reached by a network that brings ``rate`` bytes per second of all of them together."""
    network = Network(f"127.0.0.{next(_hosts) % 250 + 2}", rate)
    turn = asyncio.Lock()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        try:
            while data := await reader.read(PIECE):
                if slow and network.rate < FAST:
                    async with turn:
                        await asyncio.sleep(len(data) / network.rate)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has gone
        finally:
            writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", network.upstream or port, limit=PIECE)
        except OSError:
            writer.transport.abort()
            return
        for source, target, slow in ((there[0], writer, True), (reader, there[1], False)):
            task = asyncio.create_task(pump(source, target, slow=slow))
            network.flows.add(task)
            task.add_done_callback(network.flows.discard)

    servers = [
        await asyncio.start_server(lambda r, w, port=port: serve(r, w, port), network.host, port, limit=PIECE)
        for port in ports
    ]
    try:
        yield network
    finally:
        for server in servers:
            server.close()
        for flow in network.flows:
            flow.cancel()
        await asyncio.gather(*network.flows, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close
