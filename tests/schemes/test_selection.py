"""``include=`` and ``exclude=``: a part of a module is sent and received, the rest stays. ``strict=True``."""

from typing import Any

import pytest
import torch
from torch import nn

from asyncsync import PartialSendError, SchemaMismatch, WeightStrategy, sync
from helpers.apis import Api, bare
from helpers.pairs import connected, fill, passed_on, read, refusals

pytestmark = [pytest.mark.timeout(60), pytest.mark.requirement(234)]

REST = -1.0


class Agent(nn.Module):
    """Two parts, of which one has buffers, and extra state."""

    def __init__(self, value: float = REST, *, critic: bool = True) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.note = Note(value)
        if critic:
            self.critic = nn.Linear(3, 4)
        self.actor[1].num_batches_tracked = torch.tensor(0.0)
        fill(self, value)

    def forward(self) -> dict[str, float]:
        return parts(self)


class Note(nn.Module):
    """Extra state that is no tensor."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["value"]


def parts(model: Agent) -> dict[str, float]:
    """The one number that each part of a model holds."""
    found = {name: read(part) for name, part in model.named_children() if name != "note"}
    assert all(len(values) == 1 for values in found.values()), found
    return {name: values.pop() for name, values in found.items()} | {"note": model.note.value}


async def only_the_actor_is_synchronised(api: Api, options: dict[str, Any]) -> None:
    models = [Agent() for _ in range(2)]
    untouched = [p.data_ptr() for p in models[0].critic.parameters()]
    async with api.crew(2, scheme=api.scheme(**options), source=Agent(0), models=models) as everybody:
        sender = everybody.sender
        for value in (1, 2, 3, 4, 5, 6):
            fill(everybody.source, value).note.value = value
            await sender.send_async()
            assert [parts(model) for model in models] == [{"actor": value, "critic": REST, "note": REST}] * 2
        assert {key for key in sender.weights.keys(True, True) if "critic" in key or "note" in key} == set()
        received = await api.receive(everybody.receivers[0], 5)
        assert set(received.keys()) == {"actor"}
        assert [p.data_ptr() for p in models[0].critic.parameters()] == untouched
        fill(models[0].critic, 9)
        await sender.send_async(Agent(7))
        assert parts(models[0]) == {"actor": 7, "critic": 9, "note": REST}, "what the worker does with the rest stays"
        await sender.send_async({0: Agent(8), 1: Agent(9)})
        assert [parts(model)["actor"] for model in models] == [8, 9]
        bare(everybody.receivers[0]).apply_weights(Agent(10))
        assert parts(models[0]) == {"actor": 10, "critic": 9, "note": REST}


@pytest.mark.schemes("all")
async def test_a_part_is_sent_and_received_and_the_rest_stays(api: Api) -> None:
    await only_the_actor_is_synchronised(api, {"include": "actor.*"})


@pytest.mark.parametrize(
    "options",
    [
        {"include": ["actor.0.*", "actor.1.*"], "exclude": "critic.*"},
        {"exclude": ["critic.*", "note._extra_state"]},
        {"include": ("actor.*",), "exclude": ("critic.*", "note.*"), "strict": True},
    ],
    ids=["both", "exclude", "strict"],
)
async def test_patterns_may_include_and_exclude(api: Api, options: dict[str, Any]) -> None:
    await only_the_actor_is_synchronised(api, options)


async def test_either_side_may_lack_what_is_not_selected(api: Api) -> None:
    small = Agent(critic=False)
    scheme = api.scheme(include="actor.*")
    async with api.crew(2, scheme=scheme, source=Agent(1), models=[small, Agent()]) as everybody:
        await everybody.sender.send_async(Agent(2, critic=False))
        assert [read(model.actor) for model in everybody.models] == [{2}, {2}]


async def test_a_receiver_may_select_less_than_is_sent(api: Api) -> None:
    sender = api.sender(Agent(1), num_workers=2)
    models = [Agent(), Agent(critic=False)]
    receivers = [api.scheme(endpoint=sender.bus.endpoint, include="actor.*") for _ in models]
    for index, (receiver, model) in enumerate(zip(receivers, models, strict=True)):
        receiver.init_on_receiver("policy", model=model, worker_idx=index)
    async with connected(sender, *receivers):
        await sender.send_async(Agent(2))
        assert parts(models[0]) == {"actor": 2, "critic": REST, "note": REST}
        assert parts(models[1]) == {"actor": 2, "note": REST}
        assert set((await receivers[0].fetch(timeout=10)).keys()) == {"actor", "critic", "note"}, "what was sent"
        with pytest.raises(PartialSendError, match="keys") as caught:
            await sender.send_async({"critic": Agent(3).critic.state_dict()})
        assert {type(error) for error in caught.value.failed.values()} == {SchemaMismatch}
        assert parts(models[0]) == {"actor": 2, "critic": REST, "note": REST}


class Renaming(WeightStrategy):
    """Sends ``actor`` as ``policy``; a worker's names are its own again."""

    def extract_weights(self, source: Any) -> Any:
        return {name.replace("actor.", "policy."): value for name, value in super().extract_weights(source).items()}

    def convert(self, weights: Any, model: Any) -> Any:
        return {
            tuple("actor" if part == "policy" else part for part in key): value
            for key, value in super().convert(weights, model).items()
        }


async def test_patterns_are_for_the_names_of_each_side(api: Api) -> None:
    scheme = api.scheme(Renaming("state_dict"), include=["policy.*", "actor.*"])
    async with api.crew(1, scheme=scheme, source=Agent(1), models=[Agent()]) as everybody:
        for value in (2, 3):
            await everybody.sender.send_async(Agent(value))
            assert parts(everybody.models[0]) == {"actor": value, "critic": REST, "note": REST}


async def test_other_models_than_modules(api: Api) -> None:
    source = {"a": torch.ones(3), "b": {"c": torch.ones(2), "d": torch.ones(1)}}
    model = {"a": torch.zeros(3), "b": {"c": torch.zeros(2), "d": torch.zeros(1)}}
    scheme = api.scheme(exclude="b.c")
    async with api.crew(1, scheme=scheme, sender={"weights": source}, models=[model]) as everybody:
        await everybody.sender.send_async({"a": 2 * torch.ones(3), "b": {"d": torch.ones(1)}})
        assert (model["a"].tolist(), model["b"]["c"].tolist(), model["b"]["d"].tolist()) == ([2] * 3, [0, 0], [1])


async def test_strict_refuses_what_no_pattern_matches(api: Api) -> None:
    strict = {"include": "actor.*", "exclude": ["critic.*", "note.*"], "strict": True}
    async with api.crew(1, scheme=api.scheme(**strict), source=Agent(1), models=[Agent()]) as everybody:
        version = everybody.sender.version
        grown = Agent(2)
        grown.head = nn.Linear(1, 1)
        with pytest.raises(ValueError, match=r"head\.weight"):
            await everybody.sender.send_async(grown)
        assert (everybody.sender.version, read(everybody.models[0].actor)) == (version, {1})
    model = Agent()
    model.head = nn.Linear(1, 1)
    scheme = sync.ZMQWeightSyncScheme(**strict)
    with pytest.raises(SchemaMismatch, match=r"head\.weight"):
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
    scheme.init_on_receiver("policy", model=Agent(), worker_idx=0)


async def test_strict_refuses_what_has_come_and_no_pattern_matches(api: Api) -> None:
    sender = api.sender(Agent(1, critic=False), num_workers=1)
    receiver = api.scheme(endpoint=sender.bus.endpoint, include="actor.*", strict=True)
    model = nn.Module()
    model.actor = Agent().actor
    with pytest.warns(UserWarning, match="no forward"):
        receiver.init_on_receiver("policy", model=model, worker_idx=0)
    sending, receiving = await refusals(sender, receiver)
    assert isinstance(sending, PartialSendError)
    assert isinstance(receiving, SchemaMismatch)
    assert "note._extra_state" in str(receiving)
    assert read(model.actor) == {REST}


async def test_patterns_that_select_nothing_are_an_error(api: Api) -> None:
    sender = api.sender(Agent(1), min_workers=0, scheme={"include": "actor"})
    with pytest.raises(ValueError, match=r"actor\.\*"):
        await sender.connect(timeout=10)
    await sender.shutdown()
    receiver = passed_on(sender)
    with pytest.raises(ValueError, match="include"):
        receiver.init_on_receiver("policy", model=Agent(0), worker_idx=0)


@pytest.mark.parametrize("wrong", [(), [], "", [""], [3], 3, ("actor.*", None)])
@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_what_is_no_pattern_is_refused(argument: str, wrong: Any) -> None:
    for kind in (sync.ZMQWeightSyncScheme, sync.SharedMemWeightSyncScheme, sync.NoWeightSyncScheme):
        with pytest.raises((ValueError, TypeError), match=argument):
            kind(**{argument: wrong})
    with pytest.raises(ValueError, match="strict"):
        sync.ZMQWeightSyncScheme(strict=True)
