"""Sending beside other coroutines, and when the source may change. Run me: python async_trainer.py

Two ways to send, and the moment from which the model may change again:

    version = await scheme.publish()      # when it returns, the snapshot is complete; workers apply it as they can
    version = await scheme.send_async()   # when it returns, all workers have applied it, too

`send_async` is `publish` and then `wait_version`, so a trainer that wants to go on at once publishes, trains, and asks
later. While either of them waits, every other coroutine of this loop runs.
"""

import asyncio
import contextlib
import multiprocessing
import signal

import torch
from torch import nn

from asyncsync import ClosedError, SharedMemWeightSyncScheme

WORKERS, STEPS = 2, 5


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))  # 8 MiB


def fill(model: nn.Module, value: float) -> None:
    """Stands for optimizer.step(): every parameter changes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


async def train(scheme: SharedMemWeightSyncScheme, model: nn.Module) -> None:
    for step in range(1, STEPS + 1):
        fill(model, step)
        version = await scheme.publish()
        # The snapshot is taken: nothing that happens to the model from here on can reach version `version`.
        fill(model, -1.0)
        await scheme.wait_version(version)
        print(
            f"step {step}: version {version} applied by", {w: s.version for w, s in scheme.status().items()}, flush=True
        )

    # While a task sends, its source must stay as it is, so this one gets a copy.
    fill(model, STEPS + 1)
    copy = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sending = asyncio.create_task(scheme.send_async(copy))
    fill(model, -2.0)  # the task reads the copy
    print(f"step {STEPS + 1}: version {await sending} was sent from a copy", flush=True)


async def other_work(done: list[float]) -> None:
    """Some other coroutine of the trainer: a web server, a logger, an environment."""
    while True:
        await asyncio.sleep(0.001)
        done.append(asyncio.get_running_loop().time())


async def trainer(scheme: SharedMemWeightSyncScheme, model: nn.Module) -> None:
    done: list[float] = []
    async with scheme:
        await scheme.connect()
        beside = asyncio.create_task(other_work(done))
        await train(scheme, model)
        beside.cancel()
    print(f"meanwhile the other coroutine had {len(done)} turns", flush=True)


async def worker(scheme: SharedMemWeightSyncScheme, index: int) -> None:
    model = make_model()
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    async with scheme:
        await scheme.connect()
        try:
            while True:
                await scheme.receive()
                values = {each.item() for p in model.parameters() for each in (p.min(), p.max())}
                print(f"worker {index}: version {scheme.version}, all parameters are {values}", flush=True)
        except ClosedError:
            pass


def work(scheme: SharedMemWeightSyncScheme, index: int) -> None:
    torch.set_num_threads(1)
    asyncio.run(worker(scheme, index))


def main() -> None:
    model = make_model()
    fill(model, 0.0)
    scheme = SharedMemWeightSyncScheme(num_workers=WORKERS)
    scheme.init_on_sender(model_id="policy", model=model)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(scheme, index), daemon=True) for index in range(WORKERS)]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit this: Ctrl-C is for the trainer
    for process in processes:
        process.start()
    signal.signal(signal.SIGINT, handler)
    asyncio.run(trainer(scheme, model))
    for process in processes:
        process.join()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
