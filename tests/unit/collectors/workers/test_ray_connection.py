"""This process's connection to Ray, which collectors share with the program that they are in."""

from __future__ import annotations

import tempfile
import threading
from typing import Any

import pytest
import torch

from asyncsync.runtime.threads import join
from helpers.programs import in_program

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(200), pytest.mark.ray]

RAY: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "logging_level": "error", "log_to_driver": False}


def _sessions() -> dict[str, Any]:
    import ray

    from asyncsync.collectors.distributed.ray_connection import connection
    from asyncsync.sync import RayWeightSyncScheme

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        given = {**RAY, "_temp_dir": folder}

        thread = threading.Thread(target=connection.hold, args=("first", ray, given))
        thread.start()
        thread.join()
        scheme = RayWeightSyncScheme(min_workers=0)
        scheme.init_on_sender(model_id="policy", weights={"a": torch.ones(2)}, remotes={})
        scheme.connect()
        ray.shutdown()
        ray.init(**given)
        connection.hold("second", ray, given)
        scheme.shutdown()
        connection.release("first", ray)
        connection.release("second", ray)
        found["the program's own goes on"] = ray.is_initialized()
        threads = [thread for thread in threading.enumerate() if thread.name == "asyncsync-ray"]
        found["threads that outlive their sessions"] = [thread for thread in threads if not join(thread, 10.0)]
        ray.shutdown()

        connection.hold("third", ray, given)
        ray.shutdown()
        connection.hold("fourth", ray, given)
        connection.release("third", ray)
        found["in use"] = ray.is_initialized()
        connection.release("fourth", ray)
        found["ended"] = not ray.is_initialized()
    return found


def test_a_session_that_the_program_has_begun_meanwhile_is_its_own() -> None:
    found = in_program(_sessions, seconds=150)
    assert found.pop("threads that outlive their sessions") == []
    assert found == {"the program's own goes on": True, "in use": True, "ended": True}
