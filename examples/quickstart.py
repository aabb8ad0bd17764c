"""A sender and two receivers, each in a process of its own. Run me: python quickstart.py"""

import asyncio
import contextlib
import multiprocessing
import signal

from torch import nn

from asyncsync import ClosedError, SharedMemWeightSyncScheme


async def receiver(scheme, index):
    model = nn.Linear(4, 2)
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    async with scheme:
        await scheme.connect()  # the model has the sender's weights
        try:
            while True:
                await scheme.receive()  # updates are applied as they come; this waits for the newest that is new to us
                print(f"worker {index}: version {scheme.version}, bias {model.bias.tolist()}", flush=True)
        except ClosedError:
            print(f"worker {index}: the sender has said goodbye", flush=True)


async def sender(scheme, model):
    async with scheme:
        await scheme.connect()  # both workers are there and have applied version 1
        for value in (1.0, 2.0, 3.0):
            nn.init.constant_(model.bias, value)
            version = await scheme.send_async()  # both workers have applied it
            print(f"sender: version {version} is everywhere", flush=True)


def work(scheme, index):
    asyncio.run(receiver(scheme, index))


def main():
    model = nn.Linear(4, 2)
    scheme = SharedMemWeightSyncScheme()  # ZMQWeightSyncScheme: the same, for workers on other hosts, too
    scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(scheme, index), daemon=True) for index in range(2)]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit this: Ctrl-C is for the trainer
    for worker in workers:
        worker.start()
    signal.signal(signal.SIGINT, handler)
    asyncio.run(sender(scheme, model))
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
