"""A trainer, and subscribers on any hosts, with keys: nobody else gets in, and nobody reads along.

    asyncsync keygen keys --workers 2                        # once, on the trainer's host
    python multi_host_pubsub.py --role trainer --keys keys

and on another host, with copies of keys/server.key and keys/client_secrets/worker-0.key_secret:

    python multi_host_pubsub.py --role subscriber --worker 0 --connect tcp://trainer:5555 \\
        --server-key server.key --client-key worker-0.key_secret

Subscribers may come late, go, come again, and outlive the trainer: the next one on the same endpoint is followed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools

import torch
from torch import nn

from asyncsync import NotConnected, WeightSyncError, ZMQWeightSyncScheme


def make_policy() -> nn.Module:
    return nn.Linear(4, 1)


async def train(endpoint: str, keys: str, updates: int, pause: float) -> None:
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    scheme = ZMQWeightSyncScheme(
        endpoint=endpoint, server_key=f"{keys}/server.key_secret", clients=f"{keys}/clients", min_workers=0
    )
    scheme.init_on_sender(model_id="policy", model=policy)
    async with scheme:
        await scheme.connect()
        print(f"trainer: listening at {endpoint}", flush=True)
        for _ in range(updates) if updates else itertools.count():
            seen = torch.randn(64, 4)
            loss = (policy(seen) - seen.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            version = await scheme.publish(metadata={"loss": loss.item()})  # waits for nobody
            status = scheme.status()
            followers = {i: one.version for i, one in status.items() if (one.role, one.state) == ("worker", "live")}
            print(f"trainer: version {version}, subscribers have {followers}, refused {status.refused}", flush=True)
            await asyncio.sleep(pause)


async def follow(scheme: ZMQWeightSyncScheme, worker: int, versions: int) -> None:
    policy = make_policy()
    scheme.init_on_receiver("policy", model=policy, worker_idx=worker, reconnect=True)
    async with scheme:
        try:
            await scheme.connect(timeout=10)
            for _ in range(versions):
                await scheme.receive()
                with scheme.hold() as held, torch.no_grad():  # weights and metadata of one version
                    wrong = float((policy(torch.ones(1, 4)) - 1.0).abs())
                    about = f"version {held.version} {held.metadata}"
                print(f"subscriber {worker}: {about} is wrong by {wrong:.3f}", flush=True)
        except NotConnected as error:  # the key was refused, or nobody is there
            raise SystemExit(f"subscriber {worker}: {error}") from None
        except WeightSyncError as error:
            print(f"subscriber {worker}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A trainer or a subscriber, on any host.")
    parser.add_argument("--role", choices=("trainer", "subscriber"), required=True)
    trainer = parser.add_argument_group("trainer")
    trainer.add_argument("--endpoint", default="tcp://0.0.0.0:5555")
    trainer.add_argument("--keys", default="keys", help="what `asyncsync keygen` has made")
    trainer.add_argument("--updates", type=int, default=0, help="leave after so many; 0 (default): when Ctrl-C ends it")
    trainer.add_argument("--pause", type=float, default=0.1, help="seconds between two updates")
    subscriber = parser.add_argument_group("subscriber")
    subscriber.add_argument("--connect", default="tcp://localhost:5555")
    subscriber.add_argument("--worker", type=int, default=0)
    subscriber.add_argument("--server-key", default="keys/server.key")
    subscriber.add_argument("--client-key", default="keys/client_secrets/worker-{worker_idx}.key_secret")
    subscriber.add_argument("--versions", type=int, default=10**9, help="leave after so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role == "trainer":
        asyncio.run(train(options.endpoint, options.keys, options.updates, options.pause))
    else:
        keys = {"server_key": options.server_key, "client_key": options.client_key}
        scheme = ZMQWeightSyncScheme(connect=options.connect, **keys)
        asyncio.run(follow(scheme, options.worker, options.versions))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
