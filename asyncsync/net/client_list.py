"""The clients that a sender lets in: a directory of public certificates, ``*.key``, read again when it has changed.

At the start every file has to be right. Later, a file that cannot be read keeps what it said before: it may just be
being written. Only a file that has gone, or that says something else, takes a key off the list.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from asyncsync.errors import NotConnected
from asyncsync.net.certificates import Certificate, Workers, check_writers, read_certificate

logger = logging.getLogger("asyncsync")

SUFFIX = ".key"
AGAIN_SECONDS = 1.0
SHARE = 0.02  # of the event loop's time, with many files, too
LONGEST_PAUSE = 1.5  # seconds, with however many: a key that is taken off is good for nothing within two

Mark = tuple[int, int, int]


@dataclass(frozen=True)
class Client:
    """Who has a key: ``name`` for people, and the workers that it may be."""

    name: str
    workers: Workers


class ClientList:
    """The files of this directory. Raises NotConnected: it cannot be read, others may write to it, or one of its files
    is not as it has to be.

    Attributes:
        clients: by their public keys.
        removed: how many keys were taken off so far.
    """

    def __init__(self, directory: str) -> None:
        self.clients: dict[bytes, Client] = {}
        self.removed = 0
        self._directory = directory
        self._files: dict[str, tuple[Mark, Certificate]] = {}
        self._warned: dict[str, Mark | None] = {}
        self._looked = self._pause = 0.0
        try:
            check_writers(directory, os.stat(directory).st_mode)
            self._update(self._scan(), strict=True)
        except OSError as error:
            raise NotConnected(f"cannot read the list of clients in {directory}: {error.strerror}") from error
        if not self.clients:
            logger.warning("no client is listed in %s: no worker can connect until it has a NAME.key", directory)

    def refresh(self, soon: float = AGAIN_SECONDS) -> bool:
        """Look for changes, unless that was done less than ``soon`` seconds ago. Returns whether there were any."""
        if time.monotonic() < self._looked + max(soon, self._pause):
            return False
        began = time.thread_time()  # waiting for the disk or another thread is no work
        before = self.clients
        try:
            self._update(self._scan(), strict=False)
            self._warned.pop("", None)
        except OSError as error:
            self._warn("", None, f"cannot read the list of clients in {self._directory}: {error.strerror}")
        self._looked = time.monotonic()
        self._pause = min((time.thread_time() - began) / SHARE, LONGEST_PAUSE)
        return self.clients != before

    def _scan(self) -> dict[str, Mark]:
        found = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    with suppress(FileNotFoundError):  # it has gone meanwhile, or is a link to nothing
                        about = entry.stat()
                        found[entry.name] = (about.st_mtime_ns, about.st_ino, about.st_size)
        return found

    def _update(self, found: Mapping[str, Mark], *, strict: bool) -> None:
        files: dict[str, tuple[Mark, Certificate]] = {}
        clients: dict[bytes, Client] = {}
        for name, mark in sorted(found.items()):
            known = self._files.get(name)
            try:
                if known is None or known[0] != mark:
                    known = mark, read_certificate(os.path.join(self._directory, name), secret=False)
            except NotConnected as error:
                if strict:
                    raise
                self._warn(name, mark, str(error))
            if known is None:
                continue
            files[name] = known
            client = Client(name.removesuffix(SUFFIX), known[1].workers)
            if (same := clients.setdefault(known[1].public, client)) is not client:
                why = f"{self._directory}: {same.name}{SUFFIX} and {name} have the same key"
                if strict:
                    raise NotConnected(f"{why}; remove one of them")
                self._warn(name, mark, why)
        self.removed += len(self.clients.keys() - clients.keys())
        self._files, self.clients = files, clients

    def _warn(self, name: str, mark: Mark | None, why: str) -> None:
        if name not in self._warned or self._warned[name] != mark:
            self._warned[name] = mark
            logger.warning("%s; until you correct this, the list of clients stays as it was", why)
