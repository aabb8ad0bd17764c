"""Certificates: key pairs in files, in the format of ``zmq.auth`` (CZMQ's), which other programs read and write.

A public certificate is ``NAME.key``, one with the secret key ``NAME.key_secret``. One line of a client's metadata has a
meaning here: ``workers = 0-3, 7``, which workers the holder of this key may be; without it, any.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from zmq.utils import z85

from asyncsync.errors import NotConnected

MAX_BYTES = 16 << 10
MAX_RANGES = 256
KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # z85, of 32 bytes
LINE = re.compile(r"\s+([\w.\-/]+)\s*=\s*(.*?)\s*")
RANGE = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)
OTHERS_WRITE, OTHERS_USE = 0o022, 0o077
SECRET_HEAD = "#   A CURVE (ZeroMQ) secret key: keep it on the one host that uses it\n"
PUBLIC_HEAD = "#   A CURVE (ZeroMQ) public key: a user who can replace this file is trusted in its owner's place\n"


@dataclass(frozen=True)
class Workers:
    """The workers that the holder of a key may be; without ranges: any."""

    ranges: tuple[range, ...] = ()

    def __contains__(self, worker: int) -> bool:
        return not self.ranges or any(worker in one for one in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in self.ranges) or "any"


@dataclass(frozen=True)
class Certificate:
    """What a file says: ``public`` and ``secret`` have 40 characters (z85); ``secret`` is None in a public one."""

    public: bytes
    secret: bytes | None = field(default=None, repr=False)
    workers: Workers = Workers()

    def encode(self, *, secret: bool) -> str:
        """The text of the file, with or without the secret key."""
        keys = [("public-key", self.public), *([("secret-key", self.secret)] if secret and self.secret else [])]
        named = f"    workers = {self.workers}\n" if self.workers.ranges else ""
        lines = "".join(f'    {name} = "{key.decode()}"\n' for name, key in keys)
        return f"{SECRET_HEAD if secret else PUBLIC_HEAD}\nmetadata\n{named}curve\n{lines}"

    @classmethod
    def decode(cls, text: str) -> Certificate:
        """Raises ValueError: it is none, or says twice what it may say once."""
        found: dict[str, str] = {}
        for line in text.splitlines():
            if line.lstrip().startswith("#"):
                continue
            match = LINE.fullmatch(line)
            if line.strip().lower().startswith("worker") and (match is None or match[1] != "workers"):
                # Passed over, it would make a key that was meant for one worker good for any.
                raise ValueError(f"{line.strip()[:80]!r} is not understood; expected, say, '    workers = 0-3, 7'")
            if match is None:
                continue
            name, value = match[1], match[2].strip("\"'")
            if name in ("public-key", "secret-key", "workers") and name in found:
                raise ValueError(f"it has {name} twice")
            found[name] = value
        for name in ("public-key", "secret-key"):
            if name in found and not _is_key(found[name]):
                raise ValueError(f"{name} is not a key of 40 characters")
        if "public-key" not in found:
            raise ValueError("it has no public-key")
        secret = found["secret-key"].encode() if "secret-key" in found else None
        workers = parse_workers(found["workers"]) if "workers" in found else Workers()
        return cls(found["public-key"].encode(), secret, workers)


def _is_key(text: str) -> bool:
    try:
        return KEY.fullmatch(text) is not None and len(z85.decode(text)) == 32
    except struct.error:  # five characters can say more than four bytes hold
        return False


def parse_workers(text: str) -> Workers:
    """Of ``0-3, 7``. Raises ValueError: it is nothing of the kind; an empty one is not taken for "any"."""
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


def read_certificate(path: str, *, secret: bool) -> Certificate:
    """Read a certificate; ``secret``: it must have its secret key, and be readable by its owner only. Raises
    NotConnected, which names the file, what is wrong with it and the remedy."""
    try:
        with open(path, "rb") as file:
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
    """Raise NotConnected if others than its owner could change who is trusted."""
    if mode & OTHERS_WRITE:
        raise NotConnected(f"other users may change {path}, and so decide which keys are trusted: chmod go-w {path}")


def write_new(files: Sequence[tuple[Path, str]], *, mode: int) -> None:
    """Write these files, each whole or not at all, in this order. Raises FileExistsError: one is there already, and
    stays as it is."""
    for path, text in files:
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fchmod(descriptor, mode)
                os.fsync(descriptor)
            os.link(hidden, path)  # unlike a renaming, this never replaces a file
        finally:
            with suppress(FileNotFoundError):
                hidden.unlink()
