"""The worker alone: the test plays the trainer."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from asyncsync.errors import ClosedError, Fenced, LimitExceeded, NotConnected, ProtocolError, SchemaMismatch, Superseded
from asyncsync.protocol.holdings import KEPT_LAYOUTS
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.worker import FRUITLESS_RESTARTS, Worker
from asyncsync.weights.encoding import available_codecs
from asyncsync.weights.slab import SlabPool
from asyncsync.wire import messages
from helpers.machines import EPOCH, SMALL, TICK, Station, layout, nonce, slab_of

F32, F64 = torch.float32, torch.float64
NEWER = (EPOCH[0] + 1, 2)
OLDER = (EPOCH[0] - 1, 9)
RETRY = SMALL.retry_interval


@pytest.fixture
def station() -> Station:
    """One float32 model; the trainer has welcomed it."""
    station = Station()
    station.join()
    return station


@pytest.fixture
def pair() -> Station:
    """Two models."""
    station = Station(["policy", "critic"])
    station.join()
    return station


# -- connecting -----------------------------------------------------------------------------------------------------


def test_hello_says_who_this_is_and_what_it_has() -> None:
    station = Station()
    (hello,) = station.take()
    assert hello == messages.Hello(
        0, nonce(7), 1, 107, "here", 1, None, {"policy": 0, "": 0}, "worker", available_codecs()
    )
    station.welcome()
    station.update_now(1, {"policy": (4, 40)})
    station.take()
    station.machine.connected(station.now)
    (hello,) = station.take()
    versions = {"policy": 4, "": 4}
    assert hello == messages.Hello(
        0, nonce(7), 2, 107, "here", 1, EPOCH, versions, "worker", available_codecs(), serial=1
    )


def test_hello_is_repeated_ever_more_slowly_until_it_is_answered() -> None:
    station = Station()
    times = []
    while len(times) < 10:
        station.pass_time(TICK)
        times += [station.now] * len(station.take(messages.Hello))
    pauses = [b - a for a, b in pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RETRY
    station.welcome()
    station.take()
    station.pass_time(600)
    assert not station.take()


def test_a_layout_that_does_not_fit_is_refused_before_ready_and_accepted_later() -> None:
    station = Station()
    station.take()
    station.welcome(F64)
    refused, ready = station.take()
    assert isinstance(refused, messages.Refused)
    assert (refused.model_id, refused.digest) == ("policy", layout(F64).digest)
    assert "torch.float64" in refused.message
    assert ready == messages.Ready(EPOCH, {})
    assert isinstance(station.machine.session.refused["policy"], SchemaMismatch)
    station.welcome(F32)
    assert station.machine.session.refused == {}


def test_ready_names_the_layouts_that_fit_models_which_are_here() -> None:
    station = Station()
    station.take()
    station.welcome(models={"policy": layout(), "other": layout(F64)})
    assert station.take() == [messages.Ready(EPOCH, {"policy": layout().digest})]
    assert station.machine.session.served == {"policy": layout().digest, "other": layout(F64).digest}


def test_settled_means_that_there_is_nothing_left_to_apply() -> None:
    station = Station()
    assert not station.machine.is_connected("policy")
    station.welcome(models={"other": None})
    assert not station.machine.is_connected("policy")
    station.welcome(models={"policy": None})
    assert station.machine.is_connected("policy")
    station.welcome()
    assert not station.machine.is_connected("policy")
    station.update(1, {"policy": (1, 10)})
    assert not station.machine.is_connected("policy")
    station.apply()
    assert station.machine.is_connected("policy")


def test_a_nameless_model_of_the_sender_is_the_only_one_here() -> None:
    station = Station()
    station.take()
    station.welcome(models={"": layout()})
    assert station.take() == [messages.Ready(EPOCH, {"": layout().digest})]
    assert station.machine.is_connected("policy") is False
    station.update_now(1, {"": (3, 30)})
    assert station.content() == {30}
    assert station.machine.holdings.version("policy") == 3
    assert station.take(messages.Applied) == [messages.Applied(EPOCH, {}, 1, (), 1)]
    station.update(2, {"": (4, 40)})
    station.take()
    station.apply()
    assert station.take(messages.Applied) == [messages.Applied(EPOCH, {"": 4}, 2)]


def test_one_more_model_says_hello_again_and_lets_go_of_what_was_under_way(station: Station) -> None:
    station.update(1, {"policy": (1, 10)}, eager=False)
    station.take()
    station.machine.register("critic", station.bindings["policy"], station.now)
    (hello,) = station.take()
    assert hello.have == {"policy": 0, "critic": 0}  # type: ignore[attr-defined]
    station.chunk(1, 0, 40, 10)
    station.pass_time(0.01)
    assert not station.take(messages.Fetch)
    assert station.machine.pool.slabs <= 1


# -- updates --------------------------------------------------------------------------------------------------------


def test_an_eager_update_is_staged_then_applied(station: Station) -> None:
    station.update(1, {"policy": (5, 50)})
    assert station.take() == [messages.Staged(EPOCH, 1, 1)]
    assert station.content() == {0}
    assert station.machine.holdings.version("policy") == 0
    station.apply()
    assert station.take() == [messages.Applied(EPOCH, {"policy": 5}, 1)]
    assert station.content() == {50}
    assert station.machine.holdings.version("policy") == 5
    held = station.machine.holdings.updates["policy"]
    assert held[:2] == (EPOCH, 5)


def test_an_update_is_staged_when_its_last_chunk_is_here_in_whatever_order(station: Station) -> None:
    station.update(1, {"policy": (1, 10)}, eager=False)
    for offset in (80, 0, 40, 0, 80):
        station.chunk(1, offset, 40, 10)
        assert not station.machine.staged
    station.chunk(1, 120, 8, 10)
    station.apply()
    assert station.content() == {10}
    assert station.machine.bytes_received == 128


def test_a_gap_is_asked_for_again_and_never_more_than_the_window_is_in_flight(station: Station) -> None:
    station.update(1, {"policy": (1, 10)}, eager=False)
    assert station.take(messages.Fetch) == [messages.Fetch(EPOCH, 1, 0, 0, 80)]
    station.chunk(1, 40, 40, 10)  # the first chunk is lost
    station.pass_time(RETRY - 0.01)
    assert not station.take()
    station.pass_time(0.01)
    assert station.take() == [messages.Fetch(EPOCH, 1, 1, 0, 80)]
    station.chunk(1, 0, 40, 10)
    assert station.take() == [messages.Fetch(EPOCH, 1, 1, 40, 120)]  # what came behind the gap comes once more


def test_a_transfer_is_given_up_only_where_it_does_not_get_on_and_pong_says_so(station: Station) -> None:
    station.update(1, {"policy": (1, 10)}, eager=False)
    for offset in range(0, 128, 8):
        station.pass_time(RETRY)
        station.chunk(1, offset, 8, 10)
    station.apply()
    station.update(2, {"policy": (2, 20)}, eager=False)
    station.receive(messages.Ping(EPOCH, 1))
    assert station.take(messages.Pong) == [messages.Pong(EPOCH, 1, {"policy": 1}, {}, 2, 2)]
    station.pass_time(RETRY * FRUITLESS_RESTARTS)
    assert len(station.take(messages.Fetch)) == FRUITLESS_RESTARTS
    station.pass_time(RETRY)
    station.receive(messages.Ping(EPOCH, 2))
    assert station.take() == [messages.Pong(EPOCH, 2, {"policy": 1}, {}, 0, 2)]
    assert station.machine.pool.slabs <= 2


@pytest.mark.promise(6)
def test_old_and_repeated_updates_are_ignored_and_a_version_never_goes_back(station: Station) -> None:
    station.update_now(5, {"policy": (5, 50)})
    station.take()
    for serial in (5, 4):
        station.update(serial, {"policy": (6, 60)})
        assert not station.machine.staged
        assert not station.take()
    station.update(6, {"policy": (4, 40)})
    assert not station.machine.staged
    assert station.take() == [messages.Staged(EPOCH, 6, 6), messages.Applied(EPOCH, {"policy": 5}, 6)]


def test_a_newer_update_replaces_the_one_that_arrives_whose_chunks_are_ignored(station: Station) -> None:
    station.update(1, {"policy": (1, 10)}, eager=False)
    station.chunk(1, 0, 40, 10)
    station.update(2, {"policy": (2, 20)}, eager=False)
    station.chunk(1, 0, 40, 10)
    station.chunks(2, 20)
    station.apply()
    assert station.content() == {20}
    assert station.machine.pool.slabs <= 2


def test_a_newer_update_replaces_the_one_that_waits_for_the_gate_unless_that_has_begun(station: Station) -> None:
    station.update(1, {"policy": (1, 10)})
    first = station.machine.staged[-1]
    station.update(2, {"policy": (2, 20)})
    assert first.abandoned
    first.run()
    assert station.content() == {0}
    second = station.machine.staged[-1]
    second.run()
    assert station.content() == {20}
    station.update(3, {"policy": (3, 30)})
    assert not second.abandoned
    station.machine.applied(second)
    assert station.machine.holdings.version("policy") == 2
    station.apply()
    assert station.machine.holdings.version("policy") == 3
    assert station.machine.pool.slabs <= 2


def test_a_newer_part_does_not_lose_the_others_that_wait(pair: Station) -> None:
    pair.update(1, {"policy": (1, 10), "critic": (1, 11)})
    assert [pair.content(m) for m in ("policy", "critic")] == [{0}, {0}]
    pair.update_now(2, {"policy": (2, 20)})
    assert [pair.content(m) for m in ("policy", "critic")] == [{20}, {11}]
    assert pair.take(messages.Applied)[-1] == messages.Applied(EPOCH, {"policy": 2, "critic": 1}, 2)


def test_an_update_waits_apart_from_those_that_wait_already(pair: Station) -> None:
    pair.update(1, {"policy": (1, 10)})
    pair.update(2, {"critic": (2, 20)})
    policy, critic = pair.machine.staged
    assert (policy.versions, critic.versions) == ({"policy": 1}, {"critic": 2})
    pair.take()
    pair.receive(messages.Ping(EPOCH, 1))
    (pong,) = pair.take(messages.Pong)
    assert pong.staged == {"policy": 1, "critic": 2}  # type: ignore[attr-defined]
    critic.run()
    pair.machine.applied(critic)
    assert [pair.content(m) for m in ("policy", "critic")] == [{0}, {20}]
    pair.apply()
    assert [pair.content(m) for m in ("policy", "critic")] == [{10}, {20}]


def test_an_update_that_cannot_be_applied_changes_no_model_and_keeps_no_other_back() -> None:
    station = Station(("policy", "critic", "value"))
    station.join()
    station.update(1, {"policy": (1, 10), "critic": (1, 11)})
    station.update(2, {"value": (2, 20)})
    both, value = station.machine.staged
    station.models["critic"]["a"] = torch.zeros(3)
    with pytest.raises(SchemaMismatch) as raised:
        both.run()
    station.machine.failed(both, raised.value)
    value.run()
    station.machine.applied(value)
    (failed,) = station.take(messages.Failed)
    assert (failed.mismatch, failed.versions) == (True, {"policy": 1, "critic": 1})
    assert [station.content(m) for m in ("policy", "value")] == [{0}, {20}]
    assert [station.machine.holdings.version(m) for m in station.models] == [0, 0, 2]
    assert station.machine.holdings.error.keys() == {"policy", "critic"}


def test_an_update_of_which_all_models_are_overtaken_by_several_is_dropped(pair: Station) -> None:
    pair.update(1, {"policy": (1, 10), "critic": (1, 11)})
    both = pair.machine.staged[-1]
    pair.update(2, {"policy": (2, 20)})
    assert not both.abandoned
    pair.update(3, {"critic": (3, 30)})
    assert both.abandoned
    assert [one.versions for one in pair.machine.staged] == [{"policy": 2}, {"critic": 3}]
    assert pair.machine.pool.slabs <= 3


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["policy", ""])
def test_a_conversion_that_raises_is_told_with_its_traceback_until_something_newer_is_applied(name: str) -> None:
    station = Station()
    station.welcome(models={name: layout()})
    station.take()
    station.bindings["policy"].broken = OSError("the disk is full")
    station.update(1, {name: (1, 10)})
    (failed,) = station.take()
    assert (failed.serial, failed.versions, failed.mismatch) == (1, {name: 1}, False)  # type: ignore[attr-defined]
    assert failed.type_name == "builtins.OSError"  # type: ignore[attr-defined]
    assert "the disk is full" in failed.traceback  # type: ignore[attr-defined]
    assert station.machine.holdings.error["policy"][0] == 1
    assert station.machine.pool.slabs <= 1
    station.receive(messages.Ping(EPOCH, 1))  # the message may have been lost
    assert station.take() == [failed, messages.Pong(EPOCH, 1, {}, {}, 0, 1)]
    station.bindings["policy"].broken = None
    station.update_now(2, {name: (2, 20)})
    station.take()
    station.receive(messages.Ping(EPOCH, 2))
    assert station.take() == [messages.Pong(EPOCH, 2, {name: 2}, {}, 0, 2)]
    assert station.machine.holdings.error == {}


def test_a_failed_update_leaves_an_older_one_waiting(station: Station) -> None:
    station.update(1, {"policy": (1, 10)})
    station.bindings["policy"].broken = OSError("no")
    station.update_now(2, {"policy": (2, 20)})
    assert station.content() == {10}


# -- transports that fetch by a descriptor --------------------------------------------------------------------------


def test_an_update_or_again_with_a_descriptor_is_fetched_into_the_slab(station: Station) -> None:
    for version in (1, 2):
        if version == 1:
            station.update(1, {"policy": (1, 10)}, descriptor=b"1")
        else:
            station.receive(messages.Again(EPOCH, 2, 1, 2, b"2"))
        assert not station.take()
        serial, index, part, slab = station.machine.fetches.popleft()
        assert (serial, index, part.descriptor) == (version, 0, b"%d" % version)
        station.pass_time(10 * RETRY)
        assert not station.take(messages.Fetch), "only pieces can stall"
        slab.memory[:] = content_of(version)
        station.machine.fetched(serial, index, slab, None, station.now)
        station.apply()
        station.take()
        assert station.content() == {version}


def test_a_fetch_that_fails_is_told_unless_its_update_was_replaced(station: Station) -> None:
    station.update(1, {"policy": (1, 10)}, descriptor=b"old")
    old = station.machine.fetches.popleft()
    station.update_now(2, {"policy": (2, 20)})
    station.update(3, {"policy": (3, 30)}, descriptor=b"over there")
    new = station.machine.fetches.popleft()
    for told, (serial, index, _, slab) in enumerate((old, new)):
        station.machine.fetched(serial, index, slab, OSError("it is gone"), station.now)
        failed = station.take(messages.Failed)
        assert [(one.serial, one.message) for one in failed] == [(3, "it is gone")] * told  # type: ignore[attr-defined]
    assert station.content() == {20}
    assert station.machine.pool.slabs <= 2


def test_a_fetch_for_an_older_trainer_does_not_complete_the_update_of_a_newer_one(station: Station) -> None:
    station.update(1, {"policy": (1, 10)}, descriptor=b"old")
    old = station.machine.fetches.popleft()
    station.machine.connected(station.now)
    station.welcome(epoch=NEWER)
    station.update(1, {"policy": (1, 20)}, epoch=NEWER, descriptor=b"new")
    assert station.machine.fetches[0][0] == old[0]  # serial numbers begin again
    station.machine.fetched(old[0], old[1], old[3], None, station.now)
    assert not station.machine.staged


# -- slabs that are lent ---------------------------------------------------------------------------------------------


def reported(instruction: messages.Instruction) -> tuple[int, messages.InUse]:
    return instruction.last, instruction.in_use  # type: ignore[attr-defined]


def test_a_lent_slab_is_kept_until_a_newer_one_is_applied(station: Station) -> None:
    station.lend(1, {"policy": (5, 50)})
    assert station.take() == [messages.Staged(EPOCH, 1, 1, (("policy", 5),))]
    station.apply()
    assert station.take() == [messages.Applied(EPOCH, {"policy": 5}, 1, (("policy", 5),))]
    assert station.content() == {50}
    station.lend(2, {"policy": (6, 60)})
    assert station.take() == [messages.Staged(EPOCH, 2, 2, (("policy", 5), ("policy", 6)))]
    station.receive(messages.Ping(EPOCH, 1))
    (pong,) = station.take()
    assert reported(pong) == (2, (("policy", 5), ("policy", 6)))
    station.apply()
    assert station.take() == [messages.Applied(EPOCH, {"policy": 6}, 2, (("policy", 6),))]
    station.flush()
    assert not station.take()  # that has said it


def test_a_lent_slab_that_is_copied_out_or_replaced_before_the_gate_is_not_kept(station: Station) -> None:
    station.lend(1, {"policy": (5, 50)}, mapped=False)
    assert station.take() == [messages.Staged(EPOCH, 1, 1)]
    station.overwrite(5)
    station.apply()
    assert station.content() == {50}
    station.take()
    for serial, version in ((2, 6), (3, 7)):
        station.lend(serial, {"policy": (version, 60)})
        assert station.take() == [messages.Staged(EPOCH, serial, serial, (("policy", version),))]


def test_a_lent_slab_that_is_being_copied_is_kept_when_an_earlier_update_is_told_of(station: Station) -> None:
    # A reader's thread applies two in a row, and the loop hears of the first while the second is being copied.
    station.lend(1, {"policy": (1, 10)})
    first = station.machine.staged[-1]
    first.run()
    station.lend(2, {"policy": (2, 20)})
    second = station.machine.staged[-1]
    first.over = True
    second.run()
    station.lend(3, {"policy": (3, 30)})
    station.take()
    station.machine.applied(first)
    (applied,) = station.take()
    assert reported(applied) == (3, (("policy", 1), ("policy", 2), ("policy", 3)))
    second.over = True
    station.machine.applied(second)
    (applied,) = station.take()
    assert reported(applied) == (3, (("policy", 2), ("policy", 3)))
    station.apply()
    (applied,) = station.take()
    assert reported(applied) == (3, (("policy", 3),))
    assert station.content() == {30}


def test_a_part_is_kept_with_its_sibling_though_there_is_a_newer_one(pair: Station) -> None:
    pair.lend(1, {"policy": (1, 10), "critic": (1, 11)})
    pair.lend(2, {"policy": (2, 20)})
    assert reported(pair.take()[-1]) == (2, (("policy", 1), ("critic", 1), ("policy", 2)))
    pair.apply()
    assert reported(pair.take()[-1]) == (2, (("critic", 1), ("policy", 2)))


def test_an_older_version_that_is_lent_again_is_not_kept_and_the_same_one_twice_is_one_slab(station: Station) -> None:
    station.lend_now(1, {"policy": (5, 50)})
    station.take()
    station.lend(2, {"policy": (4, 40)})
    staged, applied = station.take()
    assert reported(staged) == reported(applied) == (2, (("policy", 5),))
    station.lend(3, {"policy": (6, 60)})
    station.lend(4, {"policy": (6, 60)})
    assert reported(station.take()[-1]) == (4, (("policy", 5), ("policy", 6)))
    slab = station.borrowed[f"{EPOCH} policy 6".encode()]
    assert slab.references == 1
    station.apply()
    assert slab.references == 1


@pytest.mark.parametrize("forked", [False, True])
def test_whoever_lets_go_of_a_slab_last_says_so_once(station: Station, forked: bool) -> None:
    """A reader of this process, or a forked child that has made a copy."""
    station.lend_now(1, {"policy": (1, 10)})
    (slab,) = station.borrowed.values()
    slab.forked = forked
    if not forked:
        slab.retain()
    station.lend_now(2, {"policy": (2, 20)})
    station.flush()
    assert reported(station.take()[-1]) == (2, (("policy", 1), ("policy", 2)))
    station.machine.tick(station.now)
    station.flush()
    assert not station.take()
    if forked:
        slab.forked = False
        station.machine.tick(station.now)
    else:
        slab.release()
    station.flush()
    assert station.take() == [messages.Released(EPOCH, nonce(7), 2, (("policy", 2),))]
    station.flush()
    assert not station.take()


def test_an_update_whose_slab_cannot_be_had_or_converted_fails_and_keeps_nothing(pair: Station) -> None:
    pair.unavailable.add("critic")
    pair.lend(1, {"policy": (1, 10), "critic": (1, 11)})
    pair.flush()
    failed, *rest = pair.take()
    assert isinstance(failed, messages.Failed)
    assert (failed.serial, failed.versions) == (1, {"policy": 1, "critic": 1})
    assert "not here" in failed.message
    assert reported([failed, *rest][-1]) == (1, ())
    pair.receive(messages.Ping(EPOCH, 1))
    assert reported(pair.take()[-1]) == (1, ())
    pair.unavailable.clear()
    pair.bindings["critic"].broken = OSError("no")
    pair.lend(2, {"policy": (2, 20), "critic": (2, 21)})
    pair.flush()
    assert reported(pair.take()[-1]) == (2, ())
    assert not pair.machine.staged
    assert all(slab.references == 0 for slab in pair.borrowed.values())
    assert pair.machine.pool.slabs <= 1


def test_an_update_of_an_unknown_layout_may_still_come_again(station: Station) -> None:
    station.lend(1, {"policy": (1, 10)})
    with pytest.raises(ProtocolError, match="unknown layout"):
        station.receive(messages.Update(EPOCH, 2, True, (unknown(digest=bytes(16), descriptor=b"slot"),)), [b"", b""])
    station.take()
    station.receive(messages.Ping(EPOCH, 1))
    assert reported(station.take()[-1]) == (1, (("policy", 1),))


def test_an_update_that_was_lost_before_a_ping_is_given_back_and_one_that_arrives_goes_on(station: Station) -> None:
    station.lend_now(1, {"policy": (1, 10)})
    station.take()
    station.receive(messages.Ping(EPOCH, 1, 2))
    assert reported(station.take()[-1]) == (2, (("policy", 1),))
    station.lend(2, {"policy": (2, 20)})
    assert not station.machine.staged
    station.update(3, {"policy": (2, 20)}, eager=False)
    station.receive(messages.Ping(EPOCH, 2, 3))
    station.chunks(3, 20)
    station.apply()
    assert station.content() == {20}


def test_a_model_that_joins_later_does_not_rename_what_is_kept() -> None:
    """The trainer's only model has no name; it counts its leases by the names that it has told."""
    station = Station()
    station.welcome(models={"": layout()})
    station.lend_now(1, {"": (1, 10)})
    assert reported(station.take()[-1]) == (1, (("", 1),))
    station.machine.register("critic", station.bindings["policy"], station.now)
    station.welcome(models={"": layout()})
    station.take()
    station.receive(messages.Ping(EPOCH, 1))
    assert reported(station.take()[-1]) == (1, (("", 1),))


def test_a_new_trainer_replaces_everything_under_way_and_hears_nothing_of_the_old_ones_slabs(station: Station) -> None:
    station.lend_now(9, {"policy": (7, 70)})
    station.lend(10, {"policy": (8, 80)})
    staged = station.machine.staged[-1]
    station.machine.connected(station.now)
    station.welcome(epoch=NEWER)
    assert staged.abandoned
    assert not station.machine.staged
    assert station.machine.holdings.version("policy") == 0
    assert station.content() == {70}  # the model keeps what it has
    station.take()
    station.receive(messages.Ping(NEWER, 1))
    assert reported(station.take()[-1]) == (0, ())
    station.lend_now(1, {"policy": (1, 10)}, epoch=NEWER)
    station.flush()
    assert reported(station.take()[-1]) == (1, (("policy", 1),))
    assert station.content() == {10}
    held = station.machine.holdings.updates["policy"]
    assert held[:2] == (NEWER, 1)


def test_who_leaves_looks_at_no_update_any_more(station: Station) -> None:
    station.lend_now(1, {"policy": (1, 10)})
    station.machine.leave()
    station.take()
    repeat(station, 2, 2, 20)
    station.lend(3, {"policy": (3, 30)})
    assert not station.machine.staged
    assert not station.take()
    station.receive(messages.Ping(EPOCH, 1))
    assert reported(station.take()[-1]) == (3, (("policy", 1),))
    station.machine.bye("done", reads=True)
    assert station.take() == [messages.Bye(EPOCH, nonce(7), "reading", "done")]


@pytest.mark.parametrize("reads", [False, True])
def test_who_was_superseded_gives_back_what_it_will_never_look_at_too_unless_it_reads_on(
    station: Station, reads: bool
) -> None:
    station.lend_now(1, {"policy": (1, 10)})
    station.receive(messages.Bye(EPOCH, nonce(7), "superseded", ""))
    station.lend(2, {"policy": (2, 20)})  # was on its way
    station.take()
    station.machine.bye("done", reads=reads)
    assert station.take() == ([] if reads else [messages.Released(EPOCH, nonce(7), messages.MAX_SERIAL, ())])


# -- epochs ---------------------------------------------------------------------------------------------------------


def test_what_the_gate_has_begun_for_an_old_trainer_says_nothing_to_the_new_one(station: Station) -> None:
    station.update(1, {"policy": (7, 70)})
    begun = station.machine.staged[-1]
    begun.run()
    station.machine.connected(station.now)
    station.welcome(epoch=NEWER)
    station.take()
    station.machine.applied(begun)
    assert not station.take()
    assert station.machine.holdings.version("policy") == 0
    assert station.machine.pool.slabs == 1


@pytest.mark.parametrize("epoch", [OLDER, NEWER])
def test_messages_of_another_epoch_are_refused_and_newer_ones_are_answered_with_one_hello(
    station: Station, epoch: messages.Epoch
) -> None:
    for instruction in (messages.Ping(epoch, 1), messages.Pong(epoch, 0, {"policy": 9}, {}, 0)):
        with pytest.raises(ProtocolError, match="another epoch"):
            station.receive(instruction)
    with pytest.raises(ProtocolError, match="another epoch"):
        station.update(1, {"policy": (9, 90)}, epoch=epoch)
    assert not station.machine.staged
    assert station.machine.session.epoch == EPOCH
    assert station.machine.targets == {}
    assert [type(i) for i in station.take()] == ([messages.Hello] if epoch == NEWER else [])
    station.welcome(epoch=NEWER)
    assert station.machine.session.epoch == NEWER


def test_a_welcome_from_an_older_trainer_to_somebody_else_or_to_an_earlier_hello_is_refused(station: Station) -> None:
    station.machine.connected(station.now)
    for wrong, word in (
        ({"epoch": OLDER}, "older trainer"),
        ({"epoch": NEWER, "incarnation": 8}, "another HELLO"),
        ({"epoch": NEWER, "attempt": 1}, "another HELLO"),
    ):
        with pytest.raises(ProtocolError, match=word):
            station.welcome(**wrong)
        assert station.machine.session.epoch == EPOCH
        assert not station.machine.session.welcomed


# -- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "error"), [("closed", ClosedError), ("superseded", Fenced), ("refused", NotConnected)]
)
def test_bye_ends_it_and_leaves_what_was_applied_or_staged(
    station: Station, reason: str, error: type[Exception]
) -> None:
    station.update_now(1, {"policy": (1, 10)})
    station.update(2, {"policy": (2, 20)})
    station.take()
    station.receive(messages.Bye(EPOCH, nonce(7), reason, "so long"))
    assert isinstance(station.machine.session.ended, error)
    assert "so long" in str(station.machine.session.ended)
    assert station.machine.holdings.updates.get("policy") is not None
    station.update(3, {"policy": (3, 30)})
    station.receive(messages.Ping(EPOCH, 1))
    station.pass_time(600)
    assert not station.take()
    station.apply()
    assert station.content() == {20}


def test_a_bye_to_somebody_else_or_of_an_older_trainer_does_not_count(station: Station) -> None:
    for epoch, name in ((EPOCH, nonce(8)), (OLDER, nonce(7))):
        with pytest.raises(ProtocolError):
            station.receive(messages.Bye(epoch, name, "closed", ""))
    assert station.machine.session.ended is None


def test_without_bye_it_keeps_waiting_for_a_new_trainer_and_says_nothing_meanwhile(station: Station) -> None:
    station.machine.disconnected()
    station.pass_time(3600)
    assert not station.take()
    assert station.machine.session.ended is None
    station.machine.connected(station.now)
    station.welcome(epoch=NEWER)
    assert station.machine.session.epoch == NEWER


def test_leaving_says_bye(station: Station) -> None:
    station.machine.bye("done")
    assert station.take() == [messages.Bye(EPOCH, nonce(7), "closed", "done")]


def test_closing_lets_go_of_all_slabs(station: Station) -> None:
    station.update_now(1, {"policy": (1, 10)})
    station.update(2, {"policy": (2, 20)})
    station.update(3, {"policy": (3, 30)}, eager=False)
    staged = station.machine.staged[-1]
    held = station.machine.holdings.updates["policy"]
    station.machine.close()
    assert (staged.parts["policy"].slab.references, held[2].references) == (0, 0)
    assert station.machine.pool.slabs == 0


# -- questions ------------------------------------------------------------------------------------------------------


def test_a_request_is_answered_with_the_targets(station: Station) -> None:
    station.update(1, {"policy": (4, 40)})
    assert station.machine.targets == {"policy": 4}
    station.take()
    request = station.machine.session.request()
    assert station.take() == [messages.Ping(EPOCH, request)]
    assert not station.machine.session.answered(request)
    station.receive(messages.Pong(EPOCH, request, {"policy": 6}, {}, 0))
    assert station.machine.session.answered(request)
    assert station.machine.targets == {"policy": 6}
    station.receive(messages.Pong(EPOCH, request - 1, {"policy": 5}, {}, 0))
    assert station.machine.targets == {"policy": 6}


def test_pong_tells_what_is_applied_what_waits_and_what_arrives(station: Station) -> None:
    station.update_now(1, {"policy": (1, 10)})
    station.update(2, {"policy": (2, 20)})
    station.update(3, {"policy": (3, 30)}, eager=False)
    station.take()
    station.receive(messages.Ping(EPOCH, 8))
    assert station.take() == [messages.Pong(EPOCH, 8, {"policy": 1}, {"policy": 2}, 3, 3)]


def test_the_layouts_of_the_latest_welcomes_are_remembered() -> None:
    station = Station(cast=True)
    dtypes = (torch.float64, torch.int32, torch.int64, torch.int16)
    station.welcome(F32)
    for dtype in dtypes[: KEPT_LAYOUTS - 1]:
        station.welcome(dtype)
    station.welcome(F32)  # asked about again
    station.welcome(dtypes[KEPT_LAYOUTS - 1])
    station.update(1, {"policy": (1, 10)})
    assert station.machine.staged


# -- messages that no correct trainer sends -------------------------------------------------------------------------


def state(machine: Worker) -> object:
    return (
        machine.session.epoch,
        machine.session.welcomed,
        machine.session.ended,
        dict(machine.targets),
        machine.staged.copy(),
        machine.incoming,
        machine.serial,
        machine.last_seen,
    )


def unknown(**changes: object) -> messages.Part:
    fields = {"model_id": "policy", "version": 1, "digest": layout().digest, "nbytes": 128, **changes}
    return messages.Part(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("instruction", "payload"),
    [
        (messages.Ready(EPOCH, {}), []),
        (messages.Applied(EPOCH, {"policy": 9}), []),
        (messages.Pong(EPOCH, 1, {"policy": 9}, {}, 0), []),
        (messages.Update(EPOCH, 3, False, (unknown(digest=bytes(16)),)), [b""]),
        (messages.Update(EPOCH, 3, False, (unknown(model_id="critic"),)), [b""]),
        (messages.Update(EPOCH, 3, False, (unknown(nbytes=64),)), [b""]),
        (messages.Update(EPOCH, 3, True, (unknown(crc=1),)), [b"", bytes(128)]),
        (messages.Update(EPOCH, 3, False, (unknown(),)), [bytes((8 << 20) + 1)]),
        (messages.Chunk(EPOCH, 2, 0, 100), [bytes(40)]),
        (messages.Chunk(EPOCH, 2, 1, 0), [bytes(40)]),
        (messages.Chunk(EPOCH, 2, 0, 0, 1), [bytes(40)]),
    ],
)
def test_a_wrong_message_changes_nothing(
    station: Station, instruction: messages.Instruction, payload: list[bytes]
) -> None:
    station.update_now(1, {"policy": (1, 10)})
    station.update(2, {"policy": (2, 20)}, eager=False)
    station.take()
    before, slabs = state(station.machine), station.machine.pool.slabs
    station.now = 1.0
    for _ in range(3):
        with pytest.raises((ProtocolError, LimitExceeded)):
            station.receive(instruction, payload)
    assert state(station.machine) == before
    assert station.machine.pool.slabs <= slabs + 1  # a spare one
    assert not station.take()
    station.chunks(2, 20)
    station.apply()
    assert station.content() == {20}


def test_more_memory_than_there_is_fails_the_update_only(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr(station.machine.pool, "acquire", acquire)
        station.update(1, {"policy": (1, 10)})
    (failed,) = station.take(messages.Failed)
    assert failed.type_name == "builtins.MemoryError"
    station.update(2, {"policy": (2, 20)})
    assert station.machine.staged


def test_values_of_a_setting_are_those_that_are_documented() -> None:
    settings = Settings()
    assert settings.window_bytes >= 2 * settings.chunk_bytes  # credit comes before the last chunk has gone
    assert settings.slow_after > settings.ping_interval


def test_commit_applies_just_what_it_names(station: Station) -> None:
    def phase(serial: int, version: int, phase: int) -> None:
        part = messages.Part("policy", version, layout().digest, layout().nbytes)
        payload = [b"", content_of(version)] if phase == messages.STAGE else []
        station.receive(messages.Update(EPOCH, serial, True, (part,), phase=phase), payload)

    phase(1, 5, messages.STAGE)
    assert station.machine.targets == {}, "it is to have that at its commit"
    phase(2, 6, messages.COMMIT)
    assert (station.machine.held is not None, list(station.machine.staged)) == (True, [])
    phase(3, 5, messages.COMMIT)
    station.apply()
    assert station.content() == {5}


# -- taking ------------------------------------------------------------------------------------------------------------


def test_what_is_taken_is_replaced_by_nothing_newer_and_the_version_before_stays(station: Station) -> None:
    station.join()
    station.update_now(1, {"policy": (1, 10)})
    station.update(2, {"policy": (2, 20)})
    taken = station.machine.take("policy")
    (_, version, before), slab = taken.previous["policy"], taken.staging.parts["policy"].slab
    station.update(3, {"policy": (3, 30)})
    with pytest.raises(RuntimeError, match="taken already"):
        station.machine.take("policy")
    assert bytes(slab.memory) == content_of(20)
    assert (version, bytes(before.memory)) == (1, content_of(10))
    station.take()
    taken.staging.run()
    assert station.machine.give_back(taken)
    assert station.take() == [messages.Applied(EPOCH, {"policy": 2}, 3)]
    assert not before.references
    station.apply()
    assert station.content() == {30}


def test_what_is_older_no_longer_reaches_the_models_of_what_is_taken(pair: Station) -> None:
    pair.update(1, {"policy": (1, 10), "critic": (1, 11)})
    pair.update(2, {"policy": (2, 20)})
    pair.machine.take("policy")
    assert [one.versions for one in pair.machine.staged] == [{"critic": 1}]


def test_what_is_newer_than_what_is_taken_still_comes(pair: Station) -> None:
    pair.update(1, {"policy": (1, 10), "critic": (1, 11)})
    pair.update(2, {"critic": (2, 21)})
    pair.machine.take("policy")
    assert [one.versions for one in pair.machine.staged] == [{"critic": 2}]


def test_what_could_not_be_applied_may_be_taken_again_until_something_newer_is_there(station: Station) -> None:
    station.join()
    station.update(1, {"policy": (1, 10)})
    for _ in range(2):
        taken = station.machine.take("policy")
        station.take()
        station.machine.give_back(taken, RuntimeError("out of memory"))
        (failed,) = station.take(messages.Failed)
        assert (failed.versions, failed.type_name) == ({"policy": 1}, "builtins.RuntimeError")  # type: ignore[attr-defined]
    taken = station.machine.take("policy")
    station.update(2, {"policy": (2, 20)})
    station.machine.give_back(taken, RuntimeError("out of memory"))
    taken = station.machine.take("policy")
    assert taken.staging.versions == {"policy": 2}


def test_what_is_taken_survives_a_reconnection_but_not_another_trainer(station: Station) -> None:
    station.join()
    station.update(1, {"policy": (1, 10)})
    taken = station.machine.take("policy")
    station.machine.disconnected()
    station.machine.connected(station.now)
    station.welcome()
    station.take()
    station.receive(messages.Ping(EPOCH, 1))
    (pong,) = station.take(messages.Pong)
    assert pong.staged == {"policy": 1}, "or the trainer would send it again"  # type: ignore[attr-defined]
    station.machine.give_back(taken)
    assert station.take() == [messages.Applied(EPOCH, {"policy": 1}, 1)]
    station.update(2, {"policy": (2, 20)})
    taken = station.machine.take("policy")
    station.machine.disconnected()
    station.machine.connected(station.now)
    station.welcome(epoch=(EPOCH[0] + 1, 1))
    station.take()
    assert not station.machine.give_back(taken)
    assert not station.take()
    assert not station.machine.has("policy")


def test_exactly_one_version_is_taken_or_it_is_said_what_there_is_instead(station: Station) -> None:
    station.join()
    assert not station.machine.has("policy", 1)
    assert station.machine.why_not_taken("policy", 1) is None
    station.update(1, {"policy": (1, 10)})
    assert (station.machine.has("policy", 1), station.machine.has("policy", 2)) == (True, False)
    station.update(2, {"policy": (2, 20)})
    error = station.machine.why_not_taken("policy", 1)
    assert isinstance(error, Superseded)
    assert (error.version, station.machine.why_not_taken("policy", 3)) == (2, None)
    taken = station.machine.take("policy", 2)
    assert taken.staging.versions == {"policy": 2}


def test_what_is_applied_may_be_taken_again_and_nothing_is_reported_of_that(station: Station) -> None:
    station.join()
    station.update_now(1, {"policy": (1, 10)})
    station.take()
    assert (station.machine.has("policy"), station.machine.has("policy", 1)) == (False, True)
    for error in (None, RuntimeError("out of memory")):
        taken = station.machine.take("policy", 1)
        assert bytes(taken.staging.parts["policy"].slab.memory) == content_of(10)
        assert station.machine.give_back(taken, error)
        assert (station.take(), station.machine.holdings.error) == ([], {})
    assert station.machine.holdings.version("policy") == 1


def test_what_was_not_tried_is_not_reported_as_failed(station: Station) -> None:
    station.join()
    station.update(1, {"policy": (1, 10)})
    station.take()
    for error in (KeyboardInterrupt(), None):
        station.machine.give_back(station.machine.take("policy"), error, unused=True)
        assert (station.take(), station.machine.has("policy", 1)) == ([], True)
    assert station.machine.holdings.version("policy") == 0


def test_what_is_taken_when_it_leaves_is_free_once_it_is_given_back(station: Station) -> None:
    station.join()
    station.update_now(1, {"policy": (1, 10)})
    station.update(2, {"policy": (2, 20)})
    taken = station.machine.take("policy")
    slabs = [taken.staging.parts["policy"].slab, taken.previous["policy"][2]]
    station.machine.leave()
    station.machine.close()
    assert all(slab.references for slab in slabs)
    station.machine.give_back(taken)
    assert not any(slab.references for slab in slabs)


def test_pong_shows_what_is_taken(station: Station) -> None:
    station.join()
    station.update(1, {"policy": (1, 10)})
    station.machine.take("policy")
    station.take()
    station.receive(messages.Ping(EPOCH, 1))
    (pong,) = station.take(messages.Pong)
    assert (pong.staged, pong.taken) == ({"policy": 1}, {"policy": 1})  # type: ignore[attr-defined]


# -- AGAIN -------------------------------------------------------------------------------------------------------------


def content_of(value: float) -> bytes:
    return bytes(slab_of(SlabPool(), value).memory)


def repeat(station: Station, serial: int, version: int, value: float, *, since: int | None = None) -> None:
    since = serial - 1 if since is None else since
    station.receive(messages.Again(EPOCH, serial, since, version, None), [content_of(value)])


def test_again_goes_the_general_way_where_nothing_is_to_be_fast() -> None:
    station = Station(settings=replace(SMALL, fast=False))
    station.join()
    station.update_now(3, {"policy": (5, 50)})
    station.take()
    repeat(station, 4, 6, 6)
    assert station.take() == [messages.Staged(EPOCH, 4, 4)]
    station.apply()
    assert station.content() == {6}
    assert station.take() == [messages.Applied(EPOCH, {"policy": 6}, 4)]
    assert station.machine.steady(4) is None
    repeat(station, 4, 6, 6)
    assert not station.take()


def test_again_is_the_update_before_with_other_bytes(station: Station) -> None:
    station.update(3, {"policy": (5, 50)})
    station.take()
    repeat(station, 4, 6, 6)  # replaces what still waits
    station.apply()
    assert station.content() == {6}
    assert station.take() == [messages.Applied(EPOCH, {}, 4, (), 4)]
    for serial, version in ((7, 9), (8, 10)):
        repeat(station, serial, version, version, since={7: 4, 8: 7}[serial])
        assert station.take() == [messages.Staged(EPOCH, serial, serial)]
        station.apply()
        assert station.content() == {version}
        assert station.machine.holdings.version("policy") == version
        assert station.take() == [messages.Applied(EPOCH, {"policy": version}, serial)], "after STAGED, all of it"
    repeat(station, 9, 11, 11)
    station.apply()
    assert station.take() == [messages.Applied(EPOCH, {}, 9, (), 9)], "instead of STAGED"
    assert station.machine.targets == {"policy": 11}


def test_an_again_that_comes_by_descriptor_is_attached(station: Station) -> None:
    for mapped in (False, True):
        for version in (1, 2, 3):
            station.offered[b"%d" % version] = slab_of(SlabPool(), version), mapped
        before = station.machine.holdings.version("policy")
        serial = 10 if mapped else 1
        station.update_now(serial, {"policy": (before + 1, 1)}, descriptor=b"1")
        station.take()
        for version in (2, 3):
            since = serial + version - 1 - (version == 2)
            station.receive(messages.Again(EPOCH, serial + version, since, before + version, b"%d" % version))
            station.apply()
            assert station.content() == {version}
            (said,) = station.take()
            # A slab that is read where it is stays in use until the next one is applied.
            kept = (("policy", before + version),)
            shown = messages.Applied(EPOCH, {"policy": before + version}, serial + version, kept)
            assert said == (shown if mapped else messages.Applied(EPOCH, {}, serial + version, (), serial + version))


def test_an_again_without_its_update_is_dropped(station: Station) -> None:
    def dropped(serial: int, since: int) -> None:
        with pytest.raises(ProtocolError, match="has not come"):
            repeat(station, serial, 9, 9.0, since=since)
        assert station.take() == []

    dropped(2, 1)
    station.update(3, {"policy": (1, 10)})
    station.take()
    dropped(5, 4)
    dropped(5, 2)
    station.receive(messages.Ping(EPOCH, 1, 4))  # the UPDATE 4 is lost
    station.take()
    dropped(6, 3)
    dropped(6, 4)
    station.welcome(epoch=NEWER)
    station.take()
    with pytest.raises(ProtocolError):
        station.receive(messages.Again(NEWER, 4, 3, 9, None), [content_of(9.0)])
    repeat_of_old = messages.Again(EPOCH, 4, 3, 9, None)
    with pytest.raises(ProtocolError):
        station.receive(repeat_of_old, [content_of(9.0)])


def test_an_again_needs_an_update_of_one_part() -> None:
    station = Station(("policy", "value"))
    station.join()
    station.update_now(1, {"policy": (1, 10), "value": (1, 20)})
    station.take()
    with pytest.raises(ProtocolError, match="has not come"):
        repeat(station, 2, 2, 2.0)
    station.update_now(3, {"value": (3, 30)})
    repeat(station, 4, 4, 40)
    station.apply()
    assert (station.content("policy"), station.content("value")) == ({10}, {40})


def test_an_again_that_is_too_short_or_comes_twice_or_late_changes_nothing(station: Station) -> None:
    station.update_now(1, {"policy": (1, 10)})
    with pytest.raises(ProtocolError, match="bytes for a slab"):
        station.receive(messages.Again(EPOCH, 2, 1, 2, None), [b"short"])
    repeat(station, 2, 2, 20)
    station.apply()
    station.take()
    for _ in range(2):
        repeat(station, 2, 2, 99)
        assert not station.machine.staged
        assert station.take() == [messages.Applied(EPOCH, {}, 2, (), 2)], (
            "an interrupt may have swallowed the first answer"
        )
    assert station.content() == {20}


def test_an_again_that_cannot_be_had_or_converted_is_told_and_an_interrupt_leaves_no_slab(station: Station) -> None:
    station.offered[b"1"] = slab_of(SlabPool(), 1), False
    station.update_now(1, {"policy": (1, 1)}, descriptor=b"1")
    station.take()
    station.unavailable.add("policy")
    station.receive(messages.Again(EPOCH, 2, 1, 2, b"2"))
    (told,) = station.take(messages.Failed)
    assert (told.serial, told.versions, told.last, told.message) == (2, {"policy": 2}, 2, "it is not here")
    station.unavailable.clear()
    station.update_now(3, {"policy": (3, 30)})
    station.take()
    station.bindings["policy"].broken = OSError("no")
    repeat(station, 4, 4, 40)
    (told,) = station.take(messages.Failed)
    assert (told.serial, told.versions) == (4, {"policy": 4})
    station.bindings["policy"].broken = None
    repeat(station, 5, 5, 50)
    station.apply()
    assert station.content() == {50}
    assert len(station.machine.pool.used) == 1
    station.bindings["policy"].broken = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        repeat(station, 6, 6, 60)
    assert len(station.machine.pool.used) == 1
