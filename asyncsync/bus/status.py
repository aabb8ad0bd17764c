"""Status: what each side knows of the workers, for people and dashboards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.reporting import WorkerStatus, worker_status
from asyncsync.bus.sender import SenderLink
from asyncsync.errors import Fenced

__all__ = ["BusStatus", "WorkerStatus", "bus_status"]


class BusStatus(dict[int, WorkerStatus]):
    """The workers, by their index.

    Attributes:
        refused: with keys, how many connections and messages were refused, by reason. Sender: ``"no key"``,
            ``"a key that is not listed"``, ``"the key of another server"``, ``"the index of another worker"``, ``"a key
            that was taken off the list"``, ``"another protocol"``, ``"an incomplete handshake"``. Receiver: why its
            own attempts to connect failed.
    """

    def __init__(self, workers: Mapping[int, WorkerStatus], refused: Mapping[str, int]) -> None:
        super().__init__(workers)
        self.refused: dict[str, int] = dict(refused)


def bus_status(link: object, models: list[str]) -> BusStatus:
    """Of either end, on its event loop; empty where there is no link yet."""
    if isinstance(link, SenderLink):
        return BusStatus(sender_status(link, models), {} if link.admission is None else link.admission.refused)
    if isinstance(link, ReceiverLink):
        return BusStatus(receiver_status(link, models), link.whereabouts.refused)
    return BusStatus({}, {})


def sender_status(link: SenderLink, models: list[str]) -> dict[int, WorkerStatus]:
    publisher = link.caught_up()
    now = link.loop.time()
    workers = sorted({*publisher.membership.expected(), *publisher.peers, *publisher.behind.workers})
    return {worker: worker_status(publisher, worker, models, now) for worker in workers}


def receiver_status(link: ReceiverLink, models: list[str]) -> dict[int, WorkerStatus]:
    subscriber = link.subscriber
    seen = None if subscriber.last_seen is None else link.loop.time() - subscriber.last_seen
    targets = {m: subscriber.targets.get(m, 0) for m in models}
    # What an earlier sender sent is not this one's, whatever its number.
    marks = [(m, *link.shown[m][:2]) for m in models if m in link.shown]
    current = {m: version for m, epoch, version in marks if epoch == subscriber.session.epoch}
    behind = {m: target - current.get(m, 0) for m, target in targets.items() if target > current.get(m, 0)}
    version = min((link.version([m]) for m in behind), default=link.version(models))
    target, lag = max(targets.values(), default=0), max(behind.values(), default=0)
    state, reason = "live", ""
    if link.closed:
        state, reason = "lost", "this receiver was shut down"
    elif subscriber.session.ended is not None:
        state, reason = "lost", str(subscriber.session.ended)
    elif link.sender_lost or not subscriber.session.online:
        state, reason = "lost", link.whereabouts.why or "the sender is gone; waiting for a new one"
    elif seen is None or seen > subscriber.settings.slow_after:
        state = "slow"
    return {subscriber.worker: WorkerStatus(version, target, lag, seen, state, subscriber.bytes_received, reason)}


def newest_target(link: SenderLink | ReceiverLink | None, models: Iterable[str]) -> int:
    """Of a receiver: the newest version that these models show, or that any model is to have; 0: none."""
    if not isinstance(link, ReceiverLink):
        return 0
    return max([link.version(models), *list(link.subscriber.targets.values())])


def check_fenced(link: SenderLink | ReceiverLink | None) -> None:
    """Raise Fenced if another incarnation of a receiver has taken its place, or its sender's."""
    if isinstance(link, ReceiverLink) and isinstance(ended := link.subscriber.session.ended, Fenced):
        raise Fenced(*ended.args)
