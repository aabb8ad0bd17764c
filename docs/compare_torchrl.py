"""Writes the tables of docs/from-torchrl.md: TorchRL's public names beside ours.

Run me: python docs/compare_torchrl.py. With --check, nothing is written, and the exit code is 1 where the page is not
what it should be.

The tables are made of the installed TorchRL and of asyncsync. A name of TorchRL's that asyncsync lacks, an argument,
or an attribute, needs a line in REASONS: without one this script raises, and so does its test, when a new TorchRL has
something that nobody has thought of yet.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("from-torchrl.md")
MODULES = {
    "torchrl.weight_update": ("asyncsync.sync", "asyncsync.collectors"),
    "torchrl.weight_update.llm": ("asyncsync.sync",),
    "torchrl.collectors": ("asyncsync.collectors",),
    "torchrl.collectors.distributed": ("asyncsync.collectors.distributed", "asyncsync.collectors"),
}
ACTOR = """`Evaluator(backend="ray", collector_kwargs={"remote_configs": {"num_gpus": 1}})`"""
SERVER = "[inference engines](engines.md): a backend of vLLM's, and `take` for others"
CONSTRUCTED = "an argument of the constructor; no attribute"
NEEDLESS = "no: nothing needs it"
BY_BUS = "no: it travels on the bus"
REASONS = {
    # names of modules
    "VLLMWeightSyncScheme": SERVER,
    "VLLMWeightSender": SERVER,
    "VLLMWeightReceiver": SERVER,
    "VLLMCollectiveTransport": SERVER,
    "VLLMDoubleBufferSyncScheme": SERVER,
    "VLLMDoubleBufferWeightSender": SERVER,
    "VLLMDoubleBufferWeightReceiver": SERVER,
    "VLLMDoubleBufferTransport": SERVER,
    "SGLangWeightSyncScheme": SERVER,
    "SGLangWeightSender": SERVER,
    "SGLangCollectiveTransport": SERVER,
    "get_model_metadata": "no: `connect` shows every receiver names, dtypes and shapes",
    "get_sglang_model_metadata": "no: `connect` shows every receiver names, dtypes and shapes",
    "BaseCollector": "`asyncsync.collectors.base.BaseCollector`",
    "AsyncCollector": "`MultiAsyncCollector([create_env_fn], …)`: the same with one worker",
    "AsyncBatchedCollector": "no: for many environments and one policy, `GymEnv(…, num_envs=n)` in a `Collector`",
    "InitialSyncTransport": "no: `connect` brings them",
    "WeightSyncBackend": "no: `WeightSyncScheme.from_backend` knows them",
    "RemoteModuleWeightUpdater": "no: a scheme sends to any process",
    "DEFAULT_SLURM_CONF": "no: `slurm_kwargs` are those of submitit",
    "submitit_delayed_launcher": '`launcher="torchrun"`, and `serve_node()` in the ranks that are nodes',
    "RayEvalWorker": ACTOR,
    "DistributedSyncCollector": "`DistributedCollector(…, sync=True)`",
    # arguments and attributes of classes, "Class.name" or "*.name"
    "*.verbose": "no: use `logging`, the logger is `asyncsync`",
    "*.args": "signatures are written out",
    "*.kwargs": "signatures are written out",
    "*.trajs_per_batch": CONSTRUCTED,
    "*.trajs_per_write": CONSTRUCTED,
    "*.traj_format": CONSTRUCTED,
    "MultiSyncCollector.sync": NEEDLESS,
    "MultiAsyncCollector.sync": NEEDLESS,
    "Evaluator.collector_cls": NEEDLESS,
    "Evaluator.num_gpus": ACTOR,
    "Evaluator.ray_kwargs": ACTOR,
    "DistributedCollector.update_interval": "`max_weight_update_interval`",
    "RayCollector.use_env_creator": NEEDLESS,
    "RayCollector.add_collectors": "no: actors that are lost are made anew (`restarts=`)",
    "RayCollector.local_policy": "`collector.policy`",
    "RayCollector.num_workers": "an attribute of the object",
    "RayCollector.stop_remote_collectors": "`collector.shutdown()`",
    "*.device": "an argument of the constructor; each node's collector has the attribute",
    "*.env_device": "an argument of the constructor; each node's collector has the attribute",
    "*.policy_device": "an argument of the constructor; each node's collector has the attribute",
    "*.storing_device": "an argument of the constructor; each node's collector has the attribute",
    "RandomPolicy.set_action_spec_from_env": NEEDLESS,
    "MPTransport.ack_queue": BY_BUS,
    "MPTransport.weight_queue": BY_BUS,
    "MPTransport.timeout": "no: each wait takes `timeout=`",
    "MPTransport.send_weights_async": "no: `send_async` of the scheme",
    "*.send_weights_async": "no: `send_async` of the scheme",
    "*.wait_ack": BY_BUS,
    "DistributedTransport.rank": "no: one transport serves all workers",
    "DistributedTransport.receive_initial_weights": "no: `connect` brings them",
    "DistributedTransport.send_initial_weights": "no: `connect` brings them",
    "DistributedTransport.store": BY_BUS,
    "DistributedTransport.sync": "`sync=` of the scheme",
    "DistributedTransport.send_weights_async": "no: `send_async` of the scheme",
    "DistributedTransport.weights_buffer": NEEDLESS,
    "RayTransport.remote_actor": "`init_on_sender(remotes=[…])` of the scheme",
    "RayTransport.worker_idx": "no: one transport serves all workers",
    "RayTransport.backend": "`backend=` of the scheme",
    "RayTransport.connection_info_name": "an attribute of the scheme",
    "RayTransport.model_id": "`init_on_sender(model_id=…)` of the scheme",
    "RayTransport.set_model": "`init_on_receiver(model=…)` of the scheme",
    "RayTransport.set_model_version": BY_BUS,
    "RayTransport.set_process_group": NEEDLESS,
    "RPCTransport.collector_info": NEEDLESS,
    "RPCTransport.collector_rref": "`init_on_sender(remotes=[…])` of the scheme",
    "RPCTransport.collector_class": NEEDLESS,
    "RPCTransport.worker_rank": "no: one transport serves all workers",
    "SharedMemTransport.register_weights": "no: `init_on_sender` of the scheme",
    "SharedMemTransport.send_ack": BY_BUS,
    "SharedMemTransport.unique_weights": NEEDLESS,
}
# Instances have these.
OF_INSTANCES = {"strategy", "post_hooks", "collectors"}
DISTRIBUTED = re.compile("Ray|RPC|Distributed")
COLLECTORS = {
    *("Collector", "MultiCollector", "MultiSyncCollector", "MultiAsyncCollector"),
    *("DistributedCollector", "RPCCollector", "RayCollector"),
}


def tables() -> dict[str, str]:
    """By title, in Markdown. Raises LookupError: a name of TorchRL's that is neither ours nor in REASONS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "names": _table("TorchRL", "asyncsync", [row for module in MODULES for row in _names(module)]),
            "parts": _table("TorchRL", "what there is instead", [row for module in MODULES for row in _parts(module)]),
        }


def written() -> str:
    """The page with these tables in it."""
    text = PAGE.read_text()
    for title, table in tables().items():
        begin, end = f"<!-- {title} -->\n", f"<!-- end of {title} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def _table(left: str, right: str, rows: list[tuple[str, str]]) -> str:
    """One row for all names that have the same on the right."""
    grouped: dict[str, list[str]] = {}
    for theirs, ours in rows:
        grouped.setdefault(ours, []).append(theirs)
    lines = (f"| {_joined(list(dict.fromkeys(names)))} | {ours} |" for ours, names in grouped.items())
    return "\n".join([f"| {left} | {right} |", "|---|---|", *lines, ""])


def _joined(names: list[str]) -> str:
    """``A.x``, ``B.x``, ``A.y``, ``B.y`` as ``A``, ``B``: ``x``, ``y``."""
    of_classes: dict[str, list[str]] = {}
    for name in names:
        kind, _, part = name.rpartition(".")
        of_classes.setdefault(part, []).append(kind)
    alike: dict[tuple[str, ...], list[str]] = {}
    for part, kinds in of_classes.items():
        alike.setdefault(tuple(kinds), []).append(f"`{part}`")
    texts = []
    for kinds, parts in alike.items():
        left = "all collectors" if set(kinds) == COLLECTORS else ", ".join(f"`{kind}`" for kind in kinds if kind)
        texts.append(f"{left}: {', '.join(parts)}" if left else ", ".join(parts))
    return "; ".join(texts)


def _ours(module: str, name: str) -> tuple[str, Any]:
    for place in MODULES[module]:
        if (found := getattr(import_module(place), name, None)) is not None:
            return place, found
    return "", None


def _names(module: str) -> list[tuple[str, str]]:
    rows = []
    for name in import_module(module).__all__:
        place, ours = _ours(module, name)
        if ours is not None:
            what = f"the same names in `{place}`"
        elif name in REASONS:
            what = REASONS[name]
        elif DISTRIBUTED.search(name):
            what = ACTOR
        else:
            raise LookupError(f"{module}.{name} is new: give asyncsync one, or say in REASONS why it has none")
        rows.append((name if ours is not None else f"{module}.{name}", what))
    return rows


def _parts(module: str) -> list[tuple[str, str]]:
    """Arguments and attributes of classes of both that ours lack."""
    known = set(dir(import_module("torch.utils.data").IterableDataset)) | OF_INSTANCES
    rows = []
    for name in import_module(module).__all__:
        theirs, (_, ours) = getattr(import_module(module), name), _ours(module, name)
        if ours is None or not inspect.isclass(theirs):
            continue
        lacks = [p for p in inspect.signature(theirs).parameters if p not in inspect.signature(ours).parameters]
        lacks += [a for a in dir(theirs) if not (a.startswith("_") or hasattr(ours, a) or a in known or a in lacks)]
        for part in lacks:
            if (why := REASONS.get(f"{name}.{part}", REASONS.get(f"*.{part}"))) is None:
                raise LookupError(f"{module}.{name} has {part!r}, which is new: give ours one, or say why it has none")
            rows.append((f"{name}.{part}", why))
    return [row for row in rows if row[1] != REASONS["*.args"]]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.read_text() == written() else "run docs/compare_torchrl.py")
    PAGE.write_text(written())
