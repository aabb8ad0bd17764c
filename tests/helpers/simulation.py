"""Trainers, workers and a faulty network in one thread: the two state machines, without sockets, under a virtual clock.

    simulation = Simulation(World(workers=2, models=("policy", "critic")))
    simulation.do("publish", 0, 0)
    simulation.do("flow", 9, 0)
    simulation.converge()                    # messages flow again

Every tensor that is published holds one number, which nothing else that is published has. So a look at a worker's model
tells whose weights these are, of which publication of which trainer, and whether they are torn. After each operation
everything that must always hold is checked (:meth:`Simulation.check`); a violation is an AssertionError.

An operation is a name and two numbers that mean something in every state ("the message at this position, modulo how
many there are"), so any list of operations is a run, and so is every part of it: hypothesis can shrink it, and so can a
person.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from asyncsync import wire
from asyncsync.binding import Binding, Prepared
from asyncsync.errors import ProtocolError, SchemaMismatch
from asyncsync.layout import FlatWeights, Layout
from asyncsync.publisher import Publisher
from asyncsync.settings import Identity, Settings
from asyncsync.slab import Slab, SlabPool, pack
from asyncsync.staging import Staging
from asyncsync.strategy import WeightStrategy
from asyncsync.subscriber import Subscriber
from asyncsync.targets import Publication

__all__ = ["OPERATIONS", "Simulation", "World", "draw_operations", "draw_world"]

# Five layouts: one more than a worker remembers. A stubborn worker accepts the first only.
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int16)
SHAPES = {("a",): (15,), ("b",): (2, 5)}
LAYOUTS = [
    Layout.of(FlatWeights({path: torch.empty(shape, dtype=dtype) for path, shape in SHAPES.items()}))
    for dtype in DTYPES
]

STEPS = (0.1, 0.3, 1.0, 2.0, 5.0, 11.0)
ENOUGH = 90.0  # virtual seconds: several rounds of everything that is repeated
BOOT = "one host"

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
    "publish_some": 3,
    "publish_each": 3,
    "hold": 4,
    "begin": 3,
    "finish": 2,
    "fetch": 2,
    "mismatch": 1,
    "flaky": 1,
    "register": 1,
    "request": 1,
    "disconnect": 2,
    "connect": 5,
    "crash": 1,
    "spawn": 1,
    "leave": 1,
    "notice": 1,
    "assemble": 1,
    "restart_trainer": 1,
}
_NAMES, _WEIGHTS = list(OPERATIONS), list(OPERATIONS.values())


@dataclass(frozen=True)
class World:
    """What does not change during a run.

    Args:
        workers: how many, 1 to 4.
        elastic: the trainer does not know how many.
        models: of the trainer; ``("",)``: it gives its only model no name, while the workers call theirs "policy".
        stubborn: workers that accept one layout only.
        eager, descriptors: how bytes travel (neither: as chunks).
        local: the workers share the trainer's host, so their death is noticed at once.
    """

    workers: int = 2
    elastic: bool = False
    models: tuple[str, ...] = ("policy",)
    stubborn: frozenset[int] = frozenset()
    eager: bool = False
    checksum: bool = False
    descriptors: bool = False
    local: bool = True

    @property
    def settings(self) -> Settings:
        return Settings(eager_bytes=4096 if self.eager else 0, chunk_bytes=40, window_bytes=120, checksum=self.checksum)

    @property
    def names(self) -> tuple[str, ...]:
        """The models as the workers call them."""
        return ("policy",) if self.models == ("",) else self.models


def draw_world(source: random.Random) -> World:
    count = source.randint(1, 4)
    return World(
        workers=count,
        elastic=source.random() < 0.4,
        models=source.choice([("policy",), ("",), ("policy", "critic"), ("policy", "critic")]),
        stubborn=frozenset(w for w in range(count) if source.random() < 0.4),
        eager=source.random() < 0.3,
        checksum=source.random() < 0.5,
        descriptors=source.random() < 0.2,
        local=source.random() < 0.7,
    )


def draw_operations(source: random.Random, count: int) -> list[tuple[str, int, int]]:
    names = source.choices(_NAMES, _WEIGHTS, k=count)
    return [(name, source.randrange(64), source.randrange(64)) for name in names]


@dataclass(eq=False)
class Record:
    """One publication: ``numbers[model][worker]``, or ``[None]`` where everybody gets the same."""

    version: int
    trainer: Trainer
    time: float
    numbers: dict[str, dict[int | None, int]]
    dtypes: dict[int, torch.dtype]
    objectors: list[Worker] = field(default_factory=list)
    replaces: list[Record] = field(default_factory=list)
    rejected: bool = False

    def number_for(self, worker: int, model: str) -> int | None:
        own = self.numbers.get(model, {})
        return own.get(worker, own.get(None))

    def asks_like(self, other: Record) -> bool:
        def asked(record: Record) -> tuple[set[object], set[object]]:
            pairs = {(m, record.dtypes[n]) for m, own in record.numbers.items() for n in own.values()}
            return set(pairs), {w for own in record.numbers.values() for w in own}

        return asked(self) == asked(other)

    def reject(self) -> None:
        self.rejected = True
        for older in self.replaces:
            older.reject()

    def fits(self, worker: Worker) -> bool:
        """Whether this worker accepts the layouts of everything in here that is for it."""
        mine = [n for m in self.numbers if (n := self.number_for(worker.index, m)) is not None]
        return not worker.stubborn or all(self.dtypes[n] is DTYPES[0] for n in mine)

    def __repr__(self) -> str:
        return f"version {self.version} of trainer {self.trainer.number}: {self.numbers}"


class Trainer:
    """A trainer process."""

    def __init__(self, number: int, start: int, world: World) -> None:
        self.number = number
        self.alive = True
        self.pool = SlabPool()
        self.records: list[Record] = []
        self.shared: dict[bytes, Slab] = {}
        self.publisher = Publisher(
            (start, number), Identity(1, BOOT, 1), None if world.elastic else world.workers, world.settings
        )
        for model in world.models:
            self.publisher.serve(model, 0.0)
        # Only the publisher knows whether a refusal came in time; what follows from it is checked.
        self._reject = self.publisher.targets.reject
        self.publisher.targets.reject = self.rejected  # type: ignore[method-assign]

    def rejected(self, publication: Publication, refusals: dict[int, SchemaMismatch]) -> None:
        assert refusals
        self.records[publication.version - 1].reject()
        self._reject(publication, refusals)

    @property
    def usable(self) -> bool:
        return self.alive and self.publisher.fenced is None and not self.publisher.closed


class FlakyBinding(Binding):
    """Whose conversion fails when told to."""

    fails = 0

    def prepare(self, slab: Slab) -> Prepared | None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("a strategy's convert has failed")
        return super().prepare(slab)


class Worker:
    """A worker process: one incarnation of a worker_idx."""

    def __init__(self, index: int, number: int, world: World, now: float) -> None:
        self.index = index
        self.number = number
        self.stubborn = index in world.stubborn
        self.alive = True
        self.held = False
        self.connection: Connection | None = None
        identity = Identity(100 + number, BOOT if world.local else "another host", 1)
        self.subscriber = Subscriber(index, number.to_bytes(16, "big"), identity, world.settings)
        self.models: dict[str, dict[str, torch.Tensor]] = {}
        self.bindings: dict[str, FlakyBinding] = {}
        self.contents: dict[str, int] = {}
        self.late: set[str] = set()
        self.epochs: dict[str, tuple[tuple[int, int], int]] = {}
        self.running: Staging | None = None
        self.fetches: list[tuple[int, int, wire.Part, Slab]] = []
        self.failures = 0

    def register(self, model: str, now: float) -> None:
        self.models[model] = {path[0]: torch.zeros(shape) for path, shape in SHAPES.items()}
        self.bindings[model] = FlakyBinding(self.models[model], WeightStrategy(), cast=not self.stubborn)
        self.contents[model] = 0
        self.subscriber.register(model, self.bindings[model], now)

    def look(self, model: str) -> int:
        """The number that this model holds."""
        found = {value for tensor in self.models[model].values() for value in tensor.reshape(-1).tolist()}
        assert len(found) == 1, f"{self} holds torn weights of {model!r}: {sorted(found)}"
        return int(found.pop())

    @property
    def active(self) -> bool:
        return self.alive and self.subscriber.ended is None

    def __repr__(self) -> str:
        return f"worker {self.index} (incarnation {self.number})"


@dataclass(eq=False)
class Connection:
    route: bytes
    worker: Worker
    trainer: Trainer
    open: bool = True


@dataclass(eq=False)
class Message:
    connection: Connection
    upward: bool
    frames: list[bytes]


class Simulation:
    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 100.0
        self.trainers: list[Trainer] = []
        self.workers: list[Worker] = []
        self.connections: list[Connection] = []
        self.network: list[Message] = []
        self.delayed: list[Message] = []
        self.records: dict[int, Record] = {}
        self.owners: dict[int, int | None] = {}
        self.dropped: Counter[str] = Counter()
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
            kind = type(wire.decode(message.frames)[0])
            if kind is wire.Chunk or (kind is wire.Update and len(message.frames) > 2 and message.frames[-1]):
                damaged = bytearray(message.frames[-1])
                damaged[b % len(damaged)] ^= 1 << b % 8
                message.frames = [*message.frames[:-1], bytes(damaged)]

    def _do_tick(self, a: int, b: int) -> None:
        self._advance_to(self.now + STEPS[a % len(STEPS)])

    def _do_publish(self, a: int, b: int) -> None:
        """For everybody: one model, or all of them together."""
        self._publish(self._some_models(a), None, self._dtype(b), each=False)

    def _do_publish_some(self, a: int, b: int) -> None:
        """For some worker_ids."""
        self._publish(self._some_models(a), self._some_workers(a // 2), self._dtype(b), each=False)

    def _do_publish_each(self, a: int, b: int) -> None:
        """To each its own."""
        self._publish(self._some_models(a), self._some_workers(a // 2), self._dtype(b), each=True)

    def _do_hold(self, a: int, b: int) -> None:
        """Somebody reads the model (or no longer)."""
        worker = self._pick(a)
        worker.held = not worker.held

    def _do_begin(self, a: int, b: int) -> None:
        """The gate applies in another thread; the worker's loop hears of it later."""
        worker = self._pick(a)
        if worker.running is None and worker.subscriber.staged is not None:
            worker.running = worker.subscriber.staged
            worker.running.run()
            self._observe(worker)

    def _do_finish(self, a: int, b: int) -> None:
        worker = self._pick(a)
        if worker.running is not None:
            self._finish(worker)

    def _do_fetch(self, a: int, b: int) -> None:
        worker = self._pick(a)
        if worker.fetches:
            self._fetch(worker, *worker.fetches.pop(b % len(worker.fetches)))

    def _do_mismatch(self, a: int, b: int) -> None:
        """The user has put something else into the model when the update wants to go in."""
        worker = self._pick(a)
        staging = worker.subscriber.staged
        if worker.running is not None or staging is None:
            return
        model = worker.models[sorted(staging.parts)[b % len(staging.parts)]]
        own, model["a"] = model["a"], torch.zeros(3)
        try:
            staging.run()
        except SchemaMismatch as error:
            worker.failures += 1
            worker.subscriber.failed(staging, error, self.now)
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
            worker.subscriber.request(self.now)

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
        worker.alive = False
        if b % 2:
            self._connect(self._start_worker(worker.index), self.trainer)

    def _do_spawn(self, a: int, b: int) -> None:
        """A new incarnation, while the old one is still there."""
        if sum(w.active for w in self.workers) < 2 * self.world.workers:
            self._connect(self._start_worker(a % self.world.workers), self.trainer)

    def _do_leave(self, a: int, b: int) -> None:
        """A worker says BYE and ends."""
        worker = self._pick(a)
        if b % 4 == 0 and worker.active:
            worker.subscriber.bye("done")
            self._settle()
            self._disconnect(worker)
            worker.alive = False

    def _do_notice(self, a: int, b: int) -> None:
        """The operating system tells the trainer which of its local workers have died."""
        if self.world.local:
            for worker in self.workers:
                if not worker.alive:
                    self._lose(worker)

    def _do_assemble(self, a: int, b: int) -> None:
        """The trainer's connect() has returned."""
        publisher = self.trainer.publisher
        if all(publisher.connected(w, self.world.models) for w in range(self.world.workers)):
            for model in self.world.models:
                publisher.assemble(model)

    def _do_restart_trainer(self, a: int, b: int) -> None:
        """A new trainer; the clock may have gone backwards; the old one has crashed, said BYE, or lingers."""
        old = self.trainer
        if b % 8 == 0:
            old.publisher.close()
            self._settle()
        if b % 4 < 3:
            old.alive = False
            for connection in self.connections:
                if connection.trainer is old and connection.open:
                    self._disconnect(connection.worker)
        count = len(self.trainers)
        self.trainer = self._start_trainer(1000 + 10 * count if a % 3 else 1000 - 10 * count)

    # -- messages flow again ----------------------------------------------------------------------------------------

    def converge(self) -> None:
        """From now on nothing fails: everybody must get what it should have, and the trainer must know."""
        self._do_late(0, 0)
        for worker in self.workers:
            worker.held = False
            if worker.running is not None:
                self._finish(worker)
            for binding in worker.bindings.values():
                binding.fails = 0
        for trainer in self.trainers:
            if trainer is not self.trainer:
                self._end_trainer(trainer)
        if not self.trainer.usable:
            self._end_trainer(self.trainer)
            self.trainer = self._start_trainer(1000 + 10 * len(self.trainers))
        self._until(self._arrived, "the targets of before")
        self._check_progress()
        self._publish(self.world.models, None, DTYPES[0], each=False)
        self._until(self._arrived, "a publication for everybody")
        self._check_progress()
        version = self.trainer.publisher.version
        progress = self.trainer.publisher.progress(version, self.trainer.publisher.targeted(version))
        assert not progress.failed, progress.failed
        assert set(progress.acked) == set(range(self.world.workers)), progress

    def _until(self, done: object, what: str) -> None:
        deadline = self.now + ENOUGH
        while True:
            self._repair()
            self._drain()
            self.check()
            problem = done()  # type: ignore[operator]
            if problem is None:
                return
            assert self.now < deadline, f"not converged within {ENOUGH:g} s to {what}: {problem}"
            machines = [
                *(t.publisher for t in self.trainers if t.alive),
                *(w.subscriber for w in self.workers if w.alive),
            ]
            due = min(m.next_tick(self.now) for m in machines)
            self._advance_to(max(self.now, due))
            assert all(m.next_tick(self.now) > self.now for m in machines), "a timer that is due for ever"

    def _repair(self) -> None:
        """Whoever has no connection gets one, whoever was turned away is started anew, and deaths are noticed."""
        while not self.trainer.usable:
            self._end_trainer(self.trainer)
            self.trainer = self._start_trainer(1000 + 10 * len(self.trainers))
        for index in range(self.world.workers):
            if not any(w.active for w in self.workers if w.index == index):
                self._start_worker(index)
        for worker in self.workers:
            if worker.active:
                self._register_rest(worker)
                if worker.connection is None:
                    self._connect(worker, self.trainer)
        self._do_notice(0, 0)
        self._settle()

    def _drain(self) -> None:
        budget = 5000
        while self.network:
            self._deliver(self.network.pop(0))
            self._settle()
            budget -= 1
            assert budget, "the machines chatter without end"

    def _serving(self, index: int) -> Worker | None:
        """The incarnation that the trainer takes for this worker_idx."""
        peer = self.trainer.publisher.peers.get(index)
        found = [w for w in self.workers if peer is not None and w.subscriber.nonce == peer.nonce and w.active]
        return found[0] if found else None

    def _expected(self, worker: Worker, model: str) -> Record | None:
        """What this worker should have, from the publications alone."""
        topic = "" if self.world.models == ("",) else model
        common: Record | None = None
        own: Record | None = None
        for record in self.trainer.records:
            if record.rejected or topic not in record.numbers:
                continue
            if None in record.numbers[topic]:
                common = record
            elif worker.index in record.numbers[topic]:
                own = record
        return max((r for r in (common, own) if r is not None), key=lambda r: r.version, default=None)

    def _arrived(self) -> str | None:
        """None if everybody has what it should have or is known to be unable to; else who does not."""
        publisher = self.trainer.publisher
        if not self.trainer.usable:
            return f"trainer {self.trainer.number} has come to its end"
        for index in range(self.world.workers):
            worker = self._serving(index)
            if worker is None:
                return f"no incarnation of worker {index} is connected"
            if worker.models.keys() != set(self.world.names):
                return f"{worker} is still to register"
            if not publisher.peers[index].ready:
                return f"{worker} is not ready"
            for model in worker.models:
                record = self._expected(worker, model)
                if record is None:
                    continue
                topic = "" if self.world.models == ("",) else model
                wanted = record.number_for(index, topic)
                progress = publisher.progress(record.version, [index], [topic])
                if worker.contents[model] == wanted:
                    if index not in progress.acked:
                        return f"{worker} has {record}, and the trainer does not know: {progress}"
                elif index not in progress.failed:
                    return f"{worker} has {worker.contents} instead of {record}: {progress}"
                else:
                    excused = not record.fits(worker) or worker.failures
                    assert excused, f"{worker} has {worker.contents} instead of {record}: {progress.failed}"
        return None

    def _check_progress(self) -> None:
        publisher = self.trainer.publisher
        for version in range(1, publisher.version + 1):
            waiting = publisher.progress(version, publisher.targeted(version)).waiting
            assert not waiting, f"version {version} waits for {waiting}"

    # -- what must always hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        for trainer in self.trainers:
            if trainer.alive:
                self._check_trainer(trainer)
        for worker in self.workers:
            if worker.alive:
                self._check_worker(worker)

    def _check_trainer(self, trainer: Trainer) -> None:
        publisher = trainer.publisher
        holders = Counter(_targets_of(publisher))
        targets = len(holders)
        for peer in publisher.peers.values():
            if peer.transfer is not None:
                holders.update(slab for _, slab in peer.transfer.parts.values())
                assert not peer.lost
        for slab, count in holders.items():
            assert slab.references == count, f"{slab.references} references to a slab that {count} hold"
        assert len(holders) <= trainer.pool.slabs <= len(holders) + 1, "a slab is neither in use nor the spare one"
        # Distinct live targets, versions that are being fetched, and the spare.
        fetching = sum(len(p.transfer.parts) for p in publisher.peers.values() if p.transfer is not None)
        assert trainer.pool.slabs <= targets + fetching + 1
        for publication in publisher.targets.pending.values():
            assert publication.awaiting, "a publication that awaits nobody is still pending"

    def _check_worker(self, worker: Worker) -> None:
        subscriber = worker.subscriber
        holders: Counter[Slab] = Counter(slab for _, _, slab in subscriber._held.values())
        stagings = {id(s): s for s in (subscriber.staged, worker.running) if s is not None and not s.abandoned}
        for staging in stagings.values():
            holders.update(part.slab for part in staging.parts.values())
        if subscriber._incoming is not None:
            holders.update(subscriber._incoming.slabs)
            ahead = subscriber._incoming.ahead
            assert ahead <= self.world.settings.window_bytes, f"{worker} lets {ahead} bytes be sent ahead"
        holders.update(slab for *_, slab in (*subscriber.fetches, *worker.fetches))
        for slab, count in holders.items():
            assert slab.references == count, f"{worker}: {slab.references} references to a slab that {count} hold"
        assert len(holders) <= subscriber.pool.slabs <= len(holders) + 1, f"{worker} leaks slabs"
        if subscriber.staged is not None:
            assert subscriber.staged.epoch == subscriber.epoch, f"{worker} is about to apply weights of another trainer"
            for model, part in subscriber.staged.parts.items():
                assert part.version >= subscriber.version(model), (
                    f"{worker} is about to apply an older version of {model!r}"
                )

    def _observe(self, worker: Worker) -> None:
        """After something was applied: is it what it must be?"""
        changed = []
        for model in worker.models:
            number = worker.look(model)
            if number != worker.contents[model]:
                changed.append(model)
                worker.contents[model] = number
        for model in changed:
            number = worker.contents[model]
            topic = "" if self.world.models == ("",) else model
            record = self.records.get(number)
            assert record is not None, f"{worker} holds {number}, which nobody has published"
            owner = record.number_for(worker.index, topic)
            assert owner == number, f"{worker} holds the weights of another worker or model in {model!r}: {record}"
            assert not record.rejected, f"{worker} holds a publication that was rejected: {record}"
            mark = (record.trainer.publisher.epoch, record.version)
            before = worker.epochs.get(model)
            assert before is None or mark > before, f"{worker} went back from {before} to {mark} of {model!r}"
            worker.epochs[model] = mark
            publisher = record.trainer.publisher
            for objector in record.objectors:
                if self._overtaken(record, objector.index):
                    continue
                peer = publisher.peers.get(objector.index)
                steady = (
                    peer is not None and peer.nonce == objector.subscriber.nonce and not peer.lost and not peer.slow
                )
                early = self.now < record.time + self.world.settings.layout_patience
                assert not (steady and early), (
                    f"{worker} has {record}, which {objector} cannot take and has not been asked about"
                )
        for model in changed:
            self._check_together(worker, self.records[worker.contents[model]])

    def _check_together(self, worker: Worker, record: Record) -> None:
        """The models of one publication switch together, except where a newer publication has overtaken it."""
        for model in worker.models.keys() - worker.late:
            if record.number_for(worker.index, model) is None:
                continue
            other = self.records.get(worker.contents[model])
            if other is not None and other.trainer is record.trainer and other.version >= record.version:
                continue
            newer = self._overtaken(record, worker.index, [model])
            assert newer, f"{worker} switched to {record} without {model!r}, which is still {other}"

    def _overtaken(self, record: Record, worker: int, models: Iterable[str] | None = None) -> bool:
        """Whether something newer is meant for this worker."""
        later = [r for r in record.trainer.records if r.version > record.version and not r.rejected]
        return any(r.number_for(worker, m) is not None for r in later for m in models or record.numbers)

    # -- the machinery ----------------------------------------------------------------------------------------------

    def _start_trainer(self, start: int) -> Trainer:
        trainer = Trainer(len(self.trainers) + 1, start, self.world)
        self.trainers.append(trainer)
        return trainer

    def _end_trainer(self, trainer: Trainer) -> None:
        trainer.alive = False
        for connection in self.connections:
            if connection.trainer is trainer and connection.open:
                self._disconnect(connection.worker)

    def _start_worker(self, index: int) -> Worker:
        worker = Worker(index, len(self.workers) + 1, self.world, self.now)
        self.workers.append(worker)
        # Some register their second model only later.
        for model in self.world.names[: 1 if len(self.workers) % 4 == 0 else None]:
            worker.register(model, self.now)
        return worker

    def _register_rest(self, worker: Worker) -> None:
        for model in self.world.names:
            if worker.active and model not in worker.models:
                worker.late.add(model)
                worker.register(model, self.now)

    def _connect(self, worker: Worker, trainer: Trainer) -> None:
        if trainer.alive and worker.active:
            connection = Connection(b"route %d" % len(self.connections), worker, trainer)
            self.connections.append(connection)
            worker.connection = connection
            worker.subscriber.connected(self.now)

    def _disconnect(self, worker: Worker) -> None:
        if worker.connection is not None:
            worker.connection.open = False
            worker.connection = None
            worker.subscriber.disconnected()

    def _lose(self, worker: Worker) -> None:
        for trainer in self.trainers:
            if trainer.alive:
                trainer.publisher.lost(worker.index, worker.subscriber.nonce, "its process has ended", self.now)

    def _advance_to(self, now: float) -> None:
        self.now = now
        for trainer in self.trainers:
            if trainer.alive:
                trainer.publisher.tick(self.now)
        for worker in self.workers:
            if worker.alive:
                worker.subscriber.tick(self.now)
        self._settle()

    def _deliver(self, message: Message) -> None:
        connection = message.connection
        try:
            instruction, payload = wire.decode(message.frames)
            if message.upward:
                if connection.trainer.alive:
                    connection.trainer.publisher.receive(connection.route, instruction, payload, self.now)
            elif connection.worker.alive:
                connection.worker.subscriber.receive(instruction, payload, self.now)
        except ProtocolError as error:
            self.dropped[str(error).partition(":")[0]] += 1

    def _settle(self) -> None:
        """The shells: send what the machines want sent, fetch, and let updates through the gates that are open."""
        for worker in self.workers:
            if worker.alive:
                while worker.subscriber.fetches:
                    worker.fetches.append(worker.subscriber.fetches.popleft())
                if not worker.held:
                    while worker.fetches:
                        self._fetch(worker, *worker.fetches.pop(0))
                    while worker.running is None and worker.subscriber.staged is not None:
                        worker.running = worker.subscriber.staged
                        worker.running.run()
                        self._observe(worker)
                        self._finish(worker)
            self._send_up(worker)
        for trainer in self.trainers:
            outbox = trainer.publisher.outbox
            while outbox:
                route, instruction, payload = outbox.popleft()
                if not trainer.alive:
                    continue
                connection = next(c for c in reversed(self.connections) if c.route == route)
                if connection.open:
                    frames = [wire.encode(instruction), *map(bytes, payload)]
                    self.network.append(Message(connection, False, frames))
                else:
                    trainer.publisher.unreachable(route, self.now)

    def _send_up(self, worker: Worker) -> None:
        outbox = worker.subscriber.outbox
        while outbox:
            instruction, payload = outbox.popleft()
            if worker.alive and worker.connection is not None:
                frames = [wire.encode(instruction), *map(bytes, payload)]
                self.network.append(Message(worker.connection, True, frames))

    def _finish(self, worker: Worker) -> None:
        staging, worker.running = worker.running, None
        assert staging is not None
        worker.subscriber.applied(staging, self.now)

    def _fetch(self, worker: Worker, serial: int, index: int, part: wire.Part, slab: Slab) -> None:
        assert part.descriptor is not None
        source = next(
            (t.shared[part.descriptor] for t in self.trainers if t.alive and part.descriptor in t.shared), None
        )
        error = None
        if source is None:
            error = RuntimeError("this slab is not offered any more")
            slab.memory[:] = b"\x55" * slab.nbytes
        else:
            slab.memory[:] = source.memory
        if worker.alive:
            worker.subscriber.fetched(serial, index, slab, error, self.now)

    def _publish(self, models: Iterable[str], workers: list[int] | None, dtype: torch.dtype, *, each: bool) -> None:
        trainer = self.trainer
        publisher = trainer.publisher
        if not trainer.usable:
            return  # its every call raises Fenced or ClosedError, which test_publisher.py shows
        slabs: list[Slab] = []
        numbers: dict[str, dict[int | None, int]] = {}
        dtypes: dict[int, torch.dtype] = {}
        parts: dict[str, Slab | dict[int, Slab]] = {}

        def make(model: str, whom: Iterable[int | None], dtype: torch.dtype) -> Slab:
            number = len(self.records) + len(dtypes) + 1
            slab = self._slab(trainer, number, dtype)
            slabs.append(slab)
            dtypes[number] = dtype
            numbers.setdefault(model, {}).update(dict.fromkeys(whom, number))
            return slab

        for model in models:
            if each:
                assert workers is not None
                kinds = [dtype if w % 2 == 0 else DTYPES[0] for w in workers]
                parts[model] = {w: make(model, [w], kind) for w, kind in zip(workers, kinds, strict=True)}
            else:
                parts[model] = make(model, workers if workers is not None else [None], dtype)
        record = Record(publisher.version + 1, trainer, self.now, numbers, dtypes)
        for worker in self.workers:
            peer = publisher.peers.get(worker.index)
            if peer is None or peer.nonce != worker.subscriber.nonce or peer.lost or peer.slow:
                continue
            news = {m: n for m in peer.hello.have if (n := record.number_for(worker.index, m)) is not None}
            for model, number in news.items():
                now = publisher.targets.target(worker.index, model)
                # A layout that this worker should have anyway concerns it alone.
                used = now is not None and now.slab.layout.digest == _layout(dtypes[number]).digest
                if worker.stubborn and dtypes[number] is not DTYPES[0] and not used:
                    record.objectors.append(worker)
        pending = [trainer.records[version - 1] for version in publisher.targets.pending]
        record.replaces = [older for older in pending if older.asks_like(record)]
        trainer.records.append(record)
        self.records.update(dict.fromkeys(dtypes, record))
        version = publisher.publish(parts, None if each else workers, self.now)
        assert version == record.version
        for slab in slabs:
            slab.release()
        self._settle()

    def _slab(self, trainer: Trainer, number: int, dtype: torch.dtype) -> Slab:
        flat = FlatWeights({path: torch.full(shape, number, dtype=dtype) for path, shape in SHAPES.items()})
        slab = trainer.pool.acquire(_layout(dtype))
        pack(slab, flat)
        if self.world.descriptors:
            slab.descriptor = descriptor = b"%d" % number
            trainer.shared[descriptor] = slab
            slab.on_release = lambda: trainer.shared.pop(descriptor)
        return slab

    def _pick(self, a: int) -> Worker:
        alive = [w for w in self.workers if w.alive] or self.workers
        return alive[a % len(alive)]

    def _some_models(self, a: int) -> tuple[str, ...]:
        models = self.world.models
        return models if a % 2 == 0 else (models[a // 2 % len(models)],)

    def _some_workers(self, a: int) -> list[int]:
        count = self.world.workers
        return [w for w in range(count) if (1 + a) >> w & 1] or [a % count]

    def _dtype(self, b: int) -> torch.dtype:
        return DTYPES[b % len(DTYPES)] if b % 3 == 0 else DTYPES[0]


def _layout(dtype: torch.dtype) -> Layout:
    return LAYOUTS[DTYPES.index(dtype)]


def _targets_of(publisher: Publisher) -> Iterator[Slab]:
    for slot in publisher.targets.slots():
        for target in (slot.current, *slot.pending):
            if target is not None:
                yield target.slab
