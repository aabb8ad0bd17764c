"""The options of the schemes, each declared once. A scheme's class names the set that its constructor takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypedDict

from asyncsync.arguments import Option, check_count, check_timeout, described
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore, Endpoint, Fanout, LocalBusOptions, WireOptions
from asyncsync.model.strategy import WeightStrategy
from asyncsync.transports.shared_memory import MAP_ABOVE, SLOTS
from asyncsync.transports.torch_distributed import PAIR_BYTES

# Positional, or of schemes that have no other base in common.

Strategy = Annotated[
    str | WeightStrategy,
    Option(doc='``"tensordict"`` (default), ``"state_dict"``, or a :class:`WeightStrategy` instance.'),
]
Backend = Annotated[
    str,
    Option(
        "gloo",
        doc="of torch.distributed, one that this torch has; weights are packed in host memory, and gloo carries them "
        "whichever it is.",
    ),
]
MapAbove = Annotated[
    int,
    Option(
        MAP_ABOVE,
        partial(check_count, least=0),
        "weights of more bytes are received where a module's Parameters then get their memory; smaller ones are copied "
        "into the memory that the Parameters have.",
    ),
]
Slots = Annotated[
    int,
    Option(
        SLOTS,
        partial(check_count, least=2),  # one is read, one is written
        "how many versions may be in use at once: the newest, one that is being written, and older ones that slow "
        "workers still read. With all of them in use, publishing waits.",
    ),
]
Sync = Annotated[
    bool, Option(True, doc="of the blocking API: False: ``send`` is ``publish``, and waits for no worker.")
]


@described
class OwnOptions(TypedDict, total=False):
    """Of a scheme, whatever its bus.

    Args:
        bus: a :class:`Bus` of the same API, shared with other schemes, instead of one of its own.
        include: patterns, ``"actor.*"``, of the dotted names of the weights that are sent and received; everything else
            of the receivers' models stays as it is. None: all weights.
        exclude: patterns of names that ``include`` selects, but that are not sent either.
        strict: names that match no pattern, in the source, in what has come or in a receiver's model, are an error.
    """

    endpoint: Endpoint
    bus: BusCore | None
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    strict: Annotated[bool, Option(False)]


class SchemeOptions(OwnOptions, WireOptions, total=False):
    """Of every scheme that does not say otherwise."""


class ZMQOptions(SchemeOptions, total=False):
    fanout: Fanout
    map_above: MapAbove


class AutoOptions(SchemeOptions, total=False):
    slots: Slots
    map_above: MapAbove


class RPCOptions(SchemeOptions, total=False):
    backend: Backend
    map_above: MapAbove


class RayOptions(SchemeOptions, total=False):
    map_above: MapAbove


@described
class SharedMemOptions(OwnOptions, LocalBusOptions, total=False):
    """Of ``SharedMemWeightSyncScheme`` and ``MultiProcessWeightSyncScheme``.

    Args:
        per_worker_weights: as TorchRL takes it; with or without it, workers may be sent weights of their own.
    """

    slots: Slots
    map_above: MapAbove
    sync: Sync
    per_worker_weights: Annotated[bool, Option(False)]


@described
class DistributedOptions(OwnOptions, LocalBusOptions, total=False):
    """Of ``DistributedWeightSyncScheme``.

    Args:
        timeout: seconds to reach the store.
        store_info: where the scheme's own store is to be, and is: ``{"host": …, "port": …}``, or a pair of both; as
            port of the sender's, 0 is one that is free. None: the process group's if there is one, else one of its own
            at the address by which other hosts reach this one (with a context, on the second port after its
            ``tcp_port``).
        pair_above: weights of more bytes go through gloo; fewer ride along in the instruction.
    """

    backend: Backend
    sync: Sync
    timeout: Annotated[float, Option(DEFAULT_TIMEOUT, lambda _, timeout: check_timeout(timeout))]
    store_info: Mapping[str, Any] | tuple[str, int] | None
    map_above: MapAbove
    pair_above: Annotated[int, Option(PAIR_BYTES, partial(check_count, least=0))]
