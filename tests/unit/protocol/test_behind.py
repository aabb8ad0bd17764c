"""What a trainer knows of workers behind relays, where they move, have more models, or their relay has no trainer."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncsync import AutoWeightSyncScheme, Bus, PartialSendError, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from asyncsync.relay.process import Relay, RelayOptions
from asyncsync.weights.packing import pack
from asyncsync.wire.messages import Relayed
from helpers.pairs import Model, read
from helpers.tree import LAYOUT, MODEL, Tree, flat


@asynccontextmanager
async def relay(up: str, down: str) -> Any:
    one = Relay(RelayOptions(up, down))
    try:
        yield one
    finally:
        await one.shutdown()


def test_a_worker_that_is_forgotten_amid_a_recount_is_no_trouble() -> None:
    tree = Tree((1,), 3, elastic=True)
    tree.publish()
    tree.flow()
    publisher, passing = tree.root.publisher, tree.relays[0][0].passing
    peer = publisher.peers[tree.relays[0][0].subscriber.worker]
    behind, known = publisher.behind, [passing._reported[w] for w in range(3)]
    number = behind._relays[peer.nonce].last
    left = replace(known[2], applied={}, failed={}, lost="it has left")
    behind.report(peer, Relayed(publisher.epoch, number + 1, False, False, (left,)), tree.now)
    tree.now += 61
    behind.report(peer, Relayed(publisher.epoch, number + 2, True, True, (known[0],)), tree.now)
    behind.tick(tree.now)
    behind.report(peer, Relayed(publisher.epoch, number + 3, False, False, (known[1],)), tree.now)
    assert sorted(behind.workers) == [0, 1]


def test_weights_of_its_own_are_nobodys_target_when_a_worker_has_gone_behind_a_relay() -> None:
    tree = Tree((1,), 1)
    tree.connect(tree.workers[0], tree.root)
    tree.flow()
    tree.publish()
    tree.flow()
    tree.pass_time(2)
    publisher = tree.root.publisher
    slab = tree.root.pool.acquire(LAYOUT)
    pack(slab, flat(77))
    version = publisher.publish({MODEL: slab}, [0], tree.now)
    slab.release()
    tree.numbers[publisher.epoch, version] = 77
    tree.connect(tree.workers[0], tree.relays[0][0])  # before they come
    tree.settle()
    tree.flow()
    tree.pass_time(30)
    assert list(publisher.behind.workers) == [0]
    assert not publisher.progress.of(version, [0], [MODEL]).waiting


def test_a_worker_that_has_come_back_to_a_relay_is_believed_to_be_there() -> None:
    """Although that one has never missed it, and the relay between has not either."""
    tree = Tree((2,), 1)
    tree.publish()
    tree.flow()
    for relay in reversed(tree.relays[0]):
        tree.connect(tree.workers[0], relay)
        tree.settle()
        tree.flow()
        tree.pass_time(1)
    version = tree.publish()
    tree.flow()
    assert not tree.root.publisher.progress.of(version, [0], [MODEL]).waiting


async def test_a_model_that_a_worker_behind_a_relay_registers_later_is_waited_for_and_comes(tmp_path: Path) -> None:
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    above, below = Bus(up, num_workers=1), Bus(connect=down)
    senders = {m: ZMQWeightSyncScheme(bus=above) for m in "ab"}
    receivers = {m: ZMQWeightSyncScheme(bus=below) for m in "ab"}
    models = {m: Model(0.0) for m in "ab"}
    for number, m in enumerate("ab", 1):
        senders[m].init_on_sender(model_id=m, model=Model(float(number)))
        receivers[m].init_on_receiver(m, model=models[m], worker_idx=0)

    async def connect_all(schemes: dict[str, ZMQWeightSyncScheme], pause: float) -> None:
        for scheme in schemes.values():
            await scheme.connect(timeout=8)
            await asyncio.sleep(pause)

    async with relay(up, down), above, below:
        await asyncio.gather(connect_all(senders, 0.0), connect_all(receivers, 0.3))
        assert [read(model) for model in models.values()] == [{1.0}, {2.0}]


@pytest.mark.thorough
async def test_a_worker_goes_on_from_a_relay_that_finds_no_trainer(tmp_path: Path) -> None:
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    sender = ZMQWeightSyncScheme(endpoint=up, num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(4.0))
    receiver = ZMQWeightSyncScheme(connect=f"{down},{up}")
    receiver.init_on_receiver("policy", model=(model := Model(0.0)), worker_idx=0)
    async with relay(f"ipc://{tmp_path}/nobody", down), sender, receiver:
        await asyncio.gather(sender.connect(timeout=25), receiver.connect(timeout=25))
        assert read(model) == {4.0}
        await sender.send_async(Model(5.0), timeout=10)
        assert read(model) == {5.0}


@pytest.mark.parametrize("kind", [AutoWeightSyncScheme, SharedMemWeightSyncScheme])
async def test_a_relay_passes_on_bytes_and_what_it_cannot_is_told_at_once(kind: Any, tmp_path: Path) -> None:
    """Memory of the trainer's is for its own workers."""
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    sender = kind(endpoint=up, num_workers=1)
    sender.init_on_sender(model_id="policy", model=Model(4.0))
    receiver = ZMQWeightSyncScheme(connect=down)
    receiver.init_on_receiver("policy", model=(model := Model(0.0)), worker_idx=0)
    async with relay(up, down), sender, receiver:
        found = await asyncio.gather(sender.connect(timeout=8), receiver.connect(timeout=8), return_exceptions=True)
        if kind is AutoWeightSyncScheme:
            assert (found, read(model)) == ([None, None], {4.0})
        else:
            assert isinstance(found[0], PartialSendError)
            assert "another transport" in str(found[0].failed[0])
