"""What a rollout looks like before there was one: a batch of zeros, for which the environment makes no step."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import set_interaction_type

from asyncsync.collectors.batch_layout import BatchLayout, empty_batch, layout_of, with_time
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.rollout.rollout import Rollouts
from asyncsync.collectors.rollout.step_entries import compact, keep_written, truncate


def fake_rollout(rollouts: Rollouts) -> TensorDictBase:
    """A rollout of zeros: as the latest one was, else as the environment's specs and one call of the policy tell.
    Raises TypeError: the environment has none of these."""
    layout = rollouts.buffer.layout
    batch = _from_specs(rollouts) if layout is None else _zeros(layout)
    truncate(batch[..., -1], rollouts._truncated_keys)
    return batch


def _zeros(layout: BatchLayout) -> TensorDictBase:
    return empty_batch(layout).zero_()


@torch.no_grad()
def _from_specs(rollouts: Rollouts) -> TensorDictBase:
    env, steps = rollouts.env, rollouts.arguments.steps
    step = rollouts.carrier.exclude("next").clone().zero_()
    after = environments.fake_next(env, step.exclude("collector"))
    # A policy that draws random numbers leaves those that come next as they are.
    with (
        torch.random.fork_rng(devices=[]),
        set_interaction_type(rollouts.arguments.exploration_type),
        rollouts._weights.holds(),
    ):
        rollouts._act(step, random=False)
    written = step.get("next", None)  # by a recurrent policy
    step.set("next", after)
    if written is not None:
        keep_written(written, after, step.copy(), rollouts._own_keys, rollouts._done_keys)
    if rollouts.arguments.track_policy_version:
        after.set("policy_version", step.get("policy_version"))
    compact(step, rollouts._repeated_keys)
    layout = layout_of(step, steps, rollouts.devices.storing)
    if layout is not None:
        return _zeros(layout)
    stacked: TensorDictBase = with_time(torch.stack([step.clone().zero_() for _ in range(steps)], step.ndim))
    return stacked
