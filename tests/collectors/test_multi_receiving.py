"""A collector with workers takes weights in: given to it or from above, for its workers, which may have made their own
policies, and for models that act in this process. It acknowledges nothing that its workers do not get."""

import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync.collectors import MultiAsyncCollector, MultiSyncCollector
from asyncsync.errors import SchemaMismatch
from asyncsync.sync import SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.collecting_multi import Marked, Scaled, SharedBuffer, acted, make, options, policy, settled, versions
from helpers.collecting_weights import CountsUpdates, rooted, update

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


@pytest.fixture(scope="module", params=[MultiSyncCollector, MultiAsyncCollector])
def all_the_time(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param([make()] * 2, policy(), postproc=Scaled(), **options()) as collector:
        for _ in range(6):
            fresh(collector)
            collector.update_policy_weights_()
        yield collector


@pytest.fixture
def crew(all_the_time: Any) -> Iterator[Any]:
    with settled(all_the_time):
        yield all_the_time


def fresh(collector: Any) -> Any:
    """A batch whose rollout has begun after what was done last."""
    if not isinstance(collector, MultiAsyncCollector):
        return collector.next()
    # A worker may be ahead by one batch that is finished, and one that it has begun: its third one is fresh. A slow
    # worker's first may come after many of the other's.
    came: Counter[int] = Counter()
    while True:
        batch = collector.next()
        worker = int(batch["collector", "traj_ids"].flatten()[0]) % 2
        came[worker] += 1
        if came[worker] == 3:
            return batch


# -- receive_weights --------------------------------------------------------------------------------------------------

FORMS: list[Any] = [
    lambda m: ((m,), {}),
    lambda m: ((TensorDict.from_module(m).data,), {}),
    lambda m: ((m.state_dict(),), {}),
    lambda m: ((), {"weights": TensorDict.from_module(m).data}),
    lambda m: ((), {"policy": m}),
]


@pytest.mark.requirement(159, 160, 161, 164)
def test_what_is_given_becomes_the_policys_and_every_workers(crew: Any) -> None:
    for value, form in enumerate(FORMS, 20):
        before = crew.policy_version
        arguments, keywords = form(policy(value))
        crew.receive_weights(*arguments, **keywords)
        assert crew.policy.module.weight.unique().tolist() == [value]
        assert crew.policy_version == before + 1
        batch = fresh(crew)
        assert (acted(batch), versions(batch)) == ([value], [before + 1])
    with pytest.raises(ValueError, match="exclude each other"):
        crew.receive_weights(policy(2.0), weights=policy(3.0).state_dict())
    with pytest.raises(SchemaMismatch):
        crew.receive_weights({"module.weight": torch.zeros(9)})
    assert (crew.policy_version, crew.policy.module.weight.unique().tolist()) == (before + 1, [value])
    crew.policy.module.fill(15.0)
    crew.receive_weights()
    assert acted(fresh(crew)) == [15.0], "without arguments, the registered policy's"


class Counted(CountsUpdates, Marked):
    pass


@pytest.mark.requirement(160)
def test_extra_state_comes_with_the_weights() -> None:
    source, own = (TensorDictModule(Counted(), in_keys=["observation"], out_keys=["action"]) for _ in range(2))
    source.module.updates = 3
    with MultiSyncCollector([make()], own, **options()) as collector:
        collector.receive_weights(source)
        assert collector.policy.module.updates == 3
        collector.next()


@pytest.mark.requirement(159)
def test_a_collector_whose_workers_get_no_weights_says_so() -> None:
    with MultiSyncCollector([make()], None, **options()) as collector:
        assert collector._sender_schemes == {}
        assert acted(collector.next()) == [-1.0]
        with pytest.raises(ValueError, match=r"has schemes for none.* weight_sync_schemes=\{model_id: scheme\}"):
            collector.receive_weights(policy(2.0))


# -- whom it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement(167)
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_worker_ids_an_index_several_a_device_or_devices(style: str) -> None:
    """Of devices, the one that there is everywhere; workers on several are told apart by the same look-up."""
    cpu = torch.device("cpu")
    cases: list[tuple[float, Any, list[float]]] = [
        (2.0, 0, [2.0, 1.0]),
        (3.0, [1], [2.0, 3.0]),
        (4.0, cpu, [4.0, 4.0]),
        (5.0, [0, 1], [5.0, 5.0]),
        (6.0, [torch.device("cpu", 0), 1], [6.0, 6.0]),
    ]
    with MultiSyncCollector([make()] * 2, policy(), **options()) as collector:
        for value, worker_ids, expected in cases:
            update(collector, style, policy(value), worker_ids=worker_ids)
            assert [acted(part) for part in collector.next()] == [[own] for own in expected]  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="cuda:3"):
            update(collector, style, policy(9.0), worker_ids=torch.device("cuda:3"))
        with pytest.raises(ValueError, match="worker"):
            update(collector, style, policy(9.0), worker_ids=2)
        for wrong in ("cpu", 1.5):
            with pytest.raises(TypeError, match=f"worker_ids .*{wrong!r}"):
                update(collector, style, policy(9.0), worker_ids=wrong)
        assert acted(collector.next()) == [6.0]
        update(collector, style, {0: policy(7.0), 1: policy(8.0)})
        assert [acted(part) for part in collector.next()] == [[7.0], [8.0]]  # type: ignore[union-attr]


# -- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement(3)
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_postproc_is_updated_where_it_acts(crew: Any, style: str) -> None:
    update(crew, style, policy=Scaled(5.0), model_id="postproc")
    assert crew.next()["scaled"].unique().tolist() == [5.0]
    update(crew, style, weights_dict={"policy": policy(8.0), "postproc": Scaled(6.0)})
    batch = fresh(crew)
    assert (acted(batch), batch["scaled"].unique().tolist()) == ([8.0], [6.0])
    before = crew.policy_version
    with pytest.raises(SchemaMismatch):
        update(crew, style, weights_dict={"policy": policy(9.0), "postproc": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"unknown model_id 'env\.net'|has no scheme"):
        update(crew, style, weights_dict={"policy": policy(9.0), "env.net": policy(9.0)})
    with pytest.raises(ValueError, match=r"unknown model_id 'critic'.* has schemes for .* pass weight_sync_schemes="):
        update(crew, style, model_id="critic")
    assert crew.policy_version == before, "neither was sent"


@pytest.mark.requirement(3)
@pytest.mark.parametrize("buffered", [False, True])
def test_postproc_may_have_a_scheme_wherever_it_acts(tmp_path: Any, buffered: bool) -> None:
    schemes = {"policy": SharedMemWeightSyncScheme(), "postproc": SharedMemWeightSyncScheme()}
    buffer = SharedBuffer(tmp_path) if buffered else None
    given = options(postproc=Scaled(), weight_sync_schemes=schemes, replay_buffer=buffer)
    with MultiSyncCollector([make()], policy(), **given) as collector:
        collector.update_policy_weights_(weights_dict={"policy": policy(2.0), "postproc": Scaled(3.0)})
        collector.update_policy_weights_(policy=Scaled(4.0), model_id="postproc")
        batch: Any = collector.next()
        assert batch is None if buffered else batch["scaled"].unique().tolist() == [4.0]


class Pair(nn.Module):
    """A policy of two parts, which the action shows."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.actor.weight.flatten(), self.critic.weight.flatten()])
        return both.detach().expand(*observation.shape[:-1], 2).clone()


def part(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1, 1), value)}


@pytest.mark.requirement(3, 10, 11)
@pytest.mark.parametrize("wrapped", [False, True])
def test_parts_of_the_policy_are_models_of_their_own(wrapped: bool) -> None:
    pair = Pair()
    given = TensorDictModule(pair, ["observation"], ["action"]) if wrapped else pair
    actor, critic = ("module.actor", "policy.module.critic") if wrapped else ("actor", "policy.critic")
    schemes = {model_id: SharedMemWeightSyncScheme() for model_id in (actor, critic)}
    with MultiSyncCollector([make()], given, weight_sync_schemes=schemes, **options()) as collector:
        collector.update_policy_weights_(weights=part(2.0), model_id=actor)
        collector.update_policy_weights_(weights_dict={actor: part(3.0), critic: part(4.0)})
        assert acted(collector.next()) == [3.0, 4.0]
        with torch.no_grad():
            pair.actor.weight.fill_(5.0)
        collector.update_policy_weights_(model_id=actor)
        assert acted(collector.next()) == [4.0, 5.0]


@pytest.mark.requirement(169)
def test_a_model_that_no_worker_has_is_refused_with_the_rule() -> None:
    schemes = {"policy": SharedMemWeightSyncScheme(), "critic": SharedMemWeightSyncScheme()}
    with pytest.raises(ValueError, match=r"weight_recv_schemes\['critic'\].*no model 'critic': a model id is 'policy'"):
        MultiSyncCollector([make()], policy(), weight_sync_schemes=schemes, **options())


# -- policies that workers have made -----------------------------------------------------------------------------------

MADE_THERE = {"policy_factory": policy}


def constant(observation: torch.Tensor) -> torch.Tensor:
    return torch.full((*observation.shape[:-1], 2), 7.0)


def acted_at_last(collector: Any) -> list[float]:
    """What all workers do: rollouts that an asynchronous one had begun come first."""
    return acted(torch.stack([collector.next().flatten() for _ in range(8)][-2:]))


@contextmanager
def trainer() -> Iterator[tuple[ZMQWeightSyncScheme, dict[str, Any]]]:
    """A sender with one worker, which connects meanwhile, and that worker's schemes."""
    above, received = rooted(policy(4.0))
    connecting = threading.Thread(target=above.connect, kwargs={"timeout": 50})
    connecting.start()
    try:
        yield above, {"weight_recv_schemes": {"policy": received}, "worker_idx": 0}
        connecting.join(50)
    finally:
        above.shutdown()


@pytest.mark.requirement(130)
@pytest.mark.parametrize(("kind", "style"), [(MultiSyncCollector, "async"), (MultiAsyncCollector, "blocking")])
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


@pytest.mark.requirement(159, 162, 164, 237)
@pytest.mark.parametrize(
    ("kind", "source"),
    [(MultiSyncCollector, {"policy": policy()}), (MultiSyncCollector, MADE_THERE), (MultiAsyncCollector, MADE_THERE)],
    ids=["its own policy", "made there", "made there, one by one"],
)
def test_what_a_collector_receives_reaches_the_policies_of_its_workers(kind: Any, source: dict[str, Any]) -> None:
    with trainer() as (above, received), kind([make()] * 2, **source, **received, **options()) as middle:
        assert acted(middle.next()) == [4.0]
        above.send(policy(5.0))
        middle.receive_weights()
        assert acted_at_last(middle) == [5.0]
        with pytest.raises(ValueError, match="weight_recv_schemes"):
            middle.receive_weights(policy(6.0))
        assert acted_at_last(middle) == [5.0]


@pytest.mark.thorough
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
    above, received = rooted(policy(4.0))
    given = {"weight_recv_schemes": {"policy": received}, "worker_idx": 0}
    given |= {source: policy() if source == "policy" else policy, "weight_sync_schemes": {}}
    with pytest.raises(ValueError, match=r"'policy'.* weight_sync_schemes="):
        kind([make()], **given, **options())
    above.shutdown()


@pytest.mark.requirement(237)
def test_a_receiver_that_the_user_has_initialised_must_know_the_collector() -> None:
    above, received = rooted(policy(4.0))
    with MultiSyncCollector([make()], policy(), worker_idx=0, **options()) as collector:
        received.init_on_receiver("policy", model=collector.policy, worker_idx=0)
        with pytest.raises(ValueError, match=r"without this collector as its context.*init_on_receiver"):
            collector.register_scheme_receiver({"policy": received})
        for part in ("policy.module", "module"):  # the workers are sent the whole policy
            with pytest.raises(ValueError, match=f"'{part}'.* weight_sync_schemes="):
                pickle.loads(pickle.dumps(above)).init_on_receiver(part, context=collector)
    received.shutdown()
    above.shutdown()
