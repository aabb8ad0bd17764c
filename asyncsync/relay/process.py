"""The relay process: a guest of the sender above, and a sender to the workers below, on one event loop."""

from __future__ import annotations

import json
import logging
import signal
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.trainer import TrainerLink
from asyncsync.bus.worker import guest_link
from asyncsync.errors import ProtocolError, WeightSyncError
from asyncsync.net.endpoint import is_plaintext_beyond_loopback
from asyncsync.net.keys import Credentials, KeyFiles
from asyncsync.protocol.settings import Settings
from asyncsync.relay.passing import Kept, Passing, RelaySlots
from asyncsync.weights import files
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import Path as KeyPath
from asyncsync.weights.tree import dotted
from asyncsync.wire.messages import Epoch

logger = logging.getLogger("asyncsync")


@dataclass(frozen=True)
class RelayOptions:
    """What `asyncsync relay` is given.

    Args:
        upstream: the sender's address, as its workers have it; several with commas between them.
        bind: where the workers of this relay connect.
        shared: they read shared memory, as those of :class:`asyncsync.SharedMemWeightSyncScheme`.
        keep: a file with the newest weights; None: they are in memory only.
        credentials: what to connect with, where the sender above has keys.
        keys: those of this relay and of its workers; None: anybody may connect.
    """

    upstream: str
    bind: str
    shared: bool = False
    keep: Path | None = None
    credentials: Callable[[], Credentials] | None = None
    keys: KeyFiles | None = None


class Relay:
    """One relay, on the running loop. Raises NotConnected if it cannot bind, or connect."""

    def __init__(self, options: RelayOptions, kept: tuple[Epoch, Kept] | None = None) -> None:
        checksum = options.keys is None and is_plaintext_beyond_loopback(options.bind)
        self.slots = RelaySlots() if options.shared else None
        self.downstream = TrainerLink(options.bind, None, 0, Settings(checksum=checksum), keys=options.keys)
        self.passing = Passing(self.downstream.machine, slots=self.slots, keeps=options.keep is not None)
        try:
            received = self.slots or Carrier()
            self.upstream = guest_link(
                options.upstream, received, Settings(), "relay", options.credentials, self.passing
            )
        except BaseException:
            self.downstream.cut(0)
            raise
        self.upstream.machine.session.reconnects = True
        self._keep = options.keep
        self._news = anyio.Event()
        self._report_scheduled = False
        if kept is not None:
            self._restore(*kept)
        self.upstream.settled = self.downstream.settled = self._settled

    def _restore(self, epoch: Epoch, kept: Kept) -> None:
        if self.slots is not None:
            shared: Kept = {}
            for model_id, (version, slab, metadata) in kept.items():
                slot = self.slots.pool.acquire(slab.layout)
                slab.copy_to(slot)
                slot.origin = slab.origin
                shared[model_id] = version, slot, metadata
            kept = shared
        self.upstream.machine.restore(epoch, {m: (version, slab) for m, (version, slab, _) in kept.items()})
        self.passing.restore(epoch, kept, self.downstream.loop.time())
        self.downstream.settle()

    # -- the two links ----------------------------------------------------------------------------------------------

    def _settled(self) -> None:
        """Something has changed above or below."""
        if self.passing.has_news:
            self._news.set()
        if self.downstream.closed or self.upstream.closed:
            return
        if self.downstream.machine.outbox:
            self.downstream.settle()
        if not self._report_scheduled and self.passing.is_report_due(self.upstream.machine):
            self._report_scheduled = True
            self.upstream.loop.call_soon(self._report)

    def _report(self) -> None:
        """Once per turn of the loop, whatever has come in it."""
        self._report_scheduled = False
        if not self.upstream.closed:
            with self.upstream.guard():
                self.passing.report(self.upstream.machine)
                self.upstream.settle()

    # -- the store --------------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Write whatever is newest, one after the other."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            with anyio.CancelScope(shield=True):
                await self._save()

    async def _save(self) -> None:
        path, epoch, self.passing.has_news = self._keep, self.passing.kept_of, False
        assert path is not None
        assert epoch is not None
        kept = {m: (version, slab.retain(), metadata) for m, (version, slab, metadata) in self.passing.kept.items()}
        try:
            await anyio.to_thread.run_sync(save, path, epoch, kept)
        except (OSError, ValueError) as error:
            logger.error("cannot keep the newest weights in %s: %s", path, error)
        finally:
            for _, slab, _ in kept.values():
                slab.release()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def over(self) -> None:
        """Return never; raise what keeps a link from working, or why the sender has turned this relay away."""
        session = self.upstream.machine.session
        await self.upstream.wait(lambda: session.ended is not None, None)
        assert session.ended is not None
        raise type(session.ended)(*session.ended.args)

    async def shutdown(self) -> None:
        """Leave; the workers look for another one. Idempotent."""
        self.upstream.settled = self.downstream.settled = None
        if self.passing.has_news:
            await self._save()
        await self.upstream.shutdown()
        await self.downstream.shutdown()
        if self.slots is not None:
            self.slots.pool.close()


async def run(options: RelayOptions, ready: Callable[[Relay], None] = lambda relay: None) -> None:
    """Relay until SIGINT or SIGTERM. Raises NotConnected if it cannot begin, other WeightSyncErrors if it cannot go on;
    OSError or ValueError if the file to be kept cannot be read."""
    kept = None if options.keep is None else await anyio.to_thread.run_sync(load, options.keep)
    relay = Relay(options, kept)
    try:
        async with anyio.create_task_group() as group:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                ready(relay)
                group.start_soon(partial(relay.downstream.wait, lambda: False, None))
                group.start_soon(relay.over)
                if options.keep is not None:
                    group.start_soon(relay.keep)
                async for _ in signals:
                    break
                group.cancel_scope.cancel()
    except* WeightSyncError as errors:
        raise errors.exceptions[0] from None
    finally:
        with anyio.CancelScope(shield=True):
            await relay.shutdown()


# -- the newest weights in a file, from which a relay serves its workers when the trainer is away ----------------------

# The file is of the safetensors format, and its tensors are those that were published, by their dotted names (of
# several models, behind the model's name): anybody can read it. What the format has no place for is in its metadata, as
# texts: epoch, versions, layouts, and other names of tied weights. It is written under another name first, so that it
# is always whole.
KEY = "asyncsync"


def _name(model_id: str, path: KeyPath, *, alone: bool) -> str:
    return dotted(path) if alone else f"{model_id}.{dotted(path)}"


def save(path: Path, epoch: Epoch, kept: Kept) -> None:
    """Write the file anew. Raises OSError; ValueError: the format has no such dtype, or two tensors have one name."""
    tensors, texts, models = {}, {"format": "pt"}, {}
    alone = len(kept) == 1
    for model_id, (version, slab, metadata) in kept.items():
        entries = slab.layout.entries
        for entry, view in zip(entries, slab.views, strict=True):
            if (name := _name(model_id, entry.path, alone=alone)) in tensors:
                raise ValueError(f"several tensors have one name in a file: {name}")
            tensors[name] = view
        for other, i in slab.layout.aliases.items():
            texts[_name(model_id, other, alone=alone)] = _name(model_id, entries[i].path, alone=alone)
        binary = {"layout": slab.layout.encoded, "digest": slab.layout.digest, "values": slab.values}
        texts_of = {name: b64encode(value).decode() for name, value in {**binary, "metadata": metadata}.items()}
        models[model_id] = {"version": version, "origin": slab.origin, **texts_of}
    texts[KEY] = json.dumps({"epoch": epoch, "models": models})
    files.write(path, tensors, texts)


def load(path: Path) -> tuple[Epoch, Kept] | None:
    """What the file holds, each slab with one reference; None: there is no file. Removes what a killed relay has left
    half written. Raises OSError; ValueError: it is not one of a relay's."""
    files.remove_half_written(path)
    if not path.exists():
        return None
    tensors, texts = files.read(path)
    kept: Kept = {}
    try:
        found = json.loads(texts[KEY])
        start, drawn = found["epoch"]
        alone = len(found["models"]) == 1
        for model_id, model in found["models"].items():
            blobs = {name: b64decode(model[name]) for name in ("layout", "digest", "values", "metadata")}
            layout = Layout.decode(blobs["layout"], blobs["digest"])
            slab = Slab.of(layout)
            for entry, view in zip(layout.entries, slab.views, strict=True):
                view.copy_(tensors[_name(model_id, entry.path, alone=alone)])
            slab.values, slab.origin = blobs["values"], model["origin"]
            kept[model_id] = int(model["version"]), slab, blobs["metadata"]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ProtocolError) as error:
        raise ValueError(f"{path} is not a file that a relay has kept: {error!r}") from error
    return (int(start), int(drawn)), kept
