"""Who may import whom. Read with ast, so that annotations and imports inside functions count, too. docs/architecture.md
has the picture."""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", Path(__file__).resolve().parents[2]))
TREES = {"asyncsync": "asyncsync", "transports": "asyncsync.transports", "collectors": "asyncsync.collectors"}

# A package may import from those behind it, and from itself.
ORDER = [
    ["__main__"],
    ["cli"],
    ["bench", "demo"],
    ["commands"],
    ["collectors", "engines"],
    ["", "sync"],  # "": the package's face
    ["public"],
    ["relay"],
    ["schemes"],
    ["transports"],
    ["bus"],
    ["monitor"],
    ["net"],
    ["protocol"],
    ["wire"],
    ["model"],
    ["weights"],
    ["runtime", "arguments"],
    ["errors"],
]
# The same within asyncsync.collectors.
COLLECTORS = [
    [""],
    ["evaluating", "distributed"],
    ["multi"],
    ["single"],
    ["rollout"],
    ["envs"],
    ["workers"],
    ["options"],
    ["batch_layout"],
    ["trajectories"],
    ["base"],
    ["profiling", "weights"],
    ["arguments"],
]


@cache
def modules() -> dict[str, Path]:
    """Every module of the installed package, where its source is."""
    found = {}
    for tree, package in TREES.items():
        for path in (SOURCE / tree).rglob("*.py"):
            parts = path.relative_to(SOURCE / tree).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Of each module, which others it imports."""
    return {module: set(imported(module, path)) - {module} for module, path in modules().items()}


def imported(module: str, path: Path) -> Iterator[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = ".".join(part for part in (above, base) if part)
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in modules() else base for a in node.names]
        else:
            continue
        yield from (name for name in names if name in modules())


def room(module: str, package: str) -> str:
    return module.removeprefix(package).removeprefix(".").partition(".")[0]


def upwards(package: str, order: list[list[str]], skipped: str) -> list[str]:
    """Imports within a package against its order, in which each module must have a place."""
    floors = {name: floor for floor, names in enumerate(order) for name in names}
    found = []
    for module, others in imports().items():
        for other in others - {skipped}:
            if all(f"{m}.".startswith(f"{package}.") for m in (module, other)):
                of, on = room(module, package), room(other, package)
                if floors[on] < floors[of] or (floors[on] == floors[of] and on != of):
                    found.append(f"{module} → {other}")
    return sorted(found)


def test_no_modules_import_each_other() -> None:
    assert {"asyncsync", "asyncsync.transports.base", "asyncsync.collectors.single"} <= modules().keys()
    assert "asyncsync.public" in imports()["asyncsync"]
    TopologicalSorter(imports()).prepare()  # raises a CycleError that names them


@pytest.mark.parametrize(
    ("package", "order", "skipped"),
    [("asyncsync", ORDER, "asyncsync"), ("asyncsync.collectors", COLLECTORS, "")],
    ids=["asyncsync", "collectors"],
)
def test_imports_go_one_way(package: str, order: list[list[str]], skipped: str) -> None:
    """``skipped``: the name of the whole package, which ``from asyncsync import wire`` names, too."""
    assert upwards(package, order, skipped) == []


def test_the_page_on_architecture_draws_this_order() -> None:
    page = (SOURCE / "docs/architecture.md").read_text()
    drawn = re.findall(r"(?:^    .*→.*\n)+", page, re.MULTILINE)
    told = [[re.findall(r"\w+", step) for step in re.split("→", picture) if step.strip()] for picture in drawn]
    named = [[name or "asyncsync" for name in step] for step in ORDER]
    assert told == [named[1:], COLLECTORS[1:]]


TESTS = Path(__file__).resolve().parents[1]
PUBLIC = {"asyncsync", "asyncsync.sync", "asyncsync.transports", "asyncsync.collectors"} | {
    "asyncsync.collectors.distributed",
    "asyncsync.errors",
    "asyncsync.cli",  # its main() is the command
}


def test_tests_of_what_users_do_use_public_names_only() -> None:
    """They survive a rebuild of what is behind the names. Tests of private parts are in unit/."""
    found = []
    for path in (path for folder in ("schemes", "collectors", "faults") for path in (TESTS / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                found += [(path.name, name) for name in names if name.split(".")[0] == "asyncsync"]
    assert len(found) > 100
    assert [(name, module) for name, module in found if module not in PUBLIC] == []
