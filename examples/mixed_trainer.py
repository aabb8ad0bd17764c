"""An asynchronous trainer with workers that block: one scheme, two APIs. Run me: python mixed_trainer.py

With an address and keys (docs/multi-host.md) the workers may run on other hosts; without arguments, they run on this
one.
"""

import asyncio
import contextlib
import multiprocessing
import signal

import torch
from torch import nn

from asyncsync import ClosedError, PartialSendError, ZMQWeightSyncScheme


def work(scheme, index, rollouts):
    """An ordinary program without an event loop: `scheme` has the blocking API here."""
    policy = nn.Linear(4, 2)
    scheme.init_on_receiver("policy", model=policy, worker_idx=index)
    with scheme:
        scheme.connect()
        observation = torch.zeros(4)
        try:
            while True:
                with scheme.hold():  # no update comes in between
                    version, action = scheme.version, policy(observation).tolist()
                rollouts.put((index, version, action))
                scheme.receive(timeout=0.05)  # until the next update, at most so long
        except ClosedError:
            pass  # the trainer has said goodbye


async def count(rollouts, seen):
    """What else the trainer's event loop does while weights travel."""
    while True:
        index, version, action = await asyncio.to_thread(rollouts.get)
        if index is None:
            return
        seen.setdefault(version, set()).add((index, action[0]))


async def train(scheme, policy, rollouts):
    seen = {}
    try:
        async with scheme:
            await scheme.connect()
            counting = asyncio.create_task(count(rollouts, seen))
            for step in range(1, 11):
                nn.init.constant_(policy.bias, float(step))  # an optimizer's step
                try:
                    version = await scheme.send_async(timeout=10)  # both workers act with it from now on
                except PartialSendError as error:
                    print(f"step {step}: {error}")  # who has it, who has not, and why
                else:
                    print(f"step {step}: version {version} is everywhere", flush=True)
                await asyncio.sleep(0.1)  # the next batch
    finally:
        rollouts.put((None, 0, []))  # the last, by Ctrl-C, too: a thread waits for it
    await counting
    for version, actions in sorted(seen.items()):
        workers, values = sorted(index for index, _ in actions), sorted({value for _, value in actions})
        print(f"version {version}: acted on by {workers}, {values}")


def main():
    spawn = multiprocessing.get_context("spawn")
    policy, rollouts = nn.Linear(4, 2), spawn.Queue()
    nn.init.zeros_(policy.weight)
    nn.init.zeros_(policy.bias)
    scheme = ZMQWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
    workers = [spawn.Process(target=work, args=(scheme.blocking, i, rollouts), daemon=True) for i in range(2)]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit this: Ctrl-C is for the trainer
    for worker in workers:
        worker.start()
    signal.signal(signal.SIGINT, handler)
    asyncio.run(train(scheme, policy, rollouts))
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
