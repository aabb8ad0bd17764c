"""Verifying: do the workers' models hold the tensors that were sent?

A worker hashes its model in a thread, inside a hold of its gate. So it hashes the tensors of one version, and updates
wait no longer than the hashing takes. Meanwhile the trainer hashes its own slab of the version that the worker should
have. If a worker has applied a newer version meanwhile, the trainer asks it again.

Each tensor of the layout has one digest. If the trainer's tensors are tied and the model's are not, the digest stands
for all of the model's tensors. Extra state is not compared.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from asyncsync.bus.applying import Applying
from asyncsync.bus.publishing import Publishing
from asyncsync.errors import SchemaMismatch
from asyncsync.protocol.relays import Verified
from asyncsync.protocol.targets import Target
from asyncsync.protocol.trainer import Trainer
from asyncsync.protocol.worker import Worker
from asyncsync.runtime.threads import run_in_thread
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.weights.tensors import clone, is_plain_bytes, memory_of
from asyncsync.weights.tree import dotted
from asyncsync.wire.messages import DIGEST_BYTES, Epoch, Verify

PIECE = 4 << 20  # bytes; after each piece, which takes some milliseconds, the thread checks whether to stop
NOTHING = bytes(DIGEST_BYTES)  # the digest of an entry for which the worker's model has no tensor


@dataclass(frozen=True)
class NotComparable:
    """Why ``verify`` cannot compare a worker's model: the worker casts or converts the weights, has no model or another
    version, is lost, or has not answered."""

    reason: str

    def __str__(self) -> str:
        return f"not comparable: {self.reason}"


Differences = dict[int, list[str] | NotComparable]


def digests_of(entries: Iterable[Sequence[torch.Tensor]], is_stopped: Callable[[], bool]) -> list[bytes]:
    """A digest for each entry of a layout, of the tensors that hold its value. Wrong if it was stopped."""
    digests = []
    for tensors in entries:
        each = {_hash(tensor, is_stopped) for tensor in tensors}
        if len(each) < 2:
            digests.append(each.pop() if each else NOTHING)
        else:  # the tensors differ: make a digest that is not that of any one of them
            digests.append(hashlib.blake2b(b"".join(sorted(each)), digest_size=DIGEST_BYTES).digest())
    return digests


def _hash(tensor: torch.Tensor, is_stopped: Callable[[], bool]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if tensor.numel() and not is_stopped():
        data = memory_of(tensor if is_plain_bytes(tensor) else clone(tensor).cpu())
        for begin in range(0, len(data), PIECE):
            if is_stopped():
                break
            digest.update(data[begin : begin + PIECE])
    return digest.digest()


# -- the worker's answer -----------------------------------------------------------------------------------------------


async def answer(link: Applying, question: Verify) -> None:
    """The task ``link.answering``. When it has ended, even by cancellation, no thread reads a model any more."""
    version, digests, problem = 0, list[bytes](), ""
    try:
        version, digests = await _digest_model(link, question)
    except SchemaMismatch as error:
        problem = str(error)
    except Exception as error:  # perhaps from the user's tensors: the trainer gets the text
        problem = f"its model could not be read: {type(error).__name__}: {error}"
    finally:
        link.answering = None
    if not link.closed:
        with link.guard():
            link.machine.answer(question, version, digests, problem)
            link.act_on_changes()


async def _digest_model(link: Applying, question: Verify) -> tuple[int, list[bytes]]:
    """The version that a model shows, and its digests. Raises SchemaMismatch if there is nothing to compare."""
    machine, model_id = link.machine, link.machine.session.local(question.model_id)
    async with link.gate.hold():
        machine.end_fast_path()
        if (binding := machine.models.get(model_id)) is None:
            raise SchemaMismatch(f"it does not have the model {model_id!r} (any more)")
        if binding.bound is None:
            raise SchemaMismatch("it has no model")
        epoch, version, *_ = link.shown.get(model_id, (None, 0))
        if epoch != question.epoch or (layout := _layout_of(machine, model_id, question.epoch, version)) is None:
            raise SchemaMismatch("it has no version of this sender yet")
        stop = threading.Event()
        entries = binding.tensors_of(layout)
        digests = await run_in_thread("asyncsync-verify", partial(digests_of, entries, stop.is_set), stop.set)
    return version, digests


def _layout_of(machine: Worker, model_id: str, epoch: Epoch, version: int) -> Layout | None:
    held = machine.holdings.updates.get(model_id)
    if held is not None and held[:2] == (epoch, version):
        return held[2].layout
    for staging in machine.staged:  # another thread may have applied it, which the machine learns later
        part = staging.parts.get(model_id)
        if part is not None and (staging.epoch, part.version) == (epoch, version):
            return part.slab.layout
    return None


# -- the trainer's comparison ------------------------------------------------------------------------------------------


async def verify(link: Publishing, model_id: str, workers: Iterable[int], timeout: float) -> Differences:
    """For each of these workers, the names of the tensors that differ. Raises AckTimeout if another call has not
    ended in time; ClosedError or Fenced."""
    deadline = link.loop.time() + timeout
    late = f"another verify() of this sender has not ended within {timeout:g} s"
    await link.verify_lock.acquire_until(deadline, lambda: late)
    try:
        return await _verify(link, model_id, list(workers), deadline, timeout)
    finally:
        link.machine.verification = None
        link.verify_lock.release()


async def _verify(link: Publishing, model_id: str, workers: list[int], deadline: float, timeout: float) -> Differences:
    machine = link.machine
    found: Differences = {}
    own_digests: dict[tuple[int, int], tuple[Layout, list[bytes]]] = {}  # by worker and version
    left = set(workers)

    def is_ready() -> bool:
        machine.check_open()
        return any(_applied_target(machine, worker, model_id) is not None for worker in left)

    def is_answered() -> bool:
        machine.check_open()
        return not verification.waiting

    while left and (now := link.loop.time()) < deadline and await link.wait(is_ready, deadline - now):
        link.end_fast_path()
        targets = {worker: _applied_target(machine, worker, model_id) for worker in left}
        found |= {worker: NotComparable(why) for worker, why in targets.items() if isinstance(why, str)}
        applied = {worker: target for worker, target in targets.items() if isinstance(target, Target)}
        verification = machine.verify(model_id, applied, link.loop.time())
        link.act_on_changes()
        new = {worker: target for worker, target in applied.items() if (worker, target.version) not in own_digests}
        own_digests |= await _hash_slabs(link, new)
        await link.wait(is_answered, deadline - link.loop.time())
        found |= {worker: NotComparable(problem) for worker, problem in verification.problems.items()}
        for worker, verified in verification.found.items():
            if (own := own_digests.get((worker, verified.version))) is not None:
                found[worker] = _differences(*own, verified)
        left -= found.keys()
    return found | {worker: _why_late(machine, worker, model_id, timeout) for worker in left}


def _applied_target(machine: Trainer, worker: int, model_id: str) -> Target | str | None:
    """A worker's target, if the worker has applied it; a text that says why it never will; None: it may."""
    if (target := machine.targets.newest(worker, model_id)) is None:
        return "nothing has been published for it yet"
    if (peer := machine.membership.find(worker)) is not None and peer.hello.takes:
        return "it has no model, but takes versions itself"  # so it may not apply its target for a long time
    outcome = machine.progress.of(target.version, [worker], [model_id])
    if worker in outcome.failed:
        return str(outcome.failed[worker])
    return target if worker in outcome.acked else None


def _why_late(machine: Trainer, worker: int, model_id: str, timeout: float) -> NotComparable:
    peer, target = machine.membership.find(worker), machine.targets.newest(worker, model_id)
    has, newest = 0 if peer is None else peer.applied.get(model_id, 0), 0 if target is None else target.version
    if has < newest:
        return NotComparable(f"it has version {has}, and after {timeout:g} s still not version {newest}")
    return NotComparable(f"it has not answered for one of the newest versions within {timeout:g} s")


async def _hash_slabs(
    link: Publishing, targets: Mapping[int, Target]
) -> dict[tuple[int, int], tuple[Layout, list[bytes]]]:
    """The layouts and digests of these workers' targets, by worker and version."""
    stop = threading.Event()
    entries = {target.slab: [[view] for view in target.slab.views] for target in targets.values()}

    def hash_all() -> dict[Slab, list[bytes]]:
        return {slab: digests_of(views, lambda: stop.is_set() or link.closed) for slab, views in entries.items()}

    for slab in entries:
        slab.retain()
    try:
        digests = await run_in_thread("asyncsync-verify", hash_all, stop.set)
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
