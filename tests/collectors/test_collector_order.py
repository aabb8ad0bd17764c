"""What a collector calls on its schemes, and in which order: a stand-in does as TorchRL's collectors do.

The order is that of torchrl 0.14: `_multi_base.py` (`_run_processes`: init on the sender, start the workers, connect
"policy" first), `_base.py` (`register_scheme_receiver`: init, then connect, with `worker_idx=`), `_runner.py` (a policy
factory's receiver). As a context, a collector shows `get_model(model_id)` and, in a worker, `worker_idx`.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.apis import Api
from helpers.pairs import Model, fill, passed_on, read

TRANSFORM = "env.transform[0].module"


class Collector:
    """The parts of a collector that hold models."""

    def __init__(self, value: float) -> None:
        self.policy = Model(value)
        self.env = SimpleNamespace(transform=[SimpleNamespace(module=Model(value))])
        self.asked: list[str] = []

    def get_model(self, model_id: str) -> Any:
        self.asked.append(model_id)
        return self.policy if model_id == "policy" else None

    @property
    def read(self) -> set[float]:
        return read(self.policy) | read(self.env.transform[0].module)


class InnerCollector(Collector):
    """One worker's."""

    def __init__(self, worker_idx: int) -> None:
        super().__init__(-1)
        self.worker_idx = worker_idx

    async def register_scheme_receiver(self, schemes: dict[str, Any]) -> None:
        self.schemes = schemes
        for model_id, scheme in schemes.items():
            scheme.init_on_receiver(model_id=model_id, context=self, worker_idx=self.worker_idx)
        for scheme in schemes.values():
            await scheme.connect(worker_idx=self.worker_idx)


class MultiCollector(Collector):
    """The trainer's, with workers that get its schemes by pickle."""

    def __init__(self, value: float, num_workers: int, weight_sync_schemes: dict[str, Any]) -> None:
        super().__init__(value)
        self.schemes = weight_sync_schemes
        self.inner = [InnerCollector(i) for i in range(num_workers)]

    async def start(self) -> None:
        for model_id, scheme in self.schemes.items():
            scheme.init_on_sender(model_id=model_id, context=self)
        workers = [asyncio.create_task(i.register_scheme_receiver(passed_on(self.schemes))) for i in self.inner]
        await self.schemes["policy"].connect()
        for model_id, scheme in self.schemes.items():
            if model_id != "policy":
                await scheme.connect()
        await asyncio.gather(*workers)

    async def shutdown(self) -> None:
        for schemes in (self.schemes, *(inner.schemes for inner in self.inner)):
            for scheme in schemes.values():
                await scheme.shutdown()


@pytest.mark.requirement(5)
@pytest.mark.parametrize("models", [["policy"], ["policy", TRANSFORM]])
async def test_a_collector_that_calls_in_torchrls_order_gets_its_models_synchronised(
    api: Api, models: list[str]
) -> None:
    collector = MultiCollector(1, 2, {model_id: api.scheme(num_workers=2) for model_id in models})
    other = set() if TRANSFORM in models else {-1}
    await asyncio.wait_for(collector.start(), 20)
    try:
        assert [inner.read for inner in collector.inner] == [{1} | other] * 2, "connect brings the initial weights"
        assert set(collector.asked) == set(models), "the sender asks its context"
        fill(collector.policy, 2)
        fill(collector.env.transform[0].module, 2)
        for scheme in collector.schemes.values():
            await scheme.send_async()
        assert [inner.read for inner in collector.inner] == [{2} | other] * 2
        for inner in collector.inner:
            assert [s.context for s in inner.schemes.values()] == [inner] * len(models)
            assert [s.worker_idx for s in inner.schemes.values()] == [inner.worker_idx] * len(models)
    finally:
        await collector.shutdown()


@pytest.mark.requirement(5)
async def test_a_policy_factorys_receiver_is_initialised_with_its_model_and_without_a_context(api: Api) -> None:
    sender = api.scheme(num_workers=1)
    sender.init_on_sender(model_id="policy", context=Collector(3))
    receiver = passed_on(sender)

    async def make_policy() -> Model:
        policy = Model()
        receiver.init_on_receiver(model=policy, model_id="policy", worker_idx=0)
        await receiver.connect(worker_idx=0)
        return policy

    async with sender, receiver:
        policy, _ = await asyncio.gather(make_policy(), sender.connect())
        assert read(policy) == {3}
