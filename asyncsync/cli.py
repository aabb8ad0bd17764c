"""The ``asyncsync`` command: ``demo`` and ``bench``; the others are in :mod:`asyncsync.commands`.

Exit codes: 0 done; 1 failed, with the reason on stderr; 2 wrong arguments; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from asyncsync import __version__
from asyncsync.bench import advice
from asyncsync.commands import fetch, keygen, relay, top
from asyncsync.commands.options import CommandFailed, count, endpoint, need, positive, seed, writable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with what comes after ``asyncsync`` (None: ``sys.argv``); returns its exit code. Raises
    SystemExit: after ``--help``, ``--version`` and wrong arguments."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `asyncsync … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails
    except CommandFailed as failed:
        print(f"asyncsync {options.command}: {failed}", file=sys.stderr)
    return 1


def _demo(options: argparse.Namespace) -> int:
    need("cli,gym", "gymnasium", "rich")
    if options.uvloop:
        need("uvloop", "uvloop")
    if options.scheme == "ray":
        need("ray", "ray")
    from asyncsync.demo.run import run

    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncsync",
        description="Carries the weights of a model in training to every process that runs a copy of it.",
        epilog="Exit codes: 0 done; 1 failed, with the reason on stderr; 2 wrong arguments; 130 ended by Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"asyncsync {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="train CartPole with worker processes, and watch the weights travel",
        description="Train PPO on CartPole-v1 with worker processes on this machine; every update goes to them through "
        "the bus. Shows the learning curve beside the screen of `asyncsync top`. Ends when the mean return of 100 "
        "episodes reaches the target, and prints whether every action came from the weights that it should have.",
        epilog="Exit codes: 0 target reached; 1 target not reached in time, a worker has died, or weights were wrong; "
        "130 ended by Ctrl-C.",
    )
    demo.add_argument("--workers", type=count, default=2, metavar="N", help="worker processes (default %(default)s)")
    demo.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of networks and environments (default %(default)s)"
    )
    demo.add_argument(
        "--target-return", dest="target", type=positive, default=475.0, metavar="R",
        help="mean over 100 episodes (default %(default)g)",
    )  # fmt: skip
    demo.add_argument(
        "--max-seconds", type=positive, default=600.0, metavar="S", help="give up after this time (default %(default)g)"
    )
    demo.add_argument(
        "--scheme",
        choices=("shared", "process", "zmq", "distributed", "rpc", "ray"),
        default="shared" if sys.platform == "linux" else "zmq",
        help="how the weights travel: shared memory, multiprocessing or ZeroMQ; or torch.distributed, torch's RPC or "
        "Ray (extra: ray), each with its own collector (default %(default)s)",
    )
    demo.add_argument(
        "--endpoint", type=endpoint, metavar="ENDPOINT", help="where the trainer binds (default: an ipc path)"
    )
    demo.add_argument("--uvloop", action="store_true", help="run the trainer on uvloop (extra: uvloop)")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser(
        "bench",
        help="measure every scheme on this machine, and say which to take",
        description="Sends updates to worker processes over each scheme (shared memory, multiprocessing, ZeroMQ over "
        "ipc and tcp, torch.distributed), prints wall and CPU time per update, and names the fastest scheme that "
        "reaches your workers. Takes about 15 seconds.",
        epilog="Exit codes: 0 measured; 1 a worker has died; 2 wrong arguments; 130 ended by Ctrl-C.",
    )
    bench.add_argument("--workers", type=count, default=2, metavar="N", help="worker processes (default %(default)s)")
    bench.add_argument(
        "--size", type=advice.sizes, default="64KiB,16MiB", metavar="SIZES",
        help="of the weights, one or several (default %(default)s)",
    )  # fmt: skip
    bench.add_argument(
        "--reach", choices=("host", "network"), default="host",
        help="where the workers will run: on this host, or on other hosts, too (default %(default)s)",
    )  # fmt: skip
    bench.add_argument("--json", type=writable, metavar="PATH", help="write every figure there, too")
    bench.set_defaults(run=advice.run)

    for command in (keygen, top, fetch, relay):
        command.add(commands.add_parser)
    return parser
