"""``asyncsync fetch``: save a trainer's current weights in a file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.worker import guest_link
from asyncsync.commands.options import (
    CommandFailed,
    add_sender,
    credentials_of,
    need,
    positive,
    safetensors_file,
    with_option_names,
)
from asyncsync.errors import NotConnected, WeightSyncError
from asyncsync.net.keys import Credentials
from asyncsync.protocol.settings import Settings
from asyncsync.transports.shared_memory import SharedMemTransport
from asyncsync.weights.files import write
from asyncsync.weights.layout import unpack_values
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import dotted
from asyncsync.wire.messages import Epoch

PATIENCE = 3.0  # seconds after which the command says what it waits for


class Snapshot(NamedTuple):
    """One model's weights: the version, the metadata it was published with, and a copy of the slab."""

    version: int
    metadata: dict[str, Any]
    slab: Slab


class Guest:
    """A guest of one sender, on the running loop. With a shared-memory ``transport`` it receives chunks, too. Shut down
    its ``link`` in the end."""

    def __init__(self, sender: str, transport: Carrier, credentials: Callable[[], Credentials] | None = None) -> None:
        self.link = guest_link(sender, transport, Settings(), "guest", credentials)

    async def weights(self, timeout: float) -> dict[str, Snapshot]:
        """The newest weights of each model that has some, by the model's name ("" for one without a name). Raises
        NotConnected if they do not arrive within the timeout, and at once if the sender refuses this guest's key;
        ClosedError or Fenced if the sender has turned this guest away."""
        machine, dialer = self.link.machine, self.link.connection
        session = machine.session

        def have_arrived() -> bool:
            return any(session.served.values()) and all(map(machine.is_connected, session.served))

        def is_turned_away() -> bool:
            return session.ended is not None or (dialer.is_refused and not dialer.has_other_endpoints)

        in_time = await self.link.wait(lambda: have_arrived() or is_turned_away(), timeout)
        if session.ended is not None:
            raise type(session.ended)(*session.ended.args)
        if not have_arrived():
            late = "" if in_time else f" after {timeout:g} s"
            raise NotConnected(f"no weights from {dialer.endpoint}{late}: {self.why()}")
        snapshots = {}
        for model_id in [m for m, digest in session.served.items() if digest]:
            shown = self.link.newest_shown([model_id]).shown
            snapshots[model_id] = Snapshot(shown.version, shown.metadata, await self.link.copy_held(model_id))
        return snapshots

    def why(self) -> str:
        """A sentence for the user: why there are no weights yet."""
        machine = self.link.machine
        if self.link.connection.why:
            return self.link.connection.why
        if not machine.session.online:
            return "there is no connection: is the sender running, and is this its address?"
        if not machine.session.welcomed:
            return "it has stopped, or it has no version yet, like a relay that has not reached its trainer"
        if machine.holdings.error:
            return "; ".join(str(error) for _, error, _ in machine.holdings.error.values())
        if not any(machine.session.served.values()):
            return "the sender has not published any yet"
        return "the weights have not arrived completely yet"


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
    parser.add_argument("--model", metavar="ID", help="which model, if the trainer has several")
    parser.add_argument(
        "--timeout", type=positive, default=30.0, metavar="S", help="give up after this time (default %(default)g)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    need("cli", "safetensors")
    credentials = credentials_of(options)

    async def get() -> tuple[Epoch | None, dict[str, Snapshot]]:
        guest = Guest(options.endpoint, SharedMemTransport(), credentials)
        notice = asyncio.get_running_loop().call_later(PATIENCE, _print_notice, guest)
        try:
            snapshots = await guest.weights(options.timeout)
            return guest.link.machine.session.epoch, snapshots
        finally:
            notice.cancel()
            await guest.link.shutdown()

    try:
        with asyncio.Runner() as runner:
            epoch, snapshots = runner.run(get())
        name = _chosen_model(snapshots, options.model)
        snapshot = snapshots[name]
        tensors = {dotted(path): tensor for path, tensor in snapshot.slab.tensors().items()}
        write(options.out, tensors, _metadata(name, epoch, snapshot))
    except (WeightSyncError, ValueError, OSError) as error:
        raise CommandFailed(with_option_names(error)) from error
    size = f"{len(tensors)} tensors, {snapshot.slab.nbytes:,} bytes"
    print(f"{options.out}: version {snapshot.version} of {name or 'the model'}, {size}")
    return 0


def _print_notice(guest: Guest) -> None:
    print(f"asyncsync fetch: waiting: {with_option_names(guest.why())}", file=sys.stderr, flush=True)


def _chosen_model(snapshots: dict[str, Snapshot], wanted: str | None) -> str:
    names = ", ".join(repr(name) for name in sorted(snapshots))
    if wanted is None and len(snapshots) == 1:
        return next(iter(snapshots))
    if wanted is None:
        raise CommandFailed(f"the trainer has several models: choose one with --model, of {names}")
    if wanted not in snapshots:
        raise CommandFailed(f"the trainer has no weights of {wanted!r}, but of {names}")
    return wanted


def _metadata(name: str, epoch: Epoch | None, snapshot: Snapshot) -> dict[str, str]:
    """The file's metadata. The format allows only texts, so other values become JSON, as far as possible."""
    values = unpack_values(snapshot.slab.values, snapshot.slab.layout)
    texts = {"format": "pt", "model_id": name, "version": str(snapshot.version), "epoch": json.dumps(epoch)}
    if snapshot.metadata:
        texts["metadata"] = _as_json(snapshot.metadata)
    if values:
        texts["extra_state"] = _as_json({".".join(path): value for path, value in values.items()})
    return texts


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(_json_value(values), default=repr)


def _json_value(value: Any) -> Any:
    """The value with texts as keys, and with lists in place of tensors and arrays."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _json_value(inner) for key, inner in value.items()}
    return [_json_value(inner) for inner in value] if isinstance(value, list | tuple) else value
