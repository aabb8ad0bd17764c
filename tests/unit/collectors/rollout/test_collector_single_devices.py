"""Devices of a Collector: how they are found, what is cast, and what waits for it. No second device is needed: "cpu",
"cpu:0" and "cpu:1" are one device whose names differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from asyncsync.collectors import Collector
from asyncsync.collectors.rollout import steps as rollout_steps
from helpers.collecting_single import KINDS, Actor, WalkEnv, environment

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore::DeprecationWarning:torchrl")


class Movable(WalkEnv):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.device = None if device is None else torch.device(device)

    def to(self, device: torch.device) -> Movable:
        self.device = device
        return self


def collector(env: Any = None, policy: Any = None, **kwargs: Any) -> Any:
    return Collector(env or Movable(), policy or Actor(), frames_per_batch=4, **kwargs)


@pytest.mark.requirement(99, 100, 101, 102, 103, 104)
@pytest.mark.parametrize(
    ("destination", "devices", "initialized", "waited"),
    [
        ("cuda", ("cuda", "mps", "npu"), True, []),
        (None, ("cuda", "mps", "npu"), True, []),
        ("cpu", ("cuda", "mps", "npu"), True, ["cuda"]),
        ("cpu", ("cuda",), False, []),
        ("cpu", ("mps", "npu"), True, ["mps"]),
        ("mps", ("mps", "npu"), True, ["mps"]),
        ("cpu", ("npu",), True, ["npu"]),
        ("cpu", (), True, []),
    ],
)
def test_what_waits_depends_on_the_destination(
    destination: str | None,
    devices: tuple[str, ...],
    initialized: bool,
    waited: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in devices)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("cuda"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in devices)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: found.append("mps"))
    npu = SimpleNamespace(is_available=lambda: "npu" in devices, synchronize=lambda: found.append("npu"))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    rollout_steps.synchronisation(None if destination is None else torch.device(destination))()
    assert found == waited


@pytest.mark.requirement(98)
def test_the_functions_that_wait_are_installed_for_the_three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_steps, "synchronisation", lambda device: lambda: device)
    with collector(policy_device="cpu", env_device="cpu:0", storing_device="cpu:1") as c:
        used = c._rollouts.devices
        found = [used.sync_policy(), used.sync_env(), used.sync_storage()]
    assert found == [torch.device("cpu"), torch.device("cpu:0"), torch.device("cpu:1")]


@pytest.mark.requirement(106, 107, 132)
@pytest.mark.parametrize(
    ("devices", "own", "to_policy", "to_env"),
    [
        ({}, None, False, False),
        ({"device": "cpu"}, None, False, False),
        ({"policy_device": "cpu", "env_device": "cpu", "storing_device": "cpu"}, None, False, False),
        ({"policy_device": "cpu", "env_device": "cpu:0"}, None, True, True),
        ({"policy_device": "cpu"}, None, True, True),
        ({"storing_device": "cpu:1"}, None, False, True),
        ({}, "cpu", False, True),
        ({"storing_device": "cpu"}, "cpu", False, False),
    ],
)
def test_casts_follow_from_the_devices_and_are_decided_once(
    devices: dict[str, str], own: str | None, to_policy: bool, to_env: bool
) -> None:
    with collector(Movable(own), **devices) as c:
        assert c._rollouts.devices.cast_to_policy_device is to_policy
        assert c._rollouts.devices.cast_to_env_device is to_env
        assert len(c.rollout()) == 4


@pytest.mark.requirement(106)
def test_what_the_policy_wrote_comes_back_and_nothing_else() -> None:
    carriers = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        assert td is not carriers[-1]
        assert torch.device(str(td.device)).type == "cpu"
        td.set("score", td["observation"].sum(-1, keepdim=True))
        return td.set("action", td["score"] * 2)

    with collector(Movable(), policy, trust_policy=True, policy_device="cpu") as c:
        act = c._rollouts.steps.act

        def acted(carrier: TensorDictBase, random: bool) -> None:
            carriers.append(carrier)
            observation = carrier["observation"]
            act(carrier, random)
            assert carrier["observation"] is observation

        c._rollouts.steps.act = acted
        batch = c.rollout()
    assert torch.equal(batch["action"], batch["score"] * 2)


@pytest.mark.requirement(128)
def test_device_fills_those_that_are_not_given() -> None:
    assert collector_devices() == [None, None, None]
    assert collector_devices(device="cpu") == ["cpu"] * 3
    assert collector_devices(device=torch.device("cpu")) == ["cpu"] * 3
    assert collector_devices(device="cpu", storing_device="cpu:1") == ["cpu:1", "cpu", "cpu"]
    assert collector_devices(device="cpu", policy_device="cpu:1") == ["cpu", "cpu:1", "cpu"]
    assert collector_devices(device="cpu", env_device="cpu:1") == ["cpu", "cpu", "cpu:1"]


def collector_devices(**kwargs: Any) -> list[str | None]:
    with collector(**kwargs) as c:
        return [None if d is None else str(d) for d in (c.storing_device, c.policy_device, c.env_device)]


@pytest.mark.requirement(130)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_storing_device_the_batch_is_on_none(kind: str) -> None:
    with collector(environment(kind)) as c:
        assert c.rollout().device is None
    with collector(environment(kind), storing_device="cpu") as c:
        assert c.rollout().device == torch.device("cpu")


@pytest.mark.requirement(131)
def test_the_environment_is_moved_or_says_where_it_is() -> None:
    env = Movable()
    with collector(env, env_device="cpu:1") as c:
        assert c.env.device == torch.device("cpu:1")
    with collector(Movable("cpu:1")) as c:
        assert c.env_device == torch.device("cpu:1")
    with pytest.raises(TypeError, match=r"no to\(device\)"):
        collector(WalkEnv(), env_device="meta")


@pytest.mark.requirement(132)
def test_the_policy_acts_on_its_device_and_the_original_stays() -> None:
    original = Actor()
    with collector(policy=original, policy_device="cpu") as c:
        assert c.policy is original
    with collector(policy=original, policy_device="meta", env_device="cpu") as c:
        assert c.policy is not original
        assert c.policy.gain.is_meta
        assert not original.gain.is_meta
