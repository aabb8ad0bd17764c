"""Errors travel between processes, and are of the types that TorchRL documents."""

import copy
import pickle

import pytest

from asyncsync import errors
from asyncsync.errors import AckTimeout, PartialSendError, PeerLost, RemoteError, Stale, Superseded, WeightSyncError

ALL = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, WeightSyncError)}
PLAIN = sorted(ALL - {RemoteError, PartialSendError, Stale, Superseded}, key=lambda cls: cls.__name__)


def samples() -> list[WeightSyncError]:
    remote = RemoteError("builtins.ValueError", "bad weights", "Traceback …\nValueError: bad weights")
    partial = PartialSendError({0: 7}, {2: PeerLost("worker 2 has died"), 1: remote})
    others = [remote, RemoteError("X", "y"), partial, Stale("too old", 3, 4), Superseded("too late", 5)]
    return [cls(f"what happened to {cls.__name__}") for cls in PLAIN] + others


@pytest.mark.parametrize("error", samples(), ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_every_error_survives_the_way_to_another_process(error, travel) -> None:  # type: ignore[no-untyped-def]
    twin = travel(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    for name, value in vars(error).items():
        assert repr(getattr(twin, name)) == repr(value)


def test_an_error_is_also_of_the_documented_builtin_type() -> None:
    for error in (errors.NotConnected, errors.ClosedError, errors.Fenced):
        assert issubclass(error, RuntimeError)
    assert issubclass(AckTimeout, TimeoutError)
    assert issubclass(errors.SchemaMismatch, ValueError)
    assert issubclass(errors.LimitExceeded, errors.ProtocolError)


def test_a_partial_send_names_the_workers_and_why() -> None:
    error = PartialSendError({0: 5, 3: 5}, {2: AckTimeout("no answer in 60 s"), 1: PeerLost("its process has ended")})
    text = str(error)
    assert "2 of 4 workers" in text
    assert "worker 1: PeerLost: its process has ended; worker 2: AckTimeout: no answer in 60 s" in text
    assert "Applied by: [0, 3]" in text
    assert error.acked == {0: 5, 3: 5}
    assert isinstance(error.failed[2], AckTimeout)
    assert "Applied by: none" in str(PartialSendError({}, {0: PeerLost("gone")}))


def test_a_remote_error_shows_the_workers_traceback() -> None:
    error = RemoteError("builtins.KeyError", "'w'", "Traceback (most recent call last): …")
    assert str(error).startswith("builtins.KeyError: 'w'")
    assert "The worker's traceback:\nTraceback (most recent call last): …" in str(error)
    assert "traceback" not in str(RemoteError("builtins.KeyError", "'w'"))
