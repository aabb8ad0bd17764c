"""What is read from a socket and what is not, and where a sender may bind. Garbage: test_hostile_peers.py."""

import contextlib
import glob
import logging
import os
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

import asyncsync
from asyncsync import NotConnected
from asyncsync.collectors import MultiSyncCollector
from asyncsync.wire import messages
from helpers.apis import Api
from helpers.collecting_multi import make, options, policy
from helpers.pairs import fill, until


@asynccontextmanager
async def stranger(endpoint: str) -> AsyncIterator[Any]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        yield socket


@pytest.mark.requirement(202)
async def test_a_frame_beyond_every_limit_costs_its_sender_the_connection_and_nobody_else(api: Api) -> None:
    async with api.crew(1) as everybody:
        async with stranger(everybody.sender.bus.endpoint) as socket:
            await socket.send(bytes(messages.MAX_FRAME + 1), copy=False)
            await everybody.sender.send_async(fill(everybody.source, 2), timeout=5)
            assert everybody.read == [{2}]


@pytest.mark.requirement(202)
async def test_garbage_of_many_kinds_fills_neither_memory_nor_log(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="asyncsync")
    async with api.crew(1) as everybody:
        async with stranger(everybody.sender.bus.endpoint) as socket:
            for _ in range(3):
                await socket.send(b"x" * 100_000)
            await until(lambda: sum(everybody.sender.bus.dropped.values()) == 3)
            [record] = [r for r in caplog.records if "dropped a message" in r.getMessage()]
            assert len(record.getMessage()) < 1000
            assert len(everybody.sender.bus.dropped) == 1, "the first of its kind is logged, the others are counted"
            for number in range(400):
                await socket.send(msgpack.packb([messages.PROTOCOL, 1000 + number]))
            await until(lambda: sum(everybody.sender.bus.dropped.values()) == 403)
        assert len(everybody.sender.bus.dropped) <= 101
        assert len(caplog.records) <= 120


UNPICKLED = ("collectors", "workers", "messages.py")
"""What a collector and the worker processes that it has started send each other: the one exception."""


@pytest.mark.requirement(202)
@pytest.mark.promise(40)
def test_nothing_in_the_package_unpickles_but_messages_of_a_collectors_own_workers() -> None:
    forbidden = re.compile(
        r"\b(?:c?[pP]ickle|cloudpickle|dill|marshal|shelve)\.loads?\b|recv_pyobj|send_pyobj|send_serialized|recv_serialized"
        r"|torch\.load\(|from pickle import|from cloudpickle import|\beval\(|\bexec\(|Unpickler"
    )
    listening = re.compile(r"\.listen\(|AF_INET|create_server|start_server|Listener")
    checked = 0
    for directory in map(Path, asyncsync.__path__):
        trees = [directory] if directory.name == "asyncsync" else [directory / "transports", directory / "collectors"]
        for path in [path for tree in trees for path in tree.rglob("*.py")]:
            inside = path.relative_to(directory).parts
            if inside[0] in ("bench", "demo"):
                continue
            checked += 1
            text = path.read_text()
            if inside[0] == "collectors":
                assert listening.search(text) is None, f"{path} opens a socket that others may connect to"
            if inside == UNPICKLED:
                assert "socket.socketpair(" in text
                continue
            found = forbidden.search(text)
            assert found is None, f"{path}: {found}"
    assert checked > 100


def holders() -> dict[int, set[int]]:
    """Which processes have a socket open, by its inode; of strangers' processes one cannot see any."""
    found: dict[int, set[int]] = {}
    for entry in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if (target := os.readlink(entry)).startswith("socket:"):
                found.setdefault(int(target[8:-1]), set()).add(int(entry.split("/")[2]))
    return found


def names() -> dict[int, str]:
    """Of the Unix sockets of this namespace, those that have one: a path, or an abstract name."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {int(row[6]): row[7] for row in rows if len(row) > 7}


@pytest.mark.requirement(202)
@pytest.mark.promise(40)
def test_a_collector_and_its_workers_talk_over_sockets_that_nobody_else_can_reach() -> None:
    before = holders()
    with MultiSyncCollector([make()] * 2, policy(), **options(start_method="forkserver")) as collector:
        collector.next()
        open_in, with_names = holders(), names()
        named = {with_names[i] for i in open_in.keys() & with_names if os.getpid() in open_in[i] - before.get(i, set())}
        bus = collector._sender_schemes["policy"].bus.endpoint.removeprefix("ipc://")
        assert named == {bus, f"{bus}.side"}, "the bus's, on which nothing is unpickled"
        for member in collector.group.family.processes:
            own = os.stat(member.channel.fileno()).st_ino
            assert member.channel._socket.getsockname() == ""
            assert own not in with_names
            assert open_in[own] == {os.getpid()}
            there = [inode for inode, pids in open_in.items() if member.pid in pids]
            assert there, "the other end is there"
            assert not set(there) & with_names.keys(), "a worker has no address at all"
            assert all(open_in[inode] == {member.pid} for inode in there), "nor shares a socket with any process"


# -- where a sender may bind

BEYOND = [
    "0.0.0.0:5555",
    "*:5555",
    "[::]:5555",
    "10.0.0.3:5555",
    "[2001:db8::1]:5555",
    "trainer.example.org:5555",
    "eth0:5555",
    # What only looks like loopback.
    "::ffff:10.0.0.1:5555",
    "127.0.0.1.example.org:5555",
    "localhost.example.org:5555",
    "2130706433:5555",
    "0:5555",
]


@pytest.mark.requirement(203)
@pytest.mark.promise(42)
@pytest.mark.parametrize("address", BEYOND)
@pytest.mark.parametrize("argument", ["endpoint", "connect"])
@pytest.mark.parametrize("cls", ["Bus", "ZMQWeightSyncScheme"])
def test_an_address_beyond_this_host_needs_allow_plaintext(api: Api, cls: str, argument: str, address: str) -> None:
    """Of 203: without keys."""
    kind = getattr(api, cls)
    with pytest.raises(ValueError, match=r"reachable from other hosts.*allow_plaintext=True"):
        kind(**{argument: f"tcp://{address}"})
    allowed = kind(**{argument: f"tcp://{address}"}, allow_plaintext=True)
    bus = allowed if cls == "Bus" else allowed.bus
    assert (bus.endpoint if argument == "endpoint" else bus.connect_endpoint) == f"tcp://{address}"


@pytest.mark.requirement(203)
@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "[::1]", "localhost"])
def test_loopback_and_ipc_need_nothing(api: Api, host: str) -> None:
    assert api.bus(f"tcp://{host}:5555").endpoint == f"tcp://{host}:5555"
    assert api.bus("ipc:///tmp/somewhere").endpoint == "ipc:///tmp/somewhere"


@pytest.mark.requirement(203)
async def test_plaintext_beyond_loopback_is_logged_once_and_checked(
    api: Api, caplog: pytest.LogCaptureFixture, unused_tcp_port: int
) -> None:
    caplog.set_level(logging.WARNING, logger="asyncsync")
    address = f"tcp://127.0.0.1:{unused_tcp_port}"
    scheme = api.scheme(endpoint=f"tcp://0.0.0.0:{unused_tcp_port}", connect=address, allow_plaintext=True)
    async with api.crew(2, scheme=scheme) as everybody:
        await everybody.sender.send_async(fill(everybody.source, 2))
        assert everybody.read == [{2}, {2}]
        assert everybody.sender.bus._settings().checksum, "payloads carry a checksum there"
    assert len([r for r in caplog.records if "not encrypted" in r.getMessage()]) == 1


@pytest.mark.promise(42)
async def test_the_default_address_is_private_to_this_user(api: Api) -> None:
    async with api.crew(1) as everybody:
        path = Path(everybody.sender.bus.endpoint.removeprefix("ipc://"))
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        directory = os.stat(path.parent)
        assert (stat.S_IMODE(directory.st_mode), directory.st_uid) == (0o700, os.getuid())
        assert len(os.fsencode(path)) <= 107
    assert path.parent.name not in os.listdir(path.parent.parent)


async def test_a_private_directory_of_somebody_else_is_not_used(api: Api, tmp_path: Path) -> None:
    """The name is unguessable; were it taken nevertheless, its owner keeps it."""
    scheme = api.scheme()
    directory = Path(scheme.bus.endpoint.removeprefix("ipc://")).parent
    directory.symlink_to(tmp_path)
    try:
        async with scheme:
            scheme.init_on_sender(model_id="policy", num_workers=1)
            with pytest.raises(NotConnected):
                await scheme.connect(timeout=0.2)
            assert os.listdir(tmp_path) == []
    finally:
        directory.unlink()
