"""What worker processes with a blocking scheme run."""

import time
from multiprocessing.connection import Connection
from typing import Any

from asyncsync.errors import ClosedError
from helpers.processes import Filled, break_gate, value_of


def begin(
    scheme: Any, index: int, model: Filled, broken: bool = False, connection: Connection | None = None, **options: Any
) -> Filled:
    """Connect, and tell it; ``broken``: updates wait for nobody."""
    scheme.init_on_receiver("policy", model=model, worker_idx=index, **options)
    if broken:
        break_gate(scheme)
    scheme.connect(timeout=30)
    if connection is not None:
        connection.send("connected")
    return model


def follow(scheme: Any, index: int, numel: int, connection: Connection | None = None) -> None:
    """Connect; tell of each update, until the sender says goodbye."""
    tell = (lambda value: None) if connection is None else connection.send
    with scheme:
        tell(begin(scheme, index, Filled(numel, -1.0))()[0])  # by a call, which an update waits for
        try:
            while True:
                tell(value_of(scheme.receive()))
        except ClosedError:
            assert scheme.closed


def until_closed(scheme: Any, index: int, numel: int) -> None:
    """The page's loop: work while the sender is there."""
    model = begin(scheme, index, Filled(numel, -1.0))
    while not scheme.closed:
        model()


def compute(scheme: Any, index: int, numel: int, connection: Connection) -> None:
    """Pure Python without a pause, until the sender says goodbye."""
    begin(scheme, index, Filled(numel, -1.0), connection=connection)
    x = 0
    while not scheme._bus.link.machine.session.ended:
        for _ in range(1000):
            x += 1
    scheme.shutdown()
    connection.send(x)


def forwards(scheme: Any, index: int, numel: int, enough: dict[str, int], broken: bool, connection: Connection) -> None:
    """Forwards of the main thread; tells how many were torn, and how often their versions went back."""
    begin(scheme, index, Filled(numel, -1.0), broken, connection)
    connection.send(reads(scheme, **enough))
    scheme.shutdown()


def reads(scheme: Any, count: int, versions: int = 0, tears: int = 0) -> tuple[int, int]:
    """Forwards, some in a hold, some in nested ones: how many were torn, and how often their versions went back.

    It makes ``count`` of them, and goes on until it has seen so many ``versions``, and so many torn ones.
    """
    model = scheme.model
    torn = back = i = 0
    last, seen = 0.0, set()
    while i < count or len(seen) < versions or torn < tears:
        if i % 10 == 0:
            with scheme.hold():
                found = {*model()}
                time.sleep(0)
                found |= {*model()}
        elif i % 10 == 1:
            with scheme.hold():
                found = {*model()}
                with scheme.hold():
                    found |= {*model()}
        else:
            found = {*model()}
        torn += len(found) > 1
        back += min(found) < last
        last = max(found)
        seen |= found
        i += 1
    return torn, back
