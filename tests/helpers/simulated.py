"""What a simulation is made of: the world, what is published, trainer and worker processes, connections, messages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from asyncsync.bus.fast_path import TrainerFastPath, WorkerFastPath
from asyncsync.errors import SchemaMismatch, WeightSyncError
from asyncsync.model.gate import Writer
from asyncsync.model.strategy import Binding, WeightStrategy
from asyncsync.model.update import Prepared
from asyncsync.protocol.holdings import Staging, Taken
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.targets import Peer, Publication
from asyncsync.protocol.trainer import Trainer
from asyncsync.protocol.transfer import Memory, Sharer, ShareSlab
from asyncsync.protocol.worker import Worker
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool, SourceCache
from asyncsync.wire import messages
from helpers.machines import SHAPES, Borrowed, layout

# Five layouts: one more than a worker remembers. A stubborn worker accepts the first only.
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int16)
LAYOUTS = [layout(dtype) for dtype in DTYPES]
BOOT = "one host"
NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True)
class World:
    """What does not change during a run."""

    workers: int = 2  # 1 to 4
    elastic: bool = False  # the trainer does not know how many
    models: tuple[str, ...] = ("policy",)  # ("",): the trainer gives its only one no name; the workers' is "policy"
    stubborn: frozenset[int] = frozenset()  # workers that accept one layout only
    eager: bool = False  # this, or descriptors: how bytes travel; neither: as chunks
    checksum: bool = False
    descriptors: bool = False
    local: bool = True  # the workers share the trainer's host, so their death is noticed at once
    lent: frozenset[str] = frozenset()  # models in slots that workers map, or copy out at once; only if local
    fast: bool = True  # the steady state is shorter than the general way
    fanout: bool = False  # workers can subscribe to what is sent to all
    compress: str = ""
    delta: bool = False
    apart: frozenset[int] = frozenset()  # workers on another host, to which the bytes of slots travel
    elsewhere: frozenset[str] = frozenset()  # models whose bytes other processes of the trainer's have

    @property
    def settings(self) -> Settings:
        eager = 4096 if self.eager else 0
        return Settings(
            eager_bytes=eager,
            chunk_bytes=40,
            window_bytes=120,
            checksum=self.checksum,
            fast=self.fast,
            fanout=self.fanout,
            fanout_least=1,
            compress=self.compress,
            delta=self.delta,
            piece_bytes=40,
            page_digests=1,
        )

    def is_beside(self, worker: int) -> bool:
        """Whether this worker shares the trainer's host."""
        return self.local and worker not in self.apart

    def topic(self, model: str) -> str:
        """What the trainer calls a worker's model."""
        return "" if self.models == ("",) else model

    @property
    def names(self) -> tuple[str, ...]:
        """The models as the workers call them."""
        return ("policy",) if self.models == ("",) else self.models


def draw_world(source: random.Random) -> World:
    count = source.randint(1, 4)
    models = source.choice([("policy",), ("",), ("policy", "critic"), ("policy", "critic")])
    lent = frozenset(source.choice([models, models, models[:1]])) if source.random() < 0.5 else frozenset()
    world = World(
        workers=count,
        elastic=source.random() < 0.4,
        models=models,
        # (Only those that cast nothing have a fast path.)
        stubborn=frozenset(w for w in range(count) if source.random() < (0.7 if lent else 0.4)),
        eager=source.random() < 0.3,
        checksum=source.random() < 0.5,
        descriptors=source.random() < 0.2,
        local=bool(lent) or source.random() < 0.7,
        lent=lent,
        fast=bool(lent) or source.random() < 0.7,
        fanout=not lent and source.choice([False, True, True]),
        compress=source.choice(["", "", "", "zstd", "lz4"]),
        delta=source.random() < 0.5,
        apart=frozenset(w for w in range(count) if source.random() < 0.5) if lent and source.random() < 0.3 else NOBODY,
    )
    if not (world.lent or world.descriptors) and source.random() < 0.4:
        world = replace(world, elsewhere=frozenset(source.choice([models, models[:1], models[1:]])))
    # What travels as fewer bytes is not pushed: half of these worlds push, and some of the others.
    return replace(world, compress="", delta=False) if world.fanout and source.random() < 0.5 else world


SOURCES = (1, 2)


def source_of(model: str) -> int:
    return 2 if model == "critic" else 1


def layout_of(dtype: torch.dtype) -> Layout:
    return LAYOUTS[DTYPES.index(dtype)]


@dataclass(eq=False)
class Record:
    """One publication: ``numbers[model][worker]``, or ``[None]`` where everybody gets the same."""

    version: int
    trainer: TrainerProcess
    time: float
    numbers: dict[str, dict[int | None, int]]
    dtypes: dict[int, torch.dtype]
    metadata: bytes = b""
    objectors: list[WorkerProcess] = field(default_factory=list)
    replaces: list[Record] = field(default_factory=list)
    rejected: bool = False  # or dropped
    staged: bool = False  # and not committed (yet)

    @property
    def is_meant(self) -> bool:
        """Whether workers are to have it."""
        return not (self.rejected or self.staged)

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

    def fits(self, worker: WorkerProcess) -> bool:
        """Whether this worker accepts the layouts of everything in here that is for it."""
        mine = [n for m in self.numbers if (n := self.number_for(worker.index, m)) is not None]
        return not worker.stubborn or all(self.dtypes[n] is DTYPES[0] for n in mine)

    def __repr__(self) -> str:
        return f"version {self.version} of trainer {self.trainer.number}: {self.numbers}"


class Slots(SlabPool):
    """Slabs that are written at once when nobody reads them any more, as far as their trainer knows."""

    def __init__(self, trainer: TrainerProcess) -> None:
        super().__init__()
        self.made: list[Slab] = []
        self._trainer = trainer

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        slab = super()._make(layout, pinned=pinned)
        slab.leased = True
        self.made.append(slab)
        return slab

    def describe(self, slab: Slab, *, mapped: bool) -> bytes:
        return b"slot %d %d %d" % (self._trainer.number, self.made.index(slab), mapped)

    def _recycle(self, slab: Slab) -> None:
        if self._trainer.usable:  # else it writes nothing any more
            slab.memory[:] = b"\x55" * slab.nbytes
        super()._recycle(slab)


@dataclass(eq=False)
class Use:
    """Somebody in a worker process, besides its machine, reads a slab that holds this number."""

    kind: str  # "reader" (copies it), "fork" (has not its own copy yet), "model" (of a worker that has left)
    slab: Slab
    number: int


class TrainerProcess:
    """A trainer process."""

    def __init__(self, number: int, start: int, world: World) -> None:
        self.number = number
        self.alive = True
        self.pool = SlabPool()
        self.slots = Slots(self)
        self.records: list[Record] = []
        self.shared: dict[bytes, Slab] = {}
        self.packing: list[tuple[Slab, bytes]] = []
        self.fast_path: TrainerFastPath | None = None
        self.sharers = {source: Sharer((start, number), world.settings) for source in SOURCES}
        self._machine = Trainer(
            (start, number), Identity(1, BOOT, 1), None if world.elastic else world.workers, world.settings
        )
        self._machine.membership.fanout_port = 1 if world.fanout else 0
        for model in world.models:
            self.machine.serve(model, 0.0)
        # Only the machine knows whether a refusal came in time; what follows from it is checked.
        self._reject = self.machine.targets.reject
        self.machine.targets.reject = self.rejected

    @property
    def machine(self) -> Trainer:
        """As :class:`asyncsync.bus.trainer.TrainerLink` has it."""
        if self.fast_path is not None:
            fast, self.fast_path = self.fast_path, None
            fast.end()
        return self._machine

    @property
    def epoch(self) -> messages.Epoch:
        return self._machine.membership.epoch

    @property
    def version(self) -> int:
        return self._machine.targets.version

    def begin_fast_path(self, model: str, channels: dict[bytes, SimulatedSideChannel]) -> TrainerFastPath | None:
        machine = self.machine
        target = machine.targets.models[model].get(None)
        if not machine.settings.fast or not self.usable or target is None:
            return None
        rides = target.slab.descriptor is None
        if (
            target.slab.pool is not (self.pool if rides else self.slots)
            or target.slab.read_in_place
            or target.slab.references > 1
        ):
            return None
        if machine.membership.fanout_port:
            return None
        peers = machine.steady(model)
        if not peers or any(p.owes_answer or p.slow for p in peers):
            return None

        def acquire() -> Slab:
            if rides:
                return self.pool.acquire(target.slab.layout)
            slab = self.slots.acquire(target.slab.layout)
            slab.read_in_place = False
            slab.descriptor = self.slots.describe(slab, mapped=False)
            return slab

        def send(peer: Peer, header: bytes, payload: Sequence[messages.Buffer]) -> bool:
            return channels[peer.route].send((header, *payload))

        known = SourceCache(target.slab.layout)
        self.fast_path = TrainerFastPath(machine, model, known, target.slab, acquire, peers, send)
        return self.fast_path

    def shared_out(self, model: str, slab: Slab) -> Slab:
        """What the coordinator publishes in the place of this slab, which another process has. Takes it over."""
        source, version = source_of(model), self.machine.targets.version + 1
        sharer = self.sharers[source]
        sharer.offer(version, {model: slab})
        slab.release()
        share = ShareSlab(slab.layout, source)
        share.on_release = lambda: sharer.retire(version, model)
        return share

    def rejected(self, publication: Publication, worker: int, reason: SchemaMismatch) -> None:
        self.records[publication.version - 1].reject()
        self._reject(publication, worker, reason)

    def unpack(self, slabs: list[Slab]) -> None:
        """Let these slabs be packed from now on, by and by; what is not there yet must not be sent."""
        for slab in slabs:
            self.packing.append((slab.retain(), bytes(slab.memory)))
            slab.memory[:] = b"\xaa" * slab.nbytes
            slab.packed = 0

    def encode(self, count: int | None = None) -> None:
        """So many of the pieces that are wanted; None: all."""
        wanted = self.machine.to_encode
        while wanted and count != 0:
            encoding, index = wanted.popleft()
            if encoding.users:
                encoding.encode(index)
                count = None if count is None else count - 1
                self.machine.stream()

    def pack(self, nbytes: int | None = None) -> None:
        """So many bytes more; None: all."""
        while self.packing and nbytes != 0:
            slab, content = self.packing[0]
            stop = slab.nbytes if nbytes is None else min(slab.packed + nbytes, slab.nbytes)
            nbytes = None if nbytes is None else nbytes - (stop - slab.packed)
            slab.memory[slab.packed : stop] = content[slab.packed : stop]
            slab.packed = stop
            if stop == slab.nbytes:
                self.packing.pop(0)[0].release()
        if self.usable:
            self.machine.stream()

    @property
    def usable(self) -> bool:
        return self.alive and self._machine.fenced is None and not self._machine.closed  # the fast path goes on


class SimulatedSideChannel:
    """As :class:`asyncsync.net.side_channel.SideChannel`: what is written is on its way, unless it is broken."""

    def __init__(self, connection: Connection, network: list[Message], *, broken: bool) -> None:
        self._connection = connection
        self._network = network
        self.broken = broken

    def send(self, frames: Sequence[messages.Buffer]) -> bool:
        if self.broken or not self._connection.open:
            return False
        self._network.append(Message(self._connection, False, list(map(bytes, frames))))
        return True


class FlakyBinding(Binding):
    """Whose conversion fails when told to."""

    fails = 0

    def prepare(self, slab: Slab) -> Prepared | None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("a strategy's convert has failed")
        return super().prepare(slab)


class SimulatedGate:
    """As :class:`asyncsync.model.gate.Gate`, as far as a fast path needs one."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker

    def try_apply(self, update: Writer) -> bool:
        if self._worker.held or self._worker.running is not None:
            return False
        update.apply()
        return True


class WorkerProcess(Memory):
    """A worker process: one incarnation of a worker_idx."""

    def __init__(self, index: int, number: int, world: World, now: float) -> None:
        self.index = index
        self.number = number
        self.stubborn = index in world.stubborn
        self.alive = True
        self.held = False
        self.connection: Connection | None = None
        self.trainer: TrainerProcess | None = None  # of the last connection: what that has brought may come late
        identity = Identity(100 + number, BOOT if world.is_beside(index) else "another host", 1)
        self.machine = Worker(index, number.to_bytes(16, "big"), identity, world.settings, memory=self)
        self.left = False
        self.mapped: dict[Slab, Borrowed] = {}
        self.uses: list[Use] = []
        self.models: dict[str, dict[str, torch.Tensor]] = {}
        self.bindings: dict[str, FlakyBinding] = {}
        self.contents: dict[str, int] = {}
        self.late: set[str] = set()
        self.epochs: dict[str, tuple[tuple[int, int], int]] = {}
        self.running: Staging | None = None
        self.taken: Taken | None = None
        self.fetches: list[tuple[int, int, messages.Part, Slab]] = []
        self.failures = 0
        self.again = 0  # the serial of an AGAIN that has just come
        self.hears: Connection | None = None  # on which it has subscribed

    def register(self, model: str, now: float) -> None:
        self.models[model] = {path[0]: torch.zeros(shape) for path, shape in SHAPES.items()}
        self.bindings[model] = FlakyBinding(self.models[model], WeightStrategy(), cast=not self.stubborn)
        self.contents[model] = 0
        self.machine.register(model, self.bindings[model], now)

    def attach(self, model_id: str, part: messages.Part, layout: Layout, pool: SlabPool) -> Slab | None:
        """As transports.shared_memory does it."""
        if not part.descriptor.startswith(b"slot "):
            return None
        number, index, mapped = map(int, part.descriptor.split()[1:])
        trainer = self.trainer
        assert trainer.number == number
        slot = trainer.slots.made[index]
        known = self.mapped.get(slot)
        if known is None and not trainer.alive:
            self.failures += 1
            raise WeightSyncError("the sender's shared memory cannot be opened")
        if not mapped:
            slab = self.machine.pool.acquire(layout)
            slab.buffer.copy_(slot.buffer)
            return slab
        if known is not None and known.references:
            return known.retain()
        if known is None:
            known = self.mapped[slot] = Borrowed(layout, slot.buffer)
        else:
            known.reuse(layout)
        return known

    def _window(self, descriptor: bytes) -> memoryview | None:
        """What :meth:`attach` would copy."""
        if not descriptor.startswith(b"slot ") or descriptor.endswith(b"1"):
            return None
        _, index, _ = map(int, descriptor.split()[1:])
        return memoryview(self.trainer.slots.made[index].buffer.numpy())

    def begin_fast_path(self, serial: int) -> None:
        """As a receiver's link does it."""
        machine = self.machine
        if not machine.settings.fast or machine.fast_path is not None:
            return
        if (steady := machine.steady(serial)) is None:
            return
        model, part = steady
        held = machine.holdings.updates.get(model)
        newest, binding = held[2], machine.models[model]
        prepared = binding.reusable.get(newest)
        if prepared is None or not prepared.may_repeat or newest.leased:
            return
        slab = machine.pool.acquire(newest.layout)
        if Binding.prepare(binding, slab) is not binding.reusable.get(slab):
            slab.release()
            return
        gate: Any = SimulatedGate(self)
        slabs = newest.retain(), slab
        shell = gate, self._window, lambda epoch, versions: None, lambda: True
        machine.fast_path = WorkerFastPath(machine, model, part, slabs, *shell)

    def use(self, kind: str, slab: Slab, number: int) -> None:
        if kind == "reader":
            slab.retain()
        elif kind == "fork":
            assert isinstance(slab, Borrowed)
            slab.forked = True
        self.uses.append(Use(kind, slab, number))

    def end_use(self, use: Use) -> None:
        self.uses.remove(use)
        if use.kind == "reader":
            use.slab.release()
        elif use.kind == "fork" and not any(u.kind == "fork" and u.slab is use.slab for u in self.uses):
            use.slab.forked = False

    def look(self, model: str) -> int:
        """The number that this model holds."""
        found = {value for tensor in self.models[model].values() for value in tensor.reshape(-1).tolist()}
        assert len(found) == 1, f"{self} holds torn weights of {model!r}: {sorted(found)}"
        return int(found.pop())

    @property
    def active(self) -> bool:
        return self.running_on and self.machine.session.ended is None

    @property
    def running_on(self) -> bool:
        """Whether the process is there, and its receiver has not been shut down."""
        return self.alive and not self.left

    def __repr__(self) -> str:
        return f"worker {self.index} (incarnation {self.number})"


@dataclass(eq=False)
class Connection:
    route: bytes
    worker: WorkerProcess
    trainer: TrainerProcess
    open: bool = True


@dataclass(eq=False)
class Message:
    connection: Connection
    upward: bool
    frames: list[bytes]
    source: int = 0  # which of the trainer's processes it is for, or from
