"""Certificates: keys in files, and the directory of the clients that a sender lets in.

The format is that of ``zmq.auth`` (CZMQ's), which other programs read and write. ``NAME.key`` has a public key,
``NAME.key_secret`` the secret one, too. One line of a client's metadata has a meaning here: ``workers = 0-3, 7``, the
workers that the holder of this key may be; without it, any.

``zmq.auth`` itself is not used. Its ``create_certificates`` lets other users read the secret key, overwrites files, and
writes no metadata into public ones; ``load_certificate`` reads no metadata, has no limit and takes any text for a key;
``load_certificates`` reads none if one file is half written.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from zmq.utils import z85

from asyncsync.errors import NotConnected

logger = logging.getLogger("asyncsync")

MAX_BYTES = 16 << 10
MAX_RANGES = 256
LINE = re.compile(r"\s+(public-key|secret-key|workers)\s*=(.*)")
RANGE = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)
OTHERS_WRITE, OTHERS_USE = 0o022, 0o077
SECRET_HEAD = "#   A CURVE (ZeroMQ) secret key: keep it on the one host that uses it\n"
PUBLIC_HEAD = "#   A CURVE (ZeroMQ) public key: a user who can replace this file is trusted in its owner's place\n"
SUFFIX = ".key"
AGAIN_SECONDS = 1.0
SHARE = 0.02  # of the event loop's time, with many files, too
LONGEST_PAUSE = 1.5  # seconds, with however many: a key that is taken off is good for nothing within two

Mark = tuple[int, ...]


@dataclass(frozen=True)
class Workers:
    """The workers that the holder of a key may be; without ranges: any."""

    ranges: tuple[range, ...] = ()

    def __contains__(self, worker: int) -> bool:
        return not self.ranges or any(worker in one for one in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in self.ranges) or "any"


def parse_workers(text: str) -> Workers:
    """Of ``0-3, 7``. Raises ValueError for anything else; an empty text does not mean "any"."""
    pieces = [piece.strip() for piece in text.split(",")]
    if len(pieces) > MAX_RANGES:
        raise ValueError(f"workers = … has more than {MAX_RANGES} ranges")
    ranges = []
    for piece in pieces:
        match = RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"workers = {text[:80]!r} is not a list of indices and ranges, such as 0-3, 7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"workers = {text[:80]!r}: the range {piece} runs backwards")
        ranges.append(range(first, last + 1))
    return Workers(tuple(ranges))


@dataclass(frozen=True)
class Certificate:
    """What a file says: keys of 40 characters (z85), ``secret`` is None in a public one. Its ``name`` is for people."""

    public: bytes
    secret: bytes | None = field(default=None, repr=False)
    workers: Workers = Workers()
    name: str = ""

    def encode(self, *, secret: bool) -> str:
        """The text of the file, with or without the secret key."""
        text = f"{SECRET_HEAD if secret else PUBLIC_HEAD}\nmetadata\n"
        text += f"    workers = {self.workers}\n" if self.workers.ranges else ""
        text += f'curve\n    public-key = "{self.public.decode()}"\n'
        return text + (f'    secret-key = "{self.secret.decode()}"\n' if secret and self.secret else "")

    @classmethod
    def decode(cls, text: str) -> Certificate:
        """Raises ValueError if the text is no certificate, or says something twice."""
        found: dict[str, str] = {}
        for line in text.splitlines():
            if match := LINE.fullmatch(line):
                if match[1] in found:
                    raise ValueError(f"it has {match[1]} twice")
                found[match[1]] = match[2].strip().strip("\"'")
            elif line.strip().lower().startswith("worker"):  # if ignored, the key would be good for any worker
                raise ValueError(f"{line.strip()[:80]!r} is not understood; expected, say, '    workers = 0-3, 7'")
        public, secret = _key_of(found, "public-key"), _key_of(found, "secret-key")
        if public is None:
            raise ValueError("it has no public-key")
        return cls(public, secret, parse_workers(found["workers"]) if "workers" in found else Workers())


def _key_of(found: Mapping[str, str], name: str) -> bytes | None:
    if name not in found:
        return None
    with suppress(ValueError, KeyError, struct.error):  # five characters can say more than four bytes hold
        if len(z85.decode(found[name])) == 32:
            return found[name].encode()
    raise ValueError(f"{name} is not a key of 40 characters")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # to open a pipe would wait for its writer


def read_certificate(path: str, *, secret: bool) -> Certificate:
    """Read a certificate. With ``secret``, it must have its secret key. Raises NotConnected, which names the file, what
    is wrong with it and the remedy; also if others can read a secret key, or change the file."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise NotConnected(f"{path} is not a file")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 10} KiB")
        found = Certificate.decode(data.decode())
    except OSError as error:
        raise NotConnected(f"cannot read the key in {path}: {error.strerror}") from error
    except ValueError as error:
        raise NotConnected(f"{path} is not a certificate such as `asyncsync keygen` makes: {error}") from error
    if secret and found.secret is None:
        raise NotConnected(f"{path} has no secret key in it: give the file whose name ends with .key_secret")
    if found.secret is not None and mode & OTHERS_USE:
        raise NotConnected(f"other users may read the secret key in {path}: chmod 600 {path}")
    check_writers(path, mode)
    return found


def check_writers(path: str, mode: int) -> None:
    """Raise NotConnected if other users than the owner can change who is trusted."""
    if mode & OTHERS_WRITE:
        raise NotConnected(f"other users may change {path}, and so decide which keys are trusted: chmod go-w {path}")


def write_new(files: Sequence[tuple[Path, str]], *, mode: int) -> None:
    """Write these files, each whole or not at all, in this order. Raises FileExistsError if one is there already; that
    one stays as it is."""
    for path, text in files:
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as file:  # its owner's alone until here
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            os.link(file.name, path)  # unlike a renaming, this never replaces a file


class ClientList:
    """The clients that a sender lets in: a directory of public certificates, ``*.key``, read again when it has changed.

    At the start every file has to be right: else NotConnected is raised. Later, a file that cannot be read keeps what
    it said before, because somebody may just be writing it. Only a file that has gone, or that says something else,
    takes a key off the list.

    Attributes:
        clients: by their public keys.
        removed: how many keys were taken off so far.
        looked: when the directory was read last, by the monotonic clock; 0: at the start.
    """

    def __init__(self, directory: str) -> None:
        self.clients: dict[bytes, Certificate] = {}
        self.removed = 0
        self.looked = 0.0
        self._pause = 0.0
        self._directory = directory
        self._files: dict[str, tuple[Mark, Certificate]] = {}
        self._warned: dict[str, Mark] = {}
        try:
            check_writers(directory, os.stat(directory).st_mode)
            self._update(self._scan(), strict=True)
        except OSError as error:
            raise NotConnected(f"cannot read the list of clients in {directory}: {error.strerror}") from error
        if not self.clients:
            logger.warning("no client is listed in %s: no worker can connect until it has a NAME.key", directory)

    def refresh(self, soon: float = AGAIN_SECONDS) -> bool:
        """Look for changes, unless that was done less than ``soon`` seconds ago. Returns whether there were any."""
        if time.monotonic() < self.looked + max(soon, self._pause):
            return False
        began = time.thread_time()  # waiting for the disk or another thread is no work
        before = self.clients
        try:
            self._update(self._scan(), strict=False)
            self._warned.pop("", None)
        except OSError as error:
            self._warn("", (), f"cannot read the list of clients in {self._directory}: {error.strerror}")
        self.looked = time.monotonic()
        self._pause = min((time.thread_time() - began) / SHARE, LONGEST_PAUSE)
        return self.clients != before

    def _scan(self) -> dict[str, Mark]:
        found: dict[str, Mark] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    with suppress(FileNotFoundError):  # it has gone meanwhile, or is a link to nothing
                        about = entry.stat()
                        found[entry.name] = (about.st_mtime_ns, about.st_ino, about.st_size)
        return found

    def _update(self, found: Mapping[str, Mark], *, strict: bool) -> None:
        files: dict[str, tuple[Mark, Certificate]] = {}
        clients: dict[bytes, Certificate] = {}
        for name, mark in sorted(found.items()):
            known = self._files.get(name)
            try:
                if known is None or known[0] != mark:
                    read = read_certificate(os.path.join(self._directory, name), secret=False)
                    known = mark, replace(read, name=name.removesuffix(SUFFIX))
                if (same := clients.get(known[1].public)) is not None:
                    both = f"{same.name}{SUFFIX} and {name}"
                    raise NotConnected(f"{self._directory}: {both} have the same key; remove one of them")
            except NotConnected as error:
                if strict:
                    raise
                self._warn(name, mark, str(error))
            if known is not None:
                files[name] = known
                clients.setdefault(known[1].public, known[1])
        self.removed += len(self.clients.keys() - clients.keys())
        self._files, self.clients = files, clients

    def _warn(self, name: str, mark: Mark, why: str) -> None:
        if self._warned.get(name) != mark:
            self._warned[name] = mark
            logger.warning("%s; until you correct this, the list of clients stays as it was", why)
