"""DistributedWeightSyncScheme in programs like torchrun's: processes of a group that construct their schemes apart."""

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributed

from asyncsync import (
    AckTimeout,
    ClosedError,
    DistributedWeightSyncScheme,
    NotConnected,
    PartialSendError,
    PeerLost,
    sync,
)
from helpers import planted
from helpers.apis import Api, face
from helpers.pairs import Clock, Model, connected, fill, passed_on, read, receiver_of, until
from helpers.processes import LARGE, Remote, Start, Trainer, Worker
from helpers.programs import in_program
from helpers.ranks import Rank, free_port
from helpers.shared_workers import MIB

pytestmark = pytest.mark.timeout(120)

PROMISED = 1.0
LOOPBACK = ("127.0.0.1", 0)


async def program(start: Start, world: int, port: int) -> list[Remote]:
    ranks = [start(Rank) for _ in range(world)]
    await asyncio.gather(*(rank.begin(port, i, world) for i, rank in enumerate(ranks)))
    return ranks


@pytest.mark.thorough
@pytest.mark.requirement(15, 19, 24, 30, 47, 190, 211)
@pytest.mark.parametrize("is_blocking", [False, True])
async def test_in_a_process_group_the_documented_arguments_suffice(start: Start, is_blocking: bool) -> None:
    """Of 190 and 211: for Distributed."""
    trainer, *workers = await program(start, 3, free_port())
    following = [worker.follow(LARGE, is_blocking) for worker in workers]
    assert await trainer.send_from(LARGE, 3.0, is_blocking) == (2, 1)
    assert await asyncio.gather(*following) == [(0, 3.0), (1, 3.0)]
    assert await trainer.send(4.0) == 2
    assert [await worker.value() for worker in workers] == [4.0, 4.0]
    assert await asyncio.gather(*(rank.all_reduce() for rank in (trainer, *workers))) == [3.0] * 3
    assert await workers[0].receive(5.0)
    with Clock(0.5):
        assert not await workers[0].receive(0.05)
    assert await trainer.send(5.0) == 3, "a receive that has timed out has broken nothing"


@pytest.mark.requirement(194, 195)
@pytest.mark.thorough
async def test_a_worker_killed_amid_a_transfer_of_256_mib_is_named_at_once(start: Start) -> None:
    numel = 256 * MIB
    trainer, *workers = await program(start, 3, free_port())
    following = [worker.follow(numel) for worker in workers]
    await trainer.send_from(numel, 1.0)
    await asyncio.gather(*following)
    workers[1].signal(signal.SIGSTOP)  # the transfer begins, and goes as far as the sockets take it
    sending = trainer.send(2.0)
    await workers[0].receive(30.0)
    with Clock(PROMISED):
        workers[1].signal(signal.SIGKILL)
        with pytest.raises(PartialSendError) as caught:
            await sending
    assert caught.value.acked == {0: 2}
    assert isinstance(caught.value.failed[1], PeerLost)
    assert await workers[0].value() == 2.0
    with pytest.raises(PartialSendError):
        await trainer.send(3.0)
    assert await workers[0].value() == 3.0


@pytest.mark.requirement(194, 200)
@pytest.mark.thorough
async def test_a_trainer_killed_amid_a_transfer_of_256_mib_is_noticed_and_the_port_is_free(start: Start) -> None:
    numel, port = 256 * MIB, free_port()
    trainer, worker = await program(start, 2, port)
    following = worker.follow(numel)
    await trainer.send_from(numel, 1.0)
    await following
    worker.signal(signal.SIGSTOP)
    sending = trainer.send(2.0)
    await asyncio.sleep(0.5)  # as far as the sockets take it
    worker.signal(signal.SIGCONT)
    await trainer.kill()
    with pytest.raises(EOFError):
        await sending
    with Clock(PROMISED), pytest.raises(AckTimeout, match="worker 0 could not fetch 'policy'"):
        await worker.fetch(1.0)
    assert await worker.state(0) == "lost"
    assert await worker.value() in (1.0, 2.0), "never torn"
    await worker.kill()
    trainer, worker = await program(start, 2, port)
    following = worker.follow(LARGE)
    await trainer.send_from(LARGE, 5.0)
    assert await following == (0, 5.0)


def _alone(port: int) -> dict[str, Any]:
    """What the only process of a group is told."""
    told: dict[str, Any] = {}

    def refused(kind: type[Exception], call: Callable[..., Any], **options: Any) -> str:
        with pytest.raises(kind) as caught:
            call(**options)
        return str(caught.value)

    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    first, second, third = (sync.DistributedWeightSyncScheme(min_workers=least) for least in (1, 0, 0))
    told["unnamed"] = refused(ValueError, first.init_on_sender, model=Model())
    told["without workers"] = refused(ValueError, first.init_on_sender, model_id="policy", model=Model())
    for scheme in (second, third):
        scheme.init_on_sender(model_id="policy", model=Model(3))
    second.connect(timeout=10)
    told["again"] = refused(NotConnected, third.connect, timeout=10)
    second.shutdown()
    third.connect(timeout=10)
    third.shutdown()
    with sync.DistributedWeightSyncScheme(min_workers=0) as last:
        last.init_on_sender(model_id="policy", model=Model(3))
        distributed.destroy_process_group()
        told["left"] = refused(NotConnected, last.connect, timeout=10)
    return told


@pytest.mark.thorough
def test_who_cannot_be_found_in_a_process_group_is_told_why() -> None:
    told = in_program(_alone, free_port())
    assert "workers find this sender by its model_id=: pass one" in told["unnamed"]
    assert "has one process, and no workers: pass min_workers=0" in told["without workers"]
    assert "another scheme of this process is the sender of 'policy'" in told["again"]
    assert "call destroy_process_group() after shutdown()" in told["left"]


# -- without a process group


@pytest.mark.requirement(30)
@pytest.mark.schemes("distributed")
async def test_without_a_process_group_the_scheme_has_a_store_of_its_own(api: Api) -> None:
    async with api.crew(2) as everybody:
        info = everybody.sender.get_store_info()
        assert info is not None
        assert info["host"] == "127.0.0.1"
        await everybody.sender.send_async(fill(everybody.source, 4))
        assert everybody.read == [{4}, {4}]
        assert everybody.receivers[0].get_store_info() == info
    again = api.make(api.scheme_class, store_info=info)
    again.init_on_sender(model_id="policy", model=Model(5), num_workers=1)
    apart = api.make(api.scheme_class, store_info=info)
    apart.init_on_receiver("policy", model=(model := Model()), worker_idx=0)
    async with again, apart:
        await asyncio.gather(apart.connect(timeout=10), again.connect(timeout=10))
        assert read(model) == {5}, "the same port, and constructed apart"


@pytest.mark.requirement(197)
@pytest.mark.schemes("distributed")
async def test_a_worker_follows_the_next_trainer_in_the_same_store(api: Api) -> None:
    """The next one has another address, and other keys."""
    async with api.crew(2, receiver={"reconnect": True}) as (first, workers, models):
        info = first.get_store_info()
        await first.shutdown()
        await until(lambda: {worker.status()[i].state for i, worker in enumerate(workers)} == {"lost"})
        waiting = asyncio.create_task(workers[0].receive(30))
        second = api.scheme(num_workers=2, store_info=info)
        second.init_on_sender(model_id="policy", model=(source := Model(5)))
        await second.connect(timeout=20)
        assert [read(model) for model in models] == [{5}, {5}]
        await second.send_async(fill(source, 6))
        assert [read(model) for model in models] == [{6}, {6}]
        assert read(await waiting) <= {5, 6}
        await second.shutdown()


@pytest.mark.requirement(197)
async def test_a_worker_follows_the_next_trainer_after_a_kill(start: Start) -> None:
    port = free_port()
    scheme = DistributedWeightSyncScheme(num_workers=1, store_info=("127.0.0.1", port))
    trainer, worker = start(Trainer), start(Worker)
    connecting = worker.connect(passed_on(scheme), 0, LARGE)
    await trainer.connect(passed_on(scheme), LARGE, 1.0)
    await connecting
    await trainer.kill()
    with pytest.raises(AckTimeout, match="worker 0 could not fetch 'policy'"):
        await worker.fetch(0.2)
    next_one = start(Trainer)
    await next_one.connect(passed_on(scheme), LARGE, 5.0)
    assert await worker.value() == 5.0
    await next_one.send(6.0)
    assert await worker.value() == 6.0


@pytest.mark.requirement(192)
async def test_a_connect_that_is_cancelled_or_times_out_can_be_called_again() -> None:
    """Of 192: for Distributed."""
    sender = DistributedWeightSyncScheme(num_workers=1, store_info=LOOPBACK)
    sender.init_on_sender(model_id="policy", model=Model(3))
    receiver = receiver_of(sender, 0, model := Model())
    async with sender, receiver:
        with pytest.raises(NotConnected, match=r"worker 0 was not introduced to a sender within 0\.1 s"):
            await receiver.connect(timeout=0.1)
        connecting = asyncio.create_task(receiver.connect(timeout=30))
        await asyncio.sleep(0.05)
        connecting.cancel()
        with Clock(0.5), pytest.raises(asyncio.CancelledError):
            await connecting
        await asyncio.gather(sender.connect(timeout=10), receiver.connect(timeout=10))
        assert read(model) == {3}


@pytest.mark.schemes("distributed")
@pytest.mark.parametrize("has_own_bus", [True, False])
async def test_a_shutdown_ends_a_connect_that_waits_for_its_introduction_at_once(api: Api, has_own_bus: bool) -> None:
    options = {} if has_own_bus else {"bus": api.make(api.Bus, planted.introduced())}
    receiver = api.scheme(store_info=("127.0.0.1", free_port()), **options)
    receiver.init_on_receiver("policy", model=Model(), worker_idx=0)
    waiting = receiver if has_own_bus else receiver.bus
    connecting = [asyncio.create_task(waiting.connect(timeout=30)) for _ in range(2)]
    await until(lambda: sum(thread.name == "asyncsync-meeting" for thread in threading.enumerate()) == 2)
    with Clock(0.2):
        await waiting.shutdown()
        for connect in connecting:
            with pytest.raises(ClosedError, match="was shut down"):
                await connect


@pytest.mark.requirement(15)
def test_a_receiver_without_a_store_is_told_what_to_do(api: Api) -> None:
    scheme = api.DistributedWeightSyncScheme()
    with pytest.raises(RuntimeError, match=r"init_on_sender\(\), or construct it with store_info="):
        scheme.init_on_receiver("policy", model=Model(), worker_idx=0)
    with pytest.raises(TypeError, match="'modle'; did you mean 'model'"):
        scheme.init_on_receiver("policy", modle=Model(), worker_idx=0)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"backend": "smoke signals"}, "gloo, mpi, nccl, ucc"),
        ({"store_info": {"host": "x"}}, "store_info"),
        ({"store_info": ("x", 70000)}, "store_info"),
        ({"pair_above": -1}, "pair_above"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_bad_arguments_are_refused_with_the_choices(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        DistributedWeightSyncScheme(**options)


@pytest.mark.schemes("distributed")
@pytest.mark.parametrize("is_connected", [False, True])
async def test_the_shutdown_of_a_converted_scheme_leaves_the_original_to_be_found(api: Api, is_connected: bool) -> None:
    sender = api.sender(Model(3), num_workers=1)
    twin = twin_of(sender, api)
    first, second = receiver_of(sender, 0, Model()), receiver_of(sender, 0, model := Model())
    async with sender, second:
        async with first:
            if is_connected:
                await asyncio.gather(sender.connect(timeout=10), first.connect(timeout=10))
            await twin.shutdown()
        await asyncio.gather(sender.connect(timeout=10), second.connect(timeout=10))
        assert read(model) == {3}


@pytest.mark.schemes("distributed")
async def test_either_of_a_scheme_and_its_conversion_may_be_the_trainer(api: Api) -> None:
    original = api.sender(Model(3), num_workers=1)
    twin = twin_of(original, api)
    assert passed_on(original).get_store_info() == original.get_store_info()
    for sender, unused in ((twin, original), (original, twin)):
        async with connected(sender, receiver_of(unused, 0, model := Model())):
            assert read(model) == {3}


def twin_of(scheme: Any, api: Api) -> Any:
    return scheme.bare.aio if api.is_blocking else face(scheme.blocking)
