"""What both state machines are given: which process they are in, sizes and times."""

from __future__ import annotations

from dataclasses import dataclass

from asyncsync.wire.messages import MAX_DIGESTS

EAGER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """A process: its pid, the boot id of its host (empty: unknown), and its pid namespace."""

    pid: int = 0
    boot: str = ""
    namespace: int = 0

    def is_beside(self, pid: int, boot: str, namespace: int) -> bool | None:
        """Whether that process shares this host and pid namespace, so that its pid can be watched; None: unknown."""
        if not (pid and self.boot and boot):
            return None
        return self.boot == boot and self.namespace == namespace


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in bytes, times in seconds."""

    # Updates up to this size ride in the UPDATE itself. That saves a FETCH: 4 MiB to two workers take four fifths of
    # the time.
    eager_bytes: int = EAGER_BYTES
    chunk_bytes: int = 4 << 20  # the pieces in which larger updates travel
    window_bytes: int = 32 << 20  # how much a worker lets the trainer send ahead of what has arrived
    ping_interval: float = 1.0  # between two PINGs to a peer that answers
    slow_after: float = 3.0  # silence that marks a peer as slow
    # How long to wait before trying again to reach a peer, sending HELLO again, restarting a stalled transfer, or
    # repeating a question. A worker that is not watched is lost if its connection is away for longer.
    retry_interval: float = 5.0
    layout_patience: float = 5.0  # a worker that does not answer may hold up a new layout for the others for so long
    checksum: bool = False  # whether every payload has a CRC-32
    compress: str = ""  # the codec (asyncsync.weights.encoding) for workers that can decode it; empty: none
    delta: bool = False  # the trainer keeps the version before, and sends a worker that has it only what has changed
    piece_bytes: int = 1 << 20  # the pieces of encoded updates. Each takes milliseconds to encode.
    page_digests: int = MAX_DIGESTS  # how many digests a worker sends at once
    fast: bool = True  # False switches off the fast path of training loops: UPDATE announces, and workers stage, each
    fanout: bool = False  # over tcp, the trainer sends what many workers need to all of them at once
    fanout_least: int = 3  # the trainer sends to fewer workers than this one by one
