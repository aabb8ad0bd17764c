"""Collectors whose workers make their own policies: a scheme brings weights to them where none is given, and a
collector acknowledges nothing that its workers do not get."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from asyncsync.collectors import MultiAsyncCollector, MultiSyncCollector
from asyncsync.sync import ZMQWeightSyncScheme
from helpers.collecting_multi import acted, make, options, policy
from helpers.collecting_weights import update

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


def constant(observation: torch.Tensor) -> torch.Tensor:
    return torch.full((*observation.shape[:-1], 2), 7.0)


def acted_at_last(collector: Any) -> list[float]:
    """What all workers do: rollouts that an asynchronous one had begun come first."""
    return acted(torch.stack([collector.next().flatten() for _ in range(8)][-2:]))


@contextmanager
def trainer() -> Iterator[tuple[ZMQWeightSyncScheme, dict[str, Any]]]:
    """A sender with one worker, which connects meanwhile, and that worker's schemes."""
    above = ZMQWeightSyncScheme()
    above.init_on_sender(model_id="policy", model=policy(4.0), num_workers=1)
    connecting = threading.Thread(target=above.connect, kwargs={"timeout": 50})
    connecting.start()
    try:
        yield above, {"weight_recv_schemes": {"policy": pickle.loads(pickle.dumps(above))}, "worker_idx": 0}
        connecting.join(50)
    finally:
        above.shutdown()


@pytest.mark.requirement(130)
@BOTH
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_weights_reach_policies_that_workers_have_made(kind: Any, style: str) -> None:
    with kind([make()] * 2, policy_factory=policy, **options()) as collector:
        assert acted(collector.next()) == [1.0]
        update(collector, style, policy(5.0))
        assert acted_at_last(collector) == [5.0]
        with pytest.raises(ValueError, match="has no policy in this process: pass the weights to send"):
            update(collector, style)


class Makes(torch.nn.Module):
    """A factory that is a module, and needs no arguments."""

    def forward(self, value: float = 4.0) -> Any:
        return policy(value)


@pytest.mark.requirement(125, 130)
def test_policies_without_weights_or_of_several_kinds_need_no_scheme() -> None:
    cases = ((lambda: constant, [7.0]), ([policy, partial(policy, 2.0, 6)], [1.0, 2.0]), (Makes(), [4.0]))
    for factories, expected in cases:
        with MultiSyncCollector([make()] * 2, policy_factory=factories, **options()) as collector:
            assert acted(collector.next()) == expected


@pytest.mark.requirement(164, 237)
@BOTH
def test_what_a_collector_receives_reaches_the_policies_that_its_workers_have_made(kind: Any) -> None:
    with (
        trainer() as (above, received),
        kind([make()] * 2, policy_factory=policy, **received, **options()) as middle,
    ):
        assert acted(middle.next()) == [4.0]
        above.send(policy(5.0))
        assert acted_at_last(middle) == [5.0]


@pytest.mark.requirement(164, 237)
def test_it_does_so_as_a_worker() -> None:
    inner = partial(MultiSyncCollector, num_workers=2, start_method="forkserver")
    with MultiAsyncCollector([make()], policy_factory=policy, collector_class=inner, **options()) as collector:
        collector.update_policy_weights_(policy(3.0))
        assert acted_at_last(collector) == [3.0]


@pytest.mark.requirement(237)
@BOTH
@pytest.mark.parametrize("source", ["policy", "policy_factory"])
def test_weights_that_would_reach_no_worker_are_refused_at_once(kind: Any, source: str) -> None:
    above = ZMQWeightSyncScheme()
    above.init_on_sender(model_id="policy", model=policy(4.0), num_workers=1)
    given = {"weight_recv_schemes": {"policy": pickle.loads(pickle.dumps(above))}, "worker_idx": 0}
    given |= {source: policy() if source == "policy" else policy, "weight_sync_schemes": {}}
    with pytest.raises(ValueError, match=r"'policy'.* weight_sync_schemes="):
        kind([make()], **given, **options())
    above.shutdown()


@pytest.mark.requirement(237)
def test_a_receiver_that_the_user_has_initialised_must_know_the_collector() -> None:
    above = ZMQWeightSyncScheme()
    above.init_on_sender(model_id="policy", model=policy(4.0), num_workers=1)
    received = pickle.loads(pickle.dumps(above))
    with MultiSyncCollector([make()], policy(), worker_idx=0, **options()) as collector:
        received.init_on_receiver("policy", model=collector.policy, worker_idx=0)
        with pytest.raises(ValueError, match=r"without this collector as its context.*init_on_receiver"):
            collector.register_scheme_receiver({"policy": received})
        for part in ("policy.module", "module"):  # the workers are sent the whole policy
            with pytest.raises(ValueError, match=f"'{part}'.* weight_sync_schemes="):
                pickle.loads(pickle.dumps(above)).init_on_receiver(part, context=collector)
    received.shutdown()
    above.shutdown()
