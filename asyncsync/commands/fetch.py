"""``asyncsync fetch``: a trainer's current weights, in a file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from asyncsync.bus.worker import Guest, Snapshot
from asyncsync.commands.options import (
    CommandFailed,
    add_sender,
    as_options,
    credentials_of,
    need,
    positive,
    safetensors_file,
)
from asyncsync.errors import WeightSyncError
from asyncsync.transports.shared_memory import SharedMemTransport
from asyncsync.weights.files import dotted_names, write
from asyncsync.weights.layout import unpack_values
from asyncsync.wire.messages import Epoch

PATIENCE = 3.0  # seconds until this says what it waits for


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_parser(
        "fetch",
        help="save a trainer's current weights in a file",
        description="Connect to a running trainer, get the weights that it published last, and save them as a "
        "safetensors file, with their version and metadata. The file is written completely or not at all. The trainer "
        "does not wait for this command.",
        epilog="Exit codes: 0 saved; 1 not saved, with the reason on stderr; 2 wrong arguments; 130 ended by Ctrl-C.",
    )
    add_sender(parser, "a secret certificate that the sender lets in as any worker (asyncsync keygen DIR --name NAME)")
    parser.add_argument(
        "--out", type=safetensors_file, required=True, metavar="FILE.safetensors", help="where to save them"
    )
    parser.add_argument("--model", default=None, metavar="ID", help="which model, if the trainer has several")
    parser.add_argument(
        "--timeout", type=positive, default=30.0, metavar="S", help="give up after this time (default %(default)g)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    need("cli", "safetensors")
    credentials = credentials_of(options)

    async def get() -> tuple[Epoch | None, dict[str, Snapshot]]:
        guest = Guest(options.endpoint, SharedMemTransport(), credentials=credentials)
        waiting = asyncio.get_running_loop().call_later(PATIENCE, _tell, guest)
        try:
            found = await guest.weights(options.timeout)
            return guest.link.machine.session.epoch, found
        finally:
            waiting.cancel()
            await guest.shutdown()

    try:
        with asyncio.Runner() as runner:
            epoch, found = runner.run(get())
        name = _chosen(found, options.model)
        snapshot = found[name]
        write(options.out, dotted_names(snapshot.slab.tensors()), _metadata(name, epoch, snapshot))
    except (WeightSyncError, ValueError, OSError) as error:
        raise CommandFailed(as_options(error)) from error
    size = f"{len(snapshot.slab.tensors())} tensors, {snapshot.slab.nbytes:,} bytes"
    print(f"{options.out}: version {snapshot.version} of {name or 'the model'}, {size}")
    return 0


def _tell(guest: Guest) -> None:
    print(f"asyncsync fetch: waiting: {as_options(guest.why())}", file=sys.stderr, flush=True)


def _chosen(found: dict[str, Snapshot], wanted: str | None) -> str:
    names = ", ".join(repr(name) for name in sorted(found))
    if wanted is None and len(found) == 1:
        return next(iter(found))
    if wanted is None:
        raise CommandFailed(f"the trainer has several models: choose one with --model, of {names}")
    if wanted not in found:
        raise CommandFailed(f"the trainer has no weights of {wanted!r}, but of {names}")
    return wanted


def _metadata(name: str, epoch: Epoch | None, snapshot: Snapshot) -> dict[str, str]:
    """Texts, as the format has it: what is no text is JSON, as far as that can tell it."""
    values = unpack_values(snapshot.slab.values, snapshot.slab.layout)
    texts = {"format": "pt", "model_id": name, "version": str(snapshot.version), "epoch": json.dumps(epoch)}
    if snapshot.metadata:
        texts["metadata"] = _as_json(snapshot.metadata)
    if values:
        texts["extra_state"] = _as_json({".".join(path): value for path, value in values.items()})
    return texts


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(_with_texts(values), default=repr)


def _with_texts(value: Any) -> Any:
    """The same, with keys as JSON has them, and lists in place of tensors and arrays."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _with_texts(inner) for key, inner in value.items()}
    return [_with_texts(inner) for inner in value] if isinstance(value, list | tuple) else value
