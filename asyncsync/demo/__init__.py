"""``asyncsync demo``: PPO on CartPole-v1, which sends every update to the rollout workers through the bus.

Read :mod:`asyncsync.demo.trainer` first.

    trainer.py   the trainer and its policy: learn from a batch, send the weights
    workers.py   the collector: worker processes, each with a vector of environments
    record.py    the record of a run: the returns, and whether each action came from its version's weights
    run.py       the command: its screen, its summary and its exit code
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from asyncsync.commands.options import count, endpoint, need, positive, seed


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command."""
    demo = add_parser(
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
    demo.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    need("cli,gym", "gymnasium", "rich")
    if options.uvloop:
        need("uvloop", "uvloop")
    if options.scheme == "ray":
        need("ray", "ray")
    from asyncsync.demo.run import run

    return run(options)
