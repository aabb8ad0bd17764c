"""A relay inside a process of its own workers: it receives for its host into shared memory, on the loop thread of the
blocking API. The ranks of an inference engine on one host read one copy so, however the weights come there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asyncsync.net.endpoint import draw_endpoint
from asyncsync.net.keys import Credentials, KeyFiles
from asyncsync.relay.process import Relay
from asyncsync.runtime import loop_thread


class EmbeddedRelay:
    """Blocking, and not for the loop's own thread. Raises NotConnected if it cannot connect.

    Args:
        upstream: the sender's address, as its workers have it.
        keys: those of a receiver, where the sender has keys.

    Attributes:
        endpoint: where the workers of this host connect, with a :class:`asyncsync.SharedMemWeightSyncScheme`.
    """

    def __init__(self, upstream: str, keys: KeyFiles | None = None) -> None:
        self.endpoint = draw_endpoint()
        credentials = None if keys is None else partial(keys.receiver, 0)
        self._relay: Relay | None = None
        loop_thread.run(partial(self._open, upstream, credentials))

    async def _open(self, upstream: str, credentials: Callable[[], Credentials] | None) -> None:
        self._relay = Relay(upstream, self.endpoint, shared=True, credentials=credentials)
        loop_thread.keep(self._end, True)

    async def _end(self, timeout: float) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            try:
                await relay.shutdown()
            finally:
                loop_thread.keep(self._end, False)

    def close(self) -> None:
        """Leave; may be called again."""
        if self._relay is not None:
            loop_thread.run(partial(self._end, 0.0))
