"""The documents say what the code does: names, defaults and links in them are compared with it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncsync
import asyncsync.sync

SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", Path(__file__).parents[2]))  # `make test` runs a copy of the tests
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(SOURCE)) for path in (SOURCE / "docs").rglob("*.md"))]


# Of init_on_sender, as the page has them.
OVERLOADS = [
    {"model_id", "context"},
    {"params_map"},
    {"params_map", "model_id"},
    {"weights", "devices"},
    {"weights", "devices", "model_id"},
    {"model", "devices"},
    {"model", "devices", "model_id"},
    {"weights", "device_map_fn", "num_workers"},
    {"model", "device_map_fn", "num_workers", "model_id"},
    set[str](),
]


def rows(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its own heading."""
    text = (SOURCE / document).read_text().split(f"{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def default(method: Any, parameter: str) -> Any:
    return inspect.signature(method).parameters[parameter].default


@pytest.mark.requirement(217)
def test_lifecycle_tells_for_every_scheme_what_each_side_does_in_both_phases() -> None:
    table = rows("docs/lifecycle.md", "## Two phases")
    told = {name for row in table for name in re.findall(r"`(\w+Scheme)`", row[0])}
    assert told == {n for n in asyncsync.__all__ if n.endswith("Scheme")} - {"WeightSyncScheme"}
    phases = [row[1].strip("`") for row in table]
    assert phases[:4] == ["init", "connect", "send", "shutdown"]
    assert all(all(row[2:]) for row in table), "sender, receiver, communication"
    assert table[0][4] == "none", "phase 1 is without communication"


@pytest.mark.requirement(217)
@pytest.mark.promise(15)
@pytest.mark.parametrize("module", [asyncsync, asyncsync.sync])
def test_the_documented_timeouts_are_the_defaults(module: Any) -> None:
    scheme, seen = module.WeightSyncScheme, set()
    for names, seconds, _ in rows("docs/lifecycle.md", "## Timeouts"):
        for name in re.findall(r"`(\w+)`", names):
            if name == "send" and module is asyncsync:
                continue  # not there
            expected = None if seconds == "None" else float(seconds)
            assert default(getattr(scheme, name), "timeout") == expected, name
            seen.add(name)
    assert seen >= {"connect", "send_async", "wait_version", "receive", "fetch", "shutdown"}
    for transport in (module.TransportBackend, module.ZMQTransport, module.SharedMemTransport, module.MPTransport):
        assert default(transport.receive_weights, "timeout") is None
        assert transport.supports_timeout


@pytest.mark.requirement(217)
@pytest.mark.parametrize("module", [asyncsync, asyncsync.sync])
def test_the_documented_calling_conventions_are_those_of_the_code(module: Any) -> None:
    accepted = inspect.signature(module.WeightSyncScheme.init_on_sender).parameters
    overloads = [row[0] for row in rows("docs/lifecycle.md", "## Where weights come from, and where they go")]
    named = [set(re.findall(r"\w+", arguments)) for cell in overloads for arguments in re.findall(r"\((.*?)\)", cell)]
    assert len(named) == len(OVERLOADS)
    assert all(arguments in named for arguments in OVERLOADS)
    assert all(arguments <= accepted.keys() for arguments in named)
    hooks = {
        name for row in rows("docs/lifecycle.md", "## Writing your own") for name in re.findall(r"`(_?\w+)", row[0])
    }
    assert hooks >= {"create_transport", "prepare_weights", "apply_weights", "shutdown"}
    assert all(hasattr(module.WeightSyncScheme, name) for name in hooks)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    path = SOURCE / document
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_a_document_names_exists(document: str) -> None:
    text = (SOURCE / document).read_text()
    folders = "asyncsync|transports|collectors|docs|examples|benchmarks|tests"
    named = set(re.findall(rf"(?<![\w./-])((?:{folders})/(?:[\w-]+/)*(?:[\w-]+\.\w+)?)(?![\w*…-])", text))
    assert [path for path in sorted(named) if not (SOURCE / path).exists()] == []


@pytest.mark.timeout(60)
def test_the_page_for_those_who_come_from_torchrl_has_all_its_public_names() -> None:
    """In a program of its own: TorchRL changes this process when it is imported."""
    script = SOURCE / "docs/compare_torchrl.py"
    ended = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (0, "")


# -- docs/architecture.md ----------------------------------------------------------------------------------------------

ARCHITECTURE = "docs/architecture.md"


def test_the_page_on_architecture_has_every_folder() -> None:
    told = {
        folder.strip("/") for row in rows(ARCHITECTURE, "## The map") for folder in re.findall(r"`([\w/]+/)`", row[0])
    }
    found = {
        path.parent.relative_to(SOURCE).as_posix()
        for tree in ("asyncsync", "transports", "collectors")
        for path in (SOURCE / tree).rglob("*.py")
    }
    assert told == found | {"tests", "docs", "examples", "benchmarks"}


def test_every_path_that_the_page_on_architecture_names_is_there() -> None:
    roots = (SOURCE, SOURCE / "asyncsync", SOURCE / "collectors")
    named = set(re.findall(r"`([\w/]+/[\w.]*)`", (SOURCE / ARCHITECTURE).read_text()))
    assert [path for path in sorted(named) if not any((root / path).exists() for root in roots)] == []


def test_the_decisions_are_short_and_all_in_their_index() -> None:
    folder = SOURCE / "docs/decisions"
    pages = {path.name for path in folder.glob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\((\d\d-[\w-]+\.md)\)", (folder / "index.md").read_text()))
    for name in pages:
        text = (folder / name).read_text()
        assert len(text.splitlines()) <= 40, name
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequence"], name
