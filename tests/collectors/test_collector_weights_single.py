"""The weights of Collector itself: its own models, and what it receives while it collects."""

import asyncio
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

import asyncsync
from asyncsync import sync
from asyncsync.collectors import Collector, VanillaWeightUpdater
from helpers import planted
from helpers.collecting_single import Buffer
from helpers.collecting_weights import NET, CountsUpdates, Level, LevelEnv, below, rooted, update


def collector(**options: Any) -> Collector:
    return Collector(LevelEnv, **{"policy": Level(0), "frames_per_batch": 10, **options})


def levels(batch: Any) -> set[tuple[float, float, int]]:
    """The policy's level, the environment's, and the version, frame by frame."""
    version = batch["collector", "policy_version"]
    return set(zip(*(t.flatten().tolist() for t in (batch["action"], batch["next", "level"], version)), strict=True))


class Counting(CountsUpdates, Level):
    pass


@pytest.mark.requirement(6, 160)
@pytest.mark.parametrize("form", ["module", "state dict"])
def test_extra_state_comes_with_the_weights(form: str) -> None:
    policy, source = Counting(0), Counting(5)
    source.updates = 3
    with collector(policy=policy) as one:
        one.update_policy_weights_(source if form == "module" else source.state_dict())
        assert levels(one.next()) == {(5, -1, 1)}
        assert policy.updates == 3


class Showing(Level):
    """A policy that returns its weights themselves, not a copy."""

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("action", self.level.detach())


@pytest.mark.parametrize("destination", ["batch", "replay buffer"])
def test_a_frame_is_copied_before_the_weights_that_it_shows_change(destination: str) -> None:
    env, policy, buffer = LevelEnv(), Showing(0), Buffer()
    step_and_maybe_reset = env.step_and_maybe_reset

    def stepped(td: Any) -> Any:
        if env.steps == 2:
            thread.start()
            while not one.acting_weights.gate.pending:
                time.sleep(0.001)
        return step_and_maybe_reset(td)

    env.step_and_maybe_reset = stepped  # type: ignore[method-assign]
    options = {"replay_buffer": buffer, "extend_buffer": False} if destination == "replay buffer" else {}
    with Collector(env, policy, frames_per_batch=6, **options) as one:
        thread = threading.Thread(target=update, args=(one, "blocking", Level(5)))
        batch = one.next()
        thread.join(20)
    frames = buffer.added if batch is None else batch.unbind(-1)
    found = [(f["action"].item(), f["collector", "policy_version"].item()) for f in frames]
    assert found == [(0, 0)] * 3 + [(5, 1)] * 3


@contextmanager
def receiving(models: dict[str, Level], kind: str = "ZMQWeightSyncScheme", **options: Any) -> Iterator[tuple[Any, Any]]:
    """A collector that receives these models, and the bus that sends them."""
    bus = sync.Bus(num_workers=1)
    schemes = {model_id: getattr(sync, kind)(bus=bus) for model_id in models}
    passed = pickle.dumps(schemes)
    for model_id, scheme in schemes.items():
        scheme.init_on_sender(model_id=model_id, model=models[model_id])
    thread = threading.Thread(target=bus.connect, args=(20,))
    thread.start()
    # weight_recv_schemes connects in the constructor, which so waits for the trainer
    with collector(weight_recv_schemes=pickle.loads(passed), worker_idx=0, **options) as leaf:
        thread.join(20)
        yield leaf, bus
    bus.shutdown()


@pytest.mark.requirement(5, 11, 199)
@pytest.mark.parametrize("kind", ["SharedMemWeightSyncScheme", "ZMQWeightSyncScheme", "MultiProcessWeightSyncScheme"])
def test_every_frame_tells_the_version_of_the_weights_that_acted(kind: str) -> None:
    models = {"policy": Level(100), NET: Level(100)}
    with ThreadPoolExecutor(1) as thread, receiving(models, kind, frames_per_batch=2000) as (leaf, bus):
        first, sent, found = bus.version, 0, set[Any]()
        while len(found) <= 1:  # until an update has come amid a rollout
            rolling = thread.submit(leaf.next)
            while not rolling.done():
                sent += 1
                bus.send({"policy": Level(100 + sent), NET: Level(100 + sent)})
            batch = rolling.result()
            found = levels(batch)
            assert found <= {(100.0 + i, 100.0 + i, first + i) for i in range(sent + 1)}
            assert (batch["collector", "policy_version"].flatten().diff() >= 0).all()


class Threads(sync.WeightStrategy):
    """Notes in which threads updates are converted: where the receiver's scheme runs."""

    seen: ClassVar[set[str]] = set()

    def convert(self, weights: Any, model: Any) -> Any:
        self.seen.add(threading.current_thread().name)
        return super().convert(weights, model)


@pytest.mark.requirement(189)
@pytest.mark.parametrize("kind", ["SharedMemWeightSyncScheme", "ZMQWeightSyncScheme"])
@pytest.mark.parametrize("module", [asyncsync, sync], ids=["asyncio's scheme", "a blocking one"])
async def test_collectors_run_their_schemes_on_the_loop_thread(module: Any, kind: str) -> None:
    """Also in an async program, and with either API's schemes."""
    Threads.seen.clear()
    scheme = getattr(module, kind)(Threads(), num_workers=1)
    passed = pickle.loads(pickle.dumps(scheme))
    scheme.init_on_sender(model_id="policy", model=Level(1))
    trainer = scheme.blocking if module is asyncsync else scheme
    connecting = asyncio.ensure_future(asyncio.to_thread(trainer.connect, timeout=20))
    leaf = await asyncio.to_thread(collector, weight_recv_schemes={"policy": passed}, worker_idx=0)
    await connecting
    try:
        await trainer.send_async(Level(2))
        assert {frame[0] for frame in levels(leaf.next())} == {2}
        [loop] = [thread for thread in threading.enumerate() if thread.name == "asyncsync-loop"]
        assert Threads.seen == {loop.name}
    finally:
        await asyncio.to_thread(leaf.shutdown)
        await asyncio.to_thread(trainer.shutdown)


def test_max_lag_waits_for_the_newer_version() -> None:
    with ThreadPoolExecutor(1) as thread, receiving({"policy": Level(1)}, max_lag=0) as (leaf, bus):
        leaf.acting_weights.newest_above = lambda: 2  # what the control page says
        rolling = thread.submit(leaf.next)
        with pytest.raises(TimeoutError):  # it does not act with version 1
            rolling.result(0.1)
        bus.send({"policy": Level(9)})
        assert levels(rolling.result(20)) == {(9, -1, 2)}


def test_max_lag_and_versions_of_several_buses_are_counted_bus_by_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.collectors.rollout.rollout.LAG_SECONDS", 5.0)
    with ThreadPoolExecutor(2) as threads, receiving({NET: Level(-1)}, max_lag=0) as (leaf, nets):
        policies, _ = rooted(Level(1))
        with below({"policy": policies}, [leaf]):
            policies.connect()
        nets.send({NET: Level(1)})
        for level in (2, 3, 4):
            policies.send(Level(level))
        assert levels(leaf.next()) == {(4, 1, 4)}, "the policy's version, though another is received first"
        with leaf.acting_weights.holds():
            sending = threads.submit(policies.send, Level(5))
            while planted.newest_target_of(leaf) < 5:
                time.sleep(0.001)
            rolling = threads.submit(leaf.next)
        assert levels(rolling.result(4)) == {(5, 1, 5)}
        sending.result(20)
    policies.shutdown()


@pytest.mark.requirement(166)
def test_the_registered_policy_is_sent_not_the_copy_that_acts() -> None:
    scheme, registered, below = sync.ZMQWeightSyncScheme(), Level(1), Level(0)
    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver("policy", model=below, worker_idx=0)
    thread = threading.Thread(target=receiver.connect)
    thread.start()
    options: Any = {"policy_device": "cpu:1", "weight_sync_schemes": {"policy": scheme}}
    with Collector(LevelEnv, registered, frames_per_batch=10, **options) as one:
        thread.join(20)
        assert one.policy is not registered
        with torch.no_grad():
            registered.level.fill_(7)
        one.update_policy_weights_()
        assert below.level.item() == 7
        receiver.shutdown()


@pytest.mark.requirement(186)
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_frames_that_act_with_pushed_weights_have_their_version_whatever_hooks_take() -> None:
    policy = Level(0)
    updater = VanillaWeightUpdater(policy_weights=policy)
    found: list[Any] = []
    updater.register_post_hook(lambda: found.append(levels(one.next())))
    with Collector(LevelEnv, policy, frames_per_batch=10, weight_updater=updater) as one:
        for value in (1, 2):
            one.update_policy_weights_(Level(value))
        assert found == [{(1, -1, 1)}, {(2, -1, 2)}]
        assert one.policy_version == 2


class Reading(Level):
    """Reads its weights at both ends of a while."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.torn = 0

    def forward(self, tensordict: Any) -> Any:
        before = self.level.detach().clone()
        time.sleep(0.002)
        self.torn += int((self.level.detach() != before).any())
        return tensordict.set("action", before)


@contextmanager
def registered_in_the_midst(policy: Any, **init: Any) -> Iterator[tuple[Collector, Any, Any]]:
    """A collector that rolls out, in the background, its trainer's scheme, and its own, which is registered and
    connected meanwhile."""
    scheme, given = rooted(Level(1))
    with collector(policy=policy, frames_per_batch=100_000, replay_buffer=Buffer(), worker_idx=0) as one:
        one.start()
        while not one.env.steps:
            time.sleep(0.001)
        if init:
            given.init_on_receiver("policy", one, **init)
        thread = threading.Thread(target=one.register_scheme_receiver, args=({"policy": given},))
        thread.start()
        scheme.connect(timeout=20)
        thread.join(20)
        yield one, scheme, given
    scheme.shutdown()


def test_a_scheme_that_is_registered_in_the_midst_of_a_rollout_tears_no_step() -> None:
    policy = Reading(0)
    with registered_in_the_midst(policy) as (_, scheme, _):
        for value in range(2, 30):
            scheme.send(Level(value), timeout=20)
    assert policy.torn == 0


def test_weights_that_wait_to_be_received_are_taken_in_in_the_midst_of_a_rollout() -> None:
    policy = Reading(0)
    with registered_in_the_midst(policy, apply="on_receive", gate="hold") as (one, scheme, given):
        version = scheme.publish(Level(2))
        machine = given._bus.link.machine
        while not (staged := machine.staged) or staged[-1].versions != {"policy": version}:
            time.sleep(0.001)
        assert policy.level.item() == 1.0
        one.receive_weights()
        assert policy.level.item() == 2.0
    assert policy.torn == 0


def test_a_buffer_that_waits_for_its_consumer_keeps_no_update_waiting() -> None:
    class Bounded(queue.Queue[Any]):
        add = queue.Queue.put

    buffer = Bounded(4)
    with Collector(
        LevelEnv, Level(0), frames_per_batch=8, replay_buffer=buffer, extend_buffer=False, total_frames=16
    ) as one:
        one.start()
        while not buffer.full():
            time.sleep(0.001)
        update(one, "blocking", Level(5), timeout=5)
        frames = [buffer.get(timeout=10) for _ in range(16)]
    found = [(f["action"].item(), f["collector", "policy_version"].item()) for f in frames]
    assert set(found) == {(0, 0), (5, 1)}


def test_a_buffer_may_change_weights() -> None:
    class Changing(Buffer):
        def add(self, frame: Any) -> None:
            super().add(frame)
            one.update_policy_weights_(Level(len(self.added)))

    buffer = Changing()
    with Collector(LevelEnv, Level(0), frames_per_batch=4, replay_buffer=buffer, extend_buffer=False) as one:
        one.next()
    assert [frame["action"].item() for frame in buffer.added] == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["reset_at_each_iter", "reset", "set_seed"])
def test_no_model_of_the_environment_changes_during_a_reset(how: str) -> None:
    class Env(LevelEnv):
        torn = 0

        def __init__(self) -> None:
            super().__init__()
            self.net = Reading(0)

        def reset(self, *args: Any, **kwargs: Any) -> Any:
            self.net(TensorDict())
            return super().reset(*args, **kwargs)

        def set_seed(self, seed: int, static_seed: bool = False) -> int:
            self.reset()
            return seed

    env, stop = Env(), threading.Event()
    with Collector(env, Level(0), frames_per_batch=1, reset_at_each_iter=how == "reset_at_each_iter") as one:

        def change() -> None:
            while not stop.is_set():
                one.update_policy_weights_(policy=Level(float(one.policy_version)), model_id=NET)

        thread = threading.Thread(target=change)
        thread.start()
        begin_anew = {"reset_at_each_iter": one.next, "reset": one.reset, "set_seed": lambda: one.set_seed(3)}[how]
        try:
            for _ in range(20):
                begin_anew()
        finally:
            stop.set()
            thread.join()
    assert env.net.torn == 0
