"""``verify``: which tensors of the workers' models differ from what was sent."""

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from asyncsync import AckTimeout, ClosedError, NotComparable, WeightStrategy
from helpers.apis import Api
from helpers.pairs import Clock, Model, Stateful, connected, fill, held, receiver_of

pytestmark = pytest.mark.requirement(245)

LARGE = 4_000_000  # elements: some 15 ms of hashing


def spoil(model: nn.Module, *names: str) -> None:
    """Change one element of each of these tensors."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    with torch.no_grad():
        for name in names:
            tensors[name].view(-1)[-1] += 1


@pytest.mark.promise(53)
@pytest.mark.schemes("all")
async def test_it_names_the_tensors_that_differ(api: Api) -> None:
    models = [Stateful(-1.0), Stateful(-1.0)]
    async with api.crew(2, source=Stateful(0.0), models=models) as everybody:
        sender, _, models = everybody
        assert await sender.verify(timeout=10) == {0: [], 1: []}
        for value in (1, 2, 3, 4):  # the fast path is on by then
            await sender.send_async(fill(everybody.source, value))
        assert await sender.verify(timeout=10) == {0: [], 1: []}
        spoil(models[1], "inner.weight", "scale")
        assert {w: sorted(names) for w, names in (await sender.verify(timeout=10)).items()} == {
            0: [],
            1: ["inner.weight", "scale"],
        }
        assert await sender.verify(0, timeout=10) == {0: []}
        await sender.send_async(fill(everybody.source, 5))
        assert await sender.verify([1, 0], timeout=10) == {0: [], 1: []}, "the next version has repaired it"


@pytest.mark.schemes("some")
async def test_weights_of_single_workers_are_compared_with_their_own(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender, _, models = everybody
        await sender.send_async({0: Model(1), 1: Model(2)})
        assert await sender.verify(timeout=10) == {0: [], 1: []}
        fill(models[1], 1)
        assert await sender.verify(timeout=10) == {
            0: [],
            1: ["first", "last", "scale", "inner.bias", "inner.weight"],
        }


class Double(WeightStrategy):
    def convert(self, weights: Any, model: Any) -> Any:
        return {key: 2 * value for key, value in super().convert(weights, model).items()}


class OwnApply:
    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        self.seen = weights


@pytest.mark.promise(53)
async def test_what_is_not_what_was_sent_is_not_comparable(api: Api) -> None:
    sender = api.sender(source := Model(1), num_workers=6)
    half = [receiver_of(sender, i, Model().to(dtype), cast=True) for i, dtype in enumerate((torch.half, torch.float))]
    without = receiver_of(sender, 2, None)
    converting = api.beside(sender, Double())
    converting.init_on_receiver("policy", model=Model(), worker_idx=3)
    applying = api.extended(OwnApply, endpoint=sender.bus.endpoint)
    applying.init_on_receiver("policy", model=Model(), worker_idx=4)
    buffers = dict(Model().named_parameters()) | {"scale": torch.zeros(5, dtype=torch.double)}
    partly = receiver_of(sender, 5, buffers, cast=True)
    async with connected(sender, *half, without, converting, applying, partly):
        await sender.send_async(fill(source, 2))
        found = await sender.verify(timeout=10)
    assert found.pop(1) == [], "nothing is cast there"
    assert all(isinstance(one, NotComparable) for one in found.values())
    assert {worker: str(one) for worker, one in found.items()} == {
        0: "not comparable: it casts 'first' from torch.float32 to torch.float16",
        2: "not comparable: it has no model",
        3: "not comparable: its strategy, Double, converts the weights",
        4: "not comparable: it has an apply_weights of its own",
        5: "not comparable: it casts 'scale' from torch.float32 to torch.float64",
    }


async def test_a_worker_is_told_apart_that_is_lost_behind_or_silent(api: Api) -> None:
    async with api.crew(4) as everybody:
        sender, receivers, _ = everybody
        await receivers[1].shutdown()
        with held(receivers[2]):
            version = await sender.publish(fill(everybody.source, 1))
            await sender.wait_version(version, [0, 3], timeout=5)
            found = await sender.verify(timeout=0.5)
            assert "worker 1 is lost: it has left" in found[1].reason
            assert found[2] == NotComparable("it has version 1, and after 0.5 s still not version 2")
            assert (found[0], found[3]) == ([], [])
            late = asyncio.ensure_future(sender.verify(timeout=20))
            await asyncio.sleep(0.1)
            assert not late.done()
        assert [(await late)[worker] for worker in (0, 2, 3)] == [[], [], []], "it has been waited for"
        with pytest.raises(ValueError, match="worker_idx 4 does not exist"):
            await sender.verify(4)
        with pytest.raises(ValueError, match="timeout"):
            await sender.verify(timeout=-1)
        with pytest.raises(RuntimeError, match="receiver"):
            await receivers[0].verify()


async def test_a_worker_that_takes_versions_itself_has_no_model(api: Api) -> None:
    sender = api.sender(None, num_workers=2)
    taker = receiver_of(sender, 1, None, apply="on_take")
    async with connected(sender, receiver_of(sender, 0, Model()), taker):
        await sender.publish(Model(1))
        found = await sender.verify(timeout=10)
    assert found == {0: [], 1: NotComparable("it has no model, but takes versions itself")}


async def test_without_weights_or_workers_there_is_nothing_to_compare(api: Api) -> None:
    sender = api.sender(None, min_workers=0)
    async with sender:
        await sender.connect(timeout=5)
        assert await sender.verify(timeout=5) == {}
        async with connected(receiver_of(sender, 7, Model())):
            assert await sender.verify(timeout=5) == {7: NotComparable("nothing has been published for it yet")}


@pytest.mark.promise(53)
@pytest.mark.schemes("some")
@pytest.mark.parametrize("width", [64, LARGE])
async def test_versions_that_are_sent_meanwhile_are_no_difference(api: Api, width: int) -> None:
    """It asks again where a worker has got another version; what it says is of one version in any case."""
    source = Model(0.0, width)
    async with api.crew(2, source=source, models=[Model(-1.0, width) for _ in range(2)]) as (sender, _, models):
        over = False

        async def train() -> None:
            value = 0
            while not over:
                await sender.send_async(fill(source, value := value + 1))
                await asyncio.sleep(0.005)

        training = asyncio.create_task(train())
        try:
            before = sender.version
            for _ in range(10):
                assert await sender.verify(timeout=30) == {0: [], 1: []}
        finally:
            over = True
            await training
        assert sender.version > before
        spoil(models[0], "last")
        assert await sender.verify(timeout=10) == {0: ["last"], 1: []}


class Tied(nn.Module):
    """Two names of one tensor, or two tensors."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.a(inputs) + self.b(inputs) + self.c(inputs)


@pytest.mark.schemes("some")
async def test_what_is_tied_differs_under_each_of_its_names(api: Api) -> None:
    models = [Tied(tied=True), Tied(tied=False)]
    async with api.crew(2, source=Tied(tied=True), models=models) as (sender, _, _):
        assert await sender.verify(timeout=10) == {0: [], 1: []}
        for model in models:
            spoil(model, "b.weight")
        assert await sender.verify(timeout=10) == {0: ["a.weight", "b.weight"], 1: ["a.weight", "b.weight"]}


async def test_of_a_selection_only_what_was_sent_is_compared(api: Api) -> None:
    sender = api.sender(Tied(tied=False), scheme={"exclude": "b.*"}, num_workers=2)
    narrower = api.scheme(endpoint=sender.bus.endpoint, exclude=["b.*", "c.bias"])
    narrower.init_on_receiver("policy", model=(few := Tied(tied=False)), worker_idx=1)
    async with connected(sender, receiver_of(sender, 0, model := Tied(tied=False)), narrower):
        assert await sender.verify(timeout=10) == {0: [], 1: []}
        for one in (model, few):
            spoil(one, "b.weight", "c.bias")
        assert await sender.verify(timeout=10) == {0: ["c.bias"], 1: []}, "worker 1 takes no c.bias"


@pytest.mark.schemes("some")
async def test_any_tensor_that_can_be_sent_can_be_compared(api: Api) -> None:
    def weights(value: int) -> Any:
        tensors = {
            "empty": torch.zeros(0, 3),
            "number": torch.tensor(value),
            "turned": torch.full((3, 4), float(value)).t(),
            "complex": torch.full((2,), complex(value, 1)),
            "brain": torch.full((9,), value, dtype=torch.bfloat16),
            "flags": torch.full((3,), bool(value)),
        }
        return TensorDict({"deep": tensors})

    models = [weights(0), dict(weights(0)["deep"].items())]
    sender = api.sender(None, weights=weights(1), num_workers=2)
    receivers = [receiver_of(sender, 0, models[0]), receiver_of(sender, 1, {"deep": models[1]})]
    async with connected(sender, *receivers):
        assert await sender.verify(timeout=10) == {0: [], 1: []}
        for name in ("number", "complex", "brain"):
            models[1][name].view(-1)[0] += 1
        with torch.inference_mode():
            models[0]["deep", "turned"][0, 1] += 1
        found = await sender.verify(timeout=10)
        assert found[0] == ["deep.turned"]
        assert sorted(found[1]) == ["deep.brain", "deep.complex", "deep.number"]


@pytest.mark.schemes("some")
async def test_several_models_of_a_bus_are_verified_by_their_schemes(api: Api) -> None:
    async with api.family(2) as family:
        await family.bus.send_async({name: fill(source, 3) for name, source in family.sources.items()})
        spoil(family.models[1]["value"], "last")
        both = [asyncio.ensure_future(family.schemes[name].verify(timeout=10)) for name in ("policy", "value")]
        assert await asyncio.gather(*both) == [{0: [], 1: []}, {0: [], 1: ["last"]}]
        await family.workers[0]["value"].shutdown()
        assert "does not have" in (await family.schemes["value"].verify(0, timeout=10))[0].reason
        assert await family.schemes["policy"].verify(timeout=10) == {0: [], 1: []}


@pytest.mark.schemes("some")
async def test_cancelled_or_shut_down_in_the_middle_it_ends_at_once(api: Api) -> None:
    models = [Model(-1.0, 2 * LARGE) for _ in range(3)]
    async with api.crew(3, source=Model(0.0, 2 * LARGE), models=models) as (sender, receivers, _):
        for delay in () if api.is_blocking else (0.0, 0.001, 0.003, 0.01, 0.03):
            verifying = asyncio.create_task(sender.verify(timeout=10))
            await asyncio.sleep(delay)
            verifying.cancel()
            with pytest.raises(asyncio.CancelledError), Clock(0.2):
                await verifying
        assert await sender.verify(timeout=10) == {0: [], 1: [], 2: []}
        verifying = asyncio.ensure_future(sender.verify(timeout=10))
        await asyncio.sleep(0.005)
        await receivers[1].shutdown()
        found = await verifying
        assert (found[0], found[2]) == ([], [])
        assert found[1] == [] or "is lost: it has left" in found[1].reason
        verifying = asyncio.ensure_future(sender.verify(timeout=10))
        await asyncio.sleep(0.005)
        await sender.shutdown()
        with pytest.raises(ClosedError), Clock(0.5):
            await verifying


async def test_one_call_waits_for_another_within_its_timeout(api: Api) -> None:
    async with api.crew(1) as (sender, receivers, _):
        with held(receivers[0]):
            await sender.publish(Model(1))
            first = asyncio.ensure_future(sender.verify(timeout=3))
            await asyncio.sleep(0.1)
            with pytest.raises(AckTimeout, match="another verify"):
                await sender.verify(timeout=0.1)
            second = asyncio.ensure_future(sender.verify(timeout=10))
        assert [await first, await second] == [{0: []}, {0: []}]
