"""Collector(backend=, backend_options=, num_collectors=, sync=): one constructor for every family."""

from __future__ import annotations

from typing import Any

import pytest

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers.collecting_multi import acted, make, policy

pytestmark = pytest.mark.requirement(223)

OF_WORKERS = {"start_method": "forkserver"}


class Own(Collector):
    pass


@pytest.mark.parametrize(
    ("given", "kind", "workers"),
    [
        ({"backend": "process", "num_collectors": 2, "backend_options": OF_WORKERS}, MultiAsyncCollector, 2),
        ({"backend": "process", "sync": True, "backend_options": OF_WORKERS}, MultiSyncCollector, 1),
        ({"num_collectors": 1, **OF_WORKERS}, MultiAsyncCollector, 1),
    ],
    ids=["process", "process, synchronous", "num_collectors alone"],
)
def test_the_process_backend_makes_a_collector_with_workers(given: Any, kind: Any, workers: int) -> None:
    with Collector(make(), policy(3.0), frames_per_batch=6, **given) as collector:
        assert type(collector) is kind
        assert collector.num_workers == workers
        assert acted(collector.next()) == [3.0]


def test_a_list_of_factories_says_how_many_workers_there_are() -> None:
    given: Any = {"frames_per_batch": 6, "backend": "process", "sync": True, "backend_options": OF_WORKERS}
    with Collector(create_env_fn=[make(), make(length=3)], policy=policy(), **given) as collector:
        assert collector.num_workers == 2
        assert collector.next().batch_size == (2, 3)


@pytest.mark.parametrize("environment", [make(), [make()]])
@pytest.mark.parametrize("given", [{}, {"backend": "direct"}, {"backend": "direct", "num_collectors": 1}])
def test_the_direct_backend_is_the_collector_of_this_process(environment: Any, given: Any) -> None:
    with Collector(environment, policy(2.0), frames_per_batch=6, **given) as collector:
        assert type(collector) is Collector
        assert acted(collector.next()) == [2.0]


def test_a_subclass_is_what_it_is() -> None:
    with Own(make(), policy(), frames_per_batch=6) as collector:
        assert type(collector) is Own
    for given in ({"backend": "direct"}, {"backend_options": {}}, {"num_collectors": 2}, {"sync": False}):
        with pytest.raises(TypeError, match=rf"{next(iter(given))}=.*subclass Own"):
            Own(make(), policy(), frames_per_batch=6, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"backend": "thread"}, ValueError, "'thread'.*'direct', 'process'"),
        ({"backend": "direct", "num_collectors": 2}, ValueError, "backend=.process."),
        ({"backend": "direct", "sync": True}, TypeError, "num_collectors=n"),
        ({"sync": True}, TypeError, "num_collectors=n"),
        ({"backend": "direct", "backend_options": OF_WORKERS}, ValueError, "start_method"),
        ({"backend": "process", "sync": "yes"}, TypeError, "sync.*'yes'"),
        ({"backend": "process", "num_collectors": True}, TypeError, "num_collectors"),
        ({"num_collectors": 0}, ValueError, "num_collectors"),
        ({"num_collectors": 2, "create_env_fn": [make()]}, ValueError, "a list of 1"),
        ({"num_collectors": 2, "create_env_fn": {"a": make()}}, TypeError, "create_env_fn is a dict"),
        ({"backend": "process", "backend_options": [1]}, TypeError, r"dict .* not \[1\]"),
        ({"backend": "process", "backend_options": {"num_workers": 2}}, ValueError, "num_workers"),
        ({"backend": "process", "backend_options": {"policy": 1}}, ValueError, "policy"),
        ({"backend": "process", "backend_options": {"start_methode": "spawn"}}, TypeError, "start_methode"),
    ],
)
def test_choices_that_do_not_fit_are_refused(given: Any, error: Any, word: str) -> None:
    with pytest.raises(error, match=word):
        Collector(**{"create_env_fn": make(), "policy": policy(), "frames_per_batch": 6, **given})


def test_what_is_given_by_position_counts_where_there_is_a_choice() -> None:
    with pytest.raises(TypeError, match="create_env_fn"):
        Collector(num_collectors=2, frames_per_batch=6)
    with pytest.raises(ValueError, match="give each once"):
        Collector(make(), policy(), frames_per_batch=6, backend="process", backend_options={"policy": 1})
