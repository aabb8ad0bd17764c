"""Blocking transports of a user's own: ordinary methods that may block, wrapped for the bus (helpers/channels.py)."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncsync import NotConnected, PartialSendError, RemoteError, SchemaMismatch, sync
from asyncsync.transports import TAG
from helpers import planted
from helpers.apis import ASYNCIO, Api, in_thread
from helpers.channels import BlockingBoardScheme, Board, BoardScheme, BoardTransport, Line, board
from helpers.pairs import Clock, Model, connected, fill, read, receiver_of, refusals, until

pytestmark = pytest.mark.requirement(214)


@pytest.fixture
def lines() -> Iterator[Board]:
    with board() as (name, found):
        found.name = name
        yield found


def scheme_of(api: Api, lines: Board, transport: Any = BoardTransport) -> Any:
    lines.kind = transport
    return api.make(api.either(BoardScheme, BlockingBoardScheme), lines.name)


def sender_of(api: Api, lines: Board, transport: Any = BoardTransport, **init: Any) -> Any:
    scheme = scheme_of(api, lines, transport)
    scheme.init_on_sender(**{"model_id": "policy", "model": Model(1), **init})
    return scheme


class Returning(BoardTransport):
    """Returns what has come, instead of filling the buffer."""

    def _hand_over(self, message: dict[str, Any], weights: Any) -> Any:
        return {key: value.numpy() for key, value in message.items()}


class Duck:
    """No TransportBackend at all: the two methods are enough."""

    def __init__(self, line: Line) -> None:
        self.line, inner = line, BoardTransport(line)
        self.send_weights, self.receive_weights = inner.send_weights, inner.receive_weights


@pytest.mark.both_loops
@pytest.mark.parametrize("transport", [BoardTransport, Returning, Duck])
async def test_a_blocking_transport_of_a_users_own_works(api: Api, lines: Board, transport: type) -> None:
    async with api.crew(2, scheme=scheme_of(api, lines, transport), source=Model(1)) as everybody:
        sender, receivers, _ = everybody
        assert everybody.read == [{1}, {1}]
        for value in (2, 3, 4):
            await sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
        await sender.send_async(Model(7), worker_ids=1)
        await sender.send_async({0: Model(8)})
        assert everybody.read == [{8}, {7}]
        assert lines[0].sent == lines[0].received == [1, 2, 3, 4, 8]
        assert lines[1].sent == lines[1].received == [1, 2, 3, 4, 7]
        assert sender.shared_transport is None
        assert {w: t.line for w, t in sender.sender_transports.items()} == lines.lines
        assert [r.receiver_transport.line for r in receivers] == [lines[0], lines[1]]
        assert lines.created == [0, 1, 0, 1]
        assert all(0 < t <= 60 for line in lines.lines.values() for t in line.timeouts if t is not None)
        assert lines[0].threads == {"asyncsync-send-0", "asyncsync-receive"}
        assert sender.status()[0].bytes_sent < 1024, "the bytes did not go over the bus"
    assert [line.calls for line in lines.lines.values()] == [[] if transport is Duck else ["close", "close"]] * 2


@pytest.mark.parametrize("width", [16, 1 << 20])
async def test_what_is_handed_over_is_a_copy_of_its_own(api: Api, lines: Board, width: int) -> None:
    kept: list[Any] = []

    class Keeping(BoardTransport):
        def send_weights(self, weights: Any) -> None:
            kept.append(weights)
            super().send_weights(weights)

    models = [Model(width=width)]
    async with api.crew(1, scheme=scheme_of(api, lines, Keeping), source=Model(0, width), models=models) as everybody:
        for value in (1, 2, 3):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}]
    assert [read(w.exclude(TAG)) for w in kept] == [{0}, {1}, {2}, {3}], "a queue may pickle it later"
    assert len({bytes(w[TAG].tolist()) for w in kept}) == 4, "each has an id of its own"


async def test_a_slow_worker_skips_versions_and_delays_nobody(api: Api, lines: Board) -> None:
    async with api.crew(2, scheme=scheme_of(api, lines), source=Model(0)) as everybody:
        sender = everybody.sender
        lines[1].can_receive.clear()
        for value in range(1, 21):
            await sender.publish(fill(everybody.source, value))
            await sender.wait_version(sender.version, worker_ids=0, timeout=5)
        assert everybody.read == [{20}, {0}]
        assert lines[1].sent == [0, 1], "one at a time"
        lines[1].can_receive.set()
        await sender.wait_version(sender.version, timeout=5)
        assert everybody.read == [{20}, {20}]
        assert lines[1].sent == [0, 1, 20], "what it has skipped never entered its channel"


async def test_elastic_workers_get_a_transport_when_they_are_served(api: Api, lines: Board) -> None:
    sender = sender_of(api, lines)
    async with sender, receiver_of(sender, None, model := Model()) as receiver:
        assert receiver.receiver_transport is None, "it does not know which one it is"
        assert sender.sender_transports == {}
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(worker_idx=7, timeout=5))
        assert read(model) == {1}
        assert sorted(lines.created) == [0, 7, 7]
        assert list(sender.sender_transports) == [7]
        assert receiver.receiver_transport.line is lines[7]


async def test_old_messages_and_duplicates_in_the_channel_are_never_taken(api: Api, lines: Board) -> None:
    class Stuttering(BoardTransport):
        """Everything comes twice."""

        def send_weights(self, weights: Any) -> None:
            super().send_weights(weights)
            super().send_weights(weights)

    async with api.crew(1, scheme=scheme_of(api, lines, Stuttering), source=Model(0)) as everybody:
        for value in range(1, 10):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}]
        assert lines[0].received[:4] == [0, 0, 1, 1]


async def test_several_models_of_one_bus_switch_together(api: Api) -> None:
    with board() as (one, _), board() as (two, _):
        kind = api.either(BoardScheme, BlockingBoardScheme)
        async with api.family(names=(one, two), make=lambda name, bus: api.make(kind, name, bus=bus)) as everybody:
            await everybody.bus.send_async({one: Model(2), two: Model(3)}, timeout=5)
            assert everybody.read == [{one: {2}, two: {3}}]


# -- failures of a user's code


async def test_an_exception_in_send_weights_reaches_send(api: Api, lines: Board) -> None:
    async with api.crew(2, scheme=scheme_of(api, lines), source=Model(0)) as everybody:
        sender = everybody.sender
        lines[1].fail_send = error = OSError("the cable is out")
        with Clock(1.0), pytest.raises(PartialSendError, match="worker 1: OSError: the cable is out") as caught:
            await sender.send_async(Model(1), timeout=30)
        assert caught.value.failed == {1: error}
        assert "worker 1" in error.__notes__[0]
        assert everybody.read == [{1}, {0}]
        with Clock(1.0):
            await sender.send_async(Model(2), timeout=30)
        assert everybody.read == [{2}, {2}]
        for failure in (SystemExit(3), KeyboardInterrupt(), StopIteration()):
            lines[0].fail_send = failure
            with pytest.raises(PartialSendError) as caught:
                await sender.send_async(Model(3), timeout=30)
            assert repr(failure) in str(caught.value.failed[0]), "and ends neither loop nor program"
        await sender.send_async(Model(4), timeout=30)
        assert everybody.read == [{4}, {4}]


async def test_after_an_exception_in_send_weights_connect_may_be_called_again(api: Api, lines: Board) -> None:
    sender = sender_of(api, lines, num_workers=1)
    async with sender, receiver_of(sender, 0, model := Model()) as receiver:
        connecting = asyncio.create_task(receiver.connect(timeout=20))
        lines[0].fail_send = OSError("the cable is out")
        with Clock(1.0), pytest.raises(PartialSendError, match="the cable is out"):
            await sender.connect(timeout=20)
        with Clock(1.0):
            await sender.connect(timeout=20)
            await connecting
        assert read(model) == {1}


async def test_what_fails_in_receive_weights_reaches_send(api: Api, lines: Board) -> None:
    async with api.crew(2, scheme=scheme_of(api, lines), source=Model(0)) as everybody:
        sender = everybody.sender
        for failure in (OSError("no carrier"), SystemExit(3), None):
            lines[1].fail_receive = failure
            lines[1].nothing = int(failure is None)
            with Clock(1.0), pytest.raises(PartialSendError) as caught:
                await sender.send_async(Model(1), timeout=30)
            error = caught.value.failed[1]
            assert isinstance(error, RemoteError)
            if failure is None:
                assert error.type_name == "builtins.TimeoutError"
                assert "receive_weights" in str(error)
            else:
                assert repr(failure) in str(error) or str(failure) in str(error)
                assert "raise error" in error.remote_traceback
        assert everybody.read == [{1}, {0}]
        await sender.send_async(Model(2), timeout=30)
        assert everybody.read == [{2}, {2}]
        assert lines[1].received[-1] == 2, "what it has not taken was dropped by its id"


@pytest.mark.parametrize("timeouts", [True, False])
async def test_receive_weights_that_blocks_is_given_up_at_the_deadline(
    api: Api, lines: Board, timeouts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Declaring(BoardTransport):
        supports_timeout = timeouts

    async with api.crew(1, scheme=scheme_of(api, lines, Declaring), source=Model(0)) as everybody:
        planted.fetch_deadline(monkeypatch, 0.5)
        lines[0].can_receive.clear()
        with Clock(1.0), pytest.raises(PartialSendError, match="TimeoutError"):
            await everybody.sender.send_async(Model(1), timeout=30)
        assert (lines[0].timeouts[-1] is not None) is timeouts
        lines[0].can_receive.set()
        monkeypatch.undo()
        await everybody.sender.send_async(Model(2), timeout=30)
        assert everybody.read == [{2}]
        if not timeouts:
            with pytest.raises(ValueError, match="supports_timeout"):
                await everybody.receivers[0].receive(0)


class Losing(BoardTransport):
    def _hand_over(self, message: dict[str, Any], weights: Any) -> Any:
        return {k: v for k, v in message.items() if k != TAG}


class Cutting(BoardTransport):
    def _hand_over(self, message: dict[str, Any], weights: Any) -> Any:
        return {**message, "last": message["last"][:3]}


@pytest.mark.parametrize(("kind", "text"), [(Losing, TAG), (Cutting, "'last'")])
async def test_what_comes_out_changed_is_refused(api: Api, lines: Board, kind: type[BoardTransport], text: str) -> None:
    sender = sender_of(api, lines, kind, num_workers=1)
    left, right = await refusals(sender, receiver_of(sender, 0, model := Model()), timeout=20)
    assert isinstance(left, PartialSendError)
    assert text in str(left)
    assert isinstance(right, SchemaMismatch)
    assert read(model) == {-1}


async def test_shutdown_does_not_wait_for_blocked_threads(api: Api, lines: Board) -> None:
    async with api.crew(2, scheme=scheme_of(api, lines), source=Model(0)) as everybody:
        lines[0].can_send.clear()
        lines[1].can_receive.clear()
        await everybody.sender.publish(Model(1))
        await in_thread(lines[0].sending.wait, 5)
        await in_thread(lines[1].receiving.wait, 5)
        with Clock(1.0):
            await asyncio.gather(everybody.sender.shutdown(), *(r.shutdown() for r in everybody.receivers))
    lines[0].can_send.set()
    lines[1].can_receive.set()  # the threads end by themselves: the fixtures look


async def test_a_worker_lost_while_send_weights_blocks_fails_at_once(api: Api, lines: Board) -> None:
    async with api.crew(2, scheme=scheme_of(api, lines), source=Model(0)) as everybody:
        sender, receivers, _ = everybody
        lines[1].can_send.clear()
        sending = asyncio.create_task(sender.send_async(Model(1), timeout=30))
        await in_thread(lines[1].sending.wait, 5)
        with Clock(1.0):
            await receivers[1].shutdown()
            with pytest.raises(PartialSendError, match="worker 1: PeerLost"):
                await sending
        assert everybody.read[0] == {1}
        async with receiver_of(sender, 1, model := Model()) as late:
            connecting = asyncio.create_task(late.connect(timeout=10))
            await until(lambda: sender.status()[1].state == "live")
            lines[1].can_send.set()
            await connecting
            assert read(model) == {1}


# -- setup methods of a user's own


class Meeting(BoardTransport):
    """Both sides wait for each other."""

    fails = ""

    def setup_connection_and_weights_on_sender(self) -> None:
        self.line.calls.append("sender")
        if self.fails == "sender":
            raise OSError("no socket left")
        self.line.threads.add(threading.current_thread().name)
        self.line.messages.put({"hello": torch.zeros(1)})

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        self.line.calls.append(f"receiver {worker_idx}")
        if self.fails == "receiver":
            raise OSError("no socket left")
        assert (weights, model, strategy) == (None, None, None)
        assert list(self.line.messages.get(timeout=20)) == ["hello"]


@pytest.mark.requirement(41)
@pytest.mark.parametrize("source", [True, False])
async def test_setup_methods_of_a_users_own_meet_during_connect(api: Api, lines: Board, source: bool) -> None:
    sender = sender_of(api, lines, Meeting, model=Model(1) if source else None, num_workers=2)
    receivers = [receiver_of(sender, i, Model()) for i in range(2)]
    assert lines[0].calls == [], "init does not communicate"
    async with connected(sender, *receivers):
        assert [sorted(lines[i].calls) for i in range(2)] == [["receiver 0", "sender"], ["receiver 1", "sender"]]
        await sender.send_async(Model(2))
        assert [read(r.model) for r in receivers] == [{2}, {2}]
        await receivers[1].shutdown()
        async with receiver_of(sender, 1, model := Model()) as late:
            await late.connect(timeout=10)
            assert read(model) == {2}
            assert lines[1].calls.count("sender") == 2, "a restarted worker is met again"


@pytest.mark.requirement(41)
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_a_setup_that_fails_fails_connect(api: Api, lines: Board, side: str) -> None:
    sender = sender_of(api, lines, type("Failing", (Meeting,), {"fails": side}), num_workers=1)
    both = [sender] if side == "sender" else [sender, receiver_of(sender, 0, Model())]
    left, *right = await refusals(*both, timeout=20)
    if side == "sender":
        assert isinstance(left, OSError)
        assert "worker 0" in left.__notes__[0]
    else:
        assert isinstance(left.failed[0], RemoteError)
        assert isinstance(right[0], OSError)


@pytest.mark.requirement(41)
async def test_a_setup_that_blocks_is_named_and_connect_may_be_called_again(api: Api, lines: Board) -> None:
    class Waiting(BoardTransport):
        def setup_connection_and_weights_on_sender(self) -> None:
            self.line.calls.append("sender")
            assert self.line.can_send.wait(20)

    lines[1].can_send.clear()
    sender = sender_of(api, lines, Waiting, num_workers=2)
    async with sender, receiver_of(sender, 0, Model()) as one, receiver_of(sender, 1, Model()) as other:
        connecting = [asyncio.create_task(receiver.connect(timeout=20)) for receiver in (one, other)]
        with pytest.raises(NotConnected, match=r"\[1\]"):
            await sender.connect(timeout=0.2)
        lines[1].can_send.set()
        await sender.connect(timeout=10)
        await asyncio.gather(*connecting)
        assert lines[1].calls == ["sender"]


# -- what create_transport may return


class OnlySends(sync.TransportBackend):
    def send_weights(self, weights: Any) -> None:  # type: ignore[override]
        pass


class Coroutines(sync.TransportBackend):
    async def send_weights(self, weights: Any) -> None:  # type: ignore[override]
        pass

    async def receive_weights(self, timeout: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        pass


@pytest.mark.requirement(82)
@pytest.mark.parametrize(
    ("made", "message"),
    [(OnlySends, "OnlySends.*receive_weights"), (Coroutines, "Coroutines.send_weights"), (object, "object")],
)
def test_create_transport_is_checked_at_init(api: Api, made: type, message: str) -> None:
    class Scheme(api.ZMQWeightSyncScheme):  # type: ignore[misc, name-defined]
        def create_transport(self, **kwargs: Any) -> Any:
            return made()

    with pytest.raises(TypeError, match=message):
        Scheme().init_on_sender(model_id="policy", model=Model(), num_workers=1)
    with pytest.raises(TypeError, match=message):
        Scheme().init_on_receiver("policy", model=Model(), worker_idx=0)


async def test_the_key_of_the_id_is_reserved(api: Api, lines: Board) -> None:
    sender = sender_of(api, lines, model=None, weights={TAG: torch.zeros(1)}, num_workers=1)
    async with sender:
        with pytest.raises(ValueError, match=TAG):
            await sender.connect(timeout=5)


@pytest.mark.requirement(192)
async def test_a_cancelled_shutdown_still_lets_go_of_the_threads(lines: Board) -> None:
    async with ASYNCIO.crew(1, scheme=scheme_of(ASYNCIO, lines), source=Model(0)) as everybody:
        for scheme in (everybody.sender, *everybody.receivers):
            ending = asyncio.create_task(scheme.shutdown())
            await asyncio.sleep(0)
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
    assert lines[0].calls == ["close", "close"]  # the threads have ended: the fixtures look


def test_transports_that_do_not_close_share_one_second_where_their_loop_is_closed() -> None:
    may = threading.Event()

    class Stuck(BoardTransport):
        def setup_connection_and_weights_on_sender(self) -> None:
            pass

        def close(self) -> None:
            assert may.wait(50)

    async def connect() -> None:
        with pytest.raises(NotConnected):
            await sender.connect(timeout=0.05)

    with board() as (name, lines):
        lines.kind = Stuck
        sender = BoardScheme(name, num_workers=6)
        sender.init_on_sender(model_id="policy", model=Model(0))
        loop = asyncio.new_event_loop()
        loop.run_until_complete(connect())
        loop.close()
        begun = time.monotonic()
        asyncio.run(sender.shutdown())
        try:
            assert time.monotonic() - begun < 4
        finally:
            may.set()
