"""Programs that hand this library's blocking schemes to TorchRL's collectors whose workers are nodes: through RPC,
torch.distributed and Ray; run by ``collecting_torchrl.Programs``."""

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asyncsync import sync
from helpers.apis import free_port
from helpers.collecting_torchrl import make_env
from helpers.programs import RAY
from helpers.torchrl_programs import policy_of, shown

SCHEMES = {
    "DistributedCollector": "DistributedWeightSyncScheme",
    "RPCCollector": "RPCWeightSyncScheme",
    "RayCollector": "RayWeightSyncScheme",
}


@contextmanager
def _collector_of(kind: str, scheme: Any, policy: Any, **options: Any) -> Iterator[Any]:
    import torchrl.collectors.distributed as theirs

    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    options = {"frames_per_batch": 40, "total_frames": 4000, "weight_sync_schemes": {"policy": scheme}, **options}
    if kind != "RayCollector":
        options |= {"launcher": "mp", "tcp_port": free_port()}
        yield getattr(theirs, kind)([make_env] * 2, policy, **options)
        return
    import ray

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        remote = {"num_cpus": 1, "num_gpus": 0, "memory": 1 << 28}
        init = {**RAY, "_temp_dir": folder}
        yield theirs.RayCollector([make_env] * 2, policy, ray_init_config=init, remote_configs=remote, **options)
        ray.shutdown()


def by_their_nodes(kind: str, is_sync: bool) -> dict[str, Any]:
    """What the nodes' policies show after each of some updates, and what is raised when a node is killed: by an update,
    and within how many seconds."""
    scheme = getattr(sync, SCHEMES[kind])()
    policy, found = policy_of(1.0), {"shown": []}
    with _collector_of(kind, scheme, policy, sync=is_sync) as collector:
        batches = iter(collector)
        if kind == "RayCollector":  # asks for that before anything else
            collector.update_policy_weights_()
        found["first"] = shown(next(batches))
        pids: set[int] = set()
        for update in range(4):
            policy.module.fill(update + 2.0)
            collector.update_policy_weights_()
            counts: Counter[int] = Counter()
            # Without waiting for each other, a node may have finished one batch before the update, and begun another.
            while max(counts.values(), default=0) < (1 if is_sync else 3):
                batch = next(batches)
                counts.update(set(batch["process"].flatten().tolist()))
            pids |= counts.keys()
            found["shown"].append(shown(batch))
        found["pids"] = len(pids)
        os.kill(min(pids), signal.SIGKILL)
        begun = time.monotonic()
        try:
            collector.update_policy_weights_()
        except Exception as error:
            found["lost"] = type(error).__name__, str(error), time.monotonic() - begun
        os.kill(max(pids), signal.SIGKILL)
    return found
