"""A worker whose calls of the model leave its event loop no turn gets no update, and is told so once."""

import asyncio
import logging
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync import ZMQWeightSyncScheme
from asyncsync.model import gate as gate_module
from asyncsync.model.gate import Gate

SECONDS = 0.05
MESSAGE = "no weight update can come in"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "BLOCKED_SECONDS", SECONDS)
    monkeypatch.setattr(gate_module, "CHECK_SECONDS", SECONDS / 4)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(1, 1)


@pytest.fixture
def gate(model: nn.Module) -> Gate:
    gate = Gate()
    gate.attach(model)
    return gate


def call(model: nn.Module, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        model(torch.zeros(1))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if MESSAGE in record.getMessage()]


async def test_a_loop_that_the_model_keeps_from_turning_is_told_of_once(
    gate: Gate, model: nn.Module, short: None, caplog: pytest.LogCaptureFixture
) -> None:
    gate.bind()
    call(model, SECONDS / 2)
    assert told(caplog) == []
    call(model, SECONDS)
    [message] = told(caplog)
    for remedy in ("await asyncio.sleep(0)", "asyncio.to_thread", "asyncsync.sync"):
        assert remedy in message
    await asyncio.sleep(0)
    call(model, 2 * SECONDS)
    assert told(caplog) == [message]
    assert caplog.records[-1].levelno == logging.WARNING


async def turning(model: nn.Module) -> None:
    end = time.monotonic() + 4 * SECONDS
    while time.monotonic() < end:
        model(torch.zeros(1))
        await asyncio.sleep(0)


async def one_long_call(model: nn.Module) -> None:
    model.register_forward_hook(lambda *_: time.sleep(2 * SECONDS))
    for _ in range(3):
        model(torch.zeros(1))
        await asyncio.sleep(0)


async def another_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=call, args=(model, 4 * SECONDS))
    thread.start()
    time.sleep(2 * SECONDS)  # noqa: ASYNC251 - no turn, and yet it is not the model that keeps it from one
    thread.join()


@pytest.mark.parametrize("harmless", [turning, one_long_call, another_thread])
async def test_nothing_is_told_where_the_loop_turns_or_the_model_does_not_keep_it(
    gate: Gate, model: nn.Module, short: None, caplog: pytest.LogCaptureFixture, harmless: Any
) -> None:
    gate.bind()
    await harmless(model)
    assert told(caplog) == []


def test_a_model_is_called_after_its_loop_has_ended(
    gate: Gate, model: nn.Module, short: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def bind() -> None:
        gate.bind()

    asyncio.run(bind())
    call(model, 2 * SECONDS)
    assert told(caplog) == []


@pytest.mark.both_loops
async def test_a_worker_that_never_awaits_is_told_after_a_second_and_has_the_update_when_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, model = nn.Linear(1, 1), nn.Linear(1, 1)
    sender = ZMQWeightSyncScheme(num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    sender.init_on_sender(model_id="policy", model=source)
    receiver.init_on_receiver("policy", model=model, worker_idx=0)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        nn.init.constant_(source.bias, 7)
        version = await sender.publish()
        call(model, 0.7)
        assert told(caplog) == []
        call(model, 0.7)
        assert len(told(caplog)) == 1
        assert receiver.version < version
        await sender.wait_version(version, timeout=10)
        assert model.bias.item() == 7
