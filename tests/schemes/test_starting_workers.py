"""How many workers a sender waits for, and what it says of those that do not start."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest

import asyncsync
from asyncsync import NotConnected
from helpers.apis import Api
from helpers.pairs import Clock, Model, fill, read, receiver_of


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


@pytest.mark.parametrize(
    ("constructor", "init", "message"),
    [
        ({"num_workers": 2}, {"num_workers": 3}, "num_workers"),
        ({"num_workers": 2}, {"devices": ["cpu"]}, "num_workers"),
        ({"min_workers": 2}, {"min_workers": 3}, "min_workers"),
        ({"min_workers": 3}, {"num_workers": 2}, "min_workers=3"),
        ({"num_workers": 2}, {"min_workers": 3}, "min_workers=3"),
    ],
)
def test_counts_of_workers_that_disagree_are_refused(
    api: Api, constructor: dict[str, Any], init: dict[str, Any], message: str
) -> None:
    scheme = api.scheme(**constructor)
    with pytest.raises(ValueError, match=message):
        scheme.init_on_sender(model_id="policy", model=Model(), **init)


async def test_init_may_say_the_count_and_say_another_before_connecting(api: Api) -> None:
    scheme = api.scheme()
    for count in (2, 3):
        scheme.init_on_sender(model_id="policy", model=Model(), num_workers=count)
    assert scheme.bus.num_workers == 3
    other = api.scheme()
    other.init_on_sender(model_id="policy", model=Model(), min_workers=2)
    assert other.bus.min_workers == 2


@pytest.mark.requirement(212)
@pytest.mark.schemes("some")
async def test_with_min_workers_0_a_trainer_starts_alone(api: Api) -> None:
    sender = api.sender(source := Model(1), scheme={"min_workers": 0})
    async with sender:
        with Clock(0.5):
            await sender.connect(timeout=5)
            await sender.send_async(fill(source, 2))
            await sender.wait_version(sender.version)
        async with receiver_of(sender, 0, model := Model()) as late:
            await late.connect(timeout=5)
            assert read(model) == {2}
            await sender.send_async(fill(source, 3))
            assert read(model) == {3}


@pytest.mark.parametrize("kind", ["multiprocessing", "subprocess"])
async def test_connect_ends_when_a_workers_process_has_ended(api: Api, kind: str) -> None:
    async with api.sender(Model(1), num_workers=1) as sender:
        if kind == "subprocess":
            process: Any = python("raise SystemExit(3)")
        else:
            process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
            process.start()
        with Clock(2), pytest.raises(NotConnected, match="exit code 3"):
            await sender.connect(timeout=60, processes=[process])
        if kind == "subprocess":
            process.communicate()
        else:
            process.join()
        with pytest.raises(NotConnected, match="worker 0"):
            await sender.connect(timeout=0.1)
        with pytest.raises(TypeError, match="subprocess"):
            await sender.connect(timeout=5, processes=[process.pid])
        receiver = receiver_of(sender, 0, Model())
        with pytest.raises(TypeError, match="processes"):
            await receiver.connect(processes=[process])


async def test_a_process_that_goes_on_does_not_end_connect(api: Api) -> None:
    async with api.sender(Model(1), num_workers=1) as sender, receiver_of(sender, 0, Model()) as receiver:
        with python("input()") as process:
            await asyncio.gather(sender.connect(timeout=10, processes=[process]), receiver.connect(timeout=10))
            process.kill()


def test_with_on_an_asyncio_scheme_names_async_with() -> None:
    for one in (asyncsync.ZMQWeightSyncScheme(), asyncsync.Bus()):
        with pytest.raises(TypeError, match="async with"), one:
            pass
