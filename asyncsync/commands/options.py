"""Shared by the commands: checks of options and of optional libraries, and the options for a sender."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyncsync.errors import NotConnected
from asyncsync.net.endpoint import check_endpoint
from asyncsync.net.keys import Credentials, KeyFiles, check_addresses


class CommandFailed(Exception):
    """The command cannot do its work; the message is the reason, in one line. Its exit code is 1."""


def need(extra: str, *libraries: str) -> None:
    """Check that optional libraries are installed, before anything is started. Raises CommandFailed, which names the
    missing ones and the extra that installs them."""
    missing = []
    for library in libraries:
        try:
            found = importlib.util.find_spec(library) is not None
        except ImportError:
            found = False
        if not found:
            missing.append(library)
    if missing:
        raise CommandFailed(f'{" and ".join(missing)} not found; install with: pip install "asyncsync[{extra}]"')


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 32:
        raise argparse.ArgumentTypeError("must be between 0 and 2**32 - 1")
    return value


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number")
    return value


def writable(text: str) -> str:
    # Check it now, not after minutes of work.
    if not os.access(Path(text).absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write there: {Path(text).absolute().parent}")
    return text


def safetensors_file(text: str) -> str:
    if not text.endswith(".safetensors"):
        raise argparse.ArgumentTypeError("the name must end with .safetensors")
    return writable(text)


def endpoint(text: str, *, allow_plaintext: bool = False) -> str:
    try:
        return check_endpoint(text, allow_plaintext=allow_plaintext)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_sender(parser: argparse.ArgumentParser, client_key: str) -> None:
    """Add the options of a command that connects to a sender. ``client_key``: the help for its key."""
    sender = partial(endpoint, allow_plaintext=True)
    parser.add_argument(
        "endpoint", type=sender, metavar="ENDPOINT", help="the same as for the workers, tcp://HOST:PORT"
    )
    parser.add_argument("--server-key", metavar="FILE", help="the sender's public certificate, if it uses keys")
    parser.add_argument("--client-key", metavar="FILE", help=client_key)


def credentials_of(options: argparse.Namespace) -> Callable[[], Credentials] | None:
    """A function that returns the keys to connect with; None: no keys were given. Raises CommandFailed if only one of
    the two was given, if they do not suit the address, or if they cannot be read."""
    logging.getLogger("asyncsync").addHandler(logging.NullHandler())  # the command prints its own messages
    try:
        keys = KeyFiles.given(options.server_key, None, options.client_key)
        if keys is None:
            return None
        check_addresses(keys, None, options.endpoint, allow_plaintext=True)
        keys.read_for_receiver(0)
    except (ValueError, NotConnected) as error:
        raise CommandFailed(with_option_names(error)) from error
    return partial(keys.read_for_receiver, 0)


def with_option_names(error: Exception | str, server_key: str = "--server-key") -> str:
    """The error's message, with the names of options in place of Python's arguments."""
    text = str(error).replace("server_key=", server_key).replace("client_key=", "--client-key")
    return text.replace("clients=", "--clients").replace("allow_plaintext=True", "--allow-plaintext")
