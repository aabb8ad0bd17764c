"""What worker processes with a blocking scheme run."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from asyncsync.model import update
from asyncsync.sync import ClosedError
from helpers.processes import BrokenGate, Filled, _copy_one_by_one, value_of


def follow(scheme: Any, index: int, numel: int, connection: Connection | None = None) -> None:
    """Connect; tell of each update, until the sender says goodbye."""
    scheme.init_on_receiver("policy", model=Filled(numel, -1.0), worker_idx=index)
    with scheme:
        scheme.connect(timeout=30)
        if connection is not None:
            connection.send(scheme.model.value)
        try:
            while True:
                value = value_of(scheme.receive())
                if connection is not None:
                    connection.send(value)
        except ClosedError:
            assert scheme.closed


def until_closed(scheme: Any, index: int, numel: int) -> None:
    """The page's loop: work while the sender is there."""
    scheme.init_on_receiver("policy", model=Filled(numel, -1.0), worker_idx=index)
    scheme.connect(timeout=30)
    while not scheme.closed:
        scheme.model()


def compute(scheme: Any, index: int, numel: int, connection: Connection) -> None:
    """Pure Python without a pause, until the sender says goodbye."""
    scheme.init_on_receiver("policy", model=Filled(numel, -1.0), worker_idx=index)
    scheme.connect(timeout=30)
    connection.send("connected")
    x = 0
    while not scheme._bus._link.subscriber.session.ended:
        for _ in range(1000):
            x += 1
    scheme.shutdown()
    connection.send(x)


def forwards(scheme: Any, index: int, numel: int, count: int, broken: bool, connection: Connection) -> None:
    """Forwards of the main thread, some of them in a hold, some in nested ones; tells how many were torn, how many
    versions they saw, and whether they went back."""
    scheme.init_on_receiver("policy", model=Filled(numel, -1.0), worker_idx=index)
    if broken:
        scheme.bus._gate = BrokenGate()
        update.copy_tensors = _copy_one_by_one
    scheme.connect(timeout=30)
    connection.send("connected")
    model = scheme.model
    torn = back = 0
    last = 0.0
    seen = set()
    for i in range(count):
        if i % 10 == 0:
            with scheme.hold():
                found = {*model(), *model()}
        elif i % 10 == 1:
            with scheme.hold():
                found = {*model()}
                with scheme.hold():
                    found |= {*model()}
                time.sleep(0)
                found |= {model.value} if not broken else set()
        else:
            found = {*model()}
        torn += len(found) > 1
        back += min(found) < last
        last = max(found)
        seen |= found
    connection.send((torn, len(seen), back))
    scheme.shutdown()
