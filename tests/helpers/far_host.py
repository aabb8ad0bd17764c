"""A host of its own: a network, pid and uts namespace on this machine, at the other end of a cable (veth). For root.

    async with far_host() as far:
        scheme = AutoWeightSyncScheme(endpoint=f"tcp://{far.this_address}:{port}", allow_plaintext=True)
        worker = await far.worker(scheme, index=1, numel=1000)
        assert await worker.shown() == 2.0

A worker is a program there that connects and, for each line that it is sent, prints the number that its model holds.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from helpers.processes import Filled


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, question: str) -> str:
        self._process.stdin.write(question.encode() + b"\n")
        return (await asyncio.wait_for(self._process.stdout.readline(), 30)).decode().strip()

    async def shown(self) -> float:
        """The number that the model holds; torn weights end the program."""
        return float(await self.ask("value"))

    async def end(self) -> None:
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), 30)


class FarHost:
    """``this_address`` is this host's, as seen from there."""

    def __init__(self, name: str, this_address: str) -> None:
        self._name = name
        self.this_address = this_address

    async def worker(self, scheme: Any, index: int, numel: int) -> _Worker:
        """Start a worker there; it connects by itself."""
        pid_namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", self._name, *pid_namespace, sys.executable, "-m", "helpers.far_host"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        worker = _Worker(process)
        process.stdin.write(base64.b64encode(pickle.dumps((scheme, index, numel))) + b"\n")
        return worker


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.asynccontextmanager
async def far_host() -> AsyncIterator[FarHost]:
    """Made, and removed in the end. Fails where this is not allowed."""
    key = secrets.token_hex(3)
    name, here, there = f"far-{key}", f"near-{key}", f"far-{key}"
    net = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(256)}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        try:
            _run("ip", "address", "add", f"{net}.1/30", "dev", here)
            _run("ip", "link", "set", here, "up")
            _run("ip", "-n", name, "address", "add", f"{net}.2/30", "dev", there)
            _run("ip", "-n", name, "link", "set", there, "up")
            yield FarHost(name, f"{net}.1")
        finally:
            _run("ip", "link", "delete", here)
    finally:
        _run("ip", "netns", "delete", name)


async def _main() -> None:
    scheme, index, numel = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))
    model = Filled(numel, -1.0)
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    async with scheme:
        await scheme.connect(timeout=30)
        loop = asyncio.get_running_loop()
        while question := await loop.run_in_executor(None, sys.stdin.buffer.readline):
            with scheme.hold():
                print(model.value if question == b"value\n" else os.getpid(), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
