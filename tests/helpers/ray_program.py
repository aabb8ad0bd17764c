"""The cases of :mod:`helpers.called_workers` with Ray's actors, and those that only Ray has, in a cluster of their
own. Those that concern the bytes are run with both backends."""

import asyncio
import contextlib
import inspect
import os
import pickle
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch

import asyncsync
import asyncsync.sync
from helpers import called_workers as called
from helpers.apis import Api, bare, in_thread
from helpers.called_workers import PROGRAM_SECONDS, Lab, Tell, Worker, cancel_waits, names, run_cases
from helpers.processes import LARGE, Filled, eventually, value_of
from helpers.programs import cluster

STORE_BYTES = 700 << 20
HOSTS = 4


class Coroutines:
    """The object of a worker with coroutines, in one case after another."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    async def connect(self, scheme: Any, index: int, numel: int) -> None:
        await self.begin(scheme, index, numel)
        await scheme.connect()

    async def begin(self, scheme: Any, index: int, numel: int) -> None:
        self.scheme, self.model, self.calls, self.received = scheme, Filled(numel, -1.0), 0, None
        scheme.init_on_receiver("policy", model=self.model, worker_idx=index)

    async def connect_again(self) -> None:
        await cancel_connects(self.scheme)
        await self.scheme.connect()

    async def _receive_weights_scheme(self) -> None:
        self.calls += 1
        self.received = await self.scheme.receive()

    async def cancel(self) -> float:
        await cancel_waits(self.scheme)
        return value_of(await self.scheme.fetch(timeout=20))

    async def state(self) -> tuple[int, float, float]:
        return self.calls, self.model.value, value_of(self.received)

    async def shutdown(self) -> None:
        await self.scheme.shutdown()


class Collector:
    """A node of a tree, as the page on RPCCollector shows it: what it calls is found by its path."""

    def __init__(self, scheme: Any) -> None:
        self.model = Filled(8, -1.0)
        scheme.init_on_receiver("policy", model=self.model)
        self._receiver_schemes = {"policy": scheme}

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> Any:
        from asyncsync.schemes.sources import follow_path

        return follow_path(self, path)(*args, **kwargs)

    def value(self) -> float:
        return self.model.value

    def shutdown(self) -> None:
        self._receiver_schemes["policy"].shutdown()


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

    def shutdown(self) -> None:
        self._weight_sync_scheme.shutdown()


class Transform:
    """What a RayModuleTransform has: the actor."""

    def __init__(self, actor: Any, scheme: Any) -> None:
        self._actor = actor
        scheme._set_transform(self)


class Host:
    """An actor that is a worker in one case after another: its process has taken seconds to import what it needs."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def is_there(self) -> bool:
        return True

    def make(self, kind: type, *args: Any, **options: Any) -> None:
        self.worker = kind(*args, **options)

    def do(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)

    def _receive_weights_scheme(self) -> None:
        self.worker._receive_weights_scheme()

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self.worker.cascade_execute(path, *args, **kwargs)

    def _init_weight_sync_scheme(self, scheme: Any, model_id: str) -> None:
        self.worker._init_weight_sync_scheme(scheme=scheme, model_id=model_id)


class RayLab(Lab):
    """With actors. Each takes seconds to import what it needs: they are started at once, and used again and again; for
    one that was killed, another is started meanwhile."""

    kind = "Ray"
    connects = True

    def __init__(self, backend: str) -> None:
        import ray

        self.ray, self.options = ray, {"backend": backend}
        self._idle = [self.actor(Host) for _ in range(HOSTS)]
        ray.get([host.is_there.remote() for host in self._idle], timeout=PROGRAM_SECONDS / 2)
        self.coroutines = self.actor(Coroutines)
        self.restart_sender = asyncsync.RayWeightSyncScheme(backend=backend)
        self.restarting = self.actor(Restarting, self.restart_sender.blocking, max_restarts=1)

    def actor(self, kind: type, *args: Any, **options: Any) -> Any:
        """One with a process of its own."""
        return self.ray.remote(kind).options(num_cpus=0, **options).remote(*args)

    def start(self, kind: type, place: int, *args: Any, **options: Any) -> Any:
        host = self._idle.pop(0)
        host.make.remote(kind, *args, **options)
        return host

    async def call(self, worker: Any, method: str, *args: Any) -> Any:
        return await self.result(worker.do.remote(method, *args))

    async def result(self, reference: Any) -> Any:
        return await asyncio.wrap_future(reference.future())

    def end(self, worker: Any, last: str = "shutdown") -> None:
        try:
            self.ray.get(worker.do.remote(last), timeout=10)
            self._idle.append(worker)
        except self.ray.exceptions.RayError:  # it was killed
            self.ray.kill(worker)
            self._idle.append(self.actor(Host))


async def cancel_connects(scheme: Any) -> None:
    """At the first await, and at some of the next, while the other end is not there yet."""
    for seconds in (0.0, 0.002, 0.05, 0.3):
        connecting = asyncio.ensure_future(scheme.connect(timeout=50))
        await asyncio.sleep(seconds)
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting


async def a_connect_that_is_cancelled_may_be_called_again(lab: RayLab, api: Api) -> None:
    sender, model, actor = api.scheme(**lab.options), Filled(8, 1.0), lab.coroutines
    there = pickle.loads(pickle.dumps(sender))
    sender.init_on_sender(model_id="policy", model=model, remotes=[actor])
    await lab.result(actor.begin.remote(there, 0, 8))
    connecting = asyncio.ensure_future(sender.connect())
    await eventually(lambda: sender._place is not None and sender._place.actor is not None)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    lab.ray.kill(sender._place.actor)  # by somebody else, while it starts
    with pytest.raises(asyncsync.NotConnected, match="has ended; connect"):
        await sender.connect()
    await cancel_connects(sender)
    connecting = asyncio.ensure_future(sender.connect())
    await eventually(lambda: sender._place.is_hosted, 40)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    lab.ray.kill(sender._place.actor)  # and while it is asked
    await eventually(lambda: not sender._place.is_hosted)
    connecting = lab.result(actor.connect_again.remote())
    await asyncio.gather(sender.connect(), connecting)
    await sender.send_async(model.fill(2.0))
    assert await lab.result(actor.state.remote()) == (1, 2.0, 2.0)
    await sender.shutdown()
    await lab.result(actor.shutdown.remote())


async def coroutines_receive_in_an_actors_loop(lab: RayLab, api: Api) -> None:
    sender, model = api.scheme(**lab.options), Filled(8, 1.0)
    there = bare(sender).aio
    actor = lab.coroutines
    sender.init_on_sender(model_id="policy", model=model, remotes=[actor])
    await asyncio.gather(sender.connect(), lab.result(actor.connect.remote(there, 0, 8)))
    await sender.send_async(model.fill(2.0))
    assert await lab.result(actor.state.remote()) == (1, 2.0, 2.0)
    assert await lab.result(actor.cancel.remote()) == 2.0
    await sender.send_async(model.fill(3.0))
    assert await lab.result(actor.state.remote()) == (2, 3.0, 3.0)
    await sender.shutdown()
    await lab.result(actor.shutdown.remote())


async def the_page_of_rpc_collector_connects_a_receiver(lab: RayLab, api: Api) -> None:
    sender, model = api.scheme(**lab.options), Filled(8, 1.0)
    collector = lab.start(Collector, 0, bare(sender).blocking)
    sender.init_on_sender(model_id="policy", model=model, remotes=[collector])
    connection_info_ref = lab.ray.put(sender.connection_info)
    there = collector.cascade_execute.remote(
        "_receiver_schemes['policy']._set_dist_connection_info", connection_info_ref, worker_idx=0
    )
    await sender.connect()
    await lab.result(there)
    assert await lab.call(collector, "value") == 1.0
    await sender.shutdown()
    lab.end(collector)


async def only_the_sender_of_a_transform_connects(lab: RayLab, api: Api) -> None:
    for numel in (8, LARGE):
        scheme, model = api.make(api.RayModuleTransformScheme, **lab.options), Filled(numel, 1.0)
        actor = lab.start(ModuleTransform, 0, numel)
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


async def a_collector_updates_torchrls_transform(lab: RayLab, api: Api) -> None:
    """The scheme is handed to the transform, and then to the collector, as TorchRL's page does it."""
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.envs import GymEnv, TransformedEnv
    from torchrl.envs.transforms.module import RayModuleTransform

    from asyncsync.collectors import Collector

    def times(value: float) -> TensorDictModule:
        linear = nn.Linear(4, 4, bias=False)
        nn.init.constant_(linear.weight, value)
        return TensorDictModule(linear, in_keys=["observation"], out_keys=["observation"])

    def collect() -> list[bool]:
        scheme = api.RayModuleTransformScheme(**lab.options)
        transform = RayModuleTransform(module=times(1.0), weight_sync_scheme=scheme, num_cpus=0)
        env, schemes = TransformedEnv(GymEnv("CartPole-v1"), transform), {"transform_module": scheme}
        with Collector(env, None, frames_per_batch=4, weight_sync_schemes=schemes) as collector:
            shown = []
            for value in (0.0, 1.0):
                collector.update_policy_weights_(times(value), model_id="transform_module")
                collector.next()  # its first observation was there before
                shown.append(bool(collector.next()["observation"].any()))
            with pytest.raises(ValueError, match="has no model 'transform_module'"):
                collector.update_policy_weights_(model_id="transform_module")
        lab.ray.kill(transform._actor)
        return shown

    assert await in_thread(collect) == [False, True]


async def a_collector_may_be_an_actor(lab: RayLab, api: Api) -> None:
    from asyncsync.collectors import Collector, MultiSyncCollector, distributed
    from helpers.collecting_multi import acted, make, policy

    for kind in (
        MultiSyncCollector,
        distributed.RPCCollector,
        distributed.DistributedCollector,
        distributed.RayCollector,
    ):
        lab.ray.remote(kind)
    actor = lab.ray.remote(num_cpus=0)(Collector).remote(make(), policy(2.0), frames_per_batch=6)
    assert acted(await lab.result(actor.next.remote())) == [2.0]
    await lab.result(actor.update_policy_weights_.remote(policy(3.0)))
    assert acted(await lab.result(actor.next.remote())) == [3.0]
    await lab.result(actor.shutdown.remote())
    lab.ray.kill(actor)


async def a_restarted_actor_finds_its_target(lab: RayLab, api: Api) -> None:
    sender, model, actor = lab.restart_sender, Filled(8, 1.0), lab.restarting
    sender.init_on_sender(model_id="policy", model=model, remotes=[actor])
    await sender.connect()
    await sender.send_async(model.fill(2.0))
    os.kill((await lab.result(actor.state.remote()))["pid"], 9)
    with pytest.raises(asyncsync.PartialSendError) as caught:
        await sender.send_async(model.fill(3.0))
    assert isinstance(caught.value.failed[0], asyncsync.PeerLost)
    await eventually(lambda: sender.status()[0].state == "live", 30)
    await sender.send_async(model.fill(4.0))
    assert (await lab.result(actor.state.remote()))["value"] == 4.0
    await sender.shutdown()
    lab.ray.kill(actor)


class Restarting(Worker):
    """Connects when it is made, and made again."""

    def __init__(self, scheme: Any) -> None:
        super().__init__(scheme, 0, 8)
        self.scheme.connect(timeout=PROGRAM_SECONDS)  # its case comes late


async def elastic_actors_come_and_go(lab: RayLab, api: Api) -> None:
    sender, model = api.scheme(**lab.options), Filled(8, 1.0)
    blocking = bare(sender).blocking
    first = lab.start(Worker, 0, blocking, 0, 8)
    sender.init_on_sender(model_id="policy", model=model, remotes={0: first})
    await asyncio.gather(sender.connect(), lab.call(first, "connect"))
    lab.ray.kill(lab.ray.get_actor(sender.connection_info_name), no_restart=False)  # it comes again
    sender.remotes[3000] = second = lab.start(Worker, 1, blocking, 3000, 8)  # indices need not be used again
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


async def a_shutdown_ends_a_connect_that_waits(lab: RayLab, api: Api) -> None:
    receiver = api.scheme(**lab.options)
    receiver.init_on_receiver("policy", model=Filled(8, 0.0), worker_idx=0)
    connecting = asyncio.create_task(receiver.connect(timeout=50))
    await eventually(lambda: any(thread.name == "asyncsync-meeting" for thread in threading.enumerate()))
    begin = time.monotonic()
    await receiver.shutdown()
    with pytest.raises(asyncsync.ClosedError):
        await connecting
    assert time.monotonic() - begin < 2


async def nothing_stays_in_the_store(lab: RayLab, api: Api) -> None:
    """More weights than the store has room for; then no object is referred to."""
    async with lab.crew(api, 48 << 18) as crew:  # 48 MiB
        for value in range(2, 20):
            await crew.send(value)
        assert await crew.states("value") == [19.0, 19.0]
    core = lab.ray._private.worker.global_worker.core_worker
    await eventually(lambda: not core.get_all_reference_counts(), why=core.get_all_reference_counts)


def sundry(value: float) -> dict[str, torch.Tensor]:
    """Tensors of all kinds, enough to be packed in the store: some are more than the bytes in their memory."""
    big = torch.full((3 << 18,), value)
    grown = torch.arange(6.0).reshape(2, 3) + value
    return {
        "big": big,
        "empty": torch.empty(0, 3),
        "half": big[:1000].to(torch.bfloat16),
        "turned": grown.t(),
        "every_second": big[: 1 << 19 : 2] * 3,
        "conjugate": torch.complex(grown, -grown).conj(),
        "expanded": torch.tensor([value]).expand(5),
        "scalar": torch.tensor(int(value)),
        "tied": big,
        "more": torch.full((1 << 19,), -value, requires_grad=True),
    }


class Taker:
    """Receives weights for no model, and compares them with what they should be."""

    def __init__(self, scheme: Any) -> None:
        self.scheme = scheme
        scheme.init_on_receiver("policy", worker_idx=0)

    def connect(self) -> None:
        self.scheme.connect(timeout=PROGRAM_SECONDS)

    def _receive_weights_scheme(self) -> None:
        pass

    def differences(self, value: float) -> list[str]:
        found, expected = self.scheme.receive(timeout=20), sundry(value)
        assert set(found.keys()) == set(expected)
        return [n for n, t in expected.items() if found[n].dtype is not t.dtype or not torch.equal(found[n], t)]

    def shutdown(self) -> None:
        self.scheme.shutdown()


async def tensors_of_all_kinds_go_through_the_store(lab: RayLab, api: Api) -> None:
    sender = api.scheme(**lab.options)
    actor = lab.start(Taker, 0, bare(sender).blocking)
    sender.init_on_sender(model_id="policy", weights=sundry(1.0), remotes=[actor])
    await asyncio.gather(sender.connect(), lab.call(actor, "connect"))
    for value in (2.0, 3.0):
        await sender.publish(sundry(value))
        assert await lab.call(actor, "differences", value) == []
    await sender.shutdown()
    lab.end(actor)


BOTH_APIS = (
    *called.CASES,
    coroutines_receive_in_an_actors_loop,
    the_page_of_rpc_collector_connects_a_receiver,
    only_the_sender_of_a_transform_connects,
    elastic_actors_come_and_go,
    a_shutdown_ends_a_connect_that_waits,
)
ONCE = (
    *called.ONCE,
    (a_connect_that_is_cancelled_may_be_called_again, asyncsync),
    (a_restarted_actor_finds_its_target, asyncsync),
    (a_collector_updates_torchrls_transform, asyncsync.sync),
    (a_collector_may_be_an_actor, asyncsync.sync),
    (nothing_stays_in_the_store, asyncsync),
    (tensors_of_all_kinds_go_through_the_store, asyncsync),
    (called.a_killed_worker_is_named_and_the_others_go_on, asyncsync.sync),
    (called.a_worker_killed_amid_a_transfer_is_named_at_once, asyncsync),
    (called.a_trainer_killed_amid_a_transfer_is_noticed, asyncsync.sync),
)
# With gloo:
BOTH_APIS_OF_GLOO = (
    called.sends_call_each_worker,
    called.of_many_publications_the_newest_is_applied,
)
ONCE_OF_GLOO = (
    (called.no_forward_is_torn_while_updates_apply_as_they_come, asyncsync),
    (only_the_sender_of_a_transform_connects, asyncsync.sync),
    (called.a_worker_killed_amid_a_transfer_is_named_at_once, asyncsync),
    (called.a_trainer_killed_amid_a_transfer_is_noticed, asyncsync.sync),
)
NAMES = [*names(BOTH_APIS, ONCE), *(f"gloo {name}" for name in names(BOTH_APIS_OF_GLOO, ONCE_OF_GLOO))]


def actor_classes() -> int:
    """Of how many schemes' classes `ray.remote` makes an actor's. (Ray adds a parameter to their methods' signatures,
    so this has a program of its own.)"""
    import ray

    count = 0
    for package in (asyncsync, asyncsync.sync):
        for name in package.__all__:
            kind = getattr(package, name)
            if name.endswith(("Scheme", "Transform")) and inspect.isclass(kind) and not inspect.isabstract(kind):
                assert "strategy" in inspect.signature(kind).parameters, name
                assert callable(ray.remote(kind).remote)
                count += 1
    return count


def run_with_ray(tell: Tell) -> None:
    """All cases."""
    warnings.simplefilter("ignore")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with cluster("r-", num_cpus=2, object_store_memory=STORE_BYTES):
        lab = RayLab("object_store")
        run_cases(lab, BOTH_APIS, ONCE, tell)
        lab.options = {"backend": "gloo"}
        run_cases(lab, BOTH_APIS_OF_GLOO, ONCE_OF_GLOO, lambda name, *rest: tell(f"gloo {name}", *rest))
