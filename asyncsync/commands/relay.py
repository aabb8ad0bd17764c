"""``asyncsync relay``: connect once to a trainer, and pass its weights on to the workers of a host or of a subtree."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyncsync.commands.options import CommandFailed, need, safetensors_file, with_option_names
from asyncsync.errors import NotConnected, WeightSyncError
from asyncsync.net.keys import KeyFiles, check_addresses


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_parser(
        "relay",
        help="pass a trainer's weights on to the workers of this host",
        description="Connect once to the trainer, or to another relay, and pass its weights on to the workers that "
        "connect to this relay. The trainer waits for them and knows the version of each, as if they were connected "
        "to it. Versions keep their numbers. With --keep, the relay serves the last version while the trainer is away, "
        "and after its own restart.",
        epilog="Exit codes: 0 ended by SIGTERM or Ctrl-C; 1 could not start or go on, with the reason on stderr; 2 "
        "wrong arguments.",
    )
    parser.add_argument(
        "--upstream", required=True, metavar="ENDPOINT", help="the trainer or a relay; several are separated by commas"
    )
    parser.add_argument("--bind", required=True, metavar="ENDPOINT", help="where the workers connect")
    parser.add_argument(
        "--shared", action="store_true",
        help="the workers read shared memory (SharedMemWeightSyncScheme); needs --bind ipc://…",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=safetensors_file, metavar="FILE.safetensors", help="keep the newest weights in this file"
    )
    parser.add_argument(
        "--allow-plaintext", action="store_true",
        help="reach other hosts without encryption, on a network that you trust",
    )  # fmt: skip
    upstream = parser.add_argument_group("keys for the connection to --upstream")
    upstream.add_argument("--server-key", metavar="FILE", help="its public certificate")
    upstream.add_argument("--client-key", metavar="FILE", help="this relay's secret certificate, for any worker index")
    below = parser.add_argument_group("keys for the workers")
    below.add_argument("--bind-key", metavar="FILE", help="this relay's secret certificate as a server")
    below.add_argument("--clients", metavar="DIR", help="the public certificates of the workers that it lets in")
    parser.set_defaults(run=_run)


def _upstream_keys(options: argparse.Namespace) -> KeyFiles | None:
    try:
        keys = KeyFiles.given(options.server_key, None, options.client_key)
        check_addresses(keys, None, options.upstream, allow_plaintext=options.allow_plaintext)
    except ValueError as error:
        raise CommandFailed(f"--upstream: {with_option_names(error)}") from error
    return keys


def _downstream_keys(options: argparse.Namespace) -> KeyFiles | None:
    try:
        keys = KeyFiles.given(options.bind_key, options.clients, None)
        check_addresses(keys, options.bind, None, allow_plaintext=options.allow_plaintext)
    except ValueError as error:
        raise CommandFailed(f"--bind: {with_option_names(error, '--bind-key')}") from error
    return keys


def _run(options: argparse.Namespace) -> int:
    import anyio

    from asyncsync.relay.process import Relay, run

    try:
        upstream, downstream = _upstream_keys(options), _downstream_keys(options)
        if options.shared and not options.bind.startswith("ipc://"):
            raise ValueError(f"--shared is for workers of this host: --bind ipc:///absolute/path, not {options.bind}")
        if options.keep is not None:
            need("cli", "safetensors")
        keep = None if options.keep is None else Path(options.keep)
        credentials = None if upstream is None else partial(upstream.read_for_receiver, 0)
        addresses = options.upstream, options.bind
        make = partial(Relay, *addresses, shared=options.shared, keep=keep, credentials=credentials, keys=downstream)

        def ready(relay: Relay) -> None:
            kept = f", keeping {keep}" if keep is not None else ""
            version = relay.downstream.machine.targets.published
            print(f"relay: {options.bind} ← {options.upstream}{kept}; version {version or 'none yet'}", flush=True)

        anyio.run(run, make, ready)
    except (WeightSyncError, NotConnected, ValueError, OSError) as error:
        raise CommandFailed(str(error)) from error
    return 0
