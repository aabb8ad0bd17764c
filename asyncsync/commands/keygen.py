"""``asyncsync keygen``: make the certificates of a sender and its clients."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from asyncsync.commands.options import CommandFailed
from asyncsync.errors import NotConnected
from asyncsync.net.keys import Certificate, Workers, check_writers, parse_workers, write_new

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}", re.ASCII)
MAX_WORKERS = 100_000
Client = tuple[str, Workers]

LAYOUT = """\
DIR/server.key                       the server's public key: a copy goes to every host with receivers
DIR/server.key_secret                its secret key: stays with the sender, server_key=
DIR/clients/NAME.key                 a client that the sender lets in: stays with the sender, clients=DIR/clients
DIR/client_secrets/NAME.key_secret   a client's secret key: goes to that client's host, client_key=
"""


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command."""
    keygen = add_parser(
        "keygen",
        help="make keys, so that a sender and its receivers recognise each other and encrypt",
        description=f"Make CURVE certificates in the format of zmq.auth:\n\n{LAYOUT}\nNever overwrites a file. "
        "Run it again to add clients: a running sender lets them in without a restart.",
        epilog="Exit codes: 0 done; 1 failed, with the reason on stderr; 2 wrong arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    keygen.add_argument("directory", metavar="DIR", help="created if it does not exist, for this user only (0700)")
    keygen.add_argument(
        "--workers", type=_workers, default=0, metavar="N", help="one key for each of worker-0 … worker-(N-1)"
    )
    keygen.add_argument(
        "--name", dest="names", type=_client, action="extend", nargs="+", default=[], metavar="NAME[=WORKERS]",
        help="a key by this name, good for these workers (gpu-host=0-3,7), or for any that no other key has taken",
    )  # fmt: skip
    keygen.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    numbered = [(f"worker-{n}", Workers((range(n, n + 1),))) for n in range(options.workers)]
    try:
        print(make(Path(options.directory), [*numbered, *options.names]))
    except FileExistsError as error:
        why = "exists, and is not overwritten; to replace that key, remove the file first"
        raise CommandFailed(f"{error} {why}") from error
    except (OSError, NotConnected) as error:
        raise CommandFailed(str(error)) from error
    return 0


def make(directory: Path, clients: list[Client]) -> str:
    """Make these clients' certificates. Make the server's, too, unless it exists and there are clients to add. Returns
    instructions for the user. Raises FileExistsError, with nothing written, if one exists; NotConnected if this machine
    has no CURVE, or if other users may write to one of the folders."""
    public, secret = directory / "clients", directory / "client_secrets"
    server = directory / "server.key"
    is_new = not (server.exists() and clients)
    secrets, publics = [], []
    wanted = [(server, directory / "server.key_secret", Workers())] if is_new else []
    wanted += [(public / f"{name}.key", secret / f"{name}.key_secret", workers) for name, workers in clients]
    for path, secret_path, workers in wanted:
        certificate = Certificate.draw(workers)
        secrets.append((secret_path, certificate.encode(secret=True)))
        publics.append((path, certificate.encode(secret=False)))
    paths = [path for path, _ in secrets + publics]
    for n, path in enumerate(paths):
        if path.exists() or path in paths[:n]:
            raise FileExistsError(path)
    for folder in (directory, public, secret):
        folder.mkdir(mode=0o700, parents=folder is directory, exist_ok=True)
        check_writers(str(folder), folder.stat().st_mode)
    write_new(secrets, mode=0o600)
    write_new(publics, mode=0o644)  # last, because the sender lets in each client that is listed there
    return _instructions(directory, clients, is_new=is_new)


def _instructions(directory: Path, clients: list[Client], *, is_new: bool) -> str:
    existed = "" if is_new else " (existed already)"
    lines = [
        f"{directory}/server.key{existed}: copy it to every host with receivers, which give it as server_key=",
        f"{directory}/server.key_secret{existed}: stays here; the sender gives it as server_key=",
        f"{directory}/clients/: stays here; the sender gives it as clients=, and lets in every client in it",
    ]
    for name, workers in clients:
        use = "for any worker: move it to the host that uses it, as client_key= or --client-key"
        if workers.ranges:
            use = f"move it to the host of worker {workers}, as client_key="
        lines.append(f"{directory}/client_secrets/{name}.key_secret: {use}")
    if not clients:
        lines.append(f"no client has a key yet: asyncsync keygen {directory} --workers N, or --name NAME")
    return "\n".join(lines)


def _workers(text: str) -> int:
    value = int(text)
    if not 0 < value <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"must be between 1 and {MAX_WORKERS}")
    return value


def _client(text: str) -> Client:
    name, is_limited, workers = text.partition("=")
    if not NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{name!r} is not a name: use letters, digits, '_', '-' and '.'")
    try:
        return name, parse_workers(workers) if is_limited else Workers()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
