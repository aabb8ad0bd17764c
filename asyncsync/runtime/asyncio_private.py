"""The private names of asyncio that asyncsync touches; tests/unit/test_private_names.py says what each is for."""

from __future__ import annotations

from asyncio import _get_running_loop as running_loop  # returns None without a loop; raising takes ten times as long

__all__ = ["running_loop"]
