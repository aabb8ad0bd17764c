"""What help() and inspect.signature show of collectors."""

from __future__ import annotations

import inspect
import pydoc
import re
from typing import Any

import pytest

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from helpers import planted

KINDS = [Collector, MultiCollector, MultiSyncCollector, MultiAsyncCollector]


def variadic(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


@pytest.mark.requirement(227)
@pytest.mark.parametrize("kind", KINDS)
def test_a_constructor_shows_its_parameters(kind: Any) -> None:
    signature = inspect.signature(kind)
    names = list(signature.parameters)
    assert names[:2] == ["create_env_fn", "policy"]
    assert {"frames_per_batch", "total_frames", "weight_sync_schemes", "postproc", "max_lag"} <= set(names)
    assert not variadic(kind)
    signature.bind(print, None, frames_per_batch=8, **({"sync": True} if kind is MultiCollector else {}))
    assert ("sync" in names) == (kind in (Collector, MultiCollector))
    arguments = (inspect.getdoc(kind) or "").partition("Raises:")[0]
    for name in re.findall(r"\w+", " ".join(re.findall(r"^    (\w[\w, ]*):", arguments, re.MULTILINE))):
        assert name in names, f"{name} is documented, but no parameter"
    assert "frames_per_batch" in pydoc.plain(pydoc.render_doc(kind)).split("\n\n", 2)[1]


@pytest.mark.requirement(227)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["update_policy_weights_", "update_policy_weights_async", "receive_weights"])
def test_a_method_shows_its_parameters(kind: Any, method: str) -> None:
    assert inspect.signature(getattr(kind, method)) == inspect.signature(getattr(planted.BaseCollector, method))
    assert variadic(getattr(kind, method)) <= {"kwargs"}
    assert "weights" in inspect.signature(getattr(kind, method)).parameters
    assert inspect.getdoc(getattr(kind, method))


@pytest.mark.requirement(227)
def test_a_subclass_shows_its_own() -> None:
    class Own(Collector):
        def __init__(self, env: Any, *, size: int = 3) -> None:
            super().__init__(env, frames_per_batch=size)

    assert list(inspect.signature(Own).parameters) == ["env", "size"]


@pytest.mark.requirement(227)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_wrong_argument_is_refused_in_the_name_of_the_class_that_was_called(kind: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        pass

    for called in (kind, Own):
        with pytest.raises(TypeError, match=rf"^{called.__name__}\(\): got an unexpected keyword argument 'frames'"):
            called(print, frames=8, frames_per_batch=8)
        with pytest.raises(TypeError, match=rf"^{called.__name__}\(\): missing a required argument: 'create_env_fn'"):
            called(frames_per_batch=8)
        for name, meant in {"frame_per_batch": "frames_per_batch", "max_lags": "max_lag"}.items():
            message = rf"^{called.__name__}\(\): got an unexpected .*'{name}'; did you mean '{meant}'\?"
            with pytest.raises(TypeError, match=message):
                called(print, **{name: 1})
