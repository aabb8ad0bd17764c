"""What a scheme's receiver does: it applies updates, and returns each of them once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.receiving import Mark
from asyncsync.errors import ClosedError
from asyncsync.model.bound_model import BoundModel
from asyncsync.model.gate import Gate, Handle, check_calls, check_methods
from asyncsync.model.selection import Selection
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights
from asyncsync.model.update import prepare_flat
from asyncsync.weights.slab import Slab


class Receiving:
    """The receiver of one model; the arguments are those of ``init_on_receiver``, but ``selection``: the scheme's;
    ``adopts``: Parameters may get their memory in a slab; ``custom``: the user's own way of applying weights, if any;
    ``options``: for ``create_transport``.

    Raises ValueError: an unknown ``apply`` or ``gate``, a compiled or scripted module whose calls cannot be seen, one
    whose calls end before their work does, or no method of a name in ``gated``.
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
        gated: Iterable[str],
        selection: Selection,
        adopts: bool,
        custom: Callable[[Any], None] | None,
        options: Mapping[str, Any],
    ) -> None:
        if apply not in ("auto", "on_receive"):
            raise ValueError(f"apply must be 'auto' or 'on_receive', not {apply!r}")
        if gate not in ("hooks", "hold"):
            raise ValueError(f"gate must be 'hooks' or 'hold', not {gate!r}")
        if isinstance(gated, str):
            raise TypeError(f"gated takes several names: gated=({gated!r},)")
        self._gated = tuple(gated)
        if self._gated and (gate != "hooks" or apply != "auto" or model is None):
            why = "there is no model" if model is None else f"with gate={gate!r} and apply={apply!r} no call is"
            raise ValueError(f"gated={self._gated!r} names methods of the model whose calls are counted, but {why}")
        self.topic = topic
        self.options = options
        self.device: torch.device | None = None  # where returned weights go; None: they stay in the host's memory
        self.returned: Mark | None = None  # which update was returned last
        self.has_connected = False
        self._handles: list[Handle] = []
        self._strategy, self.selection = strategy, selection
        self._is_manual = apply == "on_receive"
        self._has_hooks = gate == "hooks" and apply == "auto"
        self._make_binding = partial(
            Binding,
            strategy=strategy,
            cast=cast,
            inplace=inplace is not False,
            repoints=inplace is None and adopts,
            selection=selection,
            apply=custom,
        )
        self.bind(model)

    def bind(self, model: Any) -> None:
        """Apply updates to this model. Raises ValueError as the constructor."""
        binding = self._make_binding(model)
        is_hooked = self._has_hooks and isinstance(model, nn.Module)
        check_methods(model, self._gated)
        if is_hooked:
            check_calls(model, has_gated_methods=bool(self._gated))
        self.binding, self.model, self._is_hooked = binding, model, is_hooked

    def _attach(self, gate: Gate) -> None:
        """Count calls that read the model."""
        if self._is_hooked:
            self._handles += gate.attach(self.model)
        if self._gated:
            self._handles += gate.attach_methods(self.model, self._gated)

    async def replace(self, link: ReceiverLink, model: Any, timeout: float) -> None:
        """Apply updates to this model from now on, instead of the other; returns when it has the current weights.
        Raises as :meth:`asyncsync.bus.receiving.Receiving.connected`."""
        self.bind(model)
        self._attach(link.gate)
        await link.replace(self.topic, self.binding, timeout)
        await link.receiving.connected(self.topic, timeout, link.loop.time() + timeout)

    def register(self, link: ReceiverLink, transport: Carrier, context: Any) -> None:
        """Take part in the updates of a link, and pass updates on to this context."""
        self._attach(link.gate)
        link.register(self.topic, self.binding, transport, manual=self._is_manual, context=context)

    async def leave(self, link: ReceiverLink, others: Iterable[Receiving | None], timeout: float) -> None:
        """Take part no more in the updates of a link, on which there are ``others``. The model stays as it is."""
        if not any(other is not None and other.model is self.model for other in others):
            link.gate.detach(self._handles)
        with suppress(TimeoutError, ClosedError):  # the link is shut down meanwhile, and what it has with it
            async with asyncio.timeout(timeout):
                await link.unregister(self.topic)

    def apply(self, weights: Any, *, inplace: bool) -> None:
        """Apply weights that are at hand, as far as they are selected."""
        strategy = self._strategy
        if not self.selection.is_all and type(strategy).apply_weights is WeightStrategy.apply_weights:
            flat = flat_weights(strategy, weights)
            bound = BoundModel(self.model, strategy.extract_as, inplace=inplace, selection=self.selection)
            prepare_flat(bound, flat).apply_now()
        else:
            strategy.apply_weights(self.model, weights, inplace=inplace)

    def take_back(self, mark: Mark | None, before: Mark | None) -> None:
        """Note that this update has not reached the caller: the next :meth:`receive` returns it, unless a newer one was
        returned meanwhile."""
        if self.returned == mark:
            self.returned = before

    async def receive(self, link: ReceiverLink, timeout: float | None) -> TensorDict | None:
        """The newest applied update that was not returned yet; None when the timeout expires."""
        before = self.returned
        mark = await link.receiving.receive(self.topic, before, timeout)
        return None if mark is None else await self._return(link, mark, before)

    async def fetch(self, link: ReceiverLink, timeout: float) -> TensorDict:
        """The sender's current version, applied."""
        mark = await link.receiving.current(self.topic, timeout)
        return await self._return(link, mark, self.returned)

    async def reach(self, link: ReceiverLink, version: int, timeout: float, others: Iterable[str]) -> TensorDict | None:
        """This version, or a newer one, applied, with what these other models have got together with it; None if it was
        returned already."""
        before = self.returned
        mark = await link.receiving.reach(self.topic, version, timeout, others)
        return None if mark == before else await self._return(link, mark, before)

    async def _return(self, link: ReceiverLink, mark: Mark, before: Mark | None) -> TensorDict:
        self.returned = mark
        try:
            weights: TensorDict = await link.receiving.copy(self.topic, self._owned)
        except BaseException:
            self.take_back(mark, before)
            raise
        return weights

    async def take_in(self, link: ReceiverLink) -> None:
        """Apply what has come, without returning it."""
        self.returned = link.receiving.mark(self.topic)  # what was applied before is not returned
        mark = await link.receiving.receive(self.topic, self.returned, 0.0)
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
