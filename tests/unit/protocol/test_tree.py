"""A tree of relays, without sockets: what is published reaches every worker whole, the trainer knows who has it, and
nobody is lost with a relay. The machinery is in helpers/tree.py."""

import random
from dataclasses import replace
from typing import Any

import pytest

from asyncsync.errors import PeerLost, RemoteError, SchemaMismatch
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.verifying import Verified
from asyncsync.wire import codec, messages
from asyncsync.wire.messages import Relayed
from helpers.tree import MODEL, SETTINGS, Node, Tree

SHAPES = [(), (2,), (2, 2)]


def updated(levels: tuple[int, ...], workers: int, **options: Any) -> Tree:
    """Everybody has the first version."""
    tree = Tree(levels, workers, **options)
    tree.flow()
    tree.publish()
    tree.flow()
    assert tree.is_everywhere(), tree.missing()
    return tree


@pytest.mark.parametrize("levels", SHAPES, ids=["no relay", "relays", "relays behind relays"])
@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("eager", [0, 1 << 16], ids=["in chunks", "eager"])
def test_every_worker_gets_every_version_and_the_trainer_knows(
    levels: tuple[int, ...], elastic: bool, eager: int
) -> None:
    tree = updated(levels, 2, elastic=elastic, settings=replace(SETTINGS, eager_bytes=eager))
    for _ in range(2):
        tree.publish()
        tree.flow()
        assert tree.is_everywhere(), tree.missing()
    publisher = tree.root.publisher
    assert sorted(publisher.membership.expected()) == list(range(tree.count))
    assert publisher.membership.eligible(MODEL) == tree.count
    assert publisher.progress.targeted(publisher.version) == list(range(tree.count))
    assert all(publisher.progress.connected(w, [MODEL]) for w in range(tree.count))
    assert len(publisher.peers) == (levels[0] if levels else tree.count)


def test_a_relay_sends_on_what_has_come_while_the_rest_is_on_its_way() -> None:
    tree = updated((1,), 1)
    tree.publish()
    order = []
    while tree.network:
        _, receiver, _, frames, _ = tree.network[0]
        instruction, _ = codec.decode(frames)
        if isinstance(instruction, messages.Chunk):
            order.append((receiver.name, instruction.offset))
        tree.flow(1)
    below = [offset for name, offset in order if name == "worker 0"]
    assert below == [0, 40, 80, 120]
    assert order.index(("worker 0", 0)) < order.index(("relay 0.0", 80))
    tree.flow()
    assert tree.is_everywhere()


def end(tree: Tree, node: Node) -> None:
    """kill -9, and whoever is above it notices."""
    above, subscriber = node.parent, node.subscriber
    tree.kill(node)
    above.publisher.ended(subscriber.worker, subscriber.session.nonce, "killed", tree.now)
    tree.flush(above)


def outcome_of_the_next(tree: Tree) -> Any:
    version = tree.publish()
    tree.flow()
    return tree.root.publisher.progress.of(version, range(tree.count), [MODEL])


def test_a_lost_worker_is_named_and_the_others_are_not() -> None:
    tree = Tree((2,), 2)
    tree.flow()
    end(tree, tree.workers[3])
    outcome = outcome_of_the_next(tree)
    assert sorted(outcome.acked) == [0, 1, 2]
    assert isinstance(outcome.failed[3], PeerLost)
    assert "killed" in str(outcome.failed[3])
    tree.restart_worker(3)
    tree.settle()
    tree.flow()
    assert tree.is_everywhere(), tree.missing()


def test_a_failure_behind_a_relay_is_the_workers_own() -> None:
    tree = Tree((1, 1), 2)
    tree.flow()
    worker = tree.workers[1].subscriber
    worker.models[MODEL].prepare = lambda slab: 1 / 0  # type: ignore[method-assign]
    outcome = outcome_of_the_next(tree)
    assert sorted(outcome.acked) == [0]
    assert isinstance(outcome.failed[1], RemoteError)
    assert "ZeroDivisionError" in str(outcome.failed[1])
    del worker.models[MODEL].prepare
    tree.publish()
    tree.flow()
    assert tree.is_everywhere(), tree.missing()


def test_a_layout_that_one_worker_cannot_take_stops_those_of_its_relay_and_all_are_named() -> None:
    tree = Tree((2,), 2)

    def refuse(layout: object) -> None:
        raise SchemaMismatch("it does not fit")

    tree.workers[3].subscriber.models[MODEL].check = refuse  # type: ignore[method-assign]
    outcome = outcome_of_the_next(tree)
    assert sorted(outcome.acked) == [0, 1]
    assert isinstance(outcome.failed[3], SchemaMismatch)
    assert isinstance(outcome.failed[2], SchemaMismatch)
    assert "worker 3 cannot take it" in str(outcome.failed[2])


@pytest.mark.parametrize("depth", [0, 1])
def test_workers_of_a_killed_relay_are_lost_until_another_one_reports_them(depth: int) -> None:
    tree = updated((2, 2), 2)
    end(tree, tree.relays[depth][0])
    outcome = outcome_of_the_next(tree)
    assert sorted(outcome.failed) == list(range(2 if depth else 4))
    assert all(isinstance(e, PeerLost) and "its relay is lost" in str(e) for e in outcome.failed.values())
    for node in list(tree.workers if depth else tree.relays[1]):
        if node.parent is None:
            tree.connect(node, tree.relays[depth][1])  # the next one in its list
    tree.settle()
    tree.flow()
    assert tree.is_everywhere(), tree.missing()


def test_a_worker_that_was_lost_to_a_relay_and_is_back_behind_it_is_there_for_the_trainer() -> None:
    tree = Tree((1, 1), 1)
    between, below = tree.relays[0][0], tree.relays[1][0]
    version = tree.publish()
    tree.connect(tree.workers[0], between)
    tree.pass_time(20)
    publisher, known = between.publisher, tree.root.publisher.behind.workers
    nonce = publisher.peers[0].nonce
    tree.kill(tree.workers[0])
    publisher.ended(0, nonce, "killed", tree.now)
    tree.settle()
    tree.flow()
    assert known[0].lost
    tree.workers[0] = tree._worker(0, below)
    assert tree.until(lambda: not known[0].lost and known[0].applied[MODEL] == version, 5)


def test_a_worker_that_has_more_than_its_new_relay_keeps_it() -> None:
    tree = updated((2,), 1)
    behind, newest = tree.relays[0][1], tree.workers[0]
    tree.cut(behind)
    tree.publish()
    tree.flow()
    assert newest.seen[1] == 2
    tree.connect(newest, behind)
    tree.settle()
    tree.flow()
    assert newest.seen[1] == 2
    tree.connect(behind, tree.root)
    tree.settle()
    assert tree.until(tree.is_everywhere), tree.missing()


@pytest.mark.parametrize("where", ["the relay, restarted", "another relay", "the trainer"])
@pytest.mark.parametrize("eager", [0, 1 << 16], ids=["in chunks", "eager"])
def test_a_worker_that_comes_from_a_sender_with_many_updates_gets_the_next_one_soon(where: str, eager: int) -> None:
    """Each sender counts its announcements itself, and a worker ignores those that it has passed."""
    tree = Tree((2,), 2, elastic=True, settings=replace(SETTINGS, eager_bytes=eager))
    tree.flow()
    tree.cut(tree.relays[0][1])  # it has announced nothing
    for _ in range(200):
        tree.publish()
        tree.flow()
    if where == "the relay, restarted":
        tree.restart_relay(0, 0)
    tree.connect(tree.relays[0][1], tree.root)
    for worker in tree.workers[:2] if where != "the relay, restarted" else ():
        tree.connect(worker, tree.relays[0][1] if where == "another relay" else tree.root)
    tree.settle()
    assert tree.until(tree.is_everywhere, 3), tree.missing()
    for _ in range(3):
        tree.publish()
        assert tree.until(tree.is_everywhere, 3), tree.missing()


def test_what_a_worker_hears_of_its_last_sender_after_its_hello_keeps_it_from_nothing() -> None:
    """An update of the old connection was still unread: the HELLO did not count it."""
    tree = updated((1,), 1)
    worker = tree.workers[0]
    tree.connect(worker, tree.root)
    worker.subscriber.serial += 100_000
    tree.settle()
    tree.flow()
    tree.publish()
    assert tree.until(tree.is_everywhere, 3), tree.missing()


def asked(tree: Tree, worker: Node, *, root: bool) -> int:
    request = worker.subscriber.session.request(root=root)
    tree.settle()
    return request


@pytest.mark.parametrize("levels", SHAPES, ids=["no relay", "relays", "relays behind relays"])
def test_the_root_answers_what_is_the_newest_version_and_not_a_relay_that_is_cut_off(levels: tuple[int, ...]) -> None:
    tree = updated(levels, 2)
    worker = tree.workers[0]
    session, targets = worker.subscriber.session, worker.subscriber.targets
    requests = [asked(tree, worker, root=True) for _ in range(3)]
    tree.flow()
    assert session.answered(requests[-1], root=True)
    assert targets == {MODEL: 1}
    top = tree.relays[0][0] if levels else worker
    tree.cut(top)
    tree.publish()
    tree.flow()
    here, root = asked(tree, worker, root=False), asked(tree, worker, root=True)
    for _ in range(3):
        tree.pass_time(1)
        asked(tree, worker, root=True)
    assert session.answered(here) is bool(levels), "what a relay has, it serves"
    assert not session.answered(root, root=True)
    tree.connect(top, tree.root)
    tree.settle()
    last = asked(tree, worker, root=True)
    tree.flow()
    assert session.answered(last if levels else root, root=True)
    assert targets == {MODEL: 2}
    tree.restart_trainer()
    tree.settle()
    tree.publish()
    assert tree.until(tree.is_everywhere), tree.missing()
    last = asked(tree, worker, root=True)
    tree.flow()
    assert session.answered(last, root=True)


def lose(monkeypatch: pytest.MonkeyPatch, tree: Tree, kind: type[messages.Instruction]) -> None:
    """All messages of this kind, until the patch is undone."""
    send = tree._send

    def lossy(*message: Any, up: bool) -> None:
        if not isinstance(message[3], kind):
            send(*message, up=up)

    monkeypatch.setattr(tree, "_send", lossy)


def test_what_the_root_has_published_counts_before_it_has_come_to_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = updated((1,), 1)
    worker, relay = tree.workers[0], tree.relays[0][0]
    lose(monkeypatch, tree, messages.Update)
    tree.publish()
    request = asked(tree, worker, root=True)
    tree.flow()
    monkeypatch.undo()
    assert relay.publisher.published == 1
    assert worker.subscriber.session.answered(request, root=True)
    assert worker.subscriber.targets == {MODEL: 2}
    assert tree.until(tree.is_everywhere, 5), tree.missing()


def test_workers_behind_relays_answer_what_they_hold_page_by_page() -> None:
    tree = Tree([2, 2], 3)
    version = tree.publish()
    assert tree.until(tree.is_everywhere), tree.missing()
    tree.loss = 0.2
    verification = tree.root.publisher.verify(MODEL, range(tree.count), tree.now)
    tree.pass_time(4)
    tree.restart_relay(1, 0)
    tree.restart_worker(11)
    tree.loss = 0.0
    assert tree.until(lambda: not verification.waiting), verification.waiting
    assert set(verification.found) | set(verification.problems) == set(range(tree.count))
    assert set(verification.found.values()) == {Verified(version, (b"%016d" % 1,) * 2)}
    assert len(verification.found) >= tree.count - 4, "but for those that were lost meanwhile"


def test_a_lost_report_is_found_by_the_next_pong(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree((1,), 2)
    tree.flow()
    lose(monkeypatch, tree, Relayed)
    tree.publish()
    tree.flow()
    monkeypatch.undo()
    assert not tree.is_everywhere()
    assert tree.until(tree.is_everywhere, 3), tree.missing()


def test_a_slow_worker_holds_up_neither_the_others_nor_memory() -> None:
    tree = updated((1,), 3)
    tree.deaf = {tree.workers[2]}
    for _ in range(20):
        tree.publish()
        tree.flow()
    assert [w.seen[1] for w in tree.workers] == [21, 21, 1]
    assert tree.relays[0][0].subscriber.pool.slabs <= 4
    tree.deaf = set()
    assert tree.until(tree.is_everywhere), tree.missing()


OPERATIONS = {
    "publish": 8, "flow": 12, "tick": 5, "loss": 2, "restart_relay": 1, "restart_worker": 1, "move": 2, "cut": 2,
    "restart_trainer": 0.3, "connect": 4, "kill_relay": 0.5, "train": 0.5,
}  # fmt: skip


def run(seed: int, steps: int = 120) -> None:
    source = random.Random(seed)
    levels = source.choice([(2,), (2, 2), (3,), (1, 2)])
    settings = replace(SETTINGS, eager_bytes=source.choice([0, 1 << 16]))
    tree = Tree(levels, 2, seed=seed, elastic=source.random() < 0.5, settings=settings)
    for name in source.choices(list(OPERATIONS), OPERATIONS.values(), k=steps):
        step(tree, name, source)
        tree.settle()
    tree.loss = 0.0
    reconnect(tree)
    tree.publish()
    assert tree.until(tree.is_everywhere, 120), tree.missing()
    relays = [relay for level in tree.relays for relay in level]
    tree.pass_time(10)
    assert all(relay.subscriber.pool.slabs <= 3 for relay in relays), [relay.subscriber.pool.slabs for relay in relays]
    assert tree.root.pool.slabs <= 3


def step(tree: Tree, name: str, source: random.Random) -> None:
    depth = source.randrange(len(tree.relays))
    i = source.randrange(len(tree.relays[depth]))
    worker = source.randrange(tree.count)
    below = [*tree.workers, *(node for level in tree.relays for node in level)]
    if name == "publish":
        tree.publish()
    elif name == "train":
        for _ in range(150):  # so many that nobody catches up with them by one PING per second
            tree.publish()
            tree.flow()
    elif name == "flow":
        tree.flow(source.choice([1, 3, 10, 100]))
    elif name == "tick":
        tree.pass_time(source.choice([0.25, 1.0, 3.0, 7.0]))
    elif name == "loss":
        tree.loss = source.choice([0.0, 0.02, 0.2])
    elif name == "restart_relay":
        tree.restart_relay(depth, i)
    elif name == "kill_relay":
        tree.kill(tree.relays[depth][i])
    elif name == "restart_worker":
        tree.restart_worker(worker)
    elif name == "move":
        tree.connect(tree.workers[worker], source.choice([tree.root, *tree.relays[-1]]))
    elif name == "cut":
        tree.cut(source.choice(below))
    elif name == "restart_trainer":
        tree.restart_trainer()
    else:
        reconnect(tree)


def reconnect(tree: Tree) -> None:
    for depth, level in enumerate(tree.relays):
        for i, relay in enumerate(level):
            if not relay.alive:
                tree.restart_relay(depth, i)
            elif relay.parent is None:
                tree.connect(relay, tree.parent_of(depth, i))
    for i, worker in enumerate(tree.workers):
        if worker.parent is None:
            tree.connect(worker, tree.home(i))


@pytest.mark.parametrize("seed", range(15))
def test_whatever_happens_nothing_is_torn_or_older_and_everybody_converges(seed: int) -> None:
    run(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("runs", [40, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_the_same_in_many_runs(runs: int) -> None:
    for seed in range(100, 100 + runs):
        run(seed)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_ten_thousand_workers_in_a_tree_with_losses_and_restarts() -> None:
    tree = updated((10, 20), 50, seed=1, settings=Settings(chunk_bytes=40, window_bytes=80))
    assert len(tree.workers) == 10_000
    assert len(tree.root.publisher.peers) == 10
    per_update = messages_of_the_trainer(tree)
    assert per_update <= 10 * 30, "ten relays, however many workers are behind them"
    tree.loss = 0.01
    tree.publish()
    tree.restart_relay(0, 3)
    tree.restart_relay(1, 42)
    for i in range(0, 10_000, 200):
        tree.restart_worker(i)
    tree.settle()
    tree.flow()
    tree.loss = 0.0
    for restarts in (False, True):
        if restarts:
            tree.restart_trainer()
            tree.settle()
        tree.publish()
        assert tree.until(tree.is_everywhere, 30), tree.missing()


def messages_of_the_trainer(tree: Tree) -> int:
    """How many messages come to it for one update."""
    tree.publish()
    count = 0
    deliver = tree.flush

    def counted(node: Node) -> None:
        nonlocal count
        count += node is tree.root
        deliver(node)

    tree.flush = counted  # type: ignore[method-assign]
    tree.flow()
    tree.flush = deliver  # type: ignore[method-assign]
    assert tree.is_everywhere(), tree.missing()
    return count
