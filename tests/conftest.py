"""Fixtures for every test: nothing may be left behind, and socket tests may ask for both event loops.

tests/ is no package. pytest puts each test file's directory on sys.path (its default import mode) and, because of
pyproject.toml's `pythonpath`, tests/ itself. What tests share, and every function that a process is spawned with, is in
`helpers` and is imported as `from helpers.… import …`: multiprocessing hands sys.path to its children, so they find it.
Two test files need two names, also when they lie in different directories.
"""

import asyncio
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from importlib.util import find_spec
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import uvloop
import zmq
from torch.distributed import TCPStore

from helpers.apis import QUICK, SETS, Api, free_port
from helpers.collecting_torchrl import Programs
from helpers.elsewhere import claim_another_host
from helpers.leaks import no_leaks, no_tasks
from helpers.processes import Remote, Schemes, processes

# torch's stores ask the name server for the name of each end of each connection. A question that is lost costs 5 s, in
# which the store answers nobody; here, 1 s. The resolver reads this once, in each process.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Ray's workers are niced by 15: beside other tests they would not get a core.
os.environ.setdefault("RAY_worker_niceness", "0")


HAS_VLLM = find_spec("vllm") is not None  # it and the tests of it run as its users start it


def pytest_configure(config: pytest.Config) -> None:
    """Give this run, and its children, a temporary directory of its own: what appears in it is this run's."""
    config.addinivalue_line("markers", "ray: starts a cluster of Ray; skipped where Ray is not installed")
    config.addinivalue_line("markers", "schemes(name): run with each of helpers.apis.SETS[name], instead of ZeroMQ's")
    shared = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", shared)  # tmp_path stays where one looks for it after a failure
    private = tempfile.mkdtemp(prefix="t-")  # short: a Unix socket's path has 107 bytes
    os.environ["TMPDIR"] = tempfile.tempdir = private
    if not HAS_VLLM:
        startup = str(Path(__file__).parent / "helpers" / "startup")
        sys.path.append(startup)  # which is handed on, too
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [startup, os.environ.get("PYTHONPATH")]))
    # At exit, after multiprocessing has removed its own directory in there (priority -100).
    Finalize(None, shutil.rmtree, args=(private,), kwargs={"ignore_errors": True}, exitpriority=-200)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    if not HAS_VLLM:  # as helpers/startup/sitecustomize.py, while everything is imported
        gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("both_loops"):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "api" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("schemes")
        metafunc.parametrize("api", SETS[mark.args[0] if mark else "zmq"], ids=repr, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Leave out what shows nothing new, and the quick suite's rest to ``make thorough``.

    A blocking scheme runs on a loop of its own: the kind of the test's loop makes no difference to it. To slots it
    makes next to none; what is run with all schemes shows that. The quick suite runs on asyncio's loop alone, and
    with the schemes of helpers.apis.QUICK.

    pytest-xdist runs the tests of a group in one process, one after the other. Tests that look at what programs have
    found (a module's ``seen``) are a group, so that each program runs once. Those that start a cluster of Ray are one,
    too, because two clusters at a time take more than a machine has.
    """

    def again(item: pytest.Item) -> bool:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if (api := given.get("api")) is None or given.get("_asyncio_loop_factory") is not uvloop.new_event_loop:
            return False
        mark = item.get_closest_marker("schemes")
        return api.is_blocking or (api.kind != "ZMQ" and (mark is None or mark.args[0] != "all"))

    items[:] = [item for item in items if not again(item)]
    has_ray = find_spec("ray") is not None
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
            item.add_marker(pytest.mark.skipif(not has_ray, reason="Ray is not installed"))
        elif hasattr(getattr(item, "module", None), "seen"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        other_loop = given.get("_asyncio_loop_factory") is uvloop.new_event_loop
        if other_loop or ("api" in given and given["api"].name not in QUICK):
            item.add_marker(pytest.mark.thorough)
    items.sort(key=_time_limit, reverse=True)  # or one process is left alone with long tests in the end
    yield  # those that "-m" leaves out are left out


def _time_limit(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return 60.0 if mark is None else float(mark.args[0])


@pytest.fixture
def api(request: pytest.FixtureRequest) -> Api:
    """Runs a test with the asyncio API and with the blocking one, and with every scheme if it is marked so; see
    helpers/apis.py."""
    given: Api = request.param
    if not given.is_fast:
        request.getfixturevalue("monkeypatch").setenv("ASYNCSYNC_FAST", "0")
    if given.is_far:
        claim_another_host(request.getfixturevalue("monkeypatch"), lambda worker: worker % 2 == 1)
    return given


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Remote]]:
    async with processes() as start:
        yield start


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An explicit address: ipc, or tcp where the test is parametrised with it."""
    if getattr(request, "param", "ipc") == "ipc":
        return f"ipc://{tmp_path}/bus"
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
async def schemes() -> AsyncIterator[Schemes]:
    schemes = Schemes()
    yield schemes
    await schemes.shutdown()


@pytest.fixture(scope="session")
def in_program(_no_leaks_by_session: None) -> Iterator[Programs]:
    """Runs functions in programs of their own that have imported TorchRL."""
    with closing(Programs()) as programs:
        yield programs


@pytest.fixture(scope="session", autouse=True)
def _process_wide() -> None:
    """Have the libraries open, before anything is counted, what they open once per process and keep."""
    uvloop.new_event_loop().close()  # libuv's signal pipe
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the same, of torch's libuv
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://warm")
        b.connect("inproc://warm")
        a.send(bytearray(1 << 17), copy=False)  # pyzmq's collector thread, with a context of its own
        b.recv()
    gc.collect()
    gc.freeze()  # half a million objects of the libraries: collections, forced ones too, take a tenth of the time


@pytest.fixture(scope="session", autouse=True)
def _no_leaks_by_session(_process_wide: None) -> Iterator[None]:
    with no_leaks("the session's fixtures"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_leaks_by_module(request: pytest.FixtureRequest) -> Iterator[None]:
    # What stays until the session's end begins before this module's is counted, whichever of its tests wants it first.
    if any(
        "in_program" in getattr(item, "fixturenames", ()) for item in request.session.items if item.path == request.path
    ):
        request.getfixturevalue("in_program")
    with no_leaks(f"the module's fixtures in {request.path.name}"):
        yield


@pytest.fixture(autouse=True)
def _no_leaks_by_test(request: pytest.FixtureRequest) -> Iterator[None]:
    # Set up first and taken down last: after the test's own fixtures, and after its loop has been closed.
    with no_leaks(request.node.name):
        yield


@pytest.fixture(autouse=True)
def _no_tasks_by_test(_no_leaks_by_test: None, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("asyncio"):  # pytest-asyncio's auto mode marks every async test
        request.getfixturevalue("_no_tasks_at_the_end")


@pytest.fixture
async def _no_tasks_at_the_end(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    # The first async fixture of its loop, hence taken down after the others have ended their tasks.
    yield
    await no_tasks(request.node.name)
