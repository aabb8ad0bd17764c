"""Programs that hand this library's blocking schemes to TorchRL's collectors; run by ``collecting_torchrl.Programs``.

Their policy writes the sum of its weights into every frame, so a batch shows with which weights it was collected.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync import PartialSendError, sync
from helpers.collecting_torchrl import make_env


class Showing(nn.Module):
    """Goes where the pole leans to, and shows its weights, and in which process it does."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.lean = nn.Parameter(torch.tensor([0.0, 0.1, 1.0, 0.5]))
        self.weight = nn.Parameter(torch.full((4,), value))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        action = ((observation * self.lean).sum(-1) > 0).long()
        shape = observation.shape[:-1]
        return action, self.total().expand(shape), torch.full(shape, os.getpid())

    def total(self) -> torch.Tensor:
        return self.weight.detach().sum()

    def read(self) -> float:
        return float(self.total())

    @torch.no_grad()
    def fill(self, value: float) -> None:
        self.weight.fill_(value)


def policy_of(value: float = 0.0) -> TensorDictModule:
    return TensorDictModule(Showing(value), in_keys=["observation"], out_keys=["action", "shown", "process"])


def weights_of(value: float) -> TensorDict:
    return TensorDict.from_module(policy_of(value)).data


def shown(batch: Any) -> list[float]:
    """The sums of weights with which a batch was collected."""
    return sorted(set(batch["shown"].flatten().tolist()))


def collector_of(kind: str, **options: Any) -> Any:
    """One of TorchRL's collectors of two workers in CartPole, with 40 frames a batch."""
    import torchrl.collectors

    options = {"create_env_fn": [make_env] * 2, "frames_per_batch": 40, "total_frames": 240, **options}
    return getattr(torchrl.collectors, kind)(**options)


@contextmanager
def collecting(name: str, kind: str = "MultiSyncCollector", scheme: Any = None, **options: Any) -> Iterator[Any]:
    """The same with a scheme of this name, or this scheme, and ended with the block."""
    scheme = getattr(sync, name)() if scheme is None else scheme
    collector = collector_of(kind, **{"weight_sync_schemes": {"policy": scheme}, **options})
    yield collector, scheme
    collector.shutdown()


def sums(collector: Any) -> list[float]:
    """The sum of weights of each worker; a MultiAsyncCollector's would lose their batches over the question."""
    return collector.map_fn("policy.module.read")


def begun(batches: list[int], batch: Any) -> int:
    """Of a MultiAsyncCollector: in answer to which of its batches a worker has begun this one, the next of them.
    ``batches`` has the workers of those before, and gets this one's."""
    [worker] = set(batch["process"].flatten().tolist())
    batches.append(worker)
    return max((i for i, other in enumerate(batches[:-1]) if other == worker), default=0)


def applied(scheme: Any) -> set[int]:
    """The versions that the workers have."""
    return {status.version for status in scheme.status().values()}


# -- programs: each returns what the test looks at


def trained(name: str, kind: str) -> list[dict[str, Any]]:
    """Train for 240 frames. Of each batch: what its frames show, and what the workers have after the update that
    follows it, the n-th of which sets all four weights to n."""
    policy, found, batches = policy_of(), [], []
    with collecting(name, kind, policy=policy) as (collector, scheme):
        for i, batch in enumerate(collector):
            policy.module.fill(i + 1.0)
            collector.update_policy_weights_()
            found.append({"shown": shown(batch), "lag": scheme.version - min(applied(scheme))})
            if kind == "MultiSyncCollector":
                found[-1]["workers"] = sums(collector)
            else:
                found[-1]["begun"] = begun(batches, batch)
    return found


def page(library: str, name: str, is_sync: bool, frames: int) -> tuple[int, list[tuple[int, ...]], bool]:
    """The collector example of TorchRL's page with TorchRL's GymEnv, and the MultiCollector of ``torchrl`` or of
    ``asyncsync``: frames, shapes of batches, and whether each update was everywhere."""
    from torchrl.envs import GymEnv

    MultiCollector = import_module(f"{library}.collectors").MultiCollector
    env = GymEnv("CartPole-v1")
    policy = TensorDictModule(
        nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]),
        in_keys=["observation"],
        out_keys=["action"],
    )
    scheme = getattr(sync, name)(strategy="tensordict")
    collector = MultiCollector(
        sync=is_sync,
        create_env_fn=[lambda: GymEnv("CartPole-v1")] * 3,
        policy=policy,
        frames_per_batch=192,
        total_frames=frames,
        weight_sync_schemes={"policy": scheme},
        **({"start_method": "forkserver"} if library == "asyncsync" else {}),  # TorchRL's takes the program's
    )
    found, shapes, everywhere = 0, set(), True
    for i, data in enumerate(collector):
        found += data.numel()
        shapes.add(tuple(data.shape))
        if i % 10 == 0:
            collector.update_policy_weights_()
            collector.update_policy_weights_(policy)
            collector.update_policy_weights_(TensorDict.from_module(policy).data)
            collector.update_policy_weights_(policy=policy)
            collector.update_policy_weights_(weights=TensorDict.from_module(policy).data, model_id="policy")
            everywhere &= applied(scheme) == {scheme.version}
    collector.shutdown()
    return found, sorted(shapes), everywhere


def pages(library: str, is_sync: bool, frames: dict[str, int]) -> dict[str, Any]:
    """:func:`page` for the frames of each scheme."""
    return {name: page(library, name, is_sync, count) for name, count in frames.items()}


def distinct(name: str) -> list[tuple[Any, ...]]:
    """Each worker has a policy factory of its own, and weights of its own in each update."""
    found: list[tuple[Any, ...]] = []
    updates: list[dict[str, Any]] = [
        {"policy_or_weights": {0: weights_of(10.0), 1: weights_of(20.0)}},
        {"policy_or_weights": {1: weights_of(30.0)}, "worker_ids": [1]},
        {"policy_or_weights": weights_of(40.0), "worker_ids": 0},
        {"policy_or_weights": policy_of(50.0)},
        {},
    ]
    with collecting(name, policy_factory=[lambda: policy_of(1.0), lambda: policy_of(2.0)]) as (collector, _):
        for batch, update in zip(collector, updates, strict=False):
            before = shown(batch)
            try:
                collector.update_policy_weights_(**update)
                found.append((before, sums(collector)))
            except ValueError as error:
                found.append((before, str(error)))
    return found


def alike(name: str) -> tuple[list[float], list[float], list[float]]:
    """One factory for all workers, of a class that cannot be pickled: what the workers begin with, by themselves and
    in the first batch, and what they have after an update."""

    class Local(Showing):
        def __init__(self) -> None:
            super().__init__(float(torch.rand(())))

    def factory() -> TensorDictModule:
        torch.manual_seed(os.getpid())  # or all of them make the same
        return TensorDictModule(Local(), in_keys=["observation"], out_keys=["action", "shown", "process"])

    with collecting(name, policy_factory=factory) as (collector, _):
        begin, first = sums(collector), shown(next(iter(collector)))
        collector.update_policy_weights_(policy_of(3.0))
        return begin, first, sums(collector)


def beside(name: str) -> tuple[list[float], list[float], list[float]]:
    """A policy beside a policy factory is what is sent, and does not go to the workers itself."""
    policy = policy_of(5.0)
    with collecting(name, policy=policy, policy_factory=policy_of) as (collector, _):
        begin = sums(collector)
        policy.module.fill(6.0)
        unsent = sums(collector)
        collector.update_policy_weights_()
        return begin, unsent, sums(collector)


def initialised(name: str, each: bool) -> list[list[float]]:
    """A sender that was initialised before the collector: with weights for all, or for each worker its own."""
    scheme = getattr(sync, name)()
    if each:
        scheme.init_on_sender(model_id="policy", params_map={0: weights_of(1.0), 1: weights_of(2.0)})
    else:
        scheme.init_on_sender(model_id="policy", weights=weights_of(3.0), devices=[torch.device("cpu")] * 2)
    with collecting(name, scheme=scheme, policy_factory=policy_of) as (collector, _):
        first = sums(collector)
        collector.update_policy_weights_(policy_of(4.0))
        return [first, sums(collector)]


def unmoved() -> tuple[list[list[float]], int]:
    """A scheme that moves nothing: what the frames show, and its version."""
    found = []
    with collecting("NoWeightSyncScheme", policy_factory=lambda: policy_of(1.0)) as (collector, scheme):
        for batch in collector:
            found.append(shown(batch))
            collector.update_policy_weights_()
    return found, scheme.version


def cast(name: str) -> list[tuple[list[float], list[float]]]:
    """A policy that TorchRL copies to another device, in its workers: ``cpu:0``, which torch tells from ``cpu``."""
    policy, found = policy_of(1.0), []
    with collecting(name, policy=policy, policy_factory=policy_of, policy_device="cpu:0") as (collector, _):
        for i, batch in zip(range(4), collector, strict=False):
            policy.module.fill(i + 2.0)
            collector.update_policy_weights_()
            found.append((shown(batch), sums(collector)))
    return found


def versions(name: str, kind: str) -> dict[str, Any]:
    """Policy versions in the frames, and restored from a state dict."""
    found: dict[str, Any] = {"seen": [], "begun": []}
    batches: list[int] = []
    with collecting(name, kind, policy=policy_of(), track_policy_version=True) as (collector, _):
        for batch in collector:
            found["seen"].append(sorted(set(map(int, batch["next", "policy_version"].flatten().tolist()))))
            if kind == "MultiAsyncCollector":
                found["begun"].append(begun(batches, batch))
            collector.update_policy_weights_()
            collector.increment_version()
        found["trainer"] = int(collector.policy_version)
        if kind == "MultiSyncCollector":
            state = collector.state_dict()
            collector.increment_version()
            collector.load_state_dict(state)
            found["restored"] = int(collector.policy_version)
            found["workers"] = [int(version) for version in collector.get_distant_attr("policy_version")]
    return found


def started(names: list[str]) -> dict[str, Any]:
    """start() with each scheme: updates before it, while workers roll out, and between two pauses."""
    return {name: _started(name) for name in names}


def _started(name: str) -> dict[str, Any]:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    policy = policy_of(1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=16, shared=True)
    scheme = getattr(sync, name)()
    collector = collector_of(
        "MultiAsyncCollector",
        policy=policy,
        replay_buffer=buffer,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
    )
    policy.module.fill(2.0)
    collector.update_policy_weights_()
    collector.start()
    found: dict[str, Any] = {"first": _awaited(buffer, 8.0)}
    for value in range(3, 8):
        policy.module.fill(float(value))
        collector.update_policy_weights_()
        assert applied(scheme) == {scheme.version}
    found["last"] = _awaited(buffer, 28.0)
    found["all"] = shown(buffer[:])
    collector.async_shutdown()
    return found


def _awaited(buffer: Any, value: float) -> float:
    deadline = time.monotonic() + 30
    while not len(buffer) or value not in shown(buffer[:]):
        assert time.monotonic() < deadline, f"no frame shows {value}"
        time.sleep(0.02)
    return value


def two_models(name: str) -> list[tuple[list[float], list[float]]]:
    """A model beside the policy, by its path, with a scheme of its own."""
    policy, found = policy_of(1.0), []
    policy.other = Showing(1.0)
    schemes = {model_id: getattr(sync, name)() for model_id in ("policy", "policy.other")}
    with collecting(name, policy=policy, weight_sync_schemes=schemes) as (collector, _):
        for i, _ in zip(range(3), collector, strict=False):
            other = TensorDict.from_module(Showing(i + 2.0)).data
            collector.update_policy_weights_(weights_dict={"policy.other": other})
            found.append((sums(collector), collector.map_fn("policy.other.read")))
    return found


def evaluated(name: str) -> list[list[float]]:
    """TorchRL's Evaluator with a process of its own: what its frames show, with the weights that it was given."""
    from torchrl.collectors import Evaluator

    found = []
    evaluator = Evaluator(
        make_env,
        policy_factory=policy_of,
        num_trajectories=2,
        max_steps=20,
        backend="process",
        weight_sync_schemes={"policy": getattr(sync, name)()},
        metrics_fn=lambda batch: {"shown": float(batch["shown"].flatten()[0])},
    )
    for value in (1.0, 2.0, 3.0):
        result = evaluator.evaluate(weights=policy_of(value))
        found.append([v for k, v in result.items() if "shown" in str(k)])
    evaluator.shutdown()
    return found


def served(name: str) -> list[tuple[float, int]]:
    """TorchRL's inference server in a process of its own: its answers, and their versions."""
    from torchrl.modules.inference_server import MPTransport, ProcessInferenceServer

    source = policy_of(1.0)
    found = []
    with getattr(sync, name)() as scheme:
        scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
        transport = MPTransport()
        client = transport.client()
        server = ProcessInferenceServer(policy_factory=policy_of, transport=transport, weight_sync=scheme)
        server.start()
        scheme.connect()
        for update in range(3):
            answer = client(TensorDict({"observation": torch.ones(4)}))
            found.append((float(answer["shown"]), int(answer["policy_version"])))
            source.module.fill(update + 2.0)
            scheme.send()
        server.shutdown()
    return found


# -- workers that fail


def _failure(name: str, **options: Any) -> tuple[str, str]:
    """What is raised where a collector cannot begin."""
    schemes = {"policy": getattr(sync, name)()}
    try:
        collector_of("MultiSyncCollector", policy=policy_of(), weight_sync_schemes=schemes, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _broken() -> Any:
    raise FloatingPointError("this environment cannot be made")


def _killed() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def fails_to_start(name: str) -> tuple[str, str]:
    """A worker raises while it makes its environment."""
    return _failure(name, create_env_fn=[make_env, _broken])


def killed_at_start(name: str) -> tuple[str, str]:
    """A worker is killed before it is connected."""
    return _failure(name, create_env_fn=[make_env, _killed])


def mismatched(name: str) -> tuple[str, str]:
    """The workers' policies cannot take the trainer's weights."""
    return _failure(
        name, policy_factory=lambda: TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    )


def killed(name: str, kind: str) -> dict[str, Any]:
    """A worker is killed between two batches: what an update raises, and how long that takes, and what collecting
    raises then."""
    scheme = getattr(sync, name)()
    collector = collector_of(kind, policy=policy_of(), total_frames=-1, weight_sync_schemes={"policy": scheme})
    batches = iter(collector)
    next(batches)
    process = collector.procs[0]
    process.kill()
    process.join()
    found: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        collector.update_policy_weights_()
    except PartialSendError as error:
        found["update"] = {worker: type(reason).__name__ for worker, reason in error.failed.items()}
        found["acked"] = list(error.acked)
    found["seconds"] = time.monotonic() - begin
    try:
        for _ in range(20):
            next(batches)
    except Exception as error:
        found["next"] = type(error).__name__
    with suppress(Exception):
        collector.shutdown(timeout=5)
    return found
