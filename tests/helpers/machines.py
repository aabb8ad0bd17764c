"""One state machine, its peers played by the test: messages go through the wire's encoding, and through no socket."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from asyncsync.bus.link import TICK
from asyncsync.model.strategy import Binding, WeightStrategy
from asyncsync.model.update import Prepared
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.trainer import Trainer
from asyncsync.protocol.transfer import Memory
from asyncsync.protocol.worker import Worker
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool, pack
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire import messages
from asyncsync.wire.messages import Instruction

EPOCH = (1000, 1)
SHAPES = {("a",): (15,), ("b",): (2, 5)}  # 128 bytes as float32
SMALL = Settings(eager_bytes=0, chunk_bytes=40, window_bytes=80, page_digests=1)
Sent = tuple[Instruction, Sequence[messages.Buffer]]


def nonce(incarnation: int) -> bytes:
    return incarnation.to_bytes(16, "big")


def flat(value: float, dtype: torch.dtype = torch.float32) -> FlatWeights:
    return FlatWeights({path: torch.full(shape, value, dtype=dtype) for path, shape in SHAPES.items()})


def layout(dtype: torch.dtype = torch.float32) -> Layout:
    return Layout.of(flat(0, dtype))


def slab_of(pool: SlabPool, value: float, dtype: torch.dtype = torch.float32) -> Slab:
    slab = pool.acquire(layout(dtype))
    slab.memory[:] = bytes(slab.nbytes)  # also what lies between the tensors
    pack(slab, flat(value, dtype))
    return slab


def through_the_wire(instruction: Instruction, payload: Sequence[messages.Buffer] = ()) -> Sent:
    return messages.decode([messages.encode(instruction), *map(bytes, payload)])


class Desk:
    """A trainer; the test plays its workers. A worker's route is its number, unless it says otherwise."""

    def __init__(
        self, num_workers: int | None = 2, models: Iterable[str] = ("policy",), settings: Settings | None = None
    ) -> None:
        self.pool = SlabPool()
        self.now = 0.0
        self.machine = Trainer(EPOCH, Identity(1, "here", 1), num_workers, settings or Settings())
        self.attempts: dict[bytes, int] = {}
        for model in models:
            self.machine.serve(model, self.now)

    def take(self, kind: type[Instruction] | None = None, route: bytes | None = None) -> list[Instruction]:
        """What was sent since the last look, of one kind or to one route (the rest is dropped)."""
        outbox, sent = self.machine.outbox, []
        while outbox:
            to, instruction, _ = outbox.popleft()
            if (kind is None or isinstance(instruction, kind)) and route in (None, to):
                sent.append(instruction)
        return sent

    def receive(self, worker: int | bytes, instruction: Instruction) -> None:
        route = worker if isinstance(worker, bytes) else b"%d" % worker
        self.machine.receive(route, *through_the_wire(instruction), self.now)

    def hello(
        self,
        worker: int,
        incarnation: int | None = None,
        *,
        route: bytes | None = None,
        attempt: int | None = None,
        epoch: messages.Epoch | None = None,
        have: dict[str, int] | None = None,
        local: bool | None = True,
        role: str = "worker",
        serial: int = 0,
    ) -> None:
        route = b"%d" % worker if route is None else route
        name = nonce(worker if incarnation is None else incarnation)
        self.attempts[name] = self.attempts.get(name, 0) + 1 if attempt is None else attempt
        models = dict.fromkeys(self.machine.targets.models, 0) if have is None else have
        boot = "" if local is None else "here" if local else "elsewhere"
        whence = 100 + worker % 1000, boot, 1
        hello = messages.Hello(worker, name, self.attempts[name], *whence, epoch, models, role, serial=serial)
        self.receive(route, hello)

    def cut(self, route: bytes) -> None:
        """This connection is gone, and the shell has noticed when it wanted to send."""
        self.machine.unreachable(route, self.now)

    def ready(self, worker: int | bytes, *dtypes: torch.dtype, models: Iterable[str] = ("policy",)) -> None:
        digests = {m: layout(d).digest for m in models for d in dtypes or (torch.float32,)}
        self.receive(worker, messages.Ready(self.machine.membership.epoch, digests))

    def refuse(self, worker: int, dtype: torch.dtype, model: str = "policy", number: int | None = None) -> None:
        """As the answer to the newest WELCOME, or to that one."""
        number = self.machine.peers[worker].welcomes if number is None else number
        digest = layout(dtype).digest
        self.receive(worker, messages.Refused(self.machine.membership.epoch, model, digest, "it does not fit", number))
        self.receive(worker, messages.Ready(self.machine.membership.epoch, {}))

    def join(self, *workers: int) -> None:
        """These workers say HELLO and accept float32."""
        for worker in workers:
            self.hello(worker)
            self.ready(worker, models=self.machine.targets.models)
        self.take()

    def publish(
        self,
        value: float = 0,
        workers: Iterable[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        models: Iterable[str] = ("policy",),
        lent: bool = False,
        stages: bool = False,
    ) -> int:
        slabs = {m: slab_of(self.pool, value, dtype) for m in models}
        for model, slab in slabs.items():
            slab.leased = lent
            slab.descriptor = f"{model} {self.machine.targets.version + 1}".encode() if lent else None
        try:
            return self.machine.publish(slabs, workers, self.now, stages=stages)
        finally:
            for slab in slabs.values():
                slab.release()

    def staged(self, worker: int, update: Instruction, last: int = 0, in_use: messages.InUse = ()) -> None:
        self.receive(worker, messages.Staged(self.machine.membership.epoch, update.serial, last, in_use))

    def applied(self, worker: int, last: int = 0, in_use: messages.InUse = (), **versions: int) -> None:
        self.receive(worker, messages.Applied(self.machine.membership.epoch, versions, last, in_use))

    def finish(self, worker: int, update: Instruction) -> None:
        """The worker stages and applies this update."""
        self.staged(worker, update)
        self.applied(worker, **{p.model_id: p.version for p in update.parts})

    def finish_all(self) -> None:
        """Worker 0, 1, … stages and applies the update that it was sent."""
        for worker, update in enumerate(self.take(messages.Update)):
            self.finish(worker, update)

    def expect(self, versions: dict[str, int], route: bytes | None = None) -> messages.Update:
        """The one update that was sent since the last look, which has these versions."""
        (update,) = self.take(messages.Update, route)
        assert isinstance(update, messages.Update)
        assert {part.model_id: part.version for part in update.parts} == versions
        return update

    def target(self, worker: int) -> int:
        """The version of "policy" that this worker is to have."""
        return self.machine.targets.target(worker, "policy").version

    def failed(self, worker: int, update: Instruction, *, serial: int | None = None) -> None:
        versions = {p.model_id: p.version for p in update.parts}
        serial = update.serial if serial is None else serial
        self.receive(
            worker,
            messages.Failed(
                self.machine.membership.epoch, serial, versions, False, "builtins.OSError", "no", "Traceback: no"
            ),
        )

    def pong(
        self,
        worker: int,
        versions: dict[str, int] | None = None,
        staged: dict[str, int] | None = None,
        serial: int = 0,
        seq: int | None = None,
        last: int = 0,
    ) -> None:
        seq = self.machine.peers[worker].ping_seq if seq is None else seq
        self.receive(
            worker, messages.Pong(self.machine.membership.epoch, seq, versions or {}, staged or {}, serial, last)
        )

    def pass_time(self, seconds: float) -> None:
        """In steps that a shell's timers would make."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK)
            self.machine.tick(self.now)


class Borrowed(Slab):
    """A lent slab, as a worker sees it: the sender's very memory."""

    leased = True
    forked = False

    @property
    def is_used(self) -> bool:
        return self.references > 0 or self.forked


class Fickle(Binding):
    """A binding whose conversion raises while ``broken`` is set."""

    broken: BaseException | None = None

    def prepare(self, slab: Slab) -> Prepared | None:
        if self.broken is not None:
            raise self.broken
        return super().prepare(slab)


class Station(Memory):
    """A worker with float32 models; the test plays its trainer."""

    def __init__(self, models: Iterable[str] = ("policy",), settings: Settings = SMALL, *, cast: bool = False) -> None:
        self.now = 0.0
        self.pool = SlabPool()
        self.machine = Worker(0, nonce(7), Identity(107, "here", 1), settings, memory=self)
        self.offered: dict[bytes, tuple[Slab, bool]] = {}
        self.borrowed: dict[bytes, Borrowed] = {}
        self.unavailable: set[str] = set()
        self.models: dict[str, dict[str, torch.Tensor]] = {}
        self.bindings: dict[str, Fickle] = {}
        for model in models:
            self.models[model] = {p[0]: torch.zeros(shape) for p, shape in SHAPES.items()}
            self.bindings[model] = Fickle(self.models[model], WeightStrategy(), cast=cast)
            self.machine.register(model, self.bindings[model], self.now)
        self.machine.connected(self.now)

    def take(self, kind: type[Instruction] | None = None) -> list[Instruction]:
        """What was sent since the last look, of one kind (the rest is dropped)."""
        outbox, sent = self.machine.outbox, []
        while outbox:
            instruction = outbox.popleft()
            if kind is None or isinstance(instruction, kind):
                sent.append(instruction)
        return sent

    def receive(self, instruction: Instruction, payload: Sequence[messages.Buffer] = ()) -> None:
        self.machine.receive(*through_the_wire(instruction, payload), self.now)

    def welcome(
        self,
        *dtypes: torch.dtype,
        epoch: messages.Epoch = EPOCH,
        attempt: int | None = None,
        incarnation: int = 7,
        models: dict[str, Layout | None] | None = None,
    ) -> None:
        if models is None:
            models = {m: layout(d) for m, d in zip(self.models, dtypes or (torch.float32,) * 9, strict=False)}
        known = {m: b"" if one is None else one.digest for m, one in models.items()}
        attempt = self.machine.session.attempt if attempt is None else attempt
        blobs = [one.encoded for one in models.values() if one is not None]
        self.receive(messages.Welcome(epoch, nonce(incarnation), attempt, 1, "here", 1, known), blobs)

    def join(self) -> None:
        self.welcome()
        self.take()

    def update(
        self,
        serial: int,
        values: dict[str, tuple[int, float]],
        *,
        epoch: messages.Epoch = EPOCH,
        eager: bool = True,
        descriptor: bytes | None = None,
    ) -> None:
        """``values``: per model, version and content."""
        slabs = {m: slab_of(self.pool, value) for m, (_, value) in values.items()}
        parts = tuple(
            messages.Part(m, values[m][0], s.layout.digest, s.nbytes, None, descriptor) for m, s in slabs.items()
        )
        whole = [b"" if descriptor else bytes(s.memory) for s in slabs.values()] if eager else []
        self.receive(messages.Update(epoch, serial, eager, parts), [*(b"" for _ in parts), *whole])

    def lend(
        self,
        serial: int,
        values: dict[str, tuple[int, float]],
        *,
        mapped: bool = True,
        epoch: messages.Epoch = EPOCH,
    ) -> None:
        """An update whose slabs the worker reads where they are, or copies out at once."""
        parts = []
        for model, (version, value) in values.items():
            descriptor = f"{epoch} {model} {version}".encode()
            slab, _ = self.offered.setdefault(descriptor, (slab_of(SlabPool(), value), mapped))
            parts.append(messages.Part(model, version, slab.layout.digest, slab.nbytes, None, descriptor))
        self.receive(messages.Update(epoch, serial, True, tuple(parts)), [b""] * (2 * len(parts)))

    def overwrite(self, version: int) -> None:
        """The trainer uses the memory of this version again."""
        for descriptor, (slab, _) in self.offered.items():
            if descriptor.endswith(b" %d" % version):
                slab.memory[:] = b"\xaa" * slab.nbytes

    def attach(self, model_id: str, part: messages.Part, layout: Layout, pool: SlabPool) -> Slab | None:
        if part.model_id in self.unavailable:
            raise OSError("it is not here")
        if part.descriptor not in self.offered:
            return None
        source, mapped = self.offered[part.descriptor]
        if not mapped:
            slab = self.machine.pool.acquire(layout)
            slab.memory[:] = source.memory
            return slab
        known = self.borrowed.get(part.descriptor)
        if known is not None and known.references:
            return known.retain()
        slab = self.borrowed[part.descriptor] = Borrowed(layout, source.buffer)
        return slab

    def flush(self) -> None:
        """What a shell does before it sends."""
        self.machine.flush()

    def chunk(self, serial: int, offset: int, size: int, value: float, part: int = 0) -> None:
        slab = slab_of(self.pool, value)
        self.receive(messages.Chunk(EPOCH, serial, part, offset), [slab.memory[offset : offset + size]])

    def chunks(self, serial: int, value: float) -> None:
        """All of an update, in order."""
        for offset, size in [(0, 40), (40, 40), (80, 40), (120, 8)]:
            self.chunk(serial, offset, size, value)

    def apply(self) -> None:
        """The gate opens."""
        assert self.machine.staged
        for staging in self.machine.staged.copy():
            staging.run()
            self.machine.applied(staging)

    def update_now(self, serial: int, values: dict[str, tuple[int, float]], **options: Any) -> None:
        """An update that finds the gate open."""
        self.update(serial, values, **options)
        self.apply()

    def lend_now(self, serial: int, values: dict[str, tuple[int, float]], **options: Any) -> None:
        self.lend(serial, values, **options)
        self.apply()

    def content(self, model: str = "policy") -> set[float]:
        return {value for tensor in self.models[model].values() for value in tensor.reshape(-1).tolist()}

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK)
            self.machine.tick(self.now)
