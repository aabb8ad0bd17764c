"""What a worker reports: what is staged, applied or failed, and which leased slabs are in use. No I/O, no clock."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

from asyncsync.errors import SchemaMismatch
from asyncsync.protocol.holdings import Holdings
from asyncsync.protocol.incoming import Incoming
from asyncsync.protocol.messages import MAX_NAME, MAX_TEXT, Applied, Done, Failed, InUse, Ping, Pong, Released, Staged
from asyncsync.protocol.session import Session
from asyncsync.protocol.staging import StagedUpdates, Staging

__all__ = ["Reports"]


class Reports:
    """The reports of one worker to its trainer.

    ``serial`` is that of the latest update that has come: a report names the slabs in use of all updates up to it.
    ``unreported`` is what STAGED has not reported; DONE will, if it is applied at once. ``failure`` is the report of
    the last update that failed, until what is newer is applied.
    """

    def __init__(self, session: Session, incoming: Incoming, holdings: Holdings, staged: StagedUpdates) -> None:
        self.serial = 0
        self.unreported: Staging | None = None
        self.failure: Failed | None = None
        self._session = session
        self._incoming = incoming
        self._holdings = holdings
        self._staged = staged

    def adopt(self) -> None:
        """A new trainer, which counts its updates afresh."""
        self.serial = 0
        self.failure = None

    def in_use(self) -> tuple[int, InUse]:
        """Which leased slabs are in use here, of the updates up to which serial."""
        return self.serial, self._holdings.report(self._incoming.awaited)

    def flush(self) -> None:
        """Before the outbox is sent: report an AGAIN that has not been applied at once, and slabs that no other message
        has reported."""
        session, holdings = self._session, self._holdings
        if (unreported := self.unreported) is not None:
            self.unreported = None
            if unreported.epoch == session.epoch and not unreported.abandoned:
                session.send(Staged(unreported.epoch, unreported.serial, *self.in_use()))
        if holdings.is_report_due and session.epoch is not None and session.ended is None:
            before = len(holdings.leased)
            serial, in_use = self.in_use()
            if len(holdings.leased) < before:
                session.send(Released(session.epoch, session.nonce, serial, in_use))

    def staged(self, serial: int) -> None:
        """All of this update is here and checked."""
        assert self._session.epoch is not None
        self._session.send(Staged(self._session.epoch, serial, *self.in_use()))

    def versions(self) -> None:
        """Report the versions that the models hold."""
        session = self._session
        assert session.epoch is not None
        session.send(Applied(session.epoch, session.named(self._holdings.versions), *self.in_use()))

    def applied(self, staging: Staging) -> None:
        """The models hold these versions."""
        session, holdings = self._session, self._holdings
        if (failure := self.failure) is not None:
            versions = failure.versions.items()
            if all(holdings.version(session.local(m)) >= v for m, v in versions):
                self.failure = None
        if staging.epoch != session.epoch:
            return
        outbox = session.outbox
        if outbox and type(last := outbox[-1][0]) is Staged and last.serial == staging.serial:
            outbox.pop()  # APPLIED reports it, too
        at_once = self.unreported is staging
        if at_once:
            self.unreported = None
        if at_once and self.serial == staging.serial and not (holdings.leased or self._incoming.update):
            holdings.is_report_due = False
            session.send(Done(staging.epoch, staging.serial))
            return
        serial, in_use = self.in_use()
        if at_once and serial == staging.serial and not in_use:
            session.send(Done(staging.epoch, staging.serial))
        else:
            session.send(Applied(staging.epoch, session.named(holdings.versions), serial, in_use))

    def failed(self, serial: int, versions: Mapping[str, int], error: BaseException) -> None:
        """These versions could not be applied."""
        session = self._session
        assert session.epoch is not None
        self._holdings.note_error(versions, error)
        name = f"{type(error).__module__}.{type(error).__qualname__}"[:MAX_NAME]
        text = "".join(traceback.format_exception(error))[-MAX_TEXT:]
        mismatch = isinstance(error, SchemaMismatch)
        self.failure = Failed(
            session.epoch, serial, session.named(versions), mismatch, name, str(error)[:MAX_TEXT], text, *self.in_use()
        )
        session.send(self.failure)

    def pong(self, ping: Ping) -> None:
        """Everything, as the answer to a PING."""
        # An UPDATE that was sent before this and is not here is lost, maybe for good: its slabs are not waited for.
        self.serial = max(self.serial, ping.serial)
        session = self._session
        if self.failure is not None:
            session.send(self.failure)
        versions = session.named(self._holdings.versions)
        staged = session.named(self._staged.versions(session.epoch))
        incoming = 0 if self._incoming.update is None else self._incoming.update.serial
        session.send(Pong(ping.epoch, ping.seq, versions, staged, incoming, *self.in_use()))
