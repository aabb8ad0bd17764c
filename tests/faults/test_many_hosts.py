"""Many hosts: real network namespaces, a trainer here and workers there, with relays and without. Hosts are unplugged,
trainers and relays are killed or restarted. Everybody ends on the newest version, and nobody has ever read a torn one:
each worker looks at its model all the time, from another thread.

Where namespaces cannot be made, these tests fail: a skip would hide that nothing was shown.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncsync import AutoWeightSyncScheme, PartialSendError, ZMQWeightSyncScheme
from helpers.far_host import far_worker
from helpers.hosts import LARGE, Host, Hosts, Process, hosts, programs, until, values
from helpers.pairs import Model, fill
from helpers.processes import Schemes, Start, Worker
from helpers.ranks import free_port
from helpers.shared_workers import MIB

PORT = 5555
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(200), pytest.mark.xdist_group("hosts")]


@pytest.fixture(scope="module")
def three_programs() -> Iterator[Any]:
    with programs(3) as started:
        yield started


@pytest.fixture
async def three(three_programs: Any) -> AsyncIterator[Hosts]:
    async with hosts(*three_programs) as found:
        yield found


class Trainer:
    """A trainer at an address of its own, that can be restarted there; ``count`` is what it has published last."""

    def __init__(self, address: str) -> None:
        self.endpoint = f"tcp://{address}:{PORT}"
        self.source = Model(0.0, LARGE)
        self.count = 0
        self.scheme: Any = None

    async def connect(self, num_workers: int) -> None:
        self.scheme = ZMQWeightSyncScheme(endpoint=self.endpoint, num_workers=num_workers, allow_plaintext=True)
        self.count += 1
        self.scheme.init_on_sender(model_id="policy", model=fill(self.source, float(self.count)))
        await self.scheme.connect(timeout=90)

    async def send(self, timeout: float = 30) -> int:
        self.count += 1
        return int(await self.scheme.send_async(fill(self.source, float(self.count)), timeout=timeout))

    async def late(self) -> set[int]:
        """Send; who has not applied it."""
        try:
            await self.send(timeout=5)
        except PartialSendError as error:
            return set(error.failed)
        return set()

    async def publish(self) -> int:
        self.count += 1
        return int(await self.scheme.publish(fill(self.source, float(self.count))))

    async def everywhere(self, workers: list[Process], seconds: float = 60) -> None:
        await until(
            lambda: values(workers) == [self.count] * len(workers), seconds, lambda: (self.count, values(workers))
        )


@pytest.fixture
async def trainer(three: Hosts) -> AsyncIterator[Trainer]:
    trainer = Trainer(three.address)
    yield trainer
    if trainer.scheme is not None:
        await trainer.scheme.shutdown()


def endpoint_of(i: int, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/relay{i}"


def staff(hosts: list[Host], trainer: Trainer, tmp_path: Path, kind: str, first: int = 0) -> list[Process]:
    """Two workers in each host, and a relay for them where there are to be some."""
    workers = []
    for i, host in enumerate(hosts, first):
        connect = trainer.endpoint
        if kind != "direct":
            connect = endpoint_of(i, tmp_path)
            options = ["--shared"] if kind == "shared" else []
            host.relay(trainer.endpoint, connect, *options)
        kinds = "shared" if kind == "shared" else "zmq"
        workers += [host.worker(2 * i + j, connect, kind=kinds) for j in range(2)]
    return workers


@pytest.mark.requirement(198, 206)
@pytest.mark.parametrize("kind", ["direct", "relays", "shared"])
async def test_a_host_is_unplugged_in_the_middle_the_trainer_is_restarted_and_a_late_host_joins(
    three: Hosts, trainer: Trainer, tmp_path: Path, kind: str
) -> None:
    late = three.pop()
    workers = staff(three, trainer, tmp_path, kind)
    await trainer.connect(4)
    for _ in range(3):
        await trainer.send()
        await trainer.everywhere(workers, 1)
    status = trainer.scheme.status()
    assert [status[w].relay is None for w in range(4)] == [kind == "direct"] * 4
    if kind != "direct":  # one copy for each host, however many workers it has
        sent = sum(one.bytes_sent for one in status.values())
        assert sent < 1.2 * 2 * trainer.count * 4 * LARGE
    await unplug_in_the_middle(three[1], trainer, workers)
    with pytest.raises(PartialSendError) as failed:
        await trainer.send(timeout=3)
    assert (sorted(failed.value.failed), sorted(failed.value.acked)) == ([2, 3], [0, 1])
    three[1].plug()
    await trainer.everywhere(workers)
    await trainer.send()
    await trainer.everywhere(workers, 1)

    trainer.scheme.bus.link.shut_down_without_loop(0)  # as with kill -9: no BYE, and the sockets are gone
    three.append(late)
    workers += staff([late], trainer, tmp_path, kind, first=2)
    await trainer.connect(6)
    await trainer.everywhere(workers, 5)
    for _ in range(3):
        await trainer.send()
    await trainer.everywhere(workers, 1)


async def unplug_in_the_middle(host: Host, trainer: Trainer, workers: list[Process]) -> None:
    """Publish, and unplug before this host's workers have it."""
    cut = workers[2:4]
    for _ in range(20):
        await trainer.publish()
        host.unplug()
        await asyncio.sleep(0.5)
        if all(worker.value < trainer.count for worker in cut):
            return
        host.plug()
        await trainer.everywhere(workers)
    pytest.fail("this host was too fast each time")


@pytest.mark.requirement(206)
@pytest.mark.promise(21)
@pytest.mark.parametrize("shared", [False, True], ids=["frames", "shared"])
async def test_a_killed_relay_loses_nobody(three: Hosts, trainer: Trainer, tmp_path: Path, shared: bool) -> None:
    """Of the three relays one is killed and restarted, one is killed for good: its workers go on to the trainer."""
    kind = "shared" if shared else "zmq"
    relays, workers = [], []
    for i, host in enumerate(three):
        there = endpoint_of(i, tmp_path)
        relays.append(host.relay(trainer.endpoint, there, *(["--shared"] * shared)))
        # A worker that reads shared memory cannot do so at the trainer: those of the second host read frames.
        for w in (2 * i, 2 * i + 1):
            workers.append(host.worker(w, f"{there},{trainer.endpoint}" if i == 1 else there, kind=kind))
    await trainer.connect(6)
    await trainer.send()
    await trainer.everywhere(workers, 1)
    relays[0].kill()
    relays[1].kill(signal.SIGKILL)
    three[0].relay(trainer.endpoint, endpoint_of(0, tmp_path), *(["--shared"] * shared))

    late = {0}
    deadline = asyncio.get_running_loop().time() + 40
    while late and asyncio.get_running_loop().time() < deadline:
        late = await trainer.late()
        assert late <= {0, 1, 2, 3}
        await asyncio.sleep(0.3)
    await trainer.everywhere(workers, 10)
    status = trainer.scheme.status()
    assert [status[w].relay is None for w in range(6)] == [False, False, True, True, False, False]


@pytest.mark.requirement(206)
async def test_relays_stack(three: Hosts, trainer: Trainer, tmp_path: Path) -> None:
    three[0].relay(trainer.endpoint, f"ipc://{tmp_path}/first")
    for i in (0, 1):
        three[0].relay(f"ipc://{tmp_path}/first", endpoint_of(i, tmp_path))
    workers = [three[0].worker(w, endpoint_of(w // 2, tmp_path)) for w in range(4)]
    await trainer.connect(4)
    for _ in range(3):
        await trainer.send()
        await trainer.everywhere(workers, 1)
    assert len({one.relay for w, one in trainer.scheme.status().items() if w < 4}) == 1


async def test_one_update_reaches_a_worker_of_this_host_and_one_of_another(
    three: Hosts, schemes: Schemes, start: Start
) -> None:
    sender = schemes.sender(
        MIB,
        kind=AutoWeightSyncScheme,
        endpoint=f"tcp://{three.address}:{free_port()}",
        allow_plaintext=True,
        num_workers=2,
        map_above=0,
        delta=True,
    )
    near = start(Worker)
    away = await far_worker(three[0].name, sender, 1, MIB)
    try:
        await asyncio.gather(sender.connect(), near.connect(sender, 0, MIB))
        assert int(await away.ask("pid")) < 10, "it has pids of its own"
        for value in range(2, 22):
            await sender.send_async(sender.model.fill(value))
            assert [await near.value(), await away.shown()] == [value, value]
        status = sender.status()
        assert status[0].bytes_sent == 0
        assert status[1].bytes_sent == 21 << 20
    finally:
        await away.end()
