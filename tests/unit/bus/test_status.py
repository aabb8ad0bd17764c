"""A sender's status for whoever asks: what it tells, how large it can get, and how often."""

import asyncio
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from asyncsync import AckTimeout, NotConnected, WorkerStatus
from asyncsync.bus.status import ANSWERS_PER_SECOND, FRESH_SECONDS, Reporter
from asyncsync.commands.top import Asker
from asyncsync.errors import ProtocolError
from asyncsync.wire import messages
from asyncsync.wire.messages import MAX_HEADER, MAX_NAME, MAX_REPORTED, Inquiry, Report, decode, encode
from helpers.apis import ASYNCIO, Api
from helpers.machines import Desk, Station, nonce
from helpers.pairs import Model, connected, until


def reporter(desk: Desk, **dropped: int) -> Reporter:
    return Reporter(desk.machine, lambda: desk.now, lambda: {"no key": 3}, dropped)


def told(answer: Any) -> Report:
    """As it comes over the wire."""
    got, _ = decode([encode(answer)])
    assert got == answer
    return answer


# -- what it tells, without sockets ------------------------------------------------------------------------------------


def test_a_report_has_the_sender_its_models_and_its_workers() -> None:
    desk = Desk(3, models=("policy", "value"))
    desk.join(0)
    desk.hello(1, have={"policy": 0})
    desk.ready(1)
    for model in ("policy", "value"):
        desk.machine.mark_assembled(model)  # worker 2 has been there, once
    version = desk.publish(1, models=["policy", "value"])
    desk.now = 8.0
    desk.receive(0, messages.Applied(desk.machine.membership.epoch, {"policy": version, "value": version}))
    desk.now = 9.5
    desk.machine.tick(desk.now)
    report = told(reporter(desk, malformed=2).answer(7))
    assert (report.token, report.epoch) == (7, desk.machine.membership.epoch)
    assert (report.host, report.pid) == (socket.gethostname(), os.getpid())
    assert (report.version, report.num_workers, report.num_models) == (version, 3, 2)
    assert [(m.model_id, m.nbytes, m.version) for m in report.models] == [("policy", 128, 1), ("value", 128, 1)]
    assert report.counts == {"live": 1, "slow": 1, "lost": 1, "relays": 0, "guests": 0}
    assert (report.refused, report.dropped) == ({"no key": 3}, {"malformed": 2})
    first, second, third = report.workers
    assert (first.index, first.state, first.version, first.target, first.lag) == (0, "live", 1, 1, 0)
    assert (first.versions, first.last_seen, first.pid, first.local) == ((1, 1), 1500, 100, True)
    assert (second.state, second.lag, second.versions) == ("slow", 1, (0, None))
    assert (third.state, third.last_seen, third.versions) == ("lost", None, ())
    assert third.reason == "it has not connected yet"


def test_a_report_says_what_a_worker_cannot_take() -> None:
    desk = Desk(1)
    desk.join(0)
    desk.publish(1, dtype=torch.float64)
    desk.refuse(0, torch.float64)
    [worker] = told(reporter(desk).answer(1)).workers
    assert (worker.state, worker.reason) == ("live", "worker 0, model 'policy': it does not fit")


def test_what_a_worker_says_is_one_line_without_control_characters() -> None:
    desk = Desk(1)
    desk.join(0)
    version = desk.publish(1)
    [update] = desk.take(messages.Update)
    error = "builtins.OSError", "\x1b[2Jno\x07 \u202espace\nleft", "Traceback: …\nno space left"
    desk.receive(
        0, messages.Failed(desk.machine.membership.epoch, update.serial, {"policy": version}, False, *error)  # type: ignore[attr-defined]
    )  # fmt: skip
    report = told(reporter(desk, **{"ProtocolError: \x1b[2Jno\nmore": 2}).answer(1))
    assert (report.workers[0].reason, report.dropped) == (
        "builtins.OSError: (worker 0) [2Jno space",
        {"ProtocolError: [2Jno": 2},
    )


def test_workers_that_are_turned_away_are_counted() -> None:
    desk = Desk(1)
    desk.hello(5)
    desk.hello(6)
    assert told(reporter(desk).answer(1)).refused == {"an index that is not below num_workers": 2, "no key": 3}


def test_the_largest_report_fits_into_one_message() -> None:
    names = [chr(0x10000 + i) * MAX_NAME for i in range(70)]
    desk = Desk(None, models=names)
    for worker in range(400):
        desk.hello(worker, have=dict.fromkeys(names[:3], 0))
        desk.machine.lost(worker, nonce(worker), "\U00010000" * 1000, 0.0)
    reasons = {f"{i} " + "\U00010000" * 300: (1 << 64) - 1 for i in range(300)}
    report = told(reporter(desk, **reasons).answer(1))
    assert len(encode(report)) < MAX_HEADER
    assert (len(report.models), report.num_models) == (64, 70)
    assert 100 < len(report.workers) <= MAX_REPORTED
    assert report.counts["lost"] == 400


# -- how often ---------------------------------------------------------------------------------------------------------


def test_nobody_gets_more_than_so_many_answers_in_a_second_nor_has_each_made_anew() -> None:
    desk = Desk(1)
    asked = reporter(desk)
    answers = [asked.answer(token) for token in range(5 * ANSWERS_PER_SECOND)]
    assert [one.token for one in answers if one is not None] == list(range(ANSWERS_PER_SECOND))
    desk.join(0)
    desk.now += 1.5 / ANSWERS_PER_SECOND
    assert told(asked.answer(1)).counts["live"] == 1, "made anew"
    assert asked.answer(2) is None
    desk.now += FRESH_SECONDS / 2
    desk.machine.lost(0, nonce(0), "gone", desk.now)
    assert told(asked.answer(3)).counts["live"] == 1, "as it was"


# -- over sockets ------------------------------------------------------------------------------------------------------


async def test_whoever_can_connect_can_ask_and_the_workers_go_on(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender = everybody.sender
        with closing(Asker(sender.bus.endpoint)) as asker:
            before = await asker.ask(5)
            version = await sender.send_async(everybody.source)
            report: Report | None = None
            while report is None or report.version < version:
                report = await asker.ask(5)
        assert [w.version for w in report.workers] == [version, version]
        assert [w.bytes_sent for w in report.workers] == [sender.status()[w].bytes_sent for w in (0, 1)]
        assert report.bytes_sent > before.bytes_sent
        assert all(isinstance(one, WorkerStatus) for one in sender.status().values())
        assert sender.bus.dropped == {}


async def test_a_flood_of_inquiries_keeps_nobody_from_anything(api: Api) -> None:
    async with api.crew(1) as everybody:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(everybody.sender.bus.endpoint)
            for token in range(500):
                dealer.send(encode(Inquiry(token)))
            for _ in range(3):
                await everybody.sender.send_async(everybody.source)
            await until(lambda: dealer.poll(0))
            await asyncio.sleep(0.2)
            answers = 0
            while dealer.poll(0):
                dealer.recv()
                answers += 1
        assert answers <= 2 * ANSWERS_PER_SECOND


def alone(endpoint: str) -> Any:
    """A trainer without workers."""
    return ASYNCIO.sender(Model(1.0), scheme={"endpoint": endpoint, "min_workers": 0})


async def test_nobody_there_is_said_in_time_and_one_that_comes_back_answers(endpoint: str) -> None:
    with closing(Asker(endpoint)) as asker:
        with pytest.raises(AckTimeout, match=r"no sender answered"):
            await asker.ask(0.2)
        epochs = set()
        for _ in range(2):
            async with connected(scheme := alone(endpoint)):
                report = await asker.ask(5)
                assert (report.num_workers, report.workers, report.version) == (None, (), scheme.version)
                epochs.add(report.epoch)
            with pytest.raises(AckTimeout):
                await asker.ask(0.1)
        assert len(epochs) == 2


async def test_of_several_addresses_the_next_one_is_asked_while_nobody_answers(tmp_path: Path) -> None:
    first, second = f"ipc://{tmp_path}/first", f"ipc://{tmp_path}/second"
    with closing(Asker(f"{first},{second}")) as asker:
        for endpoint in (second, first):
            async with connected(scheme := alone(endpoint)):
                assert (await asker.ask(5)).epoch == scheme.bus.link.machine.membership.epoch


async def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(NotConnected, match="cannot connect to smoke"):
        Asker("smoke")


async def test_a_worker_that_is_asked_says_nothing_and_goes_on() -> None:
    station = Station()
    with pytest.raises(ProtocolError, match="Inquiry, which it only receives"):
        station.receive(Inquiry(1))
