"""``gated=``: calls of the named methods are readers, like those of the module; ``patience=``: how long they wait."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import threading
from typing import Any

import pytest
import torch

from asyncsync import AckTimeout, sync
from helpers import planted
from helpers.apis import Api, bare, in_thread
from helpers.pairs import Clock, Model, fill, held, passed_on, read, receiver_of, until

pytestmark = pytest.mark.requirement(236)


class Policy(Model):
    """A model that others call by its methods, as Stable-Baselines3's policies are."""

    def predict(self, steps: int = 2, *, during: Any = lambda: None) -> list[set[float]]:
        """What is read, more than once."""
        return [read(self) for _ in range(steps) if during() is None]

    def deep(self, levels: int) -> set[float]:
        return self.deep(levels - 1) if levels else self()

    @torch.no_grad()
    def decorated(self) -> set[float]:
        return read(self)

    def failing(self) -> None:
        raise OSError("no")

    async def later(self) -> None:
        """Ends before its work does."""

    def one_by_one(self) -> Any:
        yield 1

    @property
    def value(self) -> int:
        return 1

    @staticmethod
    def apart() -> int:
        return 1


class Reading:
    """A thread that is in a call of a method until the block ends."""

    def __init__(self, function: Any) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: setattr(self, "found", function(during=self._during)))

    def _during(self) -> None:
        self.inside.set()
        assert self.leave.wait(30)

    def __enter__(self) -> Reading:
        self.thread.start()
        assert self.inside.wait(5)
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave.set()
        self.thread.join()


@pytest.mark.schemes("every")
async def test_a_named_method_is_a_reader_and_no_other_is(api: Api) -> None:
    model = Policy()
    gated = ["predict", "deep", "failing", "decorated"]
    async with api.crew(1, models=[model], receiver={"gated": gated}) as everybody:
        sender, (receiver,), _ = everybody
        await sender.send_async(Model(1))
        with Reading(model.predict) as reading:
            version = await sender.publish(Model(2))
            await until(lambda: planted.pending(receiver))
            assert read(model) == {1}
        await sender.wait_version(version)
        assert reading.found == [{1}, {1}], "no update came in the middle"
        assert model.predict() == [{2}, {2}]
        assert model.deep(5) == {2}, "readers may lie in one another, forward included"
        with pytest.raises(OSError, match="no"):
            model.failing()  # a call that raises has left
        assert model.decorated() == {2}
        with Reading(lambda during: Policy.predict(model, during=during)):
            await sender.send_async(Model(3))
        assert read(model) == {3}
    assert not set(gated) & vars(model).keys(), "as it was before"


async def test_copies_of_a_gated_model_are_not_gated(api: Api) -> None:
    model = Policy()
    async with api.crew(1, models=[model], receiver={"gated": ("predict",)}) as everybody:
        assert inspect.signature(model.predict) == inspect.signature(Policy(0.0).predict)
        assert model.predict.__doc__ == Policy.predict.__doc__
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps([model]))[0]):
            fill(twin, 9)
            assert twin.predict() == [{9}, {9}]
            with Reading(twin.predict):
                await everybody.sender.send_async(Model(1))
            again = pickle.loads(pickle.dumps(copy.deepcopy(twin)))
            assert again.predict() == [{9}, {9}]
        assert model.predict() == [{1}, {1}]


@pytest.mark.parametrize("first", [0, 1])
async def test_two_gates_may_count_one_method(api: Api, first: int) -> None:
    model, schemes = Policy(), []
    for name in ("one", "two"):
        sender = api.scheme()
        sender.init_on_sender(model_id=name, model=Model(1), num_workers=1)
        receiver = receiver_of(sender, 0, model, name, gated=("predict",))
        await asyncio.gather(sender.connect(timeout=10), receiver.connect(timeout=10))
        schemes.append((sender, receiver))
    (sender, receiver), (other, left) = schemes[first], schemes[1 - first]
    with Reading(model.predict):
        for one in (sender, other):
            await one.publish(Model(2))
        await until(lambda: all(planted.pending(r) for _, r in schemes))
        assert read(model) == {1}
    await receiver.shutdown()
    await sender.shutdown()
    with Reading(model.predict):
        version = await other.publish(Model(3))
        await until(lambda: planted.pending(left))
    await other.wait_version(version)
    await left.shutdown()
    await other.shutdown()
    assert "predict" not in vars(model)
    assert model.predict() == [{3}, {3}]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gated": "predict"}, TypeError, r"gated=\('predict',\)"),
        *[({"gated": (name,)}, ValueError, f"'{name}'") for name in ("act", "inner", "value", "apart", "__call__")],
        *[({"gated": (late,)}, ValueError, late) for late in ("later", "one_by_one")],
        ({"gated": (3,)}, ValueError, "3"),
        ({"gated": ("predict",), "gate": "hold"}, ValueError, "hold"),
        ({"gated": ("predict",), "apply": "on_receive"}, ValueError, "on_receive"),
        ({"gated": ("predict",), "model": None}, ValueError, "model"),
        ({"gated": ("update",), "model": {"a": torch.zeros(1)}}, ValueError, "dict"),
        ({"patience": -1}, ValueError, "timeout"),
        ({"patience": "long"}, TypeError, "timeout"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = Policy()
    scheme = sync.ZMQWeightSyncScheme()
    with pytest.raises(error, match=text):
        scheme.init_on_receiver("policy", **{"model": model, "worker_idx": 0, **options})
    assert vars(model).keys() == vars(Policy()).keys()
    scheme.init_on_receiver("policy", model=model, worker_idx=0)


@pytest.mark.schemes("some")
async def test_the_patience_of_readers_is_an_argument(api: Api) -> None:
    model = Policy()
    async with api.crew(1, models=[model], receiver={"gated": ("predict",), "patience": 0.3}) as everybody:
        sender, (receiver,), _ = everybody
        with held(receiver):
            version = await sender.publish(Model(2))
            await until(lambda: planted.pending(receiver))
            for read_it in (model.predict, model, lambda: bare(receiver).hold().__enter__()):
                with Clock(0.3), pytest.raises(AckTimeout, match=r"0\.3 s.*patience="):
                    await in_thread(lambda call=read_it: call())
        await sender.wait_version(version)
        assert model.predict() == [{2}, {2}]


def test_the_schemes_of_a_bus_share_its_patience() -> None:
    bus = sync.Bus(num_workers=1)
    schemes = passed_on([sync.ZMQWeightSyncScheme(bus=bus) for _ in range(3)])
    gate = schemes[0].bus
    schemes[0].init_on_receiver("a", model=Model(), worker_idx=0)
    assert gate.gate.patience == 30
    schemes[1].init_on_receiver("b", model=Model(), worker_idx=0, patience=5)
    assert gate.gate.patience == 5
    with pytest.raises(ValueError, match="patience"):
        schemes[2].init_on_receiver("c", model=Model(), worker_idx=0, patience=6)
    schemes[2].init_on_receiver("c", model=Model(), worker_idx=0, patience=5)
    schemes[2].init_on_receiver("c", model=Model(), worker_idx=0)
    assert gate.gate.patience == 5
