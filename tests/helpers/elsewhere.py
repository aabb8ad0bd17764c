"""Workers that claim to be on another host: they open nobody's memory, and nobody watches their processes.

The claim is what a worker says of itself in HELLO, and the trainer goes by it. Everything else is as it is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncsync.bus import worker as link
from asyncsync.protocol import worker as protocol
from asyncsync.protocol.settings import Identity
from helpers.processes import Worker, seem_elsewhere


def claim_another_host(monkeypatch: pytest.MonkeyPatch, is_far: Callable[[int], bool]) -> None:
    """Have the workers of this process for which that is true claim it."""

    def machine(worker: int, nonce: bytes, identity: Identity, *rest: Any) -> protocol.Worker:
        if is_far(worker):
            identity = replace(identity, boot="another host")
        return protocol.Worker(worker, nonce, identity, *rest)

    monkeypatch.setattr(link, "Worker", machine)


class FarWorker(Worker):
    """A worker process that claims it."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        super().__init__(emit)
        seem_elsewhere()
