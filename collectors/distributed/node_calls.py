"""NodeCalls: the calls to nodes between two rollouts, of which each is answered once, whatever becomes of its node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

from asyncsync.collectors.distributed.node import Answer, Command
from asyncsync.collectors.workers.channel import loads
from asyncsync.collectors.workers.failures import Failure
from asyncsync.errors import PeerLost

LASTING = ("pre_hook", "post_hook", "profile")
"""Calls whose effect a node that is launched again is to have, too."""


class NodeCalls:
    """The calls to the nodes of a group, on its loop thread.

    Args:
        submit: ``submit(rank, command, then, fatal=False)`` sends a call, and has its answer taken, a failure, too.
        reply: ``reply(number, answer)`` hands an answer out.
    """

    def __init__(
        self,
        submit: Callable[..., object],
        reply: Callable[[int, Answer], object],
    ) -> None:
        self._submit, self._reply = submit, reply
        self._asked: dict[int, int] = {}  # of each call without an answer, the node
        self._held: dict[int, list[tuple[int, Command]]] = {}  # of each node that is being launched again
        self._lasting: defaultdict[int, dict[str, Command]] = defaultdict(dict)
        self._unrecorded: Counter[int] = Counter()  # of each node, rollouts that its profile lacks

    def ask(self, rank: int, number: int, command: Command) -> None:
        """Send a call; if its node is being launched again, when that has connected."""
        if rank in self._held:
            self._held[rank].append((number, command))
        else:
            self._asked[number] = rank
            self._submit(rank, command, partial(self._answered, rank, number, command), fatal=False)

    def _answered(self, rank: int, number: int, command: Command, answer: Answer) -> None:
        if answer.failure is None:
            self._note(rank, command)
        self._asked.pop(number, None)
        self._reply(number, answer)

    def _note(self, rank: int, command: Command) -> None:
        _, name, arguments = command
        if name in LASTING:
            self._lasting[rank][name] = command
        if name == "profile":
            config, _ = loads(arguments)
            self._unrecorded[rank] = 0 if config is None else config.num_rollouts

    def rolled_out(self, rank: int) -> None:
        """A node has done a rollout, and recorded it if it is to be profiled."""
        self._unrecorded[rank] -= 1

    def lose(self, rank: int, lost: PeerLost) -> None:
        """A node is lost: it may have carried out what it has not answered."""
        for number in [number for number, asked in self._asked.items() if asked == rank]:
            del self._asked[number]
            self._reply(number, Answer(Failure.of(lost)))

    def hold(self, rank: int) -> None:
        """A node is being launched again."""
        self._held.setdefault(rank, [])

    def release(self, rank: int) -> None:
        """A node has connected."""
        held = self._held.pop(rank, None)
        if held is not None:
            if self._unrecorded[rank] <= 0:  # the trace is written
                self._lasting[rank].pop("profile", None)
            for command in self._lasting[rank].values():
                self._submit(rank, command, lambda _: None)
                self._note(rank, command)
            for number, command in held:
                self.ask(rank, number, command)
