"""Keys in files: who is let in over tcp, as which worker, and what the others are told."""

import asyncio
import errno
import os
import pickle
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection
from typing import Any

import pytest
import zmq
from zmq.auth import load_certificate

from asyncsync import ClosedError, NotConnected
from asyncsync.cli import main
from helpers import planted
from helpers.apis import Api, bare
from helpers.pairs import Clock, Model, connected, fill, read, receiver_of, until

pytestmark = pytest.mark.requirement(203)


def hello(worker: int, nonce: bytes = b"n" * 16) -> Any:
    return planted.message("Hello", worker, nonce, 1, 0, "", 0, None, {"policy": 0})


def keygen(directory: Path, *arguments: str) -> Path:
    assert main(["keygen", str(directory), *arguments]) == 0
    return directory


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Of two workers, and a host that may be any."""
    made = keygen(tmp_path / "keys", "--workers", "2", "--name", "host")
    capsys.readouterr()
    return made


class Site:
    """A trainer's address and keys; what each side constructs."""

    def __init__(self, api: Api, keys: Path, port: int) -> None:
        self.api = api
        self.keys = keys
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def sender(self, model: Any = None, **options: Any) -> Any:
        """Initialised, if there is a model."""
        arguments = {"server_key": self.keys / "server.key_secret", "clients": self.keys / "clients"}
        scheme = self.api.scheme(endpoint=self.endpoint, **{**arguments, **options})
        if model is not None:
            scheme.init_on_sender(model_id="policy", model=model)
        return scheme

    def receiver(self, worker: int, model: Any, key: str | None = None, **options: Any) -> Any:
        """``key``: the name of its certificate."""
        own = self.keys / "client_secrets" / f"{key or f'worker-{worker}'}.key_secret"
        reconnect = options.pop("reconnect", False)
        arguments = {"connect": self.endpoint, "server_key": self.keys / "server.key", "client_key": own}
        scheme = self.api.scheme(**{**arguments, **options})
        scheme.init_on_receiver("policy", model=model, worker_idx=worker, reconnect=reconnect)
        return scheme


@pytest.fixture
def site(api: Api, keys: Path, unused_tcp_port: int) -> Site:
    return Site(api, keys, unused_tcp_port)


@dataclass
class Run:
    """A sender, and worker 0, connected."""

    sender: Any
    receiver: Any
    source: Model
    model: Model

    async def goes_on(self, *others: int) -> None:
        """Nobody has disturbed them."""
        value = float(self.sender.version + 1)
        await self.sender.send_async(fill(self.source, value), worker_ids=0)
        assert read(self.model) == {value}
        assert list(self.sender.status()) == [0, *others]
        assert self.sender.status()[0].state == "live"


@asynccontextmanager
async def running(site: Site, **options: Any) -> AsyncIterator[Run]:
    sender = site.sender(source := Model(1.0), **options)
    async with connected(sender, receiver := site.receiver(0, model := Model())):
        assert read(model) == {1.0}
        yield Run(sender, receiver, source, model)


async def refused(scheme: Any, match: str) -> None:
    """It does not connect, and is told why, if not at the first attempt."""
    async with scheme:
        for _ in range(20):
            with pytest.raises(NotConnected) as caught:
                await scheme.connect(timeout=0.3)
            if re.search(match, str(caught.value)):
                return
    raise AssertionError(str(caught.value))


# -- who is let in


@pytest.mark.both_loops
async def test_listed_clients_connect_follow_and_come_again(site: Site) -> None:
    async with running(site) as run:
        async with site.receiver(1, other := Model()) as second:
            await second.connect(timeout=10)
            await run.sender.send_async(fill(run.source, 2.0), timeout=10)
            assert read(run.model) == read(other) == {2.0}
            assert run.sender.status().refused == {}
            assert run.receiver.status().refused == {}
        async with site.receiver(1, other := Model()) as second:
            await second.connect(timeout=10)
            assert read(other) == {2.0}


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
async def test_by_name_and_by_ipv6(site: Site, host: str) -> None:
    port = site.endpoint.rpartition(":")[2]
    connect = f"tcp://{host}:{port}"
    site.endpoint = f"tcp://[::]:{port}" if host == "[::1]" else f"tcp://0.0.0.0:{port}"
    sender = site.sender(Model(1.0))  # beyond loopback, without allow_plaintext
    async with connected(sender, site.receiver(0, model := Model(), connect=connect)):
        assert read(model) == {1.0}
        assert not sender.bus._settings().checksum, "CURVE has a checksum of its own"


@pytest.mark.promise(44)
@pytest.mark.parametrize("name", ["no key", "a key that is not listed", "the key of another server"])
async def test_nobody_else_is_let_in_and_all_are_told_why(
    site: Site, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = keygen(tmp_path / "elsewhere", "--workers", "1", "--name", "host")
    own = Path("client_secrets/worker-0.key_secret")
    # What the receiver has, and what it is told; the sender counts it by its name.
    options, told = {
        "no key": ({"server_key": None, "client_key": None}, "wants a key"),
        "a key that is not listed": ({"client_key": elsewhere / own}, "refused this key"),
        "the key of another server": (
            {"server_key": elsewhere / "server.key", "client_key": site.keys / own},
            "server_key=",
        ),
    }[name]
    async with running(site) as run:
        for worker in (0, 5):
            await refused(site.receiver(worker, model := Model(), **options), told)
            assert read(model) == {-1.0}
        if name != "the key of another server":
            command = ["fetch", site.endpoint, f"--out={tmp_path}/weights.safetensors"]
            if name != "no key":
                command += [f"--server-key={site.keys}/server.key", f"--client-key={elsewhere / own.with_stem('host')}"]
            with Clock(1.0):  # at once
                assert await asyncio.to_thread(main, command) == 1
            said = capsys.readouterr().err
            assert told in said
            assert "after" not in said
        # A receiver without keys that sees what the sender wants may hang up before that has read what it is.
        also = {"an incomplete handshake"} if name == "no key" else set()
        await until(lambda: bool(run.sender.status().refused.keys() & {name, *also}))
        assert set(run.sender.status().refused) <= {name, "an incomplete handshake"}
        assert sum(run.sender.status().refused.values()) <= 100, "it is tried again, and not without end"
        assert run.sender.bus.status().refused == run.sender.status().refused
        await run.goes_on()


async def test_where_every_connection_is_ended_at_once_keys_are_asked_for(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of a sender with keys may be, before it has said that it wants one."""
    host, port = site.endpoint.removeprefix("tcp://").split(":")
    async with await asyncio.start_server(lambda _, writer: writer.close(), host, int(port)):
        await refused(site.receiver(0, Model(), server_key=None, client_key=None), "wants a key")
        with Clock(1.0):
            command = ["fetch", site.endpoint, f"--out={tmp_path}/weights.safetensors"]
            assert await asyncio.to_thread(main, command) == 1
    assert "--server-key" in capsys.readouterr().err


@pytest.mark.promise(45)
@pytest.mark.parametrize("key", ["worker-1", "host"])
async def test_an_index_cannot_be_stolen(site: Site, key: str) -> None:
    """By a client that is listed: whose key is for another worker, or for any."""
    why = f"{key}'s key"
    async with running(site) as run:
        await refused(site.receiver(0, model := Model(), key), f"worker 0.*{why}")
        assert read(model) == {-1.0}
        assert run.sender.status().refused == {"the index of another worker": 1}
        await run.goes_on()
        await run.receiver.shutdown()
        # Its holder has left: the place stays its own all the same.
        await refused(site.receiver(0, Model(), key), why)
        async with site.receiver(0, model := Model()) as again:
            await again.connect(timeout=10)
            assert read(model) == {2.0}


async def test_a_key_for_any_worker_is_bound_to_the_first_place_and_may_have_several(site: Site) -> None:
    keygen(site.keys, "--name", "other")
    async with running(site) as run, site.receiver(3, Model(), "host") as one, site.receiver(4, Model(), "host") as two:
        await asyncio.gather(one.connect(timeout=10), two.connect(timeout=10))
        await refused(site.receiver(3, Model(), "other"), "but host is")
        assert set(run.sender.status()) == {0, 3, 4}


@asynccontextmanager
async def listed(site: Site, key: str, routing_id: bytes) -> AsyncIterator[Any]:
    """A socket of a listed client, which says what it likes."""
    with keyed(zmq.DEALER, site.keys / "client_secrets" / f"{key}.key_secret", site.keys / "server.key") as socket:
        socket.routing_id = routing_id
        socket.connect(site.endpoint)
        yield socket


@contextmanager
def keyed(kind: int, own: Path, server: Path) -> Iterator[Any]:
    """A socket that has keys from files."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.curve_publickey, socket.curve_secretkey = load_certificate(own)
        socket.curve_serverkey, _ = load_certificate(server)
        yield socket


@pytest.mark.promise(45)
async def test_a_listed_client_cannot_speak_for_a_worker_by_its_route(site: Site) -> None:
    """Whoever has a key may send what it likes: nothing of it is taken for another worker's."""
    async with running(site) as run:
        machine = bare(run.sender).bus.link.machine
        [route] = machine.membership.routes
        async with listed(site, "worker-1", b"mine") as socket:
            socket.send(hello(0))
            socket.send(planted.message("Bye", machine.membership.epoch, machine.peers[0].nonce, "closed", ""))
            socket.send(planted.message("Ping", machine.membership.epoch, 1))
            await until(lambda: sum(run.sender.bus.dropped.values()) == 3)
            assert list(machine.membership.routes) == [route]
            await run.goes_on()


async def test_a_route_that_was_another_workers_before_gives_nobody_its_place(site: Site) -> None:
    async with running(site) as run:
        async with listed(site, "worker-1", b"route") as socket:
            socket.send(hello(1))
            await until(lambda: 1 in run.sender.status())
        async with listed(site, "host", b"route") as socket:
            for _ in range(50):  # until the other connection has gone
                socket.send(hello(3, b"m" * 16))
                await asyncio.sleep(0.02)
                if run.sender.status().refused:
                    break
            assert set(run.sender.status().refused) == {"the index of another worker"}
            assert 3 not in run.sender.status()
        await run.goes_on(1)


# -- plaintext, and what is missing


@pytest.mark.promise(47)
async def test_a_receiver_with_keys_does_not_talk_to_a_sender_without(site: Site) -> None:
    plain = site.api.scheme(endpoint=site.endpoint)
    plain.init_on_sender(model_id="policy", model=Model(1.0), num_workers=1)
    async with plain:
        connecting = asyncio.ensure_future(plain.connect(timeout=1.5))
        await refused(site.receiver(0, model := Model()), "no keys|server_key=")
        with pytest.raises(NotConnected, match="worker 0"):
            await connecting
        assert read(model) == {-1.0}


async def test_a_receiver_that_was_refused_is_named_and_finds_the_next_sender(site: Site) -> None:
    """One without keys, after one with keys: libzmq itself would not try again."""
    keyed, plain = site.sender(Model(1.0), num_workers=1), site.api.scheme(endpoint=site.endpoint)
    receiver = site.receiver(0, model := Model(), server_key=None, client_key=None)
    async with receiver, plain:
        async with keyed:
            connecting = asyncio.ensure_future(receiver.connect(timeout=20))
            with pytest.raises(NotConnected, match=r"refused: (no key|an incomplete handshake) \("):
                await keyed.connect(timeout=0.6)
            await until(lambda: bool(receiver.status().refused))
        plain.init_on_sender(model_id="policy", model=Model(2.0), num_workers=1)
        await asyncio.gather(plain.connect(timeout=20), connecting)
        assert read(model) == {2.0}
        assert receiver.status()[0].reason == ""


@pytest.mark.promise(47)
async def test_keys_are_never_left_out_silently(site: Site) -> None:
    """A scheme that has the other side's keys only does not fall back to plaintext."""
    sender = site.api.scheme(
        endpoint=site.endpoint, server_key=site.keys / "server.key_secret", client_key=site.keys / "x"
    )
    sender.init_on_sender(model_id="policy", model=Model(), num_workers=1)
    async with sender:
        with pytest.raises(ValueError, match="clients="):
            await sender.connect(timeout=1)
    receiver = site.sender()
    receiver.init_on_receiver("policy", model=Model(), worker_idx=0)
    async with receiver:
        with pytest.raises(ValueError, match="client_key="):
            await receiver.connect(timeout=1)


@pytest.mark.parametrize("missing", [0, 1, 2, 3], ids=["what checks keys", "its socket", "the bus", "what watches it"])
async def test_a_connect_that_cannot_check_keys_or_finds_no_descriptors_binds_nothing_and_may_be_called_again(
    site: Site, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind, new_socket, bound, left = zmq.Socket.bind, zmq.Context.socket, [], missing

    def binding(self: Any, address: str) -> Any:
        if not missing and address == "inproc://zeromq.zap.01":  # ZeroMQ's own name of what checks keys
            raise zmq.ZMQError(zmq.EADDRINUSE)
        bound.append(address)
        return bind(self, address)

    def socket(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise zmq.ZMQError(errno.EMFILE)
        return new_socket(self, *args, **options)

    async with site.sender(Model(1.0), num_workers=1) as sender, site.receiver(0, Model()) as receiver:
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Socket, "bind", binding)
            patch.setattr(zmq.Context, "socket", socket)
            with pytest.raises(NotConnected, match="Too many open files" if missing else "ZAP"):
                await sender.connect(timeout=5)
        assert missing or bound == []
        await asyncio.gather(sender.connect(timeout=10), receiver.connect(timeout=10))


async def test_strangers_cannot_stop_a_trainer_that_is_busy_with_handshakes(site: Site) -> None:
    """More of them than libzmq keeps events for, by default, while its event loop does something else."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    host, _, port = site.endpoint.removeprefix("tcp://").rpartition(":")

    def knock(times: int) -> None:
        for _ in range(times):
            with create_connection((host, int(port)), timeout=5) as stranger:
                stranger.sendall(greeting)
                with suppress(ConnectionError):
                    while stranger.recv(100):
                        pass

    async with running(site) as run:
        knock(2200)  # on the asynchronous scheme's own loop
        await run.goes_on()
        await until(lambda: sum(run.sender.status().refused.values()) == 2200)


# -- while it runs


@pytest.mark.both_loops
async def test_a_client_that_is_listed_later_gets_in_without_a_restart(site: Site) -> None:
    public = site.keys / "clients" / "worker-1.key"
    public.rename(site.keys / "aside")
    async with running(site) as run, site.receiver(1, model := Model()) as late:
        connecting = asyncio.ensure_future(late.connect(timeout=20))
        await until(lambda: run.sender.status().refused.get("a key that is not listed", 0) > 0)
        (site.keys / "aside").rename(public)
        await connecting
        assert read(model) == {1.0}
        assert late.status().refused, "what it was told before"


async def test_who_is_taken_off_the_list_hears_nothing_that_is_sent_to_all(site: Site) -> None:
    """A subscriber cannot be cut off: the others go to another port."""
    keygen(site.keys, "--name", "third=2", "--name", "fourth=3")
    names = ["worker-0", "worker-1", "third", "fourth"]
    models = [Model() for _ in names]
    sender = site.sender(source := Model(1.0), fanout=True, min_workers=3)
    receivers = [site.receiver(worker, models[worker], name) for worker, name in enumerate(names)]
    async with connected(sender, *receivers, timeout=20):
        before = planted.broadcast_of(sender).port
        await until(lambda: len(planted.subscribed(sender)) == 4, 10)
        with keyed(zmq.SUB, site.keys / "client_secrets" / "fourth.key_secret", site.keys / "server.key") as spy:
            spy.subscribe(b"")
            spy.connect(f"tcp://127.0.0.1:{before}")
            heard = 0
            while not heard:
                await sender.send_async(fill(source, float(sender.version + 1)), timeout=10)
                heard = spy.poll(50)
            (site.keys / "clients" / "fourth.key").unlink()
            await until(lambda: sender.status()[3].state == "lost" and len(planted.subscribed(sender)) == 3, 15)
            assert planted.broadcast_of(sender).port != before
            while spy.poll(50):
                spy.recv_multipart()
            for _ in range(3):
                await sender.send_async(fill(source, value := float(sender.version + 1)), worker_ids=None, quorum=3)
                assert [read(model) for model in models[:3]] == [{value}] * 3
            assert not spy.poll(200)


async def test_keys_that_are_taken_off_the_list_one_by_one_take_no_descriptors(site: Site) -> None:
    """Each time there is another port for what is sent to all, and nothing is left of the one before."""
    names = [f"former-{i}" for i in range(4)]
    keygen(site.keys, *(argument for name in names for argument in ("--name", name)))
    async with running(site, fanout=True) as run:
        link = run.sender.bus.link
        await until(lambda: len(link.machine.fanout.subscribed) == 1)
        before, port = len(os.listdir("/proc/self/fd")), link.broadcast.port
        for removed, name in enumerate(names, 1):
            (site.keys / "clients" / f"{name}.key").unlink()
            await until(lambda n=removed: link.admission.listed.removed == n and link._keys_removed == n)
            await until(lambda: link.broadcast is not None)  # the blocking API's loop has a thread of its own
        assert link.broadcast.port != port
        await until(lambda: len(link.machine.fanout.subscribed) == 1)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        await run.goes_on()


@pytest.mark.promise(46)
async def test_a_client_that_is_taken_off_the_list_is_sent_away_and_its_place_is_free(site: Site) -> None:
    async with running(site) as run:
        (site.keys / "clients" / "worker-0.key").unlink()
        await until(lambda: run.sender.status()[0].state == "lost")
        assert run.sender.status()[0].reason == "its key was taken off the list of clients"
        await until(lambda: run.receiver.closed)
        with pytest.raises((NotConnected, ClosedError), match="key"):
            await run.receiver.receive()
        await run.sender.publish(fill(run.source, 2.0))
        assert read(run.model) == {1.0}
        await refused(site.receiver(0, Model()), "refused this key")
        # A new key for the same worker.
        keygen(site.keys, "--name", "successor=0")
        async with site.receiver(0, model := Model(), "successor") as again:
            await again.connect(timeout=10)
            assert read(model) == {2.0}


async def test_whose_key_was_replaced_is_sent_away_even_if_the_new_one_is_first(site: Site, tmp_path: Path) -> None:
    """Its holder claims the place before anybody has looked whose key is gone, and then says nothing any more."""
    elsewhere = keygen(tmp_path / "new", "--workers", "1")
    async with running(site) as run:
        await planted.between_looks(run.sender)
        os.replace(elsewhere / "clients" / "worker-0.key", site.keys / "clients" / "worker-0.key")
        own = elsewhere / "client_secrets" / "worker-0.key_secret"
        with keyed(zmq.DEALER, own, site.keys / "server.key") as newcomer:
            newcomer.connect(site.endpoint)
            newcomer.send(hello(0))
            await until(lambda: run.receiver.closed)
            with pytest.raises((NotConnected, ClosedError), match="key"):
                await run.receiver.receive()


async def test_the_servers_key_is_replaced_by_a_restart_with_both_at_the_receivers(site: Site, tmp_path: Path) -> None:
    new = keygen(tmp_path / "new")
    both = [site.keys / "server.key", new / "server.key"]
    model, source = Model(), Model(1.0)
    async with site.receiver(0, model, server_key=both, reconnect=True) as receiver:
        for version, directory in enumerate((site.keys, new, site.keys), 1):
            async with site.sender(fill(source, float(version)), server_key=directory / "server.key_secret") as sender:
                await asyncio.gather(sender.connect(timeout=20), receiver.connect(timeout=20))
                await until(lambda v=float(version): read(model) == {v})


async def test_a_receivers_files_are_read_again_when_it_was_refused(site: Site, tmp_path: Path) -> None:
    """So a receiver that waits needs no restart either: the right file is put in place."""
    right = site.keys / "server.key"
    wrong = tmp_path / "server.key"
    shutil.copy(keygen(tmp_path / "new") / "server.key", wrong)
    async with running(site), site.receiver(1, model := Model(), server_key=wrong) as late:
        connecting = asyncio.ensure_future(late.connect(timeout=20))
        await until(lambda: bool(late.status().refused))
        assert "server_key=" in late.status()[1].reason
        shutil.copy(right, wrong)
        await connecting
        assert read(model) == {1.0}


# -- files and arguments


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"server_key": "missing"}, "missing"),
        ({"clients": "missing"}, "missing"),
        ({"server_key": "server.key"}, "secret"),
        ({}, "nobody.key_secret"),
    ],
)
async def test_files_that_are_wrong_are_named_before_anything_is_bound(
    site: Site, given: dict[str, str], named: str
) -> None:
    """A sender's, of which one is the public file in place of the secret one; or a receiver's."""
    if given:
        scheme = site.sender(Model(), **{argument: site.keys / name for argument, name in given.items()})
    else:
        scheme = site.receiver(0, Model(), "nobody")
    await refused(scheme, named)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(site.endpoint)


@pytest.mark.promise(48)
async def test_one_scheme_for_both_sides_carries_paths_and_no_secrets(site: Site) -> None:
    secrets = site.keys / "client_secrets"
    sender = site.sender(Model(1.0), client_key=secrets / "worker-{worker_idx}.key_secret", num_workers=2)
    pickled = pickle.dumps(sender)
    for path in [*secrets.iterdir(), site.keys / "server.key_secret"]:
        _, secret = load_certificate(path)
        assert secret
        assert secret not in pickled
    models = [Model(), Model()]
    receivers = [pickle.loads(pickled) for _ in models]
    for worker, receiver in enumerate(receivers):
        receiver.init_on_receiver("policy", model=models[worker], worker_idx=worker)
    async with connected(sender, *receivers):
        assert [read(model) for model in models] == [{1.0}, {1.0}]


async def test_a_shared_bus_has_keys_as_a_scheme_has(site: Site) -> None:
    api, keys = site.api, site.keys
    with pytest.raises(ValueError, match="Bus"):
        api.scheme(bus=api.bus(site.endpoint), server_key="x", clients="y")
    bus = api.bus(
        site.endpoint,
        server_key=keys / "server.key_secret",
        clients=keys / "clients",
        client_key=keys / "client_secrets" / "worker-{worker_idx}.key_secret",
        num_workers=1,
    )
    scheme = api.make(api.SharedMemWeightSyncScheme, bus=bus)  # its instructions go over the bus
    scheme.init_on_sender(model_id="policy", model=Model(1.0))
    async with connected(bus, receiver_of(scheme, 0, model := Model())):
        assert read(model) == {1.0}
        await refused(site.receiver(0, Model(), "worker-1"), "refused worker 0")
        assert bus.status().refused == {"the index of another worker": 1}


TCP = "tcp://10.0.0.3:5555"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"endpoint": TCP, "clients": "c"}, "server_key="),
        ({"endpoint": TCP, "client_key": "c"}, "server_key="),
        ({"endpoint": TCP, "server_key": "s"}, "clients="),
        ({"endpoint": TCP, "server_key": [], "clients": "c"}, "file"),
        ({"server_key": "s", "clients": "c"}, "endpoint"),
        ({"server_key": "s", "client_key": "c"}, "connect"),
        ({"endpoint": "ipc:///tmp/x", "server_key": "s", "clients": "c"}, "permissions"),
        ({"connect": TCP, "server_key": "s", "client_key": b"secret"}, "client_key"),
    ],
)
def test_arguments_that_cannot_be_are_refused(api: Api, given: dict[str, Any], word: str) -> None:
    for kind in (api.bus, api.scheme):
        with pytest.raises((TypeError, ValueError), match=word):
            kind(**given)
    with pytest.raises(TypeError, match="argument"):
        api.SharedMemWeightSyncScheme(**given)
