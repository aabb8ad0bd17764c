"""Faults that are planted in the library on purpose, for tests that use public names only.

Everything here names private parts, so that a rebuild of what is behind the public names changes this file and no test.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import asyncsync.collectors.multi.driver
import asyncsync.runtime.loop_thread
import asyncsync.schemes.blocking
from asyncsync.fastpath.sender import SteadySender
from asyncsync.model.gate import Gate
from asyncsync.net.endpoint import INTRODUCED
from asyncsync.net.processes import free_descriptors
from asyncsync.protocol.leases import Leases
from asyncsync.protocol.settings import Identity
from asyncsync.weights.packing import pack

__all__ = [
    "BLOCKING_CALLS",
    "DRIVER",
    "descriptors_left",
    "forget_the_fast_path",
    "introduced",
    "no_boot_id",
    "no_loop_thread",
    "on_leaving_the_gate",
    "pack_by",
    "pack_half",
    "release_slots_too_early",
]

BLOCKING_CALLS: list[ModuleType] = [asyncsync.schemes.blocking, asyncsync.runtime.loop_thread]
"""The modules through which each blocking call goes, for an interrupt at each of their lines."""
DRIVER: list[ModuleType] = [asyncsync.collectors.multi.driver]
"""The same for a collector's call that waits for its workers."""


def release_slots_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender takes a slot back while a worker still reads it."""

    def report(self: Any, nonce: bytes, last: int, in_use: Any) -> None:
        self.release(nonce)

    monkeypatch.setattr(Leases, "report", report)


def forget_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that takes it, although it is switched off, raises AttributeError."""
    monkeypatch.delattr(SteadySender, "publish")


def no_boot_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender cannot tell that its workers share its host."""
    monkeypatch.setattr("asyncsync.bus.sender.this_process", lambda: Identity(os.getpid(), "", 0))


def on_leaving_the_gate(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], Any]) -> None:
    """``before`` wraps what a reader calls when it leaves the gate."""
    monkeypatch.setattr(Gate, "leave", before(Gate.leave))


def pack_by(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Each slab is packed after ``before()``, which may raise."""

    def packing(*arguments: Any) -> None:
        before()
        pack(*arguments)

    monkeypatch.setattr("asyncsync.bus.publishing.pack", packing)


def pack_half(monkeypatch: pytest.MonkeyPatch, wait: threading.Event) -> None:
    """Each slab is packed to its half; then, once ``wait`` is set, MemoryError is raised."""

    def packing(slab: Any, flat: Any, progress: Callable[[], None] | None, tensors: Any) -> None:
        assert progress is not None
        slab.packed = slab.nbytes // 2
        progress()
        assert wait.wait(10)
        raise MemoryError("no page for it")

    monkeypatch.setattr("asyncsync.bus.publishing.pack", packing)


def descriptors_left() -> int:
    """How many file descriptors this process may still open."""
    return free_descriptors()


def no_loop_thread() -> bool:
    """Whether this process has not started the blocking API's loop thread."""
    return asyncsync.runtime.loop_thread._current is None


def introduced() -> str:
    """The endpoint of a bus that is told its address by another channel."""
    return INTRODUCED
