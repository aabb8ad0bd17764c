"""Arguments of RPCCollector, DistributedCollector and RayCollector; nothing is launched here."""

import inspect
import re
import sys
from typing import Any

import pytest

import asyncsync
import asyncsync.collectors.distributed
from asyncsync import sync
from asyncsync.collectors import Collector
from asyncsync.collectors.distributed import DistributedCollector, RayCollector, RPCCollector, serve_node
from helpers.collecting_multi import make, policy

PAGE = """
    create_env_fn policy policy_factory frames_per_batch total_frames device storing_device env_device policy_device
    max_frames_per_traj init_random_frames reset_at_each_iter postproc split_trajs exploration_type collector_class
    collector_kwargs num_workers_per_collector sync slurm_kwargs update_after_each_batch max_weight_update_interval
    launcher tcp_port backend visible_devices tensorpipe_options weight_updater weight_sync_schemes weight_recv_schemes
"""
DEFAULTS = {
    "total_frames": -1, "max_frames_per_traj": -1, "init_random_frames": -1, "reset_at_each_iter": False,
    "collector_class": Collector, "num_workers_per_collector": 1, "sync": False, "update_after_each_batch": False,
    "max_weight_update_interval": -1, "launcher": "submitit", "tcp_port": None, "backend": "gloo",
}  # fmt: skip
KINDS = [RPCCollector, DistributedCollector, RayCollector]
OWN_SCHEME = {"weight_sync_schemes": {"policy": sync.SharedMemWeightSyncScheme()}}


@pytest.mark.requirement(120, 144, 148, 149, 150, 151)
def test_rpc_collector_has_the_arguments_of_its_page_in_their_order() -> None:
    parameters = inspect.signature(RPCCollector).parameters
    assert list(parameters)[: len(PAGE.split())] == PAGE.split()
    assert [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == ["create_env_fn", "policy"]
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS


@pytest.mark.requirement(227)
@pytest.mark.parametrize("kind", KINDS)
def test_constructors_show_their_parameters_and_document_them(kind: Any) -> None:
    page = (inspect.getdoc(kind.__init__) or "").partition("Raises:")[0]
    assert re.findall(r"^    (\w+): ", page, re.MULTILINE) == list(inspect.signature(kind).parameters)
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\): got an unexpected keyword argument 'frames'"):
        kind(make(), frames=3, frames_per_batch=3)


@pytest.mark.requirement(34, 127, 139, 140, 141)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"total_frames": 10}, ValueError, "total_frames=10 is not divisible by frames_per_batch=4: pass .*=8 or 12"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be at least 1"),
        ({"sync": "yes"}, TypeError, "sync must be True or False"),
        ({"collector_class": "many"}, ValueError, "unknown collector_class 'many': choose one of 'single', 'sync', 'a"),
        ({"collector_class": dict}, TypeError, "collector_class"),
        ({"num_workers_per_collector": 2}, ValueError, "num_workers_per_collector=2"),
        ({"collector_kwargs": [{}, {}, {}]}, ValueError, "collector_kwargs has 3 entries, but there are 2 workers"),
        ({"collector_kwargs": {"frames_per_batch": 3}}, ValueError, "frames_per_batch"),
        ({"collector_class": "sync", "collector_kwargs": OWN_SCHEME}, ValueError, r"collector_kwargs=\[\{"),
        ({"update_after_each_batch": True, "policy": None}, ValueError, "weight_updater"),
        ({"policy_factory": policy}, TypeError, "policy and policy_factory exclude each other"),
        ({"policy_device": "cuda:77"}, ValueError, "policy_device='cuda:77', but torch finds"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kind: Any, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind([make()] * 2, **{"policy": lambda td: td, "frames_per_batch": 4, **given})


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        (RPCCollector, sync.RayWeightSyncScheme),
        (RayCollector, asyncsync.RPCWeightSyncScheme),
        (DistributedCollector, sync.RPCWeightSyncScheme),
        (DistributedCollector, sync.RayWeightSyncScheme),
    ],
)
def test_schemes_that_call_objects_of_another_kind_are_refused(kind: Any, scheme: Any) -> None:
    with pytest.raises(ValueError, match=r"is a \w+, which cannot call the nodes of a \w+: leave it out"):
        kind([make()], policy(), frames_per_batch=4, weight_sync_schemes={"policy": scheme()})


LAUNCHED = [RPCCollector, DistributedCollector]
OF_FAMILIES: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    (LAUNCHED, {"launcher": "slurm"}, ValueError, "'slurm': choose one of 'submitit', 'mp', 'torchrun'"),
    (LAUNCHED, {"launcher": "mp", "slurm_kwargs": {"timeout_min": 3}}, ValueError, "slurm_kwargs"),
    (LAUNCHED, {"slurm_kwargs": [1]}, TypeError, "slurm_kwargs"),
    (LAUNCHED, {"backend": "udp"}, ValueError, "gloo, mpi, nccl, ucc, not 'udp'"),
    (LAUNCHED, {"backend": "nccl"}, ValueError, "no nccl"),
    (LAUNCHED, {"tcp_port": "http"}, ValueError, "tcp_port .*'http'"),
    (LAUNCHED, {"tcp_port": 1.5}, TypeError, "tcp_port"),
    (LAUNCHED, {"tcp_port": 70000}, ValueError, "tcp_port .*65535"),
    ([RPCCollector], {"visible_devices": ["cpu"]}, ValueError, "visible_devices has 1 entries, but there are 2"),
    ([RPCCollector], {"visible_devices": "cpu"}, TypeError, "visible_devices"),
    ([RPCCollector], {"visible_devices": ["cpu", "disk"]}, ValueError, r"visible_devices\[1\]='disk'"),
    ([RPCCollector], {"tensorpipe_options": ["uv"]}, TypeError, "tensorpipe_options"),
    ([RPCCollector], {"tensorpipe_options": {"init_method": "env://"}}, ValueError, "init_method"),
    ([RayCollector], {"num_collectors": 3}, ValueError, "num_collectors=3, but create_env_fn is a list of 2"),
    ([RayCollector], {"remote_configs": [{}]}, ValueError, "remote_configs has 1 entries"),
    ([RayCollector], {"remote_configs": 3}, TypeError, "remote_configs"),
    ([RayCollector], {"remote_configs": {"max_restarts": 3}}, ValueError, "restarts="),
    ([RayCollector], {"restarts": -1}, ValueError, "restarts"),
    ([RayCollector], {"replay_buffer": []}, TypeError, "replay_buffer is a list"),
]


@pytest.mark.requirement(144, 147, 148, 149, 150, 151)
@pytest.mark.parametrize(
    ("kind", "given", "error", "word"), [(kind, *row) for kinds, *row in OF_FAMILIES for kind in kinds]
)
def test_how_nodes_are_launched_and_met_is_checked(kind: Any, given: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        kind([make()] * 2, policy(), frames_per_batch=4, **given)


@pytest.mark.requirement(147)
@pytest.mark.parametrize("kind", [RPCCollector, DistributedCollector])
def test_the_launchers_library_is_named_where_it_is_absent(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match=r"pip install 'asyncsync\[slurm\]', or pass launcher='mp'"):
        kind([make()], policy(), frames_per_batch=4)


@pytest.mark.requirement(188, 209)
def test_the_package_needs_no_ray_and_says_in_one_line_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"needs Ray, which is not installed: pip install 'asyncsync\[ray\]'"):
        RayCollector([make()], policy(), frames_per_batch=4)
    for name in ("RPCCollector", "DistributedCollector", "RayCollector"):
        assert name in asyncsync.collectors.distributed.__all__


@pytest.mark.requirement(188)
def test_rays_schemes_say_in_one_line_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for receives in (False, True):
        with sync.RayWeightSyncScheme() as scheme:
            if receives:
                scheme.init_on_receiver("policy", model=policy(), worker_idx=0)
            else:
                scheme.init_on_sender(model_id="policy", model=policy(), remotes=[object()])
            with pytest.raises(ImportError, match=r"needs Ray, which is not installed: pip install 'asyncsync\[ray\]'"):
                scheme.connect(timeout=5)


def test_a_rank_that_is_none_is_told_how_to_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"RANK.* torchrun"):
        serve_node()
    with pytest.raises(RuntimeError, match="start this program by torchrun"):
        DistributedCollector([make()], policy(), frames_per_batch=4, launcher="torchrun")
    with pytest.raises(ValueError, match="restarts="):
        DistributedCollector([make()], policy(), frames_per_batch=4, launcher="torchrun", restarts=1)


@pytest.mark.requirement(223)
@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("rpc", {"launcher": "mp", "tcp_port": 0}, "tcp_port must be at least 1"),
        ("distributed", {"launcher": "mp", "slurm_kwargs": {"a": 1}}, "slurm_kwargs"),
        ("submitit", {"tcp_port": "x"}, "tcp_port"),
        ("ray", {"remote_configs": [{}]}, "remote_configs has 1 entries"),
    ],
)
def test_the_one_front_door_leads_to_every_family(backend: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Collector([make()] * 2, policy(), frames_per_batch=4, backend=backend, backend_options=options)
