"""Blocking schemes in TorchRL's hands, in one process: what its collectors and its inference server ask of them."""

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import asyncsync
from asyncsync import PartialSendError, sync
from helpers.blocking_crew import connect
from helpers.collecting_single import needs_torchrl, torchrl, torchrl_walk
from helpers.collecting_torchrl import make_env
from helpers.pairs import Model, fill, read, receiver_of
from helpers.torchrl_programs import policy_of, shown

pytestmark = [needs_torchrl, pytest.mark.filterwarnings("ignore")]

NAMES = ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "ZMQWeightSyncScheme"]
ALL = [*NAMES, "NoWeightSyncScheme"]


@pytest.fixture(autouse=True)
def _loaded() -> None:
    torchrl()


@contextmanager
def pair(name: str, source: Any, model: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A trainer and one worker, connected."""
    with getattr(sync, name)(**options) as sender:
        sender.init_on_sender(model_id="policy", model=source, num_workers=1)
        with receiver_of(sender, 0, model) as receiver:
            connect(sender, receiver)
            yield sender, receiver


# -- names


@pytest.mark.requirement(204)
@pytest.mark.parametrize("name", ALL)
def test_schemes_are_torchrls_where_torchrl_is_loaded(name: str) -> None:
    from torchrl.weight_update import WeightSyncScheme

    class Own(getattr(sync, name)):  # type: ignore[misc]
        pass

    scheme = getattr(sync, name)()
    assert isinstance(scheme, WeightSyncScheme)
    assert isinstance(pickle.loads(pickle.dumps(scheme)), WeightSyncScheme)
    assert isinstance(Own(), WeightSyncScheme)
    assert not isinstance(scheme.aio, WeightSyncScheme)


@pytest.mark.requirement(204)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("argument", ["weight_sync_schemes", "weight_recv_schemes"])
def test_an_asynchronous_scheme_is_refused_in_one_line(name: str, argument: str) -> None:
    from torchrl.collectors import Collector

    scheme = getattr(asyncsync, name)()
    with pytest.raises(AttributeError, match=rf"asyncio {name}.*blocking"):
        Collector(torchrl_walk(), frames_per_batch=4, total_frames=4, **{argument: {"policy": scheme}})
    assert not hasattr(scheme, "initialized_on_sender")


@pytest.mark.requirement(229)
@pytest.mark.parametrize("name", ALL)
def test_a_scheme_tells_where_it_stands(name: str) -> None:
    sender = getattr(sync, name)("state_dict")
    assert sender.strategy_str == "state_dict"
    assert (sender.initialized_on_sender, sender.initialized_on_receiver) == (False, False)
    sender.init_on_sender(model_id="policy", model=Model(1), num_workers=1)
    receiver = receiver_of(sender, 0, Model())
    for scheme, states in ((sender, (True, False)), (receiver, (False, True))):
        assert (scheme.initialized_on_sender, scheme.initialized_on_receiver) == states
        assert (scheme.synchronized_on_sender, scheme.synchronized_on_receiver) == (False, False)
    with sender, receiver:
        connect(sender, receiver)
        assert (sender.synchronized_on_sender, sender.synchronized_on_receiver) == (True, False)
        assert (receiver.synchronized_on_sender, receiver.synchronized_on_receiver) == (False, True)
        assert not pickle.loads(pickle.dumps(sender)).initialized_on_sender


class Recorder:
    """A context that keeps the numbers of what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, set[float]]] = []

    def update_policy_weights_(self, weights: Any, *, model_id: str) -> None:
        self.calls.append((model_id, read(weights)))


@pytest.mark.requirement(229)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [64, 5 << 20], ids=["copied", "re-pointed"])
def test_another_model_takes_the_place_with_the_current_weights_and_so_may_a_context(name: str, width: int) -> None:
    source, old, new = Model(1, width), Model(0, width), Model(0, width)
    with pair(name, source, old) as (sender, receiver):
        for value in (2, 3, 4):  # the fast path, if any, has begun
            sender.send(fill(source, value))
        receiver.model, receiver.context = new, (context := Recorder())
        assert receiver.model is new
        assert read(new) == {4}
        sender.send(fill(source, 5))
        assert (read(new), read(old), context.calls) == ({5}, {4}, [("policy", {5})])
        with receiver.hold():
            sender.publish(fill(source, 6))
            assert new() == {5}, "the new model's calls are readers"
        sender.wait_version(sender.version, timeout=10)
        assert read(new) == {6}
        for value in (7, 8, 9):  # wherever these come, it is not where the old model has its tensors
            sender.send(fill(source, value))
        assert (read(new), read(old)) == ({9}, {4})


@pytest.mark.requirement(229)
def test_a_model_that_does_not_fit_is_refused_when_it_is_set_unless_nothing_moves() -> None:
    with pair("ZMQWeightSyncScheme", Model(1), Model()) as (_, receiver):
        with pytest.raises(asyncsync.SchemaMismatch, match="last"):
            receiver.model = nn.Linear(2, 2)
    with pair("NoWeightSyncScheme", Model(1), Model(2)) as (_, receiver):
        receiver.model = new = nn.Linear(2, 2)
        assert receiver.model is new


@pytest.mark.requirement(229)
def test_model_and_context_and_worker_idx_may_be_set_before_init() -> None:
    source, model = Model(1), Model()
    sender = sync.ZMQWeightSyncScheme(num_workers=2)
    sender.model = source
    sender.init_on_sender(model_id="policy")
    with pytest.raises(RuntimeError, match="sender"):
        sender.worker_idx = 1
    sender.worker_idx = None
    receiver = pickle.loads(pickle.dumps(sender))
    assert receiver.model is None, "no model travels"
    receiver.worker_idx, receiver.model = 1, model
    receiver.context = context = Recorder()
    assert (receiver.worker_idx, receiver.model, receiver.context) == (1, model, context)
    receiver.init_on_receiver("policy")
    assert (receiver.worker_idx, receiver.model, receiver.context) == (1, model, context)
    with pytest.raises(RuntimeError, match="worker 1"):
        receiver.worker_idx = 0
    other = receiver_of(sender, None, Model())
    other.worker_idx = 0
    with sender, receiver, other:
        connect(sender, receiver, other)
        sender.model = Model(7)
        sender.send()
        assert read(model) == {7}


# -- arguments


@pytest.mark.requirement(230)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("name", NAMES[:2])
def test_schemes_take_what_torchrls_take(name: str, waits: bool) -> None:
    """``sync=False``: send() does not wait. ``per_worker_weights`` and ``ctx`` change nothing."""
    source, model = Model(1), Model()
    with getattr(sync, name)(sync=waits, per_worker_weights=True) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model_id="policy", model=source, num_workers=1, ctx=torch.multiprocessing.get_context())
        with receiver_of(sender, 0, model, some_option_of_a_transport=3) as receiver:
            there = pool.submit(receiver.connect)
            sender.connect(ctx=None)
            there.result()
            with receiver.hold():
                with pytest.raises(PartialSendError) if waits else nullcontext():
                    sender.send({0: fill(source, 2)}, timeout=0.2)
                assert read(model) == {1}
            sender.wait_version(2, timeout=10)
            assert read(model) == {2}
    with pytest.raises(ValueError, match="sync=False"):
        getattr(asyncsync, name)(sync=False)


# -- the single-process collector


def collector(**options: Any) -> Any:
    from torchrl.collectors import Collector

    return Collector(make_env(), frames_per_batch=10, total_frames=-1, **options)


@pytest.mark.requirement(204)
@pytest.mark.parametrize("name", NAMES)
def test_a_collector_receives_and_counts_versions(name: str) -> None:
    source = policy_of(1.0)
    with getattr(sync, name)() as sender:
        sender.init_on_sender(model_id="policy", model=source, num_workers=1)
        receiver = pickle.loads(pickle.dumps(sender))
        with ThreadPoolExecutor(1) as pool, receiver:
            connecting = pool.submit(sender.connect, timeout=20)
            options = {"weight_recv_schemes": {"policy": receiver}, "worker_idx": 0, "track_policy_version": True}
            there = collector(policy=policy_of(0.0), **options)
            connecting.result()
            batches = iter(there)
            for update in range(4):
                batch = next(batches)
                assert shown(batch) == [4.0 * (update + 1)]
                assert there.policy_version == update, "TorchRL counts updates after the first weights"
                assert set(batch["next", "policy_version"].flatten().tolist()) == {update}
                source.module.fill(update + 2.0)
                sender.send()
            there.shutdown()


@pytest.mark.requirement(204)
def test_a_collector_sends() -> None:
    source, model = policy_of(1.0), policy_of(0.0)
    with sync.ZMQWeightSyncScheme(min_workers=0) as sender:
        there = collector(policy=source, weight_sync_schemes={"policy": sender})
        with receiver_of(sender, 0, model) as receiver:
            receiver.connect(timeout=20)
            assert model.module.read() == 4.0
            source.module.fill(2.0)
            there.update_policy_weights_()
            assert model.module.read() == 8.0
            there.update_policy_weights_(TensorDict.from_module(policy_of(3.0)), worker_ids=[0])
            assert model.module.read() == 12.0
            assert sender.context is there
        there.shutdown()


@pytest.mark.requirement(204)
def test_a_collector_takes_a_scheme_that_moves_nothing() -> None:
    with sync.NoWeightSyncScheme() as scheme:
        there = collector(policy=policy_of(1.0), weight_sync_schemes={"policy": scheme})
        there.update_policy_weights_()
        assert scheme.version == 1
        assert shown(next(iter(there))) == [4.0]
        there.shutdown()


# -- the inference server


def linear(value: float) -> TensorDictModule:
    return TensorDictModule(Model(value, 4).inner, in_keys=["observation"], out_keys=["action"])


@pytest.mark.requirement(204)
@pytest.mark.parametrize("name", NAMES)
def test_the_inference_server_serves_the_newest_weights(name: str) -> None:
    from torchrl.modules.inference_server import InferenceServer

    source, served = linear(1.0), linear(0.0)
    with getattr(sync, name)() as sender:
        sender.init_on_sender(model_id="policy", model=source, num_workers=1)
        with (
            pickle.loads(pickle.dumps(sender)) as receiver,
            InferenceServer(served, transport="thread", max_batch_size=4, weight_sync=receiver) as server,
        ):
            client = server.client()
            sender.connect(timeout=20)
            for update in range(4):
                answer = client(TensorDict({"observation": torch.ones(4)}))
                assert answer["action"].tolist() == [5.0 * (update + 1)] * 3
                assert int(answer["policy_version"]) == server.policy_version == update
                fill(source, update + 2.0)
                sender.send()
            assert server.stats()["weight_updates"] == 4
            assert receiver.context is server
