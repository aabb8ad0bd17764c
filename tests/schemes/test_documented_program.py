"""The page's standalone example (see helpers/documented.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import multiprocessing as mp
from torch import nn

from asyncsync.sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.documented import main
from helpers.pairs import fill


@pytest.mark.requirement(13, 35, 36)
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fork", SharedMemWeightSyncScheme),
        pytest.param("spawn", SharedMemWeightSyncScheme, marks=pytest.mark.thorough),
        ("forkserver", partial(SharedMemWeightSyncScheme, map_above=0)),
        ("forkserver", MultiProcessWeightSyncScheme),
        ("forkserver", ZMQWeightSyncScheme),
    ],
    ids=["fork", "spawn", "forkserver-mapped", "forkserver-process", "forkserver-zmq"],
)
def test_the_standalone_example_runs_as_documented(method: str, kind: Any) -> None:
    points: list[str] = []

    def train(policy: nn.Module, epoch: int) -> None:
        fill(policy, epoch)

    def check(point: str, epoch: int, held: list[Any]) -> None:
        points.append(point)
        if point == "trained":
            assert held == [{epoch - 1}] * 2, "nothing moves without a send"
        elif point == "closed":
            assert held == [("closed", {epoch})] * 2, "shutdown ends their loops, and they keep what they have"
        else:
            assert held == [{epoch}] * 2, f"{point}: the policy's weights as they are at this moment"

    assert main(mp.get_context(method), train, check, kind) == [0, 0], "the workers end well and are joined"
    assert points == ["connected"] + ["trained", "sent"] * 10 + ["closed"]
