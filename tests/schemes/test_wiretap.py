"""Somebody between a trainer and its worker: what can be read there, and what follows from a changed bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from asyncsync import PartialSendError
from asyncsync.cli import main
from helpers.apis import Api
from helpers.pairs import Model, connected, fill, read

pytestmark = [pytest.mark.requirement(203), pytest.mark.schemes("zmq")]


class Tap:
    """A TCP port before another one. It keeps what the trainer sends; with ``spoils`` it flips bits in the middle."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.heard = bytearray()
        self.spoils = False
        self.spoilt = 0

    async def __aenter__(self) -> Tap:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port: int = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pump(reader, there_writer, False))
            group.create_task(self.pump(there_reader, writer, True))

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, from_trainer: bool) -> None:
        with suppress(OSError):
            while data := bytearray(await reader.read(1 << 16)):
                if from_trainer:
                    self.heard += data
                    if self.spoils and len(data) > 1000:
                        data[len(data) // 2] ^= 0xFF
                        self.spoilt += 1
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def tapped(
    api: Api, port: int, sender_keys: dict[str, Any], keys: dict[str, Any]
) -> AsyncIterator[tuple[Any, ...]]:
    sender = api.scheme(endpoint=f"tcp://127.0.0.1:{port}", **sender_keys)
    source, model = Model(1.0, 1000), Model(width=1000)
    sender.init_on_sender(model_id="policy", model=source)
    async with Tap(port) as tap:
        receiver = api.scheme(connect=f"tcp://127.0.0.1:{tap.port}", **keys)
        receiver.init_on_receiver("policy", model=model, worker_idx=0)
        async with connected(sender, receiver):
            yield sender, source, model, tap


@pytest.mark.promise(43)
@pytest.mark.parametrize("has_keys", [True, False], ids=["keys", "plaintext"])
async def test_with_keys_nobody_on_the_way_reads_the_weights_or_changes_them(
    api: Api, unused_tcp_port: int, tmp_path: Path, has_keys: bool
) -> None:
    sender_keys, keys = make_keys(tmp_path) if has_keys else ({}, {})
    async with tapped(api, unused_tcp_port, sender_keys, keys) as (sender, source, model, tap):
        await sender.send_async(fill(source, 1234.5), timeout=10)
        assert read(model) == {1234.5}
        weights = next(source.parameters()).detach().flatten()[:8].numpy().tobytes()
        assert (weights in tap.heard) is not has_keys
        if has_keys:
            tap.spoils = True
            with pytest.raises(PartialSendError):
                await sender.send_async(fill(source, 2.0), timeout=1)
            assert tap.spoilt
            assert read(model) == {1234.5}
            tap.spoils = False
            await sender.send_async(fill(source, 3.0), timeout=20)
            assert read(model) == {3.0}


def make_keys(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    made = directory / "keys"
    assert main(["keygen", str(made), "--workers", "1"]) == 0
    sender = {"server_key": made / "server.key_secret", "clients": made / "clients"}
    return sender, {"server_key": made / "server.key", "client_key": made / "client_secrets/worker-0.key_secret"}
