"""Processes that a test controls: each runs one object on an event loop of its own, until it is stopped or killed.

Usage::

    async with processes() as start:
        worker = start(Worker)                      # 20 ms; the first one of a run waits for the imports
        await worker.connect(scheme, 0, 1000)       # a method of Worker, called there
        worker.signal(signal.SIGKILL)
        await worker.ended

A call is sent at once and returns a future, so that several can be under way. The processes are forked off a server
process that has imported torch and nothing else that matters: no socket, thread or event loop is inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvloop
from torch import nn

from asyncsync import WorkerStatus, ZMQWeightSyncScheme
from asyncsync.bus import worker as worker_link
from asyncsync.model import update
from asyncsync.model.gate import Gate, Writer
from asyncsync.protocol.settings import Identity
from helpers.apis import Face, in_thread
from helpers.pairs import eventually as eventually
from helpers.pairs import passed_on

LARGE = 5 << 18  # float32 elements, 5 MiB: chunks; packed and copied by the work thread
STOP_PATIENCE = 10.0  # seconds for a process to end by itself

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tensordict", "zmq", "uvloop", "asyncsync.public", "asyncsync.sync"])


# -- weights that show a torn read -------------------------------------------------------------------------------------


class Filled(nn.Module):
    """Every element of every parameter holds one number; the forward returns the least and the greatest it has read."""

    def __init__(self, numel: int, value: float = 0.0, parts: int = 8) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((numel // parts,), float(value))) for _ in range(parts)])

    def fill(self, value: float) -> Filled:
        with torch.no_grad():
            for part in self.parts:
                part.fill_(value)
        return self

    def forward(self) -> tuple[float, float]:
        ends: list[torch.Tensor] = []
        with torch.no_grad():
            for part in self.parts:
                ends += part.aminmax()
                time.sleep(0)  # an invitation to every other thread
            numbers = torch.stack(ends).tolist()
        return min(numbers), max(numbers)

    @property
    def value(self) -> float:
        return value_of(dict(self.named_parameters()))


def value_of(weights: Any) -> float:
    """The one number in all of these weights."""
    leaves = weights.values(True, True) if hasattr(weights, "batch_size") else weights.values()
    ends = [float(end) for leaf in leaves for end in leaf.detach().aminmax()]
    assert min(ends) == max(ends), f"torn: values from {min(ends)} to {max(ends)}"
    return ends[0]


# -- the test's side ---------------------------------------------------------------------------------------------------


def filled_sender(kind: type[Any], numel: int, value: float, **arguments: Any) -> Any:
    scheme = kind(**arguments)
    scheme.init_on_sender(model_id="policy", model=Filled(numel, value))
    return scheme


def new_receiver(sender: Any, worker_idx: int = 0, kind: type | None = None, **arguments: Any) -> Any:
    """The sender's scheme as a worker gets it, initialised there; or one of another class on the same endpoint."""
    scheme = passed_on(sender) if kind is None else kind(endpoint=sender.bus.endpoint)
    numel = sum(p.numel() for p in sender.model.parameters())
    scheme.init_on_receiver("policy", model=Filled(numel, -1.0), worker_idx=worker_idx, **arguments)
    return scheme


class Schemes:
    """Makes senders and receivers of :class:`Filled` weights in this loop."""

    def __init__(self) -> None:
        self.made: list[ZMQWeightSyncScheme] = []

    def sender(
        self, numel: int, value: float = 1.0, kind: type[ZMQWeightSyncScheme] = ZMQWeightSyncScheme, **arguments: Any
    ) -> ZMQWeightSyncScheme:
        self.made.append(filled_sender(kind, numel, value, **arguments))
        return self.made[-1]

    def receiver(self, sender: ZMQWeightSyncScheme, worker_idx: int = 0, **arguments: Any) -> ZMQWeightSyncScheme:
        self.made.append(new_receiver(sender, worker_idx, **arguments))
        return self.made[-1]

    async def connected(
        self, numel: int, workers: int = 1, value: float = 1.0, **arguments: Any
    ) -> tuple[ZMQWeightSyncScheme, list[ZMQWeightSyncScheme]]:
        sender = self.sender(numel, value, num_workers=workers, **arguments)
        receivers = [self.receiver(sender, i) for i in range(workers)]
        await asyncio.gather(sender.connect(), *(r.connect() for r in receivers))
        return sender, receivers

    async def shutdown(self) -> None:
        made, self.made = self.made, []
        for scheme in made:
            await scheme.shutdown()


def impatient(scheme: ZMQWeightSyncScheme, **changes: Any) -> None:
    """Have the liveness times of a scheme's own process pass ten times as fast."""
    times: dict[str, Any] = {"ping_interval": 0.1, "slow_after": 0.3, "retry_interval": 0.5, **changes}
    settings = replace(scheme.bus._settings(), **times)
    scheme.bus._settings = lambda: settings


class Remote:
    """A process under control. Attributes that it has not are methods of the object that runs there.

    Attributes:
        ended: done when the process has ended.
        events: what the object there has emitted.
    """

    def __init__(self, process: Any, connection: Connection) -> None:
        self._process = process
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self.pid: int = process.pid
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        # Not multiprocessing's sentinel: that is closed before the process's other files, and their locks.
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(connection.fileno(), self._read)
        self._loop.add_reader(self._pidfd, self._end)

    def __getattr__(self, name: str) -> Callable[..., asyncio.Future[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        self._count += 1
        future = self._calls[self._count] = self._loop.create_future()
        self._connection.send((self._count, name, args, kwargs))
        return future

    def _read(self) -> None:
        try:
            while self._connection.poll():
                number, result, error = self._connection.recv()
                if not number:
                    self.events.put_nowait(result)
                elif not (future := self._calls.pop(number)).done():
                    if error is None:
                        future.set_result(result)
                    else:
                        future.set_exception(error)
        except (EOFError, ConnectionError):
            self._loop.remove_reader(self._connection.fileno())  # it is ending

    def _end(self) -> None:
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_reader(self._pidfd)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EOFError("the process has ended"))
                future.exception()  # whoever awaits it still gets it
        self._calls.clear()
        if not self.ended.done():
            self.ended.set_result(None)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. After SIGSTOP, no thread of the process runs when this returns."""
        os.kill(self.pid, number)
        while number == signal.SIGSTOP and not self._is_stopped():
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended just now
            stats = [(task / "stat").read_text() for task in Path(f"/proc/{self.pid}/task").iterdir()]
            return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)
        return False

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.ended

    async def _stop(self) -> None:
        """Have the process end, whatever state it is in."""
        try:
            if not self.ended.done():
                self.signal(signal.SIGCONT)
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(STOP_PATIENCE):
                        await self.stop()
                        await self.ended
        finally:
            if not self.ended.done():
                await self.kill()
            self._process.join()
            self._process.close()
            os.close(self._pidfd)
            self._connection.close()


Start = Callable[..., Remote]
"""Starts a process: ``start(kind)``."""


@contextlib.asynccontextmanager
async def processes() -> AsyncIterator[Start]:
    """A function that starts processes; all of them end with the block."""
    started: list[Remote] = []

    def start(kind: type, *, uvloop: bool = False) -> Remote:
        here, there = _context.Pipe()
        process = _context.Process(target=_main, args=(there, kind, uvloop), daemon=True)
        process.start()
        there.close()
        started.append(Remote(process, here))
        return started[-1]

    try:
        yield start
    finally:
        await asyncio.gather(*(remote._stop() for remote in started))


# -- the process's side ------------------------------------------------------------------------------------------------


def _main(connection: Connection, kind: type, on_uvloop: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which stops us
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if on_uvloop else None) as runner:
        runner.run(_serve(connection, kind))


async def _serve(connection: Connection, kind: type) -> None:
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    lock = threading.Lock()
    tasks: set[asyncio.Task[None]] = set()

    def reply(number: int, result: Any, error: BaseException | None) -> None:
        with lock, contextlib.suppress(OSError):  # the test is over
            connection.send((number, result, _portable(error)))

    served = kind(lambda event: reply(0, event, None))

    async def answer(number: int, method: Callable[..., Awaitable[Any]], args: Any, kwargs: Any) -> None:
        try:
            result = await method(*args, **kwargs)
        except Exception as error:
            reply(number, None, error)
        else:
            reply(number, result, None)

    def read() -> None:
        try:
            while connection.poll():
                number, name, args, kwargs = connection.recv()
                if name in ("stop", "leave"):
                    kwargs = {"finish": lambda: over.done() or over.set_result(None)}
                task = loop.create_task(answer(number, getattr(served, name), args, kwargs))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except EOFError:
            over.done() or over.set_result(None)

    loop.add_reader(connection.fileno(), read)
    await over
    loop.remove_reader(connection.fileno())


def _portable(error: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def seem_elsewhere() -> None:
    """This process claims to be on another host: its workers open nobody's memory, and nobody watches it."""
    worker_link.this_process = lambda: Identity(os.getpid(), "another host", 1)


class _Party:
    """What trainers and workers have in common."""

    scheme: ZMQWeightSyncScheme | None = None

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self.emit = emit

    async def version(self) -> int:
        return self.scheme.version

    async def status(self) -> dict[int, WorkerStatus]:
        return self.scheme.status()

    async def closed(self) -> bool:
        return self.scheme.closed

    async def value(self) -> float:
        return self.model.value

    async def shutdown(self) -> None:
        if self.scheme is not None:
            await self.scheme.shutdown()

    async def leave(self, finish: Callable[[], Any]) -> None:
        """End the program as it is, with everything open."""
        asyncio.get_running_loop().call_soon(finish)

    async def stop(self, finish: Callable[[], Any]) -> None:
        try:
            await self.shutdown()
        finally:
            await self.leave(finish)


class Trainer(_Party):
    """A sender of :class:`Filled` weights."""

    async def connect(self, scheme: ZMQWeightSyncScheme, numel: int, value: float, timeout: float = 30.0) -> int:
        self.model = Filled(numel, value)
        scheme.init_on_sender(model_id="policy", model=self.model)
        self.scheme = scheme
        await scheme.connect(timeout=timeout)
        return scheme.version

    async def publish(self, value: float) -> int:
        return await self.scheme.publish(self.model.fill(value))

    async def send(self, value: float, timeout: float = 30.0) -> int:
        return await self.scheme.send_async(self.model.fill(value), timeout=timeout)

    async def fork(self) -> int:
        """Leave a child behind, as a DataLoader does; returns its pid. It ends by itself after a minute."""
        if (pid := os.fork()) == 0:
            time.sleep(60)  # noqa: ASYNC251 (a process of its own)
            os._exit(0)
        return pid


class Worker(_Party):
    """A receiver of them, which notes every version that it applies."""

    async def connect(
        self,
        scheme: ZMQWeightSyncScheme,
        worker_idx: int,
        numel: int,
        *,
        elsewhere: bool = False,
        broken_gate: bool = False,
        fast: bool = True,
        reconnect: bool = False,
        timeout: float = 30.0,
        settings: dict[str, Any] | None = None,
    ) -> int:
        """``elsewhere``: look like a process of another host; ``fast``: False: every update goes the general way."""
        if not fast:
            os.environ["ASYNCSYNC_FAST"] = "0"
        if elsewhere:
            seem_elsewhere()
        self.model = Filled(numel, -1.0)
        self.applied: list[int] = []
        self.scheme = scheme
        scheme.init_on_receiver("policy", model=self.model, worker_idx=worker_idx, reconnect=reconnect)
        if broken_gate:
            break_gate(scheme)
        if settings is not None:
            impatient(scheme, **settings)

        async def register() -> None:
            await scheme.meet_sender(worker_idx, timeout)
            scheme.register_receiver()
            machine = scheme.bus.link.machine
            original = machine.applied

            def applied(staging: Any) -> None:
                original(staging)
                self.applied += staging.versions.values()

            machine.applied = applied

        if isinstance(scheme, Face):
            await in_thread(scheme.bus.run_on_loop, register)  # on the loop of the blocking API
        else:
            await register()
        await scheme.connect(timeout=timeout)
        return scheme.version

    async def receive(self, timeout: float | None = None) -> float | None:
        weights = await self.scheme.receive(timeout)
        return None if weights is None else value_of(weights)

    async def fetch(self, timeout: float = 30.0) -> float:
        return value_of(await self.scheme.fetch(timeout))

    async def wait_version(self, version: int, timeout: float = 30.0) -> float:
        """Returns what the model holds then."""
        await self.scheme.wait_version(version, timeout=timeout)
        async with self.scheme.hold():  # a reader in another thread may be applying the next update
            return self.model.value

    async def applied_versions(self) -> list[int]:
        return self.applied

    async def slabs(self) -> int:
        return self.scheme.bus.link.machine.pool.slabs

    async def halt_in(self, point: str, nth: int = 1) -> None:
        """Emit a point's name and stop this process there (SIGSTOP): in the ``nth`` chunk, or half way in an apply."""

        def halt() -> None:
            self.emit(point)
            os.kill(os.getpid(), signal.SIGSTOP)

        if point == "transfer":
            machine = self.scheme.bus.link.machine
            original, count = machine._on_chunk, 0

            def on_chunk(*args: Any) -> None:
                nonlocal count
                count += 1
                if count == nth:
                    halt()
                original(*args)

            machine._on_chunk = on_chunk
        else:

            def copy_half(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
                half = len(destinations) // 2
                _copy(destinations[:half], sources[:half])
                halt()
                _copy(destinations[half:], sources[half:])

            def repoint_half(whole: update.ModelUpdate) -> None:
                pairs = whole._to_repoint
                whole._to_repoint = pairs[: len(pairs) // 2]
                repoint(whole)
                halt()
                whole._to_repoint = pairs
                repoint(whole)

            repoint = update.ModelUpdate._repoint
            update.copy_tensors = copy_half
            update.ModelUpdate._repoint = repoint_half

    async def forwards(self, count: int, versions: int = 0, tears: int = 0) -> tuple[int, int]:
        """Half on the loop, some in a ``hold()``, half in threads; returns how many were torn, and values seen.

        It makes ``count`` of them, and goes on until it has seen so many ``versions``, and so many torn ones.
        """
        torn = 0
        seen: set[float] = set()

        def enough(made: int, share: int) -> bool:
            return made >= share and len(seen) >= versions and torn >= tears

        def note(*values: float) -> None:
            nonlocal torn
            torn += len(set(values)) > 1
            seen.update(values)

        async def on_the_loop() -> None:
            made = 0
            while not enough(made, count // 2):
                made += 1
                if made % 10:
                    note(*self.model())
                else:
                    async with self.scheme.hold():
                        first = self.model()
                        await asyncio.sleep(0)
                        note(*first, *self.model())
                await asyncio.sleep(0)

        async def in_a_thread() -> None:
            made = 0
            while not enough(made, count // 4):
                made += 1
                note(*await asyncio.to_thread(self.model))

        await asyncio.gather(on_the_loop(), in_a_thread(), in_a_thread())
        return torn, len(seen)


_copy = update.copy_tensors


def _copy_one_by_one(destinations: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        _copy([destination], [source])
        time.sleep(0)


def break_gate(scheme: Any) -> None:
    """From now on a receiver's updates wait for nobody, and take longer."""
    scheme.bus.gate = BrokenGate()
    update.copy_tensors = _copy_one_by_one


class BrokenGate(Gate):
    """Lets every update through at once."""

    def try_apply(self, update: Writer) -> bool:
        return False

    def offer(self, update: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        update()
        done(None)
