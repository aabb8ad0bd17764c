"""Weight synchronisation in processes of one's own, without a collector.

This is the standalone example of TorchRL's "Weight Synchronization" page, but for the import, the `__main__` guard that
the spawn start method needs, and the worker's loop, which ends when the sender has shut down. Run me:

    python weight_sync_standalone.py [spawn|fork|forkserver]
"""

import sys

import torch
import torch.nn as nn
from tensordict import TensorDict
from torch import multiprocessing as mp

from asyncsync.sync import ZMQWeightSyncScheme


def worker_fn(scheme, worker_idx):
    """Worker process - receives scheme via pickle."""
    # Create local model (weights will be overwritten by sender's weights)
    model = nn.Linear(4, 2)

    # PHASE 1: Initialize on receiver (no communication yet)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker_idx)

    # PHASE 2: Blocking rendez-vous - receive initial weights from sender
    scheme.connect(worker_idx=worker_idx)
    # model now has the sender's weights; the scheme's event loop runs in the background

    # Ready to work - weight updates are applied automatically, never during a call of the model
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
    if len(sys.argv) > 1:
        mp.set_start_method(sys.argv[1])

    # === MAIN PROCESS (Sender) ===
    policy = nn.Linear(4, 2)
    scheme = ZMQWeightSyncScheme()

    # PHASE 1: Initialize on sender (no communication yet)
    scheme.init_on_sender(
        model_id="policy",
        weights=TensorDict.from_module(policy),
        devices=[torch.device("cpu")] * 2,
        num_workers=2,
    )

    # Start workers - scheme is pickled and sent to each worker
    workers = [mp.Process(target=worker_fn, args=(scheme, i)) for i in range(2)]
    for w in workers:
        w.start()

    # PHASE 2: Blocking rendez-vous - send initial weights to workers
    scheme.connect()
    # Workers now have copies of policy's weights!

    # PHASE 3: Ongoing updates
    for epoch in range(10):
        # ... training step updates policy weights ...
        nn.init.constant_(policy.bias, epoch + 1.0)
        scheme.send()  # returns when both workers have applied the current weights
        print(f"epoch {epoch}: version {scheme.version} is everywhere", flush=True)

    scheme.shutdown()  # The workers' schemes are closed by it
    for w in workers:
        w.join()
