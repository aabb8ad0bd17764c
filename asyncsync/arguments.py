"""Arguments: what several entry points take is checked in one place, before anything is begun."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "as_version",
    "as_workers",
    "check_bytes",
    "check_count",
    "check_forward",
    "check_quorum",
    "check_sync",
    "check_timeout",
]

MAX_VERSION = 1 << 62  # the most in a checkpoint: there is room to count on


def check_timeout(timeout: float | None, *, or_none: bool = False) -> None:
    """Raise TypeError or ValueError for what is no time limit in seconds, before anything is begun."""
    if (timeout is None and or_none) or (type(timeout) is float and timeout >= 0):
        return
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        hint = "; only receive() waits without a limit" if timeout is None else ""
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}{hint}")
    if not timeout >= 0:
        raise ValueError(f"timeout must not be negative, it is {timeout!r}")


def as_workers(worker_ids: int | Iterable[int] | None) -> list[int] | None:
    """``worker_ids`` as documented: None, one index, or several. Raises TypeError for anything else."""
    if worker_ids is None:
        return None
    chosen: list[Any] = list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]
    if not all(isinstance(w, int) and not isinstance(w, bool) for w in chosen):
        raise TypeError(f"worker_ids must be None, an int or a list of ints, not {worker_ids!r}")
    if not chosen:
        raise ValueError("worker_ids is empty; pass None for everybody")
    return sorted(set(chosen))


def as_version(state: Mapping[str, int]) -> int:
    """The version in the state of a sender."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < MAX_VERSION:
        raise ValueError(f"a sender's state is {{'version': a whole number from 0}}, not {state!r}")
    return version


def check_forward(version: int, now: int) -> None:
    """Refuse to count backwards."""
    if version < now:
        raise ValueError(
            f"this sender is at version {now} already, and versions never go back: version {version} cannot be loaded; "
            "load a checkpoint before the first publication"
        )


def check_count(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least else "an integer from 0"
        raise ValueError(f"{name} must be {kind}, not {value!r}")


def check_bytes(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a number of bytes, not {value!r}")


def check_sync(sync: bool, *, is_blocking: bool) -> None:
    """TorchRL's option of some schemes: False has ``send`` wait for no worker."""
    if not sync and not is_blocking:
        raise ValueError("sync=False is for blocking schemes, whose send() then waits for no worker: use publish()")


def check_quorum(num_workers: int | None, min_workers: int) -> None:
    if num_workers is not None and min_workers > num_workers:
        raise ValueError(
            f"min_workers={min_workers} of num_workers={num_workers}: a fixed number of workers is waited for whole; "
            "leave num_workers out where they come and go"
        )
