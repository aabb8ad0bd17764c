"""The requirements that speak of processes: a scheme as an argument, shutdown and join, a crash."""

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

import asyncsync
from asyncsync import PartialSendError
from helpers.apis import Api, face
from helpers.pairs import Clock, Model, fill, until
from helpers.processes import Filled, Remote, Worker
from helpers.workers import follow


def told(connection: Connection) -> Any:
    assert connection.poll(30), "the worker is silent"
    return connection.recv()


@pytest.mark.requirement(13, 36, 213)
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("method", "name", "blocking_trainer"),
    [
        pytest.param("spawn", "ZMQWeightSyncScheme", False, marks=pytest.mark.thorough),
        ("fork", "SharedMemWeightSyncScheme", False),
        ("forkserver", "MultiProcessWeightSyncScheme", False),
        ("forkserver", "SharedMemWeightSyncScheme", True),
    ],
)
def test_a_scheme_is_a_process_argument_and_its_shutdown_lets_the_workers_join(
    method: str, name: str, blocking_trainer: bool
) -> None:
    context = multiprocessing.get_context(method)
    scheme = getattr(asyncsync, name)()
    scheme.init_on_sender(model_id="policy", model=(source := Model(1)), num_workers=2)
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=follow, args=(scheme, i, there)) for i, (_, there) in enumerate(pipes)]
    for worker in workers:
        worker.start()
    here = [pipe for pipe, _ in pipes]
    try:

        async def train() -> None:
            async with face(scheme.blocking) if blocking_trainer else scheme as trainer:
                await trainer.connect(timeout=50)
                assert [told(pipe) for pipe in here] == [{1}, {1}]
                for value in (2, 3):
                    await trainer.send_async(fill(source, value), timeout=10)
                    assert [told(pipe) for pipe in here] == [{value}, {value}]

        asyncio.run(train())
        assert [told(pipe) for pipe in here] == [("closed", True)] * 2
        with Clock(2.0):
            for worker in workers:
                worker.join(10)
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        for worker, (a, b) in zip(workers, pipes, strict=True):
            worker.kill()
            worker.join()
            worker.close()
            a.close()
            b.close()


@pytest.mark.requirement(200)
async def test_a_killed_worker_is_lost_at_once_and_named(api: Api, start: Callable[..., Remote]) -> None:
    sender = api.sender(source := Filled(64, 1), num_workers=2)
    async with sender:
        workers = [start(Worker), start(Worker)]
        calls = [w.connect(sender, i, 64) for i, w in enumerate(workers)]
        await asyncio.gather(sender.connect(timeout=30), *calls)
        assert [s.state for s in sender.status().values()] == ["live", "live"]
        workers[1].signal(signal.SIGKILL)
        with Clock(0.5):
            await until(lambda: sender.status()[1].state == "lost", 2.5)
        assert sender.status()[1].reason == f"its process ({workers[1].pid}) has ended"
        with Clock(0.5), pytest.raises(PartialSendError, match="worker 1: PeerLost") as caught:
            await sender.send_async(source.fill(2), timeout=30)
        assert caught.value.acked == {0: 2}
        assert await workers[0].value() == 2
