"""Receiving: what a receiver's callers wait for — the sender's welcome, updates, versions — and the copies they get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from asyncsync.bus.applying import Applying
from asyncsync.bus.link import Link
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, WeightSyncError
from asyncsync.model.gate import Gate
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Epoch

REQUEST_AGAIN = 1.0

Mark = tuple[Epoch, int]
"""(epoch, version): where a receiver is in the sequence of updates."""


class Receiving:
    """The waits of one receiver's callers. ``unanswered`` returns why there is no connection, ``origin`` the version at
    the root of a tree that these models show; ``copying`` counts the copies that are being made of received slabs."""

    def __init__(
        self,
        link: Link,
        subscriber: Subscriber,
        applying: Applying,
        gate: Gate,
        unanswered: Callable[[], str],
        origin: Callable[[Iterable[str]], int],
    ) -> None:
        self.copying = 0
        self._link = link
        self._subscriber = subscriber
        self._applying = applying
        self._gate = gate
        self._unanswered = unanswered
        self._origin = origin

    def mark(self, model_id: str) -> Mark | None:
        """Epoch and version of the newest applied update of a model."""
        held = self._subscriber.holdings.held.get(model_id)
        return None if held is None else (held[0], held[1])

    @contextmanager
    def _wanted(self, *models: str) -> Iterator[None]:
        """Somebody receives these models' updates: those that wait for that go through the gate."""
        self._applying.wanted += models
        try:
            yield
        finally:
            for model_id in models:
                self._applying.wanted.remove(model_id)
            self._applying.withdraw()

    def _here(self, models: Iterable[str]) -> list[str]:
        """Those of these models that take part. Raises ClosedError: the schemes of all of them were shut down."""
        if here := [model_id for model_id in models if model_id in self._subscriber.models]:
            return here
        raise ClosedError("this scheme was shut down")

    async def connected(self, model_id: str, timeout: float, deadline: float) -> None:
        """Wait for the sender's welcome, and for the initial weights if it has any, until ``deadline``, by the loop's
        clock, which the caller gave as ``timeout``. Raises SchemaMismatch if these do
        not fit the model; NotConnected, Fenced or ClosedError if no sender has come in time, or it turned this worker
        away."""
        subscriber = self._subscriber

        def done() -> bool:
            self._here([model_id])
            return (
                subscriber.settled(model_id)
                or subscriber.session.ended is not None
                or model_id in subscriber.session.refused
                or model_id in subscriber.holdings.error
            )

        def refused() -> bool:
            return model_id in subscriber.session.refused and not subscriber.holdings.version(model_id)

        if subscriber.session.ended is not None and not refused():
            raise self._ending()
        self._check_again(model_id)
        with self._wanted(model_id):
            self._link.settle()
            if not await self._link.wait(done, max(0.0, deadline - self._link.loop.time())):
                raise NotConnected(
                    f"worker {subscriber.worker} is not connected after {timeout:g} s: "
                    f"{self._why(model_id)}. connect() may be called again"
                )
        if refused():  # since then the sender may have taken its weights back, and left, because they do not fit
            raise _again(subscriber.session.refused[model_id])
        if subscriber.settled(model_id):
            return
        raise self._failure(model_id)

    def _failure(self, model_id: str) -> Exception:
        """Why no update of this model will come, or could be applied."""
        subscriber = self._subscriber
        if subscriber.session.ended is not None:
            return self._ending()
        if model_id in subscriber.session.refused:
            return _again(subscriber.session.refused[model_id])
        return subscriber.holdings.error[model_id][1]

    def _check_again(self, model_id: str) -> None:
        """Raise SchemaMismatch if the sender's layout has not fitted this model, and does not by now."""
        self._subscriber.check_again(model_id, self._link.loop.time())
        if model_id in self._subscriber.session.refused:
            raise _again(self._subscriber.session.refused[model_id])

    def _why(self, model_id: str) -> str:
        subscriber = self._subscriber
        if not subscriber.session.online:
            return self._unanswered()
        if not subscriber.session.welcomed:
            return "the sender has not answered yet"
        if model_id not in subscriber.session.served:
            served = sorted(subscriber.session.served)
            return f"the sender serves {served}, not {model_id!r}; use one model_id on both sides"
        if self._gate.pending:
            return f"an update waits for {self._gate.readers} reader(s) to finish (a hold() or a forward)"
        return "its initial weights have not arrived; the sender waits until every worker has connected"

    def _ending(self) -> WeightSyncError:
        assert self._subscriber.session.ended is not None
        return _again(self._subscriber.session.ended)

    async def receive(self, model_id: str, after: Mark | None, timeout: float | None) -> Mark | None:
        """The mark of an applied update newer than ``after``; None when the timeout expires. Raises ClosedError or
        Fenced if nothing newer is there, and nothing will come."""
        subscriber = self._subscriber

        def newer() -> bool:
            mark = self.mark(model_id)
            return mark is not None and (after is None or mark > after)

        def is_over() -> bool:
            self._here([model_id])
            return subscriber.session.ended is not None

        with self._wanted(model_id):
            self._link.settle()
            found = await self._link.wait(lambda: newer() or is_over(), timeout)
        if newer():
            return self.mark(model_id)
        if found:
            raise self._ending()
        return None

    async def current(self, model_id: str, timeout: float) -> Mark:
        """Request what this worker should have, and wait until it has that. Raises AckTimeout without an answer, or
        without having applied it, within the timeout; SchemaMismatch, RemoteError or the like if it could not be
        applied here."""
        subscriber, session = self._subscriber, self._subscriber.session
        deadline = self._link.loop.time() + timeout
        subscriber.check_again(model_id, self._link.loop.time())
        with self._wanted(model_id):
            first = session.request()

            def done() -> bool:
                self._here([model_id])
                if session.ended is not None:
                    return True
                if not session.answered(first):  # what does not fit may have been taken back by now
                    return False
                target, failed = subscriber.targets.get(model_id, 0), subscriber.holdings.error.get(model_id, (0,))[0]
                reached = bool(target) and max(subscriber.holdings.version(model_id), failed) >= target
                return reached or session.mismatch(model_id) is not None

            while True:
                self._link.settle()
                remaining = deadline - self._link.loop.time()
                if await self._link.wait(done, max(0.0, min(REQUEST_AGAIN, remaining))):
                    break
                if remaining <= 0:
                    raise AckTimeout(
                        f"worker {subscriber.worker} could not fetch {model_id!r} within {timeout:g} s: "
                        f"{self._why(model_id)}"
                    )
                session.request()
        wrong = session.ended is not None or session.mismatch(model_id) is not None
        if wrong or subscriber.holdings.version(model_id) < subscriber.targets.get(model_id, 0):
            raise self._failure(model_id)
        mark = self.mark(model_id)
        assert mark is not None
        return mark

    async def reach(self, model_id: str, version: int, timeout: float, others: Iterable[str] = ()) -> Mark:
        """Wait until this model has this version, or a newer one; one that waits for ``receive`` is applied, also where
        it is one of several models, if the ``others`` are named: they switch together, with the first of them. Raises
        AckTimeout: not within the timeout; SchemaMismatch, RemoteError or the like: it could not be applied here;
        ClosedError, Fenced: it will not come."""
        subscriber = self._subscriber

        def done() -> bool:
            self._here([model_id])
            held, failed = subscriber.holdings.version(model_id), subscriber.holdings.error.get(model_id, (0,))[0]
            ended = subscriber.session.ended is not None or model_id in subscriber.session.refused
            return ended or max(held, failed) >= version

        with self._wanted(model_id, *others):
            self._link.settle()
            in_time = await self._link.wait(done, timeout)
        mark = self.mark(model_id)
        if mark is not None and subscriber.holdings.version(model_id) >= version:
            return mark
        if in_time:
            raise self._failure(model_id)
        raise AckTimeout(
            f"worker {subscriber.worker} was called for version {version} of {model_id!r}, which did not arrive within "
            f"{timeout:g} s: {self._why(model_id)}"
        )

    async def wait_version(self, version: int, models: list[str], timeout: float) -> None:
        """Wait until this worker has applied this version, or a newer one, of every one of these models that is to have
        one. Raises AckTimeout; SchemaMismatch, RemoteError or the like if it could not be applied here; ClosedError or
        Fenced if it will not come."""
        subscriber = self._subscriber
        session, holdings = subscriber.session, subscriber.holdings

        def missing() -> list[str]:
            return [m for m in self._here(models) if subscriber.targets.get(m, 0) >= version > holdings.version(m)]

        def failed() -> list[str]:
            return [m for m in missing() if m in session.refused or holdings.error.get(m, (0,))[0] >= version]

        def done() -> bool:
            meant = any(subscriber.targets.get(m, 0) >= version for m in models)
            return bool(meant and not missing()) or bool(failed())

        in_time = await self._until(done, timeout)
        for model_id in failed():
            raise self._failure(model_id)
        if not in_time:
            have = {m: subscriber.holdings.version(m) for m in models}
            raise AckTimeout(
                f"worker {subscriber.worker} had not applied version {version} after {timeout:g} s; it has {have}"
            )

    async def wait_lag(self, models: list[str], max_lag: int, timeout: float) -> int:
        """Request what this worker should have, and wait until each of these models is at most so many versions behind
        that; returns the oldest of their versions. Raises AckTimeout without an answer, or without having applied it,
        within the timeout; SchemaMismatch, RemoteError or the like if it could not be applied here; ClosedError or
        Fenced if it will not come."""
        subscriber, session, holdings = self._subscriber, self._subscriber.session, self._subscriber.holdings
        deadline = self._link.loop.time() + timeout
        least: dict[str, int] = {}
        first, epoch = session.request(root=True), session.epoch

        def failed() -> str | None:
            for m in least:
                is_behind = holdings.version(m) < least[m]
                if session.mismatch(m) is not None or (is_behind and holdings.error.get(m, (0,))[0] >= least[m]):
                    return m
            return None

        def done() -> bool:
            if session.ended is not None or session.epoch != epoch:
                return True  # another trainer, which counts anew: it is to be asked
            if not least and session.answered(first, root=True):
                least.update({m: subscriber.targets.get(m, 0) - max_lag for m in models})
            for model_id in least.keys() - self._here(models):
                del least[model_id]
            return bool(least) and (all(holdings.version(m) >= v for m, v in least.items()) or failed() is not None)

        with ExitStack() as stack:
            for model_id in models:
                stack.enter_context(self._wanted(model_id))
            while True:
                self._link.settle()
                remaining = deadline - self._link.loop.time()
                if await self._link.wait(done, max(0.0, min(REQUEST_AGAIN, remaining))):
                    if session.ended is not None or session.epoch == epoch:
                        break
                    least.clear()
                    first, epoch = session.request(root=True), session.epoch
                    continue
                if remaining <= 0:
                    asked = f", and it should have {least}" if least else "; the sender has not answered"
                    have = {m: holdings.version(m) for m in models}
                    raise AckTimeout(
                        f"worker {subscriber.worker} was more than {max_lag} versions behind for {timeout:g} s: "
                        f"it has {have}{asked}"
                    )
                session.request(root=True)
        if session.ended is not None:
            raise self._ending()
        if (wrong := failed()) is not None:
            raise self._failure(wrong)
        return min(holdings.version(m) for m in least)

    async def wait_origin(self, version: int, models: Iterable[str], timeout: float) -> None:
        """Wait until what these models show is at least this version of the root of the tree. Raises as
        :meth:`wait_version`."""
        models = list(models)
        if not await self._until(lambda: self._origin(models) >= version, timeout):
            raise AckTimeout(
                f"worker {self._subscriber.worker} did not act with version {version} within {timeout:g} s, but with "
                f"{self._origin(models)}"
            )

    async def _until(self, done: Callable[[], bool], timeout: float) -> bool:
        """False when the timeout expires first. Raises ClosedError or Fenced if the sender's end has come first."""
        session = self._subscriber.session
        in_time = await self._link.wait(lambda: done() or session.ended is not None, timeout)
        if in_time and not done():
            raise self._ending()
        return in_time

    async def copy(self, model_id: str, then: Callable[[Slab], Any]) -> Any:
        """Run ``then`` on a copy of the newest applied slab, which the caller owns."""
        held = self._subscriber.holdings.held.get(model_id)
        assert held is not None
        slab = held[2].retain()
        self.copying += 1
        try:
            return then(await self._link.run(slab.copy, slab.nbytes))
        finally:
            self.copying -= 1
            slab.release()
            if slab.leased and not self._link.closed:
                self._link.settle()  # the sender may be waiting for it


def _again(error: WeightSyncError) -> WeightSyncError:
    """A fresh exception with the same message: raising one object from several places would pile up tracebacks."""
    return type(error)(*error.args)
