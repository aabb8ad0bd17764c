"""Trainers, workers and a faulty network in one thread: the two state machines, without sockets, under a virtual clock.

    simulation = Simulation(World(workers=2, models=("policy", "critic")))
    simulation.do("publish", 0, 0)
    simulation.do("flow", 9, 0)
    simulation.converge()                    # messages flow again

Every tensor that is published holds one number of its own. So a look at a worker's model tells whose weights these are,
and whether they are torn. After each operation everything that must always hold is checked.

An operation is a name and two numbers that mean something in every state ("the message at this position, modulo how
many there are"), so any list of operations is a run, and so is every part of it: hypothesis can shrink it.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch

from asyncsync.bus.link import TICK
from asyncsync.errors import PeerLost, ProtocolError, SchemaMismatch
from asyncsync.protocol.membership import ALL_SUBSCRIBERS
from asyncsync.protocol.relays import Verification
from asyncsync.weights.slab import Slab, pack
from asyncsync.wire import messages
from asyncsync.wire.messages import encode_metadata
from helpers.machines import SHAPES, flat
from helpers.oracle import Oracle, digest_of
from helpers.simulated import (
    DTYPES,
    Connection,
    Message,
    Record,
    SimulatedSideChannel,
    TrainerProcess,
    WorkerProcess,
    World,
    layout_of,
)
from helpers.simulated import (
    draw_world as draw_world,
)

STEPS = (0.1, 0.3, 1.0, 2.0, 5.0, 11.0)
ENOUGH = 90.0  # virtual seconds: several rounds of everything that is repeated

# What a run may do, and how often.
OPERATIONS = {
    "rest": 0,  # what hypothesis shrinks the others to
    "flow": 12,
    "deliver": 8,
    "drop": 3,
    "duplicate": 3,
    "delay": 4,
    "late": 3,
    "reconnect": 2,
    "corrupt": 1,
    "tick": 6,
    "publish": 8,
    "train": 3,
    "steady": 3,
    "publish_some": 3,
    "publish_each": 3,
    "stage": 4,
    "commit": 5,
    "abandon": 1,
    "pack": 6,
    "hold": 4,
    "take": 2,
    "give": 3,
    "begin": 3,
    "finish": 2,
    "fetch": 2,
    "mismatch": 1,
    "flaky": 1,
    "register": 1,
    "request": 1,
    "disconnect": 2,
    "connect": 5,
    "subscribe": 3,
    "crash": 1,
    "spawn": 1,
    "leave": 2,
    "read": 3,
    "fork": 1,
    "notice": 1,
    "assemble": 1,
    "restart_trainer": 1,
    "verify": 2,
}
ALWAYS = {"flow", "publish", "tick"}


def version_is_packed_first(version: int) -> bool:
    return version % 3 == 0


def draw_operations(source: random.Random, count: int) -> list[tuple[str, int, int]]:
    """Some of the kinds only, others in each run: what is rare in all runs becomes frequent in some."""
    weights = [w if n in ALWAYS or source.random() < 0.5 else 0 for n, w in OPERATIONS.items()]
    names = source.choices(list(OPERATIONS), weights, k=count)
    return [(name, source.randrange(64), source.randrange(64)) for name in names]


class Simulation(Oracle):
    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 100.0
        self.trainers: list[TrainerProcess] = []
        self.workers: list[WorkerProcess] = []
        self.connections: list[Connection] = []
        self.network: list[Message] = []
        self.delayed: list[Message] = []
        self.records: dict[int, Record] = {}
        self.images: dict[int, bytes] = {}
        self.owners: dict[int, int | None] = {}
        self.dropped: Counter[str] = Counter()
        self.broadcast = 0  # messages that came by subscription
        self.taken = 0  # updates that a worker took on the fast path
        self.untold: list[WorkerProcess] = []
        self.trainer = self._start_trainer(1000)
        for index in range(world.workers):
            self._start_worker(index)
        for worker in self.workers:
            self._connect(worker, self.trainer)
        self._settle()

    # -- operations -------------------------------------------------------------------------------------------------

    def run(self, operations: Iterable[tuple[str, int, int]]) -> None:
        for name, a, b in operations:
            self.do(name, a, b)

    def do(self, name: str, a: int = 0, b: int = 0) -> None:
        getattr(self, f"_do_{name}")(a, b)
        self._settle()
        self.check()

    def _do_rest(self, a: int, b: int) -> None:
        pass

    def _do_flow(self, a: int, b: int) -> None:
        """Messages arrive in order, one after the other."""
        for _ in range(1 + a % 16):
            if not self.network:
                break
            self._deliver(self.network.pop(0))
            self._settle()

    def _do_deliver(self, a: int, b: int) -> None:
        """Some message arrives before others."""
        if self.network:
            self._deliver(self.network.pop(a % len(self.network)))

    def _do_drop(self, a: int, b: int) -> None:
        if self.network:
            start = a % len(self.network)
            del self.network[start : start + 1 + b % 3]

    def _do_delay(self, a: int, b: int) -> None:
        """Some messages, one after the other, are held up somewhere."""
        if self.network:
            start = a % len(self.network)
            self.delayed += self.network[start : start + 1 + b % 8]
            del self.network[start : start + 1 + b % 8]

    def _do_late(self, a: int, b: int) -> None:
        """What was held up arrives, before everything else."""
        self.network = [*self.delayed, *self.network]
        self.delayed = []

    def _do_duplicate(self, a: int, b: int) -> None:
        if self.network:
            message = self.network[a % len(self.network)]
            self.network.insert(b % (len(self.network) + 1), message)

    def _do_corrupt(self, a: int, b: int) -> None:
        """A bit flips. Only a checksum can notice."""
        if self.network and self.world.checksum:
            message = self.network[a % len(self.network)]
            kind = type(messages.decode(message.frames)[0])
            frames = message.frames[1:] if kind is messages.Cast else message.frames
            is_update = kind in (messages.Update, messages.Cast)
            is_chunk = kind is messages.Chunk and len(message.frames) > 1
            if is_chunk or (is_update and len(frames) > 2 and frames[-1]):
                damaged = bytearray(message.frames[-1])
                damaged[b % len(damaged)] ^= 1 << b % 8
                message.frames = [*message.frames[:-1], bytes(damaged)]

    def _do_tick(self, a: int, b: int) -> None:
        self._advance_to(self.now + STEPS[a % len(STEPS)])

    def _do_publish(self, a: int, b: int) -> None:
        """For everybody: one model, or all of them together."""
        self._publish(self._some_models(a), None, self._dtype(b))

    def _do_train(self, a: int, b: int) -> None:
        """A few turns of a training loop: everything arrives, is applied, and the same model is published again."""
        models = self._some_models(a)
        for _ in range(2 + b % 3):
            for _ in range(100):
                self.trainer.pack(64)
                if self.network:
                    self._deliver(self.network.pop(0))
                self._settle()
                if not self.network:
                    break
            self._publish(models)

    def _do_steady(self, a: int, b: int) -> None:
        """Some turns of a training loop with one model, each begun when everybody has the last; in the end, not all
        has arrived, or somebody could not be told."""
        trainer, world = self.trainer, self.world
        models = sorted(world.lent or (world.models if world.eager and not world.descriptors else ()))
        if not models or world.fanout or world.checksum:
            return
        model = models[a % len(models)]
        self._do_assemble(a, b)
        for _ in range(2):
            self._flow_up_and_down()
            self._publish([model], copied=True)
        self._flow_up_and_down()
        routes = {c.route: SimulatedSideChannel(c, self.network, broken=False) for c in self.connections}
        if (fast := trainer.begin_fast_path(model, routes)) is None:
            return
        turns = b % 8
        for turn in range(1 + turns):
            if turn == turns and a % 3 == 0:
                next(reversed(routes.values())).broken = True
            if (a + turn) % 7 == 0:
                self._do_hold(b, 0)
            number = len(self.records) + 1
            record = Record(trainer.version + 1, trainer, self.now, {model: {None: number}}, {number: torch.float32})
            if self.network or fast.waiting or not fast.publish(flat(number), self.now):
                break
            trainer.records.append(record)
            self.records[number] = record
            self.images[number] = bytes(fast._newest.memory)
            if not fast.announce():
                break
            if turn < turns:
                self._flow_up_and_down()
                if trainer.fast_path is not fast:
                    return
        for _ in range(a % 8):
            if self.network:
                self._deliver(self.network.pop(b % len(self.network)))
                self._settle_workers()

    def _flow_up_and_down(self) -> None:
        """All that is on its way arrives."""
        for _ in range(100):
            if not self.network:
                return
            self._deliver(self.network.pop(0))
            self._settle_workers()
            if self.trainer.fast_path is None:
                self._settle()

    def _do_publish_some(self, a: int, b: int) -> None:
        """For some worker_ids."""
        self._publish(self._some_models(a), self._some_workers(a // 2), self._dtype(b))

    def _do_publish_each(self, a: int, b: int) -> None:
        """To each its own."""
        self._publish(self._some_models(a), self._some_workers(a // 2), self._dtype(b), each=True)

    def _do_stage(self, a: int, b: int) -> None:
        """For everybody, or for some; nobody applies it yet."""
        workers = self._some_workers(a // 2) if b % 5 == 0 else None
        self._publish(self._some_models(a), workers, self._dtype(b), stages=True)

    def _do_commit(self, a: int, b: int) -> None:
        staged = self.trainer.machine.targets.staged
        if staged is not None and self.trainer.usable:
            self._record_staged().staged = False
            self.trainer.pack()
            self.trainer.machine.commit(staged.version)

    def _do_abandon(self, a: int, b: int) -> None:
        self._dropped()
        if self.trainer.usable:
            self.trainer.machine.drop()

    def _record_staged(self) -> Record:
        return self.trainer.records[self.trainer.machine.targets.staged.version - 1]

    def _dropped(self) -> None:
        """What is staged will not be applied."""
        if self.trainer.machine.targets.staged is not None and self.trainer.usable:
            self._record_staged().rejected = True

    def _do_pack(self, a: int, b: int) -> None:
        """The trainer has packed some more of what it has published already."""
        self.trainer.pack(1 + a)
        self._settle()

    def _do_hold(self, a: int, b: int) -> None:
        """Somebody reads the model (or no longer)."""
        worker = self._pick(a)
        worker.held = not worker.held

    def _do_begin(self, a: int, b: int) -> None:
        """The gate applies in another thread; the worker's loop hears of it later."""
        self._begin(self._pick(a))

    def _do_finish(self, a: int, b: int) -> None:
        worker = self._pick(a)
        if worker.running is not None:
            self._finish(worker)

    def _do_take(self, a: int, b: int) -> None:
        """The user's code takes an update, to apply it by itself, or once more what it has applied."""
        worker = self._pick(a)
        if worker.active and worker.running is None and worker.taken is None:
            model_id = worker.machine.session.local(self._some_models(b)[0])
            version = worker.machine.holdings.version(model_id) if b % 4 == 1 else None
            if worker.machine.has(model_id, version):
                worker.taken = worker.machine.take(model_id, version)

    def _do_give(self, a: int, b: int) -> None:
        """It has applied it, or could not."""
        worker = self._pick(a)
        if worker.taken is not None:
            self._give(worker, fails=b % 4 == 0)

    def _give(self, worker: WorkerProcess, *, fails: bool = False) -> None:
        taken, worker.taken = worker.taken, None
        if fails:
            worker.failures += 1
            worker.machine.give_back(taken, RuntimeError("the user's code has failed"))
            return
        taken.staging.run()
        self._observe(worker)
        worker.machine.give_back(taken)

    def _do_fetch(self, a: int, b: int) -> None:
        worker = self._pick(a)
        if worker.fetches:
            self._fetch(worker, *worker.fetches.pop(b % len(worker.fetches)))

    def _do_mismatch(self, a: int, b: int) -> None:
        """The user has put something else into the model when the update wants to go in."""
        worker = self._pick(a)
        if worker.running is not None or worker.taken is not None or not worker.machine.staged:
            return
        staging = worker.machine.staged[0]
        model = worker.models[sorted(staging.parts)[b % len(staging.parts)]]
        own, model["a"] = model["a"], torch.zeros(3)
        try:
            staging.run()
        except SchemaMismatch as error:
            worker.failures += 1
            worker.machine.failed(staging, error)
        else:
            raise AssertionError(f"{worker} applied an update to a model that cannot take it")
        finally:
            model["a"] = own
        self._observe(worker)

    def _do_flaky(self, a: int, b: int) -> None:
        worker = self._pick(a)
        worker.failures += 1
        worker.bindings[sorted(worker.bindings)[b % len(worker.bindings)]].fails = 1

    def _do_register(self, a: int, b: int) -> None:
        """A worker takes part in one more model."""
        self._register_rest(self._pick(a))

    def _do_request(self, a: int, b: int) -> None:
        worker = self._pick(a)
        if worker.active:
            worker.machine.session.request()

    def _do_disconnect(self, a: int, b: int) -> None:
        """A connection breaks; what is under way may still arrive, late."""
        worker = self._pick(a)
        self._disconnect(worker)
        if b % 2:
            self.network = [m for m in self.network if m.connection.worker is not worker]

    def _do_connect(self, a: int, b: int) -> None:
        """To the trainer of today, sometimes to one of the past that is still there."""
        worker = self._pick(a)
        others = [t for t in self.trainers if t.alive and t is not self.trainer]
        trainer = others[b % len(others)] if others and b % 4 == 0 else self.trainer
        if worker.active and (worker.connection is None or b % 8 == 0):
            self._disconnect(worker)
            self._connect(worker, trainer)

    def _do_subscribe(self, a: int, b: int) -> None:
        """A worker subscribes to what its trainer sends to all, or does so no longer; the trainer knows, or not yet."""
        worker = self._pick(a)
        connection = worker.connection
        if not self.world.fanout or connection is None:
            return
        worker.hears = None if b % 4 == 0 else Connection(b"", worker, connection.trainer)
        subscribed, nonce = connection.trainer.machine.fanout.subscribed, worker.machine.session.nonce
        if b // 4 % 3:
            (subscribed.add if worker.hears else subscribed.discard)(nonce)

    def _do_reconnect(self, a: int, b: int) -> None:
        """A connection breaks and is there again at once; what was under way arrives later."""
        worker = self._pick(a)
        if worker.connection is not None and worker.active:
            trainer = worker.connection.trainer
            self._disconnect(worker)
            self._connect(worker, trainer)

    def _do_crash(self, a: int, b: int) -> None:
        """kill -9, and maybe a new incarnation at once."""
        worker = self._pick(a)
        self._disconnect(worker)
        self._kill(worker)
        if b % 2:
            self._connect(self._start_worker(worker.index), self.trainer)

    def _do_spawn(self, a: int, b: int) -> None:
        """A new incarnation, while the old one is still there."""
        if sum(w.active for w in self.workers) < 2 * self.world.workers:
            self._connect(self._start_worker(a % self.world.workers), self.trainer)

    def _do_leave(self, a: int, b: int) -> None:
        """A worker's scheme is shut down, maybe with Parameters left in slots; its process ends then, or goes on."""
        worker = self._pick(a)
        if b % 4 == 0 and worker.running_on:
            self._leave(worker, reads=b // 4 % 2 == 0)
            if b // 8 % 4 == 0:
                self._kill(worker)

    def _do_read(self, a: int, b: int) -> None:
        """A reader begins to copy what a worker holds, or has done so."""
        self._use("reader", self._pick(a), b)

    def _do_fork(self, a: int, b: int) -> None:
        """A child that reads what its parent has mapped, until it has its own copy."""
        self._use("fork", self._pick(a), b)

    def _do_notice(self, a: int, b: int) -> None:
        """The operating system tells the trainer which of its local workers have died."""
        for worker in self.workers:
            if not worker.alive and self.world.is_beside(worker.index):
                nonce = worker.machine.session.nonce
                for trainer in self.trainers:
                    if trainer.alive:
                        trainer.machine.process_ended(worker.index, nonce, "its process has ended", self.now)

    def _do_assemble(self, a: int, b: int) -> None:
        """The trainer's connect() has returned."""
        machine = self.trainer.machine
        if not any(machine.progress.why_absent(w, self.world.models) for w in range(self.world.workers)):
            for model in self.world.models:
                machine.mark_assembled(model)

    def _do_restart_trainer(self, a: int, b: int) -> None:
        """A new trainer; the clock may have gone backwards; the old one has crashed, said BYE, or lingers."""
        old = self.trainer
        if b % 8 == 0:
            old.machine.close()
            self._settle()
        if b % 4 < 3:
            self._end_trainer(old)
        count = len(self.trainers)
        self.trainer = self._start_trainer(1000 + 10 * count if a % 3 else 1000 - 10 * count)

    def _do_verify(self, a: int, b: int) -> None:
        """The trainer asks some workers, or all, what their models hold."""
        workers = self._some_workers(a // 2) if b % 3 else range(self.world.workers)
        if self.trainer.usable:
            self.trainer.machine.verify(self.world.topic(self._some_models(a)[0]), workers, self.now)

    # -- messages flow again ----------------------------------------------------------------------------------------

    def converge(self) -> None:
        """From now on nothing fails: everybody must get what it should have, and the trainer must know."""
        self._do_late(0, 0)
        for worker in self.workers:
            worker.held = False
            for use in list(worker.uses):
                worker.end_use(use)
            if worker.left and worker.alive:
                self._kill(worker)  # its BYE may have been lost
            if worker.running is not None:
                self._finish(worker)
            if worker.taken is not None:
                self._give(worker)
            for binding in worker.bindings.values():
                binding.fails = 0
        for trainer in self.trainers:
            if trainer is not self.trainer:
                self._end_trainer(trainer)
        self._until(self._arrived, "the targets of before")
        self._until(self._returned, "what was lent before")
        self._check_progress()
        if self.trainer.machine.targets.staged is not None:
            self._until(self._held, "what is staged")
            self._do_commit(0, 0)
            self._until(self._arrived, "what was staged")
        self._publish(self.world.models)
        self._until(self._arrived, "a publication for everybody")
        self._until(self._returned, "what was lent")
        self._until(self._let_go, "what was dropped")
        self._check_progress()
        version = self.trainer.machine.targets.version
        progress = self.trainer.machine.progress.of(version, self.trainer.machine.progress.targeted(version))
        assert not progress.failed, progress.failed
        assert set(progress.acked) == set(range(self.world.workers)), progress
        for model in self.world.models:
            verification = self.trainer.machine.verify(self.world.topic(model), range(self.world.workers), self.now)
            self._until(partial(self._verified, verification), "a verification")
            assert not verification.problems, verification.problems
            assert {found.version for found in verification.found.values()} == {version}, verification.found

    def _until(self, done: Callable[[], str | None], what: str) -> None:
        self._need_trainer()
        self.trainer.pack()
        deadline = self.now + ENOUGH
        while True:
            self._repair()
            self._drain()
            self.check()
            problem = done()
            if problem is None:
                return
            assert self.now < deadline, f"not converged within {ENOUGH:g} s to {what}: {problem}"
            self._advance_to(self.now + TICK)

    def _repair(self) -> None:
        """Whoever has no connection gets one, whoever was turned away is started anew, and deaths are noticed."""
        self._need_trainer()
        for index in range(self.world.workers):
            if not any(w.active for w in self.workers if w.index == index):
                self._start_worker(index)
        for worker in self.workers:
            if worker.running_on and not worker.active:  # superseded, or told that the trainer is no more
                said = worker.connection is not None
                self._leave(worker, reads=False)
                if not said:
                    self._kill(worker)
            if worker.active:
                self._register_rest(worker)
                if (
                    worker.machine.session.nonce in self.trainer.machine.membership._superseded
                    and worker not in self.untold
                ):
                    self._disconnect(worker)  # its BYE was lost, and a connection that loses something breaks
                    self.untold.append(worker)
                if worker.connection is None:
                    self._connect(worker, self.trainer)
                if self.world.fanout and (worker.hears is None or worker.hears.trainer is not self.trainer):
                    worker.hears = Connection(b"", worker, self.trainer)
                if self.world.fanout:
                    self.trainer.machine.fanout.subscribed.add(worker.machine.session.nonce)
        self._do_notice(0, 0)
        self._settle()

    def _need_trainer(self) -> None:
        while not self.trainer.usable:
            self._end_trainer(self.trainer)
            self.trainer = self._start_trainer(1000 + 10 * len(self.trainers))

    def _drain(self) -> None:
        budget = 5000
        while self.network or any(trainer.machine.to_encode for trainer in self.trainers):
            if self.network:
                self._deliver(self.network.pop(0))
            self._settle()
            budget -= 1
            assert budget, "the machines chatter without end"

    def _serving(self, index: int) -> WorkerProcess | None:
        """The incarnation that the trainer takes for this worker_idx."""
        peer = self.trainer.machine.peers.get(index)
        own = (w for w in self.workers if peer is not None and w.machine.session.nonce == peer.nonce and w.active)
        return next(own, None)

    def _expected(self, worker: WorkerProcess, model: str) -> Record | None:
        """What this worker should have, from the publications alone."""
        topic = self.world.topic(model)
        meant = [r for r in self.trainer.records if r.is_meant and r.number_for(worker.index, topic) is not None]
        return max(meant, key=lambda record: record.version, default=None)

    def _arrived(self) -> str | None:
        """None if everybody has what it should have or is known to be unable to; else who does not."""
        machine = self.trainer.machine
        if not self.trainer.usable:
            return f"trainer {self.trainer.number} has come to its end"
        for index in range(self.world.workers):
            worker = self._serving(index)
            if worker is None:
                return f"no incarnation of worker {index} is connected"
            if worker.models.keys() != set(self.world.names):
                return f"{worker} is still to register"
            if not machine.peers[index].ready:
                return f"{worker} is not ready"
            for model in worker.models:
                record = self._expected(worker, model)
                if record is None:
                    continue
                topic = self.world.topic(model)
                wanted = record.number_for(index, topic)
                progress = machine.progress.of(record.version, [index], [topic])
                if worker.contents[model] == wanted:
                    if index not in progress.acked:
                        return f"{worker} has {record}, and the trainer does not know: {progress}"
                elif index not in progress.failed:
                    return f"{worker} has {worker.contents} instead of {record}: {progress}"
                else:
                    # An elastic trainer forgets a worker that is lost, and what was for that worker alone.
                    forgotten = self.world.elastic and isinstance(progress.failed[index], PeerLost)
                    excused = not record.fits(worker) or worker.failures or forgotten
                    assert excused, f"{worker} has {worker.contents} instead of {record}: {progress.failed}"
        return None

    def _held(self) -> str | None:
        """None if everybody holds what is staged, or cannot."""
        machine = self.trainer.machine
        if (staged := machine.targets.staged) is None:
            return None
        record = self._record_staged()
        for index in range(self.world.workers):
            worker = self._serving(index)
            if worker is None or worker.models.keys() != set(self.world.names):
                return f"worker {index} is still to come"
            if all(record.number_for(index, model) is None for model in record.numbers):
                continue
            outcome = machine.progress.of(staged.version, [index], staged=True)
            if outcome.waiting:
                return f"{worker} is still to hold {record}"
            held = worker.machine.held
            if outcome.acked:
                assert held is not None, f"{worker} does not hold {record}, as the trainer believes"
                assert set(held.versions.values()) == {staged.version}
            else:
                assert not record.fits(worker) or worker.failures, f"{worker} does not hold {record}: {outcome.failed}"
        return None

    def _let_go(self) -> str | None:
        """None if nobody holds anything: nothing is staged."""
        return next((f"{w} holds {w.machine.held.versions}" for w in self.workers if w.active and w.machine.held), None)

    def _returned(self) -> str | None:
        """None if nothing is lent but what workers use, and nothing is in use but that and the targets."""
        machine = self.trainer.machine
        for nonce, leases in machine.leases.of.items():
            worker = next(w for w in self.workers if w.machine.session.nonce == nonce)
            used = {key for key, slab in worker.machine.holdings.leased.items() if slab.is_used}
            for key in leases.slabs:
                if not worker.active:
                    return f"{key} is still lent to {worker}, which is gone"
                if key not in used:
                    return f"{key} is still lent to {worker}, which uses {used}"
        return None

    def _verified(self, verification: Verification) -> str | None:
        return f"{verification.waiting} are still to answer" if verification.waiting else None

    def _check_progress(self) -> None:
        machine = self.trainer.machine
        for version in range(1, machine.targets.version + 1):
            waiting = machine.progress.of(version, machine.progress.targeted(version)).waiting
            assert not waiting, f"version {version} waits for {waiting}"

    # -- the machinery ----------------------------------------------------------------------------------------------

    def _start_trainer(self, start: int) -> TrainerProcess:
        trainer = TrainerProcess(len(self.trainers) + 1, start, self.world)
        self.trainers.append(trainer)
        return trainer

    def _end_trainer(self, trainer: TrainerProcess) -> None:
        trainer.alive = False
        for connection in self.connections:
            if connection.trainer is trainer and connection.open:
                self._disconnect(connection.worker)

    def _start_worker(self, index: int) -> WorkerProcess:
        worker = WorkerProcess(index, len(self.workers) + 1, self.world, self.now)
        self.workers.append(worker)
        # Some register their second model only later.
        for model in self.world.names[: 1 if len(self.workers) % 4 == 0 else None]:
            worker.register(model, self.now)
        return worker

    def _register_rest(self, worker: WorkerProcess) -> None:
        for model in self.world.names:
            if worker.active and model not in worker.models:
                worker.late.add(model)
                worker.register(model, self.now)

    def _connect(self, worker: WorkerProcess, trainer: TrainerProcess) -> None:
        if trainer.alive and worker.active:
            connection = Connection(b"route %d" % len(self.connections), worker, trainer)
            self.connections.append(connection)
            worker.connection, worker.trainer = connection, trainer
            worker.machine.connected(self.now)

    def _disconnect(self, worker: WorkerProcess) -> None:
        if worker.connection is not None:
            worker.connection.open = False
            worker.connection = None
            worker.machine.disconnected()

    def _kill(self, worker: WorkerProcess) -> None:
        worker.alive = False
        worker.uses = []
        worker.running = worker.taken = None  # what it read may be written again

    def _leave(self, worker: WorkerProcess, *, reads: bool) -> None:
        """As a receiver's shutdown does it."""
        machine = worker.machine
        if worker.running is not None:
            self._finish(worker)
        if worker.taken is not None:
            self._give(worker)
        machine.leave()
        for use in list(worker.uses):
            worker.end_use(use)
        if reads:
            for model, (epoch, version, slab) in machine.holdings.updates.items():
                if slab.leased and (epoch == machine.session.epoch or worker.connection is None):
                    worker.use("model", slab, self._number(worker, epoch, version, model))
        machine.bye("done", reads=reads)
        self._settle()
        worker.left = True
        self._disconnect(worker)
        machine.close()

    def _use(self, kind: str, worker: WorkerProcess, b: int) -> None:
        uses = [use for use in worker.uses if use.kind == kind]
        if uses and b % 2:
            worker.end_use(uses[b // 2 % len(uses)])
            return
        lent = [(m, *held) for m, held in worker.machine.holdings.updates.items() if held[2].leased]
        if lent and worker.active:
            model, epoch, version, slab = lent[b // 2 % len(lent)]
            worker.use(kind, slab, self._number(worker, epoch, version, model))

    def _advance_to(self, now: float) -> None:
        self.now = now
        for trainer in self.trainers:
            if trainer.alive:
                trainer.machine.tick(self.now)
                # Nobody waits for the answer of a worker that has been silent, also if it speaks again.
                silent = {peer.nonce for peer in trainer.machine.peers.values() if peer.slow or peer.lost}
                for record in trainer.records:
                    record.objectors = [o for o in record.objectors if o.machine.session.nonce not in silent]
        for worker in self.workers:
            if worker.running_on:
                worker.machine.tick(self.now)
        self._settle()

    def _deliver(self, message: Message) -> None:
        connection = message.connection
        try:
            instruction, payload = messages.decode(message.frames)
            if message.source and message.upward:
                if connection.trainer.alive:
                    sharer = connection.trainer.sharers[message.source]
                    sharer.epoch = connection.trainer.epoch  # the coordinator has told
                    sharer.receive(connection.route, instruction)
            elif message.source:
                if connection.worker.running_on:
                    connection.worker.machine.receive_share(message.source, instruction, payload, self.now)
            elif message.upward:
                if connection.trainer.alive and not self._answers(message):
                    connection.trainer.machine.receive(connection.route, instruction, payload, self.now)
            elif connection.worker.running_on and not self._takes(connection, instruction, message.frames):
                connection.worker.machine.receive(instruction, payload, self.now)
                if type(instruction) is messages.Again:
                    connection.worker.again = instruction.serial
        except ProtocolError as error:
            self.dropped[str(error).partition(":")[0]] += 1

    def _answers(self, message: Message) -> bool:
        """Whether a fast path has waited for just this."""
        fast = message.connection.trainer.fast_path
        if fast is None:
            return False
        peers = [peer for peer in fast.waiting if peer.route == message.connection.route]
        return len(message.frames) == 1 and any(fast.answer(peer, message.frames[0], self.now) for peer in peers)

    def _takes(self, connection: Connection, instruction: messages.Instruction, frames: list[bytes]) -> bool:
        """Whether a worker takes this on the fast path: it has applied it then, and answers."""
        worker = connection.worker
        fast = worker.machine.fast_path
        if fast is None or worker.connection is not connection or type(instruction) is not messages.Again:
            return False
        done = fast.try_apply(list(map(memoryview, frames)), self.now)
        if done is None:
            return False
        self.taken += 1
        self._observe(worker)
        self.network.append(Message(connection, True, [done]))
        return True

    def _settle(self) -> None:
        """The shells: send what the machines want sent, fetch, and let updates through the gates that are open."""
        self._settle_workers()
        for trainer in self.trainers:
            trainer.encode(2)
            self._send_shares(trainer)
            outbox = trainer.machine.outbox
            while outbox:
                route, instruction, payload = outbox.popleft()
                if not trainer.alive:
                    continue
                fanout, last = trainer.machine.fanout, trainer.machine.announcement
                cast = fanout.merge_into_cast(route, instruction, payload, last)
                frames = [messages.encode(instruction), *map(bytes, payload)]
                if cast is not None or route == ALL_SUBSCRIBERS:
                    frames = frames if cast is None else [messages.encode(cast), *frames]
                    hearing = [w.hears for w in self.workers if w.hears is not None and w.hears.trainer is trainer]
                    self.network += [Message(hears, False, frames) for hears in hearing]
                    self.broadcast += len(hearing)
                    continue
                connection = next(c for c in reversed(self.connections) if c.route == route)
                if connection.open:
                    self.network.append(Message(connection, False, frames))
                else:
                    trainer.machine.unreachable(route, self.now)

    def _send_shares(self, trainer: TrainerProcess) -> None:
        for source, sharer in trainer.sharers.items():
            while sharer.outbox:
                route, instruction, payload = sharer.outbox.popleft()
                connection = next(c for c in reversed(self.connections) if c.route == route)
                if not connection.open:
                    sharer.disconnected(route)
                elif trainer.alive:
                    frames = [messages.encode(instruction), *map(bytes, payload)]
                    self.network.append(Message(connection, False, frames, source))

    def _settle_workers(self) -> None:
        for worker in self.workers:
            if worker.alive:
                while worker.machine.fetches:
                    worker.fetches.append(worker.machine.fetches.popleft())
                if not worker.held:
                    while worker.fetches:
                        self._fetch(worker, *worker.fetches.pop(0))
                    while self._begin(worker):
                        self._finish(worker)
                    self._answer(worker)
            self._send_up(worker)
            if worker.again and worker.active:
                worker.begin_fast_path(worker.again)
            worker.again = 0

    def _answer(self, worker: WorkerProcess) -> None:
        """The trainer has asked what a model holds: the number that was published, for each tensor."""
        machine, question = worker.machine, worker.machine.open_question
        if question is None or worker.running is not None:
            return
        machine.end_fast_path()
        model = machine.session.local(question.model_id)
        version = machine.holdings.version(model) if model in worker.models else 0
        if version:
            machine.answer(question, version, [digest_of(worker.look(model))] * len(SHAPES))
        else:
            machine.answer(question, 0, [], "it has no version of this model")

    def _send_up(self, worker: WorkerProcess) -> None:
        if worker.running_on:
            worker.machine.flush()
        outbox = worker.machine.outbox
        while outbox:
            instruction = outbox.popleft()
            if worker.alive and worker.connection is not None:
                self.network.append(Message(worker.connection, True, [messages.encode(instruction)]))
        while worker.machine.pulls:
            source, pull = worker.machine.pulls.popleft()
            if worker.alive and worker.connection is not None:
                self.network.append(Message(worker.connection, True, [messages.encode(pull)], source))

    def _begin(self, worker: WorkerProcess) -> bool:
        if worker.running is not None or worker.taken is not None or not worker.machine.staged or not worker.alive:
            return False
        worker.running = worker.machine.staged[0]
        worker.running.run()
        worker.running.over = True
        self._observe(worker)
        return True

    def _finish(self, worker: WorkerProcess) -> None:
        staging, worker.running = worker.running, None
        trainer = next(t for t in self.trainers if t.epoch == staging.epoch)  # whose fast path goes on
        for part in staging.parts.values():
            assert part.metadata == trainer.records[part.version - 1].metadata
        worker.machine.applied(staging)

    def _fetch(self, worker: WorkerProcess, serial: int, index: int, part: messages.Part, slab: Slab) -> None:
        offers = [t.shared[part.descriptor] for t in self.trainers if t.alive and part.descriptor in t.shared]
        error = None if offers else RuntimeError("this slab is not offered any more")
        slab.memory[:] = offers[0].memory if offers else b"\x55" * slab.nbytes
        if worker.alive:
            worker.machine.fetched(serial, index, slab, error, self.now)

    def _publish(
        self,
        models: Iterable[str],
        workers: list[int] | None = None,
        dtype: torch.dtype = DTYPES[0],
        *,
        each: bool = False,
        copied: bool = False,
        stages: bool = False,
    ) -> None:
        trainer = self.trainer
        machine = trainer.machine
        if not trainer.usable:
            return  # its every call raises Fenced or ClosedError, which test_trainer.py shows
        trainer.pack()  # publications do not overtake each other
        self._dropped()
        slabs: list[Slab] = []
        numbers: dict[str, dict[int | None, int]] = {}
        dtypes: dict[int, torch.dtype] = {}
        parts: dict[str, Slab | dict[int, Slab]] = {}

        def make(model: str, whom: Iterable[int | None], dtype: torch.dtype) -> Slab:
            number = len(self.records) + len(dtypes) + 1
            slab = self._slab(trainer, model, number, dtype, copied=copied)
            if model in self.world.elsewhere and not each:
                slab = trainer.shared_out(model, slab)
            slabs.append(slab)
            dtypes[number] = dtype
            numbers.setdefault(model, {}).update(dict.fromkeys(whom, number))
            return slab

        for model in models:
            if each:
                kinds = [dtype if w % 2 == 0 else DTYPES[0] for w in workers]
                parts[model] = {w: make(model, [w], kind) for w, kind in zip(workers, kinds, strict=True)}
            else:
                parts[model] = make(model, workers if workers is not None else [None], dtype)
        number = machine.targets.version + 1
        metadata = encode_metadata({"version": number} if number % 4 == 0 else {})
        record = Record(number, trainer, self.now, numbers, dtypes, metadata, staged=stages)
        for worker in self.workers:
            peer = machine.peers.get(worker.index)
            if peer is None or peer.nonce != worker.machine.session.nonce or peer.lost or peer.slow:
                continue
            news = {m: n for m in peer.hello.have if (n := record.number_for(worker.index, m)) is not None}
            for model, number in news.items():
                now = machine.targets.target(worker.index, model)
                # A layout that this worker should have anyway concerns it alone.
                used = now is not None and now.slab.layout.digest == layout_of(dtypes[number]).digest
                if worker.stubborn and dtypes[number] is not DTYPES[0] and not used:
                    record.objectors.append(worker)
        pending = [trainer.records[version - 1] for version in machine.targets.pending]
        record.replaces = [] if stages else [older for older in pending if older.asks_like(record)]
        trainer.records.append(record)
        self.records.update(dict.fromkeys(dtypes, record))
        if not (self.world.eager or self.world.descriptors or version_is_packed_first(record.version)):
            trainer.unpack([slab for slab in slabs if not slab.leased and not slab.source])
        version = machine.publish(parts, None if each else workers, self.now, metadata, stages=stages)
        assert version == record.version
        for slab in slabs:
            slab.release()
        self._settle()

    def _slab(self, trainer: TrainerProcess, model: str, number: int, dtype: torch.dtype, *, copied: bool) -> Slab:
        lent = model in self.world.lent
        slab = (trainer.slots if lent else trainer.pool).acquire(layout_of(dtype))
        pack(slab, flat(number, dtype))
        if lent:
            self.images[number] = bytes(slab.memory)
            slab.read_in_place = number % 3 > 0 and not copied
            slab.descriptor = trainer.slots.describe(slab, mapped=slab.read_in_place)
            slab.streamable = bool(self.world.apart)
        elif self.world.descriptors:
            slab.descriptor = descriptor = b"%d" % number
            trainer.shared[descriptor] = slab
            slab.on_release = lambda: trainer.shared.pop(descriptor)
        return slab

    def _pick(self, a: int) -> WorkerProcess:
        alive = [w for w in self.workers if w.running_on] or self.workers
        return alive[a % len(alive)]

    def _some_models(self, a: int) -> tuple[str, ...]:
        models = self.world.models
        return models if a % 2 == 0 else (models[a // 2 % len(models)],)

    def _some_workers(self, a: int) -> list[int]:
        count = self.world.workers
        return [w for w in range(count) if (1 + a) >> w & 1] or [a % count]

    def _dtype(self, b: int) -> torch.dtype:
        return DTYPES[b % len(DTYPES)] if b % 3 == 0 else DTYPES[0]
