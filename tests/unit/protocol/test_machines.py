"""Publisher and subscriber together, over a network that loses, repeats, delays and reorders, while both sides crash.

Always: no worker holds torn weights, weights of another worker, of an older version within an epoch or of an older
epoch, or half of a publication of several models; a publication that somebody refuses changes nobody; no slab is lost
or reused too early. And when messages flow again, everybody gets what it should have, and the trainer knows.

The machinery, and what is checked after each step, is in helpers/simulation.py.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from asyncsync.fastpath.sender import SteadySender
from asyncsync.fastpath.worker import SteadyWorker
from asyncsync.protocol.agreement import Agreement
from asyncsync.protocol.announcer import Announcer
from asyncsync.protocol.fanout import FanOut
from asyncsync.protocol.holdings import Reports
from asyncsync.protocol.incoming import Incoming
from asyncsync.protocol.incoming_update import IncomingUpdate
from asyncsync.protocol.leases import Leases
from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.publisher import Publisher
from asyncsync.protocol.session import Session
from asyncsync.protocol.staging import StagedUpdates
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.protocol.targets import Targets
from asyncsync.protocol.transfer import Announcement, Transfer
from helpers.mutation import mutate
from helpers.simulation import ALWAYS, OPERATIONS, Simulation, World, draw_operations, draw_world

STEPS = 75
RUNS = 1500  # at most, until a mutation must have been noticed


GIVE = "; self.leases.release(peer.nonce)"
NO_PONG = (Publisher, "receive", "messages.Failed | messages.Pong)", "messages.Failed)")
DONE_REPORTS = "self.leases.report(peer.nonce, instruction.serial, ())\n    elif isinstance(instruction, "
ONE_BY_ONE = """parts = dict(list(parts.items())[:1])
    if not parts:"""

weighted = [name for name, weight in OPERATIONS.items() for _ in range(max(1, weight))]
numbers = st.integers(0, 63)
operations = st.lists(st.tuples(st.sampled_from(weighted), numbers, numbers), min_size=STEPS, max_size=2 * STEPS)


@pytest.mark.promise(6, 10, 12)
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fast", [True, False], ids=["with fast paths", "without"])
@settings(max_examples=300, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.randoms(use_true_random=False).map(draw_world),
    operations,
    st.sets(st.sampled_from(sorted(OPERATIONS.keys() - ALWAYS))),
)
def test_nothing_is_ever_torn_older_or_another_workers_and_everybody_converges(
    fast: bool, world: World, steps: list[tuple[str, int, int]], never: set[str]
) -> None:
    steps = [step for step in steps if step[0] not in never | {"rest"}]
    note(f"in short: {steps}")
    simulation = Simulation(replace(world, fast=fast))
    simulation.run(steps)
    simulation.converge()


# Each takes away one thing that a guarantee rests on (or two, where either would do), and must be noticed.
MUTATIONS = {
    "an update counts as complete before it is": [
        (IncomingUpdate, "complete", "self.received == self.total", "self.received > 0")
    ],
    "bytes behind a gap count as if there were none": [
        (IncomingUpdate, "write", "is_beyond = start > self.received", "is_beyond = False")
    ],
    "chunks of another update are taken": [(Incoming, "chunk", "chunk.serial != update.serial", "False")],
    "checksums are not compared": [(IncomingUpdate, "write", "zlib.crc32(data) != crc", "False")],
    "a transfer does not hold its slab": [(Transfer, "__init__", "slab.retain()", "slab")],
    "a transfer never lets go of its slab": [(Peer, "end_transfer", "self.transfer.release()", "pass")],
    "slabs of an update that cannot be converted are lost": [
        (Subscriber, "_stage", "for one in ready.values():", "for one in ():")
    ],
    "slabs of a rejected publication are lost": [
        (Targets, "_withdraw", "slot.take_back(version)", "slot.pending = []")
    ],
    "old updates are taken": [
        (Subscriber, "_on_update", "update.serial <= self.reports.serial", "False"),
        (Subscriber, "_stage", "if part.version > waiting.get(model_id, holdings.version(model_id)):", "if True:"),
    ],
    "messages of other trainers are taken": [(Subscriber, "receive", "epoch != session.epoch", "False")],
    "what an old trainer has sent is still applied": [(StagedUpdates, "abandon", "not one.abandon()", "True")],
    "everybody gets the same": [(Targets, "target", "own = model.own.get(worker)", "own = None")],
    "bytes are sent before they are packed": [(Transfer, "chunks", "stop > slab.packed", "False")],
    "an announcement is used again for other parts": [(Announcement, "matches", "return", "return True or")],
    "nobody is asked, because all accepted something else": [
        (Agreement, "_is_agreed", "layout not in peer.accepted", "False"),
        (Announcer, "_due", "not in peer.accepted", "is None"),
    ],
    "parts go one by one": [(Announcer, "update", "if not parts:", ONE_BY_ONE)],
    "a part is sent without the one that is refused": [(Announcer, "_due", "fresh - blocked", "fresh")],
    "an update is applied before an older one that waits": [
        (StagedUpdates, "line_up", "self.append(staging)", "self.insert(0, staging)")
    ],
    "a part is withdrawn with a newer one that is refused": [
        (
            Targets,
            "publish",
            "(older.layouts, older.workers) == (publication.layouts, whom)",
            "older.models & publication.models",
        )
    ],
    "nobody is asked before a new layout": [
        (Agreement, "_unanswered", "gathering = self", "return set()\n    gathering = self")
    ],
    "a refusal concerns the refuser only": [(Agreement, "refuse", "peer.worker in publication.awaiting", "False")],
    "no PING": [(Membership, "tick", "self.ping(peer, now)", "continue")],
    "PONG does not show a lost READY": [
        (Publisher, "_on_pong", "peer.welcome_after_ping < pong.seq and peer.unsettled", "False")
    ],
    "PONG does not show a lost UPDATE": [(Publisher, "_on_pong", "pong.serial != transfer.serial", "False")],
    "a HELLO of an old connection is answered there": [
        (Membership, "hello", "hello.attempt <= peer.hello.attempt", "False")
    ],
    "a trainer whose clock has gone back stays behind": [
        (Membership, "outrun", "self.begin((hello.epoch[0] + 1, self.epoch[1]))", "pass")
    ],
    "missing chunks are not asked for again": [
        (Incoming, "tick", "update.stalled(now, min(PUSH_PATIENCE, patience) if update.pushed else patience)", "False")
    ],
    "staging alone gives a slot back": [(Publisher, "_on_staged", "peer.end_transfer()", f"peer.end_transfer(){GIVE}")],
    "an old report gives back what was lent after it": [(Leases, "report", "serial <= last and", "")],
    "a report says nothing of what is in use": [(Reports, "in_use", "slab.is_used", "False")],
    "a report says nothing of what a forked child uses": [(Reports, "in_use", "slab.is_used", "slab.references")],
    "whoever is superseded has given everything back": [
        (
            Membership,
            "_supersede",
            "self.drop(peer)",
            f"self.drop(peer){GIVE}".replace("self.l", "self._entered.__self__.l"),
        )
    ],
    "whoever connects again has given everything back": [
        (Publisher, "_on_ready", "accept(peer, ready)", f"accept(peer, ready){GIVE}")
    ],
    "whoever leaves has given everything back": [(Publisher, "_on_bye", 'bye.reason != "reading"', "True")],
    "nothing tells of a slot that its last reader leaves": [
        (Reports, "flush", "len(holdings.leased) < before", "False"),
        NO_PONG,
    ],
    "whoever was superseded gives nothing back": [(Session, "bye", "elif not reads:", "elif False:")],
    "a slot is granted that may hold something else by now": [
        (Publisher, "_grant", "target.version != version", "False")
    ],
    "a report says nothing of what is asked for": [(Reports, "in_use", "not update.awaited", "True")],
    "the end of a process gives nothing back": [(Publisher, "ended", "self.leases.release(nonce)", "pass")],
    "AGAIN leaves the slab before where it is": [(Announcer, "_advance", "before.release()", "pass")],
    "the fast path goes on with what it has written, and not who has it": [
        (SteadySender, "_hand_over", "catch_up = ", "waiting = {}\n        catch_up = ")
    ],
    "the fast path forgets whom it has not told": [
        (SteadySender, "_hand_over", "[peer for peer, _ in self._unsent]", "[]"),
        NO_PONG,
    ],
    "the fast path begins with somebody behind": [(Announcer, "steady", "for peer in peers:", "for peer in ():")],
    "the fast path writes where the newest version is": [
        (SteadySender, "publish", "slab = self._next", "slab = self._newest")
    ],
    "a worker's fast path goes on whatever else it hears": [
        (Subscriber, "receive", "self.end_fast_path()", "pass"),
        (SteadyWorker, "take", "since != self._reports.serial or ", ""),
    ],
    "a worker's fast path writes where the newest version is": [
        (SteadyWorker, "take", "slab.memory[:] = window", "self._newest.memory[:] = window")
    ],
    "a worker's fast path takes what waits for a reader as applied": [
        (SteadyWorker, "take", "if not passed or not self._is_applied:", "if passed and not self._is_applied:")
    ],
    "DONE gives nothing back": [
        (
            Publisher,
            "receive",
            DONE_REPORTS + "messages.Staged | messages.Applied | messages.Failed | messages.Pong)",
            "pass\n    elif isinstance(instruction, messages.Staged | messages.Applied | messages.Failed)",
        )
    ],
    "what is sent to all is taken by those who have missed what was before": [
        (Subscriber, "_on_cast", "cast.since != self.reports.serial", "False")
    ],
    "those who are sent something at once count as having had what was before": [
        (FanOut, "started", "peer.before = peer.serial", "peer.before = serial - 1")
    ],
    "what is pushed may hold something else by now": [
        (FanOut, "end", "self._pushed.release()", "pass"),
    ],
    "HELLO is said once": [(Subscriber, "tick", "self.session.is_hello_due(now)", "False")],
}

# Runs that have noticed what few others do: to look at them first saves a minute. Another one may be the first by now.
NOTICED = {
    "checksums are not compared": 875,
    "chunks of another update are taken": 323,
    "messages of other trainers are taken": 4547,
    "bytes behind a gap count as if there were none": 405,
    "the fast path goes on with what it has written, and not who has it": 4069,
}


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_simulation_notices_when(monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    for owner, name, old, new in MUTATIONS[mutation]:
        mutate(monkeypatch, owner, name, old, new)
    for seed in (NOTICED.get(mutation, 0), *range(RUNS)):
        source = random.Random(seed)
        simulation = Simulation(draw_world(source))
        try:
            simulation.run(draw_operations(source, STEPS))
            simulation.converge()
        except Exception as error:
            print(f"run {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"{RUNS} runs have not noticed it")
