"""The standalone program of TorchRL's "Weight Synchronization" page, as its worker and its main process run it.

It is the page's text but for the import, the start method, and the pipes: through them the test looks at what a worker
holds. The page's `while True:` has only a comment in it; ours ends on `scheme.closed`.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn as nn
from tensordict import TensorDict

from asyncsync.sync import SharedMemWeightSyncScheme
from helpers import processes
from helpers.pairs import read

assert processes  # its import has the fork server load what a worker needs


def ask(pipe: Connection) -> Any:
    """What a worker's model holds now."""
    pipe.send("?")
    assert pipe.poll(50), "the worker is silent"
    return pipe.recv()


def worker_fn(scheme: Any, worker_idx: int, pipe: Connection) -> None:
    """Worker process - receives scheme via pickle."""
    # Create local model (weights will be overwritten by sender's weights)
    model = nn.Linear(4, 2)

    # PHASE 1: Initialize on receiver (no communication yet)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker_idx)

    # PHASE 2: Blocking rendez-vous - receive initial weights from sender
    scheme.connect(worker_idx=worker_idx)
    # model now has the sender's weights; background thread started

    # Ready to work - background thread handles weight updates automatically
    while not scheme.closed:
        if pipe.poll(0.01):
            pipe.recv()
            pipe.send(read(model))
    pipe.send(("closed", read(model)))


def main(
    context: Any,
    train: Callable[[nn.Module, int], None],
    check: Callable[[str, int, list[Any]], None],
    SharedMemWeightSyncScheme: Any = SharedMemWeightSyncScheme,
) -> Any:
    """The page's main process. Returns its worker processes, which have been joined.

    Args:
        context: of multiprocessing.
        train: called with the policy and the epoch: the training step.
        check: called at each point with its name, the epoch, and what each worker holds.
        SharedMemWeightSyncScheme: makes the scheme; another one is a drop-in replacement.
    """
    pipes = [context.Pipe() for _ in range(2)]
    here = [pipe for pipe, _ in pipes]

    policy = nn.Linear(4, 2)
    train(policy, 0)
    scheme = SharedMemWeightSyncScheme()

    # PHASE 1: Initialize on sender (no communication yet)
    scheme.init_on_sender(
        model_id="policy",
        weights=TensorDict.from_module(policy),
        devices=[torch.device("cpu")] * 2,
        num_workers=2,
    )

    # Spawn workers - scheme is pickled and sent to each worker
    workers = [context.Process(target=worker_fn, args=(scheme, i, pipes[i][1])) for i in range(2)]
    try:
        for w in workers:
            w.start()

        # PHASE 2: Blocking rendez-vous - send initial weights to workers
        scheme.connect()
        # Workers now have copies of policy's weights!
        check("connected", 0, [ask(pipe) for pipe in here])

        # PHASE 3: Ongoing updates (zero-copy for shared memory)
        for epoch in range(1, 11):
            # ... training step updates policy weights ...
            train(policy, epoch)
            check("trained", epoch, [ask(pipe) for pipe in here])
            scheme.send()  # Background threads automatically apply weights
            check("sent", epoch, [ask(pipe) for pipe in here])

        scheme.shutdown()  # Stop background threads
        for w in workers:
            w.join(20)
        check("closed", 10, [pipe.recv() if pipe.poll(0) else None for pipe in here])
        return [w.exitcode for w in workers]
    finally:
        scheme.shutdown()
        for w in workers:
            if w.pid is not None:
                w.kill()
                w.join()
            w.close()
        for a, b in pipes:
            a.close()
            b.close()
