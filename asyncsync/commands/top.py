"""``asyncsync top``: show a sender's status live, on a screen for people or as JSON for programs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import zmq

from asyncsync.commands.options import CommandFailed, add_sender, credentials_of, need, positive, with_option_names
from asyncsync.commands.samples import Samples, as_json
from asyncsync.errors import AckTimeout, ProtocolError, WeightSyncError
from asyncsync.net.endpoint import split_endpoints
from asyncsync.net.keys import Credentials
from asyncsync.net.rendezvous import Dialer
from asyncsync.net.zmq_private import Context
from asyncsync.net.zmq_socket import dealer
from asyncsync.wire.messages import Inquiry, Report, decode, encode

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 3.0  # seconds that one answer may take
ONCE_SECONDS = 0.5  # with --once, between the two answers from which the rates are computed
ASK_AGAIN_SECONDS = 0.5  # because an inquiry may get lost, and a sender drops some if too many ask
UNANSWERED_SECONDS = 1.0  # until the next one of several addresses is asked
REDRAW_SECONDS = 0.5  # because the window's size may change, and the age of the last answer does


class Asker:
    """Asks one sender for its status, on the running loop. Close it in the end.

    Args:
        endpoint: the sender's address, as for workers. If there are several, they are asked in turn.
        credentials: returns the keys to connect with, if the sender has keys.

    Raises:
        NotConnected: this is not an address, or the keys cannot be read.
    """

    def __init__(self, endpoint: str, credentials: Callable[[], Credentials] | None = None) -> None:
        self.endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Report] | None = None
        self._token = 0
        self._failure: BaseException | None = None
        self._silent_since: float | None = None
        with contextlib.ExitStack() as undo:
            self._context = Context()
            undo.callback(self._context.destroy, 0)
            socket = dealer(self._context)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue inquiries while the sender is away
            self._dialer = Dialer(socket, self._receive, split_endpoints(endpoint), credentials, self._crash)
            undo.pop_all()

    async def ask(self, timeout: float) -> Report:
        """The sender's status now. Raises AckTimeout if it does not answer within ``timeout`` seconds."""
        self._token += 1
        self._answer = self._loop.create_future()
        deadline = self._loop.time() + timeout
        inquiry = encode(Inquiry(self._token))
        if self._silent_since is None:
            self._silent_since = self._loop.time()
        try:
            while True:
                if self._failure is not None:
                    raise WeightSyncError(f"cannot ask the sender for its status: {self._failure!r}") from self._failure
                if self._dialer.has_other_endpoints and self._loop.time() >= self._silent_since + UNANSWERED_SECONDS:
                    self._silent_since = self._loop.time()
                    self._dialer.try_next_endpoint()
                sent = self._dialer.send((inquiry,)) == 0
                self._dialer.after_send()
                pause = ASK_AGAIN_SECONDS if sent else 0.05
                remaining = deadline - self._loop.time()
                if remaining <= 0:
                    why = self._dialer.why or "is a sender running there?"
                    raise AckTimeout(f"no sender answered at {self.endpoint} within {timeout:g} s: {why}")
                done, _ = await asyncio.wait({self._answer}, timeout=min(pause, remaining))
                if done:
                    self._silent_since = None
                    return self._answer.result()
        finally:
            self._answer = None

    def _receive(self, frames: list[Any]) -> None:
        answer = self._answer
        if answer is None or answer.done():
            return
        try:
            instruction, _ = decode([frame.buffer for frame in frames])
        except ProtocolError as error:
            answer.set_exception(error)
            return
        if isinstance(instruction, Report) and instruction.token == self._token:
            answer.set_result(instruction)

    def _crash(self, error: BaseException) -> None:
        self._failure = error

    def close(self) -> None:
        """Idempotent."""
        self._dialer.close()
        self._context.destroy(0)


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_parser(
        "top",
        help="watch a trainer: workers, versions, throughput",
        description="Show the state of a running trainer: its workers, with the versions that they have applied, their "
        "lag, and the bytes sent to them; its models; and the connections that it has refused. This does not slow the "
        "trainer or its workers. While the trainer is away, this waits for it.",
        epilog="Exit codes: 0 shown (--once); 1 no trainer has answered (--once), or the trainer refuses this command; "
        "130 ended by Ctrl-C.",
    )
    add_sender(parser, "the secret certificate of any client that the sender lets in")
    parser.add_argument("--json", action="store_true", help="print one JSON object per interval, one per line")
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument(
        "--interval", type=positive, default=1.0, metavar="S", help="seconds between two reports (default %(default)g)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if not options.json:
        need("cli", "rich")
    try:
        with asyncio.Runner() as runner:
            return runner.run(watch(options))
    except WeightSyncError as error:
        raise CommandFailed(with_option_names(error)) from error


async def watch(options: argparse.Namespace) -> int:
    """Show it once, or until cancelled. Returns the exit code; raises NotConnected, AckTimeout, ProtocolError."""
    samples = Samples(options.endpoint, options.interval)
    with contextlib.closing(Asker(options.endpoint, credentials_of(options))) as asker:
        if options.once:
            samples.add(await asker.ask(PATIENCE), time.monotonic())
            await asyncio.sleep(min(ONCE_SECONDS, options.interval))
            samples.add(await asker.ask(PATIENCE), time.monotonic())
            _print(samples, as_json_line=options.json)
            return 0
        async with _shown(samples, as_lines=options.json) as show:
            while True:
                began = time.monotonic()
                try:
                    samples.add(await asker.ask(max(PATIENCE, options.interval)), time.monotonic())
                except (AckTimeout, ProtocolError) as error:
                    samples.failure = with_option_names(error)
                show()
                await asyncio.sleep(max(0.0, began + options.interval - time.monotonic()))


def _print(samples: Samples, *, as_json_line: bool) -> None:
    if as_json_line:
        print(json.dumps(as_json(samples)), flush=True)
        return
    from rich.console import Console

    from asyncsync.commands.screen import screen

    console = Console()
    console.print(screen(samples, console.width, None))


@contextlib.asynccontextmanager
async def _shown(samples: Samples, *, as_lines: bool) -> AsyncIterator[Callable[[], None]]:
    """Yields a function that shows the newest report: as a line of JSON, on a screen, or, without one, as text."""
    if as_lines:
        yield lambda: _print(samples, as_json_line=True)
        return
    from rich.console import Console

    from asyncsync.commands.screen import line, running

    console = Console()
    if not console.is_terminal:
        yield lambda: print(f"{samples.endpoint}: {line(samples)}", flush=True)
        return
    changed = asyncio.Event()
    async with running(_redraw(samples, console, changed)):
        yield changed.set


async def _redraw(samples: Samples, console: Console, changed: asyncio.Event) -> None:
    from rich.live import Live

    from asyncsync.commands.screen import screen

    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            live.update(screen(samples, console.width, console.height), refresh=True)
            # Not wait_for(), which may lose a cancellation in Python 3.11.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REDRAW_SECONDS):
                    await changed.wait()
            changed.clear()
