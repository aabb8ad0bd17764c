"""Which messages are which events in the life of a version; see :mod:`asyncsync.monitor.trace`, which tells them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from asyncsync.monitor.trace import Hook, Life, Observer
from asyncsync.protocol.holdings import Staging
from asyncsync.wire.codec import decode
from asyncsync.wire.messages import (
    Again,
    Applied,
    Buffer,
    Cast,
    Epoch,
    Failed,
    Fetch,
    Instruction,
    Pong,
    Staged,
    Update,
)

if TYPE_CHECKING:
    from prometheus_client import Histogram

STEPS = {Fetch: "fetched", Staged: "staged"}
OVERTAKEN = "a newer version has come"


class SenderObserver(Observer):
    """Follows the versions of one trainer. ``awaited`` returns a worker that may still come to hold a version of these
    models; it asks the given one first. ``durations`` has how long each version took; None: there are no metrics."""

    durations: Histogram | None = None

    def __init__(self, awaited: Callable[[int, list[str], int | None], int | None], hooks: Iterable[Hook] = ()) -> None:
        super().__init__(hooks)
        self._awaited = awaited
        self._count = 0

    def begin(self, models: Iterable[str]) -> Life | None:
        """A publication begins; None: nothing listens."""
        if self.durations is None and not self.follows:
            return None
        self._count += 1
        life = Life({"id": self._count, "models": sorted(models)})
        self.tell("publish.begin", life)
        return life

    def published(self, life: Life, version: int, epoch: Epoch) -> None:
        """It has become a version, which is announced from now on."""
        life.info |= {"version": version, "epoch": f"{epoch[0]}-{epoch[1]}"}
        self.follow(version, life)
        self.tell("publish.published", life)

    def abandoned(self, life: Life, error: BaseException) -> None:
        """It was not published, or not completely."""
        if "version" in life.info:
            self.end(life.info["version"], repr(error))
        else:
            self.tell("publish.end", life, error=repr(error))

    def sent(self, worker: int, update: Update | Again) -> None:
        """An announcement is on its way to a worker."""
        if (life := self.lives.get(_version_of(update))) is None:
            return
        if worker in life.unanswered:
            self.tell("deliver.end", life, worker=worker, error="the worker was lost, and gets it again")
        life.was_announced = True
        life.unanswered[worker] = update.serial
        self.tell("deliver.begin", life, worker=worker)

    def heard(self, worker: int, instruction: Instruction) -> None:
        """A worker has said something, which has been taken in."""
        if isinstance(instruction, Applied | Pong | Failed):
            failure = f"{instruction.type_name}: {instruction.message}" if isinstance(instruction, Failed) else ""
            versions = set(instruction.versions.values())
            if isinstance(instruction, Applied) and instruction.serial:
                versions = {v for v, life in self.lives.items() if life.unanswered.get(worker) == instruction.serial}
            for version in versions:
                self._applied(worker, version, failure)
        elif isinstance(instruction, Fetch | Staged):
            for life in self.lives.values():
                if life.unanswered.get(worker) == instruction.serial:
                    self.tell(f"deliver.{STEPS[type(instruction)]}", life, worker=worker)

    def _applied(self, worker: int, version: int, failure: str = "") -> None:
        for earlier, life in self.lives.items():
            if earlier <= version and life.unanswered.pop(worker, None) is not None:
                self.tell("deliver.end", life, worker=worker, error=failure if earlier == version else OVERTAKEN)

    def check(self, *, everybody: bool = False) -> None:
        """Something has changed: see which versions are over. ``everybody``: look at each of them, also at those that
        were announced to a worker which has not answered, as it may be lost."""
        behind: set[tuple[int | str | None, ...]] = set()
        for version, life in list(self.lives.items()):
            models = life.info["models"]
            # A worker that is without a version is without the later ones of these models, too.
            if not everybody and (life.unanswered or (life.awaited, *models) in behind):
                continue
            life.awaited = self._awaited(version, models, life.awaited)
            if life.awaited is None:
                self.end(version)
            else:
                behind.add((life.awaited, *models))

    def end(self, key: int, failure: str = "") -> None:
        # It may be over before it is packed, if no worker waits for it or the trainer was shut down.
        if (life := self.lives.pop(key, None)) is None:
            return
        for worker in life.unanswered:
            self.tell("deliver.end", life, worker=worker, error=f"{OVERTAKEN}, or the worker is lost")
        self.tell("publish.end", life, error=failure)
        if self.durations is not None and life.was_announced and not (life.unanswered or failure):
            self.durations.observe((time.time_ns() - life.began) / 1e9)


class ReceiverObserver(Observer):
    """Follows the updates of one worker."""

    def __init__(self, worker: int, hooks: Iterable[Hook] = ()) -> None:
        super().__init__(hooks)
        self._worker = worker
        self._heard = 0  # when the trainer last said something: for large weights, when their last bytes came

    def heard(self, instruction: Instruction, payload: Sequence[Buffer] = ()) -> None:
        """The trainer has said something. ``payload``: of what it has said to all workers."""
        self._heard = time.time_ns()
        if isinstance(instruction, Cast):
            instruction, _ = decode(payload)
        if isinstance(instruction, Update | Again):
            epoch = "{}-{}".format(*instruction.epoch)
            info = {"id": instruction.serial, "version": _version_of(instruction), "epoch": epoch}
            life = Life(info | {"worker": self._worker}, self._heard)
            self.follow(instruction.serial, life)
            self.tell("update.begin", life, self._heard)

    def look(self, staged: Iterable[Staging]) -> None:
        """These updates are complete, and wait for the gate."""
        for staging in staged:
            if (life := self.lives.get(staging.serial)) is not None and not life.is_staged:
                life.is_staged = True
                self.tell("update.fetched", life, self._heard)
                self.tell("update.staged", life)

    def finished(self, staging: Staging, error: BaseException | None) -> None:
        """The gate has applied or refused this one."""
        for serial in [serial for serial in self.lives if serial < staging.serial]:
            self.end(serial, OVERTAKEN)
        self.end(staging.serial, "" if error is None else repr(error))

    def end(self, key: int, failure: str = "") -> None:
        if (life := self.lives.pop(key, None)) is not None:
            self.tell("update.end", life, error=failure)


def _version_of(update: Update | Again) -> int:
    return update.version if isinstance(update, Again) else update.parts[0].version
