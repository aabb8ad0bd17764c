"""What a bus tells of itself: figures over HTTP, debug lines, spans. And nothing where nobody asks."""

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import urllib.error
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import Histogram
from prometheus_client.core import GaugeMetricFamily

from asyncsync import Bus, ClosedError, NotConnected, PartialSendError, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from asyncsync.bus.status import TrainerObserver
from asyncsync.monitor.metrics import Metrics
from asyncsync.monitor.trace import Monitoring, hooks_of
from asyncsync.wire import messages
from helpers.apis import Api
from helpers.command import private_directories
from helpers.figures import families, look, of, scrape
from helpers.machines import Desk, nonce
from helpers.pairs import Model, crew, until


@asynccontextmanager
async def apart(
    sender: Any = None, width: int = 64, **options: Any
) -> AsyncIterator[tuple[ZMQWeightSyncScheme, Model, ZMQWeightSyncScheme]]:
    """A trainer, its model, and a receiver whose bus has options of its own."""
    source, models = Model(0, width), [Model(width=width)]
    async with crew(1, scheme=sender, source=source, models=models) as everybody:
        await everybody.receivers[0].shutdown()
        other = ZMQWeightSyncScheme(endpoint=everybody.sender.bus.endpoint, **options)
        other.init_on_receiver("policy", model=models[0], worker_idx=0)
        async with other:
            await other.connect()
            yield everybody.sender, source, other


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "address"),
    [(9100, ("127.0.0.1", 9100)), ("9100", ("127.0.0.1", 9100)), ("0.0.0.0:9100", ("0.0.0.0", 9100)),
     ("[::1]:0", ("::1", 0))],
)  # fmt: skip
def test_a_port_is_of_loopback_unless_an_address_is_given(given: int | str, address: tuple[str, int]) -> None:
    assert Monitoring.given(given, None).address == address


async def coroutine(event: str, info: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        *(({"metrics_port": port}, ValueError, "loopback") for port in (-1, 65536, True, "", "host", "host:http", 1.5)),
        ({"tracing": "yes"}, TypeError, "tracing"),
        ({"tracing": coroutine}, TypeError, "ordinary function"),
    ],
)
def test_what_is_no_port_and_no_hook_is_refused_at_once(options: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        Bus(**options)


def test_a_port_and_a_hook_stay_with_their_process_and_yes_or_no_travels() -> None:
    for tracing, inherited in ((True, True), (False, False), (lambda event, info: None, None)):
        bus = Bus(metrics_port=9100, tracing=tracing)
        assert pickle.loads(pickle.dumps(bus)).monitoring == Monitoring(None, inherited)
        assert bus.monitoring == Monitoring(("127.0.0.1", 9100), tracing)
        assert Monitoring(("127.0.0.1", 1), tracing, pid=1).in_this_process == Monitoring(None, inherited)


def test_it_belongs_to_the_bus() -> None:
    for options in ({"metrics_port": 0}, {"tracing": False}):
        with pytest.raises(ValueError, match="metrics_port, tracing, compress and delta belong to the Bus"):
            ZMQWeightSyncScheme(bus=Bus(), **options)  # type: ignore[arg-type]


# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.mark.schemes("every")
async def test_figures_of_sender_and_receivers(api: Api) -> None:
    scheme = api.scheme(metrics_port=0)
    async with api.crew(2, scheme=scheme) as everybody:
        assert everybody.receivers[0].bus.metrics_address is None
        for _ in range(4):
            version = await scheme.send_async(everybody.source)
        figures = await look(scheme)
        assert of(figures, "up") == 1
        assert of(figures, "version") == of(figures, "published_versions_total") == version
        assert of(figures, "model_bytes", model="policy") > 0
        numbers = {state: of(figures, "workers", state=state) for state in ("live", "slow", "lost", "relays", "guests")}
        assert numbers == {"live": 2, "slow": 0, "lost": 0, "relays": 0, "guests": 0}
        for worker in ("0", "1"):
            who = {"role": "worker", "worker": worker}
            assert of(figures, "worker_applied_version", model="policy", **who) == version
            assert of(figures, "worker_lag_versions", **who) == 0
            assert of(figures, "worker_state", state="live", **who) == 1
            assert of(figures, "worker_state", state="lost", **who) == 0
            assert of(figures, "worker_sent_bytes_total", **who) == scheme.status()[int(worker)].bytes_sent
        assert of(figures, "update_duration_seconds_count") == version, "all that were sent to somebody"
        assert of(figures, "update_duration_seconds_bucket", le="+Inf") == version
        assert of(figures, "loop_stalled_seconds_total") >= 0
        address = scheme.bus.metrics_address
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        scrape(address)


async def test_figures_of_a_receiver() -> None:
    async with apart(metrics_port=0, tracing=False) as (sender, source, receiver):
        version = await sender.send_async(source)
        figures = await look(receiver)
        assert of(figures, "receiver_version", worker="0", model="policy") == version
        assert of(figures, "receiver_lag_versions", worker="0") == 0
        assert of(figures, "receiver_sender_state", worker="0", state="live") == 1
        assert of(figures, "received_bytes_total", worker="0") > 0


async def test_a_port_in_use_is_named_and_nothing_is_bound() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        scheme = ZMQWeightSyncScheme(metrics_port=port, min_workers=0)
        scheme.init_on_sender(model_id="policy", weights={"a": torch.ones(2)})
        with pytest.raises(NotConnected, match=f"cannot serve metrics at 127.0.0.1:{port}: Address already in use"):
            await scheme.connect()
        assert not private_directories()
        await scheme.shutdown()


def test_a_loop_that_does_not_answer_is_a_figure_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.monitor.metrics.PATIENCE", 0.05)
    before = threading.active_count()
    metrics = Metrics(("127.0.0.1", 0), has_durations=True)
    loop = asyncio.new_event_loop()  # which does not run

    async def collect() -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily("asyncsync_version", "…", 7)]

    try:
        assert scrape(metrics.address) == {}, "there is no bus yet"
        metrics.attach(loop, collect)
        figures = scrape(metrics.address)
        assert of(figures, "up") == 0
        assert of(figures, "loop_answer_seconds") >= 0.05
        assert ("asyncsync_version", frozenset()) not in figures
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert of(scrape(metrics.address), "up") == 0
    finally:
        metrics.close()
        metrics.close()
    assert threading.active_count() == before


def test_a_connection_that_says_nothing_or_half_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each keeps a thread and a descriptor of the trainer's."""
    monkeypatch.setattr("asyncsync.monitor.metrics.READ_SECONDS", 0.2)
    metrics = Metrics(("127.0.0.1", 0))
    before = threading.active_count()
    try:
        for said in (b"", b"GET /metrics HTTP/1.1\r\nHost: "):
            with socket.create_connection(metrics.address, timeout=5) as connection:
                connection.sendall(said)
                assert connection.recv(1) == b""
        assert scrape(metrics.address) == {}
        while threading.active_count() > before:  # bounded by the test's own timeout
            time.sleep(0.01)
    finally:
        metrics.close()
    assert capfd.readouterr().err == ""


async def test_missing_libraries_are_named_with_their_extra_or_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("prometheus_client", "opentelemetry"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    asked = {
        "metrics_port needs prometheus-client": {"metrics_port": 0},
        "opentelemetry-api": {"tracing": True},
        "": {},
    }
    for library, options in asked.items():
        async with ZMQWeightSyncScheme(min_workers=0, **options) as scheme:
            scheme.init_on_sender(model_id="policy", weights={"a": torch.ones(2)})
            if not library:
                await scheme.connect()
            else:
                with pytest.raises(ImportError, match=rf'{library}; .*: pip install "asyncsync\[metrics\]"'):
                    await scheme.connect()


# -- debug lines -------------------------------------------------------------------------------------------------------


@pytest.mark.schemes("every")
async def test_each_step_of_a_version_is_a_debug_line(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    async with api.crew(2) as everybody:
        for _ in range(3):
            await everybody.sender.send_async(everybody.source)  # nobody wants to know: the fast path, where there is
        caplog.clear()
        caplog.set_level(logging.DEBUG, "asyncsync")
        version = await everybody.sender.send_async(everybody.source)
        await until(lambda: any(one.message.startswith(f"publish.end: version {version}") for one in caplog.records))
        lines = [one.message for one in caplog.records]
        caplog.set_level(logging.WARNING, "asyncsync")
        last = await everybody.sender.send_async(everybody.source)
    for event in ("begin", "packed", "published"):
        assert any(line.startswith(f"publish.{event}: ") for line in lines), lines
    for worker in ("0", "1"):
        for event in ("deliver.begin", "deliver.end", "update.begin", "update.fetched", "update.staged", "update.end"):
            [line] = [
                one for one in lines if one.startswith(f"{event}: version {version}") and f"worker {worker}" in one
            ]
            assert line.endswith(" ms"), "no error"
    assert not any(f"version {last}" in one.message for one in caplog.records)


# -- a hook of the user's ----------------------------------------------------------------------------------------------


async def test_a_hook_is_told_each_step_of_each_version() -> None:
    trainer: list[tuple[str, dict[str, Any]]] = []
    worker: list[tuple[str, dict[str, Any]]] = []
    given = ZMQWeightSyncScheme(tracing=lambda event, info: trainer.append((event, info)))
    async with apart(given, tracing=lambda event, info: worker.append((event, info))) as (sender, source, _):
        for told in (trainer, worker):
            told.clear()
        version = await sender.send_async(source)
        await until(lambda: trainer[-1][0] == "publish.end")
        epoch = sender.epoch
    events = [event for event, _ in trainer]
    steps = ["publish.begin", "publish.packed", "publish.published", "deliver.begin", "deliver.end", "publish.end"]
    assert [event for event in events if event in steps] == steps
    assert [event for event, _ in worker] == ["update.begin", "update.fetched", "update.staged", "update.end"]
    assert {info.get("version", version) for _, info in (*trainer, *worker)} == {version}
    assert {info.get("epoch", epoch) for _, info in (*trainer, *worker)} == {epoch}
    for told in (trainer, worker):
        assert [info["time"] for _, info in told] == sorted(info["time"] for _, info in told)
        assert all(info["seconds"] >= 0 and not info.get("error") for _, info in told)


async def test_a_hook_that_fails_is_told_of_and_called_no_more(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def hook(event: str, info: dict[str, Any]) -> None:
        calls.append(event)
        raise KeyError("a mistake in the hook")

    async with crew(1, scheme=ZMQWeightSyncScheme(tracing=hook)) as everybody:
        await everybody.sender.send_async(everybody.source)
    assert len(calls) == 1
    [record] = [one for one in caplog.records if one.exc_info]
    assert "a mistake in the hook" in str(record.exc_info[1])


# -- spans -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


NAMES = {
    "trainer": """
        dropped_messages loop_answer_seconds loop_stalled_seconds model_bytes published_versions refusals up
        update_duration_seconds version worker_applied_version worker_lag_versions worker_last_seen_seconds
        worker_sent_bytes worker_staged_version worker_state worker_taken_version workers""",
    "worker": """
        dropped_messages loop_answer_seconds loop_stalled_seconds received_bytes receiver_lag_versions
        receiver_sender_state receiver_staged_version receiver_taken_version receiver_target_version receiver_version
        refusals up""",
    "spans": "apply deliver fetch publish stage update",
    "events of spans": "fetched packed staged",
    "attributes": "epoch models nbytes version worker",
}  # fmt: skip


async def test_the_names_of_all_metrics_spans_and_events_on_which_dashboards_depend(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asyncsync")
    given = ZMQWeightSyncScheme(metrics_port=0)
    async with apart(given, 2 << 20, metrics_port=0) as (sender, source, receiver):
        async with receiver.hold():  # it says that it has staged the update, because it cannot apply it yet
            version = await sender.publish(source)
            await until(lambda: any(one.startswith("deliver.staged") for one in caplog.messages))
        await sender.wait_version(version)
        trainer, worker = [await asyncio.to_thread(families, one.bus.metrics_address) for one in (sender, receiver)]
    finished = spans.get_finished_spans()
    found = {
        "trainer": {family.name for family in trainer},
        "worker": {family.name for family in worker},
        "spans": {span.name for span in finished},
        "events of spans": {event.name for span in finished for event in span.events},
        "attributes": {name for span in finished for name in span.attributes},
    }
    prefixes = {"trainer": "asyncsync_", "worker": "asyncsync_", "spans": "asyncsync.", "attributes": "asyncsync."}
    expected = {kind: {prefixes.get(kind, "") + name for name in names.split()} for kind, names in NAMES.items()}
    assert found == expected


@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme])
async def test_a_version_is_a_span_with_one_per_worker_below_it(spans: InMemorySpanExporter, kind: Any) -> None:
    async with crew(2, scheme=kind()) as everybody:
        for _ in range(3):
            version = await everybody.sender.send_async(everybody.source)
        epoch = everybody.sender.epoch
    found = [one for one in spans.get_finished_spans() if one.attributes["asyncsync.version"] == version]
    [publication] = [one for one in found if one.name == "asyncsync.publish"]
    assert publication.attributes == {
        "asyncsync.version": version, "asyncsync.epoch": epoch, "asyncsync.models": "policy",
        "asyncsync.nbytes": publication.attributes["asyncsync.nbytes"],
    }  # fmt: skip
    assert [event.name for event in publication.events] == ["packed"]
    delivered = [one for one in found if one.name == "asyncsync.deliver"]
    assert sorted(one.attributes["asyncsync.worker"] for one in delivered) == [0, 1]
    for one in delivered:
        assert one.parent.span_id == publication.context.span_id
        assert publication.start_time <= one.start_time <= one.end_time <= publication.end_time
    updates = [one for one in found if one.name == "asyncsync.update"]
    assert sorted(one.attributes["asyncsync.worker"] for one in updates) == [0, 1]
    for update in updates:
        assert update.attributes["asyncsync.epoch"] == epoch
        assert all(one.start_time <= one.end_time for one in parts_of(update, found))
    assert all(one.status.is_ok or one.status.is_unset for one in found)


def parts_of(update: Any, found: list[Any]) -> list[Any]:
    """The spans below that of an update."""
    below = [one for one in found if one.parent and one.parent.span_id == update.context.span_id]
    assert [one.name for one in below] == ["asyncsync.fetch", "asyncsync.stage", "asyncsync.apply"]
    return below


@pytest.mark.parametrize(("delta", "width"), [(False, 64), (False, 2 << 20), (True, 2 << 20)])
async def test_what_is_sent_to_all_is_followed_by_each_receiver(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture, unused_tcp_port: int, delta: bool, width: int
) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    scheme = ZMQWeightSyncScheme(endpoint=endpoint, num_workers=3, fanout=True, delta=delta)
    models = [Model(width=width) for _ in range(3)]
    async with crew(3, scheme=scheme, source=Model(0, width), models=models) as everybody:
        await until(lambda: len(scheme.bus.link.machine.fanout.subscribed) == 3)
        await scheme.send_async(everybody.source)  # those who came at different times were told by themselves
        spans.clear()
        caplog.set_level(logging.DEBUG, "asyncsync")
        version = await scheme.send_async(everybody.source)
    lines = [one.message for one in caplog.records]
    for worker in range(3):
        for step in ("begin", "fetched", "staged", "end"):
            told = f"update.{step}: version {version}, worker {worker}, "
            assert any(line.startswith(told) for line in lines), lines
    found = [one for one in spans.get_finished_spans() if one.attributes["asyncsync.version"] == version]
    updates = [one for one in found if one.name == "asyncsync.update"]
    assert sorted(one.attributes["asyncsync.worker"] for one in updates) == [0, 1, 2]
    for update in updates:
        below = parts_of(update, found)
        assert all(update.start_time <= one.start_time <= one.end_time for one in below)
        assert width == 64 or below[0].end_time > below[0].start_time, "until the last bytes"


async def test_a_worker_that_cannot_apply_it_ends_its_span_with_why(spans: InMemorySpanExporter) -> None:
    async with crew(1) as everybody:
        with pytest.raises(PartialSendError):
            await everybody.sender.send_async(Model(1.0, width=65))
        everybody.models[0].first = None  # nothing fits it any more
        with pytest.raises(PartialSendError):
            await everybody.sender.send_async(everybody.source)
        version = everybody.sender.bus.link.machine.targets.version
    failed = [one for one in spans.get_finished_spans() if one.status.status_code is StatusCode.ERROR]
    assert {one.name for one in failed} >= {"asyncsync.deliver"}
    assert version in {one.attributes["asyncsync.version"] for one in failed}


async def test_no_spans_where_tracing_is_off_or_nothing_is_set_up(spans: InMemorySpanExporter) -> None:
    async with crew(1, scheme=ZMQWeightSyncScheme(tracing=False)) as everybody:
        await everybody.sender.send_async(everybody.source)
    assert spans.get_finished_spans() == ()


def test_nothing_is_set_up_until_the_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace

    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    assert hooks_of(None) == []
    assert len(hooks_of(True)) == 1
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert hooks_of(None) == []


async def test_versions_that_are_never_applied_are_not_followed_for_ever(spans: InMemorySpanExporter) -> None:
    async with crew(1) as everybody:
        [receiver] = everybody.receivers
        async with receiver.hold():
            for _ in range(70):
                await everybody.sender.publish(everybody.source)
        await everybody.sender.wait_version(everybody.sender.version)
        observer = everybody.sender.bus.link.observer
        await until(lambda: not observer.traces)
    published = [one for one in spans.get_finished_spans() if one.name == "asyncsync.publish"]
    assert len(published) == 71, "each of them has ended, and that of connect()"


@pytest.mark.parametrize("ends", ["cancelled", "shut down"])
async def test_a_publication_that_ends_while_it_is_packed_raises_what_ended_it(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """Nobody waits for its version, so that its life is over before it is packed."""
    weights = {"a": torch.ones(32 << 20)}
    async with ZMQWeightSyncScheme(min_workers=0, metrics_port=0) as scheme:
        scheme.init_on_sender(model_id="policy", weights=weights)
        await scheme.connect()
        before, link = scheme.version, scheme.bus.link
        publishing = asyncio.create_task(scheme.publish(weights))
        await link.wait(lambda: scheme.version > before, 10)
        assert not publishing.done()
        assert not link.observer.traces
        if ends == "cancelled":
            publishing.cancel()
        else:
            await scheme.shutdown()
        with pytest.raises(asyncio.CancelledError if ends == "cancelled" else ClosedError):
            await publishing
    assert "ended span" not in caplog.text, "OpenTelemetry's own warning"


def histogram() -> Histogram:
    return Histogram("seconds", "…", registry=None)


def number_of(durations: Histogram) -> float:
    [family] = durations.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_count"))


def publish(observer: TrainerObserver, model: str, version: int, epoch: tuple[int, int]) -> None:
    life = observer.begin([model])
    observer.published(life, version, epoch)


def test_a_version_is_over_when_everybody_has_it_or_something_newer_or_is_lost() -> None:
    outstanding = {1, 2, 3}
    observer = TrainerObserver(lambda v, models, first: 0 if v in outstanding else None)
    durations = observer.durations = histogram()
    epoch = (1, 1)
    for version in (1, 2, 3):
        publish(observer, "policy", version, epoch)
        for worker in (0, 1):
            parts = (messages.Part("policy", version, bytes(16), 4),)
            observer.sent(worker, messages.Update(epoch, version, False, parts))
    observer.received(0, messages.Applied(epoch, {"policy": 1}))
    observer.received(1, messages.Applied(epoch, {"policy": 2}))
    outstanding.discard(1)
    observer.check()
    assert (set(observer.traces), number_of(durations)) == ({2, 3}, 1)
    observer.received(0, messages.Applied(epoch, {"policy": 3}))
    outstanding.clear()  # worker 1 is lost
    observer.check()
    assert (set(observer.traces), number_of(durations)) == ({3}, 2)
    observer.check(recheck_all=True)
    assert (observer.traces, number_of(durations)) == ({}, 2), "how long it takes to be lost is no duration"


@pytest.mark.parametrize("ends", ["it has them, too", "it is lost"])
def test_versions_that_a_stopped_worker_lacks_are_over_when(ends: str) -> None:
    desk = Desk(3)
    desk.join(*range(3))
    machine, stopped = desk.machine, 2
    observer = TrainerObserver(machine.progress.find_awaited)
    durations = observer.durations = histogram()
    for number in range(5):
        version = desk.publish()
        publish(observer, "policy", version, machine.membership.epoch)
        while machine.outbox:
            route, instruction, _ = machine.outbox.popleft()
            if isinstance(instruction, messages.Update | messages.Again):
                observer.sent(int(route), instruction)
        for worker in range(3 if number == 0 else stopped):
            hear(desk, observer, worker, version)
    assert len(observer.traces) == 4
    if ends == "it is lost":
        machine.lost(stopped, nonce(stopped), "gone", desk.now)
        observer.check(recheck_all=True)
    else:
        hear(desk, observer, stopped, version)
        assert number_of(durations) == 5
    assert observer.traces == {}


def hear(desk: Desk, observer: TrainerObserver, worker: int, version: int) -> None:
    """It has applied this."""
    applied = messages.Applied(desk.machine.membership.epoch, {"policy": version})
    desk.receive(worker, applied)
    observer.received(worker, applied)
    observer.check()


def test_a_version_is_over_though_who_was_waited_for_waits_for_an_earlier_one_of_another_model() -> None:
    waiting = {1: {5: ["value"]}, 2: {5: ["policy"]}}
    observer = TrainerObserver(lambda v, models, first: next(iter(waiting.get(v, [])), None))
    observer.durations = histogram()
    for version, model in ((1, "value"), (2, "policy")):
        publish(observer, model, version, (1, 1))
    observer.check()
    assert set(observer.traces) == {1, 2}
    del waiting[2]
    observer.check()
    assert set(observer.traces) == {1}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_does_not_keep_the_port() -> None:
    metrics, (read, write) = Metrics(("127.0.0.1", 0)), os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"x")
        while True:
            signal.pause()
    try:
        assert os.read(read, 1) == b"x"
        metrics.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(metrics.address, timeout=5)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
