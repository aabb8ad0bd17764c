"""Ctrl-C: a real SIGINT, at many moments of every blocking call of a real process. It ends soon, no update is lost,
and the scheme is usable afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers import blocking_scenarios as scenarios
from helpers import planted
from helpers.blocking_crew import crew, idle, in_process
from helpers.blocking_interrupts import Strike, strike_everywhere
from helpers.processes import LARGE, value_of

HUGE = 32 << 20  # float32 elements, 128 MiB
BOUND = 2.0  # seconds, for a copy to end that cannot be taken back; asserted at five times that


@pytest.mark.requirement(192)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        (scenarios.connecting, ("sender", 60, 0.012)),
        (scenarios.connecting, ("receiver", 60, 0.012)),
        (scenarios.sending, (1000, 60, 0.003)),
        (scenarios.sending, (HUGE, 12, 0.3)),
        (scenarios.receiving, (1000, 150, 0.003)),
        (scenarios.receiving, (LARGE, 60, 0.02)),
        (scenarios.fetching, (1000, 100, 0.002)),
        (scenarios.fetching, (LARGE, 60, 0.01)),
        (scenarios.waiting, (30, 0.003)),
        (scenarios.shutting_down, (40, 0.01)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value[:-1])),
)
def test_a_call_ends_soon_after_ctrl_c_and_loses_nothing(scenario: Any, arguments: tuple[Any, ...]) -> None:
    assert max(in_process(scenario, *arguments)) < 5 * BOUND


@pytest.mark.requirement(192)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # struck just before
@pytest.mark.parametrize("name", ["receive", "fetch", "send", "publish", "wait_version", "weights", "status"])
def test_an_exception_at_any_moment_of_a_call_loses_nothing(name: str) -> None:
    """What a signal handler raises, wherever the interpreter may run it in our code."""

    def strike() -> None:
        raise Strike

    with crew() as (sender, [receiver]):
        calls: dict[str, Callable[[], Any]] = {
            "receive": receiver.receive,
            "fetch": receiver.fetch,
            "send": sender.send,
            "publish": sender.publish,
            "wait_version": lambda: sender.wait_version(sender.version),
            "weights": lambda: receiver.weights,
            "status": sender.status,
        }
        sender.send(sender.model.fill(2))
        last = 0
        for place, result, raised in strike_everywhere(planted.BLOCKING_CALLS, calls[name], strike):
            assert raised is None or isinstance(raised, Strike), repr(raised)
            if name not in ("receive", "fetch") or result is None:
                result = receiver.receive(5)  # it was on its way
            assert value_of(result) == receiver.model.value
            sender.send(sender.model.fill(sender.version + 1000))
            assert receiver.model.value == sender.model.value
            last = place
        assert last > 15
    assert idle()
