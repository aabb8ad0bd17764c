"""Hosts on one machine: network namespaces on a bridge, each with a pid namespace of its own, so that nobody in one
host can watch, or share memory with, a process of another.

The test process is the trainer's host; its address is :attr:`Hosts.address`. Each other host runs this module as a
program, which has everything imported and forks a process for whatever is to be started: a worker takes milliseconds.
The tests of one file use the same hosts, one test after the other.
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
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import asyncsync
from helpers.pairs import Model, eventually

until = eventually
LARGE = 2_000_000  # elements: some MB, which take several chunks
READY = b"ready\n"


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


def end(child: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)
        while number == signal.SIGKILL:  # until it has let go of its address: the next may want it
            os.kill(child, 0)
            time.sleep(0.001)


def serve() -> None:
    """Fork what the tests ask for, one line of JSON each; end with its standard input."""
    for name in ("helpers.pairs", "asyncsync.cli", "asyncsync.relay.process"):
        import_module(name)  # so that whoever is forked has everything
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    children: dict[str, int] = {}
    os.write(1, READY)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("over"):
            for child in children.values():
                end(child, signal.SIGKILL)
            children.clear()
            tell(over=True)
            continue
        name = request["name"]
        if "signal" in request:
            end(children[name], request["signal"])
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
    """One namespace, and what one test has started in it."""

    name: str
    program: subprocess.Popen[bytes]
    processes: dict[str, Process] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    told: bytes = b""

    def send(self, **request: Any) -> None:
        assert self.program.stdin is not None
        self.program.stdin.write((json.dumps(request) + "\n").encode())
        self.program.stdin.flush()

    def start(self, **what: Any) -> Process:
        name = f"{self.name}-{len(self.processes)}"
        process = self.processes[name] = Process(self, name)
        self.send(name=name, **what)
        return process

    def worker(self, index: int, connect: str, *, kind: str = "zmq", width: int = LARGE) -> Process:
        return self.start(work=[kind, connect, index, width])

    def relay(self, upstream: str, bind: str, *options: str) -> Process:
        return self.start(relay=["--upstream", upstream, "--bind", bind, "--allow-plaintext", *options])

    def listen(self) -> None:
        """Take in what has been told since the last time."""
        assert self.program.stdout is not None
        *lines, self.told = (self.told + os.read(self.program.stdout.fileno(), 1 << 16)).split(b"\n")
        for line in lines:
            if not line.startswith(b"{"):
                continue  # the relay's own words
            event = json.loads(line)
            if "over" in event:
                self.over.set()
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


def program(name: str, module: str) -> tuple[list[str], dict[str, Any]]:
    """How to start a module's, in a namespace and in a pid namespace of its own: the command, and further options."""
    apart = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
    return [*apart, sys.executable, "-m", module], {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "env": os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        "preexec_fn": _die_with_the_test,
    }


@contextmanager
def programs(count: int) -> Iterator[tuple[str, dict[str, subprocess.Popen[bytes]]]]:
    """This host's address for so many others, and their programs by name: it takes seconds to start them."""
    with ExitStack() as stack:
        address, names = stack.enter_context(namespaces(count))
        found = {}
        for name in names:
            command, options = program(name, "helpers.hosts")
            found[name] = stack.enter_context(subprocess.Popen(command, **options))
            stack.callback(found[name].kill)
        for started in found.values():
            assert started.stdout is not None
            assert started.stdout.readline() == READY
        yield address, found


@asynccontextmanager
async def hosts(address: str, programs: dict[str, subprocess.Popen[bytes]]) -> AsyncIterator[Hosts]:
    """For one test: whatever it has started there ends with it."""
    found = Hosts(Host(name, program) for name, program in programs.items())
    found.address = address
    loop = asyncio.get_running_loop()
    for host in found:
        loop.add_reader(host.program.stdout, host.listen)
    try:
        yield found
        found.check()
    finally:
        for host in found:
            host.plug()
            host.send(over=True)
        await asyncio.wait_for(asyncio.gather(*(host.over.wait() for host in found)), 20)
        for host in found:
            loop.remove_reader(host.program.stdout)


def _die_with_the_test() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def values(processes: Iterable[Process]) -> list[float]:
    return [process.value for process in processes]


if __name__ == "__main__":
    serve()
