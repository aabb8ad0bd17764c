"""All ranks come to one verdict, whoever is late, dead or stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from asyncsync.engines.vllm import ranks as module
from asyncsync.engines.vllm.ranks import KEPT_CALLS, Ranks

Group = Callable[[int], list[Ranks]]
Vote = tuple[float, str]  # after so many seconds, this problem


@pytest.fixture(params=["hash", "file", "tcp"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    """vLLM's group has a file's store on one host, and one over TCP on several."""
    hosts = []

    def make(size: int) -> list[Ranks]:
        if request.param == "file":
            return [Ranks(FileStore(str(tmp_path / "store"), size), rank, size) for rank in range(size)]
        is_hash = request.param == "hash"
        host = HashStore() if is_hash else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        hosts.append(host)
        return [Ranks(PrefixStore("ours", host).clone(), rank, size) for rank in range(size)]

    yield make
    hosts.clear()


def test_old_keys_are_deleted() -> None:
    store = HashStore()
    ranks = [Ranks(store.clone(), rank, 2) for rank in range(2)]
    for _ in range(3 * KEPT_CALLS):
        for one in ranks:
            one.begin()
        votes(ranks, [(0, ""), (0, "")], 10)
    assert store.num_keys() <= 3 * (KEPT_CALLS + 2)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(20) for each in [pool.submit(call) for call in calls]]


def votes(ranks: list[Ranks], given: list[Vote], seconds: float) -> list[dict[int, str]]:
    deadline = time.monotonic() + seconds

    def voting(one: Ranks, delay: float, problem: str) -> dict[int, str]:
        time.sleep(delay)
        return one.vote(problem, deadline)

    return at_once([lambda one=one, vote=vote: voting(one, *vote) for one, vote in zip(ranks, given, strict=True)])


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MARGIN", 2.0)


@pytest.mark.requirement(244)
def test_without_a_problem_all_go_on_and_with_one_all_hear_of_it(group: Group) -> None:
    ranks = group(3)
    for _ in range(2 * KEPT_CALLS):  # keys of old calls are gone, and in nobody's way
        for one in ranks:
            one.begin()
        assert votes(ranks, [(0, ""), (0, ""), (0, "")], 10) == [{}] * 3
        assert votes(ranks, [(0, ""), (0.01, "no room"), (0, "")], 10) == [{1: "no room"}] * 3
        assert votes(ranks, [(0, "a"), (0, "b"), (0, "c")], 10) == [{0: "a", 1: "b", 2: "c"}] * 3
    assert at_once([lambda one=one: one.exchange(f"v{one.rank}", time.monotonic() + 10) for one in ranks]) == (
        [{0: "v0", 1: "v1", 2: "v2"}] * 3
    )


def test_one_rank_alone_needs_no_store() -> None:
    alone = Ranks(None, 0, 1)
    assert alone.vote("", time.monotonic()) == {}
    assert alone.vote("no room", time.monotonic()) == {0: "no room"}
    assert alone.exchange("v7", time.monotonic()) == {0: "v7"}


@pytest.mark.requirement(244)
def test_the_others_do_not_wait_for_a_rank_that_is_late_and_it_comes_to_their_verdict(group: Group) -> None:
    ranks = group(3)
    started = time.monotonic()
    for _ in range(2):
        found = votes(ranks, [(0, ""), (0.6, ""), (0, "")], 0.2)
        assert found == [{1: "it did not vote in time"}] * 3
    assert time.monotonic() - started < 8
    assert votes(ranks, [(0, "")] * 3, 10) == [{}] * 3  # the next vote is another one


def test_a_rank_that_has_missed_a_vote_takes_part_again_in_the_next_call(group: Group) -> None:
    ranks = group(2)
    assert ranks[0].vote("", time.monotonic() + 0.1) == {1: "it did not vote in time"}
    for one in ranks:
        one.begin()
    assert votes(ranks, [(0, ""), (0, "")], 10) == [{}] * 2


def test_a_rank_that_hears_of_all_after_the_deadline_does_not_go_on(group: Group) -> None:
    ranks = group(2)
    assert votes(ranks, [(0.3, ""), (0.3, "")], 0.1) in (
        [{rank: problem}] * 2 for rank in (0, 1) for problem in ("it was late", "it did not vote in time")
    )


@pytest.mark.requirement(244)
def test_no_two_ranks_come_to_different_verdicts_around_the_deadline(group: Group) -> None:
    ranks, random_ = group(3), random.Random(244)
    seen = set()
    for _ in range(40):
        given = [(random_.uniform(0, 0.04), "" if random_.random() < 0.9 else "no room") for _ in ranks]
        first, *others = votes(ranks, given, 0.03)
        assert others == [first] * 2
        seen.add(not first)
    assert seen == {True, False}


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Iterator[tuple[int, int]]:
    """A process with a TCPStore: its pid, and the port."""
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.requirement(244)
@pytest.mark.parametrize("kind", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_stopped_or_dead_keeps_nobody_waiting(host: tuple[int, int], kind: signal.Signals) -> None:
    pid, port = host
    ranks = Ranks(TCPStore("127.0.0.1", port, is_master=False), 1, 2)
    os.kill(pid, kind)
    started = time.monotonic()
    (problem,) = ranks.vote("no room", started + 0.2).values()
    assert "no room; it cannot reach the other ranks" in problem
    assert "restart this replica" in problem
    assert time.monotonic() - started < 6
