"""Peers that send garbage, half messages, too much, or messages of another time disturb nobody.

Well-formed HELLOs that would take a worker its place: tests/unit/protocol/test_trainer.py.
"""

import asyncio
import logging
import os
import pickle
import random
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
import zmq

from asyncsync import NotConnected, SchemaMismatch, ZMQWeightSyncScheme
from asyncsync.net.zmq_socket import LoopSocket, router
from asyncsync.weights.layout import Layout
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire import messages
from helpers.processes import Schemes, eventually, value_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.requirement(202)]

SMALL, CHUNKED = 1000, 5 << 18
EPOCH = (1, 1)
NONCE = bytes(16)


# -- against a trainer -------------------------------------------------------------------------------------------------


def hello(worker: int = 0, **changes: Any) -> messages.Hello:
    usual = messages.Hello(worker, secrets.token_bytes(16), 1, 0, "", 0, None, {"policy": 0})
    return replace(usual, **changes)


@contextmanager
def raw_dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.sndhwm = 0
        dealer.connect(endpoint)
        yield dealer


@asynccontextmanager
async def being_served(sender: ZMQWeightSyncScheme, receivers: list[ZMQWeightSyncScheme]) -> AsyncIterator[None]:
    """Lock-step updates to the healthy workers, all the time; each of them must arrive whole and soon."""
    over = asyncio.Event()
    rounds = 0

    async def serve() -> None:
        nonlocal rounds
        while not over.is_set():
            value = sender.version + 1
            assert await sender.send_async(sender.model.fill(value), range(len(receivers)), timeout=10) == value
            assert {r.model.value for r in receivers} == {value}
            rounds += 1

    serving = asyncio.create_task(serve())
    try:
        yield
        seen = rounds
        await eventually(lambda: rounds > seen + 2 or serving.done())
    finally:
        over.set()
        await serving
    for receiver in receivers:
        assert value_of(await receiver.receive(5)) == sender.version
    assert all(sender.status()[i].state == "live" for i in range(len(receivers)))


class Bomb:
    """Unpickling it is noticed."""

    gone_off = False

    def __reduce__(self) -> Any:
        return _go_off, ()


def _go_off() -> None:
    Bomb.gone_off = True


def malformed() -> list[list[bytes]]:
    """Messages that no correct worker sends; more kinds of them: tests/unit/wire/test_wire.py."""
    pack = msgpack.packb
    good = messages.encode(hello())
    fields = msgpack.unpackb(good)
    rng = random.Random(0)
    found: list[list[bytes]] = [[good[:n]] for n in range(len(good))]
    found += [[rng.randbytes(rng.randrange(1, 200))] for _ in range(200)]
    for _ in range(200):
        mutated = bytearray(good)
        mutated[rng.randrange(2, len(mutated))] ^= 1 << rng.randrange(8)
        if mutated[:2] == good[:2]:
            found.append([bytes(mutated) + b"\xc1"])  # no byte of msgpack's: malformed whatever the bit did
    found += [
        [pickle.dumps(Bomb())],
        [messages.encode(messages.Ready(EPOCH, {})), pickle.dumps(Bomb())],
        [pickle.dumps({"w": torch.zeros(3)})],
        [b"\xc1\xff" + bytes(40)],  # a fixed form of no kind
        [b"", b""],
        [pack([messages.PROTOCOL + 1, *fields[1:]])],
        [pack([*fields, 0])],
        [pack([messages.PROTOCOL, 1, 1 << 40, *fields[3:]])],  # a worker_idx out of range
        [good, b"a payload that HELLO has not"],
        [good] * 3000,  # frames
        [b"\x91" * 900],  # nested
        [b"\x91" * 20_000],
        [b"\xdd\xff\xff\xff\xff"],  # a list of four thousand million elements
        [b"\xc9\x00\x00\x00\x10\x05" + bytes(16)],  # ext
        [bytes(2 << 20)],  # longer than a header may be
        [pack([messages.PROTOCOL, 13, EPOCH, NONCE, "closed", "x" * (300 << 10)])],
        [pack([messages.PROTOCOL, 1, *fields[2:-1], {str(i): 0 for i in range(5000)}])],
        [messages.encode(messages.Welcome(EPOCH, NONCE, 1, 1, "", 0, {}))],  # what only a trainer sends
    ]
    return found


def out_of_place(epoch: messages.Epoch, version: int) -> list[messages.Instruction]:
    """Well-formed, but of another time, or untrue."""
    digest = secrets.token_bytes(16)
    later = (epoch[0] + 1, epoch[1])
    instructions: list[messages.Instruction] = []
    for e in (epoch, later, EPOCH):
        instructions += [
            messages.Ready(e, {"policy": digest, "nobody's": digest}),
            messages.Refused(e, "nobody's", digest, "no"),
            messages.Fetch(e, 10**9, 1, 0, 1 << 60),
            messages.Staged(e, 10**9),
            messages.Applied(e, {"policy": version + 10**9}),
            messages.Applied(e, {"nobody's": 1}),
            messages.Failed(e, 1, {"policy": version + 10**9}, True, "ValueError", "no", "no"),
            messages.Ping(e, 1 << 63),
            messages.Pong(e, 10**9, {"policy": version + 10**9}, {"policy": 10**9}, 10**9),
            messages.Bye(e, NONCE, "closed", "adieu"),
            messages.Applied(e, {}, 1, (), 1),
            messages.Digests(e, 1, 10**6, NONCE, 1, 0, 1, digest),
        ]
    return instructions


@pytest.mark.promise(39)
@pytest.mark.both_loops
@pytest.mark.parametrize("endpoint", ["ipc", "tcp"], indirect=True)
async def test_garbage_from_strangers_is_counted_and_disturbs_nobody(
    endpoint: str, schemes: Schemes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asyncsync")
    sender, receivers = await schemes.connected(CHUNKED, workers=2, endpoint=endpoint)
    wrong = malformed()
    strangers = [
        [messages.encode(i)] for i in out_of_place(sender.bus.link.end_fast_path().membership.epoch, sender.version)
    ]
    part = messages.Part("policy", 1, NONCE, 4)  # what only a trainer sends
    strangers += [[messages.encode(messages.Update(EPOCH, 1, True, (part,))), b"", b"abcd"]]
    strangers += [[messages.encode(messages.Again(EPOCH, 2, 1, 2, None)), b"abcd"]]
    async with being_served(sender, receivers):
        with raw_dealer(endpoint) as dealer:
            for message in [*wrong, *strangers, *wrong]:
                dealer.send_multipart(message)
                await asyncio.sleep(0)
            expected = 2 * len(wrong) + len(strangers)
            await eventually(
                lambda: sum(sender.bus.dropped.values()) == expected,
                why=lambda: f"{sum(sender.bus.dropped.values())} of {expected} dropped",
            )
    assert len(sender.bus.dropped) <= 101
    records = [r for r in caplog.records if "dropped a message" in r.getMessage()]
    assert len(records) <= 101  # the first of a kind, not every one
    assert not any(r.levelno >= logging.ERROR for r in caplog.records)
    assert all(sum(r.bus.dropped.values()) == 0 for r in receivers)
    assert sorted(sender.status()) == [0, 1]
    assert not Bomb.gone_off


async def test_a_worker_that_lies_is_refused_what_cannot_be_and_harms_itself_only(schemes: Schemes) -> None:
    sender = schemes.sender(CHUNKED)
    receivers = [schemes.receiver(sender, i) for i in range(2)]
    connecting = [asyncio.create_task(r.connect()) for r in receivers]
    await eventually(lambda: sender.bus.link is not None or not connecting[0].done())
    await asyncio.gather(sender.connect(), *connecting)
    epoch = sender.bus.link.end_fast_path().membership.epoch
    async with being_served(sender, receivers):
        with raw_dealer(sender.bus.endpoint) as dealer:
            dealer.send(messages.encode(hello(7)))
            await eventually(lambda: 7 in sender.status())
            for _ in range(5):
                for instruction in out_of_place(epoch, sender.version):
                    dealer.send(messages.encode(instruction))
                    await asyncio.sleep(0)
                for start in (0, 5, 1 << 40):  # wants everything at once, from wherever
                    dealer.send(messages.encode(messages.Fetch(epoch, 1, 2, start, 1 << 60)))
            await eventually(lambda: sum(sender.bus.dropped.values()) >= 5 * 20)
            await eventually(lambda: sender.status()[7].state == "lost")  # its BYE
            assert sender.status()[7].reason
            # It may not claim to have applied what was never published, not even in HELLO.
            dealer.send(messages.encode(hello(8, epoch=epoch, have={"policy": 10**12})))
            dropped = sum(sender.bus.dropped.values())
            await eventually(lambda: sum(sender.bus.dropped.values()) > dropped)
            assert 8 not in sender.status()
    assert sender.bus.link.pool.peak <= 4


async def test_a_worker_that_reads_nothing_holds_one_slab_and_no_queue(schemes: Schemes) -> None:
    sender = schemes.sender(CHUNKED)
    receivers = [schemes.receiver(sender, i) for i in range(2)]
    await asyncio.gather(sender.connect(), *(r.connect() for r in receivers))
    layout = next(iter(sender.bus.link.source_caches.values())).layout
    epoch = sender.bus.link.end_fast_path().membership.epoch
    async with being_served(sender, receivers):
        with raw_dealer(sender.bus.endpoint) as dealer:
            dealer.rcvhwm = 1
            dealer.send(messages.encode(hello(7)))
            dealer.send(messages.encode(messages.Ready(epoch, {"policy": layout.digest})))
            await eventually(lambda: sender.status().get(7) and sender.status()[7].version == 0)
            for serial in range(1, 400):
                dealer.send(messages.encode(messages.Fetch(epoch, serial, serial, 0, 1 << 60)))
                if serial % 20 == 0:
                    await asyncio.sleep(0.002)
            version = sender.version
            await eventually(lambda: sender.version > version + 20)
            assert sender.bus.link.pool.peak <= 4
    await eventually(lambda: sender.bus.link.pool.slabs <= 3)


@pytest.mark.requirement(197, 202)
@pytest.mark.parametrize("started", [False, True], ids=["waiting", "started"])
async def test_an_epoch_that_cannot_be_is_malformed_and_the_highest_leaves_room_for_a_successor(
    schemes: Schemes, started: bool
) -> None:
    sender = schemes.sender(SMALL, num_workers=1)
    receiver = schemes.receiver(sender)
    connecting = asyncio.create_task(sender.connect())
    if started:
        await asyncio.gather(connecting, receiver.connect())
    await eventually(lambda: sender.bus.link is not None)
    link = sender.bus.link
    with raw_dealer(sender.bus.endpoint) as dealer:
        for count, absurd in enumerate([(1 << 63, 0), ((1 << 64) - 1, (1 << 64) - 1)], 1):
            fields = msgpack.unpackb(messages.encode(hello(0)))
            fields[-2] = absurd
            dealer.send(msgpack.packb(fields))
            await eventually(
                lambda n=count: sum(sender.bus.dropped.values()) == n, why=lambda: link.end_fast_path().membership.epoch
            )
        if not started:
            dealer.send(messages.encode(hello(0, epoch=((1 << 63) - 2, 0))))
            await eventually(lambda: link.end_fast_path().membership.epoch[0] == (1 << 63) - 1)
            dealer.send(messages.encode(hello(0, epoch=((1 << 63) - 1, (1 << 64) - 1))))  # nothing comes after this one
            await eventually(
                lambda: sum(sender.bus.dropped.values()) == 3, why=lambda: link.end_fast_path().membership.epoch
            )
    await receiver.connect(timeout=10)
    await connecting
    assert await sender.send_async(sender.model.fill(3)) == sender.version
    assert receiver.model.value == 3


def raw(endpoint: str, data: bytes = b"") -> socket.socket:
    """A connection that speaks as it likes."""
    is_path, (host, _, port) = endpoint.startswith("ipc://"), endpoint.removeprefix("tcp://").rpartition(":")
    connection = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
    try:
        # Blocks while the backlog is full; ZeroMQ's I/O thread empties it.
        connection.connect(endpoint.removeprefix("ipc://") if is_path else (host, int(port)))
        connection.settimeout(10)
        with suppress(OSError):  # it may hang up while we speak
            connection.sendall(data)
    except BaseException:
        connection.close()
        raise
    return connection


# A ZMTP 3.1 greeting: signature, version, mechanism NULL; and what follows it.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"], indirect=True)
async def test_a_flood_of_connections_that_do_not_speak_zmtp_disturbs_nobody(endpoint: str, schemes: Schemes) -> None:
    sender = schemes.sender(CHUNKED, min_workers=2, endpoint=endpoint)
    receivers = [schemes.receiver(sender, i) for i in range(2)]
    await asyncio.gather(sender.connect(), *(r.connect() for r in receivers))
    rng = random.Random(1)
    spoken = GREETING + READY
    speeches = [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        *(GREETING[:n] for n in (1, 11, 40)),
        GREETING,
        GREETING + READY[:7],
        GREETING + b"\x04\xff" + bytes(255),
        GREETING.replace(b"NULL", b"EVIL"),
        spoken + b"\x02" + struct.pack(">Q", (1 << 63) - 1),  # a frame of 8 EiB
        spoken + b"\x02" + struct.pack(">Q", messages.MAX_FRAME + 1) + bytes(1000),
        spoken + b"\x03" + struct.pack(">Q", messages.MAX_FRAME) + bytes(1000),  # … and never the rest
        spoken + b"\x01\x00" * 100_000,  # frames without end
        *(rng.randbytes(rng.randrange(1, 1000)) for _ in range(20)),
    ]
    opened: list[socket.socket] = []
    try:
        async with being_served(sender, receivers):
            for speech in speeches:
                opened.append(raw(endpoint, speech))
                await asyncio.sleep(0)
            resident = _resident()
            await eventually(lambda: sender.version > 30)
            assert _resident() - resident < 200 << 20  # nothing is allocated on a stranger's word
            for i in range(100):
                raw(endpoint, spoken + b"\x00\x01x").close()
                opened.append(raw(endpoint))
                if i % 5 == 0:
                    await asyncio.sleep(0)
            late = schemes.receiver(sender, 2)  # a newcomer finds its way through the crowd
            await late.connect(timeout=20)
            await late.shutdown()
    finally:
        for connection in opened:
            connection.close()


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- against a worker --------------------------------------------------------------------------------------------------


class FakeTrainer:
    """A ROUTER that says to whoever speaks to it what a test wants said."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        socket = router(self.context)
        socket.bind(endpoint)
        self.route = b""
        self.heard: list[messages.Instruction] = []
        self.socket = LoopSocket(socket, self._receive, lambda error: None)

    def _receive(self, frames: list[Any]) -> None:
        self.route = frames[0].bytes
        self.heard.append(messages.decode([f.bytes for f in frames[1:]])[0])

    def last(self, kind: type) -> Any:
        return next((i for i in reversed(self.heard) if isinstance(i, kind)), None)

    async def hear(self, kind: type) -> Any:
        await eventually(lambda: self.last(kind), why=lambda: self.heard)
        return self.last(kind)

    def say(self, instruction: messages.Instruction | bytes, *payload: bytes) -> None:
        header = instruction if isinstance(instruction, bytes) else messages.encode(instruction)
        assert self.socket.send([self.route, header, *payload]) == 0

    async def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
async def fake(endpoint: str) -> AsyncIterator[FakeTrainer]:
    fake = FakeTrainer(endpoint)
    yield fake
    await fake.close()


def layout_of(numel: int, parts: int = 8) -> Layout:
    return Layout.of(FlatWeights({("parts", str(i)): torch.empty(numel // parts) for i in range(parts)}, {}))


def welcome_of(hello: messages.Hello, layout: Layout) -> messages.Welcome:
    return messages.Welcome(EPOCH, hello.nonce, hello.attempt, 0, "", 0, {"policy": layout.digest})


async def welcomed(fake: FakeTrainer, layout: Layout, answer: type) -> Any:
    """A worker's answer to its WELCOME: it says HELLO again and again, and takes that to the last one only."""
    while fake.last(answer) is None:
        attempt = (await fake.hear(messages.Hello)).attempt
        fake.say(welcome_of(fake.last(messages.Hello), layout), layout.encoded)
        await eventually(lambda n=attempt: fake.last(answer) or fake.last(messages.Hello).attempt > n)
    return fake.last(answer)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_worker_whose_model_does_not_fit_says_so_whatever_follows(
    endpoint: str, fake: FakeTrainer, schemes: Schemes, leaves: bool
) -> None:
    receiver = schemes.receiver(schemes.sender(SMALL, 5, endpoint=endpoint, num_workers=1))
    connecting = asyncio.create_task(receiver.connect())
    layout = layout_of(8 * SMALL)
    assert (await welcomed(fake, layout, messages.Refused)).digest == layout.digest
    hello: messages.Hello = fake.last(messages.Hello)
    fake.say(replace(welcome_of(hello, layout), models={"policy": b""}))  # it takes back what its worker refuses
    part = messages.Part("policy", 1, layout.digest, layout.nbytes)
    fake.say(messages.Update(EPOCH, 1, True, (part,)), b"", bytes(layout.nbytes))
    await eventually(lambda: any("unknown layout" in reason for reason in receiver.bus.dropped))
    if leaves:
        fake.say(messages.Bye(EPOCH, hello.nonce, "closed", "the sender was shut down"))
    for _ in range(2):
        with pytest.raises(SchemaMismatch):
            await connecting
        connecting = asyncio.create_task(receiver.connect())
    await asyncio.gather(connecting, return_exceptions=True)
    assert (receiver.version, receiver.model.value) == (0, -1)


@pytest.mark.promise(39)
async def test_a_worker_survives_a_trainer_that_talks_nonsense(
    endpoint: str, fake: FakeTrainer, schemes: Schemes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asyncsync")
    plan = schemes.sender(CHUNKED, 5, endpoint=endpoint, num_workers=1)
    receiver = schemes.receiver(plan)
    connecting = asyncio.create_task(receiver.connect())
    await fake.hear(messages.Hello)
    layout = layout_of(CHUNKED)
    dropped = 0

    async def all_dropped(*wrong: tuple[Any, ...]) -> None:
        nonlocal dropped
        for message in wrong:
            fake.say(*message)
        dropped += len(wrong)
        await eventually(
            lambda: sum(receiver.bus.dropped.values()) >= dropped, why=lambda: (dropped, receiver.bus.dropped)
        )
        assert sum(receiver.bus.dropped.values()) == dropped
        assert not receiver.closed
        assert receiver.model.value == -1

    def welcome(**changes: Any) -> messages.Welcome:
        return replace(welcome_of(fake.last(messages.Hello), layout), **changes)

    await all_dropped(*((m[0], *m[1:]) for m in malformed() if len(m) < 2000 and m != [messages.encode(welcome())]))
    await all_dropped(
        (messages.Bye(EPOCH, NONCE, "superseded", "for somebody else"),),
        (
            messages.Update(EPOCH, 1, False, (messages.Part("policy", 1, layout.digest, layout.nbytes),)),
            b"",
        ),  # no WELCOME yet
        (messages.Chunk(EPOCH, 1, 0, 0), bytes(100)),
        (messages.Ping(EPOCH, 1),),
        (messages.Hello(0, NONCE, 1, 0, "", 0, None, {}),),
    )
    assert (await welcomed(fake, layout, messages.Ready)).digests == {"policy": layout.digest}
    dropped = sum(receiver.bus.dropped.values())
    await all_dropped(
        (welcome(nonce=NONCE), layout.encoded),
        (welcome(attempt=10**6), layout.encoded),
        (welcome(epoch=(0, 5)), layout.encoded),
        (welcome(), b""),
        (welcome(), layout.encoded[:-1]),
        (welcome(), layout.encoded + b"\0"),
        (welcome(), random.Random(0).randbytes(len(layout.encoded))),
        (welcome(models={"policy": NONCE}), layout.encoded),  # digest of another layout
        (welcome(), bytes(20 << 20)),
    )

    digest, nbytes = layout.digest, layout.nbytes
    part = messages.Part("policy", 1, digest, nbytes)
    await all_dropped(
        (messages.Update((1, 0), 1, False, (part,)), b""),  # of an older epoch
        (messages.Update(EPOCH, 1, False, (messages.Part("policy", 1, NONCE, nbytes),)), b""),
        (messages.Update(EPOCH, 1, False, (messages.Part("policy", 1, digest, 1 << 41),)), b""),
        (messages.Update(EPOCH, 1, False, (messages.Part("nobody's", 1, digest, nbytes),)), b""),
        (messages.Update(EPOCH, 1, True, (part,)), b"", b"much too short"),
        (messages.Update(EPOCH, 1, False, (part, part)), b"", b""),
        (messages.Update(EPOCH, 1, False, (part,)), bytes(30 << 20)),  # values
        (messages.Again(EPOCH, 2, 1, 2, None), bytes(nbytes)),  # of an update that has not come
        (messages.Again(EPOCH, 2, 1, 2, b"/proc/1/mem"),),
        (messages.Applied(EPOCH, {}, 1, (), 1),),
        (messages.Ready(EPOCH, {}),),
        (messages.Pong(EPOCH, 10**6, {"policy": 3}, {}, 0),),
    )
    # An update whose bytes come wrong: what does not fit is dropped, and nothing half is applied.
    fake.say(messages.Update(EPOCH, 1, False, (part,)), b"")
    await fake.hear(messages.Fetch)
    await all_dropped(
        (messages.Chunk(EPOCH, 1, 1, 0), bytes(100)),
        (messages.Chunk(EPOCH, 1, 0, nbytes), bytes(1)),
        (messages.Chunk(EPOCH, 1, 0, nbytes - 10), bytes(11)),
        (messages.Chunk(EPOCH, 1, 0, (1 << 64) - 1), bytes(100)),
        (messages.Chunk(EPOCH, 1, 0, 0, crc=1), bytes(100)),  # checksum
        (messages.Chunk((2, 1), 1, 0, 0), bytes(100)),  # of an epoch that it has not been told
        (messages.Chunk(EPOCH, 1, 0, 0), bytes(messages.MAX_CHUNK + 1)),
    )
    fake.say(messages.Chunk(EPOCH, 1, 0, 0), bytes(1 << 20))  # a fifth, with the wrong content
    assert not connecting.done()

    # The real one comes: nothing of all that counts.
    await fake.close()
    await plan.connect(timeout=20)
    await connecting
    assert receiver.model.value == 5
    assert await plan.send_async(plan.model.fill(6)) == 2
    assert receiver.model.value == 6
    assert not Bomb.gone_off
    assert not any(r.levelno >= logging.ERROR for r in caplog.records)


async def test_a_worker_that_reaches_something_else_than_a_trainer_says_so(schemes: Schemes) -> None:
    answered = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        answered += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with suppress(OSError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        receiver = schemes.receiver(schemes.sender(SMALL, endpoint=f"tcp://127.0.0.1:{port}"))
        connecting = asyncio.create_task(receiver.connect(timeout=1))
        with pytest.raises(NotConnected, match="is no sender"):
            await connecting
        assert answered
        await receiver.shutdown()
