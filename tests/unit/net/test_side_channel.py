"""Side channels: packets, connections, introductions. When they break: test_broken_side_channels.py."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.net.endpoint import EndpointLock
from asyncsync.net.side_channel import (
    INTRODUCTION,
    MAX_PACKET,
    MAX_PACKET_FRAMES,
    MAX_STRANGERS,
    SideChannel,
    SideChannels,
    connect_side_channel,
    split_packet,
)
from asyncsync.wire import messages
from helpers.pairs import until

EPOCH = (1, 1)
NONCE = bytes(range(16))


def packet(frames: list[bytes]) -> memoryview:
    """What a side channel sends for this message."""
    sent: list[bytes] = []
    connection = SimpleNamespace(sendmsg=lambda buffers, *_: sent.append(b"".join(buffers)))
    assert SideChannel.send(SimpleNamespace(_socket=connection), frames)
    return memoryview(sent[0])


def crash(error: BaseException) -> None:
    raise error


# -- packets -----------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=300), st.lists(st.binary(max_size=250), max_size=MAX_PACKET_FRAMES - 1))
def test_a_packet_brings_the_frames_that_were_put_into_it(header: bytes, payload: list[bytes]) -> None:
    message = [header, *payload]
    assert [bytes(frame) for frame in split_packet(packet(message))] == message


@given(st.binary(max_size=600) | st.tuples(st.sampled_from([b"\0", b"\1", b"\2"]), st.binary()).map(b"".join))
def test_bytes_are_a_packet_of_ours_or_are_refused(garbage: bytes) -> None:
    try:
        frames = [bytes(frame) for frame in split_packet(memoryview(garbage))]
    except ProtocolError:
        return
    assert packet(frames) == garbage


def test_a_packet_that_is_too_long_or_brings_what_has_no_business_here_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        split_packet(memoryview(bytes(MAX_PACKET + 1)))
    for instruction in (messages.Ping(EPOCH, 1), messages.Bye(EPOCH, NONCE, "closed", ""), messages.Ready(EPOCH, {})):
        assert type(instruction) not in messages.BY_SIDE_CHANNEL
        with pytest.raises(ProtocolError, match="by the side channel"):
            messages.decode([messages.encode(instruction)], by_side_channel=True)
    staged = messages.Staged(EPOCH, 7)
    assert messages.decode([messages.encode(staged)], by_side_channel=True) == (staged, [])
    with pytest.raises(ProtocolError):
        messages.decode([messages.encode(staged), b"a payload that it has not"], by_side_channel=True)


# -- one connection ----------------------------------------------------------------------------------------------------


class End:
    """A side channel, and what has come by it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.heard: list[bytes] = []
        self.ended = 0
        self.channel = SideChannel(connection, memoryview(bytearray(MAX_PACKET + 1)), self._end, crash)
        self.channel.receive = lambda packet: self.heard.append(bytes(packet))

    def _end(self, channel: SideChannel) -> None:
        self.ended += 1


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    a, b = (End(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield a, b
    a.channel.close()
    b.channel.close()


@pytest.mark.both_loops
async def test_what_was_sent_before_a_side_channel_is_closed_arrives(ends: tuple[End, End]) -> None:
    a, b = ends
    assert b.channel.send([b"unread"])
    messages = [b"one", b"two", bytes(60_000)]
    assert all(a.channel.send([message]) for message in messages)
    a.channel.close()  # with something unread: the other side is told of a reset, too
    await until(lambda: b.ended > 0)
    assert b.heard == [bytes(packet([message])) for message in messages]
    assert b.ended == 1
    assert b.channel.closed
    assert not a.ended


def test_a_side_channel_of_a_loop_that_has_ended_can_be_closed() -> None:
    async def make() -> End:
        return End(there)

    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        asyncio.run(make()).channel.close()


async def test_draining_takes_in_at_once_what_has_come(ends: tuple[End, End]) -> None:
    a, b = ends
    for i in range(20):
        assert a.channel.send([bytes([i])])
    b.channel.drain()
    assert len(b.heard) == 20
    b.channel.close()
    b.channel.drain()
    assert not a.channel.send([b"nobody is there"])


async def test_a_full_side_channel_and_a_large_message_are_left_to_somebody_else(ends: tuple[End, End]) -> None:
    a, b = ends
    assert not a.channel.send([bytes(MAX_PACKET)])
    assert not a.channel.send([b"x"] * (MAX_PACKET_FRAMES + 2))
    sent = 0
    while a.channel.send([bytes(30_000)]):
        sent += 1
    assert sent > 1
    await until(lambda: len(b.heard) == sent)
    assert a.channel.send([bytes(30_000)])  # there is room again


# -- listening and introductions ---------------------------------------------------------------------------------------


class Listener:
    """A sender's end that knows one nonce."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[bytes] = []
        self.channels = SideChannels(path, self._introduce, crash)

    def _introduce(self, nonce: bytes) -> Any:
        return (lambda packet: self.heard.append(bytes(packet))) if nonce == NONCE else None

    def connect(self, nonce: bytes = NONCE) -> SideChannel:
        return connect_side_channel(self.path, nonce, lambda packet: None, crash)

    @contextmanager
    def called(self, words: bytes = b"") -> Iterator[socket.socket]:
        """A connection that begins with other words than ours."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as caller:
            caller.connect(str(self.path))
            if words:
                caller.send(words)
            yield caller


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncIterator[Listener]:
    listener = Listener(tmp_path / "bus.side")
    yield listener
    listener.channels.close()


@pytest.mark.both_loops
async def test_a_receiver_introduces_itself_and_a_newer_side_channel_replaces_the_older(listener: Listener) -> None:
    first = listener.connect()
    assert not first.open
    await until(lambda: first.open)
    assert first.send([b"x"])
    await until(lambda: listener.heard == [bytes(packet([b"x"]))])
    second = listener.connect()
    await until(lambda: second.open and first.closed)
    assert list(listener.channels.of) == [NONCE]
    listener.channels.close_others({NONCE})
    assert list(listener.channels.of) == [NONCE]
    listener.channels.close_others(set())
    await until(lambda: second.closed)
    assert not listener.channels.of


async def test_whoever_is_not_known_is_turned_away(listener: Listener) -> None:
    stranger = listener.connect(bytes(16))
    await until(lambda: stranger.closed)
    for words in (b"GET /", INTRODUCTION, NONCE, INTRODUCTION + NONCE + b"!", bytes(MAX_PACKET + 1)):
        with listener.called(words) as caller:
            await until(lambda c=caller: _hung_up(c))
    assert not listener.channels.of
    assert not listener.heard


def _hung_up(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except BlockingIOError:
        return False


async def test_those_who_say_nothing_do_not_pile_up(listener: Listener) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(listener.called()) for _ in range(MAX_STRANGERS + 20)]
        await until(lambda: all(map(_hung_up, silent[:20])))
        assert not any(map(_hung_up, silent[20:]))
        mine = listener.connect()
        await until(lambda: mine.open)
        mine.close()


async def test_another_users_process_is_turned_away(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert connect_side_channel(listener.path, NONCE, lambda packet: None, crash) is None
    with listener.called() as caller:
        await until(lambda: _hung_up(caller))


async def test_without_a_side_channel_there_is_none_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "directory").mkdir()
    caplog.set_level(logging.DEBUG, "asyncsync")
    for name in ("nobody", "missing/bus.side", "x" * 200, "directory"):
        assert connect_side_channel(tmp_path / name, NONCE, lambda packet: None, crash) is None
    SideChannels(tmp_path / "directory", lambda nonce: None, crash).close()
    said = [record.getMessage() for record in caplog.records]
    assert all(text.startswith("no side channel") for text in said)
    assert str(tmp_path / "directory") in said[-1]
    assert len(said) == 5
    monkeypatch.setattr(socket, "SOCK_SEQPACKET", 99)  # another system
    assert connect_side_channel(tmp_path / "bus.side", NONCE, lambda packet: None, crash) is None
    for path in (tmp_path / "bus.side", None):
        SideChannels(path, lambda nonce: None, crash).close()
    assert os.listdir(tmp_path) == ["directory"]


async def test_only_a_dead_predecessors_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "bus.side"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    lock = EndpointLock(f"ipc://{tmp_path}/bus")
    first = SideChannels(path, lambda nonce: None, crash)
    assert path.is_socket()
    first.close()
    lock.release()
    assert os.listdir(tmp_path) == []
    path.write_text("somebody's")
    lock = EndpointLock(f"ipc://{tmp_path}/bus")
    SideChannels(path, lambda nonce: None, crash).close()
    lock.release()
    assert path.read_text() == "somebody's"


async def test_a_forked_child_lets_go_of_the_descriptors(listener: Listener) -> None:
    mine = listener.connect()
    await until(lambda: mine.open)
    before = len(_sockets())
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.write(write, bytes([before - len(_sockets()), mine.closed]))
        os._exit(0)
    os.waitpid(pid, 0)  # noqa: ASYNC222
    assert os.read(read, 2) == bytes([3, True])  # both ends, and the socket that listens
    os.close(read)
    os.close(write)
    assert mine.send([b"still ours"])
    await until(lambda: len(listener.heard) == 1)
    mine.close()


def _sockets() -> list[str]:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.lexists(link) and os.readlink(link).startswith("socket:")]
