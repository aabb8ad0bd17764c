"""Batches of several processes: what is done with them before a user gets them, and where."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from asyncsync.collectors import MultiSyncCollector, split_trajectories
from helpers.collecting_multi import make, options, policy

IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")


def test_frames_that_a_preempted_rollout_lacks_are_in_no_trajectory() -> None:
    factories = [make(length=99), make(length=4, delay=0.05)]
    given = options(frames_per_batch=20, preemptive_threshold=0.5, split_trajs=True)
    with MultiSyncCollector(factories, policy(), **given) as collector:
        frames = 0
        for _ in range(3):
            batch: Any = collector.next()
            mask = batch[MASK]
            assert mask[:, 0].all(), "each row is a trajectory"
            assert (batch[IDS][mask] >= 0).all()
            assert (batch["action"][mask] == 1).all()
            assert all(row[IDS][row[MASK]].unique().numel() == 1 for row in batch)
            frames += int(mask.sum())
        assert frames < 3 * 20


def test_splitting_leaves_padding_out() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [2, 3, -1, -1]])
    batch = TensorDict({"collector": {"traj_ids": ids, "mask": ids >= 0}, "value": ids.clone()}, [2, 4])
    split = split_trajectories(batch)
    assert split[MASK].tolist() == [[True, True], [True, True], [True, False], [True, False]]
    assert split["value"].tolist() == [[0, 0], [1, 1], [2, 0], [3, 0]]
    again = split_trajectories(split)
    assert (again == split).all()
    [whole] = split_trajectories(batch[1])["value"][:1].tolist()
    assert whole == [2]
