"""Weight synchronisation in processes of one's own, without a collector.

This is the standalone example of TorchRL's "Weight Synchronization" page, but for the import, the worker's loop, which
ends when the sender has shut down, the `__main__` guard that the spawn start method needs, and what is printed. Run me:

    python weight_sync_standalone.py [--scheme shared|process|zmq] [--start-method spawn|fork|forkserver]
"""

import argparse

import torch
import torch.nn as nn
from tensordict import TensorDict
from torch import multiprocessing as mp

from asyncsync.sync import SharedMemWeightSyncScheme, WeightSyncScheme


def worker_fn(scheme, worker_idx):
    """Worker process - receives scheme via pickle."""
    # Create local model (weights will be overwritten by sender's weights)
    model = nn.Linear(4, 2)

    # PHASE 1: Initialize on receiver (no communication yet)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker_idx)

    # PHASE 2: Blocking rendez-vous - receive initial weights from sender
    scheme.connect(worker_idx=worker_idx)
    # model now has the sender's weights; background thread started

    # Ready to work - background thread handles weight updates automatically, never during a call of the model
    observation = torch.ones(4)
    calls = 0
    while not scheme.closed:
        with torch.no_grad():
            model(observation)
        calls += 1
    bias = model.bias.tolist()
    print(f"worker {worker_idx}: {calls} calls, the last with version {scheme.version}: {bias}", flush=True)
    scheme.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheme", choices=["shared", "process", "zmq"], default="shared")
    parser.add_argument("--start-method", choices=["spawn", "fork", "forkserver"])
    options = parser.parse_args()
    mp.set_start_method(options.start_method)

    # === MAIN PROCESS (Sender) ===
    policy = nn.Linear(4, 2)
    if options.scheme == "shared":
        scheme = SharedMemWeightSyncScheme()
    else:  # the program is the same with another scheme
        scheme = WeightSyncScheme.from_backend(options.scheme)

    # PHASE 1: Initialize on sender (no communication yet)
    scheme.init_on_sender(
        model_id="policy",
        weights=TensorDict.from_module(policy),
        devices=[torch.device("cpu")] * 2,
        num_workers=2,
    )

    # Spawn workers - scheme is pickled and sent to each worker
    workers = [mp.Process(target=worker_fn, args=(scheme, i)) for i in range(2)]
    for w in workers:
        w.start()

    # PHASE 2: Blocking rendez-vous - send initial weights to workers
    scheme.connect()
    # Workers now have copies of policy's weights!

    # PHASE 3: Ongoing updates (one copy into shared memory, however many workers)
    for epoch in range(10):
        # ... training step updates policy weights ...
        nn.init.constant_(policy.bias, epoch + 1.0)
        scheme.send()  # Background threads automatically apply weights; returns when both workers have
        print(f"epoch {epoch}: version {scheme.version} is everywhere", flush=True)

    scheme.shutdown()  # Stop background threads
    for w in workers:
        w.join()
