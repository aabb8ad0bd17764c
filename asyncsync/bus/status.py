"""Status: what each side knows of the workers, for people and dashboards."""

from __future__ import annotations

from dataclasses import dataclass

from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink

__all__ = ["WorkerStatus", "receiver_status", "sender_status"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What is known of one worker.

    Attributes:
        version: the version that it has applied (of several models, the oldest); 0: none yet.
        target: the version that it should have; 0: none yet.
        lag: how many versions it is behind its target.
        last_seen: seconds since its last message; None: never heard of.
        state: ``"live"``, ``"slow"`` (silent for some seconds) or ``"lost"`` (its process has ended, it has left, or
        never came).
        bytes_sent: payload bytes sent to it (on a receiver: received).
        reason: why it is lost; empty otherwise.
    """

    version: int
    target: int
    lag: int
    last_seen: float | None
    state: str
    bytes_sent: int = 0
    reason: str = ""


def sender_status(link: SenderLink, models: list[str]) -> dict[int, WorkerStatus]:
    publisher = link.caught_up()
    now = link.loop.time()
    table = {}
    for worker in sorted({*publisher.membership.expected(), *publisher.peers}):
        peer = publisher.peers.get(worker)
        targets = {m: t.version for m in models if (t := publisher.targets.newest(worker, m)) is not None}
        if peer is None:
            target = max(targets.values(), default=0)
            table[worker] = WorkerStatus(0, target, target, None, "lost", 0, "it has not connected yet")
            continue
        targets = {m: v for m, v in targets.items() if m in peer.hello.have}
        applied = {m: peer.applied.get(m, 0) for m in models if m in peer.hello.have}
        behind = [m for m, v in targets.items() if applied[m] < v]
        version = min((applied[m] for m in behind), default=max(applied.values(), default=0))
        target = max(targets.values(), default=0)
        lag = max((targets[m] - applied[m] for m in behind), default=0)
        table[worker] = WorkerStatus(
            version, target, lag, now - peer.last_seen, peer.state, peer.bytes_sent, peer.lost or ""
        )
    return table


def receiver_status(link: ReceiverLink, models: list[str]) -> dict[int, WorkerStatus]:
    subscriber = link.subscriber
    seen = None if subscriber.last_seen is None else link.loop.time() - subscriber.last_seen
    version = link.version(models)
    target = max((subscriber.targets.get(m, 0) for m in models), default=0)
    # What an earlier sender sent is not this one's, whatever its number.
    marks = [link.shown[m] for m in models if m in link.shown]
    current = max((v for epoch, v, *_ in marks if epoch == subscriber.session.epoch), default=0)
    state, reason = "live", ""
    if link.closed:
        state, reason = "lost", "this receiver was shut down"
    elif subscriber.session.ended is not None:
        state, reason = "lost", str(subscriber.session.ended)
    elif link.sender_lost or not subscriber.session.online:
        state, reason = "lost", "the sender is gone; waiting for its successor"
    elif seen is None or seen > subscriber.settings.slow_after:
        state = "slow"
    return {
        subscriber.worker: WorkerStatus(
            version, target, max(0, target - current), seen, state, subscriber.incoming.bytes_received, reason
        )
    }
