"""The schemes' options, each declared once. Each scheme's constructor names the TypedDict with its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypedDict

from asyncsync.arguments import Option, check_count, check_timeout, described
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore, Endpoint, Fanout, LocalBusOptions, WireOptions
from asyncsync.model.strategy import WeightStrategy
from asyncsync.transports.shared_memory import MAP_ABOVE, SLOTS
from asyncsync.transports.torch_distributed import PAIR_BYTES

# Options that are positional, or that several TypedDicts below have without a common base.

Strategy = Annotated[
    str | WeightStrategy,
    Option(doc='``"tensordict"`` (default), ``"state_dict"``, or a :class:`WeightStrategy` instance.'),
]
Backend = Annotated[
    str,
    Option(
        "gloo",
        doc="a backend of torch.distributed that this torch has. Whichever it is, the weights are packed in host "
        "memory, and gloo carries them.",
    ),
]
MapAbove = Annotated[
    int,
    Option(
        MAP_ABOVE,
        partial(check_count, least=0),
        "bytes. For larger weights, a module's Parameters are re-pointed to the memory that received them, if the "
        "scheme does that; smaller weights are copied into the memory that the Parameters have.",
    ),
]
Slots = Annotated[
    int,
    Option(
        SLOTS,
        partial(check_count, least=2),  # workers read one while the sender writes the other
        "how many versions may occupy shared memory at once: the newest, the one that is being written, and older ones "
        "that slow workers still read. While all of them are in use, publishing waits.",
    ),
]
Sync = Annotated[
    bool, Option(True, doc="blocking API only. False: ``send`` does what ``publish`` does, and waits for no worker.")
]


@described
class OwnOptions(TypedDict, total=False):
    """Options of a scheme, whatever its bus.

    Args:
        bus: a :class:`Bus` of the same API that this scheme shares with others; None: a bus of its own.
        include: patterns, such as ``"actor.*"``, of the dotted names of the weights to send and receive. All other
            weights of a receiver's model stay as they are. None: all weights.
        exclude: patterns of names to leave out, although ``include`` selects them.
        strict: True: a name that matches no pattern, neither of ``include`` nor of ``exclude``, is an error: in the
            source, in an update, or in a receiver's model.
    """

    endpoint: Endpoint
    bus: BusCore | None
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    strict: Annotated[bool, Option(False)]


class SchemeOptions(OwnOptions, WireOptions, total=False):
    """Options of every scheme whose class declares no others."""


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
    """Options of ``SharedMemWeightSyncScheme`` and ``MultiProcessWeightSyncScheme``.

    Args:
        per_worker_weights: accepted because TorchRL has it; ignored: each worker may be sent weights of its own.
    """

    slots: Slots
    map_above: MapAbove
    sync: Sync
    per_worker_weights: Annotated[bool, Option(False)]


@described
class DistributedOptions(OwnOptions, LocalBusOptions, total=False):
    """Options of ``DistributedWeightSyncScheme``.

    Args:
        timeout: seconds to reach the store.
        store_info: the address of the scheme's own store: ``{"host": …, "port": …}``, or a pair of both; the sender
            takes a free port if the port is 0. None: use the process group's store if there is one; else the sender
            opens its own store at the address by which other hosts reach this one (if the context has a ``tcp_port``,
            on the second port after it, if that is free).
        pair_above: bytes. Larger weights go through gloo; smaller ones travel over the bus, within the update message.
    """

    backend: Backend
    sync: Sync
    timeout: Annotated[float, Option(DEFAULT_TIMEOUT, lambda _, timeout: check_timeout(timeout))]
    store_info: Mapping[str, Any] | tuple[str, int] | None
    map_above: MapAbove
    pair_above: Annotated[int, Option(PAIR_BYTES, partial(check_count, least=0))]
