"""The memory files (memfd) that this process has open, and its mappings of them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def files() -> set[int]:
    """The inodes of slots that this process has open; each twice, as mmap.mmap keeps a descriptor of its own."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            if "memfd:asyncsync" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return found


def mappings() -> list[str]:
    """Mappings of slots, the sender's (shared) and the workers' (private)."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:asyncsync" in line]
