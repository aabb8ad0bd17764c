"""A relay: a guest of the sender upstream, and the sender of the workers downstream, on one event loop. It has a
process of its own, or is embedded in the process of one of its workers.
"""

from __future__ import annotations

import json
import logging
import signal
from base64 import b64decode, b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.trainer import TrainerLink
from asyncsync.bus.worker import guest_link
from asyncsync.errors import ProtocolError, WeightSyncError
from asyncsync.net.endpoint import draw_endpoint, is_plaintext_beyond_loopback
from asyncsync.net.keys import Credentials, KeyFiles
from asyncsync.protocol.holdings import StagedPart
from asyncsync.protocol.settings import Settings
from asyncsync.relay.machine import Kept, RelayMachine, RelaySlots
from asyncsync.runtime.threads import keep_loop_running, run_on_loop
from asyncsync.weights import files
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import dotted
from asyncsync.wire.messages import Epoch

logger = logging.getLogger("asyncsync")


class Relay:
    """One relay, on the running loop. Raises NotConnected if it cannot bind or connect; OSError or ValueError if it
    cannot read the file ``keep``.

    Args:
        upstream: the sender's address, as for workers; several are separated by commas.
        bind: the address to which this relay's workers connect.
        shared: its workers read shared memory, as those of :class:`asyncsync.SharedMemWeightSyncScheme` do.
        keep: a file for the newest weights; None: keep them in memory only.
        credentials: returns the keys to connect with, if the sender has keys.
        keys: the keys of this relay and its workers; None: anybody may connect.
    """

    def __init__(
        self,
        upstream: str,
        bind: str,
        *,
        shared: bool = False,
        keep: Path | None = None,
        credentials: Callable[[], Credentials] | None = None,
        keys: KeyFiles | None = None,
    ) -> None:
        self.slots = RelaySlots() if shared else None
        kept = None if keep is None else load(keep, Slab if self.slots is None else self.slots.pool.acquire)
        checksum = keys is None and is_plaintext_beyond_loopback(bind)
        self.downstream = TrainerLink(bind, None, 0, Settings(checksum=checksum), keys=keys)
        self.machine = RelayMachine(self.downstream.machine, slots=self.slots, keeps=keep is not None)
        try:
            carrier = self.slots or Carrier()
            self.upstream = guest_link(upstream, carrier, Settings(), "relay", credentials, self.machine)
        except BaseException:
            self.downstream.shut_down_without_loop(0)
            raise
        self.upstream.machine.session.reconnects = True
        self.keep = keep
        self._report_scheduled = False
        if kept is not None:
            epoch, models = kept
            self.upstream.machine.restore(epoch, {m: (version, slab) for m, (version, slab, _) in models.items()})
            shown = {m: StagedPart(v, slab, None, slab.origin, metadata) for m, (v, slab, metadata) in models.items()}
            self.upstream.show(epoch, shown)
            self.machine.restore(epoch, models, self.downstream.loop.time())
            self.downstream.act_on_changes()
        self._saved = self.upstream.shown  # a new object whenever a model shows another version
        self.upstream.on_change = self.downstream.on_change = self._on_change

    # -- the two links ----------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        if self.downstream.closed or self.upstream.closed:
            return
        if self.downstream.machine.outbox:
            self.downstream.act_on_changes()
        if not self._report_scheduled and self.machine.is_report_due(self.upstream.machine):
            self._report_scheduled = True
            self.upstream.loop.call_soon(self._report)  # once per turn of the loop, after all messages of that turn

    def _report(self) -> None:
        self._report_scheduled = False
        if not self.upstream.closed:
            with self.upstream.guard():
                self.machine.report(self.upstream.machine)
                self.upstream.act_on_changes()

    # -- the file ---------------------------------------------------------------------------------------------------

    async def store(self) -> None:
        """Write the newest versions to the file whenever they change. Never returns."""
        while True:
            await self.upstream.wait(lambda: self.upstream.shown is not self._saved, None)
            with anyio.CancelScope(shield=True):
                await self._save()

    async def _save(self) -> None:
        held, shown = self.upstream.machine.holdings.updates, self.upstream.shown
        if self.keep is None or shown is self._saved or not held:  # nothing is held after the link was closed
            return
        self._saved = shown
        newest = max(epoch for epoch, *_ in held.values())
        kept = {m: (version, slab.retain(), shown[m][-1]) for m, (of, version, slab) in held.items() if of == newest}
        try:
            await anyio.to_thread.run_sync(save, self.keep, newest, kept)
        except (OSError, ValueError) as error:
            logger.error("cannot keep the newest weights in %s: %s", self.keep, error)
        finally:
            for _, slab, _ in kept.values():
                slab.release()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def until_ended(self) -> None:
        """Wait until the sender turns this relay away, and raise the reason. Raises what keeps the link from working.
        Never returns."""
        session = self.upstream.machine.session
        await self.upstream.wait(lambda: session.ended is not None, None)
        assert session.ended is not None
        raise type(session.ended)(*session.ended.args)

    async def shutdown(self) -> None:
        """Leave. The workers then look for another sender. Idempotent."""
        self.upstream.on_change = self.downstream.on_change = None
        await self._save()
        await self.upstream.shutdown()
        await self.downstream.shutdown()
        if self.slots is not None:
            self.slots.pool.close()


async def run(make: Callable[[], Relay], ready: Callable[[Relay], None]) -> None:
    """Make a relay, and run it until SIGINT or SIGTERM. Raises what ``make`` raises, or a WeightSyncError if the relay
    cannot go on."""
    relay = make()
    try:
        async with anyio.create_task_group() as group:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                ready(relay)
                group.start_soon(partial(relay.downstream.wait, lambda: False, None))
                group.start_soon(relay.until_ended)
                if relay.keep is not None:
                    group.start_soon(relay.store)
                async for _ in signals:
                    break
                group.cancel_scope.cancel()
    except* WeightSyncError as errors:
        raise errors.exceptions[0] from None
    finally:
        with anyio.CancelScope(shield=True):
            await relay.shutdown()


class EmbeddedRelay:
    """A relay that receives into shared memory for the workers of its host, on the loop thread of the blocking API. So
    all ranks of an inference engine on one host read one copy.

    Its methods block, so do not call them on the loop thread. Raises NotConnected if it cannot connect.

    Args:
        upstream: the sender's address, as for workers.
        keys: a receiver's keys, if the sender has keys.

    Attributes:
        endpoint: the address to which workers of this host connect, with a
            :class:`asyncsync.SharedMemWeightSyncScheme`.
    """

    def __init__(self, upstream: str, keys: KeyFiles | None = None) -> None:
        self.endpoint = draw_endpoint()
        credentials = None if keys is None else partial(keys.read_for_receiver, 0)
        self._relay: Relay | None = None
        run_on_loop(partial(self._open, upstream, credentials))

    async def _open(self, upstream: str, credentials: Callable[[], Credentials] | None) -> None:
        self._relay = Relay(upstream, self.endpoint, shared=True, credentials=credentials)
        keep_loop_running(self._end, True)

    async def _end(self, timeout: float) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            try:
                await relay.shutdown()
            finally:
                keep_loop_running(self._end, False)

    def close(self) -> None:
        """Leave. Idempotent."""
        if self._relay is not None:
            run_on_loop(partial(self._end, 0.0))


# -- the file with the newest weights, from which a relay serves its workers while the trainer is away -----------------

# The file has the safetensors format, so that any program can read it. It has the published tensors under their dotted
# names; with several models, the model's name goes before. Its metadata has, as texts, what the format does not
# provide for: epoch, versions, layouts, and other names of tied weights. It is written under another name first, so
# that it is always complete.
KEY = "asyncsync"


def save(path: Path, epoch: Epoch, kept: Kept) -> None:
    """Replace the file. Raises OSError, or ValueError if the format lacks a dtype, or if two tensors have one name."""
    tensors, texts, models = {}, {"format": "pt"}, {}
    for model_id, (version, slab, metadata) in kept.items():
        prefix, entries = "" if len(kept) == 1 else f"{model_id}.", slab.layout.entries
        for entry, view in zip(entries, slab.views, strict=True):
            if (name := prefix + dotted(entry.path)) in tensors:
                raise ValueError(f"several tensors have one name in a file: {name}")
            tensors[name] = view
        for other, i in slab.layout.aliases.items():
            texts[prefix + dotted(other)] = prefix + dotted(entries[i].path)
        layout, values = slab.layout, slab.values
        blobs = {"layout": layout.encoded, "digest": layout.digest, "values": values, "metadata": metadata}
        encoded = {name: b64encode(blob).decode() for name, blob in blobs.items()}
        models[model_id] = {"version": version, "origin": slab.origin, **encoded}
    texts[KEY] = json.dumps({"epoch": epoch, "models": models})
    files.write(path, tensors, texts)


def load(path: Path, acquire: Callable[[Layout], Slab] = Slab) -> tuple[Epoch, Kept] | None:
    """Read the file; each slab has one reference. None: there is no file. Removes half-written files that a killed
    relay has left. Raises OSError, or ValueError if a relay did not write the file."""
    files.remove_half_written(path)
    if not path.exists():
        return None
    tensors, texts = files.read(path)
    kept: Kept = {}
    try:
        found = json.loads(texts[KEY])
        start, drawn = found["epoch"]
        for model_id, model in found["models"].items():
            prefix = "" if len(found["models"]) == 1 else f"{model_id}."
            blobs = {name: b64decode(model[name]) for name in ("layout", "digest", "values", "metadata")}
            layout = Layout.decode(blobs["layout"], blobs["digest"])
            slab = acquire(layout)
            for entry, view in zip(layout.entries, slab.views, strict=True):
                view.copy_(tensors[prefix + dotted(entry.path)])
            slab.values, slab.origin = blobs["values"], model["origin"]
            kept[model_id] = int(model["version"]), slab, blobs["metadata"]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ProtocolError) as error:
        raise ValueError(f"{path} is not a file that a relay has kept: {error!r}") from error
    return (int(start), int(drawn)), kept
