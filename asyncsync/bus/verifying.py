"""Verifying: whether the workers' models hold what was sent, tensor by tensor.

A worker hashes its model in a thread, inside a hold of its gate: so what it hashes is one version, and updates wait no
longer than the hashing takes. Meanwhile the trainer hashes its own slab of the version that the worker should have. A
worker that has got a newer version meanwhile is asked again.

Each tensor of the layout has one digest. Where the trainer's tensors are tied and the model's are not, it stands for
all of them. Extra state is not compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial

import torch

from asyncsync.bus.applying import Applying
from asyncsync.bus.link import Order
from asyncsync.bus.publishing import Publishing
from asyncsync.errors import SchemaMismatch
from asyncsync.protocol.relays import Verification, Verified
from asyncsync.protocol.targets import Target
from asyncsync.runtime.threads import elsewhere
from asyncsync.weights.copying import clone, is_plain_bytes, memory_of
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import dotted
from asyncsync.wire.messages import DIGEST_BYTES, Epoch, Verify

PIECE = 4 << 20  # bytes that are hashed before the thread looks whether to go on: some milliseconds
NOTHING = bytes(DIGEST_BYTES)  # this worker's model has no tensor for it


@dataclass(frozen=True)
class NotComparable:
    """Why ``verify`` says nothing of a worker's model: it casts or converts what comes, has no model, has another
    version, is lost, or has not answered."""

    reason: str

    def __str__(self) -> str:
        return f"not comparable: {self.reason}"


Differences = dict[int, list[str] | NotComparable]


def digests_of(entries: Iterable[Sequence[torch.Tensor]], is_over: Callable[[], bool]) -> list[bytes]:
    """A digest for each entry of a layout, of the tensors that hold its value. Useless once it ``is_over``."""
    return [_digest(tensors, is_over) for tensors in entries]


def _digest(tensors: Sequence[torch.Tensor], is_over: Callable[[], bool]) -> bytes:
    each = {_hash(tensor, is_over) for tensor in tensors}
    if len(each) < 2:
        return each.pop() if each else NOTHING
    return hashlib.blake2b(b"".join(sorted(each)), digest_size=DIGEST_BYTES).digest()  # none of them is right alone


def _hash(tensor: torch.Tensor, is_over: Callable[[], bool]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if tensor.numel() and not is_over():
        data = memory_of(tensor if is_plain_bytes(tensor) else clone(tensor).cpu())
        for begin in range(0, len(data), PIECE):
            if is_over():
                break
            digest.update(data[begin : begin + PIECE])
    return digest.digest()


@dataclass(eq=False)
class WorkerVerifying:
    """Answers the trainer's questions."""

    _link: Applying
    _task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        question = self._link.machine.asked
        if question is not None and self._task is None and not (self._link.machine.leaving or self._link.closed):
            # In a context of its own: the caller's may be inside a hold, which this one must not count as.
            self._task = self._link.loop.create_task(self._answer(question), context=Context())

    async def stop(self) -> None:
        """When this returns, nothing reads a model here any more."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _answer(self, question: Verify) -> None:
        version, digests, problem = 0, list[bytes](), ""
        try:
            version, digests = await self._look(question)
        except SchemaMismatch as error:
            problem = str(error)
        except Exception as error:  # of the user's tensors, perhaps: the trainer learns of it
            problem = f"its model could not be read: {type(error).__name__}: {error}"
        finally:
            self._task = None
        if not self._link.closed:
            with self._link.guard():
                self._link.machine.answer(question, version, digests, problem)
                self._link.settle()

    async def _look(self, question: Verify) -> tuple[int, list[bytes]]:
        """The version that a model shows, and its digests. Raises SchemaMismatch: why there is nothing to compare."""
        machine, model_id = self._link.machine, self._link.machine.session.local(question.model_id)
        async with self._link.gate.hold():
            machine.end_fast_path()
            if (binding := machine.models.get(model_id)) is None:
                raise SchemaMismatch(f"it does not have the model {model_id!r} (any more)")
            if binding.bound is None:
                raise SchemaMismatch("it has no model")
            epoch, version, *_ = self._link.shown.get(model_id, (None, 0))
            if epoch != question.epoch or (layout := self._layout(model_id, question.epoch, version)) is None:
                raise SchemaMismatch("it has no version of this sender yet")
            over = threading.Event()
            entries = binding.tensors_of(layout)
            digests = await elsewhere("asyncsync-verify", partial(digests_of, entries, over.is_set), over.set)
        return version, digests

    def _layout(self, model_id: str, epoch: Epoch, version: int) -> Layout | None:
        held = self._link.machine.holdings.held.get(model_id)
        if held is not None and held[:2] == (epoch, version):
            return held[2].layout
        for staging in self._link.machine.staged:  # applied by another thread, of which the loop has not heard yet
            part = staging.parts.get(model_id)
            if part is not None and (staging.epoch, part.version) == (epoch, version):
                return part.slab.layout
        return None


@dataclass(eq=False)
class TrainerVerifying:
    """Compares what workers' models hold with what they should have."""

    _link: Publishing
    _order: Order = field(default_factory=Order)

    async def verify(self, model_id: str, workers: Iterable[int], timeout: float) -> Differences:
        """The names that differ, for each of these workers. Raises AckTimeout if another call has not ended in time;
        ClosedError or Fenced."""
        deadline = self._link.loop.time() + timeout
        late = f"another verify() of this sender has not ended within {timeout:g} s"
        await self._order.acquire_until(deadline, lambda: late)
        try:
            return await self._verify(model_id, list(workers), deadline, timeout)
        finally:
            self._link.machine.verification = None
            self._order.release()

    async def _verify(self, model_id: str, workers: list[int], deadline: float, timeout: float) -> Differences:
        link, machine = self._link, self._link.machine
        found: Differences = {}
        known: dict[tuple[int, int], tuple[Layout, list[bytes]]] = {}  # by worker and version
        left = set(workers)

        def is_ready() -> bool:
            machine.check_open()
            return any(self._state(worker, model_id) is not None for worker in left)

        while left and (now := link.loop.time()) < deadline and await link.wait(is_ready, deadline - now):
            self._link.caught_up()
            states = {worker: self._state(worker, model_id) for worker in left}
            found |= {worker: NotComparable(why) for worker, why in states.items() if isinstance(why, str)}
            current = {worker: target for worker, target in states.items() if isinstance(target, Target)}
            verification = machine.verify(model_id, current, link.loop.time())
            link.settle()
            known |= await self._own({w: t for w, t in current.items() if (w, t.version) not in known})
            await self._answered(verification, deadline)
            found |= {worker: NotComparable(problem) for worker, problem in verification.problems.items()}
            for worker, verified in verification.found.items():
                if (own := known.get((worker, verified.version))) is not None:
                    found[worker] = _differences(*own, verified)
            left -= found.keys()
        return found | {worker: self._late(worker, model_id, timeout) for worker in left}

    async def _answered(self, verification: Verification, deadline: float) -> None:
        def is_over() -> bool:
            self._link.machine.check_open()
            return not verification.waiting

        await self._link.wait(is_over, deadline - self._link.loop.time())

    def _state(self, worker: int, model_id: str) -> Target | str | None:
        """What a worker should have, if it has it; why it will not; None: it may come to have it."""
        machine = self._link.machine
        if (target := machine.targets.newest(worker, model_id)) is None:
            return "nothing has been published for it yet"
        if (peer := machine.membership.find(worker)) is not None and peer.hello.takes:
            return "it has no model, but takes versions itself"  # perhaps not for a long time
        outcome = machine.progress.of(target.version, [worker], [model_id])
        if worker in outcome.failed:
            return str(outcome.failed[worker])
        return target if worker in outcome.acked else None

    def _late(self, worker: int, model_id: str, timeout: float) -> NotComparable:
        peer, target = self._link.machine.membership.find(worker), self._link.machine.targets.newest(worker, model_id)
        has, newest = 0 if peer is None else peer.applied.get(model_id, 0), 0 if target is None else target.version
        if has < newest:
            return NotComparable(f"it has version {has}, and after {timeout:g} s still not version {newest}")
        return NotComparable(f"it has not answered for one of the newest versions within {timeout:g} s")

    async def _own(self, targets: Mapping[int, Target]) -> dict[tuple[int, int], tuple[Layout, list[bytes]]]:
        over, link = threading.Event(), self._link
        entries = {target.slab: [[view] for view in target.slab.views] for target in targets.values()}

        def hash_all() -> dict[Slab, list[bytes]]:
            return {slab: digests_of(views, lambda: over.is_set() or link.closed) for slab, views in entries.items()}

        for slab in entries:
            slab.retain()
        try:
            digests = await elsewhere("asyncsync-verify", hash_all, over.set)
            return {(worker, t.version): (t.slab.layout, digests[t.slab]) for worker, t in targets.items()}
        finally:
            for slab in entries:
                slab.release()
            link.notify()  # a publication may be waiting for one of them


def _differences(layout: Layout, digests: list[bytes], verified: Verified) -> list[str] | NotComparable:
    if len(digests) != len(verified.digests):
        return NotComparable(f"it has answered for {len(verified.digests)} tensors, not {len(digests)}")
    pairs = zip(digests, verified.digests, strict=True)
    differ = [theirs not in (own, NOTHING) for own, theirs in pairs]
    return [dotted(path) for path, i in layout.index.items() if differ[i]]
