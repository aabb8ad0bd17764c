"""A sender here and its workers in processes of their own, for tests that stop and kill them.

The fixture ``crew`` of faults/conftest.py gives one that is not connected yet:

    await crew(1000, workers=3)
    crew.workers[1].signal(signal.SIGSTOP)
    await crew.send(2)

:func:`blocking_worker` is the same for one worker with the blocking API.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import Pipe
from typing import Any

from asyncsync import SharedMemWeightSyncScheme
from helpers.blocking_crew import start
from helpers.processes import Remote, Schemes, Start, Worker, eventually, impatient
from helpers.shared_workers import SharedWorker

__all__ = ["ProcessCrew", "blocking_worker"]


class ProcessCrew:
    """
    Attributes:
        sender: sends :class:`~helpers.processes.Filled` weights.
        workers: its workers' processes.
        pool: its slots, with a scheme that has them.
    """

    sender: Any
    workers: list[Remote]

    def __init__(self, schemes: Schemes, start: Start) -> None:
        self._schemes = schemes
        self._start = start

    async def __call__(
        self,
        numel: int,
        workers: int = 2,
        *,
        of: type = Worker,
        uvloop: Container[int] = (),
        receiver: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Connect.

        Args:
            of: what runs in the workers' processes.
            uvloop: which workers have uvloop's event loop.
            receiver: further arguments of its ``connect``.
            settings: of :func:`~helpers.processes.impatient`, for all.
            options: of the sender's constructor; and ``kind``.
        """
        self._of, self._numel = of, numel
        self.sender = self._schemes.sender(numel, **{"num_workers": workers, **options})
        self.workers = [self._start(of, uvloop=i in uvloop) for i in range(workers)]
        receiver = receiver or {}
        if settings is not None:
            impatient(self.sender, **settings)
            receiver = {"settings": settings, **receiver}
        connecting = (w.connect(self.sender, i, numel, **receiver) for i, w in enumerate(self.workers))
        await asyncio.gather(self.sender.connect(), *connecting)

    async def shared(self, numel: int, workers: int = 2, **options: Any) -> None:
        """The same with workers whose Parameters lie in slots, unless the options say otherwise."""
        await self(numel, workers, **{"of": SharedWorker, "kind": SharedMemWeightSyncScheme, "map_above": 0, **options})

    async def another(self, index: int) -> tuple[Remote, int]:
        """One more worker, and the version with which it is connected."""
        worker = self._start(self._of)
        return worker, await worker.connect(self.sender, index, self._numel)

    async def send(self, value: float, **options: Any) -> int:
        return int(await self.sender.send_async(self.sender.model.fill(value), **options))

    async def publish(self, value: float) -> int:
        return int(await self.sender.publish(self.sender.model.fill(value)))

    async def publish_to(self, worker_ids: Any, value: float) -> int:
        """Publish to all, and wait for some."""
        version = await self.publish(value)
        await self.sender.wait_version(version, worker_ids=worker_ids, timeout=20)
        return version

    async def values(self) -> list[float]:
        """What the workers' models hold."""
        return list(await asyncio.gather(*(worker.value() for worker in self.workers)))

    @asynccontextmanager
    async def firing(self, *, sends: bool = False) -> AsyncIterator[None]:
        """Meanwhile the sender publishes as fast as it can, each version full of its number. ``sends``: the next one
        when everybody has the last."""
        give = self.sender.send_async if sends else self.sender.publish

        async def fire() -> None:
            while True:
                await give(self.sender.model.fill(self.sender.version + 1))
                await asyncio.sleep(0)

        firing = asyncio.create_task(fire())
        try:
            yield
        finally:
            firing.cancel()
            await asyncio.wait([firing])
        assert firing.cancelled(), firing

    @property
    def pool(self) -> Any:
        return self.sender.shared_transport.pool

    async def frees_all_but_the_target(self) -> None:
        await eventually(lambda: len(self.pool.used) == 1, why=lambda: f"{len(self.pool.used)} slots are in use")


@contextmanager
def blocking_worker(
    sender: Any, function: Callable[..., Any], *arguments: Any, index: int = 0, method: str = "forkserver"
) -> Iterator[tuple[Any, Any]]:
    """The process of ``function(sender, index, *arguments, connection)`` and the other end of its connection. The
    sender is shut down at the end, and the process has to end well then."""
    here, there = Pipe()
    worker = start(function, sender, index, *arguments, there, method=method)
    try:
        yield worker, here
        sender.shutdown()
        worker.join(20)
        assert worker.exitcode == 0
    finally:
        sender.shutdown()
        worker.kill()
        worker.join()
        worker.close()
        here.close()
        there.close()
