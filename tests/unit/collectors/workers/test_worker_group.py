"""A group of workers that share no memory, of a family whose launches, losses and answers are the test's."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors import ProfileConfig
from asyncsync.collectors.distributed.nodes import Node, NodeFamily
from asyncsync.collectors.multi.driver import AsyncDriver, BatchArguments
from asyncsync.collectors.trajectories import WholeTrajectories
from asyncsync.collectors.workers.group import IDS_PER_LAUNCH, Reports, WorkerGroup
from asyncsync.collectors.workers.messages import Parcel, dumps
from asyncsync.collectors.workers.worker import Message
from asyncsync.errors import AckTimeout, PeerLost
from helpers.collecting_multi import wait_for


class Family(NodeFamily):
    """Its nodes answer at once, from when a test lets them begin until it loses them."""

    def __init__(self, restarts: int = 1) -> None:
        super().__init__(restarts)
        self.launched: defaultdict[int, list[Reports]] = defaultdict(list)
        self.sent: defaultdict[int, list[Message]] = defaultdict(list)  # to each node's last one
        self.silent: set[str] = set()
        self.open_calls: defaultdict[int, list[str]] = defaultdict(list)
        self.begun: set[int] = set()

    def prepare(self) -> None:
        pass

    def start(self, rank: int, reports: Reports) -> None:
        self.launched[rank].append(reports)
        self.sent[rank].clear()

    def begin(self, rank: int) -> None:
        self.begun.add(rank)
        self.say(rank, "begun", f"the test's {rank}")
        self.say(rank, "built", 4, 0, set())
        self.say(rank, "connected")

    def say(self, rank: int, *message: Any) -> None:
        self.call_soon(self.launched[rank][-1].received, message)

    def lose(self, rank: int) -> None:
        self.begun.discard(rank)
        self.open_calls.pop(rank, None)
        self.call_soon(self.launched[rank][-1].lost, ConnectionError("the test has lost it"))

    def send(self, rank: int, message: Message) -> None:
        self.sent[rank].append(message)
        kind = message[0]
        if rank not in self.begun:
            return
        if kind in self.silent:
            self.open_calls[rank].append(kind)
        elif kind == "rollout":
            self.roll_out(rank)
        elif kind == "call":
            self.say(rank, "reply", message[1], None, Parcel.of(rank))
        elif kind == "page":
            self.say(rank, "told")
        elif kind == "stop":
            self.say(rank, "ended")

    def roll_out(self, rank: int, frames: int = 4) -> None:
        self.say(rank, "result", False, frames, frames, None, Parcel.of(None))

    def close(self, deadline: float) -> None:
        pass

    def name(self, rank: int) -> str:
        return f"node {rank}"

    def kinds(self, rank: int) -> list[str]:
        return [message[2] if message[0] == "call" else message[0] for message in self.sent[rank]]


Groups = Callable[..., tuple[Family, WorkerGroup]]


@pytest.fixture
def groups() -> Iterator[Groups]:
    """Makes groups of two nodes, which have connected."""
    made: list[WorkerGroup] = []

    def make(
        connect_timeout: float = 60.0, replay_buffer: Any = None, family: Any = None, restarts: int = 1, **given: Any
    ) -> tuple[Family, WorkerGroup]:
        family = Family(restarts) if family is None else family
        made.append(group := WorkerGroup(family, "Test", connect_timeout, **given))
        group.start([b"", b""], {}, replay_buffer)
        for rank in range(2):
            family.begin(rank)
        group.wait(lambda: group.connected, 20)
        return family, group

    yield make
    for group in made:
        group.end(1.0)
        group.page.close()


def lose(group: WorkerGroup, family: Family, rank: int) -> None:
    """Until it is being launched again."""
    before = len(family.launched[rank])
    family.lose(rank)
    group.wait(lambda: len(family.launched[rank]) > before and family.sent[rank], 20)


def launch_again(group: WorkerGroup, family: Family, rank: int = 0) -> None:
    """Lose it, and have it come again."""
    lose(group, family, rank)
    family.begin(rank)
    group.wait(lambda: group.connected, 20)


class Collector:
    """Stands for the collector, which these tests do not need."""


def run_free(group: WorkerGroup, total: int) -> AsyncDriver:
    """Have both nodes roll out into the replay buffer, four frames at a time."""
    arguments = BatchArguments([4, 4], total, 0, False, "a buffer", False, 0)
    driver = AsyncDriver(Collector(), group, arguments)
    driver.run_free()
    return driver


def asked(group: WorkerGroup, worker: int, name: str = "state") -> Future[Any]:
    """What the worker answers, when it has been asked."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(group.ask(name, name, workers=[worker], timeout=20)[0])
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask).start()
    let_pass(group)
    return answer


def let_pass(group: WorkerGroup) -> None:
    """What was to be done on the loop thread has been."""
    done: list[int] = []
    for _ in range(5):
        group.call_soon(done.append, 1)
        group.call_soon(group.recheck_waits)
    group.wait(lambda: len(done) == 5, 20)


def test_what_is_wanted_while_a_node_is_launched_again_is_no_second_loss(groups: Groups) -> None:
    family, group = groups()
    lose(group, family, 0)
    group.page.publish(3, range(2))
    group.pause()
    group.resume()
    group.page.count()
    group.page.cut = 2
    group.follow(None, 0)
    waits = asked(group, 0)
    assert asked(group, 1).result(20) == 1
    assert not waits.done()
    assert family.kinds(0) == ["build", "follow"], "nothing else is sent to a node that is not there"
    assert group.relaunches(0) is None
    family.begin(0)
    assert waits.result(20) == 0
    assert group.connected
    assert group.relaunches(0) == 1
    newest = [message[1] for message in family.sent[0] if message[0] == "page"][-1]
    assert (newest.newest, newest.counted, newest.cut, newest.paused) == (3, 1, 2, False)
    assert family.kinds(0).index("build") < family.kinds(0).index("follow") < family.kinds(0).index("state")


def test_a_call_that_a_lost_node_has_not_answered_is_told_so(groups: Groups) -> None:
    family, group = groups()
    family.silent.add("call")
    waits = asked(group, 0)
    lose(group, family, 0)
    with pytest.raises(PeerLost, match="node 0"):
        waits.result(20)


def test_a_node_that_is_launched_again_has_the_hooks_that_were_set_last(groups: Groups) -> None:
    family, group = groups(restarts=2)
    for name in ("pre_hook", "post_hook", "post_hook", "state"):
        group.ask(name, name, workers=[0])
    for _ in range(2):
        lose(group, family, 0)
        group.call_soon(group.request, 0, 1, False)
        waits = asked(group, 0)
        family.begin(0)
        waits.result(20)
        group.wait(lambda: group.results and group.results.popleft(), 20)
        after = [kind for kind in family.kinds(0) if kind != "page"]
        assert after == ["build", "pre_hook", "post_hook", "state", "rollout"]


def test_a_node_that_is_launched_again_is_recorded_anew_unless_its_recording_has_ended(groups: Groups) -> None:
    family, group = groups(restarts=5)

    def roll_out(count: int) -> None:
        for _ in range(count):
            group.call_soon(group.request, 0, 1, False)
            group.wait(lambda: group.results and group.results.popleft(), 20)

    def again() -> bool:
        launch_again(group, family)
        group.ask("state", workers=[0])
        return "record" in family.kinds(0)

    roll_out(5)
    assert not again()
    group.ask("record", ProfileConfig(num_rollouts=3), "0", workers=[0])
    roll_out(2)
    assert again()
    roll_out(2)
    assert again(), "what was recorded is lost, and it has begun anew"
    roll_out(3)
    assert not again(), "its trace is written"
    group.ask("record", ProfileConfig(num_rollouts=3), "0", workers=[0])
    group.ask("record", None, "0", workers=[0])
    assert not again()


def test_trajectories_of_a_node_that_is_launched_again_are_others(groups: Groups) -> None:
    def rollout(number: int, *, ends: bool) -> TensorDict:
        done = torch.tensor([[False], [ends]])
        return TensorDict({"next": {"done": done}, "collector": {"traj_ids": torch.full((2,), number)}}, [2])

    whole = WholeTrajectories(1, 9, is_padded=False)
    family, group = groups(trajectories=whole, restarts=2)
    assert family.sent[0][0][3] == 0
    for number in (4, 5):
        whole.take(rollout(number, ends=False))
    lose(group, family, 0)
    for number in (4, 5):
        whole.take(rollout(number, ends=True))
    batch = whole.pop()
    assert batch is not None
    assert batch["collector", "traj_ids"].tolist() == [5] * 4, "node 0's lacks frames"
    family.begin(0)
    group.wait(lambda: group.connected, 20)
    assert family.sent[0][0][3] == IDS_PER_LAUNCH
    group.page.advance_trajectories(0, 7)  # loaded
    launch_again(group, family)
    assert family.sent[0][0][3] == 2 * IDS_PER_LAUNCH + 7


def test_a_node_that_does_not_connect_in_time_when_launched_again_is_lost(groups: Groups) -> None:
    family, group = groups(0.05, restarts=2)
    lose(group, family, 0)
    with pytest.raises(PeerLost, match=r"node 0 .* within 0\.05 s") as raised:
        group.wait(lambda: None, 20)
    assert isinstance(raised.value.__cause__, AckTimeout)
    assert len(family.launched[0]) == 3


def test_a_node_that_has_connected_in_time_is_not_late(groups: Groups) -> None:
    family, group = groups(0.2)
    launch_again(group, family)
    with pytest.raises(AckTimeout):
        group.wait(lambda: None, 0.3)
    assert group.failure is None


@pytest.mark.parametrize("total", [0, 8])
def test_nodes_run_free_although_one_is_being_launched_again(groups: Groups, total: int) -> None:
    family, group = groups(replay_buffer="a buffer")
    lose(group, family, 0)
    driver = run_free(group, total)
    let_pass(group)
    assert (driver.free_run is not None) == (total > 0), "the one that is launched again has rollouts to do"
    assert family.kinds(0) == ["build"]
    assert group.failure is None
    family.begin(0)
    wait_for(lambda: not driver.free_run)
    assert driver.frames == total


def test_a_node_that_has_finished_has_so_when_it_is_launched_again(groups: Groups) -> None:
    family, group = groups(replay_buffer="a buffer")
    family.silent.add("rollout")
    driver = run_free(group, 16)
    let_pass(group)
    assert [family.open_calls[rank] for rank in range(2)] == [["rollout"] * 2] * 2, "a node never waits for the next"
    for _ in range(2):
        family.roll_out(0)
    wait_for(lambda: driver.frames == 8)
    launch_again(group, family)
    assert driver.free_run, "the other one works"
    for _ in range(2):
        family.roll_out(1)
    wait_for(lambda: not driver.free_run)
    assert "rollout" not in family.kinds(0)


def test_a_pause_waits_for_the_nodes_that_roll_out(groups: Groups) -> None:
    family, group = groups()
    family.silent |= {"rollout", "page"}
    group.call_soon(group.request, 0, 1, False)
    before = family.kinds(0).count("page")
    for change in (group.pause, group.resume, group.pause):
        change()
        let_pass(group)
    assert family.kinds(0).count("page") == before + 1, "one at a time"
    family.say(0, "told")
    let_pass(group)
    assert not group.have_paused([0])
    assert group.have_paused([1])
    family.say(0, "paused")
    group.wait(lambda: group.have_paused([0, 1]), 20)
    group.resume()
    let_pass(group)
    assert family.kinds(0)[-1] == "resume"
    family.say(0, "paused")  # it has read what the page said before
    let_pass(group)
    assert family.kinds(0)[-1] == "resume"
    assert not group.have_paused([0])


def test_a_rollout_does_not_overtake_a_pause(groups: Groups) -> None:
    family, group = groups()
    family.silent |= {"rollout", "page"}
    for change in (group.pause, group.resume, lambda: family.say(0, "told"), group.pause):
        change()
        let_pass(group)
    assert not family.sent[0][-1][1].paused, "it has not answered that the first pause is over"
    group.call_soon(group.request, 0, IDS_PER_LAUNCH, False)
    let_pass(group)
    before = family.sent[0][: family.kinds(0).index("rollout")]
    assert [message[1].paused for message in before if message[0] == "page"][-1]


def test_a_node_that_does_not_answer_is_ended_without_a_word(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    family = Family(restarts=0)
    family.silent.add("stop")
    groups(family=family)[1].end(0.2)
    assert caplog.messages == []


def test_what_cannot_be_pickled_is_no_lost_node(groups: Groups) -> None:
    family = Family()
    with pytest.raises(TypeError, match="pickle") as raised:
        groups(replay_buffer=threading.Lock(), family=family)
    assert "buffer must pickle as a handle" in raised.value.__notes__[0]
    assert not family.launched


def test_a_node_takes_messages_by_their_numbers_in_whatever_order_they_come() -> None:
    node = Node(0)
    for number in (3, 1, 0):
        node.put(number, ("call", number, "state", dumps(())))
    found = [*node.answers()]
    node.put(2, ("page", node._page.values_for(0)))
    while len(found) < 5:
        found += node.answers()
    assert sorted(message[0] for message in found) == ["begun", "reply", "reply", "reply", "told"]
    replies = [message for message in found if message[0] == "reply"]
    assert [message[1] for message in replies] == [0, 1, 3]
    assert all(message[2] is not None for message in replies), "it has no collector yet"
    node.stop(1.0)
    assert node.answers() == [("ended",)]
    assert node.answers() == [("ended",)]
