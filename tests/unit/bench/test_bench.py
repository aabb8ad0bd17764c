"""`asyncsync bench`: what it writes, how it ends, and how figures become bars. No test asserts a throughput."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncsync.bench import collection
from asyncsync.bench.cases import (
    CALLED,
    COLLECT,
    EMPTY,
    LARGE,
    MANY,
    MIDDLE,
    ONE_HOST,
    SECTIONS,
    SMALL,
    Payload,
    Plan,
    touch,
)
from asyncsync.bench.collection import CASES, NODES
from asyncsync.bench.crew import OrderFailed, WorkerDied, start_crew
from asyncsync.bench.figures import Bar, Figure, Figures, bars
from asyncsync.bench.meters import longest_stall
from asyncsync.bench.peers import EACH, GLOO, STAGED, digest
from asyncsync.bench.report import Report, Table
from asyncsync.bench.sections import RUN
from asyncsync.bench.stage import WARM, interleave
from helpers.command import children_of, finish, private_directories, run, start

pytestmark = pytest.mark.timeout(120)  # several processes, each of which imports torch

needs_torchrl = pytest.mark.skipif(find_spec("torchrl") is None, reason="TorchRL is not installed")

SYSTEMS = ["asyncsync tcp", "asyncsync ipc", *(f"gloo {how}" for how in GLOO), "memcpy"]

# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_quick_run_without_torchrl_writes_json_tables_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "torchrl.py").write_text("raise ImportError")  # found first: it is the working directory
    paths = ["--json", "b.json", "--markdown", "b.md", "--plot", "b.png"]
    only = ["--only", ",".join(name for name in SECTIONS if name not in ("process", *CALLED, *COLLECT))]
    arguments = ["bench", "--quick", "--trials", "2", "--check", "--uvloop", *only, *paths]
    with start("-m", "asyncsync", *arguments, cwd=tmp_path) as process:
        code, out, err = finish(process, 200)
    # Whether a bar is missed depends on the machine; exit code, words and table must agree.
    missed = out.count("| NO |")
    assert (code, err) == ((1, f"asyncsync bench: {missed} of 8 bars missed\n") if missed else (0, ""))
    assert out.count("| yes |") + missed == 8
    assert private_directories() == []
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["machine"]["cpus"] >= 1
    assert "loop uvloop" in out
    found = {(f["section"], f["case"], f["workers"], f["system"]): f for f in document["figures"]}
    wanted = {
        ("throughput", case, workers, system)
        for case in ("64 KiB", "4 MiB")
        for workers in (1, 2)
        for system in SYSTEMS
    }
    wanted |= {("tensors", case, workers, "asyncsync ipc") for case in ("1000 × 4 KiB", "4 MiB") for workers in (1, 2)}
    wanted |= {("latency", "1 B", workers, "zmq.asyncio") for workers in (1, 2)}
    wanted |= {("latency", case, 2, api) for case in ("empty", "64 KiB") for api in ("async", "blocking")}
    wanted |= {
        ("stall", "4 MiB", workers, system + running)
        for workers in (1, 2)
        for kind in ("tcp", "ipc", "shared", "process")
        for system in ("no send", f"asyncsync {kind}", f"asyncsync {kind}, worker")
        for running in ("", ", without waiting for a CPU")
    }
    memory = ("payload", "sender's slabs", "trainer's peak growth", "worker's peak growth")
    wanted |= {("memory", "4 MiB", 2, system) for system in memory}
    wanted |= {("shared", case, 1, "memcpy") for case in ("64 KiB", "1000 × 4 KiB")}
    wanted |= {("shared", case, workers, "async") for case in ("64 KiB", "1000 × 4 KiB") for workers in (1, 2)}
    wanted |= {("shared", "64 KiB", workers, "blocking") for workers in (1, 2)}
    carried = ("asyncsync distributed", *(f"gloo {how}" for how in (*STAGED, EACH)))
    wanted |= {
        ("distributed", case, workers, system)
        for case in ("4 MiB", "1000 × 4 KiB")
        for workers in (1, 2)
        for system in carried
    }
    assert set(found) == wanted
    for (section, *_), figure in found.items():
        assert section == "memory" or figure["trials"] == 2
        order = [figure[name] for name in ("minimum", "lower", "median", "upper", "maximum")]
        assert order == sorted(order)
        assert order[0] >= 0
    assert found["memory", "4 MiB", 2, "sender's slabs"]["maximum"] >= 1
    # Neither 256 MiB nor TorchRL was measured: what is promised for them is left out.
    assert [bar["name"].partition(" to ")[0] for bar in document["bars"]] == [
        *("1000 × 4 KiB", "1000 × 4 KiB"),
        *("empty update", "empty update"),
        *("64 KiB update", "64 KiB update"),
        *("Distributed, 1000 × 4 KiB", "Distributed, 1000 × 4 KiB"),
    ]
    assert (tmp_path / "b.md").read_text() == out
    titles = ("Throughput", "Many small tensors", "Latency", "Stalls", "Memory", "SharedMemWeightSyncScheme", "Bars")
    titles += ("DistributedWeightSyncScheme",)
    for title in titles:
        assert f"### {title}" in out
    assert "### Collectors" not in out
    assert 'TorchRL is not installed, so it is not shown; install with: pip install "asyncsync[torchrl]".' in out
    assert "| 64 KiB to 1 | 64 KiB to 2 | 4 MiB to 1 | 4 MiB to 2 |" in out
    for system in SYSTEMS:
        medians = [
            found["throughput", case, workers, system]["median"] for case in ("64 KiB", "4 MiB") for workers in (1, 2)
        ]
        assert f"| {system} | " + " | ".join(f"{m:.{3 if m < 10 else 1}f}" for m in medians) + " |" in out
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


# With fewer cases than the command has: what more of them would show takes minutes, as each needs processes that
# import TorchRL.
FEWER = """
import sys
from asyncsync.bench import cases, collecting
from asyncsync.cli import main

cases.Plan.counts = (2,)
chosen = sys.argv[1].split(";")
collecting.CASES = {name: case for name, case in collecting.CASES.items() if name in chosen}
collecting.NODES = {name: case for name, case in collecting.NODES.items() if name in chosen}
sys.exit(main(["bench", *sys.argv[2:]]))
"""


def fewer(cwd: Path, collected: Sequence[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """What the command writes as JSON, and what it prints."""
    with start("-c", FEWER, ";".join(collected), *arguments, "--trials", "1", "--json", "b.json", cwd=cwd) as process:
        code, out, err = finish(process, 200)
    assert (code, err) == (0, ""), err
    assert private_directories() == []
    return json.loads((cwd / "b.json").read_text()), out


@pytest.mark.thorough
@needs_torchrl
@pytest.mark.timeout(240)
def test_schemes_of_one_host_are_measured_beside_torchrl(tmp_path: Path) -> None:
    document, out = fewer(tmp_path, [], "--quick", "--only", "shared,process")
    assert document["machine"].keys() >= {"torchrl", "tensordict"}
    assert {figure["trials"] for figure in document["figures"]} == {1}
    cases = ("64 KiB", "1000 × 4 KiB")
    wanted = {(case, 2, system) for case in cases for system in ("async", "TorchRL")}
    wanted |= {("64 KiB", 2, "blocking")} | {(case, 1, "memcpy") for case in cases}
    for section in ONE_HOST:
        found = [figure for figure in document["figures"] if figure["section"] == section]
        assert {(figure["case"], figure["workers"], figure["system"]) for figure in found} == wanted
    assert [bar["name"].partition(" ≤ ")[0] for bar in document["bars"]] == [
        "SharedMem, 64 KiB to 2 workers, async",
        "SharedMem, 64 KiB to 2 workers, blocking",
        "SharedMem, 1000 × 4 KiB to 2 workers, async",
        "MultiProcess, 64 KiB to 2 workers, async",
        "MultiProcess, 1000 × 4 KiB to 2 workers, async",
    ]
    assert "### SharedMemWeightSyncScheme" in out
    assert "### MultiProcessWeightSyncScheme" in out
    assert "not installed" not in out


@pytest.mark.thorough
@needs_torchrl
@pytest.mark.timeout(240)
def test_collectors_are_measured_beside_torchrl_and_a_bare_loop(tmp_path: Path) -> None:
    chosen = ("CartPole", "64 CartPoles", "64 MiB of images")
    document, out = fewer(tmp_path, chosen, "--only", "collect")
    found = {(figure["case"], figure["workers"], figure["system"]) for figure in document["figures"]}
    cases = [(case, 1, side) for case in chosen for side in CASES[case][1]]
    assert found == {*cases, ("64 MiB of images", 1, "memcpy")}
    assert all(figure["median"] > 0 for figure in document["figures"])
    assert [bar["name"].partition(",")[0] for bar in document["bars"]] == list(chosen)
    assert "### Collectors" in out


@pytest.mark.thorough
@needs_torchrl
@pytest.mark.timeout(240)
def test_what_reaches_other_hosts_is_measured_beside_what_is_written_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    case = "CartPole, sync, Distributed"
    document, out = fewer(tmp_path, [case], "--quick", "--only", "rpc,ray,nodes")
    found = {(f["section"], f["case"], f["workers"], f["system"]) for f in document["figures"]}
    wanted = {
        (section, payload, workers, system)
        for section in CALLED
        for payload in ("4 MiB", "1000 × 4 KiB")
        for workers in (1, 2)
        for system in ("asyncsync", "by hand")
    }
    assert found == wanted | {("nodes", case, 2, side) for side in ("asyncsync", "TorchRL")}
    assert [bar["name"] for bar in document["bars"]] == [f"{case}, collected ≤ 1 × TorchRL"]
    for title in ("RPCWeightSyncScheme", "RayWeightSyncScheme", "Collectors of several hosts"):
        assert f"### {title}" in out


@pytest.mark.thorough
def test_bench_ends_when_a_worker_dies(tmp_path: Path) -> None:
    with start("-m", "asyncsync", "bench", "--quick", cwd=tmp_path) as process:
        workers = _all_started(process)
        workers[1].kill()
        code, out, err = finish(process)
        assert (code, out) == (1, "")
        assert err == "asyncsync bench: worker 1 was killed by SIGKILL\n"
        assert not any(worker.is_running() for worker in workers)
        assert private_directories() == []


@pytest.mark.thorough
def test_bench_ends_when_a_process_dies_in_the_middle(tmp_path: Path) -> None:
    arguments = ["--quick", "--only", "throughput", "--trials", "100000"]
    with start("-m", "asyncsync", "bench", *arguments, cwd=tmp_path) as process:
        workers = _all_started(process)
        _measuring(process)
        workers[2].kill()
        code, out, err = finish(process)
        assert (code, out) == (1, "")
        assert err == "asyncsync bench: gloo's sender was killed by SIGKILL\n"
        assert not any(worker.is_running() for worker in workers)
        assert private_directories() == []


@pytest.mark.thorough
@needs_torchrl
@pytest.mark.timeout(240)
def test_bench_ends_when_a_process_beside_torchrl_dies(tmp_path: Path) -> None:
    arguments = ["--quick", "--only", "shared", "--trials", "100000"]
    with start("-m", "asyncsync", "bench", *arguments, cwd=tmp_path) as process:
        workers = _all_started(process, 5)
        _measuring(process)
        workers[3].kill()  # the third is TorchRL's sender
        code, out, err = finish(process)
        assert (code, out) == (1, "")
        assert "semaphore" not in err
        assert err.startswith("asyncsync bench: TorchRL's worker 0 has died\n")
        _all_ended(workers)
        assert private_directories() == []


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    section = "throughput" if find_spec("torchrl") is None else "shared"  # TorchRL's sender starts processes, too
    arguments = ["--quick", "--only", section, "--trials", "100000"]
    with start("-m", "asyncsync", "bench", *arguments, cwd=tmp_path) as process:
        workers = _all_started(process, 5 if section in ONE_HOST else 3)
        _measuring(process)
        process.send_signal(signal.SIGINT)
        code, out, err = finish(process)
        assert (code, out, err) == (130, "", "")
        _all_ended(workers)
        assert private_directories() == []


def _all_started(process: Any, count: int = 3) -> list[Any]:
    workers: list[Any] = []
    while len(workers) < count:
        assert process.poll() is None
        time.sleep(0.05)
        workers = children_of(process)
    return workers


def _all_ended(workers: list[Any]) -> None:
    """Now, or within a moment: TorchRL's workers are not children of the process that has ended."""
    deadline = time.monotonic() + 5
    while any(worker.is_running() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _measuring(process: Any) -> None:
    """Wait until a bus has been there for a moment: then trials are under way."""
    while not private_directories():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)


# -- the crew ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_an_order_that_fails_tells_the_trainer_why() -> None:
    async with start_crew(["worker 0"], None) as crew:
        await crew.ask(0, "load", SMALL)
        with pytest.raises(OrderFailed, match=r"(?s)worker 0 has failed:\nTraceback.*KeyError: .*'4 MiB'"):
            await crew.ask(0, "digest", MIDDLE, flat=False)
        assert await crew.ask(0, "digest", SMALL, flat=False) == digest(SMALL.weights(blank=True).values())


@pytest.mark.thorough
async def test_a_wait_for_an_answer_can_be_cancelled_and_repeated() -> None:
    async with start_crew(["worker 0"], None) as crew:
        crew.post(0, "load", SMALL)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(crew.answer(0), 0.01)  # it still imports torch
        assert await crew.answer(0) is None


async def test_a_death_ends_the_block_wherever_it_is() -> None:
    async def wait_for_ever() -> None:
        async with start_crew(["worker 0"], None) as crew:
            crew._processes[0].kill()
            await asyncio.Event().wait()

    with pytest.raises(WorkerDied, match=r"^worker 0 was killed by SIGKILL$"):
        await wait_for_ever()


# -- plans and payloads ------------------------------------------------------------------------------------------------


def test_every_section_has_a_description_and_a_coroutine() -> None:
    assert list(SECTIONS) == list(RUN)


def test_sections_run_in_one_order_whatever_was_asked_for_first() -> None:
    assert Plan(only=("stall", "memory")).sections == ["memory", "stall"]
    assert Plan().sections == list(SECTIONS)


def test_quick_leaves_out_the_largest_and_tries_less() -> None:
    assert Plan().largest == LARGE
    assert Plan(quick=True).largest == MIDDLE
    for payload in (EMPTY, SMALL, MIDDLE):
        assert 5 <= Plan(quick=True).often(payload.nbytes) < Plan().often(payload.nbytes)
    assert Plan(quick=True, trials=3).often(SMALL.nbytes) == Plan(trials=3).often(LARGE.nbytes) == 3


def test_the_sections_of_one_host_have_four_workers_unless_quick() -> None:
    assert (Plan().one_host, Plan().counts) == ([SMALL, LARGE, MANY], (1, 2, 4))
    assert (Plan(quick=True).one_host, Plan(quick=True).counts) == ([SMALL, MANY], (1, 2))


def test_a_module_has_the_same_weights_without_gradients() -> None:
    module = MANY.module()
    assert digest(module.parameters()) == digest(MANY.weights().values())
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_1000_small_tensors_and_one_of_4_mib_are_about_as_many_bytes() -> None:
    assert MANY.nbytes == pytest.approx(MIDDLE.nbytes, rel=0.03)
    assert [len(payload.weights()) for payload in (EMPTY, MIDDLE, MANY)] == [0, 1, 1000]


def test_no_two_updates_are_the_same() -> None:
    weights = Payload("tiny", 2, 8).weights()
    before = digest(weights.values())
    touch(weights.values())
    assert digest(weights.values()) != before
    touch([])


async def test_trials_take_turns_and_the_first_ones_do_not_count() -> None:
    turns: list[str] = []

    def system(name: str) -> Any:
        async def once() -> float:
            turns.append(name)
            return float(len(turns))

        return once

    times = await interleave({name: system(name) for name in "ABC"}, 2)
    assert turns == list("ABC") * (WARM + 2)
    assert times == {"A": [10.0, 13.0], "B": [11.0, 14.0], "C": [12.0, 15.0]}


# -- meters ------------------------------------------------------------------------------------------------------------


async def test_a_stall_is_seen_with_and_without_the_wait_for_a_cpu() -> None:
    async def stall() -> None:
        time.sleep(0.05)  # noqa: ASYNC251

    found = await longest_stall(stall)
    assert found.raw >= 0.05
    # Asleep it does not wait for a CPU; when it wakes up it may.
    assert found.running is None or 0.05 <= found.running <= found.raw + 1e-3


@pytest.mark.thorough
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be forgotten here")
def test_peak_memory_grows_with_what_is_touched_and_stays(tmp_path: Path) -> None:
    # In a process of its own: this one's peak may lie far above what it has now, and hide the growth.
    code, out, err = run("-c", PEAK, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert 56 << 20 <= int(out) < 512 << 20


PEAK = """
from asyncsync.bench.meters import PeakMemory
memory = PeakMemory()
block = bytearray(b"x") * (64 << 20)
del block
print(memory.growth())
"""


# -- figures and bars: pure --------------------------------------------------------------------------------------------


def figure(section: str, case: str, workers: int, system: str, *milliseconds: float) -> Figure:
    return Figure.of(section, case, workers, system, [value / 1e3 for value in milliseconds])


def test_a_figure_has_quartiles() -> None:
    found = figure("latency", "empty", 2, "async", 5, 1, 2, 4, 3)
    assert (found.trials, found.unit) == (5, "ms")
    statistics = [found.minimum, found.lower, found.median, found.upper, found.maximum]
    assert statistics == pytest.approx([1, 2, 3, 4, 5])


def throughput(workers: int, tcp: float, ipc: float, broadcast: float, isend: float) -> list[Figure]:
    medians = {
        "asyncsync tcp": tcp,
        "asyncsync ipc": ipc,
        "gloo broadcast staged": broadcast,
        "gloo isend staged": isend,
        "gloo broadcast bare": 1.0,
        "gloo isend bare": 1.0,
    }
    return [figure("throughput", "256 MiB", workers, name, median) for name, median in medians.items()]


def test_the_bar_for_256_mib_is_the_faster_of_the_staged_peers() -> None:
    found = bars([*throughput(1, 100, 90, 120, 100), *throughput(2, 221, 100, 200, 300)])
    assert [(bar.name, bar.beside, bar.limit, bar.reached, bar.counts) for bar in found] == [
        ("256 MiB to 1 receiver, tcp ≤ 1.0 × gloo isend staged", pytest.approx(100), 1.0, True, True),
        ("256 MiB to 1 receiver, ipc ≤ 1.0 × gloo isend staged (beside the bar)", pytest.approx(100), 1.0, True, False),
        ("256 MiB to 2 receivers, tcp ≤ 1.1 × gloo broadcast staged", pytest.approx(200), 1.1, False, True),
        (
            "256 MiB to 2 receivers, ipc ≤ 1.1 × gloo broadcast staged (beside the bar)",
            pytest.approx(200),
            1.1,
            True,
            False,
        ),
    ]


def test_other_payloads_have_no_bar_beside_gloo() -> None:
    assert bars([figure("throughput", "4 MiB", 1, name, 1.0) for name in SYSTEMS]) == []


def test_what_is_shown_beside_a_bar_is_no_reason_to_fail() -> None:
    report = Report(throughput(1, 99, 500, 100, 100), {})
    assert [bar.reached for bar in report.bars] == [True, False]
    assert report.missed == []
    assert report.markdown().count("| NO |") == 1


def latency(empty: float, small: float, *, blocking: float) -> list[Figure]:
    return [
        figure("latency", "1 B", 1, "zmq.asyncio", 0.2),
        figure("latency", "1 B", 2, "zmq.asyncio", 0.3),
        figure("latency", "empty", 2, "async", empty),
        figure("latency", "empty", 2, "blocking", empty + blocking),
        figure("latency", "64 KiB", 2, "async", small),
        figure("latency", "64 KiB", 2, "blocking", small + blocking),
    ]


@pytest.mark.parametrize(
    ("empty", "small", "blocking", "reached"),
    [
        (0.29, 0.79, 0.09, [True, True, True, True]),
        (0.31, 0.79, 0.11, [False, False, True, False]),
        (0.29, 0.81, -0.05, [True, True, False, True]),
    ],
)
def test_bars_of_latency(empty: float, small: float, blocking: float, reached: list[bool]) -> None:
    found = bars(latency(empty, small, blocking=blocking))
    assert [bar.reached for bar in found] == reached
    assert [bar.limit for bar in found] == [1.5, 1.0, 4.0, 1.0]


def test_the_bars_of_stalls_are_the_longest_of_all_without_the_wait_for_a_cpu() -> None:
    figures = []
    for system, raw, running in (
        ("no send", 90, 80),
        ("asyncsync tcp", 50, 12),
        ("asyncsync ipc", 70, 19),
        ("asyncsync shared", 70, 21),
        ("asyncsync process", 70, 3),
    ):
        figures.append(figure("stall", "256 MiB", 1, system, 1, raw))
        figures.append(figure("stall", "256 MiB", 1, f"{system}, without waiting for a CPU", 1, running))
    found = bars(figures)
    assert [(bar.measured, bar.beside) for bar in found] == [(pytest.approx(value), 20.0) for value in (19, 21, 3)]
    assert [bar.reached for bar in found] == [True, False, True]
    assert [bar.name.removeprefix("longest stall of the trainer's loop") for bar in found] == [
        ", 256 MiB ≤ 20 ms",
        " with SharedMem, 256 MiB ≤ 20 ms",
        " with MultiProcess, 256 MiB ≤ 20 ms",
    ]
    assert bars([one for one in figures if one.case != "256 MiB"]) == []
    for system, running in (("tcp", 12), ("ipc", 25), ("shared", 5), ("process", 40)):
        figures.append(
            figure("stall", "256 MiB", 1, f"asyncsync {system}, worker, without waiting for a CPU", 1, running)
        )
    workers = bars(figures)[len(found) :]
    assert [(bar.measured, bar.reached, bar.counts) for bar in workers] == [(25, False, False), (5, True, False)]


def one_host(section: str, peer: dict[str, float] | None) -> list[Figure]:
    """A millisecond for everything but memcpy and TorchRL."""
    figures = []
    for case in ("64 KiB", "256 MiB", "1000 × 4 KiB"):
        figures.append(figure(section, case, 1, "memcpy", 0.9))
        for workers in (1, 2, 4):
            figures += [figure(section, case, workers, system, 1) for system in ("async", "blocking")]
            if peer is not None:
                figures.append(figure(section, case, workers, "TorchRL", peer[case] if workers == 2 else 1e-3))
    return figures


@pytest.mark.parametrize(
    ("section", "peer", "reached"),
    [
        ("shared", {"64 KiB": 2.1, "256 MiB": 2.1, "1000 × 4 KiB": 21}, [True, True, True, True]),
        ("shared", {"64 KiB": 1.9, "256 MiB": 1.9, "1000 × 4 KiB": 19}, [False, True, False, False]),
        ("shared", {"64 KiB": 1.3, "256 MiB": 2.1, "1000 × 4 KiB": 21}, [False, False, True, True]),
        ("process", {"64 KiB": 1.7, "256 MiB": 1.1, "1000 × 4 KiB": 101}, [True, True, True]),
        ("process", {"64 KiB": 1.6, "256 MiB": 0.9, "1000 × 4 KiB": 99}, [False, False, False]),
    ],
)
def test_bars_beside_torchrl_are_those_of_two_workers(
    section: str, peer: dict[str, float], reached: list[bool]
) -> None:
    found = [bar for bar in bars(one_host(section, peer)) if bar.name.endswith("TorchRL")]
    assert [bar.reached for bar in found] == reached


def test_shared_memory_is_one_copy_however_many_workers_and_has_that_bar_without_torchrl() -> None:
    figures = one_host("shared", None)
    flat, copy = bars(figures)
    assert (flat.name, flat.ratio, flat.limit) == (
        "SharedMem, 256 MiB to 4 workers ≤ 1.15 × to 1 worker",
        pytest.approx(1),
        1.15,
    )
    assert (copy.name, copy.ratio, copy.limit) == (
        "SharedMem, 256 MiB to 1 worker ≤ 1.15 × one memcpy into shared memory",
        pytest.approx(1 / 0.9),
        1.15,
    )
    assert bars(one_host("process", None)) == []


def test_the_table_beside_torchrl() -> None:
    (table,) = Report([one for one in one_host("process", None) if one.workers < 4], {}).tables()
    assert table.title == "MultiProcessWeightSyncScheme"
    assert table.rows[0] == ["64 KiB to 1", "1.000", "1.000", "–", "0.900", "–", "–", "1.11"]
    assert "TorchRL is not installed" in table.note
    peer = {"64 KiB": 2.0, "256 MiB": 3.0, "1000 × 4 KiB": 4.0}
    table, _ = Report([one for one in one_host("process", peer) if one.workers == 2], {}).tables()
    assert table.rows[-1] == ["1000 × 4 KiB to 2", "1.000", "1.000", "4.000", "–", "0.25", "0.25", "–"]
    assert "not installed" not in table.note


def test_many_tensors_are_compared_for_each_number_of_workers() -> None:
    figures = [
        figure("tensors", case, workers, "asyncsync ipc", median)
        for workers, case, median in ((1, "1000 × 4 KiB", 3), (1, "4 MiB", 2), (2, "1000 × 4 KiB", 4), (2, "4 MiB", 2))
    ]
    assert [bar.reached for bar in bars(figures)] == [True, False]


def test_every_collected_case_has_a_bar() -> None:
    figures = []
    for case, (workers, sides) in CASES.items():
        figures += [figure("collect", case, workers, system, 1) for system in {*sides, "memcpy"}]
    found = bars(figures)
    assert [bar.name.partition(", collected")[0] for bar in found] == list(CASES)
    assert [bar.limit for bar in found] == pytest.approx([1.0, 1 / 1.5, 1.0, 1.0, *[1 / 0.75] * 5, 2.0])
    assert [bar.counts for bar in found] == [*[True] * 6, False, False, True, True]
    (table, _) = Report(figures, {}).tables()
    assert table.title == "Collectors"


def test_each_scheme_that_reaches_other_hosts_has_bars() -> None:
    figures = [figure("distributed", "256 MiB", 2, name, time) for name, time in (
        ("asyncsync distributed", 105), ("gloo broadcast staged", 110), ("gloo isend staged", 100))]  # fmt: skip
    figures += [figure("distributed", "1000 × 4 KiB", 1, "asyncsync distributed", 21)]
    figures += [figure("distributed", "1000 × 4 KiB", 1, "gloo broadcast each", 100)]
    for section, ours in (("rpc", 106), ("ray", 100)):
        figures += [figure(section, "256 MiB", 2, "asyncsync", ours), figure(section, "256 MiB", 2, "by hand", 100)]
    for case in NODES:
        figures += [figure("nodes", case, 2, side, 1) for side in ("asyncsync", "TorchRL")]
    found = bars(figures)
    assert [(bar.name.partition(" ≤")[0], bar.ratio, bar.limit, bar.reached) for bar in found] == [
        ("Distributed, 1000 × 4 KiB to 1 receiver", pytest.approx(0.21), 0.2, False),
        ("Distributed, 256 MiB to 2 receivers", pytest.approx(1.05), 1.05, True),
        ("RPC, 256 MiB to 2 receivers", pytest.approx(1.06), 1.05, False),
        ("Ray, 256 MiB to 2 receivers", 1.0, 1.0, True),
        *((f"{case}, collected", 1.0, 1.0, True) for case in NODES),
    ]
    assert all(bar.counts for bar in found)
    distributed, rpc, ray, nodes, _ = Report(figures, {}).tables()
    assert [table.title for table in (distributed, rpc, ray, nodes)] == [
        *(f"{name}WeightSyncScheme" for name in ("Distributed", "RPC", "Ray")), "Collectors of several hosts",
    ]  # fmt: skip
    assert rpc.rows == [["asyncsync", "106.0"], ["by hand", "100.0"], ["asyncsync ÷ by hand", "1.06"]]
    assert len(distributed.rows) == 4 + 3


def test_figures_that_were_not_measured_make_no_bar_and_no_table() -> None:
    report = Report([], {"cpus": 2})
    assert (report.bars, report.tables(), report.missed) == ([], [], [])
    assert json.loads(report.json()) == {"machine": {"cpus": 2}, "figures": [], "bars": []}
    assert Figures([]).find("latency", "1 B", 1, "zmq.asyncio") is None


def test_a_bar_in_json_says_its_ratio() -> None:
    assert Bar("x", 3.0, 2.0, 1.5).as_dict() == {
        "name": "x",
        "measured": 3.0,
        "beside": 2.0,
        "limit": 1.5,
        "counts": True,
        "ratio": 1.5,
        "reached": True,
    }


def test_a_table_in_markdown() -> None:
    table = Table("Title", ["what", "ms"], [["one", "1.0"]], "Note.")
    assert table.markdown() == "### Title\n\n| what | ms |\n|---|---:|\n| one | 1.0 |\n\nNote.\n\n"


PLOT = """
from asyncsync.bench.figures import Figure, bars
from asyncsync.bench.plot import save_plot

latency = [Figure.of("latency", "1 B", 1, "zmq.asyncio", [2e-4]), Figure.of("latency", "empty", 2, "async", [3e-4]),
           Figure.of("latency", "empty", 2, "blocking", [2e-4])]
throughput = [Figure.of("throughput", "4 MiB", 2, name, [1e-3, 2e-3]) for name in ("asyncsync tcp", "memcpy")]
for number, figures in enumerate([[], latency, throughput, [*latency, *throughput]]):
    save_plot(figures, bars(figures), f"{number}.svg")
"""


@pytest.mark.thorough
def test_the_plot_shows_what_there_is(tmp_path: Path) -> None:
    # In a process of its own: matplotlib keeps its fonts open.
    assert run("-W", "error", "-c", PLOT, cwd=tmp_path) == (0, "", "")
    for number in range(4):
        assert (tmp_path / f"{number}.svg").stat().st_size > 1000


def test_a_step_by_which_gymnasium_resets_an_environment_is_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the policy of the benchmark, one in 25 is such a step; by a clock in which each loop takes 1 s."""
    pytest.importorskip("gymnasium")
    loops = collection.Collection("bare loop")
    monkeypatch.setattr(collection, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    loops.open(case := "8 CartPoles, vectorised")
    steps = collection.VECTORS[case].envs * collection.VECTORS[case].steps
    frames = [collection.FRAMES / loops.once(case) for _ in range(3)]
    assert all(0.93 * steps < count < 0.98 * steps for count in frames)
