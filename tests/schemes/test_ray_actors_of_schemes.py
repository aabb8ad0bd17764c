"""`ray.remote` of a scheme's class makes an actor class, as of any other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# In a process of its own: Ray adds a parameter to the signatures of the class's methods.
PROGRAM = """
import inspect, ray, asyncsync, asyncsync.sync

for package in (asyncsync, asyncsync.sync):
    for name in package.__all__:
        kind = getattr(package, name)
        if name.endswith(("Scheme", "Transform")) and inspect.isclass(kind) and not inspect.isabstract(kind):
            assert "strategy" in inspect.signature(kind).parameters, name
            assert callable(ray.remote(kind).remote)
            print(name)
"""


@pytest.mark.ray
@pytest.mark.thorough
def test_a_schemes_class_can_be_an_actors() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 18
