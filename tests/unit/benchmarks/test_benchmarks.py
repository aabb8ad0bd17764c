"""`make bench`: the table of cases, comparisons and bars, and runs with few steps. No test asserts a time."""

import importlib
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.command import EXAMPLES, run

pytestmark = pytest.mark.timeout(180)  # several processes, each of which imports torch

FOLDER = EXAMPLES.parent / "benchmarks"
BENCH = FOLDER / "run.py"
SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", EXAMPLES.parent))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(SOURCE / "docs")


def the(module: str) -> Any:
    return importlib.import_module(module)


def figures(**milliseconds: float) -> dict[Any, Any]:
    """By kind: systems of one case, whose last of three samples is twice as long; CPU time is double."""
    cases, bench = the("cases"), the("run")
    return {
        cases.System(kind, "c", 2): bench.Figure([ms / 1e3, ms / 1e3, 2 * ms / 1e3], 6 * ms / 1e3, 3 * ms / 1e3)
        for kind, ms in milliseconds.items()
    }


@pytest.mark.parametrize(
    ("compare", "bar", "measured", "reached"),
    [
        ("ratio", 0.5, 0.5, True),
        ("ratio", 0.49, 0.5, False),
        ("ratio", None, 0.5, None),
        ("difference", -1.0, -2.0, True),
        ("difference", -2.5, -2.0, False),
        ("longest", 4.0, 4.0, True),
        ("longest", 3.9, 4.0, False),
    ],
)
def test_a_bar_is_compared_with_the_fastest_peer(
    compare: str, bar: float | None, measured: float, reached: bool | None
) -> None:
    cases, bench = the("cases"), the("run")
    measured_systems = figures(ours=2.0, slow=8.0, fast=4.0)
    ours, slow, fast = measured_systems
    peers = () if compare == "longest" else (slow, fast)
    found = bench.compared(cases.Row("shared", ours, peers, "peers", bar, compare=compare), measured_systems)
    assert (found["measured"], found["reached"]) == (measured, reached)
    if not peers:
        return
    assert (found["peer"], found["peer_system"], found["peer_ms"]) == ("peers", "fast", 4.0)
    assert (found["ours_cpu_ms"], found["ours_trainer_cpu_ms"], found["peer_cpu_ms"]) == (4.0, 2.0, 8.0)
    assert (found["ratio"], found["cpu_ratio"]) == (0.5, 0.5)


def test_without_its_peers_a_row_is_left_out() -> None:
    cases, bench = the("cases"), the("run")
    systems = figures(ours=2.0, gone=1.0)
    ours, gone = systems
    row = cases.Row("shared", ours, (gone,), "a peer", 1.0)
    assert bench.compared(row, {ours: systems[ours]}) is None
    assert bench.compared(row, {gone: systems[gone]}) is None


def test_every_row_is_in_one_group_of_its_section() -> None:
    cases = the("cases")
    assert {row.section for row in cases.ROWS} == set(cases.SECTIONS)
    for row in cases.ROWS:
        systems = dict(cases.groups(row.section))[row.group_name]
        assert {row.ours, *row.peers} <= set(systems)
        ours = dict(cases.groups(row.section, only_ours=True))[row.group_name]
        assert ours == [system for system in systems if system.ours]
        assert row.ours in ours
        assert 5 <= cases.trials(row.section, row.ours, True) <= cases.trials(row.section, row.ours, False)


@pytest.mark.thorough
def test_a_section_is_measured_beside_its_peers_and_other_sections_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"results": [{"section": "bytes", "kept": True}, {"section": "latency"}]}))
    code, out, err = run(BENCH, "--only", "latency", "--trials", "2", "--json", path, cwd=tmp_path)
    assert (code, err) == (0, ""), err
    document = json.loads(path.read_text())
    latency = [row for row in document["results"] if row["section"] == "latency"]
    assert [row for row in document["results"] if row["section"] != "latency"] == [{"section": "bytes", "kept": True}]
    cases = the("cases")
    wanted = [(row.ours.case, row.ours.kind, row.peer) for row in cases.ROWS if row.section == "latency"]
    assert [(row["case"], row["ours"], row["peer"]) for row in latency] == wanted
    for row in latency:
        assert row["samples"] == 2
        assert min(row[key] for key in ("ours_ms", "ours_cpu_ms", "peer_ms", "peer_cpu_ms")) > 0
        assert isinstance(row["reached"], bool)
        assert row["peer"] in out
    assert document["versions"]["now"].keys() >= {"python", "asyncsync", "torch"}


@pytest.mark.thorough
def test_what_comes_with_other_libraries_can_be_measured() -> None:
    pytest.importorskip("torchrl")
    cases, benchmark = the("cases"), the("run")
    with benchmark.started({"now": sys.executable}) as zygotes:
        for section in ("collect", "rpc", "distributed"):
            first = next(row for row in cases.ROWS if row.section == section)
            found = benchmark.measure(zygotes, section, [first.ours, *first.peers], 1, {})
            assert {system for _, system in found} == {first.ours, *first.peers}
            assert all(figure.samples[0] > 0 < figure.cpu for figure in found.values())


@pytest.mark.thorough
def test_two_environments_take_turns(tmp_path: Path) -> None:
    """The same one twice."""
    path = tmp_path / "r.json"
    arguments = ["--only", "tensors", "--trials", "3", "--json", path, "--beside", sys.prefix]
    code, out, err = run(BENCH, *arguments, cwd=tmp_path)
    assert (code, err) == (0, ""), err
    rows = json.loads(path.read_text())["results"]
    assert {(row["case"], row["workers"]) for row in rows} == set(itertools.product(("1000 × 4 KiB", "4 MiB"), (1, 2)))
    for row in rows:
        assert row["samples"] == 3
        assert row["ratio"] == pytest.approx(row["now_ms"] / row["then_ms"], rel=0.01)
        assert row["cpu_ratio"] == pytest.approx(row["now_cpu_ms"] / row["then_cpu_ms"], rel=0.01)
    assert "now ÷ then" in out
    assert f"then: {sys.prefix}/bin/python" in out


@pytest.mark.thorough
def test_an_environment_without_asyncsync_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    empty.chmod(0o755)
    code, _, err = run(BENCH, "--only", "tensors", "--beside", empty, cwd=tmp_path)
    assert code == 1
    assert f"{empty} cannot run the benchmark" in err
    assert "No module named" in err
    assert run(BENCH, "--beside", "no/such/place", cwd=tmp_path)[0] == 2


@pytest.mark.parametrize("arguments", [["--only", "speed"], ["--only", "shared,"]])
def test_a_section_that_is_not_there_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        the("run").main(arguments)
    assert "choose from shared, process, throughput" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_step_by_which_gymnasium_resets_an_environment_is_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the policy of the benchmark, one in 25 is such a step; by a clock in which each loop takes 1 s."""
    gymnasium = pytest.importorskip("gymnasium")
    collecting, torch = the("collecting"), the("torch")
    monkeypatch.setattr(collecting, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    envs, mode, steps = collecting.VECTORS["8 CartPoles, vectorised"]
    torch.manual_seed(0)
    environments = gymnasium.make_vec("CartPole-v1", num_envs=envs, vectorization_mode=mode)
    loop = collecting.bare_loop(environments, collecting.Act(), steps)
    loop()
    assert all(0.93 < collecting.FRAMES / loop() / (envs * steps) < 0.98 for _ in range(3))


def test_the_page_is_made_of_the_results_and_names_every_bar_that_is_missed() -> None:
    document, page = json.loads((FOLDER / "results.json").read_text()), the("make_performance").page
    written = (SOURCE / "docs" / "performance.md").read_text()
    assert written == page(document), "run python docs/make_performance.py"
    rows = document["results"]
    for reached in (True, False):
        for row in rows:
            row["reached"] = None if row["bar"] is None else True
        next(row for row in rows if row["section"] == "collect" and row["case"] == "8 cameras")["reached"] = reached
        missed = page(document).partition("## Bars that are missed\n\n")[2].partition("\n## ")[0]
        assert ("8 cameras beside bare loop" in missed) is not reached
    assert "stores each image twice" in missed
