"""What this process, or another one, has open and mapped: files of memory (memfd) above all."""

import contextlib
import os
from pathlib import Path


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """What each open file's number refers to."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def files(pid: int | str = "self") -> set[int]:
    """The inodes of slots that are open; each twice, as mmap.mmap keeps a descriptor of its own."""
    slots = [number for number, target in descriptors(pid).items() if "memfd:asyncsync" in target]
    found = set()
    for number in slots:
        with contextlib.suppress(FileNotFoundError):
            found.add(os.stat(f"/proc/{pid}/fd/{number}").st_ino)
    return found


def mappings(pid: int | str = "self") -> list[str]:
    """Mappings of slots, the sender's (shared) and the workers' (private)."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "memfd:asyncsync" in line]
