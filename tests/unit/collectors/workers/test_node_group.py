"""A group of nodes, of a family whose launches, losses and answers are the test's."""

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors import ProfileConfig
from asyncsync.collectors.distributed.family import NodeFamily
from asyncsync.collectors.distributed.node import Answer, Command, Node, Wishes
from asyncsync.collectors.workers.group import APART, NodeGroup
from asyncsync.collectors.whole_trajectories import WholeTrajectories
from asyncsync.collectors.workers.messages import Parcel, dumps, loads
from asyncsync.collectors.workers.group import RolloutRequest
from asyncsync.errors import AckTimeout, PeerLost
from asyncsync.runtime import loop_thread

ANSWERS: dict[str, Any] = {"build": (4, 0, set()), "stand_still": True}


class Family(NodeFamily):
    """Its nodes answer at once, from when a test lets them begin until it loses them."""

    def __init__(self, restarts: int = 1) -> None:
        super().__init__(restarts)
        self.launched: defaultdict[int, list[Future[Any]]] = defaultdict(list)
        self.sent: defaultdict[int, list[Command]] = defaultdict(list)  # to each node's last one
        self.open_calls: defaultdict[int, list[tuple[Future[Answer], str]]] = defaultdict(list)
        self.silent = {"watch"}
        self.lost: set[int] = set()

    def open(self, count: int) -> None:
        pass

    def start(self, rank: int) -> Future[Any]:
        self.launched[rank].append(Future())
        return self.launched[rank][-1]

    def begin(self, rank: int) -> None:
        self.lost.discard(rank)
        self.sent[rank].clear()
        self.launched[rank][-1].set_result(None)

    def lose(self, rank: int) -> None:
        self.lost.add(rank)
        for future, _ in self.open_calls.pop(rank):
            future.set_exception(PeerLost("the test has lost it"))

    def send(self, rank: int, number: int, command: Command) -> Future[Answer]:
        future: Future[Answer] = Future()
        self.sent[rank].append(command)
        if rank in self.lost:
            future.set_exception(PeerLost("its connection is lost"))
        elif command[0] in self.silent:
            self.open_calls[rank].append((future, command[0]))
        elif command[0] == "rollout":
            future.set_result(Answer(None, (command[1], 4, 4), Parcel.of(None)))
        else:
            value = Parcel.of(rank) if command[0] == "call" else ANSWERS.get(command[0])
            future.set_result(Answer(None, value))
        return future

    def payload(self, rank: int, result: Any) -> Any:
        return loads(result)

    def stop(self, rank: int, timeout: float) -> None:
        for future, _ in self.open_calls.pop(rank, ()):
            future.set_result(Answer(None, True))

    def name(self, rank: int) -> str:
        return f"node {rank}"

    def close(self) -> None:
        pass

    def answer(self, rank: int, kind: str, answer: Answer) -> None:
        """Answer the first of its open commands of this kind."""
        future = next(future for future, of in self.open_calls[rank] if of == kind)
        self.open_calls[rank].remove((future, kind))
        future.set_result(answer)

    def kinds(self, rank: int) -> list[str]:
        return [command[1] if command[0] == "call" else command[0] for command in self.sent[rank]]


Groups = Callable[..., tuple[Family, NodeGroup]]


@pytest.fixture
def groups() -> Iterator[Groups]:
    """Makes groups of two nodes, which have connected."""
    made: list[NodeGroup] = []

    def make(
        connect_timeout: float = 60.0, replay_buffer: Any = None, family: Any = None, restarts: int = 1, **given: Any
    ) -> tuple[Family, NodeGroup]:
        family = Family(restarts) if family is None else family
        made.append(group := NodeGroup(family, "Test", connect_timeout, **given))
        group.start([b"", b""], {}, replay_buffer)
        for rank in range(2):
            family.begin(rank)
        group.wait(lambda: group.connected, 20)
        return family, group

    yield make
    for group in made:
        group.end(1.0)


def lose(group: NodeGroup, family: Family, rank: int) -> None:
    """Until it is being launched again."""
    before = len(family.launched[rank])
    family.lose(rank)
    group.wait(lambda: len(family.launched[rank]) > before, 20)


def launch_again(group: NodeGroup, family: Family, rank: int = 0) -> None:
    """Lose it, and have it come again."""
    lose(group, family, rank)
    family.begin(rank)
    group.wait(lambda: group.connected, 20)


def ask(group: NodeGroup, name: str, *arguments: Any) -> Any:
    """What node 0 answers."""
    number = group.call(0, name, dumps(arguments))
    return group.wait(lambda: group.replies[number], 20)


def let_pass(group: NodeGroup) -> None:
    """What was to be done on the loop thread has been."""
    done: list[int] = []
    for _ in range(5):
        group.call_soon(done.append, 1)
        group.call_soon(group._notify)
    group.wait(lambda: len(done) == 5, 20)


def test_what_is_wanted_while_a_node_is_launched_again_is_no_second_loss(groups: Groups) -> None:
    family, group = groups()
    lose(group, family, 0)
    sent = len(family.sent[0])
    group.announce(3, None)
    group.pause()
    group.resume()
    group.count_version()
    group.cut(2)
    group.follow(None, 0)
    asked = group.call(0, "state", dumps(()))
    other = group.call(1, "state", dumps(()))
    assert loads(group.wait(lambda: group.replies[other], 20)[1]) == 1
    assert group.replies[asked] is None
    assert len(family.sent[0]) == sent, "nothing is sent to a node that is not there"
    assert group.incarnation(0) is None
    family.begin(0)
    assert loads(group.wait(lambda: group.replies[asked], 20)[1]) == 0
    assert group.connected
    assert group.incarnation(0) == 1
    wishes = family.sent[0][1:]
    newest = [command[1] for command in wishes if command[0] == "wishes"][-1]
    assert (newest.newest, newest.counted, newest.cut, newest.paused) == (3, 1, 2, False)
    assert family.kinds(0).index("connect") < family.kinds(0).index("state")
    assert "follow" in family.kinds(0)


def test_a_call_that_a_lost_node_has_not_answered_is_told_so(groups: Groups) -> None:
    family, group = groups()
    family.silent.add("call")
    asked = group.call(0, "state", dumps(()))
    let_pass(group)
    lose(group, family, 0)
    failure, _ = group.wait(lambda: group.replies[asked], 20)
    with pytest.raises(PeerLost, match="node 0"):
        raise failure.error("")


def test_a_node_that_is_launched_again_has_the_hooks_that_were_set_last(groups: Groups) -> None:
    family, group = groups(restarts=2)
    for name in ("pre_hook", "post_hook", "post_hook", "state"):
        ask(group, name, name)
    for _ in range(2):
        lose(group, family, 0)
        group.request(0, RolloutRequest(1, False, None))
        waits = group.call(0, "state", dumps(()))
        family.begin(0)
        group.wait(lambda number=waits: group.replies[number], 20)
        group.wait(lambda: group.results and group.results.popleft(), 20)
        after = family.kinds(0)[family.kinds(0).index("connect") + 1 :]
        assert [kind for kind in after if kind != "wishes"] == ["pre_hook", "post_hook", "state", "rollout"]


def test_a_node_that_is_launched_again_is_recorded_anew_unless_its_recording_has_ended(groups: Groups) -> None:
    family, group = groups(restarts=5)

    def roll_out(count: int) -> None:
        for _ in range(count):
            group.call_soon(group.request, 0, RolloutRequest(1, False, None))
            group.wait(lambda: group.results and group.results.popleft(), 20)

    def again() -> bool:
        launch_again(group, family)
        ask(group, "state")
        return "profile" in family.kinds(0)

    roll_out(5)
    assert not again()
    ask(group, "profile", ProfileConfig(num_rollouts=3), "0")
    roll_out(2)
    assert again()
    roll_out(2)
    assert again(), "what was recorded is lost, and it has begun anew"
    roll_out(3)
    assert not again(), "its trace is written"
    ask(group, "profile", ProfileConfig(num_rollouts=3), "0")
    ask(group, "profile", None, "0")
    assert not again()


def test_trajectories_of_a_node_that_is_launched_again_are_others(groups: Groups) -> None:
    def rollout(number: int, *, ends: bool) -> TensorDict:
        done = torch.tensor([[False], [ends]])
        return TensorDict({"next": {"done": done}, "collector": {"traj_ids": torch.full((2,), number)}}, [2])

    whole = WholeTrajectories(1, 9, is_padded=False)
    family, group = groups(trajectories=whole, restarts=2)
    assert family.sent[0][0][-1] == 0
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
    assert family.sent[0][0][-1] == APART
    group.trajectory_pool().advance(0, 7)  # loaded
    launch_again(group, family)
    assert family.sent[0][0][-1] == 2 * APART + 7


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
    sent = len(family.sent[0])
    group.run_free(total, 0)
    group.wait(lambda: group.states[1] == "finished", 20)
    assert len(family.sent[0]) == sent
    assert group.failure is None
    family.begin(0)
    while "connect" not in family.kinds(0):
        let_pass(group)
    let_pass(group)
    group.wait(lambda: group.finished, 20)


def test_a_node_that_has_finished_has_so_when_it_is_launched_again(groups: Groups) -> None:
    family, group = groups(replay_buffer="a buffer")
    family.silent.add("rollout")
    group.run_free(8, 0)
    let_pass(group)
    family.answer(0, "rollout", Answer(None, (0, 8, 8)))
    group.wait(lambda: group.states[0] == "finished", 20)
    launch_again(group, family)
    assert not group.finished, "the other one works"
    family.answer(1, "rollout", Answer(None, (0, 8, 8)))
    group.wait(lambda: group.finished, 20)
    assert "rollout" not in family.kinds(0)


def test_an_answer_to_an_earlier_pause_is_none_to_this_one(groups: Groups) -> None:
    family, group = groups()
    family.silent |= {"rollout", "stand_still"}
    group.call_soon(group.request, 0, RolloutRequest(1, False, None))
    group.pause()
    group.resume()
    group.pause()
    let_pass(group)
    assert family.kinds(0)[-3:] == ["stand_still", "wishes", "stand_still"]
    family.answer(0, "stand_still", Answer(None, True))
    let_pass(group)
    assert not group.stand_still([0])
    family.answer(0, "stand_still", Answer(None, True))
    group.wait(lambda: group.stand_still([0]), 20)


def test_a_pause_waits_for_a_node_that_has_run_free_before(groups: Groups) -> None:
    family, group = groups(replay_buffer="a buffer")
    group.run_free(4, 0)
    group.wait(lambda: group.finished, 20)
    family.silent |= {"rollout", "stand_still"}
    group.call_soon(group.request, 0, RolloutRequest(1, False, None))
    group.pause()
    let_pass(group)
    assert not group.stand_still([0, 1])
    family.answer(0, "stand_still", Answer(None, True))
    group.wait(lambda: group.stand_still([0, 1]), 20)


def test_a_node_that_does_not_answer_is_ended_without_a_word(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    class Stopped(Family):
        def stop(self, rank: int, timeout: float) -> None:
            for future, _ in self.open_calls.pop(rank, ()):
                future.set_exception(PeerLost("it was killed"))

    family = Stopped(restarts=0)
    family.silent.add("stop")
    groups(family=family)[1].end(0.2)
    while loop_thread._current is not None:
        time.sleep(0.001)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_what_cannot_be_pickled_is_no_lost_node(groups: Groups) -> None:
    family = Family()
    with pytest.raises(TypeError, match="pickle") as raised:
        groups(replay_buffer=threading.Lock(), family=family)
    assert "buffer must pickle as a handle" in raised.value.__notes__[0]
    assert not family.launched


def test_a_command_that_cannot_be_sent_is_not_counted(groups: Groups) -> None:
    class Choosy(Family):
        numbers: ClassVar[list[int]] = []

        def send(self, rank: int, number: int, command: Command) -> Future[Answer]:
            if command == ("call", "unsent"):
                raise TypeError("cannot be pickled")
            self.numbers.append(number)
            return super().send(rank, number, command)

    family = Choosy()
    family.launch(0)
    family.submit(0, ("call", "one"))
    with pytest.raises(TypeError):
        family.submit(0, ("call", "unsent"))
    family.submit(0, ("call", "two"))
    family.launch(0)
    family.submit(0, ("call", "one"))
    assert family.numbers == [0, 1, 0]


def test_a_node_carries_commands_out_by_their_numbers_in_whatever_order_they_come() -> None:
    node = Node(0)
    done: list[int] = []
    futures = {}
    for number in (3, 1, 2, 0):
        assert not done
        command = ("wishes", Wishes(1)) if number == 2 else ("call", "state", dumps(()))
        futures[number] = node.carry_out(number, command)
        futures[number].add_done_callback(lambda _, number=number: done.append(number))
        if number == 2:
            assert futures[2].result(20) == Answer(None), "a signal waits for none"
            done.clear()
    for number in (0, 1, 3):
        assert futures[number].result(20).failure is not None, "it has no collector yet"
    assert done == [0, 1, 3]
    node.stop(1.0)
    assert node.carry_out(4, ("call", "state", dumps(()))).result(20).failure is not None
