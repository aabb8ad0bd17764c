"""The trainer asks what workers' models hold; also in the simulation (test_machines.py) and the tree (test_tree.py)."""

import pytest

from asyncsync.errors import ProtocolError
from asyncsync.protocol.verifying import Verification, Verified
from asyncsync.wire import messages
from helpers.machines import EPOCH, Desk, Station, nonce

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


@pytest.fixture
def desk() -> Desk:
    desk = Desk(2)
    desk.join(0, 1)
    desk.publish()
    desk.finish_all()
    return desk


def ask(desk: Desk, *workers: int) -> Verification:
    return desk.publisher.verify("policy", workers, desk.now)


def page(
    desk: Desk, worker: int, start: int, digests: bytes, *, of: int = 0, count: int = 3, problem: str = ""
) -> None:
    number = desk.publisher.verification.number
    desk.receive(worker, messages.Digests(EPOCH, number, of, nonce(of), 1, start, count, digests, problem))


def test_pages_are_requested_one_after_the_other_and_make_one_answer(desk: Desk) -> None:
    asked = ask(desk, 0)
    assert [question.start for question in desk.take(messages.Verify)] == [0]
    page(desk, 0, 0, A + B)
    assert [question.start for question in desk.take(messages.Verify)] == [2]
    page(desk, 0, 0, A + B)  # once more
    assert not desk.take(messages.Verify)
    page(desk, 0, 2, C)
    assert (asked.found, asked.waiting) == ({0: Verified(1, (A, B, C))}, {})


def test_what_cannot_be_compared_and_who_is_lost_are_problems(desk: Desk) -> None:
    asked = ask(desk, 0, 1, 7)
    page(desk, 0, 0, b"", problem="its strategy casts")
    desk.publisher.lost(1, nonce(1), "killed", desk.now)
    desk.pass_time(1)
    assert asked.problems == {0: "its strategy casts", 1: "it is lost: killed", 7: "it is not connected"}
    assert not asked.waiting


def test_a_page_without_digests_ends_the_answer(desk: Desk) -> None:
    asked = ask(desk, 0, 1)
    page(desk, 0, 0, b"")
    page(desk, 1, 0, b"", of=1, count=0)  # a model without tensors
    assert (asked.problems, asked.found) == ({0: "it has answered with an empty page"}, {1: Verified(1, ())})


def test_no_worker_answers_for_another(desk: Desk) -> None:
    asked = ask(desk, 0, 1)
    with pytest.raises(ProtocolError, match="worker 1 answers for worker 0"):
        page(desk, 1, 0, A, of=0)
    assert not asked.found


def test_a_newer_question_takes_the_place_of_an_older_one() -> None:
    station = Station()
    station.join()
    station.update_now(1, {"policy": (1, 10)})
    questions = [messages.Verify(EPOCH, number, 0, nonce(7), "policy", 0) for number in (1, 2)]
    for question in questions:
        station.receive(question)
    station.subscriber.answer(questions[0], 1, [A])
    assert not station.take(messages.Digests)
    station.subscriber.answer(questions[1], 1, [A, B])
    (first,) = station.take(messages.Digests)
    station.receive(messages.Verify(EPOCH, 2, 0, nonce(7), "policy", 1))
    (second,) = station.take(messages.Digests)
    assert (first.digests, second.digests, second.count) == (A, B, 2)  # type: ignore[attr-defined]
    assert station.subscriber.asked is None
