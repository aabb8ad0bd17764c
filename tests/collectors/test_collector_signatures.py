"""What help() and inspect.signature show of collectors: their arguments, with the documented defaults."""

from __future__ import annotations

import inspect
import pydoc
import re
from typing import Any

import pytest
from tensordict.nn import InteractionType

from asyncsync.collectors import Collector, ExplorationType, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from helpers import planted

KINDS = [Collector, MultiCollector, MultiSyncCollector, MultiAsyncCollector]
DEFAULTS: dict[str, Any] = {
    "policy": None, "policy_factory": None, "total_frames": -1, "device": None, "storing_device": None,
    "policy_device": None, "env_device": None, "max_frames_per_traj": -1, "init_random_frames": -1,
    "reset_at_each_iter": False, "postproc": None, "split_trajs": False, "track_traj_ids": True,
    "exploration_type": InteractionType.RANDOM, "no_cuda_sync": False, "weight_updater": None,
    "weight_sync_schemes": None, "weight_recv_schemes": None, "extend_buffer": True, "compact_obs": False,
    "compile_policy": None, "cudagraph_policy": None, "trajs_per_batch": None, "trajs_per_write": None,
    "traj_format": None, "use_buffers": None, "local_init_rb": None, "reset_when_done": True,
    "track_policy_version": False, "auto_register_policy_transforms": None,
}  # fmt: skip
OF_ONE: dict[str, Any] = {
    "backend": None, "backend_options": None, "num_collectors": None, "sync": None, "return_same_td": False,
    "interruptor": None,
}  # fmt: skip
OF_WORKERS: dict[str, Any] = {
    "update_at_each_batch": False, "max_weight_update_interval": -1, "num_sub_threads": 1, "cat_results": None,
    "start_method": "spawn",
}  # fmt: skip


def variadic(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


# Of 120, 127 and 154, which are lines of RPCCollector's page, what every collector has.
@pytest.mark.requirement(120, 127, 154, 219, 220, 221, 222, 223, 227)
@pytest.mark.parametrize("kind", KINDS)
def test_a_constructor_shows_its_parameters_and_documents_them(kind: Any) -> None:
    signature = inspect.signature(kind)
    expected = DEFAULTS | (OF_ONE if kind is Collector else OF_WORKERS)
    assert {name: signature.parameters[name].default for name in expected} == expected
    positional = [each.name for each in signature.parameters.values() if each.kind is not each.KEYWORD_ONLY]
    assert positional == ["create_env_fn", "policy"]
    assert not variadic(kind)
    signature.bind(print, None, frames_per_batch=8, **({"sync": True} if kind is MultiCollector else {}))
    assert ("sync" in signature.parameters) == (kind in (Collector, MultiCollector))
    page = inspect.getdoc(kind) or ""
    if kind in (Collector, MultiCollector):
        assert [name for name in signature.parameters if not re.search(rf"\b{name}\b", page)] == []
    else:
        assert "MultiCollector` for the arguments" in page
    arguments = " ".join(re.findall(r"^    (\w[\w, ]*):", page.partition("Raises:")[0], re.MULTILINE))
    assert set(re.findall(r"\w+", arguments)) <= signature.parameters.keys()
    assert "frames_per_batch" in pydoc.plain(pydoc.render_doc(kind)).split("\n\n", 2)[1]
    assert ExplorationType is InteractionType


@pytest.mark.requirement(227)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["update_policy_weights_", "update_policy_weights_async", "receive_weights"])
def test_a_method_shows_its_parameters(kind: Any, method: str) -> None:
    assert inspect.signature(getattr(kind, method)) == inspect.signature(getattr(planted.BaseCollector, method))
    assert variadic(getattr(kind, method)) <= {"kwargs"}
    assert "weights" in inspect.signature(getattr(kind, method)).parameters
    assert inspect.getdoc(getattr(kind, method))


@pytest.mark.requirement(227)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_subclass_shows_its_own_and_mistakes_are_refused_in_the_name_of_the_class_that_was_called(kind: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        pass

    class Small(kind):  # type: ignore[misc]
        def __init__(self, env: Any, *, size: int = 3) -> None: ...

    assert list(inspect.signature(Small).parameters) == ["env", "size"]
    for called in (kind, Own):
        with pytest.raises(TypeError, match=rf"^{called.__name__}\(\): got an unexpected keyword argument 'frames'"):
            called(print, frames=8, frames_per_batch=8)
        with pytest.raises(TypeError, match=rf"^{called.__name__}\(\): missing a required argument: 'create_env_fn'"):
            called(frames_per_batch=8)
        for name, meant in {"frame_per_batch": "frames_per_batch", "max_lags": "max_lag"}.items():
            message = rf"^{called.__name__}\(\): .*'{name}'; did you mean '{meant}'\?"
            with pytest.raises(TypeError, match=message):
                called(print, **{name: 1})
