"""What both state machines begin with: which process this is, sizes and times."""

from __future__ import annotations

from dataclasses import dataclass

from asyncsync.wire.messages import MAX_DIGESTS

EAGER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is, on which boot of which host (empty: unknown), in which pid namespace."""

    pid: int = 0
    boot: str = ""
    namespace: int = 0

    def is_beside(self, pid: int, boot: str, namespace: int) -> bool | None:
        """Whether that is a process of this host and pid namespace, whose pid can be watched; None: unknown."""
        if not (pid and self.boot and boot):
            return None
        return self.boot == boot and self.namespace == namespace


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in bytes, times in seconds.

    Args:
        eager_bytes: updates up to this size ride in the UPDATE itself. It saves a question and its answer: 4 MiB to two
            workers take four fifths of the time.
        chunk_bytes: the pieces of larger ones.
        window_bytes: how much a worker lets the trainer send ahead of what has arrived.
        ping_interval: between two PINGs of a live peer.
        slow_after: silence that marks a peer slow.
        retry_interval: between attempts to reach an unreachable peer, to repeat HELLO, to restart a stalled transfer.
        layout_patience: how long one worker that does not answer may hold up a new layout for the others.
        checksum: CRC-32 over every payload.
        compress: the codec, of :mod:`asyncsync.weights.encoding`, for workers that can decode it; empty: none.
        delta: a trainer keeps the version before, and a worker that has it gets what has changed.
        piece_bytes: the pieces of updates that travel as fewer bytes: one takes milliseconds to encode.
        page_digests: how many digests a worker sends at once.
        fast: False: every update goes the general way, announced by UPDATE and staged, without what is shorter in
            the steady state of a training loop.
        fanout: over tcp, the trainer sends to all workers at once what many of them are to get.
        fanout_least: it sends to fewer workers one by one.
    """

    eager_bytes: int = EAGER_BYTES
    chunk_bytes: int = 4 << 20
    window_bytes: int = 32 << 20
    ping_interval: float = 1.0
    slow_after: float = 3.0
    retry_interval: float = 5.0
    layout_patience: float = 5.0
    checksum: bool = False
    compress: str = ""
    delta: bool = False
    piece_bytes: int = 1 << 20
    page_digests: int = MAX_DIGESTS
    fast: bool = True
    fanout: bool = False
    fanout_least: int = 3
