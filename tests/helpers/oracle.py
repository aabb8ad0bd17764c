"""What must hold after every step of a simulation; a violation is an AssertionError."""

from collections import Counter
from collections.abc import Iterable, Iterator

from asyncsync.protocol.targets import Target
from asyncsync.protocol.trainer import Trainer
from asyncsync.weights.slab import Slab
from helpers.machines import SHAPES
from helpers.simulated import Record, TrainerProcess, WorkerProcess, World


class Oracle:
    world: World
    now: float
    trainers: list[TrainerProcess]
    workers: list[WorkerProcess]
    records: dict[int, Record]
    images: dict[int, bytes]

    def check(self) -> None:
        for trainer in self.trainers:
            if trainer.alive:
                self._check_trainer(trainer)
        for worker in self.workers:
            if worker.alive:
                self._check_worker(worker)
                if self.world.lent:
                    self._check_memory(worker)

    def _check_trainer(self, trainer: TrainerProcess) -> None:
        machine = trainer.machine
        holders = Counter(target.slab for target in targets_of(machine))
        targets = len(holders)
        for peer in machine.peers.values():
            if peer.transfer is not None:
                holders.update(peer.transfer._slabs)
                assert not peer.lost
        pushed = machine.fanout._pushed
        holders.update([] if pushed is None else pushed._slabs)
        lent = 0
        for leases in machine.leases.of.values():
            holders.update(slab for _, slab in leases.slabs.values())
            lent += len(leases.slabs)
        bases = 0
        for peer in machine.peers.values():
            for encoding in () if peer.transfer is None else peer.transfer.encodings:
                if encoding is not None:
                    both = [slab for slab in (encoding.slab, encoding.base) if slab is not None]
                    holders.update(both)
                    bases += len(both) - 1
        packing = [slab for slab, _ in trainer.packing]
        holders.update(packing)
        for base in [slab.base[1] for slab in list(holders) if slab.base is not None]:
            assert base.base is None, "a base keeps its own"
            holders[base] += 1
            bases += 1
        for sharer in trainer.sharers.values():
            holders.update(sharer.slabs.values())
            for transfer in sharer.transfers.values():
                holders.update(transfer._slabs)
        for slab, count in holders.items():
            assert slab.references == count, f"{slab.references} references to a slab that {count} hold"
        for share in [slab for slab in holders if slab.source]:
            del holders[share]  # it has no memory
        slabs, spares = trainer.pool.slabs + trainer.slots.slabs, 2 if self.world.lent else 1
        assert len(holders) <= slabs <= len(holders) + spares, "a slab is neither in use nor the spare one"
        # Distinct live targets, versions that are being fetched, and the spare.
        fetching = sum(len(p.transfer._slabs) for p in machine.peers.values() if p.transfer is not None)
        fetching += 0 if pushed is None else len(pushed._slabs)
        assert slabs <= targets + fetching + bases + lent + len(packing) + spares
        if (verification := machine.verification) is not None:
            for worker, found in verification.found.items():
                number = trainer.records[found.version - 1].number_for(worker, verification.model_id)
                assert found.digests == (digest_of(number),) * len(SHAPES), f"worker {worker} has not version {found}"
        for publication in machine.targets.pending.values():
            assert publication.awaiting, "a publication that awaits nobody is still pending"

    def _check_worker(self, worker: WorkerProcess) -> None:
        machine = worker.machine
        holders: Counter[Slab] = Counter(slab for _, _, slab in machine.holdings.updates.values())
        holders.update(slab for homes in machine.holdings.failed_slabs.values() for slab in homes)
        for staging in machine.staged:
            assert not staging.abandoned
            holders.update(part.slab for part in staging.parts.values())
        if (held := machine.held) is not None:
            assert not held.abandoned
            assert held.epoch == machine.session.epoch, f"{worker} holds weights of another trainer"
            holders.update(part.slab for part in held.parts.values())
        if (taken := machine.taken) is not None:
            holders.update(part.slab for part in taken.staging.parts.values())
            holders.update(slab for *_, slab in taken.previous.values())
            for staging in machine.staged:
                for model in staging.parts.keys() & taken.staging.parts.keys():
                    here = taken.staging.epoch, taken.staging.versions[model]
                    assert (staging.epoch, staging.versions[model]) > here, (
                        f"{worker} gets again what it has taken of {model!r}, or something older"
                    )
        if machine.incoming is not None:
            holders.update(slab for slab in machine.incoming.slabs if slab is not None)
            holders.update(slab for slab in machine.incoming.bases if slab is not None)
            ahead = machine.incoming.granted - machine.incoming.received
            assert ahead <= self.world.settings.window_bytes, f"{worker} lets {ahead} bytes be sent ahead"
        for share in machine.shares.values():
            holders.update(share.slabs)
            assert share.granted - share.received <= self.world.settings.window_bytes
        holders.update(slab for *_, slab in (*machine.fetches, *worker.fetches))
        holders.update(use.slab for use in worker.uses if use.kind == "reader")
        for model in worker.models:
            if (version := machine.holdings.version(model)) and machine.session.epoch is not None:
                said = (machine.session.epoch, version)
                assert worker.epochs[model] >= said, f"{worker} says that {model!r} is at {said}, and it is not"
        if (fast := machine.fast_path) is not None:
            holders.update((fast._newest, fast._next))
            busy = machine.staged or machine.held or machine.incoming or machine.holdings.leased
            assert not busy, f"{worker} has a fast path beside something else"
        for slab, count in holders.items():
            assert slab.references == count, f"{worker}: {slab.references} references to a slab that {count} hold"
        for borrowed in worker.mapped.values():
            assert not borrowed.references or borrowed in holders, f"{worker} keeps a slot that nothing uses"
        own = sum(not slab.leased for slab in holders)
        assert own <= machine.pool.slabs <= own + 1, f"{worker} leaks slabs"
        for staging in machine.staged:
            if staging is worker.running:
                continue
            assert staging.epoch == machine.session.epoch, f"{worker} is about to apply weights of another trainer"
            for model, part in staging.parts.items():
                assert part.version >= machine.holdings.version(model), (
                    f"{worker} is about to apply an older version of {model!r}"
                )

    def _check_memory(self, worker: WorkerProcess) -> None:
        """Whatever a worker may read in place is what it was when it was lent."""
        machine = worker.machine
        seen = [(*held, model) for model, held in machine.holdings.updates.items()]
        for staging in (*machine.staged, *filter(None, [machine.held, worker.taken and worker.taken.staging])):
            seen += [(staging.epoch, part.version, part.slab, m) for m, part in staging.parts.items()]
        if (incoming := machine.incoming) is not None:
            parts = zip(incoming.parts, incoming.slabs, strict=True)
            seen += [(machine.session.epoch, p.version, slab, p.model_id) for p, slab in parts if slab is not None]
        for epoch, version, slab, model in seen:
            if slab.leased:
                number = self._number(worker, epoch, version, model)
                assert slab.memory == self.images[number], f"version {version} of {model!r} was written under {worker}"
        for use in worker.uses:
            assert use.slab.memory == self.images[use.number], (
                f"{use.number} was written under a {use.kind} of {worker}"
            )

    def _number(self, worker: WorkerProcess, epoch: tuple[int, int], version: int, model: str) -> int:
        """What this version of a model is for this worker."""
        trainer = next(t for t in self.trainers if t.epoch == epoch)
        return trainer.records[version - 1].number_for(worker.index, self.world.topic(model))

    def _observe(self, worker: WorkerProcess) -> None:
        """After something was applied: is it what it must be?"""
        found = {model: worker.look(model) for model in worker.models}
        changed = [model for model, number in found.items() if number != worker.contents[model]]
        worker.contents.update(found)
        for model in changed:
            number = worker.contents[model]
            record = self.records.get(number)
            assert record is not None, f"{worker} holds {number}, which nobody has published"
            owner = record.number_for(worker.index, self.world.topic(model))
            assert owner == number, f"{worker} holds the weights of another worker or model in {model!r}: {record}"
            assert not record.rejected, f"{worker} holds a publication that was rejected, or dropped: {record}"
            assert not record.staged, f"{worker} holds a publication that was not committed: {record}"
            mark = (record.trainer.epoch, record.version)
            before = worker.epochs.get(model)
            assert before is None or mark > before, f"{worker} went back from {before} to {mark} of {model!r}"
            worker.epochs[model] = mark
            for objector in record.objectors:
                machine = record.trainer.machine
                if self._overtaken(record, objector.index) or self._should_have_it_anyway(record, objector.index):
                    continue
                peer = machine.peers.get(objector.index)
                is_known = peer is not None and peer.nonce == objector.machine.session.nonce
                steady = is_known and not peer.lost and not peer.slow
                early = self.now < record.time + self.world.settings.layout_patience
                assert not (steady and early), (
                    f"{worker} has {record}, which {objector} cannot take and has not been asked about"
                )
        for model in changed:
            self._check_together(worker, self.records[worker.contents[model]])

    def _should_have_it_anyway(self, record: Record, worker: int) -> bool:
        """Whether something older has given this worker the same layout: then it concerns this worker alone."""
        for model in record.numbers:
            if (number := record.number_for(worker, model)) is None:
                continue
            for older in record.trainer.records[: record.version - 1]:
                before = older.number_for(worker, model)
                if older.is_meant and before is not None and older.dtypes[before] is record.dtypes[number]:
                    return True
        return False

    def _check_together(self, worker: WorkerProcess, record: Record) -> None:
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
        later = [r for r in record.trainer.records if r.version > record.version and r.is_meant]
        return any(r.number_for(worker, m) is not None for r in later for m in models or record.numbers)


def digest_of(number: int) -> bytes:
    return b"%016d" % number


def targets_of(machine: Trainer) -> Iterator[Target]:
    """Present and coming."""
    for targets in machine.targets._target_maps(machine.targets.models):
        yield from targets.values()
