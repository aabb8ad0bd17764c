"""Guests: they get what is meant for everybody, and nobody waits for them. State machines first, then sockets."""

from typing import Any

import pytest
import torch

from asyncsync import SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from asyncsync.commands import fetch
from asyncsync.commands.fetch import Guest
from asyncsync.errors import ProtocolError
from asyncsync.protocol.membership import GONE_SECONDS
from asyncsync.protocol.settings import Identity
from asyncsync.protocol.worker import Worker
from asyncsync.transports import SharedMemTransport, ZMQTransport
from asyncsync.wire import messages
from asyncsync.wire.messages import FIRST_GUEST
from helpers.machines import EPOCH, Desk, layout, nonce, through_the_wire
from helpers.pairs import Model, crew, fill, read

GUEST = FIRST_GUEST + 7
F64 = torch.float64


def join(desk: Desk, role: str = "guest") -> None:
    desk.hello(GUEST, incarnation=99, role=role)
    desk.ready(GUEST)
    desk.take()


@pytest.mark.parametrize("num_workers", [1, None])
@pytest.mark.parametrize("role", ["guest", "relay"])
def test_a_guest_is_no_worker_and_is_sent_what_everybody_is(num_workers: int | None, role: str) -> None:
    desk = Desk(num_workers)
    join(desk, role)
    assert desk.machine.membership.expected() == ([0] if num_workers else [])
    assert desk.machine.membership.eligible(["policy"]) == ([0] if num_workers else [])
    desk.join(0)
    version = desk.publish(3)
    assert {u.serial for u in desk.take(messages.Update, b"%d" % GUEST)}  # type: ignore[attr-defined]
    assert desk.machine.progress.targeted(version) == [0]
    assert desk.machine.progress.targeted(version, ["policy"]) == [0]
    assert desk.machine.peers[GUEST].hello.role == role


@pytest.mark.parametrize("refuses", [False, True], ids=["silent", "refusing"])
def test_nobody_waits_for_a_guest_to_accept_a_layout_and_it_gets_no_weights_of_single_workers(refuses: bool) -> None:
    desk = Desk(1)
    desk.join(0)
    desk.publish(1)
    desk.hello(GUEST, incarnation=99, role="guest")
    desk.take()
    version = desk.publish(2, dtype=F64)
    if refuses:
        desk.refuse(GUEST, F64)
    desk.ready(0, F64)
    assert desk.machine.targets.published == version
    join(desk)
    desk.publish(4, workers=[0])
    assert not desk.take(messages.Update, b"%d" % GUEST)


@pytest.mark.parametrize("guests", [False, True])
def test_there_is_no_fast_path_while_a_guest_is_there(guests: bool) -> None:
    desk = Desk(1)
    desk.join(0)
    if guests:
        join(desk)
    for value in range(3):
        desk.publish(value)
        desk.take()
        for worker in (0, GUEST) if guests else (0,):
            desk.applied(worker, policy=desk.machine.targets.version)
    assert (desk.machine.steady("policy") is None) is guests


@pytest.mark.parametrize(
    ("worker", "role", "word"),
    [(GUEST, "worker", "index"), (3, "guest", "index"), (3, "relay", "index"), (3, "king", "expected one of")],
)
def test_a_role_is_known_and_fits_its_index(worker: int, role: str, word: str) -> None:
    with pytest.raises(ProtocolError, match=word):
        Desk(None).hello(worker, role=role)


def test_a_guest_that_has_gone_is_forgotten_by_trainers_of_fixed_workers_too() -> None:
    desk = Desk(1)
    join(desk)
    desk.machine.lost(GUEST, nonce(99), "it has left", desk.now)
    desk.pass_time(GONE_SECONDS + 1)
    assert GUEST not in desk.machine.peers


def test_a_guest_takes_whatever_models_the_trainer_has() -> None:
    guest = Worker(GUEST, nonce(1), Identity(1, "here", 1), role="guest")
    guest.connected(0.0)
    hello = guest.outbox.popleft()
    assert isinstance(hello, messages.Hello)
    assert (hello.role, hello.have) == ("guest", {})
    welcome = messages.Welcome(EPOCH, nonce(1), 1, 1, "here", 1, {"policy": b"", "": b""})
    guest.receive(*through_the_wire(welcome), 0.0)
    again = [one for one in guest.outbox if isinstance(one, messages.Hello)]
    assert again[0].have == {"policy": 0, "": 0}
    welcome = messages.Welcome(EPOCH, nonce(1), 2, 1, "here", 1, {"policy": layout().digest, "": b""})
    guest.outbox.clear()
    guest.receive(*through_the_wire(welcome, [layout().encoded]), 0.0)
    assert list(guest.outbox) == [messages.Ready(EPOCH, {"policy": layout().digest})]


@pytest.mark.parametrize(
    ("kind", "transport", "width"),
    [
        (ZMQWeightSyncScheme, ZMQTransport, 10),
        (ZMQWeightSyncScheme, ZMQTransport, 300_000),
        (SharedMemWeightSyncScheme, SharedMemTransport, 2_000_000),
    ],
    ids=["eager", "in chunks", "slots"],
)
async def test_a_guest_fetches_every_model_and_nobody_waits_for_it(
    endpoint: str, kind: type[Any], transport: type[Any], width: int
) -> None:
    source = Model(1.0, width)
    async with crew(1, scheme=kind(endpoint=endpoint), source=source, models=[Model(0.0, width)]) as (sender, _, _):
        guest = Guest(endpoint, own := transport())
        try:
            found = (await guest.weights(10))["policy"]
            assert found.version == sender.version
            assert read(found.slab.weights()) == {1.0}
            version = await sender.send_async(fill(source, 2.0), metadata={"step": 5})
            assert sorted(one.role for one in sender.status().values()) == ["guest", "worker"]
            assert await guest.link.wait(lambda: guest.link.newest_shown(["policy"]).version == version, 10)
            found = (await guest.weights(10))["policy"]
            assert found.metadata == {"step": 5}
            assert read(found.slab.weights()) == {2.0}
            del found
        finally:
            await guest.link.shutdown()
            own.close()


def test_keys_that_are_no_texts_are_written_as_json_has_them() -> None:
    assert fetch._as_json({"a": {b"x": [(1, {2: None})]}}) == '{"a": {"b\'x\'": [[1, {"2": null}]]}}'
