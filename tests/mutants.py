"""Break the source on purpose, one place at a time, and say which breaks the tests notice.

For whoever merges or removes tests: what the old tests killed, the new ones must kill. Draw the breaks with the old
tests, repeat them with the new ones, and compare the two files:

    python tests/mutants.py --coverage OLD/.coverage --seed 7 --count 100 --tests OLD/tests --json old.json
    python tests/mutants.py --coverage NEW/.coverage --mutants old.json --tests tests --json new.json

`--coverage` is a database with one context per test, named by the test's id (coverage's `switch_context`). It says
which tests run the broken line. A break counts as killed when one of these tests, up to `--most` of them, fails or runs
into its time limit.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage

Covered = dict[str, dict[int, list[str]]]
FOLDERS = ("asyncsync", "transports", "collectors")
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}


def breaks(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, Any]]:
    """Each place that can be broken: the node, the field, and what it becomes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            yield node, "ops", [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
            yield node, "op", SWAPPED[type(node.op)]()
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node, "test", ast.UnaryOp(ast.Not(), node.test)
        elif (isinstance(node, ast.Return) and node.value is not None) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
        ):
            yield node, "value", ast.Constant(None)


def found(source: str) -> list[tuple[str, int]]:
    """Of each break: what it is of, by which an edited file is searched for it again, and the line where it is."""
    return [(f"{field} of {ast.unparse(node)}", node.lineno) for node, field, _ in breaks(ast.parse(source))]


def broken(source: str, number: int) -> str:
    """The source with its break of that number."""
    tree = ast.parse(source)
    node, field, value = list(breaks(tree))[number]
    setattr(node, field, value)
    return ast.unparse(ast.fix_missing_locations(tree))


def draw(root: Path, seed: int, count: int, covered: Covered) -> list[dict[str, Any]]:
    places = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = str(path.relative_to(root))
            for number, (what, line) in enumerate(found(path.read_text())):
                if covered.get(name, {}).get(line):
                    places.append({"file": name, "what": what, "line": line, "number": number})
    return random.Random(seed).sample(places, count)


def find_again(place: dict[str, Any], root: Path) -> bool:
    """Look for a break of an earlier run in the source as it is now; False if its code is gone."""
    path = root / place["file"]
    places = enumerate(found(path.read_text())) if path.exists() else ()
    same = [(abs(line - place["line"]), line, number) for number, (what, line) in places if what == place["what"]]
    if same:
        _, place["line"], place["number"] = min(same)
    return bool(same)


def by_line(database: Path) -> Covered:
    """Of each source file and line, the tests that run it. Paths are taken from their last folder of FOLDERS on."""
    data = coverage.CoverageData(str(database))
    data.read()
    covered: Covered = {}
    for path in data.measured_files():
        parts = Path(path).parts
        start = min(parts.index(folder) for folder in FOLDERS if folder in parts)
        lines = {line: [t for t in tests if t] for line, tests in data.contexts_by_lineno(path).items()}
        covered["/".join(parts[start:])] = lines
    return covered


def killed(place: dict[str, Any], root: Path, tests: Path, ids: list[str], limit: float) -> bool:
    """Run the tests in a copy of the repository that has the break."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        # With __pycache__: what Python has compiled of the rest stays valid.
        for name in (*FOLDERS, "examples", "benchmarks", "docs"):
            shutil.copytree(root / name, copy / name)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy2(root / name, copy / name)
        shutil.copytree(tests, copy / "tests")
        file = copy / place["file"]
        file.write_text(broken(file.read_text(), place["number"]))
        env = {**os.environ, "PYTHONPATH": folder, "ASYNCSYNC_SOURCE": folder}
        options = ["-x", "-q", "-m", "not soak", "--timeout=60", "-p", "no:cacheprovider", "-W", "ignore"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *ids], cwd=copy, env=env, capture_output=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return True
        if b"not found:" in done.stdout + done.stderr:
            raise SystemExit(f"pytest knows no such tests: {ids}")
        # A test failed, the broken module cannot be imported, or the process was ended by a signal.
        return done.returncode not in (0, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coverage", type=Path, required=True)
    parser.add_argument("--tests", type=Path, default=Path("tests"))
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--mutants", type=Path, help="the breaks of an earlier run, instead of drawing")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    covered = by_line(options.coverage)
    if options.mutants:
        places = [place for place in json.loads(options.mutants.read_text()) if find_again(place, options.root)]
    else:
        places = draw(options.root, options.seed, options.count, covered)
    for place in places:
        ids = covered.get(place["file"], {}).get(place["line"], [])
        # Few tests of each file rather than many of one: a line that everything runs is checked by few.
        chosen = random.Random(options.seed).sample(sorted(ids), min(len(ids), options.most))
        place["tests"] = len(ids)
        place["killed"] = bool(ids) and killed(place, options.root, options.tests, chosen, limit=300.0)
        verdict = "killed" if place["killed"] else "SURVIVED"
        print(f"{verdict:8} {place['file']}:{place['line']} ({len(ids)} tests)", flush=True)
        options.json.write_text(json.dumps(places, indent=1))
    print(f"{sum(place['killed'] for place in places)} of {len(places)} killed")


if __name__ == "__main__":
    main()
