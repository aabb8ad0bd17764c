"""The package as it is installed: in an environment of its own that borrows everything but asyncsync from this one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

PACKAGES = {"asyncsync": "asyncsync", "transports": "asyncsync/transports", "collectors": "asyncsync/collectors"}
OPTIONAL = ("gymnasium", "matplotlib", "ray", "rich", "submitit", "torchrl", "uvloop")

WHERE = """
import json, sys, asyncsync, asyncsync.transports, asyncsync.collectors
for name in asyncsync.collectors.__all__:
    getattr(asyncsync.collectors, name)
assert not {"gymnasium", "torchrl"} & {*sys.modules}, "before they are needed"
files = [module.__file__ for module in (asyncsync, asyncsync.transports, asyncsync.collectors)]
print(json.dumps({"files": files, "path": list(asyncsync.__path__), "version": asyncsync.__version__}))
"""

INTERRUPTED = """
import importlib.abc, signal, sys

class CtrlC(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
import asyncsync
print("it goes on")
"""


def run(python: Path | str, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environment
    command = [str(python), *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip_install(python: Path, *arguments: str) -> None:
    """Install with this environment's pip into another one; setuptools comes from here, nothing is downloaded."""
    pip = ["-m", "pip", "--disable-pip-version-check", f"--python={python}", "install", "--quiet"]
    run(sys.executable, *pip, "--no-deps", "--no-build-isolation", "--no-index", *arguments)


@pytest.fixture(scope="session")
def source() -> Path:
    """The checkout. `make test` runs a copy of the tests and names it; otherwise it is the directory above tests/."""
    path = Path(os.environ.get("ASYNCSYNC_SOURCE", Path(__file__).resolve().parents[2]))
    assert (path / "pyproject.toml").is_file(), "run `make test`, or set ASYNCSYNC_SOURCE"
    return path


@pytest.fixture
def clone(source: Path, tmp_path: Path) -> Path:
    """A copy of the checkout: building writes into the tree it builds."""
    root = tmp_path / "clone"
    root.mkdir()
    for name in PACKAGES:
        shutil.copytree(source / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source / name, root)
    return root


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A fresh environment that sees this one's packages, but neither asyncsync nor a .pth that may lead to it."""
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for directory in map(Path, sys.path):
        if directory.name in ("site-packages", "dist-packages") and directory.is_dir():
            for entry in directory.iterdir():
                mine = entry.name.startswith(("asyncsync", "__editable__")) or entry.suffix == ".pth"
                if not mine and not (borrowed / entry.name).exists():
                    (borrowed / entry.name).symlink_to(entry)
    home = tmp_path / "env"
    venv.create(home, symlinks=True)
    (site_packages(home / "bin" / "python") / "borrowed.pth").write_text(f"{borrowed}\n")
    return home / "bin" / "python"


def site_packages(python: Path) -> Path:
    (found,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return found


def where(python: Path, cwd: Path, **environment: str) -> tuple[list[Path], list[Path]]:
    """The files of asyncsync, asyncsync.transports and asyncsync.collectors, and asyncsync's search path."""
    answer = json.loads(run(python, "-c", WHERE, cwd=cwd, **environment))
    assert answer["version"]
    return [Path(file).resolve().parent for file in answer["files"]], [
        Path(entry).resolve() for entry in answer["path"]
    ]


def in_the_clone(clone: Path) -> list[Path]:
    return [clone.resolve() / name for name in PACKAGES]


@pytest.mark.requirement(215)
@pytest.mark.thorough
def test_pythonpath_and_a_plain_install_work_elsewhere_and_from_the_clones_root(
    clone: Path, python: Path, tmp_path: Path
) -> None:
    assert where(python, tmp_path, PYTHONPATH=str(clone))[0] == in_the_clone(clone)
    pip_install(python, str(clone))
    site = site_packages(python).resolve()
    wanted = {
        Path(target) / file.relative_to(clone / name)
        for name, target in PACKAGES.items()
        for file in (*(clone / name).rglob("*.py"), *(clone / name).rglob("py.typed"))
    }
    installed = {path.relative_to(site) for path in (site / "asyncsync").rglob("*")}
    assert Path("asyncsync/py.typed") in installed
    assert wanted - installed == set(), "a package that is missing from [tool.setuptools] packages in pyproject.toml?"
    assert not (site / "transports").exists()
    assert not (site / "collectors").exists()
    for name in ("transports", "collectors"):  # a stranger's top-level packages are not taken for ours
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise AssertionError('not ours')\n")
    assert where(python, tmp_path) == ([site / path for path in PACKAGES.values()], [site / "asyncsync"])
    # Started in the clone's root, Python finds the source asyncsync/, which must find the other two beside it.
    assert where(python, clone)[0] == in_the_clone(clone)


@pytest.mark.requirement(215)
@pytest.mark.thorough
def test_an_editable_install_works_elsewhere(clone: Path, python: Path, tmp_path: Path) -> None:
    pip_install(python, "--editable", str(clone))
    assert where(python, tmp_path)[0] == in_the_clone(clone)


IMPORTS = """
import importlib, os, pkgutil, sys, threading
for name in sys.argv[1:]:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError, as if it were not installed

# What the libraries do when they are imported is theirs: numpy's BLAS, for one, starts threads.
import msgpack, multiprocessing, numpy, psutil, tensordict, torch, zmq, zmq.asyncio

def state():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        "children": psutil.Process().children(),
        "sockets, pipes and loops": sorted(link for link in links if not link.startswith("/")),
    }

before = state()
import asyncsync, asyncsync.collectors, asyncsync.transports
# In a checkout the second entry of asyncsync.__path__ is the repository itself, tests and all.
for paths, prefix in (
    (asyncsync.__path__[:1], "asyncsync."),
    (asyncsync.collectors.__path__, "asyncsync.collectors."),
    (asyncsync.transports.__path__, "asyncsync.transports."),
):
    for module in pkgutil.walk_packages(paths, prefix):
        # The last two are for vLLM's own processes.
        if not module.name.endswith(("__main__", "engines.vllm.engine", "engines.vllm.trainer")):
            importlib.import_module(module.name)
assert state() == before, (state(), before)
"""


@pytest.mark.requirement(188)
@pytest.mark.thorough
def test_import_starts_no_thread_process_socket_or_loop_and_needs_no_optional_library(tmp_path: Path) -> None:
    run(sys.executable, "-c", IMPORTS, *OPTIONAL, cwd=tmp_path)


def test_ctrl_c_while_numpy_is_imported_is_not_lost(source: Path) -> None:
    """torch imports it, too, and swallows what is raised meanwhile: the program would go on."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGINT, ""), done.stderr


@pytest.mark.thorough
def test_it_works_without_docstrings(tmp_path: Path) -> None:
    """They describe options, and do not declare them."""
    code = "import asyncsync; print(asyncsync.SharedMemWeightSyncScheme(slots=3).bus.num_workers)"
    path = os.environ.get("PYTHONPATH", "")
    assert run(sys.executable, "-OO", "-c", code, cwd=tmp_path, PYTHONPATH=path).split() == ["None"]
