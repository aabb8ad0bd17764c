"""What a scheme's receiver does: it applies updates, and returns each of them once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.receiving import Mark
from asyncsync.model.binding import Binding
from asyncsync.model.hooks import check_calls
from asyncsync.model.strategy import WeightStrategy
from asyncsync.weights.slab import Slab

__all__ = ["Receiving"]


class Receiving:
    """The receiver of one model; the arguments are those of ``init_on_receiver``, but ``adopts``: Parameters may get
    their memory in a slab; ``custom``: the user's own way of applying weights, if any; ``options``: for
    ``create_transport``.

    Raises ValueError: an unknown ``apply`` or ``gate``, or a compiled or scripted module whose calls cannot be seen.
    """

    def __init__(
        self,
        topic: str,
        model: Any,
        strategy: WeightStrategy,
        *,
        cast: bool,
        inplace: bool | None,
        apply: str,
        gate: str,
        adopts: bool,
        custom: Callable[[Any], None] | None,
        options: Mapping[str, Any],
    ) -> None:
        if apply not in ("auto", "on_receive"):
            raise ValueError(f"apply must be 'auto' or 'on_receive', not {apply!r}")
        if gate not in ("hooks", "hold"):
            raise ValueError(f"gate must be 'hooks' or 'hold', not {gate!r}")
        self.topic = topic
        self.options = options
        self.device: torch.device | None = None  # where returned weights go; None: they stay in the host's memory
        self.returned: Mark | None = None  # which update was returned last
        self.binding = Binding(
            model, strategy, cast=cast, inplace=inplace is not False, repoints=inplace is None and adopts, apply=custom
        )
        self._model = model
        self._is_manual = apply == "on_receive"
        self._is_hooked = isinstance(model, nn.Module) and gate == "hooks" and apply == "auto"
        if self._is_hooked:
            check_calls(model, stacklevel=3)

    def register(self, link: ReceiverLink, transport: Carrier, context: Any) -> None:
        """Take part in the updates of a link, and pass updates on to this context."""
        if self._is_hooked:
            link.gate.attach(self._model)
        link.register(self.topic, self.binding, transport, manual=self._is_manual, context=context)

    def take_back(self, mark: Mark | None, before: Mark | None) -> None:
        """Note that this update has not reached the caller: the next :meth:`receive` returns it, unless a newer one was
        returned meanwhile."""
        if self.returned == mark:
            self.returned = before

    async def receive(
        self, link: ReceiverLink, timeout: float | None, is_over: Callable[[], bool]
    ) -> TensorDict | None:
        """The newest applied update that was not returned yet; None when the timeout expires."""
        before = self.returned
        mark = await link.receiving.receive(self.topic, before, timeout, is_over)
        return None if mark is None else await self._return(link, mark, before)

    async def fetch(self, link: ReceiverLink, timeout: float) -> TensorDict:
        """The sender's current version, applied."""
        mark = await link.receiving.current(self.topic, timeout)
        return await self._return(link, mark, self.returned)

    async def _return(self, link: ReceiverLink, mark: Mark, before: Mark | None) -> TensorDict:
        self.returned = mark
        try:
            weights: TensorDict = await link.receiving.copy(self.topic, self._owned)
        except BaseException:
            self.take_back(mark, before)
            raise
        return weights

    async def take_in(self, link: ReceiverLink, is_over: Callable[[], bool]) -> None:
        """Apply what has come, without returning it."""
        self.returned = link.receiving.mark(self.topic)  # what was applied before is not returned
        mark = await link.receiving.receive(self.topic, self.returned, 0.0, is_over)
        if mark is not None:
            self.returned = mark

    async def current(self, link: ReceiverLink) -> TensorDict | None:
        """A copy of what this receiver holds; None: nothing yet."""
        if link.subscriber.holdings.held.get(self.topic) is None:
            return None
        weights: TensorDict = await link.receiving.copy(self.topic, self._owned)
        return weights

    def _owned(self, slab: Slab) -> TensorDict:
        weights = slab.weights()
        return weights.to(self.device) if self.device is not None and self.device.type != "cpu" else weights
