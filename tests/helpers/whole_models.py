"""Models that hold one number everywhere, so that a torn update shows; and what a worker's binding makes of a slab."""

from collections.abc import Callable
from typing import Any

from torch import nn

from asyncsync.model.strategy import WeightStrategy, flat_weights
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool, pack


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def filled(value: float, make: Callable[[], nn.Module] | None = None) -> nn.Module:
    """A model whose every element is this number."""
    model = make() if make is not None else nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    return model


def values_of(model: nn.Module) -> set[float]:
    return {x for tensor in model.state_dict().values() for x in tensor.flatten().tolist()}


def published(source: Any, strategy: WeightStrategy | None = None) -> Slab:
    """What a worker gets: packed, the layout and the values having crossed the wire."""
    flat = flat_weights(strategy or WeightStrategy(), source)
    layout = Layout.of(flat)
    slab = SlabPool().acquire(Layout.decode(layout.encoded, layout.digest))
    pack(slab, flat)
    return slab


def finish(prepared: Any) -> None:
    """Apply an update that has been prepared, as a worker does when nobody reads."""
    prepared.resolve()
    prepared.apply()
    prepared.complete()
