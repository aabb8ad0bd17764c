"""`ray.remote` of a scheme's class makes an actor class, as of any other."""

from __future__ import annotations

import inspect

import pytest

from helpers.apis import Api, bare


@pytest.mark.schemes("all")
def test_a_schemes_class_can_be_an_actors(api: Api) -> None:
    ray = pytest.importorskip("ray")
    kind = type(bare(api.scheme()))
    assert "strategy" in inspect.signature(kind).parameters
    assert callable(ray.remote(kind).remote)
