"""What comes over vLLM's routes is checked, field by field."""

from typing import Any

import pytest

from asyncsync.engines.vllm.info import Info, InitInfo, UpdateInfo

INIT = {"endpoint": "ipc:///tmp/bus"}
UPDATE = {"version": 7, "epoch": "0123"}
KEYS = {"server_key": "/keys/server.key", "client_key": "/keys/worker-{worker_idx}.key_secret"}


@pytest.mark.requirement(244)
def test_what_is_right_passes() -> None:
    assert InitInfo.given(INIT) == InitInfo("ipc:///tmp/bus", "shared", "policy", None, 60.0, None, None)
    assert InitInfo.given(INIT | {"first_worker": None, "server_key": None, "client_key": None}) == InitInfo.given(INIT)
    info = InitInfo.given(KEYS | {"endpoint": "tcp://trainer:5555", "scheme": "zmq", "first_worker": 4, "timeout": 3})
    assert (info.first_worker, info.timeout) == (4, 3)
    assert info.options() == {"connect": "tcp://trainer:5555", **KEYS}
    assert InitInfo.given(INIT).options() == {"connect": "ipc:///tmp/bus"}
    assert UpdateInfo.given(UPDATE) == UpdateInfo(7, "0123", 60.0)


@pytest.mark.requirement(244)
@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (InitInfo, [], "an object with fields"),
        (InitInfo, {}, "lacks 'endpoint'"),
        (InitInfo, INIT | {"allow_plaintext": True}, "no field 'allow_plaintext'; there are endpoint"),
        (InitInfo, INIT | {3: 4}, "no field '3'"),
        (InitInfo, {"endpoint": None}, "endpoint of InitInfo must be a text"),
        (InitInfo, {"endpoint": ["ipc:///tmp/bus"]}, "endpoint of InitInfo must be a text"),
        (InitInfo, INIT | {"scheme": "ray"}, "one of shared, zmq, auto"),
        (InitInfo, INIT | {"scheme": {}}, "one of shared, zmq, auto"),
        (InitInfo, INIT | {"model_id": ""}, "a text"),
        (InitInfo, INIT | {"first_worker": -1}, "a whole number from 0"),
        (InitInfo, INIT | {"first_worker": True}, "a whole number from 0"),
        (InitInfo, INIT | {"timeout": 0}, "seconds"),
        (InitInfo, INIT | {"timeout": float("nan")}, "seconds"),
        (InitInfo, INIT | {"timeout": 1e9}, "at most 3600"),
        (InitInfo, INIT | {"timeout": True}, "seconds"),
        (InitInfo, INIT | {"scheme": "zmq", "server_key": "/keys/server.key"}, "both server_key and client_key"),
        (InitInfo, INIT | KEYS, "scheme 'shared' does not use"),
        (UpdateInfo, {"version": 7}, "lacks 'epoch'"),
        (UpdateInfo, UPDATE | {"version": 0}, "a whole number from 1"),
        (UpdateInfo, UPDATE | {"version": "7"}, "a whole number from 1"),
        (UpdateInfo, UPDATE | {"epoch": "0" * 41}, "at most 40"),
        (UpdateInfo, UPDATE | {"epoch": None}, "the sender's epoch"),
        (UpdateInfo, UPDATE | {"names": []}, "no field 'names'"),
    ],
)
def test_what_is_wrong_is_named(kind: type[Info], given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind.given(given)
