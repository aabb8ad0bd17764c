"""Two models on one bus, updated together: a worker switches both, or neither. Run me: python many_models.py"""

import asyncio
import contextlib
import multiprocessing
import signal

import torch
from torch import nn

from asyncsync import Bus, SharedMemWeightSyncScheme

WORKERS, UPDATES = 2, 5


def make_models() -> dict[str, nn.Module]:
    return {"policy": nn.Linear(4, 2), "value": nn.Linear(4, 1)}


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


async def trainer(bus: Bus, models: dict[str, nn.Module]) -> None:
    async with bus:
        await bus.connect()  # every scheme of the bus
        for update in range(1, UPDATES + 1):
            for model in models.values():
                fill(model, update)
            version = await bus.send_async(models)  # one update, one version, applied as one by every worker
            print(f"trainer: version {version}, both models are {update}", flush=True)


async def worker(schemes: dict[str, SharedMemWeightSyncScheme], index: int) -> None:
    models = make_models()
    for name, scheme in schemes.items():
        scheme.init_on_receiver(name, model=models[name], worker_idx=index)
    bus = schemes["policy"].bus  # in this process, too, the schemes share one bus
    seen = set()
    async with bus:
        await bus.connect()
        while not bus.closed:
            with bus.hold():  # no update comes through between these two lines
                seen.add((models["policy"].bias[0].item(), models["value"].bias[0].item()))
            await asyncio.sleep(0)
    mixed = [pair for pair in seen if pair[0] != pair[1]]
    print(f"worker {index}: saw {len(seen)} pairs, {len(mixed)} of them mixed", flush=True)


def work(schemes: dict[str, SharedMemWeightSyncScheme], index: int) -> None:
    asyncio.run(worker(schemes, index))


def main() -> None:
    bus = Bus(num_workers=WORKERS)
    models = make_models()
    schemes = {name: SharedMemWeightSyncScheme(bus=bus) for name in models}
    for name, scheme in schemes.items():
        fill(models[name], 0.0)
        scheme.init_on_sender(model_id=name, model=models[name])
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(schemes, index), daemon=True) for index in range(WORKERS)]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit this: Ctrl-C is for the trainer
    for process in processes:
        process.start()
    signal.signal(signal.SIGINT, handler)
    asyncio.run(trainer(bus, models))
    for process in processes:
        process.join()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
