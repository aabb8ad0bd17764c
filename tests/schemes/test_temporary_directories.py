"""Temporary directories whose names cannot be part of an address: a scheme draws its own in /tmp then."""

from __future__ import annotations

import os
import tempfile

import pytest

from helpers.apis import Api


@pytest.mark.requirement(188)
@pytest.mark.parametrize("name", ["é" * 40, os.fsdecode(b"caf\xe9")], ids=["long in bytes", "not UTF-8"])
async def test_any_temporary_directory_will_do(api: Api, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
        os.mkdir(there := os.path.join(short, name))
        monkeypatch.setattr(tempfile, "tempdir", there)
        async with api.crew(1) as everybody:
            await everybody.sender.send_async(timeout=10)
