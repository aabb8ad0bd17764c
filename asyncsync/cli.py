"""The ``asyncsync`` command. Each subcommand's module adds its parser.

Exit codes: 0 done; 1 failed, with the reason on stderr; 2 wrong arguments; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from asyncsync import __version__, demo
from asyncsync.bench import advice
from asyncsync.commands import fetch, keygen, relay, top
from asyncsync.commands.options import CommandFailed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments after ``asyncsync`` (None: those of ``sys.argv``); returns its exit code.
    Raises SystemExit: after ``--help``, ``--version`` and wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="asyncsync",
        description="Carries the weights of a model in training to every process that runs a copy of it.",
        epilog="Exit codes: 0 done; 1 failed, with the reason on stderr; 2 wrong arguments; 130 ended by Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"asyncsync {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in (demo, advice, keygen, top, fetch, relay):
        command.add(commands.add_parser)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `asyncsync … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's flush at exit fails
    except CommandFailed as failed:
        print(f"asyncsync {options.command}: {failed}", file=sys.stderr)
    return 1
