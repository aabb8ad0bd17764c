"""A tree of relays, without sockets: what is published reaches every worker whole, the trainer knows who has it, and
nobody is lost with a relay. The machinery is in helpers/tree.py. Then what a trainer knows of workers behind relays,
where they move, have more models, or their relay has no trainer; and what workers' models hold."""

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncsync import AutoWeightSyncScheme, Bus, PartialSendError, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from asyncsync.errors import PeerLost, ProtocolError, RemoteError, SchemaMismatch
from asyncsync.protocol.relays import Verification, Verified
from asyncsync.protocol.settings import Settings
from asyncsync.relay.process import Relay
from asyncsync.weights.slab import pack
from asyncsync.wire import messages
from asyncsync.wire.messages import Relayed
from helpers.machines import EPOCH, Desk, Station, nonce
from helpers.pairs import Model, read
from helpers.tree import LAYOUT, MODEL, SETTINGS, Node, Tree, flat

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
    trainer = tree.root.trainer
    assert sorted(trainer.membership.expected()) == list(range(tree.count))
    assert len(trainer.membership.eligible([MODEL])) == tree.count
    assert trainer.progress.targeted(trainer.targets.version) == list(range(tree.count))
    assert not any(trainer.progress.why_absent(w, [MODEL]) for w in range(tree.count))
    assert len(trainer.peers) == (levels[0] if levels else tree.count)


def test_a_relay_sends_on_what_has_come_while_the_rest_is_on_its_way() -> None:
    tree = updated((1,), 1)
    tree.publish()
    order = []
    while tree.network:
        _, receiver, _, frames, _ = tree.network[0]
        instruction, _ = messages.decode(frames)
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
    above, worker = node.parent, node.worker
    tree.kill(node)
    above.trainer.process_ended(worker.worker, worker.session.nonce, "killed", tree.now)
    tree.flush(above)


def outcome_of_the_next(tree: Tree) -> Any:
    version = tree.publish()
    tree.flow()
    return tree.root.trainer.progress.of(version, range(tree.count), [MODEL])


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
    worker = tree.workers[1].worker
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

    tree.workers[3].worker.models[MODEL].check = refuse  # type: ignore[method-assign]
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
    trainer, known = between.trainer, tree.root.trainer.relayed.workers
    nonce = trainer.peers[0].nonce
    tree.kill(tree.workers[0])
    trainer.process_ended(0, nonce, "killed", tree.now)
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
    worker.worker.serial += 100_000
    tree.settle()
    tree.flow()
    tree.publish()
    assert tree.until(tree.is_everywhere, 3), tree.missing()


def asked(tree: Tree, worker: Node, *, root: bool) -> int:
    request = worker.worker.session.request(root=root)
    tree.settle()
    return request


@pytest.mark.parametrize("levels", SHAPES, ids=["no relay", "relays", "relays behind relays"])
def test_the_root_answers_what_is_the_newest_version_and_not_a_relay_that_is_cut_off(levels: tuple[int, ...]) -> None:
    tree = updated(levels, 2)
    worker = tree.workers[0]
    session, targets = worker.worker.session, worker.worker.targets
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
    assert relay.trainer.targets.published == 1
    assert worker.worker.session.answered(request, root=True)
    assert worker.worker.targets == {MODEL: 2}
    assert tree.until(tree.is_everywhere, 5), tree.missing()


def test_workers_behind_relays_answer_what_they_hold_page_by_page() -> None:
    tree = Tree([2, 2], 3)
    version = tree.publish()
    assert tree.until(tree.is_everywhere), tree.missing()
    tree.loss = 0.2
    verification = tree.root.trainer.verify(MODEL, range(tree.count), tree.now)
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
    assert tree.relays[0][0].worker.pool.slabs <= 4
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
    assert all(relay.worker.pool.slabs <= 3 for relay in relays), [relay.worker.pool.slabs for relay in relays]
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


@pytest.mark.parametrize("seed", range(6))
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
    assert len(tree.root.trainer.peers) == 10
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


# -- behind -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def relay(up: str, down: str) -> Any:
    one = Relay(up, down)
    try:
        yield one
    finally:
        await one.shutdown()


def test_a_worker_that_is_forgotten_amid_a_recount_is_no_trouble() -> None:
    tree = Tree((1,), 3, elastic=True)
    tree.publish()
    tree.flow()
    trainer, passing = tree.root.trainer, tree.relays[0][0].passing
    peer = trainer.peers[tree.relays[0][0].worker.worker]
    behind, known = trainer.relayed, [passing._reported[w] for w in range(3)]
    number = behind._relays[peer.nonce].last_report
    left = replace(known[2], applied={}, failed={}, lost="it has left")
    behind.report(peer, Relayed(trainer.membership.epoch, number + 1, False, False, (left,)), tree.now)
    tree.now += 61
    behind.report(peer, Relayed(trainer.membership.epoch, number + 2, True, True, (known[0],)), tree.now)
    behind.tick(tree.now)
    behind.report(peer, Relayed(trainer.membership.epoch, number + 3, False, False, (known[1],)), tree.now)
    assert sorted(behind.workers) == [0, 1]


def test_weights_of_its_own_are_nobodys_target_when_a_worker_has_gone_behind_a_relay() -> None:
    tree = Tree((1,), 1)
    tree.connect(tree.workers[0], tree.root)
    tree.flow()
    tree.publish()
    tree.flow()
    tree.pass_time(2)
    trainer = tree.root.trainer
    slab = tree.root.pool.acquire(LAYOUT)
    pack(slab, flat(77))
    version = trainer.publish({MODEL: slab}, [0], tree.now)
    slab.release()
    tree.numbers[trainer.membership.epoch, version] = 77
    tree.connect(tree.workers[0], tree.relays[0][0])  # before they come
    tree.settle()
    tree.flow()
    tree.pass_time(30)
    assert list(trainer.relayed.workers) == [0]
    assert not trainer.progress.of(version, [0], [MODEL]).waiting


def test_a_worker_that_has_come_back_to_a_relay_is_believed_to_be_there() -> None:
    """Although that one has never missed it, and the relay between has not either."""
    tree = Tree((2,), 1)
    tree.publish()
    tree.flow()
    for relay in reversed(tree.relays[0]):
        tree.connect(tree.workers[0], relay)
        tree.settle()
        tree.flow()
        tree.pass_time(1)
    version = tree.publish()
    tree.flow()
    assert not tree.root.trainer.progress.of(version, [0], [MODEL]).waiting


async def test_a_model_that_a_worker_behind_a_relay_registers_later_is_waited_for_and_comes(tmp_path: Path) -> None:
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    above, below = Bus(up, num_workers=1), Bus(connect=down)
    senders = {m: ZMQWeightSyncScheme(bus=above) for m in "ab"}
    receivers = {m: ZMQWeightSyncScheme(bus=below) for m in "ab"}
    models = {m: Model(0.0) for m in "ab"}
    for number, m in enumerate("ab", 1):
        senders[m].init_on_sender(model_id=m, model=Model(float(number)))
        receivers[m].init_on_receiver(m, model=models[m], worker_idx=0)

    async def connect_all(schemes: dict[str, ZMQWeightSyncScheme], pause: float) -> None:
        for scheme in schemes.values():
            await scheme.connect(timeout=8)
            await asyncio.sleep(pause)

    async with relay(up, down), above, below:
        await asyncio.gather(connect_all(senders, 0.0), connect_all(receivers, 0.3))
        assert [read(model) for model in models.values()] == [{1.0}, {2.0}]


@pytest.mark.thorough
async def test_a_worker_goes_on_from_a_relay_that_finds_no_trainer(tmp_path: Path) -> None:
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    sender = ZMQWeightSyncScheme(endpoint=up, num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(4.0))
    receiver = ZMQWeightSyncScheme(connect=f"{down},{up}")
    receiver.init_on_receiver("policy", model=(model := Model(0.0)), worker_idx=0)
    async with relay(f"ipc://{tmp_path}/nobody", down), sender, receiver:
        await asyncio.gather(sender.connect(timeout=25), receiver.connect(timeout=25))
        assert read(model) == {4.0}
        await sender.send_async(Model(5.0), timeout=10)
        assert read(model) == {5.0}


@pytest.mark.parametrize("kind", [AutoWeightSyncScheme, SharedMemWeightSyncScheme])
async def test_a_relay_passes_on_bytes_and_what_it_cannot_is_told_at_once(kind: Any, tmp_path: Path) -> None:
    """Memory of the trainer's is for its own workers."""
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    sender = kind(endpoint=up, num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(4.0))
    receiver = ZMQWeightSyncScheme(connect=down)
    receiver.init_on_receiver("policy", model=(model := Model(0.0)), worker_idx=0)
    async with relay(up, down), sender, receiver:
        found = await asyncio.gather(sender.connect(timeout=8), receiver.connect(timeout=8), return_exceptions=True)
        if kind is AutoWeightSyncScheme:
            assert (found, read(model)) == ([None, None], {4.0})
        else:
            assert isinstance(found[0], PartialSendError)
            assert "another transport" in str(found[0].failed[0])


# -- verifying --------------------------------------------------------------------------------------------------------

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


@pytest.fixture
def desk() -> Desk:
    desk = Desk(2)
    desk.join(0, 1)
    desk.publish()
    desk.finish_all()
    return desk


def ask(desk: Desk, *workers: int) -> Verification:
    return desk.machine.verify("policy", workers, desk.now)


def page(
    desk: Desk, worker: int, start: int, digests: bytes, *, of: int = 0, count: int = 3, problem: str = ""
) -> None:
    number = desk.machine.verification.number
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
    desk.machine.lost(1, nonce(1), "killed", desk.now)
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
    station.machine.answer(questions[0], 1, [A])
    assert not station.take(messages.Digests)
    station.machine.answer(questions[1], 1, [A, B])
    (first,) = station.take(messages.Digests)
    station.receive(messages.Verify(EPOCH, 2, 0, nonce(7), "policy", 1))
    (second,) = station.take(messages.Digests)
    assert (first.digests, second.digests, second.count) == (A, B, 2)  # type: ignore[attr-defined]
    assert station.machine.open_question is None
