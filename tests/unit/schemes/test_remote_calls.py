"""What schemes with remote calls check before they call anybody; the rest is shown on real actors and an RPC agent."""

import sys
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import asyncsync
import asyncsync.sync
from asyncsync.schemes.remote_calls import Call, failure_of

BOTH = pytest.mark.parametrize("package", [asyncsync, asyncsync.sync], ids=["asyncsync", "asyncsync.sync"])


def test_a_call_is_read_as_it_was_written() -> None:
    call = Call("bus", 3, {"policy": 7}, b"introduction")
    assert Call.decode(call.encode()) == call
    assert (call.version("policy"), call.version("value")) == (7, None)
    assert Call("bus", 0, {"": 2}).version("policy") == 2, "a sender with one model need not name it"


def test_a_failure_keeps_its_type_where_it_is_the_librarys() -> None:
    ours = asyncsync.SchemaMismatch("it does not fit")
    assert failure_of(ours) is ours
    try:
        raise KeyError("sensor")
    except KeyError as error:
        failure = failure_of(error)
    assert isinstance(failure, asyncsync.RemoteError)
    assert failure.type_name == "builtins.KeyError"
    assert "sensor" in failure.remote_traceback


async def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    async with asyncsync.RayWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", model=nn.Linear(1, 1), remotes=["an actor"])
        with pytest.raises(ImportError, match=r"asyncsync\[ray\]"):
            await scheme.connect()


@BOTH
def test_backends_are_checked_when_it_is_constructed(package: ModuleType) -> None:
    with pytest.raises(ValueError, match="gloo, nccl, object_store, not 'smoke'"):
        package.RayWeightSyncScheme(backend="smoke")
    with pytest.raises(ValueError, match="no nccl"):
        package.RayWeightSyncScheme(backend="nccl")


@BOTH
@pytest.mark.parametrize("kind", ["RayWeightSyncScheme", "RPCWeightSyncScheme"])
def test_there_is_one_object_for_each_worker(package: ModuleType, kind: str) -> None:
    def counted(constructed: dict[str, Any], **options: Any) -> int | None:
        scheme = getattr(package, kind)(**constructed)
        scheme.init_on_sender(model_id="policy", model=nn.Linear(1, 1), **options)
        return scheme.bus.num_workers  # type: ignore[no-any-return]

    assert counted({}, remotes=["a", "b"]) == 2
    assert counted({}, remotes={4: "a"}) is None
    assert counted({}, remotes=["a", "b"], min_workers=1) is None
    assert counted({"num_workers": 1}, remotes={0: "a"}) == 1
    for bad in ({}, {"remotes": ["a"], "num_workers": 2}, {"remotes": {1: "a"}, "num_workers": 1}):
        with pytest.raises(ValueError, match="object"):
            counted({}, **bad)
