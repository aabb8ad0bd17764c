"""Joining: schemes that were constructed apart come onto one bus before they are initialised."""

import pickle
from typing import Any

import pytest

import asyncsync
from asyncsync import sync
from asyncsync.bus.core import join_buses
from helpers.pairs import Model


def schemes(*options: dict[str, Any], module: Any = sync) -> list[Any]:
    return [module.ZMQWeightSyncScheme(**each) for each in options]


@pytest.mark.parametrize("module", [sync, asyncsync])
def test_private_schemes_share_the_first_ones_bus(module: Any) -> None:
    one, two = schemes({}, {}, module=module)
    bus = join_buses([one, two])
    assert one.bus is two.bus is bus
    one.init_on_sender(model_id="policy", model=Model(), num_workers=2)
    two.init_on_sender(model_id="value", model=Model())
    assert (bus.num_workers, sorted(bus.schemes)) == (2, ["policy", "value"])


def test_copies_pickled_apart_find_each_other_in_a_worker() -> None:
    one, two = schemes({}, {})
    join_buses([one, two])
    copies = [pickle.loads(pickle.dumps(scheme)) for scheme in (one, two)]
    assert copies[0].bus is not copies[1].bus
    for model_id, copy in zip(("policy", "value"), copies, strict=True):
        copy.init_on_receiver(model_id, model=Model(), worker_idx=0)
    assert copies[0].bus is copies[1].bus


def test_settings_come_together_and_an_explicit_endpoint_is_kept() -> None:
    one, two, three = schemes({"min_workers": 2, "fanout": True}, BIND, {"num_workers": 3})
    bus = join_buses([one, two, three])
    assert (bus.endpoint, bus.drawn) == ("tcp://127.0.0.1:5017", False)
    assert (bus.num_workers, bus.min_workers, bus.fanout) == (3, 2, True)
    assert {id(s.bus) for s in (one, two, three)} == {id(bus)}
    assert pickle.loads(pickle.dumps(bus)).drawn is False


@pytest.mark.parametrize("first", [0, 1])
def test_the_address_for_workers_is_kept(first: int) -> None:
    bind, there = {"endpoint": "tcp://127.0.0.1:5017"}, "tcp://localhost:5017"
    for options in ({**bind, "connect": there}, bind), ({**bind, "connect": there}, {}), (bind, {"connect": there}):
        pair = schemes(*options)
        bus = join_buses([pair[first], pair[1 - first]])
        assert (bus.endpoint, bus.connect_endpoint) == (bind["endpoint"], there)


def test_the_rest_join_a_bus_that_some_share() -> None:
    bus = sync.Bus()
    one, two, three = schemes({"bus": bus}, {}, {"bus": bus})
    assert join_buses([one, two, three]) is bus
    assert two.bus is bus


def test_several_shared_buses_stay_as_they_are() -> None:
    one, two, three = schemes({"bus": sync.Bus()}, {"bus": sync.Bus()}, {})
    before = [s.bus for s in (one, two, three)]
    assert join_buses([one, two, three]) is None
    assert [s.bus for s in (one, two, three)] == before


def test_one_scheme_keeps_its_bus_and_none_have_none() -> None:
    [one] = schemes({})
    bus = one.bus
    assert join_buses([one]) is bus
    assert one.has_own_bus
    assert join_buses([]) is None


BIND = {"endpoint": "tcp://127.0.0.1:5017"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{"num_workers": 3}, {"num_workers": 2}], r"num_workers, but these have \[2, 3\].*Bus\(num_workers=…\)"),
        ([{}, {"num_workers": 3, "min_workers": 2}, {"min_workers": 3}], "share its min_workers"),
        ([BIND, {"endpoint": "tcp://127.0.0.1:5019"}], r"several endpoints .*5017, .*5019.*Bus\(endpoint=…\)"),
        ([{**BIND, "connect": "tcp://localhost:1"}, {**BIND, "connect": "tcp://127.0.0.1:2"}], r"connect, .*:2.*:1"),
    ],
)
def test_settings_that_disagree_are_refused_and_nothing_is_changed(options: list[dict[str, Any]], message: str) -> None:
    apart = schemes(*options)
    before = [(scheme.bus, scheme.bus.num_workers) for scheme in apart]
    with pytest.raises(ValueError, match=message):
        join_buses(apart)
    assert [(scheme.bus, scheme.bus.num_workers) for scheme in apart] == before


def test_only_before_init() -> None:
    one, two = schemes({}, {})
    two.init_on_sender(model_id="policy", model=Model())
    with pytest.raises(RuntimeError, match="before init_on_sender"):
        join_buses([one, two])
    assert one.bus is not two.bus
