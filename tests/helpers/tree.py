"""A trainer, relays and workers in one thread: their state machines, over connections that lose messages, while
anybody is killed, restarted, cut off or moves. No sockets, a virtual clock.

Each version's slab holds one number, its own for each publication of each trainer: so what a worker holds tells whether
it is torn, and whose it is. Connections keep the order of what they deliver, as TCP does; what is lost is lost with
everything of that turn or alone.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from asyncsync.bus.link import TICK
from asyncsync.errors import ProtocolError
from asyncsync.model.strategy import Binding, WeightStrategy
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.trainer import Trainer
from asyncsync.protocol.worker import Worker
from asyncsync.relay.machine import RelayMachine
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire import messages
from asyncsync.wire.messages import FIRST_GUEST, Buffer, Instruction
from helpers.machines import SMALL, layout, nonce, slab_of
from helpers.machines import flat as flat

SETTINGS = SMALL
MODEL = "policy"
LAYOUT = layout()


def content(slab: Slab) -> int:
    found = {value for tensor in slab.tensors().values() for value in tensor.reshape(-1).tolist()}
    assert len(found) == 1, f"torn: {sorted(found)}"
    return int(found.pop())


class Node:
    """A trainer, a worker, or a relay (which has both machines, and ``passing``)."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.pool = SlabPool()  # a trainer's
        self.trainer: Trainer | None = None
        self.worker: Worker | None = None
        self.passing: RelayMachine | None = None
        self.parent: Node | None = None
        self.children: dict[bytes, Node] = {}  # by the route
        self.route = b""  # at the parent
        self.alive = True
        self.seen = ((0, 0), 0)  # of a worker: epoch and version
        self.contents: tuple[int, int] | None = None  # version and number

    def __repr__(self) -> str:
        return self.name


Message = tuple[Node, Node, bytes, list[bytes], bool]


class Tree:
    """``levels``: how many relays each node of a level has below it; ``workers``: of each relay of the last level; of
    the trainer itself where there are no levels. Fixed workers, unless ``elastic``."""

    def __init__(
        self,
        levels: Sequence[int],
        workers: int,
        *,
        seed: int = 0,
        elastic: bool = False,
        settings: Settings = SETTINGS,
    ) -> None:
        self.random = random.Random(seed)
        self.settings = settings
        self.now = 100.0
        self.loss = 0.0
        self.network: deque[Message] = deque()
        self.nonces = 0
        self.numbers: dict[tuple[tuple[int, int], int], int] = {}  # what was published: by epoch and version
        self.delivered = 0
        self.turn: dict[Node, None] = {}  # relays that report when what is on its way has come
        self.waiting: list[Message] = []
        self.deaf: set[Node] = set()  # stopped: what comes to them waits
        self.count = workers
        for fan in levels:
            self.count *= fan
        self.elastic = elastic
        self.trainers = 0
        self.root = self._trainer()
        self.relays: list[list[Node]] = []
        above = [self.root]
        for depth, fan in enumerate(levels):
            above = [self._relay(f"relay {depth}.{i}", above[i // fan]) for i in range(len(above) * fan)]
            self.relays.append(above)
        self.workers = [self._worker(i, above[i // workers]) for i in range(self.count)]
        self.settle()

    # -- who is there -----------------------------------------------------------------------------------------------

    def _nonce(self) -> bytes:
        self.nonces += 1
        return nonce(self.nonces)

    def _trainer(self) -> Node:
        node = Node(f"trainer {self.trainers}", self.settings)
        self.trainers += 1
        epoch = 1000 * self.trainers, self.trainers
        node.trainer = Trainer(epoch, Identity(), None if self.elastic else self.count, self.settings)
        node.trainer.serve(MODEL, self.now)
        return node

    def _relay(self, name: str, parent: Node) -> Node:
        node = Node(name, self.settings)
        index = FIRST_GUEST + self.random.randrange(FIRST_GUEST)
        node.trainer = Trainer((0, 0), Identity(), None, self.settings)
        node.passing = RelayMachine(node.trainer)
        node.worker = Worker(index, self._nonce(), Identity(), self.settings, "relay", relaying=node.passing)
        node.worker.session.reconnects = True
        self.connect(node, parent)
        return node

    def _worker(self, index: int, parent: Node) -> Node:
        node = Node(f"worker {index}", self.settings)
        node.worker = Worker(index, self._nonce(), Identity(), self.settings)
        node.worker.session.reconnects = True
        node.worker.register(MODEL, Binding(None, WeightStrategy()), self.now)
        self.connect(node, parent)
        return node

    def nodes(self) -> Iterable[Node]:
        yield self.root
        for level in self.relays:
            yield from level
        yield from self.workers

    # -- what happens -----------------------------------------------------------------------------------------------

    def connect(self, node: Node, parent: Node) -> None:
        self.cut(node)
        if parent.alive:
            node.parent, node.route = parent, self._nonce()
            parent.children[node.route] = node
            node.worker.connected(self.now)

    def cut(self, node: Node) -> None:
        """Its connection ends; what is under way on it is lost."""
        if node.parent is not None:
            node.parent.children.pop(node.route, None)
            node.parent, node.route = None, b""
            node.worker.disconnected()

    def kill(self, node: Node) -> None:
        node.alive = False
        self.cut(node)
        for child in list(node.children.values()):
            self.cut(child)

    def restart_relay(self, depth: int, i: int) -> Node:
        """kill -9, and another process at the same address, to which everybody comes back."""
        old = self.relays[depth][i]
        below, parent = list(old.children.values()), old.parent or self.parent_of(depth, i)
        self.kill(old)
        new = self.relays[depth][i] = self._relay(old.name + "'", parent)
        for child in below:
            self.connect(child, new)
        return new

    def restart_worker(self, i: int) -> None:
        old = self.workers[i]
        parent = old.parent or self.home(i)
        self.kill(old)
        self.workers[i] = self._worker(i, parent)

    def restart_trainer(self) -> None:
        old = self.root
        below = list(old.children.values())
        self.kill(old)
        self.root = self._trainer()
        for child in below:
            self.connect(child, self.root)

    def parent_of(self, depth: int, i: int) -> Node:
        """Of relay ``i`` of a level; of worker ``i`` below the last one."""
        if depth == 0:
            return self.root
        above = self.relays[depth - 1]
        return above[i * len(above) // (self.count if depth == len(self.relays) else len(self.relays[depth]))]

    def home(self, i: int) -> Node:
        return self.parent_of(len(self.relays), i)

    def publish(self) -> int:
        trainer = self.root.trainer
        number = len(self.numbers) + 1
        slab = slab_of(self.root.pool, number)
        version = trainer.publish({MODEL: slab}, None, self.now)
        slab.release()
        self.numbers[trainer.membership.epoch, version] = number
        self.settle()
        return version

    # -- the machinery ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        for node in self.nodes():
            self.flush(node)

    def flush(self, node: Node) -> None:
        """A shell's turn: apply, report, and send what the machines want sent."""
        if not node.alive or node in self.deaf:
            return
        if (worker := node.worker) is not None:
            for staging in list(worker.staged):
                staging.run()
                worker.applied(staging)
                if node.passing is None:
                    self.look(node)
            if node.passing is not None and node.passing.is_report_due(worker):
                self.turn[node] = None
            if (question := worker.open_question) is not None and MODEL in worker.holdings.updates:
                _, version, slab = worker.holdings.updates[MODEL]
                worker.answer(question, version, [b"%016d" % content(slab)] * 2)
            worker.flush()
            while worker.outbox:
                self._send(node, node.parent, node.route, worker.outbox.popleft(), (), up=True)
        if (trainer := node.trainer) is not None:
            while trainer.outbox:
                route, instruction, payload = trainer.outbox.popleft()
                child = node.children.get(route)
                if child is None:
                    trainer.unreachable(route, self.now)
                else:
                    self._send(node, child, route, instruction, payload, up=False)

    def _send(
        self,
        sender: Node,
        receiver: Node | None,
        route: bytes,
        instruction: Instruction,
        payload: Sequence[Buffer],
        *,
        up: bool,
    ) -> None:
        if receiver is not None and not (self.loss and self.random.random() < self.loss):
            self.network.append((sender, receiver, route, [messages.encode(instruction), *map(bytes, payload)], up))

    def flow(self, most: int = 10_000_000) -> None:
        """Messages arrive, in order, and what they cause."""
        if not self.deaf:
            self.network.extendleft(reversed(self.waiting))
            self.waiting.clear()
        left = len(self.network)
        while (self.network or self.turn) and most:
            if not left or not self.network:  # a turn of everybody's loop
                relays, self.turn = self.turn, {}
                for relay in relays:
                    if relay.alive and relay not in self.deaf and relay.passing is not None:
                        relay.passing.report(relay.worker)
                        self.flush(relay)
                left = len(self.network)
                continue
            most -= 1
            left -= 1
            message = sender, receiver, route, frames, up = self.network.popleft()
            child = sender if up else receiver
            if not receiver.alive or child.route != route:
                continue  # the connection has ended
            if receiver in self.deaf:
                self.waiting.append(message)
                continue
            self.delivered += 1
            instruction, payload = messages.decode(frames)
            try:
                if up:
                    receiver.trainer.receive(route, instruction, payload, self.now)
                else:
                    receiver.worker.receive(instruction, payload, self.now)
            except ProtocolError:
                pass
            self.flush(receiver)

    def look(self, node: Node) -> None:
        """A worker holds nothing torn, nothing older, and what was published under its version."""
        epoch, version, slab = node.worker.holdings.updates[MODEL]
        assert (epoch, version) >= node.seen, f"{node} has gone back from {node.seen} to {(epoch, version)}"
        assert content(slab) == self.numbers[epoch, version], f"{node} has other weights than version {version}"
        node.seen = epoch, version

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            for node in self.nodes():
                if node.alive and node not in self.deaf:
                    if node.trainer is not None:
                        node.trainer.tick(self.now)
                    if node.worker is not None:
                        node.worker.tick(self.now)
            self.settle()
            self.flow()

    def until(self, met: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Let time pass until this is so."""
        self.flow()
        end = self.now + seconds
        while not met() and self.now < end:
            self.pass_time(TICK)
        return met()

    # -- what should be ---------------------------------------------------------------------------------------------

    @property
    def newest(self) -> tuple[tuple[int, int], int]:
        return self.root.trainer.membership.epoch, self.root.trainer.targets.published

    def is_everywhere(self) -> bool:
        """Everybody has the newest version, and the trainer knows of each."""
        trainer = self.root.trainer
        outcome = trainer.progress.of(trainer.targets.version, range(self.count), [MODEL])
        return all(node.seen == self.newest for node in self.workers) and len(outcome.acked) == self.count

    def missing(self) -> str:
        """For people: who lacks what."""
        trainer = self.root.trainer
        late = [f"{n} has {n.seen}, parent {n.parent}" for n in self.workers if n.seen != self.newest]
        outcome = trainer.progress.of(trainer.targets.version, range(self.count), [MODEL])
        return f"newest {self.newest}; {late[:5]}; waiting {sorted(outcome.waiting)[:9]}, failed {outcome.failed}"
