"""Environments, policies and factories for collectors of several processes, without torchrl.

An observation tells where it comes from: ``[seed, trajectory of this environment, step]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.util
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from asyncsync.runtime.threads import run_on_loop
from helpers.memory import descriptors
from helpers.programs import alive as alive
from helpers.programs import gone_within as gone_within

multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch", "tensordict", "zmq", "uvloop", "cloudpickle", "asyncsync.sync", "asyncsync.collectors.workers.local",
     "asyncsync.collectors.single", "asyncsync.collectors.multi.collector", "asyncsync.collectors.distributed"]
)  # fmt: skip


class Counting:
    """Counts its steps; a trajectory has ``length`` of them."""

    def __init__(
        self,
        length: int = 5,
        delay: float = 0.0,  # seconds that a step takes
        batch: tuple[int, ...] = (),
        fail_at: int = 0,  # this step (of all, from 1) raises
        error: Callable[[], BaseException] = lambda: ValueError("the environment has failed"),
        width: int = 0,  # additional uint8 entries per observation, "pixels"
        log: str = "",  # a file to which this process's pid is appended, and "closed" by close()
        slow_reset: float = 0.0,  # seconds for a reset but the first
        kill_at: int = 0,
        widen_at: int = 0,
    ) -> None:
        self.batch_size = torch.Size(batch)
        self.length, self.delay, self.fail_at, self.error, self.width = length, delay, fail_at, error, width
        self.log, self.slow_reset, self.kill_at, self.widen_at = log, slow_reset, kill_at, widen_at
        self.seed = self.trajectory = 0
        self.steps = self.resets = 0
        self.count = torch.zeros(self.batch_size)
        self._note(str(os.getpid()))

    def _note(self, text: str) -> None:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(text + "\n")

    def _root(self) -> TensorDict:
        where = torch.tensor([self.seed, self.trajectory], dtype=torch.float32).expand(*self.batch_size, 2)
        td = TensorDict({"observation": torch.cat([where, self.count.unsqueeze(-1)], -1)}, self.batch_size)
        width = self.width + (self.widen_at and self.steps >= self.widen_at)
        if width:
            td.set("pixels", torch.full((*self.batch_size, width), self.steps % 251, dtype=torch.uint8))
        for key in ("done", "terminated"):
            td.set(key, torch.zeros(*self.batch_size, 1, dtype=torch.bool))
        return td

    def reset(self, td: TensorDictBase | None = None) -> TensorDict:
        if self.resets and self.slow_reset:
            time.sleep(self.slow_reset)
        self.resets += 1
        self.trajectory += 1
        self.count = torch.zeros(self.batch_size)
        return self._root()

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        self.steps += 1
        if self.delay:
            time.sleep(self.delay)
        if self.steps == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.fail_at:
            raise self.error()
        self.count = self.count + 1
        after = self._root()
        ended = (self.count >= self.length).unsqueeze(-1)
        after.update({"done": ended, "terminated": ended.clone(), "reward": td.get("action").sum(-1, keepdim=True)})
        td.set("next", after)
        if bool(ended.any()):
            self.trajectory += 1
            self.count = torch.where(ended.squeeze(-1), torch.zeros_like(self.count), self.count)
        return td, self._root()

    @property
    def action_spec(self) -> Counting:
        return self

    def rand(self) -> torch.Tensor:
        return torch.full((*self.batch_size, 2), -1.0)

    def rand_action(self, td: TensorDictBase) -> TensorDictBase:
        td.set("action", self.rand())
        return td

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self.seed, self.trajectory = seed, 0
        return seed if static_seed else seed + 10

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]

    def close(self) -> None:
        self._note("closed")


class Slow(Counting):
    """Notes each step in its log as it begins."""

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        self._note("step")
        return super().step_and_maybe_reset(td)


class WithModel(Counting):
    """Has a model of its own, of which each observation shows the weight: as ``env.transform[0].module``."""

    def __init__(self, **arguments: Any) -> None:
        self.module = nn.Linear(1, 1, bias=False)
        super().__init__(**arguments)
        self.transform = [self]

    def _root(self) -> TensorDict:
        td = super()._root()
        td.set("model", self.module.weight.detach().clone().view(1).expand(*self.batch_size, 1).clone())
        return td


def acted(batch: Any) -> list[float]:
    """The actions of a batch, each once: its policies' weights."""
    return sorted(set(batch["action"].flatten().tolist()))


def versions(batch: Any) -> list[int]:
    """With which versions of the policy its frames were made."""
    return sorted(set(batch["collector", "policy_version"].flatten().tolist()))


def make(**arguments: Any) -> Callable[[], Counting]:
    return lambda: Counting(**arguments)


def policy(value: float = 1.0, numel: int = 2) -> TensorDictModule:
    """Its actions are its weights: the mean of each half of them."""
    return TensorDictModule(Marked(value, numel), in_keys=["observation"], out_keys=["action"])


class Marked(nn.Module):
    def __init__(self, value: float = 1.0, numel: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), float(value)))

    def fill(self, value: float) -> Marked:
        with torch.no_grad():
            self.weight.fill_(value)
        return self

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        ends = torch.stack([self.weight[0], self.weight[-1]])
        return ends.expand(*observation.shape[:-1], 2).clone()


class BadPolicy(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        raise KeyError("the policy has failed")


class Unpicklable(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class CannotTravel:
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def wait_for(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(collector: Any) -> None:
    """Have the workers begin their rollouts, and wait for none."""

    async def begin() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await collector._driver.produce()

    run_on_loop(begin)


def fail_and_end(collector: Any, error: Exception) -> None:
    """End the workers just after one of them has failed."""

    async def both() -> None:
        collector.group._set_failure(error)
        await collector.group._shutdown(5.0)

    run_on_loop(both)


def options(**changes: Any) -> dict[str, Any]:
    """Keyword arguments of a collector in a test: workers that start in a tenth of a second."""
    return {"frames_per_batch": 6, "start_method": "forkserver", **changes}


# -- processes ---------------------------------------------------------------------------------------------------------


def draw_many(pipe: Any, pool: bytes, count: int) -> None:
    drawn = pickle.loads(pool)
    pipe.send([int(drawn.get_traj_and_increment(1)) for _ in range(count)])


def draw_one_and_die(pool: bytes) -> None:
    class Deadly:
        """Numbers of a page. Reading one kills the process, which holds the lock of the counter then."""

        def __getitem__(self, index: int) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    drawn = pickle.loads(pool)
    drawn._page.numbers = Deadly()
    drawn.get_traj_and_increment(1)


def note_random_state(directory: Path) -> None:
    """An init_fn: tells the first random numbers, and at the process's end, how many objects no collection looks at."""
    path = directory / str(os.getpid())
    path.write_text(f"{torch.rand(1).item()} {np.random.rand()} {random.random()}")
    ended = path.with_suffix(".frozen")
    gc.unfreeze()  # what helpers/startup has frozen
    multiprocessing.util.Finalize(None, lambda: ended.write_text(str(gc.get_freeze_count())), exitpriority=1)


def trainer(pipe: Any, kind: str, end: str, delay: float, arguments: dict[str, Any]) -> None:
    """A program with a collector: tells its workers' pids, iterates, and ends in some way."""
    # As in a program that a shell starts in the foreground, whatever this test run was started with.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a collector may have started the fork server
    from asyncsync.collectors import MultiAsyncCollector, MultiSyncCollector

    torch.set_num_threads(1)
    classes = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}
    collector = classes[kind]([make(delay=delay)] * 2, policy(), **options(**arguments))
    if end == "nothing":
        collector.next()
        pipe.send(collector.group.family.pids)
        return
    if end == "during shutdown":
        ask(collector)
        pipe.send(collector.group.family.pids)
        collector.shutdown(30.0)
    if end == "with a fork":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        pipe.send([*collector.group.family.pids, child.pid])
    if end == "while it forks":
        libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, which the child might wait for without end
        if libc.fork() == 0:  # without Python's hooks: it has not come to them yet
            libc.usleep(1_000_000)
            os._exit(0)
    pipe.send(collector.group.family.pids)
    try:
        for _ in collector:
            pipe.send("batch")
    except KeyboardInterrupt:
        pipe.send("interrupted")


class SharedBuffer:
    """A replay buffer of several processes: notes in a file what comes."""

    shared = True

    def __init__(self, path: Path) -> None:
        self._path = path / "buffer"
        self._path.touch()

    def _note(self, size: int) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(b"%d\n" % size)  # one piece, at the end

    def extend(self, batch: TensorDictBase) -> None:
        self._note(batch.numel())

    def add(self, frame: TensorDictBase) -> None:
        self._note(1)

    def sizes(self) -> list[int]:
        return [int(line) for line in self._path.read_text().split()]

    def count(self) -> int:
        return sum(self.sizes())


class RandomFrames(SharedBuffer):
    """Notes of each batch how many frames have random actions."""

    def extend(self, batch: TensorDictBase) -> None:
        self._note(int((batch["action"] == -1.0).all(-1).sum()))


@contextlib.contextmanager
def settled(*collectors: Any) -> Iterator[None]:
    """The collectors that several tests use, all that there are. At the end they have mapped all their slots, so that
    they have no more descriptors than before: the file of one whose first batch nobody has read is open."""
    before = _memory_files()
    yield
    for _ in range(100):
        if not _memory_files() - before:
            return
        for collector in collectors:
            collector.next()
    raise AssertionError(f"it opens files with each batch: {_memory_files()}")


def _memory_files() -> set[int]:
    return {number for number, target in descriptors().items() if target.startswith("/memfd:")}


class Scaled(nn.Module):
    """A postproc with a weight, which it writes beside each frame."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        return batch.set("scaled", torch.ones(*batch.shape, 1) * self.weight.detach())
