"""A collector whose workers get the policy's weights through a scheme.

This is the collector example of TorchRL's "Weight Synchronization" page, but for the imports, the `__main__` guard that
the spawn start method needs, and what is printed. Run me: python weight_sync_collectors.py

10000 frames are no multiple of 192: the collector says so, and collects 10176.
"""

import argparse

import torch.nn as nn
from tensordict.nn import TensorDictModule

from asyncsync.collectors import GymEnv, MultiCollector
from asyncsync.sync import SharedMemWeightSyncScheme

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-frames", type=int, default=10000)
    options = parser.parse_args()

    # Create environment and policy
    env = GymEnv("CartPole-v1")
    policy = TensorDictModule(
        nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]),
        in_keys=["observation"],
        out_keys=["action"],
    )

    # Create scheme - collector handles initialization
    scheme = SharedMemWeightSyncScheme(strategy="tensordict")

    collector = MultiCollector(
        sync=True,
        create_env_fn=[lambda: GymEnv("CartPole-v1")] * 3,
        policy=policy,
        frames_per_batch=192,
        total_frames=options.total_frames,
        weight_sync_schemes={"policy": scheme},
    )

    # Collect data and update weights
    frames = 0
    for i, data in enumerate(collector):
        # ... training step ...
        frames += data.numel()

        # Update weights - multiple calling conventions supported:
        if i % 10 == 0:
            # Option 1: No arguments (uses registered policy)
            collector.update_policy_weights_()

            # Option 2: Pass policy module (positional)
            collector.update_policy_weights_(policy)

            # Option 3: Pass weights TensorDict (positional)
            # collector.update_policy_weights_(weights_tensordict)

            # Option 4: Use keyword arguments for clarity
            # collector.update_policy_weights_(policy=policy)
            # collector.update_policy_weights_(weights=weights_td, model_id="policy")

            print(f"batch {i}: shape {tuple(data.shape)}, then version {scheme.version} is everywhere", flush=True)
    print(f"{frames} frames in {i + 1} batches")

    collector.shutdown()
