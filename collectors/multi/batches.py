"""Batches of a collector with workers: what they are like, and one of them and its caller until they meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.whole_trajectories import WholeTrajectories
from asyncsync.collectors.workers.messages import RolloutResult
from asyncsync.collectors.workers.shared_batches import SharedPlace


@dataclass
class BatchArguments:
    """What the batches of a collector are like: its arguments of these names, checked. ``frames`` are those of each
    worker's rollouts; ``total_frames`` is math.inf where there is no end. The rollouts of a synchronous batch lie one
    after another along ``dim`` (None: they are stacked); when ``threshold``, a fraction of them, are done, the others
    are cut. ``writes_trajectories``: workers write whole ones into the replay buffer, so that rollouts differ in
    frames."""

    frames: list[int]
    total_frames: float
    init_random_frames: int
    split_trajs: bool
    track_traj_ids: bool
    replay_buffer: Any
    update_at_each_batch: bool
    max_weight_update_interval: int
    postproc: Callable[[Any], Any] | None = None
    trajectories: WholeTrajectories | None = None
    writes_trajectories: bool = False
    dim: int | None = None
    threshold: float = 1.0

    @property
    def processes(self) -> bool:
        """Whether batches are processed after they are assembled."""
        return self.postproc is not None or self.split_trajs or self.trajectories is not None


@dataclass(eq=False)
class Made:
    """A batch whose rollouts are done, until its caller has it.

    Attributes:
        place: where its parts lie.
        is_assembled: whether ``batch`` is whole; it stays None where frames go to a replay buffer, and is None where
            too few trajectories have ended.
        is_finished: whether the user's code has processed it.
        is_lost: whether an interruption has struck the user's code.
    """

    place: SharedPlace
    results: list[RolloutResult]
    batch: TensorDictBase | None = None
    is_assembled: bool = False
    is_finished: bool = False
    is_lost: bool = False


class Caller:
    """Who wants the next batch.

    Attributes:
        thread: the identifier of its thread.
        has_turn: whether the others wait for this one.
        begins: whether what is raised from now on ends collection.
        made: its batch, from when that is there to when it is handed out.
        is_served: whether another thread processes the batch for it.
        is_gone: whether it waits for nothing more.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.has_turn = self.begins = self.is_served = self.is_gone = False
        self.made: Made | None = None
