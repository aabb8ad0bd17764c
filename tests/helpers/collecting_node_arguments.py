"""Programs with collectors whose workers are nodes, for what the page on RPCCollector says of each argument and method:
one program per family, which returns what it has seen."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from asyncsync.collectors import Collector
from helpers.apis import free_port
from helpers.collecting_multi import Counting, Scaled, SharedBuffer, acted, make, policy, versions
from helpers.collecting_nodes import _prepare
from helpers.collecting_weights import rooted
from helpers.programs import cluster

Makes = Callable[..., Any]

KINDS = list(InteractionType)


class Movable(Counting):
    """An environment that has a device."""

    device = torch.device("cpu")

    def to(self, device: torch.device) -> Movable:
        self.device = torch.device(device)
        return self


class Placed(Counting):
    """An environment that knows the placement group of its actor."""

    def group(self) -> str:
        import ray

        return ray.util.get_current_placement_group().id.hex()


class Named(Collector):
    """A collector of the user's own."""

    @property
    def kind(self) -> str:
        return type(self).__name__


class Telling(nn.Module):
    """A policy whose actions tell the exploration type, and on which device it was given its observation."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        kind, device = interaction_type(), tensordict.device
        where = -1.0 if device is None or device.index is None else float(device.index)
        told = torch.tensor([-1.0 if kind is None else float(KINDS.index(kind)), where])
        return tensordict.set("action", told.expand(*tensordict.batch_size, 2).clone())


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What is raised, in one line."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def of_nodes(batch: Any) -> dict[int, Any]:
    """Rollouts of a batch of all nodes, by the node that made them."""
    return {int(part["collector", "traj_ids"].flatten()[0]) % 2: part for part in batch}


def limits(makes: Makes) -> dict[str, Any]:
    """Trajectories that end early, random frames, and what nodes may have for themselves."""
    given = {"frames_per_batch": 12, "total_frames": 60, "device": "cpu", "init_random_frames": 13, "sync": True}
    own = [{"max_frames_per_traj": 3}, {}]
    with makes([make()] * 2, policy(2.0), max_frames_per_traj=4, collector_kwargs=own, postproc=Scaled(), **given) as c:
        batches = list(c)
        found = {
            "actions": [acted(batch) for batch in batches],
            "device": str(batches[0].device),
            "scaled": [batch["scaled"].unique().tolist() for batch in batches],
            "steps": {},
        }
        for node in (0, 1):
            parts = [of_nodes(batch)[node] for batch in batches]
            found["steps"][node] = torch.cat([part["observation"][..., 2] for part in parts]).tolist()
        found["index"] = refused(lambda: c.worker_idx)
    return found


def divided(makes: Makes) -> dict[str, Any]:
    """Environments that begin anew with each batch, trajectories split, weights with each batch, devices as lists."""
    source = policy(1.0)
    devices = {
        "device": ["cpu"] * 2, "storing_device": [None, "cpu"], "env_device": ["cpu", None],
        "policy_device": ["cpu"] * 2,
    }  # fmt: skip
    given = {"frames_per_batch": 8, "sync": True, "split_trajs": True, "reset_at_each_iter": True}
    updates = {"update_after_each_batch": True, "max_weight_update_interval": 3}
    found: dict[str, Any] = {"actions": [], "shapes": [], "masks": [], "steps": []}
    with makes([make(length=3)] * 2, source, **given, **updates, **devices) as c:
        for value in (2.0, 3.0, 4.0):
            batch = c.next()
            mask = batch["collector", "mask"]
            found["actions"].append(sorted(set(batch["action"][mask].flatten().tolist())))
            found["shapes"].append(list(batch.batch_size))
            found["masks"].append(sorted(mask.sum(-1).tolist()))
            found["steps"].append(sorted(batch["observation"][mask][:, 2].tolist()))
            source.module.fill(value)
        found["devices"] = [[str(one) for one in getattr(c, name)] for name in ("storing_device", "policy_device")]
    return found


def one_by_one(makes: Makes) -> dict[str, Any]:
    """With which versions each node has made its batches; by a class of the user's own."""
    found: dict[int, list[int]] = {}
    given: dict[str, Any] = {"max_weight_update_interval": 2, "collector_class": Named}
    with makes([make()] * 2, policy(), frames_per_batch=4, total_frames=72, **given) as c:
        kinds = c.get_distant_attr("kind")
        for batch in c:
            node = int(batch["collector", "traj_ids"].flatten()[0]) % 2
            found.setdefault(node, []).append(versions(batch)[-1])
    return {"versions": found, "kinds": kinds}


def acting(makes: Makes) -> dict[str, Any]:
    """Where environments and policies are, and which exploration type is set there."""
    found: dict[str, Any] = {}
    for kind in (InteractionType.RANDOM, InteractionType.DETERMINISTIC):
        given: dict[str, Any] = {"env_device": "cpu:1", "policy_device": "cpu:2"}
        if kind is not InteractionType.RANDOM:  # which is the default
            given |= {"exploration_type": kind}
        with makes([Movable], Telling(), frames_per_batch=3, **given) as c:
            batch = c.next()
            told = batch["action"].flatten(0, -2).unique(dim=0).tolist()
            found[kind.name] = (told, str(c.get_distant_attr("env.device")[0]), str(batch.device))
    return found


def updated(makes: Makes) -> dict[str, Any]:
    """All that ``update_policy_weights_`` and ``receive_weights`` take."""
    cpu = torch.device("cpu")
    source, found = policy(1.0), {}
    given = {"frames_per_batch": 6, "sync": True, "postproc": Scaled(), "worker_idx": 0}
    with makes([make()] * 2, source, **given) as c:

        def shown() -> list[list[float]]:
            batch = c.next()
            parts = of_nodes(batch)
            return [acted(parts[0]), acted(parts[1]), batch["scaled"].unique().tolist()]

        def after(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[list[float]]:
            assert call(*args, **kwargs) is None
            return shown()

        update, receive = c.update_policy_weights_, c.receive_weights
        found["index"] = c.worker_idx
        source.module.fill(2.0)
        found["registered"] = after(update)
        found["other keywords"] = after(update, unknown=3)
        found["module"] = after(update, policy(3.0))
        found["weights_td"] = after(update, TensorDict.from_module(policy(4.0)).data)
        found["policy"] = after(update, policy=policy(5.0))
        found["policy of a model"] = after(update, policy=policy(6.0), model_id="policy")
        found["weights of a model"] = after(update, weights=policy(7.0).state_dict(), model_id="policy")
        found["another model"] = after(update, policy=Scaled(8.0), model_id="postproc")
        found["weights_dict"] = after(update, weights_dict={"policy": policy(9.0), "postproc": Scaled(10.0)})
        found["one"] = after(update, policy(11.0), worker_ids=0)
        found["list"] = after(update, policy(12.0), worker_ids=[1])
        found["device"] = after(update, policy(13.0), worker_ids=cpu)
        found["devices"] = after(update, policy(14.0), worker_ids=[cpu])
        found["each its own"] = after(update, {0: policy(15.0), 1: policy(16.0)})
        both = {"policy": policy(90.0)}
        found["refused"] = [
            refused(update, policy(90.0), policy=policy(90.0)),
            refused(update, policy(90.0), weights=policy(90.0).state_dict()),
            refused(update, policy=policy(90.0), weights=policy(90.0).state_dict()),
            refused(update, policy(90.0), weights_dict=both),
            refused(update, weights_dict=both, model_id="policy"),
            refused(update, weights_dict=both, weights=policy(90.0).state_dict()),
            refused(update, weights_dict=both, policy=policy(90.0)),
            refused(update, weights_dict=both | {"nobody": policy(90.0)}),
            refused(receive, policy(90.0), policy=policy(90.0)),
            refused(receive, policy(90.0), weights=policy(90.0).state_dict()),
            refused(receive, policy=policy(90.0), weights=policy(90.0).state_dict()),
        ]
        found["changed by none"] = shown()
        found["given a module"] = after(receive, policy(17.0))
        found["given a TensorDict"] = after(receive, TensorDict.from_module(policy(18.0)).data)
        found["given a dict"] = after(receive, policy(19.0).state_dict())
        found["given weights"] = after(receive, weights=policy(20.0).state_dict())
        found["given a policy"] = after(receive, policy=policy(21.0))
        source.module.fill(22.0)
        found["mirrored"] = after(receive)
        found["from above"] = from_above(c, shown)
    return found


def from_above(c: Any, shown: Callable[[], Any]) -> dict[str, Any]:
    """A receiver's scheme is registered with a collector that collects already."""
    above, received = rooted(policy(30.0))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(above.connect, timeout=60)
        c.register_scheme_receiver({"policy": received})
        connecting.result(60)
    found = {"registered": list(c._receiver_schemes), "at once": shown()}
    above.send(policy(31.0))
    c.receive_weights()
    found["received"] = shown()
    found["refused"] = [
        refused(c.receive_weights, policy(90.0)),
        refused(c.receive_weights, policy=policy(90.0)),
        refused(c.receive_weights, weights=policy(90.0).state_dict()),
    ]
    found["changed by none"] = shown()
    above.shutdown()
    return found


def by_updaters(makes: Makes, kind: Any) -> dict[str, Any]:
    """The family's own updater, by its class, which makes one, and as an instance."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        instance = kind(policy_weights=(source := policy(2.0)))
    found: dict[str, Any] = {"pushed": [], "warned": [str(one.message) for one in caught]}
    for given in (kind, instance):
        own, nodes = (source, 1) if given is not kind else (policy(1.0), 2)
        with makes([make()] * nodes, own, frames_per_batch=4, sync=True, weight_updater=given) as c:
            own.module.fill(3.0)
            c.update_policy_weights_()
            pushed = [acted(c.next())]
            c.update_policy_weights_(policy(4.0))
            pushed.append(acted(c.next()))
            c.update_policy_weights_(policy(5.0), worker_ids=[nodes - 1])
            parts = of_nodes(c.next())
            found["pushed"].append([*pushed, *(acted(parts[node]) for node in sorted(parts))])
            c.weight_updater.init = lambda *args, **kwargs: found.update(initialised=(args, kwargs))
            c.init_updater(1, two=3)
    return found


def at_random(makes: Makes, folder: Path) -> dict[str, Any]:
    """Without a policy, nothing is sent; and an end that does not close the environments."""
    logs = [folder / "closed", folder / "left open"]
    found: dict[str, Any] = {"closed": []}
    for log, close in zip(logs, (True, False), strict=True):
        c = makes([make(log=str(log))], frames_per_batch=4)
        found["actions"] = acted(c.next())
        found["updater"] = c.init_updater(1, two=3)
        found["worker_ids"] = refused(c.update_policy_weights_, worker_ids=0)
        c.async_shutdown(timeout=20, close_env=close)
        found["closed"].append((c.closed, "closed" in log.read_text()))
    return found


def in_the_background(makes: Makes, folder: Path) -> dict[str, Any]:
    """Into a replay buffer, until its end."""
    buffer = SharedBuffer(folder)
    c = makes([make(delay=0.001)], policy(), frames_per_batch=4, replay_buffer=buffer)
    c.start()
    deadline = time.monotonic() + 30
    while buffer.count() < 40:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with c.pause():
        before = buffer.count()
        found = {"paused": buffer.count() == before}
    running = c.is_running()
    c.async_shutdown(timeout=20, close_env=True)
    found |= {"running": running, "closed": c.closed}
    before = buffer.count()
    given: dict[str, Any] = {"frames_per_batch": 4, "total_frames": 24, "replay_buffer": buffer}
    with makes([make(), make(delay=0.01)], policy(), **given) as c:
        c.start()
        while c.is_running():
            assert time.monotonic() < deadline + 60
            time.sleep(0.01)
        return found | {"frames": (buffer.count() - before, c.stats()["frames"])}


def classes(makes: Makes) -> dict[str, Any]:
    """A node with workers of its own, that come first come, first served."""
    given: dict[str, Any] = {"collector_kwargs": {"start_method": "forkserver"}, "num_workers_per_collector": 2}
    with makes([make()], policy(2.0), frames_per_batch=4, collector_class="async", **given) as c:
        c.update_policy_weights_(policy(3.0))
        batches = [c.next() for _ in range(12)]
        ids = {int(i) % 2 for batch in batches for i in batch["collector", "traj_ids"].flatten().tolist()}
        return {"async": ([list(batches[0].batch_size)], acted(batches[-1]), ids)}


def placed() -> tuple[str, str]:
    """An actor in a placement group: which it is, and which it is to be."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from asyncsync.collectors.distributed import RayCollector

    group = placement_group([{"CPU": 1}])
    ray.get(group.ready(), timeout=30)
    config = {"num_cpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
    with RayCollector([Placed], policy(), frames_per_batch=4, remote_configs=config) as c:
        c.next()
        return c.map_fn("env.group", [[]])[0], group.id.hex()


@contextmanager
def family(name: str) -> Iterator[tuple[Makes, Any]]:
    """How a family's collectors are made here, and its updater."""
    from asyncsync.collectors import RayWeightUpdater, distributed

    if name == "by_rpc":
        options = {"num_worker_threads": 4, "_transports": ["uv"]}
        makes: Makes = partial(
            distributed.RPCCollector, launcher="mp", tensorpipe_options=options, tcp_port=str(free_port())
        )
        yield makes, distributed.RPCWeightUpdater
    elif name == "by_gloo":
        yield partial(distributed.DistributedCollector, launcher="mp"), distributed.DistributedWeightUpdater
    else:
        with cluster():
            yield partial(distributed.RayCollector, remote_configs={"num_cpus": 0.5}), RayWeightUpdater


def documented(name: str) -> dict[str, Any]:
    """All cases with one family; with Ray's, whose actors take long to start, those that differ from family to
    family."""
    _prepare()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, family(name) as (makes, updater):
        for case in (updated, one_by_one, *(() if name == "by_ray" else (limits, divided, acting, classes))):
            found[case.__name__] = case(makes)
        found["by_updaters"] = by_updaters(makes, updater)
        if name == "by_ray":
            found["placed"] = placed()
        else:
            found["at_random"] = at_random(makes, Path(folder))
        found["in_the_background"] = None if name == "by_rpc" else in_the_background(makes, Path(folder))
    return found
