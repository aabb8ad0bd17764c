"""What a transport must do to carry slabs; nothing else of the library depends on how it does it.

The bus gives the instruction and keeps the account; a transport moves the bytes of one slab. On the sender,
:meth:`offer` makes a slab available and returns a descriptor that tells the worker's side where it is; on the receiver,
:meth:`fetch` brings it in. A user's own transport subclasses :class:`TransportBackend`; its scheme returns it from
``create_transport``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from asyncsync.slab import Slab

__all__ = ["TransportBackend"]


class TransportBackend(ABC):
    """Moves slabs. The same class serves both ends; one object serves all workers of a sender."""

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes | None:
        """Sender: make a packed slab available to these workers (None: everybody).

        Returns:
            A descriptor of at most 64 KiB that travels with the instruction, or None: the bytes go as chunks on the
            bus.
        """
        return None

    def retire(self, descriptor: bytes) -> None:  # noqa: B027 - most transports have nothing to do
        """Sender: no worker will ask for this slab any more."""

    @abstractmethod
    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Receiver: bring the slab's bytes into ``into``, completely or with an exception.

        Args:
            descriptor: what :meth:`offer` returned.
            into: writable, as long as the slab.
            deadline: by the running loop's clock, in seconds.
        """

    def close(self) -> None:  # noqa: B027
        """Release what this end holds; idempotent."""
