"""Taking: the block of ``scheme.take()``, in which the user's code has a version under a lease.

The blocks of both APIs run :meth:`asyncsync.bus.applying.Applying.take` and ``give_back`` on the link's loop. The code
in the block runs in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from asyncsync.arguments import check_count, check_timeout
from asyncsync.bus.worker import WorkerLink
from asyncsync.protocol.holdings import Taken
from asyncsync.runtime.threads import call_soon
from asyncsync.schemes.scheme import Scheme
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Epoch, decode_metadata, epoch_text


class Version:
    """A version of a model that a receiver has taken. Usable until the block ends.

    Attributes:
        version, epoch: its number, and the epoch of its sender.
        metadata: what was published with it.
        previous: the version that was applied before, to go back to; None: none was, or it is this one.
    """

    def __init__(
        self, version: int, epoch: Epoch, metadata: bytes, slab: Slab, previous: Version | None = None
    ) -> None:
        self.version = version
        self.epoch = epoch_text(epoch)
        self.metadata: dict[str, Any] = decode_metadata(metadata)
        self.previous = previous
        self._slab: Slab | None = slab

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(dotted name, tensor)`` in the order of the layout; a tied tensor appears under each of its names. The
        tensors are views of the memory that received the version: use them inside the block only.

        Raises:
            RuntimeError: the block has ended.
        """
        if self._slab is None:
            raise RuntimeError(f"version {self.version} was given back when the block ended: take it again")
        return ((".".join(path), tensor) for path, tensor in self._slab.tensors().items())

    def expire(self) -> None:
        # The block has ended: refuse further use.
        self._slab = None
        if self.previous is not None:
            self.previous.expire()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.version}, epoch={self.epoch!r})"


class Taking:
    """``async with scheme.take(…) as taken``; see :meth:`asyncsync.WeightSyncScheme.take`."""

    _taken: Taken | None = None

    def __init__(self, scheme: Scheme, version: int | None, epoch: str | None, timeout: float) -> None:
        if version is not None:
            check_count("version", version)
        if epoch is not None and not isinstance(epoch, str):
            raise TypeError(f"epoch is a str, as scheme.epoch, not {epoch!r}")
        check_timeout(timeout)
        scheme.check_can_take()
        self._scheme = scheme
        self._request = version, epoch, timeout
        self._link: WorkerLink | None = None
        self._lent: Version | None = None

    async def __aenter__(self) -> Version:
        if self._link is not None:
            raise RuntimeError("this block was used already: call take() again")
        link, model_id = self._scheme.bus.worker_link(), self._scheme.topic
        before = link.newest_shown([model_id])
        taken = await link.take(model_id, *self._request)
        self._link, self._taken = link, taken
        part, previous = taken.staging.parts[model_id], None
        if model_id in taken.previous:
            epoch, version, slab = taken.previous[model_id]
            previous = Version(version, epoch, before.metadata, slab)
        self._lent = Version(part.version, taken.staging.epoch, part.metadata, part.slab, previous)
        return self._lent

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        await self.give_back(error)

    async def give_back(self, error: BaseException | None, *, unused: bool = False) -> None:
        # It awaits nothing, so no cancellation can interrupt it.
        taken, self._taken = self._taken, None
        if taken is None:
            return
        assert self._link is not None
        assert self._lent is not None
        self._lent.expire()
        self._link.give_back(taken, error, unused=unused)

    def __del__(self) -> None:
        # Still taken: an interrupt struck just before __exit__ ran, or the version came after the caller had gone.
        if (taken := self._taken) is not None and self._link is not None:
            error = RuntimeError("an interrupt has ended the block: it is not known whether the version was applied")
            call_soon(self._link.loop, partial(self._link.give_back, taken, error))


class BlockingTaking:
    """``with scheme.take(…) as taken``, in any thread but the loop's; see :meth:`asyncsync.WeightSyncScheme.take`."""

    def __init__(self, scheme: Any, version: int | None, epoch: str | None, timeout: float) -> None:
        self._scheme = scheme
        self._taking = Taking(scheme, version, epoch, timeout)

    def __enter__(self) -> Version:
        try:
            taken: Version = self._scheme.run_on_loop(self._taking.__aenter__)
        except BaseException:  # an interrupt may strike after the version is taken, before it is returned
            self._give_back(None, unused=True)
            raise
        return taken

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self._give_back(error)
        except BaseException:  # an interrupt may strike before the version is given back
            self._give_back(error)
            raise

    def _give_back(self, error: BaseException | None, *, unused: bool = False) -> None:
        self._scheme.end_on_loop(partial(self._taking.give_back, error, unused=unused))
