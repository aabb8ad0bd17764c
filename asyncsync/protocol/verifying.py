"""Verifying: the trainer asks workers what their models hold, tensor by tensor. No I/O, no clock of its own.

A worker hashes the tensors of one model once per question. It answers in pages. The trainer requests one after the
other, and again what was lost. A relay passes questions and pages on and remembers neither, because the trainer repeats
what gets no answer. The trainer asks at most :data:`AT_ONCE` workers at a time, so that a relay's queue holds few
questions, however many workers are behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from asyncsync.protocol.peer import Peer
from asyncsync.wire.messages import DIGEST_BYTES, Digests, Epoch, Verify

AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Verified:
    """What a worker's model holds: one digest per tensor, in the order of the layout of this version."""

    version: int
    digests: tuple[bytes, ...]


@dataclass(slots=True)
class _Pages:
    """What one worker incarnation has answered so far; ``due``: when to request the next page."""

    nonce: bytes
    due: float = 0.0
    found: bytearray = field(default_factory=bytearray)


class Verification:
    """One question to some workers. ``found`` and ``problems`` have the answers; those in ``waiting`` have still to be
    asked or to answer. ``peer_of``: the trainer's record of a worker, None while there is none."""

    def __init__(
        self,
        epoch: Epoch,
        number: int,
        model_id: str,
        workers: Iterable[int],
        peer_of: Callable[[int], Peer | None],
        retry_interval: float,
    ) -> None:
        self.found: dict[int, Verified] = {}
        self.problems: dict[int, str] = {}
        self.waiting: dict[int, _Pages | None] = dict.fromkeys(workers)
        self._epoch = epoch
        self.number = number
        self.model_id = model_id
        self._peer_of = peer_of
        self._retry_interval = retry_interval

    def due(self, now: float) -> list[Verify]:
        """The questions to send now. A worker that is lost has a problem; one that is back is asked anew."""
        questions = []
        for worker, pages in list(self.waiting.items())[:AT_ONCE]:
            peer = self._peer_of(worker)
            if peer is None or peer.lost:
                self._answered(worker, f"it is lost: {peer.lost}" if peer is not None else "it is not connected")
                continue
            if pages is None or pages.nonce != peer.nonce:
                pages = self.waiting[worker] = _Pages(peer.nonce)
            if pages.due <= now:
                pages.due = now + self._retry_interval
                start = len(pages.found) // DIGEST_BYTES
                questions.append(Verify(self._epoch, self.number, worker, peer.nonce, self.model_id, start))
        return questions

    def answer(self, page: Digests, now: float) -> None:
        """Take in a page; one that was not requested changes nothing."""
        pages = self.waiting.get(page.worker)
        if pages is None or pages.nonce != page.nonce or page.start * DIGEST_BYTES != len(pages.found):
            return
        pages.found += page.digests
        pages.due = now
        if page.problem:
            self._answered(page.worker, page.problem)
        elif len(pages.found) >= page.count * DIGEST_BYTES:
            digests = [bytes(pages.found[i : i + DIGEST_BYTES]) for i in range(0, len(pages.found), DIGEST_BYTES)]
            self.found[page.worker] = Verified(page.version, tuple(digests))
            del self.waiting[page.worker]
        elif not page.digests:
            self._answered(page.worker, "it has answered with an empty page")

    def _answered(self, worker: int, problem: str) -> None:
        self.problems[worker] = problem
        del self.waiting[worker]
