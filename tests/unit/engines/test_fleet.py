"""A fleet of replicas, each a process with a fake vLLM in it whose ranks run the real engine of asyncsync."""

import asyncio
import pickle
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asyncsync import (
    AutoWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    RemoteError,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
    ZMQWeightSyncScheme,
)
from asyncsync.cli import main
from asyncsync.engines import AsyncLLMReplica, Fleet, FleetError, HTTPReplica, LLMReplica, Refused
from asyncsync.engines.vllm import weight_version
from helpers.fake_vllm import LLM, SHAPES, AsyncLLM, Engine, Group, Model, Replica, drawn, greedy, standing_in
from helpers.pairs import Clock, eventually
from helpers.processes import Remote, Start

PROMPTS = [[1, 2, 3], [5], list(range(20, 40))]
both_schemes = pytest.mark.parametrize(
    "kind", [SharedMemWeightSyncScheme, pytest.param(ZMQWeightSyncScheme, marks=pytest.mark.thorough)]
)
pytestmark = [pytest.mark.requirement(245)]


class Asked(HTTPReplica):
    """A replica's address, and what a client of it asks."""

    async def complete(self, prompt: list[int], count: int = 12) -> dict[str, Any]:
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": count}}
        answer = await self._request("POST", "/inference/v1/generate", body)
        found: dict[str, Any] = answer["choices"][0]
        return found

    async def is_paused(self) -> bool:
        return bool((await self._request("GET", "/is_paused"))["is_paused"])


@cache
def model_of(version: int) -> Model:
    model = Model(Group(1), 0)
    model.load_weights(drawn(version).items())
    return model


def check_tokens(prompt: list[int], tokens: list[int], spans: Iterable[tuple[str, int, int]]) -> list[int]:
    """Each token is the one that the weights of the version say that it was made with. Returns the versions."""
    versions, end = [], 0
    for name, start, stop in spans:
        assert start == end
        versions.append(0 if name == "default" else int(name.rpartition(":")[2]))
        for place in range(start, stop):
            assert model_of(versions[-1])(prompt + tokens[:place], None)[0] == tokens[place], (name, place)
        end = stop
    assert end == len(tokens)
    return versions


async def serves(replica: Asked, version: int, epoch: str) -> None:
    """Assert that it does: by what it calls it, and by its tokens, which cannot have come out of a cache."""
    assert await replica.weight_version() == weight_version(epoch, version)
    for prompt in PROMPTS:
        found = await replica.complete(prompt, 4)
        spans = [(span["version"], span["start"], span["end"]) for span in found["weight_versions"]]
        assert check_tokens(prompt, found["token_ids"], spans) == [version]
        assert found["token_ids"] == greedy(drawn(version), prompt, 4)


@asynccontextmanager
async def sending(scheme: WeightSyncScheme) -> AsyncIterator[WeightSyncScheme]:
    """The fleet's sender. Version n has the weights that are drawn by n."""
    scheme.init_on_sender(model_id="policy")
    try:
        await scheme.connect()
        yield scheme
    finally:
        await scheme.shutdown()


@asynccontextmanager
async def fleet_of(
    start: Start,
    scheme: WeightSyncScheme,
    ranks: Iterable[int] = (2, 1),
    init: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Fleet, list[Remote], list[Asked]]]:
    """Replicas that serve, and have been taken in."""
    processes = [start(Replica) for _ in ranks]
    ports = await asyncio.gather(*(p.serve(count) for p, count in zip(processes, ranks, strict=True)))
    asked = [
        Asked(f"http://127.0.0.1:{port}", name=f"replica {i}", ranks=count, init=init)
        for i, (port, count) in enumerate(zip(ports, ranks, strict=True))
    ]
    async with sending(scheme), Fleet(scheme, asked, **{"watch": 0.0, **options}) as fleet:
        (await fleet.connect(timeout=20)).raise_for_failures()
        yield fleet, processes, asked


async def ask_all_along(replica: Asked, over: asyncio.Event) -> list[int]:
    """One client's requests; returns the versions of its tokens. Each request must be answered."""
    versions: list[int] = []
    draw = random.Random(1)
    while not over.is_set():
        prompt = draw.choice(PROMPTS)
        found = await replica.complete(prompt, draw.randrange(1, 30))
        spans = [(span["version"], span["start"], span["end"]) for span in found["weight_versions"]]
        versions += check_tokens(prompt, found["token_ids"], spans)
    return versions


@pytest.mark.requirement(244)
@both_schemes
async def test_updates_while_clients_generate_fail_no_request_and_each_token_is_of_its_version(
    start: Start, kind: type[WeightSyncScheme]
) -> None:
    async with fleet_of(start, kind(min_workers=0)) as (fleet, _, asked):
        over = asyncio.Event()
        clients = [asyncio.create_task(ask_all_along(replica, over)) for replica in asked for _ in range(2)]
        for version in range(1, 11):
            result = await fleet.update(drawn(version), metadata={"step": version}, timeout=20)
            result.raise_for_failures()
            assert (result.version, set(result.serving.values())) == (version, {version})
            await asyncio.sleep(0.01)
        over.set()
        for versions in await asyncio.gather(*clients):
            assert versions == sorted(versions)
            assert len(set(versions)) > 3
        for replica in asked:
            await serves(replica, 10, result.epoch)
        phases = {"wait", "look", "stage", "pause", "start", "update", "finish", "reset", "resume", "acknowledge"}
        assert {frozenset(seconds) for seconds in result.seconds.values()} == {frozenset(phases)}


@pytest.mark.requirement(244)
@both_schemes
async def test_a_load_that_raises_on_any_rank_goes_back_on_all_and_the_next_version_loads(
    start: Start, kind: type[WeightSyncScheme]
) -> None:
    draw = random.Random(7)
    async with fleet_of(start, kind(min_workers=0)) as (fleet, processes, asked):
        served = 0
        for attempt in range(4):
            broken, number = attempt % 2, draw.randrange(len(SHAPES))
            await processes[0].before_tensor(broken, number, f"tensor {number} cannot be loaded")
            version = 2 * attempt + 1
            result = await fleet.update(drawn(version), timeout=20)
            assert result.serving == {"replica 0": served, "replica 1": version}
            assert {failure.replica for failure in result.failures} == {"replica 0"}
            engine, *ranks = result.failures
            assert (engine.rank, engine.phase, type(engine.error)) == (None, "update", Refused)
            assert f"rank {broken}: RuntimeError: tensor {number} cannot be loaded. All ranks serve" in engine.reason
            assert [failure.rank for failure in ranks] == [0, 1]
            assert isinstance(ranks[broken].error, RemoteError)
            assert "raise RuntimeError(what)" in ranks[broken].reason
            if served:
                await serves(asked[0], served, result.epoch)
            await serves(asked[1], version, result.epoch)
            with pytest.raises(FleetError, match=f"version {version}: 1 of 2 replicas have failed") as caught:
                result.raise_for_failures()
            assert pickle.loads(pickle.dumps(caught.value)).result.version == version
            served = version + 1
            (await fleet.update(drawn(served), timeout=20)).raise_for_failures()
            await serves(asked[0], served, result.epoch)


@pytest.mark.requirement(244)
@both_schemes
async def test_a_replica_that_is_killed_delays_no_other_and_is_current_by_itself_when_it_is_back(
    start: Start, kind: type[WeightSyncScheme]
) -> None:
    async with fleet_of(start, kind(min_workers=0), watch=0.1) as (fleet, processes, asked):
        (await fleet.update(drawn(1), timeout=20)).raise_for_failures()
        await processes[0].before_tensor(1, 4, "waits")
        updating = asyncio.create_task(fleet.update(drawn(2), timeout=20))
        with Clock(1.0):  # the other does not wait for it
            await eventually(lambda: fleet.serving.get("replica 1") == 2)
        assert await processes[0].events.get() == "loading"
        await serves(asked[1], 2, fleet.scheme.epoch)
        assert not await asked[1].is_paused()
        assert not updating.done()
        with Clock(1.0):
            await processes[0].kill()
            result = await updating
        assert [(f.replica, f.rank, f.phase) for f in result.failures] == [("replica 0", None, "update")]
        result = await fleet.update(drawn(3), timeout=20)
        assert [(f.replica, f.rank, f.phase) for f in result.failures] == [("replica 0", None, "look")]
        assert (result.serving, result.seconds["replica 1"]["update"] < 5) == ({"replica 1": 3}, True)
        again = start(Replica)
        await again.serve(2, asked[0].port)
        await eventually(lambda: fleet.serving.get("replica 0") == 3)
        await serves(asked[0], 3, fleet.scheme.epoch)
        result = await fleet.update(drawn(4), timeout=20)
        result.raise_for_failures()
        assert "start" in result.seconds["replica 0"]


async def test_a_replica_that_hangs_fails_alone_and_is_taken_in_when_it_goes_on(start: Start) -> None:
    async with fleet_of(start, SharedMemWeightSyncScheme(min_workers=0), watch=0.1) as (fleet, processes, asked):
        (await fleet.update(drawn(1), timeout=20)).raise_for_failures()
        processes[0].signal(signal.SIGSTOP)
        updating = asyncio.create_task(fleet.update(drawn(2), timeout=1.0))
        with Clock(1.0):
            await eventually(lambda: fleet.serving.get("replica 1") == 2)
        with Clock(1.5):
            result = await updating
        assert [failure.replica for failure in result.failures] == ["replica 0"]
        assert result.failures[0].reason.startswith("TimeoutError: no answer in time")
        processes[0].signal(signal.SIGCONT)
        await eventually(lambda: fleet.serving.get("replica 0") == 2)
        await serves(asked[0], 2, fleet.scheme.epoch)
        assert not await asked[0].is_paused()
        (await fleet.update(drawn(3), timeout=20)).raise_for_failures()


async def test_a_replica_whose_trainer_died_between_start_and_finish_follows_the_next_one(
    start: Start, endpoint: str
) -> None:
    kind = ZMQWeightSyncScheme
    async with fleet_of(start, kind(endpoint=endpoint, min_workers=0), (2,)) as (fleet, _, asked):
        (await fleet.update(drawn(1), timeout=20)).raise_for_failures()
        await asked[0].pause()
        await asked[0].start()
    for trainer in range(2):
        async with sending(kind(endpoint=endpoint, min_workers=0)) as scheme, Fleet(scheme, asked, watch=0) as fleet:
            for version in range(1, 4):
                (await fleet.update(drawn(version), timeout=20)).raise_for_failures()
                await serves(asked[0], version, scheme.epoch)
        assert fleet.serving == {"replica 0": 3}, trainer


@pytest.mark.requirement(203, 244)
@pytest.mark.parametrize(("client", "relays"), [("host", 1), ("worker-{worker_idx}", 0)])
async def test_a_key_for_any_worker_lets_the_relay_of_a_host_in_and_keys_of_workers_each_rank(
    start: Start, tmp_path: Path, unused_tcp_port: int, client: str, relays: int
) -> None:
    keys = tmp_path / "keys"
    assert main(["keygen", str(keys), "--workers", "2", "--name", "host"]) == 0
    scheme = ZMQWeightSyncScheme(
        endpoint=f"tcp://127.0.0.1:{unused_tcp_port}",
        server_key=keys / "server.key_secret",
        clients=keys / "clients",
        min_workers=0,
    )
    init = {
        "server_key": str(keys / "server.key"),
        "client_key": str(keys / "client_secrets" / f"{client}.key_secret"),
    }
    async with fleet_of(start, scheme, [2], init) as (fleet, _, (replica,)):
        (await fleet.update(drawn(1), timeout=20)).raise_for_failures()
        await serves(replica, 1, scheme.epoch)
        statuses = scheme.status()
        assert {0, 1} <= statuses.keys()
        assert [one.role for one in statuses.values()].count("relay") == relays


async def test_a_replica_with_other_ranks_than_its_object_says_is_not_touched(start: Start) -> None:
    process = start(Replica)
    port = await process.serve(2)
    replica = Asked(f"http://127.0.0.1:{port}", name="pair")
    async with sending(SharedMemWeightSyncScheme(min_workers=0)) as scheme, Fleet(scheme, [replica], watch=0) as fleet:
        result = await fleet.update(drawn(1), timeout=20)
        assert [(f.phase, f.rank, f.reason) for f in result.failures] == [
            ("connect", None, "ValueError: it has 2 ranks: give its replica object ranks=2")
        ]
        assert (await replica.weight_version(), await replica.is_paused()) == ("default", False)


async def test_a_replica_that_was_restarted_unseen_is_taken_in_by_the_update(start: Start) -> None:
    async with fleet_of(start, SharedMemWeightSyncScheme(min_workers=0), (1,)) as (fleet, processes, asked):
        (await fleet.update(drawn(1), timeout=20)).raise_for_failures()
        await processes[0].kill()
        await start(Replica).serve(1, asked[0].port)
        result = await fleet.update(drawn(2), timeout=20)
        result.raise_for_failures()
        assert "connect" in result.seconds["replica 0"]
        await serves(asked[0], 2, result.epoch)
        await asked[0].set_weight_version("somebody else's")
        result = await fleet.update(drawn(3), timeout=20)
        result.raise_for_failures()
        assert "connect" in result.seconds["replica 0"]


async def test_the_watch_sees_a_restart_and_brings_what_a_cancelled_update_has_published(start: Start) -> None:
    async with fleet_of(start, SharedMemWeightSyncScheme(min_workers=0), watch=0.1) as (fleet, processes, asked):
        (await fleet.update(drawn(1), timeout=20)).raise_for_failures()
        updating = asyncio.create_task(fleet.update(drawn(2), timeout=20))
        await eventually(lambda: fleet.scheme.version == 2)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await eventually(lambda: set(fleet.serving.values()) == {2})
        (await fleet.update(drawn(3), timeout=20)).raise_for_failures()
        await processes[1].kill()
        again = start(Replica)
        await again.serve(1, asked[1].port)
        looking = asyncio.get_running_loop().time() + 10
        while await asked[1].weight_version() == "default":
            assert asyncio.get_running_loop().time() < looking
        await serves(asked[1], 3, fleet.scheme.epoch)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "rounds",
    [
        10,
        pytest.param(200, marks=pytest.mark.thorough),
        pytest.param(5_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
@both_schemes
async def test_an_update_cancelled_anywhere_leaves_nobody_paused_and_the_next_one_passes(
    start: Start, kind: type[WeightSyncScheme], rounds: int
) -> None:
    draw = random.Random(3)
    async with fleet_of(start, kind(min_workers=0)) as (fleet, _, asked):
        taken = []
        for version in range(1, 6):
            began = time.monotonic()
            (await fleet.update(drawn(version), timeout=20)).raise_for_failures()
            taken.append(time.monotonic() - began)
        cancelled = 0
        for _ in range(rounds):
            updating = asyncio.create_task(fleet.update(drawn(0), timeout=20))
            await asyncio.sleep(draw.uniform(0, min(taken)))
            updating.cancel()
            try:
                await updating
            except asyncio.CancelledError:
                cancelled += 1
            assert fleet.serving.keys() == {"replica 0", "replica 1"}  # each has ended what it was in
            for replica in asked:
                assert not await replica.is_paused()
        assert cancelled > rounds / 3
        for _ in range(2):
            result = await fleet.update(drawn(99), timeout=20)
            result.raise_for_failures()
        for replica in asked:
            found = await replica.complete(PROMPTS[0])
            assert found["token_ids"] == greedy(drawn(99), PROMPTS[0], 12)
            assert [span["version"] for span in found["weight_versions"]] == [
                weight_version(result.epoch, result.version)
            ]
        assert {one.taken for one in fleet.scheme.status().values()} == {0}


async def test_a_replica_that_hangs_does_not_hold_up_a_cancelled_update(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncsync.engines.fleet.CANCEL_SECONDS", 0.5)
    monkeypatch.setattr("asyncsync.engines.fleet.RESUME_SECONDS", 0.5)
    async with fleet_of(start, SharedMemWeightSyncScheme(min_workers=0)) as (fleet, processes, asked):
        await processes[0].before_tensor(0, 2, "waits")
        updating = asyncio.create_task(fleet.update(drawn(1), timeout=60))
        await processes[0].events.get()
        with Clock(1.0):
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
        assert fleet.serving == {"replica 1": 1}
        assert not await asked[1].is_paused()
        await processes[0].kill()


@asynccontextmanager
async def engine_here(ranks: int) -> AsyncIterator[Engine]:
    engine = Engine(ranks)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)


async def test_engines_of_this_process_are_updated_as_servers_are() -> None:
    with standing_in():
        async with (
            engine_here(2) as first,
            engine_here(1) as second,
            sending(SharedMemWeightSyncScheme(min_workers=0)) as scheme,
        ):
            engine, llm = AsyncLLM(first), LLM(second)
            replica = LLMReplica(llm)
            async with Fleet(scheme, [AsyncLLMReplica(engine, ranks=2), replica], watch=0) as fleet:
                over = asyncio.Event()

                async def ask(generate: Callable[[], Any]) -> list[int]:
                    versions = []
                    while not over.is_set():
                        done = await generate()
                        versions += check_tokens(done.prompt, done.tokens, done.spans)
                    return versions

                clients = [
                    asyncio.create_task(ask(lambda: engine.generate([1, 2, 3], 10))),
                    asyncio.create_task(ask(lambda: replica.run(llm.generate, [1, 2, 3], 10))),
                ]
                for version in range(1, 11):
                    (await fleet.update(drawn(version), timeout=20)).raise_for_failures()
                over.set()
                for versions in await asyncio.gather(*clients):
                    assert versions == sorted(versions)
                assert fleet.serving == {"AsyncLLM": 10, "LLM": 10}


@pytest.mark.requirement(244)
async def test_a_replica_that_cannot_go_back_stays_paused_until_it_has_a_version_again() -> None:
    def fails(number: int) -> None:
        raise RuntimeError("not today")

    async with sending(SharedMemWeightSyncScheme(min_workers=0)) as scheme:
        with standing_in():
            async with engine_here(2) as inner, Fleet(scheme, [AsyncLLMReplica(AsyncLLM(inner), ranks=2)]) as fleet:
                engine = AsyncLLM(inner)
                (await fleet.update(drawn(1), timeout=20)).raise_for_failures()
                inner.ranks[1].model.before_tensor = fails
                result = await fleet.update(drawn(2), timeout=20)
                assert [(f.rank, "EngineLost" in f.reason) for f in result.failures] == [
                    (None, False), (0, False), (1, True)
                ]  # fmt: skip
                assert (result.serving, await engine.is_paused()) == ({}, True)
                waiting = asyncio.create_task(engine.generate([1, 2, 3], 5))
                inner.ranks[1].model.before_tensor = None
                done = await waiting  # the fleet has looked after it
                assert check_tokens(done.prompt, done.tokens, done.spans) == [2]
                assert fleet.serving == {"AsyncLLM": 2}


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[HTTPReplica]:
    """Something that says this to each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield HTTPReplica(f"http://127.0.0.1:{port}/some/path/")


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", Refused, "VLLM_SERVER_DEV_MODE"),
        (b'HTTP/1.1 500 -\r\n\r\n{"error": {"message": "broken", "code": 500}}', Refused, "/pause: 500: broken"),
        (b'HTTP/1.1 422 -\r\n\r\n{"detail": [1]}', Refused, r"422: .*detail"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", Refused, "502: <html>"),
        (b"", ConnectionError, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-", ConnectionError, "closed the connection"),
        (b"SSH-2.0\r\n\r\n", ConnectionError, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5 << 20), ConnectionError, "more than"),
    ],
)
async def test_what_a_server_answers_that_is_no_success(answer: bytes, error: type[Exception], words: str) -> None:
    async with answering(answer) as replica:
        with pytest.raises(error, match=words):
            await replica.pause()


async def test_a_replica_that_is_not_there_is_a_failure_not_an_error(unused_tcp_port: int) -> None:
    async with sending(ZMQWeightSyncScheme(min_workers=0)) as scheme:
        async with Fleet(scheme, [HTTPReplica(f"http://127.0.0.1:{unused_tcp_port}", name="a")], watch=0) as fleet:
            with Clock(1.0):
                result = await fleet.update(drawn(1))
        [failure] = result.failures
        assert (failure.replica, failure.phase, result.serving) == ("a", "look", {})
        assert "Connect" in str(failure)


async def test_a_fleet_that_cannot_be_is_refused() -> None:
    scheme, one = ZMQWeightSyncScheme(min_workers=0), HTTPReplica("http://here:8000")
    for wrong in ([one, HTTPReplica("http://here:8000/other")], [], [HTTPReplica("http://here:1", ranks=0)]):
        with pytest.raises(ValueError):
            Fleet(scheme, wrong)
    with pytest.raises(TypeError, match="MultiProcess"):
        Fleet(MultiProcessWeightSyncScheme(min_workers=0), [one])
    Fleet(AutoWeightSyncScheme(min_workers=0), [one])
    with pytest.raises(RuntimeError, match="init_on_sender"):
        async with Fleet(scheme, [one]):
            pass
    for url in ("here:8000", "ftp://here", "http://", "http://here/?a=b"):
        with pytest.raises(ValueError, match="http://host:port"):
            HTTPReplica(url)
    with pytest.raises(ValueError, match="keep, wait, abort"):
        HTTPReplica("http://here:8000", pause="never")
