"""Schemes, transports and strategies of a user's own, outside any collector."""

import asyncio
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from asyncsync import PartialSendError, RemoteError, TransportBackend, WeightStrategy, WeightSyncScheme, sync
from helpers import planted
from helpers.apis import Api
from helpers.pairs import Clock, Model, fill, read, receiver_of

pytestmark = pytest.mark.requirement(2)


def _read(descriptor: bytes) -> bytes:
    return Path(os.fsdecode(descriptor)).read_bytes()


class FileTransport(TransportBackend):
    """Slabs as files in a directory that both sides can reach."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0
        self.offered: list[list[int] | None] = []
        self.fetched = 0
        self.closed = 0

    async def offer(self, slab: Any, workers: Iterable[int] | None) -> bytes:
        self.count += 1
        self.offered.append(None if workers is None else list(workers))
        path = self.directory / f"slab-{self.count}"
        await asyncio.to_thread(path.write_bytes, slab.memory)
        return os.fsencode(path)

    def retire(self, descriptor: bytes) -> None:
        os.unlink(descriptor)

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        assert deadline > asyncio.get_running_loop().time()
        data = await asyncio.to_thread(_read, descriptor)
        into[:] = data
        self.fetched += 1

    def close(self) -> None:
        self.closed += 1


class Filing:
    """What makes a scheme of a user's own; what it adds travels with its pickle."""

    def __init__(self, directory: Path, kind: type[TransportBackend], **options: Any) -> None:
        super().__init__(**options)
        self.directory = directory
        self.kind = kind

    def create_transport(self, **kwargs: Any) -> TransportBackend:
        return self.kind(self.directory)  # type: ignore[call-arg]


class FileScheme(Filing, WeightSyncScheme):
    pass


class BlockingFileScheme(Filing, sync.WeightSyncScheme):
    pass


def file_scheme(api: Api, directory: Path, kind: type[TransportBackend] = FileTransport, **options: Any) -> Any:
    return api.make(api.either(FileScheme, BlockingFileScheme), directory, kind, **options)


@pytest.mark.requirement(1)
@pytest.mark.both_loops
@pytest.mark.parametrize("width", [16, 1 << 20])
async def test_a_users_scheme_and_transport_work_outside_collectors(api: Api, width: int, tmp_path: Path) -> None:
    models = [Model(width=width), Model(width=width)]
    scheme = file_scheme(api, tmp_path, strategy=(strategy := WeightStrategy()))
    async with api.crew(2, scheme=scheme, source=Model(1, width), models=models) as everybody:
        sender, receivers, _ = everybody
        assert sender.strategy is strategy
        assert type(sender.shared_transport) is FileTransport, "the scheme has created it"
        assert everybody.read == [{1}, {1}]
        for value in (2, 3, 4):
            await sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
        assert [r.receiver_transport.fetched for r in receivers] == [4, 4]
        assert sender.status()[0].bytes_sent < 1024, "the bytes did not go over the bus"
        await sender.send_async(Model(7, width), worker_ids=1)
        assert everybody.read == [{4}, {7}]
        assert sender.shared_transport.offered == [None, None, None, None, [1]]
        await sender.send_async({0: Model(8, width), 1: Model(9, width)})
        assert everybody.read == [{8}, {9}]
        assert len(os.listdir(tmp_path)) <= 3, "what nobody can ask for any more is retired"
        await receivers[0].shutdown()
        late = receiver_of(sender, 0, model := Model(width=width))
        await late.connect(timeout=5)
        assert read(model) == {8}
        await late.shutdown()
    assert os.listdir(tmp_path) == [], "everything is retired at the end"
    assert all(s.carrier.closed for s in (sender, *receivers))


@pytest.mark.requirement(199)
async def test_one_update_of_two_models_may_travel_in_two_ways(api: Api, tmp_path: Path) -> None:
    def make(name: str, bus: Any) -> Any:
        return file_scheme(api, tmp_path, bus=bus) if name == "file" else api.scheme(bus=bus)

    async with api.family(names=("file", "zmq"), make=make) as everybody:
        for value in (2.0, 3.0):
            with Clock(1.0):  # not after the 5 s in which bytes that are missing are asked for again
                await everybody.bus.send_async({name: Model(value) for name in everybody.schemes}, timeout=10)
            assert everybody.read == [{"file": {value}, "zmq": {value}}]


async def _no_disk(descriptor: bytes, into: memoryview, deadline: float) -> None:
    raise OSError("no disk")


async def test_a_transport_that_fails_fails_one_update(api: Api, tmp_path: Path) -> None:
    async with api.crew(2, scheme=file_scheme(api, tmp_path)) as everybody:
        sender, receivers, _ = everybody
        broken = receivers[1].receiver_transport
        original, broken.fetch = broken.fetch, _no_disk
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            await sender.send_async(fill(everybody.source, 2), timeout=5)
        error = caught.value.failed[1]
        assert isinstance(error, RemoteError)
        assert error.type_name == "builtins.OSError"
        assert "_no_disk" in error.remote_traceback
        assert everybody.read == [{2}, {0}]
        broken.fetch = original
        version = await sender.send_async(fill(everybody.source, 3), timeout=5)
        assert everybody.read == [{3}, {3}]
        sender.shared_transport.directory = tmp_path / "missing"
        with pytest.raises(FileNotFoundError):
            await sender.publish(fill(everybody.source, 4))
        assert (sender.version, everybody.read) == (version, [{3}, {3}]), "nothing was published"
        sender.shared_transport.directory = tmp_path
        await sender.send_async()
        assert everybody.read == [{4}, {4}]


class Stubborn(FileTransport):
    """Its second fetch leaves the writing to a thread, which goes on when the coroutine is cancelled, once ``old`` is
    set; then ``written`` is."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fetches = 0
        self.old, self.written = threading.Event(), threading.Event()

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        self.fetches += 1
        data = _read(descriptor)
        if self.fetches == 2:  # the first one brings the initial weights
            await asyncio.to_thread(self._write_late, into[:64], data)
            raise AssertionError("it was not cancelled")
        into[:] = data
        if self.fetches > 2:
            self.old.set()
            assert await asyncio.to_thread(self.written.wait, 10)

    def _write_late(self, into: memoryview, data: bytes) -> None:
        assert self.old.wait(10)
        into[:] = data[: len(into)]
        self.written.set()


async def test_a_fetch_that_writes_on_after_its_deadline_does_not_write_into_the_next_update(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api.crew(1, scheme=file_scheme(api, tmp_path, Stubborn)) as everybody:
        sender, [receiver], _ = everybody
        planted.fetch_deadline(monkeypatch, 0.05)
        with pytest.raises(PartialSendError, match="TimeoutError"):
            await sender.send_async(fill(everybody.source, 1))
        assert everybody.read == [{0}]
        planted.fetch_deadline(monkeypatch, 60.0)
        await sender.send_async(fill(everybody.source, 2))
        assert receiver.receiver_transport.written.is_set(), "while the next update was fetched"
        assert everybody.read == [{2}]
        for value in (3, 4):
            await sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}]
        assert planted.pool(receiver).slabs <= 2, "nothing refers to the first one's memory any more"


class Minimal(TransportBackend):
    """fetch is all that must be written; without a descriptor the bytes go over the bus."""

    def __init__(self, directory: Path) -> None:
        """It needs none."""

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        raise AssertionError("there is no descriptor")


async def test_a_transport_without_an_offer_of_its_own_uses_the_bus(api: Api, tmp_path: Path) -> None:
    width, scheme = 1 << 18, file_scheme(api, tmp_path, Minimal)
    async with api.crew(1, scheme=scheme, source=Model(1, width), models=[Model(width=width)]) as everybody:
        await everybody.sender.send_async(fill(everybody.source, 2))
        assert everybody.read == [{2}]
