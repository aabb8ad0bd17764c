"""Compiled, scripted and traced modules as a worker's: what the gate covers, what it refuses, and what it warns of."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import asyncsync
from helpers import planted
from helpers.apis import Api, in_thread
from helpers.pairs import Model, fill, read, until

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Pausing(Model):
    """Its forward stays inside until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.leave = threading.Event(), threading.Event()

    @torch.compiler.disable
    def pause(self) -> None:
        self.inside.set()
        assert self.leave.wait(10)

    def forward(self) -> torch.Tensor:
        found = self.first.sum()
        self.pause()
        return found + self.last.sum()


@pytest.mark.requirement(194)
@pytest.mark.schemes("every")
async def test_a_module_compiled_after_registering_is_gated(api: Api) -> None:
    """The gate's part: torch.compile leaves its hooks alone, also when a forward that ends applies the update."""
    torch.compiler.reset()
    worker = Pausing()
    async with api.crew(1, source=Model(1), models=[worker]) as everybody:
        compiled = torch.no_grad()(torch.compile(worker, backend="eager").__call__)
        for value in (2, 3, 4):
            worker.inside.clear()
            worker.leave.clear()
            call = asyncio.ensure_future(in_thread(compiled))
            try:
                await in_thread(worker.inside.wait, 10)
                version = await everybody.sender.publish(fill(everybody.source, value))
                await until(lambda: planted.pending(everybody.receivers[0]))
                assert read(worker) == {value - 1}, "nothing changes while it runs"
            finally:
                worker.leave.set()
            assert float(await call) == (value - 1) * (64 + 7)
            await everybody.sender.wait_version(version, timeout=10)
            assert read(worker) == {value}


# -- what is there before it is registered


class Summed(Model):
    """A module of its own class: dynamo compiles its forward, and calls it with its hooks."""

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        return self.first.sum() + self.last.sum()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def registered(module: Any, **options: Any) -> Any:
    scheme = asyncsync.ZMQWeightSyncScheme()
    scheme.init_on_receiver("policy", model=module, worker_idx=0, **options)
    return scheme


class Agent(nn.Module):
    """As CleanRL writes them: it is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(4, 2)

    def get_action(self, observation: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.actor(observation)
        return found


@pytest.mark.parametrize("make", [Agent, lambda: nn.ModuleDict({"actor": nn.Linear(4, 2)})], ids=["agent", "dict"])
def test_a_module_without_forward_is_warned_of_where_it_is_registered(make: Any) -> None:
    with pytest.warns(UserWarning, match="forward") as caught:
        registered(make())
    assert caught[0].filename == __file__
    registered(make(), gate="hold")
    registered(make(), apply="on_receive")
    if make is Agent:
        registered(make(), gated=("get_action",))


def test_a_module_that_was_compiled_and_called_before_it_is_registered_is_warned_of() -> None:
    torch.compiler.reset()
    layers = [nn.Linear(4, 2) for _ in range(3)]
    observation = torch.zeros(3, 4)
    summed = Summed(1)
    torch.compile(summed, backend="eager")()
    registered(summed)  # called by the wrapper, with its hooks
    itself = torch.compile(layers[0], backend="eager")
    itself(observation)
    outer = torch.compile(Outer(layers[1]), backend="eager")
    outer(observation)
    for layer in layers[:2]:
        with pytest.warns(UserWarning, match="gate") as caught:
            registered(layer)
        assert caught[0].filename == __file__
        registered(layer, gate="hold")
    registered(layers[2])


# -- scripted, traced, compiled ----------------------------------------------------------------------------------------


class Scripted(nn.Module):
    """What TorchScript can compile."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.layer(observation))
        return found


MADE: dict[str, Callable[[], Any]] = {
    "eager": Scripted,
    "scripted": lambda: torch.jit.script(Scripted()),
    "traced": lambda: torch.jit.trace(Scripted().eval(), torch.zeros(3, 4)),
    "compiled": lambda: torch.compile(Scripted(), backend="eager"),
    "an eager part": lambda: nn.Sequential(Scripted()),
    "a compiled part": lambda: nn.Sequential(torch.compile(Scripted(), backend="eager")),
}
NO_HOOKS = ["scripted", "traced", "compiled"]


@pytest.mark.schemes("some")
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("eager", "scripted"),
        ("eager", "traced"),
        ("eager", "compiled"),
        ("compiled", "eager"),
        ("scripted", "compiled"),
        ("an eager part", "a compiled part"),
    ],
)
async def test_a_module_goes_to_its_compiled_copy_and_back(api: Api, strategy: str, here: str, there: str) -> None:
    source, worker = MADE[here](), MADE[there]()
    fill(source, 1)
    options = {"gate": "hold"} if there in NO_HOOKS else {}
    async with api.crew(1, scheme=api.scheme(strategy), source=source, models=[worker], receiver=options) as everybody:
        assert everybody.read == [{1}]
        for value in (2, 3):
            await everybody.sender.send_async(fill(source, value))
            assert everybody.read == [{value}]
        await everybody.sender.send_async(fill(source, 4).state_dict())
        assert everybody.read == [{4}]
        assert worker.eval()(torch.zeros(3, 4)).shape == (3, 2)
        weights = (await everybody.receivers[0].fetch()).flatten_keys(".")
        assert not any("_orig_mod" in name for name in weights.keys())  # noqa: SIM118


@pytest.mark.parametrize("made", NO_HOOKS)
def test_what_runs_no_hooks_is_refused_with_both_remedies(made: str) -> None:
    with pytest.raises(ValueError, match=r"gate=\"hold\".*apply=\"on_receive\""):
        registered(MADE[made]())
