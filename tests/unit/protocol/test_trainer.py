"""The trainer alone: the test plays the workers."""

import gc
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch

from asyncsync.errors import ClosedError, Fenced, PeerLost, ProtocolError, RemoteError, SchemaMismatch
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.trainer import Trainer
from asyncsync.wire import messages
from helpers.machines import EPOCH, SMALL, TICK, Desk, layout, nonce, slab_of
from helpers.oracle import targets_of

F32, F64, I32 = torch.float32, torch.float64, torch.int32
PATIENCE = Settings().layout_patience
RETRY = Settings().retry_interval
SLOW = Settings().slow_after


def joined(*workers: int, of: int | None = 2, settings: Settings | None = None) -> Desk:
    """These workers are there and have accepted float32; nothing has been published."""
    desk = Desk(of, settings=settings)
    desk.join(*workers)
    desk.machine.mark_assembled("policy")
    return desk


@pytest.fixture
def desk() -> Desk:
    return joined(0, 1)


def versions_of(update: messages.Instruction) -> dict[str, int]:
    return {part.model_id: part.version for part in update.parts}  # type: ignore[attr-defined]


# -- who is there ---------------------------------------------------------------------------------------------------


def test_hello_is_answered_with_the_layouts_and_ready_with_the_weights_and_who_has_applied_them_is_connected() -> None:
    desk = Desk(1)

    def connected() -> bool:
        return not desk.machine.progress.why_absent(0, ["policy"])

    desk.join(0)
    assert connected(), "there is nothing to apply yet"
    desk.machine.lost(0, nonce(0), "it has died", desk.now)
    assert not connected()
    version = desk.publish(3)
    desk.hello(0)
    (welcome,) = desk.take(messages.Welcome)
    assert (welcome.epoch, welcome.nonce, welcome.attempt) == (EPOCH, nonce(0), 2)
    assert welcome.models == {"policy": layout().digest}
    assert not connected()
    desk.ready(0)
    update = desk.expect({"policy": version})
    assert not connected()
    desk.finish(0, update)
    assert connected()


def test_why_a_worker_is_absent_is_told() -> None:
    desk = Desk(4)
    desk.hello(1, have={"actor": 0})
    desk.join(2, 3)
    desk.machine.lost(3, nonce(3), "killed", desk.now)
    why = [desk.machine.progress.why_absent(w, ["policy"]) for w in range(4)]
    assert "has not connected" in why[0]
    assert "['actor'], not 'policy'" in why[1]
    assert not why[2], "there is nothing to apply yet"
    assert "killed" in why[3]
    desk.publish()
    assert "waits for the other workers" in desk.machine.progress.why_absent(2, ["policy"])
    desk.machine.mark_assembled("policy")
    assert "has not applied" in desk.machine.progress.why_absent(2, ["policy"])


def test_a_worker_idx_out_of_range_is_refused_unless_any_may_come() -> None:
    desk = Desk(2)
    desk.hello(2)
    (bye,) = desk.take(messages.Bye)
    assert (bye.reason, bye.nonce) == ("refused", nonce(2))
    assert not desk.machine.peers
    desk = Desk(None)
    desk.hello(4711)
    assert desk.machine.membership.expected() == [4711]


FITS = messages.Ready(EPOCH, {"policy": layout().digest})


def test_a_worker_that_answers_though_late_keeps_its_place_and_a_newcomer_is_refused(desk: Desk) -> None:
    version = desk.publish()
    desk.take()
    for incarnation, silent in ((10, 1), (11, 3)):
        desk.hello(0, incarnation, route=b"new")
        assert [type(i) for i in desk.take(None, b"0")] == [messages.Ping]
        with pytest.raises(ProtocolError, match="not worker 0 yet"):
            desk.receive(b"new", messages.Applied(EPOCH, {"policy": version}))
        desk.pass_time(silent)
        assert len(desk.take(messages.Welcome, b"new")) == silent // 3
        desk.pong(0)
        (bye,) = desk.take(messages.Bye)
        assert (bye.reason, bye.nonce) == ("refused", nonce(incarnation))  # type: ignore[attr-defined]
        assert "two workers have this index" in bye.message  # type: ignore[attr-defined]
        with pytest.raises(ProtocolError, match="unknown peer"):
            desk.receive(b"new", FITS)
    assert desk.machine.peers[0].nonce == nonce(0)
    assert not desk.machine.membership.newcomers
    desk.applied(0, policy=version)
    assert desk.machine.progress.of(version, [0]).acked == {0: version}


def test_a_newcomer_changes_nothing_before_the_worker_was_silent_and_it_has_proved_itself(desk: Desk) -> None:
    version = desk.publish()
    desk.finish_all()
    desk.hello(0, 10, route=b"new")
    desk.now += 60  # the trainer was busy: that is no silence
    desk.machine.tick(desk.now)
    assert not desk.take(None, b"new")
    desk.pass_time(3)
    assert len(desk.take(messages.Welcome, b"new")) == 1
    assert desk.machine.peers[0].nonce == nonce(0)
    assert desk.machine.progress.of(version, [0]).acked == {0: version}
    desk.receive(b"new", FITS)
    assert [type(i) for i in desk.take(None, b"new")] == [messages.Update]
    assert desk.machine.peers[0].nonce == nonce(10)
    assert desk.machine.progress.of(version, [0]).waiting == {0}


def test_a_worker_whose_process_has_ended_gives_way_at_once(desk: Desk) -> None:
    desk.hello(0, 10, route=b"new")
    desk.take()
    desk.machine.process_ended(0, nonce(0), "killed", desk.now)
    assert [type(i) for i in desk.take(None, b"new")] == [messages.Welcome]
    desk.receive(b"new", FITS)
    assert not desk.machine.progress.why_absent(0, ["policy"])


def test_a_worker_moves_to_a_new_connection_when_it_does_not_answer_where_it_was(desk: Desk) -> None:
    desk.hello(0, route=b"elsewhere", attempt=7)
    assert not desk.take(None, b"elsewhere")
    desk.pong(0)
    assert [b.reason for b in desk.take(messages.Bye, b"elsewhere")] == ["refused"]  # type: ignore[attr-defined]
    desk.publish()
    assert desk.take(messages.Update, b"0")
    desk.hello(0, route=b"elsewhere", attempt=8)
    while desk.machine.peers[0].route != b"elsewhere":
        desk.take()
        desk.pass_time(TICK)
    said = [type(i) for i in desk.take(None, b"elsewhere")]
    assert said == [messages.Welcome, messages.Ping], "the PING is due, and goes where the worker is now"


def test_newcomers_take_turns_and_one_at_a_time_is_remembered(desk: Desk) -> None:
    for incarnation in range(10, 200):
        desk.hello(0, incarnation, route=b"%d" % incarnation)
    assert len(desk.machine.membership.newcomers) == 1
    assert len(desk.take(messages.Ping)) == 1
    desk.pass_time(3)
    assert [to for to, i, _ in desk.machine.outbox if isinstance(i, messages.Welcome)] == [b"199"]
    desk.take()
    desk.hello(0, 300, route=b"300")  # not before the one that was shown the layouts has had its time
    assert not desk.take()
    desk.pass_time(RETRY)
    desk.hello(0, 300, route=b"300")
    assert [b.nonce for b in desk.take(messages.Bye, b"199")] == [nonce(199)]  # type: ignore[attr-defined]
    desk.pass_time(3)
    assert desk.take(messages.Welcome, b"300")
    desk.receive(b"300", FITS)
    assert desk.machine.peers[0].nonce == nonce(300)


def test_one_connection_may_ask_for_two_places(desk: Desk) -> None:
    for worker, incarnation, route in ((0, 10, b"new"), (1, 11, b"new"), (0, 10, b"new"), (1, 11, b"newer")):
        desk.hello(worker, incarnation, route=route)
    desk.hello(0, 10, route=b"new")
    assert len(desk.machine.membership.newcomers) == 2
    desk.machine.close()
    said = sorted((to, bye.reason) for to, bye, _ in desk.machine.outbox)  # type: ignore[attr-defined]
    assert said == [(to, "closed") for to in (b"0", b"1", b"new", b"newer")]


def test_a_superseded_incarnation_is_told_whenever_it_comes_back_and_its_death_is_no_news() -> None:
    desk = Desk(1)
    desk.hello(0, 10, route=b"old")
    desk.hello(0, 11, route=b"new")
    desk.pass_time(3)
    desk.take()
    desk.receive(b"new", messages.Ready(EPOCH, {}))
    for _ in range(2):
        (bye,) = desk.take(messages.Bye)
        assert (bye.reason, bye.nonce) == ("superseded", nonce(10))  # type: ignore[attr-defined]
        desk.hello(0, 10, route=b"again")
    with pytest.raises(ProtocolError):
        desk.receive(b"old", messages.Ready(EPOCH, {}))
    desk.machine.lost(0, nonce(10), "killed", desk.now)
    assert (desk.machine.peers[0].nonce, desk.machine.peers[0].state) == (nonce(11), "live")


def test_a_worker_that_reconnects_keeps_what_it_has_and_is_not_moved_back_by_an_old_hello(desk: Desk) -> None:
    version = desk.publish()
    desk.finish_all()
    desk.hello(0, route=b"new", epoch=EPOCH, have={"policy": version})
    desk.cut(b"0")
    desk.receive(b"new", FITS)
    assert not desk.take(messages.Update)
    assert desk.machine.progress.of(version, [0]).acked == {0: version}
    with pytest.raises(ProtocolError):  # its old route is no longer known
        desk.applied(0, policy=version)
    for attempt in (1, 2):  # it comes late, or twice
        desk.hello(0, attempt=attempt)
        assert not desk.take()
    desk.publish()
    assert sorted(route for route, _, _ in desk.machine.outbox) == [b"1", b"new"]


def test_a_worker_that_leaves_is_lost_and_a_duplicated_hello_does_not_bring_it_back(desk: Desk) -> None:
    version = desk.publish()
    desk.receive(0, messages.Bye(EPOCH, nonce(0), "closed", "done"))
    assert desk.machine.peers[0].transfer is None
    desk.hello(0, attempt=1)
    assert desk.machine.peers[0].state == "lost"
    for lacking in (version, desk.publish()):
        error = desk.machine.progress.of(lacking, [0]).failed[0]
        assert isinstance(error, PeerLost)
        assert "it has left: done" in str(error)


def test_a_lower_epoch_does_not_matter_and_what_a_worker_claims_of_it_does_not_count(desk: Desk) -> None:
    desk.publish()
    desk.hello(0, 10, route=b"new", epoch=(999, 1), have={"policy": 1})
    assert desk.machine.peers[0].applied == {}
    desk.hello(0, route=b"new", epoch=(1, 1), have={"policy": 70})
    assert (desk.machine.fenced, desk.machine.membership.epoch) == (None, EPOCH)


@pytest.mark.parametrize("models", [{"policy": 0, "": 0}, {"": 0}])
def test_a_model_without_a_name_is_served_as_it_is(models: dict[str, int]) -> None:
    desk = Desk(1, models=[""])
    desk.publish(models=[""])
    desk.hello(0, have=models)
    (welcome,) = desk.take()
    assert welcome.models == {"": layout().digest}  # type: ignore[attr-defined]


# -- epochs ---------------------------------------------------------------------------------------------------------


def test_before_its_first_update_a_trainer_goes_past_a_higher_epoch() -> None:
    desk = Desk(3)
    desk.hello(0, epoch=EPOCH, serial=200)  # it cannot have heard of a trainer that has sent nothing
    desk.join(2)
    desk.machine.lost(2, nonce(2), "killed", desk.now)
    desk.hello(1, epoch=(5000, 9), have={"policy": 70})
    assert desk.machine.membership.epoch == (5001, 1)
    assert desk.machine.fenced is None
    assert desk.machine.peers[1].applied == {}
    assert desk.machine.peers[2].state == "lost"
    assert [w.epoch for w in desk.take(messages.Welcome)] == [(5001, 1)] * 2  # type: ignore[attr-defined]
    desk.ready(0)
    desk.ready(1)
    assert desk.publish(workers=[0, 1]) == 1
    assert [u.epoch for u in desk.take(messages.Update)] == [(5001, 1)] * 2  # type: ignore[attr-defined]


def test_after_its_first_update_a_trainer_that_meets_a_higher_epoch_is_fenced(desk: Desk) -> None:
    version = desk.publish()
    desk.take()
    desk.hello(1, 11, route=b"new", epoch=(5000, 9))
    assert isinstance(desk.machine.fenced, Fenced)
    for _ in range(2):
        with pytest.raises(Fenced, match="newer trainer"):
            desk.publish()
        with pytest.raises(Fenced):
            desk.machine.check_open()
    assert desk.machine.targets.version == version
    desk.applied(0, policy=version)
    desk.pass_time(100)
    desk.machine.close()
    assert not desk.take()  # not even BYE: the workers belong to somebody else
    assert desk.pool.slabs <= 1


# -- targets --------------------------------------------------------------------------------------------------------


def test_worker_ids_leave_the_others_alone_and_those_who_come_later_or_are_lost() -> None:
    desk = joined(0, 1, of=None)
    first = desk.publish()
    desk.finish_all()
    second = desk.publish(workers=[1])
    assert desk.machine.progress.targeted(second) == [1]
    assert not desk.take(None, b"0")
    assert "version 2" in str(desk.machine.progress.of(second, [0]).failed[0])
    assert desk.machine.progress.of(first, [0, 1]).acked == {0: first, 1: first}
    desk.join(2)
    assert desk.target(2) == first
    assert desk.machine.peers[2].transfer.versions == {"policy": first}  # type: ignore[union-attr]
    desk.machine.lost(0, nonce(0), "gone", desk.now)
    assert desk.machine.progress.targeted(desk.publish()) == [1, 2]


def test_each_worker_has_its_own_target(desk: Desk) -> None:
    slabs = {w: slab_of(desk.pool, 10 + w) for w in (0, 1)}
    version = desk.machine.publish({"policy": slabs}, None, desk.now)
    outbox = [(route, payload) for route, i, payload in desk.machine.outbox if isinstance(i, messages.Update)]
    contents = {route: torch.frombuffer(bytearray(payload[-1]), dtype=F32)[0].item() for route, payload in outbox}
    assert contents == {b"0": 10, b"1": 11}
    assert desk.machine.progress.targeted(version) == [0, 1]


def test_latest_wins_and_a_worker_that_is_behind_skips_and_delays_nobody(desk: Desk) -> None:
    desk.publish()
    first, slow = desk.take(messages.Update)
    for _ in range(5):
        last = desk.publish()
    assert not desk.take(messages.Update)  # one UPDATE is outstanding per worker, and stays so
    desk.staged(0, first)
    desk.finish(0, desk.expect({"policy": last}))
    assert desk.machine.progress.of(3, [0]).acked == {0: last}
    assert desk.machine.peers[1].transfer.serial == slow.serial  # type: ignore[union-attr]
    assert desk.pool.peak <= 4, "what is fetched, the target, and the one that is being packed"


def test_a_worker_gets_only_the_models_it_has() -> None:
    desk = Desk(1, models=["policy", "critic"])
    desk.publish(models=["policy", "critic"])
    desk.hello(0, have={"critic": 0})
    desk.ready(0, models=["critic"])
    assert not desk.take(messages.Update)  # everybody is waited for before the first connect, with all models
    desk.machine.mark_assembled("policy")
    desk.machine.mark_assembled("critic")
    version = desk.publish(models=["policy", "critic"])
    desk.finish(0, desk.expect({"critic": version}))
    assert desk.machine.progress.of(version, [0]).acked == {0: version}


# -- bytes ----------------------------------------------------------------------------------------------------------


def small() -> tuple[Desk, messages.Update]:
    """A worker's update whose bytes come in chunks of 40."""
    desk = Desk(1, settings=SMALL)
    desk.join(0)
    return desk, desk.expect({"policy": desk.publish()})


def test_bytes_go_on_credit_only_and_again_from_a_gap_where_a_higher_restart_says_so() -> None:
    desk, update = small()
    assert not update.eager
    sent = 0
    for credit, total in [(10, 10), (70, 70), (70, 70), (40, 70), (128, 128), (1 << 60, 128)]:
        desk.receive(0, messages.Fetch(EPOCH, update.serial, 0, 0, credit))
        sent += sum(len(payload[0]) for _, _, payload in desk.machine.outbox)
        assert all(len(payload[0]) <= SMALL.chunk_bytes for _, _, payload in desk.machine.outbox)
        desk.take()
        assert sent == total
    for expected in ([40, 80], []):
        desk.receive(0, messages.Fetch(EPOCH, update.serial, 1, 40, 100))
        assert [c.offset for c in desk.take(messages.Chunk)] == expected  # type: ignore[attr-defined]
    desk.receive(0, messages.Fetch(EPOCH, update.serial + 1, 0, 0, 128))  # of another update
    assert not desk.take()


# -- what got lost --------------------------------------------------------------------------------------------------


# Whether STAGED has come; what the PONG says; what is sent then, and once the worker is ready; what is under way.
PONGS: dict[str, tuple[bool, dict[str, Any], list[type], list[type], bool]] = {
    # Maybe it was dropped because its layout is not known any more.
    "UPDATE got lost": (False, {}, [messages.Welcome], [messages.Update], True),
    "it is still being received": (False, {"serial": 1}, [], [], True),
    "STAGED got lost": (False, {"staged": {"policy": 1}}, [], [], False),
    "APPLIED got lost": (True, {"versions": {"policy": 1}}, [], [], False),
    "it was dropped before the gate": (True, {}, [messages.Update], [], True),
}


@pytest.mark.parametrize("case", PONGS)
def test_a_pong_shows_what_got_lost(desk: Desk, case: str) -> None:
    is_staged, says, at_once, once_ready, under_way = PONGS[case]
    desk.publish()
    update, _ = desk.take(messages.Update)
    if is_staged:
        desk.staged(0, update)
    desk.pass_time(1)
    assert desk.take(messages.Ping, b"0")
    assert desk.machine.progress.of(1, [0]).waiting == {0}
    desk.pong(0, **says)
    assert [type(i) for i in desk.take(None, b"0")] == at_once
    desk.ready(0)
    assert [type(i) for i in desk.take(None, b"0")] == once_ready
    assert (desk.machine.peers[0].transfer is not None) is under_way
    assert desk.machine.progress.of(1, [0]).acked == ({0: 1} if case == "APPLIED got lost" else {})


def test_a_pong_to_an_older_ping_or_to_none_does_not_speak_about_a_newer_update(desk: Desk) -> None:
    desk.pass_time(1)
    peer = desk.machine.peers[0]
    seq = peer.ping_seq
    for reconnects in (False, True):
        if reconnects:
            desk.hello(0, epoch=EPOCH)
            desk.ready(0)
        desk.publish()
        desk.take()
        transfer = peer.transfer
        desk.pong(0, seq=seq)
        desk.pong(0, seq=seq + 5)
        desk.ready(0)
        assert not desk.take()
        assert peer.transfer is transfer is not None
        assert peer.pong_seq <= seq


def test_what_comes_late_does_not_undo_what_was_applied(desk: Desk) -> None:
    for _ in range(2):
        version = desk.publish()
        update = desk.take(messages.Update, b"0")[0]
        desk.finish(0, update)
    desk.applied(0, policy=version - 1)
    desk.failed(0, update)
    assert desk.machine.progress.of(version, [0]).acked == {0: version}
    assert "failed to apply" not in desk.machine.progress.why_absent(0, ["policy"])


# -- liveness -------------------------------------------------------------------------------------------------------


def test_silence_makes_a_worker_slow_and_a_word_live_again_but_never_loses_it(desk: Desk) -> None:
    desk.now = SLOW - 0.01
    desk.pong(1, seq=0)
    desk.pass_time(0.02)
    assert [desk.machine.peers[w].state for w in (0, 1)] == ["slow", "live"]
    desk.pong(0)
    assert desk.machine.peers[0].state == "live"
    desk.pass_time(3600)
    assert [p.state for p in desk.machine.peers.values()] == ["slow", "slow"]
    assert desk.machine.progress.of(desk.publish(), [0, 1]).waiting == {0, 1}


def test_a_silent_worker_is_sent_fewer_pings_until_it_comes_back_or_answers(desk: Desk) -> None:
    def pings_at(*times: float) -> list[bool]:
        found = []
        for desk.now in times:
            desk.machine.tick(desk.now)
            found.append(bool(desk.take(messages.Ping, b"0")))
        return found

    due = Settings().ping_interval
    assert pings_at(due - 0.01, due) == [False, True]
    assert pings_at(2 * due, due + RETRY - 0.01, due + RETRY) == [False, False, True]  # it does not answer
    desk.hello(0, epoch=EPOCH)
    assert pings_at(2 * due + RETRY - 0.01, 2 * due + RETRY) == [False, True]
    desk.pong(0)
    assert pings_at(3 * due + RETRY - 0.01, 3 * due + RETRY) == [False, True]


@pytest.mark.parametrize("models", [("policy",), ("policy", "value")])
def test_an_elastic_trainer_forgets_who_has_been_gone_for_a_minute_and_what_was_meant_for_it(
    models: tuple[str, ...],
) -> None:
    desk = Desk(None, models=models)
    desk.join(0, 1)
    everybodys = desk.publish(models=models)
    for worker in (0, 1):
        own = desk.publish(worker, [worker], models=models)
    count = len(list(targets_of(desk.machine)))
    desk.now += 70  # worker 0 was silent for long
    desk.machine.peers[1].last_seen = desk.now
    desk.machine.lost(0, nonce(0), "its connection is gone", desk.now)
    desk.pass_time(59)
    assert set(desk.machine.peers) == {0, 1}
    assert len(list(targets_of(desk.machine))) == count
    for _ in range(5):
        desk.pass_time(1)
    assert set(desk.machine.peers) == {1}
    versions = {target.version for target in targets_of(desk.machine)}
    assert versions == {everybodys, own}, "that of the one who is there stands"
    assert isinstance(desk.machine.progress.of(everybodys, [0]).failed[0], PeerLost), "who waits for it is told so"


def test_a_worker_keeps_what_it_may_be_reading_until_its_process_has_ended_and_can_come_back(desk: Desk) -> None:
    version = desk.publish()
    desk.take()
    slab = desk.machine.peers[0].transfer.parts["policy"][1]  # type: ignore[union-attr]
    desk.machine.unreachable(b"0", desk.now)
    newest = desk.publish()
    assert slab.references == 2, "both may be reading it"
    desk.machine.lost(0, nonce(0), "killed", desk.now)
    assert slab.references == 1
    progress = desk.machine.progress.of(version, [0, 1])
    assert isinstance(progress.failed[0], PeerLost)
    assert "killed" in str(progress.failed[0])
    assert progress.waiting == {1}
    desk.hello(0, epoch=EPOCH)
    desk.ready(0)
    desk.expect({"policy": newest})


@pytest.mark.parametrize("local", [True, False, None])
def test_only_a_worker_that_may_be_elsewhere_is_lost_because_it_cannot_be_reached(local: bool | None) -> None:
    desk = Desk(1)
    if local is None:  # two that know nothing of their hosts are not on the same one
        desk.machine.membership.identity = Identity(1, "", 0)
    desk.hello(0, local=local)
    assert desk.machine.peers[0].local is local
    desk.machine.unreachable(b"0", 1.0)
    desk.machine.unreachable(b"0", 1.0 + RETRY - 0.1)
    assert not desk.machine.peers[0].lost
    desk.machine.unreachable(b"0", 1.0 + RETRY)
    assert bool(desk.machine.peers[0].lost) is (local is not True)


# -- layouts --------------------------------------------------------------------------------------------------------


def test_before_everybody_was_there_nothing_is_sent_but_to_worker_ids_that_are_there() -> None:
    desk = Desk(2)
    desk.join(0)
    desk.publish(workers=[0])
    desk.finish_all()
    version = desk.publish()
    desk.pass_time(1000)
    assert not desk.take(messages.Update)
    assert desk.machine.progress.of(version, [0, 1]).waiting == {0, 1}
    desk.hello(1)
    assert not desk.take(messages.Update)
    desk.ready(1)
    assert len(desk.take(messages.Update)) == 2


def lose_worker_1(desk: Desk) -> None:
    desk.machine.lost(1, nonce(1), "killed", desk.now)


@pytest.mark.parametrize(
    ("before", "after"),
    [(lose_worker_1, None), (None, lose_worker_1), (lambda desk: desk.machine.queue_full(b"1"), None)],
    ids=["absent", "dies", "slow"],
)
def test_after_everybody_was_there_a_new_layout_waits_for_nobody_who_is_absent_or_slow(
    desk: Desk, before: Callable[[Desk], None] | None, after: Callable[[Desk], None] | None
) -> None:
    if before is not None:
        before(desk)
    desk.publish(dtype=F64)
    desk.ready(0, F64)
    if after is not None:
        assert not desk.take(messages.Update)
        after(desk)
    assert len(desk.take(messages.Update)) == 1


def test_a_new_layout_is_withheld_until_all_have_answered_and_who_comes_meanwhile_gets_the_target(desk: Desk) -> None:
    old = desk.publish()
    desk.finish_all()
    new = desk.publish(dtype=F64)
    assert [w.models for w in desk.take()] == [{"policy": layout(F64).digest}] * 2  # type: ignore[attr-defined]
    desk.ready(0, F64)
    assert not desk.take()
    assert desk.target(0) == old
    desk.hello(0, 10, route=b"new")
    desk.cut(b"0")
    (welcome,) = desk.take(messages.Welcome, b"new")
    assert welcome.models == {"policy": layout(F32).digest}  # type: ignore[attr-defined]
    desk.receive(b"new", FITS)
    welcome, update = desk.take(None, b"new")
    assert welcome.models == {"policy": layout(F64).digest}  # type: ignore[attr-defined]
    assert versions_of(update) == {"policy": old}
    desk.receive(b"new", messages.Ready(EPOCH, {"policy": layout(F64).digest}))
    assert not desk.take()
    desk.ready(1, F64)
    desk.expect({"policy": new}, b"1")


@pytest.mark.promise(9)
def test_one_refusal_changes_no_worker_and_the_next_publication_asks_again(desk: Desk) -> None:
    old = desk.publish()
    desk.finish_all()
    new = desk.publish(dtype=F64)
    desk.ready(0, F64)
    desk.take()
    desk.refuse(1, F64)
    assert not desk.take(messages.Update)
    assert desk.machine.progress.targeted(new) == [0, 1]
    failed = desk.machine.progress.of(new, [0, 1]).failed
    assert all(isinstance(error, SchemaMismatch) for error in failed.values())
    assert "it does not fit" in str(failed[1])
    assert "worker 1 cannot take it" in str(failed[0])
    assert desk.machine.progress.of(old, [0, 1]).acked == {0: old, 1: old}
    assert (desk.machine.targets.version, desk.machine.targets.published) == (new, old)
    assert desk.pool.slabs <= 2
    again = desk.publish(dtype=F64)
    (welcome,) = desk.take(messages.Welcome, b"1")
    assert welcome.models == {"policy": layout(F64).digest}  # type: ignore[attr-defined]
    assert desk.machine.progress.of(again, [0, 1]).waiting == {0, 1}
    desk.refuse(1, F64)
    assert set(desk.machine.progress.of(again, [0, 1]).failed) == {0, 1}
    desk.take()
    last = desk.publish(dtype=F64)
    desk.take()
    assert desk.machine.targets.published == old
    desk.ready(1, F64)
    assert [versions_of(u) for u in desk.take(messages.Update)] == [{"policy": last}] * 2
    assert desk.machine.targets.published == last


def test_a_refusal_that_comes_late_is_no_answer_to_the_next_publication(desk: Desk) -> None:
    """Two workers refuse, and the first one's word is enough: the other's is still on its way when the next comes."""
    desk.publish()
    desk.finish_all()
    desk.publish(dtype=F64)
    (first,) = desk.take(messages.Welcome, b"1")
    desk.refuse(0, F64)
    desk.take()
    again = desk.publish(dtype=F64)
    desk.take()
    desk.ready(0, F64)
    desk.refuse(1, F64, number=first.number)  # type: ignore[attr-defined]
    assert desk.machine.progress.of(again, [0, 1]).waiting == {0, 1}
    desk.ready(1, F64)
    assert [versions_of(u) for u in desk.take(messages.Update)] == [{"policy": again}] * 2


def test_a_silent_worker_holds_up_a_new_layout_for_the_patience_only(desk: Desk) -> None:
    version = desk.publish(dtype=F64)
    desk.ready(0, F64)
    desk.take()
    desk.now = PATIENCE - 0.01
    desk.machine.tick(desk.now)
    assert not desk.take(messages.Update)
    desk.pass_time(0.02)
    desk.expect({"policy": version})
    desk.ready(1, F64)
    assert desk.take(messages.Update)


def test_the_patience_counts_from_the_first_publication_with_this_layout(desk: Desk) -> None:
    for _ in range(10):
        version = desk.publish(dtype=F64)
        desk.ready(0, F64)
        desk.pong(1, seq=0)  # it lives, but does not answer for the layout
        desk.pass_time(PATIENCE / 8)
    updates = [i for i in desk.take() if isinstance(i, messages.Update)]
    assert updates
    assert versions_of(updates[0])["policy"] < version


def test_refusing_a_layout_that_is_in_use_concerns_the_refuser_only_who_is_asked_again() -> None:
    desk = Desk(None)
    desk.join(0)
    desk.publish()
    desk.finish_all()
    desk.hello(1)
    pending = desk.publish()
    assert desk.target(0) == pending
    desk.refuse(1, F32)
    assert isinstance(desk.machine.progress.of(pending, [1]).failed[1], SchemaMismatch)
    version = desk.publish()
    assert desk.machine.progress.of(version, [1]).waiting == {1}
    desk.refuse(1, F32)
    assert isinstance(desk.machine.progress.of(version, [1]).failed[1], SchemaMismatch)
    desk.finish(0, desk.expect({"policy": pending}))
    assert "cannot take 'policy'" in desk.machine.progress.why_absent(1, ["policy"])
    desk.publish()
    desk.take()
    desk.ready(1)
    desk.expect({"policy": version + 1}, b"1")


def test_a_layout_that_one_worker_uses_may_still_be_news_to_the_others(desk: Desk) -> None:
    desk.publish()
    desk.publish(workers=[0], dtype=F64)
    desk.ready(0, F64)
    desk.take()
    version = desk.publish(dtype=F64)
    assert not desk.take(messages.Update)
    desk.refuse(1, F64)
    assert set(desk.machine.progress.of(version, [0, 1]).failed) == {0, 1}


def test_a_part_is_not_sent_without_the_one_that_is_refused() -> None:
    desk = Desk(None, models=["policy", "critic"])
    desk.join(0)
    desk.publish(models=["policy", "critic"])
    desk.take()
    desk.hello(1)
    desk.refuse(1, F32, "critic")
    desk.ready(1, models=["policy"])
    assert not desk.take(messages.Update)
    for models in (None, ["policy"], ["critic"]):
        assert isinstance(desk.machine.progress.of(1, [1], models).failed[1], SchemaMismatch)


# -- failures -------------------------------------------------------------------------------------------------------


def test_a_failure_is_reported_and_not_sent_again_before_the_worker_reconnects(desk: Desk) -> None:
    version = desk.publish()
    update, _ = desk.take(messages.Update)
    desk.staged(0, update)
    desk.failed(0, update)
    error = desk.machine.progress.of(version, [0]).failed[0]
    assert isinstance(error, RemoteError)
    assert error.type_name == "builtins.OSError"
    desk.pass_time(1)
    desk.take()
    desk.pong(0)
    assert not desk.take()
    desk.hello(0, epoch=EPOCH)
    desk.ready(0)
    desk.expect({"policy": version})


def test_what_failed_comes_again_with_its_own_next_publication_only() -> None:
    both = ["policy", "critic"]
    desk = Desk(1, models=both)
    desk.join(0)
    version = desk.publish(models=["critic"])
    desk.failed(0, desk.expect({"critic": version}))
    for _ in range(2):
        for _ in range(2):
            version = desk.publish(models=["policy"])
            desk.finish(0, desk.expect({"policy": version}))
            assert desk.machine.progress.of(version, [0], ["policy"]).acked == {0: version}
        assert not desk.take()
        version = desk.publish(models=both)
        desk.failed(0, desk.expect(dict.fromkeys(both, version)))
        assert set(desk.machine.progress.of(version, [0]).failed) == {0}


def test_each_publication_is_an_update_of_its_own_the_oldest_first() -> None:
    desk = Desk(1, models=["policy", "critic", "actor"])
    versions = {model: desk.publish(models=[model]) for model in ("actor", "policy", "critic")}
    desk.hello(0)
    desk.ready(0, models=versions)
    for model, version in versions.items():
        desk.staged(0, desk.expect({model: version}))
    assert not desk.take(messages.Update)


@pytest.mark.parametrize("answer", [Desk.staged, Desk.failed])
def test_what_a_newer_publication_has_left_of_one_follows_it(answer: Callable[..., None]) -> None:
    desk = Desk(None, models=["policy", "critic"])
    desk.publish(models=["policy", "critic"])
    newer = desk.publish(models=["policy"])
    desk.hello(0)
    desk.ready(0, models=["policy", "critic"])
    answer(desk, 0, desk.expect({"policy": newer}))
    desk.expect({"critic": newer - 1})


def test_a_staged_version_that_failed_is_tried_again_when_it_is_committed() -> None:
    desk = joined(0)
    desk.publish()
    desk.finish_all()
    version = desk.publish(stages=True)
    desk.failed(0, desk.expect({"policy": version}))
    assert list(desk.machine.progress.of(version, [0], staged=True).failed) == [0]
    assert desk.machine.progress.of(version - 1, [0]).acked == {0: version - 1}
    assert not desk.take(messages.Update)
    desk.machine.commit(version)
    desk.finish(0, desk.expect({"policy": version}))
    assert desk.machine.progress.of(version, [0]).acked == {0: version}


@pytest.mark.parametrize("end", ["failed", "lost"])
def test_who_has_failed_or_is_lost_does_not_count_as_ready_because_something_else_is_staged(end: str) -> None:
    desk = Desk(1)
    desk.join(0)
    desk.machine.mark_assembled("policy")
    version = desk.publish(1, stages=True)
    (update,) = desk.take(messages.Update)
    desk.staged(0, update)
    if end == "lost":
        desk.machine.lost(0, nonce(0), "its process has ended", desk.now)
    desk.machine.commit(version)
    if end == "failed":
        desk.failed(0, desk.take(messages.Update)[0])
        desk.publish(2, stages=True)
        desk.staged(0, desk.take(messages.Update)[0])
    assert list(desk.machine.progress.of(version, [0], staged=True).failed) == [0]


def test_a_version_that_was_dropped_fails_nothing() -> None:
    desk = joined(0)
    desk.publish()
    desk.finish_all()
    staged = desk.expect({"policy": desk.publish(stages=True)})
    desk.machine.drop()
    desk.failed(0, staged)
    assert desk.machine.peers[0].failed == {}


def test_a_staged_version_counts_as_published_when_it_is_committed_and_never_when_it_is_dropped() -> None:
    desk = joined(0)
    desk.publish()
    desk.finish_all()
    told: list[int] = []
    for commits in (False, True):
        version = desk.publish(stages=True)
        desk.machine.targets.when_target(version, partial(told.append, version))
        desk.finish_all()
        assert (told, desk.machine.targets.published) == ([], 1)
        if commits:
            desk.machine.commit(version)
        else:
            desk.machine.drop()
    assert (told, desk.machine.targets.published) == ([version], version)


# -- workers that come from another sender of the epoch ---------------------------------------------------------------


def relaying() -> Desk:
    """A relay that has announced nothing, with a version to announce."""
    desk = Desk(None)
    desk.machine.membership.follows = True
    desk.publish()
    desk.take()
    return desk


def test_a_worker_that_has_passed_other_announcements_of_the_epoch_is_sent_one_that_it_takes() -> None:
    desk = relaying()
    desk.hello(1, epoch=(EPOCH[0] - 1, 1), serial=200)
    desk.ready(1)
    (update,) = desk.take(messages.Update)
    assert update.serial == 1, "what counted in another epoch is not passed"
    desk.hello(0, epoch=EPOCH, serial=200)
    desk.ready(0)
    (update,) = desk.take(messages.Update)
    assert update.serial > 200 + 1000, "what the sender before has sent since is none of these"
    desk.pass_time(1.5)
    desk.pong(0, last=update.serial + 10**6, serial=update.serial + 10**6)  # and still more had been on its way
    desk.ready(0)
    (again,) = desk.take(messages.Update)
    assert again.serial > update.serial + 10**6


def test_a_worker_that_comes_back_from_another_sender_is_not_sent_what_it_has_passed(desk: Desk) -> None:
    trained(desk, 0, 1)
    desk.publish()
    (first, _) = desk.take()
    desk.hello(1, epoch=EPOCH, have={"policy": 1}, serial=first.serial, route=b"1")
    desk.ready(1)
    (update,) = desk.take(messages.Update)
    assert update.serial > first.serial


def test_a_worker_that_lies_does_not_use_up_the_serials() -> None:
    desk = relaying()
    for i in range(100):
        desk.hello(0, 100 + i, epoch=EPOCH, serial=messages.MAX_SERIAL)
        desk.ready(0)
        desk.machine.lost(0, nonce(100 + i), "gone", desk.now)
    desk.join(1)
    for _ in range(20):
        desk.pass_time(2.0)
        desk.pong(1, last=messages.MAX_SERIAL)
    desk.take()
    desk.hello(2)
    desk.ready(2)
    (update,) = desk.take(messages.Update)
    assert update.serial < messages.MAX_SERIAL >> 20
    desk.machine.serial = messages.MAX_SERIAL >> 1  # after years of that
    desk.pass_time(2.0)
    desk.pong(1, last=messages.MAX_SERIAL)
    desk.take()
    desk.hello(3)
    desk.ready(3)
    (update,) = desk.take(messages.Update)
    assert update.serial <= (messages.MAX_SERIAL >> 1) + (1 << 33), "the other half is left"


# -- messages that no correct worker sends --------------------------------------------------------------------------


def state(machine: Trainer) -> str:
    return repr(
        [(p.worker, p.applied, p.staged, p.failed, p.ready, p.last_seen, p.pong_seq) for p in machine.peers.values()]
    )


@pytest.mark.parametrize(
    ("route", "instruction"),
    [
        (b"stranger", messages.Ready(EPOCH, {})),
        (b"0", messages.Ready((EPOCH[0] - 1, 1), {"policy": layout(F64).digest})),
        (b"0", messages.Applied((EPOCH[0] + 1, 1), {"policy": 1})),
        (b"0", messages.Applied(EPOCH, {"policy": 2})),
        (b"0", messages.Applied(EPOCH, {"critic": 1})),
        (b"0", messages.Failed(EPOCH, 1, {"policy": 2}, False, "E", "", "")),
        (b"0", messages.Pong(EPOCH, 1, {"policy": 2}, {}, 0)),
        (b"0", messages.Update(EPOCH, 1, False, (messages.Part("policy", 1, bytes(16), 128),))),
        (b"0", messages.Welcome(EPOCH, nonce(0), 1, 1, "", 0, {})),
        (b"0", messages.Hello(0, nonce(10), 1, 1, "", 0, EPOCH, {"policy": 2})),
        (b"0", messages.Released((1, 1), nonce(0), messages.MAX_SERIAL, ())),
        (b"stranger", messages.Released((1, 1), nonce(0), messages.MAX_SERIAL, ())),
    ],
)
def test_a_wrong_message_changes_nothing(desk: Desk, route: bytes, instruction: messages.Instruction) -> None:
    desk.publish()
    desk.take()
    before = state(desk.machine)
    desk.now = 1.0
    payload = [b""] if isinstance(instruction, messages.Update) else []
    with pytest.raises(ProtocolError):
        desk.machine.receive(route, *messages.decode([messages.encode(instruction), *payload]), desk.now)
    assert state(desk.machine) == before
    assert not desk.take()


# -- the end --------------------------------------------------------------------------------------------------------


def test_closing_says_goodbye_and_releases_everything(desk: Desk) -> None:
    desk.publish()
    desk.publish(workers=[1])
    desk.publish(dtype=F64)
    desk.machine.lost(0, nonce(0), "killed", desk.now)
    desk.machine.close()
    (bye,) = desk.take()
    assert (type(bye), bye.reason, bye.nonce) == (messages.Bye, "closed", nonce(1))  # type: ignore[attr-defined]
    assert desk.pool.slabs == 1  # the spare
    with pytest.raises(ClosedError):
        desk.publish()
    desk.machine.close()
    desk.applied(1, policy=1)
    desk.pass_time(100)
    assert not desk.take()


def test_a_worker_asks_for_its_targets(desk: Desk) -> None:
    first = desk.publish()
    second = desk.publish(workers=[1])
    desk.take()
    for worker in (0, 1):
        desk.receive(worker, messages.Ping(EPOCH, 9))
    pongs = desk.take()
    assert [p.versions for p in pongs] == [{"policy": first}, {"policy": second}]  # type: ignore[attr-defined]
    assert [p.seq for p in pongs] == [9, 9]  # type: ignore[attr-defined]


def test_chunks_of_a_slab_that_is_being_packed_follow_what_is_there() -> None:
    desk = Desk(1, settings=SMALL)
    desk.join(0)
    slab = slab_of(desk.pool, 1)  # 128 bytes, in chunks of 40
    slab.packed = 0
    version = desk.machine.publish({"policy": slab}, None, desk.now)
    (update,) = desk.take(messages.Update)
    for packed, credit, offsets in ((0, 80, []), (40, 80, [0]), (79, 80, []), (128, 80, [40]), (128, 128, [80, 120])):
        slab.packed = packed
        desk.machine.stream()
        desk.receive(0, messages.Fetch(EPOCH, update.serial, 0, 0, credit))  # type: ignore[attr-defined]
        assert [chunk.offset for chunk in desk.take(messages.Chunk)] == offsets  # type: ignore[attr-defined]
    assert desk.machine.progress.of(version, [0]).waiting == {0}
    slab.release()


def test_a_version_whose_packing_failed_is_taken_back_and_what_it_has_replaced_is_the_target_again(desk: Desk) -> None:
    def fail() -> int:
        slab = slab_of(desk.pool, 1)
        slab.packed = 0
        kept = desk.machine.targets.retain_current(["policy"])
        version = desk.machine.publish({"policy": slab}, None, desk.now)
        assert desk.target(1) == desk.machine.targets.published == version
        desk.machine.abandon(version, kept)
        assert slab.references == 1, "nobody else holds it"
        slab.release()
        return version

    version = fail()
    assert desk.machine.targets.target(0, "policy") is None
    desk.take()
    before = desk.publish(1)
    assert before == version + 1
    assert len(desk.take(messages.Update)) == 2
    own = desk.publish(2, [1])
    desk.take()
    fail()
    assert desk.target(0) == before
    assert (desk.target(1), desk.machine.targets.published) == (own, own)
    assert desk.pool.slabs <= 3


def test_what_is_taken_back_before_it_has_replaced_anything_leaves_no_reference_to_the_target() -> None:
    desk = Desk(1)
    desk.join(0)
    desk.machine.mark_assembled("policy")
    desk.publish(1)
    target = desk.machine.targets.target(0, "policy")
    assert target is not None
    before = target.slab.references
    for kind in ("never published", "pending", "staged"):
        kept = desk.machine.targets.retain_current(["policy"])
        slab = slab_of(desk.pool, 2, F64 if kind == "pending" else F32)
        version = None
        if kind != "never published":
            version = desk.machine.publish({"policy": slab}, None, desk.now, stages=kind == "staged")
        desk.machine.abandon(version, kept)
        slab.release()
        assert desk.machine.targets.target(0, "policy") is target
        assert target.slab.references == before, kind


def test_whom_a_version_is_for_is_told_alike_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most publications are for everybody: then nobody's targets need be looked at one by one."""
    desk = Desk(5, models=("policy", "value"))
    for worker, model in ((0, "policy"), (1, "policy"), (2, "value"), (3, "policy")):  # 4 has not been there
        desk.hello(worker, have={model: 0} if worker == 2 else None)
        desk.ready(worker, models=(model,))
    desk.machine.lost(3, nonce(3), "killed", desk.now)
    for model in ("policy", "value"):
        desk.machine.mark_assembled(model)

    def check() -> list[list[int]]:
        told = []
        for version in range(1, desk.machine.targets.version + 2):
            for models in (["policy"], ["value"], ["policy", "value"], []):
                short = desk.machine.progress.targeted(version, models)
                with monkeypatch.context() as patch:
                    patch.setattr(type(desk.machine.targets), "are_common", lambda *_: False)
                    assert desk.machine.progress.targeted(version, models) == short, (version, models)
                told.append(short)
        return told

    desk.publish(models=("policy", "value"))
    assert check()[:4] == [[0, 1, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], []]
    desk.publish(workers=[1])
    check()
    desk.publish(models=("policy",))
    check()
    desk.publish(models=("policy",), dtype=F64)  # has still to be accepted
    check()
    desk.take()
    desk.refuse(0, F64)
    desk.publish(models=("policy",), dtype=F64)  # nobody gets it
    check()


def test_who_has_none_of_the_models_is_not_asked_why_another_refused_one() -> None:
    desk = Desk(None, models=("policy", "value"))
    desk.join(0)
    desk.hello(1, have={"value": 0})
    desk.ready(1, models=("value",))
    version = desk.publish()
    for _ in range(2):
        desk.publish(dtype=F64)
        desk.take()
        desk.refuse(0, F64)
    assert desk.machine.progress.targeted(version, ["policy"]) == [0]


@pytest.mark.parametrize("other", ["value", "policy"])
def test_a_refused_publication_does_not_keep_another_one_from_being_complete(other: str) -> None:
    desk = Desk(2, models=("policy", "value"))
    desk.join(0, 1)
    for model in ("policy", "value"):
        desk.machine.mark_assembled(model)
    version = desk.publish(workers=[0])
    desk.finish_all()
    newer = desk.publish(models=(other,), dtype=F64)
    desk.take()
    desk.refuse(1, F64, other)
    progress = desk.machine.progress
    for models in (["policy"], None):
        assert progress.targeted(version, models) == [0]
        assert progress.of(version, [0], models).acked == {0: version}
        assert progress.result(0, version, models) is not None
    assert progress.targeted(newer, [other]) == [0, 1]
    assert sorted(progress.of(newer, [0, 1], [other]).failed) == [0, 1]
    only = "policy" if other == "value" else "value"
    assert progress.targeted(newer, [only]) == []


def test_whoever_waits_for_a_version_hears_that_the_one_that_has_replaced_it_was_refused(desk: Desk) -> None:
    versions = [desk.publish(dtype=F64) for _ in range(3)]
    desk.take()
    desk.refuse(1, F64)
    for version in versions:
        assert desk.machine.progress.targeted(version) == [0, 1]
        assert sorted(desk.machine.progress.of(version, [0, 1]).failed) == [0, 1]


def test_slabs_are_not_kept_alive_by_what_was_said_of_them(desk: Desk) -> None:
    desk.publish()
    desk.finish_all()
    target = desk.machine.targets.target(0, "policy")
    slab = weakref.ref(target.slab)
    del target
    desk.machine.lost(0, nonce(0), "killed", desk.now)
    desk.machine.close()
    desk.pool.close()
    gc.collect()
    assert slab() is None


# -- the fast path -----------------------------------------------------------------------------------------------------


def trained(desk: Desk, *workers: int, publications: int = 1, **kwargs: bool) -> None:
    """Everybody has what was published."""
    for _ in range(publications):
        desk.publish(**kwargs)
        for worker, update in zip(workers, desk.take(messages.Update), strict=True):
            desk.applied(worker, update.serial, policy=desk.machine.targets.version)  # type: ignore[attr-defined]
    assert desk.take() == []


def steady(desk: Desk) -> list[int] | None:
    """The workers that could be told the next version by AGAIN; None: the general way is due."""
    peers = desk.machine.steady("policy")
    return None if peers is None else [peer.worker for peer in peers]


@pytest.mark.parametrize("lent", [False, True])
def test_the_fast_path_is_for_what_follows_an_update_that_everybody_has(lent: bool) -> None:
    desk = joined(0, 1)
    assert steady(desk) is None
    for _ in range(3):
        trained(desk, 0, 1, lent=lent)
        assert steady(desk) == [0, 1]


def test_there_is_no_fast_path_where_anything_is_different() -> None:
    def check(change: Callable[[Desk], object], settings: Settings | None = None) -> None:
        desk = joined(0, 1, settings=settings)
        trained(desk, 0, 1, publications=2)
        change(desk)
        assert steady(desk) is None

    check(lambda desk: desk.publish())  # some are behind
    check(lambda desk: desk.publish(workers=[0]))
    check(lambda desk: desk.publish(stages=True))
    check(lambda desk: None, settings=Settings(checksum=True))
    check(lambda desk: None, settings=Settings(eager_bytes=0))
    check(lambda desk: None, settings=Settings(fast=False))
    check(lambda desk: desk.hello(1))  # it has connected again, and has not said what fits
    check(lambda desk: (desk.hello(1, 2), desk.ready(1)))  # a new incarnation
    check(lambda desk: desk.publish(dtype=F64))  # which has still to be accepted
    check(lambda desk: desk.refuse(1, F64))


def test_there_is_no_fast_path_where_a_worker_is_to_have_weights_of_its_own() -> None:
    desk = joined(0, 1, of=3)
    trained(desk, 0, 1)
    desk.publish(workers=[2])  # who is not there
    assert desk.take() == []
    assert steady(desk) is None
    trained(desk, 0, 1)
    assert desk.target(2) == 3, "what is for everybody replaces what was for one"
    assert desk.machine.targets.models["policy"].keys() == {None}
    assert steady(desk) == [0, 1]


def gone_on(desk: Desk, value: float, waiting: Collection[int], unsent: Collection[int]) -> int:
    """The fast path has published one version, and ends. Returns that version."""
    machine, peers = desk.machine, desk.machine.steady("policy")
    machine.targets.version = machine.targets.published = version = machine.targets.version + 1
    machine.serial += 1
    slab = slab_of(desk.pool, value)
    whom = [[peer for peer in peers if peer.worker in some] for some in (waiting, unsent)]
    machine.catch_up("policy", slab, peers, *whom, desk.now)
    return version


def test_the_machine_goes_on_where_the_fast_path_has_stopped(desk: Desk) -> None:
    trained(desk, 0, 1)
    assert gone_on(desk, 7.0, (), ()) == 2
    assert desk.machine.progress.of(2, [0, 1]).acked == {0: 2, 1: 2}
    assert desk.take() == []
    assert steady(desk) == [0, 1]
    version = gone_on(desk, 8.0, [0, 1], [1])
    assert desk.machine.progress.of(version, [0, 1]).waiting == {0, 1}
    (update,) = desk.take(messages.Update)
    assert (update.serial, update.parts[0].version) == (desk.machine.serial, version)
    assert desk.machine.peers[1].serial == update.serial
    for worker in (0, 1):
        desk.receive(worker, messages.Applied(EPOCH, {}, update.serial, (), update.serial))
    assert desk.machine.progress.of(version, [0, 1]).acked == {0: version, 1: version}
    assert len(desk.pool.used) == 1


def test_who_comes_later_or_back_after_the_fast_path_gets_an_update() -> None:
    desk = joined(0, 1, of=3)
    trained(desk, 0, 1)
    desk.machine.lost(1, nonce(1), "gone", desk.now)
    version = gone_on(desk, 7.0, (), ())
    desk.join(1, 2)  # the one that was lost, still the same incarnation, and a new one
    desk.machine.peers[1].applied["policy"] = 1
    for worker in (1, 2):
        desk.ready(worker)
        transfer = desk.machine.peers[worker].transfer
        assert transfer is not None
        assert transfer.versions == {"policy": version}
    assert steady(desk) is None


def test_an_again_that_is_lost_is_repaired_by_an_update(desk: Desk) -> None:
    trained(desk, 0, 1)
    version = gone_on(desk, 7.0, [0], [])
    desk.pass_time(20.0)
    desk.take()
    desk.pong(0, {"policy": 1})
    desk.ready(0)
    desk.applied(0, desk.expect({"policy": version}).serial, policy=version)
    assert steady(desk) is None, "the two had had different updates last"


def test_a_done_of_an_update_that_is_over_changes_nothing(desk: Desk) -> None:
    trained(desk, 0, 1)
    desk.publish()
    desk.publish()  # waits until the one before is through
    (first, _) = desk.take()
    assert isinstance(first, messages.Update)
    for _ in range(2):
        desk.receive(0, messages.Applied(EPOCH, {}, first.serial, (), first.serial))
    assert desk.machine.peers[0].applied == {"policy": 2}
    assert [type(i) for i in desk.take()] == [messages.Update]
    desk.receive(0, messages.Applied(EPOCH, {}, 99, (), 99))
    assert desk.machine.peers[0].applied == {"policy": 2}
    with pytest.raises(ProtocolError):
        desk.receive(0, messages.Applied((1, 1), {}, first.serial, (), first.serial))


def test_a_worker_that_is_stopped_while_the_layout_changes_is_asked_once(desk: Desk) -> None:
    """It would have to read all that was asked when it goes on, and the queue to it would fill."""
    desk.publish(dtype=F64)
    desk.take()
    desk.ready(1, F64)
    desk.pass_time(6)  # it is not waited for any longer
    desk.take()
    asked = 0
    for _ in range(50):
        desk.publish(dtype=F64)
        for instruction in desk.take():
            asked += isinstance(instruction, messages.Welcome)
            if isinstance(instruction, messages.Update):
                desk.finish(1, instruction)
    assert asked <= 1
    desk.refuse(0, F64, number=1)
    assert len(desk.take(messages.Welcome, b"0")) == 1, "now that it answers, for the newest"


def test_a_version_that_was_skipped_is_nobodys() -> None:
    desk = joined(0)
    trained(desk, 0)
    assert steady(desk) == [0]
    desk.machine.targets.carry_on(100)
    assert steady(desk) is None
