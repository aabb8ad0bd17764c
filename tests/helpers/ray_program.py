"""The cases of :mod:`helpers.called_workers` with Ray's actors, and those that only Ray has, in a cluster of their
own. Those that concern the bytes are run with both backends."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import asyncsync
import asyncsync.sync
from helpers.apis import Api, in_thread
from helpers.called_workers import CASES, LARGE, Lab, Worker, run_cases
from helpers.processes import Filled, eventually, value_of

__all__ = ["WITH_GLOO", "run_with_ray"]

STORE_BYTES = 700 << 20


class Coroutines:
    """The object of a worker with coroutines."""

    def __init__(self, scheme: Any, index: int, numel: int) -> None:
        self.scheme, self.model, self.calls, self.received = scheme, Filled(numel, -1.0), 0, None
        self.index = index

    async def connect(self) -> None:
        self.scheme.init_on_receiver("policy", model=self.model, worker_idx=self.index)
        await self.scheme.connect()

    async def _receive_weights_scheme(self) -> None:
        self.calls += 1
        self.received = await self.scheme.receive()

    async def state(self) -> tuple[int, float, float]:
        return self.calls, self.model.value, value_of(self.received)


class Collector:
    """A node of a tree, as the page on RPCCollector shows it: what it calls is found by its path."""

    def __init__(self, scheme: Any) -> None:
        self.model = Filled(8, -1.0)
        scheme.init_on_receiver("policy", model=self.model)
        self._receiver_schemes = {"policy": scheme}

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> Any:
        from asyncsync.schemes.sources import follow

        return follow(self, path)(*args, **kwargs)

    def value(self) -> float:
        return self.model.value


class ModuleTransform:
    """What TorchRL's actor of a RayModuleTransform does with a scheme, word for word."""

    def __init__(self, numel: int) -> None:
        self.module = Filled(numel, -1.0)

    def _init_weight_sync_scheme(self, scheme: Any, model_id: str) -> None:
        scheme.init_on_receiver(model_id=model_id, context=self)
        scheme.connect()
        self._weight_sync_scheme = scheme

    def _receive_weights_scheme(self) -> None:
        self._weight_sync_scheme.receive()

    def value(self) -> float:
        return self.module.value


class Transform:
    """What a RayModuleTransform has: the actor."""

    def __init__(self, actor: Any, scheme: Any) -> None:
        self._actor = actor
        scheme._set_transform(self)


class RayLab(Lab):
    """With actors."""

    kind = "Ray"
    connects = True

    def __init__(self, **options: Any) -> None:
        import ray

        self.ray, self.options = ray, options

    def actor(self, kind: type, *args: Any, **options: Any) -> Any:
        return self.ray.remote(kind).options(num_cpus=0, **options).remote(*args)

    def start(self, scheme: Any, index: int, numel: int, **options: Any) -> Any:
        return self.ray.remote(Worker).options(num_cpus=0).remote(scheme, index, numel, **options)

    async def call(self, worker: Any, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(getattr(worker, method).remote(*args).future())

    def end(self, worker: Any) -> None:
        self.ray.kill(worker)


async def coroutines_receive_in_an_actors_loop(lab: RayLab, api: Api) -> None:
    sender, model = api.scheme(**lab.options), Filled(8, 1.0)
    there = getattr(sender, "bare", sender).aio
    actor = lab.actor(Coroutines, there, 0, 8)
    sender.init_on_sender(model_id="policy", model=model, remotes=[actor])
    await asyncio.gather(sender.connect(), lab.call(actor, "connect"))
    await sender.send_async(model.fill(2.0))
    assert await lab.call(actor, "state") == (1, 2.0, 2.0)
    await sender.shutdown()
    lab.end(actor)


async def the_page_of_rpc_collector_connects_a_receiver(lab: RayLab, api: Api) -> None:
    sender, model = api.scheme(**lab.options), Filled(8, 1.0)
    collector = lab.actor(Collector, getattr(sender, "bare", sender).blocking)
    sender.init_on_sender(model_id="policy", model=model, remotes=[collector])
    connection_info_ref = lab.ray.put(sender.connection_info)
    there = collector.cascade_execute.remote(
        "_receiver_schemes['policy']._set_dist_connection_info", connection_info_ref, worker_idx=0
    )
    await sender.connect()
    await asyncio.wrap_future(there.future())
    assert await lab.call(collector, "value") == 1.0
    await sender.shutdown()
    lab.end(collector)


async def only_the_sender_of_a_transform_connects(lab: RayLab, api: Api) -> None:
    for numel in (8, LARGE):
        scheme, model = api.make(api.RayModuleTransformScheme, **lab.options), Filled(numel, 1.0)
        actor = lab.actor(ModuleTransform, numel)
        Transform(actor, scheme)
        scheme.init_on_sender(model_id="transform_module", model=model)
        await scheme.connect()
        assert await lab.call(actor, "value") == 1.0
        await scheme.send_async(model.fill(2.0))
        assert await lab.call(actor, "value") == 2.0
        await scheme.shutdown()
        lab.end(actor)
    with pytest.raises(ValueError, match="which transform"):
        api.make(api.RayModuleTransformScheme).init_on_sender(model_id="transform_module")


async def torchrls_transform_is_updated(lab: RayLab, api: Api) -> None:
    """By its own class, which connects the scheme; that is a blocking one."""
    if not api.is_blocking:
        return
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.envs.transforms.module import RayModuleTransform

    def make() -> TensorDictModule:
        return TensorDictModule(nn.Linear(2, 1), in_keys=["observation"], out_keys=["seen"])

    def transform_once(weights: Any) -> RayModuleTransform:
        transform = RayModuleTransform(module=make(), weight_sync_scheme=scheme, num_cpus=0)
        scheme.send(TensorDict.from_module(weights))
        return transform

    scheme, mine = api.RayModuleTransformScheme(**lab.options), make()
    transform = await in_thread(transform_once, mine)
    data = TensorDict(observation=torch.ones(2))
    assert torch.equal(transform(data.clone())["seen"], mine(data.clone())["seen"])
    await in_thread(scheme.shutdown)
    lab.end(transform._actor)


async def a_restarted_actor_finds_its_target(lab: RayLab, api: Api) -> None:
    sender, model = api.scheme(**lab.options), Filled(8, 1.0)
    actor = lab.actor(Restarting, getattr(sender, "bare", sender).blocking, max_restarts=1)
    sender.init_on_sender(model_id="policy", model=model, remotes=[actor])
    await sender.connect()
    await sender.send_async(model.fill(2.0))
    os.kill((await lab.call(actor, "state"))["pid"], 9)
    with pytest.raises(asyncsync.PartialSendError) as caught:
        await sender.send_async(model.fill(3.0))
    assert isinstance(caught.value.failed[0], asyncsync.PeerLost)
    await eventually(lambda: sender.status()[0].state == "live", 30)
    await sender.send_async(model.fill(4.0))
    assert (await lab.call(actor, "state"))["value"] == 4.0
    await sender.shutdown()
    lab.end(actor)


class Restarting(Worker):
    """Connects when it is made, and made again."""

    def __init__(self, scheme: Any) -> None:
        super().__init__(scheme, 0, 8)
        self.connect()


async def elastic_actors_come_and_go(lab: RayLab, api: Api) -> None:
    sender, model = api.scheme(**lab.options), Filled(8, 1.0)
    blocking = getattr(sender, "bare", sender).blocking
    first = lab.start(blocking, 0, 8)
    sender.init_on_sender(model_id="policy", model=model, remotes={0: first})
    await asyncio.gather(sender.connect(), lab.call(first, "connect"))
    sender.remotes[3] = second = lab.start(blocking, 3, 8)
    await lab.call(second, "connect")
    assert (await lab.call(second, "state"))["value"] == 1.0
    await sender.send_async(model.fill(2.0))
    assert [(await lab.call(one, "state"))["value"] for one in (first, second)] == [2.0, 2.0]
    await lab.call(first, "shutdown")
    del sender.remotes[0]
    await sender.send_async(model.fill(3.0))
    assert (await lab.call(second, "state"))["value"] == 3.0
    await sender.shutdown()
    lab.end(first)
    lab.end(second)


async def nothing_stays_in_the_store(lab: RayLab, api: Api) -> None:
    """More weights than the store has room for; then no object is referred to."""
    async with lab.crew(api, 48 << 18) as crew:  # 48 MiB
        for value in range(2, 20):
            await crew.send(value)
        assert await crew.states("value") == [19.0, 19.0]
    core = lab.ray._private.worker.global_worker.core_worker
    await eventually(lambda: not core.get_all_reference_counts(), why=core.get_all_reference_counts)


class Finder:
    """Another process, which finds an object by its description."""

    def total(self, description: bytes) -> int:
        import ray

        from asyncsync.transports.ray_private import find

        return int(ray.get(find(description), timeout=20).sum())


async def a_described_object_is_found_and_not_pinned(lab: RayLab, api: Api) -> None:
    from asyncsync.transports.ray_private import describe

    core = lab.ray._private.worker.global_worker.core_worker
    before, reference = len(core.get_all_reference_counts()), lab.ray.put(np.ones(1 << 20, np.uint8))
    actor = lab.actor(Finder)
    assert await lab.call(actor, "total", describe(reference)) == 1 << 20
    lab.end(actor)
    del reference, actor
    await eventually(lambda: len(core.get_all_reference_counts()) <= before, why=core.get_all_reference_counts)


OWN = (
    a_described_object_is_found_and_not_pinned,
    coroutines_receive_in_an_actors_loop,
    the_page_of_rpc_collector_connects_a_receiver,
    only_the_sender_of_a_transform_connects,
    torchrls_transform_is_updated,
    a_restarted_actor_finds_its_target,
    elastic_actors_come_and_go,
    nothing_stays_in_the_store,
)


WITH_GLOO = (
    "sends_call_each_worker",
    "a_killed_worker_is_named_and_the_others_go_on",
    "of_many_publications_the_newest_is_applied",
    "only_the_sender_of_a_transform_connects",
)


def run_with_ray(tell: Callable[[str, str | None], None]) -> None:
    """All cases, in a cluster that leaves nothing behind."""
    warnings.simplefilter("ignore")
    import ray

    torch.set_num_threads(1)
    directory = tempfile.mkdtemp(prefix="r-", dir="/tmp")  # short: Ray makes Unix sockets there
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH")])
    )
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _temp_dir=directory,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
        )
        cases: dict[str, Any] = {**CASES, **{function.__name__: function for function in OWN}}
        run_cases(RayLab(backend="object_store"), cases, tell)
        run_cases(RayLab(), {name: cases[name] for name in WITH_GLOO}, tell, "gloo ")
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
