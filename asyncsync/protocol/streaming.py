"""Streaming: the bytes of updates, as they are or as fewer, as far as a worker has given credit. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.transfer import Transfer
from asyncsync.weights.encoding import Encoding, is_decodable
from asyncsync.wire.messages import Buffer, Chunk


class Streaming:
    """Sends the bytes of transfers. ``wanted``: pieces that are to be encoded, in any thread, before they are sent."""

    def __init__(self, membership: Membership, settings: Settings) -> None:
        self.wanted: deque[tuple[Encoding, int]] = deque()
        self._membership = membership
        self._settings = settings

    def begin(self, peer: Peer, transfer: Transfer, bases: Sequence[int]) -> None:
        """Choose how the bytes of an update travel to a worker that has these bases, now that it fetches them."""
        settings = self._settings
        if settings.delta or settings.compress:
            codec = settings.compress
            codec = codec if codec and is_decodable(codec, peer.hello.codecs) else ""
            transfer.encode(codec, bases, settings.piece_bytes)

    def go_on(self, peer: Peer, transfer: Transfer) -> None:
        """Send what there is credit for."""
        settings, epoch = self._settings, self._membership.epoch
        if transfer.encodings:
            chunk_bytes, want = settings.chunk_bytes, self._want
            pieces = transfer.encoded(epoch, checksum=settings.checksum, chunk_bytes=chunk_bytes, wanted=want)
            for chunk, piece in pieces:
                self._send(peer, chunk, piece)
            return
        for chunk, view in transfer.chunks(epoch, chunk_bytes=settings.chunk_bytes, checksum=settings.checksum):
            self._send(peer, chunk, view)

    def _send(self, peer: Peer, chunk: Chunk, piece: Buffer) -> None:
        peer.bytes_sent += len(piece)
        self._membership.send(peer.route, chunk, [piece] if len(piece) else ())

    def _want(self, encoding: Encoding, index: int) -> None:
        self.wanted.append((encoding, index))
