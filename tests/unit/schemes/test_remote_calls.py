"""What schemes with remote calls check before they call anybody; the rest is shown on real actors and an RPC agent."""

from __future__ import annotations

import sys
from types import ModuleType

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


@BOTH
async def test_without_ray_one_line_names_the_extra(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    scheme = asyncsync.RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=nn.Linear(1, 1), remotes=["an actor"])
    with pytest.raises(ImportError, match=r"asyncsync\[ray\]"):
        await scheme.connect()
    await scheme.shutdown()


@BOTH
def test_backends_are_checked_when_it_is_constructed(package: ModuleType) -> None:
    with pytest.raises(ValueError, match="gloo, nccl, object_store, not 'smoke'"):
        package.RayWeightSyncScheme(backend="smoke")
    with pytest.raises(ValueError, match="no nccl"):
        package.RayWeightSyncScheme(backend="nccl")


@BOTH
@pytest.mark.parametrize("kind", ["RayWeightSyncScheme", "RPCWeightSyncScheme"])
def test_there_is_one_object_for_each_worker(package: ModuleType, kind: str) -> None:
    def init(**options: object) -> asyncsync.WeightSyncScheme:
        scheme = getattr(package, kind)(**constructed)
        scheme.init_on_sender(model_id="policy", model=nn.Linear(1, 1), **options)
        return scheme  # type: ignore[no-any-return]

    constructed: dict[str, object] = {}
    assert init(remotes=["a", "b"]).bus.num_workers == 2
    assert init(remotes={4: "a"}).bus.num_workers is None
    assert init(remotes=["a", "b"], min_workers=1).bus.num_workers is None
    for bad in ({}, {"remotes": ["a"], "num_workers": 2}, {"remotes": {1: "a"}, "num_workers": 1}):
        with pytest.raises(ValueError, match="object"):
            init(**bad)
    constructed["num_workers"] = 1
    assert init(remotes={0: "a"}).bus.num_workers == 1
