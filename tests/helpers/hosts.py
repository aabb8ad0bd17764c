"""Hosts on one machine: network namespaces on a bridge, each with a pid namespace of its own, so that nobody in one
host can watch, or share memory with, a process of another.

The test process is the trainer's host; its address is :attr:`Hosts.address`. Each other host runs this module as a
program, which has everything imported and forks a process for whatever is to be started: a worker takes milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import asyncsync
from helpers.pairs import Model, eventually

TESTS, PACKAGE = (Path(file).resolve().parent.parent for file in (__file__, asyncsync.__file__))
until = eventually
LARGE = 2_000_000  # elements: some MB, which take several chunks


# -- what runs in a host -----------------------------------------------------------------------------------------------


def tell(**event: Any) -> None:
    os.write(1, (json.dumps(event) + "\n").encode())  # at once, and in one piece: several processes write here


async def work(name: str, kind: str, connect: str, index: int, width: int) -> None:
    """A worker that looks at its model all the time, from another thread than the loop's."""
    cls = {"zmq": asyncsync.ZMQWeightSyncScheme, "shared": asyncsync.SharedMemWeightSyncScheme}[kind]
    scheme = cls(connect=connect, allow_plaintext=True)
    model = Model(-1.0, width)
    scheme.init_on_receiver("policy", model=model, worker_idx=index, reconnect=True)
    last = -1.0
    await scheme.connect(timeout=120)
    while True:
        found = await asyncio.to_thread(model)
        if len(found) != 1:
            tell(name=name, torn=sorted(found))
        value = max(found)
        if value < last:
            tell(name=name, torn=[last, value])
        if value != last:
            tell(name=name, value=value, version=scheme.version)
            last = value
        await asyncio.sleep(0.002)


def relay(arguments: list[str]) -> int:
    from asyncsync.cli import main

    return main(["relay", *arguments])


def serve() -> None:
    """Fork what the test asks for, one line of JSON each; end with its standard input."""
    for name in ("helpers.pairs", "asyncsync.cli", "asyncsync.relay.process"):
        import_module(name)  # so that whoever is forked has everything
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    children: dict[str, int] = {}
    tell(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        name = request["name"]
        if "signal" in request:
            with suppress(ProcessLookupError):
                os.kill(children[name], request["signal"])
                while request["signal"] == signal.SIGKILL:  # until it has let go of its address: the next may want it
                    os.kill(children[name], 0)
                    time.sleep(0.001)
            continue
        if child := os.fork():
            children[name] = child
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = 1
        try:
            if "relay" in request:
                code = relay(request["relay"])
            else:
                asyncio.run(work(name, *request["work"]))
        except BaseException as error:
            tell(name=name, failed=repr(error))
        finally:
            os._exit(code)


# -- in the test -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Process:
    """A worker or relay in a host: the value and version of its model, as it last said; ``torn``: what it should never
    have seen."""

    host: Host
    name: str
    value: float = -1.0
    version: int = 0
    torn: list[Any] = field(default_factory=list)
    failed: str = ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.host.send(name=self.name, signal=int(number))


@dataclass(eq=False)
class Host:
    """One namespace."""

    name: str
    process: asyncio.subprocess.Process
    processes: dict[str, Process] = field(default_factory=dict)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, **request: Any) -> None:
        self.process.stdin.write((json.dumps(request) + "\n").encode())

    def start(self, **what: Any) -> Process:
        name = f"{self.name}-{len(self.processes)}"
        process = self.processes[name] = Process(self, name)
        self.send(name=name, **what)
        return process

    def worker(self, index: int, connect: str, *, kind: str = "zmq", width: int = LARGE) -> Process:
        return self.start(work=[kind, connect, index, width])

    def relay(self, upstream: str, bind: str, *options: str) -> Process:
        return self.start(relay=["--upstream", upstream, "--bind", bind, "--allow-plaintext", *options])

    async def listen(self) -> None:
        while line := await self.process.stdout.readline():
            if not line.startswith(b"{"):
                continue  # the relay's own words
            event = json.loads(line)
            if "ready" in event:
                self.ready.set()
            elif (process := self.processes.get(event["name"])) is not None:
                process.value = event.get("value", process.value)
                process.version = event.get("version", process.version)
                process.failed = event.get("failed", process.failed)
                if "torn" in event:
                    process.torn.append(event["torn"])

    def unplug(self) -> None:
        ip("link", "set", cable_of(self.name), "down")

    def plug(self) -> None:
        ip("link", "set", cable_of(self.name), "up")


class Hosts(list[Host]):
    """The hosts, and the trainer's ``address``, where they reach it."""

    address = ""

    @property
    def workers(self) -> list[Process]:
        return [p for host in self for p in host.processes.values()]

    def check(self) -> None:
        """Nobody has seen anything torn, or failed."""
        for process in self.workers:
            assert not process.torn, (process.name, process.torn)
            assert not process.failed, (process.name, process.failed)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"


def names_of(*arguments: str) -> list[str]:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    return [line.split()[0] for line in done.stdout.splitlines() if line.strip()]


def remove(tag: str) -> None:
    """Whatever there is of the hosts of one test run. Their cables go first: with a namespace they would go, too, but
    only some time after it, and their names are used again."""
    names = [name for name in names_of("netns", "list") if name.startswith(f"ash{tag}")]
    cables = [["link", "del", cable_of(name)] for name in names]
    for command in (*cables, *(["netns", "del", name] for name in names), ["link", "del", f"asb{tag}"]):
        subprocess.run(["ip", *command], capture_output=True, timeout=20, check=False)


def sweep() -> None:
    """Remove the hosts of a test run that was killed."""
    for left in {name[3:-1] for name in names_of("netns", "list") if name.startswith("ash")}:
        if not Path(f"/proc/{int(left, 16)}").exists():
            remove(left)


@contextmanager
def namespaces(count: int) -> Iterator[tuple[str, list[str]]]:
    """Make them, and remove them whatever happens: this host's address for them, and their names. AssertionError: this
    system lets nobody make namespaces."""
    tag, third = f"{os.getpid():06x}", 1 + secrets.randbelow(250)
    sweep()
    bridge, address, names = f"asb{tag}", f"198.18.{third}.1", [f"ash{tag}{i}" for i in range(count)]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{address}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", cable_of(name), "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", cable_of(name), "master", bridge, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"198.18.{third}.{10 + i}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield address, names
    finally:
        remove(tag)


def cable_of(name: str) -> str:
    """The trainer's end of it."""
    return name.replace("ash", "asv")


async def program(name: str, module: str) -> asyncio.subprocess.Process:
    """A module's, in a namespace and in a pid namespace of its own."""
    command = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
    return await asyncio.create_subprocess_exec(
        *(*command, sys.executable, "-m", module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{PACKAGE}"},
        preexec_fn=_die_with_the_test,
    )


@asynccontextmanager
async def hosts(count: int) -> AsyncIterator[Hosts]:
    """So many, each with its program."""
    listeners, found = [], Hosts()
    with namespaces(count) as (found.address, names):
        try:
            for name in names:
                found.append(Host(name, await program(name, "helpers.hosts")))
            listeners = [asyncio.create_task(host.listen()) for host in found]
            await asyncio.wait_for(asyncio.gather(*(host.ready.wait() for host in found)), 100)
            yield found
            found.check()
        finally:
            for host in found:
                with suppress(ProcessLookupError):
                    host.process.kill()
                await host.process.wait()
            await asyncio.gather(*listeners)


def _die_with_the_test() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def values(processes: Iterable[Process]) -> list[float]:
    return [process.value for process in processes]


if __name__ == "__main__":
    serve()
