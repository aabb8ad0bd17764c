"""The workers of a sender, as its callers wait for them: until they are there, and until they have a version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncsync.bus.link import Link
from asyncsync.bus.starting import ended_process
from asyncsync.errors import NotConnected, PartialSendError, PeerLost
from asyncsync.fastpath.sender import FastSender
from asyncsync.protocol.publisher import Publisher

__all__ = ["Workers"]


class Workers:
    """The workers of one link.

    Args:
        link: the sender's.
        publisher: its state machine.
        fast: its fast path, which every wait ends.
        min_workers: how many an elastic sender needs.
        depart: sends what is to be sent.
    """

    def __init__(
        self, link: Link, publisher: Publisher, fast: FastSender, min_workers: int, depart: Callable[[], None]
    ) -> None:
        self._link = link
        self._publisher = publisher
        self._fast = fast
        self._min_workers = min_workers
        self._depart = depart

    async def connected(
        self,
        models: list[str],
        version: int | None,
        timeout: float,
        deadline: float,
        processes: Iterable[Any] = (),
    ) -> None:
        """Wait until the expected workers have these models and have applied what there is.

        Until ``deadline``, by the loop's clock, which the caller gave as ``timeout``, or until one of the workers'
        ``processes`` has ended.

        Raises:
            PartialSendError: a worker cannot take the weights; nobody was given any.
            NotConnected: not everybody was there in time; names who, and why.
        """
        self._fast.end()
        publisher = self._publisher

        def hopeless() -> bool:
            # A lost worker may come back; one that cannot take the weights will not change its mind.
            if version is None:
                return False
            if publisher.num_workers is None:  # one that comes later, and cannot take them, is its own affair
                return any(publisher.targets.rejection(w, version) is not None for w in publisher.membership.expected())
            failed = publisher.progress.of(version, publisher.membership.expected(), models).failed
            return any(not isinstance(error, PeerLost) for error in failed.values())

        def done() -> bool:
            publisher.check_open()
            return self._gathered(models) or hopeless() or bool(ended_process(processes))

        in_time = await self._link.wait(done, max(0.0, deadline - self._link.loop.time()))
        ended = "" if self._gathered(models) or hopeless() else ended_process(processes)
        if ended or not in_time:
            missing = [w for w in publisher.membership.expected() if not publisher.progress.connected(w, models)]
            missing.sort(key=lambda w: w in publisher.peers)  # first those that the others may be waiting for
            reasons = "; ".join(publisher.progress.why_absent(w, models) for w in missing)
            if publisher.membership.turned_away:
                reasons += f"; one that came was turned away: {publisher.membership.turned_away}"
            if publisher.num_workers is None:
                there = sum(publisher.progress.connected(w, models) for w in publisher.membership.expected())
                reasons = f"{there} of at least {self._min_workers} workers are there" + (
                    f"; {reasons}" if reasons else ""
                )
            if ended:
                raise NotConnected(f"not connected, because {ended}; {reasons}. connect() may be called again")
            raise NotConnected(f"not connected within {timeout:g} s: {reasons}. connect() may be called again")
        if version is not None and hopeless():
            progress = publisher.progress.of(version, publisher.membership.expected(), models)
            raise PartialSendError(progress.acked, progress.failed)
        for model_id in models:
            publisher.assemble(model_id)

    def _gathered(self, models: list[str]) -> bool:
        there = [w for w in self._publisher.membership.expected() if self._publisher.progress.connected(w, models)]
        needed = self._publisher.num_workers
        return len(there) >= (self._min_workers if needed is None else needed)

    def check(self, workers: Iterable[int] | None) -> list[int] | None:
        """Refuse unknown worker_ids; returns them as a list.

        Raises:
            ValueError: a worker_idx that cannot exist.
        """
        count = self._publisher.num_workers
        chosen = None if workers is None else list(workers)
        for worker in chosen or ():
            if worker < 0 or (count is not None and worker >= count):
                raise ValueError(
                    f"worker_idx {worker} does not exist: num_workers={count}, so choose from 0 to {(count or 1) - 1}"
                )
        return chosen

    def check_quorum(self, models: Iterable[str]) -> None:
        """Refuse to send to nobody.

        Raises:
            NotConnected: no worker has one of these models; of an elastic sender, fewer than ``min_workers`` have it.
        """
        publisher = self._publisher  # who is there, and with which models, does not change on the fast path
        for model_id in models:
            there = publisher.membership.eligible(model_id)
            if publisher.num_workers is None and there < self._min_workers:
                text = f"{there} workers are connected, min_workers={self._min_workers} are needed"
            elif publisher.num_workers is not None and not there:
                text = "no worker can apply this"
            else:
                continue
            others = "; ".join(
                publisher.progress.why_absent(w, [model_id]) for w in publisher.membership.without(model_id)
            )
            raise NotConnected(
                f"{text}{f' ({others})' if others else ''}: "
                "wait for them with connect(), or use publish(), which late workers catch up with"
            )

    async def wait_version(
        self,
        version: int,
        workers: list[int] | None,
        models: list[str] | None,
        timeout: float,
        *,
        spent: float = 0.0,
    ) -> None:
        """Wait until these workers have applied at least this version. ``spent``: of the timeout, already.

        If there is anything to wait for, and time, what is to be sent departs when all is ready to wait.

        Raises:
            PartialSendError: names each worker that has not, and why.
            NotConnected: there is none that could.
        """
        self._fast.end()
        publisher = self._publisher
        chosen = publisher.progress.targeted(version, models) if workers is None else workers
        if not chosen and (self._min_workers or publisher.num_workers is not None):
            self.check_quorum(publisher.targets.models if models is None else models)
            raise NotConnected(f"version {version} is not, or not any more, meant for any worker that is there")

        def done() -> bool:
            publisher.check_open()
            return not publisher.progress.outstanding(version, chosen, models)

        await self._link.wait(done, max(0.0, timeout - spent), self._depart)
        if publisher.progress.applied(version, chosen, models):
            return
        progress = publisher.progress.of(version, chosen, models)
        failed = dict(progress.failed)
        failed.update({w: publisher.progress.timeout_of(w, version, timeout) for w in progress.waiting})
        if failed:
            raise PartialSendError(progress.acked, failed)
