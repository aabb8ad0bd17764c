"""The programs in README.md and in docs/ run as they stand, and print what the page says."""

import itertools
import os
import re
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncsync
import asyncsync.sync
from asyncsync.net.endpoint import remove_stale_directories
from helpers.command import EXAMPLES, private_directories, run
from helpers.pairs import Model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(120)]  # up to three processes, each of which imports torch

SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", EXAMPLES.parent))  # `make test` runs a copy of the tests
PAGES = ["README.md", *sorted(path.relative_to(SOURCE).as_posix() for path in (SOURCE / "docs").rglob("*.md"))]


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of a page's fenced blocks."""
    return re.findall(r"^```(\w+)\n(.*?)^```", (SOURCE / page).read_text(), re.DOTALL | re.MULTILINE)


def programs(page: str) -> list[tuple[str, str]]:
    """A page's whole programs, each with what the page says that it prints; "" where it does not."""
    pairs = itertools.pairwise([*blocks(page), ("", "")])
    return [(text, after[1] if after[0] == "text" else "") for (_, text), after in pairs if "__main__" in text]


def fragment(page: str, word: str) -> str:
    """The one block of Python with this word in it that is no whole program."""
    [found] = [text for _, text in blocks(page) if word in text and "__main__" not in text]
    return found


PROGRAMS = [(page, number) for page in PAGES for number in range(len(programs(page)))]


def test_each_page_that_promises_programs_has_them() -> None:
    found = [page for page, _ in PROGRAMS]
    assert {page: found.count(page) for page in found} == {
        "README.md": 1,
        "docs/collectors.md": 1,
        "docs/tutorial.md": 2,
    }


@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_a_program_prints_what_its_page_says(tmp_path: Path, page: str, number: int) -> None:
    program, told = programs(page)[number]
    (tmp_path / "program.py").write_text(program)
    code, out, err = run(tmp_path / "program.py", cwd=tmp_path)
    assert (code, err) == (0, ""), err
    assert private_directories() == []
    if told:
        assert sorted(out.splitlines()) == sorted(told.splitlines()), "several processes print"
    else:
        assert page == "docs/collectors.md"
        assert len(re.findall(r"tensor\(\[[\d, ]+\]\)", out)) == 10


def test_the_readmes_collector_is_the_one_of_its_page() -> None:
    [(program, _)] = programs("docs/collectors.md")
    for line in fragment("README.md", "MultiAsyncCollector").splitlines():
        assert line.strip() in program


def test_the_notebook_runs(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(programs("README.md")[0][0])
    (tmp_path / "cell.py").write_text(fragment("docs/recipes.md", "from workers import"))
    notebook = (
        "import ast, asyncio, multiprocessing, pathlib\n"
        "code = compile(pathlib.Path('cell.py').read_text(), 'cell', 'exec', ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)\n"
        "async def cell(): await eval(code, {})\n"
        "asyncio.run(cell())\n"
        "for worker in multiprocessing.active_children(): worker.join(10)\n"  # a kernel runs on after the cell
    )
    code, out, err = run("-c", notebook, cwd=tmp_path)
    assert (code, err) == (0, "")
    bias = [re.findall(r"worker (\d): bias \[(.*)\]", line) for line in sorted(out.splitlines())]
    assert [each[0][0] for each in bias] == ["0", "1"]


CTRL_C = """
import asyncio, contextlib, multiprocessing, os, signal, sys
from torch import nn
from asyncsync import SharedMemWeightSyncScheme
from workers import work

async def trainer(scheme, policy):
    async with scheme:
        await scheme.connect()
        os.killpg(0, signal.SIGINT)                           # as a terminal does
        await asyncio.sleep(60)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    policy, scheme = nn.Linear(4, 2), SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
{recipe}
    for process in workers:
        process.join()
    print([process.exitcode for process in workers])
"""


def test_ctrl_c_lets_workers_end_well(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(programs("README.md")[0][0])
    recipe = fragment("docs/recipes.md", "signal.SIG_IGN)\nfor process in workers")
    (tmp_path / "ctrl_c.py").write_text(CTRL_C.format(recipe=textwrap.indent(recipe, "    ")))
    code, out, err = run(tmp_path / "ctrl_c.py", cwd=tmp_path)
    assert (code, err) == (0, ""), err
    assert len(re.findall(r"^worker \d: bias ", out, re.MULTILINE)) == 2, "a worker was interrupted"
    assert out.splitlines()[-1] == "[0, 0]"


def test_workers_of_a_killed_trainer_end_with_the_recipe(tmp_path: Path) -> None:
    program, recipe = programs("README.md")[0][0], fragment("docs/recipes.md", '!= "lost":')
    waiting = re.search(r"^ +while not scheme\.closed:.*\n.*\n", program, re.MULTILINE)
    assert waiting is not None
    program = program.replace(waiting[0], textwrap.indent(recipe, " " * 8))
    ends = "        for step in range(1, 4):\n"
    assert program.count(ends) == 1
    program = program.replace(ends, f"        import os\n        os.kill(os.getpid(), 9)\n{ends}")
    (tmp_path / "killed.py").write_text(program)
    code, out, _ = run(tmp_path / "killed.py", cwd=tmp_path)  # until the workers have closed its output, too
    assert code == -9
    assert len(re.findall(r"^worker \d: bias ", out, re.MULTILINE)) == 2
    remove_stale_directories(Path(tempfile.gettempdir()))  # as the next trainer does
    assert private_directories() == []


SHARDED = """
import asyncio, multiprocessing, os
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from asyncsync import SharedMemWeightSyncScheme

{publish}

def learn(rank, store, scheme):
    distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    asyncio.run(train(rank, scheme))
    distributed.destroy_process_group()

def plain(value):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model

async def train(rank, scheme):
    replicated, sharded = DistributedDataParallel(plain(5.0)), plain(6.0)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    if rank == 0:
        scheme.init_on_sender(model_id="policy", num_workers=1)
        await scheme.connect(weights=plain(4.0))
    for model in (replicated, sharded):
        await publish(scheme, model, rank)
        if rank == 0:
            await scheme.wait_version(scheme.version)
    if rank == 0:
        await scheme.shutdown()

async def act(scheme):
    policy = plain(0.0)
    scheme.init_on_receiver("policy", model=policy, worker_idx=0)
    async with scheme:
        await scheme.connect()
        for _ in range(2):
            await scheme.receive(timeout=60)
            print(scheme.version, sorted({{value for p in policy.parameters() for value in p.flatten().tolist()}}))

def work(scheme):
    asyncio.run(act(scheme))

if __name__ == "__main__":
    torch.set_num_threads(1)
    scheme, store = SharedMemWeightSyncScheme(), os.path.abspath("store")
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=work, args=(scheme,)).start()
    spawn.Process(target=learn, args=(1, store, None)).start()
    learn(0, store, scheme)
"""


def test_a_learner_of_several_processes_publishes_whole_weights(tmp_path: Path) -> None:
    path = tmp_path / "sharded.py"
    path.write_text(SHARDED.format(publish=fragment("docs/recipes.md", "get_model_state_dict")))
    code, out, err = run(path, cwd=tmp_path)
    assert (code, out) == (0, "2 [5.0]\n3 [6.0]\n"), err  # with DDP, then FSDP; torch may warn of what is none of ours
    assert private_directories() == []


class Engine:
    """Takes what comes, or raises after the first tensor."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.weights[name] = tensor.clone()
            if self.fails:
                self.fails = False
                raise OSError("no room")

    def holds(self, value: float) -> bool:
        return all(bool((tensor == value).all()) for tensor in self.weights.values())


@pytest.mark.requirement(243)
def test_an_engine_of_ones_own_loads_goes_back_and_loads_again() -> None:
    sender = asyncsync.sync.SharedMemWeightSyncScheme(min_workers=0)
    sender.init_on_sender(model_id="policy", model=Model(1))
    sender.connect()
    names: dict[str, Any] = {"asyncsync": asyncsync, "endpoint": sender.bus.endpoint}
    exec(fragment("docs/engines.md", "def load_next"), names)
    load_next, scheme, engine = names["load_next"], names["scheme"], Engine()
    with sender, scheme:
        assert (load_next(scheme, engine), engine.holds(1)) == (1, True)
        version = sender.publish(Model(2))
        engine.fails = True
        with pytest.raises(OSError, match="no room"):
            load_next(scheme, engine)
        assert engine.holds(1)
        with pytest.raises(asyncsync.PartialSendError, match="no room"):
            sender.wait_version(version, timeout=10)
        assert (load_next(scheme, engine), engine.holds(2)) == (version, True)
        sender.wait_version(version, timeout=10)
