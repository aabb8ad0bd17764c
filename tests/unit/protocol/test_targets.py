"""Leases: what a worker may be reading where it lies is written again when that worker, or its end, has said so."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncsync.protocol.settings import Settings
from asyncsync.protocol.targets import Key, Leases, Peer
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.wire import messages
from helpers.machines import EPOCH, Desk, nonce

RETRY = Settings().retry_interval


def lent(nbytes: int = 64) -> Slab:
    slab = Slab(Layout([(("w",), torch.uint8, (nbytes,))]), torch.zeros(nbytes, dtype=torch.uint8))
    slab.leased = True
    return slab


# -- one worker's leases -----------------------------------------------------------------------------------------------


class One(Leases):
    """The leases of one worker."""

    def __init__(self) -> None:
        super().__init__()
        self.peer = Peer(0, nonce(0), b"0", messages.Hello(0, nonce(0), 1, 7, "here", 1, None, {}), True, 0.0)

    def lend(self, serial: int, parts: Mapping[str, tuple[int, Slab]]) -> None:
        self.lease(self.peer, serial, parts)

    def hear(self, last: int, in_use: Iterable[Key]) -> None:
        self.report(self.peer.nonce, last, list(in_use))

    @property
    def keys(self) -> set[Key]:
        return {key for leases in self.of.values() for key in leases.slabs}


def test_a_loan_holds_its_slab_until_a_report_of_its_update_does_not_name_it() -> None:
    leases, slab, plain = One(), lent(), lent()
    plain.leased = False
    leases.lend(5, {"policy": (3, slab), "critic": (3, plain)})
    assert (slab.references, plain.references, leases.keys) == (2, 1, {("policy", 3)})
    leases.hear(4, ())  # this worker has not seen it yet
    leases.hear(5, (("policy", 3),))  # reads it
    leases.hear(9, (("policy", 3),))
    assert (slab.references, leases.keys) == (2, {("policy", 3)})
    leases.hear(9, (("policy", 4), ("critic", 3)))
    assert (slab.references, len(leases.of)) == (1, 0)


def test_the_end_of_a_process_gives_everything_back() -> None:
    leases, slabs = One(), [lent() for _ in range(3)]
    for serial, slab in enumerate(slabs, 1):
        leases.lend(serial, {"policy": (serial, slab)})
    leases.release(leases.peer.nonce)
    leases.release(leases.peer.nonce)
    assert ([slab.references for slab in slabs], len(leases.of)) == ([1, 1, 1], 0)


class Reader:
    """A worker as leases imagine it: looks at newer UPDATEs only, may forget any version at any time, and reports."""

    def __init__(self) -> None:
        self.serial = 0
        self.uses: set[Key] = set()

    def see(self, serial: int, keys: Iterable[Key]) -> None:
        if serial > self.serial:
            self.serial = serial
            self.uses.update(keys)


actions = st.tuples(st.sampled_from(["lend", "see", "forget", "report", "hear"]), st.integers(0, 30))


@given(st.lists(actions, max_size=60))
def test_no_order_of_messages_gives_back_what_is_read_and_the_last_report_gives_back_all_else(
    steps: list[tuple[str, int]],
) -> None:
    """UPDATEs and reports may arrive in any order, repeatedly, or never."""
    leases, reader = One(), Reader()
    slabs: dict[Key, Slab] = {}
    updates: list[tuple[int, list[Key]]] = []
    reports: list[tuple[int, list[Key]]] = []
    for name, number in steps:
        if name == "lend":
            parts = {"policy": 1 + number % 5} | ({"critic": 1 + number % 3} if number % 2 else {})
            keys = [(model, version) for model, version in parts.items()]
            out = {model: (version, slabs.setdefault((model, version), lent())) for model, version in parts.items()}
            updates.append((len(updates) + 1, keys))
            leases.lend(len(updates), out)
        elif name == "see" and updates:
            reader.see(*updates[number % len(updates)])
        elif name == "forget" and reader.uses:
            reader.uses.discard(sorted(reader.uses)[number % len(reader.uses)])
        elif name == "report":
            reports.append((reader.serial, sorted(reader.uses)))
        elif name == "hear" and reports:
            leases.hear(*reports[number % len(reports)])
        for key in reader.uses:
            assert slabs[key].references == 2, f"{key} is read, and may be written"
    reader.see(len(updates) + 1, [])
    leases.hear(reader.serial, sorted(reader.uses))
    assert leases.keys == reader.uses


# -- the trainer's ---------------------------------------------------------------------------------------------------


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.join(0, 1)
    desk.machine.mark_assembled("policy")
    return desk


def update_for(desk: Desk, worker: int) -> messages.Update:
    (update,) = desk.take(messages.Update, b"%d" % worker)
    return update


def out(desk: Desk, worker: int) -> set[int]:
    """The versions that the newest incarnation of this worker, with its default nonce, may be reading."""
    leases = desk.machine.leases.of.get(nonce(worker))
    return set() if leases is None else {version for _, version in leases.slabs}


def slabs_out(desk: Desk) -> int:
    return len(desk.pool.used)


def follow(desk: Desk, update: messages.Instruction) -> None:
    """Another incarnation takes worker 0's place, and accepts the layout of this update."""
    desk.hello(0, incarnation=50, route=b"next")
    desk.cut(b"0")
    desk.receive(b"next", messages.Ready(EPOCH, {"policy": update.parts[0].digest}))  # type: ignore[attr-defined]


def test_an_update_lends_its_slabs_and_applying_a_newer_one_gives_them_back(desk: Desk) -> None:
    desk.publish(1, lent=True)
    first, _ = desk.take(messages.Update)
    for worker in (0, 1):
        desk.staged(worker, first, 1, (("policy", 1),))
        desk.applied(worker, 1, (("policy", 1),), policy=1)
    assert (out(desk, 0), out(desk, 1)) == ({1}, {1})
    desk.publish(2, lent=True)
    (second,) = desk.take(messages.Update, b"0")
    assert slabs_out(desk) == 2
    for worker in (0, 1):
        desk.staged(worker, second, second.serial, (("policy", 1), ("policy", 2)))
        assert out(desk, worker) == {1, 2}
        desk.applied(worker, second.serial, (("policy", 2),), policy=2)
        assert out(desk, worker) == {2}
    assert slabs_out(desk) == 1


def test_a_failure_and_a_pong_report_too(desk: Desk) -> None:
    desk.publish(1, [0], lent=True)
    update = update_for(desk, 0)
    failed = messages.Failed(EPOCH, update.serial, {"policy": 1}, False, "builtins.OSError", "no", "", update.serial)
    desk.receive(0, failed)
    assert out(desk, 0) == set()
    desk.publish(2, [0], lent=True)
    update = update_for(desk, 0)
    desk.pass_time(RETRY)
    seq = desk.machine.peers[0].ping_seq
    for in_use in ((("policy", 2),), ()):  # the second time, its number was answered; its report counts
        desk.receive(0, messages.Pong(EPOCH, seq, {}, {}, 0, update.serial, in_use))
        assert out(desk, 0) == {version for _, version in in_use}


def test_an_update_that_got_lost_stays_lent_until_its_successor_is_reported(desk: Desk) -> None:
    desk.publish(1, [0], lent=True)
    lost = update_for(desk, 0)
    desk.publish(2, [0], lent=True)
    desk.pass_time(RETRY)
    desk.receive(0, messages.Pong(EPOCH, desk.machine.peers[0].ping_seq, {}, {}, 0, 0, ()))
    desk.ready(0)
    again = update_for(desk, 0)
    assert again.serial > lost.serial
    assert out(desk, 0) == {1, 2}  # the first might come yet, and be looked at
    desk.staged(0, again, again.serial, (("policy", 2),))
    assert out(desk, 0) == {2}


def test_a_ping_tells_of_the_last_update_so_that_a_lost_one_comes_back_though_nothing_follows_it(desk: Desk) -> None:
    desk.pass_time(RETRY)
    assert {ping.serial for ping in desk.take(messages.Ping)} == {0}  # type: ignore[attr-defined]
    desk.publish(1, [0], lent=True)
    lost = update_for(desk, 0)
    desk.pass_time(RETRY)
    assert [ping.serial for ping in desk.take(messages.Ping, b"0")] == [lost.serial]  # type: ignore[attr-defined]
    desk.receive(0, messages.Pong(EPOCH, desk.machine.peers[0].ping_seq, {}, {}, 0, lost.serial, ()))
    assert out(desk, 0) == set()  # it is sent anew when the worker has accepted its layout anew
    desk.ready(0)
    assert (update_for(desk, 0).serial, out(desk, 0)) == (lost.serial + 1, {1})


def test_the_end_of_a_process_gives_back_what_its_incarnation_had_and_no_more(desk: Desk) -> None:
    desk.publish(1, lent=True)
    update = desk.take(messages.Update)[0]
    follow(desk, update)
    assert all({v for _, v in leases.slabs} == {1} for leases in desk.machine.leases.of.values())
    assert desk.machine.leases.of.keys() == {nonce(0), nonce(1), nonce(50)}
    desk.machine.process_ended(0, nonce(0), "its process (100) has ended", desk.now)
    assert desk.machine.leases.of.keys() == {nonce(1), nonce(50)}
    assert desk.machine.peers[0].state == "live"
    desk.receive(b"no peer any more", messages.Released(EPOCH, nonce(1), messages.MAX_SERIAL, ()))
    assert desk.machine.leases.of.keys() == {nonce(50)}


@pytest.mark.parametrize("leaves", [messages.Bye, messages.Released])
def test_a_worker_that_leaves_before_it_has_heard_of_a_new_epoch_gives_everything_back(leaves: Any) -> None:
    desk = Desk(None)
    desk.hello(0)
    desk.ready(0)
    desk.hello(1, epoch=(EPOCH[0] + 5, 1))  # whose trainer was a newer one: this one goes past it
    desk.ready(1)
    desk.publish(1, lent=True)
    assert out(desk, 0) == {1}
    about = ("closed", "") if leaves is messages.Bye else (messages.MAX_SERIAL, ())
    desk.receive(0, leaves(EPOCH, nonce(0), *about))
    assert (out(desk, 0), desk.machine.peers[0].state) == (set(), "lost")


@pytest.mark.parametrize(
    ("local", "watched", "left"), [(True, True, {1}), (False, True, set()), (True, False, {1}), (None, False, {1})]
)
def test_a_connection_that_is_gone_gives_nothing_back_unless_it_was_to_another_host(
    local: bool | None, watched: bool, left: set[int]
) -> None:
    desk = Desk(1)
    desk.hello(0, local=local)
    desk.machine.membership.unwatched = set() if watched else {nonce(0)}
    desk.ready(0)
    desk.publish(1, lent=True)
    for _ in range(2):
        desk.cut(b"0")
        desk.now += RETRY
    assert (desk.machine.peers[0].state == "lost") is not (local is True and watched)
    assert out(desk, 0) == left
    if left:
        assert not desk.machine.leases.of[nonce(0)].pid or local


def test_a_version_that_everybody_has_let_go_of_goes_back_while_it_is_the_target_and_is_still_there(desk: Desk) -> None:
    desk.publish(1, [0], lent=True)
    update = update_for(desk, 0)
    desk.staged(0, update, update.serial)  # a worker that copies out
    assert nonce(0) not in desk.machine.leases.of
    assert slabs_out(desk) == 1
    follow(desk, update)
    assert {v for _, v in desk.machine.leases.of[nonce(50)].slabs} == {1}


def test_bye_gives_everything_back_unless_it_reads_on(desk: Desk) -> None:
    desk.publish(1, lent=True)
    desk.receive(0, messages.Bye(EPOCH, nonce(0), "closed", ""))
    desk.receive(1, messages.Bye(EPOCH, nonce(1), "reading", ""))
    assert (out(desk, 0), out(desk, 1)) == (set(), {1})
    desk.machine.process_ended(1, nonce(1), "its process has ended", desk.now)
    assert desk.machine.leases.of == {}


def test_closing_gives_everything_back(desk: Desk) -> None:
    desk.publish(1, lent=True)
    desk.hello(0, incarnation=50, route=b"next")
    desk.machine.close()
    assert (desk.machine.leases.of, slabs_out(desk)) == ({}, 0)
    desk.receive(0, messages.Released(EPOCH, nonce(0), 1, ()))
