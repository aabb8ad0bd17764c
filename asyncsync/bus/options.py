"""The options of a bus, each declared once. A scheme with a bus of its own takes those that its transport can use
(:mod:`asyncsync.schemes.options`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, TypedDict

from asyncsync.arguments import Option, check_count, check_fanout
from asyncsync.monitor.trace import Tracing
from asyncsync.net.keys import KeyFile

Endpoint = Annotated[
    str | None,
    Option("where the sender binds: ``ipc:///path`` or ``tcp://HOST:PORT``; None draws a private ipc path."),
]
Fanout = Annotated[
    bool,
    Option(
        "over tcp, send to all workers at once what three or more are to get; with ``compress`` or ``delta``, not "
        "weights of more than 64 KiB. It takes one more port, and one more connection per worker, and saves CPU time "
        "only with many workers and large weights (docs/multi-host.md).",
        False,
        check_fanout,
    ),
]


class LocalBusOptions(TypedDict, total=False):
    """Of any bus, also where a scheme's bytes do not travel over it."""

    connect: Annotated[
        str | None,
        Option("where workers connect, if that differs; of several, with commas between, they try one by one."),
    ]
    num_workers: Annotated[
        int | None,
        Option("fixed number of workers (0 … num_workers−1); None: elastic, workers come and go.", None, check_count),
    ]
    min_workers: Annotated[
        int,
        Option(
            "how many workers an elastic sender needs for ``connect`` and ``send_async``; 0: it can start alone.",
            1,
            partial(check_count, least=0),
        ),
    ]
    allow_plaintext: Annotated[bool, Option("allow unencrypted addresses that other hosts can reach.", False)]
    metrics_port: Annotated[
        int | str | None,
        Option(
            'port on loopback where this process serves Prometheus metrics, or ``"0.0.0.0:9100"``; 0 takes any free '
            "port. A pickled bus or scheme does not take it along."
        ),
    ]
    tracing: Annotated[
        Tracing,
        Option(
            "True: record OpenTelemetry spans for each version; None: if the program has set up OpenTelemetry; or a "
            "function ``trace(event, info)``, which is called with each step of each version (docs/monitoring.md)."
        ),
    ]


class WireOptions(LocalBusOptions, total=False):
    """Of a bus over which the bytes travel."""

    server_key: Annotated[
        KeyFile | Sequence[KeyFile] | None,
        Option(
            "path of the server's certificate: at the sender the secret file, at a receiver the public file. While you "
            "replace the server's key, a receiver may have several, of which one is right."
        ),
    ]
    clients: Annotated[
        KeyFile | None,
        Option("at the sender: the directory of the public certificates of the clients that it lets in."),
    ]
    client_key: Annotated[
        KeyFile | None,
        Option("at a receiver: the path of its secret certificate; ``{worker_idx}`` in it stands for its index."),
    ]
    compress: Annotated[
        str | None,
        Option('``"zstd"`` or ``"lz4"``: compress what travels over the bus, for workers that can decode it.'),
    ]
    delta: Annotated[
        bool,
        Option(
            "send a worker that has the previous version only what has changed. The sender keeps that version.", False
        ),
    ]


class BusOptions(WireOptions, total=False):
    checksum: Annotated[
        bool | None, Option("check every payload with CRC-32; None: only on unencrypted tcp beyond loopback.")
    ]
    fanout: Fanout
