"""A relay, its trainer and its workers on one event loop, over real sockets; and what it keeps in a file."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asyncsync import (
    AckTimeout,
    Bus,
    NotConnected,
    PartialSendError,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
    sync,
)
from asyncsync.cli import main
from asyncsync.net.endpoint import split_endpoints
from asyncsync.net.keys import KeyFiles
from asyncsync.relay.process import EmbeddedRelay, Relay, load, run, save
from asyncsync.weights import files
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, pack
from asyncsync.weights.tree import FlatWeights
from helpers.command import start
from helpers.pairs import Model, connected, fill, read, until

LARGE = 300_000  # elements: more than one chunk's credit at once is not needed to see them stream


@asynccontextmanager
async def relaying(up: str, down: str, **options: Any) -> AsyncIterator[Relay]:
    relay = Relay(up, down, **options)
    try:
        async with anyio.create_task_group() as keeping:  # as run() has it: what is being saved is saved to its end
            if relay.keep is not None:
                keeping.start_soon(relay.store)
            try:
                yield relay
            finally:
                keeping.cancel_scope.cancel()
    finally:
        await relay.shutdown()


@asynccontextmanager
async def relayed(
    tmp_path: Path, *, workers: int = 2, width: int = 64, given: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Any, Relay, list[Any], list[Model], Model]]:
    """A trainer, of these arguments, a relay, and workers behind it."""
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    cls = SharedMemWeightSyncScheme if options.get("shared") else ZMQWeightSyncScheme
    source = Model(1.0, width)
    sender = trainer(source, num_workers=workers, endpoint=up, **(given or {}))
    models = [Model(0.0, width) for _ in range(workers)]
    receivers = [worker(model, i, cls, connect=down, reconnect=True) for i, model in enumerate(models)]
    async with relaying(up, down, **options) as relay, connected(sender, *receivers, timeout=20):
        yield sender, relay, receivers, models, source


def trainer(source: Model | None, *, num_workers: int = 1, **options: Any) -> ZMQWeightSyncScheme:
    sender = ZMQWeightSyncScheme(num_workers=num_workers, **options)
    sender.init_on_sender(model_id="policy", **({} if source is None else {"model": source}))
    return sender


def worker(
    model: Model,
    index: int = 0,
    cls: Callable[..., Any] = ZMQWeightSyncScheme,
    *,
    reconnect: bool = False,
    **options: Any,
) -> Any:
    receiver = cls(**options)
    receiver.init_on_receiver("policy", model=model, worker_idx=index, reconnect=reconnect)
    return receiver


@pytest.mark.requirement(206)
@pytest.mark.promise(20)
@pytest.mark.parametrize("shared", [False, True], ids=["frames", "shared memory"])
@pytest.mark.parametrize("width", [64, LARGE, 2_000_000], ids=["small", "chunks", "large"])
async def test_a_relay_fans_one_subscription_out_to_its_hosts_workers(tmp_path: Path, shared: bool, width: int) -> None:
    async with relayed(tmp_path, width=width, shared=shared) as (sender, relay, receivers, models, source):
        for value in (2.0, 3.0, 4.0):
            version = await sender.send_async(fill(source, value), metadata={"step": value})
            assert [read(model) for model in models] == [{value}, {value}]
            assert [one.version for one in receivers] == [version, version]
            assert receivers[0].metadata == {"step": value}
        status = sender.status()
        place = relay.upstream.machine.worker
        assert (status[0].role, status[0].relay, status[0].version) == ("worker", place, version)
        assert (status[place].role, status[place].relay) == ("relay", None)
        assert sum(one.bytes_sent for one in status.values()) == status[place].bytes_sent, "one copy for the host"
        if shared:
            assert relay.slots is not None
            assert relay.slots.pool.slabs <= 3


@pytest.mark.requirement(245)
@pytest.mark.parametrize("shared", [False, True], ids=["frames", "shared memory"])
async def test_workers_behind_a_relay_are_verified_through_it(tmp_path: Path, shared: bool) -> None:
    async with relayed(tmp_path, width=LARGE, shared=shared) as (sender, _, receivers, models, source):
        await sender.send_async(fill(source, 2.0))
        assert await sender.verify(timeout=20) == {0: [], 1: []}
        with torch.no_grad():
            models[1].inner.weight[0, 0] += 1
        assert await sender.verify(timeout=20) == {0: [], 1: ["inner.weight"]}
        await receivers[1].shutdown()
        found = await sender.verify(timeout=20)
        assert found[0] == []
        assert "is lost: it has left" in str(found[1])


async def test_weights_of_single_workers_are_refused_where_they_are_behind_a_relay(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (sender, relay, _, _, source):
        place = relay.upstream.machine.worker
        with pytest.raises(ValueError, match=f"worker 1 is behind relay {place}.*publish without worker_ids"):
            await sender.publish(source, worker_ids=[1])
        with pytest.raises(ValueError, match="worker 0 is behind relay"):
            await sender.publish({0: source, 1: source})
        version = await sender.publish(source)
        await sender.wait_version(version, worker_ids=[1], timeout=5)


@pytest.mark.promise(20)
async def test_a_failure_is_named_and_the_others_have_it(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (sender, _, receivers, models, source):
        with receivers[1].hold(), pytest.raises(PartialSendError) as late:
            await sender.send_async(fill(source, 2.0), timeout=0.3)
        assert (sorted(late.value.acked), sorted(late.value.failed)) == ([0], [1])
        await receivers[1].shutdown()
        with pytest.raises(PartialSendError, match="worker 1 is lost: it has left"):
            await sender.send_async(fill(source, 3.0), timeout=5)
        assert read(models[0]) == {3.0}


async def test_a_trainer_that_says_goodbye_ends_the_workers_unless_the_relay_keeps_the_weights(tmp_path: Path) -> None:
    for keep, closed in ((None, True), (tmp_path / "kept.safetensors", False)):
        async with relayed(tmp_path, workers=1, keep=keep) as (sender, relay, (receiver,), _, _):
            receiver._bus.link.machine.session.reconnects = False
            await sender.shutdown()
            if closed:
                await until(lambda receiver=receiver: receiver.closed)
            else:
                await asyncio.sleep(0.2)  # what must not happen
                assert not receiver.closed
            assert relay.downstream.failure is None


@pytest.mark.requirement(4)
async def test_a_store_serves_the_last_version_while_the_trainer_is_away_and_after_a_restart(
    tmp_path: Path,
) -> None:
    up, down, keep = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down", tmp_path / "kept.safetensors"
    async with relayed(tmp_path, workers=1, width=LARGE, keep=keep) as (sender, _, (first,), _, source):
        version = await sender.send_async(fill(source, 5.0), metadata={"step": 7})
        await sender.shutdown()
        await first.shutdown()
        assert await served(down, 5.0, version) == {"step": 7}
    tensors, _ = files.read(keep)
    assert {name: read({name: tensor}) for name, tensor in tensors.items()} == {
        name: {5.0} for name in source.state_dict()
    }
    async with relaying(up, down, keep=keep):
        assert await served(down, 5.0, version) == {"step": 7}
    async with relaying(up, f"ipc://{tmp_path}/shared", shared=True, keep=keep) as relay:
        assert await served(f"ipc://{tmp_path}/shared", 5.0, version, SharedMemWeightSyncScheme) == {"step": 7}
        before = relay.downstream.machine.membership.epoch
        newer = ZMQWeightSyncScheme(endpoint=up, min_workers=0)
        newer.init_on_sender(model_id="policy", model=fill(source, 6.0))
        async with connected(newer):
            await newer.publish()
            down = relay.downstream
            assert await down.wait(
                lambda: down.machine.membership.epoch > before and down.machine.targets.published == newer.version, 20
            )
            assert await served(f"ipc://{tmp_path}/shared", 6.0, newer.version, SharedMemWeightSyncScheme) == {}


async def test_what_is_kept_is_of_one_trainer(tmp_path: Path) -> None:
    """A file with an earlier trainer's versions as if they were the present one's would keep the relay from it."""
    up, keep = f"ipc://{tmp_path}/up", tmp_path / "kept.safetensors"
    again = partial(relaying, up, f"ipc://{tmp_path}/down", keep=keep)
    async with AsyncExitStack() as stack:
        async with again() as relay:
            machine = relay.downstream.machine
            for models in (("a", "b"), ("a",)):
                trainer = Bus(endpoint=up, min_workers=0)
                stack.push_async_callback(trainer.shutdown)
                for model_id in ("a", "b"):
                    ZMQWeightSyncScheme(bus=trainer).init_on_sender(model_id=model_id)
                before = machine.membership.epoch
                await trainer.connect()
                assert await relay.upstream.wait(lambda before=before: machine.membership.epoch > before, 20)
                version = await trainer.publish({model_id: Model(2.0) for model_id in models})
                assert await relay.upstream.wait(lambda version=version: machine.targets.published == version, 20)
                if models == ("a", "b"):
                    await trainer.shutdown()
            mark = str(machine.membership.epoch[1]).encode()
            async with asyncio.timeout(20):
                while not keep.exists() or mark not in keep.read_bytes():  # noqa: ASYNC110 (a thread writes it)
                    await asyncio.sleep(0.05)
        found = load(keep)
        assert found is not None
        assert found[1].keys() == {"a"}
        async with again() as relay:
            session = relay.upstream.machine.session
            assert await relay.upstream.wait(lambda: session.welcomed, 20)


async def served(endpoint: str, value: float, version: int, cls: Callable[..., Any] = ZMQWeightSyncScheme) -> Any:
    late = worker(model := Model(0.0, LARGE), 40, cls, connect=endpoint)
    async with connected(late, timeout=20):
        assert (read(model), late.version) == ({value}, version)
        return late.metadata


@pytest.mark.parametrize("shared", [False, True], ids=["frames", "shared memory"])
async def test_a_relay_is_sent_what_has_changed_only(tmp_path: Path, shared: bool) -> None:
    there = relayed(tmp_path, workers=1, width=1_000_000, given={"delta": True}, shared=shared)
    async with there as (sender, relay, _, (model,), source):
        before = sender.status()[relay.upstream.machine.worker].bytes_sent
        with torch.no_grad():
            next(source.parameters()).view(-1)[0] = 5.0
        await sender.send_async(source, timeout=20)
        assert all(map(torch.equal, model.state_dict().values(), source.state_dict().values()))
        sent = sender.status()[relay.upstream.machine.worker].bytes_sent - before
        assert 0 < sent <= 1 << 20, "one piece has changed, of four"


async def test_workers_connect_before_there_are_weights(tmp_path: Path) -> None:
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    sender, receiver = trainer(None, endpoint=up), worker(model := Model(0.0), connect=down)
    async with relaying(up, down), connected(sender, receiver, timeout=20):
        await sender.send_async(Model(2.0), timeout=20)
        assert read(model) == {2.0}


async def test_workers_and_relays_go_on_to_the_next_address_when_the_first_is_away(tmp_path: Path) -> None:
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    sender = trainer(Model(4.0), endpoint=up)
    receiver = worker(model := Model(0.0), connect=f"ipc://{tmp_path}/nobody,{up}")
    async with connected(sender, receiver, timeout=20):
        assert read(model) == {4.0}
        async with relaying(f"ipc://{tmp_path}/nobody,{up}", down) as relay:
            session = relay.upstream.machine.session
            assert await relay.upstream.wait(lambda: session.welcomed, 20)


async def test_a_lag_is_behind_the_trainer_which_a_relay_asks_and_not_behind_the_relay(tmp_path: Path) -> None:
    async with relayed(tmp_path, keep=tmp_path / "kept.safetensors") as (sender, _, receivers, models, source):
        for value in (2.0, 3.0):
            with receivers[0].hold():
                version = await sender.publish(fill(source, value))
                with pytest.raises(AckTimeout, match="it should have"):
                    await receivers[0].wait_lag(0, timeout=0.5)
            assert await asyncio.gather(*(one.wait_lag(0, timeout=5) for one in receivers)) == [version] * 2
            assert [read(model) for model in models] == [{value}] * 2
        await sender.shutdown()
        with pytest.raises(AckTimeout, match="has not answered"):
            await receivers[0].wait_lag(0, timeout=1.5)
        assert read(await receivers[0].fetch(timeout=5)) == {3.0}, "a relay that keeps the weights serves them"


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [False, True], ids=["frames", "shared memory"])
async def test_a_relay_that_is_killed_after_many_versions_serves_its_workers_at_once_when_it_is_back(
    tmp_path: Path, shared: bool
) -> None:
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    command = "-m", "asyncsync", "relay", "--upstream", up, "--bind", down, *(["--shared"] if shared else [])
    sender = trainer(source := Model(0.0), endpoint=up)
    kind = SharedMemWeightSyncScheme if shared else ZMQWeightSyncScheme
    receiver = worker(model := Model(), 0, kind, connect=down, reconnect=True)
    async with sender, receiver:
        with start(*command, cwd=tmp_path):
            await asyncio.gather(sender.connect(timeout=60), receiver.connect(timeout=60))
            for value in range(100):
                await sender.send_async(fill(source, value), timeout=20)
        await until(lambda: sender.status()[0].state == "lost", 20)
        with start(*command, cwd=tmp_path):
            await until(lambda: sender.status()[0].state == "live", 60)
            for value in range(100, 105):
                await sender.send_async(fill(source, value), timeout=5)
                assert read(model) == {value}


async def test_the_port_of_what_goes_to_all_is_that_of_the_address_where_the_sender_is(
    unused_tcp_port_factory: Callable[[], int],
) -> None:
    """At the next address nobody is subscribed to before its sender says where."""
    ports = [unused_tcp_port_factory() for _ in range(2)]
    sender = trainer(Model(4.0), endpoint=f"tcp://127.0.0.1:{ports[0]}", fanout=True)
    receiver = worker(Model(0.0), connect=f"tcp://127.0.0.1:{ports[0]},tcp://localhost:{ports[1]}", reconnect=True)
    async with receiver:
        async with sender:
            await asyncio.gather(sender.connect(timeout=20), receiver.connect(timeout=20))
            connection = receiver.bus.link.connection
            assert connection.fanout
        await until(lambda: connection.endpoint.startswith("tcp://localhost"), 10)
        for _ in range(10):
            assert not connection.fanout
            await asyncio.sleep(0.05)


async def test_a_welcome_that_is_read_when_the_connection_has_ended_keeps_nobody_there(tmp_path: Path) -> None:
    first, second = f"ipc://{tmp_path}/first", f"ipc://{tmp_path}/second"
    sender = trainer(Model(4.0), endpoint=first)
    receiver = worker(Model(0.0), connect=f"{first},{second}", reconnect=True)
    async with receiver:
        await asyncio.gather(sender.connect(timeout=20), receiver.connect(timeout=20))
        link = receiver.bus.link
        session = link.machine.session
        await sender.shutdown()
        await until(lambda: not session.online)
        link.machine.receive(replace(session.trainer, models={}), (), link.loop.time())
        await until(lambda: link.connection.endpoint == second)


async def test_a_process_of_this_host_is_not_watched_for_one_of_the_same_pid_on_another(tmp_path: Path) -> None:
    """As it is where each has a container of its own, and a worker has gone on to the next address."""
    sender = trainer(Model(4.0), endpoint=f"ipc://{tmp_path}/up")
    receiver = worker(Model(0.0), connect=f"ipc://{tmp_path}/up,ipc://{tmp_path}/next")
    async with connected(sender, receiver, timeout=20):
        link = receiver.bus.link
        assert link._watch is not None
        session = link.machine.session
        session.trainer = replace(session.trainer, boot="another host's")
        link._watch_trainer()
        assert link._watch is None


async def test_a_sender_that_is_at_no_address_is_lost_however_many_are_tried(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory: Callable[[], int]
) -> None:
    monkeypatch.setattr("asyncsync.net.rendezvous.AWAY_SECONDS", 2.0)
    addresses = [f"tcp://127.0.0.1:{unused_tcp_port_factory()}" for _ in range(3)]
    sender = trainer(Model(4.0), endpoint=addresses[0])
    receiver = worker(Model(0.0), connect=",".join(addresses), reconnect=True)
    async with receiver:
        await asyncio.gather(sender.connect(timeout=20), receiver.connect(timeout=20))
        link = receiver.bus.link
        assert not link.is_lost
        await sender.shutdown()
        await until(lambda: not link.machine.session.online)
        assert not link.connection.is_away(link.loop.time())
        await until(lambda: link.connection.is_away(link.loop.time()), 4)


def test_a_list_of_addresses_may_have_spaces_and_repetitions_and_each_is_checked() -> None:
    assert split_endpoints("tcp://a:5") == ("tcp://a:5",)
    assert split_endpoints("tcp://a:5,tcp://a:5, ipc:///tmp/x,y ,tcp://b:6") == (
        "tcp://a:5",
        "ipc:///tmp/x,y",
        "tcp://b:6",
    )
    with pytest.raises(ValueError, match=r"'tcp://192\.0\.2\.1:5' is reachable"):
        ZMQWeightSyncScheme(connect="tcp://127.0.0.1:5,tcp://192.0.2.1:5")


async def test_a_signal_ends_it_from_the_moment_on_that_it_is_ready(tmp_path: Path) -> None:
    make = partial(Relay, f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down")
    async with asyncio.timeout(20):
        await run(make, lambda relay: signal.raise_signal(signal.SIGINT))


async def test_an_address_in_use_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    addresses = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    async with relaying(*addresses):
        with pytest.raises(NotConnected, match="in use"):
            Relay(*addresses)


# -- the file ----------------------------------------------------------------------------------------------------------


def slab_of(flat: FlatWeights) -> Slab:
    slab = Slab(Layout.of(flat))
    pack(slab, flat)
    return slab


def test_what_is_kept_comes_back_as_it_was(tmp_path: Path) -> None:
    tied = torch.randn(3, 5)
    weights = {
        ("a", "b"): tied,
        ("half",): torch.randn(7).to(torch.bfloat16),
        ("scalar",): torch.tensor(3),
        ("empty",): torch.empty(0, 4),
        ("z",): tied,
    }
    slabs = {"policy": slab_of(FlatWeights(weights)), "critic": slab_of(FlatWeights({("a",): torch.ones(2)}))}
    path = tmp_path / "kept.safetensors"
    save(path, (5, 6), {m: (i + 1, slab, b"\x81") for i, (m, slab) in enumerate(slabs.items())})
    found = load(path)
    assert found is not None
    epoch, kept = found
    assert epoch == (5, 6)
    for i, (model_id, slab) in enumerate(slabs.items()):
        version, again, metadata = kept[model_id]
        assert (version, metadata, again.layout.digest) == (i + 1, b"\x81", slab.layout.digest)
        for p, tensor in slab.tensors().items():
            assert torch.equal(again.tensors()[p], tensor)
    _, texts = files.read(path)
    assert texts["policy.z"] == "policy.a.b"


def test_two_tensors_of_one_name_are_not_kept_as_one(tmp_path: Path) -> None:
    slabs = {"a": FlatWeights({("b", "c"): torch.ones(2)}), "a.b": FlatWeights({("c",): torch.zeros(2)})}
    path = tmp_path / "kept.safetensors"
    with pytest.raises(ValueError, match=r"one name in a file: a\.b\.c"):
        save(path, (5, 6), {model_id: (1, slab_of(flat), b"") for model_id, flat in slabs.items()})
    assert not path.exists()


@pytest.mark.promise(22)
def test_no_file_is_nothing_and_half_written_ones_are_removed(tmp_path: Path) -> None:
    half = tmp_path / ".kept.safetensors.0123abcd"
    half.mkdir()
    (half / "kept.safetensors").write_bytes(b"half")
    assert load(tmp_path / "kept.safetensors") is None
    assert not half.exists()


def test_what_somebody_is_writing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock belongs to who has opened the file, so one process shows what two would."""
    path = tmp_path / "kept.safetensors"
    begun: list[str] = []
    fsync = os.fsync

    def another_relay_begins(descriptor: int) -> None:
        if not path.exists():
            begun.extend(found.name for found in tmp_path.iterdir())
            assert load(path) is None
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", another_relay_begins)
    files.write(path, {"a": torch.ones(3)}, {})
    assert len(begun) == 1
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    assert torch.equal(files.read(path)[0]["a"], torch.ones(3))


@pytest.mark.parametrize("content", [b"", b"no", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kept.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="kept"):
        load(path)


# -- the command -------------------------------------------------------------------------------------------------------


async def test_keys_above_and_below(tmp_path: Path, unused_tcp_port_factory: Callable[[], int]) -> None:
    keys, below = tmp_path / "keys", tmp_path / "below"
    assert main(["keygen", str(keys), "--name", "relay"]) == 0
    assert main(["keygen", str(below), "--workers", "1"]) == 0
    up, down = (f"tcp://127.0.0.1:{unused_tcp_port_factory()}" for _ in range(2))
    sender = trainer(Model(3.0), endpoint=up, server_key=keys / "server.key_secret", clients=keys / "clients")
    of_below = KeyFiles.given(below / "server.key_secret", below / "clients", None)
    receiver = worker(
        model := Model(0.0), connect=down, server_key=below / "server.key",
        client_key=below / "client_secrets" / "worker-0.key_secret",
    )  # fmt: skip
    options = {"credentials": above(keys, "relay"), "keys": of_below}
    async with relaying(up, down, **options), connected(sender, receiver, timeout=20):
        assert read(model) == {3.0}


def above(keys: Path, name: str) -> Callable[[], Any]:
    """The credentials of a relay of this name."""
    files = KeyFiles.given(keys / "server.key", None, keys / "client_secrets" / f"{name}.key_secret")
    assert files is not None
    return partial(files.read_for_receiver, 0)


async def test_the_keys_of_a_list_of_addresses_are_for_those_by_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory: Callable[[], int]
) -> None:
    """From an address with keys to a relay without, and from there to the trainer, which has keys."""
    monkeypatch.setattr("asyncsync.net.rendezvous.UNREACHED_SECONDS", 0.2)
    assert main(["keygen", str(tmp_path), "--name", "host"]) == 0
    nobody, up = (f"tcp://127.0.0.1:{unused_tcp_port_factory()}" for _ in range(2))
    down = f"ipc://{tmp_path}/down"
    keys = {"server_key": tmp_path / "server.key", "client_key": tmp_path / "client_secrets" / "host.key_secret"}
    source, model = Model(1.0), Model(0.0)
    sender = trainer(source, endpoint=up, server_key=tmp_path / "server.key_secret", clients=tmp_path / "clients")
    receiver = worker(model, connect=f"{nobody},{down},{up}", reconnect=True, **keys)
    async with sender, receiver:
        async with relaying(up, down, credentials=above(tmp_path, "host")) as relay:
            await asyncio.gather(sender.connect(timeout=20), receiver.connect(timeout=20))
            assert sender.status()[0].relay == relay.upstream.machine.worker
            await sender.send_async(fill(source, 2.0), timeout=20)
        await until(lambda: sender.status()[0].relay is None and sender.status()[0].state == "live")
        await sender.send_async(fill(source, 3.0), timeout=20)
        assert read(model) == {3.0}


async def test_a_relay_without_a_trainer_is_told_from_one_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = f"ipc://{tmp_path}/down"
    async with relaying(f"ipc://{tmp_path}/up", down):
        command = ["fetch", down, "--out", str(tmp_path / "policy.safetensors"), "--timeout", "1"]
        assert await asyncio.to_thread(main, command) == 1
    assert "no version yet" in capsys.readouterr().err


@pytest.mark.requirement(242, 243)
@pytest.mark.parametrize("shared", [False, True], ids=["frames", "shared memory"])
async def test_staging_taking_and_failures_pass_through_a_relay(tmp_path: Path, shared: bool) -> None:
    up, down = f"ipc://{tmp_path}/up", f"ipc://{tmp_path}/down"
    cls = SharedMemWeightSyncScheme if shared else ZMQWeightSyncScheme
    sender = ZMQWeightSyncScheme(endpoint=up, min_workers=0)
    sender.init_on_sender(model_id="policy", model=Model(1, LARGE))
    receivers = [cls(connect=down) for _ in range(2)]
    for receiver in receivers:
        receiver.init_on_receiver("policy", anonymous=True, apply="on_take", reconnect=True)
    async with relaying(up, down, shared=shared), connected(sender, *receivers, timeout=20):
        places = [receiver.worker_idx for receiver in receivers]

        async def take(receiver: Any, version: int, error: Exception | None = None) -> set[float]:
            async with receiver.take(version, timeout=10) as taken:
                if error is not None:
                    raise error
                return {float(end) for _, tensor in taken.items() for end in tensor.aminmax()}

        assert [receiver.status()[receiver.worker_idx].target for receiver in receivers] == [1, 1]
        assert await asyncio.gather(*(take(receiver, 1) for receiver in receivers)) == [{1}, {1}]
        await until(lambda: [sender.status()[place].version for place in places] == [1, 1])
        version = await sender.stage(Model(2, LARGE))
        await sender.wait_staged(version, places, timeout=10)
        committing = asyncio.create_task(sender.commit(version, places, timeout=10))
        with pytest.raises(OSError, match="no room"):
            await take(receivers[0], version, OSError("no room"))
        assert await take(receivers[1], version) == {2}
        with pytest.raises(PartialSendError, match="OSError: no room") as caught:
            await committing
        assert (caught.value.acked, list(caught.value.failed)) == ({places[1]: version}, [places[0]])
        assert await take(receivers[0], version) == {2}
        await until(lambda: sender.status()[places[0]].version == version)
        published = await sender.publish(Model(3, LARGE))
        await sender.wait_staged(published, places, timeout=10)
        assert [sender.status()[place].staged for place in places] == [published, published]
        assert await asyncio.gather(*(take(receiver, published) for receiver in receivers)) == [{3}, {3}]
        await sender.wait_version(published, places, timeout=10)


@pytest.mark.requirement(244)
async def test_an_embedded_relay_receives_once_for_all_takers_of_its_process_and_host(tmp_path: Path) -> None:
    sender = ZMQWeightSyncScheme(endpoint=f"ipc://{tmp_path}/up", min_workers=0)
    sender.init_on_sender(model_id="policy", model=Model(1, LARGE))
    await sender.connect()
    relay = await asyncio.to_thread(EmbeddedRelay, sender.bus.endpoint)
    receivers = [sync.SharedMemWeightSyncScheme(connect=relay.endpoint) for _ in range(2)]
    for receiver in receivers:
        receiver.init_on_receiver("policy", anonymous=True, apply="on_take", reconnect=True)

    def follow(receiver: Any) -> list[set[float]]:
        receiver.connect(timeout=20)
        seen = []
        for version in (1, 2):
            with receiver.take(version, timeout=20) as taken:
                seen.append({float(end) for _, tensor in taken.items() for end in tensor.aminmax()})
        receiver.shutdown()
        return seen

    try:
        following = asyncio.gather(*(asyncio.to_thread(follow, receiver) for receiver in receivers))
        applied = lambda: [one.version for one in sender.status().values() if one.role == "worker"]  # noqa: E731
        await until(lambda: applied() == [1, 1], timeout=20)
        await sender.publish(Model(2, LARGE))
        assert await following == [[{1}, {2}], [{1}, {2}]]
        sent = [one.bytes_sent for one in sender.status().values() if one.role == "relay"]
        nbytes = sum(tensor.nbytes for tensor in Model(1, LARGE).state_dict().values())
        assert len(sent) == 1
        assert 2 * nbytes <= sent[0] <= 2.1 * nbytes
    finally:
        await asyncio.to_thread(relay.close)
        await sender.shutdown()
