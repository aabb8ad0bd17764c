"""The messages to vLLM's routes: where the sender is, and which version to load. The routes may be HTTP without
a key. So each field is checked, there are no others, and no option of a scheme passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from asyncsync.net.keys import WORKER

SCHEMES = ("shared", "zmq", "auto")
MAX_EPOCH = 40
MAX_SECONDS = 3600.0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 4096


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 1 << 62


def _is_duration(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and 0 < value <= MAX_SECONDS


# For each field, what it should be, and whether a value is that. None passes if it is the field's default.
CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "endpoint": ("a text", _is_text),
    "scheme": (f"one of {', '.join(SCHEMES)}", SCHEMES.__contains__),
    "model_id": ("a text", _is_text),
    "first_worker": ("a whole number from 0", lambda value: _is_whole(value, 0)),
    "server_key": ("a text", _is_text),
    "client_key": ("a text", _is_text),
    "timeout": (f"seconds, more than 0 and at most {MAX_SECONDS:g}", _is_duration),
    "version": ("a whole number from 1", lambda value: _is_whole(value, 1)),
    "epoch": (
        f"the sender's epoch, of at most {MAX_EPOCH} letters",
        lambda value: _is_text(value) and len(value) <= MAX_EPOCH,
    ),
}


class Info:
    """Base of both messages."""

    @classmethod
    def given(cls, values: Mapping[str, Any]) -> Self:
        """Make it from a route's values. Raises ValueError, which names the field and what it should be."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{cls.__name__} is an object with fields, not {values!r}")
        known = {field.name: field.default for field in fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(map(str, values.keys() - known.keys())):
            raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}; there are {', '.join(known)}")
        if missing := [name for name, default in known.items() if default is MISSING and name not in values]:
            raise ValueError(f"{cls.__name__} lacks {missing[0]!r}")
        for name, value in values.items():
            wanted, fits = CHECKS[name]
            if not (value is None and known[name] is None) and not fits(value):
                raise ValueError(f"{name} of {cls.__name__} must be {wanted}, not {value!r:.80}")
        return cls(**values)


@dataclass(frozen=True)
class InitInfo(Info):
    """Where the sender is.

    Attributes:
        endpoint: its address, as the replica reaches it.
        scheme: ``"shared"`` on the sender's host, ``"zmq"`` elsewhere, ``"auto"`` for both.
        model_id: the model's name at the sender.
        first_worker: rank r of this replica is worker ``first_worker + r`` of the sender; None: the ranks are
            anonymous, which an elastic sender accepts.
        timeout: seconds to reach the sender, and to load its version.
        server_key, client_key: paths of the certificates on the replica's host, for "zmq" and "auto". ``client_key`` is
            good for any worker. Or ``{worker_idx}`` in the path stands for the worker's index; then each rank connects
            with its own key.
    """

    endpoint: str
    scheme: str = "shared"
    model_id: str = "policy"
    first_worker: int | None = None
    timeout: float = 60.0
    server_key: str | None = None
    client_key: str | None = None

    def __post_init__(self) -> None:
        if (self.server_key is None) != (self.client_key is None):
            raise ValueError("InitInfo needs both server_key and client_key, or neither")
        if self.server_key is not None and self.scheme == "shared":
            raise ValueError("InitInfo has keys, which scheme 'shared' does not use: choose 'zmq' or 'auto'")

    @property
    def has_key_per_worker(self) -> bool:
        """Whether each rank has a key of its own. A relay needs one for any worker, because it speaks for several."""
        return self.client_key is not None and WORKER in self.client_key

    def options(self) -> dict[str, str]:
        """Options for the scheme that connects to the sender."""
        keys = {"server_key": self.server_key, "client_key": self.client_key}
        return {"connect": self.endpoint} | {name: path for name, path in keys.items() if path is not None}


@dataclass(frozen=True)
class UpdateInfo(Info):
    """Which version to load.

    Attributes:
        version: returned by the sender's ``publish`` or ``stage``.
        epoch: the sender's ``scheme.epoch``, because versions of different trainers may have the same number.
        timeout: seconds to receive it and to load it on every rank.
    """

    version: int
    epoch: str
    timeout: float = 60.0
