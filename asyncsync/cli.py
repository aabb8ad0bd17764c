"""The ``asyncsync`` command: ``demo`` and ``bench``; the others are in :mod:`asyncsync.commands`.

Exit codes: 0 done; 1 failed, with the reason on stderr; 2 wrong arguments; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields

from asyncsync import __version__
from asyncsync.bench.cases import SECTIONS
from asyncsync.commands import fetch, keygen, relay, top
from asyncsync.commands.options import CommandFailed, bound, count, need, picture, positive, seed, writable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with what comes after ``asyncsync`` (None: ``sys.argv``); returns its exit code. Raises
    SystemExit: after ``--help``, ``--version`` and wrong arguments."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `asyncsync … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails
        code = 1
    except CommandFailed as failed:
        print(f"asyncsync {options.command}: {failed}", file=sys.stderr)
        code = 1
    return code


def _demo(options: argparse.Namespace) -> int:
    need("cli,gym", "gymnasium", "rich")
    if options.uvloop:
        need("uvloop", "uvloop")
    if options.scheme == "ray":
        need("ray", "ray")
    from asyncsync.demo.run import Options, run

    return run(Options(**{field.name: getattr(options, field.name) for field in fields(Options)}))


def _bench(options: argparse.Namespace) -> int:
    if options.uvloop:
        need("uvloop", "uvloop")
    if options.plot:
        need("cli", "matplotlib")
    from asyncsync.bench.cases import Plan
    from asyncsync.bench.run import run

    return run(
        Plan(quick=options.quick, trials=options.trials, only=options.only),
        json_path=options.json,
        markdown_path=options.markdown,
        plot_path=options.plot,
        check=options.check,
        uvloop=options.uvloop,
    )


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
        "--endpoint",
        type=bound,
        default=None,
        metavar="ENDPOINT",
        help="where the trainer binds (default: an ipc path)",
    )
    demo.add_argument("--uvloop", action="store_true", help="run the trainer on uvloop (extra: uvloop)")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser(
        "bench",
        help="measure, on this machine, how long an update takes",
        description="Sections: " + "; ".join(f"{name}: {what}" for name, what in SECTIONS.items()) + ". With one and "
        "two worker processes, beside peers in the same run (hand-written gloo, one memcpy, a bare zmq.asyncio round "
        "trip), trials interleaved; medians. At the end the bars, reached or not.",
        epilog="Exit codes: 0 measured; 1 a worker has died, or --check and a bar is missed; 130 ended by Ctrl-C.",
    )
    bench.add_argument("--quick", action="store_true", help="without 256 MiB, and fewer trials")
    bench.add_argument(
        "--only", type=_sections, default=(), metavar="NAMES", help=f"some of: {','.join(SECTIONS)} (default: all)"
    )
    bench.add_argument("--trials", type=count, default=None, metavar="N", help="of each case (default: by size)")
    bench.add_argument("--check", action="store_true", help="exit code 1 if a bar is missed")
    bench.add_argument("--json", type=writable, default=None, metavar="PATH", help="write every figure there, too")
    bench.add_argument("--markdown", type=writable, default=None, metavar="PATH", help="write the tables there, too")
    bench.add_argument("--plot", type=picture, default=None, metavar="PATH", help="draw them there (extra: cli)")
    bench.add_argument("--uvloop", action="store_true", help="run on uvloop (extra: uvloop)")
    bench.set_defaults(run=_bench)

    keygen.add(commands)
    top.add(commands)
    fetch.add(commands)
    relay.add(commands)
    return parser


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"no section {name!r}; choose from {', '.join(SECTIONS)}")
    return names
