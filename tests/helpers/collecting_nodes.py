"""Programs with collectors whose workers are nodes: each runs many cases with few collectors, as nodes take long to
start, and returns what it has seen."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from asyncsync import sync
from asyncsync.collectors import Collector, Evaluator, distributed
from helpers.collecting_multi import acted, make, policy
from helpers.collecting_weights import rooted
from helpers.programs import RAY, cluster, gone_within

Makes = Callable[..., Any]

MANY = 1 << 21
"""Weights that take more than one message."""


def _prepare() -> None:
    """Nodes' programs find what is here. They are forked off one process that has imported what takes seconds."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    multiprocessing.set_start_method("forkserver", force=True)


def _pids(collector: Any) -> list[int]:
    return [int(name.split()[1]) for _, name in sorted(collector._nodes.node_names.items())]


def _killed_during(pid: int, work: Callable[[], Any]) -> tuple[str, str, float]:
    """What is raised when this process is killed in the midst of some work, and how many seconds later."""
    os.kill(pid, signal.SIGSTOP)  # so it does not come to the end of that before
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        time.sleep(0.3)
        assert not working.done()
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        error = working.exception(60)
        return type(error).__name__, str(error), time.monotonic() - begun


def asynchronous(makes: Makes) -> dict[str, Any]:
    """Batches of one node each, by both kinds of loops, with updates after each of them."""
    source = policy(1.0)
    collector = makes([make()] * 2, source, frames_per_batch=6, total_frames=48, update_after_each_batch=True)
    pids = _pids(collector)
    scheme = collector._sender_schemes["policy"]
    address = scheme._bus.endpoint, scheme.shared_transport.backend
    sizes, values, nodes = [], [], []

    def note(batch: Any) -> None:
        sizes.append(list(batch.batch_size))
        values.append(acted(batch))
        nodes.append(sorted({int(i) % 2 for i in batch["collector", "traj_ids"].flatten().tolist()}))
        source.module.fill(len(sizes) + 1.0)

    for batch in collector:
        note(batch)
        if len(sizes) == 4:
            break

    async def others() -> None:
        async for batch in collector:
            note(batch)

    asyncio.run(others())
    collector.shutdown()
    own = {"scheme": type(scheme).__name__, "address": address}
    return {"sizes": sizes, "values": values, "nodes": nodes, "gone": gone_within(pids, 15), **own}


def synchronous(makes: Makes) -> dict[str, Any]:
    """Batches of all nodes, everything that can be asked of a collector, and a node that is killed."""
    source = policy(1.0)
    collector = makes([make()] * 2, source, frames_per_batch=6, sync=True, max_weight_update_interval=2)
    pids = _pids(collector)
    found: dict[str, Any] = {"values": []}
    for step in range(5):
        batch = collector.next()
        found["values"].append(acted(batch))
        source.module.fill(step + 2.0)
    found["shape"] = list(batch.batch_size)
    collector.update_policy_weights_(policy(9.0))
    found["updated"] = acted(collector.next())
    found["version"] = sorted(set(collector.next()["collector", "policy_version"].flatten().tolist()))
    found["policy_version"] = collector.policy_version
    collector.set_seed(7)
    found["seeds"] = sorted(set(collector.next()["observation"][..., 0].flatten().tolist()))
    found["lengths"] = collector.get_distant_attr("env.length")
    found["executed"] = collector.map_fn("env.set_seed", [[1], [2]])
    state = collector.state_dict()
    found["frames"] = (state["frames"], sorted(k for k in state if k.startswith("worker")))
    collector.load_state_dict(state)
    with collector.pause():
        found["paused"] = collector.stats(workers="per_worker")["worker_1/frames"]
    with ThreadPoolExecutor(1) as pool:
        with collector.pause():
            waiting = pool.submit(collector.next)
            time.sleep(0.3)
            found["waited"] = not waiting.done()
        found["went on"] = list(waiting.result(30).batch_size)
    try:
        collector.start()
    except NotImplementedError as error:
        found["start"] = str(error)
    found["lost"] = _killed_during(pids[1], collector.next)
    found["closed"], found["pid"], found["gone"] = collector.closed, pids[1], gone_within(pids, 15)
    return found


def updating(makes: Makes) -> dict[str, Any]:
    """A node that is killed in the midst of an update, of weights that are many. With restarts, it comes again."""
    source = policy(2.0, MANY)
    with makes([make()] * 2, source, frames_per_batch=6, sync=True) as collector:
        pids = _pids(collector)
        collector.next()
        source.module.fill(6.0)
        lost = _killed_during(pids[1], collector.update_policy_weights_)
        found = {"lost": lost, "pid": pids[1], "again": None}
        if collector._nodes.restarts:
            found["again"] = acted(collector.next())
    return found | {"gone": gone_within([*pids, *_pids(collector)], 15)}


def going_on(makes: Makes) -> dict[bool, Any]:
    """A node that is killed while weights are sent after each batch, until it has come again."""
    found: dict[bool, Any] = {}
    for is_sync in (False, True):
        source = policy(1.0)
        given = {"frames_per_batch": 4, "sync": is_sync, "update_after_each_batch": True}
        with makes([make(delay=0.005)] * 2, source, **given) as collector:
            numbers = collector.next()["collector", "traj_ids"].flatten().tolist()
            collector.post_collect_hook = _note_hook
            os.kill(_pids(collector)[0], signal.SIGKILL)
            source.module.fill(2.0)
            while max(numbers) < 1 << 40:  # those of nodes that were launched once
                batch = collector.next()
                numbers = batch["collector", "traj_ids"].flatten().tolist()
            own = [number for number in numbers if number >= 1 << 40]
            hooked = bool(batch.get("hooked", torch.zeros(1)).all())
            found[is_sync] = {"hooked": hooked, "ids": {number % 2 for number in own}, "values": acted(batch)}
    return found


def _note_hook(batch: Any) -> None:
    batch["hooked"] = torch.ones(batch.batch_size)


def failing(makes: Makes) -> dict[str, Any]:
    """An environment that fails in a node, and a policy that is made there."""
    collector = makes(
        [make(), make(fail_at=9)], policy_factory=lambda: policy(3.0), frames_per_batch=4, collector_kwargs=[{}, {}]
    )
    pids, values = _pids(collector), []
    try:
        for batch in collector:
            values.append(acted(batch))
    except ValueError as error:
        return {"values": values, "error": str(error), "notes": error.__notes__, "gone": gone_within(pids, 15)}
    finally:
        collector.shutdown()
    return {}


def nested(makes: Makes) -> dict[str, Any]:
    """A node with workers of its own, and a collector that receives what it passes on."""
    above, received = rooted(policy(4.0))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(above.connect, timeout=90)
        collector = makes(
            [make()], policy(1.0), frames_per_batch=8, collector_class="sync", num_workers_per_collector=2,
            collector_kwargs={"start_method": "forkserver"}, weight_recv_schemes={"policy": received}, worker_idx=0,
        )  # fmt: skip
        connecting.result(90)
    pids = _pids(collector)
    below = [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    found: dict[str, Any] = {"first": acted(collector.next())}
    above.send(policy(5.0))
    batch = collector.next()
    found |= {"shape": list(batch.batch_size), "values": acted(collector.next())}
    found["ids"] = len({*batch["collector", "traj_ids"][:, 0].tolist()})
    collector.shutdown()
    above.shutdown()
    return found | {"gone": gone_within(pids + below, 15)}


def made_there(makes: Makes) -> dict[str, Any]:
    """Nodes with workers that make their own policies, and no scheme but one node's own."""
    given: dict[str, Any] = {"start_method": "forkserver"}
    own = given | {"weight_sync_schemes": {"policy": sync.SharedMemWeightSyncScheme()}}
    with makes(
        [make()] * 2, policy_factory=policy, frames_per_batch=8, sync=True, collector_class="sync",
        num_workers_per_collector=2, collector_kwargs=[given, own],
    ) as collector:  # fmt: skip
        found = {"first": acted(collector.next())}
        collector.update_policy_weights_(policy(5.0))
        return found | {"updated": acted(collector.next())}


CASES = (asynchronous, synchronous, updating, failing, nested, made_there)


def _trainer(kind: str, options: dict[str, Any], pipe: Any) -> None:
    with getattr(distributed, kind)([make(delay=0.01)] * 2, policy(2.0, MANY), frames_per_batch=40, **options) as own:
        acts = acted(own.next())
        pids = _pids(own)
        if pipe is None:
            return
        os.kill(pids[1], signal.SIGSTOP)  # so it does not come to the end of the update
        threading.Thread(target=own.update_policy_weights_, daemon=True).start()
        time.sleep(0.3)
        pipe.send((acts, pids))
        time.sleep(60)


def killed_trainer(kind: str) -> dict[str, Any]:
    """Of a trainer that is killed while one node rolls out and the other is sent weights: whether the nodes end by
    themselves. Then the same program again, on the same port."""
    _prepare()
    if kind != "RayCollector":
        return _killed_trainer(kind, {"launcher": "mp", "tcp_port": 29873})
    with cluster() as ray:
        address = ray.get_runtime_context().gcs_address
        found = _killed_trainer(kind, {"ray_init_config": {"address": address, "log_to_driver": False}})
        return found | {"all gone": found["all gone"] and not ray.util.list_named_actors()}


def _killed_trainer(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    here, there = multiprocessing.Pipe()
    trainer = multiprocessing.Process(target=_trainer, args=(kind, options, there))
    trainer.start()
    acts, pids = here.recv() if here.poll(100) else (None, [])
    below = [child.pid for child in psutil.Process(trainer.pid).children(recursive=True)]
    trainer.kill()
    trainer.join()
    os.kill(pids[1], signal.SIGCONT)
    found = {"acts": acts, "gone": len(pids) == 2 and gone_within(pids, 15), "all gone": gone_within(below, 15)}
    again = multiprocessing.Process(target=_trainer, args=(kind, options, None))
    again.start()
    again.join(100)
    return found | {"again": again.exitcode}


def _all_of(makes: Makes) -> dict[str, Any]:
    return {case.__name__: case(makes) for case in CASES}


def by_rpc() -> dict[str, Any]:
    _prepare()
    options = {"num_worker_threads": 4, "_transports": ["uv"]}
    makes = partial(distributed.RPCCollector, launcher="mp", tensorpipe_options=options, tcp_port="29871")
    source, found = policy(2.0), {}
    # The first, as torch binds RRefs to a process's first agent.
    updater = distributed.RPCWeightUpdater
    collector = makes([make()], source, frames_per_batch=4, visible_devices=["cpu"], weight_updater=updater)
    [reference] = collector.collector_rrefs.values()
    found["remote"] = reference.rpc_sync().cascade_execute("env.set_seed", 5)
    try:
        makes([make()], policy(2.0), frames_per_batch=4)
    except RuntimeError as error:
        found["second"] = str(error)
    found["still"] = acted(collector.next())
    source.module.fill(8.0)
    collector.update_policy_weights_()
    collector.next()
    found["pushed"] = acted(collector.next())
    collector.shutdown()
    return found | _all_of(makes)


def by_gloo() -> dict[str, Any]:
    _prepare()
    options = {"launcher": "mp", "restarts": 1}
    found = _all_of(partial(distributed.DistributedCollector, launcher="mp"))
    found["updating again"] = updating(partial(distributed.DistributedCollector, **options))
    found["going on"] = going_on(partial(distributed.DistributedCollector, **options))
    with Collector(
        [make()] * 2, policy(2.0), frames_per_batch=4, backend="distributed", sync=True, backend_options=options
    ) as collector:
        collector.next()
        return found | {"again": _again(collector)}


def _again(collector: Any) -> list[list[float]]:
    """How the policies act after a node was killed, and after an update."""
    os.kill(_pids(collector)[0], signal.SIGKILL)
    found = [acted(collector.next()) for _ in range(2)]
    collector.update_policy_weights_(policy(6.0))
    return [*found, acted(collector.next())]


def by_jobs() -> dict[str, Any]:
    """Nodes as jobs of submitit's, which are processes of this host here."""
    _prepare()
    with tempfile.TemporaryDirectory() as folder:
        options = {"slurm_kwargs": {"folder": folder, "cluster": "local", "timeout_min": 5}}
        with Collector(
            make(), policy(2.0), frames_per_batch=4, backend="submitit", backend_options=options
        ) as collector:
            return {"kind": type(collector).__name__, "values": acted(collector.next())}


def by_ranks() -> list[Any]:
    """Two ranks, as torchrun starts them: rank 0 makes a collector twice."""
    _prepare()
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29877"]
        done = subprocess.run([*command, __file__, log], capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        return Path(log).read_text().split()


def _rank(log: str) -> None:
    if os.environ["RANK"] != "0":
        for _ in range(2):
            distributed.serve_node(timeout=100)
        return
    with open(log, "w") as file:
        for value in (2.0, 3.0):
            given = {"frames_per_batch": 4, "launcher": "torchrun"}
            with distributed.DistributedCollector([make()], policy(value), **given) as collector:
                file.write(f"{acted(collector.next())[0]}\n")


class Kept:
    """A replay buffer, as an actor."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def extend(self, batch: Any) -> int:
        self.sizes.append(batch.numel())
        return len(self.sizes)

    def __len__(self) -> int:
        return sum(self.sizes)


def by_ray() -> dict[str, Any]:
    _prepare()
    with cluster():
        return _all_of(partial(distributed.RayCollector, remote_configs={"num_cpus": 0.5}))


def with_actors() -> dict[str, Any]:
    """What only Ray's nodes have: restarts, buffers that are actors, calls of the actors; and Ray's own start."""
    import ray

    _prepare()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        given: dict[str, Any] = {"ray_init_config": {**RAY, "_temp_dir": folder}, "restarts": 1}
        evaluator = Evaluator(make(), policy(1.0), num_trajectories=1, backend="ray", collector_kwargs=given)
        collector = Collector(
            make(), policy(2.0), frames_per_batch=4, num_collectors=2, backend="ray", sync=True, backend_options=given
        )
        found["kind"] = type(collector).__name__
        found["remote"] = ray.get(collector.remote_collectors[0].cascade_execute.remote("env.set_seed", 5))
        collector.next()
        found["evaluated again"] = _evaluated_again(evaluator)
        evaluator.shutdown()  # it has begun Ray, which the collector uses, too
        found["again"] = _again(collector)
        ray_is_there = ray.is_initialized()
        collector.shutdown()
        found["ray"] = (ray_is_there, ray.is_initialized())
    with cluster():
        buffer = ray.remote(num_cpus=0)(Kept).remote()
        options = {"replay_buffer": buffer, "remote_configs": [{"num_cpus": 1}, {"num_cpus": 0.5}]}
        with Collector([make()] * 2, policy(), frames_per_batch=6, total_frames=30, backend="ray",
                       backend_options=options) as collector:  # fmt: skip
            found["handed out"] = list(collector)
            found["frames"] = ray.get(buffer.__len__.remote())
        with Collector([make(delay=0.01)] * 2, policy(), frames_per_batch=6, backend="ray",
                       backend_options=options) as collector:  # fmt: skip
            collector.start()
            while ray.get(buffer.__len__.remote()) < 100:
                time.sleep(0.05)
            with collector.pause():
                still = ray.get(buffer.__len__.remote())
                time.sleep(0.3)
                found["paused"] = ray.get(buffer.__len__.remote()) == still
            found["running"] = collector.is_running()
            collector.async_shutdown()
        return found | {"evaluated": _evaluated()}


def _begin() -> None:
    os.environ["ASYNCSYNC_BEGUN"] = str(os.getpid())


def _where(_: Any) -> dict[str, int]:
    return {"begun": int(os.environ["ASYNCSYNC_BEGUN"]), "pid": os.getpid()}


def _evaluated_again(evaluator: Any) -> list[float]:
    """Evaluations that are asked for while the evaluator's actor is being launched again."""
    group = evaluator._collector.group
    os.kill(_pids(evaluator._collector)[0], signal.SIGKILL)
    while group.connected:
        time.sleep(0.001)
    return [evaluator.evaluate(policy(value), timeout=60)["eval/reward"] for value in (7.0, 8.0)]


def _evaluated() -> dict[str, Any]:
    """Evaluations by an actor, which is killed in the end; and by one that makes its own policy."""
    given: dict[str, Any] = {"backend": "ray", "num_trajectories": 3, "collector_kwargs": {"remote_configs": {}}}
    source, found = policy(1.0), {}
    with Evaluator(make(), source, init_fn=_begin, metrics_fn=_where, **given) as evaluator:
        results = [evaluator.evaluate()]
        source.module.fill(3.0)
        evaluator.trigger_eval(step=7)
        source.module.fill(4.0)
        results.append(evaluator.wait(60))
        pid = results[0]["eval/pid"]
        found["steps"] = [result["eval/step"] for result in results]
        found["rewards"] = [result["eval/reward"] for result in results]
        found["elsewhere"] = results[0]["eval/begun"] == pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        try:
            evaluator.evaluate(timeout=30)
        except Exception as error:
            found["lost"] = type(error).__name__, str(error), time.monotonic() - begun
        found["pid"] = pid
    with Evaluator(make(), policy_factory=policy, **given) as evaluator:
        found["made there"] = evaluator.evaluate(policy(5.0))["eval/reward"]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    _rank(sys.argv[1])
