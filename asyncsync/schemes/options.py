"""The options of the schemes, each declared once. A scheme's class names the set that its constructor takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from asyncsync.arguments import Option, check_bytes, check_slots, check_timeout
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore, Endpoint, Fanout, LocalBusOptions, WireOptions
from asyncsync.model.strategy import WeightStrategy
from asyncsync.transports.shared_memory import COPY_BYTES, SLOTS
from asyncsync.transports.torch_distributed import PAIR_BYTES

Strategy = Annotated[
    str | WeightStrategy,
    Option('``"tensordict"`` (default), ``"state_dict"``, or a :class:`WeightStrategy` instance.'),
]
Backend = Annotated[
    str,
    Option(
        "of torch.distributed, one that this torch has; weights are packed in host memory, and gloo carries them "
        "whichever it is.",
        "gloo",
    ),
]
MapAbove = Annotated[
    int,
    Option(
        "weights of more bytes are received where a module's Parameters then get their memory; smaller ones are copied "
        "into the memory that the Parameters have.",
        COPY_BYTES,
        check_bytes,
    ),
]
Slots = Annotated[
    int,
    Option(
        "how many versions may be in use at once: the newest, one that is being written, and older ones that slow "
        "workers still read. With all of them in use, publishing waits.",
        SLOTS,
        check_slots,
    ),
]
Sync = Annotated[bool, Option("of the blocking API: False: ``send`` is ``publish``, and waits for no worker.", True)]


class OwnOptions(TypedDict, total=False):
    """Of a scheme, whatever its bus."""

    endpoint: Endpoint
    bus: Annotated[
        BusCore | None, Option("a :class:`Bus` of the same API, shared with other schemes, instead of one of its own.")
    ]
    include: Annotated[
        str | Sequence[str] | None,
        Option(
            'patterns, ``"actor.*"``, of the dotted names of the weights that are sent and received; everything else '
            "of the receivers' models stays as it is. None: all weights."
        ),
    ]
    exclude: Annotated[
        str | Sequence[str] | None, Option("patterns of names that ``include`` selects, but that are not sent either.")
    ]
    strict: Annotated[
        bool,
        Option(
            "names that match no pattern, in the source, in what has come or in a receiver's model, are an error.",
            False,
        ),
    ]


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


class SharedMemOptions(OwnOptions, LocalBusOptions, total=False):
    slots: Slots
    map_above: MapAbove
    sync: Sync
    per_worker_weights: Annotated[
        bool,
        Option("as TorchRL takes it; with or without it, workers may be sent weights of their own.", False),
    ]


class DistributedOptions(OwnOptions, LocalBusOptions, total=False):
    backend: Backend
    sync: Sync
    timeout: Annotated[
        float, Option("seconds to reach the store.", DEFAULT_TIMEOUT, lambda _, timeout: check_timeout(timeout))
    ]
    store_info: Annotated[
        Mapping[str, Any] | tuple[str, int] | None,
        Option(
            'where the scheme\'s own store is to be, and is: ``{"host": …, "port": …}``, or a pair of both; as port of '
            "the sender's, 0 is one that is free. None: the process group's if there is one, else one of its own at "
            "the address by which other hosts reach this one (with a context, on the second port after its "
            "``tcp_port``)."
        ),
    ]
    map_above: MapAbove
    pair_above: Annotated[
        int,
        Option("weights of more bytes go through gloo; fewer ride along in the instruction.", PAIR_BYTES, check_bytes),
    ]
