"""What processes of their own do with blocking schemes, interrupted by Ctrl-C: see faults/test_blocking_interrupts.py.

Each returns how long the interrupted calls took to end, in seconds from the signal.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.blocking_crew import connect, crew, idle_soon, in_threads, new_receiver, new_sender
from helpers.blocking_interrupts import interrupted, sigint_raises
from helpers.processes import value_of


def works(sender: Any, receiver: Any) -> None:
    """Everything that can be done with a scheme can be done."""
    value = float(sender.version + 1000)
    sender.send(sender.model.fill(value), timeout=20)
    weights = receiver.receive(10)
    assert value_of(weights) == receiver.model.value == value
    assert receiver.receive(0) is None
    assert value_of(receiver.fetch()) == value
    receiver.wait_version(sender.version, timeout=5)


def connecting(side: str, rounds: int, span: float) -> list[float]:
    """The sender's, or the receiver's, connect; the loop thread is started by it."""
    took = []
    with sigint_raises():
        for i in range(rounds):
            assert idle_soon()
            sender = new_sender(1000, num_workers=1)
            receiver = new_receiver(sender)
            struck = sender if side == "sender" else receiver
            took.append(interrupted(struck.connect, span * i / rounds)[1])
            if i % 2:
                connect(sender, receiver)
                works(sender, receiver)
            receiver.shutdown()
            sender.shutdown()
    assert idle_soon()
    return took


def sending(numel: int, rounds: int, span: float) -> list[float]:
    took = []
    with sigint_raises(), crew(numel) as (sender, [receiver]):
        sender.send()
        for i in range(rounds):
            version = sender.version
            sender.model.fill(i + 2)
            took.append(interrupted(sender.send, span * i / rounds)[1])
            assert sender.version in (version, version + 1)
            # Whatever became of it, nothing reads the source any more.
            sender.model.fill(-7)
            if sender.version > version:
                sender.wait_version(sender.version)
                assert receiver.model.value == i + 2
            works(sender, receiver)
    assert idle_soon()
    return took


def _delivering(
    numel: int, rounds: int, span: float, prepare: Callable[[Any, Any], Any], call: Callable[[Any], Any]
) -> list[float]:
    took = []
    lost = 0
    with sigint_raises(), crew(numel) as (sender, [receiver]):
        assert receiver.receive(0) is None
        for i in range(rounds):
            sender.model.fill(i + 2)
            waiting = prepare(sender, i)
            result, seconds = interrupted(lambda: call(receiver), span * i / rounds)
            took.append(seconds)
            if waiting is not None:
                waiting.join()
            sender.wait_version(sender.version)
            if result is None:
                result = receiver.receive(10)
                lost += 1
            assert value_of(result) == i + 2
            assert receiver.receive(0) is None
        works(sender, receiver)
        assert lost > 0
    assert idle_soon()
    return took


def receiving(numel: int, rounds: int, span: float) -> list[float]:
    """receive(None), in that an update comes from another thread."""

    def prepare(sender: Any, i: int) -> threading.Thread:
        thread = threading.Thread(target=sender.publish)
        thread.start()
        return thread

    return _delivering(numel, rounds, span, prepare, lambda receiver: receiver.receive())


def fetching(numel: int, rounds: int, span: float) -> list[float]:
    return _delivering(numel, rounds, span, lambda sender, _: sender.send(), lambda receiver: receiver.fetch())


def waiting(rounds: int, span: float) -> list[float]:
    """wait_version on both sides, and receive(None), for what does not come."""
    took = []
    with sigint_raises(), crew() as (sender, [receiver]):
        assert receiver.receive(0) is None
        for i in range(rounds):
            delay = span * i / rounds
            took.append(interrupted(lambda: receiver.wait_version(sender.version + 1), delay)[1])
            took.append(interrupted(receiver.receive, delay)[1])
            with receiver.hold():
                version = sender.publish()
                took.append(interrupted(lambda version=version: sender.wait_version(version), delay)[1])
            assert receiver.receive(5) is not None
            works(sender, receiver)
    assert idle_soon()
    return took


def shutting_down(rounds: int, span: float) -> list[float]:
    took = []
    with sigint_raises():
        for i in range(rounds):
            sender = new_sender(1000, num_workers=1)
            receiver = new_receiver(sender)
            connect(sender, receiver)
            first, second = (sender, receiver) if i % 2 else (receiver, sender)
            took.append(interrupted(first.shutdown, span * i / rounds)[1])
            first.shutdown()
            assert first.closed
            second.shutdown()
            in_threads(first.shutdown, second.shutdown)
            assert idle_soon()
            assert not os.path.exists(Path(sender.bus.endpoint.removeprefix("ipc://")).parent)
    return took
